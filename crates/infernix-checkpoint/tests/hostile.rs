//! Damaged and hostile checkpoints: each is refused by name, none panics.

mod common;

use common::*;
use infernix_checkpoint::{Checkpoint, CheckpointError, OpenOptions};

const TRUST: OpenOptions =
    OpenOptions { trust_index: true, headers_only_ok: false, allow_missing_config: false };
const HEADERS: OpenOptions =
    OpenOptions { trust_index: false, headers_only_ok: true, allow_missing_config: false };

fn two_shards() -> Folder {
    let f = Folder::new();
    f.put("m-1.safetensors", &shard(&[t("a.weight", "BF16", &[2, 4])]));
    f.put("m-2.safetensors", &shard(&[t("b.weight", "BF16", &[3, 4])]));
    f.index(&[("a.weight", "m-1.safetensors"), ("b.weight", "m-2.safetensors")]);
    f
}

fn refused(f: &Folder) -> CheckpointError {
    f.open().expect_err("accepted")
}

#[test]
fn truncated_shard_names_the_file_and_the_first_incomplete_tensor() {
    let f = two_shards();
    let bytes = shard(&[t("b.weight", "BF16", &[3, 4]), t("c.weight", "BF16", &[3, 4])]);
    f.put("m-2.safetensors", &bytes[..bytes.len() - 1]);
    let e = refused(&f);
    assert!(matches!(e, CheckpointError::Truncated { .. }), "{e}");
    assert_message(
        &e,
        &["m-2.safetensors", "c.weight", &bytes.len().to_string(), &(bytes.len() - 1).to_string()],
    );
    // Headers alone are a plan's business; half the data is damage there, too.
    assert!(matches!(f.open_with(&HEADERS), Err(CheckpointError::Truncated { .. })));
}

#[test]
fn shard_cut_inside_its_header_or_length_is_truncated() {
    let bytes = shard(&[t("a.weight", "BF16", &[2, 4])]);
    for cut in [0, 1, 7, 8, 20] {
        let f = Folder::new();
        f.put("model.safetensors", &bytes[..cut]);
        let e = refused(&f);
        assert!(matches!(e, CheckpointError::Truncated { .. }), "{cut}: {e}");
        assert_message(&e, &["model.safetensors", "fetch"]);
    }
}

#[test]
fn headers_without_data_open_only_for_a_plan() {
    let f = two_shards();
    let tensors = [t("b.weight", "BF16", &[3, 4])];
    f.put("m-2.safetensors", &file(header(&tensors).as_bytes(), b""));
    let e = refused(&f);
    assert!(matches!(e, CheckpointError::HeadersOnly { missing: 24, .. }), "{e}");
    let c = f.open_with(&HEADERS).expect("for a plan");
    assert!(!c.data_present());
    assert_eq!(c.warnings(), ["1 of 2 shards hold only their headers"]);
    assert_eq!(c.shards().iter().map(|s| s.data_present).collect::<Vec<_>>(), [true, false]);
    let b = c.get("b.weight").expect("listed");
    let e = c.read(b, 0..24, &mut [0; 24]).expect_err("no data");
    assert!(matches!(e, CheckpointError::HeadersOnly { .. }), "{e}");
    let a = c.get("a.weight").expect("listed");
    c.read(a, 0..16, &mut [0; 16]).expect("present");
}

#[test]
fn missing_shards_are_all_named() {
    let f = two_shards();
    std::fs::remove_file(f.join("m-1.safetensors")).expect("removed");
    std::fs::remove_file(f.join("m-2.safetensors")).expect("removed");
    let e = refused(&f);
    assert!(matches!(e, CheckpointError::MissingShards { total: 2, .. }), "{e}");
    assert_message(&e, &["m-1.safetensors", "m-2.safetensors", "2 of 2"]);
}

