//! Row operations: norms, rope, convolution, gates, embedding, combine. Each rounds once, at its store.

use crate::driver::{Args, Device, Kernel, Stream};
use crate::error::{CudaError, Result};
use std::sync::Arc;

/// The kernels, looked up once.
pub struct RowOps {
    rms_norm: Kernel,
    rope_table: Kernel,
    head_norm_rope: Kernel,
    conv_silu: Kernel,
    conv_fold: Kernel,
    gated_norm: Kernel,
    swiglu: Kernel,
    mul_sigmoid: Kernel,
    add: Kernel,
    embed: Kernel,
    combine: Kernel,
    inject: Kernel,
}

/// The lanes of a round on the device: I32 arrays over rows or lanes. Recurrent slots come in pairs: a round reads one of a pair
/// and writes the other.
#[derive(Clone, Copy, Debug, Default)]
pub struct Lanes {
    /// `[rows]`: lane of each row.
    pub row_lane: u64,
    /// `[rows]`: sequence index of each row.
    pub row_pos: u64,
    /// `[rows][3]`: rotary position.
    pub positions: u64,
    /// `[lanes + 1]`: first row of each lane.
    pub first: u64,
    /// `[lanes]`: columns after which state is kept.
    pub count: u64,
    /// `[lanes]`: slot read.
    pub slots: u64,
    /// `[lanes]`: slot written.
    pub out_slots: u64,
    /// Rows.
    pub rows: usize,
    /// Lanes.
    pub lanes: usize,
}

/// Values that a norm is taken over, at most.
const MOST_NORMED: usize = 16_384;

fn grid2(n: usize, per: usize, rows: usize) -> [u32; 3] {
    [n.div_ceil(per) as u32, rows as u32, 1]
}

#[expect(clippy::too_many_arguments, reason = "matrices and their pitches")]
impl RowOps {
    /// Looks the kernels up.
    pub fn new(dev: &Arc<Device>) -> Result<Self> {
        let k = |n: &str| dev.kernel(n, 0);
        Ok(RowOps {
            rms_norm: k("rms_norm")?,
            rope_table: k("rope_table")?,
            head_norm_rope: k("head_norm_rope")?,
            conv_silu: k("conv_silu")?,
            conv_fold: k("conv_fold")?,
            gated_norm: k("gated_norm")?,
            swiglu: k("swiglu")?,
            mul_sigmoid: k("mul_sigmoid")?,
            add: k("add")?,
            embed: k("embed")?,
            combine: k("combine")?,
            inject: k("inject")?,
        })
    }

    /// RMS norm of `groups` groups of `n` (even, at most 16,384) values a row; weights BF16 `[groups * n]`, `1 + w` if `centred`.
    pub fn rms_norm(
        &self,
        s: &Stream,
        x: u64,
        w: u64,
        y: u64,
        n: usize,
        groups: usize,
        rows: usize,
        x_pitch: usize,
        y_pitch: usize,
        eps: f32,
        centred: bool,
        pdl: bool,
    ) -> Result<()> {
        self.norm(s, [x, 0, w, 0, y], n, groups, rows, [x_pitch, 0, y_pitch], eps, centred, pdl)
    }

    /// `r = x + a`, then the RMS norm `y` of `r`: rows of `n` (even, at most 16,384) values, contiguous. `r` may be `x`.
    pub fn add_norm(
        &self,
        s: &Stream,
        (x, a, r): (u64, u64, u64),
        w: u64,
        y: u64,
        n: usize,
        rows: usize,
        eps: f32,
        centred: bool,
        pdl: bool,
    ) -> Result<()> {
        self.norm(s, [x, a, w, r, y], n, 1, rows, [n; 3], eps, centred, pdl)
    }

