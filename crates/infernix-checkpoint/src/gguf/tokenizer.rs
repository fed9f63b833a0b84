//! Tokenizer, template and generation settings of a GGUF model as the files of a checkpoint.

use serde_json::{Map, Value, json};

use super::Gguf;
use super::config::shortest;
use super::names::vision;
use crate::CheckpointError;

/// How text is split before the merges, by `tokenizer.ggml.pre`: the regular expression of the source's tokenizer.
const SPLITS: [(&str, &str); 2] = [
    (
        "qwen35",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    (
        "qwen2",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
];

/// The `tokenizer.ggml.pre` whose rule a `tokenizer.json` splits text by; `None` for another rule.
#[must_use]
pub fn pre_tokenizer(tokenizer: &Value) -> Option<&'static str> {
    let pre = &tokenizer["pre_tokenizer"];
    let parts = pre["pretokenizers"].as_array().map_or(std::slice::from_ref(pre), Vec::as_slice);
    let split = parts.iter().find_map(|p| p["pattern"]["Regex"].as_str())?;
    SPLITS.iter().find(|(_, rule)| *rule == split).map(|s| s.0)
}

/// Types of tokens.
const NORMAL: u64 = 1;
const CONTROL: u64 = 3;
const USER_DEFINED: u64 = 4;
/// The last one.
const BYTE: u64 = 6;

const TOKENS: &str = "tokenizer.ggml.tokens";
const TYPES: &str = "tokenizer.ggml.token_type";
const MERGES: &str = "tokenizer.ggml.merges";
/// The way out where a file lacks a part of its tokenizer.
const ELSE: &str = " (else name a source of resources)";

/// Sampling defaults: name in `generation_config.json`, key, largest value; all start at 0.
const SAMPLING: [(&str, &str, f64); 3] = [
    ("temperature", "general.sampling.temp", 100.0),
    ("top_p", "general.sampling.top_p", 1.0),
    ("min_p", "general.sampling.min_p", 1.0),
];

/// The files that can be generated.
const FILES: [&str; 4] =
    ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"];

/// The bytes of a generated file, `None` where the model does not hold what it needs.
///
/// # Errors
/// Keys of another type, a tokenizer of another kind, or what reading meets.
pub(super) fn file(gguf: &Gguf, name: &str) -> Result<Option<Vec<u8>>, CheckpointError> {
    if vision::is_tower(gguf) {
        return match name {
            "preprocessor_config.json" => Ok(Some(pretty(&vision::processor(gguf)?))),
            _ => Ok(None),
        };
    }
    if !FILES.contains(&name) {
        return Ok(None);
    }
    if name == "chat_template.jinja" {
        return Ok(gguf.text("tokenizer.chat_template")?.map(|t| t.as_bytes().to_vec()));
    }
    let Some(tokens) = Tokens::read(gguf)? else { return Ok(None) };
    let value = match name {
        "tokenizer.json" => tokens.tokenizer(gguf)?,
        "tokenizer_config.json" => tokens.config(gguf)?,
        _ => tokens.generation(gguf)?,
    };
    Ok(Some(pretty(&value)))
}

fn pretty(value: &Value) -> Vec<u8> {
    let mut bytes = serde_json::to_vec_pretty(value).unwrap_or_default();
    bytes.push(b'\n');
    bytes
}

struct Tokens {
    texts: Vec<String>,
    types: Vec<u64>,
}

impl Tokens {
    fn read(gguf: &Gguf) -> Result<Option<Self>, CheckpointError> {
        let Some(texts) = gguf.text_list(TOKENS)? else { return Ok(None) };
        if let Some(rows) = gguf.get("token_embd.weight").map(|t| t.rows())
            && rows != texts.len() as u64
        {
            let expected = format!("{rows} tokens, one a row of token_embd.weight");
            return Err(gguf.key_error(TOKENS, &expected, texts.len().to_string()));
        }
        let expected = format!("{} types from 0 to {BYTE}, one a token{ELSE}", texts.len());
        // Without types nobody knows the control tokens, which a chat is made of.
        let types = gguf.list(TYPES, &expected, |v| v.unsigned().filter(|t| *t <= BYTE))?;
        let types = types.ok_or_else(|| gguf.key_error(TYPES, &expected, "missing".into()))?;
        if types.len() != texts.len() {
            return Err(gguf.key_error(TYPES, &expected, types.len().to_string()));
        }
        Ok(Some(Self { texts, types }))
    }

    /// Number, text and whether it is special, of the tokens beside the merges' vocabulary.
    fn added(&self) -> impl Iterator<Item = (usize, &str, bool)> {
        let all = self.texts.iter().zip(&self.types).enumerate();
        all.filter(|(_, (_, ty))| matches!(**ty, CONTROL | USER_DEFINED))
            .map(|(id, (text, ty))| (id, text.as_str(), *ty == CONTROL))
    }

    fn text(&self, gguf: &Gguf, key: &str) -> Result<Option<&str>, CheckpointError> {
        let id = gguf.unsigned(key)?.and_then(|id| usize::try_from(id).ok());
        Ok(id.and_then(|id| self.texts.get(id)).map(String::as_str))
    }

    fn tokenizer(&self, gguf: &Gguf) -> Result<Value, CheckpointError> {
        let model = gguf.text("tokenizer.ggml.model")?.unwrap_or("missing");
        if model != "gpt2" {
            return Err(gguf.key_error("tokenizer.ggml.model", "gpt2 (byte-level merges)", model.to_owned()));
        }
        let pre = gguf.text("tokenizer.ggml.pre")?.unwrap_or("missing");
        let split = SPLITS.iter().find(|(name, _)| *name == pre).map(|s| s.1).ok_or_else(|| {
            gguf.key_error("tokenizer.ggml.pre", &format!("qwen35 or qwen2{ELSE}"), pre.to_owned())
        })?;
        let normal = self.texts.iter().zip(&self.types).enumerate().filter(|(_, (_, ty))| **ty == NORMAL);
        let count = normal.clone().count();
        let vocab: Map<String, Value> = normal.map(|(id, (text, _))| (text.clone(), json!(id))).collect();
        if vocab.len() != count {
            let found = format!("{} of them twice", count - vocab.len());
            return Err(gguf.key_error(TOKENS, "distinct texts", found));
        }
        let merges = gguf.text_list(MERGES)?.unwrap_or_default();
        if merges.is_empty() {
            let expected = format!("the merges of byte-level BPE{ELSE}");
            return Err(gguf.key_error(MERGES, &expected, "none".into()));
        }
        let merges: Vec<Value> = merges
            .iter()
            .map(|m| {
                let pair = m.split_once(' ').map(|(a, b)| json!([a, b]));
                pair.ok_or_else(|| gguf.key_error(MERGES, "two tokens and a space", m.clone()))
            })
            .collect::<Result<_, _>>()?;
        let added: Vec<Value> = self
            .added()
            .map(|(id, text, special)| {
                json!({
                    "id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false,
                    "normalized": false, "special": special,
                })
            })
            .collect();
        Ok(json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
            "normalizer": {"type": "NFC"},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": false},
                {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
            ]},
            "post_processor": null,
            "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
            "model": {
                "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                "vocab": vocab, "merges": merges,
            },
        }))
    }

    fn config(&self, gguf: &Gguf) -> Result<Value, CheckpointError> {
        let decoder: Map<String, Value> = self
            .added()
            .map(|(id, text, special)| {
                let record = json!({
                    "content": text, "lstrip": false, "normalized": false, "rstrip": false, "single_word": false,
                    "special": special,
                });
                (id.to_string(), record)
            })
            .collect();
        let special: Vec<&str> = self.added().filter(|t| t.2).map(|t| t.1).collect();
        let mut out = json!({
            "add_bos_token": gguf.metadata().get("tokenizer.ggml.add_bos_token").and_then(super::Value::boolean).unwrap_or(false),
            "add_prefix_space": false,
            "added_tokens_decoder": decoder,
            "additional_special_tokens": special,
            "clean_up_tokenization_spaces": false,
            "eos_token": self.text(gguf, "tokenizer.ggml.eos_token_id")?,
            "pad_token": self.text(gguf, "tokenizer.ggml.padding_token_id")?,
            "bos_token": null,
            "split_special_tokens": false,
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": null,
        });
        if let Ok(name) = gguf.architecture()
            && let Some(length) = gguf.unsigned(&format!("{name}.context_length"))?
        {
            out["model_max_length"] = json!(length);
        }
        Ok(out)
    }

    fn generation(&self, gguf: &Gguf) -> Result<Value, CheckpointError> {
        let id = |key: &str| gguf.unsigned(key);
        let eos = id("tokenizer.ggml.eos_token_id")?;
        let mut ends: Vec<u64> = eos.into_iter().collect();
        // The end of a text ends an answer, too, as in the sources' own settings.
        if let Some((end, ..)) = self.added().find(|t| t.1 == "<|endoftext|>" && t.2)
            && !ends.contains(&(end as u64))
        {
            ends.push(end as u64);
        }
        let mut out = Map::new();
        out.insert("eos_token_id".into(), json!(ends));
        for (name, key) in [
            ("bos_token_id", "tokenizer.ggml.bos_token_id"),
            ("pad_token_id", "tokenizer.ggml.padding_token_id"),
        ] {
            if let Some(v) = id(key)? {
                out.insert(name.into(), json!(v));
            }
        }
        for (name, key, most) in SAMPLING {
            let Some(v) = gguf.float_in(key, 0.0..=most, &format!("a number from 0 to {most}"))? else {
                continue;
            };
            if name == "temperature" {
                out.insert("do_sample".into(), json!(true));
            }
            out.insert(name.into(), json!(shortest(v)));
        }
        if let Some(v) = id("general.sampling.top_k")? {
            out.insert("top_k".into(), json!(v));
        }
        Ok(Value::Object(out))
    }
}
