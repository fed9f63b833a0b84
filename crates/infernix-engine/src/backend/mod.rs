//! The seam between model graphs and arithmetic.
//!
//! A [`Backend`] speaks in the model's operations. A graph in `model/` is written once against this trait; the
//! backends (`lossless`, `cpu`, `cuda`) differ in speed and in how they reach a result, never in what is rounded.
//!
//! # Conventions
//! * **Rows.** A call has `T` rows, the columns of all lanes of the round one after another, in lane order. A
//!   [`Backend::Buf`] is a matrix `[T, width]`, rows contiguous.
//! * **Boundaries.** *Act* is the format of activations between operations: BF16, or F32 under
//!   `--boundaries fp32`. *F32* is always FP32. The inside of an operation is exact in `Lossless` and FP32 or better
//!   and unrounded elsewhere; each doc comment names its one rounding. A fused override may not add one.
//! * **Weights** are the exact real products of their stored words.
//! * **Sites.** Every operation that rounds receives an [`At`]: which rounding of the graph this is, and for each
//!   row the stream and sequence position. Stochastic rounding is a function of (seed, stream, layer, op, position,
//!   element), element = index in the row of the *output*; other backends ignore it.
//! * **Rounds.** Operations enqueue and return handles; they fail only by latching the failure, which
//!   [`Backend::end_round`] reports per lane. Everything that varies from round to round is in [`StepMeta`].
//! * **Independence.** On host backends no result depends on the other rows of the call, on threads or on tiling.
//! * **State** is addressed by [`StateId`], an index into the list of its kind in [`StateLayout`].

pub mod blocks;
pub mod cpu;
pub mod cuda;
pub mod lossless;
pub mod meta;
pub mod site;
pub mod weights;

pub use blocks::{
    AttentionWeights, GdnWeights, HyperWeights, IndexerWeights, MlpWeights, MoeWeights, PleWeights, Trace,
};
pub use meta::{CallKind, LaneMeta, Outcome, Part, SlotId, StepMeta, Tokens};
pub use site::{At, Op, RowKey, Site};
pub use weights::{
    Activation, ActivationPolicy, ExpertData, ExpertSpec, FileRange, WeightData, WeightPart, WeightSpec,
};

use crate::error::EngineError;
use crate::ngram::NgramTicket;
use crate::state::StateLayout;

/// Index of a state of one kind (attention, GDN or PLE) in [`StateLayout`].
pub type StateId = usize;

/// The format an output is rounded to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Boundary {
    /// BF16, or F32 under `--boundaries fp32`.
    Act,
    /// Always FP32.
    F32,
}

/// Parameters of an RMS norm: `y = x / sqrt(mean(x^2) + eps) * (1 + w)`, or `* w` if not zero-centred.
#[derive(Clone, Copy, Debug)]
pub struct NormSpec {
    /// Equal contiguous groups of the row, each normalised by itself.
    pub groups: usize,
    /// Multiply by `1 + w` instead of `w`.
    pub zero_centred: bool,
    /// Added to the mean square.
    pub eps: f64,
}

/// Dimensions of a gated delta rule layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GdnDims {
    /// Query/key heads.
    pub key_heads: usize,
    /// Value heads; value head j uses key head `j / (value_heads / key_heads)`.
    pub value_heads: usize,
    /// Width of a key head.
    pub key_dim: usize,
    /// Width of a value head.
    pub value_dim: usize,
    /// Taps of the causal convolution.
    pub conv_kernel: usize,
}

impl GdnDims {
    /// Channels of the convolution: q | k | v.
    pub fn channels(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
    }
}

/// Activation of the GDN output gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GateKind {
    /// `z * sigma(z)`.
    Silu,
    /// `sigma(z)`.
    Sigmoid,
}

/// Rotary embedding: frequency, axis (0 = t, 1 = h, 2 = w) of each of the `rotary_dim / 2` pairs, and the YaRN
/// factor on cos and sin. Pair i is elements i and `i + rotary_dim / 2` of a head; later elements pass through.
#[derive(Clone, Debug)]
pub struct RopeTable {
    /// Radians a position step, by pair.
    pub freq: Vec<f64>,
    /// Which coordinate of the position triple a pair turns with.
    pub axis: Vec<u8>,
    /// Multiplies cos and sin (1 without YaRN).
    pub scale: f64,
}

