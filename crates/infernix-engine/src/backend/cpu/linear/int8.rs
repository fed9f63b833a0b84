//! Int8 activations times integer codes.
//!
//! # Order of additions
//! A group is 32 values of K (16 for NVFP4, whose codes count twice their value). `t` is its exact integer sum of codes
//! times activation codes, and `f = fl(weight scale x activation scale)`. Groups fall into 16 chains,
//! `acc = fma(f, fl32(t), acc)` in rising groups within a chain; the chains fold as `num::tree`. [`chain`] is where the
//! horizontal additions of the vector kernel leave a group. Formats whose codes are not small integers multiply the
//! activation codes as BF16 instead (`portable`, `avx512`).

use super::super::isa::{Isa, per_isa};
use super::super::num::{f32_of, tree};
use super::out::Out;
use super::rows::Rows;
use crate::numerics::a8;
use std::ops::Range;

/// Chains of an output.
pub(super) const CHAINS: usize = 16;
/// Packed columns are padded to this many values.
pub(super) const UNIT: usize = 128;
/// Columns that a tile of the matrix product has side by side.
pub(super) const TILE: usize = 8;

/// Chain of a group of `size` values.
pub(super) fn chain(group: usize, size: usize) -> usize {
    let g = group % CHAINS;
    if size == 32 { g % 4 * 4 + g / 4 } else { g / 2 % 4 * 4 + g / 8 * 2 + g % 2 }
}

/// Chains in the order in which neighbours fold: adding finished pairs at every level gives `num::tree`.
pub(super) const FOLDING: [usize; CHAINS] = [0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15];

/// Groups by chain, chains as [`FOLDING`], and how many groups each of those has.
pub(super) fn folded(groups: usize, size: usize) -> (Vec<usize>, [usize; CHAINS]) {
    let mut order = Vec::with_capacity(groups);
    let mut counts = [0; CHAINS];
    for (n, c) in counts.iter_mut().zip(FOLDING) {
        let own = (0..groups).filter(|g| chain(*g, size) == c);
        let before = order.len();
        order.extend(own);
        *n = order.len() - before;
    }
    (order, counts)
}

/// Quantised columns.
#[derive(Debug, Default)]
pub(crate) struct Int8 {
    columns: usize,
    width: usize,
    /// `[columns, width]`.
    codes: Vec<i8>,
    /// `[columns, width / 32]`.
    scales: Vec<f32>,
    /// Of each 128 codes the even ones, then the odd ones.
    even_odd: Vec<i8>,
    lanes: Vec<Lanes>,
    tiles: Vec<Tiles>,
}

/// What a column's groups have at their chains, `[columns, rounds of 16 groups, 16]`.
#[derive(Debug, Default)]
pub(super) struct Lanes {
    size: usize,
    bias: i32,
    pub(super) scales: Vec<f32>,
    /// `-bias x sum of the group's codes`.
    pub(super) start: Vec<i32>,
}

/// Columns side by side, groups in folding order: `[tile, group, 4 codes of each of 8 columns]`.
#[derive(Debug, Default)]
pub(super) struct Tiles {
    size: usize,
    bias: i32,
    pub(super) order: Vec<usize>,
    pub(super) counts: [usize; CHAINS],
    pub(super) codes: Vec<i8>,
    /// `[tile, group, 8]`.
    pub(super) scales: Vec<f32>,
    /// `-bias x sum of the group's codes`, `[tile, group, 8]`.
    pub(super) init: Vec<i32>,
}

impl Int8 {
    /// Quantises `x [columns, k]` to int8 per 32 values (`numerics::a8`).
    pub(crate) fn new(isa: Isa, x: &[u16], columns: usize, k: usize, mut old: Self) -> Self {
        let width = k.next_multiple_of(UNIT);
        (old.columns, old.width) = (columns, width);
        old.even_odd.clear();
        old.tiles.clear();
        old.lanes.clear();
        old.codes.clear();
        old.codes.resize(columns * width, 0);
        old.scales.clear();
        old.scales.resize(columns * width / a8::GROUP, 0.0);
        let out = old
            .codes
            .chunks_exact_mut(width.max(1))
            .zip(old.scales.chunks_exact_mut(width.max(1) / a8::GROUP));
        for (x, (codes, scales)) in x.chunks_exact(k.max(1)).zip(out) {
            quantise(isa, x, codes, scales);
        }
        old
    }

    pub(super) fn columns(&self) -> usize {
        self.columns
    }

    pub(super) fn width(&self) -> usize {
        self.width
    }

    /// Codes `[columns, width]`.
    pub(super) fn codes(&self) -> &[i8] {
        &self.codes
    }

    /// Scales `[columns, width / 32]`.
    pub(super) fn scales(&self) -> &[f32] {
        &self.scales
    }

