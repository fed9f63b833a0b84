//! Kernels between the large ones: row copies, stored tables, mixer pieces, n-gram gates and convolution, index keys, experts in the
//! canonical order, synthetic routing, and recurrent state written to another slot.

use super::{Run, unequal};
use crate::error::Result;
use crate::kernels::chain::{ChainMatrix, ExpertChain};
use crate::kernels::gdn::{GdnArgs, GdnStep};
use crate::kernels::index::{IndexAppend, IndexRing, RING, Rotary};
use crate::kernels::linear::WeightFormat;
use crate::kernels::mix::MixOps;
use crate::kernels::moves::{Moves, RowCopy};
use crate::kernels::ple::{PleOps, PleState};
use crate::kernels::rows::{Lanes, RowOps};
use crate::kernels::select::IndexPages;
use crate::kernels::zipf::ZipfRoute;
use crate::oracle;
use crate::oracle::num::{bf16, bf16_half_ulp, f32_to_bf16, sigmoid, silu};
use crate::oracle::w4a4;
use crate::oracle::words::Words;

/// Worst |got - want| over (half an ulp + 4e-6 |want| + `slack`) of BF16 outputs.
fn share(got: &[u16], want: &[f64], slack: f64) -> f64 {
    got.iter().zip(want).fold(0f64, |m, (g, w)| {
        let g = f64::from(bf16(*g));
        let bound = bf16_half_ulp(*w) + 4e-6 * w.abs() + slack;
        m.max(if g.is_finite() { (g - w).abs() / bound } else { f64::INFINITY })
    })
}

fn val(w: u16) -> f64 {
    f64::from(bf16(w))
}

pub(super) fn run(run: &mut Run) -> Result<()> {
    moves(run)?;
    columns(run)?;
    injection(run)?;
    mixer(run)?;
    ngram(run)?;
    index(run)?;
    chain(run)?;
    swiglu(run)?;
    zipf(run)?;
    slots(run)
}

fn moves(run: &mut Run) -> Result<()> {
    let (dev, ops) = (run.dev.clone(), Moves::new(&run.dev)?);
    for (n, rows, copies) in [(2560usize, 5usize, 4usize), (33, 3, 1), (4, 7, 2)] {
        let x = run.rng.bf16(rows * n, 1.0);
        let (dx, y) = (dev.upload(&x)?, dev.alloc(rows * copies * n * 2)?);
        let c = RowCopy {
            from: dx.ptr(),
            from_pitch: 2 * n,
            to: y.ptr(),
            to_pitch: 2 * n * copies,
            bytes: 2 * n,
            rows,
            copies,
        };
        ops.copy(&run.stream, &c, false)?;
        run.stream.synchronize()?;
        let want: Vec<u16> =
            x.chunks(n).flat_map(|r| std::iter::repeat_n(r, copies).flatten().copied()).collect();
        run.check(
            "copy_rows",
            format!("{rows} rows of {n}, {copies} times"),
            unequal(&y.read(0, want.len())?, &want),
            true,
        );
    }
    for f in
        WeightFormat::ALL.into_iter().filter(|f| *f != WeightFormat::Fp8Block && *f != WeightFormat::Mxfp8)
    {
        let (n, k) = (40usize, 320usize);
        let words = Words::random(&mut run.rng, f, n, k, 128);
        let table = words.upload(&dev)?;
        let ids: Vec<i32> = (0..9).map(|_| run.rng.below(n) as i32).collect();
        let (di, y) = (dev.upload(&ids)?, dev.alloc(ids.len() * k * 2)?);
        ops.embed(&run.stream, &table, di.ptr(), ids.len(), y.ptr(), false)?;
        run.stream.synchronize()?;
        let want: Vec<f64> =
            ids.iter().flat_map(|i| words.row(*i as usize).into_iter().take(k).collect::<Vec<_>>()).collect();
        run.check("embed_table", format!("{f:?}"), share(&y.read(0, want.len())?, &want, 1e-30), false);
    }
    Ok(())
}

