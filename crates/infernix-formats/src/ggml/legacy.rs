//! Types without sub-block scales: Q4_0 to Q8_0, the 1- and 2-bit types, the ternary ones, MXFP4 and NVFP4.
//!
//! Every function decodes one block of exactly the type's length.

use super::{Value, half, u32_at};

/// 16 bytes of nibbles: value i is the low nibble of byte i, value i + n the high nibble, n = `q.len()`.
#[inline]
fn nibbles(q: &[u8], mut put: impl FnMut(usize, u8)) {
    for (i, &byte) in q.iter().enumerate() {
        put(i, byte & 15);
        put(i + q.len(), byte >> 4);
    }
}

/// d, 16 nibbles: (q - 8) d.
pub(super) fn q4_0<T: Value>(b: &[u8], out: &mut [T]) {
    let d = half(b, 0);
    nibbles(&b[2..18], |i, q| out[i] = T::scaled(d, f32::from(q) - 8.0));
}

/// d, m, 16 nibbles: q d + m.
pub(super) fn q4_1<T: Value>(b: &[u8], out: &mut [T]) {
    let (d, m) = (half(b, 0), half(b, 2));
    nibbles(&b[4..20], |i, q| out[i] = T::affine(d, f32::from(q), m));
}

/// d, 32 fifth bits, 16 nibbles: (q - 16) d.
pub(super) fn q5_0<T: Value>(b: &[u8], out: &mut [T]) {
    let (d, high) = (half(b, 0), u32_at(b, 2));
    nibbles(&b[6..22], |i, q| out[i] = T::scaled(d, fifth(q, high, i) - 16.0));
}

/// d, m, 32 fifth bits, 16 nibbles: q d + m.
pub(super) fn q5_1<T: Value>(b: &[u8], out: &mut [T]) {
    let (d, m, high) = (half(b, 0), half(b, 2), u32_at(b, 4));
    nibbles(&b[8..24], |i, q| out[i] = T::affine(d, fifth(q, high, i), m));
}

/// The 5-bit code of value `i`.
#[inline]
fn fifth(q: u8, high: u32, i: usize) -> f32 {
    f32::from(q) + (((high >> i) & 1) << 4) as f32
}

/// d, 32 bytes: q d.
pub(super) fn q8_0<T: Value>(b: &[u8], out: &mut [T]) {
    let d = half(b, 0);
    for (o, &q) in out.iter_mut().zip(&b[2..34]) {
        *o = T::scaled(d, f32::from(q as i8));
    }
}

/// d, 128 bits, bit i % 8 of byte i / 8: d where set, else -d.
pub(super) fn q1_0<T: Value>(b: &[u8], out: &mut [T]) {
    let d = half(b, 0);
    for (i, o) in out.iter_mut().enumerate() {
        *o = T::scaled(d, if (b[2 + i / 8] >> (i % 8)) & 1 == 1 { 1.0 } else { -1.0 });
    }
}

/// d, 64 2-bit codes in order: (q - 1) d.
pub(super) fn q2_0<T: Value>(b: &[u8], out: &mut [T]) {
    let d = half(b, 0);
    for (i, o) in out.iter_mut().enumerate() {
        *o = T::scaled(d, f32::from((b[2 + i / 4] >> (2 * (i % 4))) & 3) - 1.0);
    }
}

/// Digit `n` (most significant first) of a byte that holds five base-3 digits as a fraction: floor(byte 3^n / 256 * 3)
/// mod 3, computed in wrapping bytes.
#[inline]
fn trit(byte: u8, n: usize) -> f32 {
    const POWERS: [u8; 5] = [1, 3, 9, 27, 81];
    ((u16::from(byte.wrapping_mul(POWERS[n])) * 3) >> 8) as f32
}

