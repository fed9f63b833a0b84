//! The Hugging Face cache's layout: found, or told exactly what is missing.
#![cfg(unix)]

mod common;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use common::{shard, t};
use infernix_checkpoint::hf_cache::{Missing, find_in};
use infernix_checkpoint::{Checkpoint, OpenOptions};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const SHA: &str = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
const GIT: &str = "8ab686eafeb1f44702738c8b0f24f2567c36da6d";

struct Cache(tempfile::TempDir);

impl Cache {
    fn new() -> Self {
        let c = Self(tempfile::tempdir().expect("folder"));
        for sub in ["refs", "blobs", &format!("snapshots/{COMMIT}")] {
            fs::create_dir_all(c.repo().join(sub)).expect("made");
        }
        fs::write(c.repo().join("refs/main"), COMMIT).expect("written");
        c
    }
    fn hub(&self) -> &Path {
        self.0.path()
    }
    fn repo(&self) -> PathBuf {
        self.hub().join("models--org--name")
    }
    fn snapshot(&self) -> PathBuf {
        self.repo().join("snapshots").join(COMMIT)
    }
    /// A file as the cache stores it: a relative link to a blob.
    fn add(&self, name: &str, blob: &str, bytes: &[u8]) {
        fs::write(self.repo().join("blobs").join(blob), bytes).expect("written");
        symlink(format!("../../blobs/{blob}"), self.snapshot().join(name)).expect("linked");
    }
    fn complete() -> Self {
        let c = Self::new();
        c.add("config.json", GIT, b"{}");
        c.add(
            "model.safetensors.index.json",
            "b1",
            br#"{"weight_map":{"a":"m-1.safetensors","b":"m-2.safetensors"}}"#,
        );
        c.add("m-1.safetensors", SHA, &shard(&[t("a", "U8", &[2])]));
        c.add("m-2.safetensors", GIT.get(..39).expect("ascii"), &shard(&[t("b", "U8", &[2])]));
        c
    }
}

#[test]
fn complete_snapshot_is_found_by_branch_commit_and_abbreviation() {
    let c = Cache::complete();
    fs::create_dir_all(c.repo().join("refs/pr")).expect("made");
    fs::write(c.repo().join("refs/pr/7"), format!("{COMMIT}\n")).expect("written");
    for revision in [None, Some("main"), Some(COMMIT), Some("0123456"), Some("pr/7"), Some("refs/pr/7")] {
        let s = find_in(c.hub(), "org/name", revision).unwrap_or_else(|e| panic!("{revision:?}: {e}"));
        assert_eq!((s.folder, s.commit.as_str()), (c.snapshot(), COMMIT));
    }
}

#[test]
fn opened_snapshot_knows_the_digest_that_names_a_blob() {
    let c = Cache::complete();
    let folder = find_in(c.hub(), "org/name", None).expect("found").folder;
    let checkpoint = Checkpoint::open(&folder, &OpenOptions::default()).expect("opens");
    let digests: Vec<bool> = checkpoint.shards().iter().map(|s| s.sha256.is_some()).collect();
    assert_eq!(digests, [true, false]);
    assert_eq!(checkpoint.shards()[0].sha256.expect("known")[..3], [0xe3, 0xb0, 0xc4]);
}

#[test]
fn what_is_missing_is_said_exactly() {
    let message = |e: &Missing, parts: &[&str]| {
        let text = e.to_string();
        assert!(parts.iter().all(|p| text.contains(p)), "{text}");
    };
    let c = Cache::complete();
    message(&find_in(&c.hub().join("none"), "org/name", None).expect_err("no cache"), &["HF_HUB_CACHE"]);
    message(
        &find_in(c.hub(), "org/other", None).expect_err("no repository"),
        &["org/other", "not in the Hugging Face cache"],
    );
    message(&find_in(c.hub(), "../name", None).expect_err("no name"), &["ORG/NAME"]);
    for revision in ["v2", "../../x", "0123", "ffffffff", "", "refs/../../../x"] {
        let e = find_in(c.hub(), "org/name", Some(revision)).expect_err("no revision");
        message(&e, &["revision", COMMIT]);
    }
    // A blob that is gone, a shard that was never fetched, a download left unfinished.
    fs::remove_file(c.repo().join("blobs").join(SHA)).expect("removed");
    fs::remove_file(c.snapshot().join("m-2.safetensors")).expect("removed");
    fs::write(c.repo().join(format!("blobs/{SHA}.incomplete")), b"").expect("written");
    let e = find_in(c.hub(), "org/name", None).expect_err("incomplete");
    assert!(
        matches!(&e, Missing::Files { files, unfinished: 1, .. } if *files == ["m-1.safetensors", "m-2.safetensors"]),
        "{e}"
    );
    message(&e, &["m-1.safetensors", "m-2.safetensors", "1 downloads"]);

    let c = Cache::new();
    message(&find_in(c.hub(), "org/name", None).expect_err("empty"), &["config.json", "index"]);
    c.add("config.json", GIT, b"{}");
    c.add("model.safetensors", SHA, &shard(&[]));
    find_in(c.hub(), "org/name", None).expect("a single file");
    fs::remove_file(c.repo().join("blobs").join(SHA)).expect("removed");
    message(&find_in(c.hub(), "org/name", None).expect_err("gone"), &["lacks model.safetensors"]);

    let c = Cache::complete();
    fs::write(c.repo().join("blobs/b1"), b"<html>").expect("written");
    message(&find_in(c.hub(), "org/name", None).expect_err("impostor"), &["HTML"]);
    fs::write(c.repo().join("blobs/b1"), br#"{"weight_map":{"a":"../x.safetensors"}}"#).expect("written");
    message(&find_in(c.hub(), "org/name", None).expect_err("hostile"), &["separator"]);
}
