//! Proving an artifact: every stored object is decoded back to the source's words and compared.
//!
//! Nothing is taken from the recipe but the names of re-quantizing methods: the logical parameter set follows from the
//! checkpoint's configuration, the objects from the artifact's bindings, and what a parameter must hold from the
//! source tensors.

mod bank;
mod map;
mod rows;
mod table;
mod tally;

use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use infernix_artifact::digest::quotable_digest;
use infernix_artifact::ngram::{NgramTable, Volume, locate};
use infernix_artifact::{Artifact, Digest, Interrupt};
use infernix_checkpoint::OpenOptions;

use crate::ConvertError;
use crate::exec::{step_bytes, thread_pool};
use crate::progress::Progress;
use crate::resources::{check_generation, check_tokenizer};
use crate::sources::{SourceSpec, Sources};

pub(crate) use tally::Errors;
pub use tally::{Mismatch, Requantized, VerifyReport, Worst};

/// How many rows of the n-gram table to compare.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NgramRows {
    /// Every one.
    All,
    /// So many, spread by a fixed generator, the last one included.
    Sample(u64),
}

/// What to verify, against what.
#[derive(Debug, Clone)]
pub struct VerifyOptions {
    /// The artifact's first file.
    pub artifact: PathBuf,
    /// Checkpoints by role; empty to check structure and digests alone.
    pub sources: Vec<SourceSpec>,
    /// The volume, where it is not beside the artifact.
    pub ngram: Option<PathBuf>,
    /// Rows to compare.
    pub ngram_rows: NgramRows,
    /// Leave the volume out.
    pub skip_ngram: bool,
    /// Where two shards hold the same tensor, take the one the index names.
    pub trust_index: bool,
    /// Worker threads.
    pub threads: usize,
}

impl VerifyOptions {
    /// Verifies everything against one checkpoint.
    pub fn new(artifact: impl Into<PathBuf>, checkpoint: Option<PathBuf>) -> Self {
        Self {
            artifact: artifact.into(),
            sources: checkpoint.into_iter().map(|path| SourceSpec::new("base", path)).collect(),
            ngram: None,
            ngram_rows: NgramRows::All,
            skip_ngram: false,
            trust_index: false,
            threads: std::thread::available_parallelism().map_or(1, usize::from),
        }
    }
}

/// What comparisons share.
pub(crate) struct Context<'a> {
    pub(crate) artifact: &'a Artifact,
    pub(crate) sources: &'a Sources,
    pub(crate) interrupt: &'a Interrupt,
    pub(crate) pool: &'a rayon::ThreadPool,
    pub(crate) step: u64,
    pub(crate) tally: &'a tally::Tally,
    pub(crate) progress: &'a dyn Progress,
}

/// Verifies an artifact.
///
/// # Errors
/// What cannot be opened or read, a volume that is missing, an interruption. Everything found wrong is in the report.
pub fn verify(
    options: &VerifyOptions,
    progress: &dyn Progress,
    interrupt: &Interrupt,
) -> Result<VerifyReport, ConvertError> {
    let started = Instant::now();
    let artifact = Artifact::open(&options.artifact)?;
    let directory = artifact.directory();
    let mut report = VerifyReport { checkpoint: !options.sources.is_empty(), ..VerifyReport::default() };

    progress.begin("digests", directory.payload_bytes());
    let told = |bytes: u64| progress.advance(bytes);
    let integrity = artifact.verify_integrity(&infernix_artifact::verify::VerifyOptions {
        threads: options.threads,
        objects: None,
        interrupt: interrupt.clone(),
        progress: Some(&told),
    })?;
    progress.end();
    report.digests = integrity.state.name().to_owned();
    report.corrupt_objects.clone_from(&integrity.corrupt_objects);
    report.problems.extend(integrity.problems.iter().map(ToString::to_string));
    if report.digests == "absent" {
        report.warnings.push("the artifact records no digests; only a checkpoint can prove its words".into());
    }
    check_words(&artifact, &mut report)?;
    check_resources(&artifact, &mut report)?;

    let table = NgramTable::of(directory)
        .map_err(|reason| ConvertError::Verify { path: artifact.path().into(), reason })?;
    let volume = match &table {
        Some(table) if !options.skip_ngram => {
            let found = locate(artifact.path(), options.ngram.as_deref(), table.volume_id)?;
            let volume = Volume::open(&found.path)?;
            match volume.accept(table) {
                Ok(notices) => report.warnings.extend(notices),
                Err(e) => report.problems.push(e.to_string()),
            }
            Some(volume)
        }
        Some(_) => {
            report.warnings.push("the n-gram volume was left out".into());
            None
        }
        None => None,
    };
    let mut row_digest = volume.as_ref().and_then(|v| v.header().extension.as_ref()).map(|e| e.row_digest);

    let pool = thread_pool(options.threads)?;
    if options.sources.is_empty() {
        if let Some(volume) = &volume
            && options.ngram_rows == NgramRows::All
        {
            progress.begin("n-gram rows", volume.geometry().file_bytes());
            let found = volume.verify(interrupt, |bytes| progress.advance(bytes))?;
            progress.end();
            report
                .problems
                .extend(found.problems.iter().map(|p| format!("{}: {p}", volume.path().display())));
            row_digest = found.row_digest.or(row_digest);
        }
    } else {
        let open = OpenOptions { trust_index: options.trust_index, ..OpenOptions::default() };
        let sources = Sources::open(&options.sources, &open)?;
        let tally = tally::Tally::default();
        let context = Context {
            artifact: &artifact,
            sources: &sources,
            interrupt,
            pool: &pool,
            step: step_bytes(options.threads),
            tally: &tally,
            progress,
        };
        let map = map::build(&context)?;
        report.problems.extend(map.problems.iter().cloned());
        report.missing_bindings.clone_from(&map.missing);
        report.extra_bindings.clone_from(&map.extra);
        progress.begin("compare", map.tasks.iter().map(|t| t.bytes(directory)).sum());
        run_tasks(&context, &map, options.threads)?;
        progress.end();
        if let Some(volume) = &volume {
            let digest = table::compare(&context, &map, volume, options.ngram_rows)?;
            row_digest = digest.or(row_digest);
        }
        tally.into_report(&map, &mut report);
    }
    if !options.skip_ngram || table.is_none() {
        report.digest = Some(quotable_digest(directory, &integrity.digests, row_digest));
    }
    report.finish(started.elapsed());
    Ok(report)
}

