//! `infernix bench`: prompt and generation throughput of a model in process.

mod streams;

use super::engine::print_ledger;
use super::model::{BackendKind, How, OpenModel, refuse_idle};
use crate::args::{BenchArgs, BenchOutput, Given, ProgressMode, Spec};
use crate::output::{self, usage};
use crate::{INTERRUPTED, Outcome};
use anyhow::{Context as _, bail};
use infernix_engine::backend::cpu::{CpuBackend, CpuOptions};
use infernix_engine::backend::cuda::{Cuda, CudaOptions, Routing};
use infernix_engine::backend::lossless::{Lossless, LosslessOptions};
use infernix_engine::backend::{ActivationPolicy, Backend};
use infernix_engine::driver::{Driver, DriverOptions};
use infernix_engine::model::{ArtifactSource, LoadOptions, WeightSource, load};
use infernix_engine::ngram::{Ngram, NgramOptions, open_ngram};
use infernix_engine::state::KvFormat;
use infernix_engine::synthetic::{self, GEOMETRIES, Geometry};
use infernix_formats::Format;
use infernix_measure::bench::bytes::{dominant_format, model_bytes};
use infernix_measure::bench::gpu::{Gpu, moved};
use infernix_measure::bench::limit::{BUFFER_BYTES, Reader};
use infernix_measure::bench::machine::{Machine, available_memory};
use infernix_measure::bench::render::{self, Breakdown, Subject};
use infernix_measure::bench::timed::Timed;
use infernix_measure::bench::{Measured, Settings, Test, grid, measure};
use serde_json::{Value, json};
use std::cell::RefCell;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Passes over the buffer before and after the tests; the best of all counts.
const LIMIT_PASSES: usize = 6;

pub(crate) fn run(args: &BenchArgs, given: &Given, progress: ProgressMode) -> anyhow::Result<Outcome> {
    let tests = tests(args)?;
    let backend = How::new(&args.model)?.backend;
    if args.profile.is_some() && !matches!(backend, BackendKind::Cuda(_)) {
        return Err(usage("--profile records what a CUDA device does; elsewhere use --breakdown"));
    }
    refuse_idle(given, backend)?;
    if !matches!(backend, BackendKind::Cuda(_)) {
        given.idle(
            &["--routing-zipf", "--routing-repeat"],
            "the router of the model picks on this backend; the law is for a CUDA device",
        )?;
    }
    if args.synthetic.is_some() {
        given.idle(&["--ngram"], "a synthetic model is built here")?;
    }
    if args.spec == Some(Spec::Off) {
        given.idle(&["--draft-tokens"], "--spec off drafts nothing")?;
    }
    let clock = Instant::now();
    let found = find(args, progress)?;
    if let Some(open) = &found.open {
        let limit = super::run::context_limit(open)?;
        if let Some(t) = tests.iter().find(|t| t.room() > limit) {
            return Err(usage(format!(
                "{}: {} tokens; the model's context holds {limit}",
                t.label(),
                t.room()
            )));
        }
    }
    let options = LoadOptions { activations: found.activations, ..LoadOptions::default() };
    let cpu = CpuOptions { threads: found.threads, threads_batch: found.threads_batch, isa: None };
    let started = |s: &dyn WeightSource| -> anyhow::Result<Subject> { subject(args, &found, s, &cpu) };
    let source = found.source.as_source();
    let mut subject = started(source)?;
    if streams::asked(args) {
        return streams::run(args, tests, found, &mut subject, clock);
    }
    let run = Run { args, tests, subject, found: &found, clock, device: None };
    match (found.backend, args.breakdown) {
        (BackendKind::Cpu, false) => run.plain(load(CpuBackend::new(cpu), source, options)?),
        (BackendKind::Cpu, true) => run.timed(load(Timed::new(CpuBackend::new(cpu)), source, options)?),
        (BackendKind::Cuda(_), true) => {
            Err(usage("operations of a device overlap: use --profile FILE instead of --breakdown"))
        }
        (BackendKind::Cuda(device), false) => {
            let routing = args.synthetic.is_some() && args.routing_zipf > 0.0;
            let cuda = CudaOptions {
                device,
                budget: found.vram_budget,
                expert_ram: found.expert_ram,
                routing: routing.then_some(Routing {
                    s: args.routing_zipf,
                    repeat: args.routing_repeat,
                    seed: args.seed,
                }),
                prompt_rows: args.prefill_chunk,
                profile: args.profile.is_some(),
                ..CudaOptions::default()
            };
            let backend = Cuda::new(cuda)?;
            let rate = if args.no_limit { None } else { Some(backend.copy_rate()?) };
            run.on_device(load(backend, source, options)?, rate)
        }
        (BackendKind::Lossless, broken_down) => {
            let backend = Lossless::new(LosslessOptions::default());
            if broken_down {
                run.timed(load(Timed::new(backend), source, options)?)
            } else {
                run.plain(load(backend, source, options)?)
            }
        }
    }
}

