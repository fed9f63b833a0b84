//! `infernix bench serve` and `bench context`: load on a server.

use crate::args::{BenchContextArgs, BenchServeArgs, DatasetKind, ProgressMode, Ramp, Route, ServerArgs};
use crate::output::{self, usage};
use crate::{INTERRUPTED, Outcome};
use anyhow::{Context as _, bail};
use infernix_measure::bench::machine::{Machine, now, utc};
use infernix_measure::client::{Endpoint, Exchange};
use infernix_measure::load::context::{self, Length};
use infernix_measure::load::{self, Calibration, Dataset, Goal, Load, Rate, SpecCounters, Summary};
use infernix_measure::redact;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// A key from a file, or from the environment; never from the command line, which other users can read.
pub(crate) fn api_key(file: Option<&Path>) -> anyhow::Result<Option<String>> {
    let text = match file {
        Some(f) => {
            Some(std::fs::read_to_string(f).with_context(|| format!("{}: reading the key", f.display()))?)
        }
        None => std::env::var("INFERNIX_API_KEY").ok(),
    };
    Ok(text.map(|t| t.trim().to_owned()).filter(|t| !t.is_empty()))
}

fn connect(args: &ServerArgs) -> anyhow::Result<Endpoint> {
    let key = api_key(args.api_key_file.as_deref())?;
    Ok(Endpoint::connect_within(&args.url, key, args.model_name.clone(), Duration::from_secs(args.timeout))?)
}

pub(crate) fn serve(args: &BenchServeArgs, progress: ProgressMode) -> anyhow::Result<Outcome> {
    let load = plan(args)?;
    let dataset = dataset(args)?;
    let by_trace = matches!(dataset, Dataset::Trace { .. });
    let goals = args.goodput.iter().map(|g| goal(g)).collect::<anyhow::Result<Vec<_>>>()?;
    let metadata = args.metadata.iter().map(|m| fact(m)).collect::<anyhow::Result<Vec<_>>>()?;
    let endpoint = connect(&args.server)?;
    let none = Calibration { overhead: 0.0, per_word: 1.0 };
    let calibration = if dataset.needs_calibration() {
        Calibration::measure(&endpoint, &load.path, args.seed, load.timeout, &INTERRUPTED)?
    } else {
        none
    };
    let items = dataset.items(args.num_prompts, calibration, args.seed)?;
    let counters = SpecCounters::read(&endpoint);
    let started = now();
    let done = AtomicUsize::new(0);
    let total = items.len();
    let heard = |x: &Exchange| {
        let n = done.fetch_add(1, Ordering::Relaxed) + 1;
        if let Some(f) = &x.failure {
            output::warn(&format!("request failed: {f}"));
        }
        // Ten lines are enough for any run.
        if progress != ProgressMode::None && (n % total.div_ceil(10) == 0 || n == total) {
            output::note(&format!("{n} of {total} requests done"));
        }
    };
    let exchanges = load::run(&endpoint, &load, &items, &INTERRUPTED, &heard)?;
    let interrupted = exchanges.len() < total;
    if exchanges.is_empty() && interrupted {
        bail!("interrupted before a request was done");
    }
    let summary = Summary::of(&exchanges, &goals, &args.metric_percentiles);
    let mut doc = json!({
        "schema_version": 1,
        "command": "bench serve",
        "date": utc(started),
        "version": env!("CARGO_PKG_VERSION"),
        "command_line": output::command_line(),
        "label": args.label,
        "backend": "openai",
        "url": endpoint.base(),
        "endpoint": load.path,
        "model_id": endpoint.shown_model(),
        "dataset": described(args),
        "num_prompts": total,
        "interrupted": interrupted,
        "extra_body": redact::fields(&load.extra),
        // What did not decide when requests were sent is not stated.
        "request_rate": match load.rate {
            _ if by_trace => Value::Null,
            Rate::Unlimited => json!("inf"),
            Rate::Constant(rate) => json!(rate),
            Rate::Linear(..) | Rate::Exponential(..) => Value::Null,
        },
        "ramp_up_strategy": args.ramp_up_strategy.map(|r| if r == Ramp::Linear { "linear" } else { "exponential" }),
        "ramp_up_start_rps": args.ramp_up_start_rps,
        "ramp_up_end_rps": args.ramp_up_end_rps,
        "burstiness": (!by_trace).then_some(args.burstiness),
        "max_concurrency": args.max_concurrency,
        "seed": args.seed,
        "machine": Machine::this().to_json(),
    });
    for (key, value) in summary.to_json() {
        doc[key] = value;
    }
    let drafting = match (counters, SpecCounters::read(&endpoint)) {
        (Some(before), Some(after)) => after.since(before),
        _ => serde_json::Map::new(),
    };
    for (key, value) in &drafting {
        doc[key.as_str()] = value.clone();
    }
    if args.save_detailed {
        detail(&exchanges, &mut doc);
    }
    for (key, value) in metadata {
        // The figures of a long run are worth more than a fact about it.
        if doc.get(key).is_some() {
            output::warn(&format!("--metadata {key}: the result has this key already; left out"));
        } else {
            doc[key] = json!(value);
        }
    }
    // Printed first: a disk that is full must not cost the result of a long run.
    if args.json.json {
        output::print_json(&doc)?;
    } else {
        output::print(&(summary.to_text() + &SpecCounters::to_text(&drafting)))?;
        if interrupted {
            output::print(&format!("interrupted: {} of {total} requests\n", exchanges.len()))?;
        }
    }
    if let Some(file) = &args.output {
        output::write_report(file, &format!("{doc:#}\n"))?;
    }
    if interrupted {
        bail!("interrupted: {} of {total} requests were done, the others do not count", exchanges.len());
    }
    Ok(if summary.failed() > 0 { Outcome::Mismatch } else { Outcome::Done })
}

