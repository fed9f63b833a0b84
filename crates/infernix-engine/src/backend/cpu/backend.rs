//! [`Backend`] on the CPU: every operation of the model as calls of the kernels around it.

use super::attention::{self, Keys, Prepared, Query, Scratch, Sums};
use super::buf::CpuBuf;
use super::cells::Cells;
use super::delta::{self, Token};
use super::elementwise as ew;
use super::experts::Layer;
use super::isa::Isa;
use super::linear::{Out, Packed, product};
use super::pool::{Pool, default_threads};
use super::weights::{CpuExperts, CpuWeight};
use crate::backend::*;
use crate::error::EngineError;
use crate::ngram::NgramTicket;
use crate::state::{ConvKind, GdnLane, HostState, SlotSnapshot, StateLayout};
use std::sync::Arc;

/// Values of an elementwise operation below which one thread does it all: some microseconds of work.
const SMALL: usize = 32 << 10;

/// Bytes of recurrent state of a sequence above which new states are written past the caches.
const STREAMED: usize = 8 << 20;

/// How the CPU backend runs.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuOptions {
    /// Threads of decode rounds; 0 = physical cores allowed by affinity and cgroup quota.
    pub threads: usize,
    /// Threads of prefill rounds; 0 = as `threads`.
    pub threads_batch: usize,
    /// Instruction set; the best by default. One the processor lacks is replaced by the best.
    pub isa: Option<Isa>,
}

/// cos and sin of each pair of every row.
type Angles = Arc<Vec<(f32, f32)>>;
/// Experts and weights by row, rank order.
pub type Routes = Vec<Vec<(u32, f32)>>;
/// Selected blocks by row.
pub type Blocks = Vec<Option<Vec<u32>>>;

/// The CPU backend.
pub struct CpuBackend {
    isa: Isa,
    decode: Arc<Pool>,
    prefill: Arc<Pool>,
    prefilling: bool,
    state: Option<HostState>,
    packed: Packed,
    /// Whether a sequence's recurrent states are more than caches keep from one token to the next.
    stream: bool,
    /// cos and sin of every row of the round, by rotary table.
    angles: Vec<(*const RopeTable, Angles)>,
}

// SAFETY: the pointers in `angles` are compared, never followed.
unsafe impl Send for CpuBackend {}

