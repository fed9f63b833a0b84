//! Planning a set to the byte: offsets, file split and directory size, without touching the disk.

use std::collections::{BTreeMap, HashSet};

use serde_json::{Map, Value, json};

use crate::directory::element_count;
use crate::framing::{FRAME_ALIGNMENT, HEADER_BYTES, MAX_JSON_BYTES, align_up};
use crate::names::{MAX_FILE_NAME, check_sibling, part_name};
use crate::parse::validate;
use crate::{
    ArtifactError, Binding, Component, Digest, Directory, FileEntry, Object, ObjectKind, Result, Use,
};

/// Largest file of a set unless the user says otherwise: 32 decimal gigabytes, as published sets have.
pub const DEFAULT_MAX_FILE_BYTES: u64 = 32_000_000_000;

/// Name of the digest record in `provenance`.
pub(crate) const INTEGRITY: &str = "integrity";

/// What a converter hands in: everything but offsets, split and digests.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Draft {
    /// Components of the set.
    pub components: BTreeMap<String, Component>,
    /// Objects in payload order.
    pub objects: Vec<DraftObject>,
    /// Parameter name to elements.
    pub bindings: BTreeMap<String, Binding>,
    /// Activation permissions.
    pub uses: Vec<Use>,
    /// Open object; empty means absent. Part of the artifact's id.
    pub metadata: Map<String, Value>,
    /// Open object without `integrity`, which the layout adds.
    pub provenance: Map<String, Value>,
    /// JSON pointers (`/components/text/config/ngram_table/volume_id`) to strings whose value, but not whose length,
    /// becomes known only while writing; see [`crate::Writer::set_late`].
    pub late: Vec<String>,
}

/// One object of a [`Draft`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DraftObject {
    /// Unique id.
    pub id: String,
    /// Tensor or resource.
    pub kind: ObjectKind,
    /// Alignment in the logical payload: 4096 for expert banks, 256 for other tensors, 1 for resources.
    pub alignment: u64,
    /// Exact length.
    pub bytes: u64,
}

/// How to split a set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayoutOptions {
    /// File name of the entry, without folder.
    pub entry_name: String,
    /// Upper bound of every file, in bytes.
    pub max_file_bytes: u64,
}

impl LayoutOptions {
    /// The default limit.
    pub fn new(entry_name: impl Into<String>) -> Self {
        Self { entry_name: entry_name.into(), max_file_bytes: DEFAULT_MAX_FILE_BYTES }
    }
}

/// A planned file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedFile {
    /// File name without folder.
    pub name: String,
    /// First byte of its payload in the file.
    pub payload_start: u64,
    /// Payload bytes.
    pub payload_bytes: u64,
    /// Exact length of the file.
    pub file_bytes: u64,
}

/// A [`Draft`] with offsets, file split and exact sizes.
#[derive(Clone, Debug, PartialEq)]
pub struct Layouted {
    directory: Directory,
    json_bytes: u64,
    files: Vec<PlannedFile>,
    late: Vec<String>,
}

