//! What an answer consists of, before a protocol gives it its form.

use crate::error::ApiError;
use crate::tools::Call;
use infernix_engine::sched::Timings;
use infernix_text::{Diagnostics, Tool};
use serde_json::{Value, json};

/// A part of an answer. The decoder gives them in this order: progress, reasoning, content, calls (whole or in pieces), one end
/// or failure.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Piece {
    /// Prompt tokens read so far.
    Progress(Progress),
    /// Reasoning text; never empty.
    Reasoning(String),
    /// Answer text. Empty only where log-probabilities of tokens without text remain.
    Content(String, Vec<TokenLogprob>),
    /// A whole call.
    Call(Call),
    /// A call begins whose arguments follow in pieces; nothing else comes before its end.
    CallBegin(Call),
    /// More of the open call: of its arguments as JSON text, or of its text where it takes free text.
    CallPart(String),
    /// The open call's end; whether it came to it, or was cut.
    CallEnd(Call, bool),
    /// What a search that ran here found. Reasoning and content may follow again.
    Found(Found),
    /// The answer is complete.
    End(Box<End>),
    /// There will be no answer.
    Failed(ApiError),
}

/// The result of a search for tools.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Found {
    /// The call that asked.
    pub(crate) call: String,
    /// Tools found, or the name of what went wrong.
    pub(crate) tools: Result<Vec<Tool>, &'static str>,
}

/// How far the prompt is read.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct Progress {
    pub(crate) total: usize,
    pub(crate) cached: usize,
    pub(crate) processed: usize,
    pub(crate) seconds: f64,
}

impl Progress {
    /// llama.cpp's form.
    pub(crate) fn to_json(self) -> Value {
        json!({
            "total": self.total, "cache": self.cached, "processed": self.processed,
            "time_ms": (self.seconds * 1e3).round(),
        })
    }
}

/// A token of the content with its log-probability.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct TokenLogprob {
    /// Bytes of the token; not always whole characters.
    pub(crate) bytes: Vec<u8>,
    pub(crate) logprob: f32,
    /// Alternatives, most likely first.
    pub(crate) top: Vec<(Vec<u8>, f32)>,
}

impl TokenLogprob {
    /// The form of Chat and Responses.
    pub(crate) fn to_json(&self) -> Value {
        let one = |bytes: &[u8], logprob: f32| json!({"token": String::from_utf8_lossy(bytes), "logprob": finite(logprob), "bytes": bytes});
        let mut value = one(&self.bytes, self.logprob);
        value["top_logprobs"] = self.top.iter().map(|(bytes, logprob)| one(bytes, *logprob)).collect();
        value
    }
}

/// JSON has no infinity: a token that cannot come has a very small probability. Rounding never makes one above 1.
pub(crate) fn finite(logprob: f32) -> f32 {
    logprob.clamp(-9999.0, 0.0)
}

/// Why an answer ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Finish {
    /// The model ended it.
    Stop,
    /// A stop string did.
    StopString(String),
    /// `max_tokens`.
    Length,
    /// The context is full.
    Context,
    /// The model made calls and waits for their results.
    Calls,
}

/// The end of an answer.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct End {
    pub(crate) finish: Finish,
    pub(crate) usage: TokenUsage,
    pub(crate) timings: Times,
    pub(crate) diagnostics: Diagnostics,
    /// What became of the constraint, where the answer had one.
    pub(crate) constraint: Option<Observed>,
}

/// What became of a constraint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Observed {
    /// What the answer turned out to be: `content`, `tools`, or `undecided` where it ended before either.
    pub(crate) branch: &'static str,
    /// Whether the answer came to the end that the constraint demands; a cut one did not.
    pub(crate) complete: bool,
}

impl Observed {
    /// As every protocol shows it.
    pub(crate) fn to_json(self) -> Value {
        json!({"branch": self.branch, "complete": self.complete})
    }
}

/// Token counts of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct TokenUsage {
    pub(crate) prompt: usize,
    pub(crate) cached: usize,
    pub(crate) output: usize,
    /// Of the output, inside reasoning.
    pub(crate) reasoning: usize,
    pub(crate) drafted: usize,
    pub(crate) accepted: usize,
}

impl TokenUsage {
    /// Several answers to one prompt: the prompt counts once, and as far as one of them had to read it, it was not cached.
    pub(crate) fn add_choice(&mut self, other: Self) {
        self.cached = if self.prompt == 0 { other.cached } else { self.cached.min(other.cached) };
        self.prompt = self.prompt.max(other.prompt);
        self.add_answer(other);
    }

    /// Another prompt and its answers.
    pub(crate) fn add_prompt(&mut self, other: Self) {
        self.prompt += other.prompt;
        self.cached += other.cached;
        self.add_answer(other);
    }

