//! `ModelConfig`: a Hugging Face `config.json` (or the text configuration stored in an artifact), checked once, so that
//! nothing downstream has to doubt a dimension.

use crate::ModelError;
use crate::json::Object;
use serde_json::{Map, Value, json};

/// The three block skeletons that the engine knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Architecture {
    /// Qwen3.8-Flash-Next: hyper-connections, QSA, n-gram embedding, mixture of experts.
    Qwen4Exp,
    /// Qwen3.6/3.8-27B: gated delta net and gated attention, dense MLP.
    Qwen35,
    /// 35B-A3B and 122B-A10B: the same with a mixture of experts.
    Qwen35Moe,
}

impl Architecture {
    /// The `model_type` of the text configuration.
    #[must_use]
    pub fn model_type(self) -> &'static str {
        match self {
            Self::Qwen4Exp => "qwen4_exp_text",
            Self::Qwen35 => "qwen3_5_text",
            Self::Qwen35Moe => "qwen3_5_moe_text",
        }
    }

    fn from_model_type(name: &str) -> Option<Self> {
        match name.strip_suffix("_text").unwrap_or(name) {
            "qwen4_exp" | "qwen3_8_flash_next" => Some(Self::Qwen4Exp),
            "qwen3_5" => Some(Self::Qwen35),
            "qwen3_5_moe" => Some(Self::Qwen35Moe),
            _ => None,
        }
    }

    fn class_name(self) -> &'static str {
        match self {
            Self::Qwen4Exp => "Qwen4ExpForConditionalGeneration",
            Self::Qwen35 => "Qwen3_5ForConditionalGeneration",
            Self::Qwen35Moe => "Qwen3_5MoeForConditionalGeneration",
        }
    }
}

/// The token mixer of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LayerKind {
    /// Gated delta net.
    Gdn,
    /// Gated full attention; in `qwen4_exp` restricted by QSA.
    Attention,
}

/// Grouped-query attention dimensions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttentionConfig {
    /// Query heads.
    pub heads: u64,
    /// Key and value heads; divides `heads`.
    pub kv_heads: u64,
    /// Width of a head.
    pub head_dim: u64,
}

/// Rotary position embedding.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeConfig {
    /// Frequency base.
    pub theta: f64,
    /// Rotated leading dimensions of a head, even.
    pub rotary_dim: u64,
    /// Frequencies per axis (t, h, w) of the interleaved multimodal form; they sum to `rotary_dim / 2`.
    pub sections: [u64; 3],
    /// Context extension, off in the released configurations.
    pub yarn: Option<Yarn>,
}

/// YaRN parameters (model-math 2.3).
#[derive(Debug, Clone, PartialEq)]
pub struct Yarn {
    /// Extension factor, at least 1.
    pub factor: f64,
    /// Context length the model was trained for.
    pub original_max_positions: u64,
}

/// Activation of a gated-delta-net output gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GateActivation {
    /// `x * sigmoid(x)`, the 3.5 family.
    Silu,
    /// `sigmoid(x)`, Flash-Next.
    Sigmoid,
}

/// Gated delta net dimensions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GdnConfig {
    /// Query and key heads.
    pub key_heads: u64,
    /// Value heads; a multiple of `key_heads`. Value head j reads key head `j / (value_heads / key_heads)`.
    pub value_heads: u64,
    /// Width of a query or key head.
    pub key_dim: u64,
    /// Width of a value head.
    pub value_dim: u64,
    /// Taps of the causal convolution.
    pub conv_kernel: u64,
    /// Activation of the output gate.
    pub gate: GateActivation,
}

impl GdnConfig {
    /// Rows of the fused q|k|v projection, which are also the convolution's channels.
    #[must_use]
    pub fn channels(&self) -> u64 {
        2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
    }
}

/// The feed-forward part of a layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ffn {
    /// SwiGLU of this width.
    Dense {
        /// Width of the hidden layer.
        intermediate: u64,
    },
    /// Routed experts with one shared expert.
    Moe(MoeConfig),
}

