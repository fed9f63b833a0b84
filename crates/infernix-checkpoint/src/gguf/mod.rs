//! GGUF models as a source: one little-endian file of version 2 or 3, or all parts of a split one.
//!
//! Opening reads the headers and checks every tensor's place; weights are read on demand by positioned reads through at
//! most four open files, as for safetensors: a file that shrinks or changes is an error, and bulk reads leave nothing in
//! the page cache. Arrays of the metadata (vocabularies) stay in the file until they are asked for. `docs/gguf.md` lists
//! what is read and what is refused.

mod config;
mod cursor;
mod header;
pub mod names;
mod nvfp4;
mod quirks;
mod split;
mod tokenizer;
mod value;
pub(crate) mod view;

use std::ops::{Range, RangeInclusive};
use std::path::{Path, PathBuf};

use infernix_formats::FormatError;
use infernix_formats::ggml::{GgmlType, decode_f32, validate};

pub use tokenizer::pre_tokenizer;
pub use value::{Array, Metadata, Value, ValueType};

use crate::limits::MAX_GGUF_ARRAY_BYTES;
use crate::pool::Pool;
use crate::{CheckpointError, OpenOptions, ShardInfo};

/// Bytes decoded per step of [`Gguf::read_rows_f32`].
const STEP_BYTES: u64 = 1 << 20;

/// One tensor as stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GgufTensor {
    /// Full name.
    pub name: Box<str>,
    /// Type of its blocks.
    pub ty: GgmlType,
    /// Dimensions, outermost first (a GGUF file lists them the other way round); empty for a scalar.
    pub shape: Box<[u64]>,
    /// Its file: an index into [`Gguf::shards`].
    pub shard: u32,
    /// First byte, from the start of the file.
    pub offset: u64,
    /// Length in bytes, padding not included.
    pub bytes: u64,
}

impl GgufTensor {
    /// Number of values.
    pub fn elements(&self) -> u64 {
        // The header was checked: the product is below 2^64.
        self.shape.iter().product()
    }

    /// Values of a row: the innermost dimension.
    pub fn row_len(&self) -> u64 {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Rows: the product of the other dimensions.
    pub fn rows(&self) -> u64 {
        self.elements() / self.row_len()
    }

    /// Bytes of a row; rows follow each other without padding.
    pub fn row_bytes(&self) -> u64 {
        self.bytes / self.rows()
    }
}

/// A GGUF model, opened for reading. `Send` and `Sync`.
#[derive(Debug)]
pub struct Gguf {
    path: PathBuf,
    version: u32,
    shards: Vec<ShardInfo>,
    metadata: Metadata,
    /// In order of shard and offset.
    tensors: Vec<GgufTensor>,
    /// Numbers into `tensors`, sorted by name.
    by_name: Vec<u32>,
    companions: Vec<PathBuf>,
    warnings: Vec<String>,
    pool: Pool,
}

impl Gguf {
    /// Opens a GGUF file, all parts of a split one (given any of them), or the one model of a folder. Reads the headers;
    /// no weight.
    ///
    /// # Errors
    /// What `docs/gguf.md` lists: other versions and byte orders, damaged headers, missing or foreign parts, tensors out
    /// of place, truncated files, trailing data, several models in a folder.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        Self::open_with(path, &OpenOptions::default())
    }