#[test]
fn indexed_tensor_that_is_in_no_shard_is_named_with_its_shard() {
    let f = two_shards();
    f.index(&[
        ("a.weight", "m-1.safetensors"),
        ("aa.weight", "m-1.safetensors"),
        ("b.weight", "m-2.safetensors"),
    ]);
    let e = refused(&f);
    assert!(matches!(e, CheckpointError::IndexedTensorAbsent { elsewhere: None, .. }), "{e}");
    assert_message(&e, &["aa.weight", "m-1.safetensors"]);
    f.index(&[("a.weight", "m-1.safetensors"), ("b.weight", "m-2.safetensors"), ("z", "m-2.safetensors")]);
    assert_message(&refused(&f), &["tensor z ", "m-2.safetensors"]);
}

#[test]
fn index_that_places_a_tensor_in_the_wrong_shard_is_refused_even_if_trusted() {
    let f = two_shards();
    f.index(&[("a.weight", "m-2.safetensors"), ("b.weight", "m-2.safetensors")]);
    for opts in [OpenOptions::default(), TRUST] {
        let e = f.open_with(&opts).expect_err("accepted");
        assert!(matches!(e, CheckpointError::IndexedTensorAbsent { elsewhere: Some(_), .. }), "{e}");
        assert_message(&e, &["a.weight", "m-2.safetensors", "m-1.safetensors"]);
    }
}

#[test]
fn same_tensor_in_two_shards_names_both_and_trust_index_sets_one_aside() {
    let f = two_shards();
    let other = with("a.weight", "BF16", &[2, 4], &[7; 16]);
    f.put("m-2.safetensors", &shard(&[other, t("b.weight", "BF16", &[3, 4])]));
    let e = refused(&f);
    assert!(matches!(e, CheckpointError::DuplicateTensor { indexed: true, .. }), "{e}");
    assert_message(&e, &["a.weight", "m-1.safetensors", "m-2.safetensors", "--trust-index"]);
    let c = f.open_with(&TRUST).expect("trusted");
    let a = c.get("a.weight").expect("there");
    assert_eq!(c.shard_of(a).name, "m-1.safetensors");
    assert_eq!(c.read_all(a).expect("read")[0], 0x20);
    assert_eq!(c.ignored().len(), 1);
    assert_eq!(&*c.ignored()[0].tensor.name, "a.weight");
    assert_eq!(c.shard_of(&c.ignored()[0].tensor).name, "m-2.safetensors");
    assert!(c.ignored()[0].reason.contains("m-1.safetensors"));
    assert_eq!(c.tensors().len(), 2);
    // The index takes the other copy as readily.
    f.index(&[("a.weight", "m-2.safetensors"), ("b.weight", "m-2.safetensors")]);
    let c = f.open_with(&TRUST).expect("trusted");
    assert_eq!(c.read_all(c.get("a.weight").expect("there")).expect("read"), [7; 16]);
}

#[test]
fn stray_shard_with_a_copy_is_a_duplicate_too() {
    let f = two_shards();
    f.put("copy.safetensors", &shard(&[t("b.weight", "BF16", &[3, 4])]));
    let e = refused(&f);
    assert_message(&e, &["b.weight", "m-2.safetensors", "copy.safetensors"]);
}

#[test]
fn unindexed_tensor_is_listed_and_an_error_only_when_needed() {
    let f = two_shards();
    f.put("m-2.safetensors", &shard(&[t("b.weight", "BF16", &[3, 4]), t("x.weight", "BF16", &[1, 2])]));
    f.put("extra.safetensors", &shard(&[t("y.A_log", "BF16", &[2])]));
    let c = f.open().expect("opens");
    let names: Vec<_> = c.unindexed().iter().map(|t| &*t.name).collect();
    assert_eq!(names, ["x.weight", "y.A_log"]);
    assert!(c.get("x.weight").is_none());
    assert!(
        c.warnings().iter().any(|w| w.contains("x.weight") && w.contains("m-2.safetensors")),
        "{:?}",
        c.warnings()
    );
    let e = c.resolve("x").expect_err("needed");
    assert!(matches!(e, CheckpointError::Unindexed { .. }), "{e}");
    assert_message(&e, &["x.weight", "m-2.safetensors"]);
    assert_message(&c.resolve("y.A_log").expect_err("needed"), &["extra.safetensors"]);
    assert!(c.resolve("z").expect("merely absent").is_none());
    assert_eq!(c.resolve_all().expect("the rest").len(), 2);
}

