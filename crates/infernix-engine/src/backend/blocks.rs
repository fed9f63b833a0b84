//! Block compositions: the order of primitive operations inside a mixer, an MLP, an expert layer.

use super::{At, Backend, Boundary, GateKind, NormSpec, Op, RopeTable, StateId};
use crate::ngram::NgramTicket;
use std::sync::Arc;

/// What a caller may want to see of a layer (`logits --layers`, parity tests).
#[derive(Clone, Debug, Default)]
pub struct Trace {
    /// Experts and weights of each row.
    pub experts: Option<Vec<Vec<(u32, f32)>>>,
    /// Selected blocks of each row.
    pub blocks: Option<Vec<Option<Vec<u32>>>>,
}

/// Weights of a hyper-connection mixer.
pub struct HyperWeights<B: Backend> {
    /// `[nH]`.
    pub norm: B::Weight,
    /// `[rank, nH]`.
    pub down: B::Weight,
    /// `[nH, rank]`.
    pub up: B::Weight,
    /// `[n, nH]`; the final mixer has none.
    pub inject: Option<B::Weight>,
    /// n.
    pub streams: usize,
    /// Norm epsilon.
    pub eps: f64,
}

/// Weights of a gated delta rule mixer.
pub struct GdnWeights<B: Backend> {
    /// q, k and v stacked by rows, `[C, H]`.
    pub qkv: B::Weight,
    /// `[value_heads * value_dim, H]`.
    pub z: B::Weight,
    /// `[value_heads, H]`.
    pub a: B::Weight,
    /// `[value_heads, H]`.
    pub b: B::Weight,
    /// `[H, value_heads * value_dim]`.
    pub o: B::Weight,
    /// `[C, K]`.
    pub conv: B::Weight,
    /// `[value_heads]`.
    pub a_log: B::Weight,
    /// `[value_heads]`.
    pub dt_bias: B::Weight,
    /// `[value_dim]`.
    pub norm: B::Weight,
    /// State index.
    pub state: StateId,
    /// Activation of z.
    pub gate: GateKind,
    /// Norm epsilon.
    pub eps: f64,
}

/// Weights of the sparse-attention indexer.
pub struct IndexerWeights<B: Backend> {
    /// `[heads * di, H]`.
    pub q: B::Weight,
    /// `[di, H]`.
    pub k: B::Weight,
    /// `[di]`.
    pub q_norm: B::Weight,
    /// `[di]`.
    pub k_norm: B::Weight,
}

/// Weights of gated attention.
pub struct AttentionWeights<B: Backend> {
    /// `[heads * d, H]`.
    pub q: B::Weight,
    /// `[heads * d, H]`.
    pub gate: B::Weight,
    /// `[kv_heads * d, H]`.
    pub k: B::Weight,
    /// `[kv_heads * d, H]`.
    pub v: B::Weight,
    /// `[H, heads * d]`.
    pub o: B::Weight,
    /// `[d]`.
    pub q_norm: B::Weight,
    /// `[d]`.
    pub k_norm: B::Weight,
    /// QSA, where the architecture has it.
    pub indexer: Option<IndexerWeights<B>>,
    /// State index.
    pub state: StateId,
    /// Rotary tables, shared by all layers.
    pub rope: Arc<RopeTable>,
    /// Norm epsilon.
    pub eps: f64,
}

/// Weights of a dense SwiGLU MLP.
pub struct MlpWeights<B: Backend> {
    /// `[I, H]`.
    pub gate: B::Weight,
    /// `[I, H]`.
    pub up: B::Weight,
    /// `[H, I]`.
    pub down: B::Weight,
}

/// Weights of an expert layer.
pub struct MoeWeights<B: Backend> {
    /// `[E, H]`.
    pub router: B::Weight,
    /// `[1, H]`.
    pub shared_gate: B::Weight,
    /// The shared expert.
    pub shared: MlpWeights<B>,
    /// Routed experts.
    pub experts: B::Experts,
    /// Experts a token.
    pub top_k: usize,
}

/// Weights of a PLE injection.
pub struct PleWeights<B: Backend> {
    /// `[nH, P]`.
    pub key: B::Weight,
    /// `[H, P]`.
    pub value: B::Weight,
    /// `[nH]`.
    pub norm_key: B::Weight,
    /// `[nH]`.
    pub norm_query: B::Weight,
    /// `[nH]`.
    pub norm_conv: B::Weight,
    /// `[nH, K]`.
    pub conv: B::Weight,
    /// n.
    pub streams: usize,
    /// Distance between taps.
    pub dilation: usize,
    /// State index.
    pub state: StateId,
    /// Norm epsilon.
    pub eps: f64,
}

/// `N = norm(R)`, `m = silu(W_down N / n)`, `x = mean_s sigma(W_up m) N`, `b = 2 sigma(W_inject N / n)`.
pub fn hyper_mix<B: Backend>(
    b: &mut B,
    r: &B::Buf,
    w: &HyperWeights<B>,
    base: Op,
    at: At<'_>,
) -> (B::Buf, Option<B::Buf>) {
    let [norm, down, up, factor] = base.hyper();
    let spec = NormSpec { groups: w.streams, zero_centred: true, eps: w.eps };
    let n = b.norm(r, &w.norm, spec, at.op(norm));
    let m = b.hyper_down(&n, &w.down, w.streams, at.op(down));
    let x = b.hyper_up(&n, &m, &w.up, w.streams, at.op(up));
    let f = w.inject.as_ref().map(|i| b.hyper_factor(&n, i, w.streams, at.op(factor)));
    (x, f)
}

