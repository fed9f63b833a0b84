//! The checkpoints that a conversion reads, by role, and where each logical parameter lies in them.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use infernix_checkpoint::{Checkpoint, Dtype, OpenOptions, Scheme, SourceTensor, TensorInfo};
use infernix_formats::Format;
use infernix_model::Component;

use crate::ConvertError;
use crate::recipe::ROLES;

/// Names of source schemes in recipes and reports, see [`scheme_name`]; `ggml` is every type of blocks of a GGUF file,
/// `ggml_<type>` one of them.
pub const SCHEME_NAMES: [&str; 10] =
    ["bf16", "fp16", "fp32", "nvfp4_mul", "nvfp4", "fp8_tensor", "fp8_row", "fp8_block128", "mxfp8", "ggml"];

/// Whether a recipe may name that scheme.
pub(crate) fn is_scheme(name: &str) -> bool {
    let ggml = || name.parse::<Format>().is_ok_and(|f| matches!(f, Format::Ggml(_)));
    SCHEME_NAMES.contains(&name) || ggml()
}

/// Whether a recipe's `pattern` means the scheme of this name.
pub(crate) fn scheme_matches(pattern: &str, name: &str) -> bool {
    pattern == name || (pattern == "ggml" && name.starts_with("ggml_"))
}

/// The name of a scheme in recipes; `None` for dtypes that are no weights.
#[must_use]
pub fn scheme_name(scheme: Scheme) -> Option<&'static str> {
    Some(match scheme {
        Scheme::Plain(Dtype::Bf16) => "bf16",
        Scheme::Plain(Dtype::F16) => "fp16",
        Scheme::Plain(Dtype::F32) => "fp32",
        Scheme::Nvfp4Multiplier { .. } => "nvfp4_mul",
        Scheme::Nvfp4Divisor { .. } => "nvfp4",
        Scheme::Fp8Tensor { .. } => "fp8_tensor",
        Scheme::Fp8Row { .. } => "fp8_row",
        Scheme::Fp8Block128 { .. } => "fp8_block128",
        Scheme::Mxfp8 => "mxfp8",
        Scheme::Ggml(t) => Format::Ggml(t).name(),
        _ => return None,
    })
}

/// One checkpoint and the role it plays.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceSpec {
    /// One of [`ROLES`].
    pub role: String,
    /// Folder or `.safetensors` file.
    pub path: PathBuf,
    /// Repository it was fetched from, where known; recorded in the artifact.
    pub repository: Option<String>,
    /// Revision of the repository, where known.
    pub revision: Option<String>,
}

impl SourceSpec {
    /// A source without known origin.
    pub fn new(role: impl Into<String>, path: impl Into<PathBuf>) -> Self {
        Self { role: role.into(), path: path.into(), repository: None, revision: None }
    }

    /// Parses `ROLE=PATH`.
    ///
    /// # Errors
    /// No `=`, or an unknown role.
    pub fn parse(text: &str) -> Result<Self, ConvertError> {
        let fail = |reason: String| ConvertError::Source { role: text.to_owned(), reason };
        let (role, path) = text.split_once('=').ok_or_else(|| fail("expected ROLE=PATH".into()))?;
        if !ROLES.contains(&role) {
            return Err(fail(format!("unknown role; there are {}", ROLES.join(", "))));
        }
        Ok(Self::new(role, path))
    }
}

/// An opened source.
#[derive(Debug)]
pub struct Source {
    /// What was asked for.
    pub spec: SourceSpec,
    /// Its checkpoint.
    pub checkpoint: Checkpoint,
    /// Names of tensors that a parameter consumed or a rule ignored.
    seen: Mutex<HashSet<Box<str>>>,
}

/// All sources of a conversion, the main one first.
#[derive(Debug)]
pub struct Sources {
    list: Vec<Source>,
}

/// A weight in one of the sources: index into [`Sources`] and its base name.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct WeightRef {
    /// Index of the source.
    pub source: usize,
    /// Name without plane suffix.
    pub name: String,
}

impl Sources {
    /// Opens every source. The first of roles `base`, `quantized` is the main one: its config describes the model and
    /// each of its tensors must be used.
    ///
    /// # Errors
    /// A role given twice, no main source, or a checkpoint that does not open.
    pub fn open(specs: &[SourceSpec], options: &OpenOptions) -> Result<Self, ConvertError> {
        let mut specs = specs.to_vec();
        for role in specs.iter().map(|s| s.role.clone()).collect::<Vec<_>>() {
            if !ROLES.contains(&role.as_str()) {
                let reason = format!("unknown role; there are {}", ROLES.join(", "));
                return Err(ConvertError::Source { role, reason });
            }
            if specs.iter().filter(|s| s.role == role).count() > 1 {
                return Err(ConvertError::Source { role, reason: "given twice".into() });
            }
        }
        specs.sort_by_key(|s| ROLES.iter().position(|r| *r == s.role));
        if specs.first().is_none_or(|s| s.role != "base" && s.role != "quantized") {
            return Err(ConvertError::Source {
                role: "base".into(),
                reason: "no main checkpoint was given; pass its folder".into(),
            });
        }
        let list = specs
            .into_iter()
            .map(|spec| {
                let options = OpenOptions {
                    // Only the main source must be a model of its own.
                    allow_missing_config: options.allow_missing_config
                        || !matches!(&*spec.role, "base" | "quantized"),
                    ..*options
                };
                let checkpoint = Checkpoint::open(&spec.path, &options)?;
                Ok(Source { spec, checkpoint, seen: Mutex::default() })
            })
            .collect::<Result<_, ConvertError>>()?;
        Ok(Self { list })
    }

