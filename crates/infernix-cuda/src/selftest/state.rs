//! Gated delta rule step: outputs and states against f64 with the contract's roundings; equality over widths.

use super::Run;
use crate::error::Result;
use crate::kernels::gdn::{ChunkArgs, GdnArgs, GdnChunk, GdnStep};
use crate::oracle::num::{bf16, parallel, rbf, sigmoid, silu};

/// Inputs of one lane on the host.
struct Lane<'a> {
    nk: usize,
    nv: usize,
    y: &'a [u16],
    conv: &'a [u16],
    w: &'a [u16],
    a: &'a [u16],
    b: &'a [u16],
    a_log: &'a [f32],
    dt: &'a [f32],
    state: &'a [f32],
    cols: usize,
}

/// (o `[cols][nv*128]`, state after each column count in `keep`).
fn reference(l: &Lane<'_>, keep: usize) -> (Vec<f64>, Vec<f32>) {
    let c = 2 * l.nk * 128 + l.nv * 128;
    let mut u = vec![0f64; l.cols * c];
    for t in 0..l.cols {
        for ch in 0..c {
            let mut s = 0f64;
            for j in 0..4 {
                let p = t as i64 - 3 + j as i64;
                let v = if p >= 0 {
                    bf16(l.y[p as usize * c + ch])
                } else {
                    bf16(l.conv[(p + 3) as usize * c + ch])
                };
                s += f64::from(bf16(l.w[ch * 4 + j])) * f64::from(v);
            }
            u[t * c + ch] = f64::from(rbf(silu(s) as f32));
        }
    }
    recur(l, &u, keep)
}

