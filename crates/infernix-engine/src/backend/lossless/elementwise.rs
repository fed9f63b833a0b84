//! Embedding, norms, linears, residuals, gates, hyper-connections, and the gated n-gram value.

use super::gemm::{Operand, Products};
use super::simd::{self, each};
use super::{Lossless, Mat, U, Weight, decode};
use crate::backend::{Activation, At, Boundary, NormSpec, Op, Tokens};
use crate::ngram::NgramTicket;
use crate::numerics::dd::{Dd, Real};
use crate::numerics::round::Target;
use crate::numerics::{a8, w4a4};
use std::cell::OnceCell;
use std::sync::Arc;

/// `1 / sqrt(mean(x^2) + eps)`; within `(n/2 + 3)` units in f64.
pub(super) fn inverse_rms<R: Real>(x: &[f32], eps: f64) -> R {
    let mut s = R::of(0.0);
    for v in x {
        s = s + R::of(f64::from(*v) * f64::from(*v));
    }
    R::of(1.0) / (s / R::of(x.len() as f64) + R::of(eps)).sqrt()
}

impl Lossless {
    pub(super) fn embedding(&mut self, table: &Weight, tokens: Tokens, at: At<'_>) -> Mat {
        let lanes = &self.state().meta().lanes;
        let ids: Vec<u32> = lanes
            .iter()
            .flat_map(|l| if tokens == Tokens::Next { &l.next_ids } else { &l.ids })
            .copied()
            .collect();
        let width = table.data.shape.last().map_or(0, |k| *k as usize);
        let rows = table.data.shape.first().copied().unwrap_or(0);
        self.map_rows(ids.len(), width, at, |t, r, out| {
            let id = u64::from(ids[t]).min(rows.saturating_sub(1));
            let Ok(e) = decode::parent_rows(&table.data, id..id + 1) else { return };
            let d = e.divisor[0];
            for (i, v) in e.values.iter().enumerate() {
                let bound = if d == 1.0 { 0.0 } else { U * (v / d).abs() };
                out[i] = r.round(i, v / d, bound, || Dd::of(*v) / Dd::of(d));
            }
        })
    }

    pub(super) fn rms_norm(&self, x: &Mat, w: &Weight, spec: NormSpec, at: At<'_>) -> Mat {
        let w = w.values();
        let d = x.width / spec.groups;
        let one = if spec.zero_centred { 1.0 } else { 0.0 };
        self.map_rows(x.rows, x.width, at, |t, r, out| {
            for (g, (x, out)) in x.row(t).chunks_exact(d).zip(out.chunks_exact_mut(d)).enumerate() {
                let n = inverse_rms::<f64>(x, spec.eps);
                let exact = OnceCell::new();
                let w = if w.len() == d { w } else { &w[g * d..(g + 1) * d] };
                let value = |i: usize| {
                    let y = f64::from(x[i]) * (one + w[i]) * n;
                    (y, U * y.abs() * (d as f64 + 8.0))
                };
                each(&r, g * d, out, value, |i| {
                    let n = *exact.get_or_init(|| inverse_rms::<Dd>(x, spec.eps));
                    Dd::of(f64::from(x[i])) * (Dd::of(one) + Dd::of(w[i])) * n
                });
            }
        })
    }

    pub(super) fn linear_op(&self, x: &Mat, w: &Weight, out: Boundary, at: At<'_>) -> Mat {
        if w.spec.activation == Activation::A4 {
            return self.linear_a4(x, w, out, at);
        }
        let packed = w.packed();
        let groups = x.width / packed.k;
        let operand = if w.spec.activation == Activation::A8 {
            let mut wide = x.wide();
            wide.chunks_exact_mut(packed.k).for_each(a8::quantise_in_place);
            Arc::new(Operand::new(wide, packed.k))
        } else {
            x.operand(packed.k)
        };
        let p = Products::new(&packed, &operand);
        let n = p.n();
        self.map_rows_as(self.target(out), x.rows, groups * n, at, |t, r, out| {
            for (g, out) in out.chunks_exact_mut(n).enumerate() {
                let row = t * groups + g;
                simd::each_product(&r, g * n, out, &p, row);
            }
        })
    }

    /// The canonical 4-bit product of `numerics::w4a4`; only its BF16 rounding follows the backend's rounding.
    fn linear_a4(&self, x: &Mat, w: &Weight, out: Boundary, at: At<'_>) -> Mat {
        let Some(m) = w.integers() else { return Mat::new(x.rows, 0) };
        let (n, k) = (m.global.len(), x.width);
        let scale = |v: f32| if m.divides { w4a4::Scale::Divisor(v) } else { w4a4::Scale::Multiplier(v) };
        let input = scale(w.spec.input_scale.unwrap_or(1.0));
        self.map_rows_as(self.target(out), x.rows, n, at, |t, r, out| {
            let a = w4a4::quantise(x.row(t), input);
            for (i, (o, row)) in out.iter_mut().zip(m.values.chunks_exact(k)).enumerate() {
                let mut sum = 0i64;
                for ((w, c), s) in row.chunks_exact(16).zip(a.codes2.chunks_exact(16)).zip(&a.scales) {
                    let p: i64 = w.iter().zip(c).map(|(w, c)| i64::from(*w) * i64::from(*c)).sum();
                    sum += p * i64::from(*s);
                }
                *o = r.exact(i, f64::from(w4a4::finish(sum, w4a4::combine(scale(m.global[i]), input))));
            }
        })
    }