impl Draft {
    /// Assigns offsets and splits the payload.
    ///
    /// The directory gets room for 255-byte names of every continuation file, so the sizes do not depend on the
    /// output's name and any later name fits without moving payload.
    ///
    /// # Errors
    /// Illegal names, duplicate ids, bindings out of range, alignments that are no powers of two, or a limit that
    /// leaves no room for payload.
    pub fn layout(self, options: &LayoutOptions) -> Result<Layouted> {
        let invalid = |reason: String| ArtifactError::Invalid(format!("layout: {reason}"));
        check_sibling(&options.entry_name).map_err(invalid)?;
        if self.provenance.contains_key(INTEGRITY) {
            return Err(invalid("provenance.integrity is the writer's own; leave it out".into()));
        }
        let (objects, payload_bytes) = place(self.objects).map_err(invalid)?;
        let mut provenance = self.provenance;
        provenance.insert(INTEGRITY.into(), integrity(objects.iter().map(|o| (o.id.as_str(), None)), None));
        let mut directory = Directory {
            components: self.components,
            objects,
            bindings: self.bindings,
            uses: self.uses,
            files: vec![FileEntry { path: None, payload_bytes }],
            metadata: (!self.metadata.is_empty()).then_some(self.metadata),
            provenance: Some(provenance),
        };
        let json_bytes = split(&mut directory, payload_bytes, options.max_file_bytes).map_err(invalid)?;
        for (index, file) in directory.files.iter_mut().enumerate().skip(1) {
            let name = part_name(&options.entry_name, index);
            check_sibling(&name).map_err(invalid)?;
            file.path = Some(name);
        }
        validate(&directory, &options.entry_name)
            .map_err(|(at, reason)| ArtifactError::Invalid(format!("layout: {at}: {reason}")))?;
        let stored = directory.to_stored_json().len() as u64;
        if stored > json_bytes {
            return Err(invalid(format!(
                "file names need {stored} bytes of JSON and {json_bytes} are reserved"
            )));
        }
        for pointer in &self.late {
            if !directory.to_value().pointer(pointer).is_some_and(Value::is_string) {
                return Err(invalid(format!("late value {pointer:?} names no string of the directory")));
            }
        }
        let files = planned_files(&directory, &options.entry_name, json_bytes);
        Ok(Layouted { directory, json_bytes, files, late: self.late })
    }
}

/// Gives every object its offset; returns the total payload.
fn place(drafts: Vec<DraftObject>) -> Result<(Vec<Object>, u64), String> {
    let mut ids = HashSet::new();
    let mut at = 0u64;
    let mut objects = Vec::with_capacity(drafts.len());
    for draft in drafts {
        if !ids.insert(draft.id.clone()) {
            return Err(format!("object id {:?} is used twice", draft.id));
        }
        if !draft.alignment.is_power_of_two() || draft.alignment > FRAME_ALIGNMENT {
            return Err(format!(
                "object {:?}: alignment {} is no power of two up to 4096",
                draft.id, draft.alignment
            ));
        }
        if let ObjectKind::Tensor { shape, .. } = &draft.kind {
            element_count(shape).map_err(|reason| format!("object {:?}: {reason}", draft.id))?;
        }
        let too_big = || format!("object {:?}: the payload exceeds 2^63 bytes", draft.id);
        let offset = align_up(at, draft.alignment).ok_or_else(too_big)?;
        at = offset.checked_add(draft.bytes).filter(|&end| end <= i64::MAX as u64).ok_or_else(too_big)?;
        objects.push(Object { id: draft.id, kind: draft.kind, offset, bytes: draft.bytes });
    }
    Ok((objects, at))
}

/// Fills `directory.files` and returns the size of the JSON with its reserve. The number of files and the size of the
/// JSON depend on each other; both only grow, so the loop ends.
fn split(directory: &mut Directory, payload: u64, limit: u64) -> Result<u64, String> {
    let mut payload_start = FRAME_ALIGNMENT;
    loop {
        let first = limit.saturating_sub(payload_start) / FRAME_ALIGNMENT * FRAME_ALIGNMENT;
        let rest = limit.saturating_sub(FRAME_ALIGNMENT) / FRAME_ALIGNMENT * FRAME_ALIGNMENT;
        if payload_start.saturating_add(payload) > limit && first == 0 {
            return Err(format!(
                "a limit of {limit} bytes per file leaves no room for payload after {payload_start} bytes of header and directory"
            ));
        }
        let mut left = payload;
        let mut files = Vec::new();
        loop {
            let (start, room) =
                if files.is_empty() { (payload_start, first) } else { (FRAME_ALIGNMENT, rest) };
            // The last file of the set need not end on a page.
            let take = if left <= limit.saturating_sub(start) { left } else { room };
            // Placeholder names of full length; the caller puts in the real ones.
            let path = (!files.is_empty()).then(|| "n".repeat(MAX_FILE_NAME));
            files.push(FileEntry { path, payload_bytes: take });
            left -= take;
            if left == 0 {
                break;
            }
            if files.len() >= 99_999 {
                return Err(format!("a limit of {limit} bytes per file needs more than 99,999 files"));
            }
        }
        directory.files = files;
        let json = directory.to_stored_json().len() as u64;
        let needed = align_up(HEADER_BYTES + json, FRAME_ALIGNMENT).unwrap_or(u64::MAX);
        if json > MAX_JSON_BYTES - FRAME_ALIGNMENT {
            return Err(format!("the directory needs {json} bytes, more than {MAX_JSON_BYTES}"));
        }
        if needed <= payload_start {
            return Ok(payload_start - HEADER_BYTES);
        }
        payload_start = needed;
    }
}

