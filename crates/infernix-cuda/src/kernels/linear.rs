//! Decode linears: 1-64 columns, the same bits for a column at every width.

use super::group::{GemvGroup, Input, Part};
use super::nvfp4;
use crate::driver::{Args, Device, DeviceBuffer, DeviceInfo, Kernel, Stream};
use crate::error::{CudaError, Result};
use std::sync::Arc;

/// Stored weight formats the linear kernels read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightFormat {
    /// BF16 words.
    Bf16,
    /// Signed bytes, FP16 scale per 32.
    Q8G32,
    /// Two's-complement nibbles, FP16 scale per 64.
    Q4G64,
    /// Nibbles and a plane of fifth bits.
    Q5G64,
    /// Nibbles and a plane of two high bits.
    Q6G64,
    /// E2M1 codes, E4M3 scale per 16, FP32 multiplier or divisor: stored as nibbles and a plane of scales, on the device in
    /// the order of [`nvfp4::Nvfp4Order`].
    Nvfp4,
    /// E4M3 codes, BF16 scale per row or none, then the tensor's FP32 factor (1 where there is none).
    Fp8Row,
    /// E4M3 codes, FP32 scale per 128 x 128 tile, tile rows of `scale_pitch` bytes.
    Fp8Block,
    /// E4M3 codes, E8M0 scale per 32.
    Mxfp8,
}

impl WeightFormat {
    /// All of them.
    pub const ALL: [WeightFormat; 9] = [
        Self::Bf16,
        Self::Q8G32,
        Self::Q4G64,
        Self::Q5G64,
        Self::Q6G64,
        Self::Nvfp4,
        Self::Fp8Row,
        Self::Fp8Block,
        Self::Mxfp8,
    ];

    /// Name as in kernel entries.
    pub fn tag(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::Q8G32 => "q8",
            Self::Q4G64 => "q4",
            Self::Q5G64 => "q5",
            Self::Q6G64 => "q6",
            Self::Nvfp4 => "nvfp4",
            Self::Fp8Row => "fp8",
            Self::Fp8Block => "fp8b",
            Self::Mxfp8 => "mxfp8",
        }
    }

    /// k of one step of the kernels (NVFP4: of sixteen); K is padded to a multiple of it.
    pub fn step(self) -> usize {
        match self {
            Self::Nvfp4 => nvfp4::K,
            Self::Bf16 | Self::Q8G32 | Self::Mxfp8 => 32,
            _ => 64,
        }
    }

    fn step_bytes(self) -> usize {
        match self {
            Self::Bf16 | Self::Fp8Row | Self::Fp8Block => 64,
            _ => 32,
        }
    }

    /// Bytes of (codes, high bits, scales) of a row of padded length `k`, as stored.
    pub fn row_bytes(self, k: usize) -> (usize, usize, usize) {
        match self {
            Self::Bf16 => (2 * k, 0, 0),
            Self::Q8G32 => (k, 0, k / 16),
            Self::Q4G64 => (k / 2, 0, k / 32),
            Self::Q5G64 => (k / 2, k / 8, k / 32),
            Self::Q6G64 => (k / 2, k / 4, k / 32),
            Self::Nvfp4 => (k / 2, 0, k / 16),
            Self::Fp8Row | Self::Fp8Block => (k, 0, 0),
            Self::Mxfp8 => (k, 0, k / 32),
        }
    }

    /// Bytes of one row of scales: of a weight row, or of a row of tiles (block FP8).
    pub fn scale_pitch(self, k: usize) -> usize {
        if self == Self::Fp8Block { 4 * k.div_ceil(128) } else { self.row_bytes(k).2 }
    }
}

/// A matrix `[n, k]` on the device: planes of whole rows, each padded along K to `k_pad` with zero codes.
pub struct Linear {
    /// Format of the words.
    pub format: WeightFormat,
    /// Rows.
    pub n: usize,
    /// Columns that exist.
    pub k: usize,
    /// Columns stored.
    pub k_pad: usize,
    /// Code plane, `row_bytes(k_pad).0` a row; NVFP4: codes and scales in units, [`nvfp4::bytes`].
    pub codes: DeviceBuffer,
    /// High-bit plane (q5, q6).
    pub high: Option<DeviceBuffer>,
    /// Group or tile scales, row-major.
    pub scales: Option<DeviceBuffer>,
    /// BF16 scale of each row (fp8).
    pub row_scale: Option<DeviceBuffer>,
    /// Multiplier (or divisor) of the whole tensor; 1 where the format has none.
    pub tensor_scale: f32,
    /// `tensor_scale` divides.
    pub divide: bool,
}

