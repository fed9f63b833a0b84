//! Views of encoded tensors: word checks and exact decoding.

use std::ops::Range;

use crate::error::{FormatError, Place, expect_len};
use crate::expert_bank::{BankShape, ExpertRecord};
use crate::format::Format;
use crate::ggml::GgmlType;
use crate::groupwise;
use crate::layout::{
    Layout, PlaneRole, RowShape, check_rows, encoded_size, planes, row_bytes, row_planes, tile_rows,
};
use crate::scalar::{
    E2M1, bf16_is_scale, bf16_to_f32, e4m3_is_finite, e4m3_to_f32, e8m0_is_finite, e8m0_to_f32, f16_to_f32,
};

/// FP32 or FP64, as the target of decoding.
pub(crate) trait Real: Copy + Default {
    /// `a * b`, rounded once where it does not fit.
    fn product(a: f32, b: f32) -> Self;
    /// `a / b`, rounded once.
    fn quotient(a: f32, b: f32) -> Self;
    /// An integer, rounded to nearest.
    fn integer(v: i64) -> Self;
    /// Whole ggml blocks.
    fn blocks(ty: GgmlType, bytes: &[u8], out: &mut [Self]) -> Result<(), FormatError>;
}

impl Real for f32 {
    #[inline]
    fn product(a: f32, b: f32) -> f32 {
        a * b
    }
    #[inline]
    fn quotient(a: f32, b: f32) -> f32 {
        a / b
    }
    #[inline]
    fn integer(v: i64) -> f32 {
        v as f32
    }
    fn blocks(ty: GgmlType, bytes: &[u8], out: &mut [f32]) -> Result<(), FormatError> {
        crate::ggml::decode_f32(ty, bytes, out)
    }
}

impl Real for f64 {
    #[inline]
    fn product(a: f32, b: f32) -> f64 {
        f64::from(a) * f64::from(b)
    }
    #[inline]
    fn quotient(a: f32, b: f32) -> f64 {
        f64::from(a) / f64::from(b)
    }
    #[inline]
    fn integer(v: i64) -> f64 {
        v as f64
    }
    fn blocks(ty: GgmlType, bytes: &[u8], out: &mut [f64]) -> Result<(), FormatError> {
        crate::ggml::decode_f64(ty, bytes, out)
    }
}

/// Some rows of an encoded tensor, with the bytes of those rows in each plane (see [`row_planes`]).
#[derive(Debug, Clone)]
pub struct Rows<'a> {
    layout: Layout,
    format: Format,
    shape: RowShape,
    range: Range<u64>,
    codes: &'a [u8],
    high: &'a [u8],
    scales: &'a [u8],
    global: f32,
}

impl<'a> Rows<'a> {
    /// Wraps the planes of `range`. Planes that the format lacks are empty slices; `global` is the four bytes of the
    /// global scale.
    ///
    /// # Errors
    /// As [`row_planes`]; a plane of the wrong length.
    #[expect(clippy::too_many_arguments, reason = "one argument per plane; callers have them apart")]
    pub fn new(
        layout: Layout,
        format: Format,
        shape: &[u64],
        range: Range<u64>,
        codes: &'a [u8],
        high: &'a [u8],
        scales: &'a [u8],
        global: &'a [u8],
    ) -> Result<Self, FormatError> {
        let rs = check_rows(layout, format, shape, &range)?;
        let (mut want_high, mut want_scales, mut want_global) = (0, 0, 0);
        for p in row_planes(layout, format, shape, range.clone())? {
            match p.role {
                PlaneRole::Codes => expect_len("code plane", p.bytes, codes.len())?,
                PlaneRole::HighBits => want_high = p.bytes,
                PlaneRole::Scales => want_scales = p.bytes,
                PlaneRole::GlobalScale => want_global = p.bytes,
                PlaneRole::Records => {}
            }
        }
        expect_len("high-bit plane", want_high, high.len())?;
        expect_len("scale plane", want_scales, scales.len())?;
        expect_len("global scale", want_global, global.len())?;
        let global = global.try_into().map_or(1.0, f32::from_le_bytes);
        Ok(Rows { layout, format, shape: rs, range, codes, high, scales, global })
    }

    /// Values per row.
    #[must_use]
    pub fn k(&self) -> u64 {
        self.shape.k
    }

