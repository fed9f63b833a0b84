//! Router selection and the exact W4A4 experts.

use crate::driver::{Args, Device, Kernel, Stream};
use crate::error::{CudaError, Result};
use std::sync::Arc;

/// Router top-k and the job list.
pub struct Router {
    topk: Kernel,
    group: Kernel,
    experts: usize,
    top: usize,
}

/// Device addresses of a call's expert jobs.
#[derive(Clone, Copy, Debug, Default)]
pub struct Jobs {
    /// I32 `[picks][4]`: expert, first entry of `list`, picks, 0.
    pub jobs: u64,
    /// I32 `[picks]`: picks by expert; pick p is rank `p % top` of row `p / top`.
    pub list: u64,
    /// I32 `[2]`: jobs, picks.
    pub count: u64,
}

impl Router {
    /// Up to 1024 experts, up to 32 picks a row.
    pub fn new(dev: &Arc<Device>, experts: usize, top: usize) -> Result<Self> {
        if experts > 1024 || top > 32 || top > experts || top == 0 {
            return Err(CudaError::Shape { kernel: "router", what: format!("top {top} of {experts}") });
        }
        Ok(Router { topk: dev.kernel("router_topk", 0)?, group: dev.kernel("group_experts", 0)?, experts, top })
    }

    /// `logits` FP32 `[rows][pitch]` to `ids` I32 and `weights` FP32 `[rows][top]` in rank order.
    #[expect(clippy::too_many_arguments, reason = "one matrix in, two out")]
    pub fn select(&self, s: &Stream, logits: u64, pitch: usize, rows: usize, ids: u64, weights: u64, pdl: bool) -> Result<()> {
        let args = Args::new().ptr(logits).ints(&[self.experts, pitch, rows, self.top]).ptr(ids).ptr(weights);
        s.launch(&self.topk, [rows.div_ceil(4) as u32, 1, 1], 128, pdl, &args)
    }

    /// Groups the picks of `rows` rows by expert into jobs of at most `width` picks.
    pub fn group(&self, s: &Stream, ids: u64, rows: usize, width: usize, j: Jobs, pdl: bool) -> Result<()> {
        let args = Args::new().ptr(ids).ints(&[rows * self.top, self.experts, width]).ptr(j.jobs).ptr(j.list).ptr(j.count);
        s.launch(&self.group, [1, 1, 1], 1024, pdl, &args)
    }
}

/// Exact W4A4 experts over rg16 records, hidden `h`, intermediate `i`.
pub struct W4a4 {
    up: Kernel,
    down: Kernel,
    /// Hidden size.
    pub h: usize,
    /// Intermediate size.
    pub i: usize,
    /// Picks a job may have: the instance. 1, 4 or 8.
    pub width: usize,
    grid: u32,
    stages_up: usize,
    stages_down: usize,
    rph_up: usize,
    rph_down: usize,
}

/// Tunables of [`W4a4`]; none changes a bit.
#[derive(Clone, Copy, Debug)]
pub struct W4a4Tuning {
    /// Stages of the ring, at most.
    pub stages: usize,
    /// Row groups an item, gate/up: 1, 2, 4 or 8.
    pub rph_up: usize,
    /// Row groups an item, down: 1, 2, 4 or 8.
    pub rph_down: usize,
}

impl Default for W4a4Tuning {
    fn default() -> Self {
        W4a4Tuning { stages: 3, rph_up: 1, rph_down: 2 }
    }
}

/// Device addresses of one layer's experts.
#[derive(Clone, Copy, Debug, Default)]
pub struct ExpertTable {
    /// U64 `[E]`: address of each expert's rg16 record.
    pub records: u64,
    /// FP32 `[E][3]` (gate, up, down): fl32(weight scale * input scale).
    pub alpha: u64,
    /// FP32 `[E][3]`: input scales. Gate and up share the gate's.
    pub input: u64,
    /// Both hold divisors.
    pub divisor: bool,
}

impl W4a4 {
    /// `width` is the largest number of picks of one expert in a call, rounded up to 1, 4 or 8 (more become several jobs).
    pub fn new(dev: &Arc<Device>, h: usize, i: usize, width: usize, t: W4a4Tuning) -> Result<Self> {
        let width = match width {
            0 | 1 => 1,
            2..=4 => 4,
            _ => 8,
        };
        if !h.is_multiple_of(16) || !i.is_multiple_of(16) || h == 0 || i == 0 {
            return Err(CudaError::Shape { kernel: "w4a4", what: format!("hidden {h}, intermediate {i}: multiples of 16") });
        }
        let plan = |k: usize, rph: usize| {
            let u = k / 16;
            let fixed = 256 + 2 * 16 * width * 16 * 8 + 2 * (width * (k + u * 8)).div_ceil(128) * 128;
            let stage = 2 * rph * u * 144;
            let stages = (dev.info().shared_per_block.saturating_sub(fixed) / stage).min(t.stages);
            if stages < 1 {
                return Err(CudaError::Shape { kernel: "w4a4", what: format!("K = {k} does not fit shared memory") });
            }
            Ok((stages, fixed + stages * stage))
        };
        let (stages_up, shared_up) = plan(h, t.rph_up)?;
        let (stages_down, shared_down) = plan(i, t.rph_down)?;
        Ok(W4a4 {
            up: dev.kernel(&format!("w4a4_up_{width}"), shared_up)?,
            down: dev.kernel(&format!("w4a4_down_{width}"), shared_down)?,
            h,
            i,
            width,
            grid: dev.info().multiprocessors,
            stages_up,
            stages_down,
            rph_up: t.rph_up,
            rph_down: t.rph_down,
        })
    }

    /// Bytes of the gate/up part of a record; down follows.
    pub fn gate_up_bytes(&self) -> usize {
        2 * self.i / 16 * (self.h / 16) * 144
    }

    /// Bytes of a record without padding.
    pub fn record_bytes(&self) -> usize {
        self.gate_up_bytes() + self.h / 16 * (self.i / 16) * 144
    }

    /// Both products. `x` BF16 `[rows][h]`; `mid` BF16 `[picks][i]`; `y` BF16 `[picks][h]`.
    #[expect(clippy::too_many_arguments, reason = "the operands of one layer's experts")]
    pub fn launch(&self, s: &Stream, t: &ExpertTable, j: Jobs, top: usize, x: u64, mid: u64, y: u64, pdl: bool) -> Result<()> {
        let args = |x: u64, y: u64, k: usize, groups: usize, rph: usize, offset: usize, stages: usize| {
            let a = Args::new().ptr(t.records).ptr(t.alpha).ptr(t.input).ptr(j.jobs).ptr(j.list).ptr(j.count).ptr(x).ptr(y);
            a.ints(&[k, groups, rph, top, offset, stages, usize::from(t.divisor)])
        };
        let up = args(x, mid, self.h, 2 * self.i / 16, self.rph_up, 0, self.stages_up);
        s.launch(&self.up, [self.grid, 1, 1], 544, pdl, &up)?;
        let down = args(mid, y, self.i, self.h / 16, self.rph_down, self.gate_up_bytes(), self.stages_down);
        s.launch(&self.down, [self.grid, 1, 1], 544, true, &down)
    }
}
