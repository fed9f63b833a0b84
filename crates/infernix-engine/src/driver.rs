//! Running sequences through a model: rounds, pages, snapshots, drafts.
//!
//! A [`Driver`] owns a model and hands out [`Sequence`]s. It is the plain way to run one or a few sequences; a
//! scheduler that serves many builds on the same calls.

mod draft;
mod image;

pub use draft::DraftLane;
pub use image::Image;

use crate::backend::{Backend, CallKind, LaneMeta, Part, RowKey, StepMeta, Trace};
use crate::error::EngineError;
use crate::model::Model;
use crate::ngram::{Ngram, NgramTicket};
use crate::state::{KvFormat, KvPool, PAGE_TOKENS};
use std::ops::Range;

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
#[derive(Debug, Default)]
pub struct Sequence {
    pub(crate) slot: usize,
    pub(crate) stream: u64,
    /// A page each [`PAGE_TOKENS`] tokens. Pages that others hold too are copied before they are written.
    pub(crate) pages: Vec<u32>,
    /// Committed tokens.
    pub(crate) ids: Vec<u32>,
    /// Rotary position of a token = its index + this (images shift it).
    pub rope_delta: i64,
    /// Committed drafter entries.
    pub(crate) drafted: usize,
    /// What the drafter needs of the committed tokens from `drafted` on; empty when no drafter runs. Entry t needs the
    /// token at t + 1, so at least the last token's row waits here.
    frontier: Vec<f32>,
    /// Columns of the last decode round, not yet committed, with their frontiers.
    pub(crate) pending: Vec<u32>,
    pending_frontier: Vec<f32>,
}

impl Sequence {
    /// An empty sequence in a slot.
    pub(crate) fn new(slot: usize, stream: u64) -> Self {
        Sequence { slot, stream, ..Sequence::default() }
    }

    /// Pages that must be taken before tokens up to `tokens` can be written.
    pub(crate) fn pages_missing(&self, pool: &KvPool, tokens: usize) -> usize {
        let first = self.drafted.min(self.ids.len()) / PAGE_TOKENS;
        let shared = self.pages.iter().skip(first).filter(|p| pool.is_shared(**p)).count();
        tokens.div_ceil(PAGE_TOKENS).saturating_sub(self.pages.len()) + shared
    }

    /// Takes those pages; `copy(from, to)` copies one that others hold too.
    pub(crate) fn reserve(
        &mut self,
        pool: &mut KvPool,
        tokens: usize,
        mut copy: impl FnMut(u32, u32),
    ) -> Result<(), EngineError> {
        let first = self.drafted.min(self.ids.len()) / PAGE_TOKENS;
        for page in self.pages.iter_mut().skip(first) {
            if pool.is_shared(*page) {
                let own = pool.take()?;
                copy(*page, own);
                pool.release(std::mem::replace(page, own));
            }
        }
        while self.pages.len() * PAGE_TOKENS < tokens {
            self.pages.push(pool.take()?);
        }
        Ok(())
    }

