//! Paged attention over int8 keys and values.

use super::attention::Selection;
use crate::driver::{Args, Device, Kernel, Stream};
use crate::error::{CudaError, Result};
use std::sync::Arc;

/// Pages of codes (bytes) and of FP16 scales, one per 64 dims: the scale of an element lies at a 64th of its offset, so every
/// stride is a multiple of 64.
#[derive(Clone, Copy, Debug)]
pub struct Paging8 {
    /// Key codes, rotated.
    pub keys: u64,
    /// Value codes.
    pub values: u64,
    /// FP16 scales of keys.
    pub key_scales: u64,
    /// FP16 scales of values.
    pub value_scales: u64,
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

/// Attention of `heads` query heads over `kv_heads` of width `d` (128 or 256), int8 G64 with rotated keys.
///
/// Within 5e-3 relative L2 of the exact attention over the decoded words; rotated queries enter as two BF16 parts.
pub struct Attention8 {
    rotate: Kernel,
    decode: Kernel,
    merge: Kernel,
    append: Kernel,
    prefill: Kernel,
    heads: usize,
    kv_heads: usize,
    d: usize,
    slots: usize,
}

impl Attention8 {
    /// At most 16 query heads share a kv head.
    pub fn new(dev: &Arc<Device>, heads: usize, kv_heads: usize, d: usize) -> Result<Self> {
        let fits = kv_heads > 0 && heads.is_multiple_of(kv_heads) && heads / kv_heads <= 16;
        if !fits || !matches!(d, 128 | 256) {
            return Err(CudaError::Shape {
                kernel: "attention8",
                what: format!("{heads} heads over {kv_heads} of {d}"),
            });
        }
        // Codes of two tiles of 32 keys and values, their scales, one tile of values in BF16.
        let tiles = 2 * 32 * (d + 32) + 2 * 32 * d + 2 * 2 * 32 * (d / 64) * 2 + 32 * (2 * d + 16);
        let shared = tiles + 16 * 36 * 4 + 256;
        Ok(Attention8 {
            rotate: dev.kernel(&format!("rotate_queries_{d}"), 0)?,
            decode: dev.kernel(&format!("attn8_decode_{d}"), shared)?,
            merge: dev.kernel("attn_merge", 0)?,
            append: dev.kernel(&format!("kv8_append_{d}"), 0)?,
            prefill: dev.kernel(&format!("attn8_prefill_{d}"), tiles)?,
            heads,
            kv_heads,
            d,
            // Registers let two blocks share a multiprocessor.
            slots: dev.info().multiprocessors as usize
                * ((dev.info().shared_per_block + 1024) / (shared + 1024)).clamp(1, 2),
        })
    }

    /// See [`super::attention::Attention::for_many_rows`].
    pub fn for_many_rows(self) -> Self {
        Attention8 { slots: 4 * self.kv_heads, ..self }
    }

    /// Splits of rows of at most `len` keys, see [`super::attention::Attention::splits`].
    pub fn splits(&self, len: usize) -> usize {
        len.div_ceil(64).min(self.slots.div_ceil(self.kv_heads)).max(1)
    }

    /// Bytes of rotated queries of `rows` rows.
    pub fn rotated_bytes(&self, rows: usize) -> usize {
        rows * self.heads * self.d * 4
    }

    /// Bytes of scratch for a decode of `rows` rows of at most `len` keys: rotated queries, then the splits.
    pub fn scratch(&self, rows: usize, len: usize) -> usize {
        self.rotated_bytes(rows) + rows * self.kv_heads * self.splits(len) * 16 * (self.d + 2) * 4
    }

    #[expect(clippy::too_many_arguments, reason = "queries, their pitches and where they go")]
    fn rotate(
        &self,
        s: &Stream,
        q: u64,
        pitch: usize,
        head: usize,
        rows: usize,
        to: u64,
        pdl: bool,
    ) -> Result<()> {
        let args = Args::new().ptr(q).ptr(to).ints(&[pitch, head]);
        s.launch(&self.rotate, [self.heads as u32, rows as u32, 1], 32, pdl, &args)
    }

