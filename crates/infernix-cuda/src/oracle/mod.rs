//! Scalar oracles: random stored words and their exact values, and the reference arithmetic the kernels are held to.

pub mod chain;
pub mod fp4;
pub mod kv8;
pub mod num;
pub mod w4a4;
pub mod words;

pub use num::Rng;
pub use words::Words;
