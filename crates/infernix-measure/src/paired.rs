//! Changes measured in pairs: two programs or engines run in turns, so that what the machine does besides falls on both.

use crate::bootstrap::{Draws, Interval, RESAMPLES, SEED};

/// How much larger the second of each pair is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Change {
    /// Geometric mean of the pairs' ratios, second over first.
    pub ratio: f64,
    /// Its 95 % interval: percentile bootstrap over pairs; none for fewer than [`crate::bootstrap::MIN_CHUNKS`].
    pub interval: Option<Interval>,
    /// Pairs.
    pub pairs: usize,
}

/// Fewer pairs show no change: that five differ in one direction happens to equal programs once in 16 times, which is more
/// than an interval of 95 % may be wrong.
pub const MIN_SHOWN: usize = 6;

impl Change {
    /// Whether the interval leaves out 1, and the pairs are enough to believe it.
    pub fn shown(&self) -> bool {
        self.pairs >= MIN_SHOWN && self.interval.is_some_and(|[low, high]| low > 1.0 || high < 1.0)
    }
}

/// The change from `first` to `second`, pair by pair; `None` without pairs or with a value that is not above 0. Ratios are
/// averaged as logarithms, so that doubling and halving cancel.
pub fn change(first: &[f64], second: &[f64]) -> Option<Change> {
    let positive = |v: &f64| v.is_finite() && *v > 0.0;
    if first.is_empty() || first.len() != second.len() || !first.iter().chain(second).all(positive) {
        return None;
    }
    let logs: Vec<f64> = first.iter().zip(second).map(|(a, b)| (b / a).ln()).collect();
    let mean = logs.iter().sum::<f64>() / logs.len() as f64;
    let interval = Draws::new(logs.len(), RESAMPLES, SEED).mean(&logs, 1);
    Some(Change { ratio: mean.exp(), interval: interval.map(|i| i.map(f64::exp)), pairs: logs.len() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doubling_and_halving_cancel_and_what_is_no_pair_is_refused() {
        let c = change(&[1.0, 2.0], &[2.0, 1.0]).unwrap();
        assert!((c.ratio - 1.0).abs() < 1e-12 && !c.shown(), "{c:?}");
        assert_eq!(change(&[1.0], &[1.5]).unwrap().interval, None);
        let up = change(&[1.0; 8], &[1.1; 8]).unwrap();
        assert!(up.shown() && (up.ratio - 1.1).abs() < 1e-12);
        let few = change(&[1.0; 5], &[1.1; 5]).unwrap();
        assert!(few.interval.is_some() && !few.shown(), "{few:?}");
        assert!(change(&[], &[]).is_none() && change(&[1.0], &[1.0, 2.0]).is_none());
        assert!(change(&[0.0], &[1.0]).is_none() && change(&[1.0], &[f64::NAN]).is_none());
    }
}
