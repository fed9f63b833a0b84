//! The repository that a replay's observations are cut from: files by area, and diffs.

use crate::error::{MeasureError, Result};
use crate::load::rng::Rng;
use std::io::Read as _;
use std::path::Path;

/// The embedded corpus: a frozen snapshot of this project's own sources, written by `cargo xtask corpus`. A plan's hash
/// covers its digest, so a change needs a new name.
const EMBEDDED: &[u8] = include_bytes!("../../corpus/corpus-1.json.gz");
/// Its name.
pub const EMBEDDED_NAME: &str = "corpus-1";
/// Largest file taken from a folder, and most bytes in all.
const MAX_FILE: u64 = 1 << 20;
const MAX_ALL: usize = 64 << 20;

/// A file of the repository.
#[derive(Clone, Debug, serde::Deserialize, serde::Serialize)]
pub struct File {
    /// Path in the repository, with `/`.
    pub path: String,
    /// Its text.
    pub text: String,
}

/// A change with its diff.
#[derive(Clone, Debug, serde::Deserialize, serde::Serialize)]
pub struct Commit {
    /// Abbreviated id.
    pub id: String,
    /// First line of the message.
    pub subject: String,
    /// Unified diff.
    pub diff: String,
}

/// Files and commits.
#[derive(Clone, Debug, serde::Deserialize, serde::Serialize)]
pub struct Corpus {
    /// `corpus-1`, or the folder's name.
    pub name: String,
    /// Files in the order of their paths.
    pub files: Vec<File>,
    /// Newest first; empty for a folder.
    pub commits: Vec<Commit>,
}

/// What a session works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Area {
    /// The engine and its kernels.
    Engine,
    /// Tools around it.
    Tools,
    /// Tests and documents.
    Tests,
}

impl Area {
    fn holds(self, path: &str) -> bool {
        let tests = path.contains("tests/") || path.starts_with("docs/") || path.ends_with(".md");
        let engine = ["engine", "cuda", "formats"].iter().any(|n| path.contains(n));
        match self {
            Area::Tests => tests,
            Area::Engine => engine && !tests,
            Area::Tools => !engine && !tests,
        }
    }
}

impl Corpus {
    /// The embedded one.
    ///
    /// # Errors
    /// None that a released binary has: the embedded file is read by the tests.
    pub fn embedded() -> Result<Self> {
        let mut text = String::new();
        flate2::read::GzDecoder::new(EMBEDDED)
            .read_to_string(&mut text)
            .map_err(MeasureError::io(Path::new(EMBEDDED_NAME), "unpacking the embedded corpus"))?;
        serde_json::from_str(&text)
            .map_err(|e| MeasureError::format(Path::new(EMBEDDED_NAME), 0, e.to_string()))
    }

    /// The text files under a folder, in the order of their paths; hidden folders and `target` are left out.
    ///
    /// # Errors
    /// A folder that cannot be read, or one with too little text.
    pub fn folder(dir: &Path) -> Result<Self> {
        let mut files = Vec::new();
        walk(dir, dir, &mut files)?;
        files.sort_by(|a, b| a.path.cmp(&b.path));
        let bytes: usize = files.iter().map(|f| f.text.len()).sum();
        if files.len() < 3 || bytes < 20_000 {
            return Err(MeasureError::Corpus {
                corpus: dir.display().to_string(),
                what: format!("{} text files of {bytes} bytes; a replay needs a repository", files.len()),
            });
        }
        let name = dir.file_name().map_or_else(|| "corpus".into(), |n| n.to_string_lossy().into_owned());
        Ok(Self { name, files, commits: Vec::new() })
    }

    /// BLAKE3 over paths, texts and diffs.
    pub fn digest(&self) -> String {
        let mut h = blake3::Hasher::new();
        let mut put = |s: &str| {
            h.update(&(s.len() as u64).to_le_bytes());
            h.update(s.as_bytes());
        };
        for f in &self.files {
            put(&f.path);
            put(&f.text);
        }
        for c in &self.commits {
            put(&c.id);
            put(&c.subject);
            put(&c.diff);
        }
        h.finalize().to_hex().to_string()
    }

    /// Files of an area; all of them where it has fewer than three.
    pub fn area(&self, area: Area) -> Vec<&File> {
        let own: Vec<&File> =
            self.files.iter().filter(|f| area.holds(&f.path) && f.text.len() > 200).collect();
        if own.len() < 3 { self.files.iter().collect() } else { own }
    }

    /// A diff, or one made of two files where there are no commits.
    pub fn diff(&self, files: &[&File], rng: &mut Rng) -> (String, String) {
        if let Some(c) = rng.choose(&self.commits) {
            return (c.id.clone(), format!("commit {}\n\n    {}\n\n{}", c.id, c.subject, c.diff));
        }
        let mut text = String::new();
        for _ in 0..4 {
            if let Some(f) = rng.choose(files) {
                text.push_str(&format!("--- a/{0}\n+++ b/{0}\n", f.path));
                for (i, line) in f.text.lines().skip(rng.below(40)).take(40).enumerate() {
                    text.push_str(if i % 5 == 2 {
                        "-"
                    } else if i % 5 == 3 {
                        "+"
                    } else {
                        " "
                    });
                    text.push_str(line);
                    text.push('\n');
                }
            }
        }
        (format!("{:07x}", rng.bits() & 0xfff_ffff), text)
    }
}

fn walk(root: &Path, dir: &Path, out: &mut Vec<File>) -> Result<()> {
    let entries = std::fs::read_dir(dir).map_err(MeasureError::io(dir, "listing the corpus"))?;
    for entry in entries {
        let entry = entry.map_err(MeasureError::io(dir, "listing the corpus"))?;
        let name = entry.file_name();
        let hidden = name.to_string_lossy().starts_with('.') || name == "target" || name == "node_modules";
        let kind = entry.file_type().map_err(MeasureError::io(dir, "listing the corpus"))?;
        let path = entry.path();
        if hidden {
            continue;
        }
        if kind.is_dir() {
            walk(root, &path, out)?;
        } else if kind.is_file() && entry.metadata().is_ok_and(|m| m.len() <= MAX_FILE) {
            // Files that are no UTF-8 text are no reading matter.
            if let Ok(text) = std::fs::read_to_string(&path) {
                let relative = path.strip_prefix(root).unwrap_or(&path);
                let parts: Vec<_> = relative.iter().map(|p| p.to_string_lossy()).collect();
                out.push(File { path: parts.join("/"), text });
            }
        }
        if out.iter().map(|f| f.text.len()).sum::<usize>() > MAX_ALL {
            return Err(MeasureError::Corpus {
                corpus: root.display().to_string(),
                what: "more than 64 MiB of text; give a smaller folder".into(),
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_embedded_corpus_is_the_one_its_name_stands_for() {
        let c = Corpus::embedded().unwrap();
        assert_eq!(c.name, EMBEDDED_NAME);
        // Published plan hashes depend on this digest: a new snapshot is corpus-2.
        assert_eq!(c.digest(), include_str!("../../corpus/corpus-1.blake3").trim());
        for area in [Area::Engine, Area::Tools, Area::Tests] {
            assert!(c.area(area).len() > 5, "{area:?}");
        }
        assert!(c.commits.len() > 20);
    }

    #[test]
    fn a_folder_without_text_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("a.txt"), "short").unwrap();
        assert!(Corpus::folder(dir.path()).is_err());
    }
}
