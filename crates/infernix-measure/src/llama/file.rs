//! llama.cpp's `_logits_` base file, read and written row by row.
//!
//! Little-endian, no padding between parts: `_logits_`, i32 context, i32 vocabulary, i32 chunks, the tokens, then for
//! each chunk `context − 1 − context / 2` rows of f32 scale, f32 minimum, one u16 code an id and one more if the
//! vocabulary is odd. Nothing in a file is trusted: sizes are checked against the file's length before anything is
//! allocated.

use super::row::CodedRow;
use crate::error::{MeasureError, Result};
use std::fs::File;
use std::io::{BufWriter, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

const MAGIC: &[u8; 8] = b"_logits_";
const HEADER: u64 = 20;
/// More than any model or corpus has; keeps products far from overflow and tables small.
const MAX_CONTEXT: u32 = 1 << 24;
const MAX_VOCAB: u32 = 1 << 24;
const MAX_TOKENS: u64 = 1 << 28;

/// Sizes of a base file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BaseHeader {
    /// Tokens per chunk.
    pub ctx: u32,
    /// Ids per row.
    pub vocab: u32,
    /// Chunks.
    pub chunks: u32,
}

impl BaseHeader {
    /// Rows stored per chunk.
    pub fn rows_per_chunk(&self) -> usize {
        (self.ctx - 1 - self.ctx / 2) as usize
    }

    fn row_bytes(&self) -> u64 {
        8 + 2 * (u64::from(self.vocab) + u64::from(self.vocab) % 2)
    }

    fn tokens(&self) -> u64 {
        u64::from(self.chunks) * u64::from(self.ctx)
    }

    fn rows_at(&self, chunk: u64) -> u64 {
        HEADER + 4 * self.tokens() + chunk * self.rows_per_chunk() as u64 * self.row_bytes()
    }

    /// Size of the whole file.
    pub fn bytes(&self) -> u64 {
        self.rows_at(u64::from(self.chunks))
    }

    /// Refuses sizes no file can have.
    fn check(&self) -> std::result::Result<(), String> {
        let Self { ctx, vocab, chunks } = *self;
        if !(3..=MAX_CONTEXT).contains(&ctx) {
            return Err(format!("context {ctx}, expected 3..={MAX_CONTEXT}"));
        }
        if !(1..=MAX_VOCAB).contains(&vocab) {
            return Err(format!("vocabulary {vocab}, expected 1..={MAX_VOCAB}"));
        }
        if chunks == 0 || self.tokens() > MAX_TOKENS {
            return Err(format!("{chunks} chunks of {ctx} tokens, expected 1..={MAX_TOKENS} tokens in all"));
        }
        Ok(())
    }
}

/// A base file open for reading.
#[derive(Debug)]
pub struct BaseFile {
    path: PathBuf,
    file: File,
    header: BaseHeader,
    tokens: Vec<u32>,
}

impl BaseFile {
    /// Opens a file, checks its sizes and reads its tokens.
    pub fn open(path: &Path) -> Result<Self> {
        let mut file = File::open(path).map_err(MeasureError::io(path, "opening"))?;
        let length = file.metadata().map_err(MeasureError::io(path, "opening"))?.len();
        let wrong = |offset, what: String| MeasureError::format(path, offset, what);
        let mut head = [0; HEADER as usize];
        if length < HEADER {
            return Err(wrong(0, format!("{length} bytes, a base file has at least {HEADER}")));
        }
        file.read_exact(&mut head).map_err(MeasureError::io(path, "reading the header"))?;
        if &head[..8] != MAGIC {
            return Err(wrong(0, "no `_logits_` mark: not a base file of llama-perplexity".into()));
        }
        let word = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let header = BaseHeader { ctx: word(8), vocab: word(12), chunks: word(16) };
        header.check().map_err(|what| wrong(8, what))?;
        if length != header.bytes() {
            let advice = if length < header.bytes() {
                "the writer was interrupted"
            } else {
                "bytes follow the last row"
            };
            return Err(wrong(
                length.min(header.bytes()),
                format!("{length} bytes where the header asks for {}: {advice}", header.bytes()),
            ));
        }
        let mut bytes = vec![0; 4 * header.tokens() as usize];
        file.read_exact(&mut bytes).map_err(MeasureError::io(path, "reading tokens"))?;
        let mut tokens = Vec::with_capacity(header.tokens() as usize);
        for (i, b) in bytes.chunks_exact(4).enumerate() {
            let id = u32::from_le_bytes([b[0], b[1], b[2], b[3]]);
            if id >= header.vocab {
                let what = format!("token {i} is {}, the vocabulary has {} ids", id as i32, header.vocab);
                return Err(wrong(HEADER + 4 * i as u64, what));
            }
            tokens.push(id);
        }
        Ok(Self { path: path.to_owned(), file, header, tokens })
    }

