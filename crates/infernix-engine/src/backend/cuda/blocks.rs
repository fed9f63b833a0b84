//! Operations of several launches: hyper-connections, recurrence, attention and its index, experts.

use super::context::{Cuda, CudaRouting, CudaSelection};
use super::experts::{CudaExperts, Form, Store, Stored};
use super::fused::Pending;
use super::ggml::SlabExperts;
use super::rows::RowBank;
use super::state::INDEX_DIM;
use super::tiers::Records;
use super::vram::{CudaBuf, Lease, fault};
use super::weights::CudaWeight;
use crate::backend::{At, AttentionWeights, Backend, Boundary, GdnDims, HyperWeights, Op, RopeTable, Trace};
use crate::error::EngineError;
use crate::state::KvFormat;
use infernix_cuda::DeviceBuffer;
use infernix_cuda::kernels::attention::{Queries, Selection};
use infernix_cuda::kernels::experts::{ExpertTable, Jobs, act_bytes};
use infernix_cuda::kernels::gdn::{ChunkArgs, GdnArgs};
use infernix_cuda::kernels::hyper::HyperWeights as HyperMatrices;
use infernix_cuda::kernels::linear::{Linear, Out, WeightFormat};
use infernix_cuda::kernels::rows::Lanes;
use infernix_cuda::kernels::stored::{StoredExperts, StoredProduct};
use infernix_cuda::kernels::tile::{ExpertPlanes, Quantise, Sorted, Tile, TileFormat};
use std::sync::Arc;

/// Rows of a prompt whose selections, or experts without a tile product, are computed at a time.
pub(super) const BATCH: usize = 256;
/// Rows of a prompt whose experts are computed at a time by the tile products, and the fewest that are.
const EXPERT_ROWS: usize = 8192;
pub(super) const FEW_ROWS: usize = 64;
/// Rows of one span of the chunked delta rule, and the fewest it takes.
const SPAN: usize = 2048;
const CHUNK_ROWS: usize = 64;

/// How the tile products find a layer's experts.
struct ExpertTiles {
    /// Of gate with up, and of down.
    formats: [TileFormat; 2],
    gate_up: ExpertPlanes,
    down: ExpertPlanes,
    /// Input scales of the exact arithmetic, and whether they divide.
    quantise: Option<(u64, bool)>,
    /// Addresses of planes, where records are rows of FP8.
    _tables: Option<[Arc<Lease>; 2]>,
    /// Where records are blocks.
    slabs: Option<SlabExperts>,
}

/// One matrix of a weight, if it is one.
fn only(w: &CudaWeight) -> Option<&Linear> {
    match &w.parts[..] {
        [one] => Some(one),
        _ => None,
    }
}

/// Address of row `rows` of a matrix of `width` values of `size` bytes at `p`.
pub(super) fn shift(p: u64, rows: usize, width: usize, size: usize) -> u64 {
    p + (rows * width * size) as u64
}

/// `n` rows of `q` from `first` on, as queries of width `head` over at most `max_len` keys each, of which the last `fresh` may be new.
pub(super) fn queries(
    q: &CudaBuf,
    head: usize,
    lanes: &Lanes,
    (first, n): (usize, usize),
    (max_len, fresh): (usize, usize),
) -> Result<Queries, EngineError> {
    Ok(Queries {
        ptr: shift(Cuda::act(q)?, first, q.width, 2),
        pitch: q.width,
        head,
        lane: shift(lanes.row_lane, first, 1, 4),
        pos: shift(lanes.row_pos, first, 1, 4),
        rows: n,
        max_len,
        fresh,
    })
}

impl CudaSelection {
    /// What rows from `first` on selected.
    pub(super) fn of_rows(&self, first: usize) -> Selection {
        Selection {
            blocks: shift(self.ids.ptr, first, self.keep, 4),
            counts: shift(self.counts.ptr, first, 1, 4),
            pitch: self.keep,
            ratio: self.ratio,
        }
    }

    /// How many of `rows` rows from position `start` on have at most as many blocks as are kept, and so see their whole prefix.
    pub(super) fn dense_rows(&self, start: usize, rows: usize) -> usize {
        rows.min(((self.keep + 1).saturating_mul(self.ratio) - 1).saturating_sub(start))
    }
}

impl Cuda {
    // ---- hyper-connections ---------------------------------------------------------------------------------

    /// The fused mixer of decode rounds, where its kernels take the geometry.
    pub(super) fn fused_hyper(
        &mut self,
        r: &CudaBuf,
        w: &HyperWeights<Self>,
    ) -> Option<(CudaBuf, Option<CudaBuf>)> {
        let add = self.take_injection(r);
        let fused = self.fused_mix(r, w, add.as_ref());
        if let (None, Some(add)) = (&fused, add) {
            self.pending = Some(add);
        }
        fused
    }

