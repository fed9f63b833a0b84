//! Random matrices in every stored format, with their exact values.

use super::num::{Rng, bf16, e2m1, e4m3, f16, f32_to_bf16};
use crate::driver::Device;
use crate::error::Result;
use crate::kernels::linear::{Linear, WeightFormat};
use crate::kernels::nvfp4::{self, Nvfp4Order};
use std::sync::Arc;

/// Words of a matrix `[n, k]`, rows padded to `k_pad` with zero codes.
#[derive(Clone, Debug)]
pub struct Words {
    format: WeightFormat,
    n: usize,
    k: usize,
    k_pad: usize,
    codes: Vec<u8>,
    high: Vec<u8>,
    scales: Vec<u8>,
    row_scale: Vec<u16>,
    tensor_scale: f32,
    divide: bool,
}

impl Words {
    /// Codes over their whole legal range, scales spread over some octaves, row norms near one. `k_align` is the padding
    /// of the stored rows (at least the kernel's step).
    pub fn random(rng: &mut Rng, format: WeightFormat, n: usize, k: usize, k_align: usize) -> Self {
        let k_pad = k.div_ceil(k_align.max(format.step())) * k_align.max(format.step());
        let (cb, hb, sb) = format.row_bytes(k_pad);
        let norm = 1.0 / (k as f64).sqrt();
        let mut w = Words {
            format,
            n,
            k,
            k_pad,
            codes: vec![],
            high: vec![],
            scales: vec![],
            row_scale: vec![],
            tensor_scale: 1.0,
            divide: false,
        };
        let group = |rng: &mut Rng, code_rms: f64| -> u16 {
            // FP16 scale of about norm / code_rms, within a factor of two.
            let v = norm / code_rms * (0.5 + rng.unit() * 1.5);
            let mut best = ((v.log2().floor() + 15.0).max(0.0) as u16) << 10 | (rng.next_u64() as u16 & 1023);
            if rng.below(64) == 0 {
                best = rng.next_u64() as u16 & 0x3FF; // subnormal scales are legal
            }
            best
        };
        match format {
            WeightFormat::Bf16 => {
                for _ in 0..n {
                    for i in 0..k_pad {
                        let v = if i < k { f32_to_bf16((rng.normal() * norm) as f32) } else { 0 };
                        w.codes.extend(v.to_le_bytes());
                    }
                }
            }
            WeightFormat::Q8G32 => {
                w.codes = rng.bytes(n * cb);
                w.codes.iter_mut().for_each(|c| *c = if *c == 0x80 { 0x7F } else { *c });
                w.scales = (0..n * sb / 2).flat_map(|_| group(rng, 73.0).to_le_bytes()).collect();
            }
            WeightFormat::Q4G64 | WeightFormat::Q5G64 | WeightFormat::Q6G64 => {
                let rms = match format {
                    WeightFormat::Q4G64 => 4.6,
                    WeightFormat::Q5G64 => 9.2,
                    _ => 18.5,
                };
                w.codes = rng.bytes(n * cb);
                w.high = rng.bytes(n * hb);
                w.scales = (0..n * sb / 2).flat_map(|_| group(rng, rms).to_le_bytes()).collect();
            }
            WeightFormat::Nvfp4 => {
                w.codes = rng.bytes(n * cb);
                w.scales = rng.bytes(n * sb);
                w.scales
                    .iter_mut()
                    .for_each(|s| *s = if *s & 15 == 0 { *s & 0x7F } else { 0x30 + (*s & 0x1F) }.min(0x7E));
                w.tensor_scale = (norm / 12.0) as f32;
                if rng.below(2) == 0 {
                    w.tensor_scale = 1.0 / w.tensor_scale;
                    w.divide = true;
                }
            }
            WeightFormat::Fp8Row => {
                w.codes = rng.bytes(n * cb);
                w.codes.iter_mut().for_each(|c| *c = if *c & 0x7F == 0x7F { 0x7E } else { *c });
                w.row_scale =
                    (0..n).map(|_| f32_to_bf16((norm / 110.0 * (0.5 + rng.unit())) as f32)).collect();
                // A third of the tensors have one factor instead.
                if rng.below(3) == 0 {
                    w.row_scale.clear();
                    w.tensor_scale = (norm / 110.0) as f32;
                }
            }
            WeightFormat::Fp8Block => {
                w.codes = rng.bytes(n * cb);
                w.codes.iter_mut().for_each(|c| *c = if *c & 0x7F == 0x7F { 0x7E } else { *c });
                w.scales = (0..n.div_ceil(128) * k_pad.div_ceil(128))
                    .flat_map(|_| ((norm / 110.0 * (0.5 + rng.unit())) as f32).to_le_bytes())
                    .collect();
            }
            WeightFormat::Mxfp8 => {
                w.codes = rng.bytes(n * cb);
                w.codes.iter_mut().for_each(|c| *c = if *c & 0x7F == 0x7F { 0x7E } else { *c });
                let centre = 127 + (norm / 110.0).log2().round() as i32;
                // The smallest words are legal: 2^-127 is a subnormal.
                w.scales = (0..n * sb)
                    .map(|_| {
                        if rng.below(64) == 0 {
                            rng.below(3) as u8
                        } else {
                            (centre - 2 + rng.below(4) as i32) as u8
                        }
                    })
                    .collect();
            }
        }
        // Zero codes beyond k.
        for r in 0..n {
            for i in k..k_pad {
                match format {
                    WeightFormat::Bf16 => {}
                    WeightFormat::Q8G32
                    | WeightFormat::Fp8Row
                    | WeightFormat::Fp8Block
                    | WeightFormat::Mxfp8 => w.codes[r * cb + i] = 0,
                    _ => {
                        w.codes[r * cb + i / 2] &= if i % 2 == 0 { 0xF0 } else { 0x0F };
                        if format == WeightFormat::Q5G64 {
                            w.high[r * hb + i / 8] &= !(1 << (i % 8));
                        } else if format == WeightFormat::Q6G64 {
                            w.high[r * hb + i / 4] &= !(3 << (i % 4 * 2));
                        }
                    }
                }
            }
        }
        w
    }