fn tests(args: &BenchArgs) -> anyhow::Result<Vec<Test>> {
    let mut pairs = Vec::new();
    for text in &args.pairs {
        let pair =
            text.split_once(',').and_then(|(p, g)| Some((p.trim().parse().ok()?, g.trim().parse().ok()?)));
        pairs.push(pair.ok_or_else(|| usage(format!("-pg takes PROMPT,GENERATE, not {text:?}")))?);
    }
    // As llama-bench: its defaults hold unless something is asked for.
    let asked = !args.prompts.is_empty() || !args.generations.is_empty() || !pairs.is_empty();
    let or = |given: &[usize], default: usize| if asked { given.to_vec() } else { vec![default] };
    let depths = if args.depths.is_empty() { vec![0] } else { args.depths.clone() };
    let tests = grid(&or(&args.prompts, 512), &or(&args.generations, 128), &pairs, &depths);
    if tests.is_empty() {
        return Err(usage("nothing to measure: every length is 0"));
    }
    if args.repetitions == 0 || args.prefill_chunk == 0 {
        return Err(usage("--repetitions and --prefill-chunk must be at least 1"));
    }
    Ok(tests)
}

/// Weights, wherever they come from.
enum Weights {
    Stored(ArtifactSource),
    Synthetic(infernix_engine::model::MemorySource),
}

impl Weights {
    fn as_source(&self) -> &dyn WeightSource {
        match self {
            Weights::Stored(s) => s,
            Weights::Synthetic(s) => s,
        }
    }
}

/// A model and how to run it.
struct Found {
    name: String,
    format: String,
    source: Weights,
    open: Option<OpenModel>,
    backend: BackendKind,
    activations: ActivationPolicy,
    kv: KvFormat,
    threads: usize,
    threads_batch: usize,
    vram_budget: usize,
    expert_ram: usize,
}

/// Prints the results in the form asked for.
fn report(
    args: &BenchArgs,
    subject: &Subject,
    settings: Settings,
    tests: &[Measured],
    breakdowns: &[Breakdown],
    device: Option<&Value>,
) -> anyhow::Result<Outcome> {
    if args.json.json {
        let mut document = render::document(subject, settings, tests, breakdowns);
        if let (Some(map), Some(device)) = (document.as_object_mut(), device) {
            map.insert("device".into(), device.clone());
        }
        output::print_json(&document)?;
        return Ok(Outcome::Done);
    }
    let objects = || tests.iter().map(|m| render::llama_object(subject, settings, m));
    match args.output {
        BenchOutput::Md => output::print(&render::markdown(subject, tests))?,
        BenchOutput::Csv => output::print(&render::csv(subject, settings, tests))?,
        BenchOutput::Json => output::print_json(&objects().collect())?,
        BenchOutput::Jsonl => {
            for object in objects() {
                output::print(&format!("{object}\n"))?;
            }
        }
    }
    for b in breakdowns {
        let text = render::breakdown_markdown(b, subject.read_limit);
        // Machine-readable output stays what it is.
        if args.output == BenchOutput::Md {
            output::print(&format!("\n{text}"))?;
        } else {
            output::note(&text);
        }
    }
    Ok(Outcome::Done)
}

/// The report, and then what ended the tests too early.
fn finish(
    failure: Option<anyhow::Error>,
    measured: &[Measured],
    report: impl FnOnce() -> anyhow::Result<Outcome>,
) -> anyhow::Result<Outcome> {
    match failure {
        None => report(),
        Some(e) if measured.is_empty() => Err(e),
        Some(e) => report().and(Err(e)),
    }
}

fn settings(args: &BenchArgs) -> Settings {
    Settings {
        repetitions: args.repetitions,
        prefill_chunk: args.prefill_chunk,
        warm_up: !args.no_warmup,
        seed: args.seed,
    }
}

