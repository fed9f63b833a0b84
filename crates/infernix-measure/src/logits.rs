//! Another engine's logits over the measured text, as a safetensors file (docs/kld.md says which tensors).
//!
//! Only the header and the small tensors are read at once; rows come one at a time. Nothing in the file is trusted:
//! every range is checked against its length first.

use crate::corpus::Chunks;
use crate::error::{MeasureError, Result};
use half::{bf16, f16};
use serde::Deserialize;
use serde_json::{Map, Value};
use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

/// Larger headers, token lists and row counts than any measurement has.
const MAX_HEADER: u64 = 1 << 24;
const MAX_TOKENS: usize = 1 << 28;
const MAX_VOCAB: usize = 1 << 24;

#[derive(Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: [u64; 2],
}

#[derive(Clone, Copy, Debug)]
enum Dtype {
    F32,
    F16,
    Bf16,
}

impl Dtype {
    fn bytes(self) -> usize {
        if matches!(self, Dtype::F32) { 4 } else { 2 }
    }
}

/// A file of logits open for reading.
#[derive(Debug)]
pub struct LogitsFile {
    path: PathBuf,
    file: File,
    metadata: Map<String, Value>,
    tokens: Vec<u32>,
    /// Row of each position.
    rows: HashMap<u32, u64>,
    dtype: Dtype,
    vocab: usize,
    start: u64,
    /// Chunk length and first scored row, set by [`Self::check`].
    grid: (usize, usize),
}

impl LogitsFile {
    /// Opens a file, checks its header and sizes and reads its tokens and positions.
    pub fn open(path: &Path) -> Result<Self> {
        let io = |what| MeasureError::io(path, what);
        let wrong = |offset, what: String| MeasureError::format(path, offset, what);
        let file = File::open(path).map_err(io("opening"))?;
        let length = file.metadata().map_err(io("opening"))?.len();
        let mut lead = [0; 8];
        file.read_exact_at(&mut lead, 0).map_err(io("reading the header"))?;
        let json = u64::from_le_bytes(lead);
        if json > MAX_HEADER || 8 + json > length {
            return Err(wrong(
                0,
                format!("a header of {json} bytes in a file of {length}: no safetensors file"),
            ));
        }
        let mut header = vec![0; json as usize];
        file.read_exact_at(&mut header, 8).map_err(io("reading the header"))?;
        let mut header: Map<String, Value> =
            serde_json::from_slice(&header).map_err(|e| wrong(8, format!("header: {e}")))?;
        let metadata = match header.remove("__metadata__") {
            Some(Value::Object(map)) => map,
            _ => Map::new(),
        };
        let start = 8 + json;
        // Dtype, shape and range of a tensor whose range is as large as they ask for, within the file.
        let mut take = |name: &str, dtypes: &[&str]| -> Result<(String, Vec<usize>, [u64; 2])> {
            let value = header.remove(name).ok_or_else(|| {
                wrong(8, format!("no tensor {name}; there must be logits, positions and input_ids"))
            })?;
            let e: Entry =
                serde_json::from_value(value).map_err(|e| wrong(8, format!("tensor {name}: {e}")))?;
            if !dtypes.contains(&e.dtype.as_str()) {
                return Err(wrong(8, format!("{name} is {}, expected {}", e.dtype, dtypes.join(" or "))));
            }
            let size = if matches!(e.dtype.as_str(), "F16" | "BF16") { 2 } else { 4 };
            let [a, b] = e.data_offsets;
            let bytes = e.shape.iter().try_fold(size, |n: u64, d| n.checked_mul(*d as u64));
            if a > b || start.checked_add(b).is_none_or(|end| end > length) || bytes != Some(b - a) {
                let what = format!("{name} of shape {:?} at bytes {a}..{b} of {length}", e.shape);
                return Err(wrong(8, what));
            }
            Ok((e.dtype, e.shape, e.data_offsets))
        };
        let (dtype, shape, at) = take("logits", &["F32", "F16", "BF16"])?;
        let dtype = match dtype.as_str() {
            "F32" => Dtype::F32,
            "F16" => Dtype::F16,
            _ => Dtype::Bf16,
        };
        let [count, vocab] = shape[..] else {
            return Err(wrong(8, format!("logits of shape {shape:?}, expected [rows, vocabulary]")));
        };
        if !(1..=MAX_VOCAB).contains(&vocab) {
            return Err(wrong(8, format!("{vocab} logits a row, expected 1..={MAX_VOCAB}")));
        }
        let ids = |(_, shape, [a, b]): (String, Vec<usize>, [u64; 2]), name: &str| -> Result<Vec<u32>> {
            let [n] = shape[..] else {
                return Err(wrong(8, format!("{name} of shape {shape:?}, expected one axis")));
            };
            if n > MAX_TOKENS {
                return Err(wrong(8, format!("{n} {name}, expected at most {MAX_TOKENS}")));
            }
            let mut bytes = vec![0; (b - a) as usize];
            file.read_exact_at(&mut bytes, start + a).map_err(io("reading ids"))?;
            let words = bytes.chunks_exact(4).map(|w| i32::from_le_bytes([w[0], w[1], w[2], w[3]]));
            words
                .enumerate()
                .map(|(i, v)| {
                    u32::try_from(v)
                        .map_err(|_| wrong(start + a + 4 * i as u64, format!("{name}[{i}] is {v}")))
                })
                .collect()
        };
        let positions = ids(take("positions", &["I32"])?, "positions")?;
        let tokens = ids(take("input_ids", &["I32"])?, "input_ids")?;
        if positions.len() != count {
            return Err(wrong(8, format!("{} positions for {count} rows of logits", positions.len())));
        }
        let mut rows = HashMap::with_capacity(count);
        for (i, p) in positions.iter().enumerate() {
            if *p as usize >= tokens.len() {
                return Err(wrong(8, format!("positions[{i}] is {p}, there are {} input_ids", tokens.len())));
            }
            if let Some(first) = rows.insert(*p, i as u64) {
                return Err(wrong(8, format!("positions[{first}] and positions[{i}] are both {p}")));
            }
        }
        let start = start + at[0];
        Ok(Self { path: path.to_owned(), file, metadata, tokens, rows, dtype, vocab, start, grid: (0, 0) })
    }

