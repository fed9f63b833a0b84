//! State of sequences: paged KV, recurrent slots, records, snapshots.
//!
//! [`KvPool`] hands out pages and is the same for every backend. [`HostState`] is the storage and the transaction
//! logic that host backends share; it computes nothing that rounds.

mod codec;
mod host;
mod image;
mod pool;
mod slot;

pub use codec::{Bf16Codec, F32Codec, Int8Codec, KvCodec, KvFormat, hadamard};
pub use host::{ConvKind, GdnLane, HostState};
pub use pool::KvPool;
pub use slot::{GdnRecord, Slot, SlotSnapshot};

use crate::backend::{GdnDims, IndexDims, Part};

/// Tokens of a KV page; also the tile of host attention kernels.
pub const PAGE_TOKENS: usize = 64;

/// One attention layer's state.
#[derive(Clone, Debug)]
pub struct AttentionLayout {
    /// Target or drafter.
    pub part: Part,
    /// KV heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Sparse-attention index, if any.
    pub index: Option<IndexDims>,
}

/// One PLE layer's state.
#[derive(Clone, Copy, Debug)]
pub struct PleLayout {
    /// Channels nH.
    pub width: usize,
    /// Columns kept: `(taps - 1) * dilation`.
    pub columns: usize,
}

/// Everything a backend must hold for sequences.
#[derive(Clone, Debug)]
pub struct StateLayout {
    /// Attention layers in order, the drafter's last.
    pub attention: Vec<AttentionLayout>,
    /// Gated delta rule layers in order.
    pub gdn: Vec<GdnDims>,
    /// PLE layers in order.
    pub ple: Vec<PleLayout>,
    /// KV pages of [`PAGE_TOKENS`] tokens; a page spans all attention layers.
    pub pages: usize,
    /// Recurrent slots.
    pub slots: usize,
    /// KV format; `--boundaries fp32` overrides it with FP32.
    pub kv: KvFormat,
}
