//! Expert banks: one contiguous, 4 KiB-aligned record per expert, so that an expert is one direct read.
//!
//! `nvfp4_expert_rg16_v1` holds NVFP4 in units of 16 rows x 16 columns; `fp8_expert_block128_v1` holds block FP8.
//! Both have tensor shape `[E,H,I]`: `E` experts of gate `[I,H]`, up `[I,H]`, down `[H,I]`.

use std::ops::Range;

use crate::encoded::{Real, Rows};
use crate::error::{FormatError, Place, expect_len};
use crate::format::Format;
use crate::ggml::{self, GgmlType};
use crate::layout::{Layout, Plane, PlaneRole, align_up};
use crate::scalar::e4m3_is_scale;

/// A matrix of an expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ExpertMatrix {
    /// `[I,H]`
    Gate,
    /// `[I,H]`
    Up,
    /// `[H,I]`
    Down,
}

impl ExpertMatrix {
    /// In the order of the global-scale plane.
    pub const ALL: [ExpertMatrix; 3] = [ExpertMatrix::Gate, ExpertMatrix::Up, ExpertMatrix::Down];

    /// Index in the global-scale plane.
    #[must_use]
    pub fn index(self) -> usize {
        self as usize
    }

    /// `"gate"`, `"up"` or `"down"`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            ExpertMatrix::Gate => "gate",
            ExpertMatrix::Up => "up",
            ExpertMatrix::Down => "down",
        }
    }
}

/// Geometry of an expert bank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BankShape {
    /// `nvfp4_expert_rg16_v1`, `fp8_expert_block128_v1` or `ggml_expert_v1`.
    pub layout: Layout,
    /// Types of gate, up and down in `ggml_expert_v1`.
    pub types: Option<[GgmlType; 3]>,
    /// Experts.
    pub experts: u64,
    /// Hidden size H: columns of gate and up, rows of down.
    pub hidden: u64,
    /// Intermediate size I: rows of gate and up, columns of down.
    pub intermediate: u64,
    /// Bytes of one record without its padding.
    pub record_bytes: u64,
    /// Bytes from one record to the next: `record_bytes` rounded up to 4096.
    pub stride: u64,
}

impl BankShape {
    /// Checks an `[E,H,I]` shape.
    ///
    /// # Errors
    /// Not a bank layout, wrong rank, H or I not a multiple of 16 (NVFP4), or a size beyond 64 bits.
    pub fn new(layout: Layout, shape: &[u64]) -> Result<Self, FormatError> {
        let format = match layout {
            Layout::Nvfp4ExpertRg16V1 => Format::Nvfp4Mul,
            _ => Format::Fp8Block128,
        };
        Self::of(layout, format, shape)
    }

    /// As [`BankShape::new`] with the format, on which the records of `ggml_expert_v1` depend.
    ///
    /// # Errors
    /// As [`BankShape::new`]; a format that the layout does not store; rows that are not whole ggml blocks.
    pub fn of(layout: Layout, format: Format, shape: &[u64]) -> Result<Self, FormatError> {
        let bad = |why| Err(FormatError::Shape { layout, format, shape: shape.to_vec(), why });
        if !layout.is_bank() {
            return bad("the layout is not an expert bank");
        }
        let &[experts, hidden, intermediate] = shape else {
            return bad("an expert bank has shape [experts,hidden,intermediate]");
        };
        if !layout.stores(format) {
            return Err(FormatError::Unsupported { layout, format });
        }
        let types = if layout == Layout::GgmlExpertV1 { format.expert_types() } else { None };
        if let Some([gate, up, down]) = types
            && (hidden % gate.block_len() != 0
                || hidden % up.block_len() != 0
                || intermediate % down.block_len() != 0)
        {
            return bad("rows must be whole blocks");
        }
        let sizes = || {
            let elements = hidden.checked_mul(intermediate)?;
            let record = if let Some(types) = types {
                ggml_ranges(types, hidden, intermediate)?[2].end
            } else if layout == Layout::Nvfp4ExpertRg16V1 {
                // 144 bytes per 256 values; three matrices.
                (elements / 256).checked_mul(3 * 144)?
            } else {
                let codes = align_up(elements.checked_mul(3)?, 256)?;
                let tiles = hidden.div_ceil(128).checked_mul(intermediate.div_ceil(128))?;
                codes.checked_add(tiles.checked_mul(12)?)?
            };
            let stride = align_up(record, 4096)?;
            // Room for the [E,3] plane, so that no later sum overflows.
            stride.checked_add(12)?.checked_mul(experts)?;
            Some((record, stride))
        };
        if layout == Layout::Nvfp4ExpertRg16V1 && (hidden % 16 != 0 || intermediate % 16 != 0) {
            return bad("hidden and intermediate must be multiples of 16");
        }
        let (record_bytes, stride) =
            sizes().ok_or_else(|| FormatError::Overflow { shape: shape.to_vec() })?;
        Ok(BankShape { layout, types, experts, hidden, intermediate, record_bytes, stride })
    }

