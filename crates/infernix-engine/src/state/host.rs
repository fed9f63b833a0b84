//! State storage of host backends, and the transaction logic over it.
//!
//! Prefill rounds write committed state; decode rounds write records. Nothing here rounds: kernels of the backend
//! compute values and hand them in.

use super::codec::{KvCodec, KvFormat};
use super::slot::{ConvSlot, GdnRecord, GdnSlot, IndexSlot, Slot, SlotSnapshot};
use super::{AttentionLayout, PAGE_TOKENS, StateLayout};
use crate::backend::{CallKind, Outcome, Part, RowKey, SlotId, StateId, StepMeta};
use crate::error::EngineError;
use crate::memory::Lines;
use std::ops::Range;
use std::sync::Arc;

/// Which convolution's columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConvKind {
    /// Gated delta rule input, before the convolution.
    Gdn,
    /// Normalised gated n-gram value.
    Ple,
}

/// One lane's recurrent matrix in this round.
pub struct GdnLane<'a> {
    /// Rows of the call.
    pub rows: Range<usize>,
    /// S `[value_heads, dk, dv]`, to be advanced in place over those rows.
    pub s: &'a mut [f32],
    /// Where given, the first row advances this state instead, and leaves the result in `s`, whose values are old.
    pub from: Option<&'a [f32]>,
}

impl GdnLane<'_> {
    /// Makes `s` the state to advance.
    pub fn settle(&mut self) {
        if let Some(from) = self.from.take() {
            self.s.copy_from_slice(from);
        }
    }
}

/// Pages, slots, and the round in progress.
pub struct HostState {
    layout: StateLayout,
    codec: Box<dyn KvCodec>,
    /// By attention layer: `[page][kv head][K rows, V rows]`.
    kv: Vec<Vec<u8>>,
    slots: Vec<Slot>,
    meta: StepMeta,
    lane_rows: Vec<Range<usize>>,
    failed: Vec<(usize, String)>,
}

impl HostState {
    /// Allocates all pages and slots; `fp32` overrides the KV format with FP32.
    ///
    /// # Errors
    /// More keys and values than there can be memory for.
    pub fn new(layout: &StateLayout, fp32: bool) -> Result<Self, EngineError> {
        let codec = if fp32 { KvFormat::F32 } else { layout.kv }.codec();
        let tokens = layout.pages.checked_mul(PAGE_TOKENS);
        let bytes = |a: &AttentionLayout| tokens?.checked_mul(a.kv_heads * 2 * codec.row_bytes(a.head_dim));
        let sizes: Option<Vec<usize>> = layout.attention.iter().map(bytes).collect();
        let sum = sizes.iter().flatten().try_fold(0usize, |sum, n| sum.checked_add(*n));
        // Allocated to nothing but see whether it can be: an allocation of zeros that fails ends the process. A system that
        // promises more than it has ends it later.
        let memory = rustix::system::sysinfo();
        let memory =
            (memory.totalram as u64 + memory.totalswap as u64).saturating_mul(memory.mem_unit.into());
        let possible =
            sum.is_some_and(|sum| sum as u64 <= memory && Vec::<u8>::new().try_reserve_exact(sum).is_ok());
        let Some(sizes) = sizes.filter(|_| possible) else {
            let gib = sum.map_or("more than any machine has".to_owned(), |n| format!("{} GiB", n >> 30));
            return Err(EngineError::Request(format!(
                "keys and values of {} tokens take {gib}: this machine cannot hold them (--kv-capacity, --max-context)",
                tokens.unwrap_or(usize::MAX)
            )));
        };
        let kv = sizes.into_iter().map(|n| vec![0u8; n]).collect();
        let mut state = HostState {
            layout: layout.clone(),
            codec,
            kv,
            slots: Vec::new(),
            meta: StepMeta { kind: CallKind::Prefill, part: Part::Target, lanes: Vec::new() },
            lane_rows: Vec::new(),
            failed: Vec::new(),
        };
        state.slots = (0..layout.slots).map(|_| state.fresh_slot()).collect();
        Ok(state)
    }

