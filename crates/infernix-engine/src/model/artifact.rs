//! Weights out of an artifact.

use super::source::WeightSource;
use crate::backend::{FileRange, WeightData, WeightPart};
use crate::error::EngineError;
use infernix_artifact::{Artifact, Binding, Object};
use infernix_formats::{Encoded, Format, Layout};
use infernix_model::{Component, ModelConfig};
use std::collections::HashMap;
use std::sync::Arc;

/// An open artifact as a [`WeightSource`]. Bytes stay in the map they come from.
pub struct ArtifactSource {
    artifact: Arc<Artifact>,
    config: ModelConfig,
    objects: HashMap<String, usize>,
}

impl ArtifactSource {
    /// Reads the text configuration.
    pub fn new(artifact: Arc<Artifact>) -> Result<Self, EngineError> {
        let text = artifact.directory().components.get("text").ok_or_else(|| {
            EngineError::Unsupported(
                "the artifact has no `text` component: it is a drafter, not a model".into(),
            )
        })?;
        let config = ModelConfig::from_json(&serde_json::Value::Object(text.config.clone()))?;
        let objects =
            artifact.directory().objects.iter().enumerate().map(|(i, o)| (o.id.clone(), i)).collect();
        Ok(ArtifactSource { artifact, config, objects })
    }

    /// The artifact.
    pub fn artifact(&self) -> &Arc<Artifact> {
        &self.artifact
    }

    fn object(&self, name: &str, id: &str) -> Result<&Object, EngineError> {
        let directory = self.artifact.directory();
        self.objects.get(id).and_then(|i| directory.objects.get(*i)).ok_or_else(|| EngineError::Weight {
            name: name.to_owned(),
            what: format!("object {id} does not exist"),
        })
    }

    fn part(&self, name: &str, id: &str, range: Option<(u64, u64)>) -> Result<WeightPart, EngineError> {
        let object = self.object(name, id)?;
        let bad = |what: String| EngineError::Weight { name: name.to_owned(), what };
        let (Some(shape), Some(format)) = (object.shape(), object.format()) else {
            return Err(bad(format!("object {id} is a resource")));
        };
        let format: Format = format
            .parse()
            .map_err(|_| bad(format!("numeric format {format} is not known to this version")))?;
        let layout: Layout = object
            .layout()
            .parse()
            .map_err(|_| bad(format!("layout {} is not known to this version", object.layout())))?;
        let source = |e: infernix_artifact::ArtifactError| EngineError::Source {
            name: name.to_owned(),
            source: Box::new(e),
        };
        let bytes = self.artifact.bytes(object).map_err(source)?;
        let segments = self.artifact.segments(object.offset, object.bytes).map_err(source)?;
        let file = match &segments[..] {
            [one] => {
                self.artifact.paths().nth(one.file).map(|p| FileRange { path: p.into(), offset: one.offset })
            }
            _ => None,
        };
        let mut shape = shape.to_vec();
        let (begin, end) = range.unwrap_or((0, object.elements()));
        if shape.len() < 2 && (begin, end) != (0, object.elements()) {
            // A run of a plain vector: the same bytes seen as rows of one value.
            shape = vec![object.elements(), 1];
        }
        let k = shape.last().copied().unwrap_or(1).max(1);
        if begin % k != 0 || end % k != 0 {
            return Err(bad(format!("elements {begin}..{end} of object {id} are not whole rows of {k}")));
        }
        Ok(WeightPart { format, layout, shape, bytes: Arc::new(bytes), file, rows: begin / k..end / k })
    }
}

impl WeightSource for ArtifactSource {
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn has_component(&self, component: Component) -> bool {
        self.artifact.directory().components.contains_key(component.name())
    }

    fn names(&self) -> Vec<String> {
        self.artifact.directory().bindings.keys().cloned().collect()
    }

    fn contains(&self, name: &str) -> bool {
        self.artifact.directory().bindings.contains_key(name)
    }

    fn weight(&self, name: &str) -> Result<WeightData, EngineError> {
        let binding = self.artifact.directory().bindings.get(name);
        let binding = binding
            .ok_or_else(|| EngineError::Weight { name: name.to_owned(), what: "is missing".into() })?;
        match binding {
            Binding::Whole { object } => {
                let part = self.part(name, object, None)?;
                Ok(WeightData { shape: part.shape.clone(), parts: vec![part] })
            }
            Binding::Parts(list) => {
                let mut parts = Vec::with_capacity(list.len());
                for p in list {
                    parts.push(self.part(name, &p.object, Some((p.begin, p.end)))?);
                }
                let tail = parts.first().map_or(&[][..], |p| &p.shape[1..]);
                let per: u64 = tail.iter().product::<u64>() / tail.last().copied().unwrap_or(1).max(1);
                let rows: u64 = parts.iter().map(|p| p.rows.end - p.rows.start).sum();
                let shape = std::iter::once(rows / per.max(1)).chain(tail.iter().copied()).collect();
                Ok(WeightData { shape, parts })
            }
        }
    }

    fn input_scale(&self, name: &str) -> Option<f32> {
        let directory = self.artifact.directory();
        let uses = directory.uses.iter().filter(|u| u.parameter == name);
        // Both conventions follow the weight's own: a multiplier beside a multiplier, a divisor beside a divisor.
        let roles = ["activation_input_scale", "activation_input_divisor"];
        let id = uses.flat_map(|u| roles.iter().find_map(|r| u.auxiliaries.get(*r))).next()?;
        let part = self.part(name, id, None).ok()?;
        let mut value = [0f32];
        let e = Encoded::new(part.layout, part.format, &part.shape, (*part.bytes).as_ref()).ok()?;
        e.rows(0..1).ok()?.decode_f32(&mut value).ok()?;
        Some(value[0])
    }

    fn input_columns(&self, name: &str) -> Result<Option<Vec<u32>>, EngineError> {
        let uses = self.artifact.directory().uses.iter().filter(|u| u.parameter == name);
        let Some(id) = uses.filter_map(|u| u.auxiliaries.get("input_columns")).next() else {
            return Ok(None);
        };
        let part = self.part(name, id, None)?;
        let bad =
            || EngineError::Weight { name: name.to_owned(), what: format!("object {id} holds no columns") };
        if part.format != Format::Int32 {
            return Err(bad());
        }
        let words = (*part.bytes).as_ref().as_chunks::<4>().0;
        let columns: Vec<u32> = words.iter().map(|w| u32::from_le_bytes(*w)).collect();
        // A permutation: each column once.
        let mut seen = vec![false; columns.len()];
        for c in &columns {
            match seen.get_mut(*c as usize) {
                Some(s) if !*s => *s = true,
                _ => return Err(bad()),
            }
        }
        Ok(Some(columns))
    }

    fn default_expert_activation(&self) -> u32 {
        let directory = self.artifact.directory();
        let of = |map: Option<&serde_json::Map<String, serde_json::Value>>| {
            let v = map?.get("default_expert_activation")?;
            v.as_u64().or_else(|| v.as_str()?.trim_start_matches(['a', 'A']).parse().ok())
        };
        let text = directory.components.get("text").map(|t| &t.config);
        match of(text).or_else(|| of(directory.metadata.as_ref())) {
            Some(4) => 4,
            Some(8) => 8,
            _ => 16,
        }
    }
}
