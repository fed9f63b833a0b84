//! An engine that plays prepared events, for tests of what stands in front of one.

use super::api::{
    CacheOrder, Drain, EngineApi, Event, Finish, Request, RequestError, RequestId, Sink, Status, SubmitError,
    Timings, Usage,
};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Decides what a request gets: the events to play, or a refusal. Called on the submitting thread.
pub type Script = dyn Fn(&Request) -> Result<Vec<Event>, SubmitError> + Send + Sync;

/// Plays a [`Script`]. Events up to the first [`Event::Finished`] or [`Event::Failed`] are played before `submit` returns; a
/// script without one leaves the request open until it is cancelled, or the engine is shut down.
pub struct ScriptedEngine {
    script: Box<Script>,
    next: AtomicU64,
    open: Mutex<Vec<(RequestId, Sink)>>,
    stopped: Mutex<Option<String>>,
    /// What [`EngineApi::status`] gives, besides `stopped` and `lanes`' number.
    pub status: Mutex<Status>,
}

impl ScriptedEngine {
    /// An engine with this script.
    pub fn new(
        script: impl Fn(&Request) -> Result<Vec<Event>, SubmitError> + Send + Sync + 'static,
    ) -> Arc<Self> {
        Arc::new(ScriptedEngine {
            script: Box::new(script),
            next: AtomicU64::new(1),
            open: Mutex::default(),
            stopped: Mutex::default(),
            status: Mutex::default(),
        })
    }

    /// Sends another event to an open request; an ending one closes it.
    pub fn send(&self, id: RequestId, event: Event) {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(at) = open.iter().position(|(o, _)| *o == id) else { return };
        let last = ends(&event);
        (open[at].1)(event);
        if last {
            drop(open.remove(at));
        }
    }

    /// Requests that have not ended.
    pub fn open_requests(&self) -> Vec<RequestId> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner).iter().map(|(id, _)| *id).collect()
    }
}

fn ends(event: &Event) -> bool {
    matches!(event, Event::Finished { .. } | Event::Failed(_))
}

impl EngineApi for ScriptedEngine {
    fn submit(&self, request: Request, mut sink: Sink) -> Result<RequestId, SubmitError> {
        if let Some(why) = &*self.stopped.lock().unwrap_or_else(PoisonError::into_inner) {
            return Err(SubmitError::Stopped(why.clone()));
        }
        let events = (self.script)(&request)?;
        let id = RequestId(self.next.fetch_add(1, Ordering::Relaxed));
        for event in events {
            let last = ends(&event);
            sink(event);
            if last {
                return Ok(id);
            }
        }
        self.open.lock().unwrap_or_else(PoisonError::into_inner).push((id, sink));
        Ok(id)
    }

    fn cancel(&self, id: RequestId) {
        let (usage, timings) = (Usage::default(), Timings::default());
        self.send(id, Event::Finished { reason: Finish::Cancelled, usage, timings });
    }

    fn status(&self) -> Status {
        let mut status = self.status.lock().unwrap_or_else(PoisonError::into_inner).clone();
        status.stopped.clone_from(&self.stopped.lock().unwrap_or_else(PoisonError::into_inner));
        status
    }

    fn cache(&self, _: CacheOrder) -> Result<usize, String> {
        Err("a scripted engine has no cache".to_owned())
    }

    fn shutdown(&self, _: Drain) {
        let why = super::SHUT_DOWN.to_owned();
        *self.stopped.lock().unwrap_or_else(PoisonError::into_inner) = Some(why.clone());
        for (_, mut sink) in self.open.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            sink(Event::Failed(RequestError::Stopped(why.clone())));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_gets_its_script_and_one_end() {
        let engine = ScriptedEngine::new(|r| {
            if r.prompt.is_empty() {
                return Err(SubmitError::Invalid("the prompt is empty".into()));
            }
            Ok(vec![Event::PromptProgress { done: 1, total: 1 }])
        });
        let seen = Arc::new(Mutex::new(Vec::new()));
        let sink = || -> Sink {
            let seen = Arc::clone(&seen);
            Box::new(move |e| seen.lock().unwrap().push(e))
        };
        assert!(engine.submit(Request::default(), sink()).is_err());
        let id = engine.submit(Request { prompt: vec![1], ..Request::default() }, sink()).unwrap();
        engine.cancel(id);
        engine.cancel(id);
        engine.shutdown(Drain::Now);
        assert!(matches!(
            seen.lock().unwrap()[..],
            [Event::PromptProgress { .. }, Event::Finished { reason: Finish::Cancelled, .. }]
        ));
        let late = engine.submit(Request { prompt: vec![1], ..Request::default() }, sink());
        assert!(matches!(late, Err(SubmitError::Stopped(_))));
    }
}