    fn fused_mix(
        &mut self,
        r: &CudaBuf,
        w: &HyperWeights<Self>,
        add: Option<&Pending>,
    ) -> Option<(CudaBuf, Option<CudaBuf>)> {
        let (down, up) = (only(&w.down)?, only(&w.up)?);
        let inject = match &w.inject {
            Some(i) => Some(only(i)?),
            None => None,
        };
        let (h, rank) = (r.width / w.streams, down.n);
        let one_format = down.format == up.format && inject.is_none_or(|i| i.format == down.format);
        let known = matches!(down.format, WeightFormat::Bf16 | WeightFormat::Q8G32);
        let fits = h <= 2560 && h.is_multiple_of(32) && rank <= 320 && rank.is_multiple_of(16);
        if !(self.is_decode() && w.streams == 4 && one_format && known && fits) {
            return None;
        }
        let mut factor = None;
        let x = self.make(r.rows, h, false, |c, x| {
            let b = c.fresh(r.rows, 4, true)?;
            let norm = w.norm.plain()?;
            let (from, add) = match add.map(Pending::injection) {
                Some((from, add)) => (from, Some(add)),
                None => (Cuda::act(r)?, None),
            };
            let pdl = c.pdl();
            let bytes = c.plans.hyper(down.format, h, rank).map_err(fault)?.scratch(r.rows);
            let scratch = c.arena.lease(bytes)?;
            let matrices = HyperMatrices { down, up, inject, norm };
            let mix = c.plans.hyper(down.format, h, rank).map_err(fault)?;
            let eps = w.eps as f32;
            mix.launch_after(&c.stream, &matrices, from, add, eps, r.rows, scratch.ptr(), x.ptr, b.ptr, pdl)
                .map_err(fault)?;
            factor = Some(b);
            Ok(())
        });
        if inject.is_none() {
            return Some((x, None));
        }
        let none = || CudaBuf { lease: None, ptr: 0, rows: r.rows, width: 4, f32: true, convolution: 0 };
        Some((x, Some(factor.unwrap_or_else(none))))
    }

    fn wide_product(&mut self, x: &CudaBuf, w: &CudaWeight) -> Result<CudaBuf, EngineError> {
        let v = self.fresh(x.rows, w.n, true)?;
        self.product(w, Cuda::act(x)?, x.width, x.rows, v.ptr, w.n, Out::F32)?;
        Ok(v)
    }

    pub(super) fn run_hyper_down(
        &mut self,
        normed: &CudaBuf,
        w: &CudaWeight,
        streams: usize,
        y: &CudaBuf,
    ) -> Result<(), EngineError> {
        let v = self.wide_product(normed, w)?;
        let pdl = self.pdl();
        self.plans
            .mix
            .silu_over(&self.stream, v.ptr, y.ptr, v.rows * v.width, streams as f32, pdl)
            .map_err(fault)
    }

    pub(super) fn run_hyper_up(
        &mut self,
        normed: &CudaBuf,
        m: &CudaBuf,
        w: &CudaWeight,
        streams: usize,
        y: &CudaBuf,
    ) -> Result<(), EngineError> {
        let from = Cuda::act(normed)?;
        let v = self.wide_product(m, w)?;
        let pdl = self.pdl();
        self.plans.mix.mix(&self.stream, v.ptr, from, y.ptr, y.width, streams, y.rows, pdl).map_err(fault)
    }

    pub(super) fn run_hyper_factor(
        &mut self,
        normed: &CudaBuf,
        w: &CudaWeight,
        streams: usize,
        y: &CudaBuf,
    ) -> Result<(), EngineError> {
        self.product(w, Cuda::act(normed)?, normed.width, normed.rows, y.ptr, w.n, Out::F32)?;
        let pdl = self.pdl();
        self.plans
            .mix
            .twice_sigmoid_over(&self.stream, y.ptr, y.rows * y.width, streams as f32, pdl)
            .map_err(fault)
    }

    // ---- gated delta rule ----------------------------------------------------------------------------------

    #[expect(clippy::too_many_arguments, reason = "the operands of one recurrence")]
    pub(super) fn run_gdn(
        &mut self,
        id: usize,
        u: &CudaBuf,
        a: &CudaBuf,
        b: &CudaBuf,
        a_log: &CudaWeight,
        dt_bias: &CudaWeight,
        y: &CudaBuf,
    ) -> Result<(), EngineError> {
        let lanes = self.round()?.lanes;
        let (d, at) = (self.state()?.layout.gdn[id], self.state()?.gdn(id));
        if u.convolution == 0 {
            return Err(EngineError::Round("a recurrence without its convolution".into()));
        }
        if !self.is_decode() && (lanes.rows >= CHUNK_ROWS || self.round()?.continues()) {
            return self.chunked_gdn(id, u, a, b, a_log, dt_bias, y);
        }
        let args = GdnArgs {
            y: Cuda::act(u)?,
            y_pitch: u.width,
            conv_state: at.conv,
            conv_w: u.convolution,
            a: Cuda::act(a)?,
            b: Cuda::act(b)?,
            ab_pitch: a.width,
            a_log: a_log.wide()?,
            dt_bias: dt_bias.wide()?,
            state: at.state,
            first: lanes.first,
            write_after: lanes.count,
            slots: lanes.slots,
            o: y.ptr,
            lanes: lanes.lanes,
            state_stride: at.state_stride,
            conv_stride: at.conv_stride,
            out_slots: lanes.out_slots,
            record: if self.is_decode() { at.record } else { 0 },
            record_stride: at.record_stride,
        };
        if self.is_decode() {
            self.gdn_weights.resize(self.gdn_weights.len().max(id + 1), (0, 0, 0));
            self.gdn_weights[id] = (args.conv_w, args.a_log, args.dt_bias);
        }
        let pdl = self.pdl();
        let step = self.plans.gdn(d.key_heads, d.value_heads).map_err(fault)?;
        step.launch(&self.stream, &args, pdl).map_err(fault)
    }

