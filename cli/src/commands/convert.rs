//! `infernix convert`: from typed flags to a plan, and the plan carried out.

use crate::args::{ConvertArgs, ProgressMode, ThreadArgs, VerifyArgs};
use crate::output::{self, Table, grouped, usage};
use crate::progress::Reporter;
use crate::{INTERRUPTED, Outcome};
use anyhow::Context as _;
use infernix_artifact::Interrupt;
use infernix_checkpoint::hf_cache;
use infernix_convert::{
    ConvertOptions, NgramTarget, Plan, ProposalOptions, Ranking, Recipe, RunOptions, SourceSpec,
};
use infernix_model::Component;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

pub(crate) fn run(args: &ConvertArgs, progress: ProgressMode) -> anyhow::Result<Outcome> {
    let options = options(args)?;
    let plan = infernix_convert::plan(&options)?;
    refuse_collisions(&plan)?;
    plan.warnings.iter().for_each(|warning| output::warn(warning));
    if args.components.is_empty() {
        undescribed(&plan).iter().for_each(|warning| output::warn(warning));
    }
    if args.dry_run {
        if args.json.json {
            output::print_json(&with_version(plan.to_json()))?;
        } else {
            output::print(&plan_text(&plan)?)?;
        }
        return Ok(if plan.missing.is_empty() { Outcome::Done } else { Outcome::Mismatch });
    }
    let reporter = Reporter::new(progress);
    // Said when the work begins: after everything that may refuse it.
    let text = (!args.json.json).then(|| summary(&plan));
    let announced = Announced { reporter: &reporter, text: Mutex::new(text) };
    let run = RunOptions::new(Interrupt::new(interrupt()));
    let fresh = !infernix_artifact::state_folder(&options.output).exists();
    let result = match infernix_convert::convert(&plan, &announced, &run) {
        Ok(result) => result,
        Err(error) => {
            // A volume elsewhere has state of its own.
            let tidy = fresh && matches!(options.ngram, NgramTarget::Beside);
            return Err(with_way_on(error.into(), &options.output, tidy));
        }
    };
    for warning in &result.warnings {
        output::warn(warning);
    }
    let document = with_version(result.to_json(&plan));
    if !args.json.json {
        output::print(&result_text(&result))?;
    }
    let source = match options.sources.as_slice() {
        [source, ..] if args.verify => source,
        _ if args.json.json => return output::print_json(&document).map(|()| Outcome::Done),
        _ => return Ok(Outcome::Done),
    };
    let verify = VerifyArgs {
        artifact: options.output.clone(),
        derivation: None,
        checkpoint: Some(source.path.clone()),
        sources: options.sources[1..].iter().map(|s| format!("{}={}", s.role, s.path.display())).collect(),
        ngram: args.ngram_reuse.clone().or_else(|| args.ngram_out.clone()),
        ngram_rows: "all".into(),
        skip_ngram: false,
        trust_index: args.trust_index,
        threads: args.threads,
        json: args.json,
    };
    // The checksums were made from these files a moment ago: they are not read once more.
    let report = super::verify::report(&verify, progress, false)?;
    if args.json.json {
        let mut document = document;
        document["verification"] = super::verify::document(&verify, &report)?;
        output::print_json(&document)?;
    }
    super::verify::finish(&report, args.json.json)
}

/// What components the checkpoint holds that its configuration does not describe: silently dropping a drafter has
/// cost other converters' users their speed.
fn undescribed(plan: &Plan) -> Vec<String> {
    let mut out = Vec::new();
    for (component, key) in [("mtp", "mtp_num_hidden_layers is 0"), ("vision", "vision_config is absent")] {
        let reason = format!("component {component} is not converted");
        let n = plan.ignored.iter().filter(|i| i.reason == reason).count();
        if n > 0 {
            out.push(format!(
                "{} of component {component} left out: the checkpoint has them, config.json does not describe them \
                 ({key}); correct config.json to convert them, or say --components text",
                output::counted(n as u64, "tensor"),
            ));
        }
    }
    out
}

/// The volume may have any name, but not that of another file of the set.
fn refuse_collisions(plan: &Plan) -> anyhow::Result<()> {
    let Some(volume) = &plan.ngram else { return Ok(()) };
    let place = |path: &Path| {
        let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let folder = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
        folder.join(path.file_name().unwrap_or_default())
    };
    let output = &plan.options.output;
    let beside = |suffix: &str| {
        let mut name = output.clone().into_os_string();
        name.push(suffix);
        PathBuf::from(name)
    };
    let folder = output.parent().unwrap_or(Path::new(""));
    let others =
        plan.files().into_iter().map(|f| folder.join(Path::new(&f.path).file_name().unwrap_or_default()));
    let reserved = [beside(".conversion.json"), beside(".partial"), folder.join("SHA256SUMS")];
    let wanted = place(&volume.path);
    match others.chain(reserved).find(|path| place(path) == wanted) {
        Some(path) => Err(usage(format!(
            "the n-gram volume cannot be {}: the artifact has a file of that name",
            path.display()
        ))),
        None => Ok(()),
    }
}

