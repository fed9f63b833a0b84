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

/// A GGUF file that is all header: text, integers, lists of integers, tensors with their types.
fn gguf_header(
    texts: &[(&str, &str)],
    numbers: &[(&str, u32)],
    floats: &[(&str, f32)],
    lists: &[(&str, u32, Vec<u64>)],
    tensors: &[(String, Vec<u64>, infernix_formats::ggml::GgmlType)],
) -> Vec<u8> {
    let text = |s: &str| [&(s.len() as u64).to_le_bytes()[..], s.as_bytes()].concat();
    let mut out = b"GGUF\x03\0\0\0".to_vec();
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend(((texts.len() + numbers.len() + floats.len() + lists.len()) as u64).to_le_bytes());
    let mut pair =
        |key: &str, ty: u32, value: &[u8]| out.extend([&text(key)[..], &ty.to_le_bytes(), value].concat());
    texts.iter().for_each(|(k, v)| pair(k, 8, &text(v)));
    // Numbers of parts are 16 bits wide.
    numbers.iter().for_each(|(k, v)| match *k == "split.no" || *k == "split.count" {
        true => pair(k, 2, &(*v as u16).to_le_bytes()),
        false => pair(k, 4, &v.to_le_bytes()),
    });
    floats.iter().for_each(|(k, v)| pair(k, 6, &v.to_le_bytes()));
    for (k, ty, list) in lists {
        let mut value = [&ty.to_le_bytes()[..], &(list.len() as u64).to_le_bytes()].concat();
        for v in list {
            value.extend(&v.to_le_bytes()[..if *ty == 10 { 8 } else { 4 }]);
        }
        pair(k, 9, &value);
    }
    let mut offset = 0u64;
    for (name, shape, ty) in tensors {
        out.extend(text(name));
        out.extend((shape.len() as u32).to_le_bytes());
        shape.iter().rev().for_each(|d| out.extend(d.to_le_bytes()));
        out.extend(ty.id().to_le_bytes());
        out.extend(offset.to_le_bytes());
        offset += ty.tensor_bytes(shape).unwrap().next_multiple_of(32);
    }
    out
}

