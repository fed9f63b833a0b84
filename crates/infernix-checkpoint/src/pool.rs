//! The shards' files: at most four open at once, exact reads, and no trace left in the page cache.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use crate::CheckpointError;
use crate::limits::MAX_OPEN_FILES;

/// Reads of at least this size give their pages back at once; smaller ones (scales, scalars) share pages
/// with their neighbours and are given back together.
const BULK_BYTES: u64 = 256 << 10;
/// Bytes of small reads of one file after which its pages are given back.
const SMALL_BYTES_KEPT: u64 = 16 << 20;

/// What a file was when it was first looked at. A later difference means that it is being written to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stamp {
    pub(crate) len: u64,
    pub(crate) modified: Option<SystemTime>,
}

impl Stamp {
    pub(crate) fn of(file: &File) -> std::io::Result<Self> {
        let meta = file.metadata()?;
        Ok(Self { len: meta.len(), modified: meta.modified().ok() })
    }
}

/// An open file of the pool.
struct Slot {
    shard: u32,
    file: std::sync::Arc<File>,
    /// Readers at work; a slot in use is never closed.
    users: usize,
    /// Time of last use, in calls.
    used: u64,
    /// Bytes of small reads whose pages are still cached.
    small: u64,
}

#[derive(Default)]
struct State {
    slots: Vec<Slot>,
    clock: u64,
}

/// Opens files on demand and closes the least recently used. Readers of a fifth file wait for a slot: each
/// holds one slot for the length of one read, so that they cannot wait for each other.
#[derive(Default)]
pub(crate) struct Pool {
    state: Mutex<State>,
    freed: Condvar,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("open", &self.lock().slots.len()).finish()
    }
}

impl Pool {
    fn lock(&self) -> MutexGuard<'_, State> {
        // The state is consistent at every point where a panic could be.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Fills `out` from `offset` of the file of `shard`, which must still be what `stamp` says. `tensor`
    /// serves the error message.
    pub(crate) fn read(
        &self,
        shard: u32,
        path: &Path,
        stamp: &Stamp,
        tensor: &str,
        offset: u64,
        out: &mut [u8],
    ) -> Result<(), CheckpointError> {
        let file = self.acquire(shard, path, stamp)?;
        let result = read_exact(&file, path, tensor, offset, out);
        let len = out.len() as u64;
        let drop_all = {
            let mut state = self.lock();
            let mut drop_all = false;
            if let Some(slot) = state.slots.iter_mut().find(|s| s.shard == shard) {
                slot.users -= 1;
                if len < BULK_BYTES {
                    slot.small += len;
                    if slot.small >= SMALL_BYTES_KEPT {
                        slot.small = 0;
                        drop_all = true;
                    }
                }
            }
            self.freed.notify_one();
            drop_all
        };
        if drop_all {
            drop_pages(&file, 0, 0);
        } else if len >= BULK_BYTES {
            drop_pages(&file, offset, len);
        }
        result
    }

    fn acquire(
        &self,
        shard: u32,
        path: &Path,
        stamp: &Stamp,
    ) -> Result<std::sync::Arc<File>, CheckpointError> {
        let mut state = self.lock();
        loop {
            state.clock += 1;
            let now = state.clock;
            if let Some(slot) = state.slots.iter_mut().find(|s| s.shard == shard) {
                slot.users += 1;
                slot.used = now;
                return Ok(slot.file.clone());
            }
            if state.slots.len() == MAX_OPEN_FILES {
                let idle = state.slots.iter().enumerate().filter(|(_, s)| s.users == 0);
                let Some((oldest, _)) = idle.min_by_key(|(_, s)| s.used) else {
                    state = self.freed.wait(state).unwrap_or_else(PoisonError::into_inner);
                    continue;
                };
                let slot = state.slots.swap_remove(oldest);
                drop_pages(&slot.file, 0, 0);
            }
            let file = match open_unchanged(path, stamp) {
                Ok(file) => std::sync::Arc::new(file),
                Err(e) => {
                    // The wake-up that this reader took goes on to the next: it leaves a slot unused.
                    self.freed.notify_one();
                    return Err(e);
                }
            };
            state.slots.push(Slot { shard, file: file.clone(), users: 1, used: now, small: 0 });
            return Ok(file);
        }
    }

    /// Number of files open now.
    #[cfg(test)]
    pub(crate) fn open_files(&self) -> usize {
        self.lock().slots.len()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        for slot in &self.lock().slots {
            drop_pages(&slot.file, 0, 0);
        }
    }
}

fn open_unchanged(path: &Path, stamp: &Stamp) -> Result<File, CheckpointError> {
    let file = File::open(path).map_err(CheckpointError::io(path, "open"))?;
    let found = Stamp::of(&file).map_err(CheckpointError::io(path, "look at"))?;
    if found == *stamp { Ok(file) } else { Err(changed(path, stamp, &found)) }
}

fn changed(path: &Path, expected: &Stamp, found: &Stamp) -> CheckpointError {
    let (expected, found) = if expected.len != found.len {
        (format!("{} bytes", expected.len), format!("{} bytes", found.len))
    } else {
        ("the time of its first look".to_owned(), "a later modification".to_owned())
    };
    CheckpointError::Changed { path: PathBuf::from(path), expected, found }
}

