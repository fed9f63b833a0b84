//! From a checkpoint to an artifact: recipes, plans, execution, verification and repair.
//!
//! * [`Recipe`] says by parameter class what becomes of each tensor.
//! * [`plan`] turns recipe and headers into a [`Plan`]: every object, its layout, its size to the byte.
//! * [`convert`] carries a plan out: streaming, resumable, within bounded memory.
//! * [`verify()`] decodes an artifact back and compares every word with the checkpoint.
#![forbid(unsafe_code)]

mod build;
pub mod card;
pub mod census;
mod classes;
mod derivation;
mod described;
mod error;
mod exec;
mod experts;
mod export;
mod fill;
mod group;
pub mod ngram;
mod plan;
mod progress;
mod proof;
pub mod proposal;
mod recipe;
mod repair;
mod report;
mod resources;
mod sources;
mod storage;
mod uses;
mod verify;

pub use build::plan;
pub use derivation::{DerivationReport, Derived, Relation, derivation};
pub use error::ConvertError;
pub use exec::{Outcome, RunOptions, convert};
pub use export::{ExportOptions, ExportOutcome, ExportPlan, ExportTarget, Rounded, export, plan_export};
pub use ngram::{NgramPlan, RowFormat};
pub use plan::{ClassSummary, ConvertOptions, Ignored, NgramTarget, Plan, PlanFile, PlannedObject, Proof};
pub use progress::{Progress, Silent};
pub use proof::{ProofLink, ProofObject, ProofTensor, Proofs, proofs};
pub use proposal::{ProposalOptions, Ranking, Vocabulary};
pub use recipe::{Activation, ExpertActivation, Method, ROLES, Recipe, Rule, SourceRole, Target};
pub use repair::{RepairOptions, RepairReport, repair};
pub use sources::{SCHEME_NAMES, Source, SourceSpec, Sources, WeightRef, scheme_name};
pub use verify::{Mismatch, NgramRows, Requantized, VerifyOptions, VerifyReport, Worst, digest_text, verify};
