//! The CUDA backend: every operation of the model as launches of `infernix-cuda`'s kernels.
//!
//! Operations enqueue and nothing waits inside a round. In decode rounds launches are noted on a tape; a tape that has
//! been seen before is replayed as a graph, so a round costs one launch. What varies between rounds is uploaded once,
//! at fixed addresses (`round`). Decode and verify results do not depend on the number of columns of the call or on
//! where experts lie; prompt calls use other kernels and agree with them within their bound.

mod backend;
mod blocks;
mod context;
mod costs;
mod disk;
mod experts;
mod fused;
mod ggml;
mod int8;
mod plan;
mod plans;
mod profile;
mod round;
mod rows;
mod state;
mod tiers;
mod vram;
mod weights;
mod workers;

pub use context::{Cuda, CudaOptions, CudaRouting, CudaSelection, Routing};
pub use costs::{LaunchCost, RoundCosts};
pub use experts::CudaExperts;
pub use profile::{Profile, Span};
pub use state::CudaSnapshot;
pub use tiers::{Placement, TierCounts};
pub use vram::{CudaBuf, Ledger};
pub use weights::CudaWeight;
pub use workers::WorkerRates;
