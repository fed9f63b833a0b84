//! Attention over pages: tiles of 64 keys at absolute positions.
//!
//! A query sees its keys tile by tile. Each tile gives a maximum, a sum of exponentials and a weighted sum of values;
//! tiles join in rising order within a segment of 16 tiles, segments join in rising order. Neither the rows of a call
//! nor threads change what meets what, so prefill and decode agree bit for bit; long contexts split over threads by
//! segments. Scores of BF16 keys are the products of `linear`.

use super::isa::{Isa, per_isa};
use super::linear::{Kind, Out, Packed, Rows, product_rows};
use super::num::{bf16_of, exp, tree};
use super::{elementwise, isa};
use crate::state::{KvCodec, KvFormat, PAGE_TOKENS};
use std::ops::Range;

/// Keys of a tile.
pub(crate) const TILE: usize = PAGE_TOKENS;
/// Tiles of a segment.
const SEGMENT_TILES: usize = 16;
/// Keys of a segment.
pub(crate) const SEGMENT: usize = SEGMENT_TILES * TILE;

/// What a query attends to.
#[derive(Clone, Copy)]
pub(crate) enum Keys<'a> {
    /// Everything up to the row's own index.
    Prefix,
    /// The tokens of these blocks (ascending) of `ratio` tokens, and the tail behind the last complete block.
    Blocks(&'a [u32], usize),
}

/// Queries of some rows over one KV head.
pub(crate) struct Query<'a> {
    /// Sequence index of each row.
    pub(crate) last: &'a [usize],
    /// Keys of each row.
    pub(crate) keys: &'a [Keys<'a>],
    /// Query heads that share the KV head.
    pub(crate) group: usize,
    /// Width of a head.
    pub(crate) d: usize,
    /// BF16 queries `[rows, group, d]`.
    pub(crate) q: &'a [u16],
}

/// Running softmax sums of some columns.
pub(crate) struct Sums {
    d: usize,
    max: Vec<f32>,
    sum: Vec<f32>,
    acc: Vec<f32>,
}

impl Sums {
    pub(crate) fn new(columns: usize, d: usize) -> Self {
        Sums {
            d,
            max: vec![f32::NEG_INFINITY; columns],
            sum: vec![0.0; columns],
            acc: vec![0.0; columns * d],
        }
    }

    /// Joins later keys to these.
    pub(crate) fn join(&mut self, isa: Isa, later: &Sums) {
        for c in 0..self.max.len() {
            if later.sum[c] > 0.0 {
                let span = c * self.d..(c + 1) * self.d;
                merge(
                    isa,
                    &mut self.max[c],
                    &mut self.sum[c],
                    &mut self.acc[span.clone()],
                    later.max[c],
                    later.sum[c],
                    &later.acc[span],
                );
            }
        }
    }

    /// The weighted means.
    pub(crate) fn finish(&self, column: usize, out: &mut [u16]) {
        let sum = self.sum[column];
        for (o, a) in out.iter_mut().zip(&self.acc[column * self.d..]) {
            *o = bf16_of(a / sum);
        }
    }
}

per_isa! {
    fn merge(max: &mut f32, sum: &mut f32, acc: &mut [f32], max2: f32, sum2: f32, acc2: &[f32]) {
        if *max == f32::NEG_INFINITY {
            (*max, *sum) = (max2, sum2);
            acc.copy_from_slice(acc2);
            return;
        }
        let top = max.max(max2);
        let (a, b) = (exp(*max - top), exp(max2 - top));
        *max = top;
        *sum = sum2.mul_add(b, *sum * a);
        for (x, y) in acc.iter_mut().zip(acc2) {
            *x = y.mul_add(b, *x * a);
        }
    }
}

per_isa! {
    /// Scores to unnormalised probabilities over the runs of a tile (zero elsewhere); gives their maximum and sum.
    fn weigh(scores: &mut [f32; TILE], runs: &[Range<usize>], scale: f32) -> (f32, f32) {
        let mut kept = [f32::NEG_INFINITY; TILE];
        let mut max = f32::NEG_INFINITY;
        for r in runs {
            for i in r.clone() {
                kept[i] = scores[i] * scale;
                max = if kept[i] > max { kept[i] } else { max };
            }
        }
        let mut lanes = [0f32; 16];
        for i in 0..TILE {
            let p = exp(kept[i] - max);
            scores[i] = if kept[i] == f32::NEG_INFINITY { 0.0 } else { p };
            lanes[i % 16] += scores[i];
        }
        (max, tree(lanes))
    }
}

