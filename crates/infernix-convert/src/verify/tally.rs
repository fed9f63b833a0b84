//! Counting what verification finds, and its report.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Duration;

use infernix_artifact::Digest;
use serde::{Serialize, Serializer};

use super::map::Map;

/// Mismatches that are listed; all are counted.
const LISTED: usize = 20;

/// A stored word that differs from the source's.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Mismatch {
    /// The source's tensor, or the resource.
    pub tensor: String,
    /// Row.
    pub row: u64,
    /// Column.
    pub column: u64,
    /// The source's word.
    pub expected: String,
    /// The stored word.
    pub found: String,
}

/// The largest difference of a re-quantized parameter.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Worst {
    /// Row of the source's tensor.
    pub row: u64,
    /// Column.
    pub column: u64,
    /// The source's value.
    pub expected: f64,
    /// The stored value.
    pub found: f64,
}

/// A re-quantized parameter and its error.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Requantized {
    /// Logical name.
    pub name: String,
    /// Stored format.
    pub format: String,
    /// Method recorded by the converter; empty if none was.
    pub method: String,
    /// Square root of the sum of squared differences over that of squared values.
    pub rel_error: f64,
    /// The element that differs most.
    pub worst: Worst,
}

/// What verification found.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct VerifyReport {
    /// Nothing is wrong.
    pub ok: bool,
    /// Whether words were compared with a checkpoint.
    pub checkpoint: bool,
    /// Expert records compared.
    pub experts: u64,
    /// Expert records that differ.
    pub expert_mismatches: u64,
    /// Parameters compared word for word (experts, their scales and re-quantized ones apart).
    pub tensors: u64,
    /// Words that differ.
    pub tensor_mismatch_count: u64,
    /// The first of them, by tensor and place.
    pub tensor_mismatches: Vec<Mismatch>,
    /// Activation scales that differ.
    pub input_scale_mismatches: u64,
    /// Re-quantized matrices by component (an expert counts three).
    pub requantized: BTreeMap<String, u64>,
    /// Re-quantized parameters with their errors.
    pub requantized_parameters: Vec<Requantized>,
    /// Rows where our own encoder gives other words.
    pub requantized_mismatches: u64,
    /// Bindings of the proposal head.
    pub proposal_bindings: u64,
    /// n-gram rows compared.
    pub ngram_rows_checked: u64,
    /// n-gram rows that differ.
    pub ngram_row_mismatches: u64,
    /// `ok`, `mismatch` or `absent`.
    pub digests: String,
    /// Objects whose bytes are not those of their digest.
    pub corrupt_objects: Vec<String>,
    /// Logical parameters without a binding.
    pub missing_bindings: Vec<String>,
    /// Bindings that are no logical parameter of the model.
    pub extra_bindings: Vec<String>,
    /// Everything else that is wrong.
    pub problems: Vec<String>,
    /// What is odd but not wrong.
    pub warnings: Vec<String>,
    /// The digest to quote; absent where the volume was left out.
    #[serde(serialize_with = "digest_or_null")]
    pub digest: Option<Digest>,
    /// Time taken.
    pub seconds: f64,
}

fn digest_or_null<S: Serializer>(digest: &Option<Digest>, s: S) -> Result<S::Ok, S::Error> {
    match digest {
        Some(digest) => s.collect_str(digest),
        None => s.serialize_none(),
    }
}

impl VerifyReport {
    /// Settles `ok`.
    pub(super) fn finish(&mut self, elapsed: Duration) {
        self.seconds = elapsed.as_secs_f64();
        self.ok = self.expert_mismatches == 0
            && self.tensor_mismatch_count == 0
            && self.input_scale_mismatches == 0
            && self.requantized_mismatches == 0
            && self.ngram_row_mismatches == 0
            && self.digests != "mismatch"
            && self.corrupt_objects.is_empty()
            && self.missing_bindings.is_empty()
            && self.extra_bindings.is_empty()
            && self.problems.is_empty();
    }

    /// The document of `verify --json`, without `schema_version`.
    #[must_use]
    pub fn to_json(&self) -> serde_json::Value {
        serde_json::to_value(self).unwrap_or_default()
    }
}

/// Error sums of a parameter.
#[derive(Debug, Clone, Default)]
pub(crate) struct Errors {
    /// Largest magnitude of the exact values.
    pub(crate) largest_exact: f32,
    pub(crate) squares: f64,
    pub(crate) total: f64,
    pub(crate) largest: f64,
    pub(crate) worst: Worst,
    pub(crate) method: String,
    pub(crate) format: String,
}

