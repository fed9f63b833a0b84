//! Plans from headers alone: the published sizes and counts of the real geometry.

use std::process::Command;

use crate::common::{demo, options, shared};
use infernix_convert::{Method, Plan, Proof, ProposalOptions, Ranking, plan};

fn headers(dir: &std::path::Path) -> bool {
    let Some(shared) = shared() else {
        eprintln!("skipped: shared/tools/real_headers.py is not here");
        return false;
    };
    let run = Command::new("python3").arg(shared.join("tools/real_headers.py")).arg(dir).arg(demo()).output();
    match run {
        Ok(out) if out.status.success() => true,
        other => {
            eprintln!("skipped: python3 cannot write the headers: {other:?}");
            false
        }
    }
}

fn parameters(plan: &Plan, proof: impl Fn(Proof) -> bool) -> usize {
    let special = |name: &&String| !name.ends_with("/experts") && !name.ends_with("expert_input_scales");
    plan.objects
        .iter()
        .filter(|o| proof(o.proof))
        .flat_map(|o| &o.parameters)
        .filter(special)
        .filter(|n| !n.contains("/experts/"))
        .collect::<std::collections::BTreeSet<_>>()
        .len()
}

fn within(found: u64, expected: u64) -> bool {
    found.abs_diff(expected) * 1000 <= expected
}

#[test]
fn plans_from_real_headers_have_the_published_sizes() {
    let dir = tempfile::tempdir().unwrap();
    if !headers(dir.path()) {
        return;
    }
    let make = |recipe: &str, proposal: Option<u64>| {
        let mut o = options(dir.path(), recipe, &dir.path().join("x.infernix"));
        o.dry_run = true;
        o.proposal = proposal.map(|rows| ProposalOptions { rows: Some(rows), ranking: Ranking::Absent });
        let started = std::time::Instant::now();
        let plan = plan(&o).unwrap();
        eprintln!("{recipe}: {} bytes, planned in {:?}", plan.artifact_bytes(), started.elapsed());
        plan
    };
    let with = make("qwen3_8_flash_next_nvfp4_dense8", Some(131_072));
    assert!(within(with.artifact_bytes(), 76_867_265_280), "{}", with.artifact_bytes());
    assert_eq!(with.files().len(), 3);
    assert_eq!(with.files()[0].bytes, 32_000_000_000);
    let volume = with.ngram.as_ref().unwrap();
    assert_eq!((volume.rows, volume.bytes), (320_001_536, 52_429_058_048));
    assert!(with.missing.is_empty());
    assert!(with.warnings.iter().any(|w| w.contains("tokens")), "{:?}", with.warnings);
    assert!(with.memory_needed_bytes() < 1 << 30, "{}", with.memory_needed_bytes());

    let dense8 = make("qwen3_8_flash_next_nvfp4_dense8", None);
    assert!(within(dense8.artifact_bytes(), 76_674_756_000), "{}", dense8.artifact_bytes());
    assert_eq!(parameters(&dense8, |p| p == Proof::Requantized), 629 + 20);
    assert_eq!(parameters(&dense8, |p| p != Proof::Requantized), 987);
    let q4: Vec<_> = dense8.objects.iter().filter(|o| o.method == Method::Mse).collect();
    assert_eq!(
        q4.iter().map(|o| o.shape.clone()).collect::<Vec<_>>(),
        [vec![512 * 1280, 2560], vec![512 * 2560, 640]]
    );

    let exact = make("qwen3_8_flash_next_nvfp4", None);
    assert_eq!(parameters(&exact, |p| p == Proof::Requantized), 20);
    assert_eq!(parameters(&exact, |p| p != Proof::Requantized), 1616);
    let banks: u64 = exact.objects.iter().filter(|o| o.shape == [512, 2560, 640]).map(|o| o.shape[0]).sum();
    assert_eq!(banks, 24_576);
    // The reconstruction of the published payload, without its resources.
    assert!(within(exact.artifact_bytes(), 80_356_996_608 - 178_782_208), "{}", exact.artifact_bytes());
}

