//! What the configurations of all sources together describe: the model, its drafters, the components that are there.

use infernix_checkpoint::Checkpoint;
use infernix_model::{Component, DrafterConfig, ModelConfig, NameStyle, Parameter, parameters};
use serde_json::Value;
use std::path::PathBuf;

use crate::ConvertError;
use crate::sources::{Source as Opened, Sources};

/// What the sources' configurations describe.
#[derive(Debug, Clone)]
pub(crate) struct Described {
    /// The model; `None` where the main source is a drafter alone.
    pub(crate) model: Option<ModelConfig>,
    /// Block drafters.
    pub(crate) drafters: Vec<DrafterConfig>,
}

impl Described {
    /// Reads them.
    ///
    /// # Errors
    /// A configuration that is no model's or drafter's, or a drafter of another model.
    pub(crate) fn of(sources: &Sources) -> Result<Self, ConvertError> {
        let main = &sources.main().checkpoint;
        let root = main.config()?;
        let root = if DrafterConfig::describes(&root) { root } else { config_json(sources)? };
        let mut described = Self::from_config(main, &root)?;
        let Some(model) = &described.model else { return Ok(described) };
        for source in sources.list() {
            let Some(component) = Component::from_name(&source.spec.role).filter(|c| c.is_block_drafter())
            else {
                continue;
            };
            let checkpoint = &source.checkpoint;
            let fail = |source| ConvertError::Model { path: config_path(checkpoint), source };
            let drafter = DrafterConfig::from_json(&checkpoint.config()?).map_err(fail)?;
            if drafter.component != component {
                let reason = format!("the checkpoint is a {} drafter", drafter.component);
                return Err(ConvertError::Source { role: source.spec.role.clone(), reason });
            }
            drafter.fits(model).map_err(fail)?;
            described.drafters.push(drafter);
        }
        Ok(described)
    }

    /// What one checkpoint's configuration describes: a model, or a drafter alone.
    ///
    /// # Errors
    /// A configuration that is neither's.
    pub(crate) fn from_config(checkpoint: &Checkpoint, root: &Value) -> Result<Self, ConvertError> {
        let fail = |source| ConvertError::Model { path: config_path(checkpoint), source };
        if DrafterConfig::describes(root) {
            let drafter = DrafterConfig::from_json(root).map_err(fail)?;
            return Ok(Self { model: None, drafters: vec![drafter] });
        }
        let model = ModelConfig::from_json(root).map_err(fail)?;
        Ok(Self { model: Some(model), drafters: Vec::new() })
    }

    /// All parameters of some components.
    pub(crate) fn parameters(&self, style: &NameStyle, components: &[Component]) -> Vec<Parameter> {
        let mut out = self.model.as_ref().map_or_else(Vec::new, |m| parameters(m, style, components));
        for drafter in self.drafters.iter().filter(|d| components.contains(&d.component)) {
            out.extend(drafter.parameters());
        }
        out
    }

    /// Whether a component is described.
    pub(crate) fn describes(&self, c: Component) -> bool {
        match c {
            Component::Text => self.model.is_some(),
            Component::Vision => self.model.as_ref().is_some_and(|m| m.vision.is_some()),
            Component::Mtp => self.model.as_ref().is_some_and(|m| m.mtp),
            Component::Dflash | Component::Dflash2 => self.drafters.iter().any(|d| d.component == c),
        }
    }
}

/// Where a checkpoint's configuration is: that of a GGUF model is made of its keys.
fn config_path(checkpoint: &Checkpoint) -> PathBuf {
    checkpoint.gguf().map_or_else(|| checkpoint.folder().join("config.json"), |g| g.path().to_owned())
}

/// Keys beside `vision_config` that the image tower needs.
pub(crate) const VISION_KEYS: [&str; 4] =
    ["image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"];

/// The main source's `config.json`, with what it does not describe and another source brings along: the image tower and
/// the drafter of a source of their own, and the compress ratio that a GGUF converter lost, from the source of resources.
pub(crate) fn config_json(sources: &Sources) -> Result<Value, ConvertError> {
    let mut root = sources.main().checkpoint.config()?;
    let other = |role: &str| -> Result<Option<Value>, ConvertError> {
        let found = sources.list().iter().skip(1).find(|s| s.spec.role == role);
        // Weights need no configuration of their own: a lone file may serve as a source.
        let has =
            |s: &&Opened| s.checkpoint.gguf().is_some() || s.checkpoint.folder().join("config.json").exists();
        Ok(found.filter(has).map(|s| s.checkpoint.config()).transpose()?)
    };
    if root.get("vision_config").is_none()
        && let Some(vision) = other("vision")?
    {
        for key in VISION_KEYS.into_iter().chain(["vision_config"]) {
            if let (None, Some(value)) = (root.get(key), vision.get(key)) {
                root[key] = value.clone();
            }
        }
    }
    let text = |v: &Value, key: &str| v.get("text_config").unwrap_or(v).get(key).cloned();
    let mut put = |key: &str, value: Value| {
        if root.get("text_config").is_some() {
            root["text_config"][key] = value;
        } else {
            root[key] = value;
        }
    };
    let main = sources.main().checkpoint.config()?;
    let drafter = text(&main, "mtp_num_hidden_layers").and_then(|v| v.as_u64()).unwrap_or(0);
    if drafter == 0
        && text(&main, "mtp").is_none()
        && let Some(mtp) = other("mtp")?
        && let Some(layers) = text(&mtp, "mtp_num_hidden_layers")
    {
        put("mtp_num_hidden_layers", layers);
    }
    if sources.main().checkpoint.gguf().is_some()
        && text(&main, "indexer_n_heads").is_some()
        && text(&main, "indexer_compress_ratio").is_none()
    {
        let ratio = other("resources")?.and_then(|v| text(&v, "indexer_compress_ratio"));
        match ratio {
            Some(ratio) => put("indexer_compress_ratio", ratio),
            None => {
                return Err(ConvertError::Source {
                    role: "resources".into(),
                    reason: "the GGUF file lost the compress ratio of its sparse attention (a fault of its converter); pass \
                             --source resources=FOLDER with the config.json of the model, which has it"
                        .into(),
                });
            }
        }
    }
    Ok(root)
}

/// Components that the sources describe and hold.
pub(crate) fn components_present(sources: &Sources, described: &Described) -> Vec<Component> {
    let has = |prefix: &str| {
        sources.list().iter().any(|s| s.checkpoint.tensors().any(|t| t.name.starts_with(prefix)))
    };
    Component::ALL
        .into_iter()
        .filter(|c| described.describes(*c))
        .filter(|c| match c {
            Component::Vision => has("model.visual."),
            Component::Mtp => has("mtp."),
            _ => true,
        })
        .collect()
}