    /// Rows and columns of a matrix.
    #[must_use]
    pub fn matrix(&self, matrix: ExpertMatrix) -> (u64, u64) {
        match matrix {
            ExpertMatrix::Down => (self.hidden, self.intermediate),
            _ => (self.intermediate, self.hidden),
        }
    }

    /// Byte range of expert `e`'s record (with its padding) inside the object; expert `E` starts the `[E,3]` plane.
    #[must_use]
    pub fn record(&self, expert: u64) -> Range<u64> {
        expert * self.stride..(expert + 1) * self.stride
    }

    /// Byte range of a matrix inside a record of `ggml_expert_v1`; empty for other layouts.
    #[must_use]
    pub fn blocks(&self, matrix: ExpertMatrix) -> Range<u64> {
        let ranges = self.types.and_then(|t| ggml_ranges(t, self.hidden, self.intermediate));
        ranges.map_or(0..0, |[gate, up, down]| match matrix {
            ExpertMatrix::Gate => gate,
            ExpertMatrix::Up => up,
            ExpertMatrix::Down => down,
        })
    }

    /// Planes of the object: records, then (NVFP4) the FP32 `[E,3]` plane of gate, up, down global scales.
    ///
    /// # Errors
    /// None beyond those of [`BankShape::new`].
    pub fn planes(&self) -> Result<Vec<Plane>, FormatError> {
        let records = self.stride * self.experts;
        let mut out = vec![Plane { role: PlaneRole::Records, offset: 0, bytes: records }];
        if self.layout == Layout::Nvfp4ExpertRg16V1 {
            out.push(Plane { role: PlaneRole::GlobalScale, offset: records, bytes: 12 * self.experts });
        }
        Ok(out)
    }

    fn tiles(&self) -> usize {
        (self.hidden.div_ceil(128) * self.intermediate.div_ceil(128)) as usize
    }
}

/// Where the matrices lie in a record: each starts on a multiple of 256. `None` on overflow.
fn ggml_ranges(types: [GgmlType; 3], h: u64, i: u64) -> Option<[Range<u64>; 3]> {
    let mut at = 0;
    let mut next = |t: GgmlType, rows: u64, k: u64| {
        let start = align_up(at, 256)?;
        at = start.checked_add(rows.checked_mul(t.row_bytes(k).ok()?)?)?;
        Some(start..at)
    };
    Some([next(types[0], i, h)?, next(types[1], i, h)?, next(types[2], h, i)?])
}

