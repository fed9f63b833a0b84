//! Tensor types of GGUF files (ggml): names, block sizes, exact decoding, word checks.
//!
//! A row of a ggml tensor is a sequence of blocks; each block holds its scales and codes together. All block types of
//! the stored oracle decode here to the value that the format defines, rounded once to F32: with one exception the
//! exact value fits F32 (an FP16 scale times a small integer), and types with a minimum (Q2_K, Q4_1, Q4_K, Q5_1, Q5_K)
//! subtract two exact products with one rounding. [`decode_f64`] gives that difference in F64.
//!
//! What is stored beside the blocks (the `NAME.scale` of an NVFP4 tensor) is not applied here.

mod grids;
mod iquants;
mod kquants;
mod legacy;
pub mod quantize;
mod split;
mod types;

pub use iquants::IQ4_LEVELS;
pub use split::{group, has_offset, split};
pub use types::GgmlType;

use crate::error::{FormatError, Place, expect_len};
use crate::scalar::{bf16_to_f32, f16_to_f32};

/// What decoding makes of a value: F32, F64, or its parts.
pub(crate) trait Value: Copy + Default {
    /// `scale * code`, which F32 holds exactly.
    fn scaled(scale: f32, code: f32) -> Self;
    /// `scale * code + offset`, rounded once.
    fn affine(scale: f32, code: f32, offset: f32) -> Self;
}

impl Value for f32 {
    #[inline]
    fn scaled(scale: f32, code: f32) -> f32 {
        scale * code
    }
    #[inline]
    fn affine(scale: f32, code: f32, offset: f32) -> f32 {
        scale * code + offset
    }
}

impl Value for f64 {
    #[inline]
    fn scaled(scale: f32, code: f32) -> f64 {
        f64::from(scale * code)
    }
    #[inline]
    fn affine(scale: f32, code: f32, offset: f32) -> f64 {
        f64::from(scale * code) + f64::from(offset)
    }
}

/// Little-endian u16 at byte `at`.
#[inline]
fn u16_at(b: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([b[at], b[at + 1]])
}

/// Little-endian u32 at byte `at`.
#[inline]
fn u32_at(b: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]])
}

/// FP16 word at byte `at`.
#[inline]
fn half(b: &[u8], at: usize) -> f32 {
    f16_to_f32(u16_at(b, at))
}

/// Decodes whole blocks: `bytes` holds `out.len()` values of type `ty`, in order.
///
/// Words are not judged: a NaN scale gives NaN values; see [`validate`].
///
/// # Errors
/// A type that stores no weights ([`GgmlType::is_decodable`]); lengths that are not whole blocks or do not agree.
pub fn decode_f32(ty: GgmlType, bytes: &[u8], out: &mut [f32]) -> Result<(), FormatError> {
    if ty == GgmlType::F64 {
        check(ty, bytes, out.len())?;
        for (o, w) in out.iter_mut().zip(bytes.chunks_exact(8)) {
            *o = f64_word(w) as f32;
        }
        return Ok(());
    }
    decode(ty, bytes, out)
}

/// As [`decode_f32`], into F64: the exact value of every type but those with a minimum, whose difference of two exact
/// products is rounded once to F64.
///
/// # Errors
/// As [`decode_f32`].
pub fn decode_f64(ty: GgmlType, bytes: &[u8], out: &mut [f64]) -> Result<(), FormatError> {
    if ty == GgmlType::F64 {
        check(ty, bytes, out.len())?;
        for (o, w) in out.iter_mut().zip(bytes.chunks_exact(8)) {
            *o = f64_word(w);
        }
        return Ok(());
    }
    decode(ty, bytes, out)
}

fn f64_word(w: &[u8]) -> f64 {
    f64::from_le_bytes([w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7]])
}

/// Checks that `bytes` are the whole blocks of `values` values of a decodable type.
fn check(ty: GgmlType, bytes: &[u8], values: usize) -> Result<(), FormatError> {
    if !ty.is_decodable() {
        return Err(FormatError::GgmlNotDecodable { ty });
    }
    expect_len("ggml blocks", ty.row_bytes(values as u64)?, bytes.len())
}

