//! Model cards: every number comes from the artifact or from a report file, none is typed.

use std::fmt::Write as _;
use std::path::Path;

use infernix_artifact::ngram::NgramTable;
use infernix_artifact::{Artifact, ArtifactError, Directory};
use serde_json::Value;

use crate::ConvertError;
use crate::census::Census;

/// What a card is made from.
#[derive(Debug)]
pub struct CardInputs<'a> {
    /// The artifact.
    pub artifact: &'a Artifact,
    /// `verify --json` of it, if there is one.
    pub verify: Option<&'a Value>,
    /// Measurement files: name and document.
    pub measurements: &'a [(String, Value)],
}

/// The card in Markdown with a Hugging Face header.
///
/// # Errors
/// A verify report of another artifact or one that found mismatches; bindings without objects.
pub fn card(inputs: &CardInputs<'_>) -> Result<String, ConvertError> {
    let directory = inputs.artifact.directory();
    if let Some(report) = inputs.verify {
        check_report(inputs.artifact, report)?;
    }
    let table = NgramTable::of(directory).map_err(|e| ConvertError::Artifact(ArtifactError::Invalid(e)))?;
    let census = Census::of(directory, table.as_ref().map(|t| t.geometry.file_bytes()))?;
    let mut out = String::new();
    front_matter(&mut out, directory);
    let _ = write!(out, "# {}\n\n{}\n", name(directory, inputs.artifact.path()), about(directory));
    files(&mut out, inputs.artifact, table.as_ref());
    exactness(&mut out, inputs.verify, &census);
    requirements(&mut out, &census, inputs.artifact, table.as_ref());
    let entry = file_name(inputs.artifact.path());
    let _ = write!(out, "\n## Run\n\n```sh\ninfernix run {entry} -p \"Hello\"\n```\n");
    measurements(&mut out, inputs.artifact, inputs.measurements)?;
    provenance(&mut out, inputs, directory);
    out.push_str(
        "\n## License\n\nThe weights keep the license of the repositories they come from; read it there before use.\n",
    );
    Ok(out)
}

fn check_report(artifact: &Artifact, report: &Value) -> Result<(), ConvertError> {
    let fail = |reason: String| ConvertError::Verify { path: artifact.path().to_owned(), reason };
    if report["ok"] != true {
        return Err(fail("the verify report found mismatches; a card must not claim otherwise".into()));
    }
    let id = artifact.artifact_id().to_string();
    match report["artifact_id"].as_str() {
        Some(found) if found == id => Ok(()),
        Some(found) => Err(fail(format!("the verify report is about artifact {found}, this one is {id}"))),
        None => {
            Err(fail("the verify report names no artifact_id; make it with `infernix verify --json`".into()))
        }
    }
}

fn name(directory: &Directory, path: &Path) -> String {
    let named = directory.metadata.as_ref().and_then(|m| m.get("name")).and_then(Value::as_str);
    let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    named.map_or(stem, str::to_owned)
}

fn sources(directory: &Directory) -> Vec<&Value> {
    let source = directory.provenance.as_ref().and_then(|p| p.get("source"));
    match source {
        Some(Value::Object(map)) => map.values().collect(),
        Some(Value::Array(list)) => list.iter().collect(),
        _ => Vec::new(),
    }
}

fn repositories(directory: &Directory) -> Vec<&str> {
    sources(directory).into_iter().filter_map(|s| s.get("repository").and_then(Value::as_str)).collect()
}

fn front_matter(out: &mut String, directory: &Directory) {
    out.push_str("---\nlibrary_name: infernix\npipeline_tag: text-generation\n");
    let repositories = repositories(directory);
    if !repositories.is_empty() {
        out.push_str("base_model:\n");
        for repository in repositories {
            let _ = writeln!(out, "- {repository}");
        }
        out.push_str("base_model_relation: quantized\n");
    }
    out.push_str("tags:\n- infernix\n---\n\n");
}

