//! The header of a safetensors file: a length, then JSON that must describe every byte that follows.

use std::borrow::Cow;
use std::collections::HashSet;
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde::de::{self, DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};

use crate::limits::{MAX_HEADER_BYTES, MAX_NAME_BYTES, MAX_RANK};
use crate::sniff::{SNIFF_BYTES, refuse_impostor};
use crate::{CheckpointError, Dtype};

/// One tensor of a header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeaderEntry {
    /// Its name.
    pub name: Box<str>,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions, outermost first; empty for a scalar.
    pub shape: Box<[u64]>,
    /// First byte, relative to the end of the header.
    pub begin: u64,
    /// One past the last byte.
    pub end: u64,
}

/// A parsed header, with what identifies it.
pub(crate) struct Header {
    pub(crate) entries: Vec<HeaderEntry>,
    /// Offset of the first data byte in the file: 8 + length of the JSON.
    pub(crate) data_start: u64,
    /// Length of the data that the header describes.
    pub(crate) data_len: u64,
    /// BLAKE3 of the length prefix and the JSON.
    pub(crate) digest: [u8; 32],
}

/// Reads and checks the header of an open file of `len` bytes, read from its start. The data may be absent
/// (`len` ends where the header does); the caller decides whether that is acceptable.
pub(crate) fn read_header(file: &mut File, path: &Path, len: u64) -> Result<Header, CheckpointError> {
    let mut start = Vec::with_capacity(SNIFF_BYTES);
    file.by_ref()
        .take(SNIFF_BYTES as u64)
        .read_to_end(&mut start)
        .map_err(CheckpointError::io(path, "read"))?;
    refuse_impostor(path, "a safetensors file", &start)?;
    let Some((prefix, rest)) = start.split_first_chunk::<8>() else {
        return Err(truncated(path, 8, len));
    };
    let json_len = u64::from_le_bytes(*prefix);
    if json_len > MAX_HEADER_BYTES {
        return Err(CheckpointError::TooLarge {
            path: path.to_path_buf(),
            what: "the safetensors header",
            limit: MAX_HEADER_BYTES,
            found: json_len,
        });
    }
    let data_start = 8 + json_len;
    if data_start > len {
        return Err(truncated(path, data_start, len));
    }
    // `json_len` is now bounded by the file's own length.
    let mut json = Vec::with_capacity(json_len as usize);
    json.extend_from_slice(&rest[..rest.len().min(json_len as usize)]);
    let missing = json_len - json.len() as u64;
    file.by_ref().take(missing).read_to_end(&mut json).map_err(CheckpointError::io(path, "read"))?;
    if json.len() as u64 != json_len {
        return Err(truncated(path, data_start, 8 + json.len() as u64));
    }
    let mut hasher = blake3::Hasher::new();
    hasher.update(prefix).update(&json);
    let entries = parse_header(path, &json, data_start)?;
    let data_len = entries.last().map_or(0, |e| e.end);
    Ok(Header { entries, data_start, data_len, digest: *hasher.finalize().as_bytes() })
}

fn truncated(path: &Path, expected: u64, found: u64) -> CheckpointError {
    CheckpointError::Truncated { path: path.to_path_buf(), expected, found, tensor: None }
}

/// Parses the JSON of a header, in the order of the data. `data_start` (the offset of the first data byte in
/// the file) and `path` serve the error messages. Strict: UTF-8, an object from its first byte, no duplicate
/// or unknown member, known dtypes, dtype x shape = bytes, ranges that follow each other without gap or
/// overlap from 0. Memory stays proportional to `json`.
pub fn parse_header(path: &Path, json: &[u8], data_start: u64) -> Result<Vec<HeaderEntry>, CheckpointError> {
    let fail = |reason: String| CheckpointError::Header { path: path.to_path_buf(), reason };
    if json.first() != Some(&b'{') {
        return Err(fail(format!(
            "expected '{{' at byte 8, found {}",
            json.first().map_or("the end of the header".to_owned(), |b| format!("0x{b:02x}"))
        )));
    }
    let text = std::str::from_utf8(json)
        .map_err(|e| fail(format!("expected UTF-8, found an invalid byte at {}", 8 + e.valid_up_to())))?;
    let mut parser = serde_json::Deserializer::from_str(text);
    let mut entries = parser.deserialize_map(HeaderVisitor).map_err(|e| fail(e.to_string()))?;
    parser.end().map_err(|e| fail(e.to_string()))?;

    // Empty tensors share an offset with their successor and come first.
    entries.sort_by_key(|e| (e.begin, e.end));
    let mut position = 0;
    for e in &entries {
        let wrong = |expected: String, found: String| CheckpointError::Entry {
            path: path.to_path_buf(),
            tensor: e.name.to_string(),
            offset: data_start.saturating_add(e.begin),
            expected,
            found,
        };
        if e.begin != position {
            let kind =
                if e.begin > position { "a gap before it" } else { "an overlap with the tensor before it" };
            return Err(wrong(format!("data_offsets from {position}"), format!("{} ({kind})", e.begin)));
        }
        let bytes = e.end.checked_sub(e.begin).ok_or_else(|| {
            wrong("data_offsets in rising order".to_owned(), format!("[{}, {}]", e.begin, e.end))
        })?;
        let expected = e.dtype.byte_len(&e.shape).ok_or_else(|| {
            wrong("a whole number of bytes below 2^64".to_owned(), format!("{} {:?}", e.dtype, e.shape))
        })?;
        if bytes != expected {
            return Err(wrong(
                format!("{expected} bytes for {} {:?}", e.dtype, e.shape),
                format!("{bytes} bytes"),
            ));
        }
        position = e.end;
    }
    if data_start.checked_add(position).is_none() {
        return Err(fail("data_offsets exceed 2^64".to_owned()));
    }
    Ok(entries)
}