    fn fresh_slot(&self) -> Slot {
        // Each layer's state, and the buffer that its next one goes to.
        let lengths: Vec<usize> =
            self.layout.gdn.iter().map(|d| d.value_heads * d.key_dim * d.value_dim).collect();
        let mut states = Lines::together(&lengths.repeat(2));
        let spares = states.split_off(lengths.len());
        let gdn = states.into_iter().zip(spares);
        self.slot_of(
            gdn.map(|(s, spare)| GdnSlot { s: Arc::new(s), spare: vec![spare], ..GdnSlot::default() })
                .collect(),
        )
    }

    /// A fresh slot around these layers.
    fn slot_of(&self, gdn: Vec<GdnSlot>) -> Slot {
        let conv = |width: usize, columns: usize| ConvSlot {
            columns: vec![0.0; width * columns],
            record: Vec::new(),
        };
        Slot {
            gdn,
            gdn_conv: self.layout.gdn.iter().map(|d| conv(d.channels(), d.conv_kernel - 1)).collect(),
            ple_conv: self.layout.ple.iter().map(|p| conv(p.width, p.columns)).collect(),
            index: self.layout.attention.iter().map(|a| a.index.map(|_| IndexSlot::default())).collect(),
        }
    }

    /// The layout it was made for.
    pub fn layout(&self) -> &StateLayout {
        &self.layout
    }

    /// The KV codec.
    pub fn codec(&self) -> &dyn KvCodec {
        &*self.codec
    }

    /// The round in progress.
    pub fn meta(&self) -> &StepMeta {
        &self.meta
    }

    /// Rows of a lane in the call.
    pub fn lane_rows(&self, lane: usize) -> Range<usize> {
        self.lane_rows[lane].clone()
    }

    // ---- rounds --------------------------------------------------------------------------------------------

    /// Checks and installs a round.
    pub fn begin(&mut self, meta: StepMeta) -> Result<(), EngineError> {
        meta.validate(self.layout.slots, self.layout.pages)?;
        let mut next = 0;
        self.lane_rows = meta
            .lanes
            .iter()
            .map(|l| {
                let r = next..next + l.ids.len();
                next = r.end;
                r
            })
            .collect();
        for lane in meta.lanes.iter().filter(|_| meta.part == Part::Target) {
            let decode = meta.kind == CallKind::Decode;
            self.slots[lane.slot].provide(|g| if decode { g.record.keys.is_empty() } else { g.shared() });
        }
        self.meta = meta;
        self.failed.clear();
        Ok(())
    }

    /// Latches the failure of a lane; the first cause wins.
    pub fn fail(&mut self, lane: usize, cause: String) {
        if self.failed.iter().all(|(l, _)| *l != lane) {
            self.failed.push((lane, cause));
        }
    }

    /// Ends the round.
    pub fn end(&mut self) -> Outcome {
        Outcome { failed_lanes: std::mem::take(&mut self.failed) }
    }

    /// Folds `n` recorded columns of a part and drops the rest. `replay` advances S over the first n columns of a record;
    /// it is called only when some but not all columns are kept.
    pub fn commit(
        &mut self,
        slot: SlotId,
        part: Part,
        n: usize,
        mut replay: impl FnMut(StateId, &mut [f32], &GdnRecord, usize),
    ) -> Result<(), EngineError> {
        let layout = &self.layout;
        let slot = self.slots.get_mut(slot).ok_or(EngineError::OutOfSlots { slots: layout.slots })?;
        let too_many = |have: usize| EngineError::Round(format!("commit of {n} columns, {have} recorded"));
        if part == Part::Target {
            slot.provide(|g| n > 0 && n < g.record.keys.len() && g.shared());
            for (id, g) in slot.gdn.iter_mut().enumerate() {
                let have = g.record.keys.len();
                if n > have {
                    return Err(too_many(have));
                }
                if n == have && n > 0 {
                    let after = std::mem::take(&mut g.record.after);
                    g.replace(Arc::new(after));
                } else if n > 0 {
                    let record = std::mem::take(&mut g.record);
                    replay(id, g.own(), &record, n);
                    g.record = record;
                }
                g.len += n;
                g.drop_record();
            }
            for (c, width) in slot
                .gdn_conv
                .iter_mut()
                .zip(layout.gdn.iter().map(|d| d.channels()))
                .chain(slot.ple_conv.iter_mut().zip(layout.ple.iter().map(|p| p.width)))
            {
                if n * width > c.record.len() {
                    return Err(too_many(c.record.len() / width.max(1)));
                }
                shift(&mut c.columns, &c.record[..n * width]);
                c.record.clear();
            }
        }
        for (x, a) in slot.index.iter_mut().zip(&layout.attention) {
            let (Some(x), Some(dims)) = (x, a.index) else { continue };
            if a.part != part {
                continue;
            }
            if n > x.record_positions.len() {
                return Err(too_many(x.record_positions.len()));
            }
            x.raw.extend_from_slice(&x.record_raw[..n * dims.dim]);
            x.positions.extend_from_slice(&x.record_positions[..n]);
            let done = x.positions.len() / dims.ratio;
            Arc::make_mut(&mut x.pooled).extend_from_slice(&x.record_pooled[..done * dims.dim]);
            x.raw.drain(..done * dims.ratio * dims.dim);
            x.positions.drain(..done * dims.ratio);
            x.record_pooled.clear();
            x.record_raw.clear();
            x.record_positions.clear();
        }
        Ok(())
    }

