//! `/metrics` in Prometheus' text form: sums of the HTTP side, and where the engine stands.

use infernix_engine::sched::{Status, TierStatus};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::{Mutex, PoisonError};

/// Upper bounds in seconds, as vLLM has them for the first token.
const BOUNDS: [f64; 16] =
    [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 40.0, 160.0];

#[derive(Debug, Clone, Default)]
struct Histogram {
    counts: [u64; BOUNDS.len()],
    count: u64,
    sum: f64,
}

impl Histogram {
    fn add(&mut self, value: f64) {
        for (count, bound) in self.counts.iter_mut().zip(BOUNDS) {
            *count += u64::from(value <= bound);
        }
        self.count += 1;
        self.sum += value;
    }

    fn write(&self, out: &mut String, name: &str, help: &str) {
        self.write_labelled(out, name, help, "");
    }

    /// `label` is empty or `NAME="VALUE"`.
    fn write_labelled(&self, out: &mut String, name: &str, help: &str, label: &str) {
        head(out, name, "histogram", help);
        let (comma, whole) = match label {
            "" => ("", String::new()),
            label => (",", format!("{{{label}}}")),
        };
        for (count, bound) in self.counts.iter().zip(BOUNDS) {
            let _ = writeln!(out, "{name}_bucket{{{label}{comma}le=\"{bound}\"}} {count}");
        }
        let _ = writeln!(out, "{name}_bucket{{{label}{comma}le=\"+Inf\"}} {}", self.count);
        let _ = writeln!(out, "{name}_sum{whole} {}\n{name}_count{whole} {}", self.sum, self.count);
    }
}

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Outcome {
    /// Answered.
    Done,
    /// Refused before it started.
    Rejected,
    /// Failed after it started.
    Failed,
    /// The client went away.
    Disconnected,
}

impl Outcome {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Rejected => "rejected",
            Self::Failed => "failed",
            Self::Disconnected => "disconnected",
        }
    }
}

#[derive(Debug, Default)]
struct Sums {
    requests: BTreeMap<(&'static str, Outcome), u64>,
    first_token: Histogram,
    between_tokens: Histogram,
    duration: Histogram,
    queued: Histogram,
    repairs: BTreeMap<&'static str, u64>,
    misses: BTreeMap<&'static str, u64>,
    running: i64,
}

/// Sums of the HTTP side.
#[derive(Debug, Default)]
pub(crate) struct Metrics {
    sums: Mutex<Sums>,
}

/// What is known of a request when it ends.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Measured {
    pub(crate) first_token: Option<f64>,
    pub(crate) between_tokens: Option<f64>,
    pub(crate) duration: f64,
    pub(crate) queued: Option<f64>,
}

impl Metrics {
    fn with(&self, change: impl FnOnce(&mut Sums)) {
        change(&mut self.sums.lock().unwrap_or_else(PoisonError::into_inner));
    }

    pub(crate) fn started(&self) {
        self.with(|s| s.running += 1);
    }

    pub(crate) fn ended(&self, route: &'static str, outcome: Outcome, measured: Measured) {
        self.with(|s| {
            s.running -= 1;
            *s.requests.entry((route, outcome)).or_default() += 1;
            s.duration.add(measured.duration);
            if let Some(seconds) = measured.first_token {
                s.first_token.add(seconds);
            }
            if let Some(seconds) = measured.between_tokens {
                s.between_tokens.add(seconds);
            }
            if let Some(seconds) = measured.queued {
                s.queued.add(seconds);
            }
        });
    }

    pub(crate) fn rejected(&self, route: &'static str) {
        self.with(|s| *s.requests.entry((route, Outcome::Rejected)).or_default() += 1);
    }

    pub(crate) fn repair(&self, kind: &'static str, n: u64) {
        if n > 0 {
            self.with(|s| *s.repairs.entry(kind).or_default() += n);
        }
    }

    pub(crate) fn miss(&self, cause: &'static str) {
        self.with(|s| *s.misses.entry(cause).or_default() += 1);
    }

