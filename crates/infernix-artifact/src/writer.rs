//! Streaming objects into the sparse files of the state folder.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::{Value, json};

use crate::digest::ObjectDigests;
use crate::draft::{PlannedFile, mask};
use crate::framing::{HEADER_BYTES, check_part};
use crate::io::{
    CHUNK, Faults, Interrupt, Io, allocated_bytes, available_bytes, drop_cache, file_name, folder_of, read_at,
};
use crate::state::State;
use crate::{Artifact, ArtifactError, ArtifactId, Digest, Directory, JournalKey, Layouted, Object, Result};

/// Whether existing state is continued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resume {
    /// Existing state is an error that names both ways out.
    No,
    /// Existing state is continued, a finished identical set is reported as complete, and without either the run
    /// starts afresh.
    Yes,
}

/// How to write.
#[derive(Clone, Debug)]
pub struct WriterOptions {
    /// Looked at between chunks.
    pub interrupt: Interrupt,
    /// Finished objects are synced and journalled once this much data has gathered.
    pub checkpoint_bytes: u64,
    /// Bytes that others will write to the same device (volume, report); part of the free-space check.
    pub extra_bytes: u64,
    /// Test hook.
    pub faults: Option<Arc<Faults>>,
    /// Sync data and folders. Only tests that care for nothing but the order of operations turn it off.
    pub durable: bool,
}

impl Default for WriterOptions {
    fn default() -> Self {
        // 64 MiB between syncs, as the published writer has it: small enough for a low count of dirty pages.
        Self {
            interrupt: Interrupt::default(),
            checkpoint_bytes: 64 << 20,
            extra_bytes: 0,
            faults: None,
            durable: true,
        }
    }
}

impl WriterOptions {
    pub(crate) fn io(&self) -> Io {
        Io { interrupt: self.interrupt.clone(), faults: self.faults.clone(), durable: self.durable }
    }
}

/// What [`Writer::open`] finds.
#[derive(Debug)]
pub enum Start {
    /// Objects are to be written; see [`Writer::is_done`] for those that are not.
    Writer(Box<Writer>),
    /// The identical set is already published.
    Complete(Box<Artifact>),
}

/// A file of the set while it is being written.
#[derive(Debug)]
pub(crate) struct OutFile {
    pub(crate) plan: PlannedFile,
    /// First byte of its payload in the logical payload.
    pub(crate) logical_start: u64,
    pub(crate) temporary: PathBuf,
    pub(crate) target: PathBuf,
    /// `None` once an earlier run has published it.
    pub(crate) file: Option<File>,
}

/// Progress of one object.
#[derive(Debug, Default)]
struct Progress {
    /// Disjoint, non-adjacent written ranges: start to end.
    written: BTreeMap<u64, u64>,
    /// Digest of the prefix that was written in order.
    hasher: blake3::Hasher,
    hashed: u64,
    digest: Option<Digest>,
}

/// Objects finished but not journalled yet.
#[derive(Debug, Default)]
struct Pending {
    objects: Vec<(usize, Digest)>,
    bytes: u64,
}

