//! `config.json` of a GGUF model, generated from its keys.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;

use serde_json::{Map, Value, json};

use super::Gguf;
use super::names::{Architecture, Geometry};
use crate::CheckpointError;

/// Token texts that the multimodal models name by id, with the key of the configuration.
const TOKENS: [(&str, &str); 4] = [
    ("<|image_pad|>", "image_token_id"),
    ("<|video_pad|>", "video_token_id"),
    ("<|vision_start|>", "vision_start_token_id"),
    ("<|vision_end|>", "vision_end_token_id"),
];

/// A range and what it is in words.
type Bounds = (RangeInclusive<f64>, &'static str);
/// Of norms. The smallest positive FP32 number that is normal is still something.
const EPSILON: Bounds = (f32::MIN_POSITIVE as f64..=1.0, "a number above 0, at most 1");
/// Bases of rotary frequencies: above 1, and FP32.
const ROPE_BASE: Bounds = (1.0 + f32::EPSILON as f64..=f32::MAX as f64, "a finite number above 1");
/// Context extensions.
const YARN_FACTOR: Bounds = (1.0..=1024.0, "a number from 1 to 1024");
/// What else llama.cpp can be told of YaRN, with the values that the models were trained with.
const YARN: [(&str, f64); 5] = [
    ("attn_factor", 1.0),
    ("yarn_ext_factor", 1.0),
    ("yarn_attn_factor", 1.0),
    ("yarn_beta_fast", 32.0),
    ("yarn_beta_slow", 1.0),
];

/// The shortest decimal of an F32 value, as FP64: 1e-6 is stored as 9.99999997e-7.
pub(super) fn shortest(v: f64) -> f64 {
    (v as f32).to_string().parse().unwrap_or(v)
}

struct Keys<'g> {
    gguf: &'g Gguf,
    name: &'static str,
}

impl Keys<'_> {
    fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.name)
    }

    fn count(&self, key: &str) -> Result<u64, CheckpointError> {
        let key = self.key(key);
        let value = self.gguf.unsigned(&key)?;
        value.ok_or_else(|| self.gguf.key_error(&key, "an integer that is not negative", "missing".into()))
    }

    /// A number that may be given per layer; layers without attention have 0.
    fn largest(&self, key: &str) -> Result<u64, CheckpointError> {
        let key = self.key(key);
        let list = self.gguf.unsigned_list(&key)?.unwrap_or_default();
        let distinct: BTreeSet<u64> = list.into_iter().filter(|v| *v > 0).collect();
        match (distinct.len(), distinct.last()) {
            (1, Some(v)) => Ok(*v),
            _ => Err(self.gguf.key_error(&key, "one number above 0 for all layers", format!("{distinct:?}"))),
        }
    }

    fn float(&self, key: &str, (range, expected): Bounds) -> Result<f64, CheckpointError> {
        let key = self.key(key);
        let found = self.gguf.float_in(&key, range, expected)?.map(shortest);
        found.ok_or_else(|| self.gguf.key_error(&key, expected, "missing".into()))
    }

    /// Keys whose value says what the tensors and other keys say already must say the same.
    fn agree(&self, vocab: u64, head_dim: u64, kinds: &[&str]) -> Result<(), CheckpointError> {
        let gguf = self.gguf;
        let key = self.key("attention.value_length");
        if let Some(found) = gguf.unsigned(&key)?.filter(|v| *v != head_dim) {
            let expected = format!("{head_dim}, as attention.key_length");
            return Err(gguf.key_error(&key, &expected, found.to_string()));
        }
        let key = self.key("full_attention_interval");
        let attends = |n: u64| (1..).zip(kinds).all(|(l, kind)| (*kind == "full_attention") == (l % n == 0));
        // A file that holds the drafter alone has none of the layers.
        if let Some(n) = gguf.unsigned(&key)?
            && gguf.get("token_embd.weight").is_some()
            && (n == 0 || !attends(n))
        {
            let expected = "the distance between the layers that have attention tensors";
            return Err(gguf.key_error(&key, expected, n.to_string()));
        }
        for (key, value) in gguf.metadata().iter() {
            let token = key.strip_prefix("tokenizer.ggml.").or(key.strip_prefix(&self.key("ple.")));
            let names_token = token.is_some_and(|t| t.ends_with("token_id"));
            if names_token && vocab > 0 && value.unsigned().is_none_or(|id| id >= vocab) {
                let expected = format!("a token below {vocab}, the size of the vocabulary");
                return Err(gguf.key_error(key, &expected, format!("{} {value}", value.value_type())));
            }
        }
        Ok(())
    }
}

