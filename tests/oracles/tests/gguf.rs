//! GGUF as others read it: metadata and tensor lists by gguf-rs, blocks decoded by candle.

use candle_core::quantized::{GgmlDType, ggml_file::qtensor_from_ggml};
use candle_core::{Device, Shape};
use infernix_checkpoint::Gguf;
use infernix_checkpoint::gguf::Value;
use infernix_formats::ggml::{self, GgmlType};
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
        let theirs = container.decode().unwrap_or_else(|e| panic!("{name}: {e}"));
        // A part of a split model is opened by its first: all parts together.
        let ours = Gguf::open(&path).unwrap();
        let parts = ours.shards().len();
        for t in theirs.tensors() {
            let mine = ours.get(&t.name).unwrap_or_else(|| panic!("{name}: {} is missing", t.name));
            let shape: Vec<u64> = mine.shape.iter().rev().copied().collect();
            assert_eq!((mine.ty.id(), shape), (t.kind, t.shape.clone()), "{name}: {}", t.name);
            assert_eq!(mine.offset, theirs.data_offset() + t.offset, "{name}: {}", t.name);
            assert_eq!(mine.rows() * mine.row_bytes(), t.size, "{name}: {}", t.name);
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

const TYPES: [(GgmlType, GgmlDType); 12] = [
    (GgmlType::Bf16, GgmlDType::BF16),
    (GgmlType::F16, GgmlDType::F16),
    (GgmlType::Q4_0, GgmlDType::Q4_0),
    (GgmlType::Q4_1, GgmlDType::Q4_1),
    (GgmlType::Q5_0, GgmlDType::Q5_0),
    (GgmlType::Q5_1, GgmlDType::Q5_1),
    (GgmlType::Q8_0, GgmlDType::Q8_0),
    (GgmlType::Q2K, GgmlDType::Q2K),
    (GgmlType::Q3K, GgmlDType::Q3K),
    (GgmlType::Q4K, GgmlDType::Q4K),
    (GgmlType::Q5K, GgmlDType::Q5K),
    (GgmlType::Q6K, GgmlDType::Q6K),
];

fn candle(ty: GgmlDType, bytes: &[u8], values: usize) -> Vec<f32> {
    let tensor = qtensor_from_ggml(ty, bytes, vec![values], &Device::Cpu).unwrap();
    assert_eq!(tensor.shape(), &Shape::from(values));
    tensor.dequantize(&Device::Cpu).unwrap().to_vec1().unwrap()
}

/// Compares values of equal blocks; zeros of either sign are one value.
fn compare(ty: GgmlType, theirs: GgmlDType, bytes: &[u8]) -> usize {
    let values = bytes.len() / ty.block_bytes() as usize * ty.block_len() as usize;
    let mut ours = vec![0f32; values];
    if ggml::decode_f32(ty, bytes, &mut ours).is_err() {
        // A scale without a value, which candle computes with.
        return 0;
    }
    for (i, (a, b)) in ours.iter().zip(candle(theirs, bytes, values)).enumerate() {
        assert!(
            a.to_bits() == b.to_bits() || (*a == 0.0 && b == 0.0),
            "{ty} value {i}: {a} here, {b} in candle"
        );
    }
    values
}

#[test]
fn blocks_decode_as_in_candle() {
    let mut state = 1u64;
    for (ty, theirs) in TYPES {
        let mut compared = 0;
        for _ in 0..2000 {
            let bytes: Vec<u8> = (0..ty.block_bytes())
                .map(|_| {
                    state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    (state >> 33) as u8
                })
                .collect();
            compared += compare(ty, theirs, &bytes);
        }
        assert!(compared > 0, "{ty}");
    }
    let stored = root().join("../shared/models/flash-demo-gguf/ggml-types.safetensors");
    let Ok(bytes) = std::fs::read(&stored) else {
        eprintln!("skipped: {} is not here", stored.display());
        return;
    };
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    for (ty, theirs) in TYPES {
        let raw = file.tensor(&format!("{}.raw", ty.name())).unwrap();
        assert_eq!(compare(ty, theirs, raw.data()), 8 * 512, "{ty}");
    }
}