    pub(super) fn residual_add(&self, x: &mut Mat, y: &Mat, at: At<'_>) {
        let sum = self.map_rows(x.rows, x.width, at, |t, r, out| {
            let y = y.row(t);
            for (n, (x, out)) in x.row(t).chunks(y.len()).zip(out.chunks_mut(y.len())).enumerate() {
                let both = |i: usize| (f64::from(x[i]), f64::from(y[i]));
                let value = |i: usize| {
                    let (a, b) = both(i);
                    (a + b, U * (a + b).abs())
                };
                each(&r, n * y.len(), out, value, |i| {
                    let (a, b) = both(i);
                    Dd::of(a) + Dd::of(b)
                });
            }
        });
        *x = sum;
    }

    pub(super) fn sigmoid_gate(&self, o: &Mat, gate: &Mat, at: At<'_>) -> Mat {
        self.map_rows(o.rows, o.width, at, |t, r, out| {
            let (o, g) = (o.row(t), gate.row(t));
            let value = |i: usize| {
                let y = f64::from(o[i]) * f64::from(g[i]).sigmoid();
                (y, 8.0 * U * y.abs())
            };
            each(&r, 0, out, value, |i| Dd::of(f64::from(o[i])) * Dd::of(f64::from(g[i])).sigmoid());
        })
    }

    pub(super) fn silu_times(&self, gate: &Mat, up: &Mat, at: At<'_>) -> Mat {
        self.map_rows(gate.rows, gate.width, at, |t, r, out| {
            simd::each_swiglu(&r, 0, out, gate.row(t), up.row(t));
        })
    }

    // ---- hyper-connections ---------------------------------------------------------------------------------

    pub(super) fn mixer_down(&self, normed: &Mat, w: &Weight, streams: usize, at: At<'_>) -> Mat {
        self.gated_product(
            (normed, w, streams as f64),
            self.act(),
            at,
            |z, b, gate| (z * gate, 1.1 * b + 8.0 * U * ((z * gate).abs() + z.abs())),
            |z| z.silu(),
        )
    }

    pub(super) fn mixer_factor(&self, normed: &Mat, w: &Weight, streams: usize, at: At<'_>) -> Mat {
        self.gated_product(
            (normed, w, streams as f64),
            Target::F32,
            at,
            |z, b, gate| (2.0 * gate, 0.5 * b + 8.0 * U * (2.0 * gate + z.abs() * 2.0 * gate)),
            |z| Dd::of(2.0) * z.sigmoid(),
        )
    }

    /// A linear whose rounded output is a function of the exact product over a number, and of that quotient's sigmoid.
    fn gated_product(
        &self,
        (x, w, n): (&Mat, &Weight, f64),
        target: Target,
        at: At<'_>,
        value: impl Fn(f64, f64, f64) -> (f64, f64) + Sync,
        exact: impl Fn(Dd) -> Dd + Sync,
    ) -> Mat {
        let packed = w.packed();
        let operand = x.operand(packed.k);
        let p = Products::new(&packed, &operand);
        self.map_rows_as(target, x.rows, p.n(), at, |t, r, out| {
            simd::each_gated(&r, out, (&p, t, n), &value, |i| exact(p.exact(t, i) / Dd::of(n)));
        })
    }

    pub(super) fn mixer_up(&self, normed: &Mat, m: &Mat, w: &Weight, streams: usize, at: At<'_>) -> Mat {
        let packed = w.packed();
        let operand = m.operand(packed.k);
        let p = Products::new(&packed, &operand);
        let h = normed.width / streams;
        self.map_rows(normed.rows, h, at, |t, r, out| {
            let x = normed.row(t);
            let n = streams as f64;
            let (mut products, mut errors, mut gates) = (vec![0f64; h], vec![0f64; h], vec![0f64; h]);
            let (mut sums, mut bounds) = (vec![0f64; h], vec![0f64; h]);
            for s in 0..streams {
                simd::fill(&p, t, s * h, &mut products, &mut errors);
                simd::sigmoid(&products, &mut gates);
                for i in 0..h {
                    let x = f64::from(x[s * h + i]);
                    sums[i] += gates[i] * x;
                    bounds[i] += x.abs() * (0.25 * errors[i] + 12.0 * U * gates[i]);
                }
            }
            let value = |i: usize| (sums[i] / n, bounds[i] / n + U * (sums[i] / n).abs());
            each(&r, 0, out, value, |i| {
                let mut sum = Dd::ZERO;
                for s in 0..streams {
                    sum = sum + p.exact(t, s * h + i).sigmoid() * Dd::of(f64::from(x[s * h + i]));
                }
                sum / Dd::of(n)
            });
        })
    }

