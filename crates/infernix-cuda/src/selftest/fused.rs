//! Launches that stand for several others: their words are those of the kernels they stand for, which other families hold to the
//! oracle.

use super::{Run, unequal};
use crate::error::Result;
use crate::kernels::attention::{Attention, Paging, Queries, Selection};
use crate::kernels::experts::{ExpertTable, Jobs, Routed, Router, act_bytes};
use crate::kernels::group::{Experts, GemvGroup, GroupShape, Input, Part};
use crate::kernels::index::{IndexAppend, IndexRing, RING, Rotary};
use crate::kernels::linear::{Gemv, Linear, Out, WeightFormat};
use crate::kernels::prep::{AttentionPrep, Heads, IndexKeys};
use crate::kernels::rows::{Lanes, RowOps};
use crate::kernels::select::{IndexPages, IndexSelect};
use crate::kernels::skinny::Skinny;
use crate::oracle::num::bf16;
use crate::oracle::words::Words;

pub(super) fn run(run: &mut Run) -> Result<()> {
    group(run)?;
    route(run)?;
    prep(run)?;
    rows(run)?;
    skinny(run)?;
    score4(run)
}

fn launch_group(run: &Run, parts: &[Part<'_>], cols: usize, x: Input, e: Option<Experts>) -> Result<bool> {
    let Some(shape) = GroupShape::of(parts, cols) else { return Ok(false) };
    let f = parts.iter().map(|p| p.w.format).find(|f| *f != WeightFormat::Bf16);
    let Some(g) = GemvGroup::new(&run.dev, f.unwrap_or(WeightFormat::Q8G32), shape)? else {
        return Ok(false);
    };
    g.launch(&run.stream, parts, x, e, false)?;
    Ok(true)
}

/// `y` of one matrix by a launch of its own.
fn alone(run: &Run, w: &Linear, x: u64, pitch: usize, cols: usize, y: u64) -> Result<()> {
    let g = Gemv::new(&run.dev, w.format, w.n, w.k_pad, cols, Gemv::RING)?;
    g.launch(&run.stream, w, x, pitch, y, w.n, Out::Bf16, false)
}

fn group(run: &mut Run) -> Result<()> {
    use WeightFormat::{Bf16, Fp8Row, Nvfp4, Q4G64, Q8G32};
    let dev = run.dev.clone();
    for f in [Q8G32, Q4G64, Nvfp4, Fp8Row, Bf16] {
        for (k, large) in [(2560usize, 1300usize), (1280, 6400), (640, 37)] {
            let sizes = [(f, large), (Bf16, 48), (f, 160), (Bf16, 1)];
            let ws: Vec<Linear> = sizes
                .iter()
                .map(|(f, n)| {
                    let align = if *f == Bf16 { 1 } else { 128 };
                    Words::random(&mut run.rng, *f, *n, k, align).upload(&dev)
                })
                .collect::<Result<_>>()?;
            for cols in [1usize, 3, 8, 13] {
                let x = dev.upload(&run.rng.bf16(cols * k, 1.0))?;
                let (mut bad, mut ran) = (0.0, true);
                let ys: Vec<_> = ws.iter().map(|w| dev.alloc(cols * w.n * 2)).collect::<Result<_>>()?;
                let parts: Vec<Part<'_>> = ws
                    .iter()
                    .zip(&ys)
                    .map(|(w, y)| Part { w, y: y.ptr(), y_pitch: w.n, out: Out::Bf16 })
                    .collect();
                ran &= launch_group(run, &parts, cols, Input::Plain { x: x.ptr(), pitch: k }, None)?;
                for (w, y) in ws.iter().zip(&ys) {
                    let one = dev.alloc(cols * w.n * 2)?;
                    alone(run, w, x.ptr(), k, cols, one.ptr())?;
                    run.stream.synchronize()?;
                    let n = cols * w.n;
                    bad += unequal(&y.read::<u16>(0, n)?, &one.read::<u16>(0, n)?);
                }
                let bad = if ran { bad } else { f64::INFINITY };
                run.check("group", format!("{} {k}, {cols} columns", f.tag()), bad, true);
            }
        }
    }
    // Inputs made and outputs added on the way.
    let ops = RowOps::new(&dev)?;
    let (top, n) = (10usize, 2560usize);
    for (f, cols) in [(Q8G32, 1usize), (Q8G32, 5), (Q8G32, 8), (Nvfp4, 1), (Nvfp4, 3), (Nvfp4, 7)] {
        let (k, head) = (6144usize, 128usize);
        let w = Words::random(&mut run.rng, f, n, k, 128).upload(&dev)?;
        let (o, z) = (dev.upload(&run.rng.bf16(cols * k, 1.0))?, dev.upload(&run.rng.bf16(cols * k, 2.0))?);
        let norm = dev.upload(&run.rng.bf16(head, 1.0))?;
        let (h, a, b) = (dev.alloc(cols * k * 2)?, dev.alloc(cols * n * 2)?, dev.alloc(cols * n * 2)?);
        let (s, heads) = (&run.stream, k / head);
        let (op, zp, np, hp) = (o.ptr(), z.ptr(), norm.ptr(), h.ptr());
        ops.gated_norm(s, op, zp, np, hp, head, heads, cols, k, k, k, 1e-6, true, false)?;
        alone(run, &w, hp, k, cols, a.ptr())?;
        let x = Input::Gated { o: op, z: zp, w: np, pitch: k, z_pitch: k, head, eps: 1e-6, sigmoid: true };
        let part = [Part { w: &w, y: b.ptr(), y_pitch: n, out: Out::Bf16 }];
        let ran = launch_group(run, &part, cols, x, None)?;
        run.stream.synchronize()?;
        let bad = unequal(&b.read::<u16>(0, cols * n)?, &a.read::<u16>(0, cols * n)?);
        let bad = if ran { bad } else { f64::INFINITY };
        run.check("group", format!("{}: gated norm before, {cols} columns", f.tag()), bad, true);

        let k = 640;
        let w = Words::random(&mut run.rng, f, n, k, 128).upload(&dev)?;
        let (g, u) = (dev.upload(&run.rng.bf16(cols * k, 2.0))?, dev.upload(&run.rng.bf16(cols * k, 1.0))?);
        let ye = dev.upload(&run.rng.bf16(cols * top * n, 1.0))?;
        let weights = dev.upload(&run.rng.f32(cols * top, 0.3))?;
        let logit = dev.upload(&run.rng.f32(cols, 1.0))?;
        let slots: Vec<i32> = (0..(cols * top) as i32).collect();
        let slot = dev.upload(&slots)?;
        let (h, last) = (dev.alloc(cols * k * 2)?, dev.alloc(cols * n * 2)?);
        ops.swiglu(&run.stream, g.ptr(), u.ptr(), h.ptr(), k, cols, k, k, k, false)?;
        alone(run, &w, h.ptr(), k, cols, last.ptr())?;
        let (s, yp, wp) = (&run.stream, ye.ptr(), weights.ptr());
        ops.combine(s, yp, slot.ptr(), wp, last.ptr(), logit.ptr(), 1, 0, 0, a.ptr(), n, top, cols, false)?;
        let sum = Experts { outputs: yp, weights: wp, logit: logit.ptr(), logit_pitch: 1, top };
        let x = Input::SwiGlu { gate: g.ptr(), up: u.ptr(), pitch: k };
        let part = [Part { w: &w, y: b.ptr(), y_pitch: n, out: Out::Bf16 }];
        let ran = launch_group(run, &part, cols, x, Some(sum))?;
        run.stream.synchronize()?;
        let bad = unequal(&b.read::<u16>(0, cols * n)?, &a.read::<u16>(0, cols * n)?);
        let bad = if ran { bad } else { f64::INFINITY };
        run.check("group", format!("{}: SwiGLU before, experts after, {cols} columns", f.tag()), bad, true);
    }
    Ok(())
}

fn route(run: &mut Run) -> Result<()> {
    let dev = run.dev.clone();
    for (e, top, rows) in [(512usize, 10usize, 1usize), (512, 10, 16), (256, 8, 5), (1024, 32, 3)] {
        let (r, h, width, picks) = (Router::new(&dev, e, top)?, 2560usize, 4usize, rows * top);
        let logits = dev.upload(&run.rng.f32(rows * e, 2.0))?;
        let x = dev.upload(&run.rng.bf16(rows * h, 1.0))?;
        let input = dev.upload(&vec![4f32 / (6.0 * 448.0); 3 * e])?;
        let t = ExpertTable { input: input.ptr(), ..ExpertTable::default() };
        let mut all = Vec::new();
        for fused in [false, true] {
            let (ids, w) = (dev.alloc(4 * picks)?, dev.alloc(4 * picks)?);
            let (jb, lb, cb) = (dev.alloc(16 * picks)?, dev.alloc(4 * picks)?, dev.alloc(8)?);
            let act = dev.alloc(picks * act_bytes(h))?;
            let j = Jobs { jobs: jb.ptr(), list: lb.ptr(), count: cb.ptr() };
            let s = &run.stream;
            if fused {
                let o =
                    Routed { logits: logits.ptr(), pitch: e, forced: 0, ids: ids.ptr(), weights: w.ptr() };
                r.route(s, o, rows, width, j, &t, x.ptr(), h, act.ptr(), None, false)?;
            } else {
                r.select(s, logits.ptr(), e, rows, ids.ptr(), w.ptr(), false)?;
                r.prepare(s, ids.ptr(), rows, width, j, &t, x.ptr(), h, act.ptr(), true)?;
            }
            run.stream.synchronize()?;
            let count: Vec<i32> = cb.read(0, 2)?;
            let mut words: Vec<i32> = ids.read(0, picks)?;
            words.extend(w.read::<i32>(0, picks)?);
            words.extend(jb.read::<i32>(0, 4 * count[0] as usize)?);
            words.extend(lb.read::<i32>(0, picks)?);
            words.extend(count);
            words.extend(act.read::<u8>(0, picks * act_bytes(h))?.into_iter().map(i32::from));
            all.push(words);
        }
        run.check("route_experts", format!("top {top} of {e}, {rows} rows"), unequal(&all[1], &all[0]), true);
    }
    Ok(())
}

fn prep(run: &mut Run) -> Result<()> {
    let dev = run.dev.clone();
    let ops = RowOps::new(&dev)?;
    for (heads, kv, d, half) in [(24usize, 2usize, 256usize, 32usize), (8, 2, 128, 16), (4, 1, 256, 20)] {
        let (rows, start, ratio, ih) = (5usize, 62usize, 4usize, 4usize);
        let att = Attention::new(&dev, kv, kv, d)?;
        let append = IndexAppend::new(&dev, ratio)?;
        let mut up = |n: usize| dev.upload(&run.rng.bf16(n, 1.0));
        let (q, k, v) = (up(rows * heads * d)?, up(rows * kv * d)?, up(rows * kv * d)?);
        let (iq, raw) = (up(rows * ih * 128)?, up(rows * 128)?);
        let (qw, kw, iw, rw) = (up(d)?, up(d)?, up(128)?, up(128)?);
        let freq: Vec<f64> = (0..half).map(|i| 1e7f64.powf(-(i as f64) / half as f64)).collect();
        let (freq, axis) = (dev.upload(&freq)?, dev.upload(&vec![0u8; half])?);
        let pos: Vec<i32> = (start..start + rows).map(|t| t as i32).collect();
        let three: Vec<i32> = pos.iter().flat_map(|p| [*p; 3]).collect();
        let (pos, three) = (dev.upload(&pos)?, dev.upload(&three)?);
        let (lane, first) = (dev.upload(&vec![0i32; rows])?, dev.upload(&[0i32, rows as i32])?);
        let (slots, table) = (dev.upload(&[0i32])?, dev.upload(&[1i32, 0])?);
        let lanes = Lanes {
            row_lane: lane.ptr(),
            row_pos: pos.ptr(),
            positions: three.ptr(),
            first: first.ptr(),
            slots: slots.ptr(),
            rows,
            lanes: 1,
            ..Lanes::default()
        };
        let rope = Rotary { freq: freq.ptr(), axis: axis.ptr(), scale: 1.0, half };
        let angles = dev.alloc(rows * 2 * half * 4)?;
        let s = &run.stream;
        ops.rope_table(s, three.ptr(), freq.ptr(), axis.ptr(), 1.0, half, rows, angles.ptr(), false)?;
        let mut all = Vec::new();
        for fused in [false, true] {
            let (page, per) = (kv * 64 * d, 64 / ratio);
            let (kc, vc) = (dev.upload(&vec![0u16; 2 * page])?, dev.upload(&vec![0u16; 2 * page])?);
            let pooled = dev.upload(&vec![0u16; 2 * per * 128])?;
            let ring_keys = dev.upload(&vec![0x3c00u16; RING * 128])?;
            let places = dev.upload(&vec![9i32; RING * 3])?;
            let (qo, ko, io) = (
                dev.alloc(rows * heads * d * 2)?,
                dev.alloc(rows * kv * d * 2)?,
                dev.alloc(rows * ih * 256)?,
            );
            let p = Paging {
                keys: kc.ptr(),
                values: vc.ptr(),
                tables: table.ptr(),
                table_pitch: 2,
                page_log: 6,
                page_stride: page,
                token_stride: d,
                head_stride: 64 * d,
            };
            let pages = IndexPages {
                keys: pooled.ptr(),
                tables: table.ptr(),
                table_pitch: 2,
                page_log: per.trailing_zeros() as usize,
                page_stride: per * 128,
            };
            let ring =
                IndexRing { keys: ring_keys.ptr(), stride: 0, positions: places.ptr(), positions_stride: 0 };
            let of = |x: u64, norm: u64, n: usize, width: usize, to: u64| Heads {
                x,
                pitch: n * width,
                norm,
                heads: n,
                to,
            };
            if fused {
                let index = IndexKeys { raw: raw.ptr(), norm: rw.ptr(), ring, rope, pages, ratio };
                AttentionPrep::new(&dev)?.launch(
                    s,
                    of(q.ptr(), qw.ptr(), heads, d, qo.ptr()),
                    of(k.ptr(), kw.ptr(), kv, d, 0),
                    (v.ptr(), kv * d),
                    of(iq.ptr(), iw.ptr(), ih, 128, io.ptr()),
                    Some(&index),
                    angles.ptr(),
                    half,
                    d,
                    1e-6,
                    &p,
                    &lanes,
                    false,
                )?;
            } else {
                let norm = |x: u64, w: u64, to: u64, n: usize, width: usize| {
                    let pitch = n * width;
                    ops.head_norm_rope(
                        s,
                        x,
                        w,
                        angles.ptr(),
                        to,
                        width,
                        half,
                        n,
                        rows,
                        pitch,
                        width,
                        pitch,
                        width,
                        1e-6,
                        false,
                    )
                };
                norm(q.ptr(), qw.ptr(), qo.ptr(), heads, d)?;
                norm(k.ptr(), kw.ptr(), ko.ptr(), kv, d)?;
                norm(iq.ptr(), iw.ptr(), io.ptr(), ih, 128)?;
                let (kp, vp) = (ko.ptr(), v.ptr());
                att.append(s, kp, kv * d, vp, kv * d, &p, lane.ptr(), pos.ptr(), rows, false)?;
                append.launch(s, raw.ptr(), &ring, rw.ptr(), &rope, 1e-6, &lanes, &pages, false)?;
            }
            run.stream.synchronize()?;
            let mut words: Vec<u16> = qo.read(0, rows * heads * d)?;
            words.extend(io.read::<u16>(0, rows * ih * 128)?);
            words.extend(kc.read::<u16>(0, 2 * page)?);
            words.extend(vc.read::<u16>(0, 2 * page)?);
            words.extend(pooled.read::<u16>(0, 2 * per * 128)?);
            words.extend(ring_keys.read::<u16>(0, RING * 128)?);
            all.push(words);
        }
        let case = format!("{heads} and {kv} heads of {d}, {half} pairs");
        run.check("attn_prep", case, unequal(&all[1], &all[0]), true);
    }
    Ok(())
}

fn rows(run: &mut Run) -> Result<()> {
    let dev = run.dev.clone();
    for (heads, kv, d) in [(24usize, 2usize, 256usize), (8, 4, 128), (32, 2, 256)] {
        let att = Attention::new(&dev, heads, kv, d)?;
        let (pages, ratio, keep) = (40usize, 4usize, 64usize);
        let page = kv * 64 * d;
        let (k, v) =
            (dev.upload(&run.rng.bf16(pages * page, 1.0))?, dev.upload(&run.rng.bf16(pages * page, 1.0))?);
        let table: Vec<i32> = (0..pages as i32).rev().collect();
        let table = dev.upload(&table)?;
        let pos = [3i32, 255, 256, 258, 2555, 1000, 1001];
        let n = pos.len();
        let (mut blocks, mut counts) = (vec![0i32; n * keep], vec![0i32; n]);
        for (r, p) in pos.iter().enumerate() {
            let have = (*p as usize + 1) / ratio;
            let step = have.div_ceil(keep).max(1);
            let ids: Vec<i32> = (0..have).step_by(step).take(keep).map(|b| b as i32).collect();
            counts[r] = ids.len() as i32;
            blocks[r * keep..r * keep + ids.len()].copy_from_slice(&ids);
        }
        let q = dev.upload(&run.rng.bf16(n * heads * d, 1.5))?;
        let gate = dev.upload(&run.rng.bf16(n * heads * d, 1.0))?;
        let (lane, dp) = (dev.upload(&vec![0i32; n])?, dev.upload(&pos)?);
        let (db, dc) = (dev.upload(&blocks)?, dev.upload(&counts)?);
        let p = Paging {
            keys: k.ptr(),
            values: v.ptr(),
            tables: table.ptr(),
            table_pitch: pages,
            page_log: 6,
            page_stride: page,
            token_stride: d,
            head_stride: 64 * d,
        };
        let sel = Selection { blocks: db.ptr(), counts: dc.ptr(), pitch: keep, ratio };
        let max_len = keep * ratio + ratio;
        let queries = Queries {
            ptr: q.ptr(),
            pitch: heads * d,
            head: d,
            lane: lane.ptr(),
            pos: dp.ptr(),
            rows: n,
            max_len,
            fresh: usize::MAX,
        };
        let scratch = dev.alloc(att.scratch(n, max_len))?;
        let (a, b) = (dev.alloc(n * heads * d * 2)?, dev.alloc(n * heads * d * 2)?);
        let (s, g, w) = (&run.stream, Some((gate.ptr(), heads * d, d)), heads * d);
        att.launch(s, &queries, &p, Some(&sel), scratch.ptr(), g, a.ptr(), w, false)?;
        let ran = att.launch_rows(s, &queries, &p, &sel, g, b.ptr(), w, false)?;
        run.stream.synchronize()?;
        if !ran {
            continue;
        }
        let (a, b): (Vec<u16>, Vec<u16>) = (a.read(0, n * w)?, b.read(0, n * w)?);
        let mut worst = 0f64;
        for (x, y) in a.chunks(d).zip(b.chunks(d)) {
            let (mut e, mut t) = (0f64, 1e-300);
            for (x, y) in x.iter().zip(y) {
                let (x, y) = (f64::from(bf16(*x)), f64::from(bf16(*y)));
                e += if y.is_finite() { (x - y) * (x - y) } else { f64::INFINITY };
                t += x * x;
            }
            worst = worst.max((e / t).sqrt() / 5e-3);
        }
        let case = format!("{heads} over {kv} heads of {d}: as the decode kernel, relative L2 5e-3");
        run.check("attn_rows", case, worst, false);
    }
    Ok(())
}

fn skinny(run: &mut Run) -> Result<()> {
    let dev = run.dev.clone();
    let op = Skinny::new(&dev)?;
    for (n, k, rows) in [(4usize, 10240usize, 300usize), (1, 2560, 77), (3, 648, 9)] {
        let words = Words::random(&mut run.rng, WeightFormat::Bf16, n, k, 1);
        let w = words.upload(&dev)?;
        let x = run.rng.bf16(rows * k, 1.0);
        let (dx, y) = (dev.upload(&x)?, dev.alloc(rows * n * 4)?);
        op.launch(&run.stream, &w, dx.ptr(), k, rows, y.ptr(), n, Out::F32, false)?;
        run.stream.synchronize()?;
        let got: Vec<f32> = y.read(0, rows * n)?;
        let all: Vec<usize> = (0..n).collect();
        let worst =
            super::linear::linear_share(&words, &all, &x, k, k, rows, true, |c, r| f64::from(got[c * n + r]));
        run.check("skinny", format!("{rows} rows, {n}x{k}"), worst, false);
    }
    Ok(())
}

/// Scores of many rows four at a time, two lanes among them, against one by one.
fn score4(run: &mut Run) -> Result<()> {
    let dev = run.dev.clone();
    let (ratio, want, blocks, rows) = (4usize, 512usize, 1500usize, 70usize);
    let sel = IndexSelect::new(&dev, 4, ratio, want)?;
    let k = dev.upload(&run.rng.bf16(2 * blocks.next_multiple_of(256) * 128, 1.0))?;
    let q = dev.upload(&run.rng.bf16(rows * 512, 1.0))?;
    let table: Vec<i32> = (0..12).collect();
    let table = dev.upload(&table)?;
    let lane: Vec<i32> = (0..rows as i32).map(|r| i32::from(r > 32)).collect();
    let pos: Vec<i32> = (0..rows as i32).map(|r| 5900 + r).collect();
    let (lane, pos) = (dev.upload(&lane)?, dev.upload(&pos)?);
    let pages = IndexPages {
        keys: k.ptr(),
        tables: table.ptr(),
        table_pitch: 6,
        page_log: 8,
        page_stride: 256 * 128,
    };
    let scratch = dev.alloc(sel.scratch(rows, blocks).max(4))?;
    let mut all = Vec::new();
    for step in [1usize, rows] {
        let (scores, ids, counts) =
            (dev.upload(&vec![0f32; rows * blocks])?, dev.alloc(rows * want * 4)?, dev.alloc(rows * 4)?);
        for r in (0..rows).step_by(step) {
            let at = |p: u64, n: usize| p + (r * n) as u64;
            sel.launch(
                &run.stream,
                at(q.ptr(), 1024),
                512,
                &pages,
                at(lane.ptr(), 4),
                at(pos.ptr(), 4),
                step,
                blocks,
                at(scores.ptr(), 4 * blocks),
                blocks,
                scratch.ptr(),
                at(ids.ptr(), 4 * want),
                want,
                at(counts.ptr(), 4),
                false,
            )?;
        }
        run.stream.synchronize()?;
        let mut words: Vec<u32> = scores.read(0, rows * blocks)?;
        words.extend(ids.read::<u32>(0, rows * want)?);
        all.push(words);
    }
    run.check("qsa_score4", format!("{rows} rows of {blocks} blocks"), unequal(&all[1], &all[0]), true);
    Ok(())
}