per_isa! {
    /// `acc = sum_key p[key] v[key]`, keys of the runs in rising order, `v [64, d]`.
    fn gather(p: &[f32; TILE], runs: &[Range<usize>], v: &[f32], acc: &mut [f32]) {
        const WIDE: usize = 128;
        let d = acc.len();
        let mut j = 0;
        while j + WIDE <= d {
            let mut sum = [0f32; WIDE];
            for r in runs {
                for i in r.clone() {
                    let row = &v[i * d + j..i * d + j + WIDE];
                    for l in 0..WIDE {
                        sum[l] = p[i].mul_add(row[l], sum[l]);
                    }
                }
            }
            acc[j..j + WIDE].copy_from_slice(&sum);
            j += WIDE;
        }
        for j in j..d {
            let mut sum = 0f32;
            for r in runs {
                for i in r.clone() {
                    sum = p[i].mul_add(v[i * d + j], sum);
                }
            }
            acc[j] = sum;
        }
    }
}

per_isa! {
    /// Dot product in 16 lanes.
    pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
        let mut lanes = [0f32; 16];
        let whole = a.len() / 16 * 16;
        for (x, y) in a[..whole].chunks_exact(16).zip(b[..whole].chunks_exact(16)) {
            for l in 0..16 {
                lanes[l] = x[l].mul_add(y[l], lanes[l]);
            }
        }
        for (l, i) in (whole..a.len()).enumerate() {
            lanes[l] = a[i].mul_add(b[i], lanes[l]);
        }
        tree(lanes)
    }
}

/// Queries in the form their scores need.
pub(crate) enum Prepared {
    /// BF16 keys.
    Bf16(Box<Packed>),
    /// Any other codec: FP32, rotated if the codec rotates keys.
    F32(Vec<f32>),
}

impl Prepared {
    pub(crate) fn new(isa: isa::Isa, codec: &dyn KvCodec, q: &Query<'_>) -> Self {
        let columns = q.last.len() * q.group;
        if codec.format() == KvFormat::Bf16 {
            let mut p = Packed::default();
            p.pack(q.q, columns, q.d, q.d);
            return Prepared::Bf16(Box::new(p));
        }
        let mut wide = vec![0f32; columns * q.d];
        elementwise::widen(isa, &q.q[..columns * q.d], &mut wide);
        if codec.rotates_keys() {
            wide.chunks_exact_mut(q.d).for_each(crate::state::hadamard);
        }
        Prepared::F32(wide)
    }
}

/// Keys of a row inside a tile that starts at `first`.
fn runs_of(keys: Keys<'_>, last: usize, first: usize, runs: &mut Vec<Range<usize>>) {
    runs.clear();
    match keys {
        Keys::Prefix => {
            if last >= first {
                runs.push(0..(last + 1 - first).min(TILE));
            }
        }
        Keys::Blocks(blocks, ratio) => {
            let mut push = |a: usize, b: usize| {
                let (a, b) = (a.max(first), b.min(first + TILE));
                if a < b {
                    match runs.last_mut() {
                        Some(r) if r.end == a - first => r.end = b - first,
                        _ => runs.push(a - first..b - first),
                    }
                }
            };
            // A block may straddle tiles where the ratio does not divide 64.
            let from = blocks.partition_point(|b| (*b as usize + 1) * ratio <= first);
            for b in &blocks[from..] {
                if *b as usize * ratio >= first + TILE {
                    break;
                }
                push(*b as usize * ratio, (*b as usize + 1) * ratio);
            }
            push((last + 1) / ratio * ratio, last + 1);
        }
    }
}

/// Buffers of one task.
#[derive(Default)]
pub(crate) struct Scratch {
    scores: Vec<[f32; TILE]>,
    values: Vec<f32>,
    keys: Vec<f32>,
    acc: Vec<f32>,
    runs: Vec<Vec<Range<usize>>>,
}

