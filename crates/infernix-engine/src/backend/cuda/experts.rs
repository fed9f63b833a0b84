//! Routed experts of a layer: records as stored, by the exact W4A4 arithmetic or with 16-bit activations, rows or blocks as stored, or
//! matrices of exact codes.

use super::ggml::BlockBank;
use super::rows::RowBank;
use super::tiers::{RecordShape, Tiers};
use super::vram::{Vram, fault};
use super::workers::Matrices;
use crate::backend::cpu::CpuExperts;
use crate::backend::{Activation, ExpertData, ExpertSpec};
use crate::error::EngineError;
use crate::numerics::w4a4::{self, Scale};
use half::bf16;
use infernix_cuda::DeviceBuffer;
use infernix_cuda::kernels::chain::ChainMatrix;
use infernix_cuda::kernels::ggml::GgmlGemv;
use infernix_cuda::kernels::linear::WeightFormat;
use infernix_cuda::kernels::stored::StoredForm;
use infernix_cuda::kernels::tile::TileFormat;
use infernix_formats::expert_bank::{BankShape, ExpertMatrix};
use infernix_formats::ggml::GgmlType;
use infernix_formats::scalar::e4m3_to_f32;
use infernix_formats::{Format, Layout};

/// Routed experts of one layer.
pub struct CudaExperts {
    pub(super) experts: usize,
    pub(super) hidden: usize,
    pub(super) intermediate: usize,
    pub(super) store: Store,
}

pub(super) enum Store {
    /// Records where [`Tiers`] keeps them; FP32 `[E][3]` combined and input scales.
    Exact { bank: usize, alpha: DeviceBuffer, input: DeviceBuffer, divisor: bool },
    /// Records where [`Tiers`] keeps them, 16-bit activations.
    Stored(Stored),
    /// Gate, up and down in blocks of a GGUF file, resident.
    Blocks(Box<[BlockBank; 3]>),
    /// Gate with up, and down, in rows of a format with a kernel, resident.
    Rows(Box<[RowBank; 2]>),
    /// Everything else, resident.
    Chain { gate_up: Matrix, down: Matrix },
}

/// Records of a bank and how their matrices lie.
pub(super) struct Stored {
    pub(super) bank: usize,
    pub(super) record: usize,
    pub(super) form: Form,
}

pub(super) enum Form {
    /// FP32 `[E][3]` of the matrices, multipliers or divisors.
    Rg16 {
        last: DeviceBuffer,
        divide: bool,
    },
    Fp8,
    /// Types of gate, up and down, and where each begins.
    Ggml([(GgmlType, usize); 3]),
}

impl Stored {
    /// The bank's records, if there are kernels for them.
    fn of(
        vram: &Vram,
        tiers: &mut Tiers,
        host: &CpuExperts,
        spec: &ExpertSpec,
        data: &ExpertData,
    ) -> Result<Option<Self>, EngineError> {
        let (ExpertData::Bank(part), Activation::A16) = (data, spec.activation) else { return Ok(None) };
        let shape = BankShape::of(part.layout, part.format, &part.shape)
            .map_err(|e| EngineError::Weight { name: spec.name.clone(), what: e.to_string() })?;
        let record = shape.record_bytes as usize;
        let (form, down) = match part.layout {
            Layout::Nvfp4ExpertRg16V1 => {
                let last: Vec<f32> = (0..spec.experts).flat_map(|e| host.globals(e)).collect();
                let form = Form::Rg16 { last: put(vram, &last)?, divide: part.format == Format::Nvfp4 };
                (form, record / 3 * 2)
            }
            // Rows of whole chunks of the tile products.
            Layout::Fp8ExpertBlock128V1 if (spec.hidden | spec.intermediate).is_multiple_of(64) => {
                (Form::Fp8, 2 * spec.hidden * spec.intermediate)
            }
            Layout::GgmlExpertV1 => match shape.types {
                Some(types) if types.iter().all(|t| GgmlGemv::TYPES.contains(t)) => {
                    let at = |m| shape.blocks(m).start as usize;
                    let [gate, up, down] = ExpertMatrix::ALL.map(|m| (types[m.index()], at(m)));
                    (Form::Ggml([gate, up, down]), down.1)
                }
                _ => return Ok(None),
            },
            _ => return Ok(None),
        };
        let lie = RecordShape { experts: spec.experts, stride: shape.stride as usize, record, down };
        let bank = tiers.add(&spec.name, part.bytes.clone(), part.file.clone(), lie, None);
        Ok(Some(Stored { bank, record, form }))
    }

