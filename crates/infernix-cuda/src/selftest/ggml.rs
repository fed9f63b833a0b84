//! GGML decode linears against the exact values of the blocks.

use super::Run;
use super::linear::sample;
use crate::error::{CudaError, Result};
use crate::kernels::ggml::GgmlGemv;
use crate::kernels::linear::Out;
use crate::oracle::Rng;
use crate::oracle::num::{bf16, bf16_half_ulp, parallel};
use infernix_formats::ggml::{self, GgmlType};

/// Random blocks: codes over their whole range, FP16 scales of ordinary size.
fn blocks(rng: &mut Rng, ty: GgmlType, n: usize, k: usize) -> Vec<u8> {
    let (len, bytes) = (ty.block_len() as usize, ty.block_bytes() as usize);
    let mut b = rng.bytes(n * k / len * bytes);
    for block in b.chunks_exact_mut(bytes) {
        let halves: &[usize] = match ty {
            GgmlType::F32 => {
                block.copy_from_slice(&(rng.normal() as f32).to_le_bytes());
                continue;
            }
            GgmlType::Q4K | GgmlType::Q5K => &[0, 2],
            GgmlType::Q6K => &[208],
            _ => &[0],
        };
        for h in halves {
            block[h + 1] = 0x18 + (block[h + 1] & 7);
        }
    }
    b
}

/// `error` over `bound`; not a number is worse than any.
fn over(error: f64, bound: f64) -> f64 {
    if error.is_finite() { error / bound } else { f64::INFINITY }
}

/// How many words of the experts at `tab` (`n` rows of `k` each) are not those of `rows`, which has their parts `pitch` words a row, the
/// second `part` words after the first. The second of several experts has no picks.
fn expanded(
    run: &mut Run,
    g: &GgmlGemv,
    (ty, n, k, (pitch, part)): (GgmlType, usize, usize, (usize, usize)),
    tab: &[u64],
    rows: &[u16],
) -> Result<usize> {
    let (e, stride) = (tab.len(), 2 * n * k + 64);
    // Where a record's earlier matrices end.
    let offset = ty.block_bytes() as usize * 16;
    let tab: Vec<u64> = tab.iter().map(|a| a - offset as u64).collect();
    let base: Vec<i32> = (0..=e as i32).map(|i| if i > 1 { 3 * i - 3 } else { 3 * i }).collect();
    let (dt, db, y) = (run.dev.upload(&tab)?, run.dev.upload(&base)?, run.dev.alloc(2 * e * stride)?);
    g.expand(&run.stream, dt.ptr(), offset, db.ptr(), e, n, k, y.ptr(), stride, false)?;
    run.stream.synchronize()?;
    let got: Vec<u16> = y.read(0, e * stride)?;
    let want = |i: usize| {
        let (z, at) = (i / stride, i % stride);
        if base[z] == base[z + 1] || at >= 2 * n * k {
            return 0xFFFF;
        }
        let (row, at) = (z * n + at / (2 * k), at % (2 * k));
        rows[row * pitch + at / 128 * 64 + at % 64 + if at % 128 < 64 { 0 } else { part }]
    };
    Ok((0..got.len()).filter(|i| got[*i] != want(*i)).count())
}

