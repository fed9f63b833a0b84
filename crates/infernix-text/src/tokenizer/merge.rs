//! Byte-pair merging: the lowest rank first, the leftmost of equal ranks.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::hash::{BuildHasher, BuildHasherDefault, Hasher, RandomState};

/// A multiplicative hasher for small keys. The merge table's keys come from the vocabulary; the word
/// cache, whose keys a user chooses, starts from a random seed (see [`FoldSeed`]).
#[derive(Default, Clone, Copy)]
pub(crate) struct FoldHasher(u64);

/// Builds [`FoldHasher`]s from one random seed, so that words that collide cannot be prepared.
pub(crate) struct FoldSeed(u64);

impl Default for FoldSeed {
    fn default() -> Self {
        Self(RandomState::new().hash_one(0u8))
    }
}

impl BuildHasher for FoldSeed {
    type Hasher = FoldHasher;

    fn build_hasher(&self) -> FoldHasher {
        FoldHasher(self.0)
    }
}

impl FoldHasher {
    const FACTOR: u64 = 0x9E37_79B9_7F4A_7C15;

    fn fold(&mut self, word: u64) {
        let wide = u128::from(self.0 ^ word) * u128::from(Self::FACTOR);
        self.0 = (wide as u64) ^ ((wide >> 64) as u64);
    }
}

impl Hasher for FoldHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0u8; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.fold(u64::from_le_bytes(word) ^ ((chunk.len() as u64) << 59));
        }
    }

    fn write_u64(&mut self, word: u64) {
        self.fold(word);
    }

    fn write_usize(&mut self, word: usize) {
        self.fold(word as u64);
    }
}

pub(crate) type FoldMap<K, V> = HashMap<K, V, BuildHasherDefault<FoldHasher>>;

/// Merge table: a pair of ids to (rank, id of the merged token).
#[derive(Default)]
pub(crate) struct Merges {
    pairs: FoldMap<u64, (u32, u32)>,
}

/// Words up to this many symbols are merged by rescanning; longer ones through a heap, so that a
/// long run without spaces costs n log n and not n².
const SCAN_LIMIT: usize = 48;

impl Merges {
    pub(crate) fn with_capacity(n: usize) -> Self {
        Self { pairs: FoldMap::with_capacity_and_hasher(n, BuildHasherDefault::default()) }
    }

    /// Adds a merge; a repeated pair keeps its last rank, like a dictionary built in file order.
    pub(crate) fn insert(&mut self, left: u32, right: u32, rank: u32, merged: u32) {
        self.pairs.insert(key(left, right), (rank, merged));
    }

    pub(crate) fn len(&self) -> usize {
        self.pairs.len()
    }

    fn get(&self, left: u32, right: u32) -> Option<(u32, u32)> {
        self.pairs.get(&key(left, right)).copied()
    }

    /// Merges `symbols` in place.
    pub(crate) fn apply(&self, symbols: &mut Vec<u32>) {
        if symbols.len() <= SCAN_LIMIT {
            self.apply_by_scan(symbols);
        } else {
            self.apply_by_heap(symbols);
        }
    }

    fn apply_by_scan(&self, symbols: &mut Vec<u32>) {
        let mut ranks = [(u32::MAX, 0u32); SCAN_LIMIT];
        let mut n = symbols.len();
        for i in 1..n {
            ranks[i - 1] = self.rank(symbols[i - 1], symbols[i]);
        }
        while n > 1 {
            let Some((at, &(rank, merged))) = ranks[..n - 1].iter().enumerate().min_by_key(|(_, r)| r.0)
            else {
                break;
            };
            if rank == u32::MAX {
                break;
            }
            symbols[at] = merged;
            symbols.copy_within(at + 2..n, at + 1);
            ranks.copy_within(at + 1..n - 1, at);
            n -= 1;
            if at > 0 {
                ranks[at - 1] = self.rank(symbols[at - 1], symbols[at]);
            }
            if at + 1 < n {
                ranks[at] = self.rank(symbols[at], symbols[at + 1]);
            }
        }
        symbols.truncate(n);
    }

    fn rank(&self, left: u32, right: u32) -> (u32, u32) {
        self.get(left, right).unwrap_or((u32::MAX, 0))
    }

    fn apply_by_heap(&self, symbols: &mut Vec<u32>) {
        const NONE: usize = usize::MAX;
        let n = symbols.len();
        let mut next: Vec<usize> = (1..=n).collect();
        next[n - 1] = NONE;
        let mut previous: Vec<usize> = (0..n).map(|i| i.wrapping_sub(1)).collect();
        let mut alive = vec![true; n];
        // (rank, left position, left id, right id): the ids tell stale entries apart.
        let mut heap = BinaryHeap::new();
        let push = |heap: &mut BinaryHeap<_>, symbols: &[u32], left: usize, right: usize| {
            if let Some((rank, merged)) = self.get(symbols[left], symbols[right]) {
                heap.push(Reverse((rank, left, symbols[left], symbols[right], merged)));
            }
        };
        for i in 1..n {
            push(&mut heap, symbols, i - 1, i);
        }
        while let Some(Reverse((_, left, left_id, right_id, merged))) = heap.pop() {
            if !alive[left] || symbols[left] != left_id {
                continue;
            }
            let right = next[left];
            if right == NONE || symbols[right] != right_id {
                continue;
            }
            symbols[left] = merged;
            alive[right] = false;
            next[left] = next[right];
            if next[left] != NONE {
                previous[next[left]] = left;
                push(&mut heap, symbols, left, next[left]);
            }
            if previous[left] != NONE {
                push(&mut heap, symbols, previous[left], left);
            }
        }
        let mut keep = alive.into_iter();
        symbols.retain(|_| keep.next().unwrap_or(false));
    }
}

fn key(left: u32, right: u32) -> u64 {
    (u64::from(left) << 32) | u64::from(right)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn scan_and_heap_merge_alike(
            rules in prop::collection::vec((0u32..12, 0u32..12, 0u32..24), 0..40),
            word in prop::collection::vec(0u32..12, 1..SCAN_LIMIT),
        ) {
            let mut merges = Merges::default();
            for (rank, (a, b, c)) in rules.into_iter().enumerate() {
                merges.insert(a, b, rank as u32, c);
            }
            let (mut scan, mut heap) = (word.clone(), word);
            merges.apply_by_scan(&mut scan);
            merges.apply_by_heap(&mut heap);
            prop_assert_eq!(scan, heap);
        }
    }

    #[test]
    fn the_lowest_rank_wins_over_the_leftmost_pair() {
        let mut merges = Merges::default();
        merges.insert(1, 2, 1, 10);
        merges.insert(2, 3, 0, 11);
        let mut word = vec![1, 2, 3];
        merges.apply(&mut word);
        assert_eq!(word, [1, 11]);
    }
}
