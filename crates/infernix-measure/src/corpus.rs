//! Text to measure on: one stream of tokens cut into chunks, and windows over long streams.

use crate::error::{MeasureError, Result};
use crate::reference::ReferenceHeader;
use serde::Deserialize;
use std::ops::Range;
use std::path::{Component, Path, PathBuf};

/// Name of the built-in corpus.
pub const DEFAULT_CORPUS: &str = "infernix-docs";

/// The built-in corpus: this project's own documentation, so that a measurement works without a download. Published
/// figures use another text; see docs/kld.md.
pub const DEFAULT_TEXT: &[(&str, &str)] = &[
    ("container.md", include_str!("../../../docs/container.md")),
    ("formats.md", include_str!("../../../docs/formats.md")),
    ("checkpoints.md", include_str!("../../../docs/checkpoints.md")),
    ("convert.md", include_str!("../../../docs/convert.md")),
    ("recipes.md", include_str!("../../../docs/recipes.md")),
    ("logical-names.md", include_str!("../../../docs/logical-names.md")),
    ("chat-templates.md", include_str!("../../../docs/chat-templates.md")),
    ("gguf.md", include_str!("../../../docs/gguf.md")),
    ("cuda.md", include_str!("../../../docs/cuda.md")),
    ("bench.md", include_str!("../../../docs/bench.md")),
    ("kld.md", include_str!("../../../docs/kld.md")),
];

/// The built-in corpus as one text.
pub fn default_text() -> String {
    DEFAULT_TEXT.iter().map(|(_, text)| *text).collect::<Vec<_>>().join("\n")
}

/// Tokens of a corpus cut into chunks of one length; what is left over is dropped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chunks {
    /// Corpus name for reports.
    pub corpus: String,
    /// BLAKE3 of the text, hex; empty where only tokens are known.
    pub corpus_blake3: String,
    /// Tokens per chunk.
    pub ctx: usize,
    /// Chunks taken.
    pub count: usize,
    /// Chunks the corpus has.
    pub available: usize,
    /// Chunks asked for.
    pub requested: Option<usize>,
    /// Tokens of the chunks taken; empty where a file keeps only their digest.
    tokens: Vec<u32>,
    tokens_blake3: String,
    /// Chunks and digest of the tokens from which these are the first ones.
    whole: Option<(usize, String)>,
}

impl Chunks {
    /// Cuts `tokens` into chunks of `ctx`; `limit` is a cap on their number.
    pub fn new(corpus: &str, text: &[u8], tokens: &[u32], ctx: usize, limit: Option<usize>) -> Result<Self> {
        if ctx < 4 {
            return Err(MeasureError::Options(format!("a context of {ctx} tokens; at least 4 are needed")));
        }
        if limit == Some(0) {
            return Err(MeasureError::Options("0 chunks asked for; at least 1 is needed".into()));
        }
        let available = tokens.len() / ctx;
        if available == 0 {
            return Err(MeasureError::Corpus {
                corpus: corpus.into(),
                what: format!("{} tokens, less than one chunk of {ctx}; take a longer text", tokens.len()),
            });
        }
        let count = limit.map_or(available, |l| l.min(available));
        Ok(Self {
            corpus: corpus.into(),
            corpus_blake3: if text.is_empty() {
                String::new()
            } else {
                blake3::hash(text).to_hex().to_string()
            },
            ctx,
            count,
            available,
            requested: limit,
            tokens: tokens[..count * ctx].to_vec(),
            tokens_blake3: tokens_blake3(&tokens[..count * ctx]),
            whole: None,
        })
    }

    /// The first `limit` of these chunks; files made from all of them still fit. Where the tokens are not known, the digest
    /// stays that of all.
    pub fn first(mut self, limit: usize) -> Result<Self> {
        if limit == 0 {
            return Err(MeasureError::Options("0 chunks asked for; at least 1 is needed".into()));
        }
        (self.available, self.requested) = (self.count, Some(limit));
        if limit < self.count {
            self.whole = Some((self.count, self.tokens_blake3.clone()));
            self.count = limit;
            self.tokens.truncate(limit * self.ctx);
            if !self.tokens.is_empty() {
                self.tokens_blake3 = tokens_blake3(&self.tokens);
            }
        }
        Ok(self)
    }

