//! Paged attention: dense and selected rows against f64, equality over rows, times at 8K and 128K keys.

use super::{Run, unequal};
use crate::error::Result;
use crate::kernels::attention::{Attention, Paging, Queries, Selection};
use crate::kernels::moves::{Moves, RowCopy};
use crate::oracle::num::{bf16, parallel, rbf, sigmoid};

pub(super) fn run(run: &mut Run) -> Result<()> {
    for (heads, kv, d) in
        [(24usize, 2usize, 256usize), (24, 4, 256), (16, 2, 256), (32, 2, 256), (32, 8, 128)]
    {
        let att = Attention::new(&run.dev, heads, kv, d)?;
        let (page_log, pages, lanes) = (6usize, 80usize, 2usize);
        let page = 1 << page_log;
        let (head_stride, token_stride, page_stride) = (page * d, d, page * kv * d);
        let n = pages * page_stride;
        let (k, v) = (run.rng.bf16(n, 1.0), run.rng.bf16(n, 1.0));
        let (dk, dv) = (run.dev.upload(&k)?, run.dev.upload(&v)?);
        // Shuffled pages of two lanes.
        let mut order: Vec<i32> = (0..pages as i32).collect();
        for i in (1..pages).rev() {
            order.swap(i, run.rng.below(i + 1));
        }
        let pitch = pages / lanes;
        let tables = run.dev.upload(&order)?;
        let p = Paging {
            keys: dk.ptr(),
            values: dv.ptr(),
            tables: tables.ptr(),
            table_pitch: pitch,
            page_log,
            page_stride,
            token_stride,
            head_stride,
        };
        let longest = pitch * page - 1;
        let pos: Vec<i32> = vec![longest as i32, 0, 5, 31, 32, 127, 128, 1000, longest as i32 - 1, 129];
        let lane: Vec<i32> = (0..pos.len() as i32).map(|i| i % 2).collect();
        let rows = pos.len();
        // Query heads with their gates between them, as the projection leaves them.
        let q_pitch = heads * 2 * d;
        let q = run.rng.bf16(rows * q_pitch, 1.5);
        let (dq, dl, dp) = (run.dev.upload(&q)?, run.dev.upload(&lane)?, run.dev.upload(&pos)?);
        let ratio = 4usize;
        let mut counts = vec![];
        let mut blocks = vec![0i32; rows * 64];
        for (r, p) in pos.iter().enumerate() {
            let have = (*p as usize + 1) / ratio;
            if r % 3 == 2 {
                counts.push(-1);
                continue;
            }
            let n = have.min(50);
            let mut ids: Vec<usize> = (0..have).collect();
            for i in (1..ids.len()).rev() {
                ids.swap(i, run.rng.below(i + 1));
            }
            ids.truncate(n);
            ids.sort_unstable();
            for (i, b) in ids.iter().enumerate() {
                blocks[r * 64 + i] = *b as i32;
            }
            counts.push(n as i32);
        }
        let (db, dc) = (run.dev.upload(&blocks)?, run.dev.upload(&counts)?);
        let max_len = longest + 1;
        let scratch = run.dev.alloc(att.scratch(rows, max_len))?;
        for selected in [false, true] {
            let out = run.dev.alloc(rows * heads * d * 2)?;
            let sel = Selection { blocks: db.ptr(), counts: dc.ptr(), pitch: 64, ratio };
            let queries = Queries {
                ptr: dq.ptr(),
                pitch: q_pitch,
                head: 2 * d,
                lane: dl.ptr(),
                pos: dp.ptr(),
                rows,
                max_len,
                fresh: usize::MAX,
            };
            let gate = (dq.at(d * 2), q_pitch, 2 * d);
            att.launch(
                &run.stream,
                &queries,
                &p,
                selected.then_some(&sel),
                scratch.ptr(),
                Some(gate),
                out.ptr(),
                heads * d,
                false,
            )?;
            run.stream.synchronize()?;
            let got: Vec<u16> = out.read(0, rows * heads * d)?;
            // Bound: relative L2 of a head 5e-3 (two BF16 roundings give about 2.4e-3).
            let shares = parallel(rows * heads, |job| {
                let (r, h) = (job / heads, job % heads);
                let keys: Vec<usize> = if selected && counts[r] >= 0 {
                    let n = counts[r] as usize;
                    let tail = (pos[r] as usize + 1) / ratio * ratio;
                    let mut v: Vec<usize> = blocks[r * 64..r * 64 + n]
                        .iter()
                        .flat_map(|b| (0..ratio).map(move |i| *b as usize * ratio + i))
                        .collect();
                    v.extend(tail..=pos[r] as usize);
                    v
                } else {
                    (0..=pos[r] as usize).collect()
                };
                let at = |t: usize| {
                    order[lane[r] as usize * pitch + t / page] as usize * page_stride
                        + (h / (heads / kv)) * head_stride
                        + t % page * d
                };
                let qv: Vec<f64> = (0..d).map(|i| f64::from(bf16(q[r * q_pitch + h * 2 * d + i]))).collect();
                let s: Vec<f64> = keys
                    .iter()
                    .map(|t| {
                        (0..d).map(|i| qv[i] * f64::from(bf16(k[at(*t) + i]))).sum::<f64>()
                            / (d as f64).sqrt()
                    })
                    .collect();
                let m = s.iter().fold(f64::NEG_INFINITY, |a, b| a.max(*b));
                let z: f64 = s.iter().map(|x| (x - m).exp()).sum();
                let (mut e, mut t) = (0f64, 1e-300);
                for i in 0..d {
                    let o: f64 = keys
                        .iter()
                        .zip(&s)
                        .map(|(t, x)| (x - m).exp() / z * f64::from(bf16(v[at(*t) + i])))
                        .sum();
                    let want = f64::from(rbf(o as f32))
                        * sigmoid(f64::from(bf16(q[r * q_pitch + h * 2 * d + d + i])));
                    let g = f64::from(bf16(got[(r * heads + h) * d + i]));
                    e += if g.is_finite() { (g - want) * (g - want) } else { f64::INFINITY };
                    t += want * want;
                }
                (e / t).sqrt() / 5e-3
            });
            let worst = shares.into_iter().fold(0.0, f64::max);
            run.check(
                "attention",
                format!(
                    "{heads}/{kv} heads of {d}, {}, relative L2 5e-3",
                    if selected { "selected" } else { "dense" }
                ),
                worst,
                false,
            );
            if selected {
                // Selections that the launch before writes are not read early.
                let moves = Moves::new(&run.dev)?;
                let (late_b, late_c) =
                    (run.dev.upload(&vec![0i32; rows * 64])?, run.dev.upload(&vec![0i32; rows])?);
                let (s, again) = (&run.stream, run.dev.alloc(rows * heads * d * 2)?);
                for (from, to, bytes) in [(&db, &late_b, rows * 256), (&dc, &late_c, rows * 4)] {
                    let c = RowCopy {
                        from: from.ptr(),
                        from_pitch: bytes,
                        to: to.ptr(),
                        to_pitch: bytes,
                        bytes,
                        rows: 1,
                        copies: 1,
                    };
                    moves.copy(s, &c, true)?;
                }
                let sel = Selection { blocks: late_b.ptr(), counts: late_c.ptr(), ..sel };
                let (scratch, to) = (scratch.ptr(), again.ptr());
                att.launch(s, &queries, &p, Some(&sel), scratch, Some(gate), to, heads * d, true)?;
                s.synchronize()?;
                let bad = unequal(&again.read::<u16>(0, rows * heads * d)?, &got);
                let case = format!("{heads}/{kv} heads of {d}: selections come from the launch before");
                run.check("attention", case, bad, true);
            }
            // A row alone has the bits it has among others.
            let mut differ = 0usize;
            for r in [0usize, 6, 7] {
                let o1 = run.dev.alloc(heads * d * 2)?;
                let queries = Queries {
                    ptr: dq.at(r * q_pitch * 2),
                    lane: dl.at(r * 4),
                    pos: dp.at(r * 4),
                    rows: 1,
                    fresh: 1,
                    ..queries
                };
                let sel = Selection { blocks: db.at(r * 256), counts: dc.at(r * 4), ..sel };
                let gate = (dq.at((r * q_pitch + d) * 2), q_pitch, 2 * d);
                att.launch(
                    &run.stream,
                    &queries,
                    &p,
                    selected.then_some(&sel),
                    scratch.ptr(),
                    Some(gate),
                    o1.ptr(),
                    heads * d,
                    false,
                )?;
                run.stream.synchronize()?;
                let g: Vec<u16> = o1.read(0, heads * d)?;
                differ += (0..heads * d).filter(|i| g[*i] != got[r * heads * d + i]).count();
            }
            run.check(
                "attention",
                format!("{heads}/{kv} heads of {d}, selected {selected}: one row equals ten"),
                differ as f64,
                true,
            );
        }
        // Appending writes exactly the new tokens.
        let rows = 3;
        let (nk, nv) = (run.rng.bf16(rows * kv * d, 1.0), run.rng.bf16(rows * kv * d, 1.0));
        let (dnk, dnv) = (run.dev.upload(&nk)?, run.dev.upload(&nv)?);
        let (al, ap) = ([1i32, 0, 1], [7i32, longest as i32, 8]);
        let (dal, dap) = (run.dev.upload(&al)?, run.dev.upload(&ap)?);
        att.append(&run.stream, dnk.ptr(), kv * d, dnv.ptr(), kv * d, &p, dal.ptr(), dap.ptr(), rows, false)?;
        run.stream.synchronize()?;
        let (mut wk, mut wv) = (k.clone(), v.clone());
        for r in 0..rows {
            for h in 0..kv {
                let t = ap[r] as usize;
                let at = order[al[r] as usize * pitch + t / page] as usize * page_stride
                    + h * head_stride
                    + t % page * d;
                wk[at..at + d].copy_from_slice(&nk[(r * kv + h) * d..][..d]);
                wv[at..at + d].copy_from_slice(&nv[(r * kv + h) * d..][..d]);
            }
        }
        let (gk, gv): (Vec<u16>, Vec<u16>) = (dk.read(0, n)?, dv.read(0, n)?);
        let bad = (0..n).filter(|i| gk[*i] != wk[*i] || gv[*i] != wv[*i]).count();
        run.check("kv_append", format!("{kv} heads of {d}"), bad as f64, true);
        // Keys that are old are read before the launch in front has ended, a row's new one is not: the launch in front writes it.
        let mut bad = 0.0;
        for r in [0usize, 1, 3, 6] {
            let queries = Queries {
                ptr: dq.at(r * q_pitch * 2),
                pitch: q_pitch,
                head: 2 * d,
                lane: dl.at(r * 4),
                pos: dp.at(r * 4),
                rows: 1,
                max_len: longest + 1,
                fresh: 1,
            };
            let scratch = run.dev.alloc(att.scratch(1, longest + 1))?;
            let (first, second) = (run.dev.alloc(heads * d * 2)?, run.dev.alloc(heads * d * 2)?);
            let s = &run.stream;
            let append = |i: usize| {
                let at = i * kv * d * 2;
                let (k, v, lane, pos) = (dnk.at(at), dnv.at(at), dl.at(r * 4), dp.at(r * 4));
                att.append(s, k, kv * d, v, kv * d, &p, lane, pos, 1, false)
            };
            append(0)?;
            let late = Queries { fresh: usize::MAX, ..queries };
            att.launch(s, &late, &p, None, scratch.ptr(), None, first.ptr(), heads * d, false)?;
            append(1)?;
            s.synchronize()?;
            append(0)?;
            att.launch(s, &queries, &p, None, scratch.ptr(), None, second.ptr(), heads * d, true)?;
            s.synchronize()?;
            bad += unequal(&first.read::<u16>(0, heads * d)?, &second.read::<u16>(0, heads * d)?);
        }
        run.check(
            "attention",
            format!("{heads}/{kv} heads of {d}: the last key comes from the launch before"),
            bad,
            true,
        );
    }
    if run.bench {
        let (heads, d) = (24usize, 256usize);
        for (kv, len, rows) in [
            (2usize, 8192usize, 1usize),
            (2, 8192, 4),
            (2, 131_072, 1),
            (4, 8192, 1),
            (4, 32768, 1),
            (4, 131_072, 1),
        ] {
            let att = Attention::new(&run.dev, heads, kv, d)?;
            let page_stride = 64 * kv * d;
            let pages = len / 64;
            let bytes = 2 * len * kv * d * 2;
            let copies = run.copies(bytes).min(16);
            let block = run.rng.bf16(page_stride, 1.0);
            let mut sets = vec![];
            for _ in 0..copies {
                let (k, v) = (run.dev.alloc(bytes / 2)?, run.dev.alloc(bytes / 2)?);
                for i in 0..pages {
                    k.write(i * page_stride * 2, &block)?;
                    v.write(i * page_stride * 2, &block)?;
                }
                sets.push((k, v));
            }
            let table: Vec<i32> = (0..pages as i32).collect();
            let tables = run.dev.upload(&table)?;
            let lane = run.dev.upload(&vec![0i32; rows])?;
            let pos = run.dev.upload(&vec![len as i32 - 1; rows])?;
            let q = run.dev.upload(&run.rng.bf16(rows * heads * d, 1.0))?;
            let scratch = run.dev.alloc(att.scratch(rows, len))?;
            let out = run.dev.alloc(rows * heads * d * 2)?;
            let queries = Queries {
                ptr: q.ptr(),
                pitch: heads * d,
                head: d,
                lane: lane.ptr(),
                pos: pos.ptr(),
                rows,
                max_len: len,
                fresh: usize::MAX,
            };
            let us = run.time(copies, |i| {
                let p = Paging {
                    keys: sets[i].0.ptr(),
                    values: sets[i].1.ptr(),
                    tables: tables.ptr(),
                    table_pitch: pages,
                    page_log: 6,
                    page_stride,
                    token_stride: d,
                    head_stride: 64 * d,
                };
                att.launch(&run.stream, &queries, &p, None, scratch.ptr(), None, out.ptr(), heads * d, true)
            })?;
            run.timed("attention", format!("{heads}/{kv} heads of {d}, {len} keys, {rows} rows"), us, bytes);
        }
    }
    Ok(())
}
