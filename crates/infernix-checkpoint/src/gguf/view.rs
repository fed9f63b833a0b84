//! A GGUF model as the checkpoint that it was made from: source names, source shapes, source order of rows.
//!
//! Nothing is decoded but what the converter computed (norms, A_log). Rows move whole, whatever their type; columns move
//! by whole blocks, and where blocks cross heads the stored order stays and is told ([`View::kept_columns`]). The experts of
//! a layer appear one by one, so that each can become a record.

use std::collections::BTreeMap;
use std::ops::Range;

use infernix_formats::ggml::GgmlType;

use super::Gguf;
use super::names::{HASH_CONSTANTS, Piece, TiledHeads, Values, map, vision};
use crate::{CheckpointError, Dtype, Origin, TensorInfo};

/// How the language model's tensors are called.
const PREFIX: &str = "model.language_model.";
/// Most experts of a layer that are believed.
const MAX_EXPERTS: u64 = 1 << 16;
/// Runs that a tensor is put together from at most (a patch embedding has one a channel, colour and frame).
const MAX_RUNS: u64 = 1 << 20;
/// Bytes read per step where rows are put together.
const STEP_BYTES: u64 = 1 << 20;

/// Rows of a source tensor that are rows of one GGUF tensor.
#[derive(Debug)]
struct Part {
    piece: Piece,
    /// Number of the GGUF tensor.
    tensor: u32,
    /// Stored row of the part's first row (rows of an expert lie within a stack).
    first: u64,
    rows: u64,
}

impl Part {
    fn stored_row(&self, row: u64) -> u64 {
        self.first + self.piece.stored_row(row)
    }

    /// How many rows from `row` on follow each other in the file.
    fn run(&self, row: u64) -> u64 {
        let left = self.rows - row;
        match &self.piece.heads {
            Some(h) if !h.columns => {
                let until = match row.checked_sub(h.first) {
                    None => h.first - row,
                    Some(behind) => h.width - behind % h.width,
                };
                left.min(until)
            }
            _ => left,
        }
    }
}

/// What a tensor of the view consists of.
#[derive(Debug)]
enum Entry {
    /// Rows of GGUF tensors, `row_bytes` each as seen here.
    Rows { parts: Vec<Part>, row_bytes: u64, derived: bool },
    /// Words that the file keeps as metadata.
    Words(Vec<u8>),
}

/// The model and what it looks like.
#[derive(Debug)]
pub(crate) struct View {
    pub(crate) gguf: Gguf,
    /// In the order of the checkpoint's tensors.
    entries: Vec<Entry>,
}

/// How a plain type appears.
fn dtype(ty: GgmlType) -> Dtype {
    match ty {
        GgmlType::F32 => Dtype::F32,
        GgmlType::F16 => Dtype::F16,
        GgmlType::Bf16 => Dtype::Bf16,
        GgmlType::F64 => Dtype::F64,
        GgmlType::I8 => Dtype::I8,
        GgmlType::I16 => Dtype::I16,
        GgmlType::I32 => Dtype::I32,
        GgmlType::I64 => Dtype::I64,
        blocks => Dtype::Ggml(blocks),
    }
}

struct Builder<'g> {
    gguf: &'g Gguf,
    list: Vec<(TensorInfo, Entry)>,
}

impl View {
    /// Builds the view and the list of its tensors, in the order of the files.
    ///
    /// # Errors
    /// As [`map`]; parts of one tensor that are of different types; a vector in blocks whose heads would have to move.
    pub(crate) fn new(gguf: Gguf) -> Result<(Self, Vec<TensorInfo>), CheckpointError> {
        let mut by_source: BTreeMap<String, Vec<Piece>> = BTreeMap::new();
        let pieces = if vision::is_tower(&gguf) { vision::map(&gguf)? } else { map(&gguf, PREFIX)? };
        for piece in pieces {
            by_source.entry(piece.source.clone()).or_default().push(piece);
        }
        let mut b = Builder { gguf: &gguf, list: Vec::new() };
        for (source, pieces) in by_source {
            b.scales(&pieces)?;
            if let Some(prefix) = source.strip_suffix(".gate_up_proj") {
                for piece in &pieces {
                    // A part of the fused tensor is all gate or all up rows; the whole holds both.
                    match &piece.fill {
                        Some(slice) => {
                            let matrix = if slice.range.start == 0 { "gate" } else { "up" };
                            b.experts(prefix, piece, &[matrix])?;
                        }
                        None => b.experts(prefix, piece, &["gate", "up"])?,
                    }
                }
            } else if let Some(prefix) = source.strip_suffix(".experts.down_proj") {
                for piece in &pieces {
                    b.experts(&format!("{prefix}.experts"), piece, &["down"])?;
                }
            } else {
                b.tensor(source, pieces)?;
            }
        }
        b.hash_constants()?;
        let mut list = b.list;
        list.sort_by(|a, b| {
            let key = |t: &TensorInfo| (t.shard, t.offset, t.bytes);
            key(&a.0).cmp(&key(&b.0)).then_with(|| a.0.name.cmp(&b.0.name))
        });
        let (tensors, entries) = list.into_iter().unzip();
        Ok((Self { gguf, entries }, tensors))
    }

