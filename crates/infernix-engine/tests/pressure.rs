//! Too little memory, over real models: requests are paused and go on as if they had not been, and nothing is lost.
#![expect(clippy::print_stderr, reason = "figures go to the terminal")]

mod common;

use common::*;
use infernix_engine::numerics::round::mix;
use infernix_engine::sample::SamplerOptions;
use infernix_engine::sched::{
    CacheOptions, EngineOptions, Event, Finish, Request, RequestId, Scheduler, Usage,
};
use std::sync::{Arc, Mutex};

type Seen = Arc<Mutex<Vec<Event>>>;

fn submit<R: infernix_engine::sched::Runner>(s: &mut Scheduler<R>, request: Request) -> (RequestId, Seen) {
    let seen = Seen::default();
    let own = Arc::clone(&seen);
    let id = s.submit(request, Box::new(move |e| own.lock().unwrap().push(e)));
    (id, seen)
}

/// Tokens and how they ended.
fn answer(seen: &Seen) -> (Vec<u32>, Finish, Usage) {
    let seen = seen.lock().unwrap();
    let mut text = Vec::new();
    for e in seen.iter() {
        match e {
            Event::Tokens(t) => text.extend(t.iter().map(|t| t.id)),
            Event::Finished { reason, usage, .. } => return (text, *reason, *usage),
            Event::Failed(e) => panic!("{e}"),
            _ => {}
        }
    }
    panic!("a request without an end: {seen:?}");
}

/// Four requests that need 5 pages each, on 11 pages: kept in RAM, a pause costs no token; without any tier texts are read
/// again. Either way every token is the plain run's, greedy and sampled, with drafts and without.
#[test]
fn requests_paused_for_memory_go_on_token_for_token_from_ram_and_by_reading_again() {
    for case in cases() {
        let mut reference = case.make(1024, 1)().unwrap();
        let requests: Vec<(Vec<u32>, SamplerOptions)> = (0..4u64)
            .map(|n| {
                let sampling = match n % 2 {
                    0 => SamplerOptions::default(),
                    _ => SamplerOptions {
                        temperature: 0.8,
                        frequency_penalty: 0.2,
                        seed: n,
                        ..Default::default()
                    },
                };
                (case.ids(70 + n, 170 + 20 * n as usize), sampling)
            })
            .collect();
        let want: Vec<Vec<u32>> =
            requests.iter().map(|(prompt, sampling)| plain(&mut reference, prompt, sampling, 70)).collect();
        for (tiers, draft) in [(true, None), (true, Some(0)), (false, Some(3)), (false, Some(0))] {
            let bytes = if tiers { 1 << 30 } else { 0 };
            let mut options = EngineOptions {
                max_concurrency: 4,
                prefill_chunk: 50,
                cache: CacheOptions { device_bytes: 0, host_bytes: bytes, ..CacheOptions::default() },
                ..EngineOptions::default()
            };
            options.spec.draft_tokens = draft;
            let mut s = Scheduler::new(case.make(7 * 64, 4)().unwrap(), options).unwrap();
            let seen: Vec<Seen> = requests
                .iter()
                .map(|(prompt, sampling)| {
                    let (prompt, sampling) = (prompt.clone(), sampling.clone());
                    submit(&mut s, Request { prompt, sampling, max_tokens: 70, ..Request::default() }).1
                })
                .collect();
            while s.open() > 0 {
                s.step();
            }
            let mut pauses = 0;
            for (seen, want) in seen.iter().zip(&want) {
                let (text, reason, usage) = answer(seen);
                assert_eq!(text, *want, "{}, tiers {tiers}, drafts {draft:?}", case.name);
                assert_eq!(reason, Finish::Length);
                pauses += usage.preemptions;
            }
            let c = s.status(false).counters;
            eprintln!("{}: {pauses} pauses, {} tokens read again", case.name, c.replayed_tokens);
            assert!(pauses > 0, "{}: the memory budget forced nothing", case.name);
            if tiers {
                assert_eq!(c.replayed_tokens, 0, "{}: the state was in RAM", case.name);
            } else {
                assert!(c.replayed_tokens > 0, "{}: there was nowhere to keep a state", case.name);
            }
            s.into_runner().1.unwrap();
        }
    }
}

