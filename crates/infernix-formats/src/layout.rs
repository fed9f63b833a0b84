//! Names of the layouts and their exact geometry: planes, offsets, sizes. `docs/formats.md` describes them byte by byte.

use std::ops::Range;

use crate::error::FormatError;
use crate::expert_bank::BankShape;
use crate::format::Format;

/// How the words of a tensor lie in its object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Layout {
    /// `contiguous_le_v1`: direct words, C order.
    ContiguousLeV1,
    /// `row_split_k128_v1`: groupwise integers, K padded to 128, planes apart.
    RowSplitK128V1,
    /// `block_scale_k16_m128x4_v1`: NVFP4 with scales in 128 x 4 tiles.
    BlockScaleK16M128x4V1,
    /// `block_scale_k16_v1`: NVFP4 with row-major scales.
    BlockScaleK16V1,
    /// `row_scale_v1`: FP8 codes, BF16 row scales.
    RowScaleV1,
    /// `tensor_scale_v1`: FP8 codes, one FP32 scale.
    TensorScaleV1,
    /// `block128_scale_v1`: FP8 codes, FP32 tile scales.
    Block128ScaleV1,
    /// `fp8_expert_block128_v1`: one 4 KiB-aligned FP8 record per expert.
    Fp8ExpertBlock128V1,
    /// `row_scale_k32_v1`: FP8 codes, E8M0 scale per 32.
    RowScaleK32V1,
    /// `nvfp4_expert_rg16_v1`: one 4 KiB-aligned NVFP4 record per expert, units of 16 rows x 16 columns.
    Nvfp4ExpertRg16V1,
    /// `ggml_rows_v1`: rows of whole ggml blocks, one after the other.
    GgmlRowsV1,
    /// `ggml_expert_v1`: one 4 KiB-aligned record of ggml blocks per expert.
    GgmlExpertV1,
    /// `raw_bytes_v1`: a resource, byte for byte. Not for tensors.
    RawBytesV1,
}

/// What a plane of an object holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PlaneRole {
    /// Codes, or the words themselves in a direct format.
    Codes,
    /// High bits of 5- and 6-bit codes.
    HighBits,
    /// Scales per group, block, row or tile.
    Scales,
    /// FP32 scale word of the whole matrix, or `[E,3]` of an expert bank.
    GlobalScale,
    /// Expert records, `stride` bytes apart.
    Records,
}

/// A contiguous byte range of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plane {
    /// What it holds.
    pub role: PlaneRole,
    /// First byte, relative to the object.
    pub offset: u64,
    /// Length in bytes, without the padding that follows.
    pub bytes: u64,
}

impl Plane {
    /// The bytes it covers.
    #[must_use]
    pub fn range(&self) -> Range<u64> {
        self.offset..self.offset + self.bytes
    }
}

impl Layout {
    /// Every layout, in the order of the documentation.
    pub const ALL: [Layout; 13] = [
        Layout::ContiguousLeV1,
        Layout::RowSplitK128V1,
        Layout::BlockScaleK16M128x4V1,
        Layout::BlockScaleK16V1,
        Layout::RowScaleV1,
        Layout::TensorScaleV1,
        Layout::Block128ScaleV1,
        Layout::RowScaleK32V1,
        Layout::Nvfp4ExpertRg16V1,
        Layout::Fp8ExpertBlock128V1,
        Layout::GgmlRowsV1,
        Layout::GgmlExpertV1,
        Layout::RawBytesV1,
    ];

