//! `model.safetensors.index.json`: which shard each tensor lies in.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;
use std::path::Path;

use serde::de::{self, DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use crate::CheckpointError;
use crate::header::{Text, check_name};
use crate::limits::MAX_SHARDS;

/// The file that makes a folder of shards a checkpoint.
pub(crate) const INDEX_FILE: &str = "model.safetensors.index.json";

/// A parsed index. Names borrow the index's text.
pub(crate) struct Index<'t> {
    /// (tensor, number of its shard in `shards`), sorted by name.
    pub(crate) entries: Vec<(Cow<'t, str>, u32)>,
    /// Shard names in order of appearance; plain names of safetensors files.
    pub(crate) shards: Vec<String>,
    /// `metadata.total_size`, where there is one.
    pub(crate) total_size: Option<u64>,
}

/// Why `name` cannot be the name of a file in the checkpoint's own folder. Judged by the text alone: the
/// files of a Hugging Face snapshot are links that lead out of their folder, and that is fine.
pub(crate) fn plain_file_name(name: &str) -> Result<(), &'static str> {
    if name.is_empty() || name == "." || name == ".." {
        return Err("it names a folder, not a file");
    }
    if name.contains(['/', '\\']) {
        return Err("it has a path separator");
    }
    if name.contains(':') {
        return Err("it has a colon");
    }
    if name.chars().any(char::is_control) {
        return Err("it has a control character");
    }
    if name.len() > 255 {
        return Err("it is longer than a file name can be");
    }
    Ok(())
}

/// Parses an index. Refuses duplicate tensors and any entry that is not the plain name of a safetensors file.
pub(crate) fn parse_index<'t>(path: &Path, text: &'t [u8]) -> Result<Index<'t>, CheckpointError> {
    let fail = |reason: String| CheckpointError::Index { path: path.to_path_buf(), reason };
    let text = std::str::from_utf8(text)
        .map_err(|e| fail(format!("expected UTF-8, found an invalid byte at {}", e.valid_up_to())))?;
    let mut bad_entry = None;
    let mut parser = serde_json::Deserializer::from_str(text);
    let parsed = parser.deserialize_map(IndexVisitor { bad_entry: &mut bad_entry });
    if let Some((tensor, entry, reason)) = bad_entry {
        return Err(CheckpointError::IndexEntry { path: path.to_path_buf(), tensor, entry, reason });
    }
    let mut index = parsed.map_err(|e| fail(e.to_string()))?;
    parser.end().map_err(|e| fail(e.to_string()))?;
    index.entries.sort_unstable_by(|a, b| a.0.cmp(&b.0));
    if let Some(pair) = index.entries.windows(2).find(|w| w[0].0 == w[1].0) {
        let [a, b] = [&pair[0], &pair[1]].map(|e| &index.shards[e.1 as usize]);
        return Err(fail(format!("tensor {} appears twice (in {a} and {b})", pair[0].0)));
    }
    if index.entries.is_empty() {
        return Err(fail("weight_map names no tensor".to_owned()));
    }
    Ok(index)
}

/// An index entry that is refused: tensor, entry, reason.
type BadEntry = Option<(String, String, &'static str)>;

struct IndexVisitor<'b> {
    bad_entry: &'b mut BadEntry,
}

impl<'de> Visitor<'de> for IndexVisitor<'_> {
    type Value = Index<'de>;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with weight_map")
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut weight_map = None;
        let mut total_size = None;
        while let Some(key) = map.next_key_seed(Text)? {
            match &*key {
                "weight_map" => {
                    if weight_map.is_some() {
                        return Err(de::Error::custom("weight_map appears twice"));
                    }
                    weight_map = Some(map.next_value_seed(WeightMap { bad_entry: &mut *self.bad_entry })?);
                }
                "metadata" => {
                    total_size = map.next_value_seed(Advice)?;
                }
                _ => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        let (entries, shards) = weight_map.ok_or_else(|| de::Error::custom("weight_map is missing"))?;
        Ok(Index { entries, shards, total_size })
    }
}

/// `metadata` and its `total_size`, which is advice: a whole number is kept, the rest may be anything and costs no memory.
struct Advice;