/// Mixture-of-experts dimensions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MoeConfig {
    /// Experts of a layer.
    pub experts: u64,
    /// Experts chosen per token.
    pub top_k: u64,
    /// Width of a routed expert.
    pub intermediate: u64,
    /// Width of the shared expert.
    pub shared_intermediate: u64,
}

/// Hyper-connections (model-math 3).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HyperConfig {
    /// Residual streams.
    pub streams: u64,
    /// Rank of the mixing weights.
    pub rank: u64,
}

/// Sparse attention indexer (model-math 2.4).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QsaConfig {
    /// Indexer query heads.
    pub heads: u64,
    /// Width of an indexer head.
    pub head_dim: u64,
    /// Tokens a query may attend to through selected blocks.
    pub budget: u64,
    /// Tokens per block.
    pub ratio: u64,
}

impl QsaConfig {
    /// Blocks a query selects at most.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        self.budget / self.ratio
    }
}

/// Per-layer n-gram embedding (model-math 4).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PleConfig {
    /// Decoder layers that carry one, 0-based and ascending (the configuration counts from 1).
    pub layers: Vec<u64>,
    /// Width of the concatenated rows of a position.
    pub embed_dim: u64,
    /// Taps of the dilated convolution; the dilation is `ngram_size`.
    pub conv_kernel: u64,
    /// Longest n-gram.
    pub ngram_size: u64,
    /// Hash heads of each n-gram order.
    pub heads_per_ngram: u64,
    /// Smallest allowed prime of a head.
    pub base: u64,
    /// Row counts are padded to a multiple of this.
    pub divisor: u64,
    /// Seed of the multipliers.
    pub seed: u64,
    /// Token that closes a segment.
    pub eos: u32,
    /// Tensors the table is cut into in a checkpoint.
    pub parts: u64,
}

impl PleConfig {
    /// Rows looked up per position.
    #[must_use]
    pub fn heads(&self) -> u64 {
        (self.ngram_size - 1) * self.heads_per_ngram
    }

    /// Values of one table row.
    #[must_use]
    pub fn row_width(&self) -> u64 {
        self.embed_dim / self.heads()
    }
}

/// Vision tower dimensions (model-math 8).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VisionConfig {
    /// Transformer blocks.
    pub depth: u64,
    /// Width.
    pub hidden: u64,
    /// Width of the MLP.
    pub intermediate: u64,
    /// Attention heads.
    pub heads: u64,
    /// Entries of the learned position table (a square).
    pub positions: u64,
    /// Colour channels.
    pub channels: u64,
    /// Patch edge in pixels.
    pub patch: u64,
    /// Frames per patch.
    pub temporal_patch: u64,
    /// Patches merged per axis.
    pub merge: u64,
    /// Output width, the text model's hidden size.
    pub out_hidden: u64,
}

/// A checked model configuration.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// Block skeleton.
    pub architecture: Architecture,
    /// Width of the residual stream.
    pub hidden: u64,
    /// Rows of the embedding and the head, padding included.
    pub vocab: u64,
    /// Token mixer of each layer.
    pub layers: Vec<LayerKind>,
    /// Epsilon of every RMS norm.
    pub eps: f64,
    /// Longest supported context in tokens.
    pub max_positions: u64,
    /// Attention of the attention layers and of the drafter.
    pub attention: AttentionConfig,
    /// Rotary embedding of attention, indexer and drafter.
    pub rope: RopeConfig,
    /// Gated delta net of the other layers.
    pub gdn: GdnConfig,
    /// Feed-forward part, equal in all layers and the drafter.
    pub ffn: Ffn,
    /// Hyper-connections, `qwen4_exp` only.
    pub hyper: Option<HyperConfig>,
    /// Sparse attention, `qwen4_exp` only.
    pub qsa: Option<QsaConfig>,
    /// N-gram embedding, `qwen4_exp` only.
    pub ple: Option<PleConfig>,
    /// Whether the configuration announces a drafter (its tensors may still be absent).
    pub mtp: bool,
    /// Vision tower, if described.
    pub vision: Option<VisionConfig>,
    /// The text configuration as found, for storage in an artifact.
    raw_text: Map<String, Value>,
}

