//! Scalar conversions: E2M1, E4M3FN, E8M0, BF16, FP16 to and from FP32.
//!
//! Every decoder is exact. Every encoder rounds to nearest, ties to even, straight from its FP32 (or FP64) argument;
//! E2M1 and E4M3 saturate (OCP MX 1.0, OCP FP8 1.0: "satfinite"), BF16 and FP16 overflow to infinity as IEEE 754 does.

/// Values of the E2M1 codes 0..=15: bit 3 is the sign, so code 8 is -0.
pub const E2M1: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// Values of the E4M3FN words; 0x7F and 0xFF are NaN.
pub const E4M3: [f32; 256] = {
    let mut table = [0.0; 256];
    let mut i = 0;
    while i < 256 {
        table[i] = e4m3_value(i as u8);
        i += 1;
    }
    table
};

/// Largest finite E4M3FN magnitude.
pub const E4M3_MAX: f32 = 448.0;

/// Largest E2M1 magnitude.
pub const E2M1_MAX: f32 = 6.0;

const fn e4m3_value(word: u8) -> f32 {
    let sign = ((word as u32) & 0x80) << 24;
    let exponent = ((word >> 3) & 15) as u32;
    let mantissa = (word & 7) as u32;
    if exponent == 15 && mantissa == 7 {
        return f32::from_bits(sign | 0x7FC0_0000);
    }
    if exponent == 0 {
        // Subnormal: m * 2^-9, exact in FP32.
        let magnitude = mantissa as f32 * f32::from_bits((127 - 9) << 23);
        return f32::from_bits(sign | magnitude.to_bits());
    }
    f32::from_bits(sign | ((exponent + 127 - 7) << 23) | (mantissa << 20))
}

/// Value of an E4M3FN word (NaN for 0x7F and 0xFF).
#[inline]
#[must_use]
pub fn e4m3_to_f32(word: u8) -> f32 {
    E4M3[usize::from(word)]
}

/// Whether an E4M3FN word is a number.
#[inline]
#[must_use]
pub fn e4m3_is_finite(word: u8) -> bool {
    word & 0x7F != 0x7F
}

/// Whether an E4M3FN word may be a block scale: sign zero, finite (0x00..=0x7E).
#[inline]
#[must_use]
pub fn e4m3_is_scale(word: u8) -> bool {
    word <= 0x7E
}

/// Nearest E4M3FN word, ties to even, saturating at 448 (infinities too). NaN gives NaN of the same sign.
#[inline]
#[must_use]
pub fn e4m3_from_f32(value: f32) -> u8 {
    let bits = value.to_bits();
    let sign = ((bits >> 24) & 0x80) as u8;
    let magnitude = bits & 0x7FFF_FFFF;
    if magnitude > 0x7F80_0000 {
        return sign | 0x7F;
    }
    let word = if magnitude < (127 - 6) << 23 {
        // Below 2^-6: 2^14 has an ulp of 2^-9, so the addition rounds to the subnormal grid (and to 2^-6 where due).
        const MAGIC: f32 = 16384.0;
        (f32::from_bits(magnitude) + MAGIC).to_bits() - MAGIC.to_bits()
    } else {
        let odd = (magnitude >> 20) & 1;
        ((magnitude + 0x7_FFFF + odd) >> 20) - ((127 - 7) << 3)
    };
    sign | word.min(0x7E) as u8
}

/// Value of an E2M1 code; bits 4..8 are ignored.
#[inline]
#[must_use]
pub fn e2m1_to_f32(code: u8) -> f32 {
    E2M1[usize::from(code & 15)]
}

/// Nearest E2M1 code, ties to even, saturating at 6. The sign is kept, also of zeros. E2M1 has no NaN: a NaN gives
/// the largest magnitude, as NVIDIA's `cvt.satfinite` does.
#[inline]
#[must_use]
pub fn e2m1_from_f32(value: f32) -> u8 {
    let sign = ((value.to_bits() >> 28) & 8) as u8;
    let m = value.abs();
    if m.is_nan() {
        return sign | 7;
    }
    sign | e2m1_magnitude(m, 1.0)
}

/// Code 0..=7 of the E2M1 value nearest to `m / scale`, ties to even. The thresholds `scale * midpoint` are exact
/// when `scale` has at most 20 significant bits, so no division is needed and nothing is rounded twice.
#[inline]
pub(crate) fn e2m1_magnitude(m: f32, scale: f32) -> u8 {
    // At a midpoint the even code wins: 0, 2, 2, 4, 4, 6, 6.
    u8::from(m > 0.25 * scale)
        + u8::from(m >= 0.75 * scale)
        + u8::from(m > 1.25 * scale)
        + u8::from(m >= 1.75 * scale)
        + u8::from(m > 2.5 * scale)
        + u8::from(m >= 3.5 * scale)
        + u8::from(m > 5.0 * scale)
}

