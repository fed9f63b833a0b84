//! Hash constants and row ids of the per-layer n-gram embedding (PLE).
//!
//! Every position looks up `(ngram_size - 1) * heads_per_ngram` rows of one large table. A row id mixes the current token
//! with its predecessors by multiplication and XOR, then reduces modulo a prime that belongs to the head. Multipliers come
//! from splitmix64, primes are consecutive; checkpoints repeat both as int64 buffers, which must equal the derivation.

use crate::{ModelError, PleConfig};

const GAMMA: u64 = 0x9E37_79B9_7F4A_7C15;

/// Derived constants of the table of one PLE layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Constants {
    /// One odd multiplier per token of the longest n-gram, `[ngram_size]`, current token first.
    pub multipliers: Vec<u64>,
    /// Prime number of rows of each head, `[heads]`.
    pub head_sizes: Vec<u64>,
    /// First row of each head, `[heads]`.
    pub head_offsets: Vec<u64>,
    /// Rows of the table, padded to the configured divisor.
    pub rows: u64,
    heads_per_ngram: usize,
    eos: u32,
}

fn splitmix64(mut v: u64) -> u64 {
    v = v.wrapping_add(GAMMA);
    v = (v ^ (v >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    v = (v ^ (v >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    v ^ (v >> 31)
}

fn is_prime(n: u64) -> bool {
    if n < 4 {
        return n > 1;
    }
    if n % 2 == 0 || n % 3 == 0 {
        return false;
    }
    let mut d = 5;
    while d * d <= n {
        if n % d == 0 || n % (d + 2) == 0 {
            return false;
        }
        d += 6;
    }
    true
}

/// Constants of every PLE layer in ascending layer order.
///
/// # Errors
/// If the multipliers times the vocabulary could exceed 63 bits or the table would not fit 2^40 rows.
pub fn constants(ple: &PleConfig, vocab: u64) -> Result<Vec<Constants>, ModelError> {
    let heads = (ple.ngram_size as usize - 1) * ple.heads_per_ngram as usize;
    let half = ((i64::MAX as u64 / vocab) / 2).max(1);
    let mut candidate = ple.base;
    let mut tables = Vec::new();
    for table in 0..ple.layers.len() as u64 {
        let multipliers = (1..=ple.ngram_size)
            .map(|i| {
                let v =
                    ple.seed.wrapping_add(10007u64.wrapping_mul(table)).wrapping_add(GAMMA.wrapping_mul(i));
                2 * (splitmix64(v) % half) + 1
            })
            .collect();
        let mut head_sizes = Vec::with_capacity(heads);
        while head_sizes.len() < heads {
            if is_prime(candidate) {
                head_sizes.push(candidate);
            }
            candidate += 1;
        }
        let mut sum = 0u64;
        let head_offsets = head_sizes
            .iter()
            .map(|&p| {
                let offset = sum;
                sum += p;
                offset
            })
            .collect();
        let rows = sum.div_ceil(ple.divisor) * ple.divisor;
        if rows > 1 << 40 {
            return Err(ModelError::Contradiction(format!("the n-gram table would have {rows} rows")));
        }
        tables.push(Constants {
            multipliers,
            head_sizes,
            head_offsets,
            rows,
            heads_per_ngram: ple.heads_per_ngram as usize,
            eos: ple.eos,
        });
    }
    Ok(tables)
}

impl Constants {
    /// Rows looked up per position.
    #[must_use]
    pub fn heads(&self) -> usize {
        self.head_sizes.len()
    }

    /// Tokens before the current one that take part.
    #[must_use]
    pub fn history(&self) -> usize {
        self.multipliers.len() - 1
    }

    /// Row ids of one position. `recent[0]` is the current token, `recent[s]` the one `s` positions earlier; a position
    /// before the start of the sequence is the end-of-text token. `rows` receives one id per head.
    ///
    /// An end-of-text token closes its segment: everything at or before it reads as end-of-text.
    ///
    /// # Panics
    /// If `recent` is shorter than the n-gram or `rows` has not one slot per head.
    pub fn row_ids(&self, recent: &[u32], rows: &mut [u64]) {
        assert!(recent.len() >= self.multipliers.len() && rows.len() == self.heads());
        let mut mixed = u64::from(recent[0]).wrapping_mul(self.multipliers[0]);
        let mut closed = false;
        for (order, &multiplier) in self.multipliers.iter().enumerate().skip(1) {
            closed |= recent[order] == self.eos;
            let token = if closed { self.eos } else { recent[order] };
            mixed ^= u64::from(token).wrapping_mul(multiplier);
            let first = (order - 1) * self.heads_per_ngram;
            for head in first..first + self.heads_per_ngram {
                rows[head] = mixed % self.head_sizes[head] + self.head_offsets[head];
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flash_next() -> PleConfig {
        PleConfig {
            layers: vec![1],
            embed_dim: 2560,
            conv_kernel: 4,
            ngram_size: 3,
            heads_per_ngram: 8,
            base: 20_000_000,
            divisor: 128,
            seed: 1234,
            eos: 248_044,
            parts: 128,
        }
    }

    #[test]
    fn constants_equal_the_values_read_from_the_released_buffers() {
        let c = &constants(&flash_next(), 248_320).unwrap()[0];
        assert_eq!(c.multipliers, [23_703_573_157_769, 20_109_073_645_365, 8_052_911_324_071]);
        assert_eq!(c.head_sizes[..4], [20_000_003, 20_000_023, 20_000_033, 20_000_047]);
        assert_eq!(c.head_sizes[15], 20_000_171);
        assert_eq!(c.head_offsets[15], 300_001_275);
        assert_eq!(c.rows, 320_001_536);
    }

    #[test]
    fn primes_continue_across_tables() {
        let mut ple = flash_next();
        ple.layers = vec![1, 5];
        let tables = constants(&ple, 248_320).unwrap();
        assert!(tables[1].head_sizes[0] > tables[0].head_sizes[15]);
        assert_ne!(tables[0].multipliers, tables[1].multipliers);
    }

    #[test]
    fn an_end_of_text_token_closes_the_window_behind_it() {
        let c = &constants(&flash_next(), 248_320).unwrap()[0];
        let (mut open, mut closed, mut start) = (vec![0; 16], vec![0; 16], vec![0; 16]);
        c.row_ids(&[7, 248_044, 5], &mut closed);
        c.row_ids(&[7, 248_044, 248_044], &mut start);
        c.row_ids(&[7, 9, 5], &mut open);
        assert_eq!(closed, start);
        assert_ne!(closed, open);
        assert!(open.iter().all(|&r| r < c.rows));
        // A closing token may itself look back: it is the current token here, not a predecessor.
        let mut own = vec![0; 16];
        c.row_ids(&[248_044, 9, 5], &mut own);
        assert_ne!(own, start);
    }
}
