//! Finding a repository in the Hugging Face cache.
//!
//! Layout: `HUB/models--ORG--NAME/{refs/REVISION, snapshots/COMMIT/FILE, blobs/DIGEST}`; a ref holds a commit,
//! the files of a snapshot are links to blobs. Blobs of large files are named by their SHA-256.

use std::fmt;
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::index::{INDEX_FILE, parse_index};

/// A repository's files at one commit, complete.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// The checkpoint folder, to be given to [`crate::Checkpoint::open`].
    pub folder: PathBuf,
    /// `org/name`.
    pub repo: String,
    /// The commit, as the cache names it.
    pub commit: String,
}

/// What the cache lacks, exactly.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Missing {
    /// Not the name of a repository.
    BadName {
        /// What was given.
        repo: String,
    },
    /// There is no cache at all.
    NoCache {
        /// Where it was looked for.
        hub: Option<PathBuf>,
        /// What was looked for.
        repo: String,
    },
    /// The cache does not know the repository.
    Repository {
        /// The cache folder.
        hub: PathBuf,
        /// What was looked for.
        repo: String,
    },
    /// The repository is there, the revision is not.
    Revision {
        /// What was looked for.
        repo: String,
        /// The revision asked for.
        revision: String,
        /// Commits that are there.
        present: Vec<String>,
    },
    /// The snapshot is incomplete.
    Files {
        /// What was looked for.
        repo: String,
        /// The snapshot's folder.
        folder: PathBuf,
        /// Names of the missing files.
        files: Vec<String>,
        /// How many downloads were left unfinished.
        unfinished: usize,
    },
    /// A file that decides what else is needed cannot be read.
    Unreadable {
        /// What was looked for.
        repo: String,
        /// Why, with the file's name.
        reason: String,
    },
}

impl std::error::Error for Missing {}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BadName { repo } => write!(f, "{repo:?} is not a repository name; expected ORG/NAME"),
            Self::NoCache { hub: Some(hub), repo } => write!(
                f,
                "{repo}: there is no Hugging Face cache at {}; fetch the repository, or set HF_HUB_CACHE or HF_HOME",
                hub.display()
            ),
            Self::NoCache { hub: None, repo } => {
                write!(
                    f,
                    "{repo}: no Hugging Face cache is known; set HF_HUB_CACHE or HF_HOME, or pass the folder"
                )
            }
            Self::Repository { hub, repo } => {
                write!(
                    f,
                    "{repo} is not in the Hugging Face cache at {}; fetch it, or pass the folder",
                    hub.display()
                )
            }
            Self::Revision { repo, revision, present } if present.is_empty() => {
                write!(f, "{repo}: revision {revision} is not in the cache, nor is any other; fetch it")
            }
            Self::Revision { repo, revision, present } => write!(
                f,
                "{repo}: revision {revision} is not in the cache, which has {}; fetch it or name one of these",
                present.join(", ")
            ),
            Self::Files { repo, folder, files, unfinished } => {
                let shown: Vec<&str> = files.iter().take(16).map(String::as_str).collect();
                write!(f, "{repo}: {} lacks {}", folder.display(), shown.join(", "))?;
                if files.len() > shown.len() {
                    write!(f, " and {} more files", files.len() - shown.len())?;
                }
                if *unfinished > 0 {
                    write!(f, " ({unfinished} downloads were left unfinished)")?;
                }
                f.write_str("; fetch the repository again, finished files are kept")
            }
            Self::Unreadable { repo, reason } => write!(f, "{repo}: {reason}"),
        }
    }
}

/// Looks a repository up in the user's cache: `HF_HUB_CACHE`, else `HF_HOME/hub`, else the user cache
/// (`XDG_CACHE_HOME/huggingface/hub`, `~/.cache/huggingface/hub`). `revision` is a branch, a tag or a commit
/// (also abbreviated to 7 digits or more); `None` is `main`.
///
/// # Errors
/// What is missing, down to the names of the files.
pub fn find(repo: &str, revision: Option<&str>) -> Result<Snapshot, Missing> {
    match hub() {
        Some(hub) => find_in(&hub, repo, revision),
        None => Err(Missing::NoCache { hub: None, repo: repo.to_owned() }),
    }
}

