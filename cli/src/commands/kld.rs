//! `infernix kld`: engines against the lossless reference, or against stored rows.

use super::engine::{Needs, Task, lossless, with_needs};
use super::model::{BackendKind, OpenModel, refuse_idle};
use super::reports::{self, Form};
use crate::args::{Boundaries, ENGINE_OPTIONS, Given, KldArgs, KldPath, KldSpec, ModelArgs, ProgressMode};
use crate::output::{self, usage};
use crate::progress::Steps;
use crate::{INTERRUPTED, Outcome};
use anyhow::Context as _;
use clap::{CommandFactory as _, FromArgMatches as _, Parser};
use infernix_engine::backend::{ActivationPolicy, Backend};
use infernix_engine::driver::Driver;
use infernix_engine::model::{ArtifactSource, WeightSource};
use infernix_engine::numerics::round::Rounding;
use infernix_engine::state::KvFormat;
use infernix_measure::bootstrap::MIN_RESAMPLES;
use infernix_measure::corpus::{DEFAULT_CORPUS, default_text, read_text};
use infernix_measure::{
    Chunks, DriverSource, KldOptions, KldReport, LogitsSource, Path as Reading, Reference, Rows, StatePlace,
    StoredFile, Test, kld, page,
};
use infernix_model::Component;
use infernix_text::Tokenizer;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Logits of one group of chunks, at 4 bytes each, stay below this.
const GROUP_BYTES: usize = 1 << 30;
/// Groups larger than this save nothing that could be measured.
const GROUP: usize = 8;

/// Tokens per chunk, unless a file says otherwise.
const CTX: usize = 512;

pub(crate) fn run(args: &KldArgs, given: &Given, progress: ProgressMode) -> anyhow::Result<Outcome> {
    check(args, given)?;
    let base = args.reference.as_deref().map(StoredFile::open).transpose()?;
    let (files, artifacts) = stored(args)?;
    // Files against a file need no model, unless something asks for an engine.
    let asked = args.model.model.is_some()
        || args.honest_rounding
        || !args.with.is_empty()
        || !artifacts.is_empty()
        || args.model.lossless;
    match base {
        Some(base) if !files.is_empty() && !asked => of_files(args, given, base, files, progress),
        base => of_model(args, given, base, files, &artifacts, progress),
    }
}

/// What can be refused before anything is opened.
fn check(args: &KldArgs, given: &Given) -> anyhow::Result<()> {
    if args.honest_rounding && args.rounding_seeds == 0 {
        return Err(usage("--rounding-seeds must be at least 1"));
    }
    if args.group == Some(0) {
        return Err(usage("--group must be at least 1"));
    }
    if args.bootstrap < MIN_RESAMPLES {
        return Err(usage(format!(
            "--bootstrap {} gives no interval: at least {MIN_RESAMPLES} resamples are needed",
            args.bootstrap
        )));
    }
    if args.honest_rounding && args.boundaries == Boundaries::Fp32 {
        return Err(usage(
            "--honest-rounding makes every rounding between operations random, and --boundaries fp32 has none: leave one \
             of them out",
        ));
    }
    if !args.paths.contains(&KldPath::Decode) {
        given.idle(
            &["--spec", "--draft-tokens"],
            "drafts are made on the decode path alone (--path decode)",
        )?;
    }
    if args.spec == KldSpec::Off {
        given.idle(&["--draft-tokens"], "--spec off makes no drafts")?;
    }
    if let Some(i) = (1..args.paths.len()).find(|i| args.paths[..*i].contains(&args.paths[*i])) {
        return Err(usage(format!("--path names {} twice", name_of(&args.paths[i]))));
    }
    if args.llama_compat && args.honest_rounding {
        return Err(usage("--llama-compat has no yardstick: leave --honest-rounding"));
    }
    if args.llama_compat && args.save_reference.is_some() {
        return Err(usage("--llama-compat reads 16-bit codes: save them with --save-base"));
    }
    if let Some(path) = &args.export_tokens {
        let mut others =
            vec!["--path", "--honest-rounding", "--with", "--against", "--save-reference", "--save-base"];
        others.extend([
            "--llama-compat",
            "--boundaries",
            "--spec",
            "--draft-tokens",
            "--group",
            "--bootstrap",
        ]);
        others.extend(["--resume", "--state", "--output", "--json"]);
        others.extend(ENGINE_OPTIONS);
        given.idle(&others, "--export-tokens writes the ids and stops")?;
        if path.symlink_metadata().is_ok() {
            return Err(usage(format!("{} exists; nothing is overwritten", path.display())));
        }
    }
    let other = [&args.save_reference, &args.save_base, &args.export_tokens, &args.state];
    let other: Vec<&Path> = other.into_iter().flatten().map(PathBuf::as_path).collect();
    reports::check(&args.output, &[Form::Json, Form::Markdown, Form::Page], &other)
}

