//! Reports: a Markdown table, CSV and JSON with llama-bench's names, and our own document.

use super::bytes::ModelBytes;
use super::machine::{Machine, utc};
use super::timed::Cost;
use super::{Measured, Rounds, Sample, Settings};
use serde_json::{Map, Value, json};
use std::fmt::Write as _;

/// Version of [`document`].
pub const SCHEMA_VERSION: u32 = 1;

/// What was measured, beside the tests.
#[derive(Clone, Debug)]
pub struct Subject {
    /// The command line.
    pub command: String,
    /// File name of the model, or the name of a synthetic geometry.
    pub model: String,
    /// Architecture and format, as `qwen3_5 q4_g64_fp16`.
    pub model_type: String,
    /// Whether its weights are random.
    pub synthetic: bool,
    /// Sizes of its weights.
    pub bytes: ModelBytes,
    /// Backend by name.
    pub backend: String,
    /// Decode threads.
    pub threads: usize,
    /// Prefill threads.
    pub threads_batch: usize,
    /// Activation policy as on the command line.
    pub activations: String,
    /// KV format.
    pub kv: String,
    /// How the engine's scheduler ran the tests; without it one stream is decoded plainly.
    pub scheduled: Option<Scheduled>,
    /// Seconds from start to a loaded model.
    pub load_seconds: f64,
    /// How the clocks of a card moved during the run, if they did.
    pub moved: Option<String>,
    /// The machine.
    pub machine: Machine,
    /// Measured read bandwidth in bytes per second, with as many threads as decode has.
    pub read_limit: Option<f64>,
}

/// Settings of the engine's scheduler.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scheduled {
    /// Answers at a time.
    pub concurrency: usize,
    /// Who drafts, as on the command line.
    pub spec: String,
    /// What answers are held to, in words.
    pub constraint: Option<String>,
}

/// Where the time of one test went.
#[derive(Clone, Debug)]
pub struct Breakdown {
    /// Label of the test.
    pub test: String,
    /// Seconds it took.
    pub seconds: f64,
    /// Operations, most time first.
    pub operations: Vec<(String, Cost)>,
}

impl Subject {
    /// The model's type in tables, which says when its weights are random: what they compute is no answer of a model.
    fn shown_type(&self) -> String {
        format!("{}{}", self.model_type, if self.synthetic { " (synthetic)" } else { "" })
    }

    /// Rate at which decode reads weights, as a share of the measured limit; only for generation alone.
    pub fn share_of_limit(&self, m: &Measured) -> Option<f64> {
        let limit = self.read_limit?;
        (m.test.prompt == 0 && self.scheduled.is_none())
            .then(|| m.rate.best * self.bytes.bytes_per_token as f64 / limit)
    }
}

/// Mean and deviation; of a single value the value alone.
fn spread(s: &Sample) -> String {
    s.sd.map_or_else(|| format!("{:.2}", s.mean), |sd| format!("{:.2} ± {sd:.2}", s.mean))
}

/// The table of llama-bench, with the share of the bandwidth limit where it is known; of scheduled tests with streams,
/// rounds per second of one stream and tokens per round.
pub fn markdown(s: &Subject, tests: &[Measured]) -> String {
    let mut head: Vec<&str> = vec!["model", "size", "params", "backend", "threads"];
    let scheduled = ["streams", "spec", "test", "t/s", "best t/s", "rounds/s", "tok/round"];
    let plain = ["test", "t/s", "best t/s", "of limit"];
    head.extend(if s.scheduled.is_some() { &scheduled[..] } else { &plain[..] });
    let mut rows = vec![head.into_iter().map(str::to_owned).collect::<Vec<_>>()];
    for m in tests {
        let share = s.share_of_limit(m).map_or(String::new(), percent);
        let mut row = vec![
            s.shown_type(),
            format!("{:.2} MiB", s.bytes.bytes as f64 / f64::from(1 << 20)),
            format!("{:.2} M", s.bytes.parameters as f64 / 1e6),
            s.backend.clone(),
            if m.test.generate == 0 { s.threads_batch } else { s.threads }.to_string(),
        ];
        if let Some(scheduled) = &s.scheduled {
            row.extend([scheduled.concurrency.to_string(), scheduled.spec.clone()]);
        }
        row.extend([m.test.label(), spread(&m.rate), format!("{:.2}", m.rate.best)]);
        if s.scheduled.is_some() {
            let cell = |v: Option<f64>| v.map_or(String::new(), |v| format!("{v:.2}"));
            let r = m.rounds.as_ref();
            row.extend([cell(r.and_then(Rounds::per_second)), cell(r.map(Rounds::tokens_per_round))]);
        } else {
            row.push(share);
        }
        rows.push(row);
    }
    let right: Vec<bool> =
        rows[0].iter().map(|h| !["model", "backend", "spec"].contains(&h.as_str())).collect();
    let mut out = table(&rows, &right);
    if let Some(held) = s.scheduled.as_ref().and_then(|x| x.constraint.as_ref()) {
        let _ = writeln!(out, "\nanswers held to {held}; a stream may end early");
    }
    if let Some(limit) = s.read_limit {
        let _ = writeln!(
            out,
            "\nread limit: {:.1} GB/s with {} threads, measured in this run; decode reads {:.1} MB of weights a token",
            limit / 1e9,
            s.threads,
            s.bytes.bytes_per_token as f64 / 1e6,
        );
    }
    out
}

