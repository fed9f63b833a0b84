//! Carrying a plan out: workers stream objects into the artifact's writer, the table into the volume, then everything
//! is published at once.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::sync_channel;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use infernix_artifact::ngram::{Geometry, Volume, VolumeSpec, VolumeWriter};
use infernix_artifact::{
    ArtifactId, Digest, Faults, Interrupt, JournalKey, PublishOptions, Resume, Start, Writer, WriterOptions,
};
use serde_json::{Value, json};
use std::sync::Arc;

use crate::ConvertError;
use crate::error::list;
use crate::fill::{Fill, Notes, Sink};
use crate::ngram::{NgramPlan, TableReader};
use crate::plan::Plan;
use crate::progress::Progress;
use crate::proposal::{Ranking, Vocabulary, counts};
use crate::resources::VOLUME_ID;

/// Rows of an adopted volume that are compared with the checkpoint before anything is written.
const REUSE_SAMPLES: u64 = 512;

/// Bytes per step of a worker: a few big reads, smaller where there are many workers.
pub(crate) fn step_bytes(threads: usize) -> u64 {
    (64u64 << 20).div_ceil(threads.max(1) as u64).clamp(1 << 20, 8 << 20)
}

/// Buffer bytes of one worker: source, packed and held-back planes.
pub(crate) fn worker_bytes(threads: usize) -> u64 {
    4 * step_bytes(threads) + (24 << 20)
}

/// Threads for re-encoding, beside the workers that read and write.
pub(crate) fn thread_pool(threads: usize) -> Result<rayon::ThreadPool, ConvertError> {
    rayon::ThreadPoolBuilder::new()
        .num_threads(threads.max(1))
        .build()
        .map_err(|e| ConvertError::Option(format!("--threads {threads}: {e}")))
}

/// Hooks of a run that are not part of the plan.
#[derive(Debug, Clone, Default)]
pub struct RunOptions {
    /// Stops the run when set; state stays resumable.
    pub interrupt: Interrupt,
    /// Test hook that plays `kill -9`.
    pub faults: Option<Arc<Faults>>,
    /// Sync data and folders; only tests turn it off.
    pub durable: bool,
}

impl RunOptions {
    /// A durable run that stops when `interrupt` says so.
    #[must_use]
    pub fn new(interrupt: Interrupt) -> Self {
        Self { interrupt, faults: None, durable: true }
    }
}

/// What a conversion did.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// Identity of the artifact.
    pub artifact_id: ArtifactId,
    /// The digest to quote.
    pub digest: Digest,
    /// Files of the artifact with their lengths, entry first.
    pub files: Vec<(std::path::PathBuf, u64)>,
    /// The volume, written or reused.
    pub volume: Option<std::path::PathBuf>,
    /// The report.
    pub report: Option<std::path::PathBuf>,
    /// True when an identical set was complete already and nothing was done.
    pub complete: bool,
    /// Bytes that an earlier run had finished.
    pub resumed_bytes: u64,
    /// Time of the conversion without checksums.
    pub seconds: f64,
    /// Time of `SHA256SUMS`.
    pub checksum_seconds: f64,
    /// What is odd but was stored as it is (NaN words).
    pub warnings: Vec<String>,
}

impl Outcome {
    /// The members that a real run adds to [`Plan::to_json`].
    #[must_use]
    pub fn to_json(&self, plan: &Plan) -> Value {
        let mut value = plan.to_json();
        value["artifact_id"] = json!(self.artifact_id.to_string());
        value["digest"] = json!(self.digest.to_string());
        value["seconds"] = json!(self.seconds);
        value["checksum_seconds"] = json!(self.checksum_seconds);
        value["resumed_bytes"] = json!(self.resumed_bytes);
        value["complete"] = json!(self.complete);
        if let Some(warnings) = value["warnings"].as_array_mut() {
            warnings.extend(self.warnings.iter().map(|w| json!(w)));
        }
        value
    }
}

struct WriterSink<'a> {
    writer: &'a Writer,
    index: usize,
    progress: &'a dyn Progress,
}

impl Sink for WriterSink<'_> {
    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), ConvertError> {
        self.writer.write(self.index, offset, bytes)?;
        self.progress.advance(bytes.len() as u64);
        Ok(())
    }
}