fn columns(run: &mut Run) -> Result<()> {
    let (dev, ops) = (run.dev.clone(), Moves::new(&run.dev)?);
    for (n, rows, pad) in [(6144usize, 5usize, 0usize), (512, 300, 8), (130, 1, 2)] {
        let x = run.rng.bf16(rows * (n + pad), 1.0);
        let mut order: Vec<i32> = (0..n as i32).collect();
        (1..n).for_each(|i| order.swap(i, run.rng.below(i + 1)));
        let (dx, dc, y) = (dev.upload(&x)?, dev.upload(&order)?, dev.alloc(rows * n * 2)?);
        ops.gather(&run.stream, dx.ptr(), n + pad, dc.ptr(), n, rows, y.ptr(), false)?;
        run.stream.synchronize()?;
        let want: Vec<u16> = x.chunks(n + pad).flat_map(|r| order.iter().map(|c| r[*c as usize])).collect();
        run.check(
            "gather_columns",
            format!("{rows} rows of {n}"),
            unequal(&y.read(0, want.len())?, &want),
            true,
        );
    }
    Ok(())
}

/// The injection by itself, as prompts of geometries without the fused mixer run it.
fn injection(run: &mut Run) -> Result<()> {
    let (dev, ops) = (run.dev.clone(), RowOps::new(&run.dev)?);
    for (n, rows) in [(2560usize, 3usize), (256, 17), (33, 1)] {
        let (y, r) = (run.rng.bf16(rows * n, 2.0), run.rng.bf16(rows * 4 * n, 2.0));
        let b = run.rng.f32(rows * 4, 1.0);
        let (dy, db, dr) = (dev.upload(&y)?, dev.upload(&b)?, dev.upload(&r)?);
        ops.inject(&run.stream, dy.ptr(), db.ptr(), dr.ptr(), dr.ptr(), n, rows, false)?;
        run.stream.synchronize()?;
        let want: Vec<u16> = (0..rows * 4 * n)
            .map(|at| {
                let (t, s, i) = (at / (4 * n), at / n % 4, at % n);
                f32_to_bf16(b[4 * t + s].mul_add(bf16(y[t * n + i]), bf16(r[at])))
            })
            .collect();
        run.check("inject", format!("{rows} rows of {n}"), unequal(&dr.read(0, want.len())?, &want), true);
    }
    Ok(())
}

fn mixer(run: &mut Run) -> Result<()> {
    let (dev, ops) = (run.dev.clone(), MixOps::new(&run.dev)?);
    let (h, streams, rows) = (200usize, 4usize, 3usize);
    let n = h * streams * rows;
    let (v, x) = (run.rng.f32(n, 3.0), run.rng.bf16(n, 1.0));
    let (dv, dx) = (dev.upload(&v)?, dev.upload(&x)?);
    let (m, s) = (dev.alloc(h * rows * 2)?, dev.alloc(n * 2)?);
    ops.mix(&run.stream, dv.ptr(), dx.ptr(), m.ptr(), h, streams, rows, false)?;
    ops.silu_over(&run.stream, dv.ptr(), s.ptr(), n, 4.0, true)?;
    ops.twice_sigmoid_over(&run.stream, dv.ptr(), n, 4.0, true)?;
    run.stream.synchronize()?;
    let want: Vec<f64> = (0..rows * h)
        .map(|i| {
            let at = |k: usize| (i / h * streams + k) * h + i % h;
            (0..streams).map(|k| sigmoid(f64::from(v[at(k)])) * val(x[at(k)])).sum::<f64>() / streams as f64
        })
        .collect();
    run.check("mix_streams", format!("{rows} rows"), share(&m.read(0, rows * h)?, &want, 1e-6), false);
    let want: Vec<f64> = v.iter().map(|v| silu(f64::from(*v) / 4.0)).collect();
    run.check("silu_over", "4 streams".into(), share(&s.read(0, n)?, &want, 1e-7), false);
    let got: Vec<f32> = dv.read(0, n)?;
    let worst = got.iter().zip(&v).fold(0f64, |m, (g, v)| {
        let want = 2.0 * sigmoid(f64::from(*v) / 4.0);
        m.max((f64::from(*g) - want).abs() / (want * 1e-6))
    });
    run.check("twice_sigmoid_over", "within 1e-6 relative".into(), worst, false);
    Ok(())
}

