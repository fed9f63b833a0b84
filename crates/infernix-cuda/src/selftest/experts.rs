//! Exact W4A4 experts and the router: equality with the oracle, times by number of columns.

use super::Run;
use crate::driver::DeviceBuffer;
use crate::error::Result;
use crate::kernels::experts::{ExpertTable, Jobs, Router, W4a4, W4a4Tuning, act_bytes};
use crate::oracle::num::{Rng, bf16, parallel};
use crate::oracle::w4a4;

/// Distinct ids of one row by Zipf(s) over a seeded permutation, as synthetic routing does.
pub(super) fn zipf_ids(rng: &mut Rng, e: usize, top: usize, s: f64, perm: &[usize]) -> Vec<i32> {
    let weights: Vec<f64> = (0..e).map(|i| 1.0 / ((i + 1) as f64).powf(s)).collect();
    let total: f64 = weights.iter().sum();
    let mut ids: Vec<i32> = Vec::new();
    while ids.len() < top {
        let mut u = rng.unit() * total;
        let mut i = 0;
        while i + 1 < e && u > weights[i] {
            u -= weights[i];
            i += 1;
        }
        let id = perm[i] as i32;
        if !ids.contains(&id) {
            ids.push(id);
        }
    }
    ids
}

pub(super) fn permutation(rng: &mut Rng, n: usize) -> Vec<usize> {
    let mut p: Vec<usize> = (0..n).collect();
    for i in (1..n).rev() {
        p.swap(i, rng.below(i + 1));
    }
    p
}

pub(super) struct Layer {
    pub(super) records: Vec<Vec<u8>>,
    pub(super) scales: Vec<w4a4::Scales>,
    pub(super) addresses: Vec<u64>,
    _bank: DeviceBuffer,
    _table: DeviceBuffer,
    _alpha: DeviceBuffer,
    _input: DeviceBuffer,
    pub(super) table: ExpertTable,
}

pub(super) fn layer(
    run: &mut Run,
    e: usize,
    h: usize,
    i: usize,
    divisor: bool,
    distinct: usize,
) -> Result<Layer> {
    let records: Vec<Vec<u8>> =
        (0..distinct.min(e)).map(|_| w4a4::random_record(&mut run.rng, h, i)).collect();
    let bytes = records[0].len();
    let stride = bytes.div_ceil(4096) * 4096;
    let bank = run.dev.alloc(e * stride)?;
    let (mut alpha, mut input, mut scales) = (vec![], vec![], vec![]);
    for x in 0..e {
        bank.write(x * stride, &records[x % records.len()])?;
        // Inputs of rms 1 land near the middle of the E4M3 range; products of about 1.
        let g = 0.02f32 * (0.5 + run.rng.unit() as f32);
        let g2 = 0.02f32 * (0.5 + run.rng.unit() as f32);
        let w = |k: usize| 0.25 / (k as f32).sqrt() / 6.0;
        let s = if divisor {
            w4a4::Scales {
                alpha: [1.0 / w(h) / g, 1.0 / w(h) / g, 1.0 / w(i) / g2],
                input: [1.0 / g, 1.0 / g, 1.0 / g2],
                divisor,
            }
        } else {
            w4a4::Scales { alpha: [w(h) * g, w(h) * g * 1.1, w(i) * g2], input: [g, g, g2], divisor }
        };
        alpha.extend(s.alpha);
        input.extend(s.input);
        scales.push(s);
    }
    let addresses: Vec<u64> = (0..e).map(|x| bank.at(x * stride)).collect();
    let (t, a, n) = (run.dev.upload(&addresses)?, run.dev.upload(&alpha)?, run.dev.upload(&input)?);
    let table = ExpertTable { records: t.ptr(), alpha: a.ptr(), input: n.ptr(), divisor };
    Ok(Layer { records, scales, addresses, _bank: bank, _table: t, _alpha: a, _input: n, table })
}

