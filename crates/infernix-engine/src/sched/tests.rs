//! Random traffic over the simulated model, which compares every page and state with the text in every call.

use super::*;
use crate::sample::SamplerOptions;
use crate::sim::{SimModel, SimOptions};
use proptest::prelude::*;
use std::sync::{Arc, Mutex};
use std::time::Duration;

type Seen = Arc<Mutex<Vec<Event>>>;

fn sink() -> (Sink, Seen) {
    let seen = Seen::default();
    let own = Arc::clone(&seen);
    (Box::new(move |e| own.lock().unwrap().push(e)), seen)
}

fn text(seen: &Seen) -> Vec<u32> {
    let tokens = |e: &Event| match e {
        Event::Tokens(t) => t.iter().map(|t| t.id).collect(),
        _ => Vec::new(),
    };
    seen.lock().unwrap().iter().flat_map(tokens).collect()
}

/// The one last event.
fn end(seen: &Seen) -> Event {
    let seen = seen.lock().unwrap();
    let ends = seen.iter().filter(|e| matches!(e, Event::Finished { .. } | Event::Failed(_)));
    assert_eq!(ends.count(), 1, "{seen:?}");
    seen.last().unwrap().clone()
}

fn cached(seen: &Seen) -> usize {
    let admitted = |e: &Event| match e {
        Event::Admitted { cached_tokens, .. } => Some(*cached_tokens),
        _ => None,
    };
    seen.lock().unwrap().iter().find_map(admitted).unwrap()
}

fn options(chunk: usize) -> EngineOptions {
    EngineOptions {
        max_concurrency: 8,
        max_pending_requests: 10_000,
        pending_timeout: Duration::from_secs(1_000_000),
        prefill_chunk: chunk,
        max_context: 1 << 20,
        cache: CacheOptions { device_bytes: 200_000, host_bytes: 500_000, ..CacheOptions::default() },
        spec: SpecOptions { ngram_min_match: 3, ..SpecOptions::default() },
        ..EngineOptions::default()
    }
}

fn run(s: &mut Scheduler<SimModel>) {
    let mut idle = 0;
    while s.open() > 0 {
        idle = if s.step() { 0 } else { idle + 1 };
        assert!(idle < 3, "nothing runs and {} requests are open", s.open());
    }
}

fn request(prompt: Vec<u32>, max_tokens: usize) -> Request {
    Request { prompt, max_tokens, ..Request::default() }
}

fn ids(seed: u64, n: usize) -> Vec<u32> {
    (0..n as u64).map(|i| (crate::numerics::round::mix(seed << 32 | i) % 97) as u32).collect()
}

/// One request of a random script.
#[derive(Clone, Debug)]
struct Act {
    /// Which earlier text it continues (an index into those so far), if any, and how much of it is kept.
    parent: Option<(prop::sample::Index, f64)>,
    fresh: usize,
    max_tokens: usize,
    sampled: bool,
    marker: Option<f64>,
    /// Steps before the next request comes, and after which this one is cancelled.
    wait: usize,
    cancel: Option<usize>,
    bypass: bool,
}

fn act() -> impl Strategy<Value = Act> {
    (
        prop::option::weighted(0.7, (any::<prop::sample::Index>(), 0.0..1.3)),
        1usize..150,
        0usize..60,
        any::<bool>(),
        prop::option::of(0.0..1.0),
        0usize..12,
        prop::option::weighted(0.15, 0usize..30),
        prop::bool::weighted(0.1),
    )
        .prop_map(|(parent, fresh, max_tokens, sampled, marker, wait, cancel, bypass)| Act {
            parent,
            fresh,
            max_tokens,
            sampled,
            marker,
            wait,
            cancel,
            bypass,
        })
}

#[derive(Clone, Debug)]
struct Setting {
    pages: usize,
    lanes: usize,
    chunk: usize,
    host: u64,
    device: u64,
    accuracy: Option<f64>,
    draft: Option<usize>,
    cache: bool,
}