    /// Number of rows.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.range.end - self.range.start
    }

    /// Whether there are no rows.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }

    /// Decodes all rows, each value rounded once to FP32.
    ///
    /// # Errors
    /// `out` has another length than rows x columns.
    pub fn decode_f32(&self, out: &mut [f32]) -> Result<(), FormatError> {
        self.decode(out)
    }

    /// Decodes all rows to FP64 (exact; one rounding for a divisor or an int64 beyond 53 bits).
    ///
    /// # Errors
    /// As [`Rows::decode_f32`].
    pub fn decode_f64(&self, out: &mut [f64]) -> Result<(), FormatError> {
        self.decode(out)
    }

    pub(crate) fn decode<T: Real>(&self, out: &mut [T]) -> Result<(), FormatError> {
        self.decode_some(self.range.clone(), out)
    }

    /// Decodes `rows` (numbers of the tensor, inside this range).
    pub(crate) fn decode_some<T: Real>(&self, rows: Range<u64>, out: &mut [T]) -> Result<(), FormatError> {
        if rows.start < self.range.start || rows.end > self.range.end || rows.start > rows.end {
            let why = "the range does not lie in the rows at hand";
            return Err(FormatError::Rows { start: rows.start, end: rows.end, rows: self.range.end, why });
        }
        expect_len("decoded rows", (rows.end - rows.start) * self.shape.k, out.len())?;
        if self.shape.k == 0 {
            return Ok(());
        }
        for (row, out) in rows.zip(out.chunks_exact_mut(self.shape.k as usize)) {
            self.decode_row(row, out);
        }
        Ok(())
    }

    fn row_of<'b>(&self, plane: &'b [u8], row: u64, width: u64) -> &'b [u8] {
        let at = (row - self.range.start) * width;
        &plane[at as usize..(at + width) as usize]
    }

    /// FP32 tile scales of a row's 128-row tile line.
    fn tile_line(&self, row: u64) -> &'a [u8] {
        let first = tile_rows(&self.shape, &self.range).start;
        let line = tile_rows(&self.shape, &(row..row + 1)).start - first;
        let width = 4 * self.shape.k.div_ceil(128);
        &self.scales[(line * width) as usize..((line + 1) * width) as usize]
    }

    /// Block scale word of (row, group of 16), whatever the layout of the scale plane.
    #[inline]
    fn block_scale(&self, row: u64, group: usize) -> u8 {
        let r = (row - self.range.start) as usize;
        let groups = self.shape.k as usize / 16;
        if self.layout == Layout::BlockScaleK16M128x4V1 {
            self.scales[crate::nvfp4::m128x4_offset(groups, r, group)]
        } else {
            self.scales[r * groups + group]
        }
    }

    fn decode_row<T: Real>(&self, row: u64, out: &mut [T]) {
        let per = row_bytes(self.format, self.shape.k);
        let codes = self.row_of(self.codes, row, per.codes);
        match self.format {
            Format::Bf16 => {
                words::<2, T>(codes, out, |w| T::product(bf16_to_f32(u16::from_le_bytes(w)), 1.0))
            }
            Format::Fp16 => words::<2, T>(codes, out, |w| T::product(f16_to_f32(u16::from_le_bytes(w)), 1.0)),
            Format::Fp32 => words::<4, T>(codes, out, |w| T::product(f32::from_le_bytes(w), 1.0)),
            Format::Int32 => words::<4, T>(codes, out, |w| T::integer(i64::from(i32::from_le_bytes(w)))),
            Format::Int64 => words::<8, T>(codes, out, |w| T::integer(i64::from_le_bytes(w))),
            Format::Q4G64 | Format::Q5G64 | Format::Q6G64 | Format::Q8G32 => {
                let high = self.row_of(self.high, row, per.high);
                let scales = self.row_of(self.scales, row, per.scales);
                let group = if self.format == Format::Q8G32 { 32 } else { 64 };
                let mut q = [0i8; 64];
                for (g, out) in out.chunks_mut(group).enumerate() {
                    groupwise::unpack_group(self.format, codes, high, g, &mut q);
                    let s = f16_to_f32(u16::from_le_bytes([scales[2 * g], scales[2 * g + 1]]));
                    for (o, &q) in out.iter_mut().zip(&q) {
                        *o = T::product(f32::from(q), s);
                    }
                }
            }
            Format::Nvfp4 | Format::Nvfp4Mul => {
                let divide = self.format == Format::Nvfp4;
                for (g, (out, codes)) in out.chunks_exact_mut(16).zip(codes.chunks_exact(8)).enumerate() {
                    let s = e4m3_to_f32(self.block_scale(row, g));
                    // E2M1 x E4M3 has at most 6 significant bits: the product is exact.
                    let value = |code: u8| {
                        let v = E2M1[usize::from(code & 15)] * s;
                        if divide { T::quotient(v, self.global) } else { T::product(v, self.global) }
                    };
                    for (o, &c) in out.chunks_exact_mut(2).zip(codes) {
                        o[0] = value(c);
                        o[1] = value(c >> 4);
                    }
                }
            }
            Format::Fp8Row => {
                let s = self.row_of(self.scales, row, 2);
                scaled(codes, bf16_to_f32(u16::from_le_bytes([s[0], s[1]])), out);
            }
            Format::Fp8Tensor => scaled(codes, self.global, out),
            Format::Fp8Block128 => {
                let tiles = self.tile_line(row).chunks_exact(4);
                for ((codes, out), t) in codes.chunks(128).zip(out.chunks_mut(128)).zip(tiles) {
                    scaled(codes, le_f32(t), out);
                }
            }
            // Lengths were checked with the shape; other types are no format of rows.
            Format::Ggml(t) => _ = T::blocks(t, codes, out),
            Format::GgmlExperts(..) => {}
            Format::Mxfp8 => {
                let scales = self.row_of(self.scales, row, per.scales);
                for ((codes, out), &s) in codes.chunks_exact(32).zip(out.chunks_exact_mut(32)).zip(scales) {
                    scaled(codes, e8m0_to_f32(s), out);
                }
            }
        }
    }

    /// Refuses words that the format does not allow, naming row and column. Padding inside rows must be zero.
    ///
    /// # Errors
    /// [`FormatError::IllegalWord`].
    pub fn validate_words(&self) -> Result<(), FormatError> {
        let k = self.shape.k;
        check_global(self.format, self.global)?;
        if k == 0 {
            return Ok(());
        }
        if self.format == Format::Fp8Tensor && self.global == 0.0 {
            let at = self.codes.iter().position(|c| c & 0x7F != 0);
            if let Some(at) = at {
                let (row, column) = (self.range.start + at as u64 / k, at as u64 % k);
                return Err(illegal("FP8 code", u32::from(self.codes[at]), row, column, ZERO_SCALE));
            }
        }
        for row in self.range.clone() {
            self.validate_row(row, row_bytes(self.format, k))?;
        }
        Ok(())
    }

    fn validate_row(&self, row: u64, per: crate::layout::RowBytes) -> Result<(), FormatError> {
        let codes = self.row_of(self.codes, row, per.codes);
        match self.format {
            Format::Q4G64 | Format::Q5G64 | Format::Q6G64 | Format::Q8G32 => {
                let high = self.row_of(self.high, row, per.high);
                let scales = self.row_of(self.scales, row, per.scales);
                groupwise::validate_row(self.format, self.shape.k, row, codes, high, scales)
            }
            Format::Nvfp4 | Format::Nvfp4Mul => {
                for g in 0..self.shape.k as usize / 16 {
                    let s = self.block_scale(row, g);
                    if s > 0x7E {
                        return Err(illegal("block scale", u32::from(s), row, 16 * g as u64, BLOCK_SCALE));
                    }
                }
                Ok(())
            }
            Format::Fp8Row => {
                check_fp8(codes, row, 0)?;
                let s = self.row_of(self.scales, row, 2);
                let s = u16::from_le_bytes([s[0], s[1]]);
                if !bf16_is_scale(s) {
                    return Err(illegal(
                        "row scale",
                        u32::from(s),
                        row,
                        0,
                        "a BF16 row scale must be +0 or positive and finite",
                    ));
                }
                if s == 0 { check_zero_codes(codes, row, 0) } else { Ok(()) }
            }
            Format::Fp8Tensor => check_fp8(codes, row, 0),
            Format::Fp8Block128 => {
                check_fp8(codes, row, 0)?;
                for (n, (codes, t)) in codes.chunks(128).zip(self.tile_line(row).chunks_exact(4)).enumerate()
                {
                    let t = le_f32(t);
                    let column = 128 * n as u64;
                    if !(t.is_sign_positive() && t.is_finite()) {
                        let why = "an FP32 tile scale must be +0 or positive and finite";
                        return Err(illegal("tile scale", t.to_bits(), row, column, why));
                    }
                    if t == 0.0 {
                        check_zero_codes(codes, row, column)?;
                    }
                }
                Ok(())
            }
            Format::Mxfp8 => {
                check_fp8(codes, row, 0)?;
                let scales = self.row_of(self.scales, row, per.scales);
                match scales.iter().position(|&s| !e8m0_is_finite(s)) {
                    Some(g) => Err(illegal("E8M0 scale", 255, row, 32 * g as u64, "255 is NaN")),
                    None => Ok(()),
                }
            }
            Format::Ggml(t) => crate::ggml::validate(t, codes, self.shape.k, row),
            Format::Bf16 | Format::Fp16 | Format::Fp32 | Format::Int32 | Format::Int64 => Ok(()),
            Format::GgmlExperts(..) => Ok(()),
        }
    }
}

