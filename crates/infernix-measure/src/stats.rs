//! Statistics of scored rows: llama.cpp's, by its formulas, in f64 or in its own precisions.
//!
//! llama.cpp treats rows as independent. Rows of one chunk are not, so its ± is shown for comparison and
//! [`crate::bootstrap`] gives the intervals.

use crate::row::RowScore;

/// Fewer rows have no standard error, as in llama.cpp, which prints a 0 there.
pub const MIN_ROWS: usize = 11;

/// A value and llama.cpp's ± on it (one standard error).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Estimate {
    /// The value.
    pub value: f64,
    /// One standard error, rows taken as independent; none for fewer than [`MIN_ROWS`].
    pub pm: Option<f64>,
}

/// The lines of llama.cpp's KLD block, top to bottom, with their fractions. Median apart, see [`Percentiles`].
pub const KLD_LINES: [(&str, f64); 11] = [
    ("max", 1.0),
    ("99.9", 0.999),
    ("99", 0.99),
    ("95", 0.95),
    ("90", 0.90),
    ("50", 0.50),
    ("10", 0.10),
    ("5", 0.05),
    ("1", 0.01),
    ("0.1", 0.001),
    ("min", 0.0),
];

/// The lines of llama.cpp's Δp block: the same and the quartiles.
pub const P_DIFF_LINES: [(&str, f64); 13] = [
    ("max", 1.0),
    ("99.9", 0.999),
    ("99", 0.99),
    ("95", 0.95),
    ("90", 0.90),
    ("75", 0.75),
    ("50", 0.50),
    ("25", 0.25),
    ("10", 0.10),
    ("5", 0.05),
    ("1", 0.01),
    ("0.1", 0.001),
    ("min", 0.0),
];

/// Named percentiles, largest first.
pub type Percentiles = Vec<(&'static str, f64)>;

/// Everything llama.cpp prints of a pair of models.
#[derive(Clone, Debug, PartialEq)]
pub struct Stats {
    /// Scored rows.
    pub rows: usize,
    /// Perplexity of the model under test.
    pub ppl_test: Estimate,
    /// Perplexity of the reference.
    pub ppl_reference: Estimate,
    /// Correlation of the two rows of −ln p, −1..1; none where one of them does not vary, or there are too few.
    pub correlation: Option<f64>,
    /// ln(PPL test / PPL reference).
    pub ln_ratio: Estimate,
    /// PPL test / PPL reference.
    pub ratio: Estimate,
    /// PPL test − PPL reference.
    pub difference: Estimate,
    /// Mean KLD, nats.
    pub kld: Estimate,
    /// Percentiles of KLD ([`KLD_LINES`]).
    pub kld_percentiles: Percentiles,
    /// Mean Δp, a fraction.
    pub p_diff: Estimate,
    /// Percentiles of Δp ([`P_DIFF_LINES`]).
    pub p_diff_percentiles: Percentiles,
    /// Root of the mean square of Δp.
    pub p_diff_rms: Estimate,
    /// Share of rows with the same most likely token.
    pub same_top: Estimate,
}

/// Precision of products and positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// f64 throughout.
    Double,
    /// f32 where llama.cpp has f32: products of one row, stored values, percentile positions.
    Llama,
}

/// Mean and its standard error.
fn mean(sum: f64, squares: f64, n: usize) -> Estimate {
    if n == 0 {
        return Estimate::default();
    }
    let value = sum / n as f64;
    let variance = squares / n as f64 - value * value;
    Estimate { value, pm: (n >= MIN_ROWS).then(|| root(variance / (n - 1) as f64)) }
}

/// Root of what rounding may have made negative: llama.cpp prints `-nan` there for nearly equal models.
fn root(x: f64) -> f64 {
    x.max(0.0).sqrt()
}

/// Linear interpolation at `fraction · (n − 1)` of sorted values; the median of an even number is the mean of the
/// middle two.
pub fn percentile(sorted: &[f64], fraction: f64) -> f64 {
    let Some(last) = sorted.len().checked_sub(1) else { return f64::NAN };
    if fraction == 0.5 {
        return 0.5 * (sorted[last / 2] + sorted[sorted.len() / 2]);
    }
    let at = (fraction * last as f64).clamp(0.0, last as f64);
    let below = at as usize;
    let part = at - below as f64;
    (1.0 - part) * sorted[below] + part * sorted[(below + 1).min(last)]
}

