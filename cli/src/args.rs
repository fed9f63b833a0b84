//! The command line as typed: flags and their help, no checks beyond syntax. Turning it into finished objects is the
//! commands' work.

mod serve;

pub(crate) use serve::{LoopGuard, ServeArgs};

use clap::{Args, CommandFactory as _, FromArgMatches as _, Parser, Subcommand, ValueEnum};
use std::path::PathBuf;

mod export;
mod given;
mod load;
mod measure;

pub(crate) use export::{ExportArgs, ExportTo};
pub(crate) use given::{ENGINE_OPTIONS, Given};
pub(crate) use load::{
    BenchContextArgs, BenchMode, BenchServeArgs, DatasetKind, FetchArgs, Profile, Ramp, RecordArgs,
    ReplayArgs, ReplayMode, Route, ServerArgs, TextsArg,
};
pub(crate) use measure::{Boundaries, KldArgs, KldPath, KldSpec, LogitsArgs, PplArgs, ReportArgs};

/// Convert, verify, measure and serve Qwen hybrid models on one GPU or a CPU.
#[derive(Debug, Parser)]
#[command(name = "infernix", version, max_term_width = 100, propagate_version = true)]
#[command(
    after_help = "Exit codes: 0 done, 1 failed or mismatch found, 2 wrong usage, 130 interrupted, 143 terminated."
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,

    /// How progress is shown on stderr
    #[arg(long, global = true, value_enum, default_value_t = ProgressMode::Auto)]
    pub(crate) progress: ProgressMode,
}

/// The command line, with llama-bench's `-pg`, which clap cannot spell, as `--pg`.
pub(crate) fn arguments() -> Vec<std::ffi::OsString> {
    std::env::args_os().map(|a| if a == "-pg" { "--pg".into() } else { a }).collect()
}

