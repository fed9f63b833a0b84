//! Metadata of an exported GGUF model: the keys that llama.cpp's converter writes, from configuration and tokenizer.

use std::collections::BTreeMap;

use infernix_checkpoint::gguf::names;
use infernix_model::{Component, Ffn, LayerKind, ModelConfig};
use serde_json::Value as Json;

use super::Setting;
use crate::ConvertError;

/// A metadata value.
#[derive(Debug, Clone)]
pub(super) enum Value {
    U16(u16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    Text(String),
    Bools(Vec<bool>),
    I32s(Vec<i32>),
    U64s(Vec<u64>),
    F32s(Vec<f32>),
    Texts(Vec<String>),
}

/// A key with its value.
#[derive(Debug, Clone)]
pub(super) struct Pair {
    key: String,
    value: Value,
}

/// A length and the bytes of a text.
pub(super) fn text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

impl Pair {
    pub(super) fn new(key: impl Into<String>, value: Value) -> Self {
        Self { key: key.into(), value }
    }

    /// Type ids are those of the GGUF specification.
    pub(super) fn write(&self, out: &mut Vec<u8>) {
        fn list<T>(out: &mut Vec<u8>, id: u32, items: &[T], mut one: impl FnMut(&mut Vec<u8>, &T)) {
            out.extend(9u32.to_le_bytes());
            out.extend(id.to_le_bytes());
            out.extend((items.len() as u64).to_le_bytes());
            items.iter().for_each(|i| one(out, i));
        }
        text(out, &self.key);
        let mut plain = |id: u32, bytes: &[u8]| {
            out.extend(id.to_le_bytes());
            out.extend(bytes);
        };
        match &self.value {
            Value::U16(v) => plain(2, &v.to_le_bytes()),
            Value::U32(v) => plain(4, &v.to_le_bytes()),
            Value::I32(v) => plain(5, &v.to_le_bytes()),
            Value::F32(v) => plain(6, &v.to_le_bytes()),
            Value::Bool(v) => plain(7, &[u8::from(*v)]),
            Value::Text(v) => {
                plain(8, &[]);
                text(out, v);
            }
            Value::Bools(v) => list(out, 7, v, |o, b| o.push(u8::from(*b))),
            Value::I32s(v) => list(out, 5, v, |o, b| o.extend(b.to_le_bytes())),
            Value::U64s(v) => list(out, 10, v, |o, b| o.extend(b.to_le_bytes())),
            Value::F32s(v) => list(out, 6, v, |o, b| o.extend(b.to_le_bytes())),
            Value::Texts(v) => list(out, 8, v, |o, b| text(o, b)),
        }
    }
}

struct Keys<'a> {
    setting: &'a Setting<'a>,
    prefix: &'static str,
    list: Vec<Pair>,
}

impl Keys<'_> {
    fn put(&mut self, key: &str, value: Value) {
        self.list.push(Pair::new(key, value));
    }

    fn count(&mut self, key: &str, v: u64) -> Result<(), ConvertError> {
        let key = format!("{}.{key}", self.prefix);
        let v = u32::try_from(v).map_err(|_| self.setting.fail(format!("{key}: {v} is beyond 32 bits")))?;
        self.list.push(Pair::new(key, Value::U32(v)));
        Ok(())
    }

    fn own(&mut self, key: &str, value: Value) {
        self.list.push(Pair::new(format!("{}.{key}", self.prefix), value));
    }
}

