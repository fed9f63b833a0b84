//! Incremental decoding: text leaves as soon as its characters are whole, and never in halves.

use std::sync::Arc;

use super::{TokenKind, Tokenizer};

/// Turns ids into text one at a time.
///
/// Bytes that may still become a character are held back (three at most); bytes that can not are
/// replaced with U+FFFD at once. The pieces concatenated equal [`Tokenizer::decode`] of all ids.
#[derive(Debug, Clone)]
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    held: Vec<u8>,
    show_special: bool,
}

impl Detokenizer {
    /// A decoder that leaves special tokens out of the text.
    #[must_use]
    pub fn new(tokenizer: Arc<Tokenizer>) -> Self {
        Self { tokenizer, held: Vec::new(), show_special: false }
    }

    /// Shows special tokens by their spelling instead of skipping them.
    #[must_use]
    pub fn show_special(mut self, show: bool) -> Self {
        self.show_special = show;
        self
    }

    /// Appends the text that `id` completes to `out`; an unknown id adds nothing.
    pub fn push_into(&mut self, id: u32, out: &mut String) {
        let tokenizer = Arc::clone(&self.tokenizer);
        if !self.show_special && tokenizer.kind(id) == Some(TokenKind::Special) {
            return;
        }
        let Some(bytes) = tokenizer.token_bytes(id) else {
            return;
        };
        if self.held.is_empty() {
            let rest = emit(bytes, out);
            self.held.extend_from_slice(rest);
        } else {
            self.held.extend_from_slice(bytes);
            let rest = emit(&self.held, out).len();
            self.held.drain(..self.held.len() - rest);
        }
    }

    /// The text that `id` completes.
    pub fn push(&mut self, id: u32) -> String {
        let mut out = String::new();
        self.push_into(id, &mut out);
        out
    }

    /// Bytes held back because their character is not whole yet.
    #[must_use]
    pub fn held(&self) -> &[u8] {
        &self.held
    }

    /// Ends the stream: what is held is not going to become a character any more.
    pub fn finish(&mut self) -> String {
        let out = String::from_utf8_lossy(&self.held).into_owned();
        self.held.clear();
        out
    }
}

/// Writes the whole characters of `bytes` and U+FFFD for what can never be one; returns the
/// unfinished end.
fn emit<'b>(mut bytes: &'b [u8], out: &mut String) -> &'b [u8] {
    loop {
        match std::str::from_utf8(bytes) {
            Ok(text) => {
                out.push_str(text);
                return &[];
            }
            Err(error) => {
                let (good, rest) = bytes.split_at(error.valid_up_to());
                out.push_str(std::str::from_utf8(good).unwrap_or_default());
                match error.error_len() {
                    None => return rest,
                    Some(bad) => {
                        out.push(char::REPLACEMENT_CHARACTER);
                        bytes = &rest[bad..];
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_chunking_of_any_bytes_decodes_like_the_whole(
            bytes in prop::collection::vec(prop_oneof![any::<u8>(), 0x80u8..0xC0, 0xE0u8..0xF5], 0..40),
            cuts in prop::collection::vec(1usize..6, 0..40),
        ) {
            let mut out = String::new();
            let mut held: Vec<u8> = Vec::new();
            let mut rest = &bytes[..];
            for cut in cuts.into_iter().chain(std::iter::repeat(3)) {
                if rest.is_empty() {
                    break;
                }
                let (piece, after) = rest.split_at(cut.min(rest.len()));
                rest = after;
                held.extend_from_slice(piece);
                let kept = emit(&held, &mut out).to_vec();
                prop_assert!(kept.len() <= 3);
                held = kept;
            }
            out.push_str(&String::from_utf8_lossy(&held));
            prop_assert_eq!(out, String::from_utf8_lossy(&bytes).into_owned());
        }
    }
}
