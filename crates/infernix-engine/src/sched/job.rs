//! One request on its way through the engine.

use super::api::{Event, Finish, Request, RequestError, RequestId, Sampled, Sink, Timings, Usage};
use crate::cache::{Cursor, SnapId};
use crate::driver::Sequence;
use crate::sample::{NoToken, Purpose, Sampler, logprob, top_logprobs, uniform};
use crate::sched::Runner;
use crate::spec::{CopyDrafter, Law, Standing, accept_or_residual};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

/// Where a request stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Has a lane; its prompt, or its text after a pause, is being read.
    Reading,
    /// Has a lane; its answer is being decoded.
    Decoding,
    /// Paused for memory: no lane.
    Paused,
    /// Waits for its first lane.
    Queued,
}

/// What a lane holds of the model.
pub(super) struct Lane {
    pub sequence: Sequence,
    pub cursor: Cursor,
    /// Whether the prefix cache was asked.
    pub looked_up: bool,
    /// Tokens it resumed with.
    pub resumed: usize,
    /// Tokens of the deepest snapshot on its way.
    pub deepest: usize,
    /// Token counts to take a snapshot after, ascending.
    pub points: Vec<usize>,
}

pub(super) struct Job {
    pub id: RequestId,
    pub request: Request,
    pub sink: Sink,
    pub submitted: Duration,
    pub admitted: Option<Duration>,
    pub prompt_done: Option<Duration>,
    pub stage: Stage,
    pub lane: Option<Lane>,
    /// Prompt and answer, the last token perhaps not read by the model yet.
    pub text: Vec<u32>,
    pub sampler: Sampler,
    /// Bits of allowed ids, all set where there is no constraint.
    mask: Vec<u32>,
    pub usage: Usage,
    pub standing: Standing,
    pub copies: Option<CopyDrafter>,
    /// Snapshot kept for it while it is paused.
    pub kept: Option<SnapId>,
    /// Tokens it had read when it was paused.
    pub read: usize,
    /// Other requests' cached prefixes it may use.
    pub salt: String,
    pub cancelled: bool,
    /// Set when it has got its last event.
    pub ended: bool,
    /// Logits of the last prompt token read, for the log-probability of the next.
    pub last_row: Vec<f32>,
}

/// What became of a token.
pub(super) enum Step {
    /// It is part of the answer, which goes on.
    Token(Sampled),
    /// It is the answer's last.
    Last(Sampled, Finish),
    /// The answer ended before it.
    End(Finish),
    /// The request failed.
    Fail(RequestError),
}

impl Job {
    #[expect(clippy::too_many_arguments, reason = "a request and what the scheduler knows when it arrives")]
    pub(super) fn new(
        id: RequestId,
        request: Request,
        sink: Sink,
        now: Duration,
        addressable: usize,
        vocab: usize,
        standing: Standing,
        private: bool,
    ) -> Self {
        let sampler = Sampler::new(request.sampling.clone(), &request.prompt, addressable);
        let mask = if request.constraint.is_some() { vec![u32::MAX; vocab.div_ceil(32)] } else { Vec::new() };
        // No client salt begins with NUL: whoever shares nothing has a space of its own.
        let salt = if private { format!("\0{id}") } else { request.cache.salt.replace('\0', " ") };
        Job {
            id,
            text: request.prompt.clone(),
            usage: Usage { prompt: request.prompt.len(), ..Usage::default() },
            request,
            sink,
            submitted: now,
            admitted: None,
            prompt_done: None,
            stage: Stage::Queued,
            lane: None,
            sampler,
            mask,
            standing,
            copies: None,
            kept: None,
            read: 0,
            salt,
            cancelled: false,
            ended: false,
            last_row: Vec::new(),
        }
    }

    /// Whether it shares nothing with other requests.
    pub(super) fn private(&self) -> bool {
        self.salt.starts_with('\0')
    }

    /// Tokens the model must have read before the next one can be chosen.
    pub(super) fn goal(&self) -> usize {
        if self.text.len() == self.request.prompt.len() { self.text.len() } else { self.text.len() - 1 }
    }

    /// Tokens of the answer.
    pub(super) fn output(&self) -> usize {
        self.text.len() - self.request.prompt.len()
    }

    /// Most tokens the answer may still get.
    pub(super) fn room(&self, context: usize) -> usize {
        (self.request.max_tokens - self.output()).min(context - self.text.len().min(context))
    }

    /// Gives the sink an event. A sink that panics has nobody behind it any more.
    pub(super) fn send(&mut self, event: Event) {
        let sink = &mut self.sink;
        if catch_unwind(AssertUnwindSafe(|| sink(event))).is_err() {
            self.cancelled = true;
        }
    }

