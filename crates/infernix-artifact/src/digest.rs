//! What is hashed, and how: the artifact's id, the directory digest, the quotable digest.
//!
//! Each is BLAKE3 over the canonical form of one JSON value, so that a second implementation needs nothing but the
//! text in `docs/container.md`.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use crate::draft::INTEGRITY;
use crate::json::canonical;
use crate::{ArtifactId, Digest, Directory};

/// Object id to digest.
pub type ObjectDigests = BTreeMap<String, Digest>;

/// The artifact's id: object digests in payload order, the file split and `metadata`.
pub fn artifact_id(directory: &Directory, digests: &ObjectDigests) -> ArtifactId {
    let objects: Vec<Value> = directory
        .objects
        .iter()
        .map(|o| json!([o.id, o.offset, digests.get(&o.id).map(Digest::to_string)]))
        .collect();
    let split: Vec<u64> = directory.files.iter().map(|file| file.payload_bytes).collect();
    let value = json!({"domain": "infernix artifact id 1", "objects": objects, "files": split, "metadata": directory.metadata});
    ArtifactId::from_digest(&Digest::of(canonical(&value).as_bytes()))
}

/// The digest stored as `provenance.integrity.directory`: the artifact's id and the directory without file names and
/// without that digest itself.
pub fn directory_digest(directory: &Directory, id: ArtifactId) -> Digest {
    let mut bare = directory.clone();
    bare.files.iter_mut().for_each(|file| file.path = None);
    if let Some(Value::Object(integrity)) = bare.provenance.as_mut().and_then(|p| p.get_mut(INTEGRITY)) {
        integrity.remove("directory");
    }
    let mut value = bare.to_value();
    if let Some(files) = value.get_mut("files").and_then(Value::as_array_mut) {
        files.iter_mut().filter_map(Value::as_object_mut).for_each(|file| {
            file.remove("path");
        });
    }
    let value = json!({"artifact_id": id.to_string(), "directory": value});
    Digest::of(canonical(&value).as_bytes())
}

/// A digest to quote on a model card: what every parameter is, independent of file names, split, object ids and of how
/// parameters share objects. `rows` is the volume's row digest, where the model has a volume.
pub fn quotable_digest(directory: &Directory, digests: &ObjectDigests, rows: Option<Digest>) -> Digest {
    let objects: BTreeMap<&str, &crate::Object> =
        directory.objects.iter().map(|o| (o.id.as_str(), o)).collect();
    let elements = |id: &str| objects.get(id).map_or(0, |object| object.elements());
    // Sorted by name: BTreeMap, and canonical() sorts again.
    let mut parameters = Map::new();
    for (name, binding) in &directory.bindings {
        let parts: Vec<Value> = binding
            .parts(elements)
            .iter()
            .map(|part| {
                let object = objects.get(part.object.as_str());
                json!([
                    object.and_then(|o| o.format()),
                    object.map(|o| o.layout()),
                    object.and_then(|o| o.shape()),
                    digests.get(&part.object).map(Digest::to_string),
                    part.begin,
                    part.end
                ])
            })
            .collect();
        parameters.insert(name.clone(), Value::Array(parts));
    }
    let value = json!({
        "domain": "infernix quotable digest 1", "parameters": parameters, "ngram_rows": rows.map(|d| d.to_string()),
    });
    Digest::of(canonical(&value).as_bytes())
}

/// `provenance.integrity` as recorded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Integrity {
    /// Digest of every object.
    pub objects: ObjectDigests,
    /// Digest of the directory.
    pub directory: Digest,
}

impl Integrity {
    /// Reads the record of `directory`; `Ok(None)` where another writer left none.
    ///
    /// # Errors
    /// The reason, where a record is present but malformed or does not name exactly the objects of the set.
    pub fn of(directory: &Directory) -> Result<Option<Self>, String> {
        let Some(value) = directory.provenance.as_ref().and_then(|p| p.get(INTEGRITY)) else {
            return Ok(None);
        };
        let at = "/provenance/integrity";
        if value.get("version").and_then(Value::as_u64) != Some(1) {
            return Err(format!("{at}/version is not 1; a newer program wrote this set"));
        }
        if value.get("algorithm").and_then(Value::as_str) != Some("blake3") {
            return Err(format!("{at}/algorithm is not blake3"));
        }
        if value.as_object().is_some_and(|map| map.len() != 4) {
            return Err(format!("{at} has unknown members"));
        }
        let parse = |place: &str, value: &Value| {
            let text = value.as_str().ok_or_else(|| format!("{at}/{place} is no string"))?;
            text.parse::<Digest>().map_err(|reason| format!("{at}/{place}: {reason}"))
        };
        let objects = value.get("objects").and_then(Value::as_object);
        let objects = objects.ok_or_else(|| format!("{at}/objects is missing"))?;
        let objects: ObjectDigests = objects
            .iter()
            .map(|(id, value)| Ok((id.clone(), parse(id, value)?)))
            .collect::<Result<_, String>>()?;
        if let Some(object) = directory.objects.iter().find(|object| !objects.contains_key(&object.id)) {
            return Err(format!("{at}/objects lacks {:?}", object.id));
        }
        if objects.len() != directory.objects.len() {
            return Err(format!("{at}/objects names objects that the set does not have"));
        }
        let digest = value.get("directory").ok_or_else(|| format!("{at}/directory is missing"))?;
        Ok(Some(Self { objects, directory: parse("directory", digest)? }))
    }
}
