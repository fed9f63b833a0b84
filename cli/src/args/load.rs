//! Flags of the commands that talk to servers: `fetch`, `bench serve`, `bench context` and `replay`.

use super::{JsonArgs, PathBuf};
use clap::{Args, Subcommand, ValueEnum};

#[derive(Debug, Subcommand)]
pub(crate) enum BenchMode {
    /// Load an OpenAI-compatible server and report as vLLM's benchmark does
    Serve(Box<BenchServeArgs>),
    /// Measure first token and decode rate of a server at several prompt lengths, one request at a time
    Context(BenchContextArgs),
}

#[derive(Debug, Args)]
pub(crate) struct ServerArgs {
    /// Address of the server, with or without /v1
    #[arg(long, value_name = "URL")]
    pub(crate) url: String,
    /// Name of the model [default: the first that the server lists]
    #[arg(long = "model", value_name = "NAME")]
    pub(crate) model_name: Option<String>,
    /// File with the server's API key [default: $INFERNIX_API_KEY]
    #[arg(long, value_name = "FILE")]
    pub(crate) api_key_file: Option<PathBuf>,
    /// Limit of one request
    #[arg(long, value_name = "SECONDS", default_value_t = 1200)]
    pub(crate) timeout: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum DatasetKind {
    /// Independent prompts of random words
    Random,
    /// Prompts that share their beginning within a group
    SharedPrefix,
    /// A file in ShareGPT's format (--dataset-path)
    Sharegpt,
    /// A recorded trace with its times (--dataset-path)
    Trace,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Route {
    /// /v1/chat/completions
    Chat,
    /// /v1/completions
    Completions,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Ramp {
    /// The rate grows by the same amount from request to request
    Linear,
    /// By the same factor
    Exponential,
}

#[derive(Debug, Args)]
pub(crate) struct BenchServeArgs {
    #[command(flatten)]
    pub(crate) server: ServerArgs,
    /// Route of the requests
    #[arg(long, value_enum, default_value_t = Route::Chat)]
    pub(crate) endpoint: Route,
    /// Prompts
    #[arg(long, value_enum, default_value_t = DatasetKind::Random, alias = "dataset")]
    pub(crate) dataset_name: DatasetKind,
    /// File of a sharegpt or trace dataset
    #[arg(long, value_name = "FILE")]
    pub(crate) dataset_path: Option<PathBuf>,
    /// Requests
    #[arg(long, value_name = "N", default_value_t = 1000)]
    pub(crate) num_prompts: usize,
    /// Prompt tokens of a random dataset
    #[arg(long, value_name = "N", default_value_t = 1024, alias = "random-input-len")]
    pub(crate) input_len: usize,
    /// Tokens to answer [default: 128, or the length a file states]
    #[arg(long, value_name = "N", alias = "random-output-len")]
    pub(crate) output_len: Option<usize>,
    /// Lengths of a random dataset are uniform within this share around both
    #[arg(long, value_name = "SHARE", default_value_t = 0.0, alias = "random-range-ratio")]
    pub(crate) range_ratio: f64,
    /// Groups of a shared-prefix dataset
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub(crate) num_prefixes: usize,
    /// Tokens that a group shares
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub(crate) prefix_len: usize,
    /// Tokens of its own that each prompt of a group has
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub(crate) suffix_len: usize,
    /// Requests a second, or inf for all at once
    #[arg(long, value_name = "RATE", default_value_t = f64::INFINITY)]
    pub(crate) request_rate: f64,
    /// Shape of the gaps between arrivals: 1 is Poisson, less is burstier
    #[arg(long, value_name = "SHAPE", default_value_t = 1.0)]
    pub(crate) burstiness: f64,
    /// Let the rate grow over the run, from --ramp-up-start-rps to --ramp-up-end-rps
    #[arg(
        long,
        value_enum,
        requires = "ramp_up_start_rps",
        requires = "ramp_up_end_rps",
        conflicts_with = "request_rate"
    )]
    pub(crate) ramp_up_strategy: Option<Ramp>,
    /// First rate of a ramp
    #[arg(long, value_name = "RATE", requires = "ramp_up_strategy")]
    pub(crate) ramp_up_start_rps: Option<f64>,
    /// Last rate of a ramp
    #[arg(long, value_name = "RATE", requires = "ramp_up_strategy")]
    pub(crate) ramp_up_end_rps: Option<f64>,
    /// Most requests in flight
    #[arg(long, value_name = "N")]
    pub(crate) max_concurrency: Option<usize>,
    /// Uncounted requests before
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) num_warmups: usize,
    /// Percentiles to report
    #[arg(long, value_name = "P", value_delimiter = ',', default_value = "50,90,99")]
    pub(crate) metric_percentiles: Vec<f64>,
    /// Limits that a good request keeps, in milliseconds: ttft:MS, tpot:MS, e2el:MS
    #[arg(long, value_name = "METRIC:MS", num_args = 1..)]
    pub(crate) goodput: Vec<String>,
    /// Ask the server not to stop before the length asked for
    #[arg(long)]
    pub(crate) ignore_eos: bool,
    /// Softmax temperature
    #[arg(long, value_name = "T")]
    pub(crate) temperature: Option<f64>,
    /// JSON object merged into each request
    #[arg(long, value_name = "JSON")]
    pub(crate) extra_body: Option<String>,
    /// Name of the engine in reports [default: its model's name]
    #[arg(long, value_name = "NAME")]
    pub(crate) label: Option<String>,
    /// Facts to keep with the result (repeatable)
    #[arg(long, value_name = "KEY=VALUE")]
    pub(crate) metadata: Vec<String>,
    /// Of prompts and arrivals
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) seed: u64,
    /// Write the JSON document to this file as well
    #[arg(long, short, value_name = "FILE", alias = "result-filename")]
    pub(crate) output: Option<PathBuf>,
    /// Keep lengths, times and causes of each request in the JSON document
    #[arg(long)]
    pub(crate) save_detailed: bool,
    #[command(flatten)]
    pub(crate) json: JsonArgs,
}

