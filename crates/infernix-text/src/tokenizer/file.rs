//! What `tokenizer.json` and `tokenizer_config.json` may say, checked field by field: a setting that
//! would change ids and is not implemented is an error, never ignored.

use std::collections::HashMap;

use serde::Deserialize;
use serde_json::Value;

use super::added::AddedToken;
use super::merge::FoldSeed;
use super::split::{BYTE_LEVEL_PATTERN, Split};
use crate::error::{Result, TextError, parse_error};

#[derive(Deserialize)]
pub(crate) struct TokenizerFile {
    #[serde(default)]
    pub(crate) added_tokens: Vec<AddedToken>,
    normalizer: Option<Value>,
    pre_tokenizer: Option<Value>,
    post_processor: Option<Value>,
    decoder: Option<Value>,
    pub(crate) model: ModelFile,
}

#[derive(Deserialize)]
pub(crate) struct ModelFile {
    #[serde(rename = "type")]
    kind: Option<String>,
    dropout: Option<f64>,
    unk_token: Option<String>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
    #[serde(default)]
    byte_fallback: bool,
    #[serde(default)]
    pub(crate) ignore_merges: bool,
    pub(crate) vocab: HashMap<String, u32, FoldSeed>,
    pub(crate) merges: Vec<MergeEntry>,
}

#[derive(Deserialize)]
#[serde(untagged)]
pub(crate) enum MergeEntry {
    Pair(String, String),
    Line(String),
}

impl MergeEntry {
    pub(crate) fn sides(&self) -> Option<(&str, &str)> {
        match self {
            Self::Pair(a, b) => Some((a, b)),
            Self::Line(line) => line.split_once(' '),
        }
    }
}

/// What happens to text before merging.
pub(crate) struct Steps {
    pub(crate) nfc: bool,
    pub(crate) splits: Vec<Split>,
    pub(crate) add_prefix_space: bool,
}

fn unsupported(what: impl Into<String>) -> TextError {
    TextError::UnsupportedTokenizer { what: what.into() }
}

impl TokenizerFile {
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self> {
        let file: Self = serde_json::from_slice(bytes).map_err(|e| parse_error("tokenizer.json", &e))?;
        let model = &file.model;
        if model.kind.as_deref().is_some_and(|kind| kind != "BPE") {
            return Err(unsupported(format!("model.type {:?}", model.kind)));
        }
        if model.dropout.is_some_and(|p| p > 0.0) {
            return Err(unsupported("model.dropout"));
        }
        if model.byte_fallback {
            return Err(unsupported("model.byte_fallback"));
        }
        for (name, field) in [
            ("continuing_subword_prefix", &model.continuing_subword_prefix),
            ("end_of_word_suffix", &model.end_of_word_suffix),
        ] {
            if field.as_deref().is_some_and(|s| !s.is_empty()) {
                return Err(unsupported(format!("model.{name}")));
            }
        }
        if model.unk_token.is_some() {
            // Byte-level text has no unknown symbols; a token for them says it is something else.
            return Err(unsupported("model.unk_token"));
        }
        Ok(file)
    }

    /// The steps before merging, and warnings about what is not applied.
    pub(crate) fn steps(&self, warnings: &mut Vec<String>) -> Result<Steps> {
        let mut steps = Steps { nfc: false, splits: Vec::new(), add_prefix_space: false };
        for step in sequence(self.normalizer.as_ref(), "normalizers") {
            match kind(step) {
                "NFC" => steps.nfc = true,
                other => return Err(unsupported(format!("normalizer {other:?}"))),
            }
        }
        let mut byte_level = false;
        for step in sequence(self.pre_tokenizer.as_ref(), "pretokenizers") {
            if byte_level {
                return Err(unsupported("a pre_tokenizer after ByteLevel"));
            }
            match kind(step) {
                "Split" => steps.splits.push(split_step(step)?),
                "ByteLevel" => {
                    byte_level = true;
                    let flag = |name: &str| step.get(name).and_then(Value::as_bool);
                    steps.add_prefix_space = flag("add_prefix_space").unwrap_or(true);
                    if steps.add_prefix_space && !steps.splits.is_empty() {
                        // It would put a space before every piece, not only before the text.
                        return Err(unsupported("ByteLevel.add_prefix_space after a Split"));
                    }
                    if flag("use_regex").unwrap_or(true) {
                        steps.splits.push(Split::pattern(BYTE_LEVEL_PATTERN)?);
                    }
                }
                other => return Err(unsupported(format!("pre_tokenizer {other:?}"))),
            }
        }
        if !byte_level {
            return Err(unsupported("a pre_tokenizer without ByteLevel"));
        }
        for step in sequence(self.decoder.as_ref(), "decoders") {
            if kind(step) != "ByteLevel" {
                return Err(unsupported(format!("decoder {:?}", kind(step))));
            }
        }
        for step in sequence(self.post_processor.as_ref(), "processors") {
            // ByteLevel only moves offsets. Templates add BOS and the like, which a chat prompt
            // already spells out.
            if kind(step) != "ByteLevel" {
                warnings.push(format!(
                    "post_processor {:?} of tokenizer.json is not applied: no tokens are added around the text",
                    kind(step)
                ));
            }
        }
        Ok(steps)
    }
}

