//! Drafts copied from the request's own text: where the last tokens stood before, what followed them there.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

/// Tokens that must agree before a copy is tried, unless the settings say otherwise.
const MIN_MATCH: usize = 12;

/// One request's index of its text.
#[derive(Clone, Debug)]
pub struct CopyDrafter {
    text: Vec<u32>,
    /// End of the last occurrence of each run of `min_match` tokens.
    ends: HashMap<u64, usize>,
    min_match: usize,
}

impl CopyDrafter {
    /// An index of runs of `min_match` tokens (0 = the default of 12), without text.
    pub fn new(min_match: usize) -> Self {
        let min_match = if min_match == 0 { MIN_MATCH } else { min_match };
        CopyDrafter { text: Vec::new(), ends: HashMap::new(), min_match }
    }

    fn key(&self, end: usize) -> u64 {
        let mut h = DefaultHasher::new();
        self.text[end - self.min_match..end].hash(&mut h);
        h.finish()
    }

    /// Appends to the text. The run that ends it is not indexed yet: it would only find itself.
    pub fn push(&mut self, ids: &[u32]) {
        for id in ids {
            let end = self.text.len();
            if end >= self.min_match {
                let key = self.key(end);
                self.ends.insert(key, end);
            }
            self.text.push(*id);
        }
    }

    /// Up to `n` tokens that followed the text's last tokens where they stood before; empty without such a place.
    pub fn propose(&self, n: usize) -> &[u32] {
        let end = self.text.len();
        if end < self.min_match || n == 0 {
            return &[];
        }
        let Some(&at) = self.ends.get(&self.key(end)) else { return &[] };
        // Equal hashes are no proof.
        if self.text[at - self.min_match..at] != self.text[end - self.min_match..] {
            return &[];
        }
        &self.text[at..end.min(at + n)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_followed_last_time_is_proposed() {
        let mut c = CopyDrafter::new(3);
        c.push(&[1, 2, 3, 4, 5, 9, 1, 2]);
        assert!(c.propose(4).is_empty());
        c.push(&[3]);
        assert_eq!(c.propose(2), [4, 5]);
        assert_eq!(c.propose(100), [4, 5, 9, 1, 2, 3]);
        c.push(&[4]);
        assert_eq!(c.propose(1), [5]);
        c.push(&[7, 7, 7, 7]);
        assert_eq!(c.propose(3), [7], "a run copies itself");
    }
}
