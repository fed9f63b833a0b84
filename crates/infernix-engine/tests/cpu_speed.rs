//! Prompt and decode rates of the CPU backend; run with
//! `cargo test --release -p infernix-engine --test cpu_speed -- --ignored --nocapture --test-threads 1`.
//! `CPU_THREADS` (default 2); with 1, time is the thread's own processor time, steady on a busy machine.
#![expect(clippy::print_stderr, reason = "figures go to the terminal")]

mod common;

use common::*;
use infernix_engine::backend::cpu::{CpuBackend, CpuOptions, pool::Pool};
use infernix_engine::backend::{WeightData, WeightPart};
use infernix_engine::driver::{Driver, DriverOptions, Want};
use infernix_engine::model::{LoadOptions, MemorySource, load};
use infernix_engine::ngram::{Ngram, NgramOptions};
use infernix_formats::{Format, Layout, encoded_size};
use infernix_model::{Component, ModelConfig, parameters};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

fn threads() -> usize {
    std::env::var("CPU_THREADS").ok().and_then(|v| v.parse().ok()).unwrap_or(2)
}

/// A `qwen3_5` model of about 0.6 billion parameters with random words in `format`, and the bytes that a token reads.
fn synthetic(config: &serde_json::Value, format: Format) -> (MemorySource, usize) {
    let mut json = config.clone();
    json.as_object_mut().unwrap().retain(|k, _| !k.starts_with("vision"));
    let text =
        if json.get("text_config").is_some() { json.get_mut("text_config").unwrap() } else { &mut json };
    for (key, value) in [
        ("hidden_size", 1024),
        ("num_hidden_layers", 24),
        ("intermediate_size", 3584),
        ("vocab_size", 65_536),
        ("num_attention_heads", 8),
        ("num_key_value_heads", 2),
        ("head_dim", 256),
        ("linear_num_key_heads", 16),
        ("linear_num_value_heads", 16),
        ("linear_key_head_dim", 128),
        ("linear_value_head_dim", 128),
        ("mtp_num_hidden_layers", 0),
    ] {
        text[key] = serde_json::json!(value);
    }
    let kinds: Vec<&str> =
        (1..=24).map(|i| if i % 4 == 0 { "full_attention" } else { "linear_attention" }).collect();
    text["layer_types"] = serde_json::json!(kinds);
    let config = ModelConfig::from_json(&json).unwrap();
    let mut weights = BTreeMap::new();
    let mut read = 0;
    let mut seed = 1u64;
    for p in parameters(&config, &infernix_model::source_prefix(|_| false), &[Component::Text]) {
        let matrix = p.shape.len() == 2 && p.shape[1] >= 128;
        let (format, layout) =
            if matrix { (format, Layout::RowSplitK128V1) } else { (Format::Bf16, Layout::ContiguousLeV1) };
        let len = encoded_size(layout, format, &p.shape).unwrap() as usize;
        let mut bytes = vec![0u8; len];
        if matrix {
            let planes = infernix_formats::planes(layout, format, &p.shape).unwrap();
            for b in &mut bytes[..planes[0].bytes as usize] {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                *b = (seed >> 40) as u8 & 0x77;
            }
            // About 1 / sqrt(K) over the spread of the codes.
            let scale = 0.25 / (p.shape[1] as f32).sqrt() / if format == Format::Q8G32 { 16.0 } else { 1.0 };
            let word = half::f16::from_f32(scale).to_le_bytes();
            let last = planes.last().unwrap();
            bytes[last.offset as usize..].chunks_exact_mut(2).for_each(|w| w.copy_from_slice(&word));
            if !p.name.ends_with("embed") {
                read += len;
            }
        }
        let rows = if p.shape.len() < 2 { 1 } else { p.shape[..p.shape.len() - 1].iter().product() };
        let part = WeightPart {
            format,
            layout,
            shape: p.shape.clone(),
            bytes: Arc::new(bytes),
            file: None,
            rows: 0..rows,
        };
        weights.insert(p.name.clone(), WeightData { shape: p.shape.clone(), parts: vec![part] });
    }
    (MemorySource { config, weights, expert_activation: 16 }, read)
}