fn ngram(run: &mut Run) -> Result<()> {
    let (dev, ops) = (run.dev.clone(), PleOps::new(&run.dev)?);
    let (h, streams, rows) = (160usize, 4usize, 5usize);
    let w = h * streams;
    let (key, query, value) =
        (run.rng.bf16(rows * w, 1.0), run.rng.bf16(rows * w, 1.0), run.rng.bf16(rows * h, 1.0));
    let (dk, dq, dv, out) =
        (dev.upload(&key)?, dev.upload(&query)?, dev.upload(&value)?, dev.alloc(rows * w * 2)?);
    ops.gate(&run.stream, dk.ptr(), dq.ptr(), dv.ptr(), out.ptr(), h, streams, rows, false)?;
    run.stream.synchronize()?;
    let want: Vec<f64> = (0..rows * streams)
        .flat_map(|g| {
            let r = g * h..(g + 1) * h;
            let dot: f64 = key[r.clone()].iter().zip(&query[r]).map(|(a, b)| val(*a) * val(*b)).sum();
            let a = dot / (h as f64).sqrt();
            let s = sigmoid(a.signum() * a.abs().max(1e-6).sqrt());
            value[g / streams * h..][..h].iter().map(move |v| s * val(*v)).collect::<Vec<_>>()
        })
        .collect();
    run.check("ple_gate", format!("{rows} rows"), share(&out.read(0, rows * w)?, &want, 1e-5), false);

    // Two lanes of 4 and 2 columns; the second keeps one.
    let (taps, d, kept, cols) = (4usize, 3usize, 9usize, 6usize);
    let (r0, v, c) = (run.rng.bf16(cols * w, 1.0), run.rng.bf16(cols * w, 1.0), run.rng.bf16(cols * w, 1.0));
    let (wt, state) = (run.rng.bf16(w * taps, 0.5), run.rng.bf16(4 * kept * w, 1.0));
    let up = |v: &[u16]| dev.upload(v);
    let (dr, dv, dc, dw, ds) = (up(&r0)?, up(&v)?, up(&c)?, up(&wt)?, up(&state)?);
    let ints = |v: &[i32]| dev.upload(v);
    let (lane, first, count) = (ints(&[0, 0, 0, 0, 1, 1])?, ints(&[0, 4, 6])?, ints(&[4, 1])?);
    let (slots, outs) = (ints(&[1, 2])?, ints(&[0, 3])?);
    let st = PleState { ptr: ds.ptr(), stride: kept * w, width: w, taps, dilation: d };
    let lanes = Lanes {
        row_lane: lane.ptr(),
        first: first.ptr(),
        count: count.ptr(),
        slots: slots.ptr(),
        out_slots: outs.ptr(),
        rows: cols,
        lanes: 2,
        ..Lanes::default()
    };
    ops.conv(&run.stream, dr.ptr(), dv.ptr(), dc.ptr(), dw.ptr(), &st, &lanes, false)?;
    ops.fold(&run.stream, dc.ptr(), &st, &lanes, (0, 0), true)?;
    run.stream.synchronize()?;
    let mut want = Vec::new();
    let mut folded = state.clone();
    for (slot, out, from, n, keep) in [(1usize, 0usize, 0usize, 4usize, 4usize), (2, 3, 4, 2, 1)] {
        let mut window: Vec<u16> = state[slot * kept * w..(slot + 1) * kept * w].to_vec();
        window.extend_from_slice(&c[from * w..(from + n) * w]);
        for t in 0..n {
            for ch in 0..w {
                let s: f64 =
                    (0..taps).map(|j| val(wt[ch * taps + j]) * val(window[(t + j * d) * w + ch])).sum();
                let at = (from + t) * w + ch;
                want.push(val(r0[at]) + val(v[at]) + silu(s));
            }
        }
        folded[out * kept * w..(out + 1) * kept * w].copy_from_slice(&window[keep * w..(keep + kept) * w]);
    }
    run.check("ple_conv", "two lanes".into(), share(&dr.read(0, cols * w)?, &want, 1e-5), false);
    run.check(
        "ple_fold",
        "two lanes, one of two columns kept".into(),
        unequal(&ds.read(0, folded.len())?, &folded),
        true,
    );
    Ok(())
}

