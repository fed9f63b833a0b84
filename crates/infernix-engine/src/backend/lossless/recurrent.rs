//! Convolutions and the gated delta rule.

use super::simd::{self, each};
use super::{Lossless, Mat, U};
use crate::backend::{At, GateKind, GdnDims, Op, RowKey, Site, StateId};
use crate::numerics::dd::{Dd, Real};
use crate::numerics::round::{RowRounder, Target};
use crate::state::{ConvKind, GdnLane, GdnRecord};
use rayon::prelude::*;
use std::cell::OnceCell;

/// `silu(sum_j w[c, j] window[(t + j * dilation), c])` of every channel and its bound; the window starts
/// `(taps - 1) * dilation` columns before the first output.
fn convolved(
    window: &[f32],
    by_tap: &[f64],
    width: usize,
    t: usize,
    dilation: usize,
) -> (Vec<f64>, Vec<f64>) {
    let (mut sum, mut size) = (vec![0.0; width], vec![0.0; width]);
    simd::convolve(&window[t * width..], by_tap, dilation, &mut sum, &mut size);
    let mut gates = vec![0.0; width];
    simd::sigmoid(&sum, &mut gates);
    let taps = by_tap.len() / width;
    for ((y, bound), gate) in sum.iter_mut().zip(&mut size).zip(gates) {
        *y *= gate;
        // |silu'| <= 1.1.
        *bound = U * (1.1 * (taps + 2) as f64 * *bound + 8.0 * y.abs());
    }
    (sum, size)
}

/// One channel of a convolution.
fn conv_exact(window: &[f32], width: usize, w: &[f64], c: usize, t: usize, dilation: usize) -> Dd {
    let mut sum = Dd::ZERO;
    for (j, w) in w.iter().enumerate() {
        sum = sum + Dd::product(*w, f64::from(window[(t + j * dilation) * width + c]));
    }
    sum.silu()
}

impl Lossless {
    /// Windows of all lanes: (first row, window).
    fn windows(&mut self, kind: ConvKind, id: StateId, x: &Mat) -> Vec<(usize, Vec<f32>)> {
        let lanes = self.state().meta().lanes.len();
        (0..lanes)
            .map(|l| {
                let r = self.state().lane_rows(l);
                let columns = &x.data[r.start * x.width..r.end * x.width];
                (r.start, self.state_mut().conv_window(kind, id, l, columns))
            })
            .collect()
    }

    pub(super) fn conv(&mut self, id: StateId, x: &Mat, w: &super::Weight, at: At<'_>) -> Mat {
        let windows = self.windows(ConvKind::Gdn, id, x);
        let (width, taps, by_tap) = (x.width, w.k(), w.by_column());
        let mut out = Mat::new(x.rows, width);
        for (first, window) in &windows {
            let n = window.len() / width + 1 - taps;
            out.data[first * width..(first + n) * width].par_chunks_mut(width).enumerate().for_each(
                |(t, out)| {
                    let r = self.rounder(at, first + t);
                    let (y, bound) = convolved(window, &by_tap, width, t, 1);
                    each(&r, 0, out, |c| (y[c], bound[c]), |c| conv_exact(window, width, w.row(c), c, t, 1));
                },
            );
        }
        out
    }

    #[expect(clippy::too_many_arguments, reason = "the operands of the operation")]
    pub(super) fn ple_convolution(
        &mut self,
        id: StateId,
        r: &mut Mat,
        v: &Mat,
        c: &Mat,
        w: &super::Weight,
        dilation: usize,
        at: At<'_>,
    ) {
        let windows = self.windows(ConvKind::Ple, id, c);
        let width = c.width;
        let (skip, by_tap) = ((w.k() - 1) * dilation, w.by_column());
        let data = r.data_mut();
        for (first, window) in &windows {
            let n = window.len() / width - skip;
            let rows = first * width..(first + n) * width;
            data[rows].par_chunks_mut(width).enumerate().for_each(|(t, out)| {
                let round = self.rounder(at, first + t);
                let v = &v.data[(first + t) * width..];
                let old = out.to_vec();
                let (y, bound) = convolved(window, &by_tap, width, t, dilation);
                let value = |e: usize| {
                    let (x, v) = (f64::from(old[e]), f64::from(v[e]));
                    let (s, b) = (y[e], bound[e]);
                    (x + v + s, b + U * 3.0 * (x.abs() + v.abs() + s.abs()))
                };
                each(&round, 0, out, value, |e| {
                    let (x, v) = (f64::from(old[e]), f64::from(v[e]));
                    Dd::of(x) + Dd::of(v) + conv_exact(window, width, w.row(e), e, t, dilation)
                });
            });
        }
    }

