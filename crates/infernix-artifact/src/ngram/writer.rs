//! Writing a volume: rows in order, resumable by whole rows at every checkpoint.

use std::fs::File;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Value, json};

use super::header::{BLOCK_BYTES, Extension, Geometry, VolumeHeader, volume_id};
use super::volume::Volume;
use crate::io::{CHUNK, Io, allocated_bytes, available_bytes, drop_cache, folder_of, read_at, with_suffix};
use crate::state::{Journal, State};
use crate::{ArtifactError, ArtifactId, Digest, JournalKey, Result, Resume, Writer, WriterOptions};

/// What a volume is to hold.
#[derive(Clone, Debug, PartialEq)]
pub struct VolumeSpec {
    /// Row format name.
    pub format: String,
    /// Rows and their width.
    pub geometry: Geometry,
    /// FP32 scale words, one per table; may be empty.
    pub scales: Vec<f32>,
}

/// Streams rows into a volume.
#[derive(Debug)]
pub struct VolumeWriter {
    target: PathBuf,
    temporary: PathBuf,
    /// `None` once an earlier run has published it.
    file: Option<File>,
    spec: VolumeSpec,
    journal: Journal,
    state: Arc<State>,
    io: Io,
    hasher: blake3::Hasher,
    /// Rows written and hashed.
    rows: u64,
    /// Rows on disk; whole blocks only, until the last.
    flushed: u64,
    /// Rows of the journal.
    synced: u64,
    /// Blocks that are not written yet, padded.
    buffer: Vec<u8>,
    checkpoint_rows: u64,
    finished: Option<(ArtifactId, Digest)>,
    resumed_rows: u64,
}

impl Writer {
    /// Starts or resumes the volume that belongs to this conversion. Its data lies in the state folder where that is on
    /// the target's device, else at `TARGET.partial`.
    ///
    /// # Errors
    /// An occupied target, another spec in the journal, too little space.
    pub fn volume(&self, target: &Path, spec: VolumeSpec) -> Result<VolumeWriter> {
        self.volume_observed(target, spec, &mut |_, _| {})
    }

    /// As [`Self::volume`]; `observe` sees the rows that an interrupted run wrote as they are read back: number of the
    /// first, and their bytes without padding.
    ///
    /// # Errors
    /// As [`Self::volume`].
    pub fn volume_observed(
        &self,
        target: &Path,
        spec: VolumeSpec,
        observe: &mut dyn FnMut(u64, &[u8]),
    ) -> Result<VolumeWriter> {
        VolumeWriter::start(target, spec, self.state.clone(), observe)
    }
}

impl VolumeWriter {
    /// A volume on its own, with its state in `TARGET.partial/`.
    ///
    /// # Errors
    /// As [`Writer::volume`], and those of existing state.
    pub fn open(
        target: &Path,
        spec: VolumeSpec,
        key: &JournalKey,
        resume: Resume,
        options: &WriterOptions,
    ) -> Result<Self> {
        let (state, _) = State::open(target, key, resume, options.io())?;
        Self::start(target, spec, state, &mut |_, _| {})
    }

    fn start(
        target: &Path,
        spec: VolumeSpec,
        state: Arc<State>,
        observe: &mut dyn FnMut(u64, &[u8]),
    ) -> Result<Self> {
        let invalid = |reason: String| ArtifactError::Volume { path: target.to_owned(), reason };
        // Refuses names and counts that do not fit before anything is written.
        let extension = Extension {
            format: spec.format.clone(),
            scales: spec.scales.clone(),
            row_digest: Digest([0; 32]),
        };
        let blank =
            VolumeHeader { geometry: spec.geometry, id: ArtifactId([0; 16]), extension: Some(extension) };
        blank.encode().map_err(invalid)?;
        let io = state.io.clone();
        let device = |path: &Path| path.metadata().map(|meta| meta.dev()).ok();
        let same = device(&state.folder) == device(folder_of(target));
        let temporary = if same { state.folder.join("volume") } else { with_suffix(target, ".partial") };
        let (mut journal, lines) = Journal::open(state.folder.join("volume.jsonl"), &io)?;
        let wanted = spec_value(target, &spec);
        let (mut rows, mut digest, mut finished) = (0, None, None);
        match lines.first() {
            None => {
                if target.symlink_metadata().is_ok() {
                    return Err(ArtifactError::OutputExists { path: target.to_owned() });
                }
                journal.append(&[json!({ "volume": wanted })])?;
            }
            Some(head) => {
                let recorded = head.get("volume").cloned().unwrap_or_default();
                if recorded != wanted {
                    return Err(ArtifactError::StateDiffers {
                        path: state.folder.clone(),
                        name: "the n-gram volume".into(),
                        recorded: recorded.to_string(),
                        now: wanted.to_string(),
                    });
                }
                for line in &lines[1..] {
                    let hex =
                        line.get("digest").and_then(Value::as_str).and_then(|d| d.parse::<Digest>().ok());
                    let hex = hex.ok_or_else(|| journal.damaged("a line without digest"))?;
                    if let Some(n) =
                        line.get("rows").and_then(Value::as_u64).filter(|&n| n <= spec.geometry.rows)
                    {
                        (rows, digest) = (n, Some(hex));
                    } else if let Some(id) =
                        line.get("id").and_then(Value::as_str).and_then(|id| id.parse().ok())
                    {
                        finished = Some((id, hex));
                    } else {
                        return Err(journal.damaged(format!("unknown line {line:.80}")));
                    }
                }
            }
        }
        let mut writer = Self {
            target: target.to_owned(),
            file: None,
            checkpoint_rows: (64 << 20) / u64::from(spec.geometry.row_bytes),
            spec,
            journal,
            state,
            hasher: blake3::Hasher::new(),
            rows,
            flushed: rows,
            synced: rows,
            buffer: Vec::new(),
            finished,
            resumed_rows: rows,
            temporary,
            io,
        };
        if let Some((id, row_digest)) = finished
            && !writer.temporary.exists()
        {
            let volume = Volume::open(target)?;
            let same = volume.header().extension.as_ref().is_some_and(|e| e.row_digest == row_digest);
            if volume.header().id != id || !same {
                return Err(ArtifactError::OutputExists { path: target.to_owned() });
            }
            return Ok(writer);
        }
        writer.open_file(digest, observe)?;
        Ok(writer)
    }

