//! Every fixture converted with its recipe: the CPU backend against lossless on the weights that the recipe made, within the
//! bounds of `cpu.rs`. Against the references, which know the source's weights alone, `parity.rs` holds what `auto` makes.
#![expect(clippy::print_stderr, reason = "figures go to the terminal")]

mod common;

use common::*;
use infernix_artifact::Artifact;
use infernix_convert::{ConvertOptions, Recipe, RunOptions, Silent, SourceSpec, convert, plan};
use infernix_engine::backend::ActivationPolicy;
use infernix_engine::backend::cpu::{CpuBackend, CpuOptions};
use infernix_engine::backend::lossless::{Lossless, LosslessOptions};
use infernix_engine::driver::DriverOptions;
use infernix_engine::numerics::round::Rounding;
use infernix_engine::state::KvFormat;
use std::path::Path;
use std::sync::Arc;

fn made(
    checkpoint: &Path,
    recipe: &str,
    more: &[(&str, std::path::PathBuf)],
    folder: &Path,
) -> Arc<Artifact> {
    let out = folder.join("model.infernix");
    let mut o = ConvertOptions::new(checkpoint, Recipe::load(recipe).unwrap(), &out);
    o.threads = 2;
    o.sources.extend(more.iter().map(|(role, path)| SourceSpec::new(*role, path)));
    let plan = plan(&o).unwrap();
    let run = RunOptions { interrupt: infernix_artifact::Interrupt::default(), faults: None, durable: false };
    convert(&plan, &Silent, &run).unwrap();
    Arc::new(Artifact::open(&out).unwrap())
}

fn log_softmax(x: &[f32]) -> Vec<f64> {
    let m = x.iter().copied().fold(f32::MIN, f32::max);
    let s: f64 = x.iter().map(|v| f64::from(v - m).exp()).sum();
    x.iter().map(|v| f64::from(v - m) - s.ln()).collect()
}

fn kld(p: &[f32], q: &[f32]) -> f64 {
    log_softmax(p).iter().zip(log_softmax(q)).map(|(p, q)| p.exp() * (p - q)).sum()
}

#[test]
fn recipes_run_as_close_to_lossless_as_rounding_allows() {
    /// Recipe, fixture, and the folders of its other sources.
    type Case<'a> = (&'a str, &'a str, &'a [(&'a str, &'a str)]);
    let cases: [Case; 12] = [
        ("flash-demo-nvfp4", "qwen3_8_flash_next_nvfp4", &[]),
        ("flash-demo-nvfp4", "qwen3_8_flash_next_nvfp4_dense8", &[]),
        ("flash-tiny-fp8", "qwen3_8_flash_next_fp8", &[]),
        ("flash-tiny-fp4local", "qwen3_8_flash_next_fp4_local", &[]),
        ("flash-tiny-orcarouter", "qwen3_8_flash_next_nvfp4_orcarouter", &[]),
        ("flash-demo-gguf", "qwen3_8_flash_next_iq3_s", &[("mtp", "flash-demo-nvfp4")]),
        ("flash-wide-gguf", "auto", &[]),
        ("dense-demo-gguf", "auto", &[]),
        ("dense-demo-bf16", "qwen3_8_27b", &[]),
        ("dense-demo-bf16", "qwen3_8_27b_q6", &[]),
        ("dense-demo-quasar", "qwen3_8_27b_nvfp4_quasar", &[]),
        ("dense-demo-nvidia", "qwen3_8_27b_nvfp4_nvidia", &[]),
    ];
    for (name, recipe, more) in cases {
        let Some(checkpoint) = shared(&format!("models/{name}")) else { continue };
        let more: Option<Vec<_>> =
            more.iter().map(|(role, name)| Some((*role, shared(&format!("models/{name}"))?))).collect();
        let Some(more) = more else { continue };
        let folder = tempfile::tempdir().unwrap();
        let model = Model::Artifact(made(&checkpoint, recipe, &more, folder.path()));
        let options = || DriverOptions { tokens: 512, sequences: 1, kv: KvFormat::Bf16 };
        // What the recipe records: 4-bit experts where the checkpoint was made for them.
        let policy = ActivationPolicy::Artifact;
        let cpu = CpuBackend::new(CpuOptions { threads: 2, threads_batch: 0, isa: None });
        let mut cpu = model.driver(cpu, policy, options());
        let vocab = cpu.model.config.vocab;
        let reference = shared(&format!("models/refs/{name}/ref.safetensors"));
        let mut text =
            reference.map_or_else(|| ids(vocab.min(4000), 96, 5), |r| Reference::open(&r).ids("input_ids"));
        text.truncate(96);
        let lossless = |rounding| {
            let b = Lossless::new(LosslessOptions { rounding, ..Default::default() });
            whole(&mut model.driver(b, policy, options()), &text, 7)
        };
        let want = lossless(Rounding::Nearest);
        let honest = [lossless(Rounding::Stochastic(1)), lossless(Rounding::Stochastic(2))];
        let got = whole(&mut cpu, &text, 7);
        let median = |x: &[Vec<f32>]| {
            let mut all: Vec<f64> = x.iter().zip(&want).map(|(a, b)| relative_l2(a, b)).collect();
            all.sort_by(f64::total_cmp);
            all[all.len() / 2]
        };
        let mean =
            |x: &[Vec<f32>]| x.iter().zip(&want).map(|(a, b)| kld(b, a)).sum::<f64>() / want.len() as f64;
        let worst = |f: &dyn Fn(&[Vec<f32>]) -> f64| f(&honest[0]).max(f(&honest[1]));
        eprintln!(
            "{name} {recipe}: median relative L2 {:.2e} (honest rounding {:.2e}), mean KLD {:.2e} ({:.2e})",
            median(&got),
            worst(&median),
            mean(&got),
            worst(&mean)
        );
        assert!(median(&got) <= worst(&median).max(1e-2), "{name} {recipe}");
        assert!(mean(&got) <= 1.1 * worst(&mean), "{name} {recipe}");
    }
}

fn relative_l2(x: &[f32], y: &[f32]) -> f64 {
    let d: f64 = x.iter().zip(y).map(|(a, b)| f64::from(a - b).powi(2)).sum();
    (d / y.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>()).sqrt()
}