    /// The recurrence of a prompt, 64 tokens at a time, lane by lane.
    #[expect(clippy::too_many_arguments, reason = "the operands of one recurrence")]
    fn chunked_gdn(
        &mut self,
        id: usize,
        u: &CudaBuf,
        a: &CudaBuf,
        b: &CudaBuf,
        a_log: &CudaWeight,
        dt_bias: &CudaWeight,
        y: &CudaBuf,
    ) -> Result<(), EngineError> {
        let lanes = self.round()?.lanes;
        let (d, at) = (self.state()?.layout.gdn[id], self.state()?.gdn(id));
        let (c, nv) = (d.channels(), d.value_heads);
        let mixed = self.fresh(u.rows, c, false)?;
        let bytes = self.plans.chunk(d.key_heads, nv).map_err(fault)?.scratch(SPAN.min(u.rows));
        let scratch = self.arena.lease(bytes)?;
        for l in 0..lanes.lanes {
            let round = self.round()?;
            let (rows, slot) = (round.lane_rows[l].clone(), round.meta.lanes[l].slot);
            let half = self.state()?.half[slot];
            let to = 2 * slot + 1 - half;
            let from = if round.continues() { to } else { 2 * slot + half };
            let state = |s: usize| at.state + (4 * s * at.state_stride) as u64;
            let conv = |s: usize| at.conv + (2 * s * at.conv_stride) as u64;
            let row = |p: u64, width: usize| p + (2 * rows.start * width) as u64;
            if from != to {
                self.stream.copy(state(to), state(from), nv << 16).map_err(fault)?;
                self.stream.copy(conv(to), conv(from), 3 * c * 2).map_err(fault)?;
            }
            let (x, out, n) = (row(Cuda::act(u)?, c), row(mixed.ptr, c), rows.len());
            let ops = &self.plans.rows;
            ops.conv_silu(&self.stream, x, conv(from), u.convolution, out, c, n, c, c, false)
                .map_err(fault)?;
            ops.conv_fold(&self.stream, x, conv(to), lanes.count + 4 * l as u64, c, c, true)
                .map_err(fault)?;
            let args = ChunkArgs {
                y: out,
                y_pitch: c,
                a: row(Cuda::act(a)?, a.width),
                b: row(Cuda::act(b)?, b.width),
                ab_pitch: a.width,
                a_log: a_log.wide()?,
                dt_bias: dt_bias.wide()?,
                state: state(to),
                o: row(y.ptr, y.width),
                o_pitch: y.width,
                rows: n,
                scratch: scratch.ptr(),
                scratch_bytes: bytes,
            };
            let chunk = self.plans.chunk(d.key_heads, nv).map_err(fault)?;
            chunk.launch(&self.stream, &args, true).map_err(fault)?;
        }
        self.chained = true;
        Ok(())
    }

    /// Advances a slot's state over recorded columns, by the words at `first` (two), `count`, `from` and `to`.
    pub(super) fn replay_gdn(
        &mut self,
        id: usize,
        d: GdnDims,
        slot: usize,
        [first, count, from, to]: [u64; 4],
    ) -> Result<(), EngineError> {
        let at = self.state()?.gdn(id);
        let Some(&(conv_w, a_log, dt_bias)) = self.gdn_weights.get(id) else { return Ok(()) };
        let (c, nv) = (d.channels(), d.value_heads);
        let y = at.record + (2 * slot * at.record_stride) as u64;
        let args = GdnArgs {
            y,
            y_pitch: c + 2 * nv,
            conv_state: at.conv,
            conv_w,
            a: y + 2 * c as u64,
            b: y + 2 * (c + nv) as u64,
            ab_pitch: c + 2 * nv,
            a_log,
            dt_bias,
            state: at.state,
            first,
            write_after: count,
            slots: from,
            o: 0,
            lanes: 1,
            state_stride: at.state_stride,
            conv_stride: at.conv_stride,
            out_slots: to,
            record: 0,
            record_stride: 0,
        };
        let pdl = self.pdl();
        let step = self.plans.gdn(d.key_heads, d.value_heads).map_err(fault)?;
        step.launch(&self.stream, &args, pdl).map_err(fault)
    }

    // ---- attention -----------------------------------------------------------------------------------------

    /// As the provided block, the output gate applied where attention stores (the same two roundings).
    pub(super) fn gated_attention(
        &mut self,
        x: &CudaBuf,
        w: &AttentionWeights<Self>,
        at: At<'_>,
        trace: Option<&mut Trace>,
    ) -> CudaBuf {
        if let Some((q, gate, iq)) = self.fused_projections(x, w, at, trace.is_some()) {
            let selection = iq.map(|iq| self.index_select(w.state, &iq, at.op(Op::IndexScore)));
            return self.gated_output(&q, &gate, selection, w, at, trace);
        }
        let q = self.linear(x, &w.q, Boundary::Act, at.op(Op::AttnQ));
        let gate = self.linear(x, &w.gate, Boundary::Act, at.op(Op::AttnGate));
        let k = self.linear(x, &w.k, Boundary::Act, at.op(Op::AttnK));
        let v = self.linear(x, &w.v, Boundary::Act, at.op(Op::AttnV));
        let q = self.norm_rope(&q, &w.q_norm, &w.rope, w.eps, at.op(Op::AttnNormQ));
        let k = self.norm_rope(&k, &w.k_norm, &w.rope, w.eps, at.op(Op::AttnNormK));
        self.kv_append(w.state, &k, &v);
        let selection = w.indexer.as_ref().map(|i| {
            let raw = self.linear(x, &i.k, Boundary::Act, at.op(Op::IndexK));
            self.index_append(w.state, &raw, &i.k_norm, &w.rope, w.eps, at.op(Op::IndexPooled));
            if self.all_dense(w.state) && trace.is_none() {
                return None;
            }
            let iq = self.linear(x, &i.q, Boundary::Act, at.op(Op::IndexQ));
            let iq = self.norm_rope(&iq, &i.q_norm, &w.rope, w.eps, at.op(Op::IndexNormQ));
            Some(self.index_select(w.state, &iq, at.op(Op::IndexScore)))
        });
        self.gated_output(&q, &gate, selection.flatten(), w, at, trace)
    }

