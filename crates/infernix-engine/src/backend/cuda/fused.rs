//! Blocks of decode rounds in as few launches as their dependences allow: matrices that share an input are one launch, what makes an
//! input or follows a sum is done where it is read. Every value has the bits of the operations one by one.

use super::context::{Cuda, CudaRouting};
use super::experts::Store;
use super::vram::{CudaBuf, fault};
use super::weights::CudaWeight;
use crate::backend::{
    At, AttentionWeights, Backend, Boundary, GateKind, GdnWeights, MlpWeights, MoeWeights, NormSpec, Op,
    Site, Trace,
};
use crate::error::EngineError;
use crate::state::KvFormat;
use infernix_cuda::kernels::experts::{ExpertTable, Help, Jobs, Routed, Router, act_bytes};
use infernix_cuda::kernels::group::{Experts, GroupShape, Input, MOST_COLUMNS, Part};
use infernix_cuda::kernels::hyper::Injection;
use infernix_cuda::kernels::linear::Out;
use infernix_cuda::kernels::prep::{Heads, IndexKeys};
use infernix_cuda::kernels::zipf::ZipfRoute;

/// Most values of SwiGLU and the widest gated norm that the product which follows makes for itself. Every block of it makes all of an
/// input: 17,408 values of SwiGLU took 2 to 8 us of a launch and the gated norm of 6,144 took 4 on an H200, launches of their own take 2.
const SWIGLU_VALUES: usize = 8 << 10;
const WIDEST_GATED: usize = 2048;

/// What is added to the residual by the launch that reads it next: `to` is the residual from then on.
pub(super) struct Pending {
    from: CudaBuf,
    y: CudaBuf,
    /// Of each stream; none where `y` itself is added.
    factor: Option<CudaBuf>,
    to: u64,
}

fn out_of(b: &CudaBuf) -> Out {
    if b.f32 { Out::F32 } else { Out::Bf16 }
}

fn view(b: &CudaBuf) -> CudaBuf {
    b.rows_from(0, b.rows)
}

impl Cuda {
    /// Whether blocks of this round may be fused.
    fn fuses(&self, rows: usize) -> bool {
        self.is_decode() && rows <= MOST_COLUMNS
    }

    /// Several products of one input in one launch; false if the kernels do not take it.
    fn grouped(
        &mut self,
        x: Input,
        rows: usize,
        products: &[(&CudaWeight, &CudaBuf)],
        experts: Option<Experts>,
    ) -> Result<bool, EngineError> {
        let mut parts = Vec::new();
        for (w, y) in products {
            // Blocks of a GGUF file and columns in another order have kernels of their own.
            if w.parts.is_empty() || w.columns.is_some() {
                return Ok(false);
            }
            let mut row = 0;
            for part in &w.parts {
                let to = y.ptr + (row * if y.f32 { 4 } else { 2 }) as u64;
                parts.push(Part { w: part, y: to, y_pitch: y.width, out: out_of(y) });
                row += part.n;
            }
        }
        let Some(shape) = GroupShape::of(&parts, rows) else { return Ok(false) };
        if self.plans.group(&parts, shape).map_err(fault)?.is_none() {
            return Ok(false);
        }
        let pdl = self.pdl();
        let Some(group) = self.plans.group(&parts, shape).map_err(fault)? else { return Ok(false) };
        group.launch(&self.stream, &parts, x, experts, pdl).map_err(fault)?;
        Ok(true)
    }

    /// The same for plain inputs, one by one where they do not fit one launch.
    fn products(&mut self, x: &CudaBuf, list: &[(&CudaWeight, &CudaBuf)]) -> Result<(), EngineError> {
        let input = Input::Plain { x: Cuda::act(x)?, pitch: x.width };
        if x.width.is_multiple_of(8) && self.grouped(input, x.rows, list, None)? {
            return Ok(());
        }
        for (w, y) in list {
            self.product(w, Cuda::act(x)?, x.width, x.rows, y.ptr, y.width, out_of(y))?;
        }
        Ok(())
    }

    // ---- sums into the residual ----------------------------------------------------------------------------

