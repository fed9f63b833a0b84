//! Statistics against numpy and scipy. `scipy_values.py` beside this file made `scipy_values.json` and says how.

use infernix_measure::bench::Sample;
use infernix_measure::bootstrap::{Draws, RESAMPLES, SEED};
use infernix_measure::load::summary::{Spread, percentile, sorted};
use infernix_measure::{paired, stats};
use serde_json::Value;

fn stored() -> Value {
    serde_json::from_str(include_str!("scipy_values.json")).expect("the stored values")
}

fn list(v: &Value) -> Vec<f64> {
    v.as_array().expect("a list").iter().map(|x| x.as_f64().expect("a number")).collect()
}

fn number(v: &Value) -> f64 {
    v.as_f64().expect("a number")
}

#[track_caller]
fn near(found: f64, expected: f64, within: f64) {
    assert!((found - expected).abs() <= within, "{found} is not {expected} within {within}");
}

#[test]
fn percentiles_and_deviations_are_those_of_numpy() {
    let s = stored();
    let v = sorted(list(&s["values"]));
    for (q, expected) in list(&s["quantiles"]).into_iter().zip(list(&s["percentiles"])) {
        near(percentile(&v, q), expected, 1e-12);
        near(stats::percentile(&v, q), expected, 1e-12);
    }
    let spread = Spread::of(list(&s["values"]), &[90.0]);
    near(spread.mean, number(&s["mean"]), 1e-12);
    near(spread.std, number(&s["std"]), 1e-12);
    near(Sample::of(&list(&s["values"])).sd.unwrap(), number(&s["sample_std"]), 1e-12);
}

#[test]
fn bootstrap_intervals_are_numpys_of_the_same_draws_and_scipys_of_its_own() {
    let s = stored();
    let (chunks, other) = (list(&s["chunks"]), list(&s["other"]));
    let draws = Draws::new(chunks.len(), RESAMPLES, SEED);
    let mean = draws.mean(&chunks, 1).expect("an interval");
    let ratio = draws.ratio(&other, &chunks).expect("an interval");
    let same = |found: [f64; 2], key: &str, within: f64| {
        found.iter().zip(list(&s[key])).for_each(|(f, e)| near(*f, e, within));
    };
    same(mean, "chunk_mean_interval_same_draws", 1e-12);
    same(ratio, "chunk_ratio_interval_same_draws", 1e-12);
    // A 2.5 % quantile of 2,000 draws from a normal law has a standard error of sqrt(q (1 - q) / n) / density = 0.06
    // standard deviations; four of those.
    same(mean, "chunk_mean_interval_scipy", 0.24 * number(&s["chunk_mean_se_scipy"]));
}

#[test]
fn paired_changes_are_those_of_numpy_and_scipy() {
    let s = stored();
    let c = paired::change(&list(&s["before"]), &list(&s["after"])).expect("pairs");
    near(c.ratio, number(&s["change"]), 1e-12);
    let interval = c.interval.expect("twelve pairs");
    for (i, found) in interval.into_iter().enumerate() {
        near(found, list(&s["change_interval_same_draws"])[i], 1e-12);
        near(found, list(&s["change_interval_scipy"])[i], 0.24 * number(&s["change_se_scipy"]));
    }
    assert!(c.shown());
}
