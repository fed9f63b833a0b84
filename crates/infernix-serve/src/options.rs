//! Settings of the server, finished: the command line checks and fills them.

use crate::log::LogOptions;
use infernix_text::Sampling;
use std::time::Duration;

/// What a running model is called and how large it is, for `/v1/models`.
#[derive(Debug, Clone, Default)]
pub struct ModelInfo {
    /// Public name (`--model-id`).
    pub id: String,
    /// Vocabulary rows.
    pub vocabulary: u64,
    /// Context the model was made for.
    pub trained_context: u64,
    /// Width of the residual stream.
    pub embedding: u64,
    /// Parameters.
    pub parameters: u64,
    /// Bytes of the stored weights.
    pub bytes: u64,
    /// The format that most quantized weights have, or most of all where none are.
    pub format: String,
    /// Which sampling preset applies.
    pub family: infernix_text::Family,
}

/// A key that may use the server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiKey {
    /// Shown in logs instead of the key.
    pub name: String,
    /// The key.
    pub key: String,
}

/// What to do about reasoning that goes round in circles.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ReasoningLoop {
    /// Nothing.
    #[default]
    Off,
    /// End the answer as if its length were reached.
    Stop,
    /// Close the reasoning and let the model answer.
    Conclude,
}

/// Settings of the server. Every field has a flag of the same name.
#[derive(Debug, Clone)]
pub struct ServeOptions {
    /// Keys; empty means that everybody may use the server.
    pub keys: Vec<ApiKey>,
    /// Keys share cached prefixes (`--share-prefix-across-keys`).
    pub share_prefix_across_keys: bool,
    /// Pages of every origin may use the server (`--cors`).
    pub cors: bool,
    /// Further names that a loopback server answers to (`--allow-host`).
    pub allowed_hosts: Vec<String>,
    /// Whether only this machine reaches the server; Host is checked then.
    pub loopback: bool,
    /// Longest body in bytes (`--max-request-mib`).
    pub max_request_bytes: usize,
    /// Bytes of all bodies being read or parsed at once (`--max-requests-mib`).
    pub max_bodies_bytes: usize,
    /// Connections at once (`--max-connections`).
    pub max_connections: usize,
    /// Time for a whole request head, and for an idle connection (`--header-timeout-ms`).
    pub header_timeout: Duration,
    /// Time for a whole body (`--body-timeout-ms`).
    pub body_timeout: Duration,
    /// Longest time that a client may leave a stream unread (`--write-timeout-ms`).
    pub write_timeout: Duration,
    /// Longest time from a request to its end; its answer is cut then (`--request-timeout-ms`).
    pub request_timeout: Option<Duration>,
    /// Silence after which a stream shows that it lives (`--keep-alive-ms`).
    pub keep_alive: Duration,
    /// Time that running requests get after SIGTERM (`--drain-timeout-ms`).
    pub drain_timeout: Duration,
    /// Stored responses (`--response-store-max-records`).
    pub response_store_records: usize,
    /// Their bytes (`--response-store-mib`).
    pub response_store_bytes: usize,
    /// A choice without text in Chat's usage chunk (`--usage-chunk-choice`).
    pub usage_chunk_choice: bool,
    /// Tokens of an answer where the request does not say (`--default-max-tokens`).
    pub default_max_tokens: usize,
    /// Sampling where the request does not say.
    pub sampling: Sampling,
    /// Seed where the request does not say; a fresh one each time where absent.
    pub seed: Option<u64>,
    /// Temperature 0 whatever a request says (`--greedy`).
    pub greedy: bool,
    /// Answers without reasoning where the request does not say (`--no-thinking`).
    pub no_thinking: bool,
    /// Keeps reasoning of earlier turns where the request does not say (`--preserve-thinking`).
    pub preserve_thinking: bool,
    /// Effort where the request does not say (`--reasoning-effort`).
    pub reasoning_effort: Option<String>,
    /// Reasoning tokens where the request does not say (`--default-thinking-budget`).
    pub default_thinking_budget: Option<usize>,
    /// Ends reasoning at its budget (`--thinking-budget-message`).
    pub thinking_budget_message: String,
    /// Guard against circular reasoning (`--reasoning-loop`).
    pub reasoning_loop: ReasoningLoop,
    /// Repairs calls that are almost right (`--tolerant-tool-calls`).
    pub tolerant_tool_calls: bool,
    /// Also gives vLLM's metric names (`--metrics-compat vllm`).
    pub metrics_vllm: bool,
    /// How often the console says what the engine does while it does something (`--log-stats-interval-ms`).
    pub stats_interval: Option<Duration>,
    /// Request log.
    pub log: LogOptions,
}

/// Qwen's published sentence for ending reasoning early.
pub const BUDGET_MESSAGE: &str = "\n\nConsidering the limited time by the user, I have to give the solution based on \
                                  the thinking directly now.\n";

impl Default for ServeOptions {
    fn default() -> Self {
        Self {
            keys: Vec::new(),
            share_prefix_across_keys: false,
            cors: false,
            allowed_hosts: Vec::new(),
            loopback: true,
            max_request_bytes: 64 << 20,
            max_bodies_bytes: 256 << 20,
            max_connections: 1024,
            header_timeout: Duration::from_secs(75),
            body_timeout: Duration::from_secs(120),
            write_timeout: Duration::from_secs(60),
            request_timeout: None,
            keep_alive: Duration::from_secs(5),
            drain_timeout: Duration::from_secs(30),
            response_store_records: 1024,
            response_store_bytes: 256 << 20,
            usage_chunk_choice: false,
            default_max_tokens: 8192,
            sampling: Sampling::default(),
            seed: None,
            greedy: false,
            no_thinking: false,
            preserve_thinking: false,
            reasoning_effort: None,
            default_thinking_budget: None,
            thinking_budget_message: BUDGET_MESSAGE.to_owned(),
            reasoning_loop: ReasoningLoop::Off,
            tolerant_tool_calls: false,
            metrics_vllm: false,
            stats_interval: None,
            log: LogOptions::default(),
        }
    }
}
