//! Flags of `export`.

use super::JsonArgs;
use clap::{Args, ValueEnum};
use std::path::PathBuf;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ExportTo {
    /// A folder with config.json, tokenizer and safetensors shards
    Safetensors,
    /// A GGUF model; its image tower goes to mmproj-NAME beside it
    Gguf,
}

#[derive(Debug, Args)]
pub(crate) struct ExportArgs {
    /// Artifact to export
    pub(crate) artifact: PathBuf,
    /// Kind of files to write
    #[arg(long, value_enum)]
    pub(crate) to: ExportTo,
    /// Folder (safetensors) or file (GGUF) to write; nothing is overwritten
    #[arg(long, short, value_name = "OUT")]
    pub(crate) output: PathBuf,
    /// Components to export [default: all but block drafters, which are checkpoints of their own, and a drafter that
    /// readers of the target refuse]
    #[arg(long, value_delimiter = ',', value_name = "text,vision,mtp,dflash,dflash2")]
    pub(crate) components: Vec<String>,
    /// n-gram volume, where it is not beside the artifact
    #[arg(long, value_name = "FILE")]
    pub(crate) ngram: Option<PathBuf>,
    /// Largest shard in bytes, or with K, M, G (10^3, 10^6, 10^9) [default: 5G for safetensors, one file for GGUF]
    #[arg(long, value_name = "BYTES")]
    pub(crate) shard_size: Option<String>,
    /// Refuse where GGUF's conventions (1 + w of a norm, -exp(a) of A_log, in FP32) would round a word, instead of a warning
    #[arg(long)]
    pub(crate) bit_exact: bool,
    /// Plan only: print every file and its size, or why the artifact cannot be exported
    #[arg(long, short = 'n')]
    pub(crate) dry_run: bool,
    /// Continue an interrupted export
    #[arg(long)]
    pub(crate) resume: bool,
    #[command(flatten)]
    pub(crate) json: JsonArgs,
}