/// The same in llama.cpp's f32.
fn percentile_f32(sorted: &[f64], fraction: f64) -> f64 {
    let Some(last) = sorted.len().checked_sub(1) else { return f64::NAN };
    let value = |i: usize| sorted[i] as f32;
    if fraction == 0.5 {
        return f64::from(0.5 * (value(last / 2) + value(sorted.len() / 2)));
    }
    if fraction <= 0.0 || fraction >= 1.0 {
        return f64::from(value(if fraction <= 0.0 { 0 } else { last }));
    }
    let at = fraction as f32 * last as f32;
    let below = (at as usize).min(last);
    let part = at - below as f32;
    f64::from((1.0 - part) * value(below) + part * value((below + 1).min(last)))
}

/// Sums over rows, from which all but the percentiles follow.
#[derive(Clone, Copy, Debug)]
pub struct Sums {
    precision: Precision,
    rows: usize,
    same_top: usize,
    /// Value and square: −ln p under test and by the reference, KLD, Δp, Δp².
    test: [f64; 2],
    reference: [f64; 2],
    kld: [f64; 2],
    p_diff: [f64; 2],
    p_diff_squares: [f64; 2],
    cross: f64,
}

impl Sums {
    /// Of no row.
    pub fn new(precision: Precision) -> Self {
        let zero = [0.0; 2];
        Self {
            precision,
            rows: 0,
            same_top: 0,
            test: zero,
            reference: zero,
            kld: zero,
            p_diff: zero,
            p_diff_squares: zero,
            cross: 0.0,
        }
    }

    /// Adds a row.
    pub fn add(&mut self, r: &RowScore) {
        let product = |a: f64, b: f64| match self.precision {
            Precision::Double => a * b,
            Precision::Llama => f64::from(a as f32 * b as f32),
        };
        let put = |sums: &mut [f64; 2], value: f64, square: f64| {
            sums[0] += value;
            sums[1] += square;
        };
        let square = product(r.p_diff, r.p_diff);
        put(&mut self.test, r.nll_test, product(r.nll_test, r.nll_test));
        put(&mut self.reference, r.nll_reference, product(r.nll_reference, r.nll_reference));
        put(&mut self.kld, r.kld, r.kld * r.kld);
        put(&mut self.p_diff, r.p_diff, square);
        put(&mut self.p_diff_squares, square, square * square);
        self.cross += product(r.nll_test, r.nll_reference);
        self.rows += 1;
        self.same_top += usize::from(r.same_top);
    }

    /// The statistics, without percentiles; zeros where there is no row.
    pub fn stats(&self) -> Stats {
        let n = self.rows;
        let of = |sums: [f64; 2]| mean(sums[0], sums[1], n);
        let (nll, base) = (of(self.test), of(self.reference));
        let cov = (self.cross / n.max(1) as f64 - nll.value * base.value) / (n.max(2) - 1) as f64;
        let ppl = |e: Estimate| Estimate { value: e.value.exp(), pm: e.pm.map(|pm| e.value.exp() * pm) };
        let both = |a: Estimate, b: Estimate| a.pm.zip(b.pm);
        let (test, reference) = (ppl(nll), ppl(base));
        let ln_ratio = Estimate {
            value: nll.value - base.value,
            pm: both(nll, base).map(|(a, b)| root(a * a + b * b - 2.0 * cov)),
        };
        let difference = Estimate {
            value: test.value - reference.value,
            pm: both(test, reference)
                .map(|(a, b)| root(a * a + b * b - 2.0 * test.value * reference.value * cov)),
        };
        let mse = of(self.p_diff_squares);
        let rms = mse.value.sqrt();
        let share = self.same_top as f64 / n.max(1) as f64;
        Stats {
            rows: n,
            ppl_test: test,
            ppl_reference: reference,
            correlation: both(nll, base).filter(|(a, b)| *a > 0.0 && *b > 0.0).map(|(a, b)| cov / (a * b)),
            ln_ratio,
            ratio: ppl(ln_ratio),
            difference,
            kld: of(self.kld),
            kld_percentiles: Vec::new(),
            p_diff: of(self.p_diff),
            p_diff_percentiles: Vec::new(),
            p_diff_rms: Estimate {
                value: rms,
                pm: mse.pm.map(|pm| if rms > 0.0 { 0.5 / rms * pm } else { 0.0 }),
            },
            same_top: Estimate {
                value: share,
                pm: (n >= MIN_ROWS).then(|| (share * (1.0 - share) / (n - 1) as f64).sqrt()),
            },
        }
    }
}

