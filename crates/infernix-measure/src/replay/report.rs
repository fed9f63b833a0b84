//! A replay's result: JSON, Markdown, and the files of its folder.

use super::metrics::{FIGURES, Kind, TOKENS, classes, cold, figures, intervals};
use super::plan::Plan;
use super::runner::{Row, Run};
use crate::bench::gpu::{Gpu, moved};
use crate::bench::machine::Machine;
use serde_json::{Map, Value, json};
use std::collections::HashSet;
use std::fmt::Write as _;

/// Version of the JSON document.
pub const SCHEMA_VERSION: u32 = 1;

/// One plan played on one server.
#[derive(Clone, Debug)]
pub struct Played {
    /// The arm's name.
    pub arm: String,
    /// What its server calls the model.
    pub model: String,
    /// The plan's seed.
    pub seed: u64,
    /// What happened.
    pub run: Run,
    /// Most resident memory of its processes, MiB, where it was started here.
    pub peak_ram_mib: Option<u64>,
    /// Most GPU memory in use, MiB.
    pub peak_vram_mib: Option<u64>,
    /// Highest clock of the GPU, MHz.
    pub peak_sm_mhz: Option<u64>,
    /// Memory taken beyond the budget.
    pub exceeded: Option<String>,
}

impl Played {
    /// Why the run does not count, if it does not.
    pub fn invalid(&self) -> Vec<String> {
        // Who was ended for its memory answers no more: that is no reason of its own.
        let ended = self.exceeded.as_ref().map(|what| format!("ended for taking {what}"));
        let mut reasons: Vec<String> = ended.or_else(|| self.run.ended.clone()).into_iter().collect();
        let failed: Vec<String> = self
            .run
            .rows
            .iter()
            .filter_map(|r| Some(format!("{}#{}: {}", r.actor, r.index, r.failure()?)))
            .collect();
        if let Some(first) = failed.first() {
            reasons.push(format!("{} failed; the first: {first}", plural(failed.len(), "request")));
        }
        let uncounted = self
            .run
            .rows
            .iter()
            .filter(|r| r.exchange.failure.is_none() && r.exchange.answer.usage.is_none());
        let uncounted = uncounted.count();
        if uncounted > 0 {
            reasons.push(format!("{} without token counts", plural(uncounted, "answer")));
        }
        reasons
    }

    fn failed(&self) -> usize {
        self.run.rows.iter().filter(|r| r.failure().is_some()).count()
    }
}

fn plural(n: usize, noun: &str) -> String {
    format!("{n} {noun}{}", if n == 1 { "" } else { "s" })
}

/// All runs of a replay.
pub struct Report {
    /// Command line, without folders.
    pub command: String,
    /// One plan a seed.
    pub plans: Vec<Plan>,
    /// Every run, in the order they were made.
    pub played: Vec<Played>,
    /// Fields left out of every request.
    pub omitted: Vec<String>,
    /// The machine of the client.
    pub machine: Machine,
}

/// One arm over its runs.
struct Cells {
    name: String,
    runs: Vec<Map<String, Value>>,
    seeds: Vec<u64>,
}

impl Cells {
    fn values(&self, key: &str) -> Vec<f64> {
        self.runs.iter().filter_map(|r| r.get(key)?.as_f64()).collect()
    }

    /// Mean, least and greatest over the runs that have the figure.
    fn cell(&self, key: &str) -> Option<(f64, f64, f64)> {
        let v = self.values(key);
        let n = v.len() as f64;
        (!v.is_empty()).then(|| {
            let low = v.iter().copied().fold(f64::INFINITY, f64::min);
            let high = v.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            (v.iter().sum::<f64>() / n, low, high)
        })
    }

    fn seed(&self, seed: u64, key: &str) -> Option<f64> {
        let own = self.seeds.iter().zip(&self.runs).filter(|(s, _)| **s == seed);
        let v: Vec<f64> = own.filter_map(|(_, r)| r.get(key)?.as_f64()).collect();
        (!v.is_empty()).then(|| v.iter().sum::<f64>() / v.len() as f64)
    }
}

