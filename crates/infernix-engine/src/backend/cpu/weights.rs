//! Weights as the backend holds them: the map's bytes with the offsets of their planes; nothing is copied.

use super::linear::{Kind, Rows};
use crate::backend::weights::Bytes;
use crate::backend::{ExpertData, ExpertSpec, WeightData, WeightPart, WeightSpec};
use crate::error::EngineError;
use crate::memory::huge_pages;
use infernix_formats::expert_bank::{BankShape, ExpertMatrix, ggml_blocks};
use infernix_formats::{Encoded, Format, Layout, PlaneRole, RowShape, planes};
use std::ops::Range;
use std::sync::OnceLock;

/// Rows of one stored object.
pub(crate) struct Part {
    kind: Kind,
    total: usize,
    matrix: usize,
    k: usize,
    rows: Range<usize>,
    bytes: Bytes,
    codes: Range<usize>,
    high: Range<usize>,
    scales: Range<usize>,
    global: f32,
}

/// A weight in its stored words.
pub struct CpuWeight {
    pub(crate) spec: WeightSpec,
    pub(crate) parts: Vec<Part>,
    data: WeightData,
    /// Activation element of each stored column, where that is not the column's own.
    pub(crate) columns: Option<Vec<u32>>,
    n: usize,
    k: usize,
    values: OnceLock<Vec<f32>>,
    plus_one: OnceLock<Vec<f32>>,
    transposed: OnceLock<Vec<f32>>,
    read: OnceLock<()>,
}

fn wrong(name: &str, what: String) -> EngineError {
    EngineError::Weight { name: name.to_owned(), what }
}

fn kind_of(format: Format, layout: Layout) -> Option<Kind> {
    Some(match (format, layout) {
        (Format::Bf16, _) => Kind::Bf16,
        (Format::Fp16, _) => Kind::F16,
        (Format::Fp32, _) => Kind::F32,
        (Format::Q4G64, _) => Kind::Q4,
        (Format::Q5G64, _) => Kind::Q5,
        (Format::Q6G64, _) => Kind::Q6,
        (Format::Q8G32, _) => Kind::Q8,
        (Format::Nvfp4, Layout::BlockScaleK16M128x4V1) => Kind::Nvfp4DivSwizzled,
        (Format::Nvfp4Mul, Layout::BlockScaleK16M128x4V1) => Kind::Nvfp4MulSwizzled,
        (Format::Nvfp4, Layout::BlockScaleK16V1) => Kind::Nvfp4Div,
        (Format::Nvfp4Mul, Layout::BlockScaleK16V1) => Kind::Nvfp4Mul,
        (Format::Fp8Row, _) => Kind::Fp8Row,
        (Format::Fp8Tensor, _) => Kind::Fp8Tensor,
        (Format::Fp8Block128, _) => Kind::Fp8Block,
        (Format::Mxfp8, _) => Kind::Mxfp8,
        (Format::Ggml(t), Layout::GgmlRowsV1) => Kind::Ggml(t),
        _ => return None,
    })
}

impl Part {
    fn new(name: &str, part: &WeightPart) -> Result<Self, EngineError> {
        let source = |e| EngineError::Source { name: name.to_owned(), source: Box::new(e) };
        let bytes = (*part.bytes).as_ref();
        Encoded::new(part.layout, part.format, &part.shape, bytes).map_err(source)?;
        let shape = RowShape::of(&part.shape).map_err(source)?;
        let kind = kind_of(part.format, part.layout).ok_or_else(|| {
            wrong(name, format!("{} in {} is no matrix format of this backend", part.format, part.layout))
        })?;
        let (mut codes, mut high, mut scales, mut global) = (0..0, 0..0, 0..0, 1.0);
        for p in planes(part.layout, part.format, &part.shape).map_err(source)? {
            let r = p.offset as usize..(p.offset + p.bytes) as usize;
            match p.role {
                PlaneRole::Codes | PlaneRole::Records => codes = r,
                PlaneRole::HighBits => high = r,
                PlaneRole::Scales => scales = r,
                PlaneRole::GlobalScale => {
                    global = bytes[r].first_chunk().map_or(f32::NAN, |b| f32::from_le_bytes(*b));
                }
            }
        }
        let this = Part {
            kind,
            total: shape.rows as usize,
            matrix: shape.per_matrix.max(1) as usize,
            k: shape.k as usize,
            rows: part.rows.start as usize..part.rows.end as usize,
            bytes: part.bytes.clone(),
            codes,
            high,
            scales,
            global,
        };
        if this.rows.start > this.rows.end || this.view(this.rows.clone()).is_none() {
            return Err(wrong(
                name,
                format!(
                    "rows {:?} of shape {:?} do not fit its {} bytes",
                    part.rows,
                    part.shape,
                    bytes.len()
                ),
            ));
        }
        Ok(this)
    }

