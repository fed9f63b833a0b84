//! What a replay reports: the definitions of docs/replay.md over the rows of a run.

use super::plan::Class;
use super::runner::{Row, Run};
use crate::load::rng::Rng;
use crate::load::summary::{percentile, sorted};
use serde_json::{Map, Value, json};
use std::collections::HashSet;

/// Requests of a block that is resampled as one, since neighbours in time are not independent.
const BLOCK: usize = 10;
/// Resamples of an interval.
const RESAMPLES: usize = 2000;
/// Least prompt that counts as a cold read, and a long one.
const COLD: u64 = 4096;
const COLD_LONG: u64 = 32_768;

/// How a change of a figure is stated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Relative, %.
    Relative,
    /// A difference of shares, percentage points.
    Points,
    /// A difference of counts.
    Count,
}

/// Unit of figures that are whole tokens of a run.
pub(crate) const TOKENS: &str = "tokens";

/// A figure of the report: key, label, unit, kind.
pub type Figure = (&'static str, &'static str, &'static str, Kind);

/// Every figure, in the order of the report.
pub const FIGURES: [Figure; 22] = [
    ("ttft_mean_s", "Mean TTFT", "s", Kind::Relative),
    ("ttft_median_s", "Median TTFT", "s", Kind::Relative),
    ("ttft_p90_s", "90th-percentile TTFT", "s", Kind::Relative),
    ("ttft_continuing_s", "Mean TTFT, continuing turns", "s", Kind::Relative),
    ("ttft_new_long_s", "Mean TTFT, new long prompts", "s", Kind::Relative),
    ("cache_share_pct", "Prompt tokens from cache", "%", Kind::Points),
    ("prompt_tokens", "Prompt tokens", TOKENS, Kind::Relative),
    ("prefilled_tokens", "Prompt tokens prefilled", TOKENS, Kind::Relative),
    ("reprefilled_main", "Re-prefilled turns, sessions", "", Kind::Count),
    ("reprefilled_sub", "Re-prefilled turns, subagents", "", Kind::Count),
    ("prefill_cold_tok_s", "Prefill tok/s, no cache hit", "", Kind::Relative),
    ("prefill_cold_long_tok_s", "The same, 32,768 tokens or more", "", Kind::Relative),
    ("output_tok_s", "Output tok/s, one request", "", Kind::Relative),
    ("output_batched_tok_s", "Output tok/s, batched", "", Kind::Relative),
    ("copy_tok_s", "Output tok/s, copy turns", "", Kind::Relative),
    ("rounds_s", "Decode rounds/s", "", Kind::Relative),
    ("tokens_per_round", "Tokens per round", "", Kind::Relative),
    ("draft_acceptance_pct", "Drafts accepted", "%", Kind::Points),
    ("completion_tokens", "Completion tokens", TOKENS, Kind::Relative),
    ("reasoning_tokens", "Of those, reasoning", TOKENS, Kind::Relative),
    ("context_guards", "Context guards", "", Kind::Count),
    ("wall_min", "Wall time", "min", Kind::Relative),
];

/// A request's counts and times, as the figures need them.
struct Seen<'a> {
    row: &'a Row,
    prompt: u64,
    /// `None` in a run of which no answer says it.
    cached: Option<u64>,
    tokens: u64,
}

impl Seen<'_> {
    fn ttft(&self) -> Option<f64> {
        Some(self.row.first? - self.row.sent)
    }

    fn stream(&self) -> Option<f64> {
        Some(self.row.done - self.row.first?)
    }
}

/// Rows that count: answered, with the server's counts, not aborted.
fn seen(run: &Run) -> Vec<Seen<'_>> {
    let counted = run.rows.iter().filter(|r| r.class != Class::Aborted && r.exchange.failure.is_none());
    let mut out: Vec<Seen<'_>> = counted
        .filter_map(|row| {
            let u = row.exchange.answer.usage?;
            Some(Seen { row, prompt: u.prompt, cached: u.cached, tokens: row.exchange.output_tokens() })
        })
        .collect();
    if out.iter().any(|s| s.cached.is_some()) {
        out.iter_mut().for_each(|s| s.cached = s.cached.or(Some(0)));
    }
    out.sort_by(|a, b| a.row.sent.total_cmp(&b.row.sent));
    out
}

