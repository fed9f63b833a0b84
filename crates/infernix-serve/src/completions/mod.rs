//! Completions: raw prompts, echo and prompt log-probabilities.

mod reply;

pub(crate) use reply::CompletionsReply;

use crate::chat::{ChatSend, read_n, read_send, response_format};
use crate::error::ApiError;
use crate::fields::{Fields, wrong};
use crate::turn::{MAX_CHOICES, MAX_STOPS, MAX_TOP_LOGPROBS, Turn};
use infernix_text::Tokenizer;
use serde_json::Value;

/// Most prompts of a request.
const MAX_PROMPTS: usize = 128;
/// Tokens where the request does not say, as OpenAI has it.
const DEFAULT_TOKENS: usize = 16;

/// A parsed request.
#[derive(Debug)]
pub(crate) struct CompletionsRequest {
    /// Sampling and limits; it has no messages.
    pub(crate) turn: Turn,
    /// Token ids of each prompt.
    pub(crate) prompts: Vec<Vec<u32>>,
    /// The model's name as the client gave it.
    pub(crate) model: Option<String>,
    /// How to send the answer.
    pub(crate) send: ChatSend,
    /// The prompt is part of the text.
    pub(crate) echo: bool,
}

/// Reads a request body.
pub(crate) fn parse(body: Value, tokenizer: &Tokenizer) -> Result<CompletionsRequest, ApiError> {
    let mut fields = Fields::new("", body)?;
    let mut turn = Turn::new();
    let model = fields.string("model")?;
    turn.read_sampling(&mut fields, 2.0)?;
    turn.read_logit_bias(&mut fields, tokenizer.addressable())?;
    turn.read_stops(&mut fields, "stop", MAX_STOPS)?;
    turn.read_extensions(&mut fields)?;
    if let Some(format) = fields.fields("response_format")? {
        let format = response_format(format)?;
        turn.set_format("response_format", format)?;
    }
    turn.max_tokens = Some(fields.count("max_tokens")?.unwrap_or(DEFAULT_TOKENS));
    turn.n = read_n(&mut fields)?;
    if let Some(best) = fields.count("best_of")?
        && best != turn.n
    {
        return Err(ApiError::invalid(
            "best_of",
            format!("is {best}, but only n = {} answers are made", turn.n),
        ));
    }
    if let Some(top) = fields.count("logprobs")? {
        if top > MAX_TOP_LOGPROBS {
            return Err(ApiError::invalid(
                "logprobs",
                format!("must be at most {MAX_TOP_LOGPROBS}, not {top}"),
            ));
        }
        turn.logprobs = Some(top as u8);
    }
    let send = read_send(&mut fields, &mut turn.ignored)?;
    let echo = fields.bool("echo")?.unwrap_or(false);
    if echo && send.stream && turn.logprobs.is_some() {
        return Err(ApiError::invalid("stream", "echo with logprobs is given in one piece only"));
    }
    let suffix = fields.string("suffix")?.filter(|s| !s.is_empty());
    let mut prompts = prompts(fields.need("prompt")?, tokenizer)?;
    if let Some(suffix) = suffix {
        for prompt in &mut prompts {
            *prompt = fill_in(prompt, &suffix, tokenizer)?;
        }
    }
    if prompts.len() * turn.n > MAX_PROMPTS.max(MAX_CHOICES) {
        return Err(ApiError::invalid("prompt", format!("asks for more than {MAX_PROMPTS} answers")));
    }
    turn.cache.session = fields.string("prompt_cache_key")?;
    fields.skip(&["user", "metadata", "service_tier", "store"]);
    turn.ignored.extend(fields.rest());
    Ok(CompletionsRequest { turn, prompts, model, send, echo })
}

/// A text, texts, token ids, or lists of token ids.
fn prompts(value: Value, tokenizer: &Tokenizer) -> Result<Vec<Vec<u32>>, ApiError> {
    let list = match value {
        Value::String(text) => return Ok(vec![encode(tokenizer, &text, "prompt")?]),
        Value::Array(list) => list,
        other => return Err(wrong("prompt", "a string, a list of strings or token ids", &other)),
    };
    if list.is_empty() {
        return Err(ApiError::invalid("prompt", "must not be empty"));
    }
    if list.iter().all(Value::is_number) {
        return Ok(vec![ids("prompt", &list, tokenizer)?]);
    }
    if list.len() > MAX_PROMPTS {
        return Err(ApiError::invalid("prompt", format!("has more than {MAX_PROMPTS} entries")));
    }
    list.into_iter()
        .enumerate()
        .map(|(i, entry)| {
            let path = format!("prompt[{i}]");
            match entry {
                Value::String(text) => encode(tokenizer, &text, &path),
                Value::Array(list) => ids(&path, &list, tokenizer),
                other => Err(wrong(&path, "a string or a list of token ids", &other)),
            }
        })
        .collect()
}

fn encode(tokenizer: &Tokenizer, text: &str, path: &str) -> Result<Vec<u32>, ApiError> {
    let ids = tokenizer.encode(text)?;
    if ids.is_empty() {
        return Err(ApiError::invalid(path, "must not be empty"));
    }
    Ok(ids)
}

/// Token ids of the request.
pub(crate) fn ids(path: &str, list: &[Value], tokenizer: &Tokenizer) -> Result<Vec<u32>, ApiError> {
    if list.is_empty() {
        return Err(ApiError::invalid(path, "must not be empty"));
    }
    let end = tokenizer.addressable();
    list.iter()
        .enumerate()
        .map(|(i, v)| {
            v.as_u64()
                .and_then(|id| u32::try_from(id).ok())
                .filter(|id| *id < end)
                .ok_or_else(|| wrong(&format!("{path}[{i}]"), &format!("a token id below {end}"), v))
        })
        .collect()
}

/// The prompt of a gap between two texts, in the order that Qwen's models are trained on.
fn fill_in(prompt: &[u32], suffix: &str, tokenizer: &Tokenizer) -> Result<Vec<u32>, ApiError> {
    let token = |name: &str| {
        tokenizer
            .token_id(name)
            .ok_or_else(|| ApiError::invalid("suffix", "this model has no tokens for filling in the middle"))
    };
    let mut out = vec![token("<|fim_prefix|>")?];
    out.extend_from_slice(prompt);
    out.push(token("<|fim_suffix|>")?);
    out.extend(tokenizer.encode_text(suffix)?);
    out.push(token("<|fim_middle|>")?);
    Ok(out)
}