fn index(run: &mut Run) -> Result<()> {
    let dev = run.dev.clone();
    for ratio in [4usize, 16, 64] {
        let op = IndexAppend::new(&dev, ratio)?;
        let (total, half) = (150usize, 32usize);
        let raw = run.rng.bf16(total * 128, 1.0);
        let w = run.rng.bf16(128, 0.2);
        let freq: Vec<f64> = (0..half).map(|i| 1e7f64.powf(-(i as f64) / half as f64)).collect();
        let axis: Vec<u8> = (0..half).map(|i| (i % 3) as u8).collect();
        let position = |t: usize| [t as i32, 2 * t as i32, 7 + t as i32];
        let (dw, df, da) = (dev.upload(&w)?, dev.upload(&freq)?, dev.upload(&axis)?);
        let (keys, places) = (dev.alloc(RING * 128 * 2)?, dev.alloc(RING * 12)?);
        let per = 64 / ratio;
        let pooled = dev.alloc(3 * per * 128 * 2)?;
        let table = dev.upload(&[2i32, 0, 1])?;
        let one = |v: &[i32]| dev.upload(v);
        let mut start = 0;
        // Pieces that end inside blocks, one longer than the ring.
        for n in [1usize, 2, 130, 5, 12] {
            let rows: Vec<i32> = (start..start + n).map(|t| t as i32).collect();
            let triples: Vec<i32> = (start..start + n).flat_map(position).collect();
            let (x, lane) = (dev.upload(&raw[start * 128..(start + n) * 128])?, one(&vec![0; n])?);
            let (pos, three, first, slots) = (one(&rows)?, one(&triples)?, one(&[0, n as i32])?, one(&[0])?);
            let lanes = Lanes {
                row_lane: lane.ptr(),
                row_pos: pos.ptr(),
                positions: three.ptr(),
                first: first.ptr(),
                slots: slots.ptr(),
                rows: n,
                lanes: 1,
                ..Lanes::default()
            };
            let ring =
                IndexRing { keys: keys.ptr(), stride: 0, positions: places.ptr(), positions_stride: 0 };
            let rope = Rotary { freq: df.ptr(), axis: da.ptr(), scale: 1.0, half };
            let pages = IndexPages {
                keys: pooled.ptr(),
                tables: table.ptr(),
                table_pitch: 3,
                page_log: per.trailing_zeros() as usize,
                page_stride: per * 128,
            };
            op.launch(&run.stream, x.ptr(), &ring, dw.ptr(), &rope, 1e-6, &lanes, &pages, false)?;
            run.stream.synchronize()?;
            start += n;
        }
        let got: Vec<u16> = pooled.read(0, 3 * per * 128)?;
        let mut worst = 0f64;
        for b in 0..start / ratio {
            let mean: Vec<f64> = (0..128)
                .map(|i| (0..ratio).map(|j| val(raw[(b * ratio + j) * 128 + i])).sum::<f64>() / ratio as f64)
                .collect();
            let rms = 1.0 / (mean.iter().map(|v| v * v).sum::<f64>() / 128.0 + 1e-6).sqrt();
            let v: Vec<f64> = mean.iter().zip(&w).map(|(m, w)| m * rms * (1.0 + val(*w))).collect();
            let p = position(b * ratio);
            let turn = |i: usize| f64::from(p[usize::from(axis[i])]) * freq[i];
            let want: Vec<f64> = (0..128)
                .map(|i| match i {
                    _ if i < half => v[i] * turn(i).cos() - v[i + half] * turn(i).sin(),
                    _ if i < 2 * half => v[i] * turn(i - half).cos() + v[i - half] * turn(i - half).sin(),
                    _ => v[i],
                })
                .collect();
            let page = [2usize, 0, 1][b / per];
            worst = worst.max(share(&got[(page * per + b % per) * 128..][..128], &want, 2e-6));
        }
        run.check("index_append", format!("{start} tokens in blocks of {ratio}, five calls"), worst, false);
    }
    Ok(())
}