impl CpuBackend {
    /// A backend without state; [`Backend::allocate`] adds it.
    pub fn new(options: CpuOptions) -> Self {
        let threads = if options.threads == 0 { default_threads() } else { options.threads };
        let decode = Arc::new(Pool::new(threads));
        let prefill = match options.threads_batch {
            0 => decode.clone(),
            n if n == threads => decode.clone(),
            n => Arc::new(Pool::new(n)),
        };
        let isa = options.isa.filter(|i| i.available()).unwrap_or_else(Isa::detect);
        CpuBackend {
            isa,
            decode,
            prefill,
            prefilling: true,
            state: None,
            packed: Packed::default(),
            stream: false,
            angles: Vec::new(),
        }
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Threads of decode and of prefill rounds.
    pub fn threads(&self) -> (usize, usize) {
        (self.decode.threads(), self.prefill.threads())
    }

    fn pool(&self) -> &Pool {
        if self.prefilling { &self.prefill } else { &self.decode }
    }

    fn state(&self) -> &HostState {
        self.state.as_ref().expect("rounds follow allocate")
    }

    fn state_mut(&mut self) -> &mut HostState {
        self.state.as_mut().expect("rounds follow allocate")
    }

    /// Calls `f(row, out)` for every row of a new matrix.
    fn map_rows(&self, rows: usize, width: usize, f: impl Fn(usize, &mut [u16]) + Sync) -> CpuBuf {
        let mut out = vec![0u16; rows * width];
        self.each_row(&mut out, width, f);
        CpuBuf::bf16(rows, width, out)
    }

    fn each_row<T: Send>(&self, data: &mut [T], width: usize, f: impl Fn(usize, &mut [T]) + Sync) {
        let rows = data.len() / width.max(1);
        let chunk = if data.len() < SMALL { rows } else { self.pool().share(rows, SMALL / 8 / width.max(1)) };
        let cells = Cells::new(data);
        self.pool().chunks(rows, chunk, |r| {
            for t in r {
                // SAFETY: each row belongs to one task.
                f(t, unsafe { cells.piece(t * width..(t + 1) * width) });
            }
        });
    }

    /// `x W^T` in FP32, `[x.rows * groups, N]`.
    fn products(&mut self, x: &CpuBuf, w: &CpuWeight) -> Vec<f32> {
        let columns = x.rows * (x.width / w.k().max(1));
        let mut y = vec![0f32; columns * w.n()];
        self.product_into(x, w, Out::f32(&mut y, columns, w.n()));
        y
    }

    fn product_into(&mut self, x: &CpuBuf, w: &CpuWeight, out: Out<'_>) {
        let k = w.k();
        let act = x.act();
        if k == 0 {
            return;
        }
        w.for_products();
        let act = match &w.columns {
            None => act,
            // Columns keep another order: the activations follow it.
            Some(columns) => {
                let rows = act.chunks_exact(k);
                rows.flat_map(|x| columns.iter().map(|c| x[*c as usize])).collect::<Vec<_>>().into()
            }
        };
        let mut packed = std::mem::take(&mut self.packed);
        if w.spec.activation == Activation::A16 {
            packed.pack(&act, act.len() / k, k, k);
            product(self.pool(), self.isa, &w.rows(), &mut packed, out);
        } else {
            super::narrow::product(self.pool(), self.isa, w, &act, &mut packed, out);
        }
        self.packed = packed;
    }

    /// cos and sin of the round's rows, `[rows, pairs]`.
    fn angles(&mut self, rope: &RopeTable) -> Arc<Vec<(f32, f32)>> {
        if let Some((_, a)) = self.angles.iter().find(|(p, _)| std::ptr::eq(*p, rope)) {
            return a.clone();
        }
        let meta = self.state().meta();
        let a: Vec<(f32, f32)> =
            meta.each_row().flat_map(|(l, c)| turn(rope, meta.lanes[l].positions[c])).collect();
        let a = Arc::new(a);
        self.angles.push((rope, a.clone()));
        a
    }

    /// Windows of all lanes: (first row, columns, window).
    fn windows(&mut self, kind: ConvKind, id: StateId, x: &CpuBuf) -> Vec<(usize, Vec<f32>)> {
        let wide = x.wide(self.isa);
        let lanes = self.state().meta().lanes.len();
        (0..lanes)
            .map(|l| {
                let r = self.state().lane_rows(l);
                let columns = &wide[r.start * x.width..r.end * x.width];
                (r.start, self.state_mut().conv_window(kind, id, l, columns))
            })
            .collect()
    }
}

/// cos and sin of each pair at a position, formed in FP64 and rounded to FP32.
fn turn(rope: &RopeTable, position: [u32; 3]) -> impl Iterator<Item = (f32, f32)> + '_ {
    rope.freq.iter().zip(&rope.axis).map(move |(f, axis)| {
        let a = f64::from(position[usize::from(*axis)]) * f;
        ((a.cos() * rope.scale) as f32, (a.sin() * rope.scale) as f32)
    })
}

/// One lane and head of a delta-rule call.
struct HeadTask<'a> {
    s: Cells<'a, f32>,
    from: Option<&'a [f32]>,
    rows: std::ops::Range<usize>,
}

