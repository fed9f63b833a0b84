//! Reference roundings of ggml (`quantize_row_*_ref`), for comparing a file with what it was made from. Types whose
//! quantizers search or weigh by importance have no single stated rounding and are not here.

use super::GgmlType;
use crate::error::{FormatError, expect_len};
use crate::scalar::{bf16_from_f32, f16_from_f32};

/// Whether [`row`] knows the rounding of a type.
#[must_use]
pub fn is_stated(ty: GgmlType) -> bool {
    matches!(ty, GgmlType::F32 | GgmlType::F16 | GgmlType::Bf16 | GgmlType::Q8_0)
}

/// Rounds values (whole blocks) to a type with a stated rounding:
/// F16 and BF16 to nearest even; Q8_0 d = amax / 127 in F32, code = round-half-away(x * fl(1 / d)), d stored as F16.
///
/// # Errors
/// A type without a stated rounding; lengths that do not agree.
pub fn row(ty: GgmlType, values: &[f32], out: &mut [u8]) -> Result<(), FormatError> {
    if !is_stated(ty) {
        return Err(FormatError::GgmlNotDecodable { ty });
    }
    expect_len("ggml blocks", ty.row_bytes(values.len() as u64)?, out.len())?;
    match ty {
        GgmlType::F32 => words::<4>(values, out, f32::to_le_bytes),
        GgmlType::F16 => words::<2>(values, out, |v| f16_from_f32(v).to_le_bytes()),
        GgmlType::Bf16 => words::<2>(values, out, |v| bf16_from_f32(v).to_le_bytes()),
        _ => {
            for (x, block) in values.chunks_exact(32).zip(out.chunks_exact_mut(34)) {
                let amax = x.iter().fold(0f32, |m, v| m.max(v.abs()));
                let d = amax / 127.0;
                let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
                block[..2].copy_from_slice(&f16_from_f32(d).to_le_bytes());
                for (o, v) in block[2..].iter_mut().zip(x) {
                    *o = (v * inverse).round() as i8 as u8;
                }
            }
        }
    }
    Ok(())
}

fn words<const B: usize>(values: &[f32], out: &mut [u8], f: impl Fn(f32) -> [u8; B]) {
    for (o, v) in out.as_chunks_mut::<B>().0.iter_mut().zip(values) {
        *o = f(*v);
    }
}