/// The command with the options that were typed. Help and mistakes end the process.
pub(crate) fn parse(arguments: Vec<std::ffi::OsString>) -> (Cli, Given) {
    let mut command = Cli::command();
    command.build();
    let mut matches = command.clone().get_matches_from(arguments);
    let given =
        matches.subcommand().and_then(|(name, sub)| Some(Given::new(command.find_subcommand(name)?, sub)));
    let cli = Cli::from_arg_matches_mut(&mut matches).unwrap_or_else(|e| e.format(&mut command).exit());
    (cli, given.unwrap_or_default())
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ProgressMode {
    /// A bar on a terminal, nothing elsewhere
    Auto,
    /// One line of text now and then
    Plain,
    /// One JSON object a line
    Json,
    /// Nothing
    None,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Download a repository into the Hugging Face cache, resuming where an earlier download stopped
    Fetch(FetchArgs),
    /// Turn a published checkpoint into an artifact and an n-gram volume
    Convert(ConvertArgs),
    /// Prove that an artifact holds what its checkpoint holds
    Verify(VerifyArgs),
    /// Write an artifact back as a safetensors checkpoint or a GGUF model, without changing a word
    Export(ExportArgs),
    /// Show what is in an artifact, a part, a volume or a checkpoint folder
    Inspect(InspectArgs),
    /// Rewrite damaged objects of an artifact from its checkpoint
    Repair(RepairArgs),
    /// Rename an artifact and all its parts
    Rename(RenameArgs),
    /// Remove the state of an interrupted conversion
    Clean(CleanArgs),
    /// Write a model card from an artifact and its reports
    Card(CardArgs),
    /// Answer a prompt
    Run(RunArgs),
    /// Serve the model over HTTP: OpenAI's and Anthropic's protocols, for agents and programs
    Serve(Box<ServeArgs>),
    /// Write a model's logits over given token ids, for comparing engines
    Logits(LogitsArgs),
    /// Measure how far a model runs from the exact one: KL divergence against a lossless reference
    Kld(Box<KldArgs>),
    /// Measure perplexity over windows of texts
    Ppl(PplArgs),
    /// Join reports of kld, ppl, bench and replay into one self-contained page
    Report(ReportArgs),
    /// Measure prompt and generation throughput in process, or the speed of a server
    Bench(Box<BenchArgs>),
    /// Predict hit rates and speeds of a machine from recorded or made-up traffic
    Plan(PlanArgs),
    /// Play an agent workload against one or several servers and compare them
    Replay(Box<ReplayArgs>),
    /// Convert and verify the bundled model, then let it answer a prompt
    Demo(DemoArgs),
    /// Report what this machine can run
    Doctor(DoctorArgs),
    /// Print generated documentation
    #[command(hide = true)]
    Gen(GenArgs),
}

#[derive(Debug, Args)]
pub(crate) struct ConvertArgs {
    /// Folder of the checkpoint, or a GGUF file; without it the Hugging Face cache is searched for the recipe's repositories
    pub(crate) checkpoint: Option<PathBuf>,
    /// Recipe by name or as a TOML file; `auto` keeps every tensor as stored
    #[arg(long, short, value_name = "NAME|FILE")]
    pub(crate) recipe: String,
    /// Artifact to write; a further part gets a sibling name
    #[arg(long, short, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
    /// Take a role's tensors from another checkpoint (roles: base, quantized, table, mtp, vision, dflash, dflash2, resources)
    #[arg(long = "source", value_name = "ROLE=PATH")]
    pub(crate) sources: Vec<String>,
    /// Revision to look for in the Hugging Face cache
    #[arg(long)]
    pub(crate) revision: Option<String>,
    /// Components to convert [default: all that the checkpoint has]
    #[arg(long, value_delimiter = ',', value_name = "text,vision,mtp,dflash,dflash2")]
    pub(crate) components: Vec<String>,
    /// Add a proposal head: the output rows of the most frequent tokens, for drafting
    #[arg(long)]
    pub(crate) proposal: bool,
    /// Rows of the proposal head [default: min(131072, half of the addressable vocabulary)]
    #[arg(long, value_name = "N", requires = "proposal")]
    pub(crate) proposal_rows: Option<u64>,
    /// Token ranking: little-endian int64 counts, one row of the vocabulary or more (the first holds the totals)
    #[arg(long, value_name = "FILE", requires = "proposal")]
    pub(crate) ranking: Option<PathBuf>,
    /// Rank tokens by their frequency in this text
    #[arg(long, value_name = "FILE", requires = "proposal", conflicts_with = "ranking")]
    pub(crate) ranking_text: Option<PathBuf>,
    /// Where to write the n-gram volume [default: the artifact's name with .ngram]
    #[arg(long, value_name = "FILE")]
    pub(crate) ngram_out: Option<PathBuf>,
    /// Use an existing n-gram volume with the same rows instead of writing one
    #[arg(long, value_name = "FILE", conflicts_with = "ngram_out")]
    pub(crate) ngram_reuse: Option<PathBuf>,
    /// Name stored in the artifact
    #[arg(long)]
    pub(crate) name: Option<String>,
    /// Largest size of one file
    #[arg(long, value_name = "BYTES", default_value_t = 32_000_000_000)]
    pub(crate) max_file_bytes: u64,
    #[command(flatten)]
    pub(crate) threads: ThreadArgs,
    /// Print the plan without reading weights or writing anything
    #[arg(long, short = 'n')]
    pub(crate) dry_run: bool,
    /// Continue an interrupted conversion
    #[arg(long)]
    pub(crate) resume: bool,
    /// Verify the result against the checkpoint afterwards
    #[arg(long)]
    pub(crate) verify: bool,
    /// Where two shards hold the same tensor, take the one the index names
    #[arg(long)]
    pub(crate) trust_index: bool,
    #[command(flatten)]
    pub(crate) json: JsonArgs,
}

#[derive(Debug, Args)]
pub(crate) struct VerifyArgs {
    /// Artifact to verify; with --derivation also a checkpoint or GGUF file
    pub(crate) artifact: PathBuf,
    /// Compare every weight with those of another artifact, checkpoint or GGUF file: same words, same values, a stated
    /// rounding, or how far off
    #[arg(long, value_name = "OTHER", conflicts_with_all = ["checkpoint", "ngram", "skip_ngram"])]
    pub(crate) derivation: Option<PathBuf>,
    /// Checkpoint to compare every word with; without it structure and digests are checked
    #[arg(long, value_name = "DIR")]
    pub(crate) checkpoint: Option<PathBuf>,
    /// Take a role's tensors from another checkpoint
    #[arg(long = "source", value_name = "ROLE=PATH", requires = "checkpoint")]
    pub(crate) sources: Vec<String>,
    /// The n-gram volume, if it is not beside the artifact
    #[arg(long, value_name = "FILE")]
    pub(crate) ngram: Option<PathBuf>,
    /// How many n-gram rows to compare
    #[arg(long, value_name = "all|N", default_value = "all")]
    pub(crate) ngram_rows: String,
    /// Do not look at the n-gram volume
    #[arg(long)]
    pub(crate) skip_ngram: bool,
    /// Where two shards hold the same tensor, take the one the index names
    #[arg(long)]
    pub(crate) trust_index: bool,
    #[command(flatten)]
    pub(crate) threads: ThreadArgs,
    #[command(flatten)]
    pub(crate) json: JsonArgs,
}

#[derive(Debug, Args)]
pub(crate) struct InspectArgs {
    /// Artifact, part, n-gram volume or checkpoint folder
    pub(crate) path: PathBuf,
    /// List every object
    #[arg(long)]
    pub(crate) objects: bool,
    /// List every binding
    #[arg(long)]
    pub(crate) bindings: bool,
    #[command(flatten)]
    pub(crate) json: JsonArgs,
}

#[derive(Debug, Args)]
pub(crate) struct RepairArgs {
    /// Artifact to repair
    pub(crate) artifact: PathBuf,
    /// Checkpoint it was converted from
    #[arg(long, value_name = "DIR")]
    pub(crate) checkpoint: PathBuf,
    /// Recipe it was made with, if it is not a built-in one [default: the one the artifact names]
    #[arg(long, short, value_name = "NAME|FILE")]
    pub(crate) recipe: Option<String>,
    /// Take a role's tensors from another checkpoint
    #[arg(long = "source", value_name = "ROLE=PATH")]
    pub(crate) sources: Vec<String>,
    /// The n-gram volume, if it is not beside the artifact
    #[arg(long, value_name = "FILE")]
    pub(crate) ngram: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) threads: ThreadArgs,
    #[command(flatten)]
    pub(crate) json: JsonArgs,
}

