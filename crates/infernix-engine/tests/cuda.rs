//! The CUDA backend on whole models, against the CPU backend and against itself. Needs a device; skipped without one.
//!
//! Models are the artifacts in the folder that `INFERNIX_CUDA_MODELS` names, or the bundled demo.
#![expect(clippy::print_stderr, reason = "figures go to the terminal")]

mod common;

use infernix_artifact::Artifact;
use infernix_engine::backend::cpu::{CpuBackend, CpuOptions};
use infernix_engine::backend::cuda::{Cuda, CudaOptions, Placement};
use infernix_engine::backend::{ActivationPolicy, Backend, CallKind};
use infernix_engine::driver::{Driver, DriverOptions, LaneInput, Want, argmax};
use infernix_engine::model::{ArtifactSource, LoadOptions, WeightSource, load};
use infernix_engine::ngram::{NgramOptions, open_ngram};
use infernix_engine::numerics::round::mix;
use infernix_engine::state::KvFormat;
use infernix_model::Component;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const TEXT: usize = 400;

fn driver<B: Backend>(a: &Arc<Artifact>, backend: B) -> Driver<B> {
    driver_with(a, backend, ActivationPolicy::Artifact)
}

fn driver_with<B: Backend>(a: &Arc<Artifact>, backend: B, activations: ActivationPolicy) -> Driver<B> {
    let source = ArtifactSource::new(a.clone()).unwrap();
    let drafter = source.has_component(Component::Mtp);
    let model =
        load(backend, &source, LoadOptions { drafter, activations, ..LoadOptions::default() }).unwrap();
    let ngram = open_ngram(a, None, NgramOptions { threads: 2, cache_bytes: 1 << 20 }).unwrap();
    let options = DriverOptions { tokens: 4096, sequences: 3, kv: KvFormat::Bf16 };
    Driver::new(model, ngram.map(|n| n.0), options).unwrap()
}

fn cuda(a: &Arc<Artifact>, placement: Placement, graphs: bool) -> Driver<Cuda> {
    driver(a, Cuda::new(CudaOptions { placement, graphs, ..CudaOptions::default() }).unwrap())
}

/// Decode rounds between prompts of all lengths, and rounds of many columns: what memory prompts and their experts share changes
/// hands each time.
fn between_prompts(d: &mut Driver<Cuda>, text: &[u32]) -> Vec<Vec<f32>> {
    let vocab = d.model.config.vocab;
    let mut s = d.open(7).unwrap();
    d.prefill(&mut s, &text[..20], Want::None).unwrap();
    let mut out = Vec::new();
    let mut other = d.open(0).unwrap();
    for (i, prompt) in [(0, 5), (1, 200), (2, 30), (3, 64), (4, 300), (5, 10)] {
        d.prefill(&mut other, &ids(vocab, prompt, 20 + i), Want::None).unwrap();
        for _ in 0..12 {
            let at = s.len();
            out.push(d.decode(&mut s, text[at]).unwrap());
        }
        for columns in [3, 60] {
            // The longer ones need memory that short ones leave to experts.
            let at = s.len();
            let more = ids(vocab, columns, 40 + i);
            let mut lanes = [
                LaneInput { sequence: &mut s, ids: &text[at..at + columns.min(8)], want: Want::All },
                LaneInput { sequence: &mut other, ids: &more, want: Want::Last },
            ];
            out.extend(d.run(CallKind::Decode, &mut lanes).unwrap()[0].logits.clone());
            d.commit(&mut s, columns.min(8)).unwrap();
            d.commit(&mut other, 1).unwrap();
        }
    }
    d.close(s);
    d.close(other);
    out
}

fn ids(vocab: u64, n: usize, seed: u64) -> Vec<u32> {
    (0..n as u64)
        .map(|i| (mix(seed.wrapping_mul(1_000_003).wrapping_add(i)) % vocab.min(4000)) as u32)
        .collect()
}

fn models() -> Option<(Vec<PathBuf>, Option<tempfile::TempDir>)> {
    if !infernix_cuda::driver_present() || infernix_cuda::embedded_targets().is_empty() {
        eprintln!("skipped: no CUDA driver, or a build without kernels");
        return None;
    }
    if let Some(folder) = std::env::var_os("INFERNIX_CUDA_MODELS") {
        let mut all: Vec<PathBuf> = std::fs::read_dir(folder)
            .unwrap()
            .map(|e| e.unwrap().path())
            .filter(|p| p.extension().is_some_and(|x| x == "infernix"))
            .collect();
        all.sort();
        return Some((all, None));
    }
    let folder = tempfile::tempdir().unwrap();
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/flash-demo-nvfp4");
    let artifact = common::converted(&demo, folder.path());
    drop(artifact);
    Some((vec![folder.path().join("model.infernix")], Some(folder)))
}

