//! Our own reference file: per row the reference's most likely ids, the exact mass of all others, and the target.
//!
//! Layout in docs/kld.md. A row keeps its `top_k` largest BF16 logits word for word with the f64 normaliser, so their
//! log-probabilities come back exactly; the rest of the vocabulary becomes one bucket whose mass is exact. KL over these
//! buckets is a lower bound of the full KL. Every chunk ends with its digest, chained through the ones before.

use crate::error::{MeasureError, Result};
use crate::row::{Logits, RowScore, block_sum, score_of, widen};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{BufWriter, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

const MAGIC: &[u8; 8] = b"INFXKREF";
const VERSION: u32 = 1;
const MAX_HEADER: u32 = 1 << 20;
const MAX_ROWS: u64 = 1 << 24;
/// Ids a row keeps unless told otherwise: 1,560 bytes a row, 231 MB for 580 chunks of 512.
pub const TOP_K: u32 = 256;

/// What a file was made from; compared before it is used.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReferenceHeader {
    /// Corpus name.
    pub corpus: String,
    /// BLAKE3 of the corpus text, hex.
    pub corpus_blake3: String,
    /// BLAKE3 of the chunks' tokens as little-endian u32, hex.
    pub tokens_blake3: String,
    /// The reference model and how it ran.
    pub model: serde_json::Value,
    /// Tokens per chunk.
    pub ctx: u32,
    /// Chunks.
    pub chunks: u32,
    /// First scored position of a chunk.
    pub first_row: u32,
    /// Scored rows per chunk.
    pub rows: u32,
    /// Logits per row.
    pub vocab: u32,
    /// Ids that count.
    pub valid_vocab: u32,
    /// Ids kept per row.
    pub top_k: u32,
}

impl ReferenceHeader {
    fn row_bytes(&self) -> u64 {
        28 + 6 * u64::from(self.top_k)
    }

    fn chunk_bytes(&self) -> u64 {
        u64::from(self.rows) * self.row_bytes() + 32
    }

    fn check(&self) -> std::result::Result<(), String> {
        let all = u64::from(self.chunks) * u64::from(self.rows);
        if self.chunks == 0 || self.rows == 0 || all > MAX_ROWS {
            return Err(format!(
                "{} chunks of {} rows, expected 1..={MAX_ROWS} rows",
                self.chunks, self.rows
            ));
        }
        if u64::from(self.first_row) + u64::from(self.rows) >= u64::from(self.ctx) {
            return Err(format!("rows {}+{} in chunks of {}", self.first_row, self.rows, self.ctx));
        }
        if self.top_k == 0 || self.top_k > self.valid_vocab || self.valid_vocab > self.vocab {
            return Err(format!("{} ids kept of {} valid of {}", self.top_k, self.valid_vocab, self.vocab));
        }
        Ok(())
    }

    fn encode(&self) -> Result<Vec<u8>> {
        self.check().map_err(|what| MeasureError::Options(format!("reference file: {what}")))?;
        let json = serde_json::to_vec(self).map_err(|e| MeasureError::Options(e.to_string()))?;
        if json.len() > MAX_HEADER as usize {
            return Err(MeasureError::Options("the description of the reference is too long".into()));
        }
        let mut out = MAGIC.to_vec();
        out.extend(VERSION.to_le_bytes());
        out.extend((json.len() as u32).to_le_bytes());
        out.extend(json);
        let digest = blake3::hash(&out);
        out.extend(digest.as_bytes());
        Ok(out)
    }

    /// Refuses to go on where `found` was made from something else.
    pub fn must_equal(&self, found: &Self, file: &Path) -> Result<()> {
        let mismatch = |what: &str, expected: String, found: String| {
            Err(MeasureError::Mismatch {
                what: format!("{}: {what}", file.display()),
                expected,
                found,
                advice: "measure with what the reference was made from, or save a new one",
            })
        };
        let numbers = |h: &Self| [h.ctx, h.first_row, h.rows, h.vocab, h.valid_vocab, h.chunks];
        let names = ["context", "first row", "rows per chunk", "vocabulary", "valid ids", "chunks"];
        for (name, (a, b)) in names.iter().zip(numbers(self).into_iter().zip(numbers(found))) {
            if a != b {
                return mismatch(name, a.to_string(), b.to_string());
            }
        }
        if self.tokens_blake3 != found.tokens_blake3 {
            return mismatch("digest of the tokens", self.tokens_blake3.clone(), found.tokens_blake3.clone());
        }
        if self.corpus_blake3 != found.corpus_blake3 {
            return mismatch("digest of the corpus", self.corpus_blake3.clone(), found.corpus_blake3.clone());
        }
        Ok(())
    }
}

