//! Integrity of a set: every byte is either hashed into a recorded digest, or has one legal value.
//!
//! Object bytes are compared with `provenance.integrity.objects`; the directory with its own digest and, so that no
//! spelling of the same JSON passes unnoticed, byte for byte with the writer's form; reserve, gaps and the rest of
//! part headers must be spaces or zeros. Memory is one chunk per thread.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::digest::{Integrity, ObjectDigests, artifact_id, directory_digest};
use crate::framing::{FRAME_ALIGNMENT, HEADER_BYTES};
use crate::io::{Interrupt, read_at};
use crate::{Artifact, ArtifactError, Digest, Object, Result};

/// Bytes a thread holds at a time.
const BLOCK: usize = 4 << 20;

/// How to verify.
#[derive(Default)]
pub struct VerifyOptions<'a> {
    /// Threads; 0 means as many as the process may use.
    pub threads: usize,
    /// Only the objects with these indices (gaps and headers are then left to the part of the job that starts at 0).
    pub objects: Option<Range<usize>>,
    /// Looked at between chunks.
    pub interrupt: Interrupt,
    /// Told the bytes of each chunk.
    pub progress: Option<&'a (dyn Fn(u64) + Sync)>,
}

/// Outcome for the digests as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DigestState {
    /// Recorded and all equal.
    Ok,
    /// Recorded and some differ, or some byte without digest is not what it must be.
    Mismatch,
    /// The writer of the set left none; lengths, headers and gaps were checked.
    Absent,
}

impl DigestState {
    /// `ok`, `mismatch`, `absent`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Mismatch => "mismatch",
            Self::Absent => "absent",
        }
    }
}

/// Something wrong outside the objects.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    /// File name.
    pub file: String,
    /// `directory`, `header`, `reserve`, `gap after "ID"`.
    pub place: String,
    /// What was found and expected.
    pub reason: String,
}

impl std::fmt::Display for Problem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}: {}", self.file, self.place, self.reason)
    }
}

/// What verification found.
#[derive(Clone, Debug)]
pub struct IntegrityReport {
    /// Outcome.
    pub state: DigestState,
    /// Ids of objects whose bytes do not hash to their record, in payload order.
    pub corrupt_objects: Vec<String>,
    /// Faults outside the objects.
    pub problems: Vec<Problem>,
    /// Digest of every object looked at.
    pub digests: ObjectDigests,
    /// Bytes read.
    pub bytes: u64,
}

impl IntegrityReport {
    /// True when nothing is wrong; absent digests are not wrong.
    pub fn is_ok(&self) -> bool {
        self.state != DigestState::Mismatch
    }
}

impl Artifact {
    /// Verifies the set.
    ///
    /// # Errors
    /// I/O errors and an interruption; whatever is wrong with the bytes is in the report.
    pub fn verify_integrity(&self, options: &VerifyOptions<'_>) -> Result<IntegrityReport> {
        let directory = self.directory();
        let count = directory.objects.len();
        let range = options.objects.clone().unwrap_or(0..count);
        let range = range.start.min(count)..range.end.min(count);
        let entry = name_of(self, 0);
        let mut problems = Vec::new();
        let integrity = match Integrity::of(directory) {
            Ok(None) if self.artifact_id().0[6] >> 4 == 8 => {
                // One changed letter in "integrity" must not turn a signed set into one without digests. Other writers
                // use random ids (UUID version 4).
                let reason =
                    "the artifact id is made of digests, but /provenance/integrity is missing".into();
                problems.push(Problem { file: entry.clone(), place: "directory".into(), reason });
                None
            }
            Ok(integrity) => integrity,
            Err(reason) => {
                problems.push(Problem { file: entry.clone(), place: "directory".into(), reason });
                None
            }
        };
        let digests = self.hash_objects(range.clone(), options)?;
        let mut corrupt_objects = Vec::new();
        if let Some(integrity) = &integrity {
            for object in &directory.objects[range.clone()] {
                if digests.get(&object.id) != integrity.objects.get(&object.id) {
                    corrupt_objects.push(object.id.clone());
                }
            }
            let found = directory_digest(directory, self.artifact_id());
            if found != integrity.directory {
                // The damage may sit in the recorded digests themselves: where the digests found make up the artifact's
                // id, the objects are right.
                let mut known = integrity.objects.clone();
                known.extend(digests.clone());
                if artifact_id(directory, &known) == self.artifact_id() {
                    corrupt_objects.clear();
                }
                let reason = format!("digest is {found}, expected {}", integrity.directory);
                problems.push(Problem { file: entry.clone(), place: "directory".into(), reason });
            } else if artifact_id(directory, &integrity.objects) != self.artifact_id() {
                let reason = "the artifact id does not follow from the recorded digests".into();
                problems.push(Problem { file: entry, place: "header".into(), reason });
            }
        }
        if range.start == 0 {
            self.check_frames(integrity.is_some(), &mut problems)?;
            self.check_gaps(options, &mut problems)?;
        }
        let wrong = !problems.is_empty() || !corrupt_objects.is_empty();
        let state = match (wrong, integrity) {
            (true, _) => DigestState::Mismatch,
            (false, Some(_)) => DigestState::Ok,
            (false, None) => DigestState::Absent,
        };
        let bytes = directory.objects[range].iter().map(|object| object.bytes).sum();
        Ok(IntegrityReport { state, corrupt_objects, problems, digests, bytes })
    }

    /// Digest of one object, streaming.
    ///
    /// # Errors
    /// I/O errors, an interruption.
    pub fn object_digest(&self, object: &Object, interrupt: &Interrupt) -> Result<Digest> {
        let mut buffer = Vec::new();
        self.stream(object, &mut buffer, interrupt, None)
    }

