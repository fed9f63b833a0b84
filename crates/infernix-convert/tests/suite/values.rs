//! Values that no model has: numbers, token ids, tokenizers and small tensors that would be found out only when the model
//! answers nonsense. Each is refused before, by the name of its key or tensor.

use std::path::Path;

use crate::common::{copy, demo, fixture};
use crate::kinds::{copies, fails, spoil};
use serde_json::{Value, json};

const GGUF: &str = "dense-demo-Q4_K_M.gguf";

/// A GGUF demo with its file changed fails with these words.
#[track_caller]
fn gguf_fails(words: &[&str], change: impl FnOnce(&mut Vec<u8>)) {
    let Some(checkpoint) = fixture("dense-demo-gguf") else { return };
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(checkpoint.join(GGUF), dir.path().join(GGUF)).unwrap();
    spoil(dir.path(), GGUF, change);
    fails(&dir.path().join(GGUF), words);
}

/// Where the bytes of a key's value begin, its type left behind; of an array, the type of its elements.
fn value_at(b: &[u8], key: &str) -> usize {
    let text = [&(key.len() as u64).to_le_bytes()[..], key.as_bytes()].concat();
    b.windows(text.len()).position(|w| w == text).unwrap() + text.len() + 4
}

/// Puts bytes in place of a key's value.
#[track_caller]
fn key_fails(key: &str, value: &[u8], words: &[&str]) {
    gguf_fails(&[&[key], words].concat(), |b| {
        let at = value_at(b, key);
        b[at..at + value.len()].copy_from_slice(value);
    });
}

/// Gives a key another name, so that it is missing.
#[track_caller]
fn missing_key_fails(key: &str, words: &[&str]) {
    gguf_fails(&[&[key], words].concat(), |b| {
        let at = value_at(b, key) - 4 - key.len();
        b[at] = b'Z';
    });
}

#[test]
fn gguf_numbers_that_are_none_are_refused_by_their_key() {
    let bad = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -1.0];
    for (key, more) in [
        ("qwen35.attention.layer_norm_rms_epsilon", &[0.0, 2.0][..]),
        ("qwen35.rope.freq_base", &[0.0, 1.0]),
        ("general.sampling.temp", &[101.0]),
        ("general.sampling.top_p", &[1.5]),
    ] {
        for value in bad.iter().chain(more) {
            key_fails(key, &value.to_le_bytes(), &["number"]);
        }
    }
}

#[test]
fn gguf_token_ids_outside_the_vocabulary_are_refused_by_their_key() {
    for name in ["eos", "bos", "padding"] {
        let key = format!("tokenizer.ggml.{name}_token_id");
        for id in [4096, i32::MAX as u32, u32::MAX] {
            key_fails(&key, &id.to_le_bytes(), &["a token below 4096", &id.to_string()]);
        }
    }
}

#[test]
fn gguf_keys_that_contradict_the_model_are_refused() {
    for value in [0u32, 1, u32::MAX] {
        key_fails("qwen35.attention.value_length", &value.to_le_bytes(), &["256, as attention.key_length"]);
    }
    for value in [0u32, 1, 5, i32::MAX as u32] {
        key_fails("qwen35.full_attention_interval", &value.to_le_bytes(), &["distance"]);
    }
    for value in [0u32, 63, 258] {
        key_fails("qwen35.rope.dimension_count", &value.to_le_bytes(), &["even number"]);
    }
    let sections = "qwen35.rope.dimension_sections";
    missing_key_fails(sections, &["three counts that sum to 32"]);
    gguf_fails(&[sections, "three counts that sum to 32"], |b| {
        let at = value_at(b, sections) + 12;
        b[at] += 1;
    });
}

#[test]
fn a_gguf_tokenizer_without_its_parts_is_refused_by_the_missing_key() {
    missing_key_fails("tokenizer.ggml.merges", &["source of resources"]);
    missing_key_fails("tokenizer.ggml.token_type", &["source of resources"]);
    // A type that ggml does not have, and a text that stands for two tokens.
    gguf_fails(&["tokenizer.ggml.token_type", "i32 7"], |b| {
        let at = value_at(b, "tokenizer.ggml.token_type") + 12;
        b[at] = 7;
    });
    gguf_fails(&["tokenizer.ggml.tokens", "twice"], |b| {
        let at = value_at(b, "tokenizer.ggml.tokens") + 12;
        assert_eq!((b[at], b[at + 9]), (1, 1), "texts of one byte");
        b[at + 8 + 1 + 8] = b[at + 8];
    });
}

