//! The CPU backend on whole models: nothing about a call changes a bit, and it stays as close to the lossless backend as
//! rounding allows.
#![expect(clippy::print_stderr, reason = "figures go to the terminal")]

mod common;

use common::*;
use infernix_engine::backend::cpu::isa::Isa;
use infernix_engine::backend::cpu::{CpuBackend, CpuOptions};
use infernix_engine::backend::lossless::LosslessOptions;
use infernix_engine::backend::{ActivationPolicy, CallKind};
use infernix_engine::driver::{Driver, DriverOptions, LaneInput, Want};
use infernix_engine::numerics::round::Rounding;
use infernix_engine::state::KvFormat;

fn cpu(
    model: &Model,
    isa: Isa,
    threads: usize,
    activations: ActivationPolicy,
    kv: KvFormat,
) -> Driver<CpuBackend> {
    let backend = CpuBackend::new(CpuOptions { threads, threads_batch: 0, isa: Some(isa) });
    model.driver(backend, activations, DriverOptions { tokens: 4096, sequences: 4, kv })
}

fn invariant(name: &str, model: &Model, activations: ActivationPolicy, kv: KvFormat) {
    let mut d = cpu(model, Isa::detect(), 2, activations, kv);
    let text = ids(d.model.config.vocab, 300, 5);
    let want = whole(&mut d, &text, 7);
    assert!(want.iter().flatten().all(|v| v.is_finite()), "{name}: logits are not numbers");
    for seed in 0..2 {
        let mut s = d.open(7).unwrap();
        let got = pieces(&mut d, &mut s, &text, seed);
        for (t, (a, b)) in got.iter().zip(&want).enumerate() {
            assert!(same(a, b), "{name}: row {t} of run {seed} differs");
        }
        d.close(s);
    }
    // Batched with others.
    let other = ids(d.model.config.vocab, 50, 9);
    let mut open = [d.open(0).unwrap(), d.open(7).unwrap()];
    for (kind, from, to) in [(CallKind::Prefill, 0, 47), (CallKind::Decode, 47, 50)] {
        let [a, b] = &mut open;
        let mut lanes = [
            LaneInput { sequence: a, ids: &other[from..to], want: Want::All },
            LaneInput { sequence: b, ids: &text[from..to], want: Want::All },
        ];
        let out = d.run(kind, &mut lanes).unwrap();
        for (j, l) in out[1].logits.iter().enumerate() {
            assert!(same(l, &want[from + j]), "{name}: row {} in a batch", from + j);
        }
    }
    open.into_iter().for_each(|s| d.close(s));
    // Other threads and instruction sets.
    let short = &text[..40];
    for isa in Isa::ALL.into_iter().filter(|i| i.available()) {
        for threads in [1, 3] {
            let got = whole(&mut cpu(model, isa, threads, activations, kv), short, 7);
            assert!(got.iter().zip(&want).all(|(a, b)| same(a, b)), "{name}: {isa} with {threads} threads");
        }
    }
}

fn kld(p: &[f32], q: &[f32]) -> f64 {
    let log_softmax = |x: &[f32]| {
        let m = x.iter().copied().fold(f32::MIN, f32::max);
        let s: f64 = x.iter().map(|v| f64::from(v - m).exp()).sum();
        x.iter().map(|v| f64::from(v - m) - s.ln()).collect::<Vec<f64>>()
    };
    let (p, q) = (log_softmax(p), log_softmax(q));
    p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum()
}

