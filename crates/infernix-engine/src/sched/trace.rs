//! Recording what ran, by ids only: one JSON document a line.
//!
//! The first line is the header: `{"infernix_trace": 1, "page_tokens", "page_bytes", "state_bytes", "layers", ...}`. Then
//! `{"at": seconds, "request": n, "prompt": [ids], "markers", "max_tokens", "session"}`,
//! `{"at", "end": n, "output": [ids], "cached", "rounds", "drafted", "accepted"}`, `{"cache": "snapshot" | "dropped_snapshot" |
//! "dropped_block" | "restored", ...}` and `{"routing": [[[expert, ...] by row] by layer]}`. The file is readable by its owner
//! alone: ids are text.

use super::Limits;
use super::api::{Request, RequestId, Usage};
use crate::cache::CacheEvent;
use crate::error::EngineError;
use crate::state::PAGE_TOKENS;
use serde_json::{Value, json};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::time::Duration;

/// Version of the lines.
pub(crate) const VERSION: u64 = 1;

/// Writes a trace. A write that fails ends the recording; requests go on.
pub(crate) struct Recorder {
    out: Option<BufWriter<File>>,
}

impl Recorder {
    pub(crate) fn create(path: &Path, limits: &Limits) -> Result<Self, EngineError> {
        let mut options = File::options();
        options.write(true).create(true).truncate(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        let file = options
            .open(path)
            .map_err(|e| EngineError::Source { name: path.display().to_string(), source: e.into() })?;
        let mut r = Recorder { out: Some(BufWriter::new(file)) };
        r.line(&json!({
            "infernix_trace": VERSION, "page_tokens": PAGE_TOKENS, "page_bytes": limits.page_bytes,
            "pages": limits.pages, "sequences": limits.sequences, "vocab": limits.vocab,
        }));
        Ok(r)
    }

    fn line(&mut self, value: &Value) {
        let Some(out) = &mut self.out else { return };
        if writeln!(out, "{value}").is_err() {
            self.out = None;
        }
    }

    pub(crate) fn request(&mut self, at: Duration, id: RequestId, r: &Request) {
        self.line(&json!({
            "at": at.as_secs_f64(), "request": id.0, "prompt": r.prompt, "markers": r.cache.markers,
            "max_tokens": r.max_tokens, "session": r.cache.session,
        }));
    }

    pub(crate) fn end(&mut self, at: Duration, id: RequestId, output: &[u32], u: &Usage) {
        self.line(&json!({
            "at": at.as_secs_f64(), "end": id.0, "output": output, "cached": u.cached, "rounds": u.rounds,
            "drafted": u.drafted, "accepted": u.accepted,
        }));
        if self.out.as_mut().is_some_and(|out| out.flush().is_err()) {
            self.out = None;
        }
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

    pub(crate) fn routing(&mut self, layers: &[Vec<Vec<u32>>]) {
        if layers.iter().any(|l| !l.is_empty()) {
            self.line(&json!({ "routing": layers }));
        }
    }
}