    /// Whether the words were computed by the converter and are computed back here (norms, A_log).
    pub(crate) fn is_derived(&self, tensor: usize) -> bool {
        matches!(self.entries.get(tensor), Some(Entry::Rows { derived: true, .. }))
    }

    /// Whether rows or columns are in another order than stored.
    pub(crate) fn is_permuted(&self, tensor: usize) -> bool {
        let Some(Entry::Rows { parts, .. }) = self.entries.get(tensor) else { return false };
        parts.iter().any(|p| p.piece.heads.is_some()) && self.kept_columns(tensor).is_none()
    }

    /// The order of columns where they could not be moved, see [`crate::SourceTensor::stored_columns`].
    pub(crate) fn kept_columns(&self, tensor: usize) -> Option<TiledHeads> {
        let Some(Entry::Rows { parts, derived: false, .. }) = self.entries.get(tensor) else { return None };
        parts.iter().find_map(|p| {
            let ty = self.gguf.tensors[p.tensor as usize].ty;
            p.piece.heads.filter(|h| !h.moves_blocks_of(ty.block_len()))
        })
    }

    /// Where bytes of a tensor of the view come from, see [`crate::Checkpoint::origins`].
    pub(crate) fn origins(&self, tensor: usize, range: Range<u64>) -> Vec<Origin<'_>> {
        let Some(Entry::Rows { parts, row_bytes, derived }) = self.entries.get(tensor) else {
            return Vec::new();
        };
        let mut out = Vec::new();
        let mut begin = 0;
        for part in parts {
            let stored = &self.gguf.tensors[part.tensor as usize];
            let end = begin + part.rows * row_bytes;
            let (a, b) = (range.start.max(begin), range.end.min(end));
            if a < b {
                let per = stored.row_bytes();
                let (first, last) = if *derived || part.piece.heads.is_some() || part.piece.take.is_some() {
                    // Put together from rows of all of it.
                    (part.first * per, (part.first + part.rows) * per)
                } else {
                    (part.first * per + a - begin, part.first * per + b - begin)
                };
                out.push(Origin {
                    shard: stored.shard,
                    tensor: &stored.name,
                    bytes: stored.offset + first..stored.offset + last,
                });
            }
            begin = end;
        }
        out
    }

    /// Reads bytes of tensor number `tensor`; `out` has the length of `range`, which lies in the tensor.
    pub(crate) fn read(
        &self,
        tensor: usize,
        range: Range<u64>,
        out: &mut [u8],
    ) -> Result<(), CheckpointError> {
        let (parts, row_bytes, derived) = match &self.entries[tensor] {
            Entry::Words(words) => {
                out.copy_from_slice(&words[range.start as usize..range.end as usize]);
                return Ok(());
            }
            Entry::Rows { parts, row_bytes, derived } => (parts, (*row_bytes).max(1), *derived),
        };
        let mut buffer = Rebuilt::default();
        let mut done = 0usize;
        while done < out.len() {
            let at = range.start + done as u64;
            let (mut row, skip) = (at / row_bytes, at % row_bytes);
            let mut parts = parts.iter();
            let part = loop {
                match parts.next() {
                    Some(p) if row < p.rows => break p,
                    Some(p) => row -= p.rows,
                    // The tensor's bytes are those of its parts.
                    None => return Ok(()),
                }
            };
            let stored = &self.gguf.tensors[part.tensor as usize];
            let left = out.len() - done;
            let rows = (skip + left as u64).div_ceil(row_bytes).min(part.run(row));
            let moved =
                part.piece.heads.is_some_and(|h| h.columns && h.moves_blocks_of(stored.ty.block_len()));
            if !derived && !moved && part.piece.take.is_none() {
                let take = left.min((rows * row_bytes - skip) as usize);
                let start = part.stored_row(row) * row_bytes + skip;
                self.gguf.read(stored, start..start + take as u64, &mut out[done..done + take])?;
                done += take;
                continue;
            }
            let rows = rows.min((STEP_BYTES / stored.row_bytes().max(1)).max(1));
            if derived {
                buffer.derive(&self.gguf, stored, part, row, rows)?;
            } else {
                buffer.place(&self.gguf, stored, part, row, rows, moved)?;
            }
            let bytes = &buffer.bytes[skip as usize..];
            let take = left.min(bytes.len());
            out[done..done + take].copy_from_slice(&bytes[..take]);
            done += take;
        }
        Ok(())
    }
}