fn setting() -> impl Strategy<Value = Setting> {
    (
        12usize..60,
        1usize..=4,
        1usize..200,
        prop_oneof![Just(0u64), 20_000u64..200_000],
        prop_oneof![Just(0u64), 20_000u64..200_000],
        prop::option::of(0.0..1.0),
        prop::option::of(0usize..6),
        prop::bool::weighted(0.85),
    )
        .prop_map(|(pages, lanes, chunk, host, device, accuracy, draft, cache)| Setting {
            pages,
            lanes,
            chunk,
            host,
            device,
            accuracy,
            draft,
            cache,
        })
}

/// Plays a script and checks every answer against the model's own continuation of its prompt.
fn play(setting: &Setting, script: &[Act]) -> Result<(), TestCaseError> {
    let sim = SimOptions {
        pages: setting.pages,
        sequences: setting.lanes,
        draft_accuracy: setting.accuracy,
        ..SimOptions::default()
    };
    let reference = SimModel::new(sim);
    let mut o = options(setting.chunk);
    o.max_concurrency = setting.lanes;
    o.cache.enabled = setting.cache;
    (o.cache.device_bytes, o.cache.host_bytes) = (setting.device, setting.host);
    o.spec.draft_tokens = setting.draft;
    let mut s = Scheduler::new(SimModel::new(sim), o).unwrap();
    let limit = s.options.max_context;
    let mut texts: Vec<Vec<u32>> = Vec::new();
    let mut open: Vec<(RequestId, Request0, Seen, Option<usize>)> = Vec::new();
    for (n, a) in script.iter().enumerate() {
        let mut prompt = match &a.parent {
            Some((index, keep)) if !texts.is_empty() => {
                let t = &texts[index.index(texts.len())];
                t[..((t.len() as f64 * keep) as usize).min(t.len())].to_vec()
            }
            _ => Vec::new(),
        };
        prompt.extend(ids(n as u64, a.fresh));
        prompt.truncate(limit - 1);
        let mut r = request(prompt.clone(), a.max_tokens);
        if a.sampled {
            r.sampling = SamplerOptions {
                temperature: 0.8,
                top_k: 20,
                seed: n as u64,
                presence_penalty: 0.5,
                ..r.sampling
            };
        }
        r.cache.markers = a.marker.iter().map(|m| (prompt.len() as f64 * m) as usize).collect();
        r.cache.bypass = a.bypass;
        let known =
            Request0 { prompt: prompt.clone(), max_tokens: a.max_tokens, sampling: r.sampling.clone() };
        let (sink, seen) = sink();
        let id = s.submit(r, sink);
        open.push((id, known, seen, a.cancel));
        let mut answered = prompt;
        answered.extend(ids(n as u64 + 1000, 5));
        texts.push(answered);
        for _ in 0..a.wait {
            s.step();
            for (id, _, _, cancel) in &mut open {
                match cancel {
                    Some(0) => {
                        s.cancel(*id);
                        *cancel = None;
                    }
                    Some(n) => *n -= 1,
                    None => {}
                }
            }
        }
    }
    run(&mut s);
    prop_assert_eq!(s.check_idle(), Ok(()));
    for (id, r, seen, _) in &open {
        let got = text(seen);
        let want = plain(&reference, r, limit);
        match end(seen) {
            Event::Finished { reason: Finish::Length, usage, .. } => {
                prop_assert_eq!(&got, &want, "request {}", id);
                prop_assert_eq!(usage.output, got.len());
            }
            Event::Finished { reason: Finish::Cancelled, .. } => {
                prop_assert!(want.starts_with(&got), "request {}", id);
            }
            other => prop_assert!(false, "request {} ended with {:?}", id, other),
        }
    }
    Ok(())
}

struct Request0 {
    prompt: Vec<u32>,
    max_tokens: usize,
    sampling: SamplerOptions,
}

/// Plain decoding, one token after the other, with nothing in between.
fn plain(model: &SimModel, r: &Request0, limit: usize) -> Vec<u32> {
    let mut sampler = crate::sample::Sampler::new(r.sampling.clone(), &r.prompt, 97);
    let mut text = r.prompt.clone();
    while text.len() < limit && text.len() - r.prompt.len() < r.max_tokens {
        let id = sampler.choose(&model.logits(&text), None, text.len() as u64).unwrap();
        sampler.accept(id);
        text.push(id);
    }
    text.split_off(r.prompt.len())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, max_shrink_iters: 4000, ..ProptestConfig::default() })]

    #[test]
    fn any_traffic_gives_the_texts_of_plain_decoding(
        setting in setting(),
        script in prop::collection::vec(act(), 1..14),
    ) {
        play(&setting, &script)?;
    }
}