impl Report {
    /// Names of the arms, in the order of their first runs.
    pub fn arms(&self) -> Vec<&str> {
        let mut names: Vec<&str> = Vec::new();
        for p in &self.played {
            if !names.contains(&p.arm.as_str()) {
                names.push(&p.arm);
            }
        }
        names
    }

    fn cells(&self) -> Vec<Cells> {
        let main = |seed: u64| -> HashSet<String> {
            let plan = self.plans.iter().find(|p| p.seed == seed);
            let actors = plan.into_iter().flat_map(|p| p.actors.iter().filter(|a| a.top));
            actors.map(|a| a.name.clone()).collect()
        };
        let matched = |seed: u64| {
            // An arm that does not count what it cached says nothing about the others.
            let mut sets = self.played.iter().filter(|p| p.seed == seed).filter_map(|p| cold(&p.run));
            let first = sets.next().unwrap_or_default();
            sets.fold(first, |a, b| a.intersection(&b).copied().collect())
        };
        let of = |name: &str| {
            let own: Vec<&Played> = self.played.iter().filter(|p| p.arm == name).collect();
            Cells {
                name: name.to_owned(),
                runs: own.iter().map(|p| figures(&p.run, &main(p.seed), &matched(p.seed))).collect(),
                seeds: own.iter().map(|p| p.seed).collect(),
            }
        };
        self.arms().into_iter().map(of).collect()
    }

    /// Why the comparison does not count, arm by arm.
    pub fn invalid(&self) -> Vec<String> {
        let mut reasons = Vec::new();
        for p in &self.played {
            reasons.extend(p.invalid().into_iter().map(|r| format!("{} (seed {}): {r}", p.arm, p.seed)));
        }
        reasons
    }

    /// How the GPU's highest clock differed between runs, if it did: their times then do not compare.
    pub fn clocks_moved(&self) -> Option<String> {
        let peak = |p: &Played| p.peak_sm_mhz.map(|mhz| vec![Gpu { sm_mhz: Some(mhz), ..Gpu::default() }]);
        moved(&self.played.iter().filter_map(peak).collect::<Vec<_>>())
    }

    /// The JSON document of docs/replay.md.
    pub fn to_json(&self) -> Value {
        let invalid = self.invalid();
        let arm = |c: &Cells| {
            let own: Vec<&Played> = self.played.iter().filter(|p| p.arm == c.name).collect();
            let mut metrics = Map::new();
            for (key, ..) in FIGURES {
                let value = c.cell(key).map_or(Value::Null, |(mean, low, high)| {
                    json!({ "mean": mean, "min": low, "max": high, "runs": c.values(key) })
                });
                metrics.insert(key.into(), value);
            }
            let milliseconds = |t: f64| (t * 1000.0).round() / 1000.0;
            let request = |r: &Row| {
                json!({
                    "tag": r.tag(),
                    "cls": r.class.name(),
                    "t_send": milliseconds(r.sent),
                    "t_first": r.first.map(milliseconds),
                    "t_done": milliseconds(r.done),
                    "output_tokens": r.exchange.output_tokens(),
                    "failed": r.failure().is_some(),
                })
            };
            let runs = own.iter().map(|p| {
                json!({
                    "seed": p.seed,
                    "requests": p.run.rows.len(),
                    "failed": p.failed(),
                    "wall_s": p.run.wall,
                    "intervals": intervals(&p.run),
                    "classes": classes(&p.run),
                    "timeline": p.run.rows.iter().map(request).collect::<Vec<_>>(),
                    "notes": p.run.notes.len(),
                    "peak_ram_mib": p.peak_ram_mib,
                    "peak_vram_mib": p.peak_vram_mib,
                    "peak_sm_mhz": p.peak_sm_mhz,
                })
            });
            json!({
                "name": c.name,
                "model": own.first().map(|p| &p.model),
                "valid": own.iter().all(|p| p.invalid().is_empty()),
                "requests": own.iter().map(|p| p.run.rows.len()).sum::<usize>(),
                "failed": own.iter().map(|p| p.failed()).sum::<usize>(),
                "metrics": metrics,
                "runs": runs.collect::<Vec<_>>(),
            })
        };
        let first = self.plans.first();
        json!({
            "schema_version": SCHEMA_VERSION,
            "command": "replay",
            "command_line": self.command,
            "version": env!("CARGO_PKG_VERSION"),
            "valid": invalid.is_empty(),
            "invalid_reasons": invalid,
            "scenario": first.map(|p| &p.scenario),
            "corpus": first.map(|p| &p.corpus),
            "plan_hash": first.map(|_| self.plan_hash()),
            "seeds": self.plans.iter().map(|p| p.seed).collect::<Vec<_>>(),
            "scale": first.map(|p| f64::from(p.scale_milli) / 1000.0),
            "context": first.map(|p| p.context),
            "omitted_fields": self.omitted,
            "machine": self.machine.to_json(),
            "clocks_moved": self.clocks_moved(),
            "arms": self.cells().iter().map(arm).collect::<Vec<_>>(),
        })
    }

