//! The header of one GGUF file: magic, version, metadata, tensor table.

use std::fs::File;
use std::path::{Path, PathBuf};

use infernix_formats::FormatError;
use infernix_formats::ggml::GgmlType;

use super::GgufTensor;
use super::cursor::Cursor;
use super::value::{Array, Metadata, Value, ValueType};
use crate::limits::{
    MAX_GGUF_KEY_BYTES, MAX_GGUF_KEYS, MAX_GGUF_RANK, MAX_GGUF_TENSORS, MAX_GGUF_TEXT_BYTES, MAX_NAME_BYTES,
};
use crate::pool::Stamp;
use crate::sniff::impostor;
use crate::{CheckpointError, OpenOptions, ShardInfo};

/// Alignment of tensor data where the metadata names none.
const DEFAULT_ALIGNMENT: u64 = 32;
/// Largest alignment: 1 MiB, far above what any file uses.
const MAX_ALIGNMENT: u64 = 1 << 20;
/// What to do about a file in another byte order or version.
const CONVERT_AGAIN: &str = "convert the model again with a current llama.cpp";

/// One file's header, its tensors checked against the file's length.
pub(super) struct Header {
    pub(super) shard: ShardInfo,
    pub(super) version: u32,
    pub(super) metadata: Metadata,
    /// In order of offsets.
    pub(super) tensors: Vec<GgufTensor>,
}

/// Reads and checks the header of `path`, file number `shard` of its model.
pub(super) fn read_header(path: &Path, shard: u32, opts: &OpenOptions) -> Result<Header, CheckpointError> {
    let meta = std::fs::metadata(path).map_err(CheckpointError::io(path, "open"))?;
    if !meta.is_file() {
        return Err(CheckpointError::Impostor {
            path: path.to_path_buf(),
            expected: "a GGUF file",
            found: if meta.is_dir() { "a folder" } else { "a device or pipe" }.to_owned(),
            advice: "pass a .gguf file or the folder of one model",
        });
    }
    let file = File::open(path).map_err(CheckpointError::io(path, "open"))?;
    let stamp = Stamp::of(&file).map_err(CheckpointError::io(path, "look at"))?;
    let mut cursor = Cursor::new(path, &file, stamp.len);
    let version = read_version(path, &mut cursor)?;
    let tensor_count = cursor.u64("the number of tensors")?;
    let key_count = cursor.u64("the number of metadata keys")?;
    // An entry has at least a length, a type and a byte of value; a tensor a length, a rank, a type and an offset.
    bound(&cursor, "metadata keys", key_count, MAX_GGUF_KEYS, 13)?;
    bound(&cursor, "tensors", tensor_count, MAX_GGUF_TENSORS, 24)?;
    let metadata = read_metadata(&mut cursor, key_count)?;
    let alignment = alignment(path, &metadata)?;
    let mut tensors = Vec::new();
    for _ in 0..tensor_count {
        tensors.push(read_tensor(path, &mut cursor, shard)?);
    }
    let header_bytes = cursor.at();
    let header_blake3 = cursor.digest();
    refuse_duplicates(path, header_bytes, &tensors)?;
    let data_present = place(path, &mut tensors, header_bytes, alignment, stamp.len, opts)?;
    let shard = ShardInfo {
        name: path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default(),
        len: stamp.len,
        modified: stamp.modified,
        header_blake3,
        sha256: crate::hf_cache::blob_sha256(path),
        data_present,
        indexed: true,
        path: PathBuf::from(path),
        stamp,
    };
    Ok(Header { shard, version, metadata, tensors })
}

/// Checks magic and version.
fn read_version(path: &Path, cursor: &mut Cursor<'_>) -> Result<u32, CheckpointError> {
    let unsupported = |what: String| CheckpointError::GgufUnsupported {
        path: path.to_path_buf(),
        what,
        advice: CONVERT_AGAIN,
    };
    let start = cursor.start()?;
    if !start.starts_with(b"GGUF") {
        let (found, advice) = match impostor(&start) {
            Some(known) => known,
            None if start.starts_with(b"FUGG") => {
                return Err(unsupported("is a big-endian GGUF file".into()));
            }
            None if [&b"ggml"[..], b"lmgg", b"ggjt", b"tjgg", b"ggla", b"algg"]
                .iter()
                .any(|m| start.starts_with(m)) =>
            {
                return Err(unsupported("is a GGML file from before GGUF".into()));
            }
            None if start.is_empty() => ("an empty file".to_owned(), "fetch the file again"),
            None => (
                format!("a file that starts with {:02x?}", &start[..start.len().min(4)]),
                "fetch the file again, or pass a GGUF file",
            ),
        };
        return Err(CheckpointError::Impostor {
            path: path.to_path_buf(),
            expected: "a GGUF file",
            found,
            advice,
        });
    }
    cursor.skip(4, "the magic")?;
    let version = cursor.u32("the version")?;
    match version {
        2 | 3 => Ok(version),
        1 => Err(unsupported(
            "is GGUF version 1, whose lengths have 32 bits; versions 2 and 3 are read".into(),
        )),
        // A small number in the high bytes is a small version in the other byte order.
        v if v & 0xFFFF == 0 && v != 0 => Err(unsupported(format!(
            "is a big-endian GGUF file (version {}); only little-endian files are read",
            v.swap_bytes()
        ))),
        v => Err(unsupported(format!("is GGUF version {v}; versions 2 and 3 are read"))),
    }
}