    /// Notes `to_s = R_s + b_s y`, or `to = R + y` without factors; `r` is the new residual.
    pub(super) fn defer_sum(
        &mut self,
        r: &mut CudaBuf,
        y: &CudaBuf,
        factor: Option<&CudaBuf>,
    ) -> Result<(), EngineError> {
        let to = self.fresh(r.rows, r.width, false)?;
        let from = std::mem::replace(r, to);
        self.pending = Some(Pending { from, y: view(y), factor: factor.map(view), to: r.ptr });
        Ok(())
    }

    /// Makes a noted sum by a launch of its own.
    pub(super) fn settle(&mut self) -> Result<(), EngineError> {
        let Some(p) = self.pending.take() else { return Ok(()) };
        let pdl = self.pdl();
        let (ops, s, n, rows) = (&self.plans.rows, &self.stream, p.y.width, p.y.rows);
        match &p.factor {
            Some(f) => ops.inject(s, p.y.ptr, f.ptr, p.from.ptr, p.to, n, rows, pdl),
            None => ops.add(s, p.from.ptr, p.y.ptr, p.to, n, rows, pdl),
        }
        .map_err(fault)
    }

    /// The noted sum into `r`, with or without factors, for the launch that reads it.
    fn take_sum(&mut self, r: &CudaBuf, factors: bool) -> Option<Pending> {
        let own = |p: &mut Pending| p.to == r.ptr && p.from.rows == r.rows && p.factor.is_some() == factors;
        self.pending.take_if(own)
    }

    /// The noted injection into `r`, for the mixer that reads it.
    pub(super) fn take_injection(&mut self, r: &CudaBuf) -> Option<Pending> {
        self.take_sum(r, true)
    }

    /// The norm of `r` with the sum that was noted for it, in one launch; none if there is no such sum.
    pub(super) fn fused_norm(&mut self, r: &CudaBuf, w: &CudaWeight, spec: NormSpec) -> Option<CudaBuf> {
        if spec.groups != 1 || w.n * w.k != r.width {
            return None;
        }
        let p = self.take_sum(r, false)?;
        Some(self.make(r.rows, r.width, false, |c, x| {
            let (n, words, pdl) = (r.width, w.plain()?, c.pdl());
            let (eps, centred) = (spec.eps as f32, spec.zero_centred);
            let sum = (p.from.ptr, p.y.ptr, p.to);
            c.plans.rows.add_norm(&c.stream, sum, words, x.ptr, n, r.rows, eps, centred, pdl).map_err(fault)
        }))
    }

    // ---- gated delta rule ----------------------------------------------------------------------------------

    pub(super) fn fused_gdn(&mut self, x: &CudaBuf, w: &GdnWeights<Self>, at: At<'_>) -> Option<CudaBuf> {
        if !self.fuses(x.rows) {
            return None;
        }
        self.mark(at.op(Op::GdnQkv));
        let made = self.guard(|c| {
            let u = c.fresh(x.rows, w.qkv.n, false)?;
            let z = c.fresh(x.rows, w.z.n, false)?;
            let (a, b) = (c.fresh(x.rows, w.a.n, false)?, c.fresh(x.rows, w.b.n, false)?);
            c.products(x, &[(&w.qkv, &u), (&w.z, &z), (&w.a, &a), (&w.b, &b)])?;
            Ok((u, z, a, b))
        });
        let Some((u, z, a, b)) = made else { return Some(CudaBuf::failed(x.rows, w.o.n, false)) };
        let u = self.gdn_conv(w.state, &u, &w.conv, at.op(Op::GdnConv));
        let o = self.gdn(w.state, &u, &a, &b, &w.a_log, &w.dt_bias, at.op(Op::GdnOut));
        self.mark(at.op(Op::GdnO));
        let mut fused = false;
        let y = self.make(x.rows, w.o.n, false, |c, y| {
            let head = w.norm.n * w.norm.k;
            let input = Input::Gated {
                o: Cuda::act(&o)?,
                z: Cuda::act(&z)?,
                w: w.norm.plain()?,
                pitch: o.width,
                z_pitch: z.width,
                head,
                eps: w.eps as f32,
                sigmoid: w.gate == GateKind::Sigmoid,
            };
            let fits = o.width <= WIDEST_GATED && head.is_multiple_of(32) && head <= 256;
            fused = fits && c.grouped(input, x.rows, &[(&w.o, y)], None)?;
            Ok(())
        });
        if fused || self.failed.is_some() {
            return Some(y);
        }
        let o = self.gdn_gate(&o, &z, &w.norm, w.gate, w.eps, at.op(Op::GdnGate));
        Some(self.linear(&o, &w.o, Boundary::Act, at.op(Op::GdnO)))
    }