/// One stored row.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredRow {
    /// ln Σ exp(l) over the valid ids.
    pub lse: f64,
    /// Probability of all ids not kept.
    pub tail: f64,
    /// ln p of the token that followed.
    pub target_log_prob: f64,
    /// That token.
    pub target: u32,
    /// Kept ids with their BF16 logits, largest first, lowest id first on equality.
    pub top: Vec<(u32, u16)>,
}

impl StoredRow {
    /// Keeps the `k` largest logits of a row.
    pub fn new(row: &Logits, target: u32, k: usize) -> Self {
        let key = |id: &u32| (std::cmp::Reverse(order(row.word(*id as usize))), *id);
        let mut ids: Vec<u32> = (0..row.len() as u32).collect();
        let k = k.clamp(1, ids.len());
        if k < ids.len() {
            ids.select_nth_unstable_by_key(k - 1, key);
        }
        let mut kept = vec![false; ids.len()];
        ids[..k].iter().for_each(|id| kept[*id as usize] = true);
        ids.truncate(k);
        ids.sort_unstable_by_key(key);
        let tail = block_sum(row.len(), |i| if kept[i] { 0.0 } else { row.log_prob(i).exp() });
        let target_log_prob = row.log_prob(target as usize);
        let top = ids.into_iter().map(|id| (id, row.word(id as usize))).collect();
        Self { lse: row.lse(), tail, target_log_prob, target, top }
    }

    fn log_prob(&self, word: u16) -> f64 {
        f64::from(widen(word)) - self.lse
    }

    /// KL over the kept ids and one bucket for the rest: a lower bound of the full KL.
    pub fn score(&self, test: &Logits) -> RowScore {
        let mut kld = 0.0;
        let mut kept: Vec<u32> = self.top.iter().map(|t| t.0).collect();
        kept.sort_unstable();
        for (id, word) in &self.top {
            let p = self.log_prob(*word);
            kld += p.exp() * (p - test.log_prob(*id as usize));
        }
        if self.tail > 0.0 {
            // Summed over the other ids themselves: a difference from one would lose a small mass.
            let mut own = vec![true; test.len()];
            kept.iter().for_each(|id| own[*id as usize] = false);
            let rest = block_sum(test.len(), |i| if own[i] { test.log_prob(i).exp() } else { 0.0 });
            kld += self.tail * (self.tail.ln() - rest.ln());
        }
        let target = test.log_prob(self.target as usize);
        let same = self.top[0].0 as usize == test.top();
        score_of(kld.max(0.0), self.target_log_prob, target, same)
    }

    /// KL between two stored rows over the ids both keep and one bucket for the rest.
    pub fn score_stored(&self, test: &StoredRow) -> RowScore {
        let mut other: Vec<(u32, u16)> = test.top.clone();
        other.sort_unstable();
        let mut kld = 0.0;
        let (mut p_rest, mut q_rest) = (self.tail, test.tail);
        let mut shared = vec![false; other.len()];
        for (id, word) in &self.top {
            let p = self.log_prob(*word);
            match other.binary_search_by_key(id, |o| o.0) {
                Ok(at) => {
                    shared[at] = true;
                    kld += p.exp() * (p - test.log_prob(other[at].1));
                }
                Err(_) => p_rest += p.exp(),
            }
        }
        for (o, shared) in other.iter().zip(shared) {
            if !shared {
                q_rest += test.log_prob(o.1).exp();
            }
        }
        if p_rest > 0.0 && q_rest > 0.0 {
            kld += p_rest * (p_rest.ln() - q_rest.ln());
        }
        let same = self.top[0].0 == test.top[0].0;
        score_of(kld.max(0.0), self.target_log_prob, test.target_log_prob, same)
    }

    fn encode(&self, out: &mut Vec<u8>) {
        out.extend(self.lse.to_le_bytes());
        out.extend(self.tail.to_le_bytes());
        out.extend(self.target_log_prob.to_le_bytes());
        out.extend(self.target.to_le_bytes());
        out.extend(self.top.iter().flat_map(|t| t.0.to_le_bytes()));
        out.extend(self.top.iter().flat_map(|t| t.1.to_le_bytes()));
    }

