//! Speculation: guess the next tokens cheaply, have the model read the guesses in one call, keep those that its own
//! distribution confirms.
//!
//! A [`Drafter`] proposes, [`verify`] decides, [`Policy`] says who drafts how much. Proposals may only change speed: with a
//! certain proposal (the model's drafter, copies) the token at a place is drawn from the model's distribution with the
//! generator of that place, as in plain decoding, and the draft is right if it equals the draw. So a seed's text does
//! not depend on drafts at all. A drafter that draws from a law of its own is verified by rejection sampling.

mod copy;
mod policy;
mod verify;

pub use copy::CopyDrafter;
pub use policy::{Ask, Choice, Policy, Source, Standing};
pub use verify::{Law, accept_or_residual};

use crate::driver::{DraftLane, Sequence};
use crate::error::EngineError;
use crate::sched::{RequestId, Runner};

/// Guesses of one lane.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Draft {
    /// Proposed tokens in order.
    pub ids: Vec<u32>,
    /// The law each was drawn from; empty where proposals are certain.
    pub laws: Vec<Law>,
}

/// A request for guesses.
pub struct Guess<'a> {
    /// Whose.
    pub request: RequestId,
    /// Its sequence; unchanged afterwards.
    pub sequence: &'a mut Sequence,
    /// The token chosen to follow the committed ones.
    pub next: u32,
    /// Most tokens to propose.
    pub n: usize,
    /// The guesses.
    pub draft: Draft,
}

/// Proposes tokens. Drafters that need context of their own (block drafters) keep it by request.
pub trait Drafter<R: Runner>: Send {
    /// Fills the drafts, all lanes at once.
    fn propose(&mut self, runner: &mut R, lanes: &mut [Guess<'_>]) -> Result<(), EngineError>;
}

/// The model's own drafter, in chains.
#[derive(Clone, Copy, Debug, Default)]
pub struct ChainDrafter;

impl<R: Runner> Drafter<R> for ChainDrafter {
    fn propose(&mut self, runner: &mut R, lanes: &mut [Guess<'_>]) -> Result<(), EngineError> {
        let mut chains: Vec<DraftLane<'_>> = lanes
            .iter_mut()
            .map(|l| DraftLane { sequence: &mut *l.sequence, next: l.next, n: l.n, drafts: Vec::new() })
            .collect();
        runner.draft(&mut chains)?;
        let drafts: Vec<Vec<u32>> = chains.into_iter().map(|c| c.drafts).collect();
        for (lane, ids) in lanes.iter_mut().zip(drafts) {
            lane.draft = Draft { ids, laws: Vec::new() };
        }
        Ok(())
    }
}