    /// One hash over the plans of all seeds.
    pub fn plan_hash(&self) -> String {
        match self.plans.as_slice() {
            [one] => one.hash(),
            all => {
                blake3::hash(all.iter().map(Plan::hash).collect::<String>().as_bytes()).to_hex().to_string()
            }
        }
    }

    /// The table: figures by arm, mean (least to greatest over the runs), and the first arm's change against each other.
    pub fn to_markdown(&self) -> String {
        let cells = self.cells();
        let mut out = String::new();
        let invalid = self.invalid();
        if !invalid.is_empty() {
            let _ = writeln!(out, "**Invalid**: {}\n", invalid.join("; "));
        }
        if let Some(what) = self.clocks_moved() {
            let _ = writeln!(out, "**Clocks moved**: {what} between runs\n");
        }
        let others = cells.get(1..).unwrap_or_default();
        let mut head = vec!["Metric".to_owned()];
        let counts = |c: &Cells| self.played.iter().all(|p| p.arm != c.name || p.invalid().is_empty());
        head.extend(
            cells.iter().map(|c| if counts(c) { c.name.clone() } else { format!("{} (invalid)", c.name) }),
        );
        head.extend(others.iter().map(|c| format!("{} vs {}", cells[0].name, c.name)));
        let _ = writeln!(out, "| {} |\n|---|{}", head.join(" | "), "---:|".repeat(head.len() - 1));
        for (key, label, unit, kind) in FIGURES {
            if cells.iter().all(|c| c.cell(key).is_none()) {
                continue;
            }
            let mut row = vec![label.to_owned()];
            row.extend(cells.iter().map(|c| c.cell(key).map_or("-".into(), |v| show(v, unit, kind))));
            // A run that does not count is compared with nothing.
            let change = |c: &Cells| {
                let both = counts(&cells[0]) && counts(c);
                both.then(|| self.change(&cells[0], c, key, kind)).flatten().unwrap_or("-".into())
            };
            row.extend(others.iter().map(change));
            let _ = writeln!(out, "| {} |", row.join(" | "));
        }
        let made = self.plans.first().map(|p| {
            format!(
                "{} of {} at scale {}, context {}, plan {}",
                plural(self.plans.len(), "seed"),
                p.scenario,
                f64::from(p.scale_milli) / 1000.0,
                p.context,
                &self.plan_hash()[..16],
            )
        });
        let _ = writeln!(
            out,
            "\n{}; {}. Cells: mean over runs (least to greatest); times from the client's clock, counts from the servers.",
            made.as_deref().unwrap_or("No plan was made"),
            self.machine.cpu,
        );
        if !self.omitted.is_empty() {
            let _ = writeln!(out, "\nLeft out of every request: {}.", self.omitted.join(", "));
        }
        self.engines(&mut out);
        self.single_runs(&mut out);
        let _ = writeln!(out, "\nCommand: `{}`", self.command);
        out
    }

