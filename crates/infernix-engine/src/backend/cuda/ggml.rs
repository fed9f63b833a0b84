//! Weights and experts in blocks of a GGUF file: decode kernels read the blocks as stored, prompts multiply two BF16 parts of
//! each value on tensor cores, of experts in records a slab of them at a time.
//!
//! A format without a kernel is widened to FP32 when it is loaded: exact, at four bytes a value.

use super::blocks::FEW_ROWS;
use super::context::Cuda;
use super::experts::{CudaExperts, Form, Store};
use super::vram::{CudaBuf, Vram, fault};
use super::weights::{CudaWeight, decode, put};
use crate::backend::cpu::CpuExperts;
use crate::backend::cpu::linear::{Kind, Rows};
use crate::backend::{ExpertSpec, WeightData, WeightPart};
use crate::error::EngineError;
use infernix_cuda::DeviceBuffer;
use infernix_cuda::kernels::ggml::GgmlGemv;
use infernix_cuda::kernels::linear::{Linear, Out, WeightFormat};
use infernix_cuda::kernels::moves::RowCopy;
use infernix_cuda::kernels::tile::{Epilogue, ExpertPlanes, JobLists, Sorted, Tile, TileFormat};
use infernix_formats::expert_bank::ExpertMatrix;
use infernix_formats::ggml::{self, GgmlType};
use infernix_formats::{Format, Layout, RowShape};
use std::sync::Arc;

/// Bytes of the two parts of some rows that a prompt multiplies at a time, and rows of the prompt.
const PARTS: usize = 64 << 20;
const ROWS: usize = 2048;
/// Columns from which tensor cores are worth the two parts.
const MANY: usize = 64;

/// Bytes of the two parts of some experts' matrices that a prompt multiplies at a time.
const SLAB: usize = 256 << 20;
/// Picks an expert from which tensor cores are worth the two parts. An estimate: a value's parts are 8 bytes written and read at about
/// the rate of memory, each pick of the decode kernels takes some half a byte at a fifth of it.
const MANY_PICKS: usize = 4;

/// A matrix of blocks.
pub(super) struct Blocks {
    pub(super) ty: GgmlType,
    pub(super) n: usize,
    codes: DeviceBuffer,
}

/// The type whose kernel reads a part, and its words: the part's own, or FP32.
fn words(name: &str, p: &WeightPart) -> Result<(GgmlType, Vec<u8>), EngineError> {
    match p.format {
        Format::Ggml(ty) if p.layout == Layout::GgmlRowsV1 && GgmlGemv::TYPES.contains(&ty) => {
            let source = |e| EngineError::Source { name: name.to_owned(), source: Box::new(e) };
            let shape = RowShape::of(&p.shape).map_err(source)?;
            let row = ty.row_bytes(shape.k).map_err(source)? as usize;
            let range = p.rows.start as usize * row..p.rows.end as usize * row;
            let own = (*p.bytes).as_ref().get(range);
            let what = || format!("rows {:?} lie beyond the object", p.rows);
            let own = own.ok_or_else(|| EngineError::Weight { name: name.to_owned(), what: what() })?;
            Ok((ty, own.to_vec()))
        }
        _ => Ok((GgmlType::F32, decode(name, p)?.iter().flat_map(|v| v.to_le_bytes()).collect())),
    }
}

impl Blocks {
    /// Runs of parts of one type.
    pub(super) fn of_parts(vram: &Vram, name: &str, data: &WeightData) -> Result<Vec<Self>, EngineError> {
        let mut runs: Vec<(GgmlType, usize, Vec<u8>)> = Vec::new();
        for p in &data.parts {
            let (ty, own) = words(name, p)?;
            let rows = (p.rows.end - p.rows.start) as usize;
            match runs.last_mut() {
                Some((have, n, all)) if *have == ty => {
                    *n += rows;
                    all.extend(own);
                }
                _ => runs.push((ty, rows, own)),
            }
        }
        runs.into_iter().map(|(ty, n, own)| Ok(Blocks { ty, n, codes: put(vram, &own)? })).collect()
    }
}

/// One matrix of every expert, one below the other.
pub(super) struct BlockBank {
    blocks: Blocks,
    k: usize,
    /// U64 `[E]`: where each expert's rows begin.
    table: DeviceBuffer,
}