impl ModelConfig {
    /// Reads a checkpoint's `config.json`, or the flat text configuration of an artifact.
    ///
    /// # Errors
    /// Names the first key that is missing, out of range or contradicts another.
    pub fn from_json(root: &Value) -> Result<Self, ModelError> {
        let top = Object::new(root, "")?;
        let nested = top.object("text_config")?;
        let architecture = architecture(&top, nested.as_ref())?;
        let (text, raw) = match &nested {
            Some(inner) => (inner, &root["text_config"]),
            None => (&top, root),
        };
        let raw_text = raw.as_object().cloned().unwrap_or_default();
        let hidden = text.count("hidden_size")?;
        let flash = architecture == Architecture::Qwen4Exp;
        let tied = text.bool_or("tie_word_embeddings", top.bool_or("tie_word_embeddings", false)?)?;
        if tied {
            return Err(text.reject("tie_word_embeddings", "false (no supported model ties its head)"));
        }
        if text.bool_or("attention_bias", false)? {
            return Err(text.reject("attention_bias", "false"));
        }
        match text.str_opt("hidden_act")? {
            None | Some("silu") => {}
            Some(_) => return Err(text.reject("hidden_act", "\"silu\"")),
        }
        let layers = layer_kinds(text)?;
        let attention = attention(text)?;
        let config = Self {
            architecture,
            hidden,
            vocab: text.count("vocab_size")?,
            eps: text.float_opt("rms_norm_eps")?.unwrap_or(1e-6),
            max_positions: text.count("max_position_embeddings")?,
            rope: rope(text, attention.head_dim)?,
            gdn: gdn(text, flash)?,
            ffn: ffn(text, architecture)?,
            hyper: flash.then(|| hyper(text)).transpose()?,
            qsa: flash.then(|| qsa(text)).transpose()?,
            ple: if flash { ple(text, layers.len() as u64)? } else { None },
            mtp: mtp(text)?,
            vision: vision(&top, hidden)?,
            layers,
            attention,
            raw_text,
        };
        // Kernels take it in FP32.
        if !(config.eps < 1.0 && config.eps as f32 >= f32::MIN_POSITIVE) {
            return Err(text.reject("rms_norm_eps", "a number between 0 and 1"));
        }
        for key in TOKEN_KEYS {
            text.check_tokens(key, config.vocab)?;
            top.check_tokens(key, config.vocab)?;
        }
        if config.vision.is_some() && rope_object(text)?.is_none_or(|p| p.get("mrope_section").is_none()) {
            return Err(ModelError::Missing { key: text.path("rope_parameters.mrope_section") });
        }
        if let Some(q) = &config.qsa
            && q.head_dim < config.rope.rotary_dim
        {
            return Err(ModelError::Contradiction(format!(
                "indexer_head_dim {} is smaller than the {} rotated dimensions",
                q.head_dim, config.rope.rotary_dim
            )));
        }
        Ok(config)
    }

    /// The text configuration to store in an artifact: the source's keys, flat, with the aliases of model type and layer
    /// types resolved, so that [`ModelConfig::from_json`] reads it back to an equal value.
    #[must_use]
    pub fn to_text_config(&self) -> Value {
        let mut map = self.raw_text.clone();
        map.insert("architectures".into(), json!([self.architecture.class_name()]));
        map.insert("model_type".into(), json!(self.architecture.model_type()));
        let kinds: Vec<_> = self
            .layers
            .iter()
            .map(|k| match k {
                LayerKind::Gdn => "linear_attention",
                LayerKind::Attention => "full_attention",
            })
            .collect();
        map.insert("layer_types".into(), json!(kinds));
        if let Some(ple) = &self.ple {
            map.insert("seed".into(), json!(ple.seed));
            map.insert("eos_token_id".into(), json!(ple.eos));
        }
        Value::Object(map)
    }

