//! Attention over int8 keys and values: the same calls as over BF16 ones, by kernels that rotate queries and decode codes.

use super::blocks::{BATCH, queries, shift};
use super::context::{Cuda, CudaSelection};
use super::vram::{CudaBuf, fault};
use crate::error::EngineError;

impl Cuda {
    pub(super) fn run_kv8_append(&mut self, id: usize, k: &CudaBuf, v: &CudaBuf) -> Result<(), EngineError> {
        let round = self.round()?;
        let (lanes, paging) = (round.lanes, self.state()?.paging8(id, round.tables, round.pitch)?);
        let a = &self.state()?.layout.attention[id];
        let (kv, d) = (a.kv_heads, a.head_dim);
        let (from, values, pdl) = (Cuda::act(k)?, Cuda::act(v)?, self.pdl());
        let (lane, pos) = (lanes.row_lane, lanes.row_pos);
        // Any number of query heads will do: appending does not look at them.
        let attention = self.plans.attention8(kv, kv, d, false).map_err(fault)?;
        attention
            .append(&self.stream, from, k.width, values, v.width, &paging, lane, pos, k.rows, pdl)
            .map_err(fault)
    }

    pub(super) fn run_attention8(
        &mut self,
        id: usize,
        q: &CudaBuf,
        selection: Option<&CudaSelection>,
        gate: Option<&CudaBuf>,
        y: &CudaBuf,
    ) -> Result<(), EngineError> {
        let selection = selection.filter(|s| !s.dense);
        let longest = self.round()?.longest;
        if self.is_decode() {
            return self.few_rows8(id, q, selection, gate, y, (0, q.rows), longest);
        }
        for l in 0..self.round()?.lanes.lanes {
            let round = self.round()?;
            let (rows, start) = (round.lane_rows[l].clone(), round.start(l));
            let dense = selection.map_or(rows.len(), |s| s.dense_rows(start, rows.len()));
            if dense > 0 {
                self.prefix8(id, l, q, gate, y, dense)?;
            }
            for first in (rows.start + dense..rows.end).step_by(BATCH) {
                let n = BATCH.min(rows.end - first);
                self.few_rows8(id, q, selection, gate, y, (first, n), start + first + n - rows.start)?;
            }
        }
        Ok(())
    }

    /// `n` rows from `first` on, each by itself: all of a decode round, or rows of a prompt with their selections.
    #[expect(clippy::too_many_arguments, reason = "the operands of one attention and a range of rows")]
    fn few_rows8(
        &mut self,
        id: usize,
        q: &CudaBuf,
        selection: Option<&CudaSelection>,
        gate: Option<&CudaBuf>,
        y: &CudaBuf,
        (first, n): (usize, usize),
        longest: usize,
    ) -> Result<(), EngineError> {
        let round = self.round()?;
        let (lanes, tables, pitch) = (round.lanes, round.tables, round.pitch);
        let paging = self.state()?.paging8(id, tables, pitch)?;
        let a = &self.state()?.layout.attention[id];
        let (d, kv) = (a.head_dim, a.kv_heads);
        let own = selection.map(|s| s.of_rows(first));
        let max_len = selection.map_or(longest, |s| longest.min(s.keep * s.ratio + s.ratio));
        let queries = queries(q, d, &lanes, (first, n), (max_len, usize::MAX))?;
        let many = !self.is_decode();
        let pdl = self.pdl();
        let kernel = self.plans.attention8(q.width / d, kv, d, many).map_err(fault)?;
        let scratch = self.arena.lease(kernel.scratch(n, max_len))?;
        let gate = gate.map(|g| (shift(g.ptr, first, g.width, 2), g.width, d));
        let out = shift(y.ptr, first, y.width, 2);
        kernel
            .launch(&self.stream, &queries, &paging, own.as_ref(), scratch.ptr(), gate, out, y.width, pdl)
            .map_err(fault)
    }

    /// The first `n` rows of a lane, each over its whole prefix.
    fn prefix8(
        &mut self,
        id: usize,
        lane: usize,
        q: &CudaBuf,
        gate: Option<&CudaBuf>,
        y: &CudaBuf,
        n: usize,
    ) -> Result<(), EngineError> {
        let round = self.round()?;
        let (first, start, pitch) = (round.lane_rows[lane].start, round.start(lane), round.pitch);
        let table = round.tables + (4 * lane * pitch) as u64;
        let paging = self.state()?.paging8(id, round.tables, pitch)?;
        let a = &self.state()?.layout.attention[id];
        let (d, kv) = (a.head_dim, a.kv_heads);
        let pdl = self.pdl();
        let kernel = self.plans.attention8(q.width / d, kv, d, false).map_err(fault)?;
        let scratch = self.arena.lease(kernel.rotated_bytes(n))?;
        let queries = (shift(Cuda::act(q)?, first, q.width, 2), q.width, d);
        let gate = gate.map(|g| (shift(g.ptr, first, g.width, 2), g.width, d));
        let (to, out) = (scratch.ptr(), shift(y.ptr, first, y.width, 2));
        kernel
            .prefill(&self.stream, queries, &paging, table, n, start, to, gate, out, y.width, pdl)
            .map_err(fault)
    }
}
