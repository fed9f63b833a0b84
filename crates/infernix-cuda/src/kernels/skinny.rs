//! Products of many rows with a matrix of a few.

use super::linear::{Linear, Out, WeightFormat};
use crate::driver::{Args, Device, Kernel, Stream};
use crate::error::Result;
use std::sync::Arc;

/// `y = x W^T` for BF16 matrices of one to four rows.
pub struct Skinny {
    dev: Arc<Device>,
    kernel: Kernel,
}

impl Skinny {
    /// Looks the kernel up.
    pub fn new(dev: &Arc<Device>) -> Result<Self> {
        Ok(Skinny { dev: dev.clone(), kernel: dev.kernel("skinny", 96 << 10)? })
    }

    /// Whether it takes a matrix.
    pub fn takes(w: &Linear, x_pitch: usize) -> bool {
        let plain = w.format == WeightFormat::Bf16 && w.tensor_scale == 1.0 && w.row_scale.is_none();
        plain && w.n <= 4 && w.n * w.k * 2 <= 96 << 10 && w.k.is_multiple_of(8) && x_pitch.is_multiple_of(8)
    }

    /// `x` BF16 `[rows][x_pitch]`, `y` `[rows][y_pitch]` of `out` words. Sums in FP32: within the bound of `Gemv`; a row's bits do
    /// not depend on the others.
    #[expect(clippy::too_many_arguments, reason = "two matrices and their pitches")]
    pub fn launch(
        &self,
        s: &Stream,
        w: &Linear,
        x: u64,
        x_pitch: usize,
        rows: usize,
        y: u64,
        y_pitch: usize,
        out: Out,
        pdl: bool,
    ) -> Result<()> {
        let a = Args::new().ptr(w.codes.ptr()).ptr(x).ptr(y);
        let a = a.ints(&[w.n, w.k, w.k_pad, rows, x_pitch, y_pitch, usize::from(out == Out::F32)]);
        let grid = rows.div_ceil(8).min(2 * self.dev.info().multiprocessors as usize);
        s.launch(&self.kernel, [grid as u32, 1, 1], 256, pdl, &a)
    }
}