    /// The product of decode rounds, where it is not that of GGML blocks.
    pub(super) fn product(&self) -> Option<StoredForm> {
        match self.form {
            Form::Rg16 { .. } => Some(StoredForm::Rg16),
            Form::Fp8 => Some(StoredForm::Fp8Block),
            Form::Ggml(_) => None,
        }
    }

    /// FP8: bytes before the codes of gate and up or of down, before the high bits there are none of, and before the scales.
    pub(super) fn fp8(&self, e: &CudaExperts, down: bool) -> [usize; 3] {
        let (codes, tiles) =
            (e.hidden * e.intermediate, e.hidden.div_ceil(128) * e.intermediate.div_ceil(128));
        let first = (3 * codes).next_multiple_of(256);
        if down { [2 * codes, 0, first + 8 * tiles] } else { [0, 0, first] }
    }

    /// The tile product that takes these records in prompts.
    pub(super) fn tile(&self) -> Option<TileFormat> {
        match self.form {
            Form::Rg16 { .. } => Some(TileFormat::Rg16),
            Form::Fp8 => Some(TileFormat::Rows(WeightFormat::Fp8Block)),
            Form::Ggml(_) => None,
        }
    }
}

/// Matrices of all experts as exact codes.
pub(super) struct Matrix {
    codes: DeviceBuffer,
    scales: DeviceBuffer,
    last: DeviceBuffer,
    rows: usize,
    k: usize,
    group: usize,
    divide: bool,
}

impl Matrix {
    pub(super) fn view(&self) -> ChainMatrix {
        ChainMatrix {
            codes: self.codes.ptr(),
            scales: self.scales.ptr(),
            last: self.last.ptr(),
            rows: self.rows,
            k: self.k,
            group: self.group,
            divide: self.divide,
        }
    }
}

impl CudaExperts {
    /// The bank of records, where these are in one.
    pub(super) fn bank(&self) -> Option<usize> {
        match &self.store {
            Store::Exact { bank, .. } => Some(*bank),
            Store::Stored(s) => Some(s.bank),
            Store::Blocks(_) | Store::Rows(_) | Store::Chain { .. } => None,
        }
    }

    pub(super) fn new(
        vram: &Vram,
        tiers: &mut Tiers,
        spec: &ExpertSpec,
        data: ExpertData,
    ) -> Result<Self, EngineError> {
        let (experts, hidden, intermediate) = (spec.experts, spec.hidden, spec.intermediate);
        let wrong = |what: String| EngineError::Weight { name: spec.name.clone(), what };
        if spec.activation == Activation::A8 {
            return Err(EngineError::Unsupported(format!(
                "{}: experts with 8-bit activations run on the CPU only; leave --a8-activations out",
                spec.name
            )));
        }
        // The host backend checks shapes and scales.
        let host = CpuExperts::new(spec, data.clone())?;
        if let Some(stored) = Stored::of(vram, tiers, &host, spec, &data)? {
            return Ok(CudaExperts { experts, hidden, intermediate, store: Store::Stored(stored) });
        }
        if let Some(banks) = BlockBank::of_experts(vram, &host, spec)? {
            return Ok(CudaExperts { experts, hidden, intermediate, store: Store::Blocks(Box::new(banks)) });
        }
        if let Some(banks) = RowBank::of_experts(vram, spec, &data)? {
            return Ok(CudaExperts { experts, hidden, intermediate, store: Store::Rows(Box::new(banks)) });
        }
        let store = match (&data, spec.activation, &spec.input_scales) {
            (ExpertData::Bank(part), Activation::A4, Some(input)) => {
                let shape = BankShape::new(Layout::Nvfp4ExpertRg16V1, &part.shape)
                    .map_err(|e| wrong(e.to_string()))?;
                if let Some(e) = input.iter().position(|s| s[0].to_bits() != s[1].to_bits()) {
                    return Err(wrong(format!(
                        "gate and up of expert {e} have different input scales; use --backend cpu"
                    )));
                }
                let divisor = part.format == Format::Nvfp4;
                let scale = |v| if divisor { Scale::Divisor(v) } else { Scale::Multiplier(v) };
                let alpha: Vec<f32> = (0..experts)
                    .flat_map(|e| std::iter::zip(host.globals(e), input[e]))
                    .map(|(w, g)| match w4a4::combine(scale(w), scale(g)) {
                        Scale::Multiplier(v) | Scale::Divisor(v) => v,
                    })
                    .collect();
                let flat: Vec<f32> = input.iter().flatten().copied().collect();
                let (a, i) = (put(vram, &alpha)?, put(vram, &flat)?);
                let matrices = Matrices {
                    hidden,
                    intermediate,
                    experts,
                    stride: shape.stride as usize,
                    record: shape.record_bytes as usize,
                    alpha,
                    input: flat,
                    divisor,
                };
                // Gate and up before down: two of three equal parts.
                let (stride, record) = (matrices.stride, matrices.record);
                let lie = RecordShape { experts, stride, record, down: record / 3 * 2 };
                let bank = tiers.add(&spec.name, part.bytes.clone(), part.file.clone(), lie, Some(matrices));
                Store::Exact { bank, alpha: a, input: i, divisor }
            }
            _ => {
                let divisor = matches!(&data, ExpertData::Bank(p) if p.format == Format::Nvfp4);
                Store::Chain {
                    gate_up: chain(vram, &host, spec, &[ExpertMatrix::Gate, ExpertMatrix::Up], divisor)?,
                    down: chain(vram, &host, spec, &[ExpertMatrix::Down], divisor)?,
                }
            }
        };
        Ok(CudaExperts { experts, hidden, intermediate, store })
    }
}

