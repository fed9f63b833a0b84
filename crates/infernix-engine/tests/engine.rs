//! The engine over real models on the CPU: whatever it caches, drafts, batches or pauses, the text is that of the cold
//! plain run.
#![expect(clippy::print_stderr, reason = "figures go to the terminal")]

mod common;

use common::*;
use infernix_engine::numerics::round::mix;
use infernix_engine::sample::SamplerOptions;
use infernix_engine::sched::{
    CacheOptions, Drain, Engine, EngineApi as _, EngineOptions, Event, Finish, Request, SpecOptions, Usage,
};
use std::sync::mpsc::{Receiver, channel};

fn ask(engine: &Engine, request: Request) -> Receiver<Event> {
    let (sender, events) = channel();
    engine.submit(request, Box::new(move |e| drop(sender.send(e)))).unwrap();
    events
}

/// Text, whether it is whole, cached tokens and usage.
fn wait(events: Receiver<Event>) -> (Vec<u32>, bool, usize, Usage) {
    let (mut text, mut cached) = (Vec::new(), 0);
    loop {
        match events.recv().unwrap() {
            Event::Tokens(t) => text.extend(t.iter().map(|t| t.id)),
            Event::Admitted { cached_tokens, .. } => cached = cached_tokens,
            Event::Finished { reason, usage, .. } => {
                return (text, !matches!(reason, Finish::Cancelled), cached, usage);
            }
            Event::Failed(e) => panic!("{e}"),
            _ => {}
        }
    }
}

#[test]
fn random_scripts_give_the_texts_of_cold_plain_runs() {
    for case in cases() {
        let mut reference = case.make(2048, 1)().unwrap();
        let (mut cached, mut accepted, mut preemptions) = (0, 0, 0);
        for round in 0..3u64 {
            // The second round has too little memory for its lanes, the third no tier but the device.
            let lanes = 3;
            let options = EngineOptions {
                max_concurrency: lanes,
                max_pending_requests: 100,
                prefill_chunk: [37, 64, 200][round as usize],
                cache: CacheOptions {
                    host_bytes: if round == 2 { 0 } else { 1 << 30 },
                    device_bytes: if round == 1 { 0 } else { 1 << 30 },
                    ..CacheOptions::default()
                },
                spec: SpecOptions {
                    draft_tokens: [None, Some(3), Some(5)][round as usize],
                    ngram_min_match: 4,
                    ..SpecOptions::default()
                },
                ..EngineOptions::default()
            };
            let tokens = if round == 1 { 64 * 3 } else { 4096 };
            let engine = Engine::start(options, case.make(tokens, lanes)).unwrap();
            let mut texts: Vec<Vec<u32>> = Vec::new();
            let mut open = Vec::new();
            for n in 0..10u64 {
                let dice = mix(round << 32 | n);
                let mut prompt = match texts.len() {
                    0 => Vec::new(),
                    k => {
                        let t = &texts[dice as usize % k];
                        t[..t.len() * (40 + (dice >> 8) as usize % 61) / 100].to_vec()
                    }
                };
                prompt.extend(case.ids(dice, 20 + (dice >> 16) as usize % 120));
                prompt.truncate(250);
                let sampling = if dice >> 24 & 1 == 0 {
                    SamplerOptions::default()
                } else {
                    SamplerOptions {
                        temperature: 0.9,
                        top_p: 0.95,
                        seed: n,
                        presence_penalty: 0.3,
                        ..Default::default()
                    }
                };
                let max_tokens = 8 + (dice >> 32) as usize % 24;
                let request = Request {
                    prompt: prompt.clone(),
                    sampling: sampling.clone(),
                    max_tokens,
                    ..Request::default()
                };
                let want = plain(&mut reference, &prompt, &sampling, max_tokens);
                texts.push([&prompt[..], &want].concat());
                open.push((want, ask(&engine, request)));
                if n % 3 == 2 {
                    for (want, events) in open.drain(..) {
                        let (text, _, from_cache, usage) = wait(events);
                        assert_eq!(text, want, "{} round {round}", case.name);
                        cached += from_cache;
                        accepted += usage.accepted;
                        preemptions += usage.preemptions;
                    }
                }
            }
            for (want, events) in open {
                assert_eq!(wait(events).0, want, "{} round {round}", case.name);
            }
            engine.shutdown(Drain::Now);
            assert_eq!(engine.status().stopped.as_deref(), Some("shut down"));
            assert_eq!(engine.stop_problem(), None, "pages or slots leaked");
        }
        eprintln!("{}: {cached} cached, {accepted} drafts accepted, {preemptions} pauses", case.name);
        assert!(cached > 0);
    }
}

