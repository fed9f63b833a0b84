//! Resources (tokenizer, template, processors) and the component records of the directory.

use std::collections::BTreeMap;
use std::sync::Arc;

use infernix_artifact::{Component as ArtifactComponent, Proposal};
use infernix_formats::Layout;
use infernix_model::Component;
use serde_json::{Map, Value, json};

use crate::ConvertError;
use crate::build::Builder;
use crate::described::{VISION_KEYS, config_json};
use crate::plan::{Content, PlannedObject, Proof};
use crate::recipe::Method;

/// Files stored byte for byte, by component.
pub(crate) const RESOURCES: [(Component, &[&str]); 2] = [
    (
        Component::Text,
        &["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"],
    ),
    (Component::Vision, &["preprocessor_config.json", "video_preprocessor_config.json"]),
];
/// Where the volume's id is filled in.
pub(crate) const VOLUME_ID: &str = "/components/text/config/ngram_table/volume_id";

impl Builder<'_> {
    /// Adds the resource files of the converted components.
    pub(crate) fn resources(&mut self) -> Result<(), ConvertError> {
        for (component, names) in RESOURCES {
            if !self.components.contains(&component) {
                continue;
            }
            for name in names {
                let checkpoint = self.sources.resources(component);
                let path = checkpoint.folder().join(name);
                let Some(bytes) = checkpoint.file_bytes(name)? else {
                    if *name == "tokenizer.json" && !self.options.dry_run {
                        let reason =
                            "is missing; a model without its tokenizer cannot be used, fetch the file"
                                .to_owned();
                        return Err(ConvertError::Resource { path, reason });
                    }
                    self.warnings.push(format!("resource {name} is missing"));
                    continue;
                };
                let fail = |reason: String| ConvertError::Resource { path: path.clone(), reason };
                if bytes.is_empty() {
                    return Err(fail("is empty; fetch the file again".into()));
                }
                if name.ends_with(".json") {
                    let value: Value = serde_json::from_slice(&bytes)
                        .map_err(|e| fail(format!("is not valid JSON: {e}; fetch the file again")))?;
                    if !value.is_object() {
                        return Err(fail("is no JSON object; fetch the file again".into()));
                    }
                    self.check_processor(name, &value).map_err(fail)?;
                }
                self.objects.push(PlannedObject {
                    id: format!("resource/{component}/{name}"),
                    parameters: Vec::new(),
                    component,
                    shape: vec![bytes.len() as u64],
                    format: None,
                    layout: Layout::RawBytesV1,
                    method: Method::Stored,
                    proof: if checkpoint.gguf().is_some() { Proof::Synthesised } else { Proof::Identical },
                    bytes: bytes.len() as u64,
                    offset: 0,
                    content: Content::Bytes(Arc::new(bytes)),
                });
            }
        }
        Ok(())
    }

    /// An image processor must cut patches as the tower expects them.
    fn check_processor(&self, name: &str, value: &Value) -> Result<(), String> {
        let vision = self.described.model.as_ref().and_then(|m| m.vision.as_ref());
        let (Some(v), true) = (vision, name.ends_with("preprocessor_config.json")) else {
            return Ok(());
        };
        for (key, expected) in
            [("patch_size", v.patch), ("temporal_patch_size", v.temporal_patch), ("merge_size", v.merge)]
        {
            if let Some(found) = value.get(key).and_then(Value::as_u64)
                && found != expected
            {
                return Err(format!(
                    "{key} is {found}, vision_config has {expected}; the files are of different models"
                ));
            }
        }
        Ok(())
    }

    /// The directory's components, and the JSON pointers that are filled in while writing.
    pub(crate) fn component_records(
        &self,
        default_expert_activation: u64,
    ) -> Result<(BTreeMap<String, ArtifactComponent>, Vec<String>), ConvertError> {
        let root = if self.described.model.is_some() { config_json(self.sources)? } else { Value::Null };
        let mut late = Vec::new();
        let mut out = BTreeMap::new();
        for &component in &self.components {
            let mut record = ArtifactComponent::default();
            for object in self.objects.iter().filter(|o| o.component == component && o.format.is_none()) {
                let role = object.id.rsplit('/').next().unwrap_or_default();
                record.resources.insert(role.to_owned(), object.id.clone());
            }
            match component {
                Component::Text => {
                    let Some(model) = &self.described.model else { continue };
                    record.config = object(model.to_text_config());
                    if matches!(model.ffn, infernix_model::Ffn::Moe(_)) {
                        record
                            .config
                            .insert("default_expert_activation".into(), json!(default_expert_activation));
                    }
                    if let Some(ngram) = &self.ngram {
                        record.config.insert("ngram_table".into(), ngram.config());
                        late.push(VOLUME_ID.to_owned());
                    }
                    let head = self.placed.iter().find(|p| p.name == "proposal/head");
                    record.proposal = head.map(|p| Proposal::Indexed { rows: p.shape[0] });
                }
                Component::Vision => {
                    record.config = object(root.get("vision_config").cloned().unwrap_or_default());
                    for key in VISION_KEYS {
                        if let Some(value) = root.get(key) {
                            record.config.insert(key.into(), value.clone());
                        }
                    }
                    record.target = Some("text".into());
                }
                Component::Dflash | Component::Dflash2 => {
                    let drafter = self.described.drafters.iter().find(|d| d.component == component);
                    record.config = drafter.map(|d| d.to_config()).unwrap_or_default();
                    record.target = self.components.contains(&Component::Text).then(|| "text".into());
                }
                Component::Mtp => {
                    record.config.insert("num_hidden_layers".into(), json!(1));
                    record.target = Some("text".into());
                }
            }
            out.insert(component.name().to_owned(), record);
        }
        Ok((out, late))
    }
}

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}