/// A JSON string, borrowed where it has no escapes.
pub(crate) struct Text;

impl<'de> DeserializeSeed<'de> for Text {
    type Value = Cow<'de, str>;
    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<Self::Value, D::Error> {
        d.deserialize_str(self)
    }
}

impl<'de> Visitor<'de> for Text {
    type Value = Cow<'de, str>;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string")
    }
    fn visit_borrowed_str<E: de::Error>(self, v: &'de str) -> Result<Self::Value, E> {
        Ok(Cow::Borrowed(v))
    }
    fn visit_str<E: de::Error>(self, v: &str) -> Result<Self::Value, E> {
        Ok(Cow::Owned(v.to_owned()))
    }
}

/// Refuses names that no release has and that would garble messages.
pub(crate) fn check_name(name: &str) -> Result<(), String> {
    if name.is_empty() {
        return Err("a tensor has an empty name".to_owned());
    }
    if name.len() > MAX_NAME_BYTES {
        return Err(format!("a tensor name has {} bytes, more than {MAX_NAME_BYTES}", name.len()));
    }
    if name.chars().any(char::is_control) {
        return Err(format!("tensor name {name:?} has a control character"));
    }
    Ok(())
}

struct HeaderVisitor;

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = Vec<HeaderEntry>;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut entries: Vec<HeaderEntry> = Vec::new();
        let mut seen: HashSet<Cow<'de, str>> = HashSet::new();
        while let Some(name) = map.next_key_seed(Text)? {
            if name == "__metadata__" {
                map.next_value_seed(Metadata)?;
            } else {
                check_name(&name).map_err(de::Error::custom)?;
                let e = map.next_value_seed(EntrySeed { name: &name })?;
                entries.push(e);
            }
            if let Some(name) = seen.replace(name) {
                return Err(de::Error::custom(format!("{name} appears twice")));
            }
        }
        Ok(entries)
    }
}

/// `__metadata__`: an object of strings, checked and dropped.
struct Metadata;

impl<'de> DeserializeSeed<'de> for Metadata {
    type Value = ();
    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<(), D::Error> {
        d.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Metadata {
    type Value = ();
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("__metadata__ as an object of strings")
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut seen = HashSet::new();
        while let Some(key) = map.next_key_seed(Text)? {
            map.next_value_seed(Text)?;
            if let Some(key) = seen.replace(key) {
                return Err(de::Error::custom(format!("__metadata__.{key} appears twice")));
            }
        }
        Ok(())
    }
}

struct EntrySeed<'n> {
    name: &'n str,
}

impl<'de> DeserializeSeed<'de> for EntrySeed<'_> {
    type Value = HeaderEntry;
    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<HeaderEntry, D::Error> {
        d.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for EntrySeed<'_> {
    type Value = HeaderEntry;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tensor {} as an object", self.name)
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<HeaderEntry, A::Error> {
        let name = self.name;
        let (mut dtype, mut shape, mut offsets) = (None, None, None);
        let twice = |key: &str| de::Error::custom(format!("tensor {name}: {key} appears twice"));
        while let Some(key) = map.next_key_seed(Text)? {
            match &*key {
                "dtype" => {
                    let text = map.next_value_seed(Text)?;
                    let value = Dtype::from_name(&text)
                        .ok_or_else(|| de::Error::custom(format!("tensor {name}: unknown dtype {text:?}")))?;
                    if dtype.replace(value).is_some() {
                        return Err(twice("dtype"));
                    }
                }
                "shape" => {
                    let value = map.next_value_seed(Numbers { name, what: "shape", limit: MAX_RANK })?;
                    if shape.replace(value).is_some() {
                        return Err(twice("shape"));
                    }
                }
                "data_offsets" => {
                    let value = map.next_value_seed(Numbers { name, what: "data_offsets", limit: 2 })?;
                    let &[begin, end] = value.as_slice() else {
                        return Err(de::Error::custom(format!(
                            "tensor {name}: data_offsets expected 2 numbers, found {}",
                            value.len()
                        )));
                    };
                    if offsets.replace((begin, end)).is_some() {
                        return Err(twice("data_offsets"));
                    }
                }
                _ => return Err(de::Error::custom(format!("tensor {name}: unknown member {key:?}"))),
            }
        }
        let missing = |key: &str| de::Error::custom(format!("tensor {name}: {key} is missing"));
        let dtype = dtype.ok_or_else(|| missing("dtype"))?;
        let shape = shape.ok_or_else(|| missing("shape"))?.into_boxed_slice();
        let (begin, end) = offsets.ok_or_else(|| missing("data_offsets"))?;
        Ok(HeaderEntry { name: name.into(), dtype, shape, begin, end })
    }
}

/// A short array of non-negative integers.
struct Numbers<'n> {
    name: &'n str,
    what: &'static str,
    limit: usize,
}

impl<'de> DeserializeSeed<'de> for Numbers<'_> {
    type Value = Vec<u64>;
    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<Vec<u64>, D::Error> {
        d.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Numbers<'_> {
    type Value = Vec<u64>;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of tensor {} as an array of whole numbers", self.what, self.name)
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Vec<u64>, A::Error> {
        let mut out = Vec::with_capacity(2);
        while let Some(v) = seq.next_element::<u64>()? {
            if out.len() == self.limit {
                return Err(de::Error::custom(format!(
                    "tensor {}: {} has more than {} numbers",
                    self.name, self.what, self.limit
                )));
            }
            out.push(v);
        }
        Ok(out)
    }
}
