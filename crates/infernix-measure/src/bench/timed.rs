//! A backend that passes every operation on and notes what it took: where a model's time goes.

use super::bytes::part_bytes;
use infernix_engine::EngineError;
use infernix_engine::backend::*;
use infernix_engine::ngram::NgramTicket;
use infernix_engine::state::StateLayout;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// What calls of one operation amount to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Calls.
    pub calls: u64,
    /// Time inside them.
    pub time: Duration,
    /// Bytes of weights that they read (of experts: those of the distinct chosen ones).
    pub bytes: u64,
    /// Multiplications and additions of matrix products.
    pub operations: u64,
}

/// A weight and its size.
pub struct TimedWeight<W> {
    inner: W,
    bytes: u64,
    values: u64,
}

/// Routed experts of a layer and their size.
pub struct TimedExperts<E> {
    inner: E,
    expert_bytes: u64,
    expert_values: u64,
}

/// A backend and what its operations took.
pub struct Timed<B: Backend> {
    inner: B,
    costs: BTreeMap<String, Cost>,
}

impl<B: Backend> Timed<B> {
    /// Nothing noted yet.
    pub fn new(inner: B) -> Self {
        Timed { inner, costs: BTreeMap::new() }
    }

    /// What was noted since the last call, most time first.
    pub fn take(&mut self) -> Vec<(String, Cost)> {
        let mut all: Vec<_> = std::mem::take(&mut self.costs).into_iter().collect();
        all.sort_by_key(|(_, c)| std::cmp::Reverse(c.time));
        all
    }

    fn note<T>(&mut self, name: &str, bytes: u64, operations: u64, f: impl FnOnce(&mut B) -> T) -> T {
        let clock = Instant::now();
        let out = f(&mut self.inner);
        let time = clock.elapsed();
        if !self.costs.contains_key(name) {
            self.costs.insert(name.to_owned(), Cost::default());
        }
        if let Some(c) = self.costs.get_mut(name) {
            c.calls += 1;
            c.time += time;
            c.bytes += bytes;
            c.operations += operations;
        }
        out
    }

    /// An operation named by its site.
    fn at<T>(&mut self, kind: &str, at: At<'_>, w: (u64, u64), f: impl FnOnce(&mut B) -> T) -> T {
        let name = format!("{kind} {:?}", at.site.op);
        self.note(&name, w.0, 2 * w.1 * at.rows.len() as u64, f)
    }
}

impl<W> TimedWeight<W> {
    fn size(&self) -> (u64, u64) {
        (self.bytes, self.values)
    }
}

const NONE: (u64, u64) = (0, 0);

fn size(data: &WeightData) -> (u64, u64) {
    (data.parts.iter().map(part_bytes).sum(), data.shape.iter().product())
}

impl<B: Backend> Backend for Timed<B> {
    type Buf = B::Buf;
    type Weight = TimedWeight<B::Weight>;
    type Experts = TimedExperts<B::Experts>;
    type Routing = B::Routing;
    type Selection = B::Selection;
    type Snapshot = B::Snapshot;

    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn weight(&mut self, spec: &WeightSpec, data: WeightData) -> Result<Self::Weight, EngineError> {
        let (bytes, values) = size(&data);
        Ok(TimedWeight { inner: self.inner.weight(spec, data)?, bytes, values })
    }

    fn experts_weight(&mut self, spec: &ExpertSpec, data: ExpertData) -> Result<Self::Experts, EngineError> {
        let bytes = match &data {
            ExpertData::Bank(part) => part_bytes(part),
            ExpertData::Parents { gate_up, down } => size(gate_up).0 + size(down).0,
        };
        Ok(TimedExperts {
            expert_bytes: bytes / spec.experts.max(1) as u64,
            expert_values: 3 * (spec.hidden * spec.intermediate) as u64,
            inner: self.inner.experts_weight(spec, data)?,
        })
    }

    fn allocate(&mut self, layout: &StateLayout) -> Result<(), EngineError> {
        self.inner.allocate(layout)
    }

    fn reset(&mut self, slot: SlotId) {
        self.inner.reset(slot);
    }

    fn snapshot(&mut self, slot: SlotId) -> Result<Self::Snapshot, EngineError> {
        self.inner.snapshot(slot)
    }

    fn restore(&mut self, slot: SlotId, snapshot: &Self::Snapshot) -> Result<(), EngineError> {
        self.inner.restore(slot, snapshot)
    }

    fn copy_page(&mut self, from: u32, to: u32) {
        self.inner.copy_page(from, to);
    }

    fn snapshot_bytes(&self, snapshot: &Self::Snapshot) -> u64 {
        self.inner.snapshot_bytes(snapshot)
    }