fn kind(step: &Value) -> &str {
    step.get("type").and_then(Value::as_str).unwrap_or("?")
}

/// The steps of a field that holds nothing, one step or a `Sequence`.
fn sequence<'v>(field: Option<&'v Value>, list: &str) -> Vec<&'v Value> {
    match field {
        None | Some(Value::Null) => Vec::new(),
        Some(step) if kind(step) == "Sequence" => step
            .get(list)
            .and_then(Value::as_array)
            .map(|steps| steps.iter().flat_map(|s| sequence(Some(s), list)).collect())
            .unwrap_or_default(),
        Some(step) => vec![step],
    }
}

fn split_step(step: &Value) -> Result<Split> {
    let behavior = step.get("behavior").and_then(Value::as_str).unwrap_or("?");
    if behavior != "Isolated" {
        return Err(unsupported(format!("Split.behavior {behavior:?}")));
    }
    // With isolated pieces, inverting only renames matches and gaps.
    match step.get("pattern") {
        Some(Value::Object(pattern)) => match (pattern.get("Regex"), pattern.get("String")) {
            (Some(Value::String(regex)), _) => Split::pattern(regex),
            (_, Some(Value::String(literal))) if !literal.is_empty() => Ok(Split::Literal(literal.clone())),
            _ => Err(unsupported("Split.pattern of this form")),
        },
        _ => Err(unsupported("Split.pattern of this form")),
    }
}

/// The parts of `tokenizer_config.json` that matter here.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct TokenizerConfigFile {
    #[serde(default)]
    pub(crate) added_tokens_decoder: serde_json::Map<String, Value>,
    pub(crate) bos_token: Option<Value>,
    pub(crate) eos_token: Option<Value>,
    pub(crate) pad_token: Option<Value>,
    pub(crate) unk_token: Option<Value>,
    pub(crate) chat_template: Option<Value>,
    pub(crate) model_max_length: Option<Value>,
}

impl TokenizerConfigFile {
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self> {
        serde_json::from_slice(bytes).map_err(|e| parse_error("tokenizer_config.json", &e))
    }

    /// The entries of `added_tokens_decoder` with their ids.
    pub(crate) fn added(&self) -> Result<Vec<AddedToken>> {
        let mut tokens = Vec::with_capacity(self.added_tokens_decoder.len());
        for (key, entry) in &self.added_tokens_decoder {
            let error = |message: String| TextError::Tokenizer {
                file: "tokenizer_config.json".to_owned(),
                message: format!("added_tokens_decoder[{key:?}]: {message}"),
            };
            let id: u32 = key.parse().map_err(|_| error("the key is not an id".into()))?;
            let mut token: AddedToken =
                serde_json::from_value(entry.clone()).map_err(|e| error(e.to_string()))?;
            token.id = id;
            tokens.push(token);
        }
        tokens.sort_by_key(|t| t.id);
        Ok(tokens)
    }
}

/// A token given as a string or as an object with `content`.
pub(crate) fn token_name(field: Option<&Value>) -> Option<String> {
    match field? {
        Value::String(s) => Some(s.clone()),
        Value::Object(o) => o.get("content").and_then(Value::as_str).map(str::to_owned),
        _ => None,
    }
}