/// The rule on `u` (q | k | v behind convolution and silu).
fn recur(l: &Lane<'_>, u: &[f64], keep: usize) -> (Vec<f64>, Vec<f32>) {
    let c = 2 * l.nk * 128 + l.nv * 128;
    let heads = parallel(l.nv, |h| {
        let kh = h / (l.nv / l.nk);
        let mut s: Vec<f64> = l.state[h * 16384..(h + 1) * 16384].iter().map(|v| f64::from(*v)).collect();
        let mut kept: Vec<f32> = l.state[h * 16384..(h + 1) * 16384].to_vec();
        let mut o = vec![0f64; l.cols * 128];
        for t in 0..l.cols {
            let row = &u[t * c..(t + 1) * c];
            let unit = |v: &[f64], scale: f64| -> Vec<f64> {
                let n = (v.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
                v.iter().map(|x| x / n * scale).collect()
            };
            let q = unit(&row[kh * 128..][..128], 1.0 / 128f64.sqrt());
            let k = unit(&row[(l.nk + kh) * 128..][..128], 1.0);
            let v = &row[(2 * l.nk + h) * 128..][..128];
            let x = f64::from(bf16(l.a[t * l.nv + h])) + f64::from(l.dt[h]);
            let g = -f64::from(l.a_log[h]).exp() * x.exp().ln_1p();
            let (alpha, beta) = (g.exp(), sigmoid(f64::from(bf16(l.b[t * l.nv + h]))));
            let mut d = vec![0f64; 128];
            for i in 0..128 {
                for j in 0..128 {
                    s[i * 128 + j] *= alpha;
                    d[j] += s[i * 128 + j] * k[i];
                }
            }
            for j in 0..128 {
                d[j] = beta * (v[j] - d[j]);
            }
            for i in 0..128 {
                for j in 0..128 {
                    s[i * 128 + j] = f64::from((s[i * 128 + j] + k[i] * d[j]) as f32);
                    o[t * 128 + j] += s[i * 128 + j] * q[i];
                }
            }
            if t + 1 == keep {
                kept = s.iter().map(|v| *v as f32).collect();
            }
        }
        (o, kept)
    });
    let mut o = vec![0f64; l.cols * l.nv * 128];
    let mut state = vec![];
    for (h, (ho, hs)) in heads.into_iter().enumerate() {
        for t in 0..l.cols {
            o[t * l.nv * 128 + h * 128..][..128].copy_from_slice(&ho[t * 128..][..128]);
        }
        state.extend(hs);
    }
    (o, state)
}

fn l2(got: impl Iterator<Item = f64>, want: impl Iterator<Item = f64>) -> f64 {
    let (mut d, mut t) = (0f64, 1e-300f64);
    for (g, w) in got.zip(want) {
        d += if g.is_finite() { (g - w) * (g - w) } else { f64::INFINITY };
        t += w * w;
    }
    (d / t).sqrt()
}

pub(super) fn run(run: &mut Run) -> Result<()> {
    for (nk, nv) in [(16usize, 48usize), (16, 32), (2, 4), (1, 1)] {
        let c = 2 * nk * 128 + nv * 128;
        let step = GdnStep::new(&run.dev, nk, nv)?;
        // Two lanes: 7 and 2 columns; slots swapped; the first state is kept after 5 columns, the second after all.
        let (c0, c1) = (7usize, 2usize);
        let cols = c0 + c1;
        let y = run.rng.bf16(cols * c, 1.0);
        let conv = run.rng.bf16(2 * 3 * c, 1.0);
        let w = run.rng.bf16(c * 4, 0.5);
        let (a, b) = (run.rng.bf16(cols * nv, 2.0), run.rng.bf16(cols * nv, 2.0));
        let a_log: Vec<f32> = (0..nv).map(|_| (run.rng.unit() * 15.0 + 1.0).ln() as f32).collect();
        let dt = run.rng.f32(nv, 2.0);
        let state = run.rng.f32(2 * nv * 16384, 0.1);
        let up = |v: &[u16]| run.dev.upload(v);
        let (dy, dc, dw, da, db) = (up(&y)?, up(&conv)?, up(&w)?, up(&a)?, up(&b)?);
        let (dl, dd, ds) = (run.dev.upload(&a_log)?, run.dev.upload(&dt)?, run.dev.upload(&state)?);
        let first = run.dev.upload(&[0i32, c0 as i32, cols as i32])?;
        let keep = run.dev.upload(&[5i32, c1 as i32])?;
        let slots = run.dev.upload(&[1i32, 0])?;
        let o = run.dev.alloc(cols * nv * 128 * 2)?;
        let args = GdnArgs {
            y: dy.ptr(),
            y_pitch: c,
            conv_state: dc.ptr(),
            conv_w: dw.ptr(),
            a: da.ptr(),
            b: db.ptr(),
            ab_pitch: nv,
            a_log: dl.ptr(),
            dt_bias: dd.ptr(),
            state: ds.ptr(),
            first: first.ptr(),
            write_after: keep.ptr(),
            slots: slots.ptr(),
            o: o.ptr(),
            lanes: 2,
            ..GdnArgs::default()
        };
        step.launch(&run.stream, &args, false)?;
        run.stream.synchronize()?;
        let go: Vec<u16> = o.read(0, cols * nv * 128)?;
        let gs: Vec<f32> = ds.read(0, 2 * nv * 16384)?;
        for (lane, from, n, slot, kept) in [(0usize, 0usize, c0, 1usize, 5usize), (1, c0, c1, 0, c1)] {
            let l = Lane {
                nk,
                nv,
                y: &y[from * c..],
                conv: &conv[slot * 3 * c..],
                w: &w,
                a: &a[from * nv..],
                b: &b[from * nv..],
                a_log: &a_log,
                dt: &dt,
                state: &state[slot * nv * 16384..],
                cols: n,
            };
            let (ro, rs) = reference(&l, kept);
            let e = l2(go[from * nv * 128..].iter().map(|w| f64::from(bf16(*w))), ro.iter().copied());
            run.check(
                "gdn_step o",
                format!("{nk}/{nv} heads, lane {lane} of {n} columns, relative L2 4e-3"),
                e / 4e-3,
                false,
            );
            let e =
                l2(gs[slot * nv * 16384..].iter().map(|v| f64::from(*v)), rs.iter().map(|v| f64::from(*v)));
            run.check(
                "gdn_step state",
                format!("{nk}/{nv} heads, lane {lane} after {kept}, relative L2 3e-4"),
                e / 3e-4,
                false,
            );
        }
        // One column at a time, state written each time, must give the bits of the call of five.
        let ds2 = run.dev.upload(&state)?;
        let o2 = run.dev.alloc(nv * 128 * 2)?;
        let one = run.dev.upload(&[0i32, 1])?;
        let keep1 = run.dev.upload(&[1i32])?;
        let slot1 = run.dev.upload(&[1i32])?;
        let mut hist = conv[3 * c..6 * c].to_vec();
        let mut unequal = 0usize;
        for t in 0..5 {
            let mut both = conv[..3 * c].to_vec();
            both.extend(&hist);
            let dh = run.dev.upload(&both)?;
            let a1 = GdnArgs {
                y: dy.at(t * c * 2),
                conv_state: dh.ptr(),
                a: da.at(t * nv * 2),
                b: db.at(t * nv * 2),
                state: ds2.ptr(),
                first: one.ptr(),
                write_after: keep1.ptr(),
                slots: slot1.ptr(),
                o: o2.ptr(),
                lanes: 1,
                ..args
            };
            step.launch(&run.stream, &a1, false)?;
            run.stream.synchronize()?;
            let g: Vec<u16> = o2.read(0, nv * 128)?;
            unequal += (0..nv * 128).filter(|i| g[*i] != go[t * nv * 128 + i]).count();
            hist = [&hist[c..], &y[t * c..(t + 1) * c]].concat();
        }
        let g2: Vec<f32> = ds2.read(nv * 16384 * 4, nv * 16384)?;
        unequal += (0..nv * 16384).filter(|i| g2[*i].to_bits() != gs[nv * 16384 + i].to_bits()).count();
        run.check(
            "gdn_step",
            format!("{nk}/{nv} heads: columns one by one equal a call of seven"),
            unequal as f64,
            true,
        );
        if run.bench && nv >= 32 {
            let bytes = nv * 16384 * 8;
            let copies = run.copies(bytes);
            let states: Vec<_> =
                (0..copies).map(|_| run.dev.upload(&state[..nv * 16384])).collect::<Result<_>>()?;
            for n in [1usize, 4] {
                let f = run.dev.upload(&[0i32, n as i32])?;
                let kp = run.dev.upload(&[n as i32])?;
                let us = run.time(copies, |i| {
                    let a = GdnArgs {
                        state: states[i].ptr(),
                        first: f.ptr(),
                        write_after: kp.ptr(),
                        slots: 0,
                        lanes: 1,
                        ..args
                    };
                    step.launch(&run.stream, &a, true)
                })?;
                run.timed("gdn_step", format!("{nk}/{nv} heads, {n} columns"), us, bytes);
            }
        }
    }
    Ok(())
}

/// Chunked form: bounds of the step against the token-by-token rule, equality over spans and block widths, rates.
pub(super) fn chunk(run: &mut Run) -> Result<()> {
    for (nk, nv, rows, kind) in [
        (16usize, 48usize, 320usize, 0usize),
        (16, 32, 65, 1),
        (2, 4, 1000, 2),
        (1, 3, 1, 0),
        (1, 1, 63, 1),
        (2, 2, 128, 2),
    ] {
        let c = 2 * nk * 128 + nv * 128;
        let pitch = c + 8;
        let mut y = run.rng.bf16(rows * pitch, 1.0);
        // silu leaves more small values than large ones.
        y.iter_mut()
            .for_each(|w| *w = crate::oracle::num::f32_to_bf16(silu(f64::from(bf16(*w)) * 2.0) as f32));
        let (mut a, mut b) = (run.rng.bf16(rows * nv, 2.0), run.rng.bf16(rows * nv, 2.0));
        if kind == 1 {
            // Keys close to one another, full writes, slow decay: the inverse is far from the identity.
            let base = run.rng.bf16(pitch, 1.0);
            for t in 0..rows {
                for i in nk * 128..2 * nk * 128 {
                    let v = bf16(base[i]) + 0.3 * bf16(y[t * pitch + i]);
                    y[t * pitch + i] = crate::oracle::num::f32_to_bf16(v);
                }
            }
            b.iter_mut().for_each(|w| *w = 0x4080);
            a.iter_mut().for_each(|w| *w = 0xC0A0);
        } else if kind == 2 {
            // Some tokens forget almost everything.
            a.iter_mut().step_by(7).for_each(|w| *w = 0x4180);
        }
        let a_log: Vec<f32> = (0..nv).map(|_| (run.rng.unit() * 15.0 + 1.0).ln() as f32).collect();
        let dt = run.rng.f32(nv, 2.0);
        let state = run.rng.f32(nv * 16384, 0.1);
        let u: Vec<f64> = (0..rows * c).map(|i| f64::from(bf16(y[i / c * pitch + i % c]))).collect();
        let l = Lane {
            nk,
            nv,
            y: &[],
            conv: &[],
            w: &[],
            a: &a,
            b: &b,
            a_log: &a_log,
            dt: &dt,
            state: &state,
            cols: rows,
        };
        let (ro, rs) = recur(&l, &u, rows);
        let (dy, da, db) = (run.dev.upload(&y)?, run.dev.upload(&a)?, run.dev.upload(&b)?);
        let (dl, dd) = (run.dev.upload(&a_log)?, run.dev.upload(&dt)?);
        let mut first: Option<(Vec<u16>, Vec<f32>)> = None;
        for (values, span) in [(32usize, rows), (32, 128), (64, rows)] {
            // Where shared memory does not hold the wide block, the narrow one is the only one.
            let Ok(k) = GdnChunk::with_values(&run.dev, nk, nv, values) else { continue };
            let ds = run.dev.upload(&state)?;
            let op = nv * 128 + 4;
            let o = run.dev.alloc(rows * op * 2)?;
            let bytes = k.scratch(span);
            let scratch = run.dev.alloc(bytes)?;
            let args = ChunkArgs {
                y: dy.ptr(),
                y_pitch: pitch,
                a: da.ptr(),
                b: db.ptr(),
                ab_pitch: nv,
                a_log: dl.ptr(),
                dt_bias: dd.ptr(),
                state: ds.ptr(),
                o: o.ptr(),
                o_pitch: op,
                rows,
                scratch: scratch.ptr(),
                scratch_bytes: bytes,
            };
            k.launch(&run.stream, &args, false)?;
            run.stream.synchronize()?;
            let raw: Vec<u16> = o.read(0, rows * op)?;
            let go: Vec<u16> =
                (0..rows * nv * 128).map(|i| raw[i / (nv * 128) * op + i % (nv * 128)]).collect();
            let gs: Vec<f32> = ds.read(0, nv * 16384)?;
            let case = format!("{nk}/{nv} heads, {rows} rows, inputs {kind}");
            if let Some((fo, fs)) = &first {
                let bad = go.iter().zip(fo).filter(|(a, b)| a != b).count()
                    + gs.iter().zip(fs).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
                run.check(
                    "gdn_chunk",
                    format!("{case}: blocks of {values}, spans of {span}: same bits"),
                    bad as f64,
                    true,
                );
            } else {
                let e = l2(go.iter().map(|w| f64::from(bf16(*w))), ro.iter().copied());
                run.check("gdn_chunk o", format!("{case}, relative L2 4e-3"), e / 4e-3, false);
                let e = l2(gs.iter().map(|v| f64::from(*v)), rs.iter().map(|v| f64::from(*v)));
                run.check("gdn_chunk state", format!("{case}, relative L2 3e-4"), e / 3e-4, false);
                first = Some((go, gs));
            }
        }
    }
    if run.bench {
        let (nk, nv, rows) = (16usize, 48usize, 8192usize);
        let c = 2 * nk * 128 + nv * 128;
        let y = run.dev.upload(&run.rng.bf16(rows * c, 0.5))?;
        let (a, b) =
            (run.dev.upload(&run.rng.bf16(rows * nv, 1.0))?, run.dev.upload(&run.rng.bf16(rows * nv, 1.0))?);
        let (al, dt) = (run.dev.upload(&vec![0.5f32; nv])?, run.dev.upload(&vec![0.1f32; nv])?);
        let state = run.dev.upload(&vec![0f32; nv * 16384])?;
        let o = run.dev.alloc(rows * nv * 128 * 2)?;
        for (values, span) in [(32usize, 8192usize), (64, 8192), (32, 2048)] {
            let k = GdnChunk::with_values(&run.dev, nk, nv, values)?;
            let bytes = k.scratch(span);
            let scratch = run.dev.alloc(bytes)?;
            let args = ChunkArgs {
                y: y.ptr(),
                y_pitch: c,
                a: a.ptr(),
                b: b.ptr(),
                ab_pitch: nv,
                a_log: al.ptr(),
                dt_bias: dt.ptr(),
                state: state.ptr(),
                o: o.ptr(),
                o_pitch: nv * 128,
                rows,
                scratch: scratch.ptr(),
                scratch_bytes: bytes,
            };
            let us = run.time(1, |_| k.launch(&run.stream, &args, true))?;
            run.timed(
                "gdn_chunk",
                format!("{nk}/{nv} heads, {rows} rows, blocks of {values}, spans of {span}"),
                us,
                rows * c * 2,
            );
        }
    }
    Ok(())
}