    /// As [`Gguf::open`]; with `headers_only_ok`, files that hold only their header are accepted, for plans. The other
    /// options do not apply.
    ///
    /// # Errors
    /// As [`Gguf::open`].
    pub fn open_with(path: &Path, opts: &OpenOptions) -> Result<Self, CheckpointError> {
        let parts = split::open_parts(path, opts)?;
        let mut gguf = Self {
            path: path.to_path_buf(),
            version: 0,
            shards: Vec::new(),
            metadata: Metadata::default(),
            tensors: Vec::new(),
            by_name: Vec::new(),
            companions: parts.companions,
            warnings: parts.warnings,
            pool: Pool::default(),
        };
        for (i, header) in parts.headers.into_iter().enumerate() {
            if i == 0 {
                gguf.version = header.version;
                gguf.metadata = header.metadata;
            }
            gguf.shards.push(header.shard);
            gguf.tensors.extend(header.tensors);
        }
        let tensors = &gguf.tensors;
        gguf.by_name = (0..tensors.len() as u32).collect();
        gguf.by_name.sort_unstable_by(|&a, &b| tensors[a as usize].name.cmp(&tensors[b as usize].name));
        let name = |i: u32| &tensors[i as usize].name;
        if let Some(pair) = gguf.by_name.windows(2).find(|p| name(p[0]) == name(p[1])) {
            let shard = |i: u32| gguf.shard_of(&tensors[i as usize]).name.clone();
            return Err(CheckpointError::DuplicateTensor {
                path: gguf.path.clone(),
                tensor: name(pair[0]).to_string(),
                first: shard(pair[0]),
                second: shard(pair[1]),
                indexed: false,
            });
        }
        let without_data = gguf.shards.iter().filter(|s| !s.data_present).count();
        if without_data > 0 {
            gguf.warnings
                .push(format!("{without_data} of {} files hold only their headers", gguf.shards.len()));
        }
        let quirks = quirks::find(&gguf)?;
        gguf.warnings.extend(quirks);
        Ok(gguf)
    }

    /// The path that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Version of the (first) file: 2 or 3.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// The files, in order.
    pub fn shards(&self) -> &[ShardInfo] {
        &self.shards
    }

    /// The file of a tensor of this model.
    pub fn shard_of(&self, t: &GgufTensor) -> &ShardInfo {
        &self.shards[t.shard as usize]
    }

    /// The metadata of the first file.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// `config.json` as the model's keys give it, with the class and the types that its source had.
    ///
    /// # Errors
    /// Another architecture; keys that are missing, of another type or contradict each other.
    pub fn config(&self) -> Result<serde_json::Value, CheckpointError> {
        if names::vision::is_tower(self) {
            return names::vision::config(self);
        }
        config::config(self)
    }

    /// A file of the source, generated from the keys: `tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja` or
    /// `generation_config.json`; `None` for others, and where the model lacks the keys.
    ///
    /// # Errors
    /// A tokenizer of another kind; keys of another type; what reading meets.
    pub fn generated_file(&self, name: &str) -> Result<Option<Vec<u8>>, CheckpointError> {
        tokenizer::file(self, name)
    }

