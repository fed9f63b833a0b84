//! What llama.cpp's perplexity tool computes and stores: base file, row arithmetic, statistics and printout.

mod file;
mod print;
mod row;

pub use file::{BaseFile, BaseHeader, BaseWriter};
pub use print::{Printout, running};
pub use row::CodedRow;
pub(crate) use row::check;