    /// Its sizes.
    pub fn header(&self) -> BaseHeader {
        self.header
    }

    /// Its file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All tokens, chunk after chunk.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Reads one row; `chunk` and `row` must exist.
    pub fn row(&self, chunk: usize, row: usize) -> Result<CodedRow> {
        let h = &self.header;
        if chunk >= h.chunks as usize || row >= h.rows_per_chunk() {
            return Err(MeasureError::Options(format!(
                "{}: row {row} of chunk {chunk}; it has {} chunks of {} rows",
                self.path.display(),
                h.chunks,
                h.rows_per_chunk()
            )));
        }
        let at = h.rows_at(chunk as u64) + row as u64 * h.row_bytes();
        let mut bytes = vec![0; h.row_bytes() as usize];
        self.file.read_exact_at(&mut bytes, at).map_err(MeasureError::io(&self.path, "reading a row"))?;
        let float = |i: usize| f32::from_le_bytes([bytes[i], bytes[i + 1], bytes[i + 2], bytes[i + 3]]);
        let (scale, min_log_prob) = (float(0), float(4));
        if !((0.0..=1.0).contains(&scale) && min_log_prob.is_finite() && min_log_prob <= 1e-3) {
            let what = format!("row {row} of chunk {chunk} has scale {scale} and minimum {min_log_prob}");
            return Err(MeasureError::format(&self.path, at, what));
        }
        let codes = bytes[8..].chunks_exact(2).take(h.vocab as usize);
        let codes = codes.map(|b| u16::from_le_bytes([b[0], b[1]])).collect();
        Ok(CodedRow { scale, min_log_prob, codes })
    }
}

/// Writes a base file under `NAME.partial` and names it when it is whole.
#[derive(Debug)]
pub struct BaseWriter {
    path: PathBuf,
    partial: PathBuf,
    out: BufWriter<File>,
    header: BaseHeader,
    rows: u64,
}

impl BaseWriter {
    /// Starts a file; `done` chunks of an interrupted one are kept. `tokens` are all chunks' tokens.
    pub fn create(path: &Path, header: BaseHeader, tokens: &[u32], done: usize) -> Result<Self> {
        header.check().map_err(MeasureError::Options)?;
        if tokens.len() as u64 != header.tokens() {
            return Err(MeasureError::Options(format!(
                "{} tokens for {} chunks of {}",
                tokens.len(),
                header.chunks,
                header.ctx
            )));
        }
        let mut head = MAGIC.to_vec();
        for word in [header.ctx, header.vocab, header.chunks].iter().chain(tokens) {
            head.extend(word.to_le_bytes());
        }
        let (file, partial) = crate::files::start(path, &head, header.rows_at(done as u64), done > 0)?;
        let mut out = BufWriter::with_capacity(1 << 20, file);
        let end = header.rows_at(done as u64);
        out.seek(SeekFrom::Start(end)).map_err(MeasureError::io(&partial, "seeking"))?;
        let rows = (done * header.rows_per_chunk()) as u64;
        Ok(Self { path: path.to_owned(), partial, out, header, rows })
    }

    /// Appends a row of finite logits, `[vocab]`.
    pub fn row(&mut self, logits: &[f32]) -> Result<()> {
        if logits.len() != self.header.vocab as usize {
            let what = format!("a row of {} logits for {} ids", logits.len(), self.header.vocab);
            return Err(MeasureError::Options(what));
        }
        super::row::check(self.rows as usize, logits)?;
        self.coded(&CodedRow::encode(logits))
    }

    fn coded(&mut self, row: &CodedRow) -> Result<()> {
        let mut bytes = Vec::with_capacity(self.header.row_bytes() as usize);
        bytes.extend(row.scale.to_le_bytes());
        bytes.extend(row.min_log_prob.to_le_bytes());
        bytes.extend(row.codes.iter().flat_map(|c| c.to_le_bytes()));
        bytes.resize(self.header.row_bytes() as usize, 0);
        self.rows += 1;
        self.out.write_all(&bytes).map_err(MeasureError::io(&self.partial, "writing"))
    }

