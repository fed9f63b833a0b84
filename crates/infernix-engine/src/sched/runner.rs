//! What the scheduler needs of a model.
//!
//! [`crate::driver::Driver`] is one over any backend; the simulator's model is another, so that scheduler and cache run
//! there unchanged.

use crate::backend::{Backend, CallKind};
use crate::driver::{DraftLane, Driver, Image, LaneInput, LaneOutput, Sequence, Want};
use crate::error::EngineError;
use crate::sample::{NoToken, Sampler};
use crate::state::KvPool;
use std::time::Duration;

/// Sizes of a runner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Sequences at a time.
    pub sequences: usize,
    /// KV pages.
    pub pages: usize,
    /// Bytes of a page.
    pub page_bytes: u64,
    /// Positions the model knows.
    pub max_positions: usize,
    /// Rows of the vocabulary.
    pub vocab: usize,
    /// Whether [`Runner::draft`] works.
    pub drafts: bool,
    /// Whether pages and states can leave the runner.
    pub saves: bool,
}

/// A model that reads, decodes and drafts over pages and slots.
pub trait Runner {
    /// Recurrent state, detached.
    type State: Clone;

    /// Its sizes.
    fn limits(&self) -> Limits;

    /// The KV pages.
    fn pool(&mut self) -> &mut KvPool;

    /// Sequences that can be started.
    fn free_slots(&self) -> usize;

    /// Starts an empty sequence.
    fn open(&mut self, stream: u64) -> Result<Sequence, EngineError>;

    /// Gives its pages and slot back.
    fn close(&mut self, s: Sequence);

    /// Copies its state.
    fn image(&mut self, s: &mut Sequence) -> Result<Image<Self::State>, EngineError>;

    /// Bytes of a state.
    fn state_bytes(&self, image: &Image<Self::State>) -> u64;

    /// Puts a sequence behind `ids`, whose KV is in `pages` (held by the caller and handed over, also on failure).
    fn attach(
        &mut self,
        s: &mut Sequence,
        ids: &[u32],
        pages: Vec<u32>,
        image: &Image<Self::State>,
    ) -> Result<(), EngineError>;

    /// Takes the pages for tokens up to `tokens`, copying those that others hold too. Commits give unused ones back.
    fn reserve(&mut self, s: &mut Sequence, tokens: usize) -> Result<(), EngineError>;

    /// Reads a chunk of a prompt and commits it.
    fn prefill(&mut self, s: &mut Sequence, ids: &[u32], want: Want) -> Result<LaneOutput, EngineError>;

    /// Reads columns of several lanes without committing them. A failed lane's sequence must be closed.
    fn decode(&mut self, lanes: &mut [LaneInput<'_>])
    -> Result<Vec<Result<LaneOutput, String>>, EngineError>;

    /// Keeps the first `n` columns of the last decode round.
    fn commit(&mut self, s: &mut Sequence, n: usize) -> Result<(), EngineError>;

    /// Drafts chains.
    fn draft(&mut self, lanes: &mut [DraftLane<'_>]) -> Result<(), EngineError>;

    /// Tokens of a sequence whose KV will not change any more, drafter's included: what other sequences may share.
    fn settled(&self, s: &Sequence) -> usize;

    /// Words of a page.
    fn save_page(&mut self, page: u32) -> Result<Vec<u8>, EngineError>;

    /// Overwrites a page.
    fn load_page(&mut self, page: u32, bytes: &[u8]) -> Result<(), EngineError>;

    /// Words of a state.
    fn save_state(&mut self, state: &Self::State) -> Result<Vec<u8>, EngineError>;

    /// A state from its words.
    fn load_state(&mut self, bytes: &[u8]) -> Result<Self::State, EngineError>;

    /// Time since some start.
    fn now(&self) -> Duration;

    /// Chooses a token from a row of logits.
    fn choose(
        &self,
        sampler: &Sampler,
        row: &[f32],
        mask: Option<&[u32]>,
        position: u64,
    ) -> Result<u32, NoToken> {
        sampler.choose(row, mask, position)
    }

    /// Starts recording the experts chosen for each row, if the model has any.
    fn record_routing(&mut self) {}

    /// The experts of each layer and row since the last call of this.
    fn take_routing(&mut self) -> Vec<Vec<Vec<u32>>> {
        Vec::new()
    }
}

impl<B: Backend> Runner for Driver<B> {
    type State = B::Snapshot;

    fn limits(&self) -> Limits {
        Limits {
            sequences: self.sequences,
            pages: self.model.layout.pages,
            page_bytes: self.model.backend.page_bytes(),
            max_positions: self.model.config.max_positions as usize,
            vocab: self.model.config.vocab as usize,
            drafts: self.model.draft.is_some(),
            saves: self.model.backend.page_bytes() > 0,
        }
    }

    fn pool(&mut self) -> &mut KvPool {
        &mut self.pool
    }

    fn free_slots(&self) -> usize {
        self.slots.len()
    }

    fn open(&mut self, stream: u64) -> Result<Sequence, EngineError> {
        Driver::open(self, stream)
    }

    fn close(&mut self, s: Sequence) {
        Driver::close(self, s);
    }

    fn image(&mut self, s: &mut Sequence) -> Result<Image<Self::State>, EngineError> {
        Driver::image(self, s)
    }

    fn state_bytes(&self, image: &Image<Self::State>) -> u64 {
        self.model.backend.snapshot_bytes(&image.state) + 4 * image.frontier.len() as u64
    }

    fn attach(
        &mut self,
        s: &mut Sequence,
        ids: &[u32],
        pages: Vec<u32>,
        image: &Image<Self::State>,
    ) -> Result<(), EngineError> {
        Driver::attach(self, s, ids, pages, image)
    }

    fn reserve(&mut self, s: &mut Sequence, tokens: usize) -> Result<(), EngineError> {
        Driver::reserve(self, s, tokens)
    }

    fn prefill(&mut self, s: &mut Sequence, ids: &[u32], want: Want) -> Result<LaneOutput, EngineError> {
        Driver::prefill(self, s, ids, want)
    }

    fn decode(
        &mut self,
        lanes: &mut [LaneInput<'_>],
    ) -> Result<Vec<Result<LaneOutput, String>>, EngineError> {
        self.run_lanes(CallKind::Decode, lanes)
    }

    fn commit(&mut self, s: &mut Sequence, n: usize) -> Result<(), EngineError> {
        Driver::commit(self, s, n)
    }

    fn draft(&mut self, lanes: &mut [DraftLane<'_>]) -> Result<(), EngineError> {
        self.draft_lanes(lanes)
    }

    fn settled(&self, s: &Sequence) -> usize {
        if self.model.draft.is_some() { s.drafted } else { s.len() }
    }

    fn save_page(&mut self, page: u32) -> Result<Vec<u8>, EngineError> {
        self.model.backend.save_page(page)
    }

    fn load_page(&mut self, page: u32, bytes: &[u8]) -> Result<(), EngineError> {
        self.model.backend.load_page(page, bytes)
    }

    fn save_state(&mut self, state: &Self::State) -> Result<Vec<u8>, EngineError> {
        self.model.backend.save_snapshot(state)
    }

    fn load_state(&mut self, bytes: &[u8]) -> Result<Self::State, EngineError> {
        self.model.backend.load_snapshot(bytes)
    }

    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    fn record_routing(&mut self) {
        self.routing.get_or_insert_default();
    }

    fn take_routing(&mut self) -> Vec<Vec<Vec<u32>>> {
        self.routing.as_mut().map(std::mem::take).unwrap_or_default()
    }
}
