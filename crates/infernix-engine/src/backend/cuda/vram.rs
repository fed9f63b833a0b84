//! Device memory: a ledger under one budget, and the arena of a round's activations.

use crate::error::EngineError;
use infernix_cuda::{Device, DeviceBuffer};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

/// Small weights share allocations of this size: each allocation of its own would cost its padding and the driver's
/// granularity of 2 MiB.
const CHUNK: usize = 64 << 20;

pub(super) fn fault(e: infernix_cuda::CudaError) -> EngineError {
    EngineError::Source { name: "CUDA".into(), source: Box::new(e) }
}

/// What device memory is used for, in bytes, and the most that may be.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    /// The most in all; 0 is what the device has.
    pub budget: usize,
    /// Bytes by purpose.
    pub used: BTreeMap<&'static str, usize>,
}

impl Ledger {
    /// Bytes in all.
    pub fn total(&self) -> usize {
        self.used.values().sum()
    }

    /// One line a purpose, in MiB.
    pub fn lines(&self) -> Vec<(String, usize)> {
        let mut lines: Vec<_> = self.used.iter().map(|(k, v)| ((*k).to_owned(), v >> 20)).collect();
        lines.push(("total".into(), self.total() >> 20));
        if self.budget > 0 {
            lines.push(("budget".into(), self.budget >> 20));
        }
        lines
    }
}

/// Gives out device memory and keeps the ledger.
pub(super) struct Vram {
    pub(super) device: Arc<Device>,
    ledger: Mutex<Ledger>,
    chunk: Mutex<Option<(Arc<DeviceBuffer>, usize)>>,
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(|e| e.into_inner())
}

impl Vram {
    pub(super) fn new(device: Arc<Device>, budget: usize) -> Self {
        let ledger = Ledger { budget, used: BTreeMap::new() };
        Vram { device, ledger: Mutex::new(ledger), chunk: Mutex::new(None) }
    }

    pub(super) fn ledger(&self) -> Ledger {
        lock(&self.ledger).clone()
    }

    /// Bytes that may still be taken.
    pub(super) fn left(&self) -> Result<usize, EngineError> {
        let (free, _) = self.device.memory().map_err(fault)?;
        let l = lock(&self.ledger);
        Ok(if l.budget == 0 { free } else { free.min(l.budget.saturating_sub(l.total())) })
    }

    fn book(&self, what: &'static str, bytes: usize) -> Result<(), EngineError> {
        let mut l = lock(&self.ledger);
        let total = l.total() + bytes;
        if l.budget > 0 && total > l.budget {
            return Err(EngineError::Unsupported(format!(
                "{what} would bring device memory to {} MiB, the budget is {} MiB ({}); raise --vram-budget-mib or \
                 shorten the context",
                total.div_ceil(1 << 20),
                l.budget >> 20,
                l.used.iter().map(|(k, v)| format!("{k} {} MiB", v >> 20)).collect::<Vec<_>>().join(", ")
            )));
        }
        *l.used.entry(what).or_default() += bytes;
        Ok(())
    }

    /// An allocation of its own.
    pub(super) fn alloc(&self, what: &'static str, bytes: usize) -> Result<DeviceBuffer, EngineError> {
        self.book(what, bytes)?;
        self.device.alloc(bytes).map_err(fault)
    }

    /// Makes sure that the next `bytes` of small parts need no other allocation.
    pub(super) fn ready(&self, what: &'static str, bytes: usize) -> Result<(), EngineError> {
        let mut chunk = lock(&self.chunk);
        if chunk.as_ref().is_none_or(|(_, used)| used + bytes > CHUNK) {
            *chunk = Some((Arc::new(self.alloc(what, CHUNK)?), 0));
        }
        Ok(())
    }

    /// A part of a shared allocation, or one of its own if it is large.
    pub(super) fn take(&self, what: &'static str, bytes: usize) -> Result<DeviceBuffer, EngineError> {
        if bytes > CHUNK / 2 {
            return self.alloc(what, bytes);
        }
        let mut chunk = lock(&self.chunk);
        let (whole, used) = match chunk.take() {
            Some((whole, used)) if used + bytes <= CHUNK => (whole, used),
            _ => (Arc::new(self.alloc(what, CHUNK)?), 0),
        };
        let part = DeviceBuffer::part(&whole, used, bytes.max(1)).map_err(fault)?;
        *chunk = Some((whole, (used + bytes.max(1)).next_multiple_of(256)));
        Ok(part)
    }
}

/// Memory of one round's activations. Everything is free again when the next round begins; within a round freed
/// buffers are joined and reused, which stream order makes safe. The same sequence of requests gets the
/// same addresses, so that a repeated round is the same graph.
pub(super) struct Arena {
    vram: Arc<Vram>,
    state: Mutex<ArenaState>,
}

