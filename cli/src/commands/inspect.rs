//! `infernix inspect`: what a file or folder holds, from its directory alone.

use crate::Outcome;
use crate::args::InspectArgs;
use crate::output::{self, Table, grouped};
use anyhow::{Context as _, bail};
use infernix_artifact::ngram::Volume;
use infernix_artifact::{Artifact, Binding, Directory, ObjectKind};
use infernix_checkpoint::{Checkpoint, OpenOptions};
use infernix_convert::census::{Census, checkpoint_classes};
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::fs::File;
use std::io::Read as _;
use std::path::Path;

/// The first bytes of every file kind that this command can tell apart.
enum Kind {
    Entry,
    Part,
    Volume,
    Checkpoint,
}

pub(crate) fn run(args: &InspectArgs) -> anyhow::Result<Outcome> {
    let (report, text) = match kind(&args.path)? {
        Kind::Entry => artifact(args)?,
        Kind::Part => part(&args.path)?,
        Kind::Volume => volume(&args.path)?,
        Kind::Checkpoint => checkpoint(args)?,
    };
    if args.json.json {
        output::print_json(&report)?;
    } else {
        output::print(&text)?;
    }
    Ok(Outcome::Done)
}

fn kind(path: &Path) -> anyhow::Result<Kind> {
    if path.is_dir() || path.extension().is_some_and(|e| e == "safetensors" || e == "gguf") {
        return Ok(Kind::Checkpoint);
    }
    let mut magic = Vec::new();
    // Opening a pipe would wait for its other end.
    let what = path.metadata().with_context(|| format!("{} cannot be opened", path.display()))?;
    if !what.is_file() {
        bail!("{} is no regular file", path.display());
    }
    let file = File::open(path).with_context(|| format!("{} cannot be opened", path.display()))?;
    file.take(8).read_to_end(&mut magic)?;
    Ok(match magic.as_slice() {
        b"NINFERNG" => Kind::Volume,
        // Versions other than 3 are left to the reader, which says what to do about them.
        [b'N', b'I', b'N', b'F', b'E', b'R', ..] => Kind::Entry,
        [b'N', b'I', b'N', b'P', b'R', b'T', ..] => Kind::Part,
        _ => bail!(
            "{} is no artifact, part, n-gram volume or checkpoint folder (it starts with {magic:02x?})",
            path.display()
        ),
    })
}

fn artifact(args: &InspectArgs) -> anyhow::Result<(Value, String)> {
    let artifact = Artifact::open(&args.path)?;
    let directory = artifact.directory();
    let volume = infernix_artifact::ngram::NgramTable::of(directory).map_err(anyhow::Error::msg)?;
    let census = Census::of(directory, volume.as_ref().map(|v| v.geometry.file_bytes()))?;
    let name = directory.metadata.as_ref().and_then(|m| m.get("name")).cloned().unwrap_or_default();
    let files: Vec<Value> = artifact
        .paths()
        .zip(&directory.files)
        .map(|(path, file)| json!({ "file": file_name(path), "payload_bytes": file.payload_bytes }))
        .collect();
    let mut report = json!({
        "schema_version": 1,
        "kind": "artifact",
        "name": name,
        "artifact_id": artifact.artifact_id().to_string(),
        "file_bytes": artifact.file_bytes(),
        "files": files,
        "components": directory.components.keys().collect::<Vec<_>>(),
        "objects": directory.objects.len(),
        "bindings": directory.bindings.len(),
        "ngram_table": volume.as_ref().map(|v| v.to_value()),
        "provenance": directory.provenance.as_ref().map(without_digests),
        "census": census.to_json(),
    });
    let mut text = String::new();
    let mut t = Table::new(&["", "<"]);
    t.row(["artifact".into(), file_name(&args.path)]);
    if let Some(name) = name.as_str() {
        t.row(["name".into(), name.into()]);
    }
    t.row(["artifact_id".into(), artifact.artifact_id().to_string()]);
    t.row([
        "size".into(),
        format!(
            "{} bytes in {}",
            grouped(artifact.file_bytes()),
            output::counted(files.len() as u64, "file")
        ),
    ]);
    let components: Vec<_> = directory.components.keys().map(String::as_str).collect();
    t.row(["components".into(), components.join(", ")]);
    t.row(["objects, bindings".into(), format!("{}, {}", directory.objects.len(), directory.bindings.len())]);
    if let Some(v) = &volume {
        let what =
            format!("{} rows of {} bytes, {}", grouped(v.geometry.rows), v.geometry.row_bytes, v.format);
        t.row(["n-gram table".into(), what]);
    }
    writeln!(text, "{t}\n{}", census.to_text())?;
    if args.objects {
        report["object_list"] = objects_json(directory);
        writeln!(text, "{}", objects_text(directory))?;
    }
    if args.bindings {
        report["binding_list"] = bindings_json(directory);
        writeln!(text, "{}", bindings_text(directory))?;
    }
    Ok((report, text))
}

/// Provenance without the digest of every object, which would bury the rest.
fn without_digests(provenance: &serde_json::Map<String, Value>) -> Value {
    let mut shown = provenance.clone();
    if let Some(integrity) = shown.get_mut("integrity").and_then(Value::as_object_mut) {
        let count = integrity.get("objects").and_then(Value::as_object).map_or(0, serde_json::Map::len);
        integrity.insert("objects".into(), json!(format!("{count} digests")));
    }
    Value::Object(shown)
}

fn shape_text(shape: &[u64]) -> String {
    let dims: Vec<String> = shape.iter().map(u64::to_string).collect();
    format!("[{}]", dims.join(","))
}

