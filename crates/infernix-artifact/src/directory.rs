//! The directory of a set: components, objects, bindings, uses and files, and how it is printed.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use crate::json;

/// Longest object id, binding name, role or component id that is read or written, in bytes.
pub(crate) const MAX_NAME: usize = 1024;

/// The parsed or planned directory of an artifact.
#[derive(Clone, Debug, PartialEq)]
pub struct Directory {
    /// Component id (`text`, `vision`, `mtp`, ...) to component. A set without `text` is a drafter.
    pub components: BTreeMap<String, Component>,
    /// Objects by ascending offset.
    pub objects: Vec<Object>,
    /// Logical parameter name to where its elements are.
    pub bindings: BTreeMap<String, Binding>,
    /// Activation permissions per (parameter, input).
    pub uses: Vec<Use>,
    /// The entry first, then the continuation files.
    pub files: Vec<FileEntry>,
    /// Open object.
    pub metadata: Option<Map<String, Value>>,
    /// Open object; `integrity` and `source` are ours.
    pub provenance: Option<Map<String, Value>>,
}

/// One selectable part of a model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Component {
    /// Normalised configuration.
    pub config: Map<String, Value>,
    /// The component this one serves (`text` for drafters and vision).
    pub target: Option<String>,
    /// Role (`tokenizer.json`) to resource object id.
    pub resources: BTreeMap<String, String>,
    /// Draft vocabulary; `text` only.
    pub proposal: Option<Proposal>,
}

/// Vocabulary of the proposal head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Proposal {
    /// Every token.
    Full,
    /// `rows` tokens listed by `proposal/token_ids`.
    Indexed {
        /// Number of tokens.
        rows: u64,
    },
}

/// A run of payload bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Object {
    /// Unique id.
    pub id: String,
    /// Tensor or resource.
    pub kind: ObjectKind,
    /// First byte in the logical payload.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// What an object holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ObjectKind {
    /// An encoded tensor.
    Tensor {
        /// C-order shape, rank 0 to 16.
        shape: Vec<u64>,
        /// Numeric format name.
        format: String,
        /// Layout name.
        layout: String,
    },
    /// A file of the source, byte for byte (`raw_bytes_v1`).
    Resource,
}

/// Where the elements of a logical parameter are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Binding {
    /// A whole object of the same shape.
    Whole {
        /// Object id.
        object: String,
    },
    /// Flat C-order element ranges, concatenated.
    Parts(Vec<BindingPart>),
}

/// A range of logical elements of one object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BindingPart {
    /// Object id.
    pub object: String,
    /// First element.
    pub begin: u64,
    /// One past the last element.
    pub end: u64,
}

/// Permission set for the activations that meet a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ActivationPolicy {
    /// 16-bit activations only.
    A16Only,
    /// 8 bits allowed.
    AllowA8,
    /// 4 bits allowed.
    AllowA4,
}

impl ActivationPolicy {
    /// Name in the container.
    pub fn name(self) -> &'static str {
        match self {
            Self::A16Only => "A16Only",
            Self::AllowA8 => "AllowA8",
            Self::AllowA4 => "AllowA4",
        }
    }
}

/// How one input meets one parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Use {
    /// Binding name.
    pub parameter: String,
    /// Logical name of the activation.
    pub input: String,
    /// Permitted widths.
    pub activation_policy: Option<ActivationPolicy>,
    /// Role (`activation_input_divisor`, `activation_input_scale`) to object id.
    pub auxiliaries: BTreeMap<String, String>,
}

/// One file of the set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileEntry {
    /// Sibling file name; `None` for the entry itself.
    pub path: Option<String>,
    /// Payload bytes in this file.
    pub payload_bytes: u64,
}

impl Object {
    /// Shape of a tensor, `None` for a resource.
    pub fn shape(&self) -> Option<&[u64]> {
        match &self.kind {
            ObjectKind::Tensor { shape, .. } => Some(shape),
            ObjectKind::Resource => None,
        }
    }

    /// Format name of a tensor.
    pub fn format(&self) -> Option<&str> {
        match &self.kind {
            ObjectKind::Tensor { format, .. } => Some(format),
            ObjectKind::Resource => None,
        }
    }

    /// Layout name; `raw_bytes_v1` for a resource.
    pub fn layout(&self) -> &str {
        match &self.kind {
            ObjectKind::Tensor { layout, .. } => layout,
            ObjectKind::Resource => "raw_bytes_v1",
        }
    }

    /// Number of logical elements of a tensor (bytes of a resource).
    pub fn elements(&self) -> u64 {
        // The product was checked when the directory was parsed or laid out.
        self.shape().map_or(self.bytes, |shape| shape.iter().fold(1, |n, &d| n.saturating_mul(d)))
    }

    /// One past the last byte in the logical payload.
    pub fn end(&self) -> u64 {
        self.offset.saturating_add(self.bytes)
    }
}

/// Number of elements of `shape`, or why it is none: rank above 16 or a product beyond 2^63.
pub(crate) fn element_count(shape: &[u64]) -> Result<u64, String> {
    if shape.len() > 16 {
        return Err(format!("rank {} is above 16", shape.len()));
    }
    let zero = shape.contains(&0);
    let product =
        shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d.max(1))).filter(|&n| n <= i64::MAX as u64);
    let count = product.ok_or_else(|| format!("shape {shape:?} has more than 2^63 elements"))?;
    Ok(if zero { 0 } else { count })
}