/// Equality at real and odd shapes, 1 to 32 rows, and the shared exponential over all BF16 inputs.
pub(super) fn check(run: &mut Run) -> Result<()> {
    let out = run.dev.alloc(65536 * 4)?;
    let k = run.dev.kernel("exp_table", 0)?;
    run.stream.launch(&k, [256, 1, 1], 256, false, &crate::driver::Args::new().ptr(out.ptr()))?;
    run.stream.synchronize()?;
    let got: Vec<f32> = out.read(0, 65536)?;
    let bad = (0..65536usize)
        .filter(|w| {
            let e = w4a4::exp_c(bf16(*w as u16));
            e.to_bits() != got[*w].to_bits() && !(e.is_nan() && got[*w].is_nan())
        })
        .count();
    run.check("exp_c", "all 65,536 BF16 inputs".into(), bad as f64, true);

    let n = 1 << 16;
    let g: Vec<u16> = (0..n).map(|w| w as u16).filter(|w| bf16(*w).is_finite()).collect();
    let u = run.rng.bf16(g.len(), 4.0);
    let (dg, du, dy) = (run.dev.upload(&g)?, run.dev.upload(&u)?, run.dev.alloc(g.len() * 2)?);
    let k = run.dev.kernel("swiglu_table", 0)?;
    let a = crate::driver::Args::new().ptr(dg.ptr()).ptr(du.ptr()).ptr(dy.ptr()).int(g.len());
    run.stream.launch(&k, [256, 1, 1], 256, false, &a)?;
    run.stream.synchronize()?;
    let got: Vec<u16> = dy.read(0, g.len())?;
    let bad = (0..g.len())
        .filter(|i| {
            let e = w4a4::swiglu(bf16(g[*i]), bf16(u[*i]));
            e != got[*i] && !bf16(e).is_nan()
        })
        .count();
    run.check("swiglu_c", "all finite BF16 gates, random up".into(), bad as f64, true);

    let mut v: Vec<f32> = (0..20000).map(|_| (run.rng.unit() * 20.0 - 10.0).exp2() as f32).collect();
    v.extend((0..0x7Eu8).flat_map(|w| {
        let (a, b) = (crate::oracle::num::e4m3(w), crate::oracle::num::e4m3(w + 1));
        [a, (a + b) / 2.0, f32::from_bits(((a + b) / 2.0).to_bits() + 1)]
    }));
    v.extend([0.0, 1e-30, 448.0, 463.9, 464.0, 500.0, 1e30]);
    let (dv, dw) = (run.dev.upload(&v)?, run.dev.alloc(v.len())?);
    let k = run.dev.kernel("e4m3_table", 0)?;
    let a = crate::driver::Args::new().ptr(dv.ptr()).ptr(dw.ptr()).int(v.len());
    run.stream.launch(&k, [v.len().div_ceil(256) as u32, 1, 1], 256, false, &a)?;
    run.stream.synchronize()?;
    let got: Vec<u8> = dw.read(0, v.len())?;
    let bad = (0..v.len()).filter(|i| got[*i] != w4a4::e4m3_encode(v[*i])).count();
    run.check("e4m3_encode", "random, words, ties, saturation".into(), bad as f64, true);

    let shapes: &[(usize, usize, usize, usize, bool)] = &[
        (512, 2560, 640, 10, false),
        (64, 2048, 512, 8, true),
        (32, 3072, 1024, 8, false),
        (16, 64, 32, 4, false),
        (8, 80, 48, 2, true),
        (12, 160, 16, 3, false),
    ];
    for &(e, h, i, top, divisor) in shapes {
        let l = layer(run, e, h, i, divisor, 24)?;
        let router = Router::new(&run.dev, e, top)?;
        for rows in [1usize, 2, 4, 7, 32] {
            if h * i > 1_000_000 && rows > 7 && e != 512 {
                continue;
            }
            let perm = permutation(&mut run.rng, e);
            let ids: Vec<i32> = (0..rows).flat_map(|_| zipf_ids(&mut run.rng, e, top, 1.2, &perm)).collect();
            let mut x = run.rng.bf16(rows * h, 1.0);
            // A zero block, a block of one large value, a row of large range.
            x[..16].fill(0);
            if h > 32 {
                x[16] = 0x4500;
            }
            let picks = rows * top;
            let (dids, dx) = (run.dev.upload(&ids)?, run.dev.upload(&x)?);
            let (jb, lb, cb) = (run.dev.alloc(picks * 16)?, run.dev.alloc(picks * 4)?, run.dev.alloc(8)?);
            let jobs = Jobs { jobs: jb.ptr(), list: lb.ptr(), count: cb.ptr() };
            let most = (0..e as i32).map(|x| ids.iter().filter(|i| **i == x).count()).max().unwrap_or(1);
            let mut want: Option<Vec<(Vec<u16>, Vec<u16>)>> = None;
            for (t, tuning) in [
                W4a4Tuning::default(),
                W4a4Tuning { stages: 3, rph_up: 2, rph_down: 4, per_sm: 2 },
                W4a4Tuning { stages: 1, rph_up: 1, rph_down: 1, per_sm: 1 },
            ]
            .into_iter()
            .enumerate()
            {
                let Ok(k) = W4a4::new(&run.dev, h, i, most, tuning) else { continue };
                let (mid, y) = (run.dev.alloc(picks * i * 2)?, run.dev.alloc(picks * h * 2)?);
                let act = run.dev.alloc(picks * act_bytes(h))?;
                router.prepare(
                    &run.stream,
                    dids.ptr(),
                    rows,
                    k.width,
                    jobs,
                    &l.table,
                    dx.ptr(),
                    h,
                    act.ptr(),
                    false,
                )?;
                k.launch(&run.stream, &l.table, jobs, act.ptr(), mid.ptr(), y.ptr(), None, true)?;
                run.stream.synchronize()?;
                let (gm, gy): (Vec<u16>, Vec<u16>) = (mid.read(0, picks * i)?, y.read(0, picks * h)?);
                // All picks of small calls, a sample of large ones (the oracle is scalar).
                let all = picks * h * i < 60_000_000;
                let chosen: Vec<usize> =
                    if all { (0..picks).collect() } else { (0..picks).step_by(picks.div_ceil(24)).collect() };
                let refs = want.get_or_insert_with(|| {
                    parallel(chosen.len(), |c| {
                        let p = chosen[c];
                        let ex = ids[p] as usize;
                        w4a4::expert(
                            &l.records[ex % l.records.len()],
                            &x[p / top * h..][..h],
                            i,
                            &l.scales[ex],
                        )
                    })
                });
                let (mut bad_mid, mut bad_y) = (0usize, 0usize);
                for (c, p) in chosen.iter().enumerate() {
                    bad_mid += (0..i).filter(|j| gm[p * i + j] != refs[c].0[*j]).count();
                    bad_y += (0..h).filter(|j| gy[p * h + j] != refs[c].1[*j]).count();
                }
                // Everything must be written: no poison left.
                let unwritten = gy.iter().chain(&gm).filter(|w| **w == 0xFFFF).count();
                let case = format!(
                    "{e} experts {h}/{i}, {rows} rows, at most {most} picks, tuning {t}, divisor {divisor}"
                );
                run.check("w4a4 gate/up", case.clone(), bad_mid as f64, true);
                run.check("w4a4 down", case, (bad_y + unwritten) as f64, true);
            }
        }
    }
    Ok(())
}

