//! Head norms with rotary embedding, attention, and the sparse-attention index.

use super::elementwise::inverse_rms;
use super::{Blocks, Lossless, Mat, U, Weight, simd};
use crate::backend::{At, RopeTable, RowKey, StateId};
use crate::numerics::dd::{Dd, Real};
use crate::numerics::round::{RowRounder, Target};
use crate::state::PAGE_TOKENS;
use rayon::prelude::*;
use std::cell::OnceCell;

/// cos and sin of each pair at a position, YaRN factor included.
fn angles(rope: &RopeTable, position: [u32; 3]) -> Vec<(f64, f64)> {
    let pairs = rope.freq.iter().zip(&rope.axis);
    pairs
        .map(|(f, axis)| {
            let a = f64::from(position[usize::from(*axis)]) * f;
            (a.cos() * rope.scale, a.sin() * rope.scale)
        })
        .collect()
}

/// Element i of the normed, rotated head, given the head's inverse RMS.
fn rotated<R: Real>(x: &dyn Fn(usize) -> R, w: &[f64], n: R, angles: &[(f64, f64)], i: usize) -> R {
    let half = angles.len();
    let y = |i: usize| x(i) * (R::of(1.0) + R::of(w[i])) * n;
    if i < half {
        let (c, s) = angles[i];
        y(i) * R::of(c) - y(i + half) * R::of(s)
    } else if i < 2 * half {
        let (c, s) = angles[i - half];
        y(i) * R::of(c) + y(i - half) * R::of(s)
    } else {
        y(i)
    }
}

/// Bound on the f64 error of [`rotated`].
fn rotated_bound(x: &dyn Fn(usize) -> f64, w: &[f64], n: f64, half: usize, scale: f64, i: usize) -> f64 {
    let size = |i: usize| (x(i) * (1.0 + w[i]) * n).abs();
    let partner = match i {
        _ if i < half => size(i + half) * scale,
        _ if i < 2 * half => size(i - half) * scale,
        _ => 0.0,
    };
    U * (w.len() as f64 + 12.0) * (size(i) * scale.max(1.0) + partner)
}

fn dot_dd(a: &[f64], b: &[f32]) -> Dd {
    a.iter().zip(b).fold(Dd::ZERO, |s, (a, b)| s + Dd::product(*a, f64::from(*b)))
}

fn norm2(x: impl Iterator<Item = f64>) -> f64 {
    x.map(|v| v * v).sum::<f64>().sqrt()
}

impl Lossless {
    pub(super) fn head_norm_rope(&self, x: &Mat, w: &Weight, rope: &RopeTable, eps: f64, at: At<'_>) -> Mat {
        let w = w.values();
        let d = w.len();
        let meta = self.state().meta();
        let positions: Vec<[u32; 3]> = meta.each_row().map(|(l, c)| meta.lanes[l].positions[c]).collect();
        self.map_rows(x.rows, x.width, at, |t, r, out| {
            let table = angles(rope, positions[t]);
            for (h, x) in x.row(t).chunks_exact(d).enumerate() {
                let n = inverse_rms::<f64>(x, eps);
                let exact = OnceCell::new();
                let wide = |i: usize| f64::from(x[i]);
                for i in 0..d {
                    let v = rotated::<f64>(&wide, w, n, &table, i);
                    let b = rotated_bound(&wide, w, n, table.len(), rope.scale, i);
                    out[h * d + i] = r.round(h * d + i, v, b, || {
                        let n = *exact.get_or_init(|| inverse_rms::<Dd>(x, eps));
                        rotated::<Dd>(&|i| Dd::of(f64::from(x[i])), w, n, &table, i)
                    });
                }
            }
        })
    }

    /// Stored rows (keys, values) of one KV head for sequence indices `0..n`, `[n, d]` each.
    fn stored(&self, id: StateId, pages: &[u32], head: usize, n: usize) -> (Vec<f32>, Vec<f32>) {
        let state = self.state();
        let codec = state.codec();
        let d = state.layout().attention[id].head_dim;
        let bytes = codec.row_bytes(d);
        let (mut k, mut v) = (vec![0f32; n * d], vec![0f32; n * d]);
        for i in 0..n {
            let (kt, vt) = state.kv_tile(id, pages[i / PAGE_TOKENS], head);
            let row = i % PAGE_TOKENS * bytes..(i % PAGE_TOKENS + 1) * bytes;
            codec.decode_k(&kt[row.clone()], &mut k[i * d..(i + 1) * d]);
            codec.decode_v(&vt[row], &mut v[i * d..(i + 1) * d]);
        }
        (k, v)
    }

