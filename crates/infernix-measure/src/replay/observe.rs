//! What the tools of a coding session return, cut from a corpus to a size in tokens.

use super::corpus::{Corpus, File};
use crate::load::rng::Rng;
use serde_json::{Value, json};

/// Characters a token, for planning. Engines are scored on their own counts.
pub const CHARS_PER_TOKEN: f64 = 3.1;

/// Tokens of a text, estimated.
pub fn estimate(text: &str) -> usize {
    (text.chars().count() as f64 / CHARS_PER_TOKEN).ceil() as usize
}

/// The result of one tool call.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Observation {
    /// The tool that would have been called.
    pub tool: String,
    /// With these arguments.
    pub arguments: Value,
    /// What it returned.
    pub text: String,
    /// How long it took, seconds.
    pub seconds: f64,
}

/// Kinds of observation, with the tokens that they take at full context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Lines of a file.
    Read,
    /// Occurrences of identifiers.
    Grep,
    /// Output of a build or test run.
    Build,
    /// A commit.
    Diff,
    /// Acknowledgement of an edit.
    Edit,
    /// File names.
    Glob,
}

/// One kind's weight in a mix and its size range in tokens.
pub type Share = (Kind, f64, (f64, f64));

/// What a session on the engine sees.
pub const ENGINE: [Share; 6] = [
    (Kind::Read, 34.0, (700.0, 5200.0)),
    (Kind::Grep, 18.0, (250.0, 1500.0)),
    (Kind::Build, 14.0, (500.0, 2600.0)),
    (Kind::Diff, 10.0, (800.0, 3000.0)),
    (Kind::Edit, 18.0, (250.0, 350.0)),
    (Kind::Glob, 6.0, (120.0, 400.0)),
];
/// What a session on the tools sees.
pub const TOOLS: [Share; 6] = [
    (Kind::Read, 38.0, (600.0, 4200.0)),
    (Kind::Grep, 16.0, (200.0, 1200.0)),
    (Kind::Build, 18.0, (400.0, 2000.0)),
    (Kind::Diff, 6.0, (600.0, 2200.0)),
    (Kind::Edit, 17.0, (250.0, 350.0)),
    (Kind::Glob, 5.0, (100.0, 350.0)),
];
/// What a session on tests and documents sees.
pub const TESTS: [Share; 5] = [
    (Kind::Read, 36.0, (700.0, 4800.0)),
    (Kind::Build, 22.0, (500.0, 2400.0)),
    (Kind::Grep, 14.0, (250.0, 1200.0)),
    (Kind::Edit, 22.0, (250.0, 350.0)),
    (Kind::Glob, 6.0, (120.0, 400.0)),
];

/// Cuts observations from one area of a corpus.
pub struct Observer<'a> {
    corpus: &'a Corpus,
    files: Vec<&'a File>,
    mix: &'a [Share],
    /// Share of the full context that token counts are scaled to.
    factor: f64,
}

/// Least size of an observation, tokens, however small the context.
pub const FLOOR: f64 = 16.0;

impl<'a> Observer<'a> {
    /// Over these files, in this mix, scaled.
    pub fn new(corpus: &'a Corpus, files: Vec<&'a File>, mix: &'a [Share], factor: f64) -> Self {
        Self { corpus, files, mix, factor }
    }

    /// One drawn from the mix.
    pub fn any(&self, rng: &mut Rng) -> Observation {
        let weights: Vec<f64> = self.mix.iter().map(|s| s.1).collect();
        let (kind, _, (low, high)) = self.mix[rng.weighted(&weights)];
        // Sizes are log-uniform.
        let tokens = rng.range(low.ln(), high.ln()).exp();
        self.of(kind, tokens, rng)
    }

    /// One of a kind, of about so many tokens at full context.
    pub fn of(&self, kind: Kind, tokens: f64, rng: &mut Rng) -> Observation {
        let chars = ((tokens * self.factor).max(FLOOR) * CHARS_PER_TOKEN) as usize;
        let file = self.files[rng.below(self.files.len())];
        let (tool, arguments, text, (fast, slow)) = match kind {
            Kind::Read => {
                let (from, text) = read(file, chars, rng);
                ("read_file", json!({ "path": file.path, "offset": from }), text, (0.15, 0.5))
            }
            Kind::Grep => {
                let (pattern, text) = self.grep(file, chars, rng);
                ("grep", json!({ "pattern": pattern }), text, (0.2, 0.8))
            }
            Kind::Build => {
                let (command, text) = self.build(chars, rng);
                ("bash", json!({ "command": command }), text, (2.0, 6.0))
            }
            Kind::Diff => {
                let (id, text) = self.corpus.diff(&self.files, rng);
                ("bash", json!({ "command": format!("git show {id}") }), cut(&text, chars), (0.3, 0.9))
            }
            Kind::Edit => {
                let (from, snippet) = read(file, chars.min(22 * 60), rng);
                let text =
                    format!("The file {} has been updated. Lines around the change:\n{snippet}", file.path);
                ("edit_file", json!({ "path": file.path, "line": from }), cut(&text, chars), (0.1, 0.3))
            }
            Kind::Glob => {
                let start = rng.below(self.files.len());
                let names = self.files.iter().cycle().skip(start).take(400).map(|f| f.path.as_str());
                let text = names.collect::<Vec<_>>().join("\n");
                ("glob", json!({ "pattern": "**/*" }), cut(&text, chars), (0.1, 0.3))
            }
        };
        let seconds = (rng.range(fast, slow) * 100.0).round() / 100.0;
        Observation { tool: tool.into(), arguments, text, seconds }
    }