    fn open_file(&mut self, digest: Option<Digest>, observe: &mut dyn FnMut(u64, &[u8])) -> Result<()> {
        let bytes = self.spec.geometry.file_bytes();
        if self.rows > 0 && !self.temporary.exists() {
            return Err(self.journal.damaged(format!("{} is gone", self.temporary.display())));
        }
        let file = self.io.open_rw(&self.temporary)?;
        let folder = folder_of(&self.temporary);
        let available =
            available_bytes(folder).map_err(|e| ArtifactError::io(folder, "ask for free space at", e))?;
        let needed = bytes.saturating_sub(allocated_bytes(&file));
        if needed > available {
            return Err(ArtifactError::DiskFull { path: folder.to_owned(), needed, available });
        }
        self.io.set_len(&file, &self.temporary, bytes)?;
        // The digest runs over all rows: an earlier run's are read back once, and must be what it wrote.
        let (width, rpb) =
            (self.spec.geometry.row_bytes as usize, u64::from(self.spec.geometry.rows_per_block));
        let (mut row, mut buffer) = (0, Vec::new());
        while row < self.rows {
            self.io.interrupt.check()?;
            let blocks = (self.rows - row).div_ceil(rpb).min(CHUNK as u64 / BLOCK_BYTES);
            buffer.resize((blocks * BLOCK_BYTES) as usize, 0);
            let at = BLOCK_BYTES * (1 + row / rpb);
            read_at(&file, &self.temporary, &mut buffer, at)?;
            drop_cache(&file, at, buffer.len() as u64);
            for block in buffer.chunks_exact(BLOCK_BYTES as usize) {
                let rows = rpb.min(self.rows - row);
                self.hasher.update(&block[..rows as usize * width]);
                observe(row, &block[..rows as usize * width]);
                row += rows;
            }
        }
        if digest.is_some_and(|digest| digest != self.hasher.finalize().into()) {
            return Err(self
                .journal
                .damaged("the rows of the unfinished volume are not those that were written"));
        }
        self.file = Some(file);
        Ok(())
    }

    /// Rows that need not be written again: the next row to hand in.
    pub fn rows_done(&self) -> u64 {
        if self.finished.is_some() { self.spec.geometry.rows } else { self.rows }
    }

    /// Bytes of rows that an earlier run wrote.
    pub fn resumed_bytes(&self) -> u64 {
        self.resumed_rows * u64::from(self.spec.geometry.row_bytes)
    }

    /// Where rows lie.
    pub fn geometry(&self) -> &Geometry {
        &self.spec.geometry
    }

    /// Digest of the rows, once finished.
    pub fn row_digest(&self) -> Option<Digest> {
        self.finished.map(|(_, digest)| digest)
    }

    /// Final path.
    pub fn target(&self) -> &Path {
        &self.target
    }

    pub(crate) fn temporary(&self) -> &Path {
        &self.temporary
    }

    pub(crate) fn state_names(&self) -> Vec<String> {
        vec!["volume.jsonl".into()]
    }

