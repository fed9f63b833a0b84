//! Which files a revision has, with their sizes and digests, and whether their names can be trusted.

use crate::error::{FetchError, Result};
use crate::transfer::Client;
use serde_json::Value;
use std::collections::HashSet;

/// Most files of a repository, and the largest one: beyond is a mistake or an attack.
const MAX_FILES: usize = 100_000;
const MAX_SIZE: u64 = 1 << 42;

/// What a file's bytes must hash to; also the name of its blob.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Digest {
    /// SHA-256 of the bytes, as stored in large-file storage.
    Sha256(String),
    /// SHA-1 of git's blob header and the bytes.
    Git(String),
}

impl Digest {
    /// Lower-case hexadecimal.
    pub fn hex(&self) -> &str {
        match self {
            Digest::Sha256(h) | Digest::Git(h) => h,
        }
    }
}

/// A file of the repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteFile {
    /// Path in the repository, with `/`.
    pub path: String,
    /// Bytes.
    pub size: u64,
    /// What they hash to.
    pub digest: Digest,
}

/// A revision's files.
#[derive(Clone, Debug)]
pub(crate) struct Listing {
    repo: String,
    pub(crate) commit: String,
    pub(crate) files: Vec<RemoteFile>,
}

impl Listing {
    /// Where a file's bytes are.
    pub(crate) fn url(&self, client: &Client, file: &RemoteFile) -> String {
        format!("{}/{}/resolve/{}/{}", client.endpoint(), self.repo, self.commit, escape(&file.path, "/"))
    }
}

/// Percent-encodes all but unreserved characters and `keep`.
fn escape(text: &str, keep: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for b in text.bytes() {
        let c = char::from(b);
        if c.is_ascii_alphanumeric() || "-_.~".contains(c) || keep.contains(c) {
            out.push(c);
        } else {
            out.push_str(&format!("%{b:02X}"));
        }
    }
    out
}

pub(crate) fn list(client: &Client, repo: &str, revision: &str) -> Result<Listing> {
    let url = format!("{}/api/models/{repo}/revision/{}?blobs=true", client.endpoint(), escape(revision, ""));
    let document = client.get_json(&url)?;
    parse(repo, &document).map_err(|what| FetchError::Answer { url, what })
}

fn parse(repo: &str, document: &Value) -> std::result::Result<Listing, String> {
    let commit = document["sha"].as_str().ok_or("no commit in the answer")?;
    if !is_hex(commit, 40) {
        return Err(format!("the commit {commit:?} is no git hash"));
    }
    let siblings = document["siblings"].as_array().ok_or("no list of files in the answer")?;
    if siblings.len() > MAX_FILES {
        return Err(format!("{} files", siblings.len()));
    }
    let mut seen = HashSet::new();
    let mut files = Vec::with_capacity(siblings.len());
    for s in siblings {
        let path = s["rfilename"].as_str().ok_or("a file without a name")?;
        check_name(path)?;
        if !seen.insert(path) {
            return Err(format!("two files are named {path:?}"));
        }
        let size = s.pointer("/lfs/size").or_else(|| s.get("size")).and_then(Value::as_u64);
        let size = size.ok_or_else(|| format!("{path}: no size"))?;
        if size > MAX_SIZE {
            return Err(format!("{path}: {size} bytes"));
        }
        let digest = match (s.pointer("/lfs/sha256").and_then(Value::as_str), s["blobId"].as_str()) {
            (Some(h), _) if is_hex(h, 64) => Digest::Sha256(h.to_owned()),
            (None, Some(h)) if is_hex(h, 40) => Digest::Git(h.to_owned()),
            _ => return Err(format!("{path}: no digest")),
        };
        files.push(RemoteFile { path: path.to_owned(), size, digest });
    }
    Ok(Listing { repo: repo.to_owned(), commit: commit.to_owned(), files })
}

fn is_hex(text: &str, length: usize) -> bool {
    text.len() == length && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

/// A relative path that stays in its folder on every system.
fn check_name(path: &str) -> std::result::Result<(), String> {
    let bad = |part: &str| {
        part.is_empty() || part == "." || part == ".." || part.len() > 255 || part.ends_with(['.', ' '])
    };
    let forbidden = |c: char| c.is_control() || "\\:*?\"<>|".contains(c);
    if path.len() > 1024 || path.split('/').any(bad) || path.contains(forbidden) {
        return Err(format!("the file name {path:?} is not allowed"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn names_that_leave_the_folder_are_refused() {
        for good in
            ["a.json", "sub/model-00001-of-00002.safetensors", ".gitattributes", "name with space.txt"]
        {
            assert!(check_name(good).is_ok(), "{good}");
        }
        let long = "x".repeat(256);
        for bad in
            ["", "/etc/passwd", "../x", "a/../b", "a//b", "a\\b", "C:x", "a\0b", "a/.", "x.", long.as_str()]
        {
            assert!(check_name(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_listing_needs_commit_names_sizes_and_digests() {
        let commit = "0".repeat(40);
        let file = json!({ "rfilename": "a", "size": 3, "blobId": "1".repeat(40) });
        let good = json!({ "sha": commit, "siblings": [file] });
        assert_eq!(parse("o/n", &good).unwrap().files[0].digest, Digest::Git("1".repeat(40)));
        let large = json!({ "sha": commit, "siblings": [{ "rfilename": "a", "size": 1, "lfs": { "sha256": "f".repeat(64), "size": 9 } }] });
        assert_eq!(parse("o/n", &large).unwrap().files[0].size, 9);
        for bad in [
            json!({}),
            json!({ "sha": "main", "siblings": [] }),
            json!({ "sha": commit, "siblings": [{ "rfilename": "../a", "size": 3, "blobId": "1".repeat(40) }] }),
            json!({ "sha": commit, "siblings": [{ "rfilename": "a", "blobId": "1".repeat(40) }] }),
            json!({ "sha": commit, "siblings": [{ "rfilename": "a", "size": 3 }] }),
            json!({ "sha": commit, "siblings": [file, file] }),
        ] {
            assert!(parse("o/n", &bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn paths_and_revisions_are_encoded() {
        assert_eq!(escape("sub/a b+c", "/"), "sub/a%20b%2Bc");
        assert_eq!(escape("refs/pr/1", ""), "refs%2Fpr%2F1");
    }
}