impl BlockBank {
    /// The matrices of gate, up and down; `None` if the experts are not in blocks.
    pub(super) fn of_experts(
        vram: &Vram,
        host: &CpuExperts,
        spec: &ExpertSpec,
    ) -> Result<Option<[Self; 3]>, EngineError> {
        let in_blocks = |m: &ExpertMatrix| host.matrix(0, *m).iter().any(|r| type_of(r).is_some());
        if spec.experts == 0 || !ExpertMatrix::ALL.iter().any(in_blocks) {
            return Ok(None);
        }
        let of = |m: ExpertMatrix| -> Result<Self, EngineError> {
            let down = m == ExpertMatrix::Down;
            let (n, k) =
                if down { (spec.hidden, spec.intermediate) } else { (spec.intermediate, spec.hidden) };
            // One type for all experts: its own where every part has it and there is a kernel, else FP32.
            let mut types = (0..spec.experts).flat_map(|e| host.matrix(e, m)).map(|r| type_of(&r));
            let first = types.next().flatten().filter(|t| GgmlGemv::TYPES.contains(t));
            let ty = first.filter(|t| types.all(|o| o == Some(*t))).unwrap_or(GgmlType::F32);
            let mut all = Vec::new();
            for rows in (0..spec.experts).flat_map(|e| host.matrix(e, m)) {
                let mut row = vec![0f32; k];
                for r in 0..rows.n() {
                    if type_of(&rows) == Some(ty) {
                        all.extend_from_slice(rows.codes(r));
                        continue;
                    }
                    widen(&spec.name, &rows, r, &mut row)?;
                    all.extend(row.iter().flat_map(|v| v.to_le_bytes()));
                }
            }
            let codes = put(vram, &all)?;
            let per = all.len() / spec.experts;
            let table: Vec<u64> = (0..spec.experts).map(|e| codes.at(e * per)).collect();
            Ok(BlockBank { blocks: Blocks { ty, n, codes }, k, table: put(vram, &table)? })
        };
        Ok(Some([of(ExpertMatrix::Gate)?, of(ExpertMatrix::Up)?, of(ExpertMatrix::Down)?]))
    }
}

/// Experts in blocks, in records, that a prompt multiplies by their two parts.
#[derive(Clone, Copy)]
pub(super) struct SlabExperts {
    /// U64 `[E]`: where each record is.
    whole: u64,
    /// Types of gate, up and down, and where each begins.
    matrices: [(GgmlType, usize); 3],
}

/// How many of `experts` matrices of `n` rows of `k` a slab holds.
fn in_slab(n: usize, k: usize, experts: usize) -> usize {
    (SLAB / (4 * n * k).max(1)).min(experts)
}

impl CudaExperts {
    /// The records at `whole` for tile products of `rows` rows of a prompt, where these are possible and worth it.
    pub(super) fn in_slabs(&self, whole: u64, rows: usize, top: usize) -> Option<SlabExperts> {
        let Store::Stored(own) = &self.store else { return None };
        let Form::Ggml(matrices) = own.form else { return None };
        let many = rows > FEW_ROWS && rows * top >= MANY_PICKS * self.experts;
        (many && self.slab_bytes() > 0).then_some(SlabExperts { whole, matrices })
    }

    /// Bytes of the slab that prompts need; 0: none, or not even one expert is within [`SLAB`].
    pub(super) fn slab_bytes(&self) -> usize {
        let (h, i) = (self.hidden, self.intermediate);
        let own = matches!(&self.store, Store::Stored(s) if matches!(s.form, Form::Ggml(_)));
        let sizes = [(2 * i, h), (h, i)].map(|(n, k)| in_slab(n, k, self.experts) * 4 * n * k);
        let whole = (h | i).is_multiple_of(64) && !sizes.contains(&0);
        if own && whole { sizes[0].max(sizes[1]) } else { 0 }
    }
}

fn type_of(rows: &Rows<'_>) -> Option<GgmlType> {
    match rows.kind() {
        Kind::Ggml(t) => Some(t),
        _ => None,
    }
}

