//! The proposal head: output rows of the most frequent tokens, for a drafter that need not score the whole vocabulary.

use std::path::PathBuf;

use infernix_checkpoint::Checkpoint;
use infernix_formats::{Format, Layout};
use infernix_model::{Class, Component, Parameter, Source};
use serde_json::Value;

use crate::ConvertError;
use crate::build::Builder;
use crate::plan::{Content, Proof};
use crate::recipe::Method;
use crate::sources::WeightRef;
use crate::storage::Storage;

/// Rows of a proposal head at most, unless asked for.
const USUAL_ROWS: u64 = 131_072;
/// Strata of a ranking file at most.
const MAX_STRATA: u64 = 64;

/// How to make a proposal head.
#[derive(Debug, Clone)]
pub struct ProposalOptions {
    /// Rows; `None` for min(131072, half the addressable vocabulary rounded down to 64).
    pub rows: Option<u64>,
    /// How often each token occurs.
    pub ranking: Ranking,
}

/// Token frequencies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ranking {
    /// None: enough for a plan.
    Absent,
    /// Little-endian int64 counts `[strata, vocabulary]`; the first row holds the totals.
    File(PathBuf),
    /// Counts by token id; ids beyond the list were not seen.
    Counts(Vec<u64>),
}

impl Ranking {
    /// Counts the ids of a tokenized text.
    #[must_use]
    pub fn from_ids(ids: impl IntoIterator<Item = u32>) -> Self {
        let mut counts = Vec::new();
        for id in ids {
            let id = id as usize;
            if counts.len() <= id {
                counts.resize(id + 1, 0u64);
            }
            counts[id] += 1;
        }
        Self::Counts(counts)
    }
}

/// What a tokenizer can address.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Vocabulary {
    /// Ids with a token, ascending.
    pub ids: Vec<u32>,
    /// Ids of special tokens, ascending.
    pub special: Vec<u32>,
}

impl Vocabulary {
    /// Reads `tokenizer.json` and the added tokens of `tokenizer_config.json` beside it.
    ///
    /// # Errors
    /// Files that are no tokenizer, or that contradict each other about a token.
    pub fn read(checkpoint: &Checkpoint) -> Result<Option<Self>, ConvertError> {
        let path = checkpoint.folder().join("tokenizer.json");
        let fail = |reason: String| ConvertError::Resource { path: path.clone(), reason };
        let Some(bytes) = checkpoint.file_bytes("tokenizer.json")? else { return Ok(None) };
        let value: Value =
            serde_json::from_slice(&bytes).map_err(|e| fail(format!("not valid JSON: {e}")))?;
        let mut content: std::collections::BTreeMap<u32, String> = std::collections::BTreeMap::new();
        let vocab =
            value["model"]["vocab"].as_object().ok_or_else(|| fail("it has no model.vocab object".into()))?;
        for (token, id) in vocab {
            let id = id_of(id).ok_or_else(|| fail(format!("token {token:?} has the id {id}")))?;
            content.insert(id, token.clone());
        }
        let mut special = std::collections::BTreeSet::new();
        let mut add = |id: u32, entry: &Value, content: &mut std::collections::BTreeMap<u32, String>| {
            let text = entry["content"].as_str().unwrap_or_default().to_owned();
            if let Some(known) = content.get(&id)
                && *known != text
            {
                return Err(fail(format!("token id {id} is {known:?} and {text:?}")));
            }
            content.insert(id, text);
            if entry["special"].as_bool() == Some(true) {
                special.insert(id);
            }
            Ok(())
        };
        for entry in value["added_tokens"].as_array().into_iter().flatten() {
            let id =
                id_of(&entry["id"]).ok_or_else(|| fail(format!("added token without an id: {entry:.80}")))?;
            add(id, entry, &mut content)?;
        }
        if let Some(bytes) = checkpoint.file_bytes("tokenizer_config.json")? {
            let value: Value = serde_json::from_slice(&bytes)
                .map_err(|e| fail(format!("tokenizer_config.json: not valid JSON: {e}")))?;
            for (id, entry) in value["added_tokens_decoder"].as_object().into_iter().flatten() {
                let id =
                    id.parse().map_err(|_| fail(format!("tokenizer_config.json: added token id {id:?}")))?;
                add(id, entry, &mut content)?;
            }
        }
        Ok(Some(Self { ids: content.into_keys().collect(), special: special.into_iter().collect() }))
    }