    /// Makes a slot fresh.
    pub fn reset(&mut self, slot: SlotId) {
        // Buffers that nobody else holds are used again: their pages are there.
        let mut gdn = std::mem::take(&mut self.slots[slot].gdn);
        for g in &mut gdn {
            g.drop_record();
            if g.shared()
                && let Some(own) = g.spare.pop()
            {
                g.s = Arc::new(own);
            }
            if g.shared() {
                self.slots[slot] = self.fresh_slot();
                return;
            }
            Arc::make_mut(&mut g.s).fill(0.0);
            g.len = 0;
        }
        self.slots[slot] = self.slot_of(gdn);
    }

    /// Committed state of a slot.
    pub fn snapshot(&self, slot: SlotId) -> Result<SlotSnapshot, EngineError> {
        let s = self.slots.get(slot).ok_or(EngineError::OutOfSlots { slots: self.layout.slots })?;
        Ok(SlotSnapshot(Arc::new(s.committed())))
    }

    /// Overwrites a slot.
    pub fn restore(&mut self, slot: SlotId, snapshot: &SlotSnapshot) -> Result<(), EngineError> {
        let s = self.slots.get_mut(slot).ok_or(EngineError::OutOfSlots { slots: self.layout.slots })?;
        s.assign(&snapshot.0);
        Ok(())
    }

    // ---- KV ------------------------------------------------------------------------------------------------

    fn head_bytes(&self, id: StateId) -> usize {
        2 * PAGE_TOKENS * self.codec.row_bytes(self.layout.attention[id].head_dim)
    }

    /// Stored K rows and V rows of one page and KV head, [`PAGE_TOKENS`] rows each.
    pub fn kv_tile(&self, id: StateId, page: u32, head: usize) -> (&[u8], &[u8]) {
        let bytes = self.head_bytes(id);
        let at = (page as usize * self.layout.attention[id].kv_heads + head) * bytes;
        self.kv[id][at..at + bytes].split_at(bytes / 2)
    }

    /// Encodes the call's keys and values `[T, kv_heads * d]` into their pages.
    pub fn kv_append(&mut self, id: StateId, k: &[f32], v: &[f32]) {
        let (heads, d) = (self.layout.attention[id].kv_heads, self.layout.attention[id].head_dim);
        let (row, tile) = (self.codec.row_bytes(d), self.head_bytes(id));
        for (t, (l, c)) in self.meta.each_row().enumerate() {
            let lane = &self.meta.lanes[l];
            let index = lane.start + c;
            let page = lane.pages[index / PAGE_TOKENS] as usize;
            for h in 0..heads {
                let at = (page * heads + h) * tile + index % PAGE_TOKENS * row;
                let x = (t * heads + h) * d..(t * heads + h + 1) * d;
                self.codec.encode_k(&k[x.clone()], &mut self.kv[id][at..at + row]);
                let at = at + tile / 2;
                self.codec.encode_v(&v[x], &mut self.kv[id][at..at + row]);
            }
        }
    }

    /// One layer's words of a page.
    pub(super) fn page(&self, id: StateId, page: u32) -> &[u8] {
        let bytes = self.head_bytes(id) * self.layout.attention[id].kv_heads;
        &self.kv[id][page as usize * bytes..][..bytes]
    }