/// Progress with a text before its first phase.
struct Announced<'a> {
    reporter: &'a Reporter,
    text: Mutex<Option<String>>,
}

impl infernix_convert::Progress for Announced<'_> {
    fn begin(&self, phase: &str, bytes: u64) {
        if let Some(text) = self.text.lock().ok().and_then(|mut t| t.take()) {
            self.reporter.note(&text);
        }
        self.reporter.begin(phase, bytes);
    }
    fn advance(&self, bytes: u64) {
        self.reporter.advance(bytes);
    }
    fn note(&self, text: &str) {
        self.reporter.note(text);
    }
    fn end(&self) {
        self.reporter.end();
    }
}

/// Says what is left behind by failed work on `target` and how to go on; with `tidy`, state without finished work is
/// removed.
pub(crate) fn with_way_on(error: anyhow::Error, target: &Path, tidy: bool) -> anyhow::Error {
    let state = infernix_artifact::state_folder(target);
    if tidy && !INTERRUPTED.load(std::sync::atomic::Ordering::SeqCst) {
        // Failing to tidy up is no reason to hide the first error.
        let _ = infernix_artifact::discard_unused(target);
    }
    // What is wrong with the state itself says what to do with it, and state in use is another's.
    let told = output::error_text(&error).contains("infernix clean");
    if state.is_dir() && !told && !super::model::is_in_use(&error) {
        output::note(&format!(
            "finished work is kept in {}: continue with --resume, or remove it with `infernix clean {}`",
            state.display(),
            target.display()
        ));
    }
    error
}

pub(crate) fn with_version(mut value: serde_json::Value) -> serde_json::Value {
    if let Some(object) = value.as_object_mut() {
        object.shift_insert(0, "schema_version".into(), 1.into());
    }
    value
}