#[derive(Debug, Args)]
pub(crate) struct BenchContextArgs {
    #[command(flatten)]
    pub(crate) server: ServerArgs,
    /// Prompt lengths, each with its number of prompts
    #[arg(
        long,
        value_name = "TOKENS:PROMPTS",
        value_delimiter = ',',
        default_value = "8192:3,131072:2,250000:2"
    )]
    pub(crate) lengths: Vec<String>,
    /// Tokens to answer
    #[arg(long, value_name = "N", default_value_t = 1024)]
    pub(crate) output_len: usize,
    /// Of the prompts; another seed finds no cache of this one
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) seed: u64,
    #[command(flatten)]
    pub(crate) json: JsonArgs,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ReplayMode {
    /// Pass an agent's requests on to a server and write what it asked as a scenario; Ctrl-C ends the recording
    Record(RecordArgs),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum TextsArg {
    /// Word for word
    Keep,
    /// Each line as digits of its keyed hash
    Hash,
    /// Each line as other words of the same length
    Synthesise,
}

#[derive(Debug, Args)]
pub(crate) struct RecordArgs {
    /// Server that requests are passed on to
    #[arg(long, value_name = "URL")]
    pub(crate) upstream: String,
    /// Loopback address to listen on
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8765")]
    pub(crate) listen: std::net::SocketAddr,
    /// What becomes of prompts and tool results
    #[arg(long, value_enum, default_value_t = TextsArg::Hash)]
    pub(crate) texts: TextsArg,
    /// Scenario to write; it must not exist
    #[arg(long, short, value_name = "FILE")]
    pub(crate) output: PathBuf,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Profile {
    /// 49 requests, as --scale 0.1
    Quick,
    /// The 68 requests of published figures, as --scale 0.5
    Published,
    /// Every kind of turn, copies, edits, reviewers and the abort with them: 130 requests, as --scale 1
    Full,
}

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct ReplayArgs {
    #[command(subcommand)]
    pub(crate) mode: Option<ReplayMode>,
    /// The scenario: agentic_ab, or a stored plan (a JSON file), which has its own seed, scale and context
    #[arg(default_value = "agentic_ab", value_name = "SCENARIO|FILE")]
    pub(crate) scenario: String,
    /// Model to serve when no arms are given, as for `serve`
    #[arg(long, value_name = "MODEL")]
    pub(crate) model: Option<PathBuf>,
    /// Engines to compare: NAME=URL, or NAME=COMMAND with {port} where the server's port goes; the first one is compared with each other
    #[arg(long, value_name = "NAME=URL|COMMAND", num_args = 1..)]
    pub(crate) arms: Vec<String>,
    /// Seeds: 42 and up
    #[arg(long, value_name = "N", default_value_t = 1, conflicts_with = "seed_list", value_parser = clap::value_parser!(u64).range(1..=1000))]
    pub(crate) seeds: u64,
    /// Seeds, explicitly
    #[arg(long, value_name = "SEED", value_delimiter = ',')]
    pub(crate) seed_list: Vec<u64>,
    /// How much of the scenario, by name
    #[arg(long, value_enum, conflicts_with = "scale")]
    pub(crate) profile: Option<Profile>,
    /// Share of the scenario's turns [default: 0.5]
    #[arg(long, value_name = "SHARE")]
    pub(crate) scale: Option<f64>,
    /// Context that all lengths are scaled to [default: the server's limit, at most 262144]
    #[arg(long, visible_alias = "ctx", value_name = "N")]
    pub(crate) context: Option<usize>,
    /// Repository that observations are cut from [default: a frozen snapshot of this project's own]
    #[arg(long, value_name = "DIR")]
    pub(crate) corpus: Option<PathBuf>,
    /// Leave a field out of every request to every arm, for servers that refuse it (repeatable): top_k, seed, ...
    #[arg(long, value_name = "FIELD")]
    pub(crate) omit: Vec<String>,
    /// Play the first arm again after the others, to see drift
    #[arg(long)]
    pub(crate) aba: bool,
    /// Folder for plans, rows, server output and reports; it must not hold another run
    #[arg(long, short, value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,
    /// Most resident memory of a server started here, from its start; it is ended above it
    #[arg(long, value_name = "MIB")]
    pub(crate) ram_budget_mib: Option<u64>,
    /// Most GPU memory in use while a server started here runs
    #[arg(long, value_name = "MIB")]
    pub(crate) vram_budget_mib: Option<u64>,
    /// How long a server may take to load
    #[arg(long, value_name = "SECONDS", default_value_t = 900)]
    pub(crate) load_timeout: u64,
    /// Limit of one request
    #[arg(long, value_name = "SECONDS", default_value_t = 1200)]
    pub(crate) timeout: u64,
    /// File with the servers' API key [default: $INFERNIX_API_KEY]
    #[arg(long, value_name = "FILE")]
    pub(crate) api_key_file: Option<PathBuf>,
    /// Print the plan's size and hash and send nothing
    #[arg(long, short = 'n')]
    pub(crate) dry_run: bool,
    #[command(flatten)]
    pub(crate) json: JsonArgs,
}

#[derive(Debug, Args)]
pub(crate) struct FetchArgs {
    /// Repository, with a branch, tag or commit after @ [default: main]
    #[arg(value_name = "ORG/NAME[@REVISION]")]
    pub(crate) repo: String,
    /// Only files whose path matches (repeatable; ** crosses folders)
    #[arg(long, value_name = "GLOB")]
    pub(crate) include: Vec<String>,
    /// Leave out files whose path matches (repeatable)
    #[arg(long, value_name = "GLOB")]
    pub(crate) exclude: Vec<String>,
    /// Cache folder [default: $HF_HUB_CACHE, $HF_HOME/hub or the user's cache]
    #[arg(long, value_name = "DIR")]
    pub(crate) cache_dir: Option<PathBuf>,
    /// Files in flight
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub(crate) parallel: usize,
    /// Allow plain http beyond this machine
    #[arg(long)]
    pub(crate) allow_http: bool,
    #[command(flatten)]
    pub(crate) json: JsonArgs,
}
