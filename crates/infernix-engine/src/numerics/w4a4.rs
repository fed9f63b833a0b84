//! The canonical W4A4 product and SwiGLU: the scalar oracle every kernel must equal bit for bit.
//!
//! A 4-bit product is exact in integers, so no split, lane width or order can change it; only the few FP32 operations
//! around it round, and those are fixed here, one IEEE operation at a time:
//!
//! * **Input** (16 values `v`, calibrated multiplier g): `s = e4m3(amax / fl(6 g))`, nearest even, saturating at 448; `s = 0`
//!   makes the block's codes 0; else `d = fl(s g)`, `code = e2m1(fl(v / d))`, nearest even, saturating at 6.
//!   With a divisor G: `s = e4m3(fl(fl(amax G) / 6))`, `d = fl(s / G)`.
//! * **Product**: doubled codes c in {0, +-1, 2, 3, 4, 6, 8, 12} and integer scales `s 2^9 <= 229,376`;
//!   `S = sum_b (sum c_w c_a) s_w s_a` exactly in i64 (below 2^55 up to K = 2,560).
//! * **Output**: `fl(fl32(S) 2^-20 * fl(w g))`, or `fl(fl32(S) 2^-20 / fl(D G))` with divisors; then BF16.
//! * **SwiGLU**: `h = fl(fl(g / fl(1 + exp_c(-g))) u)`, then BF16.

/// Values that share a scale.
pub const BLOCK: usize = 16;

/// Twice the value of each E2M1 word.
pub const E2M1_DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// An E4M3 word times 2^9; NaN words are refused when a tensor is loaded.
pub fn e4m3_scaled(word: u8) -> i32 {
    let (e, m) = (i32::from(word >> 3 & 15), i32::from(word & 7));
    let v = if e == 0 { m } else { (8 + m) << (e - 1) };
    if word & 0x80 == 0 { v } else { -v }
}

/// E4M3 word of a non-negative value: nearest even, saturating; NaN saturates too.
pub fn e4m3_encode(x: f32) -> u8 {
    if x < 0.015625 {
        // Subnormals are multiples of 2^-9; 8 of them are the first normal word.
        return (x * 512.0).round_ties_even() as u8;
    }
    if x.is_nan() || x >= 464.0 {
        return 0x7E;
    }
    let bits = x.to_bits();
    let rounded = bits + 0x7_FFFF + (bits >> 20 & 1);
    (((rounded >> 20) - (120 << 3)) as u8).min(0x7E)
}

/// E2M1 word: nearest, ties to the even word, saturating; NaN gives 0.
pub fn e2m1_encode(x: f32) -> u8 {
    let a = x.abs();
    let code = u8::from(a > 0.25)
        + u8::from(a >= 0.75)
        + u8::from(a > 1.25)
        + u8::from(a >= 1.75)
        + u8::from(a > 2.5)
        + u8::from(a >= 3.5)
        + u8::from(a > 5.0);
    code | if x < 0.0 && code > 0 { 8 } else { 0 }
}

/// A calibrated scale in its source's own convention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scale {
    /// Value = code x block scale x this.
    Multiplier(f32),
    /// Value = code x block scale / this.
    Divisor(f32),
}

/// A quantised activation row: doubled codes, and block scales times 2^9.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct A4Row {
    /// `[K]`.
    pub codes2: Vec<i8>,
    /// `[K / 16]`.
    pub scales: Vec<i32>,
}

/// Quantises a row of BF16 values, K a multiple of 16.
pub fn quantise(x: &[f32], input: Scale) -> A4Row {
    let mut row = A4Row { codes2: vec![0; x.len()], scales: vec![0; x.len() / BLOCK] };
    for (b, v) in x.chunks_exact(BLOCK).enumerate() {
        let amax = v.iter().fold(0f32, |m, v| m.max(v.abs()));
        let s = match input {
            Scale::Multiplier(g) => e4m3_encode(amax / (6.0 * g)),
            Scale::Divisor(g) => e4m3_encode(amax * g / 6.0),
        };
        if s == 0 {
            continue;
        }
        row.scales[b] = e4m3_scaled(s);
        let value = row.scales[b] as f32 / 512.0;
        let d = match input {
            Scale::Multiplier(g) => value * g,
            Scale::Divisor(g) => value / g,
        };
        for (c, v) in row.codes2[b * BLOCK..].iter_mut().zip(v) {
            *c = E2M1_DOUBLED[usize::from(e2m1_encode(v / d))];
        }
    }
    row
}

