//! Perplexity over windows of token streams. Logits are taken as they are (FP32), over the ids a tokenizer can produce.

use crate::corpus::{Window, tokens_blake3, windows};
use crate::error::{MeasureError, Result};
use crate::row::block_sum;
use crate::source::{Call, LogitsSource, Path};
use crate::stats::MIN_ROWS;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// How to measure.
#[derive(Clone, Debug)]
pub struct PplOptions {
    /// Corpus name.
    pub corpus: String,
    /// `full`, `quick` or `custom`.
    pub mode: String,
    /// Tokens per window.
    pub context: usize,
    /// Tokens a window moves on.
    pub stride: usize,
    /// Ids a tokenizer can produce.
    pub valid_vocab: usize,
}

/// A stream of tokens.
#[derive(Clone, Debug)]
pub struct TokenStream {
    /// Name within the corpus.
    pub id: String,
    /// Group in the table.
    pub domain: String,
    /// Path as the manifest names it.
    pub path: String,
    /// Its tokens.
    pub tokens: Vec<u32>,
}

/// Values so far, after each window.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PplProgress {
    /// Scored tokens.
    pub done: usize,
    /// Tokens to score in all.
    pub total: usize,
    /// Perplexity so far.
    pub ppl: f64,
    /// Seconds since the start.
    pub seconds: f64,
}

/// Sums of scored tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Total {
    /// Scored tokens.
    pub tokens: usize,
    /// Sum of −ln p.
    pub nll: f64,
    /// Sum of its squares.
    squares: f64,
}

impl Total {
    fn add(&mut self, nll: f64) {
        self.tokens += 1;
        self.nll += nll;
        self.squares += nll * nll;
    }

    fn merge(&mut self, other: &Total) {
        self.tokens += other.tokens;
        self.nll += other.nll;
        self.squares += other.squares;
    }

    /// Mean −ln p.
    pub fn mean(&self) -> f64 {
        self.nll / self.tokens.max(1) as f64
    }

    /// exp of the mean.
    pub fn ppl(&self) -> f64 {
        self.mean().exp()
    }

    /// llama.cpp's ± on the perplexity; none for fewer than [`MIN_ROWS`] tokens.
    pub fn pm(&self) -> Option<f64> {
        let n = self.tokens as f64;
        let variance = self.squares / n - self.mean() * self.mean();
        (self.tokens >= MIN_ROWS).then(|| self.ppl() * (variance.max(0.0) / (n - 1.0)).sqrt())
    }

    fn json(&self) -> Value {
        json!({ "scored_tokens": self.tokens, "total_nll": self.nll, "mean_nll": self.mean(),
            "perplexity": self.ppl(), "perplexity_pm": self.pm() })
    }
}

/// One stream's result.
#[derive(Clone, Debug)]
pub struct StreamReport {
    /// Name within the corpus.
    pub id: String,
    /// Group.
    pub domain: String,
    /// Path as the manifest names it.
    pub path: String,
    /// Tokens read.
    pub input_tokens: usize,
    /// Sums.
    pub total: Total,
    /// Windows with their sums.
    pub windows: Vec<(Window, Total)>,
}

/// A finished measurement.
#[derive(Clone, Debug)]
pub struct PplReport {
    options: PplOptions,
    engine: Value,
    tokens_blake3: Vec<String>,
    /// Streams in order.
    pub streams: Vec<StreamReport>,
    /// Everything.
    pub overall: Total,
    /// Seconds of scoring.
    pub seconds: f64,
}