#[derive(Debug, Args)]
pub(crate) struct RenameArgs {
    /// Artifact to rename (its first file)
    pub(crate) artifact: PathBuf,
    /// New file name of the first file, without folder [default: the present one]
    #[arg(long, value_name = "NAME.infernix")]
    pub(crate) to: Option<String>,
    /// Use the numbered form NAME-00001-of-0000N.infernix; without it NAME.infernix and its parts
    #[arg(long)]
    pub(crate) numbered: bool,
}

#[derive(Debug, Args)]
pub(crate) struct CleanArgs {
    /// Artifact whose conversion was interrupted
    pub(crate) artifact: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct CardArgs {
    /// Artifact the card is about
    pub(crate) artifact: PathBuf,
    /// Report of `verify --json`
    #[arg(long, value_name = "FILE")]
    pub(crate) verify_report: Option<PathBuf>,
    /// Measurement files in JSON to include
    #[arg(long = "measurements", value_name = "FILE")]
    pub(crate) measurements: Vec<PathBuf>,
    /// Where to write the card [default: standard output]
    #[arg(long, short, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) json: JsonArgs,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct ModelArgs {
    /// Artifact or checkpoint folder [default: $INFERNIX_MODEL, the only artifact here, or the bundled demo]
    pub(crate) model: Option<PathBuf>,
    /// The n-gram volume, if it is not beside the artifact
    #[arg(long, value_name = "FILE", alias = "ngram-volume")]
    pub(crate) ngram: Option<PathBuf>,
    /// Arithmetic that runs the model
    #[arg(long, alias = "device", value_name = "auto|cpu|cuda[:N]|lossless", default_value = "auto")]
    pub(crate) backend: String,
    /// Same as --backend lossless
    #[arg(long, conflicts_with = "backend")]
    pub(crate) lossless: bool,
    #[command(flatten)]
    pub(crate) activations: ActivationArgs,
    /// Format of cached keys and values
    #[arg(long, value_enum, default_value_t = KvDtype::Bf16)]
    pub(crate) kv_dtype: KvDtype,
    /// Device memory to use at most (CUDA) [default: all that is free]
    #[arg(long, value_name = "N")]
    pub(crate) vram_budget_mib: Option<usize>,
    /// Host memory for routed experts (CUDA); what it does not hold is read from the artifact when it is picked. Said explicitly, it
    /// also overrides the check against what is free now
    #[arg(long, value_name = "N")]
    pub(crate) expert_ram_mib: Option<usize>,
    /// Worker threads of decoding [default: the physical cores this process may use]
    #[arg(long, short = 'j', value_name = "N")]
    pub(crate) threads: Option<usize>,
    /// Worker threads of prompt processing [default: as --threads]
    #[arg(long, value_name = "N")]
    pub(crate) threads_batch: Option<usize>,
    /// Convert without asking when the model is a checkpoint folder
    #[arg(long, short)]
    pub(crate) yes: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum KvDtype {
    /// The bits of keys and values as computed
    Bf16,
    /// 8-bit codes with one scale per 64 values, keys rotated
    Int8,
}

#[derive(Debug, Clone, Args)]
#[group(multiple = false)]
pub(crate) struct ActivationArgs {
    /// Keep every activation at 16 bits
    #[arg(long)]
    pub(crate) a16_activations: bool,
    /// Quantize activations to 8 bits where the model's format allows
    #[arg(long)]
    pub(crate) a8_activations: bool,
    /// Quantize activations of NVFP4 matrices to 4 bits
    #[arg(long, alias = "expert-a4-activations")]
    pub(crate) a4_activations: bool,
}

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// Prompt text [default: standard input, or a conversation on a terminal]
    #[arg(long, short, value_name = "TEXT")]
    pub(crate) prompt: Option<String>,
    /// Conversation as a JSON list of messages, or an object with messages and tools
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompt", "raw", "system"])]
    pub(crate) messages: Option<PathBuf>,
    /// System message
    #[arg(long, value_name = "TEXT", conflicts_with = "raw")]
    pub(crate) system: Option<String>,
    /// Answer without a reasoning part
    #[arg(long)]
    pub(crate) no_thinking: bool,
    /// Continue the text as it is, without the chat template
    #[arg(long)]
    pub(crate) raw: bool,
    /// Longest answer in tokens
    #[arg(long, short = 'm', alias = "max-new", value_name = "N", default_value_t = 1024)]
    pub(crate) max_tokens: usize,
    /// Stop before this text (repeatable)
    #[arg(long, value_name = "TEXT")]
    pub(crate) stop: Vec<String>,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
    #[command(flatten)]
    pub(crate) spec: SpecArgs,
    #[command(flatten)]
    pub(crate) sched: SchedArgs,
    /// Print token ids instead of text
    #[arg(long)]
    pub(crate) print_token_ids: bool,
    #[command(flatten)]
    pub(crate) json: JsonArgs,
}

/// Drafting. No choice here changes any text.
#[derive(Debug, Args)]
#[command(next_help_heading = "Speculation")]
pub(crate) struct SpecArgs {
    /// Who drafts
    #[arg(long, value_enum, default_value_t = Spec::Auto)]
    pub(crate) spec: Spec,
    /// Longest draft of the model's drafter, 0 to 7; auto chooses it by measured gain
    #[arg(long, value_name = "N|auto", default_value = "auto", value_parser = auto_number)]
    pub(crate) draft_tokens: AutoNumber,
    /// Draft with the proposal head, the output rows of the most frequent tokens
    #[arg(long)]
    pub(crate) lm_head_draft: bool,
    /// Longest draft copied from earlier text, 0 to 31; auto chooses it by measured gain
    #[arg(long, value_name = "N|auto", default_value = "auto", value_parser = auto_number)]
    pub(crate) ngram_draft_tokens: AutoNumber,
    /// Tokens that must agree before a copy is tried
    #[arg(long, value_name = "N", default_value_t = 12, value_parser = clap::value_parser!(u32).range(2..=64))]
    pub(crate) ngram_min_match: u32,
}

/// A number, or `auto`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AutoNumber(pub(crate) Option<usize>);

fn auto_number(text: &str) -> Result<AutoNumber, String> {
    match text {
        "auto" => Ok(AutoNumber(None)),
        n => n.parse().map(|n| AutoNumber(Some(n))).map_err(|_| "expected a number or auto".to_owned()),
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Spec {
    /// The model's drafter where it has one, and copies from earlier text
    Auto,
    /// Nobody: plain decoding
    Off,
    /// The model's own drafter only
    Mtp,
}

/// Lanes, queue and prefix cache.
#[derive(Debug, Args)]
#[command(next_help_heading = "Scheduling")]
pub(crate) struct SchedArgs {
    /// Requests that run at once
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=8))]
    pub(crate) max_concurrency: u32,
    /// Requests that may wait beyond those
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub(crate) max_pending_requests: usize,
    /// Longest wait for a lane; 0 is without end
    #[arg(long, value_name = "MS", default_value_t = 30_000)]
    pub(crate) pending_timeout_ms: u64,
    /// Prompt tokens of one model call: what a decoding request waits for at most between two rounds
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) prefill_chunk: u32,
    /// Read every prompt from its start
    #[arg(long)]
    pub(crate) no_prefix_cache: bool,
    /// State snapshots in the backend's memory
    #[arg(long, value_name = "MIB", default_value_t = 1024)]
    pub(crate) prefix_cache_device_mib: u64,
    /// Cached prefixes in RAM [default: 8192, at most a quarter of the memory that is free at the start]
    #[arg(long, value_name = "MIB")]
    pub(crate) prefix_cache_mib: Option<u64>,
    /// Keep cached prefixes in this file over a restart
    #[arg(long, value_name = "FILE", conflicts_with = "no_prefix_cache")]
    pub(crate) prefix_cache_file: Option<PathBuf>,
    /// Largest size of that file
    #[arg(long, value_name = "MIB", default_value_t = 8192)]
    pub(crate) prefix_cache_file_mib: u64,
    /// Record requests, routing and cache events as ids, for `infernix plan`
    #[arg(long, value_name = "FILE")]
    pub(crate) record_trace: Option<PathBuf>,
}

