//! Carrying an export out: files grow in a state folder, tensor by tensor, and are published at once.

use std::time::Instant;

use infernix_artifact::{ArtifactError, JournalKey, Resume, WorkFile, Workplace, state_folder};
use serde_json::{Value, json};

use super::read::Reader;
use super::{ExportPlan, ExportTarget, OutFile};
use crate::ConvertError;
use crate::exec::RunOptions;
use crate::progress::Progress;

/// Data written between two syncs; what an interruption costs at most, beside the tensor at hand.
const CHECKPOINT: u64 = 256 << 20;

/// What an export did.
#[derive(Debug, Clone)]
pub struct ExportOutcome {
    /// Files written, or found complete.
    pub files: Vec<(std::path::PathBuf, u64)>,
    /// True when the export was there already and nothing was done.
    pub complete: bool,
    /// Bytes that an earlier run had finished and that were not read again.
    pub resumed_bytes: u64,
    /// Time taken.
    pub seconds: f64,
}

impl ExportOutcome {
    /// The members that a real run adds to [`ExportPlan::to_json`].
    #[must_use]
    pub fn to_json(&self, plan: &ExportPlan) -> Value {
        let mut value = plan.to_json();
        value["complete"] = json!(self.complete);
        value["resumed_bytes"] = json!(self.resumed_bytes);
        value["seconds"] = json!(self.seconds);
        value
    }
}

/// What a resumed run must share with the first.
fn key(plan: &ExportPlan) -> JournalKey {
    let layout: Vec<_> = plan.files().collect();
    let layout = serde_json::to_vec(&layout).unwrap_or_default();
    let volume = plan.volume.as_ref().map_or("none".to_owned(), |v| v.header().id.to_string());
    JournalKey::new()
        .with("program", env!("CARGO_PKG_VERSION"))
        .with("artifact", plan.artifact.artifact_id().to_string())
        .with("--to", plan.options.target.name())
        .with("--components", plan.components.iter().map(|c| c.name()).collect::<Vec<_>>().join(","))
        .with("--shard-size", plan.options.shard_bytes.to_string())
        .with("n-gram volume", volume)
        .with("files", blake3::hash(&layout).to_hex().to_string())
}

/// Where a file ends up.
fn place(plan: &ExportPlan, file: &OutFile) -> std::path::PathBuf {
    match plan.options.target {
        ExportTarget::Safetensors => plan.options.output.join(&file.name),
        ExportTarget::Gguf => plan.options.output.with_file_name(&file.name),
    }
}