/// Whether any other request was in flight between two times.
fn alone(run: &Run, row: &Row, from: f64, to: f64) -> bool {
    !run.rows.iter().any(|r| (r.seed != row.seed) && r.sent < to && r.done > from)
}

fn mean(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let v: Vec<f64> = values.into_iter().collect();
    (!v.is_empty()).then(|| v.iter().sum::<f64>() / v.len() as f64)
}

fn ratio(top: f64, bottom: f64) -> Option<f64> {
    (bottom > 0.0).then(|| top / bottom)
}

/// Tokens from a cache, of all; `None` of a run that counts none.
fn cached_of<'a>(rows: impl IntoIterator<Item = &'a Seen<'a>>) -> Option<u64> {
    rows.into_iter().filter_map(|s| s.cached).reduce(|a, b| a + b)
}

/// Seeds of the requests that an arm read cold: nothing of the prompt cached, nothing else in flight at the send. `None` of a
/// server that does not count what it cached.
pub fn cold(run: &Run) -> Option<HashSet<u32>> {
    let rows = seen(run);
    cached_of(&rows)?;
    let cold = rows.into_iter().filter(|s| s.cached == Some(0) && s.prompt >= COLD);
    Some(cold.filter(|s| alone(run, s.row, s.row.sent, s.row.sent + 1e-9)).map(|s| s.row.seed).collect())
}

/// The figures of one run. `matched` are the requests that every compared arm read cold.
pub fn figures(run: &Run, main: &HashSet<String>, matched: &HashSet<u32>) -> Map<String, Value> {
    let rows = seen(run);
    let mut out = Map::new();
    // Of a run in which nothing was answered there is nothing to say. A sum of nothing is -0, which adding 0 makes 0.
    let answered = !rows.is_empty();
    let mut put = |key: &str, v: Option<f64>| {
        let v = v.filter(|x| x.is_finite() && answered);
        out.insert(key.into(), v.map_or(Value::Null, |x| json!(x + 0.0)));
    };
    let ttft = sorted(rows.iter().filter_map(Seen::ttft));
    put("ttft_mean_s", mean(ttft.iter().copied()));
    put("ttft_median_s", Some(percentile(&ttft, 0.5)));
    put("ttft_p90_s", Some(percentile(&ttft, 0.9)));
    put("ttft_continuing_s", mean(rows.iter().filter(|s| s.row.class.continuing()).filter_map(Seen::ttft)));
    put("ttft_new_long_s", mean(rows.iter().filter(|s| s.row.class.new_long()).filter_map(Seen::ttft)));
    let sum = |f: &dyn Fn(&Seen<'_>) -> f64| rows.iter().map(f).sum::<f64>();
    let (prompt, cached) = (sum(&|s| s.prompt as f64), cached_of(&rows).map(|n| n as f64));
    put("cache_share_pct", cached.and_then(|n| ratio(100.0 * n, prompt)));
    put("prompt_tokens", Some(prompt));
    put("prefilled_tokens", cached.map(|n| prompt - n));
    let missed = |top: bool| {
        let again = rows.iter().filter(|s| s.row.class.continuing() && s.cached == Some(0));
        cached.map(|_| again.filter(|s| main.contains(&s.row.actor) == top).count() as f64)
    };
    put("reprefilled_main", missed(true));
    put("reprefilled_sub", missed(false));
    for (key, least) in [("prefill_cold_tok_s", COLD), ("prefill_cold_long_tok_s", COLD_LONG)] {
        let known = |s: &&Seen<'_>| s.cached.is_some() && matched.contains(&s.row.seed);
        let cold = rows.iter().filter(known).filter(|s| s.prompt >= least);
        let (tokens, time) =
            cold.fold((0.0, 0.0), |(n, t), s| (n + s.prompt as f64, t + s.ttft().unwrap_or(0.0)));
        put(key, ratio(tokens, time));
    }
    let streams: Vec<&Seen<'_>> = rows.iter().filter(|s| s.tokens > 1 && s.stream().is_some()).collect();
    let single = |s: &&&Seen<'_>| alone(run, s.row, s.row.first.unwrap_or(s.row.sent), s.row.done);
    let one: Vec<&&Seen<'_>> = streams.iter().filter(single).collect();
    put("output_tok_s", rate(one.iter().map(|s| **s)));
    put("output_batched_tok_s", ratio(streams.iter().map(|s| (s.tokens - 1) as f64).sum(), union(&streams)));
    put("copy_tok_s", rate(streams.iter().filter(|s| s.row.copy).copied()));
    // One round a token after the first that was not accepted from a draft, of servers that count drafts: rounds/s times
    // tokens a round are tokens a second.
    let accepted = |s: &Seen<'_>| s.row.exchange.answer.accepted();
    let counts = rows.iter().any(|s| accepted(s).is_some());
    let known = one.iter().filter(|_| counts);
    let (rounds, tokens, time) = known.fold((0.0, 0.0, 0.0), |(r, n, t), s| {
        let decoded = s.tokens.saturating_sub(1);
        let rounds = decoded.saturating_sub(accepted(s).unwrap_or(0));
        (r + rounds as f64, n + decoded as f64, t + s.stream().unwrap_or(0.0))
    });
    put("rounds_s", ratio(rounds, time));
    put("tokens_per_round", ratio(tokens, rounds));
    let drafts = rows.iter().filter_map(|s| {
        let a = &s.row.exchange.answer;
        Some((a.accepted()? as f64, a.drafted()? as f64))
    });
    let (accepted, drafted) = drafts.fold((0.0, 0.0), |(a, d), (x, y)| (a + x, d + y));
    put("draft_acceptance_pct", ratio(100.0 * accepted, drafted));
    put("completion_tokens", Some(sum(&|s| s.tokens as f64)));
    let reasoning = rows.iter().filter_map(|s| s.row.exchange.answer.usage?.reasoning);
    put("reasoning_tokens", reasoning.reduce(|a, b| a + b).map(|n| n as f64));
    put("context_guards", Some(run.notes.iter().filter(|n| n.event == "context_guard").count() as f64));
    put("wall_min", Some(run.wall / 60.0));
    out
}

/// Tokens after the first over streaming time, as a ratio of sums.
fn rate<'a>(streams: impl Iterator<Item = &'a Seen<'a>>) -> Option<f64> {
    let (n, t) = streams
        .fold((0.0, 0.0), |(n, t), s| (n + s.tokens.saturating_sub(1) as f64, t + s.stream().unwrap_or(0.0)));
    ratio(n, t)
}