/// Token ids of the plan's proposal head; empty without one.
pub(crate) fn proposal_ids(plan: &Plan) -> Result<Vec<u32>, ConvertError> {
    let Some(options) = &plan.options.proposal else { return Ok(Vec::new()) };
    let Some(object) = plan.objects.iter().find(|o| matches!(o.content, crate::plan::Content::ProposalIds))
    else {
        return Ok(Vec::new());
    };
    if options.ranking == Ranking::Absent {
        let reason = "no ranking was given; pass --ranking FILE or --ranking-text FILE".into();
        return Err(ConvertError::Proposal { reason });
    }
    let list = plan.sources.list();
    let source = list.iter().find(|s| s.spec.role == "resources").unwrap_or(plan.sources.main());
    let vocabulary = Vocabulary::read(&source.checkpoint)?
        .ok_or_else(|| ConvertError::Proposal { reason: "there is no tokenizer.json".into() })?;
    let vocab = plan.config.as_ref().map_or(0, |c| c.vocab);
    let counts = counts(&options.ranking, vocab)?.unwrap_or_default();
    let ids = vocabulary.select(object.shape[0], &counts)?;
    if let Some(id) = ids.iter().find(|id| u64::from(**id) >= vocab) {
        let reason = format!("token {id} has no row in a vocabulary of {vocab}");
        return Err(ConvertError::Proposal { reason });
    }
    Ok(ids)
}

/// Carries out a plan.
///
/// # Errors
/// Missing tensors or data, words without a value, existing output or foreign state, a full disk, an interruption.
/// State stays resumable wherever that makes sense.
pub fn convert(plan: &Plan, progress: &dyn Progress, run: &RunOptions) -> Result<Outcome, ConvertError> {
    let started = Instant::now();
    if !plan.missing.is_empty() {
        return Err(ConvertError::MissingTensors {
            count: plan.missing.len(),
            names: list(plan.missing.iter().map(String::as_str)),
        });
    }
    if let (Some(ngram), Some(config)) = (&plan.ngram, &plan.config) {
        ngram.check_buffers(&plan.sources, config)?;
    }
    let ids = proposal_ids(plan)?;
    let reuse = match &plan.ngram {
        Some(ngram) => ngram.reuse.as_ref().map(|path| adopt(ngram, path, plan)).transpose()?,
        None => None,
    };
    let options = WriterOptions {
        interrupt: run.interrupt.clone(),
        extra_bytes: plan.ngram.as_ref().filter(|n| n.reuse.is_none()).map_or(0, |n| n.bytes),
        faults: run.faults.clone(),
        durable: run.durable,
        ..WriterOptions::default()
    };
    let resume = if plan.options.resume { Resume::Yes } else { Resume::No };
    let log = DigestLog::open(plan)?;
    let key = journal_key(plan, &ids);
    let writer = match Writer::open(&plan.options.output, plan.layouted.clone(), &key, resume, &options)? {
        Start::Writer(writer) => writer,
        Start::Complete(artifact) => return complete(plan, &artifact, started),
    };
    let volume = match &plan.ngram {
        Some(ngram) if reuse.is_none() => {
            let spec = spec(ngram, plan)?;
            let rows = TableReader::new(ngram, &plan.sources)?;
            Some(writer.volume_observed(&ngram.path, spec, &mut |first, bytes| rows.note(first, bytes))?)
        }
        _ => None,
    };
    let volume_resumed = volume.as_ref().map_or(0, VolumeWriter::resumed_bytes);
    let todo: Vec<usize> = (0..plan.objects.len()).filter(|&i| !writer.is_done(i)).collect();
    let object_bytes: u64 = todo.iter().map(|&i| plan.objects[i].bytes).sum();
    let row_bytes = match (&volume, &plan.ngram) {
        (Some(v), Some(n)) => (n.rows - v.rows_done()) * n.row_bytes,
        _ => 0,
    };
    progress.begin("convert", object_bytes + row_bytes);
    let notes = Notes::default();
    let pool = thread_pool(plan.options.threads)?;
    let fill = Fill {
        sources: &plan.sources,
        proposal: &ids,
        interrupt: &run.interrupt,
        pool: &pool,
        step: step_bytes(plan.options.threads),
        notes: &notes,
    };
    let work = Work { plan, writer: &writer, fill: &fill, todo: &todo, progress, log: &log };
    let volume = work.run(volume)?;
    progress.end();

    let (mut volume, mut rows) = (volume, None);
    if let Some(volume) = &mut volume {
        let (id, _) = volume.finish()?;
        writer.set_late(VOLUME_ID, &id.to_string())?;
    } else if let Some((id, digest)) = reuse {
        writer.set_late(VOLUME_ID, &id.to_string())?;
        rows = Some(digest);
    }
    let seconds = started.elapsed().as_secs_f64();
    let warnings = notes.take();
    let resumed = writer.resumed_bytes() + volume_resumed;
    let digests = writer.digests();
    let proofs = crate::proof::proofs(plan)?;
    let report = |summary: &infernix_artifact::Summary| {
        crate::report::render(plan, summary, &digests, &proofs, seconds, resumed, &warnings)
    };
    progress.begin("checksums", 0);
    let publication = writer.publish(PublishOptions {
        volume,
        reused_rows: rows,
        report: Some(Box::new(report)),
        sha256sums: true,
    })?;
    progress.end();
    Ok(Outcome {
        artifact_id: publication.summary.artifact_id,
        digest: publication.summary.digest,
        files: publication.files.iter().map(|f| (f.path.clone(), f.bytes)).collect(),
        volume: plan.ngram.as_ref().map(|n| n.path.clone()),
        report: publication.report.clone(),
        complete: false,
        resumed_bytes: resumed,
        seconds,
        checksum_seconds: publication.sha256_time.as_secs_f64(),
        warnings,
    })
}

