//! Counting: what an artifact or a checkpoint holds, by parameter class, with bits per weight.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use infernix_artifact::{Binding, Directory, ObjectKind};
use infernix_checkpoint::{Checkpoint, Scheme};
use infernix_formats::Format;
use infernix_model::{
    Class, Component, DrafterConfig, ModelConfig, Parameter, Source, expert_parent_names, parameters,
    source_prefix,
};
use serde_json::{Value, json};

use crate::ConvertError;
use crate::described::Described;
use crate::sources::scheme_name;

/// Totals of one class of one component of an artifact.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Row {
    /// Bound parameters.
    pub parameters: u64,
    /// Logical weights.
    pub weights: u64,
    /// Bytes in the payload, padding included; a shared object counts by the weights taken from it.
    pub stored_bytes: f64,
    /// Bits of the words alone, without padding.
    pub logical_bits: f64,
    /// Format names.
    pub formats: BTreeSet<String>,
}

impl Row {
    fn add(&mut self, other: &Row) {
        self.parameters += other.parameters;
        self.weights += other.weights;
        self.stored_bytes += other.stored_bytes;
        self.logical_bits += other.logical_bits;
        self.formats.extend(other.formats.iter().cloned());
    }

    /// Bits per weight without padding.
    #[must_use]
    pub fn logical(&self) -> f64 {
        self.logical_bits / (self.weights as f64).max(1.0)
    }

    /// Bits per weight with padding.
    #[must_use]
    pub fn stored(&self) -> f64 {
        self.stored_bytes * 8.0 / (self.weights as f64).max(1.0)
    }

    fn to_json(&self) -> Value {
        json!({
            "parameters": self.parameters, "weights": self.weights, "formats": self.formats,
            "stored_bytes": self.stored_bytes.round() as u64,
            "bits_per_weight": self.logical(), "stored_bits_per_weight": self.stored(),
        })
    }
}

/// What an artifact and its volume hold.
#[derive(Debug, Clone)]
pub struct Census {
    /// By component and class (`text`, `gdn.q`).
    pub classes: BTreeMap<(String, String), Row>,
    /// The text decoder in the parts that a model card names: routed experts, dense, n-gram table and the sums. Empty of a
    /// drafter alone.
    pub decoder: Vec<(&'static str, Row)>,
}

impl Census {
    /// Counts the bindings of an artifact. `volume_bytes` is the length of the n-gram volume, where there is one.
    ///
    /// # Errors
    /// A binding that names no object.
    pub fn of(directory: &Directory, volume_bytes: Option<u64>) -> Result<Self, ConvertError> {
        let known = class_of_names(directory);
        let objects: BTreeMap<&str, _> = directory.objects.iter().map(|o| (o.id.as_str(), o)).collect();
        let mut classes: BTreeMap<(String, String), Row> = BTreeMap::new();
        for (name, binding) in &directory.bindings {
            let mut row = Row { parameters: 1, ..Row::default() };
            let parts: Vec<(&str, Option<u64>)> = match binding {
                Binding::Whole { object } => vec![(object, None)],
                Binding::Parts(parts) => {
                    parts.iter().map(|p| (p.object.as_str(), Some(p.end - p.begin))).collect()
                }
            };
            for (id, taken) in parts {
                let object = objects.get(id).ok_or_else(|| {
                    ConvertError::Artifact(infernix_artifact::ArtifactError::Invalid(format!(
                        "binding {name} names object {id}, which does not exist"
                    )))
                })?;
                let ObjectKind::Tensor { shape, format, .. } = &object.kind else { continue };
                let total = shape.iter().product::<u64>();
                let taken = taken.unwrap_or(total);
                row.weights += taken;
                row.stored_bytes += object.bytes as f64 * taken as f64 / (total as f64).max(1.0);
                row.logical_bits += taken as f64 * logical_bits(format, shape);
                row.formats.insert(format.clone());
            }
            let component = name.split('/').next().unwrap_or_default().to_owned();
            let class = known.get(name.as_str()).map_or("other", |c| c.name()).to_owned();
            // A bank is one parameter of [E,H,I]; its weights are three matrices of that size per expert.
            if class == Class::Experts.name() && !name.ends_with("/down") && !name.ends_with("/gate_up") {
                row.weights *= 3;
                row.logical_bits *= 3.0;
            }
            classes.entry((component, class)).or_default().add(&row);
        }
        let decoder = decoder(directory, &classes, volume_bytes);
        Ok(Self { classes, decoder })
    }

