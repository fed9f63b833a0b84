//! IQ types: codes are numbers of lattice points (see `grids`) or of a fixed non-linear scale.
//!
//! Every function decodes one block of exactly the type's length. All products are exact in F32.

use super::grids::{IQ1, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS};
use super::{Value, half, u16_at, u32_at};
use crate::scalar::f16_to_f32;

/// Eight signs from seven bits: the eighth makes the number of minus signs even.
#[inline]
fn even_signs(seven: u32) -> u8 {
    let seven = (seven & 127) as u8;
    seven | ((seven.count_ones() as u8 & 1) << 7)
}

/// Writes `scale` x point with the sign bits applied.
#[inline]
fn signed<T: Value, const D: usize>(out: &mut [T], point: [i8; D], scale: f32, signs: u8) {
    for (j, (o, p)) in out.iter_mut().zip(point).enumerate() {
        let p = f32::from(p);
        *o = T::scaled(scale, if (signs >> j) & 1 == 1 { -p } else { p });
    }
}

/// d, eight groups of (four point numbers, a word of four 7-bit sign sets and a 4-bit scale s): d (s + 1/2) / 4.
pub(super) fn iq2_xxs<T: Value>(b: &[u8], out: &mut [T]) {
    let d = half(b, 0);
    for (g, out) in out.chunks_exact_mut(32).enumerate() {
        let numbers = &b[2 + 8 * g..6 + 8 * g];
        let word = u32_at(b, 6 + 8 * g);
        let scale = d * (0.5 + (word >> 28) as f32) * 0.25;
        for (l, out) in out.chunks_exact_mut(8).enumerate() {
            signed(out, IQ2_XXS[usize::from(numbers[l])], scale, even_signs(word >> (7 * l)));
        }
    }
}

/// d, 32 words (9-bit point number, 7-bit sign set), 16 nibbles s, one per 16 values: d (s + 1/2) / 4.
pub(super) fn iq2_xs<T: Value>(b: &[u8], out: &mut [T]) {
    let d = half(b, 0);
    for (i, out) in out.chunks_exact_mut(8).enumerate() {
        let word = u16_at(b, 2 + 2 * i);
        let scale = d * (0.5 + nibble(&b[66..74], i / 2)) * 0.25;
        signed(out, IQ2_XS[usize::from(word & 511)], scale, even_signs(u32::from(word >> 9)));
    }
}

/// Nibble `i` of `b`, low half first.
#[inline]
fn nibble(b: &[u8], i: usize) -> f32 {
    f32::from((b[i / 2] >> (4 * (i % 2))) & 15)
}

/// d, 32 low bytes of point numbers, 32 sign bytes, 8 bytes with two more bits of each number, 16 nibbles s, one per 16
/// values: d (s + 1/2) / 4.
pub(super) fn iq2_s<T: Value>(b: &[u8], out: &mut [T]) {
    let d = half(b, 0);
    for (i, out) in out.chunks_exact_mut(8).enumerate() {
        let high = usize::from(b[66 + i / 4] >> (2 * (i % 4))) & 3;
        let scale = d * (0.5 + nibble(&b[74..82], i / 2)) * 0.25;
        signed(out, IQ2_S[usize::from(b[2 + i]) | high << 8], scale, b[34 + i]);
    }
}

/// d, 64 point numbers, eight words of four 7-bit sign sets and a 4-bit scale s: d (s + 1/2) / 2.
pub(super) fn iq3_xxs<T: Value>(b: &[u8], out: &mut [T]) {
    let d = half(b, 0);
    for (g, out) in out.chunks_exact_mut(32).enumerate() {
        let word = u32_at(b, 66 + 4 * g);
        let scale = d * (0.5 + (word >> 28) as f32) * 0.5;
        for (l, out) in out.chunks_exact_mut(4).enumerate() {
            let signs = even_signs(word >> (7 * (l / 2))) >> (4 * (l % 2));
            signed(out, IQ3_XXS[usize::from(b[2 + 8 * g + l])], scale, signs);
        }
    }
}

