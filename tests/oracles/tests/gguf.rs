//! GGUF files as gguf-rs reads them: metadata and tensor lists.

use infernix_checkpoint::Gguf;
use infernix_checkpoint::gguf::Value;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// GGUF files at hand: small ones of the repository, the shared models where they are.
fn files() -> Vec<PathBuf> {
    let mut out: Vec<PathBuf> =
        ["toy", "tower"].iter().map(|n| root().join("fuzz/corpus/gguf").join(n)).collect();
    let models = root().join("../shared/models");
    for folder in ["dense-demo-gguf", "flash-demo-gguf", "flash-wide-gguf"] {
        let Ok(entries) = std::fs::read_dir(models.join(folder)) else {
            eprintln!("skipped: {folder} is not here");
            continue;
        };
        out.extend(entries.map(|e| e.unwrap().path()).filter(|p| p.extension().is_some_and(|e| e == "gguf")));
    }
    out.sort();
    out
}

/// gguf-rs gives values as JSON; a number is compared as such.
fn same(ours: &Value, theirs: &serde_json::Value) -> bool {
    match ours {
        Value::Text(t) => theirs.as_str() == Some(t),
        Value::Bool(b) => theirs.as_bool() == Some(*b),
        Value::F32(v) => theirs.as_f64().is_some_and(|t| t as f32 == *v),
        Value::F64(v) => theirs.as_f64() == Some(*v),
        other => match (other.unsigned(), theirs.as_u64()) {
            (Some(a), Some(b)) => a == b,
            _ => theirs.as_i64().is_some(),
        },
    }
}

#[test]
fn metadata_and_tensors_are_those_that_gguf_rs_reads() {
    for path in files() {
        let name = path.display().to_string();
        let mut container = gguf_rs::get_gguf_container_array_size(&name, u64::MAX).unwrap();
        // A part of a split model is opened by its first: all parts together.
        let ours = Gguf::open(&path).unwrap();
        let theirs = match container.decode() {
            Ok(model) => model,
            // Newer types than it knows: NVFP4, Q1_0, Q2_0.
            Err(e) if ours.tensors().any(|t| t.ty.id() >= 40) => {
                eprintln!("{name}: gguf-rs says {e}");
                continue;
            }
            Err(e) => panic!("{name}: {e}"),
        };
        let parts = ours.shards().len();
        for t in theirs.tensors() {
            let mine = ours.get(&t.name).unwrap_or_else(|| panic!("{name}: {} is missing", t.name));
            let shape: Vec<u64> = mine.shape.iter().rev().copied().collect();
            assert_eq!((mine.ty.id(), shape), (t.kind, t.shape.clone()), "{name}: {}", t.name);
            assert_eq!(mine.offset, theirs.data_offset() + t.offset, "{name}: {}", t.name);
            // It takes every type from 10 on to have blocks of 256 values.
            if t.kind < 10 || mine.ty.block_len() == 256 {
                assert_eq!(mine.rows() * mine.row_bytes(), t.size, "{name}: {}", t.name);
            }
        }
        if parts == 1 {
            assert_eq!(ours.tensors().len(), theirs.tensors().len(), "{name}");
        }
        if parts > 1 && !name.contains("-00001-of-") {
            continue;
        }
        let mut count = 0;
        for (key, value) in theirs.metadata() {
            let Some(mine) = ours.metadata().get(key) else { panic!("{name}: {key} is missing") };
            count += 1;
            let Value::Array(array) = mine else {
                assert!(same(mine, value), "{name}: {key} is {mine}, gguf-rs says {value}");
                continue;
            };
            let list = value.as_array().unwrap_or_else(|| panic!("{name}: {key} is no array for gguf-rs"));
            assert_eq!(list.len() as u64, array.count, "{name}: {key}");
            if let Ok(Some(texts)) = ours.text_list(key) {
                let equal = texts.iter().zip(list).all(|(a, b)| b.as_str() == Some(a));
                assert!(equal, "{name}: {key}");
            } else if let Ok(Some(numbers)) = ours.unsigned_list(key) {
                assert!(numbers.iter().zip(list).all(|(a, b)| b.as_u64() == Some(*a)), "{name}: {key}");
            }
        }
        assert_eq!(count, ours.metadata().iter().len(), "{name}");
        eprintln!("{name}: {count} keys, {} tensors", theirs.tensors().len());
    }
}
