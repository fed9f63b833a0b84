//! The oracle: every operation correctly rounded at its boundary, or rounded at random and reproducibly.
//!
//! Insides are f64 with a bound on the error; where value +- bound straddles a rounding boundary, the formula is
//! evaluated again in double-double (see `numerics::round`). So results depend on nothing but the operands: not on
//! threads, tiling, instruction set, or the other rows of a call.
//!
//! `cos` and `sin` of rotary angles are the f64 values of the standard library, taken as exact.

mod attention;
mod decode;
mod elementwise;
mod experts;
mod gemm;
mod recurrent;
mod simd;

use super::*;
use crate::numerics::round::{Rounding, RowRounder, Target};
use crate::state::{HostState, SlotSnapshot};
use decode::Exact;
use gemm::{Operand, Packed};
use rayon::prelude::*;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

/// Unit roundoff of f64.
const U: f64 = f64::EPSILON / 2.0;

/// How the lossless backend rounds.
#[derive(Clone, Copy, Debug)]
pub struct LosslessOptions {
    /// Nearest or stochastic.
    pub rounding: Rounding,
    /// Activations, KV and columns in FP32 instead of BF16.
    pub fp32: bool,
    /// Bytes of decoded weights kept; the rest is decoded again at each use.
    pub cache_bytes: usize,
}

impl Default for LosslessOptions {
    fn default() -> Self {
        LosslessOptions { rounding: Rounding::Nearest, fp32: false, cache_bytes: 8 << 30 }
    }
}

/// A matrix of FP32 (or exact BF16) values on the host.
#[derive(Clone, Debug)]
pub struct Mat {
    /// Rows.
    pub rows: usize,
    /// Values a row.
    pub width: usize,
    data: Vec<f32>,
    /// What products read of whole rows, made once for all of them.
    operand: OnceLock<Arc<Operand>>,
}

impl Mat {
    fn new(rows: usize, width: usize) -> Mat {
        Mat::of(rows, width, vec![0.0; rows * width])
    }

    fn of(rows: usize, width: usize, data: Vec<f32>) -> Mat {
        Mat { rows, width, data, operand: OnceLock::new() }
    }

    /// Row-major values.
    pub fn values(&self) -> &[f32] {
        &self.data
    }

    /// The values, to be changed.
    fn data_mut(&mut self) -> &mut [f32] {
        self.operand.take();
        &mut self.data
    }

    /// Rows of `k` values for products.
    fn operand(&self, k: usize) -> Arc<Operand> {
        let make = || Arc::new(Operand::new(self.wide(), k));
        if k == self.width { self.operand.get_or_init(make).clone() } else { make() }
    }

    fn row(&self, t: usize) -> &[f32] {
        &self.data[t * self.width..(t + 1) * self.width]
    }

    fn wide(&self) -> Vec<f64> {
        self.data.iter().map(|v| f64::from(*v)).collect()
    }
}

/// A weight in its stored words, decoded on first use.
pub struct Weight {
    spec: WeightSpec,
    data: WeightData,
    /// Activation element of each stored column, where that is not the column's own.
    columns: Option<Vec<u32>>,
    cache: Arc<AtomicUsize>,
    packed: Mutex<Option<Arc<Packed>>>,
    values: OnceLock<Exact>,
    integers: OnceLock<Option<decode::Integers>>,
}

impl Weight {
    fn exact(&self) -> Exact {
        // The words were decoded once when the weight was taken; they cannot fail now.
        let mut exact = decode::weight(&self.spec.name, &self.data).unwrap_or_default();
        if let Some(columns) = &self.columns {
            for row in exact.values.chunks_exact_mut(columns.len()) {
                let stored = row.to_vec();
                columns.iter().zip(stored).for_each(|(c, v)| row[*c as usize] = v);
            }
        }
        exact
    }

    /// Ready for products; kept while the cache budget lasts.
    fn packed(&self) -> Arc<Packed> {
        let mut slot = self.packed.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(p) = &*slot {
            return p.clone();
        }
        let p = Arc::new(Packed::new(&self.exact()));
        if take_budget(&self.cache, p.bytes()) {
            *slot = Some(p.clone());
        }
        p
    }

    /// Integer operands of the canonical 4-bit product.
    fn integers(&self) -> Option<&decode::Integers> {
        self.integers.get_or_init(|| decode::integers(&self.data)).as_ref()
    }

    fn small(&self) -> &Exact {
        self.values.get_or_init(|| self.exact())
    }

