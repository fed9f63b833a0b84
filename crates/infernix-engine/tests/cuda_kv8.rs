//! int8 keys and values: the device's codes are the processor's, and models run over them. What needs a device is skipped
//! without one.
#![expect(clippy::print_stderr, reason = "figures go to the terminal")]

mod common;

use infernix_artifact::Artifact;
use infernix_cuda::oracle::{Rng, kv8};
use infernix_engine::backend::cpu::{CpuBackend, CpuOptions};
use infernix_engine::backend::cuda::{Cuda, CudaOptions};
use infernix_engine::backend::{ActivationPolicy, Backend};
use infernix_engine::driver::{Driver, DriverOptions, Want, argmax};
use infernix_engine::model::{ArtifactSource, LoadOptions, load};
use infernix_engine::ngram::{NgramOptions, open_ngram};
use infernix_engine::numerics::round::mix;
use infernix_engine::state::KvFormat;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The self-test holds the kernels to this oracle: with it equal to the codec, device and processor store the same bytes.
#[test]
fn the_devices_oracle_is_the_processors_codec() {
    let codec = KvFormat::Int8.codec();
    let mut rng = Rng::new(8);
    for d in [128usize, 256] {
        for case in 0..200 {
            let scale = [1.0, 1e-4, 3e4, 0.0][case % 4];
            let x: Vec<f32> =
                rng.bf16(d, scale).iter().map(|w| f32::from_bits(u32::from(*w) << 16)).collect();
            let mut rotated = x.clone();
            kv8::rotate(&mut rotated);
            for (row, key) in [(&rotated, true), (&x, false)] {
                let mut bytes = vec![0; codec.row_bytes(d)];
                if key {
                    codec.encode_k(&x, &mut bytes);
                } else {
                    codec.encode_v(&x, &mut bytes);
                }
                let (codes, scales) = kv8::encode(row);
                let mut want: Vec<u8> = codes.iter().map(|c| *c as u8).collect();
                want.extend(scales.iter().flat_map(|s| s.to_le_bytes()));
                assert_eq!(bytes, want, "{d} values times {scale}, key {key}");
            }
        }
    }
}

fn driver<B: Backend>(a: &Arc<Artifact>, backend: B) -> Driver<B> {
    let source = ArtifactSource::new(a.clone()).unwrap();
    // 16-bit activations: every difference is a rounding.
    let options = LoadOptions { activations: ActivationPolicy::A16, ..LoadOptions::default() };
    let model = load(backend, &source, options).unwrap();
    let ngram = open_ngram(a, None, NgramOptions { threads: 2, cache_bytes: 1 << 20 }).unwrap();
    let options = DriverOptions { tokens: 2048, sequences: 2, kv: KvFormat::Int8 };
    Driver::new(model, ngram.map(|n| n.0), options).unwrap()
}

/// Artifacts of the folder that `INFERNIX_CUDA_MODELS` names, or the bundled demo.
fn models() -> Option<(Vec<PathBuf>, Option<tempfile::TempDir>)> {
    if !infernix_cuda::driver_present() || infernix_cuda::embedded_targets().is_empty() {
        eprintln!("skipped: no CUDA driver, or a build without kernels");
        return None;
    }
    if let Some(folder) = std::env::var_os("INFERNIX_CUDA_MODELS") {
        let all = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path());
        let mut all: Vec<PathBuf> = all.filter(|p| p.extension().is_some_and(|x| x == "infernix")).collect();
        all.sort();
        return Some((all, None));
    }
    let folder = tempfile::tempdir().unwrap();
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/flash-demo-nvfp4");
    drop(common::converted(&demo, folder.path()));
    Some((vec![folder.path().join("model.infernix")], Some(folder)))
}

/// Median relative L2 of rows, and the share of rows with the same largest logit.
fn compare(what: &str, got: &[Vec<f32>], want: &[Vec<f32>]) -> f64 {
    let mut errors: Vec<f64> = std::iter::zip(got, want)
        .map(|(g, w)| {
            let d: f64 = g.iter().zip(w).map(|(a, b)| f64::from(a - b).powi(2)).sum();
            let t: f64 = w.iter().map(|v| f64::from(*v).powi(2)).sum();
            if d.is_finite() { (d / t.max(1e-30)).sqrt() } else { f64::INFINITY }
        })
        .collect();
    assert_eq!(got.len(), want.len());
    errors.sort_by(f64::total_cmp);
    let same = std::iter::zip(got, want).filter(|(g, w)| argmax(g) == argmax(w)).count();
    let share = 100.0 * same as f64 / got.len() as f64;
    eprintln!("{what}: median {:.2e}, same top {share:.1} %", errors[errors.len() / 2]);
    errors[errors.len() / 2]
}

#[test]
fn int8_keys_and_values_run_on_the_device_as_on_the_processor() {
    let Some((paths, _keep)) = models() else { return };
    let mut wrong = Vec::new();
    for path in paths {
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let a = Arc::new(Artifact::open(&path).unwrap());
        let mut host = driver(&a, CpuBackend::new(CpuOptions::default()));
        let mut d = driver(&a, Cuda::new(CudaOptions::default()).unwrap());
        let vocab = d.model.config.vocab.min(4000);
        let text: Vec<u32> = (0..300u64).map(|i| (mix(1_000_003 * 5 + i) % vocab) as u32).collect();
        let mut hold = |ok: bool, what: &str| {
            if !ok {
                wrong.push(format!("{name}: {what}"));
            }
        };

        let mut s = host.open(7).unwrap();
        let want = host.prefill(&mut s, &text, Want::All).unwrap().logits;
        let mut s = d.open(7).unwrap();
        let got = d.prefill(&mut s, &text, Want::All).unwrap().logits;
        d.close(s);
        // A rounding of a key moves a code, and that the value by a 254th of the largest of its 64.
        hold(compare(&format!("{name} prompt"), &got, &want) <= 2e-2, "prompt");

        let from = 20;
        let mut s = d.open(7).unwrap();
        d.prefill(&mut s, &text[..from], Want::None).unwrap();
        let single: Vec<_> = text[from..].iter().map(|id| d.decode(&mut s, *id).unwrap()).collect();
        d.close(s);
        hold(compare(&format!("{name} decode"), &single, &want[from..]) <= 2e-2, "decode");

        // Rounds of several columns, some of them rejected, have the bits of single ones.
        let mut s = d.open(7).unwrap();
        d.prefill(&mut s, &text[..from], Want::None).unwrap();
        let mut got = Vec::new();
        while s.len() < text.len() {
            let good = (1 + s.len() % 5).min(text.len() - s.len());
            let mut columns = text[s.len()..s.len() + good].to_vec();
            columns.extend((0..s.len() % 3).map(|i| 17 + i as u32));
            let logits = d.verify(&mut s, &columns).unwrap();
            d.commit(&mut s, good).unwrap();
            got.extend(logits.into_iter().take(good));
        }
        d.close(s);
        let bits = |v: &[f32]| v.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        hold(got.iter().zip(&single).all(|(a, b)| bits(a) == bits(b)), "columns");

        // A page that went out and came back is the same page.
        let b = &mut d.model.backend;
        let page = b.save_page(0).unwrap();
        hold(page.len() as u64 == b.page_bytes(), "bytes of a page");
        b.load_page(1, &page).unwrap();
        hold(b.save_page(1).unwrap() == page, "a page brought back");
    }
    assert!(wrong.is_empty(), "{wrong:?}");
}
