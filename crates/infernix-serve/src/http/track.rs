//! What is known of a request, for its log line and the metrics. Written once, when the request ends, however it does.

use super::Client;
use crate::app::{Active, App};
use crate::error::ApiError;
use crate::metrics::{Measured, Outcome};
use crate::piece::{Piece, TokenUsage};
use crate::prepare::Plan;
use crate::reply::Running;
use infernix_engine::cache::{Habit, Miss, MissCause};
use serde_json::{Map, Value, json};
use std::sync::Arc;
use std::time::Instant;

/// A request that has started.
pub(super) struct Track {
    app: Arc<App>,
    _active: Active,
    route: &'static str,
    fields: Map<String, Value>,
    started: Instant,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
    /// By prompt: its tokens, and the counts of each answer to it that has begun.
    prompts: Vec<(usize, Vec<Option<TokenUsage>>)>,
    queued: Option<f64>,
    outcome: Option<Outcome>,
}

impl Track {
    pub(super) fn new(
        app: &Arc<App>,
        client: &Client,
        route: &'static str,
        detail: Map<String, Value>,
    ) -> Self {
        let mut fields = Map::from_iter([
            ("id".to_owned(), Value::from(client.request_id.as_str())),
            ("route".to_owned(), route.into()),
        ]);
        if let Some(key) = client.key {
            fields.insert("key".to_owned(), app.keys.name(key).into());
        }
        if let Some(trace) = &client.trace {
            fields.insert("traceparent".to_owned(), trace.as_str().into());
        }
        fields.extend(detail);
        app.log.write("request_start", fields.clone());
        Self {
            app: Arc::clone(app),
            _active: Active::new(app),
            route,
            fields,
            started: Instant::now(),
            first_token: None,
            last_token: None,
            prompts: Vec::new(),
            queued: None,
            outcome: None,
        }
    }

    /// Tells what will be asked.
    pub(super) fn asks(&mut self, plans: &[Plan]) {
        self.prompts = plans.iter().map(|p| (p.prompt.len(), vec![None; p.n])).collect();
    }

    /// Tells the counts of a request that is not made of answers.
    pub(super) fn counted(&mut self, usage: TokenUsage) {
        self.prompts = vec![(usage.prompt, vec![Some(usage)])];
    }

    /// Counts so far, of an answer that is cut short, too.
    fn usage(&self) -> TokenUsage {
        let mut sum = TokenUsage::default();
        for (prompt, choices) in &self.prompts {
            let mut one = TokenUsage::default();
            choices.iter().flatten().for_each(|c| one.add_choice(*c));
            sum.add_prompt(TokenUsage { prompt: *prompt, ..one });
        }
        sum
    }

    /// Notes a piece of the answer.
    pub(super) fn piece(&mut self, choice: usize, piece: &Piece, running: &Running) {
        if let Some(slot) = self.prompts.iter_mut().flat_map(|(_, choices)| choices).nth(choice) {
            *slot = Some(running.usage);
        }
        match piece {
            Piece::Progress(_) => {
                self.queued.get_or_insert_with(|| self.started.elapsed().as_secs_f64());
            }
            Piece::Reasoning(_)
            | Piece::Content(..)
            | Piece::Call(_)
            | Piece::CallBegin(_)
            | Piece::CallPart(_)
            | Piece::CallEnd(..)
            | Piece::Found(_) => {
                let now = Instant::now();
                self.first_token.get_or_insert(now);
                self.last_token = Some(now);
            }
            Piece::End(end) => {
                self.fields.insert("finish".to_owned(), format!("{:?}", FinishName(&end.finish)).into());
                self.fields.insert("timings".to_owned(), end.timings.to_json(end.usage));
                let d = &end.diagnostics;
                self.app.metrics.repair("duplicate_parameter", d.duplicate_parameters_repaired.into());
                self.app.metrics.repair("schema_mismatch", d.schema_mismatch_arguments.into());
                self.app.metrics.repair("empty_argument", d.empty_arguments_omitted.into());
                self.app.metrics.repair("tolerant", d.tolerant_recovered.into());
                if d.marker_seen || d.marker_in_reasoning {
                    self.fields.insert("tool_calls".to_owned(), serde_json::to_value(d).unwrap_or_default());
                }
            }
            Piece::Failed(error) => self.failed(error),
        }
    }

