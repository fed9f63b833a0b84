//! BLAKE3 of tensors while they are read: every consumed byte is hashed as it passes, and none is read for it alone.
//!
//! Readers work in steps that several threads take part in, so pieces may arrive out of order; those ahead wait, within a
//! bound. A tensor that is never read whole has no digest.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes of pieces that wait for those before them, of one tensor.
const MAX_WAITING: usize = 32 << 20;

/// Digests of the tensors read so far.
#[derive(Debug, Default)]
pub(crate) struct Digests {
    open: Mutex<HashMap<u32, Arc<Mutex<State>>>>,
    done: Mutex<HashMap<u32, [u8; 32]>>,
}

#[derive(Debug, Default)]
struct State {
    hasher: blake3::Hasher,
    next: u64,
    waiting: BTreeMap<u64, Vec<u8>>,
    held: usize,
    finished: bool,
}

fn lock<T>(m: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

impl State {
    /// Takes bytes that start at or before the end of what has been hashed.
    fn take(&mut self, start: u64, bytes: &[u8]) {
        let skip = (self.next - start).min(bytes.len() as u64);
        self.hasher.update(&bytes[skip as usize..]);
        self.next += bytes.len() as u64 - skip;
    }

    fn add(&mut self, start: u64, bytes: &[u8]) {
        if start > self.next {
            if self.held + bytes.len() <= MAX_WAITING {
                self.held += bytes.len();
                self.waiting.insert(start, bytes.to_vec());
            } else {
                // Scattered reads: whoever reads the tensor in order will bring them again.
                self.waiting.clear();
                self.held = 0;
            }
            return;
        }
        self.take(start, bytes);
        while let Some(entry) = self.waiting.first_entry() {
            if *entry.key() > self.next {
                break;
            }
            let (start, bytes) = entry.remove_entry();
            self.held -= bytes.len();
            self.take(start, &bytes);
        }
    }
}

impl Digests {
    /// Notes bytes `range` of tensor number `tensor`, which has `len`.
    pub(crate) fn note(&self, tensor: u32, len: u64, range: &Range<u64>, bytes: &[u8]) {
        if lock(&self.done).contains_key(&tensor) {
            return;
        }
        let state = lock(&self.open).entry(tensor).or_default().clone();
        let mut state = lock(&state);
        if state.finished {
            return;
        }
        state.add(range.start, bytes);
        if state.next == len {
            state.finished = true;
            lock(&self.done).insert(tensor, *state.hasher.finalize().as_bytes());
            lock(&self.open).remove(&tensor);
        }
    }

    /// The digest of a tensor, if it was read whole.
    pub(crate) fn get(&self, tensor: u32) -> Option<[u8; 32]> {
        lock(&self.done).get(&tensor).copied()
    }

    /// A digest from an earlier run.
    pub(crate) fn set(&self, tensor: u32, digest: [u8; 32]) {
        lock(&self.done).insert(tensor, digest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_in_any_order_and_twice_give_the_digest_of_the_whole() {
        let bytes: Vec<u8> = (0..1000u32).map(|i| (i * 7) as u8).collect();
        let d = Digests::default();
        for (a, b) in [(300, 500), (0, 100), (50, 300), (700, 1000), (0, 20), (500, 650)] {
            d.note(3, 1000, &(a..b), &bytes[a as usize..b as usize]);
            assert_eq!(d.get(3), None);
        }
        d.note(3, 1000, &(640..720), &bytes[640..720]);
        assert_eq!(d.get(3), Some(*blake3::hash(&bytes).as_bytes()));
        // Reading again changes nothing.
        d.note(3, 1000, &(0..10), &[0; 10]);
        assert_eq!(d.get(3), Some(*blake3::hash(&bytes).as_bytes()));
    }

    #[test]
    fn scattered_reads_are_not_kept() {
        let d = Digests::default();
        let piece = vec![1u8; 8 << 20];
        for i in 1..20u64 {
            d.note(0, 1 << 40, &(i << 24..(i << 24) + piece.len() as u64), &piece);
        }
        let state = lock(&d.open)[&0].clone();
        assert!(lock(&state).held <= MAX_WAITING);
    }
}
