//! Many requests over one model.
//!
//! [`Engine`] is the handle; [`api`] says what it takes and gives. Behind it one thread runs the scheduler: who gets
//! a lane, which call comes next (`scheduler`), prompts (`read`), decode rounds (`round`), over anything that is a
//! [`Runner`].

pub mod api;
mod engine;
mod job;
mod options;
mod rates;
mod read;
mod round;
mod runner;
mod scheduler;
mod scripted;
pub(crate) mod trace;

pub use api::{
    CacheHints, CacheOrder, CacheStatus, Constraint, Counters, Drain, EngineApi, Event, Finish, LaneStatus,
    Rates, Request, RequestError, RequestId, Sampled, Sink, Status, SubmitError, TierStatus, Timings, Usage,
};
pub use engine::Engine;
pub use options::{CacheOptions, EngineOptions, SpecMode, SpecOptions};
pub use runner::{Limits, Runner};
pub use scheduler::Scheduler;
pub use scripted::{Script, ScriptedEngine};
pub use trace::TRACE_START;

/// Why an engine stopped that was asked to.
const SHUT_DOWN: &str = "shut down";

#[cfg(test)]
mod tests;