/// Times with all records resident; ids by Zipf(1.2), rotating over layers.
pub(super) fn bench(run: &mut Run) -> Result<()> {
    if !run.bench {
        return Ok(());
    }
    let (e, h, i, top) = (512usize, 2560usize, 640usize, 10usize);
    let layers = 4;
    let ls: Vec<Layer> = (0..layers).map(|_| layer(run, e, h, i, false, 8)).collect::<Result<_>>()?;
    let router = Router::new(&run.dev, e, top)?;
    for rows in [1usize, 2, 4, 8, 16, 32] {
        let sets = 24;
        let x = run.dev.upload(&run.rng.bf16(rows * h, 1.0))?;
        let picks = rows * top;
        let (mid, y) = (run.dev.alloc(picks * i * 2)?, run.dev.alloc(picks * h * 2)?);
        let mut calls = vec![];
        let (mut distinct, mut most) = (0usize, 1usize);
        for _ in 0..sets {
            let perm = permutation(&mut run.rng, e);
            let ids: Vec<i32> = (0..rows).flat_map(|_| zipf_ids(&mut run.rng, e, top, 1.2, &perm)).collect();
            let mut u = ids.clone();
            u.sort_unstable();
            most = most.max(u.chunk_by(|a, b| a == b).map(<[i32]>::len).max().unwrap_or(1));
            u.dedup();
            distinct += u.len();
            calls.push((
                run.dev.upload(&ids)?,
                run.dev.alloc(picks * 16)?,
                run.dev.alloc(picks * 4)?,
                run.dev.alloc(8)?,
            ));
        }
        let act = run.dev.alloc(picks * act_bytes(h))?;
        let base = W4a4Tuning::for_width(most);
        let tunings: &[W4a4Tuning] = &[
            base,
            W4a4Tuning { per_sm: 3, ..base },
            W4a4Tuning { per_sm: 3, stages: 3, ..base },
            W4a4Tuning { per_sm: 2, stages: 4, ..base },
            W4a4Tuning { rph_up: 2, ..base },
        ];
        for t in tunings {
            let k = W4a4::new(&run.dev, h, i, most, *t)?;
            let bytes = distinct * k.record_bytes() / sets;
            let jobs_of =
                |s: usize| Jobs { jobs: calls[s].1.ptr(), list: calls[s].2.ptr(), count: calls[s].3.ptr() };
            let prepare = |s: usize, pdl: bool| {
                router.prepare(
                    &run.stream,
                    calls[s].0.ptr(),
                    rows,
                    k.width,
                    jobs_of(s),
                    &ls[s % layers].table,
                    x.ptr(),
                    h,
                    act.ptr(),
                    pdl,
                )
            };
            for s in 0..sets {
                prepare(s, false)?;
            }
            run.stream.synchronize()?;
            let case = format!(
                "512 experts 2560/640, {rows} rows, {:.1} records, width {}, {t:?}",
                distinct as f64 / sets as f64,
                k.width
            );
            let launch = |s: usize| {
                k.launch(
                    &run.stream,
                    &ls[s % layers].table,
                    jobs_of(s),
                    act.ptr(),
                    mid.ptr(),
                    y.ptr(),
                    None,
                    true,
                )
            };
            let us = run.time(sets, launch)?;
            let with = run.time(sets, |s| {
                prepare(s, true)?;
                launch(s)
            })?;
            run.timed("w4a4", case.clone(), us, bytes);
            if *t == base {
                run.timed("w4a4 with prepare", case, with, bytes);
            }
        }
    }
    Ok(())
}

