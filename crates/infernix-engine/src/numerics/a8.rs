//! 8-bit activations: int8 per 32 values, `s = fl32(amax / 127)`, codes to nearest even.

/// Values that share a scale.
pub const GROUP: usize = 32;

/// Quantises up to 32 values; gives the scale. `code = rne(fl32(x / s))`, at most 127 in magnitude.
pub fn quantise(x: &[f32], codes: &mut [i8]) -> f32 {
    let amax = x.iter().fold(0f32, |m, v| m.max(v.abs()));
    let s = amax / 127.0;
    for (c, v) in codes.iter_mut().zip(x) {
        // A zero or vanishing scale leaves zeros.
        *c = if s > 0.0 { (v / s).round_ties_even().clamp(-127.0, 127.0) as i8 } else { 0 };
    }
    s
}

/// Replaces a row by the values its 8-bit form stands for, `code x s` exactly.
pub fn quantise_in_place(row: &mut [f64]) {
    let mut codes = [0i8; GROUP];
    for group in row.chunks_mut(GROUP) {
        let x: Vec<f32> = group.iter().map(|v| *v as f32).collect();
        let s = quantise(&x, &mut codes);
        for (v, c) in group.iter_mut().zip(&codes) {
            *v = f64::from(*c) * f64::from(s);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_value_keeps_127_and_zeros_stay() {
        let mut codes = [1i8; 4];
        let s = quantise(&[2.0, -1.0, 0.0, 0.008], &mut codes);
        assert_eq!(codes, [127, -64, 0, 1]);
        assert_eq!(s, 2.0 / 127.0);
        assert_eq!(quantise(&[0.0; 4], &mut codes), 0.0);
        assert_eq!(codes, [0; 4]);
    }
}
