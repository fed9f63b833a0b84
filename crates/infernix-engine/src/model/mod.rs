//! Model graphs: the three architectures, written once over [`Backend`].
//!
//! A driver runs a round as `begin`, `layer(0..)`, `finish`. Layers touch only their own state, so a driver may run all
//! layers over one chunk (token-major) or one layer over many chunks (layer-major).

mod artifact;
mod load;
mod rope;
mod source;

pub use artifact::ArtifactSource;
#[cfg(test)]
pub(crate) use load::layout;
pub use load::{LoadOptions, load, page_bytes};
pub use rope::table as rope_table;
pub use source::{Binder, MemorySource, WeightSource};

use crate::backend::{
    At, AttentionWeights, Backend, Boundary, GdnWeights, HyperWeights, MlpWeights, MoeWeights, NormSpec, Op,
    PleWeights, RowKey, Site, Tokens, Trace,
};
use crate::ngram::NgramTicket;
use crate::state::StateLayout;
use infernix_model::ModelConfig;
use std::sync::Arc;

/// The token mixer of a layer.
pub enum Mixer<B: Backend> {
    /// Gated delta rule.
    Gdn(GdnWeights<B>),
    /// Gated attention, full or sparse.
    Attention(AttentionWeights<B>),
}

/// The feed-forward part of a layer.
pub enum FeedForward<B: Backend> {
    /// Dense.
    Mlp(MlpWeights<B>),
    /// Mixture of experts.
    Moe(MoeWeights<B>),
}

/// How mixer and feed-forward part meet the residual.
pub enum Skeleton<B: Backend> {
    /// `x += mixer(norm(x)); x += ffn(norm(x))`.
    PreNorm {
        /// Before the mixer.
        input: B::Weight,
        /// Before the feed-forward part.
        post: B::Weight,
    },
    /// Hyper-connections around both.
    Hyper {
        /// Around the mixer.
        mixer: HyperWeights<B>,
        /// Around the feed-forward part.
        ffn: HyperWeights<B>,
    },
}

/// A decoder layer, or the drafter's.
pub struct Layer<B: Backend> {
    /// Layer number in rounding keys.
    pub site: u16,
    /// n-gram embedding at its start.
    pub ple: Option<PleWeights<B>>,
    /// Residual wiring.
    pub skeleton: Skeleton<B>,
    /// Token mixer.
    pub mixer: Mixer<B>,
    /// Feed-forward part.
    pub ffn: FeedForward<B>,
}

/// What turns the last residual into the head's input.
pub enum End<B: Backend> {
    /// Zero-centred RMS norm.
    Norm(B::Weight),
    /// Hyper-connection mixer; no norm.
    Mixer(HyperWeights<B>),
}

/// The drafter's input projection.
pub enum DraftInput<B: Backend> {
    /// `fc(concat(embedding, hidden))`, `[H, 2H]`.
    Concat(B::Weight),
    /// `fc_embedding(embedding) + fc_hidden(stream)` for every stream.
    Streams {
        /// `[H, H]`.
        embedding: B::Weight,
        /// `[H, H]`.
        hidden: B::Weight,
    },
}

/// The model's own one-layer drafter.
pub struct Draft<B: Backend> {
    /// `[H]`.
    pub norm_embedding: B::Weight,
    /// `[H]`, or `[nH]` as one group.
    pub norm_hidden: B::Weight,
    /// Projection.
    pub input: DraftInput<B>,
    /// Its layer.
    pub layer: Layer<B>,
    /// Its end; the head is the target's.
    pub end: End<B>,
}

/// Output rows of the most frequent tokens, for drafts only.
pub struct Proposal<B: Backend> {
    /// `[rows, H]`.
    pub head: B::Weight,
    /// Token of each row.
    pub ids: Arc<Vec<u32>>,
}

