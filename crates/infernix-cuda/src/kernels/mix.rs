//! Pieces of the hyper-connection mixer around plain linears.

use crate::driver::{Args, Device, Kernel, Stream};
use crate::error::Result;
use std::sync::Arc;

/// The kernels, looked up once.
pub struct MixOps {
    silu: Kernel,
    sigmoid: Kernel,
    mix: Kernel,
}

impl MixOps {
    /// Looks the kernels up.
    pub fn new(dev: &Arc<Device>) -> Result<Self> {
        let k = |n: &str| dev.kernel(n, 0);
        Ok(MixOps { silu: k("silu_over")?, sigmoid: k("twice_sigmoid_over")?, mix: k("mix_streams")? })
    }

    /// `bf16(silu(v / over))` of `n` FP32 values.
    pub fn silu_over(&self, s: &Stream, v: u64, y: u64, n: usize, over: f32, pdl: bool) -> Result<()> {
        let a = Args::new().ptr(v).ptr(y).int(n).f32(over);
        s.launch(&self.silu, [n.div_ceil(256) as u32, 1, 1], 256, pdl, &a)
    }

    /// `2 sigma(v / over)` of `n` FP32 values in place.
    pub fn twice_sigmoid_over(&self, s: &Stream, v: u64, n: usize, over: f32, pdl: bool) -> Result<()> {
        let a = Args::new().ptr(v).int(n).f32(over);
        s.launch(&self.sigmoid, [n.div_ceil(256) as u32, 1, 1], 256, pdl, &a)
    }

    /// `x [rows][h]` BF16 from `v` FP32 and `normed` BF16, both `[rows][streams][h]`.
    #[expect(clippy::too_many_arguments, reason = "two matrices in, one out")]
    pub fn mix(
        &self,
        s: &Stream,
        v: u64,
        normed: u64,
        x: u64,
        h: usize,
        streams: usize,
        rows: usize,
        pdl: bool,
    ) -> Result<()> {
        let a = Args::new().ptr(v).ptr(normed).ptr(x).ints(&[h, streams]);
        s.launch(&self.mix, [h.div_ceil(256) as u32, rows as u32, 1], 256, pdl, &a)
    }
}
