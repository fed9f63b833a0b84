//! Byte-level BPE over `tokenizer.json`.
//!
//! Text goes through added tokens, NFC, the file's own split patterns and merges. Ids between the last
//! token and the padded rows of the model's matrices are never valid: [`Tokenizer::is_token`] and
//! [`Tokenizer::vocabulary_mask`] tell them apart.

mod added;
mod bytes;
mod decode;
mod file;
mod merge;
mod split;

use std::borrow::Cow;
use std::collections::HashMap;
use std::ops::Range;

use unicode_normalization::{IsNormalized, UnicodeNormalization, is_nfc_quick};

pub use added::AddedToken;
pub use decode::Detokenizer;

use added::Finder;
use file::{TokenizerConfigFile, TokenizerFile, token_name};
use merge::{FoldMap, FoldSeed, Merges};
use split::Split;

use crate::error::{Result, TextError};

/// Which added tokens a call to [`Tokenizer::encode_with`] recognises in the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AddedTokens {
    /// All of them: prompts that a template rendered.
    #[default]
    All,
    /// Only those not marked special; control spellings become ordinary text.
    NonSpecial,
    /// None: everything is ordinary text.
    None,
}

/// How [`Tokenizer::encode_with`] reads its text.
#[derive(Debug, Clone, Copy, Default)]
pub struct EncodeOptions<'r> {
    /// Added tokens to recognise.
    pub added: AddedTokens,
    /// Byte ranges of the text, ascending, in which no added token may lie even in part; an empty
    /// range is a place that none may span. The text around them is still split and merged as one.
    pub literal: &'r [Range<usize>],
}

/// What an id stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenKind {
    /// A merge product or a byte.
    Text,
    /// An added token that decodes as text, such as `<think>`.
    Added,
    /// A control token, such as `<|im_end|>`.
    Special,
}

/// The names `tokenizer_config.json` gives to some tokens.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NamedTokens {
    /// Begin of sequence.
    pub bos: Option<String>,
    /// End of sequence.
    pub eos: Option<String>,
    /// Padding.
    pub pad: Option<String>,
    /// Unknown; byte-level vocabularies have none.
    pub unk: Option<String>,
}

