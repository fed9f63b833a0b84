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
    /// Values between slots of `state`; 0 = packed.
    pub state_stride: usize,
    /// Elements between slots of `conv_state`; 0 = packed.
    pub conv_stride: usize,
    /// I32 `[lanes]`: slot that takes the state and the last three columns, or 0: the state goes back where it came from and the
    /// columns stay.
    pub out_slots: u64,
    /// BF16: the inputs of lanes with several columns, rows `y | a | b` of the lane's pair of slots (slot / 2), or 0.
    pub record: u64,
    /// Elements between pairs in `record`.
    pub record_stride: usize,
}

fn packed(stride: usize, natural: usize) -> usize {
    if stride == 0 { natural } else { stride }
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

    /// Channels of the convolution.
    pub fn channels(&self) -> usize {
        128 * (2 * self.nk + self.nv)
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
            .ints(&[self.nk, self.nv, a.y_pitch, a.ab_pitch])
            .ints(&[packed(a.state_stride, self.nv << 14), packed(a.conv_stride, 3 * self.channels())])
            .ptr(a.out_slots)
            .ptr(a.record)
            .int(a.record_stride);
        s.launch(&self.kernel, [self.nv as u32, 4, a.lanes as u32], 256, pdl, &args)
    }
}

/// Chunked form for prefill: 64 tokens at a time on tensor cores. Heads of 128.
///
/// Takes q | k | v behind convolution and silu (`RowOps::conv`), one sequence a call. Against the token-by-token rule: o within
/// 4e-3 relative L2 of a call (the step's bound; most of it is o's own rounding), the state within 3e-4.
pub struct GdnChunk {
    prepare: Kernel,
    scan: Kernel,
    nk: usize,
    nv: usize,
    values: usize,
}

/// Operands of [`GdnChunk::launch`], device addresses.
#[derive(Clone, Copy, Debug, Default)]
pub struct ChunkArgs {
    /// q | k | v, BF16 `[rows][y_pitch]`, pitch a multiple of 8.
    pub y: u64,
    /// Elements between rows of `y`.
    pub y_pitch: usize,
    /// BF16 `[rows][ab_pitch]`.
    pub a: u64,
    /// BF16 `[rows][ab_pitch]`.
    pub b: u64,
    /// Elements between rows of `a` and `b`.
    pub ab_pitch: usize,
    /// FP32 `[nv]`.
    pub a_log: u64,
    /// FP32 `[nv]`.
    pub dt_bias: u64,
    /// FP32 `[nv][128][128]` of the sequence, in place.
    pub state: u64,
    /// BF16 `[rows][o_pitch]`, even pitch.
    pub o: u64,
    /// Elements between rows of `o`.
    pub o_pitch: usize,
    /// Tokens.
    pub rows: usize,
    /// At least [`GdnChunk::scratch`] of 64 rows.
    pub scratch: u64,
    /// Its bytes: the rows are walked in spans that fit.
    pub scratch_bytes: usize,
}

impl GdnChunk {
    /// Bytes of one chunk of one head: four 64 x 64 BF16 matrices and vectors.
    const PART: usize = 4 * 8192 + 1024;

    /// `nk` key heads, `nv` value heads, all of width 128.
    pub fn new(dev: &Arc<Device>, nk: usize, nv: usize) -> Result<Self> {
        Self::with_values(dev, nk, nv, 32)
    }

    /// With 32 or 64 value columns a block (the latter needs 132 KB of shared memory). Bits do not depend on it.
    pub fn with_values(dev: &Arc<Device>, nk: usize, nv: usize, values: usize) -> Result<Self> {
        if nk == 0 || !nv.is_multiple_of(nk) || !matches!(values, 32 | 64) {
            return Err(CudaError::Shape {
                kernel: "gdn_chunk",
                what: format!("{nv} value heads over {nk} key heads, {values} columns"),
            });
        }
        let scan = dev.kernel(&format!("gdn_scan_{values}"), 65536 + 1024 * values + 1024)?;
        let prepare = dev.kernel("gdn_prepare", 32768 + 2 * 64 * 65 * 4 + 64 * 8 + 3 * 64 * 4)?;
        Ok(GdnChunk { prepare, scan, nk, nv, values })
    }

    /// Scratch that lets `rows` rows run in one span.
    pub fn scratch(&self, rows: usize) -> usize {
        rows.div_ceil(64) * self.nv * Self::PART
    }

    /// Runs the rows in order.
    pub fn launch(&self, s: &Stream, a: &ChunkArgs, pdl: bool) -> Result<()> {
        let span = a.scratch_bytes / self.scratch(64) * 64;
        if span == 0 || !a.y_pitch.is_multiple_of(8) || !a.o_pitch.is_multiple_of(2) {
            return Err(CudaError::Shape {
                kernel: "gdn_chunk",
                what: format!(
                    "{} bytes of scratch, pitches {} and {}",
                    a.scratch_bytes, a.y_pitch, a.o_pitch
                ),
            });
        }
        let (nk, nv) = (self.nk, self.nv);
        let mut from = 0;
        while from < a.rows {
            let n = span.min(a.rows - from);
            let y = a.y + (from * a.y_pitch * 2) as u64;
            let ab = (from * a.ab_pitch * 2) as u64;
            let args =
                Args::new().ptr(y).ptr(a.a + ab).ptr(a.b + ab).ptr(a.a_log).ptr(a.dt_bias).ptr(a.scratch);
            let args = args.ints(&[n, nk, nv, a.y_pitch, a.ab_pitch]);
            let chunks = n.div_ceil(64) as u32;
            s.launch(&self.prepare, [chunks, nv as u32, 1], 128, pdl || from > 0, &args)?;
            let o = a.o + (from * a.o_pitch * 2) as u64;
            let args = Args::new().ptr(y).ptr(a.scratch).ptr(a.state).ptr(o);
            let args = args.ints(&[n, nk, nv, a.y_pitch, a.o_pitch]);
            s.launch(&self.scan, [nv as u32, (128 / self.values) as u32, 1], 256, true, &args)?;
            from += n;
        }
        Ok(())
    }
}