/// Where the time went, as a table; `read_limit` in bytes per second.
pub fn breakdown_markdown(b: &Breakdown, read_limit: Option<f64>) -> String {
    let mut rows = vec![vec![
        format!("{} ({:.2} ms)", b.test, b.seconds * 1e3),
        "calls".into(),
        "time".into(),
        "share".into(),
        "MB".into(),
        "GB/s".into(),
        "of limit".into(),
        "Gop/s".into(),
    ]];
    for (name, c) in &b.operations {
        let seconds = c.time.as_secs_f64();
        let rate = |n: u64| if n == 0 || seconds == 0.0 { None } else { Some(n as f64 / seconds) };
        let cell = |v: Option<f64>, digits| v.map_or(String::new(), |v| format!("{v:.digits$}"));
        rows.push(vec![
            name.clone(),
            c.calls.to_string(),
            format!("{:.3} ms", seconds * 1e3),
            format!("{:.1} %", 100.0 * seconds / b.seconds.max(1e-9)),
            if c.bytes == 0 { String::new() } else { format!("{:.2}", c.bytes as f64 / 1e6) },
            cell(rate(c.bytes).map(|r| r / 1e9), 2),
            rate(c.bytes).zip(read_limit).map_or(String::new(), |(r, l)| percent(r / l)),
            cell(rate(c.operations).map(|r| r / 1e9), 1),
        ]);
    }
    table(&rows, &[false, true, true, true, true, true, true, true])
}

/// A share of the limit as both tables show it.
fn percent(share: f64) -> String {
    format!("{:.0} %", 100.0 * share)
}

fn table(rows: &[Vec<String>], right: &[bool]) -> String {
    let width = |c: usize| rows.iter().map(|r| r[c].chars().count()).max().unwrap_or(0).max(3);
    let widths: Vec<usize> = (0..right.len()).map(width).collect();
    let mut out = String::new();
    for (i, row) in rows.iter().enumerate() {
        for (c, cell) in row.iter().enumerate() {
            let pad = " ".repeat(widths[c] - cell.chars().count());
            let _ = if right[c] { write!(out, "| {pad}{cell} ") } else { write!(out, "| {cell}{pad} ") };
        }
        out.push_str("|\n");
        if i == 0 {
            for (w, r) in widths.iter().zip(right) {
                let _ = write!(out, "|{}{}", "-".repeat(w + 1), if *r { ":" } else { "-" });
            }
            out.push_str("|\n");
        }
    }
    out
}

