//! The n-gram table: which rows a token needs, and reading them ahead of the model.
//!
//! Row ids depend on token ids alone, so a request can be made as soon as the ids are known and waited for where the
//! rows are used. A read error fails the request's ticket, not the process.

mod artifact;
mod blocks;
mod reader;
mod rows;
mod ticket;

pub use artifact::open as open_ngram;
pub use reader::{Ngram, NgramOptions, NgramStats};
pub use rows::{MemoryRows, RowSource, VolumeRows};
pub use ticket::NgramTicket;