    fn stream(
        &self,
        object: &Object,
        buffer: &mut Vec<u8>,
        interrupt: &Interrupt,
        progress: Option<&(dyn Fn(u64) + Sync)>,
    ) -> Result<Digest> {
        let mut hasher = blake3::Hasher::new();
        let mut at = 0;
        while at < object.bytes {
            interrupt.check()?;
            let take = (object.bytes - at).min(BLOCK as u64) as usize;
            if buffer.len() < take {
                buffer.resize(take, 0);
            }
            self.read_at(object.offset + at, &mut buffer[..take])?;
            hasher.update(&buffer[..take]);
            at += take as u64;
            progress.inspect(|told| told(take as u64));
        }
        Ok(hasher.finalize().into())
    }

    /// Objects are taken in payload order, one per thread at a time, so that reads advance through the files.
    fn hash_objects(&self, range: Range<usize>, options: &VerifyOptions<'_>) -> Result<ObjectDigests> {
        let objects = &self.directory().objects[range];
        let threads = match options.threads {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            n => n,
        };
        let (next, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
        let results: Mutex<(BTreeMap<String, Digest>, Option<ArtifactError>)> = Mutex::default();
        let work = || {
            let mut buffer = Vec::new();
            while !stop.load(Ordering::Relaxed) {
                let Some(object) = objects.get(next.fetch_add(1, Ordering::Relaxed)) else { break };
                let result = self.stream(object, &mut buffer, &options.interrupt, options.progress);
                let mut results = results.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                match result {
                    Ok(digest) => {
                        results.0.insert(object.id.clone(), digest);
                    }
                    Err(error) => {
                        stop.store(true, Ordering::Relaxed);
                        results.1.get_or_insert(error);
                    }
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 0..threads.clamp(1, objects.len().max(1)) {
                scope.spawn(work);
            }
        });
        let (digests, error) = results.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
        error.map_or(Ok(digests), Err)
    }

    /// Directory spelling, reserve, the gap before the payload, and the rest of part headers.
    fn check_frames(&self, own: bool, problems: &mut Vec<Problem>) -> Result<()> {
        let (file, path) = self.file_and_path(0);
        let (payload_start, ..) = self.placement(0);
        let mut head = vec![0; payload_start as usize];
        read_at(file, path, &mut head, 0)?;
        let json_end = (HEADER_BYTES + self.json_bytes()) as usize;
        let mut push = |file: String, place: &str, reason: String| {
            problems.push(Problem { file, place: place.to_owned(), reason });
        };
        if own {
            let text = self.directory().to_stored_json();
            let json = &head[HEADER_BYTES as usize..json_end];
            if !json.starts_with(text.as_bytes()) {
                let at = json.iter().zip(text.as_bytes()).take_while(|(a, b)| a == b).count()
                    + HEADER_BYTES as usize;
                push(
                    name_of(self, 0),
                    "directory",
                    format!("is not spelled as its writer does from byte {at} on"),
                );
            } else if let Some(at) = json[text.len()..].iter().position(|&b| b != b' ') {
                let at = HEADER_BYTES as usize + text.len() + at;
                push(
                    name_of(self, 0),
                    "reserve",
                    format!("byte {at} is {:#04x}, expected a space", head[at]),
                );
            }
        }
        if let Some(at) = head[json_end..].iter().position(|&b| b != 0) {
            push(name_of(self, 0), "gap before the payload", format!("byte {} is not zero", json_end + at));
        }
        for index in 1..self.directory().files.len() {
            let (file, path) = self.file_and_path(index);
            let mut head = vec![0; FRAME_ALIGNMENT as usize];
            read_at(file, path, &mut head, 0)?;
            if let Some(at) = head[HEADER_BYTES as usize..].iter().position(|&b| b != 0) {
                let at = HEADER_BYTES as usize + at;
                push(name_of(self, index), "header", format!("byte {at} is not zero"));
            }
        }
        Ok(())
    }

    /// Payload bytes that no object owns must be zero.
    fn check_gaps(&self, options: &VerifyOptions<'_>, problems: &mut Vec<Problem>) -> Result<()> {
        let mut buffer = Vec::new();
        for (after, range) in self.gaps() {
            let mut at = range.start;
            while at < range.end {
                options.interrupt.check()?;
                let take = (range.end - at).min(BLOCK as u64) as usize;
                buffer.resize(take, 0);
                self.read_at(at, &mut buffer)?;
                if let Some(bad) = buffer.iter().position(|&b| b != 0) {
                    let bad = at + bad as u64;
                    let segment = self.segments(bad, 1)?;
                    let (index, offset) = segment.first().map_or((0, bad), |s| (s.file, s.offset));
                    let place = after.map_or("gap before the first object".to_owned(), |o| {
                        format!("gap after {:?}", o.id)
                    });
                    let reason = format!("byte {offset} is not zero");
                    problems.push(Problem { file: name_of(self, index), place, reason });
                    break;
                }
                at += take as u64;
            }
        }
        Ok(())
    }

    /// Payload ranges between objects, each with the object before it.
    pub(crate) fn gaps(&self) -> Vec<(Option<&Object>, Range<u64>)> {
        let (mut gaps, mut end, mut before) = (Vec::new(), 0, None);
        for object in &self.directory().objects {
            if object.offset > end {
                gaps.push((before, end..object.offset));
            }
            (end, before) = (object.end(), Some(object));
        }
        if end < self.directory().payload_bytes() {
            gaps.push((before, end..self.directory().payload_bytes()));
        }
        gaps
    }
}

fn name_of(artifact: &Artifact, index: usize) -> String {
    let (_, path) = artifact.file_and_path(index);
    path.file_name().map_or_else(|| path.display().to_string(), |name| name.to_string_lossy().into_owned())
}
