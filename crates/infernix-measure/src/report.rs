//! What a comparison reports: JSON (keys of docs/kld.md), a table for people, Markdown for a card.

use crate::bench::machine::Machine;
use crate::bootstrap::{Draws, Interval, MIN_CHUNKS};
use crate::error::Result;
use crate::kld::{KldOptions, Reference, Rows, Test, mean};
use crate::llama::{Printout, running};
use crate::row::RowScore;
use crate::source::Drafting;
use crate::stats::{Estimate, MIN_ROWS, Percentiles, Precision, Stats, percentile, stats};
use serde_json::{Map, Value, json};
use std::fmt::Write as _;
use std::time::Duration;

/// Version of the JSON document.
pub const SCHEMA_VERSION: u32 = 1;

/// One model under test on one path.
#[derive(Clone, Debug)]
pub struct PathReport {
    /// `prompt`, `decode` or `file`.
    pub path: String,
    /// Its name.
    pub engine: String,
    /// What it is, as its source describes it.
    pub description: Value,
    /// What its KLD covers: `full`, `cut_16` (reference ids with ln p > −16), `top_k` (buckets; a lower bound).
    pub kl: &'static str,
    /// All of llama.cpp's statistics.
    pub stats: Stats,
    /// Lines of llama.cpp's running table, where its definitions are asked for.
    pub running: Vec<String>,
    /// 95 % interval of the mean KLD, by chunks.
    pub kld_ci: Option<Interval>,
    /// The same of some percentiles.
    pub percentile_ci: Vec<(&'static str, Interval)>,
    /// The same of the share of equal top tokens.
    pub top1_ci: Option<Interval>,
    /// PPL of the model over that of the reference, less one, in %.
    pub ppl_ratio_pct: f64,
    /// Its interval.
    pub ppl_ratio_ci: Option<Interval>,
    /// Mean KLD over that of honest rounding, where both cover the same ids.
    pub times_rounding: Option<f64>,
    /// Its interval, both resampled together.
    pub times_rounding_ci: Option<Interval>,
    /// What plots show.
    pub curves: Curves,
    /// How much more (or less) than the first engine on the same path whose KLD covers the same ids: its name, the difference
    /// of mean KLD, and the interval of the difference, both resampled together. Sees what two overlapping intervals do not.
    pub rise: Option<(String, f64, Option<Interval>)>,
    /// What drafting did in this process, where rows came from decode rounds.
    pub drafting: Option<Drafting>,
}

/// The shape of a distribution of KLD: where in the context it lies, and how it is spread.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Curves {
    /// Tokens of context and mean KLD of the rows around.
    pub position: Vec<(f64, f64)>,
    /// Fraction of rows at or below, and that percentile.
    pub quantile: Vec<(f64, f64)>,
}

/// Points of the position curve.
const BINS: usize = 16;
/// Fractions of the quantile curve: a plain grid, and the tail in steps of about a factor of 2.
const FRACTIONS: [f64; 18] =
    [0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999, 1.0];

impl Curves {
    fn new(rows: &[RowScore], per_chunk: usize, first_row: usize) -> Self {
        let bins = BINS.min(per_chunk);
        let edge = |b: usize| b * per_chunk / bins;
        let position = (0..bins).map(|b| {
            let own = edge(b)..edge(b + 1);
            let kld = |c: &[RowScore]| c[own.clone()].iter().map(|r| r.kld).sum::<f64>();
            let sum: f64 = rows.chunks_exact(per_chunk).map(kld).sum();
            let n = (own.len() * (rows.len() / per_chunk)).max(1) as f64;
            // A row at position j has j + 1 tokens of context.
            let middle = first_row as f64 + (own.start + own.end - 1) as f64 / 2.0 + 1.0;
            (middle, sum / n)
        });
        let mut sorted: Vec<f64> = rows.iter().map(|r| r.kld).collect();
        sorted.sort_by(f64::total_cmp);
        let quantile = FRACTIONS.iter().map(|f| (*f, percentile(&sorted, *f)));
        Self { position: position.collect(), quantile: quantile.collect() }
    }

    fn json(&self) -> Value {
        json!({ "position": self.position, "quantile": self.quantile })
    }
}

/// What a run has gathered.
pub(crate) struct Measured<'a> {
    pub tests: &'a [Test],
    pub engines: Vec<Value>,
    pub drafting: Vec<Option<Drafting>>,
    pub scores: Vec<Vec<RowScore>>,
    pub elapsed: Duration,
}

