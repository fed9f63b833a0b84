//! Routing of synthetic models by Zipf's law.

use crate::driver::{Args, Device, DeviceBuffer, Kernel, Stream};
use crate::error::Result;
use std::sync::Arc;

/// The law over the experts of a layer.
pub struct ZipfRoute {
    kernel: Kernel,
    cdf: DeviceBuffer,
    experts: usize,
    repeat: f32,
}

impl ZipfRoute {
    /// Rank i (from 0) has probability proportional to `(i + 1)^-s`; a pick is the one of the position before with probability
    /// `repeat`.
    pub fn new(dev: &Arc<Device>, experts: usize, s: f64, repeat: f32) -> Result<Self> {
        let weights: Vec<f64> = (0..experts).map(|i| ((i + 1) as f64).powf(-s)).collect();
        let total: f64 = weights.iter().sum();
        let mut sum = 0.0;
        let mut cdf: Vec<f32> = weights
            .iter()
            .map(|w| {
                sum += w / total;
                sum as f32
            })
            .collect();
        if let Some(last) = cdf.last_mut() {
            *last = 2.0;
        }
        Ok(ZipfRoute { kernel: dev.kernel("zipf_route", 0)?, cdf: dev.upload(&cdf)?, experts, repeat })
    }

    /// Factor and offset of a layer's permutation: rank i is expert `(factor * i + offset) mod experts`.
    pub fn permutation(experts: usize, seed: u64) -> (usize, usize) {
        let mut factor = (seed % experts as u64) as usize | 1;
        let gcd = |mut a: usize, mut b: usize| {
            while b > 0 {
                (a, b) = (b, a % b);
            }
            a
        };
        while gcd(factor, experts) != 1 {
            factor += 2;
        }
        (factor % experts.max(1), (seed >> 32) as usize % experts.max(1))
    }

    /// `ids` I32 and `weights` FP32 `[rows][top]`, `top` at most 32; `row_pos` I32 `[rows]`.
    #[expect(clippy::too_many_arguments, reason = "positions in, picks out")]
    pub fn launch(
        &self,
        s: &Stream,
        row_pos: u64,
        rows: usize,
        top: usize,
        seed: u64,
        ids: u64,
        weights: u64,
        pdl: bool,
    ) -> Result<()> {
        let (a, b) = Self::permutation(self.experts, seed);
        let args = Args::new().ptr(ids).ptr(weights).ptr(row_pos).ptr(self.cdf.ptr());
        let args = args.ints(&[rows, top, self.experts, a, b]).ptr(seed).f32(self.repeat);
        s.launch(&self.kernel, [rows.div_ceil(4) as u32, 1, 1], 128, pdl, &args)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_a_permutation_of_the_experts() {
        for experts in [4usize, 256, 512, 60] {
            for seed in [0u64, 7, 0x1234_5678_9abc_def0, u64::MAX] {
                let (a, b) = ZipfRoute::permutation(experts, seed);
                let mut seen = vec![false; experts];
                (0..experts).for_each(|i| seen[(a * i + b) % experts] = true);
                assert!(seen.iter().all(|s| *s), "{experts} experts, seed {seed}");
            }
        }
    }
}