    // ---- dense MLP -----------------------------------------------------------------------------------------

    pub(super) fn fused_mlp(&mut self, x: &CudaBuf, w: &MlpWeights<Self>, at: At<'_>) -> Option<CudaBuf> {
        if !self.fuses(x.rows) {
            return None;
        }
        self.mark(at.op(Op::MlpGate));
        let made = self.guard(|c| {
            let (g, u) = (c.fresh(x.rows, w.gate.n, false)?, c.fresh(x.rows, w.up.n, false)?);
            c.products(x, &[(&w.gate, &g), (&w.up, &u)])?;
            Ok((g, u))
        });
        let Some((g, u)) = made else { return Some(CudaBuf::failed(x.rows, w.down.n, false)) };
        self.mark(at.op(Op::MlpDown));
        let mut fused = false;
        let y = self.make(x.rows, w.down.n, false, |c, y| {
            let input = Input::SwiGlu { gate: g.ptr, up: u.ptr, pitch: g.width };
            let fits = x.rows * g.width <= SWIGLU_VALUES && g.width.is_multiple_of(8);
            fused = fits && c.grouped(input, x.rows, &[(&w.down, y)], None)?;
            Ok(())
        });
        if fused || self.failed.is_some() {
            return Some(y);
        }
        let h = self.swiglu(&g, &u, at.op(Op::MlpHidden));
        Some(self.linear(&h, &w.down, Boundary::Act, at.op(Op::MlpDown)))
    }

    // ---- experts -------------------------------------------------------------------------------------------

    /// Experts of a synthetic law for the rows of a round, all layers at once: I32 `[rows][top]` of one of them, or 0.
    fn forced(&mut self, layer: u16, experts: usize, top: usize, rows: usize) -> Result<u64, EngineError> {
        let layers = self.tiers.layers();
        if self.options.routing.is_none() {
            return Ok(0);
        }
        if layer == Site::DRAFTER || usize::from(layer) >= layers {
            let ids = self.fresh(rows, top, true)?;
            self.run_law(layer, 1, experts, top, rows, ids.ptr, 0)?;
            let ptr = ids.ptr;
            self.laws.push(ids);
            return Ok(ptr);
        }
        if self.laws.is_empty() {
            let ids = self.fresh(layers * rows, top, true)?;
            self.run_law(0, layers, experts, top, rows, ids.ptr, 0)?;
            self.laws.push(ids);
        }
        Ok(self.laws[0].ptr + (4 * usize::from(layer) * rows * top) as u64)
    }

    /// Picks of the synthetic law for some layers.
    #[expect(clippy::too_many_arguments, reason = "sizes and two results")]
    pub(super) fn run_law(
        &mut self,
        layer: u16,
        layers: usize,
        experts: usize,
        top: usize,
        rows: usize,
        ids: u64,
        weights: u64,
    ) -> Result<(), EngineError> {
        const LAYERS: u16 = 256;
        let Some(law) = self.options.routing else { return Ok(()) };
        let zipf = match self.zipf.take() {
            Some(z) => z,
            None => {
                let seeds: Vec<u64> = (0..LAYERS).chain([Site::DRAFTER]).map(|l| law.layer_seed(l)).collect();
                ZipfRoute::new(&self.vram.device, experts, law.s, law.repeat, &seeds).map_err(fault)?
            }
        };
        let (pos, pdl) = (self.round()?.lanes.row_pos, self.pdl());
        let first = usize::from(layer.min(LAYERS));
        let done = zipf.launch(&self.stream, pos, rows, top, first, layers, ids, weights, pdl);
        self.zipf = Some(zipf);
        done.map_err(fault)
    }

