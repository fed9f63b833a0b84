//! Blocks taken apart: exact codes, and the scale (and offset) of each run of values that shares one.

use super::{GgmlType, Value, decode};
use crate::error::{FormatError, expect_len};

/// `code * scale + offset`.
#[derive(Debug, Clone, Copy, Default)]
struct Part {
    code: f32,
    scale: f32,
    offset: f32,
}

impl Value for Part {
    #[inline]
    fn scaled(scale: f32, code: f32) -> Part {
        Part { code, scale, offset: 0.0 }
    }
    #[inline]
    fn affine(scale: f32, code: f32, offset: f32) -> Part {
        Part { code, scale, offset }
    }
}

/// Values that share a scale and an offset: 16 or 32; longer runs are cut at 32. 1 for plain types.
#[must_use]
pub fn group(ty: GgmlType) -> usize {
    match ty {
        _ if ty.is_plain() => 1,
        GgmlType::Q2K
        | GgmlType::Q3K
        | GgmlType::Q6K
        | GgmlType::Iq1M
        | GgmlType::Iq2Xs
        | GgmlType::Iq2S
        | GgmlType::Nvfp4 => 16,
        _ => 32,
    }
}

/// Whether values have an offset beside their scale.
#[must_use]
pub fn has_offset(ty: GgmlType) -> bool {
    matches!(ty, GgmlType::Q2K | GgmlType::Q4K | GgmlType::Q5K | GgmlType::Q4_1 | GgmlType::Q5_1)
}

/// Takes whole blocks apart: `codes.len()` values of a block type, each `code * scale + offset`, with one scale and one
/// offset for each [`group()`] values. Codes have at most 8 significant bits (BF16 holds them); scales and offsets are
/// exact in F32. `offsets` may be empty for types without.
///
/// # Errors
/// As [`super::decode_f32`]; `scales` or `offsets` of another length.
pub fn split(
    ty: GgmlType,
    bytes: &[u8],
    codes: &mut [f32],
    scales: &mut [f32],
    offsets: &mut [f32],
) -> Result<(), FormatError> {
    let (block, n) = (ty.block_len() as usize, group(ty));
    expect_len("ggml scales", (codes.len() / n) as u64, scales.len())?;
    if has_offset(ty) || !offsets.is_empty() {
        expect_len("ggml offsets", scales.len() as u64, offsets.len())?;
    }
    super::check(ty, bytes, codes.len())?;
    let mut parts = [Part::default(); 256];
    let parts = &mut parts[..block.min(256)];
    for (b, (bytes, codes)) in
        bytes.chunks_exact(ty.block_bytes() as usize).zip(codes.chunks_exact_mut(block)).enumerate()
    {
        decode(ty, bytes, parts)?;
        codes.iter_mut().zip(&*parts).for_each(|(c, p)| *c = p.code);
        for (g, p) in parts.iter().step_by(n).enumerate() {
            scales[b * (block / n) + g] = p.scale;
            if let Some(o) = offsets.get_mut(b * (block / n) + g) {
                *o = p.offset;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ggml::decode_f32;
    use crate::scalar::{bf16_from_f32, bf16_to_f32};

    #[test]
    fn parts_make_the_decoded_value_in_every_block_type() {
        let mut state = 1u64;
        for ty in GgmlType::all().filter(|t| t.is_decodable() && !t.is_plain()) {
            let bytes: Vec<u8> = (0..7 * ty.block_bytes())
                .map(|_| {
                    state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    // Exponent fields of scales stay small, so that none is NaN.
                    (state >> 33) as u8 & 0x7B
                })
                .collect();
            let n = 7 * ty.block_len() as usize;
            let g = group(ty);
            let (mut codes, mut scales, mut offsets) = (vec![0f32; n], vec![0f32; n / g], vec![0f32; n / g]);
            split(ty, &bytes, &mut codes, &mut scales, &mut offsets).unwrap();
            let mut values = vec![0f32; n];
            decode_f32(ty, &bytes, &mut values).unwrap();
            for (i, v) in values.iter().enumerate() {
                assert_eq!(bf16_to_f32(bf16_from_f32(codes[i])), codes[i], "{ty}");
                let again = codes[i] * scales[i / g] + offsets[i / g];
                assert_eq!(again, *v, "{ty} value {i}");
            }
            assert_eq!(has_offset(ty), offsets.iter().any(|o| *o != 0.0), "{ty}");
            if !has_offset(ty) {
                split(ty, &bytes, &mut codes, &mut scales, &mut []).unwrap();
            }
        }
    }
}
