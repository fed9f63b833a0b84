//! The `.infernix` container (version 3) and the `.ngram` volume: read, write, digest, rename, repair.
//!
//! * [`Artifact`] opens a set of files, checks every length and header, and hands out object bytes.
//! * [`Draft`] -> [`Layouted`] plans a set to the byte without touching the disk; [`Writer`] streams objects into
//!   sparse files in a state folder, journals each finished one and publishes the set by renames.
//! * [`ngram`] reads and writes the n-gram volume that lies beside a set.
//! * [`verify`], [`rename`], [`repair`] and [`sums`] work on finished sets.
//!
//! All of it treats the bytes it reads as untrusted: sizes are bounded, sums are checked, and every error names the
//! file, the place and what was expected. `docs/container.md` describes the bytes.

pub mod digest;
mod directory;
mod draft;
mod error;
mod framing;
mod guard;
mod id;
pub mod io;
pub mod json;
mod lock;
pub mod names;
pub mod ngram;
mod parse;
mod publish;
mod reader;
pub mod rename;
pub mod repair;
mod state;
pub mod sums;
pub mod verify;
mod work;
mod writer;

pub use directory::{
    ActivationPolicy, Binding, BindingPart, Component, Directory, FileEntry, Object, ObjectKind, Proposal,
    Use,
};
pub use draft::{DEFAULT_MAX_FILE_BYTES, Draft, DraftObject, LayoutOptions, Layouted, PlannedFile};
pub use error::ArtifactError;
pub use framing::{FRAME_ALIGNMENT, HEADER_BYTES};
pub use id::{ArtifactId, Digest};
pub use io::{Faults, Interrupt};
pub use lock::{FileLock, LockError};
pub use parse::parse_directory;
pub use publish::{Publication, PublishOptions, PublishedFile, Report, Summary};
pub use reader::{Artifact, Mapping, ObjectBytes, OpenOptions, Segment};
pub use state::{JournalKey, SOURCE_DIGESTS, clean, discard_unused, state_folder};
pub use work::{WorkFile, Workplace};
pub use writer::{Resume, Start, Writer, WriterOptions};

/// Result with this crate's error.
pub type Result<T, E = ArtifactError> = std::result::Result<T, E>;