    fn decode(bytes: &[u8], h: &ReferenceHeader) -> std::result::Result<Self, String> {
        let k = h.top_k as usize;
        let f = |at: usize| f64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let u = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let w = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let top: Vec<(u32, u16)> = (0..k).map(|i| (u(28 + 4 * i), w(28 + 4 * k + 2 * i))).collect();
        let row = Self { lse: f(0), tail: f(8), target_log_prob: f(16), target: u(24), top };
        if !row.lse.is_finite() || !(0.0..=1.0).contains(&row.tail) {
            return Err(format!("normaliser {} and tail {}", row.lse, row.tail));
        }
        if !row.target_log_prob.is_finite() || row.target_log_prob > 1e-9 || row.target >= h.valid_vocab {
            return Err(format!("target {} with ln p {}", row.target, row.target_log_prob));
        }
        if row.top.iter().any(|t| t.0 >= h.valid_vocab || !widen(t.1).is_finite()) {
            return Err(format!("an id beyond {} or a logit that is not finite", h.valid_vocab));
        }
        let mut ids: Vec<u32> = row.top.iter().map(|t| t.0).collect();
        ids.sort_unstable();
        let falls = |a: &(u32, u16), b: &(u32, u16)| {
            order(a.1) > order(b.1) || (order(a.1) == order(b.1) && a.0 < b.0)
        };
        if ids.windows(2).any(|w| w[0] == w[1]) || !row.top.windows(2).all(|w| falls(&w[0], &w[1])) {
            return Err("ids that are not distinct and in falling order".into());
        }
        let mass: f64 = row.top.iter().map(|t| row.log_prob(t.1).exp()).sum::<f64>() + row.tail;
        if (mass - 1.0).abs() > 1e-6 {
            return Err(format!("a total probability of {mass}"));
        }
        Ok(row)
    }
}

/// BF16 bits as integers in the order of their values, both zeros alike.
fn order(word: u16) -> i32 {
    let magnitude = i32::from(word & 0x7fff);
    if word & 0x8000 == 0 { magnitude } else { -magnitude }
}

/// Writes a reference file under `NAME.partial` and names it when it is whole.
#[derive(Debug)]
pub struct ReferenceWriter {
    path: PathBuf,
    partial: PathBuf,
    out: BufWriter<File>,
    header: ReferenceHeader,
    chain: blake3::Hash,
    done: u32,
}

impl ReferenceWriter {
    /// Bytes of the whole file.
    pub fn size(header: &ReferenceHeader) -> Result<u64> {
        Ok(header.encode()?.len() as u64 + u64::from(header.chunks) * header.chunk_bytes())
    }

    /// Starts a file; `done` chunks of an interrupted one are kept after their digests are checked.
    pub fn create(path: &Path, header: ReferenceHeader, done: usize) -> Result<Self> {
        let head = header.encode()?;
        let end = head.len() as u64 + done as u64 * header.chunk_bytes();
        let (file, partial) = crate::files::start(path, &head, end, done > 0)?;
        let mut chain = blake3::hash(&head);
        let mut bytes = vec![0; header.chunk_bytes() as usize];
        for chunk in 0..done as u64 {
            let at = head.len() as u64 + chunk * header.chunk_bytes();
            file.read_exact_at(&mut bytes, at).map_err(MeasureError::io(&partial, "resuming"))?;
            chain = check_chunk(&partial, chunk as usize, at, chain, &bytes)?;
        }
        let mut out = BufWriter::with_capacity(1 << 20, file);
        out.seek(SeekFrom::Start(end)).map_err(MeasureError::io(&partial, "seeking"))?;
        Ok(Self { path: path.to_owned(), partial, out, header, chain, done: done as u32 })
    }

    /// Appends a chunk and makes it safe.
    pub fn chunk(&mut self, rows: &[StoredRow]) -> Result<()> {
        if rows.len() != self.header.rows as usize
            || rows.iter().any(|r| r.top.len() != self.header.top_k as usize)
        {
            return Err(MeasureError::Options("a chunk that does not fit the reference file".into()));
        }
        let mut bytes = Vec::with_capacity(self.header.chunk_bytes() as usize);
        rows.iter().for_each(|r| r.encode(&mut bytes));
        self.chain = link(self.chain, &bytes);
        bytes.extend(self.chain.as_bytes());
        self.done += 1;
        let io = || MeasureError::io(&self.partial, "writing");
        self.out.write_all(&bytes).map_err(io())?;
        self.out.flush().map_err(io())?;
        self.out.get_ref().sync_data().map_err(io())
    }

    /// Gives the whole file its name.
    pub fn finish(self) -> Result<()> {
        if self.done != self.header.chunks {
            let what = format!("{} of {} chunks were written", self.done, self.header.chunks);
            return Err(MeasureError::Options(what));
        }
        crate::files::publish(&self.partial, &self.path)
    }
}