/// (median, worst) relative L2 of rows, and the share of rows with the same largest logit.
fn compare(what: &str, got: &[Vec<f32>], want: &[Vec<f32>]) -> (f64, f64, f64) {
    assert_eq!(got.len(), want.len(), "{what}");
    let mut errors = Vec::new();
    let mut same = 0;
    for (g, w) in got.iter().zip(want) {
        let d: f64 = g.iter().zip(w).map(|(a, b)| f64::from(a - b).powi(2)).sum();
        let t: f64 = w.iter().map(|v| f64::from(*v).powi(2)).sum();
        errors.push(if d.is_finite() { (d / t.max(1e-30)).sqrt() } else { f64::INFINITY });
        same += usize::from(argmax(g) == argmax(w));
    }
    errors.sort_by(f64::total_cmp);
    let (median, worst) = (errors[errors.len() / 2], errors[errors.len() - 1]);
    let top = same as f64 / got.len() as f64;
    eprintln!("{what}: median {median:.2e}, worst {worst:.2e}, same top {:.1} %", 100.0 * top);
    (median, worst, top)
}

fn same(a: &[Vec<f32>], b: &[Vec<f32>]) -> usize {
    let equal = |(a, b): (&Vec<f32>, &Vec<f32>)| a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits());
    a.iter().zip(b).filter(|p| !equal(*p)).count() + a.len().abs_diff(b.len())
}

/// Logits of `text` from `from` on, one decode round a token.
fn one_by_one<B: Backend>(d: &mut Driver<B>, text: &[u32], from: usize) -> Vec<Vec<f32>> {
    let mut s = d.open(7).unwrap();
    d.prefill(&mut s, &text[..from], Want::None).unwrap();
    let out = text[from..].iter().map(|id| d.decode(&mut s, *id).unwrap()).collect();
    d.close(s);
    out
}