    /// Whether layer `index` carries an n-gram embedding, and which table it reads.
    #[must_use]
    pub fn ple_table(&self, index: usize) -> Option<usize> {
        self.ple.as_ref()?.layers.iter().position(|&l| l == index as u64)
    }

    /// Width of the residual, all streams together.
    #[must_use]
    pub fn residual_width(&self) -> u64 {
        self.hidden * self.hyper.as_ref().map_or(1, |h| h.streams)
    }
}

/// Keys that hold token ids.
const TOKEN_KEYS: [&str; 7] = [
    "eos_token_id",
    "bos_token_id",
    "pad_token_id",
    "image_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
];

fn architecture(top: &Object<'_>, nested: Option<&Object<'_>>) -> Result<Architecture, ModelError> {
    let own = top.str_opt("model_type")?;
    let inner = nested.map(|n| n.str_opt("model_type")).transpose()?.flatten();
    if let Some(found) = own.and_then(Architecture::from_model_type) {
        if let Some(other) = inner.and_then(Architecture::from_model_type)
            && other != found
        {
            return Err(ModelError::Contradiction(format!(
                "model_type is {} but text_config.model_type is {}",
                own.unwrap_or_default(),
                inner.unwrap_or_default()
            )));
        }
        return Ok(found);
    }
    if let Some(found) = inner.and_then(Architecture::from_model_type) {
        return Ok(found);
    }
    let classes = top.array_opt("architectures")?.unwrap_or_default();
    for class in classes.iter().filter_map(Value::as_str) {
        for candidate in [Architecture::Qwen4Exp, Architecture::Qwen35, Architecture::Qwen35Moe] {
            let stem = candidate.class_name().trim_end_matches("ForConditionalGeneration");
            if class.strip_suffix("ForCausalLM") == Some(stem) || class == candidate.class_name() {
                return Ok(candidate);
            }
        }
    }
    let found = own.map_or_else(|| Value::from(classes).to_string(), |m| format!("\"{m}\""));
    Err(ModelError::UnknownArchitecture { found })
}

fn layer_kinds(text: &Object<'_>) -> Result<Vec<LayerKind>, ModelError> {
    let count = text.count("num_hidden_layers")?;
    if count > 4096 {
        return Err(text.reject("num_hidden_layers", "at most 4096"));
    }
    let interval = text.count_or("full_attention_interval", 4)?;
    if interval == 0 {
        return Err(text.reject("full_attention_interval", "a positive integer"));
    }
    let Some(types) = text.array_opt("layer_types")? else {
        return Ok((0..count)
            .map(|i| if (i + 1) % interval == 0 { LayerKind::Attention } else { LayerKind::Gdn })
            .collect());
    };
    if types.len() as u64 != count {
        return Err(ModelError::Contradiction(format!(
            "layer_types has {} entries but num_hidden_layers is {count}",
            types.len()
        )));
    }
    types
        .iter()
        .map(|t| match t.as_str() {
            Some("linear_attention") => Ok(LayerKind::Gdn),
            Some("full_attention" | "qwen_sparse_attention" | "indexed_attention") => {
                Ok(LayerKind::Attention)
            }
            _ => Err(crate::json::invalid("layer_types", t, "linear_attention, full_attention or an alias")),
        })
        .collect()
}

fn attention(text: &Object<'_>) -> Result<AttentionConfig, ModelError> {
    let heads = text.count("num_attention_heads")?;
    let kv_heads = text.count("num_key_value_heads")?;
    if heads % kv_heads != 0 {
        return Err(text.reject("num_key_value_heads", &format!("a divisor of num_attention_heads {heads}")));
    }
    Ok(AttentionConfig { heads, kv_heads, head_dim: text.count("head_dim")? })
}

fn rope_object<'a>(text: &Object<'a>) -> Result<Option<Object<'a>>, ModelError> {
    match text.object("rope_parameters")? {
        Some(p) => Ok(Some(p)),
        None => text.object("rope_scaling"),
    }
}