    #[expect(clippy::too_many_arguments, reason = "the operands of the operation")]
    pub(super) fn delta_rule(
        &mut self,
        id: StateId,
        u: &Mat,
        a: &Mat,
        b: &Mat,
        a_log: &super::Weight,
        dt_bias: &super::Weight,
        at: At<'_>,
    ) -> Mat {
        let dims = self.state().layout().gdn[id];
        let nv = dims.value_heads;
        let (al, dt) = (a_log.values(), dt_bias.values());
        let (mut g, mut beta) = (Mat::new(a.rows, nv), Mat::new(a.rows, nv));
        for t in 0..a.rows {
            let rg = self.rounder_as(Target::F32, at.op(Op::GdnDecay), t);
            let rb = self.rounder_as(Target::F32, at.op(Op::GdnBeta), t);
            for h in 0..nv {
                let x = f64::from(a.data[t * nv + h]);
                let v = decay::<f64>(al[h], dt[h], x);
                let bound = U * v.abs() * (12.0 + 2.0 * (x.abs() + dt[h].abs()) + 2.0 * al[h].abs());
                g.data[t * nv + h] = rg.round(h, v, bound, || decay::<Dd>(al[h], dt[h], x));
                let x = f64::from(b.data[t * nv + h]);
                let v = x.sigmoid();
                beta.data[t * nv + h] = rb.round(h, v, 6.0 * U * v, || Dd::of(x).sigmoid());
            }
        }
        self.state_mut().gdn_record(id, at.rows, &u.data, &g.data, &beta.data);
        let mut out = Mat::new(u.rows, nv * dims.value_dim);
        let run = Run {
            dims,
            u: &u.data,
            g: &g.data,
            beta: &beta.data,
            keys: at.rows,
            layer: at.site.layer,
            act: self.act(),
            rounding: self.options.rounding,
        };
        let mut lanes = self.state_mut().gdn_lanes(id);
        lanes.iter_mut().for_each(GdnLane::settle);
        let head = dims.key_dim * dims.value_dim;
        let heads: Vec<(usize, std::ops::Range<usize>, &mut [f32])> = lanes
            .iter_mut()
            .flat_map(|l| {
                let rows = l.rows.clone();
                l.s.chunks_exact_mut(head).enumerate().map(move |(h, s)| (h, rows.clone(), s))
            })
            .collect();
        let done: Vec<_> =
            heads.into_par_iter().map(|(h, rows, s)| (h, rows.start, run.head(h, rows, s))).collect();
        let dv = dims.value_dim;
        for (h, first, o) in done {
            for (t, o) in o.chunks_exact(dv).enumerate() {
                let i = ((first + t) * nv + h) * dv;
                out.data[i..i + dv].copy_from_slice(o);
            }
        }
        out
    }

    /// Advances S over the first n recorded columns.
    pub(super) fn replay(&self, dims: GdnDims, layer: u16, s: &mut [f32], record: &GdnRecord, n: usize) {
        let run = Run {
            dims,
            u: &record.u,
            g: &record.g,
            beta: &record.beta,
            keys: &record.keys,
            layer,
            act: self.act(),
            rounding: self.options.rounding,
        };
        s.par_chunks_exact_mut(dims.key_dim * dims.value_dim).enumerate().for_each(|(h, s)| {
            run.head(h, 0..n, s);
        });
    }

