//! One request at a time at stated prompt lengths: the table of first tokens and decode rates by context length.

use super::{Calibration, Dataset, nonce};
use crate::client::Endpoint;
use crate::error::{MeasureError, Result};
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Prompts of one length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Length {
    /// Tokens of the prompt.
    pub tokens: usize,
    /// Prompts of that length.
    pub prompts: usize,
}

/// One measured prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct ContextRow {
    /// Length asked for.
    pub length: usize,
    /// Length as the server counts it.
    pub prompt_tokens: u64,
    /// Prompt tokens that came from a cache.
    pub cached_tokens: u64,
    /// Send to first piece, seconds.
    pub ttft: f64,
    /// Tokens answered.
    pub output_tokens: u64,
    /// First to last token, seconds.
    pub decode: f64,
    /// Forward passes, where the server says how many drafts it accepted.
    pub rounds: Option<u64>,
    /// Drafted tokens.
    pub drafted: Option<u64>,
    /// Accepted drafts.
    pub accepted: Option<u64>,
}

impl ContextRow {
    /// Tokens after the first over the time from first to last.
    pub fn decode_rate(&self) -> f64 {
        if self.decode > 0.0 { self.output_tokens.saturating_sub(1) as f64 / self.decode } else { 0.0 }
    }

    fn to_json(&self) -> Value {
        json!({
            "length": self.length,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "ttft_s": self.ttft,
            "output_tokens": self.output_tokens,
            "decode_s": self.decode,
            "decode_tok_s": self.decode_rate(),
            "rounds": self.rounds,
            "rounds_per_s": self.rounds.filter(|_| self.decode > 0.0).map(|r| r as f64 / self.decode),
            "drafted": self.drafted,
            "accepted": self.accepted,
        })
    }
}

/// Measures every length after one uncounted request: greedy, `output` tokens each. A prompt of which more than the
/// template's few tokens came from a cache is refused: it would measure the cache.
///
/// # Errors
/// A request that fails or was cached; an interruption.
pub fn run(
    endpoint: &Endpoint,
    lengths: &[Length],
    output: usize,
    seed: u64,
    timeout: Duration,
    interrupted: &AtomicBool,
    progress: &dyn Fn(&ContextRow),
) -> Result<Vec<ContextRow>> {
    let path = "/v1/chat/completions";
    let extra = json!({ "temperature": 0, "seed": 1 });
    let calibration = Calibration::measure(endpoint, path, seed)?;
    let mut rows = Vec::new();
    for (i, length) in lengths.iter().enumerate() {
        let dataset = Dataset::Random { input: length.tokens, output, spread: 0.0 };
        let items = dataset.items(length.prompts, calibration, seed.wrapping_add(i as u64))?;
        for (k, item) in items.iter().enumerate() {
            if interrupted.load(Ordering::Relaxed) {
                return Err(MeasureError::Stopped);
            }
            let prompt = format!("{} {}", nonce(seed, &format!("{i} {k}")), item.prompt);
            let x = endpoint.stream(path, &super::data::body(path, &prompt, output, &extra), timeout);
            if let Some(f) = x.failure {
                return Err(MeasureError::Server(format!(
                    "the prompt of {} tokens failed: {f}",
                    length.tokens
                )));
            }
            let usage = x.answer.usage.unwrap_or_default();
            if usage.cached > 256 && usage.cached * 20 > usage.prompt {
                return Err(MeasureError::Server(format!(
                    "{} of {} prompt tokens came from the server's cache; change --seed or restart the server",
                    usage.cached, usage.prompt
                )));
            }
            let last = x.pieces.last().or(x.pieces.first());
            let row = ContextRow {
                length: length.tokens,
                prompt_tokens: usage.prompt,
                cached_tokens: usage.cached,
                ttft: x.ttft().unwrap_or_default().as_secs_f64(),
                output_tokens: x.output_tokens(),
                decode: x.pieces.first().zip(last).map_or(0.0, |(a, b)| b.duration_since(*a).as_secs_f64()),
                rounds: x.answer.rounds(),
                drafted: x.answer.drafted(),
                accepted: x.answer.accepted(),
            };
            progress(&row);
            rows.push(row);
        }
    }
    Ok(rows)
}

/// The JSON document.
pub fn to_json(endpoint: &Endpoint, rows: &[ContextRow], seed: u64) -> Value {
    json!({
        "schema_version": 1,
        "command": "bench context",
        "url": endpoint.base(),
        "model_id": endpoint.shown_model(),
        "seed": seed,
        "prompts": rows.iter().map(ContextRow::to_json).collect::<Vec<_>>(),
    })
}

/// Means by length as a Markdown table.
pub fn to_markdown(rows: &[ContextRow]) -> String {
    let mut out = String::from(
        "| context | prompts | TTFT s | prompt tok/s | decode tok/s | rounds/s | tokens/round |\n|---:|---:|---:|---:|---:|---:|---:|\n",
    );
    let mut lengths: Vec<usize> = rows.iter().map(|r| r.length).collect();
    lengths.dedup();
    for length in lengths {
        let of: Vec<&ContextRow> = rows.iter().filter(|r| r.length == length).collect();
        let n = of.len() as f64;
        let mean = |f: &dyn Fn(&ContextRow) -> f64| of.iter().map(|r| f(r)).sum::<f64>() / n;
        let tokens = mean(&|r| r.prompt_tokens as f64);
        let ttft = mean(&|r| r.ttft);
        let known = of.iter().all(|r| r.rounds.is_some());
        let rounds = mean(&|r| r.rounds.unwrap_or(0) as f64);
        let decode = mean(&|r| r.decode);
        let or_dash = |v: f64| if known && v.is_finite() { format!("{v:.2}") } else { "-".into() };
        let _ = writeln!(
            out,
            "| {tokens:.0} | {} | {ttft:.2} | {:.1} | {:.1} | {} | {} |",
            of.len(),
            if ttft > 0.0 { tokens / ttft } else { 0.0 },
            mean(&ContextRow::decode_rate),
            or_dash(rounds / decode),
            or_dash(mean(&|r| r.output_tokens as f64) / rounds),
        );
    }
    out
}
