//! What a comparison reports: JSON (keys of docs/kld.md), a table for people, Markdown for a card.

use crate::bootstrap::{Draws, Interval};
use crate::error::Result;
use crate::kld::{KldOptions, Reference, Rows, Test, mean};
use crate::llama::Printout;
use crate::row::RowScore;
use crate::stats::{Estimate, Percentiles, Precision, Stats, stats};
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
    /// Mean KLD over that of honest rounding.
    pub times_rounding: Option<f64>,
    /// Its interval, both resampled together.
    pub times_rounding_ci: Option<Interval>,
}

/// The yardstick: every rounding of the reference made random.
#[derive(Clone, Debug)]
pub struct RoundingReport {
    /// Seeds with the mean KLD and share of equal top tokens of each.
    pub seeds: Vec<(u64, f64, f64)>,
    /// Mean over the seeds.
    pub mean_kld: f64,
    /// Mean share of equal top tokens.
    pub top1: f64,
    /// Statistics of all seeds' rows together.
    pub stats: Stats,
    /// Interval of the mean.
    pub kld_ci: Option<Interval>,
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
        tests: &[Test],
        engines: Vec<Value>,
        scores: Vec<Vec<RowScore>>,
        elapsed: Duration,
    ) -> Result<Self> {
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
        let rounding = (!seeded.is_empty()).then(|| {
            let all: Vec<RowScore> = seeded.iter().flat_map(|(_, rows)| rows.iter().copied()).collect();
            RoundingReport {
                seeds: seeded.iter().map(|(seed, s)| (*seed, mean(s, |r| r.kld), mean(s, same))).collect(),
                mean_kld: mean(&all, |r| r.kld),
                top1: mean(&all, same),
                stats: stats(&all, precision),
                kld_ci: draws.mean(&yardstick, per_chunk),
            }
        });

        let mut paths = Vec::new();
        for ((test, rows), engine) in tests.iter().zip(&scores).zip(engines) {
            if test.rounding().is_some() {
                continue;
            }
            let kld = sums(rows, per_chunk, |r| r.kld);
            let delta = sums(rows, per_chunk, |r| r.nll_test - r.nll_reference);
            let n = (chunks.count * per_chunk) as f64;
            let pct = |mean: f64| 100.0 * mean.exp_m1();
            let s = stats(rows, precision);
            let lines = [("99.9", 0.999), ("99", 0.99), ("50", 0.5)];
            let percentile_ci = lines
                .iter()
                .filter_map(|(name, f)| Some((*name, draws.percentile(rows, per_chunk, *f, |r| r.kld)?)))
                .collect();
            let times = rounding.as_ref().filter(|r| r.mean_kld > 0.0).map(|r| s.kld.value / r.mean_kld);
            paths.push(PathReport {
                path: test.path().into(),
                engine: test.engine.clone(),
                description: engine,
                kl: kind(options, reference, &test.rows),
                ppl_ratio_pct: pct(delta.iter().sum::<f64>() / n),
                ppl_ratio_ci: draws.mean(&delta, per_chunk).map(|i| i.map(pct)),
                kld_ci: draws.mean(&kld, per_chunk),
                percentile_ci,
                top1_ci: draws.mean(&sums(rows, per_chunk, same), per_chunk),
                times_rounding: times,
                times_rounding_ci: times.and_then(|_| draws.ratio(&kld, &yardstick)),
                stats: s,
            });
        }
        if chunks.count < 2 && !tests.is_empty() {
            notes.push("one chunk gives no interval".into());
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
                "seeds": r.seeds.iter().map(|s| s.0).collect::<Vec<_>>(),
                "mean_kld": r.mean_kld,
                "range": [means.clone().fold(f64::INFINITY, f64::min), means.fold(0.0, f64::max)],
                "mean_kld_ci": r.kld_ci,
                "top1": r.top1,
                "kld_percentiles": percentiles(&r.stats.kld_percentiles),
                "per_seed": r.seeds.iter().map(|s| json!({ "seed": s.0, "mean_kld": s.1, "top1": s.2 })).collect::<Vec<_>>(),
            })
        });
        out.insert("rounding".into(), rounding.unwrap_or(Value::Null));
        out.insert("notes".into(), self.notes.clone().into());
        Value::Object(out)
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
        for note in &self.notes {
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
            let _ = write!(out, "{}", Printout(&p.stats));
        }
        out
    }

    fn table(&self) -> Vec<Vec<String>> {
        let mut rows = vec![HEAD.map(String::from).to_vec()];
        let of =
            |p: &Percentiles, name: &str| p.iter().find(|(n, _)| *n == name).map_or(f64::NAN, |(_, v)| *v);
        let bracket = |v: String, i: Option<Interval>, digits: usize| match i {
            Some([a, b]) => format!("{v} [{a:.digits$}, {b:.digits$}]"),
            None => v,
        };
        if let Some(r) = &self.rounding {
            let share = 100.0 * r.top1;
            rows.push(vec![
                "—".into(),
                format!("honest rounding, {} seeds", r.seeds.len()),
                bracket(format!("{:.6}", r.mean_kld), r.kld_ci, 6),
                "1".into(),
                format!("{:.4}", of(&r.stats.kld_percentiles, "99.9")),
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
                format!("{:.4}", of(&p.stats.kld_percentiles, "99.9")),
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

const HEAD: [&str; 7] =
    ["path", "engine", "mean KLD", "× rounding", "KLD 99.9 %", "top-1", "PPL vs reference"];

fn kind(options: &KldOptions, reference: &Reference, rows: &Rows) -> &'static str {
    match (reference, rows) {
        (Reference::Stored(_), _) => "top_k",
        (Reference::Source(_), Rows::Source { .. }) if !options.llama_compat => "full",
        _ => "cut_16",
    }
}

fn percentiles(p: &Percentiles) -> Value {
    p.iter().map(|(name, v)| ((*name).to_owned(), json!(v))).collect::<Map<_, _>>().into()
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
        "kld_percentiles": percentiles(&s.kld_percentiles),
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
        "delta_p": {
            "mean": estimate(s.p_diff),
            "rms": estimate(s.p_diff_rms),
            "percentiles": percentiles(&s.p_diff_percentiles),
        },
    })
}
