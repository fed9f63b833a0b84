//! The lossless backend with FP32 boundaries against FP32 reference outputs; both host backends with BF16 boundaries.

#![expect(clippy::print_stdout, reason = "figures and reasons of skipping for whoever runs it")]

mod common;

use common::*;
use infernix_engine::backend::cpu::{CpuBackend, CpuOptions};
use infernix_engine::backend::lossless::Lossless;
use infernix_engine::backend::lossless::LosslessOptions;
use infernix_engine::backend::{ActivationPolicy, Backend};
use infernix_engine::driver::{Driver, DriverOptions, LaneOutput, Want, argmax};

fn fp32() -> LosslessOptions {
    LosslessOptions { fp32: true, ..LosslessOptions::default() }
}

/// Layers, logits, argmax, n-gram rows and drafts of one model against its reference.
fn check(d: &mut Driver<Lossless>, r: &Reference, argmax_margin: f32, skip: &[usize]) {
    let ids = r.ids("input_ids");
    let mut s = d.open(0).unwrap();
    d.record = Some(Vec::new());
    let LaneOutput { logits } = d.prefill(&mut s, &ids, Want::All).unwrap();
    let record = d.record.take().unwrap();
    let vocab = logits[0].len();
    let (shape, want) = r.f32("logits_last64");
    let first = ids.len() - shape[0];
    let mut worst = 0f64;
    for (i, want) in want.chunks_exact(vocab).enumerate() {
        if !skip.contains(&(first + i)) {
            worst = worst.max(relative(&logits[first + i], want));
        }
    }
    println!("logits: {worst:.2e}");
    let width = d.model.residual_width();
    for (i, layer) in record.iter().enumerate() {
        let (shape, want) = r.f32(&format!("layer.{i}.out_last16"));
        let got = &layer.residual[(ids.len() - shape[0]) * width..];
        let e = relative(got, &want);
        println!("layer {i}: {e:.2e}");
        assert!(e <= 1e-5, "layer {i}: {e:e}");
        if let (Some(rows), Some((shape, want))) = (&layer.ngram_rows, r.i64("ngram_rows_first32")) {
            let n = shape[0] * shape[1];
            assert!(rows[..n].iter().zip(&want).all(|(a, b)| *a == *b as u64), "n-gram rows");
        }
    }
    assert!(worst <= 1e-5, "logits: {worst:e}");
    let (top, margin) = (r.ids("argmax"), r.f32("margin").1);
    let agree = |t: usize| argmax(&logits[t]) == top[t];
    for t in 0..ids.len() {
        assert!(
            margin[t] <= argmax_margin || skip.contains(&t) || agree(t),
            "argmax at {t}, margin {}",
            margin[t]
        );
    }
    println!("argmax: {} of {}", (0..ids.len()).filter(|t| agree(*t)).count(), ids.len());
    d.close(s);
    drafts(d, r, &ids);
}

/// Drafts from the listed entries, teacher-forced prefix.
fn drafts(d: &mut Driver<Lossless>, r: &Reference, ids: &[u32]) {
    if d.model.draft.is_none() {
        return;
    }
    let positions = r.ids("mtp_positions");
    let tokens = r.ids("mtp_draft_tokens");
    let (_, margins) = r.f32("mtp_draft_margin");
    let (shape, last) = r.f32("mtp_logits_last4");
    let mut s = d.open(0).unwrap();
    let mut worst = 0f64;
    for (i, t) in positions.iter().map(|p| *p as usize).enumerate() {
        // Entry t: hidden of t with token t + 1.
        let have = s.len();
        d.prefill(&mut s, &ids[have..=t], Want::None).unwrap();
        let out = d.draft(&mut s, ids[t + 1], 3, argmax).unwrap();
        for k in 0..3 {
            let (want, margin) = (tokens[3 * i + k], margins[3 * i + k]);
            assert!(
                out[k].0 == want || margin < 1e-3,
                "draft {k} of entry {t}: {} not {want}, margin {margin}",
                out[k].0
            );
            if out[k].0 != want {
                break;
            }
        }
    }
    d.close(s);
    // First-draft logits of the last entries, which end one before the last token.
    let mut s = d.open(0).unwrap();
    for (row, want) in last.chunks_exact(shape[1]).enumerate() {
        let t = ids.len() - 1 - shape[0] + row;
        let have = s.len();
        d.prefill(&mut s, &ids[have..=t], Want::None).unwrap();
        let out = d.draft(&mut s, ids[t + 1], 1, argmax).unwrap();
        worst = worst.max(relative(&out[0].1, want));
    }
    println!("draft logits: {worst:.2e}");
    assert!(worst <= 1e-5, "draft logits {worst:e}");
    d.close(s);
}

