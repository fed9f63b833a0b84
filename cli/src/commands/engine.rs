//! Loading a found model into the backend that was asked for.

use super::model::{BackendKind, OpenModel};
use crate::Outcome;
use crate::args::{AutoNumber, SchedArgs, Spec, SpecArgs};
use crate::output::{mib, usage};
use infernix_artifact::Artifact;
use infernix_engine::EngineError;
use infernix_engine::backend::Backend;
use infernix_engine::backend::cpu::{CpuBackend, CpuOptions};
use infernix_engine::backend::cuda::{Cuda, CudaOptions, Ledger};
use infernix_engine::backend::lossless::{Lossless, LosslessOptions};
use infernix_engine::cache;
use infernix_engine::driver::{Driver, DriverOptions};
use infernix_engine::model::{ArtifactSource, LoadOptions, load};
use infernix_engine::ngram::{NgramOptions, open_ngram};
use infernix_engine::sched::{CacheOptions, Engine, EngineOptions, SpecMode, SpecOptions, TRACE_START};
use infernix_engine::state::KvFormat;
use infernix_measure::bench::machine::free_memory;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Work that runs on any backend.
pub(crate) trait Task {
    fn run<B: Backend>(self, driver: &mut Driver<B>) -> anyhow::Result<Outcome>;
}

/// What a task needs of the driver.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Needs {
    /// Tokens of all sequences together.
    pub(crate) tokens: usize,
    /// Sequences at a time.
    pub(crate) sequences: usize,
    /// FP32 values between operations (lossless only).
    pub(crate) fp32: bool,
    /// The model's drafter, if it has one.
    pub(crate) drafter: bool,
}

impl Needs {
    /// One sequence of up to `tokens` tokens.
    pub(crate) fn tokens(tokens: usize) -> Self {
        Self { tokens, sequences: 1, fp32: false, drafter: false }
    }
}

/// Loads the model with room for what the task needs and runs the task.
pub(crate) fn with_needs(open: &OpenModel, needs: Needs, task: impl Task) -> anyhow::Result<Outcome> {
    let loading = Loading::for_needs(open, needs);
    match open.backend {
        BackendKind::Lossless => task.run(&mut lossless(open, needs)?),
        BackendKind::Cpu => task.run(&mut loading.driver(loading.cpu())?),
        BackendKind::Cuda(device) => {
            let mut driver = loading.driver(loading.cuda(device)?)?;
            print_ledger(&driver.model.backend.ledger());
            task.run(&mut driver)
        }
    }
}

/// The model in the lossless backend, whatever backend it was opened for.
pub(crate) fn lossless(open: &OpenModel, needs: Needs) -> anyhow::Result<Driver<Lossless>> {
    let options = LosslessOptions { fp32: needs.fp32, ..LosslessOptions::default() };
    Ok(Loading::for_needs(open, needs).driver(Lossless::new(options))?)
}

/// What a driver is made of; goes to the thread that the driver will live on.
struct Loading {
    artifact: Arc<Artifact>,
    ngram: Option<PathBuf>,
    cpu: CpuOptions,
    vram_budget: usize,
    expert_ram: usize,
    /// Bytes of state snapshots that a device keeps.
    snapshots: usize,
    load: LoadOptions,
    kv: KvFormat,
    tokens: usize,
    sequences: usize,
}

impl Loading {
    fn new(open: &OpenModel) -> Self {
        Loading {
            artifact: Arc::clone(&open.artifact),
            ngram: open.ngram.clone(),
            cpu: CpuOptions {
                threads: open.threads,
                threads_batch: open.threads_batch,
                ..CpuOptions::default()
            },
            vram_budget: open.vram_budget,
            expert_ram: open.expert_ram,
            snapshots: 0,
            load: LoadOptions { activations: open.activations, ..LoadOptions::default() },
            kv: open.kv,
            tokens: 0,
            sequences: 1,
        }
    }

    fn for_needs(open: &OpenModel, needs: Needs) -> Self {
        let mut loading = Loading { tokens: needs.tokens, sequences: needs.sequences, ..Loading::new(open) };
        loading.load.drafter = needs.drafter;
        loading
    }

