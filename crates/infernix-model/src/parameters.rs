//! The logical parameter set of a model: what an artifact must bind, and where a checkpoint keeps it.

use crate::config::{Ffn, LayerKind, ModelConfig};
use std::fmt;

/// A part of a model that can be converted and loaded on its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Component {
    /// The language model.
    Text,
    /// The image tower.
    Vision,
    /// The model's own one-layer drafter.
    Mtp,
    /// A separately trained block drafter.
    Dflash,
    /// The same with convolutions and a candidate selector.
    Dflash2,
}

impl Component {
    /// Every component, in the order of an artifact's payload.
    pub const ALL: [Component; 5] = [Self::Text, Self::Mtp, Self::Vision, Self::Dflash, Self::Dflash2];

    /// Whether it is a separately trained block drafter.
    #[must_use]
    pub fn is_block_drafter(self) -> bool {
        matches!(self, Self::Dflash | Self::Dflash2)
    }

    /// Its name in the artifact and on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Text => "text",
            Self::Vision => "vision",
            Self::Mtp => "mtp",
            Self::Dflash => "dflash",
            Self::Dflash2 => "dflash2",
        }
    }

    /// The component of this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|c| c.name() == name)
    }
}

impl fmt::Display for Component {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

macro_rules! classes {
    ($($variant:ident $name:literal $doc:literal),* $(,)?) => {
        /// What a parameter is for. Recipes select by these names.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Class { $(#[doc = $doc] $variant),* }

        impl Class {
            /// Every class, in the order of a forward pass.
            pub const ALL: &'static [Class] = &[$(Class::$variant),*];

            /// The name recipes use.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $(Class::$variant => $name),* }
            }

            /// The class of this name.
            #[must_use]
            pub fn from_name(name: &str) -> Option<Self> {
                match name { $($name => Some(Class::$variant),)* _ => None }
            }
        }
    };
}

