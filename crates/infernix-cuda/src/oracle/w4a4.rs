//! The canonical W4A4 expert, written from its definition; kernels must equal it bit for bit.

use super::num::{Rng, bf16, e4m3, f32_to_bf16};

const DOUBLED: [i32; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// E4M3 word of a non-negative value: nearest even, saturating.
pub fn e4m3_encode(x: f32) -> u8 {
    // 127 words: count the midpoints passed, ties to the even word.
    let mut lo = 0u8;
    let mut hi = 0x7Eu8;
    if x >= 448.0 {
        return 0x7E;
    }
    while hi - lo > 1 {
        let mid = lo + (hi - lo) / 2;
        if e4m3(mid) <= x { lo = mid } else { hi = mid }
    }
    let m = (f64::from(e4m3(lo)) + f64::from(e4m3(lo + 1))) / 2.0;
    let x = f64::from(x);
    if x > m || (x == m && lo % 2 == 1) { lo + 1 } else { lo }
}

/// The shared exponential.
pub fn exp_c(x: f32) -> f32 {
    if x.is_nan() {
        return x;
    }
    let x = x.clamp(-105.0, 89.0);
    let n = (x * std::f32::consts::LOG2_E).round_ties_even();
    let r = (-n).mul_add(1.428_606_8e-6, (-n).mul_add(0.693_145_75, x));
    let mut p = 1.0f32 / 5040.0;
    for c in [1.0f32 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        p = p.mul_add(r, c);
    }
    let i = n as i32;
    let h = i >> 1;
    let pow2 = |e: i32| f32::from_bits(((e + 127) as u32) << 23);
    p * pow2(h) * pow2(i - h)
}

/// BF16 word of `(g / (1 + exp(-g))) * u`.
pub fn swiglu(g: f32, u: f32) -> u16 {
    f32_to_bf16(g / (1.0 + exp_c(-g)) * u)
}

/// A quantised row: doubled codes and integer scales.
pub struct A4 {
    codes: Vec<i32>,
    scales: Vec<i64>,
}

/// Quantises BF16 words with input scale `g` (a divisor if `divisor`).
pub fn quantise(x: &[u16], g: f32, divisor: bool) -> A4 {
    let mut codes = Vec::with_capacity(x.len());
    let mut scales = Vec::with_capacity(x.len() / 16);
    for block in x.chunks_exact(16) {
        let amax = block.iter().fold(0f32, |m, w| m.max(bf16(*w).abs()));
        let s = e4m3_encode(if divisor { amax * g / 6.0 } else { amax / (6.0 * g) });
        let d = if divisor { e4m3(s) / g } else { e4m3(s) * g };
        scales.push((e4m3(s) * 512.0) as i64);
        for w in block {
            let v = bf16(*w);
            let t = v.abs() / d;
            let c = [t > 0.25, t >= 0.75, t > 1.25, t >= 1.75, t > 2.5, t >= 3.5, t > 5.0];
            let c = if s == 0 { 0 } else { DOUBLED[c.iter().filter(|b| **b).count()] };
            codes.push(if v < 0.0 { -c } else { c });
        }
    }
    A4 { codes, scales }
}

impl A4 {
    /// Doubled codes and E4M3 scale words.
    pub fn words(&self) -> (Vec<i32>, Vec<u8>) {
        let word = |s: &i64| e4m3_encode(*s as f32 / 512.0);
        (self.codes.clone(), self.scales.iter().map(word).collect())
    }

    /// Code times block scale, without the input scale.
    pub fn values(&self) -> Vec<f64> {
        let value = |(i, c): (usize, &i32)| f64::from(*c) * 0.5 * self.scales[i / 16] as f64 / 512.0;
        self.codes.iter().enumerate().map(value).collect()
    }
}

/// Random rg16 record of one expert: gate/up rows interleaved, then down. Scale words cover the whole legal range with
/// some zeros, centred where products stay in range.
pub fn random_record(rng: &mut Rng, h: usize, i: usize) -> Vec<u8> {
    let units = 2 * i / 16 * (h / 16) + h / 16 * (i / 16);
    let mut r = rng.bytes(units * 144);
    for u in r.chunks_exact_mut(144) {
        for s in &mut u[128..] {
            *s = match *s % 32 {
                0 => 0,
                1 => *s & 0x7F,
                _ => 0x28 + (*s & 0x0F),
            }
            .min(0x7E);
        }
    }
    r
}

/// Exact sum of row `row` of a matrix of rg16 units at `base` with `k` columns.
fn dot(rec: &[u8], base: usize, row: usize, k: usize, x: &A4) -> i64 {
    let (group, r) = (row / 16, row % 16);
    let mut sum = 0i64;
    for b in 0..k / 16 {
        let unit = &rec[base + (group * (k / 16) + b) * 144..][..144];
        let mut p = 0i32;
        for q in 0..4 {
            for t in 0..4 {
                let byte = unit[32 * q + 4 * (r % 8) + t];
                let code = if r < 8 { byte & 15 } else { byte >> 4 };
                p += DOUBLED[usize::from(code)] * x.codes[16 * b + 4 * q + t];
            }
        }
        sum += i64::from(p) * (e4m3(unit[128 + r]) * 512.0) as i64 * x.scales[b];
    }
    sum
}

/// Values of row `row` of a matrix of rg16 units at `base` with `k` columns, without the tensor's scale.
pub fn row(rec: &[u8], base: usize, row: usize, k: usize) -> Vec<f64> {
    let (group, r) = (row / 16, row % 16);
    let mut out = Vec::with_capacity(k);
    for b in 0..k / 16 {
        let unit = &rec[base + (group * (k / 16) + b) * 144..][..144];
        for i in 0..16 {
            let byte = unit[32 * (i / 4) + 4 * (r % 8) + i % 4];
            let code = if r < 8 { byte & 15 } else { byte >> 4 };
            out.push(f64::from(DOUBLED[usize::from(code)]) * 0.5 * f64::from(e4m3(unit[128 + r])));
        }
    }
    out
}

/// Scales of one expert: fl32(weight * input) for gate, up, down, and the input scales.
#[derive(Clone, Copy, Debug)]
pub struct Scales {
    /// Products.
    pub alpha: [f32; 3],
    /// Inputs; gate and up share the first.
    pub input: [f32; 3],
    /// Both are divisors.
    pub divisor: bool,
}

/// One expert for one row of BF16 words: (h, y) as BF16 words.
pub fn expert(rec: &[u8], x: &[u16], i: usize, s: &Scales) -> (Vec<u16>, Vec<u16>) {
    let h = x.len();
    let fin = |sum: i64, a: f32| {
        let f = sum as f32 * (1.0 / 1_048_576.0);
        f32_to_bf16(if s.divisor { f / a } else { f * a })
    };
    let q = quantise(x, s.input[0], s.divisor);
    let mid: Vec<u16> = (0..i)
        .map(|j| {
            let g = bf16(fin(dot(rec, 0, 2 * j, h, &q), s.alpha[0]));
            let u = bf16(fin(dot(rec, 0, 2 * j + 1, h, &q), s.alpha[1]));
            swiglu(g, u)
        })
        .collect();
    let q = quantise(&mid, s.input[2], s.divisor);
    let base = 2 * i / 16 * (h / 16) * 144;
    let y = (0..h).map(|r| fin(dot(rec, base, r, i, &q), s.alpha[2])).collect();
    (mid, y)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_quantiser_saturates_and_breaks_ties_to_even() {
        assert_eq!(e4m3_encode(0.0), 0);
        assert_eq!(e4m3_encode(1e9), 0x7E);
        for w in 0..0x7Eu8 {
            assert_eq!(e4m3_encode(e4m3(w)), w);
            let mid = (e4m3(w) + e4m3(w + 1)) / 2.0;
            assert_eq!(e4m3_encode(mid), if w % 2 == 0 { w } else { w + 1 });
        }
    }

    #[test]
    fn the_exponential_is_accurate_over_bf16_inputs() {
        let mut worst = 0f64;
        for w in 0..=u16::MAX {
            let x = bf16(w);
            if x.is_nan() || !(-80.0..=80.0).contains(&x) {
                continue;
            }
            let e = f64::from(x).exp();
            worst = worst.max(((f64::from(exp_c(x)) - e) / e).abs());
        }
        assert!(worst < 3e-7, "{worst}");
        assert_eq!(exp_c(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp_c(f32::NEG_INFINITY), 0.0);
    }
}