/// A value as it is typed.
fn name_of(value: &impl clap::ValueEnum) -> String {
    value.to_possible_value().map_or_else(String::new, |v| v.get_name().to_owned())
}

/// Names of files under test with the open files, and artifacts under test.
type Stored = (Vec<(String, StoredFile)>, Vec<PathBuf>);

fn stored(args: &KldArgs) -> anyhow::Result<Stored> {
    let (mut files, mut artifacts) = (Vec::new(), Vec::new());
    for path in &args.against {
        let artifact = path.is_dir() || path.extension().is_some_and(|e| e == "infernix" || e == "ninfer");
        if artifact {
            artifacts.push(path.clone());
        } else {
            files.push((file_name(path), StoredFile::open(path)?));
        }
    }
    Ok((files, artifacts))
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

fn tests_of(files: Vec<(String, StoredFile)>) -> Vec<Test> {
    files.into_iter().map(|(engine, file)| Test { engine, rows: file.rows() }).collect()
}

fn of_files(
    args: &KldArgs,
    given: &Given,
    base: StoredFile,
    files: Vec<(String, StoredFile)>,
    progress: ProgressMode,
) -> anyhow::Result<Outcome> {
    let mut idle = vec!["--corpus", "--path", "--spec", "--draft-tokens", "--group", "--boundaries"];
    idle.extend(["--export-tokens", "--resume", "--state", "--yes"]);
    idle.extend(ENGINE_OPTIONS);
    given.idle(&idle, "two files are compared without a model; name one for an engine to be measured too")?;
    let ctx = args.ctx.or(base.ctx()).unwrap_or(CTX);
    let chunks = base.chunks(ctx, args.chunks)?;
    chunks.note().iter().for_each(|n| output::warn(n));
    let mut options = KldOptions::new(chunks, base.valid_vocab());
    options.llama_compat = args.llama_compat;
    options.resamples = args.bootstrap;
    let report = measure(&options, &mut [], base.reference(), tests_of(files), progress)?;
    print(args, &report)
}

/// An engine that is named by its differences: `--with "--a8-activations"`.
#[derive(Debug, Parser)]
#[command(name = "--with", disable_help_flag = true, no_binary_name = true)]
struct With {
    #[command(flatten)]
    model: ModelArgs,
}

/// One engine under test.
struct Engine {
    label: String,
    open: OpenModel,
    description: Value,
    drafts: usize,
    paths: Vec<Reading>,
    fp32: bool,
}

impl Engine {
    fn new(args: &KldArgs, open: OpenModel, other: Option<&Path>) -> anyhow::Result<Self> {
        let source = ArtifactSource::new(std::sync::Arc::clone(&open.artifact))?;
        let fp32 = args.boundaries == Boundaries::Fp32 && open.backend == BackendKind::Lossless;
        let paths: Vec<Reading> = args
            .paths
            .iter()
            .map(|p| match p {
                KldPath::Prompt => Reading::Prompt,
                KldPath::Decode => Reading::Decode,
            })
            .collect();
        let has_drafter = source.has_component(Component::Mtp);
        if args.spec == KldSpec::Mtp && !has_drafter {
            return Err(usage(format!("{} has no drafter for --spec mtp", open.artifact.path().display())));
        }
        let drafting = has_drafter && args.spec != KldSpec::Off && paths.contains(&Reading::Decode);
        let (mut label, description) = describe(&open, &source, fp32);
        if let Some(path) = other {
            label.push_str(&format!(", {}", file_name(path)));
        }
        let drafts = if drafting { args.draft_tokens } else { 0 };
        Ok(Self { label, open, description, drafts, paths, fp32 })
    }
}

/// A name for tables and what reports record.
pub(crate) fn describe(open: &OpenModel, source: &ArtifactSource, fp32: bool) -> (String, Value) {
    let backend = backend_name(open.backend);
    let activations = match open.activations {
        ActivationPolicy::A16 => "a16".into(),
        ActivationPolicy::A8 => "a8".into(),
        ActivationPolicy::A4 => "a4".into(),
        ActivationPolicy::Artifact => format!("a{}", source.default_expert_activation()),
    };
    let mut label = format!("{backend}, {activations}");
    if open.kv != KvFormat::Bf16 {
        label.push_str(&format!(", {} KV", kv_name(open.kv)));
    }
    if fp32 {
        label.push_str(", FP32 boundaries");
    }
    let description = json!({
        "engine": "infernix",
        "version": env!("CARGO_PKG_VERSION"),
        "backend": backend,
        "artifact_id": open.artifact.artifact_id().to_string(),
        "artifact": file_name(open.artifact.path()),
        "activations": activations,
        "activations_from": if open.activations == ActivationPolicy::Artifact { "artifact" } else { "option" },
        "kv": kv_name(open.kv),
        "boundaries": if fp32 { "fp32" } else { "bf16" },
    });
    (label, description)
}

fn backend_name(kind: BackendKind) -> &'static str {
    match kind {
        BackendKind::Cpu => "cpu",
        BackendKind::Lossless => "lossless",
        BackendKind::Cuda(_) => "cuda",
    }
}