/// Keys of the language model, the tokenizer last.
///
/// # Errors
/// Numbers beyond their types; a tokenizer that GGUF cannot describe.
pub(super) fn model(
    setting: &Setting<'_>,
    c: &ModelConfig,
    g: &names::Geometry,
) -> Result<Vec<Pair>, ConvertError> {
    let mut k = Keys { setting, prefix: g.architecture.name(), list: Vec::new() };
    k.put("general.architecture", Value::Text(g.architecture.name().into()));
    k.put("general.type", Value::Text("model".into()));
    let metadata = setting.artifact.directory().metadata.as_ref();
    let name = metadata.and_then(|m| m.get("name")).and_then(Json::as_str).map(str::to_owned);
    let file = setting.file_name()?;
    let name = name.unwrap_or_else(|| file.strip_suffix(".gguf").unwrap_or(&file).to_owned());
    k.put("general.name", Value::Text(name));
    k.put("general.quantization_version", Value::U32(2));
    let blocks = g.layers + g.drafter_layers;
    k.count("block_count", blocks)?;
    k.count("context_length", c.max_positions)?;
    k.count("embedding_length", c.hidden)?;
    k.count("attention.head_count", c.attention.heads)?;
    k.count("attention.head_count_kv", c.attention.kv_heads)?;
    k.count("attention.key_length", c.attention.head_dim)?;
    k.count("attention.value_length", c.attention.head_dim)?;
    k.own("attention.layer_norm_rms_epsilon", Value::F32(c.eps as f32));
    let mut sections: Vec<i32> = c.rope.sections.iter().map(|s| *s as i32).collect();
    sections.push(0);
    k.own("rope.dimension_sections", Value::I32s(sections));
    k.own("rope.freq_base", Value::F32(c.rope.theta as f32));
    k.count("rope.dimension_count", c.rope.rotary_dim)?;
    if let Some(yarn) = &c.rope.yarn {
        k.own("rope.scaling.type", Value::Text("yarn".into()));
        k.own("rope.scaling.factor", Value::F32(yarn.factor as f32));
        k.count("rope.scaling.original_context_length", yarn.original_max_positions)?;
    }
    if g.drafter_layers > 0 {
        k.count("nextn_predict_layers", g.drafter_layers)?;
    }
    k.count("ssm.conv_kernel", c.gdn.conv_kernel)?;
    k.count("ssm.state_size", c.gdn.key_dim)?;
    k.count("ssm.group_count", c.gdn.key_heads)?;
    k.count("ssm.time_step_rank", c.gdn.value_heads)?;
    k.count("ssm.inner_size", c.gdn.value_heads * c.gdn.value_dim)?;
    let attends = |layer: u64| c.layers.get(layer as usize).is_none_or(|l| *l == LayerKind::Attention);
    k.own("attention.recurrent_layers", Value::Bools((0..blocks).map(|l| !attends(l)).collect()));
    // The distance between layers with attention, where there is one.
    let first = (0..g.layers).position(attends).map(|p| p as u64 + 1);
    if let Some(n) = first.filter(|n| (0..g.layers).all(|l| attends(l) == ((l + 1) % n == 0))) {
        k.count("full_attention_interval", n)?;
    }
    match &c.ffn {
        Ffn::Dense { intermediate } => k.count("feed_forward_length", *intermediate)?,
        Ffn::Moe(m) => {
            k.count("expert_count", m.experts)?;
            k.count("expert_used_count", m.top_k)?;
            k.count("expert_feed_forward_length", m.intermediate)?;
            k.count("expert_shared_feed_forward_length", m.shared_intermediate)?;
        }
    }
    if let Some(h) = &c.hyper {
        k.count("hyper_connection.count", h.streams)?;
        k.count("hyper_connection.low_rank", h.rank)?;
    }
    if let Some(q) = &c.qsa {
        k.count("attention.indexer.head_count", q.heads)?;
        k.count("attention.indexer.key_length", q.head_dim)?;
        k.count("attention.indexer.top_k", q.budget)?;
        let ratio = |l| if attends(l) { q.ratio as i32 } else { 0 };
        k.own("attention.compress_ratios", Value::I32s((0..blocks).map(ratio).collect()));
    }
    if let Some(p) = &c.ple {
        k.own("ple.layers", Value::I32s(p.layers.iter().map(|l| *l as i32).collect()));
        k.count("ple.ngram_size", p.ngram_size)?;
        k.count("ple.heads_per_ngram", p.heads_per_ngram)?;
        k.count("ple.conv_kernel", p.conv_kernel)?;
        k.count("ple.eos_token_id", u64::from(p.eos))?;
        k.count("embedding_length_per_layer_input", p.row_width())?;
        let constants =
            infernix_model::ngram::constants(p, c.vocab).map_err(|e| setting.fail(e.to_string()))?;
        if let Some(n) = constants.first() {
            k.own("ple.layer_multipliers", Value::U64s(n.multipliers.clone()));
            k.own("ple.head_offsets", Value::U64s(n.head_offsets.clone()));
            k.own("ple.head_vocab_sizes", Value::U64s(n.head_sizes.clone()));
        }
    }
    sampling(&mut k)?;
    tokenizer(&mut k, c.vocab)?;
    Ok(k.list)
}

