//! Damaged, incomplete and hostile checkpoints: one error that names the culprit, and nothing left behind.

mod common;

use common::{Copy, RECIPE, SECOND, SHARD, TABLE, convert, demo, finish, names, program, scratch};
use serde_json::json;
use std::fs;

const HEAD: &str = "lm_head.weight";
const DOWN: &str = "model.language_model.layers.0.mlp.experts.0.down_proj";
const MULTIPLIERS: &str = "model.language_model.layers.1.ple.ple_embedding.layer_multipliers";

/// Converts a broken copy, expects exit code 1 with these words, and no file of the output.
#[track_caller]
fn refused(words: &[&str], spoil: impl FnOnce(&Copy)) {
    let dir = scratch();
    let copy = Copy::new(dir.path(), "checkpoint");
    spoil(&copy);
    convert(&copy.folder, &dir.path().join("out.infernix"), &[]).fails(1, words);
    let left: Vec<String> =
        names(dir.path()).into_iter().filter(|n| n != "checkpoint" && n != "out.infernix.partial").collect();
    assert!(left.is_empty(), "published in spite of the error: {left:?}");
}

#[test]
fn truncated_shards() {
    refused(&[SHARD, "truncated", "fetch"], |c| c.put(SHARD, &c.bytes(SHARD)[..5_000_000]));
    refused(&[SHARD, "truncated"], |c| c.put(SHARD, &c.bytes(SHARD)[..100]));
    refused(&[SHARD, "truncated"], |c| c.put(SHARD, &c.bytes(SHARD)[..4]));
    refused(&[SHARD, "truncated"], |c| c.put(SHARD, []));
}

#[test]
fn missing_shard_and_folder_in_its_place() {
    refused(&[SHARD, "missing"], |c| c.remove(SHARD));
    refused(&[SHARD, "folder"], |c| {
        c.remove(SHARD);
        fs::create_dir(c.folder.join(SHARD)).expect("a folder");
    });
}

#[test]
fn missing_tensor() {
    let name = format!("{DOWN}.weight_scale");
    refused(&[&name], |c| {
        c.shard(SHARD, |s| drop(s.tensors.remove(&name)));
        c.index(|i| drop(i.remove(&name)));
    });
    // The index promises what the shard lacks.
    refused(&[&name, SHARD], |c| c.shard(SHARD, |s| drop(s.tensors.remove(&name))));
    refused(&["lm_head"], |c| {
        c.shard(SHARD, |s| drop(s.tensors.remove(HEAD)));
        c.index(|i| drop(i.remove(HEAD)));
    });
}

#[test]
fn extra_tensor() {
    let name = "model.language_model.layers.0.surprise.weight";
    refused(&[name], |c| {
        c.shard(SHARD, |s| {
            let copied = s.tensor(HEAD).clone();
            s.tensors.insert(name.into(), copied);
        });
        c.index(|i| drop(i.insert(name.into(), json!(SHARD))));
    });
}

#[test]
fn wrong_dtype_and_shape() {
    refused(&[HEAD, "F16"], |c| c.shard(SHARD, |s| s.tensor(HEAD).dtype = "F16".into()));
    refused(&[HEAD, "I16"], |c| c.shard(SHARD, |s| s.tensor(HEAD).dtype = "I16".into()));
    refused(&[HEAD, "Q7"], |c| c.shard(SHARD, |s| s.tensor(HEAD).dtype = "Q7".into()));
    refused(&[HEAD, "shape"], |c| c.shard(SHARD, |s| s.tensor(HEAD).shape.reverse()));
    let scale = format!("{DOWN}.weight_scale");
    refused(&[&scale], |c| c.shard(SHARD, |s| s.tensor(&scale).shape = vec![512, 2]));
    refused(&[HEAD, "2^64"], |c| c.shard(SHARD, |s| s.tensor(HEAD).shape = vec![1 << 33, 1 << 33]));
}

