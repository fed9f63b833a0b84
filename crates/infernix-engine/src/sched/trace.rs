//! Recording what ran, by ids only: one JSON document a line.
//!
//! The first line is the header: `{"infernix_trace": 1, "page_tokens", "page_bytes", "pages", "sequences", "vocab",
//! "model": its digest, "prefix_cache": whether there is one, and so cache events}`. Then
//! `{"at": seconds, "request": n, "prompt": [ids], "markers", "max_tokens", "session", "salt": the number of its salt, 0
//! where it has none, "bypass", "reread"}`,
//! `{"at", "end": n, "output": [ids], "cached", "rounds", "drafted", "accepted"}`, `{"cache": "snapshot" | "dropped_snapshot" |
//! "dropped_block" | "restored", ...}` and `{"call": "prompt" | "decode", "routing": [[[expert, ...] by row] by layer]}`. The file is readable by its owner
//! alone: ids are text.

use super::api::{Request, RequestId, Usage};
use super::{EngineOptions, Limits};
use crate::cache::CacheEvent;
use crate::error::EngineError;
use crate::state::PAGE_TOKENS;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::time::Duration;

/// Version of the lines.
pub(crate) const VERSION: u64 = 1;
/// How a trace of any version begins.
pub const TRACE_START: &str = "{\"infernix_trace\":";

/// Writes a trace. A write that fails ends the recording; requests go on, and the end of the recording says so.
pub(crate) struct Recorder {
    out: Option<BufWriter<File>>,
    name: String,
    failed: Option<String>,
    /// Salts by number: a salt may be a text of a client's.
    salts: HashMap<String, usize>,
}

impl Recorder {
    pub(crate) fn create(path: &Path, limits: &Limits, options: &EngineOptions) -> Result<Self, EngineError> {
        let mut how = File::options();
        how.write(true).create(true).truncate(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut how, 0o600);
        let file = crate::files::open_to_write(&mut how, path)
            .map_err(|e| EngineError::Source { name: path.display().to_string(), source: e.into() })?;
        #[cfg(unix)]
        if file.metadata().is_ok_and(|m| m.is_file()) {
            // The mode above is that of a new file only.
            let own = std::os::unix::fs::PermissionsExt::from_mode(0o600);
            file.set_permissions(own)
                .map_err(|e| EngineError::Source { name: path.display().to_string(), source: e.into() })?;
        }
        let mut r = Recorder {
            out: Some(BufWriter::new(file)),
            name: path.display().to_string(),
            failed: None,
            salts: HashMap::from([(String::new(), 0)]),
        };
        r.line(&json!({
            "infernix_trace": VERSION, "page_tokens": PAGE_TOKENS, "page_bytes": limits.page_bytes,
            "pages": limits.pages, "sequences": limits.sequences, "vocab": limits.vocab,
            "model": options.model, "prefix_cache": options.cache.enabled,
        }));
        Ok(r)
    }

    fn line(&mut self, value: &Value) {
        self.write(|out| writeln!(out, "{value}"));
    }

    fn write(&mut self, f: impl FnOnce(&mut BufWriter<File>) -> std::io::Result<()>) {
        let Some(out) = &mut self.out else { return };
        if let Err(e) = f(out) {
            self.failed = Some(format!("the trace {} is incomplete: {e}", self.name));
            // What is buffered must not be tried again when the file is closed.
            if let Some(out) = self.out.take() {
                drop(out.into_parts());
            }
        }
    }

    /// Writes what is buffered.
    ///
    /// # Errors
    /// Why the trace is incomplete.
    pub(crate) fn finish(&mut self) -> Result<(), String> {
        self.write(BufWriter::flush);
        self.failed.clone().map_or(Ok(()), Err)
    }