    /// The page.
    pub(crate) fn render(&self, status: &Status, model: &str, vllm: bool) -> String {
        let mut out = String::new();
        let o = &mut out;
        let model = model.replace(['\\', '"', '\n'], "_");
        head(o, "infernix_model_info", "gauge", "The model being served.");
        let _ = writeln!(o, "infernix_model_info{{model=\"{model}\"}} 1");
        engine(o, status);
        let sums = self.sums.lock().unwrap_or_else(PoisonError::into_inner);
        head(o, "infernix_requests_total", "counter", "Requests by route and outcome.");
        for ((route, outcome), n) in &sums.requests {
            let _ = writeln!(
                o,
                "infernix_requests_total{{route=\"{route}\",outcome=\"{}\"}} {n}",
                outcome.name()
            );
        }
        one(
            o,
            "infernix_http_requests_running",
            "gauge",
            "Answers being made or waited for.",
            sums.running as f64,
        );
        head(o, "infernix_toolcall_repairs_total", "counter", "Repairs of tool calls by kind.");
        for (kind, n) in &sums.repairs {
            let _ = writeln!(o, "infernix_toolcall_repairs_total{{kind=\"{kind}\"}} {n}");
        }
        head(
            o,
            "infernix_prefix_divergence_total",
            "counter",
            "Prompts that did not come from the cache, by cause.",
        );
        for (cause, n) in &sums.misses {
            let _ = writeln!(o, "infernix_prefix_divergence_total{{cause=\"{cause}\"}} {n}");
        }
        sums.first_token.write(
            o,
            "infernix_time_to_first_token_seconds",
            "From the request to its first token.",
        );
        sums.between_tokens.write(
            o,
            "infernix_inter_token_latency_seconds",
            "Mean time between tokens of a request.",
        );
        sums.duration.write(o, "infernix_request_duration_seconds", "From the request to its end.");
        sums.queued.write(o, "infernix_request_queue_seconds", "From the request to its lane.");
        if vllm {
            compat(o, status, &model, &sums);
        }
        out
    }
}

fn head(out: &mut String, name: &str, kind: &str, help: &str) {
    let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
}

fn one(out: &mut String, name: &str, kind: &str, help: &str, value: f64) {
    head(out, name, kind, help);
    let _ = writeln!(out, "{name} {value}");
}

fn engine(o: &mut String, s: &Status) {
    let gauge = |o: &mut String, name: &str, help: &str, value: f64| {
        one(o, &format!("infernix_{name}"), "gauge", help, value)
    };
    gauge(o, "engine_ready", "1 while the engine runs.", f64::from(u8::from(s.stopped.is_none())));
    gauge(o, "max_concurrency", "Lanes.", s.max_lanes as f64);
    gauge(o, "max_context_tokens", "Tokens that prompt and answer may have together.", s.context as f64);
    gauge(o, "requests_running", "Requests with a lane.", s.lanes.len() as f64);
    gauge(o, "requests_waiting", "Requests waiting for a lane.", s.queued as f64);
    gauge(o, "requests_paused", "Requests paused for memory.", s.paused as f64);
    let prefilling = s.lanes.iter().filter(|l| l.prompt.0 < l.prompt.1).count();
    gauge(o, "requests_prefilling", "Requests whose prompt is being read.", prefilling as f64);
    gauge(o, "kv_pages", "KV pages.", s.pages.0 as f64);
    gauge(o, "kv_pages_free", "KV pages free or held by the cache alone.", s.pages.1 as f64);
    gauge(
        o,
        "prefill_tokens_per_second",
        "Prompt tokens read a second, over the last seconds.",
        s.rates.prefill.into(),
    );
    gauge(
        o,
        "decode_tokens_per_second",
        "Tokens given a second, over the last seconds.",
        s.rates.decode.into(),
    );
    let tiers = [("device", s.cache.device), ("host", s.cache.host), ("file", s.cache.file)];
    let mut tier = |name: &str, help: &str, value: fn(&TierStatus) -> u64| {
        head(o, &format!("infernix_{name}"), "gauge", help);
        for (tier, status) in &tiers {
            let _ = writeln!(o, "infernix_{name}{{tier=\"{tier}\"}} {}", value(status));
        }
    };
    tier("state_snapshots", "Snapshots held by the prefix cache.", |t| t.snapshots as u64);
    tier("cache_blocks", "Blocks held by the prefix cache.", |t| t.blocks as u64);
    tier("cache_bytes", "Bytes held by the prefix cache.", |t| t.bytes);
    tier("cache_budget_bytes", "Bytes the prefix cache may hold.", |t| t.budget);
    let c = &s.counters;
    let counters: [(&str, &str, u64); 20] = [
        ("requests_submitted", "Requests queued.", c.submitted),
        ("requests_refused", "Requests refused because the queue was full.", c.refused),
        ("requests_finished", "Requests finished.", c.finished),
        ("requests_cancelled", "Requests cancelled.", c.cancelled),
        ("requests_expired", "Requests past a deadline.", c.expired),
        ("requests_failed", "Requests failed.", c.failed),
        ("prompt_tokens", "Prompt tokens of admitted requests.", c.prompt_tokens),
        ("prompt_tokens_cached", "Prompt tokens from the cache.", c.cached_tokens),
        ("prefill_tokens", "Prompt tokens read by the model.", c.prefill_tokens),
        ("replayed_tokens", "Tokens read again after a pause.", c.replayed_tokens),
        ("generation_tokens", "Tokens given.", c.output_tokens),
        ("decode_rounds", "Decode rounds.", c.decode_rounds),
        ("spec_draft_tokens", "Tokens drafted.", c.drafted),
        ("spec_accepted_tokens", "Drafted tokens accepted.", c.accepted),
        ("preemptions", "Requests paused for memory.", c.preemptions),
        ("snapshots_taken", "Snapshots taken.", c.snapshots),
        ("snapshots_evicted", "Snapshots dropped to make room.", c.evicted_snapshots),
        ("blocks_evicted", "Blocks dropped to make room.", c.evicted_blocks),
        ("prefill_calls", "Model calls that read prompts.", c.prefill_calls),
        ("context_restored_bytes", "Bytes brought from the host tier.", c.restored_bytes),
    ];
    for (name, help, value) in counters {
        one(o, &format!("infernix_{name}_total"), "counter", help, value as f64);
    }
}

