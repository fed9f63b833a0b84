//! Flags of `logits`, `kld`, `ppl` and `report`.

use super::{JsonArgs, ModelArgs};
use clap::{Args, ValueEnum};
use std::path::PathBuf;

#[derive(Debug, Args)]
pub(crate) struct LogitsArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// JSON list of token ids, or a list of such lists, each read from an empty state (`kld --export-tokens` writes one)
    #[arg(long, value_name = "FILE")]
    pub(crate) tokens: PathBuf,
    /// Safetensors file to write: `logits` [positions, vocabulary] F32, `positions` and `input_ids` I32
    #[arg(long, short, value_name = "FILE")]
    pub(crate) output: PathBuf,
    /// Positions to write, of every list [default: all]
    #[arg(long, value_name = "A..B")]
    pub(crate) positions: Option<String>,
    /// Precision of the values between operations (fp32 needs --backend lossless)
    #[arg(long, value_enum, default_value_t = Boundaries::Bf16)]
    pub(crate) boundaries: Boundaries,
    /// Also write what each layer did: `layer.I.out` (residual), `.experts` and `.expert_weights`, `.qsa_blocks` (-1
    /// pads; a row of -1 attends to everything), `.ple_rows`
    #[arg(long)]
    pub(crate) layers: bool,
    /// Tokens per forward call; the result does not depend on it
    #[arg(long, value_name = "N", default_value_t = 512)]
    pub(crate) prefill_chunk: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Boundaries {
    /// As every engine computes
    Bf16,
    /// For comparison with FP32 references
    Fp32,
}