    /// Makes what has been written safe.
    pub fn sync(&mut self) -> Result<()> {
        self.out.flush().map_err(MeasureError::io(&self.partial, "writing"))?;
        self.out.get_ref().sync_data().map_err(MeasureError::io(&self.partial, "writing"))
    }

    /// Gives the whole file its name.
    pub fn finish(mut self) -> Result<()> {
        self.sync()?;
        let expected = u64::from(self.header.chunks) * self.header.rows_per_chunk() as u64;
        if self.rows != expected {
            let what = format!("{} of {expected} rows were written", self.rows);
            return Err(MeasureError::Options(what));
        }
        crate::files::publish(&self.partial, &self.path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const HEAD: BaseHeader = BaseHeader { ctx: 8, vocab: 5, chunks: 2 };

    fn sample(path: &Path) -> Vec<Vec<f32>> {
        let tokens: Vec<u32> = (0..16).map(|i| i % 5).collect();
        let mut w = BaseWriter::create(path, HEAD, &tokens, 0).unwrap();
        let row = |r: usize| (0..5).map(|i| ((r * 5 + i) % 7) as f32 - 2.0).collect::<Vec<f32>>();
        let rows: Vec<_> = (0..6).map(row).collect();
        rows.iter().for_each(|r| w.row(r).unwrap());
        w.finish().unwrap();
        rows
    }

    #[test]
    fn rows_come_back_as_they_were_coded() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.kld");
        let rows = sample(&path);
        let file = BaseFile::open(&path).unwrap();
        assert_eq!(file.header(), HEAD);
        assert_eq!(std::fs::metadata(&path).unwrap().len(), HEAD.bytes());
        for (i, row) in rows.iter().enumerate() {
            assert_eq!(file.row(i / 3, i % 3).unwrap(), CodedRow::encode(row));
        }
        assert!(file.row(2, 0).is_err() && file.row(0, 3).is_err());
        assert!(!path.with_extension("kld.partial").exists());
        let again = BaseWriter::create(&path, HEAD, &[0; 16], 0).unwrap_err().to_string();
        assert!(again.contains("exists"), "{again}");
    }

    #[test]
    fn hostile_sizes_are_refused_before_anything_is_allocated() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.kld");
        for words in [
            [u32::MAX, u32::MAX, u32::MAX],
            [512, 4096, u32::MAX],
            [0x7fff_ffff, 1, 1],
            [2, 5, 1],
            [0, 5, 1],
            [512, 0, 1],
            [512, 1 << 25, 1],
            [512, 4096, 0],
            [512, 4096, 1],
        ] {
            let mut bytes = MAGIC.to_vec();
            bytes.extend(words.iter().flat_map(|w| w.to_le_bytes()));
            bytes.extend([0; 64]);
            std::fs::write(&path, bytes).unwrap();
            assert!(BaseFile::open(&path).is_err(), "{words:?}");
        }
    }

    #[test]
    fn a_token_beyond_the_vocabulary_and_a_row_without_sense_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.kld");
        sample(&path);
        let good = std::fs::read(&path).unwrap();
        let mut bad = good.clone();
        bad[20 + 4 * 3..20 + 4 * 4].copy_from_slice(&(-1i32).to_le_bytes());
        std::fs::write(&path, &bad).unwrap();
        let e = BaseFile::open(&path).unwrap_err().to_string();
        assert!(e.contains("token 3 is -1"), "{e}");
        for (at, word) in [(0, f32::NAN), (0, -1.0), (4, f32::INFINITY), (4, 5.0)] {
            let mut bad = good.clone();
            let row = HEAD.rows_at(1) as usize + at;
            bad[row..row + 4].copy_from_slice(&word.to_le_bytes());
            std::fs::write(&path, &bad).unwrap();
            let file = BaseFile::open(&path).unwrap();
            assert!(file.row(0, 0).is_ok());
            assert!(file.row(1, 0).unwrap_err().to_string().contains("row 0 of chunk 1"));
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(cut in 0usize..200, at in 0usize..200, byte: u8) {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("a.kld");
            sample(&path);
            let mut bytes = std::fs::read(&path).unwrap();
            bytes.truncate(bytes.len().saturating_sub(cut / 2));
            let n = bytes.len();
            bytes[at % n] = byte;
            std::fs::write(&path, &bytes).unwrap();
            if let Ok(file) = BaseFile::open(&path) {
                for c in 0..file.header().chunks as usize {
                    for r in 0..file.header().rows_per_chunk() {
                        let _ = file.row(c, r);
                    }
                }
            }
        }
    }
}