/// A row's values in FP32.
fn widen(name: &str, rows: &Rows<'_>, r: usize, out: &mut [f32]) -> Result<(), EngineError> {
    match rows.kind() {
        Kind::Ggml(t) => ggml::decode_f32(t, rows.codes(r), out)
            .map_err(|e| EngineError::Source { name: name.to_owned(), source: Box::new(e) }),
        Kind::Bf16 | Kind::F32 | Kind::F16 => {
            rows.natural(r, out, 64, &mut vec![1.0; rows.k().div_ceil(64)]);
            Ok(())
        }
        other => {
            let what =
                format!("{other:?} matrices beside GGML blocks run on the CPU only; use --backend cpu");
            Err(EngineError::Weight { name: name.to_owned(), what })
        }
    }
}

impl Cuda {
    /// [`Cuda::product`] of a weight in blocks.
    #[expect(clippy::too_many_arguments, reason = "two matrices and their pitches")]
    pub(super) fn block_product(
        &mut self,
        w: &CudaWeight,
        x: u64,
        x_pitch: usize,
        cols: usize,
        y: u64,
        y_pitch: usize,
        out: Out,
    ) -> Result<(), EngineError> {
        let size = if out == Out::F32 { 4 } else { 2 };
        let tiles = cols > MANY && !self.is_decode() && w.k.is_multiple_of(32) && x_pitch.is_multiple_of(8);
        if !tiles {
            let mut row = 0;
            for b in &w.blocks {
                let pdl = self.pdl();
                let g = self.plans.ggml(b.ty).map_err(fault)?;
                let to = y + (row * size) as u64;
                g.launch(&self.stream, b.codes.ptr(), b.n, w.k, x, x_pitch, cols, to, y_pitch, out, pdl)
                    .map_err(fault)?;
                row += b.n;
            }
            return Ok(());
        }
        let scratch = match &self.parts {
            Some(s) => s.clone(),
            None => self.parts.insert(Arc::new(self.vram.alloc("activations", PARTS)?)).clone(),
        };
        let k = 2 * w.k;
        for first in (0..cols).step_by(ROWS) {
            let n = ROWS.min(cols - first);
            // Each input row twice, once for each part.
            let twice = self.arena.lease(2 * n * k)?;
            let (from, bytes) = (x + (2 * first * x_pitch) as u64, 2 * w.k);
            self.copy_rows(RowCopy {
                from,
                from_pitch: 2 * x_pitch,
                to: twice.ptr(),
                to_pitch: 2 * k,
                bytes,
                rows: n,
                copies: 2,
            })?;
            let packed = self.arena.lease(Tile::packed_bytes(n, k))?;
            let format = TileFormat::Rows(WeightFormat::Bf16);
            let t = self.plans.tile(format).map_err(fault)?;
            t.pack(&self.stream, twice.ptr(), k, n, k, packed.ptr(), true).map_err(fault)?;
            let slab = PARTS / (2 * k) / 256 * 256;
            let mut row = 0;
            for b in &w.blocks {
                for at in (0..b.n).step_by(slab.max(256)) {
                    let rows = slab.max(256).min(b.n - at);
                    let own = b.codes.at(at * b.ty.row_bytes(w.k as u64).map_or(0, |b| b as usize));
                    let g = self.plans.ggml(b.ty).map_err(fault)?;
                    g.rows(&self.stream, own, rows, w.k, 0, rows, scratch.ptr(), k, w.k, true)
                        .map_err(fault)?;
                    let parts = Linear {
                        format: WeightFormat::Bf16,
                        n: rows,
                        k,
                        k_pad: k,
                        codes: DeviceBuffer::part(&scratch, 0, 2 * rows * k).map_err(fault)?,
                        high: None,
                        scales: None,
                        row_scale: None,
                        tensor_scale: 1.0,
                        divide: false,
                    };
                    let to = y + ((first * y_pitch + row + at) * size) as u64;
                    // Weights are read before the wait of a programmatic launch: these have just been written.
                    let t = self.plans.tile(format).map_err(fault)?;
                    t.dense(&self.stream, &parts, packed.ptr(), n, to, y_pitch, out, false).map_err(fault)?;
                }
                row += b.n;
            }
        }
        self.chained = true;
        Ok(())
    }