/// The cores this process may use, or what the flag says.
pub(crate) fn threads(args: ThreadArgs) -> anyhow::Result<usize> {
    match args.threads {
        Some(n) => capped("threads", n),
        None => Ok(cores()),
    }
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// A thread count from a flag; more than four a core only cost memory, so fewer are taken with a word.
pub(crate) fn capped(flag: &str, n: usize) -> anyhow::Result<usize> {
    let most = 4 * cores().max(4);
    match n {
        0 => Err(usage(format!("--{flag} must be at least 1"))),
        n if n > most => {
            output::warn(&format!("--{flag} {n}: {most} are used, the most for {} cores", cores()));
            Ok(most)
        }
        n => Ok(n),
    }
}

fn options(args: &ConvertArgs) -> anyhow::Result<ConvertOptions> {
    let recipe = Recipe::load(&args.recipe)?;
    let mut sources = args.sources.iter().map(|s| SourceSpec::parse(s)).collect::<Result<Vec<_>, _>>()?;
    if let Some(path) = &args.checkpoint {
        sources.insert(0, SourceSpec::new("base", path));
    } else if sources.is_empty() {
        sources = from_cache(&recipe, args.revision.as_deref())?;
    }
    let output = match &args.output {
        Some(path) => path.clone(),
        None if args.dry_run => PathBuf::from(format!("{}.infernix", recipe.name)),
        None => return Err(usage("say where to write with -o OUT.infernix")),
    };
    if output.file_name().and_then(std::ffi::OsStr::to_str).is_none() {
        return Err(usage(format!("-o {}: the output must be a file name in UTF-8", output.display())));
    }
    let mut options = ConvertOptions::new("", recipe, output);
    options.sources = sources;
    options.components = components(&args.components)?;
    options.proposal = proposal(args, &options.sources)?;
    options.ngram = match (&args.ngram_out, &args.ngram_reuse) {
        (Some(path), _) => NgramTarget::Write(path.clone()),
        (_, Some(path)) => NgramTarget::Reuse(path.clone()),
        _ => NgramTarget::Beside,
    };
    options.name.clone_from(&args.name);
    options.max_file_bytes = args.max_file_bytes;
    options.threads = threads(args.threads)?;
    options.dry_run = args.dry_run;
    options.resume = args.resume;
    options.trust_index = args.trust_index;
    Ok(options)
}

/// Every source the recipe names, from the Hugging Face cache.
fn from_cache(recipe: &Recipe, revision: Option<&str>) -> anyhow::Result<Vec<SourceSpec>> {
    if recipe.sources.is_empty() {
        return Err(usage(format!(
            "recipe {} names no repository; give the checkpoint's folder",
            recipe.name
        )));
    }
    let mut found = Vec::new();
    for role in &recipe.sources {
        let mut reasons = Vec::new();
        let hit = role.repositories.iter().find_map(|repo| match hf_cache::find(repo, revision) {
            Ok(snapshot) => Some(snapshot),
            Err(missing) => {
                reasons.push(missing.to_string());
                None
            }
        });
        match hit {
            Some(snapshot) => {
                output::note(&format!("{}: {} at {}", role.role, snapshot.repo, snapshot.commit));
                let mut spec = SourceSpec::new(&role.role, snapshot.folder);
                spec.repository = Some(snapshot.repo);
                spec.revision = Some(snapshot.commit);
                found.push(spec);
            }
            None if role.required => {
                anyhow::bail!("{} is not in the Hugging Face cache: {}", role.role, reasons.join("; "));
            }
            None => output::note(&format!("{} left out: {}", role.role, reasons.join("; "))),
        }
    }
    Ok(found)
}

pub(crate) fn components(names: &[String]) -> anyhow::Result<Option<Vec<Component>>> {
    if names.is_empty() {
        return Ok(None);
    }
    let parse = |name: &String| {
        Component::from_name(name).ok_or_else(|| {
            usage(format!("no component {name:?}; there are text, vision, mtp, dflash, dflash2"))
        })
    };
    names.iter().map(parse).collect::<anyhow::Result<Vec<_>>>().map(Some)
}

fn proposal(args: &ConvertArgs, sources: &[SourceSpec]) -> anyhow::Result<Option<ProposalOptions>> {
    if !args.proposal {
        return Ok(None);
    }
    let ranking = match (&args.ranking, &args.ranking_text) {
        (Some(file), _) => Ranking::File(file.clone()),
        (_, Some(text)) => ranking_from_text(text, sources)?,
        _ if args.dry_run => Ranking::Absent,
        _ => {
            return Err(usage(
                "a proposal head needs token frequencies: pass --ranking FILE or --ranking-text FILE",
            ));
        }
    };
    Ok(Some(ProposalOptions { rows: args.proposal_rows, ranking }))
}

fn ranking_from_text(file: &Path, sources: &[SourceSpec]) -> anyhow::Result<Ranking> {
    let text = std::fs::read_to_string(file)
        .with_context(|| format!("{} cannot be read as text", file.display()))?;
    let folder = &sources.iter().find(|s| s.role == "resources").unwrap_or(&sources[0]).path;
    let tokenizer = super::model::tokenizer_from_folder(folder)?;
    Ok(Ranking::from_ids(tokenizer.encode_text(&text)?))
}

/// One line before the work begins.
fn summary(plan: &Plan) -> String {
    let volume = plan.ngram.as_ref().filter(|n| n.reuse.is_none()).map_or(0, |n| n.bytes);
    format!(
        "writing {} in {}{}; at most {} of memory",
        output::bytes(plan.artifact_bytes()),
        output::counted(plan.files().len() as u64, "file"),
        if volume > 0 {
            format!(" and an n-gram volume of {}", output::bytes(volume))
        } else {
            String::new()
        },
        output::bytes(plan.memory_needed_bytes()),
    )
}

fn result_text(r: &infernix_convert::Outcome) -> String {
    let mut t = Table::new(&["file", "bytes"]);
    for (path, bytes) in &r.files {
        t.row([path.display().to_string(), grouped(*bytes)]);
    }
    let mut out = t.to_string();
    for path in r.volume.iter().chain(&r.report) {
        let _ = writeln!(out, "{}", path.display());
    }
    if r.complete {
        out.push_str("complete already, nothing to do\n");
    }
    if r.resumed_bytes > 0 {
        let _ = writeln!(out, "resumed: {} were finished before", output::bytes(r.resumed_bytes));
    }
    let _ = writeln!(out, "artifact_id {}\ndigest {}", r.artifact_id, r.digest);
    let _ = writeln!(out, "{:.1} s, then {:.1} s for SHA256SUMS", r.seconds, r.checksum_seconds);
    out
}

fn plan_text(plan: &Plan) -> anyhow::Result<String> {
    let mut out = String::new();
    let mut t = Table::new(&["class", "parameters", "bytes", "<format", "<layout", "<proof"]);
    for (class, c) in &plan.classes {
        t.row([
            class.clone(),
            grouped(c.count),
            grouped(c.bytes),
            c.format.clone(),
            c.layout.clone(),
            c.proof.clone(),
        ]);
    }
    writeln!(out, "{t}")?;
    let mut t = Table::new(&["file", "bytes"]);
    for file in plan.files() {
        t.row([file.path, grouped(file.bytes)]);
    }
    if let Some(n) = plan.ngram.as_ref() {
        let how = if n.reuse.is_some() { " (reused)" } else { "" };
        t.row([format!("{}{how}", n.path.display()), grouped(n.bytes)]);
    }
    writeln!(out, "{t}")?;
    let mut t = Table::new(&["", ""]);
    t.row(["artifact".into(), format!("{} bytes", grouped(plan.artifact_bytes()))]);
    t.row(["disk needed".into(), format!("{} bytes", grouped(plan.disk_needed_bytes()))]);
    t.row(["memory needed, at most".into(), format!("{} bytes", grouped(plan.memory_needed_bytes()))]);
    t.row(["objects".into(), grouped(plan.objects.len() as u64)]);
    out.push_str(&t.to_string());
    for ignored in &plan.ignored {
        writeln!(out, "ignored {}: {}", ignored.tensor, ignored.reason)?;
    }
    for missing in &plan.missing {
        writeln!(out, "missing {missing}")?;
    }
    Ok(out)
}

/// The interrupt flag as the libraries take it.
pub(crate) fn interrupt() -> Arc<std::sync::atomic::AtomicBool> {
    Arc::clone(&INTERRUPTED)
}
