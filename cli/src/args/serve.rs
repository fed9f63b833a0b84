//! Flags of `infernix serve`. A configuration file has the same names without the dashes.

use super::{ModelArgs, SamplingArgs, SchedArgs, SpecArgs};
use clap::{Args, ValueEnum};
use std::path::PathBuf;

#[derive(Debug, Args)]
#[command(args_override_self = true)]
pub(crate) struct ServeArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// Read flags from a TOML file; those of the command line win
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// The configuration file's `model`, used where the command line names none
    #[arg(long, hide = true, value_name = "PATH")]
    pub(crate) config_model: Option<PathBuf>,
    /// Public name of the model [default: the artifact's name]
    #[arg(long, value_name = "ID", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub(crate) model_id: Option<String>,
    /// Tokens that prompt and answer of a request may have together [default: the model's own limit, at most 32768]
    #[arg(long, value_name = "N")]
    pub(crate) max_context: Option<usize>,
    /// Tokens that all requests may have together [default: max-context for every lane]
    #[arg(long, value_name = "N")]
    pub(crate) kv_capacity: Option<usize>,
    #[command(flatten)]
    pub(crate) http: HttpArgs,
    #[command(flatten)]
    pub(crate) access: AccessArgs,
    #[command(flatten)]
    pub(crate) answers: AnswerArgs,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
    #[command(flatten)]
    pub(crate) spec: SpecArgs,
    #[command(flatten)]
    pub(crate) sched: SchedArgs,
    #[command(flatten)]
    pub(crate) log: LogArgs,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "HTTP")]
pub(crate) struct HttpArgs {
    /// Address to listen on
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    pub(crate) host: String,
    /// Port to listen on; 0 takes a free one
    #[arg(long, value_name = "N", default_value_t = 8080)]
    pub(crate) port: u16,
    /// Also listen here, for those who run the server: drain, cache, metrics; an address and a port
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) admin: Option<String>,
    /// Longest request body
    #[arg(long, value_name = "MIB", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) max_request_mib: u32,
    /// Request bodies being read at once, all together
    #[arg(long, value_name = "MIB", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub(crate) max_requests_mib: u32,
    /// Connections at once; further ones wait
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub(crate) max_connections: u32,
    /// Time for a request's head, and for an idle connection
    #[arg(long, value_name = "MS", default_value_t = 75_000)]
    pub(crate) header_timeout_ms: u64,
    /// Time for a request's body
    #[arg(long, value_name = "MS", default_value_t = 120_000)]
    pub(crate) body_timeout_ms: u64,
    /// Longest time that a client may leave a stream unread
    #[arg(long, value_name = "MS", default_value_t = 60_000)]
    pub(crate) write_timeout_ms: u64,
    /// Longest time of a request, after which its answer is cut; 0 is without end
    #[arg(long, value_name = "MS", default_value_t = 0)]
    pub(crate) request_timeout_ms: u64,
    /// Silence after which a stream shows that it lives
    #[arg(long, value_name = "MS", default_value_t = 5_000, value_parser = clap::value_parser!(u64).range(10..))]
    pub(crate) keep_alive_ms: u64,
    /// Time that running requests get when the server stops
    #[arg(long, value_name = "MS", default_value_t = 30_000)]
    pub(crate) drain_timeout_ms: u64,
    /// Stored responses
    #[arg(long, value_name = "N", default_value_t = 1024)]
    pub(crate) response_store_max_records: usize,
    /// Size of all stored responses
    #[arg(long, value_name = "MIB", default_value_t = 256)]
    pub(crate) response_store_mib: usize,
    /// Put a choice without text into the usage chunk of Chat streams, for clients that reject an empty list
    #[arg(long)]
    pub(crate) usage_chunk_choice: bool,
    /// Also give metrics under another server's names
    #[arg(long, value_enum, value_name = "vllm")]
    pub(crate) metrics_compat: Option<MetricsCompat>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum MetricsCompat {
    /// The eight names that routers of vLLM replicas read
    Vllm,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Access")]
pub(crate) struct AccessArgs {
    /// File with keys that may use the server, one a line: KEY, or NAME KEY; lines with # are comments
    #[arg(long, value_name = "FILE")]
    pub(crate) api_key_file: Option<PathBuf>,
    /// A key that may use the server (repeatable); process listings show it, so prefer a file or INFERNIX_API_KEY
    #[arg(long, value_name = "KEY")]
    pub(crate) api_key: Vec<String>,
    /// Listen beyond this machine without a key
    #[arg(long)]
    pub(crate) allow_no_auth: bool,
    /// Let keys reuse each other's cached prefixes, whose timing shows what others have sent
    #[arg(long)]
    pub(crate) share_prefix_across_keys: bool,
    /// Let pages of every origin use the server
    #[arg(long)]
    pub(crate) cors: bool,
    /// A further name that a loopback server answers to (repeatable), for a reverse proxy that keeps the Host header
    #[arg(long, value_name = "NAME")]
    pub(crate) allow_host: Vec<String>,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Answers")]
pub(crate) struct AnswerArgs {
    /// Tokens of an answer where the request does not say
    #[arg(long, value_name = "N", default_value_t = 8192)]
    pub(crate) default_max_tokens: usize,
    /// Answer without reasoning where the request does not say
    #[arg(long)]
    pub(crate) no_thinking: bool,
    /// Show the model its reasoning of earlier turns where the request does not say
    #[arg(long)]
    pub(crate) preserve_thinking: bool,
    /// Reasoning effort where the request does not say
    #[arg(long, value_name = "EFFORT")]
    pub(crate) reasoning_effort: Option<String>,
    /// Reasoning tokens where the request does not say
    #[arg(long, value_name = "N")]
    pub(crate) default_thinking_budget: Option<usize>,
    /// What ends the reasoning at its budget [default: Qwen's published sentence]
    #[arg(long, value_name = "TEXT")]
    pub(crate) thinking_budget_message: Option<String>,
    /// What to do about reasoning that goes round in circles
    #[arg(long, value_enum, default_value_t = LoopGuard::Off)]
    pub(crate) reasoning_loop: LoopGuard,
    /// Repair tool calls that are almost right
    #[arg(long)]
    pub(crate) tolerant_tool_calls: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LoopGuard {
    /// Nothing
    Off,
    /// End the answer as if its length were reached
    Stop,
    /// Close the reasoning and let the model answer
    Conclude,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Log")]
pub(crate) struct LogArgs {
    /// What is said on the console: off, error, warn, info, debug, trace, or a list like info,hyper=debug [default: $RUST_LOG or info]
    #[arg(long, value_name = "LEVEL", env = "INFERNIX_LOG")]
    pub(crate) log_level: Option<String>,
    /// How often the console says what the engine does, while it does something; 0 is never
    #[arg(long, value_name = "MS", default_value_t = 5_000)]
    pub(crate) log_stats_interval_ms: u64,
    /// Append one JSON object per event to this file; no prompts, no answers, no keys
    #[arg(long, value_name = "FILE")]
    pub(crate) request_log_jsonl: Option<PathBuf>,
    /// Rotate the log at this size
    #[arg(long, value_name = "MIB", requires = "request_log_jsonl")]
    pub(crate) request_log_max_mib: Option<u64>,
    /// Rotated logs kept
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(0..=1000))]
    pub(crate) request_log_keep: u32,
}
