//! Who runs when.
//!
//! A step is: end what is cancelled or late; give lanes to paused requests, then to queued ones, in order; read one chunk of
//! the oldest unfinished prompt; run one decode round over every lane that decodes. So between two rounds of a decoding
//! request lies at most one chunk of one prompt, and a prompt waits at most one round for its next chunk.
//!
//! Pages are taken as they are needed. When none is free, the cache gives up pages nobody uses; when that is not enough,
//! the youngest request with a lane is paused and its place is kept: the oldest always goes on, so every request ends.

use super::api::{
    Counters, Event, Finish, LaneStatus, Request, RequestError, RequestId, Sink, Status, SubmitError,
};
use super::job::{Job, Lane, Stage};
use super::trace::Recorder;
use super::{EngineOptions, Limits, Runner, SpecMode};
use crate::cache::{CacheEvent, Excerpt, Kind, Miss, MissCause, PrefixCache, common};
use crate::error::EngineError;
use crate::spec::{ChainDrafter, Drafter, Policy};
use crate::state::{KvPool, PAGE_TOKENS};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

/// A snapshot inside a prompt costs a model call, for which it must be this far past another.
const NEAR: usize = PAGE_TOKENS;
/// At the end of an answer it costs its place only, and the head of a prompt is read again by every conversation that has it: so far
/// past another they pay.
const CLOSE: usize = 16;
/// Snapshots that one prompt may leave.
const MAX_POINTS: usize = 8;
/// Model calls that may fail in a row before the engine gives up.
const MAX_FAILURES: usize = 8;

/// Refuses what can never run.
pub(crate) fn check(request: &Request, options: &EngineOptions) -> Result<(), SubmitError> {
    let (tokens, limit) = (request.prompt.len(), options.max_context);
    if tokens == 0 {
        return Err(SubmitError::Invalid("the prompt is empty".into()));
    }
    if let Some(id) = request.prompt.iter().find(|id| **id as usize >= options.addressable) {
        let what = format!("token {id} is beyond the vocabulary of {}", options.addressable);
        return Err(SubmitError::Invalid(what));
    }
    if tokens + request.max_tokens.min(1) > limit {
        return Err(SubmitError::TooLong { tokens, limit });
    }
    Ok(())
}

/// Requests, lanes, cache and model.
///
/// [`super::Engine`] runs one on a thread of its own; tests and measurements that need every step run it themselves.
pub struct Scheduler<R: Runner> {
    pub(super) runner: R,
    pub(crate) cache: PrefixCache<R::State>,
    pub(crate) options: EngineOptions,
    pub(super) limits: Limits,
    /// Waiting, in order.
    queue: VecDeque<Job>,
    /// With a lane or paused, in order of their numbers.
    pub(super) jobs: Vec<Job>,
    next_id: u64,
    pub(super) policy: Policy,
    pub(super) drafter: Box<dyn Drafter<R>>,
    pub(crate) counters: Counters,
    pub(super) failures: usize,
    pub(super) stopped: Option<String>,
    pub(super) recorder: Option<Recorder>,
    rates: super::rates::RateMeter,
    /// Mean seconds of a request.
    mean: Option<f64>,
    /// Calls made, newest last; tests read it.
    #[cfg(test)]
    pub(super) calls: Vec<&'static str>,
}

impl<R: Runner> Scheduler<R> {
    /// A scheduler over a model; options are cut to the model's limits.
    ///
    /// # Errors
    /// A trace file that cannot be created.
    pub fn new(mut runner: R, mut options: EngineOptions) -> Result<Self, EngineError> {
        let limits = runner.limits();
        options.max_concurrency = options.max_concurrency.clamp(1, limits.sequences);
        options.prefill_chunk = options.prefill_chunk.max(1);
        options.max_context =
            options.max_context.min(limits.max_positions).min(limits.pages.saturating_sub(1) * PAGE_TOKENS);
        options.addressable = options.addressable.min(limits.vocab);
        let mode = options.spec;
        let off = mode.mode == SpecMode::Off;
        let chain = if off { Some(0) } else { mode.draft_tokens };
        let copy = if off || mode.mode == SpecMode::Mtp { Some(0) } else { mode.ngram_tokens };
        let recorder = match &options.record_trace {
            Some(path) => {
                runner.record_routing();
                Some(Recorder::create(path, &limits, &options)?)
            }
            None => None,
        };
        Ok(Scheduler {
            cache: PrefixCache::new(options.cache.clone(), limits),
            runner,
            limits,
            queue: VecDeque::new(),
            jobs: Vec::new(),
            next_id: 1,
            policy: Policy::new(chain, copy),
            drafter: Box::new(ChainDrafter),
            counters: Counters::default(),
            failures: 0,
            stopped: None,
            recorder,
            rates: super::rates::RateMeter::default(),
            mean: None,
            options,
            #[cfg(test)]
            calls: Vec::new(),
        })
    }