    fn save_snapshot(&mut self, snapshot: &Self::Snapshot) -> Result<Vec<u8>, EngineError> {
        self.inner.save_snapshot(snapshot)
    }

    fn load_snapshot(&mut self, bytes: &[u8]) -> Result<Self::Snapshot, EngineError> {
        self.inner.load_snapshot(bytes)
    }

    fn page_bytes(&self) -> u64 {
        self.inner.page_bytes()
    }

    fn save_page(&mut self, page: u32) -> Result<Vec<u8>, EngineError> {
        self.inner.save_page(page)
    }

    fn load_page(&mut self, page: u32, bytes: &[u8]) -> Result<(), EngineError> {
        self.inner.load_page(page, bytes)
    }

    fn begin_round(&mut self, meta: StepMeta) -> Result<(), EngineError> {
        self.note("round begin", 0, 0, |b| b.begin_round(meta))
    }

    fn end_round(&mut self) -> Outcome {
        self.note("round end", 0, 0, B::end_round)
    }

    fn commit(&mut self, slot: SlotId, part: Part, n: usize) -> Result<(), EngineError> {
        self.note("round commit", 0, 0, |b| b.commit(slot, part, n))
    }

    fn read(&mut self, x: &Self::Buf) -> Vec<f32> {
        self.note("read", 0, 0, |b| b.read(x))
    }

    fn write(&mut self, rows: usize, width: usize, values: &[f32]) -> Self::Buf {
        self.note("write", 0, 0, |b| b.write(rows, width, values))
    }

    fn read_routing(&mut self, routing: &Self::Routing) -> Vec<Vec<(u32, f32)>> {
        self.inner.read_routing(routing)
    }

    fn read_selection(&mut self, selection: &Self::Selection) -> Vec<Option<Vec<u32>>> {
        self.inner.read_selection(selection)
    }

    fn take_rows(&mut self, x: &Self::Buf, rows: &[usize]) -> Self::Buf {
        self.note("take_rows", 0, 0, |b| b.take_rows(x, rows))
    }

    fn repeat(&mut self, x: &Self::Buf, n: usize) -> Self::Buf {
        self.note("repeat", 0, 0, |b| b.repeat(x, n))
    }

    fn concat(&mut self, x: &Self::Buf, y: &Self::Buf) -> Self::Buf {
        self.note("concat", 0, 0, |b| b.concat(x, y))
    }

    fn copy(&mut self, x: &Self::Buf) -> Self::Buf {
        self.note("copy", 0, 0, |b| b.copy(x))
    }

    fn embed(&mut self, table: &Self::Weight, tokens: Tokens, at: At<'_>) -> Self::Buf {
        self.at("embed", at, NONE, |b| b.embed(&table.inner, tokens, at))
    }

    fn norm(&mut self, x: &Self::Buf, w: &Self::Weight, spec: NormSpec, at: At<'_>) -> Self::Buf {
        self.at("norm", at, NONE, |b| b.norm(x, &w.inner, spec, at))
    }

    fn linear(&mut self, x: &Self::Buf, w: &Self::Weight, out: Boundary, at: At<'_>) -> Self::Buf {
        self.at("linear", at, w.size(), |b| b.linear(x, &w.inner, out, at))
    }

    fn add(&mut self, x: &mut Self::Buf, y: &Self::Buf, at: At<'_>) {
        self.at("add", at, NONE, |b| b.add(x, y, at));
    }

    fn gate(&mut self, o: &Self::Buf, gate: &Self::Buf, at: At<'_>) -> Self::Buf {
        self.at("gate", at, NONE, |b| b.gate(o, gate, at))
    }

    fn swiglu(&mut self, gate: &Self::Buf, up: &Self::Buf, at: At<'_>) -> Self::Buf {
        self.at("swiglu", at, NONE, |b| b.swiglu(gate, up, at))
    }

    fn hyper_down(&mut self, normed: &Self::Buf, w: &Self::Weight, streams: usize, at: At<'_>) -> Self::Buf {
        self.at("hyper", at, w.size(), |b| b.hyper_down(normed, &w.inner, streams, at))
    }

    fn hyper_up(
        &mut self,
        normed: &Self::Buf,
        m: &Self::Buf,
        w: &Self::Weight,
        streams: usize,
        at: At<'_>,
    ) -> Self::Buf {
        self.at("hyper", at, w.size(), |b| b.hyper_up(normed, m, &w.inner, streams, at))
    }