#[test]
fn scales_without_a_value() {
    for word in [0x7f, 0xff, 0x88] {
        refused(&["experts.0", "block scale", "row 1"], |c| {
            c.shard(SHARD, |s| s.tensor(&format!("{DOWN}.weight_scale")).bytes[7] = word);
        });
    }
    for value in [0.0, f32::INFINITY, f32::NAN, -1.0] {
        let name = format!("{DOWN}.weight_scale_2");
        refused(&[&name, "positive finite"], |c| {
            c.shard(SHARD, |s| s.tensor(&name).bytes = value.to_le_bytes().to_vec());
        });
    }
}

#[test]
fn one_tensor_in_two_shards() {
    let twice = |c: &Copy| {
        let mut name = String::new();
        c.shard(SECOND, |s| name = s.tensors.keys().next().expect("a tensor").clone());
        let tensor = common::Shard::read(&c.folder.join(SECOND)).tensor(&name).clone();
        c.shard(SHARD, |s| drop(s.tensors.insert(name, tensor)));
    };
    refused(&["in both", SHARD, SECOND, "--trust-index"], twice);
    let dir = scratch();
    let copy = Copy::new(dir.path(), "checkpoint");
    twice(&copy);
    convert(&copy.folder, &dir.path().join("out.infernix"), &["--trust-index"]).ok();
}

#[test]
fn hash_buffers_that_disagree_with_the_config() {
    refused(&["layer_multipliers"], |c| c.shard(TABLE, |s| s.tensor(MULTIPLIERS).bytes[0] ^= 2));
    let sizes = MULTIPLIERS.replace("layer_multipliers", "ngram_heads_vocab_sizes");
    refused(&["ngram_heads_vocab_sizes"], |c| c.shard(TABLE, |s| s.tensor(&sizes).bytes[8] ^= 1));
}

#[test]
fn index_entries_outside_the_folder() {
    for file in ["../x.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "", "a\0b"] {
        refused(&["index", HEAD], |c| c.index(|i| drop(i.insert(HEAD.into(), json!(file)))));
    }
}

#[test]
fn other_things_in_place_of_a_shard() {
    let lfs = "version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 12552924\n";
    for (bytes, what) in [
        (lfs.as_bytes(), "git-lfs pointer"),
        (b"<!DOCTYPE html><html><body>404</body></html>", "HTML page"),
        (b"PK\x03\x04 and more", "zip archive"),
        (b"\x1f\x8b\x08\0\0\0\0\0\0\0\0", "gzip archive"),
        (b"{\"error\":\"Repository not found\"}", "Repository not found"),
        (b"# xet version 0\nfilesize = 12\n", "xet pointer"),
    ] {
        refused(&[SHARD, what], |c| c.put(SHARD, bytes));
    }
}

#[test]
fn broken_companions() {
    refused(&["config.json", "missing"], |c| c.remove("config.json"));
    refused(&["config.json", "JSON"], |c| c.put("config.json", "{"));
    refused(&["index", "HTML"], |c| c.put("model.safetensors.index.json", "<html>"));
    refused(&["tokenizer.json", "missing"], |c| c.remove("tokenizer.json"));
    refused(&["tokenizer.json", "HTML"], |c| c.put("tokenizer.json", "<html>"));
}

#[test]
fn configs_that_fit_no_model_or_no_machine() {
    for (key, value) in [
        ("num_hidden_layers", json!(9)),
        ("num_hidden_layers", json!(1_000_000_000)),
        ("num_experts", json!(33)),
        ("hidden_size", json!(0)),
        ("hidden_size", json!(-1)),
        ("hidden_size", json!("wide")),
        ("vocab_size", json!(1_u64 << 62)),
    ] {
        let words: &[&str] = if key == "num_experts" { &["shape [33"] } else { &["config.json", key] };
        refused(words, |c| c.json("config.json", |v| v["text_config"][key] = value));
    }
}

#[test]
fn one_shard_of_several_is_no_model() {
    let shard = demo().join(SHARD);
    finish(program().args(["convert", "--dry-run", "--recipe", RECIPE]).arg(shard))
        .fails(1, &["one of the 3 shards"]);
}