    fn add_answer(&mut self, other: Self) {
        self.output += other.output;
        self.reasoning += other.reasoning;
        self.drafted += other.drafted;
        self.accepted += other.accepted;
    }

    /// `usage` of Chat and Completions.
    pub(crate) fn to_openai(self) -> Value {
        json!({
            "prompt_tokens": self.prompt,
            "completion_tokens": self.output,
            "total_tokens": self.prompt + self.output,
            "prompt_tokens_details": {"cached_tokens": self.cached.min(self.prompt)},
            "completion_tokens_details": {
                "reasoning_tokens": self.reasoning.min(self.output),
                "accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0,
            },
        })
    }

    /// `usage` of Responses.
    pub(crate) fn to_responses(self) -> Value {
        json!({
            "input_tokens": self.prompt,
            "input_tokens_details": {"cached_tokens": self.cached.min(self.prompt), "cache_write_tokens": 0},
            "output_tokens": self.output,
            "output_tokens_details": {"reasoning_tokens": self.reasoning.min(self.output)},
            "total_tokens": self.prompt + self.output,
        })
    }

    /// `usage` of Messages, whose input tokens leave the cached ones out.
    pub(crate) fn to_messages(self) -> Value {
        let cached = self.cached.min(self.prompt);
        json!({
            "input_tokens": self.prompt - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self.output,
        })
    }
}

/// Times of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct Times {
    pub(crate) queued: f64,
    pub(crate) prompt: f64,
    pub(crate) decode: f64,
}

impl From<Timings> for Times {
    fn from(t: Timings) -> Self {
        Self {
            queued: t.queued.as_secs_f64(),
            prompt: t.prompt.as_secs_f64(),
            decode: t.decode.as_secs_f64(),
        }
    }
}

impl Times {
    /// llama.cpp's `timings`. The first token comes out of the prompt's own pass, so n tokens take n - 1 intervals.
    pub(crate) fn to_json(self, usage: TokenUsage) -> Value {
        let read = usage.prompt - usage.cached.min(usage.prompt);
        let intervals = usage.output.saturating_sub(1);
        let rate = |n: usize, seconds: f64| if n > 0 && seconds > 0.0 { n as f64 / seconds } else { 0.0 };
        let per = |n: usize, seconds: f64| if n > 0 { seconds * 1e3 / n as f64 } else { 0.0 };
        let mut value = json!({
            "cache_n": usage.cached, "prompt_n": read,
            "prompt_ms": self.prompt * 1e3,
            "prompt_per_token_ms": per(read, self.prompt),
            "prompt_per_second": rate(read, self.prompt),
            "predicted_n": usage.output,
            "predicted_ms": self.decode * 1e3,
            "predicted_per_token_ms": per(intervals, self.decode),
            "predicted_per_second": rate(intervals, self.decode),
            "queued_ms": self.queued * 1e3,
        });
        if usage.drafted > 0 {
            value["draft_n"] = usage.drafted.into();
            value["draft_n_accepted"] = usage.accepted.into();
        }
        value
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_counts_once_and_as_read_where_the_first_of_its_answers_read_it() {
        let answer = |cached| TokenUsage { prompt: 213, cached, output: 5, ..TokenUsage::default() };
        let mut usage = TokenUsage::default();
        // In the order in which they end.
        for cached in [206, 0, 206] {
            usage.add_choice(answer(cached));
        }
        assert_eq!((usage.prompt, usage.cached, usage.output), (213, 0, 15));
        let mut batch = TokenUsage::default();
        batch.add_prompt(usage);
        batch.add_prompt(answer(200));
        assert_eq!((batch.prompt, batch.cached, batch.output), (426, 200, 20));
    }

    #[test]
    fn rates_are_finite_for_nothing_read_and_nothing_given() {
        let usage = TokenUsage { prompt: 5, cached: 5, ..TokenUsage::default() };
        let timings = Times::default().to_json(usage);
        for (name, value) in timings.as_object().expect("an object") {
            assert!(value.as_f64().is_some_and(f64::is_finite), "{name} is {value}");
        }
    }

    #[test]
    fn log_probabilities_are_numbers_of_at_most_zero() {
        let token =
            TokenLogprob { bytes: vec![0xE2, 0x82], logprob: f32::NEG_INFINITY, top: vec![(vec![97], 1e-9)] };
        let value = token.to_json();
        assert_eq!(value["logprob"], -9999.0);
        assert_eq!(value["bytes"], serde_json::json!([0xE2, 0x82]));
        assert_eq!(value["top_logprobs"][0]["logprob"], 0.0);
    }
}