    /// The same, to be overwritten.
    pub(super) fn page_mut(&mut self, id: StateId, page: u32) -> &mut [u8] {
        let bytes = self.head_bytes(id) * self.layout.attention[id].kv_heads;
        &mut self.kv[id][page as usize * bytes..][..bytes]
    }

    /// Copies a page in every layer.
    pub fn copy_page(&mut self, from: u32, to: u32) {
        for id in 0..self.kv.len() {
            let bytes = self.head_bytes(id) * self.layout.attention[id].kv_heads;
            let at = from as usize * bytes;
            self.kv[id].copy_within(at..at + bytes, to as usize * bytes);
        }
    }

    // ---- convolutions --------------------------------------------------------------------------------------

    /// Takes one lane's new columns `x [n, width]` and gives `[history + n, width]`: the kept columns before them, then
    /// them. In a prefill round the kept columns advance; in a decode round x is recorded.
    pub fn conv_window(&mut self, kind: ConvKind, id: StateId, lane: usize, x: &[f32]) -> Vec<f32> {
        let decode = self.meta.kind == CallKind::Decode;
        let slot = &mut self.slots[self.meta.lanes[lane].slot];
        let c = match kind {
            ConvKind::Gdn => &mut slot.gdn_conv[id],
            ConvKind::Ple => &mut slot.ple_conv[id],
        };
        let kept = c.columns.len();
        let mut window = Vec::with_capacity(kept + c.record.len() + x.len());
        window.extend_from_slice(&c.columns);
        window.extend_from_slice(&c.record);
        let skip = window.len() - kept;
        window.extend_from_slice(x);
        if decode {
            c.record.extend_from_slice(x);
        } else {
            c.record.clear();
            shift(&mut c.columns, x);
        }
        window.drain(..skip);
        window
    }

    // ---- gated delta rule ----------------------------------------------------------------------------------

    /// In a decode round, records the call's inputs: `u [T, C]`, `g, beta [T, value_heads]`. Call before [`Self::gdn_lanes`].
    pub fn gdn_record(&mut self, id: StateId, keys: &[RowKey], u: &[f32], g: &[f32], beta: &[f32]) {
        if self.meta.kind == CallKind::Prefill {
            return;
        }
        let dims = self.layout.gdn[id];
        let (c, nv) = (dims.channels(), dims.value_heads);
        for (lane, r) in self.meta.lanes.iter().zip(&self.lane_rows) {
            let state = &mut self.slots[lane.slot].gdn[id];
            if state.record.keys.is_empty() {
                state.record.after = state.spare.pop().unwrap_or_else(|| Lines::zeroed(state.s.len()));
            }
            state.record.keys.extend_from_slice(&keys[r.clone()]);
            state.record.u.extend_from_slice(&u[r.start * c..r.end * c]);
            state.record.g.extend_from_slice(&g[r.start * nv..r.end * nv]);
            state.record.beta.extend_from_slice(&beta[r.start * nv..r.end * nv]);
        }
    }