fn about(directory: &Directory) -> String {
    let text = directory.components.get("text").map(|c| &c.config);
    let number = |key: &str| text.and_then(|t| t.get(key)).and_then(Value::as_u64);
    let mut parts = Vec::new();
    if let Some(layers) = number("num_hidden_layers") {
        parts.push(format!("{layers} layers"));
    }
    if let (Some(experts), Some(chosen)) = (number("num_experts"), number("num_experts_per_tok")) {
        parts.push(format!("{experts} routed experts a layer, {chosen} chosen per token"));
    }
    if let Some(context) = number("max_position_embeddings") {
        parts.push(format!("contexts up to {context} tokens"));
    }
    let architecture = text.and_then(|t| t.get("model_type")).and_then(Value::as_str).unwrap_or("unknown");
    let components: Vec<&str> = directory.components.keys().map(String::as_str).collect();
    format!(
        "A `{architecture}` model for Infernix: {}. Components: {}.",
        parts.join(", "),
        components.join(", ")
    )
}

fn files(out: &mut String, artifact: &Artifact, table: Option<&NgramTable>) {
    out.push_str("\n## Files\n\n| file | bytes | |\n|---|---:|---|\n");
    for (index, path) in artifact.paths().enumerate() {
        let bytes = path.metadata().map_or(0, |m| m.len());
        let what = if index == 0 { "give this one to the program" } else { "part of the artifact" };
        let _ = writeln!(out, "| {} | {} | {what} |", file_name(path), grouped(bytes));
    }
    if let Some(table) = table {
        let volume = format!("volume {}, keep it on an NVMe drive", table.volume_id);
        let _ = writeln!(
            out,
            "| n-gram volume (`.ngram`) | {} | {volume} |",
            grouped(table.geometry.file_bytes())
        );
    }
}

fn exactness(out: &mut String, verify: Option<&Value>, census: &Census) {
    out.push_str("\n## What is bit-exact and what is re-quantized\n\n");
    match verify {
        Some(report) => {
            let count = |key: &str| grouped(report[key].as_u64().unwrap_or(0));
            let _ = writeln!(
                out,
                "`infernix verify` compared the artifact with its checkpoint word by word: {} experts, {} tensors and {} n-gram rows without a mismatch. Digest: `{}`.",
                count("experts"),
                count("tensors"),
                count("ngram_rows_checked"),
                report["digest"].as_str().unwrap_or("none"),
            );
            let requantized: Vec<String> = report["requantized"]
                .as_object()
                .into_iter()
                .flatten()
                .filter(|(_, n)| n.as_u64() != Some(0))
                .map(|(component, n)| {
                    format!("{} parameters of {component}", grouped(n.as_u64().unwrap_or(0)))
                })
                .collect();
            if requantized.is_empty() {
                out.push_str("\nNothing is re-quantized.\n");
            } else {
                let _ = writeln!(out, "\nRe-quantized: {}.", requantized.join(", "));
                requantized_table(out, report);
            }
        }
        None => out.push_str("This card was made without a verify report.\n"),
    }
    out.push_str(
        "\n| class | format | weights | bits per weight | with padding |\n|---|---|---:|---:|---:|\n",
    );
    for ((component, class), row) in &census.classes {
        let formats: Vec<&str> = row.formats.iter().map(String::as_str).collect();
        let _ = writeln!(
            out,
            "| {component}:{class} | {} | {} | {:.2} | {:.2} |",
            formats.join(", "),
            grouped(row.weights),
            row.logical(),
            row.stored()
        );
    }
    out.push_str("\nThe text decoder on average (vision and drafter excluded):\n\n| part | weights | bits per weight | with padding |\n|---|---:|---:|---:|\n");
    for (part, row) in &census.decoder {
        let _ = writeln!(
            out,
            "| {part} | {} | {:.2} | {:.2} |",
            grouped(row.weights),
            row.logical(),
            row.stored()
        );
    }
    let padded = census.decoder.iter().any(|(_, row)| row.stored() > 1.05 * row.logical());
    if padded {
        out.push_str(
            "\nPadding to aligned planes and blocks dominates where matrices or tables are small.\n",
        );
    }
}

