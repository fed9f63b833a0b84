//! Prefill linears: many rows, tensor cores.

use super::linear::{Linear, Out, WeightFormat};
use crate::driver::{Args, Device, Kernel, Stream};
use crate::error::{CudaError, Result};
use std::sync::Arc;

/// `y[t][n] = sum_k w[n][k] x[t][k]` for any number of rows. Exact codes in BF16, FP32 sums, group scales in FP32: the bound is
/// that of the decode linear; bits may differ from it.
pub struct Gemm {
    kernel: Kernel,
    format: WeightFormat,
}

impl Gemm {
    /// Looks up the instance of a format.
    pub fn new(dev: &Arc<Device>, f: WeightFormat) -> Result<Self> {
        let row = match f {
            WeightFormat::Bf16 => 128,
            WeightFormat::Q8G32 | WeightFormat::Fp8Row => 64,
            _ => 32,
        };
        // Stages as in the kernel: four where a block may have 227 KB, else two.
        let stages = if dev.info().capability >= 100 { 2 } else { 4 };
        let shared = (stages * (128 * row + 256 * 128)).max(128 * 132 * 4);
        Ok(Gemm { kernel: dev.kernel(&format!("gemm_{}", f.tag()), shared)?, format: f })
    }

    /// `x` BF16 `[rows][x_pitch]` (pitch and K multiples of 8), `y` `[rows][y_pitch]` of `out` words.
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
        if w.format != self.format || !x_pitch.is_multiple_of(8) || !w.k.is_multiple_of(8) {
            return Err(CudaError::Shape {
                kernel: "gemm",
                what: format!("{:?} for {:?}, K = {}, pitch {x_pitch}", w.format, self.format, w.k),
            });
        }
        let (cp, hp, sp) = w.format.row_bytes(w.k_pad);
        let ptr = |b: &Option<crate::driver::DeviceBuffer>| b.as_ref().map_or(0, |b| b.ptr());
        let mode = usize::from(out == Out::F32) | usize::from(w.divide) << 1;
        let args = Args::new()
            .ptr(w.codes.ptr())
            .ptr(ptr(&w.high))
            .ptr(ptr(&w.scales))
            .ptr(ptr(&w.row_scale))
            .f32(w.tensor_scale)
            .ptr(x)
            .ptr(y)
            .ints(&[w.n, w.k_pad, w.k, rows, x_pitch, y_pitch, cp, hp, sp, mode]);
        s.launch(&self.kernel, [rows.div_ceil(256) as u32, w.n.div_ceil(128) as u32, 1], 256, pdl, &args)
    }
}
