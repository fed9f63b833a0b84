//! A model that computes nothing but keeps state like one.
//!
//! Its KV of a token is a hash of the text up to it, its recurrent state the hash of the text read so far, its logits a
//! function of that hash. With checks on, every call compares pages and state with the text: a page that is stale,
//! shared wrongly or written by someone else is an error at once. Times come from [`Costs`] on a clock of its own.

use crate::driver::{DraftLane, Image, LaneInput, LaneOutput, Sequence, Want};
use crate::error::EngineError;
use crate::numerics::round::mix;
use crate::sample::{NoToken, Sampler};
use crate::sched::{Limits, Runner};
use crate::state::{KvPool, PAGE_TOKENS};
use std::collections::HashMap;
use std::time::Duration;

/// Seconds that calls take.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Costs {
    /// A prompt call.
    pub prefill_call: f64,
    /// A prompt token.
    pub prefill_token: f64,
    /// A prompt token per token before it.
    pub prefill_pair: f64,
    /// A decode round.
    pub round: f64,
    /// A column of a decode round.
    pub column: f64,
    /// A drafter step.
    pub step: f64,
    /// A byte brought from RAM.
    pub restored_byte: f64,
}

impl Default for Costs {
    fn default() -> Self {
        Costs {
            prefill_call: 5e-3,
            prefill_token: 2e-4,
            prefill_pair: 0.0,
            round: 8e-3,
            column: 1e-3,
            step: 1e-3,
            restored_byte: 1.0 / 20e9,
        }
    }
}

/// Sizes of a simulated model.
#[derive(Clone, Copy, Debug)]
pub struct SimOptions {
    /// KV pages.
    pub pages: usize,
    /// Sequences at a time.
    pub sequences: usize,
    /// Rows of the vocabulary; logits are made only where no answers are given.
    pub vocab: usize,
    /// Bytes a page counts as.
    pub page_bytes: u64,
    /// Bytes a state counts as.
    pub state_bytes: u64,
    /// Positions.
    pub max_positions: usize,
    /// Chance that a guess of its drafter is the most likely token; `None` = no drafter.
    pub draft_accuracy: Option<f64>,
    /// Compare pages and state with the text in every call.
    pub checked: bool,
    /// Times.
    pub costs: Costs,
}

impl Default for SimOptions {
    fn default() -> Self {
        SimOptions {
            pages: 64,
            sequences: 2,
            vocab: 97,
            page_bytes: 1000,
            state_bytes: 20_000,
            max_positions: 1 << 20,
            draft_accuracy: None,
            checked: true,
            costs: Costs::default(),
        }
    }
}

/// The model. See the module.
pub struct SimModel {
    options: SimOptions,
    pool: KvPool,
    slots: Vec<usize>,
    /// Hash of the text committed in each slot.
    states: Vec<u64>,
    /// Hashes of the text up to each token of each page.
    kv: Vec<[u64; PAGE_TOKENS]>,
    clock: f64,
    /// Answers by sampler seed: length of the prompt, tokens (after the last: the stop token).
    answers: HashMap<u64, (usize, Vec<u32>)>,
    draws: u64,
    /// Calls until one fails, counted down by every call; `None` = none does.
    pub fail_after: Option<usize>,
    /// How it fails.
    pub fault: Fault,
}

/// How a planted failure shows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fault {
    /// An error of the call.
    #[default]
    Error,
    /// An error of this and every later call.
    Lasting,
    /// A panic.
    Panic,
    /// The backend is unusable from here on.
    Poison,
}

/// Ends scripted answers.
pub(crate) const STOP: u32 = u32::MAX;

fn extend(hash: u64, id: u32) -> u64 {
    mix(hash ^ u64::from(id).wrapping_mul(0x9E37_79B9_7F4A_7C15)).wrapping_add(1)
}

impl SimModel {
    /// A model of these sizes.
    pub fn new(options: SimOptions) -> Self {
        SimModel {
            pool: KvPool::new(options.pages),
            slots: (0..options.sequences).rev().collect(),
            states: vec![0; options.sequences],
            kv: vec![[0; PAGE_TOKENS]; if options.checked { options.pages } else { 0 }],
            clock: 0.0,
            answers: HashMap::new(),
            draws: 0,
            fail_after: None,
            fault: Fault::Error,
            options,
        }
    }

    /// Gives requests of sampler seed `seed` this answer instead of one that follows from the text.
    pub fn answer(&mut self, seed: u64, prompt: usize, tokens: Vec<u32>) {
        self.answers.insert(seed, (prompt, tokens));
    }

    /// Lets time pass to at least this.
    pub fn advance(&mut self, to: Duration) {
        self.clock = self.clock.max(to.as_secs_f64());
    }

    /// Logits after a text.
    pub fn logits(&self, text: &[u32]) -> Vec<f32> {
        self.row(text.iter().fold(0, |h, id| extend(h, *id)))
    }