impl Linear {
    /// Bytes a matrix product must read.
    pub fn bytes(&self) -> usize {
        if self.format == WeightFormat::Nvfp4 {
            return nvfp4::bytes(self.n, self.k_pad);
        }
        let (a, b, c) = self.format.row_bytes(self.k_pad);
        let tiles = match self.format {
            WeightFormat::Fp8Block => self.n.div_ceil(128) * self.format.scale_pitch(self.k_pad),
            _ => 0,
        };
        self.n * (a + b + c) + tiles + if self.row_scale.is_some() { 2 * self.n } else { 0 }
    }
}

/// Ring geometry of a launch. Bits of the result do not depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GemvPlan {
    /// n-tiles of the instance: 1, 2, 4 or 8 (8 columns each).
    pub tiles: usize,
    /// Rows of a tile: 16, or 8 (NVFP4).
    pub rows: usize,
    /// Stages of the ring.
    pub stages: usize,
    /// Steps of K in a stage (NVFP4: units).
    pub chunk_steps: usize,
    /// Bytes of a staged row (NVFP4: of a warp's ring).
    pub pitch: usize,
    /// Slots for scales and high bits of a tile (NVFP4: tiles of a batch).
    pub side_slots: usize,
    /// High bits are read from device memory where they are used: a tile of long rows does not fit.
    pub high_direct: bool,
    /// Activations are held in shared memory.
    pub x_smem: bool,
    /// Dynamic shared memory.
    pub shared: usize,
    /// CTAs.
    pub grid: usize,
    /// CTAs that share a multiprocessor.
    pub per_sm: usize,
}

fn up(v: usize, m: usize) -> usize {
    v.div_ceil(m) * m
}

impl GemvPlan {
    /// Plans a launch for `cols` columns. `ring_cap` bounds the bytes of the ring (64-160 KB fill the memory system;
    /// more only queues the activations behind them).
    pub fn new(
        f: WeightFormat,
        n: usize,
        k_pad: usize,
        cols: usize,
        info: &DeviceInfo,
        ring_cap: usize,
    ) -> Result<Self> {
        Self::tuned(f, n, k_pad, cols, info, &GemvTuning { ring: ring_cap, ..Default::default() })
    }