/// The GSQ-RCO release: IQ3_S experts with IQ4_NL downs, 6- and 8-bit projections, an IQ4_NL table in a part of its own.
fn gsq_rco(folder: &std::path::Path) {
    use infernix_formats::ggml::GgmlType::{Bf16, F32, Iq3S, Iq4Nl, Q6K, Q8_0};
    let mut t: Vec<(String, Vec<u64>, infernix_formats::ggml::GgmlType)> = Vec::new();
    let mut add = |name: String, shape: &[u64], ty| t.push((name, shape.to_vec(), ty));
    let (h, w) = (2560u64, 10240u64);
    add("token_embd.weight".into(), &[248_320, h], Q8_0);
    add("output.weight".into(), &[248_320, h], Q6K);
    let mixer = |add: &mut dyn FnMut(String, &[u64], _), p: &str| {
        add(format!("{p}norm.weight"), &[w], F32);
        add(format!("{p}down.weight"), &[320, w], Bf16);
        add(format!("{p}up.weight"), &[w, 320], Bf16);
    };
    mixer(&mut add, "output_hc_");
    for n in 0..48 {
        let b = format!("blk.{n}.");
        for hc in ["hc_attn_", "hc_ffn_"] {
            mixer(&mut add, &format!("{b}{hc}"));
            add(format!("{b}{hc}inject.weight"), &[4, w], Bf16);
        }
        if n % 4 == 3 {
            for (name, rows, k) in
                [("attn_q", 12288, h), ("attn_k", 512, h), ("attn_v", 512, h), ("attn_output", h, 6144)]
            {
                add(format!("{b}{name}.weight"), &[rows, k], Q6K);
            }
            add(format!("{b}indexer.q_proj.weight"), &[512, h], Bf16);
            add(format!("{b}indexer.k_proj.weight"), &[128, h], Bf16);
            for (name, n) in
                [("attn_q_norm", 256), ("attn_k_norm", 256), ("indexer.q_norm", 128), ("indexer.k_norm", 128)]
            {
                add(format!("{b}{name}.weight"), &[n], F32);
            }
        } else {
            add(format!("{b}attn_qkv.weight"), &[10240, h], Q6K);
            add(format!("{b}attn_gate.weight"), &[6144, h], Q6K);
            add(format!("{b}ssm_out.weight"), &[h, 6144], Q8_0);
            add(format!("{b}ssm_alpha.weight"), &[48, h], Bf16);
            add(format!("{b}ssm_beta.weight"), &[48, h], Bf16);
            add(format!("{b}ssm_a"), &[48], F32);
            add(format!("{b}ssm_dt.bias"), &[48], F32);
            add(format!("{b}ssm_conv1d.weight"), &[10240, 4], F32);
            add(format!("{b}ssm_norm.weight"), &[128], F32);
        }
        add(format!("{b}ffn_gate_inp.weight"), &[512, h], F32);
        add(format!("{b}ffn_gate_inp_shexp.weight"), &[h], F32);
        for (name, n, k) in [("gate", 640, h), ("up", 640, h), ("down", h, 640)] {
            add(format!("{b}ffn_{name}_shexp.weight"), &[n, k], Q8_0);
            let ty = if name == "down" { Iq4Nl } else { Iq3S };
            add(format!("{b}ffn_{name}_exps.weight"), &[512, n, k], ty);
        }
    }
    for (name, shape) in [("ple_key", vec![w, h]), ("ple_value", vec![h, h]), ("ple_conv1d", vec![w, 4])] {
        add(format!("blk.1.{name}.weight"), &shape, Bf16);
    }
    for name in ["ple_norm_key", "ple_norm_query", "ple_norm_conv"] {
        add(format!("blk.1.{name}.weight"), &[w], F32);
    }
    let m = "qwen4exp.";
    let number = |k: &str, v: u32| (format!("{m}{k}"), v);
    let numbers: Vec<(String, u32)> = [
        ("block_count", 48),
        ("context_length", 262_144),
        ("embedding_length", 2560),
        ("attention.head_count", 24),
        ("attention.head_count_kv", 2),
        ("attention.key_length", 256),
        ("attention.value_length", 256),
        ("expert_count", 512),
        ("expert_used_count", 10),
        ("expert_feed_forward_length", 640),
        ("expert_shared_feed_forward_length", 640),
        ("ssm.conv_kernel", 4),
        ("ssm.state_size", 128),
        ("ssm.group_count", 16),
        ("ssm.time_step_rank", 48),
        ("ssm.inner_size", 6144),
        ("rope.dimension_count", 64),
        ("hyper_connection.count", 4),
        ("hyper_connection.low_rank", 320),
        ("attention.indexer.head_count", 4),
        ("attention.indexer.key_length", 128),
        ("attention.indexer.top_k", 2048),
        ("ple.ngram_size", 3),
        ("ple.heads_per_ngram", 8),
        ("ple.conv_kernel", 4),
        ("ple.eos_token_id", 248_044),
        ("embedding_length_per_layer_input", 160),
    ]
    .map(|(k, v)| number(k, v))
    .to_vec();
    let mut numbers: Vec<(&str, u32)> = numbers.iter().map(|(k, v)| (k.as_str(), *v)).collect();
    let sizes: Vec<u64> = [3, 23, 33, 47, 59, 63, 69, 77, 81, 93, 107, 147, 153, 159, 161, 171]
        .map(|n| 20_000_000 + n)
        .to_vec();
    let offsets: Vec<u64> = (0..16).map(|i| sizes[..i].iter().sum()).collect();
    let lists = [
        ("qwen4exp.rope.dimension_sections", 5, vec![11, 11, 10, 0]),
        ("qwen4exp.attention.compress_ratios", 5, (0..48).map(|n| if n % 4 == 3 { 4 } else { 0 }).collect()),
        ("qwen4exp.ple.layers", 5, vec![1]),
        ("qwen4exp.ple.layer_multipliers", 10, vec![23703573157769, 20109073645365, 8052911324071]),
        ("qwen4exp.ple.head_offsets", 10, offsets),
        ("qwen4exp.ple.head_vocab_sizes", 10, sizes),
    ];
    let total = t.len() as u32 + 1;
    let split = |no: u32| [("split.no", no), ("split.count", 2)];
    numbers.extend(split(0));
    let floats = [("qwen4exp.rope.freq_base", 1e7f32), ("qwen4exp.attention.layer_norm_rms_epsilon", 1e-6)];
    let table = vec![("per_layer_token_embd.weight".to_owned(), vec![320_001_536u64, 160], Iq4Nl)];
    for (no, texts, floats, lists, tensors) in [
        (
            0,
            &[("general.architecture", "qwen4exp"), ("general.type", "model")][..],
            &floats[..],
            &lists[..],
            &t,
        ),
        (1, &[], &[], &[], &table),
    ] {
        let own: Vec<(&str, u32)> = if no == 0 { numbers.clone() } else { split(1).to_vec() }
            .into_iter()
            .chain([("split.tensors.count", total)])
            .collect();
        let bytes = gguf_header(texts, &own, floats, lists, tensors);
        std::fs::write(folder.join(format!("flash-IQ3_S-{:05}-of-00002.gguf", no + 1)), bytes).unwrap();
    }
}

#[test]
fn the_gguf_release_is_planned_from_real_headers() {
    let dir = tempfile::tempdir().unwrap();
    let real = dir.path().join("real");
    if !headers(&real) {
        return;
    }
    let gguf = dir.path().join("gguf");
    std::fs::create_dir(&gguf).unwrap();
    gsq_rco(&gguf);
    let mut o = options(&gguf, "qwen3_8_flash_next_iq3_s", &dir.path().join("x.infernix"));
    o.dry_run = true;
    for role in ["mtp", "vision", "resources"] {
        o.sources.push(infernix_convert::SourceSpec::new(role, &real));
    }
    let plan = plan(&o).unwrap();
    assert!(plan.missing.is_empty(), "{:?}", plan.missing);
    // gate and up 704,000 bytes each, down 921,600, in records of whole 4 KiB.
    assert_eq!(plan.classes["moe.experts"].bytes, 48 * 512 * 2_330_624);
    let volume = plan.ngram.as_ref().unwrap();
    assert_eq!((volume.rows, volume.bytes), (320_001_536, 29_127_258_112));
    let names: Vec<_> = plan.components.iter().map(|c| c.name()).collect();
    assert_eq!(names, ["text", "mtp", "vision"]);
    assert_eq!(plan.default_expert_activation, 16);
    assert!(plan.memory_needed_bytes() < 1 << 30);
}