    fn gated_output(
        &mut self,
        q: &CudaBuf,
        gate: &CudaBuf,
        selection: Option<CudaSelection>,
        w: &AttentionWeights<Self>,
        at: At<'_>,
        trace: Option<&mut Trace>,
    ) -> CudaBuf {
        if let (Some(t), Some(s)) = (trace, &selection) {
            t.blocks = Some(self.read_selection(s));
        }
        self.mark(at.op(Op::AttnOut));
        let o = self.make(q.rows, q.width, false, |c, y| {
            c.run_attention(w.state, q, selection.as_ref(), Some(gate), y)
        });
        self.linear(&o, &w.o, Boundary::Act, at.op(Op::AttnO))
    }

    /// Whether no row of the round has more blocks than are kept. In decode rounds by the rounded length, so that the answer
    /// changes no graph between rounds.
    pub(super) fn all_dense(&self, id: usize) -> bool {
        let (Some(r), Some(s)) = (&self.round, &self.state) else { return true };
        s.layout.attention[id].index.is_none_or(|i| r.longest / i.ratio <= i.budget / i.ratio)
    }

    pub(super) fn run_kv_append(&mut self, id: usize, k: &CudaBuf, v: &CudaBuf) -> Result<(), EngineError> {
        if self.state()?.layout.kv == KvFormat::Int8 {
            return self.run_kv8_append(id, k, v);
        }
        let round = self.round()?;
        let (lanes, paging) = (round.lanes, self.state()?.paging(id, round.tables, round.pitch));
        let a = &self.state()?.layout.attention[id];
        let (kv, d) = (a.kv_heads, a.head_dim);
        let pdl = self.pdl();
        // Any number of query heads will do: appending does not look at them.
        let attention = self.plans.attention(kv, kv, d, false).map_err(fault)?;
        attention
            .append(
                &self.stream,
                Cuda::act(k)?,
                k.width,
                Cuda::act(v)?,
                v.width,
                &paging,
                lanes.row_lane,
                lanes.row_pos,
                k.rows,
                pdl,
            )
            .map_err(fault)
    }

    pub(super) fn run_attention(
        &mut self,
        id: usize,
        q: &CudaBuf,
        selection: Option<&CudaSelection>,
        gate: Option<&CudaBuf>,
        y: &CudaBuf,
    ) -> Result<(), EngineError> {
        if self.state()?.layout.kv == KvFormat::Int8 {
            return self.run_attention8(id, q, selection, gate, y);
        }
        let a = self.state()?.layout.attention[id].clone();
        let (d, heads) = (a.head_dim, q.width / a.head_dim);
        let round = self.round()?;
        let (lanes, longest, tables, pitch) = (round.lanes, round.longest, round.tables, round.pitch);
        let paging = self.state()?.paging(id, tables, pitch);
        let selection = selection.filter(|s| !s.dense);
        let (qp, gp) = (Cuda::act(q)?, gate.map(|g| (g.ptr, g.width)));
        let some = |c: &mut Self, first: usize, rows: usize, longest: usize, many: bool| {
            let own = selection.map(|s| s.of_rows(first));
            let max_len = selection.map_or(longest, |s| longest.min(s.keep * s.ratio + s.ratio));
            // What a decode round appends are its rows' last keys.
            let fresh = if c.is_decode() { q.rows } else { usize::MAX };
            let queries = queries(q, d, &lanes, (first, rows), (max_len, fresh))?;
            let pdl = c.pdl();
            let bytes = c.plans.attention(heads, a.kv_heads, d, many).map_err(fault)?.scratch(rows, max_len);
            let scratch = c.arena.lease(bytes)?;
            let gate = gp.map(|(p, width)| (shift(p, first, width, 2), width, d));
            let out = shift(y.ptr, first, y.width, 2);
            c.plans
                .attention(heads, a.kv_heads, d, many)
                .map_err(fault)?
                .launch(&c.stream, &queries, &paging, own.as_ref(), scratch.ptr(), gate, out, y.width, pdl)
                .map_err(fault)
        };
        if self.is_decode() {
            return some(self, 0, q.rows, longest, false);
        }
        for l in 0..lanes.lanes {
            let round = self.round()?;
            let (rows, start) = (round.lane_rows[l].clone(), round.start(l));
            let dense = selection.map_or(rows.len(), |s| s.dense_rows(start, rows.len()));
            if dense > 0 {
                let pdl = self.pdl();
                let at = |p: u64, width: usize| shift(p, rows.start, width, 2);
                let table = tables + (4 * l * pitch) as u64;
                let gate = gp.map(|(p, width)| (at(p, width), width, d));
                self.plans
                    .attention(heads, a.kv_heads, d, false)
                    .map_err(fault)?
                    .prefill(
                        &self.stream,
                        (at(qp, q.width), q.width, d),
                        &paging,
                        table,
                        dense,
                        start,
                        gate,
                        at(y.ptr, y.width),
                        y.width,
                        pdl,
                    )
                    .map_err(fault)?;
            }
            let first = rows.start + dense;
            if let (Some(s), true) = (selection, first < rows.end) {
                let (own, n) = (s.of_rows(first), rows.end - first);
                let queries = queries(q, d, &lanes, (first, n), (start + n, usize::MAX))?;
                let gate = gp.map(|(p, width)| (shift(p, first, width, 2), width, d));
                let out = shift(y.ptr, first, y.width, 2);
                let pdl = self.pdl();
                let attention = self.plans.attention(heads, a.kv_heads, d, false).map_err(fault)?;
                let done =
                    attention.launch_rows(&self.stream, &queries, &paging, &own, gate, out, y.width, pdl);
                if done.map_err(fault)? {
                    continue;
                }
            }
            for first in (first..rows.end).step_by(BATCH) {
                let n = BATCH.min(rows.end - first);
                some(self, first, n, start + first + n - rows.start, true)?;
            }
        }
        Ok(())
    }

