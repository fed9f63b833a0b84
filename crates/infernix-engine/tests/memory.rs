//! What loading adds to memory. Alone in its file: other tests of a process would be counted too.
#![expect(clippy::print_stderr, reason = "figures go to the terminal")]

mod common;

use common::*;
use infernix_engine::backend::cpu::{CpuBackend, CpuOptions};
use infernix_engine::driver::{Driver, DriverOptions, Want};
use infernix_engine::model::{ArtifactSource, LoadOptions, load};
use infernix_engine::ngram::{NgramOptions, open_ngram};
use infernix_engine::state::KvFormat;

/// Bytes of this process that no file backs.
fn anonymous() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix("Anonymous:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? << 10)
}

/// Bytes that the CPU backend may copy or decode when it takes weights: it repacks nothing, and decodes vectors on use.
const REPACK_BUDGET: u64 = 0;
/// Names, shapes and plane offsets of all weights; vectors as FP32 once they are used; buffers of a round.
const BOOKKEEPING: u64 = 3 << 20;

#[test]
fn loading_copies_no_mapped_weight() {
    // What was measured stays: memory that it gave back would hide copies of the next one.
    let mut kept = Vec::new();
    for name in ["flash-demo-bf16", "flash-demo-nvfp4"] {
        let Some(path) = shared(&format!("models/{name}")) else { return };
        let folder = tempfile::tempdir().unwrap();
        let artifact = converted(&path, folder.path());
        let Some(before) = anonymous() else {
            eprintln!("skipped: this system does not say what memory is anonymous");
            return;
        };
        let source = ArtifactSource::new(artifact.clone()).unwrap();
        let backend = CpuBackend::new(CpuOptions { threads: 1, ..CpuOptions::default() });
        let options = LoadOptions { drafter: true, ..LoadOptions::default() };
        let model = load(backend, &source, options).unwrap();
        let loaded = anonymous().unwrap().saturating_sub(before);
        let ngram = open_ngram(&artifact, None, NgramOptions { threads: 1, cache_bytes: 1 << 16 }).unwrap();
        let state = DriverOptions { tokens: 128, sequences: 1, kv: KvFormat::Bf16 };
        let mut d = Driver::new(model, ngram.map(|n| n.0), state).unwrap();
        let mut s = d.open(0).unwrap();
        d.prefill(&mut s, &[1, 2, 3], Want::Last).unwrap();
        for id in 0..4 {
            d.decode(&mut s, id).unwrap();
        }
        let used = anonymous().unwrap().saturating_sub(before);
        let weights: u64 = artifact.directory().objects.iter().map(|o| o.bytes).sum();
        eprintln!(
            "{name}, {weights} bytes of weights: {loaded} more anonymous bytes once loaded, {used} once used"
        );
        assert!(weights > 8 * BOOKKEEPING, "{name} is too small to tell");
        assert!(loaded <= REPACK_BUDGET + BOOKKEEPING, "{name}: {loaded} bytes at load");
        // With KV pages, recurrent state and its record, and decoded vectors.
        assert!(used <= REPACK_BUDGET + 4 * BOOKKEEPING, "{name}: {used} bytes in use");
        kept.push((d, folder));
    }
}
