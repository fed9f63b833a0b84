//! What a conversion will write, down to the byte, before anything is read but headers.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use infernix_artifact::Layouted;
use infernix_formats::{Format, Layout};
use infernix_model::{Component, ModelConfig};
use serde::Serialize;

use crate::ngram::{NgramPlan, TablePlan};
use crate::proposal::ProposalOptions;
use crate::recipe::{Method, Recipe};
use crate::sources::{SourceSpec, Sources, WeightRef};

/// Everything that decides what a conversion writes.
#[derive(Debug, Clone)]
pub struct ConvertOptions {
    /// Checkpoints by role.
    pub sources: Vec<SourceSpec>,
    /// What becomes of them.
    pub recipe: Recipe,
    /// The artifact's first file.
    pub output: PathBuf,
    /// Components to convert; `None` for all that the sources have.
    pub components: Option<Vec<Component>>,
    /// Whether and how to add a proposal head.
    pub proposal: Option<ProposalOptions>,
    /// What to do about the n-gram table.
    pub ngram: NgramTarget,
    /// Name stored in the artifact.
    pub name: Option<String>,
    /// Largest size of one file.
    pub max_file_bytes: u64,
    /// Worker threads, at least 1.
    pub threads: usize,
    /// Plan only: sources may lack their data and nothing is written.
    pub dry_run: bool,
    /// Continue from the state of an interrupted run.
    pub resume: bool,
    /// Where two shards hold the same tensor, take the one the index names.
    pub trust_index: bool,
}

impl ConvertOptions {
    /// One checkpoint, all its components, the volume beside the artifact.
    pub fn new(checkpoint: impl Into<PathBuf>, recipe: Recipe, output: impl Into<PathBuf>) -> Self {
        Self {
            sources: vec![SourceSpec::new("base", checkpoint)],
            recipe,
            output: output.into(),
            components: None,
            proposal: None,
            ngram: NgramTarget::Beside,
            name: None,
            max_file_bytes: infernix_artifact::DEFAULT_MAX_FILE_BYTES,
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            dry_run: false,
            resume: false,
            trust_index: false,
        }
    }
}

/// Where the n-gram volume goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NgramTarget {
    /// Beside the artifact, with its name and `.ngram`.
    Beside,
    /// This file.
    Write(PathBuf),
    /// Nowhere: an existing volume holds the same rows.
    Reuse(PathBuf),
}

/// How a stored object relates to its source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Proof {
    /// The source's words in the source's order.
    Identical,
    /// The source's words in another order.
    Permuted,
    /// Each word widened without loss.
    Widened,
    /// Other words of the same values: what the file holds is a function of them that can be undone.
    Reencoded,
    /// Other words; the values differ by a reported error.
    Requantized,
    /// Made from nothing in the source's tensors (token ids of a proposal head).
    Synthesised,
}

impl Proof {
    /// Name in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Proof::Identical => "identical",
            Proof::Permuted => "permuted",
            Proof::Widened => "widened",
            Proof::Reencoded => "reencoded",
            Proof::Requantized => "requantized",
            Proof::Synthesised => "synthesised",
        }
    }
}

/// Rows of a weight that follow each other in an object. Rows are those of [`view_rows`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Segment {
    /// Index into the content's weights.
    pub(crate) weight: usize,
    pub(crate) rows: Range<u64>,
}

/// What fills an object.
#[derive(Debug, Clone)]
pub(crate) enum Content {
    /// Rows of weights, one after the other.
    Rows { weights: Vec<WeightRef>, segments: Vec<Segment>, k: u64 },
    /// An expert bank, from per-expert weights below a prefix.
    Bank { source: usize, prefix: String },
    /// Activation scales `[E,3]` of the experts below a prefix.
    ExpertInputScales { source: usize, prefix: String },
    /// INT32 `[K]`: the source's column of each stored one, where blocks keep the order of their file.
    InputColumns { weight: WeightRef },
    /// The activation scale of a weight, widened to FP32.
    InputScale { weight: WeightRef },
    /// The scale of an n-gram table that is encoded here, BF16.
    TableScale { table: Arc<TablePlan> },
    /// A whole small tensor, word for word.
    Tensor { source: usize, name: String },
    /// Rows of the output head, picked by the proposal's token ids.
    ProposalHead { weight: WeightRef },
    /// The proposal's token ids.
    ProposalIds,
    /// Bytes at hand.
    Bytes(Arc<Vec<u8>>),
}

/// One object of the artifact.
#[derive(Debug, Clone)]
pub struct PlannedObject {
    /// Its id.
    pub id: String,
    /// Logical parameters with elements in it (empty for resources and auxiliaries).
    pub parameters: Vec<String>,
    /// Component it belongs to.
    pub component: Component,
    /// Shape; the length for a resource.
    pub shape: Vec<u64>,
    /// Numeric format; `None` for a resource.
    pub format: Option<Format>,
    /// Layout.
    pub layout: Layout,
    /// How its words come about.
    pub method: Method,
    /// How it relates to its source.
    pub proof: Proof,
    /// Exact length.
    pub bytes: u64,
    /// First byte in the logical payload.
    pub offset: u64,
    pub(crate) content: Content,
}

/// Totals of one parameter class.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct ClassSummary {
    /// Logical parameters.
    pub count: u64,
    /// Logical elements.
    pub elements: u64,
    /// Formats, joined by `, ` where several.
    pub format: String,
    /// Layouts, joined by `, ` where several.
    pub layout: String,
    /// Stored bytes, shared objects divided by elements.
    pub bytes: u64,
    /// Proof classes, joined by `, ` where several.
    pub proof: String,
}

