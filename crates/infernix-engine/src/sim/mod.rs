//! The scheduler, the prefix cache and the expert-cache policies without a model: traces in, hit rates and times out.

mod model;

pub use model::{Costs, SimModel, SimOptions};
