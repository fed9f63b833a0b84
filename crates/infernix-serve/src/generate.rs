//! Runs plans on the engine and reads what comes.

use crate::decode::Decoder;
use crate::error::ApiError;
use crate::piece::Piece;
use crate::prepare::Plan;
use crate::reply::Running;
use infernix_engine::sched::{EngineApi, Event, RequestId, SubmitError};
use std::collections::VecDeque;
use std::sync::Arc;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// Answers being made. Dropping it cancels what has not ended.
pub(crate) struct Generation {
    engine: Arc<dyn EngineApi>,
    events: UnboundedReceiver<(usize, Option<Event>)>,
    decoders: Vec<Decoder>,
    requests: Vec<RequestId>,
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
    /// Submits every choice of every plan; all or none.
    pub(crate) fn start(engine: &Arc<dyn EngineApi>, plans: &[Plan]) -> Result<Self, ApiError> {
        let (to, events) = unbounded_channel();
        let mut generation = Self {
            engine: Arc::clone(engine),
            events,
            decoders: Vec::new(),
            requests: Vec::new(),
            queue: VecDeque::new(),
        };
        for plan in plans {
            for choice in 0..plan.n {
                let (request, cut) = plan.request(choice);
                let sender = Sender { to: to.clone(), choice: generation.decoders.len() };
                generation.decoders.push(Decoder::new(plan.decode.clone(), cut));
                let sink = Box::new(move |event| {
                    let _ = sender.to.send((sender.choice, Some(event)));
                });
                match engine.submit(request, sink) {
                    Ok(id) => generation.requests.push(id),
                    Err(error) => return Err(refusal(error)),
                }
            }
        }
        Ok(generation)
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
            let running = decoder.running();
            self.queue.extend(pieces.into_iter().map(|piece| (choice, piece, running)));
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