/// A byte-level BPE tokenizer.
pub struct Tokenizer {
    kinds: Vec<Option<TokenKind>>,
    /// Concatenated bytes of all ids and their ends.
    bytes: Vec<u8>,
    ends: Vec<u32>,
    ids: FoldMapSeeded<Box<[u8]>, u32>,
    added_ids: HashMap<String, u32>,
    byte_ids: [u32; 256],
    merges: Merges,
    ignore_merges: bool,
    nfc: bool,
    add_prefix_space: bool,
    splits: Vec<Split>,
    raw_added: Finder,
    normalized_added: Finder,
    added: Vec<AddedToken>,
    named: NamedTokens,
    chat_templates: Vec<(String, String)>,
    max_length: Option<u64>,
    warnings: Vec<String>,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer")
            .field("ids", &self.kinds.len())
            .field("added", &self.added.len())
            .finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Reads `tokenizer.json` and, where there is one, `tokenizer_config.json`, whose
    /// `added_tokens_decoder` supplies added tokens that the first lacks.
    ///
    /// # Errors
    /// Invalid JSON, a setting that would change ids and is not implemented, a merge of unknown
    /// tokens, a byte without a token, or two spellings for one id.
    pub fn from_json(tokenizer_json: &[u8], tokenizer_config: Option<&[u8]>) -> Result<Self> {
        let file = TokenizerFile::parse(tokenizer_json)?;
        let config = match tokenizer_config {
            Some(bytes) => TokenizerConfigFile::parse(bytes)?,
            None => TokenizerConfigFile::default(),
        };
        let mut warnings = Vec::new();
        let steps = file.steps(&mut warnings)?;
        let added = merge_added(&file.added_tokens, config.added()?)?;

        let model = file.model;
        let ids_len = model
            .vocab
            .values()
            .copied()
            .chain(added.iter().map(|t| t.id))
            .max()
            .map_or(0, |max| max as usize + 1);
        // Ids are dense in every real file; a stray one must not make us allocate gigabytes.
        if ids_len > 4 * (model.vocab.len() + added.len()) + 65_536 {
            return Err(tokenizer_error(format!(
                "the highest id is {} for {} tokens",
                ids_len - 1,
                model.vocab.len() + added.len()
            )));
        }
        let mut entries: Vec<Option<(TokenKind, Vec<u8>)>> = vec![None; ids_len];
        let mut ids = FoldMapSeeded::with_capacity_and_hasher(model.vocab.len(), FoldSeed::default());
        for (token, &id) in &model.vocab {
            let bytes = bytes::token_bytes(token);
            if let Some((_, other)) = &entries[id as usize] {
                return Err(tokenizer_error(format!(
                    "id {id} stands for both {:?} and {token:?}",
                    String::from_utf8_lossy(other)
                )));
            }
            ids.insert(bytes.clone().into_boxed_slice(), id);
            entries[id as usize] = Some((TokenKind::Text, bytes));
        }
        let mut added_ids = HashMap::with_capacity(added.len());
        for token in &added {
            let kind = if token.special { TokenKind::Special } else { TokenKind::Added };
            let entry = &mut entries[token.id as usize];
            if let Some((TokenKind::Text, bytes)) = entry
                && *bytes != bytes::token_bytes(&token.content)
            {
                return Err(tokenizer_error(format!(
                    "id {} stands for {:?} in the vocabulary and for {:?} among the added tokens",
                    token.id,
                    String::from_utf8_lossy(bytes),
                    token.content
                )));
            }
            *entry = Some((kind, token.content.as_bytes().to_vec()));
            added_ids.insert(token.content.clone(), token.id);
        }

        let mut byte_ids = [0u32; 256];
        for byte in 0..=255u8 {
            let stand_in = bytes::stand_in(byte).to_string();
            byte_ids[usize::from(byte)] = *model.vocab.get(&stand_in).ok_or_else(|| {
                tokenizer_error(format!(
                    "byte {byte:#04x} has no token ({stand_in:?} is not in the vocabulary)"
                ))
            })?;
        }
        let mut merges = Merges::with_capacity(model.merges.len());
        let mut joined = String::new();
        for (rank, merge) in model.merges.iter().enumerate() {
            let sides = merge.sides();
            let found = sides.and_then(|(a, b)| {
                joined.clear();
                joined.push_str(a);
                joined.push_str(b);
                let merged = model.vocab.get(&joined)?;
                Some((*model.vocab.get(a)?, *model.vocab.get(b)?, *merged))
            });
            let Some((a, b, merged)) = found else {
                return Err(tokenizer_error(format!(
                    "merge {rank} ({sides:?}) names a token that is not in the vocabulary"
                )));
            };
            merges.insert(a, b, rank as u32, merged);
        }

        let (kinds, bytes, ends) = flatten(&entries);
        let nfc = steps.nfc;
        let (normalized, raw): (Vec<_>, Vec<_>) = added.iter().cloned().partition(|t| t.normalized);
        Ok(Self {
            kinds,
            bytes,
            ends,
            ids,
            added_ids,
            byte_ids,
            merges,
            ignore_merges: model.ignore_merges,
            nfc,
            add_prefix_space: steps.add_prefix_space,
            splits: steps.splits,
            raw_added: Finder::new(raw, |t| t.content.clone())?,
            normalized_added: Finder::new(normalized, |t| {
                if nfc { t.content.nfc().collect() } else { t.content.clone() }
            })?,
            added,
            named: NamedTokens {
                bos: token_name(config.bos_token.as_ref()),
                eos: token_name(config.eos_token.as_ref()),
                pad: token_name(config.pad_token.as_ref()),
                unk: token_name(config.unk_token.as_ref()),
            },
            chat_templates: chat_templates(config.chat_template.as_ref()),
            max_length: config.model_max_length.as_ref().and_then(|v| v.as_u64()),
            warnings,
        })
    }

