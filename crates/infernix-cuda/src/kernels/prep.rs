//! Between the projections of an attention layer and its scores, in one launch (decode).

use super::attention::Paging;
use super::index::{IndexRing, Rotary, index_words};
use super::rows::Lanes;
use super::select::IndexPages;
use crate::driver::{Args, Device, Kernel, Stream};
use crate::error::Result;
use std::sync::Arc;

/// Norms, rotations and appends of a decode round's rows.
pub struct AttentionPrep {
    kernel: Kernel,
}

/// Projections of one kind: BF16 `[rows][pitch]` and the norm of its heads.
#[derive(Clone, Copy, Debug, Default)]
pub struct Heads {
    /// Values.
    pub x: u64,
    /// Elements between rows.
    pub pitch: usize,
    /// BF16 zero-centred norm weight of a head.
    pub norm: u64,
    /// Heads a row.
    pub heads: usize,
    /// BF16 `[rows][heads * width]`; keys go to their pages instead.
    pub to: u64,
}

/// New index keys, see [`super::index::IndexAppend`].
#[derive(Clone, Copy, Debug)]
pub struct IndexKeys {
    /// BF16 `[rows][128]`.
    pub raw: u64,
    /// Norm of a pooled key, BF16 `[128]`.
    pub norm: u64,
    /// Rings of raw keys.
    pub ring: IndexRing,
    /// Rotary table.
    pub rope: Rotary,
    /// Pooled keys.
    pub pages: IndexPages,
    /// Tokens a block.
    pub ratio: usize,
}

impl AttentionPrep {
    /// Looks the kernel up.
    pub fn new(dev: &Arc<Device>) -> Result<Self> {
        Ok(AttentionPrep { kernel: dev.kernel("attn_prep", 0)? })
    }

    /// Queries, keys and index queries are normed and rotated by `angles` (`RowOps::rope_table`, `half` pairs); keys and values go
    /// to their pages. Heads of `d`, index heads of 128. Index queries with no heads are left out.
    #[expect(clippy::too_many_arguments, reason = "the inputs of an attention layer")]
    pub fn launch(
        &self,
        s: &Stream,
        q: Heads,
        k: Heads,
        v: (u64, usize),
        iq: Heads,
        index: Option<&IndexKeys>,
        angles: u64,
        half: usize,
        d: usize,
        eps: f32,
        p: &Paging,
        lanes: &Lanes,
        pdl: bool,
    ) -> Result<()> {
        let pair = |a: usize, b: usize| a as u64 | (b as u64) << 32;
        let rows = lanes.rows;
        let index_rows = if index.is_some() { rows } else { 0 };
        let mut w = vec![q.x, k.x, v.0, iq.x, q.norm, k.norm, iq.norm, angles];
        w.extend([q.to, iq.to, p.keys, p.values, p.tables, lanes.row_lane, lanes.row_pos]);
        w.extend([pair(q.pitch, k.pitch), pair(v.1, iq.pitch), pair(q.heads, k.heads), pair(iq.heads, d)]);
        w.extend([pair(half, rows), pair(p.table_pitch, p.page_log), pair(p.page_stride, p.token_stride)]);
        w.extend([pair(p.head_stride, index_rows), u64::from(eps.to_bits())]);
        match index {
            Some(i) => {
                w.extend(index_words(i.raw, &i.ring, i.norm, &i.rope, eps, lanes, &i.pages, i.ratio));
            }
            None => w.extend([0; 19]),
        }
        let jobs = (q.heads + 2 * k.heads + iq.heads) * rows;
        let grid = index_rows + jobs.div_ceil(4);
        s.launch(&self.kernel, [grid as u32, 1, 1], 128, pdl, &Args::new().block(&w))
    }
}
