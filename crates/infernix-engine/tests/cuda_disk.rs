//! Experts on disk: the same bits as from memory, and a read error that fails the lanes it concerns alone. Needs a device;
//! skipped without one.
#![expect(clippy::print_stderr, reason = "figures go to the terminal")]

mod common;

use infernix_artifact::Artifact;
use infernix_engine::backend::cuda::{Cuda, CudaOptions, Placement};
use infernix_engine::backend::{ActivationPolicy, CallKind};
use infernix_engine::driver::{Driver, DriverOptions, LaneInput, Want};
use infernix_engine::model::{ArtifactSource, LoadOptions, load};
use infernix_engine::ngram::{NgramOptions, open_ngram};
use infernix_engine::numerics::round::mix;
use infernix_engine::state::KvFormat;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Host memory for the 96 experts that a layer of the demo and its promotions need at a time, of 32 a layer in 8 layers and a drafter.
const SLOTS: usize = 104;

fn demo() -> Option<(PathBuf, Option<tempfile::TempDir>)> {
    if !infernix_cuda::driver_present() || infernix_cuda::embedded_targets().is_empty() {
        eprintln!("skipped: no CUDA driver, or a build without kernels");
        return None;
    }
    if let Some(folder) = std::env::var_os("INFERNIX_CUDA_MODELS") {
        return Some((PathBuf::from(folder).join("flash-demo-nvfp4.infernix"), None));
    }
    let folder = tempfile::tempdir().unwrap();
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/flash-demo-nvfp4");
    drop(common::converted(&demo, folder.path()));
    Some((folder.path().join("model.infernix"), Some(folder)))
}

fn driver(
    a: &Arc<Artifact>,
    activations: ActivationPolicy,
    placement: Placement,
    expert_ram: usize,
) -> Driver<Cuda> {
    let backend = Cuda::new(CudaOptions { placement, expert_ram, ..CudaOptions::default() }).unwrap();
    let options = LoadOptions { activations, ..LoadOptions::default() };
    let model = load(backend, &ArtifactSource::new(a.clone()).unwrap(), options).unwrap();
    let ngram = open_ngram(a, None, NgramOptions { threads: 2, cache_bytes: 1 << 20 }).unwrap();
    let options = DriverOptions { tokens: 2048, sequences: 2, kv: KvFormat::Bf16 };
    Driver::new(model, ngram.map(|n| n.0), options).unwrap()
}

fn bits(v: &[f32]) -> Vec<u32> {
    v.iter().map(|v| v.to_bits()).collect()
}

#[test]
fn experts_on_disk_give_the_same_bits_and_a_read_error_fails_its_lanes_alone() {
    let Some((path, _keep)) = demo() else { return };
    let a = Arc::new(Artifact::open(&path).unwrap());
    // Exact experts, and the same records with 16-bit activations.
    for activations in [ActivationPolicy::Artifact, ActivationPolicy::A16] {
        from_disk(&a, activations);
    }
}

fn from_disk(a: &Arc<Artifact>, activations: ActivationPolicy) {
    let driver = |placement, ram| driver(a, activations, placement, ram);
    let mut resident = driver(Placement::Auto, 0);
    let vocab = resident.model.config.vocab.min(4000);
    let text = |seed: u64, n: u64| -> Vec<u32> {
        (0..n).map(|i| (mix(seed * 1_000_003 + i) % vocab) as u32).collect()
    };
    let (one, other) = (text(5, 260), text(6, 260));
    let run = |d: &mut Driver<Cuda>, from: usize| -> Vec<Vec<u32>> {
        let mut s = d.open(7).unwrap();
        d.prefill(&mut s, &one[..from], Want::None).unwrap();
        let rows = one[from..from + 60].iter().map(|id| bits(&d.decode(&mut s, *id).unwrap())).collect();
        d.close(s);
        rows
    };
    // A few rows of a prompt look experts up as decode rounds do; more stream a layer at a time.
    let (few, many) = (run(&mut resident, 20), run(&mut resident, 200));
    let record = resident.model.backend.expert_frames().1;
    let ram = SLOTS * (record + 2 * 4096).next_multiple_of(4096);
    for placement in [Placement::Host, Placement::Frames(24)] {
        let mut d = driver(placement, ram);
        assert!(run(&mut d, 20) == few, "{placement:?}: short prompt");
        let counts = d.model.backend.take_tier_counts();
        eprintln!("{placement:?}: {counts:?}");
        assert!(counts.disk_reads > 0, "{placement:?}: nothing was read from disk");
        assert!(run(&mut d, 200) == many, "{placement:?}: long prompt");
        assert!(d.model.backend.take_tier_counts().streamed > 0, "{placement:?}: nothing was streamed");
    }

    // Two lanes; reads of one expert of the first layer fail.
    let mut d = driver(Placement::Host, ram);
    let lanes_of = |d: &mut Driver<Cuda>, expert: Option<usize>| {
        let mut open = [d.open(0).unwrap(), d.open(7).unwrap()];
        for (s, t) in open.iter_mut().zip([&other, &one]) {
            d.prefill(s, &t[..100], Want::None).unwrap();
        }
        d.model.backend.break_expert(0, expert);
        let [x, y] = &mut open;
        let mut lanes = [
            LaneInput { sequence: x, ids: &other[100..101], want: Want::All },
            LaneInput { sequence: y, ids: &one[100..101], want: Want::All },
        ];
        let out = d.run_lanes(CallKind::Decode, &mut lanes).unwrap();
        d.model.backend.break_expert(0, None);
        for (s, out) in open.into_iter().zip(&out) {
            let mut s = s;
            if out.is_ok() {
                d.commit(&mut s, 1).unwrap();
            }
            d.close(s);
        }
        out
    };
    let whole: Vec<Vec<u32>> =
        lanes_of(&mut d, None).into_iter().map(|l| bits(&l.unwrap().logits[0])).collect();
    let mut alone = 0;
    for expert in 0..32 {
        let out = lanes_of(&mut d, Some(expert));
        let failed = out.iter().filter(|l| l.is_err()).count();
        for (lane, want) in out.into_iter().zip(&whole) {
            match lane {
                Ok(l) => {
                    assert!(bits(&l.logits[0]) == *want, "expert {expert}: a lane beside the failed one")
                }
                Err(what) => assert!(what.contains("a read error was asked for"), "{what}"),
            }
        }
        alone += usize::from(failed == 1);
    }
    eprintln!("{alone} of 32 experts failed one lane of two");
    assert!(alone > 0, "no read error was met by one lane alone");
    // And the next round has all its experts again.
    let again: Vec<Vec<u32>> =
        lanes_of(&mut d, None).into_iter().map(|l| bits(&l.unwrap().logits[0])).collect();
    assert!(again == whole);
}
