//! Every operation that changes the disk goes through [`Io`]: it looks at the interruption hook, tells a full disk
//! from other errors, and lets tests stop the process at the n-th operation.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::{ArtifactError, Result};

/// Bytes per read or write between two looks at the interruption hook.
pub const CHUNK: usize = 8 << 20;

/// Asks long operations to stop; cloned freely. The default never asks.
#[derive(Clone, Debug, Default)]
pub struct Interrupt(Option<Arc<AtomicBool>>);

impl Interrupt {
    /// Stops when `flag` becomes true.
    pub fn new(flag: Arc<AtomicBool>) -> Self {
        Self(Some(flag))
    }

    /// # Errors
    /// [`ArtifactError::Interrupted`] once the flag is set.
    pub fn check(&self) -> Result<()> {
        match &self.0 {
            Some(flag) if flag.load(Ordering::Relaxed) => Err(ArtifactError::Interrupted),
            _ => Ok(()),
        }
    }
}

/// Test hook that plays `kill -9`: after a number of disk operations every further one fails, and nothing is cleaned
/// up. The operation at the limit is carried out by half where it is a write.
#[derive(Debug)]
pub struct Faults {
    left: AtomicU64,
    done: AtomicU64,
}

impl Faults {
    /// Lets `operations` operations succeed.
    pub fn after(operations: u64) -> Arc<Self> {
        Arc::new(Self { left: AtomicU64::new(operations), done: AtomicU64::new(0) })
    }

    /// Operations carried out so far.
    pub fn operations(&self) -> u64 {
        self.done.load(Ordering::SeqCst)
    }

    fn take(&self) -> bool {
        let alive = self.left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1)).is_ok();
        if alive {
            self.done.fetch_add(1, Ordering::SeqCst);
        }
        alive
    }
}

/// Disk operations with hooks.
#[derive(Clone, Debug)]
pub(crate) struct Io {
    pub(crate) interrupt: Interrupt,
    pub(crate) faults: Option<Arc<Faults>>,
    /// False only in tests that do without durability.
    pub(crate) durable: bool,
}

impl Default for Io {
    fn default() -> Self {
        Self { interrupt: Interrupt::default(), faults: None, durable: true }
    }
}

impl Io {
    /// Counts an operation; false when the process is to be considered dead.
    fn step(&self) -> Result<()> {
        match &self.faults {
            Some(faults) if !faults.take() => Err(ArtifactError::Killed),
            _ => Ok(()),
        }
    }

    pub(crate) fn write_at(&self, file: &File, path: &Path, bytes: &[u8], offset: u64) -> Result<()> {
        let mut at = 0;
        for chunk in bytes.chunks(CHUNK) {
            self.interrupt.check()?;
            if let Err(dead) = self.step() {
                // A torn write; its own failure changes nothing for a dead process.
                let _ = file.write_all_at(&chunk[..chunk.len() / 2], offset + at);
                return Err(dead);
            }
            file.write_all_at(chunk, offset + at).map_err(|e| ArtifactError::io(path, "write", e))?;
            at += chunk.len() as u64;
        }
        Ok(())
    }

    /// Appends `line` in one write.
    pub(crate) fn append(&self, file: &mut File, path: &Path, line: &[u8]) -> Result<()> {
        if let Err(dead) = self.step() {
            let _ = file.write_all(&line[..line.len() / 2]);
            return Err(dead);
        }
        file.write_all(line).map_err(|e| ArtifactError::io(path, "append", e))
    }

    pub(crate) fn sync(&self, file: &File, path: &Path) -> Result<()> {
        self.step()?;
        if !self.durable {
            return Ok(());
        }
        file.sync_data().map_err(|e| ArtifactError::io(path, "sync", e))
    }

    /// Makes renames, creations and removals in `folder` durable.
    pub(crate) fn sync_folder(&self, folder: &Path) -> Result<()> {
        self.step()?;
        if !self.durable {
            return Ok(());
        }
        let file = File::open(folder).map_err(|e| ArtifactError::io(folder, "open", e))?;
        match file.sync_all() {
            // Some network file systems refuse to sync a folder; there is nothing better to do there.
            Err(e) if matches!(e.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported) => Ok(()),
            result => result.map_err(|e| ArtifactError::io(folder, "sync", e)),
        }
    }

    pub(crate) fn create_dir(&self, path: &Path) -> Result<()> {
        self.step()?;
        fs::create_dir(path).map_err(|e| ArtifactError::io(path, "create", e))
    }