/// Value of an E8M0 word: 2^(word - 127); 255 is NaN.
#[inline]
#[must_use]
pub fn e8m0_to_f32(word: u8) -> f32 {
    match word {
        0 => f32::from_bits(0x0040_0000),
        255 => f32::NAN,
        w => f32::from_bits(u32::from(w) << 23),
    }
}

/// Whether an E8M0 word is a number.
#[inline]
#[must_use]
pub fn e8m0_is_finite(word: u8) -> bool {
    word != 255
}

/// E8M0 word of the power of two nearest to a positive value: ties (1.5 x 2^n) to the even exponent, saturating at
/// 2^-127 and 2^127. NaN, infinities, zero and negative values give 255.
#[inline]
#[must_use]
pub fn e8m0_from_f32(value: f32) -> u8 {
    if !(value > 0.0 && value.is_finite()) {
        return 255;
    }
    let bits = value.to_bits();
    let exponent = bits >> 23;
    let fraction = bits & 0x7F_FFFF;
    if exponent == 0 {
        // Subnormal: 2^-127 is 0x0040_0000 and 2^-126 is 0x0080_0000; their midpoint 0x0060_0000 ties to word 0.
        return u8::from(fraction > 0x0060_0000);
    }
    let up = fraction > 0x40_0000 || (fraction == 0x40_0000 && exponent & 1 == 1);
    (exponent + u32::from(up)).min(254) as u8
}

/// Value of a BF16 word.
#[inline]
#[must_use]
pub fn bf16_to_f32(word: u16) -> f32 {
    f32::from_bits(u32::from(word) << 16)
}

/// Nearest BF16 word, ties to even; overflow gives infinity, NaN a quiet NaN that keeps sign and high payload.
#[inline]
#[must_use]
pub fn bf16_from_f32(value: f32) -> u16 {
    let bits = value.to_bits();
    if bits & 0x7FFF_FFFF > 0x7F80_0000 {
        return (bits >> 16) as u16 | 0x40;
    }
    let odd = (bits >> 16) & 1;
    ((bits + 0x7FFF + odd) >> 16) as u16
}

/// Whether a BF16 word may be a row scale: sign zero, finite.
#[inline]
#[must_use]
pub fn bf16_is_scale(word: u16) -> bool {
    word < 0x7F80
}

/// Value of an FP16 word.
#[inline]
#[must_use]
pub fn f16_to_f32(word: u16) -> f32 {
    let sign = (u32::from(word) & 0x8000) << 16;
    let exponent = u32::from(word >> 10) & 31;
    let mantissa = u32::from(word) & 0x3FF;
    match exponent {
        0 => {
            let magnitude = mantissa as f32 * f32::from_bits((127 - 24) << 23);
            f32::from_bits(sign | magnitude.to_bits())
        }
        31 => f32::from_bits(sign | 0x7F80_0000 | (mantissa << 13)),
        e => f32::from_bits(sign | ((e + 127 - 15) << 23) | (mantissa << 13)),
    }
}

/// Nearest FP16 word, ties to even; from 65,520 on infinity; NaN a quiet NaN that keeps sign and high payload.
#[inline]
#[must_use]
pub fn f16_from_f32(value: f32) -> u16 {
    let bits = value.to_bits();
    let sign = ((bits >> 16) & 0x8000) as u16;
    let magnitude = bits & 0x7FFF_FFFF;
    if magnitude > 0x7F80_0000 {
        return sign | 0x7E00 | ((magnitude >> 13) & 0x3FF) as u16;
    }
    let word = if magnitude < (127 - 14) << 23 {
        // Below 2^-14: 1/2 has an ulp of 2^-24, the step of the subnormals.
        const MAGIC: f32 = 0.5;
        (f32::from_bits(magnitude) + MAGIC).to_bits() - MAGIC.to_bits()
    } else {
        let odd = (magnitude >> 13) & 1;
        ((magnitude + 0xFFF + odd) >> 13) - ((127 - 15) << 10)
    };
    sign | word.min(0x7C00) as u16
}

/// Whether an FP16 word may be a group scale: +0 or positive finite.
#[inline]
#[must_use]
pub fn f16_is_scale(word: u16) -> bool {
    word <= 0x7BFF
}
