//! Sequence state on the device.
//!
//! Keys, values and pooled index keys lie in pages by sequence index: columns beyond the committed ones are simply
//! written over. Recurrent state has two halves a slot. A round reads the current half and writes the other after its
//! last column; committing all columns makes the other half current, committing none changes nothing, and a part of
//! them is folded again from the recorded inputs.

use super::vram::{Vram, fault};
use crate::backend::GdnDims;
use crate::error::EngineError;
use crate::state::{AttentionLayout, KvFormat, PAGE_TOKENS, StateLayout};
use infernix_cuda::DeviceBuffer;
use infernix_cuda::kernels::attention::Paging;
use infernix_cuda::kernels::attention8::Paging8;
use infernix_cuda::kernels::index::{IndexRing, RING};
use infernix_cuda::kernels::ple::PleState;
use infernix_cuda::kernels::select::IndexPages;
use std::sync::{Arc, Mutex};

/// Columns of one lane in a decode round, at most.
pub(super) const COLUMNS: usize = 64;
/// Width of an index key.
pub(super) const INDEX_DIM: usize = 128;

/// Where one gated delta rule layer's state is.
#[derive(Clone, Copy)]
pub(super) struct GdnAt {
    pub(super) state: u64,
    pub(super) state_stride: usize,
    pub(super) conv: u64,
    pub(super) conv_stride: usize,
    pub(super) record: u64,
    pub(super) record_stride: usize,
}

pub(super) struct DeviceState {
    pub(super) layout: StateLayout,
    /// Keys and values of each attention layer, `[page][kv head][64][d]`.
    kv: Vec<(DeviceBuffer, DeviceBuffer)>,
    /// FP16 scales of int8 keys and values, one per 64 elements; none for BF16.
    kv_scales: Vec<(DeviceBuffer, DeviceBuffer)>,
    /// `[page][64 / ratio][128]`.
    pooled: Vec<Option<DeviceBuffer>>,
    /// `[slot][half]`: delta rule states, their convolutions' columns, PLE columns.
    halves: DeviceBuffer,
    /// `[slot]`: rings of raw index keys and their positions.
    rings: DeviceBuffer,
    /// `[slot]`: inputs of recorded columns.
    records: DeviceBuffer,
    places: Places,
    /// Current half of each slot.
    pub(super) half: Vec<usize>,
    /// Columns of the last decode round that are not committed.
    pub(super) recorded: Vec<usize>,
    spare: Arc<Mutex<Vec<DeviceBuffer>>>,
}

/// Committed recurrent state of a slot.
#[derive(Clone)]
pub struct CudaSnapshot(Arc<Saved>);

struct Saved {
    memory: Option<DeviceBuffer>,
    spare: Arc<Mutex<Vec<DeviceBuffer>>>,
}

impl Drop for Saved {
    fn drop(&mut self) {
        if let Some(m) = self.memory.take() {
            self.spare.lock().unwrap_or_else(|e| e.into_inner()).push(m);
        }
    }
}

/// Offsets of consecutive pieces, each on a multiple of 256 bytes.
#[derive(Default)]
struct Offsets(usize);

impl Offsets {
    fn take(&mut self, bytes: usize) -> usize {
        let at = self.0;
        self.0 = (at + bytes).next_multiple_of(256);
        at
    }
}

/// Bytes of all pages of all layers.
pub(super) fn paged_bytes(layout: &StateLayout) -> usize {
    let int8 = layout.kv == KvFormat::Int8;
    let one = |a: &AttentionLayout| {
        let values = layout.pages * PAGE_TOKENS * a.kv_heads * a.head_dim;
        let pooled = a.index.map_or(0, |i| layout.pages * PAGE_TOKENS / i.ratio * INDEX_DIM * 2);
        2 * if int8 { values + values / 32 } else { 2 * values } + pooled
    };
    layout.attention.iter().map(one).sum()
}

/// Where the recurrent parts of a slot lie, in bytes.
pub(super) struct Places {
    half: usize,
    gdn: Vec<(usize, usize)>,
    ple: Vec<usize>,
    ring: usize,
    rings: Vec<Option<(usize, usize)>>,
    record: usize,
    gdn_record: Vec<usize>,
    ple_record: Vec<usize>,
}