    /// One of the two tile products of a layer's experts: `x` as packed for it, `y` in sorted order. At most `jobs` jobs.
    #[expect(clippy::too_many_arguments, reason = "the operands of one layer's experts")]
    pub(super) fn expert_product(
        &mut self,
        format: TileFormat,
        slabs: Option<SlabExperts>,
        w: &ExpertPlanes,
        sorted: Sorted,
        (top, jobs): (usize, usize),
        x: u64,
        y: u64,
    ) -> Result<(), EngineError> {
        let (n, k, experts) = (w.n, w.k, w.experts);
        let (pitch, e) = if w.down { (n, Epilogue::Rows) } else { (n / 2, Epilogue::SwiGlu) };
        let Some(SlabExperts { whole, matrices: [gate, up, down] }) = slabs else {
            let tile = self.plans.tile(format).map_err(fault)?;
            return tile.grouped(&self.stream, w, sorted, x, y, pitch, e, true).map_err(fault);
        };
        let (per, stride) = (in_slab(n, k, experts).max(1), 4 * n * k);
        let [own, counts, tab] = JobLists::bytes(experts, per, jobs).map(|b| self.arena.lease(b));
        let (own, counts, tab) = (own?, counts?, tab?);
        let lists = JobLists { per, jobs: own.ptr(), most: jobs, counts: counts.ptr(), tab: tab.ptr() };
        let slab = self.arena.lease(per * stride)?;
        let sort = self.plans.sort(experts, top).map_err(fault)?;
        sort.lists(&self.stream, sorted, &lists, slab.ptr(), stride, true).map_err(fault)?;
        let w = ExpertPlanes { tab: lists.tab, ..*w };
        let matrices = if w.down { &[down][..] } else { &[gate, up] };
        let rows = n / matrices.len();
        for (i, first) in (0..experts).step_by(per).enumerate() {
            let live = per.min(experts - first);
            let (records, base) = (whole + 8 * first as u64, sorted.base + 4 * first as u64);
            for (j, (ty, offset)) in matrices.iter().enumerate() {
                let to = slab.ptr() + (4 * j * rows * k) as u64;
                let g = self.plans.ggml(*ty).map_err(fault)?;
                g.expand(&self.stream, records, *offset, base, live, rows, k, to, stride / 2, true)
                    .map_err(fault)?;
            }
            let tile = self.plans.tile(format).map_err(fault)?;
            // As in `block_product`: these weights have just been written.
            tile.grouped(&self.stream, &w, lists.list(sorted, i), x, y, pitch, e, false).map_err(fault)?;
        }
        Ok(())
    }

    /// Rows `ids` of a table in blocks, BF16.
    pub(super) fn block_rows(
        &mut self,
        table: &CudaWeight,
        ids: u64,
        rows: usize,
        y: u64,
    ) -> Result<(), EngineError> {
        let [b] = &table.blocks[..] else {
            let what = "an embedding must be of one format".to_owned();
            return Err(EngineError::Weight { name: table.name.clone(), what });
        };
        let pdl = self.pdl();
        let g = self.plans.ggml(b.ty).map_err(fault)?;
        g.rows(&self.stream, b.codes.ptr(), b.n, table.k, ids, rows, y, table.k, 0, pdl).map_err(fault)
    }

    /// Outputs of the picks of some rows in pick order: `ids` I32 `[n][top]`, `from` BF16 `[n][hidden]`.
    pub(super) fn block_experts(
        &mut self,
        store: &CudaExperts,
        [gate, up, down]: &[BlockBank; 3],
        ids: u64,
        from: u64,
        n: usize,
        top: usize,
    ) -> Result<CudaBuf, EngineError> {
        let (h, i, picks) = (store.hidden, store.intermediate, n * top);
        let (g, u) = (self.fresh(picks, i, false)?, self.fresh(picks, i, false)?);
        let out = self.fresh(picks, h, false)?;
        let mut pdl = self.pdl();
        for (b, x, share, y) in [(gate, from, top, g.ptr), (up, from, top, u.ptr), (down, g.ptr, 1, out.ptr)]
        {
            if share == 1 && y == out.ptr {
                let chain = &self.plans.chain;
                chain.swiglu(&self.stream, g.ptr, u.ptr, g.ptr, picks * i, true).map_err(fault)?;
            }
            let k = self.plans.ggml(b.blocks.ty).map_err(fault)?;
            let (n, width) = (b.blocks.n, b.k);
            k.experts(&self.stream, b.table.ptr(), 0, 0, ids, picks, share, n, width, x, width, y, n, pdl)
                .map_err(fault)?;
            pdl = true;
        }
        Ok(out)
    }
}
