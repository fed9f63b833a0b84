//! Loading: every binding used exactly once, nothing read that was not asked for, failures that name their cause.

mod common;

use common::*;
use infernix_engine::EngineError;
use infernix_engine::backend::WeightData;
use infernix_engine::backend::lossless::{Lossless, LosslessOptions};
use infernix_engine::driver::{Driver, DriverOptions, Want};
use infernix_engine::model::{LoadOptions, MemorySource, WeightSource, load};
use infernix_engine::ngram::{Ngram, NgramOptions, RowSource};
use infernix_model::{Component, ModelConfig};
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

fn dense() -> Option<MemorySource> {
    Some(plain_checkpoint(&shared("models/dense-demo-bf16")?).0)
}

fn try_load(source: &dyn WeightSource, drafter: bool) -> Result<(), EngineError> {
    let options = LoadOptions { drafter, ..LoadOptions::default() };
    load(Lossless::new(LosslessOptions::default()), source, options).map(|_| ())
}

/// Notes which weights are read.
struct Spy(MemorySource, Mutex<Vec<String>>);

impl WeightSource for Spy {
    fn config(&self) -> &ModelConfig {
        &self.0.config
    }
    fn has_component(&self, component: Component) -> bool {
        self.0.has_component(component)
    }
    fn names(&self) -> Vec<String> {
        self.0.names()
    }
    fn contains(&self, name: &str) -> bool {
        self.0.contains(name)
    }
    fn weight(&self, name: &str) -> Result<WeightData, EngineError> {
        self.1.lock().unwrap().push(name.to_owned());
        self.0.weight(name)
    }
}

#[test]
fn a_component_that_is_not_asked_for_is_not_read() {
    let Some(source) = dense() else { return };
    let spy = Spy(source, Mutex::default());
    try_load(&spy, false).unwrap();
    let read = std::mem::take(&mut *spy.1.lock().unwrap());
    assert!(!read.is_empty() && read.iter().all(|n| n.starts_with("text/")), "{read:?}");
    try_load(&spy, true).unwrap();
    assert!(spy.1.lock().unwrap().iter().any(|n| n.starts_with("mtp/")));
}

#[test]
fn a_missing_a_surplus_and_a_misshapen_binding_are_named() {
    let Some(mut source) = dense() else { return };
    let norm = source.weights.remove("text/layers/2/gdn/norm").unwrap();
    let message = try_load(&source, false).unwrap_err().to_string();
    assert!(message.contains("text/layers/2/gdn/norm") && message.contains("missing"), "{message}");
    source.weights.insert("text/layers/2/gdn/norm".into(), norm.clone());
    source.weights.insert("text/layers/2/gdn/spare".into(), norm.clone());
    source.weights.insert("mtp/spare".into(), norm.clone());
    let message = try_load(&source, false).unwrap_err().to_string();
    assert!(message.contains("text/layers/2/gdn/spare") && !message.contains("mtp/spare"), "{message}");
    let message = try_load(&source, true).unwrap_err().to_string();
    assert!(message.contains("mtp/spare"), "{message}");
    source.weights.remove("text/layers/2/gdn/spare");
    source.weights.insert("text/norm".into(), norm);
    let message = try_load(&source, false).unwrap_err().to_string();
    assert!(message.contains("text/norm") && message.contains("expected"), "{message}");
}

#[test]
fn bytes_of_another_length_are_refused_at_load() {
    let Some(mut source) = dense() else { return };
    let w = source.weights.get_mut("text/layers/0/mlp/up").unwrap();
    let bytes = (*w.parts[0].bytes).as_ref().to_vec();
    w.parts[0].bytes = Arc::new(bytes[..bytes.len() - 2].to_vec());
    let message = try_load(&source, false).unwrap_err().to_string();
    assert!(message.contains("text/layers/0/mlp/up"), "{message}");
}

#[test]
fn tokens_past_the_last_position_are_refused_and_the_sequence_lives_on() {
    let Some(mut source) = dense() else { return };
    source.config.max_positions = 40;
    let model = load(Lossless::new(LosslessOptions::default()), &source, LoadOptions::default()).unwrap();
    let mut d = Driver::new(model, None, DriverOptions::default()).unwrap();
    let mut s = d.open(0).unwrap();
    d.prefill(&mut s, &[1; 38], Want::None).unwrap();
    let free = d.free_pages();
    for refused in [d.prefill(&mut s, &[1; 3], Want::Last).err(), d.verify(&mut s, &[1; 3]).err()] {
        let message = refused.unwrap().to_string();
        assert!(message.contains("41 tokens") && message.contains("40 positions"), "{message}");
    }
    assert_eq!((s.len(), d.free_pages()), (38, free));
    d.prefill(&mut s, &[1; 1], Want::Last).unwrap();
    d.decode(&mut s, 1).unwrap();
    let message = d.decode(&mut s, 1).unwrap_err().to_string();
    assert!(message.contains("41 tokens"), "{message}");
}

/// A table whose disk fails from some read on, until it is mended.
struct Flaky {
    width: usize,
    values: Vec<f32>,
    left: Arc<AtomicU64>,
}

impl RowSource for Flaky {
    fn width(&self) -> usize {
        self.width
    }
    fn rows(&self) -> u64 {
        (self.values.len() / self.width) as u64
    }
    fn read(&self, row: u64, out: &mut [f32]) -> Result<(), String> {
        if self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1)).is_err() {
            return Err("injected read error".into());
        }
        out.copy_from_slice(&self.values[row as usize * self.width..][..self.width]);
        Ok(())
    }
}

#[test]
fn a_table_read_error_fails_the_round_and_the_next_one_works() {
    let Some(path) = shared("models/flash-demo-bf16") else { return };
    let (source, table) = plain_checkpoint(&path);
    let table = table.unwrap();
    let mut values = vec![0f32; table.rows() as usize * table.width()];
    values.chunks_exact_mut(table.width()).enumerate().for_each(|(r, o)| table.read(r as u64, o).unwrap());
    let left = Arc::new(AtomicU64::new(u64::MAX));
    let flaky = Flaky { width: table.width(), values, left: left.clone() };
    let model = load(Lossless::new(LosslessOptions::default()), &source, LoadOptions::default()).unwrap();
    let options = NgramOptions { threads: 2, cache_bytes: 0 };
    let ngram =
        Ngram::new(source.config.ple.as_ref().unwrap(), source.config.vocab, Box::new(flaky), options)
            .unwrap();
    let mut d = Driver::new(model, Some(ngram), DriverOptions::default()).unwrap();
    let ids: Vec<u32> = (0..40).map(|i| i * 37 % 4000).collect();
    let mut s = d.open(0).unwrap();
    d.prefill(&mut s, &ids[..20], Want::None).unwrap();
    let snapshot = d.snapshot(&mut s).unwrap();
    left.store(3, Ordering::Relaxed);
    let message = d.prefill(&mut s, &ids[20..], Want::Last).unwrap_err().to_string();
    assert!(message.contains("injected read error"), "{message}");
    left.store(u64::MAX, Ordering::Relaxed);
    d.restore(&mut s, &snapshot).unwrap();
    let again = d.prefill(&mut s, &ids[20..], Want::Last).unwrap().logits;
    d.close(s);
    let mut s = d.open(0).unwrap();
    assert_eq!(again, d.prefill(&mut s, &ids, Want::Last).unwrap().logits);
}