/// Top-k with ties, grouping into jobs.
pub(super) fn router(run: &mut Run) -> Result<()> {
    for (e, top, rows) in [(512usize, 10usize, 64usize), (256, 8, 5), (60, 4, 3), (1024, 32, 2), (8, 8, 1)] {
        let r = Router::new(&run.dev, e, top)?;
        let none = ExpertTable::default();
        let pitch = e + 5;
        let mut logits = run.rng.f32(rows * pitch, 2.0);
        // Ties: quantise half of the rows coarsely; a row of equal values; zeros of both signs.
        for (i, v) in logits.iter_mut().enumerate() {
            if i / pitch % 2 == 1 {
                *v = (*v * 2.0).round() / 2.0;
            }
        }
        logits[..pitch].fill(if rows > 1 { -0.0 } else { 1.0 });
        logits[e / 2] = 0.0;
        let d = run.dev.upload(&logits)?;
        let (ids, w) = (run.dev.alloc(rows * top * 4)?, run.dev.alloc(rows * top * 4)?);
        let width = 4;
        let picks = rows * top;
        let (jb, lb, cb) = (run.dev.alloc(picks * 16)?, run.dev.alloc(picks * 4)?, run.dev.alloc(8)?);
        let jobs = Jobs { jobs: jb.ptr(), list: lb.ptr(), count: cb.ptr() };
        r.select(&run.stream, d.ptr(), pitch, rows, ids.ptr(), w.ptr(), false)?;
        r.prepare(&run.stream, ids.ptr(), rows, width, jobs, &none, 0, 0, 0, true)?;
        run.stream.synchronize()?;
        let (gi, gw): (Vec<i32>, Vec<f32>) = (ids.read(0, picks)?, w.read(0, picks)?);
        let (mut bad, mut worst) = (0usize, 0f64);
        let mut want_ids = vec![];
        for row in 0..rows {
            let l = &logits[row * pitch..][..e];
            let mut order: Vec<usize> = (0..e).collect();
            order.sort_by(|a, b| {
                l[*b].partial_cmp(&l[*a]).unwrap_or(std::cmp::Ordering::Equal).then(a.cmp(b))
            });
            let m = f64::from(l[order[0]]);
            let ex: Vec<f64> = order[..top].iter().map(|i| (f64::from(l[*i]) - m).exp()).collect();
            let sum: f64 = ex.iter().sum();
            for k in 0..top {
                bad += usize::from(gi[row * top + k] != order[k] as i32);
                let want = ex[k] / sum;
                worst = worst.max((f64::from(gw[row * top + k]) - want).abs() / (want * 8e-7));
                want_ids.push(order[k] as i32);
            }
        }
        run.check("router_topk", format!("top {top} of {e}, {rows} rows: ids"), bad as f64, true);
        run.check(
            "router_topk",
            format!("top {top} of {e}, {rows} rows: weights, relative 8e-7"),
            worst,
            false,
        );
        let mut want_jobs: Vec<[i32; 4]> = vec![];
        let mut want_list: Vec<i32> = vec![];
        for x in 0..e as i32 {
            let p: Vec<i32> = (0..picks as i32).filter(|p| want_ids[*p as usize] == x).collect();
            for c in p.chunks(width) {
                want_jobs.push([x, want_list.len() as i32, c.len() as i32, 0]);
                want_list.extend(c);
            }
        }
        let (gj, gl, gc): (Vec<i32>, Vec<i32>, Vec<i32>) =
            (jb.read(0, want_jobs.len() * 4)?, lb.read(0, picks)?, cb.read(0, 2)?);
        let bad = gj.chunks(4).zip(&want_jobs).filter(|(a, b)| *a != *b).count()
            + gl.iter().zip(&want_list).filter(|(a, b)| a != b).count()
            + usize::from(gc != [want_jobs.len() as i32, picks as i32]);
        run.check("group_experts", format!("{rows} rows, top {top} of {e}, width {width}"), bad as f64, true);
        if run.bench && e == 512 {
            let us = run.time(1, |_| r.select(&run.stream, d.ptr(), pitch, 1, ids.ptr(), w.ptr(), true))?;
            run.timed("router_topk", "1 row of 512".into(), us, e * 4);
            let us =
                run.time(1, |_| r.prepare(&run.stream, ids.ptr(), 1, width, jobs, &none, 0, 0, 0, true))?;
            run.timed("group_experts", "1 row".into(), us, 40);
            let us =
                run.time(1, |_| r.prepare(&run.stream, ids.ptr(), 32, width, jobs, &none, 0, 0, 0, true))?;
            run.timed("group_experts", "32 rows".into(), us, 1280);
        }
    }
    Ok(())
}
