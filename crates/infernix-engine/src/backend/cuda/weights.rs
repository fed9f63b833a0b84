//! Dense weights on the device: planes of whole rows in the words they are stored in, NVFP4 in the order its kernels read.

use super::ggml::Blocks;
use super::vram::{Vram, fault};
use crate::backend::{Activation, WeightData, WeightPart, WeightSpec};
use crate::error::EngineError;
use half::bf16;
use infernix_cuda::DeviceBuffer;
use infernix_cuda::kernels::linear::{Linear, WeightFormat};
use infernix_cuda::kernels::nvfp4::{self, Nvfp4Order};
use infernix_formats::nvfp4::m128x4_offset;
use infernix_formats::{Encoded, Format, Layout, PlaneRole, RowShape, planes};

/// Rows so short are a vector's or a convolution's, kept as plain values.
const SHORT: usize = 16;

/// A weight on the device.
pub struct CudaWeight {
    /// Matrices one below the other, one a format and tensor scale.
    pub(super) parts: Vec<Linear>,
    /// The same as blocks of a GGUF file, or as FP32 values of a format without a kernel; a weight has one kind of parts.
    pub(super) blocks: Vec<Blocks>,
    pub(super) n: usize,
    pub(super) k: usize,
    /// I32 `[k]`: the activation that each stored column multiplies, where that is not its own.
    pub(super) columns: Option<DeviceBuffer>,
    /// Plain BF16 `[n, k]` of a vector or convolution; absent if a value does not fit.
    pub(super) plain: Option<DeviceBuffer>,
    /// Plain FP32 of a vector.
    pub(super) wide: Option<DeviceBuffer>,
    pub(super) name: String,
}

/// Rows of planes on the host, as the kernels read them.
struct Planes {
    format: WeightFormat,
    tensor_scale: f32,
    divide: bool,
    rows: usize,
    codes: Vec<u8>,
    high: Vec<u8>,
    scales: Vec<u8>,
    row_scale: Vec<u8>,
}

impl CudaWeight {
    pub(super) fn new(vram: &Vram, spec: &WeightSpec, data: &WeightData) -> Result<Self, EngineError> {
        let name = spec.name.clone();
        if spec.activation != Activation::A16 {
            return Err(EngineError::Unsupported(format!(
                "{name}: linears with 8- or 4-bit activations run on the CPU only; leave the activation options out"
            )));
        }
        let k = data.parts.first().map_or(1, |p| p.shape.last().copied().unwrap_or(1)) as usize;
        let vector = data.shape.len() < 2 || k < SHORT;
        let mut w = CudaWeight {
            parts: Vec::new(),
            blocks: Vec::new(),
            n: 0,
            k,
            columns: None,
            plain: None,
            wide: None,
            name,
        };
        if vector {
            let mut values = Vec::new();
            for p in &data.parts {
                values.extend(decode(&w.name, p)?);
            }
            (w.n, w.k) = if data.shape.len() < 2 { (1, values.len()) } else { (values.len() / k, k) };
            if let Some(words) = exact_bf16(&values) {
                w.plain = Some(put(vram, &words)?);
            }
            w.wide = Some(put(vram, &values)?);
            return Ok(w);
        }
        if data.parts.iter().any(|p| kind(p.format, p.layout).is_none() && !fits_bf16(p)) {
            w.blocks = Blocks::of_parts(vram, &w.name, data)?;
            w.n = w.blocks.iter().map(|b| b.n).sum();
            return Ok(w);
        }
        let mut open: Option<Planes> = None;
        for p in &data.parts {
            let next = stored_planes(&w.name, p)?;
            match &mut open {
                Some(o)
                    if o.format == next.format
                        && o.tensor_scale.to_bits() == next.tensor_scale.to_bits()
                        && o.divide == next.divide =>
                {
                    o.rows += next.rows;
                    o.codes.extend(next.codes);
                    o.high.extend(next.high);
                    o.scales.extend(next.scales);
                    o.row_scale.extend(next.row_scale);
                }
                _ => {
                    if let Some(o) = open.replace(next) {
                        w.push(vram, o)?;
                    }
                }
            }
        }
        if let Some(o) = open {
            w.push(vram, o)?;
        }
        Ok(w)
    }

