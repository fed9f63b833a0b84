//! One rule finds the model for every command, and one place opens it.

use super::convert::interrupt;
use crate::INTERRUPTED;
use crate::args::{Given, KvDtype, ModelArgs, ProgressMode};
use crate::output::{self, mib, usage};
use crate::progress::Reporter;
use anyhow::{Context as _, bail};
use infernix_artifact::{Artifact, ArtifactError, Interrupt};
use infernix_checkpoint::{Checkpoint, OpenOptions};
use infernix_convert::{ConvertError, ConvertOptions, Recipe, RunOptions};
use infernix_engine::backend::ActivationPolicy;
use infernix_engine::state::KvFormat;
use infernix_text::{ChatFormat, Resources, Tokenizer};
use std::env;
use std::io::{self, IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Conversions above this size are asked for on a terminal.
const ASK_ABOVE_BYTES: u64 = 2_000_000_000;

/// The bundled checkpoint: beside the installed program, or in the source tree it was built from.
pub(crate) fn bundled_checkpoint() -> anyhow::Result<PathBuf> {
    const NAME: &str = "flash-demo-nvfp4";
    let installed = env::current_exe().ok().and_then(|exe| {
        let prefix = exe.parent()?.parent()?.to_owned();
        Some(prefix.join("share/infernix/models").join(NAME))
    });
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models").join(NAME);
    let complete = |p: PathBuf| p.canonicalize().ok().filter(|p| p.join("config.json").is_file());
    installed.into_iter().chain([source]).find_map(complete).with_context(|| {
        format!("the bundled model {NAME} is neither installed nor in the source tree; name a model")
    })
}

/// The artifact a command works on, converted first where the model is a checkpoint.
pub(crate) fn artifact_path(args: &ModelArgs, progress: ProgressMode) -> anyhow::Result<PathBuf> {
    if let Some(path) = &args.model {
        return resolve(path, args.yes, progress);
    }
    if let Some(path) = env::var_os("INFERNIX_MODEL").filter(|v| !v.is_empty()) {
        return resolve(Path::new(&path), args.yes, progress);
    }
    let here = artifacts_in(Path::new("."))?;
    match here.as_slice() {
        [only] => {
            output::note(&format!("model: {}", only.display()));
            Ok(only.clone())
        }
        [] => {
            output::note("model: the bundled demo");
            resolve(&bundled_checkpoint()?, true, progress)
        }
        several => {
            let names: Vec<_> = several.iter().map(|p| p.display().to_string()).collect();
            Err(usage(format!("this folder holds several artifacts ({}); name one", names.join(", "))))
        }
    }
}

/// First files of the artifacts in a folder.
fn artifacts_in(folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in folder.read_dir().context("this folder cannot be listed")? {
        let path = entry?.path();
        let known = path.extension().is_some_and(|e| e == "infernix" || e == "ninfer");
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let first = infernix_artifact::names::parse_numbered(&name).is_none_or(|(_, index, _)| index == 1);
        if known && first && path.is_file() {
            found.push(path.strip_prefix("./").unwrap_or(&path).to_owned());
        }
    }
    found.sort();
    Ok(found)
}

fn resolve(path: &Path, yes: bool, progress: ProgressMode) -> anyhow::Result<PathBuf> {
    let is_checkpoint = path.is_dir() || path.extension().is_some_and(|e| e == "safetensors" || e == "gguf");
    if !is_checkpoint {
        if !path.exists() {
            bail!("{} does not exist", path.display());
        }
        return Ok(path.to_owned());
    }
    let output = cached_name(path)?;
    let mut waiting = false;
    loop {
        if output.is_file() {
            return Ok(output);
        }
        match convert_once(path, &output, yes, progress) {
            Err(e) if is_in_use(&e) => {
                // Another process had the same model to convert.
                if !std::mem::replace(&mut waiting, true) {
                    output::note(&format!("{e:#}; waiting for it"));
                }
                if INTERRUPTED.load(Ordering::Relaxed) {
                    bail!("interrupted");
                }
                std::thread::sleep(Duration::from_millis(200));
            }
            other => return other.map(|()| output),
        }
    }
}

/// Whether another process holds the lock of the work that failed.
pub(crate) fn is_in_use(e: &anyhow::Error) -> bool {
    matches!(e.downcast_ref(), Some(ConvertError::Artifact(ArtifactError::Locked { .. })))
}

fn convert_once(path: &Path, output: &Path, yes: bool, progress: ProgressMode) -> anyhow::Result<()> {
    let folder = output.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder).with_context(|| format!("{} cannot be created", folder.display()))?;
    let mut options = ConvertOptions::new(path, Recipe::load("auto")?, output);
    // An interrupted first use goes on where it stopped.
    options.resume = infernix_artifact::state_folder(output).is_dir();
    let plan = infernix_convert::plan(&options)?;
    let size = plan.disk_needed_bytes();
    output::note(&format!(
        "converting {} once, every tensor as stored: {} into {}",
        path.display(),
        output::bytes(size),
        folder.display()
    ));
    if size > ASK_ABOVE_BYTES && !yes && io::stdin().is_terminal() && !confirmed()? {
        bail!("not converted; `infernix convert` lets you choose recipe and place");
    }
    let run = RunOptions::new(Interrupt::new(interrupt()));
    infernix_convert::convert(&plan, &Reporter::new(progress), &run)?;
    Ok(())
}