/// The outcome for a set that was finished before.
fn complete(
    plan: &Plan,
    artifact: &infernix_artifact::Artifact,
    started: Instant,
) -> Result<Outcome, ConvertError> {
    let directory = artifact.directory();
    let fail = |reason: String| ConvertError::Verify { path: artifact.path().to_owned(), reason };
    let integrity = infernix_artifact::digest::Integrity::of(directory).map_err(fail)?;
    let rows = match &plan.ngram {
        Some(ngram) => Volume::open(&ngram.path)?.header().extension.as_ref().map(|e| e.row_digest),
        None => None,
    };
    let digests = integrity.map(|i| i.objects).unwrap_or_default();
    Ok(Outcome {
        artifact_id: artifact.artifact_id(),
        digest: infernix_artifact::digest::quotable_digest(directory, &digests, rows),
        files: artifact
            .paths()
            .map(|p| (p.to_owned(), std::fs::metadata(p).map_or(0, |m| m.len())))
            .collect(),
        volume: plan.ngram.as_ref().map(|n| n.path.clone()),
        report: None,
        complete: true,
        resumed_bytes: directory.payload_bytes(),
        seconds: started.elapsed().as_secs_f64(),
        checksum_seconds: 0.0,
        warnings: Vec::new(),
    })
}

fn spec(ngram: &NgramPlan, plan: &Plan) -> Result<VolumeSpec, ConvertError> {
    let fail = |reason: String| ConvertError::Ngram { path: ngram.path.clone(), reason };
    let row_bytes = u32::try_from(ngram.row_bytes).map_err(|e| fail(e.to_string()))?;
    Ok(VolumeSpec {
        format: ngram.format.name().to_owned(),
        geometry: Geometry::new(ngram.rows, row_bytes).map_err(fail)?,
        scales: ngram.scale_words(&plan.sources)?,
    })
}

/// Checks an existing volume against the checkpoint and returns its id and row digest.
fn adopt(
    ngram: &NgramPlan,
    path: &std::path::Path,
    plan: &Plan,
) -> Result<(ArtifactId, Digest), ConvertError> {
    let volume = Volume::open(path)?;
    let fail = |reason: String| ConvertError::Ngram { path: path.to_owned(), reason };
    let spec = spec(ngram, plan)?;
    if volume.geometry() != &spec.geometry {
        let shape = |g: &Geometry| format!("{} rows of {} bytes", g.rows, g.row_bytes);
        let (found, expected) = (shape(volume.geometry()), shape(&spec.geometry));
        return Err(fail(format!(
            "holds {found}, the checkpoint has {expected}; it is another table's volume"
        )));
    }
    if let Some(extension) = &volume.header().extension {
        if extension.format != spec.format {
            return Err(fail(format!("holds {} rows, the checkpoint has {}", extension.format, spec.format)));
        }
        let bits = |scales: &[f32]| scales.iter().map(|s| s.to_bits()).collect::<Vec<_>>();
        if bits(&extension.scales) != bits(&spec.scales) {
            let list = |s: &[f32]| s.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            return Err(fail(format!(
                "has the scales {}, the checkpoint {}",
                list(&extension.scales),
                list(&spec.scales)
            )));
        }
    }
    let reader = TableReader::new(ngram, &plan.sources)?;
    let (mut rows, mut scratch) = (Vec::new(), Vec::new());
    for i in 0..=REUSE_SAMPLES {
        // Spread over the table, the last row included.
        let row = u64::try_from(u128::from(ngram.rows - 1) * u128::from(i) / u128::from(REUSE_SAMPLES))
            .unwrap_or(0);
        reader.read(row..row + 1, &mut rows, &mut scratch)?;
        if volume.row(row)? != rows {
            return Err(fail(format!(
                "row {row} is not the checkpoint's; write a volume of its own instead"
            )));
        }
    }
    let digest = match &volume.header().extension {
        Some(extension) => extension.row_digest,
        None => {
            let found = volume.verify(&Interrupt::default(), |_| {})?;
            found.row_digest.ok_or_else(|| fail("its rows have no digest".into()))?
        }
    };
    Ok((volume.header().id, digest))
}