fn chain(run: &mut Run) -> Result<()> {
    let (dev, op) = (run.dev.clone(), ExpertChain::new(&run.dev)?);
    for (n, k, group, divide) in
        [(64usize, 160usize, 16usize, true), (40, 96, 32, false), (33, 640, 128, false)]
    {
        let (experts, picks) = (5usize, 7usize);
        let groups = k.div_ceil(group);
        let codes = run.rng.bf16(experts * n * k, 1.0);
        let scales = run.rng.f32(experts * n * groups, 1.0);
        let last: Vec<f32> = run.rng.f32(experts * n, 1.0).iter().map(|v| v.abs() + 0.5).collect();
        let x = run.rng.bf16(picks * k, 1.0);
        let ids: Vec<i32> = (0..picks).map(|_| run.rng.below(experts) as i32).collect();
        let (dc, ds, dl) = (dev.upload(&codes)?, dev.upload(&scales)?, dev.upload(&last)?);
        let (dx, di, y) = (dev.upload(&x)?, dev.upload(&ids)?, dev.alloc(picks * n * 2)?);
        let m = ChainMatrix { codes: dc.ptr(), scales: ds.ptr(), last: dl.ptr(), rows: n, k, group, divide };
        op.product(&run.stream, &m, 0, n, di.ptr(), picks, dx.ptr(), 1, y.ptr(), false)?;
        run.stream.synchronize()?;
        let values = |v: &[u16]| v.iter().map(|w| bf16(*w)).collect::<Vec<f32>>();
        let (codes, x) = (values(&codes), values(&x));
        let mut want = Vec::new();
        for (p, e) in ids.iter().enumerate() {
            for r in 0..n {
                let row = *e as usize * n + r;
                let (codes, scales) = (&codes[row * k..][..k], &scales[row * groups..][..groups]);
                let v = oracle::chain::sum(codes, scales, &x[p * k..][..k], group);
                want.push(f32_to_bf16(if divide { v / last[row] } else { v * last[row] }));
            }
        }
        let case = format!("{n} x {k}, groups of {group}: equal bits");
        run.check("expert_chain", case, unequal(&y.read(0, want.len())?, &want), true);
    }
    Ok(())
}

/// A call that writes state to another slot and records its inputs; then a part of it folded from the record.
fn slots(run: &mut Run) -> Result<()> {
    let dev = run.dev.clone();
    let (nk, nv, cols, keep) = (2usize, 4usize, 5usize, 3usize);
    let step = GdnStep::new(&dev, nk, nv)?;
    let c = step.channels();
    let (y, conv, w) = (run.rng.bf16(cols * c, 1.0), run.rng.bf16(4 * 3 * c, 1.0), run.rng.bf16(c * 4, 0.5));
    let (a, b) = (run.rng.bf16(cols * nv, 2.0), run.rng.bf16(cols * nv, 2.0));
    let (a_log, dt, state) = (run.rng.f32(nv, 1.0), run.rng.f32(nv, 2.0), run.rng.f32((4 * nv) << 14, 0.1));
    let up = |v: &[u16]| dev.upload(v);
    let (dy, dc, dw, da, db) = (up(&y)?, up(&conv)?, up(&w)?, up(&a)?, up(&b)?);
    let (dl, dd, ds) = (dev.upload(&a_log)?, dev.upload(&dt)?, dev.upload(&state)?);
    let ints = |v: &[i32]| dev.upload(v);
    let (first, all, some) = (ints(&[0, cols as i32])?, ints(&[cols as i32])?, ints(&[keep as i32])?);
    let (fold_first, from, to, other) = (ints(&[0, keep as i32])?, ints(&[2])?, ints(&[3])?, ints(&[0])?);
    let pitch = c + 2 * nv;
    let (o, record) = (dev.alloc(cols * nv * 256)?, dev.alloc(2 * cols * pitch * 2)?);
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
        write_after: all.ptr(),
        slots: from.ptr(),
        o: o.ptr(),
        lanes: 1,
        out_slots: to.ptr(),
        record: record.ptr(),
        record_stride: cols * pitch,
        ..GdnArgs::default()
    };
    step.launch(&run.stream, &args, false)?;
    // The same columns but the last two, as a call that stores after three: what a fold must equal.
    step.launch(
        &run.stream,
        &GdnArgs { write_after: some.ptr(), out_slots: other.ptr(), record: 0, ..args },
        true,
    )?;
    run.stream.synchronize()?;
    let want: Vec<f32> = ds.read(0, nv << 14)?;
    let kept: Vec<u16> = dc.read(0, 3 * c)?;
    let columns: Vec<u16> = dc.read(3 * 3 * c * 2, 3 * c)?;
    run.check(
        "gdn_step",
        "columns kept in another slot".into(),
        unequal(&columns, &y[(cols - 3) * c..]),
        true,
    );
    let rows: Vec<u16> = record.read(cols * pitch * 2, cols * pitch)?;
    let noted = (0..cols).map(|t| unequal(&rows[t * pitch..][..c], &y[t * c..][..c])).sum();
    run.check("gdn_step", "record of a call".into(), noted, true);
    let at = record.ptr() + (cols * pitch * 2) as u64;
    let fold = GdnArgs {
        y: at,
        y_pitch: pitch,
        a: at + 2 * c as u64,
        b: at + 2 * (c + nv) as u64,
        ab_pitch: pitch,
        first: fold_first.ptr(),
        write_after: some.ptr(),
        o: 0,
        record: 0,
        ..args
    };
    step.launch(&run.stream, &fold, false)?;
    run.stream.synchronize()?;
    let got: Vec<f32> = ds.read(3 * (nv << 14) * 4, nv << 14)?;
    let bits = |v: &[f32]| v.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    let wrong = unequal(&bits(&got), &bits(&want)) + unequal(&dc.read::<u16>(3 * 3 * c * 2, 3 * c)?, &kept);
    run.check("gdn_step", "a fold of three of five columns equals a call of three".into(), wrong, true);
    Ok(())
}

