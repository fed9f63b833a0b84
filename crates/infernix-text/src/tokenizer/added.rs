//! Added tokens: spellings that are found in the text before anything else happens to it.

use std::ops::Range;

use aho_corasick::{AhoCorasick, Input, MatchKind};
use serde::Deserialize;

use crate::error::{Result, TextError};

/// An added token as `tokenizer.json` or `added_tokens_decoder` declares it.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct AddedToken {
    /// Token id; taken from the key in `added_tokens_decoder`.
    #[serde(default)]
    pub id: u32,
    /// Spelling in text.
    pub content: String,
    /// Only as a whole word.
    #[serde(default)]
    pub single_word: bool,
    /// Swallows white space before it.
    #[serde(default)]
    pub lstrip: bool,
    /// Swallows white space after it.
    #[serde(default)]
    pub rstrip: bool,
    /// Found in the normalized text instead of the text as given.
    #[serde(default)]
    pub normalized: bool,
    /// A control token: skipped when decoding unless asked for.
    #[serde(default)]
    pub special: bool,
}

/// Finds one class of added tokens (those of the raw or those of the normalized text).
pub(crate) struct Finder {
    searcher: Option<AhoCorasick>,
    tokens: Vec<AddedToken>,
}

impl Finder {
    /// `spell` gives the spelling to look for, which is normalized for normalized tokens.
    pub(crate) fn new(tokens: Vec<AddedToken>, spell: impl Fn(&AddedToken) -> String) -> Result<Self> {
        let searcher = if tokens.is_empty() {
            None
        } else {
            let searcher = AhoCorasick::builder()
                .match_kind(MatchKind::LeftmostLongest)
                .build(tokens.iter().map(spell))
                .map_err(|e| TextError::Tokenizer {
                    file: "tokenizer.json".to_owned(),
                    message: format!("the added tokens cannot be searched: {e}"),
                })?;
            Some(searcher)
        };
        Ok(Self { searcher, tokens })
    }

    /// Next accepted token at or after `at`: its id and the bytes it takes (stripped white space
    /// included, never before `at`).
    pub(crate) fn next(
        &self,
        text: &str,
        at: usize,
        accept: impl Fn(&AddedToken, Range<usize>) -> bool,
    ) -> Option<(u32, Range<usize>)> {
        let searcher = self.searcher.as_ref()?;
        let mut from = at;
        while from <= text.len() {
            let m = searcher.find(Input::new(text).span(from..text.len()))?;
            let token = &self.tokens[m.pattern().as_usize()];
            let whole = !token.single_word
                || !(text[..m.start()].chars().next_back().is_some_and(wordy)
                    || text[m.end()..].chars().next().is_some_and(wordy));
            if whole && accept(token, m.range()) {
                let mut range = m.range();
                if token.lstrip {
                    let kept = text[at..range.start].trim_end().len();
                    range.start = at + kept;
                }
                if token.rstrip {
                    range.end = text.len() - text[range.end..].trim_start().len();
                }
                return Some((token.id, range));
            }
            from = m.start() + text[m.start()..].chars().next().map_or(1, char::len_utf8);
        }
        None
    }
}

fn wordy(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}