    pub(super) fn run_index_append(
        &mut self,
        id: usize,
        raw: &CudaBuf,
        w: &CudaWeight,
        rope: &RopeTable,
        eps: f64,
    ) -> Result<(), EngineError> {
        let rotary = self.rotary(rope)?;
        let round = self.round()?;
        let (lanes, tables, pitch) = (round.lanes, round.tables, round.pitch);
        let state = self.state()?;
        let parts = (state.ring(id), state.index_pages(id, tables, pitch), state.layout.attention[id].index);
        let (Some(ring), Some(pages), Some(dims)) = parts else {
            return Err(EngineError::Round("layer has no index".into()));
        };
        let pdl = self.pdl();
        self.plans
            .append(dims.ratio)
            .map_err(fault)?
            .launch(
                &self.stream,
                Cuda::act(raw)?,
                &ring,
                w.plain()?,
                &rotary,
                eps as f32,
                &lanes,
                &pages,
                pdl,
            )
            .map_err(fault)
    }

    pub(super) fn run_index_select(&mut self, id: usize, q: &CudaBuf) -> Result<CudaSelection, EngineError> {
        let round = self.round()?;
        let (lanes, tables, pitch, longest) = (round.lanes, round.tables, round.pitch, round.longest);
        let state = self.state()?;
        let (Some(pages), Some(dims)) =
            (state.index_pages(id, tables, pitch), state.layout.attention[id].index)
        else {
            return Err(EngineError::Round("layer has no index".into()));
        };
        let keep = dims.budget / dims.ratio;
        let (ids, counts) = (self.fresh(q.rows, keep, true)?, self.fresh(q.rows, 1, true)?);
        let dense = self.all_dense(id);
        let blocks = (longest / dims.ratio).max(1);
        let step = if self.is_decode() { q.rows.max(1) } else { BATCH };
        let from = Cuda::act(q)?;
        for first in (0..q.rows).step_by(step) {
            if dense {
                break;
            }
            let n = step.min(q.rows - first);
            let scores = self.fresh(n, blocks, true)?;
            let pdl = self.pdl();
            let bytes = self.plans.select(dims.heads, dims.ratio, keep).map_err(fault)?.scratch(n, blocks);
            let scratch = self.arena.lease(bytes)?;
            let at = |p: u64, width: usize, size: usize| p + (first * width * size) as u64;
            self.plans
                .select(dims.heads, dims.ratio, keep)
                .map_err(fault)?
                .launch(
                    &self.stream,
                    at(from, dims.heads * INDEX_DIM, 2),
                    dims.heads * INDEX_DIM,
                    &pages,
                    at(lanes.row_lane, 1, 4),
                    at(lanes.row_pos, 1, 4),
                    n,
                    blocks,
                    scores.ptr,
                    blocks,
                    scratch.ptr(),
                    at(ids.ptr, keep, 4),
                    keep,
                    at(counts.ptr, 1, 4),
                    pdl,
                )
                .map_err(fault)?;
        }
        Ok(CudaSelection { ids, counts, keep, ratio: dims.ratio, dense })
    }

    // ---- experts -------------------------------------------------------------------------------------------

    pub(super) fn run_route(
        &mut self,
        logits: &CudaBuf,
        top: usize,
        at: At<'_>,
    ) -> Result<CudaRouting, EngineError> {
        let ids = self.fresh(logits.rows, top, true)?;
        self.route_to(ids, logits, top, at)
    }

    /// The same, picks to `ids`.
    pub(super) fn route_to(
        &mut self,
        ids: CudaBuf,
        logits: &CudaBuf,
        top: usize,
        at: At<'_>,
    ) -> Result<CudaRouting, EngineError> {
        let rows = logits.rows;
        let weights = self.fresh(rows, top, true)?;
        if self.options.routing.is_some() {
            self.run_law(at.site.layer, 1, logits.width, top, rows, ids.ptr, weights.ptr)?;
            return Ok(CudaRouting { ids, weights, top });
        }
        let pdl = self.pdl();
        let router = self.plans.router(logits.width, top).map_err(fault)?;
        router
            .select(&self.stream, logits.ptr, logits.width, rows, ids.ptr, weights.ptr, pdl)
            .map_err(fault)?;
        Ok(CudaRouting { ids, weights, top })
    }