    /// As [`GemvPlan::new`] with explicit tunables.
    pub fn tuned(
        f: WeightFormat,
        n: usize,
        k_pad: usize,
        cols: usize,
        info: &DeviceInfo,
        t: &GemvTuning,
    ) -> Result<Self> {
        let (ring_cap, chunk) = (t.ring, t.chunk);
        let info = &DeviceInfo { shared_per_block: info.shared_per_block.min(t.shared), ..info.clone() };
        let shape = |what: String| CudaError::Shape { kernel: "gemv", what };
        if cols == 0 || cols > 64 {
            return Err(shape(format!("1-64 columns, got {cols}")));
        }
        if k_pad == 0 || !k_pad.is_multiple_of(f.step()) || n == 0 {
            return Err(shape(format!("K = {k_pad} must be a multiple of {}, N = {n} at least 1", f.step())));
        }
        let too_large =
            || shape(format!("K = {k_pad} does not fit {} bytes of shared memory", info.shared_per_block));
        if f == WeightFormat::Nvfp4 {
            return nvfp4::alone(n.div_ceil(16), k_pad, cols, info, t).ok_or_else(too_large);
        }
        let tiles = match cols {
            1..=8 => 1,
            9..=16 => 2,
            17..=32 => 4,
            _ => 8,
        };
        // Two CTAs of 17 warps hide each other's latency where each has several tiles and holds two stages of whole rows;
        // with shorter chunks one CTA is faster (measured: head 221 -> 182 us, 16384 rows 16.9 -> 16.1, 10240 no gain).
        if t.per_sm >= 2 {
            let one = GemvTuning { per_sm: 1, ..*t };
            if cols <= 8
                && info.shared_per_block >= 200 << 10
                && n.div_ceil(16) >= 7 * info.multiprocessors as usize
            {
                let half = DeviceInfo {
                    shared_per_block: (info.shared_per_block + 1024) / 2 - 1024,
                    ..info.clone()
                };
                let ring = t.ring.min(half.shared_per_block);
                if let Ok(p) = Self::tuned(f, n, k_pad, cols, &half, &GemvTuning { ring, ..one })
                    && p.chunk_steps == k_pad / f.step().max(1)
                    && p.x_smem
                {
                    return Ok(GemvPlan {
                        grid: (2 * info.multiprocessors as usize).min(n.div_ceil(16)),
                        per_sm: 2,
                        ..p
                    });
                }
            }
            return Self::tuned(f, n, k_pad, cols, info, &one);
        }
        let reduced = tiles.min(2) * 8 * 20;
        let fixed = 256 + 2 * 16 * reduced * 4;
        let steps = k_pad / f.step();
        let lane16 = f.step_bytes() == 64;
        let pad_to = |bytes: usize, rem: usize| {
            let mut p = up(bytes, 128) - 128 + rem;
            while p < bytes {
                p += 128;
            }
            p
        };
        let x_pad = if f.step() == 32 { 64 } else { 16 };
        let x_bytes = cols * (up(2 * k_pad, 128) + x_pad);
        let (_, high, scale) = f.row_bytes(k_pad);
        let scale = if f == WeightFormat::Fp8Block { 0 } else { scale };
        let side = |direct: bool| up(16 * scale, 128) + if direct { 0 } else { up(16 * high, 128) };
        let fits = |chunk: usize, stages: usize, x: usize, side: usize| {
            let pitch = pad_to(chunk * f.step_bytes(), if lane16 { 64 } else { 32 });
            let chunks = steps.div_ceil(chunk);
            let slots = if side == 0 { 0 } else { (stages - 1).div_ceil(chunks) + 1 };
            let shared = fixed + stages * 16 * pitch + slots * side + x;
            (shared <= info.shared_per_block).then_some((pitch, slots, shared))
        };
        // Activations in shared memory with a comfortable ring, then without, then with the shallowest ring that works.
        let tries = [(true, false), (false, false), (false, true)];
        for (x_smem, shallow, direct) in
            tries.map(|t| (t.0, t.1, false)).into_iter().chain(tries.map(|t| (t.0, t.1, true)))
        {
            if x_smem && x_bytes > info.shared_per_block / 2 {
                continue;
            }
            let x = if x_smem { x_bytes } else { 0 };
            // Whole rows if at least two stages fit, else the longest chunks of which three fit.
            let mut chunk_options: Vec<usize> = vec![steps];
            chunk_options.extend((1..=steps / 16).rev().map(|r| r * 16));
            if let Some(c) = chunk {
                chunk_options.retain(|v| *v <= c);
            }
            for (i, &chunk) in chunk_options.iter().enumerate() {
                let least = if i == 0 || shallow { 2 } else { 3 };
                for stages in (least..=8).rev() {
                    if stages > least && stages * 16 * chunk * f.step_bytes() > ring_cap {
                        continue;
                    }
                    if let Some((pitch, side_slots, shared)) = fits(chunk, stages, x, side(direct)) {
                        let grid = n.div_ceil(16).min(info.multiprocessors as usize);
                        return Ok(GemvPlan {
                            tiles,
                            rows: 16,
                            stages,
                            chunk_steps: chunk,
                            pitch,
                            side_slots,
                            high_direct: direct,
                            x_smem,
                            shared,
                            grid,
                            per_sm: 1,
                        });
                    }
                }
            }
        }
        Err(too_large())
    }
}

/// Tunables of [`GemvPlan`]; none changes a bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GemvTuning {
    /// Bytes of shared memory a block may use, at most (fewer than the device has: to try the plans of smaller parts).
    pub shared: usize,
    /// Bytes of all rings of a multiprocessor, at most (never less than the fewest stages).
    pub ring: usize,
    /// Steps of K in a stage, at most (a multiple of 16); none: whole rows where they fit.
    pub chunk: Option<usize>,
    /// CTAs that share a multiprocessor, at most.
    pub per_sm: usize,
}

impl Default for GemvTuning {
    fn default() -> Self {
        GemvTuning { shared: usize::MAX, ring: Gemv::RING, chunk: None, per_sm: 2 }
    }
}

/// Output words of a linear.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Out {
    /// Rounded to BF16.
    Bf16,
    /// FP32 (router, head).
    F32,
}

/// What runs a decode linear.
enum Runs {
    Own(Kernel),
    /// NVFP4: a group of one.
    Group(Box<GemvGroup>),
}

/// A planned decode linear.
pub struct Gemv {
    runs: Runs,
    /// The plan.
    pub plan: GemvPlan,
    cols: usize,
}

impl Gemv {
    /// Default cap of the ring, see [`GemvPlan::new`].
    pub const RING: usize = 100 << 10;

