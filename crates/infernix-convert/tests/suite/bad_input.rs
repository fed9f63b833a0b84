//! Bad checkpoints, outputs and options: each has an error that names what is wrong.

use std::path::Path;

use crate::common::{converted, copy, demo, options, run};
use crate::tensors::{Tensors, rebuilt};
use infernix_convert::{ConvertError, Silent, convert, plan};

const GATE: &str = "model.language_model.layers.2.mlp.experts.5.gate_proj";
const NORM: &str = "model.language_model.layers.0.attn_hyper_connection.hc_norm.weight";
const BUFFERS: &str = "model.language_model.layers.1.ple.ple_embedding";

/// The error of converting a changed demo.
fn error(change: impl FnOnce(&mut Tensors)) -> String {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("in");
    rebuilt(&demo(), &source, change);
    failed(&source)
}

fn failed(source: &Path) -> String {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("x.infernix");
    match converted(&options(source, "qwen3_8_flash_next_nvfp4", &out)) {
        Ok(_) => panic!("converted"),
        Err(e) => {
            assert!(!out.exists(), "nothing is published after {e}");
            e.to_string()
        }
    }
}

fn has(text: &str, needles: &[&str]) {
    for needle in needles {
        assert!(text.contains(needle), "{needle:?} is not in: {text}");
    }
}

#[test]
fn missing_and_extra_tensors_are_named() {
    has(&error(|t| drop(t.remove(NORM))), &["1 tensors are missing", NORM]);
    has(&error(|t| drop(t.remove(&format!("{GATE}.weight_scale")))), &[GATE, "weight_scale"]);
    has(&error(|t| drop(t.remove(&format!("{GATE}.input_scale")))), &[GATE, "input scale"]);
    let extra =
        error(|t| drop(t.insert("model.language_model.layers.0.surprise.weight".into(), t[NORM].clone())));
    has(&extra, &["belong to no parameter", "surprise"]);
    has(
        &error(|t| drop(t.remove("model.language_model.layers.2.mlp.experts.31.up_proj.weight"))),
        &["experts.31.up_proj"],
    );
    let shard = format!("{BUFFERS}.ngram_embedding.shard_7.weight");
    has(&error(|t| drop(t.remove(&shard))), &["shard_7"]);
}

#[test]
fn wrong_dtypes_and_shapes_are_named() {
    let wrong = error(|t| {
        let (_, shape, bytes) = t[NORM].clone();
        let doubled = [bytes.clone(), bytes].concat();
        t.insert(NORM.into(), ("F32".into(), shape, doubled));
    });
    has(&wrong, &[NORM, "bf16", "F32"]);
    let wrong = error(|t| t.get_mut(NORM).unwrap().1 = vec![4, 256]);
    has(&wrong, &[NORM, "[1024]", "[4, 256]"]);
    let wrong = error(|t| {
        let router = t.get_mut("model.language_model.layers.0.mlp.gate.weight").unwrap();
        router.1 = vec![router.1[1], router.1[0]];
    });
    has(&wrong, &["mlp.gate.weight", "[32, 256]", "[256, 32]"]);
}

#[test]
fn words_without_a_value_are_named_by_tensor_row_and_column() {
    let wrong = error(|t| t.get_mut(&format!("{GATE}.weight_scale")).unwrap().2[2 * 16 + 3] = 0x7F);
    has(&wrong, &["experts.5", "gate", "row 2", "column 48", "0x7f"]);
    for word in [0f32, f32::INFINITY, -1.0, f32::NAN] {
        let name = format!("{GATE}.weight_scale_2");
        let wrong = error(|t| t.get_mut(&name).unwrap().2 = word.to_le_bytes().to_vec());
        has(&wrong, &[&name, "positive finite"]);
    }
    let down = "mtp.layers.0.mlp.experts.3.down_proj";
    let wrong = error(|t| t.get_mut(&format!("{down}.weight")).unwrap().2[64 * 5 + 1] = 0x7F);
    has(&wrong, &[down, "row 5", "column 1"]);
    let table = format!("{BUFFERS}.ngram_embedding.shard_2.weight");
    let wrong = error(|t| t.get_mut(&table).unwrap().2[16 * 9 + 4] = 0xFF);
    has(&wrong, &[&table, "row 9", "column 4"]);
    // A NaN in a matrix that is re-quantized cannot be encoded.
    let fc = "mtp.fc_hidden.weight";
    let wrong = error(|t| t.get_mut(fc).unwrap().2[256 * 2 * 3 + 2..][..2].copy_from_slice(&[0xC0, 0x7F]));
    has(&wrong, &["mtp.fc_hidden", "row 3, column 1"]);
}

#[test]
fn nan_words_of_plain_tensors_are_kept_and_reported() {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("in");
    let name = "model.language_model.layers.0.linear_attn.in_proj_z.weight";
    rebuilt(&demo(), &source, |t| {
        t.get_mut(name).unwrap().2[256 * 2 * 7 + 10..][..2].copy_from_slice(&[0xC0, 0x7F])
    });
    let (_, outcome) =
        converted(&options(&source, "qwen3_8_flash_next_nvfp4", &dir.path().join("x.infernix"))).unwrap();
    has(&outcome.warnings.join("\n"), &[name, "row 7, column 5", "1 NaN words"]);
}

#[test]
fn table_buffers_must_equal_the_derivation() {
    let wrong = error(|t| t.get_mut(&format!("{BUFFERS}.ngram_heads_offsets")).unwrap().2[8] ^= 1);
    has(&wrong, &["ngram_heads_offsets[1]", "config.json"]);
    let wrong = error(|t| {
        let buffer = t.get_mut(&format!("{BUFFERS}.layer_multipliers")).unwrap();
        buffer.1 = vec![2];
        buffer.2.truncate(16);
    });
    has(&wrong, &["layer_multipliers", "[3]", "[2]"]);
}

