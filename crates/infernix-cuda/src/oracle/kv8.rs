//! int8 G64 keys and values: rotation and codes from their definition.

use super::num::f16;

/// FP16 word nearest to `v` (ties to even), for non-negative finite `v` below 65,504.
pub fn f16_word(v: f32) -> u16 {
    let (mut lo, mut hi) = (0u16, 0x7BFFu16);
    while hi - lo > 1 {
        let mid = lo + (hi - lo) / 2;
        if f16(mid) <= v { lo = mid } else { hi = mid }
    }
    let m = (f64::from(f16(lo)) + f64::from(f16(hi))) / 2.0;
    let v = f64::from(v);
    if v > m || (v == m && lo % 2 == 1) { hi } else { lo }
}

/// Normalised Sylvester-Hadamard, FP32, strides rising.
pub fn rotate(x: &mut [f32]) {
    let n = x.len();
    let mut stride = 1;
    while stride < n {
        for i in 0..n {
            if i & stride == 0 {
                let (a, b) = (x[i], x[i + stride]);
                (x[i], x[i + stride]) = (a + b, a - b);
            }
        }
        stride *= 2;
    }
    let scale = (1.0 / (n as f64).sqrt()) as f32;
    x.iter_mut().for_each(|v| *v *= scale);
}

/// Codes and FP16 scale words of a row.
pub fn encode(x: &[f32]) -> (Vec<i8>, Vec<u16>) {
    let (mut codes, mut scales) = (vec![], vec![]);
    for g in x.chunks(64) {
        let a = g.iter().fold(0f32, |m, v| m.max(v.abs()));
        let w = f16_word(a / 127.0);
        let s = f16(w);
        let inv = if s > 0.0 { 1.0 / s } else { 0.0 };
        scales.push(w);
        codes.extend(g.iter().map(|v| (v * inv).round_ties_even().clamp(-127.0, 127.0) as i8));
    }
    (codes, scales)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fp16_words_are_found_by_value() {
        for w in [0u16, 1, 0x3FF, 0x400, 0x3C00, 0x3C01, 0x7BFF] {
            assert_eq!(f16_word(f16(w)), w);
        }
        assert_eq!(f16_word((f16(0x3C00) + f16(0x3C01)) / 2.0), 0x3C00);
    }
}
