//! Decode linears: bound, equality over widths and ring geometries, times.

use super::{Run, unequal};
use crate::driver::DeviceBuffer;
use crate::error::Result;
use crate::kernels::linear::{Gemv, GemvTuning, Linear, Out, WeightFormat};
use crate::oracle::num::{bf16, bf16_half_ulp, parallel};
use crate::oracle::{Rng, Words};

/// Rows to check: all of a small matrix, else the ends and a sample.
pub(super) fn sample(rng: &mut Rng, n: usize, most: usize) -> Vec<usize> {
    if n <= most {
        return (0..n).collect();
    }
    let mut v: Vec<usize> = (0..16).chain(n - 33..n).collect();
    while v.len() < most {
        v.push(rng.below(n));
    }
    v
}

/// Worst error over bound of outputs `y(col, row)`: half an ulp (BF16) or 2^-24 |y| (FP32) plus K 2^-24 sum |w x|.
#[expect(clippy::too_many_arguments, reason = "what one check compares")]
pub(super) fn linear_share(
    w: &Words,
    rows: &[usize],
    x: &[u16],
    x_pitch: usize,
    k: usize,
    cols: usize,
    f32_out: bool,
    y: impl Fn(usize, usize) -> f64 + Sync,
) -> f64 {
    let xf: Vec<f64> = x.iter().map(|v| f64::from(bf16(*v))).collect();
    let worst = parallel(rows.len(), |i| {
        let row = w.row(rows[i]);
        let mut worst = 0f64;
        for c in 0..cols {
            let (mut s, mut a) = (0f64, 0f64);
            for (w, x) in row[..k].iter().zip(&xf[c * x_pitch..]) {
                s += w * x;
                a += (w * x).abs();
            }
            let bound = k as f64 * 2f64.powi(-24) * a
                + if f32_out { s.abs() * 2f64.powi(-23) } else { bf16_half_ulp(s) };
            let got = y(c, rows[i]);
            let share = if got.is_finite() { (got - s).abs() / bound } else { f64::INFINITY };
            worst = worst.max(share);
        }
        worst
    });
    worst.into_iter().fold(0.0, f64::max)
}

/// Checks shapes of real models and odd ones.
pub(super) fn check(run: &mut Run) -> Result<()> {
    let shapes: &[(usize, usize)] = &[
        (10240, 2560),
        (2560, 6144),
        (320, 10240),
        (10240, 320),
        (48, 2560),
        (5120, 17408),
        (37, 2560),
        (1, 128),
        (129, 1088),
    ];
    for f in WeightFormat::ALL {
        for &(n, k) in shapes {
            let big = n * k > 30_000_000;
            let w = Words::random(&mut run.rng, f, n, k, if f == WeightFormat::Bf16 { 1 } else { 128 });
            let lin = w.upload(&run.dev)?;
            if f == WeightFormat::Nvfp4 {
                let bad = unequal(&lin.codes.read::<u8>(0, lin.bytes())?, &w.units());
                run.check("nvfp4_order", format!("{n}x{k}"), bad, true);
            }
            let widths: &[usize] =
                if big { &[64, 1, 4, 8, 12] } else { &[64, 1, 2, 5, 8, 9, 16, 17, 32, 33] };
            let cols = 64;
            let xp = k + 8;
            let x = run.rng.bf16(cols * xp, 1.0);
            let dx = run.dev.upload(&x)?;
            let rows = sample(&mut run.rng, n, 300);
            let yp = n + 3;
            let mut base: Vec<u16> = vec![];
            let mut unequal = 0usize;
            for &c in widths {
                for ring in [Gemv::RING, 40 << 10] {
                    if ring != Gemv::RING && c != 8 && c != 1 {
                        continue;
                    }
                    let y = run.dev.alloc(c * yp * 2)?;
                    let g = Gemv::new(&run.dev, f, n, lin.k_pad, c, ring)?;
                    g.launch(&run.stream, &lin, dx.ptr(), xp, y.ptr(), yp, Out::Bf16, false)?;
                    run.stream.synchronize()?;
                    let got: Vec<u16> = y.read(0, c * yp)?;
                    if base.is_empty() {
                        let share = linear_share(&w, &rows, &x, xp, k, c, false, |c, r| {
                            f64::from(bf16(got[c * yp + r]))
                        });
                        run.check("gemv", format!("{} {n}x{k} {c} columns", f.tag()), share, false);
                        base = got;
                    } else {
                        for col in 0..c {
                            for r in 0..n {
                                unequal += usize::from(got[col * yp + r] != base[col * yp + r]);
                            }
                        }
                    }
                }
            }
            run.check(
                "gemv",
                format!("{} {n}x{k} equal bits at widths {widths:?}", f.tag()),
                unequal as f64,
                true,
            );
            // The plan of a part with 99 KB of shared memory gives the same bits.
            for c in [9usize, 16, 20] {
                let t = GemvTuning { shared: 101_376, ..GemvTuning::default() };
                let g = Gemv::tuned(&run.dev, f, n, lin.k_pad, c, &t)?;
                let y = run.dev.alloc(c * yp * 2)?;
                g.launch(&run.stream, &lin, dx.ptr(), xp, y.ptr(), yp, Out::Bf16, false)?;
                run.stream.synchronize()?;
                let got: Vec<u16> = y.read(0, c * yp)?;
                let bad = (0..c)
                    .flat_map(|c| (0..n).map(move |r| c * yp + r))
                    .filter(|i| got[*i] != base[*i])
                    .count();
                let case = format!(
                    "{} {n}x{k} {c} columns in 99 KB, high bits direct: {}",
                    f.tag(),
                    g.plan.high_direct
                );
                run.check("gemv", case, bad as f64, true);
            }
            if n <= 512 {
                let y = run.dev.alloc(4 * yp * 4)?;
                let g = Gemv::new(&run.dev, f, n, lin.k_pad, 4, Gemv::RING)?;
                g.launch(&run.stream, &lin, dx.ptr(), xp, y.ptr(), yp, Out::F32, true)?;
                run.stream.synchronize()?;
                let got: Vec<f32> = y.read(0, 4 * yp)?;
                let share = linear_share(&w, &rows, &x, xp, k, 4, true, |c, r| f64::from(got[c * yp + r]));
                run.check("gemv", format!("{} {n}x{k} FP32 out", f.tag()), share, false);
            }
        }
    }
    Ok(())
}