    /// One more than the highest id; ids at or above it are padding rows of the model.
    #[must_use]
    pub fn addressable(&self) -> u32 {
        self.kinds.len() as u32
    }

    /// Number of ids that stand for a token, at most [`Self::addressable`].
    #[must_use]
    pub fn token_count(&self) -> usize {
        self.kinds.iter().flatten().count()
    }

    /// Number of merges.
    #[must_use]
    pub fn merge_count(&self) -> usize {
        self.merges.len()
    }

    /// Whether the id stands for a token (holes and padding rows do not).
    #[must_use]
    pub fn is_token(&self, id: u32) -> bool {
        self.kind(id).is_some()
    }

    /// What the id stands for.
    #[must_use]
    pub fn kind(&self, id: u32) -> Option<TokenKind> {
        self.kinds.get(id as usize).copied().flatten()
    }

    /// Bit mask over the model's `rows` vocabulary rows, `ceil(rows / 32)` words, lowest bit first:
    /// set where sampling may pick the row. Bits past `rows` are clear.
    #[must_use]
    pub fn vocabulary_mask(&self, rows: usize) -> Vec<u32> {
        let mut mask = vec![0u32; rows.div_ceil(32)];
        for (id, kind) in self.kinds.iter().enumerate().take(rows) {
            if kind.is_some() {
                mask[id / 32] |= 1 << (id % 32);
            }
        }
        mask
    }

    /// The bytes an id decodes to (an added token's spelling included), `None` for padding rows.
    #[must_use]
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        let index = id as usize;
        self.kind(id)?;
        let start = if index == 0 { 0 } else { self.ends[index - 1] as usize };
        Some(&self.bytes[start..self.ends[index] as usize])
    }

    /// Id of an added token by its spelling, or of a vocabulary entry by its bytes.
    #[must_use]
    pub fn token_id(&self, text: &str) -> Option<u32> {
        self.added_ids.get(text).or_else(|| self.ids.get(text.as_bytes())).copied()
    }

    /// All added tokens by ascending id.
    #[must_use]
    pub fn added_tokens(&self) -> &[AddedToken] {
        &self.added
    }

    /// Tokens that `tokenizer_config.json` names.
    #[must_use]
    pub fn named_tokens(&self) -> &NamedTokens {
        &self.named
    }

    /// The template called `name` (`default` where there is only one) in `tokenizer_config.json`,
    /// used when there is no `chat_template.jinja`.
    #[must_use]
    pub fn chat_template(&self, name: &str) -> Option<&str> {
        self.chat_templates.iter().find(|(n, _)| n == name).map(|(_, template)| template.as_str())
    }

    /// `model_max_length`, where it is a plausible integer.
    #[must_use]
    pub fn max_length(&self) -> Option<u64> {
        self.max_length
    }

    /// What the files ask for and is deliberately not done, for the user to read.
    #[must_use]
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Encodes with every added token recognised.
    ///
    /// # Errors
    /// Only if the split pattern gives up (a backtracking limit on a pattern outside the known family).
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.encode_with(text, &EncodeOptions::default())
    }

    /// Encodes as plain text: no added token is recognised.
    ///
    /// # Errors
    /// As [`Self::encode`].
    pub fn encode_text(&self, text: &str) -> Result<Vec<u32>> {
        self.encode_with(text, &EncodeOptions { added: AddedTokens::None, literal: &[] })
    }

    /// Encodes with explicit options.
    ///
    /// # Errors
    /// As [`Self::encode`].
    pub fn encode_with(&self, text: &str, options: &EncodeOptions<'_>) -> Result<Vec<u32>> {
        let mut run = Run {
            tokenizer: self,
            out: Vec::with_capacity(text.len() / 3),
            cache: FoldMapSeeded::default(),
            word: Vec::new(),
        };
        if options.added == AddedTokens::None {
            run.segment(text, 0, options)?;
            return Ok(run.out);
        }
        let mut done = 0;
        while let Some((id, range)) = self
            .raw_added
            .next(text, done, |token, range| options.recognises(token) && !touches(options.literal, &range))
        {
            run.segment(&text[done..range.start], done, options)?;
            run.out.push(id);
            done = range.end;
        }
        run.segment(&text[done..], done, options)?;
        Ok(run.out)
    }

    /// Decodes in one go; bytes that are not UTF-8 become U+FFFD. Unknown ids decode to nothing.
    #[must_use]
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let mut bytes = Vec::with_capacity(ids.len() * 4);
        for &id in ids {
            if skip_special && self.kind(id) == Some(TokenKind::Special) {
                continue;
            }
            bytes.extend_from_slice(self.token_bytes(id).unwrap_or_default());
        }
        String::from_utf8(bytes).unwrap_or_else(|e| String::from_utf8_lossy(e.as_bytes()).into_owned())
    }
}

