//! Resumable, checksummed downloads of a repository from a Hugging Face-compatible endpoint into its cache.
//!
//! A repository is resolved to a commit, its files are listed with sizes and digests, and each lands in `blobs/DIGEST`
//! only after its bytes have that digest. An interrupted download is `blobs/DIGEST.incomplete` and goes on by a
//! range request. Other tools read the same cache.

mod cache;
mod error;
mod listing;
mod transfer;

pub use error::{FetchError, Result};
pub use listing::{Digest, RemoteFile};

use cache::Cache;
use globset::{GlobBuilder, GlobSet, GlobSetBuilder};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use transfer::Client;

/// The public endpoint.
pub const DEFAULT_ENDPOINT: &str = "https://huggingface.co";

/// What is fetched, and how.
#[derive(Clone, Debug)]
pub struct FetchOptions {
    /// `ORG/NAME`.
    pub repo: String,
    /// Branch, tag or commit.
    pub revision: String,
    /// Patterns of file names to take; empty takes all. `*` does not cross a slash, `**` does.
    pub include: Vec<String>,
    /// Patterns of file names to leave out.
    pub exclude: Vec<String>,
    /// Scheme, host and port.
    pub endpoint: String,
    /// Sent to the endpoint's own origin, never across a redirect to another.
    pub token: Option<String>,
    /// The cache folder (`.../hub`).
    pub hub: PathBuf,
    /// Files in flight.
    pub parallel: usize,
    /// Whether plain http is allowed beyond this machine.
    pub allow_http: bool,
    /// Longest silence of a connection before it is given up and resumed.
    pub stall: Duration,
    /// Attempts in a row without a new byte before a file fails.
    pub attempts: u32,
}

/// Running counts.
#[derive(Debug, Default)]
pub struct Progress {
    /// Bytes of all files asked for.
    pub total: AtomicU64,
    /// Bytes that were there before.
    pub kept: AtomicU64,
    /// Bytes received in this run.
    pub received: AtomicU64,
    /// Connections that broke or stalled and were resumed.
    pub resumed: AtomicU64,
}

/// What is in the cache now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fetched {
    /// The snapshot's folder.
    pub folder: PathBuf,
    /// The commit.
    pub commit: String,
    /// Files of the snapshot that were asked for.
    pub files: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Of those, bytes that an earlier run had fetched.
    pub kept: u64,
    /// Bytes received in this run.
    pub received: u64,
    /// Connections that were resumed.
    pub resumed: u64,
}

/// Fetches a repository.
///
/// # Errors
/// See [`FetchError`]. Finished files and the beginnings of unfinished ones stay.
pub fn fetch(options: &FetchOptions, progress: &Progress, interrupted: &AtomicBool) -> Result<Fetched> {
    if !infernix_checkpoint::hf_cache::valid_repo(&options.repo) {
        return Err(FetchError::Request(format!(
            "{:?} is not a repository name; expected ORG/NAME",
            options.repo
        )));
    }
    if options.revision.is_empty() || options.revision.contains(['\0', '\n', '?', '#']) {
        return Err(FetchError::Request(format!("{:?} is not a revision", options.revision)));
    }
    let (include, exclude) = (patterns(&options.include)?, patterns(&options.exclude)?);
    let client = Client::new(options)?;
    let listing = listing::list(&client, &options.repo, &options.revision)?;
    let wanted = |f: &&RemoteFile| {
        (options.include.is_empty() || include.is_match(&f.path)) && !exclude.is_match(&f.path)
    };
    let files: Vec<&RemoteFile> = listing.files.iter().filter(wanted).collect();
    if files.is_empty() {
        return Err(FetchError::Request(format!(
            "{}: none of the {} files matches; names look like {}",
            options.repo,
            listing.files.len(),
            listing.files.iter().take(4).map(|f| f.path.as_str()).collect::<Vec<_>>().join(", ")
        )));
    }
    let cache = Cache::open(&options.hub, &options.repo, &listing.commit)?;
    let mut missing = 0;
    for file in &files {
        let have = cache.have(file);
        missing += file.size - have;
        progress.kept.fetch_add(have, Ordering::Relaxed);
        progress.total.fetch_add(file.size, Ordering::Relaxed);
    }
    cache.room_for(missing)?;
    let next = AtomicUsize::new(0);
    let failed: Mutex<Option<FetchError>> = Mutex::new(None);
    std::thread::scope(|scope| {
        for _ in 0..options.parallel.clamp(1, files.len()) {
            scope.spawn(|| {
                // The first failure stops the others between files, not inside one.
                while failed.lock().unwrap_or_else(PoisonError::into_inner).is_none() {
                    let Some(file) = files.get(next.fetch_add(1, Ordering::Relaxed)) else { return };
                    let url = listing.url(&client, file);
                    if let Err(e) = cache.obtain(&client, &url, file, progress, interrupted) {
                        failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(e);
                        return;
                    }
                }
            });
        }
    });
    if let Some(e) = failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
        return Err(e);
    }
    cache.point(&options.revision)?;
    Ok(Fetched {
        folder: cache.snapshot().to_owned(),
        commit: listing.commit,
        files: files.len(),
        bytes: files.iter().map(|f| f.size).sum(),
        kept: progress.kept.load(Ordering::Relaxed),
        received: progress.received.load(Ordering::Relaxed),
        resumed: progress.resumed.load(Ordering::Relaxed),
    })
}

fn patterns(globs: &[String]) -> Result<GlobSet> {
    let mut set = GlobSetBuilder::new();
    for g in globs {
        let glob = GlobBuilder::new(g).literal_separator(true).build();
        set.add(glob.map_err(|e| FetchError::Request(format!("pattern {g:?}: {e}")))?);
    }
    set.build().map_err(|e| FetchError::Request(e.to_string()))
}