    /// All values of a vector or small matrix.
    fn values(&self) -> &[f64] {
        &self.small().values
    }

    /// Values a row.
    fn k(&self) -> usize {
        self.small().k
    }

    /// `[K, N]` of a small matrix.
    fn by_column(&self) -> Vec<f64> {
        let e = self.small();
        (0..e.k).flat_map(|j| e.values.iter().skip(j).step_by(e.k).copied()).collect()
    }

    /// One row of a small matrix.
    fn row(&self, n: usize) -> &[f64] {
        let e = self.small();
        &e.values[n * e.k..(n + 1) * e.k]
    }
}

fn take_budget(left: &AtomicUsize, bytes: usize) -> bool {
    left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |v| v.checked_sub(bytes)).is_ok()
}

/// Experts and weights by row, rank order.
pub type Routes = Vec<Vec<(u32, f32)>>;
/// Selected blocks by row.
pub type Blocks = Vec<Option<Vec<u32>>>;

/// The lossless backend.
pub struct Lossless {
    options: LosslessOptions,
    state: Option<HostState>,
    cache: Arc<AtomicUsize>,
    gdn_layers: Vec<u16>,
}

impl Lossless {
    /// Changes how later operations round; weights and state stay.
    pub fn set_rounding(&mut self, rounding: Rounding) {
        self.options.rounding = rounding;
    }

    /// A backend without state; [`Backend::allocate`] adds it.
    pub fn new(options: LosslessOptions) -> Self {
        let cache = Arc::new(AtomicUsize::new(options.cache_bytes));
        Lossless { options, state: None, cache, gdn_layers: Vec::new() }
    }

    fn state(&self) -> &HostState {
        self.state.as_ref().expect("rounds follow allocate")
    }

    fn state_mut(&mut self) -> &mut HostState {
        self.state.as_mut().expect("rounds follow allocate")
    }

    fn act(&self) -> Target {
        if self.options.fp32 { Target::F32 } else { Target::Bf16 }
    }

    fn target(&self, b: Boundary) -> Target {
        if b == Boundary::F32 { Target::F32 } else { self.act() }
    }

    fn rounder(&self, at: At<'_>, row: usize) -> RowRounder {
        self.rounder_as(self.act(), at, row)
    }

    fn rounder_as(&self, target: Target, at: At<'_>, row: usize) -> RowRounder {
        RowRounder::at(self.options.rounding, target, at, row)
    }

    /// Computes a matrix row by row in parallel, rounding to Act.
    fn map_rows(
        &self,
        rows: usize,
        width: usize,
        at: At<'_>,
        f: impl Fn(usize, RowRounder, &mut [f32]) + Sync,
    ) -> Mat {
        self.map_rows_as(self.act(), rows, width, at, f)
    }

    fn map_rows_as(
        &self,
        target: Target,
        rows: usize,
        width: usize,
        at: At<'_>,
        f: impl Fn(usize, RowRounder, &mut [f32]) + Sync,
    ) -> Mat {
        let mut out = Mat::new(rows, width);
        out.data
            .par_chunks_mut(width.max(1))
            .with_min_len(4096 / width.max(1) + 1)
            .enumerate()
            .for_each(|(t, out)| f(t, self.rounder_as(target, at, t), out));
        out
    }
}

impl Backend for Lossless {
    type Buf = Mat;
    type Weight = Weight;
    type Experts = experts::Experts;
    type Routing = Routes;
    type Selection = Blocks;
    type Snapshot = SlotSnapshot;

