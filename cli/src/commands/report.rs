//! `infernix report`: reports of several engines and machines on one page.

use crate::Outcome;
use crate::args::ReportArgs;
use crate::output::{self, usage};
use anyhow::Context as _;
use infernix_measure::page;

pub(crate) fn run(args: &ReportArgs) -> anyhow::Result<Outcome> {
    super::reports::check(std::slice::from_ref(&args.output), &[super::reports::Form::Page], &[])?;
    for (i, path) in args.files.iter().enumerate() {
        let same = |other: &&std::path::PathBuf| match (path.canonicalize(), other.canonicalize()) {
            (Ok(a), Ok(b)) => a == b,
            _ => path == *other,
        };
        if let Some(first) = args.files[..i].iter().find(same) {
            return Err(usage(format!("{} and {} are one file", first.display(), path.display())));
        }
    }
    let mut documents = Vec::new();
    for path in &args.files {
        // A replay's document is known by its folder.
        let named = if path.ends_with("summary.json") { path.parent().unwrap_or(path) } else { path };
        let name = named.file_name().or(path.file_name()).unwrap_or_default().to_string_lossy().into_owned();
        documents.push((name, super::files::read_json(path)?));
    }
    let page = page(&args.title, &documents)?;
    if let Some(folder) = &args.plots {
        std::fs::create_dir_all(folder).with_context(|| format!("{} cannot be created", folder.display()))?;
        page.plots.iter().try_for_each(|(name, _)| super::reports::spare(&folder.join(name)))?;
        for (name, svg) in &page.plots {
            output::write_report(&folder.join(name), svg)?;
        }
    }
    output::write_report(&args.output, &page.html)?;
    Ok(Outcome::Done)
}
