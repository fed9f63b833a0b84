//! `export`: an artifact back to files that other engines read, safetensors folders and GGUF models.
//!
//! Words are kept or the export is refused with the reason. The two exceptions are what GGUF stores by convention, 1 + w
//! of a norm and -exp(a) of A_log, in FP32 as llama.cpp's converter computes them: where FP32 does not hold the result,
//! the plan names the tensors, or refuses if that was asked for.

mod blocks;
mod gguf;
mod hf;
mod keys;
mod read;
mod weights;
mod write;

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use infernix_artifact::Artifact;
use infernix_artifact::ngram::{NgramTable, RowFormat, Volume, locate};
use infernix_formats::PlaneRole;
use infernix_formats::expert_bank::ExpertMatrix;
use infernix_formats::ggml::GgmlType;
use infernix_model::{Architecture, Component, DrafterConfig, ModelConfig};
use serde_json::{Value, json};

use crate::ConvertError;
use read::Reader;
use weights::{Described, Experts, Weight};

pub use write::{ExportOutcome, export};

/// What an artifact is exported to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExportTarget {
    /// A folder with config.json, tokenizer and safetensors shards.
    Safetensors,
    /// A GGUF model; its image tower in `mmproj-NAME` beside it.
    Gguf,
}

impl ExportTarget {
    /// Its name on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            ExportTarget::Safetensors => "safetensors",
            ExportTarget::Gguf => "gguf",
        }
    }
}

/// What to export, and where to.
#[derive(Debug, Clone)]
pub struct ExportOptions {
    /// The artifact's entry.
    pub artifact: PathBuf,
    /// Kind of files.
    pub target: ExportTarget,
    /// The folder, or the GGUF file, to write.
    pub output: PathBuf,
    /// The n-gram volume, where it is not beside the artifact.
    pub ngram: Option<PathBuf>,
    /// Components; `None` for all but block drafters, which are checkpoints of their own, and but drafters that readers of
    /// the target refuse.
    pub components: Option<Vec<Component>>,
    /// Largest data of a shard; one tensor may be larger.
    pub shard_bytes: u64,
    /// Refuse rather than round by the target's conventions.
    pub bit_exact: bool,
    /// Continue from the state of an interrupted run.
    pub resume: bool,
}

/// A tensor of which the target's convention rounds words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rounded {
    /// Name in the target.
    pub name: String,
    /// Words that do not come back.
    pub words: u64,
    /// Words of the tensor.
    pub of: u64,
    /// The rounding, as a derivation names it.
    pub rounding: &'static str,
}

/// A file that an export writes.
#[derive(Debug)]
pub(crate) struct OutFile {
    name: String,
    /// Bytes before the data.
    head: Vec<u8>,
    tensors: Vec<OutTensor>,
    /// Alignment of each tensor's end.
    align: u64,
}

impl OutFile {
    fn bytes(name: &str, bytes: Vec<u8>) -> Self {
        Self { name: name.to_owned(), head: bytes, tensors: Vec::new(), align: 1 }
    }

    fn len(&self) -> u64 {
        self.head.len() as u64
            + self.tensors.iter().map(|t| t.bytes.next_multiple_of(self.align)).sum::<u64>()
    }
}

/// Type of an exported tensor.
#[derive(Debug, Clone, Copy)]
pub(crate) enum OutType {
    Hf(&'static str),
    Ggml(GgmlType),
}

/// One tensor of an exported file.
#[derive(Debug)]
pub(crate) struct OutTensor {
    name: String,
    ty: OutType,
    /// Outermost dimension first.
    shape: Vec<u64>,
    bytes: u64,
    content: Content,
}

/// Where its bytes come from.
#[derive(Debug, Clone)]
pub(crate) enum Content {
    /// A plane of a weight.
    Plane { weight: Arc<Weight>, role: PlaneRole },
    /// A whole small object.
    Object(usize),
    /// A plane of an expert's matrix.
    Expert { experts: Arc<Experts>, expert: u64, matrix: ExpertMatrix, role: PlaneRole },
    /// The activation scale of an expert's matrix.
    ExpertInput { experts: Arc<Experts>, expert: u64, matrix: ExpertMatrix },
    /// Some bytes of each of some rows of the volume.
    Table { rows: Range<u64>, row: u64, cut: Range<u64> },
    /// Bytes at hand.
    Bytes(Vec<u8>),
    /// As GGUF has it.
    Gguf(Box<gguf::Stored>),
}

/// Bytes handed on per step.
const STEP: u64 = 4 << 20;

impl Content {
    /// Hands the bytes to `sink`, in order.
    fn produce(
        &self,
        reader: &mut Reader<'_>,
        sink: &mut dyn FnMut(&[u8]) -> Result<(), ConvertError>,
    ) -> Result<(), ConvertError> {
        let mut out = Vec::new();
        match self {
            Content::Plane { weight, role: PlaneRole::GlobalScale } => sink(&reader.global(weight)?),
            Content::Plane { weight, role } => {
                let k = reader.row_len(weight)?;
                let rows = weight.elements() / k.max(1);
                // Tiles are 128 rows high.
                let step = (STEP / k.max(1)).max(1).next_multiple_of(128);
                let mut row = 0;
                while row < rows {
                    let end = rows.min(row + step);
                    out.clear();
                    reader.rows(weight, *role, row..end, &mut out)?;
                    sink(&out)?;
                    row = end;
                }
                Ok(())
            }
            Content::Object(object) => sink(&reader.object(*object)?),
            Content::Expert { experts, expert, matrix, role } => {
                reader.expert(experts, *expert, *matrix, *role, &mut out)?;
                sink(&out)
            }
            Content::ExpertInput { experts, expert, matrix } => {
                let Some(object) = experts.input_scales else { return Ok(()) };
                let all = reader.object(object)?;
                let at = 12 * *expert as usize + 4 * matrix.index();
                sink(&all[at..at + 4])
            }
            Content::Table { rows, row, cut } => {
                let step = (STEP / row).max(1);
                let mut at = rows.start;
                while at < rows.end {
                    let end = rows.end.min(at + step);
                    out.clear();
                    reader.table(at..end, &mut out)?;
                    if *cut == (0..*row) {
                        sink(&out)?;
                    } else {
                        let rows = out.chunks_exact(*row as usize);
                        let part: Vec<u8> =
                            rows.flat_map(|r| &r[cut.start as usize..cut.end as usize]).copied().collect();
                        sink(&part)?;
                    }
                    at = end;
                }
                Ok(())
            }
            Content::Bytes(bytes) => sink(bytes),
            Content::Gguf(stored) => stored.produce(reader, sink),
        }
    }
}

/// What the writers of both targets need to know.
pub(crate) struct Setting<'a> {
    artifact: &'a Artifact,
    volume: Option<&'a Volume>,
    described: &'a Described,
    components: &'a [Component],
    output: &'a Path,
    shard_bytes: u64,
}

