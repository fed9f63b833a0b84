//! Throughput of a synthetic model on a CUDA device, without the rest of the program:
//! `throughput GEOMETRY BUDGET_MIB PROMPT GENERATE REPETITIONS CHUNK [--depth N] [--profile FILE] [--layers N] [--window N] [--workers N] [--lend 0|1] [--costs]
//! [--experts FORMAT] [--a16]`.
//! One JSON document; `infernix bench` measures the same way.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program")]

use infernix_engine::EngineError;
use infernix_engine::backend::ActivationPolicy;
use infernix_engine::backend::cuda::{Cuda, CudaOptions, Routing};
use infernix_engine::driver::{Driver, DriverOptions, Want, argmax};
use infernix_engine::model::{LoadOptions, load};
use infernix_engine::numerics::round::mix;
use infernix_engine::synthetic::{EXPERT_FORMATS, Geometry, build};
use serde_json::{Value, json};
use std::time::Instant;

fn main() {
    match run() {
        Ok(v) => println!("{v:#}"),
        Err(e) => {
            eprintln!("{e}");
            std::process::exit(1);
        }
    }
}

fn run() -> Result<Value, EngineError> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let usage = || EngineError::Request("see the head of this file".into());
    let number = |i: usize| args.get(i).and_then(|v| v.parse::<usize>().ok()).ok_or_else(usage);
    let flag = |name: &str| args.iter().position(|a| a == name).and_then(|i| args.get(i + 1));
    let count = |name: &str| flag(name).and_then(|v| v.parse::<usize>().ok()).unwrap_or(0);
    let geometry = args.first().and_then(|n| Geometry::find(n)).ok_or_else(usage)?;
    let geometry =
        if count("--layers") > 0 { geometry.with_layers(count("--layers") as u64) } else { geometry };
    let experts = flag("--experts")
        .map(|f| EXPERT_FORMATS.into_iter().find(|e| e.name().starts_with(f.as_str())).ok_or_else(usage));
    let geometry = experts.transpose()?.map_or(geometry, |f| geometry.with_experts(f));
    let a16 = args.iter().any(|a| a == "--a16");
    let activations = if a16 { ActivationPolicy::A16 } else { ActivationPolicy::Artifact };
    let (budget, prompt, generate) = (number(1)?, number(2)?, number(3)?);
    let (repetitions, chunk, depth) = (number(4)?, number(5)?.max(1), count("--depth"));
    let profile = flag("--profile");

    let clock = Instant::now();
    let source = build(&geometry, geometry.format, 42)?;
    let built = clock.elapsed().as_secs_f64();
    let routing = Some(Routing { s: 1.2, repeat: 0.0, seed: 42 });
    let window = if count("--window") > 0 { count("--window") } else { CudaOptions::default().window };
    let options = CudaOptions {
        budget: budget << 20,
        routing,
        profile: profile.is_some(),
        prompt_rows: chunk,
        window,
        workers: flag("--workers").and_then(|v| v.parse().ok()),
        lend: flag("--lend").map(|v| v != "0"),
        ..CudaOptions::default()
    };
    let backend = Cuda::new(options)?;
    let rate = backend.copy_rate()?;
    let model = load(backend, &source, LoadOptions { activations, ..LoadOptions::default() })?;
    let options = DriverOptions { tokens: depth + prompt + generate + 64, ..DriverOptions::default() };
    let mut d = Driver::new(model, geometry.ngram()?, options)?;
    let loaded = clock.elapsed().as_secs_f64();
    eprintln!("built {built:.1} s, loaded {loaded:.1} s, {:?}", d.model.backend.ledger().lines());

    let vocab = d.model.config.vocab;
    let ids = |n: usize, seed: u64| -> Vec<u32> {
        (0..n as u64).map(|i| (mix(seed << 40 ^ i) % vocab) as u32).collect()
    };
    let mut s = d.open(0)?;
    let clock = Instant::now();
    for piece in ids(depth, 9).chunks(chunk) {
        d.prefill(&mut s, piece, Want::None)?;
    }
    let depth_seconds = clock.elapsed().as_secs_f64();
    let start = d.snapshot(&mut s)?;
    let (mut prompts, mut generations, mut counts) = (Vec::new(), Vec::new(), Vec::new());
    for n in 0..=repetitions {
        d.restore(&mut s, &start)?;
        d.model.backend.take_tier_counts();
        let clock = Instant::now();
        let text = ids(prompt, n as u64);
        let mut logits = Vec::new();
        let pieces = text.chunks(chunk).count();
        for (i, piece) in text.chunks(chunk).enumerate() {
            let want = if i + 1 == pieces { Want::Last } else { Want::None };
            logits = d.prefill(&mut s, piece, want)?.logits;
        }
        let prompt_seconds = clock.elapsed().as_secs_f64();
        let streamed = d.model.backend.take_tier_counts();
        let mut id = logits.first().map_or(1, |l| argmax(l));
        let clock = Instant::now();
        let mut quarters = Vec::new();
        for i in 0..generate {
            id = argmax(&d.decode(&mut s, id)?);
            if (i + 1) % generate.div_ceil(4) == 0 || i + 1 == generate {
                quarters.push(clock.elapsed().as_secs_f64() * 1e3);
            }
        }
        let decode_seconds = clock.elapsed().as_secs_f64();
        let c = d.model.backend.take_tier_counts();
        // The first run warms up: plans, graphs, frames.
        if n == 0 && repetitions > 0 {
            continue;
        }
        let record = d.model.backend.expert_frames().1 as u64;
        prompts.push(prompt as f64 / prompt_seconds);
        generations.push(generate as f64 / decode_seconds);
        counts.push(json!({
            "hit_rate": (c.picks > 0).then(|| 1.0 - c.misses as f64 / c.picks as f64),
            "decode_miss_records": c.miss_records, "decode_cpu_records": c.cpu_records,
            "decode_cpu_share": (c.miss_records > 0).then(|| c.cpu_records as f64 / c.miss_records as f64),
            "promoted": c.promotions, "streamed": streamed.streamed,
            "prompt_link_gb": (streamed.streamed * record) as f64 / 1e9,
            "decode_link_mb_a_token":
                ((c.miss_records.saturating_sub(c.cpu_records) + c.promotions) * record) as f64 / 1e6 / generate.max(1) as f64,
            "decode_ms_after_each_quarter": quarters,
            "prompt_seconds": prompt_seconds, "decode_ms_a_token": decode_seconds * 1e3 / generate.max(1) as f64,
        }));
    }
    let mut costs = Value::Null;
    if args.iter().any(|a| a == "--costs") {
        let c = d.model.backend.round_costs()?;
        let kinds = c.kinds.iter().map(|k| {
            json!({
                "op": format!("{:?}", k.op), "kernel": k.kernel, "blocks": k.blocks, "count": k.count, "us_left_out": k.gain,
                "us_alone": k.alone, "us_left_out_all": k.gain * k.count as f64,
            })
        });
        costs = json!({"launches": c.launches, "graph_us": c.round, "kinds": kinds.collect::<Vec<_>>()});
    }
    let b = &d.model.backend;
    let mut parts = Value::Null;
    if let (Some(path), Some(p)) = (profile, b.profile()) {
        let _ = std::fs::write(path, p.trace().to_string());
        let totals =
            |decode| -> Value { p.totals(decode).into_iter().map(|(k, v)| (k, json!(v.round()))).collect() };
        parts = json!({"prompt_round_us": totals(false), "decode_round_us": totals(true)});
    }
    let workers = b.worker_rates().map(|r| {
        json!({
            "threads": r.threads, "post_us": r.post_seconds * 1e6, "expert_us": r.expert_seconds * 1e6,
            "link_us": r.link_seconds * 1e6, "split": r.split,
        })
    });
    let ledger: Value = b.ledger().lines().into_iter().map(|(k, v)| (k, json!(v))).collect();
    let command: Vec<_> = args.iter().map(|a| a.rsplit('/').next().unwrap_or(a)).collect();
    Ok(json!({
        "kind": "throughput", "command": format!("throughput {}", command.join(" ")), "synthetic": true,
        "device": b.device_name(), "copy_bytes_per_second": rate, "build_seconds": built, "load_seconds": loaded,
        "memory_mib": ledger, "expert_frames": b.expert_frames().0, "lent_frames": b.lent_frames(), "workers": workers,
        "expert_record_bytes": b.expert_frames().1,
        "prompt": prompt, "generate": generate, "depth": depth, "depth_seconds": depth_seconds,
        "chunk": chunk, "window": window,
        "prompt_tok_s": prompts, "decode_tok_s": generations, "experts": counts, "parts": parts,
        "decode_round_costs": costs,
    }))
}
