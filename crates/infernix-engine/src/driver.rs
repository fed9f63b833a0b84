//! Running sequences through a model: rounds, pages, snapshots, drafts.
//!
//! A [`Driver`] owns a model and hands out [`Sequence`]s. It is the plain way to run one or a few sequences; a
//! scheduler that serves many builds on the same calls.

use crate::backend::{Backend, CallKind, LaneMeta, Part, RowKey, StepMeta, Trace};
use crate::error::EngineError;
use crate::model::Model;
use crate::ngram::{Ngram, NgramTicket};
use crate::state::{KvFormat, KvPool, PAGE_TOKENS};

/// Sizes and formats of a driver's state.
#[derive(Clone, Copy, Debug)]
pub struct DriverOptions {
    /// Tokens that all sequences together may hold.
    pub tokens: usize,
    /// Sequences at a time.
    pub sequences: usize,
    /// KV format.
    pub kv: KvFormat,
}

impl Default for DriverOptions {
    fn default() -> Self {
        DriverOptions { tokens: 4096, sequences: 1, kv: KvFormat::Bf16 }
    }
}

/// State of one text.
#[derive(Debug)]
pub struct Sequence {
    slot: usize,
    stream: u64,
    pages: Vec<u32>,
    /// Committed tokens.
    ids: Vec<u32>,
    /// Rotary position of a token = its index + this (images shift it).
    pub rope_delta: i64,
    /// Committed drafter entries.
    drafted: usize,
    /// What the drafter needs of the last committed token; empty when no drafter runs.
    frontier: Vec<f32>,
    /// Columns of the last decode round, not yet committed, with their frontiers.
    pending: Vec<u32>,
    pending_frontier: Vec<f32>,
}

impl Sequence {
    /// Committed tokens.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// Number of committed tokens.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Whether nothing has been committed.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }
}

/// A sequence's state at a point; its KV pages stay those of the sequence.
#[derive(Clone)]
pub struct Snapshot<B: Backend> {
    state: B::Snapshot,
    ids: Vec<u32>,
    rope_delta: i64,
    drafted: usize,
    frontier: Vec<f32>,
}

/// Which rows of a lane to give logits of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// None.
    None,
    /// The last column.
    Last,
    /// All columns.
    All,
    /// Columns from the first index to before the second, where they exist.
    Columns(usize, usize),
}

/// One lane of a round.
pub struct LaneInput<'a> {
    /// The sequence.
    pub sequence: &'a mut Sequence,
    /// New columns.
    pub ids: &'a [u32],
    /// Logits to give.
    pub want: Want,
}

/// What a round gives for one lane.
#[derive(Clone, Debug, Default)]
pub struct LaneOutput {
    /// FP32 logits of the wanted columns, in order, each `[V]`.
    pub logits: Vec<Vec<f32>>,
}

/// Hidden values of a call (`logits --layers`, parity tests).
#[derive(Clone, Debug, Default)]
pub struct LayerRecord {
    /// Residual after the layer `[T, residual width]`.
    pub residual: Vec<f32>,
    /// Experts and blocks chosen in it.
    pub trace: Trace,
    /// Table rows `[T, heads]`, where the layer has an n-gram embedding.
    pub ngram_rows: Option<Vec<u64>>,
}

/// A model with state, running sequences.
pub struct Driver<B: Backend> {
    /// The model.
    pub model: Model<B>,
    ngram: Option<Ngram>,
    pool: KvPool,
    slots: Vec<usize>,
    sequences: usize,
    /// Fill it to have every call record its layers.
    pub record: Option<Vec<LayerRecord>>,
}

impl<B: Backend> Driver<B> {
    /// Allocates state. `ngram` is needed by models with an n-gram embedding.
    pub fn new(
        mut model: Model<B>,
        ngram: Option<Ngram>,
        options: DriverOptions,
    ) -> Result<Self, EngineError> {
        if model.config.ple.is_some() && ngram.is_none() {
            return Err(EngineError::Ngram("the model needs its n-gram volume".into()));
        }
        let pages = options.tokens.div_ceil(PAGE_TOKENS) + options.sequences;
        model.layout.pages = pages;
        model.layout.slots = options.sequences;
        model.layout.kv = options.kv;
        let layout = model.layout.clone();
        model.backend.allocate(&layout)?;
        Ok(Driver {
            model,
            ngram,
            pool: KvPool::new(pages),
            slots: (0..options.sequences).rev().collect(),
            sequences: options.sequences,
            record: None,
        })
    }

    /// Starts an empty sequence; `stream` keys its stochastic rounding.
    pub fn open(&mut self, stream: u64) -> Result<Sequence, EngineError> {
        let slot = self.slots.pop().ok_or(EngineError::OutOfSlots { slots: self.sequences })?;
        self.model.backend.reset(slot);
        Ok(Sequence {
            slot,
            stream,
            pages: Vec::new(),
            ids: Vec::new(),
            rope_delta: 0,
            drafted: 0,
            frontier: Vec::new(),
            pending: Vec::new(),
            pending_frontier: Vec::new(),
        })
    }

