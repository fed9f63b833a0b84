//! The canonical order of sums of experts whose activations keep 16 bits, written from its definition.

/// Sum over a row of `codes` times `x` in scale groups of `group` values (the last may be shorter): products
/// of a group by fma in rising k, groups by fma within eight spans, spans pairwise.
pub fn sum(codes: &[f32], scales: &[f32], x: &[f32], group: usize) -> f32 {
    let groups = codes.len().div_ceil(group);
    let mut spans = [0f32; 8];
    for (s, v) in spans.iter_mut().enumerate() {
        for g in s * groups / 8..(s + 1) * groups / 8 {
            let k = g * group..((g + 1) * group).min(codes.len());
            let t = codes[k.clone()].iter().zip(&x[k]).fold(0f32, |t, (c, x)| c.mul_add(*x, t));
            *v = scales[g].mul_add(t, *v);
        }
    }
    let s = spans;
    ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]))
}

#[cfg(test)]
mod tests {
    #[test]
    fn groups_are_rounded_within_spans_and_spans_in_pairs() {
        // Nine groups of two values: the last span has two groups, the others one.
        let big = 2f32.powi(24);
        let mut codes = [0f32; 18];
        let (ones, scales) = ([1f32; 18], [1f32; 9]);
        // Within a group 1 is lost beside 2^24; as another group of the last span too.
        (codes[14], codes[15], codes[16]) = (big, 1.0, 1.0);
        assert_eq!(super::sum(&codes, &scales, &ones, 2), big);
        // In one span 1 + 1 come before 2^24 of another.
        (codes[14], codes[15], codes[0]) = (1.0, 0.0, big);
        assert_eq!(super::sum(&codes, &scales, &ones, 2), big + 2.0);
    }
}