    fn hyper_factor(
        &mut self,
        normed: &Self::Buf,
        w: &Self::Weight,
        streams: usize,
        at: At<'_>,
    ) -> Self::Buf {
        self.at("hyper", at, w.size(), |b| b.hyper_factor(normed, &w.inner, streams, at))
    }

    fn hyper_inject(&mut self, r: &mut Self::Buf, y: &Self::Buf, factor: &Self::Buf, at: At<'_>) {
        self.at("hyper", at, NONE, |b| b.hyper_inject(r, y, factor, at));
    }

    fn ngram(&mut self, tickets: &[NgramTicket], at: At<'_>) -> Self::Buf {
        self.at("ngram", at, NONE, |b| b.ngram(tickets, at))
    }

    fn ple_gate(
        &mut self,
        key: &Self::Buf,
        query: &Self::Buf,
        value: &Self::Buf,
        streams: usize,
        at: At<'_>,
    ) -> Self::Buf {
        self.at("ple", at, NONE, |b| b.ple_gate(key, query, value, streams, at))
    }

    fn ple_conv(
        &mut self,
        id: StateId,
        r: &mut Self::Buf,
        v: &Self::Buf,
        c: &Self::Buf,
        w: &Self::Weight,
        dilation: usize,
        at: At<'_>,
    ) {
        self.at("ple", at, NONE, |b| b.ple_conv(id, r, v, c, &w.inner, dilation, at));
    }

    fn gdn_conv(&mut self, id: StateId, x: &Self::Buf, w: &Self::Weight, at: At<'_>) -> Self::Buf {
        self.at("gdn", at, NONE, |b| b.gdn_conv(id, x, &w.inner, at))
    }

    fn gdn(
        &mut self,
        id: StateId,
        u: &Self::Buf,
        a: &Self::Buf,
        b: &Self::Buf,
        a_log: &Self::Weight,
        dt_bias: &Self::Weight,
        at: At<'_>,
    ) -> Self::Buf {
        self.note("gdn recurrence", 0, 0, |e| e.gdn(id, u, a, b, &a_log.inner, &dt_bias.inner, at))
    }

    fn gdn_gate(
        &mut self,
        o: &Self::Buf,
        z: &Self::Buf,
        w: &Self::Weight,
        kind: GateKind,
        eps: f64,
        at: At<'_>,
    ) -> Self::Buf {
        self.at("gdn", at, NONE, |b| b.gdn_gate(o, z, &w.inner, kind, eps, at))
    }

    fn norm_rope(
        &mut self,
        x: &Self::Buf,
        w: &Self::Weight,
        rope: &RopeTable,
        eps: f64,
        at: At<'_>,
    ) -> Self::Buf {
        self.at("norm_rope", at, NONE, |b| b.norm_rope(x, &w.inner, rope, eps, at))
    }

    fn kv_append(&mut self, id: StateId, k: &Self::Buf, v: &Self::Buf) {
        self.note("kv_append", 0, 0, |b| b.kv_append(id, k, v));
    }

    fn attention(
        &mut self,
        id: StateId,
        q: &Self::Buf,
        selection: Option<&Self::Selection>,
        at: At<'_>,
    ) -> Self::Buf {
        self.note("attention", 0, 0, |b| b.attention(id, q, selection, at))
    }

    fn index_append(
        &mut self,
        id: StateId,
        raw: &Self::Buf,
        w: &Self::Weight,
        rope: &RopeTable,
        eps: f64,
        at: At<'_>,
    ) {
        self.note("index append", 0, 0, |b| b.index_append(id, raw, &w.inner, rope, eps, at));
    }

    fn index_select(&mut self, id: StateId, q: &Self::Buf, at: At<'_>) -> Self::Selection {
        self.note("index select", 0, 0, |b| b.index_select(id, q, at))
    }

    fn route(&mut self, logits: &Self::Buf, top_k: usize, at: At<'_>) -> Self::Routing {
        self.at("route", at, NONE, |b| b.route(logits, top_k, at))
    }

    fn experts(
        &mut self,
        x: &Self::Buf,
        routing: &Self::Routing,
        store: &Self::Experts,
        shared: &Self::Buf,
        shared_logit: &Self::Buf,
        at: At<'_>,
    ) -> Self::Buf {
        let chosen = self.inner.read_routing(routing);
        let picks: u64 = chosen.iter().map(|r| r.len() as u64).sum();
        let distinct: std::collections::BTreeSet<u32> = chosen.iter().flatten().map(|p| p.0).collect();
        let bytes = store.expert_bytes * distinct.len() as u64;
        self.note("experts", bytes, 2 * picks * store.expert_values, |b| {
            b.experts(x, routing, &store.inner, shared, shared_logit, at)
        })
    }
}