/// A loaded model.
pub struct Model<B: Backend> {
    /// Arithmetic and state.
    pub backend: B,
    /// What the model is.
    pub config: ModelConfig,
    /// `[V, H]`.
    pub embed: B::Weight,
    /// `[V, H]`.
    pub head: B::Weight,
    /// Decoder layers.
    pub layers: Vec<Layer<B>>,
    /// End.
    pub end: End<B>,
    /// Drafter, if it was asked for.
    pub draft: Option<Draft<B>>,
    /// Proposal head, if it was asked for.
    pub proposal: Option<Proposal<B>>,
    /// State of its layers; pages, slots and KV format are the driver's to fill in.
    pub layout: StateLayout,
}

fn global(rows: &[RowKey], op: Op) -> At<'_> {
    At { site: Site { layer: Site::GLOBAL, op }, rows }
}

impl<B: Backend> Model<B> {
    fn streams(&self) -> usize {
        self.config.hyper.as_ref().map_or(1, |h| h.streams as usize)
    }

    /// Width of the residual (all streams).
    pub fn residual_width(&self) -> usize {
        self.config.residual_width() as usize
    }

    /// Width of what the drafter takes from the target: streams, or the normed hidden state.
    pub fn frontier_width(&self) -> usize {
        self.residual_width()
    }

    /// The residual before the first layer, from the round's tokens.
    pub fn begin(&mut self, rows: &[RowKey]) -> B::Buf {
        let e = self.backend.embed(&self.embed, Tokens::Current, global(rows, Op::Embed));
        match self.streams() {
            1 => e,
            n => self.backend.repeat(&e, n),
        }
    }

    /// One decoder layer. `tickets`: one a lane where the layer has an n-gram embedding.
    pub fn layer(
        &mut self,
        i: usize,
        rows: &[RowKey],
        residual: &mut B::Buf,
        tickets: &[NgramTicket],
        trace: Option<&mut Trace>,
    ) {
        run_layer(&mut self.backend, &self.layers[i], self.config.eps, rows, residual, tickets, trace);
    }

    /// Head input and FP32 logits `[chosen.len(), V]` of the chosen rows.
    pub fn finish(&mut self, rows: &[RowKey], residual: &B::Buf, chosen: &[usize]) -> (B::Buf, B::Buf) {
        let keys: Vec<RowKey> = chosen.iter().map(|i| rows[*i]).collect();
        let r = self.backend.take_rows(residual, chosen);
        let h = run_end(&mut self.backend, &self.end, self.config.eps, &r, global(&keys, Op::FinalNorm));
        let logits = self.backend.linear(&h, &self.head, Boundary::F32, global(&keys, Op::Head));
        (h, logits)
    }

    /// What the drafter takes from the target for every row: the streams, or the hidden state after the final norm.
    pub fn frontier(&mut self, rows: &[RowKey], residual: &B::Buf) -> B::Buf {
        match &self.end {
            End::Mixer(_) => self.backend.copy(residual),
            end => run_end(&mut self.backend, end, self.config.eps, residual, global(rows, Op::FinalNorm)),
        }
    }

    /// One drafter step in a drafter round: `hidden` is a frontier or the previous step's hidden state, the token after
    /// each row is the round's `next_ids`. Gives the next hidden state and the head's input of every row.
    pub fn draft_step(
        &mut self,
        rows: &[RowKey],
        hidden: &B::Buf,
        trace: Option<&mut Trace>,
    ) -> Option<(B::Buf, B::Buf)> {
        let d = self.draft.as_ref()?;
        let b = &mut self.backend;
        let eps = self.config.eps;
        let at = At { site: Site { layer: Site::DRAFTER, op: Op::Embed }, rows };
        let norm = NormSpec { groups: 1, zero_centred: true, eps };
        let e = b.embed(&self.embed, Tokens::Next, at);
        let e = b.norm(&e, &d.norm_embedding, norm, at.op(Op::MtpNormEmbedding));
        let z = b.norm(hidden, &d.norm_hidden, norm, at.op(Op::MtpNormHidden));
        let mut u = match &d.input {
            DraftInput::Concat(fc) => {
                let both = b.concat(&e, &z);
                b.linear(&both, fc, Boundary::Act, at.op(Op::MtpFc))
            }
            DraftInput::Streams { embedding, hidden } => {
                let a = b.linear(&e, embedding, Boundary::Act, at.op(Op::MtpFc));
                let mut u = b.linear(&z, hidden, Boundary::Act, at.op(Op::MtpFcHidden));
                b.add(&mut u, &a, at.op(Op::MtpAdd));
                u
            }
        };
        run_layer(b, &d.layer, eps, rows, &mut u, &[], trace);
        let h = run_end(b, &d.end, eps, &u, at.op(Op::FinalNorm));
        Some(match &d.end {
            End::Norm(_) => (b.copy(&h), h),
            End::Mixer(_) => (u, h),
        })
    }

