//! Throughput through the engine's scheduler: several answers at once, drafts, constraints. What `serve` runs, without
//! HTTP: the difference between this and a server's figure is the server.

use super::{Measured, Rounds, Settings, Test, machine};
use crate::error::{MeasureError, Result};
use infernix_engine::sched::{CacheHints, Constraint, EngineApi, Event, Finish, Request, RequestId, Usage};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// How often an interruption is looked for.
const LOOK: Duration = Duration::from_millis(100);

/// Makes the constraint of one answer.
pub type MakeConstraint<'a> = dyn Fn() -> Box<dyn Constraint> + 'a;

/// What the streams of a test have in common.
pub struct Streams<'a> {
    /// Answers at a time.
    pub count: usize,
    /// What each answer is held to. It may then end before the length asked for.
    pub constraint: Option<&'a MakeConstraint<'a>>,
}

/// One answer as its sink saw it.
#[derive(Default)]
struct Stream {
    /// When tokens came, and how many: the first with the prompt's logits, then those of a round each.
    tokens: Vec<(Instant, usize)>,
    usage: Usage,
    ended: bool,
}

/// Runs one test; `None` when `go_on` said to stop. `prompt` gives that many token ids, other ones every time.
///
/// A prompt test counts all prompt tokens from the first submission to the last first token. A generation test counts
/// what comes after every stream has its first token, to the end of the last; with prompt and generation together both
/// count, from submission to end; its rounds a second are those of the generation test. Greedy, no stop tokens, past the
/// prefix cache.
///
/// # Errors
/// A request that is refused, fails or ends early; a prompt test at a depth, which needs the state put back.
pub fn measure_streams(
    engine: &dyn EngineApi,
    test: Test,
    settings: Settings,
    streams: &Streams<'_>,
    prompt: &mut dyn FnMut(usize) -> Vec<u32>,
    go_on: &dyn Fn() -> bool,
) -> Result<Option<Measured>> {
    if test.depth > 0 && test.prompt > 0 {
        return Err(MeasureError::Options(format!(
            "{}: through the scheduler only generation is measured at a depth",
            test.label()
        )));
    }
    let mut measured = Measured::new(test, 0, Vec::new());
    let mut rounds = Rounds::default();
    for n in 0..settings.repetitions + usize::from(settings.warm_up) {
        if !go_on() {
            return Ok(None);
        }
        let counted = n >= usize::from(settings.warm_up);
        if n == usize::from(settings.warm_up) {
            measured.started = machine::now();
        }
        let submitted = Instant::now();
        let Some(all) = repetition(engine, test, streams, prompt, go_on)? else { return Ok(None) };
        if !counted {
            continue;
        }
        let (tokens, time) = count(test, submitted, &all)?;
        measured.tokens.push(tokens);
        measured.nanoseconds.push(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
        for s in &all {
            rounds.rounds += s.usage.rounds as u64;
            rounds.tokens += s.usage.output.saturating_sub(1) as u64;
            rounds.drafted += s.usage.drafted as u64;
            rounds.accepted += s.usage.accepted as u64;
        }
        rounds.rates.extend(decoding(&all).and_then(|d| d.round_rate(all.len())));
    }
    measured.rounds = (test.generate > 0).then_some(rounds);
    Ok(Some(measured.rated()))
}

fn repetition(
    engine: &dyn EngineApi,
    test: Test,
    streams: &Streams<'_>,
    prompt: &mut dyn FnMut(usize) -> Vec<u32>,
    go_on: &dyn Fn() -> bool,
) -> Result<Option<Vec<Stream>>> {
    let prompts: Vec<Vec<u32>> =
        (0..streams.count).map(|_| prompt((test.depth + test.prompt).max(1))).collect();
    let (sender, events) = channel();
    let mut ids: Vec<RequestId> = Vec::new();
    let cancel = |ids: &[RequestId]| ids.iter().for_each(|id| engine.cancel(*id));
    for (i, prompt) in prompts.into_iter().enumerate() {
        let request = Request {
            prompt,
            // The first token comes with the prompt's logits; the generated ones are those after it.
            max_tokens: test.generate + 1,
            constraint: streams.constraint.map(|make| make()),
            cache: CacheHints { bypass: true, ..CacheHints::default() },
            ..Request::default()
        };
        let sender = sender.clone();
        let sink = Box::new(move |event| drop(sender.send((i, Instant::now(), event))));
        match engine.submit(request, sink) {
            Ok(id) => ids.push(id),
            Err(e) => {
                cancel(&ids);
                return Err(MeasureError::Options(format!("{}: {e}", test.label())));
            }
        }
    }
    let mut all: Vec<Stream> = (0..streams.count).map(|_| Stream::default()).collect();
    while !all.iter().all(|s| s.ended) {
        let (i, at, event) = match events.recv_timeout(LOOK) {
            Ok(event) => event,
            Err(RecvTimeoutError::Timeout) if go_on() => continue,
            Err(_) => {
                cancel(&ids);
                return Ok(None);
            }
        };
        match event {
            Event::Tokens(tokens) => all[i].tokens.push((at, tokens.len())),
            Event::Finished { reason, usage, .. } => {
                let early = matches!(reason, Finish::Constraint | Finish::Stop(_));
                if reason != Finish::Length && !(early && streams.constraint.is_some()) {
                    cancel(&ids);
                    return Err(MeasureError::Options(format!(
                        "{}: an answer ended after {} of {} tokens ({reason:?})",
                        test.label(),
                        usage.output,
                        test.generate + 1
                    )));
                }
                all[i].usage = usage;
                all[i].ended = true;
            }
            Event::Failed(e) => {
                cancel(&ids);
                return Err(MeasureError::Options(format!("{}: {e}", test.label())));
            }
            _ => {}
        }
    }
    Ok(Some(all))
}

/// The time in which nothing but decoding is left: from the moment every stream has its first token to the last token.
/// Before it, rounds wait for the prompts of streams that came later.
struct Decoding {
    first: Instant,
    last: Instant,
    /// Rounds in that time, summed over streams.
    rounds: u64,
    /// Tokens they gave.
    tokens: u64,
}

impl Decoding {
    /// Rounds a second of one of `streams`.
    fn round_rate(&self, streams: usize) -> Option<f64> {
        let seconds = (self.last - self.first).as_secs_f64();
        (self.rounds > 0 && seconds > 0.0).then(|| self.rounds as f64 / streams as f64 / seconds)
    }
}

/// The decode time of a repetition; `None` where a stream has no token.
fn decoding(all: &[Stream]) -> Option<Decoding> {
    let firsts: Option<Vec<Instant>> = all.iter().map(|s| Some(s.tokens.first()?.0)).collect();
    let first = firsts?.into_iter().max()?;
    let last = all.iter().filter_map(|s| s.tokens.last()).map(|t| t.0).max()?;
    // A stream's first token is never counted: it comes with the prompt's logits.
    let rest = all.iter().flat_map(|s| s.tokens.iter().skip(1)).filter(|t| t.0 >= first);
    let (rounds, tokens) = rest.fold((0, 0), |(r, n), t| (r + 1, n + t.1 as u64));
    Some(Decoding { first, last, rounds, tokens })
}

/// Tokens that the test counts, and the time they took.
fn count(test: Test, submitted: Instant, all: &[Stream]) -> Result<(u64, Duration)> {
    let empty = || MeasureError::Options(format!("{}: an answer has no token", test.label()));
    let decoded = decoding(all).ok_or_else(empty)?;
    let prompts = (all.len() * test.prompt) as u64;
    let (tokens, time) = match (test.prompt, test.generate) {
        (_, 0) => (prompts, decoded.first - submitted),
        (0, _) => (decoded.tokens, decoded.last - decoded.first),
        _ => {
            let after = all.iter().map(|s| s.tokens.iter().map(|t| t.1 as u64).sum::<u64>() - 1);
            (prompts + after.sum::<u64>(), decoded.last - submitted)
        }
    };
    if tokens == 0 || time.is_zero() {
        return Err(MeasureError::Options(format!(
            "{}: no token is left after every stream has its first; generate more",
            test.label()
        )));
    }
    Ok((tokens, time))
}

#[cfg(test)]
mod tests {
    use super::*;
    use infernix_engine::sched::{Sampled, ScriptedEngine, SubmitError, Timings};
    use std::sync::atomic::{AtomicUsize, Ordering};

    const SETTINGS: Settings = Settings { repetitions: 2, prefill_chunk: 4, warm_up: true, seed: 1 };

    /// Every answer: the first token, then pieces of `piece` tokens, each after a drafted round.
    fn engine(piece: usize, finish: Finish) -> std::sync::Arc<ScriptedEngine> {
        ScriptedEngine::new(move |request: &Request| {
            let mut events = vec![Event::Tokens(vec![Sampled::default()])];
            let mut left = request.max_tokens - 1;
            let mut rounds = 0;
            while left > 0 {
                let n = piece.min(left);
                events.push(Event::Tokens(vec![Sampled::default(); n]));
                left -= n;
                rounds += 1;
            }
            let usage = Usage {
                prompt: request.prompt.len(),
                output: request.max_tokens,
                rounds,
                drafted: 2 * rounds,
                accepted: request.max_tokens - 1 - rounds,
                ..Usage::default()
            };
            events.push(Event::Finished { reason: finish, usage, timings: Timings::default() });
            Ok::<_, SubmitError>(events)
        })
    }

    fn run(engine: &ScriptedEngine, test: Test, count: usize) -> Result<Option<Measured>> {
        let streams = Streams { count, constraint: None };
        measure_streams(engine, test, SETTINGS, &streams, &mut |n| vec![1; n], &|| true)
    }

    #[test]
    fn tokens_after_the_first_count_and_rounds_are_those_of_every_stream() {
        let engine = engine(3, Finish::Length);
        let m = run(&engine, Test { prompt: 0, generate: 6, depth: 5 }, 1).unwrap().unwrap();
        assert_eq!((m.tokens.as_slice(), m.nanoseconds.len()), (&[6, 6][..], 2));
        let r = m.rounds.as_ref().unwrap();
        assert_eq!((r.rounds, r.tokens, r.drafted, r.accepted), (4, 12, 8, 8));
        assert!((r.tokens_per_round() - 3.0).abs() < 1e-12);
        for (rounds, tokens) in r.rates.iter().zip(m.rates()) {
            assert!(
                (3.0 * rounds / tokens - 1.0).abs() < 1e-9,
                "rounds and tokens of one stream share a clock"
            );
        }
        let both = run(&engine, Test { prompt: 10, generate: 6, depth: 0 }, 2).unwrap().unwrap();
        assert_eq!(both.tokens, [32, 32]);
        let prompt = run(&engine, Test { prompt: 10, generate: 0, depth: 0 }, 2).unwrap().unwrap();
        assert_eq!((prompt.tokens.as_slice(), prompt.rounds), (&[20, 20][..], None));
    }

    /// Streams whose prompts take 100 ms each, one after the other, with a round of all that have their first token after
    /// each prompt; then rounds of 10 ms until every stream has `generate` tokens after its first, `piece` a round.
    fn made_up(start: Instant, streams: usize, generate: usize, piece: usize) -> Vec<Stream> {
        let mut all: Vec<Stream> = (0..streams).map(|_| Stream::default()).collect();
        let mut now = start;
        for ready in 1..=streams + generate {
            if ready <= streams {
                now += Duration::from_millis(100);
                all[ready - 1].tokens.push((now, 1));
            }
            now += Duration::from_millis(10);
            for s in all.iter_mut().take(ready) {
                let given: usize = s.tokens.iter().map(|t| t.1).sum::<usize>() - 1;
                if given < generate {
                    s.tokens.push((now, piece.min(generate - given)));
                }
            }
        }
        all
    }

    #[test]
    fn rounds_leave_out_the_time_in_which_prompts_of_other_streams_are_read() {
        let start = Instant::now();
        let depth = Test { prompt: 0, generate: 64, depth: 1024 };
        for (streams, piece) in [(1, 1), (8, 1), (4, 2)] {
            let all = made_up(start, streams, 64, piece);
            let rate = decoding(&all).unwrap().round_rate(streams).unwrap();
            let (tokens, time) = count(depth, start, &all).unwrap();
            let rate_of_tokens = tokens as f64 / time.as_secs_f64();
            assert!((streams as f64 * rate * piece as f64 / rate_of_tokens - 1.0).abs() < 1e-9, "{streams}");
            // A round takes 10 ms; streams that began earlier end up to a round for each prompt earlier.
            let longest = 64.0 / piece as f64;
            let mean = longest - (streams - 1) as f64 / 2.0;
            assert!((rate - 100.0 * mean / longest).abs() < 1e-6, "{streams} streams: {rate}");
            let pair = Test { prompt: 512, generate: 64, depth: 0 };
            let (tokens, time) = count(pair, start, &all).unwrap();
            assert_eq!(tokens as usize, streams * (512 + 64));
            assert!(time.as_secs_f64() > 0.1 * streams as f64, "a pair's tokens count the prompts' time");
        }
    }

    #[test]
    fn a_repetition_without_time_to_decode_has_no_rounds_a_second() {
        let start = Instant::now();
        let one = || Stream { tokens: vec![(start, 1)], ..Stream::default() };
        assert_eq!(decoding(&[one(), one()]).unwrap().round_rate(2), None);
        assert!(decoding(&[one(), Stream::default()]).is_none(), "a stream without a token");
    }

    #[test]
    fn an_answer_that_ends_early_is_an_error_unless_a_constraint_ended_it() {
        let test = Test { prompt: 0, generate: 6, depth: 0 };
        let error = run(&engine(1, Finish::Stop(3)), test, 1).unwrap_err().to_string();
        assert!(error.contains("tg6") && error.contains("ended after"), "{error}");
        struct Free;
        impl Constraint for Free {
            fn mask(&mut self, _: &mut [u32]) -> std::result::Result<(), String> {
                Ok(())
            }
            fn accept(&mut self, _: u32) -> std::result::Result<(), String> {
                Ok(())
            }
            fn rollback(&mut self, _: usize) -> std::result::Result<(), String> {
                Ok(())
            }
            fn accepts(&mut self, ids: &[u32]) -> usize {
                ids.len()
            }
            fn finished(&self) -> bool {
                false
            }
        }
        let made = AtomicUsize::new(0);
        let make = || -> Box<dyn Constraint> {
            made.fetch_add(1, Ordering::Relaxed);
            Box::new(Free)
        };
        let streams = Streams { count: 2, constraint: Some(&make) };
        let engine = engine(1, Finish::Constraint);
        let m = measure_streams(&*engine, test, SETTINGS, &streams, &mut |n| vec![1; n], &|| true);
        assert!(m.unwrap().is_some());
        assert_eq!(made.into_inner(), 2 * 3, "one for each answer, the warm-up's too");
    }

    #[test]
    fn a_prompt_at_a_depth_and_an_interruption_measure_nothing() {
        let engine = engine(1, Finish::Length);
        assert!(run(&engine, Test { prompt: 4, generate: 0, depth: 4 }, 1).is_err());
        let test = Test { prompt: 4, generate: 0, depth: 0 };
        let streams = Streams { count: 1, constraint: None };
        let stopped = measure_streams(&*engine, test, SETTINGS, &streams, &mut |n| vec![1; n], &|| false);
        assert!(stopped.unwrap().is_none());
        // An engine that never answers is left when told.
        let silent = ScriptedEngine::new(|_: &Request| Ok(Vec::new()));
        let asked = AtomicUsize::new(0);
        let twice = || asked.fetch_add(1, Ordering::Relaxed) < 2;
        let m = measure_streams(&*silent, test, SETTINGS, &streams, &mut |n| vec![1; n], &twice);
        assert!(m.unwrap().is_none() && silent.open_requests().is_empty());
    }
}