/// A seed has 64 bits, signed or not, as in requests.
fn seed(text: &str) -> Result<u64, String> {
    let signed = || text.parse().map(i64::cast_unsigned);
    text.parse().or_else(|_| signed()).map_err(|_| "must be an integer of 64 bits".to_owned())
}

#[derive(Debug, Args)]
pub(crate) struct SamplingArgs {
    /// Seed of the sampler [default: a fresh one, printed]
    #[arg(long, allow_negative_numbers = true, value_parser = seed)]
    pub(crate) seed: Option<u64>,
    /// Always take the most likely token
    #[arg(long, conflicts_with = "temperature")]
    pub(crate) greedy: bool,
    /// Softmax temperature; 0 is greedy [default: the model's]
    #[arg(long, value_name = "T")]
    pub(crate) temperature: Option<f32>,
    /// Nucleus mass [default: the model's]
    #[arg(long, value_name = "P")]
    pub(crate) top_p: Option<f32>,
    /// Most likely tokens kept; 0 keeps all [default: the model's]
    #[arg(long, value_name = "K")]
    pub(crate) top_k: Option<u32>,
    /// Least probability relative to the most likely token
    #[arg(long, value_name = "P")]
    pub(crate) min_p: Option<f32>,
    /// Subtracted once from the logit of every token already in the answer
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub(crate) presence_penalty: Option<f32>,
    /// Subtracted for each occurrence of a token in the answer
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub(crate) frequency_penalty: Option<f32>,
    /// Divides positive and multiplies negative logits of tokens seen in prompt or answer
    #[arg(long, value_name = "X")]
    pub(crate) repetition_penalty: Option<f32>,
}

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    pub(crate) mode: Option<BenchMode>,
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// Measure random weights of this geometry, built in memory, instead of a model; an unknown name lists them
    #[arg(long, value_name = "NAME")]
    pub(crate) synthetic: Option<String>,
    /// Format of the synthetic model's large matrices: q4, q5, q6, q8, nvfp4 or bf16 [default: q4, or as the published model]
    #[arg(long, value_name = "FORMAT", requires = "synthetic")]
    pub(crate) synthetic_format: Option<String>,
    /// Format of the experts of a published geometry: nvfp4, fp8 or ggml (IQ3_S, down in IQ4_NL) [default: nvfp4, with 4-bit activations]
    #[arg(long, value_name = "FORMAT", requires = "synthetic")]
    pub(crate) synthetic_experts: Option<String>,
    /// Fewer layers than the geometry has
    #[arg(long, value_name = "N", requires = "synthetic")]
    pub(crate) synthetic_layers: Option<u64>,
    /// Keep the synthetic experts and n-gram rows in files of this folder, to be read from disk; files of an earlier run are used again
    #[arg(long, value_name = "DIR", requires = "synthetic")]
    pub(crate) synthetic_dir: Option<PathBuf>,
    /// About this many n-gram rows instead of the published 320 million
    #[arg(long, value_name = "N", requires = "synthetic_dir")]
    pub(crate) synthetic_ngram_rows: Option<u64>,
    /// Exponent of the law that picks experts of a synthetic model on a CUDA device; 0 leaves it to the random router
    #[arg(long, value_name = "S", default_value_t = 1.2, requires = "synthetic")]
    pub(crate) routing_zipf: f64,
    /// Probability that a synthetic pick is the one of the token before
    #[arg(long, value_name = "P", default_value_t = 0.0, requires = "synthetic")]
    pub(crate) routing_repeat: f32,
    /// Write Chrome trace events of the last prompt and decode rounds (CUDA); times of the tests are then not the plain ones
    #[arg(long, value_name = "FILE", conflicts_with_all = ["concurrency", "spec", "ConstraintArgs"])]
    pub(crate) profile: Option<PathBuf>,
    /// Prompt lengths to measure [default: 512 unless another test is asked for]
    #[arg(long = "n-prompt", short = 'p', value_name = "N", value_delimiter = ',')]
    pub(crate) prompts: Vec<usize>,
    /// Generation lengths to measure [default: 128 unless another test is asked for]
    #[arg(long = "n-gen", short = 'n', value_name = "N", value_delimiter = ',')]
    pub(crate) generations: Vec<usize>,
    /// Prompt and generation in one measurement (repeatable; also spelled -pg)
    #[arg(long = "pg", value_name = "P,N")]
    pub(crate) pairs: Vec<String>,
    /// Tokens already in the sequence, for every test
    #[arg(long = "n-depth", short = 'd', value_name = "N", value_delimiter = ',')]
    pub(crate) depths: Vec<usize>,
    /// Counted repetitions of each test
    #[arg(long, short = 'r', value_name = "N", default_value_t = 5)]
    pub(crate) repetitions: usize,
    /// Tokens per prompt call
    #[arg(long, value_name = "N", default_value_t = 512)]
    pub(crate) prefill_chunk: usize,
    /// Answers at a time, through the engine's scheduler
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=8))]
    pub(crate) concurrency: Option<u32>,
    /// Run through the engine's scheduler and record requests and routing as ids, for `infernix plan`; cache events there are none,
    /// since every repetition is computed; recording takes time
    #[arg(long, value_name = "FILE", conflicts_with_all = ["profile", "breakdown"])]
    pub(crate) record_trace: Option<PathBuf>,
    /// Decode through the engine's scheduler with these drafts [default: one stream, plainly]
    #[arg(long, value_enum)]
    pub(crate) spec: Option<Spec>,
    /// Longest draft of the model's drafter, 0 to 7; auto chooses it by measured gain
    #[arg(long, value_name = "N|auto", default_value = "auto", value_parser = auto_number, requires = "spec")]
    pub(crate) draft_tokens: AutoNumber,
    #[command(flatten)]
    pub(crate) constraint: ConstraintArgs,
    /// Skip the uncounted first run of each test
    #[arg(long)]
    pub(crate) no_warmup: bool,
    /// Skip measuring the memory-bandwidth limit
    #[arg(long)]
    pub(crate) no_limit: bool,
    /// Run each test once more and show where its time goes, operation by operation
    #[arg(long, conflicts_with_all = ["concurrency", "spec", "ConstraintArgs"])]
    pub(crate) breakdown: bool,
    /// Seed of the tokens and of synthetic weights
    #[arg(long, value_name = "N", default_value_t = 42)]
    pub(crate) seed: u64,
    /// Form of the results; csv, json and jsonl have llama-bench's names
    #[arg(long, short, value_enum, default_value_t = BenchOutput::Md, conflicts_with = "json")]
    pub(crate) output: BenchOutput,
    #[command(flatten)]
    pub(crate) json: JsonArgs,
}