/// Packs one expert of `ggml_expert_v1` from the blocks of gate, up and down, each row-major as a GGUF file stores them.
/// `out` is `shape.stride` bytes (padding is zeroed) or `shape.record_bytes`.
///
/// # Errors
/// A buffer of the wrong length, or an illegal scale, named by matrix, row and column.
pub fn pack_ggml(shape: &BankShape, blocks: [&[u8]; 3], out: &mut [u8]) -> Result<(), FormatError> {
    let out = record_out(shape, Layout::GgmlExpertV1, out)?;
    out.fill(0);
    for (matrix, blocks) in ExpertMatrix::ALL.into_iter().zip(blocks) {
        let range = shape.blocks(matrix);
        expect_len("expert ggml blocks", range.end - range.start, blocks.len())?;
        out[range.start as usize..range.end as usize].copy_from_slice(blocks);
    }
    let Some(format) = shape.types.map(Format::ggml_experts) else { return Ok(()) };
    ExpertRecord { shape: *shape, format, globals: [1.0; 3], bytes: out }.validate_words()
}

/// Blocks of one matrix of a `ggml_expert_v1` record, in place, and their type.
///
/// # Errors
/// A record of the wrong length, or of another layout.
pub fn ggml_blocks<'a>(
    shape: &BankShape,
    record: &'a [u8],
    matrix: ExpertMatrix,
) -> Result<(GgmlType, &'a [u8]), FormatError> {
    let record = record_in(shape, Layout::GgmlExpertV1, record)?;
    let Some(types) = shape.types else {
        return Err(FormatError::Length { what: "expert record", expected: 0, found: record.len() as u64 });
    };
    let range = shape.blocks(matrix);
    Ok((types[matrix.index()], &record[range.start as usize..range.end as usize]))
}

/// Row-major NVFP4 planes of one matrix `[N,K]` as a checkpoint stores them.
#[derive(Debug, Clone, Copy)]
pub struct Nvfp4Planes<'a> {
    /// `N*K/2` bytes, low nibble = even k.
    pub codes: &'a [u8],
    /// `N*K/16` E4M3 words, row-major.
    pub scales: &'a [u8],
}

/// Row-major block-FP8 planes of one matrix `[N,K]`.
#[derive(Debug, Clone, Copy)]
pub struct BlockFp8Planes<'a> {
    /// `N*K` E4M3 words.
    pub codes: &'a [u8],
    /// `ceil(N/128)*ceil(K/128)` tile scales, row-major.
    pub scales: &'a [f32],
}

/// Packs one expert of `nvfp4_expert_rg16_v1`. `out` is `shape.stride` bytes (padding is zeroed) or
/// `shape.record_bytes`.
///
/// # Errors
/// A buffer of the wrong length, or a block scale that is negative or NaN, named by matrix, row and column.
pub fn pack_nvfp4(
    shape: &BankShape,
    gate: Nvfp4Planes<'_>,
    up: Nvfp4Planes<'_>,
    down: Nvfp4Planes<'_>,
    out: &mut [u8],
) -> Result<(), FormatError> {
    let out = record_out(shape, Layout::Nvfp4ExpertRg16V1, out)?;
    let (h, i) = (shape.hidden as usize, shape.intermediate as usize);
    for (matrix, planes) in ExpertMatrix::ALL.into_iter().zip([gate, up, down]) {
        expect_len("expert NVFP4 codes", (h * i / 2) as u64, planes.codes.len())?;
        expect_len("expert NVFP4 block scales", (h * i / 16) as u64, planes.scales.len())?;
        check_block_scales(planes.scales, shape.matrix(matrix).1)
            .map_err(|e| e.within(&format!("{} ", matrix.name())))?;
    }
    if h == 0 || i == 0 {
        return Ok(());
    }
    let (first, second) = out.split_at_mut(2 * i * h / 256 * 144);
    for (group, units) in first.chunks_exact_mut(h / 16 * 144).enumerate() {
        // Rows alternate gate and up: row 2n is gate n, row 2n+1 is up n.
        let codes = std::array::from_fn(|r| {
            row(if r % 2 == 0 { gate.codes } else { up.codes }, group * 8 + r / 2, h / 2)
        });
        let scales = std::array::from_fn(|r| {
            row(if r % 2 == 0 { gate.scales } else { up.scales }, group * 8 + r / 2, h / 16)
        });
        pack_group(codes, scales, units);
    }
    for (group, units) in second.chunks_exact_mut(i / 16 * 144).enumerate() {
        let codes = std::array::from_fn(|r| row(down.codes, group * 16 + r, i / 2));
        let scales = std::array::from_fn(|r| row(down.scales, group * 16 + r, i / 16));
        pack_group(codes, scales, units);
    }
    Ok(())
}