    /// Queues a request whatever the queue's length. What [`EngineApi::submit`](super::EngineApi::submit) refuses must not come
    /// here.
    pub fn submit(&mut self, request: Request, sink: Sink) -> RequestId {
        let id = RequestId(self.next_id);
        self.next_id += 1;
        self.submit_as(id, request, sink);
        id
    }

    /// The same under a number given before.
    pub(crate) fn submit_as(&mut self, id: RequestId, request: Request, sink: Sink) {
        self.counters.submitted += 1;
        let private = request.cache.bypass || !self.options.cache.enabled;
        let (addressable, vocab) = (self.options.addressable, self.limits.vocab);
        let standing = self.policy.standing();
        let now = self.runner.now();
        if let Some(r) = &mut self.recorder {
            r.request(now, id, &request);
        }
        self.queue.push_back(Job::new(id, request, sink, now, addressable, vocab, standing, private));
    }

    /// Requests that have not ended.
    pub fn open(&self) -> usize {
        self.queue.len() + self.jobs.len()
    }

    /// Marks a request cancelled; it ends with the next step.
    pub fn cancel(&mut self, id: RequestId) {
        let mut all = self.queue.iter_mut().chain(&mut self.jobs);
        if let Some(job) = all.find(|j| j.id == id) {
            job.cancelled = true;
        }
    }

    /// One step. Gives whether a model call was made.
    pub fn step(&mut self) -> bool {
        self.expire();
        self.admit();
        let mut worked = self.read();
        worked |= self.decode();
        self.jobs.retain(|j| !j.ended);
        for event in std::mem::take(&mut self.cache.events) {
            match event {
                CacheEvent::Snapshot { .. } => self.counters.snapshots += 1,
                CacheEvent::DroppedSnapshot { .. } => self.counters.evicted_snapshots += 1,
                CacheEvent::DroppedBlock => self.counters.evicted_blocks += 1,
                CacheEvent::Restored { bytes } => self.counters.restored_bytes += bytes,
            }
            if let Some(r) = &mut self.recorder {
                r.cache(event);
            }
        }
        worked
    }

    /// Notes the experts of a model call that just ended.
    pub(super) fn record_routing(&mut self, call: &str) {
        if let Some(r) = &mut self.recorder {
            r.routing(call, &self.runner.take_routing());
        }
    }

    fn expire(&mut self) {
        let now = self.runner.now();
        let timeout = self.options.pending_timeout;
        let late = |j: &Job| j.request.deadline.is_some_and(|d| now >= j.submitted + d);
        for i in 0..self.jobs.len() {
            if self.jobs[i].cancelled {
                self.finish(i, Finish::Cancelled);
            } else if late(&self.jobs[i]) {
                self.finish(i, Finish::Deadline);
            }
        }
        self.jobs.retain(|j| !j.ended);
        let mut rest = VecDeque::with_capacity(self.queue.len());
        for mut job in std::mem::take(&mut self.queue) {
            if job.cancelled || late(&job) {
                let reason = if job.cancelled { Finish::Cancelled } else { Finish::Deadline };
                self.close(&mut job, Ok(reason));
            } else if !timeout.is_zero() && now >= job.submitted + timeout && !job.request.joins {
                self.counters.expired += 1;
                job.ended = true;
                job.send(Event::Failed(RequestError::QueueTimeout(timeout)));
            } else {
                rest.push_back(job);
            }
        }
        self.queue = rest;
    }

    fn lanes(&self) -> usize {
        self.jobs.iter().filter(|j| j.lane.is_some()).count()
    }

