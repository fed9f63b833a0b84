//! Scalar number formats and FP32 functions the kernels share.
//!
//! The functions are branch-free so that loops over them vectorise, and made of IEEE operations in a fixed order so
//! that every instruction set gives the same bits.

/// BF16 bits widened.
#[inline(always)]
pub fn f32_of(b: u16) -> f32 {
    f32::from_bits(u32::from(b) << 16)
}

/// FP32 rounded to the nearest BF16, ties to even. NaN stays NaN.
#[inline(always)]
pub fn bf16_of(x: f32) -> u16 {
    let u = x.to_bits();
    let rounded = u.wrapping_add(0x7fff + ((u >> 16) & 1)) >> 16;
    let nan = (u >> 16) | 0x40;
    (if u & 0x7fff_ffff > 0x7f80_0000 { nan } else { rounded }) as u16
}

/// FP32 whose low half is already zero, as BF16.
#[inline(always)]
pub(crate) fn bf16_exact(x: f32) -> u16 {
    (x.to_bits() >> 16) as u16
}

/// E4M3FN magnitude and sign; NaN words give 480, which no stored tensor holds.
#[inline(always)]
pub(crate) fn e4m3(b: u8) -> f32 {
    // The 7 magnitude bits sit where FP32 has its exponent's low end: rebias by a multiplication, exact for subnormals.
    let magnitude = f32::from_bits(u32::from(b & 0x7f) << 20) * f32::from_bits((120 + 127) << 23);
    f32::from_bits(magnitude.to_bits() | (u32::from(b & 0x80) << 24))
}

/// E8M0: 2^(b - 127).
#[inline(always)]
pub(crate) fn e8m0(b: u8) -> f32 {
    f32::from_bits(if b == 0 { 0x0040_0000 } else { u32::from(b) << 23 })
}

/// Values of E2M1 codes.
pub(crate) const E2M1: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

const LOG2_E: f32 = std::f32::consts::LOG2_E;
// ln 2 split so that n * LN2_HI is exact for |n| < 2^9 (Cody and Waite).
const LN2_HI: f32 = 355.0 / 512.0;
const LN2_LO: f32 = -2.121_944_4e-4;
/// Adding and subtracting it rounds to an integer, ties to even, for |x| < 2^22.
const ROUND: f32 = 12_582_912.0;

/// `e^x` within 2 units in the last place on [-87.3, 88.3]; arguments outside are moved to the nearer end.
#[inline(always)]
#[expect(clippy::excessive_precision, reason = "coefficients as published, rounded by the compiler")]
pub(crate) fn exp(x: f32) -> f32 {
    let x = if x > -87.3 { x } else { -87.3 };
    let x = if x < 88.3 { x } else { 88.3 };
    let t = x.mul_add(LOG2_E, ROUND);
    let n = t - ROUND;
    let r = n.mul_add(-LN2_HI, x);
    let r = n.mul_add(-LN2_LO, r);
    // Degree 5 for (e^r - 1 - r) / r^2 on |r| <= ln 2 / 2: the Cephes coefficients of expf.
    let p = 1.987_569_15e-4f32;
    let p = p.mul_add(r, 1.398_199_950_7e-3);
    let p = p.mul_add(r, 8.333_451_907_3e-3);
    let p = p.mul_add(r, 4.166_579_589_4e-2);
    let p = p.mul_add(r, 1.666_666_545_9e-1);
    let p = p.mul_add(r, 5.000_000_120_1e-1);
    let y = p.mul_add(r * r, r) + 1.0;
    y * f32::from_bits(t.to_bits().wrapping_add(127) << 23)
}

/// Logistic function.
#[inline(always)]
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// `x sigmoid(x)`.
#[inline(always)]
pub(crate) fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// Sum of 16 lanes in the order every kernel uses: halves onto each other.
#[inline(always)]
pub(crate) fn tree(mut l: [f32; 16]) -> f32 {
    for i in 0..8 {
        l[i] += l[i + 8];
    }
    for i in 0..4 {
        l[i] += l[i + 4];
    }
    (l[0] + l[2]) + (l[1] + l[3])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_rounds_to_nearest_even_and_keeps_nan() {
        for bits in (0..=u32::MAX).step_by(9973) {
            let x = f32::from_bits(bits);
            let (ours, theirs) = (f32_of(bf16_of(x)), half::bf16::from_f32(x).to_f32());
            assert!(ours.to_bits() == theirs.to_bits() || (ours.is_nan() && theirs.is_nan()), "{bits:08x}");
        }
    }

    #[test]
    fn exp_is_within_two_ulp() {
        let mut worst = 0f64;
        for i in 0..2_000_000 {
            let x = -87.3 + i as f32 * (175.6 / 2e6);
            let exact = f64::from(x).exp();
            let ulp = f64::from(f32::from_bits((exact as f32).to_bits() + 1)) - f64::from(exact as f32);
            worst = worst.max((f64::from(exp(x)) - exact).abs() / ulp);
        }
        assert!(worst < 2.0, "{worst} ulp");
    }

    #[test]
    fn sigmoid_and_silu_keep_their_limits() {
        assert_eq!(sigmoid(0.0), 0.5);
        assert_eq!(sigmoid(100.0), 1.0);
        assert!(sigmoid(-100.0) < 1e-37);
        assert!(silu(-1e30).abs() < 1e-6);
        assert_eq!(silu(1e30), 1e30);
    }

    #[test]
    fn e4m3_words_decode_exactly() {
        for b in 0..=255u8 {
            let (e, m) = (i32::from((b >> 3) & 15), f32::from(b & 7));
            let v = if e == 0 { m * 2f32.powi(-9) } else { (1.0 + m / 8.0) * 2f32.powi(e - 7) };
            assert_eq!(e4m3(b), if b & 0x80 != 0 { -v } else { v });
        }
    }
}