fn swiglu(run: &mut Run) -> Result<()> {
    let (dev, op) = (run.dev.clone(), ExpertChain::new(&run.dev)?);
    for n in [640usize, 7 * 17408, 1] {
        let (g, u) = (run.rng.bf16(n, 6.0), run.rng.bf16(n, 2.0));
        let (dg, du, h) = (dev.upload(&g)?, dev.upload(&u)?, dev.alloc(2 * n)?);
        op.swiglu(&run.stream, dg.ptr(), du.ptr(), h.ptr(), n, false)?;
        run.stream.synchronize()?;
        let want: Vec<u16> = g.iter().zip(&u).map(|(g, u)| w4a4::swiglu(bf16(*g), bf16(*u))).collect();
        run.check("swiglu_table", format!("{n} values: equal bits"), unequal(&h.read(0, n)?, &want), true);
    }
    Ok(())
}

/// Picks of the law as the host draws them, and what any routing must be: distinct experts with equal weights, the same for the same
/// position.
fn zipf(run: &mut Run) -> Result<()> {
    let dev = run.dev.clone();
    for (experts, top, s, repeat) in
        [(512usize, 10usize, 1.2f64, 0.3f32), (60, 8, 0.8, 0.0), (4, 4, 2.0, 0.5)]
    {
        let seed = run.rng.next_u64();
        let route = ZipfRoute::new(&dev, experts, s, repeat, &[seed])?;
        let pos: Vec<i32> = (0..37).map(|i| i * i * 7 % 4001).collect();
        let rows = pos.len();
        let (dp, ids, weights) = (dev.upload(&pos)?, dev.alloc(4 * rows * top)?, dev.alloc(4 * rows * top)?);
        route.launch(&run.stream, dp.ptr(), rows, top, 0, 1, ids.ptr(), weights.ptr(), false)?;
        run.stream.synchronize()?;
        let want: Vec<i32> = pos.iter().flat_map(|p| route.picks(*p as u64, top, seed)).collect();
        let case = format!("top {top} of {experts}, exponent {s}, repeat {repeat}");
        run.check("zipf_route", format!("{case}: picks"), unequal(&ids.read(0, rows * top)?, &want), true);
        let equal = vec![1.0 / top as f32; rows * top];
        run.check(
            "zipf_route",
            format!("{case}: weights"),
            unequal(&weights.read(0, rows * top)?, &equal),
            true,
        );
    }
    Ok(())
}
