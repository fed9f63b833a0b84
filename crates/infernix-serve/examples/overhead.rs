//! What HTTP costs: the same requests given to an engine directly and through the server in front of it, in turns, in
//! one process and over one engine. `overhead [GEOMETRY] [LANES] [PROMPT] [TOKENS] [ROUNDS]`; a synthetic model on the
//! CPU, one JSON document.
#![expect(clippy::print_stdout, reason = "a program")]

use infernix_engine::backend::cpu::{CpuBackend, CpuOptions};
use infernix_engine::driver::{Driver, DriverOptions};
use infernix_engine::model::{LoadOptions, load};
use infernix_engine::numerics::round::mix;
use infernix_engine::sample::SamplerOptions;
use infernix_engine::sched::{
    CacheHints, Engine, EngineApi, EngineOptions, Event, Request, SpecMode, SpecOptions,
};
use infernix_engine::synthetic::{Geometry, build};
use infernix_serve::{App, ModelInfo, ServeOptions, serve};
use infernix_text::{ChatFormat, Resources};
use serde_json::{Value, json};
use std::error::Error;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

/// Seconds from the start to the first token and to the end, and the number of tokens.
type Timed = (f64, f64, usize);

#[derive(Clone, Copy)]
struct Job {
    prompt: usize,
    tokens: usize,
}

fn ids(job: Job, seed: u64, below: u64) -> Vec<u32> {
    (0..job.prompt as u64).map(|i| (mix(seed << 32 ^ i) % below) as u32).collect()
}

/// One request, straight to the engine.
fn direct(engine: &Engine, prompt: Vec<u32>, job: Job) -> Result<Timed, String> {
    let (to, events) = std::sync::mpsc::channel();
    let start = Instant::now();
    let request = Request {
        prompt,
        max_tokens: job.tokens,
        sampling: SamplerOptions { temperature: 0.0, ..SamplerOptions::default() },
        cache: CacheHints { bypass: true, ..CacheHints::default() },
        ..Request::default()
    };
    let sink = Box::new(move |event| {
        let _ = to.send(event);
    });
    engine.submit(request, sink).map_err(|e| e.to_string())?;
    let (mut first, mut count) = (None, 0);
    for event in events {
        match event {
            Event::Tokens(tokens) => {
                first.get_or_insert_with(|| start.elapsed().as_secs_f64());
                count += tokens.len();
            }
            Event::Finished { .. } => break,
            Event::Failed(error) => return Err(error.to_string()),
            _ => {}
        }
    }
    Ok((first.unwrap_or_default(), start.elapsed().as_secs_f64(), count))
}

/// The same through the server, as a stream.
fn over_http(address: SocketAddr, prompt: Vec<u32>, job: Job) -> Result<Timed, String> {
    let body = json!({
        "prompt": prompt, "max_tokens": job.tokens, "temperature": 0, "stream": true, "ignore_eos": true,
        "cache_prompt": false, "stream_options": {"include_usage": true},
    })
    .to_string();
    let start = Instant::now();
    let mut stream = TcpStream::connect(address).map_err(|e| e.to_string())?;
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(head.as_bytes()).map_err(|e| e.to_string())?;
    let (mut first, mut count) = (None, 0);
    for line in BufReader::new(stream).lines() {
        let line = line.map_err(|e| e.to_string())?;
        let Some(data) = line.strip_prefix("data: ") else { continue };
        first.get_or_insert_with(|| start.elapsed().as_secs_f64());
        if let Some(usage) =
            serde_json::from_str::<Value>(data).ok().and_then(|v| v["usage"].as_object().cloned())
        {
            count = usage["completion_tokens"].as_u64().unwrap_or(0) as usize;
        }
    }
    Ok((first.unwrap_or_default(), start.elapsed().as_secs_f64(), count))
}

/// Many at once: mean time to the first token, and tokens a second of all together.
fn together(n: usize, one: impl Fn(u64) -> Result<Timed, String> + Sync) -> Result<(f64, f64), String> {
    let start = Instant::now();
    let timed: Vec<Timed> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..n as u64)
            .map(|seed| {
                scope.spawn({
                    let one = &one;
                    move || one(seed)
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|t| t.join().map_err(|_| "a client panicked".to_owned())?)
            .collect::<Result<_, _>>()
    })?;
    let seconds = start.elapsed().as_secs_f64();
    let first = timed.iter().map(|t| t.0).sum::<f64>() / n as f64;
    Ok((first, timed.iter().map(|t| t.2).sum::<usize>() as f64 / seconds))
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |i: usize, default: usize| args.get(i).map_or(Ok(default), |a| a.parse());
    let name = args.first().map_or("qwen3_5_0_6b", String::as_str);
    let geometry = Geometry::find(name).ok_or("no geometry of that name")?;
    let (lanes, rounds) = (number(1, 8)?, number(4, 5)?.max(1));
    let job = Job { prompt: number(2, 64)?.max(1), tokens: number(3, 48)?.max(1) };

    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../models/flash-demo-nvfp4");
    let format = Arc::new(ChatFormat::new(&Resources::from_folder(&folder)?)?);
    let addressable = u64::from(format.tokenizer().addressable()).min(geometry.config()?.vocab);
    let context = (job.prompt + job.tokens).next_multiple_of(64) + 64;
    let options = EngineOptions {
        max_concurrency: lanes,
        max_context: context,
        addressable: addressable as usize,
        spec: SpecOptions { mode: SpecMode::Off, ngram_tokens: Some(0), ..SpecOptions::default() },
        ..EngineOptions::default()
    };
    let engine = Engine::start(options, move || {
        let source = build(&geometry, geometry.format, 42)?;
        let model = load(CpuBackend::new(CpuOptions::default()), &source, LoadOptions::default())?;
        let options = DriverOptions { tokens: context * lanes, sequences: lanes, ..DriverOptions::default() };
        Driver::new(model, geometry.ngram()?, options)
    })?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let model = ModelInfo { id: name.to_owned(), ..ModelInfo::default() };
    let app = App::new(Arc::new(engine.clone()), format, model, ServeOptions::default())?;
    let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0"))?;
    let address = listener.local_addr()?;
    runtime.spawn(serve(app, listener, None, std::future::pending()));

    let mut document = json!({
        "kind": "serve-overhead", "synthetic": true, "geometry": name, "prompt_tokens": job.prompt,
        "answer_tokens": job.tokens, "rounds": rounds, "arms": {},
    });
    for n in [1, lanes] {
        let straight = |seed| direct(&engine, ids(job, seed, addressable), job);
        let served = |seed| over_http(address, ids(job, seed, addressable), job);
        together(n, straight)?;
        together(n, served)?;
        let (mut firsts, mut rates, mut rows) = (Vec::new(), Vec::new(), Vec::new());
        for round in 0..rounds {
            // In turns, and the order changes, so that what else the machine does meets both.
            let (a, b) = if round % 2 == 0 {
                let a = together(n, straight)?;
                (a, together(n, served)?)
            } else {
                let b = together(n, served)?;
                (together(n, straight)?, b)
            };
            firsts.push(b.0 / a.0);
            rates.push(b.1 / a.1);
            rows.push(json!({
                "engine": {"first_token_s": a.0, "tok_s": a.1}, "http": {"first_token_s": b.0, "tok_s": b.1},
            }));
        }
        document["arms"][n.to_string()] = json!({
            "rounds": rows, "tok_s_ratio_median": median(rates), "first_token_ratio_median": median(firsts),
        });
    }
    println!("{document:#}");
    Ok(())
}
