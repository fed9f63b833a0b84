//! What a model of this family *is*, apart from any file or arithmetic: its validated configuration, the set of logical
//! parameters an artifact must bind, and the hash constants of its n-gram table.
//!
//! The converter reads this to know which source tensors make up which logical parameter; the engine reads the same list to
//! know which bindings it must find. Keeping both on one list is what makes "nothing missing, nothing extra" checkable.
#![forbid(unsafe_code)]

mod config;
mod drafter;
mod json;
pub mod ngram;
mod parameters;

pub use config::{
    Architecture, AttentionConfig, Ffn, GateActivation, GdnConfig, HyperConfig, LayerKind, ModelConfig,
    MoeConfig, PleConfig, QsaConfig, RopeConfig, VisionConfig, Yarn,
};
pub use drafter::{DrafterConfig, DrafterConv, DrafterSelector, drafter_classes};
pub use parameters::{
    Class, Component, NameStyle, Parameter, Rows, Source, expert_parent_names, parameters, source_prefix,
};

/// Why a configuration does not describe a model this project can hold.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ModelError {
    /// A key that the architecture needs is absent.
    #[error("config: `{key}` is missing")]
    Missing {
        /// Dotted path of the key.
        key: String,
    },
    /// A key has a value of the wrong type or outside its range.
    #[error("config: `{key}` is {found}, expected {expected}")]
    Invalid {
        /// Dotted path of the key.
        key: String,
        /// The value as JSON text, cut to a readable length.
        found: String,
        /// What would be accepted.
        expected: String,
    },
    /// Two keys contradict each other.
    #[error("config: {0}")]
    Contradiction(String),
    /// The architecture is none of the supported ones.
    #[error(
        "config: architecture {found} is not supported; supported are qwen4_exp (also named qwen3_8_flash_next), qwen3_5 and qwen3_5_moe"
    )]
    UnknownArchitecture {
        /// `model_type` or `architectures` as found.
        found: String,
    },
}