    /// The matrix each lane's recurrence advances: committed state in prefill, the record's in decode. Every row of the
    /// call must be advanced: see [`GdnLane::from`].
    pub fn gdn_lanes(&mut self, id: StateId) -> Vec<GdnLane<'_>> {
        let decode = self.meta.kind == CallKind::Decode;
        let mut order: Vec<Option<GdnLane<'_>>> = (0..self.meta.lanes.len()).map(|_| None).collect();
        for (slot, state) in self.slots.iter_mut().enumerate() {
            let Some(lane) = self.meta.lanes.iter().position(|l| l.slot == slot) else { continue };
            let rows = self.lane_rows[lane].clone();
            let g = &mut state.gdn[id];
            order[lane] = Some(if decode {
                // The first call of a record finds its buffer without a state.
                let from = (g.record.keys.len() == rows.len()).then_some(&g.s[..]);
                GdnLane { rows, s: &mut g.record.after, from }
            } else {
                g.drop_record();
                g.len += rows.len();
                GdnLane { rows, s: g.own(), from: None }
            });
        }
        order.into_iter().flatten().collect()
    }

    /// Committed S of a slot, `[value_heads, dk, dv]`.
    pub fn gdn_state(&self, id: StateId, slot: SlotId) -> &[f32] {
        &self.slots[slot].gdn[id].s
    }

    // ---- sparse-attention index ----------------------------------------------------------------------------

    /// Appends one lane's raw index keys `[n, di]`. For each block that becomes complete, `pool(raw rows of the block
    /// [r, di], position triple and sequence index of its first token)` gives the pooled key.
    pub fn index_append(
        &mut self,
        id: StateId,
        lane: usize,
        raw: &[f32],
        mut pool: impl FnMut(&[f32], [u32; 3], usize) -> Vec<f32>,
    ) -> Result<(), EngineError> {
        let dims =
            self.layout.attention[id].index.ok_or_else(|| EngineError::Round("layer has no index".into()))?;
        let (r, di) = (dims.ratio, dims.dim);
        let decode = self.meta.kind == CallKind::Decode;
        let lane = &self.meta.lanes[lane];
        let x = self.slots[lane.slot].index[id]
            .as_mut()
            .ok_or_else(|| EngineError::Round("slot has no index".into()))?;
        if !decode {
            x.record_raw.clear();
            x.record_positions.clear();
            x.record_pooled.clear();
        }
        let have = x.pooled.len() / di * r + x.positions.len() + x.record_positions.len();
        if have != lane.start {
            return Err(EngineError::Round(format!(
                "index holds {have} tokens, the call starts at {}",
                lane.start
            )));
        }
        for (c, key) in raw.chunks_exact(di).enumerate() {
            let position = lane.positions[c];
            if !decode {
                x.raw.extend_from_slice(key);
                x.positions.push(position);
                if x.positions.len() == r {
                    let pooled = pool(&x.raw, x.positions[0], lane.start + c + 1 - r);
                    Arc::make_mut(&mut x.pooled).extend(pooled);
                    x.raw.clear();
                    x.positions.clear();
                }
                continue;
            }
            x.record_raw.extend_from_slice(key);
            x.record_positions.push(position);
            let open = x.positions.len() + x.record_positions.len() - x.record_pooled.len() / di * r;
            if open == r {
                let begin = x.record_pooled.len() / di * r;
                let all: Vec<f32> = x.raw.iter().chain(&x.record_raw).copied().collect();
                let first = *x.positions.iter().chain(&x.record_positions).nth(begin).unwrap_or(&position);
                let pooled = pool(&all[begin * di..(begin + r) * di], first, lane.start + c + 1 - r);
                x.record_pooled.extend(pooled);
            }
        }
        Ok(())
    }

    /// Pooled keys of a lane, committed then recorded, each `[blocks, di]`.
    pub fn index_pooled(&self, id: StateId, lane: usize) -> (&[f32], &[f32]) {
        match &self.slots[self.meta.lanes[lane].slot].index[id] {
            Some(x) => (&x.pooled, &x.record_pooled),
            None => (&[], &[]),
        }
    }
}

impl Slot {
    /// A copy without records.
    fn committed(&self) -> Slot {
        let conv = |c: &ConvSlot| ConvSlot { columns: c.columns.clone(), record: Vec::new() };
        let gdn = |g: &GdnSlot| GdnSlot { s: g.s.clone(), len: g.len, ..GdnSlot::default() };
        let index = |x: &IndexSlot| IndexSlot {
            pooled: x.pooled.clone(),
            raw: x.raw.clone(),
            positions: x.positions.clone(),
            ..IndexSlot::default()
        };
        Slot {
            gdn: self.gdn.iter().map(gdn).collect(),
            gdn_conv: self.gdn_conv.iter().map(conv).collect(),
            ple_conv: self.ple_conv.iter().map(conv).collect(),
            index: self.index.iter().map(|x| x.as_ref().map(index)).collect(),
        }
    }
}

