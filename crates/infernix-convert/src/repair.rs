//! Rewriting corrupt objects and table rows of an artifact from its checkpoint.

use std::fs::{File, OpenOptions as FileOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use infernix_artifact::ngram::{NgramTable, Volume, locate};
use infernix_artifact::repair::{repair_gaps, repair_object};
use infernix_artifact::{Artifact, ArtifactError, Interrupt, Object, Proposal};
use infernix_checkpoint::OpenOptions;
use infernix_model::Component;
use serde::Serialize;

use crate::ConvertError;
use crate::build::{plan_with, with_suffix};
use crate::exec::{step_bytes, thread_pool};
use crate::fill::{Fill, Notes, Sink};
use crate::ngram::TableReader;
use crate::plan::{ConvertOptions, NgramTarget, Plan, PlannedObject};
use crate::progress::Progress;
use crate::proposal::{ProposalOptions, Ranking};
use crate::recipe::Recipe;
use crate::sources::{SourceSpec, Sources};

/// What to repair, from what.
#[derive(Debug, Clone)]
pub struct RepairOptions {
    /// The artifact's first file.
    pub artifact: PathBuf,
    /// Checkpoints by role.
    pub sources: Vec<SourceSpec>,
    /// The recipe it was made with; `None` to take the built-in one that the artifact names.
    pub recipe: Option<Recipe>,
    /// The volume, where it is not beside the artifact.
    pub ngram: Option<PathBuf>,
    /// Worker threads.
    pub threads: usize,
}

/// What was repaired.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct RepairReport {
    /// Everything is as its digests say now.
    pub ok: bool,
    /// Objects that were rewritten.
    pub repaired_objects: Vec<String>,
    /// Table rows that were rewritten.
    pub repaired_rows: u64,
    /// Gaps that were cleared.
    pub repaired_gaps: u64,
    /// What is wrong still, with reasons.
    pub problems: Vec<String>,
}

/// Takes an object's bytes into a scratch file.
struct FileSink<'a>(&'a Mutex<File>, &'a Path);

impl Sink for FileSink<'_> {
    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), ConvertError> {
        let mut file = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        file.seek(SeekFrom::Start(offset))
            .and_then(|_| file.write_all(bytes))
            .map_err(|source| ConvertError::Io { path: self.1.to_owned(), action: "write", source })
    }
}

/// Repairs an artifact.
///
/// # Errors
/// An artifact that does not open (its directory is beyond repair) or has no digests; sources that do not fit; I/O.
pub fn repair(
    options: &RepairOptions,
    progress: &dyn Progress,
    interrupt: &Interrupt,
) -> Result<RepairReport, ConvertError> {
    let artifact = Artifact::open(&options.artifact)?;
    let told = |bytes: u64| progress.advance(bytes);
    let check = || {
        progress.begin("digests", artifact.directory().payload_bytes());
        let found = artifact.verify_integrity(&infernix_artifact::verify::VerifyOptions {
            threads: options.threads,
            objects: None,
            interrupt: interrupt.clone(),
            progress: Some(&told),
        });
        progress.end();
        found
    };
    let before = check()?;
    let mut report = RepairReport::default();
    if before.state == infernix_artifact::verify::DigestState::Absent {
        return Err(ConvertError::Verify {
            path: options.artifact.clone(),
            reason: "records no digests, so nothing says what to repair; convert the checkpoint anew".into(),
        });
    }
    let plan = replan(options, &artifact)?;
    let wanted: Vec<&Object> =
        artifact.directory().objects.iter().filter(|o| before.corrupt_objects.contains(&o.id)).collect();
    progress.begin("repair", wanted.iter().map(|o| o.bytes).sum());
    let pool = thread_pool(options.threads)?;
    for object in wanted {
        interrupt.check()?;
        match rewrite(options, &artifact, &plan, object, &pool, interrupt) {
            Ok(()) => report.repaired_objects.push(object.id.clone()),
            Err(e) if e.is_interrupted() => return Err(e),
            Err(e) => report.problems.push(format!("object {}: {e}", object.id)),
        }
        progress.advance(object.bytes);
    }
    progress.end();
    if before.problems.iter().any(|p| p.place.starts_with("gap")) {
        report.repaired_gaps = repair_gaps(&artifact)?;
    }
    if let Err(e) = rows(options, &artifact, &plan, progress, interrupt, &mut report) {
        if e.is_interrupted() {
            return Err(e);
        }
        report.problems.push(e.to_string());
    }
    let after = check()?;
    report.problems.extend(after.problems.iter().map(ToString::to_string));
    let left =
        after.corrupt_objects.iter().filter(|id| !report.problems.iter().any(|p| p.contains(id.as_str())));
    let left: Vec<String> = left.map(|id| format!("object {id} is corrupt still")).collect();
    report.problems.extend(left);
    report.ok = report.problems.is_empty();
    Ok(report)
}

