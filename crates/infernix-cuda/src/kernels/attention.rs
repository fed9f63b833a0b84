//! Paged attention for decode and verify calls.

use crate::driver::{Args, Device, Kernel, Stream};
use crate::error::{CudaError, Result};
use std::sync::Arc;

/// Where keys and values are: pages of `1 << page_log` tokens; strides in elements.
#[derive(Clone, Copy, Debug)]
pub struct Paging {
    /// Key pages, BF16.
    pub keys: u64,
    /// Value pages, BF16.
    pub values: u64,
    /// I32 `[lanes][table_pitch]`: page of each run of tokens.
    pub tables: u64,
    /// Entries between lanes.
    pub table_pitch: usize,
    /// log2 of tokens a page.
    pub page_log: usize,
    /// Elements between pages.
    pub page_stride: usize,
    /// Elements between tokens of a page.
    pub token_stride: usize,
    /// Elements between kv heads.
    pub head_stride: usize,
}

/// Selected blocks of each row; a row with count -1 is dense.
#[derive(Clone, Copy, Debug)]
pub struct Selection {
    /// I32 `[rows][pitch]` block ids.
    pub blocks: u64,
    /// I32 `[rows]`.
    pub counts: u64,
    /// Entries between rows.
    pub pitch: usize,
    /// Tokens a block.
    pub ratio: usize,
}

/// Queries: head h of row r at `ptr + 2 (r * pitch + h * head)`; row r sees positions 0..=pos[r] of its lane.
#[derive(Clone, Copy, Debug)]
pub struct Queries {
    /// BF16.
    pub ptr: u64,
    /// Elements between rows.
    pub pitch: usize,
    /// Elements between heads.
    pub head: usize,
    /// I32 `[rows]`.
    pub lane: u64,
    /// I32 `[rows]`.
    pub pos: u64,
    /// Rows.
    pub rows: usize,
    /// No row has more keys.
    pub max_len: usize,
    /// How many of a row's last keys the launches right before may have written; `usize::MAX`: any.
    pub fresh: usize,
}

/// Attention of `heads` query heads over `kv_heads` of width `d` (128 or 256).
pub struct Attention {
    decode: Kernel,
    merge: Kernel,
    append: Kernel,
    prefill: Kernel,
    /// Where a block of it fits shared memory.
    rows: Option<Kernel>,
    heads: usize,
    kv_heads: usize,
    d: usize,
    slots: usize,
}

impl Attention {
    /// At most 16 query heads share a kv head.
    pub fn new(dev: &Arc<Device>, heads: usize, kv_heads: usize, d: usize) -> Result<Self> {
        if kv_heads == 0
            || !heads.is_multiple_of(kv_heads)
            || heads / kv_heads > 16
            || !matches!(d, 128 | 256)
        {
            return Err(CudaError::Shape {
                kernel: "attention",
                what: format!("{heads} heads over {kv_heads} of {d}"),
            });
        }
        let shared = 2 * 32 * (2 * d + 64) + 2 * 32 * (2 * d + 16) + 2 * 16 * 80 + 256;
        // Four warps of three tiles of 16 keys.
        let rings = 4 * 3 * 16 * (4 * d + 80);
        let fits = rings + 1024 <= dev.info().shared_per_block;
        Ok(Attention {
            decode: dev.kernel(&format!("attn_decode_{d}"), shared)?,
            merge: dev.kernel("attn_merge", 0)?,
            append: dev.kernel("kv_append", 0)?,
            prefill: dev
                .kernel(&format!("attn_prefill_{d}"), 2 * 32 * (2 * d + 64) + 2 * 32 * (2 * d + 16))?,
            rows: if fits { Some(dev.kernel(&format!("attn_rows_{d}"), rings)?) } else { None },
            heads,
            kv_heads,
            d,
            // Three blocks of 73 KB share a multiprocessor of the large parts; one fits the small ones.
            slots: dev.info().multiprocessors as usize
                * ((dev.info().shared_per_block + 1024) / (shared + 1024)).clamp(1, 3),
        })
    }

    /// The same for calls of many rows, where few parts a row are enough: their sums take less memory. Bits differ from those of
    /// the plain form.
    pub fn for_many_rows(self) -> Self {
        Attention { slots: 4 * self.kv_heads, ..self }
    }

    /// Splits of rows of at most `len` keys: the kernel cuts a row into equal parts of at least 64 keys, as many as blocks of it
    /// fit the device at once.
    pub fn splits(&self, len: usize) -> usize {
        len.div_ceil(64).min(self.slots.div_ceil(self.kv_heads)).max(1)
    }

    /// Bytes of scratch for `rows` rows of at most `len` keys.
    pub fn scratch(&self, rows: usize, len: usize) -> usize {
        rows * self.kv_heads * self.splits(len) * 16 * (self.d + 2) * 4
    }