/// The cache folder of this user, if one can be named; it need not exist.
pub fn hub() -> Option<PathBuf> {
    hub_folder(|name| std::env::var_os(name).filter(|v| !v.is_empty()))
}

/// The cache folder that these environment variables name.
fn hub_folder(var: impl Fn(&str) -> Option<std::ffi::OsString>) -> Option<PathBuf> {
    if let Some(hub) = var("HF_HUB_CACHE") {
        return Some(hub.into());
    }
    if let Some(home) = var("HF_HOME") {
        return Some(Path::new(&home).join("hub"));
    }
    let cache = match var("XDG_CACHE_HOME") {
        Some(cache) => PathBuf::from(cache),
        None => Path::new(&var("HOME").or_else(|| var("USERPROFILE"))?).join(".cache"),
    };
    Some(cache.join("huggingface").join("hub"))
}

/// The same in a given cache folder.
///
/// # Errors
/// As [`find`].
pub fn find_in(hub: &Path, repo: &str, revision: Option<&str>) -> Result<Snapshot, Missing> {
    if !valid_repo(repo) {
        return Err(Missing::BadName { repo: repo.to_owned() });
    }
    if !hub.is_dir() {
        return Err(Missing::NoCache { hub: Some(hub.to_path_buf()), repo: repo.to_owned() });
    }
    let root = hub.join(format!("models--{}", repo.replace('/', "--")));
    if !root.is_dir() {
        return Err(Missing::Repository { hub: hub.to_path_buf(), repo: repo.to_owned() });
    }
    let revision = revision.unwrap_or("main");
    let mut present: Vec<String> = std::fs::read_dir(root.join("snapshots"))
        .into_iter()
        .flatten()
        .filter_map(|e| e.ok()?.file_name().into_string().ok())
        .collect();
    present.sort();
    let Some(commit) = commit_of(&root, revision, &present) else {
        return Err(Missing::Revision { repo: repo.to_owned(), revision: revision.to_owned(), present });
    };
    let folder = root.join("snapshots").join(&commit);
    let files =
        missing_files(&folder).map_err(|reason| Missing::Unreadable { repo: repo.to_owned(), reason })?;
    if files.is_empty() {
        return Ok(Snapshot { folder, repo: repo.to_owned(), commit });
    }
    let unfinished = std::fs::read_dir(root.join("blobs"))
        .into_iter()
        .flatten()
        .filter(|e| e.as_ref().is_ok_and(|e| e.file_name().to_string_lossy().ends_with(".incomplete")))
        .count();
    Err(Missing::Files { repo: repo.to_owned(), folder, files, unfinished })
}

/// Whether a text names a repository: `ORG/NAME` (or a bare name) of letters, digits, `-`, `_` and `.`. `--` would be ambiguous in the cache's
/// folder names, `..` would leave it.
pub fn valid_repo(repo: &str) -> bool {
    let part = |p: &str| {
        !p.is_empty()
            && p.len() <= 96
            && p.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
            && !p.contains("--")
            && !p.contains("..")
            && !p.starts_with(['-', '.'])
            && !p.ends_with(['-', '.'])
    };
    let mut parts = repo.split('/');
    let (first, second) = (parts.next(), parts.next());
    first.is_some_and(part) && second.is_none_or(part) && parts.next().is_none()
}

/// The commit that a revision stands for, among those present.
fn commit_of(root: &Path, revision: &str, present: &[String]) -> Option<String> {
    if present.iter().any(|c| c == revision) {
        return Some(revision.to_owned());
    }
    // A ref may have slashes (refs/pr/1), but stays inside `refs`.
    let inside = !revision.is_empty()
        && !revision.contains(['\\', ':', '\0'])
        && revision.split('/').all(|p| !p.is_empty() && p != "." && p != "..");
    if inside {
        let name = revision.strip_prefix("refs/").unwrap_or(revision);
        for name in [revision, name] {
            let mut text = String::new();
            if let Ok(file) = std::fs::File::open(root.join("refs").join(name))
                && file.take(256).read_to_string(&mut text).is_ok()
            {
                let commit = text.trim();
                return present.iter().find(|c| *c == commit).cloned();
            }
        }
    }
    if revision.len() >= 7 && revision.bytes().all(|b| b.is_ascii_hexdigit()) {
        let mut matches = present.iter().filter(|c| c.starts_with(&revision.to_ascii_lowercase()));
        if let (Some(one), None) = (matches.next(), matches.next()) {
            return Some(one.clone());
        }
    }
    None
}