    /// Gives lanes to paused requests, oldest first, then to the head of the queue.
    fn admit(&mut self) {
        while self.lanes() < self.options.max_concurrency {
            if let Some(i) = self.jobs.iter().position(|j| j.stage == Stage::Paused && !j.ended) {
                // A pause would follow at once unless its text fits beside what the others are about to take.
                let need = self.jobs[i].text.len().div_ceil(PAGE_TOKENS) + 1 + self.lanes();
                let idle = self.cache.idle_pages(&mut self.runner);
                if self.lanes() > 0 && self.runner.pool().available() + idle < need {
                    return;
                }
                if !self.open_lane(i) {
                    return;
                }
                continue;
            }
            let Some(head) = self.queue.front() else { return };
            // One page is enough to start; the prompt takes the rest as it is read, if no older request needs it.
            if self.lanes() > 0 {
                let need = head.request.prompt.len().min(self.options.prefill_chunk).div_ceil(PAGE_TOKENS)
                    + self.lanes();
                if self.runner.pool().available() + self.cache.idle_pages(&mut self.runner) < need {
                    return;
                }
            }
            let Some(mut job) = self.queue.pop_front() else { return };
            self.note_shared(&mut job);
            self.jobs.push(job);
            let i = self.jobs.len() - 1;
            if !self.open_lane(i) {
                return;
            }
        }
    }

    /// A request that begins like one whose prompt is still being read will find a snapshot where they part.
    fn note_shared(&mut self, job: &mut Job) {
        for other in &mut self.jobs {
            if other.salt != job.salt {
                continue;
            }
            let Some(lane) = &mut other.lane else { continue };
            let shared = common(&other.request.prompt, &job.request.prompt);
            if shared > lane.sequence.len() && shared >= 2 * NEAR && shared < other.request.prompt.len() {
                lane.points.push(shared);
                lane.points.sort_unstable();
            }
        }
    }

    fn open_lane(&mut self, i: usize) -> bool {
        let sequence = match self.runner.open(0) {
            Ok(s) => s,
            Err(e) => {
                self.fail(i, RequestError::Engine(e.to_string()));
                return false;
            }
        };
        let now = self.runner.now();
        let cursor = self.cache.start(&self.jobs[i].salt);
        let job = &mut self.jobs[i];
        job.stage = Stage::Reading;
        job.admitted.get_or_insert(now);
        job.lane =
            Some(Lane { sequence, cursor, looked_up: false, resumed: 0, deepest: 0, points: Vec::new() });
        true
    }

    /// Asks the cache, right before the first chunk: by then older prompts have left their snapshots.
    pub(super) fn look_up(&mut self, i: usize) -> Result<(), EngineError> {
        let job = &mut self.jobs[i];
        let first = job.usage.preemptions == 0;
        // After a pause the next token is known already, so the state may stand right before it.
        let limit = if job.output() == 0 { job.text.len() - 1 } else { job.goal() };
        let reread = (job.request.cache.reread || job.request.prompt_logprobs.is_some()) && job.output() == 0;
        let usable = !reread && (!job.private() || job.kept.is_some());
        let limit = if usable { limit } else { 0 };
        let mut found = self.cache.find(&job.salt, &job.text[..job.goal()], limit);
        let pages = self.cache.pages_to_bring(&found);
        if pages > 0 {
            if !self.make_room(i, |_, _| pages) {
                return Ok(());
            }
            // Making room may have cost some of it.
            let job = &self.jobs[i];
            found = self.cache.find(&job.salt, &job.text[..job.goal()], limit);
        }
        let job = &mut self.jobs[i];
        let Some(lane) = &mut job.lane else { return Ok(()) };
        lane.looked_up = true;
        if self.cache.attach(&mut self.runner, &found, &mut lane.sequence, &mut lane.cursor, &job.text)? {
            lane.resumed = found.tokens;
            lane.deepest = found.tokens;
        } else {
            found.tokens = 0;
        }
        if let Some(kept) = job.kept.take() {
            self.cache.pin(kept, false);
            if job.private() {
                self.cache.forget(&mut self.runner, kept);
            }
        }
        if first {
            if !job.private() {
                self.cache.served(&job.salt, &job.request.prompt);
            }
            job.usage.cached = found.tokens;
            self.counters.prompt_tokens += job.usage.prompt as u64;
            self.counters.cached_tokens += found.tokens as u64;
            if !usable {
                let (cached, prompt) = (Excerpt::default(), Excerpt::default());
                let (shared, cause) = (found.shared, MissCause::Bypassed);
                found.miss = Some(Miss { shared, reused: 0, cause, cached, prompt });
            }
            let queued = job.admitted.unwrap_or_default().saturating_sub(job.submitted);
            let miss = found.miss.take().map(Box::new);
            job.send(Event::Admitted { queued, cached_tokens: found.tokens, miss });
        } else {
            self.counters.replayed_tokens += job.read.saturating_sub(found.tokens) as u64;
        }
        let shared = found.shared;
        self.plan_points(i, shared);
        Ok(())
    }