/// Runs the comparisons, in payload order, on all threads.
fn run_tasks(context: &Context<'_>, map: &map::Map, threads: usize) -> Result<(), ConvertError> {
    let (next, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
    let failure: Mutex<Option<ConvertError>> = Mutex::new(None);
    let work = || {
        while !stop.load(Ordering::Relaxed) {
            let Some(task) = map.tasks.get(next.fetch_add(1, Ordering::Relaxed)) else { break };
            if let Err(e) = task.run(context, map) {
                stop.store(true, Ordering::Relaxed);
                if let Ok(mut slot) = failure.lock() {
                    slot.get_or_insert(e);
                }
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..threads.max(1) {
            scope.spawn(work);
        }
    });
    failure.into_inner().ok().flatten().map_or(Ok(()), Err)
}

/// Sizes that follow from layout, format and shape.
fn check_words(artifact: &Artifact, report: &mut VerifyReport) -> Result<(), ConvertError> {
    for object in &artifact.directory().objects {
        let (Some(shape), Some(format)) = (object.shape(), object.format()) else { continue };
        let known = format.parse::<infernix_formats::Format>().ok().zip(object.layout().parse().ok());
        let Some((format, layout)) = known else {
            report.warnings.push(format!(
                "object {}: format {format} in {} is unknown here",
                object.id,
                object.layout()
            ));
            continue;
        };
        match infernix_formats::encoded_size(layout, format, shape) {
            Ok(bytes) if bytes == object.bytes => {}
            Ok(bytes) => {
                report
                    .problems
                    .push(format!("object {}: {} bytes, its shape needs {bytes}", object.id, object.bytes));
            }
            Err(e) => report.problems.push(format!("object {}: {e}", object.id)),
        }
    }
    Ok(())
}

/// A tokenizer and generation defaults that the engine can use. What is damaged was said already.
fn check_resources(artifact: &Artifact, report: &mut VerifyReport) -> Result<(), ConvertError> {
    let Some(text) = artifact.directory().components.get("text") else { return Ok(()) };
    let Some(vocab) = text.config.get("vocab_size").and_then(serde_json::Value::as_u64) else {
        return Ok(());
    };
    let read = |role: &str| -> Result<Option<Vec<u8>>, ConvertError> {
        let present = text.resources.get(role).filter(|id| !report.corrupt_objects.contains(id));
        Ok(present.map(|_| artifact.resource("text", role)).transpose()?)
    };
    let settings = read("tokenizer_config.json")?;
    let tokenizer = read("tokenizer.json")?;
    let tokenizer = tokenizer.map(|b| check_tokenizer(&b, settings.as_deref(), vocab).map(|_| ()));
    let generation = read("generation_config.json")?.map(|b| check_generation(&b, vocab));
    for (name, found) in [("tokenizer.json", tokenizer), ("generation_config.json", generation)] {
        if let Some(Err(reason)) = found {
            report.problems.push(format!("resource {name}: {reason}"));
        }
    }
    Ok(())
}

/// Hexadecimal text of a digest, for callers that print it.
#[must_use]
pub fn digest_text(digest: Option<Digest>) -> String {
    digest.map_or_else(|| "unknown".to_owned(), |d| d.to_string())
}