#[test]
fn a_decoding_request_waits_for_at_most_one_chunk() {
    let sim = SimOptions { pages: 400, sequences: 3, ..SimOptions::default() };
    let mut s = Scheduler::new(SimModel::new(sim), options(64)).unwrap();
    for n in 0..3 {
        s.submit(request(ids(n, 2000), 200), sink().0);
    }
    run(&mut s);
    let calls = s.calls.clone();
    let first = calls.iter().position(|c| *c == "decode").unwrap();
    let last = calls.iter().rposition(|c| *c == "decode").unwrap();
    assert!(
        calls[first..last].windows(2).all(|w| w != ["read", "read"]),
        "two chunks lie between rounds of a decoding request"
    );
}

#[test]
fn deadlines_end_requests_wherever_they_stand() {
    let mut s = Scheduler::new(SimModel::new(SimOptions::default()), options(16)).unwrap();
    let late = |ms| Request { deadline: Some(Duration::from_millis(ms)), ..request(ids(ms, 300), 500) };
    let seen: Vec<Seen> = [1u64, 60, 400, 2000]
        .into_iter()
        .map(|ms| {
            let (sink, seen) = sink();
            s.submit(late(ms), sink);
            seen
        })
        .collect();
    run(&mut s);
    for seen in &seen {
        assert!(matches!(end(seen), Event::Finished { reason: Finish::Deadline, .. }), "{:?}", end(seen));
    }
    assert_eq!(s.check_idle(), Ok(()));
}

#[test]
fn a_queued_request_gives_up_after_its_time() {
    let mut o = options(16);
    o.max_concurrency = 1;
    o.pending_timeout = Duration::from_millis(50);
    let mut s = Scheduler::new(SimModel::new(SimOptions::default()), o).unwrap();
    let (a, b) = (sink(), sink());
    s.submit(request(ids(1, 300), 300), a.0);
    s.submit(request(ids(2, 300), 5), b.0);
    run(&mut s);
    assert!(matches!(end(&a.1), Event::Finished { reason: Finish::Length, .. }));
    assert!(matches!(end(&b.1), Event::Failed(RequestError::QueueTimeout(_))));
}

#[test]
fn a_pending_timeout_of_zero_is_without_end() {
    let mut o = options(16);
    (o.max_concurrency, o.pending_timeout) = (1, Duration::ZERO);
    let mut s = Scheduler::new(SimModel::new(SimOptions::default()), o).unwrap();
    let (a, b) = (sink(), sink());
    s.submit(request(ids(1, 300), 300), a.0);
    s.submit(request(ids(2, 300), 5), b.0);
    run(&mut s);
    for seen in [&a.1, &b.1] {
        assert!(matches!(end(seen), Event::Finished { reason: Finish::Length, .. }));
    }
}

/// Even ids only, as a grammar would say it; ends after `left` tokens.
struct Even {
    taken: Vec<u32>,
    left: usize,
}

impl Constraint for Even {
    fn mask(&mut self, words: &mut [u32]) -> Result<(), String> {
        words.iter_mut().for_each(|w| *w &= 0x5555_5555);
        Ok(())
    }
    fn accept(&mut self, id: u32) -> Result<(), String> {
        self.taken.push(id);
        if id % 2 == 0 { Ok(()) } else { Err(format!("{id} is odd")) }
    }
    fn rollback(&mut self, n: usize) -> Result<(), String> {
        self.taken.truncate(self.taken.len() - n);
        Ok(())
    }
    fn accepts(&mut self, ids: &[u32]) -> usize {
        ids.iter().take_while(|id| *id % 2 == 0).count()
    }
    fn finished(&self) -> bool {
        self.taken.len() >= self.left
    }
}