#[inline]
fn row(plane: &[u8], row: usize, width: usize) -> &[u8] {
    &plane[row * width..(row + 1) * width]
}

fn record_out<'a>(shape: &BankShape, layout: Layout, out: &'a mut [u8]) -> Result<&'a mut [u8], FormatError> {
    if shape.layout != layout {
        return Err(FormatError::Shape {
            layout: shape.layout,
            format: match (shape.types, layout) {
                (Some(types), _) => Format::ggml_experts(types),
                (None, Layout::Nvfp4ExpertRg16V1) => Format::Nvfp4Mul,
                _ => Format::Fp8Block128,
            },
            shape: vec![shape.experts, shape.hidden, shape.intermediate],
            why: "the record belongs to another expert bank layout",
        });
    }
    if out.len() as u64 == shape.record_bytes {
        return Ok(out);
    }
    expect_len("expert record", shape.stride, out.len())?;
    let (record, padding) = out.split_at_mut(shape.record_bytes as usize);
    padding.fill(0);
    Ok(record)
}

/// Packs 16 rows of K columns into K/16 units of 144 bytes.
fn pack_group(codes: [&[u8]; 16], scales: [&[u8]; 16], units: &mut [u8]) {
    let units = units.as_chunks_mut::<144>().0;
    let n = units.len();
    // Equal lengths known in one place, so that the loop carries no bounds checks.
    let codes = codes.map(|c| &c.as_chunks::<8>().0[..n]);
    let scales = scales.map(|s| &s[..n]);
    for block in 0..n {
        // All of rows 0..8, and of rows 8..16 beside them, so that each step below is one loop over 64 bytes.
        let (mut low, mut high) = ([[0u8; 8]; 8], [[0u8; 8]; 8]);
        for j in 0..8 {
            (low[j], high[j]) = (codes[j][block], codes[j + 8][block]);
        }
        let (low, high) = (low.as_flattened(), high.as_flattened());
        let (mut even, mut odd) = ([0u8; 64], [0u8; 64]);
        for i in 0..64 {
            even[i] = (low[i] & 0x0F) | (high[i] << 4);
            odd[i] = (low[i] >> 4) | (high[i] & 0xF0);
        }
        let mut by_row = [0u8; 128];
        for i in 0..64 {
            (by_row[2 * i], by_row[2 * i + 1]) = (even[i], odd[i]);
        }
        let by_row = by_row.as_chunks::<4>().0;
        let (out, scale_out) = units[block].split_at_mut(128);
        let out = out.as_chunks_mut::<4>().0;
        for q in 0..4 {
            for j in 0..8 {
                out[8 * q + j] = by_row[4 * j + q];
            }
        }
        let (mut first, mut second) = (0u64, 0u64);
        for r in 0..8 {
            first |= u64::from(scales[r][block]) << (8 * r);
            second |= u64::from(scales[r + 8][block]) << (8 * r);
        }
        scale_out[..8].copy_from_slice(&first.to_le_bytes());
        scale_out[8..].copy_from_slice(&second.to_le_bytes());
    }
}

/// Unpacks one matrix of a `nvfp4_expert_rg16_v1` record into row-major source planes.
///
/// # Errors
/// A buffer of the wrong length.
pub fn unpack_nvfp4(
    shape: &BankShape,
    record: &[u8],
    matrix: ExpertMatrix,
    codes: &mut [u8],
    scales: &mut [u8],
) -> Result<(), FormatError> {
    let record = record_in(shape, Layout::Nvfp4ExpertRg16V1, record)?;
    let (rows, k) = shape.matrix(matrix);
    expect_len("expert NVFP4 codes", rows * k / 2, codes.len())?;
    expect_len("expert NVFP4 block scales", rows * k / 16, scales.len())?;
    if rows == 0 || k == 0 {
        return Ok(());
    }
    let k = k as usize;
    for (r, (codes, scales)) in codes.chunks_exact_mut(k / 2).zip(scales.chunks_exact_mut(k / 16)).enumerate()
    {
        unpack_row(shape, record, matrix, r, codes, scales);
    }
    Ok(())
}