fn kv_name(kv: KvFormat) -> &'static str {
    match kv {
        KvFormat::Bf16 => "bf16",
        KvFormat::Int8 => "int8",
        KvFormat::F32 => "f32",
    }
}

fn of_model(
    args: &KldArgs,
    given: &Given,
    base: Option<StoredFile>,
    files: Vec<(String, StoredFile)>,
    artifacts: &[PathBuf],
    progress: ProgressMode,
) -> anyhow::Result<Outcome> {
    if base.is_some() && !args.honest_rounding {
        given.idle(&["--group"], "with a file as the reference nothing is read in groups")?;
    }
    let open = OpenModel::new(&args.model, progress)?;
    refuse_idle(given, open.backend)?;
    let format = open.chat_format()?;
    let tokenizer = format.tokenizer();
    let source = ArtifactSource::new(std::sync::Arc::clone(&open.artifact))?;
    let vocab = source.config().vocab as usize;
    let limit = source.config().max_positions as usize;
    let ctx = args.ctx.or_else(|| base.as_ref()?.ctx()).unwrap_or(CTX);
    if ctx > limit {
        return Err(usage(format!("--ctx {ctx}, the model reads up to {limit} tokens")));
    }
    let chunks = chunks(args, base.as_ref(), ctx, tokenizer)?;
    chunks.note().iter().for_each(|n| output::warn(n));
    if let Some(path) = &args.export_tokens {
        let list: Vec<&[u32]> = (0..chunks.count).map(|c| chunks.chunk(c)).collect();
        output::write_report(path, &format!("{}\n", json!(list)))?;
        return Ok(Outcome::Done);
    }
    let id = open.artifact.artifact_id().to_string();
    if let Some(made_of) = base.as_ref().and_then(StoredFile::model).and_then(|m| m.get("artifact_id"))
        && made_of.as_str() != Some(id.as_str())
    {
        anyhow::bail!(
            "the reference was made from artifact {}, this model is {id}; name the model it was made from, and give \
             another one with --against",
            made_of.as_str().unwrap_or("?")
        );
    }
    // The model for the lossless backend: 16-bit activations, BF16 keys and values.
    let reference = (base.is_none() || args.honest_rounding).then(|| OpenModel {
        backend: BackendKind::Lossless,
        activations: ActivationPolicy::A16,
        kv: KvFormat::Bf16,
        ..open.clone()
    });

    let path = open.artifact.path().to_owned();
    let mut engines = vec![Engine::new(args, open, None)?];
    for text in &args.with {
        let (mut with, given) = with_options(text)?;
        with.model = Some(path.clone());
        with.ngram = with.ngram.or_else(|| args.model.ngram.clone());
        let open = OpenModel::new(&with, ProgressMode::None)?;
        refuse_idle(&given, open.backend)?;
        engines.push(Engine::new(args, open, None)?);
    }
    for path in artifacts {
        let with = ModelArgs { model: Some(path.clone()), ngram: None, ..args.model.clone() };
        let open = OpenModel::new(&with, progress)?;
        let other = open.chat_format()?;
        if other.tokenizer().addressable() != tokenizer.addressable()
            || (!chunks.tokens().is_empty()
                && base.is_none()
                && text_ids(args, other.tokenizer())?.1 != text_ids(args, tokenizer)?.1)
        {
            anyhow::bail!("{}: its tokenizer reads the text differently; not the same model", path.display());
        }
        engines.push(Engine::new(args, open, Some(path))?);
    }
    if engines.iter().all(|e| e.drafts == 0) {
        given.idle(&["--draft-tokens"], "no engine here has a drafter, or 0 drafts were asked for")?;
    }
    if reference.is_none() && !engines.iter().any(|e| e.fp32) {
        given.idle(&["--boundaries"], "nothing here runs on the lossless backend")?;
    }
    let valid = if args.llama_compat { vocab } else { (tokenizer.addressable() as usize).min(vocab) };
    let mut options = KldOptions::new(chunks, valid);
    options.llama_compat = args.llama_compat;
    options.resamples = args.bootstrap;
    options.save_reference.clone_from(&args.save_reference);
    options.save_base.clone_from(&args.save_base);
    options.top_k = args.top_k;
    options.resume = args.resume;
    options.group =
        args.group.unwrap_or_else(|| group(options.chunks.rows().len(), vocab)).min(options.chunks.count);
    options.asked = args.asked();
    options.state = Some(match &args.state {
        Some(path) => StatePlace::File(path.clone()),
        None => StatePlace::Folder(super::model::user_cache()?.join("kld")),
    });

    engines.reverse();
    let mut report = None;
    let mut job = Job {
        progress,
        options: &options,
        engines,
        sources: Vec::new(),
        tests: tests_of(files),
        reference: base.map(StoredFile::reference),
        honest: if args.honest_rounding { args.rounding_seeds } else { 0 },
        report: &mut report,
    };
    match reference {
        Some(open) => {
            let fp32 = args.boundaries == Boundaries::Fp32;
            let engine = Engine::new(args, open, None)?;
            let needs = Needs { sequences: options.group, fp32, ..Needs::tokens(options.group * ctx) };
            let mut driver = lossless(&engine.open, needs)?;
            let mut source = DriverSource::new(&mut driver, engine.description)
                .call_tokens(ctx.max(1024))
                .together(options.group)
                .rounding(|backend, seed| {
                    backend.set_rounding(seed.map_or(Rounding::Nearest, Rounding::Stochastic));
                });
            job.sources.push(&mut source);
            job.reference.get_or_insert(Reference::Source(0));
            job.next()?;
        }
        None => {
            job.next()?;
        }
    }
    let report = report.context("the comparison gave no report")?;
    print(args, &report)
}

