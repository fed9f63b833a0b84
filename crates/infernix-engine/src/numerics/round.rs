//! Rounding at a boundary: correct (nearest even) or random, reproducible, and independent of order and threads.
//!
//! A value arrives as an f64 with a bound on its error. Rounding is monotone, so if both ends of the interval round to
//! the same number that is the answer; else the caller's formula is evaluated again in double-double.

use super::dd::{Dd, Real};
use crate::backend::{At, RowKey, Site};

/// How boundaries round.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rounding {
    /// Nearest, ties to even.
    #[default]
    Nearest,
    /// Up with probability (x - d) / (u - d); keyed by this seed and the rounding's site, position and element.
    Stochastic(u64),
}

/// A boundary format, by the bits an f64 loses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// 8 significant bits.
    Bf16,
    /// 24 significant bits.
    F32,
}

impl Target {
    const fn dropped(self) -> u32 {
        match self {
            Target::Bf16 => 45,
            Target::F32 => 29,
        }
    }

    /// Exponent of the smallest subnormal.
    const fn grain(self) -> i32 {
        match self {
            Target::Bf16 => -133,
            Target::F32 => -149,
        }
    }
}

/// Finalizer of splitmix64.
#[inline]
pub fn mix(mut v: u64) -> u64 {
    v = (v ^ (v >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    v = (v ^ (v >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    v ^ (v >> 31)
}

const GAMMA: u64 = 0x9E37_79B9_7F4A_7C15;

/// Rounds the elements of one row at one site.
#[derive(Clone, Copy, Debug)]
pub struct RowRounder {
    target: Target,
    /// Hash of (seed, stream, site, position); `None` rounds to nearest.
    key: Option<u64>,
}

impl RowRounder {
    /// The rounder of a row.
    pub fn new(rounding: Rounding, target: Target, site: Site, row: RowKey) -> Self {
        let key = match rounding {
            Rounding::Nearest => None,
            Rounding::Stochastic(seed) => {
                let mut h = mix(seed.wrapping_add(GAMMA));
                for part in [row.stream, u64::from(site.layer) << 16 | site.op as u64, row.position] {
                    h = mix(h ^ part).wrapping_add(GAMMA);
                }
                Some(h)
            }
        };
        RowRounder { target, key }
    }

    /// The rounder of row `r` of an operation.
    pub fn at(rounding: Rounding, target: Target, at: At<'_>, r: usize) -> Self {
        Self::new(rounding, target, at.site, at.rows[r])
    }

    /// Whether this rounds to nearest.
    pub fn is_nearest(&self) -> bool {
        self.key.is_none()
    }

    /// The number below 2^dropped that is added to the dropped bits of element `e`'s magnitude before it is cut.
    #[inline]
    fn noise(&self, element: usize) -> Option<u64> {
        let h = mix(self.key?.wrapping_add((element as u64).wrapping_mul(GAMMA)));
        Some(h >> (64 - self.target.dropped()))
    }

    /// The noise source of an FP32 target, for loops that vectorise; `None` rounds to nearest.
    pub fn f32_noise(&self) -> Option<Noise> {
        debug_assert!(self.target == Target::F32);
        self.key.map(Noise)
    }

    /// Rounds an exact f64.
    #[inline]
    pub fn exact(&self, element: usize, v: f64) -> f32 {
        grid(v, self.target, self.noise(element)) as f32
    }

    /// Rounds `v`, known to within `bound`; `formula` gives the value in double-double if that does not decide.
    #[inline]
    pub fn round(&self, element: usize, v: f64, bound: f64, formula: impl FnOnce() -> Dd) -> f32 {
        let noise = self.noise(element);
        if bound == 0.0 {
            return grid(v, self.target, noise) as f32;
        }
        let (a, b) = (grid(v - bound, self.target, noise), grid(v + bound, self.target, noise));
        if a == b {
            return a as f32;
        }
        self.decide(formula(), noise)
    }

    /// Rounds `v` known to within `bound`, elements from `first` on, without branches so that it vectorises; `false` where
    /// [`RowRounder::round`] must decide one of them at least. A decided element is what that gives.
    #[inline(always)]
    pub fn cut(&self, first: usize, v: &[f64], bound: &[f64], out: &mut [f32]) -> bool {
        match (self.target, self.key) {
            (Target::Bf16, None) => cut_nearest::<{ Target::Bf16.dropped() }>(v, bound, out),
            (Target::F32, None) => cut_nearest::<{ Target::F32.dropped() }>(v, bound, out),
            (Target::Bf16, Some(k)) => {
                cut_noisy::<{ Target::Bf16.dropped() }>(Noise(k), first, v, bound, out)
            }
            (Target::F32, Some(k)) => cut_noisy::<{ Target::F32.dropped() }>(Noise(k), first, v, bound, out),
        }
    }

    /// Rounds a double-double.
    #[cold]
    fn decide(&self, d: Dd, noise: Option<u64>) -> f32 {
        let (below, above) = (d.hi.next_down(), d.hi.next_up());
        let (a, c) = (grid(below, self.target, noise), grid(above, self.target, noise));
        if a == c || !d.hi.is_finite() {
            return grid(d.hi, self.target, noise) as f32;
        }
        // The threshold between neighbours a < c, exact in f64: their middle, or where the noise carries.
        let width = (1u64 << self.target.dropped()) as f64;
        let fraction = noise.map_or(0.5, |n| (width - n as f64) / width);
        let (inner, outer) = if a.abs() <= c.abs() && d.hi > 0.0 { (a, c) } else { (c, a) };
        let threshold = inner + (outer - inner) * fraction;
        let diff = (d - Dd::of(threshold)).hi * if outer > inner { 1.0 } else { -1.0 };
        // A formula within 2^-96 of the threshold lies on it.
        let chosen = if diff.abs() <= d.hi.abs() * 1.3e-29 {
            match noise {
                Some(_) => outer,
                None if (inner.to_bits() >> self.target.dropped()) & 1 == 0 => inner,
                None => outer,
            }
        } else if diff > 0.0 {
            outer
        } else {
            inner
        };
        chosen as f32
    }
}

/// Noise of one row with an FP32 target.
#[derive(Clone, Copy, Debug)]
pub struct Noise(u64);

impl Noise {
    /// Stochastic rounding of `v` known to within `bound`, without branches; `false` where [`RowRounder::round`] must decide.
    #[inline(always)]
    pub fn cut(self, element: usize, v: f64, bound: f64) -> (f32, bool) {
        self.cut_to::<{ Target::F32.dropped() }>(element, v, bound)
    }

    #[inline(always)]
    fn cut_to<const CUT: u32>(self, element: usize, v: f64, bound: f64) -> (f32, bool) {
        let mask = !((1u64 << CUT) - 1);
        let noise = mix(self.0.wrapping_add((element as u64).wrapping_mul(GAMMA))) >> (64 - CUT);
        let a = (v - bound).to_bits().wrapping_add(noise) & mask;
        let b = (v + bound).to_bits().wrapping_add(noise) & mask;
        (f64::from_bits(a) as f32, (a == b) & normal(v, bound))
    }
}

/// Whether the interval lies where a float is rounded by its bits: not near zero, nor infinite.
#[inline(always)]
fn normal(v: f64, bound: f64) -> bool {
    let size = v.abs();
    ((size >= f64::from(f32::MIN_POSITIVE) * 2.0) & (size < f64::MAX / 4.0)) | ((v == 0.0) & (bound == 0.0))
}

#[inline(always)]
fn cut_nearest<const CUT: u32>(v: &[f64], bound: &[f64], out: &mut [f32]) -> bool {
    let mask = !((1u64 << CUT) - 1);
    let half = (1u64 << (CUT - 1)) - 1;
    let even = |v: f64| (v.to_bits().wrapping_add(half + (v.to_bits() >> CUT & 1))) & mask;
    let mut unsure = 0u64;
    for ((v, b), o) in v.iter().zip(bound).zip(out) {
        let (x, y) = (even(v - b), even(v + b));
        unsure |= (x ^ y) | u64::from(!normal(*v, *b));
        *o = f64::from_bits(x) as f32;
    }
    unsure == 0
}

#[inline(always)]
fn cut_noisy<const CUT: u32>(noise: Noise, first: usize, v: &[f64], bound: &[f64], out: &mut [f32]) -> bool {
    let mut sure = true;
    for (i, ((v, b), o)) in v.iter().zip(bound).zip(out).enumerate() {
        let (value, decided) = noise.cut_to::<CUT>(first + i, *v, *b);
        sure &= decided;
        *o = value;
    }
    sure
}

/// Rounds an exact f64 to the target's grid; the result is exact in f32 (or infinite).
#[inline]
pub fn grid(v: f64, target: Target, noise: Option<u64>) -> f64 {
    let cut = target.dropped();
    let bits = v.to_bits();
    let exponent = (bits >> 52 & 0x7FF) as i32 - 1023;
    if exponent == 1024 {
        return v;
    }
    if exponent < -126 {
        return subnormal(v, target, noise);
    }
    let add = noise.unwrap_or((1 << (cut - 1)) - 1 + (bits >> cut & 1));
    f64::from_bits((bits + add) & !((1 << cut) - 1))
}

#[cold]
fn subnormal(v: f64, target: Target, noise: Option<u64>) -> f64 {
    let unit = f64::from(target.grain()).exp2();
    let scaled = v.abs() / unit;
    let n = match noise {
        None => scaled.round_ties_even(),
        Some(n) => {
            let width = (1u64 << target.dropped()) as f64;
            let whole = scaled.floor();
            whole + f64::from((scaled - whole) * width + n as f64 >= width)
        }
    };
    (n * unit).copysign(v)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Op;
    use half::bf16;

    fn rounder(rounding: Rounding, target: Target) -> RowRounder {
        let site = Site { layer: 3, op: Op::GdnO };
        RowRounder::new(rounding, target, site, RowKey { stream: 1, position: 17 })
    }

    #[test]
    fn nearest_equals_the_library_conversions() {
        let r = rounder(Rounding::Nearest, Target::Bf16);
        let f = rounder(Rounding::Nearest, Target::F32);
        let mut s = 1u64;
        for i in 0..200_000 {
            s = mix(s.wrapping_add(GAMMA));
            let x = f64::from(f32::from_bits(s as u32));
            if !x.is_finite() {
                continue;
            }
            assert_eq!(r.exact(i, x).to_bits(), bf16::from_f32(x as f32).to_f32().to_bits(), "{x:e}");
            let y = x * (1.0 + (s >> 40) as f64 * 1e-16);
            assert_eq!(f.exact(i, y).to_bits(), (y as f32).to_bits(), "{y:e}");
        }
    }

    #[test]
    fn ties_and_near_ties_are_decided_by_the_formula() {
        let r = rounder(Rounding::Nearest, Target::Bf16);
        let tie = 1.0 + 1.0 / 256.0;
        let dd = |lo| move || Dd { hi: tie, lo };
        assert_eq!(r.round(0, tie, 1e-12, dd(0.0)), 1.0);
        assert_eq!(r.round(0, tie, 1e-12, dd(1e-20)), 1.0078125);
        assert_eq!(r.round(0, tie, 1e-12, dd(-1e-20)), 1.0);
        assert_eq!(r.round(0, -tie, 1e-12, || Dd { hi: -tie, lo: -1e-20 }), -1.0078125);
        let odd = 1.0 + 3.0 / 256.0;
        assert_eq!(r.round(0, odd, 1e-12, || Dd::of(odd)), 1.015625);
    }

    #[test]
    fn stochastic_rounding_is_unbiased_and_keeps_exact_values() {
        let r = rounder(Rounding::Stochastic(42), Target::Bf16);
        assert_eq!(r.exact(5, 1.5), 1.5);
        assert_eq!(r.exact(5, 0.0), 0.0);
        for (x, frac) in [(1.0 + 0.3 / 128.0, 0.3), (-1.0 - 0.9 / 128.0, 0.9), (1e-40, 0.0)] {
            let n = 100_000;
            let sum: f64 = (0..n).map(|e| f64::from(r.exact(e, x))).sum();
            let step = if frac > 0.0 { 1.0 / 128.0 } else { (-133f64).exp2() };
            assert!((sum / n as f64 - x).abs() < 0.01 * step, "{x}");
        }
    }

    #[test]
    fn rounding_side_by_side_is_rounding_one_by_one() {
        let mut state = 5u64;
        for target in [Target::Bf16, Target::F32] {
            for rounding in [Rounding::Nearest, Rounding::Stochastic(9)] {
                let r = rounder(rounding, target);
                let mut decided = 0;
                for round in 0..4000usize {
                    let mut next = || {
                        state = mix(state.wrapping_add(GAMMA));
                        state
                    };
                    let mut value = |kind: u64| match kind % 16 {
                        0 => 0.0,
                        1 => -0.0,
                        2 => f64::from(f32::from_bits(next() as u32 & 0x80ff_ffff)),
                        3 => f64::from_bits(next()),
                        4 => f64::from(bf16::from_f64(next() as f64).to_f32()) * 1.00390625,
                        _ => f64::from(f32::from_bits(next() as u32)) * 1.000_000_013,
                    };
                    let v: [f64; 8] = std::array::from_fn(|i| value((round / 8 + i) as u64));
                    let bound: [f64; 8] = v.map(|v| [0.0, 1e-14, 1e-4][round % 3] * v.abs());
                    let mut out = [0f32; 8];
                    if !r.cut(3 * round, &v, &bound, &mut out) {
                        continue;
                    }
                    decided += 1;
                    for i in 0..8 {
                        let one = r.round(3 * round + i, v[i], bound[i], || panic!("decided above"));
                        assert_eq!(out[i].to_bits(), one.to_bits(), "{target:?} {:e} {:e}", v[i], bound[i]);
                    }
                }
                assert!(decided > 100, "{decided}");
            }
        }
    }

    #[test]
    fn stochastic_decisions_agree_with_the_exact_path() {
        let r = rounder(Rounding::Stochastic(7), Target::Bf16);
        for e in 0..10_000usize {
            let x = 1.0 + mix(e as u64) as f64 / u64::MAX as f64;
            let want = r.exact(e, x);
            // An absurd bound forces the slow path.
            assert_eq!(r.round(e, x, 1.0, || Dd::of(x)), want);
        }
    }
}