    /// Creates `path` or opens it for reading and writing.
    pub(crate) fn open_rw(&self, path: &Path) -> Result<File> {
        self.step()?;
        OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)
            .map_err(|e| ArtifactError::io(path, "create", e))
    }

    pub(crate) fn set_len(&self, file: &File, path: &Path, bytes: u64) -> Result<()> {
        self.step()?;
        file.set_len(bytes).map_err(|e| ArtifactError::io(path, "set the length of", e))
    }

    pub(crate) fn rename_new(&self, from: &Path, to: &Path) -> Result<()> {
        self.step()?;
        rename_noreplace(from, to)
    }

    /// A plain rename over an existing file of ours.
    pub(crate) fn rename_over(&self, from: &Path, to: &Path) -> Result<()> {
        self.step()?;
        fs::rename(from, to).map_err(|e| ArtifactError::io(to, "replace", e))
    }

    /// Removes a file; one that is already gone is fine.
    pub(crate) fn remove_file(&self, path: &Path) -> Result<()> {
        self.step()?;
        match fs::remove_file(path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(ArtifactError::io(path, "remove", e)),
            _ => Ok(()),
        }
    }

    pub(crate) fn remove_dir(&self, path: &Path) -> Result<()> {
        self.step()?;
        match fs::remove_dir(path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(ArtifactError::io(path, "remove", e)),
            _ => Ok(()),
        }
    }

    /// Writes a small file whole and syncs it.
    pub(crate) fn write_file(&self, path: &Path, bytes: &[u8]) -> Result<()> {
        let file = self.open_rw(path)?;
        self.set_len(&file, path, 0)?;
        self.write_at(&file, path, bytes, 0)?;
        self.sync(&file, path)
    }
}

/// Renames without ever replacing `to`.
///
/// `renameat2(RENAME_NOREPLACE)` is atomic. File systems without it get a hard link and an unlink (also atomic in its
/// refusal); those without links either (FAT) get a check followed by a rename, where a file that appears in between
/// would be replaced.
pub(crate) fn rename_noreplace(from: &Path, to: &Path) -> Result<()> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    use rustix::io::Errno;
    let exists = || ArtifactError::OutputExists { path: to.to_owned() };
    match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        Ok(()) => return Ok(()),
        Err(Errno::EXIST) => return Err(exists()),
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {}
        Err(e) => return Err(ArtifactError::io(to, "publish by rename", e.into())),
    }
    match fs::hard_link(from, to) {
        Ok(()) => return fs::remove_file(from).map_err(|e| ArtifactError::io(from, "remove", e)),
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => return Err(exists()),
        Err(_) => {}
    }
    if to.symlink_metadata().is_ok() {
        return Err(exists());
    }
    fs::rename(from, to).map_err(|e| ArtifactError::io(to, "publish by rename", e))
}

/// Bytes a user may still write to the device of `path` (or of its nearest existing parent).
pub fn available_bytes(path: &Path) -> io::Result<u64> {
    let mut at = path;
    loop {
        match rustix::fs::statvfs(if at.as_os_str().is_empty() { Path::new(".") } else { at }) {
            Ok(stat) => return Ok(stat.f_bavail.saturating_mul(stat.f_frsize)),
            Err(rustix::io::Errno::NOENT) => match at.parent() {
                Some(parent) => at = parent,
                None => return Err(rustix::io::Errno::NOENT.into()),
            },
            Err(e) => return Err(e.into()),
        }
    }
}

/// Bytes that `file` really occupies.
pub(crate) fn allocated_bytes(file: &File) -> u64 {
    // st_blocks counts units of 512 bytes on Linux whatever the block size.
    file.metadata().map_or(0, |meta| meta.blocks().saturating_mul(512))
}

/// Reads exactly `out` at `offset`; a short file is an error that says so.
pub(crate) fn read_at(file: &File, path: &Path, out: &mut [u8], offset: u64) -> Result<()> {
    match file.read_exact_at(out, offset) {
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => {
            Err(ArtifactError::Shrunk { path: path.to_owned() })
        }
        result => result.map_err(|e| ArtifactError::io(path, "read", e)),
    }
}

/// Tells the kernel that a range was read or written once and need not stay cached. Only advice: errors are ignored.
pub(crate) fn drop_cache(file: &File, offset: u64, bytes: u64) {
    if let Some(len) = std::num::NonZeroU64::new(bytes) {
        let _ = rustix::fs::fadvise(file, offset, Some(len), rustix::fs::Advice::DontNeed);
    }
}

/// The folder of `path`, `.` for a bare name.
pub(crate) fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// The file name of `path` as text.
///
/// # Errors
/// Paths without a name, or whose name is not UTF-8 (the directory is UTF-8).
pub(crate) fn file_name(path: &Path) -> Result<&str> {
    path.file_name().and_then(|name| name.to_str()).ok_or_else(|| {
        ArtifactError::Invalid(format!("{}: has no file name that is valid UTF-8", path.display()))
    })
}

/// `path` with `suffix` appended to its name.
pub(crate) fn with_suffix(path: &Path, suffix: &str) -> std::path::PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}
