//! One scored row: two distributions over the vocabulary and the token that followed.
//!
//! Logits are rounded to BF16 and ids the tokenizer cannot produce are left out before anything is computed; then
//! everything is f64 over the whole vocabulary. Sums run over fixed blocks in a fixed order, so a figure does not depend
//! on the number of threads.

use crate::error::{MeasureError, Result};
use half::bf16;
use rayon::prelude::*;

/// Ids with reference ln p at or below this are left out where one side comes from a llama.cpp file, whose codes end
/// 16 nats below the row's maximum.
pub const LLAMA_CUT: f64 = -16.0;

/// Elements of one block of a sum.
const BLOCK: usize = 4096;
/// Shorter rows are not worth several threads.
const PARALLEL: usize = 1 << 15;

/// What one row contributes to every statistic.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowScore {
    /// KL(reference ‖ test) in nats.
    pub kld: f64,
    /// −ln p of the token that followed, by the reference.
    pub nll_reference: f64,
    /// The same by the model under test.
    pub nll_test: f64,
    /// p_test − p_reference of that token.
    pub p_diff: f64,
    /// Whether both have the same most likely token (ties: lowest id).
    pub same_top: bool,
}

/// Adds `f` over `0..n`: blocks from left to right, then the blocks' sums from left to right.
pub(crate) fn block_sum(n: usize, f: impl Fn(usize) -> f64 + Sync) -> f64 {
    let block = |b: usize| (b * BLOCK..n.min((b + 1) * BLOCK)).map(&f).sum::<f64>();
    let blocks = n.div_ceil(BLOCK);
    if n >= PARALLEL {
        (0..blocks).into_par_iter().map(block).collect::<Vec<_>>().iter().sum()
    } else {
        (0..blocks).map(block).sum()
    }
}

/// A row of logits made ready: rounded, cut to the valid ids, with its normaliser.
#[derive(Clone, Debug, PartialEq)]
pub struct Logits {
    /// BF16 words of the valid ids.
    words: Vec<u16>,
    /// ln Σ exp(l).
    lse: f64,
    /// The most likely id, lowest on equality.
    top: usize,
}

impl Logits {
    /// Rounds to BF16 and keeps ids below `valid`. `row` names the row in errors.
    pub fn new(row: usize, logits: &[f32], valid: usize) -> Result<Self> {
        if valid == 0 || valid > logits.len() {
            return Err(MeasureError::Options(format!(
                "{valid} valid ids of a row of {} logits",
                logits.len()
            )));
        }
        let words: Vec<u16> = logits[..valid].iter().map(|&l| bf16::from_f32(l).to_bits()).collect();
        let mut top = 0;
        for (id, &w) in words.iter().enumerate() {
            let value = widen(w);
            if !value.is_finite() {
                return Err(MeasureError::NotFinite { place: format!("row {row}"), id, value: logits[id] });
            }
            if value > widen(words[top]) {
                top = id;
            }
        }
        let max = f64::from(widen(words[top]));
        let lse = max + block_sum(valid, |i| (f64::from(widen(words[i])) - max).exp()).ln();
        Ok(Self { words, lse, top })
    }

    /// Number of valid ids.
    pub fn len(&self) -> usize {
        self.words.len()
    }

    /// Whether there are none; never so.
    pub fn is_empty(&self) -> bool {
        self.words.is_empty()
    }

    /// The logit of a valid id as BF16 bits.
    pub fn word(&self, id: usize) -> u16 {
        self.words[id]
    }

    /// ln Σ exp(l).
    pub fn lse(&self) -> f64 {
        self.lse
    }

    /// The most likely id.
    pub fn top(&self) -> usize {
        self.top
    }

    /// ln p of a valid id.
    pub fn log_prob(&self, id: usize) -> f64 {
        f64::from(widen(self.words[id])) - self.lse
    }

    /// Scores `test` against this row as the reference: KL over all valid ids.
    pub fn score(&self, test: &Logits, target: usize) -> RowScore {
        let kld = block_sum(self.len(), |i| {
            let p = self.log_prob(i);
            p.exp() * (p - test.log_prob(i))
        });
        // The sum of exact terms is never negative; a rounding error of the order of 1e-16 may be.
        self.finish(kld.max(0.0), test.log_prob(target), test.top, target)
    }

    /// Scores log-probabilities taken as they are (a llama.cpp file under test), over ids with ln p above the cut.
    pub fn score_log_probs(&self, test: &[f32], target: usize) -> RowScore {
        let kld = block_sum(self.len(), |i| {
            let p = self.log_prob(i);
            if p > LLAMA_CUT { p.exp() * (p - f64::from(test[i])) } else { 0.0 }
        });
        self.finish(kld, f64::from(test[target]), top(&test[..self.len()]), target)
    }

    fn finish(&self, kld: f64, test: f64, test_top: usize, target: usize) -> RowScore {
        score_of(kld, self.log_prob(target), test, self.top == test_top)
    }
}

/// Scores against log-probabilities taken as they are (a llama.cpp file as the reference): ids above the cut alone.
pub fn score_against_log_probs(reference: &[f32], test: &Logits, target: usize) -> RowScore {
    let n = test.len();
    let kld = block_sum(n, |i| {
        let p = f64::from(reference[i]);
        if p > LLAMA_CUT { p.exp() * (p - test.log_prob(i)) } else { 0.0 }
    });
    let same = top(&reference[..n]) == test.top();
    score_of(kld, f64::from(reference[target]), test.log_prob(target), same)
}

