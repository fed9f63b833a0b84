//! Arithmetic that backends share: the canonical W4A4 expert, correct rounding, extended precision.

pub mod a8;
pub mod dd;
pub mod round;
pub mod w4a4;