    /// Its file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Logits per row.
    pub fn vocab(&self) -> usize {
        self.vocab
    }

    /// Tokens of the whole text.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// What the file says about its maker.
    pub fn metadata(&self) -> &Map<String, Value> {
        &self.metadata
    }

    /// Refuses a file of another text, or one that lacks a row.
    pub fn check(&mut self, chunks: &Chunks) -> Result<()> {
        let wrong = |what: String, expected: String, found: String| MeasureError::Mismatch {
            what: format!("{}: {what}", self.path.display()),
            expected,
            found,
            advice: "write the logits of the text that is measured (kld --export-tokens gives its ids)",
        };
        let (own, text) = (&self.tokens, chunks.tokens());
        if own.len() < text.len() {
            return Err(wrong("number of tokens".into(), text.len().to_string(), own.len().to_string()));
        }
        if let Some(i) = own.iter().zip(text).position(|(a, b)| a != b) {
            let at = format!("token {} of chunk {}", i % chunks.ctx, i / chunks.ctx);
            return Err(wrong(at, text[i].to_string(), own[i].to_string()));
        }
        self.grid = (chunks.ctx, chunks.rows().start);
        let all = (0..chunks.count).flat_map(|c| (0..chunks.rows().len()).map(move |i| (c, i)));
        for (c, i) in all {
            let position = self.position(c, i);
            if !self.rows.contains_key(&position) {
                let what = format!("row {i} of chunk {c} (position {position})");
                return Err(wrong(what, "logits".into(), "none".into()));
            }
        }
        Ok(())
    }

    /// Index into the tokens of a scored row of a chunk.
    fn position(&self, chunk: usize, row: usize) -> u32 {
        (chunk * self.grid.0 + self.grid.1 + row) as u32
    }

    /// Names a scored row of a chunk in errors.
    pub(crate) fn place(&self, chunk: usize, row: usize) -> String {
        let position = self.position(chunk, row);
        format!("{}: row {row} of chunk {chunk} (position {position})", self.path.display())
    }