    fn push(&mut self, vram: &Vram, p: Planes) -> Result<(), EngineError> {
        let optional = |v: &[u8]| if v.is_empty() { Ok(None) } else { put(vram, v).map(Some) };
        self.n += p.rows;
        let k_pad = padded(p.format, self.k);
        let (codes, scales) = if p.format == WeightFormat::Nvfp4 {
            let to = vram.take("weights", nvfp4::bytes(p.rows, k_pad))?;
            let order = Nvfp4Order::new(&vram.device).map_err(fault)?;
            order.upload(&p.codes, &p.scales, p.rows, k_pad, &to).map_err(fault)?;
            (to, None)
        } else {
            (put(vram, &p.codes)?, optional(&p.scales)?)
        };
        self.parts.push(Linear {
            format: p.format,
            n: p.rows,
            k: self.k,
            k_pad,
            codes,
            high: optional(&p.high)?,
            scales,
            row_scale: optional(&p.row_scale)?,
            tensor_scale: p.tensor_scale,
            divide: p.divide,
        });
        Ok(())
    }

    /// Address of plain BF16 values.
    pub(super) fn plain(&self) -> Result<u64, EngineError> {
        let words = self.plain.as_ref().or(match &self.parts[..] {
            [one] if one.format == WeightFormat::Bf16 && one.k == one.k_pad => Some(&one.codes),
            _ => None,
        });
        words.map(DeviceBuffer::ptr).ok_or_else(|| EngineError::Weight {
            name: self.name.clone(),
            what: "has values that BF16 does not hold; the CUDA backend keeps vectors in BF16".into(),
        })
    }

    /// Address of plain FP32 values.
    pub(super) fn wide(&self) -> Result<u64, EngineError> {
        self.wide.as_ref().map(DeviceBuffer::ptr).ok_or_else(|| EngineError::Weight {
            name: self.name.clone(),
            what: "is a matrix where a vector is expected".into(),
        })
    }
}

/// Whether plain values of a format without a kernel are BF16 words in disguise.
fn fits_bf16(p: &WeightPart) -> bool {
    let plain = matches!(p.format, Format::Fp32 | Format::Fp16);
    plain && decode("", p).is_ok_and(|v| exact_bf16(&v).is_some())
}

pub(super) fn put<T: infernix_cuda::driver::Plain>(
    vram: &Vram,
    values: &[T],
) -> Result<DeviceBuffer, EngineError> {
    let b = vram.take("weights", std::mem::size_of_val(values))?;
    b.write(0, values).map_err(fault)?;
    Ok(b)
}

fn exact_bf16(values: &[f32]) -> Option<Vec<u16>> {
    let exact = |v: &f32| {
        let b = bf16::from_f32(*v);
        (b.to_f32().to_bits() == v.to_bits()).then_some(b.to_bits())
    };
    values.iter().map(exact).collect()
}

fn padded(format: WeightFormat, k: usize) -> usize {
    match format {
        // Stored in rows padded to 128 already.
        WeightFormat::Q4G64 | WeightFormat::Q5G64 | WeightFormat::Q6G64 | WeightFormat::Q8G32 => {
            k.next_multiple_of(128)
        }
        f => k.next_multiple_of(f.step()),
    }
}

pub(super) fn decode(name: &str, p: &WeightPart) -> Result<Vec<f32>, EngineError> {
    let source =
        |e: infernix_formats::FormatError| EngineError::Source { name: name.to_owned(), source: Box::new(e) };
    let e = Encoded::new(p.layout, p.format, &p.shape, (*p.bytes).as_ref()).map_err(source)?;
    let k = e.row_shape().map_err(source)?.k;
    let mut values = vec![0f32; ((p.rows.end - p.rows.start) * k) as usize];
    e.rows(p.rows.clone()).and_then(|r| r.decode_f32(&mut values)).map_err(source)?;
    Ok(values)
}