    /// Chunks and digest of the tokens from which these are the first ones.
    pub(crate) fn whole(&self) -> Option<(usize, &str)> {
        self.whole.as_ref().map(|(n, digest)| (*n, digest.as_str()))
    }

    /// The text a reference file was made from, known by its digest alone.
    pub(crate) fn of_header(h: &ReferenceHeader) -> Self {
        Self {
            corpus: h.corpus.clone(),
            corpus_blake3: h.corpus_blake3.clone(),
            ctx: h.ctx as usize,
            count: h.chunks as usize,
            available: h.chunks as usize,
            requested: None,
            tokens: Vec::new(),
            tokens_blake3: h.tokens_blake3.clone(),
            whole: None,
        }
    }

    /// Tokens of one chunk.
    pub fn chunk(&self, i: usize) -> &[u32] {
        &self.tokens[i * self.ctx..(i + 1) * self.ctx]
    }

    /// Tokens of all chunks taken.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Positions whose rows are scored: the second half but the last, which predicts nothing in the chunk. 255 of 512.
    pub fn rows(&self) -> Range<usize> {
        self.ctx / 2..self.ctx - 1
    }

    /// BLAKE3 of the tokens as little-endian u32, hex.
    pub fn tokens_blake3(&self) -> String {
        self.tokens_blake3.clone()
    }

    /// What a reader must be told about the number of chunks.
    pub fn note(&self) -> Option<String> {
        let asked = self.requested.filter(|r| *r > self.available)?;
        Some(format!("{asked} chunks asked for, the corpus has {} of {} tokens", self.available, self.ctx))
    }
}

pub(crate) fn tokens_blake3(tokens: &[u32]) -> String {
    let mut hash = blake3::Hasher::new();
    tokens.iter().for_each(|t| {
        hash.update(&t.to_le_bytes());
    });
    hash.finalize().to_hex().to_string()
}

/// One window of a stream: the tokens read, and the targets scored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Window {
    /// Tokens read, from an empty state.
    pub input: Range<usize>,
    /// Tokens whose −ln p counts; each follows a token of the input.
    pub targets: Range<usize>,
}

impl Window {
    /// Rows of the input that predict the targets.
    pub fn rows(&self) -> Range<usize> {
        self.targets.start - 1 - self.input.start..self.targets.end - 1 - self.input.start
    }
}

/// Windows over `n` tokens: the first scores all its tokens but the first, each later one ends `stride` further and
/// scores what is new. Every token but the first is scored once.
pub fn windows(n: usize, context: usize, stride: usize) -> Result<Vec<Window>> {
    if stride == 0 || stride >= context {
        return Err(MeasureError::Options(format!(
            "a stride of {stride} for windows of {context} tokens; 1..{context} fit"
        )));
    }
    let mut out = Vec::new();
    let mut done = 1;
    let mut end = context.min(n);
    while done < n {
        out.push(Window { input: end.saturating_sub(context)..end, targets: done..end });
        done = end;
        end = (end + stride).min(n);
    }
    Ok(out)
}

/// One stream of a perplexity corpus, as text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextStream {
    /// Name within the corpus.
    pub id: String,
    /// Group in the table of results.
    pub domain: String,
    /// Path as the manifest names it.
    pub path: String,
    /// The text.
    pub text: String,
}

/// A perplexity corpus.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Corpus {
    /// Name for reports.
    pub id: String,
    /// `full`, `quick` or `custom`.
    pub mode: String,
    /// Its streams.
    pub streams: Vec<TextStream>,
}

#[derive(Deserialize)]
struct Manifest {
    corpus_id: String,
    streams: Vec<ManifestStream>,
    modes: std::collections::BTreeMap<String, Vec<String>>,
}

#[derive(Deserialize)]
struct ManifestStream {
    id: String,
    domain: String,
    path: String,
}