/// Exact integer product of a weight row (E2M1 codes two a byte, low nibble = even k; E4M3 scale words) and an input.
pub fn dot(codes: &[u8], scales: &[u8], x: &A4Row) -> i64 {
    let mut sum = 0i64;
    for (b, &word) in scales.iter().enumerate() {
        let mut p = 0i32;
        for j in 0..BLOCK / 2 {
            let byte = codes[b * BLOCK / 2 + j];
            let k = b * BLOCK + 2 * j;
            p += i32::from(E2M1_DOUBLED[usize::from(byte & 15)]) * i32::from(x.codes2[k]);
            p += i32::from(E2M1_DOUBLED[usize::from(byte >> 4)]) * i32::from(x.codes2[k + 1]);
        }
        sum += i64::from(p) * i64::from(e4m3_scaled(word)) * i64::from(x.scales[b]);
    }
    sum
}

/// The FP32 factor (or divisor) of a product: `fl(weight x input)`. Both scales are of one convention.
pub fn combine(weight: Scale, input: Scale) -> Scale {
    match (weight, input) {
        (Scale::Divisor(d), Scale::Divisor(g)) => Scale::Divisor(d * g),
        (Scale::Multiplier(w), Scale::Multiplier(g)) => Scale::Multiplier(w * g),
        // Mixed conventions do not occur in one checkpoint; the exact quotient is still defined.
        (Scale::Multiplier(w), Scale::Divisor(g)) => Scale::Multiplier(w / g),
        (Scale::Divisor(d), Scale::Multiplier(g)) => Scale::Multiplier(g / d),
    }
}

/// The FP32 value that is then rounded to BF16.
pub fn finish(sum: i64, factor: Scale) -> f32 {
    let s = sum as f32 * (1.0 / 1_048_576.0);
    match factor {
        Scale::Multiplier(a) => s * a,
        Scale::Divisor(d) => s / d,
    }
}

/// `fl32(1 / k!)` for k = 0..=7: the Taylor polynomial of degree 7 is within 5.3e-9 relative on |r| <= ln(2)/2.
pub const EXP_C: [f32; 8] = [1.0, 1.0, 0.5, 1.0 / 6.0, 1.0 / 24.0, 1.0 / 120.0, 1.0 / 720.0, 1.0 / 5040.0];
/// High part of ln 2 (Cody-Waite), exact in 16 bits so that n * it is exact for |n| < 256.
pub const LN2_HI: f32 = 0.693_145_75;
/// ln 2 - [`LN2_HI`].
pub const LN2_LO: f32 = 1.428_606_8e-6;
/// Arguments are clamped to this range first; the ends give 0 and infinity.
pub const EXP_RANGE: (f32, f32) = (-105.0, 89.0);

/// The shared exponential: clamp; `n = rne(x log2 e)`; `r = fma(-n, LN2_LO, fma(-n, LN2_HI, x))`; Horner in fma over
/// [`EXP_C`] from k = 7; times `2^(n >> 1)`, then times `2^(n - (n >> 1))`. NaN stays NaN.
pub fn exp_c(x: f32) -> f32 {
    if x.is_nan() {
        return x;
    }
    let x = x.clamp(EXP_RANGE.0, EXP_RANGE.1);
    let n = (x * std::f32::consts::LOG2_E).round_ties_even();
    let r = (-n).mul_add(LN2_LO, (-n).mul_add(LN2_HI, x));
    let mut p = EXP_C[7];
    for c in EXP_C[..7].iter().rev() {
        p = p.mul_add(r, *c);
    }
    let n = n as i32;
    let half = n >> 1;
    let pow2 = |e: i32| f32::from_bits(((e + 127) as u32) << 23);
    p * pow2(half) * pow2(n - half)
}

