//! Routed experts.

pub(crate) mod a4;
pub(crate) mod chain;
mod layer;

pub(crate) use layer::Layer;

/// Bytes of 16 rows x 16 columns in `nvfp4_expert_rg16_v1`: four quads of 32 code bytes, then 16 scales.
pub(crate) const UNIT: usize = 144;