/// Sums of the queries over the keys of one segment; `tile(page index)` gives the stored keys and values.
pub(crate) fn segment<'t>(
    isa: Isa,
    codec: &dyn KvCodec,
    q: &Query<'_>,
    prepared: &Prepared,
    segment: usize,
    tile: impl Fn(usize) -> (&'t [u8], &'t [u8]),
    s: &mut Scratch,
) -> Sums {
    let (d, group, rows) = (q.d, q.group, q.last.len());
    let columns = rows * group;
    let mut sums = Sums::new(columns, d);
    let end = q.last.iter().max().map_or(0, |l| l + 1);
    let scale = 1.0 / (d as f32).sqrt();
    s.scores.resize(columns, [0.0; TILE]);
    s.values.resize(TILE * d, 0.0);
    s.keys.resize(TILE * d, 0.0);
    s.acc.resize(d, 0.0);
    s.runs.resize(rows, Vec::new());
    for t in segment * SEGMENT_TILES..((segment + 1) * SEGMENT_TILES).min(end.div_ceil(TILE)) {
        let mut used = [false; TILE];
        for (r, runs) in s.runs.iter_mut().enumerate() {
            runs_of(q.keys[r], q.last[r], t * TILE, runs);
            runs.iter().for_each(|r| used[r.clone()].fill(true));
        }
        let Some(top) = used.iter().rposition(|u| *u) else { continue };
        let (kt, vt) = tile(t);
        let bytes = codec.row_bytes(d);
        for i in (0..=top).filter(|i| used[*i]) {
            decode_value(isa, codec, &vt[i * bytes..(i + 1) * bytes], &mut s.values[i * d..(i + 1) * d]);
        }
        score(isa, codec, q, prepared, kt, top + 1, s);
        for r in 0..rows {
            let runs = &s.runs[r];
            if runs.is_empty() {
                continue;
            }
            for c in r * group..(r + 1) * group {
                let (max, sum) = weigh(isa, &mut s.scores[c], runs, scale);
                gather(isa, &s.scores[c], runs, &s.values, &mut s.acc);
                let acc = &mut sums.acc[c * d..(c + 1) * d];
                merge(isa, &mut sums.max[c], &mut sums.sum[c], acc, max, sum, &s.acc);
            }
        }
    }
    sums
}

fn decode_value(isa: Isa, codec: &dyn KvCodec, bytes: &[u8], out: &mut [f32]) {
    if codec.format() == KvFormat::Bf16 {
        widen_bytes(isa, bytes, out);
    } else {
        codec.decode_v(bytes, out);
    }
}

per_isa! {
    fn widen_bytes(bytes: &[u8], out: &mut [f32]) {
        for (o, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
            *o = f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16);
        }
    }
}

/// Scores of the first `n` keys of a tile for all columns (those a row does not select are not looked at).
fn score(
    isa: Isa,
    codec: &dyn KvCodec,
    q: &Query<'_>,
    prepared: &Prepared,
    kt: &[u8],
    n: usize,
    s: &mut Scratch,
) {
    let (d, columns) = (q.d, q.last.len() * q.group);
    match prepared {
        Prepared::Bf16(x) => {
            // The bounds hold by the page's size; an empty view would leave scores of zero.
            let Some(w) = Rows::new(Kind::Bf16, TILE, d, 0, TILE, kt, &[], &[], 1.0) else { return };
            let flat = s.scores.as_flattened_mut();
            let out = Out::f32(flat, columns, TILE);
            let sparse = s.runs.len() == 1 && s.runs[0].len() > 1;
            if sparse {
                s.runs[0].iter().for_each(|r| product_rows(isa, &w, r.clone(), x, &out));
            } else {
                product_rows(isa, &w, 0..n, x, &out);
            }
        }
        Prepared::F32(x) => {
            let bytes = codec.row_bytes(d);
            for i in 0..n {
                codec.decode_k(&kt[i * bytes..(i + 1) * bytes], &mut s.keys[i * d..(i + 1) * d]);
            }
            for (c, x) in x.chunks_exact(d).enumerate() {
                for i in 0..n {
                    s.scores[c][i] = dot(isa, x, &s.keys[i * d..(i + 1) * d]);
                }
            }
        }
    }
}