/// Scores one llama.cpp file's log-probabilities against another's, in f64, ids below `valid` above the cut.
pub fn score_log_probs(reference: &[f32], test: &[f32], valid: usize, target: usize) -> RowScore {
    let kld = block_sum(valid, |i| {
        let p = f64::from(reference[i]);
        if p > LLAMA_CUT { p.exp() * (p - f64::from(test[i])) } else { 0.0 }
    });
    let same = top(&reference[..valid]) == top(&test[..valid]);
    score_of(kld, f64::from(reference[target]), f64::from(test[target]), same)
}

/// A row from its parts; log-probabilities of the token that followed.
pub(crate) fn score_of(kld: f64, reference: f64, test: f64, same_top: bool) -> RowScore {
    let p_diff = test.exp() - reference.exp();
    RowScore { kld, nll_reference: -reference, nll_test: -test, p_diff, same_top }
}

/// Index of the largest value, lowest on equality.
pub(crate) fn top(values: &[f32]) -> usize {
    let mut best = 0;
    for (i, v) in values.iter().enumerate() {
        if *v > values[best] {
            best = i;
        }
    }
    best
}

pub(crate) fn widen(word: u16) -> f32 {
    bf16::from_bits(word).to_f32()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn row(logits: &[f32]) -> Logits {
        Logits::new(0, logits, logits.len()).unwrap()
    }

    #[test]
    fn a_row_against_itself_is_exactly_zero() {
        let logits: Vec<f32> = (0..50_000).map(|i| ((i * 7919) % 4001) as f32 * 0.01 - 20.0).collect();
        let r = row(&logits);
        let s = r.score(&r.clone(), 17);
        assert_eq!((s.kld, s.p_diff, s.same_top), (0.0, 0.0, true));
        assert_eq!(s.nll_reference, s.nll_test);
    }

    #[test]
    fn two_ids_by_hand() {
        // p = (1/4, 3/4), q = (1/2, 1/2): KL = 1/4 ln 1/2 + 3/4 ln 3/2; ln 3 is not BF16, so 3 = e^l is rebuilt from l.
        let l = bf16::from_f32(3f32.ln()).to_f32();
        let e = f64::from(l).exp();
        let (p0, p1) = (1.0 / (1.0 + e), e / (1.0 + e));
        let want = p0 * (2.0 * p0).ln() + p1 * (2.0 * p1).ln();
        let s = row(&[0.0, l]).score(&row(&[5.0, 5.0]), 1);
        assert!((s.kld - want).abs() < 1e-15, "{} {want}", s.kld);
        assert!((s.p_diff - (0.5 - p1)).abs() < 1e-15);
        assert!(!s.same_top, "a tie goes to id 0");
    }

    #[test]
    fn logits_closer_than_bf16_are_equal() {
        let s = row(&[1.0, 2.0, 3.0]).score(&row(&[1.0005, 1.9996, 3.0009]), 0);
        assert_eq!(s.kld, 0.0);
    }

    #[test]
    fn padded_ids_count_for_nothing() {
        let a = Logits::new(0, &[1.0, 2.0, 90.0], 2).unwrap();
        let b = Logits::new(0, &[1.0, 2.0, f32::NAN], 2).unwrap();
        assert_eq!(a, b);
        assert_eq!(a.top(), 1);
    }

    #[test]
    fn what_is_no_number_is_refused_by_row_and_id() {
        let e = Logits::new(7, &[0.0, f32::INFINITY], 2).unwrap_err().to_string();
        assert!(e.contains("row 7") && e.contains("id 1"), "{e}");
        // Rounds to infinity in BF16.
        assert!(Logits::new(0, &[f32::MAX], 1).is_err());
        assert!(Logits::new(0, &[1.0], 2).is_err());
    }

    #[test]
    fn huge_logits_do_not_overflow() {
        let r = row(&[3e38, -3e38, 0.0]);
        let s = r.score(&row(&[3e38, 0.0, 0.0]), 0);
        assert_eq!((s.kld, s.nll_test), (0.0, 0.0));
    }

    proptest! {
        #[test]
        fn divergence_is_never_negative_and_no_shift_changes_it(
            a in prop::collection::vec(-30f32..30.0, 5..200),
            noise in prop::collection::vec(-3f32..3.0, 200),
        ) {
            let b: Vec<f32> = a.iter().zip(&noise).map(|(x, n)| x + n).collect();
            let s = row(&a).score(&row(&b), 0);
            prop_assert!(s.kld >= 0.0 && s.kld.is_finite());
            prop_assert!(s.nll_test >= 0.0);
            // Powers of two times the grid shift exactly: both rows by the same amount.
            let grid = |v: &[f32]| v.iter().map(|x| (x * 2.0).round() / 2.0).collect::<Vec<_>>();
            let moved = |v: &[f32]| grid(v).iter().map(|x| x + 4.0).collect::<Vec<_>>();
            let one = row(&grid(&a)).score(&row(&grid(&b)), 1);
            let two = row(&moved(&a)).score(&row(&moved(&b)), 1);
            prop_assert!((one.kld - two.kld).abs() < 1e-12);
        }
    }
}