    /// Every tensor, in the order of files and offsets: the order to stream them in.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = &GgufTensor> {
        self.tensors.iter()
    }

    /// The tensor of that name.
    pub fn get(&self, name: &str) -> Option<&GgufTensor> {
        let at = self.by_name.binary_search_by(|&i| (*self.tensors[i as usize].name).cmp(name)).ok()?;
        Some(&self.tensors[self.by_name[at] as usize])
    }

    /// Files of the folder that accompany the model and are no part of it (image towers, importance matrices).
    pub fn companions(&self) -> &[PathBuf] {
        &self.companions
    }

    /// What is odd about the model: what a converter is known to get wrong and can be seen in the file.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// `general.architecture`.
    ///
    /// # Errors
    /// The key is missing or no text.
    pub fn architecture(&self) -> Result<&str, CheckpointError> {
        self.text("general.architecture")?
            .ok_or_else(|| self.key_error("general.architecture", "a text", "missing".to_owned()))
    }

    /// A text of the metadata, `None` where the key is missing.
    ///
    /// # Errors
    /// A value of another type.
    pub fn text(&self, key: &str) -> Result<Option<&str>, CheckpointError> {
        self.typed(key, "a text", Value::text)
    }

    /// An integer of any width that is not negative, `None` where the key is missing.
    ///
    /// # Errors
    /// A value of another type, or a negative one.
    pub fn unsigned(&self, key: &str) -> Result<Option<u64>, CheckpointError> {
        self.typed(key, "an integer that is not negative", Value::unsigned)
    }

    /// A finite floating-point number, `None` where the key is missing.
    ///
    /// # Errors
    /// A value of another type, NaN or an infinity.
    pub fn float(&self, key: &str) -> Result<Option<f64>, CheckpointError> {
        self.typed(key, "a finite floating-point number", |v| v.float().filter(|x| x.is_finite()))
    }

    /// [`Gguf::float`] within a range, whose bounds belong to it; `expected` says it in words.
    ///
    /// # Errors
    /// As there; a value outside.
    pub(crate) fn float_in(
        &self,
        key: &str,
        range: RangeInclusive<f64>,
        expected: &str,
    ) -> Result<Option<f64>, CheckpointError> {
        self.typed(key, expected, |v| v.float().filter(|x| range.contains(x)))
    }

    fn typed<'a, T>(
        &'a self,
        key: &str,
        expected: &str,
        get: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, CheckpointError> {
        let Some(value) = self.metadata.get(key) else { return Ok(None) };
        let found = || format!("{} {value}", value.value_type());
        get(value).map(Some).ok_or_else(|| self.key_error(key, expected, found()))
    }

    fn key_error(&self, key: &str, expected: &str, found: String) -> CheckpointError {
        CheckpointError::GgufKey {
            path: self.shards[0].path.clone(),
            key: key.to_owned(),
            expected: expected.to_owned(),
            found,
        }
    }

    /// The elements of an array of fixed-width values, read from the file; `None` where the key is missing. A single
    /// value is taken as an array of one, as llama.cpp does for keys that may differ from layer to layer.
    ///
    /// # Errors
    /// An array of text, another type, more than 64 MiB, an element that `get` does not take, or what reading meets.
    pub fn list<T>(
        &self,
        key: &str,
        expected: &str,
        get: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<Vec<T>>, CheckpointError> {
        let Some(value) = self.metadata.get(key) else { return Ok(None) };
        let Value::Array(array) = value else {
            return Ok(self.typed(key, expected, &get)?.map(|v| vec![v]));
        };
        let Some(width) = array.element.bytes() else {
            return Err(self.key_error(key, expected, format!("an array of {}", array.element)));
        };
        let bytes = self.array_bytes(key, array)?;
        let elements = bytes.chunks_exact(width as usize).map(|b| {
            let element = Value::scalar(array.element, b);
            element.as_ref().and_then(&get).ok_or_else(|| {
                let found =
                    element.map_or_else(|| format!("bytes {b:02x?}"), |v| format!("{} {v}", v.value_type()));
                self.key_error(key, expected, found)
            })
        });
        elements.collect::<Result<_, _>>().map(Some)
    }

    /// An array of integers that are not negative; see [`Gguf::list`].
    ///
    /// # Errors
    /// As [`Gguf::list`].
    pub fn unsigned_list(&self, key: &str) -> Result<Option<Vec<u64>>, CheckpointError> {
        self.list(key, "integers that are not negative", Value::unsigned)
    }

    /// The elements of an array of text, read from the file; `None` where the key is missing.
    ///
    /// # Errors
    /// Another type, more than 64 MiB, text that is not UTF-8, or what reading meets.
    pub fn text_list(&self, key: &str) -> Result<Option<Vec<String>>, CheckpointError> {
        let Some(value) = self.metadata.get(key) else { return Ok(None) };
        let array = match value {
            Value::Array(a) if a.element == ValueType::Text => a,
            v => return Err(self.key_error(key, "an array of text", format!("{} {v}", v.value_type()))),
        };
        let bytes = self.array_bytes(key, array)?;
        let mut rest = &bytes[..];
        let mut out = Vec::new();
        while let Some((len, tail)) = rest.split_first_chunk::<8>() {
            let len = usize::try_from(u64::from_le_bytes(*len)).ok();
            let Some((text, tail)) = len.and_then(|n| tail.split_at_checked(n)) else {
                return Err(self.key_error(
                    key,
                    "text within the array",
                    "a length beyond its end".to_owned(),
                ));
            };
            let text = String::from_utf8(text.to_vec())
                .map_err(|e| self.key_error(key, "UTF-8", format!("element {}: {e}", out.len())))?;
            out.push(text);
            rest = tail;
        }
        Ok(Some(out))
    }

    fn array_bytes(&self, key: &str, array: &Array) -> Result<Vec<u8>, CheckpointError> {
        if array.bytes > MAX_GGUF_ARRAY_BYTES {
            return Err(CheckpointError::TooLarge {
                path: self.shards[0].path.clone(),
                what: "a metadata array",
                limit: MAX_GGUF_ARRAY_BYTES,
                found: array.bytes,
            });
        }
        let shard = &self.shards[0];
        let mut out = vec![0; array.bytes as usize];
        self.pool.read(0, &shard.path, &shard.stamp, key, array.offset, &mut out)?;
        Ok(out)
    }

    /// Reads bytes `range` of a tensor (0 = its first byte) into `out`, which must have that length. Bulk: pages are
    /// handed back to the system.
    ///
    /// # Errors
    /// A range or buffer that does not fit, a file without its data, one that changed or shrank, or an I/O error.
    pub fn read(&self, t: &GgufTensor, range: Range<u64>, out: &mut [u8]) -> Result<(), CheckpointError> {
        let misfit = |reason: String| CheckpointError::Range {
            tensor: t.name.to_string(),
            start: range.start,
            end: range.end,
            reason,
        };
        if range.start > range.end || range.end > t.bytes {
            return Err(misfit(format!("the tensor has {} bytes", t.bytes)));
        }
        if out.len() as u64 != range.end - range.start {
            return Err(misfit(format!("the buffer has {} bytes", out.len())));
        }
        let shard = self.shards.get(t.shard as usize);
        let shard = shard.ok_or_else(|| misfit("the tensor is of another model".to_owned()))?;
        if out.is_empty() {
            return Ok(());
        }
        if !shard.data_present {
            let missing = self.tensors.iter().filter(|x| x.shard == t.shard).map(|x| x.bytes).sum();
            return Err(CheckpointError::HeadersOnly { path: shard.path.clone(), missing });
        }
        self.pool.read(t.shard, &shard.path, &shard.stamp, &t.name, t.offset + range.start, out)
    }

    /// Decodes rows `rows` of a tensor (of [`GgufTensor::rows`]) into `out`, which must have `rows` x
    /// [`GgufTensor::row_len`] values: what the stored words mean, rounded once to F32. The conventions of the GGUF
    /// converter (see [`names`]) are not undone.
    ///
    /// # Errors
    /// A range or buffer that does not fit; a type that holds no weights; a scale that is NaN or infinite, with row,
    /// column and offset; anything of [`Gguf::read`].
    pub fn read_rows_f32(
        &self,
        t: &GgufTensor,
        rows: Range<u64>,
        out: &mut [f32],
    ) -> Result<(), CheckpointError> {
        let misfit = |reason: String| CheckpointError::Range {
            tensor: t.name.to_string(),
            start: rows.start,
            end: rows.end,
            reason,
        };
        let row_len = t.row_len();
        if rows.start > rows.end || rows.end > t.rows() {
            return Err(misfit(format!("the tensor has {} rows", t.rows())));
        }
        if out.len() as u64 != (rows.end - rows.start) * row_len {
            return Err(misfit(format!("the buffer has {} values", out.len())));
        }
        // Rows are whole blocks and follow each other, so the range is a run of blocks.
        let (values, size) = (t.ty.block_len(), t.ty.block_bytes());
        let step = (STEP_BYTES / size).max(1);
        let mut block = rows.start * row_len / values;
        let mut buffer = Vec::new();
        for out in out.chunks_mut((step * values) as usize) {
            let bytes = out.len() as u64 / values * size;
            buffer.resize(bytes as usize, 0);
            self.read(t, block * size..block * size + bytes, &mut buffer)?;
            let checked =
                validate(t.ty, &buffer, out.len() as u64, 0).and_then(|()| decode_f32(t.ty, &buffer, out));
            checked.map_err(|e| self.word_error(t, block, e))?;
            block += bytes / size;
        }
        Ok(())
    }

    /// Places an error of a run of blocks that starts at block `first`.
    fn word_error(&self, t: &GgufTensor, first: u64, e: FormatError) -> CheckpointError {
        let shard = self.shards.get(t.shard as usize).map(|s| s.name.clone()).unwrap_or_default();
        let tensor = t.name.to_string();
        match e {
            FormatError::IllegalWord { what, word, place, why } => {
                let value = first * t.ty.block_len() + place.column;
                CheckpointError::IllegalWord {
                    shard,
                    tensor,
                    row: value / t.row_len(),
                    column: value % t.row_len(),
                    offset: t.offset + value / t.ty.block_len() * t.ty.block_bytes(),
                    expected: why,
                    found: format!("{what} {word:#06x}"),
                }
            }
            e => CheckpointError::GgufType { shard, tensor, reason: e.to_string() },
        }
    }
}
