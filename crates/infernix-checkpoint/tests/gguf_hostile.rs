//! GGUF files that must be refused, each with a message that says what is wrong and where.

mod common;
#[path = "common/gguf.rs"]
mod make;

use infernix_checkpoint::gguf::Gguf;
use infernix_checkpoint::{CheckpointError, OpenOptions};
use make::{File, Tensor, kv_array, kv_text, kv_u16, kv_u32, split, tensor, text};

/// An opened file, with the folder that it lies in.
struct Opened(Gguf, #[expect(dead_code, reason = "kept until the end of the test")] common::Folder);

impl std::ops::Deref for Opened {
    type Target = Gguf;

    fn deref(&self) -> &Gguf {
        &self.0
    }
}

fn open(bytes: &[u8]) -> Result<Opened, CheckpointError> {
    let f = common::Folder::new();
    f.put("m.gguf", bytes);
    Gguf::open(&f.join("m.gguf")).map(|g| Opened(g, f))
}

#[track_caller]
fn refused(bytes: &[u8], parts: &[&str]) {
    match open(bytes) {
        Ok(_) => panic!("was opened"),
        Err(e) => common::assert_message(&e, parts),
    }
}

fn edited(edit: impl FnOnce(&mut File)) -> Vec<u8> {
    let mut f = File::new();
    edit(&mut f);
    f.bytes()
}

#[test]
fn whole_file_is_read() {
    let f = common::Folder::new();
    f.put("m.gguf", &File::new().bytes());
    let g = Gguf::open(f.path()).unwrap();
    assert_eq!(g.text_list("toy.names").unwrap().unwrap(), ["a", "bc"]);
    assert_eq!(g.unsigned_list("toy.list").unwrap().unwrap(), [1, 2, 3]);
    let t = g.get("a.weight").unwrap();
    assert_eq!((&*t.shape, t.rows(), t.row_bytes(), t.bytes), (&[3, 32][..], 3, 34, 102));
    let mut out = [0.0; 64];
    g.read_rows_f32(t, 1..3, &mut out).unwrap();
    assert!(out.iter().all(|v| *v > 0.0));
    // Misuse is an error, not a panic.
    assert!(g.read_rows_f32(t, 1..4, &mut out).is_err());
    assert!(g.read_rows_f32(t, 0..1, &mut out).is_err());
    assert!(g.read(t, 100..103, &mut [0; 3]).is_err());
    for version in [2, 3] {
        assert_eq!(open(&edited(|f| f.version = version)).unwrap().version(), version);
    }
    // The padding of the last tensor may be absent, and a scalar has no dimensions.
    let mut bytes = edited(|f| f.tensors.push(tensor("s", &[], 0, 4)));
    bytes.truncate(bytes.len() - 28);
    assert_eq!(open(&bytes).unwrap().get("s").unwrap().rows(), 1);
}

#[test]
fn other_byte_orders_and_versions_are_named() {
    refused(&edited(|f| f.version = 3u32.swap_bytes()), &["big-endian", "version 3"]);
    refused(&edited(|f| f.version = 1), &["version 1", "2 and 3"]);
    refused(&edited(|f| f.version = 4), &["version 4"]);
    refused(&edited(|f| f.version = 0), &["version 0"]);
    refused(b"FUGG\0\0\0\x03", &["big-endian"]);
    refused(b"tjgg\x03\0\0\0", &["before GGUF"]);
}

#[test]
fn what_stands_in_place_of_a_file_is_named() {
    refused(b"", &["empty"]);
    refused(b"<!DOCTYPE html><html>", &["HTML"]);
    refused(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", &["git-lfs"]);
    refused(&[0x40, 0, 0, 0, 0, 0, 0, 0, b'{'], &["starts with"]);
    let f = common::Folder::new();
    assert!(Gguf::open(&f.join("absent.gguf")).is_err());
    common::assert_message(&Gguf::open(f.path()).unwrap_err(), &["no .gguf file"]);
    std::fs::create_dir(f.join("x.gguf")).unwrap();
    common::assert_message(&Gguf::open(f.path()).unwrap_err(), &["x.gguf", "folder"]);
}

#[test]
fn every_truncation_is_an_error() {
    let whole = File::new().bytes();
    for len in 0..whole.len() - 31 {
        if open(&whole[..len]).is_ok() {
            // Only the padding behind the last tensor may be missing.
            let data = File::new().header().len().next_multiple_of(32);
            assert!(len >= data + 128 + 32 + 72, "{len} bytes were accepted");
        }
    }
    let cut = File::new().header().len().next_multiple_of(32) + 130;
    refused(&whole[..cut], &["truncated", "b.weight"]);
}

#[test]
fn counts_and_lengths_are_believed_only_where_the_file_has_room() {
    let put = |at: usize, value: u64| {
        let mut b = File::new().bytes();
        b[at..at + 8].copy_from_slice(&value.to_le_bytes());
        b
    };
    for huge in [u64::MAX, 1 << 62, 1 << 33, 100_000] {
        refused(&put(8, huge), &["tensors", &huge.to_string()]);
        refused(&put(16, huge), &["metadata keys", &huge.to_string()]);
        // The length of the first key.
        refused(&put(24, huge), &["metadata key", &huge.to_string()]);
    }
    refused(&edited(|f| f.pairs.push(kv_array("k", 8, 1 << 40, &[]))), &["k ", "1099511627776"]);
    refused(&edited(|f| f.pairs.push(kv_array("k", 10, u64::MAX, &[]))), &["k "]);
    refused(&edited(|f| f.pairs.push(kv_array("k", 8, 1, &u64::MAX.to_le_bytes()))), &["k "]);
    refused(&edited(|f| f.pairs.push(("k".into(), 8, u64::MAX.to_le_bytes().to_vec()))), &["value of k"]);
}

#[test]
fn metadata_faults_are_named() {
    refused(&edited(|f| f.pairs.push(kv_u32("toy.block_count", 2))), &["toy.block_count", "twice"]);
    refused(&edited(|f| f.pairs.push(("k".into(), 13, vec![0; 8]))), &["k ", "13"]);
    refused(&edited(|f| f.pairs.push(("k".into(), 7, vec![2]))), &["k ", "bool"]);
    refused(&edited(|f| f.pairs.push(kv_array("k", 9, 1, &[0; 12]))), &["k ", "array of arrays"]);
    refused(&edited(|f| f.pairs.push(kv_array("k", 77, 1, &[0; 12]))), &["k ", "77"]);
    refused(&edited(|f| f.pairs.push(kv_u32("", 1))), &["empty"]);
    refused(&edited(|f| f.pairs.push(kv_u32("a\nb", 1))), &["control"]);
    let bad = [&1u64.to_le_bytes()[..], &[0xFF]].concat();
    refused(&edited(|f| f.pairs.push(("k".into(), 8, bad.clone()))), &["k ", "UTF-8"]);
    // In an array it shows when the array is asked for.
    let g = open(&edited(|f| f.pairs.push(kv_array("k", 8, 1, &bad)))).unwrap();
    common::assert_message(&g.text_list("k").unwrap_err(), &["k", "element 0"]);
    let g = open(&edited(|f| f.pairs.push(kv_array("k", 7, 2, &[1, 3])))).unwrap();
    assert!(g.list("k", "truth values", infernix_checkpoint::gguf::Value::boolean).is_err());
}

#[test]
fn alignment_must_be_a_power_of_two() {
    for (value, ok) in [(0, false), (24, false), (1 << 21, false), (8, true), (4096, true)] {
        let bytes = edited(|f| {
            f.pairs.push(kv_u32("general.alignment", value));
            f.alignment = value.max(1) as usize;
        });
        assert_eq!(open(&bytes).is_ok(), ok, "{value}");
    }
    refused(&edited(|f| f.pairs.push(kv_text("general.alignment", "32"))), &["general.alignment", "text"]);
}

#[test]
fn tensor_faults_are_named() {
    let with = |t: Tensor| edited(|f| f.tensors.push(t));
    refused(&with(tensor("a.weight", &[4], 0, 16)), &["a.weight", "twice"]);
    refused(&with(tensor("t", &[32], 43, 34)), &["t", "type id 43", "42"]);
    refused(&with(tensor("t", &[32], 4, 34)), &["t", "Q4_2", "given up"]);
    refused(&with(tensor("t", &[33], 8, 34)), &["t", "33", "Q8_0", "32"]);
    refused(&with(tensor("t", &[0], 0, 0)), &["t", "dimension of 0"]);
    refused(&with(tensor("t", &[1, 1, 1, 1, 1], 0, 4)), &["t", "5 dimensions"]);
    refused(&with(tensor("t", &[u64::MAX], 0, 4)), &["t", "dimension"]);
    refused(&with(tensor("t", &[1 << 40, 1 << 40], 0, 4)), &["t", "64 bits"]);
    refused(&with(tensor("t", &[1 << 61], 0, 4)), &["t"]);
    refused(&with(tensor("", &[1], 0, 4)), &["empty"]);
    refused(&with(tensor("t\0", &[1], 0, 4)), &["control"]);
    refused(&with(tensor(&"n".repeat(600), &[1], 0, 4)), &["600", "512"]);
    // Integers are no weights: they open, and refuse to be decoded.
    let g = open(&with(tensor("t", &[4], 26, 16))).unwrap();
    let e = g.read_rows_f32(g.get("t").unwrap(), 0..1, &mut [0.0; 4]).unwrap_err();
    common::assert_message(&e, &["t", "I32"]);
}

#[test]
fn tensors_out_of_place_are_refused() {
    let whole = File::new();
    let header = whole.header();
    // The offset of the last tensor is the last word of the header.
    for (offset, what) in
        [(0u64, "overlap"), (128, "overlap"), (192, "gap"), (161, "unaligned"), (u64::MAX - 31, "wrap")]
    {
        let mut bytes = whole.bytes();
        bytes[header.len() - 8..header.len()].copy_from_slice(&offset.to_le_bytes());
        let Err(e) = open(&bytes) else { panic!("{what} was accepted") };
        common::assert_message(&e, &["offset"]);
    }
    let mut bytes = whole.bytes();
    bytes.extend([0; 5]);
    refused(&bytes, &["5 bytes follow"]);
}

#[test]
fn illegal_scales_are_named_by_row_column_and_offset() {
    let g = open(&edited(|f| f.tensors[2].data[36 + 18..36 + 20].copy_from_slice(&[0, 0x7C]))).unwrap();
    let t = g.get("c.weight").unwrap();
    let e = g.read_rows_f32(t, 1..2, &mut [0.0; 64]).unwrap_err();
    common::assert_message(&e, &["c.weight", "row 1, column 32", &(t.offset + 54).to_string(), "0x7c00"]);
    g.read_rows_f32(t, 0..1, &mut [0.0; 64]).unwrap();
}

#[test]
fn headers_without_data_serve_plans_only() {
    let f = common::Folder::new();
    f.put("m.gguf", &File::new().header());
    common::assert_message(&Gguf::open(f.path()).unwrap_err(), &["only its header", "--dry-run"]);
    let g = Gguf::open_with(f.path(), &OpenOptions { headers_only_ok: true, ..Default::default() }).unwrap();
    assert!(g.warnings()[0].contains("only their headers"));
    let t = g.get("b.weight").unwrap();
    assert!(matches!(g.read(t, 0..4, &mut [0; 4]), Err(CheckpointError::HeadersOnly { .. })));
    assert_eq!(g.unsigned_list("toy.list").unwrap().unwrap(), [1, 2, 3]);
}

#[test]
fn shrunk_file_is_an_error() {
    let f = common::Folder::new();
    f.put("m.gguf", &File::new().bytes());
    let g = Gguf::open(f.path()).unwrap();
    let file = std::fs::File::options().write(true).open(f.join("m.gguf")).unwrap();
    file.set_len(100).unwrap();
    let e = g.read_rows_f32(g.get("b.weight").unwrap(), 0..1, &mut [0.0; 5]).unwrap_err();
    common::assert_message(&e, &["m.gguf", "changed"]);
    assert!(g.text_list("toy.names").is_err());
}

const PARTS: [&str; 2] = ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"];

fn folder(parts: &[File; 2]) -> common::Folder {
    let f = common::Folder::new();
    f.put(PARTS[0], &parts[0].bytes()).put(PARTS[1], &parts[1].bytes());
    f
}

#[test]
fn parts_that_are_missing_or_foreign_are_named() {
    let g = Gguf::open(folder(&split()).path()).unwrap();
    assert_eq!(g.tensors().len(), 4);
    let f = folder(&split());
    std::fs::remove_file(f.join(PARTS[1])).unwrap();
    common::assert_message(&Gguf::open(f.path()).unwrap_err(), &["1 of 2", PARTS[1]]);
    let f = folder(&split());
    std::fs::remove_file(f.join(PARTS[0])).unwrap();
    common::assert_message(&Gguf::open(f.path()).unwrap_err(), &["1 of 2", PARTS[0]]);
    let f = folder(&split());
    std::fs::rename(f.join(PARTS[0]), f.join("renamed.gguf")).unwrap();
    common::assert_message(
        &Gguf::open(&f.join("renamed.gguf")).unwrap_err(),
        &["split.count is 2", "00001-of-00002"],
    );

    let broken = |edit: fn(&mut [File; 2]), parts: &[&str]| {
        let mut files = split();
        edit(&mut files);
        common::assert_message(&Gguf::open(folder(&files).path()).unwrap_err(), parts);
    };
    broken(|p| p[1].pairs[0] = kv_u16("split.no", 0), &["split.no is 0", "expected 1", PARTS[1]]);
    broken(|p| p[1].pairs[1] = kv_u16("split.count", 3), &["split.count is 3"]);
    broken(|p| p[1].pairs.clear(), &["split.no is missing"]);
    broken(|p| p[1].tensors.push(tensor("x", &[1], 0, 4)), &["split.tensors.count is 4", "5 tensors"]);
    broken(|p| p[1].tensors[0].name = "a.weight".into(), &["a.weight", PARTS[0], PARTS[1]]);
    broken(
        |p| p[1].pairs.push(kv_text("general.architecture", "other")),
        &["general.architecture", "first part"],
    );
    broken(|p| p[0].pairs[6] = kv_text("split.count", "2"), &["split.count", "text"]);
}

#[test]
fn folder_with_two_models_lists_them_and_companions_are_set_aside() {
    let f = common::Folder::new();
    f.put("a-Q4.gguf", &File::new().bytes()).put("a-Q8.gguf", &File::new().bytes());
    common::assert_message(&Gguf::open(f.path()).unwrap_err(), &["2 models", "a-Q4.gguf", "a-Q8.gguf"]);
    f.put("a-Q8.gguf", &edited(|f| f.pairs.push(kv_text("general.type", "mmproj"))));
    let g = Gguf::open(f.path()).unwrap();
    assert!(g.companions()[0].ends_with("a-Q8.gguf") && g.warnings()[0].contains("a-Q8.gguf"));
    // The parts of one model are one model, and a whole file may be called a part.
    f.put("b-00001-of-00002.gguf", &File::new().bytes());
    assert!(Gguf::open(f.path()).is_err());
    let g = Gguf::open(&f.join("b-00001-of-00002.gguf")).unwrap();
    assert!(g.warnings()[0].contains("part 1 of 2"));
}

/// A qwen4exp skeleton: two layers, the second with an indexer.
fn flash(ratios: &[i32]) -> File {
    let mut f = File::new();
    let bytes: Vec<u8> = ratios.iter().flat_map(|r| r.to_le_bytes()).collect();
    f.pairs = vec![
        kv_text("general.architecture", "qwen4exp"),
        kv_u32("qwen4exp.block_count", 2),
        kv_array("qwen4exp.attention.compress_ratios", 5, ratios.len() as u64, &bytes),
        kv_array("tokenizer.ggml.tokens", 8, 2, &[text("<|fim_prefix|>"), text("x")].concat()),
        kv_array("tokenizer.ggml.token_type", 5, 2, &[3, 0, 0, 0, 1, 0, 0, 0]),
    ];
    f.tensors = vec![
        tensor("blk.0.ssm_a", &[4], 0, 16),
        tensor("blk.1.indexer.q_proj.weight", &[4], 0, 16),
        tensor("per_layer_token_embd.weight", &[4], 1, 8),
        tensor("blk.1.attn_q.weight", &[64], 40, 36),
    ];
    f
}

#[test]
fn selection_switched_off_by_the_converter_is_said_loudly() {
    let warnings = |f: &File| open(&f.bytes()).unwrap().warnings().join("\n");
    let w = warnings(&flash(&[0, 0]));
    assert!(w.contains("sparse attention is switched off") && w.contains("all of the 1 layers"), "{w}");
    assert!(
        w.contains("table is F16") && w.contains("<|fim_prefix|>") && w.contains("no second scale"),
        "{w}"
    );
    assert!(w.contains("tokenizer.ggml.pre") && w.contains("no drafter"), "{w}");
    assert!(!warnings(&flash(&[0, 4])).contains("switched off"));
    assert!(warnings(&flash(&[4, 4])).contains("[0], which have no indexer"));
    assert!(warnings(&flash(&[])).contains("switched off"));
    let mut f = flash(&[0, 4]);
    f.pairs.push(kv_u32("qwen4exp.nextn_predict_layers", 1));
    assert!(warnings(&f).contains("nextn_predict_layers is 1"));
}
