//! MXFP8: E4M3FN codes with one E8M0 scale per 32 values along K (OCP Microscaling 1.0).
//!
//! A checkpoint's planes (`weight` U8/F8_E4M3 `[N,K]`, `weight_scale` U8 `[N,K/32]`) are those of `row_scale_k32_v1`.

use crate::error::FormatError;
use crate::row_planes::{RowPlanes, row_count};
use crate::{Format, Layout, Rows};

/// Puts rows into `out` as `row_scale_k32_v1` stores them, after checking codes and scales.
///
/// # Errors
/// K not a multiple of 32, a wrong length, a NaN code or scale (named by row and column, counted from `first_row`).
pub fn pack_rows(
    k: usize,
    codes: &[u8],
    scales: &[u8],
    first_row: u64,
    out: &mut RowPlanes,
) -> Result<(), FormatError> {
    let rows = row_count("MXFP8 codes", codes.len(), k)? as u64;
    let shape = [first_row.saturating_add(rows), k as u64];
    let range = first_row..shape[0];
    Rows::new(Layout::RowScaleK32V1, Format::Mxfp8, &shape, range, codes, &[], scales, &[])?
        .validate_words()?;
    out.reset(codes.len(), 0, scales.len());
    out.codes.copy_from_slice(codes);
    out.scales.copy_from_slice(scales);
    Ok(())
}