fn decode<T: Value>(ty: GgmlType, bytes: &[u8], out: &mut [T]) -> Result<(), FormatError> {
    check(ty, bytes, out.len())?;
    let f: fn(&[u8], &mut [T]) = match ty {
        GgmlType::F32 => |b, o| o[0] = T::scaled(1.0, f32::from_bits(u32_at(b, 0))),
        GgmlType::F16 => |b, o| o[0] = T::scaled(1.0, half(b, 0)),
        GgmlType::Bf16 => |b, o| o[0] = T::scaled(1.0, bf16_to_f32(u16_at(b, 0))),
        GgmlType::Q4_0 => legacy::q4_0,
        GgmlType::Q4_1 => legacy::q4_1,
        GgmlType::Q5_0 => legacy::q5_0,
        GgmlType::Q5_1 => legacy::q5_1,
        GgmlType::Q8_0 => legacy::q8_0,
        GgmlType::Q1_0 => legacy::q1_0,
        GgmlType::Q2_0 => legacy::q2_0,
        GgmlType::Tq1_0 => legacy::tq1_0,
        GgmlType::Tq2_0 => legacy::tq2_0,
        GgmlType::Mxfp4 => legacy::mxfp4,
        GgmlType::Nvfp4 => legacy::nvfp4,
        GgmlType::Q2K => kquants::q2_k,
        GgmlType::Q3K => kquants::q3_k,
        GgmlType::Q4K => kquants::q4_k,
        GgmlType::Q5K => kquants::q5_k,
        GgmlType::Q6K => kquants::q6_k,
        GgmlType::Iq1S => iquants::iq1_s,
        GgmlType::Iq1M => iquants::iq1_m,
        GgmlType::Iq2Xxs => iquants::iq2_xxs,
        GgmlType::Iq2Xs => iquants::iq2_xs,
        GgmlType::Iq2S => iquants::iq2_s,
        GgmlType::Iq3Xxs => iquants::iq3_xxs,
        GgmlType::Iq3S => iquants::iq3_s,
        GgmlType::Iq4Nl => iquants::iq4_nl,
        GgmlType::Iq4Xs => iquants::iq4_xs,
        // `check` refused them; F64 does not come here.
        _ => return Err(FormatError::GgmlNotDecodable { ty }),
    };
    let values = ty.block_len() as usize;
    for (block, o) in bytes.chunks_exact(ty.block_bytes() as usize).zip(out.chunks_exact_mut(values)) {
        f(block, o);
    }
    Ok(())
}

/// Kind, word and rule of an illegal scale of one block.
type Illegal = (&'static str, u32, usize, &'static str);

/// The first illegal word of a block, with the number of the first value that it scales.
fn illegal(ty: GgmlType, b: &[u8]) -> Option<Illegal> {
    const FINITE: &str = "a scale must be finite";
    let finite = |at: usize, what| {
        let word = u16_at(b, at);
        (word & 0x7C00 == 0x7C00).then_some((what, u32::from(word), 0, FINITE))
    };
    let (d, min) = ("block scale", "block minimum");
    match ty {
        GgmlType::Q4_0 | GgmlType::Q5_0 | GgmlType::Q8_0 | GgmlType::Q1_0 | GgmlType::Q2_0 => finite(0, d),
        GgmlType::Q4_1 | GgmlType::Q5_1 | GgmlType::Q4K | GgmlType::Q5K => {
            finite(0, d).or_else(|| finite(2, min))
        }
        GgmlType::Q2K => finite(80, d).or_else(|| finite(82, min)),
        GgmlType::Q3K => finite(108, d),
        GgmlType::Q6K => finite(208, d),
        GgmlType::Tq1_0 => finite(52, d),
        GgmlType::Tq2_0 => finite(64, d),
        GgmlType::Iq1S
        | GgmlType::Iq2Xxs
        | GgmlType::Iq2Xs
        | GgmlType::Iq2S
        | GgmlType::Iq3Xxs
        | GgmlType::Iq3S
        | GgmlType::Iq4Nl
        | GgmlType::Iq4Xs => finite(0, d),
        GgmlType::Iq1M => {
            let word = iquants::iq1_m_scale(b);
            (word & 0x7C00 == 0x7C00).then_some((d, u32::from(word), 0, FINITE))
        }
        GgmlType::Mxfp4 if b[0] == 0xFF => Some((d, 0xFF, 0, "E8M0 word 255 is NaN")),
        // 4 x 2^126 and 2 x 2^127 are beyond FP32.
        GgmlType::Mxfp4 if b[0] >= 0xFD => {
            let mut values = [0f32; 32];
            legacy::mxfp4(b, &mut values);
            let beyond = values.iter().position(|v| v.is_infinite());
            beyond.map(|i| (d, u32::from(b[0]), i, "a value must not exceed FP32"))
        }
        // A word 0x7F is legal here: the format defines it as zero.
        GgmlType::Nvfp4 => (0..4)
            .find(|&i| b[i] & 0x80 != 0)
            .map(|i| (d, u32::from(b[i]), 16 * i, "UE4M3 has no sign: bit 7 must be 0")),
        _ => None,
    }
}

