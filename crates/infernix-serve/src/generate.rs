//! Runs plans on the engine and reads what comes.

use crate::decode::Decoder;
use crate::error::ApiError;
use crate::piece::Piece;
use crate::prepare::Plan;
use crate::reply::Running;
use infernix_engine::sched::{EngineApi, Event, Request, RequestId, SubmitError};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// Answers being made. Dropping it cancels what has not ended.
///
/// The answers of a request queue among themselves: as many are with the engine as its lanes can run, and one more, so
/// that no lane waits. The first takes a place in the engine's queue; the others join it, however full that queue is and
/// however long it takes, and between them others have their turn.
pub(crate) struct Generation {
    engine: Arc<dyn EngineApi>,
    started: Instant,
    to: UnboundedSender<(usize, Option<Event>)>,
    events: UnboundedReceiver<(usize, Option<Event>)>,
    decoders: Vec<Decoder>,
    /// Of the first choices, as far as they were submitted.
    requests: Vec<RequestId>,
    /// Of the others, in order.
    waiting: VecDeque<Request>,
    queue: VecDeque<(usize, Piece, Running)>,
}

/// Sends events on; says so if the engine drops it without an end.
struct Sender {
    to: UnboundedSender<(usize, Option<Event>)>,
    choice: usize,
}

impl Drop for Sender {
    fn drop(&mut self) {
        // The receiver is gone when nobody waits any more.
        let _ = self.to.send((self.choice, None));
    }
}

impl Generation {
    /// Submits every choice of every plan, or as many as can run now.
    ///
    /// # Errors
    /// Why the engine takes nothing.
    pub(crate) fn start(engine: &Arc<dyn EngineApi>, plans: &[Plan]) -> Result<Self, ApiError> {
        let (to, events) = unbounded_channel();
        let mut generation = Self {
            engine: Arc::clone(engine),
            started: Instant::now(),
            to,
            events,
            decoders: Vec::new(),
            requests: Vec::new(),
            waiting: VecDeque::new(),
            queue: VecDeque::new(),
        };
        for plan in plans {
            for choice in 0..plan.n {
                let (mut request, cut) = plan.request(choice);
                request.joins |= !generation.waiting.is_empty();
                generation.decoders.push(Decoder::new(plan.decode.clone(), cut));
                generation.waiting.push_back(request);
            }
        }
        match generation.fill() {
            None => Ok(generation),
            Some((_, error)) => Err(error),
        }
    }

    /// Submits what waits, as far as the lanes can take it; gives the choice that was refused, and why.
    fn fill(&mut self) -> Option<(usize, ApiError)> {
        if self.waiting.is_empty() {
            return None;
        }
        let most = self.engine.status().max_lanes.max(1) + 1;
        let ended = self.decoders[..self.requests.len()].iter().filter(|d| d.ended()).count();
        for _ in self.requests.len() - ended..most {
            let mut request = self.waiting.pop_front()?;
            // A request's time is that of all its answers.
            request.deadline = request.deadline.map(|d| d.saturating_sub(self.started.elapsed()));
            let choice = self.requests.len();
            let sender = Sender { to: self.to.clone(), choice };
            let sink = Box::new(move |event| {
                let _ = sender.to.send((sender.choice, Some(event)));
            });
            match self.engine.submit(request, sink) {
                Ok(id) => self.requests.push(id),
                Err(error) => return Some((choice, refusal(error))),
            }
        }
        None
    }

    /// The next piece of any choice; `None` after every choice has ended.
    pub(crate) async fn next(&mut self) -> Option<(usize, Piece, Running)> {
        loop {
            if let Some(next) = self.queue.pop_front() {
                return Some(next);
            }
            if self.decoders.iter().all(Decoder::ended) {
                return None;
            }
            let (choice, event) = self.events.recv().await?;
            let decoder = self.decoders.get_mut(choice)?;
            let pieces = match event {
                Some(event) => decoder.event(event),
                None => decoder.lost(),
            };
            if decoder.ended_early()
                && let Some(id) = self.requests.get(choice)
            {
                self.engine.cancel(*id);
            }
            let (running, ended) = (decoder.running(), decoder.ended());
            self.queue.extend(pieces.into_iter().map(|piece| (choice, piece, running)));
            if ended && let Some((choice, error)) = self.fill() {
                // Nothing can be said for the choices behind it, either.
                self.waiting.clear();
                for (choice, decoder) in self.decoders.iter_mut().enumerate().skip(choice) {
                    let running = decoder.running();
                    let pieces = decoder.refused(error.clone());
                    self.queue.extend(pieces.into_iter().map(|piece| (choice, piece, running)));
                }
            }
        }
    }

    /// Looks at the next piece without taking it.
    pub(crate) async fn peek(&mut self) -> Option<&Piece> {
        if self.queue.is_empty() {
            let next = self.next().await?;
            self.queue.push_front(next);
        }
        self.queue.front().map(|(_, piece, _)| piece)
    }

    pub(crate) fn decoder(&mut self, choice: usize) -> Option<&mut Decoder> {
        self.decoders.get_mut(choice)
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        for (decoder, id) in self.decoders.iter().zip(&self.requests) {
            if !decoder.ended() {
                self.engine.cancel(*id);
            }
        }
    }
}

/// A refusal of the engine for the wire.
pub(crate) fn refusal(error: SubmitError) -> ApiError {
    match error {
        SubmitError::QueueFull { retry_after } => {
            ApiError::overloaded(retry_after.as_secs_f64().ceil().clamp(1.0, 3600.0) as u64)
        }
        SubmitError::TooLong { tokens, limit } => ApiError::context_length(tokens, limit),
        SubmitError::Invalid(message) => ApiError::new(400, "invalid_value", message),
        SubmitError::Stopped(_) => ApiError::unavailable(error.to_string()),
    }
}
