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
        let words = index_words(raw, ring, w, rope, eps, lanes, pages, self.ratio);
        s.launch(&self.kernel, [lanes.rows as u32, 1, 1], 128, pdl, &Args::new().block(&words))
    }
}

/// The kernels' structure of an append.
#[expect(clippy::too_many_arguments, reason = "keys, state and pages")]
pub(super) fn index_words(
    raw: u64,
    ring: &IndexRing,
    w: u64,
    rope: &Rotary,
    eps: f32,
    lanes: &Lanes,
    pages: &IndexPages,
    ratio: usize,
) -> [u64; 19] {
    let pair = |a: usize, b: usize| a as u64 | (b as u64) << 32;
    [
        raw,
        ring.keys,
        ring.positions,
        ring.stride as u64,
        ring.positions_stride as u64,
        w,
        rope.freq,
        rope.axis,
        lanes.row_lane,
        lanes.row_pos,
        lanes.positions,
        lanes.first,
        lanes.slots,
        pages.tables,
        pages.keys,
        pair(rope.scale.to_bits() as usize, eps.to_bits() as usize),
        pair(rope.half, pages.table_pitch),
        pair(pages.page_log, pages.page_stride),
        pair(ratio, INDEX_WIDTH),
    ]
}

/// Values of an index key.
const INDEX_WIDTH: usize = 128;