    /// Appends whole rows.
    ///
    /// # Errors
    /// Bytes that are no whole rows, rows beyond the table; I/O errors, an interruption.
    pub fn write_rows(&mut self, rows: &[u8]) -> Result<()> {
        let (width, rpb) =
            (self.spec.geometry.row_bytes as usize, self.spec.geometry.rows_per_block as usize);
        let count = (rows.len() / width) as u64;
        if !rows.len().is_multiple_of(width) || count > self.spec.geometry.rows - self.rows_done() {
            let reason = format!("{} bytes are no whole rows of {width}, or too many", rows.len());
            return Err(ArtifactError::Volume { path: self.target.clone(), reason });
        }
        let mut rest = rows;
        while !rest.is_empty() {
            let room = rpb - (self.rows % rpb as u64) as usize;
            let (now, later) = rest.split_at(rest.len().min(room * width));
            self.buffer.extend_from_slice(now);
            self.hasher.update(now);
            self.rows += (now.len() / width) as u64;
            if self.rows.is_multiple_of(rpb as u64) {
                self.buffer.resize(self.buffer.len().next_multiple_of(BLOCK_BYTES as usize), 0);
                if self.buffer.len() >= CHUNK {
                    self.flush()?;
                }
                if self.rows - self.synced >= self.checkpoint_rows {
                    self.checkpoint()?;
                }
            }
            rest = later;
        }
        Ok(())
    }

    /// Writes the buffered blocks.
    fn flush(&mut self) -> Result<()> {
        let file =
            self.file.as_ref().ok_or_else(|| self.journal.damaged("a published volume is written again"))?;
        let at = BLOCK_BYTES * (1 + self.flushed / u64::from(self.spec.geometry.rows_per_block));
        self.io.write_at(file, &self.temporary, &self.buffer, at)?;
        self.buffer.clear();
        self.flushed = self.rows;
        Ok(())
    }

    /// Syncs and journals the rows up to the last whole block.
    fn checkpoint(&mut self) -> Result<()> {
        self.flush()?;
        let file =
            self.file.as_ref().ok_or_else(|| self.journal.damaged("a published volume is written again"))?;
        self.io.sync(file, &self.temporary)?;
        let digest = Digest::from(self.hasher.finalize());
        self.journal.append(&[json!({"rows": self.rows, "digest": digest.to_string()})])?;
        drop_cache(file, 0, self.spec.geometry.file_bytes());
        self.synced = self.rows;
        Ok(())
    }

    /// Completes the volume with its header; returns its id and row digest. Idempotent.
    ///
    /// # Errors
    /// Missing rows; I/O errors.
    pub fn finish(&mut self) -> Result<(ArtifactId, Digest)> {
        if let Some(done) = self.finished {
            return Ok(done);
        }
        if self.rows != self.spec.geometry.rows {
            let reason = format!("{} of {} rows were written", self.rows, self.spec.geometry.rows);
            return Err(ArtifactError::Volume { path: self.target.clone(), reason });
        }
        self.flush()?;
        let row_digest = Digest::from(self.hasher.finalize());
        let extension =
            Extension { format: self.spec.format.clone(), scales: self.spec.scales.clone(), row_digest };
        let id = volume_id(&self.spec.geometry, &extension);
        let header = VolumeHeader { geometry: self.spec.geometry, id, extension: Some(extension) };
        let page =
            header.encode().map_err(|reason| ArtifactError::Volume { path: self.target.clone(), reason })?;
        let file =
            self.file.as_ref().ok_or_else(|| self.journal.damaged("a published volume is written again"))?;
        self.io.write_at(file, &self.temporary, &page, 0)?;
        self.io.sync(file, &self.temporary)?;
        self.journal.append(&[json!({"id": id.to_string(), "digest": row_digest.to_string()})])?;
        self.finished = Some((id, row_digest));
        Ok((id, row_digest))
    }

    /// Moves the finished volume to its place; nothing when an earlier run did.
    pub(crate) fn publish(&self) -> Result<()> {
        if self.finished.is_none() {
            let reason = "is not finished".into();
            return Err(ArtifactError::Volume { path: self.target.clone(), reason });
        }
        if self.file.is_some() {
            self.io.rename_new(&self.temporary, &self.target)?;
            self.io.sync_folder(folder_of(&self.target))?;
        }
        Ok(())
    }

    /// Publishes a volume that stands on its own and removes its state.
    ///
    /// # Errors
    /// An occupied target; I/O errors.
    pub fn publish_alone(self) -> Result<PathBuf> {
        self.publish()?;
        self.state.remove(&self.state_names())?;
        Ok(self.target)
    }
}

fn spec_value(target: &Path, spec: &VolumeSpec) -> Value {
    let scales: Vec<u32> = spec.scales.iter().map(|s| s.to_bits()).collect();
    let name = target.file_name().map(|name| name.to_string_lossy().into_owned());
    json!({
        "name": name, "format": spec.format, "rows": spec.geometry.rows, "row_bytes": spec.geometry.row_bytes,
        "scales": scales,
    })
}
