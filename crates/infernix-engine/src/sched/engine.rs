//! The engine's handle and its thread.

use super::api::{CacheOrder, Drain, EngineApi, Request, RequestError, RequestId, Sink, Status, SubmitError};
use super::{EngineOptions, Limits, Runner, Scheduler};
use crate::error::EngineError;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often the cache's part of the status is renewed; it walks the index.
const STATUS_EVERY: Duration = Duration::from_millis(500);

/// Why an engine stopped that panicked where no request is to blame.
const INTERNAL: &str = "an internal error; the standard error stream has the panic's place";

enum Command {
    Submit(RequestId, Box<Request>, Sink),
    Cancel(RequestId),
    Shutdown(Drain),
    Cache(CacheOrder, Sender<Result<usize, String>>),
}

struct Shared {
    options: EngineOptions,
    limits: Limits,
    next: AtomicU64,
    /// Requests that have not ended.
    open: AtomicUsize,
    /// Mean time of a request, in milliseconds.
    mean: AtomicU64,
    status: Mutex<Status>,
    /// What went wrong as it stopped.
    problems: Mutex<Vec<String>>,
    commands: Sender<Command>,
    thread: Mutex<Option<JoinHandle<()>>>,
    warnings: Vec<String>,
}

/// A running engine. Clones are handles to the same one; it stops with [`EngineApi::shutdown`] or with the last handle.
#[derive(Clone)]
pub struct Engine {
    shared: Arc<Shared>,
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Engine {
    /// Starts the engine's thread, makes the model there, and loads the prefix-cache file.
    ///
    /// # Errors
    /// What `make` failed with, or a trace file that cannot be created.
    pub fn start<R: Runner + 'static>(
        options: EngineOptions,
        make: impl FnOnce() -> Result<R, EngineError> + Send + 'static,
    ) -> Result<Engine, EngineError> {
        let (commands, receiver) = channel();
        let (ready, started) = channel();
        let thread = std::thread::Builder::new().name("engine".into()).spawn(move || {
            let made = make().and_then(|runner| Scheduler::new(runner, options));
            match made {
                Ok(mut scheduler) => {
                    let warnings = scheduler.load_cache().err().into_iter().collect();
                    let (shared_sender, shared) = channel::<Arc<Shared>>();
                    let status = scheduler.status(true);
                    let facts =
                        (scheduler.options.clone(), scheduler.limits, status, warnings, shared_sender);
                    drop(ready.send(Ok(facts)));
                    if let Ok(shared) = shared.recv() {
                        let shared = Arc::downgrade(&shared);
                        let left = std::sync::Weak::clone(&shared);
                        let mut worker = Worker { scheduler, receiver, shared, done: 0, drain: None };
                        // Whatever ends the thread, it must not look as if the engine ran; requests end with the
                        // worker, after that.
                        if catch_unwind(AssertUnwindSafe(|| worker.run())).is_err()
                            && let Some(shared) = left.upgrade()
                        {
                            lock(&shared.status).stopped.get_or_insert_with(|| INTERNAL.to_owned());
                            lock(&shared.problems).push(INTERNAL.to_owned());
                        }
                    }
                }
                Err(e) => drop(ready.send(Err(e))),
            }
        });
        let thread =
            thread.map_err(|e| EngineError::Unsupported(format!("no thread for the engine: {e}")))?;
        let gone = |_| EngineError::Unsupported("the engine's thread ended while it started".into());
        let (options, limits, status, warnings, shared_sender) = started.recv().map_err(gone)??;
        let shared = Arc::new(Shared {
            options,
            limits,
            next: AtomicU64::new(1),
            open: AtomicUsize::new(0),
            mean: AtomicU64::new(1000),
            status: Mutex::new(status),
            problems: Mutex::default(),
            commands,
            thread: Mutex::new(Some(thread)),
            warnings,
        });
        drop(shared_sender.send(Arc::clone(&shared)));
        Ok(Engine { shared })
    }

    /// What was found at the start and left aside: a damaged cache file, for one.
    pub fn warnings(&self) -> &[String] {
        &self.shared.warnings
    }