/// vLLM's arrays, one entry a request.
fn detail(exchanges: &[Exchange], doc: &mut Value) {
    let first = exchanges.iter().map(|x| x.sent).min();
    let list = |f: &dyn Fn(&Exchange) -> Value| exchanges.iter().map(f).collect::<Value>();
    doc["input_lens"] = list(&|x| json!(x.answer.usage.map_or(0, |u| u.prompt)));
    doc["output_lens"] = list(&|x| json!(x.output_tokens()));
    doc["ttfts"] = list(&|x| json!(x.ttft().map(|t| t.as_secs_f64())));
    doc["latencies"] = list(&|x| json!(x.latency().as_secs_f64()));
    doc["itls"] =
        list(&|x| x.pieces.windows(2).map(|w| json!(w[1].duration_since(w[0]).as_secs_f64())).collect());
    doc["start_times"] = list(&|x| json!(first.map(|f| x.sent.duration_since(f).as_secs_f64())));
    doc["errors"] = list(&|x| json!(x.failure.as_ref().map(ToString::to_string)));
}

fn plan(args: &BenchServeArgs) -> anyhow::Result<Load> {
    let positive = |name: &str, v: f64| {
        if v > 0.0 && v.is_finite() { Ok(v) } else { Err(usage(format!("{name} must be a number above 0"))) }
    };
    let rate = match (args.ramp_up_strategy, args.ramp_up_start_rps, args.ramp_up_end_rps) {
        (Some(ramp), Some(a), Some(b)) => {
            let (a, b) = (positive("--ramp-up-start-rps", a)?, positive("--ramp-up-end-rps", b)?);
            if ramp == Ramp::Linear { Rate::Linear(a, b) } else { Rate::Exponential(a, b) }
        }
        _ if args.request_rate == f64::INFINITY => Rate::Unlimited,
        _ => Rate::Constant(positive("--request-rate", args.request_rate)?),
    };
    let mut extra: Value = match &args.extra_body {
        Some(text) => serde_json::from_str(text).map_err(|e| usage(format!("--extra-body: {e}")))?,
        None => json!({}),
    };
    if !extra.is_object() {
        return Err(usage("--extra-body takes a JSON object"));
    }
    if args.ignore_eos {
        extra["ignore_eos"] = json!(true);
    }
    if let Some(t) = args.temperature {
        if !(0.0..=100.0).contains(&t) {
            return Err(usage("--temperature must lie in 0..=100"));
        }
        extra["temperature"] = json!(t);
    }
    for (flag, n) in [
        ("--num-prompts", Some(args.num_prompts)),
        ("--num-prefixes", Some(args.num_prefixes)),
        ("--max-concurrency", args.max_concurrency),
        ("--input-len", Some(args.input_len)),
        ("--output-len", args.output_len),
    ] {
        if n == Some(0) {
            return Err(usage(format!("{flag} must be above 0")));
        }
    }
    if !(0.0..1.0).contains(&args.range_ratio) {
        return Err(usage("--range-ratio must be at least 0 and below 1"));
    }
    if args.metric_percentiles.iter().any(|p| !(0.0..=100.0).contains(p)) {
        return Err(usage("--metric-percentiles must lie between 0 and 100"));
    }
    let path = match args.endpoint {
        Route::Chat => "/v1/chat/completions",
        Route::Completions => "/v1/completions",
    };
    Ok(Load {
        path: path.into(),
        requests: args.num_prompts,
        rate,
        burstiness: positive("--burstiness", args.burstiness)?,
        concurrency: args.max_concurrency,
        warm_up: args.num_warmups,
        seed: args.seed,
        extra,
        timeout: Duration::from_secs(args.server.timeout),
    })
}

