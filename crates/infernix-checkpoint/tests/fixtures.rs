//! Every safetensors test model opens and resolves to what its README states; decoded values equal the
//! reference's bit for bit.

mod common;

use std::collections::BTreeMap;

use infernix_checkpoint::{Checkpoint, Dtype, OpenOptions, Scheme, SourceTensor};

fn open(name: &str) -> Option<Checkpoint> {
    let c = Checkpoint::open(&common::model(name)?, &OpenOptions::default())
        .unwrap_or_else(|e| panic!("{name}: {e}"));
    assert_eq!(c.warnings(), [] as [String; 0], "{name}");
    assert!(c.unindexed().is_empty() && c.ignored().is_empty() && c.data_present());
    c.config().expect("config.json");
    Some(c)
}

/// Weights per scheme.
fn count(c: &Checkpoint) -> BTreeMap<String, usize> {
    let all = c.resolve_all().unwrap_or_else(|e| panic!("{}: {e}", c.path().display()));
    // Every stored tensor is a weight or a plane of one.
    let mut used: Vec<&str> = all.iter().flat_map(|t| t.planes().iter().map(|(_, p)| &*p.name)).collect();
    used.sort_unstable();
    used.dedup();
    assert_eq!(used.len(), c.tensors().len());
    let mut counts = BTreeMap::new();
    for t in &all {
        *counts.entry(t.scheme().to_string()).or_insert(0) += 1;
    }
    counts
}

fn expect(name: &str, schemes: &[(&str, usize)]) {
    let Some(c) = open(name) else { return };
    let expected: BTreeMap<String, usize> = schemes.iter().map(|(s, n)| (s.to_string(), *n)).collect();
    assert_eq!(count(&c), expected, "{name}");
    assert_eq!(
        c.cross_check().expect("configs").iter().map(|w| w.to_string()).collect::<Vec<_>>(),
        [] as [String; 0],
        "{name}"
    );
}

// Counts per encoding are those of each model's report.json, plus tensors that only other commands use
// (vision towers, drafters).

#[test]
fn flash_demo_bf16() {
    expect("flash-demo-bf16", &[("BF16", 275), ("I64", 3)]);
}

#[test]
fn flash_demo_nvfp4() {
    expect(
        "flash-demo-nvfp4",
        &[
            // 237 read by the reference, the table's shared scale counts with its parts.
            ("BF16", 237),
            ("I64", 3),
            ("NVFP4 with a multiplier, input scale", 768),
            ("FP8 per 128x128 block (BF16 scales)", 96),
            ("FP8 per tensor (BF16 scale)", 8),
        ],
    );
}

#[test]
fn dense_demo_bf16() {
    expect("dense-demo-bf16", &[("BF16", 145)]);
}

#[test]
fn dense_demo_quasar() {
    expect("dense-demo-quasar", &[("BF16", 83), ("NVFP4 with a divisor, input scale", 62)]);
}

#[test]
fn dense_demo_nvidia() {
    expect(
        "dense-demo-nvidia",
        &[
            ("BF16", 94),
            ("NVFP4 with a multiplier, input scale", 25),
            ("FP8 per tensor (F32 scale), input scale", 26),
        ],
    );
}

#[test]
fn dense_demo_drafters() {
    expect("dense-demo-dflash", &[("BF16", 36)]);
    expect("dense-demo-dflash2", &[("BF16", 51)]);
}

#[test]
fn flash_tiny_fp8() {
    expect(
        "flash-tiny-fp8",
        &[
            ("BF16", 149),
            ("I64", 3),
            ("FP8 per 128x128 block (F32 scales)", 192),
            ("FP8 per 128x128 block (BF16 scales)", 48),
            ("FP8 per tensor (BF16 scale)", 4),
        ],
    );
}

#[test]
fn flash_tiny_fp4local() {
    // 192 expert matrices and 4 parts of the table, which share one multiplier and have no input scale.
    expect(
        "flash-tiny-fp4local",
        &[
            ("BF16", 88),
            ("I64", 3),
            ("MXFP8", 32),
            ("NVFP4 with a multiplier", 4),
            ("NVFP4 with a multiplier, input scale", 192),
        ],
    );
}

#[test]
fn flash_tiny_orcarouter() {
    expect(
        "flash-tiny-orcarouter",
        &[("BF16", 130), ("I64", 3), ("FP8 per row (BF16 scales)", 25), ("NVFP4 with a divisor", 192)],
    );
}

#[test]
fn fused_and_per_expert_matrices_are_both_visible() {
    if let Some(c) = open("flash-demo-bf16") {
        let t = c
            .resolve("model.language_model.layers.0.mlp.experts.gate_up_proj")
            .expect("resolves")
            .expect("there");
        assert_eq!((t.shape(), t.rows(), t.row_len()), (&[32, 128, 256][..], 32 * 128, 256));
        assert_eq!(t.scheme(), Scheme::Plain(Dtype::Bf16));
    }
    if let Some(c) = open("flash-demo-nvfp4") {
        let name = "model.language_model.layers.0.mlp.experts.31.gate_proj";
        for name in [name.to_owned(), format!("{name}.weight")] {
            let t = c.resolve(&name).expect("resolves").expect("there");
            assert_eq!(
                (t.name(), t.shape()),
                ("model.language_model.layers.0.mlp.experts.31.gate_proj", &[64, 256][..])
            );
        }
    }
}