#[derive(Default)]
struct ArenaState {
    segments: Vec<DeviceBuffer>,
    /// Which of them was reserved for prompts.
    reserved: Option<usize>,
    /// Free ranges: address and bytes. Segments are never neighbours: each has padding behind it.
    free: BTreeMap<u64, usize>,
    round: u64,
}

/// A buffer of the arena.
pub(super) struct Lease {
    arena: Arc<Arena>,
    ptr: u64,
    bytes: usize,
    round: u64,
}

const SEGMENT: usize = 64 << 20;

impl Arena {
    pub(super) fn new(vram: Arc<Vram>) -> Self {
        Arena { vram, state: Mutex::default() }
    }

    /// Frees everything, of the reserved piece its first `most` bytes: the rest is lent out. Gives where they end.
    pub(super) fn begin(&self, most: usize) -> u64 {
        let mut s = lock(&self.state);
        s.round += 1;
        let ArenaState { segments, reserved, free, .. } = &mut *s;
        let len = |i: usize, m: &DeviceBuffer| if Some(i) == *reserved { m.len().min(most) } else { m.len() };
        *free = segments.iter().enumerate().map(|(i, m)| (m.ptr(), len(i, m))).collect();
        reserved.map_or(0, |i| segments[i].ptr() + len(i, &segments[i]) as u64)
    }

    /// Makes room for `bytes` in one piece; gives its addresses.
    pub(super) fn reserve(&self, bytes: usize) -> Result<Range<u64>, EngineError> {
        let segment = self.vram.alloc("activations", bytes.next_multiple_of(1024))?;
        let range = segment.ptr()..segment.ptr() + segment.len() as u64;
        let mut s = lock(&self.state);
        s.reserved = Some(s.segments.len());
        s.segments.push(segment);
        Ok(range)
    }

    pub(super) fn lease(self: &Arc<Self>, bytes: usize) -> Result<Arc<Lease>, EngineError> {
        // Kernels read whole 16-byte pieces, some a little past the end.
        let bytes = (bytes + 256).next_multiple_of(1024);
        let mut s = lock(&self.state);
        let fit = s.free.iter().filter(|(_, n)| **n >= bytes).min_by_key(|(p, n)| (**n, **p));
        let (ptr, room) = match fit {
            Some((p, n)) => (*p, *n),
            None => {
                let segment = self.vram.alloc("activations", bytes.next_multiple_of(SEGMENT))?;
                let found = (segment.ptr(), segment.len());
                s.segments.push(segment);
                found
            }
        };
        s.free.remove(&ptr);
        if room > bytes {
            s.free.insert(ptr + bytes as u64, room - bytes);
        }
        Ok(Arc::new(Lease { arena: self.clone(), ptr, bytes, round: s.round }))
    }
}

impl ArenaState {
    fn release(&mut self, ptr: u64, bytes: usize) {
        let (mut ptr, mut bytes) = (ptr, bytes);
        if let Some(n) = self.free.remove(&(ptr + bytes as u64)) {
            bytes += n;
        }
        if let Some((p, n)) = self.free.range(..ptr).next_back().map(|(p, n)| (*p, *n))
            && p + n as u64 == ptr
        {
            self.free.remove(&p);
            (ptr, bytes) = (p, bytes + n);
        }
        self.free.insert(ptr, bytes);
    }
}

impl Lease {
    pub(super) fn ptr(&self) -> u64 {
        self.ptr
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut s = lock(&self.arena.state);
        if s.round == self.round {
            s.release(self.ptr, self.bytes);
        }
    }
}

/// An activation matrix on the device. It is valid until the next round begins.
pub struct CudaBuf {
    /// Keeps the memory; `None` after a failure, when nothing is launched any more.
    pub(super) lease: Option<Arc<Lease>>,
    pub(super) ptr: u64,
    pub(super) rows: usize,
    pub(super) width: usize,
    /// FP32 instead of BF16.
    pub(super) f32: bool,
    /// The convolution (its weight's address) that the recurrence applies when it reads this matrix.
    pub(super) convolution: u64,
}

impl CudaBuf {
    /// What stands for a result after a failure.
    pub(super) fn failed(rows: usize, width: usize, f32: bool) -> CudaBuf {
        CudaBuf { lease: None, ptr: 0, rows, width, f32, convolution: 0 }
    }

    pub(super) fn bytes(&self) -> usize {
        self.rows * self.pitch()
    }

    /// Bytes of a row.
    pub(super) fn pitch(&self) -> usize {
        self.width * if self.f32 { 4 } else { 2 }
    }

    /// Some of its rows, the same memory.
    pub(super) fn rows_from(&self, first: usize, rows: usize) -> CudaBuf {
        CudaBuf { lease: self.lease.clone(), ptr: self.ptr + (first * self.pitch()) as u64, rows, ..*self }
    }
}
