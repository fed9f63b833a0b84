//! Public bug reports against other converters, each held as a test here. The name of a test says what must hold; its
//! comment names the report (`owner/project#number`) in which another program got it wrong. Reports about parts that
//! do not exist yet get their test with those parts.

mod common;

use common::{Copy, SHARD, TABLE, convert, demo, finish, infernix, program, scratch, verify_words};
use serde_json::{Value, json};
use std::fs;

const EXPERT: &str = "model.language_model.layers.0.mlp.experts.0";

/// unslothai/unsloth-zoo#847: the configuration had lost its drafter's layer count while the tensors were still there,
/// and conversion died with `Can not map tensor`. Absent, the tensors decide; 0, both facts are said.
#[test]
fn drafter_tensors_without_a_layer_count_are_never_dropped_silently() {
    let dir = scratch();
    let whole = convert(&demo(), &dir.path().join("a.infernix"), &["--json"]).ok().json();
    let absent = Copy::new(dir.path(), "absent");
    absent.json("config.json", |c| {
        drop(c["text_config"].as_object_mut().map(|t| t.remove("mtp_num_hidden_layers")))
    });
    let made = convert(&absent.folder, &dir.path().join("b.infernix"), &["--json"]).ok().json();
    assert_eq!(made["digest"], whole["digest"]);
    let zero = Copy::new(dir.path(), "zero");
    zero.json("config.json", |c| c["text_config"]["mtp_num_hidden_layers"] = json!(0));
    let run = convert(&zero.folder, &dir.path().join("c.infernix"), &[]).ok();
    for word in ["warning:", "component mtp", "mtp_num_hidden_layers", "--components"] {
        assert!(run.stderr.contains(word), "{word}: {}", run.stderr);
    }
}

/// ggml-org/llama.cpp#20505: scalar scales came as `[]`, `[1]` or one per row, and reshaping them failed.
#[test]
fn scalar_scales_of_shape_one_are_scalars() {
    let dir = scratch();
    let copy = Copy::new(dir.path(), "checkpoint");
    copy.shard(SHARD, |s| {
        for part in ["gate_proj", "up_proj", "down_proj"] {
            for scale in ["weight_scale_2", "input_scale"] {
                let t = s.tensor(&format!("{EXPERT}.{part}.{scale}"));
                t.shape = if t.shape.is_empty() { vec![1] } else { vec![] };
            }
        }
    });
    let a = convert(&demo(), &dir.path().join("a.infernix"), &["--json"]).ok().json();
    let b = convert(&copy.folder, &dir.path().join("b.infernix"), &["--json"]).ok().json();
    assert_eq!(a["digest"], b["digest"]);
}

/// ggml-org/llama.cpp#20730: a converted file still called itself BF16. Formats are told from the stored objects.
#[test]
fn what_a_file_says_of_itself_follows_from_its_bytes() {
    let dir = scratch();
    let path = dir.path().join("m.infernix");
    convert(&demo(), &path, &["--name", "anything BF16"]).ok();
    let listed = finish(program().args(["inspect", "--objects", "--json"]).arg(&path)).ok().json();
    let formats: Vec<&str> = listed["object_list"]
        .as_array()
        .expect("objects")
        .iter()
        .filter_map(|o| o["format"].as_str())
        .collect();
    for format in ["nvfp4_mul", "bf16", "q8_g32_fp16", "q4_g64_fp16"] {
        assert!(formats.contains(&format), "{format} in {formats:?}");
    }
}

/// vllm-project/vllm-metal#720: one of several shards was loaded whole before anyone said that it is not the model.
#[test]
fn one_shard_is_refused_before_its_data_is_read() {
    let dir = scratch();
    let copy = Copy::new(dir.path(), "checkpoint");
    // Headers are enough to refuse it.
    let bytes = copy.bytes(SHARD);
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
    copy.put(SHARD, &bytes[..header]);
    let shard = copy.folder.join(SHARD).display().to_string();
    infernix(["convert", "--recipe", "auto", &shard, "-n"])
        .fails(1, &["one of the 3 shards", "pass the folder"]);
}