    /// Rows of a proposal head unless asked for.
    #[must_use]
    pub fn usual_rows(addressable: u64) -> u64 {
        USUAL_ROWS.min(addressable / 2 / 64 * 64)
    }

    /// The `rows` tokens of a proposal head in order: special tokens are always in, the rest by count; then all by
    /// descending count, equal counts by ascending id.
    ///
    /// # Errors
    /// More rows than tokens, or fewer than special tokens.
    pub fn select(&self, rows: u64, counts: &[u64]) -> Result<Vec<u32>, ConvertError> {
        let fail = |reason: String| ConvertError::Proposal { reason };
        if rows > self.ids.len() as u64 {
            return Err(fail(format!(
                "{rows} rows are asked for, the tokenizer has {} tokens; ask for fewer",
                self.ids.len()
            )));
        }
        if rows < self.special.len() as u64 {
            return Err(fail(format!(
                "{rows} rows do not hold the {} special tokens; ask for more",
                self.special.len()
            )));
        }
        let count = |id: &u32| counts.get(*id as usize).copied().unwrap_or(0);
        let by_count = |list: &mut Vec<u32>| list.sort_by(|a, b| count(b).cmp(&count(a)).then(a.cmp(b)));
        let is_special = |id: &u32| self.special.binary_search(id).is_ok();
        let mut picked: Vec<u32> = self.ids.iter().copied().filter(|id| !is_special(id)).collect();
        by_count(&mut picked);
        picked.truncate((rows - self.special.len() as u64) as usize);
        picked.extend(&self.special);
        by_count(&mut picked);
        Ok(picked)
    }
}

fn id_of(value: &Value) -> Option<u32> {
    u32::try_from(value.as_u64()?).ok()
}

/// Token counts of a ranking.
///
/// # Errors
/// A file that is no such table, or a negative count.
pub fn counts(ranking: &Ranking, vocab: u64) -> Result<Option<Vec<u64>>, ConvertError> {
    match ranking {
        Ranking::Absent => Ok(None),
        Ranking::Counts(counts) => Ok(Some(counts.clone())),
        Ranking::File(path) => {
            let fail = |reason: String| ConvertError::Proposal {
                reason: format!("ranking {}: {reason}", path.display()),
            };
            let length = std::fs::metadata(path).map_err(|e| fail(format!("cannot open it: {e}")))?.len();
            let row = vocab * 8;
            if length == 0 || length % row != 0 || length / row > MAX_STRATA {
                return Err(fail(format!(
                    "{length} bytes; expected little-endian int64 counts, one row or more of {vocab} tokens ({row} bytes each)"
                )));
            }
            let mut bytes = vec![0; row as usize];
            let mut file = std::fs::File::open(path).map_err(|e| fail(format!("cannot open it: {e}")))?;
            std::io::Read::read_exact(&mut file, &mut bytes)
                .map_err(|e| fail(format!("cannot read it: {e}")))?;
            let mut out = Vec::with_capacity(vocab as usize);
            for (id, word) in bytes.as_chunks::<8>().0.iter().enumerate() {
                let count = i64::from_le_bytes(*word);
                out.push(
                    u64::try_from(count).map_err(|_| fail(format!("token {id} has the count {count}")))?,
                );
            }
            Ok(Some(out))
        }
    }
}