/// Median relative L2 and mean KLD of CPU logits from lossless ones, against honest rounding's.
fn close(name: &str, model: &Model, activations: ActivationPolicy, text: &[u32]) {
    let options = || DriverOptions { tokens: 4096, sequences: 2, kv: KvFormat::Bf16 };
    let lossless = |rounding| {
        let b = infernix_engine::backend::lossless::Lossless::new(LosslessOptions {
            rounding,
            ..Default::default()
        });
        whole(&mut model.driver(b, activations, options()), text, 7)
    };
    let want = lossless(Rounding::Nearest);
    let honest = lossless(Rounding::Stochastic(1));
    let got = whole(&mut cpu(model, Isa::detect(), 2, activations, KvFormat::Bf16), text, 7);
    let l2 = |x: &[f32], y: &[f32]| {
        let d: f64 = x.iter().zip(y).map(|(a, b)| f64::from(a - b).powi(2)).sum();
        (d / y.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>()).sqrt()
    };
    let sorted = |x: &[Vec<f32>]| {
        let mut rel: Vec<f64> = x.iter().zip(&want).map(|(a, b)| l2(a, b)).collect();
        rel.sort_by(f64::total_cmp);
        rel
    };
    let (rel, honest_rel) = (sorted(&got), sorted(&honest));
    let honest_median = honest_rel[honest_rel.len() / 2];
    let mean = |x: &[Vec<f32>]| x.iter().zip(&want).map(|(a, b)| kld(b, a)).sum::<f64>() / want.len() as f64;
    let (ours, theirs) = (mean(&got), mean(&honest));
    let argmax = |x: &[f32]| infernix_engine::driver::argmax(x);
    let agree = got.iter().zip(&want).filter(|(a, b)| argmax(a) == argmax(b)).count();
    eprintln!(
        "{name}: median relative L2 {:.2e}, worst {:.2e}, honest rounding's median {honest_median:.2e}; mean KLD {ours:.2e}, honest rounding {theirs:.2e}; argmax {agree} of {}",
        rel[rel.len() / 2],
        rel[rel.len() - 1],
        want.len()
    );
    // Rounding activations to 4 bits multiplies a difference of one BF16 unit: there honest rounding itself is farther.
    assert!(rel[rel.len() / 2] <= honest_median.max(1e-2), "{name}");
    assert!(ours <= 1.1 * theirs, "{name}: {ours:e} against {theirs:e}");
}

/// Text the models were trained on, if the reference holds its ids; else random ids.
fn trained(name: &str) -> Option<Vec<u32>> {
    let path = shared(&format!("models/refs/{name}"))?;
    let file = std::fs::read_dir(path)
        .ok()?
        .flatten()
        .map(|e| e.path())
        .find(|p| p.extension().is_some_and(|e| e == "safetensors"))?;
    let r = Reference::open(&file);
    let mut ids = r.ids("input_ids");
    ids.truncate(256);
    Some(ids)
}

#[test]
fn dense_demo_changes_no_bit_with_the_call_and_stays_close_to_lossless() {
    let Some(m) = Model::plain("models/dense-demo-bf16") else { return };
    invariant("dense", &m, ActivationPolicy::Artifact, KvFormat::Bf16);
    let text = trained("dense-demo-bf16").unwrap_or_else(|| ids(4000, 256, 3));
    close("dense", &m, ActivationPolicy::Artifact, &text);
}

#[test]
fn flash_demo_changes_no_bit_with_the_call_and_stays_close_to_lossless() {
    let Some(m) = Model::plain("models/flash-demo-bf16") else { return };
    invariant("flash", &m, ActivationPolicy::Artifact, KvFormat::Bf16);
    invariant("flash int8 KV", &m, ActivationPolicy::Artifact, KvFormat::Int8);
    let text = trained("flash-demo-bf16").unwrap_or_else(|| ids(4000, 256, 3));
    close("flash", &m, ActivationPolicy::Artifact, &text);
}

#[test]
fn expert_model_changes_no_bit_with_the_call_and_stays_close_to_lossless() {
    let Some(m) = Model::plain("reference/tiny_models/moe4") else { return };
    invariant("moe4", &m, ActivationPolicy::Artifact, KvFormat::Bf16);
    close("moe4", &m, ActivationPolicy::Artifact, &ids(640, 200, 3));
}

#[test]
fn nvfp4_demo_changes_no_bit_with_the_call_in_any_expert_arithmetic() {
    let Some(path) = shared("models/flash-demo-nvfp4") else { return };
    let folder = tempfile::tempdir().unwrap();
    let m = Model::Artifact(converted(&path, folder.path()));
    for (name, policy) in [
        ("W4A4", ActivationPolicy::Artifact),
        ("16 bits", ActivationPolicy::A16),
        ("8 bits", ActivationPolicy::A8),
    ] {
        invariant(name, &m, policy, KvFormat::Bf16);
        let text = trained("flash-demo-nvfp4").unwrap_or_else(|| ids(4000, 256, 3));
        close(name, &m, policy, &text);
    }
}