fn record_in<'a>(shape: &BankShape, layout: Layout, record: &'a [u8]) -> Result<&'a [u8], FormatError> {
    if shape.layout != layout || (record.len() as u64) < shape.record_bytes {
        return Err(FormatError::Length {
            what: "expert record",
            expected: shape.record_bytes,
            found: record.len() as u64,
        });
    }
    Ok(&record[..shape.record_bytes as usize])
}

/// One row of a matrix out of an RG16 record; `record` has been checked by `record_in`.
fn unpack_row(
    shape: &BankShape,
    record: &[u8],
    matrix: ExpertMatrix,
    row: usize,
    codes: &mut [u8],
    scales: &mut [u8],
) {
    let (h, i) = (shape.hidden as usize, shape.intermediate as usize);
    let (start, k, row) = match matrix {
        ExpertMatrix::Gate => (0, h, 2 * row),
        ExpertMatrix::Up => (0, h, 2 * row + 1),
        ExpertMatrix::Down => (2 * i * h / 256 * 144, i, row),
    };
    let group = &record[start + row / 16 * (k / 16 * 144)..][..k / 16 * 144];
    let (j, shift) = (row % 8, if row % 16 >= 8 { 4 } else { 0 });
    for ((unit, codes), scale) in group.chunks_exact(144).zip(codes.chunks_exact_mut(8)).zip(scales) {
        *scale = unit[128 + row % 16];
        for q in 0..4 {
            let c = &unit[32 * q + 4 * j..][..4];
            codes[2 * q] = ((c[0] >> shift) & 15) | (((c[1] >> shift) & 15) << 4);
            codes[2 * q + 1] = ((c[2] >> shift) & 15) | (((c[3] >> shift) & 15) << 4);
        }
    }
}

/// Packs one expert of `fp8_expert_block128_v1`: gate, up and down codes, zeros to a multiple of 256, then the FP32
/// tile scales of gate, up and down. `out` is `shape.stride` bytes (padding is zeroed) or `shape.record_bytes`.
///
/// # Errors
/// A buffer of the wrong length, a NaN code or a negative or non-finite scale.
pub fn pack_fp8(
    shape: &BankShape,
    gate: BlockFp8Planes<'_>,
    up: BlockFp8Planes<'_>,
    down: BlockFp8Planes<'_>,
    out: &mut [u8],
) -> Result<(), FormatError> {
    let out = record_out(shape, Layout::Fp8ExpertBlock128V1, out)?;
    let elements = (shape.hidden * shape.intermediate) as usize;
    let tiles = shape.tiles();
    let (codes, scales) = out.split_at_mut((3 * elements).next_multiple_of(256));
    for (n, planes) in [gate, up, down].into_iter().enumerate() {
        expect_len("expert FP8 codes", elements as u64, planes.codes.len())?;
        expect_len("expert FP8 tile scales", tiles as u64, planes.scales.len())?;
        codes[n * elements..(n + 1) * elements].copy_from_slice(planes.codes);
        for (out, s) in scales[n * tiles * 4..].chunks_exact_mut(4).zip(planes.scales) {
            out.copy_from_slice(&s.to_le_bytes());
        }
    }
    codes[3 * elements..].fill(0);
    let record = ExpertRecord { shape: *shape, format: Format::Fp8Block128, globals: [1.0; 3], bytes: out };
    record.validate_words()
}

