//! Exact selection: blocks of the sparse-attention index, candidates of the head.

use crate::driver::{Args, Device, Kernel, Stream};
use crate::error::{CudaError, Result};
use std::sync::Arc;

/// Pooled index keys in pages of `1 << page_log` blocks of 128 values, BF16.
#[derive(Clone, Copy, Debug)]
pub struct IndexPages {
    /// Pages.
    pub keys: u64,
    /// I32 `[lanes][table_pitch]`.
    pub tables: u64,
    /// Entries between lanes.
    pub table_pitch: usize,
    /// log2 of blocks a page.
    pub page_log: usize,
    /// Elements between pages.
    pub page_stride: usize,
}

/// Scores and top blocks, up to 4 index heads of 128.
pub struct IndexSelect {
    score: Kernel,
    score4: Kernel,
    chunk: Kernel,
    select: Kernel,
    heads: usize,
    ratio: usize,
    want: usize,
}

impl IndexSelect {
    /// `heads` index heads, `ratio` tokens a block, `want` blocks at most.
    pub fn new(dev: &Arc<Device>, heads: usize, ratio: usize, want: usize) -> Result<Self> {
        if heads == 0 || heads > 4 || ratio == 0 || want == 0 || want > 512 {
            return Err(CudaError::Shape {
                kernel: "qsa",
                what: format!("{heads} heads, ratio {ratio}, budget {want}"),
            });
        }
        Ok(IndexSelect {
            score: dev.kernel("qsa_score", 0)?,
            score4: dev.kernel("qsa_score4", 0)?,
            chunk: dev.kernel("qsa_chunk", 0)?,
            select: dev.kernel("qsa_select", 0)?,
            heads,
            ratio,
            want,
        })
    }

    /// Bytes of scratch for `rows` rows of at most `max_blocks` blocks.
    pub fn scratch(&self, rows: usize, max_blocks: usize) -> usize {
        rows * max_blocks.div_ceil(4096) * self.want * 4
    }

    /// `q` BF16 `[rows][q_pitch]` (heads of 128, normed and rotated); `lane`, `pos` I32 `[rows]`. Row r has `(pos + 1) / ratio`
    /// complete blocks. `scores` FP32 `[rows][score_pitch]`; `ids` I32 `[rows][id_pitch]` ascending; `counts` I32 `[rows]`.
    #[expect(clippy::too_many_arguments, reason = "queries, pages and three outputs")]
    pub fn launch(
        &self,
        s: &Stream,
        q: u64,
        q_pitch: usize,
        p: &IndexPages,
        lane: u64,
        pos: u64,
        rows: usize,
        max_blocks: usize,
        scores: u64,
        score_pitch: usize,
        scratch: u64,
        ids: u64,
        id_pitch: usize,
        counts: u64,
        pdl: bool,
    ) -> Result<()> {
        let chunks = max_blocks.div_ceil(4096);
        if chunks > 16 {
            return Err(CudaError::Shape {
                kernel: "qsa",
                what: format!("{max_blocks} blocks, at most 65536"),
            });
        }
        let scale = 128f32.powf(-0.5);
        let a = Args::new().ptr(q).ptr(p.keys).ptr(p.tables).ptr(lane).ptr(pos).ptr(scores);
        let a = a
            .ints(&[q_pitch, p.table_pitch, p.page_log, p.page_stride, self.ratio, score_pitch])
            .f32(scale)
            .int(self.heads);
        let across = max_blocks.div_ceil(64).max(1) as u32;
        // Few rows fill the device only one by one.
        if rows >= 64 {
            s.launch(&self.score4, [across, rows.div_ceil(4) as u32, 1], 256, pdl, &a.int(rows))?;
        } else {
            s.launch(&self.score, [across, rows as u32, 1], 256, pdl, &a)?;
        }
        if max_blocks > 32768 {
            let a = Args::new().ptr(scores).ptr(pos).ptr(scratch).ints(&[self.ratio, self.want, score_pitch]);
            s.launch(&self.chunk, [chunks as u32, rows as u32, 1], 1024, true, &a)?;
        }
        let a = Args::new().ptr(scores).ptr(pos).ptr(scratch).ptr(ids).ptr(counts).ints(&[
            self.ratio,
            self.want,
            score_pitch,
            id_pitch,
            chunks,
        ]);
        s.launch(&self.select, [rows as u32, 1, 1], 1024, true, &a)
    }
}

/// The best logits of a row, sorted by value, lower id first on equality.
pub struct Candidates {
    chunk: Kernel,
    sort: Kernel,
    want: usize,
}

const CHUNK: usize = 4096;

impl Candidates {
    /// `want` candidates, at most 256; 1 is the argmax.
    pub fn new(dev: &Arc<Device>, want: usize) -> Result<Self> {
        if want == 0 || want > 256 {
            return Err(CudaError::Shape {
                kernel: "candidates",
                what: format!("1-256 candidates, got {want}"),
            });
        }
        Ok(Candidates { chunk: dev.kernel("top_chunk", 0)?, sort: dev.kernel("top_sort", 0)?, want })
    }

    /// Bytes of scratch for `rows` rows of `n` logits.
    pub fn scratch(&self, rows: usize, n: usize) -> usize {
        4 * rows * (n.div_ceil(CHUNK) + 1) * self.want * 4
    }

    /// `logits` FP32 `[rows][pitch]`; `values` FP32 and `ids` I32 `[rows][want]` (-inf and -1 where a row is shorter).
    #[expect(clippy::too_many_arguments, reason = "one matrix in, two out")]
    pub fn launch(
        &self,
        s: &Stream,
        logits: u64,
        n: usize,
        pitch: usize,
        rows: usize,
        scratch: u64,
        values: u64,
        ids: u64,
        pdl: bool,
    ) -> Result<()> {
        let part = (rows * (n.div_ceil(CHUNK) + 1) * self.want * 4) as u64;
        let (mut v, mut id, mut n, mut pitch, mut pdl) = (logits, 0u64, n, pitch, pdl);
        let mut side = 0u64;
        loop {
            let chunks = n.div_ceil(CHUNK);
            let (ov, oid) = (scratch + side * 2 * part, scratch + side * 2 * part + part);
            let a = Args::new().ptr(v).ptr(id).ints(&[n, pitch, CHUNK, self.want]).ptr(ov).ptr(oid);
            s.launch(&self.chunk, [chunks as u32, rows as u32, 1], 1024, pdl, &a)?;
            (v, id, n, pitch, pdl) = (ov, oid, chunks * self.want, chunks * self.want, true);
            side ^= 1;
            if chunks == 1 {
                break;
            }
        }
        let a = Args::new().ptr(v).ptr(id).ints(&[self.want, self.want]).ptr(values).ptr(ids);
        s.launch(&self.sort, [rows as u32, 1, 1], 1024, true, &a)
    }
}
