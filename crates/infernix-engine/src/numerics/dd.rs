//! Reals in two precisions: f64 for the fast path, double-double (about 104 bits) where f64 cannot decide a rounding.
//!
//! An operation writes its formula once over [`Real`]. Algorithms: Dekker, Knuth (two-sum, two-product by fma),
//! Hida, Li and Bailey, "Library for double-double and quad-double arithmetic".

use std::ops::{Add, Div, Mul, Neg, Sub};

/// Arithmetic that a formula needs.
pub trait Real:
    Copy + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> + Div<Output = Self> + Neg<Output = Self>
{
    /// Exact conversion.
    fn of(x: f64) -> Self;
    /// Nearest f64.
    fn to_f64(self) -> f64;
    /// Square root of a non-negative value.
    fn sqrt(self) -> Self;
    /// e^x.
    fn exp(self) -> Self;
    /// ln(1 + x) for x >= 0.
    fn ln_1p(self) -> Self;

    /// `1 / (1 + e^-x)`.
    fn sigmoid(self) -> Self {
        // e^-|x| cannot overflow.
        let one = Self::of(1.0);
        if self.to_f64() >= 0.0 {
            one / (one + (-self).exp())
        } else {
            let e = self.exp();
            e / (one + e)
        }
    }

    /// `x sigma(x)`.
    fn silu(self) -> Self {
        self * self.sigmoid()
    }

    /// `ln(1 + e^x)`.
    fn softplus(self) -> Self {
        if self.to_f64() > 0.0 { self + (-self).exp().ln_1p() } else { self.exp().ln_1p() }
    }
}

impl Real for f64 {
    fn of(x: f64) -> Self {
        x
    }
    fn to_f64(self) -> f64 {
        self
    }
    fn sqrt(self) -> Self {
        f64::sqrt(self)
    }
    fn exp(self) -> Self {
        f64::exp(self)
    }
    fn ln_1p(self) -> Self {
        f64::ln_1p(self)
    }
}

/// Unevaluated sum hi + lo, |lo| <= ulp(hi) / 2.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dd {
    /// Leading part.
    pub hi: f64,
    /// The rest.
    pub lo: f64,
}

impl Dd {
    /// Zero.
    pub const ZERO: Dd = Dd { hi: 0.0, lo: 0.0 };

    fn quick(a: f64, b: f64) -> Dd {
        let s = a + b;
        // A non-finite sum has no remainder.
        Dd { hi: s, lo: if s.is_finite() { b - (s - a) } else { 0.0 } }
    }

    fn two_sum(a: f64, b: f64) -> Dd {
        let s = a + b;
        let t = s - a;
        Dd { hi: s, lo: if s.is_finite() { (a - (s - t)) + (b - t) } else { 0.0 } }
    }

    /// The exact product of two f64.
    pub fn product(a: f64, b: f64) -> Dd {
        let p = a * b;
        Dd { hi: p, lo: if p.is_finite() { a.mul_add(b, -p) } else { 0.0 } }
    }

    fn scale(self, s: f64) -> Dd {
        Dd { hi: self.hi * s, lo: self.lo * s }
    }
}

impl Add for Dd {
    type Output = Dd;
    fn add(self, o: Dd) -> Dd {
        let s = Dd::two_sum(self.hi, o.hi);
        let t = Dd::two_sum(self.lo, o.lo);
        let u = Dd::quick(s.hi, s.lo + t.hi);
        Dd::quick(u.hi, u.lo + t.lo)
    }
}

impl Neg for Dd {
    type Output = Dd;
    fn neg(self) -> Dd {
        Dd { hi: -self.hi, lo: -self.lo }
    }
}

impl Sub for Dd {
    type Output = Dd;
    fn sub(self, o: Dd) -> Dd {
        self + -o
    }
}

impl Mul for Dd {
    type Output = Dd;
    fn mul(self, o: Dd) -> Dd {
        let p = Dd::product(self.hi, o.hi);
        Dd::quick(p.hi, p.lo + (self.hi * o.lo + self.lo * o.hi))
    }
}