/// The files that a checkpoint needs and the snapshot lacks. A link whose blob is gone counts as missing.
fn missing_files(folder: &Path) -> Result<Vec<String>, String> {
    let mut missing = Vec::new();
    let mut need = |name: &str| {
        if !folder.join(name).is_file() {
            missing.push(name.to_owned());
        }
    };
    need("config.json");
    let index_path = folder.join(INDEX_FILE);
    if index_path.is_file() {
        let text = crate::checkpoint::read_index(&index_path).map_err(|e| e.to_string())?;
        let mut shards = parse_index(&index_path, &text).map_err(|e| e.to_string())?.shards;
        shards.sort_by(|a, b| crate::natural_cmp(a, b));
        shards.iter().for_each(|s| need(s));
    } else if folder.join("model.safetensors").symlink_metadata().is_ok() {
        need("model.safetensors");
    } else if !folder.join("model.safetensors").is_file() {
        // Without either there is no telling which of the two the repository has.
        need(if index_path.symlink_metadata().is_ok() {
            INDEX_FILE
        } else {
            "model.safetensors.index.json (or model.safetensors)"
        });
    }
    Ok(missing)
}

/// The SHA-256 of a file that is a link to a cache's blob named by it. Blobs of small files are named by a
/// 40-digit git hash, which is not one.
pub(crate) fn blob_sha256(path: &Path) -> Option<[u8; 32]> {
    if !path.symlink_metadata().ok()?.file_type().is_symlink() {
        return None;
    }
    let target = path.canonicalize().ok()?;
    if target.parent()?.file_name()? != "blobs" {
        return None;
    }
    parse_hex(target.file_name()?.to_str()?)
}

fn parse_hex(text: &str) -> Option<[u8; 32]> {
    let digit = |b: u8| (b as char).to_digit(16).map(|d| d as u8);
    let bytes: &[u8; 64] = text.as_bytes().try_into().ok()?;
    let mut out = [0; 32];
    for (o, pair) in out.iter_mut().zip(bytes.chunks_exact(2)) {
        *o = digit(pair[0])? << 4 | digit(pair[1])?;
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_tried_in_order() {
        let with = |set: &[(&str, &str)]| {
            let set: Vec<(String, String)> =
                set.iter().map(|(a, b)| (a.to_string(), b.to_string())).collect();
            hub_folder(move |name| set.iter().find(|(n, _)| n == name).map(|(_, v)| v.into()))
        };
        let all = [("HF_HUB_CACHE", "/c"), ("HF_HOME", "/h"), ("XDG_CACHE_HOME", "/x"), ("HOME", "/u")];
        assert_eq!(with(&all), Some("/c".into()));
        assert_eq!(with(&all[1..]), Some("/h/hub".into()));
        assert_eq!(with(&all[2..]), Some("/x/huggingface/hub".into()));
        assert_eq!(with(&all[3..]), Some("/u/.cache/huggingface/hub".into()));
        assert_eq!(with(&[]), None);
    }

    #[test]
    fn repository_names_cannot_leave_the_cache() {
        for good in ["nvidia/Qwen3.8-Flash-Next-NVFP4", "gpt2", "a/b_c.d"] {
            assert!(valid_repo(good), "{good}");
        }
        for bad in
            ["", "/", "a/", "/b", "a/b/c", "../x", "a/..", "a b/c", "a--b/c", "a/.hidden", "a\\b", "a/b\0"]
        {
            assert!(!valid_repo(bad), "{bad:?}");
        }
    }

    #[test]
    fn only_64_digits_are_a_sha256() {
        assert_eq!(parse_hex(&"ab".repeat(32)), Some([0xab; 32]));
        assert_eq!(parse_hex(&"ab".repeat(20)), None);
        assert_eq!(parse_hex(&"xy".repeat(32)), None);
        assert_eq!(parse_hex(&format!("{}é", "a".repeat(62))), None);
    }
}