/// Statistics of rows; zeros where there are none.
pub fn stats(rows: &[RowScore], precision: Precision) -> Stats {
    let mut sums = Sums::new(precision);
    rows.iter().for_each(|r| sums.add(r));
    let at = if precision == Precision::Double { percentile } else { percentile_f32 };
    let lines = |value: fn(&RowScore) -> f64, which: &[(&'static str, f64)]| -> Percentiles {
        let mut sorted: Vec<f64> = rows.iter().map(value).collect();
        sorted.sort_by(f64::total_cmp);
        which.iter().map(|(name, f)| (*name, at(&sorted, *f))).collect()
    };
    Stats {
        kld_percentiles: lines(|r| r.kld, &KLD_LINES),
        p_diff_percentiles: lines(|r| r.p_diff, &P_DIFF_LINES),
        ..sums.stats()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn percentiles_interpolate_and_the_median_takes_the_middle_two() {
        let v = [1.0, 2.0, 4.0, 8.0];
        assert_eq!(percentile(&v, 0.5), 3.0);
        assert_eq!(percentile(&v, 1.0), 8.0);
        assert_eq!(percentile(&v, 0.0), 1.0);
        assert!((percentile(&v, 0.9) - (0.3 * 4.0 + 0.7 * 8.0)).abs() < 1e-12);
        assert_eq!(percentile(&[5.0], 0.5), 5.0);
        assert!(percentile(&[], 0.5).is_nan());
    }

    #[test]
    fn equal_models_have_no_uncertainty_instead_of_nan() {
        let row = |i: usize| RowScore {
            kld: 0.0,
            nll_reference: 0.1 + i as f64 / 7.0,
            nll_test: 0.1 + i as f64 / 7.0,
            p_diff: 0.0,
            same_top: true,
        };
        let rows: Vec<_> = (0..300).map(row).collect();
        for precision in [Precision::Double, Precision::Llama] {
            let s = stats(&rows, precision);
            assert_eq!(
                (s.kld.value, s.ln_ratio.value, s.ratio.value, s.same_top.value),
                (0.0, 0.0, 1.0, 1.0)
            );
            for e in [s.ln_ratio, s.ratio, s.difference, s.p_diff_rms, s.p_diff] {
                assert!(e.pm.is_some_and(|pm| pm.is_finite() && pm < 1e-5), "{e:?}");
            }
            assert!((s.correlation.unwrap() - 1.0).abs() < 1e-6);
        }
    }

    #[test]
    fn no_row_and_one_row_have_no_standard_error() {
        assert_eq!(stats(&[], Precision::Double).rows, 0);
        let one = RowScore { kld: 1.0, nll_reference: 1.0, nll_test: 2.0, p_diff: -0.2, same_top: false };
        let s = stats(&[one], Precision::Llama);
        assert_eq!((s.kld.value, s.kld.pm, s.same_top.value), (1.0, None, 0.0));
        let ten = stats(&[one; 10], Precision::Double);
        assert_eq!(
            [ten.ppl_test.pm, ten.ln_ratio.pm, ten.same_top.pm, ten.p_diff_rms.pm, ten.correlation],
            [None; 5]
        );
        assert!(stats(&[one; 11], Precision::Double).kld.pm.is_some());
    }

    proptest! {
        #[test]
        fn percentiles_rise_and_lie_within(v in prop::collection::vec(-5f64..5.0, 1..300)) {
            let mut s = v;
            s.sort_by(f64::total_cmp);
            for at in [percentile, percentile_f32] {
                let got: Vec<f64> = KLD_LINES.iter().map(|(_, f)| at(&s, *f)).collect();
                prop_assert!(got.windows(2).all(|w| w[0] >= w[1] - 1e-6));
                prop_assert!(got[10] >= s[0] - 1e-6 && got[0] <= s[s.len() - 1] + 1e-6);
            }
        }
    }
}
