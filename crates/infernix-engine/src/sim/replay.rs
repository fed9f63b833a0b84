//! Traffic through the scheduler and the prefix cache, on the simulated model's clock.

use super::model::{STOP, SimModel, SimOptions};
use super::trace::Trace;
use crate::cache::Future;
use crate::error::EngineError;
use crate::sample::SamplerOptions;
use crate::sched::{
    CacheHints, CacheOptions, EngineOptions, Event, Request, Scheduler, SpecMode, SpecOptions,
};
use crate::state::PAGE_TOKENS;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// What to replay on.
#[derive(Clone, Copy, Debug)]
pub struct ReplayOptions {
    /// Sizes and times of the model.
    pub model: SimOptions,
    /// Prompt tokens of a call.
    pub prefill_chunk: usize,
    /// Bytes of snapshots on the device.
    pub device_bytes: u64,
    /// Bytes in RAM.
    pub host_bytes: u64,
}

/// What came out.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Replayed {
    /// Requests answered.
    pub requests: usize,
    /// Prompt tokens.
    pub prompt_tokens: u64,
    /// Of these, from the cache.
    pub cached_tokens: u64,
    /// Of these, what a cache of any size, with a state after every token, would have had.
    pub shared_tokens: u64,
    /// Tokens answered.
    pub output_tokens: u64,
    /// Median and 95th percentile of seconds from arrival to the first token.
    pub first_token: (f64, f64),
    /// Median and 95th percentile of seconds in the queue.
    pub queued: (f64, f64),
    /// Seconds the engine worked, of how many that passed.
    pub busy: f64,
    /// Seconds from the first arrival to the last answer.
    pub span: f64,
    /// Snapshots taken and dropped.
    pub snapshots: (u64, u64),
    /// Requests paused for memory.
    pub preemptions: u64,
}

#[derive(Default)]
struct Seen {
    first: Vec<f64>,
    queued: Vec<f64>,
    ended: usize,
}

fn percentiles(mut v: Vec<f64>) -> (f64, f64) {
    v.sort_by(f64::total_cmp);
    let at = |p: f64| v.get(((v.len() as f64 - 1.0) * p).round() as usize).copied().unwrap_or(0.0);
    (at(0.5), at(0.95))
}

/// Replays a trace.
///
/// # Errors
/// A prompt longer than the model's pages.
pub fn replay(trace: &Trace, options: &ReplayOptions) -> Result<Replayed, EngineError> {
    play(trace, options, false)
}

/// Replays a trace with an evictor that knows what comes. No policy is known to do better with the same snapshots and memory;
/// [`super::most_cached`] bounds what any could.
///
/// # Errors
/// As [`replay`].
pub fn replay_clairvoyant(trace: &Trace, options: &ReplayOptions) -> Result<Replayed, EngineError> {
    play(trace, options, true)
}

