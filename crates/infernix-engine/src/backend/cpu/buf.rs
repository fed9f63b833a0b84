//! Activation matrices.

use super::elementwise;
use super::isa::Isa;
use super::num::{bf16_of, f32_of};
use std::borrow::Cow;

/// A matrix `[rows, width]`.
#[derive(Clone, Debug, PartialEq)]
pub struct CpuBuf {
    pub(crate) rows: usize,
    pub(crate) width: usize,
    pub(crate) data: Data,
}

/// Its values.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Data {
    /// Activations.
    Bf16(Vec<u16>),
    /// Logits and factors.
    F32(Vec<f32>),
}

impl CpuBuf {
    /// A matrix of activations.
    pub(crate) fn bf16(rows: usize, width: usize, data: Vec<u16>) -> Self {
        debug_assert_eq!(data.len(), rows * width);
        CpuBuf { rows, width, data: Data::Bf16(data) }
    }

    /// A matrix of FP32 values.
    pub(crate) fn f32(rows: usize, width: usize, data: Vec<f32>) -> Self {
        debug_assert_eq!(data.len(), rows * width);
        CpuBuf { rows, width, data: Data::F32(data) }
    }

    /// Host values as they are: BF16 if all of them are.
    pub(crate) fn of(rows: usize, width: usize, values: &[f32]) -> Self {
        let narrow: Vec<u16> = values.iter().map(|v| bf16_of(*v)).collect();
        if narrow.iter().zip(values).all(|(n, v)| f32_of(*n).to_bits() == v.to_bits()) {
            CpuBuf::bf16(rows, width, narrow)
        } else {
            CpuBuf::f32(rows, width, values.to_vec())
        }
    }

    /// Activations; FP32 values (a host matrix that was not BF16) are rounded.
    pub(crate) fn act(&self) -> Cow<'_, [u16]> {
        match &self.data {
            Data::Bf16(d) => Cow::Borrowed(d),
            Data::F32(d) => Cow::Owned(d.iter().map(|v| bf16_of(*v)).collect()),
        }
    }

    /// Activations to be changed in place.
    pub(crate) fn act_mut(&mut self) -> &mut [u16] {
        if let Data::F32(_) = self.data {
            self.data = Data::Bf16(self.act().into_owned());
        }
        match &mut self.data {
            Data::Bf16(d) => d,
            // Replaced just above.
            Data::F32(_) => &mut [],
        }
    }

    /// FP32 values.
    pub(crate) fn wide(&self, isa: Isa) -> Cow<'_, [f32]> {
        match &self.data {
            Data::F32(d) => Cow::Borrowed(d),
            Data::Bf16(d) => {
                let mut out = vec![0f32; d.len()];
                elementwise::widen(isa, d, &mut out);
                Cow::Owned(out)
            }
        }
    }

    /// A matrix of the same kind, its rows made of pieces of this one's (and `other`'s).
    pub(crate) fn gather(
        &self,
        rows: usize,
        width: usize,
        piece: impl Fn(usize) -> Vec<(bool, usize, usize)>,
        other: &Self,
    ) -> Self {
        fn copy<T: Copy>(
            rows: usize,
            piece: &dyn Fn(usize) -> Vec<(bool, usize, usize)>,
            a: &[T],
            b: &[T],
        ) -> Vec<T> {
            let mut out = Vec::new();
            for r in 0..rows {
                for (second, start, n) in piece(r) {
                    out.extend_from_slice(&(if second { b } else { a })[start..start + n]);
                }
            }
            out
        }
        match (&self.data, &other.data) {
            (Data::F32(a), Data::F32(b)) => CpuBuf::f32(rows, width, copy(rows, &piece, a, b)),
            _ => CpuBuf::bf16(rows, width, copy(rows, &piece, &self.act(), &other.act())),
        }
    }
}
