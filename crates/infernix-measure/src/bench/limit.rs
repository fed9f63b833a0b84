//! The memory-bandwidth limit of this machine: how fast its threads read a buffer that no cache holds.

use infernix_engine::memory::huge_pages;
use std::hint::black_box;
use std::time::Instant;

/// Size of the buffer: several times the largest last-level caches in use.
pub const BUFFER_BYTES: usize = 512 << 20;

/// A buffer to read, filled once so that every page exists.
pub struct Reader {
    words: Vec<u64>,
    threads: usize,
    best: f64,
}

impl Reader {
    /// A buffer of `bytes` read by `threads` threads.
    pub fn new(bytes: usize, threads: usize) -> Reader {
        let mut words = vec![0; bytes / 8];
        // As weights are: on small pages one thread reads a third less, and the limit would be too low.
        huge_pages(&words);
        words.iter_mut().enumerate().for_each(|(i, w)| *w = i as u64);
        Reader { words, threads: threads.max(1), best: 0.0 }
    }

    /// Reads the buffer `passes` times; gives the best rate of all passes so far in bytes per second.
    pub fn read(&mut self, passes: usize) -> f64 {
        for _ in 0..passes {
            let clock = Instant::now();
            let share = self.words.len().div_ceil(self.threads).max(1);
            std::thread::scope(|s| {
                for part in self.words.chunks(share) {
                    s.spawn(move || black_box(sum(part)));
                }
            });
            self.best = self.best.max((self.words.len() * 8) as f64 / clock.elapsed().as_secs_f64());
        }
        self.best
    }
}

/// Independent sums, so that loads and not one chain of additions set the pace.
fn sum(words: &[u64]) -> u64 {
    let mut sums = [0u64; 32];
    let (blocks, rest) = words.as_chunks::<32>();
    for block in blocks {
        for (s, w) in sums.iter_mut().zip(block) {
            *s = s.wrapping_add(*w);
        }
    }
    sums.iter().chain(rest).fold(0, |a, b| a.wrapping_add(*b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_sums_and_the_best_rate_only_rises() {
        let words: Vec<u64> = (0..1000).collect();
        assert_eq!(sum(&words), 499_500);
        let mut r = Reader::new(1 << 20, 3);
        let first = r.read(1);
        assert!(first > 0.0 && r.read(2) >= first);
    }
}