const ZERO_SCALE: &str = "a zero scale needs zero codes";
const BLOCK_SCALE: &str = "an E4M3 block scale must be positive or zero and not NaN (0x00..0x7E)";

fn le_f32(bytes: &[u8]) -> f32 {
    bytes.try_into().map_or(f32::NAN, f32::from_le_bytes)
}

fn words<const B: usize, T>(codes: &[u8], out: &mut [T], f: impl Fn([u8; B]) -> T) {
    for (o, w) in out.iter_mut().zip(codes.as_chunks::<B>().0) {
        *o = f(*w);
    }
}

fn scaled<T: Real>(codes: &[u8], scale: f32, out: &mut [T]) {
    for (o, &c) in out.iter_mut().zip(codes) {
        *o = T::product(e4m3_to_f32(c), scale);
    }
}

pub(crate) fn illegal(
    what: &'static str,
    word: u32,
    row: u64,
    column: u64,
    why: &'static str,
) -> FormatError {
    FormatError::IllegalWord { what, word, place: Place::at(row, column), why }
}

fn check_fp8(codes: &[u8], row: u64, column: u64) -> Result<(), FormatError> {
    // A branch-free pass first: NaN is the one magnitude 0x7F.
    if codes.iter().fold(0, |m, c| m.max(c & 0x7F)) != 0x7F {
        return Ok(());
    }
    let at = codes.iter().position(|&c| !e4m3_is_finite(c)).unwrap_or(0);
    Err(illegal("FP8 code", u32::from(codes[at]), row, column + at as u64, "an E4M3 weight must not be NaN"))
}