impl Binding {
    /// The parts with explicit ranges; a whole object counts as its full range.
    pub fn parts(&self, elements: impl Fn(&str) -> u64) -> Vec<BindingPart> {
        match self {
            Self::Whole { object } => {
                vec![BindingPart { object: object.clone(), begin: 0, end: elements(object) }]
            }
            Self::Parts(parts) => parts.clone(),
        }
    }

    /// Ids of the objects this binding touches, in order.
    pub fn objects(&self) -> impl Iterator<Item = &str> {
        let (whole, parts) = match self {
            Self::Whole { object } => (Some(object.as_str()), [].as_slice()),
            Self::Parts(parts) => (None, parts.as_slice()),
        };
        whole.into_iter().chain(parts.iter().map(|part| part.object.as_str()))
    }
}

impl Directory {
    /// Index of the object named `id`. Linear; keep the result or build a map for many look-ups.
    pub fn object_index(&self, id: &str) -> Option<usize> {
        self.objects.iter().position(|object| object.id == id)
    }

    /// Total payload bytes over all files.
    pub fn payload_bytes(&self) -> u64 {
        self.files.iter().fold(0, |sum, file| sum.saturating_add(file.payload_bytes))
    }

    /// True when the set serves as a drafter for another one: it has no `text` component.
    pub fn is_drafter(&self) -> bool {
        !self.components.contains_key("text")
    }

    /// `metadata.name`, where present.
    pub fn name(&self) -> Option<&str> {
        self.metadata.as_ref()?.get("name")?.as_str()
    }

    /// The root members in the order of the stored text.
    fn members(&self) -> Vec<(&'static str, Value)> {
        let map = |items: Vec<(String, Value)>| Value::Object(items.into_iter().collect());
        let mut members = vec![
            ("components", map(self.components.iter().map(|(id, c)| (id.clone(), c.to_value())).collect())),
            ("objects", Value::Array(self.objects.iter().map(Object::to_value).collect())),
            ("bindings", map(self.bindings.iter().map(|(name, b)| (name.clone(), b.to_value())).collect())),
            ("uses", Value::Array(self.uses.iter().map(Use::to_value).collect())),
            (
                "files",
                Value::Array(
                    self.files
                        .iter()
                        .map(|f| json!({"path": f.path, "payload_bytes": f.payload_bytes}))
                        .collect(),
                ),
            ),
        ];
        members.extend(self.metadata.clone().map(|m| ("metadata", Value::Object(m))));
        members.extend(self.provenance.clone().map(|m| ("provenance", Value::Object(m))));
        members
    }

    /// The directory as one JSON value.
    pub fn to_value(&self) -> Value {
        Value::Object(self.members().into_iter().map(|(key, value)| (key.to_owned(), value)).collect())
    }

    /// The text that is stored in the entry: canonical, except that the root members keep the order of the format's
    /// table. (Tools tell version 3 by the leading `{"components":`.)
    pub fn to_stored_json(&self) -> String {
        let members = self.members();
        let mut out = String::new();
        json::write_members(&mut out, members.iter().map(|(key, value)| (*key, value)));
        out
    }
}

impl Component {
    fn to_value(&self) -> Value {
        let mut map = Map::new();
        map.insert("config".into(), Value::Object(self.config.clone()));
        if let Some(target) = &self.target {
            map.insert("target".into(), target.as_str().into());
        }
        if !self.resources.is_empty() {
            map.insert("resources".into(), string_map(&self.resources));
        }
        if let Some(proposal) = self.proposal {
            map.insert(
                "proposal".into(),
                match proposal {
                    Proposal::Full => json!({"domain": "full"}),
                    Proposal::Indexed { rows } => json!({"domain": "indexed", "rows": rows}),
                },
            );
        }
        Value::Object(map)
    }
}

fn string_map(map: &BTreeMap<String, String>) -> Value {
    Value::Object(map.iter().map(|(key, value)| (key.clone(), value.as_str().into())).collect())
}

impl Object {
    fn to_value(&self) -> Value {
        match &self.kind {
            ObjectKind::Tensor { shape, format, layout } => json!({
                "id": self.id, "kind": "tensor", "shape": shape, "format": format, "layout": layout,
                "offset": self.offset, "bytes": self.bytes,
            }),
            ObjectKind::Resource => json!({
                "id": self.id, "kind": "resource", "encoding": "raw_bytes_v1",
                "offset": self.offset, "bytes": self.bytes,
            }),
        }
    }
}

impl Binding {
    fn to_value(&self) -> Value {
        match self {
            Self::Whole { object } => json!({"object": object}),
            Self::Parts(parts) => {
                let parts: Vec<Value> =
                    parts.iter().map(|p| json!({"object": p.object, "range": [p.begin, p.end]})).collect();
                json!({ "parts": parts })
            }
        }
    }
}

impl Use {
    fn to_value(&self) -> Value {
        let mut map = Map::new();
        map.insert("parameter".into(), self.parameter.as_str().into());
        map.insert("input".into(), self.input.as_str().into());
        if let Some(policy) = self.activation_policy {
            map.insert("activation_policy".into(), policy.name().into());
        }
        if !self.auxiliaries.is_empty() {
            map.insert("auxiliaries".into(), string_map(&self.auxiliaries));
        }
        Value::Object(map)
    }
}