    pub(super) fn attend(&mut self, id: StateId, q: &Mat, selection: Option<&Blocks>, at: At<'_>) -> Mat {
        let layout = self.state().layout().attention[id].clone();
        let (d, kv_heads) = (layout.head_dim, layout.kv_heads);
        let heads = q.width / d;
        let ratio = layout.index.map_or(1, |i| i.ratio);
        let rotate = self.state().codec().rotates_keys();
        let lanes = self.state().meta().lanes.len();
        let mut out = Mat::new(q.rows, q.width);
        for l in 0..lanes {
            let lane = self.state().meta().lanes[l].clone();
            let rows = self.state().lane_rows(l);
            let end = lane.start + rows.len();
            let stored: Vec<_> = (0..kv_heads).map(|h| self.stored(id, &lane.pages, h, end)).collect();
            let this = &*self;
            out.data[rows.start * q.width..rows.end * q.width].par_chunks_mut(d).enumerate().for_each(
                |(i, out)| {
                    let (c, h) = (i / heads, i % heads);
                    let t = rows.start + c;
                    let (k, v) = &stored[h / (heads / kv_heads)];
                    let mut query: Vec<f64> =
                        q.row(t)[h * d..(h + 1) * d].iter().map(|v| f64::from(*v)).collect();
                    if rotate {
                        hadamard64(&mut query);
                    }
                    let last = lane.start + c;
                    let keys: Vec<usize> = match selection.and_then(|s| s[t].as_ref()) {
                        None => (0..=last).collect(),
                        Some(blocks) => {
                            let tail = (last + 1) / ratio * ratio;
                            let chosen =
                                blocks.iter().flat_map(|b| *b as usize * ratio..(*b as usize + 1) * ratio);
                            chosen.chain(tail..=last).collect()
                        }
                    };
                    let r = this.rounder(at, t);
                    softmax_sum(&query, &keys, k, v, h * d, r, out);
                },
            );
        }
        out
    }

    pub(super) fn append_index(
        &mut self,
        id: StateId,
        raw: &Mat,
        w: &Weight,
        rope: &RopeTable,
        eps: f64,
        at: At<'_>,
    ) {
        let w = w.values().to_vec();
        let (act, rounding) = (self.act(), self.options.rounding);
        let lanes = self.state().meta().lanes.len();
        for l in 0..lanes {
            let rows = self.state().lane_rows(l);
            let stream = self.state().meta().lanes[l].stream;
            let columns = &raw.data[rows.start * raw.width..rows.end * raw.width];
            let pool = |block: &[f32], position: [u32; 3], first: usize| {
                let key = RowKey { stream, position: first as u64 };
                let r = RowRounder::new(rounding, act, at.site, key);
                pooled_key(block, &w, &angles(rope, position), rope.scale, eps, r)
            };
            if let Err(e) = self.state_mut().index_append(id, l, columns, pool) {
                self.state_mut().fail(l, e.to_string());
            }
        }
    }

    pub(super) fn select_blocks(&self, id: StateId, q: &Mat, at: At<'_>) -> Blocks {
        let state = self.state();
        let Some(dims) = state.layout().attention[id].index else { return vec![None; q.rows] };
        let meta = state.meta();
        let rows: Vec<(usize, usize)> = meta.each_row().map(|(l, c)| (l, meta.lanes[l].start + c)).collect();
        let keep = dims.budget / dims.ratio;
        let scale = 1.0 / (dims.dim as f64).sqrt();
        rows.par_iter()
            .enumerate()
            .map(|(t, &(lane, last))| {
                let n = (last + 1) / dims.ratio;
                if n <= keep {
                    return None;
                }
                let (committed, recorded) = state.index_pooled(id, lane);
                let r = self.rounder_as(Target::F32, at, t);
                let wide: Vec<f64> = q.row(t).iter().map(|v| f64::from(*v)).collect();
                let keys = committed.chunks_exact(dims.dim).chain(recorded.chunks_exact(dims.dim)).take(n);
                let mut scored: Vec<(f32, u32)> = keys
                    .enumerate()
                    .map(|(b, key)| {
                        let (mut sum, mut bound) = (0.0, 0.0);
                        let length = simd::square(key).sqrt();
                        for q in wide.chunks_exact(dims.dim) {
                            sum += simd::dot(q, key).max(0.0);
                            bound += U * (dims.dim as f64 + 8.0) * length * norm2(q.iter().copied());
                        }
                        let v = sum * scale;
                        let s = r.round(b, v, (bound + 4.0 * U * sum) * scale, || {
                            let mut sum = Dd::ZERO;
                            for q in wide.chunks_exact(dims.dim) {
                                let d = dot_dd(q, key);
                                if d.hi > 0.0 {
                                    sum = sum + d;
                                }
                            }
                            sum / Dd::of(dims.dim as f64).sqrt()
                        });
                        (s, b as u32)
                    })
                    .collect();
                scored.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
                let mut chosen: Vec<u32> = scored[..keep.min(scored.len())].iter().map(|s| s.1).collect();
                chosen.sort_unstable();
                Some(chosen)
            })
            .collect()
    }
}

