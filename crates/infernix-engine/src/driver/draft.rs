//! The model's own drafter: keeping its entries in step with the committed tokens, and chains of drafts.
//!
//! Prompts fill the drafter's entries as they are read. In decoding they wait (their frontier rows do) until a draft is
//! asked for, so that plain rounds cost nothing extra and one call over several columns fills the gap.

use super::{Driver, Sequence, argmax, lane_meta};
use crate::backend::{Backend, CallKind, Part, RowKey, StepMeta};
use crate::error::EngineError;
use std::sync::Arc;

/// Entries that may wait before one call fills them.
const MAX_LAG: usize = 32;

/// One lane of a drafting call.
pub struct DraftLane<'a> {
    /// The sequence; its state is as before afterwards.
    pub sequence: &'a mut Sequence,
    /// The token chosen to follow the committed ones.
    pub next: u32,
    /// Tokens to draft.
    pub n: usize,
    /// The drafts.
    pub drafts: Vec<u32>,
}

/// Columns of a drafter round in one lane.
struct Columns<'a> {
    sequence: &'a mut Sequence,
    start: usize,
    ids: Vec<u32>,
    next: Vec<u32>,
    hidden: Vec<f32>,
}

impl<B: Backend> Driver<B> {
    /// Commits tokens whose target state is committed; prompts fill the drafter's entries at once.
    pub(super) fn accept(
        &mut self,
        s: &mut Sequence,
        ids: &[u32],
        frontier: Vec<f32>,
        kind: CallKind,
    ) -> Result<(), EngineError> {
        s.ids.extend_from_slice(ids);
        if frontier.is_empty() {
            return Ok(());
        }
        s.frontier.extend(frontier);
        let waiting = s.ids.len() - 1 - s.drafted;
        if kind == CallKind::Prefill || waiting >= MAX_LAG { self.catch_up(&mut [s], kind) } else { Ok(()) }
    }

    /// Fills the entries that have become determined, all lanes in one call.
    pub(super) fn catch_up(
        &mut self,
        sequences: &mut [&mut Sequence],
        kind: CallKind,
    ) -> Result<(), EngineError> {
        let width = self.model.frontier_width();
        let mut lanes = Vec::new();
        for s in sequences.iter_mut() {
            let waiting = (s.frontier.len() / width).saturating_sub(1);
            if waiting == 0 {
                continue;
            }
            let last = s.frontier.split_off(waiting * width);
            lanes.push(Columns {
                start: s.drafted,
                ids: s.ids[s.drafted..s.drafted + waiting].to_vec(),
                next: s.ids[s.drafted + 1..s.drafted + 1 + waiting].to_vec(),
                hidden: std::mem::replace(&mut s.frontier, last),
                sequence: s,
            });
        }
        if lanes.is_empty() {
            return Ok(());
        }
        self.draft_round(kind, &mut lanes, false)?;
        for l in lanes {
            if kind == CallKind::Decode {
                self.model.backend.commit(l.sequence.slot, Part::Drafter, l.ids.len())?;
            }
            l.sequence.drafted += l.ids.len();
        }
        Ok(())
    }

