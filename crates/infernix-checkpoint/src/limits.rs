//! Limits on what a file may ask for before anything is allocated.

/// Largest safetensors header, the format's own cap (100 MB).
pub(crate) const MAX_HEADER_BYTES: u64 = 100_000_000;
/// Largest index: eight times the 31 MB one of the largest release known (300,000 tensors).
pub(crate) const MAX_INDEX_BYTES: u64 = 256 << 20;
/// Largest resource file read whole (a tokenizer is about 13 MB).
pub(crate) const MAX_RESOURCE_BYTES: u64 = 256 << 20;
/// Largest `config.json` or `hf_quant_config.json` (about 30 KB in releases); parsed JSON can take 16 times
/// its text.
pub(crate) const MAX_CONFIG_BYTES: u64 = 4 << 20;
/// Longest tensor name.
pub(crate) const MAX_NAME_BYTES: usize = 512;
/// Most dimensions of a tensor, as in the container.
pub(crate) const MAX_RANK: usize = 16;
/// Most shards of a checkpoint; the largest release known has 131.
pub(crate) const MAX_SHARDS: usize = 10_000;
/// Files open at once.
pub(crate) const MAX_OPEN_FILES: usize = 4;
/// Longest header of a GGUF file; a vocabulary of 248,320 with its merges takes about 10 MB (an estimate).
pub(crate) const MAX_GGUF_HEADER_BYTES: u64 = 256 << 20;
/// Most metadata keys of a GGUF file; models have about 60.
pub(crate) const MAX_GGUF_KEYS: u64 = 65_536;
/// Most tensors of a GGUF file.
pub(crate) const MAX_GGUF_TENSORS: u64 = 200_000;
/// Longest metadata key, the format's own cap.
pub(crate) const MAX_GGUF_KEY_BYTES: u64 = 65_535;
/// Longest text value that is held: a tokenizer as JSON fits.
pub(crate) const MAX_GGUF_TEXT_BYTES: u64 = 32 << 20;
/// Most bytes of an array that is read whole.
pub(crate) const MAX_GGUF_ARRAY_BYTES: u64 = 64 << 20;
/// Dimensions of a ggml tensor (`GGML_MAX_DIMS`).
pub(crate) const MAX_GGUF_RANK: u32 = 4;