impl Setting<'_> {
    fn fail(&self, reason: impl Into<String>) -> ConvertError {
        ConvertError::Export { path: self.artifact.path().to_owned(), reason: reason.into() }
    }

    fn file_name(&self) -> Result<String, ConvertError> {
        let name = self.output.file_name().and_then(|n| n.to_str());
        name.map(str::to_owned).ok_or_else(|| self.fail("the output is no file name"))
    }

    /// Rows of the volume at hand.
    fn row_format(&self) -> Result<Option<RowFormat>, ConvertError> {
        let Some(volume) = self.volume else { return Ok(None) };
        let own = NgramTable::of(self.artifact.directory()).map_err(|e| self.fail(e))?.map(|t| t.format);
        let name = volume.header().extension.as_ref().map(|e| e.format.clone()).or(own).unwrap_or_default();
        match RowFormat::from_name(&name) {
            Some(format) => Ok(Some(format)),
            None => Err(self.fail(format!("rows of {name} in the n-gram volume are not known"))),
        }
    }

    /// An error that lists why not.
    fn refuse(&self, reasons: &[String]) -> Result<(), ConvertError> {
        if reasons.is_empty() {
            return Ok(());
        }
        let mut text = reasons.iter().take(8).cloned().collect::<Vec<_>>().join("; ");
        if reasons.len() > 8 {
            text += &format!("; and {} more", reasons.len() - 8);
        }
        Err(self.fail(format!("cannot be exported without changing words: {text}")))
    }
}

/// A checked plan of an export.
#[derive(Debug)]
pub struct ExportPlan {
    options: ExportOptions,
    artifact: Artifact,
    volume: Option<Volume>,
    components: Vec<Component>,
    files: Vec<OutFile>,
    left_out: Vec<(String, String)>,
    rounded: Vec<Rounded>,
}

impl ExportPlan {
    /// Name and exact length of each file.
    pub fn files(&self) -> impl Iterator<Item = (&str, u64)> {
        self.files.iter().map(|f| (f.name.as_str(), f.len()))
    }

    /// Bytes of all files.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(OutFile::len).sum()
    }

    /// Tensors of all files.
    #[must_use]
    pub fn tensors(&self) -> u64 {
        self.files.iter().map(|f| f.tensors.len() as u64).sum()
    }

    /// Parameters and components that the export does not hold, with the reasons.
    #[must_use]
    pub fn left_out(&self) -> &[(String, String)] {
        &self.left_out
    }

    /// Tensors of which the target's conventions round words.
    #[must_use]
    pub fn rounded(&self) -> &[Rounded] {
        &self.rounded
    }

    /// [`Self::rounded`] in a sentence: how many tensors, and the first.
    #[must_use]
    pub fn rounding(&self) -> Option<String> {
        let first = self.rounded.first()?;
        Some(format!(
            "{} of {} tensors are rounded by GGUF's convention, the first is {}: {} does not hold {} of its {} words",
            self.rounded.len(),
            self.tensors(),
            first.name,
            first.rounding,
            first.words,
            first.of
        ))
    }

    /// The document of `--dry-run --json`, without `schema_version`.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let files: Vec<_> = self.files().map(|(path, bytes)| json!({"path": path, "bytes": bytes})).collect();
        let rounded: Vec<_> = self
            .rounded
            .iter()
            .map(|r| json!({"name": r.name, "words": r.words, "of": r.of, "rounding": r.rounding}))
            .collect();
        let left_out: Vec<_> =
            self.left_out.iter().map(|(name, reason)| json!({"name": name, "reason": reason})).collect();
        json!({
            "artifact_id": self.artifact.artifact_id().to_string(), "to": self.options.target.name(),
            "output": self.options.output.display().to_string(),
            "components": self.components.iter().map(|c| c.name()).collect::<Vec<_>>(),
            "files": files, "bytes": self.bytes(), "tensors": self.tensors(), "left_out": left_out,
            "rounded": rounded,
        })
    }
}