fn find(args: &BenchArgs, progress: ProgressMode) -> anyhow::Result<Found> {
    let Some(name) = &args.synthetic else {
        let open = OpenModel::new(&args.model, progress)?;
        let source = ArtifactSource::new(Arc::clone(&open.artifact))?;
        return Ok(Found {
            name: open.artifact.path().file_name().unwrap_or_default().to_string_lossy().into_owned(),
            format: dominant_format(&source)?,
            source: Weights::Stored(source),
            backend: open.backend,
            activations: open.activations,
            kv: open.kv,
            threads: open.threads,
            threads_batch: open.threads_batch,
            vram_budget: open.vram_budget,
            expert_ram: open.expert_ram,
            open: Some(open),
        });
    };
    if args.model.model.is_some() {
        return Err(usage("give a model or --synthetic, not both"));
    }
    let Some(geometry) = Geometry::find(name) else {
        let names: Vec<_> = GEOMETRIES.iter().map(|g| format!("  {}: {}", g.name, g.about)).collect();
        return Err(usage(format!("no geometry {name:?}; there are\n{}", names.join("\n"))));
    };
    let geometry = match args.synthetic_layers {
        None => geometry,
        Some(n) => {
            let all = geometry.config()?.layers.len() as u64;
            if !(1..=all).contains(&n) {
                return Err(usage(format!("--synthetic-layers {n}: {name} has 1 to {all}")));
            }
            geometry.with_layers(n)
        }
    };
    let geometry = match &args.synthetic_experts {
        None => geometry,
        Some(f) => geometry.with_experts(format_named(f, &synthetic::EXPERT_FORMATS)?),
    };
    let geometry = args.synthetic_ngram_rows.map_or(geometry, |n| geometry.with_ngram_rows(n));
    let format = match &args.synthetic_format {
        None => geometry.format,
        Some(f) => format_named(f, &synthetic::FORMATS)?,
    };
    let sizes = synthetic::sizes(&geometry, format)?;
    let free = available_memory();
    if free > 0 && sizes.bytes + sizes.bytes / 16 > free && args.model.expert_ram_mib.is_some() {
        // Memory of a virtual machine may grow as it is used.
        output::warn(&format!(
            "{} of memory are free, {} are needed",
            output::bytes(free),
            output::bytes(sizes.bytes)
        ));
    } else if free > 0 && sizes.bytes + sizes.bytes / 16 > free {
        bail!(
            "{name} in {format} needs {} of memory for its weights, {} are available",
            output::bytes(sizes.bytes),
            output::bytes(free)
        );
    }
    output::note(&format!("building {name} in {format}: {} of random weights", output::bytes(sizes.bytes)));
    let how = How::new(&args.model)?;
    Ok(Found {
        name: name.clone(),
        format: format.to_string(),
        source: Weights::Synthetic(synthetic::build_in(
            &geometry,
            format,
            args.seed,
            args.synthetic_dir.as_deref(),
        )?),
        open: None,
        backend: how.backend,
        activations: how.activations,
        kv: how.kv,
        threads: how.threads,
        threads_batch: how.threads_batch,
        vram_budget: how.vram_budget,
        expert_ram: how.expert_ram,
    })
}

/// The geometry of a synthetic model whose rows of n-grams the flags may number.
fn synthetic_geometry(args: &BenchArgs) -> Option<Geometry> {
    let geometry = args.synthetic.as_deref().and_then(Geometry::find)?;
    Some(args.synthetic_ngram_rows.map_or(geometry, |n| geometry.with_ngram_rows(n)))
}

/// One of `all` by its container name, or by the start of one.
fn format_named(name: &str, all: &[Format]) -> anyhow::Result<Format> {
    let found = all.iter().find(|f| f.name() == name || f.name().split('_').next() == Some(name));
    found.copied().ok_or_else(|| {
        let names: Vec<_> = all.iter().map(|f| f.name()).collect();
        usage(format!("no synthetic weights in {name:?}; there are {}", names.join(", ")))
    })
}