/// Parameters of the sparse-attention index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexDims {
    /// Query heads of the indexer.
    pub heads: usize,
    /// Width of an index key.
    pub dim: usize,
    /// Tokens a block (compress ratio r).
    pub ratio: usize,
    /// Tokens that may be selected; `budget / ratio` blocks.
    pub budget: usize,
}

/// The model's operations. See the module documentation for rows, boundaries, sites and rounds.
pub trait Backend: Sized {
    /// Activation matrix `[rows, width]`.
    type Buf;
    /// A matrix `[N, K]` (applied as `x W^T`) or vector `[N]` in its stored words.
    type Weight;
    /// The routed experts of one layer.
    type Experts;
    /// Experts and FP32 weights chosen for each row, in rank order.
    type Routing;
    /// Blocks chosen for each row (or "dense").
    type Selection;
    /// Recurrent state of one slot, detached.
    type Snapshot: Clone;

    /// Name as on the command line.
    fn name(&self) -> &'static str;

    // ---- loading -------------------------------------------------------------------------------------------

    /// Takes a matrix or vector. Keeps the words (repacking at most once); never rounds a value.
    fn weight(&mut self, spec: &WeightSpec, data: WeightData) -> Result<Self::Weight, EngineError>;

    /// Takes a matrix whose stored column i multiplies activation element `columns[i]`, a permutation of 0..K: blocks of
    /// a GGUF file that keep its order of value heads. Backends without it refuse such a matrix.
    fn gathered(
        &mut self,
        spec: &WeightSpec,
        _data: WeightData,
        _columns: Vec<u32>,
    ) -> Result<Self::Weight, EngineError> {
        Err(EngineError::Weight {
            name: spec.name.clone(),
            what: format!(
                "its blocks keep the order of heads of their GGUF file, which the {} backend does not read; use --backend cpu, \
                 or convert with a recipe that re-quantizes it",
                self.name()
            ),
        })
    }

    /// Takes the routed experts of a layer.
    fn experts_weight(&mut self, spec: &ExpertSpec, data: ExpertData) -> Result<Self::Experts, EngineError>;

    // ---- state ---------------------------------------------------------------------------------------------

    /// Creates pages and slots. Called once, before the first round.
    fn allocate(&mut self, layout: &StateLayout) -> Result<(), EngineError>;

    /// Puts a slot into the state before the first token.
    fn reset(&mut self, slot: SlotId);

    /// Copies the committed recurrent state of a slot (not its KV pages).
    fn snapshot(&mut self, slot: SlotId) -> Result<Self::Snapshot, EngineError>;

    /// Overwrites a slot with a snapshot; drops its record.
    fn restore(&mut self, slot: SlotId, snapshot: &Self::Snapshot) -> Result<(), EngineError>;

    /// Copies one KV page (all layers) onto another.
    fn copy_page(&mut self, from: u32, to: u32);

    // ---- state outside the backend (prefix-cache tiers, paused requests) --------------------------------------

    /// Bytes a snapshot occupies.
    fn snapshot_bytes(&self, _snapshot: &Self::Snapshot) -> u64 {
        0
    }

    /// A snapshot as bytes, from which [`Backend::load_snapshot`] makes an equal one.
    fn save_snapshot(&mut self, _snapshot: &Self::Snapshot) -> Result<Vec<u8>, EngineError> {
        Err(EngineError::Unsupported(format!("{} keeps no state outside its memory", self.name())))
    }

    /// A snapshot from its bytes; refuses bytes of another model or layout.
    fn load_snapshot(&mut self, _bytes: &[u8]) -> Result<Self::Snapshot, EngineError> {
        Err(EngineError::Unsupported(format!("{} keeps no state outside its memory", self.name())))
    }

    /// Bytes of one KV page over all layers.
    fn page_bytes(&self) -> u64 {
        0
    }

    /// The stored words of a KV page, all layers.
    fn save_page(&mut self, _page: u32) -> Result<Vec<u8>, EngineError> {
        Err(EngineError::Unsupported(format!("{} keeps no state outside its memory", self.name())))
    }

    /// Overwrites a KV page with saved words.
    fn load_page(&mut self, _page: u32, _bytes: &[u8]) -> Result<(), EngineError> {
        Err(EngineError::Unsupported(format!("{} keeps no state outside its memory", self.name())))
    }

    // ---- rounds --------------------------------------------------------------------------------------------

    /// Starts a round over the rows of `meta`. Prefill rounds advance committed state as they run; decode rounds
    /// write KV into pages and everything else into the lane's record, until [`Backend::commit`].
    fn begin_round(&mut self, meta: StepMeta) -> Result<(), EngineError>;