    /// Gives a sequence's pages and slot back.
    pub fn close(&mut self, sequence: Sequence) {
        sequence.pages.iter().for_each(|p| self.pool.release(*p));
        self.slots.push(sequence.slot);
    }

    /// Pages nobody holds.
    pub fn free_pages(&self) -> usize {
        self.pool.available()
    }

    /// Copies the state of a sequence between rounds.
    pub fn snapshot(&mut self, s: &Sequence) -> Result<Snapshot<B>, EngineError> {
        Ok(Snapshot {
            state: self.model.backend.snapshot(s.slot)?,
            ids: s.ids.clone(),
            rope_delta: s.rope_delta,
            drafted: s.drafted,
            frontier: s.frontier.clone(),
        })
    }

    /// Returns a sequence to a snapshot of its own past.
    pub fn restore(&mut self, s: &mut Sequence, to: &Snapshot<B>) -> Result<(), EngineError> {
        self.model.backend.restore(s.slot, &to.state)?;
        s.ids.clone_from(&to.ids);
        s.rope_delta = to.rope_delta;
        s.drafted = to.drafted;
        s.frontier.clone_from(&to.frontier);
        s.pending.clear();
        s.pending_frontier.clear();
        self.trim(s, s.ids.len());
        Ok(())
    }

    fn trim(&mut self, s: &mut Sequence, tokens: usize) {
        for page in s.pages.drain(tokens.div_ceil(PAGE_TOKENS).min(s.pages.len())..) {
            self.pool.release(page);
        }
    }

    fn reserve(&mut self, s: &mut Sequence, tokens: usize) -> Result<(), EngineError> {
        while s.pages.len() * PAGE_TOKENS < tokens {
            s.pages.push(self.pool.take()?);
        }
        Ok(())
    }

    fn check_ids(&self, ids: &[u32]) -> Result<(), EngineError> {
        let vocab = self.model.config.vocab;
        match ids.iter().find(|id| u64::from(**id) >= vocab) {
            Some(id) => Err(EngineError::Request(format!("token {id} is beyond the vocabulary of {vocab}"))),
            None => Ok(()),
        }
    }

    /// Reads a prompt, or a chunk of one, and commits it.
    pub fn prefill(&mut self, s: &mut Sequence, ids: &[u32], want: Want) -> Result<LaneOutput, EngineError> {
        let mut lanes = [LaneInput { sequence: s, ids, want }];
        let mut out = self.run(CallKind::Prefill, &mut lanes)?;
        Ok(out.pop().unwrap_or_default())
    }

    /// Reads one token in a decode round and commits it; gives its logits.
    pub fn decode(&mut self, s: &mut Sequence, id: u32) -> Result<Vec<f32>, EngineError> {
        let mut out = self.verify(s, &[id])?;
        self.commit(s, 1)?;
        Ok(out.pop().unwrap_or_default())
    }

    /// Reads columns in a decode round without committing them; gives the logits of each.
    pub fn verify(&mut self, s: &mut Sequence, ids: &[u32]) -> Result<Vec<Vec<f32>>, EngineError> {
        let mut lanes = [LaneInput { sequence: s, ids, want: Want::All }];
        let mut out = self.run(CallKind::Decode, &mut lanes)?;
        Ok(out.pop().unwrap_or_default().logits)
    }

    /// Keeps the first `n` columns of the last decode round.
    pub fn commit(&mut self, s: &mut Sequence, n: usize) -> Result<(), EngineError> {
        if n > s.pending.len() {
            return Err(EngineError::Round(format!("commit of {n} columns, {} pending", s.pending.len())));
        }
        self.model.backend.commit(s.slot, Part::Target, n)?;
        let width = self.model.frontier_width();
        let kept: Vec<u32> = s.pending.drain(..).take(n).collect();
        let mut rows = std::mem::take(&mut s.pending_frontier);
        rows.truncate(n * width);
        self.accept(s, &kept, rows, CallKind::Decode)?;
        self.trim(s, s.ids.len());
        Ok(())
    }