#[test]
fn checkpoints_of_another_kind_are_told_apart() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| {
        let path = dir.path().join(name);
        copy(&demo(), &path);
        path
    };
    let truncated = at("truncated");
    let shard = truncated.join("model-00002-of-00002.safetensors");
    let length = std::fs::metadata(&shard).unwrap().len();
    std::fs::OpenOptions::new().write(true).open(&shard).unwrap().set_len(length - 100).unwrap();
    has(&failed(&truncated), &["model-00002-of-00002.safetensors", "truncated"]);

    let absent = at("absent");
    std::fs::remove_file(absent.join("model-fp8-mtp-ple.safetensors")).unwrap();
    has(&failed(&absent), &["model-fp8-mtp-ple.safetensors", "missing"]);

    let pointer = at("pointer");
    let text = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n";
    std::fs::write(pointer.join("model-00001-of-00002.safetensors"), text).unwrap();
    has(&failed(&pointer), &["model-00001-of-00002.safetensors", "git-lfs"]);

    let page = at("page");
    std::fs::write(page.join("tokenizer.json"), "<!DOCTYPE html><html>not found</html>").unwrap();
    has(&failed(&page), &["tokenizer.json"]);

    let outside = at("outside");
    let index = outside.join("model.safetensors.index.json");
    let text = std::fs::read_to_string(&index).unwrap().replacen("model-00001-of", "../model-00001-of", 1);
    std::fs::write(&index, text).unwrap();
    has(&failed(&outside), &["../model-00001-of"]);

    let twice = at("twice");
    std::fs::copy(
        twice.join("model-00001-of-00002.safetensors"),
        twice.join("model-00003-of-00003.safetensors"),
    )
    .unwrap();
    has(&failed(&twice), &["both", "model-00001-of-00002.safetensors", "model-00003-of-00003.safetensors"]);
}

#[test]
fn recipes_for_another_scheme_or_architecture_are_refused() {
    let Some(tiny) = crate::common::fixture("flash-tiny-orcarouter") else { return };
    has(&failed(&tiny), &["in_proj_qkv", "expected bf16", "FP8 per row", "recipe"]);
    // Experts without activation scales are not what the exact recipe serves.
    let weight_only = error(|t| t.retain(|name, _| !name.ends_with(".input_scale")));
    has(&weight_only, &["experts.0.gate_proj", "input scale", "weight-only"]);
    if let Some(dense) = crate::common::fixture("dense-demo-bf16") {
        has(&failed(&dense), &["qwen4_exp", "qwen3_5"]);
    }
}

#[test]
fn occupied_outputs_are_never_overwritten() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("x.infernix");
    for name in ["x.infernix", "x.infernix.ngram", "x.infernix.conversion.json"] {
        let path = dir.path().join(name);
        std::fs::write(&path, "mine").unwrap();
        let e = converted(&options(&demo(), "qwen3_8_flash_next_nvfp4", &out)).unwrap_err().to_string();
        has(&e, &[name, "already exists"]);
        assert_eq!(std::fs::read(&path).unwrap(), b"mine");
        std::fs::remove_file(&path).unwrap();
        infernix_artifact::clean(&out).unwrap();
    }
}

#[test]
fn headers_without_data_plan_but_do_not_convert() {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("in");
    copy(&demo(), &source);
    for entry in std::fs::read_dir(&source).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|e| e == "safetensors") {
            let bytes = std::fs::read(&path).unwrap();
            let n = u64::from_le_bytes(bytes[..8].try_into().unwrap());
            std::fs::write(&path, &bytes[..8 + n as usize]).unwrap();
        }
    }
    let mut o = options(&source, "qwen3_8_flash_next_nvfp4", &dir.path().join("x.infernix"));
    o.dry_run = true;
    let p = plan(&o).unwrap();
    has(&p.warnings.join("\n"), &["only their header"]);
    // Shapes decide the plan: the same as with data.
    let full = plan(&options(&demo(), "qwen3_8_flash_next_nvfp4", &dir.path().join("x.infernix"))).unwrap();
    assert_eq!(p.artifact_bytes(), full.artifact_bytes());
    assert!(matches!(convert(&p, &Silent, &run()), Err(ConvertError::Checkpoint(_))));
}

#[test]
fn a_volume_of_another_table_is_refused_in_words() {
    let Some(other) = crate::common::fixture("flash-tiny-fp8") else { return };
    let dir = tempfile::tempdir().unwrap();
    converted(&options(&other, "auto", &dir.path().join("a.infernix"))).unwrap();
    let mut o = options(&demo(), "auto", &dir.path().join("b.infernix"));
    o.ngram = infernix_convert::NgramTarget::Reuse(dir.path().join("a.infernix.ngram"));
    let error = converted(&o).unwrap_err().to_string();
    has(&error, &["8320 rows of 16 bytes", "129280 rows of 16 bytes", "another table"]);
}

#[cfg(unix)]
#[test]
fn shards_that_are_links_to_nowhere_are_told_from_absent_ones() {
    let dir = tempfile::tempdir().unwrap();
    for (target, word) in
        [("model-00002-of-00002.safetensors", "a link to itself"), ("gone", "a link to gone")]
    {
        let source = dir.path().join(word);
        copy(&demo(), &source);
        let shard = source.join("model-00002-of-00002.safetensors");
        std::fs::remove_file(&shard).unwrap();
        std::os::unix::fs::symlink(target, &shard).unwrap();
        has(&failed(&source), &["1 of 3 shards", "model-00002-of-00002.safetensors", word]);
    }
}
