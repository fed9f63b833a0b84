//! Loading a found model into the backend that was asked for.

use super::model::{BackendKind, OpenModel};
use crate::Outcome;
use infernix_engine::backend::Backend;
use infernix_engine::backend::cpu::{CpuBackend, CpuOptions};
use infernix_engine::backend::lossless::{Lossless, LosslessOptions};
use infernix_engine::driver::{Driver, DriverOptions};
use infernix_engine::model::{ArtifactSource, LoadOptions, load};
use infernix_engine::ngram::{NgramOptions, open_ngram};
use std::sync::Arc;

/// Work that runs on any backend.
pub(crate) trait Task {
    fn run<B: Backend>(self, driver: &mut Driver<B>) -> anyhow::Result<Outcome>;
}

/// Loads the model with room for `tokens` tokens and runs the task.
pub(crate) fn with_driver(open: &OpenModel, tokens: usize, task: impl Task) -> anyhow::Result<Outcome> {
    with_driver_fp32(open, tokens, false, task)
}

/// The same, with FP32 values between operations if `fp32` (lossless only).
pub(crate) fn with_driver_fp32(
    open: &OpenModel,
    tokens: usize,
    fp32: bool,
    task: impl Task,
) -> anyhow::Result<Outcome> {
    match open.backend {
        BackendKind::Lossless => {
            let options = LosslessOptions { fp32, ..LosslessOptions::default() };
            start(Lossless::new(options), open, tokens, task)
        }
        BackendKind::Cpu => {
            let options = CpuOptions {
                threads: open.threads,
                threads_batch: open.threads_batch,
                ..CpuOptions::default()
            };
            start(CpuBackend::new(options), open, tokens, task)
        }
    }
}

fn start<B: Backend>(
    backend: B,
    open: &OpenModel,
    tokens: usize,
    task: impl Task,
) -> anyhow::Result<Outcome> {
    let source = ArtifactSource::new(Arc::clone(&open.artifact))?;
    let model =
        load(backend, &source, LoadOptions { activations: open.activations, ..LoadOptions::default() })?;
    let ngram = open_ngram(&open.artifact, open.ngram.as_deref(), NgramOptions::default())?.map(
        |(ngram, warnings)| {
            warnings.iter().for_each(|w| crate::output::warn(w));
            ngram
        },
    );
    let options = DriverOptions { tokens, kv: open.kv, ..DriverOptions::default() };
    let mut driver = Driver::new(model, ngram, options)?;
    task.run(&mut driver)
}