fn play(trace: &Trace, options: &ReplayOptions, clairvoyant: bool) -> Result<Replayed, EngineError> {
    let mut model = SimModel::new(options.model);
    for (n, r) in trace.requests.iter().enumerate() {
        let mut answer = r.output.clone();
        answer.push(STOP);
        model.answer(n as u64, r.prompt.len(), answer);
    }
    let engine = EngineOptions {
        max_concurrency: options.model.sequences,
        max_pending_requests: usize::MAX,
        pending_timeout: Duration::ZERO,
        prefill_chunk: options.prefill_chunk,
        max_context: usize::MAX >> 1,
        cache: CacheOptions {
            device_bytes: options.device_bytes,
            host_bytes: options.host_bytes,
            ..CacheOptions::default()
        },
        spec: SpecOptions { mode: SpecMode::Off, ..SpecOptions::default() },
        ..EngineOptions::default()
    };
    let mut s = Scheduler::new(model, engine)?;
    let admitted = Arc::new(AtomicUsize::new(0));
    if clairvoyant {
        s.cache.future = Some(Future::new(&trace.requests, Arc::clone(&admitted)));
    }
    let limit = s.max_context();
    let seen = Arc::new(Mutex::new(Seen::default()));
    let mut out = Replayed::default();
    let mut next = 0;
    let begin = trace.requests.first().map_or(0.0, |r| r.at);
    while next < trace.requests.len() || s.open() > 0 {
        if s.open() == 0 && next < trace.requests.len() {
            s.advance(Duration::from_secs_f64(trace.requests[next].at - begin));
        }
        let now = s.now();
        // The clock has nanoseconds: what was due at the time it was set to must not come out as later.
        let due = now.as_secs_f64() + 1e-6;
        while let Some(r) = trace.requests.get(next).filter(|r| r.at - begin <= due) {
            if r.prompt.len() + r.output.len() + 1 > limit {
                return Err(EngineError::Request(format!(
                    "request {next} has {} tokens, {limit} fit; give more KV pages",
                    r.prompt.len() + r.output.len() + 1
                )));
            }
            let request = Request {
                prompt: r.prompt.clone(),
                max_tokens: r.output.len() + 1,
                stop_tokens: vec![STOP],
                sampling: SamplerOptions { seed: next as u64, ..SamplerOptions::default() },
                cache: CacheHints {
                    markers: r.markers.clone(),
                    salt: r.salt.clone(),
                    bypass: r.bypass,
                    reread: r.reread,
                    session: None,
                },
                ..Request::default()
            };
            let (seen, admitted) = (Arc::clone(&seen), Arc::clone(&admitted));
            let waited = (now.as_secs_f64() - (r.at - begin)).max(0.0);
            let sink = move |event| {
                let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
                match event {
                    Event::Finished { timings, .. } => {
                        let queued = waited + timings.queued.as_secs_f64();
                        seen.queued.push(queued);
                        seen.first.push(queued + timings.prompt.as_secs_f64());
                        seen.ended += 1;
                    }
                    Event::Failed(_) => seen.ended += 1,
                    Event::Admitted { .. } => drop(admitted.fetch_add(1, Ordering::Relaxed)),
                    _ => {}
                }
            };
            s.submit(request, Box::new(sink));
            next += 1;
        }
        let before = s.now();
        s.step();
        out.busy += (s.now() - before).as_secs_f64();
    }
    let c = s.counters;
    out.requests = trace.requests.len();
    out.prompt_tokens = trace.requests.iter().map(|r| r.prompt.len() as u64).sum();
    out.cached_tokens = c.cached_tokens;
    out.shared_tokens = shared(trace);
    out.output_tokens = c.output_tokens;
    out.snapshots = (c.snapshots, c.evicted_snapshots);
    out.preemptions = c.preemptions;
    out.span = s.now().as_secs_f64();
    let seen = std::mem::take(&mut *seen.lock().unwrap_or_else(PoisonError::into_inner));
    out.first_token = percentiles(seen.first);
    out.queued = percentiles(seen.queued);
    Ok(out)
}