#[test]
fn constraints_hold_with_drafts_and_end_the_answer_exactly() {
    let texts: Vec<Vec<u32>> = [None, Some(0), Some(1), Some(5)]
        .into_iter()
        .map(|draft| {
            let mut o = options(64);
            o.spec.draft_tokens = draft;
            let sim = SimOptions { draft_accuracy: Some(0.9), ..SimOptions::default() };
            let mut s = Scheduler::new(SimModel::new(sim), o).unwrap();
            let (sink, seen) = sink();
            let constraint = Box::new(Even { taken: Vec::new(), left: 23 });
            let sampling = SamplerOptions { temperature: 1.0, seed: 4, ..SamplerOptions::default() };
            s.submit(Request { constraint: Some(constraint), sampling, ..request(ids(1, 100), 500) }, sink);
            run(&mut s);
            assert!(matches!(end(&seen), Event::Finished { reason: Finish::Constraint, .. }));
            text(&seen)
        })
        .collect();
    assert_eq!(texts[0].len(), 23);
    assert!(texts[0].iter().all(|id| id % 2 == 0));
    assert!(texts.iter().all(|t| *t == texts[0]), "drafts changed the text");
}

#[test]
fn stop_tokens_end_the_answer_before_them() {
    let mut s = Scheduler::new(SimModel::new(SimOptions::default()), options(64)).unwrap();
    let prompt = ids(3, 90);
    let whole = s.runner.greedy(&prompt, 40);
    let (sink, seen) = sink();
    s.submit(Request { stop_tokens: vec![whole[17]], ..request(prompt, 40) }, sink);
    run(&mut s);
    let first = whole.iter().position(|id| *id == whole[17]).unwrap();
    assert_eq!(text(&seen), whole[..first]);
    assert!(matches!(end(&seen), Event::Finished { reason: Finish::Stop(id), .. } if id == whole[17]));
}

#[test]
fn prompt_scores_come_for_every_token_and_do_not_use_the_cache() {
    let mut s = Scheduler::new(SimModel::new(SimOptions::default()), options(64)).unwrap();
    let prompt = ids(3, 200);
    s.submit(request(prompt.clone(), 3), sink().0);
    run(&mut s);
    let (sink, seen) = sink();
    s.submit(Request { prompt_logprobs: Some(2), logprobs: Some(3), ..request(prompt.clone(), 3) }, sink);
    run(&mut s);
    let seen = seen.lock().unwrap();
    let bypassed = |e: &Event| matches!(e, Event::Admitted { miss: Some(m), cached_tokens: 0, .. } if m.cause == crate::cache::MissCause::Bypassed);
    assert!(seen.iter().any(bypassed), "{:?}", seen[0]);
    let scores: Vec<&Sampled> = seen
        .iter()
        .filter_map(|e| if let Event::PromptLogprobs(p) = e { Some(p) } else { None })
        .flatten()
        .collect();
    assert_eq!(scores.iter().map(|s| s.id).collect::<Vec<_>>(), prompt);
    assert!(
        scores[0].logprob.is_none() && scores[1..].iter().all(|s| s.logprob.is_some() && s.top.len() == 2)
    );
    let model = SimModel::new(SimOptions::default());
    let want = crate::sample::logprob(&model.logits(&prompt[..70]), prompt[70]) as f32;
    assert_eq!(scores[70].logprob, Some(want));
}

mod faults;
mod files;
mod lanes;
mod law;
mod traffic;

#[test]
fn an_emptied_cache_holds_nothing_and_breaks_nothing_that_runs() {
    let sim = SimOptions { pages: 64, sequences: 2, ..SimOptions::default() };
    let mut s = Scheduler::new(SimModel::new(sim), options(64)).unwrap();
    let first = ids(7, 500);
    let (to, seen) = sink();
    s.submit(request(first.clone(), 30), to);
    run(&mut s);
    assert!(s.status(true).cache.device.snapshots > 0);
    // One request is in the middle of its answer when the cache is emptied.
    let (to, running) = sink();
    s.submit(request([&first[..], &ids(8, 100)].concat(), 40), to);
    while text(&running).len() < 10 {
        s.step();
    }
    s.clear_cache();
    run(&mut s);
    assert!(cached(&running) > 0 && text(&running).len() == 40);
    s.clear_cache();
    let cache = s.status(true).cache;
    assert_eq!((cache.device.snapshots, cache.device.blocks, cache.host.bytes), (0, 0, 0));
    s.check_idle().unwrap();
    let (to, again) = sink();
    s.submit(request(first, 30), to);
    run(&mut s);
    assert_eq!((text(&again), cached(&again)), (text(&seen), 0));
}
