//! The n-gram table of an artifact: its volume found, accepted and given its scales.

use super::reader::{Ngram, NgramOptions};
use super::rows::VolumeRows;
use crate::error::EngineError;
use infernix_artifact::ngram::{NgramTable, Volume, locate};
use infernix_artifact::{Artifact, Binding, ObjectKind};
use infernix_model::{ModelConfig, ngram::constants};
use std::path::Path;

/// Opens the volume of an artifact: `given`, or where [`locate`] finds it. `None` for a model without a table. Also
/// returns what is odd about the volume but does no harm.
///
/// A tagged volume says its own format and scales, so that any volume with the same rows serves any conversion; an
/// untagged one is read as the artifact says.
///
/// # Errors
/// No volume, one of another table, or a scale that is missing.
pub fn open(
    artifact: &Artifact,
    given: Option<&Path>,
    options: NgramOptions,
) -> Result<Option<(Ngram, Vec<String>)>, EngineError> {
    let directory = artifact.directory();
    let Some(table) = NgramTable::of(directory).map_err(EngineError::Ngram)? else { return Ok(None) };
    let failed = |e: infernix_artifact::ArtifactError| EngineError::Ngram(e.to_string());
    let found = locate(artifact.path(), given, table.volume_id).map_err(failed)?;
    let volume = Volume::open(&found.path).map_err(failed)?;
    let warnings = volume.accept(&table).map_err(failed)?;
    let text = directory.components.get("text").map(|c| c.config.clone()).unwrap_or_default();
    let config = ModelConfig::from_json(&serde_json::Value::Object(text))?;
    let ple = config.ple.as_ref().ok_or_else(|| {
        EngineError::Ngram("the artifact names a volume, its configuration has no n-gram embedding".into())
    })?;
    let extension = volume.header().extension.clone();
    let format = extension.as_ref().map_or_else(|| table.format.clone(), |e| e.format.clone());
    let mut scales = Vec::new();
    let mut first = 0;
    for (index, (c, layer)) in constants(ple, config.vocab)?.iter().zip(&ple.layers).enumerate() {
        let own = extension.as_ref().and_then(|e| e.scales.get(index).copied());
        let scale = match own {
            Some(scale) => scale,
            None => stored_scale(artifact, &format!("text/layers/{layer}/ple/ngram_scale"))?.unwrap_or(1.0),
        };
        scales.push((first, scale));
        first += c.rows;
    }
    let rows = VolumeRows::new(volume, &format, ple.row_width() as usize, scales)?;
    Ok(Some((Ngram::new(ple, config.vocab, Box::new(rows), options)?, warnings)))
}

/// The scalar bound to `name`, widened exactly; `None` where nothing is bound.
fn stored_scale(artifact: &Artifact, name: &str) -> Result<Option<f32>, EngineError> {
    let bad = |what: String| EngineError::Weight { name: name.to_owned(), what };
    let (id, first) = match artifact.directory().bindings.get(name) {
        None => return Ok(None),
        Some(Binding::Whole { object }) => (object, 0),
        Some(Binding::Parts(parts)) => match parts.as_slice() {
            [part] if part.end == part.begin + 1 => (&part.object, part.begin as usize),
            _ => return Err(bad("expected one scalar".into())),
        },
    };
    let source = |e: infernix_artifact::ArtifactError| bad(e.to_string());
    let object = artifact.object(id).map_err(source)?;
    let ObjectKind::Tensor { format, .. } = &object.kind else {
        return Err(bad(format!("{id} is a resource")));
    };
    let bytes = artifact.bytes(object).map_err(source)?;
    let word =
        |n: usize| bytes.get(first * n..(first + 1) * n).ok_or_else(|| bad(format!("{id} is too short")));
    let scale = match format.as_str() {
        "bf16" => f32::from_bits(u32::from(u16::from_le_bytes([word(2)?[0], word(2)?[1]])) << 16),
        "fp32" => f32::from_le_bytes([word(4)?[0], word(4)?[1], word(4)?[2], word(4)?[3]]),
        other => return Err(bad(format!("a scale in format {other} is not known"))),
    };
    Ok(Some(scale))
}