/// A JSON resource of the text component; null where the artifact has none.
fn resource(setting: &Setting<'_>, component: Component, role: &str) -> Result<Json, ConvertError> {
    match resource_bytes(setting, component, role)? {
        None => Ok(Json::Null),
        Some(bytes) => serde_json::from_slice(&bytes).map_err(|e| setting.fail(format!("{role}: {e}"))),
    }
}

fn resource_bytes(
    setting: &Setting<'_>,
    component: Component,
    role: &str,
) -> Result<Option<Vec<u8>>, ConvertError> {
    let components = &setting.artifact.directory().components;
    let has = components.get(component.name()).is_some_and(|c| c.resources.contains_key(role));
    Ok(if has { Some(setting.artifact.resource(component.name(), role)?) } else { None })
}

fn sampling(k: &mut Keys<'_>) -> Result<(), ConvertError> {
    let settings = resource(k.setting, Component::Text, "generation_config.json")?;
    if let Some(v) = settings["top_k"].as_i64().and_then(|v| i32::try_from(v).ok()) {
        k.put("general.sampling.top_k", Value::I32(v));
    }
    for (key, name) in [("general.sampling.top_p", "top_p"), ("general.sampling.temp", "temperature")] {
        if let Some(v) = settings[name].as_f64() {
            k.put(key, Value::F32(v as f32));
        }
    }
    Ok(())
}

/// Types of tokens, as ggml numbers them.
const NORMAL: i32 = 1;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;

