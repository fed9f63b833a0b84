//! The inference engine: model graphs over a [`backend::Backend`], sequence state, and what feeds them.

pub mod backend;
pub mod cache;
pub mod driver;
pub mod error;
pub mod files;
pub mod memory;
pub mod model;
pub mod ngram;
pub mod numerics;
pub mod residency;
pub mod sample;
pub mod sched;
pub mod sim;
pub mod spec;
pub mod state;
pub mod synthetic;

pub use error::EngineError;
