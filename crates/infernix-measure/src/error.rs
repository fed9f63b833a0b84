//! Errors of measuring.

use infernix_engine::EngineError;
use std::io;
use std::path::{Path, PathBuf};

/// What can go wrong between two models and a figure.
#[derive(Debug, thiserror::Error)]
pub enum MeasureError {
    /// A file could not be read or written.
    #[error("{}: {what}: {source}", .path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What was being done.
        what: &'static str,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
    /// A file is not what its format says.
    #[error("{}: byte {offset}: {what}", .path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// Where.
        offset: u64,
        /// Expected and found.
        what: String,
    },
    /// A file of requests that is not in its format.
    #[error("{}: {what}", .path.display())]
    Dataset {
        /// The file.
        path: PathBuf,
        /// What is wrong with it, and in which line.
        what: String,
    },
    /// Two things that must belong together do not.
    #[error("{what} differs: {expected} expected, {found} found; {advice}")]
    Mismatch {
        /// What differs, with the file that says so.
        what: String,
        /// The value this run has.
        expected: String,
        /// The value found.
        found: String,
        /// What to do.
        advice: &'static str,
    },
    /// A logit that is no number, or infinite.
    #[error("{place}: the logit of id {id} is {value}; nothing can be measured on it")]
    NotFinite {
        /// Whose row it is: file or engine, chunk and row.
        place: String,
        /// Token id.
        id: usize,
        /// The value.
        value: f32,
    },
    /// A corpus that cannot be used.
    #[error("corpus {corpus}: {what}")]
    Corpus {
        /// Name or file.
        corpus: String,
        /// What is wrong with it and what would do.
        what: String,
    },
    /// Options that contradict each other or cannot be measured.
    #[error("{0}")]
    Options(String),
    /// The disk is too small for what would be written.
    #[error("{}: {needed} bytes needed, {free} free; free some or take fewer chunks", .path.display())]
    Disk {
        /// The file that would be written.
        path: PathBuf,
        /// Its size.
        needed: u64,
        /// What the disk has.
        free: u64,
    },
    /// The run was interrupted; its state is on disk if it was given a state file.
    #[error("interrupted after {done} of {total}; {advice}")]
    Interrupted {
        /// Finished chunks or windows.
        done: usize,
        /// All of them.
        total: usize,
        /// How to go on.
        advice: &'static str,
    },
    /// A server that cannot be measured.
    #[error("{0}")]
    Server(String),
    /// A server that wants another key: waiting changes nothing.
    #[error("{0}")]
    Denied(String),
    /// Stopped by the user; nothing is kept.
    #[error("interrupted")]
    Stopped,
    /// The engine failed.
    #[error(transparent)]
    Engine(#[from] EngineError),
}

impl MeasureError {
    pub(crate) fn io<'a>(path: &'a Path, what: &'static str) -> impl FnOnce(io::Error) -> Self + 'a {
        move |source| Self::Io { path: path.to_owned(), what, source }
    }

    pub(crate) fn format(path: &Path, offset: u64, what: impl Into<String>) -> Self {
        Self::Format { path: path.to_owned(), offset, what: what.into() }
    }
}

/// Result of measuring.
pub type Result<T> = std::result::Result<T, MeasureError>;