/// Times at 1, 4, 16 and 64 columns, with programmatic launches, over several copies.
pub(super) fn bench(run: &mut Run) -> Result<()> {
    if !run.bench {
        return Ok(());
    }
    use WeightFormat as F;
    let cases: &[(F, usize, usize, &[usize])] = &[
        (F::Bf16, 10240, 2560, &[1, 4, 16, 64]),
        (F::Bf16, 2560, 6144, &[1, 16]),
        (F::Bf16, 512, 2560, &[1]),
        (F::Q8G32, 10240, 2560, &[1, 2, 4, 8, 16, 64]),
        (F::Q8G32, 16384, 2560, &[1]),
        (F::Q8G32, 2560, 6144, &[1, 4, 16]),
        (F::Q8G32, 1280, 2560, &[1]),
        (F::Q8G32, 248_320, 2560, &[1, 4]),
        (F::Q4G64, 10240, 2560, &[1, 4]),
        (F::Q5G64, 10240, 2560, &[1]),
        (F::Q6G64, 10240, 2560, &[1, 4]),
        (F::Nvfp4, 34816, 5120, &[1, 4, 8, 16]),
        (F::Nvfp4, 16384, 5120, &[1, 4]),
        (F::Nvfp4, 5120, 17408, &[1, 2, 4, 8]),
        (F::Nvfp4, 5120, 6144, &[1, 4]),
        (F::Nvfp4, 10240, 2560, &[1]),
        (F::Fp8Row, 10240, 5120, &[1, 4]),
    ];
    for &(f, n, k, widths) in cases {
        let w = Words::random(&mut run.rng, f, n, k, 128);
        let first = w.upload(&run.dev)?;
        let bytes = first.bytes();
        let copies = run.copies(bytes);
        let mut lins: Vec<Linear> = vec![first];
        for _ in 1..copies {
            lins.push(w.upload(&run.dev)?);
        }
        let x = run.dev.upload(&run.rng.bf16(64 * k, 1.0))?;
        let y: DeviceBuffer = run.dev.alloc(64 * n * 2)?;
        for &c in widths {
            let base = GemvTuning::default();
            let mut variants = vec![base];
            if c == 1 {
                variants.extend([GemvTuning { per_sm: 1, ..base }, GemvTuning { ring: 160 << 10, ..base }]);
            }
            let mut seen = vec![];
            for t in variants {
                let Ok(g) = Gemv::tuned(&run.dev, f, n, lins[0].k_pad, c, &t) else { continue };
                if seen.contains(&g.plan) {
                    continue;
                }
                seen.push(g.plan);
                let us = run.time(copies, |i| {
                    g.launch(&run.stream, &lins[i], x.ptr(), k, y.ptr(), n, Out::Bf16, true)
                })?;
                let p = g.plan;
                run.timed(
                    "gemv",
                    format!(
                        "{} {n}x{k} {c} columns, {} CTAs, tiles of {} rows, {} stages of {}",
                        f.tag(),
                        p.per_sm,
                        p.rows,
                        p.stages,
                        p.chunk_steps
                    ),
                    us,
                    bytes,
                );
            }
        }
    }
    Ok(())
}