fn subject(
    args: &BenchArgs,
    found: &Found,
    source: &dyn WeightSource,
    cpu: &CpuOptions,
) -> anyhow::Result<Subject> {
    let architecture = source.config().architecture.model_type().trim_end_matches("_text");
    // Threads as the backend resolves them.
    let (threads, threads_batch) = match found.backend {
        BackendKind::Cpu => CpuBackend::new(*cpu).threads(),
        BackendKind::Lossless | BackendKind::Cuda(_) => {
            let n = std::thread::available_parallelism().map_or(1, usize::from);
            (n, n)
        }
    };
    let activations = match found.activations {
        ActivationPolicy::Artifact => "artifact",
        ActivationPolicy::A16 => "a16",
        ActivationPolicy::A8 => "a8",
        ActivationPolicy::A4 => "a4",
    };
    Ok(Subject {
        command: output::command_line(),
        model: found.name.clone(),
        model_type: format!("{architecture} {}", found.format),
        synthetic: args.synthetic.is_some(),
        bytes: model_bytes(source)?,
        backend: match found.backend {
            BackendKind::Cpu => "cpu".into(),
            BackendKind::Lossless => "lossless".into(),
            BackendKind::Cuda(n) => format!("cuda:{n}"),
        },
        threads,
        threads_batch,
        activations: activations.into(),
        kv: match found.kv {
            KvFormat::Bf16 => "bf16".into(),
            KvFormat::Int8 => "int8".into(),
            KvFormat::F32 => "f32".into(),
        },
        scheduled: None,
        load_seconds: 0.0,
        moved: None,
        machine: Machine::this(),
        read_limit: None,
    })
}

struct Run<'a> {
    args: &'a BenchArgs,
    tests: Vec<Test>,
    subject: Subject,
    found: &'a Found,
    clock: Instant,
    /// What a device reports beside the times.
    device: Option<Value>,
}

impl Run<'_> {
    fn driver<B: Backend>(&mut self, model: infernix_engine::model::Model<B>) -> anyhow::Result<Driver<B>> {
        let tokens = self.tests.iter().map(Test::room).max().unwrap_or(0) + self.args.prefill_chunk.min(64);
        let ngram = self.ngram()?;
        let options = DriverOptions { tokens, kv: self.found.kv, ..DriverOptions::default() };
        let driver = Driver::new(model, ngram, options)?;
        self.subject.load_seconds = self.clock.elapsed().as_secs_f64();
        Ok(driver)
    }

    fn ngram(&self) -> anyhow::Result<Option<Ngram>> {
        let Some(open) = &self.found.open else {
            let Some(g) = synthetic_geometry(self.args) else { return Ok(None) };
            return Ok(self.args.synthetic_dir.as_deref().map_or_else(|| g.ngram(), |d| g.ngram_in(d))?);
        };
        let found = open_ngram(&open.artifact, open.ngram.as_deref(), NgramOptions::default())?;
        Ok(found.map(|(ngram, warnings)| {
            warnings.iter().for_each(|w| output::warn(w));
            ngram
        }))
    }

    fn plain<B: Backend>(mut self, model: infernix_engine::model::Model<B>) -> anyhow::Result<Outcome> {
        let mut driver = self.driver(model)?;
        self.measure(&mut driver, |_| Vec::new(), |_| Ok(None))
    }

    fn on_device(
        mut self,
        model: infernix_engine::model::Model<Cuda>,
        rate: Option<f64>,
    ) -> anyhow::Result<Outcome> {
        let mut driver = self.driver(model)?;
        let b = &driver.model.backend;
        output::note(&format!(
            "{}: {} MiB a second copied",
            b.device_name(),
            rate.unwrap_or(0.0) as usize >> 20
        ));
        print_ledger(&b.ledger());
        self.subject.read_limit = rate;
        let trace = self.args.profile.clone();
        let counts = RefCell::new(Vec::new());
        self.measure(
            &mut driver,
            |driver| {
                counts.borrow_mut().push(tier_counts(&mut driver.model.backend));
                Vec::new()
            },
            |driver| device_report(&driver.model.backend, rate, &counts.borrow(), trace.as_deref()).map(Some),
        )
    }

    fn timed<B: Backend>(
        mut self,
        model: infernix_engine::model::Model<Timed<B>>,
    ) -> anyhow::Result<Outcome> {
        let mut driver = self.driver(model)?;
        self.measure(&mut driver, |driver| driver.model.backend.take(), |_| Ok(None))
    }

    /// All tests, then the report; `costs` empties what a timed backend has noted.
    fn measure<B: Backend>(
        mut self,
        driver: &mut Driver<B>,
        mut costs: impl FnMut(&mut Driver<B>) -> Vec<(String, infernix_measure::bench::timed::Cost)>,
        about: impl FnOnce(&mut Driver<B>) -> anyhow::Result<Option<Value>>,
    ) -> anyhow::Result<Outcome> {
        let go_on = || !INTERRUPTED.load(Ordering::Relaxed);
        let settings = settings(self.args);
        // A device's memory bounds it, not the host's.
        let host = !self.args.no_limit && !matches!(self.found.backend, BackendKind::Cuda(_));
        let mut reader = host.then(|| Reader::new(BUFFER_BYTES, self.subject.threads));
        let mut limit = reader.as_mut().map(|r| r.read(LIMIT_PASSES));
        let mut measured: Vec<Measured> = Vec::new();
        let mut breakdowns = Vec::new();
        let mut clocks = Vec::new();
        let once = |driver: &mut Driver<B>, test, settings| -> anyhow::Result<Measured> {
            measure(driver, test, settings, &go_on)?.context("interrupted")
        };
        let mut run_test = |test: &Test| -> anyhow::Result<()> {
            let m = once(driver, *test, settings)?;
            costs(driver);
            if self.args.breakdown {
                // A run of its own, so that neither warm-up nor depth is in it.
                let once_cold = Settings { repetitions: 1, warm_up: false, ..settings };
                let single = once(driver, Test { depth: 0, ..*test }, once_cold)?;
                let seconds = single.time().mean / 1e9;
                breakdowns.push(Breakdown { test: single.test.label(), seconds, operations: costs(driver) });
            }
            limit = reader.as_mut().map(|r| r.read(1)).or(limit);
            measured.push(m);
            // Right after the load, while the clocks are those of the test.
            clocks.push(Gpu::all());
            Ok(())
        };
        // What was measured before a failure is printed all the same.
        let failure = self.tests.iter().try_for_each(&mut run_test).err();
        if let Some(what) = moved(&clocks) {
            output::warn(&format!("{what} between tests: the figures do not compare"));
            self.subject.moved = Some(what);
        }
        self.subject.read_limit =
            reader.as_mut().map(|r| r.read(LIMIT_PASSES)).or(limit).or(self.subject.read_limit);
        finish(failure, &measured, || {
            self.device = about(driver)?;
            report(self.args, &self.subject, settings, &measured, &breakdowns, self.device.as_ref())
        })
    }
}