/// The plan that the artifact was made by.
fn replan(options: &RepairOptions, artifact: &Artifact) -> Result<Plan, ConvertError> {
    let directory = artifact.directory();
    let fail = |reason: String| ConvertError::Verify { path: options.artifact.clone(), reason };
    let provenance = directory.provenance.clone().unwrap_or_default();
    let text = |key: &str| provenance.get(key).and_then(|v| v.as_str()).map(str::to_owned);
    let recipe = match &options.recipe {
        Some(recipe) => recipe.clone(),
        None => Recipe::load_built_in(&text("recipe").ok_or_else(|| fail("names no recipe".into()))?)?,
    };
    let digest: String = recipe.digest.iter().map(|b| format!("{b:02x}")).collect();
    if text("recipe_blake3").is_some_and(|recorded| recorded != digest) {
        return Err(fail(format!(
            "was made by another version of recipe {}; use the program of that time, or convert anew",
            recipe.name
        )));
    }
    let components = directory.components.keys().filter_map(|id| Component::from_name(id)).collect();
    let proposal = directory.components.get("text").and_then(|t| t.proposal).and_then(|p| match p {
        Proposal::Indexed { rows } => Some(ProposalOptions { rows: Some(rows), ranking: Ranking::Absent }),
        Proposal::Full => None,
    });
    let sources = Arc::new(Sources::open(&options.sources, &OpenOptions::default())?);
    let wanted = ConvertOptions {
        sources: options.sources.clone(),
        recipe,
        output: options.artifact.clone(),
        components: Some(components),
        proposal,
        ngram: NgramTarget::Beside,
        name: directory.name().map(str::to_owned),
        max_file_bytes: infernix_artifact::DEFAULT_MAX_FILE_BYTES,
        threads: options.threads,
        dry_run: false,
        resume: false,
        trust_index: false,
    };
    let plan = plan_with(&wanted, sources)?;
    if !plan.missing.is_empty() {
        return Err(ConvertError::MissingTensors {
            count: plan.missing.len(),
            names: crate::error::list(plan.missing.iter().map(String::as_str)),
        });
    }
    Ok(plan)
}

/// Produces one object anew in a scratch file, then puts it in place if it is what its digest says.
fn rewrite(
    options: &RepairOptions,
    artifact: &Artifact,
    plan: &Plan,
    object: &Object,
    pool: &rayon::ThreadPool,
    interrupt: &Interrupt,
) -> Result<(), ConvertError> {
    let fail = |reason: String| ConvertError::Verify { path: options.artifact.clone(), reason };
    let planned: &PlannedObject = plan
        .objects
        .iter()
        .find(|p| p.id == object.id && p.bytes == object.bytes)
        .ok_or_else(|| fail("the checkpoint and recipe give no such object".into()))?;
    let ids = proposal_ids(artifact)?;
    let path = with_suffix(&options.artifact, ".repair");
    let io = |action, source| ConvertError::Io { path: path.clone(), action, source };
    let file = FileOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .open(&path)
        .map_err(|e| io("create", e))?;
    let file = Mutex::new(file);
    let notes = Notes::default();
    let fill = Fill {
        sources: plan.sources(),
        proposal: &ids,
        interrupt,
        pool,
        step: step_bytes(options.threads),
        notes: &notes,
    };
    let result = fill.object(planned, &FileSink(&file, &path)).and_then(|()| {
        let mut file = file.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
        repair_object(artifact, object, |offset, out| {
            file.seek(SeekFrom::Start(offset))
                .and_then(|_| file.read_exact(out))
                .map_err(|source| ArtifactError::Io { path: path.clone(), action: "read", source })
        })?;
        Ok(())
    });
    std::fs::remove_file(&path).map_err(|e| io("remove", e))?;
    result
}