/// gittensor-ai-lab/sparkinfer#25: offsets were never held against the file's size.
#[test]
fn offsets_beyond_the_file_are_refused() {
    let spoil = |edit: fn(&mut Value)| {
        let dir = scratch();
        let copy = Copy::new(dir.path(), "checkpoint");
        let bytes = copy.bytes(SHARD);
        let end = 8 + u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
        let mut header: Value = serde_json::from_slice(&bytes[8..end]).expect("a header");
        edit(&mut header["lm_head.weight"]);
        let mut text = header.to_string().into_bytes();
        text.resize(text.len().next_multiple_of(8), b' ');
        copy.put(SHARD, [&(text.len() as u64).to_le_bytes()[..], &text, &bytes[end..]].concat());
        convert(&copy.folder, &dir.path().join("m.infernix"), &[]).fails(1, &[SHARD]);
    };
    spoil(|t| t["data_offsets"] = json!([1_u64 << 63, (1_u64 << 63) + 2_097_152]));
    spoil(|t| t["data_offsets"][1] = json!(u64::MAX));
    spoil(|t| t["data_offsets"] = json!([8, 4]));
    spoil(|t| t["shape"] = json!([-1, 256]));
    let dir = scratch();
    let copy = Copy::new(dir.path(), "checkpoint");
    copy.put(SHARD, [&(1_u64 << 62).to_le_bytes()[..], b"{}"].concat());
    convert(&copy.folder, &dir.path().join("m.infernix"), &[]).fails(1, &[SHARD, "limit"]);
}

/// Comfy-Org/ComfyUI#15602: bytes after the last tensor are an error that counts them.
#[test]
fn trailing_bytes_are_counted() {
    let dir = scratch();
    let copy = Copy::new(dir.path(), "checkpoint");
    copy.put(SHARD, [copy.bytes(SHARD), vec![b'x'; 77]].concat());
    convert(&copy.folder, &dir.path().join("m.infernix"), &[]).fails(1, &[SHARD, "77 bytes"]);
}

/// vllm-project/vllm#45212: experts that calibration never hit have no input scale; zeros became NaN in some prompts.
#[test]
fn an_expert_without_its_input_scale_is_named() {
    let dir = scratch();
    let copy = Copy::new(dir.path(), "checkpoint");
    let name = format!("{EXPERT}.up_proj.input_scale");
    copy.shard(SHARD, |s| drop(s.tensors.remove(&name)));
    copy.index(|i| drop(i.remove(&name)));
    convert(&copy.folder, &dir.path().join("m.infernix"), &[]).fails(1, &["experts.0", "input"]);
}

/// vllm-project/vllm#49638: a branch for fused experts skipped `weight_scale`, `weight_scale_2` and `input_scale`
/// without a word. Each word of each of them arrives: changing any changes the digest.
#[test]
fn every_suffix_of_an_expert_is_consumed() {
    let dir = scratch();
    let whole = convert(&demo(), &dir.path().join("a.infernix"), &["--json"]).ok().json();
    for (i, suffix) in ["weight", "weight_scale", "weight_scale_2", "input_scale"].iter().enumerate() {
        let copy = Copy::new(dir.path(), suffix);
        copy.shard(SHARD, |s| s.tensor(&format!("{EXPERT}.up_proj.{suffix}")).bytes[0] ^= 1);
        let path = dir.path().join(format!("{i}.infernix"));
        let made = convert(&copy.folder, &path, &["--json"]).ok().json();
        assert_ne!(made["digest"], whole["digest"], "{suffix}");
        let proof = verify_words(&path).ends(1).json();
        let found = proof["expert_mismatches"].as_u64().unwrap_or(0)
            + proof["input_scale_mismatches"].as_u64().unwrap_or(0);
        assert!(found > 0, "{suffix}: {proof}");
    }
}

/// ggml-org/llama.cpp#7291: a tool ended silently after its first step. The free space is known before work begins, and
/// whatever fails ends with a message and a code.
#[test]
fn nothing_fails_without_a_message() {
    let dir = scratch();
    let copy = Copy::new(dir.path(), "checkpoint");
    copy.put(TABLE, b"");
    let run = convert(&copy.folder, &dir.path().join("m.infernix"), &[]).fails(1, &[TABLE]);
    assert!(run.stdout.is_empty());
    assert!(fs::metadata(dir.path().join("m.infernix")).is_err());
}
