//! Detached state: what a prefix cache keeps of a sequence besides its KV pages.

use super::{Driver, Sequence};
use crate::backend::{Backend, CallKind};
use crate::error::EngineError;

/// Recurrent state after a number of tokens, and what the drafter needs there. KV pages and token ids are kept apart.
#[derive(Clone, Debug)]
pub struct Image<S> {
    pub(crate) state: S,
    pub(crate) tokens: usize,
    pub(crate) rope_delta: i64,
    pub(crate) drafted: usize,
    pub(crate) frontier: Vec<f32>,
}

impl<S> Image<S> {
    /// Tokens it stands after.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// The same with another form of the state.
    pub(crate) fn map<T>(&self, state: T) -> Image<T> {
        Image {
            state,
            tokens: self.tokens,
            rope_delta: self.rope_delta,
            drafted: self.drafted,
            frontier: self.frontier.clone(),
        }
    }
}

impl<B: Backend> Driver<B> {
    /// Copies the state of a sequence between rounds, without ids and pages.
    pub fn image(&mut self, s: &mut Sequence) -> Result<Image<B::Snapshot>, EngineError> {
        self.catch_up(&mut [s], CallKind::Decode)?;
        Ok(Image {
            state: self.model.backend.snapshot(s.slot)?,
            tokens: s.ids.len(),
            rope_delta: s.rope_delta,
            drafted: s.drafted,
            frontier: s.frontier.clone(),
        })
    }

    /// Puts a sequence behind `ids`: their KV is in `pages`, which the caller holds and hands over with the call (also
    /// when it fails), the rest is `image`.
    pub fn attach(
        &mut self,
        s: &mut Sequence,
        ids: &[u32],
        pages: Vec<u32>,
        image: &Image<B::Snapshot>,
    ) -> Result<(), EngineError> {
        s.trim(&mut self.pool, 0);
        s.pages = pages;
        self.set_state(s, ids, image)
    }

    pub(super) fn set_state(
        &mut self,
        s: &mut Sequence,
        ids: &[u32],
        image: &Image<B::Snapshot>,
    ) -> Result<(), EngineError> {
        if ids.len() != image.tokens {
            let what = format!("state after {} tokens for a text of {}", image.tokens, ids.len());
            return Err(EngineError::Round(what));
        }
        self.model.backend.restore(s.slot, &image.state)?;
        s.ids.clear();
        s.ids.extend_from_slice(ids);
        s.rope_delta = image.rope_delta;
        s.drafted = image.drafted;
        s.frontier.clone_from(&image.frontier);
        s.pending.clear();
        s.pending_frontier.clear();
        Ok(())
    }
}