    /// Where a layer's picks go: those of all layers lie together, to be read in one copy.
    fn pick_ids(&mut self, rows: usize, top: usize) -> Result<CudaBuf, EngineError> {
        let used = self.routed.len() * rows;
        if self.picks.as_ref().is_none_or(|p| p.width != top || p.rows < used + rows) {
            let layers = self.tiers.layers().max(1);
            self.picks = Some(self.fresh(layers * rows, top, true)?);
        }
        match &self.picks {
            Some(p) if used + rows <= p.rows => Ok(p.rows_from(used, rows)),
            _ => self.fresh(rows, top, true),
        }
    }

    /// Picks of a decode round and their outputs, in pick order: the router selects where it quantises their inputs. `scales`: combined
    /// and input ones, and whether they divide.
    #[expect(clippy::too_many_arguments, reason = "the operands of one layer's experts")]
    fn exact_picks(
        &mut self,
        x: &CudaBuf,
        w: &MoeWeights<Self>,
        bank: usize,
        (alpha, input, divisor): (u64, u64, bool),
        logits: &CudaBuf,
        at: At<'_>,
        trace: Option<&mut Trace>,
    ) -> Option<(CudaRouting, CudaBuf)> {
        let (experts, top, rows) = (w.experts.experts, w.top_k, x.rows);
        let (h, i) = (w.experts.hidden, w.experts.intermediate);
        self.mark(at.op(Op::RouteWeight));
        let (ids, weights, j, act, mid, out, table, help, _lists) = self.guard(|c| {
            let forced = c.forced(at.site.layer, experts, top, rows)?;
            let ids = c.pick_ids(rows, top)?;
            let weights = c.fresh(rows, top, true)?;
            let picks = rows * top;
            let lease = |c: &Self, bytes: usize| c.arena.lease(bytes);
            let (jobs, list, count) = (lease(c, 16 * picks)?, lease(c, 4 * picks)?, lease(c, 8)?);
            let act = lease(c, picks * act_bytes(h))?;
            let (mid, out) = (c.fresh(picks, i, false)?, c.fresh(picks, h, false)?);
            let j = Jobs { jobs: jobs.ptr(), list: list.ptr(), count: count.ptr() };
            let width = c.plans.w4a4(h, i, rows).map_err(fault)?.width;
            let table = ExpertTable { records: c.tiers.records(bank).whole, alpha, input, divisor };
            let help = c.workers.as_ref().filter(|_| rows <= Help::ROWS);
            let help = help.and_then(|w| w.help(bank, c.tiers.away(bank)));
            let r = Routed {
                logits: logits.ptr,
                pitch: logits.width,
                forced,
                ids: ids.ptr,
                weights: weights.ptr,
            };
            let pdl = c.pdl();
            c.plans
                .router(experts, top)
                .map_err(fault)?
                .route(&c.stream, r, rows, width, j, &table, Cuda::act(x)?, h, act.ptr(), help.as_ref(), pdl)
                .map_err(fault)?;
            c.routed.push((bank, view(&ids)));
            if c.profile.is_some() {
                c.chained = false;
            }
            Ok((ids, weights, j, act, mid, out, table, help, [jobs, list, count]))
        })?;
        let routing = CudaRouting { ids, weights, top };
        if let Some(t) = trace {
            t.experts = Some(self.read_routing(&routing));
        }
        self.mark(at.op(Op::ExpertOut));
        self.guard(|c| {
            let pdl = c.pdl();
            c.plans
                .w4a4(h, i, rows)
                .map_err(fault)?
                .launch(&c.stream, &table, j, act.ptr(), mid.ptr, out.ptr, help.as_ref(), pdl)
                .map_err(fault)
        })?;
        Some((routing, out))
    }