/// Refuses a count that the rest of the file cannot hold, or one above `limit`.
fn bound(
    cursor: &Cursor<'_>,
    what: &str,
    count: u64,
    limit: u64,
    least_bytes: u64,
) -> Result<(), CheckpointError> {
    let possible = cursor.remaining() / least_bytes;
    if count > limit.min(possible) {
        return Err(cursor.error(format!(
            "{count} {what} are announced; the rest of the file has room for {possible}, the limit is {limit}"
        )));
    }
    Ok(())
}

fn read_metadata(cursor: &mut Cursor<'_>, count: u64) -> Result<Metadata, CheckpointError> {
    let mut entries = Vec::new();
    for _ in 0..count {
        let key = cursor.text("a metadata key", MAX_GGUF_KEY_BYTES)?;
        if key.is_empty() || key.chars().any(char::is_control) {
            return Err(cursor.error(format!("metadata key {key:?} is empty or has control characters")));
        }
        let ty = value_type(cursor, &key)?;
        let value = match ty {
            ValueType::Text => Value::Text(cursor.text(&format!("the value of {key}"), MAX_GGUF_TEXT_BYTES)?),
            ValueType::Array => Value::Array(skip_array(cursor, &key)?),
            ty => fixed(cursor, &key, ty)?,
        };
        entries.push((key, value));
    }
    Metadata::new(entries).map_err(|key| cursor.error(format!("metadata key {key} occurs twice")))
}

fn value_type(cursor: &mut Cursor<'_>, key: &str) -> Result<ValueType, CheckpointError> {
    let id = cursor.u32("a metadata type")?;
    ValueType::from_id(id)
        .ok_or_else(|| cursor.error(format!("metadata key {key} has unknown type {id}; known are 0 to 12")))
}

/// A value of fixed width.
fn fixed(cursor: &mut Cursor<'_>, key: &str, ty: ValueType) -> Result<Value, CheckpointError> {
    let what = "a metadata value";
    let value = match ty.bytes() {
        Some(1) => Value::scalar(ty, &cursor.array::<1>(what)?),
        Some(2) => Value::scalar(ty, &cursor.array::<2>(what)?),
        Some(4) => Value::scalar(ty, &cursor.array::<4>(what)?),
        _ => Value::scalar(ty, &cursor.array::<8>(what)?),
    };
    // All widths fit; only a truth value can be illegal.
    value.ok_or_else(|| cursor.error(format!("metadata key {key} is a {ty} that is neither 0 nor 1")))
}

/// Passes over an array, checking that it lies in the file; nothing of it is kept.
fn skip_array(cursor: &mut Cursor<'_>, key: &str) -> Result<Array, CheckpointError> {
    let element = value_type(cursor, key)?;
    if element == ValueType::Array {
        return Err(cursor.error(format!("metadata key {key} is an array of arrays, which no model has")));
    }
    let count = cursor.u64("the length of an array")?;
    let least = element.bytes().unwrap_or(8);
    if count > cursor.remaining() / least {
        return Err(cursor.error(format!(
            "metadata key {key} is an array of {count} {element}, the rest of the file has {} bytes",
            cursor.remaining()
        )));
    }
    let offset = cursor.at();
    match element.bytes() {
        Some(width) => cursor.skip(count * width, key)?,
        None => {
            for _ in 0..count {
                let len = cursor.u64(key)?;
                cursor.skip(len, key)?;
            }
        }
    }
    Ok(Array { element, count, offset, bytes: cursor.at() - offset })
}

fn alignment(path: &Path, metadata: &Metadata) -> Result<u64, CheckpointError> {
    let Some(value) = metadata.get("general.alignment") else { return Ok(DEFAULT_ALIGNMENT) };
    match value {
        Value::U32(v) if v.is_power_of_two() && u64::from(*v) <= MAX_ALIGNMENT => Ok(u64::from(*v)),
        v => Err(CheckpointError::GgufKey {
            path: path.to_path_buf(),
            key: "general.alignment".to_owned(),
            expected: format!("a u32, a power of two up to {MAX_ALIGNMENT}"),
            found: format!("{} {v}", v.value_type()),
        }),
    }
}