    /// Where snapshots of this text pay: where the client says, where another text parted, before the last token of the
    /// prompt, and at distances from its end that double. The first of the client's markers ends what conversations share.
    fn plan_points(&mut self, i: usize, shared: usize) {
        let chunk = self.options.prefill_chunk;
        let gap = self.options.cache.min_gap.max(NEAR);
        let job = &mut self.jobs[i];
        let prompt = job.request.prompt.len();
        let Some(lane) = &mut job.lane else { return };
        if job.salt.starts_with('\0') {
            lane.points.clear();
            return;
        }
        let resumed = lane.resumed;
        let mut points: Vec<usize> = job.request.cache.markers.clone();
        let head = points.iter().min().copied();
        let apart = |p: usize| if Some(p) == head { CLOSE } else { NEAR };
        points.append(&mut lane.points);
        points.push(shared);
        points.push(prompt - 1);
        points.retain(|p| *p >= resumed + apart(*p) && *p < prompt);
        points.sort_unstable();
        // Of points close together the earliest serves all.
        points.dedup_by(|later, earlier| *later - *earlier < apart(*later));
        let mut back = (2 * chunk).max(4096);
        while back < prompt && points.len() < MAX_POINTS {
            let at = (prompt - back) / chunk * chunk;
            let far = |p: &usize| p.abs_diff(at) >= gap;
            if at >= resumed + gap && points.iter().all(far) {
                points.push(at);
            }
            back *= 2;
        }
        points.sort_unstable();
        let keep = points.len().saturating_sub(MAX_POINTS);
        lane.points = points.split_off(keep);
    }

    /// Takes pages for a lane to hold `tokens`, pausing younger requests if it must. False: the request itself was paused,
    /// or failed.
    pub(super) fn ensure(&mut self, i: usize, tokens: usize) -> bool {
        if !self.make_room(i, |lane, pool| lane.sequence.pages_missing(pool, tokens)) {
            return false;
        }
        let Some(lane) = &mut self.jobs[i].lane else { return false };
        match self.runner.reserve(&mut lane.sequence, tokens) {
            Ok(()) => true,
            Err(e) => {
                self.fail(i, RequestError::OutOfMemory(e.to_string()));
                false
            }
        }
    }

    fn make_room(&mut self, i: usize, missing: impl Fn(&Lane, &KvPool) -> usize) -> bool {
        loop {
            let Some(lane) = &self.jobs[i].lane else { return false };
            let pages = missing(lane, self.runner.pool());
            if self.cache.free_pages(&mut self.runner, pages).is_ok() {
                return true;
            }
            let youngest = self.jobs.iter().rposition(|j| j.lane.is_some() && !j.ended);
            match youngest {
                Some(victim) if victim != i || self.lanes() > 1 => {
                    self.pause(victim);
                    if victim == i {
                        return false;
                    }
                }
                _ => {
                    let all = self.limits.pages;
                    let what = format!("{pages} more pages are needed of the {all} of the KV pool");
                    self.fail(i, RequestError::OutOfMemory(what));
                    return false;
                }
            }
        }
    }

    /// Takes a request's lane. Its state is kept in the cache as far as there is room; what is not is read again later.
    fn pause(&mut self, i: usize) {
        self.counters.preemptions += 1;
        let job = &mut self.jobs[i];
        job.usage.preemptions += 1;
        job.stage = Stage::Paused;
        let Some(mut lane) = job.lane.take() else { return };
        job.read = lane.sequence.len();
        let kept = self.cache.snapshot(&mut self.runner, &mut lane.sequence, &mut lane.cursor, Kind::End);
        if let Ok(Some(id)) = kept {
            self.cache.pin(id, true);
            job.kept = Some(id);
        }
        if !lane.looked_up {
            // Not admitted yet as far as its sender knows.
            job.usage.preemptions -= 1;
        }
        self.runner.close(lane.sequence);
        self.cache.stop(lane.cursor);
    }

