//! Routing of synthetic models by Zipf's law.

use crate::driver::{Args, Device, DeviceBuffer, Kernel, Stream};
use crate::error::Result;
use std::sync::Arc;

/// The law over the experts of a layer.
pub struct ZipfRoute {
    kernel: Kernel,
    cdf: DeviceBuffer,
    /// The same on the host, for [`ZipfRoute::picks`].
    law: Vec<f32>,
    laws: DeviceBuffer,
    layers: usize,
    experts: usize,
    repeat: f32,
}

impl ZipfRoute {
    /// Rank i (from 0) has probability proportional to `(i + 1)^-s`; a pick is the one of the position before with probability
    /// `repeat`. `seeds`: of each layer's order and picks.
    pub fn new(dev: &Arc<Device>, experts: usize, s: f64, repeat: f32, seeds: &[u64]) -> Result<Self> {
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
        let laws: Vec<u64> = seeds
            .iter()
            .flat_map(|s| {
                let (a, b) = Self::permutation(experts, *s);
                [*s, a as u64, b as u64]
            })
            .collect();
        Ok(ZipfRoute {
            kernel: dev.kernel("zipf_route", 0)?,
            cdf: dev.upload(&cdf)?,
            law: cdf,
            laws: dev.upload(&laws)?,
            layers: seeds.len(),
            experts,
            repeat,
        })
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

    /// What the kernel picks at a position: lane k draws until no lower lane has its expert, all lanes side by side.
    pub fn picks(&self, position: u64, top: usize, seed: u64) -> Vec<i32> {
        let (a, b) = Self::permutation(self.experts, seed);
        // 32 lanes draw, `top` of them count.
        let mut at = [position; 32];
        for (k, t) in at.iter_mut().enumerate() {
            for _ in 0..64 {
                if *t == 0 || unit(mix64(seed ^ mix64(*t * 64 + k as u64) ^ 0x5bd1)) >= self.repeat {
                    break;
                }
                *t -= 1;
            }
        }
        let (mut ids, mut attempt, mut draw) = ([0usize; 32], [0usize; 32], [true; 32]);
        while draw.contains(&true) {
            for k in (0..32).filter(|k| draw[*k]) {
                let u = unit(mix64(seed ^ mix64((at[k] * 64 + k as u64) * 4096 + attempt[k] as u64)));
                let rank = self.law.partition_point(|c| *c <= u).min(self.experts - 1);
                let rank = if attempt[k] < 64 { rank } else { attempt[k] + k };
                ids[k] = (a * rank + b) % self.experts;
                attempt[k] += 1;
            }
            draw = std::array::from_fn(|k| k < top && ids[..k].contains(&ids[k]));
        }
        ids[..top].iter().map(|i| *i as i32).collect()
    }

    /// Layers it has a law for.
    pub fn layers(&self) -> usize {
        self.layers
    }

    /// Picks of `layers` layers from `layer` on: `ids` I32 and `weights` FP32 (or 0) `[layers][rows][top]`, `top` at most 32;
    /// `row_pos` I32 `[rows]`.
    #[expect(clippy::too_many_arguments, reason = "positions in, picks out")]
    pub fn launch(
        &self,
        s: &Stream,
        row_pos: u64,
        rows: usize,
        top: usize,
        layer: usize,
        layers: usize,
        ids: u64,
        weights: u64,
        pdl: bool,
    ) -> Result<()> {
        let args = Args::new().ptr(ids).ptr(weights).ptr(row_pos).ptr(self.cdf.ptr());
        let args = args.ints(&[rows, top, self.experts]).ptr(self.laws.ptr()).int(layer).f32(self.repeat);
        s.launch(&self.kernel, [rows.div_ceil(4) as u32, layers as u32, 1], 128, pdl, &args)
    }
}

fn mix64(v: u64) -> u64 {
    let v = v.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let v = (v ^ (v >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let v = (v ^ (v >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    v ^ (v >> 31)
}

fn unit(v: u64) -> f32 {
    (v >> 40) as f32 / 16_777_216.0
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