/// The yardstick: every rounding of the reference made random.
#[derive(Clone, Debug)]
pub struct RoundingReport {
    /// Seeds with the mean KLD and share of equal top tokens of each.
    pub seeds: Vec<(u64, f64, f64)>,
    /// What its KLD covers, as [`PathReport::kl`].
    pub kl: &'static str,
    /// Mean over the seeds.
    pub mean_kld: f64,
    /// Mean share of equal top tokens.
    pub top1: f64,
    /// Statistics of all seeds' rows together.
    pub stats: Stats,
    /// Interval of the mean.
    pub kld_ci: Option<Interval>,
    /// What plots show.
    pub curves: Curves,
}

/// A finished comparison.
#[derive(Clone, Debug)]
pub struct KldReport {
    /// Facts of the run: text, sizes, reference, bootstrap.
    pub run: Map<String, Value>,
    /// Models under test.
    pub paths: Vec<PathReport>,
    /// The yardstick, if it ran.
    pub rounding: Option<RoundingReport>,
    /// What a reader must know.
    pub notes: Vec<String>,
}

/// Per chunk sums of a value.
fn sums(rows: &[RowScore], per_chunk: usize, f: impl Fn(&RowScore) -> f64) -> Vec<f64> {
    rows.chunks(per_chunk).map(|c| c.iter().map(&f).sum()).collect()
}

