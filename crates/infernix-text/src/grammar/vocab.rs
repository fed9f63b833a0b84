//! The vocabulary as the grammar's parser and the phases around it need it.

use std::sync::Arc;

use llguidance::ParserFactory;
use llguidance::api::ParserLimits;
use llguidance::toktrie::{InferenceCapabilities, TokEnv, TokRxInfo, TokTrie, TokenizerEnv};

use super::error::GrammarError;
use crate::tokenizer::{AddedTokens, EncodeOptions, TokenKind, Tokenizer};

/// Texts whose appearance changes what an output is.
pub(super) const WATCHED: [&str; 4] = ["</think>", "<tool_call>", "<function", "<invoke"];
/// Index of the end of reasoning.
pub(super) const THINK_CLOSE: usize = 0;
/// Index of the beginning of a call.
pub(super) const CALL_OPEN: usize = 1;

/// Lexer fuel of one mask, about 70 ns each on a desktop core. The dearest masks that are let in are those of multiples of
/// 20,000: 0.4 million, once each.
const STEP_FUEL: u64 = 600_000;
/// What may come next at most: an object of as many optional members as a schema may have takes half of it.
const ROW: usize = 8192;

/// How much of each watched text the output ends with.
pub(super) type Tails = [u8; WATCHED.len()];

/// A tokenizer, prepared.
pub(super) struct Vocabulary {
    pub(super) tokenizer: Arc<Tokenizer>,
    pub(super) factory: ParserFactory,
    pub(super) stop_ids: Vec<u32>,
    watches: [Watch; WATCHED.len()],
    /// Tokens with a quotation mark, which can end a name in an object.
    pub(super) quotes: Vec<u32>,
}

impl std::fmt::Debug for Vocabulary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Vocabulary").field("ids", &self.tokenizer.addressable()).finish_non_exhaustive()
    }
}

struct Env {
    tokenizer: Arc<Tokenizer>,
    trie: TokTrie,
}

impl TokenizerEnv for Env {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<u32> {
        self.trie.tokenize_with_greedy_fallback(bytes, |text| {
            let options = EncodeOptions { added: AddedTokens::NonSpecial, literal: &[] };
            self.tokenizer
                .encode_with(text, &options)
                .unwrap_or_else(|_| self.trie.greedy_tokenize(text.as_bytes()))
        })
    }
}

impl Vocabulary {
    pub(super) fn new(tokenizer: Arc<Tokenizer>, stop_ids: &[u32]) -> Result<Self, GrammarError> {
        let fail = |e: &dyn std::fmt::Display| {
            GrammarError::new("constraint_too_complex", format!("the vocabulary cannot be prepared: {e}"))
        };
        let count = tokenizer.addressable();
        let words: Vec<Vec<u8>> = (0..count)
            .map(|id| match (tokenizer.kind(id), tokenizer.token_bytes(id)) {
                // A special token is no text: the marker keeps it out of every lexeme.
                (Some(TokenKind::Special), Some(bytes)) => {
                    let mut word = vec![TokTrie::SPECIAL_TOKEN_MARKER];
                    word.extend_from_slice(bytes);
                    word
                }
                (_, bytes) => bytes.unwrap_or_default().to_vec(),
            })
            .collect();
        let Some(&eos) = stop_ids.first() else {
            return Err(fail(&"no token ends a turn"));
        };
        let trie = TokTrie::from(&TokRxInfo::new(count, eos), &words).with_eos_tokens(stop_ids);
        let env: TokEnv = Arc::new(Env { tokenizer: Arc::clone(&tokenizer), trie });
        let mut factory = ParserFactory::new(
            &env,
            InferenceCapabilities::default(),
            &llguidance::earley::SlicedBiasComputer::general_slices(),
        )
        .map_err(|e| fail(&e))?;
        factory.quiet();
        *factory.limits_mut() = ParserLimits {
            verbose_errors: false,
            step_lexer_fuel: STEP_FUEL,
            max_items_in_row: ROW,
            ..ParserLimits::default()
        };
        let plain = |id: &u32| tokenizer.kind(*id) != Some(TokenKind::Special);
        Ok(Self {
            watches: WATCHED
                .map(|text| Watch::new(text, (0..count).filter(plain).map(|id| (id, &words[id as usize])))),
            quotes: (0..count).filter(plain).filter(|&id| words[id as usize].contains(&b'"')).collect(),
            stop_ids: stop_ids.to_vec(),
            tokenizer,
            factory,
        })
    }

