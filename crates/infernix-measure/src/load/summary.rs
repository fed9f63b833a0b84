//! From exchanges to the figures of a serving benchmark, by vLLM's definitions and names.

use crate::client::Exchange;
use serde_json::{Map, Value, json};
use std::time::Instant;

/// A limit that a request must keep to count as good.
#[derive(Clone, Debug, PartialEq)]
pub struct Goal {
    /// `ttft`, `tpot` or `e2el`.
    pub metric: String,
    /// Milliseconds.
    pub milliseconds: f64,
}

/// Percentile by linear interpolation between closest ranks, position (n − 1) q — numpy's default. NaN for no values.
pub fn percentile(sorted: &[f64], q: f64) -> f64 {
    let Some(last) = sorted.len().checked_sub(1) else { return f64::NAN };
    let at = q.clamp(0.0, 1.0) * last as f64;
    let low = at.floor() as usize;
    let high = (low + 1).min(last);
    sorted[low] + (sorted[high] - sorted[low]) * (at - low as f64)
}

/// Values sorted, those that are no number left out.
pub fn sorted(values: impl IntoIterator<Item = f64>) -> Vec<f64> {
    let mut v: Vec<f64> = values.into_iter().filter(|x| x.is_finite()).collect();
    v.sort_by(f64::total_cmp);
    v
}

/// Mean, median, population deviation and percentiles of one measure.
#[derive(Clone, Debug, PartialEq)]
pub struct Spread {
    /// Arithmetic mean.
    pub mean: f64,
    /// 50th percentile.
    pub median: f64,
    /// Population standard deviation, as numpy's `std`.
    pub std: f64,
    /// The percentiles asked for, with their values.
    pub percentiles: Vec<(f64, f64)>,
}

impl Spread {
    /// Of these values; NaN for none.
    pub fn of(values: impl IntoIterator<Item = f64>, percentiles: &[f64]) -> Self {
        let v = sorted(values);
        let n = v.len() as f64;
        let mean = v.iter().sum::<f64>() / n;
        let std = (v.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n).sqrt();
        let percentiles = percentiles.iter().map(|p| (*p, percentile(&v, p / 100.0))).collect();
        Self { mean, median: percentile(&v, 0.5), std, percentiles }
    }

    fn insert(&self, name: &str, out: &mut Map<String, Value>) {
        // JSON has no NaN: what nothing was measured of is null, where vLLM has 0, which would be the best of all values.
        out.insert(format!("mean_{name}_ms"), json!(self.mean));
        out.insert(format!("median_{name}_ms"), json!(self.median));
        out.insert(format!("std_{name}_ms"), json!(self.std));
        for (p, v) in &self.percentiles {
            out.insert(format!("p{p}_{name}_ms"), json!(v));
        }
    }
}

/// The figures of a run.
#[derive(Clone, Debug)]
pub struct Summary {
    /// Requests answered to their end.
    pub completed: usize,
    /// Requests that failed, with their causes counted.
    pub failures: Vec<(String, usize)>,
    /// First send to last end, seconds.
    pub duration: f64,
    /// Prompt tokens, as the server counts them.
    pub input_tokens: u64,
    /// Prompt tokens that came from its cache; `None` of a server that counted none.
    pub cached_tokens: Option<u64>,
    /// Tokens answered.
    pub output_tokens: u64,
    /// Requests that kept every goal, if there are goals.
    pub good: Option<usize>,
    /// Most tokens received within one second of the run.
    pub peak_tokens: f64,
    /// Most requests in flight at once.
    pub peak_requests: usize,
    /// Time to first token, milliseconds.
    pub ttft: Spread,
    /// (E2EL − TTFT) / (tokens − 1) of answers of more than one token.
    pub tpot: Spread,
    /// Gaps between pieces of a stream; with speculation a piece is several tokens.
    pub itl: Spread,
    /// Send to end.
    pub e2el: Spread,
}

fn ms(d: std::time::Duration) -> f64 {
    d.as_secs_f64() * 1e3
}

