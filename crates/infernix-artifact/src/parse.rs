//! Strict parsing of a version-3 directory: fixed records have no unknown members, every reference resolves, every
//! range and sum is in bounds. Formats and layouts are names here; they are judged when an object is used.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;

use serde_json::{Map, Value};

use crate::directory::{MAX_NAME, element_count};
use crate::names::check_sibling;
use crate::{
    ActivationPolicy, ArtifactError, Binding, BindingPart, Component, Directory, FileEntry, Object,
    ObjectKind, Proposal, Result, Use, json,
};

/// (JSON pointer, reason).
type Fault = (String, String);

/// Parses and validates the directory of the entry at `path` from the JSON text (with or without its reserve).
///
/// # Errors
/// [`ArtifactError::Directory`] with the place of the first fault.
pub fn parse_directory(path: &Path, text: &[u8]) -> Result<Directory> {
    let fail = |(at, reason): Fault| ArtifactError::Directory { path: path.to_owned(), at, reason };
    let value = json::parse(text).map_err(|(at, reason)| fail((format!("byte {at}"), reason)))?;
    let Value::Object(root) = &value else {
        return Err(fail((String::new(), "is no JSON object".into())));
    };
    if root.contains_key("identity") && !root.contains_key("components") {
        return Err(fail((
            String::new(),
            "is a version-2 directory; download the version-3 file or convert again".into(),
        )));
    }
    let directory = from_value(value).map_err(fail)?;
    let entry_name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    validate(&directory, entry_name).map_err(fail)?;
    Ok(directory)
}

/// A fixed record whose members are taken one by one; what is left over is unknown.
struct Record {
    at: String,
    map: Map<String, Value>,
}

impl Record {
    fn new(at: String, value: Value) -> Result<Self, Fault> {
        match value {
            Value::Object(map) => Ok(Self { at, map }),
            _ => Err((at, "is no object".into())),
        }
    }

    fn place(&self, key: &str) -> String {
        format!("{}/{key}", self.at)
    }

    fn optional(&mut self, key: &str) -> Option<Value> {
        self.map.remove(key)
    }

    fn required(&mut self, key: &str) -> Result<Value, Fault> {
        self.optional(key).ok_or_else(|| (self.at.clone(), format!("member {key:?} is missing")))
    }

    fn string(&mut self, key: &str) -> Result<String, Fault> {
        let value = self.required(key)?;
        name(self.place(key), value)
    }

    fn integer(&mut self, key: &str) -> Result<u64, Fault> {
        let value = self.required(key)?;
        integer(self.place(key), &value)
    }

    fn object(&mut self, key: &str) -> Result<Map<String, Value>, Fault> {
        let value = self.required(key)?;
        open(self.place(key), value)
    }

    fn array(&mut self, key: &str) -> Result<Vec<Value>, Fault> {
        match self.required(key)? {
            Value::Array(items) => Ok(items),
            _ => Err((self.place(key), "is no array".into())),
        }
    }

    fn finish(self) -> Result<(), Fault> {
        match self.map.keys().next() {
            None => Ok(()),
            Some(key) => Err((self.at, format!("unknown member {key:?}"))),
        }
    }
}

fn name(at: String, value: Value) -> Result<String, Fault> {
    match value {
        Value::String(text) if text.is_empty() => Err((at, "is empty".into())),
        Value::String(text) if text.len() > MAX_NAME => Err((at, format!("is longer than {MAX_NAME} bytes"))),
        Value::String(text) => Ok(text),
        _ => Err((at, "is no string".into())),
    }
}

fn integer(at: String, value: &Value) -> Result<u64, Fault> {
    value
        .as_u64()
        .filter(|&n| n <= i64::MAX as u64)
        .ok_or_else(|| (at, format!("{value:.40} is no integer in 0..2^63")))
}

fn open(at: String, value: Value) -> Result<Map<String, Value>, Fault> {
    match value {
        Value::Object(map) => Ok(map),
        _ => Err((at, "is no object".into())),
    }
}

/// Keys of maps are names too.
fn keyed(
    at: &str,
    map: Map<String, Value>,
) -> Result<impl Iterator<Item = (String, String, Value)> + use<>, Fault> {
    if let Some(key) = map.keys().find(|key| key.is_empty() || key.len() > MAX_NAME) {
        return Err((at.to_owned(), format!("name {key:.40?} is empty or longer than {MAX_NAME} bytes")));
    }
    let at = at.to_owned();
    Ok(map.into_iter().map(move |(key, value)| (format!("{at}/{key}"), key, value)))
}

