//! Host state as bytes: snapshots and pages that leave the backend's memory, for RAM tiers and cache files.

use super::host::HostState;
use super::slot::{ConvSlot, GdnSlot, IndexSlot, Slot, SlotSnapshot};
use super::{PAGE_TOKENS, StateLayout};
use crate::error::EngineError;
use crate::memory::Lines;
use std::sync::Arc;

impl SlotSnapshot {
    /// Bytes it occupies (shared parts counted here too).
    pub fn bytes(&self) -> u64 {
        let s = &self.0;
        let words = s.gdn.iter().map(|g| g.s.len()).sum::<usize>()
            + s.gdn_conv.iter().chain(&s.ple_conv).map(|c| c.columns.len()).sum::<usize>()
            + s.index
                .iter()
                .flatten()
                .map(|x| x.pooled.len() + x.raw.len() + 3 * x.positions.len())
                .sum::<usize>();
        4 * words as u64
    }

    /// All words, little-endian, in the layout's order; lists whose length varies are preceded by it.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.bytes() as usize + 64);
        let floats = |out: &mut Vec<u8>, v: &[f32]| v.iter().for_each(|x| out.extend(x.to_le_bytes()));
        let count = |out: &mut Vec<u8>, n: usize| out.extend((n as u64).to_le_bytes());
        let s = &self.0;
        for g in &s.gdn {
            count(&mut out, g.len);
            floats(&mut out, &g.s);
        }
        s.gdn_conv.iter().chain(&s.ple_conv).for_each(|c| floats(&mut out, &c.columns));
        for x in s.index.iter().flatten() {
            count(&mut out, x.pooled.len());
            floats(&mut out, &x.pooled);
            count(&mut out, x.positions.len());
            floats(&mut out, &x.raw);
            x.positions.iter().flatten().for_each(|p| out.extend(p.to_le_bytes()));
        }
        out
    }

    /// The snapshot of [`SlotSnapshot::to_bytes`].
    ///
    /// # Errors
    /// [`EngineError::Round`] where the bytes do not fit the layout.
    pub fn from_bytes(layout: &StateLayout, bytes: &[u8]) -> Result<Self, EngineError> {
        let mut r = Reader { bytes };
        let mut slot = Slot::default();
        for d in &layout.gdn {
            let len = r.count()?;
            let s = r.floats(d.value_heads * d.key_dim * d.value_dim)?;
            slot.gdn.push(GdnSlot { s: Arc::new(Lines::from(&s[..])), len, ..GdnSlot::default() });
        }
        for d in &layout.gdn {
            let columns = r.floats(d.channels() * (d.conv_kernel - 1))?;
            slot.gdn_conv.push(ConvSlot { columns, ..ConvSlot::default() });
        }
        for p in &layout.ple {
            let columns = r.floats(p.width * p.columns)?;
            slot.ple_conv.push(ConvSlot { columns, ..ConvSlot::default() });
        }
        for a in &layout.attention {
            let Some(dims) = a.index else {
                slot.index.push(None);
                continue;
            };
            let pooled = r.count()?;
            let pooled = Arc::new(r.floats(pooled)?);
            let open = r.count()?;
            let raw = r.floats(open.saturating_mul(dims.dim))?;
            let words = r.floats(open.saturating_mul(3))?;
            let positions =
                words.chunks_exact(3).map(|c| [c[0].to_bits(), c[1].to_bits(), c[2].to_bits()]).collect();
            slot.index.push(Some(IndexSlot { pooled, raw, positions, ..IndexSlot::default() }));
        }
        if !r.bytes.is_empty() {
            return Err(damaged(format!("{} bytes too many", r.bytes.len())));
        }
        Ok(SlotSnapshot(Arc::new(slot)))
    }
}

fn damaged(what: String) -> EngineError {
    EngineError::Round(format!("saved state does not fit this model: {what}"))
}

struct Reader<'a> {
    bytes: &'a [u8],
}

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize) -> Result<&'a [u8], EngineError> {
        let (head, rest) = self
            .bytes
            .split_at_checked(n)
            .ok_or_else(|| damaged(format!("{n} bytes expected, {} left", self.bytes.len())))?;
        self.bytes = rest;
        Ok(head)
    }

    fn count(&mut self) -> Result<usize, EngineError> {
        let mut word = [0; 8];
        word.copy_from_slice(self.take(8)?);
        Ok(u64::from_le_bytes(word) as usize)
    }

    fn floats(&mut self, n: usize) -> Result<Vec<f32>, EngineError> {
        let bytes = self.take(n.saturating_mul(4))?;
        Ok(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
    }
}

impl HostState {
    /// Bytes of one page over all layers.
    pub fn page_bytes(&self) -> u64 {
        let row = |a: &super::AttentionLayout| 2 * a.kv_heads * self.codec().row_bytes(a.head_dim);
        self.layout().attention.iter().map(|a| (PAGE_TOKENS * row(a)) as u64).sum()
    }

    /// The words of a page, layer by layer.
    pub fn save_page(&self, page: u32) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.page_bytes() as usize);
        for id in 0..self.layout().attention.len() {
            out.extend_from_slice(self.page(id, page));
        }
        out
    }

    /// Overwrites a page with saved words.
    pub fn load_page(&mut self, page: u32, bytes: &[u8]) -> Result<(), EngineError> {
        if bytes.len() as u64 != self.page_bytes() {
            return Err(damaged(format!("a page of {} bytes, expected {}", bytes.len(), self.page_bytes())));
        }
        let mut at = 0;
        for id in 0..self.layout().attention.len() {
            let own = self.page_mut(id, page);
            own.copy_from_slice(&bytes[at..at + own.len()]);
            at += own.len();
        }
        Ok(())
    }
}
