//! Same inputs, same bytes: whatever the threads, and however often the run was killed.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::common::{converted, demo, options, run};
use infernix_artifact::{Faults, Interrupt};
use infernix_convert::{
    ConvertError, ConvertOptions, NgramTarget, Outcome, Progress, RunOptions, Silent, convert, plan,
};

const EXACT: &str = "qwen3_8_flash_next_nvfp4";

/// Every file of a folder but reports and checksums, which hold times.
fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut out = BTreeMap::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        if !name.ends_with(".conversion.json") && name != "SHA256SUMS" {
            assert!(entry.path().is_file(), "{name} is left over");
            out.insert(name, std::fs::read(entry.path()).unwrap());
        }
    }
    out
}

fn made(change: impl FnOnce(&mut ConvertOptions)) -> BTreeMap<String, Vec<u8>> {
    let dir = tempfile::tempdir().unwrap();
    let mut o = options(&demo(), EXACT, &dir.path().join("x.infernix"));
    o.max_file_bytes = 8_000_000;
    change(&mut o);
    converted(&o).unwrap();
    files(dir.path())
}

#[test]
fn threads_do_not_change_a_byte() {
    let first = made(|_| {});
    assert!(first.len() >= 4, "{:?}", first.keys());
    assert!(first == made(|_| {}), "two runs");
    for threads in [1, 3, 7] {
        assert!(first == made(|o| o.threads = threads), "{threads} threads");
    }
}

fn attempt(o: &ConvertOptions, run: &RunOptions) -> Result<Outcome, ConvertError> {
    convert(&plan(o)?, &Silent, run)
}

#[test]
fn killed_anywhere_and_resumed_gives_the_same_files() {
    let whole = made(|_| {});
    let faults = Faults::after(u64::MAX);
    let dir = tempfile::tempdir().unwrap();
    let mut o = options(&demo(), EXACT, &dir.path().join("x.infernix"));
    o.max_file_bytes = 8_000_000;
    attempt(&o, &RunOptions { faults: Some(faults.clone()), ..run() }).unwrap();
    let operations = faults.operations();
    assert!(operations > 40);
    let mut resumed = 0;
    // 24 points over the run, the last ones within publication.
    for i in 0..24u64 {
        let at = if i < 16 { operations * i / 16 } else { operations - 1 - (i - 16) };
        let dir = tempfile::tempdir().unwrap();
        let mut o = options(&demo(), EXACT, &dir.path().join("x.infernix"));
        o.max_file_bytes = 8_000_000;
        let killed = attempt(&o, &RunOptions { faults: Some(Faults::after(at)), ..run() });
        if killed.is_ok() {
            // Removing the state is the last thing; a set is complete before.
            assert!(at + 8 > operations, "operation {at} of {operations} did not matter");
            continue;
        }
        o.resume = true;
        let mut outcome = attempt(&o, &run());
        if let Err(e) = &outcome {
            panic!("resume after operation {at} of {operations}: {e}");
        }
        resumed += outcome.as_mut().map_or(0, |o| o.resumed_bytes);
        assert!(whole == files(dir.path()), "killed at operation {at} of {operations}");
    }
    assert!(resumed > 0, "finished work was used");
}

/// Interrupts after so many bytes.
struct StopAfter(AtomicU64, Arc<AtomicBool>);

impl Progress for StopAfter {
    fn advance(&self, bytes: u64) {
        let left = self.0.load(Ordering::SeqCst).saturating_sub(bytes);
        self.0.store(left, Ordering::SeqCst);
        if left == 0 {
            self.1.store(true, Ordering::SeqCst);
        }
    }
}

#[test]
fn an_interruption_keeps_state_and_names_the_ways_on() {
    let whole = made(|_| {});
    let dir = tempfile::tempdir().unwrap();
    let mut o = options(&demo(), EXACT, &dir.path().join("x.infernix"));
    o.max_file_bytes = 8_000_000;
    for bytes in [1, 3_000_000, 9_000_000, 15_000_000] {
        let flag = Arc::new(AtomicBool::new(false));
        let stop = StopAfter(AtomicU64::new(bytes), flag.clone());
        let options = RunOptions { interrupt: Interrupt::new(flag), ..run() };
        let e = convert(&plan(&o).unwrap(), &stop, &options).unwrap_err();
        assert!(e.is_interrupted(), "{e}");
        o.resume = true;
    }
    o.resume = false;
    let e = attempt(&o, &run()).unwrap_err().to_string();
    assert!(e.contains("--resume") && e.contains("clean"), "{e}");
    // Another recipe cannot continue it.
    let mut other = options(&demo(), "auto", &o.output);
    other.resume = true;
    other.max_file_bytes = o.max_file_bytes;
    let e = attempt(&other, &run()).unwrap_err().to_string();
    assert!(e.contains("recipe"), "{e}");
    o.resume = true;
    let done = attempt(&o, &run()).unwrap();
    assert!(!done.complete);
    assert!(whole == files(dir.path()));
    // Resuming what is finished says so.
    let again = attempt(&o, &run()).unwrap();
    assert!(again.complete && again.digest == done.digest && again.artifact_id == done.artifact_id);
}

#[test]
fn a_volume_can_be_reused_and_a_foreign_one_cannot() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (dir.path().join("a.infernix"), dir.path().join("b.infernix"));
    let (_, first) = converted(&options(&demo(), EXACT, &a)).unwrap();
    let volume = first.volume.unwrap();
    let mut o = options(&demo(), EXACT, &b);
    o.ngram = NgramTarget::Reuse(volume.clone());
    let (_, second) = converted(&o).unwrap();
    assert_eq!(first.digest, second.digest);
    assert!(!dir.path().join("b.infernix.ngram").exists());
    // Other rows are refused before anything is written.
    let c = dir.path().join("c.infernix");
    let other = dir.path().join("other.ngram");
    let mut bytes = std::fs::read(&volume).unwrap();
    bytes[4096] ^= 1;
    std::fs::write(&other, bytes).unwrap();
    let mut o = options(&demo(), EXACT, &c);
    o.ngram = NgramTarget::Reuse(other);
    let e = converted(&o).unwrap_err().to_string();
    assert!(e.contains("row 0"), "{e}");
    assert!(!infernix_artifact::state_folder(&c).exists());
}
