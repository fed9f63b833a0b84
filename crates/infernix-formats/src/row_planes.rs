//! Owned planes of some rows, reused between calls.

use std::ops::Range;

use crate::encoded::Rows;
use crate::error::FormatError;
use crate::format::Format;
use crate::layout::{Layout, PlaneRole};

/// The plane bytes of a row range, as an encoder or packer leaves them; [`crate::row_planes()`] says where in the
/// object each belongs. Buffers keep their capacity, so one value serves a whole conversion.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RowPlanes {
    /// Codes.
    pub codes: Vec<u8>,
    /// High bits; empty unless the format has them.
    pub high: Vec<u8>,
    /// Scales; empty where the format has none per row.
    pub scales: Vec<u8>,
    /// Four bytes of the global scale; empty where the format has none.
    pub global: Vec<u8>,
}

impl RowPlanes {
    /// Bytes of a plane.
    #[must_use]
    pub fn plane(&self, role: PlaneRole) -> &[u8] {
        match role {
            PlaneRole::Codes => &self.codes,
            PlaneRole::HighBits => &self.high,
            PlaneRole::Scales => &self.scales,
            PlaneRole::GlobalScale => &self.global,
            PlaneRole::Records => &[],
        }
    }

    /// A checked view for decoding: these planes as `rows` of a tensor.
    ///
    /// # Errors
    /// As [`Rows::new`].
    pub fn rows(
        &self,
        layout: Layout,
        format: Format,
        shape: &[u64],
        rows: Range<u64>,
    ) -> Result<Rows<'_>, FormatError> {
        Rows::new(layout, format, shape, rows, &self.codes, &self.high, &self.scales, &self.global)
    }

    /// Empties all planes and gives them these lengths, zero-filled.
    pub(crate) fn reset(&mut self, codes: usize, high: usize, scales: usize) {
        for (plane, len) in [(&mut self.codes, codes), (&mut self.high, high), (&mut self.scales, scales)] {
            plane.clear();
            plane.resize(len, 0);
        }
        self.global.clear();
    }
}

/// Rows in a slice of values: `len / k`, refusing a remainder.
pub(crate) fn row_count(what: &'static str, len: usize, k: usize) -> Result<usize, FormatError> {
    if k == 0 {
        return crate::error::expect_len(what, 0, len).map(|()| 0);
    }
    if len % k != 0 {
        return Err(FormatError::Length { what, expected: (len / k * k) as u64, found: len as u64 });
    }
    Ok(len / k)
}

/// Refuses NaN and infinities; `first_row` numbers the first row of `values`.
pub(crate) fn check_finite(values: &[f32], k: usize, first_row: u64) -> Result<(), FormatError> {
    // Branch-free first: the exponent of a non-finite value is all ones.
    let worst = values.iter().fold(0, |m: u32, v| m.max(v.to_bits() & 0x7FFF_FFFF));
    if worst < 0x7F80_0000 {
        return Ok(());
    }
    let at = values.iter().position(|v| !v.is_finite()).unwrap_or(0);
    let place = crate::error::Place::at(first_row + (at / k) as u64, (at % k) as u64);
    Err(FormatError::NotFinite { value: values[at], place })
}

/// Largest magnitude of finite values (0 for none).
#[must_use]
pub fn amax(values: &[f32]) -> f32 {
    // Magnitudes of finite floats order as their bits do; integers let the loop run without NaN rules.
    f32::from_bits(values.iter().fold(0, |m: u32, v| m.max(v.to_bits() & 0x7FFF_FFFF)))
}