    /// `out` BF16 `[rows][out_pitch]`, multiplied by sigma(gate) where `gate = (address, pitch, head stride)` is given.
    #[expect(clippy::too_many_arguments, reason = "the operands of one attention")]
    pub fn launch(
        &self,
        s: &Stream,
        q: &Queries,
        p: &Paging,
        sel: Option<&Selection>,
        scratch: u64,
        gate: Option<(u64, usize, usize)>,
        out: u64,
        out_pitch: usize,
        pdl: bool,
    ) -> Result<()> {
        let splits = self.splits(q.max_len);
        let group = self.heads / self.kv_heads;
        let ml = scratch + (q.rows * self.kv_heads * splits * 16 * self.d * 4) as u64;
        let scale = std::f64::consts::LOG2_E / (self.d as f64).sqrt();
        let (sb, sc, sp, ratio) = sel.map_or((0, 0, 0, 1), |s| (s.blocks, s.counts, s.pitch, s.ratio));
        let args = Args::new()
            .ptr(q.ptr)
            .ptr(p.keys)
            .ptr(p.values)
            .ptr(p.tables)
            .ptr(q.lane)
            .ptr(q.pos)
            .ptr(sb)
            .ptr(sc)
            .ptr(scratch)
            .ptr(ml)
            .ints(&[
                group,
                q.pitch,
                q.head,
                p.table_pitch,
                p.page_log,
                p.page_stride,
                p.token_stride,
                p.head_stride,
            ])
            .ints(&[sp, ratio, splits, self.slots, q.fresh.min(i32::MAX as usize)])
            .f32(scale as f32);
        s.launch(&self.decode, [splits as u32, self.kv_heads as u32, q.rows as u32], 128, pdl, &args)?;
        let (g, gp, gh) = gate.unwrap_or((0, 0, 0));
        let args = Args::new().ptr(scratch).ptr(ml).ptr(q.pos).ptr(sc).ptr(g).ptr(out);
        let args = args.ints(&[group, self.kv_heads, ratio, splits, self.slots, self.d, out_pitch, gp, gh]);
        s.launch(&self.merge, [self.heads as u32, q.rows as u32, self.d as u32 / 64], 256, true, &args)
    }

    /// Attention of many rows over selected blocks, for prompts: within the bound of [`Attention::launch`], a row's bits do not depend on
    /// the others. False if the device cannot run it.
    #[expect(clippy::too_many_arguments, reason = "the operands of one attention")]
    pub fn launch_rows(
        &self,
        s: &Stream,
        q: &Queries,
        p: &Paging,
        sel: &Selection,
        gate: Option<(u64, usize, usize)>,
        out: u64,
        out_pitch: usize,
        pdl: bool,
    ) -> Result<bool> {
        let Some(kernel) = &self.rows else { return Ok(false) };
        // Blocks of a power of two tokens, 512 at most.
        if !sel.ratio.is_power_of_two() || sel.pitch > 512 {
            return Ok(false);
        }
        let group = self.heads / self.kv_heads;
        let scale = std::f64::consts::LOG2_E / (self.d as f64).sqrt();
        let (g, gp, gh) = gate.unwrap_or((0, 0, 0));
        let a = Args::new().ptr(q.ptr).ptr(p.keys).ptr(p.values).ptr(p.tables).ptr(q.lane).ptr(q.pos);
        let a = a.ptr(sel.blocks).ptr(sel.counts).ptr(g).ptr(out);
        let a = a.ints(&[group, q.pitch, q.head, p.table_pitch, p.page_log, p.page_stride]);
        let a = a.ints(&[p.token_stride, p.head_stride, sel.pitch, sel.ratio, out_pitch, gp, gh]);
        s.launch(kernel, [q.rows as u32, self.kv_heads as u32, 1], 128, pdl, &a.f32(scale as f32))?;
        Ok(true)
    }

    /// Dense causal attention of `rows` consecutive tokens of one sequence, the first at position `pos0`; keys of all of them
    /// are in the pages of `table`. Queries, gate and output as in [`Attention::launch`].
    #[expect(clippy::too_many_arguments, reason = "the operands of one attention")]
    pub fn prefill(
        &self,
        s: &Stream,
        q: (u64, usize, usize),
        p: &Paging,
        table: u64,
        rows: usize,
        pos0: usize,
        gate: Option<(u64, usize, usize)>,
        out: u64,
        out_pitch: usize,
        pdl: bool,
    ) -> Result<()> {
        let group = self.heads / self.kv_heads;
        let scale = std::f64::consts::LOG2_E / (self.d as f64).sqrt();
        let (g, gp, gh) = gate.unwrap_or((0, 0, 0));
        let args = Args::new()
            .ptr(q.0)
            .ptr(p.keys)
            .ptr(p.values)
            .ptr(table)
            .ptr(g)
            .ptr(out)
            .ints(&[
                rows,
                pos0,
                group,
                q.1,
                q.2,
                p.page_log,
                p.page_stride,
                p.token_stride,
                p.head_stride,
                out_pitch,
                gp,
                gh,
            ])
            .f32(scale as f32);
        s.launch(
            &self.prefill,
            [(rows * group).div_ceil(128) as u32, self.kv_heads as u32, 1],
            256,
            pdl,
            &args,
        )
    }

    /// Writes keys and values `[rows][kv_heads * d]` of the rows into their pages.
    #[expect(clippy::too_many_arguments, reason = "two matrices and their pages")]
    pub fn append(
        &self,
        s: &Stream,
        k: u64,
        k_pitch: usize,
        v: u64,
        v_pitch: usize,
        p: &Paging,
        lane: u64,
        pos: u64,
        rows: usize,
        pdl: bool,
    ) -> Result<()> {
        let args = Args::new().ptr(k).ptr(v).ptr(p.keys).ptr(p.values).ptr(p.tables).ptr(lane).ptr(pos);
        let args = args.ints(&[
            k_pitch,
            v_pitch,
            p.table_pitch,
            p.page_log,
            p.page_stride,
            p.token_stride,
            p.head_stride,
        ]);
        s.launch(&self.append, [self.kv_heads as u32, rows as u32, 1], (self.d / 8) as u32, pdl, &args)
    }
}