fn tokenizer(k: &mut Keys<'_>, vocab: u64) -> Result<(), ConvertError> {
    let setting = k.setting;
    let file = resource(setting, Component::Text, "tokenizer.json")?;
    if file.is_null() {
        return Err(setting.fail("the artifact has no tokenizer.json, which a GGUF model needs"));
    }
    let bad = |what: &str| setting.fail(format!("tokenizer.json: {what}, which GGUF cannot describe"));
    let model = &file["model"];
    if model["type"].as_str().is_some_and(|t| t != "BPE") {
        return Err(bad("the model is no BPE"));
    }
    let pre = infernix_checkpoint::gguf::pre_tokenizer(&file)
        .ok_or_else(|| bad("text is split by another rule than those of qwen35 and qwen2"))?;
    let size = usize::try_from(vocab).map_err(|_| bad("the vocabulary is too large"))?;
    let mut tokens: Vec<(String, i32)> = (0..size).map(|id| (format!("[PAD{id}]"), UNUSED)).collect();
    let mut set = |id: Option<u64>, text: &str, ty: i32| -> Result<(), ConvertError> {
        let slot = id.and_then(|id| usize::try_from(id).ok()).and_then(|id| tokens.get_mut(id));
        *slot.ok_or_else(|| bad("a token's number is beyond the vocabulary"))? = (text.to_owned(), ty);
        Ok(())
    };
    for (token, id) in model["vocab"].as_object().into_iter().flatten() {
        set(id.as_u64(), token, NORMAL)?;
    }
    let settings = resource(setting, Component::Text, "tokenizer_config.json")?;
    let mut added: BTreeMap<u64, (String, bool)> = BTreeMap::new();
    for t in file["added_tokens"].as_array().into_iter().flatten() {
        if let (Some(id), Some(text)) = (t["id"].as_u64(), t["content"].as_str()) {
            added.insert(id, (text.to_owned(), t["special"].as_bool().unwrap_or(false)));
        }
    }
    for (id, t) in settings["added_tokens_decoder"].as_object().into_iter().flatten() {
        if let (Ok(id), Some(text)) = (id.parse(), t["content"].as_str()) {
            added.insert(id, (text.to_owned(), t["special"].as_bool().unwrap_or(false)));
        }
    }
    for (id, (text, special)) in &added {
        set(Some(*id), text, if *special { CONTROL } else { USER_DEFINED })?;
    }
    let merges = model["merges"].as_array().map_or(&[][..], Vec::as_slice);
    let merges: Option<Vec<String>> = merges
        .iter()
        .map(|m| match m {
            Json::String(text) => Some(text.clone()),
            pair => Some(format!("{} {}", pair[0].as_str()?, pair[1].as_str()?)),
        })
        .collect();
    let id_of = |text: &Json| {
        let text = text.as_str().or_else(|| text["content"].as_str())?;
        tokens.iter().position(|(t, _)| t == text)
    };
    let generation = resource(setting, Component::Text, "generation_config.json")?;
    let first = |v: &Json| v.as_u64().or_else(|| v[0].as_u64());
    let ids = [
        (
            "eos",
            id_of(&settings["eos_token"]).map(|i| i as u64).or_else(|| first(&generation["eos_token_id"])),
        ),
        (
            "padding",
            id_of(&settings["pad_token"]).map(|i| i as u64).or_else(|| first(&generation["pad_token_id"])),
        ),
        ("bos", first(&generation["bos_token_id"])),
    ];
    if k.prefix == "qwen4exp"
        && let Some(id) = id_of(&Json::from("<|image_pad|>"))
    {
        k.count("ple.image_token_id", id as u64)?;
    }
    k.put("tokenizer.ggml.model", Value::Text("gpt2".into()));
    k.put("tokenizer.ggml.pre", Value::Text(pre.into()));
    let (texts, types) = tokens.into_iter().unzip();
    k.put("tokenizer.ggml.tokens", Value::Texts(texts));
    k.put("tokenizer.ggml.token_type", Value::I32s(types));
    k.put("tokenizer.ggml.merges", Value::Texts(merges.ok_or_else(|| bad("a merge is no pair of tokens"))?));
    for (name, id) in ids {
        if let Some(id) = id.and_then(|id| u32::try_from(id).ok()) {
            k.put(&format!("tokenizer.ggml.{name}_token_id"), Value::U32(id));
        }
    }
    k.put("tokenizer.ggml.add_bos_token", Value::Bool(settings["add_bos_token"].as_bool().unwrap_or(false)));
    let template = resource_bytes(setting, Component::Text, "chat_template.jinja")?;
    let template = match template {
        Some(bytes) => {
            Some(String::from_utf8(bytes).map_err(|_| setting.fail("chat_template.jinja is not UTF-8"))?)
        }
        None => settings["chat_template"].as_str().map(str::to_owned),
    };
    if let Some(template) = template {
        k.put("tokenizer.chat_template", Value::Text(template));
    }
    Ok(())
}

/// Keys of an image tower's file.
///
/// # Errors
/// As [`model`].
pub(super) fn tower(setting: &Setting<'_>, c: &ModelConfig) -> Result<Vec<Pair>, ConvertError> {
    let Some(v) = &c.vision else { return Err(setting.fail("no configuration describes the image tower")) };
    let mut k = Keys { setting, prefix: "clip.vision", list: Vec::new() };
    k.put("general.architecture", Value::Text("clip".into()));
    k.put("general.type", Value::Text("mmproj".into()));
    k.put("clip.has_vision_encoder", Value::Bool(true));
    k.put("clip.projector_type", Value::Text("qwen3vl_merger".into()));
    k.put("clip.use_gelu", Value::Bool(true));
    // Positions lie in a square.
    k.count("image_size", v.positions.isqrt() * v.patch)?;
    k.count("patch_size", v.patch)?;
    k.count("embedding_length", v.hidden)?;
    k.count("feed_forward_length", v.intermediate)?;
    k.count("block_count", v.depth)?;
    k.count("projection_dim", v.out_hidden)?;
    k.count("attention.head_count", v.heads)?;
    k.own("attention.layer_norm_epsilon", Value::F32(1e-6));
    k.count("spatial_merge_size", v.merge)?;
    let settings = resource(setting, Component::Vision, "preprocessor_config.json")?;
    for name in ["image_mean", "image_std"] {
        let list: Vec<f32> = settings[name]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(Json::as_f64)
            .map(|v| v as f32)
            .collect();
        if !list.is_empty() {
            k.own(name, Value::F32s(list));
        }
    }
    Ok(k.list)
}
