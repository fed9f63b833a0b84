//! Products in f64 with a bound on their error, and exactly where the bound does not decide.
//!
//! Under BF16 boundaries every product `w x` is exact in f64, so only the summation errs:
//! `|error| <= (K + 4) 2^-53 |w| |x|` by Cauchy-Schwarz (the 4 covers products that do round, the divisor and the
//! norms' own errors). Where all operands are coarse enough that every partial sum fits 53 bits, the sum is exact and
//! the bound 0: BF16 weights and activations nearly always are, and their sums often lie exactly on a midpoint.

use super::decode::Exact;
use crate::numerics::dd::{Dd, Real};
use rayon::prelude::*;

/// Outputs computed together.
const NT: usize = 16;
/// Rows computed together.
const RT: usize = 4;

/// Weight words as numbers, `[tile of 16 rows][k][16]`, zero-padded.
enum Tiles {
    /// All values fit FP32.
    F32(Vec<f32>),
    F64(Vec<f64>),
}

/// A matrix ready for products.
pub(super) struct Packed {
    pub n: usize,
    pub k: usize,
    tiles: Tiles,
    divisor: Vec<f64>,
    /// Euclidean norm of each row, divisor included.
    norm: Vec<f64>,
    /// Each row's values are multiples of 2 to this power.
    grain: Vec<i32>,
}

/// `sum v^2` of a row, and the largest power of two of which all its values are multiples (1024 if all are 0).
#[inline(always)]
pub(super) fn scan(row: &[f64]) -> (f64, i32) {
    const LANES: usize = 16;
    let (mut squares, mut lowest) = ([0f64; LANES], [1024i64; LANES]);
    for row in row.chunks(LANES) {
        for ((v, sum), low) in row.iter().zip(&mut squares).zip(&mut lowest) {
            let bits = v.to_bits();
            let exponent = (bits >> 52 & 0x7FF) as i64;
            // A subnormal's exponent is 1 and its leading bit not implied.
            let mantissa = (bits & ((1 << 52) - 1) | if exponent > 0 { 1 << 52 } else { 0 }) as i64;
            // The lowest bit alone is a power of two: its exponent as a float is its place.
            let place = (((mantissa & mantissa.wrapping_neg()) as f64).to_bits() >> 52) as i64 - 1023;
            let grain = exponent.max(1) - 1075 + place;
            *low = if *v == 0.0 { *low } else { (*low).min(grain) };
            *sum += v * v;
        }
    }
    (squares.iter().sum(), lowest.into_iter().min().unwrap_or(1024) as i32)
}

/// Rows of activations as f64, with what the error bounds need to know of them.
#[derive(Debug, Default)]
pub(super) struct Operand {
    k: usize,
    /// `[T, K]`.
    x: Vec<f64>,
    /// Euclidean norm of each row.
    norm: Vec<f64>,
    /// Each row's values are multiples of 2 to this power.
    grain: Vec<i32>,
}

impl Operand {
    pub(super) fn new(x: Vec<f64>, k: usize) -> Self {
        let k = k.max(1);
        let (squares, grain): (Vec<f64>, Vec<i32>) = x.par_chunks_exact(k).map(super::simd::scan).unzip();
        Operand { k, x, norm: squares.into_iter().map(f64::sqrt).collect(), grain }
    }

    fn row(&self, t: usize) -> &[f64] {
        &self.x[t * self.k..(t + 1) * self.k]
    }
}

impl Packed {
    pub(super) fn new(exact: &Exact) -> Packed {
        let k = exact.k.max(1);
        let n = exact.values.len() / k;
        let len = n.div_ceil(NT) * k * NT;
        let place = |put: &mut dyn FnMut(usize, f64)| {
            for (r, row) in exact.values.chunks_exact(k).enumerate() {
                let base = r / NT * k * NT + r % NT;
                row.iter().enumerate().for_each(|(j, v)| put(base + j * NT, *v));
            }
        };
        let fits = exact.values.iter().all(|v| f64::from(*v as f32) == *v);
        let tiles = if fits {
            let mut t = vec![0f32; len];
            place(&mut |i, v| t[i] = v as f32);
            Tiles::F32(t)
        } else {
            let mut t = vec![0f64; len];
            place(&mut |i, v| t[i] = v);
            Tiles::F64(t)
        };
        let norm = exact
            .values
            .chunks_exact(k)
            .zip(&exact.divisor)
            .map(|(row, d)| row.iter().map(|v| v * v).sum::<f64>().sqrt() / d.abs())
            .collect();
        let grain = exact.values.chunks_exact(k).map(|row| super::simd::scan(row).1).collect();
        Packed { n, k, tiles, divisor: exact.divisor.clone(), norm, grain }
    }

    /// Bytes held.
    pub(super) fn bytes(&self) -> usize {
        16 * self.n
            + match &self.tiles {
                Tiles::F32(t) => 4 * t.len(),
                Tiles::F64(t) => 8 * t.len(),
            }
    }

    /// Numerator of one element.
    pub(super) fn at(&self, n: usize, k: usize) -> f64 {
        let i = n / NT * self.k * NT + k * NT + n % NT;
        match &self.tiles {
            Tiles::F32(t) => f64::from(t[i]),
            Tiles::F64(t) => t[i],
        }
    }