    fn cpu(&self) -> CpuBackend {
        CpuBackend::new(self.cpu)
    }

    fn cuda(&self, device: i32) -> Result<Cuda, EngineError> {
        Cuda::new(CudaOptions {
            device,
            budget: self.vram_budget,
            expert_ram: self.expert_ram,
            snapshots: self.snapshots,
            ..CudaOptions::default()
        })
    }

    fn driver<B: Backend>(&self, backend: B) -> Result<Driver<B>, EngineError> {
        let source = ArtifactSource::new(Arc::clone(&self.artifact))?;
        let model = load(backend, &source, self.load)?;
        let found = open_ngram(&self.artifact, self.ngram.as_deref(), NgramOptions::default())?;
        let ngram = found.map(|(ngram, warnings)| {
            warnings.iter().for_each(|w| crate::output::warn(w));
            ngram
        });
        let options = DriverOptions { tokens: self.tokens, sequences: self.sequences, kv: self.kv };
        Driver::new(model, ngram, options)
    }
}

/// Starts the engine with KV for `tokens` tokens.
pub(crate) fn start_engine(
    open: &OpenModel,
    tokens: usize,
    options: EngineOptions,
) -> anyhow::Result<Engine> {
    let options = EngineOptions { model: open.artifact.artifact_id().to_string(), ..options };
    let spec = options.spec;
    let has_drafter = open.artifact.directory().components.contains_key("mtp");
    if spec.mode == SpecMode::Mtp && !has_drafter {
        return Err(usage("--spec mtp: the artifact has no drafter"));
    }
    let mut loading = Loading { tokens, sequences: options.max_concurrency, ..Loading::new(open) };
    if options.cache.enabled {
        loading.snapshots = usize::try_from(options.cache.device_bytes).unwrap_or(usize::MAX);
    }
    loading.load.drafter = spec.mode != SpecMode::Off && spec.draft_tokens != Some(0);
    loading.load.proposal_head = spec.proposal_head;
    let engine = match open.backend {
        BackendKind::Lossless => {
            Engine::start(options, move || loading.driver(Lossless::new(LosslessOptions::default())))?
        }
        BackendKind::Cpu => Engine::start(options, move || loading.driver(loading.cpu()))?,
        BackendKind::Cuda(device) => Engine::start(options, move || {
            let driver = loading.driver(loading.cuda(device)?)?;
            print_ledger(&driver.model.backend.ledger());
            Ok(driver)
        })?,
    };
    engine.warnings().iter().for_each(|w| crate::output::warn(w));
    Ok(engine)
}

impl From<Spec> for SpecMode {
    fn from(spec: Spec) -> Self {
        match spec {
            Spec::Auto => SpecMode::Auto,
            Spec::Off => SpecMode::Off,
            Spec::Mtp => SpecMode::Mtp,
        }
    }
}

fn within(flag: &str, n: AutoNumber, most: usize) -> anyhow::Result<Option<usize>> {
    match n.0 {
        Some(n) if n > most => Err(usage(format!("--{flag} must lie in 0..={most}"))),
        n => Ok(n),
    }
}

/// `--draft-tokens`, checked.
pub(crate) fn draft_tokens(n: AutoNumber) -> anyhow::Result<Option<usize>> {
    within("draft-tokens", n, 7)
}

/// Settings of the engine for a model whose requests may have `context` tokens.
pub(crate) fn engine_options(
    sched: &SchedArgs,
    spec: &SpecArgs,
    open: &OpenModel,
    context: usize,
) -> anyhow::Result<EngineOptions> {
    contradictions(sched, spec, open)?;
    Ok(EngineOptions {
        max_concurrency: sched.max_concurrency as usize,
        max_pending_requests: sched.max_pending_requests,
        pending_timeout: Duration::from_millis(sched.pending_timeout_ms),
        prefill_chunk: sched.prefill_chunk as usize,
        max_context: context,
        addressable: open.chat_format()?.tokenizer().addressable() as usize,
        cache: CacheOptions {
            enabled: !sched.no_prefix_cache,
            device_bytes: mib("--prefix-cache-device-mib", sched.prefix_cache_device_mib)?,
            host_bytes: host_bytes(sched)?,
            file: sched.prefix_cache_file.clone(),
            file_bytes: mib("--prefix-cache-file-mib", sched.prefix_cache_file_mib)?,
            identity: identity(open, drafter_runs(spec, open)),
            ..CacheOptions::default()
        },
        spec: SpecOptions {
            mode: spec.spec.into(),
            draft_tokens: draft_tokens(spec.draft_tokens)?,
            proposal_head: spec.lm_head_draft,
            ngram_tokens: within("ngram-draft-tokens", spec.ngram_draft_tokens, 31)?,
            ngram_min_match: spec.ngram_min_match as usize,
        },
        record_trace: sched.record_trace.clone(),
        ..EngineOptions::default()
    })
}