    /// Logits of a scored row of a chunk.
    pub(crate) fn row(&self, chunk: usize, row: usize) -> Result<Vec<f32>> {
        let position = self.position(chunk, row);
        let size = self.vocab * self.dtype.bytes();
        let Some(index) = self.rows.get(&position) else {
            return Err(MeasureError::format(
                &self.path,
                self.start,
                format!("no row of position {position}"),
            ));
        };
        let mut bytes = vec![0; size];
        let at = self.start + index * size as u64;
        self.file.read_exact_at(&mut bytes, at).map_err(MeasureError::io(&self.path, "reading a row"))?;
        let half =
            |f: fn(u16) -> f32| bytes.chunks_exact(2).map(|w| f(u16::from_le_bytes([w[0], w[1]]))).collect();
        Ok(match self.dtype {
            Dtype::F32 => {
                bytes.chunks_exact(4).map(|w| f32::from_le_bytes([w[0], w[1], w[2], w[3]])).collect()
            }
            Dtype::F16 => half(|w| f16::from_bits(w).to_f32()),
            Dtype::Bf16 => half(|w| bf16::from_bits(w).to_f32()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    const V: usize = 5;

    /// Two chunks of 8 tokens with rows 4..7 of each.
    fn sample(path: &Path, dtype: &str) -> Chunks {
        let tokens: Vec<u32> = (0..16).map(|i| i % V as u32).collect();
        let positions: Vec<u32> = [4, 5, 6, 12, 13, 14].to_vec();
        let size = if dtype == "F32" { 4 } else { 2 };
        let logits = positions.len() * V * size;
        let ends = [logits, logits + 24, logits + 24 + 64];
        let header = json!({
            "__metadata__": { "engine": "other" },
            "logits": { "dtype": dtype, "shape": [6, V], "data_offsets": [0, ends[0]] },
            "positions": { "dtype": "I32", "shape": [6], "data_offsets": [ends[0], ends[1]] },
            "input_ids": { "dtype": "I32", "shape": [16], "data_offsets": [ends[1], ends[2]] },
        })
        .to_string();
        let mut out = (header.len() as u64).to_le_bytes().to_vec();
        out.extend(header.as_bytes());
        for p in &positions {
            for v in 0..V as u32 {
                let value = (p * 8 + v) as f32;
                match dtype {
                    "F32" => out.extend(value.to_le_bytes()),
                    "F16" => out.extend(f16::from_f32(value).to_le_bytes()),
                    _ => out.extend(bf16::from_f32(value).to_le_bytes()),
                }
            }
        }
        out.extend(positions.iter().chain(&tokens).flat_map(|v| v.to_le_bytes()));
        std::fs::write(path, out).unwrap();
        Chunks::new("x", b"", &tokens, 8, None).unwrap()
    }

    #[test]
    fn rows_are_found_by_position_in_every_type() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.safetensors");
        for dtype in ["F32", "F16", "BF16"] {
            let chunks = sample(&path, dtype);
            let mut f = LogitsFile::open(&path).unwrap();
            f.check(&chunks).unwrap();
            assert_eq!(f.row(1, 2).unwrap(), (0..5).map(|v| 112.0 + v as f32).collect::<Vec<_>>());
            assert_eq!(f.metadata()["engine"], "other");
            let longer = Chunks::new("x", b"", &[0; 24], 8, None).unwrap();
            assert!(f.check(&longer).unwrap_err().to_string().contains("number of tokens"));
            let other = Chunks::new("x", b"", &[1; 16], 8, None).unwrap();
            assert!(f.check(&other).unwrap_err().to_string().contains("token 0 of chunk 0"));
            let missing = Chunks::new("x", b"", f.tokens(), 4, None).unwrap();
            assert!(f.check(&missing).unwrap_err().to_string().contains("position 2"));
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(cut in 0usize..400, at in 0usize..400, byte: u8) {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("a.safetensors");
            let chunks = sample(&path, "F16");
            let mut bytes = std::fs::read(&path).unwrap();
            bytes.truncate(bytes.len().saturating_sub(cut / 2));
            let n = bytes.len();
            bytes[at % n] = byte;
            std::fs::write(&path, &bytes).unwrap();
            if let Ok(mut f) = LogitsFile::open(&path) && f.check(&chunks).is_ok() {
                for r in 0..6 {
                    let _ = f.row(r / 3, r % 3);
                }
            }
        }
    }
}
