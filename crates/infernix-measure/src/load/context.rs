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
    /// Prompt tokens that came from a cache, where the server says so.
    pub cached_tokens: Option<u64>,
    /// Send to first piece, seconds; `None` where nothing was answered.
    pub ttft: Option<f64>,
    /// Tokens answered.
    pub output_tokens: u64,
    /// First to last token, seconds; `None` of a single token, and where all came at once.
    pub decode: Option<f64>,
    /// Drafted tokens.
    pub drafted: Option<u64>,
    /// Accepted drafts; a server that counts them leaves them out of an answer without one.
    pub accepted: Option<u64>,
    /// Why it does not count.
    pub error: Option<String>,
}

/// Whether the server says how much of a prompt came from its cache. Where it does not, a prompt that was cached shows as a
/// fast one.
pub fn counts_cached(rows: &[ContextRow]) -> bool {
    rows.iter().any(|r| r.cached_tokens.is_some())
}

/// Whether the server counts drafts.
fn counts(rows: &[ContextRow]) -> bool {
    rows.iter().any(|r| r.accepted.is_some())
}

impl ContextRow {
    /// Tokens after the first over the time from first to last, of answers that have both.
    pub fn decode_rate(&self) -> Option<f64> {
        self.decode.map(|t| self.decoded() as f64 / t)
    }

    /// Tokens after the first, which the prompt's pass gave.
    fn decoded(&self) -> u64 {
        self.output_tokens.saturating_sub(1)
    }

    /// Forward passes that made them: one a token that was not accepted from a draft.
    fn rounds(&self) -> u64 {
        self.decoded().saturating_sub(self.accepted.unwrap_or(0))
    }

    fn to_json(&self, counts: bool) -> Value {
        let rounds = (counts && self.error.is_none()).then(|| self.rounds());
        json!({
            "length": self.length,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "ttft_s": self.ttft,
            "output_tokens": self.output_tokens,
            "decode_s": self.decode,
            "decode_tok_s": self.decode_rate(),
            "rounds": rounds,
            "rounds_per_s": rounds.zip(self.decode).map(|(r, t)| r as f64 / t),
            "drafted": self.drafted,
            "accepted": self.accepted,
            "error": self.error,
        })
    }
}