/// Whether the model's drafter runs.
pub(crate) fn drafter_runs(spec: &SpecArgs, open: &OpenModel) -> bool {
    spec.spec != Spec::Off
        && spec.draft_tokens.0 != Some(0)
        && open.artifact.directory().components.contains_key("mtp")
}

/// Everything that decides what a state means: another value makes cached states useless.
fn identity(open: &OpenModel, drafter: bool) -> String {
    [
        format!("version: {}", env!("CARGO_PKG_VERSION")),
        format!("model: {}", open.artifact.artifact_id()),
        format!("backend (--backend): {:?}", open.backend),
        format!("keys and values (--kv-dtype): {:?}", open.kv),
        format!(
            "activations (--a16-activations, --a8-activations, --a4-activations): {:?}",
            open.activations
        ),
        format!("drafter (--spec, --draft-tokens): {}", if drafter { "on" } else { "off" }),
    ]
    .join("\n")
}

/// Bytes of cached prefixes in RAM: what was asked for, else 8 GiB or a quarter of what is free.
fn host_bytes(sched: &SchedArgs) -> anyhow::Result<u64> {
    let free = free_memory();
    Ok(match sched.prefix_cache_mib {
        Some(n) => {
            let bytes = mib("--prefix-cache-mib", n)?;
            if free > 0 && bytes > free && !sched.no_prefix_cache {
                crate::output::warn(&format!(
                    "--prefix-cache-mib allows {}, {} of memory are free",
                    crate::output::bytes(bytes),
                    crate::output::bytes(free)
                ));
            }
            bytes
        }
        None if free > 0 => (8u64 << 30).min(free / 4),
        None => 8 << 30,
    })
}

fn same(a: &Path, b: &Path) -> bool {
    match (a.canonicalize(), b.canonicalize()) {
        (Ok(a), Ok(b)) => a == b,
        _ => a == b,
    }
}

/// Refuses to write over the model.
pub(crate) fn spare_the_model(flag: &str, path: Option<&Path>, open: &OpenModel) -> anyhow::Result<()> {
    let own = |path| open.artifact.paths().chain(open.ngram.as_deref()).any(|f| same(path, f));
    if path.is_some_and(own) {
        return Err(usage(format!("{flag} names one of the model's own files")));
    }
    Ok(())
}

/// Refuses to write a trace over a file that is none.
pub(crate) fn spare_foreign_trace(path: Option<&Path>) -> anyhow::Result<()> {
    spare_foreign("--record-trace", path, TRACE_START.as_bytes())
}

/// Refuses to write over a file that this program did not write: such a file begins with `own`, or is empty or zeros, which a crash leaves.
fn spare_foreign(flag: &str, path: Option<&Path>, own: &[u8]) -> anyhow::Result<()> {
    let Some(path) = path else { return Ok(()) };
    // A device is no file that could be lost, and whether a file can be written shows when it is. A pipe must not be opened:
    // that waits for who writes to it.
    if !path.is_file() {
        return Ok(());
    }
    let Ok(file) = std::fs::File::open(path) else { return Ok(()) };
    let mut start = Vec::new();
    file.take(own.len() as u64).read_to_end(&mut start)?;
    if start != own && start.iter().any(|b| *b != 0) {
        return Err(usage(format!(
            "{flag}: {} is another kind of file and is not written over",
            path.display()
        )));
    }
    Ok(())
}