    /// The text that greedy decoding adds to a prompt.
    pub fn greedy(&self, prompt: &[u32], n: usize) -> Vec<u32> {
        let mut hash = prompt.iter().fold(0, |h, id| extend(h, *id));
        let mut out = Vec::with_capacity(n);
        for _ in 0..n {
            let id = crate::driver::argmax(&self.row(hash));
            hash = extend(hash, id);
            out.push(id);
        }
        out
    }

    fn row(&self, hash: u64) -> Vec<f32> {
        if !self.answers.is_empty() {
            return Vec::new();
        }
        let value = |v: u64| (mix(hash.wrapping_add(v.wrapping_mul(0x1234_5677))) % 1000) as f32 * 5e-3;
        (0..self.options.vocab as u64).map(value).collect()
    }

    fn call(&mut self, seconds: f64) -> Result<(), EngineError> {
        self.clock += seconds;
        match &mut self.fail_after {
            Some(0) => {
                if self.fault != Fault::Lasting {
                    self.fail_after = None;
                }
                match self.fault {
                    Fault::Panic => std::panic::panic_any("a planted panic".to_owned()),
                    Fault::Poison => Err(EngineError::Poisoned("a planted poison".into())),
                    Fault::Error | Fault::Lasting => Err(EngineError::Round("a planted failure".into())),
                }
            }
            Some(n) => {
                *n -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Compares a sequence's pages and state with its text.
    fn verify(&self, s: &Sequence) -> Result<(), EngineError> {
        if !self.options.checked {
            return Ok(());
        }
        let mut hash = 0;
        for (t, id) in s.ids.iter().enumerate() {
            hash = extend(hash, *id);
            let page = s.pages[t / PAGE_TOKENS] as usize;
            if self.kv[page][t % PAGE_TOKENS] != hash {
                return Err(EngineError::Round(format!(
                    "token {t} of {}: page {page} holds another text",
                    s.len()
                )));
            }
        }
        if self.states[s.slot] != hash {
            return Err(EngineError::Round(format!("the state is not that of the {} tokens", s.len())));
        }
        Ok(())
    }

    /// Writes columns after the committed ones; gives the hash after each.
    fn write(&mut self, s: &mut Sequence, ids: &[u32]) -> Result<Vec<u64>, EngineError> {
        self.verify(s)?;
        self.reserve(s, s.len() + ids.len())?;
        let mut hash = self.states[s.slot];
        let mut out = Vec::with_capacity(ids.len());
        for (k, id) in ids.iter().enumerate() {
            hash = extend(hash, *id);
            let t = s.len() + k;
            let page = s.pages[t / PAGE_TOKENS];
            if self.options.checked {
                if self.pool.is_shared(page) {
                    return Err(EngineError::Round(format!("page {page} is written while shared")));
                }
                self.kv[page as usize][t % PAGE_TOKENS] = hash;
            }
            out.push(hash);
        }
        Ok(out)
    }
}

impl Runner for SimModel {
    type State = u64;

    fn limits(&self) -> Limits {
        Limits {
            sequences: self.options.sequences,
            pages: self.options.pages,
            page_bytes: self.options.page_bytes,
            max_positions: self.options.max_positions,
            vocab: self.options.vocab,
            drafts: self.options.draft_accuracy.is_some(),
            saves: true,
        }
    }

    fn pool(&mut self) -> &mut KvPool {
        &mut self.pool
    }

    fn free_slots(&self) -> usize {
        self.slots.len()
    }

    fn open(&mut self, stream: u64) -> Result<Sequence, EngineError> {
        let slots = self.options.sequences;
        let slot = self.slots.pop().ok_or(EngineError::OutOfSlots { slots })?;
        self.states[slot] = 0;
        Ok(Sequence::new(slot, stream))
    }

    fn close(&mut self, mut s: Sequence) {
        s.trim(&mut self.pool, 0);
        self.slots.push(s.slot);
    }

    fn image(&mut self, s: &mut Sequence) -> Result<Image<u64>, EngineError> {
        self.verify(s)?;
        let state = self.states[s.slot];
        Ok(Image { state, tokens: s.len(), rope_delta: 0, drafted: s.len(), frontier: Vec::new() })
    }

    fn state_bytes(&self, _: &Image<u64>) -> u64 {
        self.options.state_bytes
    }

    fn attach(
        &mut self,
        s: &mut Sequence,
        ids: &[u32],
        pages: Vec<u32>,
        image: &Image<u64>,
    ) -> Result<(), EngineError> {
        s.trim(&mut self.pool, 0);
        s.pages = pages;
        s.ids = ids.to_vec();
        s.drafted = ids.len();
        self.states[s.slot] = image.state;
        self.verify(s)
    }

    fn reserve(&mut self, s: &mut Sequence, tokens: usize) -> Result<(), EngineError> {
        let (kv, checked) = (&mut self.kv, self.options.checked);
        s.reserve(&mut self.pool, tokens, |from, to| {
            if checked {
                kv[to as usize] = kv[from as usize];
            }
        })
    }

    fn prefill(&mut self, s: &mut Sequence, ids: &[u32], want: Want) -> Result<LaneOutput, EngineError> {
        let c = self.options.costs;
        let n = ids.len() as f64;
        let pairs = n * (s.len() as f64 + n / 2.0);
        self.call(c.prefill_call + c.prefill_token * n + c.prefill_pair * pairs)?;
        let hashes = self.write(s, ids)?;
        s.ids.extend_from_slice(ids);
        s.drafted = s.ids.len();
        self.states[s.slot] = hashes.last().copied().unwrap_or_default();
        let rows = match want {
            Want::All => &hashes[..],
            Want::Last => &hashes[hashes.len() - 1..],
            _ => &[],
        };
        Ok(LaneOutput { logits: rows.iter().map(|h| self.row(*h)).collect() })
    }

    fn decode(
        &mut self,
        lanes: &mut [LaneInput<'_>],
    ) -> Result<Vec<Result<LaneOutput, String>>, EngineError> {
        let columns: usize = lanes.iter().map(|l| l.ids.len()).sum();
        self.call(self.options.costs.round + self.options.costs.column * columns as f64)?;
        let mut out = Vec::with_capacity(lanes.len());
        for l in lanes {
            let hashes = self.write(l.sequence, l.ids)?;
            l.sequence.pending = l.ids.to_vec();
            out.push(Ok(LaneOutput { logits: hashes.iter().map(|h| self.row(*h)).collect() }));
        }
        Ok(out)
    }

    fn commit(&mut self, s: &mut Sequence, n: usize) -> Result<(), EngineError> {
        let kept: Vec<u32> = s.pending.drain(..).take(n).collect();
        if kept.len() < n {
            return Err(EngineError::Round(format!("commit of {n} columns, {} pending", kept.len())));
        }
        self.states[s.slot] = kept.iter().fold(self.states[s.slot], |h, id| extend(h, *id));
        s.ids.extend(kept);
        s.drafted = s.ids.len();
        let len = s.len();
        s.trim(&mut self.pool, len);
        Ok(())
    }

    fn draft(&mut self, lanes: &mut [DraftLane<'_>]) -> Result<(), EngineError> {
        let steps = lanes.iter().map(|l| l.n).max().unwrap_or(0);
        self.call(self.options.costs.step * steps as f64)?;
        let accuracy = self.options.draft_accuracy.unwrap_or(0.0);
        for l in lanes {
            let mut hash = extend(self.states[l.sequence.slot], l.next);
            for _ in 0..l.n {
                self.draws += 1;
                let dice = (mix(self.draws) >> 11) as f64 / (1u64 << 53) as f64;
                let right = crate::driver::argmax(&self.row(hash));
                let id = if dice < accuracy { right } else { (right + 1) % self.options.vocab as u32 };
                l.drafts.push(id);
                hash = extend(hash, id);
            }
        }
        Ok(())
    }

    fn settled(&self, s: &Sequence) -> usize {
        s.len()
    }

    fn save_page(&mut self, page: u32) -> Result<Vec<u8>, EngineError> {
        let words = self.kv.get(page as usize);
        Ok(words.map_or_else(|| vec![0], |w| w.iter().flat_map(|h| h.to_le_bytes()).collect()))
    }

    fn load_page(&mut self, page: u32, bytes: &[u8]) -> Result<(), EngineError> {
        self.clock += self.options.page_bytes as f64 * self.options.costs.restored_byte;
        if let Some(words) = self.kv.get_mut(page as usize) {
            for (w, b) in words.iter_mut().zip(bytes.chunks_exact(8)) {
                *w = u64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]]);
            }
        }
        Ok(())
    }

    fn save_state(&mut self, state: &u64) -> Result<Vec<u8>, EngineError> {
        Ok(state.to_le_bytes().to_vec())
    }

    fn load_state(&mut self, bytes: &[u8]) -> Result<u64, EngineError> {
        self.clock += self.options.state_bytes as f64 * self.options.costs.restored_byte;
        let word = <[u8; 8]>::try_from(bytes)
            .map_err(|_| EngineError::Round(format!("a state of {} bytes", bytes.len())))?;
        Ok(u64::from_le_bytes(word))
    }

    fn now(&self) -> Duration {
        Duration::from_secs_f64(self.clock)
    }

    fn choose(
        &self,
        sampler: &Sampler,
        row: &[f32],
        mask: Option<&[u32]>,
        position: u64,
    ) -> Result<u32, NoToken> {
        match self.answers.get(&sampler.options().seed) {
            Some((prompt, tokens)) => {
                let at = (position as usize).saturating_sub(*prompt);
                Ok(tokens.get(at).copied().unwrap_or(STOP))
            }
            None => sampler.choose(row, mask, position),
        }
    }
}