fn check_zero_codes(codes: &[u8], row: u64, column: u64) -> Result<(), FormatError> {
    match codes.iter().position(|c| c & 0x7F != 0) {
        Some(at) => Err(illegal("FP8 code", u32::from(codes[at]), row, column + at as u64, ZERO_SCALE)),
        None => Ok(()),
    }
}

/// Refuses a global scale that its format does not allow.
pub(crate) fn check_global(format: Format, global: f32) -> Result<(), FormatError> {
    let (ok, what, why) = match format {
        Format::Nvfp4 => (global > 0.0, "global divisor", "an NVFP4 divisor must be positive and finite"),
        Format::Nvfp4Mul => {
            (global > 0.0, "global multiplier", "an NVFP4 multiplier must be positive and finite")
        }
        Format::Fp8Tensor => (
            global.is_sign_positive(),
            "tensor scale",
            "an FP32 tensor scale must be +0 or positive and finite",
        ),
        _ => return Ok(()),
    };
    if ok && global.is_finite() { Ok(()) } else { Err(illegal(what, global.to_bits(), 0, 0, why)) }
}

/// Refuses non-zero bytes in `range`.
pub(crate) fn check_zero(bytes: &[u8], range: Range<usize>) -> Result<(), FormatError> {
    match bytes[range.clone()].iter().position(|&b| b != 0) {
        Some(at) => {
            let at = range.start + at;
            Err(FormatError::Padding { offset: at as u64, byte: bytes[at] })
        }
        None => Ok(()),
    }
}

/// An encoded tensor: borrowed bytes whose length fits layout, format and shape.
#[derive(Debug, Clone, Copy)]
pub struct Encoded<'a> {
    /// Meaning of the words.
    pub format: Format,
    /// Their arrangement.
    pub layout: Layout,
    /// Logical shape.
    pub shape: &'a [u64],
    /// The object's bytes.
    pub bytes: &'a [u8],
}

impl<'a> Encoded<'a> {
    /// Checks that `bytes` has the exact length. Words are checked by [`Encoded::validate_words`].
    ///
    /// # Errors
    /// As [`encoded_size`]; a wrong length.
    pub fn new(
        layout: Layout,
        format: Format,
        shape: &'a [u64],
        bytes: &'a [u8],
    ) -> Result<Self, FormatError> {
        expect_len("encoded tensor", encoded_size(layout, format, shape)?, bytes.len())?;
        Ok(Encoded { format, layout, shape, bytes })
    }

