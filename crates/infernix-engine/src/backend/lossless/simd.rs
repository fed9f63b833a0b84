//! Run-time choice of instruction set for the loops that cost time. Every variant is the same Rust; results differ only
//! below the error bounds the callers use, so rounded results do not depend on the choice.
#![expect(unsafe_code, reason = "calls of functions compiled for instruction sets checked at run time")]

use super::U;
use super::gemm::{self, Products};
use super::recurrent::{self, Scratch, Token};
use crate::numerics::dd::{Dd, Real as _};
use crate::numerics::round::RowRounder;
use std::sync::LazyLock;

#[derive(Clone, Copy, PartialEq)]
enum Isa {
    Avx512,
    Avx2,
    Plain,
}

static ISA: LazyLock<Isa> = LazyLock::new(|| {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512dq") {
            return Isa::Avx512;
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            return Isa::Avx2;
        }
    }
    Isa::Plain
});

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512dq,fma")]
fn products_avx512<W: Copy + Into<f64>>(w: &[W], x: &[f64], k: usize, out: &mut [f64]) {
    gemm::kernel::<W, true>(w, x, k, out);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn products_avx2<W: Copy + Into<f64>>(w: &[W], x: &[f64], k: usize, out: &mut [f64]) {
    gemm::kernel::<W, true>(w, x, k, out);
}

/// [`gemm::kernel`] for this machine.
pub(super) fn products<W: Copy + Into<f64>>(w: &[W], x: &[f64], k: usize, out: &mut [f64]) {
    match *ISA {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the features were detected.
        Isa::Avx512 => unsafe { products_avx512(w, x, k, out) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the features were detected.
        Isa::Avx2 => unsafe { products_avx2(w, x, k, out) },
        _ => gemm::kernel::<W, false>(w, x, k, out),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512dq,fma")]
fn step_avx512(old: &[f32], s: &mut [f32], token: &Token<'_>, scratch: &mut Scratch) {
    recurrent::step::<true>(old, s, token, scratch);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn step_avx2(old: &[f32], s: &mut [f32], token: &Token<'_>, scratch: &mut Scratch) {
    recurrent::step::<true>(old, s, token, scratch);
}

/// [`recurrent::step`] for this machine.
pub(super) fn step(old: &[f32], s: &mut [f32], token: &Token<'_>, scratch: &mut Scratch) {
    match *ISA {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the features were detected.
        Isa::Avx512 => unsafe { step_avx512(old, s, token, scratch) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the features were detected.
        Isa::Avx2 => unsafe { step_avx2(old, s, token, scratch) },
        _ => recurrent::step::<false>(old, s, token, scratch),
    }
}

/// `$body` compiled for every instruction set, behind a function that chooses.
macro_rules! per_isa {
    ($(#[$meta:meta])* fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        pub(super) fn $name($($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            fn body($($arg: $ty),*) $(-> $ret)? $body
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,fma")]
            fn v4($($arg: $ty),*) $(-> $ret)? { body($($arg),*) }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn v3($($arg: $ty),*) $(-> $ret)? { body($($arg),*) }
            match *ISA {
                #[cfg(target_arch = "x86_64")]
                // SAFETY: the features were detected.
                Isa::Avx512 => unsafe { v4($($arg),*) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: the features were detected.
                Isa::Avx2 => unsafe { v3($($arg),*) },
                _ => body($($arg),*),
            }
        }
    };
}

per_isa! {
    /// [`RowRounder::cut`].
    fn cut(r: &RowRounder, first: usize, v: &[f64], bound: &[f64], out: &mut [f32]) -> bool {
        r.cut(first, v, bound, out)
    }
}

per_isa! {
    /// [`Products::fill`].
    fn fill(p: &Products<'_>, t: usize, first: usize, v: &mut [f64], bound: &mut [f64]) {
        p.fill(t, first, v, bound)
    }
}

per_isa! {
    /// `sum v^2`, and the power of two of which all values are multiples (1024 if all are 0).
    fn scan(row: &[f64]) -> (f64, i32) {
        gemm::scan(row)
    }
}

per_isa! {
    /// Adds `p v` to `sum` and `|p v|` to `size`, one product rounded on its own.
    fn weigh(p: f64, v: &[f32], sum: &mut [f64], size: &mut [f64]) {
        for ((a, z), v) in sum.iter_mut().zip(size).zip(v) {
            let t = p * f64::from(*v);
            *a += t;
            *z += t.abs();
        }
    }
}

per_isa! {
    /// Products of a query with a row of keys.
    fn dot(a: &[f64], b: &[f32]) -> f64 {
        let mut lanes = [0f64; 16];
        let ((ca, ra), (cb, rb)) = (a.as_chunks::<16>(), b.as_chunks::<16>());
        for (a, b) in ca.iter().zip(cb) {
            for j in 0..16 {
                lanes[j] += a[j] * f64::from(b[j]);
            }
        }
        let rest: f64 = ra.iter().zip(rb).map(|(a, b)| a * f64::from(*b)).sum();
        lanes.iter().sum::<f64>() + rest
    }
}

per_isa! {
    /// `sum v^2`.
    fn square(v: &[f32]) -> f64 {
        let mut lanes = [0f64; 16];
        let (chunks, rest) = v.as_chunks::<16>();
        for v in chunks {
            for j in 0..16 {
                lanes[j] += f64::from(v[j]) * f64::from(v[j]);
            }
        }
        lanes.iter().sum::<f64>() + rest.iter().map(|v| f64::from(*v) * f64::from(*v)).sum::<f64>()
    }
}

per_isa! {
    /// For every channel `sum_j taps[j, c] window[j dilation, c]` and the sum of magnitudes.
    fn convolve(window: &[f32], taps: &[f64], dilation: usize, sum: &mut [f64], size: &mut [f64]) {
        let width = sum.len();
        for (j, taps) in taps.chunks_exact(width).enumerate() {
            let x = &window[j * dilation * width..][..width];
            for (((s, z), w), x) in sum.iter_mut().zip(size.iter_mut()).zip(taps).zip(x) {
                let p = w * f64::from(*x);
                *s += p;
                *z += p.abs();
            }
        }
    }
}

/// `e^x` within 2 units in the last place for `-700 <= x <= 700`, branch-free.
#[inline(always)]
fn exp(x: f64) -> f64 {
    // ln 2 split so that n LN2_HI is exact for |n| < 2^11 (fdlibm's constants).
    const LN2_HI: f64 = 6.931_471_803_691_238e-1;
    const LN2_LO: f64 = 1.908_214_929_270_587_7e-10;
    // Adding it rounds to an integer, in the low bits of the sum.
    const ROUND: f64 = 6_755_399_441_055_744.0;
    let t = x * std::f64::consts::LOG2_E + ROUND;
    let n = t - ROUND;
    let r = (x - n * LN2_HI) - n * LN2_LO;
    // Taylor terms up to r^13 / 13!: the next is below 5e-18 for |r| <= ln 2 / 2.
    let mut p = 1.0 / 6_227_020_800.0;
    for c in
        [479_001_600.0, 39_916_800.0, 3_628_800.0, 362_880.0, 40_320.0, 5_040.0, 720.0, 120.0, 24.0, 6.0, 2.0]
    {
        p = p * r + 1.0 / c;
    }
    let y = 1.0 + (r + r * r * p);
    y * f64::from_bits(t.to_bits().wrapping_add(1023) << 52)
}

per_isa! {
    /// `out[i] = 1 / (1 + e^-x[i])` within 6 units; `false` where an argument is beyond 700 or no number.
    fn near_sigmoid(x: &[f64], out: &mut [f64]) -> bool {
        let mut near = true;
        for (x, o) in x.iter().zip(out) {
            near &= x.abs() <= 700.0;
            // e^-|x| cannot overflow.
            let e = exp(-x.abs());
            let part = if *x >= 0.0 { 1.0 } else { e };
            *o = part / (1.0 + e);
        }
        near
    }
}

/// `out[i] = 1 / (1 + e^-x[i])` within 6 units.
pub(super) fn sigmoid(x: &[f64], out: &mut [f64]) {
    if !near_sigmoid(x, out) {
        out.iter_mut().zip(x).for_each(|(o, x)| *o = x.sigmoid());
    }
}

/// Elements rounded together.
const BATCH: usize = 64;

/// Rounds `value(i)`, known to within its second part, to `out[i]`, element number `first + i`; `exact(i)` decides where
/// that does not.
pub(super) fn each(
    r: &RowRounder,
    first: usize,
    out: &mut [f32],
    value: impl Fn(usize) -> (f64, f64),
    exact: impl Fn(usize) -> Dd,
) {
    let fill = |at: usize, v: &mut [f64], bound: &mut [f64]| {
        for (i, (v, b)) in v.iter_mut().zip(bound).enumerate() {
            (*v, *b) = value(at + i);
        }
    };
    batches(r, first, out, fill, exact);
}

/// [`each`] of the products of row `t`.
pub(super) fn each_product(r: &RowRounder, first: usize, out: &mut [f32], p: &Products<'_>, t: usize) {
    batches(r, first, out, |at, v, bound| fill(p, t, at, v, bound), |i| p.exact(t, i));
}

/// [`each`] of `silu(g) u`.
pub(super) fn each_swiglu(r: &RowRounder, first: usize, out: &mut [f32], g: &[f32], u: &[f32]) {
    let fill = |at: usize, v: &mut [f64], bound: &mut [f64]| {
        let len = v.len();
        let (mut wide, mut gates) = ([0f64; BATCH], [0f64; BATCH]);
        let (wide, gates) = (&mut wide[..len], &mut gates[..len]);
        wide.iter_mut().zip(&g[at..]).for_each(|(w, g)| *w = f64::from(*g));
        sigmoid(wide, gates);
        for (i, u) in u[at..at + len].iter().enumerate() {
            v[i] = wide[i] * gates[i] * f64::from(*u);
            // 6 units of the sigmoid, one of each product.
            bound[i] = 8.5 * U * v[i].abs();
        }
    };
    let exact = |i: usize| Dd::of(f64::from(g[i])).silu() * Dd::of(f64::from(u[i]));
    batches(r, first, out, fill, exact);
}

/// [`each`] of a function of products over `n`: `value` gets such a quotient, its bound, and its sigmoid.
pub(super) fn each_gated(
    r: &RowRounder,
    out: &mut [f32],
    (p, t, n): (&Products<'_>, usize, f64),
    value: impl Fn(f64, f64, f64) -> (f64, f64),
    exact: impl Fn(usize) -> Dd,
) {
    let fill_all = |at: usize, v: &mut [f64], bound: &mut [f64]| {
        let mut gates = [0f64; BATCH];
        fill(p, t, at, v, bound);
        v.iter_mut().for_each(|v| *v /= n);
        sigmoid(v, &mut gates[..v.len()]);
        for ((v, b), gate) in v.iter_mut().zip(bound).zip(gates) {
            (*v, *b) = value(*v, *b / n, gate);
        }
    };
    batches(r, 0, out, fill_all, exact);
}

/// [`each`] with the values and bounds from an index on written by `fill`.
fn batches(
    r: &RowRounder,
    first: usize,
    out: &mut [f32],
    fill: impl Fn(usize, &mut [f64], &mut [f64]),
    exact: impl Fn(usize) -> Dd,
) {
    let (mut v, mut bound) = ([0f64; BATCH], [0f64; BATCH]);
    for (n, out) in out.chunks_mut(BATCH).enumerate() {
        let at = n * BATCH;
        let (v, bound) = (&mut v[..out.len()], &mut bound[..out.len()]);
        fill(at, v, bound);
        if !cut(r, first + at, v, bound, out) {
            for (i, o) in out.iter_mut().enumerate() {
                *o = r.round(first + at + i, v[i], bound[i], || exact(at + i));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sigmoids_side_by_side_stay_within_their_bound() {
        let x: Vec<f64> =
            (-70_000..70_000).map(|i| f64::from(i) * 0.009_973 + 1e-9 * f64::from(i % 97)).collect();
        let mut y = vec![0.0; x.len()];
        assert!(near_sigmoid(&x, &mut y));
        for (x, y) in x.iter().zip(&y) {
            let exact = Dd::of(*x).sigmoid();
            let error = (Dd::of(*y) - exact).hi.abs();
            assert!(error <= 6.0 * (f64::EPSILON / 2.0) * exact.hi, "{x}: {y:e}, {error:e}");
        }
        let mut out = [0.0; 2];
        assert!(!near_sigmoid(&[1.0, 701.0], &mut out) && !near_sigmoid(&[f64::NAN, 0.0], &mut out));
        sigmoid(&[-800.0, 801.0], &mut out);
        assert_eq!(out, [(-800.0f64).exp(), 1.0]);
    }
}