    /// FP32 logits of drafter rows: of the vocabulary, or of the proposal head's rows where there is one.
    pub fn draft_logits(&mut self, rows: &[RowKey], head_input: &B::Buf) -> B::Buf {
        let at = At { site: Site { layer: Site::DRAFTER, op: Op::Head }, rows };
        let head = self.proposal.as_ref().map_or(&self.head, |p| &p.head);
        self.backend.linear(head_input, head, Boundary::F32, at)
    }
}

fn run_end<B: Backend>(b: &mut B, end: &End<B>, eps: f64, r: &B::Buf, at: At<'_>) -> B::Buf {
    match end {
        End::Norm(w) => b.norm(r, w, NormSpec { groups: 1, zero_centred: true, eps }, at.op(Op::FinalNorm)),
        End::Mixer(w) => b.hyper_mix(r, w, Op::FinalHyper, at).0,
    }
}

fn run_layer<B: Backend>(
    b: &mut B,
    layer: &Layer<B>,
    eps: f64,
    rows: &[RowKey],
    r: &mut B::Buf,
    tickets: &[NgramTicket],
    mut trace: Option<&mut Trace>,
) {
    let at = At { site: Site { layer: layer.site, op: Op::InputNorm }, rows };
    if let Some(ple) = &layer.ple {
        b.ple_block(r, tickets, ple, at);
    }
    match &layer.skeleton {
        Skeleton::PreNorm { input, post } => {
            let norm = NormSpec { groups: 1, zero_centred: true, eps };
            let x = b.norm(r, input, norm, at.op(Op::InputNorm));
            let y = run_mixer(b, &layer.mixer, &x, at, trace.as_deref_mut());
            b.add(r, &y, at.op(Op::MixerAdd));
            let x = b.norm(r, post, norm, at.op(Op::PostNorm));
            let y = run_ffn(b, &layer.ffn, &x, at, trace);
            b.add(r, &y, at.op(Op::FfnAdd));
        }
        Skeleton::Hyper { mixer, ffn } => {
            let (x, factor) = b.hyper_mix(r, mixer, Op::MixerHyper, at);
            let y = run_mixer(b, &layer.mixer, &x, at, trace.as_deref_mut());
            if let Some(f) = factor {
                b.hyper_inject(r, &y, &f, at.op(Op::MixerInject));
            }
            let (x, factor) = b.hyper_mix(r, ffn, Op::FfnHyper, at);
            let y = run_ffn(b, &layer.ffn, &x, at, trace);
            if let Some(f) = factor {
                b.hyper_inject(r, &y, &f, at.op(Op::FfnInject));
            }
        }
    }
}

fn run_mixer<B: Backend>(
    b: &mut B,
    m: &Mixer<B>,
    x: &B::Buf,
    at: At<'_>,
    trace: Option<&mut Trace>,
) -> B::Buf {
    match m {
        Mixer::Gdn(w) => b.gdn_block(x, w, at),
        Mixer::Attention(w) => b.attention_block(x, w, at, trace),
    }
}

fn run_ffn<B: Backend>(
    b: &mut B,
    f: &FeedForward<B>,
    x: &B::Buf,
    at: At<'_>,
    trace: Option<&mut Trace>,
) -> B::Buf {
    match f {
        FeedForward::Mlp(w) => b.mlp_block(x, w, at),
        FeedForward::Moe(w) => b.moe_block(x, w, at, trace),
    }
}