    /// Waits for the round and says which lanes failed and why. Their state is undefined until restored.
    fn end_round(&mut self) -> Outcome;

    /// Folds the first `n` recorded columns of one part of the model into the slot's state and drops the rest. The
    /// result equals a prefill of those `n` columns bit for bit.
    fn commit(&mut self, slot: SlotId, part: Part, n: usize) -> Result<(), EngineError>;

    /// Copies a matrix to the host, row-major; waits for it.
    fn read(&mut self, x: &Self::Buf) -> Vec<f32>;

    /// Brings a host matrix `[rows, width]` over, values as they are (drafter frontier, vision, tests).
    fn write(&mut self, rows: usize, width: usize, values: &[f32]) -> Self::Buf;

    /// Chosen experts and weights of each row, rank order; waits.
    fn read_routing(&mut self, routing: &Self::Routing) -> Vec<Vec<(u32, f32)>>;

    /// Chosen complete blocks of each row, ascending, `None` where dense; waits.
    fn read_selection(&mut self, selection: &Self::Selection) -> Vec<Option<Vec<u32>>>;

    // ---- rows and columns (no rounding) --------------------------------------------------------------------

    /// `[rows.len(), width]`: the named rows.
    fn take_rows(&mut self, x: &Self::Buf, rows: &[usize]) -> Self::Buf;

    /// `[T, n * width]`: each row repeated n times side by side (the streams' common start).
    fn repeat(&mut self, x: &Self::Buf, n: usize) -> Self::Buf;

    /// `[T, wx + wy]`: rows side by side.
    fn concat(&mut self, x: &Self::Buf, y: &Self::Buf) -> Self::Buf;

    /// An independent copy.
    fn copy(&mut self, x: &Self::Buf) -> Self::Buf;

    // ---- elementary ----------------------------------------------------------------------------------------

