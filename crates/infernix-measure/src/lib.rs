//! How far a model is from the exact one: KL divergence, perplexity, and what makes their figures comparable.
//!
//! [`kld()`] runs a reference and models under test over the chunks of a text; [`ppl()`] runs windows over streams. Both
//! take anything that is a [`LogitsSource`]; [`DriverSource`] makes one of an engine's driver. Formats and definitions:
//! docs/kld.md.

pub mod bench;
pub mod bootstrap;
pub mod client;
mod compare;
pub mod corpus;
mod error;
mod files;
mod kld;
pub mod llama;
pub mod load;
mod logits;
mod page;
pub mod paired;
mod ppl;
pub mod redact;
pub mod reference;
pub mod replay;
mod report;
pub mod row;
mod source;
mod state;
pub mod stats;

pub use compare::{StoredFile, compare};
pub use corpus::Chunks;
pub use error::{MeasureError, Result};
pub use kld::{KldOptions, Reference, Rows, Running, RunningTest, Test, kld};
pub use logits::LogitsFile;
pub use page::{Page, page};
pub use ppl::{PplOptions, PplProgress, PplReport, TokenStream, ppl};
pub use report::{KldReport, PathReport, RoundingReport, SCHEMA_VERSION};
pub use source::{Call, Drafting, DriverSource, GroupSink, LogitsSource, Path, SetRounding, Sink};
pub use state::StatePlace;