impl Manifest {
    /// The streams' files, in order, of a manifest that holds together.
    fn check(&self, manifest: &Path) -> std::result::Result<Vec<PathBuf>, String> {
        let folder = manifest.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let inside = folder.canonicalize().map_err(|e| format!("{}: {e}", folder.display()))?;
        let mut places: Vec<(&str, PathBuf)> = Vec::new();
        let mut files = Vec::new();
        for s in &self.streams {
            let (id, path) = (&s.id, Path::new(&s.path));
            if places.iter().any(|(other, _)| other == id) {
                return Err(format!("two streams are named {id}"));
            }
            if s.path.is_empty() || !path.components().all(|c| matches!(c, Component::Normal(_))) {
                return Err(format!("stream {id}: {} is not a plain relative path", s.path));
            }
            let file = folder.join(path);
            let place = file.canonicalize().map_err(|e| format!("stream {id}: {}: {e}", s.path))?;
            if !place.starts_with(&inside) {
                return Err(format!("stream {id}: {} is a link out of the manifest's folder", s.path));
            }
            if let Some((other, _)) = places.iter().find(|(_, p)| *p == place) {
                return Err(format!("streams {other} and {id} are the same file {}", s.path));
            }
            places.push((id, place));
            files.push(file);
        }
        for (mode, ids) in &self.modes {
            for (i, id) in ids.iter().enumerate() {
                if !places.iter().any(|(known, _)| known == id) {
                    return Err(format!("mode {mode} names stream {id}, which it does not have"));
                }
                if ids[..i].contains(id) {
                    return Err(format!("mode {mode} names stream {id} twice"));
                }
            }
        }
        Ok(files)
    }
}

impl Corpus {
    /// Reads a manifest: `{corpus_id, streams:[{id, domain, path}], modes:{NAME:[ids]}}`, paths relative to it.
    ///
    /// # Errors
    /// The manifest as a whole is checked, whatever `mode` takes of it: names and files that occur twice, modes of streams
    /// that are not there, files that lie outside of its folder.
    pub fn load(manifest: &Path, mode: &str) -> Result<Self> {
        let name = manifest.display().to_string();
        let wrong = |what: String| MeasureError::Corpus { corpus: name.clone(), what };
        let bytes = std::fs::read(manifest).map_err(MeasureError::io(manifest, "reading"))?;
        let m: Manifest =
            serde_json::from_slice(&bytes).map_err(|e| wrong(format!("no corpus manifest: {e}")))?;
        let files = m.check(manifest).map_err(wrong)?;
        let Some(ids) = m.modes.get(mode) else {
            let known: Vec<_> = m.modes.keys().cloned().collect();
            return Err(wrong(format!("no mode {mode}; it has {}", known.join(", "))));
        };
        let mut streams = Vec::new();
        for id in ids {
            let Some((s, file)) = m.streams.iter().zip(&files).find(|(s, _)| s.id == *id) else { continue };
            let text = read_text(file)?;
            streams.push(TextStream {
                id: s.id.clone(),
                domain: s.domain.clone(),
                path: s.path.clone(),
                text,
            });
        }
        if streams.is_empty() {
            return Err(wrong(format!("mode {mode} has no stream")));
        }
        Ok(Self { id: m.corpus_id, mode: mode.into(), streams })
    }

    /// The built-in corpus, one stream a page.
    pub fn documentation() -> Self {
        let stream = |(name, text): &(&str, &str)| TextStream {
            id: (*name).into(),
            domain: "documentation".into(),
            path: format!("docs/{name}"),
            text: (*text).into(),
        };
        Self {
            id: DEFAULT_CORPUS.into(),
            mode: "full".into(),
            streams: DEFAULT_TEXT.iter().map(stream).collect(),
        }
    }

    /// One file as the only stream.
    pub fn custom(file: &Path) -> Result<Self> {
        let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let text = read_text(file)?;
        let stream = TextStream { id: name.clone(), domain: "custom".into(), path: name.clone(), text };
        Ok(Self { id: format!("custom-{name}"), mode: "custom".into(), streams: vec![stream] })
    }
}