    fn name(&self) -> &'static str {
        "lossless"
    }

    fn weight(&mut self, spec: &WeightSpec, data: WeightData) -> Result<Weight, EngineError> {
        decode::check_shape(&spec.name, &data)?;
        let w = Weight {
            spec: spec.clone(),
            data,
            columns: None,
            cache: self.cache.clone(),
            packed: Mutex::new(None),
            values: OnceLock::new(),
            integers: OnceLock::new(),
        };
        // Decoding one row of each part proves that the rest will decode: lengths and shapes are the same.
        let mut probe = w.data.clone();
        probe.parts.iter_mut().for_each(|p| p.rows.end = p.rows.end.min(p.rows.start + 1));
        decode::weight(&spec.name, &probe)?;
        if spec.activation == Activation::A4
            && (spec.input_scale.is_none() || decode::integers(&probe).is_none())
        {
            let what = "4-bit activations need NVFP4 words and an input scale".to_owned();
            return Err(EngineError::Weight { name: spec.name.clone(), what });
        }
        Ok(w)
    }

    fn gathered(
        &mut self,
        spec: &WeightSpec,
        data: WeightData,
        columns: Vec<u32>,
    ) -> Result<Weight, EngineError> {
        if spec.activation == Activation::A4 {
            let what = "columns of a 4-bit product cannot be gathered".to_owned();
            return Err(EngineError::Weight { name: spec.name.clone(), what });
        }
        Ok(Weight { columns: Some(columns), ..self.weight(spec, data)? })
    }

    fn experts_weight(
        &mut self,
        spec: &ExpertSpec,
        data: ExpertData,
    ) -> Result<experts::Experts, EngineError> {
        experts::Experts::new(spec, data, self.cache.clone())
    }

    fn allocate(&mut self, layout: &StateLayout) -> Result<(), EngineError> {
        self.gdn_layers = vec![0; layout.gdn.len()];
        self.state = Some(HostState::new(layout, self.options.fp32)?);
        Ok(())
    }

    fn reset(&mut self, slot: SlotId) {
        self.state_mut().reset(slot);
    }

    fn snapshot(&mut self, slot: SlotId) -> Result<SlotSnapshot, EngineError> {
        self.state().snapshot(slot)
    }

    fn restore(&mut self, slot: SlotId, snapshot: &SlotSnapshot) -> Result<(), EngineError> {
        self.state_mut().restore(slot, snapshot)
    }

    fn copy_page(&mut self, from: u32, to: u32) {
        self.state_mut().copy_page(from, to);
    }

    fn snapshot_bytes(&self, snapshot: &SlotSnapshot) -> u64 {
        snapshot.bytes()
    }

    fn save_snapshot(&mut self, snapshot: &SlotSnapshot) -> Result<Vec<u8>, EngineError> {
        Ok(snapshot.to_bytes())
    }

    fn load_snapshot(&mut self, bytes: &[u8]) -> Result<SlotSnapshot, EngineError> {
        SlotSnapshot::from_bytes(self.state().layout(), bytes)
    }

    fn page_bytes(&self) -> u64 {
        self.state().page_bytes()
    }

    fn save_page(&mut self, page: u32) -> Result<Vec<u8>, EngineError> {
        Ok(self.state().save_page(page))
    }

    fn load_page(&mut self, page: u32, bytes: &[u8]) -> Result<(), EngineError> {
        self.state_mut().load_page(page, bytes)
    }

    fn begin_round(&mut self, meta: StepMeta) -> Result<(), EngineError> {
        match &mut self.state {
            Some(s) => s.begin(meta),
            None => Err(EngineError::Round("a round before allocate".into())),
        }
    }

    fn end_round(&mut self) -> Outcome {
        self.state_mut().end()
    }

    fn commit(&mut self, slot: SlotId, part: Part, n: usize) -> Result<(), EngineError> {
        let mut state =
            self.state.take().ok_or_else(|| EngineError::Round("a commit before allocate".into()))?;
        let dims = state.layout().gdn.clone();
        let done = state.commit(slot, part, n, |id, s, record, n| {
            self.replay(dims[id], self.gdn_layers[id], s, record, n);
        });
        self.state = Some(state);
        done
    }

    fn read(&mut self, x: &Mat) -> Vec<f32> {
        x.data.clone()
    }

    fn write(&mut self, rows: usize, width: usize, values: &[f32]) -> Mat {
        Mat::of(rows, width, values.to_vec())
    }

    fn read_routing(&mut self, routing: &Routes) -> Routes {
        routing.clone()
    }

    fn read_selection(&mut self, selection: &Blocks) -> Blocks {
        selection.clone()
    }

    fn take_rows(&mut self, x: &Mat, rows: &[usize]) -> Mat {
        Mat::of(rows.len(), x.width, rows.iter().flat_map(|r| x.row(*r)).copied().collect())
    }

    fn repeat(&mut self, x: &Mat, n: usize) -> Mat {
        let data = (0..x.rows).flat_map(|t| std::iter::repeat_n(x.row(t), n)).flatten().copied().collect();
        Mat::of(x.rows, n * x.width, data)
    }

    fn concat(&mut self, x: &Mat, y: &Mat) -> Mat {
        let data = (0..x.rows).flat_map(|t| x.row(t).iter().chain(y.row(t))).copied().collect();
        Mat::of(x.rows, x.width + y.width, data)
    }

    fn copy(&mut self, x: &Mat) -> Mat {
        x.clone()
    }

    fn embed(&mut self, table: &Weight, tokens: Tokens, at: At<'_>) -> Mat {
        self.embedding(table, tokens, at)
    }

    fn norm(&mut self, x: &Mat, w: &Weight, spec: NormSpec, at: At<'_>) -> Mat {
        self.rms_norm(x, w, spec, at)
    }

    fn linear(&mut self, x: &Mat, w: &Weight, out: Boundary, at: At<'_>) -> Mat {
        self.linear_op(x, w, out, at)
    }

    fn add(&mut self, x: &mut Mat, y: &Mat, at: At<'_>) {
        self.residual_add(x, y, at);
    }

    fn gate(&mut self, o: &Mat, gate: &Mat, at: At<'_>) -> Mat {
        self.sigmoid_gate(o, gate, at)
    }

    fn swiglu(&mut self, gate: &Mat, up: &Mat, at: At<'_>) -> Mat {
        self.silu_times(gate, up, at)
    }

    fn hyper_down(&mut self, normed: &Mat, w: &Weight, streams: usize, at: At<'_>) -> Mat {
        self.mixer_down(normed, w, streams, at)
    }

    fn hyper_up(&mut self, normed: &Mat, m: &Mat, w: &Weight, streams: usize, at: At<'_>) -> Mat {
        self.mixer_up(normed, m, w, streams, at)
    }

    fn hyper_factor(&mut self, normed: &Mat, w: &Weight, streams: usize, at: At<'_>) -> Mat {
        self.mixer_factor(normed, w, streams, at)
    }

    fn hyper_inject(&mut self, r: &mut Mat, y: &Mat, factor: &Mat, at: At<'_>) {
        self.mixer_inject(r, y, factor, at);
    }

    fn ngram(&mut self, tickets: &[NgramTicket], at: At<'_>) -> Mat {
        self.table_rows(tickets, at)
    }

    fn ple_gate(&mut self, key: &Mat, query: &Mat, value: &Mat, streams: usize, at: At<'_>) -> Mat {
        self.gated_value(key, query, value, streams, at)
    }

    fn ple_conv(
        &mut self,
        id: StateId,
        r: &mut Mat,
        v: &Mat,
        c: &Mat,
        w: &Weight,
        dilation: usize,
        at: At<'_>,
    ) {
        self.ple_convolution(id, r, v, c, w, dilation, at);
    }

    fn gdn_conv(&mut self, id: StateId, x: &Mat, w: &Weight, at: At<'_>) -> Mat {
        self.conv(id, x, w, at)
    }

    fn gdn(
        &mut self,
        id: StateId,
        u: &Mat,
        a: &Mat,
        b: &Mat,
        a_log: &Weight,
        dt_bias: &Weight,
        at: At<'_>,
    ) -> Mat {
        self.gdn_layers[id] = at.site.layer;
        self.delta_rule(id, u, a, b, a_log, dt_bias, at)
    }

    fn gdn_gate(&mut self, o: &Mat, z: &Mat, w: &Weight, kind: GateKind, eps: f64, at: At<'_>) -> Mat {
        self.gated_norm(o, z, w, kind, eps, at)
    }

    fn norm_rope(&mut self, x: &Mat, w: &Weight, rope: &RopeTable, eps: f64, at: At<'_>) -> Mat {
        self.head_norm_rope(x, w, rope, eps, at)
    }

    fn kv_append(&mut self, id: StateId, k: &Mat, v: &Mat) {
        self.state_mut().kv_append(id, &k.data, &v.data);
    }

    fn attention(&mut self, id: StateId, q: &Mat, selection: Option<&Blocks>, at: At<'_>) -> Mat {
        self.attend(id, q, selection, at)
    }

    fn index_append(&mut self, id: StateId, raw: &Mat, w: &Weight, rope: &RopeTable, eps: f64, at: At<'_>) {
        self.append_index(id, raw, w, rope, eps, at);
    }

    fn index_select(&mut self, id: StateId, q: &Mat, at: At<'_>) -> Blocks {
        self.select_blocks(id, q, at)
    }

    fn route(&mut self, logits: &Mat, top_k: usize, at: At<'_>) -> Routes {
        self.choose_experts(logits, top_k, at)
    }

    fn experts(
        &mut self,
        x: &Mat,
        routing: &Routes,
        store: &experts::Experts,
        shared: &Mat,
        shared_logit: &Mat,
        at: At<'_>,
    ) -> Mat {
        self.expert_layer(x, routing, store, shared, shared_logit, at)
    }
}