/// Refuses, before a model is loaded, a cache file in a place that it cannot take when it is saved.
pub(crate) fn check_cache_file(path: Option<&Path>) -> anyhow::Result<()> {
    let bad = |path: &Path, e| usage(format!("--prefix-cache-file {}: {e}", path.display()));
    path.map_or(Ok(()), |path| infernix_engine::files::place(path).map(drop).map_err(|e| bad(path, e)))
}

/// Refuses flags that cannot hold together, and files that would overwrite each other.
fn contradictions(sched: &SchedArgs, spec: &SpecArgs, open: &OpenModel) -> anyhow::Result<()> {
    let drafts = |n: AutoNumber| n.0.is_some_and(|n| n > 0);
    let wasted = match spec.spec {
        Spec::Off if drafts(spec.draft_tokens) => Some("--draft-tokens"),
        Spec::Off if spec.lm_head_draft => Some("--lm-head-draft"),
        Spec::Off | Spec::Mtp if drafts(spec.ngram_draft_tokens) => Some("--ngram-draft-tokens"),
        _ => None,
    };
    if let Some(flag) = wasted {
        let mode = if spec.spec == Spec::Off { "off" } else { "mtp" };
        return Err(usage(format!("{flag} has no effect with --spec {mode}; leave one of them out")));
    }
    let components = &open.artifact.directory().components;
    if spec.lm_head_draft && !components.contains_key("mtp") {
        return Err(usage("--lm-head-draft: the artifact has no drafter that could use its proposal head"));
    }
    if spec.lm_head_draft && !open.artifact.directory().bindings.contains_key("proposal/token_ids") {
        return Err(usage(
            "--lm-head-draft: the artifact has no proposal head; convert with --proposal, or leave the flag out",
        ));
    }
    spare_the_model("--record-trace", sched.record_trace.as_deref(), open)?;
    spare_the_model("--prefix-cache-file", sched.prefix_cache_file.as_deref(), open)?;
    spare_foreign_trace(sched.record_trace.as_deref())?;
    check_cache_file(sched.prefix_cache_file.as_deref().filter(|p| p.exists()))?;
    spare_foreign("--prefix-cache-file", sched.prefix_cache_file.as_deref(), cache::MAGIC)?;
    match (&sched.record_trace, &sched.prefix_cache_file) {
        (Some(a), Some(b)) if same(a, b) => {
            Err(usage("--record-trace and --prefix-cache-file name the same file"))
        }
        _ => Ok(()),
    }
}

/// Says what device memory is used for.
pub(crate) fn print_ledger(ledger: &Ledger) {
    let lines: Vec<_> = ledger.lines().iter().map(|(what, mib)| format!("{what} {mib} MiB")).collect();
    crate::output::note(&format!("device memory: {}", lines.join(", ")));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_other_programs_are_not_written_over() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        let asked = |text: &[u8]| {
            std::fs::write(&path, text).unwrap();
            spare_foreign("--prefix-cache-file", Some(&path), cache::MAGIC)
        };
        for foreign in [&b"notes"[..], b"INFX", b"root:x:0:0:root"] {
            assert!(asked(foreign).is_err(), "{foreign:?}");
        }
        for own in [&b""[..], &[0; 100], b"INFXPFXC damaged"] {
            assert!(asked(own).is_ok(), "{own:?}");
        }
        std::fs::remove_file(&path).unwrap();
        #[cfg(unix)]
        {
            // Opened, it would wait for who writes to it.
            assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
            assert!(spare_foreign_trace(Some(&path)).is_ok());
            assert!(check_cache_file(Some(&path)).is_err());
            std::fs::remove_file(&path).unwrap();
            for device in ["/dev/null", "/dev/zero"] {
                let error = check_cache_file(Some(Path::new(device))).unwrap_err().to_string();
                assert!(
                    error.contains("--prefix-cache-file") && error.contains("no regular file"),
                    "{error}"
                );
            }
        }
        assert!(spare_foreign("--prefix-cache-file", Some(&path), cache::MAGIC).is_ok());
        std::fs::write(&path, b"{\"infernix_trace\":1,").unwrap();
        assert!(spare_foreign_trace(Some(&path)).is_ok());
    }
}