/// Token ids as the artifact has them.
fn proposal_ids(artifact: &Artifact) -> Result<Vec<u32>, ConvertError> {
    let Some(binding) = artifact.directory().bindings.get("proposal/token_ids") else {
        return Ok(Vec::new());
    };
    let mut ids = Vec::new();
    for id in binding.objects() {
        let object = artifact.object(id)?;
        let mut bytes = vec![0; object.bytes as usize];
        artifact.read_at(object.offset, &mut bytes)?;
        ids.extend(bytes.as_chunks::<4>().0.iter().map(|w| u32::from_le_bytes(*w)));
    }
    // Damaged ids give rows that hash to something else; out of range they would not even be read.
    Ok(ids)
}

/// Rewrites the rows of the volume that differ from the checkpoint's.
fn rows(
    options: &RepairOptions,
    artifact: &Artifact,
    plan: &Plan,
    progress: &dyn Progress,
    interrupt: &Interrupt,
    report: &mut RepairReport,
) -> Result<(), ConvertError> {
    let fail = |reason: String| ConvertError::Verify { path: options.artifact.clone(), reason };
    let (Some(table), Some(ngram)) = (NgramTable::of(artifact.directory()).map_err(fail)?, &plan.ngram)
    else {
        return Ok(());
    };
    let path = locate(artifact.path(), options.ngram.as_deref(), table.volume_id)?.path;
    let volume = Volume::open(&path)?;
    progress.begin("n-gram digest", volume.geometry().file_bytes());
    let found = volume.verify(interrupt, |bytes| progress.advance(bytes))?;
    progress.end();
    if found.is_ok() {
        return Ok(());
    }
    let g = *volume.geometry();
    if g.rows != ngram.rows || u64::from(g.row_bytes) != ngram.row_bytes {
        return Err(fail(format!("{}: its rows are not those of the checkpoint", path.display())));
    }
    let file = FileOptions::new().write(true).open(&path).map_err(|source| ConvertError::Io {
        path: path.clone(),
        action: "open for repair",
        source,
    })?;
    let reader = TableReader::new(ngram, plan.sources())?;
    let rpb = u64::from(g.rows_per_block);
    let batch = (step_bytes(options.threads) / crate::ngram::BLOCK_BYTES).max(1) * rpb;
    let (mut rows, mut scratch, mut block) = (Vec::new(), Vec::new(), Vec::new());
    progress.begin("n-gram rows", g.rows * u64::from(g.row_bytes));
    let mut row = 0;
    let mut source = FileOptions::new().read(true).open(&path).map_err(|source| ConvertError::Io {
        path: path.clone(),
        action: "open",
        source,
    })?;
    let mut file = file;
    while row < g.rows {
        interrupt.check()?;
        let end = g.rows.min(row + batch);
        reader.read(row..end, &mut rows, &mut scratch)?;
        let width = g.row_bytes as usize;
        for (b, expected) in rows.chunks(width * rpb as usize).enumerate() {
            let first = row + b as u64 * rpb;
            let Some(at) = g.row_offset(first) else { break };
            block.resize(crate::ngram::BLOCK_BYTES as usize, 0);
            let io = |action| {
                let path = path.clone();
                move |source| ConvertError::Io { path, action, source }
            };
            source
                .seek(SeekFrom::Start(at))
                .and_then(|_| source.read_exact(&mut block))
                .map_err(io("read"))?;
            let right =
                &block[..expected.len()] == expected && block[expected.len()..].iter().all(|b| *b == 0);
            if !right {
                let wrong = block.chunks(width).zip(expected.chunks(width)).filter(|(a, b)| a != b).count();
                report.repaired_rows += wrong as u64;
                block[..expected.len()].copy_from_slice(expected);
                block[expected.len()..].fill(0);
                file.seek(SeekFrom::Start(at)).and_then(|_| file.write_all(&block)).map_err(io("write"))?;
            }
        }
        progress.advance(rows.len() as u64);
        row = end;
    }
    progress.end();
    file.sync_all().map_err(|source| ConvertError::Io { path: path.clone(), action: "sync", source })?;
    let again = volume.verify(interrupt, |_| {})?;
    report.problems.extend(again.problems.iter().map(|p| format!("{}: {p}", path.display())));
    Ok(())
}