/// The configuration of a model of one of the three architectures.
///
/// # Errors
/// Keys that are missing, of another type, or contradict each other.
pub(super) fn config(gguf: &Gguf) -> Result<Value, CheckpointError> {
    let g = Geometry::read(gguf)?;
    let keys = Keys { gguf, name: g.architecture.name() };
    let (class, model_type) = match g.architecture {
        Architecture::Qwen35 => ("Qwen3_5ForConditionalGeneration", "qwen3_5"),
        Architecture::Qwen35Moe => ("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe"),
        Architecture::Qwen4Exp => ("Qwen4ExpForConditionalGeneration", "qwen4_exp"),
    };
    let flash = g.architecture == Architecture::Qwen4Exp;
    let hidden = keys.count("embedding_length")?;
    let head_dim = keys.count("attention.key_length")?;
    let vocab = match gguf.get("token_embd.weight").map(|t| &*t.shape) {
        Some(&[rows, _]) => rows,
        // A file that holds the drafter alone takes the embedding of its model.
        _ => match gguf.metadata().get("tokenizer.ggml.tokens") {
            Some(super::Value::Array(a)) => a.count,
            _ => 0,
        },
    };
    let kinds: Vec<&str> = (0..g.layers)
        .map(|n| match gguf.get(&format!("blk.{n}.ssm_conv1d.weight")) {
            Some(_) => "linear_attention",
            None => "full_attention",
        })
        .collect();
    keys.agree(vocab, head_dim, &kinds)?;
    let mut text = Map::new();
    let mut put = |key: &str, value: Value| text.insert(key.to_owned(), value);
    put("model_type", json!(format!("{model_type}_text")));
    put("hidden_size", json!(hidden));
    put("vocab_size", json!(vocab));
    put("num_hidden_layers", json!(g.layers));
    put("layer_types", json!(kinds));
    put("num_attention_heads", json!(keys.largest("attention.head_count")?));
    put("num_key_value_heads", json!(keys.largest("attention.head_count_kv")?));
    put("head_dim", json!(head_dim));
    put("hidden_act", json!("silu"));
    put("attention_bias", json!(false));
    put("max_position_embeddings", json!(keys.count("context_length")?));
    put("rms_norm_eps", json!(keys.float("attention.layer_norm_rms_epsilon", EPSILON)?));
    put("rope_parameters", rope(&keys, head_dim)?);
    put("linear_conv_kernel_dim", json!(keys.count("ssm.conv_kernel")?));
    put("linear_key_head_dim", json!(g.key_dim));
    put("linear_value_head_dim", json!(g.value_dim));
    put("linear_num_key_heads", json!(g.key_heads));
    put("linear_num_value_heads", json!(g.value_heads));
    put("mtp_num_hidden_layers", json!(g.drafter_layers));
    put("tie_word_embeddings", json!(gguf.get("output.weight").is_none() && vocab > 0));
    if let Some(id) = gguf.unsigned("tokenizer.ggml.eos_token_id")? {
        put("eos_token_id", json!(id));
    }
    if g.architecture == Architecture::Qwen35 {
        put("intermediate_size", json!(keys.largest("feed_forward_length")?));
    } else {
        put("num_experts", json!(keys.count("expert_count")?));
        put("num_experts_per_tok", json!(keys.count("expert_used_count")?));
        put("moe_intermediate_size", json!(keys.count("expert_feed_forward_length")?));
        put("shared_expert_intermediate_size", json!(keys.count("expert_shared_feed_forward_length")?));
        put("norm_topk_prob", json!(true));
    }
    if flash {
        flash_next(&keys, &g, &mut text)?;
    }
    let mut root = json!({
        "architectures": [class], "model_type": model_type, "text_config": text, "tie_word_embeddings": false,
    });
    root["tie_word_embeddings"] = root["text_config"]["tie_word_embeddings"].clone();
    let tokens = match gguf.metadata().get("tokenizer.ggml.tokens") {
        Some(_) => gguf.text_list("tokenizer.ggml.tokens")?.unwrap_or_default(),
        None => Vec::new(),
    };
    for (token, key) in TOKENS {
        if let Some(id) = tokens.iter().position(|t| t == token) {
            root[key] = json!(id);
        }
    }
    Ok(root)
}

