//! Ids that nobody can guess: a secret of the process, hashed with a counter.

use std::hash::{BuildHasher as _, Hasher as _};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};

static SECRET: LazyLock<[u8; 32]> = LazyLock::new(|| {
    // The standard library keys its hash maps with random bits of the system; four of them are a secret.
    let mut hasher = blake3::Hasher::new();
    for _ in 0..4 {
        hasher.update(&std::hash::RandomState::new().build_hasher().finish().to_le_bytes());
    }
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    hasher.update(&now.as_nanos().to_le_bytes());
    hasher.update(&std::process::id().to_le_bytes());
    *hasher.finalize().as_bytes()
});
static NEXT: AtomicU64 = AtomicU64::new(0);

fn block() -> blake3::Hash {
    blake3::keyed_hash(&SECRET, &NEXT.fetch_add(1, Ordering::Relaxed).to_le_bytes())
}

/// A new id: the prefix and 96 random bits in hex.
pub(crate) fn fresh(prefix: &str) -> String {
    format!("{prefix}{}", &block().to_hex()[..24])
}

/// A new seed.
pub(crate) fn seed() -> u64 {
    let hash = block();
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&hash.as_bytes()[..8]);
    // Within what a JSON number holds exactly, so that a logged seed can be sent back.
    u64::from_le_bytes(bytes) >> 12
}

/// The seed of a further answer to the same request.
pub(crate) fn derived_seed(seed: u64, choice: usize) -> u64 {
    if choice == 0 {
        return seed;
    }
    let mut hasher = blake3::Hasher::new();
    hasher.update(&seed.to_le_bytes()).update(&(choice as u64).to_le_bytes());
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&hasher.finalize().as_bytes()[..8]);
    u64::from_le_bytes(bytes)
}

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default().as_secs()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_differ_and_seeds_repeat() {
        assert_ne!(fresh("a_"), fresh("a_"));
        assert_eq!(derived_seed(7, 0), 7);
        assert_eq!(derived_seed(7, 2), derived_seed(7, 2));
        assert_ne!(derived_seed(7, 1), derived_seed(7, 2));
    }
}