#[test]
fn decays_and_norms_that_are_none_are_refused_in_gguf_models() {
    let Some(checkpoint) = fixture("dense-demo-gguf") else { return };
    let gguf = infernix_checkpoint::Gguf::open(&checkpoint.join(GGUF)).unwrap();
    let at = |name: &str| gguf.get(name).unwrap().offset as usize;
    for (name, values, words) in [
        ("blk.0.ssm_a", &[0.0, 1.0, f32::NAN, f32::NEG_INFINITY][..], "negative finite"),
        ("blk.0.attn_norm.weight", &[f32::NAN, f32::INFINITY], "finite weight"),
        ("blk.0.ssm_dt.bias", &[f32::NAN, f32::INFINITY], "finite number"),
        ("blk.0.ssm_norm.weight", &[f32::NAN, f32::NEG_INFINITY], "finite number"),
    ] {
        for value in values {
            let named = if name.contains("ssm_dt") { "dt_bias" } else { name.trim_start_matches("blk.0.") };
            let named = if name.contains("ssm_norm") { "linear_attn.norm" } else { named };
            gguf_fails(&[named, words], |b| {
                b[at(name)..at(name) + 4].copy_from_slice(&value.to_le_bytes());
            });
        }
    }
    // The same bytes called F16: what is left of -exp(a) in 16 bits is no A_log.
    gguf_fails(&["blk.0.ssm_a", "F16", "kept in F32"], |b| {
        let name = [&11u64.to_le_bytes()[..], b"blk.0.ssm_a"].concat();
        let ty = b.windows(name.len()).position(|w| w == name).unwrap() + name.len() + 4 + 8;
        b[ty] = 1;
    });
}

#[test]
fn vectors_that_are_not_finite_are_refused_by_name() {
    for (checkpoint, layer) in [
        (Some(demo()), "model.language_model.layers.0"),
        (fixture("dense-demo-bf16"), "model.language_model.layers.0"),
        (fixture("dense-demo-quasar"), "model.language_model.layers.0"),
    ] {
        let Some(checkpoint) = checkpoint else { continue };
        let dir = tempfile::tempdir().unwrap();
        let mut with = copies(&checkpoint, dir.path());
        for tensor in ["linear_attn.A_log", "linear_attn.dt_bias", "linear_attn.norm.weight"] {
            let name = format!("{layer}.{tensor}");
            for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let spoilt = with(&|t| {
                    let (dtype, _, bytes) = t.get_mut(&name).unwrap();
                    let word = value.to_le_bytes();
                    let word = if dtype == "BF16" { &word[2..] } else { &word[..] };
                    bytes[word.len()..2 * word.len()].copy_from_slice(word);
                });
                fails(&spoilt, &[&name, "column 1", "finite number"]);
            }
        }
    }
}

/// The demo with one of its JSON files changed.
fn changed(dir: &Path, file: &str, change: impl FnOnce(&mut Value)) {
    copy(&demo(), dir);
    spoil(dir, file, |b| {
        let mut value = serde_json::from_slice(b).unwrap();
        change(&mut value);
        *b = serde_json::to_vec(&value).unwrap();
    });
}

#[test]
fn a_tokenizer_of_no_use_is_refused() {
    type Change = fn(&mut Value);
    let cases: [(&[&str], Change); 7] = [
        (&["model"], |v| *v = json!({})),
        (&["vocab"], |v| *v = json!({"model": {}})),
        (&["byte 0x00"], |v| v["model"]["vocab"] = json!({})),
        (&["merges is empty"], |v| v["model"]["merges"] = json!([])),
        (&["merge 0"], |v| v["model"]["merges"][0] = json!(["no such", "tokens"])),
        (&["Unigram"], |v| v["model"]["type"] = json!("Unigram")),
        (&["token 4096", "vocab_size is 4096", "different models"], |v| {
            v["model"]["vocab"]["one more"] = json!(4096);
        }),
    ];
    for (words, change) in cases {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("in");
        changed(&folder, "tokenizer.json", change);
        fails(&folder, &[&["tokenizer.json"], words].concat());
    }
    let dir = tempfile::tempdir().unwrap();
    copy(&demo(), &dir.path().join("in"));
    spoil(&dir.path().join("in"), "tokenizer.json", |b| *b = b"\xff\xfe not JSON".to_vec());
    fails(&dir.path().join("in"), &["tokenizer.json", "not valid JSON"]);
}

#[test]
fn generation_defaults_out_of_range_are_refused() {
    for (key, value) in [
        ("temperature", json!(-1)),
        ("temperature", json!("hot")),
        ("top_p", json!(1.5)),
        ("min_p", json!(-0.1)),
        ("top_k", json!(-1)),
        ("repetition_penalty", json!(-2)),
        ("eos_token_id", json!([4085, 4096])),
        ("bos_token_id", json!(-1)),
        ("pad_token_id", json!(1u64 << 40)),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("in");
        changed(&folder, "generation_config.json", |v| v[key] = value);
        fails(&folder, &["generation_config.json", key]);
    }
}

#[test]
fn pixels_are_never_divided_by_nothing() {
    for value in [json!([0.5, 0.5, 0.0]), json!([0.5, 0.5]), json!([0.5, 0.5, null]), json!("0.5")] {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("in");
        changed(&folder, "preprocessor_config.json", |v| v["image_std"] = value);
        fails(&folder, &["preprocessor_config.json", "image_std"]);
    }
}
