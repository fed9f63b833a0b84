//! The models that the engine is tested over, and what they say without it.

use super::{plain_checkpoint, shared};
use infernix_engine::EngineError;
use infernix_engine::backend::cpu::{CpuBackend, CpuOptions};
use infernix_engine::driver::{Driver, DriverOptions, Want};
use infernix_engine::model::{LoadOptions, MemorySource, WeightSource as _, load};
use infernix_engine::ngram::{MemoryRows, Ngram, NgramOptions, RowSource as _};
use infernix_engine::numerics::round::mix;
use infernix_engine::sample::{Sampler, SamplerOptions};
use infernix_engine::state::KvFormat;
use infernix_model::Component;
use std::sync::Arc;

/// What a driver is made from; shared between the plain run and the engine's thread.
pub(crate) struct Case {
    pub(crate) name: &'static str,
    source: Arc<MemorySource>,
    /// Rows of the n-gram table and their width.
    table: Option<(usize, Vec<f32>)>,
}

pub(crate) fn cases() -> Vec<Case> {
    let names = ["models/flash-demo-bf16", "models/dense-demo-bf16", "reference/tiny_models/moe4"];
    let case = |name: &'static str| {
        let (source, table) = plain_checkpoint(&shared(name)?);
        let table = table.map(|t| {
            let mut v = vec![0f32; t.rows() as usize * t.width()];
            for (r, out) in v.chunks_exact_mut(t.width()).enumerate() {
                t.read(r as u64, out).unwrap();
            }
            (t.width(), v)
        });
        Some(Case { name, source: Arc::new(source), table })
    };
    names.into_iter().filter_map(case).collect()
}

impl Case {
    pub(crate) fn make(
        &self,
        tokens: usize,
        sequences: usize,
    ) -> impl FnOnce() -> Result<Driver<CpuBackend>, EngineError> + Send + 'static {
        let (source, table) = (Arc::clone(&self.source), self.table.clone());
        move || {
            let backend =
                CpuBackend::new(CpuOptions { threads: 1, threads_batch: 1, ..CpuOptions::default() });
            let drafter = source.has_component(Component::Mtp);
            let model = load(backend, &*source, LoadOptions { drafter, ..LoadOptions::default() })?;
            let ngram = table.map(|(width, rows)| {
                let ple = model.config.ple.clone().unwrap();
                let o = NgramOptions { threads: 0, cache_bytes: 0 };
                Ngram::new(&ple, model.config.vocab, Box::new(MemoryRows::new(width, rows)), o).unwrap()
            });
            Driver::new(model, ngram, DriverOptions { tokens, sequences, kv: KvFormat::Bf16 })
        }
    }

    pub(crate) fn ids(&self, seed: u64, n: usize) -> Vec<u32> {
        let vocab = self.source.config.vocab;
        (0..n as u64).map(|i| (mix(mix(seed) ^ i) % vocab) as u32).collect()
    }
}

/// The cold plain run.
pub(crate) fn plain(
    d: &mut Driver<CpuBackend>,
    prompt: &[u32],
    sampling: &SamplerOptions,
    n: usize,
) -> Vec<u32> {
    let vocab = d.model.config.vocab as usize;
    let mut sampler = Sampler::new(sampling.clone(), prompt, vocab);
    let mut s = d.open(0).unwrap();
    let mut logits = d.prefill(&mut s, prompt, Want::Last).unwrap().logits.pop().unwrap();
    let mut out = Vec::new();
    while out.len() < n {
        let id = sampler.choose(&logits, None, (prompt.len() + out.len()) as u64).unwrap();
        sampler.accept(id);
        out.push(id);
        logits = d.decode(&mut s, id).unwrap();
    }
    d.close(s);
    out
}
