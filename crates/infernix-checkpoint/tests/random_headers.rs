//! Random headers: no panic, no unbounded allocation, and agreement with the safetensors crate.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use infernix_checkpoint::{Checkpoint, OpenOptions, parse_header};
use proptest::prelude::*;

/// Records the largest single allocation.
struct Largest;

static LARGEST: AtomicUsize = AtomicUsize::new(0);

#[expect(unsafe_code, reason = "a counting allocator has to implement an unsafe trait")]
// SAFETY: every call is passed to the system allocator unchanged.
unsafe impl GlobalAlloc for Largest {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promises are the system allocator's.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, p: *mut u8, layout: Layout) {
        // SAFETY: `p` came from `alloc` above with this layout.
        unsafe { System.dealloc(p, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Largest = Largest;

/// Header-like text: tokens of the format in any order.
fn tokens() -> impl Strategy<Value = String> {
    let token = prop_oneof![
        8 => prop::sample::select(vec![
            "{", "}", "[", "]", ",", ":", "\"", "\"a\"", "\"b.weight\"", "\"dtype\"", "\"shape\"", "\"data_offsets\"",
            "\"BF16\"", "\"U8\"", "\"F4\"", "__metadata__", "0", "1", "2", "18446744073709551615", "-1", "1e9", "null",
            " ", "\\u0000", "\\ud800",
        ]).prop_map(str::to_owned),
        1 => any::<u64>().prop_map(|n| n.to_string()),
        1 => "\\PC{0,3}",
    ];
    prop::collection::vec(token, 0..60).prop_map(|t| t.concat())
}

/// Entries that are nearly right.
fn entries() -> impl Strategy<Value = String> {
    let entry = (
        0u8..6,
        prop::sample::select(vec!["U8", "BF16", "F32", "F4", "X9", "F8_E4M3"]),
        prop::collection::vec(0u64..5, 0..3),
        0u64..20,
        0u64..30,
    );
    prop::collection::vec(entry, 0..5).prop_map(|list| {
        let mut at = 0;
        let members: Vec<String> = list
            .iter()
            .map(|(name, dtype, shape, begin, extra)| {
                let width = match *dtype {
                    "BF16" => 2,
                    "F32" => 4,
                    _ => 1,
                };
                let bytes: u64 = shape.iter().product::<u64>() * width;
                let begin = if *begin < 18 { at } else { at + begin };
                let end = if *extra < 27 { begin + bytes } else { begin + bytes + extra };
                at = end;
                format!("\"t{name}\":{{\"dtype\":\"{dtype}\",\"shape\":{shape:?},\"data_offsets\":[{begin},{end}]}}")
            })
            .collect();
        format!("{{{}}}", members.join(","))
    })
}

fn open(bytes: &[u8]) -> bool {
    let f = common::Folder::new();
    f.put("model.safetensors", bytes);
    let open = Checkpoint::open(f.path(), &OpenOptions { headers_only_ok: true, ..OpenOptions::default() });
    if let Ok(c) = &open {
        // What was accepted can be resolved and read, or says why not.
        for t in c.resolve_each().flatten() {
            let rows = t.rows().min(4);
            if t.row_len() > 1 << 16 {
                continue;
            }
            let _ = t.decode_rows_f32(0..rows, &mut vec![0.0; (rows * t.row_len()) as usize]);
        }
        for t in c.tensors() {
            let _ = c.read_all(t);
        }
    }
    open.is_ok()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_bytes_as_a_file(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        open(&bytes);
        prop_assert!(LARGEST.load(Ordering::Relaxed) < 64 << 20);
    }

    #[test]
    fn random_header_after_any_length(len in prop_oneof![0u64..300, any::<u64>()], json in tokens(), tail in 0usize..40) {
        let mut bytes = len.to_le_bytes().to_vec();
        bytes.extend_from_slice(json.as_bytes());
        bytes.extend(std::iter::repeat_n(1, tail));
        open(&bytes);
        prop_assert!(LARGEST.load(Ordering::Relaxed) < 64 << 20);
    }

    #[test]
    fn random_tokens_parse_or_fail(json in tokens(), data_start in any::<u64>()) {
        let _ = parse_header(Path::new("f"), json.as_bytes(), data_start);
    }

    #[test]
    fn what_is_accepted_the_safetensors_crate_accepts(json in entries()) {
        if let Ok(entries) = parse_header(Path::new("f"), json.as_bytes(), 0) {
            let mut file = common::file(json.as_bytes(), b"");
            file.extend(std::iter::repeat_n(1, entries.last().map_or(0, |e| e.end) as usize));
            let theirs = safetensors::SafeTensors::deserialize(&file);
            prop_assert!(theirs.is_ok(), "{json}: {:?}", theirs.err());
            let theirs = theirs.expect("checked");
            prop_assert_eq!(theirs.len(), entries.len());
            for e in &entries {
                let view = theirs.tensor(&e.name).expect("same names");
                prop_assert_eq!(view.data().len() as u64, e.end - e.begin);
                prop_assert_eq!(view.dtype().to_string(), e.dtype.name());
                prop_assert_eq!(view.shape().iter().map(|&d| d as u64).collect::<Vec<_>>(), e.shape.to_vec());
            }
            prop_assert!(open(&file));
        }
    }
}

/// Index-like text over a shard that is there and names that lead elsewhere.
fn index_text() -> impl Strategy<Value = String> {
    let token = prop::sample::select(vec![
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        "\"weight_map\"",
        "\"metadata\"",
        "\"total_size\"",
        "\"a\"",
        "\"b\"",
        "1",
        "-1",
        "1e999",
        "null",
        "\"model.safetensors\"",
        "\"../model.safetensors\"",
        "\"/etc/passwd\"",
        "\"\"",
        "\"\\u0000\"",
        "{\"weight_map\":{\"a\":\"model.safetensors\"",
        "\"a\":\"model.safetensors\",",
        "\"metadata\":{\"total_size\":9},",
    ]);
    prop::collection::vec(token, 0..20).prop_map(|t| t.concat())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_index_opens_or_fails(text in index_text()) {
        let f = common::Folder::single(&[common::t("a", "U8", &[2])]);
        f.put("model.safetensors.index.json", text.as_bytes());
        if let Ok(c) = f.open() {
            prop_assert!(c.tensors().len() == 1);
        }
    }
}

#[test]
fn huge_lengths_and_shapes_allocate_nothing() {
    let json = r#"{"a":{"dtype":"U8","shape":[9007199254740992],"data_offsets":[0,9007199254740992]}}"#;
    assert!(open(&common::file(json.as_bytes(), b"")), "headers alone may describe any size");
    assert!(LARGEST.load(Ordering::Relaxed) < 64 << 20);
}