fn objects_json(directory: &Directory) -> Value {
    let list = directory.objects.iter().map(|o| match &o.kind {
        ObjectKind::Tensor { shape, format, layout } => json!({
            "id": o.id, "shape": shape, "format": format, "layout": layout, "offset": o.offset, "bytes": o.bytes
        }),
        ObjectKind::Resource => json!({ "id": o.id, "offset": o.offset, "bytes": o.bytes }),
    });
    list.collect()
}

fn objects_text(directory: &Directory) -> String {
    let mut t = Table::new(&["object", "<shape", "<format", "<layout", "offset", "bytes"]);
    for o in &directory.objects {
        let (shape, format, layout) = match &o.kind {
            ObjectKind::Tensor { shape, format, layout } => {
                (shape_text(shape), format.as_str(), layout.as_str())
            }
            ObjectKind::Resource => (String::new(), "raw", "raw_bytes_v1"),
        };
        t.row([o.id.clone(), shape, format.into(), layout.into(), grouped(o.offset), grouped(o.bytes)]);
    }
    t.to_string()
}

fn bindings_json(directory: &Directory) -> Value {
    let list = directory.bindings.iter().map(|(name, binding)| {
        let value = match binding {
            Binding::Whole { object } => json!({ "object": object }),
            Binding::Parts(parts) => {
                let parts = parts.iter().map(|p| json!({ "object": p.object, "range": [p.begin, p.end] }));
                json!({ "parts": parts.collect::<Value>() })
            }
        };
        (name.clone(), value)
    });
    Value::Object(list.collect())
}

fn bindings_text(directory: &Directory) -> String {
    let mut t = Table::new(&["parameter", "<where"]);
    for (name, binding) in &directory.bindings {
        let place = match binding {
            Binding::Whole { object } => object.clone(),
            Binding::Parts(parts) => {
                let first = &parts[0];
                let more = if parts.len() > 1 {
                    format!(" and {} more ranges", parts.len() - 1)
                } else {
                    String::new()
                };
                format!("{}[{}..{}]{more}", first.object, first.begin, first.end)
            }
        };
        t.row([name.clone(), place]);
    }
    t.to_string()
}

fn part(path: &Path) -> anyhow::Result<(Value, String)> {
    let mut header = [0u8; 32];
    File::open(path)?
        .read_exact(&mut header)
        .with_context(|| format!("{} ends in its header", path.display()))?;
    let index = u64::from_le_bytes(header[8..16].try_into()?);
    let id: String = header[16..32].iter().map(|b| format!("{b:02x}")).collect();
    let bytes = path.metadata()?.len();
    let report = json!({ "schema_version": 1, "kind": "part", "index": index, "artifact_id": id, "file_bytes": bytes });
    let text = format!(
        "part {index} of artifact {id}, {} bytes; inspect the first file of the set for its contents\n",
        grouped(bytes)
    );
    Ok((report, text))
}

fn volume(path: &Path) -> anyhow::Result<(Value, String)> {
    let volume = Volume::open(path)?;
    let header = volume.header();
    let g = volume.geometry();
    let extension = header.extension.as_ref();
    let report = json!({
        "schema_version": 1, "kind": "ngram", "volume_id": header.id.to_string(), "rows": g.rows,
        "row_bytes": g.row_bytes, "rows_per_block": g.rows_per_block, "blocks": g.blocks(),
        "file_bytes": g.file_bytes(), "format": extension.map(|e| e.format.clone()),
        "scales": extension.map(|e| e.scales.clone()), "row_digest": extension.map(|e| e.row_digest.to_string()),
    });
    let mut t = Table::new(&["", "<"]);
    t.row(["n-gram volume".into(), file_name(path)]);
    t.row(["volume_id".into(), header.id.to_string()]);
    t.row([
        "rows".into(),
        format!("{} of {} bytes, {} a block", grouped(g.rows), g.row_bytes, g.rows_per_block),
    ]);
    t.row(["size".into(), format!("{} bytes", grouped(g.file_bytes()))]);
    match extension {
        Some(e) => {
            t.row(["format".into(), e.format.clone()]);
            let scales: Vec<String> = e.scales.iter().map(f32::to_string).collect();
            t.row(["scales".into(), if scales.is_empty() { "none".into() } else { scales.join(", ") }]);
            t.row(["digest of the rows".into(), e.row_digest.to_string()]);
        }
        None => t.row(["format".into(), "not in the header (untagged version 1)".into()]),
    }
    Ok((report, t.to_string()))
}

fn checkpoint(args: &InspectArgs) -> anyhow::Result<(Value, String)> {
    let options = OpenOptions { headers_only_ok: true, ..OpenOptions::default() };
    let checkpoint = Checkpoint::open(&args.path, &options)?;
    let classes = checkpoint_classes(&checkpoint)?;
    let bytes: u64 = checkpoint.shards().iter().map(|s| s.len).sum();
    let warnings = checkpoint.warnings();
    let report = json!({
        "schema_version": 1, "kind": "checkpoint", "tensors": checkpoint.tensors().len(),
        "shards": checkpoint.shards().iter().map(|s| json!({ "file": s.name, "bytes": s.len, "data": s.data_present }))
            .collect::<Value>(),
        "bytes": bytes, "classes": classes.to_json(), "warnings": warnings,
        "unindexed": checkpoint.unindexed().iter().map(|t| &*t.name).collect::<Vec<_>>(),
    });
    let mut text = String::new();
    writeln!(
        text,
        "{}: {} in {}, {}{}\n",
        args.path.display(),
        output::counted(checkpoint.tensors().len() as u64, "tensor"),
        output::counted(checkpoint.shards().len() as u64, "file"),
        output::bytes(bytes),
        if checkpoint.data_present() { "" } else { " (headers only)" },
    )?;
    text.push_str(&classes.to_text());
    for warning in warnings {
        writeln!(text, "warning: {warning}")?;
    }
    Ok((report, text))
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}