impl KldReport {
    pub(crate) fn new(
        options: &KldOptions,
        reference: &Reference,
        description: Value,
        measured: Measured<'_>,
    ) -> Result<Self> {
        let Measured { tests, engines, drafting, scores, elapsed } = measured;
        let chunks = &options.chunks;
        let per_chunk = chunks.rows().len();
        let draws = Draws::new(chunks.count, options.resamples, options.seed);
        let precision = if options.llama_compat { Precision::Llama } else { Precision::Double };
        let same = |r: &RowScore| f64::from(u8::from(r.same_top));
        let mut notes: Vec<String> = chunks.note().into_iter().collect();

        let seeded: Vec<(u64, &Vec<RowScore>)> =
            tests.iter().zip(&scores).filter_map(|(t, s)| t.rounding().map(|seed| (seed, s))).collect();
        let mut yardstick = vec![0.0; chunks.count];
        for (_, rows) in &seeded {
            let own = sums(rows, per_chunk, |r| r.kld);
            yardstick.iter_mut().zip(own).for_each(|(y, s)| *y += s / seeded.len() as f64);
        }
        let yardstick_kl = kind(options, reference, None);
        let rounding = (!seeded.is_empty()).then(|| {
            let all: Vec<RowScore> = seeded.iter().flat_map(|(_, rows)| rows.iter().copied()).collect();
            RoundingReport {
                seeds: seeded.iter().map(|(seed, s)| (*seed, mean(s, |r| r.kld), mean(s, same))).collect(),
                kl: yardstick_kl,
                mean_kld: mean(&all, |r| r.kld),
                top1: mean(&all, same),
                stats: stats(&all, precision),
                kld_ci: draws.mean(&yardstick, per_chunk),
                curves: Curves::new(&all, per_chunk, chunks.rows().start),
            }
        });

        // The first engine of each path and kind of KLD, with its sums: what later ones are compared with, chunk by chunk.
        let mut firsts: Vec<([&'static str; 2], &str, Vec<f64>)> = Vec::new();
        let mut paths = Vec::new();
        for (((test, rows), engine), drafting) in tests.iter().zip(&scores).zip(engines).zip(drafting) {
            if test.rounding().is_some() {
                continue;
            }
            let kld = sums(rows, per_chunk, |r| r.kld);
            let kl = kind(options, reference, Some(&test.rows));
            let rise = firsts.iter().find(|f| f.0 == [test.path(), kl]).map(|(_, engine, first)| {
                let more: Vec<f64> = kld.iter().zip(first).map(|(a, b)| a - b).collect();
                let value = more.iter().sum::<f64>() / (chunks.count * per_chunk) as f64;
                ((*engine).to_owned(), value, draws.mean(&more, per_chunk))
            });
            if rise.is_none() {
                firsts.push(([test.path(), kl], &test.engine, kld.clone()));
            }
            let delta = sums(rows, per_chunk, |r| r.nll_test - r.nll_reference);
            let n = (chunks.count * per_chunk) as f64;
            let pct = |mean: f64| 100.0 * mean.exp_m1();
            let s = stats(rows, precision);
            let lines = [("99.9", 0.999), ("99", 0.99), ("50", 0.5)];
            let percentile_ci = lines
                .iter()
                .filter(|(name, _)| told(name, rows.len()))
                .filter_map(|(name, f)| Some((*name, draws.percentile(rows, per_chunk, *f, |r| r.kld)?)))
                .collect();
            if rounding.is_some() && kl != yardstick_kl {
                notes.push(format!(
                    "no × rounding for {}: its KLD ({kl}) and that of honest rounding ({yardstick_kl}) cover different ids",
                    test.engine
                ));
            }
            let like = rounding.as_ref().filter(|r| r.mean_kld > 0.0 && r.kl == kl);
            let times = like.map(|r| s.kld.value / r.mean_kld);
            paths.push(PathReport {
                path: test.path().into(),
                engine: test.engine.clone(),
                description: engine,
                kl,
                running: if options.llama_compat { running(rows, per_chunk) } else { Vec::new() },
                ppl_ratio_pct: pct(delta.iter().sum::<f64>() / n),
                ppl_ratio_ci: draws.mean(&delta, per_chunk).map(|i| i.map(pct)),
                kld_ci: draws.mean(&kld, per_chunk),
                percentile_ci,
                top1_ci: draws.mean(&sums(rows, per_chunk, same), per_chunk),
                times_rounding: times,
                times_rounding_ci: times.and_then(|_| draws.ratio(&kld, &yardstick)),
                curves: Curves::new(rows, per_chunk, chunks.rows().start),
                rise,
                drafting,
                stats: s,
            });
        }
        if chunks.count < MIN_CHUNKS && !tests.is_empty() {
            let are = if chunks.count == 1 { "chunk gives" } else { "chunks give" };
            notes.push(format!("{} {are} no interval; at least {MIN_CHUNKS} are needed", chunks.count));
        }
        let rows = chunks.count * per_chunk;
        if rows < MIN_ROWS && !tests.is_empty() {
            notes.push(format!("{rows} rows give no standard error; at least {MIN_ROWS} are needed"));
        }
        if chunks.corpus == crate::corpus::DEFAULT_CORPUS {
            notes.push(
                "text: this project's documentation; published figures use the WikiText-2 raw test split \
                 (--corpus wiki.test.raw --chunks 580)"
                    .into(),
            );
        }
        if paths.iter().any(|p| p.kl == "top_k") {
            notes.push(
                "KLD over the stored ids and one bucket for the rest: a lower bound of the full KLD".into(),
            );
        }
        if paths.iter().any(|p| p.kl == "cut_16") {
            notes.push(
                "KLD over ids whose reference ln p is above -16, as llama.cpp's file holds them".into(),
            );
        }
        let machine = Machine::this();
        let run = json!({
            "chunks": chunks.count,
            "chunks_available": chunks.available,
            "chunks_requested": chunks.requested,
            "ctx": chunks.ctx,
            "rows_per_chunk": per_chunk,
            "rows": chunks.count * per_chunk,
            "valid_vocab": options.valid_vocab,
            "llama_compat": options.llama_compat,
            "corpus": { "name": chunks.corpus, "blake3": chunks.corpus_blake3, "tokens_blake3": chunks.tokens_blake3() },
            "bootstrap": { "unit": "chunk", "resamples": options.resamples, "seed": options.seed, "level": 0.95 },
            "reference": description,
            "machine": { "cpu": machine.cpu, "cores": machine.cores, "memory_bytes": machine.memory,
                "system": machine.system },
            "seconds": elapsed.as_secs_f64(),
        });
        let run = if let Value::Object(run) = run { run } else { Map::new() };
        Ok(Self { run, paths, rounding, notes })
    }

    /// The JSON document.
    pub fn to_json(&self) -> Value {
        let mut out = Map::new();
        out.insert("schema_version".into(), SCHEMA_VERSION.into());
        out.insert("command".into(), "kld".into());
        out.extend(self.run.clone());
        out.insert("paths".into(), self.paths.iter().map(path_json).collect());
        let rounding = self.rounding.as_ref().map(|r| {
            let means = r.seeds.iter().map(|s| s.1);
            json!({
                "kl": r.kl,
                "seeds": r.seeds.iter().map(|s| s.0).collect::<Vec<_>>(),
                "mean_kld": r.mean_kld,
                "range": [means.clone().fold(f64::INFINITY, f64::min), means.fold(0.0, f64::max)],
                "mean_kld_ci": r.kld_ci,
                "top1": r.top1,
                "kld_percentiles": percentiles(&r.stats.kld_percentiles, r.stats.rows),
                "curves": r.curves.json(),
                "per_seed": r.seeds.iter().map(|s| json!({ "seed": s.0, "mean_kld": s.1, "top1": s.2 })).collect::<Vec<_>>(),
            })
        });
        out.insert("rounding".into(), rounding.unwrap_or(Value::Null));
        out.insert("notes".into(), self.notes.clone().into());
        Value::Object(out)
    }

    /// What must be said beside the figures of decode paths.
    fn drafting_text(&self) -> Option<String> {
        let of = |p: &PathReport| {
            let d = p.drafting.filter(|d| d.rounds > 0)?;
            let per_round = (d.rounds + d.accepted) as f64 / d.rounds as f64;
            Some(format!(
                "{}: {} of {} drafts accepted, {per_round:.2} tokens a round",
                p.engine, d.accepted, d.drafted
            ))
        };
        let all: Vec<String> = self.paths.iter().filter_map(of).collect();
        (!all.is_empty()).then(|| format!("decode rounds: {}", all.join("; ")))
    }

    /// Paired differences from the first engine.
    fn rise_text(&self) -> Vec<String> {
        let of = |p: &PathReport| {
            let (over, value, ci) = p.rise.as_ref()?;
            let [a, b] = (*ci)?;
            let (path, engine) = (&p.path, &p.engine);
            Some(format!("{path}: {engine} less {over}, chunk by chunk: {value:+.6} [{a:+.6}, {b:+.6}]"))
        };
        self.paths.iter().filter_map(of).collect()
    }

    /// A table for a terminal.
    pub fn to_text(&self) -> String {
        let get = |k: &str| self.run.get(k).and_then(Value::as_u64).unwrap_or(0);
        let mut out = format!(
            "{} chunks of {} tokens, {} rows scored; intervals: 95 %, by chunks\n",
            get("chunks"),
            get("ctx"),
            get("rows")
        );
        let rows = self.table();
        let width = |c: usize| rows.iter().map(|r| r[c].chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..HEAD.len()).map(width).collect();
        for row in &rows {
            let mut line = String::new();
            for (c, cell) in row.iter().enumerate() {
                let pad = " ".repeat(widths[c] - cell.chars().count());
                let _ = if c < 2 { write!(line, "{cell}{pad}  ") } else { write!(line, "{pad}{cell}  ") };
            }
            let _ = writeln!(out, "{}", line.trim_end());
        }
        for note in self.rise_text().iter().chain(&self.drafting_text()).chain(&self.notes) {
            let _ = writeln!(out, "note: {note}");
        }
        out
    }

    /// A table for a model card.
    pub fn to_markdown(&self) -> String {
        let mut out = String::new();
        for (i, row) in self.table().iter().enumerate() {
            let _ = writeln!(out, "| {} |", row.join(" | "));
            if i == 0 {
                let _ = writeln!(out, "|---|---|{}", "---:|".repeat(HEAD.len() - 2));
            }
        }
        for note in &self.notes {
            let _ = writeln!(out, "\n{note}.");
        }
        out
    }

    /// llama.cpp's printout of each model under test.
    pub fn to_llama_text(&self) -> String {
        let mut out = String::new();
        for p in &self.paths {
            if self.paths.len() > 1 {
                let _ = writeln!(out, "{} ({})", p.engine, p.path);
            }
            let _ = write!(out, "{}", Printout { running: &p.running, stats: &p.stats });
        }
        out
    }

    fn table(&self) -> Vec<Vec<String>> {
        let mut rows = vec![HEAD.map(String::from).to_vec()];
        let tail = |s: &Stats| match s.kld_percentiles.iter().find(|(n, _)| *n == "99.9") {
            Some((_, value)) if s.rows >= TAIL_ROWS => format!("{value:.4}"),
            _ => format!("n/a ({} rows)", s.rows),
        };
        let chunks = self.run.get("chunks").and_then(Value::as_u64).unwrap_or(0);
        let bracket = |v: String, i: Option<Interval>, digits: usize| match i {
            Some([a, b]) => format!("{v} [{a:.digits$}, {b:.digits$}]"),
            None => format!("{v} [n/a: {chunks} chunk{}]", if chunks == 1 { "" } else { "s" }),
        };
        if let Some(r) = &self.rounding {
            let share = 100.0 * r.top1;
            rows.push(vec![
                "—".into(),
                format!("honest rounding, {}", seeds(r.seeds.len())),
                bracket(format!("{:.6}", r.mean_kld), r.kld_ci, 6),
                "1".into(),
                tail(&r.stats),
                format!("{share:.2} %"),
                format!("{:+.3} %", 100.0 * (r.stats.ratio.value - 1.0)),
            ]);
        }
        for p in &self.paths {
            let times =
                p.times_rounding.map_or("—".into(), |t| bracket(format!("{t:.2}"), p.times_rounding_ci, 2));
            rows.push(vec![
                p.path.clone(),
                p.engine.clone(),
                bracket(format!("{:.6}", p.stats.kld.value), p.kld_ci, 6),
                times,
                tail(&p.stats),
                bracket(
                    format!("{:.2} %", 100.0 * p.stats.same_top.value),
                    p.top1_ci.map(|i| i.map(|v| 100.0 * v)),
                    2,
                ),
                bracket(format!("{:+.3} %", p.ppl_ratio_pct), p.ppl_ratio_ci, 3),
            ]);
        }
        rows
    }
}

/// `1 seed`, `3 seeds`.
pub(crate) fn seeds(n: usize) -> String {
    format!("{n} seed{}", if n == 1 { "" } else { "s" })
}

const HEAD: [&str; 7] =
    ["path", "engine", "mean KLD", "× rounding", "KLD 99.9 %", "top-1", "PPL vs reference"];

/// Rows from which on percentiles of the tails are shown: as many as llama.cpp asks for.
const TAIL_ROWS: usize = 100;

/// What a KLD covers; `rows` are those under test, none for the reference's own engine.
fn kind(options: &KldOptions, reference: &Reference, rows: Option<&Rows>) -> &'static str {
    match (reference, rows) {
        (Reference::Stored(_), _) => "top_k",
        _ if options.llama_compat => "cut_16",
        (Reference::Llama(_), _) | (_, Some(Rows::Llama(_))) => "cut_16",
        // All others hold every logit: live, or in another engine's file.
        _ => "full",
    }
}

/// Named percentiles; of few rows only those that are rows themselves.
fn percentiles(p: &Percentiles, rows: usize) -> Value {
    let shown = p.iter().filter(|(name, _)| told(name, rows));
    shown.map(|(name, v)| ((*name).to_owned(), json!(v))).collect::<Map<_, _>>().into()
}

/// Whether so many rows tell a percentile: its tails need [`TAIL_ROWS`].
fn told(name: &str, rows: usize) -> bool {
    rows >= TAIL_ROWS || matches!(name, "max" | "50" | "min")
}

fn estimate(e: Estimate) -> Value {
    json!({ "value": e.value, "pm": e.pm })
}

fn path_json(p: &PathReport) -> Value {
    let s = &p.stats;
    let ci: Map<String, Value> = p.percentile_ci.iter().map(|(n, i)| ((*n).to_owned(), json!(i))).collect();
    json!({
        "path": p.path,
        "engine": p.engine,
        "description": p.description,
        "kl": p.kl,
        "mean_kld": s.kld.value,
        "mean_kld_ci": p.kld_ci,
        "mean_kld_pm": s.kld.pm,
        "kld_percentiles": percentiles(&s.kld_percentiles, s.rows),
        "kld_percentiles_ci": ci,
        "top1": s.same_top.value,
        "top1_ci": p.top1_ci,
        "top1_pm": s.same_top.pm,
        "ppl_ratio_pct": p.ppl_ratio_pct,
        "ppl_ratio_ci": p.ppl_ratio_ci,
        "times_rounding": p.times_rounding,
        "times_rounding_ci": p.times_rounding_ci,
        "ppl": estimate(s.ppl_test),
        "ppl_reference": estimate(s.ppl_reference),
        "correlation": s.correlation,
        "ln_ppl_ratio": estimate(s.ln_ratio),
        "ppl_difference": estimate(s.difference),
        "curves": p.curves.json(),
        "rise": p.rise.as_ref().map(|(over, value, ci)| json!({ "over": over, "mean_kld": value, "mean_kld_ci": ci })),
        "drafting": p.drafting.map(|d| json!({ "rounds": d.rounds, "drafted": d.drafted, "accepted": d.accepted })),
        "delta_p": {
            "mean": estimate(s.p_diff),
            "rms": estimate(s.p_diff_rms),
            "percentiles": percentiles(&s.p_diff_percentiles, s.rows),
        },
    })
}
