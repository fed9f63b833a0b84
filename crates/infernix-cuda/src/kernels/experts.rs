//! Router selection and the exact W4A4 experts.

use crate::driver::{Args, Device, Kernel, Stream};
use crate::error::{CudaError, Result};
use std::sync::Arc;

/// Router top-k and the job list.
pub struct Router {
    topk: Kernel,
    group: Kernel,
    route: Kernel,
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
        Ok(Router {
            topk: dev.kernel("router_topk", 0)?,
            group: dev.kernel("group_experts", 0)?,
            route: dev.kernel("route_experts", 0)?,
            experts,
            top,
        })
    }

    /// `logits` FP32 `[rows][pitch]` to `ids` I32 and `weights` FP32 `[rows][top]` in rank order.
    #[expect(clippy::too_many_arguments, reason = "one matrix in, two out")]
    pub fn select(
        &self,
        s: &Stream,
        logits: u64,
        pitch: usize,
        rows: usize,
        ids: u64,
        weights: u64,
        pdl: bool,
    ) -> Result<()> {
        let args = Args::new().ptr(logits).ints(&[self.experts, pitch, rows, self.top]).ptr(ids).ptr(weights);
        s.launch(&self.topk, [rows.div_ceil(4) as u32, 1, 1], 128, pdl, &args)
    }

    /// Groups the picks of `rows` rows by expert into jobs of at most `width` picks, and quantises the input of each pick:
    /// `x` BF16 `[rows][h]`, `act` [`act_bytes`]`(h)` a pick. Without `x` (0) only the jobs are made.
    #[expect(clippy::too_many_arguments, reason = "ids and inputs to jobs and codes")]
    pub fn prepare(
        &self,
        s: &Stream,
        ids: u64,
        rows: usize,
        width: usize,
        j: Jobs,
        t: &ExpertTable,
        x: u64,
        h: usize,
        act: u64,
        pdl: bool,
    ) -> Result<()> {
        let picks = rows * self.top;
        let args =
            Args::new().ptr(ids).ints(&[picks, self.experts, width]).ptr(j.jobs).ptr(j.list).ptr(j.count);
        let args = args.ptr(x).ptr(t.input).ptr(act).ints(&[h, self.top, usize::from(t.divisor)]);
        let quantise = if x == 0 { 0 } else { picks };
        s.launch(&self.group, [quantise as u32 + 1, 1, 1], 1024, pdl, &args)
    }
}

/// Selection, jobs and inputs of a decode round's experts, for [`Router::route`].
#[derive(Clone, Copy, Debug, Default)]
pub struct Routed {
    /// FP32 `[rows][pitch]`.
    pub logits: u64,
    /// Elements between rows of `logits`.
    pub pitch: usize,
    /// I32 `[rows][top]` that take the place of the selection, all of equal weight; or 0.
    pub forced: u64,
    /// I32 `[rows][top]`, out.
    pub ids: u64,
    /// FP32 `[rows][top]`, out.
    pub weights: u64,
}

/// Experts without a frame that the host computes: `kernels/help.cuh`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Help {
    /// U32 `[E]`: not 0 where an expert has no frame.
    pub away: u64,
    /// Words of [`mail`], page-locked host memory.
    pub mail: u64,
    /// U32 `[STATE]` of device memory: posts so far, the post to wait for, its entries, whether the host
    /// was late, their picks; 0 at first.
    pub state: u64,
    /// Four bits for each number of experts without a frame, from none on: how many of them the host computes.
    pub split: u64,
    /// What the host knows the layer by.
    pub bank: usize,
}

impl Help {
    /// Words of `state`.
    pub const STATE: usize = 4 + mail::MOST;
    /// Rows of a round, at most: as many picks may an expert have.
    pub const ROWS: usize = 4;
}

/// Words that the device and the host share.
pub mod mail {
    /// Number of the last post; written last.
    pub const POST: usize = 0;
    /// Bank of the post.
    pub const BANK: usize = 1;
    /// Entries of the post.
    pub const ENTRIES: usize = 2;
    /// Expert and pick of each entry, picks of an expert together.
    pub const LIST: usize = 4;
    /// Number of the last post answered, written last.
    pub const REPLY: usize = 128;
    /// Number of a post that the device gave up.
    pub const LATE: usize = 160;
    /// Quantised inputs, [`super::act_bytes`] an entry; then answers, BF16 `[entries][h]`.
    pub const ACT: usize = 256;
    /// Entries of a post, at most.
    pub const MOST: usize = 32;
    /// Experts of a post, at most.
    pub const EXPERTS: usize = 8;

    /// First word of the answers.
    pub fn answers(h: usize) -> usize {
        ACT + MOST * super::act_bytes(h) / 4
    }

    /// Words in all.
    pub fn words(h: usize) -> usize {
        answers(h) + MOST * h / 2
    }
}

impl Router {
    /// Rows of one call of [`Router::route`], at most.
    pub const ROUTED_ROWS: usize = 32;