/// Chunks to read together.
fn group(rows: usize, vocab: usize) -> usize {
    (GROUP_BYTES / (4 * rows * vocab).max(1)).clamp(1, GROUP)
}

/// Name, ids and text of the corpus.
fn text_ids(args: &KldArgs, tokenizer: &Tokenizer) -> anyhow::Result<(String, Vec<u32>, String)> {
    let (name, text) = match &args.corpus {
        Some(path) => (file_name(path), read_text(path)?),
        None => (DEFAULT_CORPUS.to_owned(), default_text()),
    };
    // As llama.cpp reads a text file: one stream, no token added.
    Ok((name, tokenizer.encode(&text)?, text))
}

fn chunks(
    args: &KldArgs,
    base: Option<&StoredFile>,
    ctx: usize,
    tokenizer: &Tokenizer,
) -> anyhow::Result<Chunks> {
    // Of the file itself: its tokens, or the number and the digest of them.
    let file = base.map(|b| b.chunks(ctx, None)).transpose()?;
    if let (Some(file), None) = (&file, &args.corpus)
        && !file.tokens().is_empty()
    {
        return Ok(args.chunks.map_or(Ok(file.clone()), |n| file.clone().first(n))?);
    }
    let (name, ids, text) = text_ids(args, tokenizer)?;
    // What the file holds of the text is compared as a whole, and measured as far as asked for.
    let limit = file.map_or(args.chunks, |f| Some(f.count));
    let all = Chunks::new(&name, text.as_bytes(), &ids, ctx, limit)?;
    match (base, args.chunks) {
        (Some(_), Some(n)) => Ok(all.first(n)?),
        _ => Ok(all),
    }
}