/// What answers are held to; at most one.
#[derive(Debug, Args)]
#[group(multiple = false)]
pub(crate) struct ConstraintArgs {
    /// Hold answers to any JSON object
    #[arg(long)]
    pub(crate) json_object: bool,
    /// Hold answers to a JSON schema
    #[arg(long, value_name = "FILE")]
    pub(crate) json_schema_file: Option<PathBuf>,
    /// Hold answers to a GBNF grammar
    #[arg(long, value_name = "FILE")]
    pub(crate) grammar_file: Option<PathBuf>,
    /// Hold answers to a regular expression
    #[arg(long, value_name = "EXPRESSION")]
    pub(crate) regex: Option<String>,
    /// Hold answers to one of these texts (repeatable)
    #[arg(long, value_name = "TEXT")]
    pub(crate) choice: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum BenchOutput {
    /// Markdown table
    Md,
    /// Comma-separated values
    Csv,
    /// JSON list of objects
    Json,
    /// One JSON object a line
    Jsonl,
}

#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// Traffic recorded with --record-trace [default: made-up conversations of agents]
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
    /// Made-up conversations
    #[arg(long, value_name = "N", default_value_t = 40, conflicts_with = "trace")]
    pub(crate) sessions: usize,
    /// Turns of each
    #[arg(long, value_name = "N", default_value_t = 30, conflicts_with = "trace")]
    pub(crate) turns: usize,
    /// Tokens at which a made-up conversation is compacted
    #[arg(long, value_name = "N", default_value_t = 60_000, conflicts_with = "trace")]
    pub(crate) context: usize,
    /// Seed of made-up traffic
    #[arg(long, value_name = "N", default_value_t = 42)]
    pub(crate) seed: u64,
    /// Device memory; several values are compared
    #[arg(long, value_name = "MIB", value_delimiter = ',', default_value = "32768")]
    pub(crate) vram_mib: Vec<u64>,
    /// Host memory for experts and cached prefixes; several values are compared
    #[arg(long, value_name = "MIB", value_delimiter = ',', default_value = "73728")]
    pub(crate) ram_mib: Vec<u64>,
    /// Also find the smallest of both with which this share of the experts used is resident and, of the prompt tokens that an
    /// unlimited cache would give, this share comes from the cache; several values are compared
    #[arg(long, value_name = "PERCENT", value_delimiter = ',', default_value = "90",
          value_parser = clap::value_parser!(u8).range(1..=99))]
    pub(crate) target: Vec<u8>,
    /// Link between them, GB/s
    #[arg(long, value_name = "GBPS", default_value_t = 50.0)]
    pub(crate) link: f64,
    /// Device memory bandwidth, GB/s
    #[arg(long, value_name = "GBPS", default_value_t = 1600.0)]
    pub(crate) bandwidth: f64,
    /// Hand-off between layers, microseconds
    #[arg(long, value_name = "US", default_value_t = 20.0)]
    pub(crate) handoff: f64,
    /// Prompt tokens a second
    #[arg(long, value_name = "RATE", default_value_t = 3000.0)]
    pub(crate) prefill_rate: f64,
    /// Prompt tokens of one model call
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) prefill_chunk: u32,
    /// Requests that run at once
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=8))]
    pub(crate) max_concurrency: u32,
    /// Tokens of keys and values on the device
    #[arg(long, value_name = "N", default_value_t = 131_072)]
    pub(crate) kv_capacity: usize,
    /// State snapshots on the device
    #[arg(long, value_name = "MIB", default_value_t = 1024)]
    pub(crate) prefix_cache_device_mib: u64,
    #[command(flatten)]
    pub(crate) json: JsonArgs,
}

#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    /// Checkpoint folder to use instead of the bundled one
    pub(crate) checkpoint: Option<PathBuf>,
    /// Keep the converted files in this folder [default: a temporary folder, removed afterwards]
    #[arg(long, value_name = "DIR")]
    pub(crate) keep: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// Folder whose disk is measured
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub(crate) dir: PathBuf,
    /// Run every CUDA kernel on this machine's card against its oracle, measure it, and print one JSON document
    #[arg(long)]
    pub(crate) selftest: bool,
    #[command(flatten)]
    pub(crate) json: JsonArgs,
}

#[derive(Debug, Args)]
pub(crate) struct GenArgs {
    /// What to print
    #[arg(value_enum)]
    pub(crate) what: Generated,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum Generated {
    /// docs/cli.md
    Cli,
    /// docs/recipe-list.md
    Recipes,
    /// infernix.example.toml
    Config,
}

#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct ThreadArgs {
    /// Worker threads [default: the cores this process may use]
    #[arg(long, short = 'j', value_name = "N")]
    pub(crate) threads: Option<usize>,
}

#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct JsonArgs {
    /// Print one JSON document instead of text
    #[arg(long)]
    pub(crate) json: bool,
}
