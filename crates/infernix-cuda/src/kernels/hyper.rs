//! Hyper-connection mix, two launches.

use super::linear::{Linear, WeightFormat};
use crate::driver::{Args, Device, Kernel, Stream};
use crate::error::{CudaError, Result};
use std::sync::Arc;

/// Kernels for one geometry: `R [cols][4][h]` BF16 to `x [cols][h]` BF16 and inject factors `b [cols][4]` FP32.
pub struct HyperMix {
    down: Kernel,
    up: Kernel,
    h: usize,
    rank: usize,
}

/// The three matrices of a mixer; `inject` is absent in the final one.
#[derive(Clone, Copy)]
pub struct HyperWeights<'a> {
    /// `[rank, 4 h]`.
    pub down: &'a Linear,
    /// `[4 h, rank]`.
    pub up: &'a Linear,
    /// `[4, 4 h]`.
    pub inject: Option<&'a Linear>,
    /// BF16 `[4 h]`.
    pub norm: u64,
}

/// `to_s = bf16(fma(factor_s, y, R_s))`, device addresses: `y` BF16 `[cols][h]`, `factor` FP32 `[cols][4]`, `to` as `R`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Injection {
    /// What is added, or 0.
    pub y: u64,
    /// Factor of each stream.
    pub factor: u64,
    /// The new residual.
    pub to: u64,
}

impl HyperMix {
    /// `format` is BF16 or q8_g32; `h` a multiple of 32 up to 2560, `rank` up to 320 and a multiple of 16.
    pub fn new(dev: &Arc<Device>, format: WeightFormat, h: usize, rank: usize) -> Result<Self> {
        if !matches!(format, WeightFormat::Bf16 | WeightFormat::Q8G32)
            || h > 2560
            || !h.is_multiple_of(32)
            || rank > 320
            || !rank.is_multiple_of(16)
        {
            return Err(CudaError::Shape {
                kernel: "hyper",
                what: format!("{format:?}, h = {h}, rank = {rank}"),
            });
        }
        let pitch = |k: usize| (2 * k).div_ceil(128) * 128 + 64;
        let down =
            dev.kernel(&format!("hc_down_{}", format.tag()), 8 * pitch(h) + 16 * 160 * 4 + 16 * 8 * 4)?;
        let up =
            dev.kernel(&format!("hc_up_{}", format.tag()), 8 * pitch(rank.div_ceil(32) * 32) + 8 * 160 * 4)?;
        Ok(HyperMix { down, up, h, rank })
    }

    /// Bytes of scratch for `cols` columns: partial sums, then 1/rms of each stream.
    pub fn scratch(&self, cols: usize) -> usize {
        4 * cols * (self.rank + 8) * 4 + 4 * cols * 4
    }

    /// `r` BF16 `[cols][4 h]`, outputs `x` BF16 `[cols][h]`, `b` FP32 `[cols][4]` (unwritten without inject).
    #[expect(clippy::too_many_arguments, reason = "the operands of one mixer")]
    pub fn launch(
        &self,
        s: &Stream,
        w: &HyperWeights<'_>,
        r: u64,
        eps: f32,
        cols: usize,
        scratch: u64,
        x: u64,
        b: u64,
        pdl: bool,
    ) -> Result<()> {
        self.launch_after(s, w, r, None, eps, cols, scratch, x, b, pdl)
    }

    /// The same behind an injection into the streams, which the first kernel does: `r` is read, the new residual is `add.to`
    /// (another buffer), and the mix is of that.
    #[expect(clippy::too_many_arguments, reason = "the operands of one mixer")]
    pub fn launch_after(
        &self,
        s: &Stream,
        w: &HyperWeights<'_>,
        r: u64,
        add: Option<Injection>,
        eps: f32,
        cols: usize,
        scratch: u64,
        x: u64,
        b: u64,
        pdl: bool,
    ) -> Result<()> {
        let add = add.unwrap_or_default();
        let mixed = if add.y == 0 { r } else { add.to };
        let ptr = |l: &Linear| l.scales.as_ref().map_or(0, |b| b.ptr());
        let rstd = scratch + (4 * cols * (self.rank + 8) * 4) as u64;
        let (cp, _, sp) = w.down.format.row_bytes(w.down.k_pad);
        let args = Args::new()
            .ptr(w.down.codes.ptr())
            .ptr(ptr(w.down))
            .ptr(w.inject.map_or(0, |l| l.codes.ptr()))
            .ptr(w.inject.map_or(0, ptr))
            .ptr(r)
            .ptr(w.norm)
            .f32(eps)
            .ints(&[self.h, self.rank, cols, cp, sp])
            .ptr(scratch)
            .ptr(rstd)
            .ptr(add.y)
            .ptr(add.factor)
            .ptr(add.to);
        let tiles = self.rank / 16 + usize::from(w.inject.is_some());
        s.launch(&self.down, [tiles as u32, 4, 1], 512, pdl, &args)?;
        let (cp, _, sp) = w.up.format.row_bytes(w.up.k_pad);
        let args = Args::new()
            .ptr(w.up.codes.ptr())
            .ptr(ptr(w.up))
            .ptr(scratch)
            .ptr(rstd)
            .ptr(mixed)
            .ptr(w.norm)
            .ints(&[self.h, self.rank, cols, cp, sp, usize::from(w.inject.is_some())])
            .ptr(x)
            .ptr(b);
        s.launch(&self.up, [self.h.div_ceil(16) as u32, 1, 1], 256, true, &args)
    }
}