    /// Rows and values per row (see [`RowShape`]).
    ///
    /// # Errors
    /// None after [`Encoded::new`].
    pub fn row_shape(&self) -> Result<RowShape, FormatError> {
        RowShape::of(self.shape)
    }

    /// A view of some rows. Not for expert banks.
    ///
    /// # Errors
    /// As [`row_planes`].
    pub fn rows(&self, rows: Range<u64>) -> Result<Rows<'a>, FormatError> {
        let (mut codes, mut high, mut scales, mut global): (&[u8], &[u8], &[u8], &[u8]) =
            (&[], &[], &[], &[]);
        for p in row_planes(self.layout, self.format, self.shape, rows.clone())? {
            let bytes = &self.bytes[p.offset as usize..(p.offset + p.bytes) as usize];
            match p.role {
                PlaneRole::Codes => codes = bytes,
                PlaneRole::HighBits => high = bytes,
                PlaneRole::Scales => scales = bytes,
                PlaneRole::GlobalScale => global = bytes,
                PlaneRole::Records => {}
            }
        }
        Rows::new(self.layout, self.format, self.shape, rows, codes, high, scales, global)
    }

    /// One expert of a bank.
    ///
    /// # Errors
    /// Not a bank, or no such expert.
    pub fn expert(&self, expert: u64) -> Result<ExpertRecord<'a>, FormatError> {
        let shape = BankShape::of(self.layout, self.format, self.shape)?;
        if expert >= shape.experts {
            let why = "no such expert in the bank";
            return Err(FormatError::Rows {
                start: expert,
                end: expert.saturating_add(1),
                rows: shape.experts,
                why,
            });
        }
        let mut globals = [1.0; 3];
        if self.layout == Layout::Nvfp4ExpertRg16V1 {
            let plane = &self.bytes[(shape.experts * shape.stride + 12 * expert) as usize..][..12];
            for (g, bytes) in globals.iter_mut().zip(plane.chunks_exact(4)) {
                *g = le_f32(bytes);
            }
        }
        let r = shape.record(expert);
        ExpertRecord::new(shape, self.format, globals, &self.bytes[r.start as usize..r.end as usize])
    }

    /// Refuses illegal words (naming row and column) and non-zero padding between planes.
    ///
    /// # Errors
    /// [`FormatError::IllegalWord`] or [`FormatError::Padding`].
    pub fn validate_words(&self) -> Result<(), FormatError> {
        if self.layout.is_bank() {
            let shape = BankShape::of(self.layout, self.format, self.shape)?;
            for e in 0..shape.experts {
                self.expert(e)?.validate_words().map_err(|err| match err {
                    FormatError::Padding { offset, byte } => {
                        FormatError::Padding { offset: offset + e * shape.stride, byte }
                    }
                    other => other.within(&format!("expert {e} ")),
                })?;
            }
            return Ok(());
        }
        let list = planes(self.layout, self.format, self.shape)?;
        for pair in list.windows(2) {
            check_zero(self.bytes, (pair[0].offset + pair[0].bytes) as usize..pair[1].offset as usize)?;
        }
        let all = 0..self.row_shape()?.rows;
        self.rows(all)?.validate_words()
    }

    /// Decodes rows, each value the exact product of its words rounded once to FP32: codes x scale, or for NVFP4
    /// fl32((e2m1*e4m3)*m) and fl32((e2m1*e4m3)/d). Any row range, whatever the layout. Not for expert banks.
    ///
    /// # Errors
    /// A range outside the tensor; `out` of another length than rows x columns.
    pub fn decode_rows_f32(&self, rows: Range<u64>, out: &mut [f32]) -> Result<(), FormatError> {
        self.decode_rows(rows, out)
    }

    /// Decodes rows to FP64: the exact product, or one rounding for a division.
    ///
    /// # Errors
    /// As [`Encoded::decode_rows_f32`].
    pub fn decode_rows_f64(&self, rows: Range<u64>, out: &mut [f64]) -> Result<(), FormatError> {
        self.decode_rows(rows, out)
    }

    fn decode_rows<T: Real>(&self, rows: Range<u64>, out: &mut [T]) -> Result<(), FormatError> {
        let step = self.layout.row_step();
        let total = self.row_shape()?.rows;
        let start = rows.start / step * step;
        let end = rows.end.checked_next_multiple_of(step).map_or(total, |e| e.min(total)).max(start);
        self.rows(start..end)?.decode_some(rows, out)
    }
}