#[test]
fn a_cache_file_resumes_a_real_model_bit_for_bit() {
    for case in cases() {
        let folder = tempfile::tempdir().unwrap();
        let options = || EngineOptions {
            cache: CacheOptions { file: Some(folder.path().join("cache")), ..CacheOptions::default() },
            ..EngineOptions::default()
        };
        let prompt = case.ids(5, 300);
        let mut reference = case.make(2048, 1)().unwrap();
        let want = plain(&mut reference, &prompt, &SamplerOptions::default(), 40);
        for turn in 0..2 {
            let engine = Engine::start(options(), case.make(2048, 1)).unwrap();
            assert!(engine.warnings().is_empty(), "{:?}", engine.warnings());
            let request = Request { prompt: prompt.clone(), max_tokens: 40, ..Request::default() };
            let (text, _, cached, _) = wait(ask(&engine, request));
            assert_eq!(text, want, "{}", case.name);
            assert_eq!(cached, if turn == 0 { 0 } else { 299 }, "{}", case.name);
            engine.shutdown(Drain::Now);
        }
    }
}

#[test]
fn the_last_handle_ends_the_engine_and_a_full_queue_says_when_to_return() {
    let Some(case) = cases().into_iter().next() else { return };
    let options = EngineOptions { max_pending_requests: 1, ..EngineOptions::default() };
    let engine = Engine::start(options, case.make(2048, 1)).unwrap();
    let long = || Request { prompt: case.ids(1, 200), max_tokens: 1500, ..Request::default() };
    let first = ask(&engine, long());
    let second = ask(&engine, long());
    let (sender, _) = channel();
    let refused = engine.submit(long(), Box::new(move |e| drop(sender.send(e))));
    assert!(matches!(refused, Err(infernix_engine::sched::SubmitError::QueueFull { .. })), "{refused:?}");
    drop(engine);
    for events in [first, second] {
        let last = events.iter().last();
        assert!(matches!(last, Some(Event::Failed(_) | Event::Finished { .. })), "{last:?}");
    }
}

/// Sampled speculation against plain sampling over many seeds: with certain proposals not only the law but every token
/// is the same, whoever drafts.
#[test]
fn sampled_drafts_follow_the_law_of_plain_sampling() {
    let Some(case) = cases().into_iter().next() else { return };
    let prompt = case.ids(3, 50);
    let mut reference = case.make(2048, 1)().unwrap();
    let texts = |draft| {
        let spec = SpecOptions { draft_tokens: Some(draft), ngram_min_match: 2, ..SpecOptions::default() };
        let engine =
            Engine::start(EngineOptions { spec, ..EngineOptions::default() }, case.make(2048, 1)).unwrap();
        let one = |seed| {
            let sampling =
                SamplerOptions { temperature: 0.7, frequency_penalty: 0.4, seed, ..Default::default() };
            let request = Request { prompt: prompt.clone(), sampling, max_tokens: 6, ..Request::default() };
            wait(ask(&engine, request)).0
        };
        (0..40).map(one).collect::<Vec<_>>()
    };
    let want: Vec<Vec<u32>> = (0..40)
        .map(|seed| {
            let sampling =
                SamplerOptions { temperature: 0.7, frequency_penalty: 0.4, seed, ..Default::default() };
            plain(&mut reference, &prompt, &sampling, 6)
        })
        .collect();
    assert_eq!(texts(0), want);
    assert_eq!(texts(4), want);
    // The seeds do reach different texts, or the test would show nothing.
    assert!(want.iter().any(|t| *t != want[0]));
}