impl Places {
    pub(super) fn of(layout: &StateLayout) -> Self {
        let (mut half, mut record, mut ring) = (Offsets::default(), Offsets::default(), Offsets::default());
        let gdn = layout.gdn.iter();
        let gdn = gdn.map(|d| (half.take(d.value_heads << 16), half.take(3 * d.channels() * 2))).collect();
        let ple = layout.ple.iter().map(|p| half.take(p.columns * p.width * 2)).collect();
        let inputs = |d: &GdnDims| COLUMNS * (d.channels() + 2 * d.value_heads) * 2;
        let gdn_record = layout.gdn.iter().map(|d| record.take(inputs(d))).collect();
        let ple_record = layout.ple.iter().map(|p| record.take(COLUMNS * p.width * 2)).collect();
        let keys = |ring: &mut Offsets| (ring.take(RING * INDEX_DIM * 2), ring.take(RING * 3 * 4));
        let rings = layout.attention.iter().map(|a| a.index.map(|_| keys(&mut ring))).collect();
        let (half, ring, record) = (half.0, ring.0, record.0);
        Places { half, gdn, ple, ring, rings, record, gdn_record, ple_record }
    }

    /// Bytes of a slot: both halves, rings and records.
    pub(super) fn slot(&self) -> usize {
        2 * self.half + self.ring + self.record
    }

    /// Bytes of a snapshot.
    pub(super) fn snapshot(&self) -> usize {
        self.half + self.ring
    }
}

impl DeviceState {
    pub(super) fn new(vram: &Vram, layout: &StateLayout) -> Result<Self, EngineError> {
        let refuse = |what: String| Err(EngineError::Unsupported(format!("{what} on the CUDA backend")));
        let int8 = match layout.kv {
            KvFormat::Bf16 => false,
            KvFormat::Int8 => true,
            KvFormat::F32 => return refuse("keys and values are kept in BF16 or int8 only".into()),
        };
        for d in &layout.gdn {
            if d.key_dim != 128 || d.value_dim != 128 || d.conv_kernel != 4 {
                return refuse(format!(
                    "delta rule heads of {} x {} with {} taps, only 128 x 128 with 4 taps",
                    d.key_dim, d.value_dim, d.conv_kernel
                ));
            }
        }
        for a in &layout.attention {
            let index = a.index.is_none_or(|i| {
                i.dim == INDEX_DIM && i.heads <= 4 && i.ratio.is_power_of_two() && i.ratio <= PAGE_TOKENS
            });
            if !matches!(a.head_dim, 128 | 256) || !index {
                return refuse(format!("attention heads of {} with index {:?}", a.head_dim, a.index));
            }
        }
        let mut kv = Vec::new();
        let mut kv_scales = Vec::new();
        let mut pooled = Vec::new();
        for a in &layout.attention {
            let values = layout.pages * PAGE_TOKENS * a.kv_heads * a.head_dim;
            let bytes = if int8 { values } else { 2 * values };
            kv.push((vram.alloc("KV", bytes)?, vram.alloc("KV", bytes)?));
            if int8 {
                kv_scales.push((vram.alloc("KV", values / 32)?, vram.alloc("KV", values / 32)?));
            }
            pooled.push(match a.index {
                Some(i) => {
                    let b = vram.alloc("KV", layout.pages * PAGE_TOKENS / i.ratio * INDEX_DIM * 2)?;
                    Some(b)
                }
                None => None,
            });
        }
        let slots = layout.slots;
        let places = Places::of(layout);
        Ok(DeviceState {
            layout: layout.clone(),
            kv,
            kv_scales,
            pooled,
            halves: vram.alloc("recurrent state", slots * 2 * places.half)?,
            rings: vram.alloc("recurrent state", slots * places.ring)?,
            records: vram.alloc("recurrent state", slots * places.record)?,
            places,
            half: vec![0; slots],
            recorded: vec![0; slots],
            spare: Arc::default(),
        })
    }

    /// Takes memory for `n` snapshots, so that they find it when the rest of the device's memory is in use.
    pub(super) fn reserve_snapshots(&self, vram: &Vram, n: usize) -> Result<(), EngineError> {
        for _ in 0..n {
            let memory = vram.alloc("snapshots", self.snapshot_bytes())?;
            self.spare.lock().unwrap_or_else(|e| e.into_inner()).push(memory);
        }
        Ok(())
    }