/// 48 bytes of five ternary digits, 4 bytes of four, d: (q - 1) d. Digit n of byte m is value 32 n + m for the first 32
/// bytes, 160 + 16 n + m for the next 16 (m from 0 again), 240 + 4 n + m for the last 4.
pub(super) fn tq1_0<T: Value>(b: &[u8], out: &mut [T]) {
    let d = half(b, 52);
    for (first_byte, bytes, digits, first_value) in [(0, 32, 5, 0), (32, 16, 5, 160), (48, 4, 4, 240)] {
        for n in 0..digits {
            for m in 0..bytes {
                out[first_value + n * bytes + m] = T::scaled(d, trit(b[first_byte + m], n) - 1.0);
            }
        }
    }
}

/// 64 bytes of four 2-bit codes, d: (q - 1) d. Bits 2l, 2l+1 of byte 32h + m are value 128h + 32l + m.
pub(super) fn tq2_0<T: Value>(b: &[u8], out: &mut [T]) {
    let d = half(b, 64);
    for (i, o) in out.iter_mut().enumerate() {
        let (h, l, m) = (i / 128, i / 32 % 4, i % 32);
        *o = T::scaled(d, f32::from((b[32 * h + m] >> (2 * l)) & 3) - 1.0);
    }
}

/// Twice the E2M1 values: ggml keeps them as integers, so that code 8 is +0 here, not -0.
const E2M1_DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// E8M0 scale e, 16 bytes of nibbles: E2M1 x 2^(e - 127).
pub(super) fn mxfp4<T: Value>(b: &[u8], out: &mut [T]) {
    // Half the scale, as the integers are twice the values: 2^(e - 128), subnormal for e < 2.
    let d = f32::from_bits(if b[0] < 2 { 0x0020_0000 << b[0] } else { u32::from(b[0] - 1) << 23 });
    nibbles(&b[1..17], |i, q| out[i] = T::scaled(d, f32::from(E2M1_DOUBLED[usize::from(q)])));
}

/// Four UE4M3 scales, then 8 bytes of nibbles for each 16 values: E2M1 x scale. Words 0 and 0x7F are zero.
pub(super) fn nvfp4<T: Value>(b: &[u8], out: &mut [T]) {
    for s in 0..4 {
        let d = 0.5 * if b[s] == 0x7F { 0.0 } else { ue4m3(b[s]) };
        let out = &mut out[16 * s..16 * s + 16];
        nibbles(&b[4 + 8 * s..12 + 8 * s], |i, q| {
            out[i] = T::scaled(d, f32::from(E2M1_DOUBLED[usize::from(q)]))
        });
    }
}

/// E4M3 without a sign and without NaN: bit 7 is ignored.
#[inline]
fn ue4m3(word: u8) -> f32 {
    let (exponent, mantissa) = (u32::from(word >> 3) & 15, u32::from(word & 7));
    if exponent == 0 {
        return mantissa as f32 * f32::from_bits((127 - 9) << 23);
    }
    f32::from_bits(((exponent + 120) << 23) | (mantissa << 20))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mxfp4_scales_reach_both_ends() {
        let mut out = [0f32; 32];
        let mut block = [0x11u8; 17];
        for (e, want) in [(0u8, -128), (1, -127), (2, -126), (127, -1), (254, 126)] {
            block[0] = e;
            mxfp4(&block, &mut out);
            assert_eq!(f64::from(out[0]), f64::powi(2.0, want), "scale word {e}");
        }
    }

    #[test]
    fn every_ternary_byte_has_five_digits_below_three() {
        // The packer's rule: ceil(value x 256 / 243) with the first digit most significant.
        for v in 0..243u32 {
            let byte = (v * 256).div_ceil(243) as u8;
            let digits = (0..5).fold(0, |n, i| 3 * n + trit(byte, i) as u32);
            assert_eq!(digits, v);
        }
        assert!((0..=255).all(|b| (0..5).all(|n| trit(b, n) <= 2.0)));
    }

    #[test]
    fn nvfp4_scales_agree_with_e4m3() {
        for word in 0..0x7F {
            assert_eq!(ue4m3(word), crate::scalar::e4m3_to_f32(word));
        }
    }
}