/// `silu(g) u` in the fixed FP32 order; the caller rounds to BF16.
pub fn swiglu(g: f32, u: f32) -> f32 {
    g / (1.0 + exp_c(-g)) * u
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    #[test]
    fn every_e4m3_word_encodes_to_itself() {
        for w in 0..=0x7Eu8 {
            assert_eq!(e4m3_encode(e4m3_scaled(w) as f32 / 512.0), w);
        }
        assert_eq!(e4m3_encode(1e9), 0x7E);
        // Ties go to the even word.
        for w in 0..0x7Eu8 {
            let mid = (e4m3_scaled(w) as f32 + e4m3_scaled(w + 1) as f32) / 1024.0;
            assert_eq!(e4m3_encode(mid), if w % 2 == 0 { w } else { w + 1 });
        }
    }

    #[test]
    fn every_e2m1_word_encodes_to_itself_and_ties_go_to_even() {
        for w in 0..8u8 {
            assert_eq!(e2m1_encode(f32::from(E2M1_DOUBLED[usize::from(w)]) / 2.0), w);
        }
        for w in 0..7u8 {
            let mid = f32::from(E2M1_DOUBLED[usize::from(w)] + E2M1_DOUBLED[usize::from(w) + 1]) / 4.0;
            assert_eq!(e2m1_encode(mid), if w % 2 == 0 { w } else { w + 1 });
        }
        assert_eq!(e2m1_encode(f32::NEG_INFINITY), 15);
        assert_eq!(e2m1_encode(f32::NAN), 0);
    }

    #[test]
    fn the_shared_exponential_is_close_and_monotone_over_all_bf16_inputs() {
        let mut worst = 0f64;
        let mut checksum = 0u64;
        for bits in 0..=u16::MAX {
            let x = bf16::from_bits(bits).to_f32();
            let y = exp_c(x);
            if x.is_nan() {
                assert!(y.is_nan());
                continue;
            }
            checksum = checksum.rotate_left(5).wrapping_add(u64::from(y.to_bits()));
            let exact = f64::from(x).exp();
            if exact > 3.4e38 {
                assert!(y > 3.3e38 || y.is_infinite());
            } else if exact > 1.2e-38 {
                worst = worst.max(((f64::from(y) - exact) / exact).abs());
            } else {
                assert!(f64::from(y) <= 1.3e-38);
            }
        }
        assert!(worst < 1.3e-7, "{worst:e}");
        // A change of this number is a change of the arithmetic.
        assert_eq!(checksum, CHECKSUM, "{checksum:#x}");
    }
    const CHECKSUM: u64 = 0x5624_f40b_b2b5_f8b2;

    #[test]
    fn blocks_of_zeros_and_saturating_values_have_their_defined_codes() {
        let mut x = vec![0f32; 48];
        x[16] = 3.0e38;
        x[17] = 1.0;
        x[32..48].copy_from_slice(&[
            6.0, -6.0, 3.0, 0.25, 0.5, -0.75, 1.25, 5.0, 0., 1., 2., 4., -4., -2., -1., 1.5,
        ]);
        let row = quantise(&x, Scale::Multiplier(1.0));
        assert_eq!(&row.scales, &[0, 448 << 9, 1 << 9]);
        assert_eq!(row.codes2[16], 12);
        assert_eq!(row.codes2[17], 0);
        assert_eq!(&row.codes2[32..40], &[12, -12, 6, 0, 1, -2, 2, 8]);
        assert_eq!(quantise(&x, Scale::Divisor(1.0)), row);
    }

    #[test]
    fn the_integer_product_equals_the_real_one() {
        let x: Vec<f32> = (0..32).map(|i| bf16::from_f32((i as f32 - 15.5) * 0.37).to_f32()).collect();
        let row = quantise(&x, Scale::Multiplier(0.01));
        let codes: Vec<u8> = (0..16).map(|i| (i * 37 + 11) as u8).collect();
        let scales = [0x3A, 0x45];
        let mut exact = 0f64;
        for k in 0..32 {
            let c = codes[k / 2] >> (4 * (k % 2)) & 15;
            let w = f64::from(E2M1_DOUBLED[usize::from(c)]) / 2.0 * f64::from(e4m3_scaled(scales[k / 16]))
                / 512.0;
            exact += w * f64::from(row.codes2[k]) / 2.0 * f64::from(row.scales[k / 16]) / 512.0;
        }
        let f = combine(Scale::Multiplier(0.5), Scale::Multiplier(0.01));
        let y = f64::from(finish(dot(&codes, &scales, &row), f));
        assert!((y - exact * 0.005).abs() < 1e-6 * exact.abs());
    }
}