    /// Bytes of a snapshot.
    pub(super) fn snapshot_bytes(&self) -> usize {
        self.places.snapshot()
    }

    /// A snapshot's words.
    pub(super) fn export(
        &self,
        stream: &infernix_cuda::driver::Stream,
        snapshot: &CudaSnapshot,
    ) -> Result<Vec<u8>, EngineError> {
        match &snapshot.0.memory {
            Some(m) => stream.read(m.ptr(), self.snapshot_bytes()).map_err(fault),
            None => Ok(Vec::new()),
        }
    }

    /// A snapshot from its words.
    pub(super) fn import(
        &mut self,
        vram: &Vram,
        stream: &infernix_cuda::driver::Stream,
        bytes: &[u8],
    ) -> Result<CudaSnapshot, EngineError> {
        if bytes.len() != self.snapshot_bytes() {
            return Err(EngineError::Unsupported(format!(
                "a saved state of {} bytes, this model's have {}",
                bytes.len(),
                self.snapshot_bytes()
            )));
        }
        let memory = self.snapshot_memory(vram)?;
        stream.write(memory.ptr(), bytes).map_err(fault)?;
        Ok(CudaSnapshot(Arc::new(Saved { memory: Some(memory), spare: self.spare.clone() })))
    }

    fn snapshot_memory(&self, vram: &Vram) -> Result<DeviceBuffer, EngineError> {
        let spare = self.spare.lock().unwrap_or_else(|e| e.into_inner()).pop();
        match spare {
            Some(m) => Ok(m),
            None => vram.alloc("snapshots", self.snapshot_bytes()),
        }
    }

    fn paged(&self) -> impl Iterator<Item = &DeviceBuffer> {
        let all = self.kv.iter().chain(&self.kv_scales).flat_map(|(k, v)| [k, v]);
        all.chain(self.pooled.iter().flatten())
    }

    /// Bytes of a page over all layers.
    pub(super) fn page_bytes(&self) -> usize {
        self.paged().map(|b| b.len() / self.layout.pages.max(1)).sum()
    }

    /// A page's words, layer by layer.
    pub(super) fn export_page(
        &self,
        stream: &infernix_cuda::driver::Stream,
        page: u32,
    ) -> Result<Vec<u8>, EngineError> {
        let mut all = Vec::with_capacity(self.page_bytes());
        for b in self.paged() {
            let bytes = b.len() / self.layout.pages;
            all.extend(stream.read::<u8>(b.at(page as usize * bytes), bytes).map_err(fault)?);
        }
        Ok(all)
    }

    /// Overwrites a page with saved words.
    pub(super) fn import_page(
        &self,
        stream: &infernix_cuda::driver::Stream,
        page: u32,
        words: &[u8],
    ) -> Result<(), EngineError> {
        if words.len() != self.page_bytes() {
            let (have, want) = (words.len(), self.page_bytes());
            return Err(EngineError::Unsupported(format!(
                "a saved page of {have} bytes, this model's have {want}"
            )));
        }
        let mut at = 0;
        for b in self.paged() {
            let bytes = b.len() / self.layout.pages;
            stream.write(b.at(page as usize * bytes), &words[at..at + bytes]).map_err(fault)?;
            at += bytes;
        }
        Ok(())
    }

    fn current(&self, slot: usize) -> u64 {
        self.halves.at((2 * slot + self.half[slot]) * self.places.half)
    }

    fn ring_of(&self, slot: usize) -> u64 {
        self.rings.at(slot * self.places.ring)
    }

    pub(super) fn reset(
        &mut self,
        stream: &infernix_cuda::driver::Stream,
        slot: usize,
    ) -> Result<(), EngineError> {
        self.recorded[slot] = 0;
        stream.zero(self.current(slot), self.places.half).map_err(fault)
    }

