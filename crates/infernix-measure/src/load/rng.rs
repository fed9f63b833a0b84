//! A small deterministic generator for workloads: the same numbers on every machine and in every version, since plans
//! are compared by their hash.

/// SplitMix64 (Steele, Lea, Flood 2014): state advances by the golden-ratio constant, output is mixed twice.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// From a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// From a seed and a name, so that parts of a workload do not shift each other's numbers.
    pub fn named(seed: u64, name: &str) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&seed.to_le_bytes());
        hasher.update(name.as_bytes());
        let bytes = hasher.finalize();
        Self(u64::from_le_bytes(*bytes.as_bytes().first_chunk().unwrap_or(&[0; 8])))
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let x = (self.0 ^ self.0 >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let x = (x ^ x >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ x >> 31
    }

    /// Uniform in [0, 1), 53 bits.
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Uniform below `n` (0 for n = 0).
    pub fn below(&mut self, n: usize) -> usize {
        ((u128::from(self.bits()) * n as u128) >> 64) as usize
    }

    /// Uniform in [a, b).
    pub fn range(&mut self, a: f64, b: f64) -> f64 {
        a + (b - a) * self.unit()
    }

    /// One of the items.
    pub fn choose<'a, T>(&mut self, items: &'a [T]) -> Option<&'a T> {
        items.get(self.below(items.len()))
    }

    /// Index drawn with these weights; 0 when all are zero.
    pub fn weighted(&mut self, weights: &[f64]) -> usize {
        let mut left = self.unit() * weights.iter().sum::<f64>();
        for (i, w) in weights.iter().enumerate() {
            if left < *w {
                return i;
            }
            left -= w;
        }
        weights.iter().rposition(|w| *w > 0.0).unwrap_or(0)
    }

    /// Standard normal (Box-Muller).
    fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.unit()).cos()
    }

    /// Gamma with this shape and mean 1 (Marsaglia and Tsang 2000; below shape 1 with their boost).
    pub fn gamma(&mut self, shape: f64) -> f64 {
        let (k, boost) =
            if shape < 1.0 { (shape + 1.0, (1.0 - self.unit()).powf(1.0 / shape)) } else { (shape, 1.0) };
        let d = k - 1.0 / 3.0;
        let c = 1.0 / (9.0 * d).sqrt();
        loop {
            let x = self.normal();
            let v = (1.0 + c * x).powi(3);
            if v <= 0.0 {
                continue;
            }
            let u = 1.0 - self.unit();
            if u.ln() < 0.5 * x * x + d - d * v + d * v.ln() {
                return boost * d * v / shape;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gamma_has_the_mean_and_variance_of_its_shape() {
        for shape in [0.3, 1.0, 4.0] {
            let mut rng = Rng::new(7);
            let values: Vec<f64> = (0..200_000).map(|_| rng.gamma(shape)).collect();
            let mean = values.iter().sum::<f64>() / values.len() as f64;
            let variance = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / values.len() as f64;
            assert!((mean - 1.0).abs() < 0.02, "shape {shape}: mean {mean}");
            assert!((variance * shape - 1.0).abs() < 0.06, "shape {shape}: variance {variance}");
        }
    }

    #[test]
    fn the_sequence_never_changes() {
        let mut rng = Rng::new(42);
        assert_eq!([rng.bits(), rng.bits()], [13_679_457_532_755_275_413, 2_949_826_092_126_892_291]);
        assert_ne!(Rng::named(1, "a").bits(), Rng::named(1, "b").bits());
        let mut rng = Rng::new(1);
        assert!((0..1000).all(|_| rng.below(3) < 3 && rng.weighted(&[0.0, 1.0, 0.0]) == 1));
    }
}
