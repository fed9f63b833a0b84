//! Row operations against f64: at most one BF16 step from the nearest, bit equality where the operation is exact.

use super::{Run, unequal};
use crate::driver::DeviceBuffer;
use crate::error::Result;
use crate::kernels::rows::RowOps;
use crate::oracle::num::{bf16, bf16_half_ulp, f16, f32_to_bf16, rbf, sigmoid, silu};

/// Worst |got - want| over (half an ulp + 4e-6 |want|) of BF16 outputs.
fn share(got: &[u16], want: &[f64]) -> f64 {
    got.iter().zip(want).fold(0f64, |m, (g, w)| {
        let g = f64::from(bf16(*g));
        m.max(if g.is_finite() {
            (g - w).abs() / (bf16_half_ulp(*w) + 4e-6 * w.abs() + 1e-30)
        } else {
            f64::INFINITY
        })
    })
}

fn val(w: u16) -> f64 {
    f64::from(bf16(w))
}

pub(super) fn run(run: &mut Run) -> Result<()> {
    let ops = RowOps::new(&run.dev)?;
    let dev = run.dev.clone();
    let eps = 1e-6f64;
    for (n, groups, rows, centred) in [
        (2560usize, 4usize, 5usize, true),
        (5120, 1, 3, true),
        (256, 1, 2, false),
        (66, 2, 7, true),
        (10_240, 1, 2, true),
    ] {
        let x = run.rng.bf16(rows * groups * n, 2.0);
        let w = run.rng.bf16(groups * n, 0.3);
        let (dx, dw, y) = (dev.upload(&x)?, dev.upload(&w)?, dev.alloc(rows * groups * n * 2)?);
        ops.rms_norm(
            &run.stream,
            dx.ptr(),
            dw.ptr(),
            y.ptr(),
            n,
            groups,
            rows,
            groups * n,
            groups * n,
            eps as f32,
            centred,
            false,
        )?;
        run.stream.synchronize()?;
        let want: Vec<f64> = (0..rows * groups)
            .flat_map(|g| {
                let v = &x[g * n..(g + 1) * n];
                let r = 1.0 / (v.iter().map(|w| val(*w).powi(2)).sum::<f64>() / n as f64 + eps).sqrt();
                let w = &w[g % groups * n..][..n];
                v.iter()
                    .zip(w)
                    .map(|(x, w)| val(*x) * r * (if centred { 1.0 } else { 0.0 } + val(*w)))
                    .collect::<Vec<_>>()
            })
            .collect();
        run.check(
            "rms_norm",
            format!("{groups} x {n}, {rows} rows"),
            share(&y.read(0, want.len())?, &want),
            false,
        );
        if run.bench && n == 2560 {
            let us = run.time(1, |_| {
                ops.rms_norm(
                    &run.stream,
                    dx.ptr(),
                    dw.ptr(),
                    y.ptr(),
                    n,
                    groups,
                    1,
                    groups * n,
                    groups * n,
                    1e-6,
                    true,
                    true,
                )
            })?;
            run.timed("rms_norm", "4 x 2560, 1 row".into(), us, 4 * 2560 * 4);
        }
    }
    add_norm(run)?;
    for (d, half, heads) in [(256usize, 32usize, 24usize), (128, 32, 4), (128, 64, 3), (32, 4, 2)] {
        let pos: Vec<i32> =
            vec![0, 0, 0, 5, 5, 5, 262_143, 262_143, 262_143, 1000, 17, 42, 131_071, 131_071, 131_071];
        let rows = 5;
        let freq: Vec<f64> = (0..half).map(|i| 1e7f64.powf(-(i as f64) / half as f64)).collect();
        let axis: Vec<u8> = (0..half).map(|i| (i % 3) as u8).collect();
        let x = run.rng.bf16(rows * heads * 2 * d, 2.0);
        let w = run.rng.bf16(d, 0.3);
        let (dp, df, da, dx, dw) =
            (dev.upload(&pos)?, dev.upload(&freq)?, dev.upload(&axis)?, dev.upload(&x)?, dev.upload(&w)?);
        let (table, y) = (dev.alloc(rows * 2 * half * 4)?, dev.alloc(rows * heads * d * 2)?);
        ops.rope_table(&run.stream, dp.ptr(), df.ptr(), da.ptr(), 1.0, half, rows, table.ptr(), false)?;
        ops.head_norm_rope(
            &run.stream,
            dx.ptr(),
            dw.ptr(),
            table.ptr(),
            y.ptr(),
            d,
            half,
            heads,
            rows,
            heads * 2 * d,
            2 * d,
            heads * d,
            d,
            eps as f32,
            true,
        )?;
        run.stream.synchronize()?;
        let got: Vec<u16> = y.read(0, rows * heads * d)?;
        let mut worst = 0f64;
        for r in 0..rows {
            for h in 0..heads {
                let v: Vec<f64> = x[(r * heads + h) * 2 * d..][..d].iter().map(|w| val(*w)).collect();
                let rs = 1.0 / (v.iter().map(|x| x * x).sum::<f64>() / d as f64 + eps).sqrt();
                let nv: Vec<f64> = v.iter().zip(&w).map(|(x, w)| x * rs * (1.0 + val(*w))).collect();
                for i in 0..d {
                    let ang = |f: usize| f64::from(pos[r * 3 + axis[f] as usize]) * freq[f];
                    let (want, mag) = if i < half {
                        (nv[i] * ang(i).cos() - nv[i + half] * ang(i).sin(), nv[i].abs() + nv[i + half].abs())
                    } else if i < 2 * half {
                        let f = i - half;
                        (nv[i] * ang(f).cos() + nv[f] * ang(f).sin(), nv[i].abs() + nv[f].abs())
                    } else {
                        (nv[i], nv[i].abs())
                    };
                    let g = val(got[(r * heads + h) * d + i]);
                    let e = (g - want).abs() / (bf16_half_ulp(want) + 2e-6 * mag);
                    worst = worst.max(if g.is_finite() { e } else { f64::INFINITY });
                }
            }
        }
        run.check(
            "head_norm_rope",
            format!("{heads} heads of {d}, {half} pairs, positions to 262,143"),
            worst,
            false,
        );
    }
    {
        let (c, rows) = (10240usize, 6usize);
        let (x, st, w) = (run.rng.bf16(rows * c, 1.0), run.rng.bf16(3 * c, 1.0), run.rng.bf16(c * 4, 0.5));
        let (dx, ds, dw, y) = (dev.upload(&x)?, dev.upload(&st)?, dev.upload(&w)?, dev.alloc(rows * c * 2)?);
        ops.conv_silu(&run.stream, dx.ptr(), ds.ptr(), dw.ptr(), y.ptr(), c, rows, c, c, false)?;
        run.stream.synchronize()?;
        let mut worst = 0f64;
        let got: Vec<u16> = y.read(0, rows * c)?;
        for t in 0..rows {
            for ch in 0..c {
                let (mut s, mut a) = (0f64, 0f64);
                for j in 0..4 {
                    let p = t as i64 - 3 + j as i64;
                    let v = val(w[ch * 4 + j])
                        * if p >= 0 {
                            val(x[p as usize * c + ch])
                        } else {
                            val(st[(p + 3) as usize * c + ch])
                        };
                    s += v;
                    a += v.abs();
                }
                let e = (val(got[t * c + ch]) - silu(s)).abs() / (bf16_half_ulp(silu(s)) + 2e-6 * a);
                worst = worst.max(if e.is_finite() { e } else { f64::INFINITY });
            }
        }
        run.check("conv_silu", format!("{c} channels, {rows} rows"), worst, false);
        for n in [1i32, 2, 3, 6] {
            let (ds, dn) = (dev.upload(&st)?, dev.upload(&[n])?);
            ops.conv_fold(&run.stream, dx.ptr(), ds.ptr(), dn.ptr(), c, c, false)?;
            run.stream.synchronize()?;
            let all = [&st[..], &x[..]].concat();
            let want = &all[n as usize * c..][..3 * c];
            let bad = ds.read::<u16>(0, 3 * c)?.iter().zip(want).filter(|(a, b)| a != b).count();
            run.check("conv_fold", format!("{n} columns"), bad as f64, true);
        }
    }
    for sigm in [false, true] {
        let (d, heads, rows) = (128usize, 48usize, 3usize);
        let n = d * heads;
        let (o, z, w) = (run.rng.bf16(rows * n, 0.1), run.rng.bf16(rows * n, 2.0), run.rng.bf16(d, 1.0));
        let (d0, dz, dw, y) = (dev.upload(&o)?, dev.upload(&z)?, dev.upload(&w)?, dev.alloc(rows * n * 2)?);
        ops.gated_norm(
            &run.stream,
            d0.ptr(),
            dz.ptr(),
            dw.ptr(),
            y.ptr(),
            d,
            heads,
            rows,
            n,
            n,
            n,
            eps as f32,
            sigm,
            false,
        )?;
        run.stream.synchronize()?;
        let want: Vec<f64> = (0..rows * n)
            .map(|i| {
                let h = &o[i / d * d..][..d];
                let r = 1.0 / (h.iter().map(|w| val(*w).powi(2)).sum::<f64>() / d as f64 + eps).sqrt();
                val(o[i]) * r * val(w[i % d]) * if sigm { sigmoid(val(z[i])) } else { silu(val(z[i])) }
            })
            .collect();
        run.check(
            "gated_norm",
            format!("48 heads of 128, sigmoid {sigm}"),
            share(&y.read(0, rows * n)?, &want),
            false,
        );
    }
    {
        let (n, rows, d) = (640usize, 3usize, 64usize);
        let (a, b) = (run.rng.bf16(rows * n, 3.0), run.rng.bf16(rows * n, 1.0));
        let (da, db, y) = (dev.upload(&a)?, dev.upload(&b)?, dev.alloc(rows * n * 2)?);
        ops.swiglu(&run.stream, da.ptr(), db.ptr(), y.ptr(), n, rows, n, n, n, false)?;
        run.stream.synchronize()?;
        let want: Vec<f64> = a.iter().zip(&b).map(|(a, b)| silu(val(*a)) * val(*b)).collect();
        run.check("swiglu", "3 x 640".into(), share(&y.read(0, rows * n)?, &want), false);
        y.fill(0xFF)?;
        ops.mul_sigmoid(&run.stream, da.ptr(), db.ptr(), y.ptr(), n, d, rows, n, n, d, n, false)?;
        run.stream.synchronize()?;
        let want: Vec<f64> = a.iter().zip(&b).map(|(a, b)| val(*a) * sigmoid(val(*b))).collect();
        run.check("mul_sigmoid", "3 x 640".into(), share(&y.read(0, rows * n)?, &want), false);
        y.fill(0xFF)?;
        ops.add(&run.stream, da.ptr(), db.ptr(), y.ptr(), n, rows, false)?;
        run.stream.synchronize()?;
        let bad = y
            .read::<u16>(0, rows * n)?
            .iter()
            .zip(a.iter().zip(&b))
            .filter(|(y, (a, b))| **y != f32_to_bf16(bf16(**a) + bf16(**b)))
            .count();
        run.check("add", "3 x 640".into(), bad as f64, true);
    }
    {
        let (v, n) = (100usize, 2560usize);
        let ids: Vec<i32> = vec![3, 99, 0, 3];
        let di = dev.upload(&ids)?;
        let table = run.rng.bf16(v * n, 1.0);
        let (dt, y) = (dev.upload(&table)?, dev.alloc(ids.len() * 4 * n * 2)?);
        ops.embed(&run.stream, di.ptr(), dt.ptr(), n * 2, None, n, 4, ids.len(), y.ptr(), false)?;
        run.stream.synchronize()?;
        let got: Vec<u16> = y.read(0, ids.len() * 4 * n)?;
        let bad = (0..got.len()).filter(|i| got[*i] != table[ids[i / (4 * n)] as usize * n + i % n]).count();
        run.check("embed", "bf16, four copies".into(), bad as f64, true);
        let codes = run.rng.bytes(v * n);
        let sc: Vec<u16> = (0..v * n / 32).map(|_| 0x2000 | (run.rng.next_u64() as u16 & 0x3FF)).collect();
        let (dc, ds, y) = (dev.upload(&codes)?, dev.upload(&sc)?, dev.alloc(ids.len() * n * 2)?);
        ops.embed(
            &run.stream,
            di.ptr(),
            dc.ptr(),
            n,
            Some((ds.ptr(), n / 16)),
            n,
            1,
            ids.len(),
            y.ptr(),
            false,
        )?;
        run.stream.synchronize()?;
        let got: Vec<u16> = y.read(0, ids.len() * n)?;
        let bad = (0..got.len())
            .filter(|i| {
                let e = ids[i / n] as usize * n + i % n;
                got[*i] != f32_to_bf16(f32::from(codes[e] as i8) * f16(sc[e / 32]))
            })
            .count();
        run.check("embed", "q8_g32".into(), bad as f64, true);
    }
    {
        // The combine is one order of fused steps in every backend: equality, given the shared gate's sigma.
        let (n, top, rows) = (2560usize, 10usize, 3usize);
        let ye = run.rng.bf16(rows * top * n, 1.0);
        let slot: Vec<i32> = (0..(rows * top) as i32).rev().collect();
        let w: Vec<f32> = (0..rows * top).map(|_| run.rng.unit() as f32 * 0.2).collect();
        let b = run.rng.f32(rows * 4, 1.0);
        let r = run.rng.bf16(rows * 4 * n, 1.0);
        let (dy, dsl, dw, db, dr, out) = (
            dev.upload(&ye)?,
            dev.upload(&slot)?,
            dev.upload(&w)?,
            dev.upload(&b)?,
            dev.upload(&r)?,
            dev.alloc(rows * n * 2)?,
        );
        ops.combine(
            &run.stream,
            dy.ptr(),
            dsl.ptr(),
            dw.ptr(),
            0,
            0,
            0,
            db.ptr(),
            dr.ptr(),
            out.ptr(),
            n,
            top,
            rows,
            false,
        )?;
        run.stream.synchronize()?;
        let (go, gr): (Vec<u16>, Vec<u16>) = (out.read(0, rows * n)?, dr.read(0, rows * 4 * n)?);
        let (mut bad, mut bad_r) = (0usize, 0usize);
        for i in 0..rows * n {
            let (row, e) = (i / n, i % n);
            let acc = (0..top).fold(0f32, |a, k| {
                w[row * top + k].mul_add(bf16(ye[slot[row * top + k] as usize * n + e]), a)
            });
            bad += usize::from(go[i] != f32_to_bf16(acc));
            for s in 0..4 {
                let at = (row * 4 + s) * n + e;
                bad_r += usize::from(gr[at] != f32_to_bf16(b[row * 4 + s].mul_add(rbf(acc), bf16(r[at]))));
            }
        }
        run.check("combine", "top 10, 3 rows".into(), bad as f64, true);
        run.check("combine", "injection into four streams".into(), bad_r as f64, true);
        let shared = run.rng.bf16(rows * n, 1.0);
        let logit = run.rng.f32(rows * 3, 1.0);
        let (dsh, dlg) = (dev.upload(&shared)?, dev.upload(&logit)?);
        out.fill(0xFF)?;
        ops.combine(
            &run.stream,
            dy.ptr(),
            dsl.ptr(),
            dw.ptr(),
            dsh.ptr(),
            dlg.ptr(),
            3,
            0,
            0,
            out.ptr(),
            n,
            top,
            rows,
            false,
        )?;
        run.stream.synchronize()?;
        let mut worst = 0f64;
        let go: Vec<u16> = out.read(0, rows * n)?;
        for i in 0..rows * n {
            let (row, e) = (i / n, i % n);
            let mut mag = 0f64;
            let acc: f64 = (0..top)
                .map(|k| {
                    let v = f64::from(w[row * top + k]) * val(ye[slot[row * top + k] as usize * n + e]);
                    mag += v.abs();
                    v
                })
                .sum();
            let sh = sigmoid(f64::from(logit[row * 3])) * val(shared[i]);
            let want = acc + sh;
            worst = worst.max((val(go[i]) - want).abs() / (bf16_half_ulp(want) + 1e-6 * (mag + sh.abs())));
        }
        run.check("combine", "with shared expert".into(), worst, false);
        if run.bench {
            let us = run.time(1, |_| {
                ops.combine(
                    &run.stream,
                    dy.ptr(),
                    dsl.ptr(),
                    dw.ptr(),
                    dsh.ptr(),
                    dlg.ptr(),
                    3,
                    db.ptr(),
                    dr.ptr(),
                    0,
                    n,
                    top,
                    1,
                    true,
                )
            })?;
            run.timed("combine", "1 row, top 10, injection".into(), us, 11 * n * 2 + 8 * n * 2);
        }
    }
    Ok(())
}