/// Milliseconds a token after the first, of answers of more than one token.
pub fn tpot(x: &Exchange) -> Option<f64> {
    let n = x.output_tokens();
    if n < 2 {
        return None;
    }
    Some(ms(x.streaming()?) / (n - 1) as f64)
}

impl Summary {
    /// Of finished exchanges; failed ones count as failures only.
    pub fn of(exchanges: &[Exchange], goals: &[Goal], percentiles: &[f64]) -> Self {
        let done: Vec<&Exchange> = exchanges.iter().filter(|x| x.failure.is_none()).collect();
        let mut failures: Vec<(String, usize)> = Vec::new();
        for cause in exchanges.iter().filter_map(|x| x.failure.as_ref()).map(ToString::to_string) {
            match failures.iter_mut().find(|f| f.0 == cause) {
                Some(f) => f.1 += 1,
                None => failures.push((cause, 1)),
            }
        }
        let first = exchanges.iter().map(|x| x.sent).min();
        let last = exchanges.iter().map(|x| x.done).max();
        let duration = first.zip(last).map_or(0.0, |(a, b)| b.duration_since(a).as_secs_f64());
        let sum = |f: &dyn Fn(&Exchange) -> u64| done.iter().map(|x| f(x)).sum::<u64>();
        let usage = |x: &Exchange| x.answer.usage.unwrap_or_default();
        let keeps = |x: &&&Exchange| {
            goals.iter().all(|g| {
                let value = match g.metric.as_str() {
                    "ttft" => x.ttft().map(ms),
                    "tpot" => Some(tpot(x).unwrap_or(0.0)),
                    _ => Some(ms(x.latency())),
                };
                value.is_some_and(|v| v <= g.milliseconds)
            })
        };
        let gaps = done.iter().flat_map(|x| x.pieces.windows(2)).map(|w| ms(w[1].duration_since(w[0])));
        Self {
            completed: done.len(),
            failures,
            duration,
            input_tokens: sum(&|x| usage(x).prompt),
            cached_tokens: done.iter().filter_map(|x| usage(x).cached).reduce(|a, b| a + b),
            output_tokens: sum(&Exchange::output_tokens),
            good: (!goals.is_empty()).then(|| done.iter().filter(keeps).count()),
            peak_tokens: first.map_or(0.0, |t| peak_tokens(&done, t)),
            peak_requests: peak_requests(exchanges),
            ttft: Spread::of(done.iter().filter_map(|x| x.ttft()).map(ms), percentiles),
            tpot: Spread::of(done.iter().filter_map(|x| tpot(x)), percentiles),
            itl: Spread::of(gaps, percentiles),
            e2el: Spread::of(done.iter().map(|x| ms(x.latency())), percentiles),
        }
    }

    /// Failed requests.
    pub fn failed(&self) -> usize {
        self.failures.iter().map(|f| f.1).sum()
    }

    fn per_second(&self, n: f64) -> f64 {
        if self.duration > 0.0 { n / self.duration } else { 0.0 }
    }

    /// vLLM's result keys.
    pub fn to_json(&self) -> Map<String, Value> {
        let mut out = Map::new();
        let mut put = |k: &str, v: Value| {
            out.insert(k.into(), v);
        };
        put("duration", json!(self.duration));
        put("completed", json!(self.completed));
        put("failed", json!(self.failed()));
        put("total_input_tokens", json!(self.input_tokens));
        put("total_cached_tokens", json!(self.cached_tokens));
        put("total_output_tokens", json!(self.output_tokens));
        put("request_throughput", json!(self.per_second(self.completed as f64)));
        put("request_goodput", self.good.map_or(Value::Null, |g| json!(self.per_second(g as f64))));
        put("output_throughput", json!(self.per_second(self.output_tokens as f64)));
        put(
            "total_token_throughput",
            json!(self.per_second((self.output_tokens + self.input_tokens) as f64)),
        );
        put("max_output_tokens_per_s", json!(self.peak_tokens));
        put("max_concurrent_requests", json!(self.peak_requests));
        let causes = self.failures.iter().map(|(cause, n)| json!({ "error": cause, "requests": n }));
        put("failures", causes.collect());
        for (name, spread) in
            [("ttft", &self.ttft), ("tpot", &self.tpot), ("itl", &self.itl), ("e2el", &self.e2el)]
        {
            spread.insert(name, &mut out);
        }
        out
    }

