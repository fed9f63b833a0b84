//! Index keys of sparse attention: raw keys to pooled ones.

use super::rows::Lanes;
use super::select::IndexPages;
use crate::driver::{Args, Device, Kernel, Stream};
use crate::error::{CudaError, Result};
use std::sync::Arc;

/// Entries of a slot's ring of raw keys.
pub const RING: usize = 128;

/// The kernel for one ratio; keys of 128 values.
pub struct IndexAppend {
    kernel: Kernel,
    ratio: usize,
}

/// Rings of raw keys and of their positions, by slot.
#[derive(Clone, Copy, Debug)]
pub struct IndexRing {
    /// BF16 `[slot][RING][128]`.
    pub keys: u64,
    /// Elements between slots of `keys`.
    pub stride: usize,
    /// I32 `[slot][RING][3]`.
    pub positions: u64,
    /// Elements between slots of `positions`.
    pub positions_stride: usize,
}

/// Rotary table on the device: F64 `[half]` frequencies and U8 `[half]` axes.
#[derive(Clone, Copy, Debug)]
pub struct Rotary {
    /// Frequencies.
    pub freq: u64,
    /// Axes.
    pub axis: u64,
    /// Factor on cos and sin.
    pub scale: f32,
    /// Pairs.
    pub half: usize,
}

impl IndexAppend {
    /// `ratio` tokens a block, at most 64.
    pub fn new(dev: &Arc<Device>, ratio: usize) -> Result<Self> {
        if ratio == 0 || ratio > 64 {
            return Err(CudaError::Shape { kernel: "index", what: format!("{ratio} tokens a block") });
        }
        Ok(IndexAppend { kernel: dev.kernel("index_append", 0)?, ratio })
    }

    /// Appends `raw` BF16 `[rows][128]`; `w` BF16 `[128]`.
    #[expect(clippy::too_many_arguments, reason = "keys, state and pages")]
    pub fn launch(
        &self,
        s: &Stream,
        raw: u64,
        ring: &IndexRing,
        w: u64,
        rope: &Rotary,
        eps: f32,
        lanes: &Lanes,
        pages: &IndexPages,
        pdl: bool,
    ) -> Result<()> {
        let a = Args::new().ptr(raw).ptr(ring.keys).ptr(ring.positions);
        let a = a.ints(&[ring.stride, ring.positions_stride]).ptr(w).ptr(rope.freq).ptr(rope.axis);
        let a = a.f32(rope.scale).int(rope.half).f32(eps);
        let a = a.ptr(lanes.row_lane).ptr(lanes.row_pos).ptr(lanes.positions).ptr(lanes.first);
        let a = a.ptr(lanes.slots).ptr(pages.tables).ptr(pages.keys);
        let a = a.ints(&[pages.table_pitch, pages.page_log, pages.page_stride, self.ratio]);
        s.launch(&self.kernel, [lanes.rows as u32, 1, 1], 128, pdl, &a)
    }
}