classes! {
    Embed "embed" "Token embedding.",
    Head "head" "Output projection to the vocabulary.",
    Norm "norm" "RMS norm of a block or of the whole model.",
    HcNorm "hc.norm" "Norm of a hyper-connection mixer.",
    HcDown "hc.down" "Down projection of a hyper-connection mixer.",
    HcUp "hc.up" "Up projection of a hyper-connection mixer.",
    HcInject "hc.inject" "Inject weights of a hyper-connection mixer.",
    FinalMixerNorm "final_mixer.norm" "Norm of the mixer before the head.",
    FinalMixerDown "final_mixer.down" "Down projection of the mixer before the head.",
    FinalMixerUp "final_mixer.up" "Up projection of the mixer before the head.",
    GdnQ "gdn.q" "Delta-net query rows.",
    GdnK "gdn.k" "Delta-net key rows.",
    GdnV "gdn.v" "Delta-net value rows.",
    GdnZ "gdn.z" "Delta-net output gate.",
    GdnA "gdn.a" "Delta-net decay projection.",
    GdnB "gdn.b" "Delta-net write-strength projection.",
    GdnO "gdn.o" "Delta-net output projection.",
    GdnConv "gdn.conv" "Delta-net causal convolution.",
    GdnALog "gdn.a_log" "Delta-net log decay.",
    GdnDtBias "gdn.dt_bias" "Delta-net time-step bias.",
    GdnNorm "gdn.norm" "Delta-net output norm.",
    AttnQ "attn.q" "Attention query rows.",
    AttnGate "attn.gate" "Attention output-gate rows.",
    AttnK "attn.k" "Attention key projection.",
    AttnV "attn.v" "Attention value projection.",
    AttnO "attn.o" "Attention output projection.",
    AttnNorm "attn.norm" "Head norms of query and key.",
    IndexerQ "indexer.q" "Indexer query rows.",
    IndexerK "indexer.k" "Indexer key rows.",
    IndexerNorm "indexer.norm" "Head norms of the indexer.",
    MlpGate "mlp.gate" "Dense MLP gate projection.",
    MlpUp "mlp.up" "Dense MLP up projection.",
    MlpDown "mlp.down" "Dense MLP down projection.",
    Router "moe.router" "Expert router.",
    SharedGate "moe.shared_gate" "Gate of the shared expert.",
    SharedExpertGate "moe.shared.gate" "Shared expert gate projection.",
    SharedExpertUp "moe.shared.up" "Shared expert up projection.",
    SharedExpertDown "moe.shared.down" "Shared expert down projection.",
    Experts "moe.experts" "Routed experts of one layer.",
    ExpertInputScales "moe.expert_input_scales" "Calibrated activation scales of the routed experts.",
    PleKey "ple.key" "N-gram key projection.",
    PleValue "ple.value" "N-gram value projection.",
    PleNorm "ple.norm" "N-gram norms.",
    PleConv "ple.conv" "N-gram dilated convolution.",
    NgramScale "ple.ngram_scale" "Scale of an FP8 n-gram table.",
    NgramTable "ple.ngram_table" "N-gram table rows, stored in a volume.",
    MtpNorm "mtp.norm" "Input norms of the drafter.",
    MtpFc "mtp.fc" "Input projections of the drafter.",
    DflashFc "dflash.fc" "Projection of the target's residuals into a block drafter.",
    DflashNorm "dflash.norm" "Norms of a block drafter.",
    DflashConv "dflash.conv" "Base kernels of a block drafter's convolutions.",
    DflashConvProjection "dflash.conv_projection" "Projections to a block drafter's dynamic kernels.",
    DflashSelector "dflash.selector" "Projection of the candidate selector.",
    DflashCodebook "dflash.codebook" "Codebooks of the candidate selector.",
    VisionPatch "vision.patch" "Patch embedding.",
    VisionPositions "vision.positions" "Learned position table.",
    VisionNorm "vision.norm" "Vision layer norms.",
    VisionAttn "vision.attn" "Vision query, key and value projections.",
    VisionProj "vision.proj" "Vision attention output projections.",
    VisionFc1 "vision.fc1" "First vision MLP projections.",
    VisionFc2 "vision.fc2" "Second vision MLP projections.",
    VisionMerger "vision.merger" "Patch merger projections.",
    VisionBias "vision.bias" "Vision biases.",
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Which rows of a source tensor (first axis) form a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rows {
    /// All of them.
    All,
    /// `begin .. begin + count`.
    Range {
        /// First row.
        begin: u64,
        /// Number of rows.
        count: u64,
    },
    /// Of each head's `stride` rows, `take` rows from `begin`.
    PerHead {
        /// Number of heads.
        heads: u64,
        /// Rows of one head in the source.
        stride: u64,
        /// First row taken within a head.
        begin: u64,
        /// Rows taken per head.
        take: u64,
    },
}

/// Where a checkpoint keeps a parameter. Names are full tensor names; quantized tensors carry their scales beside them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// Rows of one tensor, whose name is `name` (e.g. `...q_proj.weight`; a packed tensor replaces the last segment).
    Tensor {
        /// Full tensor name.
        name: String,
        /// Shape of the whole source tensor.
        shape: Vec<u64>,
        /// Rows taken.
        rows: Rows,
    },
    /// Routed experts below `prefix` (`...mlp.experts`): fused `gate_up_proj` [E,2I,H] and `down_proj` [E,H,I], or
    /// `{e}.{gate,up,down}_proj.weight`.
    Experts {
        /// Tensor name prefix without a trailing dot.
        prefix: String,
    },
    /// `input_scale` scalars of the experts below `prefix`; present only where the checkpoint calibrated activations.
    ExpertInputScales {
        /// Tensor name prefix without a trailing dot.
        prefix: String,
    },
    /// The scalar scale of an FP8 n-gram table; absent for other tables.
    NgramScale {
        /// Full tensor name.
        name: String,
    },
    /// An n-gram table: parts `{prefix}.shard_{k}.weight` for k below `parts`, or one tensor `{prefix}.weight`.
    NgramTable {
        /// Tensor name prefix without a trailing dot.
        prefix: String,
        /// Tensor name prefix of the int64 hash buffers.
        buffers: String,
        /// Number of parts announced by the configuration.
        parts: u64,
    },
}

/// One logical parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parameter {
    /// Name in the artifact's bindings.
    pub name: String,
    /// Component it belongs to.
    pub component: Component,
    /// What it is for.
    pub class: Class,
    /// Layer index, if it belongs to one (the drafter's layer is 0).
    pub layer: Option<usize>,
    /// Logical shape. Experts: [E,H,I]. Convolutions: [taps, channels] is *not* applied here; they keep [C, taps].
    pub shape: Vec<u64>,
    /// Where a checkpoint keeps it.
    pub source: Source,
    /// Whether a checkpoint may lack it without being broken.
    pub optional: bool,
}

