//! Errors of fetching.

use std::io;
use std::path::PathBuf;

/// Why a repository could not be fetched. What is on disk stays, and the next run goes on from there.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FetchError {
    /// Something about the request itself.
    #[error("{0}")]
    Request(String),
    /// The endpoint refuses.
    #[error("{url}: status {status}{hint}")]
    Status {
        /// What was asked for.
        url: String,
        /// The answer.
        status: u16,
        /// What to do.
        hint: &'static str,
    },
    /// The endpoint cannot be reached, or not for long enough.
    #[error("{url}: {what}; run again to go on from here")]
    Network {
        /// What was asked for.
        url: String,
        /// What happened.
        what: String,
    },
    /// The endpoint says something that cannot be true.
    #[error("{url}: {what}")]
    Answer {
        /// What was asked for.
        url: String,
        /// What is wrong.
        what: String,
    },
    /// A finished file is not the announced one. It was removed.
    #[error("{file}: {kind} {found}, {expected} announced; the download was removed, run again")]
    Digest {
        /// The file.
        file: String,
        /// `SHA-256` or `git blob SHA-1`.
        kind: &'static str,
        /// As announced.
        expected: String,
        /// As computed.
        found: String,
    },
    /// The disk.
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
    /// Too little space.
    #[error("{}: {needed} bytes are needed and {available} are free; free some or choose files with --include", .path.display())]
    Space {
        /// The cache.
        path: PathBuf,
        /// Bytes still to be fetched.
        needed: u64,
        /// Bytes free.
        available: u64,
    },
    /// Another process fetches the same file.
    #[error("{}: another process is fetching this file; wait for it", .path.display())]
    Locked {
        /// The unfinished file.
        path: PathBuf,
    },
    /// Stopped by the user.
    #[error("interrupted; run again to go on from here")]
    Interrupted,
}

/// Result of fetching.
pub type Result<T> = std::result::Result<T, FetchError>;

impl FetchError {
    pub(crate) fn io(path: impl Into<PathBuf>, what: &'static str) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { path, what, source }
    }
}