/// Codes and little-endian FP32 tile scales of one matrix of a `fp8_expert_block128_v1` record, in place.
///
/// # Errors
/// A record of the wrong length.
pub fn fp8_planes<'a>(
    shape: &BankShape,
    record: &'a [u8],
    matrix: ExpertMatrix,
) -> Result<(&'a [u8], &'a [u8]), FormatError> {
    let record = record_in(shape, Layout::Fp8ExpertBlock128V1, record)?;
    let elements = (shape.hidden * shape.intermediate) as usize;
    let tiles = 4 * shape.tiles();
    let n = matrix.index();
    let scales = &record[(3 * elements).next_multiple_of(256)..];
    Ok((&record[n * elements..(n + 1) * elements], &scales[n * tiles..(n + 1) * tiles]))
}

/// Refuses block scales that are negative or NaN; `k` values per row.
pub(crate) fn check_block_scales(scales: &[u8], k: u64) -> Result<(), FormatError> {
    // The whole plane first, without branches; the place only when something is wrong.
    if scales.iter().fold(0, |m, &s| m.max(s)) <= 0x7E {
        return Ok(());
    }
    let at = scales.iter().position(|&s| !e4m3_is_scale(s)).unwrap_or(0);
    let per_row = (k / 16).max(1);
    Err(FormatError::IllegalWord {
        what: "block scale",
        word: u32::from(scales[at]),
        place: Place::at(at as u64 / per_row, at as u64 % per_row * 16),
        why: "an E4M3 block scale must be positive or zero and not NaN (0x00..0x7E)",
    })
}

/// One expert record and its global scales, for decoding and checking.
#[derive(Debug, Clone, Copy)]
pub struct ExpertRecord<'a> {
    shape: BankShape,
    format: Format,
    globals: [f32; 3],
    bytes: &'a [u8],
}

impl<'a> ExpertRecord<'a> {
    /// Wraps a record. `format` is `nvfp4`, `nvfp4_mul`, `fp8_e4m3fn_block128_f32` or one of `ggml_`; `globals` = gate, up, down
    /// divisors or multipliers (ignored for FP8); `bytes` holds `record_bytes` or `stride` bytes.
    ///
    /// # Errors
    /// The layout does not store the format; the record is too short.
    pub fn new(
        shape: BankShape,
        format: Format,
        globals: [f32; 3],
        bytes: &'a [u8],
    ) -> Result<Self, FormatError> {
        if !shape.layout.stores(format) {
            return Err(FormatError::Unsupported { layout: shape.layout, format });
        }
        if bytes.len() as u64 != shape.stride {
            expect_len("expert record", shape.record_bytes, bytes.len())?;
        }
        Ok(ExpertRecord { shape, format, globals, bytes })
    }

    /// Decodes rows of a matrix, row-major, each value rounded once to FP32.
    ///
    /// # Errors
    /// A row range outside the matrix, or `out` of another length than rows x columns.
    pub fn decode_f32(
        &self,
        matrix: ExpertMatrix,
        rows: Range<u64>,
        out: &mut [f32],
    ) -> Result<(), FormatError> {
        self.decode(matrix, rows, out)
    }

    /// Decodes rows of a matrix to FP64 (exact; one rounding for a divisor).
    ///
    /// # Errors
    /// As [`ExpertRecord::decode_f32`].
    pub fn decode_f64(
        &self,
        matrix: ExpertMatrix,
        rows: Range<u64>,
        out: &mut [f64],
    ) -> Result<(), FormatError> {
        self.decode(matrix, rows, out)
    }