/// The artifact that recipe `auto` makes of a checkpoint, with 16-bit activations.
fn through_artifact(name: &str, margin: f32) {
    let (Some(model), Some(reference)) =
        (shared(&format!("models/{name}")), shared(&format!("models/refs/{name}/ref.safetensors")))
    else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let artifact = converted(&model, folder.path());
    let mut d = artifact_driver(&artifact, fp32(), ActivationPolicy::A16, DriverOptions::default());
    let r = Reference::open(&reference);
    let ties: Vec<usize> =
        r.i32("qsa_tie_rows").map_or_else(Vec::new, |t| t.1.iter().map(|i| *i as usize).collect());
    check(&mut d, &r, margin, &ties);
}

#[test]
fn flash_demo_nvfp4_converted() {
    through_artifact("flash-demo-nvfp4", 0.05);
}

#[test]
fn flash_demo_bf16_converted() {
    through_artifact("flash-demo-bf16", 0.05);
}

#[test]
fn dense_demo_bf16_converted() {
    through_artifact("dense-demo-bf16", 0.05);
}

#[test]
fn dense_demo_quasar_converted() {
    through_artifact("dense-demo-quasar", 0.05);
}

#[test]
fn dense_demo_nvidia_converted() {
    through_artifact("dense-demo-nvidia", 0.05);
}

#[test]
fn flash_tiny_fp8_converted() {
    through_artifact("flash-tiny-fp8", 0.01);
}

#[test]
fn flash_tiny_fp4local_converted() {
    through_artifact("flash-tiny-fp4local", 0.01);
}

#[test]
fn flash_tiny_orcarouter_converted() {
    through_artifact("flash-tiny-orcarouter", 0.01);
}

/// BF16 boundaries: argmax over all positions, and the reference's greedy continuation, teacher-forced.
fn bf16<B: Backend>(name: &str, backend: B) {
    let (Some(model), Some(reference)) =
        (shared(&format!("models/{name}")), shared(&format!("models/refs/{name}/ref.safetensors")))
    else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let model = Model::Artifact(converted(&model, folder.path()));
    let mut d = model.driver(backend, ActivationPolicy::A16, DriverOptions::default());
    let name = format!("{name} on {}", d.model.backend.name());
    let r = Reference::open(&reference);
    let (ids, top, margin) = (r.ids("input_ids"), r.ids("argmax"), r.f32("margin").1);
    assert!(ids.len() >= 300, "{name}: {} positions", ids.len());
    let mut s = d.open(0).unwrap();
    let logits = d.prefill(&mut s, &ids, Want::All).unwrap().logits;
    d.close(s);
    let differ: Vec<usize> = (0..ids.len()).filter(|t| argmax(&logits[*t]) != top[*t]).collect();
    let agree = ids.len() - differ.len();
    println!("{name}: argmax agrees at {agree} of {}", ids.len());
    // 0.05 is where correct rounding nearly never flips a choice; over ten seeds of random rounding single positions with
    // margins up to 0.11 did, and so does position 37 of dense-demo-nvidia (0.076) under nearest rounding.
    let wide: Vec<f32> = differ.iter().map(|t| margin[*t]).filter(|m| *m > 0.05).collect();
    assert!(wide.len() <= 1 && wide.iter().all(|m| *m <= 0.12), "{name}: margins {wide:?}");
    assert!(agree * 100 >= ids.len() * 98, "{name}");
    let (chat, greedy, margin) = (r.ids("chat_ids"), r.ids("greedy_ids"), r.f32("greedy_margin").1);
    let mut s = d.open(0).unwrap();
    let mut logits = d.prefill(&mut s, &chat, Want::Last).unwrap().logits.remove(0);
    for (i, id) in greedy.iter().enumerate() {
        assert!(argmax(&logits) == *id || margin[i] <= 0.05, "{name}: step {i}, margin {}", margin[i]);
        logits = d.decode(&mut s, *id).unwrap();
    }
}

