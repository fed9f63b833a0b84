//! Copies of rows, and rows of a stored table.

use super::linear::{Linear, WeightFormat};
use super::nvfp4;
use crate::driver::{Args, Device, DeviceBuffer, Kernel, Stream};
use crate::error::Result;
use std::sync::Arc;

/// The kernels, looked up once.
pub struct Moves {
    wide: Kernel,
    narrow: Kernel,
    embed: Kernel,
    gather: Kernel,
}

/// Rows to copy: all sizes in bytes, even.
#[derive(Clone, Copy, Debug)]
pub struct RowCopy {
    /// First source row.
    pub from: u64,
    /// Bytes between source rows.
    pub from_pitch: usize,
    /// First destination row.
    pub to: u64,
    /// Bytes between destination rows.
    pub to_pitch: usize,
    /// Bytes of a row.
    pub bytes: usize,
    /// Rows.
    pub rows: usize,
    /// Times each row is written, `bytes` apart.
    pub copies: usize,
}

impl Moves {
    /// Looks the kernels up.
    pub fn new(dev: &Arc<Device>) -> Result<Self> {
        Ok(Moves {
            wide: dev.kernel("copy_rows_16", 0)?,
            narrow: dev.kernel("copy_rows_2", 0)?,
            embed: dev.kernel("embed_table", 0)?,
            gather: dev.kernel("gather_columns", 0)?,
        })
    }

    /// Copies rows.
    pub fn copy(&self, s: &Stream, c: &RowCopy, pdl: bool) -> Result<()> {
        let all = c.from | c.to | (c.from_pitch | c.to_pitch | c.bytes) as u64;
        let (kernel, unit) = if all.is_multiple_of(16) { (&self.wide, 16) } else { (&self.narrow, 2) };
        let n = c.bytes / unit;
        // The grid's second side is limited: long matrices go in pieces.
        for first in (0..c.rows).step_by(65_535) {
            let rows = (c.rows - first).min(65_535);
            let args = Args::new()
                .ptr(c.from + (first * c.from_pitch) as u64)
                .ptr(c.to + (first * c.to_pitch) as u64)
                .ints(&[n, c.from_pitch / unit, c.to_pitch / unit, c.copies, n]);
            s.launch(kernel, [n.div_ceil(256) as u32, rows as u32, 1], 256, pdl, &args)?;
        }
        Ok(())
    }

    /// Columns `columns` (I32 `[n]`) of `x` BF16 `[rows][x_pitch]` to `y` `[rows][n]`.
    #[expect(clippy::too_many_arguments, reason = "two matrices and which columns")]
    pub fn gather(
        &self,
        s: &Stream,
        x: u64,
        x_pitch: usize,
        columns: u64,
        n: usize,
        rows: usize,
        y: u64,
        pdl: bool,
    ) -> Result<()> {
        for first in (0..rows).step_by(65_535) {
            let count = (rows - first).min(65_535);
            let args = Args::new().ptr(x + (2 * first * x_pitch) as u64).ptr(columns);
            let args = args.ptr(y + (2 * first * n) as u64).ints(&[n, x_pitch]);
            s.launch(&self.gather, [n.div_ceil(256) as u32, count as u32, 1], 256, pdl, &args)?;
        }
        Ok(())
    }

    /// Rows `ids` (I32 `[rows]`) of a table to BF16 `[rows][k]`.
    pub fn embed(&self, s: &Stream, table: &Linear, ids: u64, rows: usize, y: u64, pdl: bool) -> Result<()> {
        let (cp, hp, sp) = match table.format {
            WeightFormat::Nvfp4 => (table.k_pad / nvfp4::K, 0, 0),
            f => f.row_bytes(table.k_pad),
        };
        let ptr = |b: &Option<DeviceBuffer>| b.as_ref().map_or(0, DeviceBuffer::ptr);
        let format = WeightFormat::ALL.iter().position(|f| *f == table.format).unwrap_or(0);
        let args = Args::new()
            .ptr(ids)
            .ptr(table.codes.ptr())
            .ptr(ptr(&table.high))
            .ptr(ptr(&table.scales))
            .ptr(ptr(&table.row_scale))
            .f32(table.tensor_scale)
            .ints(&[usize::from(table.divide), format, cp, hp, sp, table.n, table.k])
            .ptr(y);
        // A row is spread over blocks: one would ask for its values five at a time.
        s.launch(&self.embed, [rows as u32, table.k.div_ceil(256) as u32, 1], 256, pdl, &args)
    }
}