    /// [`Router::select`] and [`Router::prepare`] in one launch, the same words.
    #[expect(clippy::too_many_arguments, reason = "logits and inputs to jobs and codes")]
    pub fn route(
        &self,
        s: &Stream,
        r: Routed,
        rows: usize,
        width: usize,
        j: Jobs,
        t: &ExpertTable,
        x: u64,
        h: usize,
        act: u64,
        help: Option<&Help>,
        pdl: bool,
    ) -> Result<()> {
        let picks = rows * self.top;
        if rows > Self::ROUTED_ROWS || (help.is_some() && rows > Help::ROWS) {
            return Err(CudaError::Shape { kernel: "route", what: format!("{rows} rows") });
        }
        let a = Args::new().ptr(r.logits).ints(&[r.pitch, picks, self.experts, width]).ptr(r.forced);
        let a = a.ptr(r.ids).ptr(r.weights).ptr(j.jobs).ptr(j.list).ptr(j.count);
        let a = a.ptr(x).ptr(t.input).ptr(act).ints(&[h, self.top, usize::from(t.divisor)]);
        let p = help.copied().unwrap_or_default();
        let a = a.ptr(p.away).ptr(p.mail).ptr(p.state).ptr(p.split).int(p.bank);
        s.launch(&self.route, [picks as u32 + 1, 1, 1], 1024, pdl, &a)
    }
}

/// Bytes of one quantised input of `k` values.
pub fn act_bytes(k: usize) -> usize {
    (k + k / 2).div_ceil(16) * 16
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
    up_plan: Half,
    down_plan: Half,
}

#[derive(Clone, Copy)]
struct Half {
    stages: usize,
    rph: usize,
    grid: u32,
}

/// Tunables of [`W4a4`]; none changes a bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct W4a4Tuning {
    /// Stages of a CTA's ring, at most.
    pub stages: usize,
    /// Row groups an item, gate/up: 1, 2, 4 or 8.
    pub rph_up: usize,
    /// Row groups an item, down: 1, 2, 4 or 8.
    pub rph_down: usize,
    /// CTAs a multiprocessor, at most.
    pub per_sm: usize,
}

impl Default for W4a4Tuning {
    fn default() -> Self {
        W4a4Tuning { stages: 2, rph_up: 1, rph_down: 4, per_sm: 4 }
    }
}

impl W4a4Tuning {
    /// What measured best: one pick a job wants eight row groups of down in an item (18.7 against 20.6 us), more want four.
    pub fn for_width(width: usize) -> Self {
        W4a4Tuning { rph_down: if width <= 1 { 8 } else { 4 }, ..Self::default() }
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
            return Err(CudaError::Shape {
                kernel: "w4a4",
                what: format!("hidden {h}, intermediate {i}: multiples of 16"),
            });
        }
        let plan = |name: &str, k: usize, rph: usize| {
            let u = k / 16;
            let fixed = 256 + 2 * 8 * width * 16 * 8 + (width * act_bytes(k)).div_ceil(128) * 128;
            let item = rph * u * 144;
            // The instance's register limit allows this many CTAs.
            let most = match width {
                1 => 4,
                4 => 3,
                _ => 2,
            };
            let total = dev.info().shared_per_block + 1024;
            // Prefer residency, then depth.
            for per_sm in (1..=t.per_sm.min(most)).rev() {
                let room = (total / per_sm - 1024).saturating_sub(fixed) / item;
                if room >= 2 || (per_sm == 1 && room >= 1) {
                    let stages = room.min(t.stages).min(8);
                    let kernel = dev.kernel(&format!("w4a4_{name}_{width}"), fixed + stages * item)?;
                    return Ok((
                        kernel,
                        Half { stages, rph, grid: dev.info().multiprocessors * per_sm as u32 },
                    ));
                }
            }
            Err(CudaError::Shape { kernel: "w4a4", what: format!("K = {k} does not fit shared memory") })
        };
        let (up, up_plan) = plan("up", h, t.rph_up)?;
        let (down, down_plan) = plan("down", i, t.rph_down)?;
        Ok(W4a4 { up, down, h, i, width, up_plan, down_plan })
    }

    /// Bytes of the gate/up part of a record; down follows.
    pub fn gate_up_bytes(&self) -> usize {
        2 * self.i / 16 * (self.h / 16) * 144
    }

    /// Bytes of a record without padding.
    pub fn record_bytes(&self) -> usize {
        self.gate_up_bytes() + self.h / 16 * (self.i / 16) * 144
    }

    /// Both products. `act`: the quantised inputs of [`Router::prepare`]; `mid` BF16 `[picks][i]`; `y` BF16 `[picks][h]`. `help`:
    /// that of the [`Router::route`] before.
    #[expect(clippy::too_many_arguments, reason = "the operands of one layer's experts")]
    pub fn launch(
        &self,
        s: &Stream,
        t: &ExpertTable,
        j: Jobs,
        act: u64,
        mid: u64,
        y: u64,
        help: Option<&Help>,
        pdl: bool,
    ) -> Result<()> {
        let (mail, state) = help.map_or((0, 0), |p| (p.mail, p.state));
        let args = |x: u64, y: u64, k: usize, groups: usize, p: Half, offset: usize| {
            let a = Args::new()
                .ptr(t.records)
                .ptr(t.alpha)
                .ptr(t.input)
                .ptr(j.jobs)
                .ptr(j.list)
                .ptr(j.count)
                .ptr(x)
                .ptr(y);
            let a = a.ints(&[k, groups, p.rph, offset, p.stages, usize::from(t.divisor)]);
            a.ptr(mail).ptr(state).int(mail::answers(self.h))
        };
        let up = args(act, mid, self.h, 2 * self.i / 16, self.up_plan, 0);
        s.launch(&self.up, [self.up_plan.grid, 1, 1], 288, pdl, &up)?;
        let down = args(mid, y, self.i, self.h / 16, self.down_plan, self.gate_up_bytes());
        s.launch(&self.down, [self.down_plan.grid, 1, 1], 288, true, &down)
    }
}