/// Writes the objects of one set. Shared by the workers: objects may be written in parallel, and so may ranges of one.
#[derive(Debug)]
pub struct Writer {
    pub(crate) out: PathBuf,
    pub(crate) directory: Directory,
    pub(crate) json_bytes: u64,
    pub(crate) late: Vec<String>,
    pub(crate) late_values: Mutex<HashMap<String, String>>,
    pub(crate) files: Vec<OutFile>,
    pub(crate) state: Arc<State>,
    pub(crate) io: Io,
    /// Set when an earlier run had begun to publish.
    pub(crate) publishing: Option<ArtifactId>,
    index: HashMap<String, usize>,
    progress: Vec<Mutex<Progress>>,
    pending: Mutex<Pending>,
    checkpoint_bytes: u64,
    written_bytes: AtomicU64,
    resumed_bytes: u64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Writer {
    /// Starts or resumes writing `plan` to the entry `out` (whose name the plan was laid out for).
    ///
    /// # Errors
    /// Existing output or state, state of other inputs, a held lock, too little free space.
    pub fn open(
        out: &Path,
        plan: Layouted,
        key: &JournalKey,
        resume: Resume,
        options: &WriterOptions,
    ) -> Result<Start> {
        if plan.files().first().map(|file| file.name.as_str()) != Some(file_name(out)?) {
            return Err(ArtifactError::Invalid(format!(
                "{}: the plan was laid out for another name",
                out.display()
            )));
        }
        let io = options.io();
        if out.symlink_metadata().is_ok() {
            return complete(out, &plan, resume, &io);
        }
        let plan_digest = plan.plan_digest().to_string();
        let (directory, json_bytes, plans, late) = plan.into_parts();
        if resume == Resume::No && !crate::state_folder(out).exists() {
            refuse_existing(out, &plans)?;
        }
        let (state, lines) = State::open(out, key, resume, io.clone())?;
        let index: HashMap<String, usize> =
            directory.objects.iter().enumerate().map(|(i, object)| (object.id.clone(), i)).collect();
        let mut done = HashMap::new();
        let (mut recorded, mut publishing) = (None, None);
        for line in &lines {
            let text = |key: &str| line.get(key).and_then(Value::as_str);
            if let Some(plan) = text("plan") {
                recorded = Some(plan.to_owned());
            } else if let (Some(id), Some(digest)) = (text("object"), text("digest")) {
                let entry = index.get(id).zip(digest.parse::<Digest>().ok());
                let (&i, digest) = entry.ok_or_else(|| damaged(&state, format!("unknown object {id:?}")))?;
                done.insert(i, digest);
            } else if let Some(id) = text("publish") {
                publishing = Some(id.parse().map_err(|reason| damaged(&state, reason))?);
            } else {
                return Err(damaged(&state, format!("unknown journal line {line:.80}")));
            }
        }
        match recorded {
            None => {
                refuse_existing(out, &plans)?;
                state.append(&[json!({ "plan": plan_digest })])?;
            }
            Some(recorded) if recorded != plan_digest => {
                let (name, path) = ("the plan of objects and files".to_owned(), state.folder.clone());
                return Err(ArtifactError::StateDiffers { path, name, recorded, now: plan_digest });
            }
            Some(_) => {}
        }
        let files = open_files(out, plans, &state, publishing, options.extra_bytes, !done.is_empty())?;
        let mut resumed_bytes = 0;
        let progress = directory.objects.iter().enumerate().map(|(i, object)| {
            let digest = done.get(&i).copied();
            resumed_bytes += if digest.is_some() { object.bytes } else { 0 };
            Mutex::new(Progress { digest, ..Progress::default() })
        });
        let progress = progress.collect();
        Ok(Start::Writer(Box::new(Self {
            out: out.to_owned(),
            directory,
            json_bytes,
            late,
            late_values: Mutex::default(),
            files,
            state,
            io,
            publishing,
            index,
            progress,
            pending: Mutex::default(),
            checkpoint_bytes: options.checkpoint_bytes,
            written_bytes: AtomicU64::new(0),
            resumed_bytes,
        })))
    }

    /// The objects in payload order; their indices are what the other methods take.
    pub fn objects(&self) -> &[Object] {
        &self.directory.objects
    }

    /// Index of the object named `id`.
    pub fn object_index(&self, id: &str) -> Option<usize> {
        self.index.get(id).copied()
    }

    /// True when the object was finished, in this run or an earlier one.
    pub fn is_done(&self, object: usize) -> bool {
        self.digest(object).is_some()
    }

    /// Digest of a finished object.
    pub fn digest(&self, object: usize) -> Option<Digest> {
        lock(self.progress.get(object)?).digest
    }

    /// Digests of all finished objects.
    pub fn digests(&self) -> ObjectDigests {
        let pairs = self.directory.objects.iter().enumerate();
        pairs.filter_map(|(i, object)| Some((object.id.clone(), self.digest(i)?))).collect()
    }

    /// Bytes of the objects that an earlier run finished.
    pub fn resumed_bytes(&self) -> u64 {
        self.resumed_bytes
    }

    /// Bytes written by this run.
    pub fn written_bytes(&self) -> u64 {
        self.written_bytes.load(Ordering::Relaxed)
    }

    /// Fills in a string that the draft declared late. It must print as long as its placeholder.
    ///
    /// # Errors
    /// An undeclared pointer or another length.
    pub fn set_late(&self, pointer: &str, value: &str) -> Result<()> {
        let placeholder =
            self.directory.to_value().pointer(pointer).and_then(Value::as_str).map(str::to_owned);
        let length = |text: &str| crate::json::canonical(&Value::from(text)).len();
        match placeholder {
            Some(old) if self.late.iter().any(|p| p == pointer) && length(&old) == length(value) => {
                lock(&self.late_values).insert(pointer.to_owned(), value.to_owned());
                Ok(())
            }
            _ => Err(ArtifactError::Invalid(format!(
                "late value {pointer:?}: not declared by the draft, or not as long as its placeholder"
            ))),
        }
    }

    fn object(&self, object: usize) -> Result<(&Object, &Mutex<Progress>)> {
        let pair = self.directory.objects.get(object).zip(self.progress.get(object));
        pair.ok_or_else(|| ArtifactError::Invalid(format!("no object with index {object}")))
    }

    /// Writes `bytes` at `offset` within `object`. Ranges may come in any order and from several threads; those that
    /// come in order are hashed as they pass.
    ///
    /// # Errors
    /// A range beyond the object or written before, a full disk, an interruption.
    pub fn write(&self, object: usize, offset: u64, bytes: &[u8]) -> Result<()> {
        let (target, progress) = self.object(object)?;
        let end = offset.saturating_add(bytes.len() as u64);
        let fail = |reason: String| ArtifactError::Coverage { object: target.id.clone(), reason };
        if end > target.bytes {
            return Err(fail(format!("bytes {offset}..{end} are beyond its {} bytes", target.bytes)));
        }
        if bytes.is_empty() {
            return Ok(());
        }
        {
            let mut progress = lock(progress);
            if progress.digest.is_some() {
                return Err(fail("is finished already".into()));
            }
            cover(&mut progress.written, offset, end)
                .map_err(|(a, b)| fail(format!("bytes {offset}..{end} overlap {a}..{b} written before")))?;
            if progress.hashed == offset {
                progress.hasher.update(bytes);
                progress.hashed = end;
            }
        }
        let result = self.each_segment(target.offset + offset, bytes.len() as u64, |file, at, range| {
            let open = file
                .file
                .as_ref()
                .ok_or_else(|| damaged(&self.state, "a published part is written again"))?;
            self.io.write_at(open, &file.temporary, &bytes[range], at)
        });
        if result.is_err() {
            // What reached the disk is unknown: the object starts over.
            *lock(progress) = Progress::default();
        }
        result.map_err(|e| self.full(e))?;
        self.written_bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        Ok(())
    }

    /// Calls `f(file, offset in the file, range of the bytes)` for each file that a payload range touches.
    fn each_segment(
        &self,
        offset: u64,
        bytes: u64,
        mut f: impl FnMut(&OutFile, u64, std::ops::Range<usize>) -> Result<()>,
    ) -> Result<()> {
        for file in &self.files {
            let start = offset.max(file.logical_start);
            let stop = (offset + bytes).min(file.logical_start + file.plan.payload_bytes);
            if start < stop {
                let at = file.plan.payload_start + (start - file.logical_start);
                f(file, at, (start - offset) as usize..(stop - offset) as usize)?;
            }
        }
        Ok(())
    }

    /// Tells a full disk how much is missing.
    fn full(&self, error: ArtifactError) -> ArtifactError {
        match error {
            ArtifactError::DiskFull { path, available, .. } => {
                let total: u64 = self.files.iter().map(|file| file.plan.file_bytes).sum();
                let there: u64 = self.files.iter().filter_map(|f| f.file.as_ref()).map(allocated_bytes).sum();
                ArtifactError::DiskFull { path, needed: total.saturating_sub(there), available }
            }
            other => other,
        }
    }

    /// Declares `object` complete and returns its digest. What was not written in order is read back once.
    ///
    /// # Errors
    /// Missing bytes; I/O errors.
    pub fn finish(&self, object: usize) -> Result<Digest> {
        let (target, progress) = self.object(object)?;
        let mut progress = lock(progress);
        if let Some(digest) = progress.digest {
            return Ok(digest);
        }
        let whole = target.bytes == 0 || progress.written.get(&0) == Some(&target.bytes);
        if !whole {
            let gap = progress.written.get(&0).copied().unwrap_or(0);
            let reason = format!("was never written at byte {gap} of {}", target.bytes);
            return Err(ArtifactError::Coverage { object: target.id.clone(), reason });
        }
        let mut buffer = Vec::new();
        while progress.hashed < target.bytes {
            self.io.interrupt.check()?;
            let take = (target.bytes - progress.hashed).min(CHUNK as u64) as usize;
            buffer.resize(take, 0);
            self.each_segment(target.offset + progress.hashed, take as u64, |file, at, range| {
                match &file.file {
                    Some(open) => read_at(open, &file.temporary, &mut buffer[range], at),
                    None => Err(damaged(&self.state, "a published part is read again")),
                }
            })?;
            progress.hasher.update(&buffer);
            progress.hashed += take as u64;
        }
        let digest = Digest::from(progress.hasher.finalize());
        progress.digest = Some(digest);
        progress.written.clear();
        drop(progress);
        let full = {
            let mut pending = lock(&self.pending);
            pending.objects.push((object, digest));
            // Small objects count as a page, so that many of them are journalled in time too.
            pending.bytes += target.bytes.max(4096);
            pending.bytes >= self.checkpoint_bytes
        };
        if full {
            self.checkpoint()?;
        }
        Ok(digest)
    }

    /// Syncs the data of all finished objects, then journals them. Called by itself every
    /// [`WriterOptions::checkpoint_bytes`], and when the writer is dropped.
    ///
    /// # Errors
    /// I/O errors; the objects are then journalled by the next checkpoint.
    pub fn checkpoint(&self) -> Result<()> {
        let mut pending = lock(&self.pending);
        if pending.objects.is_empty() {
            return Ok(());
        }
        let mut touched = vec![false; self.files.len()];
        for &(object, _) in &pending.objects {
            let object = &self.directory.objects[object];
            for (flag, file) in touched.iter_mut().zip(&self.files) {
                *flag |= object.offset < file.logical_start + file.plan.payload_bytes
                    && object.end() > file.logical_start;
            }
        }
        for (_, out) in touched.iter().zip(&self.files).filter(|(touched, _)| **touched) {
            if let Some(file) = &out.file {
                self.io.sync(file, &out.temporary).map_err(|e| self.full(e))?;
            }
        }
        let lines: Vec<Value> = pending
            .objects
            .iter()
            .map(|&(i, digest)| json!({"object": self.directory.objects[i].id, "digest": digest.to_string()}))
            .collect();
        self.state.append(&lines)?;
        for &(object, _) in &pending.objects {
            let object = &self.directory.objects[object];
            self.each_segment(object.offset, object.bytes, |file, at, range| {
                file.file.iter().for_each(|open| drop_cache(open, at, range.len() as u64));
                Ok(())
            })?;
        }
        *pending = Pending::default();
        Ok(())
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        // Best effort: keeps what is finished when a run ends early. A failure costs only repeated work.
        let _ = self.checkpoint();
    }
}

pub(crate) fn damaged(state: &State, reason: impl Into<String>) -> ArtifactError {
    ArtifactError::StateDamaged { path: state.folder.clone(), reason: reason.into() }
}

/// Adds `start..end` to disjoint ranges, merging neighbours; the error is a range it overlaps.
fn cover(written: &mut BTreeMap<u64, u64>, mut start: u64, mut end: u64) -> Result<(), (u64, u64)> {
    if let Some((&a, &b)) = written.range(..end).next_back().filter(|(_, b)| **b > start) {
        return Err((a, b));
    }
    if let Some((&a, &b)) = written.range(..=start).next_back().filter(|(_, b)| **b == start) {
        written.remove(&a);
        (start, end) = (a, end.max(b));
    }
    if let Some(next) = written.remove(&end) {
        end = next;
    }
    written.insert(start, end);
    Ok(())
}

/// The entry exists: complete and identical, or in the way.
fn complete(out: &Path, plan: &Layouted, resume: Resume, io: &Io) -> Result<Start> {
    if resume == Resume::Yes
        && let Ok(artifact) = Artifact::open(out)
        && mask(artifact.directory(), plan.late()) == mask(plan.directory(), plan.late())
    {
        // A run that ended right after publishing the entry leaves its folder.
        if crate::clean(out)? {
            io.sync_folder(folder_of(out))?;
        }
        return Ok(Start::Complete(Box::new(artifact)));
    }
    Err(ArtifactError::OutputExists { path: out.to_owned() })
}

pub(crate) fn report_path(out: &Path) -> PathBuf {
    crate::io::with_suffix(out, ".conversion.json")
}

fn refuse_existing(out: &Path, plans: &[PlannedFile]) -> Result<()> {
    let paths = plans.iter().map(|plan| folder_of(out).join(&plan.name)).chain([report_path(out)]);
    match paths.into_iter().find(|path| path.symlink_metadata().is_ok()) {
        Some(path) => Err(ArtifactError::OutputExists { path }),
        None => Ok(()),
    }
}

/// Creates or reopens the sparse files, after checking the free space for what they still lack.
fn open_files(
    out: &Path,
    plans: Vec<PlannedFile>,
    state: &State,
    publishing: Option<ArtifactId>,
    extra: u64,
    some_done: bool,
) -> Result<Vec<OutFile>> {
    let mut files: Vec<OutFile> = Vec::with_capacity(plans.len());
    let (mut logical_start, mut needed) = (0, extra);
    for (index, plan) in plans.into_iter().enumerate() {
        let name = if index == 0 { "entry".to_owned() } else { format!("part-{index:04}") };
        let (temporary, target) = (state.folder.join(name), folder_of(out).join(&plan.name));
        let file = if temporary.exists() {
            Some(state.io.open_rw(&temporary)?)
        } else if let Some(id) = publishing.filter(|_| index > 0) {
            check_published(&target, &plan, index as u64, id)?;
            None
        } else if some_done {
            return Err(damaged(state, format!("{} is gone", temporary.display())));
        } else {
            Some(state.io.open_rw(&temporary)?)
        };
        needed += file.as_ref().map_or(0, |file| plan.file_bytes.saturating_sub(allocated_bytes(file)));
        let payload_bytes = plan.payload_bytes;
        files.push(OutFile { plan, logical_start, temporary, target, file });
        logical_start += payload_bytes;
    }
    let available = available_bytes(out).map_err(|e| ArtifactError::io(out, "ask for free space at", e))?;
    if needed > available {
        return Err(ArtifactError::DiskFull { path: folder_of(out).to_owned(), needed, available });
    }
    for out in &files {
        if let Some(file) = &out.file {
            state.io.set_len(file, &out.temporary, out.plan.file_bytes)?;
        }
    }
    state.io.sync_folder(&state.folder)?;
    Ok(files)
}

/// A part that an earlier run published must be the one it wrote.
fn check_published(path: &Path, plan: &PlannedFile, index: u64, id: ArtifactId) -> Result<()> {
    let file = File::open(path).map_err(|e| ArtifactError::io(path, "open", e))?;
    let found = file.metadata().map_err(|e| ArtifactError::io(path, "look at", e))?.len();
    if found != plan.file_bytes {
        let hint = "it was published by the run that is being resumed and changed since";
        return Err(ArtifactError::Length { path: path.to_owned(), expected: plan.file_bytes, found, hint });
    }
    let mut head = [0; HEADER_BYTES as usize];
    read_at(&file, path, &mut head, 0)?;
    check_part(path, &head, index, id)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn coverage_equals_a_bitmap(ranges in proptest::collection::vec((0u64..40, 1u64..8), 0..30)) {
            let (mut map, mut bits) = (BTreeMap::new(), [false; 64]);
            for (start, length) in ranges {
                let end = start + length;
                let slots = &mut bits[start as usize..end as usize];
                let free = slots.iter().all(|b| !b);
                prop_assert_eq!(cover(&mut map, start, end).is_ok(), free);
                if free {
                    slots.fill(true);
                }
                let runs: u64 = map.iter().map(|(a, b)| b - a).sum();
                prop_assert_eq!(runs, bits.iter().filter(|b| **b).count() as u64);
                prop_assert!(map.iter().zip(map.iter().skip(1)).all(|((_, end), (next, _))| end < next));
            }
        }
    }
}