    /// The container's name of this layout.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Layout::ContiguousLeV1 => "contiguous_le_v1",
            Layout::RowSplitK128V1 => "row_split_k128_v1",
            Layout::BlockScaleK16M128x4V1 => "block_scale_k16_m128x4_v1",
            Layout::BlockScaleK16V1 => "block_scale_k16_v1",
            Layout::RowScaleV1 => "row_scale_v1",
            Layout::TensorScaleV1 => "tensor_scale_v1",
            Layout::Block128ScaleV1 => "block128_scale_v1",
            Layout::Fp8ExpertBlock128V1 => "fp8_expert_block128_v1",
            Layout::RowScaleK32V1 => "row_scale_k32_v1",
            Layout::Nvfp4ExpertRg16V1 => "nvfp4_expert_rg16_v1",
            Layout::GgmlRowsV1 => "ggml_rows_v1",
            Layout::GgmlExpertV1 => "ggml_expert_v1",
            Layout::RawBytesV1 => "raw_bytes_v1",
        }
    }

    /// Alignment of an object's offset in the logical payload.
    #[must_use]
    pub fn alignment(self) -> u64 {
        match self {
            Layout::RawBytesV1 => 1,
            _ if self.is_bank() => 4096,
            _ => 256,
        }
    }

    /// Whether the object is a sequence of expert records (shape `[E,H,I]`).
    #[must_use]
    pub fn is_bank(self) -> bool {
        matches!(self, Layout::Nvfp4ExpertRg16V1 | Layout::Fp8ExpertBlock128V1 | Layout::GgmlExpertV1)
    }

    /// Whether the layout stores `format`.
    #[must_use]
    pub fn stores(self, format: Format) -> bool {
        match self {
            Layout::ContiguousLeV1 => format.direct_bytes().is_some(),
            Layout::RowSplitK128V1 => format.group_spec().is_some(),
            Layout::BlockScaleK16M128x4V1 => format == Format::Nvfp4,
            Layout::BlockScaleK16V1 | Layout::Nvfp4ExpertRg16V1 => {
                matches!(format, Format::Nvfp4 | Format::Nvfp4Mul)
            }
            Layout::RowScaleV1 => format == Format::Fp8Row,
            Layout::TensorScaleV1 => format == Format::Fp8Tensor,
            Layout::Block128ScaleV1 | Layout::Fp8ExpertBlock128V1 => format == Format::Fp8Block128,
            Layout::RowScaleK32V1 => format == Format::Mxfp8,
            Layout::GgmlRowsV1 => matches!(format, Format::Ggml(t) if t.is_block()),
            Layout::GgmlExpertV1 => format.expert_types().is_some_and(|t| t.iter().all(|t| t.is_block())),
            Layout::RawBytesV1 => false,
        }
    }

    /// Row ranges that are read or written alone must start (and, unless at the end, stop) on a multiple of this.
    #[must_use]
    pub fn row_step(self) -> u64 {
        if self == Layout::BlockScaleK16M128x4V1 { 128 } else { 1 }
    }
}

impl std::fmt::Display for Layout {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

impl std::str::FromStr for Layout {
    type Err = FormatError;

    fn from_str(name: &str) -> Result<Self, FormatError> {
        Layout::ALL.into_iter().find(|l| l.name() == name).ok_or_else(|| FormatError::UnknownName {
            kind: "layout",
            name: name.to_owned(),
            known: Layout::ALL.map(Layout::name).join(", "),
        })
    }
}

/// `n` rounded up to a multiple of `step`; `None` on overflow.
pub(crate) fn align_up(n: u64, step: u64) -> Option<u64> {
    n.checked_next_multiple_of(step)
}

/// A tensor as rows of equal length: `rows` = product of all axes but the last (1 for rank 0 and 1), `k` = the last
/// axis (1 for rank 0). `per_matrix` = rows of one matrix, for formats with two-dimensional tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowShape {
    /// Number of rows.
    pub rows: u64,
    /// Values per row.
    pub k: u64,
    /// Second-last axis (`rows` where there is none): tiles of 128 rows start anew at each multiple of it.
    pub per_matrix: u64,
}

impl RowShape {
    /// Splits a shape; errors when the row or element count overflows 64 bits.
    pub fn of(shape: &[u64]) -> Result<Self, FormatError> {
        let overflow = || FormatError::Overflow { shape: shape.to_vec() };
        let (k, lead) = match shape {
            [] => (1, &[][..]),
            [lead @ .., k] => (*k, lead),
        };
        let mut rows = 1u64;
        for &d in lead {
            rows = rows.checked_mul(d).ok_or_else(overflow)?;
        }
        // Every size below is at most 8 bytes an element plus padding and tiles; 2^59 elements keep sums inside u64.
        let elements = rows.max(1).checked_mul(k.max(1)).ok_or_else(overflow)?;
        if elements > 1 << 59 {
            return Err(overflow());
        }
        Ok(RowShape { rows, k, per_matrix: lead.last().copied().unwrap_or(rows) })
    }
}