fn items(at: &str, values: Vec<Value>) -> impl Iterator<Item = (String, Value)> {
    let at = at.to_owned();
    values.into_iter().enumerate().map(move |(i, value)| (format!("{at}/{i}"), value))
}

fn from_value(value: Value) -> Result<Directory, Fault> {
    let mut root = Record::new(String::new(), value)?;
    let components = keyed("/components", root.object("components")?)?
        .map(|(at, id, value)| Ok((id, component(at, value)?)))
        .collect::<Result<_, Fault>>()?;
    let objects = items("/objects", root.array("objects")?)
        .map(|(at, value)| object(at, value))
        .collect::<Result<_, _>>()?;
    let bindings = keyed("/bindings", root.object("bindings")?)?
        .map(|(at, key, value)| Ok((key, binding(at, value)?)))
        .collect::<Result<_, Fault>>()?;
    let uses = items("/uses", root.array("uses")?)
        .map(|(at, value)| one_use(at, value))
        .collect::<Result<_, _>>()?;
    let files =
        items("/files", root.array("files")?).map(|(at, value)| file(at, value)).collect::<Result<_, _>>()?;
    let metadata = root.optional("metadata").map(|v| open("/metadata".into(), v)).transpose()?;
    if let Some(value) = metadata.as_ref().and_then(|m| m.get("name")) {
        name("/metadata/name".into(), value.clone())?;
    }
    let provenance = root.optional("provenance").map(|v| open("/provenance".into(), v)).transpose()?;
    root.finish()?;
    Ok(Directory { components, objects, bindings, uses, files, metadata, provenance })
}

fn strings(at: String, value: Value) -> Result<BTreeMap<String, String>, Fault> {
    let map = open(at.clone(), value)?;
    keyed(&at, map)?.map(|(at, key, value)| Ok((key, name(at, value)?))).collect()
}

fn component(at: String, value: Value) -> Result<Component, Fault> {
    let mut record = Record::new(at, value)?;
    let config = record.object("config")?;
    let target = record.optional("target").map(|v| name(record.place("target"), v)).transpose()?;
    let resources =
        record.optional("resources").map(|v| strings(record.place("resources"), v)).transpose()?;
    let proposal = record.optional("proposal").map(|v| proposal(record.place("proposal"), v)).transpose()?;
    record.finish()?;
    Ok(Component { config, target, resources: resources.unwrap_or_default(), proposal })
}

fn proposal(at: String, value: Value) -> Result<Proposal, Fault> {
    let mut record = Record::new(at, value)?;
    let proposal = match record.string("domain")?.as_str() {
        "full" => Proposal::Full,
        "indexed" => Proposal::Indexed { rows: record.integer("rows")? },
        other => return Err((record.place("domain"), format!("{other:.40?} is neither full nor indexed"))),
    };
    record.finish()?;
    Ok(proposal)
}

fn object(at: String, value: Value) -> Result<Object, Fault> {
    let mut record = Record::new(at, value)?;
    let id = record.string("id")?;
    let kind = match record.string("kind")?.as_str() {
        "tensor" => {
            let place = record.place("shape");
            let shape: Vec<u64> = items(&place, record.array("shape")?)
                .map(|(at, v)| integer(at, &v))
                .collect::<Result<_, _>>()?;
            ObjectKind::Tensor { shape, format: record.string("format")?, layout: record.string("layout")? }
        }
        "resource" => match record.string("encoding")?.as_str() {
            "raw_bytes_v1" => ObjectKind::Resource,
            other => return Err((record.place("encoding"), format!("unknown encoding {other:.40?}"))),
        },
        other => return Err((record.place("kind"), format!("{other:.40?} is neither tensor nor resource"))),
    };
    let (offset, bytes) = (record.integer("offset")?, record.integer("bytes")?);
    record.finish()?;
    Ok(Object { id, kind, offset, bytes })
}