/// What a resumed run must share with the first.
fn journal_key(plan: &Plan, ids: &[u32]) -> JournalKey {
    let o = &plan.options;
    let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect::<String>();
    let mut key = JournalKey::new()
        .with("program", env!("CARGO_PKG_VERSION"))
        .with("recipe", format!("{} {}", o.recipe.name, hex(&o.recipe.digest)))
        .with("encoder version", infernix_formats::ENCODER_VERSION.to_string())
        .with("--components", plan.components.iter().map(|c| c.name()).collect::<Vec<_>>().join(","))
        .with("--max-file-bytes", o.max_file_bytes.to_string())
        .with("--name", o.name.clone().unwrap_or_default())
        .with("proposal head", {
            let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
            format!("{} rows, {}", ids.len(), blake3::hash(&bytes).to_hex())
        })
        .with(
            "n-gram volume",
            match &plan.ngram {
                None => "none".to_owned(),
                Some(n) => {
                    let verb = if n.reuse.is_some() { "reuse" } else { "write" };
                    format!("{verb} {}", n.path.file_name().map(|n| n.to_string_lossy()).unwrap_or_default())
                }
            },
        );
    for s in plan.sources.list() {
        for f in s.checkpoint.shards().iter().filter(|f| f.indexed) {
            let time = f.modified.and_then(|t| t.duration_since(UNIX_EPOCH).ok()).map_or(0, |d| d.as_nanos());
            let value = format!("{} bytes, modified {time}, header {}", f.len, hex(&f.header_blake3));
            key.insert(format!("source {} {}", s.spec.role, f.name), value);
        }
    }
    key
}

/// Digests of the tensors of finished objects, so that a resumed run can report them without reading anything again.
struct DigestLog {
    path: std::path::PathBuf,
    file: Mutex<Option<std::fs::File>>,
}

impl DigestLog {
    /// Turns recording on, and takes the digests of an interrupted run.
    fn open(plan: &Plan) -> Result<Self, ConvertError> {
        let path =
            infernix_artifact::state_folder(&plan.options.output).join(infernix_artifact::SOURCE_DIGESTS);
        for source in plan.sources.list() {
            source.checkpoint.record_digests();
        }
        let text = if plan.options.resume {
            std::fs::read_to_string(&path).unwrap_or_default()
        } else {
            String::new()
        };
        // A torn last line has no end.
        for line in text.split_inclusive('\n').filter_map(|l| l.strip_suffix('\n')) {
            let mut parts = line.splitn(3, ' ');
            let (Some(role), Some(hex), Some(name)) = (parts.next(), parts.next(), parts.next()) else {
                continue;
            };
            let digest: Option<Vec<u8>> =
                (0..32).map(|i| u8::from_str_radix(hex.get(2 * i..2 * i + 2)?, 16).ok()).collect();
            let source = plan.sources.list().iter().find(|s| s.spec.role == role);
            if let (Some(source), Some(Ok(digest))) = (source, digest.map(<[u8; 32]>::try_from)) {
                source.checkpoint.restore_digest(name, digest);
            }
        }
        Ok(Self { path, file: Mutex::new(None) })
    }