fn decode(t: &SourceTensor<'_>) -> Vec<f32> {
    let mut out = vec![f32::NAN; (t.rows() * t.row_len()) as usize];
    t.decode_rows_f32(0..t.rows(), &mut out).unwrap_or_else(|e| panic!("{e}"));
    // Any split of the rows gives the same values.
    let (rows, k) = (t.rows(), t.row_len() as usize);
    let mut parts = vec![f32::NAN; out.len()];
    let mut at = 0;
    for step in [1, 2, 5, 129].into_iter().cycle() {
        if at == rows {
            break;
        }
        let end = (at + step).min(rows);
        t.decode_rows_f32(at..end, &mut parts[at as usize * k..end as usize * k]).expect("part");
        at = end;
    }
    assert!(out.iter().zip(&parts).all(|(a, b)| a.to_bits() == b.to_bits()), "{}", t.name());
    out
}

#[test]
fn decoded_matrices_and_table_rows_equal_the_reference_bit_for_bit() {
    let (Some(c), Some(refs)) =
        (open("flash-demo-nvfp4"), common::model("refs/flash-demo-nvfp4/ref.safetensors"))
    else {
        return;
    };
    let any = OpenOptions { allow_missing_config: true, ..OpenOptions::default() };
    let refs = Checkpoint::open(&refs, &any).expect("reference outputs");
    let mut compared = 0;
    for t in refs.tensors().filter(|t| t.name.starts_with("dequant.layers.")) {
        let name = format!("model.language_model.{}", &t.name["dequant.".len()..]);
        let ours = decode(&c.resolve(&name).expect("resolves").expect("there"));
        let theirs = decode(&refs.resolve(&t.name).expect("resolves").expect("there"));
        assert!(ours.iter().zip(&theirs).all(|(a, b)| a.to_bits() == b.to_bits()), "{name}");
        assert_eq!(ours.len(), theirs.len());
        compared += 1;
    }
    assert_eq!(compared, 3);
    let ids = refs.read_all(refs.get("ngram_row_ids").expect("ids")).expect("read");
    let rows = decode(&refs.resolve("dequant.ngram_rows").expect("resolves").expect("there"));
    for (id, row) in ids.chunks_exact(8).zip(rows.chunks_exact(16)) {
        let id = u64::from_le_bytes(id.try_into().expect("8 bytes"));
        let table = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding";
        let part = c.resolve(&format!("{table}.shard_{}", id / 16160)).expect("resolves").expect("there");
        let mut ours = [f32::NAN; 16];
        part.decode_rows_f32(id % 16160..id % 16160 + 1, &mut ours).expect("row");
        assert!(ours.iter().zip(row).all(|(a, b)| a.to_bits() == b.to_bits()), "row {id}");
    }
}

#[test]
fn every_weight_of_every_model_decodes_to_finite_values() {
    for name in [
        "flash-demo-nvfp4",
        "dense-demo-quasar",
        "dense-demo-nvidia",
        "flash-tiny-fp8",
        "flash-tiny-fp4local",
        "flash-tiny-orcarouter",
    ] {
        let Some(c) = open(name) else { continue };
        for t in c.resolve_all().expect("resolves") {
            if t.scheme() == Scheme::Plain(Dtype::I64) {
                continue;
            }
            let k = t.row_len() as usize;
            let rows = t.rows().min(300);
            let mut out = vec![f32::NAN; rows as usize * k];
            t.decode_rows_f32(0..rows, &mut out).unwrap_or_else(|e| panic!("{name}: {e}"));
            assert!(out.iter().all(|v| v.is_finite()), "{name}: {}", t.name());
            t.global_scale().expect("legal");
            t.input_scale().expect("legal");
        }
    }
}

#[test]
fn same_weights_in_both_nvfp4_conventions_are_told_apart() {
    let Some(c) = open("dense-demo-quasar") else { return };
    let t = c.resolve("model.language_model.layers.0.mlp.gate_proj").expect("resolves").expect("there");
    assert_eq!(t.scheme(), Scheme::Nvfp4Divisor { input_scale: true });
    let d = t.global_scale().expect("read").expect("there");
    assert!(d > 1.0, "a divisor is large: {d}");
}

#[test]
fn header_digests_and_numeric_order_identify_the_shards() {
    let Some(c) = open("flash-demo-nvfp4") else { return };
    let names: Vec<_> = c.shards().iter().map(|s| s.name.as_str()).collect();
    assert_eq!(
        names,
        [
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model-fp8-mtp-ple.safetensors"
        ]
    );
    for s in c.shards() {
        let bytes = std::fs::read(c.folder().join(&s.name)).expect("read");
        let len = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize;
        assert_eq!(s.header_blake3, *blake3::hash(&bytes[..8 + len]).as_bytes());
        assert_eq!(s.len, bytes.len() as u64);
        assert_eq!(s.sha256, None);
    }
    // Reads equal the file's bytes.
    for t in c.tensors().step_by(97) {
        let bytes = std::fs::read(c.folder().join(&c.shard_of(t).name)).expect("read");
        assert_eq!(c.read_all(t).expect("read"), bytes[t.offset as usize..(t.offset + t.bytes) as usize]);
    }
}