    /// Ends a request in order.
    pub(super) fn finish(&mut self, i: usize, reason: Finish) {
        let mut job = self.jobs.remove(i);
        self.close(&mut job, Ok(reason));
        self.jobs.insert(i, job);
    }

    /// Ends a request that failed.
    pub(super) fn fail(&mut self, i: usize, error: RequestError) {
        let mut job = self.jobs.remove(i);
        self.close(&mut job, Err(error));
        self.jobs.insert(i, job);
    }

    fn close(&mut self, job: &mut Job, end: Result<Finish, RequestError>) {
        if job.ended {
            return;
        }
        if let Some(mut lane) = job.lane.take() {
            // After a failed call the state is not what its tokens say.
            if end.is_ok() && !job.private() && lane.looked_up {
                let n = lane.sequence.len();
                if n >= NEAR.max(lane.deepest + CLOSE) {
                    let taken = self.cache.snapshot(
                        &mut self.runner,
                        &mut lane.sequence,
                        &mut lane.cursor,
                        Kind::End,
                    );
                    if matches!(taken, Ok(Some(_))) {
                        self.cache.supersede(&lane.cursor, lane.resumed);
                    }
                }
            }
            self.runner.close(lane.sequence);
            self.cache.stop(lane.cursor);
        }
        if let Some(kept) = job.kept.take() {
            self.cache.pin(kept, false);
            if job.private() {
                self.cache.forget(&mut self.runner, kept);
            }
        }
        job.ended = true;
        if job.usage.drafted > 0 {
            self.policy.ended(&job.standing);
        }
        let now = self.runner.now();
        if let Some(r) = &mut self.recorder {
            r.end(now, job.id, &job.text[job.request.prompt.len()..], &job.usage);
        }
        if job.admitted.is_some() {
            let took = now.saturating_sub(job.submitted).as_secs_f64();
            self.mean = Some(self.mean.map_or(took, |m| m + 0.1 * (took - m)));
        }
        match end {
            Ok(reason) => {
                match reason {
                    Finish::Cancelled => self.counters.cancelled += 1,
                    Finish::Deadline => self.counters.expired += 1,
                    _ => self.counters.finished += 1,
                }
                let (usage, timings) = (job.usage, job.timings(now));
                job.send(Event::Finished { reason, usage, timings });
            }
            Err(error) => {
                self.counters.failed += 1;
                job.send(Event::Failed(error));
            }
        }
    }

    /// Ends everything.
    pub(crate) fn stop(&mut self, why: &str) {
        self.stopped.get_or_insert_with(|| why.to_owned());
        let error = RequestError::Stopped(why.to_owned());
        for mut job in std::mem::take(&mut self.queue).into_iter().chain(std::mem::take(&mut self.jobs)) {
            self.close(&mut job, Err(error.clone()));
        }
    }

    /// Runs a model call; what it panics with is an error like others. Counts failures: too many without a chunk or round between
    /// them that went well to its end, or a poisoned backend, stop the engine.
    pub(super) fn call<T>(
        &mut self,
        f: impl FnOnce(&mut Self) -> Result<T, EngineError>,
    ) -> Result<T, RequestError> {
        let result = catch_unwind(AssertUnwindSafe(|| f(self))).unwrap_or_else(|panic| {
            let text = super::job::panic_text(&*panic);
            Err(EngineError::Round(format!("a model call panicked: {text}")))
        });
        match result {
            Ok(value) => Ok(value),
            Err(e) => {
                self.failures += 1;
                if matches!(e, EngineError::Poisoned(_)) || self.failures >= MAX_FAILURES {
                    self.stopped = Some(e.to_string());
                }
                Err(RequestError::Engine(e.to_string()))
            }
        }
    }

    pub(super) fn measured(&mut self, prefill: usize, decode: usize) {
        let now = self.runner.now();
        self.rates.add(now, prefill, decode);
    }