    pub(super) fn mixer_inject(&self, r: &mut Mat, y: &Mat, factor: &Mat, at: At<'_>) {
        let h = y.width;
        let sum = self.map_rows(r.rows, r.width, at, |t, round, out| {
            let (x, y) = (r.row(t), y.row(t));
            for (s, ((b, x), out)) in factor.row(t).iter().zip(x.chunks(h)).zip(out.chunks_mut(h)).enumerate()
            {
                // The product of a BF16 and an FP32 value is exact; of two FP32 values too.
                let both = |i: usize| (f64::from(x[i]), f64::from(*b) * f64::from(y[i]));
                let value = |i: usize| {
                    let (x, p) = both(i);
                    (x + p, U * (x + p).abs())
                };
                each(&round, s * h, out, value, |i| {
                    let (x, p) = both(i);
                    Dd::of(x) + Dd::of(p)
                });
            }
        });
        *r = sum;
    }

    // ---- n-gram embedding ----------------------------------------------------------------------------------

    pub(super) fn table_rows(&mut self, tickets: &[NgramTicket], at: At<'_>) -> Mat {
        let width = tickets.iter().map(NgramTicket::values).sum::<usize>() / at.rows.len().max(1);
        let mut all = Mat::new(at.rows.len(), width);
        for (l, ticket) in tickets.iter().enumerate() {
            let r = self.state().lane_rows(l);
            let out = &mut all.data[r.start * width..r.end * width];
            match ticket.wait() {
                Ok(rows) if rows.len() == out.len() => out.copy_from_slice(&rows),
                // Zeros keep the shapes; the lane's results are dropped.
                Ok(rows) => self
                    .state_mut()
                    .fail(l, format!("{} table values, {} needed", rows.len(), r.len() * width)),
                Err(e) => self.state_mut().fail(l, e.to_string()),
            }
        }
        self.map_rows(all.rows, width, at, |t, r, out| {
            for (e, v) in all.row(t).iter().enumerate() {
                out[e] = r.exact(e, f64::from(*v));
            }
        })
    }

    pub(super) fn gated_value(&self, key: &Mat, query: &Mat, value: &Mat, streams: usize, at: At<'_>) -> Mat {
        let h = value.width;
        let root = (h as f64).sqrt();
        let score_at = at.op(Op::PleScore);
        self.map_rows(key.rows, key.width, at, |t, r, out| {
            let rs = self.rounder_as(Target::F32, score_at, t);
            for s in 0..streams {
                let span = s * h..(s + 1) * h;
                let (k, q) = (&key.row(t)[span.clone()], &query.row(t)[span.clone()]);
                let (mut dot, mut size) = (0.0, 0.0);
                for (k, q) in k.iter().zip(q) {
                    let p = f64::from(*k) * f64::from(*q);
                    dot += p;
                    size += p.abs();
                }
                let a = dot / root;
                let y = signed_sqrt::<f64>(a);
                // d sqrt(|a|) = da / (2 sqrt(|a|)), and |a| >= 1e-6 where it varies.
                let bound =
                    U * (h as f64 + 4.0) * size / root / (2.0 * y.abs().max(1e-3)) + 3.0 * U * y.abs();
                let score = f64::from(rs.round(s, y, bound, || {
                    let mut dot = Dd::ZERO;
                    for (k, q) in k.iter().zip(q) {
                        dot = dot + Dd::of(f64::from(*k) * f64::from(*q));
                    }
                    signed_sqrt(dot / Dd::of(h as f64).sqrt())
                }));
                let g = score.sigmoid();
                for (i, o) in out[span].iter_mut().enumerate() {
                    let v = f64::from(value.row(t)[i]);
                    *o = r.round(s * h + i, g * v, 8.0 * U * (g * v).abs(), || {
                        Dd::of(score).sigmoid() * Dd::of(v)
                    });
                }
            }
        })
    }
}

/// `sign(a) sqrt(max(|a|, 1e-6))`, 0 at 0.
fn signed_sqrt<R: Real>(a: R) -> R {
    let v = a.to_f64();
    if v == 0.0 {
        return R::of(0.0);
    }
    let m = if v.abs() < 1e-6 {
        R::of(1e-6)
    } else if v < 0.0 {
        -a
    } else {
        a
    };
    if v < 0.0 { -m.sqrt() } else { m.sqrt() }
}