    pub(crate) fn request(&mut self, at: Duration, id: RequestId, r: &Request) {
        let next = self.salts.len();
        let salt = *self.salts.entry(r.cache.salt.clone()).or_insert(next);
        self.line(&json!({
            "at": at.as_secs_f64(), "request": id.0, "prompt": r.prompt, "markers": r.cache.markers,
            "max_tokens": r.max_tokens, "session": r.cache.session, "salt": salt, "bypass": r.cache.bypass,
            "reread": r.cache.reread || r.prompt_logprobs.is_some(),
        }));
    }

    pub(crate) fn end(&mut self, at: Duration, id: RequestId, output: &[u32], u: &Usage) {
        self.line(&json!({
            "at": at.as_secs_f64(), "end": id.0, "output": output, "cached": u.cached, "rounds": u.rounds,
            "drafted": u.drafted, "accepted": u.accepted,
        }));
        self.write(BufWriter::flush);
    }

    pub(crate) fn cache(&mut self, event: CacheEvent) {
        self.line(&match event {
            CacheEvent::Snapshot { tokens, bytes } => {
                json!({ "cache": "snapshot", "tokens": tokens, "bytes": bytes })
            }
            CacheEvent::DroppedSnapshot { tokens } => {
                json!({ "cache": "dropped_snapshot", "tokens": tokens })
            }
            CacheEvent::DroppedBlock => json!({ "cache": "dropped_block" }),
            CacheEvent::Restored { bytes } => json!({ "cache": "restored", "bytes": bytes }),
        });
    }

    pub(crate) fn routing(&mut self, call: &str, layers: &[Vec<Vec<u32>>]) {
        if layers.iter().any(|l| !l.is_empty()) {
            self.line(&json!({ "call": call, "routing": layers }));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits() -> Limits {
        Limits {
            sequences: 1,
            pages: 4,
            page_bytes: 10,
            max_positions: 100,
            vocab: 10,
            drafts: false,
            saves: true,
        }
    }

    #[test]
    fn a_full_disk_ends_the_recording_and_says_so() {
        let full = Path::new("/dev/full");
        if !full.exists() {
            return;
        }
        let mut r = Recorder::create(full, &limits(), &EngineOptions::default()).unwrap();
        for n in 0..1000 {
            r.end(Duration::ZERO, RequestId(n), &[1, 2, 3], &Usage::default());
        }
        assert!(r.finish().unwrap_err().contains("/dev/full is incomplete"));
    }

    #[test]
    fn a_trace_says_who_shares_with_whom_and_no_salts_words() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trace");
        let mut r = Recorder::create(&path, &limits(), &EngineOptions::default()).unwrap();
        for (n, salt, bypass) in
            [(1, "", false), (2, "secret", false), (3, "other", true), (4, "secret", false)]
        {
            let mut request = Request { prompt: vec![1], ..Request::default() };
            (request.cache.salt, request.cache.bypass) = (salt.into(), bypass);
            request.prompt_logprobs = (n == 4).then_some(0);
            r.request(Duration::ZERO, RequestId(n), &request);
        }
        r.finish().unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(!text.contains("secret"));
        let read = crate::sim::Trace::read(text.as_bytes()).unwrap().requests;
        let shown: Vec<_> = read.iter().map(|r| (&r.salt[..], r.bypass, r.reread)).collect();
        assert_eq!(shown, [("", false, false), ("1", false, false), ("2", true, false), ("1", false, true)]);
    }

    #[test]
    fn a_trace_is_readable_by_its_owner_alone_and_begins_with_its_version() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trace");
        // Also where the file was there before, for everybody to read.
        std::fs::write(&path, "old").unwrap();
        Recorder::create(&path, &limits(), &EngineOptions::default()).unwrap().finish().unwrap();
        #[cfg(unix)]
        {
            let mode = std::os::unix::fs::PermissionsExt::mode(&path.metadata().unwrap().permissions());
            assert_eq!(mode & 0o777, 0o600);
        }
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.starts_with("{\"infernix_trace\":1,") && text.starts_with(TRACE_START));
        assert!(
            Recorder::create(folder.path(), &limits(), &EngineOptions::default()).is_err(),
            "a folder is no file"
        );
    }
}