fn binding(at: String, value: Value) -> Result<Binding, Fault> {
    let mut record = Record::new(at, value)?;
    let binding = if record.map.contains_key("parts") {
        let place = record.place("parts");
        let parts: Vec<BindingPart> =
            items(&place, record.array("parts")?).map(|(at, v)| part(at, v)).collect::<Result<_, _>>()?;
        if parts.is_empty() {
            return Err((place, "is empty".into()));
        }
        Binding::Parts(parts)
    } else {
        Binding::Whole { object: record.string("object")? }
    };
    record.finish()?;
    Ok(binding)
}

fn part(at: String, value: Value) -> Result<BindingPart, Fault> {
    let mut record = Record::new(at, value)?;
    let object = record.string("object")?;
    let place = record.place("range");
    let range = record.array("range")?;
    let [begin, end] = range.as_slice() else {
        return Err((place, "is no pair [begin, end)".into()));
    };
    let (begin, end) = (integer(place.clone(), begin)?, integer(place, end)?);
    record.finish()?;
    Ok(BindingPart { object, begin, end })
}

fn one_use(at: String, value: Value) -> Result<Use, Fault> {
    let mut record = Record::new(at, value)?;
    let (parameter, input) = (record.string("parameter")?, record.string("input")?);
    let activation_policy = match record.optional("activation_policy") {
        None => None,
        Some(value) => Some(
            [ActivationPolicy::A16Only, ActivationPolicy::AllowA8, ActivationPolicy::AllowA4]
                .into_iter()
                .find(|policy| value.as_str() == Some(policy.name()))
                .ok_or_else(|| (record.place("activation_policy"), format!("{value:.40} is no policy")))?,
        ),
    };
    let auxiliaries = match record.optional("auxiliaries") {
        None => BTreeMap::new(),
        Some(value) => {
            let at = record.place("auxiliaries");
            let map = open(at.clone(), value)?;
            keyed(&at, map)?
                .map(|(at, role, value)| Ok((role, auxiliary(at, value)?)))
                .collect::<Result<_, Fault>>()?
        }
    };
    record.finish()?;
    Ok(Use { parameter, input, activation_policy, auxiliaries })
}

/// An auxiliary is an object id; the form of a whole-object binding is accepted too, for the published description
/// leaves open which of the two other writers use.
fn auxiliary(at: String, value: Value) -> Result<String, Fault> {
    if value.is_string() {
        return name(at, value);
    }
    let mut record = Record::new(at, value)?;
    let object = record.string("object")?;
    record.finish()?;
    Ok(object)
}

fn file(at: String, value: Value) -> Result<FileEntry, Fault> {
    let mut record = Record::new(at, value)?;
    let path = match record.required("path")? {
        Value::Null => None,
        value => Some(name(record.place("path"), value)?),
    };
    let payload_bytes = record.integer("payload_bytes")?;
    record.finish()?;
    Ok(FileEntry { path, payload_bytes })
}

/// Checks what relates members to each other. Shared by the parser and by the layout.
pub(crate) fn validate(directory: &Directory, entry_name: &str) -> Result<(), Fault> {
    let payload = files(&directory.files, entry_name)?;
    let objects = objects(&directory.objects, payload)?;
    let tensor = |at: String, id: &str| match objects.get(id) {
        None => Err((at, format!("no object {id:.80?}"))),
        Some((object, _)) if object.kind == ObjectKind::Resource => {
            Err((at, format!("object {id:.80?} is a resource, expected a tensor")))
        }
        Some((_, elements)) => Ok(*elements),
    };
    if directory.components.is_empty() {
        return Err(("/components".into(), "is empty".into()));
    }
    for (id, component) in &directory.components {
        let at = format!("/components/{id}");
        // A drafter's target may live in another set.
        let known = |target: &String| directory.components.contains_key(target) || directory.is_drafter();
        if let Some(target) = component.target.as_ref().filter(|target| !known(target) || *target == id) {
            return Err((format!("{at}/target"), format!("no component {target:.80?} to serve")));
        }
        if component.proposal.is_some() && id != "text" {
            return Err((format!("{at}/proposal"), "only the text component has one".into()));
        }
        for (role, resource) in &component.resources {
            if !objects.get(resource.as_str()).is_some_and(|(object, _)| object.kind == ObjectKind::Resource)
            {
                return Err((
                    format!("{at}/resources/{role}"),
                    format!("no resource object {resource:.80?}"),
                ));
            }
        }
    }
    for (parameter, binding) in &directory.bindings {
        let at = format!("/bindings/{parameter}");
        match binding {
            Binding::Whole { object } => {
                tensor(at, object)?;
            }
            Binding::Parts(parts) => parts.iter().enumerate().try_for_each(|(i, part)| {
                let at = format!("{at}/parts/{i}");
                let elements = tensor(at.clone(), &part.object)?;
                if part.begin >= part.end || part.end > elements {
                    let (begin, end, object) = (part.begin, part.end, &part.object);
                    return Err((
                        at,
                        format!("range [{begin}, {end}) is outside the {elements} elements of {object:?}"),
                    ));
                }
                Ok(())
            })?,
        }
    }
    let mut pairs = HashSet::new();
    for (i, one) in directory.uses.iter().enumerate() {
        let at = format!("/uses/{i}");
        if !directory.bindings.contains_key(&one.parameter) {
            return Err((at, format!("no binding {:.80?}", one.parameter)));
        }
        if !pairs.insert((&one.parameter, &one.input)) {
            return Err((at, format!("({:?}, {:?}) appears twice", one.parameter, one.input)));
        }
        for (role, object) in &one.auxiliaries {
            tensor(format!("{at}/auxiliaries/{role}"), object)?;
        }
    }
    Ok(())
}

