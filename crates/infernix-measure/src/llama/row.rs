//! llama.cpp's arithmetic on one row, operation by operation: f32 where it has f32, f64 where it has f64.
//!
//! Definitions: `tools/perplexity/perplexity.cpp` of llama.cpp 0c1e570. Its compiler may fuse `scale * code + min` into
//! one rounding; here it is two, which moves a log-probability by at most one f32 ulp.

use crate::error::{MeasureError, Result};
use crate::row::{RowScore, top};

/// A row as llama.cpp's base file stores it: 16-bit codes on a line from `min_log_prob` up.
#[derive(Clone, Debug, PartialEq)]
pub struct CodedRow {
    /// Log-probability per code step.
    pub scale: f32,
    /// Log-probability of code 0, which also stands for everything below it.
    pub min_log_prob: f32,
    /// One code an id.
    pub codes: Vec<u16>,
}

/// Maximum and ln Σ exp(l − max) of a row, in llama.cpp's precisions.
fn normaliser(logits: &[f32]) -> (f32, f32) {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|l| f64::from((l - max).exp())).sum();
    (max, sum.ln() as f32)
}

pub(crate) fn check(row: usize, logits: &[f32]) -> Result<()> {
    match logits.iter().position(|l| !l.is_finite()) {
        Some(id) => Err(MeasureError::NotFinite { place: format!("row {row}"), id, value: logits[id] }),
        None => Ok(()),
    }
}

impl CodedRow {
    /// Codes a row of finite logits.
    pub fn encode(logits: &[f32]) -> Self {
        let (max, log_sum) = normaliser(logits);
        let min = logits.iter().copied().fold(f32::INFINITY, f32::min).max(max - 16.0);
        let scale = (max - min) / 65535.0;
        let code = |l: f32| if l > min { nearest((1.0 / scale) * (l - min)) } else { 0 };
        let codes =
            if scale == 0.0 { vec![0; logits.len()] } else { logits.iter().map(|&l| code(l)).collect() };
        Self { scale, min_log_prob: min - max - log_sum, codes }
    }

    /// Log-probabilities as a reader of the file sees them.
    pub fn log_probs(&self) -> Vec<f32> {
        self.codes.iter().map(|&c| self.log_prob(c)).collect()
    }

    fn log_prob(&self, code: u16) -> f32 {
        self.scale * f32::from(code) + self.min_log_prob
    }

    /// llama.cpp's row: `logits` under test against this row, uncut ids and all ids alike.
    pub fn score(&self, logits: &[f32], target: usize) -> RowScore {
        let (max, log_sum) = normaliser(logits);
        self.score_with(logits, max + log_sum, max + log_sum - logits[target], target)
    }

    /// The same with another file's log-probabilities under test, taken as they are.
    pub fn score_log_probs(&self, test: &[f32], target: usize) -> RowScore {
        self.score_with(test, 0.0, -test[target], target)
    }

    fn score_with(&self, test: &[f32], lse: f32, nll: f32, target: usize) -> RowScore {
        let nll_base = -self.log_prob(self.codes[target]);
        let mut kld = 0f64;
        let mut best = (0, f32::NEG_INFINITY);
        for (i, &code) in self.codes.iter().enumerate() {
            let p = self.log_prob(code);
            if p > best.1 {
                best = (i, p);
            }
            if p > -16.0 {
                kld += f64::from(p.exp() * (p - test[i] + lse));
            }
        }
        RowScore {
            kld,
            nll_reference: f64::from(nll_base),
            nll_test: f64::from(nll),
            p_diff: f64::from((-nll).exp() - (-nll_base).exp()),
            same_top: best.0 == top(test),
        }
    }
}

/// Rounds to nearest even the way llama.cpp does: by adding 1.5 · 2^23.
fn nearest(x: f32) -> u16 {
    // |x| stays below 65,536, so the sum is exact but for the rounding wanted.
    ((x + 12_582_912.0).to_bits() & 0x007f_ffff).wrapping_sub(0x0040_0000) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_end_sixteen_nats_down() {
        let row = CodedRow::encode(&[0.0, -8.0, -16.0, -40.0]);
        assert_eq!((row.codes[0], row.codes[2], row.codes[3]), (65535, 0, 0));
        assert!((i32::from(row.codes[1]) - 32768).abs() <= 1);
        let p = row.log_probs();
        let lse = (1.0 + (-8f64).exp() + (-16f64).exp()).ln();
        assert!((f64::from(p[0]) + lse).abs() < 2e-6);
        assert_eq!(p[2], p[3]);
    }

    #[test]
    fn a_flat_row_has_no_scale() {
        let row = CodedRow::encode(&[2.5; 10]);
        assert_eq!((row.scale, row.codes[9]), (0.0, 0));
        assert!((row.log_probs()[3] + 10f32.ln()).abs() < 1e-6);
        let s = row.score(&[1.0; 10], 4);
        assert!(s.kld.abs() < 1e-6 && s.same_top);
    }

    #[test]
    fn halves_go_to_even() {
        assert_eq!([0.5, 1.5, 2.5, 65_534.5, 65_535.0].map(nearest), [0, 2, 2, 65_534, 65_535]);
    }
}