fn rope(keys: &Keys<'_>, head_dim: u64) -> Result<Value, CheckpointError> {
    let rotated = keys.count("rope.dimension_count")?;
    if rotated == 0 || rotated % 2 != 0 || rotated > head_dim {
        let expected = format!("an even number up to {head_dim}, the width of a head");
        return Err(keys.gguf.key_error(&keys.key("rope.dimension_count"), &expected, rotated.to_string()));
    }
    let mut value = json!({
        "rope_type": "default",
        "rope_theta": keys.float("rope.freq_base", ROPE_BASE)?,
        "partial_rotary_factor": rotated as f64 / head_dim.max(1) as f64,
    });
    let key = keys.key("rope.dimension_sections");
    let expected = format!("three counts that sum to {}, half of rope.dimension_count", rotated / 2);
    let sections = keys.gguf.unsigned_list(&key)?;
    let mut sections = sections.ok_or_else(|| keys.gguf.key_error(&key, &expected, "missing".into()))?;
    // The fourth section is ggml's, always 0 here.
    if sections.len() == 4 && sections[3] == 0 {
        sections.truncate(3);
    }
    let sum = sections.iter().try_fold(0u64, |sum, s| sum.checked_add(*s));
    if sections.len() != 3 || sum != Some(rotated / 2) {
        return Err(keys.gguf.key_error(&key, &expected, format!("{sections:?}")));
    }
    value["mrope_section"] = json!(sections);
    value["mrope_interleaved"] = json!(true);
    let key = keys.key("rope.scaling.type");
    match keys.gguf.text(&key)? {
        None | Some("none") => {}
        Some("yarn") => {
            value["rope_type"] = json!("yarn");
            value["factor"] = json!(keys.float("rope.scaling.factor", YARN_FACTOR)?);
            value["original_max_position_embeddings"] =
                json!(keys.count("rope.scaling.original_context_length")?);
            for (name, default) in YARN {
                let key = keys.key(&format!("rope.scaling.{name}"));
                if let Some(found) = keys.gguf.float(&key)?.filter(|v| *v != default) {
                    return Err(keys.gguf.key_error(&key, &default.to_string(), found.to_string()));
                }
            }
        }
        Some(other) => return Err(keys.gguf.key_error(&key, "none or yarn", format!("{other:?}"))),
    }
    Ok(value)
}

/// Hyper-connections, sparse attention, n-gram embedding.
fn flash_next(keys: &Keys<'_>, g: &Geometry, text: &mut Map<String, Value>) -> Result<(), CheckpointError> {
    let gguf = keys.gguf;
    let mut put = |key: &str, value: Value| text.insert(key.to_owned(), value);
    put("output_gate_type", json!("sigmoid"));
    put("hc_count", json!(keys.count("hyper_connection.count")?));
    put("hc_lowrank", json!(keys.count("hyper_connection.low_rank")?));
    put("indexer_n_heads", json!(keys.count("attention.indexer.head_count")?));
    put("indexer_kv_heads", json!(1));
    put("indexer_head_dim", json!(keys.count("attention.indexer.key_length")?));
    put("indexer_budget", json!(keys.count("attention.indexer.top_k")?));
    let key = keys.key("attention.compress_ratios");
    let ratios: BTreeSet<u64> =
        gguf.unsigned_list(&key)?.unwrap_or_default().into_iter().filter(|r| *r > 0).collect();
    match ratios.len() {
        // Lost by a faulty converter: the warning says so, and a source of resources may give it.
        0 => {}
        1 => _ = put("indexer_compress_ratio", json!(ratios.first())),
        _ => return Err(gguf.key_error(&key, "one ratio for all layers", format!("{ratios:?}"))),
    }
    let Some(layer) = g.ple_layer else { return Ok(()) };
    let (size, heads) = (keys.count("ple.ngram_size")?, keys.count("ple.heads_per_ngram")?);
    let width = keys.count("embedding_length_per_layer_input")?;
    let overflow = || gguf.key_error(&keys.key("ple.ngram_size"), "a small number", size.to_string());
    let total = size.checked_sub(1).and_then(|n| n.checked_mul(heads)).ok_or_else(overflow)?;
    put("ple_layer_ids", json!([layer + 1]));
    put("ple_embed_dim", json!(total.checked_mul(width).ok_or_else(overflow)?));
    put("ple_conv_kernel_size", json!(keys.count("ple.conv_kernel")?));
    put("ngram_size", json!(size));
    put("heads_per_ngram", json!(heads));
    put("eos_token_id", json!(keys.count("ple.eos_token_id")?));
    let key = keys.key("ple.head_vocab_sizes");
    let sizes = gguf.unsigned_list(&key)?.unwrap_or_default();
    let base = sizes.iter().min().copied();
    // Head sizes are consecutive primes from the base on, so the smallest is a base that gives the same ones.
    let base = base.ok_or_else(|| gguf.key_error(&key, "a list of primes", "none".into()))?;
    put("ngram_vocab_size_base", json!(base));
    let rows = gguf.get("per_layer_token_embd.weight").map_or(0, |t| t.rows());
    let sum: u64 = sizes.iter().fold(0, |s, v| s.saturating_add(*v));
    // Rows are padded to a multiple of 128 in the releases; whatever else gives the rows at hand.
    let divisor = if sum.checked_next_multiple_of(128) == Some(rows) { 128 } else { rows.max(1) };
    put("make_ngram_vocab_size_divisible_by", json!(divisor));
    put("split_ngram_parts", json!(1));
    Ok(())
}
