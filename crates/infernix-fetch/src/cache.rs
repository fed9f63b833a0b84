//! The cache's folders: `blobs/DIGEST`, `snapshots/COMMIT/PATH` as links to them, `refs/REVISION`.

use crate::Progress;
use crate::error::{FetchError, Result};
use crate::listing::{Digest, RemoteFile};
use crate::transfer::{Body, Broken, Client, pause};
use rustix::fs::{FlockOperation, flock, statvfs};
use sha2::Digest as _;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};

/// Most bytes of one piece between the network and the disk.
const PIECE: usize = 1 << 20;

pub(crate) struct Cache {
    root: PathBuf,
    commit: String,
    snapshot: PathBuf,
}

impl Cache {
    pub(crate) fn open(hub: &Path, repo: &str, commit: &str) -> Result<Self> {
        let root = hub.join(format!("models--{}", repo.replace('/', "--")));
        let snapshot = root.join("snapshots").join(commit);
        for dir in [root.join("blobs"), root.join("refs"), snapshot.clone()] {
            fs::create_dir_all(&dir).map_err(FetchError::io(&dir, "creating the folder"))?;
        }
        Ok(Self { root, commit: commit.to_owned(), snapshot })
    }

    pub(crate) fn snapshot(&self) -> &Path {
        &self.snapshot
    }

    fn blob(&self, file: &RemoteFile) -> PathBuf {
        self.root.join("blobs").join(file.digest.hex())
    }

    fn unfinished(&self, file: &RemoteFile) -> PathBuf {
        self.root.join("blobs").join(format!("{}.incomplete", file.digest.hex()))
    }

    /// Bytes of a file that are here already.
    pub(crate) fn have(&self, file: &RemoteFile) -> u64 {
        let length = |p: &Path| fs::metadata(p).map_or(0, |m| m.len());
        if length(&self.blob(file)) == file.size && self.blob(file).exists() {
            return file.size;
        }
        length(&self.unfinished(file)).min(file.size)
    }

    pub(crate) fn room_for(&self, needed: u64) -> Result<()> {
        let stat =
            statvfs(&self.root).map_err(|e| FetchError::io(&self.root, "asking for free space")(e.into()))?;
        let available = stat.f_bavail.saturating_mul(stat.f_frsize);
        if needed > available {
            return Err(FetchError::Space { path: self.root.clone(), needed, available });
        }
        Ok(())
    }

    /// The revision now means this commit.
    pub(crate) fn point(&self, revision: &str) -> Result<()> {
        if revision == self.commit {
            return Ok(());
        }
        let part_ok = |p: &str| !p.is_empty() && p != "." && p != "..";
        if !revision.split('/').all(part_ok) {
            return Err(FetchError::Request(format!("{revision:?} is not a revision")));
        }
        let path = self.root.join("refs").join(revision);
        if let Some(dir) = path.parent() {
            fs::create_dir_all(dir).map_err(FetchError::io(dir, "creating the folder"))?;
        }
        fs::write(&path, &self.commit).map_err(FetchError::io(&path, "writing the reference"))
    }

    /// Sees to it that a file is in the snapshot: fetched, checked, linked.
    pub(crate) fn obtain(
        &self,
        client: &Client,
        url: &str,
        file: &RemoteFile,
        progress: &Progress,
        interrupted: &AtomicBool,
    ) -> Result<()> {
        let blob = self.blob(file);
        if fs::metadata(&blob).map(|m| m.len()).ok() != Some(file.size) {
            self.download(client, url, file, progress, interrupted)?;
        }
        self.link(file, &blob)
    }

