//! The crate's one error type.

use std::path::PathBuf;

/// Why a conversion, a verification or a repair cannot be planned or carried out.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "fields repeat what each message says")]
#[non_exhaustive]
pub enum ConvertError {
    /// A source could not be read.
    #[error(transparent)]
    Checkpoint(Box<infernix_checkpoint::CheckpointError>),
    /// An artifact or volume could not be read or written.
    #[error(transparent)]
    Artifact(#[from] infernix_artifact::ArtifactError),
    /// The configuration describes no supported model.
    #[error("{}: {source}", path.display())]
    Model { path: PathBuf, source: infernix_model::ModelError },
    /// No recipe of that name.
    #[error("no recipe named {name:?}; built in are {known}; a file must end in .toml")]
    UnknownRecipe { name: String, known: String },
    /// A recipe that cannot be used.
    #[error("recipe {recipe}: {reason}")]
    Recipe { recipe: String, reason: String },
    /// A recipe for another architecture.
    #[error("recipe {recipe} is for {expected}, the checkpoint is {found}; choose another recipe, or `auto`")]
    WrongArchitecture { recipe: String, expected: String, found: String },
    /// A selector without a class.
    #[error("recipe {recipe}: selector {selector:?} matches no class; there are {classes}")]
    UnmatchedSelector { recipe: String, selector: String, classes: String },
    /// A parameter without a rule.
    #[error(
        "recipe {recipe}: no rule covers {parameter} (class {class}, component {component}, source {scheme}); add one, for example class = [\"{class}\"], format = \"stored\""
    )]
    UncoveredParameter {
        recipe: String,
        parameter: String,
        class: &'static str,
        component: &'static str,
        scheme: String,
    },
    /// A role that is unknown, given twice or required and absent.
    #[error("source {role:?}: {reason}")]
    Source { role: String, reason: String },
    /// Tensors that no parameter uses.
    #[error("{}: {count} tensors belong to no parameter of this model: {names}; the checkpoint is of another model or revision, or holds more than this version knows", path.display())]
    ExtraTensors { path: PathBuf, count: usize, names: String },
    /// Parameters that no source has.
    #[error(
        "{count} tensors are missing: {names}; fetch the whole checkpoint, or leave the component out with --components"
    )]
    MissingTensors { count: usize, names: String },
    /// A tensor of another shape.
    #[error(
        "{file}: tensor {tensor}: expected shape {expected:?} by config.json, found {found:?}; the checkpoint and its config are of different models"
    )]
    Shape { file: String, tensor: String, expected: Vec<u64>, found: Vec<u64> },
    /// A tensor of another dtype or scheme.
    #[error("{file}: tensor {tensor}: expected {expected}, found {found}; {advice}")]
    Scheme { file: String, tensor: String, expected: String, found: String, advice: &'static str },
    /// A combination that the container has no layout for.
    #[error("{parameter}: {reason}")]
    NoLayout { parameter: String, reason: String },
    /// A stored word without a value, found while streaming.
    #[error("{file}: tensor {tensor}: {source}; the checkpoint is damaged or was made by a faulty export")]
    Word { file: String, tensor: String, source: Box<infernix_formats::FormatError> },
    /// The n-gram buffers or parts contradict the configuration.
    #[error("{}: n-gram table: {reason}", path.display())]
    Ngram { path: PathBuf, reason: String },
    /// Proposal options that do not fit.
    #[error("proposal head: {reason}")]
    Proposal { reason: String },
    /// A resource that is missing or not what it should be.
    #[error("{}: {reason}", path.display())]
    Resource { path: PathBuf, reason: String },
    /// An option that contradicts another or the model.
    #[error("{0}")]
    Option(String),
    /// A file system operation failed.
    #[error("{}: cannot {action}: {source}", path.display())]
    Io { path: PathBuf, action: &'static str, source: std::io::Error },
    /// A size or format mistake inside this program's own calls.
    #[error("{what}: {source}")]
    Format { what: String, source: Box<infernix_formats::FormatError> },
    /// The artifact and the checkpoint do not belong together, or the artifact is not of the expected form.
    #[error("{}: {reason}", path.display())]
    Verify { path: PathBuf, reason: String },
    /// An artifact, or a part of it, that the target of an export cannot hold.
    #[error("{}: {reason}", path.display())]
    Export { path: PathBuf, reason: String },
    /// Stopped by the user; state is kept.
    #[error("interrupted")]
    Interrupted,
}

impl From<infernix_checkpoint::CheckpointError> for ConvertError {
    fn from(e: infernix_checkpoint::CheckpointError) -> Self {
        Self::Checkpoint(Box::new(e))
    }
}

impl ConvertError {
    /// True for an interruption (exit code 130).
    #[must_use]
    pub fn is_interrupted(&self) -> bool {
        match self {
            Self::Interrupted => true,
            Self::Artifact(e) => e.is_interrupted(),
            _ => false,
        }
    }
}

/// At most eight names, then a count.
pub(crate) fn list<'a>(names: impl IntoIterator<Item = &'a str>) -> String {
    let names: Vec<_> = names.into_iter().collect();
    let shown = names.iter().take(8).copied().collect::<Vec<_>>().join(", ");
    if names.len() > 8 { format!("{shown} and {} more", names.len() - 8) } else { shown }
}
