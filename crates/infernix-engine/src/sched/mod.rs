//! Many requests over one model: the engine's surface, its settings and its scheduler.

pub mod api;
mod options;
mod scripted;

pub use api::{
    CacheHints, CacheStatus, Constraint, Counters, Drain, EngineApi, Event, Finish, LaneStatus, Rates,
    Request, RequestError, RequestId, Sampled, Sink, Status, SubmitError, TierStatus, Timings, Usage,
};
pub use options::{CacheOptions, EngineOptions, SpecMode, SpecOptions};
pub use scripted::{Script, ScriptedEngine};