fn planned_files(directory: &Directory, entry_name: &str, json_bytes: u64) -> Vec<PlannedFile> {
    let plan = |file: &FileEntry| {
        let payload_start = if file.path.is_none() { HEADER_BYTES + json_bytes } else { FRAME_ALIGNMENT };
        PlannedFile {
            name: file.path.clone().unwrap_or_else(|| entry_name.to_owned()),
            payload_start,
            payload_bytes: file.payload_bytes,
            file_bytes: payload_start + file.payload_bytes,
        }
    };
    directory.files.iter().map(plan).collect()
}

/// The integrity record; `None` stands for a digest that is not known yet and has the same length.
pub(crate) fn integrity<'a>(
    objects: impl Iterator<Item = (&'a str, Option<Digest>)>,
    directory: Option<Digest>,
) -> Value {
    let hex = |digest: Option<Digest>| Value::String(digest.unwrap_or(Digest([0; 32])).to_string());
    let objects: Map<String, Value> = objects.map(|(id, digest)| (id.to_owned(), hex(digest))).collect();
    json!({"version": 1, "algorithm": "blake3", "objects": objects, "directory": hex(directory)})
}

impl Layouted {
    /// The directory, with zeros in place of digests.
    pub fn directory(&self) -> &Directory {
        &self.directory
    }

    /// The files, entry first.
    pub fn files(&self) -> &[PlannedFile] {
        &self.files
    }

    /// Length of the directory JSON with its reserve.
    pub fn json_bytes(&self) -> u64 {
        self.json_bytes
    }

    /// Length of the logical payload.
    pub fn payload_bytes(&self) -> u64 {
        self.directory.payload_bytes()
    }

    /// Bytes of all files together.
    pub fn artifact_bytes(&self) -> u64 {
        self.files.iter().map(|file| file.file_bytes).sum()
    }

    /// Objects by ascending offset.
    pub fn objects(&self) -> &[Object] {
        &self.directory.objects
    }

    /// Strings that are filled in while writing.
    pub fn late(&self) -> &[String] {
        &self.late
    }

    /// Digest of the plan: equal plans lay out equal bytes. Late values are left out.
    pub fn plan_digest(&self) -> Digest {
        let value = json!({
            "directory": mask(&self.directory, &self.late), "json_bytes": self.json_bytes,
            "files": self.files.iter().map(|f| json!([f.name, f.file_bytes])).collect::<Vec<_>>(),
        });
        Digest::of(crate::json::canonical(&value).as_bytes())
    }

    pub(crate) fn into_parts(self) -> (Directory, u64, Vec<PlannedFile>, Vec<String>) {
        (self.directory, self.json_bytes, self.files, self.late)
    }
}

/// The directory with digests, file names and late values blanked: what two runs over the same input have in common
/// before any object is written.
pub(crate) fn mask(directory: &Directory, late: &[String]) -> Value {
    let mut directory = directory.clone();
    let ids: Vec<String> = directory.objects.iter().map(|o| o.id.clone()).collect();
    if let Some(provenance) = &mut directory.provenance {
        provenance.insert(INTEGRITY.into(), integrity(ids.iter().map(|id| (id.as_str(), None)), None));
    }
    directory.files.iter_mut().for_each(|file| file.path = None);
    let mut value = directory.to_value();
    for pointer in late {
        if let Some(slot) = value.pointer_mut(pointer) {
            *slot = Value::Null;
        }
    }
    value
}
