//! Products with blocks of GGUF files, straight from the stored blocks.
//!
//! # Order of additions
//! As in the parent module an output is a function of its weight row and its activation column alone. A block is taken
//! apart into exact codes and, for each group of 16 or 32 values, a scale and perhaps an offset (`formats::ggml::split`).
//! Of a group, lane l of 16 takes element l, `t = code x`, then element l + 16, `t = fma(code, x, t)`; then
//! `acc = fma(scale, t, acc)`, and with an offset `acc = fma(offset, u, acc)`, u the sum of the lane's activations. At the
//! end the lanes fold in halves. With int8 activations scale and offset are first multiplied by the activations' scale.
//!
//! A row is taken apart once for all columns of a call.

use super::super::isa::per_isa;
use super::super::num::{f32_of, tree};
use super::{Out, Packed, Rows};
use infernix_formats::ggml::{self, GgmlType};
use std::ops::Range;

/// A row taken apart.
#[derive(Default)]
pub(crate) struct Parts {
    group: usize,
    pub(crate) codes: Vec<f32>,
    pub(crate) scales: Vec<f32>,
    pub(crate) offsets: Vec<f32>,
}

impl Parts {
    /// Takes a row of `k` values apart.
    pub(crate) fn fill(&mut self, ty: GgmlType, row: &[u8], k: usize) {
        self.fill_on(super::Isa::Scalar, ty, row, k);
    }

    /// The same with the loops of a tier.
    fn fill_on(&mut self, isa: super::Isa, ty: GgmlType, row: &[u8], k: usize) {
        self.group = ggml::group(ty);
        self.codes.resize(k, 0.0);
        self.scales.resize(k / self.group, 0.0);
        self.offsets.resize(if ggml::has_offset(ty) { self.scales.len() } else { 0 }, 0.0);
        if super::ggml_unpack::knows(ty) {
            let (codes, scales, offsets) = (&mut self.codes, &mut self.scales, &mut self.offsets);
            return super::ggml_unpack::unpack(isa, ty, row, codes, scales, offsets);
        }
        // Whole blocks of a known type: the weight's shape was checked when it was taken.
        let _ = ggml::split(ty, row, &mut self.codes, &mut self.scales, &mut self.offsets);
    }
}

/// Rows `range` of `w` times every column of `x` into `out`.
pub(super) fn product(
    isa: super::Isa,
    ty: GgmlType,
    w: &Rows<'_>,
    range: Range<usize>,
    x: &Packed,
    out: &Out<'_>,
) {
    let (k, width) = (w.k(), x.width());
    // Columns as FP32, once for all rows of the task.
    let columns: Vec<f32> = x.order(false).iter().map(|v| f32_of(*v)).collect();
    let mut parts = Parts::default();
    for row in range {
        parts.fill_on(isa, ty, w.codes(row), k);
        for (c, column) in columns.chunks_exact(width).enumerate() {
            let scales = x.scales().get(c * width / 32..(c + 1) * width / 32).unwrap_or(&[]);
            out.put(c, row, dot(isa, &parts, &column[..k], scales));
        }
    }
}

per_isa! {
    fn dot(p: &Parts, x: &[f32], xs: &[f32]) -> f32 {
        let mut acc = [0f32; 16];
        for (g, (codes, x)) in p.codes.chunks_exact(p.group).zip(x.chunks_exact(p.group)).enumerate() {
            let (mut t, mut u) = ([0f32; 16], [0f32; 16]);
            for (codes, x) in codes.as_chunks::<16>().0.iter().zip(x.as_chunks::<16>().0) {
                for l in 0..16 {
                    t[l] = codes[l].mul_add(x[l], t[l]);
                    u[l] += x[l];
                }
            }
            let factor = xs.get(g * p.group / 32).copied().unwrap_or(1.0);
            let scale = p.scales[g] * factor;
            for l in 0..16 {
                acc[l] = scale.mul_add(t[l], acc[l]);
            }
            if let Some(offset) = p.offsets.get(g) {
                let offset = offset * factor;
                for l in 0..16 {
                    acc[l] = offset.mul_add(u[l], acc[l]);
                }
            }
        }
        tree(acc)
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::isa::Isa;
    use super::super::super::num::bf16_of;
    use super::super::super::pool::Pool;
    use super::super::{Kind, product};
    use super::*;

    /// Every type against FP64, with 16- and 8-bit activations, the same bits on every tier and at every width.
    #[test]
    fn products_of_all_types_keep_the_bound() {
        let pool = Pool::new(2);
        let mut state = 7u64;
        let mut next = move || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) as u32
        };
        let (n, k, columns) = (5, 512, 3);
        for ty in GgmlType::all().filter(|t| t.is_block()) {
            let per = ty.row_bytes(k as u64).unwrap() as usize;
            // Small exponent fields keep scales finite.
            let blocks: Vec<u8> = (0..n * per).map(|_| next() as u8 & 0x3B).collect();
            let x: Vec<u16> =
                (0..columns * k).map(|_| bf16_of((next() % 2001) as f32 / 1000.0 - 1.0)).collect();
            let mut exact = vec![0f64; n * k];
            ggml::decode_f64(ty, &blocks, &mut exact).unwrap();
            let rows = Rows::new(Kind::Ggml(ty), n, k, 0, n, &blocks, &[], &[], 1.0).unwrap();
            for int8 in [false, true] {
                let run = |isa: Isa, x: &[u16]| {
                    let columns = x.len() / k;
                    let mut packed = Packed::default();
                    if int8 {
                        packed.pack_int8(isa, x, columns, k);
                    } else {
                        packed.pack(x, columns, k, k);
                    }
                    let mut y = vec![0f32; columns * n];
                    product(&pool, isa, &[rows], &mut packed, Out::f32(&mut y, columns, n));
                    let values: Vec<f64> = packed
                        .order(false)
                        .iter()
                        .enumerate()
                        .map(|(i, v)| {
                            f64::from(f32_of(*v))
                                * f64::from(packed.scales().get(i / 32).copied().unwrap_or(1.0))
                        })
                        .collect();
                    (y, values)
                };
                let (y, values) = run(Isa::Scalar, &x);
                for (i, y) in y.iter().enumerate() {
                    let (c, r) = (i / n, i % n);
                    let terms = exact[r * k..(r + 1) * k].iter().zip(&values[c * k..(c + 1) * k]);
                    let sum: f64 = terms.clone().map(|(w, x)| w * x).sum();
                    let size: f64 = terms.map(|(w, x)| (w * x).abs()).sum();
                    // Offsets cancel against codes: their share is bounded by the largest value of the row.
                    let largest = exact[r * k..(r + 1) * k].iter().fold(0f64, |m, w| m.max(w.abs()));
                    let slack: f64 = values[c * k..(c + 1) * k].iter().map(|x| x.abs() * largest).sum();
                    let bound = (size + 4.0 * slack) * k as f64 * 2f64.powi(-24);
                    assert!((f64::from(*y) - sum).abs() <= bound, "{ty} int8 {int8}: {y} for {sum}");
                }
                for isa in Isa::testable() {
                    assert_eq!(run(isa, &x).0, y, "{ty} {isa}");
                    assert_eq!(run(isa, &x[k..2 * k]).0, y[n..2 * n], "{ty} {isa}: one column");
                }
            }
        }
    }
}