fn dataset(args: &BenchServeArgs) -> anyhow::Result<Dataset> {
    let of_a_file = matches!(args.dataset_name, DatasetKind::Sharegpt | DatasetKind::Trace);
    if args.dataset_path.is_some() && !of_a_file {
        return Err(usage("--dataset-path: name its kind with --dataset-name sharegpt or trace"));
    }
    let output = args.output_len.unwrap_or(128);
    let file = || args.dataset_path.clone().ok_or_else(|| usage("this dataset needs --dataset-path FILE"));
    Ok(match args.dataset_name {
        DatasetKind::Random => Dataset::Random { input: args.input_len, output, spread: args.range_ratio },
        DatasetKind::SharedPrefix => Dataset::SharedPrefix {
            groups: args.num_prefixes,
            prefix: args.prefix_len,
            suffix: args.suffix_len,
            output,
        },
        DatasetKind::Sharegpt => Dataset::ShareGpt { file: file()?, output: args.output_len },
        DatasetKind::Trace => {
            let other = [
                ("--request-rate", args.request_rate.is_finite()),
                ("--burstiness", args.burstiness != 1.0),
                ("--ramp-up-strategy", args.ramp_up_strategy.is_some()),
            ];
            if let Some((flag, _)) = other.iter().find(|o| o.1) {
                return Err(usage(format!("a trace has its own times; leave out {flag}")));
            }
            Dataset::Trace { file: file()? }
        }
    })
}

/// What makes two runs the same work, beside seed and number of requests.
fn described(args: &BenchServeArgs) -> Value {
    let file =
        args.dataset_path.as_deref().and_then(Path::file_name).map(|f| f.to_string_lossy().into_owned());
    match args.dataset_name {
        DatasetKind::Random => json!({
            "name": "random", "input_len": args.input_len, "output_len": args.output_len.unwrap_or(128),
            "range_ratio": args.range_ratio,
        }),
        DatasetKind::SharedPrefix => json!({
            "name": "shared-prefix", "num_prefixes": args.num_prefixes, "prefix_len": args.prefix_len,
            "suffix_len": args.suffix_len, "output_len": args.output_len.unwrap_or(128),
        }),
        DatasetKind::Sharegpt => json!({ "name": "sharegpt", "file": file, "output_len": args.output_len }),
        DatasetKind::Trace => json!({ "name": "trace", "file": file }),
    }
}