per_isa! {
    /// `scale sum_h relu(q_h . k_b)` for consecutive pooled keys `[n, d]`, `q [heads, d]`.
    pub(crate) fn index_scores(q: &[f32], keys: &[f32], d: usize, scale: f32, out: &mut [f32]) {
        for (o, k) in out.iter_mut().zip(keys.chunks_exact(d)) {
            let mut sum = 0f32;
            for q in q.chunks_exact(d) {
                let mut lanes = [0f32; 16];
                let whole = d / 16 * 16;
                for (x, y) in q[..whole].chunks_exact(16).zip(k[..whole].chunks_exact(16)) {
                    for l in 0..16 {
                        lanes[l] = x[l].mul_add(y[l], lanes[l]);
                    }
                }
                for (l, i) in (whole..d).enumerate() {
                    lanes[l] = q[i].mul_add(k[i], lanes[l]);
                }
                let dot = tree(lanes);
                sum += if dot > 0.0 { dot } else { 0.0 };
            }
            *o = sum * scale;
        }
    }
}

/// Indices of the `n` largest values, the lower index first on equality; ascending.
pub(crate) fn best(scores: &[f32], n: usize) -> Vec<u32> {
    let mut order: Vec<u32> = (0..scores.len() as u32).collect();
    let by_score = |a: &u32, b: &u32| scores[*b as usize].total_cmp(&scores[*a as usize]).then(a.cmp(b));
    if n < order.len() {
        order.select_nth_unstable_by(n, by_score);
        order.truncate(n);
    }
    order.sort_unstable();
    order
}

/// The `k` largest of a row of logits in falling order, the lower id first on equality, with the softmax over them.
pub(crate) fn route(logits: &[f32], k: usize) -> Vec<(u32, f32)> {
    let mut top: Vec<(f32, u32)> = Vec::with_capacity(k + 1);
    for (e, l) in logits.iter().enumerate() {
        if top.len() == k && l.total_cmp(&top[k - 1].0).is_le() {
            continue;
        }
        let at = top.partition_point(|t| t.0.total_cmp(l).is_ge());
        top.insert(at, (*l, e as u32));
        top.truncate(k);
    }
    let max = top.first().map_or(0.0, |t| f64::from(t.0));
    let weights: Vec<f64> = top.iter().map(|t| (f64::from(t.0) - max).exp()).collect();
    let sum: f64 = weights.iter().sum();
    top.iter().zip(&weights).map(|(t, w)| (t.1, (w / sum) as f32)).collect()
}

#[cfg(test)]
mod tests {
    use super::super::linear::tests::Rng;
    use super::super::num::f32_of;
    use super::*;

    fn attend(isa: Isa, codec: &dyn KvCodec, q: &Query<'_>, tiles: &[(Vec<u8>, Vec<u8>)]) -> Vec<u16> {
        let prepared = Prepared::new(isa, codec, q);
        let columns = q.last.len() * q.group;
        let mut all = Sums::new(columns, q.d);
        let end = q.last.iter().max().unwrap() / SEGMENT + 1;
        for s in 0..end {
            let part =
                segment(isa, codec, q, &prepared, s, |t| (&tiles[t].0, &tiles[t].1), &mut Scratch::default());
            all.join(isa, &part);
        }
        let mut out = vec![0u16; columns * q.d];
        out.chunks_exact_mut(q.d).enumerate().for_each(|(c, o)| all.finish(c, o));
        out
    }