fn link(chain: blake3::Hash, rows: &[u8]) -> blake3::Hash {
    let mut hash = blake3::Hasher::new();
    hash.update(chain.as_bytes());
    hash.update(rows);
    hash.finalize()
}

fn check_chunk(
    path: &Path,
    chunk: usize,
    at: u64,
    chain: blake3::Hash,
    bytes: &[u8],
) -> Result<blake3::Hash> {
    let (rows, digest) = bytes.split_at(bytes.len() - 32);
    let found = link(chain, rows);
    if found.as_bytes() != digest {
        let what = format!("the digest of chunk {chunk} does not hold: the file is damaged, save it again");
        return Err(MeasureError::format(path, at, what));
    }
    Ok(found)
}

/// A reference file open for reading, chunk after chunk.
#[derive(Debug)]
pub struct ReferenceFile {
    path: PathBuf,
    file: File,
    header: Box<ReferenceHeader>,
    start: u64,
    /// Digest before the next chunk, and that chunk.
    chain: (blake3::Hash, usize),
    head: blake3::Hash,
}

impl ReferenceFile {
    /// Opens a file and checks its header and size.
    pub fn open(path: &Path) -> Result<Self> {
        let wrong = |offset, what: String| MeasureError::format(path, offset, what);
        let mut file = File::open(path).map_err(MeasureError::io(path, "opening"))?;
        let length = file.metadata().map_err(MeasureError::io(path, "opening"))?.len();
        let mut lead = [0; 16];
        if length < 48 || file.read_exact(&mut lead).is_err() || &lead[..8] != MAGIC {
            return Err(wrong(0, "no `INFXKREF` mark: not a reference file of kld --save-reference".into()));
        }
        let word = |at: usize| u32::from_le_bytes([lead[at], lead[at + 1], lead[at + 2], lead[at + 3]]);
        if word(8) != VERSION {
            return Err(wrong(8, format!("version {}, this program reads {VERSION}", word(8))));
        }
        let json = word(12);
        if json > MAX_HEADER || u64::from(json) + 48 > length {
            return Err(wrong(12, format!("a header of {json} bytes in a file of {length}")));
        }
        let mut head = lead.to_vec();
        head.resize(16 + json as usize, 0);
        let mut digest = [0; 32];
        file.read_exact(&mut head[16..])
            .and_then(|()| file.read_exact(&mut digest))
            .map_err(MeasureError::io(path, "reading the header"))?;
        if blake3::hash(&head).as_bytes() != &digest {
            return Err(wrong(16, "the header's digest does not hold: the file is damaged".into()));
        }
        let header: Box<ReferenceHeader> =
            serde_json::from_slice(&head[16..]).map_err(|e| wrong(16, format!("header: {e}")))?;
        header.check().map_err(|what| wrong(16, what))?;
        let start = head.len() as u64 + 32;
        let expected = start + u64::from(header.chunks) * header.chunk_bytes();
        if length != expected {
            return Err(wrong(
                length.min(expected),
                format!("{length} bytes where the header asks for {expected}"),
            ));
        }
        head.extend(digest);
        let head = blake3::hash(&head);
        Ok(Self { path: path.to_owned(), file, header, start, chain: (head, 0), head })
    }

    /// What it was made from.
    pub fn header(&self) -> &ReferenceHeader {
        &self.header
    }

    /// Its file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads and checks a chunk.
    pub fn chunk(&mut self, chunk: usize) -> Result<Vec<StoredRow>> {
        if chunk >= self.header.chunks as usize {
            let what = format!("chunk {chunk}; the file has {}", self.header.chunks);
            return Err(MeasureError::format(&self.path, self.start, what));
        }
        if chunk < self.chain.1 {
            self.chain = (self.head, 0);
        }
        let mut bytes = vec![0; self.header.chunk_bytes() as usize];
        loop {
            let (chain, next) = self.chain;
            let at = self.start + next as u64 * self.header.chunk_bytes();
            self.file.read_exact_at(&mut bytes, at).map_err(MeasureError::io(&self.path, "reading"))?;
            self.chain = (check_chunk(&self.path, next, at, chain, &bytes)?, next + 1);
            if next == chunk {
                let size = self.header.row_bytes() as usize;
                let rows = bytes[..bytes.len() - 32].chunks_exact(size).enumerate();
                let decode = |(i, b)| {
                    let at = at + (i * size) as u64;
                    StoredRow::decode(b, &self.header).map_err(|what| {
                        MeasureError::format(&self.path, at, format!("row {i} of chunk {chunk}: {what}"))
                    })
                };
                return rows.map(decode).collect();
            }
        }
    }
}