impl EncodeOptions<'_> {
    fn recognises(&self, token: &AddedToken) -> bool {
        match self.added {
            AddedTokens::All => true,
            AddedTokens::NonSpecial => !token.special,
            AddedTokens::None => false,
        }
    }
}

/// Whether a range overlaps one of the ascending `ranges`.
fn touches(ranges: &[Range<usize>], range: &Range<usize>) -> bool {
    let next = ranges.partition_point(|r| r.end <= range.start);
    ranges.get(next).is_some_and(|r| r.start < range.end)
}

/// A map whose keys come from outside.
type FoldMapSeeded<K, V> = HashMap<K, V, FoldSeed>;

/// One encode call.
struct Run<'t> {
    tokenizer: &'t Tokenizer,
    out: Vec<u32>,
    /// Where the ids of an earlier equal word lie in the output.
    cache: FoldMapSeeded<Box<[u8]>, Range<usize>>,
    word: Vec<u32>,
}

impl Run<'_> {
    /// Text between added tokens; `offset` is where it lies in the whole text.
    fn segment(&mut self, text: &str, offset: usize, options: &EncodeOptions<'_>) -> Result<()> {
        if text.is_empty() {
            return Ok(());
        }
        let tokenizer = self.tokenizer;
        let text = if tokenizer.nfc && !text.is_ascii() && is_nfc_quick(text.chars()) != IsNormalized::Yes {
            Cow::Owned(text.nfc().collect::<String>())
        } else {
            Cow::Borrowed(text)
        };
        let normalization_moved = matches!(text, Cow::Owned(_));
        let text: &str = &text;
        let mut done = 0;
        while let Some((id, range)) = tokenizer.normalized_added.next(text, done, |token, range| {
            let whole = offset + range.start..offset + range.end;
            options.recognises(token)
                && if normalization_moved {
                    // Offsets no longer agree: keep the whole segment literal to be safe.
                    options.literal.is_empty()
                } else {
                    !touches(options.literal, &whole)
                }
        }) {
            self.plain(&text[done..range.start])?;
            self.out.push(id);
            done = range.end;
        }
        self.plain(&text[done..])
    }

    fn plain(&mut self, text: &str) -> Result<()> {
        if text.is_empty() {
            return Ok(());
        }
        if self.tokenizer.add_prefix_space && !text.starts_with(' ') {
            let spaced = format!(" {text}");
            return self.split(&spaced, 0);
        }
        self.split(text, 0)
    }

    fn split(&mut self, text: &str, step: usize) -> Result<()> {
        let tokenizer = self.tokenizer;
        let Some(split) = tokenizer.splits.get(step) else {
            self.piece(text);
            return Ok(());
        };
        let last = step + 1 == tokenizer.splits.len();
        let mut outcome = Ok(());
        split.pieces(text, &mut |piece| {
            if last {
                self.piece(piece);
            } else if outcome.is_ok() {
                outcome = self.split(piece, step + 1);
            }
        })?;
        outcome
    }

    fn piece(&mut self, piece: &str) {
        /// Longer pieces are rarely repeated and would only fill the cache.
        const CACHED: usize = 64;
        let tokenizer = self.tokenizer;
        let bytes = piece.as_bytes();
        if let [byte] = bytes {
            self.out.push(tokenizer.byte_ids[usize::from(*byte)]);
            return;
        }
        if let Some(range) = self.cache.get(bytes) {
            self.out.extend_from_within(range.clone());
            return;
        }
        let start = self.out.len();
        if tokenizer.ignore_merges
            && let Some(&id) = tokenizer.ids.get(bytes)
        {
            self.out.push(id);
        } else {
            self.word.clear();
            self.word.extend(bytes.iter().map(|&b| tokenizer.byte_ids[usize::from(b)]));
            tokenizer.merges.apply(&mut self.word);
            self.out.extend_from_slice(&self.word);
        }
        if bytes.len() <= CACHED {
            self.cache.insert(bytes.into(), start..self.out.len());
        }
    }
}