/// The largest errors first, at most ten.
fn requantized_table(out: &mut String, report: &Value) {
    let mut rows: Vec<&Value> = report["requantized_parameters"].as_array().into_iter().flatten().collect();
    let error = |row: &Value| row["rel_error"].as_f64().unwrap_or(0.0);
    rows.sort_by(|a, b| error(b).total_cmp(&error(a)));
    if rows.is_empty() {
        return;
    }
    out.push_str("\n| largest errors | format | method | relative error |\n|---|---|---|---:|\n");
    for row in rows.iter().take(10) {
        let text = |key: &str| row[key].as_str().unwrap_or_default();
        let _ = writeln!(
            out,
            "| {} | {} | {} | {:.5} |",
            text("name"),
            text("format"),
            text("method"),
            error(row)
        );
    }
}

fn requirements(out: &mut String, census: &Census, artifact: &Artifact, table: Option<&NgramTable>) {
    let gib = |bytes: f64| bytes / f64::from(1u32 << 30);
    let experts: f64 = census
        .classes
        .iter()
        .filter(|((component, class), _)| component == "text" && class == "moe.experts")
        .map(|(_, row)| row.stored_bytes)
        .sum();
    let payload: f64 = census.classes.values().map(|row| row.stored_bytes).sum();
    let disk = artifact.file_bytes() as f64 + table.map_or(0.0, |t| t.geometry.file_bytes() as f64);
    let _ = write!(
        out,
        "\n## Requirements\n\n- Memory: {:.1} GiB of weights ({:.1} GiB routed experts, {:.1} GiB the rest), plus the context.\n- Disk: {:.1} GiB for all files.\n",
        gib(payload),
        gib(experts),
        gib(payload - experts),
        gib(disk)
    );
}

fn measurements(
    out: &mut String,
    artifact: &Artifact,
    files: &[(String, Value)],
) -> Result<(), ConvertError> {
    out.push_str("\n## Quality and performance\n\n");
    if files.is_empty() {
        out.push_str("No measurement files were given.\n");
        return Ok(());
    }
    for (file, document) in files {
        if document["command"] == "kld" {
            quality(out, artifact, file, document)?;
            continue;
        }
        let _ = writeln!(out, "From `{file}`:\n\n| | |\n|---|---|");
        let mut rows = Vec::new();
        scalars(document, "", &mut rows);
        for (key, value) in rows.iter().take(40) {
            let _ = writeln!(out, "| {key} | {value} |");
        }
        if rows.len() > 40 {
            let _ = writeln!(out, "| ... | {} more values in the file |", rows.len() - 40);
        }
        out.push('\n');
    }
    Ok(())
}

