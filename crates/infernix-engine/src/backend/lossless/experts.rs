//! Routing and routed experts.

use super::gemm::{Operand, Packed, Products};
use super::simd::{each_product, each_swiglu};
use super::{Lossless, Mat, Routes, U, decode, take_budget};
use crate::backend::{Activation, At, ExpertData, ExpertSpec, Op};
use crate::error::EngineError;
use crate::numerics::dd::{Dd, Real};
use crate::numerics::round::Target;
use crate::numerics::{a8, w4a4};
use infernix_formats::Format;
use infernix_formats::expert_bank::{BankShape, ExpertMatrix, unpack_nvfp4};
use rayon::prelude::*;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex};

/// The routed experts of one layer.
pub struct Experts {
    spec: ExpertSpec,
    data: ExpertData,
    cache: Arc<AtomicUsize>,
    /// Gate, up, down of each expert.
    kept: Vec<Mutex<Option<Arc<[Packed; 3]>>>>,
}

/// Integer operands of a canonical W4A4 matrix.
struct Words {
    codes: Vec<u8>,
    scales: Vec<u8>,
    factor: w4a4::Scale,
    input: w4a4::Scale,
    n: usize,
    k: usize,
}

impl Experts {
    pub(super) fn new(
        spec: &ExpertSpec,
        data: ExpertData,
        cache: Arc<AtomicUsize>,
    ) -> Result<Self, EngineError> {
        let (e, h, i) = (spec.experts as u64, spec.hidden as u64, spec.intermediate as u64);
        match &data {
            ExpertData::Bank(part) => decode::check_bank(spec, part)?,
            ExpertData::Parents { gate_up, down } => {
                for (w, want) in [(gate_up, e * 2 * i * h), (down, e * h * i)] {
                    decode::check_shape(&spec.name, w)?;
                    if w.shape.iter().product::<u64>() != want {
                        let what = format!("parent of shape {:?}, expected {want} values", w.shape);
                        return Err(EngineError::Weight { name: spec.name.clone(), what });
                    }
                }
            }
        }
        if spec.activation == Activation::A4 {
            let bank =
                matches!(&data, ExpertData::Bank(p) if matches!(p.format, Format::Nvfp4 | Format::Nvfp4Mul));
            if !bank || spec.input_scales.as_ref().is_none_or(|s| s.len() != spec.experts) {
                let what = "4-bit activations need an NVFP4 bank with input scales".to_owned();
                return Err(EngineError::Weight { name: spec.name.clone(), what });
            }
        }
        let kept = (0..spec.experts).map(|_| Mutex::new(None)).collect();
        let this = Experts { spec: spec.clone(), data, cache, kept };
        this.decoded(0).map_err(decode::format_error(&spec.name))?;
        Ok(this)
    }

    fn decoded(&self, e: usize) -> Result<[Packed; 3], infernix_formats::FormatError> {
        let (h, i) = (self.spec.hidden as u64, self.spec.intermediate as u64);
        let x = match &self.data {
            ExpertData::Bank(part) => {
                let m = |m| decode::bank_matrix(part, e, m);
                [m(ExpertMatrix::Gate)?, m(ExpertMatrix::Up)?, m(ExpertMatrix::Down)?]
            }
            ExpertData::Parents { gate_up, down } => {
                let e = e as u64;
                [
                    decode::parent_rows(gate_up, 2 * i * e..2 * i * e + i)?,
                    decode::parent_rows(gate_up, 2 * i * e + i..2 * i * (e + 1))?,
                    decode::parent_rows(down, h * e..h * (e + 1))?,
                ]
            }
        };
        Ok([Packed::new(&x[0]), Packed::new(&x[1]), Packed::new(&x[2])])
    }

    fn packed(&self, e: usize) -> Option<Arc<[Packed; 3]>> {
        let mut slot = self.kept[e].lock().unwrap_or_else(|e| e.into_inner());
        if let Some(p) = &*slot {
            return Some(p.clone());
        }
        let p = Arc::new(self.decoded(e).ok()?);
        if take_budget(&self.cache, p.iter().map(Packed::bytes).sum()) {
            *slot = Some(p.clone());
        }
        Some(p)
    }