/// How a checkpoint spells the prefix of the language model's tensors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NameStyle {
    /// `model.language_model.` or `model.`.
    pub text_prefix: String,
}

/// The prefix under which `exists` finds the token embedding; the released form when neither is there.
pub fn source_prefix(exists: impl Fn(&str) -> bool) -> NameStyle {
    let found = ["model.language_model.", "model.", "language_model.model."]
        .into_iter()
        .find(|p| exists(&format!("{p}embed_tokens.weight")));
    NameStyle { text_prefix: found.unwrap_or("model.language_model.").to_owned() }
}

/// Names of the two rank-2 parents that hold experts which are not stored as one bank: gate and up rows
/// `[E*2I, H]` (expert-major, gate rows first) and down rows `[E*H, I]`.
#[must_use]
pub fn expert_parent_names(experts: &str) -> [String; 2] {
    [format!("{experts}/gate_up"), format!("{experts}/down")]
}

/// All logical parameters of the given components, in a fixed order.
#[must_use]
pub fn parameters(config: &ModelConfig, style: &NameStyle, components: &[Component]) -> Vec<Parameter> {
    let mut list = Builder { config, out: Vec::new(), component: Component::Text, layer: None };
    if components.contains(&Component::Text) {
        list.text(&style.text_prefix);
    }
    if components.contains(&Component::Mtp) && config.mtp {
        list.mtp();
    }
    if components.contains(&Component::Vision) {
        list.vision();
    }
    list.out
}

struct Builder<'c> {
    config: &'c ModelConfig,
    out: Vec<Parameter>,
    component: Component,
    layer: Option<usize>,
}