/// Added tokens of both files; the companion may add but not contradict.
fn merge_added(file: &[AddedToken], companion: Vec<AddedToken>) -> Result<Vec<AddedToken>> {
    let mut added: Vec<AddedToken> = Vec::with_capacity(file.len().max(companion.len()));
    let mut by_id: FoldMap<u64, usize> = FoldMap::default();
    for (name, token) in file
        .iter()
        .map(|t| ("tokenizer.json", t.clone()))
        .chain(companion.into_iter().map(|t| ("tokenizer_config.json", t)))
    {
        if token.content.is_empty() {
            return Err(TextError::Tokenizer {
                file: name.to_owned(),
                message: format!("added token {} is empty", token.id),
            });
        }
        match by_id.get(&u64::from(token.id)) {
            Some(&at) if added[at].content != token.content => {
                return Err(TextError::Tokenizer {
                    file: name.to_owned(),
                    message: format!(
                        "id {} is {:?} here and {:?} before",
                        token.id, token.content, added[at].content
                    ),
                });
            }
            Some(_) => {}
            None => {
                if let Some(other) = added.iter().find(|t| t.content == token.content) {
                    return Err(TextError::Tokenizer {
                        file: name.to_owned(),
                        message: format!(
                            "{:?} has id {} here and {} before",
                            token.content, token.id, other.id
                        ),
                    });
                }
                by_id.insert(u64::from(token.id), added.len());
                added.push(token);
            }
        }
    }
    added.sort_by_key(|t| t.id);
    Ok(added)
}

fn flatten(entries: &[Option<(TokenKind, Vec<u8>)>]) -> (Vec<Option<TokenKind>>, Vec<u8>, Vec<u32>) {
    let mut kinds = Vec::with_capacity(entries.len());
    let mut bytes = Vec::new();
    let mut ends = Vec::with_capacity(entries.len());
    for entry in entries {
        kinds.push(entry.as_ref().map(|(kind, _)| *kind));
        if let Some((_, token)) = entry {
            bytes.extend_from_slice(token);
        }
        ends.push(bytes.len() as u32);
    }
    (kinds, bytes, ends)
}

fn chat_templates(field: Option<&serde_json::Value>) -> Vec<(String, String)> {
    match field {
        Some(serde_json::Value::String(template)) => {
            vec![("default".to_owned(), template.clone())]
        }
        Some(serde_json::Value::Array(list)) => list
            .iter()
            .filter_map(|entry| {
                let part = |name: &str| Some(entry.get(name)?.as_str()?.to_owned());
                Some((part("name")?, part("template")?))
            })
            .collect(),
        _ => Vec::new(),
    }
}

fn tokenizer_error(message: String) -> TextError {
    TextError::Tokenizer { file: "tokenizer.json".to_owned(), message }
}