    /// Makes what [`super::vnni::rows`] reads.
    pub(super) fn for_rows(&mut self, isa: Isa, size: usize, bias: i32, even_odd: bool) {
        if even_odd && self.even_odd.is_empty() {
            self.even_odd.resize(self.codes.len(), 0);
            split(isa, &self.codes, &mut self.even_odd);
        }
        if self.lanes.iter().any(|l| (l.size, l.bias) == (size, bias)) {
            return;
        }
        let rounds = self.width.div_ceil(size * CHAINS) * CHAINS;
        let n = self.columns * rounds;
        let mut lanes = Lanes { size, bias, scales: vec![0.0; n], start: vec![0; n] };
        let groups = self.width / size;
        let mut sums = vec![0; self.columns * groups];
        group_sums(isa, &self.codes, size, &mut sums);
        for c in 0..self.columns {
            for g in 0..groups {
                let at = c * rounds + g / CHAINS * CHAINS + chain(g, size);
                lanes.scales[at] = self.scales[c * (self.width / a8::GROUP) + g * size / a8::GROUP];
                lanes.start[at] = -bias * sums[c * groups + g];
            }
        }
        self.lanes.push(lanes);
    }

    /// Codes for [`super::vnni::rows`], and the groups' scales and sums, which [`Int8::for_rows`] made.
    pub(super) fn rows(&self, size: usize, bias: i32, even_odd: bool) -> (&[i8], &Lanes) {
        let lanes =
            self.lanes.iter().find(|l| (l.size, l.bias) == (size, bias)).expect("made for these codes");
        let codes = if even_odd { &self.even_odd } else { &self.codes };
        assert_eq!(codes.len(), self.codes.len(), "even-odd order not made");
        (codes, lanes)
    }

    /// Makes what [`super::vnni::panel`] reads for codes that are stored with `bias` added.
    pub(super) fn for_panel(&mut self, size: usize, bias: i32) {
        if self.tiles.iter().any(|t| (t.size, t.bias) == (size, bias)) {
            return;
        }
        let (order, counts) = folded(self.width / size, size);
        let tiles = self.columns.div_ceil(TILE);
        let groups = order.len();
        let mut t = Tiles {
            size,
            bias,
            codes: vec![0; tiles * TILE * self.width],
            scales: vec![0.0; tiles * groups * TILE],
            init: vec![0; tiles * groups * TILE],
            order,
            counts,
        };
        for c in 0..self.columns {
            let x = &self.codes[c * self.width..(c + 1) * self.width];
            for (at, g) in t.order.iter().enumerate() {
                let codes = &x[g * size..(g + 1) * size];
                let first = c / TILE * groups + at;
                for (d, quad) in codes.chunks_exact(4).enumerate() {
                    let to = (first * size / 4 + d) * 4 * TILE + 4 * (c % TILE);
                    t.codes[to..to + 4].copy_from_slice(quad);
                }
                t.scales[first * TILE + c % TILE] = self.scales[(c * self.width + g * size) / a8::GROUP];
                let sum: i32 = codes.iter().map(|c| i32::from(*c)).sum();
                t.init[first * TILE + c % TILE] = -bias * sum;
            }
        }
        self.tiles.push(t);
    }

    /// Columns for [`super::vnni::panel`].
    pub(super) fn tiles(&self, size: usize, bias: i32) -> Option<&Tiles> {
        self.tiles.iter().find(|t| (t.size, t.bias) == (size, bias))
    }
}

/// Rounds to an integer in the low bits of the sum, ties to even, for magnitudes below 2^22.
const ROUND: f32 = 12_582_912.0;

/// Codes and scale of one group.
#[inline(always)]
fn quantise_group(x: &[u16; a8::GROUP], codes: &mut [i8; a8::GROUP]) -> f32 {
    let mut lanes = [0f32; 16];
    for l in 0..16 {
        let (a, b) = (f32_of(x[l] & 0x7fff), f32_of(x[l + 16] & 0x7fff));
        lanes[l] = if a > b { a } else { b };
    }
    for width in [8, 4, 2, 1] {
        for l in 0..width {
            lanes[l] = if lanes[l + width] > lanes[l] { lanes[l + width] } else { lanes[l] };
        }
    }
    let s = lanes[0] / 127.0;
    let mut q = [0i32; a8::GROUP];
    for l in 0..a8::GROUP {
        let v = f32_of(x[l]) / s;
        // s is rounded, so that the quotient may exceed 127 by as much.
        let v = if v > 127.0 { 127.0 } else { v };
        let v = if v < -127.0 { -127.0 } else { v };
        q[l] = (v + ROUND).to_bits() as i32;
    }
    if s > 0.0 {
        for l in 0..a8::GROUP {
            codes[l] = q[l] as i8;
        }
    }
    s
}

per_isa! {
    /// Of each 128 codes the even ones, then the odd ones.
    fn split(codes: &[i8], out: &mut [i8]) {
        for (o, x) in out.as_chunks_mut::<UNIT>().0.iter_mut().zip(codes.as_chunks::<UNIT>().0) {
            for i in 0..UNIT / 2 {
                (o[i], o[UNIT / 2 + i]) = (x[2 * i], x[2 * i + 1]);
            }
        }
    }
}