/// Prompt tokens that some earlier prompt and its answer begin with: the most any cache can give.
fn shared(trace: &Trace) -> u64 {
    // Blocks by chained hash decide up to 64 tokens, which is close enough for a bound; it is rounded up.
    let mut known = std::collections::HashSet::new();
    let mut sum = 0;
    for r in trace.requests.iter().filter(|r| !r.bypass) {
        let text = [&r.prompt[..], &r.output].concat();
        let salt = r.salt.bytes().map(u64::from);
        let mut hash = salt.fold(0u64, |h, byte| crate::numerics::round::mix(h ^ (byte + 1)));
        let mut hit = 0;
        let mut counting = !r.reread;
        for (n, block) in text.chunks_exact(PAGE_TOKENS).enumerate() {
            hash = block.iter().fold(hash, |h, id| {
                crate::numerics::round::mix(h ^ u64::from(*id).wrapping_mul(0x9E37_79B9_7F4A_7C15))
            });
            let end = (n + 1) * PAGE_TOKENS;
            counting &= !known.insert(hash);
            if counting && end < r.prompt.len() {
                hit = end;
            }
        }
        if hit > 0 {
            sum += (hit + PAGE_TOKENS - 1).min(r.prompt.len() - 1) as u64;
        }
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::trace::{Synthetic, TraceRequest};

    fn options(pages: usize, host: u64) -> ReplayOptions {
        ReplayOptions {
            model: SimOptions {
                pages,
                sequences: 2,
                vocab: 200_000,
                page_bytes: 1 << 20,
                state_bytes: 100 << 20,
                checked: false,
                ..SimOptions::default()
            },
            prefill_chunk: 1024,
            device_bytes: 1 << 30,
            host_bytes: host,
        }
    }

    #[test]
    fn more_memory_never_hits_less_and_enough_of_it_nearly_all() {
        let shape =
            Synthetic { sessions: 6, turns: 12, head_tokens: 3000, context: 30_000, ..Synthetic::default() };
        let trace = Trace::synthetic(&shape);
        let rates: Vec<f64> = [0, 2 << 30, 64 << 30]
            .into_iter()
            .map(|host| {
                let r = replay(&trace, &options(600, host)).unwrap();
                assert_eq!(r.requests, 72);
                assert!(r.cached_tokens <= r.shared_tokens, "{r:?}");
                r.cached_tokens as f64 / r.shared_tokens as f64
            })
            .collect();
        assert!(rates[0] <= rates[1] + 0.02 && rates[1] <= rates[2] + 0.02, "{rates:?}");
        assert!(rates[2] > 0.9, "{rates:?}");
    }

    /// Measured on a server: 20 equal prompts, half of them under salts of their own and half past the cache, gave nothing
    /// from the cache where the plan said 89 %.
    #[test]
    fn what_shares_nothing_is_not_predicted_to_be_shared() {
        let prompt: Vec<u32> = (0..500).collect();
        let one = |n: usize| TraceRequest { at: n as f64, prompt: prompt.clone(), ..TraceRequest::default() };
        let mut trace = Trace { requests: (0..6).map(one).collect(), ..Trace::default() };
        let all = replay(&trace, &options(600, 1 << 30)).unwrap();
        assert_eq!((all.cached_tokens, all.shared_tokens), (5 * 499, 5 * 499));
        trace.requests[1].bypass = true;
        trace.requests[2].salt = "1".into();
        trace.requests[3].salt = "1".into();
        trace.requests[4].reread = true;
        // Only the second of the salt and the last one find something.
        for played in [replay, replay_clairvoyant] {
            let some = played(&trace, &options(600, 1 << 30)).unwrap();
            assert_eq!((some.cached_tokens, some.shared_tokens), (2 * 499, 2 * 499));
        }
    }

    /// States that are small beside their texts all stay on the device; the texts of conversations that have ended must leave RAM
    /// all the same when others need the room.
    #[test]
    fn ram_gives_up_texts_whose_states_are_on_the_device() {
        let shape = Synthetic {
            sessions: 24,
            turns: 12,
            head_tokens: 3000,
            session_gap: 100.0,
            ..Synthetic::default()
        };
        let trace = Trace::synthetic(&shape);
        // All texts are 8 GiB; 2 hold those of the conversations that go on. Measured: 75 and 93 % of what any cache could give, 55 and 69 where
        // only snapshots without a copy on the device made room.
        for (host, least) in [(1024u64, 70), (2048, 90)] {
            let o = ReplayOptions { device_bytes: u64::MAX >> 2, ..options(500, host << 20) };
            let r = replay(&trace, &o).unwrap();
            let (own, all) = (r.cached_tokens, r.shared_tokens);
            assert!(own * 100 >= all * least, "{host} MiB: {own} of {all} tokens");
        }
    }

    /// Conversations that interleave under a cache that holds a part of them. Measured: 70 and 66 % of what foresight keeps where
    /// a sixth and a third of the texts fit (whoever does not know which conversation goes on next loses there), 99 and
    /// 100 % where two thirds and all do.
    #[test]
    fn eviction_is_near_one_that_knows_the_future_and_both_keep_below_what_is_possible() {
        for (seed, host, least) in [(1u64, 1u64, 0.6), (2, 2, 0.6), (3, 4, 0.95), (4, 8, 0.99)] {
            let shape = Synthetic {
                seed,
                sessions: 12,
                turns: 12,
                head_tokens: 3000,
                context: 30_000,
                session_gap: 60.0,
                ..Synthetic::default()
            };
            let trace = Trace::synthetic(&shape);
            let o = ReplayOptions { device_bytes: 512 << 20, ..options(600, host << 30) };
            let own = replay(&trace, &o).unwrap().cached_tokens;
            let best = replay_clairvoyant(&trace, &o).unwrap().cached_tokens;
            let most = crate::sim::most_cached(&trace, &o);
            let share = own as f64 / best as f64;
            assert!(own <= most && best <= most, "{host} GiB: {own}, {best} of at most {most}");
            assert!(share > least, "{host} GiB: {own} of {best} tokens, at most {most}");
        }
    }
}