    /// Settings as they apply, within the model's limits.
    pub fn options(&self) -> &EngineOptions {
        &self.shared.options
    }

    /// What made the engine stop, unless it was told to, and what went wrong as it did: a cache file that could not be
    /// written, a trace that is incomplete. `None` while it runs and after an orderly end.
    pub fn stop_problem(&self) -> Option<String> {
        let problems = lock(&self.shared.problems);
        (!problems.is_empty()).then(|| problems.join("; "))
    }

    /// Sizes of the model's state.
    pub fn limits(&self) -> Limits {
        self.shared.limits
    }

    fn capacity(&self) -> usize {
        self.shared.options.max_concurrency + self.shared.options.max_pending_requests
    }

    fn stopped(&self) -> Option<String> {
        lock(&self.shared.status).stopped.clone()
    }
}

impl EngineApi for Engine {
    fn submit(&self, request: Request, sink: Sink) -> Result<RequestId, SubmitError> {
        if let Some(why) = self.stopped() {
            return Err(SubmitError::Stopped(why));
        }
        super::scheduler::check(&request, &self.shared.options)?;
        let s = &self.shared;
        let room = |n: usize| (request.joins || n < self.capacity()).then_some(n + 1);
        if let Err(open) = s.open.fetch_update(Ordering::SeqCst, Ordering::SeqCst, room) {
            lock(&s.status).counters.refused += 1;
            let waves = 1 + (open - s.options.max_concurrency.min(open)) / s.options.max_concurrency;
            let mean = Duration::from_millis(s.mean.load(Ordering::Relaxed));
            let retry_after = (mean / s.options.max_concurrency as u32).max(Duration::from_secs(1));
            return Err(SubmitError::QueueFull {
                retry_after: retry_after.min(mean * waves as u32 + retry_after),
            });
        }
        let id = RequestId(s.next.fetch_add(1, Ordering::SeqCst));
        if s.commands.send(Command::Submit(id, Box::new(request), sink)).is_err() {
            return Err(SubmitError::Stopped(self.stopped().unwrap_or_else(|| super::SHUT_DOWN.into())));
        }
        Ok(id)
    }

    fn cancel(&self, id: RequestId) {
        drop(self.shared.commands.send(Command::Cancel(id)));
    }

    fn status(&self) -> Status {
        lock(&self.shared.status).clone()
    }

    fn cache(&self, order: CacheOrder) -> Result<usize, String> {
        let (answer, answered) = channel();
        let gone = || {
            format!("the engine has stopped: {}", self.stopped().unwrap_or_else(|| super::SHUT_DOWN.into()))
        };
        self.shared.commands.send(Command::Cache(order, answer)).map_err(|_| gone())?;
        answered.recv().map_err(|_| gone())?
    }

    fn shutdown(&self, drain: Drain) {
        drop(self.shared.commands.send(Command::Shutdown(drain)));
        let mut thread = lock(&self.shared.thread);
        if let Some(handle) = thread.take() {
            drop(handle.join());
        }
    }
}

/// The engine's thread. It holds no handle, so that dropping the last one ends it.
struct Worker<R: Runner> {
    scheduler: Scheduler<R>,
    receiver: Receiver<Command>,
    shared: std::sync::Weak<Shared>,
    /// Requests that had ended when last counted.
    done: u64,
    /// Set while stopping: when to stop at the latest.
    drain: Option<Instant>,
}