/// Plans an export: opens the artifact and lays out every file to the byte. Reads headers, scales and resources only.
///
/// # Errors
/// An artifact that does not open or is not fully known; what the target cannot hold, with the reasons.
pub fn plan_export(options: &ExportOptions) -> Result<ExportPlan, ConvertError> {
    let artifact = Artifact::open(&options.artifact)?;
    let fail = |reason: String| ConvertError::Export { path: options.artifact.clone(), reason };
    let held = &artifact.directory().components;
    let has = |c: Component| held.contains_key(c.name());
    let only_drafter = !has(Component::Text);
    let mut left_out = Vec::new();
    let mut components = match &options.components {
        Some(list) => {
            if let Some(c) = list.iter().find(|c| !has(**c)) {
                return Err(fail(format!("has no component {c}")));
            }
            let drafters = list.iter().filter(|c| c.is_block_drafter()).count();
            if drafters > 0 && list.len() > 1 {
                return Err(ConvertError::Option(
                    "--components: a block drafter is a checkpoint of its own; export it alone".into(),
                ));
            }
            if drafters == 0 && !list.contains(&Component::Text) {
                return Err(ConvertError::Option(
                    "--components: text is always part of a checkpoint; add it".into(),
                ));
            }
            Component::ALL.into_iter().filter(|c| list.contains(c)).collect::<Vec<_>>()
        }
        None => Component::ALL
            .into_iter()
            .filter(|c| has(*c))
            .filter(|c| {
                if c.is_block_drafter() && !only_drafter {
                    let reason = format!(
                        "a block drafter is a checkpoint of its own; export it with --components {c}"
                    );
                    left_out.push((c.name().to_owned(), reason));
                }
                !c.is_block_drafter() || only_drafter
            })
            .collect(),
    };
    let described = match components[..] {
        [c] if c.is_block_drafter() => {
            let config = held.get(c.name()).map(|c| c.config.clone()).unwrap_or_default();
            let config = DrafterConfig::from_json(&Value::Object(config))
                .map_err(|source| ConvertError::Model { path: options.artifact.clone(), source })?;
            Described::Drafter(Box::new(config))
        }
        _ => Described::Model(Box::new(model(&artifact)?)),
    };
    if options.target == ExportTarget::Gguf
        && options.components.is_none()
        && matches!(&described, Described::Model(c) if c.architecture == Architecture::Qwen4Exp)
        && let Some(at) = components.iter().position(|c| *c == Component::Mtp)
    {
        components.remove(at);
        let reason = "llama.cpp knows no drafter of qwen4exp and refuses a model with tensors it does not know; \
                      --components with mtp writes it for readers that do";
        left_out.push((Component::Mtp.name().to_owned(), reason.to_owned()));
    }
    let mut weights = weights::weights(&artifact, &described, &components)?;
    let table = NgramTable::of(artifact.directory()).map_err(fail)?;
    let volume = match table.filter(|_| !weights.tables.is_empty()) {
        None => None,
        Some(table) => {
            let found = locate(&options.artifact, options.ngram.as_deref(), table.volume_id)?;
            let volume = Volume::open(&found.path)?;
            left_out.extend(volume.accept(&table)?.into_iter().map(|w| ("n-gram volume".to_owned(), w)));
            Some(volume)
        }
    };
    left_out.append(&mut weights.left_out);
    let setting = Setting {
        artifact: &artifact,
        volume: volume.as_ref(),
        described: &described,
        components: &components,
        output: &options.output,
        shard_bytes: options.shard_bytes.max(1),
    };
    let (files, rounded) = match options.target {
        ExportTarget::Safetensors => (hf::files(&setting, &weights)?, Vec::new()),
        ExportTarget::Gguf => gguf::files(&setting, &weights)?,
    };
    let plan =
        ExportPlan { options: options.clone(), artifact, volume, components, files, left_out, rounded };
    match plan.rounding().filter(|_| options.bit_exact) {
        Some(reason) => Err(fail(reason)),
        None => Ok(plan),
    }
}

/// The model that an artifact says it is.
fn model(artifact: &Artifact) -> Result<ModelConfig, ConvertError> {
    let components = &artifact.directory().components;
    let mut root = components.get("text").map(|c| c.config.clone()).unwrap_or_default();
    if let Some(vision) = components.get("vision") {
        root.insert("vision_config".into(), Value::Object(vision.config.clone()));
    }
    ModelConfig::from_json(&Value::Object(root))
        .map_err(|source| ConvertError::Model { path: artifact.path().to_owned(), source })
}