    pub(super) fn save(
        &mut self,
        vram: &Vram,
        stream: &infernix_cuda::driver::Stream,
        slot: usize,
    ) -> Result<CudaSnapshot, EngineError> {
        let memory = self.snapshot_memory(vram)?;
        stream.copy(memory.ptr(), self.current(slot), self.places.half).map_err(fault)?;
        stream.copy(memory.at(self.places.half), self.ring_of(slot), self.places.ring).map_err(fault)?;
        Ok(CudaSnapshot(Arc::new(Saved { memory: Some(memory), spare: self.spare.clone() })))
    }

    pub(super) fn load(
        &mut self,
        stream: &infernix_cuda::driver::Stream,
        slot: usize,
        from: &CudaSnapshot,
    ) -> Result<(), EngineError> {
        self.recorded[slot] = 0;
        let Some(m) = &from.0.memory else { return Ok(()) };
        stream.copy(self.current(slot), m.ptr(), self.places.half).map_err(fault)?;
        stream.copy(self.ring_of(slot), m.at(self.places.half), self.places.ring).map_err(fault)
    }

    pub(super) fn copy_page(
        &self,
        stream: &infernix_cuda::driver::Stream,
        from: u32,
        to: u32,
    ) -> Result<(), EngineError> {
        let pages = self.layout.pages;
        for b in self.paged() {
            let bytes = b.len() / pages;
            stream.copy(b.at(to as usize * bytes), b.at(from as usize * bytes), bytes).map_err(fault)?;
        }
        Ok(())
    }

    pub(super) fn gdn(&self, id: usize) -> GdnAt {
        let (state, conv) = self.places.gdn[id];
        GdnAt {
            state: self.halves.at(state),
            state_stride: self.places.half / 4,
            conv: self.halves.at(conv),
            conv_stride: self.places.half / 2,
            record: self.records.at(self.places.gdn_record[id]),
            record_stride: self.places.record / 2,
        }
    }

    /// Kept columns of a PLE layer and its record (address, elements between slots).
    pub(super) fn ple(&self, id: usize, taps: usize, dilation: usize) -> (PleState, (u64, usize)) {
        let state = PleState {
            ptr: self.halves.at(self.places.ple[id]),
            stride: self.places.half / 2,
            width: self.layout.ple[id].width,
            taps,
            dilation,
        };
        (state, (self.records.at(self.places.ple_record[id]), self.places.record / 2))
    }

    pub(super) fn ring(&self, id: usize) -> Option<IndexRing> {
        let (keys, positions) = self.places.rings[id]?;
        Some(IndexRing {
            keys: self.rings.at(keys),
            stride: self.places.ring / 2,
            positions: self.rings.at(positions),
            positions_stride: self.places.ring / 4,
        })
    }

    pub(super) fn paging(&self, id: usize, tables: u64, pitch: usize) -> Paging {
        let a = &self.layout.attention[id];
        Paging {
            keys: self.kv[id].0.ptr(),
            values: self.kv[id].1.ptr(),
            tables,
            table_pitch: pitch,
            page_log: PAGE_TOKENS.trailing_zeros() as usize,
            page_stride: a.kv_heads * PAGE_TOKENS * a.head_dim,
            token_stride: a.head_dim,
            head_stride: PAGE_TOKENS * a.head_dim,
        }
    }

    /// Pages of int8 keys and values.
    pub(super) fn paging8(&self, id: usize, tables: u64, pitch: usize) -> Result<Paging8, EngineError> {
        let p = self.paging(id, tables, pitch);
        let Some((keys, values)) = self.kv_scales.get(id) else {
            return Err(EngineError::Round("int8 attention over BF16 pages".into()));
        };
        Ok(Paging8 {
            keys: p.keys,
            values: p.values,
            key_scales: keys.ptr(),
            value_scales: values.ptr(),
            tables: p.tables,
            table_pitch: p.table_pitch,
            page_log: p.page_log,
            page_stride: p.page_stride,
            token_stride: p.token_stride,
            head_stride: p.head_stride,
        })
    }

    pub(super) fn index_pages(&self, id: usize, tables: u64, pitch: usize) -> Option<IndexPages> {
        let blocks = PAGE_TOKENS / self.layout.attention[id].index?.ratio;
        Some(IndexPages {
            keys: self.pooled[id].as_ref()?.ptr(),
            tables,
            table_pitch: pitch,
            page_log: blocks.trailing_zeros() as usize,
            page_stride: blocks * INDEX_DIM,
        })
    }
}
