//! Pre-tokenization: the split patterns of the file, applied one after the other.
//!
//! Patterns of this family end in `|\s+(?!\S)|\s+`. The look-ahead forces a backtracking matcher, which
//! is an order of magnitude slower than an automaton, so that tail is recognised and done by hand: the
//! rest and a plain `\s+` become two patterns of one automaton, and a match of the second that stops
//! before a visible character gives its last character back, which is what the look-ahead does.

use regex_automata::{Input, MatchKind, PatternID, meta};

use crate::error::{Result, TextError};

/// The GPT-2 pattern that a `ByteLevel` step with `use_regex` stands for.
pub(crate) const BYTE_LEVEL_PATTERN: &str =
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

const TAIL: &str = r"|\s+(?!\S)|\s+";

/// One splitting step; matches and the gaps between them become pieces.
pub(crate) enum Split {
    /// An automaton for everything before the tail, and white space as its second pattern.
    Tail(Box<meta::Regex>),
    /// A pattern without look-around.
    Plain(Box<meta::Regex>),
    /// Any other pattern.
    Backtracking(Box<fancy_regex::Regex>),
    /// A literal separator.
    Literal(String),
}

impl Split {
    /// Compiles a pattern, choosing the fastest exact way to run it.
    pub(crate) fn pattern(pattern: &str) -> Result<Self> {
        if let Some(rest) = pattern.strip_suffix(TAIL)
            && let Ok(regex) = automaton(&[rest, r"\s+"])
        {
            return Ok(Self::Tail(Box::new(regex)));
        }
        if let Ok(regex) = automaton(&[pattern]) {
            return Ok(Self::Plain(Box::new(regex)));
        }
        Self::backtracking(pattern)
    }

    pub(crate) fn backtracking(pattern: &str) -> Result<Self> {
        fancy_regex::Regex::new(pattern)
            .map(|regex| Self::Backtracking(Box::new(regex)))
            .map_err(|e| TextError::Pattern { message: e.to_string() })
    }

    /// Calls `piece` for every non-empty piece of `text`, in order.
    pub(crate) fn pieces<'t>(&self, text: &'t str, piece: &mut dyn FnMut(&'t str)) -> Result<()> {
        let mut cut = Cutter { text, done: 0, piece };
        match self {
            Self::Tail(regex) => {
                let white = PatternID::must(1);
                let mut at = 0;
                while let Some(m) = regex.search(&Input::new(text).range(at..)) {
                    let mut end = m.end();
                    if m.pattern() == white && end < text.len() {
                        // The run goes on to a visible character: leave it the last white one,
                        // unless that is all there is.
                        if let Some((last, _)) = text[m.start()..end].char_indices().next_back()
                            && last > 0
                        {
                            end = m.start() + last;
                        }
                    }
                    at = cut.matched(m.start(), end);
                }
            }
            Self::Plain(regex) => {
                let mut at = 0;
                while let Some(m) = regex.search(&Input::new(text).range(at..)) {
                    at = cut.matched(m.start(), m.end());
                    if at >= text.len() {
                        break;
                    }
                }
            }
            Self::Backtracking(regex) => {
                for m in regex.find_iter(text) {
                    let m = m.map_err(|e| TextError::Pattern { message: e.to_string() })?;
                    cut.matched(m.start(), m.end());
                }
            }
            Self::Literal(separator) => {
                for (start, s) in text.match_indices(separator.as_str()) {
                    cut.matched(start, start + s.len());
                }
            }
        }
        cut.finish();
        Ok(())
    }
}

struct Cutter<'t, 'f> {
    text: &'t str,
    done: usize,
    piece: &'f mut dyn FnMut(&'t str),
}

impl Cutter<'_, '_> {
    /// Emits the gap and the match; returns where to search next (always further on).
    fn matched(&mut self, start: usize, end: usize) -> usize {
        if self.done < start {
            (self.piece)(&self.text[self.done..start]);
        }
        if start < end {
            (self.piece)(&self.text[start..end]);
            self.done = end;
            return end;
        }
        // An empty match: step over one character, which stays in the next gap.
        self.done = start;
        let step = self.text[start..].chars().next().map_or(1, char::len_utf8);
        start + step
    }

    fn finish(self) {
        if self.done < self.text.len() {
            (self.piece)(&self.text[self.done..]);
        }
    }
}

fn automaton(patterns: &[&str]) -> std::result::Result<meta::Regex, Box<meta::BuildError>> {
    meta::Regex::builder()
        .configure(
            meta::Config::new()
                .match_kind(MatchKind::LeftmostFirst)
                .nfa_size_limit(Some(64 << 20))
                // The lazy tables of the Unicode classes want some room to stay resident.
                .hybrid_cache_capacity(8 << 20),
        )
        .build_many(patterns)
        .map_err(Box::new)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PATTERNS: [&str; 4] = [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        BYTE_LEVEL_PATTERN,
    ];

    fn collect(split: &Split, text: &str) -> Vec<String> {
        let mut out = Vec::new();
        split.pieces(text, &mut |p| out.push(p.to_owned())).expect("splits");
        out
    }

    proptest! {
        #[test]
        fn the_hand_made_tail_equals_the_look_ahead(
            text in "([ \t\r\n\u{a0}\u{3000}]{0,4}([a-zA-Zéß\u{301}\u{17f}0-9²'.,<|字🦀]{0,3}))*",
        ) {
            for pattern in PATTERNS {
                let fast = Split::pattern(pattern).expect("compiles");
                prop_assert!(matches!(fast, Split::Tail(_)));
                let slow = Split::backtracking(pattern).expect("compiles");
                let pieces = collect(&fast, &text);
                prop_assert_eq!(&pieces, &collect(&slow, &text));
                prop_assert_eq!(pieces.concat(), text.clone());
            }
        }
    }

    #[test]
    fn gaps_and_empty_matches_lose_nothing() {
        let plain = Split::pattern("x*").expect("compiles");
        assert_eq!(collect(&plain, "éxxb").concat(), "éxxb");
        let literal = Split::Literal("--".to_owned());
        assert_eq!(collect(&literal, "a--b--"), ["a", "--", "b", "--"]);
    }
}