/// One object of llama-bench's JSON. Keys that have no meaning here are left out, not filled.
pub fn llama_object(s: &Subject, settings: Settings, m: &Measured) -> Value {
    let time = m.time();
    let mut out = json!({
        "build_version": env!("CARGO_PKG_VERSION"),
        "cpu_info": s.machine.cpu,
        "backends": s.backend,
        "model_filename": s.model,
        "model_type": s.shown_type(),
        "model_size": s.bytes.bytes,
        "model_n_params": s.bytes.parameters,
        "n_batch": settings.prefill_chunk,
        "n_ubatch": settings.prefill_chunk,
        "n_threads": s.threads,
        "type_k": s.kv,
        "type_v": s.kv,
        "n_prompt": m.test.prompt,
        "n_gen": m.test.generate,
        "n_depth": m.test.depth,
        "test_time": utc(m.started),
        "avg_ns": time.mean.round() as u64,
        // llama-bench's is 0 for one repetition.
        "stddev_ns": time.sd.unwrap_or(0.0).round() as u64,
        "avg_ts": m.rate.mean,
        "stddev_ts": m.rate.sd.unwrap_or(0.0),
        "samples_ns": m.nanoseconds,
        "samples_ts": m.rates(),
    });
    let gpus: Vec<&str> = s.machine.gpus.iter().map(|g| g.name.as_str()).collect();
    if !gpus.is_empty() {
        out["gpu_info"] = json!(gpus.join(", "));
    }
    // No name of llama-bench's means these.
    if let Some(x) = &s.scheduled {
        out["n_streams"] = json!(x.concurrency);
        out["spec"] = json!(x.spec);
        out["constraint"] = json!(x.constraint);
    }
    if let Some(r) = &m.rounds {
        out["n_rounds"] = json!(r.rounds);
        out["rounds_per_s_mean"] = json!(r.per_second());
        out["tokens_per_round"] = json!(r.tokens_per_round());
    }
    out
}

/// A header and one line a test, without the sample lists, as llama-bench prints CSV. Every line has every column that
/// one of the tests has; what a test does not have is an empty field.
pub fn csv(s: &Subject, settings: Settings, tests: &[Measured]) -> String {
    let objects: Vec<Value> = tests.iter().map(|m| llama_object(s, settings, m)).collect();
    let mut columns: Vec<&String> = Vec::new();
    for (key, value) in objects.iter().filter_map(Value::as_object).flatten() {
        if !value.is_array() && !columns.contains(&key) {
            columns.push(key);
        }
    }
    let line = |cells: Vec<String>| cells.join(",") + "\n";
    let mut out = line(columns.iter().map(|c| (*c).clone()).collect());
    for object in &objects {
        let cell = |c: &&String| match &object[c.as_str()] {
            Value::Null => String::new(),
            Value::String(text) => format!("\"{}\"", text.replace('"', "\"\"")),
            other => format!("\"{other}\""),
        };
        out.push_str(&line(columns.iter().map(cell).collect()));
    }
    out
}

/// Our own document.
pub fn document(s: &Subject, settings: Settings, tests: &[Measured], breakdowns: &[Breakdown]) -> Value {
    let limit = s.read_limit;
    let mut tests_json = Vec::new();
    for m in tests {
        let mut t = Map::new();
        t.insert("label".into(), json!(m.test.label()));
        t.insert("n_prompt".into(), json!(m.test.prompt));
        t.insert("n_gen".into(), json!(m.test.generate));
        t.insert("n_depth".into(), json!(m.test.depth));
        t.insert("started".into(), json!(utc(m.started)));
        t.insert("tok_s_mean".into(), json!(m.rate.mean));
        t.insert("tok_s_stddev".into(), json!(m.rate.sd));
        t.insert("tok_s_best".into(), json!(m.rate.best));
        t.insert("seconds".into(), json!(m.nanoseconds.iter().map(|n| *n as f64 / 1e9).collect::<Vec<_>>()));
        t.insert("tok_s".into(), json!(m.rates()));
        t.insert("tokens".into(), json!(m.tokens));
        if let Some(r) = &m.rounds {
            t.insert("rounds".into(), json!(r.rounds));
            t.insert("rounds_per_s_mean".into(), json!(r.per_second()));
            t.insert("tokens_per_round".into(), json!(r.tokens_per_round()));
            t.insert("drafted".into(), json!(r.drafted));
            t.insert("accepted".into(), json!(r.accepted));
        }
        if m.test.prompt == 0 && s.scheduled.is_none() {
            let rate = m.rate.best * s.bytes.bytes_per_token as f64;
            t.insert("weight_bytes_per_s_best".into(), json!(rate));
            t.insert("share_of_read_limit".into(), json!(s.share_of_limit(m)));
        }
        tests_json.push(Value::Object(t));
    }
    let breakdown: Vec<Value> = breakdowns
        .iter()
        .map(|b| {
            let operations: Vec<Value> = b
                .operations
                .iter()
                .map(|(name, c)| {
                    let seconds = c.time.as_secs_f64();
                    let share =
                        limit.filter(|_| c.bytes > 0 && seconds > 0.0).map(|l| c.bytes as f64 / seconds / l);
                    json!({
                        "operation": name,
                        "calls": c.calls,
                        "seconds": seconds,
                        "share_of_time": seconds / b.seconds.max(1e-9),
                        "weight_bytes": c.bytes,
                        "operations": c.operations,
                        "share_of_read_limit": share,
                    })
                })
                .collect();
            json!({ "test": b.test, "seconds": b.seconds, "operations": operations })
        })
        .collect();
    let mut machine = s.machine.to_json();
    machine["read_bytes_per_s"] = json!(limit);
    json!({
        "schema_version": SCHEMA_VERSION,
        "kind": "infernix_bench",
        "command": s.command,
        "version": env!("CARGO_PKG_VERSION"),
        "machine": machine,
        "model": {
            "name": s.model,
            "type": s.model_type,
            "synthetic": s.synthetic,
            "parameters": s.bytes.parameters,
            "weight_bytes": s.bytes.bytes,
            "weight_bytes_per_token": s.bytes.bytes_per_token,
            "load_seconds": s.load_seconds,
        },
        "config": {
            "backend": s.backend,
            "threads": s.threads,
            "threads_batch": s.threads_batch,
            "activations": s.activations,
            "kv_dtype": s.kv,
            "prefill_chunk": settings.prefill_chunk,
            "concurrency": s.scheduled.as_ref().map(|x| x.concurrency),
            "spec": s.scheduled.as_ref().map(|x| &x.spec),
            "constraint": s.scheduled.as_ref().and_then(|x| x.constraint.as_ref()),
            "repetitions": settings.repetitions,
            "warm_up": settings.warm_up,
            "seed": settings.seed,
        },
        "tests": tests_json,
        "breakdown": breakdown,
        "clocks_moved": s.moved,
    })
}