    fn download(
        &self,
        client: &Client,
        url: &str,
        file: &RemoteFile,
        progress: &Progress,
        interrupted: &AtomicBool,
    ) -> Result<()> {
        let path = self.unfinished(file);
        let opened = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path);
        let mut out = opened.map_err(FetchError::io(&path, "opening the download"))?;
        if flock(&out, FlockOperation::NonBlockingLockExclusive).is_err() {
            return Err(FetchError::Locked { path });
        }
        let disk = |what| FetchError::io(&path, what);
        let mut at = out.metadata().map_err(disk("reading its size"))?.len();
        if at > file.size {
            // Longer than the file can be: nothing of it can be trusted.
            out.set_len(0).map_err(disk("emptying the download"))?;
            at = 0;
        }
        let mut failures = 0;
        while at < file.size {
            if interrupted.load(Ordering::Relaxed) {
                return Err(FetchError::Interrupted);
            }
            let before = at;
            let broken = match client.open(url, at, file.size) {
                Ok(body) => {
                    if body.start != at {
                        progress
                            .kept
                            .fetch_sub(at.min(progress.kept.load(Ordering::Relaxed)), Ordering::Relaxed);
                        at = body.start;
                    }
                    out.seek(SeekFrom::Start(at)).map_err(disk("positioning"))?;
                    self.pump(body, &mut out, &mut at, file, client, progress, interrupted)?
                }
                Err(Broken::Final(e)) => return Err(e),
                Err(Broken::Again(what)) => Some(what),
            };
            let Some(what) = broken.or_else(|| (at < file.size).then(|| "the connection ended early".into()))
            else {
                break;
            };
            progress.resumed.fetch_add(1, Ordering::Relaxed);
            failures = if at > before { 1 } else { failures + 1 };
            if failures >= client.attempts {
                return Err(FetchError::Network { url: url.to_owned(), what });
            }
            std::thread::sleep(pause(failures));
        }
        out.set_len(at).map_err(disk("cutting the download"))?;
        out.sync_all().map_err(disk("syncing the download"))?;
        self.check(&mut out, file, &path)?;
        fs::rename(&path, self.blob(file)).map_err(disk("renaming the download"))
    }

    /// Copies a body to the file. `Some(cause)` when the connection broke; `at` counts what is on disk.
    #[expect(clippy::too_many_arguments, reason = "the two ends of a copy and its counters")]
    fn pump(
        &self,
        body: Body,
        out: &mut File,
        at: &mut u64,
        file: &RemoteFile,
        client: &Client,
        progress: &Progress,
        interrupted: &AtomicBool,
    ) -> Result<Option<String>> {
        // A thread reads, so that silence can be noticed and left behind.
        let (send, receive) = sync_channel::<io::Result<Vec<u8>>>(2);
        let mut reader = body.reader;
        std::thread::spawn(move || {
            let mut buffer = vec![0; PIECE];
            loop {
                let read = match reader.read(&mut buffer) {
                    Ok(0) => return,
                    Ok(n) => Ok(buffer[..n].to_vec()),
                    Err(e) => Err(e),
                };
                let end = read.is_err();
                if send.send(read).is_err() || end {
                    return;
                }
            }
        });
        loop {
            match next(&receive, client, interrupted)? {
                Next::Piece(piece) => {
                    if *at + piece.len() as u64 > file.size {
                        return Err(FetchError::Answer {
                            url: file.path.clone(),
                            what: format!("more than the announced {} bytes", file.size),
                        });
                    }
                    out.write_all(&piece).map_err(FetchError::io(self.unfinished(file), "writing"))?;
                    *at += piece.len() as u64;
                    progress.received.fetch_add(piece.len() as u64, Ordering::Relaxed);
                }
                Next::End => return Ok(None),
                Next::Broken(what) => return Ok(Some(what)),
            }
        }
    }

    /// The bytes must hash to what was announced; else they are removed.
    fn check(&self, out: &mut File, file: &RemoteFile, path: &Path) -> Result<()> {
        let disk = |what| FetchError::io(path, what);
        out.seek(SeekFrom::Start(0)).map_err(disk("positioning"))?;
        let (kind, found) = match &file.digest {
            Digest::Sha256(_) => ("SHA-256", read_back(out, sha2::Sha256::new())),
            Digest::Git(_) => {
                let mut h = sha1::Sha1::new();
                h.update(format!("blob {}\0", file.size).as_bytes());
                ("git blob SHA-1", read_back(out, h))
            }
        };
        let found = found.map_err(disk("reading back"))?;
        if found != file.digest.hex() {
            fs::remove_file(path).map_err(disk("removing"))?;
            let expected = file.digest.hex().to_owned();
            return Err(FetchError::Digest { file: file.path.clone(), kind, expected, found });
        }
        Ok(())
    }

    fn link(&self, file: &RemoteFile, blob: &Path) -> Result<()> {
        let link = self.snapshot.join(&file.path);
        if let Some(dir) = link.parent() {
            fs::create_dir_all(dir).map_err(FetchError::io(dir, "creating the folder"))?;
        }
        // Out of the folders of the path, of the snapshot and of `snapshots`.
        let up = "../".repeat(file.path.split('/').count() + 1);
        let target = format!("{up}blobs/{}", file.digest.hex());
        match fs::read_link(&link) {
            Ok(t) if t == Path::new(&target) => return Ok(()),
            Ok(_) => fs::remove_file(&link).map_err(FetchError::io(&link, "replacing the link"))?,
            Err(_) => {}
        }
        match std::os::unix::fs::symlink(&target, &link) {
            Ok(()) => Ok(()),
            // File systems without links get a copy.
            Err(e)
                if e.kind() == io::ErrorKind::PermissionDenied || e.kind() == io::ErrorKind::Unsupported =>
            {
                fs::copy(blob, &link).map(drop).map_err(FetchError::io(&link, "copying"))
            }
            Err(e) => Err(FetchError::io(&link, "linking")(e)),
        }
    }
}

enum Next {
    Piece(Vec<u8>),
    End,
    Broken(String),
}

fn next(receive: &Receiver<io::Result<Vec<u8>>>, client: &Client, interrupted: &AtomicBool) -> Result<Next> {
    let step = std::time::Duration::from_millis(100);
    let mut silent = std::time::Duration::ZERO;
    loop {
        match receive.recv_timeout(step) {
            Ok(Ok(piece)) => return Ok(Next::Piece(piece)),
            Ok(Err(e)) => return Ok(Next::Broken(e.to_string())),
            Err(RecvTimeoutError::Disconnected) => return Ok(Next::End),
            Err(RecvTimeoutError::Timeout) => {
                if interrupted.load(Ordering::Relaxed) {
                    return Err(FetchError::Interrupted);
                }
                silent += step;
                if silent >= client.stall {
                    return Ok(Next::Broken("the connection fell silent".into()));
                }
            }
        }
    }
}

/// Hash of the rest of a file, hexadecimal.
fn read_back<D: sha2::Digest>(from: &mut File, mut hash: D) -> io::Result<String> {
    let mut buffer = vec![0; PIECE];
    loop {
        match from.read(&mut buffer)? {
            0 => return Ok(hex(&hash.finalize())),
            n => hash.update(&buffer[..n]),
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}
