//! Blocks as candle decodes them.

use candle_core::quantized::{GgmlDType, ggml_file::qtensor_from_ggml};
use candle_core::{Device, Shape};
use infernix_formats::ggml::{self, GgmlType};
use std::path::Path;

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

/// Compares values of equal blocks and says how many are finite; zeros of either sign are one value, so are NaNs.
fn compare(ty: GgmlType, theirs: GgmlDType, bytes: &[u8]) -> usize {
    let values = bytes.len() / ty.block_bytes() as usize * ty.block_len() as usize;
    let mut ours = vec![0f32; values];
    ggml::decode_f32(ty, bytes, &mut ours).unwrap();
    for (i, (a, b)) in ours.iter().zip(candle(theirs, bytes, values)).enumerate() {
        assert!(*a == b || (a.is_nan() && b.is_nan()), "{ty} value {i}: {a} here, {b} in candle");
    }
    ours.iter().filter(|v| v.is_finite()).count()
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
    let stored = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../../shared/models/flash-demo-gguf/ggml-types.safetensors");
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