    #[test]
    fn attention_is_close_to_the_formula_and_independent_of_rows_and_instruction_set() {
        let (d, group, tokens) = (256usize, 3usize, 1500usize);
        for format in [KvFormat::Bf16, KvFormat::Int8] {
            let codec = format.codec();
            let mut rng = Rng(5);
            let bytes = codec.row_bytes(d);
            let mut tiles = vec![(vec![0u8; TILE * bytes], vec![0u8; TILE * bytes]); tokens.div_ceil(TILE)];
            let (mut keys, mut values) = (vec![0f32; tokens * d], vec![0f32; tokens * d]);
            for i in 0..tokens {
                let row: Vec<f32> = (0..2 * d).map(|_| f32_of(bf16_of(rng.unit()))).collect();
                let span = i % TILE * bytes..(i % TILE + 1) * bytes;
                let t = &mut tiles[i / TILE];
                codec.encode_k(&row[..d], &mut t.0[span.clone()]);
                codec.encode_v(&row[d..], &mut t.1[span.clone()]);
                codec.decode_k(&t.0[span.clone()], &mut keys[i * d..(i + 1) * d]);
                codec.decode_v(&t.1[span], &mut values[i * d..(i + 1) * d]);
            }
            let last = [0usize, 62, 63, 64, 700, 1023, 1024, 1499];
            let blocks: Vec<u32> = (0..300).filter(|b| b % 7 < 2).collect();
            let q: Vec<u16> = (0..last.len() * group * d).map(|_| bf16_of(rng.unit() * 3.0)).collect();
            for sparse in [false, true] {
                let chosen: Vec<Vec<u32>> = last
                    .iter()
                    .map(|l| blocks.iter().copied().filter(|b| (*b as usize + 1) * 4 <= l + 1).collect())
                    .collect();
                let keep: Vec<Keys<'_>> =
                    chosen.iter().map(|c| if sparse { Keys::Blocks(c, 4) } else { Keys::Prefix }).collect();
                let mut first = None;
                for isa in Isa::testable() {
                    let all =
                        attend(isa, &*codec, &Query { last: &last, keys: &keep, group, d, q: &q }, &tiles);
                    for r in 0..last.len() {
                        let span = r * group * d..(r + 1) * group * d;
                        let one =
                            Query { last: &last[r..=r], keys: &keep[r..=r], group, d, q: &q[span.clone()] };
                        assert_eq!(attend(isa, &*codec, &one, &tiles), all[span]);
                    }
                    assert_eq!(first.get_or_insert_with(|| all.clone()), &all, "{isa}");
                }
                let got = first.unwrap();
                for (r, l) in last.iter().enumerate() {
                    let seen: Vec<usize> = (0..=*l)
                        .filter(|i| !sparse || chosen[r].contains(&((i / 4) as u32)) || *i >= (l + 1) / 4 * 4)
                        .collect();
                    if seen.is_empty() {
                        continue;
                    }
                    for h in 0..group {
                        let mut x: Vec<f32> =
                            q[(r * group + h) * d..][..d].iter().map(|v| f32_of(*v)).collect();
                        if codec.rotates_keys() {
                            crate::state::hadamard(&mut x);
                        }
                        let s: Vec<f64> = seen
                            .iter()
                            .map(|i| {
                                (0..d).map(|j| f64::from(x[j]) * f64::from(keys[i * d + j])).sum::<f64>()
                                    / 16.0
                            })
                            .collect();
                        let max = s.iter().copied().fold(f64::MIN, f64::max);
                        let p: Vec<f64> = s.iter().map(|s| (s - max).exp()).collect();
                        let sum: f64 = p.iter().sum();
                        for j in 0..d {
                            let e: f64 = seen
                                .iter()
                                .zip(&p)
                                .map(|(i, p)| p * f64::from(values[i * d + j]))
                                .sum::<f64>()
                                / sum;
                            let g = f64::from(f32_of(got[(r * group + h) * d + j]));
                            assert!((g - e).abs() <= e.abs() / 256.0 + 2e-6, "{format:?} row {r}: {g} {e}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn selection_and_routing_prefer_the_lower_id_on_ties() {
        let scores = [0.0, 2.0, 0.0, 1.0, 0.0, 2.0];
        assert_eq!(best(&scores, 4), [0, 1, 3, 5]);
        assert_eq!(best(&scores, 9).len(), 6);
        let r = route(&[1.0, 3.0, 3.0, 0.5, 3.0], 2);
        assert_eq!(r, [(1, 0.5), (2, 0.5)]);
        let r = route(&[-1.0, f32::MIN, 4.0], 3);
        assert_eq!(r.iter().map(|r| r.0).collect::<Vec<_>>(), [2, 0, 1]);
    }

    #[test]
    fn index_scores_follow_the_formula() {
        let mut rng = Rng(6);
        let (d, heads, n) = (128, 4, 9);
        let q: Vec<f32> = (0..heads * d).map(|_| rng.unit()).collect();
        let k: Vec<f32> = (0..n * d).map(|_| rng.unit()).collect();
        for isa in Isa::testable() {
            let mut out = vec![0f32; n];
            index_scores(isa, &q, &k, d, 0.25, &mut out);
            for b in 0..n {
                let dots = (0..heads)
                    .map(|h| (0..d).map(|i| f64::from(q[h * d + i]) * f64::from(k[b * d + i])).sum::<f64>());
                let e = 0.25 * dots.map(|v| v.max(0.0)).sum::<f64>();
                assert!((f64::from(out[b]) - e).abs() < 1e-5);
            }
        }
    }
}