    /// Block FP8 whose rows are not padded, as expert records hold them (K a multiple of 16).
    pub fn random_unpadded(rng: &mut Rng, n: usize, k: usize) -> Self {
        let mut w = Self::random(rng, WeightFormat::Fp8Block, n, k.div_ceil(64) * 64, 64);
        let stored = w.k_pad;
        w.codes = w.codes.chunks(stored).flat_map(|r| r[..k].to_vec()).collect();
        (w.k, w.k_pad) = (k, k);
        w
    }

    /// What multiplies a whole row: row scale, or the tensor's factor.
    pub fn factor(&self, r: usize) -> f64 {
        let t = f64::from(self.tensor_scale);
        let t = if self.divide { 1.0 / t } else { t };
        self.row_scale.get(r).map_or(t, |s| f64::from(bf16(*s)))
    }

    /// Exact codes of row `r`, `k_pad` of them, the scale of each `group` of them (1 where there are none), and `group`.
    pub fn exact(&self, r: usize) -> (Vec<f32>, Vec<f32>, usize) {
        use WeightFormat as F;
        let (cb, hb, sb) = self.format.row_bytes(self.k_pad);
        let codes = &self.codes[r * cb..(r + 1) * cb];
        let high = &self.high[r * hb..(r + 1) * hb];
        let scales = if self.format == F::Fp8Block {
            let p = self.format.scale_pitch(self.k_pad);
            &self.scales[r / 128 * p..(r / 128 + 1) * p]
        } else {
            &self.scales[r * sb..(r + 1) * sb]
        };
        let nibble = |i: usize| codes[i / 2] >> (i % 2 * 4) & 15;
        let code = |i: usize| match self.format {
            F::Bf16 => bf16(u16::from_le_bytes([codes[2 * i], codes[2 * i + 1]])),
            F::Q8G32 => f32::from(codes[i] as i8),
            F::Q4G64 => f32::from((nibble(i) << 4) as i8 >> 4),
            F::Q5G64 => f32::from(((nibble(i) | (high[i / 8] >> (i % 8) & 1) << 4) << 3) as i8 >> 3),
            F::Q6G64 => f32::from(((nibble(i) | (high[i / 4] >> (i % 4 * 2) & 3) << 4) << 2) as i8 >> 2),
            F::Nvfp4 => e2m1(nibble(i)),
            F::Fp8Row | F::Fp8Block | F::Mxfp8 => e4m3(codes[i]),
        };
        let group = match self.format {
            F::Bf16 | F::Fp8Row | F::Q8G32 | F::Mxfp8 => 32,
            F::Q4G64 | F::Q5G64 | F::Q6G64 => 64,
            F::Nvfp4 => 16,
            F::Fp8Block => 128,
        };
        let scale = |g: usize| match self.format {
            F::Bf16 | F::Fp8Row => 1.0,
            F::Q8G32 | F::Q4G64 | F::Q5G64 | F::Q6G64 => {
                f16(u16::from_le_bytes([scales[2 * g], scales[2 * g + 1]]))
            }
            F::Nvfp4 => e4m3(scales[g]),
            F::Fp8Block => f32::from_le_bytes(std::array::from_fn(|i| scales[4 * g + i])),
            F::Mxfp8 => (f64::from(scales[g]) - 127.0).exp2() as f32,
        };
        ((0..self.k_pad).map(code).collect(), (0..self.k_pad.div_ceil(group)).map(scale).collect(), group)
    }