impl KldArgs {
    /// What makes a run what it is, by the names of the options: what a resumed one must agree in.
    fn asked(&self) -> BTreeMap<String, String> {
        let place = |p: &PathBuf| std::path::absolute(p).unwrap_or_else(|_| p.clone()).display().to_string();
        let file = |p: &Option<PathBuf>| p.as_ref().map_or_else(|| "none".into(), place);
        let count = |n: Option<usize>| n.map_or_else(|| "not given".into(), |n| n.to_string());
        let a = &self.model.activations;
        let activations = [(a.a16_activations, "a16"), (a.a8_activations, "a8"), (a.a4_activations, "a4")];
        let activations = activations.iter().find(|a| a.0).map_or("the artifact's", |a| a.1);
        let backend = if self.model.lossless { "lossless" } else { &self.model.backend };
        let paths: Vec<String> = self.paths.iter().map(name_of).collect();
        let against: Vec<String> = self.against.iter().map(place).collect();
        let list = |l: &[String]| if l.is_empty() { "none".to_owned() } else { l.join(", ") };
        let seeds = if self.honest_rounding { self.rounding_seeds } else { 0 };
        let drafts = if self.paths.contains(&KldPath::Decode) { self.draft_tokens } else { 0 };
        let all = [
            ("--backend", backend.to_owned()),
            ("activations", activations.to_owned()),
            ("--kv-dtype", name_of(&self.model.kv_dtype)),
            ("--corpus", file(&self.corpus)),
            ("--chunks", count(self.chunks)),
            ("--ctx", count(self.ctx)),
            ("--path", list(&paths)),
            ("--rounding-seeds", seeds.to_string()),
            ("--with", list(&self.with)),
            ("--against", list(&against)),
            ("--reference", file(&self.reference)),
            ("--save-reference", file(&self.save_reference)),
            ("--save-base", file(&self.save_base)),
            ("--top-k", self.top_k.to_string()),
            ("--llama-compat", self.llama_compat.to_string()),
            ("--boundaries", name_of(&self.boundaries)),
            ("--spec", name_of(&self.spec)),
            ("--draft-tokens", drafts.to_string()),
        ];
        all.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
    }
}

/// The options of an engine under `--with`.
fn with_options(text: &str) -> anyhow::Result<(ModelArgs, Given)> {
    let wrong = |e: clap::Error| usage(format!("--with {text:?}: {e}"));
    let command = With::command();
    let mut matches = command.clone().try_get_matches_from(text.split_whitespace()).map_err(wrong)?;
    let given = Given::new(&command, &matches);
    let with = With::from_arg_matches_mut(&mut matches).map_err(wrong)?.model;
    if with.model.is_some() {
        return Err(usage("--with takes options; another artifact goes to --against"));
    }
    Ok((with, given))
}

/// Loads one engine after the other around the sources that are loaded, then measures.
struct Job<'a> {
    progress: ProgressMode,
    options: &'a KldOptions,
    /// Engines to load, the next one last.
    engines: Vec<Engine>,
    sources: Vec<&'a mut dyn LogitsSource>,
    tests: Vec<Test>,
    reference: Option<Reference>,
    /// Seeds of honest rounding on source 0.
    honest: u64,
    report: &'a mut Option<KldReport>,
}

impl Job<'_> {
    fn next(mut self) -> anyhow::Result<Outcome> {
        if let Some(engine) = self.engines.pop() {
            let needs = Needs {
                fp32: engine.fp32,
                drafter: engine.drafts > 0,
                ..Needs::tokens(self.options.chunks.ctx + engine.drafts + 1)
            };
            let open = engine.open.clone();
            return with_needs(&open, needs, Loaded { job: self, engine });
        }
        let reference = self.reference.take().context("there is no reference")?;
        let mut tests: Vec<Test> = (1..=self.honest)
            .map(|seed| Test {
                engine: "honest rounding".into(),
                rows: Rows::Source { index: 0, path: Reading::Prompt, rounding: Some(seed) },
            })
            .collect();
        tests.append(&mut self.tests);
        let report = measure(self.options, &mut self.sources, reference, tests, self.progress)?;
        *self.report = Some(report);
        Ok(Outcome::Done)
    }
}