impl<R: Runner> Worker<R> {
    fn run(&mut self) {
        let mut renewed = Instant::now() - STATUS_EVERY;
        let fault = loop {
            if !self.take_commands() {
                break None;
            }
            let step = catch_unwind(AssertUnwindSafe(|| self.scheduler.step()));
            if step.is_err() {
                break Some(INTERNAL.to_owned());
            }
            if let Some(why) = &self.scheduler.stopped {
                break Some(why.clone());
            }
            let idle = self.scheduler.open() == 0;
            let with_cache = idle || renewed.elapsed() >= STATUS_EVERY;
            if with_cache {
                renewed = Instant::now();
            }
            self.report(with_cache);
            if self.drain.is_some_and(|until| idle || Instant::now() >= until) {
                break None;
            }
        };
        let why = fault.clone().unwrap_or_else(|| super::SHUT_DOWN.to_owned());
        self.note_problems([fault]);
        // Whoever hears that the engine has stopped finds it so everywhere.
        self.scheduler.stopped = Some(why.clone());
        self.report(false);
        // Requests are answered before anything is saved.
        drop(catch_unwind(AssertUnwindSafe(|| self.scheduler.stop(&why))));
        while let Ok(command) = self.receiver.try_recv() {
            if let Command::Submit(_, _, mut sink) = command {
                sink(super::Event::Failed(RequestError::Stopped(why.clone())));
            }
        }
        self.report(false);
        let integrity = self.scheduler.check_idle();
        let trace = self.scheduler.finish_trace();
        let saved = catch_unwind(AssertUnwindSafe(|| self.scheduler.save_cache()));
        let saved = saved.unwrap_or_else(|_| Err("the cache could not be saved".into()));
        self.note_problems([integrity.err(), trace.err(), saved.err()]);
        self.report(true);
    }

    fn note_problems<const N: usize>(&self, problems: [Option<String>; N]) {
        if let Some(shared) = self.shared.upgrade() {
            lock(&shared.problems).extend(problems.into_iter().flatten());
        }
    }

    /// Takes what has arrived; waits where there is nothing else to do. False: the engine is to stop.
    fn take_commands(&mut self) -> bool {
        loop {
            let command = if self.scheduler.open() > 0 || self.drain.is_some() {
                self.receiver.try_recv().map_err(|e| e == TryRecvError::Disconnected)
            } else {
                let wait = Duration::from_secs(1);
                self.receiver.recv_timeout(wait).map_err(|e| e == RecvTimeoutError::Disconnected)
            };
            match command {
                Ok(Command::Submit(_, _, mut sink)) if self.drain.is_some() => {
                    sink(super::Event::Failed(RequestError::Stopped("shutting down".into())));
                    self.ended(1);
                }
                Ok(Command::Submit(id, request, sink)) => self.scheduler.submit_as(id, *request, sink),
                Ok(Command::Cancel(id)) => self.scheduler.cancel(id),
                Ok(Command::Cache(order, answer)) => drop(answer.send(self.cache(order))),
                // With an error: nobody holds the engine any more.
                Ok(Command::Shutdown(Drain::Now)) | Err(true) => return false,
                Ok(Command::Shutdown(Drain::Within(d))) => self.drain = Some(Instant::now() + d),
                Err(false) => return true,
            }
        }
    }

    fn cache(&mut self, order: CacheOrder) -> Result<usize, String> {
        let options = &self.scheduler.options.cache;
        match order {
            _ if !options.enabled => Err("there is no prefix cache (--no-prefix-cache)".to_owned()),
            CacheOrder::Save if options.file.is_none() => {
                Err("there is no file to save to (--prefix-cache-file)".to_owned())
            }
            CacheOrder::Save => self.scheduler.save_cache(),
            CacheOrder::Clear => Ok(self.scheduler.clear_cache()),
        }
    }

    fn ended(&self, n: usize) {
        if let Some(shared) = self.shared.upgrade() {
            shared.open.fetch_sub(n, Ordering::SeqCst);
        }
    }

    /// Publishes where things stand.
    fn report(&mut self, with_cache: bool) {
        let mut status = self.scheduler.status(with_cache);
        let c = &status.counters;
        let done = c.finished + c.cancelled + c.expired + c.failed;
        self.ended((done - self.done) as usize);
        self.done = done;
        let Some(shared) = self.shared.upgrade() else { return };
        if let Some(mean) = self.scheduler.mean_duration() {
            shared.mean.store(mean.as_millis() as u64, Ordering::Relaxed);
        }
        let mut old = lock(&shared.status);
        status.counters.refused = old.counters.refused;
        if !with_cache {
            (status.cache, status.pages) = (old.cache, old.pages);
        }
        *old = status;
    }
}
