//! The crate's one error type.

use std::io;
use std::path::PathBuf;

use crate::Dtype;

/// Why a checkpoint cannot be opened, resolved or read. Every message names the file or tensor, what was
/// expected, what was found, and what to do about it.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "fields repeat what each message says")]
#[non_exhaustive]
pub enum CheckpointError {
    /// The operating system refused.
    #[error("{}: cannot {action}: {source}", path.display())]
    Io { path: PathBuf, action: &'static str, source: io::Error },

    /// The path is not a checkpoint.
    #[error("{}: not a checkpoint: {reason}; {advice}", path.display())]
    NotACheckpoint { path: PathBuf, reason: String, advice: String },

    /// Something else stands in place of a safetensors file, an index or a resource.
    #[error("{}: expected {expected}, found {found}; {advice}", path.display())]
    Impostor { path: PathBuf, expected: &'static str, found: String, advice: &'static str },

    /// A file larger than anything of its kind.
    #[error("{}: {what} has {found} bytes, more than the limit of {limit}; the file is damaged or not of this kind", path.display())]
    TooLarge { path: PathBuf, what: &'static str, limit: u64, found: u64 },

    /// The index is not what an index is.
    #[error("{}: invalid index: {reason}; fetch the file again", path.display())]
    Index { path: PathBuf, reason: String },

    /// An index entry that is not the plain name of a shard.
    #[error("{}: tensor {tensor} is said to lie in {entry:?}: {reason}; an entry must be the name of a file in the same folder, do not use this checkpoint unless you trust its origin", path.display())]
    IndexEntry { path: PathBuf, tensor: String, entry: String, reason: &'static str },

    /// Shards that the index names and the folder lacks.
    #[error("{}: {} of {total} shards are missing: {}; fetch them into the same folder", path.display(), missing.len(), list(missing))]
    MissingShards { path: PathBuf, missing: Vec<String>, total: usize },

    /// The index places a tensor in a shard that does not hold it.
    #[error("{}: tensor {tensor} should be in {shard} but is not{}; the index and the shards are of different revisions, fetch both again", path.display(), elsewhere.as_ref().map(|s| format!(" (it is in {s})")).unwrap_or_default())]
    IndexedTensorAbsent { path: PathBuf, tensor: String, shard: String, elsewhere: Option<String> },

    /// The same tensor in two shards.
    #[error("{}: tensor {tensor} is in both {first} and {second}; remove the shard that does not belong here{}", path.display(), if *indexed { ", or take the copy that the index names with --trust-index" } else { "" })]
    DuplicateTensor { path: PathBuf, tensor: String, first: String, second: String, indexed: bool },

    /// A header that is not valid safetensors.
    #[error("{}: invalid safetensors header: {reason}; the file is damaged, fetch it again", path.display())]
    Header { path: PathBuf, reason: String },

    /// A tensor whose header entry contradicts itself or its neighbours.
    #[error("{}: tensor {tensor} at offset {offset}: expected {expected}, found {found}; the file is damaged, fetch it again", path.display())]
    Entry { path: PathBuf, tensor: String, offset: u64, expected: String, found: String },

    /// A header that is not valid GGUF.
    #[error("{}: invalid GGUF header at offset {offset}: {reason}; the file is damaged, fetch it again", path.display())]
    GgufHeader { path: PathBuf, offset: u64, reason: String },

    /// A GGUF file of a kind that is not read.
    #[error("{}: {what}; {advice}", path.display())]
    GgufUnsupported { path: PathBuf, what: String, advice: &'static str },

    /// The path is no GGUF model.
    #[error("{}: not one GGUF model: {reason}; {advice}", path.display())]
    NotAGguf { path: PathBuf, reason: String, advice: String },

    /// A metadata key that is missing or of another type.
    #[error("{}: metadata key {key}: expected {expected}, found {found}; convert the model again with a current llama.cpp", path.display())]
    GgufKey { path: PathBuf, key: String, expected: String, found: String },

    /// Parts of a split GGUF that do not belong together.
    #[error("{}: not part of one split model: {reason}; fetch all parts of one revision into one folder", path.display())]
    GgufSplit { path: PathBuf, reason: String },

    /// A GGUF tensor that belongs to no source tensor, or does not fit it.
    #[error("tensor {tensor}: {reason}; see docs/gguf.md for what is read")]
    GgufName { tensor: String, reason: String },

    /// A tensor whose type holds no weights.
    #[error("{shard}: tensor {tensor}: {reason}")]
    GgufType { shard: String, tensor: String, reason: String },

    /// A file shorter than its header says.
    #[error("{}: truncated: expected {expected} bytes, found {found}{}; fetch the file again", path.display(), tensor.as_ref().map(|t| format!(", so tensor {t} is incomplete")).unwrap_or_default())]
    Truncated { path: PathBuf, expected: u64, found: u64, tensor: Option<String> },

    /// A file longer than its header says.
    #[error("{}: {} bytes follow the last tensor: expected {expected} bytes, found {found}; fetch the file again", path.display(), found - expected)]
    TrailingBytes { path: PathBuf, expected: u64, found: u64 },

    /// A file that holds its header and nothing else.
    #[error("{}: holds only its header, {missing} bytes of tensor data are absent; a plan can be made from headers (--dry-run), a conversion needs the data", path.display())]
    HeadersOnly { path: PathBuf, missing: u64 },

    /// A file that is no longer the one that was opened.
    #[error("{}: changed while in use: expected {expected}, found {found}; leave the checkpoint alone while it is read, and start again", path.display())]
    Changed { path: PathBuf, expected: String, found: String },

    /// A read that ended early.
    #[error("{}: reading tensor {tensor} at offset {offset}: expected {expected} bytes, the file ended after {found}; it shrank while in use, fetch it again", path.display())]
    ShortRead { path: PathBuf, tensor: String, offset: u64, expected: u64, found: u64 },

    /// A range outside the tensor, or a buffer of another length.
    #[error("tensor {tensor}: range {start}..{end} does not fit: {reason}")]
    Range { tensor: String, start: u64, end: u64, reason: String },

    /// A tensor that lies in a shard but not in the index.
    #[error("{}: tensor {tensor} is needed and lies in {shard}, but the index does not name it; correct the index or remove it and merge the shards", path.display())]
    Unindexed { path: PathBuf, tensor: String, shard: String },

    /// A quantized weight without one of its tensors.
    #[error(
        "{shard}: weight {weight} ({dtype} {shape:?}): {missing} is missing; a tensor was left out of the checkpoint, fetch it again"
    )]
    MissingPlane { shard: String, weight: String, dtype: Dtype, shape: Vec<u64>, missing: String },

    /// A combination of tensors that no scheme uses.
    #[error(
        "{shard}: tensor {tensor}: expected {expected}, found {found}; this is no quantization scheme that can be read, see docs/checkpoints.md"
    )]
    Scheme { shard: String, tensor: String, expected: String, found: String },