    /// As [`super::attention::Attention::launch`].
    #[expect(clippy::too_many_arguments, reason = "the operands of one attention")]
    pub fn launch(
        &self,
        s: &Stream,
        q: &super::attention::Queries,
        p: &Paging8,
        sel: Option<&Selection>,
        scratch: u64,
        gate: Option<(u64, usize, usize)>,
        out: u64,
        out_pitch: usize,
        pdl: bool,
    ) -> Result<()> {
        self.rotate(s, q.ptr, q.pitch, q.head, q.rows, scratch, pdl)?;
        let part = scratch + self.rotated_bytes(q.rows) as u64;
        let splits = self.splits(q.max_len);
        let group = self.heads / self.kv_heads;
        let ml = part + (q.rows * self.kv_heads * splits * 16 * self.d * 4) as u64;
        let scale = std::f64::consts::LOG2_E / (self.d as f64).sqrt();
        let (sb, sc, sp, ratio) = sel.map_or((0, 0, 0, 1), |s| (s.blocks, s.counts, s.pitch, s.ratio));
        let args = Args::new().ptr(scratch).ptr(p.keys).ptr(p.values).ptr(p.key_scales).ptr(p.value_scales);
        let args = args.ptr(p.tables).ptr(q.lane).ptr(q.pos).ptr(sb).ptr(sc).ptr(part).ptr(ml);
        let args = args
            .ints(&[group, p.table_pitch, p.page_log, p.page_stride, p.token_stride, p.head_stride])
            .ints(&[sp, ratio, splits, self.slots])
            .f32(scale as f32);
        s.launch(&self.decode, [splits as u32, self.kv_heads as u32, q.rows as u32], 128, true, &args)?;
        let (g, gp, gh) = gate.unwrap_or((0, 0, 0));
        let args = Args::new().ptr(part).ptr(ml).ptr(q.pos).ptr(sc).ptr(g).ptr(out);
        let args = args.ints(&[group, self.kv_heads, ratio, splits, self.slots, self.d, out_pitch, gp, gh]);
        s.launch(&self.merge, [self.heads as u32, q.rows as u32, self.d as u32 / 64], 256, true, &args)
    }

    /// As [`super::attention::Attention::prefill`], with [`Attention8::rotated_bytes`] of scratch.
    #[expect(clippy::too_many_arguments, reason = "the operands of one attention")]
    pub fn prefill(
        &self,
        s: &Stream,
        q: (u64, usize, usize),
        p: &Paging8,
        table: u64,
        rows: usize,
        pos0: usize,
        scratch: u64,
        gate: Option<(u64, usize, usize)>,
        out: u64,
        out_pitch: usize,
        pdl: bool,
    ) -> Result<()> {
        self.rotate(s, q.0, q.1, q.2, rows, scratch, pdl)?;
        let group = self.heads / self.kv_heads;
        let (g, gp, gh) = gate.unwrap_or((0, 0, 0));
        let scale = std::f64::consts::LOG2_E / (self.d as f64).sqrt();
        let args = Args::new().ptr(scratch).ptr(p.keys).ptr(p.values).ptr(p.key_scales).ptr(p.value_scales);
        let args = args
            .ptr(table)
            .ptr(g)
            .ptr(out)
            .ints(&[rows, pos0, group, p.page_log, p.page_stride, p.token_stride, p.head_stride])
            .ints(&[out_pitch, gp, gh])
            .f32(scale as f32);
        s.launch(
            &self.prefill,
            [(rows * group).div_ceil(128) as u32, self.kv_heads as u32, 1],
            256,
            true,
            &args,
        )
    }

    /// Rotates keys, quantises and writes keys and values `[rows][kv_heads * d]` into their pages; the bytes depend on nothing else.
    #[expect(clippy::too_many_arguments, reason = "two matrices and their pages")]
    pub fn append(
        &self,
        s: &Stream,
        k: u64,
        k_pitch: usize,
        v: u64,
        v_pitch: usize,
        p: &Paging8,
        lane: u64,
        pos: u64,
        rows: usize,
        pdl: bool,
    ) -> Result<()> {
        let args = Args::new().ptr(k).ptr(v).ptr(p.keys).ptr(p.values).ptr(p.key_scales).ptr(p.value_scales);
        let args = args.ptr(p.tables).ptr(lane).ptr(pos).ints(&[
            k_pitch,
            v_pitch,
            p.table_pitch,
            p.page_log,
            p.page_stride,
            p.token_stride,
            p.head_stride,
        ]);
        s.launch(&self.append, [self.kv_heads as u32, rows as u32, 1], 64, pdl, &args)
    }
}