/// Length of the union of the streaming times.
fn union(streams: &[&Seen<'_>]) -> f64 {
    let mut spans: Vec<(f64, f64)> =
        streams.iter().filter_map(|s| Some((s.row.first?, s.row.done))).collect();
    spans.sort_by(|a, b| a.0.total_cmp(&b.0));
    let (mut length, mut end) = (0.0, f64::MIN);
    for (a, b) in spans {
        length += (b - a.max(end)).max(0.0);
        end = end.max(b);
    }
    length
}

/// 95 % percentile-bootstrap intervals of a single run. First tokens and the cache share resample blocks of ten
/// consecutive requests, and need five blocks; the stream rate resamples requests.
pub fn intervals(run: &Run) -> Map<String, Value> {
    let rows = seen(run);
    let mut out = Map::new();
    let blocks: Vec<&[Seen<'_>]> = rows.chunks(BLOCK).collect();
    if blocks.len() >= 5 {
        let mut over_blocks = |key: &str, f: &dyn Fn(&[&Seen<'_>]) -> Option<f64>| {
            let mut rng = Rng::named(0, key);
            let draws = (0..RESAMPLES).filter_map(|_| {
                let picked: Vec<&Seen<'_>> =
                    (0..blocks.len()).flat_map(|_| blocks[rng.below(blocks.len())].iter()).collect();
                f(&picked)
            });
            insert(&mut out, key, draws);
        };
        over_blocks("ttft_mean_s", &|s| mean(s.iter().filter_map(|s| s.ttft())));
        over_blocks("ttft_median_s", &|s| Some(percentile(&sorted(s.iter().filter_map(|s| s.ttft())), 0.5)));
        over_blocks("cache_share_pct", &|s| {
            let cached = cached_of(s.iter().copied())?;
            ratio(100.0 * cached as f64, s.iter().map(|s| s.prompt).sum::<u64>() as f64)
        });
    }
    let single =
        |s: &&Seen<'_>| s.tokens > 1 && s.row.first.is_some_and(|first| alone(run, s.row, first, s.row.done));
    let one: Vec<&Seen<'_>> = rows.iter().filter(single).collect();
    if one.len() >= 5 {
        let mut rng = Rng::named(0, "output_tok_s");
        let draws = (0..RESAMPLES).filter_map(|_| rate((0..one.len()).map(|_| one[rng.below(one.len())])));
        insert(&mut out, "output_tok_s", draws);
    }
    out
}

fn insert(out: &mut Map<String, Value>, key: &str, draws: impl Iterator<Item = f64>) {
    let v = sorted(draws);
    if !v.is_empty() {
        out.insert(key.into(), json!([percentile(&v, 0.025), percentile(&v, 0.975)]));
    }
}

/// Mean TTFT, requests, prompt, cached and completion tokens by class.
pub fn classes(run: &Run) -> Vec<Value> {
    let rows = seen(run);
    let mut names: Vec<Class> = rows.iter().map(|s| s.row.class).collect();
    names.sort_unstable();
    names.dedup();
    let of = |class: Class| {
        let own: Vec<&Seen<'_>> = rows.iter().filter(|s| s.row.class == class).collect();
        let total = |f: &dyn Fn(&Seen<'_>) -> u64| own.iter().map(|s| f(s)).sum::<u64>();
        json!({
            "class": class.name(),
            "requests": own.len(),
            "ttft_mean_s": mean(own.iter().filter_map(|s| s.ttft())),
            "prompt_tokens": total(&|s| s.prompt),
            "cached_tokens": cached_of(own.iter().copied()),
            "completion_tokens": total(&|s| s.tokens),
        })
    };
    names.into_iter().map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::{Answer, Exchange, Usage};
    use std::time::Instant;

    pub(crate) fn row(actor: &str, class: Class, times: (f64, f64, f64), counts: (u64, u64, u64)) -> Row {
        let now = Instant::now();
        let usage =
            Usage { prompt: counts.0, cached: Some(counts.1), completion: counts.2, reasoning: Some(0) };
        let timings = json!({ "draft_n": counts.2, "draft_n_accepted": counts.2 / 2 });
        let answer = Answer { usage: Some(usage), timings: Some(timings), ..Answer::default() };
        Row {
            actor: actor.into(),
            index: 0,
            class,
            copy: false,
            seed: (times.0 * 1000.0) as u32,
            messages: 1,
            sent: times.0,
            first: Some(times.1),
            done: times.2,
            exchange: Exchange { sent: now, pieces: vec![now], done: now, answer, failure: None },
            aborted: false,
        }
    }

    fn run() -> Run {
        Run {
            rows: vec![
                row("A", Class::ColdResume, (0.0, 4.0, 6.0), (10_000, 0, 21)),
                row("A", Class::Loop, (10.0, 10.5, 12.5), (11_000, 9_900, 41)),
                // Two at once.
                row("B", Class::Loop, (20.0, 21.0, 25.0), (4_000, 0, 11)),
                row("explore-1", Class::SubagentLoop, (20.5, 22.0, 26.0), (5_000, 4_000, 11)),
            ],
            wall: 120.0,
            ..Run::default()
        }
    }

    #[test]
    fn figures_follow_their_definitions() {
        let r = run();
        let main = HashSet::from(["A".to_owned(), "B".to_owned()]);
        let f = figures(&r, &main, &cold(&r).unwrap());
        let near =
            |key: &str, v: f64| assert!((f[key].as_f64().unwrap() - v).abs() < 1e-9, "{key}: {}", f[key]);
        near("ttft_mean_s", (4.0 + 0.5 + 1.0 + 1.5) / 4.0);
        near("ttft_new_long_s", 4.0);
        near("cache_share_pct", 100.0 * 13_900.0 / 30_000.0);
        near("reprefilled_main", 1.0);
        near("reprefilled_sub", 0.0);
        // Only the cold resume has 4,096 tokens, no cache, and nothing else in flight.
        near("prefill_cold_tok_s", 2500.0);
        // Alone: the two turns of A. (20 + 40) / (2 + 2).
        near("output_tok_s", 15.0);
        // All four over the union 2 + 2 + 5.
        near("output_batched_tok_s", 80.0 / 9.0);
        near("tokens_per_round", 60.0 / (10.0 + 20.0));
        near("rounds_s", 15.0 / 2.0);
        near("wall_min", 2.0);
        assert!(f["prefill_cold_long_tok_s"].is_null());
        assert_eq!(f.len(), FIGURES.len());
        assert!(FIGURES.iter().all(|(key, ..)| f.contains_key(*key)));
    }

    #[test]
    fn a_server_that_counts_no_cached_tokens_is_not_said_to_have_read_everything_again() {
        let mut r = run();
        let uncount = |row: &mut Row| {
            let usage = row.exchange.answer.usage.as_mut().unwrap();
            (usage.cached, usage.reasoning) = (None, None);
        };
        // What one answer of a server counts, the others had none of.
        uncount(&mut r.rows[0]);
        let main = HashSet::from(["A".to_owned(), "B".to_owned()]);
        assert_eq!(figures(&r, &main, &cold(&r).unwrap())["prefill_cold_tok_s"].as_f64(), Some(2500.0));
        let cold_elsewhere = cold(&r).unwrap();
        r.rows.iter_mut().for_each(uncount);
        assert!(cold(&r).is_none());
        let f = figures(&r, &main, &cold_elsewhere);
        for key in [
            "cache_share_pct",
            "prefilled_tokens",
            "reprefilled_main",
            "reprefilled_sub",
            "prefill_cold_tok_s",
            "reasoning_tokens",
        ] {
            assert!(f[key].is_null(), "{key}: {}", f[key]);
        }
        assert!(classes(&r).iter().all(|c| c["cached_tokens"].is_null() && c["prompt_tokens"].is_number()));
    }

    #[test]
    fn an_answer_without_drafts_counts_a_round_a_token_where_the_server_counts_drafts() {
        let mut r = run();
        r.rows[1].exchange.answer.timings = Some(json!({}));
        let of = |r: &Run| figures(r, &HashSet::new(), &HashSet::new());
        let f = of(&r);
        assert_eq!(f["tokens_per_round"].as_f64(), Some(60.0 / (10.0 + 40.0)));
        assert_eq!(f["rounds_s"].as_f64(), Some((10.0 + 40.0) / 4.0));
        for row in &mut r.rows {
            row.exchange.answer.timings = None;
        }
        assert!(of(&r)["rounds_s"].is_null(), "a server that counts nothing");
    }

    #[test]
    fn a_run_without_an_answer_has_no_figures_and_no_sum_is_minus_zero() {
        let of = |r: &Run| figures(r, &HashSet::new(), &HashSet::new());
        let f = of(&Run { wall: 3.0, ..Run::default() });
        assert_eq!(f.len(), FIGURES.len());
        assert!(f.values().all(Value::is_null), "{f:?}");
        let mut r = run();
        r.rows.truncate(1);
        for (key, value) in of(&r) {
            assert!(value.as_f64().is_none_or(|v| v.is_sign_positive()), "{key}: {value}");
        }
    }

    #[test]
    fn intervals_need_enough_requests_and_hold_the_mean() {
        assert!(intervals(&run()).is_empty());
        let rows = (0..60)
            .map(|i| {
                let t = f64::from(i) * 10.0;
                row("A", Class::Loop, (t, t + 1.0 + f64::from(i % 7) / 7.0, t + 5.0), (100, 50, 20))
            })
            .collect();
        let r = Run { rows, wall: 1.0, ..Run::default() };
        let i = intervals(&r);
        let m = figures(&r, &HashSet::new(), &HashSet::new())["ttft_mean_s"].as_f64().unwrap();
        let (low, high) = (i["ttft_mean_s"][0].as_f64().unwrap(), i["ttft_mean_s"][1].as_f64().unwrap());
        assert!(low < m && m < high && high - low < 0.5);
        assert_eq!(i["cache_share_pct"], json!([50.0, 50.0]));
    }
}