    pub(super) fn gated_norm(
        &self,
        o: &Mat,
        z: &Mat,
        w: &super::Weight,
        kind: GateKind,
        eps: f64,
        at: At<'_>,
    ) -> Mat {
        let w = w.values();
        let d = w.len();
        self.map_rows(o.rows, o.width, at, |t, r, out| {
            let (o, z) = (o.row(t), z.row(t));
            for h in 0..o.len() / d {
                let x = &o[h * d..(h + 1) * d];
                let n = super::elementwise::inverse_rms::<f64>(x, eps);
                let exact = OnceCell::new();
                let (z, out) = (&z[h * d..(h + 1) * d], &mut out[h * d..(h + 1) * d]);
                let value = |i: usize| {
                    let v = f64::from(x[i]) * w[i] * n * gate::<f64>(kind, f64::from(z[i]));
                    (v, U * v.abs() * (d as f64 + 20.0))
                };
                each(&r, h * d, out, value, |i| {
                    let n = *exact.get_or_init(|| super::elementwise::inverse_rms::<Dd>(x, eps));
                    Dd::product(f64::from(x[i]), w[i]) * n * gate::<Dd>(kind, f64::from(z[i]))
                });
            }
        })
    }
}

fn gate<R: Real>(kind: GateKind, z: f64) -> R {
    match kind {
        GateKind::Silu => R::of(z).silu(),
        GateKind::Sigmoid => R::of(z).sigmoid(),
    }
}

fn decay<R: Real>(a_log: f64, dt_bias: f64, a: f64) -> R {
    -R::of(a_log).exp() * (R::of(a) + R::of(dt_bias)).softplus()
}

/// Operands of a recurrence over some rows.
struct Run<'a> {
    dims: GdnDims,
    u: &'a [f32],
    g: &'a [f32],
    beta: &'a [f32],
    keys: &'a [RowKey],
    layer: u16,
    act: Target,
    rounding: crate::numerics::round::Rounding,
}

/// One token of one head, interior values in f64, and the formula of a new state element in double-double.
pub(super) struct Token<'a> {
    pub alpha: f64,
    pub beta: f64,
    pub q: &'a [f64],
    pub k: &'a [f64],
    /// The key of the token after this one; of the last token any.
    pub next_k: &'a [f64],
    pub v: &'a [f64],
    pub round: RowRounder,
    /// Element number of S[0, 0] of this head.
    pub element: usize,
    /// `(old S, i, j)`.
    pub exact: &'a dyn Fn(&[f32], usize, usize) -> Dd,
}

fn inverse_length<R: Real>(x: &[f32]) -> R {
    let mut s = R::of(0.0);
    for v in x {
        s = s + R::of(f64::from(*v) * f64::from(*v));
    }
    R::of(1.0) / (s + R::of(1e-6)).sqrt()
}