    /// As a JSON object.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let classes: serde_json::Map<String, Value> = self
            .classes
            .iter()
            .map(|((component, class), row)| (format!("{component}:{class}"), row.to_json()))
            .collect();
        let decoder: serde_json::Map<String, Value> =
            self.decoder.iter().map(|(name, row)| ((*name).to_owned(), row.to_json())).collect();
        json!({ "classes": classes, "text_decoder": decoder })
    }

    /// Two tables: classes, and the text decoder's bits per weight where there is one.
    #[must_use]
    pub fn to_text(&self) -> String {
        let mut out = String::new();
        let _ = writeln!(
            out,
            "{:<36} {:>10} {:>18} {:>16} {:>7} {:>7}  format",
            "class", "parameters", "weights", "stored bytes", "bits", "stored"
        );
        for ((component, class), row) in &self.classes {
            let _ = writeln!(
                out,
                "{:<36} {:>10} {:>18} {:>16} {:>7.2} {:>7.2}  {}",
                format!("{component}:{class}"),
                row.parameters,
                row.weights,
                row.stored_bytes.round() as u64,
                row.logical(),
                row.stored(),
                join(&row.formats),
            );
        }
        if self.decoder.is_empty() {
            return out;
        }
        let _ = writeln!(
            out,
            "\n{:<36} {:>18} {:>7} {:>7}",
            "text decoder, bits per weight", "weights", "bits", "stored"
        );
        for (name, row) in &self.decoder {
            let _ = writeln!(
                out,
                "{:<36} {:>18} {:>7.2} {:>7.2}",
                name,
                row.weights,
                row.logical(),
                row.stored()
            );
        }
        out
    }
}

fn join(names: &BTreeSet<String>) -> String {
    names.iter().map(String::as_str).collect::<Vec<_>>().join(", ")
}

/// Bits per weight of a format's words, with the scalars of a whole matrix spread over it.
fn logical_bits(format: &str, shape: &[u64]) -> f64 {
    let Ok(format) = format.parse::<Format>() else { return 0.0 };
    let k = shape.last().copied().unwrap_or(1).max(1) as f64;
    match format {
        // One BF16 scale a row; the other scalars are below a thousandth of a bit.
        Format::Fp8Row => format.ideal_bits() + 16.0 / k,
        _ => format.ideal_bits(),
    }
}

fn decoder(
    directory: &Directory,
    classes: &BTreeMap<(String, String), Row>,
    volume: Option<u64>,
) -> Vec<(&'static str, Row)> {
    if directory.is_drafter() {
        return Vec::new();
    }
    let mut routed = Row::default();
    let mut dense = Row::default();
    for ((component, class), row) in classes {
        if component != "text" {
            continue;
        }
        if class == Class::Experts.name() { routed.add(row) } else { dense.add(row) }
    }
    let mut without = Row::default();
    without.add(&routed);
    without.add(&dense);
    let mut rows = Vec::new();
    if routed.weights > 0 {
        rows.push(("routed experts", routed));
    }
    rows.push(("dense", dense));
    let table = infernix_artifact::ngram::NgramTable::of(directory).ok().flatten();
    let width = config(directory).and_then(|c| c.ple.map(|p| p.row_width()));
    if let (Some(table), Some(bytes), Some(width)) = (table, volume, width) {
        let g = table.geometry;
        let ngram = Row {
            parameters: 1,
            weights: g.rows * width,
            stored_bytes: bytes as f64,
            logical_bits: g.rows as f64 * f64::from(g.row_bytes) * 8.0,
            formats: BTreeSet::from([table.format]),
        };
        let mut all = without.clone();
        all.add(&ngram);
        rows.push(("n-gram table", ngram));
        rows.push(("all", all));
        rows.push(("all without n-gram table", without));
    } else {
        rows.push(("all", without));
    }
    rows
}

