//! Reports as files, as `-o` names them: checked before anything is measured, written when it is.

use crate::output::{self, usage};
use crate::target::Target;
use std::path::{Path, PathBuf};

/// What a report file is written as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    Json,
    Markdown,
    Page,
}

impl Form {
    fn of(path: &Path) -> Option<Self> {
        match path.extension().and_then(|e| e.to_str()) {
            Some("json") => Some(Self::Json),
            Some("md") => Some(Self::Markdown),
            Some("html") => Some(Self::Page),
            _ => None,
        }
    }

    fn ending(self) -> &'static str {
        match self {
            Self::Json => ".json",
            Self::Markdown => ".md",
            Self::Page => ".html",
        }
    }
}

/// Refuses names of reports that end in none of `forms`, places where they or the `other` outputs cannot be written, and
/// existing files that are no reports.
pub(crate) fn check(reports: &[PathBuf], forms: &[Form], other: &[&Path]) -> anyhow::Result<()> {
    for path in reports {
        if Form::of(path).is_none_or(|f| !forms.contains(&f)) {
            let endings: Vec<&str> = forms.iter().map(|f| f.ending()).collect();
            return Err(usage(format!(
                "--output {}: expected a name that ends in {}",
                path.display(),
                endings.join(" or ")
            )));
        }
        spare(path)?;
    }
    let all: Vec<&Path> = reports.iter().map(PathBuf::as_path).chain(other.iter().copied()).collect();
    output::check_places(&all)
}

/// Refuses to write a report over anything else than a report.
pub(crate) fn spare(path: &Path) -> anyhow::Result<()> {
    // A stream is nothing that could be lost; whether it can be written shows when it is.
    let fine = match Target::of(path) {
        Ok(Target::Stream(_)) => true,
        Ok(Target::File(file)) => file.symlink_metadata().is_err() || is_report(path),
        Err(_) => false,
    };
    if fine {
        return Ok(());
    }
    Err(usage(format!("{} exists and is no report; nothing else is overwritten", path.display())))
}

/// Whether a file is what one of these commands writes under such a name.
fn is_report(path: &Path) -> bool {
    let Ok(bytes) = std::fs::read(path) else { return false };
    let begins = |heads: &[&str]| heads.iter().any(|h| bytes.starts_with(h.as_bytes()));
    match path.extension().and_then(|e| e.to_str()) {
        Some("md") => begins(&["| path | engine |", "| domain |"]),
        Some("html") => begins(&[
            "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\"",
        ]),
        Some("svg") => begins(&["<svg "]),
        _ => serde_json::from_slice::<serde_json::Value>(&bytes).is_ok_and(|v| v["schema_version"].is_u64()),
    }
}

/// Writes a report to each of its files, as `text` gives it.
pub(crate) fn write(
    reports: &[PathBuf],
    text: impl Fn(&Path, Form) -> anyhow::Result<String>,
) -> anyhow::Result<()> {
    for path in reports {
        // Checked before: another ending is refused.
        let form = Form::of(path).unwrap_or(Form::Json);
        output::write_report(path, &text(path, form)?)?;
    }
    Ok(())
}
