//! Host memory: anonymous in huge pages, which are touched and page-locked several times faster than pages of 4 KiB;
//! FP32 values on cache line boundaries.
#![expect(unsafe_code, reason = "an anonymous mapping; each block states why it is sound")]

use crate::error::EngineError;
use rayon::prelude::*;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use std::sync::Arc;

/// Size of a huge page.
const HUGE: usize = 2 << 20;

/// An anonymous mapping, zero at first.
pub struct HugeMemory {
    start: *mut u8,
    bytes: usize,
    mapped: usize,
}

// SAFETY: plain memory with one owner.
unsafe impl Send for HugeMemory {}
// SAFETY: shared access only reads.
unsafe impl Sync for HugeMemory {}

impl HugeMemory {
    /// Maps `bytes` bytes.
    pub fn new(bytes: usize) -> Result<Self, EngineError> {
        let mapped = bytes.max(1).next_multiple_of(HUGE);
        let io = |e: rustix::io::Errno| EngineError::Source {
            name: format!("{} MiB of host memory", mapped >> 20),
            source: Box::new(std::io::Error::from(e)),
        };
        // SAFETY: a fresh private mapping at an address of the kernel's choice.
        let start = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                mapped,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        }
        .map_err(io)?;
        // Huge pages are a wish: a system without them serves small ones.
        // SAFETY: the mapping just made.
        let _ = unsafe { madvise(start, mapped, Advice::LinuxHugepage) };
        Ok(HugeMemory { start: start.cast(), bytes, mapped })
    }

    /// A copy of `data`, touched by all threads.
    pub fn copy_of(data: &[u8]) -> Result<Self, EngineError> {
        let mut m = HugeMemory::new(data.len())?;
        m.as_mut()
            .par_chunks_mut(4 << 20)
            .zip(data.par_chunks(4 << 20))
            .for_each(|(o, i)| o.copy_from_slice(i));
        Ok(m)
    }
}

impl AsRef<[u8]> for HugeMemory {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: the mapping is at least that long and lives as long as self.
        unsafe { std::slice::from_raw_parts(self.start, self.bytes) }
    }
}

impl AsMut<[u8]> for HugeMemory {
    fn as_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.bytes) }
    }
}

impl Drop for HugeMemory {
    fn drop(&mut self) {
        // SAFETY: mapped once, unmapped once. An error would leave the mapping in place.
        let _ = unsafe { munmap(self.start.cast(), self.mapped) };
    }
}

/// Asks for huge pages under `data`, before it is touched for the first time. A hint: anonymous memory and files of file
/// systems that keep large folios follow it; where it is refused nothing changes.
///
/// A matrix-vector product reads its matrix once, from end to end. On pages of 4 KiB every 64 cache lines bring a page
/// walk and stop the processor's prefetchers: pages of 2 MiB raised the rate of one thread from 21 to 33 GB/s for plain
/// reading and from 15 to 27 GB/s for 4-bit products (both in one run).
pub fn huge_pages<T>(data: &[T]) {
    let (start, bytes) = (data.as_ptr().addr(), std::mem::size_of_val(data));
    let (first, end) = (start.next_multiple_of(HUGE), (start + bytes) / HUGE * HUGE);
    if first < end {
        let first = data.as_ptr().cast::<u8>().wrapping_add(first - start);
        // SAFETY: advice about how pages are backed changes no byte; the range lies inside the slice.
        let _ = unsafe { madvise(first.cast_mut().cast(), end - first.addr(), Advice::LinuxHugepage) };
    }
}

/// A cache line of FP32 values.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; 16]);

/// FP32 values from a cache line boundary on.
#[derive(Default)]
pub struct Lines {
    memory: Lent,
    len: usize,
}

/// Where lines lie.
enum Lent {
    /// In an allocation of their own.
    Own(Vec<Line>),
    /// From this address of a mapping on, which no other [`Lines`] reaches.
    Part(#[expect(dead_code, reason = "keeps the mapping")] Arc<HugeMemory>, *mut f32),
}

impl Default for Lent {
    fn default() -> Self {
        Lent::Own(Vec::new())
    }
}

// SAFETY: a part of a mapping has one owner, as an allocation has.
unsafe impl Send for Lines {}
// SAFETY: shared access only reads.
unsafe impl Sync for Lines {}

impl Lines {
    /// `len` zeros.
    pub fn zeroed(len: usize) -> Self {
        Lines { memory: Lent::Own(vec![Line([0.0; 16]); len.div_ceil(16)]), len }
    }