    /// The sources in order.
    #[must_use]
    pub fn list(&self) -> &[Source] {
        &self.list
    }

    /// The main source.
    #[must_use]
    pub fn main(&self) -> &Source {
        &self.list[0]
    }

    /// A source's checkpoint.
    #[must_use]
    pub fn checkpoint(&self, source: usize) -> &Checkpoint {
        &self.list[source].checkpoint
    }

    /// The order in which sources are asked for a parameter.
    #[must_use]
    pub fn order(&self, role: Option<&str>, component: Component, table: bool) -> Vec<usize> {
        let own = if table { "table" } else { component.name() };
        let mut wanted = Vec::new();
        wanted.extend(role);
        wanted.push(own);
        if component == Component::Text || component == Component::Mtp {
            wanted.push("quantized");
        }
        wanted.push("base");
        let mut order: Vec<usize> =
            wanted.iter().filter_map(|r| self.list.iter().position(|s| s.spec.role == *r)).collect();
        let mut seen = HashSet::new();
        order.retain(|i| seen.insert(*i));
        order
    }

    /// The first source that has a weight of this name, in the order of roles.
    ///
    /// # Errors
    /// As [`Checkpoint::resolve`].
    pub fn locate(
        &self,
        name: &str,
        component: Component,
        role: Option<&str>,
        table: bool,
    ) -> Result<Option<(usize, SourceTensor<'_>)>, ConvertError> {
        for index in self.order(role, component, table) {
            if let Some(weight) = self.checkpoint(index).resolve(name)? {
                return Ok(Some((index, weight)));
            }
        }
        Ok(None)
    }

    /// The weight again, for reading.
    ///
    /// # Errors
    /// As [`Checkpoint::resolve`]; also if it is gone, which a plan over the same sources excludes.
    pub fn weight(&self, r: &WeightRef) -> Result<SourceTensor<'_>, ConvertError> {
        self.list[r.source]
            .checkpoint
            .resolve(&r.name)?
            .ok_or_else(|| ConvertError::MissingTensors { count: 1, names: r.name.clone() })
    }

    /// Marks a tensor as used.
    pub fn consume(&self, source: usize, tensor: &str) {
        if let Ok(mut seen) = self.list[source].seen.lock() {
            seen.insert(tensor.into());
        }
    }

    /// Marks all planes of a weight as used.
    pub fn consume_weight(&self, source: usize, weight: &SourceTensor<'_>) {
        for (_, plane) in weight.planes().iter() {
            self.consume(source, &plane.name);
        }
    }

    /// Tensors of a source that nothing has used, in the order of names.
    #[must_use]
    pub fn unused(&self, source: usize) -> Vec<&TensorInfo> {
        let Ok(seen) = self.list[source].seen.lock() else { return Vec::new() };
        self.list[source].checkpoint.tensors_by_name().filter(|t| !seen.contains(&t.name)).collect()
    }

    /// Where the resources of a component come from: the source of that role; for an image tower its own source; else the
    /// main one.
    #[must_use]
    pub fn resources(&self, component: Component) -> &Checkpoint {
        let of = |role: &str| self.list.iter().find(|s| s.spec.role == role);
        let own = if component == Component::Vision { of("vision") } else { None };
        &of("resources").or(own).unwrap_or(&self.list[0]).checkpoint
    }

    /// Whether every file holds its data.
    #[must_use]
    pub fn data_present(&self) -> bool {
        self.list.iter().all(|s| s.checkpoint.data_present())
    }

    /// File name of a tensor, for messages.
    #[must_use]
    pub fn file_of(&self, source: usize, tensor: &TensorInfo) -> String {
        self.list[source].checkpoint.shard_of(tensor).name.clone()
    }

    /// Folder of the main source.
    #[must_use]
    pub fn main_path(&self) -> &Path {
        self.main().checkpoint.path()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn role_arguments_are_checked() {
        assert_eq!(SourceSpec::parse("table=/x=y").unwrap().path, PathBuf::from("/x=y"));
        assert!(SourceSpec::parse("tabel=/x").unwrap_err().to_string().contains("unknown role"));
        assert!(SourceSpec::parse("/x").unwrap_err().to_string().contains("ROLE=PATH"));
        let twice = [SourceSpec::new("base", "/a"), SourceSpec::new("base", "/b")];
        let e = Sources::open(&twice, &OpenOptions::default()).unwrap_err();
        assert!(e.to_string().contains("given twice"));
        let e = Sources::open(&[SourceSpec::new("vision", "/a")], &OpenOptions::default()).unwrap_err();
        assert!(e.to_string().contains("no main checkpoint"));
    }
}