    fn view(&self, rows: Range<usize>) -> Option<Rows<'_>> {
        let b = (*self.bytes).as_ref();
        let (codes, high, scales) = (&b[self.codes.clone()], &b[self.high.clone()], &b[self.scales.clone()]);
        let rows = Rows::new(
            self.kind,
            self.total,
            self.k,
            rows.start,
            rows.len(),
            codes,
            high,
            scales,
            self.global,
        )?;
        if self.matrix == self.total { Some(rows) } else { rows.stacked(self.total, self.matrix) }
    }
}

impl CpuWeight {
    /// Checks a weight and finds its planes.
    pub(crate) fn new(spec: &WeightSpec, data: WeightData) -> Result<Self, EngineError> {
        let name = &spec.name;
        let parts = data.parts.iter().map(|p| Part::new(name, p)).collect::<Result<Vec<_>, _>>()?;
        let k = parts.first().map_or(0, |p| p.k);
        let n = parts.iter().map(|p| p.rows.len()).sum::<usize>();
        let values: u64 = data.shape.iter().product();
        if parts.iter().any(|p| p.k != k) || (n * k) as u64 != values {
            return Err(wrong(name, format!("shape {:?}, but its parts hold {n} rows of {k}", data.shape)));
        }
        let empty = OnceLock::new;
        Ok(CpuWeight {
            spec: spec.clone(),
            parts,
            data,
            columns: None,
            n,
            k,
            values: empty(),
            plus_one: empty(),
            transposed: empty(),
            read: OnceLock::new(),
        })
    }

    /// Output rows.
    pub(crate) fn n(&self) -> usize {
        self.n
    }

    /// Values a row.
    pub(crate) fn k(&self) -> usize {
        self.k
    }

    /// Storage of each part.
    pub(crate) fn kinds(&self) -> impl Iterator<Item = Kind> {
        self.parts.iter().map(|p| p.kind)
    }

    /// To be called before products: the first one finds what it reads on huge pages, where the system grants them.
    /// (A table that is only looked up in keeps small ones.)
    pub(crate) fn for_products(&self) {
        self.read.get_or_init(|| self.parts.iter().for_each(|p| huge_pages((*p.bytes).as_ref())));
    }