    /// Operands x, a, w, r, y and pitches of x, a, y, as the kernel takes them.
    fn norm(
        &self,
        s: &Stream,
        operands: [u64; 5],
        n: usize,
        groups: usize,
        rows: usize,
        pitches: [usize; 3],
        eps: f32,
        centred: bool,
        pdl: bool,
    ) -> Result<()> {
        if n == 0 || n > MOST_NORMED || !n.is_multiple_of(2) {
            return Err(CudaError::Shape { kernel: "rms_norm", what: format!("rows of {n} values") });
        }
        let args = operands.iter().fold(Args::new(), |a, p| a.ptr(*p));
        let args = args.int(n).ints(&pitches).f32(eps).int(usize::from(centred));
        // A thread a piece of eight values, or two.
        let threads = n.div_ceil(8).next_multiple_of(32).min(1024);
        s.launch(&self.rms_norm, [groups as u32, rows as u32, 1], threads as u32, pdl, &args)
    }

    /// cos and sin FP32 `[rows][2][half]` from positions I32 `[rows][3]`, frequencies F64 `[half]`, axes U8 `[half]`.
    pub fn rope_table(
        &self,
        s: &Stream,
        pos: u64,
        freq: u64,
        axis: u64,
        scale: f32,
        half: usize,
        rows: usize,
        table: u64,
        pdl: bool,
    ) -> Result<()> {
        let a = Args::new().ptr(pos).ptr(freq).ptr(axis).f32(scale).ints(&[half, rows]).ptr(table);
        s.launch(&self.rope_table, [(rows * half).div_ceil(128) as u32, 1, 1], 128, pdl, &a)
    }

    /// Head norm and rotation, one rounding. Heads of width `d` <= 256.
    pub fn head_norm_rope(
        &self,
        s: &Stream,
        x: u64,
        w: u64,
        table: u64,
        y: u64,
        d: usize,
        half: usize,
        heads: usize,
        rows: usize,
        x_pitch: usize,
        x_head: usize,
        y_pitch: usize,
        y_head: usize,
        eps: f32,
        pdl: bool,
    ) -> Result<()> {
        let a = Args::new()
            .ptr(x)
            .ptr(w)
            .ptr(table)
            .ptr(y)
            .ints(&[d, half, heads, rows, x_pitch, x_head, y_pitch, y_head])
            .f32(eps);
        s.launch(&self.head_norm_rope, [(heads * rows).div_ceil(4) as u32, 1, 1], 128, pdl, &a)
    }

    /// Convolution and silu over `c` channels of one sequence's rows.
    pub fn conv_silu(
        &self,
        s: &Stream,
        x: u64,
        state: u64,
        w: u64,
        y: u64,
        c: usize,
        rows: usize,
        x_pitch: usize,
        y_pitch: usize,
        pdl: bool,
    ) -> Result<()> {
        let a = Args::new().ptr(x).ptr(state).ptr(w).ptr(y).ints(&[c, x_pitch, y_pitch]);
        s.launch(&self.conv_silu, grid2(c, 256, rows), 256, pdl, &a)
    }

    /// Advances a convolution state by `*count` rows of `x`.
    pub fn conv_fold(
        &self,
        s: &Stream,
        x: u64,
        state: u64,
        count: u64,
        c: usize,
        x_pitch: usize,
        pdl: bool,
    ) -> Result<()> {
        let a = Args::new().ptr(x).ptr(state).ptr(count).ints(&[c, x_pitch]);
        s.launch(&self.conv_fold, grid2(c, 256, 1), 256, pdl, &a)
    }

    /// `rms0(o; w) * act(z)` per head of width `d` (multiple of 32, at most 256).
    pub fn gated_norm(
        &self,
        s: &Stream,
        o: u64,
        z: u64,
        w: u64,
        y: u64,
        d: usize,
        heads: usize,
        rows: usize,
        o_pitch: usize,
        z_pitch: usize,
        y_pitch: usize,
        eps: f32,
        sigmoid: bool,
        pdl: bool,
    ) -> Result<()> {
        let a = Args::new()
            .ptr(o)
            .ptr(z)
            .ptr(w)
            .ptr(y)
            .ints(&[d, heads, rows, o_pitch, z_pitch, y_pitch])
            .f32(eps)
            .int(usize::from(sigmoid));
        s.launch(&self.gated_norm, [(heads * rows).div_ceil(4) as u32, 1, 1], 128, pdl, &a)
    }