fn rope(text: &Object<'_>, head_dim: u64) -> Result<RopeConfig, ModelError> {
    let params = rope_object(text)?;
    let number = |key: &str| -> Result<Option<f64>, ModelError> {
        let nested = params.as_ref().map(|p| p.float_opt(key)).transpose()?.flatten();
        match nested {
            Some(x) => Ok(Some(x)),
            None => text.float_opt(key),
        }
    };
    let theta = number("rope_theta")?.ok_or_else(|| ModelError::Missing { key: text.path("rope_theta") })?;
    let partial = number("partial_rotary_factor")?.unwrap_or(1.0);
    let rotary = (head_dim as f64 * partial) as u64;
    let reject = |key: &str, expected: &str| match &params {
        Some(p) if p.get(key).is_some() => p.reject(key, expected),
        _ => text.reject(key, expected),
    };
    if theta <= 1.0 || theta > f64::from(f32::MAX) {
        return Err(reject("rope_theta", "a number above 1 that FP32 holds"));
    }
    if !(partial > 0.0 && partial <= 1.0) || rotary == 0 || rotary % 2 != 0 {
        let expected = format!("a part of head_dim {head_dim} that is an even number of dimensions");
        return Err(reject("partial_rotary_factor", &expected));
    }
    let mut sections = [rotary / 2, 0, 0];
    let mut yarn = None;
    if let Some(p) = &params {
        if let Some(list) = p.array_opt("mrope_section")? {
            let values: Option<Vec<u64>> = list.iter().map(Value::as_u64).collect();
            sections = values
                .and_then(|v| <[u64; 3]>::try_from(v).ok())
                .ok_or_else(|| p.reject("mrope_section", "three non-negative integers"))?;
        }
        if sections.iter().try_fold(0u64, |sum, s| sum.checked_add(*s)) != Some(rotary / 2) {
            return Err(p.reject("mrope_section", &format!("three counts that sum to {}", rotary / 2)));
        }
        let kind = match p.str_opt("rope_type")? {
            Some(kind) => kind,
            None => p.str_opt("type")?.unwrap_or("default"),
        };
        match kind {
            "default" | "mrope" => {}
            "yarn" => {
                let factor = p.float_opt("factor")?.unwrap_or(0.0);
                if !(1.0..=1024.0).contains(&factor) {
                    return Err(p.reject("factor", "a number from 1 to 1024"));
                }
                for (key, default) in
                    [("beta_fast", 32.0), ("beta_slow", 1.0), ("attention_factor", attention_factor(factor))]
                {
                    // Null is a key of these that nobody set.
                    if p.get(key).is_some() && p.float_opt(key)?.is_some_and(|v| (v - default).abs() > 1e-6) {
                        return Err(p.reject(key, &format!("{default}, which the engine computes with")));
                    }
                }
                yarn = Some(Yarn {
                    factor,
                    original_max_positions: p.count("original_max_position_embeddings")?,
                });
            }
            _ => return Err(p.reject("rope_type", "\"default\" or \"yarn\"")),
        }
    }
    Ok(RopeConfig { theta, rotary_dim: rotary, sections, yarn })
}

/// What YaRN scales attention by unless told (model-math 2.3).
fn attention_factor(factor: f64) -> f64 {
    if factor > 1.0 { 0.1 * factor.ln() + 1.0 } else { 1.0 }
}

fn gdn(text: &Object<'_>, flash: bool) -> Result<GdnConfig, ModelError> {
    let key_heads = text.count("linear_num_key_heads")?;
    let value_heads = text.count("linear_num_value_heads")?;
    if value_heads % key_heads != 0 {
        return Err(
            text.reject("linear_num_value_heads", &format!("a multiple of linear_num_key_heads {key_heads}"))
        );
    }
    // The 3.5 family computes silu whatever its unused `output_gate_type` says; Flash-Next follows the field.
    let gate = match text.str_opt("output_gate_type")? {
        _ if !flash => GateActivation::Silu,
        Some("sigmoid") => GateActivation::Sigmoid,
        None | Some("silu" | "swish") => GateActivation::Silu,
        Some(_) => return Err(text.reject("output_gate_type", "\"sigmoid\", \"silu\" or \"swish\"")),
    };
    Ok(GdnConfig {
        key_heads,
        value_heads,
        key_dim: text.count("linear_key_head_dim")?,
        value_dim: text.count("linear_value_head_dim")?,
        conv_kernel: text.count("linear_conv_kernel_dim")?,
        gate,
    })
}