    /// The table that vLLM prints, same labels.
    pub fn to_text(&self) -> String {
        let mut out = format!("{:=^50}\n", " Serving Benchmark Result ");
        let mut line = |label: &str, value: String| out.push_str(&format!("{label:<40} {value:<10}\n"));
        line("Successful requests:", self.completed.to_string());
        line("Failed requests:", self.failed().to_string());
        line("Benchmark duration (s):", format!("{:.2}", self.duration));
        line("Total input tokens:", self.input_tokens.to_string());
        line("Total input tokens from cache:", self.cached_tokens.map_or("-".into(), |n| n.to_string()));
        line("Total generated tokens:", self.output_tokens.to_string());
        line("Request throughput (req/s):", format!("{:.2}", self.per_second(self.completed as f64)));
        if let Some(good) = self.good {
            line("Request goodput (req/s):", format!("{:.2}", self.per_second(good as f64)));
        }
        line(
            "Output token throughput (tok/s):",
            format!("{:.2}", self.per_second(self.output_tokens as f64)),
        );
        line("Peak output token throughput (tok/s):", format!("{:.2}", self.peak_tokens));
        line("Peak concurrent requests:", self.peak_requests.to_string());
        let total = (self.output_tokens + self.input_tokens) as f64;
        line("Total token throughput (tok/s):", format!("{:.2}", self.per_second(total)));
        for (title, name, spread) in [
            ("Time to First Token", "TTFT", &self.ttft),
            ("Time per Output Token (excl. 1st token)", "TPOT", &self.tpot),
            ("Inter-token Latency", "ITL", &self.itl),
            ("End-to-end Latency", "E2EL", &self.e2el),
        ] {
            out.push_str(&format!("{title:-^50}\n"));
            let mut line = |label: String, value: f64| {
                let value = if value.is_finite() { format!("{value:.2}") } else { "-".into() };
                out.push_str(&format!("{label:<40} {value:<10}\n"));
            };
            line(format!("Mean {name} (ms):"), spread.mean);
            line(format!("Median {name} (ms):"), spread.median);
            for (p, v) in &spread.percentiles {
                line(format!("P{p} {name} (ms):"), *v);
            }
        }
        out.push_str(&"=".repeat(50));
        out.push('\n');
        for (cause, n) in &self.failures {
            out.push_str(&format!("{n} failed: {cause}\n"));
        }
        out
    }
}

/// Tokens are spread evenly over the pieces of their answer, and pieces counted by the second of the run.
fn peak_tokens(done: &[&Exchange], start: Instant) -> f64 {
    let mut seconds: Vec<f64> = Vec::new();
    for x in done.iter().filter(|x| !x.pieces.is_empty()) {
        let share = x.output_tokens() as f64 / x.pieces.len() as f64;
        for t in &x.pieces {
            let second = t.duration_since(start).as_secs() as usize;
            if seconds.len() <= second {
                seconds.resize(second + 1, 0.0);
            }
            seconds[second] += share;
        }
    }
    seconds.into_iter().fold(0.0, f64::max)
}