    /// `sum_k w[n, k] x[k]` to about 2^-100 relative to the sum of magnitudes.
    pub(super) fn exact(&self, n: usize, x: &[f64]) -> Dd {
        let mut s = Dd::ZERO;
        for (k, v) in x.iter().enumerate() {
            s = s + Dd::product(self.at(n, k), *v);
        }
        if self.divisor[n] == 1.0 { s } else { s / Dd::of(self.divisor[n]) }
    }
}

/// All products of a matrix with rows of x, unrounded.
pub(super) struct Products<'a> {
    w: &'a Packed,
    x: &'a Operand,
    /// By tile of outputs, numerators `[T, 16]`.
    tiles: Vec<Vec<f64>>,
}

impl<'a> Products<'a> {
    /// `x [T, K]`.
    pub(super) fn new(w: &'a Packed, x: &'a Operand) -> Self {
        assert_eq!(x.k, w.k, "weight and activations differ in K");
        let t = x.norm.len();
        let tiles = (0..w.n.div_ceil(NT))
            .into_par_iter()
            .with_min_len((1 << 15) / (w.k * t.max(1) * NT / 16 + 1) + 1)
            .map(|tile| tile_products(w, tile, &x.x, t))
            .collect();
        Products { w, x, tiles }
    }

    /// Outputs a row.
    pub(super) fn n(&self) -> usize {
        self.w.n
    }

    /// Values and error bounds of elements from `first` on.
    #[inline(always)]
    pub(super) fn fill(&self, t: usize, first: usize, v: &mut [f64], bound: &mut [f64]) {
        let (norm, grain) = (self.x.norm[t], self.x.grain[t]);
        let unit = (self.w.k + 4) as f64 * (f64::EPSILON / 2.0) * 1.01;
        let (mut n, mut done) = (first, 0);
        while done < v.len() {
            let len = (NT - n % NT).min(v.len() - done);
            let sums = &self.tiles[n / NT][t * NT + n % NT..][..len];
            let (norms, grains) = (&self.w.norm[n..n + len], &self.w.grain[n..n + len]);
            let divisors = &self.w.divisor[n..n + len];
            let (v, bound) = (&mut v[done..done + len], &mut bound[done..done + len]);
            for j in 0..len {
                let size = norm * norms[j];
                // The biased exponent of `size` says size < 2^(e - 1022); any partial sum is at most that.
                let top = (size.to_bits() >> 52) as i32 - 1022;
                let whole = (top - (grain + grains[j]) <= 52) & (divisors[j] == 1.0);
                v[j] = sums[j] / divisors[j];
                bound[j] = if whole { 0.0 } else { unit * size };
            }
            (n, done) = (n + len, done + len);
        }
    }

    /// Double-double value.
    pub(super) fn exact(&self, t: usize, n: usize) -> Dd {
        self.w.exact(n, self.x.row(t))
    }
}

fn tile_products(w: &Packed, tile: usize, x: &[f64], t: usize) -> Vec<f64> {
    let mut out = vec![0f64; t * NT];
    let span = tile * w.k * NT..(tile + 1) * w.k * NT;
    match &w.tiles {
        Tiles::F32(v) => super::simd::products(&v[span], x, w.k, &mut out),
        Tiles::F64(v) => super::simd::products(&v[span], x, w.k, &mut out),
    }
    out
}

/// Sums `x[t, k] w[k, n]` over k for all rows; `out [T, 16]`. Written to vectorise; `FMA` where the target has it.
#[inline(always)]
pub(super) fn kernel<W: Copy + Into<f64>, const FMA: bool>(w: &[W], x: &[f64], k: usize, out: &mut [f64]) {
    let mut rows = x.chunks_exact(RT * k);
    let mut outs = out.chunks_exact_mut(RT * NT);
    for (x, out) in (&mut rows).zip(&mut outs) {
        let mut acc = [[0f64; NT]; RT];
        let (x0, rest) = x.split_at(k);
        let (x1, rest) = rest.split_at(k);
        let (x2, x3) = rest.split_at(k);
        for ((((w, a), b), c), d) in w.chunks_exact(NT).zip(x0).zip(x1).zip(x2).zip(x3) {
            for j in 0..NT {
                let v: f64 = w[j].into();
                acc[0][j] = madd::<FMA>(*a, v, acc[0][j]);
                acc[1][j] = madd::<FMA>(*b, v, acc[1][j]);
                acc[2][j] = madd::<FMA>(*c, v, acc[2][j]);
                acc[3][j] = madd::<FMA>(*d, v, acc[3][j]);
            }
        }
        out.copy_from_slice(acc.as_flattened());
    }
    for (x, out) in rows.remainder().chunks_exact(k).zip(outs.into_remainder().chunks_exact_mut(NT)) {
        let mut acc = [0f64; NT];
        for (w, a) in w.chunks_exact(NT).zip(x) {
            for j in 0..NT {
                acc[j] = madd::<FMA>(*a, w[j].into(), acc[j]);
            }
        }
        out.copy_from_slice(&acc);
    }
}

#[inline(always)]
pub(super) fn madd<const FMA: bool>(a: f64, b: f64, c: f64) -> f64 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}
