//! Conversion, verification and repair of whole checkpoints.
//!
//! The bundled demo is always there; the other test checkpoints lie beside the repository and their tests say so and
//! pass where they are absent.

#![expect(clippy::print_stderr, reason = "skipped tests say why")]

mod bad_input;
mod built_in;
mod common;
mod demo;
mod derivation;
mod export;
mod fixtures;
mod gguf;
mod kinds;
mod llama_cpp;
mod proof;
mod recipes;
mod resume;
mod sizes;
mod tensors;
mod values;

/// The synthesiser of the development tool, for checkpoints that no fixture has.
#[path = "../../../../xtask/src/synth/mod.rs"]
#[expect(dead_code, clippy::print_stdout, reason = "a tool's module; one entry is used")]
mod synth;