    /// The bytes of a token as text; a special token has none.
    pub(super) fn text(&self, id: u32) -> &[u8] {
        match self.tokenizer.kind(id) {
            Some(TokenKind::Special) | None => &[],
            Some(_) => self.tokenizer.token_bytes(id).unwrap_or_default(),
        }
    }

    pub(super) fn watch(&self, index: usize) -> &Watch {
        &self.watches[index]
    }

    /// Ids of a text, added tokens that are no control tokens included.
    pub(super) fn encode(&self, text: &str) -> Vec<u32> {
        self.factory.tok_env().tokenize_bytes(text.as_bytes())
    }

    pub(super) fn is_stop(&self, id: u32) -> bool {
        self.stop_ids.contains(&id)
    }
}

/// Looks for a text at the end of an output that arrives in tokens.
pub(super) struct Watch {
    text: &'static [u8],
    fallback: Vec<u8>,
    /// For each number of bytes already there: tokens that complete the text exactly, and those that go on
    /// behind it.
    completing: Vec<(Vec<u32>, Vec<u32>)>,
}

impl Watch {
    fn new<'w>(text: &'static str, words: impl Iterator<Item = (u32, &'w Vec<u8>)>) -> Self {
        let text = text.as_bytes();
        let mut fallback = vec![0u8; text.len()];
        for i in 1..text.len() {
            let mut k = fallback[i - 1] as usize;
            while k > 0 && text[i] != text[k] {
                k = fallback[k - 1] as usize;
            }
            fallback[i] = (k + usize::from(text[i] == text[k])) as u8;
        }
        let mut watch = Self { text, fallback, completing: vec![Default::default(); text.len()] };
        for (id, word) in words {
            for k in 0..text.len() {
                match watch.completes(k as u8, word) {
                    Some(0) => watch.completing[k].0.push(id),
                    Some(_) => watch.completing[k].1.push(id),
                    None => {}
                }
            }
        }
        watch
    }

    /// Bytes of `word` behind the first completion, if it completes the text.
    fn completes(&self, mut tail: u8, word: &[u8]) -> Option<usize> {
        // Without a byte of the text's beginning a token can only complete what is there.
        for (at, &byte) in word.iter().enumerate() {
            tail = self.step(tail, byte);
            if tail as usize == self.text.len() {
                return Some(word.len() - at - 1);
            }
        }
        None
    }

    fn step(&self, tail: u8, byte: u8) -> u8 {
        let mut k = tail as usize;
        if k == self.text.len() {
            k = self.fallback[k - 1] as usize;
        }
        while k > 0 && self.text[k] != byte {
            k = self.fallback[k - 1] as usize;
        }
        (k + usize::from(self.text[k] == byte)) as u8
    }

    /// The tail after more bytes, and whether the text was completed by them.
    pub(super) fn advance(&self, mut tail: u8, bytes: &[u8]) -> (u8, bool) {
        let mut hit = false;
        for &byte in bytes {
            tail = self.step(tail, byte);
            hit |= tail as usize == self.text.len();
        }
        (tail, hit)
    }

    /// Tokens that would complete the text, exactly or with more behind it.
    pub(super) fn completing(&self, tail: u8) -> (&[u32], &[u32]) {
        let at = if tail as usize == self.text.len() { self.fallback[tail as usize - 1] } else { tail };
        let (exact, over) = &self.completing[at as usize];
        (exact, over)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watched_text_is_found_however_it_is_cut() {
        let words: Vec<Vec<u8>> = ["</think>", "<", "/think", ">", ">\n", "</", "x</think>y", "<<"]
            .iter()
            .map(|w| w.as_bytes().to_vec())
            .collect();
        let watch = Watch::new("</think>", words.iter().enumerate().map(|(i, w)| (i as u32, w)));
        assert_eq!(watch.completing(0), (&[0u32][..], &[6u32][..]));
        assert_eq!(watch.completing(7), (&[0u32, 3][..], &[4u32, 6][..]));
        assert_eq!(watch.advance(0, b"a <</thi"), (5, false));
        assert_eq!(watch.advance(5, b"nk> "), (0, true));
        assert_eq!(watch.advance(8, b"<"), (1, false));
    }
}
