//! Runs every kernel on fresh random inputs against its oracle, then measures it.
//!
//! Outputs are poisoned (0xFF, a NaN) before each launch. A check gives its worst error as a share of its stated bound,
//! or the number of differing bits where equality is required. Times are medians of graph replays over data several times the
//! L2 cache; `floor_share` is bytes over 4.3 TB/s (measured copy rate of the card the designs come from) over the time.

mod attention;
mod attention8;
#[cfg(test)]
mod coverage;
mod experts;
mod fused;
mod ggml;
mod glue;
mod hyper;
mod linear;
mod prefill;
mod rows;
mod select;
mod state;
mod stored;
mod tile;

use crate::driver::{Device, Stream};
use crate::error::Result;
use crate::oracle::Rng;
use serde_json::{Value, json};
use std::sync::Arc;

/// What to run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Device ordinal.
    pub device: i32,
    /// Families; empty = all.
    pub families: Vec<String>,
    /// Measure after checking.
    pub bench: bool,
    /// Seed of the inputs.
    pub seed: u64,
}

impl Default for Options {
    fn default() -> Self {
        Options { device: 0, families: vec![], bench: true, seed: 1 }
    }
}

/// Names of the families, in order.
pub const FAMILIES: &[&str] = &[
    "linear",
    "linear_bench",
    "ggml",
    "experts",
    "experts_bench",
    "state",
    "gdn_chunk",
    "hyper",
    "router",
    "rows",
    "glue",
    "fused",
    "attention",
    "attention8",
    "select",
    "tile",
    "tile_experts",
    "tile_bench",
    "prefill",
    "stored",
];

/// One family's context and results.
pub(crate) struct Run {
    pub(crate) dev: Arc<Device>,
    pub(crate) stream: Stream,
    pub(crate) rng: Rng,
    pub(crate) bench: bool,
    results: Vec<Value>,
    failed: usize,
}

impl Run {
    /// Records a check. `share` = worst error / bound (or mismatches): passes if <= 1 (or == 0 with `exact`).
    pub(crate) fn check(&mut self, kernel: &str, case: String, share: f64, exact: bool) {
        let ok = if exact { share == 0.0 } else { share <= 1.0 };
        if !ok {
            self.failed += 1;
        }
        let key = if exact { "mismatches" } else { "error_over_bound" };
        self.results.push(json!({"kernel": kernel, "case": case, "ok": ok, key: share}));
    }

    /// Median microseconds of one call of `body(i)`, i rotating over `copies` data sets, from graph replays.
    pub(crate) fn time(&self, copies: usize, body: impl Fn(usize) -> Result<()>) -> Result<f64> {
        for i in 0..copies.min(3) {
            body(i)?;
        }
        self.stream.synchronize()?;
        let n = copies.max(1) * 40usize.div_ceil(copies.max(1)).max(1);
        let graph = self.stream.capture(|| (0..n).try_for_each(|i| body(i % copies.max(1))))?;
        self.stream.replay(&graph)?;
        self.stream.synchronize()?;
        let (a, b) = (self.dev.event()?, self.dev.event()?);
        let mut t = Vec::new();
        for _ in 0..7 {
            self.stream.record(&a)?;
            self.stream.replay(&graph)?;
            self.stream.record(&b)?;
            t.push(b.micros_since(&a)? / n as f64);
        }
        t.sort_by(f64::total_cmp);
        Ok(t[t.len() / 2])
    }

    /// Records a time; `bytes` is what must cross device memory.
    pub(crate) fn timed(&mut self, kernel: &str, case: String, us: f64, bytes: usize) {
        let gbs = bytes as f64 / us / 1e3;
        self.results.push(json!({
            "kernel": kernel, "case": case, "us": round(us), "bytes": bytes, "gb_per_s": round(gbs), "floor_share": round(gbs / 4300.0),
        }));
    }

    /// Records a time of arithmetic.
    pub(crate) fn timed_flops(&mut self, kernel: &str, case: String, us: f64, flops: f64) {
        self.results.push(
            json!({"kernel": kernel, "case": case, "us": round(us), "tflops": round(flops / us / 1e6)}),
        );
    }

    /// How many copies of `bytes` exceed the L2 several times, within reason.
    pub(crate) fn copies(&self, bytes: usize) -> usize {
        (4 * self.dev.info().l2_bytes).div_ceil(bytes.max(1)).clamp(2, 48)
    }
}

/// Words that differ; missing ones count.
fn unequal<T: PartialEq>(a: &[T], b: &[T]) -> f64 {
    (a.iter().zip(b).filter(|(a, b)| a != b).count() + a.len().abs_diff(b.len())) as f64
}

fn round(v: f64) -> f64 {
    (v * 1000.0).round() / 1000.0
}

/// Runs the families of `options` and returns one JSON document: `ok`, `device`, `results`.
pub fn selftest(options: &Options) -> Result<Value> {
    let dev = Device::open(options.device)?;
    dev.note_launches();
    let mut results = Vec::new();
    let mut failed = 0;
    let mut errors = Vec::new();
    let started = std::time::Instant::now();
    for (i, family) in FAMILIES.iter().enumerate() {
        if !options.families.is_empty() && !options.families.iter().any(|f| f == family) {
            continue;
        }
        let mut run = Run {
            dev: dev.clone(),
            stream: dev.stream()?,
            rng: Rng::new(options.seed.wrapping_mul(1000).wrapping_add(i as u64)),
            bench: options.bench,
            results: vec![],
            failed: 0,
        };
        let done = match *family {
            "linear" => linear::check(&mut run),
            "linear_bench" => linear::bench(&mut run),
            "ggml" => ggml::run(&mut run),
            "experts" => experts::check(&mut run),
            "experts_bench" => experts::bench(&mut run),
            "state" => state::run(&mut run),
            "gdn_chunk" => state::chunk(&mut run),
            "hyper" => hyper::run(&mut run),
            "router" => experts::router(&mut run),
            "rows" => rows::run(&mut run),
            "glue" => glue::run(&mut run),
            "fused" => fused::run(&mut run),
            "attention" => attention::run(&mut run),
            "attention8" => attention8::run(&mut run),
            "select" => select::run(&mut run),
            "tile" => tile::dense(&mut run),
            "tile_experts" => tile::experts(&mut run),
            "tile_bench" => tile::bench(&mut run),
            "stored" => stored::run(&mut run),
            _ => prefill::attention(&mut run),
        };
        let faulted = done.is_err();
        if let Err(e) = done {
            errors.push(json!({"family": family, "error": e.to_string()}));
        }
        failed += run.failed;
        results.append(&mut run.results);
        if faulted && dev.synchronize().is_err() {
            break; // the context is lost
        }
    }
    let not_launched = dev.not_launched();
    if options.families.is_empty() && !not_launched.is_empty() {
        errors.push(
            json!({"family": "coverage", "error": format!("no family ran {}", not_launched.join(", "))}),
        );
    }
    let info = dev.info();
    Ok(json!({
        "schema_version": 1,
        "ok": failed == 0 && errors.is_empty(),
        "checks_failed": failed,
        "errors": errors,
        "device": {"name": info.name, "capability": info.capability, "multiprocessors": info.multiprocessors,
                   "l2_bytes": info.l2_bytes, "shared_per_block": info.shared_per_block, "driver": info.driver},
        "targets": crate::embedded_targets(),
        "seed": options.seed,
        "not_launched": not_launched,
        "seconds": round(started.elapsed().as_secs_f64()),
        "results": results,
    }))
}