/// What the expert tiers did in a test, its depth and warm-up included.
fn tier_counts(backend: &mut Cuda) -> Value {
    let c = backend.take_tier_counts();
    let record = backend.expert_frames().1 as u64;
    json!({
        "decode_picks": c.picks,
        "hit_rate": (c.picks > 0).then(|| 1.0 - c.misses as f64 / c.picks as f64),
        "miss_records": c.miss_records,
        "miss_bytes": c.miss_records * record,
        "promoted_records": c.promotions,
        "streamed_records": c.streamed,
        "streamed_bytes": c.streamed * record,
        "disk_reads": c.disk_reads,
        "disk_waited_us": c.disk_waited,
        "ngram_waited_us": c.ngram_waited,
    })
}

fn device_report(
    backend: &Cuda,
    rate: Option<f64>,
    counts: &[Value],
    trace: Option<&Path>,
) -> anyhow::Result<Value> {
    let (frames, record) = backend.expert_frames();
    let ledger: serde_json::Map<String, Value> =
        backend.ledger().lines().into_iter().map(|(k, v)| (k, v.into())).collect();
    let mut profile = Value::Null;
    if let (Some(path), Some(p)) = (trace, backend.profile()) {
        crate::target::write(path, &serde_json::to_string(&p.trace())?)
            .with_context(|| format!("{} cannot be written", path.display()))?;
        let totals = |decode| -> serde_json::Map<String, Value> {
            p.totals(decode).into_iter().map(|(k, v)| (k, (v.round() as u64).into())).collect()
        };
        profile = json!({"prompt_round_us": totals(false), "decode_round_us": totals(true)});
    }
    Ok(json!({
        "name": backend.device_name(),
        "copy_bytes_per_second": rate,
        "memory_mib": ledger,
        "expert_frames": frames,
        "expert_record_bytes": record,
        "tests": counts,
        "profile": profile,
    }))
}