    /// Chooses the next token from its row of logits. `draft` is the guess at this place with the law it was drawn from.
    /// A panic here is one of this request's sampler or constraint, and costs nobody else.
    pub(super) fn choose<R: Runner>(
        &mut self,
        runner: &R,
        row: &[f32],
        draft: Option<(u32, &Law)>,
        context: usize,
    ) -> Step {
        catch_unwind(AssertUnwindSafe(|| self.choose_from(runner, row, draft, context))).unwrap_or_else(
            |panic| {
                Step::Fail(RequestError::Engine(format!(
                    "choosing a token panicked: {}",
                    panic_text(&*panic)
                )))
            },
        )
    }

    fn choose_from<R: Runner>(
        &mut self,
        runner: &R,
        row: &[f32],
        draft: Option<(u32, &Law)>,
        context: usize,
    ) -> Step {
        let position = self.text.len() as u64;
        let mut mask = None;
        if let Some(c) = &mut self.request.constraint {
            self.mask.fill(u32::MAX);
            if let Err(e) = c.mask(&mut self.mask) {
                return Step::Fail(RequestError::Constraint(e));
            }
            if self.mask.iter().all(|w| *w == 0) {
                return Step::End(Finish::Constraint);
            }
            mask = Some(&self.mask[..]);
        }
        let chosen = match draft {
            Some((guess, law)) => self.sampler.distribution(row, mask).map(|p| {
                let draw = |purpose| uniform(self.request.sampling.seed, position, purpose);
                accept_or_residual(&p, guess, law, draw(Purpose::Accept), draw(Purpose::Residual))
            }),
            None => runner.choose(&self.sampler, row, mask, position),
        };
        let id = match chosen {
            Ok(id) => id,
            // Ids beyond the vocabulary may be all that a mask left.
            Err(NoToken) if self.request.constraint.is_some() => return Step::End(Finish::Constraint),
            Err(e) => return Step::Fail(RequestError::Engine(e.to_string())),
        };
        let stops = self.request.stop_tokens.contains(&id);
        let accepted = self.request.constraint.as_mut().map_or(Ok(()), |c| c.accept(id));
        if let (Err(e), false) = (accepted, stops) {
            return Step::Fail(RequestError::Constraint(e));
        }
        if stops {
            return Step::End(Finish::Stop(id));
        }
        let sampled = self.describe(row, id, self.request.logprobs);
        self.sampler.accept(id);
        self.text.push(id);
        self.usage.output += 1;
        if let Some(copies) = &mut self.copies {
            copies.push(&[id]);
        }
        if self.request.constraint.as_ref().is_some_and(|c| c.finished()) {
            Step::Last(sampled, Finish::Constraint)
        } else if self.room(context) == 0 {
            Step::Last(sampled, Finish::Length)
        } else {
            Step::Token(sampled)
        }
    }

    /// How many of the guesses the constraint could take; none where it panics, which it will say again when it is asked
    /// for a mask.
    pub(super) fn legal(&mut self, guesses: &[u32]) -> usize {
        let Some(c) = &mut self.request.constraint else { return guesses.len() };
        catch_unwind(AssertUnwindSafe(|| c.accepts(guesses))).unwrap_or(0).min(guesses.len())
    }

    /// A token with the log-probabilities that were asked for.
    pub(super) fn describe(&self, row: &[f32], id: u32, wanted: Option<u8>) -> Sampled {
        let row = &row[..self.sampler.addressable().min(row.len())];
        let top = wanted.map_or_else(Vec::new, |n| {
            top_logprobs(row, n as usize).into_iter().map(|(id, l)| (id, l as f32)).collect()
        });
        let watched = self.request.watch.iter().map(|id| logprob(row, *id) as f32).collect();
        Sampled { id, logprob: wanted.map(|_| logprob(row, id) as f32), top, watched }
    }

    /// Counts and times at the end.
    pub(super) fn timings(&self, now: Duration) -> Timings {
        let admitted = self.admitted.unwrap_or(now);
        let done = self.prompt_done.unwrap_or(now);
        Timings {
            queued: admitted.saturating_sub(self.submitted),
            prompt: done.saturating_sub(admitted),
            decode: now.saturating_sub(done),
        }
    }

    /// Copies from the text as it is now.
    pub(super) fn index_copies(&mut self, min_match: usize) {
        let mut copies = CopyDrafter::new(min_match);
        copies.push(&self.text);
        self.copies = Some(copies);
    }
}

/// What a panic said.
pub(super) fn panic_text(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("unknown")
}