fn put<T: infernix_cuda::driver::Plain>(vram: &Vram, values: &[T]) -> Result<DeviceBuffer, EngineError> {
    let b = vram.take("weights", std::mem::size_of_val(values))?;
    b.write(0, values).map_err(fault)?;
    Ok(b)
}

/// The named matrices of every expert, one below the other.
fn chain(
    vram: &Vram,
    host: &CpuExperts,
    spec: &ExpertSpec,
    matrices: &[ExpertMatrix],
    divisor: bool,
) -> Result<Matrix, EngineError> {
    let (h, i) = (spec.hidden, spec.intermediate);
    let k = if matrices == [ExpertMatrix::Down] { i } else { h };
    let rows = if matrices == [ExpertMatrix::Down] { h } else { 2 * i };
    let (mut codes, mut scales, mut last) = (Vec::<u16>::new(), Vec::<f32>::new(), Vec::<f32>::new());
    let mut group = 32;
    for e in 0..spec.experts {
        if let Some((gate_up, down)) = host.units(e) {
            group = 16;
            unpack(
                if matrices.len() == 2 { gate_up } else { down },
                rows,
                k,
                matrices.len() == 2,
                &mut codes,
                &mut scales,
            );
            let globals = host.globals(e);
            for m in matrices {
                last.extend(std::iter::repeat_n(globals[m.index()], rows / matrices.len()));
            }
            continue;
        }
        for m in matrices {
            for part in host.matrix(e, *m) {
                group = part.group().unwrap_or(32);
                let (mut values, mut own) = (vec![0f32; k], vec![0f32; k.div_ceil(group)]);
                for r in 0..part.n() {
                    part.natural(r, &mut values, group, &mut own);
                    codes.extend(values.iter().map(|v| bf16::from_f32(*v).to_bits()));
                    scales.extend_from_slice(&own);
                    // What the row multiplies by at the end; the divisor of NVFP4 has a bank of its own.
                    last.push(part.finish(r, 1.0));
                }
            }
        }
    }
    Ok(Matrix {
        codes: put(vram, &codes)?,
        scales: put(vram, &scales)?,
        last: put(vram, &last)?,
        rows,
        k,
        group,
        divide: divisor,
    })
}

/// Units of 16 x 16 to rows. Rows of gate and up alternate in a unit; they come out one matrix below the other.
fn unpack(units: &[u8], rows: usize, k: usize, pairs: bool, codes: &mut Vec<u16>, scales: &mut Vec<f32>) {
    const VALUES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let (c0, s0) = (codes.len(), scales.len());
    let blocks = k / 16;
    codes.resize(c0 + rows * k, 0);
    scales.resize(s0 + rows * blocks, 0.0);
    for (u, unit) in units.chunks_exact(144).enumerate() {
        let (g, b) = (u / blocks, u % blocks);
        for r in 0..16 {
            let stored = 16 * g + r;
            let row = if pairs { stored % 2 * (rows / 2) + stored / 2 } else { stored };
            scales[s0 + row * blocks + b] = e4m3_to_f32(unit[128 + r]);
            for j in 0..16 {
                let byte = unit[j / 4 * 32 + 4 * (r % 8) + j % 4];
                let code = if r < 8 { byte & 15 } else { byte >> 4 };
                let v = VALUES[usize::from(code & 7)];
                let v = if code & 8 == 0 { v } else { -v };
                codes[c0 + row * k + 16 * b + j] = bf16::from_f32(v).to_bits();
            }
        }
    }
}