/// A text that was answered without drafts and goes on with them: the drafter finds of it in the cache what it would have found in
/// a cold run, and the end of an answer is kept where it fills the memory to the last page.
#[test]
fn the_end_of_an_answer_is_kept_whole_for_the_drafter_too_and_without_a_page_to_spare() {
    for case in cases() {
        let (first, more) = (case.ids(31, 90), case.ids(32, 2));
        for tokens in [1024, 4 * 64] {
            let scheduler = || {
                let mut options = EngineOptions::default();
                options.spec.draft_tokens = Some(3);
                options.spec.ngram_tokens = Some(0);
                Scheduler::new(case.make(tokens, 1)().unwrap(), options).unwrap()
            };
            let ask = |s: &mut Scheduler<_>, prompt: &[u32], n: usize, draft_tokens: Option<usize>| {
                let prompt = prompt.to_vec();
                let (_, seen) =
                    submit(s, Request { prompt, max_tokens: n, draft_tokens, ..Request::default() });
                while s.open() > 0 {
                    s.step();
                }
                let (text, _, usage) = answer(&seen);
                (text, usage)
            };
            let mut s = scheduler();
            let (text, _) = ask(&mut s, &first, 110, Some(0));
            let longer = [&first[..], &text, &more].concat();
            let (warm, usage) = ask(&mut s, &longer, 40, None);
            assert_eq!(usage.cached, first.len() + text.len() - 1, "{}, {tokens} tokens", case.name);
            let (cold, plain) = ask(&mut scheduler(), &longer, 40, None);
            assert_eq!(warm, cold, "{}", case.name);
            let drafts = |u: &Usage| (u.rounds, u.drafted, u.accepted);
            eprintln!("{}: {:?} after a hit, {:?} cold", case.name, drafts(&usage), drafts(&plain));
            assert_eq!(drafts(&usage), drafts(&plain), "{}", case.name);
            s.into_runner().1.unwrap();
        }
    }
}

/// Prompts and answers of any length from 0 up, some of them cancelled at any point, eight at a time on a quarter of the pages
/// that they want.
#[test]
fn a_thousand_requests_of_a_real_model_leak_nothing_and_keep_their_order() {
    let Some(case) = cases().into_iter().find(|c| c.name.ends_with("moe4")) else { return };
    let options = EngineOptions {
        max_concurrency: 8,
        max_pending_requests: 1000,
        pending_timeout: std::time::Duration::from_secs(1 << 30),
        prefill_chunk: 64,
        cache: CacheOptions { device_bytes: 8 << 20, host_bytes: 64 << 20, ..CacheOptions::default() },
        ..EngineOptions::default()
    };
    let mut s = Scheduler::new(case.make(64 * 8, 8)().unwrap(), options).unwrap();
    let admitted = Arc::new(Mutex::new(Vec::new()));
    let mut all = Vec::new();
    for n in 0..1000u64 {
        let dice = mix(n);
        let (seen, order) = (Seen::default(), Arc::clone(&admitted));
        let own = Arc::clone(&seen);
        let sink = move |e: Event| {
            if matches!(e, Event::Admitted { .. }) {
                order.lock().unwrap().push(n);
            }
            own.lock().unwrap().push(e);
        };
        let request = Request {
            prompt: case.ids(n % 40, 1 + (dice % 200) as usize),
            max_tokens: (dice >> 20) as usize % 40,
            sampling: SamplerOptions { temperature: (n % 2) as f64, seed: n, ..Default::default() },
            ..Request::default()
        };
        let id = s.submit(request, Box::new(sink));
        all.push((id, seen));
    }
    let mut steps = 0;
    while s.open() > 0 {
        s.step();
        steps += 1;
        if steps % 25 == 0 {
            s.cancel(all[(mix(steps) % 1000) as usize].0);
        }
        assert!(steps < 100_000, "{} requests do not end", s.open());
    }
    assert_eq!(s.check_idle(), Ok(()));
    let c = s.status(true).counters;
    eprintln!(
        "{steps} steps, {} pauses, {} cancelled, {} tokens cached of {}",
        c.preemptions, c.cancelled, c.cached_tokens, c.prompt_tokens
    );
    assert!(c.preemptions > 0 && c.cancelled > 0 && c.failed == 0, "{c:?}");
    assert_eq!(c.finished + c.cancelled, 1000);
    all.iter().for_each(|(_, seen)| drop(answer(seen)));
    assert!(admitted.lock().unwrap().is_sorted(), "requests overtook each other");
    s.into_runner().1.unwrap();
}
