//! `infernix verify` and `infernix repair`.

use super::convert::{interrupt, threads, with_version};
use crate::Outcome;
use crate::args::{ProgressMode, RepairArgs, VerifyArgs};
use crate::output::{self, Table, grouped, usage};
use crate::progress::Reporter;
use anyhow::Context as _;
use infernix_artifact::ngram::{NgramTable, locate};
use infernix_artifact::sums::{self, SHA256SUMS, SumState};
use infernix_artifact::{Artifact, Interrupt};
use infernix_convert::{NgramRows, Recipe, Relation, RepairOptions, SourceSpec, VerifyOptions, VerifyReport};
use serde_json::json;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

/// Re-quantized parameters shown in the table; the JSON document has all.
const SHOWN: usize = 5;

pub(crate) fn run(args: &VerifyArgs, progress: ProgressMode) -> anyhow::Result<Outcome> {
    if let Some(other) = &args.derivation {
        return derivation(args, other, progress);
    }
    let report = report(args, progress, true)?;
    if args.json.json {
        output::print_json(&document(args, &report)?)?;
    }
    finish(&report, args.json.json)
}

/// What the first file is of the other one.
fn derivation(args: &VerifyArgs, other: &Path, progress: ProgressMode) -> anyhow::Result<Outcome> {
    let reporter = Reporter::new(progress);
    let report =
        infernix_convert::derivation(&args.artifact, other, &reporter, &Interrupt::new(interrupt()))?;
    if args.json.json {
        output::print_json(&with_version(serde_json::to_value(&report)?))?;
    } else {
        let mut text = String::new();
        for (relation, n) in &report.counts {
            writeln!(text, "{:<14} {}", relation.replace('_', " "), grouped(*n))?;
        }
        let others = report.parameters.iter().filter(|p| p.relation > Relation::SameValues);
        let mut list: Vec<_> = others.collect();
        list.sort_by(|a, b| b.rel_error.total_cmp(&a.rel_error));
        for p in list.iter().take(4 * SHOWN) {
            let how =
                p.rounding.as_deref().map_or_else(|| "other values".to_owned(), |r| format!("{r} rounding"));
            writeln!(
                text,
                "  {}: {} of {}, {how}, relative error {:.3e}",
                p.name, p.format, p.other_format, p.rel_error
            )?;
        }
        if list.len() > 4 * SHOWN {
            writeln!(text, "  and {} more; --json lists all", list.len() - 4 * SHOWN)?;
        }
        for (what, names) in [("first", &report.only_first), ("other", &report.only_second)] {
            if let Some(name) = names.first() {
                writeln!(text, "only in the {what} file: {} parameters, the first is {name}", names.len())?;
            }
        }
        writeln!(
            text,
            "{}\ndigest {}",
            if report.derived { "derived" } else { "NOT derived" },
            report.digest
        )?;
        output::print(&text)?;
    }
    Ok(if report.derived { Outcome::Done } else { Outcome::Mismatch })
}

/// The JSON document of a report.
pub(crate) fn document(args: &VerifyArgs, report: &VerifyReport) -> anyhow::Result<serde_json::Value> {
    let mut value = with_version(report.to_json());
    value["artifact_id"] = json!(Artifact::open(&args.artifact)?.artifact_id().to_string());
    Ok(value)
}

/// Prints a report as text unless it went out as JSON, and turns it into an outcome.
pub(crate) fn finish(report: &VerifyReport, json: bool) -> anyhow::Result<Outcome> {
    if !json {
        output::print(&text(report).context("report")?)?;
    }
    Ok(if report.ok { Outcome::Done } else { Outcome::Mismatch })
}

/// Verifies; with `sums`, the lines of `SHA256SUMS` that belong to the set too.
pub(crate) fn report(args: &VerifyArgs, progress: ProgressMode, sums: bool) -> anyhow::Result<VerifyReport> {
    let mut options = VerifyOptions::new(&args.artifact, args.checkpoint.clone());
    for source in &args.sources {
        options.sources.push(SourceSpec::parse(source)?);
    }
    options.ngram.clone_from(&args.ngram);
    options.ngram_rows = match args.ngram_rows.as_str() {
        "all" => NgramRows::All,
        n => NgramRows::Sample(
            n.parse().map_err(|_| usage(format!("--ngram-rows takes `all` or a number, not {n:?}")))?,
        ),
    };
    options.skip_ngram = args.skip_ngram;
    options.trust_index = args.trust_index;
    options.threads = threads(args.threads)?;
    let reporter = Reporter::new(progress);
    let mut report = infernix_convert::verify(&options, &reporter, &Interrupt::new(interrupt()))?;
    if sums {
        check_sums(args, &mut report)?;
    }
    for warning in &report.warnings {
        output::warn(warning);
    }
    Ok(report)
}