/// The table of a `kld --json` document about this artifact.
fn quality(out: &mut String, artifact: &Artifact, file: &str, d: &Value) -> Result<(), ConvertError> {
    let reference = &d["reference"];
    let made_of = reference["artifact_id"].as_str().or_else(|| reference["model"]["artifact_id"].as_str());
    let id = artifact.artifact_id().to_string();
    if made_of != Some(id.as_str()) {
        let reason =
            format!("{file} measures against artifact {}, this one is {id}", made_of.unwrap_or("unknown"));
        return Err(ConvertError::Verify { path: artifact.path().to_owned(), reason });
    }
    let count = |k: &str| grouped(d[k].as_u64().unwrap_or(0));
    let _ = write!(
        out,
        "Distance from the exact model (`{file}`): KL divergence from the lossless route on the same weights, 16-bit \
         activations, BF16 KV. Text {}, {} chunks of {} tokens, {} rows; 95 % intervals by resampling chunks. × rounding \
         divides by what rounding alone costs this model.\n\n\
         | path | engine | mean KLD | × rounding | KLD 99.9 % | top-1 | PPL vs reference |\n\
         |---|---|---:|---:|---:|---:|---:|\n",
        d["corpus"]["name"].as_str().unwrap_or("?").replace('|', "\\|"),
        count("chunks"),
        count("ctx"),
        count("rows")
    );
    let number = |v: &Value, text: &dyn Fn(f64) -> String| v.as_f64().map_or("—".into(), text);
    let ranged = |v: &Value, ci: &Value, text: &dyn Fn(f64) -> String| match (ci[0].as_f64(), ci[1].as_f64())
    {
        (Some(a), Some(b)) => format!("{} [{}, {}]", number(v, text), text(a), text(b)),
        _ => number(v, text),
    };
    let six = |v: f64| format!("{v:.6}");
    let four = |v: f64| format!("{v:.4}");
    let two = |v: f64| format!("{v:.2}");
    let share = |v: f64| format!("{:.2}", 100.0 * v);
    let signed = |v: f64| format!("{v:+.3}");
    let r = &d["rounding"];
    if !r.is_null() {
        let seeds = r["seeds"].as_array().map_or(0, Vec::len);
        let _ = writeln!(
            out,
            "| — | honest rounding, seeds: {seeds} | {} | 1 | {} | {} % | |",
            ranged(&r["mean_kld"], &r["mean_kld_ci"], &six),
            number(&r["kld_percentiles"]["99.9"], &four),
            number(&r["top1"], &share),
        );
    }
    for p in d["paths"].as_array().into_iter().flatten() {
        let text = |k: &str| p[k].as_str().unwrap_or("?").replace('|', "\\|");
        let _ = writeln!(
            out,
            "| {} | {} | {} | {} | {} | {} % | {} % |",
            text("path"),
            text("engine"),
            ranged(&p["mean_kld"], &p["mean_kld_ci"], &six),
            ranged(&p["times_rounding"], &p["times_rounding_ci"], &two),
            number(&p["kld_percentiles"]["99.9"], &four),
            ranged(&p["top1"], &p["top1_ci"], &share),
            ranged(&p["ppl_ratio_pct"], &p["ppl_ratio_ci"], &signed),
        );
    }
    for note in d["notes"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        let _ = writeln!(out, "\n{note}.");
    }
    out.push('\n');
    Ok(())
}

/// Numbers and texts of a document with their paths.
fn scalars(value: &Value, path: &str, rows: &mut Vec<(String, String)>) {
    let join = |key: &str| if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") };
    match value {
        Value::Object(map) => map.iter().for_each(|(key, inner)| scalars(inner, &join(key), rows)),
        Value::Array(list) if list.iter().any(|v| v.is_object() || v.is_array()) => {
            list.iter().enumerate().for_each(|(i, inner)| scalars(inner, &join(&i.to_string()), rows));
        }
        Value::String(text) => rows.push((path.to_owned(), text.replace('|', "\\|"))),
        other => rows.push((path.to_owned(), other.to_string())),
    }
}

fn provenance(out: &mut String, inputs: &CardInputs<'_>, directory: &Directory) {
    let text = |key: &str| directory.provenance.as_ref().and_then(|p| p.get(key)).and_then(Value::as_str);
    let _ = write!(out, "\n## Provenance\n\n- artifact_id: `{}`\n", inputs.artifact.artifact_id());
    if let Some(recipe) = text("recipe") {
        let _ = writeln!(out, "- recipe: `{recipe}`");
    }
    for source in sources(directory) {
        let repository = source.get("repository").and_then(Value::as_str).unwrap_or("a local checkpoint");
        let revision =
            source.get("revision").and_then(Value::as_str).map_or(String::new(), |r| format!(" at `{r}`"));
        let role = source.get("role").and_then(Value::as_str).unwrap_or("source");
        let _ = writeln!(out, "- {role}: {repository}{revision}");
    }
    if let Some(digest) = inputs.verify.and_then(|v| v["digest"].as_str()) {
        let _ = writeln!(out, "- digest of the weights: `{digest}`");
    }
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i) % 3 == 0 {
            out.push(',');
        }
        out.push(c);
    }
    out
}