/// The eight names that routers of vLLM replicas read.
fn compat(o: &mut String, s: &Status, model: &str, sums: &Sums) {
    let name_of = format!("model_name=\"{model}\"");
    let label = format!("{{{name_of}}}");
    let used = s.pages.0.saturating_sub(s.pages.1) as f64 / s.pages.0.max(1) as f64;
    let waiting = (s.queued + s.paused) as f64;
    for (name, kind, help, value) in [
        ("num_requests_running", "gauge", "Requests with a lane.", s.lanes.len() as f64),
        ("num_requests_waiting", "gauge", "Requests waiting.", waiting),
        ("kv_cache_usage_perc", "gauge", "Share of the KV pages in use, 0 to 1.", used),
        (
            "prefix_cache_queries_total",
            "counter",
            "Prompt tokens looked up.",
            s.counters.prompt_tokens as f64,
        ),
        (
            "prefix_cache_hits_total",
            "counter",
            "Prompt tokens from the cache.",
            s.counters.cached_tokens as f64,
        ),
        ("generation_tokens_total", "counter", "Tokens given.", s.counters.output_tokens as f64),
    ] {
        head(o, &format!("vllm:{name}"), kind, help);
        let _ = writeln!(o, "vllm:{name}{label} {value}");
    }
    let first = "From the request to its first token.";
    sums.first_token.write_labelled(o, "vllm:time_to_first_token_seconds", first, &name_of);
    let between = "Mean time between tokens of a request.";
    sums.between_tokens.write_labelled(o, "vllm:inter_token_latency_seconds", between, &name_of);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_is_well_formed_and_vllm_names_are_there_on_request() {
        let metrics = Metrics::default();
        metrics.started();
        let measured = Measured { first_token: Some(0.3), duration: 1.0, ..Measured::default() };
        metrics.ended("chat", Outcome::Done, measured);
        let status = Status { pages: (10, 4), ..Status::default() };
        let page = metrics.render(&status, "a\"b", true);
        for line in page.lines().filter(|l| !l.starts_with('#')) {
            let (name, value) = line.rsplit_once(' ').expect("name and value");
            assert!(!name.is_empty() && value.parse::<f64>().is_ok(), "{line}");
        }
        assert!(page.contains("vllm:kv_cache_usage_perc{model_name=\"a_b\"} 0.6"));
        assert!(page.contains("vllm:time_to_first_token_seconds_bucket{model_name=\"a_b\",le=\"0.5\"} 1"));
        assert!(page.contains("infernix_requests_total{route=\"chat\",outcome=\"done\"} 1"));
        assert!(!metrics.render(&status, "m", false).contains("vllm:"));
    }
}