fn goal(text: &str) -> anyhow::Result<Goal> {
    let wrong = || usage(format!("--goodput takes ttft:MS, tpot:MS or e2el:MS, not {text:?}"));
    let (metric, limit) = text.split_once(':').ok_or_else(wrong)?;
    if !["ttft", "tpot", "e2el"].contains(&metric) {
        return Err(wrong());
    }
    let milliseconds = limit.parse().ok().filter(|ms: &f64| *ms > 0.0 && ms.is_finite()).ok_or_else(wrong)?;
    Ok(Goal { metric: metric.into(), milliseconds })
}

fn fact(text: &str) -> anyhow::Result<(&str, &str)> {
    let pair = text.split_once('=').filter(|p| !p.0.is_empty());
    pair.ok_or_else(|| usage(format!("--metadata takes KEY=VALUE, not {text:?}")))
}

pub(crate) fn context(args: &BenchContextArgs) -> anyhow::Result<Outcome> {
    let length = |text: &String| {
        let (tokens, prompts) = text.split_once(':').unwrap_or((text, "1"));
        match (tokens.parse(), prompts.parse()) {
            (Ok(tokens), Ok(prompts)) if tokens > 0 && prompts > 0 => Ok(Length { tokens, prompts }),
            _ => Err(usage(format!("--lengths takes TOKENS:PROMPTS, not {text:?}"))),
        }
    };
    let lengths = args.lengths.iter().map(length).collect::<anyhow::Result<Vec<_>>>()?;
    if args.output_len == 0 {
        return Err(usage("--output-len must be above 0: the first token is what is measured"));
    }
    let endpoint = connect(&args.server)?;
    let longest = lengths.iter().map(|l| l.tokens).max().unwrap_or(0) + args.output_len;
    if let Some(limit) = endpoint.context_limit().filter(|l| longest as u64 > *l) {
        return Err(usage(format!(
            "the server holds {limit} tokens, {longest} are asked for; shorten --lengths"
        )));
    }
    let mut rows = Vec::new();
    let mut each = |r: context::ContextRow| {
        let rate = r.decode_rate().map_or(String::new(), |v| format!(", then {v:.1} tok/s"));
        match (&r.error, r.ttft) {
            (Some(e), _) => output::warn(&format!("a prompt of {} tokens does not count: {e}", r.length)),
            (None, Some(first)) => {
                output::note(&format!("{} tokens: first token after {first:.2} s{rate}", r.prompt_tokens));
            }
            (None, None) => {}
        }
        rows.push(r);
    };
    let timeout = Duration::from_secs(args.server.timeout);
    let done =
        context::run(&endpoint, &lengths, args.output_len, args.seed, timeout, &INTERRUPTED, &mut each);
    if rows.is_empty() {
        done?;
        return Ok(Outcome::Done);
    }
    if !context::counts_cached(&rows) {
        output::warn(
            "the server counts no cached tokens: whether a prompt came from its cache is not known; compare the first tokens",
        );
    }
    // What was measured before a failure is printed all the same.
    if args.json.json {
        let mut doc = context::to_json(&endpoint, &rows, args.seed);
        doc["error"] = json!(done.as_ref().err().map(ToString::to_string));
        doc["command_line"] = json!(output::command_line());
        doc["machine"] = Machine::this().to_json();
        output::print_json(&doc)?;
    } else {
        output::print(&context::to_markdown(&rows))?;
    }
    done?;
    Ok(if rows.iter().any(|r| r.error.is_some()) { Outcome::Mismatch } else { Outcome::Done })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: BenchServeArgs,
    }

    #[test]
    fn a_trace_takes_no_other_arrivals() {
        let with = |more: &[&str]| {
            let fixed = ["x", "--url", "http://h", "--dataset-name", "trace", "--dataset-path", "t.jsonl"];
            dataset(&Line::parse_from([&fixed[..], more].concat()).args).map_err(|e| e.to_string())
        };
        assert!(with(&[]).is_ok());
        let ramp = ["--ramp-up-strategy", "linear", "--ramp-up-start-rps", "1", "--ramp-up-end-rps", "2"];
        for flags in [&["--request-rate", "20"][..], &["--burstiness", "2"], &ramp] {
            let e = with(flags).unwrap_err();
            assert!(e.contains(flags[0]) && e.contains("its own times"), "{e}");
        }
    }
}