/// Mean of the block's raw keys, normed, rotated, rounded once.
fn pooled_key(
    block: &[f32],
    w: &[f64],
    table: &[(f64, f64)],
    scale: f64,
    eps: f64,
    r: RowRounder,
) -> Vec<f32> {
    let d = w.len();
    let n = block.len() / d;
    fn mean<R: Real>(block: &[f32], d: usize, n: usize, i: usize) -> R {
        let sum = (0..n).fold(R::of(0.0), |s, t| s + R::of(f64::from(block[t * d + i])));
        sum / R::of(n as f64)
    }
    fn inverse<R: Real>(x: &[R], eps: f64) -> R {
        let sum = x.iter().fold(R::of(0.0), |s, v| s + *v * *v);
        R::of(1.0) / (sum / R::of(x.len() as f64) + R::of(eps)).sqrt()
    }
    let x: Vec<f64> = (0..d).map(|i| mean(block, d, n, i)).collect();
    // Sums of a few BF16 values are exact in f64; of FP32 values nearly: cover both with the sum of magnitudes.
    let size: Vec<f64> =
        (0..d).map(|i| (0..n).map(|t| f64::from(block[t * d + i].abs())).sum::<f64>() / n as f64).collect();
    let inv = inverse(&x, eps);
    let exact = OnceCell::new();
    (0..d)
        .map(|i| {
            let v = rotated::<f64>(&|i| x[i], w, inv, table, i);
            let b = 2.0
                * rotated_bound(
                    &|i| x[i].abs() + (n + 1) as f64 * size[i] / d as f64,
                    w,
                    inv,
                    table.len(),
                    scale,
                    i,
                );
            r.round(i, v, b, || {
                let (x, inv) = exact.get_or_init(|| {
                    let x: Vec<Dd> = (0..d).map(|i| mean(block, d, n, i)).collect();
                    let inv = inverse(&x, eps);
                    (x, inv)
                });
                rotated::<Dd>(&|i| x[i], w, *inv, table, i)
            })
        })
        .collect()
}

/// The fixed rotation of [`crate::state::hadamard`] on an exact query.
fn hadamard64(x: &mut [f64]) {
    let n = x.len();
    let mut stride = 1;
    while stride < n {
        for block in x.chunks_exact_mut(2 * stride) {
            let (lo, hi) = block.split_at_mut(stride);
            for (a, b) in lo.iter_mut().zip(hi) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
        stride *= 2;
    }
    let scale = 1.0 / (n as f64).sqrt();
    x.iter_mut().for_each(|v| *v *= scale);
}

/// `softmax(q k / sqrt(d)) v` over `keys`; `out [d]`, element numbers from `first`.
fn softmax_sum(
    q: &[f64],
    keys: &[usize],
    k: &[f32],
    v: &[f32],
    first: usize,
    r: RowRounder,
    out: &mut [f32],
) {
    let d = q.len();
    let scale = 1.0 / (d as f64).sqrt();
    let row = |x: &'_ [f32], i: usize| -> std::ops::Range<usize> {
        debug_assert!((i + 1) * d <= x.len());
        i * d..(i + 1) * d
    };
    let scores: Vec<f64> = keys.iter().map(|i| simd::dot(q, &k[row(k, *i)]) * scale).collect();
    let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let longest = keys.iter().map(|i| simd::square(&k[row(k, *i)]).sqrt()).fold(0.0, f64::max);
    // Error of a score, which is the relative error of its exponential; the top's error cancels in the quotient.
    let score_error = U * ((d as f64 + 6.0) * scale * norm2(q.iter().copied()) * longest + 4.0 * top.abs());
    let (mut sum, mut acc, mut size) = (0.0, vec![0f64; d], vec![0f64; d]);
    for (i, s) in keys.iter().zip(&scores) {
        let p = (s - top).exp();
        sum += p;
        simd::weigh(p, &v[row(v, *i)], &mut acc, &mut size);
    }
    let relative = 2.0 * score_error + U * (2.0 * keys.len() as f64 + 10.0);
    let exact = OnceCell::new();
    for (j, o) in out.iter_mut().enumerate() {
        *o = r.round(first + j, acc[j] / sum, 1.01 * relative * size[j] / sum, || {
            let (p, sum) = exact.get_or_init(|| {
                let root = Dd::of(d as f64).sqrt();
                let p: Vec<Dd> =
                    keys.iter().map(|i| (dot_dd(q, &k[row(k, *i)]) / root - Dd::of(top)).exp()).collect();
                let sum = p.iter().fold(Dd::ZERO, |s, p| s + *p);
                (p, sum)
            });
            let mut acc = Dd::ZERO;
            for (i, p) in keys.iter().zip(p) {
                acc = acc + *p * Dd::of(f64::from(v[i * d + j]));
            }
            acc / *sum
        });
    }
}