    /// Exact values of row `r`, `k_pad` of them (a division by a divisor is rounded to f64).
    pub fn row(&self, r: usize) -> Vec<f64> {
        let (codes, scales, group) = self.exact(r);
        let value = |i: usize| f64::from(codes[i]) * f64::from(scales[i / group]);
        (0..self.k_pad)
            .map(|i| {
                if self.divide { value(i) / f64::from(self.tensor_scale) } else { value(i) * self.factor(r) }
            })
            .collect()
    }

    /// Copies the planes to the device, in the order the kernels read.
    pub fn upload(&self, dev: &Arc<Device>) -> Result<Linear> {
        let opt = |v: &[u8]| if v.is_empty() { Ok(None) } else { dev.upload(v).map(Some) };
        let units = self.format == WeightFormat::Nvfp4;
        let codes = if units {
            let to = dev.alloc(nvfp4::bytes(self.n, self.k_pad))?;
            Nvfp4Order::new(dev)?.upload(&self.codes, &self.scales, self.n, self.k_pad, &to)?;
            to
        } else {
            dev.upload(&self.codes)?
        };
        Ok(Linear {
            format: self.format,
            n: self.n,
            k: self.k,
            k_pad: self.k_pad,
            codes,
            high: opt(&self.high)?,
            scales: if units { None } else { opt(&self.scales)? },
            row_scale: if self.row_scale.is_empty() { None } else { Some(dev.upload(&self.row_scale)?) },
            tensor_scale: self.tensor_scale,
            divide: self.divide,
        })
    }

    /// An NVFP4 matrix in units, as [`Nvfp4Order`] lays it out.
    pub fn units(&self) -> Vec<u8> {
        const PLACES: [(u32, u32); 4] = [(6, 15), (3, 12), (0, 14), (9, 13)];
        let (cb, _, sb) = self.format.row_bytes(self.k_pad);
        let per = self.k_pad / nvfp4::K;
        let mut out = vec![0u8; nvfp4::bytes(self.n, self.k_pad)];
        for (r, k) in (0..self.n).flat_map(|r| (0..self.k_pad).step_by(4).map(move |k| (r, k))) {
            let (step, lane) = (k / 64, r % 8 * 4 + k % 64 / 16);
            let unit = ((r / 8 * 8 + step % 8) * per + step / 16) * 576;
            let second = step % 16 / 8;
            let word = (0..4).fold(0u16, |w, i| {
                let code = u16::from(self.codes[r * cb + (k + i) / 2] >> ((k + i) % 2 * 4) & 15);
                w | (code & 7) << PLACES[i].0 | (code >> 3) << PLACES[i].1
            });
            let at = unit + second * 256 + lane * 8 + k % 16 / 2;
            out[at..at + 2].copy_from_slice(&word.to_le_bytes());
            out[unit + 512 + 2 * lane + second] = self.scales[r * sb + k / 16];
        }
        out
    }

    /// `k_pad`.
    pub fn k_pad(&self) -> usize {
        self.k_pad
    }

    /// Code, high-bit and scale planes as stored.
    pub fn planes(&self) -> [&[u8]; 3] {
        [&self.codes, &self.high, &self.scales]
    }
}
