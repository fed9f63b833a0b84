//! The scheduler, the prefix cache and the expert-cache policies without a model: traces in, hit rates and times out.

mod bound;
mod experts;
mod model;
mod plan;
mod replay;
mod trace;

pub use bound::most_cached;
pub use experts::{Expert, ExpertHits, ExpertPolicy, simulate, synthetic_routing};
pub use model::{Costs, Fault, SimModel, SimOptions};
pub use plan::{HANDOFF, MOST_KV, Machine, ModelSizes, Needed, PREFILL, Plan, RATES, needed, plan};
pub use replay::{ReplayOptions, Replayed, replay, replay_clairvoyant};
pub use trace::{Synthetic, Trace, TraceRequest};