fn driver(source: &MemorySource, table: Option<infernix_engine::ngram::MemoryRows>) -> Driver<CpuBackend> {
    let backend = CpuBackend::new(CpuOptions { threads: threads(), ..CpuOptions::default() });
    let options = LoadOptions::default();
    let model = load(backend, source, options).unwrap();
    let ngram = table.map(|t| {
        let ple = model.config.ple.clone().unwrap();
        Ngram::new(&ple, model.config.vocab, Box::new(t), NgramOptions { threads: 0, cache_bytes: 0 })
            .unwrap()
    });
    Driver::new(model, ngram, DriverOptions { tokens: 1024, ..DriverOptions::default() }).unwrap()
}

/// Seconds on a processor, of this thread alone: with one thread, a clock that others on the machine do not turn.
fn own_time() -> f64 {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    stat.split_whitespace().next().and_then(|v| v.parse::<f64>().ok()).unwrap_or(0.0) / 1e9
}

fn clock() -> f64 {
    static START: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
    let wall = START.get_or_init(Instant::now).elapsed().as_secs_f64();
    if threads() == 1 { own_time() } else { wall }
}

/// Best of some passes: prompt tokens a second over 512, decoded tokens a second over 64.
fn rates(d: &mut Driver<CpuBackend>) -> (f64, f64) {
    let ids: Vec<u32> = (0..512u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 7) % 4000).collect();
    let (mut prompt, mut decode) = (0f64, 0f64);
    for _ in 0..5 {
        let mut s = d.open(0).unwrap();
        let t = clock();
        d.prefill(&mut s, &ids, Want::Last).unwrap();
        prompt = prompt.max(512.0 / (clock() - t));
        let t = clock();
        for id in &ids[..64] {
            d.verify(&mut s, &[*id]).unwrap();
            d.commit(&mut s, 1).unwrap();
        }
        decode = decode.max(64.0 / (clock() - t));
        d.close(s);
    }
    (prompt, decode)
}

fn bandwidth() -> f64 {
    let pool = Pool::new(threads());
    let data = vec![1u64; 1 << 27];
    let mut best = 0f64;
    for _ in 0..6 {
        let sum = std::sync::atomic::AtomicU64::new(0);
        let t = Instant::now();
        pool.chunks(data.len(), 1 << 17, |r| {
            let s = data[r].iter().fold(0u64, |a, v| a.wrapping_add(*v));
            sum.fetch_add(s, std::sync::atomic::Ordering::Relaxed);
        });
        std::hint::black_box(sum.into_inner());
        best = best.max((1u64 << 30) as f64 / t.elapsed().as_secs_f64());
    }
    best
}

#[test]
#[ignore = "a measurement"]
fn demo_models() {
    for name in ["models/flash-demo-bf16", "models/dense-demo-bf16"] {
        let Some(path) = shared(name) else { return };
        let (source, table) = plain_checkpoint(&path);
        let (prompt, decode) = rates(&mut driver(&source, table));
        eprintln!("{name}: prompt {prompt:.0} tok/s, decode {decode:.0} tok/s");
    }
}

#[test]
#[ignore = "a measurement"]
fn synthetic_model() {
    let Some(path) = shared("models/dense-demo-bf16/config.json") else { return };
    let json: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let limit = bandwidth();
    for format in [Format::Q4G64, Format::Q8G32] {
        let (source, read) = synthetic(&json, format);
        let (prompt, decode) = rates(&mut driver(&source, None));
        eprintln!(
            "{format}: {:.2} GB a token, prompt {prompt:.0} tok/s, decode {decode:.1} tok/s = {:.1} GB/s, {:.0} % of {:.1}",
            read as f64 / 1e9,
            decode * read as f64 / 1e9,
            100.0 * decode * read as f64 / limit,
            limit / 1e9
        );
    }
}