/// Projections, convolution, recurrence, gated norm, output projection.
pub fn gdn_block<B: Backend>(b: &mut B, x: &B::Buf, w: &GdnWeights<B>, at: At<'_>) -> B::Buf {
    let y = b.linear(x, &w.qkv, Boundary::Act, at.op(Op::GdnQkv));
    let z = b.linear(x, &w.z, Boundary::Act, at.op(Op::GdnZ));
    let ga = b.linear(x, &w.a, Boundary::Act, at.op(Op::GdnA));
    let gb = b.linear(x, &w.b, Boundary::Act, at.op(Op::GdnB));
    let u = b.gdn_conv(w.state, &y, &w.conv, at.op(Op::GdnConv));
    let o = b.gdn(w.state, &u, &ga, &gb, &w.a_log, &w.dt_bias, at.op(Op::GdnOut));
    let o = b.gdn_gate(&o, &z, &w.norm, w.gate, w.eps, at.op(Op::GdnGate));
    b.linear(&o, &w.o, Boundary::Act, at.op(Op::GdnO))
}

/// Projections, head norms with rotary embedding, index and selection, attention, output gate and projection.
pub fn attention_block<B: Backend>(
    b: &mut B,
    x: &B::Buf,
    w: &AttentionWeights<B>,
    at: At<'_>,
    trace: Option<&mut Trace>,
) -> B::Buf {
    let q = b.linear(x, &w.q, Boundary::Act, at.op(Op::AttnQ));
    let gate = b.linear(x, &w.gate, Boundary::Act, at.op(Op::AttnGate));
    let k = b.linear(x, &w.k, Boundary::Act, at.op(Op::AttnK));
    let v = b.linear(x, &w.v, Boundary::Act, at.op(Op::AttnV));
    let q = b.norm_rope(&q, &w.q_norm, &w.rope, w.eps, at.op(Op::AttnNormQ));
    let k = b.norm_rope(&k, &w.k_norm, &w.rope, w.eps, at.op(Op::AttnNormK));
    b.kv_append(w.state, &k, &v);
    let selection = w.indexer.as_ref().map(|i| {
        let iq = b.linear(x, &i.q, Boundary::Act, at.op(Op::IndexQ));
        let raw = b.linear(x, &i.k, Boundary::Act, at.op(Op::IndexK));
        let iq = b.norm_rope(&iq, &i.q_norm, &w.rope, w.eps, at.op(Op::IndexNormQ));
        b.index_append(w.state, &raw, &i.k_norm, &w.rope, w.eps, at.op(Op::IndexPooled));
        b.index_select(w.state, &iq, at.op(Op::IndexScore))
    });
    if let (Some(t), Some(s)) = (trace, &selection) {
        t.blocks = Some(b.read_selection(s));
    }
    let o = b.attention(w.state, &q, selection.as_ref(), at.op(Op::AttnOut));
    let o = b.gate(&o, &gate, at.op(Op::AttnGated));
    b.linear(&o, &w.o, Boundary::Act, at.op(Op::AttnO))
}

/// `down(silu(gate x) * up x)`.
pub fn mlp_block<B: Backend>(b: &mut B, x: &B::Buf, w: &MlpWeights<B>, at: At<'_>) -> B::Buf {
    let g = b.linear(x, &w.gate, Boundary::Act, at.op(Op::MlpGate));
    let u = b.linear(x, &w.up, Boundary::Act, at.op(Op::MlpUp));
    let h = b.swiglu(&g, &u, at.op(Op::MlpHidden));
    b.linear(&h, &w.down, Boundary::Act, at.op(Op::MlpDown))
}

/// Router, shared expert, routed experts and their sum.
pub fn moe_block<B: Backend>(
    b: &mut B,
    x: &B::Buf,
    w: &MoeWeights<B>,
    at: At<'_>,
    trace: Option<&mut Trace>,
) -> B::Buf {
    let logits = b.linear(x, &w.router, Boundary::F32, at.op(Op::Router));
    let routing = b.route(&logits, w.top_k, at.op(Op::RouteWeight));
    if let Some(t) = trace {
        t.experts = Some(b.read_routing(&routing));
    }
    let shared = b.mlp_block(x, &w.shared, at);
    let shared_logit = b.linear(x, &w.shared_gate, Boundary::F32, at.op(Op::SharedLogit));
    b.experts(x, &routing, &w.experts, &shared, &shared_logit, at.op(Op::ExpertOut))
}

/// Table rows, key/value projections, gate, dilated convolution; added to the streams.
pub fn ple_block<B: Backend>(
    b: &mut B,
    r: &mut B::Buf,
    tickets: &[NgramTicket],
    w: &PleWeights<B>,
    at: At<'_>,
) {
    let spec = NormSpec { groups: w.streams, zero_centred: true, eps: w.eps };
    let e = b.ngram(tickets, at.op(Op::NgramRow));
    let key = b.linear(&e, &w.key, Boundary::Act, at.op(Op::PleKey));
    let key = b.norm(&key, &w.norm_key, spec, at.op(Op::PleNormKey));
    let value = b.linear(&e, &w.value, Boundary::Act, at.op(Op::PleValue));
    let query = b.norm(r, &w.norm_query, spec, at.op(Op::PleNormQuery));
    let v = b.ple_gate(&key, &query, &value, w.streams, at.op(Op::PleGate));
    let c = b.norm(&v, &w.norm_conv, spec, at.op(Op::PleNormConv));
    b.ple_conv(w.state, r, &v, &c, &w.conv, w.dilation, at.op(Op::PleConv));
}