    pub(super) fn run_experts(
        &mut self,
        x: &CudaBuf,
        routing: &CudaRouting,
        store: &CudaExperts,
        shared: &CudaBuf,
        shared_logit: &CudaBuf,
        y: &CudaBuf,
    ) -> Result<(), EngineError> {
        let decode = self.is_decode();
        let bank = store.bank();
        if let (Some(bank), false) = (bank, self.streaming) {
            self.fetch_experts(bank, &routing.ids, routing.top)?;
        }
        let records = match bank {
            Some(bank) if decode => {
                self.routed.push((bank, routing.ids.rows_from(0, routing.ids.rows)));
                self.tiers.records(bank)
            }
            Some(bank) if self.streaming => {
                self.chained = false;
                self.tiers.streamed(&self.stream, bank)?
            }
            Some(bank) => self.tiers.records(bank),
            None => Records::default(),
        };
        let few = decode || x.rows < FEW_ROWS;
        let tiles = if few { None } else { self.expert_tiles(store, records, x.rows, routing.top)? };
        let step = match (decode, &tiles) {
            (true, _) => x.rows.max(1),
            (_, Some(_)) => EXPERT_ROWS,
            _ => BATCH,
        };
        for first in (0..x.rows).step_by(step) {
            let n = step.min(x.rows - first);
            let mut sorted = None;
            let out = match (&store.store, &tiles, bank) {
                (_, Some(tiles), _) => {
                    let (out, slot, base) = self.tiled_experts(x, routing, store, tiles, first, n)?;
                    sorted = Some(slot);
                    if let Some(bank) = bank {
                        self.log_sorted(bank, base.ptr(), store.experts)?;
                    }
                    out
                }
                (Store::Exact { alpha, input, divisor, .. }, ..) => {
                    let table = ExpertTable {
                        records: records.whole,
                        alpha: alpha.ptr(),
                        input: input.ptr(),
                        divisor: *divisor,
                    };
                    self.exact_experts(x, routing, store, &table, first, n)?
                }
                (Store::Stored(own), ..) => self.stored_experts(x, routing, store, own, records, first, n)?,
                (Store::Blocks(banks), ..) => {
                    let ids = routing.ids.ptr + (4 * first * routing.top) as u64;
                    let from = Cuda::act(x)? + (2 * first * store.hidden) as u64;
                    self.block_experts(store, banks, ids, from, n, routing.top)?
                }
                (Store::Rows(banks), ..) => {
                    let ids = routing.ids.ptr + (4 * first * routing.top) as u64;
                    let from = Cuda::act(x)? + (2 * first * store.hidden) as u64;
                    self.row_experts(store, banks, ids, from, n, routing.top)?
                }
                (Store::Chain { gate_up, down }, ..) => {
                    let (gate_up, down) = (gate_up.view(), down.view());
                    let (h, i, top) = (store.hidden, store.intermediate, routing.top);
                    let picks = n * top;
                    let ids = routing.ids.ptr + (4 * first * top) as u64;
                    let from = Cuda::act(x)? + (2 * first * h) as u64;
                    let (g, u) = (self.fresh(picks, i, false)?, self.fresh(picks, i, false)?);
                    let out = self.fresh(picks, h, false)?;
                    let (s, chain, pdl) = (&self.stream, &self.plans.chain, self.chained);
                    chain.product(s, &gate_up, 0, i, ids, picks, from, top, g.ptr, pdl).map_err(fault)?;
                    chain.product(s, &gate_up, i, i, ids, picks, from, top, u.ptr, true).map_err(fault)?;
                    chain.swiglu(s, g.ptr, u.ptr, g.ptr, picks * i, true).map_err(fault)?;
                    chain.product(s, &down, 0, h, ids, picks, g.ptr, 1, out.ptr, true).map_err(fault)?;
                    self.chained = true;
                    out
                }
            };
            let places = sorted.as_ref().map_or(0, |s: &CudaBuf| s.ptr);
            self.combine(&out, places, routing, shared, shared_logit, y, first, n)?;
        }
        if let (Some(bank), true) = (bank, self.streaming && self.round()?.is_last()) {
            self.tiers.streamed_done(&self.stream, bank)?;
            self.chained = false;
        }
        Ok(())
    }

    /// The sum of the experts of `n` rows from `first` on, shared expert last. `places`: row of `out` of each pick, or 0: in order.
    #[expect(clippy::too_many_arguments, reason = "outputs, weights and what they make")]
    pub(super) fn combine(
        &mut self,
        out: &CudaBuf,
        places: u64,
        routing: &CudaRouting,
        shared: &CudaBuf,
        shared_logit: &CudaBuf,
        y: &CudaBuf,
        first: usize,
        n: usize,
    ) -> Result<(), EngineError> {
        let identity = self.identity.as_ref().map_or(0, DeviceBuffer::ptr);
        let at = |b: &CudaBuf| b.ptr + (first * b.pitch()) as u64;
        let pdl = self.pdl();
        self.plans
            .rows
            .combine(
                &self.stream,
                out.ptr,
                if places == 0 { identity } else { places },
                at(&routing.weights),
                at(shared),
                at(shared_logit),
                shared_logit.width,
                0,
                0,
                at(y),
                y.width,
                routing.top,
                n,
                pdl,
            )
            .map_err(fault)
    }

