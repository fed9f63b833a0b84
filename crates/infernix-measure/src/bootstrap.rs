//! 95 % intervals by resampling whole chunks.
//!
//! Rows of one chunk share their text, so rows are not independent but chunks nearly are: each resample draws as many
//! chunks as there are, with replacement, and the interval is the 2.5th and 97.5th percentile of the statistic over the
//! resamples. One list of draws serves every statistic and every engine of a run, so ratios are paired.

use crate::row::RowScore;
use crate::stats::percentile;

/// Resamples of a published figure.
pub const RESAMPLES: usize = 2000;
/// Fewer resamples give no 2.5th percentile worth the name.
pub const MIN_RESAMPLES: usize = 100;
/// Fewer chunks give no interval: of three there are ten different resamples.
pub const MIN_CHUNKS: usize = 4;
/// Seed of the draws.
pub const SEED: u64 = 20_261_105;

/// A 95 % interval.
pub type Interval = [f64; 2];

/// How often each chunk is drawn, for every resample.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Draws {
    chunks: usize,
    counts: Vec<u32>,
}

/// SplitMix64: a full-period counter through a mixing function.
struct SplitMix(u64);

impl SplitMix {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

impl Draws {
    /// Draws for `chunks` chunks. Fewer than [`MIN_CHUNKS`] give no interval.
    pub fn new(chunks: usize, resamples: usize, seed: u64) -> Self {
        let resamples = if chunks < MIN_CHUNKS { 0 } else { resamples };
        let mut counts = vec![0; chunks * resamples];
        let mut random = SplitMix(seed);
        for own in counts.chunks_exact_mut(chunks.max(1)) {
            for _ in 0..chunks {
                // The bias of the high half of a 64 x 64 product is below 2^-40 for any number of chunks in use.
                own[((u128::from(random.next()) * chunks as u128) >> 64) as usize] += 1;
            }
        }
        Self { chunks, counts }
    }

    /// Interval of a statistic of the draw counts; none without resamples.
    pub fn interval(&self, statistic: impl Fn(&[u32]) -> f64) -> Option<Interval> {
        let mut values: Vec<f64> = self.counts.chunks_exact(self.chunks.max(1)).map(statistic).collect();
        if values.is_empty() || values.iter().any(|v| !v.is_finite()) {
            return None;
        }
        values.sort_by(f64::total_cmp);
        Some([percentile(&values, 0.025), percentile(&values, 0.975)])
    }

    /// Interval of a mean over rows, given each chunk's sum; chunks have equally many rows.
    pub fn mean(&self, sums: &[f64], rows_per_chunk: usize) -> Option<Interval> {
        let n = (self.chunks * rows_per_chunk) as f64;
        self.interval(|w| weigh(w, sums) / n)
    }

    /// Interval of the ratio of two means.
    pub fn ratio(&self, above: &[f64], below: &[f64]) -> Option<Interval> {
        self.interval(|w| weigh(w, above) / weigh(w, below))
    }

    /// Interval of a percentile of `value` over rows, chunk after chunk.
    pub fn percentile(
        &self,
        rows: &[RowScore],
        rows_per_chunk: usize,
        fraction: f64,
        value: impl Fn(&RowScore) -> f64,
    ) -> Option<Interval> {
        let mut sorted: Vec<(f64, usize)> =
            rows.iter().enumerate().map(|(i, r)| (value(r), i / rows_per_chunk.max(1))).collect();
        sorted.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        let last = rows.len().checked_sub(1)?;
        let at = fraction * last as f64;
        let (below, part) = (at as usize, at - at.floor());
        self.interval(|w| {
            // The rows a resample holds, in order, are the sorted rows repeated by their chunk's count.
            let mut passed = 0usize;
            let mut first = f64::NAN;
            for (v, chunk) in &sorted {
                let before = passed;
                passed += w[*chunk] as usize;
                if before <= below && below < passed {
                    first = *v;
                }
                if before <= (below + 1).min(last) && (below + 1).min(last) < passed {
                    return (1.0 - part) * first + part * v;
                }
            }
            f64::NAN
        })
    }
}

fn weigh(counts: &[u32], sums: &[f64]) -> f64 {
    counts.iter().zip(sums).map(|(w, s)| f64::from(*w) * s).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_are_the_same_every_time_and_fill_the_chunks() {
        let a = Draws::new(20, 300, SEED);
        assert_eq!(a, Draws::new(20, 300, SEED));
        assert_ne!(a, Draws::new(20, 300, SEED + 1));
        assert!(a.counts.chunks(20).all(|c| c.iter().sum::<u32>() == 20));
        assert_eq!(
            SplitMix(1_234_567).next(),
            6_457_827_717_110_365_317,
            "published first output of SplitMix64"
        );
    }

    #[test]
    fn an_interval_is_as_wide_as_the_chunks_vary() {
        let draws = Draws::new(400, RESAMPLES, SEED);
        assert_eq!(draws.mean(&[3.0; 400], 1).unwrap(), [3.0, 3.0]);
        let sums: Vec<f64> = (0..400).map(|i| f64::from(i % 2)).collect();
        let [low, high] = draws.mean(&sums, 1).unwrap();
        // Standard error 0.025: ±1.96 of it, within what 2,000 resamples resolve.
        assert!((low - 0.451).abs() < 0.006 && (high - 0.549).abs() < 0.006, "{low} {high}");
        for few in 1..MIN_CHUNKS {
            assert!(Draws::new(few, RESAMPLES, SEED).mean(&vec![1.0; few], 1).is_none());
        }
        assert!(draws.ratio(&sums, &[0.0; 400]).is_none());
    }

    #[test]
    fn percentiles_of_a_resample_are_those_of_its_rows() {
        let value = |i: usize| ((i * 37) % 101) as f64;
        let rows: Vec<RowScore> = (0..60)
            .map(|i| RowScore {
                kld: value(i),
                nll_reference: 0.0,
                nll_test: 0.0,
                p_diff: 0.0,
                same_top: true,
            })
            .collect();
        let draws = Draws::new(6, 200, 3);
        for fraction in [0.001, 0.5, 0.9, 0.999] {
            let mut direct: Vec<f64> = draws
                .counts
                .chunks(6)
                .map(|w| {
                    let mut all: Vec<f64> =
                        (0..60).flat_map(|i| std::iter::repeat_n(value(i), w[i / 10] as usize)).collect();
                    all.sort_by(f64::total_cmp);
                    percentile(&all, fraction)
                })
                .collect();
            direct.sort_by(f64::total_cmp);
            let want = [percentile(&direct, 0.025), percentile(&direct, 0.975)];
            let got = draws.percentile(&rows, 10, fraction, |r| r.kld).unwrap();
            assert!((got[0] - want[0]).abs() < 1e-9 && (got[1] - want[1]).abs() < 1e-9);
        }
    }
}