    /// `silu(g) * u`, `n` even.
    pub fn swiglu(
        &self,
        s: &Stream,
        g: u64,
        u: u64,
        y: u64,
        n: usize,
        rows: usize,
        g_pitch: usize,
        u_pitch: usize,
        y_pitch: usize,
        pdl: bool,
    ) -> Result<()> {
        let a = Args::new().ptr(g).ptr(u).ptr(y).ints(&[n, g_pitch, u_pitch, y_pitch]);
        s.launch(&self.swiglu, grid2(n, 512, rows), 256, pdl, &a)
    }

    /// `o * sigma(gate)`, heads of width `d`.
    pub fn mul_sigmoid(
        &self,
        s: &Stream,
        o: u64,
        gate: u64,
        y: u64,
        n: usize,
        d: usize,
        rows: usize,
        o_pitch: usize,
        g_pitch: usize,
        g_head: usize,
        y_pitch: usize,
        pdl: bool,
    ) -> Result<()> {
        let a = Args::new().ptr(o).ptr(gate).ptr(y).ints(&[n, d, o_pitch, g_pitch, g_head, y_pitch]);
        s.launch(&self.mul_sigmoid, grid2(n, 256, rows), 256, pdl, &a)
    }

    /// `a += b` for rows of `n` (even) values, `pitch` apart in `a` and `n` in `b`.
    pub fn add_to(
        &self,
        s: &Stream,
        a: u64,
        pitch: usize,
        b: u64,
        n: usize,
        rows: usize,
        pdl: bool,
    ) -> Result<()> {
        let args = Args::new().ptr(a).ptr(b).ptr(a).ints(&[n, pitch, n, pitch]);
        s.launch(&self.add, grid2(n, 512, rows), 256, pdl, &args)
    }

    /// `a + b`, contiguous rows of `n` (even).
    pub fn add(&self, s: &Stream, x: u64, b: u64, y: u64, n: usize, rows: usize, pdl: bool) -> Result<()> {
        let a = Args::new().ptr(x).ptr(b).ptr(y).ints(&[n, n, n, n]);
        s.launch(&self.add, grid2(n, 512, rows), 256, pdl, &a)
    }

    /// Rows of a BF16 table (`q8 = None`) or a q8_g32 table (scales address and bytes a row), written `copies` times.
    pub fn embed(
        &self,
        s: &Stream,
        ids: u64,
        codes: u64,
        row_bytes: usize,
        q8: Option<(u64, usize)>,
        n: usize,
        copies: usize,
        rows: usize,
        y: u64,
        pdl: bool,
    ) -> Result<()> {
        let (sc, sp) = q8.unwrap_or((0, 0));
        let a = Args::new()
            .ptr(ids)
            .ptr(codes)
            .ptr(sc)
            .ints(&[usize::from(q8.is_some()), row_bytes, sp, n, copies])
            .ptr(y);
        s.launch(&self.embed, [rows as u32, 1, 1], 256, pdl, &a)
    }

    /// Rank-ordered combine with the shared expert, then the injection into four streams where `r` is not 0.
    pub fn combine(
        &self,
        s: &Stream,
        ye: u64,
        slot: u64,
        w: u64,
        shared: u64,
        shared_logit: u64,
        logit_pitch: usize,
        b: u64,
        r: u64,
        out: u64,
        n: usize,
        top: usize,
        rows: usize,
        pdl: bool,
    ) -> Result<()> {
        let a = Args::new()
            .ptr(ye)
            .ptr(slot)
            .ptr(w)
            .ptr(shared)
            .ptr(shared_logit)
            .ptr(b)
            .ptr(r)
            .ptr(out)
            .ints(&[n, top, logit_pitch]);
        s.launch(&self.combine, grid2(n, 256, rows), 256, pdl, &a)
    }

    /// `to_s = R_s + b_s y` for four streams; `to` may be `r`.
    #[expect(clippy::too_many_arguments, reason = "two matrices in, one out")]
    pub fn inject(
        &self,
        s: &Stream,
        y: u64,
        b: u64,
        r: u64,
        to: u64,
        n: usize,
        rows: usize,
        pdl: bool,
    ) -> Result<()> {
        let a = Args::new().ptr(y).ptr(b).ptr(r).ptr(to).int(n);
        s.launch(&self.inject, grid2(n, 2048, rows), 256, pdl, &a)
    }
}