    /// Gives back pages past `tokens`.
    pub(crate) fn trim(&mut self, pool: &mut KvPool, tokens: usize) {
        let keep = tokens.div_ceil(PAGE_TOKENS).min(self.pages.len());
        self.pages.drain(keep..).for_each(|p| pool.release(p));
    }

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
    image: Image<B::Snapshot>,
    ids: Vec<u32>,
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
    pub(crate) pool: KvPool,
    pub(crate) slots: Vec<usize>,
    pub(crate) sequences: usize,
    pub(crate) started: std::time::Instant,
    /// Fill it to have every call record its layers.
    pub record: Option<Vec<LayerRecord>>,
    /// Fill it to have every call record the experts of its rows: layer by layer, row by row.
    pub routing: Option<Vec<Vec<Vec<u32>>>>,
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
        if u32::try_from(pages).is_err() {
            let tokens = options.tokens;
            return Err(EngineError::Request(format!(
                "{tokens} tokens of keys and values have no page numbers"
            )));
        }
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
            started: std::time::Instant::now(),
            record: None,
            routing: None,
        })
    }

    /// Starts an empty sequence; `stream` keys its stochastic rounding.
    pub fn open(&mut self, stream: u64) -> Result<Sequence, EngineError> {
        let slot = self.slots.pop().ok_or(EngineError::OutOfSlots { slots: self.sequences })?;
        self.model.backend.reset(slot);
        Ok(Sequence::new(slot, stream))
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
    pub fn snapshot(&mut self, s: &mut Sequence) -> Result<Snapshot<B>, EngineError> {
        Ok(Snapshot { image: self.image(s)?, ids: s.ids.clone() })
    }

    /// Returns a sequence to a snapshot of its own past.
    pub fn restore(&mut self, s: &mut Sequence, to: &Snapshot<B>) -> Result<(), EngineError> {
        s.trim(&mut self.pool, to.ids.len());
        self.set_state(s, &to.ids, &to.image)
    }

    pub(crate) fn reserve(&mut self, s: &mut Sequence, tokens: usize) -> Result<(), EngineError> {
        let backend = &mut self.model.backend;
        s.reserve(&mut self.pool, tokens, |from, to| backend.copy_page(from, to))
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
        s.trim(&mut self.pool, s.ids.len());
        Ok(())
    }

    /// Runs one round over several sequences. Prefill columns are committed; decode columns wait for [`Driver::commit`].
    /// One failed lane fails the call. Token ids beyond the vocabulary and columns beyond the model's positions are
    /// refused before anything runs.
    pub fn run(
        &mut self,
        kind: CallKind,
        lanes: &mut [LaneInput<'_>],
    ) -> Result<Vec<LaneOutput>, EngineError> {
        let mut out = Vec::with_capacity(lanes.len());
        for (i, lane) in self.run_lanes(kind, lanes)?.into_iter().enumerate() {
            out.push(lane.map_err(|cause| EngineError::Lane(format!("{i}: {cause}")))?);
        }
        Ok(out)
    }

    /// The same with an outcome for each lane. A failed lane's sequence must be closed, or restored.
    ///
    /// # Errors
    /// The call itself failed: no lane can go on.
    pub fn run_lanes(
        &mut self,
        kind: CallKind,
        lanes: &mut [LaneInput<'_>],
    ) -> Result<Vec<Result<LaneOutput, String>>, EngineError> {
        for l in lanes.iter_mut() {
            if l.ids.is_empty() {
                return Err(EngineError::Request("a lane needs at least one token".into()));
            }
            self.check_ids(l.ids)?;
            if !l.sequence.pending.is_empty() {
                return Err(EngineError::Round("columns of the last decode round are not committed".into()));
            }
            let (end, most) = (l.sequence.ids.len() + l.ids.len(), self.model.config.max_positions);
            if end as u64 > most {
                return Err(EngineError::Request(format!(
                    "{end} tokens, but the model has {most} positions (max_position_embeddings)"
                )));
            }
        }
        for l in lanes.iter_mut() {
            self.reserve(l.sequence, l.sequence.ids.len() + l.ids.len())?;
        }
        let meta = StepMeta {
            kind,
            part: Part::Target,
            lanes: lanes.iter().map(|l| lane_meta(l.sequence, l.sequence.ids.len(), l.ids, &[])).collect(),
        };
        let rows = meta.keys();
        let traced = self.record.is_some() || self.routing.is_some();
        let walked = lanes.len() == 1 && kind == CallKind::Prefill && !traced;
        let most = if walked { self.model.backend.window_rows() } else { usize::MAX };
        let windows = windows(rows.len(), most);
        if windows.len() > 1 {
            return self.run_windows(meta, lanes, &rows, &windows);
        }
        let tickets = self.tickets(lanes);
        self.model.backend.begin_round(meta)?;
        let mut residual = self.model.begin(&rows);
        for i in 0..self.model.layers.len() {
            let own = self.model.config.ple_table(i).map_or(&[][..], |t| &tickets[t][..]);
            let mut trace = Trace::default();
            let wanted = traced.then_some(&mut trace);
            self.model.layer(i, &rows, &mut residual, own, wanted);
            if let Some(routing) = &mut self.routing {
                let rows = trace.experts.iter().flatten();
                routing.push(rows.map(|row| row.iter().map(|e| e.0).collect()).collect());
            }
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
        let logits = logits.map_or_else(Vec::new, |l| self.model.backend.read(&l));
        let frontier = frontier.map_or_else(Vec::new, |f| self.model.backend.read(&f));
        let (vocab, width) = (self.model.config.vocab as usize, self.model.frontier_width());
        let mut logits = rows_of(logits, vocab);
        let mut out = Vec::with_capacity(lanes.len());
        let mut first = 0;
        for (i, l) in lanes.iter_mut().enumerate() {
            let end = first + l.ids.len();
            let own_logits = logits.by_ref().take(counts[i]).collect();
            if let Some((_, cause)) = outcome.failed_lanes.iter().find(|(lane, _)| *lane == i) {
                l.sequence.trim(&mut self.pool, l.sequence.ids.len());
                out.push(Err(cause.clone()));
                first = end;
                continue;
            }
            out.push(Ok(LaneOutput { logits: own_logits }));
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

    /// A long prompt of one lane, layer by layer over windows of its rows.
    fn run_windows(
        &mut self,
        meta: StepMeta,
        lanes: &mut [LaneInput<'_>],
        rows: &[RowKey],
        windows: &[Range<usize>],
    ) -> Result<Vec<Result<LaneOutput, String>>, EngineError> {
        let [lane] = lanes else { return Err(EngineError::Round("windows of several lanes".into())) };
        let tables = self.model.config.ple.as_ref().map_or(0, |p| p.layers.len());
        let tickets: Vec<Vec<[NgramTicket; 1]>> = match &self.ngram {
            None => Vec::new(),
            Some(ngram) => {
                let text = [&lane.sequence.ids, lane.ids].concat();
                let past = lane.sequence.ids.len();
                let request = |t: usize, w: &Range<usize>| {
                    let (from, to) = (past + w.start, past + w.end);
                    [ngram.request(t, &text[from.saturating_sub(ngram.history())..from], &text[from..to])]
                };
                (0..tables).map(|t| windows.iter().map(|w| request(t, w)).collect()).collect()
            }
        };
        let m = &mut self.model;
        m.backend.begin_round(meta)?;
        let mut residual = Vec::with_capacity(windows.len());
        for w in windows {
            m.backend.window(w.clone());
            residual.push(m.begin(&rows[w.clone()]));
        }
        for i in 0..m.layers.len() {
            for (n, w) in windows.iter().enumerate() {
                m.backend.window(w.clone());
                let own = m.config.ple_table(i).map_or(&[][..], |t| &tickets[t][n][..]);
                m.layer(i, &rows[w.clone()], &mut residual[n], own, None);
            }
        }
        let wanted = match lane.want {
            Want::None => rows.len()..rows.len(),
            Want::Last => rows.len() - 1..rows.len(),
            Want::All => 0..rows.len(),
            Want::Columns(a, b) => a.min(rows.len())..b.max(a).min(rows.len()),
        };
        let (mut logits, mut frontier) = (Vec::new(), Vec::new());
        for (r, w) in residual.iter().zip(windows) {
            let chosen: Vec<usize> =
                (wanted.start.max(w.start)..wanted.end.min(w.end)).map(|i| i - w.start).collect();
            if chosen.is_empty() && m.draft.is_none() {
                continue;
            }
            m.backend.window(w.clone());
            if !chosen.is_empty() {
                logits.push(m.finish(&rows[w.clone()], r, &chosen).1);
            }
            if m.draft.is_some() {
                frontier.push(m.frontier(&rows[w.clone()], r));
            }
        }
        let outcome = m.backend.end_round();
        let vocab = m.config.vocab as usize;
        let logits = logits.iter().flat_map(|l| rows_of(m.backend.read(l), vocab)).collect();
        let frontier: Vec<f32> = frontier.iter().flat_map(|f| m.backend.read(f)).collect();
        if let Some((_, cause)) = outcome.failed_lanes.into_iter().next() {
            lane.sequence.trim(&mut self.pool, lane.sequence.ids.len());
            return Ok(vec![Err(cause)]);
        }
        self.accept(lane.sequence, lane.ids, frontier, CallKind::Prefill)?;
        Ok(vec![Ok(LaneOutput { logits })])
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
    // Runs are compared by their largest values; the search is within one run. Sixteen maxima side by side are vector instructions, one
    // would be a chain of 248,320 steps: 0.1 against 0.6 ms beside each decoded token.
    const RUN: usize = 256;
    let larger = |m: f32, v: &f32| if *v > m { *v } else { m };
    let (mut best, mut run) = (f32::NEG_INFINITY, 0);
    for (i, r) in logits.chunks(RUN).enumerate() {
        let (wide, rest) = r.as_chunks::<16>();
        let mut most = [f32::NEG_INFINITY; 16];
        for c in wide {
            most.iter_mut().zip(c).for_each(|(m, v)| *m = larger(*m, v));
        }
        let most = most.iter().chain(rest).fold(f32::NEG_INFINITY, larger);
        if most > best {
            (best, run) = (most, i);
        }
    }
    let at = logits.iter().skip(run * RUN).position(|v| *v == best);
    at.map_or(0, |i| (run * RUN + i) as u32)
}

/// Rows of `width` values; the only one is not copied.
fn rows_of(values: Vec<f32>, width: usize) -> impl Iterator<Item = Vec<f32>> {
    let one = values.len() == width;
    let (single, several) = if one { (Some(values), Vec::new()) } else { (None, values) };
    let n = several.len() / width.max(1);
    single.into_iter().chain((0..n).map(move |i| several[i * width..(i + 1) * width].to_vec()))
}

/// Cuts `rows` into equal windows of at most `most` rows, on multiples of 64 where that fits.
pub(crate) fn windows(rows: usize, most: usize) -> Vec<Range<usize>> {
    let n = rows.div_ceil(most.max(1)).max(1);
    let size = rows.div_ceil(n).next_multiple_of(64).min(most.max(1));
    (0..rows.div_ceil(size.max(1)).max(1)).map(|i| i * size..((i + 1) * size).min(rows)).collect()
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