#[test]
fn unreadable_stray_file_is_a_warning_not_an_error() {
    let f = two_shards();
    f.put("zz.safetensors", b"<!DOCTYPE html>");
    let c = f.open().expect("opens");
    assert!(
        c.warnings().iter().any(|w| w.contains("zz.safetensors") && w.contains("HTML")),
        "{:?}",
        c.warnings()
    );
    // The numbers of later shards stay right.
    f.put("a-first.safetensors", b"junk").put("z-last.safetensors", &shard(&[t("y", "U8", &[1])]));
    let c = f.open().expect("opens");
    assert_eq!(c.shard_of(&c.unindexed()[0]).name, "z-last.safetensors");
}

#[test]
fn lfs_pointer_and_html_page_are_recognised_wherever_they_stand() {
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00ff\nsize 77\n";
    let page = b"<!DOCTYPE html>\n<html><head><title>Login</title>";
    for (bytes, word) in [(&pointer[..], "git-lfs"), (&page[..], "HTML")] {
        for name in ["m-1.safetensors", "model.safetensors.index.json"] {
            let f = two_shards();
            f.put(name, bytes);
            let e = refused(&f);
            assert!(matches!(e, CheckpointError::Impostor { .. }), "{e}");
            assert_message(&e, &[name, word]);
        }
        let f = two_shards();
        f.put("tokenizer.json", bytes).put("config.json", bytes);
        let c = f.open().expect("opens");
        assert_message(&c.file_bytes("tokenizer.json").expect_err("impostor"), &["tokenizer.json", word]);
        assert_message(&c.config().expect_err("impostor"), &["config.json", word]);
    }
}

#[test]
fn index_that_names_a_file_outside_the_folder_is_refused_before_it_is_touched() {
    for entry in
        ["../m-1.safetensors", "/m-1.safetensors", "sub/m-1.safetensors", "..", "..\\\\m.safetensors"]
    {
        let f = two_shards();
        f.index(&[("a.weight", entry), ("b.weight", "m-2.safetensors")]);
        let e = refused(&f);
        assert!(matches!(e, CheckpointError::IndexEntry { .. }), "{entry}: {e}");
        assert_message(&e, &["a.weight", "same folder"]);
    }
}

#[cfg(unix)]
#[test]
fn links_out_of_the_folder_are_fine() {
    let f = two_shards();
    let store = tempfile::tempdir().expect("folder");
    let blob = store.path().join("blob");
    std::fs::rename(f.join("m-1.safetensors"), &blob).expect("moved");
    std::os::unix::fs::symlink(&blob, f.join("m-1.safetensors")).expect("linked");
    f.open().expect("opens");
    std::fs::remove_file(&blob).expect("removed");
    assert_message(&refused(&f), &["m-1.safetensors", "missing"]);
}

#[cfg(unix)]
#[test]
fn pipe_in_place_of_a_file_does_not_hang() {
    let f = two_shards();
    std::fs::remove_file(f.join("m-1.safetensors")).expect("removed");
    let fifo = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mknodat(rustix::fs::CWD, f.join("m-1.safetensors"), rustix::fs::FileType::Fifo, fifo, 0)
        .expect("made");
    assert_message(&refused(&f), &["m-1.safetensors", "pipe"]);
    let f = two_shards();
    std::fs::remove_file(f.join("m-1.safetensors")).expect("removed");
    std::fs::create_dir(f.join("m-1.safetensors")).expect("made");
    assert_message(&refused(&f), &["m-1.safetensors", "a folder"]);
}