/// Measures every length after two uncounted probes: greedy, `output` tokens each. A prompt of which a twentieth or more,
/// and more than the template's tokens, came from a cache is refused: it would measure the cache. `each` gets every
/// prompt; one without text or counts in its answer has its error and no times.
///
/// # Errors
/// A request that fails otherwise or was cached; an interruption.
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
    let calibration = Calibration::measure(endpoint, path, seed, timeout, interrupted)?;
    for (i, length) in lengths.iter().enumerate() {
        let dataset = Dataset::Random { input: length.tokens, output, spread: 0.0 };
        let items = dataset.items(length.prompts, calibration, seed.wrapping_add(i as u64))?;
        for (k, item) in items.iter().enumerate() {
            if interrupted.load(Ordering::Relaxed) {
                return Err(MeasureError::Stopped);
            }
            let prompt = format!("{} {}", nonce(seed, &format!("{i} {k}")), item.prompt);
            let body = super::data::body(path, &prompt, output, &extra);
            let x = endpoint.begin(path, body, timeout)?.wait(interrupted)?;
            if let Some(f) = x.failure {
                return Err(MeasureError::Server(format!(
                    "the prompt of {} tokens failed: {f}",
                    length.tokens
                )));
            }
            let usage = x.answer.usage.unwrap_or_default();
            if let Some(cached) = usage.cached.filter(|n| from_cache(usage.prompt, *n, calibration.overhead))
            {
                return Err(MeasureError::Server(format!(
                    "{cached} of {} prompt tokens came from the server's cache; change --seed or restart the server",
                    usage.prompt
                )));
            }
            let error = if x.answer.usage.is_none() {
                Some("the server counted no tokens".to_owned())
            } else {
                x.pieces.is_empty().then(|| "an answer without text".to_owned())
            };
            let counts = error.is_none();
            let streamed = x.pieces.first().zip(x.pieces.last()).map(|(a, b)| b.duration_since(*a));
            let seconds = |d: Option<Duration>| d.filter(|_| counts).map(|d| d.as_secs_f64());
            each(ContextRow {
                length: length.tokens,
                prompt_tokens: usage.prompt,
                cached_tokens: usage.cached,
                ttft: seconds(x.ttft()),
                output_tokens: x.output_tokens(),
                decode: seconds(streamed.filter(|d| !d.is_zero() && x.output_tokens() > 1)),
                drafted: x.answer.drafted(),
                accepted: x.answer.accepted(),
                error,
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

/// Means by length as a Markdown table, over the prompts that have the figure; below it the prompts that do not count.
pub fn to_markdown(rows: &[ContextRow]) -> String {
    let mut out = String::from(
        "| context | prompts | TTFT s | prompt tok/s | decode tok/s | rounds/s | tokens/round |\n|---:|---:|---:|---:|---:|---:|---:|\n",
    );
    let mut lengths: Vec<usize> = rows.iter().map(|r| r.length).collect();
    lengths.dedup();
    let known = counts(rows);
    for length in lengths {
        let all = rows.iter().filter(|r| r.length == length).count();
        let of: Vec<&ContextRow> = rows.iter().filter(|r| r.length == length && r.error.is_none()).collect();
        let mean = |f: &dyn Fn(&ContextRow) -> Option<f64>| {
            let values: Vec<f64> = of.iter().filter_map(|r| f(r)).collect();
            (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
        };
        let cell = |v: Option<f64>, digits: usize| {
            v.filter(|v| v.is_finite()).map_or("-".into(), |v| format!("{v:.digits$}"))
        };
        let ratio = |a: Option<f64>, b: Option<f64>| Some(a? / b?);
        let tokens = mean(&|r| Some(r.prompt_tokens as f64));
        let ttft = mean(&|r| r.ttft);
        // Of answers that took time alone: rates are of the same tokens and time, so that one is the product of the others.
        let (decoded, time) = (mean(&|r| r.decode.map(|_| r.decoded() as f64)), mean(&|r| r.decode));
        let rounds = mean(&|r| r.decode.filter(|_| known).map(|_| r.rounds() as f64));
        let _ = writeln!(
            out,
            "| {} | {} | {} | {} | {} | {} | {} |",
            tokens.map_or_else(|| length.to_string(), |t| format!("{t:.0}")),
            if of.len() < all { format!("{} of {all}", of.len()) } else { all.to_string() },
            cell(ttft, 2),
            cell(ratio(tokens, ttft), 1),
            cell(ratio(decoded, time), 1),
            cell(ratio(rounds, time), 2),
            cell(ratio(decoded, rounds), 2),
        );
    }
    for (row, error) in rows.iter().filter_map(|r| Some((r, r.error.as_ref()?))) {
        let _ = writeln!(out, "\na prompt of {} tokens does not count: {error}", row.length);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(ttft: Option<f64>, decode: Option<f64>, error: Option<&str>) -> ContextRow {
        let counted = if error.is_some() { 0 } else { 11 };
        ContextRow {
            length: 100,
            prompt_tokens: 120,
            cached_tokens: None,
            ttft,
            output_tokens: counted,
            decode,
            drafted: None,
            accepted: (counted > 0).then_some(1),
            error: error.map(str::to_owned),
        }
    }

    #[test]
    fn answers_without_text_are_no_part_of_a_mean() {
        let whole = [row(Some(2.0), Some(1.0), None), row(Some(4.0), Some(1.0), None)];
        let text = to_markdown(&whole);
        assert!(text.ends_with("| 120 | 2 | 3.00 | 40.0 | 10.0 | 9.00 | 1.11 |\n"), "{text}");
        let holes = [&whole[..], &[row(Some(3.0), None, None), row(None, None, Some("no text"))]].concat();
        let text = to_markdown(&holes);
        assert!(text.contains("| 120 | 3 of 4 | 3.00 | 40.0 | 10.0 | 9.00 | 1.11 |\n"), "{text}");
        assert!(text.ends_with("a prompt of 100 tokens does not count: no text\n"), "{text}");
        let json = holes[3].to_json(true);
        assert!(json["ttft_s"].is_null() && json["decode_tok_s"].is_null() && json["rounds_per_s"].is_null());
        assert_eq!(json["error"], "no text");
        let none = to_markdown(&holes[3..]);
        assert!(none.contains("| 100 | 0 of 1 | - | - | - | - | - |"), "{none}");
    }

    #[test]
    fn rounds_and_tokens_a_second_are_of_the_same_tokens_and_time() {
        let mut plain = row(Some(2.0), Some(0.5), None);
        plain.accepted = Some(0);
        // 10 tokens after the first, a round each, in half a second.
        assert_eq!(
            (plain.decode_rate(), plain.to_json(true)["rounds_per_s"].as_f64()),
            (Some(20.0), Some(20.0))
        );
        let text =
            to_markdown(&[plain.clone(), ContextRow { output_tokens: 21, decode: Some(1.5), ..plain }]);
        assert!(text.ends_with("| 15.0 | 15.00 | 1.00 |\n"), "30 tokens in 2 s: {text}");
    }

    #[test]
    fn a_server_that_counts_no_cached_tokens_is_not_said_to_cache_none() {
        let mut rows = [row(Some(2.0), Some(1.0), None), row(Some(2.0), Some(1.0), None)];
        assert!(!counts_cached(&rows) && rows[0].to_json(false)["cached_tokens"].is_null());
        rows[1].cached_tokens = Some(0);
        assert!(counts_cached(&rows) && rows[1].to_json(false)["cached_tokens"] == 0);
    }

    #[test]
    fn a_short_prompt_from_a_cache_is_no_measurement_either() {
        assert!(from_cache(236, 231, 12.0));
        assert!(from_cache(8192, 410, 12.0));
        assert!(!from_cache(236, 12, 12.0), "the template's head");
        assert!(!from_cache(8192, 64, 12.0), "a block that begins with it");
    }
}