/// Reads a text: valid UTF-8, not empty, without NUL.
pub fn read_text(file: &Path) -> Result<String> {
    let bytes = std::fs::read(file).map_err(MeasureError::io(file, "reading"))?;
    let wrong = |what: &str| MeasureError::Corpus { corpus: file.display().to_string(), what: what.into() };
    let text = String::from_utf8(bytes).map_err(|e| wrong(&format!("not UTF-8: {}", e.utf8_error())))?;
    match (text.is_empty(), text.contains('\0')) {
        (true, _) => Err(wrong("empty")),
        (_, true) => Err(wrong("holds a NUL: not a text")),
        _ => Ok(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn chunks_score_255_rows_of_512_and_drop_the_rest() {
        let tokens: Vec<u32> = (0..512 * 3 + 511).collect();
        let c = Chunks::new("x", b"text", &tokens, 512, Some(580)).unwrap();
        assert_eq!((c.count, c.available, c.rows()), (3, 3, 256..511));
        assert_eq!(c.chunk(2)[0], 1024);
        assert!(c.note().unwrap().contains("580"));
        assert_eq!(Chunks::new("x", b"", &tokens, 512, Some(2)).unwrap().tokens().len(), 1024);
        assert!(Chunks::new("x", b"", &tokens[..511], 512, None).is_err());
        assert!(Chunks::new("x", b"", &tokens, 512, Some(0)).is_err());
    }

    #[test]
    fn a_manifest_reaches_no_file_outside_its_folder() {
        let dir = tempfile::tempdir().unwrap();
        let m = dir.path().join("manifest.json");
        std::fs::write(dir.path().join("a.txt"), "hello").unwrap();
        let write = |path: &str| {
            let text = format!(
                r#"{{"corpus_id":"c","streams":[{{"id":"a","domain":"d","path":"{path}"}}],"modes":{{"full":["a"]}}}}"#
            );
            std::fs::write(&m, text).unwrap();
        };
        write("a.txt");
        assert_eq!(Corpus::load(&m, "full").unwrap().streams[0].text, "hello");
        assert!(Corpus::load(&m, "quick").unwrap_err().to_string().contains("no mode quick"));
        let outside = tempfile::tempdir().unwrap();
        std::fs::write(outside.path().join("b.txt"), "secret").unwrap();
        std::os::unix::fs::symlink(outside.path().join("b.txt"), dir.path().join("l.txt")).unwrap();
        std::os::unix::fs::symlink(outside.path(), dir.path().join("l")).unwrap();
        for path in ["../a.txt", "/etc/passwd", "", "x/../../a.txt", "l.txt", "l/b.txt", "none.txt"] {
            write(path);
            let e = Corpus::load(&m, "full").unwrap_err().to_string();
            assert!(e.contains("stream a: ") && e.contains(path), "{path}: {e}");
        }
    }

    #[test]
    fn a_manifest_that_does_not_hold_together_is_refused_with_the_name() {
        let dir = tempfile::tempdir().unwrap();
        let m = dir.path().join("manifest.json");
        std::fs::write(dir.path().join("a.txt"), "hello").unwrap();
        std::fs::write(dir.path().join("b.txt"), "hello").unwrap();
        let load = |streams: &[(&str, &str)], quick: &[&str]| {
            let streams: Vec<_> = streams
                .iter()
                .map(|(id, path)| serde_json::json!({ "id": id, "domain": "d", "path": path }))
                .collect();
            let modes = serde_json::json!({ "full": ["a"], "quick": quick });
            let text = serde_json::json!({ "corpus_id": "c", "streams": streams, "modes": modes });
            std::fs::write(&m, text.to_string()).unwrap();
            Corpus::load(&m, "full").map_err(|e| e.to_string())
        };
        let two = [("a", "a.txt"), ("b", "b.txt")];
        assert_eq!(load(&two, &["b", "a"]).unwrap().streams.len(), 1);
        for (streams, quick, words) in [
            (&two, &["b", "c"][..], "mode quick names stream c, which"),
            (&two, &["b", "b"], "mode quick names stream b twice"),
            (&[("a", "a.txt"), ("a", "b.txt")], &[], "two streams are named a"),
            (&[("a", "a.txt"), ("b", "a.txt")], &[], "streams a and b are the same file a.txt"),
        ] {
            let e = load(streams, quick).unwrap_err();
            assert!(e.contains(words), "{e}");
        }
    }

    proptest! {
        #[test]
        fn every_token_but_the_first_is_scored_once(n in 0usize..500, context in 2usize..64, s in 1usize..63) {
            let stride = 1 + s % (context - 1);
            let all = windows(n, context, stride).unwrap();
            let scored: Vec<usize> = all.iter().flat_map(|w| w.targets.clone()).collect();
            prop_assert_eq!(scored, (1..n).collect::<Vec<_>>());
            for w in &all {
                prop_assert!(w.input.len() <= context && w.input.end == w.targets.end);
                prop_assert!(w.rows().end < w.input.len());
            }
        }
    }
}
