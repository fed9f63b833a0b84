//! Recurrent state of one sequence, and the record of its uncommitted columns.

use crate::backend::RowKey;
use crate::memory::Lines;
use std::sync::Arc;

/// Recorded columns of a gated delta rule layer: what `commit` needs to replay any prefix of them.
#[derive(Clone, Debug, Default)]
pub struct GdnRecord {
    /// Identity of each recorded column.
    pub keys: Vec<RowKey>,
    /// Convolution outputs `[n, C]`.
    pub u: Vec<f32>,
    /// Decay `g` `[n, value_heads]`, FP32.
    pub g: Vec<f32>,
    /// Write strength `[n, value_heads]`, FP32.
    pub beta: Vec<f32>,
    /// State after all recorded columns.
    pub after: Lines,
}

impl GdnRecord {
    /// Forgets the columns and keeps the buffers.
    pub(super) fn clear(&mut self) {
        self.keys.clear();
        self.u.clear();
        self.g.clear();
        self.beta.clear();
    }
}

/// A gated delta rule layer: S `[value_heads, dk, dv]`.
#[derive(Clone, Debug, Default)]
pub(super) struct GdnSlot {
    pub s: Arc<Lines>,
    pub len: usize,
    pub record: GdnRecord,
    /// Buffers of former states, which the next ones take: a decoded token neither allocates nor copies a state.
    pub spare: Vec<Lines>,
}

impl GdnSlot {
    /// Forgets the record and keeps its buffers.
    pub(super) fn drop_record(&mut self) {
        self.record.clear();
        if !self.record.after.is_empty() {
            self.spare.push(std::mem::take(&mut self.record.after));
        }
    }

    /// Puts `s` in the place of the committed state, whose buffer is kept unless a snapshot holds it.
    pub(super) fn replace(&mut self, s: Arc<Lines>) {
        let old = Arc::try_unwrap(std::mem::replace(&mut self.s, s));
        self.spare.extend(old.ok().filter(|old| !old.is_empty()));
    }

    /// Whether a snapshot holds the committed state too.
    pub(super) fn shared(&self) -> bool {
        Arc::strong_count(&self.s) > 1
    }

    /// The committed state, to be changed; a spare buffer takes over what a snapshot holds.
    pub(super) fn own(&mut self) -> &mut [f32] {
        if self.shared()
            && let Some(mut copy) = self.spare.pop()
        {
            copy.copy_from_slice(&self.s);
            self.s = Arc::new(copy);
        }
        &mut Arc::make_mut(&mut self.s)[..]
    }
}

/// Columns before the next one: `[columns, width]`, oldest first; then the recorded ones.
#[derive(Clone, Debug, Default)]
pub(super) struct ConvSlot {
    pub columns: Vec<f32>,
    pub record: Vec<f32>,
}

/// Index keys of one attention layer.
#[derive(Clone, Debug, Default)]
pub(super) struct IndexSlot {
    /// `[complete blocks, di]`.
    pub pooled: Arc<Vec<f32>>,
    /// `[open tokens, di]`.
    pub raw: Vec<f32>,
    /// Position of each open token.
    pub positions: Vec<[u32; 3]>,
    /// Blocks completed by recorded tokens.
    pub record_pooled: Vec<f32>,
    /// Recorded tokens.
    pub record_raw: Vec<f32>,
    /// Their positions.
    pub record_positions: Vec<[u32; 3]>,
}

/// All recurrent state of one sequence.
#[derive(Clone, Debug, Default)]
pub struct Slot {
    pub(super) gdn: Vec<GdnSlot>,
    pub(super) gdn_conv: Vec<ConvSlot>,
    pub(super) ple_conv: Vec<ConvSlot>,
    pub(super) index: Vec<Option<IndexSlot>>,
}

impl Slot {
    /// Gives the layers that lack a spare buffer, and of which `need` says that they will take one, one each: together
    /// on huge pages, where single ones would lie on small pages.
    pub(super) fn provide(&mut self, need: impl Fn(&GdnSlot) -> bool) {
        let lacks = |g: &&mut GdnSlot| g.spare.is_empty() && need(g);
        let lengths: Vec<usize> = self.gdn.iter_mut().filter(lacks).map(|g| g.s.len()).collect();
        for (g, lines) in self.gdn.iter_mut().filter(lacks).zip(Lines::together(&lengths)) {
            g.spare.push(lines);
        }
    }

    /// Becomes `other` and keeps its buffers.
    pub(super) fn assign(&mut self, other: &Slot) {
        let kept = std::mem::replace(self, other.clone()).gdn;
        for (new, mut old) in self.gdn.iter_mut().zip(kept) {
            old.drop_record();
            old.replace(Arc::default());
            (new.record, new.spare) = (old.record, old.spare);
        }
    }
}

/// Committed state of a slot; large parts are shared until one side writes.
#[derive(Clone, Debug)]
pub struct SlotSnapshot(pub(super) Arc<Slot>);
