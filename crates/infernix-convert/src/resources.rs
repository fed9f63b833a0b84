//! Resources (tokenizer, template, processors) and the component records of the directory.

use std::collections::BTreeMap;
use std::sync::Arc;

use infernix_artifact::{Component as ArtifactComponent, Proposal};
use infernix_formats::Layout;
use infernix_model::Component;
use infernix_text::{GenerationDefaults, Template, TextError, Tokenizer};
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
                    self.check_processor(name, &value).map_err(&fail)?;
                }
                self.check_text(name, &bytes).map_err(fail)?;
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

    /// What the engine reads must be of use to it: better said here than when the model is served.
    fn check_text(&mut self, name: &str, bytes: &[u8]) -> Result<(), String> {
        let Some(vocab) = self.described.model.as_ref().map(|m| m.vocab) else { return Ok(()) };
        match name {
            "tokenizer.json" => {
                let checkpoint = self.sources.resources(Component::Text);
                let settings = checkpoint.file_bytes("tokenizer_config.json").map_err(|e| e.to_string())?;
                self.warnings.extend(check_tokenizer(bytes, settings.as_deref(), vocab)?);
            }
            "generation_config.json" => check_generation(bytes, vocab)?,
            "chat_template.jinja" => {
                let text = std::str::from_utf8(bytes).map_err(|e| format!("is not UTF-8: {e}"))?;
                if let Err(e) = Template::new(text) {
                    self.warnings.push(format!("{e}; the model will answer no chat"));
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// An image processor must cut patches as the tower expects them.
    fn check_processor(&self, name: &str, value: &Value) -> Result<(), String> {
        let vision = self.described.model.as_ref().and_then(|m| m.vision.as_ref());
        let (Some(v), true) = (vision, name.ends_with("preprocessor_config.json")) else {
            return Ok(());
        };
        for key in ["image_mean", "image_std"] {
            let Some(list) = value.get(key) else { continue };
            let fits =
                |x: &Value| x.as_f64().is_some_and(|x| x.is_finite() && (key == "image_mean" || x > 0.0));
            if !list.as_array().is_some_and(|l| l.len() as u64 == v.channels && l.iter().all(fits)) {
                let expected = format!("{} finite numbers, of image_std above 0", v.channels);
                return Err(format!("{key} is {list:.80}, expected {expected}"));
            }
        }
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

/// Whether a tokenizer is one that the engine reads and whose tokens have rows in the model's matrices; a warning where
/// many rows have no token.
///
/// # Errors
/// Why it is none.
pub(crate) fn check_tokenizer(
    bytes: &[u8],
    settings: Option<&[u8]>,
    vocab: u64,
) -> Result<Option<String>, String> {
    let tokenizer = Tokenizer::from_json(bytes, settings).map_err(|e| without_name(&e, "tokenizer.json"))?;
    if tokenizer.merge_count() == 0 {
        return Err("model.merges is empty, text would fall into bytes; fetch the file again".into());
    }
    let (count, end) = (tokenizer.token_count() as u64, u64::from(tokenizer.addressable()));
    if end > vocab {
        return Err(format!(
            "token {} has no row: vocab_size is {vocab}; the files are of different models",
            end - 1
        ));
    }
    // Releases pad by a thousandth (248,077 tokens in 248,320 rows).
    let sparse = count < vocab / 10 * 9;
    Ok(sparse.then(|| format!("tokenizer.json has {count} tokens for a vocabulary of {vocab}")))
}

/// Whether generation defaults are in their ranges and name tokens of the model.
///
/// # Errors
/// The field that is not.
pub(crate) fn check_generation(bytes: &[u8], vocab: u64) -> Result<(), String> {
    const FILE: &str = "generation_config.json";
    let defaults = GenerationDefaults::from_json(bytes).map_err(|e| without_name(&e, FILE))?;
    let ids = [("bos_token_id", defaults.bos), ("pad_token_id", defaults.pad)];
    let ends = defaults.eos.iter().map(|id| ("eos_token_id", Some(*id)));
    for (key, id) in ids.into_iter().chain(ends) {
        if let Some(id) = id.filter(|id| u64::from(*id) >= vocab) {
            return Err(format!("{key} is {id}, expected a token below {vocab}, the size of the vocabulary"));
        }
    }
    Ok(())
}

/// An error's text behind a path that names the file already.
fn without_name(e: &TextError, name: &str) -> String {
    let text = e.to_string();
    text.strip_prefix(&format!("{name}: ")).map_or(text.clone(), str::to_owned)
}

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}
