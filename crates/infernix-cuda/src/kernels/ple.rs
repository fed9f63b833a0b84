//! n-gram embedding: stream gates and the dilated convolution.

use super::rows::Lanes;
use crate::driver::{Args, Device, Kernel, Stream};
use crate::error::Result;
use std::sync::Arc;

/// The kernels, looked up once.
pub struct PleOps {
    gate: Kernel,
    conv: Kernel,
    fold: Kernel,
}

/// A convolution's kept columns: `[slot][(taps - 1) * dilation][width]` BF16, oldest first.
#[derive(Clone, Copy, Debug)]
pub struct PleState {
    /// Slot 0.
    pub ptr: u64,
    /// Elements between slots.
    pub stride: usize,
    /// Channels.
    pub width: usize,
    /// Taps.
    pub taps: usize,
    /// Distance between taps.
    pub dilation: usize,
}

impl PleOps {
    /// Looks the kernels up.
    pub fn new(dev: &Arc<Device>) -> Result<Self> {
        let k = |n: &str| dev.kernel(n, 0);
        Ok(PleOps { gate: k("ple_gate")?, conv: k("ple_conv")?, fold: k("ple_fold")? })
    }

    /// `key`, `query`, `out` BF16 `[rows][streams][h]`, `value` `[rows][h]`.
    #[expect(clippy::too_many_arguments, reason = "three matrices in, one out")]
    pub fn gate(
        &self,
        s: &Stream,
        key: u64,
        query: u64,
        value: u64,
        out: u64,
        h: usize,
        streams: usize,
        rows: usize,
        pdl: bool,
    ) -> Result<()> {
        let a = Args::new().ptr(key).ptr(query).ptr(value).ptr(out).int(h);
        s.launch(&self.gate, [streams as u32, rows as u32, 1], 256, pdl, &a)
    }

    /// `r += v + silu(convolution of c)`, all BF16 `[rows][width]`, `w` BF16 `[width][taps]`.
    #[expect(clippy::too_many_arguments, reason = "the operands of one convolution")]
    pub fn conv(
        &self,
        s: &Stream,
        r: u64,
        v: u64,
        c: u64,
        w: u64,
        state: &PleState,
        lanes: &Lanes,
        pdl: bool,
    ) -> Result<()> {
        let a = Args::new().ptr(r).ptr(v).ptr(c).ptr(w).ptr(state.ptr);
        let a = a.ptr(lanes.row_lane).ptr(lanes.first).ptr(lanes.slots);
        let a = a.ints(&[state.width, state.taps, state.dilation, state.stride]);
        s.launch(&self.conv, [state.width.div_ceil(256) as u32, lanes.rows as u32, 1], 256, pdl, &a)
    }

    /// Keeps the columns after each lane's count; `record` (address, elements between pairs of slots) notes lanes of several columns.
    pub fn fold(
        &self,
        s: &Stream,
        c: u64,
        state: &PleState,
        lanes: &Lanes,
        record: (u64, usize),
        pdl: bool,
    ) -> Result<()> {
        let a = Args::new().ptr(c).ptr(state.ptr).ptr(lanes.first).ptr(lanes.count).ptr(lanes.slots);
        let kept = (state.taps - 1) * state.dilation;
        let a = a.ptr(lanes.out_slots).ints(&[state.width, kept, state.stride]).ptr(record.0).int(record.1);
        s.launch(&self.fold, [state.width.div_ceil(256) as u32, lanes.lanes as u32, 1], 256, pdl, &a)
    }
}