/// Carries out a plan. Files are checked while they are read only where the artifact's words are decoded: run `verify`
/// first where the artifact may be damaged.
///
/// # Errors
/// Existing output or foreign state, a full disk, an interruption. State stays resumable.
pub fn export(
    plan: &ExportPlan,
    progress: &dyn Progress,
    run: &RunOptions,
) -> Result<ExportOutcome, ConvertError> {
    let started = Instant::now();
    let (output, state) = (&plan.options.output, state_folder(&plan.options.output));
    let files: Vec<_> = plan.files.iter().map(|f| (place(plan, f), f.len())).collect();
    let done = |complete, resumed_bytes| ExportOutcome {
        files: files.clone(),
        complete,
        resumed_bytes,
        seconds: started.elapsed().as_secs_f64(),
    };
    let same = || files.iter().all(|(p, n)| p.metadata().is_ok_and(|m| m.is_file() && m.len() == *n));
    if plan.options.resume && state.exists() && !Workplace::output_of(output).exists() && same() {
        // Everything was published; only the state was left to be removed.
        infernix_artifact::clean(output)?;
        return Ok(done(true, plan.bytes()));
    }
    if !state.exists() {
        let there: Vec<_> = match plan.options.target {
            ExportTarget::Safetensors => vec![output.clone()],
            ExportTarget::Gguf => files.iter().map(|f| f.0.clone()).collect(),
        };
        if let Some(path) = there.into_iter().find(|p| p.symlink_metadata().is_ok()) {
            if plan.options.resume && same() {
                return Ok(done(true, plan.bytes()));
            }
            return Err(ArtifactError::OutputExists { path }.into());
        }
    }
    let resume = if plan.options.resume { Resume::Yes } else { Resume::No };
    let work =
        Workplace::open(output, &key(plan), resume, run.interrupt.clone(), run.faults.clone(), run.durable)?;
    let publishing = work.lines().iter().any(|l| l.get("publish").is_some());
    // Where publication has begun, every file is finished.
    let mut resumed = plan.bytes();
    if !publishing {
        work.check_space(plan.bytes() + (1 << 20))?;
        let finished = |name: &str| {
            let lines = work.lines().iter().filter(|l| l["object"] == name);
            lines.filter_map(|l| Some((l["tensors"].as_u64()?, l["bytes"].as_u64()?))).next_back()
        };
        let starts: Vec<(u64, u64)> =
            plan.files.iter().map(|f| finished(&f.name).unwrap_or((0, 0))).collect();
        resumed = starts.iter().map(|s| s.1).sum();
        progress.begin("export", plan.bytes() - resumed);
        let mut reader = Reader::new(&plan.artifact, plan.volume.as_ref(), &run.interrupt);
        for (file, start) in plan.files.iter().zip(starts) {
            write(file, start, &work, &mut reader, progress)?;
        }
        plan.artifact.check_unchanged()?;
        progress.end();
        work.append(&[json!({"publish": plan.artifact.artifact_id().to_string()})])?;
    }
    match plan.options.target {
        ExportTarget::Safetensors => work.publish_folder(output)?,
        ExportTarget::Gguf => {
            // The first part last: a reader that finds it finds the others.
            let names: Vec<String> = plan.files.iter().rev().map(|f| f.name.clone()).collect();
            let folder = output.parent().filter(|p| !p.as_os_str().is_empty());
            let (tower, parts): (Vec<_>, Vec<_>) = names.into_iter().partition(|n| n.starts_with("mmproj-"));
            let names: Vec<String> = tower.into_iter().chain(parts).collect();
            work.publish_files(folder.unwrap_or(std::path::Path::new(".")), &names)?;
        }
    }
    Ok(done(false, resumed))
}

/// Writes a file from its first tensor that is not finished.
fn write(
    file: &OutFile,
    (finished, kept): (u64, u64),
    work: &Workplace,
    reader: &mut Reader<'_>,
    progress: &dyn Progress,
) -> Result<(), ConvertError> {
    let out = work.file(&file.name, kept)?;
    let mut at = kept;
    if at == 0 {
        out.write_at(&file.head, 0)?;
        at = file.head.len() as u64;
        progress.advance(at);
    }
    let mut synced = kept;
    let mut buffer = Vec::new();
    for (n, t) in (0..).zip(&file.tensors).skip(finished as usize) {
        let end = at + buffer.len() as u64 + t.bytes;
        t.content.produce(reader, &mut |bytes| {
            buffer.extend_from_slice(bytes);
            progress.advance(bytes.len() as u64);
            // Small tensors are gathered: a shard has a hundred thousand of them.
            if buffer.len() >= super::STEP as usize {
                flush(&out, &mut buffer, &mut at)?;
            }
            Ok(())
        })?;
        let found = at + buffer.len() as u64;
        if found != end {
            return Err(ConvertError::Export {
                path: reader.artifact.path().to_owned(),
                reason: format!("{}: {} bytes were made, {} planned", t.name, found + t.bytes - end, t.bytes),
            });
        }
        buffer.resize(buffer.len() + (t.bytes.next_multiple_of(file.align) - t.bytes) as usize, 0);
        if at + buffer.len() as u64 - synced >= CHECKPOINT {
            flush(&out, &mut buffer, &mut at)?;
            out.sync()?;
            work.append(&[json!({"object": file.name, "tensors": n + 1, "bytes": at})])?;
            synced = at;
        }
    }
    flush(&out, &mut buffer, &mut at)?;
    out.sync()?;
    if synced != at {
        work.append(&[json!({"object": file.name, "tensors": file.tensors.len(), "bytes": at})])?;
    }
    Ok(())
}

fn flush(out: &WorkFile, buffer: &mut Vec<u8>, at: &mut u64) -> Result<(), ConvertError> {
    out.write_at(buffer, *at)?;
    *at += buffer.len() as u64;
    buffer.clear();
    Ok(())
}
