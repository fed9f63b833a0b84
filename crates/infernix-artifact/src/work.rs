//! A state folder for any long write that can be interrupted: the same lock, journal and disk operations as a
//! conversion's, without an artifact's files.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;

use crate::io::{CHUNK, Faults, Interrupt, Io, allocated_bytes, available_bytes, folder_of};
use crate::state::State;
use crate::{ArtifactError, JournalKey, Result, Resume};

/// The folder inside the state folder in which files grow under their final names.
const OUTPUT: &str = "part-files";

/// The locked state of an unfinished write of `out`.
#[derive(Debug)]
pub struct Workplace {
    state: Arc<State>,
    output: PathBuf,
    lines: Vec<Value>,
}

/// A file that grows in the state folder.
#[derive(Debug)]
pub struct WorkFile {
    file: File,
    path: PathBuf,
    io: Io,
}

impl Workplace {
    /// Opens or creates the state of `out`; [`Self::lines`] are what an earlier run journalled.
    ///
    /// # Errors
    /// Existing state without [`Resume::Yes`], state of other inputs, a lock held elsewhere, I/O errors.
    pub fn open(
        out: &Path,
        key: &JournalKey,
        resume: Resume,
        interrupt: Interrupt,
        faults: Option<Arc<Faults>>,
        durable: bool,
    ) -> Result<Self> {
        let (state, lines) = State::open(out, key, resume, Io { interrupt, faults, durable })?;
        let output = state.folder.join(OUTPUT);
        // Once publication has begun the folder may be in its place already.
        let publishing = lines.iter().any(|l| l.get("publish").is_some());
        if !output.is_dir() && !publishing {
            state.io.create_dir(&output)?;
            state.io.sync_folder(&state.folder)?;
        }
        Ok(Self { state, output, lines })
    }

    /// Where the files of `out` grow until they are published.
    pub fn output_of(out: &Path) -> PathBuf {
        crate::state::state_folder(out).join(OUTPUT)
    }

    /// Lines of the journal when it was opened.
    pub fn lines(&self) -> &[Value] {
        &self.lines
    }

    /// The state folder.
    pub fn folder(&self) -> &Path {
        &self.state.folder
    }

    /// Appends lines to the journal and syncs it.
    ///
    /// # Errors
    /// I/O errors.
    pub fn append(&self, lines: &[Value]) -> Result<()> {
        self.state.append(lines)
    }

    /// Opens a file of that final name, and cuts it to `keep` bytes.
    ///
    /// # Errors
    /// A file shorter than what was journalled of it; I/O errors.
    pub fn file(&self, name: &str, keep: u64) -> Result<WorkFile> {
        let path = self.output.join(name);
        let io = self.state.io.clone();
        let file = io.open_rw(&path)?;
        let found = file.metadata().map_err(|e| ArtifactError::io(&path, "look at", e))?.len();
        if found < keep {
            let reason = format!("{name} is {found} bytes long, {keep} were written");
            return Err(ArtifactError::StateDamaged { path: self.state.folder.clone(), reason });
        }
        io.set_len(&file, &path, keep)?;
        Ok(WorkFile { file, path, io })
    }

    /// Writes a small file whole.
    ///
    /// # Errors
    /// I/O errors.
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<()> {
        self.state.io.write_file(&self.output.join(name), bytes)
    }

    /// An error unless `needed` bytes more than the files at hand fit the device.
    ///
    /// # Errors
    /// [`ArtifactError::DiskFull`].
    pub fn check_space(&self, needed: u64) -> Result<()> {
        let io = |e| ArtifactError::io(&self.output, "look at", e);
        let mut here = 0;
        for entry in std::fs::read_dir(&self.output).map_err(io)? {
            here += File::open(entry.map_err(io)?.path()).map_or(0, |f| allocated_bytes(&f));
        }
        let (needed, available) = (needed.saturating_sub(here), available_bytes(&self.output).map_err(io)?);
        if needed > available {
            return Err(ArtifactError::DiskFull {
                path: folder_of(&self.state.folder).to_owned(),
                needed,
                available,
            });
        }
        Ok(())
    }

    /// Publishes everything as the folder `out`, at once, and removes the state.
    ///
    /// # Errors
    /// Something lies there already; I/O errors.
    pub fn publish_folder(self, out: &Path) -> Result<()> {
        if self.output.is_dir() || !out.is_dir() {
            self.state.io.sync_folder(&self.output)?;
            self.state.io.rename_new(&self.output, out)?;
        }
        self.state.io.sync_folder(folder_of(out))?;
        self.state.remove(&[])?;
        self.state.io.sync_folder(folder_of(out))
    }

    /// Publishes files one by one beside each other in `folder`, in this order; ones that an earlier run published are
    /// left. Then removes the state.
    ///
    /// # Errors
    /// A file that lies there already and is not among those written; I/O errors.
    pub fn publish_files(self, folder: &Path, names: &[String]) -> Result<()> {
        if self.output.is_dir() {
            self.state.io.sync_folder(&self.output)?;
        }
        for name in names {
            let (from, to) = (self.output.join(name), folder.join(name));
            if from.exists() || !to.exists() {
                self.state.io.rename_new(&from, &to)?;
            }
        }
        self.state.io.sync_folder(folder)?;
        self.state.io.remove_dir(&self.output)?;
        self.state.remove(&[])?;
        self.state.io.sync_folder(folder)
    }
}

impl WorkFile {
    /// Writes at an offset.
    ///
    /// # Errors
    /// A full disk, an interruption, I/O errors.
    pub fn write_at(&self, bytes: &[u8], offset: u64) -> Result<()> {
        self.io.write_at(&self.file, &self.path, bytes, offset)?;
        if bytes.len() >= CHUNK {
            crate::io::drop_cache(&self.file, offset, bytes.len() as u64);
        }
        Ok(())
    }

    /// Makes what was written durable.
    ///
    /// # Errors
    /// I/O errors.
    pub fn sync(&self) -> Result<()> {
        self.io.sync(&self.file, &self.path)
    }
}