/// The configuration of a set, with its vision component's where it has one.
fn config(directory: &Directory) -> Option<ModelConfig> {
    let text = Value::Object(directory.components.get("text")?.config.clone());
    let mut root = json!({ "model_type": text.get("model_type")?, "text_config": text });
    if let Some(vision) = directory.components.get("vision") {
        root["vision_config"] = Value::Object(vision.config.clone());
    }
    ModelConfig::from_json(&root).ok()
}

/// Class of every logical name that the set's configuration implies.
fn class_of_names(directory: &Directory) -> BTreeMap<String, Class> {
    let drafters = directory.components.iter().filter_map(|(name, record)| {
        Component::from_name(name).filter(|c| c.is_block_drafter())?;
        DrafterConfig::from_json(&Value::Object(record.config.clone())).ok()
    });
    let mut list: Vec<Parameter> = drafters.flat_map(|d| d.parameters()).collect();
    if let Some(mut config) = config(directory) {
        config.mtp |= directory.components.contains_key("mtp");
        list.extend(parameters(&config, &source_prefix(|_| false), &MODEL_COMPONENTS));
    }
    let mut known = BTreeMap::new();
    for p in list {
        if p.class == Class::Experts {
            known.extend(expert_parent_names(&p.name).map(|name| (name, Class::Experts)));
        }
        known.insert(p.name, p.class);
    }
    known
}

/// What a model's own configuration describes.
const MODEL_COMPONENTS: [Component; 3] = [Component::Text, Component::Mtp, Component::Vision];

/// What a checkpoint holds, by class and scheme.
#[derive(Debug, Clone)]
pub struct CheckpointClasses {
    /// The model or drafter, in words.
    pub what: String,
    /// (component, class) to scheme to number of weights found.
    pub classes: BTreeMap<(String, String), BTreeMap<String, u64>>,
    /// Weights that belong to no parameter of the model.
    pub other: u64,
    /// Built-in recipes that convert it, by name.
    pub recipes: Vec<String>,
}

/// Counts a checkpoint's weights by parameter class and scheme, from headers alone, and tries every built-in recipe.
///
/// # Errors
/// A configuration of no supported model or drafter, or tensors that form no scheme.
pub fn checkpoint_classes(checkpoint: &Checkpoint) -> Result<CheckpointClasses, ConvertError> {
    let described = Described::from_config(checkpoint, &checkpoint.config()?)?;
    let style = source_prefix(|name| checkpoint.get(name).is_some());
    let list = described.parameters(&style, &Component::ALL);
    let places = Places::of(&list);
    let mut classes: BTreeMap<(String, String), BTreeMap<String, u64>> = BTreeMap::new();
    let mut other = 0;
    for weight in checkpoint.resolve_each() {
        let weight = weight?;
        let Some((component, class)) = places.find(weight.name()) else {
            other += 1;
            continue;
        };
        let scheme = scheme_label(weight.scheme());
        *classes.entry((component.name().to_owned(), class)).or_default().entry(scheme).or_default() += 1;
    }
    let recipes = crate::Recipe::built_in()
        .into_iter()
        .filter(|(name, _)| {
            let Ok(recipe) = crate::Recipe::load(name) else { return false };
            let mut options = crate::ConvertOptions::new(checkpoint.path(), recipe, "unwritten.infernix");
            options.dry_run = true;
            crate::plan(&options).is_ok_and(|plan| plan.missing.is_empty())
        })
        .map(|(name, _)| name.to_owned())
        .collect();
    Ok(CheckpointClasses { what: in_words(&described), classes, other, recipes })
}