fn check_shape(layout: Layout, format: Format, shape: &[u64]) -> Result<RowShape, FormatError> {
    if !layout.stores(format) {
        return Err(FormatError::Unsupported { layout, format });
    }
    let bad = |why| Err(FormatError::Shape { layout, format, shape: shape.to_vec(), why });
    if shape.len() > 16 {
        return bad("the rank must be at most 16");
    }
    let rs = RowShape::of(shape)?;
    match layout {
        Layout::ContiguousLeV1 => {}
        Layout::TensorScaleV1 | Layout::Block128ScaleV1 => {
            if shape.len() < 2 {
                return bad("the shape must be [..,N,K]");
            }
        }
        Layout::GgmlRowsV1 => {
            let Format::Ggml(t) = format else { return bad("the format has no blocks") };
            if shape.is_empty() || rs.k % t.block_len() != 0 {
                return bad("rows must be whole blocks");
            }
        }
        Layout::Nvfp4ExpertRg16V1 | Layout::Fp8ExpertBlock128V1 | Layout::GgmlExpertV1 => {
            if shape.len() != 3 {
                return bad("an expert bank has shape [experts,hidden,intermediate]");
            }
            if layout == Layout::Nvfp4ExpertRg16V1 && (shape[1] % 16 != 0 || shape[2] % 16 != 0) {
                return bad("hidden and intermediate must be multiples of 16");
            }
        }
        _ => {
            if shape.len() != 2 {
                return bad("the shape must be [N,K]");
            }
            let k = shape[1];
            match layout {
                Layout::BlockScaleK16M128x4V1 if shape[0] % 128 != 0 || k % 64 != 0 => {
                    return bad("N must be a multiple of 128 and K of 64");
                }
                Layout::BlockScaleK16V1 if k % 16 != 0 => return bad("K must be a multiple of 16"),
                Layout::RowScaleK32V1 if k % 32 != 0 => return bad("K must be a multiple of 32"),
                _ => {}
            }
        }
    }
    Ok(rs)
}

/// Bytes that one row takes in each plane.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct RowBytes {
    pub(crate) codes: u64,
    pub(crate) high: u64,
    pub(crate) scales: u64,
}

/// Per-row bytes of the layouts that are rows of planes (scales of `block128_scale_v1` and the global word excepted).
pub(crate) fn row_bytes(format: Format, k: u64) -> RowBytes {
    if let Some(b) = format.direct_bytes() {
        return RowBytes { codes: k * b, ..RowBytes::default() };
    }
    if let Some(spec) = format.group_spec() {
        let groups = k.next_multiple_of(128) / spec.group as u64;
        return RowBytes { codes: groups * 32, high: groups * spec.high_bytes as u64, scales: groups * 2 };
    }
    match format {
        Format::Nvfp4 | Format::Nvfp4Mul => RowBytes { codes: k / 2, high: 0, scales: k / 16 },
        Format::Fp8Row => RowBytes { codes: k, high: 0, scales: 2 },
        Format::Mxfp8 => RowBytes { codes: k, high: 0, scales: k / 32 },
        Format::Ggml(t) => RowBytes { codes: k / t.block_len() * t.block_bytes(), high: 0, scales: 0 },
        _ => RowBytes { codes: k, high: 0, scales: 0 },
    }
}

/// Tile rows of FP32 scales that `rows` of a `block128_scale_v1` tensor touch (whole tensor: pass all rows).
pub(crate) fn tile_rows(rs: &RowShape, rows: &Range<u64>) -> Range<u64> {
    if rows.is_empty() || rs.per_matrix == 0 {
        return 0..0;
    }
    let per = rs.per_matrix.div_ceil(128);
    let at = |row: u64| (row / rs.per_matrix) * per + (row % rs.per_matrix) / 128;
    at(rows.start)..at(rows.end - 1) + 1
}

/// The planes of an object, in order, with their offsets.
///
/// # Errors
/// The layout does not store the format; the rank or a multiple is wrong; the size does not fit 64 bits.
pub fn planes(layout: Layout, format: Format, shape: &[u64]) -> Result<Vec<Plane>, FormatError> {
    let rs = check_shape(layout, format, shape)?;
    if layout.is_bank() {
        return BankShape::of(layout, format, shape)?.planes();
    }
    plane_list(layout, format, &rs, shape)
}