    /// Outputs of all picks of some rows, in pick order.
    fn exact_experts(
        &mut self,
        x: &CudaBuf,
        routing: &CudaRouting,
        store: &CudaExperts,
        table: &ExpertTable,
        first: usize,
        n: usize,
    ) -> Result<CudaBuf, EngineError> {
        let (h, i, top) = (store.hidden, store.intermediate, routing.top);
        let picks = n * top;
        let ids = routing.ids.ptr + (4 * first * top) as u64;
        let from = Cuda::act(x)? + (2 * first * h) as u64;
        let lease = |c: &Self, bytes: usize| c.arena.lease(bytes);
        let (jobs, list, count) = (lease(self, 16 * picks)?, lease(self, 4 * picks)?, lease(self, 8)?);
        let act = lease(self, picks * act_bytes(h))?;
        let (mid, out) = (self.fresh(picks, i, false)?, self.fresh(picks, h, false)?);
        let j = Jobs { jobs: jobs.ptr(), list: list.ptr(), count: count.ptr() };
        let width = self.plans.w4a4(h, i, n).map_err(fault)?.width;
        let pdl = self.pdl();
        self.plans
            .router(store.experts, top)
            .map_err(fault)?
            .prepare(&self.stream, ids, n, width, j, table, from, h, act.ptr(), pdl)
            .map_err(fault)?;
        self.plans
            .w4a4(h, i, n)
            .map_err(fault)?
            .launch(&self.stream, table, j, act.ptr(), mid.ptr, out.ptr, None, true)
            .map_err(fault)?;
        Ok(out)
    }

    /// Outputs of all picks of some rows, in pick order: 16-bit activations, the canonical order of sums (GGML blocks: their own).
    #[expect(clippy::too_many_arguments, reason = "the operands of one layer's experts and a range of rows")]
    pub(super) fn stored_experts(
        &mut self,
        x: &CudaBuf,
        routing: &CudaRouting,
        store: &CudaExperts,
        own: &Stored,
        records: Records,
        first: usize,
        n: usize,
    ) -> Result<CudaBuf, EngineError> {
        let (h, i, top, picks) = (store.hidden, store.intermediate, routing.top, n * routing.top);
        let (mid, out) = (self.fresh(picks, i, false)?, self.fresh(picks, h, false)?);
        let (stage, stride) = self.tiers.stage();
        let away = self.tiers.away(own.bank);
        let identity = self.identity.as_ref().map_or(0, DeviceBuffer::ptr);
        // Picks of one row, none of which is another's, are read where they are; of several rows, what is the host's or was streamed comes
        // first, some picks at a time. A layer of blocks that was streamed is read where it is: a prompt may have too few picks for tiles.
        let form = own.product();
        let direct = n == 1
            && match (&own.form, form) {
                (Form::Ggml(matrices), _) => {
                    let mut reads = true;
                    for ((ty, _), k) in matrices.iter().zip([h, h, i]) {
                        reads &= self.plans.ggml(*ty).map_err(fault)?.reads(k);
                    }
                    reads
                }
                (_, Some(f)) => [h, i].iter().all(|k| self.plans.stored.reads(f, *k)),
                (_, None) => false,
            };
        let fetch = !direct && (!self.streaming || form.is_some());
        let most = if top <= StoredExperts::PICKS { StoredExperts::PICKS / top * top } else { 1 };
        let step = if fetch { most } else { picks };
        let at = self.arena.lease(8 * StoredExperts::PICKS)?;
        for p in (0..picks).step_by(step.max(1)) {
            let count = step.min(picks - p);
            let ids = routing.ids.ptr + (4 * (first * top + p)) as u64;
            let from = shift(Cuda::act(x)?, first + p / top, h, 2);
            let (to, y) = (shift(mid.ptr, p, i, 2), shift(out.ptr, p, h, 2));
            let pdl = self.pdl();
            let s = &self.stream;
            if fetch {
                let whole = records.whole;
                self.plans
                    .stored
                    .fetch(s, whole, away, ids, count, own.record, stage, stride, at.ptr(), pdl)
                    .map_err(fault)?;
            }
            let lie = |down: bool| match &own.form {
                Form::Rg16 { last, divide } => {
                    let codes = if down { own.record / 3 * 2 } else { 0 };
                    (last.ptr(), *divide, codes, 0)
                }
                _ => {
                    let [codes, _, scales] = own.fp8(store, down);
                    (0, false, codes, scales)
                }
            };
            let (at, away) = if direct { (records.whole, away) } else { (at.ptr(), 0) };
            if let Form::Ggml(matrices) = &own.form {
                let (tab, ids) = if fetch { (at, identity) } else { (records.whole, ids) };
                let up = self.fresh(count, i, false)?;
                let jobs = [(from, top, to), (from, top, up.ptr), (to, 1, y)];
                let mut pdl = fetch || pdl;
                for (m, ((ty, offset), (x, share, y))) in matrices.iter().zip(jobs).enumerate() {
                    let (n, k) = if m == 2 { (h, i) } else { (i, h) };
                    if m == 2 {
                        let chain = &self.plans.chain;
                        chain.swiglu(&self.stream, to, up.ptr, to, count * i, true).map_err(fault)?;
                    }
                    let kernel = self.plans.ggml(*ty).map_err(fault)?;
                    kernel
                        .experts(&self.stream, tab, away, *offset, ids, count, share, n, k, x, k, y, n, pdl)
                        .map_err(fault)?;
                    pdl = true;
                }
                continue;
            }
            let Some(form) = form else { continue };
            let mut pdl = fetch || pdl;
            for (down, x, share, y) in [(false, from, top, to), (true, to, 1, y)] {
                let (last, divide, codes, scales) = lie(down);
                let (n, k) = if down { (h, i) } else { (2 * i, h) };
                let p = StoredProduct { at, away, ids, last, divide, codes, scales, n, k, pairs: !down };
                self.plans.stored.product(s, form, &p, count, x, share, y, pdl).map_err(fault)?;
                pdl = true;
            }
        }
        Ok(out)
    }