/// Checks the scales of whole rows of `row_len` values each, the first of them row `first_row` of its tensor: FP16
/// scales and minima must be finite, E8M0 scales numbers whose values FP32 holds, UE4M3 scales without a sign. Plain types (F32, F16, BF16) and
/// codes have no illegal words.
///
/// # Errors
/// [`FormatError::IllegalWord`] with row and column; a length that is not whole rows; a type that stores no weights.
pub fn validate(ty: GgmlType, bytes: &[u8], row_len: u64, first_row: u64) -> Result<(), FormatError> {
    if !ty.is_decodable() {
        return Err(FormatError::GgmlNotDecodable { ty });
    }
    let row_bytes = ty.row_bytes(row_len)?;
    if row_bytes == 0 || bytes.len() as u64 % row_bytes != 0 {
        let expected = (bytes.len() as u64).checked_div(row_bytes).unwrap_or(0) * row_bytes;
        return Err(FormatError::Length { what: "ggml rows", expected, found: bytes.len() as u64 });
    }
    if ty.is_plain() {
        return Ok(());
    }
    let per_row = row_len / ty.block_len();
    for (i, block) in bytes.chunks_exact(ty.block_bytes() as usize).enumerate() {
        if let Some((what, word, value, why)) = illegal(ty, block) {
            let i = i as u64;
            let place = Place::at(first_row + i / per_row, i % per_row * ty.block_len() + value as u64);
            return Err(FormatError::IllegalWord { what, word, place, why });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_that_disagree_are_refused() {
        let mut out = [0f32; 64];
        assert!(decode_f32(GgmlType::Q8_0, &[0; 68], &mut out).is_ok());
        for bytes in [0, 34, 67, 69] {
            let err = decode_f32(GgmlType::Q8_0, &vec![0; bytes], &mut out).unwrap_err();
            assert!(matches!(err, FormatError::Length { expected: 68, .. }), "{err}");
        }
        let err = decode_f32(GgmlType::Q4K, &[0; 144], &mut out).unwrap_err();
        assert!(matches!(err, FormatError::GgmlRow { .. }), "{err}");
        let err = decode_f32(GgmlType::Q8K, &[0; 292], &mut [0.0; 256]).unwrap_err();
        assert!(err.to_string().contains("Q8_K"), "{err}");
    }

    #[test]
    fn illegal_scales_are_named_with_row_and_column() {
        let mut bytes = vec![0u8; 4 * 34];
        bytes[3 * 34..][..2].copy_from_slice(&0x7E00u16.to_le_bytes());
        let err = validate(GgmlType::Q8_0, &bytes, 64, 10).unwrap_err();
        let FormatError::IllegalWord { place, word, .. } = err else { panic!("{err}") };
        assert_eq!((place.row, place.column, word), (11, 32, 0x7E00));

        let mut block = [0u8; 36];
        block[2] = 0x81;
        let err = validate(GgmlType::Nvfp4, &block, 64, 0).unwrap_err();
        assert!(matches!(err, FormatError::IllegalWord { place: Place { column: 32, .. }, .. }), "{err}");
        block[2] = 0x7F;
        validate(GgmlType::Nvfp4, &block, 64, 0).expect("0x7F is zero");

        let mut block = [0u8; 17];
        block[0] = 0xFF;
        assert!(validate(GgmlType::Mxfp4, &block, 32, 0).is_err());
        (block[0], block[4]) = (0xFD, 0x05);
        validate(GgmlType::Mxfp4, &block, 32, 0).expect("3 x 2^126 is within FP32");
        block[4] = 0x06;
        let err = validate(GgmlType::Mxfp4, &block, 32, 0).unwrap_err();
        assert!(matches!(err, FormatError::IllegalWord { place: Place { column: 3, .. }, .. }), "{err}");
        // The scale of IQ1_M is spread over four words.
        let mut block = [0u8; 56];
        block[55] = 0x70;
        block[53] = 0xC0;
        assert!(validate(GgmlType::Iq1M, &block, 256, 0).is_err());
        assert!(validate(GgmlType::F32, &f32::NAN.to_le_bytes(), 1, 0).is_ok());
        assert!(validate(GgmlType::Q8_0, &[0; 35], 32, 0).is_err());
    }
}