impl Errors {
    /// Adds decoded and exact values of rows from `first_row` on.
    pub(crate) fn add(&mut self, exact: &[f32], stored: &[f32], k: u64, first_row: u64) {
        for (at, (&x, &y)) in exact.iter().zip(stored).enumerate() {
            let (x, y) = (f64::from(x), f64::from(y));
            let difference = (x - y).abs();
            self.squares += difference * difference;
            self.total += x * x;
            if difference > self.largest {
                self.largest = difference;
                let (row, column) = (first_row + at as u64 / k.max(1), at as u64 % k.max(1));
                self.worst = Worst { row, column, expected: x, found: y };
            }
        }
    }

    fn merge(&mut self, other: &Errors) {
        self.squares += other.squares;
        self.total += other.total;
        if other.largest > self.largest {
            self.largest = other.largest;
            self.worst = other.worst.clone();
        }
        self.method.clone_from(&other.method);
        self.format.clone_from(&other.format);
    }
}

#[derive(Debug, Default)]
struct Counts {
    mismatches: Vec<Mismatch>,
    words: u64,
    experts: u64,
    expert_mismatches: u64,
    input_scale_mismatches: u64,
    requantized_rows: u64,
    rows: u64,
    row_mismatches: u64,
    problems: Vec<String>,
    warnings: Vec<String>,
    /// By target: errors of a re-quantized parameter, in the order of blocks.
    errors: BTreeMap<usize, Errors>,
}

/// Shared counters.
#[derive(Debug, Default)]
pub(crate) struct Tally(Mutex<Counts>);

impl Tally {
    fn with(&self, f: impl FnOnce(&mut Counts)) {
        let mut counts = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        f(&mut counts);
    }

    pub(crate) fn mismatch(&self, mismatch: Mismatch) {
        self.with(|c| {
            c.words += 1;
            c.mismatches.push(mismatch);
            // The smallest are kept, so that the list does not depend on timing.
            if c.mismatches.len() > 4 * LISTED {
                c.mismatches.sort();
                c.mismatches.truncate(LISTED);
            }
        });
    }

    /// Words beyond those that were listed.
    pub(crate) fn more_mismatches(&self, words: u64) {
        self.with(|c| c.words += words);
    }

    pub(crate) fn experts(&self, records: u64, wrong: u64) {
        self.with(|c| {
            c.experts += records;
            c.expert_mismatches += wrong;
        });
    }

    pub(crate) fn input_scales(&self, wrong: u64) {
        self.with(|c| c.input_scale_mismatches += wrong);
    }

    pub(crate) fn requantized_rows(&self, wrong: u64) {
        self.with(|c| c.requantized_rows += wrong);
    }

    pub(crate) fn table_rows(&self, rows: u64, wrong: u64) {
        self.with(|c| {
            c.rows += rows;
            c.row_mismatches += wrong;
        });
    }

    pub(crate) fn problem(&self, text: String) {
        self.with(|c| c.problems.push(text));
    }

    pub(crate) fn warning(&self, text: String) {
        self.with(|c| c.warnings.push(text));
    }

    pub(crate) fn errors(&self, target: usize, errors: &Errors) {
        self.with(|c| c.errors.entry(target).or_default().merge(errors));
    }

    /// Puts the counts into a report.
    pub(crate) fn into_report(self, map: &Map, report: &mut VerifyReport) {
        let mut c = self.0.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
        c.mismatches.sort();
        c.mismatches.truncate(LISTED);
        c.problems.sort();
        c.warnings.sort();
        report.tensor_mismatches = c.mismatches;
        report.tensor_mismatch_count = c.words;
        report.experts = c.experts;
        report.expert_mismatches = c.expert_mismatches;
        report.input_scale_mismatches = c.input_scale_mismatches;
        report.requantized_mismatches = c.requantized_rows;
        report.ngram_rows_checked = c.rows;
        report.ngram_row_mismatches = c.row_mismatches;
        report.problems.append(&mut c.problems);
        report.warnings.append(&mut c.warnings);
        report.proposal_bindings = map.proposal_bindings;
        report.tensors = map.plain_tensors;
        for (index, target) in map.targets.iter().enumerate() {
            let Some(errors) = c.errors.get(&index) else {
                report.tensors += target.counted;
                continue;
            };
            if !target.proposal {
                *report.requantized.entry(target.component.name().to_owned()).or_default() += target.matrices;
                let rel_error = if errors.total > 0.0 {
                    (errors.squares / errors.total).sqrt()
                } else {
                    errors.squares.sqrt()
                };
                report.requantized_parameters.push(Requantized {
                    name: target.parameter.clone(),
                    format: errors.format.clone(),
                    method: errors.method.clone(),
                    rel_error,
                    worst: errors.worst.clone(),
                });
            }
        }
    }
}
