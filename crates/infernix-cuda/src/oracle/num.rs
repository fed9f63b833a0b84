//! Numbers: BF16, FP16, E4M3 words and a small generator.

/// SplitMix64.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// A generator with its own sequence for each seed.
    pub fn new(seed: u64) -> Self {
        Rng(seed)
    }
    /// 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }
    /// Uniform in 0..n.
    pub fn below(&mut self, n: usize) -> usize {
        (self.next_u64() % n.max(1) as u64) as usize
    }
    /// Uniform in [0, 1).
    pub fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
    }
    /// Roughly normal, unit variance.
    pub fn normal(&mut self) -> f64 {
        let w = self.next_u64();
        // Sum of four uniforms of 16 bits: variance 4/12.
        let s: f64 = (0..4).map(|i| f64::from((w >> (16 * i)) as u16) / 65536.0 - 0.5).sum();
        s * 3f64.sqrt()
    }
    /// Random bytes.
    pub fn bytes(&mut self, n: usize) -> Vec<u8> {
        let mut v = vec![0u8; n];
        for c in v.chunks_mut(8) {
            let w = self.next_u64().to_le_bytes();
            c.copy_from_slice(&w[..c.len()]);
        }
        v
    }
    /// Normal BF16 words of standard deviation `scale`.
    pub fn bf16(&mut self, n: usize, scale: f64) -> Vec<u16> {
        (0..n).map(|_| f32_to_bf16((self.normal() * scale) as f32)).collect()
    }
    /// Normal FP32 values.
    pub fn f32(&mut self, n: usize, scale: f64) -> Vec<f32> {
        (0..n).map(|_| (self.normal() * scale) as f32).collect()
    }
}

/// Value of a BF16 word.
pub fn bf16(w: u16) -> f32 {
    f32::from_bits(u32::from(w) << 16)
}

/// Nearest BF16, ties to even; NaN stays NaN.
pub fn f32_to_bf16(v: f32) -> u16 {
    if v.is_nan() {
        return 0x7FFF;
    }
    let b = v.to_bits();
    ((b + 0x7FFF + (b >> 16 & 1)) >> 16) as u16
}

/// `v` rounded to BF16.
pub fn rbf(v: f32) -> f32 {
    bf16(f32_to_bf16(v))
}

/// Half an ulp of BF16 at `v`.
pub fn bf16_half_ulp(v: f64) -> f64 {
    let e = v.abs().max(f64::from(f32::MIN_POSITIVE)).log2().floor();
    (e - 8.0).exp2()
}

/// Value of an FP16 word.
pub fn f16(w: u16) -> f32 {
    let (s, e, m) = (w >> 15, i32::from(w >> 10 & 31), f32::from(w & 1023));
    let v = if e == 0 { m * 2f32.powi(-24) } else { (1.0 + m / 1024.0) * 2f32.powi(e - 15) };
    if s == 1 { -v } else { v }
}

/// Value of an E4M3FN word.
pub fn e4m3(w: u8) -> f32 {
    let (e, m) = (i32::from(w >> 3 & 15), f32::from(w & 7));
    let v = if e == 0 { m * 2f32.powi(-9) } else { (1.0 + m / 8.0) * 2f32.powi(e - 7) };
    if w & 0x80 == 0 { v } else { -v }
}

/// Value of an E2M1 nibble.
pub fn e2m1(w: u8) -> f32 {
    let v = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(w & 7)];
    if w & 8 == 0 { v } else { -v }
}

/// Logistic function.
pub fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// `x sigma(x)`.
pub fn silu(x: f64) -> f64 {
    x * sigmoid(x)
}

/// Runs `f(i)` for i in 0..n on all cores and collects the results in order.
pub fn parallel<T: Send>(n: usize, f: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get).min(n.max(1));
    let mut out: Vec<Option<T>> = (0..n).map(|_| None).collect();
    let chunk = n.div_ceil(threads.max(1)).max(1);
    std::thread::scope(|s| {
        for (t, part) in out.chunks_mut(chunk).enumerate() {
            let f = &f;
            s.spawn(move || {
                for (i, o) in part.iter_mut().enumerate() {
                    *o = Some(f(t * chunk + i));
                }
            });
        }
    });
    out.into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_to_bf16_is_to_nearest_even() {
        assert_eq!(f32_to_bf16(f32::from_bits(0x3F80_8000)), 0x3F80);
        assert_eq!(f32_to_bf16(f32::from_bits(0x3F81_8000)), 0x3F82);
        assert_eq!(f32_to_bf16(f32::from_bits(0x3F80_8001)), 0x3F81);
        assert_eq!(f16(0x3C00), 1.0);
        assert_eq!(f16(0x0001), 2f32.powi(-24));
        assert_eq!(e4m3(0x7E), 448.0);
        assert_eq!(e4m3(0x01), 2f32.powi(-9));
        assert!((bf16_half_ulp(1.0) - 2f64.powi(-8)).abs() < 1e-12);
    }
}