fn ffn(text: &Object<'_>, architecture: Architecture) -> Result<Ffn, ModelError> {
    if architecture == Architecture::Qwen35 {
        return Ok(Ffn::Dense { intermediate: text.count("intermediate_size")? });
    }
    let experts = text.count("num_experts")?;
    let top_k = text.count("num_experts_per_tok")?;
    if top_k > experts {
        return Err(text.reject("num_experts_per_tok", &format!("at most num_experts {experts}")));
    }
    if !text.bool_or("norm_topk_prob", true)? {
        return Err(text.reject("norm_topk_prob", "true"));
    }
    Ok(Ffn::Moe(MoeConfig {
        experts,
        top_k,
        intermediate: text.count("moe_intermediate_size")?,
        shared_intermediate: text.count("shared_expert_intermediate_size")?,
    }))
}

fn hyper(text: &Object<'_>) -> Result<HyperConfig, ModelError> {
    Ok(HyperConfig { streams: text.count("hc_count")?, rank: text.count("hc_lowrank")? })
}

fn qsa(text: &Object<'_>) -> Result<QsaConfig, ModelError> {
    if text.count_or("indexer_kv_heads", 1)? != 1 {
        return Err(text.reject("indexer_kv_heads", "1"));
    }
    let q = QsaConfig {
        heads: text.count("indexer_n_heads")?,
        head_dim: text.count("indexer_head_dim")?,
        budget: text.count("indexer_budget")?,
        ratio: text.count("indexer_compress_ratio")?,
    };
    if q.budget % q.ratio != 0 {
        return Err(
            text.reject("indexer_budget", &format!("a multiple of indexer_compress_ratio {}", q.ratio))
        );
    }
    Ok(q)
}

fn ple(text: &Object<'_>, layers: u64) -> Result<Option<PleConfig>, ModelError> {
    let ids = text.array_opt("ple_layer_ids")?.unwrap_or_default();
    if ids.is_empty() {
        return Ok(None);
    }
    let mut indices = Vec::new();
    for id in ids {
        match id.as_u64() {
            Some(n) if (1..=layers).contains(&n) && !indices.contains(&(n - 1)) => indices.push(n - 1),
            _ => {
                return Err(
                    text.reject("ple_layer_ids", &format!("distinct layer numbers from 1 to {layers}"))
                );
            }
        }
    }
    indices.sort_unstable();
    let eos = match text.get("eos_token_id") {
        Some(Value::Array(list)) => list.first().and_then(Value::as_u64),
        Some(value) => value.as_u64(),
        None => None,
    };
    let vocab = text.count("vocab_size")?;
    let eos = eos
        .filter(|&id| id < vocab)
        .ok_or_else(|| text.reject("eos_token_id", "a token id (it closes n-grams)"))?;
    let p = PleConfig {
        layers: indices,
        embed_dim: text.count("ple_embed_dim")?,
        conv_kernel: text.count("ple_conv_kernel_size")?,
        ngram_size: text.count("ngram_size")?,
        heads_per_ngram: text.count("heads_per_ngram")?,
        base: text.count("ngram_vocab_size_base")?,
        divisor: text.count_or("make_ngram_vocab_size_divisible_by", 128)?.max(1),
        seed: match text.get("seed") {
            None => 1234,
            Some(value) => value.as_u64().ok_or_else(|| text.reject("seed", "a non-negative integer"))?,
        },
        eos: eos as u32,
        parts: text.count_or("split_ngram_parts", 512)?.max(1),
    };
    if !(2..=8).contains(&p.ngram_size) || p.heads_per_ngram > 64 {
        return Err(text.reject("ngram_size", "2 to 8, with at most 64 heads_per_ngram"));
    }
    if p.embed_dim % p.heads() != 0 {
        return Err(text.reject("ple_embed_dim", &format!("a multiple of its {} hash heads", p.heads())));
    }
    Ok(Some(p))
}