fn in_words(described: &Described) -> String {
    let layers = |n: u64| format!("{n} layer{}", if n == 1 { "" } else { "s" });
    let of = |m: &ModelConfig| {
        let name = m.architecture.model_type().trim_end_matches("_text");
        let layers = layers(m.layers.len() as u64);
        format!("{name} model: {layers}, width {}, vocabulary {}", m.hidden, m.vocab)
    };
    let drafter = |d: &DrafterConfig| {
        let taps: Vec<String> = d.taps.iter().map(u64::to_string).collect();
        format!(
            "{} drafter: {}, blocks of {} positions; for a model of {}, width {}, vocabulary {}, of which it \
             reads layers {}",
            d.component,
            layers(d.layers),
            d.block,
            layers(d.target_layers),
            d.hidden,
            d.vocab,
            taps.join(", ")
        )
    };
    let parts = described.model.iter().map(of).chain(described.drafters.iter().map(drafter));
    parts.collect::<Vec<_>>().join("; ")
}

fn scheme_label(scheme: Scheme) -> String {
    match (scheme_name(scheme), scheme) {
        (Some(name), s) if s.has_input_scale() => format!("{name} with input scale"),
        (Some(name), _) => name.to_owned(),
        (None, Scheme::Plain(dtype)) => dtype.name().to_owned(),
        (None, s) => s.to_string(),
    }
}

/// Finds the class of a weight from its base name.
struct Places {
    exact: BTreeMap<String, (Component, String)>,
    prefixes: Vec<(String, Component, String)>,
}

impl Places {
    fn of(list: &[Parameter]) -> Self {
        let mut exact = BTreeMap::new();
        let mut prefixes = Vec::new();
        for p in list {
            match &p.source {
                // Several parameters may be rows of one weight (`gdn.q`, `gdn.k`, `gdn.v`).
                Source::Tensor { name, .. } => {
                    let base = name.strip_suffix(".weight").unwrap_or(name).to_owned();
                    let entry = exact.entry(base).or_insert_with(|| (p.component, String::new()));
                    if !entry.1.split('+').any(|c| c == p.class.name()) {
                        let separator = if entry.1.is_empty() { "" } else { "+" };
                        entry.1 = format!("{}{separator}{}", entry.1, p.class.name());
                    }
                }
                Source::Experts { prefix } => {
                    prefixes.push((prefix.clone(), p.component, p.class.name().to_owned()))
                }
                Source::NgramTable { buffers, .. } => {
                    prefixes.push((buffers.clone(), p.component, p.class.name().to_owned()));
                }
                Source::ExpertInputScales { .. } | Source::NgramScale { .. } => {}
            }
        }
        prefixes.sort();
        Self { exact, prefixes }
    }

    fn find(&self, base: &str) -> Option<(Component, String)> {
        let stem = base.strip_suffix(".weight").unwrap_or(base);
        if let Some((component, class)) = self.exact.get(stem) {
            return Some((*component, class.clone()));
        }
        let at = self.prefixes.partition_point(|(prefix, ..)| prefix.as_str() <= base);
        let (prefix, component, class) = self.prefixes.get(at.checked_sub(1)?)?;
        base.strip_prefix(prefix.as_str())?.starts_with('.').then(|| (*component, class.clone()))
    }
}

impl CheckpointClasses {
    /// As a JSON object.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let classes: serde_json::Map<String, Value> = self
            .classes
            .iter()
            .map(|((component, class), schemes)| (format!("{component}:{class}"), json!(schemes)))
            .collect();
        json!({ "what": self.what, "weights": classes, "other_weights": self.other, "recipes": self.recipes })
    }

    /// What it is, one line a class, then the recipes that fit.
    #[must_use]
    pub fn to_text(&self) -> String {
        let mut out = format!("{}\n\n{:<44} {:>9}  scheme\n", self.what, "class", "weights");
        for ((component, class), schemes) in &self.classes {
            for (scheme, count) in schemes {
                let _ = writeln!(out, "{:<44} {count:>9}  {scheme}", format!("{component}:{class}"));
            }
        }
        if self.other > 0 {
            let _ = writeln!(out, "{:<44} {:>9}", "of no parameter of it", self.other);
        }
        let recipes = if self.recipes.is_empty() { "none".to_owned() } else { self.recipes.join(", ") };
        let _ = writeln!(out, "\nrecipes that convert it: {recipes}");
        out
    }
}
