//! Entry points that libFuzzer drives; `crates/infernix-convert/tests/fuzz.rs` drives the same ones without it.

pub mod entry;