fn confirmed() -> anyhow::Result<bool> {
    let mut err = io::stderr().lock();
    write!(err, "go on? [y/N] ")?;
    err.flush()?;
    let mut line = String::new();
    io::stdin().read_line(&mut line)?;
    Ok(matches!(line.trim(), "y" | "Y" | "yes"))
}

/// Where the conversion of a checkpoint lives: named by the folder (a GGUF model by its first part) and by what its headers and configuration say, so
/// that a changed checkpoint is converted anew.
fn cached_name(path: &Path) -> anyhow::Result<PathBuf> {
    let checkpoint = Checkpoint::open(path, &OpenOptions::default())?;
    let mut key = Vec::new();
    for shard in checkpoint.shards() {
        key.extend_from_slice(&shard.header_blake3);
        key.extend_from_slice(&shard.len.to_le_bytes());
        let modified = shard.modified.and_then(|t| t.duration_since(std::time::UNIX_EPOCH).ok());
        key.extend_from_slice(&modified.map_or(0, |d| d.as_nanos() as u64).to_le_bytes());
    }
    for name in [
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
    ] {
        key.extend(checkpoint.file_bytes(name)?.unwrap_or_default());
    }
    let digest = infernix_artifact::Digest::of(&key).to_string();
    // A GGUF model may be given by its folder or by any of its parts.
    let first = checkpoint.shards().first().map_or("", |s| s.name.as_str());
    let named = match first.strip_suffix(".gguf") {
        Some(name) => PathBuf::from(name.split("-00001-of-").next().unwrap_or(name)),
        None => path.canonicalize()?,
    };
    let stem = named.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    Ok(user_cache()?.join(format!("{stem}-{}.infernix", &digest[..12])))
}

pub(crate) fn user_cache() -> anyhow::Result<PathBuf> {
    let set = |name| env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    if let Some(folder) = set("INFERNIX_CACHE") {
        return Ok(folder);
    }
    let base = set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|h| h.join(".cache")));
    Ok(base
        .context("no folder for conversions: set INFERNIX_CACHE, XDG_CACHE_HOME or HOME")?
        .join("infernix"))
}

/// Which arithmetic a command asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BackendKind {
    Cpu,
    Lossless,
    /// By device ordinal.
    Cuda(i32),
}

/// How a command asked for a model to be run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct How {
    pub(crate) backend: BackendKind,
    pub(crate) activations: ActivationPolicy,
    pub(crate) kv: KvFormat,
    /// Decode threads; 0 leaves it to the backend.
    pub(crate) threads: usize,
    /// Prefill threads; 0 is as decode.
    pub(crate) threads_batch: usize,
    /// Bytes of device memory to use at most; 0 is all that is free.
    pub(crate) vram_budget: usize,
    /// Bytes of host memory for routed experts (CUDA); 0 is for all of them.
    pub(crate) expert_ram: usize,
}

impl How {
    pub(crate) fn new(args: &ModelArgs) -> anyhow::Result<Self> {
        let backend = backend(args)?;
        let a = &args.activations;
        let activations = match (a.a16_activations, a.a8_activations, a.a4_activations) {
            (true, ..) => ActivationPolicy::A16,
            (_, true, _) => ActivationPolicy::A8,
            (.., true) => ActivationPolicy::A4,
            // The reference keeps every activation at 16 bits unless told otherwise.
            _ if backend == BackendKind::Lossless => ActivationPolicy::A16,
            _ => ActivationPolicy::Artifact,
        };
        Ok(Self {
            backend,
            activations,
            kv: match args.kv_dtype {
                KvDtype::Bf16 => KvFormat::Bf16,
                KvDtype::Int8 => KvFormat::Int8,
            },
            threads: threads("threads", args.threads)?,
            threads_batch: threads("threads-batch", args.threads_batch)?,
            vram_budget: mib("--vram-budget-mib", args.vram_budget_mib.unwrap_or(0) as u64)? as usize,
            expert_ram: mib("--expert-ram-mib", args.expert_ram_mib.unwrap_or(0) as u64)? as usize,
        })
    }
}

