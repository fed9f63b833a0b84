//! The crate's one error type. Messages carry file, place, expected, found and what to do next.

use std::io;
use std::path::{Path, PathBuf};

/// Everything that can go wrong with a container, a volume or the state of a conversion.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ArtifactError {
    /// The operating system refused an operation.
    #[error("{path}: cannot {action}: {source}")]
    Io {
        /// File or folder.
        path: PathBuf,
        /// What was attempted, as a verb phrase.
        action: &'static str,
        /// The system's reason.
        source: io::Error,
    },
    /// The device of the output is full, or will be.
    #[error(
        "{path}: disk full: {needed} bytes are needed and {available} are free; free some space and run again"
    )]
    DiskFull {
        /// File or folder on the full device.
        path: PathBuf,
        /// Bytes still to be written.
        needed: u64,
        /// Bytes free for this user.
        available: u64,
    },
    /// The file is no version-3 container.
    #[error("{path}: {reason}")]
    NotAnArtifact {
        /// The file.
        path: PathBuf,
        /// What it is instead and what to do.
        reason: String,
    },
    /// The directory JSON is malformed, or breaks a rule of the format.
    #[error("{path}: directory: {at}: {reason}")]
    Directory {
        /// The entry file.
        path: PathBuf,
        /// Where in the JSON (`/objects/3/offset`, or a byte position).
        at: String,
        /// What is wrong.
        reason: String,
    },
    /// A file of the set does not have its exact length.
    #[error("{path}: is {found} bytes long, expected exactly {expected}; {hint}")]
    Length {
        /// The file.
        path: PathBuf,
        /// Length by header and directory.
        expected: u64,
        /// Length on disk.
        found: u64,
        /// Likely cause.
        hint: &'static str,
    },
    /// A continuation file belongs to another set or another place in it.
    #[error(
        "{path}: part header: {field} is {found}, expected {expected}; the file belongs elsewhere or is damaged"
    )]
    Part {
        /// The file.
        path: PathBuf,
        /// Which header field.
        field: &'static str,
        /// Value by the entry.
        expected: String,
        /// Value in the file.
        found: String,
    },
    /// A volume's header is malformed or disagrees with its artifact.
    #[error("{path}: n-gram volume: {reason}")]
    Volume {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// No object, binding, component or resource of that name.
    #[error("{path}: no {what} {name:?}")]
    Missing {
        /// The entry file.
        path: PathBuf,
        /// Kind of thing.
        what: &'static str,
        /// Its name.
        name: String,
    },
    /// What the caller handed in cannot be laid out, written or renamed.
    #[error("{0}")]
    Invalid(String),
    /// Two writes of an object overlap, or an object was finished with bytes missing.
    #[error("object {object:?}: {reason}")]
    Coverage {
        /// Object id.
        object: String,
        /// Which range.
        reason: String,
    },
    /// Something already lies where output should go.
    #[error("{path}: already exists and nothing is overwritten; choose another output or move it away")]
    OutputExists {
        /// The existing path.
        path: PathBuf,
    },
    /// A previous run left resumable state.
    #[error(
        "{path}: an unfinished conversion is here; continue it with --resume, or remove it with `infernix clean`"
    )]
    StateExists {
        /// The state folder.
        path: PathBuf,
    },
    /// The state was made from other inputs.
    #[error(
        "{path}: cannot resume: {name} changed: was {recorded}, is {now}; restore it, or start over after `infernix clean`"
    )]
    StateDiffers {
        /// The state folder.
        path: PathBuf,
        /// First key that differs.
        name: String,
        /// Value in the journal.
        recorded: String,
        /// Value now.
        now: String,
    },
    /// The state folder's files do not fit its journal.
    #[error(
        "{path}: the state of the unfinished conversion is damaged: {reason}; remove it with `infernix clean`"
    )]
    StateDamaged {
        /// The state folder or journal.
        path: PathBuf,
        /// What does not fit.
        reason: String,
    },
    /// Another process holds the lock.
    #[error("{path}: in use by {holder}")]
    Locked {
        /// The state folder.
        path: PathBuf,
        /// `process N`, or a guess.
        holder: String,
    },
    /// A digest does not match the recorded one.
    #[error("{path}: {what}: digest is {found}, expected {expected}")]
    DigestMismatch {
        /// The file.
        path: PathBuf,
        /// Object, directory or rows.
        what: String,
        /// Recorded digest.
        expected: String,
        /// Computed digest.
        found: String,
    },
    /// A mapped file changed size under its readers.
    #[error("{path}: the file shrank while it was in use; restore it and restart")]
    Shrunk {
        /// The file.
        path: PathBuf,
    },
    /// The interruption hook asked to stop; state stays resumable.
    #[error("interrupted")]
    Interrupted,
    /// The fault hook of a test stopped the process here.
    #[error("stopped by the test's fault hook")]
    Killed,
}

impl ArtifactError {
    /// An I/O error with its path; a full device becomes [`ArtifactError::DiskFull`].
    pub(crate) fn io(path: &Path, action: &'static str, source: io::Error) -> Self {
        if matches!(source.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) {
            let available = crate::io::available_bytes(path).unwrap_or(0);
            return Self::DiskFull { path: path.to_owned(), needed: 0, available };
        }
        Self::Io { path: path.to_owned(), action, source }
    }

    /// True for an interruption (exit code 130).
    pub fn is_interrupted(&self) -> bool {
        matches!(self, Self::Interrupted)
    }
}