    /// One drafter round: hidden states of each lane's last column `[lanes, width]`, and its logits if asked for.
    fn draft_round(
        &mut self,
        kind: CallKind,
        lanes: &mut [Columns<'_>],
        logits: bool,
    ) -> Result<(Vec<f32>, Vec<f32>), EngineError> {
        let mut meta = StepMeta { kind, part: Part::Drafter, lanes: Vec::with_capacity(lanes.len()) };
        let (mut hidden, mut last) = (Vec::new(), Vec::with_capacity(lanes.len()));
        for l in lanes.iter_mut() {
            self.reserve(l.sequence, l.start + l.ids.len())?;
            meta.lanes.push(lane_meta(l.sequence, l.start, &l.ids, &l.next));
            hidden.extend_from_slice(&l.hidden);
            last.push(meta.rows() - 1);
        }
        let rows: Vec<RowKey> = meta.keys();
        let b = &mut self.model.backend;
        b.begin_round(meta)?;
        let x = b.write(rows.len(), self.model.config.residual_width() as usize, &hidden);
        let Some((hidden, head)) = self.model.draft_step(&rows, &x, None) else {
            self.model.backend.end_round();
            return Err(EngineError::Unsupported("the model was loaded without its drafter".into()));
        };
        let out = logits.then(|| {
            let h = self.model.backend.take_rows(&head, &last);
            let keys: Vec<RowKey> = last.iter().map(|i| rows[*i]).collect();
            self.model.draft_logits(&keys, &h)
        });
        let hidden = self.model.backend.take_rows(&hidden, &last);
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
        let mut lanes = [DraftLane { sequence: s, next, n, drafts: Vec::new() }];
        let mut out = Vec::new();
        self.draft_chain(&mut lanes, |_, logits| {
            let token = choose(logits);
            out.push((token, logits.to_vec()));
            token
        })?;
        Ok(out)
    }

    /// Drafts the most likely chain of each lane, all lanes in one call a step.
    pub fn draft_lanes(&mut self, lanes: &mut [DraftLane<'_>]) -> Result<(), EngineError> {
        let map = self.model.proposal.as_ref().map(|p| Arc::clone(&p.ids));
        self.draft_chain(lanes, |_, logits| {
            let row = argmax(logits);
            map.as_ref().map_or(row, |ids| ids[row as usize])
        })
    }

    fn draft_chain(
        &mut self,
        lanes: &mut [DraftLane<'_>],
        mut choose: impl FnMut(usize, &[f32]) -> u32,
    ) -> Result<(), EngineError> {
        for l in lanes.iter() {
            self.check_ids(&[l.next])?;
            if l.sequence.frontier.is_empty() {
                return Err(EngineError::Unsupported(
                    "drafting needs a model with its drafter and a prompt".into(),
                ));
            }
        }
        let mut all: Vec<&mut Sequence> = lanes.iter_mut().map(|l| &mut *l.sequence).collect();
        self.catch_up(&mut all, CallKind::Decode)?;
        let width = self.model.frontier_width();
        let mut hidden: Vec<Vec<f32>> = lanes.iter().map(|l| l.sequence.frontier.clone()).collect();
        let deepest = lanes.iter().map(|l| l.n).max().unwrap_or(0);
        let mut result = Ok(());
        for k in 0..deepest {
            let mut who = Vec::new();
            let mut columns = Vec::new();
            for (i, l) in lanes.iter_mut().enumerate().filter(|(_, l)| k < l.n) {
                // Column k pairs the hidden state of one token with the next one.
                let token = |k: usize| if k == 0 { l.next } else { l.drafts[k - 1] };
                let own = if k == 0 { l.sequence.ids[l.sequence.ids.len() - 1] } else { token(k - 1) };
                let next = token(k);
                columns.push(Columns {
                    start: l.sequence.drafted + k,
                    ids: vec![own],
                    next: vec![next],
                    hidden: std::mem::take(&mut hidden[i]),
                    sequence: &mut *l.sequence,
                });
                who.push(i);
            }
            match self.draft_round(CallKind::Decode, &mut columns, true) {
                Ok((h, logits)) => {
                    let vocab = logits.len() / who.len();
                    for (j, i) in who.into_iter().enumerate() {
                        hidden[i] = h[j * width..(j + 1) * width].to_vec();
                        let token = choose(i, &logits[j * vocab..(j + 1) * vocab]);
                        lanes[i].drafts.push(token);
                    }
                }
                Err(e) => {
                    result = Err(e);
                    break;
                }
            }
        }
        for l in lanes.iter_mut() {
            self.model.backend.commit(l.sequence.slot, Part::Drafter, 0)?;
            let len = l.sequence.ids.len();
            l.sequence.trim(&mut self.pool, len);
        }
        result
    }
}