/// Checks the `files` table; returns the total payload.
fn files(files: &[FileEntry], entry_name: &str) -> Result<u64, Fault> {
    let mut names = HashSet::from([entry_name]);
    let mut payload = 0u64;
    for (i, file) in files.iter().enumerate() {
        let at = format!("/files/{i}/path");
        match &file.path {
            None if i == 0 => {}
            None => return Err((at, "is null; only the first file is the entry".into())),
            Some(_) if i == 0 => return Err((at, "must be null: the first file is the entry itself".into())),
            Some(name) => {
                check_sibling(name).map_err(|reason| (at.clone(), reason))?;
                if !names.insert(name) {
                    return Err((at, format!("{name:?} names the entry or another part again")));
                }
            }
        }
        payload = payload.checked_add(file.payload_bytes).filter(|&sum| sum <= i64::MAX as u64).ok_or_else(
            || (format!("/files/{i}/payload_bytes"), "the payload exceeds 2^63 bytes".to_owned()),
        )?;
    }
    if files.is_empty() { Err(("/files".into(), "is empty".into())) } else { Ok(payload) }
}

/// Checks order and bounds of the objects; returns them by id with their element counts.
fn objects(objects: &[Object], payload: u64) -> Result<HashMap<&str, (&Object, u64)>, Fault> {
    let mut by_id = HashMap::with_capacity(objects.len());
    let mut end = 0;
    for (i, object) in objects.iter().enumerate() {
        let at = || format!("/objects/{i}");
        let id = &object.id;
        if object.offset < end {
            let reason =
                format!("{id:?} starts at {} inside or before the object ending at {end}", object.offset);
            return Err((at(), reason));
        }
        end = match object.offset.checked_add(object.bytes) {
            Some(end) if end <= payload => end,
            _ => {
                let (offset, bytes) = (object.offset, object.bytes);
                return Err((
                    at(),
                    format!("{id:?} at {offset} of {bytes} bytes exceeds the payload of {payload} bytes"),
                ));
            }
        };
        let elements = match &object.kind {
            ObjectKind::Resource => 0,
            ObjectKind::Tensor { shape, layout, .. } => {
                if let Some(alignment) = known_alignment(layout).filter(|a| object.offset % a != 0) {
                    let offset = object.offset;
                    return Err((
                        at(),
                        format!("{id:?} at {offset} is not aligned to {alignment} as {layout} demands"),
                    ));
                }
                element_count(shape).map_err(|reason| (format!("{}/shape", at()), reason))?
            }
        };
        if by_id.insert(id.as_str(), (object, elements)).is_some() {
            return Err((at(), format!("id {id:?} is used twice")));
        }
    }
    if objects.is_empty() { Err(("/objects".into(), "is empty".into())) } else { Ok(by_id) }
}

