//! Hyper-connection mix: bound against f64, equality over widths, time of the pair.

use super::Run;
use crate::error::Result;
use crate::kernels::hyper::{HyperMix, HyperWeights};
use crate::kernels::linear::{Linear, WeightFormat};
use crate::oracle::Words;
use crate::oracle::num::{bf16, parallel, rbf, sigmoid, silu};

const EPS: f64 = 1e-6;

/// Reference of one column: x (before its rounding, with N and m rounded to BF16 as the contract says), b, and the share of each x
/// allowed to differ: m's rounding may fall the other way where the FP32 sum sits on a boundary.
fn reference(
    r: &[u16],
    norm: &[u16],
    down: &[Vec<f64>],
    up: &[Vec<f64>],
    inject: &[Vec<f64>],
    h: usize,
) -> (Vec<f64>, Vec<f64>) {
    let mut n = vec![0f64; 4 * h];
    for s in 0..4 {
        let v: Vec<f64> = r[s * h..(s + 1) * h].iter().map(|w| f64::from(bf16(*w))).collect();
        let rs = 1.0 / (v.iter().map(|x| x * x).sum::<f64>() / h as f64 + EPS).sqrt();
        for i in 0..h {
            n[s * h + i] = f64::from(rbf((v[i] * rs * (1.0 + f64::from(bf16(norm[s * h + i])))) as f32));
        }
    }
    let dot = |w: &[f64], x: &[f64]| x.iter().zip(w).map(|(a, b)| a * b).sum::<f64>();
    let m: Vec<f64> = down.iter().map(|w| f64::from(rbf(silu(dot(w, &n) / 4.0) as f32))).collect();
    let x = (0..h)
        .map(|i| (0..4).map(|s| sigmoid(dot(&up[s * h + i], &m)) * n[s * h + i]).sum::<f64>() / 4.0)
        .collect();
    let b = inject.iter().map(|w| 2.0 * sigmoid(dot(w, &n) / 4.0)).collect();
    (x, b)
}

pub(super) fn run(run: &mut Run) -> Result<()> {
    for (h, rank) in [(2560usize, 320usize), (64, 16), (96, 48)] {
        for f in [WeightFormat::Bf16, WeightFormat::Q8G32] {
            let align = if f == WeightFormat::Bf16 { 1 } else { 128 };
            let wd = Words::random(&mut run.rng, f, rank, 4 * h, align);
            let wu = Words::random(&mut run.rng, f, 4 * h, rank, align);
            let wi = Words::random(&mut run.rng, f, 4, 4 * h, align);
            let (ld, lu, li) = (wd.upload(&run.dev)?, wu.upload(&run.dev)?, wi.upload(&run.dev)?);
            let norm = run.rng.bf16(4 * h, 0.2);
            let dn = run.dev.upload(&norm)?;
            let cols = 11;
            let r = run.rng.bf16(cols * 4 * h, 1.5);
            let dr = run.dev.upload(&r)?;
            let k = HyperMix::new(&run.dev, f, h, rank)?;
            let (x, b, scratch) =
                (run.dev.alloc(cols * h * 2)?, run.dev.alloc(cols * 16)?, run.dev.alloc(k.scratch(cols))?);
            let w = HyperWeights { down: &ld, up: &lu, inject: Some(&li), norm: dn.ptr() };
            k.launch(&run.stream, &w, dr.ptr(), EPS as f32, cols, scratch.ptr(), x.ptr(), b.ptr(), false)?;
            run.stream.synchronize()?;
            let (gx, gb): (Vec<u16>, Vec<f32>) = (x.read(0, cols * h)?, b.read(0, cols * 4)?);
            let rows =
                |w: &Words, n: usize, k: usize| -> Vec<Vec<f64>> { parallel(n, |i| w.row(i)[..k].to_vec()) };
            let (rd, ru, ri) = (rows(&wd, rank, 4 * h), rows(&wu, 4 * h, rank), rows(&wi, 4, 4 * h));
            let refs = parallel(cols, |c| reference(&r[c * 4 * h..][..4 * h], &norm, &rd, &ru, &ri, h));
            // Bound: relative L2 of a column 4e-3 (the output rounding alone is about 1.7e-3). b: N may round to the other BF16
            // neighbour where FP32 lands beside a boundary; one such flip moves b by up to 2^-8 |w N| / 8, hence 2e-4.
            let (mut worst, mut worst_b) = (0f64, 0f64);
            for c in 0..cols {
                let (mut d, mut t) = (0f64, 0f64);
                for i in 0..h {
                    let e = f64::from(bf16(gx[c * h + i])) - refs[c].0[i];
                    d += if e.is_finite() { e * e } else { f64::INFINITY };
                    t += refs[c].0[i] * refs[c].0[i];
                }
                worst = worst.max((d / t).sqrt() / 4e-3);
                for s in 0..4 {
                    let e = (f64::from(gb[c * 4 + s]) - refs[c].1[s]).abs() / 2e-4;
                    worst_b = worst_b.max(if e.is_finite() { e } else { f64::INFINITY });
                }
            }
            run.check(
                "hyper x",
                format!("{} h {h} rank {rank}, {cols} columns, relative L2 4e-3", f.tag()),
                worst,
                false,
            );
            run.check("hyper b", format!("{} h {h} rank {rank}, absolute 2e-4", f.tag()), worst_b, false);
            let mut unequal = 0usize;
            for one in [0usize, 3, 10] {
                let (x1, b1) = (run.dev.alloc(h * 2)?, run.dev.alloc(16)?);
                k.launch(
                    &run.stream,
                    &w,
                    dr.at(one * 4 * h * 2),
                    EPS as f32,
                    1,
                    scratch.ptr(),
                    x1.ptr(),
                    b1.ptr(),
                    false,
                )?;
                run.stream.synchronize()?;
                let (a, c): (Vec<u16>, Vec<f32>) = (x1.read(0, h)?, b1.read(0, 4)?);
                unequal += (0..h).filter(|i| a[*i] != gx[one * h + i]).count()
                    + (0..4).filter(|i| c[*i] != gb[one * 4 + i]).count();
            }
            run.check("hyper", format!("{} h {h}: one column equals eleven", f.tag()), unequal as f64, true);
            if run.bench && h == 2560 {
                let bytes = ld.bytes() + lu.bytes() + li.bytes();
                let copies = run.copies(bytes);
                let set: Vec<(Linear, Linear, Linear)> = (0..copies)
                    .map(|_| Ok((wd.upload(&run.dev)?, wu.upload(&run.dev)?, wi.upload(&run.dev)?)))
                    .collect::<Result<_>>()?;
                for c in [1usize, 4, 8] {
                    let us = run.time(copies, |i| {
                        let (d, u, j) = &set[i];
                        let w = HyperWeights { down: d, up: u, inject: Some(j), norm: dn.ptr() };
                        k.launch(
                            &run.stream,
                            &w,
                            dr.ptr(),
                            EPS as f32,
                            c,
                            scratch.ptr(),
                            x.ptr(),
                            b.ptr(),
                            true,
                        )
                    })?;
                    run.timed("hyper", format!("{} pair, {c} columns", f.tag()), us, bytes);
                }
            }
        }
    }
    Ok(())
}
