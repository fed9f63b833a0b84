//! Models converted from GGUF files: against llama.cpp's F32 log-probabilities, and the CPU against lossless.

#![expect(clippy::print_stderr, reason = "figures are printed")]

mod common;

use common::*;
use infernix_engine::backend::cpu::{CpuBackend, CpuOptions};
use infernix_engine::backend::lossless::LosslessOptions;
use infernix_engine::backend::{ActivationPolicy, Backend};
use infernix_engine::driver::{Driver, DriverOptions, Want};
use infernix_engine::model::{ArtifactSource, LoadOptions, load};
use infernix_engine::ngram::{NgramOptions, open_ngram};
use std::path::Path;

/// Tokens and log-probability rows of the one chunk of a base file (measure's reader, in few words).
fn base(path: &Path) -> (Vec<u32>, Vec<Vec<f64>>) {
    let bytes = std::fs::read(path).unwrap();
    let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    let (ctx, vocab, chunks) = (word(8) as usize, word(12) as usize, word(16));
    assert_eq!((&bytes[..8], chunks), (&b"_logits_"[..], 1));
    let ids = (0..ctx).map(|i| word(20 + 4 * i)).collect();
    let mut at = 20 + 4 * ctx;
    let rows = (0..ctx - 1 - ctx / 2).map(|_| {
        let (scale, minimum) = (f32::from_bits(word(at)), f32::from_bits(word(at + 4)));
        let row = (0..vocab).map(|i| {
            let code = u16::from_le_bytes([bytes[at + 8 + 2 * i], bytes[at + 9 + 2 * i]]);
            f64::from(scale * f32::from(code) + minimum)
        });
        let row = row.collect();
        at += 8 + 2 * (vocab + vocab % 2);
        row
    });
    (ids, rows.collect())
}

fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let top = logits.iter().fold(f32::MIN, |m, v| m.max(*v));
    let sum: f64 = logits.iter().map(|v| f64::from(v - top).exp()).sum();
    logits.iter().map(|v| f64::from(v - top) - sum.ln()).collect()
}

/// Logits of every position.
fn logits<B: Backend>(mut driver: Driver<B>, ids: &[u32]) -> Vec<Vec<f32>> {
    let mut s = driver.open(0).unwrap();
    driver.prefill(&mut s, ids, Want::All).unwrap().logits
}

#[test]
fn log_probabilities_are_llama_cpps() {
    for (name, file) in [
        ("flash-demo-gguf", "llamacpp-f32-c128.kld"),
        ("flash-wide-gguf", "llamacpp-f32-c64.kld"),
        ("dense-demo-gguf", "llamacpp-f32-c128.kld"),
    ] {
        let Some(checkpoint) = shared(&format!("models/{name}")) else { continue };
        let dir = tempfile::tempdir().unwrap();
        let artifact = converted(&checkpoint, dir.path());
        let options = LosslessOptions { fp32: true, ..LosslessOptions::default() };
        let driver =
            artifact_driver(&artifact, options, ActivationPolicy::Artifact, DriverOptions::default());
        let (ids, expected) = base(&checkpoint.join(file));
        let found = logits(driver, &ids);
        let (mut kld, mut worst) = (0.0, 0f64);
        for (row, p) in expected.iter().enumerate() {
            // llama.cpp scores the second half: row i is position ctx / 2 + i.
            let q = log_softmax(&found[ids.len() / 2 + row]);
            // Its own cut: the file holds nothing below e^-16.
            let kept = p.iter().zip(&q).filter(|(p, _)| **p > -16.0);
            kld += kept.map(|(p, q)| p.exp() * (p - q)).sum::<f64>();
            // Codes at the lower end are clipped.
            let least = p.iter().fold(0f64, |m, v| m.min(*v));
            let unclipped = p.iter().zip(&q).filter(|(p, _)| **p > least);
            worst = unclipped.fold(worst, |m, (p, q)| m.max((p - q).abs()));
        }
        let mean = kld / expected.len() as f64;
        eprintln!("{name}: mean KLD {mean:e}, worst log-probability {worst:e}");
        assert!(mean.abs() <= 1e-5 && worst <= 1.3e-4, "{name}: mean KLD {mean:e}, worst {worst:e}");
    }
}

#[test]
fn the_cpu_computes_blocks_as_lossless_does() {
    for name in ["flash-demo-gguf", "flash-wide-gguf", "dense-demo-gguf"] {
        let Some(checkpoint) = shared(&format!("models/{name}")) else { continue };
        let dir = tempfile::tempdir().unwrap();
        let artifact = converted(&checkpoint, dir.path());
        let ids: Vec<u32> = (0..48u32).map(|i| 11 + 37 * i % 3000).collect();
        for activations in [ActivationPolicy::Artifact, ActivationPolicy::A8] {
            let exact =
                artifact_driver(&artifact, LosslessOptions::default(), activations, DriverOptions::default());
            let expected = logits(exact, &ids);
            let source = ArtifactSource::new(artifact.clone()).unwrap();
            let load_options = LoadOptions { activations, ..LoadOptions::default() };
            let model = load(
                CpuBackend::new(CpuOptions { threads: 2, threads_batch: 0, isa: None }),
                &source,
                load_options,
            )
            .unwrap();
            let ngram =
                open_ngram(&artifact, None, NgramOptions { threads: 2, cache_bytes: 1 << 20 }).unwrap();
            let driver = Driver::new(model, ngram.map(|n| n.0), DriverOptions::default()).unwrap();
            let found = logits(driver, &ids);
            let mut errors: Vec<f64> = found
                .iter()
                .zip(&expected)
                .map(|(a, b)| {
                    let d: f64 = a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)).sum();
                    let n: f64 = b.iter().map(|b| f64::from(*b).powi(2)).sum();
                    (d / n).sqrt()
                })
                .collect();
            errors.sort_by(f64::total_cmp);
            let median = errors[errors.len() / 2];
            // Random weights of the wide model route almost at random: a flip there is no fault of arithmetic.
            assert!(median <= 1e-2, "{name} {activations:?}: median relative L2 {median:e}");
        }
    }
}