impl Builder<'_> {
    /// Adds the proposal head's two objects.
    pub(crate) fn proposal(&mut self) -> Result<(), ConvertError> {
        let Some(options) = self.options.proposal.clone() else { return Ok(()) };
        let fail = |reason: String| ConvertError::Proposal { reason };
        let vocabulary = Vocabulary::read(self.resource_checkpoint())?;
        let Some(vocab) = self.described.model.as_ref().map(|m| m.vocab) else {
            return Err(fail("a drafter alone has no output head".into()));
        };
        let addressable = vocabulary.as_ref().map_or(vocab, |v| v.ids.len() as u64);
        let rows = options.rows.unwrap_or_else(|| Vocabulary::usual_rows(addressable));
        if rows == 0 || rows > vocab {
            return Err(fail(format!("{rows} rows of a vocabulary of {}", vocab)));
        }
        let too_few = vocabulary.as_ref().is_none_or(|v| rows > v.ids.len() as u64);
        let foreign =
            vocabulary.as_ref().and_then(|v| v.special.iter().find(|id| u64::from(**id) >= vocab).copied());
        if too_few || foreign.is_some() {
            let reason = match (&vocabulary, foreign) {
                (None, _) => "there is no tokenizer.json to tell which tokens there are".to_owned(),
                (_, Some(id)) => {
                    format!("special token {id} lies beyond the vocabulary of {}", vocab)
                }
                (Some(v), None) => {
                    format!("{rows} rows are asked for, the tokenizer has {} tokens", v.ids.len())
                }
            };
            if !self.options.dry_run {
                return Err(fail(reason));
            }
            self.warnings.push(format!("proposal head: {reason}; a conversion would stop here"));
        }
        // The official head is gathered from the base weights, not from a quantized copy.
        let Some((source, head)) =
            self.sources.locate("lm_head.weight", Component::Text, Some("base"), false)?
        else {
            return Ok(());
        };
        let weight = WeightRef { source, name: head.name().to_owned() };
        let k = head.row_len();
        let storage = |format, layout, method, proof| Storage { format, layout, method, proof };
        let q4 = storage(Format::Q4G64, Layout::RowSplitK128V1, Method::Absmax, Proof::Requantized);
        let int = storage(Format::Int32, Layout::ContiguousLeV1, Method::Stored, Proof::Synthesised);
        for (name, shape, storage, content) in [
            ("proposal/head", vec![rows, k], q4, Content::ProposalHead { weight }),
            ("proposal/token_ids", vec![rows], int, Content::ProposalIds),
        ] {
            let elements = shape.iter().product();
            let object =
                self.push_object(Component::Text, shape.clone(), storage, vec![name.to_owned()], content)?;
            let p = Parameter {
                name: name.to_owned(),
                component: Component::Text,
                class: Class::Head,
                layer: None,
                shape: shape.clone(),
                source: Source::Tensor {
                    name: String::new(),
                    shape: Vec::new(),
                    rows: infernix_model::Rows::All,
                },
                optional: true,
            };
            if name == "proposal/head" {
                let plain = infernix_checkpoint::Scheme::Plain(infernix_checkpoint::Dtype::Bf16);
                self.uses.add(&p, name, &storage, plain, None, None);
            }
            self.bind(&p, name.to_owned(), shape, vec![(object, 0, elements)]);
        }
        Ok(())
    }

    /// The checkpoint that resources come from.
    pub(crate) fn resource_checkpoint(&self) -> &Checkpoint {
        let list = self.sources.list();
        let own = list.iter().find(|s| s.spec.role == "resources");
        &own.unwrap_or(self.sources.main()).checkpoint
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn special_tokens_are_always_in_and_ties_go_by_id() {
        let v = Vocabulary { ids: (0..10).collect(), special: vec![8, 9] };
        let counts = [0, 5, 5, 1, 0, 9, 0, 0, 7, 0];
        assert_eq!(v.select(5, &counts).unwrap(), [5, 8, 1, 2, 9]);
        assert_eq!(v.select(2, &counts).unwrap(), [8, 9]);
        assert!(v.select(1, &counts).unwrap_err().to_string().contains("2 special"));
        assert!(v.select(11, &counts).unwrap_err().to_string().contains("10 tokens"));
        // Unseen tokens rank by id.
        assert_eq!(v.select(4, &[]).unwrap(), [0, 1, 8, 9]);
    }

    #[test]
    fn ranking_files_are_checked() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("r.i64");
        let file = |words: &[i64]| {
            std::fs::write(&path, words.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<_>>()).unwrap();
            counts(&Ranking::File(path.clone()), 3)
        };
        assert_eq!(file(&[1, 2, 3, 9, 9, 9]).unwrap(), Some(vec![1, 2, 3]));
        assert!(file(&[1, 2]).unwrap_err().to_string().contains("int64"));
        assert!(file(&[1, -2, 3]).unwrap_err().to_string().contains("token 1"));
        assert_eq!(Ranking::from_ids([2, 2, 0]), Ranking::Counts(vec![1, 0, 2]));
    }
}