/// Appends `new` to `columns`, keeping its length: the oldest fall off.
fn shift(columns: &mut [f32], new: &[f32]) {
    let n = columns.len();
    if new.len() >= n {
        columns.copy_from_slice(&new[new.len() - n..]);
    } else {
        columns.copy_within(new.len().., 0);
        columns[n - new.len()..].copy_from_slice(new);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::{GdnDims, LaneMeta};
    use std::collections::BTreeSet;

    const N: usize = 2 * 4 * 3;

    fn state() -> HostState {
        let gdn = GdnDims { key_heads: 1, value_heads: 2, key_dim: 4, value_dim: 3, conv_kernel: 2 };
        let layout = StateLayout {
            attention: Vec::new(),
            gdn: vec![gdn],
            ple: Vec::new(),
            pages: 1,
            slots: 1,
            kv: KvFormat::Bf16,
        };
        HostState::new(&layout, false).unwrap()
    }

    #[test]
    fn more_keys_and_values_than_memory_are_an_error() {
        let attention =
            vec![AttentionLayout { part: Part::Target, kv_heads: 2, head_dim: 64, index: None }; 4];
        for pages in [1 << 40, usize::MAX >> 6, usize::MAX] {
            let layout = StateLayout {
                attention: attention.clone(),
                gdn: Vec::new(),
                ple: Vec::new(),
                pages,
                slots: 1,
                kv: KvFormat::Bf16,
            };
            let error = HostState::new(&layout, false).err().unwrap().to_string();
            assert!(error.contains("--kv-capacity"), "{error}");
        }
    }

    /// A round of `n` columns that leaves `value` everywhere in S.
    fn round(state: &mut HostState, kind: CallKind, n: usize, value: f32) {
        let lane = LaneMeta {
            slot: 0,
            stream: 0,
            start: 0,
            ids: vec![0; n],
            next_ids: Vec::new(),
            positions: vec![[0; 3]; n],
            pages: vec![0],
        };
        let meta = StepMeta { kind, part: Part::Target, lanes: vec![lane] };
        let keys = meta.keys();
        state.begin(meta).unwrap();
        let channels = state.layout.gdn[0].channels();
        state.conv_window(ConvKind::Gdn, 0, 0, &vec![0.0; n * channels]);
        state.gdn_record(0, &keys, &vec![0.0; n * channels], &vec![0.0; 2 * n], &vec![0.0; 2 * n]);
        for mut lane in state.gdn_lanes(0) {
            lane.settle();
            lane.s.fill(value);
        }
        assert!(state.end().failed_lanes.is_empty());
    }

    fn commit(state: &mut HostState, n: usize, value: f32) {
        state.commit(0, Part::Target, n, |_, s, _, _| s.fill(value)).unwrap();
    }

    /// However a sequence is restored, read on, decoded and drafted, its states change places among the same few buffers, and
    /// what snapshots hold stays as it is.
    #[test]
    fn states_take_the_buffers_of_former_ones_and_leave_snapshots_alone() {
        let mut s = state();
        let mut places = BTreeSet::new();
        round(&mut s, CallKind::Prefill, 3, 1.0);
        let early = s.snapshot(0).unwrap();
        round(&mut s, CallKind::Decode, 1, 2.0);
        commit(&mut s, 1, f32::NAN);
        let late = s.snapshot(0).unwrap();
        for i in 0..20 {
            let (snapshot, value) = if i % 3 == 0 { (&early, 1.0) } else { (&late, 2.0) };
            s.restore(0, snapshot).unwrap();
            assert_eq!(s.gdn_state(0, 0), [value; N]);
            places.insert(s.gdn_state(0, 0).as_ptr());
            if i % 2 == 0 {
                round(&mut s, CallKind::Prefill, 2, 3.0);
                assert_eq!(s.gdn_state(0, 0), [3.0; N]);
                places.insert(s.gdn_state(0, 0).as_ptr());
            }
            for (columns, kept) in [(1, 1), (3, 2), (2, 0), (1, 1)] {
                round(&mut s, CallKind::Decode, columns, 4.0);
                commit(&mut s, kept, 5.0);
                places.insert(s.gdn_state(0, 0).as_ptr());
            }
            assert_eq!(s.gdn_state(0, 0), [4.0; N]);
        }
        assert!(places.len() <= 5, "two of snapshots, and {} of the slot", places.len() - 2);
        for (snapshot, value) in [(&early, 1.0), (&late, 2.0)] {
            s.restore(0, snapshot).unwrap();
            assert_eq!(s.gdn_state(0, 0), [value; N]);
        }
        s.reset(0);
        assert_eq!(s.gdn_state(0, 0), [0.0; N]);
        assert!(places.contains(&s.gdn_state(0, 0).as_ptr()), "a fresh sequence takes them too");
    }
}