#[test]
fn what_counts_as_a_checkpoint() {
    let f = Folder::new();
    assert_message(&refused(&f), &["neither model.safetensors nor model.safetensors.index.json"]);
    f.put("weights.safetensors", &shard(&[t("a", "U8", &[1])]));
    assert_message(&refused(&f), &["weights.safetensors", "by its own name"]);
    Checkpoint::open(&f.join("weights.safetensors"), &OpenOptions::default())
        .expect("a lone file with a config");
    f.put("weights2.safetensors", &shard(&[t("b", "U8", &[1])]));
    assert_message(&refused(&f), &["2 safetensors files", "fetch the index"]);
    std::fs::remove_file(f.join("config.json")).expect("removed");
    let e = Checkpoint::open(&f.join("weights.safetensors"), &OpenOptions::default()).expect_err("no config");
    assert_message(&e, &["config.json is missing"]);
    let any = OpenOptions { allow_missing_config: true, ..OpenOptions::default() };
    Checkpoint::open(&f.join("weights.safetensors"), &any).expect("a collection of tensors");
    let e = Checkpoint::open(&f.join("absent"), &OpenOptions::default()).expect_err("absent");
    assert!(matches!(e, CheckpointError::Io { .. }), "{e}");
    f.put("x.bin", b"");
    assert_message(&Checkpoint::open(&f.join("x.bin"), &any).expect_err("no"), &[".safetensors"]);

    let f = Folder::new();
    f.put("x-00001-of-00002.gguf", b"GGUF");
    assert_message(&refused(&f), &["GGUF", "invalid GGUF header"]);
    let e = Checkpoint::open(&f.join("x-00001-of-00002.gguf"), &any).expect_err("no");
    assert_message(&e, &["GGUF"]);
    let f = Folder::new();
    std::fs::create_dir_all(f.join("snapshots/abc")).expect("made");
    assert_message(&refused(&f), &["Hugging Face cache", "snapshots"]);

    let f = two_shards();
    let e = Checkpoint::open(&f.join("m-1.safetensors"), &OpenOptions::default()).expect_err("a part");
    assert_message(&e, &["one of the 2 shards", "pass the folder"]);
    let c = Checkpoint::open(&f.join("model.safetensors.index.json"), &OpenOptions::default())
        .expect("by its index");
    assert_eq!(c.tensors().len(), 2);
    // Files beside a single-file model are not part of it.
    let f = Folder::single(&[t("a.weight", "BF16", &[2])]);
    f.put("adapter.safetensors", &shard(&[t("a.weight", "BF16", &[2])]));
    assert_eq!(f.open().expect("opens").shards().len(), 1);
}