/// Alignment that a layout of the published description demands; new and unknown layouts are judged by their users.
fn known_alignment(layout: &str) -> Option<u64> {
    match layout {
        "nvfp4_expert_rg16_v1" => Some(4096),
        "contiguous_le_v1" | "row_split_k128_v1" | "block_scale_k16_m128x4_v1" | "row_scale_v1" => Some(256),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"{"components":{"text":{"config":{"rms_norm_eps":1e-06},"resources":{"t":"r"},"proposal":{"domain":"indexed","rows":2}}},
        "objects":[{"id":"w","kind":"tensor","shape":[2,3],"format":"bf16","layout":"contiguous_le_v1","offset":0,"bytes":12},
                   {"id":"r","kind":"resource","encoding":"raw_bytes_v1","offset":12,"bytes":4}],
        "bindings":{"a":{"object":"w"},"b":{"parts":[{"object":"w","range":[3,6]}]}},
        "uses":[{"parameter":"a","input":"x","activation_policy":"AllowA8","auxiliaries":{"activation_input_divisor":"w"}}],
        "files":[{"path":null,"payload_bytes":12},{"path":"p","payload_bytes":4}],"metadata":{"name":"n"}}"#;

    fn fault(from: &str, to: &str) -> String {
        assert!(GOOD.contains(from), "{from}");
        parse_directory(Path::new("e"), GOOD.replacen(from, to, 1).as_bytes()).unwrap_err().to_string()
    }

    #[test]
    fn a_good_directory_round_trips() {
        let directory = parse_directory(Path::new("e"), GOOD.as_bytes()).unwrap();
        let text = directory.to_stored_json();
        assert!(text.starts_with("{\"components\":"));
        assert_eq!(parse_directory(Path::new("e"), text.as_bytes()).unwrap(), directory);
    }

    #[test]
    fn unknown_members_of_every_fixed_record_are_refused() {
        for record in [
            r#"{"config":"#,
            r#"{"domain":"#,
            r#"{"id":"w","#,
            r#"{"id":"r","#,
            r#"{"object":"w"}"#,
            r#"{"parts":"#,
            r#"{"object":"w","range""#,
            r#"{"parameter":"#,
            r#"{"path":null"#,
            r#"{"components":"#,
        ] {
            let spoiled = record.replacen('{', "{\"zzz\":0,", 1);
            assert!(fault(record, &spoiled).contains("zzz"), "{record}");
        }
        assert!(!GOOD.is_empty() && fault("\"metadata\":{", "\"metadata\":3,\"x\":{").contains("/metadata"));
    }

    #[test]
    fn faults_name_their_place() {
        for (from, to, expected) in [
            (r#""offset":12"#, r#""offset":11"#, "/objects/1"),
            (r#""offset":0"#, r#""offset":1"#, "not aligned"),
            (r#""bytes":4}]"#, r#""bytes":5}]"#, "exceeds the payload"),
            (r#""bytes":4}]"#, r#""bytes":9223372036854775807}]"#, "exceeds the payload"),
            (r#""shape":[2,3]"#, r#""shape":[4294967296,4294967296]"#, "2^63"),
            (r#""shape":[2,3]"#, r#""shape":[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]"#, "rank 17"),
            (r#""range":[3,6]"#, r#""range":[3,7]"#, "outside the 6 elements"),
            (r#""range":[3,6]"#, r#""range":[3,3]"#, "outside"),
            (r#""range":[3,6]"#, r#""range":[3]"#, "pair"),
            (r#""a":{"object":"w"}"#, r#""a":{"object":"r"}"#, "is a resource"),
            (r#""a":{"object":"w"}"#, r#""a":{"object":"q"}"#, "no object"),
            (r#""parameter":"a""#, r#""parameter":"z""#, "no binding"),
            ("AllowA8", "AllowA3", "is no policy"),
            (r#""path":"p""#, r#""path":"../p""#, "separator"),
            (r#""path":"p""#, r#""path":"e""#, "names the entry"),
            (r#""path":null"#, r#""path":"x""#, "must be null"),
            (r#""bytes":12"#, r#""bytes":12.0"#, "no integer"),
            (r#""id":"r""#, r#""id":"w""#, "used twice"),
            (r#"{"t":"r"}"#, r#"{"t":"w"}"#, "no resource object"),
            (r#"1e-06"#, r#"1e999"#, "out of range"),
            (r#""name":"n""#, r#""name":"""#, "is empty"),
            (r#"{"rms_norm_eps":1e-06}"#, r#"{},"target":"mtp""#, "no component"),
        ] {
            let message = fault(from, to);
            assert!(message.contains(expected), "{to}: {message}");
        }
    }
}