    /// Words of one matrix in source order, for W4A4.
    fn words(&self, e: usize, matrix: ExpertMatrix) -> Option<Words> {
        let ExpertData::Bank(part) = &self.data else { return None };
        let bytes = (*part.bytes).as_ref();
        let shape = BankShape::new(part.layout, &part.shape).ok()?;
        let (n, k) = shape.matrix(matrix);
        let (mut codes, mut scales) = (vec![0; (n * k / 2) as usize], vec![0; (n * k / 16) as usize]);
        let r = shape.record(e as u64);
        unpack_nvfp4(&shape, &bytes[r.start as usize..r.end as usize], matrix, &mut codes, &mut scales)
            .ok()?;
        let w = decode::bank_globals(&shape, part.format, bytes, e)[matrix.index()];
        let g = self.spec.input_scales.as_ref()?.get(e)?[matrix.index()];
        let (w, input) = if part.format == Format::Nvfp4 {
            (w4a4::Scale::Divisor(w), w4a4::Scale::Divisor(g))
        } else {
            (w4a4::Scale::Multiplier(w), w4a4::Scale::Multiplier(g))
        };
        let factor = w4a4::combine(w, input);
        Some(Words { codes, scales, factor, input, n: n as usize, k: k as usize })
    }
}

impl Words {
    /// FP32 outputs of one row, before their BF16 rounding.
    fn products(&self, x: &[f32]) -> Vec<f32> {
        let row = w4a4::quantise(x, self.input);
        (0..self.n)
            .map(|n| {
                let codes = &self.codes[n * self.k / 2..(n + 1) * self.k / 2];
                let scales = &self.scales[n * self.k / 16..(n + 1) * self.k / 16];
                w4a4::finish(w4a4::dot(codes, scales, &row), self.factor)
            })
            .collect()
    }
}

impl Lossless {
    pub(super) fn choose_experts(&self, logits: &Mat, top_k: usize, at: At<'_>) -> Routes {
        (0..logits.rows)
            .map(|t| {
                let mut order: Vec<(f32, u32)> = logits.row(t).iter().copied().zip(0..).collect();
                order.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
                order.truncate(top_k);
                let r = self.rounder_as(Target::F32, at, t);
                let top = f64::from(order[0].0);
                let sum: f64 = order.iter().map(|o| (f64::from(o.0) - top).exp()).sum();
                order
                    .iter()
                    .enumerate()
                    .map(|(rank, (l, e))| {
                        let w = (f64::from(*l) - top).exp() / sum;
                        let bound = w * U * (top_k as f64 + 8.0 + 2.0 * (f64::from(*l) - top).abs());
                        let exact = || {
                            let p = |l: f32| (Dd::of(f64::from(l)) - Dd::of(top)).exp();
                            p(*l) / order.iter().fold(Dd::ZERO, |s, o| s + p(o.0))
                        };
                        (*e, r.round(rank, w, bound, exact))
                    })
                    .collect()
            })
            .collect()
    }

    pub(super) fn expert_layer(
        &mut self,
        x: &Mat,
        routing: &Routes,
        store: &Experts,
        shared: &Mat,
        shared_logit: &Mat,
        at: At<'_>,
    ) -> Mat {
        // (row, rank) by expert.
        let mut by_expert: Vec<Vec<(usize, usize)>> = vec![Vec::new(); store.spec.experts];
        for (t, row) in routing.iter().enumerate() {
            row.iter().enumerate().for_each(|(rank, (e, _))| by_expert[*e as usize].push((t, rank)));
        }
        let this = &*self;
        let results: Vec<(usize, usize, Vec<f32>)> = by_expert
            .par_iter()
            .enumerate()
            .filter(|(_, rows)| !rows.is_empty())
            .flat_map_iter(|(e, rows)| this.one_expert(store, e, rows, x, at))
            .collect();
        let top_k = routing.first().map_or(0, Vec::len);
        let mut y: Vec<Vec<f32>> = vec![Vec::new(); x.rows * top_k];
        for (t, rank, v) in results {
            y[t * top_k + rank] = v;
        }
        self.map_rows(x.rows, shared.width, at, |t, r, out| {
            let logit = f64::from(shared_logit.data[t]);
            let v = logit.sigmoid();
            let ws = self.rounder_as(Target::F32, at.op(Op::SharedWeight), t);
            let ws = ws.round(0, v, 6.0 * U * v, || Dd::of(logit).sigmoid());
            let shared = shared.row(t);
            for (i, o) in out.iter_mut().enumerate() {
                let mut acc = 0f32;
                for (rank, (_, w)) in routing[t].iter().enumerate() {
                    acc = w.mul_add(y[t * top_k + rank][i], acc);
                }
                acc = ws.mul_add(shared[i], acc);
                *o = r.exact(i, f64::from(acc));
            }
        })
    }

