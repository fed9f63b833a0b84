//! Exact selections: ids equal to a stable sort, with the cut forced onto ties.

use super::Run;
use crate::error::Result;
use crate::kernels::select::{Candidates, IndexPages, IndexSelect};
use crate::oracle::num::bf16;

/// Ids of the `want` largest, lower id first on equality.
fn best(v: &[f32], want: usize) -> Vec<usize> {
    let mut o: Vec<usize> = (0..v.len()).collect();
    o.sort_by(|a, b| v[*b].partial_cmp(&v[*a]).unwrap_or(std::cmp::Ordering::Equal).then(a.cmp(b)));
    o.truncate(want);
    o
}

pub(super) fn run(run: &mut Run) -> Result<()> {
    let (ratio, want) = (4usize, 512usize);
    let sel = IndexSelect::new(&run.dev, 4, ratio, want)?;
    for blocks in [3usize, 512, 513, 2500, 32768, 65536] {
        let rows = 3usize;
        let page_log = 8;
        let pages = blocks.div_ceil(256);
        let mut k = run.rng.bf16(pages * 256 * 128, 1.0);
        // Duplicated keys give equal scores; half of the keys of the last case are one and the same.
        for b in 1..blocks {
            if run.rng.below(if blocks == 2500 { 2 } else { 20 }) == 0 {
                k.copy_within(0..128, b * 128);
            }
        }
        let q = run.rng.bf16(rows * 512, 1.0);
        let table: Vec<i32> = (0..pages as i32).collect();
        let lane = vec![0i32; rows];
        let pos: Vec<i32> =
            vec![(blocks * ratio) as i32 - 1, (blocks * ratio) as i32 + 1, (blocks * ratio / 2) as i32];
        let (dk, dq, dt, dl, dp) = (
            run.dev.upload(&k)?,
            run.dev.upload(&q)?,
            run.dev.upload(&table)?,
            run.dev.upload(&lane)?,
            run.dev.upload(&pos)?,
        );
        let (scores, ids, counts) =
            (run.dev.alloc(rows * blocks * 4)?, run.dev.alloc(rows * want * 4)?, run.dev.alloc(rows * 4)?);
        let p = IndexPages {
            keys: dk.ptr(),
            tables: dt.ptr(),
            table_pitch: pages,
            page_log,
            page_stride: 256 * 128,
        };
        let scratch = run.dev.alloc(sel.scratch(rows, blocks))?;
        let go = |s: &crate::driver::Stream, rows: usize, pdl: bool| {
            sel.launch(
                s,
                dq.ptr(),
                512,
                &p,
                dl.ptr(),
                dp.ptr(),
                rows,
                blocks,
                scores.ptr(),
                blocks,
                scratch.ptr(),
                ids.ptr(),
                want,
                counts.ptr(),
                pdl,
            )
        };
        go(&run.stream, rows, false)?;
        run.stream.synchronize()?;
        let (gs, gi, gc): (Vec<f32>, Vec<i32>, Vec<i32>) =
            (scores.read(0, rows * blocks)?, ids.read(0, rows * want)?, counts.read(0, rows)?);
        let (mut worst, mut bad) = (0f64, 0usize);
        for r in 0..rows {
            let n = (pos[r] as usize + 1) / ratio;
            for b in 0..n {
                let (mut s, mut mag) = (0f64, 0f64);
                for h in 0..4 {
                    let (mut d, mut a) = (0f64, 0f64);
                    for i in 0..128 {
                        let t = f64::from(bf16(q[r * 512 + h * 128 + i])) * f64::from(bf16(k[b * 128 + i]));
                        d += t;
                        a += t.abs();
                    }
                    s += d.max(0.0);
                    mag += a;
                }
                let scale = 128f64.powf(-0.5);
                let e = (f64::from(gs[r * blocks + b]) - s * scale).abs()
                    / (mag * scale * 128.0 * 2f64.powi(-24) + 1e-30);
                worst = worst.max(if e.is_finite() { e } else { f64::INFINITY });
            }
            // The selection is judged on the kernel's own scores: it must be exact given them.
            let mut w = best(&gs[r * blocks..][..n], want);
            w.sort_unstable();
            bad += usize::from(gc[r] as usize != w.len())
                + w.iter().enumerate().filter(|(i, id)| gi[r * want + i] != **id as i32).count();
        }
        run.check("qsa_score", format!("{blocks} blocks, 128 * 2^-24 of sum |q k|"), worst, false);
        run.check("qsa_select", format!("{blocks} blocks: ids"), bad as f64, true);
        if run.bench && blocks >= 2500 {
            let us = run.time(1, |_| go(&run.stream, 1, true))?;
            run.timed(
                "qsa",
                format!("score and select, {blocks} blocks, 1 row (keys in L2)"),
                us,
                blocks * 256,
            );
        }
    }
    // All scores zero but a few: the cut falls among ties.
    for n in [1000usize, 40_000] {
        let mut s = vec![0f32; n];
        for _ in 0..300 {
            let at = run.rng.below(n);
            s[at] = run.rng.unit() as f32 + 0.1;
        }
        let (ds, dp) = (run.dev.upload(&s)?, run.dev.upload(&[(n * ratio) as i32 - 1])?);
        let (ids, counts) = (run.dev.alloc(want * 4)?, run.dev.alloc(4)?);
        let chunks = n.div_ceil(4096);
        let cand = run.dev.alloc(chunks * want * 4)?;
        let (k, k0) = (run.dev.kernel("qsa_select", 0)?, run.dev.kernel("qsa_chunk", 0)?);
        let a =
            crate::driver::Args::new().ptr(ds.ptr()).ptr(dp.ptr()).ptr(cand.ptr()).ints(&[ratio, want, n]);
        run.stream.launch(&k0, [chunks as u32, 1, 1], 1024, false, &a)?;
        let a = crate::driver::Args::new()
            .ptr(ds.ptr())
            .ptr(dp.ptr())
            .ptr(cand.ptr())
            .ptr(ids.ptr())
            .ptr(counts.ptr());
        run.stream.launch(&k, [1, 1, 1], 1024, false, &a.ints(&[ratio, want, n, want, chunks]))?;
        run.stream.synchronize()?;
        let gi: Vec<i32> = ids.read(0, want)?;
        let mut w = best(&s, want);
        w.sort_unstable();
        let bad = w.iter().enumerate().filter(|(i, id)| gi[*i] != **id as i32).count();
        run.check("qsa_select", format!("{n} blocks, cut among zeros"), bad as f64, true);
    }
    for (n, want, rows) in
        [(248_320usize, 64usize, 3usize), (248_320, 1, 4), (131_072, 256, 1), (300, 64, 2), (40, 64, 1)]
    {
        let c = Candidates::new(&run.dev, want)?;
        let pitch = n + 3;
        let mut l = run.rng.f32(rows * pitch, 3.0);
        // Ties at the top and at the cut.
        for v in &mut l[pitch * (rows - 1)..] {
            *v = (*v * 4.0).round() / 4.0;
        }
        let (dl, scratch) = (run.dev.upload(&l)?, run.dev.alloc(c.scratch(rows, n))?);
        let (v, ids) = (run.dev.alloc(rows * want * 4)?, run.dev.alloc(rows * want * 4)?);
        c.launch(&run.stream, dl.ptr(), n, pitch, rows, scratch.ptr(), v.ptr(), ids.ptr(), false)?;
        run.stream.synchronize()?;
        let (gv, gi): (Vec<f32>, Vec<i32>) = (v.read(0, rows * want)?, ids.read(0, rows * want)?);
        let mut bad = 0usize;
        for r in 0..rows {
            let row = &l[r * pitch..][..n];
            let w = best(row, want);
            for k in 0..want {
                let (id, val) = w.get(k).map_or((-1, f32::NEG_INFINITY), |i| (*i as i32, row[*i]));
                bad += usize::from(gi[r * want + k] != id || gv[r * want + k] != val);
            }
        }
        run.check("candidates", format!("{want} of {n}, {rows} rows"), bad as f64, true);
        if run.bench && n == 248_320 {
            let us = run.time(1, |_| {
                c.launch(&run.stream, dl.ptr(), n, pitch, 1, scratch.ptr(), v.ptr(), ids.ptr(), true)
            })?;
            run.timed("candidates", format!("{want} of {n}, 1 row (logits in L2)"), us, n * 4);
        }
    }
    Ok(())
}