fn kind(format: Format, layout: Layout) -> Option<WeightFormat> {
    Some(match (format, layout) {
        (Format::Bf16, Layout::ContiguousLeV1) => WeightFormat::Bf16,
        (Format::Q4G64, _) => WeightFormat::Q4G64,
        (Format::Q5G64, _) => WeightFormat::Q5G64,
        (Format::Q6G64, _) => WeightFormat::Q6G64,
        (Format::Q8G32, _) => WeightFormat::Q8G32,
        (Format::Nvfp4 | Format::Nvfp4Mul, Layout::BlockScaleK16V1 | Layout::BlockScaleK16M128x4V1) => {
            WeightFormat::Nvfp4
        }
        (Format::Fp8Row | Format::Fp8Tensor, _) => WeightFormat::Fp8Row,
        (Format::Mxfp8, _) => WeightFormat::Mxfp8,
        _ => return None,
    })
}

/// What all parts of a weight are stored in, if that is one format the kernels read in planes of rows.
pub(super) fn row_format(data: &WeightData) -> Option<WeightFormat> {
    let first = data.parts.first()?;
    let alike = data.parts.iter().all(|p| (p.format, p.layout) == (first.format, first.layout));
    kind(first.format, first.layout).filter(|_| alike)
}

/// Copies rows of `from` bytes into rows of `to` bytes, zeros after them.
fn widen(src: &[u8], from: usize, to: usize) -> Vec<u8> {
    if from == to || from == 0 {
        return src.to_vec();
    }
    let mut out = vec![0u8; src.len() / from * to];
    out.chunks_exact_mut(to).zip(src.chunks_exact(from)).for_each(|(o, s)| o[..from].copy_from_slice(s));
    out
}

fn stored_planes(name: &str, p: &WeightPart) -> Result<Planes, EngineError> {
    let source =
        |e: infernix_formats::FormatError| EngineError::Source { name: name.to_owned(), source: Box::new(e) };
    let bytes = (*p.bytes).as_ref();
    let shape = RowShape::of(&p.shape).map_err(source)?;
    let (k, rows) = (shape.k as usize, p.rows.start as usize..p.rows.end as usize);
    let Some(format) = kind(p.format, p.layout) else {
        // A format without a kernel whose values BF16 holds exactly.
        let Some(words) = exact_bf16(&decode(name, p)?) else {
            let what = format!("{} values do not fit BF16", p.format);
            return Err(EngineError::Weight { name: name.to_owned(), what });
        };
        let raw: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        let codes = widen(&raw, 2 * k, 2 * padded(WeightFormat::Bf16, k));
        return Ok(Planes { rows: rows.len(), codes, ..Planes::plain() });
    };
    Encoded::new(p.layout, p.format, &p.shape, bytes).map_err(source)?;
    let (code_row, high_row, scale_row) = format.row_bytes(padded(format, k));
    let mut out = Planes { format, rows: rows.len(), divide: p.format == Format::Nvfp4, ..Planes::plain() };
    for plane in planes(p.layout, p.format, &p.shape).map_err(source)? {
        let all = &bytes[plane.offset as usize..(plane.offset + plane.bytes) as usize];
        let per = all.len() / (shape.rows as usize).max(1);
        let own = || &all[rows.start * per..rows.end * per];
        match plane.role {
            PlaneRole::Codes | PlaneRole::Records => out.codes = widen(own(), per, code_row),
            PlaneRole::HighBits => out.high = widen(own(), per, high_row),
            PlaneRole::Scales if p.format == Format::Fp8Row => out.row_scale = own().to_vec(),
            PlaneRole::Scales if p.layout == Layout::BlockScaleK16M128x4V1 => {
                let groups = k / 16;
                out.scales = vec![0u8; rows.len() * scale_row];
                for (o, r) in out.scales.chunks_exact_mut(scale_row).zip(rows.clone()) {
                    o.iter_mut()
                        .take(groups)
                        .enumerate()
                        .for_each(|(g, o)| *o = all[m128x4_offset(groups, r, g)]);
                }
            }
            PlaneRole::Scales => out.scales = widen(own(), per, scale_row),
            PlaneRole::GlobalScale => {
                out.tensor_scale = all.first_chunk().map_or(f32::NAN, |b| f32::from_le_bytes(*b));
            }
        }
    }
    Ok(out)
}

impl Planes {
    fn plain() -> Self {
        Planes {
            format: WeightFormat::Bf16,
            tensor_scale: 1.0,
            divide: false,
            rows: 0,
            codes: Vec::new(),
            high: Vec::new(),
            scales: Vec::new(),
            row_scale: Vec::new(),
        }
    }
}
