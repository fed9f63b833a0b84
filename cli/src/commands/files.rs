//! The small verbs that act on the files of a set: `rename`, `clean`, `card`.

use crate::Outcome;
use crate::args::{CardArgs, CleanArgs, RenameArgs};
use crate::output;
use anyhow::Context as _;
use infernix_artifact::rename::{NewName, RenameOptions};
use infernix_artifact::{Artifact, Interrupt};
use infernix_convert::card::{CardInputs, card};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::io::Write as _;
use std::path::Path;

pub(crate) fn clean(args: &CleanArgs) -> anyhow::Result<Outcome> {
    let removed = infernix_artifact::clean(&args.artifact)?;
    if removed {
        output::print(&format!("removed {}\n", infernix_artifact::state_folder(&args.artifact).display()))?;
    } else {
        output::print("nothing to remove\n")?;
    }
    Ok(Outcome::Done)
}

pub(crate) fn rename(args: &RenameArgs) -> anyhow::Result<Outcome> {
    let to = match &args.to {
        Some(name) => NewName::To { name: name.clone(), numbered: args.numbered },
        None if args.numbered => NewName::Numbered,
        None => NewName::Plain,
    };
    let options =
        RenameOptions { interrupt: Interrupt::new(super::convert::interrupt()), ..RenameOptions::default() };
    let renamed = infernix_artifact::rename::rename(&args.artifact, &to, &options)?;
    for (from, to) in &renamed.moves {
        output::note(&format!("{from} -> {to}"));
    }
    output::print(&format!("{}\n", renamed.entry.display()))?;
    Ok(Outcome::Done)
}

pub(crate) fn write_card(args: &CardArgs) -> anyhow::Result<Outcome> {
    let artifact = Artifact::open(&args.artifact)?;
    let verify = args.verify_report.as_deref().map(read_json).transpose()?;
    if let (Some(report), Some(path)) = (&verify, &args.verify_report)
        && !(report.get("ok").is_some_and(Value::is_boolean) && report.get("digests").is_some())
    {
        anyhow::bail!("{} is no report of `infernix verify --json`", path.display());
    }
    let measurements = args
        .measurements
        .iter()
        .map(|path| {
            Ok((path.file_name().unwrap_or_default().to_string_lossy().into_owned(), read_json(path)?))
        })
        .collect::<anyhow::Result<Vec<_>>>()?;
    let inputs = CardInputs { artifact: &artifact, verify: verify.as_ref(), measurements: &measurements };
    let text = card(&inputs)?;
    match &args.output {
        Some(path) => {
            let mut file = File::create_new(path)
                .with_context(|| format!("{} cannot be created; nothing is overwritten", path.display()))?;
            if let Err(e) = file.write_all(text.as_bytes()).and_then(|()| file.sync_all()) {
                // Half a card must not stand there as a whole one.
                let _ = fs::remove_file(path);
                return Err(e).with_context(|| format!("{} cannot be written", path.display()));
            }
            output::note(&format!("wrote {}", path.display()));
        }
        None if args.json.json => output::print_json(&json!({ "schema_version": 1, "card": text }))?,
        None => output::print(&text)?,
    }
    Ok(Outcome::Done)
}

pub(crate) fn read_json(path: &Path) -> anyhow::Result<Value> {
    let bytes = fs::read(path).with_context(|| format!("{} cannot be read", path.display()))?;
    serde_json::from_slice(&bytes).with_context(|| format!("{} is no JSON document", path.display()))
}