struct Loaded<'a> {
    job: Job<'a>,
    engine: Engine,
}

impl Task for Loaded<'_> {
    fn run<B: Backend>(self, driver: &mut Driver<B>) -> anyhow::Result<Outcome> {
        let Loaded { job, engine } = self;
        let mut source = DriverSource::new(driver, engine.description)
            .call_tokens(job.options.chunks.ctx)
            .drafts(engine.drafts);
        // Rebuilt one by one: the new list lives shorter than the old one.
        let mut sources: Vec<&mut dyn LogitsSource> = Vec::with_capacity(job.sources.len() + 1);
        for s in job.sources {
            sources.push(s);
        }
        sources.push(&mut source);
        let index = sources.len() - 1;
        // Engines come in their order, before the files.
        let mut tests = job.tests;
        let at = tests.iter().take_while(|t| matches!(t.rows, Rows::Source { .. })).count();
        for (i, path) in engine.paths.iter().enumerate() {
            let rows = Rows::Source { index, path: *path, rounding: None };
            tests.insert(at + i, Test { engine: engine.label.clone(), rows });
        }
        Job {
            progress: job.progress,
            options: job.options,
            engines: job.engines,
            sources,
            tests,
            reference: job.reference,
            honest: job.honest,
            report: job.report,
        }
        .next()
    }
}

fn measure(
    options: &KldOptions,
    sources: &mut [&mut dyn LogitsSource],
    reference: Reference,
    tests: Vec<Test>,
    progress: ProgressMode,
) -> anyhow::Result<KldReport> {
    let mut steps = Steps::new(progress, options.chunks.count as u64);
    let mut show = |r: &infernix_measure::Running| {
        // Seeds as one figure, engines each with its path.
        let (seeds, engines): (Vec<_>, Vec<_>) = r.tests.iter().partition(|t| t.rounding.is_some());
        let sum: f64 = seeds.iter().map(|t| t.mean_kld).sum();
        let seeds = (!seeds.is_empty()).then(|| format!("honest rounding {:.6}", sum / seeds.len() as f64));
        let engine = |t: &&infernix_measure::RunningTest| {
            format!("{} ({}) {:.6} {:.2} %", t.engine, t.path, t.mean_kld, 100.0 * t.top1)
        };
        let values: Vec<String> = seeds.into_iter().chain(engines.iter().map(engine)).collect();
        steps.at(r.done as u64, r.total as u64, &values.join(" | "), || {
            let test = |t: &infernix_measure::RunningTest| {
                json!({ "engine": t.engine, "path": t.path, "rounding": t.rounding, "mean_kld": t.mean_kld,
                    "top1": t.top1 })
            };
            let tests: Vec<Value> = r.tests.iter().map(test).collect();
            json!({ "phase": "kld", "chunks": r.done, "total_chunks": r.total, "seconds": r.seconds, "tests": tests })
        });
    };
    Ok(kld(options, sources, reference, tests, &mut show, &INTERRUPTED)?)
}

/// What a page of one report is about.
fn title(report: &KldReport) -> String {
    let reference = &report.run["reference"];
    let artifact = reference["artifact"].as_str().or_else(|| reference["model"]["artifact"].as_str());
    artifact.map_or_else(|| "Two files of logits".into(), |a| a.trim_end_matches(".infernix").to_owned())
}

fn print(args: &KldArgs, report: &KldReport) -> anyhow::Result<Outcome> {
    if args.json.json {
        output::print_json(&report.to_json())?;
    } else if args.llama_compat {
        output::print(&report.to_llama_text())?;
    } else {
        output::print(&report.to_text())?;
    }
    // Last: what cannot be written is lost in the file alone.
    reports::write(&args.output, |path, form| {
        Ok(match form {
            Form::Json => format!("{:#}\n", report.to_json()),
            Form::Markdown => report.to_markdown(),
            Form::Page => page(&title(report), &[(file_name(path), report.to_json())])?.html,
        })
    })?;
    Ok(Outcome::Done)
}
