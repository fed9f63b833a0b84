//! Settings of the engine.

use std::path::PathBuf;
use std::time::Duration;

/// Settings of an engine; every field has a flag of the same name.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Digest of the model, for traces.
    pub model: String,
    /// Requests that run at once, 1..=8 (`--max-concurrency`). The driver needs as many sequences.
    pub max_concurrency: usize,
    /// Requests that may wait beyond those (`--max-pending-requests`).
    pub max_pending_requests: usize,
    /// Longest wait for a lane (`--pending-timeout-ms`); zero is without end.
    pub pending_timeout: Duration,
    /// Prompt tokens of one model call (`--prefill-chunk`).
    pub prefill_chunk: usize,
    /// Tokens that prompt and answer of one request may have together.
    pub max_context: usize,
    /// Ids below this have a token; the rows above pad the vocabulary.
    pub addressable: usize,
    /// Prefix cache.
    pub cache: CacheOptions,
    /// Drafting.
    pub spec: SpecOptions,
    /// Write a trace of ids, routing and cache events (`--record-trace`).
    pub record_trace: Option<PathBuf>,
}

impl Default for EngineOptions {
    fn default() -> Self {
        EngineOptions {
            model: String::new(),
            max_concurrency: 1,
            max_pending_requests: 16,
            pending_timeout: Duration::from_secs(30),
            prefill_chunk: 512,
            max_context: 8192,
            addressable: usize::MAX,
            cache: CacheOptions::default(),
            spec: SpecOptions::default(),
            record_trace: None,
        }
    }
}

/// Settings of the prefix cache.
#[derive(Clone, Debug)]
pub struct CacheOptions {
    /// Whether prefixes are reused at all (`--no-prefix-cache`).
    pub enabled: bool,
    /// Bytes of snapshots kept in the backend's memory; KV blocks there use whatever pages no lane needs
    /// (`--prefix-cache-device-mib`).
    pub device_bytes: u64,
    /// Bytes of blocks and snapshots kept in RAM (`--prefix-cache-mib`); 0 = none.
    pub host_bytes: u64,
    /// File that outlives the process (`--prefix-cache-file`).
    pub file: Option<PathBuf>,
    /// Bytes the file may have (`--prefix-cache-file-mib`).
    pub file_bytes: u64,
    /// Identity of everything that makes state reusable, in lines `name: value`: model digest, KV format, arithmetic. Files
    /// of another identity are ignored, and the lines that differ are said.
    pub identity: String,
    /// Shortest distance of two snapshots that nobody asked for explicitly, in tokens.
    pub min_gap: usize,
}

impl Default for CacheOptions {
    fn default() -> Self {
        CacheOptions {
            enabled: true,
            device_bytes: 1 << 30,
            host_bytes: 8 << 30,
            file: None,
            file_bytes: 8 << 30,
            identity: String::new(),
            min_gap: 256,
        }
    }
}

/// How to draft.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum SpecMode {
    /// The model's drafter where it has one, copies from the text, whatever pays.
    #[default]
    Auto,
    /// Plain decoding.
    Off,
    /// The model's own drafter only.
    Mtp,
}

/// Settings of drafting. None of them changes any text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct SpecOptions {
    /// Which drafters (`--spec`).
    pub mode: SpecMode,
    /// Longest draft; `None` = chosen by measured gain (`--draft-tokens auto`).
    pub draft_tokens: Option<usize>,
    /// Draft with the proposal head, a part of the vocabulary (`--lm-head-draft`).
    pub proposal_head: bool,
    /// Longest copy from earlier text; `None` = chosen by measured gain, 0 = none (`--ngram-draft-tokens`).
    pub ngram_tokens: Option<usize>,
    /// Tokens that must agree before a copy is tried (`--ngram-min-match`); 0 = the default of 12.
    pub ngram_min_match: usize,
}
