//! Read-only access to source checkpoints: one [`SourceTensor`] view over every layout that releases
//! use.
//!
//! A [`Checkpoint`] is opened from a safetensors folder (or one lone file). Opening reads `config.json`'s
//! presence, the index and the headers of the shards, and checks them strictly; weight data is read only
//! when a range is asked for, through at most four open files, without memory maps, and pages of bulk reads
//! are handed back to the system. [`Checkpoint::resolve`] groups the stored tensors of one weight (codes,
//! block scales, global scale, activation scale) and names their [`Scheme`] from suffixes, dtypes and
//! shapes; what a quantization config claims is only compared with it ([`Checkpoint::cross_check`]).
//!
//! A GGUF model opens as a [`Checkpoint`], too: seen under the names and in the order of the checkpoint that it was made
//! from, which [`gguf::names`] knows. As a [`Gguf`] it shows its own tensors and keys.
//!
//! Nothing here guesses: whatever does not fit is a [`CheckpointError`] that names the file, the tensor and
//! what was expected.

mod checkpoint;
mod decode;
mod digests;
mod dtype;
mod error;
pub mod gguf;
mod header;
pub mod hf_cache;
mod index;
mod limits;
mod order;
mod pool;
mod quant_config;
mod scheme;
mod sniff;

pub use checkpoint::{Checkpoint, IgnoredTensor, OpenOptions, Origin, ShardInfo, TensorInfo};
pub use dtype::Dtype;
pub use error::CheckpointError;
pub use gguf::{Gguf, GgufTensor};
pub use header::{HeaderEntry, parse_header};
pub use order::natural_cmp;
pub use quant_config::Warning;
pub use scheme::{PlaneKind, Planes, Scheme, SourceTensor};
