//! Table rows as exact FP32 values.

use super::blocks::{BLOCK, BlockFile, Blocks};
use crate::error::EngineError;
use infernix_artifact::ngram::{RowFormat, Volume};
use infernix_formats::ggml;
use infernix_formats::scalar::{bf16_to_f32, e2m1_to_f32, e4m3_to_f32};
use std::cell::RefCell;

thread_local! {
    /// Where a reading thread's blocks land.
    static BUFFER: RefCell<Blocks> = RefCell::default();
}

/// Something that holds rows.
pub trait RowSource: Send + Sync {
    /// Values a row.
    fn width(&self) -> usize;
    /// Number of rows.
    fn rows(&self) -> u64;
    /// Reads one row: each value `code x scale`, exact, or rounded once to FP32 where it does not fit.
    fn read(&self, row: u64, out: &mut [f32]) -> Result<(), String>;
    /// Reads several rows, given in ascending order, and hands each to `each`; faster than one by one where reads can
    /// be in flight together. Rows before a failing one may have been handed over.
    fn read_many(&self, rows: &[u64], each: &mut dyn FnMut(u64, &[f32])) -> Result<(), String> {
        let mut values = vec![0f32; self.width()];
        for row in rows {
            self.read(*row, &mut values)?;
            each(*row, &values);
        }
        Ok(())
    }
}

/// Rows held in memory.
pub struct MemoryRows {
    width: usize,
    values: Vec<f32>,
}

impl MemoryRows {
    /// `values [rows, width]`.
    pub fn new(width: usize, values: Vec<f32>) -> Self {
        MemoryRows { width, values }
    }

    /// Reads a whole source into memory.
    pub fn load(source: &dyn RowSource) -> Result<Self, EngineError> {
        let width = source.width();
        let mut values = vec![0f32; source.rows() as usize * width];
        for (row, out) in values.chunks_exact_mut(width).enumerate() {
            source.read(row as u64, out).map_err(EngineError::Ngram)?;
        }
        Ok(MemoryRows { width, values })
    }
}

impl RowSource for MemoryRows {
    fn width(&self) -> usize {
        self.width
    }

    fn rows(&self) -> u64 {
        (self.values.len() / self.width) as u64
    }

    fn read(&self, row: u64, out: &mut [f32]) -> Result<(), String> {
        let at = usize::try_from(row).ok().and_then(|r| r.checked_mul(self.width));
        let row = at
            .and_then(|at| self.values.get(at..at + self.width))
            .ok_or_else(|| format!("row {row} does not exist"))?;
        out.copy_from_slice(row);
        Ok(())
    }
}

/// Rows of a volume, read where they lie.
pub struct VolumeRows {
    volume: Volume,
    blocks: BlockFile,
    format: RowFormat,
    width: usize,
    /// First row and scale of each table.
    scales: Vec<(u64, f32)>,
}

impl VolumeRows {
    /// A volume with rows of `width` values; `scales`: first row and scale of each table, ascending.
    pub fn new(
        volume: Volume,
        format: &str,
        width: usize,
        scales: Vec<(u64, f32)>,
    ) -> Result<Self, EngineError> {
        let error = |what: String| EngineError::Ngram(format!("{}: {what}", volume.path().display()));
        let known = RowFormat::from_name(format)
            .ok_or_else(|| error(format!("row format {format} is not supported")))?;
        let bytes = known.row_bytes(width as u32);
        let found = volume.geometry().row_bytes;
        if bytes != Some(found) {
            return Err(error(format!("rows of {found} bytes, {format} of {width} values needs {bytes:?}")));
        }
        let blocks = BlockFile::open(volume.path()).map_err(|e| error(e.to_string()))?;
        Ok(VolumeRows { volume, blocks, format: known, width, scales })
    }

    fn scale(&self, row: u64) -> f32 {
        self.scales.iter().rev().find(|(first, _)| *first <= row).map_or(1.0, |s| s.1)
    }
}

impl RowSource for VolumeRows {
    fn width(&self) -> usize {
        self.width
    }

    fn rows(&self) -> u64 {
        self.volume.geometry().rows
    }