    /// What each arm's server called its model, and the memory it took.
    fn engines(&self, out: &mut String) {
        let _ = writeln!(
            out,
            "\n| Engine | Model | Most resident memory, MiB | Most GPU memory, MiB |\n|---|---|---:|---:|"
        );
        for name in self.arms() {
            let own = || self.played.iter().filter(|p| p.arm == name);
            let most = |of: fn(&Played) -> Option<u64>| {
                own().filter_map(of).max().map_or("-".into(), |v| v.to_string())
            };
            let model = own().map(|p| p.model.as_str()).find(|m| !m.is_empty()).unwrap_or("-");
            let (ram, vram) = (most(|p| p.peak_ram_mib), most(|p| p.peak_vram_mib));
            let _ = writeln!(out, "| {name} | {} | {ram} | {vram} |", model.replace('|', "\\|"));
        }
    }

    /// Bootstrap intervals of every run that has some.
    fn single_runs(&self, out: &mut String) {
        let runs: Vec<(&Played, Map<String, Value>)> =
            self.played.iter().map(|p| (p, intervals(&p.run))).filter(|(_, i)| !i.is_empty()).collect();
        let figures: Vec<_> =
            FIGURES.iter().filter(|(key, ..)| runs.iter().any(|(_, i)| i.contains_key(*key))).collect();
        if runs.is_empty() {
            return;
        }
        let heads: Vec<String> = figures
            .iter()
            .map(
                |(_, label, unit, _)| {
                    if unit.is_empty() { (*label).into() } else { format!("{label}, {unit}") }
                },
            )
            .collect();
        let _ = writeln!(
            out,
            "\nSingle runs, 95 % intervals (bootstrap over blocks of requests):\n\n| Run | {} |\n|---|{}",
            heads.join(" | "),
            "---:|".repeat(heads.len())
        );
        for (p, own) in runs {
            let cell = |key: &str| {
                let bound = |i: usize| own.get(key)?.get(i)?.as_f64();
                bound(0).zip(bound(1)).map_or("-".into(), |(a, b)| format!("{a:.2} to {b:.2}"))
            };
            let cells: Vec<String> = figures.iter().map(|(key, ..)| cell(key)).collect();
            let _ = writeln!(out, "| {}, seed {} | {} |", p.arm, p.seed, cells.join(" | "));
        }
    }

    /// Change of a figure from the other arm to the first, seed by seed, averaged, with its range.
    fn change(&self, first: &Cells, other: &Cells, key: &str, kind: Kind) -> Option<String> {
        let by_seed: Vec<f64> = self
            .plans
            .iter()
            .filter_map(|p| {
                let (a, b) = (first.seed(p.seed, key)?, other.seed(p.seed, key)?);
                match kind {
                    Kind::Relative => (b != 0.0).then(|| 100.0 * (a / b - 1.0)),
                    Kind::Points | Kind::Count => Some(a - b),
                }
            })
            .collect();
        if by_seed.is_empty() {
            return None;
        }
        let unit = match kind {
            Kind::Relative => " %",
            Kind::Points => " pt",
            Kind::Count => "",
        };
        let mean = by_seed.iter().sum::<f64>() / by_seed.len() as f64;
        let low = by_seed.iter().copied().fold(f64::INFINITY, f64::min);
        let high = by_seed.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let range = if by_seed.len() > 1 { format!(" ({low:+.0} to {high:+.0})") } else { String::new() };
        // No sign before a change that rounds to nothing.
        let mean = if mean.abs() < 0.5 { "0".to_owned() } else { format!("{mean:+.0}") };
        Some(format!("{mean}{unit}{range}"))
    }
}

/// Seconds with two decimals, rates and shares with one, counts with none.
pub(crate) fn show((mean, low, high): (f64, f64, f64), unit: &str, kind: Kind) -> String {
    let digits = match (unit, kind) {
        ("s" | "min", _) => 2,
        _ if mean.abs() >= 1000.0 => 0,
        (TOKENS, _) | (_, Kind::Count) => usize::from(mean.fract() != 0.0),
        _ => 1,
    };
    // The label of a count says what is counted.
    let unit = if unit.is_empty() || unit == TOKENS { String::new() } else { format!(" {unit}") };
    let range = if low < high { format!(" ({low:.digits$}-{high:.digits$})") } else { String::new() };
    format!("{mean:.digits$}{unit}{range}")
}
