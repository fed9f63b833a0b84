//! `ops`: the figures of `cargo bench`, which criterion leaves in `target/criterion`, as an entry of `bench/results`.

use crate::synth::Failure;
use infernix_measure::bench::machine::{Machine, now, utc};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

const HELP: &str = "\
usage: cargo xtask ops COMMAND [--conditions TEXT] [--criterion DIR] [--out FILE]

Collects what `cargo bench` measured (COMMAND says how it was called) into bench/results/DATE-operations.json.
Defaults: target/criterion.";

/// Parses the arguments, collects and writes.
pub(crate) fn run(args: &[String]) -> Result<(), Failure> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let date = utc(now())[..10].to_owned();
    let mut criterion = root.join("target/criterion");
    let mut out = root.join(format!("bench/results/{date}-operations.json"));
    let (mut command, mut conditions) = (None, None);
    let mut rest = args.iter();
    while let Some(arg) = rest.next() {
        let mut value = || rest.next().cloned().ok_or_else(|| Failure::Usage(format!("{arg} takes a value")));
        match arg.as_str() {
            "--help" | "-h" => {
                println!("{HELP}");
                return Ok(());
            }
            "--conditions" => conditions = Some(value()?),
            "--criterion" => criterion = PathBuf::from(value()?),
            "--out" => out = PathBuf::from(value()?),
            flag if flag.starts_with('-') => return Err(Failure::Usage(HELP.into())),
            text => command = Some(text.to_owned()),
        }
    }
    let command = command.ok_or_else(|| Failure::Usage(HELP.into()))?;
    let mut benches = Vec::new();
    collect(&criterion, &mut benches)?;
    if benches.is_empty() {
        return Err(Failure::Failed(format!(
            "{} holds no figures; run cargo bench first",
            criterion.display()
        )));
    }
    let key =
        |b: &Value| ["group", "operation", "shape"].map(|k| b[k].as_str().unwrap_or_default().to_owned());
    benches.sort_by_key(key);
    let mut document = json!({
        "schema_version": 1, "kind": "operations", "date": date,
        "what": "Operations of the CPU backend and of the formats, measured by criterion",
        "machine": Machine::this().to_json(), "build": "bench profile", "commands": [command], "benches": benches,
    });
    if let Some(text) = conditions {
        document["conditions"] = text.into();
    }
    std::fs::write(&out, format!("{document:#}\n")).map_err(|e| format!("{}: {e}", out.display()))?;
    println!("wrote {}", out.display());
    Ok(())
}

/// Every folder `new` with its two files.
fn collect(folder: &Path, out: &mut Vec<Value>) -> Result<(), Failure> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Ok(()) };
    for entry in entries {
        let path = entry.map_err(|e| e.to_string())?.path();
        if !path.is_dir() {
            continue;
        }
        if path.file_name().is_some_and(|n| n == "new") {
            out.extend(bench(&path)?);
        } else {
            collect(&path, out)?;
        }
    }
    Ok(())
}

fn bench(folder: &Path) -> Result<Option<Value>, Failure> {
    let read = |name: &str| -> Result<Option<Value>, Failure> {
        let path = folder.join(name);
        let Ok(text) = std::fs::read(&path) else { return Ok(None) };
        Ok(Some(serde_json::from_slice(&text).map_err(|e| format!("{}: {e}", path.display()))?))
    };
    let (Some(about), Some(estimates)) = (read("benchmark.json")?, read("estimates.json")?) else {
        return Ok(None);
    };
    let median = &estimates["median"];
    let Some(ns) = median["point_estimate"].as_f64() else { return Ok(None) };
    let amount = |unit: &str| about["throughput"][unit].as_f64();
    let (unit, amount) = match (amount("Bytes"), amount("Elements")) {
        (Some(n), _) => (Some("bytes"), Some(n)),
        (_, n) => (n.map(|_| "elements"), n),
    };
    Ok(Some(json!({
        "group": about["group_id"], "operation": about["function_id"], "shape": about["value_str"],
        "median_ns": ns, "low_ns": median["confidence_interval"]["lower_bound"],
        "high_ns": median["confidence_interval"]["upper_bound"], "unit": unit, "rate": amount.map(|n| n * 1e9 / ns),
    })))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_collected_from_criterions_folders() {
        let folder = tempfile::tempdir().unwrap();
        let own = folder.path().join("state/attention/64/new");
        std::fs::create_dir_all(&own).unwrap();
        let about =
            r#"{"group_id":"state","function_id":"attention","value_str":"64","throughput":{"Elements":64}}"#;
        std::fs::write(own.join("benchmark.json"), about).unwrap();
        let estimates = r#"{"median":{"point_estimate":2000.0,"confidence_interval":{"lower_bound":1900.0,"upper_bound":2200.0}}}"#;
        std::fs::write(own.join("estimates.json"), estimates).unwrap();
        let mut found = Vec::new();
        collect(folder.path(), &mut found).unwrap();
        assert_eq!(found.len(), 1);
        assert_eq!((&found[0]["group"], &found[0]["median_ns"]), (&json!("state"), &json!(2000.0)));
        assert_eq!((&found[0]["unit"], &found[0]["rate"]), (&json!("elements"), &json!(3.2e7)));
    }
}