per_isa! {
    /// Sums of groups of `size` codes, 16 or 32.
    fn group_sums(codes: &[i8], size: usize, out: &mut [i32]) {
        let sum = |c: &[i8; 16]| c.iter().map(|c| i32::from(*c)).sum::<i32>();
        let halves = codes.as_chunks::<16>().0;
        if size == 16 {
            out.iter_mut().zip(halves).for_each(|(o, c)| *o = sum(c));
        } else {
            out.iter_mut().zip(halves.as_chunks::<2>().0).for_each(|(o, [a, b])| *o = sum(a) + sum(b));
        }
    }
}

per_isa! {
    /// One column, as `numerics::a8::quantise` gives it for finite values; `codes` are zero.
    pub(super) fn quantise(x: &[u16], codes: &mut [i8], scales: &mut [f32]) {
        let (groups, rest) = x.as_chunks();
        let (out, _) = codes.as_chunks_mut();
        for ((x, codes), scale) in groups.iter().zip(out.iter_mut()).zip(&mut *scales) {
            *scale = quantise_group(x, codes);
        }
        if !rest.is_empty() {
            let mut last = [0u16; a8::GROUP];
            last[..rest.len()].copy_from_slice(rest);
            scales[groups.len()] = quantise_group(&last, &mut out[groups.len()]);
        }
    }
}

per_isa! {
    /// The oracle: rows `range` of `w` times every column.
    pub(super) fn portable(w: &Rows<'_>, range: Range<usize>, x: &Int8, out: &Out<'_>) {
        let (size, double) = (w.kind().int8_group(), w.kind().is_nvfp4());
        let k = w.k();
        let groups = k.div_ceil(size);
        let mut values = vec![0f32; k];
        let mut codes = vec![0i8; groups * size];
        let mut scales = vec![0f32; groups];
        for row in range {
            w.natural(row, &mut values, size, &mut scales);
            let factor = if double { 2.0 } else { 1.0 };
            codes.iter_mut().zip(&values).for_each(|(c, v)| *c = (factor * v) as i8);
            for column in 0..x.columns {
                let xc = &x.codes[column * x.width..];
                let xs = &x.scales[column * (x.width / a8::GROUP)..];
                let mut acc = [0f32; CHAINS];
                for (g, ((c, x), ws)) in
                    codes.chunks_exact(size).zip(xc.chunks_exact(size)).zip(&scales).enumerate()
                {
                    let mut t = 0i32;
                    for (c, x) in c.iter().zip(x) {
                        t += i32::from(*c) * i32::from(*x);
                    }
                    let ws = if double { 0.5 * ws } else { *ws };
                    let a = &mut acc[chain(g, size)];
                    *a = (ws * xs[g * size / a8::GROUP]).mul_add(t as f32, *a);
                }
                out.put(column, row, w.finish(row, tree(acc)));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folding_order_is_the_order_of_the_tree() {
        // Distinct magnitudes, so that any other order would show.
        let values: [f32; 16] = std::array::from_fn(|i| (1.0 + i as f32 * 0.37).powi(5 + i as i32 % 7));
        let mut level: Vec<f32> = FOLDING.iter().map(|c| values[*c]).collect();
        while level.len() > 1 {
            level = level.chunks_exact(2).map(|p| p[0] + p[1]).collect();
        }
        assert_eq!(level[0].to_bits(), tree(values).to_bits());
        for size in [16, 32] {
            let mut seen: Vec<usize> = (0..CHAINS).map(|g| chain(g, size)).collect();
            seen.sort_unstable();
            assert_eq!(seen, (0..CHAINS).collect::<Vec<_>>());
            let (mut order, counts) = folded(37, size);
            assert_eq!(counts.iter().sum::<usize>(), 37);
            order.sort_unstable();
            assert_eq!(order, (0..37).collect::<Vec<_>>());
        }
    }

    #[test]
    fn codes_are_those_of_the_oracle() {
        let mut rng = super::super::tests::Rng(31);
        for scale in [1.0, 1e-30, 1e-39, 3e38, 0.0] {
            let x: Vec<u16> =
                (0..200).map(|_| super::super::super::num::bf16_of(rng.unit() * scale)).collect();
            for isa in Isa::testable() {
                let q = Int8::new(isa, &x, 1, 200, Int8::default());
                for (g, x) in x.chunks(a8::GROUP).enumerate() {
                    let mut codes = [0i8; a8::GROUP];
                    let v: Vec<f32> = x.iter().map(|v| f32_of(*v)).collect();
                    assert_eq!(a8::quantise(&v, &mut codes).to_bits(), q.scales[g].to_bits());
                    assert_eq!(&q.codes[g * a8::GROUP..][..v.len()], &codes[..v.len()], "{isa} {scale}");
                }
            }
        }
    }
}