/// Rows put together from stored ones.
#[derive(Default)]
struct Rebuilt {
    stored: Vec<u8>,
    values: Vec<f32>,
    bytes: Vec<u8>,
}

impl Rebuilt {
    /// Takes the columns that belong to the part, heads in the source's order.
    fn place(
        &mut self,
        gguf: &Gguf,
        t: &super::GgufTensor,
        part: &Part,
        row: u64,
        rows: u64,
        moved: bool,
    ) -> Result<(), CheckpointError> {
        let (per, first) = (t.row_bytes(), part.stored_row(row));
        self.stored.resize((rows * per) as usize, 0);
        gguf.read(t, first * per..(first + rows) * per, &mut self.stored)?;
        let (values, size) = (t.ty.block_len(), t.ty.block_bytes());
        let start = part.piece.take.as_ref().map_or(0, |r| r.start);
        self.bytes.clear();
        for stored in self.stored.chunks_exact(per as usize) {
            for block in 0..part.piece.columns() / values {
                let column = match &part.piece.heads {
                    Some(h) if moved => h.stored(block * values),
                    _ => block * values,
                };
                let at = ((start + column) / values * size) as usize;
                self.bytes.extend_from_slice(&stored[at..at + size as usize]);
            }
        }
        Ok(())
    }

    /// Computes back what the converter computed, as F32 words.
    fn derive(
        &mut self,
        gguf: &Gguf,
        t: &super::GgufTensor,
        part: &Part,
        row: u64,
        rows: u64,
    ) -> Result<(), CheckpointError> {
        let (k, columns) = (t.row_len() as usize, part.piece.columns() as usize);
        let first = part.stored_row(row);
        self.values.resize(rows as usize * k, 0.0);
        gguf.read_rows_f32(t, first..first + rows, &mut self.values)?;
        self.bytes.clear();
        let mut undone = vec![0f32; columns];
        for (r, stored) in (first..).zip(self.values.chunks_exact(k)) {
            part.piece.undo_row(stored, &mut undone);
            if part.piece.values == Values::OnePlus
                && let Some(i) = stored.iter().position(|v| 1.0 + (v - 1.0) != *v)
            {
                return Err(CheckpointError::IllegalWord {
                    shard: gguf.shard_of(t).name.clone(),
                    tensor: t.name.to_string(),
                    row: r,
                    column: i as u64,
                    offset: t.offset + r * t.row_bytes() + i as u64 * t.ty.block_bytes(),
                    expected: "1 + w of a weight w that F32 holds",
                    found: format!("{}", stored[i]),
                });
            }
            self.bytes.extend(undone.iter().flat_map(|v| v.to_le_bytes()));
        }
        Ok(())
    }
}