fn read_exact(
    file: &File,
    path: &Path,
    tensor: &str,
    offset: u64,
    out: &mut [u8],
) -> Result<(), CheckpointError> {
    let mut done = 0;
    while done < out.len() {
        match pread(file, &mut out[done..], offset + done as u64) {
            Ok(0) => {
                return Err(CheckpointError::ShortRead {
                    path: path.to_path_buf(),
                    tensor: tensor.to_owned(),
                    offset,
                    expected: out.len() as u64,
                    found: done as u64,
                });
            }
            Ok(n) => done += n,
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(e) => return Err(CheckpointError::io(path, "read")(e)),
        }
    }
    Ok(())
}

#[cfg(unix)]
fn pread(file: &File, out: &mut [u8], offset: u64) -> std::io::Result<usize> {
    std::os::unix::fs::FileExt::read_at(file, out, offset)
}

#[cfg(windows)]
fn pread(file: &File, out: &mut [u8], offset: u64) -> std::io::Result<usize> {
    std::os::windows::fs::FileExt::seek_read(file, out, offset)
}

/// Asks the system to forget the pages of a range (of the whole file where `len` is 0), so that reading a
/// 130 GB checkpoint once evicts nothing else. Advice: a refusal does no harm.
#[cfg(target_os = "linux")]
pub(crate) fn drop_pages(file: &File, offset: u64, len: u64) {
    let _ = rustix::fs::fadvise(file, offset, std::num::NonZeroU64::new(len), rustix::fs::Advice::DontNeed);
}

/// Elsewhere there is no such advice.
#[cfg(not(target_os = "linux"))]
pub(crate) fn drop_pages(_: &File, _: u64, _: u64) {}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(n: u32) -> (tempfile::TempDir, Vec<(PathBuf, Stamp)>) {
        let dir = tempfile::tempdir().expect("temporary folder");
        let files = (0..n)
            .map(|i| {
                let path = dir.path().join(format!("f{i}"));
                std::fs::write(&path, vec![i as u8; 1000]).expect("written");
                let stamp = Stamp::of(&File::open(&path).expect("open")).expect("stamp");
                (path, stamp)
            })
            .collect();
        (dir, files)
    }

    #[test]
    fn never_more_than_four_files_open() {
        let (_dir, files) = files(9);
        let pool = Pool::default();
        std::thread::scope(|s| {
            for t in 0..8usize {
                let (pool, files) = (&pool, &files);
                s.spawn(move || {
                    for i in 0..200usize {
                        let k = (i * 7 + t * 3) % files.len();
                        let mut out = [0u8; 10];
                        pool.read(k as u32, &files[k].0, &files[k].1, "t", i as u64, &mut out).expect("read");
                        assert_eq!(out, [k as u8; 10]);
                        assert!(pool.open_files() <= MAX_OPEN_FILES);
                    }
                });
            }
        });
        assert_eq!(pool.open_files(), MAX_OPEN_FILES);
    }

    #[test]
    fn readers_that_fail_to_open_leave_no_one_waiting() {
        let (dir, files) = files(12);
        let pool = Pool::default();
        std::thread::scope(|s| {
            for t in 0..12usize {
                let (pool, files, gone) = (&pool, &files, dir.path().join("gone"));
                s.spawn(move || {
                    for i in 0..300usize {
                        let k = (i + t) % files.len();
                        let path = if (i + t) % 3 == 0 { &gone } else { &files[k].0 };
                        // A missing file has a number of its own, so that it is never found open.
                        let number = if path == &gone { 100 + k as u32 } else { k as u32 };
                        let read = pool.read(number, path, &files[k].1, "t", 0, &mut [0; 10]);
                        assert_eq!(read.is_err(), path == &gone);
                    }
                });
            }
        });
        assert!(pool.open_files() <= MAX_OPEN_FILES);
    }

    #[test]
    fn shrunk_file_is_an_error_and_leaves_the_pool_usable() {
        let (_dir, files) = files(2);
        let pool = Pool::default();
        let mut out = [0u8; 600];
        pool.read(0, &files[0].0, &files[0].1, "t", 0, &mut out).expect("read");
        File::options().write(true).open(&files[0].0).expect("open").set_len(500).expect("shrunk");
        // Still open: the read itself ends early.
        let e = pool.read(0, &files[0].0, &files[0].1, "blk.w", 400, &mut out).expect_err("short");
        assert!(
            matches!(e, CheckpointError::ShortRead { expected: 600, found: 100, offset: 400, .. }),
            "{e}"
        );
        assert!(e.to_string().contains("blk.w"));
        // Opened anew: the length differs.
        let e = Pool::default().read(0, &files[0].0, &files[0].1, "t", 0, &mut out).expect_err("changed");
        assert!(matches!(e, CheckpointError::Changed { .. }), "{e}");
        pool.read(1, &files[1].0, &files[1].1, "t", 400, &mut out).expect("read");
    }
}