    pub(super) fn fused_moe(
        &mut self,
        x: &CudaBuf,
        w: &MoeWeights<Self>,
        at: At<'_>,
        trace: Option<&mut Trace>,
    ) -> Option<CudaBuf> {
        let bank = w.experts.bank()?;
        let (experts, top, h) = (w.experts.experts, w.top_k, w.experts.hidden);
        let rows = x.rows;
        if !self.fuses(rows) || rows > Router::ROUTED_ROWS || self.tiers.on_disk() {
            return None;
        }
        self.mark(at.op(Op::Router));
        let made = self.guard(|c| {
            let (g, u) = (c.fresh(rows, w.shared.gate.n, false)?, c.fresh(rows, w.shared.up.n, false)?);
            let (logits, shared) = (c.fresh(rows, experts, true)?, c.fresh(rows, w.shared_gate.n, true)?);
            c.products(
                x,
                &[(&w.router, &logits), (&w.shared.gate, &g), (&w.shared.up, &u), (&w.shared_gate, &shared)],
            )?;
            Ok((g, u, logits, shared))
        });
        let failed = || Some(CudaBuf::failed(rows, h, false));
        let Some((g, u, logits, shared)) = made else { return failed() };
        let made = match &w.experts.store {
            Store::Exact { alpha, input, divisor, .. } => {
                let scales = (alpha.ptr(), input.ptr(), *divisor);
                self.exact_picks(x, w, bank, scales, &logits, at, trace)
            }
            Store::Stored(own) => {
                self.mark(at.op(Op::RouteWeight));
                let routing = self.guard(|c| {
                    let ids = c.pick_ids(rows, top)?;
                    c.route_to(ids, &logits, top, at.op(Op::RouteWeight))
                });
                let Some(routing) = routing else { return failed() };
                if let Some(t) = trace {
                    t.experts = Some(self.read_routing(&routing));
                }
                self.mark(at.op(Op::ExpertOut));
                let out = self.guard(|c| {
                    c.routed.push((bank, view(&routing.ids)));
                    let records = c.tiers.records(bank);
                    c.stored_experts(x, &routing, &w.experts, own, records, 0, rows)
                });
                out.map(|out| (routing, out))
            }
            Store::Rows(_) | Store::Blocks(_) | Store::Chain { .. } => None,
        };
        let Some((routing, out)) = made else { return failed() };
        self.mark(at.op(Op::MlpDown));
        let mut fused = false;
        let y = self.make(rows, h, false, |c, y| {
            let input = Input::SwiGlu { gate: g.ptr, up: u.ptr, pitch: g.width };
            let sum = Experts {
                outputs: out.ptr,
                weights: routing.weights.ptr,
                logit: shared.ptr,
                logit_pitch: shared.width,
                top,
            };
            fused = w.shared.down.parts.len() == 1
                && g.width.is_multiple_of(8)
                && c.grouped(input, rows, &[(&w.shared.down, y)], Some(sum))?;
            Ok(())
        });
        if fused || self.failed.is_some() {
            return Some(y);
        }
        let hidden = self.swiglu(&g, &u, at.op(Op::MlpHidden));
        let last = self.linear(&hidden, &w.shared.down, Boundary::Act, at.op(Op::MlpDown));
        self.guard(|c| c.combine(&out, 0, &routing, &last, &shared, &y, 0, rows));
        Some(y)
    }

    // ---- attention -----------------------------------------------------------------------------------------