/// Advances all heads of all lanes; `u [T, C]`, `g, beta [T, nv]`, `o [T, nv * dv]` if wanted.
#[expect(clippy::too_many_arguments, reason = "the operands of one recurrence")]
fn advance_all(
    pool: &Pool,
    isa: Isa,
    dims: GdnDims,
    lanes: &[HeadTask<'_>],
    u: &[f32],
    g: &[f32],
    beta: &[f32],
    stream: bool,
    o: Option<&Cells<'_, u16>>,
) {
    let (nv, dk, dv, c) = (dims.value_heads, dims.key_dim, dims.value_dim, dims.channels());
    let ratio = nv / dims.key_heads;
    pool.run(lanes.len() * nv, |task| {
        let (lane, j) = (&lanes[task / nv], task % nv);
        // SAFETY: each head of each lane belongs to one task.
        let s = unsafe { lane.s.piece(j * dk * dv..(j + 1) * dk * dv) };
        let mut from = lane.from.map(|f| &f[j * dk * dv..(j + 1) * dk * dv]);
        for t in lane.rows.clone() {
            let u = &u[t * c..(t + 1) * c];
            let (q, rest) = u.split_at(dims.key_heads * dk);
            let (k, v) = rest.split_at(dims.key_heads * dk);
            let i = j / ratio * dk;
            let token = Token {
                q: &q[i..i + dk],
                k: &k[i..i + dk],
                v: &v[j * dv..(j + 1) * dv],
                g: g[t * nv + j],
                beta: beta[t * nv + j],
            };
            let at = (t * nv + j) * dv;
            // SAFETY: as above, for the outputs of this head.
            let o = o.map(|o| unsafe { o.piece(at..at + dv) });
            delta::advance(isa, from.take(), s, stream, &token, o);
        }
    });
}

impl Backend for CpuBackend {
    type Buf = CpuBuf;
    type Weight = CpuWeight;
    type Experts = CpuExperts;
    type Routing = Routes;
    type Selection = Blocks;
    type Snapshot = SlotSnapshot;

    fn name(&self) -> &'static str {
        "cpu"
    }

    fn weight(&mut self, spec: &WeightSpec, data: WeightData) -> Result<CpuWeight, EngineError> {
        CpuWeight::new(spec, data)
    }

    fn gathered(
        &mut self,
        spec: &WeightSpec,
        data: WeightData,
        columns: Vec<u32>,
    ) -> Result<CpuWeight, EngineError> {
        let mut weight = CpuWeight::new(spec, data)?;
        weight.columns = Some(columns);
        Ok(weight)
    }

    fn experts_weight(&mut self, spec: &ExpertSpec, data: ExpertData) -> Result<CpuExperts, EngineError> {
        CpuExperts::new(spec, data)
    }

    fn allocate(&mut self, layout: &StateLayout) -> Result<(), EngineError> {
        for d in &layout.gdn {
            if d.key_dim > delta::MAX_HEAD || d.value_dim > delta::MAX_HEAD {
                return Err(EngineError::Unsupported(format!(
                    "delta rule heads of {} x {} values, at most {} each on the CPU backend",
                    d.key_dim,
                    d.value_dim,
                    delta::MAX_HEAD
                )));
            }
        }
        let state = layout.gdn.iter().map(|d| 4 * d.value_heads * d.key_dim * d.value_dim).sum::<usize>();
        self.stream = state > STREAMED;
        self.state = Some(HostState::new(layout, false)?);
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
        self.angles.clear();
        self.prefilling = meta.kind == CallKind::Prefill;
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
        let (pool, isa) = (self.decode.clone(), self.isa);
        let done = state.commit(slot, part, n, |id, s, record, n| {
            let lane = [HeadTask { s: Cells::new(s), from: None, rows: 0..n }];
            advance_all(&pool, isa, dims[id], &lane, &record.u, &record.g, &record.beta, false, None);
        });
        self.state = Some(state);
        done
    }

    fn read(&mut self, x: &CpuBuf) -> Vec<f32> {
        x.wide(self.isa).into_owned()
    }

    fn write(&mut self, rows: usize, width: usize, values: &[f32]) -> CpuBuf {
        CpuBuf::of(rows, width, values)
    }

    fn read_routing(&mut self, routing: &Routes) -> Routes {
        routing.clone()
    }

    fn read_selection(&mut self, selection: &Blocks) -> Blocks {
        selection.clone()
    }

    fn take_rows(&mut self, x: &CpuBuf, rows: &[usize]) -> CpuBuf {
        let w = x.width;
        x.gather(rows.len(), w, |r| vec![(false, rows[r] * w, w)], x)
    }

    fn repeat(&mut self, x: &CpuBuf, n: usize) -> CpuBuf {
        let w = x.width;
        x.gather(x.rows, n * w, |r| vec![(false, r * w, w); n], x)
    }

    fn concat(&mut self, x: &CpuBuf, y: &CpuBuf) -> CpuBuf {
        let (a, b) = (x.width, y.width);
        x.gather(x.rows, a + b, |r| vec![(false, r * a, a), (true, r * b, b)], y)
    }

    fn copy(&mut self, x: &CpuBuf) -> CpuBuf {
        x.clone()
    }

    fn embed(&mut self, table: &CpuWeight, tokens: Tokens, _: At<'_>) -> CpuBuf {
        let lanes = &self.state().meta().lanes;
        let ids: Vec<u32> = lanes
            .iter()
            .flat_map(|l| if tokens == Tokens::Next { &l.next_ids } else { &l.ids })
            .copied()
            .collect();
        let width = table.k();
        self.map_rows(ids.len(), width, |t, out| {
            let mut row = vec![0f32; width];
            // Words were checked when the weight was taken; an id outside the table reads its last row.
            if table.decode_row((ids[t] as usize).min(table.n().saturating_sub(1)), &mut row).is_ok() {
                ew::narrow(self.isa, &row, out);
            }
        })
    }

    fn norm(&mut self, x: &CpuBuf, w: &CpuWeight, spec: NormSpec, _: At<'_>) -> CpuBuf {
        let weights = if spec.zero_centred { w.plus_one() } else { w.values() };
        let d = x.width / spec.groups;
        let act = x.act();
        self.map_rows(x.rows, x.width, |t, out| {
            let row = &act[t * x.width..(t + 1) * x.width];
            for (g, (x, out)) in row.chunks_exact(d).zip(out.chunks_exact_mut(d)).enumerate() {
                let at = g * d % weights.len();
                ew::rms_norm(self.isa, x, &weights[at..at + d], spec.eps as f32, out);
            }
        })
    }

    fn linear(&mut self, x: &CpuBuf, w: &CpuWeight, out: Boundary, _: At<'_>) -> CpuBuf {
        let columns = x.rows * (x.width / w.k().max(1));
        let width = columns / x.rows.max(1) * w.n();
        if out == Boundary::F32 {
            let y = self.products(x, w);
            return CpuBuf::f32(x.rows, width, y);
        }
        let mut y = vec![0u16; columns * w.n()];
        self.product_into(x, w, Out::bf16(&mut y, columns, w.n()));
        CpuBuf::bf16(x.rows, width, y)
    }

    fn add(&mut self, x: &mut CpuBuf, y: &CpuBuf, _: At<'_>) {
        let (width, y_width, act) = (x.width, y.width, y.act());
        self.each_row(x.act_mut(), width, |t, row| {
            for x in row.chunks_exact_mut(y_width) {
                ew::add(self.isa, x, &act[t * y_width..(t + 1) * y_width]);
            }
        });
    }

    fn gate(&mut self, o: &CpuBuf, gate: &CpuBuf, _: At<'_>) -> CpuBuf {
        let (x, g, w) = (o.act(), gate.act(), o.width);
        self.map_rows(o.rows, w, |t, out| {
            ew::gate(self.isa, &x[t * w..(t + 1) * w], &g[t * w..(t + 1) * w], out)
        })
    }

    fn swiglu(&mut self, gate: &CpuBuf, up: &CpuBuf, _: At<'_>) -> CpuBuf {
        let (g, u, w) = (gate.act(), up.act(), gate.width);
        self.map_rows(gate.rows, w, |t, out| {
            ew::swiglu(self.isa, &g[t * w..(t + 1) * w], &u[t * w..(t + 1) * w], out)
        })
    }

    fn hyper_down(&mut self, normed: &CpuBuf, w: &CpuWeight, streams: usize, _: At<'_>) -> CpuBuf {
        let (y, n) = (self.products(normed, w), w.n());
        self.map_rows(normed.rows, n, |t, out| {
            ew::silu_over(self.isa, &y[t * n..(t + 1) * n], streams as f32, out)
        })
    }

    fn hyper_up(&mut self, normed: &CpuBuf, m: &CpuBuf, w: &CpuWeight, streams: usize, _: At<'_>) -> CpuBuf {
        let (v, x, wide) = (self.products(m, w), normed.act(), normed.width);
        let isa = self.isa;
        self.map_rows(normed.rows, wide / streams, |t, out| {
            ew::mix_streams(isa, &v[t * wide..(t + 1) * wide], &x[t * wide..(t + 1) * wide], out);
        })
    }

    fn hyper_factor(&mut self, normed: &CpuBuf, w: &CpuWeight, streams: usize, _: At<'_>) -> CpuBuf {
        let mut y = self.products(normed, w);
        ew::twice_sigmoid_over(self.isa, &mut y, streams as f32);
        CpuBuf::f32(normed.rows, w.n(), y)
    }

    fn hyper_inject(&mut self, r: &mut CpuBuf, y: &CpuBuf, factor: &CpuBuf, _: At<'_>) {
        let (width, h, n) = (r.width, y.width, factor.width);
        let (y, f) = (y.act(), factor.wide(self.isa));
        self.each_row(r.act_mut(), width, |t, row| {
            ew::inject(self.isa, row, &y[t * h..(t + 1) * h], &f[t * n..(t + 1) * n]);
        });
    }

    fn ngram(&mut self, tickets: &[NgramTicket], at: At<'_>) -> CpuBuf {
        let width = tickets.iter().map(NgramTicket::values).sum::<usize>() / at.rows.len().max(1);
        let mut out = vec![0u16; at.rows.len() * width];
        for (l, ticket) in tickets.iter().enumerate() {
            let r = self.state().lane_rows(l);
            let lane = &mut out[r.start * width..r.end * width];
            match ticket.wait() {
                Ok(rows) if rows.len() == lane.len() => ew::narrow(self.isa, &rows, lane),
                // Zeros keep the shapes; the lane's results are dropped.
                Ok(rows) => self
                    .state_mut()
                    .fail(l, format!("{} table values, {} needed", rows.len(), r.len() * width)),
                Err(e) => self.state_mut().fail(l, e.to_string()),
            }
        }
        CpuBuf::bf16(at.rows.len(), width, out)
    }

    fn ple_gate(&mut self, key: &CpuBuf, query: &CpuBuf, value: &CpuBuf, _: usize, _: At<'_>) -> CpuBuf {
        let (k, q, v, h) = (key.act(), query.act(), value.act(), value.width);
        self.map_rows(key.rows, key.width, |t, out| {
            for (s, out) in out.chunks_exact_mut(h).enumerate() {
                let at = t * key.width + s * h..t * key.width + (s + 1) * h;
                ew::ple_gate(self.isa, &k[at.clone()], &q[at], &v[t * h..(t + 1) * h], out);
            }
        })
    }

    fn ple_conv(
        &mut self,
        id: StateId,
        r: &mut CpuBuf,
        v: &CpuBuf,
        c: &CpuBuf,
        w: &CpuWeight,
        dilation: usize,
        _: At<'_>,
    ) {
        let windows = self.windows(ConvKind::Ple, id, c);
        let (width, v, taps) = (c.width, v.act(), w.transposed());
        let skip = (w.k() - 1) * dilation;
        let data = r.act_mut();
        for (first, window) in &windows {
            let n = window.len() / width - skip;
            self.each_row(&mut data[first * width..(first + n) * width], width, |t, row| {
                let v = &v[(first + t) * width..(first + t + 1) * width];
                ew::ple_conv(self.isa, window, taps, t, dilation, v, row);
            });
        }
    }

    fn gdn_conv(&mut self, id: StateId, x: &CpuBuf, w: &CpuWeight, _: At<'_>) -> CpuBuf {
        let windows = self.windows(ConvKind::Gdn, id, x);
        let (width, taps) = (x.width, w.transposed());
        let mut out = vec![0u16; x.rows * width];
        for (first, window) in &windows {
            let n = window.len() / width + 1 - w.k();
            self.each_row(&mut out[first * width..(first + n) * width], width, |t, row| {
                ew::conv_silu(self.isa, window, taps, t, row);
            });
        }
        CpuBuf::bf16(x.rows, width, out)
    }

    fn gdn(
        &mut self,
        id: StateId,
        u: &CpuBuf,
        a: &CpuBuf,
        b: &CpuBuf,
        a_log: &CpuWeight,
        dt_bias: &CpuWeight,
        at: At<'_>,
    ) -> CpuBuf {
        let dims = self.state().layout().gdn[id];
        let nv = dims.value_heads;
        let wide = u.wide(self.isa);
        let (a, b) = (a.act(), b.act());
        let (a_log, dt_bias) = (a_log.values(), dt_bias.values());
        let (mut g, mut beta) = (vec![0f32; u.rows * nv], vec![0f32; u.rows * nv]);
        for i in 0..u.rows * nv {
            (g[i], beta[i]) = delta::gates(a[i], b[i], a_log[i % nv], dt_bias[i % nv]);
        }
        let mut out = vec![0u16; u.rows * nv * dims.value_dim];
        let (isa, pool) =
            (self.isa, if self.prefilling { self.prefill.clone() } else { self.decode.clone() });
        let stream = self.stream;
        let state = self.state_mut();
        state.gdn_record(id, at.rows, &wide, &g, &beta);
        let lanes: Vec<HeadTask<'_>> = state
            .gdn_lanes(id)
            .into_iter()
            .map(|GdnLane { rows, s, from }| HeadTask { s: Cells::new(s), from, rows })
            .collect();
        let cells = Cells::new(&mut out);
        // One token's new states are read again only after all weights have been.
        let stream = stream && lanes.iter().all(|l| l.rows.len() == 1);
        advance_all(&pool, isa, dims, &lanes, &wide, &g, &beta, stream, Some(&cells));
        CpuBuf::bf16(u.rows, nv * dims.value_dim, out)
    }

    fn gdn_gate(
        &mut self,
        o: &CpuBuf,
        z: &CpuBuf,
        w: &CpuWeight,
        kind: GateKind,
        eps: f64,
        _: At<'_>,
    ) -> CpuBuf {
        let (x, z, w, width) = (o.act(), z.act(), w.values(), o.width);
        let d = w.len();
        self.map_rows(o.rows, width, |t, out| {
            for (h, out) in out.chunks_exact_mut(d).enumerate() {
                let at = t * width + h * d..t * width + (h + 1) * d;
                ew::gated_norm(self.isa, &x[at.clone()], &z[at], w, eps as f32, kind == GateKind::Silu, out);
            }
        })
    }

    fn norm_rope(&mut self, x: &CpuBuf, w: &CpuWeight, rope: &RopeTable, eps: f64, _: At<'_>) -> CpuBuf {
        let angles = self.angles(rope);
        let (act, w, width, pairs) = (x.act(), w.plus_one(), x.width, rope.freq.len());
        let d = w.len();
        self.map_rows(x.rows, width, |t, out| {
            let turn = &angles[t * pairs..(t + 1) * pairs];
            for (h, out) in out.chunks_exact_mut(d).enumerate() {
                let at = t * width + h * d;
                ew::norm_rope(self.isa, &act[at..at + d], w, eps as f32, turn, out);
            }
        })
    }

    fn kv_append(&mut self, id: StateId, k: &CpuBuf, v: &CpuBuf) {
        let (k, v) = (k.wide(self.isa), v.wide(self.isa));
        self.state_mut().kv_append(id, &k, &v);
    }

    fn attention(&mut self, id: StateId, q: &CpuBuf, selection: Option<&Blocks>, _: At<'_>) -> CpuBuf {
        let state = self.state();
        let layout = &state.layout().attention[id];
        let (d, kv_heads) = (layout.head_dim, layout.kv_heads);
        let ratio = layout.index.map_or(1, |i| i.ratio);
        let group = q.width / d / kv_heads;
        let (isa, codec, act) = (self.isa, state.codec(), q.act());
        // Rows that share a task; some 64 columns make a full product of scores.
        let rows_per_task = (64 / group.max(1)).max(1);
        // (lane, KV head, rows of the call, sequence indices).
        let mut units = Vec::new();
        for (l, lane) in state.meta().lanes.iter().enumerate() {
            let rows = state.lane_rows(l);
            for first in rows.clone().step_by(rows_per_task) {
                let r = first..(first + rows_per_task).min(rows.end);
                let last: Vec<usize> = r.clone().map(|t| lane.start + t - rows.start).collect();
                units.extend((0..kv_heads).map(|h| (l, h, r.clone(), last.clone())));
            }
        }
        // Long contexts split by segments where there are fewer units than threads want.
        let segments = |last: &[usize]| last.iter().max().map_or(0, |l| l / attention::SEGMENT + 1);
        let split = units.len() < 4 * self.pool().threads();
        let tasks: Vec<(usize, usize)> = units
            .iter()
            .enumerate()
            .flat_map(|(u, (.., last))| (0..if split { segments(last) } else { 1 }).map(move |s| (u, s)))
            .collect();
        let mut sums: Vec<Option<Sums>> = tasks.iter().map(|_| None).collect();
        let cells = Cells::new(&mut sums);
        self.pool().run(tasks.len(), |i| {
            let (u, s) = tasks[i];
            let (l, h, rows, last) = &units[u];
            let queries: Vec<u16> = rows
                .clone()
                .flat_map(|t| &act[t * q.width + h * group * d..t * q.width + (h + 1) * group * d])
                .copied()
                .collect();
            let keys: Vec<Keys<'_>> = rows
                .clone()
                .map(|t| match selection.and_then(|s| s[t].as_ref()) {
                    Some(blocks) => Keys::Blocks(blocks, ratio),
                    None => Keys::Prefix,
                })
                .collect();
            let query = Query { last, keys: &keys, group, d, q: &queries };
            let prepared = Prepared::new(isa, codec, &query);
            let pages = &state.meta().lanes[*l].pages;
            let mut scratch = Scratch::default();
            let mut part = |s: usize| {
                attention::segment(
                    isa,
                    codec,
                    &query,
                    &prepared,
                    s,
                    |t| state.kv_tile(id, pages[t], *h),
                    &mut scratch,
                )
            };
            let mut all = part(s);
            if !split {
                for s in 1..segments(last) {
                    all.join(isa, &part(s));
                }
            }
            // SAFETY: each task has its own place.
            unsafe { cells.piece(i..i + 1)[0] = Some(all) };
        });
        let mut out = vec![0u16; q.rows * q.width];
        let mut done: Option<(usize, Sums)> = None;
        let mut finish = |u: usize, sums: &Sums| {
            let (_, h, rows, _) = &units[u];
            for (r, t) in rows.clone().enumerate() {
                for c in 0..group {
                    let at = t * q.width + (h * group + c) * d;
                    sums.finish(r * group + c, &mut out[at..at + d]);
                }
            }
        };
        for ((u, _), s) in tasks.iter().zip(sums) {
            let Some(s) = s else { continue };
            match &mut done {
                Some((same, all)) if same == u => all.join(isa, &s),
                _ => {
                    if let Some((u, all)) = done.take() {
                        finish(u, &all);
                    }
                    done = Some((*u, s));
                }
            }
        }
        if let Some((u, all)) = done {
            finish(u, &all);
        }
        CpuBuf::bf16(q.rows, q.width, out)
    }

    fn index_append(
        &mut self,
        id: StateId,
        raw: &CpuBuf,
        w: &CpuWeight,
        rope: &RopeTable,
        eps: f64,
        _: At<'_>,
    ) {
        let (wide, weights, isa) = (raw.wide(self.isa), w.plus_one(), self.isa);
        for l in 0..self.state().meta().lanes.len() {
            let rows = self.state().lane_rows(l);
            let pool = |block: &[f32], position: [u32; 3], _: usize| {
                let angles: Vec<(f32, f32)> = turn(rope, position).collect();
                let mut key = vec![0f32; weights.len()];
                ew::pooled_key(isa, block, weights, eps as f32, &angles, &mut key);
                key
            };
            let columns = &wide[rows.start * raw.width..rows.end * raw.width];
            if let Err(e) = self.state_mut().index_append(id, l, columns, pool) {
                self.state_mut().fail(l, e.to_string());
            }
        }
    }

    fn index_select(&mut self, id: StateId, q: &CpuBuf, _: At<'_>) -> Blocks {
        let state = self.state();
        let Some(dims) = state.layout().attention[id].index else { return vec![None; q.rows] };
        let meta = state.meta();
        let rows: Vec<(usize, usize)> = meta.each_row().map(|(l, c)| (l, meta.lanes[l].start + c)).collect();
        let keep = dims.budget / dims.ratio;
        let scale = 1.0 / (dims.dim as f32).sqrt();
        let wide = q.wide(self.isa);
        let mut out: Blocks = vec![None; q.rows];
        let cells = Cells::new(&mut out);
        self.pool().run(rows.len(), |t| {
            let (lane, last) = rows[t];
            let n = (last + 1) / dims.ratio;
            if n <= keep {
                return;
            }
            let (committed, recorded) = state.index_pooled(id, lane);
            let mut scores = vec![0f32; n];
            let first = n.min(committed.len() / dims.dim);
            let query = &wide[t * q.width..(t + 1) * q.width];
            attention::index_scores(self.isa, query, committed, dims.dim, scale, &mut scores[..first]);
            attention::index_scores(self.isa, query, recorded, dims.dim, scale, &mut scores[first..]);
            // SAFETY: each row belongs to one task.
            unsafe { cells.piece(t..t + 1)[0] = Some(attention::best(&scores, keep)) };
        });
        out
    }

    fn route(&mut self, logits: &CpuBuf, top_k: usize, _: At<'_>) -> Routes {
        let wide = logits.wide(self.isa);
        wide.chunks_exact(logits.width).map(|l| attention::route(l, top_k)).collect()
    }

    fn experts(
        &mut self,
        x: &CpuBuf,
        routing: &Routes,
        store: &CpuExperts,
        shared: &CpuBuf,
        shared_logit: &CpuBuf,
        _: At<'_>,
    ) -> CpuBuf {
        let act = x.act();
        let layer = Layer { pool: self.pool(), isa: self.isa, store, routing, x: &act };
        let mut out = vec![0u16; x.rows * x.width];
        layer.run(&shared.act(), &shared_logit.wide(self.isa), &mut out);
        CpuBuf::bf16(x.rows, x.width, out)
    }
}
