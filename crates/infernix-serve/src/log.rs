//! The request log: one JSON object a line, never a prompt, an answer or a key.
//!
//! Kinds: `server_start`, `request_start`, then exactly one of `request_done` and `request_error` for each started
//! request, `request_rejected` for what never started, `server_stop`. The file is readable by its owner only. When it
//! grows beyond its limit it becomes FILE.1, FILE.1 becomes FILE.2 and so on; each new file begins with `server_start`.

use serde_json::{Map, Value};
use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

/// Settings of the request log.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LogOptions {
    /// File to append to (`--request-log-jsonl`); none where absent.
    pub file: Option<PathBuf>,
    /// Bytes after which it is rotated (`--request-log-max-mib`).
    pub max_bytes: Option<u64>,
    /// Rotated files kept (`--request-log-keep`).
    pub keep: usize,
}

/// An open log.
#[derive(Debug)]
pub(crate) struct RequestLog {
    options: LogOptions,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    file: Option<File>,
    bytes: u64,
    start: Vec<u8>,
    failed: bool,
}

impl RequestLog {
    /// Opens the file. `start` describes the server.
    pub(crate) fn open(options: LogOptions, start: Map<String, Value>) -> io::Result<Self> {
        let start = line("server_start", start);
        let mut inner = Inner { start, ..Inner::default() };
        if let Some(path) = &options.file {
            let (file, bytes) = append(path)?;
            inner.file = Some(file);
            inner.bytes = bytes;
        }
        let log = Self { options, inner: Mutex::new(inner) };
        let mut inner = log.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let start = inner.start.clone();
        log.append(&mut inner, &start);
        drop(inner);
        Ok(log)
    }

    /// Writes one line. A full disk costs log lines, never requests.
    pub(crate) fn write(&self, kind: &str, fields: Map<String, Value>) {
        if self.options.file.is_none() {
            return;
        }
        let line = line(kind, fields);
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        if self.options.max_bytes.is_some_and(|max| inner.bytes + line.len() as u64 > max) {
            self.rotate(&mut inner);
        }
        self.append(&mut inner, &line);
    }

    /// Whether a line could not be written.
    pub(crate) fn failed(&self) -> bool {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner).failed
    }

    fn append(&self, inner: &mut Inner, line: &[u8]) {
        let Some(file) = &mut inner.file else { return };
        match file.write_all(line) {
            Ok(()) => inner.bytes += line.len() as u64,
            Err(_) => inner.failed = true,
        }
    }

    fn rotate(&self, inner: &mut Inner) {
        let Some(path) = &self.options.file else { return };
        inner.file = None;
        let name = |i: usize| {
            let mut name = path.as_os_str().to_owned();
            name.push(format!(".{i}"));
            PathBuf::from(name)
        };
        let moved = if self.options.keep == 0 {
            std::fs::remove_file(path)
        } else {
            for i in (1..self.options.keep).rev() {
                // Fails where there is no such file yet, which is fine.
                let _ = std::fs::rename(name(i), name(i + 1));
            }
            std::fs::rename(path, name(1))
        };
        match moved.and_then(|()| append(path)) {
            Ok((file, bytes)) => {
                inner.file = Some(file);
                inner.bytes = bytes;
                let start = inner.start.clone();
                self.append(inner, &start);
            }
            Err(_) => inner.failed = true,
        }
    }
}

fn append(path: &Path) -> io::Result<(File, u64)> {
    let mut options = OpenOptions::new();
    options.append(true).create(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let file = options.open(path)?;
    let bytes = file.metadata()?.len();
    Ok((file, bytes))
}

fn line(kind: &str, fields: Map<String, Value>) -> Vec<u8> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let mut map = Map::from_iter([
        ("time".to_owned(), Value::from((now.as_secs_f64() * 1e3).round() / 1e3)),
        ("event".to_owned(), kind.into()),
    ]);
    map.extend(fields);
    let mut line = Value::Object(map).to_string().into_bytes();
    line.push(b'\n');
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn fields(n: usize) -> Map<String, Value> {
        Map::from_iter([("n".to_owned(), json!(n))])
    }

    #[test]
    fn rotation_keeps_the_newest_and_each_file_begins_with_the_server() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("log.jsonl");
        let options = LogOptions { file: Some(path.clone()), max_bytes: Some(200), keep: 2 };
        let log = RequestLog::open(options, fields(0)).expect("opens");
        for n in 1..20 {
            log.write("request_done", fields(n));
        }
        let read = |name: &str| std::fs::read_to_string(folder.path().join(name)).expect("a file");
        for name in ["log.jsonl", "log.jsonl.1", "log.jsonl.2"] {
            let text = read(name);
            assert!(
                text.len() <= 200 && text.lines().next().expect("a line").contains("server_start"),
                "{name}"
            );
            assert!(text.lines().all(|l| serde_json::from_str::<Value>(l).is_ok()));
        }
        assert!(read("log.jsonl").contains("\"n\":19"));
        assert!(!folder.path().join("log.jsonl.3").exists());
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt as _;
            assert_eq!(std::fs::metadata(&path).expect("a file").permissions().mode() & 0o777, 0o600);
        }
    }
}