    /// The tile products of a layer's experts, where there are some for them.
    fn expert_tiles(
        &mut self,
        store: &CudaExperts,
        records: Records,
        rows: usize,
        top: usize,
    ) -> Result<Option<ExpertTiles>, EngineError> {
        let (h, i, experts) = (store.hidden, store.intermediate, store.experts);
        let planes = |tab, down, half, (alpha, divisor)| {
            let (n, k) = if down { (h, i) } else { (2 * i, h) };
            ExpertPlanes { tab, experts, n, k, k_pad: k, half, alpha, divisor, down }
        };
        let records_of = |factor, quantise| {
            let (gate_up, down) =
                (planes(records.whole, false, 0, factor), planes(records.down, true, 0, factor));
            let formats = [TileFormat::Rg16; 2];
            ExpertTiles { formats, gate_up, down, quantise, _tables: None, slabs: None }
        };
        Ok(match &store.store {
            Store::Exact { alpha, input, divisor, .. } => {
                Some(records_of((alpha.ptr(), *divisor), Some((input.ptr(), *divisor))))
            }
            Store::Stored(own) => match (&own.form, own.tile()) {
                (Form::Rg16 { last, divide }, _) => Some(records_of((last.ptr(), *divide), None)),
                (_, Some(format)) => {
                    let tables = [self.arena.lease(24 * experts)?, self.arena.lease(24 * experts)?];
                    for (down, table) in [false, true].into_iter().zip(&tables) {
                        let pdl = self.pdl();
                        let offsets = own.fp8(store, down);
                        let (s, to) = (&self.stream, table.ptr());
                        self.plans
                            .stored
                            .planes(s, records.whole, experts, offsets, to, pdl)
                            .map_err(fault)?;
                    }
                    let gate_up = planes(tables[0].ptr(), false, i, (0, false));
                    let down = planes(tables[1].ptr(), true, 0, (0, false));
                    Some(ExpertTiles {
                        formats: [format; 2],
                        gate_up,
                        down,
                        quantise: None,
                        _tables: Some(tables),
                        slabs: None,
                    })
                }
                (_, None) => store.in_slabs(records.whole, rows, top).map(|slabs| {
                    let (gate_up, down) = (planes(0, false, i, (0, false)), planes(0, true, 0, (0, false)));
                    let (formats, slabs) = ([TileFormat::Parts; 2], Some(slabs));
                    ExpertTiles { formats, gate_up, down, quantise: None, _tables: None, slabs }
                }),
            },
            Store::Rows(banks) => RowBank::tiles(banks).map(|(formats, [gate_up, down])| ExpertTiles {
                formats,
                gate_up,
                down,
                quantise: None,
                _tables: None,
                slabs: None,
            }),
            Store::Blocks(_) | Store::Chain { .. } => None,
        })
    }

    /// Outputs of all picks of some prompt rows in sorted order, and the place of each pick: inputs quantised where the arithmetic is
    /// exact, sums on tensor cores.
    fn tiled_experts(
        &mut self,
        x: &CudaBuf,
        routing: &CudaRouting,
        store: &CudaExperts,
        tiles: &ExpertTiles,
        first: usize,
        n: usize,
    ) -> Result<(CudaBuf, CudaBuf, Arc<Lease>), EngineError> {
        let (h, i, top, experts) = (store.hidden, store.intermediate, routing.top, store.experts);
        let picks = n * top;
        let ids = routing.ids.ptr + (4 * first * top) as u64;
        let from = Cuda::act(x)? + (2 * first * h) as u64;
        let sort = self.plans.sort(experts, top).map_err(fault)?;
        let (jobs, places) = (sort.max_jobs(n), sort.max_places(n));
        let lease = |c: &Self, bytes: usize| c.arena.lease(bytes);
        let (job_list, count) = (lease(self, 16 * jobs)?, lease(self, 8)?);
        let (base, list) = (lease(self, 4 * (experts + 1))?, lease(self, 4 * picks)?);
        let slot = self.fresh(n, top, true)?;
        let sorted = Sorted {
            jobs: job_list.ptr(),
            count: count.ptr(),
            base: base.ptr(),
            list: list.ptr(),
            slot: slot.ptr,
        };
        let pdl = self.pdl();
        self.plans
            .sort(experts, top)
            .map_err(fault)?
            .launch(&self.stream, ids, n, sorted, pdl)
            .map_err(fault)?;
        let quantise = |down| tiles.quantise.map(|(input, divisor)| Quantise { input, divisor, down });
        let mid = self.fresh(picks, i, false)?;
        let packed = lease(self, Tile::packed_bytes(places, h))?;
        let ([first, second], shape) = (tiles.formats, (top, jobs));
        let (s, tile) = (&self.stream, self.plans.tile(first).map_err(fault)?);
        tile.pack_sorted(s, from, h, h, sorted, top, jobs, quantise(false), packed.ptr(), true)
            .map_err(fault)?;
        self.expert_product(first, tiles.slabs, &tiles.gate_up, sorted, shape, packed.ptr(), mid.ptr)?;
        drop(packed);
        let out = self.fresh(picks, h, false)?;
        let packed = self.arena.lease(Tile::packed_bytes(places, i))?;
        let (s, tile) = (&self.stream, self.plans.tile(second).map_err(fault)?);
        tile.pack_sorted(s, mid.ptr, i, i, sorted, 0, jobs, quantise(true), packed.ptr(), true)
            .map_err(fault)?;
        self.expert_product(second, tiles.slabs, &tiles.down, sorted, shape, packed.ptr(), out.ptr)?;
        self.chained = true;
        Ok((out, slot, base))
    }
}