impl Run<'_> {
    /// Runs head `h` over rows; outputs rounded `[rows, dv]`.
    fn head(&self, h: usize, rows: std::ops::Range<usize>, s: &mut [f32]) -> Vec<f32> {
        let GdnDims { key_heads, value_heads, key_dim: dk, value_dim: dv, .. } = self.dims;
        let channels = self.dims.channels();
        let kh = h / (value_heads / key_heads);
        let mut out = vec![0f32; rows.len() * dv];
        if rows.is_empty() {
            return out;
        }
        let wide = |x: &[f32], f: f64| x.iter().map(|v| f64::from(*v) * f).collect::<Vec<_>>();
        // The key of row t, and the same of length 1.
        let key = |t: usize| &self.u[t * channels + (key_heads + kh) * dk..][..dk];
        let unit = |k: &[f32]| wide(k, inverse_length::<f64>(k));
        let (end, mut unit_k) = (rows.end, unit(key(rows.start)));
        let mut scratch = Scratch::new(s, &unit_k, dv);
        // The state before a token and after it, turn about.
        let (mut other, rows_in) = (vec![0f32; s.len()], rows.len());
        let (mut before, mut after) = (&mut *s, &mut other[..]);
        for (t, out) in rows.zip(out.chunks_exact_mut(dv)) {
            let u = &self.u[t * channels..(t + 1) * channels];
            let q = &u[kh * dk..(kh + 1) * dk];
            let k = key(t);
            let next_k = if t + 1 < end { unit(key(t + 1)) } else { unit_k.clone() };
            let v = &u[2 * key_heads * dk + h * dv..][..dv];
            let (g, beta) =
                (f64::from(self.g[t * value_heads + h]), f64::from(self.beta[t * value_heads + h]));
            let site = |op| Site { layer: self.layer, op };
            // Lazily, in double-double: alpha, 1 / |k|.
            let precise = OnceCell::new();
            let exact = |old: &[f32], i: usize, j: usize| {
                let (alpha, kn) = *precise.get_or_init(|| (Dd::of(g).exp(), inverse_length::<Dd>(k)));
                let mut kv = Dd::ZERO;
                for (i, k) in k.iter().enumerate() {
                    kv = kv + Dd::of(f64::from(old[i * dv + j]) * f64::from(*k));
                }
                let delta = Dd::of(beta) * (Dd::of(f64::from(v[j])) - alpha * kn * kv);
                alpha * Dd::of(f64::from(old[i * dv + j])) + Dd::of(f64::from(k[i])) * kn * delta
            };
            let qn = inverse_length::<f64>(q) / (dk as f64).sqrt();
            let token = Token {
                alpha: g.exp(),
                beta,
                q: &wide(q, qn),
                k: &unit_k,
                next_k: &next_k,
                v: &wide(v, 1.0),
                round: RowRounder::new(self.rounding, Target::F32, site(Op::GdnState), self.keys[t]),
                element: h * dk * dv,
                exact: &exact,
            };
            super::simd::step(before, after, &token, &mut scratch);
            std::mem::swap(&mut before, &mut after);
            let s = &*before;
            let round = RowRounder::new(self.rounding, self.act, site(Op::GdnOut), self.keys[t]);
            let qlen = token.q.iter().map(|v| v * v).sum::<f64>().sqrt();
            for (j, o) in out.iter_mut().enumerate() {
                let bound = U * (2.0 * dk as f64 + 10.0) * qlen * scratch.square[j].sqrt();
                *o = round.round(h * dv + j, scratch.o[j], bound, || {
                    let qn = inverse_length::<Dd>(q) / Dd::of(dk as f64).sqrt();
                    let mut sum = Dd::ZERO;
                    for (i, q) in q.iter().enumerate() {
                        sum = sum + Dd::of(f64::from(s[i * dv + j]) * f64::from(*q));
                    }
                    sum * qn
                });
            }
            unit_k = next_k;
        }
        if rows_in % 2 == 1 {
            s.copy_from_slice(&other);
        }
        out
    }
}

/// Buffers of one head.
pub(super) struct Scratch {
    /// `sum_i S[i, j]^2`, of the state before a token on entry and after it on exit.
    square: Vec<f64>,
    /// `S^T k`, of the state and the token to come alike.
    kv: Vec<f64>,
    /// `S^T q`, unrounded.
    o: Vec<f64>,
}

impl Scratch {
    /// Of a state and the key of the first token.
    fn new(s: &[f32], k: &[f64], dv: usize) -> Self {
        let z = || vec![0.0; dv];
        let (mut square, mut kv) = (z(), z());
        for (row, k) in s.chunks_exact(dv).zip(k) {
            for ((v, q), kv) in row.iter().zip(&mut square).zip(&mut kv) {
                let v = f64::from(*v);
                *q += v * v;
                *kv += v * k;
            }
        }
        Scratch { square, kv, o: z() }
    }
}

/// Columns of S advanced together: few enough for all that is kept of them to stay in registers.
const COLUMNS: usize = 16;

/// One token: `S = fl32(alpha old + k delta)`, `o = S^T q`, and what the next token needs of the new S.
#[inline(always)]
pub(super) fn step<const FMA: bool>(old: &[f32], s: &mut [f32], token: &Token<'_>, scratch: &mut Scratch) {
    match token.round.f32_noise() {
        None => {
            let cut = |_, v: f64, b: f64| {
                let (lo, hi) = ((v - b) as f32, (v + b) as f32);
                (lo, lo == hi)
            };
            all_columns::<FMA>(old, s, token, scratch, cut);
        }
        Some(noise) => all_columns::<FMA>(old, s, token, scratch, |e, v, b| noise.cut(e, v, b)),
    }
}

