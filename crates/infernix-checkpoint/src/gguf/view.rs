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
use super::nvfp4::{self, Plane};
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
#[derive(Debug, Clone)]
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
    /// One plane of NVFP4 blocks, as a checkpoint keeps it apart, see [`super::nvfp4`].
    Nvfp4 { part: Part, plane: Plane },
    /// Number `index` of an FP32 tensor: a second scale, or an activation scale.
    Scale { tensor: u32, index: u64 },
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
    /// Whether NVFP4 tensors have second scales: then all are read as planes, and one that lacks its own has 1.
    scaled: bool,
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
        // Activation scales alone ask for planes, too: blocks have no place for them.
        let scaled = gguf.tensors.iter().filter(|t| t.ty == GgmlType::Nvfp4).any(|t| {
            let base = nvfp4::base(&t.name);
            ["scale", "input_scale"].iter().any(|s| gguf.get(&format!("{base}.{s}")).is_some())
        });
        let mut b = Builder { gguf: &gguf, scaled, list: Vec::new() };
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
        let Some(Entry::Rows { parts, .. }) = self.entries.get(tensor) else {
            // Blocks hold codes and scales side by side, and nibbles in an order of their own.
            return matches!(self.entries.get(tensor), Some(Entry::Nvfp4 { .. }));
        };
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
        let whole = |tensor: u32, rows: Range<u64>| {
            let stored = &self.gguf.tensors[tensor as usize];
            let bytes = stored.offset + rows.start * stored.row_bytes()
                ..stored.offset + rows.end * stored.row_bytes();
            vec![Origin { shard: stored.shard, tensor: &stored.name, bytes }]
        };
        let (parts, row_bytes, derived) = match self.entries.get(tensor) {
            Some(Entry::Rows { parts, row_bytes, derived }) => (parts, row_bytes, derived),
            Some(Entry::Nvfp4 { part, .. }) => return whole(part.tensor, part.first..part.first + part.rows),
            Some(Entry::Scale { tensor, .. }) => return whole(*tensor, 0..1),
            _ => return Vec::new(),
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
            Entry::Nvfp4 { part, plane } => return self.read_nvfp4(part, *plane, range, out),
            Entry::Scale { tensor: scale, index } => {
                let (from, to) = (range.start as usize, range.end as usize);
                let mut word = 1f32.to_le_bytes();
                if *scale != nvfp4::NONE {
                    let stored = &self.gguf.tensors[*scale as usize];
                    self.gguf.read(stored, 4 * index..4 * index + 4, &mut word)?;
                }
                out.copy_from_slice(&word[from..to]);
                return Ok(());
            }
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

impl View {
    /// Reads bytes of one plane of NVFP4 blocks, heads in the source's order.
    fn read_nvfp4(
        &self,
        part: &Part,
        plane: Plane,
        range: Range<u64>,
        out: &mut [u8],
    ) -> Result<(), CheckpointError> {
        let stored = &self.gguf.tensors[part.tensor as usize];
        let k = part.piece.columns();
        let per = plane.row_bytes(k).max(1);
        let first_block = part.piece.take.as_ref().map_or(0, |r| r.start) / nvfp4::VALUES;
        let (mut blocks, mut rows) = (Vec::new(), Vec::new());
        let mut done = 0usize;
        while done < out.len() {
            let at = range.start + done as u64;
            let (row, skip) = (at / per, (at % per) as usize);
            let left = out.len() - done;
            let count = (skip as u64 + left as u64).div_ceil(per).min(part.run(row));
            let count = count.min((STEP_BYTES / stored.row_bytes().max(1)).max(1));
            blocks.resize((count * stored.row_bytes()) as usize, 0);
            let from = part.stored_row(row) * stored.row_bytes();
            self.gguf.read(stored, from..from + blocks.len() as u64, &mut blocks)?;
            rows.clear();
            for stored in blocks.chunks_exact(stored.row_bytes() as usize) {
                for block in 0..k / nvfp4::VALUES {
                    let column = match &part.piece.heads {
                        Some(h) if h.columns => h.stored(block * nvfp4::VALUES) / nvfp4::VALUES,
                        _ => block,
                    };
                    let at = ((first_block + column) * nvfp4::BYTES) as usize;
                    plane.take(&stored[at..at + nvfp4::BYTES as usize], &mut rows);
                }
            }
            let take = left.min(rows.len() - skip);
            out[done..done + take].copy_from_slice(&rows[skip..skip + take]);
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
        let fits = |v: &f32| match part.piece.values {
            Values::Same => true,
            Values::OnePlus => v.is_finite() && 1.0 + (v - 1.0) == *v,
            Values::NegativeExp => v.is_finite() && *v < 0.0,
        };
        for (r, stored) in (first..).zip(self.values.chunks_exact(k)) {
            part.piece.undo_row(stored, &mut undone);
            if let Some(i) = stored.iter().position(|v| !fits(v)) {
                return Err(CheckpointError::IllegalWord {
                    shard: gguf.shard_of(t).name.clone(),
                    tensor: t.name.to_string(),
                    row: r,
                    column: i as u64,
                    offset: t.offset + r * t.row_bytes() + i as u64 * t.ty.block_bytes(),
                    expected: match part.piece.values {
                        Values::NegativeExp => "a negative finite number, -exp(a) of a finite a",
                        _ => "1 + w of a finite weight w that F32 holds",
                    },
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

    /// A second scale beside words of another type would be lost.
    fn scales(&self, pieces: &[Piece]) -> Result<(), CheckpointError> {
        for piece in pieces {
            let scale = format!("{}.scale", nvfp4::base(&piece.tensor));
            let own = self.gguf.get(&piece.tensor);
            if self.gguf.get(&scale).is_some() && own.is_some_and(|t| t.ty != GgmlType::Nvfp4) {
                let reason = "it has a second scale beside it, which only NVFP4 tensors have";
                return Err(Self::fail(piece, reason.to_owned()));
            }
        }
        Ok(())
    }

    /// The FP32 tensor `NAME.suffix` beside NVFP4 blocks, and which of its words belongs to expert `expert`.
    fn scale(&self, piece: &Piece, suffix: &str, expert: u64) -> Result<Option<(u32, u64)>, CheckpointError> {
        let name = format!("{}.{suffix}", nvfp4::base(&piece.tensor));
        let Some(number) = self.number(&name) else { return Ok(None) };
        let t = &self.gguf.tensors[number as usize];
        let experts = match &piece.stored_shape[..] {
            [e, _, _] => *e,
            _ => 1,
        };
        match (t.ty, t.elements()) {
            (GgmlType::F32, 1) => Ok(Some((number, 0))),
            (GgmlType::F32, n) if n == experts => Ok(Some((number, expert))),
            (ty, n) => {
                let reason =
                    format!("expected 1 or {experts} F32 values beside {}, found {n} of {ty}", piece.tensor);
                Err(CheckpointError::GgufName { tensor: name, reason })
            }
        }
    }

    /// An NVFP4 matrix as the planes that a checkpoint has: codes, block scales, a multiplier, an activation scale.
    fn push_nvfp4(
        &mut self,
        name: &str,
        shape: &[u64],
        mut parts: Vec<Part>,
        expert: u64,
        input: bool,
    ) -> Result<(), CheckpointError> {
        let (Some(part), true) = (parts.pop(), parts.is_empty()) else {
            let reason = format!("{name} is put together from NVFP4 tensors with second scales of their own");
            return Err(CheckpointError::GgufName { tensor: name.to_owned(), reason });
        };
        let piece = part.piece.clone();
        let fail = |reason: String| Self::fail(&piece, reason);
        let (Some(base), &[n, k]) = (name.strip_suffix(".weight"), shape) else {
            return Err(fail(format!("as NVFP4 it must be a matrix, found shape {shape:?}")));
        };
        let start = part.piece.take.as_ref().map_or(0, |r| r.start);
        let moves = part.piece.heads.is_none_or(|h| h.moves_blocks_of(nvfp4::VALUES));
        if k % nvfp4::VALUES != 0 || start % nvfp4::VALUES != 0 || !moves {
            return Err(fail(format!(
                "its columns are cut, or heads moved, inside a block of {}",
                nvfp4::VALUES
            )));
        }
        let scale = self.scale(&part.piece, "scale", expert)?;
        let activation = self.scale(&part.piece, "input_scale", expert)?;
        let stored = &self.gguf.tensors[part.tensor as usize];
        let (shard, offset) = (stored.shard, stored.offset + part.stored_row(0) * stored.row_bytes());
        let mut push = |suffix: &str, dtype, shape: Vec<u64>, bytes, entry| {
            let name = format!("{base}.{suffix}").into();
            self.list.push((TensorInfo { name, dtype, shape: shape.into(), shard, offset, bytes }, entry));
        };
        let copy = part.clone();
        let word = |at: Option<(u32, u64)>| {
            let (tensor, index) = at.unwrap_or((nvfp4::NONE, 0));
            Entry::Scale { tensor, index }
        };
        push("weight", Dtype::U8, vec![n, k / 2], n * k / 2, Entry::Nvfp4 { part, plane: Plane::Codes });
        push(
            "weight_scale",
            Dtype::F8E4m3,
            vec![n, k / 16],
            n * k / 16,
            Entry::Nvfp4 { part: copy, plane: Plane::Scales },
        );
        push("weight_scale_2", Dtype::F32, Vec::new(), 4, word(scale));
        if input || activation.is_some() {
            push("input_scale", Dtype::F32, Vec::new(), 4, word(activation));
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
        if head.piece.values == Values::NegativeExp && stored.ty != GgmlType::F32 {
            return Err(fail(format!(
                "it is {}; -exp(A_log) is kept in F32, from less A_log does not come back",
                stored.ty
            )));
        }
        if stored.ty == GgmlType::Nvfp4 && self.scaled {
            return self.push_nvfp4(&name, &shape, parts, 0, false);
        }
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
        let nvfp4 = self.scaled && self.gguf.get(&piece.tensor).is_some_and(|t| t.ty == GgmlType::Nvfp4);
        // llama.cpp's converter leaves out activation scales that are all 1: the experts of a layer have them or not.
        let input = nvfp4 && nvfp4::siblings(&piece.tensor).any(|n| self.gguf.get(&n).is_some());
        for e in 0..experts {
            for (m, matrix) in (0..).zip(matrices) {
                let part = self.part(piece.clone(), (e * parts + m) * rows, rows)?;
                let name = format!("{prefix}.{e}.{matrix}_proj.weight");
                if nvfp4 {
                    self.push_nvfp4(&name, &[rows, k], vec![part], e, input)?;
                } else {
                    self.push(name, vec![rows, k], vec![part])?;
                }
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
