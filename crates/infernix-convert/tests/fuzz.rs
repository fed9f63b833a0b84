//! The fuzz targets without a fuzzer: their seeds, cut, grown and changed at random but the same way every time. The long
//! form is `cargo xtask fuzz`.
#![expect(unsafe_code, reason = "the counting allocator of the targets")]

#[path = "../../../fuzz/src/entry.rs"]
#[expect(unreachable_pub, reason = "the file is a library's there")]
mod entry;

use std::path::{Path, PathBuf};

#[global_allocator]
static ALLOCATOR: entry::Counting = entry::Counting;

/// splitmix64.
struct Random(u64);

impl Random {
    fn next(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % below.max(1) as u64) as usize
    }

    /// Changes an input as fuzzers do: bits, edges of integers, copies, cuts, pieces of other seeds.
    fn change(&mut self, data: &mut Vec<u8>, seeds: &[Vec<u8>]) {
        const EDGES: [u64; 10] =
            [0, 1, 0x7f, 0xff, 0xffff, 0x7fff_ffff, 0xffff_ffff, 1 << 40, u64::MAX / 2, u64::MAX];
        for _ in 0..1 + self.next(4) {
            let at = self.next(data.len());
            match self.next(8) {
                0 if !data.is_empty() => data[at] ^= 1 << self.next(8),
                1 if !data.is_empty() => data[at] = self.next(256) as u8,
                2 => {
                    let (edge, width) = (EDGES[self.next(EDGES.len())], [1, 2, 4, 8][self.next(4)]);
                    for (o, b) in data[at..].iter_mut().zip(&edge.to_le_bytes()[..width]) {
                        *o = *b;
                    }
                }
                3 => data.truncate(at),
                4 => {
                    let end = (at + 1 + self.next(64)).min(data.len());
                    let piece = data[at..end].to_vec();
                    let to = self.next(data.len());
                    data.splice(to..to, piece);
                }
                5 => _ = data.drain(at..(at + 1 + self.next(32)).min(data.len())),
                6 => {
                    let other = &seeds[self.next(seeds.len())];
                    let from = self.next(other.len());
                    let end = (from + 1 + self.next(256)).min(other.len());
                    let stop = (at + end - from).min(data.len());
                    data.splice(at..stop, other[from..end].iter().copied());
                }
                // Digits of a JSON number become others.
                _ => {
                    let digits: Vec<usize> = (0..data.len()).filter(|i| data[*i].is_ascii_digit()).collect();
                    if !digits.is_empty() {
                        let digit = digits[self.next(digits.len())];
                        data[digit] = b'0' + self.next(10) as u8;
                    }
                }
            }
        }
    }
}

fn seeds(target: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target);
    let mut paths: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).collect();
    paths.sort();
    paths.iter().map(|p| std::fs::read(p).unwrap()).collect()
}

/// One test, because the allocator counts the whole process.
#[test]
fn changed_seeds_neither_panic_nor_allocate_beyond_the_bound() {
    let rounds = std::env::var("INFERNIX_FUZZ_ROUNDS").ok().and_then(|n| n.parse().ok()).unwrap_or(1500);
    type Reader = fn(&Path, &[u8]);
    let targets: [(&str, Reader); 3] =
        [("checkpoint", entry::checkpoint), ("gguf", entry::gguf), ("artifact", entry::artifact)];
    for (name, run) in targets {
        let folder = tempfile::tempdir().unwrap();
        let seeds = seeds(name);
        assert!(!seeds.is_empty(), "{name} has seeds");
        for seed in &seeds {
            entry::bounded(seed, |data| run(folder.path(), data));
        }
        let mut random = Random(name.len() as u64);
        for round in 0..rounds {
            let mut data = seeds[random.next(seeds.len())].clone();
            random.change(&mut data, &seeds);
            let input = data.clone();
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                entry::bounded(&data, |data| run(folder.path(), data));
            }));
            if result.is_err() {
                let path = std::env::temp_dir().join(format!("infernix-fuzz-{name}-{round}"));
                std::fs::write(&path, &input).unwrap();
                panic!("{name}: the input is kept in {}", path.display());
            }
        }
    }
}
