//! The dot product without intrinsics: the oracle of the vector kernels and the path of processors without AVX-512.

use super::super::isa::per_isa;
use super::super::num::{f32_of, tree};
use super::out::Out;
use super::pack::Packed;
use super::rows::{BLOCK, Fold, Kind, Rows};
use std::ops::Range;

/// Adds 16 pairs of products to 16 lanes: the second of each pair first, as `vdpbf16ps` does.
#[inline(always)]
fn dot_step(acc: &mut [f32; 16], w: &[u16], x: &[u16]) {
    let mut lo = [0f32; 16];
    let mut hi = [0f32; 16];
    let mut xl = [0f32; 16];
    let mut xh = [0f32; 16];
    for i in 0..16 {
        lo[i] = f32_of(w[2 * i]);
        hi[i] = f32_of(w[2 * i + 1]);
        xl[i] = f32_of(x[2 * i]);
        xh[i] = f32_of(x[2 * i + 1]);
    }
    for i in 0..16 {
        acc[i] = hi[i].mul_add(xh[i], acc[i]);
    }
    for i in 0..16 {
        acc[i] = lo[i].mul_add(xl[i], acc[i]);
    }
}

/// A block with int8 activations: sums of 32 products meet `fl(weight scale x activation scale)`.
#[inline(always)]
fn int8_block(acc: &mut [f32; 16], s: &[[f32; 16]; 2], xs: &[f32], w: (&[u16], &[u16]), x: (&[u16], &[u16])) {
    let mut t = [0f32; 16];
    dot_step(&mut t, w.0, x.0);
    for i in 0..16 {
        acc[i] = (s[0][i] * xs[0]).mul_add(t[i], acc[i]);
    }
    let mut t = [0f32; 16];
    dot_step(&mut t, w.1, x.1);
    for i in 0..16 {
        acc[i] = (s[1][i] * xs[1]).mul_add(t[i], acc[i]);
    }
}

per_isa! {
    /// Rows `range` of `w` times every column of `x` into `out`.
    pub(crate) fn product(w: &Rows<'_>, range: Range<usize>, x: &Packed, out: &Out<'_>) {
        if matches!(w.kind(), Kind::F32 | Kind::F16) {
            return wide(w, range, x, out);
        }
        let blocks = w.blocks();
        let width = x.width();
        let xs = x.order(w.kind().even_odd());
        let mut codes = vec![[0u16; BLOCK]; blocks];
        let mut scales = vec![[[0f32; 16]; 2]; blocks];
        for row in range {
            for b in 0..blocks {
                w.block_codes(row, b, &mut codes[b]);
                scales[b] = w.block_scales(row, b);
            }
            for (column, xc) in xs.chunks_exact(width).enumerate() {
                let mut acc = [0f32; 16];
                for (b, ((code, scale), xb)) in codes.iter().zip(&scales).zip(xc.chunks_exact(BLOCK)).enumerate() {
                    let (w0, w1) = code.split_at(32);
                    let (x0, x1) = xb.split_at(32);
                    if let Some(xs) = x.scales().get(2 * (column * blocks + b)..2 * (column * blocks + b) + 2) {
                        int8_block(&mut acc, scale, xs, (w0, w1), (x0, x1));
                        continue;
                    }
                    match w.kind().fold() {
                        Fold::Direct => {
                            dot_step(&mut acc, w0, x0);
                            dot_step(&mut acc, w1, x1);
                        }
                        Fold::Whole => {
                            let mut t = [0f32; 16];
                            dot_step(&mut t, w0, x0);
                            dot_step(&mut t, w1, x1);
                            for i in 0..16 {
                                acc[i] = scale[0][i].mul_add(t[i], acc[i]);
                            }
                        }
                        Fold::Halves => {
                            for (s, (wh, xh)) in scale.iter().zip([(w0, x0), (w1, x1)]) {
                                let mut t = [0f32; 16];
                                dot_step(&mut t, wh, xh);
                                for i in 0..16 {
                                    acc[i] = s[i].mul_add(t[i], acc[i]);
                                }
                            }
                        }
                    }
                }
                out.put(column, row, w.finish(row, tree(acc)));
            }
        }
    }
}

/// FP32 and FP16 matrices: 16 lanes, plain fused multiply-adds; with int8 activations, of each 32 first.
#[inline(always)]
fn wide(w: &Rows<'_>, range: Range<usize>, x: &Packed, out: &Out<'_>) {
    let k = w.k();
    let mut wr = vec![0f32; k.next_multiple_of(32)];
    for row in range {
        for (i, v) in wr.iter_mut().take(k).enumerate() {
            *v = w.wide(row, i);
        }
        for (column, xc) in x.order(false).chunks_exact(x.width()).enumerate() {
            let mut acc = [0f32; 16];
            let scales = x.scales().get(column * x.width() / 32..).unwrap_or_default();
            let mut t = [0f32; 16];
            for (n, (wv, xv)) in wr.chunks_exact(16).zip(xc.chunks_exact(16)).enumerate() {
                let sum = if scales.is_empty() { &mut acc } else { &mut t };
                for i in 0..16 {
                    sum[i] = wv[i].mul_add(f32_of(xv[i]), sum[i]);
                }
                if n % 2 == 1 && !scales.is_empty() {
                    for i in 0..16 {
                        acc[i] = scales[n / 2].mul_add(t[i], acc[i]);
                    }
                    t = [0.0; 16];
                }
            }
            out.put(column, row, tree(acc));
        }
    }
}
