//! `infernix export`: an artifact back to files of other engines.

use crate::args::{ExportArgs, ExportTo, ProgressMode};
use crate::output::{self, Table, grouped, usage};
use crate::progress::Reporter;
use crate::{INTERRUPTED, Outcome};
use infernix_artifact::Interrupt;
use infernix_convert::{ExportOptions, ExportOutcome, ExportPlan, ExportTarget, RunOptions};
use std::fmt::Write as _;
use std::sync::Arc;

/// Shards of releases are about this large.
const SHARD_BYTES: u64 = 5_000_000_000;

pub(crate) fn run(args: &ExportArgs, progress: ProgressMode) -> anyhow::Result<Outcome> {
    let target = match args.to {
        ExportTo::Safetensors => ExportTarget::Safetensors,
        ExportTo::Gguf => ExportTarget::Gguf,
    };
    if target == ExportTarget::Gguf && args.output.extension().is_none_or(|e| e != "gguf") {
        return Err(usage(format!(
            "-o {}: a GGUF model is a file that ends in .gguf",
            args.output.display()
        )));
    }
    let default = if target == ExportTarget::Gguf { u64::MAX } else { SHARD_BYTES };
    let options = ExportOptions {
        artifact: args.artifact.clone(),
        target,
        // Without a slash at its end, which would name something inside.
        output: args.output.components().collect(),
        ngram: args.ngram.clone(),
        components: super::convert::components(&args.components)?,
        shard_bytes: args.shard_size.as_deref().map_or(Ok(default), size)?,
        bit_exact: args.bit_exact,
        resume: args.resume,
    };
    let plan = infernix_convert::plan_export(&options)?;
    for (name, reason) in plan.left_out() {
        output::warn(&format!("{name}: {reason}"));
    }
    plan.rounding().iter().for_each(|r| output::warn(&format!("{r}; --bit-exact refuses")));
    if args.dry_run {
        match args.json.json {
            true => output::print_json(&super::convert::with_version(plan.to_json()))?,
            false => output::print(&text(&plan, None)?)?,
        }
        return Ok(Outcome::Done);
    }
    let state = infernix_artifact::state_folder(&options.output);
    let fresh = !state.exists();
    let run = RunOptions::new(Interrupt::new(Arc::clone(&INTERRUPTED)));
    let outcome = infernix_convert::export(&plan, &Reporter::new(progress), &run);
    let outcome = outcome.map_err(|e| super::convert::with_way_on(e.into(), &options.output, fresh))?;
    match args.json.json {
        true => output::print_json(&super::convert::with_version(outcome.to_json(&plan)))?,
        false => output::print(&text(&plan, Some(&outcome))?)?,
    }
    Ok(Outcome::Done)
}

fn size(text: &str) -> anyhow::Result<u64> {
    let (digits, unit) = match text.as_bytes().last() {
        Some(b'K' | b'k') => (&text[..text.len() - 1], 1_000),
        Some(b'M' | b'm') => (&text[..text.len() - 1], 1_000_000),
        Some(b'G' | b'g') => (&text[..text.len() - 1], 1_000_000_000),
        _ => (text, 1),
    };
    let number = digits.parse::<u64>().ok().and_then(|n| n.checked_mul(unit)).filter(|n| *n > 0);
    number.ok_or_else(|| usage(format!("--shard-size {text}: expected bytes above 0, such as 5G or 500M")))
}

fn text(plan: &ExportPlan, outcome: Option<&ExportOutcome>) -> anyhow::Result<String> {
    let mut t = Table::new(&["file", "bytes"]);
    match outcome {
        None => plan.files().for_each(|(name, bytes)| t.row([name.to_owned(), grouped(bytes)])),
        Some(o) => {
            o.files.iter().for_each(|(path, bytes)| t.row([path.display().to_string(), grouped(*bytes)]))
        }
    }
    let mut out = t.to_string();
    writeln!(out, "{} in {}", output::counted(plan.tensors(), "tensor"), output::bytes(plan.bytes()))?;
    if let Some(o) = outcome {
        if o.complete {
            writeln!(out, "complete already, nothing to do")?;
        } else if o.resumed_bytes > 0 {
            writeln!(out, "resumed: {} were finished before", output::bytes(o.resumed_bytes))?;
        }
        writeln!(out, "{:.1} s", o.seconds)?;
    }
    Ok(out)
}