impl Builder<'_> {
    fn number(&self, name: &str) -> Option<u32> {
        let g = self.gguf;
        let at = g.by_name.binary_search_by(|&i| (*g.tensors[i as usize].name).cmp(name)).ok()?;
        Some(g.by_name[at])
    }

    fn fail(piece: &Piece, reason: String) -> CheckpointError {
        CheckpointError::GgufName { tensor: piece.tensor.clone(), reason }
    }

    /// NVFP4 tensors whose second scale lies beside them are more than their blocks.
    fn scales(&self, pieces: &[Piece]) -> Result<(), CheckpointError> {
        for piece in pieces {
            let base = piece.tensor.strip_suffix(".weight").unwrap_or(&piece.tensor);
            if self.gguf.get(&format!("{base}.scale")).is_some() {
                let reason = "it has a second scale beside it, which is not converted; convert the checkpoint that it was made from";
                return Err(Self::fail(piece, reason.to_owned()));
            }
        }
        Ok(())
    }

    fn part(&self, piece: Piece, first: u64, rows: u64) -> Result<Part, CheckpointError> {
        let tensor = self.number(&piece.tensor);
        let tensor = tensor.ok_or_else(|| Self::fail(&piece, "the file does not hold it".to_owned()))?;
        Ok(Part { piece, tensor, first, rows })
    }

    fn push(&mut self, name: String, shape: Vec<u64>, parts: Vec<Part>) -> Result<(), CheckpointError> {
        let Some(head) = parts.first() else { return Ok(()) };
        let types: Vec<_> = parts.iter().map(|p| self.gguf.tensors[p.tensor as usize].ty).collect();
        let stored = &self.gguf.tensors[head.tensor as usize];
        let fail = |reason: String| Self::fail(&head.piece, reason);
        if let Some(other) = types.iter().find(|t| **t != types[0]) {
            let text = format!(
                "it is {}, the other part of {name} is {other}; parts of two types are not read",
                types[0]
            );
            return Err(fail(text));
        }
        let derived = head.piece.values != Values::Same;
        let columns = head.piece.columns();
        let (ty, block) = (stored.ty, stored.ty.block_len());
        if columns % block != 0 || head.piece.take.as_ref().is_some_and(|r| r.start % block != 0) {
            return Err(fail(format!("its columns are cut inside a block of {ty}")));
        }
        if shape.len() < 2 && !derived && head.piece.heads.is_some_and(|h| !h.moves_blocks_of(block)) {
            return Err(fail(format!("a vector of heads in blocks of {ty} cannot be put in order")));
        }
        let dtype = if derived { Dtype::F32 } else { dtype(ty) };
        let row_bytes = dtype.byte_len(&[columns]).unwrap_or(0);
        let rows: u64 = parts.iter().map(|p| p.rows).sum();
        let bytes =
            rows.checked_mul(row_bytes).ok_or_else(|| fail("its size does not fit 64 bits".to_owned()))?;
        let offset = stored.offset + head.stored_row(0) * stored.row_bytes();
        let info =
            TensorInfo { name: name.into(), dtype, shape: shape.into(), shard: stored.shard, offset, bytes };
        self.list.push((info, Entry::Rows { parts, row_bytes, derived }));
        Ok(())
    }

    fn tensor(&mut self, source: String, pieces: Vec<Piece>) -> Result<(), CheckpointError> {
        let shape = pieces.first().map(|p| p.source_shape.clone()).unwrap_or_default();
        let mut parts = Vec::new();
        for piece in pieces {
            // A part along an inner axis is a run of rows in each of the outer ones.
            let (runs, rows) = match &piece.fill {
                Some(slice) if slice.axis > 0 => {
                    let runs: u64 = piece.source_shape[..slice.axis].iter().product();
                    (runs, piece.rows().checked_div(runs).unwrap_or(0))
                }
                _ => (1, piece.rows()),
            };
            if runs > MAX_RUNS {
                return Err(Self::fail(&piece, format!("shape {:?} is in more than {MAX_RUNS} runs", shape)));
            }
            for run in 0..runs {
                parts.push((piece.source_row(run * rows), self.part(piece.clone(), run * rows, rows)?));
            }
        }
        parts.sort_by_key(|p| p.0);
        self.push(source, shape, parts.into_iter().map(|p| p.1).collect())
    }

    /// The experts of a stack `[E, rows, K]`, each cut into `matrices` of equal height.
    fn experts(&mut self, prefix: &str, piece: &Piece, matrices: &[&str]) -> Result<(), CheckpointError> {
        let &[experts, rows, k] = &piece.stored_shape[..] else {
            return Err(Self::fail(
                piece,
                format!("expected three dimensions, found {:?}", piece.stored_shape),
            ));
        };
        let parts = matrices.len() as u64;
        if experts > MAX_EXPERTS || rows % parts != 0 {
            return Err(Self::fail(piece, format!("shape {:?} is no stack of experts", piece.stored_shape)));
        }
        let rows = rows / parts;
        for e in 0..experts {
            for (m, matrix) in (0..).zip(matrices) {
                let part = self.part(piece.clone(), (e * parts + m) * rows, rows)?;
                self.push(format!("{prefix}.{e}.{matrix}_proj.weight"), vec![rows, k], vec![part])?;
            }
        }
        Ok(())
    }

    /// Hash constants of the n-gram table, as the integer buffers of a checkpoint.
    fn hash_constants(&mut self) -> Result<(), CheckpointError> {
        let g = self.gguf;
        let Some(layer) = g.unsigned_list("qwen4exp.ple.layers")?.and_then(|l| l.first().copied()) else {
            return Ok(());
        };
        for (key, name) in HASH_CONSTANTS {
            let Some(values) = g.unsigned_list(&format!("qwen4exp.{key}"))? else { continue };
            let words: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            let info = TensorInfo {
                name: format!("{PREFIX}layers.{layer}.{name}").into(),
                dtype: Dtype::I64,
                shape: [values.len() as u64].into(),
                shard: 0,
                offset: 0,
                bytes: words.len() as u64,
            };
            self.list.push((info, Entry::Words(words)));
        }
        Ok(())
    }
}