    /// Where everything stands; the cache's part is left out unless asked for, as it walks the index.
    pub fn status(&mut self, with_cache: bool) -> Status {
        let now = self.runner.now();
        let lanes = self.jobs.iter().filter(|j| j.lane.is_some()).map(|j| LaneStatus {
            id: j.id.0,
            session: j.request.cache.session.clone(),
            prompt: (
                j.lane.as_ref().map_or(0, |l| l.sequence.len()).min(j.request.prompt.len()),
                j.request.prompt.len(),
            ),
            output: (j.output(), j.request.max_tokens),
            age: now.saturating_sub(j.submitted),
        });
        let lanes = lanes.collect();
        let free = self.runner.pool().available();
        Status {
            stopped: self.stopped.clone(),
            lanes,
            max_lanes: self.options.max_concurrency,
            queued: self.queue.len(),
            paused: self.jobs.iter().filter(|j| j.stage == Stage::Paused).count(),
            max_queued: self.options.max_pending_requests,
            context: self.options.max_context,
            pages: (
                self.limits.pages,
                free + if with_cache { self.cache.idle_pages(&mut self.runner) } else { 0 },
            ),
            cache: if with_cache { self.cache.status() } else { Default::default() },
            counters: self.counters,
            rates: self.rates.rates(now),
            speculation: self.speculation(),
        }
    }

    fn speculation(&self) -> String {
        let spec = self.options.spec;
        let auto = |n: Option<usize>| n.map_or("auto".to_owned(), |n| n.to_string());
        if spec.mode == SpecMode::Off {
            return "off".into();
        }
        let chain =
            if self.limits.drafts { format!("mtp {}", auto(spec.draft_tokens)) } else { "no drafter".into() };
        match spec.mode {
            SpecMode::Auto => format!("{chain}, copies {}", auto(spec.ngram_tokens.or(spec.draft_tokens))),
            _ => chain,
        }
    }

    /// Tokens that prompt and answer may have together.
    pub fn max_context(&self) -> usize {
        self.options.max_context
    }

    /// The runner's clock.
    pub fn now(&self) -> Duration {
        self.runner.now()
    }

    /// Mean time of a request.
    pub(crate) fn mean_duration(&self) -> Option<Duration> {
        self.mean.map(Duration::from_secs_f64)
    }

    /// Reads the prefix-cache file. Gives the snapshots it held.
    ///
    /// # Errors
    /// Why the file is ignored; the cache is then empty.
    pub fn load_cache(&mut self) -> Result<usize, String> {
        self.cache.load_file(&mut self.runner)
    }

    /// Writes it. Gives the snapshots written.
    ///
    /// # Errors
    /// Why it was not written; an older file stays.
    pub fn save_cache(&mut self) -> Result<usize, String> {
        self.cache.save_file(&mut self.runner)
    }

    /// Drops what no request uses.
    pub(crate) fn clear_cache(&mut self) -> usize {
        self.cache.clear(&mut self.runner)
    }

    /// Completes the trace, if one is recorded.
    ///
    /// # Errors
    /// Why it is incomplete.
    pub fn finish_trace(&mut self) -> Result<(), String> {
        self.recorder.as_mut().map_or(Ok(()), Recorder::finish)
    }

    /// With nothing running, every page is free or the cache's, and every slot is free.
    ///
    /// # Errors
    /// What is missing or miscounted.
    pub fn check_idle(&mut self) -> Result<(), String> {
        if !self.jobs.is_empty() {
            return Err(format!("{} requests have not ended", self.jobs.len()));
        }
        let (free, slots) = (self.runner.pool().available(), self.runner.free_slots());
        let idle = self.cache.idle_pages(&mut self.runner);
        if free + idle != self.limits.pages {
            return Err(format!("{free} pages are free and {idle} cached, of {}", self.limits.pages));
        }
        if slots != self.limits.sequences {
            return Err(format!("{slots} of {} slots are free", self.limits.sequences));
        }
        self.cache.check()
    }
}

impl<R: Runner> Scheduler<R> {
    /// Ends every request, empties the cache and gives the model back; with it the outcome of the checks: pages, slots and
    /// counts are what they should be, and all are free again.
    pub fn into_runner(mut self) -> (R, Result<(), String>) {
        self.stop("the scheduler was taken apart");
        let mut checked = self.check_idle();
        self.cache.clear(&mut self.runner);
        let free = self.runner.pool().available();
        if checked.is_ok() && free != self.limits.pages {
            checked = Err(format!("{free} of {} pages are free without a cache", self.limits.pages));
        }
        (self.runner, checked)
    }
}

impl Scheduler<crate::sim::SimModel> {
    /// Lets simulated time pass to at least this.
    pub(crate) fn advance(&mut self, to: Duration) {
        self.runner.advance(to);
    }
}