    /// Outputs (row, rank, y) of one expert for its rows.
    fn one_expert(
        &self,
        store: &Experts,
        e: usize,
        rows: &[(usize, usize)],
        x: &Mat,
        at: At<'_>,
    ) -> Vec<(usize, usize, Vec<f32>)> {
        let round = |op: Op, t: usize| self.rounder(at.op(op), t);
        if store.spec.activation == Activation::A4 {
            let words = |m| store.words(e, m);
            // Checked when the experts were taken.
            let (Some(gate), Some(up), Some(down)) =
                (words(ExpertMatrix::Gate), words(ExpertMatrix::Up), words(ExpertMatrix::Down))
            else {
                return Vec::new();
            };
            return rows
                .iter()
                .map(|&(t, rank)| {
                    let cut = |op: Op, v: Vec<f32>| -> Vec<f32> {
                        let r = round(op, t);
                        v.iter()
                            .enumerate()
                            .map(|(i, v)| r.exact(rank * v_len(&gate, &down, op) + i, f64::from(*v)))
                            .collect()
                    };
                    let g = cut(Op::ExpertGate, gate.products(x.row(t)));
                    let u = cut(Op::ExpertUp, up.products(x.row(t)));
                    let h =
                        cut(Op::ExpertHidden, g.iter().zip(&u).map(|(g, u)| w4a4::swiglu(*g, *u)).collect());
                    (t, rank, cut(Op::ExpertDown, down.products(&h)))
                })
                .collect();
        }
        let Some(w) = store.packed(e) else { return Vec::new() };
        let [gate, up, down] = &*w;
        let mut input: Vec<f64> = rows.iter().flat_map(|(t, _)| x.row(*t)).map(|v| f64::from(*v)).collect();
        let a8 = store.spec.activation == Activation::A8;
        if a8 {
            input.chunks_exact_mut(gate.k).for_each(a8::quantise_in_place);
        }
        let input = Operand::new(input, gate.k);
        let (g, u) = (Products::new(gate, &input), Products::new(up, &input));
        let mut hidden = Vec::with_capacity(rows.len() * gate.n);
        let mut cut = [const { Vec::new() }; 3];
        cut.iter_mut().for_each(|v| v.resize(gate.n, 0f32));
        let [cut_g, cut_u, cut_h] = &mut cut;
        for (j, &(t, rank)) in rows.iter().enumerate() {
            let first = rank * gate.n;
            each_product(&round(Op::ExpertGate, t), first, cut_g, &g, j);
            each_product(&round(Op::ExpertUp, t), first, cut_u, &u, j);
            each_swiglu(&round(Op::ExpertHidden, t), first, cut_h, cut_g, cut_u);
            hidden.extend(cut_h.iter().map(|h| f64::from(*h)));
        }
        if a8 {
            hidden.chunks_exact_mut(down.k).for_each(a8::quantise_in_place);
        }
        let hidden = Operand::new(hidden, down.k);
        let y = Products::new(down, &hidden);
        rows.iter()
            .enumerate()
            .map(|(j, &(t, rank))| {
                let r = round(Op::ExpertDown, t);
                let mut out = vec![0f32; down.n];
                each_product(&r, rank * down.n, &mut out, &y, j);
                (t, rank, out)
            })
            .collect()
    }
}

/// Values a rank of an expert's operation has.
fn v_len(gate: &Words, down: &Words, op: Op) -> usize {
    if op == Op::ExpertDown { down.n } else { gate.n }
}