#[test]
fn bf16_boundaries_keep_the_references_choices() {
    for name in
        ["flash-demo-bf16", "flash-demo-nvfp4", "dense-demo-bf16", "dense-demo-quasar", "dense-demo-nvidia"]
    {
        bf16(name, Lossless::new(LosslessOptions::default()));
        bf16(name, CpuBackend::new(CpuOptions { threads: 2, ..CpuOptions::default() }));
    }
}

/// Narrow activations run on the oracle too, and stay near the exact model.
#[test]
fn narrow_activations_stay_near_the_exact_model() {
    for (name, policy, bound) in [
        ("flash-demo-nvfp4", ActivationPolicy::A4, 0.9),
        ("flash-demo-nvfp4", ActivationPolicy::A8, 0.95),
        ("dense-demo-bf16", ActivationPolicy::A8, 0.95),
        ("dense-demo-quasar", ActivationPolicy::A4, 0.8),
    ] {
        let (Some(model), Some(reference)) =
            (shared(&format!("models/{name}")), shared(&format!("models/refs/{name}/ref.safetensors")))
        else {
            return;
        };
        let folder = tempfile::tempdir().unwrap();
        let artifact = converted(&model, folder.path());
        let r = Reference::open(&reference);
        let (ids, top) = (r.ids("input_ids"), r.ids("argmax"));
        let run = |policy| {
            let mut d =
                artifact_driver(&artifact, LosslessOptions::default(), policy, DriverOptions::default());
            let mut s = d.open(0).unwrap();
            d.prefill(&mut s, &ids, Want::All).unwrap().logits
        };
        let (narrow, wide) = (run(policy), run(ActivationPolicy::A16));
        assert!(narrow != wide, "{name}: {policy:?} changes nothing");
        let agree =
            narrow.iter().zip(&top).filter(|(l, t)| argmax(l) == **t).count() as f64 / ids.len() as f64;
        println!("{name} {policy:?}: argmax agrees at {agree:.3}");
        assert!(agree >= bound, "{name} {policy:?}: {agree}");
    }
}

fn demo(name: &str, margin: f32) {
    let (Some(model), Some(reference)) =
        (shared(&format!("models/{name}")), shared(&format!("models/refs/{name}/ref.safetensors")))
    else {
        return;
    };
    let (source, table) = plain_checkpoint(&model);
    let mut d = lossless(&source, table, fp32(), DriverOptions::default());
    check(&mut d, &Reference::open(&reference), margin, &[]);
}

#[test]
fn dense_demo_bf16() {
    demo("dense-demo-bf16", 0.05);
}

#[test]
fn flash_demo_bf16() {
    demo("flash-demo-bf16", 0.05);
}

#[test]
fn moe4() {
    let (Some(model), Some(reference)) =
        (shared("reference/tiny_models/moe4"), shared("reference/tiny_models/moe4-ref/ref.safetensors"))
    else {
        return;
    };
    let (source, table) = plain_checkpoint(&model);
    let mut d = lossless(&source, table, fp32(), DriverOptions::default());
    check(&mut d, &Reference::open(&reference), 0.25, &[]);
}