#[test]
fn a_model_runs_on_the_device_as_on_the_processor() {
    let Some((paths, _keep)) = models() else { return };
    for path in paths {
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let a = Arc::new(Artifact::open(&path).unwrap());
        let mut host = driver(&a, CpuBackend::new(CpuOptions::default()));
        let mut d = cuda(&a, Placement::Auto, true);
        let text = ids(d.model.config.vocab, TEXT, 5);
        // All that is wrong with a model, not the first of it.
        let mut wrong: Vec<String> = Vec::new();
        let mut hold = |ok: bool, what: String| {
            if !ok {
                eprintln!("WRONG: {what}");
                wrong.push(what);
            }
        };

        // With 16-bit activations every difference is a rounding. A 4-bit activation turns one into a step of a quarter of
        // a value, so that the bound of artifacts with such experts is a wide one.
        let wide = ActivationPolicy::A16;
        let mut exact = driver_with(&a, CpuBackend::new(CpuOptions::default()), wide);
        let mut s = exact.open(7).unwrap();
        let want = exact.prefill(&mut s, &text, Want::All).unwrap().logits;
        let mut exact = driver_with(&a, Cuda::new(CudaOptions::default()).unwrap(), wide);
        let mut s = exact.open(7).unwrap();
        let got = exact.prefill(&mut s, &text, Want::All).unwrap().logits;
        let (median, ..) = compare(&format!("{name} prompt, 16-bit activations"), &got, &want);
        hold(median <= 1e-2, format!("{name}: prompt with 16-bit activations"));
        drop(exact);
        let source = ArtifactSource::new(a.clone()).unwrap();
        let bound = if source.default_expert_activation() == 4 { 8e-2 } else { 1e-2 };

        // A whole prompt.
        let mut s = host.open(7).unwrap();
        let want = host.prefill(&mut s, &text, Want::All).unwrap().logits;
        host.close(s);
        let mut s = d.open(7).unwrap();
        let got = d.prefill(&mut s, &text, Want::All).unwrap().logits;
        d.close(s);
        let (median, ..) = compare(&format!("{name} prompt"), &got, &want);
        hold(median <= bound, format!("{name}: prompt"));

        // The same in chunks, then token by token.
        let mut s = d.open(7).unwrap();
        let mut got = Vec::new();
        for chunk in [&text[..1], &text[1..130], &text[130..131], &text[131..]] {
            got.extend(d.prefill(&mut s, chunk, Want::All).unwrap().logits);
        }
        d.close(s);
        let (median, ..) = compare(&format!("{name} chunks"), &got, &want);
        hold(median <= bound, format!("{name}: chunks"));
        // Layer by layer over windows of the prompt, the last of one row or of fewer than tiles take, experts where they are or streamed.
        for (placement, first) in [(Placement::Auto, 385), (Placement::Host, 385), (Placement::Host, 400)] {
            let options = CudaOptions { window: 128, placement, ..CudaOptions::default() };
            let mut walked = driver(&a, Cuda::new(options).unwrap());
            let mut s = walked.open(7).unwrap();
            let mut got = walked.prefill(&mut s, &text[..first], Want::All).unwrap().logits;
            if first < text.len() {
                got.extend(walked.prefill(&mut s, &text[first..], Want::All).unwrap().logits);
            }
            let what = format!("{name}: windows of {first}, {placement:?}");
            let (median, ..) = compare(&what, &got, &want);
            hold(median <= bound, what);
        }
        let from = 20;
        let single = one_by_one(&mut d, &text, from);
        let (median, ..) = compare(&format!("{name} decode"), &single, &want[from..]);
        hold(median <= bound, format!("{name}: decode"));

        // Rounds of several columns with rejected drafts give the same bits as single ones.
        let mut s = d.open(7).unwrap();
        d.prefill(&mut s, &text[..from], Want::None).unwrap();
        let mut got = Vec::new();
        let mut r = 3u64;
        while s.len() < text.len() {
            r = mix(r.wrapping_add(0x9E37_79B9_7F4A_7C15));
            let good = (1 + r as usize % 6).min(text.len() - s.len());
            let mut columns = text[s.len()..s.len() + good].to_vec();
            columns.extend((0..r >> 32 & 3).map(|i| (r >> 40 & 511) as u32 + i as u32));
            if d.model.draft.is_some() && r >> 20 & 1 == 1 {
                d.draft(&mut s, columns[0], 2, argmax).unwrap();
            }
            let logits = d.verify(&mut s, &columns).unwrap();
            d.commit(&mut s, good).unwrap();
            got.extend(logits.into_iter().take(good));
        }
        d.close(s);
        let unequal = same(&got, &single);
        eprintln!("{name} columns: {unequal} of {} rows differ from single columns", got.len());
        hold(unequal == 0, format!("{name}: columns"));

        // Without graphs.
        let mut plain = cuda(&a, Placement::Auto, false);
        let got = one_by_one(&mut plain, &text[..80], from);
        hold(same(&got, &single[..got.len()]) == 0, format!("{name}: graphs"));
        drop(plain);

        // A snapshot brings back the state, bit for bit.
        let mut s = d.open(7).unwrap();
        d.prefill(&mut s, &text[..from], Want::None).unwrap();
        for id in &text[from..50] {
            d.decode(&mut s, *id).unwrap();
        }
        let snapshot = d.snapshot(&mut s).unwrap();
        for id in ids(d.model.config.vocab, 9, 77) {
            d.decode(&mut s, id).unwrap();
        }
        d.restore(&mut s, &snapshot).unwrap();
        let got: Vec<_> = text[50..80].iter().map(|id| d.decode(&mut s, *id).unwrap()).collect();
        hold(same(&got, &single[50 - from..80 - from]) == 0, format!("{name}: snapshot"));
        d.close(s);

        // Beside another sequence.
        let other = ids(d.model.config.vocab, 200, 9);
        let mut open = [d.open(0).unwrap(), d.open(7).unwrap()];
        for (s, t) in open.iter_mut().zip([&other[..150], &text[..from]]) {
            d.prefill(s, t, Want::None).unwrap();
        }
        let mut got = Vec::new();
        for t in 0..30 {
            let [a, b] = &mut open;
            let mut lanes = [
                LaneInput { sequence: a, ids: &other[150 + t..151 + t], want: Want::All },
                LaneInput { sequence: b, ids: &text[from + t..from + t + 1], want: Want::All },
            ];
            got.push(d.run(CallKind::Decode, &mut lanes).unwrap()[1].logits[0].clone());
            for s in &mut open {
                d.commit(s, 1).unwrap();
            }
        }
        hold(same(&got, &single[..30]) == 0, format!("{name}: beside another"));
        for s in open {
            d.close(s);
        }

        // Drafts.
        if d.model.draft.is_some() {
            let (mut a, mut b) = (host.open(1).unwrap(), d.open(1).unwrap());
            host.prefill(&mut a, &text[..100], Want::None).unwrap();
            d.prefill(&mut b, &text[..100], Want::None).unwrap();
            let script = ids(d.model.config.vocab, 4, 11);
            let (mut i, mut j) = (0, 0);
            let next = |k: &mut usize| {
                *k += 1;
                script[*k - 1]
            };
            let want: Vec<_> = host
                .draft(&mut a, text[100], 4, |_| next(&mut i))
                .unwrap()
                .into_iter()
                .map(|d| d.1)
                .collect();
            let got: Vec<_> =
                d.draft(&mut b, text[100], 4, |_| next(&mut j)).unwrap().into_iter().map(|d| d.1).collect();
            let (median, ..) = compare(&format!("{name} drafts"), &got, &want);
            hold(median <= bound.max(2e-2), format!("{name}: drafts"));
            host.close(a);
            d.close(b);
        }

        // Where experts lie and who computes them does not show.
        let between = between_prompts(&mut d, &text);
        for (placement, workers, lend) in [
            (Placement::Host, 0, false),
            (Placement::Host, 3, false),
            (Placement::RandomHalf(3), 0, false),
            (Placement::RandomHalf(3), 2, false),
            (Placement::Frames(24), 0, true),
            (Placement::Frames(24), 4, true),
            (Placement::Frames(24), 4, false),
        ] {
            let options =
                CudaOptions { placement, workers: Some(workers), lend: Some(lend), ..CudaOptions::default() };
            let mut p = driver(&a, Cuda::new(options).unwrap());
            // Whatever was measured, on this small model the link alone would be faster.
            p.model.backend.split_misses([0, 1, 1, 2, 3, 3, 4, 5, 6, 7, 8, 8, 8, 8, 8, 8]);
            let got = one_by_one(&mut p, &text[..150], from);
            let counts = p.model.backend.tier_counts();
            let what = format!("{placement:?}, {workers} workers, lending {lend}");
            eprintln!("{name} {what}: {} lent, {counts:?}", p.model.backend.lent_frames());
            eprintln!("{name} {what}: {:?}", p.model.backend.worker_rates());
            hold(same(&got, &single[..got.len()]) == 0, format!("{name}: {what}"));
            let got = between_prompts(&mut p, &text);
            hold(same(&got, &between) == 0, format!("{name}: between prompts, {what}"));
            let rates = p.model.backend.worker_rates();
            let all_computed = rates.is_none() || counts.misses == 0 || counts.cpu_records > 0;
            hold(all_computed, format!("{name}: the CPU had no share, {what}"));
            let mut s = p.open(7).unwrap();
            let got = p.prefill(&mut s, &text, Want::All).unwrap().logits;
            let (median, ..) = compare(&format!("{name} prompt with {what}"), &got, &want);
            hold(median <= bound, format!("{name}: prompt with {what}"));
        }

        // Threads that stop answering fail a round, and later ones do without them.
        let options = CudaOptions {
            placement: Placement::Host,
            workers: Some(2),
            lend: Some(false),
            ..CudaOptions::default()
        };
        let mut p = driver(&a, Cuda::new(options).unwrap());
        p.model.backend.split_misses([0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 8, 8, 8, 8, 8, 8]);
        if p.model.backend.worker_rates().is_some() {
            let mut s = p.open(7).unwrap();
            p.prefill(&mut s, &text[..from], Want::None).unwrap();
            let got: Vec<_> = text[from..from + 5].iter().map(|id| p.decode(&mut s, *id).unwrap()).collect();
            hold(same(&got, &single[..5]) == 0, format!("{name}: before threads stop"));
            p.model.backend.halt_workers();
            let clock = std::time::Instant::now();
            let failed = p.decode(&mut s, text[from + 5]).map(drop).unwrap_err().to_string();
            eprintln!("{name} threads that stop: {failed}; after {:?}", clock.elapsed());
            hold(failed.contains("took more than"), format!("{name}: threads that stop: {failed}"));
            p.close(s);
            let got = one_by_one(&mut p, &text[..from + 20], from);
            hold(same(&got, &single[..20]) == 0, format!("{name}: after threads stopped"));
        }
        assert!(wrong.is_empty(), "{wrong:?}");
        eprintln!("{name}: done; ledger {:?}", d.model.backend.ledger().lines());
    }
}