fn peak_requests(exchanges: &[Exchange]) -> usize {
    let mut edges: Vec<(Instant, i32)> = exchanges.iter().flat_map(|x| [(x.sent, 1), (x.done, -1)]).collect();
    // An end at the same instant as a start comes first.
    edges.sort();
    let (mut now, mut most) = (0, 0);
    for (_, d) in edges {
        now += d;
        most = most.max(now);
    }
    most.max(0) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::{Answer, Failure, Usage};
    use std::time::Duration;

    fn exchange(start: Instant, sent: u64, pieces: &[u64], tokens: u64) -> Exchange {
        let at = |ms: u64| start + Duration::from_millis(ms);
        let usage = Usage { prompt: 10, completion: tokens, ..Usage::default() };
        Exchange {
            sent: at(sent),
            pieces: pieces.iter().map(|p| at(*p)).collect(),
            done: at(*pieces.last().unwrap_or(&sent)),
            answer: Answer { usage: Some(usage), ..Answer::default() },
            failure: None,
        }
    }

    #[test]
    fn percentiles_are_those_of_numpy() {
        // numpy.percentile([1, 2, 4, 8, 16], [0, 10, 50, 90, 99, 100]).
        let v = [1.0, 2.0, 4.0, 8.0, 16.0];
        let expected = [1.0, 1.4, 4.0, 12.8, 15.68, 16.0];
        for (q, e) in [0.0, 0.1, 0.5, 0.9, 0.99, 1.0].iter().zip(expected) {
            assert!((percentile(&v, *q) - e).abs() < 1e-12, "{q}");
        }
        assert!(percentile(&[], 0.5).is_nan());
        let s = Spread::of(v, &[90.0]);
        // numpy.std of the same.
        assert!((s.std - 5.455_272_678_794_342).abs() < 1e-12);
    }

    #[test]
    fn what_was_not_measured_is_not_zero() {
        let t = Instant::now();
        let mut failed = exchange(t, 0, &[], 0);
        failed.failure = Some(Failure::Status(503, String::new()));
        let s = Summary::of(&[failed], &[], &[99.0]);
        let json = s.to_json();
        for key in ["mean_ttft_ms", "median_tpot_ms", "p99_itl_ms", "std_e2el_ms", "total_cached_tokens"] {
            assert!(json[key].is_null(), "{key}: {}", json[key]);
        }
        assert!(s.to_text().lines().any(|l| l.split_whitespace().eq(["Mean", "TTFT", "(ms):", "-"])));
        // A single token has a first time and none after it.
        let json = Summary::of(&[exchange(t, 0, &[40], 1)], &[], &[99.0]).to_json();
        assert_eq!(json["mean_ttft_ms"], 40.0);
        assert!(json["mean_tpot_ms"].is_null() && json["mean_itl_ms"].is_null());
    }

    #[test]
    fn tokens_from_a_cache_that_no_answer_counts_are_unknown() {
        let t = Instant::now();
        let of = |counts: [Option<u64>; 2]| {
            let exchanges = counts.map(|cached| {
                let mut x = exchange(t, 0, &[10], 1);
                x.answer.usage = Some(Usage { prompt: 10, completion: 1, cached, reasoning: None });
                x
            });
            Summary::of(&exchanges, &[], &[])
        };
        assert_eq!(of([None, None]).cached_tokens, None);
        assert!(
            of([None, None])
                .to_text()
                .lines()
                .any(|l| l.starts_with("Total input tokens from cache:") && l.trim_end().ends_with(" -"))
        );
        assert_eq!(of([Some(0), Some(0)]).cached_tokens, Some(0));
        assert_eq!(of([None, Some(7)]).cached_tokens, Some(7), "absent is none where another answer counts");
    }

    #[test]
    fn figures_follow_the_definitions_of_vllm() {
        let t = Instant::now();
        let a = exchange(t, 0, &[100, 200, 300], 5);
        let b = exchange(t, 50, &[250], 1);
        let mut c = exchange(t, 60, &[], 0);
        c.done = t + Duration::from_millis(90);
        c.failure = Some(Failure::Timeout);
        let goals = [Goal { metric: "ttft".into(), milliseconds: 150.0 }];
        let s = Summary::of(&[a, b, c], &goals, &[99.0]);
        assert_eq!((s.completed, s.failed(), s.output_tokens, s.input_tokens), (2, 1, 6, 20));
        assert!((s.duration - 0.3).abs() < 1e-9);
        assert!((s.ttft.mean - 150.0).abs() < 1e-9);
        // (300 - 100) / 4 of the answer of five tokens; the other has one.
        assert!((s.tpot.mean - 50.0).abs() < 1e-9);
        assert!((s.itl.mean - 100.0).abs() < 1e-9);
        assert_eq!((s.good, s.peak_requests), (Some(1), 3));
        assert!((s.peak_tokens - 6.0).abs() < 1e-9);
        let json = s.to_json();
        assert!(json["p99_ttft_ms"].is_number() && json["request_goodput"].is_number());
        assert!(s.to_text().contains("Median TPOT (ms):"));
    }
}