    fn decode<T: Real>(
        &self,
        matrix: ExpertMatrix,
        rows: Range<u64>,
        out: &mut [T],
    ) -> Result<(), FormatError> {
        let (n, k) = self.shape.matrix(matrix);
        if rows.start > rows.end || rows.end > n {
            let why = "the range does not lie in the expert's matrix";
            return Err(FormatError::Rows { start: rows.start, end: rows.end, rows: n, why });
        }
        if self.format == Format::Fp8Block128 {
            let (codes, scales) = fp8_planes(&self.shape, self.bytes, matrix)?;
            let all =
                Rows::new(Layout::Block128ScaleV1, self.format, &[n, k], 0..n, codes, &[], scales, &[])?;
            return all.decode_some(rows, out);
        }
        expect_len("decoded rows", (rows.end - rows.start) * k, out.len())?;
        if k == 0 {
            return Ok(());
        }
        if self.shape.types.is_some() {
            let (ty, blocks) = ggml_blocks(&self.shape, self.bytes, matrix)?;
            let per = ty.row_bytes(k)?;
            return T::blocks(ty, &blocks[(rows.start * per) as usize..(rows.end * per) as usize], out);
        }
        let k = k as usize;
        let (mut codes, mut scales) = (vec![0; k / 2], vec![0; k / 16]);
        let global = self.globals[matrix.index()].to_le_bytes();
        let record = record_in(&self.shape, self.shape.layout, self.bytes)?;
        for (r, out) in (rows.start..rows.end).zip(out.chunks_exact_mut(k)) {
            unpack_row(&self.shape, record, matrix, r as usize, &mut codes, &mut scales);
            let one = [1, k as u64];
            Rows::new(Layout::BlockScaleK16V1, self.format, &one, 0..1, &codes, &[], &scales, &global)?
                .decode(out)?;
        }
        Ok(())
    }

    /// Refuses illegal words and non-zero padding, naming matrix, row and column.
    ///
    /// # Errors
    /// [`FormatError::IllegalWord`] or [`FormatError::Padding`] (offset inside the record).
    pub fn validate_words(&self) -> Result<(), FormatError> {
        let end = self.shape.record_bytes as usize;
        let mut gaps = Vec::with_capacity(4);
        gaps.push(end..self.bytes.len());
        for matrix in ExpertMatrix::ALL {
            let (n, k) = self.shape.matrix(matrix);
            let part = format!("{} ", matrix.name());
            if self.shape.types.is_some() {
                let (ty, blocks) = ggml_blocks(&self.shape, self.bytes, matrix)?;
                if k > 0 {
                    ggml::validate(ty, blocks, k, 0).map_err(|e| e.within(&part))?;
                }
                let end = self.shape.blocks(matrix).end as usize;
                gaps.push(end..end.next_multiple_of(256).min(self.shape.record_bytes as usize).max(end));
                continue;
            }
            if self.format == Format::Fp8Block128 {
                let (codes, scales) = fp8_planes(&self.shape, self.bytes, matrix)?;
                Rows::new(Layout::Block128ScaleV1, self.format, &[n, k], 0..n, codes, &[], scales, &[])?
                    .validate_words()
                    .map_err(|e| e.within(&part))?;
                let codes = 3 * (n * k) as usize;
                gaps.push(codes..codes.next_multiple_of(256));
            } else {
                crate::encoded::check_global(self.format, self.globals[matrix.index()])
                    .map_err(|e| e.within(&part))?;
                let record = record_in(&self.shape, self.shape.layout, self.bytes)?;
                for r in 0..n {
                    self.check_row_scales(record, matrix, r, k).map_err(|e| e.within(&part))?;
                }
            }
        }
        for gap in gaps {
            crate::encoded::check_zero(self.bytes, gap)?;
        }
        Ok(())
    }

    fn check_row_scales(
        &self,
        record: &[u8],
        matrix: ExpertMatrix,
        r: u64,
        k: u64,
    ) -> Result<(), FormatError> {
        let i = self.shape.intermediate as usize;
        let (start, row) = match matrix {
            ExpertMatrix::Gate => (0, 2 * r as usize),
            ExpertMatrix::Up => (0, 2 * r as usize + 1),
            ExpertMatrix::Down => (2 * i * self.shape.hidden as usize / 256 * 144, r as usize),
        };
        let width = k as usize / 16 * 144;
        let group = &record[start + row / 16 * width..][..width];
        for (block, unit) in group.chunks_exact(144).enumerate() {
            check_block_scales(&unit[128 + row % 16..][..1], 16).map_err(|e| match e {
                FormatError::IllegalWord { what, word, why, .. } => {
                    FormatError::IllegalWord { what, word, why, place: Place::at(r, 16 * block as u64) }
                }
                other => other,
            })?;
        }
        Ok(())
    }
}