/// A source tensor that is deliberately not used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Ignored {
    /// Its name.
    pub tensor: String,
    /// Why.
    pub reason: String,
}

/// A planned file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PlanFile {
    /// Path as it will be.
    pub path: String,
    /// Exact length.
    pub bytes: u64,
}

/// A checked plan: pure data over the headers of the sources.
#[derive(Debug)]
pub struct Plan {
    /// What was asked for.
    pub options: ConvertOptions,
    /// The model.
    ///
    /// `None` for a drafter alone, a companion artifact.
    pub config: Option<ModelConfig>,
    /// Components that are converted.
    pub components: Vec<Component>,
    /// Objects in payload order.
    pub objects: Vec<PlannedObject>,
    /// The n-gram table, if the model has one.
    pub ngram: Option<NgramPlan>,
    /// Totals by class (`gdn.q`, `mtp/gdn.q`).
    pub classes: BTreeMap<String, ClassSummary>,
    /// Source tensors left out, with reasons.
    pub ignored: Vec<Ignored>,
    /// Tensors that the model needs and no source has.
    pub missing: Vec<String>,
    /// What is odd but does no harm.
    pub warnings: Vec<String>,
    /// Bits of routed experts' activations that the artifact recommends.
    pub default_expert_activation: u64,
    /// Number of `uses` records.
    pub uses: usize,
    pub(crate) sources: Arc<Sources>,
    pub(crate) layouted: Layouted,
}

/// Rows and columns of a weight as segments count them: all axes but the last by the last; a vector is a column.
pub(crate) fn view_rows(shape: &[u64]) -> (u64, u64) {
    match shape {
        [] => (1, 1),
        [n] => (*n, 1),
        [lead @ .., k] => (lead.iter().product(), *k),
    }
}

/// Rows and columns of a matrix in a coded format: the first axis by all others (a patch embedding is one row a channel).
pub(crate) fn flat_rows(shape: &[u64]) -> (u64, u64) {
    match shape {
        [first, rest @ ..] if !rest.is_empty() => (*first, rest.iter().product()),
        _ => view_rows(shape),
    }
}

/// Decodes rows of `k` values of a weight whose own rows may be shorter.
pub(crate) fn decode_flat(
    weight: &infernix_checkpoint::SourceTensor<'_>,
    rows: Range<u64>,
    k: u64,
    out: &mut [f32],
) -> Result<(), crate::ConvertError> {
    let per = (k / weight.row_len().max(1)).max(1);
    Ok(weight.decode_rows_f32(rows.start * per..rows.end * per, out)?)
}

/// Bytes that conversion, verification and repair need at most beside the sources' directories: buffers of each worker
/// plus shared tables.
pub(crate) fn memory_needed(threads: usize, tensors: usize) -> u64 {
    crate::exec::worker_bytes(threads) * threads as u64 + (64 << 20) + tensors as u64 * 512
}

impl Plan {
    /// The sources it was made from.
    #[must_use]
    pub fn sources(&self) -> &Sources {
        &self.sources
    }

    /// The layout of the artifact's files.
    #[must_use]
    pub fn layouted(&self) -> &Layouted {
        &self.layouted
    }

    /// Bytes of all files of the artifact.
    #[must_use]
    pub fn artifact_bytes(&self) -> u64 {
        self.layouted.artifact_bytes()
    }

    /// Free space that the conversion needs.
    #[must_use]
    pub fn disk_needed_bytes(&self) -> u64 {
        let volume = self.ngram.as_ref().filter(|n| n.reuse.is_none()).map_or(0, |n| n.bytes);
        // Journal, report and checksums are small beside this.
        self.artifact_bytes() + volume + (4 << 20)
    }

    /// Memory that the conversion needs at most.
    #[must_use]
    pub fn memory_needed_bytes(&self) -> u64 {
        let tensors: usize = self.sources.list().iter().map(|s| s.checkpoint.tensors().len()).sum();
        memory_needed(self.options.threads, tensors)
    }

    /// Files with their exact lengths.
    #[must_use]
    pub fn files(&self) -> Vec<PlanFile> {
        let folder = self.options.output.parent().unwrap_or(std::path::Path::new(""));
        self.layouted
            .files()
            .iter()
            .map(|f| PlanFile { path: folder.join(&f.name).display().to_string(), bytes: f.file_bytes })
            .collect()
    }

    /// The document of `--dry-run --json`, without `schema_version`.
    #[must_use]
    pub fn to_json(&self) -> serde_json::Value {
        let objects: Vec<_> = self
            .objects
            .iter()
            .map(|o| {
                serde_json::json!({
                    "id": o.id, "parameters": o.parameters, "shape": o.shape,
                    "format": o.format.map_or("raw", Format::name), "layout": o.layout.name(),
                    "offset": o.offset, "bytes": o.bytes, "proof": o.proof.name(), "method": o.method.name(),
                })
            })
            .collect();
        serde_json::json!({
            "recipe": self.options.recipe.name,
            "dry_run": self.options.dry_run,
            "components": self.components.iter().map(|c| c.name()).collect::<Vec<_>>(),
            "default_expert_activation": self.default_expert_activation,
            "artifact_bytes": self.artifact_bytes(),
            "files": self.files(),
            "ngram": self.ngram.as_ref().map(NgramPlan::to_json),
            "disk_needed_bytes": self.disk_needed_bytes(),
            "memory_needed_bytes": self.memory_needed_bytes(),
            "parameters": self.classes,
            "objects": objects,
            "ignored": self.ignored,
            "missing": self.missing,
            "warnings": self.warnings,
        })
    }
}