impl Builder<'_> {
    fn push(&mut self, name: String, class: Class, shape: Vec<u64>, source: Source, optional: bool) {
        self.out.push(Parameter {
            name,
            component: self.component,
            class,
            layer: self.layer,
            shape,
            source,
            optional,
        });
    }

    /// A parameter that is a whole source tensor.
    fn whole(&mut self, name: impl Into<String>, class: Class, tensor: impl Into<String>, shape: &[u64]) {
        let source = Source::Tensor { name: tensor.into(), shape: shape.to_vec(), rows: Rows::All };
        self.push(name.into(), class, shape.to_vec(), source, false);
    }

    /// Parameters that share a source tensor as consecutive row blocks.
    fn blocks(&mut self, tensor: &str, tail: &[u64], parts: &[(String, Class, u64)]) {
        let total: u64 = parts.iter().map(|p| p.2).sum();
        let with_tail = |rows: u64| std::iter::once(rows).chain(tail.iter().copied()).collect::<Vec<_>>();
        let mut begin = 0;
        for (name, class, count) in parts {
            let rows = Rows::Range { begin, count: *count };
            let source = Source::Tensor { name: tensor.to_owned(), shape: with_tail(total), rows };
            self.push(name.clone(), *class, with_tail(*count), source, false);
            begin += count;
        }
    }

    fn text(&mut self, t: &str) {
        let c = self.config;
        self.component = Component::Text;
        self.whole("text/embed", Class::Embed, format!("{t}embed_tokens.weight"), &[c.vocab, c.hidden]);
        for (i, kind) in c.layers.iter().enumerate() {
            self.layer = Some(i);
            let (name, tensor) = (format!("text/layers/{i}"), format!("{t}layers.{i}"));
            if c.ple_table(i).is_some() {
                self.ple(&name, &tensor);
            }
            self.block(&name, &tensor, *kind);
        }
        self.layer = None;
        if c.hyper.is_some() {
            self.final_mixer("text/final_mixer", &format!("{t}hyper_connection_mixer"));
        } else {
            self.whole("text/norm", Class::Norm, format!("{t}norm.weight"), &[c.hidden]);
        }
        self.whole("text/head", Class::Head, "lm_head.weight", &[c.vocab, c.hidden]);
    }

    fn mtp(&mut self) {
        let c = self.config;
        let (h, width) = (c.hidden, c.residual_width());
        self.component = Component::Mtp;
        self.layer = None;
        self.whole("mtp/norm_embedding", Class::MtpNorm, "mtp.pre_fc_norm_embedding.weight", &[h]);
        self.whole("mtp/norm_hidden", Class::MtpNorm, "mtp.pre_fc_norm_hidden.weight", &[width]);
        if c.hyper.is_some() {
            self.whole("mtp/fc_embedding", Class::MtpFc, "mtp.fc_embedding.weight", &[h, h]);
            self.whole("mtp/fc_hidden", Class::MtpFc, "mtp.fc_hidden.weight", &[h, h]);
        } else {
            self.whole("mtp/fc", Class::MtpFc, "mtp.fc.weight", &[h, 2 * h]);
        }
        self.layer = Some(0);
        self.block("mtp/layer", "mtp.layers.0", LayerKind::Attention);
        self.layer = None;
        if c.hyper.is_some() {
            self.final_mixer("mtp/final_mixer", "mtp.hyper_connection_mixer");
        } else {
            self.whole("mtp/norm", Class::Norm, "mtp.norm.weight", &[h]);
        }
    }

    fn block(&mut self, name: &str, tensor: &str, kind: LayerKind) {
        let h = self.config.hidden;
        if self.config.hyper.is_some() {
            self.hyper(&format!("{name}/attn_hc"), &format!("{tensor}.attn_hyper_connection"));
        } else {
            self.whole(
                format!("{name}/input_norm"),
                Class::Norm,
                format!("{tensor}.input_layernorm.weight"),
                &[h],
            );
        }
        match kind {
            LayerKind::Gdn => self.gdn(&format!("{name}/gdn"), &format!("{tensor}.linear_attn")),
            LayerKind::Attention => self.attention(&format!("{name}/attn"), &format!("{tensor}.self_attn")),
        }
        if self.config.hyper.is_some() {
            self.hyper(&format!("{name}/mlp_hc"), &format!("{tensor}.mlp_hyper_connection"));
        } else {
            let source = format!("{tensor}.post_attention_layernorm.weight");
            self.whole(format!("{name}/post_norm"), Class::Norm, source, &[h]);
        }
        self.ffn(name, &format!("{tensor}.mlp"));
    }

    fn hyper(&mut self, name: &str, tensor: &str) {
        let Some(hyper) = &self.config.hyper else { return };
        let (width, rank, streams) = (self.config.residual_width(), hyper.rank, hyper.streams);
        self.whole(format!("{name}/norm"), Class::HcNorm, format!("{tensor}.hc_norm.weight"), &[width]);
        let down = format!("{tensor}.input_mix_weight_down.weight");
        self.whole(format!("{name}/down"), Class::HcDown, down, &[rank, width]);
        self.whole(
            format!("{name}/up"),
            Class::HcUp,
            format!("{tensor}.input_mix_weight_up.weight"),
            &[width, rank],
        );
        let inject = format!("{tensor}.block_inject_weight.weight");
        self.whole(format!("{name}/inject"), Class::HcInject, inject, &[streams, width]);
    }

    fn final_mixer(&mut self, name: &str, tensor: &str) {
        let Some(hyper) = &self.config.hyper else { return };
        let (width, rank) = (self.config.residual_width(), hyper.rank);
        self.whole(
            format!("{name}/norm"),
            Class::FinalMixerNorm,
            format!("{tensor}.hc_norm.weight"),
            &[width],
        );
        let down = format!("{tensor}.input_mix_weight_down.weight");
        self.whole(format!("{name}/down"), Class::FinalMixerDown, down, &[rank, width]);
        let up = format!("{tensor}.input_mix_weight_up.weight");
        self.whole(format!("{name}/up"), Class::FinalMixerUp, up, &[width, rank]);
    }

    fn gdn(&mut self, name: &str, tensor: &str) {
        let h = self.config.hidden;
        let g = self.config.gdn.clone();
        let (keys, values) = (g.key_heads * g.key_dim, g.value_heads * g.value_dim);
        self.blocks(
            &format!("{tensor}.in_proj_qkv.weight"),
            &[h],
            &[
                (format!("{name}/q"), Class::GdnQ, keys),
                (format!("{name}/k"), Class::GdnK, keys),
                (format!("{name}/v"), Class::GdnV, values),
            ],
        );
        self.whole(format!("{name}/z"), Class::GdnZ, format!("{tensor}.in_proj_z.weight"), &[values, h]);
        self.whole(
            format!("{name}/a"),
            Class::GdnA,
            format!("{tensor}.in_proj_a.weight"),
            &[g.value_heads, h],
        );
        self.whole(
            format!("{name}/b"),
            Class::GdnB,
            format!("{tensor}.in_proj_b.weight"),
            &[g.value_heads, h],
        );
        let conv = [g.channels(), 1, g.conv_kernel];
        self.whole(format!("{name}/conv"), Class::GdnConv, format!("{tensor}.conv1d.weight"), &conv);
        self.whole(format!("{name}/a_log"), Class::GdnALog, format!("{tensor}.A_log"), &[g.value_heads]);
        self.whole(
            format!("{name}/dt_bias"),
            Class::GdnDtBias,
            format!("{tensor}.dt_bias"),
            &[g.value_heads],
        );
        self.whole(format!("{name}/norm"), Class::GdnNorm, format!("{tensor}.norm.weight"), &[g.value_dim]);
        self.whole(format!("{name}/o"), Class::GdnO, format!("{tensor}.out_proj.weight"), &[h, values]);
    }

    fn attention(&mut self, name: &str, tensor: &str) {
        let h = self.config.hidden;
        let a = self.config.attention.clone();
        let (d, queries, keys) = (a.head_dim, a.heads * a.head_dim, a.kv_heads * a.head_dim);
        for (part, class, begin) in [("q", Class::AttnQ, 0), ("gate", Class::AttnGate, d)] {
            let rows = Rows::PerHead { heads: a.heads, stride: 2 * d, begin, take: d };
            let source =
                Source::Tensor { name: format!("{tensor}.q_proj.weight"), shape: vec![2 * queries, h], rows };
            self.push(format!("{name}/{part}"), class, vec![queries, h], source, false);
        }
        self.whole(format!("{name}/k"), Class::AttnK, format!("{tensor}.k_proj.weight"), &[keys, h]);
        self.whole(format!("{name}/v"), Class::AttnV, format!("{tensor}.v_proj.weight"), &[keys, h]);
        self.whole(format!("{name}/o"), Class::AttnO, format!("{tensor}.o_proj.weight"), &[h, queries]);
        self.whole(format!("{name}/q_norm"), Class::AttnNorm, format!("{tensor}.q_norm.weight"), &[d]);
        self.whole(format!("{name}/k_norm"), Class::AttnNorm, format!("{tensor}.k_norm.weight"), &[d]);
        if let Some(q) = self.config.qsa.clone() {
            self.blocks(
                &format!("{tensor}.indexer.index_qk_proj.weight"),
                &[h],
                &[
                    (format!("{name}/indexer/q"), Class::IndexerQ, q.heads * q.head_dim),
                    (format!("{name}/indexer/k"), Class::IndexerK, q.head_dim),
                ],
            );
            for part in ["q", "k"] {
                let source = format!("{tensor}.indexer.{part}_layernorm.weight");
                self.whole(format!("{name}/indexer/{part}_norm"), Class::IndexerNorm, source, &[q.head_dim]);
            }
        }
    }

    fn ffn(&mut self, name: &str, tensor: &str) {
        let h = self.config.hidden;
        let moe = match self.config.ffn.clone() {
            Ffn::Dense { intermediate } => {
                self.swiglu(
                    &format!("{name}/mlp"),
                    tensor,
                    intermediate,
                    [Class::MlpGate, Class::MlpUp, Class::MlpDown],
                );
                return;
            }
            Ffn::Moe(moe) => moe,
        };
        let name = format!("{name}/moe");
        self.whole(
            format!("{name}/router"),
            Class::Router,
            format!("{tensor}.gate.weight"),
            &[moe.experts, h],
        );
        let gate = format!("{tensor}.shared_expert_gate.weight");
        self.whole(format!("{name}/shared_gate"), Class::SharedGate, gate, &[1, h]);
        self.swiglu(
            &format!("{name}/shared"),
            &format!("{tensor}.shared_expert"),
            moe.shared_intermediate,
            [Class::SharedExpertGate, Class::SharedExpertUp, Class::SharedExpertDown],
        );
        let prefix = format!("{tensor}.experts");
        let shape = vec![moe.experts, h, moe.intermediate];
        let source = Source::Experts { prefix: prefix.clone() };
        self.push(format!("{name}/experts"), Class::Experts, shape, source, false);
        let source = Source::ExpertInputScales { prefix };
        self.push(
            format!("{name}/expert_input_scales"),
            Class::ExpertInputScales,
            vec![moe.experts, 3],
            source,
            true,
        );
    }

    fn swiglu(&mut self, name: &str, tensor: &str, width: u64, classes: [Class; 3]) {
        let h = self.config.hidden;
        for (part, class, shape) in [
            ("gate", classes[0], [width, h]),
            ("up", classes[1], [width, h]),
            ("down", classes[2], [h, width]),
        ] {
            self.whole(format!("{name}/{part}"), class, format!("{tensor}.{part}_proj.weight"), &shape);
        }
    }

    fn ple(&mut self, name: &str, tensor: &str) {
        let Some(p) = self.config.ple.clone() else { return };
        let (h, width) = (self.config.hidden, self.config.residual_width());
        let (name, tensor) = (format!("{name}/ple"), format!("{tensor}.ple"));
        self.whole(
            format!("{name}/key"),
            Class::PleKey,
            format!("{tensor}.key_proj.weight"),
            &[width, p.embed_dim],
        );
        self.whole(
            format!("{name}/value"),
            Class::PleValue,
            format!("{tensor}.value_proj.weight"),
            &[h, p.embed_dim],
        );
        for part in ["norm_key", "norm_query", "norm_conv"] {
            self.whole(format!("{name}/{part}"), Class::PleNorm, format!("{tensor}.{part}.weight"), &[width]);
        }
        let conv = [width, 1, p.conv_kernel];
        self.whole(format!("{name}/conv"), Class::PleConv, format!("{tensor}.conv1d.weight"), &conv);
        let buffers = format!("{tensor}.ple_embedding");
        let prefix = format!("{buffers}.ngram_embedding");
        let source = Source::NgramScale { name: format!("{prefix}.weight_scale") };
        self.push(format!("{name}/ngram_scale"), Class::NgramScale, vec![1], source, true);
        let table = self.layer.and_then(|l| self.config.ple_table(l)).unwrap_or(0);
        let rows = crate::ngram::constants(&p, self.config.vocab).map_or(0, |c| c[table].rows);
        let source = Source::NgramTable { prefix, buffers, parts: p.parts };
        self.push(format!("{name}/ngram_table"), Class::NgramTable, vec![rows, p.row_width()], source, false);
    }

    fn vision(&mut self) {
        let Some(v) = self.config.vision.clone() else { return };
        self.component = Component::Vision;
        self.layer = None;
        let t = "model.visual";
        let patch = [v.hidden, v.channels, v.temporal_patch, v.patch, v.patch];
        self.biased("vision/patch", Class::VisionPatch, &format!("{t}.patch_embed.proj"), &patch);
        self.whole(
            "vision/positions",
            Class::VisionPositions,
            format!("{t}.pos_embed.weight"),
            &[v.positions, v.hidden],
        );
        for i in 0..v.depth {
            self.layer = Some(i as usize);
            let (name, tensor) = (format!("vision/blocks/{i}"), format!("{t}.blocks.{i}"));
            for norm in ["norm1", "norm2"] {
                self.biased(
                    &format!("{name}/{norm}"),
                    Class::VisionNorm,
                    &format!("{tensor}.{norm}"),
                    &[v.hidden],
                );
            }
            for (suffix, class, tail) in
                [("weight", Class::VisionAttn, &[v.hidden][..]), ("bias", Class::VisionBias, &[][..])]
            {
                let parts = ["q", "k", "v"].map(|p| (format!("{name}/attn/{p}/{suffix}"), class, v.hidden));
                self.blocks(&format!("{tensor}.attn.qkv.{suffix}"), tail, &parts);
            }
            let square = [v.hidden, v.hidden];
            self.biased(
                &format!("{name}/attn/proj"),
                Class::VisionProj,
                &format!("{tensor}.attn.proj"),
                &square,
            );
            let fc1 = [v.intermediate, v.hidden];
            self.biased(
                &format!("{name}/mlp/fc1"),
                Class::VisionFc1,
                &format!("{tensor}.mlp.linear_fc1"),
                &fc1,
            );
            let fc2 = [v.hidden, v.intermediate];
            self.biased(
                &format!("{name}/mlp/fc2"),
                Class::VisionFc2,
                &format!("{tensor}.mlp.linear_fc2"),
                &fc2,
            );
        }
        self.layer = None;
        let merged = v.hidden * v.merge * v.merge;
        self.biased("vision/merger/norm", Class::VisionNorm, &format!("{t}.merger.norm"), &[v.hidden]);
        let fc1 = [merged, merged];
        self.biased("vision/merger/fc1", Class::VisionMerger, &format!("{t}.merger.linear_fc1"), &fc1);
        let fc2 = [v.out_hidden, merged];
        self.biased("vision/merger/fc2", Class::VisionMerger, &format!("{t}.merger.linear_fc2"), &fc2);
    }

    fn biased(&mut self, name: &str, class: Class, tensor: &str, shape: &[u64]) {
        self.whole(format!("{name}/weight"), class, format!("{tensor}.weight"), shape);
        let class = if class == Class::VisionNorm { class } else { Class::VisionBias };
        self.whole(format!("{name}/bias"), class, format!("{tensor}.bias"), &shape[..1]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};
    use std::collections::HashSet;

    /// The released Flash-Next geometry (model-math 10.1), built on the demo's keys.
    fn flash_next() -> ModelConfig {
        let text = include_str!("../../../models/flash-demo-nvfp4/config.json");
        let mut v: Value = serde_json::from_str(text).unwrap();
        let t = v["text_config"].as_object_mut().unwrap();
        t.remove("layer_types");
        for (key, value) in [
            ("hidden_size", 2560),
            ("num_hidden_layers", 48),
            ("num_attention_heads", 24),
            ("num_key_value_heads", 2),
            ("linear_num_key_heads", 16),
            ("linear_num_value_heads", 48),
            ("num_experts", 512),
            ("num_experts_per_tok", 10),
            ("moe_intermediate_size", 640),
            ("shared_expert_intermediate_size", 640),
            ("vocab_size", 248_320),
            ("hc_lowrank", 320),
            ("ple_embed_dim", 2560),
            ("ngram_vocab_size_base", 20_000_000),
            ("indexer_n_heads", 4),
            ("indexer_budget", 2048),
            ("indexer_compress_ratio", 4),
        ] {
            t.insert(key.into(), json!(value));
        }
        v["vision_config"] = json!({"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16,
            "num_position_embeddings": 2304, "patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2,
            "out_hidden_size": 2560});
        ModelConfig::from_json(&v).unwrap()
    }

    #[test]
    fn flash_next_has_the_published_parameter_counts() {
        let style = source_prefix(|_| false);
        let all = parameters(&flash_next(), &style, &[Component::Text, Component::Mtp, Component::Vision]);
        let count = |f: &dyn Fn(&Parameter) -> bool| all.iter().filter(|p| f(p)).count();
        let plain =
            |p: &Parameter| !matches!(p.class, Class::Experts | Class::ExpertInputScales | Class::NgramTable);
        // The published proof of the exact recipe compares 1,616 tensors; 20 more of the drafter are re-quantized.
        assert_eq!(count(&plain), 1616 + 20);
        assert_eq!(count(&|p| p.component == Component::Text && plain(p)), 1164);
        assert_eq!(count(&|p| p.component == Component::Vision), 441);
        let dense8 = [
            Class::GdnQ,
            Class::GdnK,
            Class::GdnV,
            Class::GdnZ,
            Class::GdnO,
            Class::AttnO,
            Class::SharedExpertGate,
            Class::SharedExpertUp,
            Class::SharedExpertDown,
            Class::HcDown,
            Class::HcUp,
            Class::HcInject,
            Class::PleKey,
            Class::PleValue,
            Class::FinalMixerDown,
            Class::FinalMixerUp,
            Class::Head,
        ];
        assert_eq!(count(&|p| p.component == Component::Text && dense8.contains(&p.class)), 629);
        let names: HashSet<_> = all.iter().map(|p| &p.name).collect();
        assert_eq!(names.len(), all.len(), "logical names are unique");
        let table = all.iter().find(|p| p.class == Class::NgramTable).unwrap();
        assert_eq!(table.shape, [320_001_536, 160]);
    }

    #[test]
    fn class_names_round_trip() {
        for &class in Class::ALL {
            assert_eq!(Class::from_name(class.name()), Some(class));
        }
    }
}