/// One entry of the tensor table; `offset` is still relative to the data.
fn read_tensor(path: &Path, cursor: &mut Cursor<'_>, shard: u32) -> Result<GgufTensor, CheckpointError> {
    let name = cursor.text("a tensor name", MAX_NAME_BYTES as u64)?;
    if name.is_empty() || name.chars().any(char::is_control) {
        return Err(cursor.error(format!("tensor name {name:?} is empty or has control characters")));
    }
    let rank = cursor.u32("the rank of a tensor")?;
    if rank > MAX_GGUF_RANK {
        return Err(
            cursor.error(format!("tensor {name} has {rank} dimensions, more than ggml's {MAX_GGUF_RANK}"))
        );
    }
    let mut shape = Vec::with_capacity(rank as usize);
    for _ in 0..rank {
        let d = cursor.u64("a dimension")?;
        if d == 0 || d > i64::MAX as u64 {
            return Err(cursor.error(format!("tensor {name} has a dimension of {d}")));
        }
        shape.push(d);
    }
    // The file lists the contiguous dimension first.
    shape.reverse();
    let id = cursor.u32("the type of a tensor")?;
    let offset = cursor.u64("the offset of a tensor")?;
    let refused = |e: FormatError| CheckpointError::Entry {
        path: path.to_path_buf(),
        tensor: name.to_string(),
        offset,
        expected: "a known type and a shape of whole blocks".to_owned(),
        found: e.to_string(),
    };
    let ty = GgmlType::from_id(id).map_err(refused)?;
    if ty.is_removed() {
        return Err(refused(FormatError::GgmlNotDecodable { ty }));
    }
    let bytes = ty.tensor_bytes(&shape).map_err(refused)?;
    if shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d)).is_none() {
        return Err(refused(FormatError::Overflow { shape }));
    }
    Ok(GgufTensor { name, ty, shape: shape.into(), shard, offset, bytes })
}

fn refuse_duplicates(path: &Path, offset: u64, tensors: &[GgufTensor]) -> Result<(), CheckpointError> {
    let mut names: Vec<&str> = tensors.iter().map(|t| &*t.name).collect();
    names.sort_unstable();
    match names.windows(2).find(|p| p[0] == p[1]) {
        Some(pair) => Err(CheckpointError::GgufHeader {
            path: path.to_path_buf(),
            offset,
            reason: format!("tensor {} is listed twice", pair[0]),
        }),
        None => Ok(()),
    }
}

/// Checks the tensors' places: each at the next aligned offset, as ggml itself demands, the last one within the file and
/// nothing behind it but its padding. Turns offsets into offsets from the start of the file and sorts by them. Returns
/// whether the data is there.
fn place(
    path: &Path,
    tensors: &mut [GgufTensor],
    header_bytes: u64,
    alignment: u64,
    file_len: u64,
    opts: &OpenOptions,
) -> Result<bool, CheckpointError> {
    tensors.sort_by_key(|t| t.offset);
    let too_large = |t: &GgufTensor| CheckpointError::Entry {
        path: path.to_path_buf(),
        tensor: t.name.to_string(),
        offset: t.offset,
        expected: "a place within 64 bits".to_owned(),
        found: format!("{} bytes", t.bytes),
    };
    let data = header_bytes.next_multiple_of(alignment);
    let mut end = data;
    let mut next = 0u64;
    for t in tensors.iter_mut() {
        if t.offset != next {
            return Err(CheckpointError::Entry {
                path: path.to_path_buf(),
                tensor: t.name.to_string(),
                offset: t.offset,
                expected: format!("offset {next}, the next multiple of the alignment {alignment}"),
                found: format!("offset {}", t.offset),
            });
        }
        let ends = data.checked_add(t.offset).and_then(|o| o.checked_add(t.bytes));
        end = ends.ok_or_else(|| too_large(t))?;
        next = (end - data).checked_next_multiple_of(alignment).ok_or_else(|| too_large(t))?;
        t.offset += data;
    }
    if tensors.is_empty() {
        // A first part may hold metadata alone, with or without the padding.
        return if file_len <= data { Ok(true) } else { Err(trailing(path, data, file_len)) };
    }
    if file_len <= data {
        if opts.headers_only_ok {
            return Ok(false);
        }
        return Err(CheckpointError::HeadersOnly { path: path.to_path_buf(), missing: end - data });
    }
    if file_len < end {
        let cut = tensors.iter().find(|t| t.offset + t.bytes > file_len).map(|t| t.name.to_string());
        return Err(CheckpointError::Truncated {
            path: path.to_path_buf(),
            expected: end,
            found: file_len,
            tensor: cut,
        });
    }
    match data.checked_add(next) {
        Some(padded) if file_len > padded => Err(trailing(path, padded, file_len)),
        _ => Ok(true),
    }
}

fn trailing(path: &Path, expected: u64, found: u64) -> CheckpointError {
    CheckpointError::TrailingBytes { path: path.to_path_buf(), expected, found }
}