impl<'de> DeserializeSeed<'de> for Advice {
    type Value = Option<u64>;
    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<Self::Value, D::Error> {
        d.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Advice {
    type Value = Option<u64>;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("anything")
    }
    fn visit_u64<E>(self, v: u64) -> Result<Self::Value, E> {
        Ok(Some(v))
    }
    fn visit_i64<E>(self, _: i64) -> Result<Self::Value, E> {
        Ok(None)
    }
    fn visit_f64<E>(self, _: f64) -> Result<Self::Value, E> {
        Ok(None)
    }
    fn visit_bool<E>(self, _: bool) -> Result<Self::Value, E> {
        Ok(None)
    }
    fn visit_str<E>(self, _: &str) -> Result<Self::Value, E> {
        Ok(None)
    }
    fn visit_unit<E>(self) -> Result<Self::Value, E> {
        Ok(None)
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        while seq.next_element::<IgnoredAny>()?.is_some() {}
        Ok(None)
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut total = None;
        while let Some(key) = map.next_key_seed(Text)? {
            if key == "total_size" {
                total = map.next_value_seed(Advice)?;
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(total)
    }
}

struct WeightMap<'b> {
    bad_entry: &'b mut BadEntry,
}

impl<'de> DeserializeSeed<'de> for WeightMap<'_> {
    type Value = (Vec<(Cow<'de, str>, u32)>, Vec<String>);
    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<Self::Value, D::Error> {
        d.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for WeightMap<'_> {
    type Value = (Vec<(Cow<'de, str>, u32)>, Vec<String>);
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("weight_map as an object of file names")
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut entries: Vec<(Cow<'de, str>, u32)> = Vec::new();
        let mut shards: Vec<String> = Vec::new();
        let mut numbers: HashMap<String, u32> = HashMap::new();
        let mut last = 0u32;
        while let Some(name) = map.next_key_seed(Text)? {
            check_name(&name).map_err(de::Error::custom)?;
            let shard = map.next_value_seed(Text)?;
            // Neighbouring tensors usually share their shard.
            if shards.get(last as usize).is_none_or(|s| *s != *shard) {
                last = match numbers.get(&*shard) {
                    Some(&n) => n,
                    None => {
                        let verdict = plain_file_name(&shard).and_then(|()| {
                            if shard.ends_with(".safetensors") {
                                Ok(())
                            } else {
                                Err("it is not a safetensors file")
                            }
                        });
                        if let Err(reason) = verdict {
                            *self.bad_entry = Some((name.into_owned(), shard.into_owned(), reason));
                            return Err(de::Error::custom(reason));
                        }
                        if shards.len() == MAX_SHARDS {
                            return Err(de::Error::custom(format!("more than {MAX_SHARDS} shards")));
                        }
                        let n = shards.len() as u32;
                        shards.push(shard.clone().into_owned());
                        numbers.insert(shard.into_owned(), n);
                        n
                    }
                };
            }
            entries.push((name, last));
        }
        Ok((entries, shards))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Index<'_>, CheckpointError> {
        parse_index(Path::new("dir/model.safetensors.index.json"), text.as_bytes())
    }

    #[test]
    fn entries_come_sorted_with_their_shard() {
        let index = parse(
            r#"{"metadata":{"total_size":7,"x":[1]},"weight_map":{"b":"m-2.safetensors","a":"m-1.safetensors","c":"m-2.safetensors"},"extra":null}"#,
        )
        .expect("valid");
        assert_eq!(index.total_size, Some(7));
        let shards: Vec<_> = index.entries.iter().map(|(n, s)| (&**n, &*index.shards[*s as usize])).collect();
        assert_eq!(shards, [("a", "m-1.safetensors"), ("b", "m-2.safetensors"), ("c", "m-2.safetensors")]);
    }

    #[test]
    fn a_total_size_that_is_no_number_is_no_reason_to_refuse() {
        for metadata in [
            r#"{"total_size":"x"}"#,
            r#"{"total_size":[1,{"total_size":2}]}"#,
            r#"{"total_size":-1.5}"#,
            "null",
            "[1]",
            "true",
        ] {
            let text = format!(r#"{{"metadata":{metadata},"weight_map":{{"a":"m.safetensors"}}}}"#);
            assert_eq!(parse(&text).expect(metadata).total_size, None, "{metadata}");
        }
    }

    #[test]
    fn entry_that_leaves_the_folder_is_refused_by_its_text() {
        for entry in [
            "../x.safetensors",
            "/etc/x.safetensors",
            "a/x.safetensors",
            "a\\\\x.safetensors",
            "..",
            ".",
            "",
            "C:x.safetensors",
            "x\\u0000.safetensors",
            "x.bin",
        ] {
            let text = format!(r#"{{"weight_map":{{"a.weight":"{entry}"}}}}"#);
            let e = parse(&text).err().unwrap_or_else(|| panic!("{entry:?} accepted"));
            assert!(matches!(e, CheckpointError::IndexEntry { .. }), "{entry:?}: {e}");
            assert!(e.to_string().contains("a.weight"), "{e}");
        }
        // Two dots inside a name lead nowhere.
        assert!(parse(r#"{"weight_map":{"a":"x..y.safetensors"}}"#).is_ok());
    }

    #[test]
    fn malformed_indexes_are_refused() {
        for text in [
            "",
            "[]",
            "{}",
            r#"{"weight_map":[]}"#,
            r#"{"weight_map":{}}"#,
            r#"{"weight_map":{"a":1}}"#,
            r#"{"weight_map":{"a":"x.safetensors"}} x"#,
            r#"{"weight_map":{"a":"x.safetensors","a":"x.safetensors"}}"#,
            r#"{"weight_map":{"":"x.safetensors"}}"#,
            r#"{"weight_map":{"a":"x.safetensors"},"weight_map":{}}"#,
            r#"{"weight_map":{"a":"x.safetensors""#,
        ] {
            let e = parse(text).err().unwrap_or_else(|| panic!("{text:?} accepted"));
            assert!(matches!(e, CheckpointError::Index { .. }), "{text:?}: {e}");
        }
        assert!(parse_index(Path::new("i"), b"{\"weight_map\":{\"a\":\"\xff.safetensors\"}}").is_err());
    }
}