#[cfg(test)]
mod tests {
    use super::super::Test;
    use super::*;
    use std::time::Duration;

    fn subject() -> Subject {
        Subject {
            command: "infernix bench".into(),
            model: "m.infernix".into(),
            model_type: "qwen3_5 \"q4\"".into(),
            synthetic: true,
            bytes: ModelBytes { parameters: 600_000_000, bytes: 320 << 20, bytes_per_token: 300_000_000 },
            backend: "cpu".into(),
            threads: 2,
            threads_batch: 4,
            activations: "artifact".into(),
            kv: "bf16".into(),
            scheduled: None,
            load_seconds: 0.5,
            moved: None,
            machine: Machine::default(),
            read_limit: Some(20e9),
        }
    }

    fn measured(prompt: usize, generate: usize) -> Measured {
        Measured::new(Test { prompt, generate, depth: 0 }, 0, vec![1_000_000_000, 2_000_000_000])
    }

    const SETTINGS: Settings = Settings { repetitions: 2, prefill_chunk: 512, warm_up: true, seed: 1 };

    #[test]
    fn rows_show_mean_deviation_and_share_of_the_limit() {
        let text = markdown(&subject(), &[measured(512, 0), measured(0, 50)]);
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[1].starts_with("|-") && lines[1].ends_with(":|"), "{text}");
        assert!(lines[2].contains("pp512") && lines[2].contains("384.00 ± 181.02"), "{text}");
        // 50 tokens/s best x 300 MB = 15 GB/s of 20.
        assert!(lines[3].contains("tg50") && lines[3].contains("75 %"), "{text}");
        assert!(lines.iter().take(4).all(|l| l.chars().count() == lines[0].chars().count()), "{text}");
    }

    #[test]
    fn scheduled_tests_show_streams_rounds_and_tokens_a_round() {
        let scheduled = Scheduled { concurrency: 4, spec: "mtp".into(), constraint: Some("a schema".into()) };
        let s = Subject { scheduled: Some(scheduled), ..subject() };
        let mut m = measured(0, 50);
        m.rounds = Some(Rounds { rounds: 20, tokens: 50, drafted: 60, accepted: 30, rates: vec![4.0, 6.0] });
        let text = markdown(&s, std::slice::from_ref(&m));
        for words in ["| streams | spec", "|       4 | mtp", "5.00", "2.50", "held to a schema"] {
            assert!(text.contains(words), "{words} in\n{text}");
        }
        assert!(!text.contains("of limit"), "weights are read once for all streams: {text}");
        let o = llama_object(&s, SETTINGS, &m);
        assert_eq!((&o["n_streams"], &o["tokens_per_round"]), (&json!(4), &json!(2.5)));
        let d = document(&s, SETTINGS, std::slice::from_ref(&m), &[]);
        assert_eq!(
            (&o["rounds_per_s_mean"], &d["tests"][0]["rounds_per_s_mean"]),
            (&json!(5.0), &json!(5.0)),
            "one name and one meaning"
        );
        assert_eq!((&d["config"]["spec"], &d["tests"][0]["accepted"]), (&json!("mtp"), &json!(30)));
        assert!(d["tests"][0]["share_of_read_limit"].is_null());
    }

    #[test]
    fn objects_have_llama_benchs_names_and_csv_quotes() {
        let m = measured(0, 50);
        let o = llama_object(&subject(), SETTINGS, &m);
        for key in ["model_n_params", "n_gen", "avg_ts", "stddev_ts", "samples_ns", "test_time"] {
            assert!(!o[key].is_null(), "{key}");
        }
        assert_eq!(o["avg_ns"], 1_500_000_000u64);
        assert_eq!(o["samples_ts"], json!([50.0, 25.0]));
        let text = csv(&subject(), SETTINGS, &[m]);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0].split(',').count(), lines[1].split(",\"").count());
        assert!(lines[1].contains("\"qwen3_5 \"\"q4\"\" (synthetic)\""), "{text}");
    }

    #[test]
    fn every_form_says_that_weights_are_random() {
        let m = measured(0, 50);
        let named = |s: &Subject| {
            let tests = std::slice::from_ref(&m);
            let forms = [
                markdown(s, tests),
                csv(s, SETTINGS, tests),
                llama_object(s, SETTINGS, &m).to_string(),
                document(s, SETTINGS, tests, &[]).to_string().replace("\"synthetic\":false", ""),
            ];
            forms.map(|text| text.contains("synthetic"))
        };
        assert_eq!(named(&Subject { read_limit: None, ..subject() }), [true; 4]);
        assert_eq!(named(&Subject { synthetic: false, ..subject() }), [false; 4]);
    }

    #[test]
    fn csv_is_rectangular_whatever_the_tests_have() {
        let mut held = subject();
        held.scheduled = Some(Scheduled { concurrency: 2, spec: "off".into(), constraint: None });
        let text = csv(&held, SETTINGS, &[measured(50, 0), measured(0, 50)]);
        let fields: Vec<usize> = text.lines().map(|l| l.split(',').count()).collect();
        assert_eq!(fields, vec![fields[0]; 3], "{text}");
        assert!(text.lines().next().is_some_and(|head| head.contains("rounds_per_s_mean")));
        assert!(!text.contains("null"), "{text}");
    }

    #[test]
    fn the_document_names_its_schema_and_shares() {
        let cost = Cost { calls: 1, time: Duration::from_millis(10), bytes: 100_000_000, operations: 4 };
        let b =
            Breakdown { test: "tg1".into(), seconds: 0.02, operations: vec![("linear Head".into(), cost)] };
        let d = document(&subject(), SETTINGS, &[measured(0, 50)], std::slice::from_ref(&b));
        assert_eq!(d["schema_version"], SCHEMA_VERSION);
        assert_eq!(d["tests"][0]["share_of_read_limit"], 0.75);
        assert_eq!(d["breakdown"][0]["operations"][0]["share_of_read_limit"], 0.5);
        let text = breakdown_markdown(&b, Some(20e9));
        assert!(
            text.contains("linear Head") && text.contains("|     50 % |"),
            "a share, as in the table: {text}"
        );
    }

    #[test]
    fn one_repetition_shows_no_deviation() {
        let test = Test { prompt: 0, generate: 50, depth: 0 };
        let m = Measured::new(test, 0, vec![1_000_000_000]);
        let text = markdown(&subject(), std::slice::from_ref(&m));
        assert!(text.contains("50.00") && !text.contains('±'), "{text}");
        assert!(
            document(&subject(), SETTINGS, std::slice::from_ref(&m), &[])["tests"][0]["tok_s_stddev"]
                .is_null()
        );
        assert_eq!(llama_object(&subject(), SETTINGS, &m)["stddev_ts"], 0.0, "as llama-bench's");
    }
}