    fn read(&self, row: u64, out: &mut [f32]) -> Result<(), String> {
        self.read_many(&[row], &mut |_, values| out.copy_from_slice(values))
    }

    fn read_many(&self, rows: &[u64], each: &mut dyn FnMut(u64, &[f32])) -> Result<(), String> {
        let path = self.volume.path().display();
        let g = self.volume.geometry();
        let mut places = Vec::with_capacity(rows.len());
        let mut offsets: Vec<u64> = Vec::new();
        for row in rows {
            let at = g
                .row_offset(*row)
                .ok_or_else(|| format!("{path}: row {row} is beyond its {} rows", g.rows))?;
            // Rows never straddle blocks; neighbours share one read.
            let block = at - at % BLOCK as u64;
            if offsets.last() != Some(&block) {
                offsets.push(block);
            }
            places.push((offsets.len() - 1, (at - block) as usize));
        }
        BUFFER.with_borrow_mut(|buffer| {
            self.blocks
                .read(&offsets, buffer)
                .map_err(|(at, e)| format!("{path}: block at byte {at}: {e}"))?;
            let mut values = vec![0f32; self.width];
            for (row, (block, start)) in rows.iter().zip(places) {
                let bytes = &buffer.block(block)[start..start + g.row_bytes as usize];
                decode(self.format, self.scale(*row), bytes, &mut values);
                each(*row, &values);
            }
            Ok(())
        })
    }
}

fn decode(format: RowFormat, scale: f32, bytes: &[u8], out: &mut [f32]) {
    match format {
        RowFormat::Bf16 => {
            for (o, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                *o = bf16_to_f32(u16::from_le_bytes([b[0], b[1]]));
            }
        }
        // Whole blocks: the row's length was compared with the format's when the volume was opened.
        RowFormat::Ggml(t) => _ = ggml::decode_f32(t, bytes, out),
        RowFormat::Fp8E4m3fn => {
            for (o, b) in out.iter_mut().zip(bytes) {
                *o = e4m3_to_f32(*b) * scale;
            }
        }
        _ => {
            let (codes, scales) = bytes.split_at(out.len() / 2);
            for (i, o) in out.iter_mut().enumerate() {
                // E2M1 x E4M3 has six significant bits: exact.
                let v = e2m1_to_f32(codes[i / 2] >> (4 * (i % 2)) & 15) * e4m3_to_f32(scales[i / 16]);
                *o = if format == RowFormat::Nvfp4 { v / scale } else { v * scale };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use infernix_formats::ggml::GgmlType;

    #[test]
    fn rows_decode_in_their_own_convention() {
        let mut out = [0f32; 2];
        decode(RowFormat::Bf16, 9.0, &[0x80, 0x3F, 0x00, 0xC0], &mut out);
        assert_eq!(out, [1.0, -2.0]);
        decode(RowFormat::Fp8E4m3fn, 0.5, &[0x38, 0xC0], &mut out);
        assert_eq!(out, [0.5, -1.0]);
        let mut row = vec![0x42u8; 8];
        row.push(0x38);
        let mut out = [0f32; 16];
        decode(RowFormat::Nvfp4Mul, 2.0, &row, &mut out);
        assert_eq!(out[..2], [2.0, 4.0]);
        decode(RowFormat::Nvfp4, 2.0, &row, &mut out);
        assert_eq!(out[..2], [0.5, 1.0]);
        let mut row = vec![0x80u8; 18];
        row[..2].copy_from_slice(&0x3800u16.to_le_bytes());
        let mut out = [0f32; 32];
        decode(RowFormat::Ggml(GgmlType::Iq4Nl), 1.0, &row, &mut out);
        assert_eq!((out[0], out[16]), (-63.5, 0.5));
    }

    #[test]
    fn a_row_beyond_the_table_is_an_error() {
        let m = MemoryRows::new(2, vec![1.0; 4]);
        assert!(m.read(2, &mut [0.0; 2]).is_err());
        assert!(m.read(u64::MAX, &mut [0.0; 2]).is_err());
    }
}