    /// `[T, H]` rows of `table [V, H]` of the round's tokens. Rounds to Act (nothing to round for BF16 tables).
    fn embed(&mut self, table: &Self::Weight, tokens: Tokens, at: At<'_>) -> Self::Buf;

    /// RMS norm by groups. `w` has the row's width, or a group's width and then serves every group. Rounds to Act.
    fn norm(&mut self, x: &Self::Buf, w: &Self::Weight, spec: NormSpec, at: At<'_>) -> Self::Buf;

    /// `y[t, g * N + n] = sum_k w[n, k] x[t, g * K + k]` for `x [T, G * K]`, `w [N, K]` (G = 1 but for the drafter's
    /// per-stream matrix). Rounds to `out`. The weight's [`Activation`] says whether x is first quantised.
    fn linear(&mut self, x: &Self::Buf, w: &Self::Weight, out: Boundary, at: At<'_>) -> Self::Buf;

    /// `x <- x + y`; `y [T, H]` is repeated when x is a multiple as wide. Rounds to Act.
    fn add(&mut self, x: &mut Self::Buf, y: &Self::Buf, at: At<'_>);

    /// `o * sigma(gate)`, both `[T, W]`. Rounds to Act.
    fn gate(&mut self, o: &Self::Buf, gate: &Self::Buf, at: At<'_>) -> Self::Buf;

    /// `silu(gate) * up`, both `[T, I]`. Rounds to Act.
    fn swiglu(&mut self, gate: &Self::Buf, up: &Self::Buf, at: At<'_>) -> Self::Buf;

    // ---- hyper-connections (n streams of H, row = stream-major [T, n * H]) -----------------------------------

    /// `silu(W_down N / n)`, `w [rank, nH]` -> `[T, rank]`. Rounds to Act.
    fn hyper_down(&mut self, normed: &Self::Buf, w: &Self::Weight, streams: usize, at: At<'_>) -> Self::Buf;

    /// `(1/n) sum_s sigma(W_up m)_s N_s`, `w [nH, rank]` -> `[T, H]`. Rounds to Act; the gate is not rounded.
    fn hyper_up(
        &mut self,
        normed: &Self::Buf,
        m: &Self::Buf,
        w: &Self::Weight,
        streams: usize,
        at: At<'_>,
    ) -> Self::Buf;

    /// `2 sigma(W_inject N / n)`, `w [n, nH]` -> `[T, n]`. Rounds to F32.
    fn hyper_factor(&mut self, normed: &Self::Buf, w: &Self::Weight, streams: usize, at: At<'_>)
    -> Self::Buf;

    /// `R_s <- R_s + b_s y` for every stream. Rounds to Act.
    fn hyper_inject(&mut self, r: &mut Self::Buf, y: &Self::Buf, factor: &Self::Buf, at: At<'_>);

    // ---- PLE -----------------------------------------------------------------------------------------------

    /// Table rows of the round's tokens, one ticket a lane -> `[T, P]`. Rounds exact code x scale to Act. A ticket
    /// that fails fails its lane.
    fn ngram(&mut self, tickets: &[NgramTicket], at: At<'_>) -> Self::Buf;

    /// `a_s = key_s . query_s / sqrt(H)`, `a_s <- sign(a_s) sqrt(max(|a_s|, 1e-6))` rounded to F32 (site
    /// [`Op::PleScore`], element s); `V_s = sigma(a_s) value` -> `[T, nH]`. Rounds to Act.
    fn ple_gate(
        &mut self,
        key: &Self::Buf,
        query: &Self::Buf,
        value: &Self::Buf,
        streams: usize,
        at: At<'_>,
    ) -> Self::Buf;

    /// `R <- R + V + silu(sum_i w[c, i] C[t - (K-1-i) d, c])`, K taps, dilation d; zeros before the start. Rounds once
    /// to Act. State: the last `(K-1) d` columns of C, in Act.
    #[expect(clippy::too_many_arguments, reason = "the operands of one convolution")]
    fn ple_conv(
        &mut self,
        id: StateId,
        r: &mut Self::Buf,
        v: &Self::Buf,
        c: &Self::Buf,
        w: &Self::Weight,
        dilation: usize,
        at: At<'_>,
    );

    // ---- gated delta rule ----------------------------------------------------------------------------------

    /// `silu(sum_j w[c, j] x[t - (K-1) + j, c])`, `x, y [T, C]`, `w [C, K]`. Rounds once to Act. State: the last K-1
    /// columns of x, in Act.
    fn gdn_conv(&mut self, id: StateId, x: &Self::Buf, w: &Self::Weight, at: At<'_>) -> Self::Buf;

    /// The recurrence, token by token, `u [T, q|k|v]`, `a, b [T, value_heads]` -> `o [T, value_heads * value_dim]`:
    /// `g = -exp(A_log) softplus(a + dt_bias)` and `beta = sigma(b)` rounded to F32 ([`Op::GdnDecay`],
    /// [`Op::GdnBeta`]); `q^ = q / sqrt(|q|^2 + 1e-6) / sqrt(dk)`, `k^` without the last factor, unrounded;
    /// `S' = e^g S`, `S = S' + k^ (beta (v - S'^T k^))^T` rounded to F32 after every token ([`Op::GdnState`], element
    /// `(head * dk + i) * dv + j`); `o = S^T q^` of the stored S, rounded to Act.
    #[expect(clippy::too_many_arguments, reason = "the operands of one recurrence")]
    fn gdn(
        &mut self,
        id: StateId,
        u: &Self::Buf,
        a: &Self::Buf,
        b: &Self::Buf,
        a_log: &Self::Weight,
        dt_bias: &Self::Weight,
        at: At<'_>,
    ) -> Self::Buf;

    /// `rms(o; w) * act(z)` per head of `w`'s length, plain (not zero-centred) norm. Rounds once to Act.
    fn gdn_gate(
        &mut self,
        o: &Self::Buf,
        z: &Self::Buf,
        w: &Self::Weight,
        kind: GateKind,
        eps: f64,
        at: At<'_>,
    ) -> Self::Buf;

    // ---- attention -----------------------------------------------------------------------------------------

    /// Per head of `w`'s length: zero-centred RMS norm, then rotary embedding at the row's position triple. Rounds
    /// once to Act.
    fn norm_rope(
        &mut self,
        x: &Self::Buf,
        w: &Self::Weight,
        rope: &RopeTable,
        eps: f64,
        at: At<'_>,
    ) -> Self::Buf;

    /// Writes the rows' keys and values `[T, kv_heads * d]` into their pages through the KV codec.
    fn kv_append(&mut self, id: StateId, k: &Self::Buf, v: &Self::Buf);

    /// `softmax(q k / sqrt(d)) v` over each row's causal prefix, or over its selection; `q [T, heads * d]`, consecutive
    /// query heads share a KV head. Rounds to Act.
    fn attention(
        &mut self,
        id: StateId,
        q: &Self::Buf,
        selection: Option<&Self::Selection>,
        at: At<'_>,
    ) -> Self::Buf;

    /// Appends raw index keys `raw [T, di]`; each block that becomes complete gives the pooled key
    /// `RoPE(rms1(mean of its raw keys; w), position triple of its first token)`, rounded once to Act
    /// ([`At::op`], position = the block's first token). State: pooled keys, and raw keys of the open block.
    fn index_append(
        &mut self,
        id: StateId,
        raw: &Self::Buf,
        w: &Self::Weight,
        rope: &RopeTable,
        eps: f64,
        at: At<'_>,
    );

    /// Scores every complete block of each row's prefix, `di^-1/2 sum_h relu(q_h . k_b)` rounded to F32
    /// (element = block), and keeps the `budget / ratio` best, lower block first on equality. The row attends to all
    /// tokens of those blocks and to the tail `ratio * floor((t+1)/ratio) ..= t`. `q [T, heads * di]`, normed and rotated.
    fn index_select(&mut self, id: StateId, q: &Self::Buf, at: At<'_>) -> Self::Selection;

    // ---- experts -------------------------------------------------------------------------------------------

    /// Top-k of FP32 router logits `[T, E]`, lower id on equality, and the softmax over the selected, each weight rounded
    /// to F32 (element = rank).
    fn route(&mut self, logits: &Self::Buf, top_k: usize, at: At<'_>) -> Self::Routing;

    /// Routed experts and the gated shared expert:
    /// `gate, up, h = silu(gate) up, down` each rounded to Act ([`Op::ExpertGate`].., element = rank * width + index);
    /// `acc = fma(w_r, y_r, acc)` in FP32 by rank r, then `fma(f32(sigma(shared_logit)), shared, acc)`; rounded once to
    /// Act. `x, shared [T, H]`, `shared_logit [T, 1]` F32. The store's [`Activation`] and the kind of call decide which
    /// arithmetic computes an expert (decisions.md A).
    fn experts(
        &mut self,
        x: &Self::Buf,
        routing: &Self::Routing,
        store: &Self::Experts,
        shared: &Self::Buf,
        shared_logit: &Self::Buf,
        at: At<'_>,
    ) -> Self::Buf;

    // ---- provided compositions: override only to fuse or schedule better -------------------------------------

    /// Hyper-connection mixer: block input `[T, H]` and, if the weights have one, the inject factor `[T, n]`.
    fn hyper_mix(
        &mut self,
        r: &Self::Buf,
        w: &HyperWeights<Self>,
        base: Op,
        at: At<'_>,
    ) -> (Self::Buf, Option<Self::Buf>) {
        blocks::hyper_mix(self, r, w, base, at)
    }

    /// A gated delta rule mixer, `x [T, H]` -> `[T, H]`.
    fn gdn_block(&mut self, x: &Self::Buf, w: &GdnWeights<Self>, at: At<'_>) -> Self::Buf {
        blocks::gdn_block(self, x, w, at)
    }

    /// Gated attention, full or over a QSA selection, `x [T, H]` -> `[T, H]`.
    fn attention_block(
        &mut self,
        x: &Self::Buf,
        w: &AttentionWeights<Self>,
        at: At<'_>,
        trace: Option<&mut Trace>,
    ) -> Self::Buf {
        blocks::attention_block(self, x, w, at, trace)
    }

    /// Dense SwiGLU, `x [T, H]` -> `[T, H]`.
    fn mlp_block(&mut self, x: &Self::Buf, w: &MlpWeights<Self>, at: At<'_>) -> Self::Buf {
        blocks::mlp_block(self, x, w, at)
    }

    /// Router, routed experts and gated shared expert, `x [T, H]` -> `[T, H]`.
    fn moe_block(
        &mut self,
        x: &Self::Buf,
        w: &MoeWeights<Self>,
        at: At<'_>,
        trace: Option<&mut Trace>,
    ) -> Self::Buf {
        blocks::moe_block(self, x, w, at, trace)
    }

    /// Rows of a prompt call that operations take at a time, at most: a longer call of one lane is walked layer by layer, window by
    /// window, so that what a layer needs is fetched once.
    fn window_rows(&self) -> usize {
        usize::MAX
    }

    /// From here on operations concern these rows of the round, which follow those of the window before within each layer.
    fn window(&mut self, _rows: std::ops::Range<usize>) {}

    /// n-gram embedding added to the streams `[T, nH]`.
    fn ple_block(&mut self, r: &mut Self::Buf, tickets: &[NgramTicket], w: &PleWeights<Self>, at: At<'_>) {
        blocks::ple_block(self, r, tickets, w, at);
    }
}
