//! The scheduler, the prefix cache and the expert-cache policies without a model: traces in, hit rates and times out.

mod experts;
mod model;
mod plan;
mod replay;
mod trace;

pub use experts::{Expert, ExpertCache, ExpertHits, ExpertPolicy, simulate, synthetic_routing};
pub use model::{Costs, SimModel, SimOptions};
pub use plan::{Machine, ModelSizes, Plan, plan};
pub use replay::{ReplayOptions, Replayed, replay};
pub use trace::{Synthetic, Trace, TraceRequest};