/// A sum and its norm in one launch: the words of the two launches, and the oracle's norm of the rounded sum.
fn add_norm(run: &mut Run) -> Result<()> {
    let (dev, ops, eps) = (run.dev.clone(), RowOps::new(&run.dev)?, 1e-6f64);
    for (n, rows) in [(5120usize, 1usize), (5120, 16), (2560, 5), (128, 3), (66, 7), (12_288, 2), (16_384, 1)]
    {
        let (x, a, w) = (run.rng.bf16(rows * n, 2.0), run.rng.bf16(rows * n, 1.0), run.rng.bf16(n, 0.3));
        let (dx, da, dw) = (dev.upload(&x)?, dev.upload(&a)?, dev.upload(&w)?);
        let made = || dev.alloc(rows * n * 2);
        let (r, y, one, two) = (made()?, made()?, made()?, made()?);
        let s = &run.stream;
        ops.add_norm(s, (dx.ptr(), da.ptr(), r.ptr()), dw.ptr(), y.ptr(), n, rows, eps as f32, true, false)?;
        ops.add(s, dx.ptr(), da.ptr(), one.ptr(), n, rows, false)?;
        ops.rms_norm(s, one.ptr(), dw.ptr(), two.ptr(), n, 1, rows, n, n, eps as f32, true, false)?;
        // In place, as the residual of a model.
        ops.add_norm(s, (dx.ptr(), da.ptr(), dx.ptr()), dw.ptr(), y.ptr(), n, rows, eps as f32, true, false)?;
        run.stream.synchronize()?;
        let read = |b: &DeviceBuffer| b.read::<u16>(0, rows * n);
        let sum: Vec<u16> = x.iter().zip(&a).map(|(x, a)| f32_to_bf16(bf16(*x) + bf16(*a))).collect();
        let bad = unequal(&read(&r)?, &sum) + unequal(&read(&dx)?, &sum) + unequal(&read(&one)?, &sum);
        run.check("rms_norm", format!("sum before, {rows} x {n}: the sum"), bad, true);
        let got = read(&y)?;
        run.check(
            "rms_norm",
            format!("sum before, {rows} x {n}: words of two launches"),
            unequal(&got, &read(&two)?),
            true,
        );
        let want: Vec<f64> = (0..rows * n)
            .map(|i| {
                let v = &sum[i / n * n..][..n];
                let r = 1.0 / (v.iter().map(|w| val(*w).powi(2)).sum::<f64>() / n as f64 + eps).sqrt();
                val(sum[i]) * r * (1.0 + val(w[i % n]))
            })
            .collect();
        run.check("rms_norm", format!("sum before, {rows} x {n}"), share(&got, &want), false);
        if run.bench && (n, rows) == (5120, 1) {
            let us = run.time(1, |_| {
                ops.add_norm(
                    &run.stream,
                    (dx.ptr(), da.ptr(), r.ptr()),
                    dw.ptr(),
                    y.ptr(),
                    n,
                    rows,
                    1e-6,
                    true,
                    true,
                )
            })?;
            run.timed("rms_norm", "sum before, 1 x 5120".into(), us, n * 10);
        }
    }
    Ok(())
}