    /// The projections of an attention layer and what leads to its scores: queries, output gate and index queries (none where every
    /// row sees its whole prefix, unless they are `wanted`). Keys, values and index keys are appended.
    pub(super) fn fused_projections(
        &mut self,
        x: &CudaBuf,
        w: &AttentionWeights<Self>,
        at: At<'_>,
        wanted: bool,
    ) -> Option<(CudaBuf, CudaBuf, Option<CudaBuf>)> {
        let (rows, id) = (x.rows, w.state);
        let dims = self.state.as_ref().map(|s| s.layout.attention[id].clone())?;
        let d = dims.head_dim;
        let plain = self.state.as_ref().is_some_and(|s| s.layout.kv == KvFormat::Bf16);
        if !plain
            || !self.fuses(rows)
            || w.q_norm.n * w.q_norm.k != d
            || w.indexer.is_some() != dims.index.is_some()
        {
            return None;
        }
        let selects = w.indexer.is_some() && (wanted || !self.all_dense(id));
        self.mark(at.op(Op::AttnQ));
        let made = self.guard(|c| {
            let new = |c: &Self, w: &CudaWeight| c.fresh(rows, w.n, false);
            let (q, gate) = (new(c, &w.q)?, new(c, &w.gate)?);
            let (k, v) = (new(c, &w.k)?, new(c, &w.v)?);
            let mut list = vec![(&w.q, &q), (&w.gate, &gate), (&w.k, &k), (&w.v, &v)];
            let own = match &w.indexer {
                Some(i) => Some((new(c, &i.k)?, new(c, &i.q)?)),
                None => None,
            };
            if let (Some(i), Some((ik, iq))) = (&w.indexer, &own) {
                list.push((&i.k, ik));
                if selects {
                    list.push((&i.q, iq));
                }
            }
            c.products(x, &list)?;
            Ok((q, gate, k, v, own))
        });
        let none = |w: &CudaWeight| CudaBuf::failed(rows, w.n, false);
        let Some((q, gate, k, v, own)) = made else {
            return Some((none(&w.q), none(&w.gate), w.indexer.as_ref().map(|i| none(&i.q))));
        };
        self.mark(at.op(Op::AttnNormQ));
        let made = self.guard(|c| {
            let angles = c.angles(&w.rope)?;
            let rope = c.rotary(&w.rope)?;
            let to = c.fresh(rows, q.width, false)?;
            let index_to = match (&own, selects) {
                (Some((_, iq)), true) => Some(c.fresh(rows, iq.width, false)?),
                _ => None,
            };
            let round = c.round()?;
            let (lanes, tables, pitch) = (round.lanes, round.tables, round.pitch);
            let state = c.state()?;
            let paging = state.paging(id, tables, pitch);
            let index =
                match (&w.indexer, &own, state.ring(id), state.index_pages(id, tables, pitch), dims.index) {
                    (Some(i), Some((ik, _)), Some(ring), Some(pages), Some(n)) => Some(IndexKeys {
                        raw: ik.ptr,
                        norm: i.k_norm.plain()?,
                        ring,
                        rope,
                        pages,
                        ratio: n.ratio,
                    }),
                    _ => None,
                };
            let heads =
                |x: &CudaBuf, norm: &CudaWeight, width: usize, to: u64| -> Result<Heads, EngineError> {
                    Ok(Heads { x: x.ptr, pitch: x.width, norm: norm.plain()?, heads: x.width / width, to })
                };
            let iq = match (&w.indexer, &own, &index_to) {
                (Some(i), Some((_, iq)), Some(to)) => heads(iq, &i.q_norm, 128, to.ptr)?,
                _ => Heads::default(),
            };
            let (qh, kh) = (heads(&q, &w.q_norm, d, to.ptr)?, heads(&k, &w.k_norm, d, 0)?);
            let (half, eps) = (w.rope.freq.len(), w.eps as f32);
            let pdl = c.pdl();
            c.plans
                .prep
                .launch(
                    &c.stream,
                    qh,
                    kh,
                    (v.ptr, v.width),
                    iq,
                    index.as_ref(),
                    angles,
                    half,
                    d,
                    eps,
                    &paging,
                    &lanes,
                    pdl,
                )
                .map_err(fault)?;
            Ok((to, index_to))
        });
        let (q, iq) = made.unwrap_or_else(|| (none(&w.q), w.indexer.as_ref().map(|i| none(&i.q))));
        Some((q, gate, iq))
    }
}

impl Pending {
    /// As the mixer's first kernel takes it.
    pub(super) fn injection(&self) -> (u64, Injection) {
        let factor = self.factor.as_ref().map_or(0, |f| f.ptr);
        (self.from.ptr, Injection { y: self.y.ptr, factor, to: self.to })
    }
}