    /// Scales or codes that belong to no weight.
    #[error(
        "{shard}: tensor {tensor} belongs to no weight: {base} has none; a tensor was left out of the checkpoint, fetch it again"
    )]
    Orphan { shard: String, tensor: String, base: String },

    /// A stored word that has no value, or one that the scheme forbids.
    #[error(
        "{shard}: tensor {tensor}, row {row}, column {column}, offset {offset}: expected {expected}, found {found}; the checkpoint is damaged or was made by a faulty export"
    )]
    IllegalWord {
        shard: String,
        tensor: String,
        row: u64,
        column: u64,
        offset: u64,
        expected: &'static str,
        found: String,
    },

    /// A decode that the dtype does not allow.
    #[error("{shard}: tensor {tensor} is {dtype}; expected a floating-point or quantized weight")]
    NotDecodable { shard: String, tensor: String, dtype: Dtype },

    /// A configuration file that cannot be read.
    #[error("{}: {reason}; fetch the file again", path.display())]
    Config { path: PathBuf, reason: String },

    /// A resource name that is not a plain file name.
    #[error("{name:?} is not the name of a file in the checkpoint folder: {reason}")]
    FileName { name: String, reason: &'static str },
}

/// At most eight names, then a count.
fn list(names: &[String]) -> String {
    let shown = names.iter().take(8).cloned().collect::<Vec<_>>().join(", ");
    if names.len() > 8 { format!("{shown} and {} more", names.len() - 8) } else { shown }
}

impl CheckpointError {
    /// Wraps an I/O error with the file and what was being done.
    pub(crate) fn io(path: &std::path::Path, action: &'static str) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self::Io { path, action, source }
    }
}