    /// A long log that a user pastes.
    pub fn log(&self, tokens: f64, rng: &mut Rng) -> String {
        let chars = ((tokens * self.factor).max(FLOOR) * CHARS_PER_TOKEN) as usize;
        let mut text = String::new();
        while text.len() < chars {
            text.push_str(&self.build(4000, rng).1);
        }
        cut(&text, chars)
    }

    /// A file of 90 to 230 lines to be rewritten, cut to the context.
    pub fn whole_file(&self, rng: &mut Rng) -> (String, String) {
        let lines = |f: &&&File| (90..=230).contains(&f.text.lines().count());
        let fitting: Vec<&File> = self.files.iter().filter(lines).copied().collect();
        let file = rng.choose(&fitting).copied().unwrap_or(self.files[0]);
        let chars = ((file.text.len() as f64 * self.factor) as usize).max((FLOOR * CHARS_PER_TOKEN) as usize);
        (file.path.clone(), cut(&file.text, chars))
    }

    fn grep(&self, file: &File, chars: usize, rng: &mut Rng) -> (String, String) {
        let mut names: Vec<&str> = file
            .text
            .split(|c: char| !(c.is_alphanumeric() || c == '_'))
            .filter(|w| w.len() >= 7 && !w.starts_with(|c: char| c.is_ascii_digit()))
            .collect();
        names.sort_unstable();
        names.dedup();
        let picked: Vec<&str> = (0..4).filter_map(|_| rng.choose(&names).copied()).collect();
        let mut text = String::new();
        let start = rng.below(self.files.len());
        'files: for f in self.files.iter().cycle().skip(start).take(self.files.len()) {
            for (i, line) in f.text.lines().enumerate() {
                if picked.iter().any(|p| line.contains(p)) {
                    let line: String = line.trim().chars().take(180).collect();
                    text.push_str(&format!("{}:{}:{line}\n", f.path, i + 1));
                    if text.len() > chars {
                        break 'files;
                    }
                }
            }
        }
        (picked.join("|"), cut(&text, chars))
    }

    fn build(&self, chars: usize, rng: &mut Rng) -> (String, String) {
        let fails = rng.unit() < 0.35;
        let mut text = String::new();
        let mut n = 0;
        while text.len() < chars * 2 / 3 {
            let file = self.files[rng.below(self.files.len())];
            let stem = file.path.rsplit('/').next().unwrap_or_default().split('.').next().unwrap_or_default();
            n += 1;
            text.push_str(&format!("test {stem}::case_{n} ... ok ({:.2} s)\n", rng.range(0.01, 2.0)));
        }
        if fails {
            let file = self.files[rng.below(self.files.len())];
            let (line, excerpt) = read(file, chars / 3, rng);
            text.push_str(&format!(
                "\nfailures:\n---- {}:{line} ----\nassertion failed: left == right\n{excerpt}",
                file.path
            ));
            text.push_str(&format!("\ntest result: FAILED. {} passed; 1 failed\n", n.max(1) - 1));
        } else {
            text.push_str(&format!("\ntest result: ok. {n} passed; 0 failed\n"));
        }
        ("cargo test".into(), cut(&text, chars))
    }
}

/// Numbered lines from a random start, and the first line's number.
fn read(file: &File, chars: usize, rng: &mut Rng) -> (usize, String) {
    let lines: Vec<&str> = file.text.lines().collect();
    let start = rng.below(lines.len().max(1));
    let mut text = format!("{} ({} lines)\n", file.path, lines.len());
    for k in 0..lines.len() * 4 {
        let i = (start + k) % lines.len();
        text.push_str(&format!("{:>6}\t{}\n", i + 1, lines[i]));
        if text.len() > chars {
            break;
        }
    }
    (start + 1, cut(&text, chars))
}

/// At most so many bytes, ending at a character.
pub fn cut(text: &str, bytes: usize) -> String {
    let mut end = bytes.min(text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::corpus::Area;

    #[test]
    fn observations_have_the_size_of_their_kind_and_scale_with_the_context() {
        let corpus = Corpus::embedded().unwrap();
        for factor in [1.0, 1.0 / 64.0] {
            let o = Observer::new(&corpus, corpus.area(Area::Engine), &ENGINE, factor);
            let mut rng = Rng::new(1);
            for _ in 0..200 {
                let x = o.any(&mut rng);
                let most = (5200.0 * factor).max(FLOOR) + 2.0;
                assert!(estimate(&x.text) as f64 <= most, "{} at {factor}: {}", x.tool, estimate(&x.text));
                assert!(!x.text.is_empty() && x.seconds > 0.0);
            }
            let read = o.of(Kind::Read, 3000.0, &mut rng);
            assert!(estimate(&read.text) as f64 > (3000.0 * factor).max(FLOOR) * 0.8);
        }
    }
}