    /// Writes down the digests of an object's tensors, before the object counts as done.
    fn add(&self, plan: &Plan, object: &crate::plan::PlannedObject) -> Result<(), ConvertError> {
        use std::io::Write as _;
        let fail = |source| ConvertError::Io { path: self.path.clone(), action: "write", source };
        let mut text = String::new();
        for (source, name) in crate::proof::tensors_of(plan, object)? {
            let source = &plan.sources.list()[source];
            let Some(info) = source.checkpoint.get(&name) else { continue };
            if let Some(digest) = source.checkpoint.digest(info) {
                let hex: String = digest.iter().map(|b| format!("{b:02x}")).collect();
                text += &format!("{} {hex} {name}\n", source.spec.role);
            }
        }
        let mut slot = self.file.lock().unwrap_or_else(|e| e.into_inner());
        if slot.is_none() {
            let file =
                std::fs::OpenOptions::new().create(true).append(true).open(&self.path).map_err(fail)?;
            *slot = Some(file);
        }
        slot.as_mut().map_or(Ok(()), |f| f.write_all(text.as_bytes())).map_err(fail)
    }
}

struct Work<'a> {
    plan: &'a Plan,
    writer: &'a Writer,
    fill: &'a Fill<'a>,
    todo: &'a [usize],
    progress: &'a dyn Progress,
    log: &'a DigestLog,
}

impl Work<'_> {
    /// Runs all workers to the end; returns the volume, complete but for its header.
    fn run(&self, volume: Option<VolumeWriter>) -> Result<Option<VolumeWriter>, ConvertError> {
        let threads = self.plan.options.threads.max(1);
        // Two at least, so that one reads while another writes.
        let workers = threads.max(2);
        let (next, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
        let failure: Mutex<Option<ConvertError>> = Mutex::new(None);
        let fail = |e: ConvertError| {
            stop.store(true, Ordering::Relaxed);
            if let Ok(mut slot) = failure.lock() {
                // What stopped first is the cause; interruptions of the others are its echo.
                if slot.as_ref().is_none_or(|old| old.is_interrupted() && !e.is_interrupted()) {
                    *slot = Some(e);
                }
            }
        };
        let volume = Mutex::new(volume);
        let table = || {
            let mut slot = volume.lock().ok()?;
            let volume = slot.as_mut()?;
            self.table(volume, &stop).err()
        };
        let objects = || {
            while !stop.load(Ordering::Relaxed) {
                let Some(&index) = self.todo.get(next.fetch_add(1, Ordering::Relaxed)) else { break };
                let sink = WriterSink { writer: self.writer, index, progress: self.progress };
                let object = &self.plan.objects[index];
                let done = self
                    .fill
                    .object(object, &sink)
                    .and_then(|()| self.log.add(self.plan, object))
                    .and_then(|()| Ok(self.writer.finish(index)?));
                if let Err(e) = done {
                    fail(e);
                }
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                if let Some(e) = table() {
                    fail(e);
                }
                objects();
            });
            for _ in 1..workers {
                scope.spawn(objects);
            }
        });
        match failure.into_inner() {
            Ok(Some(e)) => Err(e),
            _ => Ok(volume.into_inner().unwrap_or_default()),
        }
    }

    /// Streams the remaining rows: one thread reads and checks, this one pads, hashes and writes.
    fn table(&self, volume: &mut VolumeWriter, stop: &AtomicBool) -> Result<(), ConvertError> {
        let Some(ngram) = &self.plan.ngram else { return Ok(()) };
        let reader = TableReader::new(ngram, &self.plan.sources)?;
        let batch = (self.fill.step / ngram.row_bytes.max(1)).max(1);
        let first = volume.rows_done();
        std::thread::scope(|scope| {
            let (full, filled) = sync_channel::<Result<Vec<u8>, ConvertError>>(1);
            let (empty, emptied) = sync_channel::<Vec<u8>>(3);
            for _ in 0..3 {
                let _ = empty.send(Vec::new());
            }
            scope.spawn(move || {
                let mut scratch = Vec::new();
                let mut row = first;
                while row < ngram.rows {
                    let Ok(mut buffer) = emptied.recv() else { return };
                    let end = ngram.rows.min(row + batch);
                    let result = reader.read(row..end, &mut buffer, &mut scratch);
                    let failed = result.is_err();
                    if full.send(result.map(|()| buffer)).is_err() || failed {
                        return;
                    }
                    row = end;
                }
            });
            for rows in filled {
                let rows = rows?;
                self.fill.interrupt.check()?;
                if stop.load(Ordering::Relaxed) {
                    return Ok(());
                }
                volume.write_rows(&rows)?;
                self.progress.advance(rows.len() as u64);
                let _ = empty.send(rows);
            }
            Ok(())
        })
    }
}

/// Seconds since 1970, for reports.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}