#[test]
fn malformed_headers_are_refused_with_their_reason() {
    let ok = r#""dtype":"U8","shape":[2],"data_offsets":[0,2]"#;
    let cases: Vec<(Vec<u8>, &str)> = vec![
        (b"".to_vec(), "end of the header"),
        (b" {}".to_vec(), "expected '{'"),
        (b"[]".to_vec(), "expected '{'"),
        (b"{".to_vec(), "EOF"),
        (b"{}}".to_vec(), "trailing"),
        (b"{\"a\xff\":{}}".to_vec(), "UTF-8"),
        (format!(r#"{{"a":{{{ok}}},"a":{{{ok}}}}}"#).into(), "a appears twice"),
        (format!(r#"{{"__metadata__":{{}},"a":{{{ok}}},"__metadata__":{{}}}}"#).into(), "__metadata__ appears twice"),
        (format!(r#"{{"__metadata__":{{"x":"1","x":"2"}},"a":{{{ok}}}}}"#).into(), "__metadata__.x appears twice"),
        (format!(r#"{{"__metadata__":{{"x":1}},"a":{{{ok}}}}}"#).into(), "expected a string"),
        (format!(r#"{{"a":{{{ok},"dtype":"U8"}}}}"#).into(), "dtype appears twice"),
        (format!(r#"{{"a":{{{ok},"more":1}}}}"#).into(), "unknown member \"more\""),
        (br#"{"a":{"shape":[2],"data_offsets":[0,2]}}"#.to_vec(), "dtype is missing"),
        (br#"{"a":{"dtype":"U8","data_offsets":[0,2]}}"#.to_vec(), "shape is missing"),
        (br#"{"a":{"dtype":"U8","shape":[2]}}"#.to_vec(), "data_offsets is missing"),
        (br#"{"a":{"dtype":"U9","shape":[2],"data_offsets":[0,2]}}"#.to_vec(), "unknown dtype \"U9\""),
        (br#"{"a":{"dtype":"U8","shape":[2.0],"data_offsets":[0,2]}}"#.to_vec(), "invalid type"),
        (br#"{"a":{"dtype":"U8","shape":[-2],"data_offsets":[0,2]}}"#.to_vec(), "invalid value"),
        (br#"{"a":{"dtype":"U8","shape":[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1],"data_offsets":[0,1]}}"#.to_vec(), "more than 16"),
        (br#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,1,2]}}"#.to_vec(), "more than 2"),
        (br#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0]}}"#.to_vec(), "expected 2 numbers"),
        (format!(r#"{{"":{{{ok}}}}}"#).into(), "empty name"),
        (format!(r#"{{"a\u001b[31m":{{{ok}}}}}"#).into(), "control character"),
        (format!(r#"{{"{}":{{{ok}}}}}"#, "n".repeat(513)).into(), "513 bytes"),
        (br#"{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,2]}}"#.to_vec(), "expected 3 bytes for U8 [3], found 2"),
        (br#"{"a":{"dtype":"BF16","shape":[2],"data_offsets":[0,2]}}"#.to_vec(), "expected 4 bytes"),
        (br#"{"a":{"dtype":"F4","shape":[1],"data_offsets":[0,1]}}"#.to_vec(), "whole number of bytes"),
        (br#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}"#.to_vec(), "gap"),
        (br#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[1],"data_offsets":[3,4]}}"#.to_vec(), "gap"),
        (br#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}"#.to_vec(), "overlap"),
        (br#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}"#.to_vec(), "overlap"),
        (br#"{"a":{"dtype":"U8","shape":[18446744073709551615,2],"data_offsets":[0,2]}}"#.to_vec(), "below 2^64"),
        (br#"{"a":{"dtype":"U8","shape":[18446744073709551615],"data_offsets":[0,18446744073709551615]}}"#.to_vec(), "2^64"),
    ];
    for (json, reason) in cases {
        let f = Folder::new();
        f.put("model.safetensors", &file(&json, b"xy"));
        let e = refused(&f);
        assert!(
            matches!(e, CheckpointError::Header { .. } | CheckpointError::Entry { .. }),
            "{}: {e}",
            String::from_utf8_lossy(&json)
        );
        assert_message(&e, &["model.safetensors", reason]);
    }
}

#[test]
fn offsets_that_fall_are_refused() {
    let f = Folder::new();
    f.put("model.safetensors", &file(br#"{"a":{"dtype":"U8","shape":[],"data_offsets":[0,0]},"b":{"dtype":"U8","shape":[0],"data_offsets":[1,0]}}"#, b"x"));
    assert!(matches!(refused(&f), CheckpointError::Entry { .. }));
}

#[test]
fn header_length_beyond_the_cap_or_the_file_is_refused_without_allocating() {
    let f = Folder::new();
    f.put("model.safetensors", &[&100_000_001u64.to_le_bytes()[..], b"{}"].concat());
    let e = refused(&f);
    assert!(matches!(e, CheckpointError::TooLarge { limit: 100_000_000, found: 100_000_001, .. }), "{e}");
    f.put("model.safetensors", &[&u64::MAX.to_le_bytes()[..], b"{}"].concat());
    assert!(matches!(refused(&f), CheckpointError::TooLarge { .. }));
    f.put("model.safetensors", &[&99_000_000u64.to_le_bytes()[..], b"{}"].concat());
    assert!(matches!(refused(&f), CheckpointError::Truncated { .. }));
}

#[test]
fn trailing_bytes_are_refused() {
    let mut bytes = shard(&[t("a", "U8", &[4])]);
    bytes.push(0);
    let f = Folder::new();
    f.put("model.safetensors", &bytes);
    let e = refused(&f);
    assert!(matches!(e, CheckpointError::TrailingBytes { .. }), "{e}");
    assert_message(&e, &["1 bytes follow"]);
}

#[test]
fn empty_tensors_and_padded_headers_are_fine() {
    let tensors = [t("e", "F32", &[0, 4]), t("a", "U8", &[4]), t("z", "F32", &[0])];
    let text = header(&tensors) + "   ";
    let f = Folder::new();
    f.put("model.safetensors", &file(text.as_bytes(), &tensors[1].data));
    let c = f.open().expect("opens");
    assert_eq!(c.read_all(c.get("z").expect("there")).expect("read"), b"");
    assert!(c.data_present());
    // No tensor at all is a valid file.
    let f = Folder::new();
    f.put("model.safetensors", &file(b"{}", b""));
    assert_eq!(f.open().expect("opens").tensors().len(), 0);
}

#[test]
fn file_that_shrinks_or_changes_while_in_use_is_an_error() {
    let f = Folder::single(&[t("a", "U8", &[1000])]);
    let c = f.open().expect("opens");
    let a = c.get("a").expect("there");
    let len = std::fs::metadata(f.join("model.safetensors")).expect("metadata").len();
    let handle = std::fs::File::options().write(true).open(f.join("model.safetensors")).expect("open");
    handle.set_len(len - 500).expect("shrunk");
    let e = c.read_all(a).expect_err("shrunk");
    assert!(matches!(e, CheckpointError::Changed { .. }), "{e}");
    assert_message(&e, &["model.safetensors", "bytes"]);
    std::fs::remove_file(f.join("model.safetensors")).expect("removed");
    assert!(matches!(c.read_all(a), Err(CheckpointError::Io { .. })));
}

#[test]
fn ranges_outside_the_tensor_are_refused() {
    let f = Folder::single(&[t("a", "U8", &[10]), t("b", "U8", &[10])]);
    let c = f.open().expect("opens");
    let a = c.get("a").expect("there");
    let mut out = [0; 10];
    for (start, end, len) in [(0, 11, 10), (5, 4, 0), (0, 5, 4), (u64::MAX, u64::MAX, 0), (11, 12, 1)] {
        let e = c.read(a, start..end, &mut out[..len]).expect_err("misfit");
        assert!(matches!(e, CheckpointError::Range { .. }), "{start}..{end}: {e}");
    }
    c.read(a, 3..7, &mut out[..4]).expect("fits");
    assert_eq!(out[..4], [0x23, 0x24, 0x25, 0x26]);
    c.read(a, 10..10, &mut []).expect("nothing");
}

#[test]
fn resources_cannot_be_read_from_elsewhere() {
    let f = Folder::single(&[]);
    f.put("tokenizer.json", b"{\"a\":1}");
    let c = f.open().expect("opens");
    assert_eq!(c.file_bytes("tokenizer.json").expect("read").as_deref(), Some(&b"{\"a\":1}"[..]));
    assert_eq!(c.file_bytes("absent.json").expect("absent"), None);
    for name in ["../x", "/etc/passwd", "..", "", "a/b"] {
        assert!(matches!(c.file_bytes(name), Err(CheckpointError::FileName { .. })), "{name}");
    }
    f.put("config.json", b"[1]");
    assert_message(&c.config().expect_err("no object"), &["config.json", "object"]);
    f.put("config.json", b"{");
    assert_message(&c.config().expect_err("no JSON"), &["config.json", "JSON"]);
    f.put("config.json", &vec![b' '; (4 << 20) + 1]);
    assert!(matches!(c.config(), Err(CheckpointError::TooLarge { .. })));
}

#[test]
fn wrong_total_size_is_a_warning() {
    let f = two_shards();
    f.put(
        "model.safetensors.index.json",
        br#"{"metadata":{"total_size":41},"weight_map":{"a.weight":"m-1.safetensors","b.weight":"m-2.safetensors"}}"#,
    );
    let c = f.open().expect("opens");
    assert!(c.warnings()[0].contains("41") && c.warnings()[0].contains("40"), "{:?}", c.warnings());
}