/// Holds the files of the set against their lines in the folder's `SHA256SUMS`. A folder without that file is no
/// cause for a word: sets are also copied without it.
fn check_sums(args: &VerifyArgs, report: &mut VerifyReport) -> anyhow::Result<()> {
    let artifact = Artifact::open(&args.artifact)?;
    let mut files: Vec<PathBuf> = artifact.paths().map(ToOwned::to_owned).collect();
    if let (false, Ok(Some(table))) = (args.skip_ngram, NgramTable::of(artifact.directory())) {
        files.push(locate(artifact.path(), args.ngram.as_deref(), table.volume_id)?.path);
    }
    let listed = |path: &PathBuf| path.parent().is_some_and(|p| p.join(SHA256SUMS).is_file());
    files.retain(listed);
    for (path, state) in sums::check(&files, &Interrupt::new(interrupt()))? {
        match state {
            SumState::Ok => {}
            SumState::Mismatch => {
                report
                    .problems
                    .push(format!("{}: its SHA-256 is not that of its line in {SHA256SUMS}", path.display()));
                report.ok = false;
            }
            SumState::Absent => {
                report.warnings.push(format!("{}: {SHA256SUMS} has no line for it", path.display()))
            }
        }
    }
    Ok(())
}

pub(crate) fn repair(args: &RepairArgs, progress: ProgressMode) -> anyhow::Result<Outcome> {
    let mut options = RepairOptions {
        artifact: args.artifact.clone(),
        sources: vec![SourceSpec::new("base", &args.checkpoint)],
        recipe: args.recipe.as_deref().map(Recipe::load).transpose()?,
        ngram: args.ngram.clone(),
        threads: threads(args.threads)?,
    };
    for source in &args.sources {
        options.sources.push(SourceSpec::parse(source)?);
    }
    let report = infernix_convert::repair(&options, &Reporter::new(progress), &Interrupt::new(interrupt()))?;
    if args.json.json {
        output::print_json(&with_version(serde_json::to_value(&report)?))?;
    } else {
        let mut out = String::new();
        for object in &report.repaired_objects {
            writeln!(out, "repaired object {object}")?;
        }
        if report.repaired_rows > 0 {
            writeln!(out, "repaired {} n-gram rows", grouped(report.repaired_rows))?;
        }
        if report.repaired_gaps > 0 {
            writeln!(out, "cleared {} gaps", grouped(report.repaired_gaps))?;
        }
        for problem in &report.problems {
            writeln!(out, "not repaired: {problem}")?;
        }
        out.push_str(if report.ok { "everything is as its digests say\n" } else { "" });
        output::print(&out)?;
    }
    Ok(if report.ok { Outcome::Done } else { Outcome::Mismatch })
}

fn text(r: &VerifyReport) -> anyhow::Result<String> {
    let mut t = Table::new(&["compared", "count", "mismatches"]);
    if r.checkpoint {
        t.row(["routed experts".into(), grouped(r.experts), grouped(r.expert_mismatches)]);
        t.row(["tensors, word for word".into(), grouped(r.tensors), grouped(r.tensor_mismatch_count)]);
        t.row(["expert input scales".into(), "".into(), grouped(r.input_scale_mismatches)]);
        t.row(["n-gram rows".into(), grouped(r.ngram_rows_checked), grouped(r.ngram_row_mismatches)]);
    }
    let corrupt = if r.digests == "absent" { String::new() } else { grouped(r.corrupt_objects.len() as u64) };
    t.row(["digests of objects and directory".into(), r.digests.clone(), corrupt]);
    for (component, n) in &r.requantized {
        t.row([format!("re-quantized in {component}"), grouped(*n), String::new()]);
    }
    if r.checkpoint {
        t.row(["re-encoded rows that differ".into(), String::new(), grouped(r.requantized_mismatches)]);
    }
    if r.proposal_bindings > 0 {
        t.row(["proposal bindings".into(), grouped(r.proposal_bindings), String::new()]);
    }
    let mut out = t.to_string();
    let mut worst: Vec<_> = r.requantized_parameters.iter().collect();
    worst.sort_by(|a, b| b.rel_error.total_cmp(&a.rel_error));
    if !worst.is_empty() {
        let mut t = Table::new(&[
            "largest errors of re-quantized parameters",
            "<format",
            "<method",
            "relative error",
        ]);
        for p in worst.iter().take(SHOWN) {
            t.row([p.name.clone(), p.format.clone(), p.method.clone(), format!("{:.5}", p.rel_error)]);
        }
        write!(out, "\n{t}")?;
    }
    for m in &r.tensor_mismatches {
        writeln!(
            out,
            "{}: row {}, column {}: expected {}, found {}",
            m.tensor, m.row, m.column, m.expected, m.found
        )?;
    }
    for object in &r.corrupt_objects {
        writeln!(out, "object {object}: its bytes are not those of its digest")?;
    }
    for name in &r.missing_bindings {
        writeln!(out, "parameter {name} is missing")?;
    }
    for name in &r.extra_bindings {
        writeln!(out, "parameter {name} is none of the model's")?;
    }
    for problem in &r.problems {
        writeln!(out, "{problem}")?;
    }
    if let Some(digest) = &r.digest {
        writeln!(out, "\ndigest {digest}")?;
    }
    let scope = if r.checkpoint {
        "every word compared"
    } else {
        "structure and digests checked; pass --checkpoint to compare words"
    };
    writeln!(out, "{} ({scope}, {:.1} s)", if r.ok { "ok" } else { "MISMATCH" }, r.seconds)?;
    Ok(out)
}