    /// Zeros of several lengths, together on huge pages where they fill one. (Recurrent state of 1 MiB a layer advanced
    /// in 69 us on huge pages and in 125 us on pages of 4 KiB, both in one run.)
    pub fn together(lengths: &[usize]) -> Vec<Self> {
        let bytes = lengths.iter().map(|n| 4 * n.next_multiple_of(16)).sum::<usize>();
        let memory = if bytes < HUGE { None } else { HugeMemory::new(bytes).ok().map(Arc::new) };
        let Some(memory) = memory else { return lengths.iter().map(|n| Lines::zeroed(*n)).collect() };
        let mut at = 0;
        let part = |len: &usize| {
            // Inside the mapping, whose bytes were added up above from the same lengths.
            let start = memory.start.wrapping_add(at).cast();
            at += 4 * len.next_multiple_of(16);
            Lines { memory: Lent::Part(memory.clone(), start), len: *len }
        };
        lengths.iter().map(part).collect()
    }

    fn start(&self) -> *const f32 {
        match &self.memory {
            Lent::Own(lines) => lines.as_ptr().cast(),
            Lent::Part(_, start) => start.cast_const(),
        }
    }
}

impl Clone for Lines {
    fn clone(&self) -> Self {
        Lines::from(&self[..])
    }
}

impl From<&[f32]> for Lines {
    fn from(values: &[f32]) -> Self {
        let mut lines = Lines::zeroed(values.len());
        lines.copy_from_slice(values);
        lines
    }
}

impl std::ops::Deref for Lines {
    type Target = [f32];
    fn deref(&self) -> &[f32] {
        // SAFETY: `len` values lie there, as long as self does: in its own lines, or in a mapping it holds.
        unsafe { std::slice::from_raw_parts(self.start(), self.len) }
    }
}

impl std::ops::DerefMut for Lines {
    fn deref_mut(&mut self) -> &mut [f32] {
        let start = match &mut self.memory {
            Lent::Own(lines) => lines.as_mut_ptr().cast(),
            Lent::Part(_, start) => *start,
        };
        // SAFETY: as above; nothing else reaches these values.
        unsafe { std::slice::from_raw_parts_mut(start, self.len) }
    }
}

impl std::fmt::Debug for Lines {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        (**self).fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_zero_then_holds_what_is_copied() {
        assert!(HugeMemory::new(3).unwrap().as_ref().iter().all(|b| *b == 0));
        let data: Vec<u8> = (0..10_000_000u32).map(|i| i as u8).collect();
        assert!(HugeMemory::copy_of(&data).unwrap().as_ref() == data);
    }

    #[test]
    fn lines_hold_their_values_on_a_cache_line_boundary() {
        let values: Vec<f32> = (0..37).map(|i| i as f32).collect();
        let mut lines = Lines::from(&values[..]);
        assert_eq!(&lines[..], &values[..]);
        assert_eq!(lines.as_ptr().addr() % 64, 0);
        lines[36] = -1.0;
        assert_eq!(lines.clone()[36], -1.0);
        assert!(Lines::zeroed(5).iter().all(|v| *v == 0.0) && Lines::default().is_empty());
        let lengths = [300_000usize, 7, 400_000, 0];
        let mut parts = Lines::together(&lengths);
        for (i, p) in parts.iter_mut().enumerate() {
            assert!(p.len() == lengths[i] && p.as_ptr().addr().is_multiple_of(64));
            assert!(p.iter().all(|v| *v == 0.0), "zero, and no part reaches another");
            p.fill(1.0 + i as f32);
        }
        assert!(parts.iter().enumerate().all(|(i, p)| p.iter().all(|v| *v == 1.0 + i as f32)));
        let kept = parts[2].clone();
        drop(parts);
        assert!(kept.iter().all(|v| *v == 3.0));
    }
}