    /// Plans and looks up the instance.
    pub fn new(
        dev: &Arc<Device>,
        f: WeightFormat,
        n: usize,
        k_pad: usize,
        cols: usize,
        ring: usize,
    ) -> Result<Self> {
        Self::tuned(dev, f, n, k_pad, cols, &GemvTuning { ring, ..Default::default() })
    }

    /// As [`Gemv::new`] with explicit tunables.
    pub fn tuned(
        dev: &Arc<Device>,
        f: WeightFormat,
        n: usize,
        k_pad: usize,
        cols: usize,
        t: &GemvTuning,
    ) -> Result<Self> {
        let plan = GemvPlan::tuned(f, n, k_pad, cols, dev.info(), t)?;
        if f == WeightFormat::Nvfp4 {
            let group = GemvGroup::alone(dev, plan, n.div_ceil(16), k_pad, cols)?;
            return Ok(Gemv { runs: Runs::Group(Box::new(group)), plan, cols });
        }
        let kernel = dev.kernel(
            &format!("gemv_{}_n{}{}", f.tag(), plan.tiles, if plan.x_smem { "" } else { "_global" }),
            plan.shared,
        )?;
        Ok(Gemv { runs: Runs::Own(kernel), plan, cols })
    }

    /// `y[c][n] = sum_k w[n][k] x[c][k]`. `x`: BF16 `[cols][x_pitch]`, `y`: `[cols][y_pitch]` of `out` words.
    #[expect(clippy::too_many_arguments, reason = "two matrices and their pitches")]
    pub fn launch(
        &self,
        s: &Stream,
        w: &Linear,
        x: u64,
        x_pitch: usize,
        y: u64,
        y_pitch: usize,
        out: Out,
        pdl: bool,
    ) -> Result<()> {
        let kernel = match &self.runs {
            Runs::Own(kernel) => kernel,
            Runs::Group(group) => {
                return group.launch(
                    s,
                    &[Part { w, y, y_pitch, out }],
                    Input::Plain { x, pitch: x_pitch },
                    None,
                    pdl,
                );
            }
        };
        let (cp, hp, _) = w.format.row_bytes(w.k_pad);
        let sp = w.format.scale_pitch(w.k_pad);
        let p = &self.plan;
        let mode =
            usize::from(out == Out::F32) | usize::from(w.divide) << 1 | usize::from(p.high_direct) << 2;
        let ptr = |b: &Option<DeviceBuffer>| b.as_ref().map_or(0, DeviceBuffer::ptr);
        let args = Args::new()
            .ptr(w.codes.ptr())
            .ptr(ptr(&w.high))
            .ptr(ptr(&w.scales))
            .ptr(ptr(&w.row_scale))
            .f32(w.tensor_scale)
            .ptr(x)
            .ptr(y)
            .ints(&[w.n, w.k_pad, w.k, self.cols, x_pitch, y_pitch, cp, hp, sp])
            .ints(&[p.stages, p.chunk_steps, p.pitch, p.side_slots, mode]);
        s.launch(kernel, [p.grid as u32, 1, 1], 544, pdl, &args)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(shared: usize) -> DeviceInfo {
        DeviceInfo {
            name: String::new(),
            capability: 90,
            multiprocessors: 132,
            shared_per_block: shared,
            l2_bytes: 0,
            driver: 0,
        }
    }

    #[test]
    fn every_real_shape_has_a_plan_that_fits_both_targets() {
        for shared in [232_448, 101_376] {
            for f in WeightFormat::ALL {
                for (n, k) in [
                    (10240, 2560),
                    (2560, 6144),
                    (248_320, 5120),
                    (17408, 5120),
                    (5120, 17408),
                    (320, 10240),
                    (48, 2560),
                    (10240, 384),
                ] {
                    let k = usize::next_multiple_of(k, f.step());
                    for cols in [1, 4, 8, 9, 16, 33, 64] {
                        let p = GemvPlan::new(f, n, k, cols, &info(shared), Gemv::RING);
                        let p = p.unwrap_or_else(|e| panic!("{f:?} {n}x{k} {cols} columns, {shared}: {e}"));
                        assert!(p.shared <= shared && p.stages >= 2);
                        let units = f == WeightFormat::Nvfp4 && p.chunk_steps <= k / f.step();
                        let whole = p.chunk_steps == k / f.step() || p.chunk_steps.is_multiple_of(16);
                        assert!(units || whole);
                    }
                }
            }
        }
    }
}