    /// Notes why there is no answer.
    pub(super) fn failed(&mut self, error: &ApiError) {
        self.fields.insert("status".to_owned(), error.status.into());
        self.fields.insert("code".to_owned(), error.code.into());
        self.outcome = Some(Outcome::Failed);
    }

    /// Notes why a prompt missed the cache; the line tells it of the first.
    pub(super) fn missed(&mut self, miss: &Miss, habit: Option<Habit>) {
        let cause = cause(miss.cause);
        self.app.metrics.miss(cause);
        self.fields.entry("miss").or_insert_with(|| {
            json!({
                "cause": cause, "shared": miss.shared, "reused": miss.reused, "habit": habit.map(Habit::name),
            })
        });
    }

    /// The answer is complete and sent.
    pub(super) fn done(&mut self) {
        self.outcome.get_or_insert(Outcome::Done);
    }
}

/// A cause as one word.
pub(crate) fn cause(cause: MissCause) -> &'static str {
    const NAMES: [(MissCause, &str); 5] = [
        (MissCause::Cold, "cold"),
        (MissCause::Diverged, "diverged"),
        (MissCause::NoSnapshot, "no_snapshot"),
        (MissCause::Evicted, "evicted"),
        (MissCause::Bypassed, "bypassed"),
    ];
    // What has no other name goes on where the cached text ends.
    NAMES.iter().find(|(known, _)| *known == cause).map_or("extended", |(_, name)| name)
}

/// A finish without the text that a stop string has.
struct FinishName<'a>(&'a crate::piece::Finish);

impl std::fmt::Debug for FinishName<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        use crate::piece::Finish as F;
        f.write_str(match self.0 {
            F::Stop => "stop",
            F::StopString(_) => "stop_string",
            F::Length => "length",
            F::Context => "context",
            F::Calls => "tool_calls",
        })
    }
}

impl Drop for Track {
    fn drop(&mut self) {
        let outcome = self.outcome.unwrap_or(Outcome::Disconnected);
        let usage = self.usage();
        let duration = self.started.elapsed().as_secs_f64();
        let since = |at: Instant| (at - self.started).as_secs_f64();
        let between = match (self.first_token, self.last_token) {
            (Some(first), Some(last)) if usage.output > 1 => {
                Some((last - first).as_secs_f64() / (usage.output - 1) as f64)
            }
            _ => None,
        };
        let measured = Measured {
            first_token: self.first_token.map(since),
            between_tokens: between,
            duration,
            queued: self.queued,
        };
        self.app.metrics.ended(self.route, outcome, measured);
        let mut fields = std::mem::take(&mut self.fields);
        // Never a text: only counts, times and words of ours.
        let word = |name: &str| fields.get(name).and_then(Value::as_str);
        let rounded = |seconds: f64| (seconds * 1e3).round() / 1e3;
        macro_rules! say {
            ($level:ident) => {
                tracing::$level!(
                    id = word("id"),
                    route = self.route,
                    key = word("key"),
                    traceparent = word("traceparent"),
                    code = word("code"),
                    finish = word("finish"),
                    prompt = usage.prompt,
                    cached = usage.cached,
                    output = usage.output,
                    seconds = rounded(duration),
                    first_token = measured.first_token.map(rounded),
                    "{}",
                    outcome.name()
                )
            };
        }
        if outcome == Outcome::Failed {
            say!(warn)
        } else {
            say!(info)
        }
        fields.insert("outcome".to_owned(), outcome.name().into());
        fields.insert("seconds".to_owned(), duration.into());
        fields.insert("first_token_seconds".to_owned(), json!(measured.first_token));
        fields.insert("prompt_tokens".to_owned(), usage.prompt.into());
        fields.insert("cached_tokens".to_owned(), usage.cached.into());
        fields.insert("output_tokens".to_owned(), usage.output.into());
        fields.insert("reasoning_tokens".to_owned(), usage.reasoning.into());
        let kind = if outcome == Outcome::Done { "request_done" } else { "request_error" };
        self.app.log.write(kind, fields);
    }
}
