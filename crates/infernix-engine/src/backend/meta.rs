//! What varies from round to round.

use super::site::RowKey;
use crate::error::EngineError;
use crate::state::PAGE_TOKENS;

/// Recurrent slot of a sequence.
pub type SlotId = usize;

/// Kind of a call; prefill and decode rows never share one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallKind {
    /// Columns are committed as they run.
    Prefill,
    /// Decode and verify: columns are recorded until `commit`.
    Decode,
}

/// Which part of the model a record belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Part {
    /// The decoder layers.
    Target,
    /// The drafter's layer.
    Drafter,
}

/// Which tokens an embedding reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tokens {
    /// `LaneMeta::ids`.
    Current,
    /// `LaneMeta::next_ids` (drafter: the token after each column).
    Next,
}

/// One sequence's columns in a round.
#[derive(Clone, Debug)]
pub struct LaneMeta {
    /// Its recurrent slot.
    pub slot: SlotId,
    /// Its stream for stochastic rounding.
    pub stream: u64,
    /// Sequence index of the first column. In a decode round, columns of earlier uncommitted rounds count.
    pub start: usize,
    /// Tokens of the columns.
    pub ids: Vec<u32>,
    /// Token after each column; empty unless the drafter runs.
    pub next_ids: Vec<u32>,
    /// Rotary position (t, h, w) of each column.
    pub positions: Vec<[u32; 3]>,
    /// Page of each 64 sequence indices from 0; covers all columns.
    pub pages: Vec<u32>,
}

/// A round: its kind, the part of the model it runs, and its lanes.
#[derive(Clone, Debug)]
pub struct StepMeta {
    /// Prefill or decode.
    pub kind: CallKind,
    /// Target layers or drafter.
    pub part: Part,
    /// Lanes; rows of all operands are their columns in this order.
    pub lanes: Vec<LaneMeta>,
}

impl StepMeta {
    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.lanes.iter().map(|l| l.ids.len()).sum()
    }

    /// Identity of every row.
    pub fn keys(&self) -> Vec<RowKey> {
        self.each_row()
            .map(|(l, c)| RowKey { stream: self.lanes[l].stream, position: (self.lanes[l].start + c) as u64 })
            .collect()
    }

    /// (lane, column in the lane) of every row.
    pub fn each_row(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        self.lanes.iter().enumerate().flat_map(|(l, lane)| (0..lane.ids.len()).map(move |c| (l, c)))
    }

    /// Checks lengths, page coverage and that no slot appears twice.
    pub fn validate(&self, slots: usize, pages: usize) -> Result<(), EngineError> {
        let bad = |what: String| Err(EngineError::Round(what));
        for (i, l) in self.lanes.iter().enumerate() {
            if l.ids.is_empty() {
                return bad(format!("lane {i} has no columns"));
            }
            if l.slot >= slots || self.lanes[..i].iter().any(|o| o.slot == l.slot) {
                return bad(format!("lane {i}: slot {} is out of range or used twice", l.slot));
            }
            if l.positions.len() != l.ids.len() || !(l.next_ids.is_empty() || l.next_ids.len() == l.ids.len())
            {
                return bad(format!(
                    "lane {i}: {} ids, {} positions, {} next ids",
                    l.ids.len(),
                    l.positions.len(),
                    l.next_ids.len()
                ));
            }
            let end = l.start + l.ids.len();
            if l.pages.len() * PAGE_TOKENS < end || l.pages.iter().any(|&p| p as usize >= pages) {
                return bad(format!(
                    "lane {i}: {} pages of {pages} do not cover {end} tokens",
                    l.pages.len()
                ));
            }
        }
        Ok(())
    }
}

/// What a round came to.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Failed lanes by index in the round, each with its cause.
    pub failed_lanes: Vec<(usize, String)>,
}