/// Tensors of a checkpoint folder by name: dtype and shape.
type Headers = std::collections::BTreeMap<String, (String, Vec<u64>)>;

/// Name, dtype, shape.
type Tensor = (String, &'static str, Vec<u64>);

/// What stands in place of a tensor of that name, dtype and shape.
type Change<'c> = &'c dyn Fn(&str, &str, &[u64]) -> Vec<Tensor>;

/// The real headers as another release has them, in one file without data. `change` maps a tensor to those in its place.
fn release(from: &std::path::Path, to: &std::path::Path, change: Change<'_>) {
    let mut all = Headers::new();
    for entry in std::fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|e| e != "safetensors") {
            continue;
        }
        let bytes = std::fs::read(&path).unwrap();
        let header: serde_json::Value = serde_json::from_slice(&bytes[8..]).unwrap();
        for (name, t) in header.as_object().unwrap() {
            let shape: Vec<u64> =
                t["shape"].as_array().unwrap().iter().map(|d| d.as_u64().unwrap()).collect();
            for (name, dtype, shape) in change(name, t["dtype"].as_str().unwrap(), &shape) {
                all.insert(name, (dtype.to_owned(), shape));
            }
        }
    }
    let mut text = String::from("{");
    let mut at = 0;
    for (i, (name, (dtype, shape))) in all.iter().enumerate() {
        let size = match dtype.as_str() {
            "BF16" => 2,
            "F32" => 4,
            "I64" => 8,
            _ => 1,
        };
        let end = at + size * shape.iter().product::<u64>();
        let comma = if i > 0 { "," } else { "" };
        text += &format!(
            "{comma}\"{name}\":{{\"dtype\":\"{dtype}\",\"shape\":{shape:?},\"data_offsets\":[{at},{end}]}}"
        );
        at = end;
    }
    text.push('}');
    std::fs::create_dir_all(to).unwrap();
    let bytes = [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
    std::fs::write(to.join("model.safetensors"), bytes).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if path.extension().is_some_and(|e| e == "json" || e == "jinja")
            && !name.contains("index")
            && !name.contains("quant")
        {
            std::fs::copy(&path, to.join(name)).unwrap();
        }
    }
}

/// Tensors as they are.
fn same(name: &str, dtype: &str, shape: &[u64]) -> Vec<Tensor> {
    let known = ["BF16", "F32", "U8", "F8_E4M3", "I64"].into_iter().find(|d| *d == dtype);
    vec![(name.to_owned(), known.unwrap(), shape.to_vec())]
}

const TABLE: &str = ".ngram_embedding.";

