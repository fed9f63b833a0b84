//! `corpus`: the frozen snapshot of this repository that replays cut their texts from. A snapshot is written once under
//! its name and never again: plan hashes cover its digest.

use crate::synth::Failure;
use flate2::{Compression, write::GzEncoder};
use std::io::Write as _;
use std::path::Path;
use std::process::Command;

const HELP: &str = "\
usage: cargo xtask corpus NAME

Writes crates/infernix-measure/corpus/NAME.json.gz and NAME.blake3 from the files and commits of HEAD. Existing
files are not replaced.";

/// Bytes of all files, of one file, of one diff; diffs.
const ALL: usize = 1_000_000;
const FILE: usize = 40_000;
const DIFF: usize = 10_000;
const DIFFS: usize = 120;

fn git(args: &[&str]) -> Result<String, Failure> {
    let out = Command::new("git").args(args).output().map_err(|e| format!("git: {e}"))?;
    if !out.status.success() {
        return Err(format!("git {}: {}", args.join(" "), String::from_utf8_lossy(&out.stderr)).into());
    }
    Ok(String::from_utf8_lossy(&out.stdout).into_owned())
}

fn text(e: std::io::Error) -> Failure {
    e.to_string().into()
}

fn cut(text: &str, bytes: usize) -> &str {
    let mut end = bytes.min(text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// Parses the arguments and writes the snapshot.
pub(crate) fn run(args: &[String]) -> Result<(), Failure> {
    let [name] = args else {
        println!("{HELP}");
        return Ok(());
    };
    let dir = Path::new("crates/infernix-measure/corpus");
    let (packed, digest) = (dir.join(format!("{name}.json.gz")), dir.join(format!("{name}.blake3")));
    if packed.exists() {
        return Err(format!("{} exists; a changed snapshot needs a new name", packed.display()).into());
    }
    let listed = git(&["ls-files"])?;
    let kinds = [".rs", ".cu", ".cuh", ".md", ".toml"];
    let mut paths: Vec<&str> = listed.lines().filter(|p| kinds.iter().any(|k| p.ends_with(k))).collect();
    // Every so many files of the sorted list, so that all parts of the repository are in it.
    let size = |p: &str| std::fs::metadata(p).map_or(0, |m| m.len() as usize);
    let total: usize = paths.iter().map(|p| size(p).min(FILE)).sum();
    let share = (ALL as f64 / total.max(1) as f64).min(1.0);
    let mut taken = 0.0;
    paths.retain(|_| {
        let before = taken as usize;
        taken += share;
        taken as usize > before
    });
    let mut hasher = blake3::Hasher::new();
    let mut put = |s: &str| {
        hasher.update(&(s.len() as u64).to_le_bytes());
        hasher.update(s.as_bytes());
    };
    let mut files = Vec::new();
    for path in paths {
        let text = git(&["show", &format!("HEAD:{path}")])?;
        let text = cut(&text, FILE);
        put(path);
        put(text);
        files.push(serde_json::json!({ "path": path, "text": text }));
    }
    let mut commits = Vec::new();
    for line in git(&["log", "--no-merges", "--format=%h %s", &format!("-{DIFFS}")])?.lines() {
        let (id, subject) = line.split_once(' ').unwrap_or((line, ""));
        let diff = git(&["show", "--format=", "--patch", id])?;
        let diff = cut(&diff, DIFF);
        put(id);
        put(subject);
        put(diff);
        commits.push(serde_json::json!({ "id": id, "subject": subject, "diff": diff }));
    }
    let digest_text = format!("{}\n", hasher.finalize().to_hex());
    let document = serde_json::json!({ "name": name, "files": files, "commits": commits });
    std::fs::create_dir_all(dir).map_err(text)?;
    let mut out = GzEncoder::new(std::fs::File::create(&packed).map_err(text)?, Compression::best());
    out.write_all(document.to_string().as_bytes()).map_err(text)?;
    out.finish().map_err(text)?;
    std::fs::write(&digest, digest_text).map_err(text)?;
    println!("{}: {} files, {} commits", packed.display(), files.len(), commits.len());
    Ok(())
}
