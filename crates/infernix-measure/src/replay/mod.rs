//! `infernix replay`: a closed-loop agent workload against any OpenAI-compatible server. docs/replay.md describes the
//! scenario, the files and every figure.

pub mod arms;
pub mod corpus;
pub mod metrics;
pub mod observe;
pub mod page;
pub mod persona;
pub mod plan;
pub(crate) mod plots;
pub mod proxy;
pub mod record;
pub mod report;
pub mod runner;

pub use arms::{Arm, Budget, Server, Target, kill_servers};
pub use corpus::Corpus;
pub use plan::{FULL_CONTEXT, MAX_CONTEXT, MIN_CONTEXT, Plan, PlanOptions, agentic};
pub use report::{Played, Report};
pub use runner::{Row, Run, RunOptions, play};