fn plane_list(
    layout: Layout,
    format: Format,
    rs: &RowShape,
    shape: &[u64],
) -> Result<Vec<Plane>, FormatError> {
    let overflow = || FormatError::Overflow { shape: shape.to_vec() };
    let per = row_bytes(format, rs.k);
    let mut out: Vec<Plane> = Vec::with_capacity(3);
    // Each plane starts on the next multiple of 256; only the global word follows the scales directly.
    let mut push = |role, bytes: Option<u64>, align: u64| {
        let bytes = bytes.ok_or_else(overflow)?;
        let end = out.last().map_or(0, |p| p.offset + p.bytes);
        let offset = align_up(end, align).ok_or_else(overflow)?;
        offset.checked_add(bytes).ok_or_else(overflow)?;
        out.push(Plane { role, offset, bytes });
        Ok::<(), FormatError>(())
    };
    push(PlaneRole::Codes, rs.rows.checked_mul(per.codes), 256)?;
    if per.high > 0 || format.group_spec().is_some_and(|s| s.high_bytes > 0) {
        push(PlaneRole::HighBits, rs.rows.checked_mul(per.high), 256)?;
    }
    match layout {
        Layout::ContiguousLeV1 | Layout::GgmlRowsV1 => {}
        Layout::TensorScaleV1 => push(PlaneRole::GlobalScale, Some(4), 256)?,
        Layout::Block128ScaleV1 => {
            let tiles = tile_rows(rs, &(0..rs.rows)).end.checked_mul(rs.k.div_ceil(128));
            push(PlaneRole::Scales, tiles.and_then(|t| t.checked_mul(4)), 256)?;
        }
        _ => push(PlaneRole::Scales, rs.rows.checked_mul(per.scales), 256)?,
    }
    if matches!(layout, Layout::BlockScaleK16V1 | Layout::BlockScaleK16M128x4V1) {
        push(PlaneRole::GlobalScale, Some(4), 1)?;
    }
    Ok(out)
}

/// Exact length in bytes of an object: the end of its last plane.
///
/// # Errors
/// As [`planes`].
pub fn encoded_size(layout: Layout, format: Format, shape: &[u64]) -> Result<u64, FormatError> {
    Ok(planes(layout, format, shape)?.last().map_or(0, |p| p.offset + p.bytes))
}

/// The byte ranges, inside the object, of the planes of some rows: what a streaming writer writes or a streaming
/// reader reads for them. The global scale word is included whatever the rows; scales of `block128_scale_v1` are all
/// tile rows touched. Not for expert banks (see [`crate::expert_bank`]).
///
/// # Errors
/// As [`planes`]; also a range outside the tensor, or one that does not start and stop on [`Layout::row_step`].
pub fn row_planes(
    layout: Layout,
    format: Format,
    shape: &[u64],
    rows: Range<u64>,
) -> Result<Vec<Plane>, FormatError> {
    let rs = check_rows(layout, format, shape, &rows)?;
    let per = row_bytes(format, rs.k);
    let mut list = plane_list(layout, format, &rs, shape)?;
    for p in &mut list {
        let (start, end) = match p.role {
            PlaneRole::GlobalScale | PlaneRole::Records => continue,
            PlaneRole::Codes => (rows.start * per.codes, rows.end * per.codes),
            PlaneRole::HighBits => (rows.start * per.high, rows.end * per.high),
            PlaneRole::Scales if layout == Layout::Block128ScaleV1 => {
                let t = tile_rows(&rs, &rows);
                let width = rs.k.div_ceil(128) * 4;
                (t.start * width, t.end * width)
            }
            PlaneRole::Scales => (rows.start * per.scales, rows.end * per.scales),
        };
        p.offset += start;
        p.bytes = end - start;
    }
    Ok(list)
}

pub(crate) fn check_rows(
    layout: Layout,
    format: Format,
    shape: &[u64],
    rows: &Range<u64>,
) -> Result<RowShape, FormatError> {
    let rs = check_shape(layout, format, shape)?;
    let bad = |why| Err(FormatError::Rows { start: rows.start, end: rows.end, rows: rs.rows, why });
    if layout.is_bank() {
        return bad("an expert bank is read by expert records, not by rows");
    }
    if rows.start > rows.end || rows.end > rs.rows {
        return bad("the range does not lie in the tensor");
    }
    let step = layout.row_step();
    if !rows.is_empty() && (rows.start % step != 0 || (rows.end % step != 0 && rows.end != rs.rows)) {
        return bad("this layout is read and written in groups of 128 rows");
    }
    Ok(rs)
}
