//! `SHA256SUMS`: whole-file digests for tools outside this project (`sha256sum -c`). One file per folder, shared by
//! every set in it: only the lines of the caller's own files are replaced, under a lock on the folder, by rename.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use sha2::{Digest as _, Sha256};

use crate::io::{CHUNK, Interrupt, Io, drop_cache, file_name, folder_of};
use crate::{ArtifactError, Result};

/// Name of the file.
pub const SHA256SUMS: &str = "SHA256SUMS";

/// SHA-256 of a whole file as lower-case hex.
///
/// # Errors
/// I/O errors, an interruption.
pub fn hash_file(path: &Path, interrupt: &Interrupt) -> Result<String> {
    use std::io::Read as _;
    let mut file = File::open(path).map_err(|e| ArtifactError::io(path, "open", e))?;
    let (mut hasher, mut buffer, mut at) = (Sha256::new(), vec![0; CHUNK / 8], 0u64);
    loop {
        interrupt.check()?;
        let n = file.read(&mut buffer).map_err(|e| ArtifactError::io(path, "read", e))?;
        if n == 0 {
            break;
        }
        hasher.update(&buffer[..n]);
        drop_cache(&file, at, n as u64);
        at += n as u64;
    }
    Ok(hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Hashes several files in parallel, in order of `paths`.
pub(crate) fn hash_files(paths: &[PathBuf], interrupt: &Interrupt) -> Result<Vec<String>> {
    let next = AtomicUsize::new(0);
    let results = Mutex::new(Vec::new());
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(paths.len());
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some((i, path)) = paths.iter().enumerate().nth(next.fetch_add(1, Ordering::Relaxed))
                {
                    let result = hash_file(path, interrupt);
                    results.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push((i, result));
                }
            });
        }
    });
    let mut results = results.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    results.sort_by_key(|(i, _)| *i);
    results.into_iter().map(|(_, result)| result).collect()
}

/// Name and hash of one line; `None` for lines of another shape, which are kept as they are.
fn parse_line(line: &str) -> Option<(String, &str)> {
    let (escaped, line) = match line.strip_prefix('\\') {
        Some(rest) => (true, rest),
        None => (false, line),
    };
    let (hash, name) = line.split_once(' ')?;
    if hash.len() != 64 || !hash.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    let name = name.strip_prefix([' ', '*'])?;
    let name = if escaped { name.replace("\\n", "\n").replace("\\\\", "\\") } else { name.to_owned() };
    Some((name, hash))
}

fn format_line(name: &str, hash: &str) -> String {
    if name.contains(['\n', '\\']) {
        format!("\\{hash}  {}\n", name.replace('\\', "\\\\").replace('\n', "\\n"))
    } else {
        format!("{hash}  {name}\n")
    }
}

/// Replaces the lines of `set` and drops those of `gone` in the folder's file; other lines stay byte for byte.
pub(crate) fn update(folder: &Path, gone: &[String], set: &[(String, String)], io: &Io) -> Result<()> {
    let lock = File::open(folder).map_err(|e| ArtifactError::io(folder, "open", e))?;
    // A folder that cannot be locked (some network file systems) is still updated by rename.
    let _ = lock.lock();
    let path = folder.join(SHA256SUMS);
    let old = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => String::new(),
        Err(e) => return Err(ArtifactError::io(&path, "read", e)),
    };
    let mut text = String::new();
    for line in old.lines() {
        let own = |(name, _): (String, &str)| gone.contains(&name) || set.iter().any(|(own, _)| *own == name);
        if !parse_line(line).is_some_and(own) {
            text.push_str(line);
            text.push('\n');
        }
    }
    set.iter().for_each(|(name, hash)| text.push_str(&format_line(name, hash)));
    let temporary = folder.join(".SHA256SUMS.tmp");
    io.write_file(&temporary, text.as_bytes())?;
    io.rename_over(&temporary, &path)?;
    io.sync_folder(folder)
}

/// The recorded hash of `path` in its folder's file.
///
/// # Errors
/// I/O errors other than an absent file.
pub fn recorded(path: &Path) -> Result<Option<String>> {
    let sums = folder_of(path).join(SHA256SUMS);
    let text = match fs::read_to_string(&sums) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(ArtifactError::io(&sums, "read", e)),
    };
    let name = file_name(path)?;
    Ok(text.lines().filter_map(parse_line).find(|(n, _)| n == name).map(|(_, hash)| hash.to_lowercase()))
}

/// State of one file's line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SumState {
    /// The file hashes to its line.
    Ok,
    /// It does not.
    Mismatch,
    /// There is no line.
    Absent,
}

/// Checks the lines of `paths` and of nothing else.
///
/// # Errors
/// I/O errors, an interruption.
pub fn check(paths: &[PathBuf], interrupt: &Interrupt) -> Result<Vec<(PathBuf, SumState)>> {
    let mut known = Vec::new();
    let mut states = Vec::new();
    for path in paths {
        match recorded(path)? {
            Some(hash) => known.push((path.clone(), hash)),
            None => states.push((path.clone(), SumState::Absent)),
        }
    }
    let files: Vec<PathBuf> = known.iter().map(|(path, _)| path.clone()).collect();
    for ((path, hash), found) in known.into_iter().zip(hash_files(&files, interrupt)?) {
        states.push((path, if hash == found { SumState::Ok } else { SumState::Mismatch }));
    }
    Ok(states)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_own_lines_are_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(SHA256SUMS);
        let (a, b) = ("a".repeat(64), "b".repeat(64));
        let foreign = format!("{a} *other file\n# a comment\n{a}  mine\n{a}  old\n");
        fs::write(&path, foreign).unwrap();
        update(dir.path(), &["old".into()], &[("mine".into(), b.clone())], &Io::default()).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        assert_eq!(text, format!("{a} *other file\n# a comment\n{b}  mine\n"));
        assert_eq!(recorded(&dir.path().join("mine")).unwrap(), Some(b));
        assert_eq!(recorded(&dir.path().join("old")).unwrap(), None);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn hashes_are_sha256() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("abc");
        fs::write(&path, "abc").unwrap();
        let hash = hash_file(&path, &Interrupt::default()).unwrap();
        assert_eq!(hash, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    }
}