    /// Views of all parts, in order.
    pub(crate) fn rows(&self) -> Vec<Rows<'_>> {
        self.slice(0..self.n)
    }

    /// Views of a range of rows.
    pub(crate) fn slice(&self, rows: Range<usize>) -> Vec<Rows<'_>> {
        let mut first = 0;
        let mut out = Vec::with_capacity(1);
        for p in &self.parts {
            let (a, b) = (rows.start.max(first), rows.end.min(first + p.rows.len()));
            if a < b {
                // Bounds were checked when the part was taken.
                out.extend(p.view(p.rows.start + a - first..p.rows.start + b - first));
            }
            first += p.rows.len();
        }
        out
    }

    /// Decoded values of a row, rounded to FP32 at most once.
    pub(crate) fn decode_row(&self, row: usize, out: &mut [f32]) -> Result<(), EngineError> {
        let name = &self.spec.name;
        let source = |e| EngineError::Source { name: name.clone(), source: Box::new(e) };
        let mut first = 0;
        for p in &self.data.parts {
            let n = (p.rows.end - p.rows.start) as usize;
            if row < first + n {
                let at = p.rows.start + (row - first) as u64;
                let step = p.layout.row_step();
                let e = Encoded::new(p.layout, p.format, &p.shape, (*p.bytes).as_ref()).map_err(source)?;
                let total = e.row_shape().map_err(source)?.rows;
                let wide = at / step * step..(at + 1).next_multiple_of(step).min(total);
                let mut values = vec![0f32; (wide.end - wide.start) as usize * self.k];
                e.rows(wide.clone()).and_then(|r| r.decode_f32(&mut values)).map_err(source)?;
                let skip = (at - wide.start) as usize * self.k;
                out.copy_from_slice(&values[skip..skip + self.k]);
                return Ok(());
            }
            first += n;
        }
        Err(wrong(name, format!("row {row} of {}", self.n)))
    }

    /// All values (vectors and small matrices); decoded once.
    pub(crate) fn values(&self) -> &[f32] {
        self.values.get_or_init(|| {
            let mut v = vec![0f32; self.n * self.k];
            for (r, out) in v.chunks_exact_mut(self.k.max(1)).enumerate() {
                // Lengths were checked when the weight was taken; illegal words are the verifier's to find.
                let _ = self.decode_row(r, out);
            }
            v
        })
    }

    /// `1 + w`.
    pub(crate) fn plus_one(&self) -> &[f32] {
        self.plus_one.get_or_init(|| self.values().iter().map(|v| 1.0 + v).collect())
    }

    /// `[K, N]`, for convolutions.
    pub(crate) fn transposed(&self) -> &[f32] {
        self.transposed.get_or_init(|| {
            let v = self.values();
            (0..self.k).flat_map(|j| (0..self.n).map(move |i| v[i * self.k + j])).collect()
        })
    }
}

/// Routed experts in their stored words.
pub struct CpuExperts {
    pub(crate) spec: ExpertSpec,
    pub(crate) store: Store,
}

pub(crate) enum Store {
    /// `nvfp4_expert_rg16_v1`.
    Rg16 { bytes: Bytes, shape: BankShape, divisor: bool },
    /// `fp8_expert_block128_v1`.
    Fp8 { bytes: Bytes, shape: BankShape },
    /// `ggml_expert_v1`.
    Ggml { bytes: Bytes, shape: BankShape },
    /// Gate then up rows per expert; down rows.
    Parents { gate_up: Box<CpuWeight>, down: Box<CpuWeight> },
}

impl CpuExperts {
    pub(crate) fn new(spec: &ExpertSpec, data: ExpertData) -> Result<Self, EngineError> {
        let (e, h, i) = (spec.experts, spec.hidden, spec.intermediate);
        let name = &spec.name;
        let store = match data {
            ExpertData::Bank(part) if part.layout == Layout::ContiguousLeV1 => {
                return Err(wrong(name, "a bank is stored in an expert layout".to_owned()));
            }
            ExpertData::Bank(part) => {
                let source = |e| EngineError::Source { name: name.clone(), source: Box::new(e) };
                Encoded::new(part.layout, part.format, &part.shape, (*part.bytes).as_ref())
                    .map_err(source)?;
                let shape = BankShape::of(part.layout, part.format, &part.shape).map_err(source)?;
                if part.shape != [e as u64, h as u64, i as u64] {
                    return Err(wrong(
                        name,
                        format!("bank of shape {:?}, expected [{e}, {h}, {i}]", part.shape),
                    ));
                }
                match part.layout {
                    Layout::Nvfp4ExpertRg16V1 => {
                        Store::Rg16 { bytes: part.bytes, shape, divisor: part.format == Format::Nvfp4 }
                    }
                    Layout::GgmlExpertV1 => Store::Ggml { bytes: part.bytes, shape },
                    _ => Store::Fp8 { bytes: part.bytes, shape },
                }
            }
            ExpertData::Parents { gate_up, down } => {
                let weight = |what: &str, data: WeightData, n: usize, k: usize| {
                    let spec = WeightSpec {
                        name: format!("{name}/{what}"),
                        activation: spec.activation,
                        input_scale: None,
                    };
                    let w = CpuWeight::new(&spec, data)?;
                    if (w.n(), w.k()) != (n, k) {
                        let what = format!("{} rows of {}, expected {n} of {k}", w.n(), w.k());
                        return Err(wrong(&spec.name, what));
                    }
                    Ok(Box::new(w))
                };
                Store::Parents {
                    gate_up: weight("gate_up", gate_up, e * 2 * i, h)?,
                    down: weight("down", down, e * h, i)?,
                }
            }
        };
        if spec.activation == crate::backend::Activation::A4 {
            let scaled = spec.input_scales.as_ref().is_some_and(|s| s.len() == e);
            if !scaled || !matches!(store, Store::Rg16 { .. }) {
                return Err(wrong(name, "4-bit activations need an NVFP4 bank with input scales".to_owned()));
            }
        }
        Ok(CpuExperts { spec: spec.clone(), store })
    }