#[test]
fn plans_of_the_other_releases_have_their_published_sizes() {
    let dir = tempfile::tempdir().unwrap();
    if !headers(dir.path()) {
        return;
    }
    let make = |folder: &std::path::Path, recipe: &str, proposal: bool| {
        let mut o = options(folder, recipe, &folder.join("x.infernix"));
        o.dry_run = true;
        o.proposal = proposal.then_some(ProposalOptions { rows: Some(131_072), ranking: Ranking::Absent });
        let plan = plan(&o).unwrap_or_else(|e| panic!("{recipe}: {e}"));
        eprintln!("{recipe}: {} bytes", plan.artifact_bytes());
        assert!(plan.missing.is_empty(), "{recipe}: {:?}", &plan.missing[..plan.missing.len().min(8)]);
        plan
    };
    // compressed-tensors, weight-only experts, FP8 rows, a BF16 table and a fused BF16 drafter.
    let weight_only = dir.path().join("orcarouter");
    let rows = ["in_proj_qkv", "in_proj_z", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj"];
    release(dir.path(), &weight_only, &|name, dtype, shape| {
        let text = name.starts_with("model.language_model.");
        if name.starts_with("mtp.layers.0.mlp.experts.") {
            return if name == "mtp.layers.0.mlp.experts.0.gate_proj.weight" {
                let p = "mtp.layers.0.mlp.experts";
                vec![
                    (format!("{p}.gate_up_proj"), "BF16", vec![512, 1280, 2560]),
                    (format!("{p}.down_proj"), "BF16", vec![512, 2560, 640]),
                ]
            } else {
                Vec::new()
            };
        }
        if name.contains(TABLE) {
            return if name.ends_with("weight_scale") { Vec::new() } else { same(name, "BF16", shape) };
        }
        if name.contains(".mlp.experts.") {
            return match name.rsplit('.').next() {
                Some("weight") => same(&name.replace(".weight", ".weight_packed"), dtype, shape),
                Some("weight_scale_2") => {
                    same(&name.replace("weight_scale_2", "weight_global_scale"), dtype, shape)
                }
                Some("input_scale") => Vec::new(),
                _ => same(name, dtype, shape),
            };
        }
        let row = text
            && (rows.iter().any(|r| name.ends_with(&format!(".{r}.weight")))
                || name.contains(".shared_expert."));
        if row {
            let scale = name.replace(".weight", ".weight_scale");
            return vec![(name.to_owned(), "F8_E4M3", shape.to_vec()), (scale, "BF16", vec![shape[0], 1])];
        }
        same(name, dtype, shape)
    });
    let plan = make(&weight_only, "qwen3_8_flash_next_nvfp4_orcarouter", true);
    assert!(within(plan.artifact_bytes(), 76_302_074_624), "{}", plan.artifact_bytes());
    assert_eq!(
        parameters(&plan, |p| p == Proof::Requantized),
        293 + 20 + 2,
        "and the table\'s scale and the proposal head"
    );
    assert_eq!(plan.ngram.as_ref().unwrap().bytes, 52_429_058_048);
    let bf16 = make(&weight_only, "auto", false);
    assert_eq!(bf16.ngram.as_ref().unwrap().bytes, 109_227_196_416);

    // Block FP8 experts.
    let fp8 = dir.path().join("fp8");
    release(dir.path(), &fp8, &|name, dtype, shape| {
        if name.contains(".mlp.experts.") && name.starts_with("model.") {
            return match name.rsplit('.').next() {
                Some("weight") => {
                    let (n, k) = (shape[0], 2 * shape[1]);
                    let scale = name.replace(".weight", ".weight_scale_inv");
                    vec![
                        (name.to_owned(), "F8_E4M3", vec![n, k]),
                        (scale, "F32", vec![n.div_ceil(128), k.div_ceil(128)]),
                    ]
                }
                _ => Vec::new(),
            };
        }
        same(name, dtype, shape)
    });
    let plan = make(&fp8, "qwen3_8_flash_next_fp8", false);
    // 112.6 GiB of experts.
    assert_eq!(plan.classes["moe.experts"].bytes, 48 * 512 * 4_919_296);

    // MXFP8 projections and an NVFP4 table, no drafter.
    let local = dir.path().join("fp4local");
    let mx = [&rows[..], &["in_proj_a", "in_proj_b", "index_qk_proj"]].concat();
    release(dir.path(), &local, &|name, dtype, shape| {
        if name.starts_with("mtp.") {
            return Vec::new();
        }
        if name.contains(TABLE) {
            let scale = name.replace(".weight", ".weight_scale");
            return if name.ends_with("ngram_embedding.weight_scale") {
                vec![(name.replace("weight_scale", "weight_scale_2"), "F32", vec![])]
            } else {
                vec![(name.to_owned(), "U8", vec![shape[0], 80]), (scale, "F8_E4M3", vec![shape[0], 10])]
            };
        }
        let text = name.starts_with("model.language_model.");
        let is =
            mx.iter().any(|r| name.ends_with(&format!(".{r}.weight"))) || name.contains(".shared_expert.");
        if text && is {
            let scale = name.replace(".weight", ".weight_scale");
            return vec![
                (name.to_owned(), "F8_E4M3", shape.to_vec()),
                (scale, "U8", vec![shape[0], shape[1] / 32]),
            ];
        }
        same(name, dtype, shape)
    });
    let plan = make(&local, "qwen3_8_flash_next_fp4_local", false);
    assert_eq!(plan.ngram.as_ref().unwrap().bytes, 29_127_258_112);
    assert_eq!(plan.classes["moe.experts"].bytes, 48 * 1_415_583_744);
}
