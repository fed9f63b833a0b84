//! FP8 (E4M3FN) weights: one BF16 scale per row, one FP32 scale per tensor, or one per 128 x 128 tile.
//!
//! Encoders:
//!
//! *row_maxabs*: `v = bf16(x)`; `s = bf16(fl32(amax / 448))`, the smallest BF16 subnormal where a non-zero row would get
//! 0; `code = e4m3(fl32(v / s))`, saturating. A row of zeros has scale +0 and codes 0.
//!
//! *table* (reproduces the published n-gram tables): `s = bf16(fl32(amax / 448))` over the whole table;
//! `code = e4m3(bf16(fl32(v / s)))`, saturating.

use crate::error::{FormatError, Place, expect_len};
use crate::row_planes::{RowPlanes, amax, check_finite, row_count};
use crate::scalar::{bf16_from_f32, bf16_is_scale, bf16_to_f32, e4m3_from_f32};

/// BF16 scale word of a largest magnitude.
fn scale_word(amax: f32) -> u16 {
    if amax == 0.0 { 0 } else { bf16_from_f32(amax / 448.0).max(1) }
}

/// Encodes rows of `k` values as `fp8_e4m3fn_row_bf16`. `first_row` only numbers rows in errors.
///
/// # Errors
/// `values` is no whole number of rows; NaN, infinity, or a value that is infinite in BF16.
pub fn encode_row_maxabs(
    k: usize,
    values: &[f32],
    first_row: u64,
    out: &mut RowPlanes,
) -> Result<(), FormatError> {
    let rows = row_count("values to encode", values.len(), k)?;
    out.reset(values.len(), 0, rows * 2);
    if rows == 0 {
        return Ok(());
    }
    let mut v = vec![0f32; k];
    let planes = out.codes.chunks_exact_mut(k).zip(out.scales.chunks_exact_mut(2));
    for (r, (x, (codes, scale))) in values.chunks_exact(k).zip(planes).enumerate() {
        for (v, &x) in v.iter_mut().zip(x) {
            *v = bf16_to_f32(bf16_from_f32(x));
        }
        check_finite(&v, k, first_row + r as u64)?;
        let word = scale_word(amax(&v));
        scale.copy_from_slice(&word.to_le_bytes());
        if word != 0 {
            let s = bf16_to_f32(word);
            for (c, &v) in codes.iter_mut().zip(&v) {
                *c = e4m3_from_f32(v / s);
            }
        }
    }
    Ok(())
}

/// Scale word of a BF16 table whose largest magnitude is `amax`.
#[must_use]
pub fn table_scale(amax: f32) -> u16 {
    scale_word(amax)
}

/// Encodes table values with the table's BF16 scale word.
///
/// # Errors
/// `codes` has another length than `values`; a value is NaN or infinite (row = index / `k`); the scale is illegal, or
/// zero while a value is not.
pub fn encode_table(k: usize, values: &[f32], scale: u16, codes: &mut [u8]) -> Result<(), FormatError> {
    expect_len("table codes", values.len() as u64, codes.len())?;
    row_count("table values", values.len(), k)?;
    check_finite(values, k.max(1), 0)?;
    if !bf16_is_scale(scale) || (scale == 0 && amax(values) != 0.0) {
        let value = f64::from(bf16_to_f32(scale));
        return Err(FormatError::ScaleRange { kind: "a BF16 table scale", value, place: Place::at(0, 0) });
    }
    if scale == 0 {
        codes.fill(0);
        return Ok(());
    }
    let s = bf16_to_f32(scale);
    for (c, &v) in codes.iter_mut().zip(values) {
        *c = e4m3_from_f32(bf16_to_f32(bf16_from_f32(v / s)));
    }
    Ok(())
}

/// FP32 row scales as BF16 words, only if every one is exactly a BF16 value (so that storing stays word for word).
///
/// # Errors
/// Wrong length; a scale that BF16 does not hold exactly, named by row.
pub fn row_scales_exact(scales: &[f32], out: &mut [u8]) -> Result<(), FormatError> {
    expect_len("row scales", 2 * scales.len() as u64, out.len())?;
    for (row, (s, out)) in scales.iter().zip(out.chunks_exact_mut(2)).enumerate() {
        let word = bf16_from_f32(*s);
        if bf16_to_f32(word).to_bits() != s.to_bits() {
            return Err(FormatError::ScaleRange {
                kind: "BF16 exactly",
                value: f64::from(*s),
                place: Place::at(row as u64, 0),
            });
        }
        out.copy_from_slice(&word.to_le_bytes());
    }
    Ok(())
}

/// Widens little-endian BF16 tile scales to FP32, exactly.
///
/// # Errors
/// `words` has another length than two bytes per scale.
pub fn widen_scales(words: &[u8], out: &mut [f32]) -> Result<(), FormatError> {
    expect_len("BF16 tile scales", 2 * out.len() as u64, words.len())?;
    for (o, w) in out.iter_mut().zip(words.as_chunks::<2>().0) {
        *o = bf16_to_f32(u16::from_le_bytes(*w));
    }
    Ok(())
}

/// Puts the planes of `fp8_e4m3fn_row_bf16`, `_tensor_f32` or `_block128_f32` rows into `out` as the layouts store
/// them: codes and scale bytes unchanged (source and layout agree), after checking the words.
///
/// # Errors
/// As [`crate::Rows::new`] and [`crate::Rows::validate_words`].
pub fn pack_rows(
    layout: crate::Layout,
    format: crate::Format,
    shape: &[u64],
    rows: std::ops::Range<u64>,
    codes: &[u8],
    scales: &[u8],
    out: &mut RowPlanes,
) -> Result<(), FormatError> {
    let tensor = format == crate::Format::Fp8Tensor;
    let (per_row, global): (&[u8], &[u8]) = if tensor { (&[], scales) } else { (scales, &[]) };
    crate::Rows::new(layout, format, shape, rows, codes, &[], per_row, global)?.validate_words()?;
    out.reset(codes.len(), 0, per_row.len());
    out.codes.copy_from_slice(codes);
    out.scales.copy_from_slice(per_row);
    out.global.extend_from_slice(global);
    Ok(())
}