pub(super) fn run(run: &mut Run) -> Result<()> {
    for ty in GgmlGemv::TYPES {
        let g = GgmlGemv::new(&run.dev, ty)?;
        for (n, k) in [(1000usize, 2560usize), (37, 512), (1, 256), (320, 6144), (24, 160)] {
            if !k.is_multiple_of(ty.block_len() as usize) {
                continue;
            }
            let b = blocks(&mut run.rng, ty, n, k);
            let row_bytes = b.len() / n;
            let cols = 17;
            let xp = k + 8;
            let x = run.rng.bf16(cols * xp, 1.0);
            let (db, dx) = (run.dev.upload(&b)?, run.dev.upload(&x)?);
            let rows = sample(&mut run.rng, n, 200);
            let values: Vec<Vec<f64>> = rows
                .iter()
                .map(|r| {
                    let mut v = vec![0f64; k];
                    ggml::decode_f64(ty, &b[r * row_bytes..(r + 1) * row_bytes], &mut v)
                        .map_err(|e| CudaError::Shape { kernel: "ggml", what: e.to_string() })?;
                    Ok(v)
                })
                .collect::<Result<_>>()?;
            let yp = n + 3;
            let mut base: Vec<u16> = vec![];
            let mut unequal = 0usize;
            for c in [cols, 1, 2, 5, 8] {
                let y = run.dev.alloc(c * yp * 2)?;
                g.launch(&run.stream, db.ptr(), n, k, dx.ptr(), xp, c, y.ptr(), yp, Out::Bf16, false)?;
                run.stream.synchronize()?;
                let got: Vec<u16> = y.read(0, c * yp)?;
                if !base.is_empty() {
                    unequal += (0..c)
                        .flat_map(|c| (0..n).map(move |r| c * yp + r))
                        .filter(|i| got[*i] != base[*i])
                        .count();
                    continue;
                }
                let worst = parallel(rows.len(), |i| {
                    (0..cols)
                        .map(|c| {
                            let (mut s, mut a) = (0f64, 0f64);
                            for (w, x) in values[i].iter().zip(&x[c * xp..]) {
                                let p = w * f64::from(bf16(*x));
                                s += p;
                                a += p.abs();
                            }
                            let bound = (k + 1) as f64 * 2f64.powi(-24) * a + bf16_half_ulp(s);
                            let got = f64::from(bf16(got[c * yp + rows[i]]));
                            if got.is_finite() { (got - s).abs() / bound } else { f64::INFINITY }
                        })
                        .fold(0.0, f64::max)
                });
                let worst = worst.into_iter().fold(0.0, f64::max);
                run.check("ggml", format!("{} {n}x{k}, {c} columns", ty.name()), worst, false);
                base = got;
            }
            run.check(
                "ggml",
                format!("{} {n}x{k}: equal bits at every width", ty.name()),
                unequal as f64,
                true,
            );
            // Rows as BF16, chosen ones, and as two parts.
            let picks: Vec<i32> = (0..7).map(|_| rows[run.rng.below(rows.len())] as i32).collect();
            let (dp, plain) = (run.dev.upload(&picks)?, run.dev.alloc(picks.len() * k * 2)?);
            g.rows(&run.stream, db.ptr(), n, k, dp.ptr(), picks.len(), plain.ptr(), k, 0, false)?;
            let (pitch, part) = (2 * k + 8, k + 8);
            let parts = run.dev.alloc(n * pitch * 2)?;
            g.rows(&run.stream, db.ptr(), n, k, 0, n, parts.ptr(), pitch, part, true)?;
            run.stream.synchronize()?;
            let value =
                |r: usize, k: usize| rows.iter().position(|x| *x == r).map_or(f64::NAN, |i| values[i][k]);
            let got: Vec<u16> = plain.read(0, picks.len() * k)?;
            let worst = (0..got.len()).fold(0f64, |m, i| {
                let want = value(picks[i / k] as usize, i % k);
                let error = (f64::from(bf16(got[i])) - want).abs();
                m.max(over(error, bf16_half_ulp(want) + 1e-7 * want.abs() + 1e-30))
            });
            run.check("ggml_rows", format!("{} {n}x{k}: chosen rows", ty.name()), worst, false);
            let got: Vec<u16> = parts.read(0, n * pitch)?;
            let mut worst = 0f64;
            for (row, want) in rows.iter().zip(&values) {
                for (i, w) in want.iter().enumerate() {
                    let at = row * pitch + i;
                    let error = (f64::from(bf16(got[at])) + f64::from(bf16(got[at + part])) - w).abs();
                    worst = worst.max(over(error, w.abs() * 2f64.powi(-17) + 1e-30));
                }
            }
            run.check("ggml_rows", format!("{} {n}x{k}: two parts", ty.name()), worst, false);
            // As experts: each pick its own matrix and input row.
            let e = 3.min(n);
            let per = n / e;
            let tab: Vec<u64> = (0..e).map(|i| db.at(i * per * row_bytes)).collect();
            // Rows of the first expert alone are 16-byte aligned in every type; others where the type's loads allow.
            let wide = matches!(ty, GgmlType::Q4K | GgmlType::Q5K | GgmlType::F32);
            let aligned = !wide || (per * row_bytes).is_multiple_of(16);
            if k.is_multiple_of(64) && aligned {
                let what = (ty, per, k, (pitch, part));
                let bad = expanded(run, &g, what, &tab, &got)?;
                let case =
                    format!("{} {n}x{k}: experts have the bits of rows, no others are written", ty.name());
                run.check("ggml_expand", case, bad as f64, true);
            }
            let ids: Vec<i32> = (0..8).map(|_| run.rng.below(e) as i32).collect();
            let di = run.dev.upload(&ids)?;
            // The second time every other expert is read where the host has it.
            let place = (per * row_bytes).next_multiple_of(64) + 64;
            let mut host = run.dev.pinned(e * place)?;
            for i in 0..e {
                let own = &b[i * per * row_bytes..(i + 1) * per * row_bytes];
                host.as_mut_slice()[i * place..][..own.len()].copy_from_slice(own);
            }
            let mixed: Vec<u64> = (0..e)
                .map(|i| if i % 2 == 0 { host.device_ptr() + (i * place) as u64 } else { tab[i] })
                .collect();
            let away: Vec<u32> = (0..e).map(|i| u32::from(i % 2 == 0)).collect();
            let (tables, away) = ([run.dev.upload(&tab)?, run.dev.upload(&mixed)?], run.dev.upload(&away)?);
            for (dt, away) in tables.iter().zip([0, away.ptr()]).filter(|_| aligned) {
                let y = run.dev.alloc(8 * per * 2)?;
                let (s, x) = (&run.stream, dx.ptr());
                g.experts(s, dt.ptr(), away, 0, di.ptr(), 8, 2, per, k, x, xp, y.ptr(), per, false)?;
                run.stream.synchronize()?;
                let got: Vec<u16> = y.read(0, 8 * per)?;
                let bad = (0..8 * per)
                    .filter(|i| {
                        let (p, r) = (i / per, i % per);
                        got[*i] != base[p / 2 * yp + ids[p] as usize * per + r]
                    })
                    .count();
                let whose = if away == 0 { "" } else { ", the host's too" };
                let case = format!("{} {n}x{k}: experts have the linear's bits{whose}", ty.name());
                run.check("ggml", case, bad as f64, true);
            }
        }
    }
    if run.bench {
        let (n, k) = (10240usize, 2560usize);
        for ty in GgmlGemv::TYPES {
            let g = GgmlGemv::new(&run.dev, ty)?;
            let b = blocks(&mut run.rng, ty, n, k);
            let copies = run.copies(b.len());
            let sets: Vec<_> = (0..copies).map(|_| run.dev.upload(&b)).collect::<Result<_>>()?;
            let x = run.dev.upload(&run.rng.bf16(8 * k, 1.0))?;
            let y = run.dev.alloc(8 * n * 2)?;
            for c in [1usize, 4] {
                let us = run.time(copies, |i| {
                    g.launch(&run.stream, sets[i].ptr(), n, k, x.ptr(), k, c, y.ptr(), n, Out::Bf16, true)
                })?;
                run.timed("ggml", format!("{} {n}x{k}, {c} columns", ty.name()), us, b.len());
            }
            // The same rows as eight experts, in two parts.
            let (e, stride) = (8, n / 8 * 2 * k);
            let tabs: Vec<_> = sets
                .iter()
                .map(|s| run.dev.upload(&(0..e).map(|i| s.at(i * b.len() / e)).collect::<Vec<u64>>()))
                .collect::<Result<_>>()?;
            let y = run.dev.alloc(2 * e * stride)?;
            let us = run.time(copies, |i| {
                g.expand(&run.stream, tabs[i].ptr(), 0, 0, e, n / e, k, y.ptr(), stride, true)
            })?;
            run.timed(
                "ggml_expand",
                format!("{} 8 experts {}x{k}", ty.name(), n / e),
                us,
                b.len() + 4 * n * k,
            );
        }
    }
    Ok(())
}
