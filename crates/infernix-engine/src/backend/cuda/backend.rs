//! [`Backend`] on a CUDA device.

use super::blocks::FEW_ROWS;
use super::context::{Cuda, CudaRouting, CudaSelection};
use super::experts::CudaExperts;
use super::plan::{HEADROOM, enough, snapshots, state_bytes};
use super::state::{CudaSnapshot, DeviceState, Places};
use super::vram::{CudaBuf, fault};
use super::weights::{CudaWeight, put};
use crate::backend::*;
use crate::error::EngineError;
use crate::ngram::NgramTicket;
use crate::state::StateLayout;
use infernix_cuda::kernels::linear::Out;
use infernix_cuda::kernels::moves::RowCopy;

impl Backend for Cuda {
    type Buf = CudaBuf;
    type Weight = CudaWeight;
    type Experts = CudaExperts;
    type Routing = CudaRouting;
    type Selection = CudaSelection;
    type Snapshot = CudaSnapshot;

    fn name(&self) -> &'static str {
        "cuda"
    }

    fn weight(&mut self, spec: &WeightSpec, data: WeightData) -> Result<CudaWeight, EngineError> {
        CudaWeight::new(&self.vram, spec, &data)
    }

    fn gathered(
        &mut self,
        spec: &WeightSpec,
        data: WeightData,
        columns: Vec<u32>,
    ) -> Result<CudaWeight, EngineError> {
        let mut weight = CudaWeight::new(&self.vram, spec, &data)?;
        weight.columns = Some(put(&self.vram, &columns)?);
        Ok(weight)
    }

    fn experts_weight(&mut self, spec: &ExpertSpec, data: ExpertData) -> Result<CudaExperts, EngineError> {
        self.hidden = self.hidden.max(spec.hidden);
        let experts = CudaExperts::new(&self.vram, &mut self.tiers, spec, data)?;
        self.slab = self.slab.max(experts.slab_bytes());
        Ok(experts)
    }

    fn allocate(&mut self, layout: &StateLayout) -> Result<(), EngineError> {
        let (rows, experts) = (self.options.prompt_rows, self.tiers.layers() > 0);
        let places = Places::of(layout);
        let kept = if experts { snapshots(self.options.snapshots, &places) } else { 0 };
        let need = state_bytes(layout, &places, rows, kept);
        enough(need + if experts { self.activations(rows) + HEADROOM } else { 0 }, self.vram.left()?)?;
        let mut state = DeviceState::new(&self.vram, layout)?;
        for slot in 0..layout.slots {
            state.reset(&self.stream, slot)?;
        }
        self.state = Some(state);
        self.prepare_rounds()?;
        let mut lent = 0..0;
        if experts {
            // They get what snapshots and activations leave.
            self.state()?.reserve_snapshots(&self.vram, kept)?;
            lent = self.arena.reserve(self.activations(rows))?;
            lent.start += self.round_activations(FEW_ROWS) as u64;
        }
        self.tiers.place(&self.vram, &self.stream, lent)?;
        self.start_workers()?;
        self.stream.synchronize().map_err(fault)
    }

    fn reset(&mut self, slot: SlotId) {
        self.guard(|c| {
            let Some(s) = &mut c.state else { return Ok(()) };
            s.reset(&c.stream, slot)
        });
    }

    fn snapshot(&mut self, slot: SlotId) -> Result<CudaSnapshot, EngineError> {
        let slots = self.state()?.layout.slots;
        if slot >= slots {
            return Err(EngineError::OutOfSlots { slots });
        }
        let (vram, stream) = (&self.vram, &self.stream);
        match &mut self.state {
            Some(s) => s.save(vram, stream, slot),
            None => Err(EngineError::OutOfSlots { slots: 0 }),
        }
    }

    fn restore(&mut self, slot: SlotId, snapshot: &CudaSnapshot) -> Result<(), EngineError> {
        let slots = self.state()?.layout.slots;
        if slot >= slots {
            return Err(EngineError::OutOfSlots { slots });
        }
        let stream = &self.stream;
        match &mut self.state {
            Some(s) => s.load(stream, slot, snapshot),
            None => Ok(()),
        }
    }

    fn snapshot_bytes(&self, _: &CudaSnapshot) -> u64 {
        self.state.as_ref().map_or(0, |s| s.snapshot_bytes() as u64)
    }

    fn save_snapshot(&mut self, snapshot: &CudaSnapshot) -> Result<Vec<u8>, EngineError> {
        self.state()?.export(&self.stream, snapshot)
    }

    fn load_snapshot(&mut self, bytes: &[u8]) -> Result<CudaSnapshot, EngineError> {
        let (vram, stream) = (&self.vram, &self.stream);
        match &mut self.state {
            Some(s) => s.import(vram, stream, bytes),
            None => Err(EngineError::Round("a state before allocate".into())),
        }
    }

    fn page_bytes(&self) -> u64 {
        self.state.as_ref().map_or(0, |s| s.page_bytes() as u64)
    }

    fn save_page(&mut self, page: u32) -> Result<Vec<u8>, EngineError> {
        self.state()?.export_page(&self.stream, page)
    }

    fn load_page(&mut self, page: u32, bytes: &[u8]) -> Result<(), EngineError> {
        self.state()?.import_page(&self.stream, page, bytes)
    }

    fn copy_page(&mut self, from: u32, to: u32) {
        self.guard(|c| c.state()?.copy_page(&c.stream, from, to));
    }

    fn begin_round(&mut self, meta: StepMeta) -> Result<(), EngineError> {
        if let Some(e) = self.failed.take() {
            // Between rounds only a lost device fails; say what it was.
            return Err(e);
        }
        self.begin(meta)
    }

    fn end_round(&mut self) -> Outcome {
        self.guard(Self::complete);
        if let Some(e) = self.failed.take() {
            self.stream.release();
            self.holding = false;
            if let Some(w) = &self.workers {
                // What was launched may still ask for experts.
                let _ = self.stream.synchronize();
                w.rest();
            }
            let lanes = self.round.as_ref().map_or(0, |r| r.meta.lanes.len());
            self.failed_lanes.clear();
            self.failed_lanes.extend((0..lanes).map(|l| (l, e.to_string())));
        }
        if let (Some(r), Some(s)) = (&self.round, &mut self.state)
            && r.meta.part == Part::Target
        {
            for (l, lane) in r.meta.lanes.iter().enumerate() {
                if self.failed_lanes.iter().any(|(f, _)| *f == l) {
                    continue;
                }
                match r.meta.kind {
                    CallKind::Prefill => s.half[lane.slot] ^= 1,
                    CallKind::Decode => s.recorded[lane.slot] = lane.ids.len(),
                }
            }
        }
        self.round = None;
        Outcome { failed_lanes: std::mem::take(&mut self.failed_lanes) }
    }

    fn commit(&mut self, slot: SlotId, part: Part, n: usize) -> Result<(), EngineError> {
        if part == Part::Drafter {
            // Its keys lie in pages and rings by sequence index: later columns write over what is not kept.
            return Ok(());
        }
        let have = self.state()?.recorded.get(slot).copied();
        let Some(have) = have else {
            return Err(EngineError::OutOfSlots { slots: self.state()?.layout.slots });
        };
        if n > have {
            return Err(EngineError::Round(format!("commit of {n} columns, {have} recorded")));
        }
        if n > 0 && n < have {
            self.refold(slot, n)?;
        }
        let s = self.state_mut()?;
        if n > 0 {
            s.half[slot] ^= 1;
        }
        s.recorded[slot] = 0;
        Ok(())
    }

    fn read(&mut self, x: &CudaBuf) -> Vec<f32> {
        self.guard(|c| c.fetch(x)).unwrap_or_else(|| vec![f32::NAN; x.rows * x.width])
    }

    fn write(&mut self, rows: usize, width: usize, values: &[f32]) -> CudaBuf {
        let narrow: Vec<u16> = values.iter().map(|v| half::bf16::from_f32(*v).to_bits()).collect();
        let exact = narrow.iter().zip(values).all(|(n, v)| f32::from_bits(u32::from(*n) << 16) == *v);
        self.make(rows, width, !exact, |c, y| {
            let held = c.holding;
            c.flush()?;
            if exact {
                c.stream.write(y.ptr, &narrow).map_err(fault)?;
            } else {
                c.stream.write(y.ptr, values).map_err(fault)?;
            }
            if held {
                c.stream.hold();
                c.holding = true;
            }
            Ok(())
        })
    }

    fn read_routing(&mut self, routing: &CudaRouting) -> Vec<Vec<(u32, f32)>> {
        let read = self.guard(|c| {
            c.flush()?;
            let n = routing.ids.rows * routing.top;
            let ids: Vec<i32> = c.stream.read(routing.ids.ptr, n).map_err(fault)?;
            let weights: Vec<f32> = c.stream.read(routing.weights.ptr, n).map_err(fault)?;
            let pairs: Vec<_> = ids.into_iter().map(|i| i as u32).zip(weights).collect();
            Ok(pairs.chunks(routing.top).map(<[_]>::to_vec).collect())
        });
        read.unwrap_or_default()
    }

    fn read_selection(&mut self, selection: &CudaSelection) -> Vec<Option<Vec<u32>>> {
        let rows = self.round.as_ref().map_or(0, |r| r.lanes.rows);
        if selection.dense {
            return vec![None; rows];
        }
        let read = self.guard(|c| {
            c.flush()?;
            let s = selection;
            let ids: Vec<i32> = c.stream.read(s.ids.ptr, rows * s.keep).map_err(fault)?;
            let round = c.round()?;
            let of = |(t, (l, col)): (usize, (usize, usize))| {
                let blocks = (round.start(l) + col + 1) / s.ratio;
                (blocks > s.keep)
                    .then(|| ids[t * s.keep..(t + 1) * s.keep].iter().map(|i| *i as u32).collect())
            };
            Ok(round.meta.each_row().enumerate().map(of).collect())
        });
        read.unwrap_or_default()
    }

    fn take_rows(&mut self, x: &CudaBuf, rows: &[usize]) -> CudaBuf {
        let runs = rows.windows(2).all(|w| w[1] == w[0] + 1);
        if let (true, Some(first)) = (runs, rows.first()) {
            return x.rows_from(*first, rows.len());
        }
        self.make(rows.len(), x.width, x.f32, |c, y| {
            let mut done = 0;
            while done < rows.len() {
                let n = (1..rows.len() - done)
                    .find(|i| rows[done + i] != rows[done] + i)
                    .unwrap_or(rows.len() - done);
                let (p, bytes) = (x.pitch(), x.pitch());
                c.copy_rows(RowCopy {
                    from: x.ptr + (rows[done] * p) as u64,
                    from_pitch: p,
                    to: y.ptr + (done * p) as u64,
                    to_pitch: p,
                    bytes,
                    rows: n,
                    copies: 1,
                })?;
                done += n;
            }
            Ok(())
        })
    }

    fn repeat(&mut self, x: &CudaBuf, n: usize) -> CudaBuf {
        self.make(x.rows, n * x.width, x.f32, |c, y| {
            c.copy_rows(RowCopy {
                from: x.ptr,
                from_pitch: x.pitch(),
                to: y.ptr,
                to_pitch: y.pitch(),
                bytes: x.pitch(),
                rows: x.rows,
                copies: n,
            })
        })
    }

    fn concat(&mut self, x: &CudaBuf, y: &CudaBuf) -> CudaBuf {
        self.make(x.rows, x.width + y.width, x.f32, |c, out| {
            for (part, at) in [(x, 0), (y, x.pitch())] {
                c.copy_rows(RowCopy {
                    from: part.ptr,
                    from_pitch: part.pitch(),
                    to: out.ptr + at as u64,
                    to_pitch: out.pitch(),
                    bytes: part.pitch(),
                    rows: part.rows,
                    copies: 1,
                })?;
            }
            Ok(())
        })
    }

    fn copy(&mut self, x: &CudaBuf) -> CudaBuf {
        self.repeat(x, 1)
    }

    fn embed(&mut self, table: &CudaWeight, tokens: Tokens, at: At<'_>) -> CudaBuf {
        self.mark(at);
        let rows = self.round.as_ref().map_or(0, |r| r.lanes.rows);
        self.make(rows, table.k, false, |c, y| {
            let ids = c.round()?.ids[usize::from(tokens == Tokens::Next)];
            if !table.blocks.is_empty() {
                return c.block_rows(table, ids, rows, y.ptr);
            }
            let [part] = &table.parts[..] else {
                let what = "an embedding must be of one format".to_owned();
                return Err(EngineError::Weight { name: table.name.clone(), what });
            };
            let pdl = c.pdl();
            c.plans.moves.embed(&c.stream, part, ids, rows, y.ptr, pdl).map_err(fault)
        })
    }

    fn norm(&mut self, x: &CudaBuf, w: &CudaWeight, spec: NormSpec, at: At<'_>) -> CudaBuf {
        self.mark(at);
        if let Some(y) = self.fused_norm(x, w, spec) {
            return y;
        }
        self.make(x.rows, x.width, false, |c, y| {
            let (from, words) = (Cuda::act(x)?, w.plain()?);
            let n = x.width / spec.groups;
            // A weight of one group's width serves every group.
            let (groups, calls) = if w.n * w.k == x.width { (spec.groups, 1) } else { (1, spec.groups) };
            for g in 0..calls {
                let at = (2 * g * n) as u64;
                let pdl = c.pdl();
                c.plans
                    .rows
                    .rms_norm(
                        &c.stream,
                        from + at,
                        words,
                        y.ptr + at,
                        n,
                        groups,
                        x.rows,
                        x.width,
                        x.width,
                        spec.eps as f32,
                        spec.zero_centred,
                        pdl,
                    )
                    .map_err(fault)?;
            }
            Ok(())
        })
    }

    fn linear(&mut self, x: &CudaBuf, w: &CudaWeight, out: Boundary, at: At<'_>) -> CudaBuf {
        self.mark(at);
        let groups = x.width / w.k.max(1);
        self.make(x.rows, groups * w.n, out == Boundary::F32, |c, y| {
            if at.site == (Site { layer: Site::GLOBAL, op: Op::Head }) {
                c.head = Some((y.ptr, y.bytes()));
            }
            let out = if out == Boundary::F32 { Out::F32 } else { Out::Bf16 };
            c.product(w, Cuda::act(x)?, w.k, x.rows * groups, y.ptr, w.n, out)
        })
    }

    fn add(&mut self, x: &mut CudaBuf, y: &CudaBuf, at: At<'_>) {
        self.mark(at);
        self.guard(|c| {
            let (to, from) = (Cuda::act(x)?, Cuda::act(y)?);
            if c.is_decode() && x.width == y.width && x.rows == y.rows {
                return c.defer_sum(x, y, None);
            }
            c.changed(to);
            for g in 0..x.width / y.width.max(1) {
                let pdl = c.pdl();
                let at = to + (2 * g * y.width) as u64;
                c.plans.rows.add_to(&c.stream, at, x.width, from, y.width, x.rows, pdl).map_err(fault)?;
            }
            Ok(())
        });
    }

    fn gate(&mut self, o: &CudaBuf, gate: &CudaBuf, at: At<'_>) -> CudaBuf {
        self.mark(at);
        self.make(o.rows, o.width, false, |c, y| {
            let (x, g, w) = (Cuda::act(o)?, Cuda::act(gate)?, o.width);
            let pdl = c.pdl();
            c.plans.rows.mul_sigmoid(&c.stream, x, g, y.ptr, w, w, o.rows, w, w, w, w, pdl).map_err(fault)
        })
    }

    fn swiglu(&mut self, gate: &CudaBuf, up: &CudaBuf, at: At<'_>) -> CudaBuf {
        self.mark(at);
        self.make(gate.rows, gate.width, false, |c, y| {
            let (g, u, w) = (Cuda::act(gate)?, Cuda::act(up)?, gate.width);
            let pdl = c.pdl();
            c.plans.rows.swiglu(&c.stream, g, u, y.ptr, w, gate.rows, w, w, w, pdl).map_err(fault)
        })
    }

    fn hyper_down(&mut self, normed: &CudaBuf, w: &CudaWeight, streams: usize, at: At<'_>) -> CudaBuf {
        self.mark(at);
        self.make(normed.rows, w.n, false, |c, y| c.run_hyper_down(normed, w, streams, y))
    }

    fn hyper_up(
        &mut self,
        normed: &CudaBuf,
        m: &CudaBuf,
        w: &CudaWeight,
        streams: usize,
        at: At<'_>,
    ) -> CudaBuf {
        self.mark(at);
        self.make(normed.rows, normed.width / streams, false, |c, y| c.run_hyper_up(normed, m, w, streams, y))
    }

    fn hyper_factor(&mut self, normed: &CudaBuf, w: &CudaWeight, streams: usize, at: At<'_>) -> CudaBuf {
        self.mark(at);
        self.make(normed.rows, w.n, true, |c, y| c.run_hyper_factor(normed, w, streams, y))
    }

    fn hyper_inject(&mut self, r: &mut CudaBuf, y: &CudaBuf, factor: &CudaBuf, at: At<'_>) {
        self.mark(at);
        self.guard(|c| {
            if factor.width != 4 || !factor.f32 {
                return Err(EngineError::Unsupported(format!(
                    "{} streams, the kernels take 4",
                    factor.width
                )));
            }
            if c.is_decode() {
                return c.defer_sum(r, y, Some(factor));
            }
            let pdl = c.pdl();
            let (to, from) = (Cuda::act(r)?, Cuda::act(y)?);
            c.changed(to);
            c.plans.rows.inject(&c.stream, from, factor.ptr, to, to, y.width, y.rows, pdl).map_err(fault)
        });
    }

    fn ngram(&mut self, tickets: &[NgramTicket], at: At<'_>) -> CudaBuf {
        self.mark(at);
        let rows = at.rows.len();
        let width = tickets.iter().map(NgramTicket::values).sum::<usize>() / rows.max(1);
        let staged = self.guard(|c| c.stage(tickets, rows, width));
        staged.unwrap_or_else(|| CudaBuf::failed(rows, width, false))
    }

    fn ple_gate(
        &mut self,
        key: &CudaBuf,
        query: &CudaBuf,
        value: &CudaBuf,
        streams: usize,
        at: At<'_>,
    ) -> CudaBuf {
        self.mark(at);
        self.make(key.rows, key.width, false, |c, y| {
            let (k, q, v) = (Cuda::act(key)?, Cuda::act(query)?, Cuda::act(value)?);
            let pdl = c.pdl();
            c.plans.ple.gate(&c.stream, k, q, v, y.ptr, value.width, streams, key.rows, pdl).map_err(fault)
        })
    }

    fn ple_conv(
        &mut self,
        id: StateId,
        r: &mut CudaBuf,
        v: &CudaBuf,
        x: &CudaBuf,
        w: &CudaWeight,
        dilation: usize,
        at: At<'_>,
    ) {
        self.mark(at);
        self.guard(|c| {
            let (to, v, x, words) = (Cuda::act(r)?, Cuda::act(v)?, Cuda::act(x)?, w.plain()?);
            c.changed(to);
            let lanes = c.round()?.lanes;
            let (state, record) = c.state()?.ple(id, w.k, dilation);
            let record = if c.is_decode() { record } else { (0, 0) };
            let pdl = c.pdl();
            c.plans.ple.conv(&c.stream, to, v, x, words, &state, &lanes, pdl).map_err(fault)?;
            c.plans.ple.fold(&c.stream, x, &state, &lanes, record, true).map_err(fault)
        });
    }

    fn gdn_conv(&mut self, _: StateId, x: &CudaBuf, w: &CudaWeight, _: At<'_>) -> CudaBuf {
        // The recurrence applies it: one kernel reads a column's channels once.
        let words = self.guard(|_| w.plain());
        CudaBuf { convolution: words.unwrap_or(0), ..x.rows_from(0, x.rows) }
    }

    fn gdn(
        &mut self,
        id: StateId,
        u: &CudaBuf,
        a: &CudaBuf,
        b: &CudaBuf,
        a_log: &CudaWeight,
        dt_bias: &CudaWeight,
        at: At<'_>,
    ) -> CudaBuf {
        self.mark(at);
        let width =
            self.state.as_ref().map_or(0, |s| s.layout.gdn[id].value_heads * s.layout.gdn[id].value_dim);
        self.make(u.rows, width, false, |c, y| c.run_gdn(id, u, a, b, a_log, dt_bias, y))
    }

    fn gdn_gate(
        &mut self,
        o: &CudaBuf,
        z: &CudaBuf,
        w: &CudaWeight,
        kind: GateKind,
        eps: f64,
        at: At<'_>,
    ) -> CudaBuf {
        self.mark(at);
        self.make(o.rows, o.width, false, |c, y| {
            let (x, z, words, d, width) = (Cuda::act(o)?, Cuda::act(z)?, w.plain()?, w.n * w.k, o.width);
            let (heads, sigmoid, pdl) = (width / d.max(1), kind == GateKind::Sigmoid, c.pdl());
            c.plans
                .rows
                .gated_norm(
                    &c.stream, x, z, words, y.ptr, d, heads, o.rows, width, width, width, eps as f32,
                    sigmoid, pdl,
                )
                .map_err(fault)
        })
    }

    fn norm_rope(&mut self, x: &CudaBuf, w: &CudaWeight, rope: &RopeTable, eps: f64, at: At<'_>) -> CudaBuf {
        self.mark(at);
        self.make(x.rows, x.width, false, |c, y| {
            let (from, words, d) = (Cuda::act(x)?, w.plain()?, w.n * w.k);
            let table = c.angles(rope)?;
            let (half, heads, pdl) = (rope.freq.len(), x.width / d.max(1), c.pdl());
            c.plans
                .rows
                .head_norm_rope(
                    &c.stream, from, words, table, y.ptr, d, half, heads, x.rows, x.width, d, x.width, d,
                    eps as f32, pdl,
                )
                .map_err(fault)
        })
    }

    fn kv_append(&mut self, id: StateId, k: &CudaBuf, v: &CudaBuf) {
        self.guard(|c| c.run_kv_append(id, k, v));
    }

    fn attention(
        &mut self,
        id: StateId,
        q: &CudaBuf,
        selection: Option<&CudaSelection>,
        at: At<'_>,
    ) -> CudaBuf {
        self.mark(at);
        self.make(q.rows, q.width, false, |c, y| c.run_attention(id, q, selection, None, y))
    }

    fn index_append(
        &mut self,
        id: StateId,
        raw: &CudaBuf,
        w: &CudaWeight,
        rope: &RopeTable,
        eps: f64,
        at: At<'_>,
    ) {
        self.mark(at);
        self.guard(|c| c.run_index_append(id, raw, w, rope, eps));
    }

    fn index_select(&mut self, id: StateId, q: &CudaBuf, at: At<'_>) -> CudaSelection {
        self.mark(at);
        let made = self.guard(|c| c.run_index_select(id, q));
        made.unwrap_or_else(|| {
            let none =
                |width| CudaBuf { lease: None, ptr: 0, rows: q.rows, width, f32: true, convolution: 0 };
            CudaSelection { ids: none(0), counts: none(0), keep: 0, ratio: 1, dense: true }
        })
    }

    fn route(&mut self, logits: &CudaBuf, top_k: usize, at: At<'_>) -> CudaRouting {
        self.mark(at);
        let made = self.guard(|c| c.run_route(logits, top_k, at));
        made.unwrap_or_else(|| {
            let none =
                |f32| CudaBuf { lease: None, ptr: 0, rows: logits.rows, width: top_k, f32, convolution: 0 };
            CudaRouting { ids: none(true), weights: none(true), top: top_k }
        })
    }

    fn experts(
        &mut self,
        x: &CudaBuf,
        routing: &CudaRouting,
        store: &CudaExperts,
        shared: &CudaBuf,
        shared_logit: &CudaBuf,
        at: At<'_>,
    ) -> CudaBuf {
        self.mark(at);
        self.make(x.rows, x.width, false, |c, y| c.run_experts(x, routing, store, shared, shared_logit, y))
    }

    fn window_rows(&self) -> usize {
        self.options.window.max(1)
    }

    fn window(&mut self, rows: std::ops::Range<usize>) {
        self.guard(|c| {
            c.pack.replace(None);
            let known = c.round.as_mut().is_some_and(|r| r.look_at(rows.clone()));
            if known { Ok(()) } else { Err(EngineError::Round(format!("rows {rows:?} are no window"))) }
        });
    }

    fn hyper_mix(
        &mut self,
        r: &CudaBuf,
        w: &HyperWeights<Self>,
        base: Op,
        at: At<'_>,
    ) -> (CudaBuf, Option<CudaBuf>) {
        self.mark(at);
        match self.fused_hyper(r, w) {
            Some(done) => done,
            None => {
                // The two products of the normed streams one after another: they share its packed form.
                let [norm, down, up, factor] = base.hyper();
                let spec = NormSpec { groups: w.streams, zero_centred: true, eps: w.eps };
                let n = self.norm(r, &w.norm, spec, at.op(norm));
                let f = w.inject.as_ref().map(|i| self.hyper_factor(&n, i, w.streams, at.op(factor)));
                let m = self.hyper_down(&n, &w.down, w.streams, at.op(down));
                (self.hyper_up(&n, &m, &w.up, w.streams, at.op(up)), f)
            }
        }
    }

    fn gdn_block(&mut self, x: &CudaBuf, w: &GdnWeights<Self>, at: At<'_>) -> CudaBuf {
        match self.fused_gdn(x, w, at) {
            Some(y) => y,
            None => blocks::gdn_block(self, x, w, at),
        }
    }

    fn mlp_block(&mut self, x: &CudaBuf, w: &MlpWeights<Self>, at: At<'_>) -> CudaBuf {
        match self.fused_mlp(x, w, at) {
            Some(y) => y,
            None => blocks::mlp_block(self, x, w, at),
        }
    }

    fn moe_block(
        &mut self,
        x: &CudaBuf,
        w: &MoeWeights<Self>,
        at: At<'_>,
        mut trace: Option<&mut Trace>,
    ) -> CudaBuf {
        match self.fused_moe(x, w, at, trace.as_deref_mut()) {
            Some(y) => y,
            None => blocks::moe_block(self, x, w, at, trace),
        }
    }

    fn attention_block(
        &mut self,
        x: &CudaBuf,
        w: &AttentionWeights<Self>,
        at: At<'_>,
        trace: Option<&mut Trace>,
    ) -> CudaBuf {
        self.gated_attention(x, w, at, trace)
    }
}
