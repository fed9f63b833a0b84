//! Exact values of stored words, rounded once to F32, and the scalars beside them.

use std::ops::Range;

use infernix_formats::ggml::{self, GgmlType};
use infernix_formats::{FormatError, scalar};

use crate::scheme::{Scheme, SourceTensor};
use crate::{CheckpointError, Dtype, TensorInfo};

/// Codes read per step of a decode.
const STEP_BYTES: u64 = 1 << 20;

impl SourceTensor<'_> {
    /// NVFP4's multiplier or divisor, a positive finite number; `None` for other schemes.
    pub fn global_scale(&self) -> Result<Option<f32>, CheckpointError> {
        self.planes().global_scale.map(|t| self.positive(t)).transpose()
    }

    /// The activation scale, a positive finite number (a multiplier for ModelOpt, a divisor for
    /// compressed-tensors); `None` where the checkpoint has none.
    pub fn input_scale(&self) -> Result<Option<f32>, CheckpointError> {
        self.planes().input_scale.map(|t| self.positive(t)).transpose()
    }

    /// The one weight scale of [`Scheme::Fp8Tensor`], widened exactly to F32; `None` for other schemes.
    pub fn tensor_scale(&self) -> Result<Option<f32>, CheckpointError> {
        match (self.scheme(), self.planes().scale) {
            (Scheme::Fp8Tensor { .. }, Some(t)) => self.positive(t).map(Some),
            _ => Ok(None),
        }
    }

    /// Reads a scalar plane and refuses what cannot be a scale.
    fn positive(&self, t: &TensorInfo) -> Result<f32, CheckpointError> {
        let bytes = self.checkpoint().read_all(t)?;
        let value = widen(t.dtype, &bytes);
        if value > 0.0 && value.is_finite() {
            return Ok(value);
        }
        Err(self.illegal(t, 0, 0, 0, "a positive finite scale", format!("{value}")))
    }

    fn illegal(
        &self,
        t: &TensorInfo,
        row: u64,
        column: u64,
        byte: u64,
        expected: &'static str,
        found: String,
    ) -> CheckpointError {
        CheckpointError::IllegalWord {
            shard: self.file_of(t),
            tensor: t.name.to_string(),
            row,
            column,
            offset: t.offset + byte,
            expected,
            found,
        }
    }

    /// Decodes rows `rows` (see [`SourceTensor::rows`]) into `out` (`rows` x [`SourceTensor::row_len`]
    /// values). Each value is the exact product of its stored words rounded once to F32: NVFP4
    /// fl32((e2m1 * e4m3) * m) or fl32((e2m1 * e4m3) / d), FP8 fl32(code * scale), MXFP8 code * 2^(e - 127);
    /// plain words widened, F64 rounded.
    ///
    /// # Errors
    /// A range or buffer that does not fit; a stored word without a value (NaN code or scale, negative
    /// scale); dtypes that are no weights; anything of [`crate::Checkpoint::read`].
    pub fn decode_rows_f32(&self, rows: Range<u64>, out: &mut [f32]) -> Result<(), CheckpointError> {
        let k = self.row_len();
        let misfit = |reason: String| CheckpointError::Range {
            tensor: self.name().to_owned(),
            start: rows.start,
            end: rows.end,
            reason,
        };
        if rows.start > rows.end || rows.end > self.rows() {
            return Err(misfit(format!("the tensor has {} rows", self.rows())));
        }
        if (rows.end - rows.start).checked_mul(k) != Some(out.len() as u64) {
            return Err(misfit(format!("the buffer has {} values, a row {k}", out.len())));
        }
        if out.is_empty() {
            return Ok(());
        }
        let weight = self.planes().weight;
        let row_bytes = weight.bytes / self.rows();
        let step = (STEP_BYTES / row_bytes.max(1)).max(1);
        let scales = Scales::read_shared(self)?;
        let mut codes = vec![0u8; (row_bytes * step.min(rows.end - rows.start)) as usize];
        let mut at = rows.start;
        for chunk in out.chunks_mut((k * step) as usize) {
            let count = chunk.len() as u64 / k;
            let codes = &mut codes[..(count * row_bytes) as usize];
            self.checkpoint().read(weight, at * row_bytes..(at + count) * row_bytes, codes)?;
            self.decode_chunk(&scales, at..at + count, codes, chunk)?;
            at += count;
        }
        Ok(())
    }

    fn decode_chunk(
        &self,
        scales: &Scales,
        rows: Range<u64>,
        codes: &[u8],
        out: &mut [f32],
    ) -> Result<(), CheckpointError> {
        let k = self.row_len() as usize;
        match self.scheme() {
            Scheme::Plain(dtype) => {
                if !matches!(dtype, Dtype::Bf16 | Dtype::F16 | Dtype::F32 | Dtype::F64) {
                    let t = self.planes().weight;
                    let (shard, tensor) = (self.file_of(t), t.name.to_string());
                    return Err(CheckpointError::NotDecodable { shard, tensor, dtype });
                }
                for (v, word) in out.iter_mut().zip(codes.chunks_exact((dtype.bits() / 8) as usize)) {
                    *v = widen(dtype, word);
                }
                Ok(())
            }
            Scheme::Nvfp4Multiplier { .. } => {
                let m = scales.shared[0];
                self.decode_nvfp4(rows, codes, out, |p| p * m)
            }
            Scheme::Nvfp4Divisor { .. } => {
                let d = scales.shared[0];
                self.decode_nvfp4(rows, codes, out, |p| p / d)
            }
            Scheme::Fp8Tensor { .. } => {
                let s = scales.shared[0];
                self.decode_fp8(rows, codes, out, |_, _| s)
            }
            Scheme::Fp8Row { .. } => {
                let start = rows.start;
                let s = self.read_scales(rows.start, rows.end - rows.start, 1)?;
                self.decode_fp8(rows, codes, out, |row, _| s[(row - start) as usize])
            }
            Scheme::Fp8Block128 { .. } => {
                let tiles = k.div_ceil(128);
                let first = rows.start / 128;
                let s = self.read_scales(first, rows.end.div_ceil(128) - first, tiles as u64)?;
                self.decode_fp8(rows, codes, out, |row, c| s[(row / 128 - first) as usize * tiles + c / 128])
            }
            Scheme::Ggml(ty) => self.decode_blocks(ty, rows.start, codes, out),
            Scheme::Mxfp8 => {
                let groups = k / 32;
                let start = rows.start;
                let s = self.read_scales(rows.start, rows.end - rows.start, groups as u64)?;
                self.decode_fp8(rows, codes, out, |row, c| s[(row - start) as usize * groups + c / 32])
            }
        }
    }

    /// Blocks of whole rows; columns that keep a stored order are put in the source's.
    fn decode_blocks(
        &self,
        ty: GgmlType,
        first_row: u64,
        codes: &[u8],
        out: &mut [f32],
    ) -> Result<(), CheckpointError> {
        let k = self.row_len();
        let t = self.planes().weight;
        let placed = |e: FormatError| match e {
            FormatError::IllegalWord { what, word, place, why } => {
                let block = place.column / ty.block_len();
                let byte = place.row * ty.row_bytes(k).unwrap_or(0) + block * ty.block_bytes();
                self.illegal(t, place.row, place.column, byte, why, format!("{what} {word:#06x}"))
            }
            e => CheckpointError::GgufType {
                shard: self.file_of(t),
                tensor: t.name.to_string(),
                reason: e.to_string(),
            },
        };
        ggml::validate(ty, codes, k, first_row).map_err(placed)?;
        ggml::decode_f32(ty, codes, out).map_err(placed)?;
        let Some(heads) = self.stored_columns() else { return Ok(()) };
        let mut stored = vec![0f32; k as usize];
        for row in out.chunks_exact_mut(k as usize) {
            stored.copy_from_slice(row);
            for (i, v) in (0..).zip(&stored) {
                row[heads.source(i) as usize] = *v;
            }
        }
        Ok(())
    }

    fn decode_nvfp4(
        &self,
        rows: Range<u64>,
        codes: &[u8],
        out: &mut [f32],
        global: impl Fn(f32) -> f32,
    ) -> Result<(), CheckpointError> {
        let k = self.row_len() as usize;
        let groups = (k / 16) as u64;
        let scales = self.read_scales(rows.start, rows.end - rows.start, groups)?;
        // One scale covers 8 bytes of codes; the product of code and scale is exact in F32.
        for ((block, bytes), &s) in out.chunks_exact_mut(16).zip(codes.chunks_exact(8)).zip(&scales) {
            for (pair, &byte) in block.chunks_exact_mut(2).zip(bytes) {
                pair[0] = global(scalar::e2m1_to_f32(byte & 15) * s);
                pair[1] = global(scalar::e2m1_to_f32(byte >> 4) * s);
            }
        }
        Ok(())
    }

    fn decode_fp8(
        &self,
        rows: Range<u64>,
        codes: &[u8],
        out: &mut [f32],
        scale: impl Fn(u64, usize) -> f32,
    ) -> Result<(), CheckpointError> {
        let k = self.row_len() as usize;
        for ((row, values), codes) in rows.zip(out.chunks_exact_mut(k)).zip(codes.chunks_exact(k)) {
            for (c, (v, &code)) in values.iter_mut().zip(codes).enumerate() {
                let x = scalar::e4m3_to_f32(code);
                if x.is_nan() {
                    let byte = row * k as u64 + c as u64;
                    let found = format!("0x{code:02x} (NaN)");
                    return Err(self.illegal(
                        self.planes().weight,
                        row,
                        c as u64,
                        byte,
                        "a finite E4M3 code",
                        found,
                    ));
                }
                *v = x * scale(row, c);
            }
        }
        Ok(())
    }

    /// Reads `count` rows of `per_row` scales from scale row `first`, as F32, refusing words that are no scale.
    fn read_scales(&self, first: u64, count: u64, per_row: u64) -> Result<Vec<f32>, CheckpointError> {
        let Some(t) = self.planes().scale else { return Ok(Vec::new()) };
        let width = t.dtype.bits() / 8;
        let start = first * per_row * width;
        let mut bytes = vec![0; (count * per_row * width) as usize];
        self.checkpoint().read(t, start..start + bytes.len() as u64, &mut bytes)?;
        let mut out = Vec::with_capacity((count * per_row) as usize);
        for (i, word) in bytes.chunks_exact(width as usize).enumerate() {
            let i = i as u64;
            let value = match t.dtype {
                Dtype::U8 | Dtype::F8E8m0 => scalar::e8m0_to_f32(word[0]),
                Dtype::F8E4m3 => scalar::e4m3_to_f32(word[0]),
                dtype => widen(dtype, word),
            };
            if !value.is_finite() || value.is_sign_negative() {
                let hex: String = word.iter().rev().map(|b| format!("{b:02x}")).collect();
                return Err(self.illegal(
                    t,
                    first + i / per_row,
                    i % per_row,
                    start + i * width,
                    "a finite scale without sign",
                    format!("0x{hex} ({value})"),
                ));
            }
            out.push(value);
        }
        Ok(out)
    }
}

/// Scales that all rows share, read once per decode.
struct Scales {
    shared: [f32; 1],
}

impl Scales {
    fn read_shared(t: &SourceTensor<'_>) -> Result<Self, CheckpointError> {
        let value = match t.tensor_scale()? {
            Some(s) => Some(s),
            None => t.global_scale()?,
        };
        Ok(Self { shared: [value.unwrap_or(1.0)] })
    }
}

/// One little-endian word as F32: widened exactly, F64 rounded once.
fn widen(dtype: Dtype, word: &[u8]) -> f32 {
    match (dtype, word) {
        (Dtype::Bf16, &[a, b]) => scalar::bf16_to_f32(u16::from_le_bytes([a, b])),
        (Dtype::F16, &[a, b]) => scalar::f16_to_f32(u16::from_le_bytes([a, b])),
        (Dtype::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
        (Dtype::F64, &[a, b, c, d, e, f, g, h]) => f64::from_le_bytes([a, b, c, d, e, f, g, h]) as f32,
        _ => f32::NAN,
    }
}
