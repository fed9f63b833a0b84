//! K-quants: 256 values a block, 8 or 16 sub-blocks with integer scales of their own.
//!
//! Every function decodes one block of exactly the type's length. All products are exact in F32: an FP16 scale has 11
//! significant bits, a sub-block scale at most 7, a code at most 6.

use super::{Value, half};

/// 16 bytes (scale low nibble, minimum high nibble), 64 bytes of codes, d, dmin: d s q - dmin m, 2-bit q.
/// Bits 2l, 2l+1 of code byte 32h + m are value 128h + 32l + m; sub-blocks of 16.
pub(super) fn q2_k<T: Value>(b: &[u8], out: &mut [T]) {
    let (d, dmin) = (half(b, 80), half(b, 82));
    for (sub, out) in out.chunks_exact_mut(16).enumerate() {
        let scale = d * f32::from(b[sub] & 15);
        let minimum = dmin * f32::from(b[sub] >> 4);
        let (h, l, first) = (sub / 8, sub / 2 % 4, sub % 2 * 16);
        for (m, o) in out.iter_mut().enumerate() {
            let q = (b[16 + 32 * h + first + m] >> (2 * l)) & 3;
            *o = T::affine(scale, f32::from(q), -minimum);
        }
    }
}

/// 32 bytes of high bits, 64 of low codes, 12 of packed 6-bit scales, d: d (s - 32) (q - 4), 3-bit q. Low codes as in
/// [`q2_k`]; bit 4h + l of high byte m belongs to value 128h + 32l + m.
pub(super) fn q3_k<T: Value>(b: &[u8], out: &mut [T]) {
    let d = half(b, 108);
    let packed = &b[96..108];
    for (sub, out) in out.chunks_exact_mut(16).enumerate() {
        let low = if sub < 8 { packed[sub] & 15 } else { packed[sub - 8] >> 4 };
        let high = (packed[8 + sub % 4] >> (2 * (sub / 4))) & 3;
        let scale = d * (f32::from(low | high << 4) - 32.0);
        let (h, l, first) = (sub / 8, sub / 2 % 4, sub % 2 * 16);
        for (m, o) in out.iter_mut().enumerate() {
            let low = (b[32 + 32 * h + first + m] >> (2 * l)) & 3;
            let high = (b[first + m] >> (4 * h + l)) & 1;
            *o = T::scaled(scale, f32::from(low | high << 2) - 4.0);
        }
    }
}

/// Scale and minimum of sub-block `j` of eight, 6 bits each in 12 bytes: the first four plainly in the low 6 bits of
/// bytes j and j + 4; of the others the low nibbles in bytes 8.., the top bits in the top bits of the first eight.
#[inline]
fn scale_min(p: &[u8], j: usize) -> (f32, f32) {
    let (scale, minimum) = if j < 4 {
        (p[j] & 63, p[j + 4] & 63)
    } else {
        ((p[j + 4] & 15) | (p[j - 4] >> 6) << 4, (p[j + 4] >> 4) | (p[j] >> 6) << 4)
    };
    (f32::from(scale), f32::from(minimum))
}

/// d, dmin, 12 bytes of scales and minima, 128 bytes of nibbles: d s q - dmin m. Byte 32p + m holds values 64p + m (low)
/// and 64p + 32 + m (high); sub-blocks of 32.
pub(super) fn q4_k<T: Value>(b: &[u8], out: &mut [T]) {
    with_minimum(b, out, |b, sub, m| (b[16 + sub / 2 * 32 + m] >> (4 * (sub % 2))) & 15);
}

/// As [`q4_k`] with 32 bytes of fifth bits before the nibbles: bit j of byte m belongs to value m of sub-block j.
pub(super) fn q5_k<T: Value>(b: &[u8], out: &mut [T]) {
    with_minimum(b, out, |b, sub, m| {
        ((b[48 + sub / 2 * 32 + m] >> (4 * (sub % 2))) & 15) | ((b[16 + m] >> sub) & 1) << 4
    });
}

#[inline]
fn with_minimum<T: Value>(b: &[u8], out: &mut [T], code: impl Fn(&[u8], usize, usize) -> u8) {
    let (d, dmin) = (half(b, 0), half(b, 2));
    for (sub, out) in out.chunks_exact_mut(32).enumerate() {
        let (scale, minimum) = scale_min(&b[4..16], sub);
        let (scale, minimum) = (d * scale, dmin * minimum);
        for (m, o) in out.iter_mut().enumerate() {
            *o = T::affine(scale, f32::from(code(b, sub, m)), -minimum);
        }
    }
}

/// 128 bytes of low nibbles, 64 of high bit pairs, 16 signed scales, d: d s (q - 32), 6-bit q. For value 128h + 32l + m
/// the low nibble is in byte 64h + 32 (l % 2) + m, its high half where l > 1; the high pair in bits 2l of byte 32h + m.
pub(super) fn q6_k<T: Value>(b: &[u8], out: &mut [T]) {
    let d = half(b, 208);
    for (sub, out) in out.chunks_exact_mut(16).enumerate() {
        let scale = d * f32::from(b[192 + sub] as i8);
        let (h, l, first) = (sub / 8, sub / 2 % 4, sub % 2 * 16);
        for (m, o) in out.iter_mut().enumerate() {
            let low = (b[64 * h + 32 * (l % 2) + first + m] >> (4 * (l / 2))) & 15;
            let high = (b[128 + 32 * h + first + m] >> (2 * l)) & 3;
            *o = T::scaled(scale, f32::from(low | high << 4) - 32.0);
        }
    }
}