impl Div for Dd {
    type Output = Dd;
    fn div(self, o: Dd) -> Dd {
        let q1 = self.hi / o.hi;
        if !q1.is_finite() || o.hi.is_infinite() {
            return Dd { hi: q1, lo: 0.0 };
        }
        let r = self - o * Dd::of(q1);
        let q2 = r.hi / o.hi;
        let r = r - o * Dd::of(q2);
        Dd::quick(q1, q2) + Dd::of(r.hi / o.hi)
    }
}

const LN2: Dd = Dd { hi: std::f64::consts::LN_2, lo: 2.319_046_813_846_299_6e-17 };

impl Real for Dd {
    fn of(x: f64) -> Self {
        Dd { hi: x, lo: 0.0 }
    }

    fn to_f64(self) -> f64 {
        self.hi
    }

    fn sqrt(self) -> Self {
        if self.hi <= 0.0 || !self.hi.is_finite() {
            return Dd::of(self.hi.sqrt());
        }
        // Newton on 1/sqrt once from f64, Karp's form.
        let x = 1.0 / self.hi.sqrt();
        let ax = self.hi * x;
        Dd::two_sum(ax, (self - Dd::product(ax, ax)).hi * x * 0.5)
    }

    fn exp(self) -> Self {
        if !(-700.0..=700.0).contains(&self.hi) {
            return Dd::of(self.hi.exp());
        }
        let n = (self.hi / std::f64::consts::LN_2).round();
        // |r| <= ln2/2; r / 512 makes 9 Taylor terms exceed 106 bits; squaring nine times undoes it, kept as e^r - 1.
        let r = (self - LN2 * Dd::of(n)).scale(1.0 / 512.0);
        let mut term = r;
        let mut m = r;
        for k in 2..=10 {
            term = term * r / Dd::of(f64::from(k));
            m = m + term;
        }
        for _ in 0..9 {
            m = m.scale(2.0) + m * m;
        }
        let e = m + Dd::of(1.0);
        let half = (n / 2.0).floor();
        e.scale(half.exp2()).scale((n - half).exp2())
    }

    fn ln_1p(self) -> Self {
        if self.hi == 0.0 || !self.hi.is_finite() {
            return Dd::of(self.hi.ln_1p());
        }
        // y = y0 + 2 (x1 - e^y0) / (x1 + e^y0), x1 = 1 + x; tiny x as a series, where 1 + x would lose it.
        if self.hi.abs() < 1e-9 {
            let x = self;
            return x - x * x * Dd::of(0.5) + x * x * x / Dd::of(3.0) - x * x * x * x * Dd::of(0.25);
        }
        let y0 = Dd::of(self.hi.ln_1p());
        let e = y0.exp();
        let x1 = self + Dd::of(1.0);
        y0 + (x1 - e) * Dd::of(2.0) / (x1 + e)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(a: Dd, b: Dd, tol: f64) {
        let d = (a - b).hi.abs() / b.hi.abs().max(1e-300);
        assert!(d <= tol, "{a:?} {b:?} {d:e}");
    }

    #[test]
    fn identities_hold_to_a_hundred_bits() {
        for x in [1e-12, 0.001, 0.3, 1.0, 2.7, 17.0, 300.0] {
            let d = Dd::of(x) / Dd::of(3.0);
            close(d * Dd::of(3.0), Dd::of(x), 1e-31);
            close(d.sqrt() * d.sqrt(), d, 1e-30);
            close(d.exp() * (-d).exp(), Dd::of(1.0), 1e-28);
            close((d.exp() - Dd::of(1.0)).ln_1p(), d, 1e-31 / d.hi.min(1.0) + 1e-28);
            close(d.sigmoid() + (-d).sigmoid(), Dd::of(1.0), 1e-29);
            close(d.softplus(), d + (-d).softplus(), 1e-28);
        }
    }

    #[test]
    fn exp_of_one_is_e() {
        // e = 2.718281828459045235360287471352662498 in two f64.
        close(Dd::of(1.0).exp(), Dd { hi: std::f64::consts::E, lo: 1.445_646_891_729_250_2e-16 }, 1e-30);
    }
}