/// A model found and checked, ready to be loaded into a backend.
#[derive(Clone)]
pub(crate) struct OpenModel {
    pub(crate) artifact: Arc<Artifact>,
    pub(crate) ngram: Option<PathBuf>,
    pub(crate) backend: BackendKind,
    pub(crate) activations: ActivationPolicy,
    pub(crate) kv: KvFormat,
    /// Decode threads; 0 leaves it to the backend.
    pub(crate) threads: usize,
    /// Prefill threads; 0 is as decode.
    pub(crate) threads_batch: usize,
    /// Bytes of device memory to use at most; 0 is all that is free.
    pub(crate) vram_budget: usize,
    /// Bytes of host memory for routed experts (CUDA); 0 is for all of them.
    pub(crate) expert_ram: usize,
}

impl OpenModel {
    pub(crate) fn new(args: &ModelArgs, progress: ProgressMode) -> anyhow::Result<Self> {
        let How { backend, activations, kv, threads, threads_batch, vram_budget, expert_ram } =
            How::new(args)?;
        let path = artifact_path(args, progress)?;
        Ok(Self {
            artifact: Arc::new(Artifact::open(&path)?),
            ngram: args.ngram.clone(),
            backend,
            activations,
            kv,
            threads,
            threads_batch,
            vram_budget,
            expert_ram,
        })
    }

    /// Tokenizer, chat template and generation defaults stored with the model.
    pub(crate) fn chat_format(&self) -> anyhow::Result<ChatFormat> {
        let directory = self.artifact.directory();
        let text = directory
            .components
            .get("text")
            .context("the artifact has no text component: it is a drafter")?;
        let optional = |role: &str| -> anyhow::Result<Option<Vec<u8>>> {
            let present = text.resources.contains_key(role);
            Ok(if present { Some(self.artifact.resource("text", role)?) } else { None })
        };
        let tokenizer = optional("tokenizer.json")?.context("the artifact stores no tokenizer.json")?;
        let chat_template = optional("chat_template.jinja")?
            .map(|bytes| String::from_utf8(bytes).context("chat_template.jinja is not UTF-8"))
            .transpose()?;
        let resources = Resources {
            tokenizer,
            tokenizer_config: optional("tokenizer_config.json")?,
            chat_template,
            generation_config: optional("generation_config.json")?,
        };
        Ok(ChatFormat::new(&resources)?)
    }
}

/// Refuses options of a model that the backend it runs on does not take.
pub(crate) fn refuse_idle(given: &Given, backend: BackendKind) -> anyhow::Result<()> {
    if !matches!(backend, BackendKind::Cuda(_)) {
        given.idle(&["--vram-budget-mib", "--expert-ram-mib"], "the engine does not run on a CUDA device")?;
    }
    if backend == BackendKind::Lossless {
        given.idle(&["--threads", "--threads-batch"], "the lossless backend takes every core it may use")?;
    }
    Ok(())
}

/// A thread count, 0 where none is given.
fn threads(flag: &str, given: Option<usize>) -> anyhow::Result<usize> {
    given.map_or(Ok(0), |n| super::convert::capped(flag, n))
}

fn backend(args: &ModelArgs) -> anyhow::Result<BackendKind> {
    match args.backend.as_str() {
        _ if args.lossless => Ok(BackendKind::Lossless),
        "auto" | "cpu" => Ok(BackendKind::Cpu),
        "lossless" => Ok(BackendKind::Lossless),
        "cuda" => Ok(BackendKind::Cuda(0)),
        other => match other.strip_prefix("cuda:").map(str::parse) {
            Some(Ok(device)) => Ok(BackendKind::Cuda(device)),
            Some(Err(_)) => Err(usage(format!("--backend {other}: the device is a number, as in cuda:0"))),
            None => Err(usage(format!("no backend {other:?}; there are auto, cpu, cuda[:N] and lossless"))),
        },
    }
}

/// The tokenizer of a checkpoint folder.
pub(crate) fn tokenizer_from_folder(folder: &Path) -> anyhow::Result<Tokenizer> {
    // A GGUF model has its tokenizer in its keys.
    let gguf = Checkpoint::open(folder, &OpenOptions { headers_only_ok: true, ..OpenOptions::default() });
    if let Ok(checkpoint) = gguf
        && checkpoint.gguf().is_some()
        && let Some(tokenizer) = checkpoint.file_bytes("tokenizer.json")?
    {
        let config = checkpoint.file_bytes("tokenizer_config.json")?;
        return Ok(Tokenizer::from_json(&tokenizer, config.as_deref())?);
    }
    let resources = Resources::from_folder(folder)?;
    Ok(Tokenizer::from_json(&resources.tokenizer, resources.tokenizer_config.as_deref())?)
}