    /// Global scales of an expert: gate, up, down.
    pub(crate) fn globals(&self, expert: usize) -> [f32; 3] {
        let Store::Rg16 { bytes, shape, .. } = &self.store else { return [1.0; 3] };
        let at = (shape.stride * shape.experts) as usize + 12 * expert;
        let plane = &(**bytes).as_ref()[at..at + 12];
        std::array::from_fn(|m| f32::from_le_bytes(std::array::from_fn(|i| plane[4 * m + i])))
    }

    /// Units of gate and up (interleaved rows), and of down, of an `nvfp4_expert_rg16_v1` record.
    pub(crate) fn units(&self, expert: usize) -> Option<(&[u8], &[u8])> {
        let Store::Rg16 { bytes, shape, .. } = &self.store else { return None };
        let r = shape.record(expert as u64);
        let record = &(**bytes).as_ref()[r.start as usize..r.start as usize + shape.record_bytes as usize];
        Some(record.split_at(record.len() / 3 * 2))
    }

    /// Row-major views of one matrix of an expert.
    pub(crate) fn matrix(&self, expert: usize, matrix: ExpertMatrix) -> Vec<Rows<'_>> {
        let (h, i) = (self.spec.hidden, self.spec.intermediate);
        match &self.store {
            Store::Rg16 { .. } => Vec::new(),
            Store::Parents { gate_up, down } => match matrix {
                ExpertMatrix::Gate => gate_up.slice(2 * i * expert..2 * i * expert + i),
                ExpertMatrix::Up => gate_up.slice(2 * i * expert + i..2 * i * (expert + 1)),
                ExpertMatrix::Down => down.slice(h * expert..h * (expert + 1)),
            },
            Store::Ggml { bytes, shape } => {
                let r = shape.record(expert as u64);
                let record = &(**bytes).as_ref()[r.start as usize..r.end as usize];
                let (n, k) = shape.matrix(matrix);
                let rows = ggml_blocks(shape, record, matrix).ok().and_then(|(ty, blocks)| {
                    let (n, k) = (n as usize, k as usize);
                    Rows::new(Kind::Ggml(ty), n, k, 0, n, blocks, &[], &[], 1.0)
                });
                rows.into_iter().collect()
            }
            Store::Fp8 { bytes, shape } => {
                let r = shape.record(expert as u64);
                let record = &(**bytes).as_ref()[r.start as usize..r.end as usize];
                let m = matrix.index();
                // Codes of the three matrices, padded to 256, then their tile scales.
                let tiles = 4 * h.div_ceil(128) * i.div_ceil(128);
                let scales = (3 * h * i).next_multiple_of(256) + m * tiles;
                let (n, k) = shape.matrix(matrix);
                Rows::new(
                    Kind::Fp8Block,
                    n as usize,
                    k as usize,
                    0,
                    n as usize,
                    &record[m * h * i..(m + 1) * h * i],
                    &[],
                    &record[scales..scales + tiles],
                    1.0,
                )
                .into_iter()
                .collect()
            }
        }
    }
}
