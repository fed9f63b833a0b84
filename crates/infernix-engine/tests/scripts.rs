//! Random scripts of requests over real models: conversations that go on, branch, are edited and cancelled, over a roomy and
//! a tight memory, with and without drafts, in chunks of any size. Whatever the engine caches, drafts, batches or pauses, an
//! answer is the cold plain run's. A failing script shrinks to its shortest form.
//!
//! `INFERNIX_CASES=N` runs N scripts a model instead of the few of an ordinary test run.
#![expect(clippy::print_stderr, reason = "figures go to the terminal")]

mod common;

use common::*;
use infernix_engine::backend::cpu::CpuBackend;
use infernix_engine::driver::Driver;
use infernix_engine::sample::SamplerOptions;
use infernix_engine::sched::{
    CacheOptions, EngineOptions, Event, Finish, Request, RequestId, Scheduler, SpecOptions,
};
use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::{RngAlgorithm, TestCaseError, TestRng, TestRunner};
use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// Tokens that prompt and answer of a script's request may have.
const MOST: usize = 250;
const LANES: usize = 3;

/// One request of a script.
#[derive(Clone, Debug)]
struct Act {
    /// The earlier text that it goes on from, and the eighths of it that are kept.
    parent: Option<(Index, usize)>,
    /// Which tokens come after, and how many.
    branch: u64,
    fresh: usize,
    answer: usize,
    /// Seed of a sampled answer with penalties.
    sampled: Option<u64>,
    marker: bool,
    /// Steps before the next request, and before this one is cancelled.
    wait: usize,
    cancel: Option<usize>,
}

#[derive(Clone, Debug)]
struct Setting {
    tight: bool,
    lanes: usize,
    chunk: usize,
    /// Snapshots on the device, RAM, the cache at all.
    device: bool,
    host: bool,
    cache: bool,
    draft: Option<usize>,
}

fn act() -> impl Strategy<Value = Act> {
    (
        prop::option::weighted(0.7, (any::<Index>(), prop_oneof![3 => Just(8usize), 1 => 2..8usize])),
        0..3u64,
        prop_oneof![Just(3usize), Just(20), Just(70), Just(130)],
        prop_oneof![Just(1usize), Just(5), Just(12)],
        prop::option::weighted(0.3, 0..2u64),
        any::<bool>(),
        0..8usize,
        prop::option::weighted(0.15, 0..10usize),
    )
        .prop_map(|(parent, branch, fresh, answer, sampled, marker, wait, cancel)| Act {
            parent,
            branch,
            fresh,
            answer,
            sampled,
            marker,
            wait,
            cancel,
        })
}

fn setting() -> impl Strategy<Value = Setting> {
    (
        any::<bool>(),
        1..=LANES,
        prop_oneof![Just(17usize), Just(64), Just(200)],
        any::<bool>(),
        any::<bool>(),
        prop::bool::weighted(0.9),
        prop_oneof![Just(None), Just(Some(0usize)), Just(Some(2)), Just(Some(5))],
    )
        .prop_map(|(tight, lanes, chunk, device, host, cache, draft)| Setting {
            tight,
            lanes,
            chunk,
            device,
            host,
            cache,
            draft,
        })
}

#[derive(Default)]
struct Totals {
    requests: u64,
    cached: u64,
    accepted: u64,
    pauses: u64,
    replayed: u64,
    cancelled: u64,
}

/// A model with the drivers that scripts run on, and what it says without any of this.
struct Subject {
    case: Case,
    roomy: Option<Driver<CpuBackend>>,
    tight: Option<Driver<CpuBackend>>,
    reference: Driver<CpuBackend>,
    known: HashMap<(Vec<u32>, Option<u64>), Vec<u32>>,
    totals: Totals,
}

fn sampling(seed: Option<u64>) -> SamplerOptions {
    match seed {
        None => SamplerOptions::default(),
        Some(seed) => SamplerOptions {
            temperature: 0.9,
            top_k: 40,
            top_p: 0.95,
            presence_penalty: 0.3,
            seed,
            ..SamplerOptions::default()
        },
    }
}

impl Subject {
    fn new(case: Case) -> Self {
        let reference = case.make(2 * MOST, 1)().unwrap();
        Subject {
            case,
            roomy: None,
            tight: None,
            reference,
            known: HashMap::new(),
            totals: Totals::default(),
        }
    }

    /// The cold plain answer.
    fn plain(&mut self, prompt: &[u32], seed: Option<u64>, n: usize) -> Vec<u32> {
        let reference = &mut self.reference;
        let key = (prompt.to_vec(), seed);
        let answer = self.known.entry(key).or_default();
        if answer.len() < n {
            *answer = plain(reference, prompt, &sampling(seed), n.max(5));
        }
        answer[..n].to_vec()
    }

    fn driver(&mut self, tight: bool) -> Driver<CpuBackend> {
        let (slot, tokens) = if tight { (&mut self.tight, MOST) } else { (&mut self.roomy, 20 * MOST) };
        slot.take().unwrap_or_else(|| self.case.make(tokens, LANES)().unwrap())
    }

