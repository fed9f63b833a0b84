//! Activations laid out for the dot-product steps.

use super::super::isa::Isa;
use super::super::num::bf16_exact;
use super::int8::Int8;
use super::rows::BLOCK;
use crate::numerics::a8;

/// BF16 activations of some columns (tokens), K padded with zeros to whole blocks; each block of 64 is kept in natural
/// order and, on demand, with its even elements before its odd ones.
#[derive(Debug, Default)]
pub struct Packed {
    columns: usize,
    k: usize,
    blocks: usize,
    natural: Vec<u16>,
    even_odd: Vec<u16>,
    /// Scales of int8 activations whose codes are `natural`, one per 32 elements of a padded column; empty for BF16
    /// activations.
    scales: Vec<f32>,
    tiny: bool,
    /// Int8 activations.
    int8: Option<Int8>,
    /// Buffers of former ones.
    spare: Int8,
    /// What the int8 activations were made of.
    source: Vec<u16>,
}

/// Below this exponent field (2^-90), products with the smallest code could fall under 2^-126, where the BF16 dot
/// product of the processor flushes to zero.
const TINY: u16 = 127 - 90;

impl Packed {
    /// Packs `x [columns, k]`, of which consecutive columns are `stride` elements apart.
    pub fn pack(&mut self, x: &[u16], columns: usize, k: usize, stride: usize) {
        let blocks = k.div_ceil(BLOCK);
        let width = blocks * BLOCK;
        (self.columns, self.k, self.blocks) = (columns, k, blocks);
        self.even_odd.clear();
        self.natural.clear();
        self.scales.clear();
        self.drop_int8();
        self.natural.reserve(columns * width);
        self.tiny = false;
        for c in 0..columns {
            let row = &x[c * stride..c * stride + k];
            self.tiny |= row.iter().fold(false, |t, v| t | ((v & 0x7fff != 0) & ((v >> 7) & 0xff < TINY)));
            self.natural.extend_from_slice(row);
            self.natural.resize((c + 1) * width, 0);
        }
    }

    /// Quantises `x [columns, k]` to int8 per 32 values (`numerics::a8`), unless it was the last one too: projections
    /// of one input follow each other.
    pub fn pack_int8(&mut self, isa: Isa, x: &[u16], columns: usize, k: usize) {
        if self.int8.is_some() && (self.columns, self.k) == (columns, k) && self.source == x {
            return;
        }
        self.source.clear();
        self.source.extend_from_slice(x);
        (self.columns, self.k, self.blocks) = (columns, k, k.div_ceil(BLOCK));
        self.even_odd.clear();
        self.natural.clear();
        self.scales.clear();
        self.tiny = false;
        self.drop_int8();
        self.int8 = Some(Int8::new(isa, x, columns, k, std::mem::take(&mut self.spare)));
    }

    fn drop_int8(&mut self) {
        if let Some(old) = self.int8.take() {
            self.spare = old;
        }
    }

    /// Int8 activations, if they are.
    pub(super) fn int8(&self) -> Option<&Int8> {
        self.int8.as_ref()
    }

    /// The same, to make further forms of them.
    pub(super) fn int8_mut(&mut self) -> Option<&mut Int8> {
        self.int8.as_mut()
    }

    /// Makes int8 codes available as BF16, with their scales.
    pub(super) fn widen(&mut self) {
        let Some(x) = &self.int8 else { return };
        if !self.natural.is_empty() || self.blocks == 0 {
            return;
        }
        let (width, groups) = (self.blocks * BLOCK, self.blocks * BLOCK / a8::GROUP);
        for c in 0..self.columns {
            let codes = &x.codes()[c * x.width()..][..width];
            self.natural.extend(codes.iter().map(|v| bf16_exact(f32::from(*v))));
            self.scales.extend_from_slice(&x.scales()[c * (x.width() / a8::GROUP)..][..groups]);
        }
    }

    /// Scales of a column's half-blocks, if the activations are int8.
    pub(crate) fn scales(&self) -> &[f32] {
        &self.scales
    }

    /// Makes the even-odd order available.
    pub fn split(&mut self) {
        if self.even_odd.len() == self.natural.len() {
            return;
        }
        self.even_odd.resize(self.natural.len(), 0);
        for (o, x) in self.even_odd.chunks_exact_mut(BLOCK).zip(self.natural.chunks_exact(BLOCK)) {
            let (even, odd) = o.split_at_mut(BLOCK / 2);
            for ((e, d), p) in even.iter_mut().zip(odd).zip(x.chunks_exact(2)) {
                (*e, *d) = (p[0], p[1]);
            }
        }
    }

    /// Columns.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Elements of a column.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Elements of a packed column.
    pub(crate) fn width(&self) -> usize {
        self.blocks * BLOCK
    }

    /// All columns in one order; the even-odd order must have been made.
    pub(crate) fn order(&self, even_odd: bool) -> &[u16] {
        if even_odd {
            assert_eq!(self.even_odd.len(), self.natural.len(), "even-odd order not made");
            &self.even_odd
        } else {
            &self.natural
        }
    }

    /// Whether some activation is so small that flushing could show.
    pub(crate) fn tiny(&self) -> bool {
        self.tiny
    }
}