#[inline(always)]
fn all_columns<const FMA: bool>(
    old: &[f32],
    s: &mut [f32],
    token: &Token<'_>,
    scratch: &mut Scratch,
    cut: impl Fn(usize, f64, f64) -> (f32, bool) + Copy,
) {
    let (dv, mut at) = (token.v.len(), 0);
    while at + COLUMNS <= dv {
        columns::<FMA, COLUMNS>(old, s, token, scratch, at, cut);
        at += COLUMNS;
    }
    while at < dv {
        columns::<FMA, 1>(old, s, token, scratch, at, cut);
        at += 1;
    }
}

/// [`step`] of columns `at .. at + N`; `cut(element, value, bound)` rounds, or says that it cannot decide. Loops over
/// columns vectorise.
#[inline(always)]
fn columns<const FMA: bool, const N: usize>(
    old: &[f32],
    s: &mut [f32],
    token: &Token<'_>,
    scratch: &mut Scratch,
    at: usize,
    cut: impl Fn(usize, f64, f64) -> (f32, bool),
) {
    use super::gemm::madd;
    let dv = token.v.len();
    let of = |all: &[f64]| -> [f64; N] { std::array::from_fn(|j| all[at + j]) };
    let (v, kv, square) = (of(token.v), of(&scratch.kv), of(&scratch.square));
    // |k| <= 1. k carries up to (dk/2 + 3) units, the sum dk, alpha 2.
    let units = U * (2.0 * token.k.len() as f64 + 12.0);
    // `slack` bounds the error of delta's contribution, per unit of k.
    let (mut delta, mut slack) = ([0.0; N], [0.0; N]);
    for j in 0..N {
        delta[j] = token.beta * (v[j] - token.alpha * kv[j]);
        // The last term: |v| <= |kept| + |k delta| in the bound of an element.
        slack[j] = units * (token.beta.abs() * token.alpha * square[j].sqrt() + delta[j].abs())
            + 6.1 * U * delta[j].abs();
    }
    let (mut o, mut square, mut kv) = ([0.0; N], [0.0; N], [0.0; N]);
    let scales = token.k.iter().zip(token.q).zip(token.next_k);
    let rows = s.chunks_exact_mut(dv).zip(old.chunks_exact(dv));
    for (i, ((row, before), ((k, q), next))) in rows.zip(scales).enumerate() {
        let (row, before) = (&mut row[at..at + N], &before[at..at + N]);
        let size = k.abs();
        let element = token.element + i * dv + at;
        let (mut new, mut unsure) = ([0f32; N], false);
        for j in 0..N {
            let kept = token.alpha * f64::from(before[j]);
            let v = madd::<FMA>(*k, delta[j], kept);
            let b = madd::<FMA>(size, slack[j], 12.1 * U * kept.abs());
            let (value, sure) = cut(element + j, v, b);
            unsure |= !sure;
            new[j] = value;
        }
        if unsure {
            settle(&mut new, old, token, (i, at), &delta, &slack);
        }
        row.copy_from_slice(&new);
        for j in 0..N {
            let v = f64::from(new[j]);
            o[j] = madd::<FMA>(v, *q, o[j]);
            square[j] = madd::<FMA>(v, v, square[j]);
            kv[j] = madd::<FMA>(v, *next, kv[j]);
        }
    }
    scratch.o[at..at + N].copy_from_slice(&o);
    scratch.square[at..at + N].copy_from_slice(&square);
    scratch.kv[at..at + N].copy_from_slice(&kv);
}

/// Rounds elements of S from row and column `place` on one by one, in double-double where needed.
#[cold]
fn settle(
    row: &mut [f32],
    old: &[f32],
    token: &Token<'_>,
    place: (usize, usize),
    delta: &[f64],
    slack: &[f64],
) {
    let (i, at) = place;
    let (dv, k) = (token.v.len(), token.k[i]);
    for (j, o) in row.iter_mut().enumerate() {
        let n = i * dv + at + j;
        let kept = token.alpha * f64::from(old[n]);
        let v = k * delta[j] + kept;
        let b = k.abs() * slack[j] + 6.0 * U * (kept.abs() + v.abs());
        *o = token.round.round(token.element + n, v, b, || (token.exact)(old, i, at + j));
    }
}