#[derive(Debug, Args)]
pub(crate) struct KldArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// Text to measure on [default: this project's documentation; published figures use wiki.test.raw]
    #[arg(long, short = 'f', value_name = "FILE")]
    pub(crate) corpus: Option<PathBuf>,
    /// At most so many chunks, the first ones [default: all of the text, or of the reference's file]
    #[arg(long, value_name = "N")]
    pub(crate) chunks: Option<usize>,
    /// Tokens per chunk; the second half of each is scored [default: 512, or those of the reference's file]
    #[arg(long, short = 'c', value_name = "N")]
    pub(crate) ctx: Option<usize>,
    /// How the engines read: each chunk as a prompt, or its second half through decode rounds (repeatable, or with a comma)
    #[arg(long = "path", value_enum, value_delimiter = ',', default_values_t = [KldPath::Prompt])]
    pub(crate) paths: Vec<KldPath>,
    /// Also measure the yardstick: the lossless backend with every rounding random
    #[arg(long)]
    pub(crate) honest_rounding: bool,
    /// Seeds of honest rounding, 1..=K
    #[arg(long, value_name = "K", default_value_t = 3, requires = "honest_rounding")]
    pub(crate) rounding_seeds: u64,
    /// Another engine on the same model, by the options that differ: --with "--a8-activations --kv-dtype int8" (repeatable)
    #[arg(long, value_name = "OPTIONS", allow_hyphen_values = true)]
    pub(crate) with: Vec<String>,
    /// Other rows under test: an artifact of the same model, a `_logits_` file of llama.cpp, a saved reference, or another
    /// engine's logits as safetensors (repeatable)
    #[arg(long, alias = "test", value_name = "ARTIFACT|FILE")]
    pub(crate) against: Vec<PathBuf>,
    /// Measure against this file instead of the lossless backend; with files under test alone no model is needed
    #[arg(long, value_name = "FILE", alias = "kl-divergence-base")]
    pub(crate) reference: Option<PathBuf>,
    /// Save the reference's most likely ids of every row, the exact mass of the others, and the target
    #[arg(long, value_name = "FILE", conflicts_with = "reference")]
    pub(crate) save_reference: Option<PathBuf>,
    /// Ids a saved reference keeps per row
    #[arg(long, value_name = "K", default_value_t = 256, requires = "save_reference")]
    pub(crate) top_k: u32,
    /// Save the reference as a base file of llama.cpp
    #[arg(long, value_name = "FILE", alias = "save-all-logits", conflicts_with = "reference")]
    pub(crate) save_base: Option<PathBuf>,
    /// Write the token ids of the chunks as JSON and stop: what another engine's logits file must be made of
    #[arg(long, value_name = "FILE")]
    pub(crate) export_tokens: Option<PathBuf>,
    /// Definitions and printout of llama-perplexity --kl-divergence
    #[arg(long)]
    pub(crate) llama_compat: bool,
    /// Precision between operations of the reference and of lossless engines (fp32 is for comparison with FP32 references)
    #[arg(long, value_enum, default_value_t = Boundaries::Bf16)]
    pub(crate) boundaries: Boundaries,
    /// Drafting on the decode path
    #[arg(long, value_enum, default_value_t = KldSpec::Auto)]
    pub(crate) spec: KldSpec,
    /// Tokens drafted per decode round
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub(crate) draft_tokens: usize,
    /// Chunks that the reference reads together, layer by layer, so that weights are read once a group [default: as many as
    /// make 1 GiB of logits, at most 8]
    #[arg(long, value_name = "N")]
    pub(crate) group: Option<usize>,
    /// Resamples of the bootstrap, at least 100
    #[arg(long, value_name = "N", default_value_t = 2000)]
    pub(crate) bootstrap: usize,
    /// Continue an interrupted run with the same options
    #[arg(long)]
    pub(crate) resume: bool,
    /// File that keeps the scores of an unfinished run [default: named by the run, in the user's cache]
    #[arg(long, value_name = "FILE")]
    pub(crate) state: Option<PathBuf>,
    /// Also write the report: as JSON, Markdown or a page, by the file's extension (repeatable)
    #[arg(long, short, value_name = "FILE.json|md|html")]
    pub(crate) output: Vec<PathBuf>,
    #[command(flatten)]
    pub(crate) json: JsonArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum KldPath {
    /// Each chunk in one forward
    Prompt,
    /// The second half forced through decode rounds
    Decode,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum KldSpec {
    /// The model's drafter where it has one
    Auto,
    /// No drafts
    Off,
    /// The model's drafter, an error without one
    Mtp,
}

#[derive(Debug, Args)]
pub(crate) struct PplArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// Manifest of a corpus with streams and domains [default: this project's documentation]
    #[arg(long, value_name = "MANIFEST.json")]
    pub(crate) corpus: Option<PathBuf>,
    /// Streams of the manifest's quick mode only
    #[arg(long, requires = "corpus")]
    pub(crate) quick: bool,
    /// One text instead of a corpus
    #[arg(long, short = 'f', value_name = "FILE", conflicts_with = "corpus")]
    pub(crate) text: Option<PathBuf>,
    /// Tokens per window
    #[arg(long, short = 'c', value_name = "N", default_value_t = 4096)]
    pub(crate) context: usize,
    /// Tokens a window moves on [default: half a window]
    #[arg(long, value_name = "N")]
    pub(crate) stride: Option<usize>,
    /// Tokens per prompt call
    #[arg(long, value_name = "N", default_value_t = 1024)]
    pub(crate) prefill_chunk: usize,
    /// Also write the report: as JSON or Markdown, by the file's extension (repeatable)
    #[arg(long, short, value_name = "FILE.json|md")]
    pub(crate) output: Vec<PathBuf>,
    #[command(flatten)]
    pub(crate) json: JsonArgs,
}

#[derive(Debug, Args)]
pub(crate) struct ReportArgs {
    /// JSON reports of kld, ppl, bench, bench serve, bench context and replay
    #[arg(required = true)]
    pub(crate) files: Vec<PathBuf>,
    /// Page to write
    #[arg(long, short, value_name = "FILE.html")]
    pub(crate) output: PathBuf,
    /// Also write each plot as an SVG file into this folder
    #[arg(long, value_name = "DIR")]
    pub(crate) plots: Option<PathBuf>,
    /// Title of the page
    #[arg(long, default_value = "Infernix measurements")]
    pub(crate) title: String,
}