    /// Runs one round over several sequences. Prefill columns are committed; decode columns wait for [`Driver::commit`].
    pub fn run(
        &mut self,
        kind: CallKind,
        lanes: &mut [LaneInput<'_>],
    ) -> Result<Vec<LaneOutput>, EngineError> {
        for l in lanes.iter_mut() {
            if l.ids.is_empty() {
                return Err(EngineError::Request("a lane needs at least one token".into()));
            }
            self.check_ids(l.ids)?;
            if !l.sequence.pending.is_empty() {
                return Err(EngineError::Round("columns of the last decode round are not committed".into()));
            }
            self.reserve(l.sequence, l.sequence.ids.len() + l.ids.len())?;
        }
        let meta = StepMeta {
            kind,
            part: Part::Target,
            lanes: lanes.iter().map(|l| lane_meta(l.sequence, l.sequence.ids.len(), l.ids, &[])).collect(),
        };
        let rows = meta.keys();
        let tickets = self.tickets(lanes);
        self.model.backend.begin_round(meta)?;
        let mut residual = self.model.begin(&rows);
        for i in 0..self.model.layers.len() {
            let own = self.model.config.ple_table(i).map_or(&[][..], |t| &tickets[t][..]);
            let mut trace = Trace::default();
            let wanted = self.record.is_some().then_some(&mut trace);
            self.model.layer(i, &rows, &mut residual, own, wanted);
            if self.record.is_some() {
                let residual = self.model.backend.read(&residual);
                let ngram_rows = self.row_ids(i, lanes);
                let record = self.record.get_or_insert_default();
                record.push(LayerRecord { residual, trace, ngram_rows });
            }
        }
        let mut chosen = Vec::new();
        let mut counts = Vec::new();
        let mut first = 0;
        for l in lanes.iter() {
            let end = first + l.ids.len();
            let range = match l.want {
                Want::None => end..end,
                Want::Last => end - 1..end,
                Want::All => first..end,
                Want::Columns(a, b) => {
                    first.saturating_add(a).min(end)..first.saturating_add(b.max(a)).min(end)
                }
            };
            counts.push(range.len());
            chosen.extend(range);
            first = end;
        }
        let logits = (!chosen.is_empty()).then(|| self.model.finish(&rows, &residual, &chosen).1);
        let frontier = self.model.draft.is_some().then(|| self.model.frontier(&rows, &residual));
        let outcome = self.model.backend.end_round();
        if let Some((lane, cause)) = outcome.failed_lanes.first() {
            for l in lanes.iter_mut() {
                self.trim(l.sequence, l.sequence.ids.len());
            }
            return Err(EngineError::Lane(format!("{lane}: {cause}")));
        }
        let logits = logits.map_or_else(Vec::new, |l| self.model.backend.read(&l));
        let frontier = frontier.map_or_else(Vec::new, |f| self.model.backend.read(&f));
        let (vocab, width) = (self.model.config.vocab as usize, self.model.frontier_width());
        let mut logits = logits.chunks_exact(vocab).map(<[f32]>::to_vec);
        let out = counts.iter().map(|n| LaneOutput { logits: logits.by_ref().take(*n).collect() }).collect();
        let mut first = 0;
        for l in lanes.iter_mut() {
            let end = first + l.ids.len();
            let own =
                if frontier.is_empty() { Vec::new() } else { frontier[first * width..end * width].to_vec() };
            if kind == CallKind::Prefill {
                self.accept(l.sequence, l.ids, own, kind)?;
            } else {
                l.sequence.pending = l.ids.to_vec();
                l.sequence.pending_frontier = own;
            }
            first = end;
        }
        Ok(out)
    }

    fn tickets(&self, lanes: &[LaneInput<'_>]) -> Vec<Vec<NgramTicket>> {
        let (Some(ngram), Some(ple)) = (&self.ngram, &self.model.config.ple) else { return Vec::new() };
        let request = |t: usize, l: &LaneInput<'_>| {
            let tail = l.sequence.ids.len().saturating_sub(ngram.history());
            ngram.request(t, &l.sequence.ids[tail..], l.ids)
        };
        (0..ple.layers.len()).map(|t| lanes.iter().map(|l| request(t, l)).collect()).collect()
    }

    fn row_ids(&self, layer: usize, lanes: &[LaneInput<'_>]) -> Option<Vec<u64>> {
        let table = self.model.config.ple_table(layer)?;
        let ngram = self.ngram.as_ref()?;
        Some(lanes.iter().flat_map(|l| ngram.row_ids(table, &l.sequence.ids, l.ids)).collect())
    }

    /// Commits tokens whose target state is committed, and the drafter entries that have become determined.
    fn accept(
        &mut self,
        s: &mut Sequence,
        ids: &[u32],
        frontier: Vec<f32>,
        kind: CallKind,
    ) -> Result<(), EngineError> {
        if ids.is_empty() {
            return Ok(());
        }
        if frontier.is_empty() {
            s.ids.extend_from_slice(ids);
            return Ok(());
        }
        // Entry t needs the token at t + 1: the last committed token's entry waits for the first new one.
        let width = self.model.frontier_width();
        let mut hidden = std::mem::take(&mut s.frontier);
        let next: Vec<u32> = if hidden.is_empty() { ids[1..].to_vec() } else { ids.to_vec() };
        hidden.extend_from_slice(&frontier);
        s.frontier = hidden.split_off(hidden.len() - width);
        s.ids.extend_from_slice(ids);
        if next.is_empty() {
            return Ok(());
        }
        let own = s.ids[s.drafted..s.drafted + next.len()].to_vec();
        self.draft_round(s, kind, s.drafted, &own, &next, &hidden, false)?;
        if kind == CallKind::Decode {
            self.model.backend.commit(s.slot, Part::Drafter, next.len())?;
        }
        s.drafted += next.len();
        Ok(())
    }

    /// Drafter columns from index `start`: hidden states of the last column, and its logits if asked for.
    #[expect(clippy::too_many_arguments, reason = "the columns of a drafter round")]
    fn draft_round(
        &mut self,
        s: &mut Sequence,
        kind: CallKind,
        start: usize,
        ids: &[u32],
        next: &[u32],
        hidden: &[f32],
        logits: bool,
    ) -> Result<(Vec<f32>, Vec<f32>), EngineError> {
        self.reserve(s, start + ids.len())?;
        let meta = StepMeta { kind, part: Part::Drafter, lanes: vec![lane_meta(s, start, ids, next)] };
        let rows: Vec<RowKey> = meta.keys();
        let b = &mut self.model.backend;
        b.begin_round(meta)?;
        let x = b.write(ids.len(), self.model.config.residual_width() as usize, hidden);
        let step = self.model.draft_step(&rows, &x, None);
        let Some((hidden, head)) = step else {
            self.model.backend.end_round();
            return Err(EngineError::Unsupported("the model was loaded without its drafter".into()));
        };
        let last = ids.len() - 1;
        let out = if logits {
            let h = self.model.backend.take_rows(&head, &[last]);
            Some(self.model.draft_logits(&rows[last..], &h))
        } else {
            None
        };
        let hidden = self.model.backend.take_rows(&hidden, &[last]);
        let outcome = self.model.backend.end_round();
        if let Some((_, cause)) = outcome.failed_lanes.first() {
            return Err(EngineError::Lane(cause.clone()));
        }
        let hidden = self.model.backend.read(&hidden);
        Ok((hidden, out.map_or_else(Vec::new, |l| self.model.backend.read(&l))))
    }

    /// Drafts up to `n` tokens after `next`, the token chosen to follow the committed ones: logits of each draft, the
    /// chain continuing with `choose`'s pick. State is as before afterwards.
    pub fn draft(
        &mut self,
        s: &mut Sequence,
        next: u32,
        n: usize,
        mut choose: impl FnMut(&[f32]) -> u32,
    ) -> Result<Vec<(u32, Vec<f32>)>, EngineError> {
        self.check_ids(&[next])?;
        if s.frontier.is_empty() {
            return Err(EngineError::Unsupported(
                "drafting needs a model with its drafter and a prompt".into(),
            ));
        }
        let mut hidden = s.frontier.clone();
        let (mut own, mut next) = (s.ids[s.ids.len() - 1], next);
        let mut out = Vec::new();
        for k in 0..n {
            let step = self.draft_round(s, CallKind::Decode, s.drafted + k, &[own], &[next], &hidden, true);
            let (h, logits) = match step {
                Ok(done) => done,
                Err(e) => {
                    self.model.backend.commit(s.slot, Part::Drafter, 0)?;
                    return Err(e);
                }
            };
            let token = choose(&logits);
            out.push((token, logits));
            hidden = h;
            (own, next) = (next, token);
        }
        self.model.backend.commit(s.slot, Part::Drafter, 0)?;
        self.trim(s, s.ids.len());
        Ok(out)
    }

    /// Greedy continuation by plain decoding: `n` tokens after the prompt's logits.
    pub fn greedy(
        &mut self,
        s: &mut Sequence,
        mut logits: Vec<f32>,
        n: usize,
    ) -> Result<Vec<u32>, EngineError> {
        let mut out = Vec::with_capacity(n);
        for _ in 0..n {
            let id = argmax(&logits);
            out.push(id);
            logits = self.decode(s, id)?;
        }
        Ok(out)
    }
}

/// The largest value's index, lowest on equality.
pub fn argmax(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (i, v) in logits.iter().enumerate() {
        if *v > logits[best] {
            best = i;
        }
    }
    best as u32
}

fn lane_meta(s: &Sequence, start: usize, ids: &[u32], next: &[u32]) -> LaneMeta {
    let position = |i: usize| (i as i64 + s.rope_delta).max(0) as u32;
    LaneMeta {
        slot: s.slot,
        stream: s.stream,
        start,
        ids: ids.to_vec(),
        next_ids: next.to_vec(),
        positions: (start..start + ids.len()).map(|i| [position(i); 3]).collect(),
        pages: s.pages.clone(),
    }
}