/// d, 64 low bytes of point numbers, 8 bytes of ninth bits, 32 sign bytes, 8 nibbles s, one per 32 values: d (1 + 2s).
pub(super) fn iq3_s<T: Value>(b: &[u8], out: &mut [T]) {
    let d = half(b, 0);
    for (i, out) in out.chunks_exact_mut(4).enumerate() {
        let high = usize::from(b[66 + i / 8] >> (i % 8)) & 1;
        let scale = d * (1.0 + 2.0 * nibble(&b[106..110], i / 8));
        let signs = b[74 + i / 2] >> (4 * (i % 2));
        signed(out, IQ3_S[usize::from(b[2 + i]) | high << 8], scale, signs);
    }
}

/// Writes `scale` x (point + shift), shift = -1/8 where `down`, else 1/8.
#[inline]
fn shifted<T: Value>(out: &mut [T], number: usize, scale: f32, down: bool) {
    let shift = if down { -0.125 } else { 0.125 };
    for (o, p) in out.iter_mut().zip(IQ1[number]) {
        *o = T::scaled(scale, f32::from(p) + shift);
    }
}

/// d, 32 low bytes of point numbers, eight words (four 3-bit high parts, 3-bit scale s, sign of the shift): d (2s + 1).
pub(super) fn iq1_s<T: Value>(b: &[u8], out: &mut [T]) {
    let d = half(b, 0);
    for (g, out) in out.chunks_exact_mut(32).enumerate() {
        let word = u16_at(b, 34 + 2 * g);
        let scale = d * f32::from(2 * ((word >> 12) & 7) + 1);
        for (l, out) in out.chunks_exact_mut(8).enumerate() {
            let high = usize::from(word >> (3 * l)) & 7;
            shifted(out, usize::from(b[2 + 4 * g + l]) | high << 8, scale, word & 0x8000 != 0);
        }
    }
}

/// FP16 scale word of an IQ1_M block: the top nibbles of its four scale words.
#[inline]
pub(super) fn iq1_m_scale(b: &[u8]) -> u16 {
    (0..4).fold(0, |word, i| word | (u16_at(b, 48 + 2 * i) >> 12) << (4 * i))
}

/// 32 low bytes of point numbers, 16 bytes (per 16 values two times: 3 high bits, sign of the shift), four words of four
/// 3-bit scales s, one per 16 values, and a nibble of d: d (2s + 1).
pub(super) fn iq1_m<T: Value>(b: &[u8], out: &mut [T]) {
    let d = f16_to_f32(iq1_m_scale(b));
    for (i, out) in out.chunks_exact_mut(8).enumerate() {
        let sub = i / 2;
        let s = (u16_at(b, 48 + 2 * (sub / 4)) >> (3 * (sub % 4))) & 7;
        let high = b[32 + sub] >> (4 * (i % 2));
        shifted(out, usize::from(b[i]) | usize::from(high & 7) << 8, d * f32::from(2 * s + 1), high & 8 != 0);
    }
}

/// The 16 levels of IQ4_NL and IQ4_XS.
pub const IQ4_LEVELS: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// Writes 32 levels: low nibbles of 16 bytes, then high nibbles.
#[inline]
fn levels<T: Value>(q: &[u8], scale: f32, out: &mut [T]) {
    for (i, &byte) in q.iter().enumerate() {
        out[i] = T::scaled(scale, f32::from(IQ4_LEVELS[usize::from(byte & 15)]));
        out[i + 16] = T::scaled(scale, f32::from(IQ4_LEVELS[usize::from(byte >> 4)]));
    }
}

/// d, 16 bytes of nibbles: d x level.
pub(super) fn iq4_nl<T: Value>(b: &[u8], out: &mut [T]) {
    levels(&b[2..18], half(b, 0), out);
}

/// d, eight high bit pairs, eight low nibbles of 6-bit scales s, 128 bytes of nibbles: d (s - 32) x level per 32 values.
pub(super) fn iq4_xs<T: Value>(b: &[u8], out: &mut [T]) {
    let (d, high) = (half(b, 0), u16_at(b, 2));
    for (g, out) in out.chunks_exact_mut(32).enumerate() {
        let s = nibble(&b[4..8], g) + f32::from(((high >> (2 * g)) & 3) << 4);
        levels(&b[8 + 16 * g..24 + 16 * g], d * (s - 32.0), out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eighth_sign_makes_the_number_even() {
        for seven in 0..128 {
            let signs = even_signs(seven);
            assert_eq!(u32::from(signs & 127), seven);
            assert_eq!(signs.count_ones() % 2, 0);
        }
    }
}