    fn play(&mut self, setting: &Setting, script: &[Act]) -> Result<(), TestCaseError> {
        let size = |on: bool| if on { 1 << 30 } else { 0 };
        let options = EngineOptions {
            max_concurrency: setting.lanes,
            max_pending_requests: 1000,
            prefill_chunk: setting.chunk,
            max_context: MOST,
            cache: CacheOptions {
                enabled: setting.cache,
                device_bytes: size(setting.device),
                host_bytes: size(setting.host),
                ..CacheOptions::default()
            },
            spec: SpecOptions { draft_tokens: setting.draft, ngram_min_match: 3, ..SpecOptions::default() },
            ..EngineOptions::default()
        };
        let mut s = Scheduler::new(self.driver(setting.tight), options).unwrap();
        let outcome = self.run(&mut s, script);
        let (driver, checked) = s.into_runner();
        // A driver that lost pages is of no use to the next script.
        if checked.is_ok() {
            *(if setting.tight { &mut self.tight } else { &mut self.roomy }) = Some(driver);
        }
        outcome?;
        prop_assert_eq!(checked, Ok(()));
        Ok(())
    }

    fn run(&mut self, s: &mut Scheduler<Driver<CpuBackend>>, script: &[Act]) -> Result<(), TestCaseError> {
        type Seen = Arc<Mutex<Vec<Event>>>;
        let mut texts: Vec<Vec<u32>> = Vec::new();
        let mut open: Vec<(RequestId, Vec<u32>, Seen, Option<usize>)> = Vec::new();
        let limit = s.max_context();
        for a in script {
            let mut prompt = match &a.parent {
                Some((index, eighths)) if !texts.is_empty() => {
                    let t = &texts[index.index(texts.len())];
                    t[..t.len() * eighths / 8].to_vec()
                }
                _ => Vec::new(),
            };
            prompt.extend(self.case.ids(a.branch, a.fresh));
            prompt.truncate(limit - 1 - a.answer);
            let want = self.plain(&prompt, a.sampled, a.answer);
            let mut request = Request {
                prompt: prompt.clone(),
                sampling: sampling(a.sampled),
                max_tokens: a.answer,
                ..Request::default()
            };
            if a.marker {
                request.cache.markers = vec![prompt.len() * 2 / 3];
            }
            let seen = Seen::default();
            let own = Arc::clone(&seen);
            let id = s.submit(request, Box::new(move |e| own.lock().unwrap().push(e)));
            texts.push([&prompt[..], &want].concat());
            open.push((id, want, seen, a.cancel));
            self.totals.requests += 1;
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
        let mut idle = 0;
        while s.open() > 0 {
            idle = if s.step() { 0 } else { idle + 1 };
            prop_assert!(idle < 3, "nothing runs and {} requests are open", s.open());
        }
        for (id, want, seen, _) in open {
            let seen = seen.lock().unwrap();
            let tokens = |e: &Event| if let Event::Tokens(t) = e { t.clone() } else { Vec::new() };
            let got: Vec<u32> = seen.iter().flat_map(tokens).map(|t| t.id).collect();
            match seen.last() {
                Some(Event::Finished { reason: Finish::Length, .. }) => {
                    prop_assert_eq!(&got, &want, "request {}", id);
                }
                Some(Event::Finished { reason: Finish::Cancelled, .. }) => {
                    prop_assert!(want.starts_with(&got), "request {}: {:?} of {:?}", id, got, want);
                }
                other => prop_assert!(false, "request {} ended with {:?}", id, other),
            }
        }
        let c = s.status(false).counters;
        let t = &mut self.totals;
        t.cached += c.cached_tokens;
        t.accepted += c.accepted;
        t.pauses += c.preemptions;
        t.replayed += c.replayed_tokens;
        t.cancelled += c.cancelled;
        Ok(())
    }
}

fn scripts(name: &str) {
    let Some(case) = cases().into_iter().find(|c| c.name.ends_with(name)) else { return };
    let wanted = std::env::var("INFERNIX_CASES").ok().and_then(|n| n.parse().ok());
    let config = ProptestConfig {
        // A script takes 0.5, 0.3 and 0.2 s of a core on the three models: about a minute on two cores.
        cases: wanted.unwrap_or(120),
        failure_persistence: None,
        max_shrink_iters: 2000,
        ..ProptestConfig::default()
    };
    let subject = RefCell::new(Subject::new(case));
    // The scripts are the same for everybody.
    let mut runner = TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha));
    let strategy = (setting(), prop::collection::vec(act(), 1..7));
    let outcome = runner.run(&strategy, |(setting, script)| subject.borrow_mut().play(&setting, &script));
    let subject = subject.into_inner();
    let t = &subject.totals;
    eprintln!(
        "{name}: {} requests, {} prompt tokens cached, {} drafts right, {} pauses, {} tokens read again, {} cancelled",
        t.requests, t.cached, t.accepted, t.pauses, t.replayed, t.cancelled
    );
    if let Err(e) = outcome {
        panic!("{name}: {e}");
    }
    // Or the scripts would show nothing. Pauses are rare in so few; `pressure` forces them.
    assert!(t.cached > 0 && t.cancelled > 0);
}

#[test]
fn any_script_on_the_flash_demo_gives_the_answers_of_cold_plain_runs() {
    scripts("flash-demo-bf16");
}

#[test]
fn any_script_on_the_dense_demo_gives_the_answers_of_cold_plain_runs() {
    scripts("dense-demo-bf16");
}

#[test]
fn any_script_on_moe4_gives_the_answers_of_cold_plain_runs() {
    scripts("moe4");
}