/// −ln p of `target` in f64 over ids below `valid`, from logits as they are.
fn nll(stream: &str, token: usize, logits: &[f32], valid: usize, target: usize) -> Result<f64> {
    let own = &logits[..valid];
    if let Some(id) = own.iter().position(|l| !l.is_finite()) {
        let place = format!("stream {stream}: the row of token {token}");
        return Err(MeasureError::NotFinite { place, id, value: own[id] });
    }
    let max = f64::from(own.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum = block_sum(valid, |i| (f64::from(own[i]) - max).exp());
    Ok(max + sum.ln() - f64::from(own[target]))
}

/// Scores every token of every stream but its first.
pub fn ppl(
    options: &PplOptions,
    source: &mut dyn LogitsSource,
    streams: &[TokenStream],
    progress: &mut dyn FnMut(&PplProgress),
    interrupt: &AtomicBool,
) -> Result<PplReport> {
    let started = Instant::now();
    let valid = options.valid_vocab;
    if valid == 0 || valid > source.vocab() {
        return Err(MeasureError::Options(format!(
            "{valid} valid ids of a vocabulary of {}",
            source.vocab()
        )));
    }
    if streams.is_empty() {
        return Err(MeasureError::Options("no stream to measure on".into()));
    }
    let mut plans = Vec::new();
    for s in streams {
        let wrong =
            |what: String| MeasureError::Corpus { corpus: format!("{}/{}", options.corpus, s.id), what };
        if s.tokens.len() < 2 {
            return Err(wrong(format!("{} tokens; at least 2 are needed", s.tokens.len())));
        }
        if let Some(id) = s.tokens.iter().find(|id| **id as usize >= valid) {
            return Err(wrong(format!("token {id}, the model has {valid} ids: not its tokenizer")));
        }
        plans.push(windows(s.tokens.len(), options.context, options.stride)?);
    }
    let total: usize = streams.iter().map(|s| s.tokens.len() - 1).sum();
    let all: usize = plans.iter().map(Vec::len).sum();
    let (mut overall, mut done, mut out) = (Total::default(), 0, Vec::new());
    for (stream, plan) in streams.iter().zip(plans) {
        let mut sum = Total::default();
        let mut parts = Vec::with_capacity(plan.len());
        for window in plan {
            if interrupt.load(Ordering::Relaxed) {
                return Err(MeasureError::Interrupted { done, total: all, advice: "run it again" });
            }
            let call = Call {
                stream: done as u64,
                tokens: &stream.tokens[window.input.clone()],
                rows: window.rows(),
                path: Path::Prompt,
            };
            let mut own = Total::default();
            source.rows(&call, &mut |i, logits| {
                let Some(target) = stream.tokens.get(window.targets.start + i) else {
                    return Err(MeasureError::Options(
                        "the engine gave more rows than were asked for".into(),
                    ));
                };
                own.add(nll(&stream.id, window.targets.start + i, logits, valid, *target as usize)?);
                Ok(())
            })?;
            if own.tokens != window.targets.len() {
                let what = format!("the engine gave {} rows of {}", own.tokens, window.targets.len());
                return Err(MeasureError::Options(what));
            }
            sum.merge(&own);
            overall.merge(&own);
            parts.push((window, own));
            done += 1;
            let seconds = started.elapsed().as_secs_f64();
            progress(&PplProgress { done: overall.tokens, total, ppl: overall.ppl(), seconds });
        }
        out.push(StreamReport {
            id: stream.id.clone(),
            domain: stream.domain.clone(),
            path: stream.path.clone(),
            input_tokens: stream.tokens.len(),
            total: sum,
            windows: parts,
        });
    }
    Ok(PplReport {
        options: options.clone(),
        engine: source.describe(),
        tokens_blake3: streams.iter().map(|s| tokens_blake3(&s.tokens)).collect(),
        streams: out,
        overall,
        seconds: started.elapsed().as_secs_f64(),
    })
}

impl PplReport {
    /// Sums per domain, by name.
    pub fn domains(&self) -> BTreeMap<&str, Total> {
        let mut out = BTreeMap::<&str, Total>::new();
        for s in &self.streams {
            out.entry(&s.domain).or_default().merge(&s.total);
        }
        out
    }

    /// The JSON document; all but `timing` is the same from run to run.
    pub fn to_json(&self) -> Value {
        let with = |mut v: Value, more: Value| {
            if let (Value::Object(v), Value::Object(more)) = (&mut v, more) {
                v.extend(more);
            }
            v
        };
        let window = |(i, (w, t)): (usize, &(Window, Total))| {
            with(
                json!({ "index": i, "input_begin": w.input.start, "input_end": w.input.end,
                    "target_begin": w.targets.start, "target_end": w.targets.end }),
                t.json(),
            )
        };
        let streams = self.streams.iter().zip(&self.tokens_blake3).map(|(s, hash)| {
            with(
                json!({ "id": s.id, "domain": s.domain, "path": s.path, "input_tokens": s.input_tokens,
                    "unscored_tokens": 1, "tokens_blake3": hash,
                    "windows": s.windows.iter().enumerate().map(window).collect::<Vec<_>>() }),
                s.total.json(),
            )
        });
        let domains = self.domains();
        let domains = domains.iter().map(|(name, t)| with(json!({ "domain": name }), t.json()));
        let o = &self.options;
        json!({
            "schema_version": crate::SCHEMA_VERSION,
            "command": "ppl",
            "metric": { "name": "perplexity", "log_base": "e" },
            "engine": self.engine,
            "corpus": { "id": o.corpus, "mode": o.mode, "stream_count": self.streams.len() },
            "execution": { "context_tokens": o.context, "stride_tokens": o.stride, "valid_vocab": o.valid_vocab },
            "streams": streams.collect::<Vec<_>>(),
            "domains": domains.collect::<Vec<_>>(),
            "overall": self.overall.json(),
            "timing": { "score_seconds": self.seconds,
                "scored_tokens_per_second": self.overall.tokens as f64 / self.seconds.max(1e-9) },
        })
    }

    /// A table by domain.
    pub fn to_text(&self) -> String {
        let mut out = format!(
            "{} ({}), windows of {} moving by {}\n{:<24} {:>9} {:>10} {:>12}\n",
            self.options.corpus,
            self.options.mode,
            self.options.context,
            self.options.stride,
            "domain",
            "tokens",
            "mean_nll",
            "ppl"
        );
        let mut line = |name: &str, t: &Total| {
            let _ = writeln!(out, "{name:<24} {:>9} {:>10.6} {:>12.6}", t.tokens, t.mean(), t.ppl());
        };
        for (name, t) in self.domains() {
            line(name, &t);
        }
        line("overall", &self.overall);
        out
    }

    /// The same as Markdown.
    pub fn to_markdown(&self) -> String {
        let mut out = String::from("| domain | tokens | mean NLL | PPL |\n|---|---:|---:|---:|\n");
        let mut line = |name: &str, t: &Total| {
            let _ = writeln!(out, "| {name} | {} | {:.6} | {:.6} |", t.tokens, t.mean(), t.ppl());
        };
        for (name, t) in self.domains() {
            line(name, &t);
        }
        line("overall", &self.overall);
        out
    }
}
