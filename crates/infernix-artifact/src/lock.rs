//! An exclusive lock between processes: the file says who holds it, `flock` says whether.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

/// Why a lock was not given.
#[derive(Debug)]
pub enum LockError {
    /// Somebody has it: `process N`, or a guess.
    Held(String),
    /// The file cannot be used: what was being done (a verb), and the system's reason.
    Io(&'static str, io::Error),
}

/// A lock that is held. It ends with the process, however that ends.
#[derive(Debug)]
pub struct FileLock {
    path: PathBuf,
    _file: File,
}

impl FileLock {
    /// Locks the file `path`, which is made where there is none, without waiting.
    ///
    /// # Errors
    /// [`LockError::Held`] where another process has it, [`LockError::Io`] where the file cannot be opened or written.
    pub fn acquire(path: &Path) -> Result<Self, LockError> {
        loop {
            let mut file = OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .open(path)
                .map_err(|e| LockError::Io("open", e))?;
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    let mut text = String::new();
                    let _ = (&file).take(64).read_to_string(&mut text);
                    let pid = text.trim();
                    return Err(LockError::Held(if pid.is_empty() {
                        "another process".to_owned()
                    } else {
                        format!("process {pid}")
                    }));
                }
                Err(TryLockError::Error(e)) => return Err(LockError::Io("lock", e)),
            }
            // The previous holder may have removed the file between our open and our lock.
            let same = match (file.metadata(), fs::metadata(path)) {
                (Ok(a), Ok(b)) => (a.dev(), a.ino()) == (b.dev(), b.ino()),
                _ => false,
            };
            if !same {
                if path.parent().is_some_and(|p| !p.as_os_str().is_empty() && !p.is_dir()) {
                    return Err(LockError::Held("a run that just ended".into()));
                }
                continue;
            }
            let write =
                file.set_len(0).and_then(|()| file.write_all(std::process::id().to_string().as_bytes()));
            write.map_err(|e| LockError::Io("write", e))?;
            return Ok(Self { path: path.to_owned(), _file: file });
        }
    }

    /// Gives the lock up and removes its file, in this order for others: the file goes while it is still held.
    ///
    /// # Errors
    /// The file cannot be removed.
    pub fn remove(self) -> io::Result<()> {
        fs::remove_file(&self.path)
    }
}
