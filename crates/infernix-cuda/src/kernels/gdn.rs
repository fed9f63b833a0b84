//! Gated delta rule.

use crate::driver::{Args, Device, Kernel, Stream};
use crate::error::{CudaError, Result};
use std::sync::Arc;

/// Recurrent step with convolution, gates and normalisation fused. Heads of 128.
pub struct GdnStep {
    kernel: Kernel,
    nk: usize,
    nv: usize,
}

/// Operands of [`GdnStep::launch`], device addresses.
#[derive(Clone, Copy, Debug, Default)]
pub struct GdnArgs {
    /// Pre-convolution q | k | v, BF16 `[cols][y_pitch]`.
    pub y: u64,
    /// Elements between columns of `y`.
    pub y_pitch: usize,
    /// BF16 `[slots][3][C]`, oldest first.
    pub conv_state: u64,
    /// BF16 `[C][4]`.
    pub conv_w: u64,
    /// BF16 `[cols][ab_pitch]`.
    pub a: u64,
    /// BF16 `[cols][ab_pitch]`.
    pub b: u64,
    /// Elements between columns of `a` and `b`.
    pub ab_pitch: usize,
    /// FP32 `[nv]`.
    pub a_log: u64,
    /// FP32 `[nv]`.
    pub dt_bias: u64,
    /// FP32 `[slots][nv][128][128]`.
    pub state: u64,
    /// I32 `[lanes + 1]`: first column of each lane.
    pub first: u64,
    /// I32 `[lanes]`: the state is stored after this many of the lane's columns; 0 leaves it.
    pub write_after: u64,
    /// I32 `[lanes]`: slot of each lane, or 0 for the identity.
    pub slots: u64,
    /// BF16 `[cols][nv * 128]`, or 0.
    pub o: u64,
    /// Lanes.
    pub lanes: usize,
}

impl GdnStep {
    /// `nk` key heads, `nv` value heads, all of width 128.
    pub fn new(dev: &Arc<Device>, nk: usize, nv: usize) -> Result<Self> {
        if nk == 0 || !nv.is_multiple_of(nk) {
            return Err(CudaError::Shape {
                kernel: "gdn",
                what: format!("{nv} value heads over {nk} key heads"),
            });
        }
        Ok(GdnStep { kernel: dev.kernel("gdn_step", 0)?, nk, nv })
    }

    /// Runs the columns of every lane in order.
    pub fn launch(&self, s: &Stream, a: &GdnArgs, pdl: bool) -> Result<()> {
        let args = Args::new()
            .ptr(a.y)
            .ptr(a.conv_state)
            .ptr(a.conv_w)
            .ptr(a.a)
            .ptr(a.b)
            .ptr(a.a_log)
            .ptr(a.dt_bias)
            .ptr(a.state)
            .ptr(a.first)
            .ptr(a.write_after)
            .ptr(a.slots)
            .ptr(a.o)
            .ints(&[self.nk, self.nv, a.y_pitch, a.ab_pitch]);
        s.launch(&self.kernel, [self.nv as u32, 4, a.lanes as u32], 256, pdl, &args)
    }
}
