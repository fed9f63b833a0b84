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
    /// Drafted tokens.
    pub drafted: Option<u64>,
    /// Accepted drafts; a server that counts them leaves them out of an answer without one.
    pub accepted: Option<u64>,
}

/// Whether the server counts drafts.
fn counts(rows: &[ContextRow]) -> bool {
    rows.iter().any(|r| r.accepted.is_some())
}

impl ContextRow {
    /// Tokens after the first over the time from first to last.
    pub fn decode_rate(&self) -> f64 {
        if self.decode > 0.0 { self.output_tokens.saturating_sub(1) as f64 / self.decode } else { 0.0 }
    }

    /// Forward passes: one a token that was not accepted from a draft.
    fn rounds(&self) -> u64 {
        self.output_tokens.saturating_sub(self.accepted.unwrap_or(0))
    }

    fn to_json(&self, counts: bool) -> Value {
        let rounds = counts.then(|| self.rounds());
        json!({
            "length": self.length,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "ttft_s": self.ttft,
            "output_tokens": self.output_tokens,
            "decode_s": self.decode,
            "decode_tok_s": self.decode_rate(),
            "rounds": rounds,
            "rounds_per_s": rounds.filter(|_| self.decode > 0.0).map(|r| r as f64 / self.decode),
            "drafted": self.drafted,
            "accepted": self.accepted,
        })
    }
}

/// Measures every length after two uncounted probes: greedy, `output` tokens each. A prompt of which a twentieth or more,
/// and more than the template's tokens, came from a cache is refused: it would measure the cache. `each` gets every
/// measured prompt.
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
    each: &mut dyn FnMut(ContextRow),
) -> Result<()> {
    let path = "/v1/chat/completions";
    let extra = json!({ "temperature": 0, "seed": 1 });
    let calibration = Calibration::measure(endpoint, path, seed)?;
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
            if from_cache(usage.prompt, usage.cached, calibration.overhead) {
                return Err(MeasureError::Server(format!(
                    "{} of {} prompt tokens came from the server's cache; change --seed or restart the server",
                    usage.cached, usage.prompt
                )));
            }
            let last = x.pieces.last().or(x.pieces.first());
            each(ContextRow {
                length: length.tokens,
                prompt_tokens: usage.prompt,
                cached_tokens: usage.cached,
                ttft: x.ttft().unwrap_or_default().as_secs_f64(),
                output_tokens: x.output_tokens(),
                decode: x.pieces.first().zip(last).map_or(0.0, |(a, b)| b.duration_since(*a).as_secs_f64()),
                drafted: x.answer.drafted(),
                accepted: x.answer.accepted(),
            });
        }
    }
    Ok(())
}

/// Whether a prompt was read from a cache: `overhead` tokens of a template are the same in every prompt.
fn from_cache(prompt: u64, cached: u64, overhead: f64) -> bool {
    cached as f64 > overhead.ceil() && cached * 20 >= prompt
}

/// The JSON document.
pub fn to_json(endpoint: &Endpoint, rows: &[ContextRow], seed: u64) -> Value {
    json!({
        "schema_version": 1,
        "command": "bench context",
        "url": endpoint.base(),
        "model_id": endpoint.shown_model(),
        "seed": seed,
        "prompts": rows.iter().map(|r| r.to_json(counts(rows))).collect::<Vec<_>>(),
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
        let known = counts(rows);
        let rounds = mean(&|r| r.rounds() as f64);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_prompt_from_a_cache_is_no_measurement_either() {
        assert!(from_cache(236, 231, 12.0));
        assert!(from_cache(8192, 410, 12.0));
        assert!(!from_cache(236, 12, 12.0), "the template's head");
        assert!(!from_cache(8192, 64, 12.0), "a block that begins with it");
    }
}