fn mtp(text: &Object<'_>) -> Result<bool, ModelError> {
    let nested = text.object("mtp")?.map(|m| m.count_opt("num_hidden_layers")).transpose()?.flatten();
    match text.count_opt("mtp_num_hidden_layers")?.or(nested) {
        None | Some(0) => Ok(false),
        Some(1) if !text.bool_or("mtp_use_dedicated_embeddings", false)? => Ok(true),
        Some(1) => Err(text.reject("mtp_use_dedicated_embeddings", "false")),
        Some(_) => Err(text.reject("mtp_num_hidden_layers", "0 or 1")),
    }
}

fn vision(top: &Object<'_>, hidden: u64) -> Result<Option<VisionConfig>, ModelError> {
    let Some(v) = top.object("vision_config")? else { return Ok(None) };
    if !v.array_opt("deepstack_visual_indexes")?.unwrap_or_default().is_empty() {
        return Err(v.reject("deepstack_visual_indexes", "an empty list"));
    }
    let vision = VisionConfig {
        depth: v.count("depth")?,
        hidden: v.count("hidden_size")?,
        intermediate: v.count("intermediate_size")?,
        heads: v.count("num_heads")?,
        positions: v.count("num_position_embeddings")?,
        channels: v.count_or("in_channels", 3)?,
        patch: v.count("patch_size")?,
        temporal_patch: v.count("temporal_patch_size")?,
        merge: v.count("spatial_merge_size")?,
        out_hidden: v.count("out_hidden_size")?,
    };
    if vision.hidden % vision.heads != 0
        || vision.positions.isqrt().pow(2) != vision.positions
        || vision.depth > 4096
    {
        return Err(ModelError::Contradiction(
            "vision_config: heads must divide hidden_size and num_position_embeddings be a square".into(),
        ));
    }
    if vision.out_hidden != hidden {
        return Err(v.reject("out_hidden_size", &format!("the text model's hidden_size {hidden}")));
    }
    Ok(Some(vision))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn demo() -> Value {
        let text = include_str!("../../../models/flash-demo-nvfp4/config.json");
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn demo_config_reads_and_survives_the_artifact_form() {
        let config = ModelConfig::from_json(&demo()).unwrap();
        assert_eq!(config.architecture, Architecture::Qwen4Exp);
        assert_eq!(config.residual_width(), 1024);
        assert_eq!(config.ple.as_ref().unwrap().layers, [1]);
        assert_eq!(config.ple_table(1), Some(0));
        assert_eq!(config.rope.rotary_dim, 64);
        let mut back = ModelConfig::from_json(&config.to_text_config()).unwrap();
        assert_eq!(back.to_text_config(), config.to_text_config());
        back.vision.clone_from(&config.vision);
        back.raw_text.clone_from(&config.raw_text);
        assert_eq!(back, config);
    }

    #[test]
    fn aliases_of_types_are_one_model() {
        let mut v = demo();
        v["model_type"] = json!("qwen3_8_flash_next");
        v["text_config"]["model_type"] = json!("qwen3_8_flash_next_text");
        v["text_config"]["layer_types"][3] = json!("qwen_sparse_attention");
        assert_eq!(
            ModelConfig::from_json(&v).unwrap().layers,
            ModelConfig::from_json(&demo()).unwrap().layers
        );
    }

    #[test]
    fn each_broken_key_is_named() {
        let cases: &[(&str, Value, &str)] = &[
            ("hidden_size", Value::Null, "text_config.hidden_size"),
            ("hidden_size", json!(-1), "text_config.hidden_size"),
            ("hidden_size", json!(u64::MAX), "text_config.hidden_size"),
            ("num_key_value_heads", json!(3), "num_key_value_heads"),
            ("num_experts_per_tok", json!(33), "num_experts_per_tok"),
            ("ple_layer_ids", json!([0]), "ple_layer_ids"),
            ("ple_layer_ids", json!([2, 2]), "ple_layer_ids"),
            ("layer_types", json!(["linear_attention"]), "layer_types"),
            ("tie_word_embeddings", json!(true), "tie_word_embeddings"),
            ("rms_norm_eps", json!(0.0), "rms_norm_eps"),
            ("rms_norm_eps", Value::Null, "rms_norm_eps"),
            ("rms_norm_eps", json!(-1e-6), "rms_norm_eps"),
            ("rms_norm_eps", json!(1e-300), "rms_norm_eps"),
            ("rms_norm_eps", json!("1e-6"), "rms_norm_eps"),
            ("bos_token_id", json!(-1), "bos_token_id"),
            ("pad_token_id", json!(4096), "pad_token_id"),
            ("eos_token_id", json!([4083, 4096]), "eos_token_id"),
            ("full_attention_interval", json!(0), "full_attention_interval"),
            ("indexer_budget", json!(100), "indexer_budget"),
            ("output_gate_type", json!("tanh"), "output_gate_type"),
            (
                "rope_parameters",
                json!({"rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [1, 2]}),
                "mrope_section",
            ),
        ];
        for (key, value, named) in cases {
            let mut v = demo();
            v["text_config"][*key] = value.clone();
            let message = ModelConfig::from_json(&v).unwrap_err().to_string();
            assert!(message.contains(named), "{key}: {message}");
        }
    }

    #[test]
    fn rotations_that_are_none_are_named() {
        let yarn = |key: &str, value: Value| (key.to_owned(), value, true);
        let plain = |key: &str, value: Value| (key.to_owned(), value, false);
        for (key, value, extended) in [
            plain("rope_theta", Value::Null),
            plain("rope_theta", json!(1)),
            plain("rope_theta", json!(-1e7)),
            plain("rope_theta", json!(1e300)),
            plain("partial_rotary_factor", Value::Null),
            plain("partial_rotary_factor", json!(0)),
            plain("partial_rotary_factor", json!(1.5)),
            plain("mrope_section", json!([11, 11, 9])),
            plain("mrope_section", json!([11, 11, 10, "x"])),
            plain("mrope_section", Value::Null),
            plain("rope_type", json!("longrope")),
            yarn("factor", json!(0.5)),
            yarn("factor", Value::Null),
            yarn("beta_fast", json!(16)),
            yarn("attention_factor", json!(1e9)),
        ] {
            let mut v = demo();
            let rope = &mut v["text_config"]["rope_parameters"];
            if extended {
                rope["rope_type"] = json!("yarn");
                rope["factor"] = json!(4.0);
                rope["original_max_position_embeddings"] = json!(4096);
            }
            rope[&key] = value;
            let message = ModelConfig::from_json(&v).unwrap_err().to_string();
            assert!(message.contains(&key), "{key}: {message}");
        }
    }

    #[test]
    fn tokens_beside_the_text_configuration_lie_in_the_vocabulary() {
        let mut v = demo();
        v["image_token_id"] = json!(4096);
        let message = ModelConfig::from_json(&v).unwrap_err().to_string();
        assert!(message.contains("image_token_id") && message.contains("4096"), "{message}");
    }

    #[test]
    fn an_unknown_architecture_lists_the_known_ones() {
        let v = json!({"model_type": "llama", "architectures": ["LlamaForCausalLM"]});
        let message = ModelConfig::from_json(&v).unwrap_err().to_string();
        assert!(message.contains("llama") && message.contains("qwen3_5_moe"), "{message}");
    }

    #[test]
    fn yarn_is_read() {
        let mut v = demo();
        v["text_config"]["rope_parameters"]["rope_type"] = json!("yarn");
        v["text_config"]["rope_parameters"]["factor"] = json!(4.0);
        v["text_config"]["rope_parameters"]["original_max_position_embeddings"] = json!(4096);
        let yarn = ModelConfig::from_json(&v).unwrap().rope.yarn.unwrap();
        assert_eq!(yarn, Yarn { factor: 4.0, original_max_positions: 4096 });
    }
}
