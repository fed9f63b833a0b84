//! Attention over int8 keys and values against the exact attention over the decoded words, and the bytes of appending.

use super::Run;
use crate::driver::DeviceBuffer;
use crate::error::Result;
use crate::kernels::attention::{Queries, Selection};
use crate::kernels::attention8::{Attention8, Paging8};
use crate::oracle::kv8;
use crate::oracle::num::{bf16, f16, parallel, rbf, sigmoid};

/// Pages on both sides.
struct Cache {
    codes: [Vec<u8>; 2],
    scales: [Vec<u16>; 2],
    bufs: [DeviceBuffer; 4],
    page: usize,
    d: usize,
    page_stride: usize,
    head_stride: usize,
}

impl Cache {
    fn new(run: &mut Run, pages: usize, kv: usize, d: usize) -> Result<Self> {
        let page = 64;
        let n = pages * page * kv * d;
        let mut codes = [vec![0u8; n], vec![0u8; n]];
        let mut scales = [vec![0u16; n / 64], vec![0u16; n / 64]];
        for (c, s) in codes.iter_mut().zip(&mut scales) {
            for row in 0..n / d {
                let x: Vec<f32> = run.rng.f32(d, 1.0);
                let (cs, ss) = kv8::encode(&x);
                cs.iter().zip(&mut c[row * d..]).for_each(|(a, b)| *b = *a as u8);
                s[row * d / 64..][..d / 64].copy_from_slice(&ss);
            }
        }
        let bufs = [
            run.dev.upload(&codes[0])?,
            run.dev.upload(&codes[1])?,
            run.dev.upload(&scales[0])?,
            run.dev.upload(&scales[1])?,
        ];
        Ok(Cache { codes, scales, bufs, page, d, page_stride: page * kv * d, head_stride: page * d })
    }

    fn paging(&self, tables: u64, table_pitch: usize) -> Paging8 {
        Paging8 {
            keys: self.bufs[0].ptr(),
            values: self.bufs[1].ptr(),
            key_scales: self.bufs[2].ptr(),
            value_scales: self.bufs[3].ptr(),
            tables,
            table_pitch,
            page_log: 6,
            page_stride: self.page_stride,
            token_stride: self.d,
            head_stride: self.head_stride,
        }
    }

    /// Decoded row of keys (0) or values (1).
    fn row(&self, which: usize, page: usize, token: usize, head: usize) -> Vec<f64> {
        let at = page * self.page_stride + head * self.head_stride + token % self.page * self.d;
        (0..self.d)
            .map(|i| {
                let s = f64::from(f16(self.scales[which][(at + i) / 64]));
                f64::from(self.codes[which][at + i] as i8) * s
            })
            .collect()
    }
}

/// Relative L2 of one head's output over its bound: `q` and `gate` BF16 words, `keys` = (page, token) of what it sees.
fn head_share(c: &Cache, kvh: usize, q: &[u16], gate: &[u16], keys: &[(usize, usize)], got: &[u16]) -> f64 {
    let d = c.d;
    let mut qr: Vec<f32> = q.iter().map(|w| bf16(*w)).collect();
    kv8::rotate(&mut qr);
    let s: Vec<f64> = keys
        .iter()
        .map(|(p, t)| {
            c.row(0, *p, *t, kvh).iter().zip(&qr).map(|(k, q)| k * f64::from(*q)).sum::<f64>()
                / (d as f64).sqrt()
        })
        .collect();
    let m = s.iter().fold(f64::NEG_INFINITY, |a, b| a.max(*b));
    let z: f64 = s.iter().map(|x| (x - m).exp()).sum();
    let mut o = vec![0f64; d];
    for ((p, t), x) in keys.iter().zip(&s) {
        let w = (x - m).exp() / z;
        c.row(1, *p, *t, kvh).iter().zip(&mut o).for_each(|(v, o)| *o += w * v);
    }
    let (mut e, mut t) = (0f64, 1e-300);
    for i in 0..d {
        let want = f64::from(rbf(o[i] as f32)) * sigmoid(f64::from(bf16(gate[i])));
        let g = f64::from(bf16(got[i]));
        e += if g.is_finite() { (g - want) * (g - want) } else { f64::INFINITY };
        t += want * want;
    }
    (e / t).sqrt() / 5e-3
}

pub(super) fn run(run: &mut Run) -> Result<()> {
    for (heads, kv, d) in [(24usize, 2usize, 256usize), (24, 4, 256), (16, 2, 256), (32, 8, 128)] {
        let att = Attention8::new(&run.dev, heads, kv, d)?;
        let (pages, lanes) = (40usize, 2usize);
        let pitch = pages / lanes;
        let mut cache = Cache::new(run, pages, kv, d)?;
        let mut order: Vec<i32> = (0..pages as i32).collect();
        for i in (1..pages).rev() {
            order.swap(i, run.rng.below(i + 1));
        }
        let tables = run.dev.upload(&order)?;
        let longest = pitch * 64 - 1;
        // Appending: bytes, in the middle and at the end of pages; a zero row; a row of one large value.
        let rows = 4;
        let (mut k, v) = (run.rng.bf16(rows * kv * d, 1.0), run.rng.bf16(rows * kv * d, 3.0));
        k[..d].fill(0);
        k[kv * d..kv * d + d].fill(0);
        k[kv * d + 5] = 0x4380;
        let (al, ap) = ([1i32, 0, 1, 0], [7i32, longest as i32, 8, 64]);
        let (dk, dv) = (run.dev.upload(&k)?, run.dev.upload(&v)?);
        let (dal, dap) = (run.dev.upload(&al)?, run.dev.upload(&ap)?);
        let p = cache.paging(tables.ptr(), pitch);
        att.append(&run.stream, dk.ptr(), kv * d, dv.ptr(), kv * d, &p, dal.ptr(), dap.ptr(), rows, false)?;
        run.stream.synchronize()?;
        for r in 0..rows {
            for h in 0..kv {
                let t = ap[r] as usize;
                let page = order[al[r] as usize * pitch + t / 64] as usize;
                let at = page * cache.page_stride + h * cache.head_stride + t % 64 * d;
                for (which, src) in [&k, &v].into_iter().enumerate() {
                    let mut x: Vec<f32> = src[(r * kv + h) * d..][..d].iter().map(|w| bf16(*w)).collect();
                    if which == 0 {
                        kv8::rotate(&mut x);
                    }
                    let (c, s) = kv8::encode(&x);
                    c.iter().zip(&mut cache.codes[which][at..]).for_each(|(a, b)| *b = *a as u8);
                    cache.scales[which][at / 64..][..d / 64].copy_from_slice(&s);
                }
            }
        }
        let mut bad = 0;
        for which in 0..2 {
            let n = cache.codes[which].len();
            let gc: Vec<u8> = cache.bufs[which].read(0, n)?;
            let gs: Vec<u16> = cache.bufs[2 + which].read(0, n / 64)?;
            bad += gc.iter().zip(&cache.codes[which]).filter(|(a, b)| a != b).count();
            bad += gs.iter().zip(&cache.scales[which]).filter(|(a, b)| a != b).count();
        }
        run.check("kv8_append", format!("{kv} heads of {d}: bytes of the definition"), bad as f64, true);

        let pos: Vec<i32> = vec![longest as i32, 0, 5, 31, 32, 127, 128, 1000, longest as i32 - 1, 129];
        let lane: Vec<i32> = (0..pos.len() as i32).map(|i| i % 2).collect();
        let rows = pos.len();
        let q_pitch = heads * 2 * d;
        let q = run.rng.bf16(rows * q_pitch, 1.5);
        let (dq, dl, dp) = (run.dev.upload(&q)?, run.dev.upload(&lane)?, run.dev.upload(&pos)?);
        let ratio = 4usize;
        let (mut counts, mut blocks) = (vec![], vec![0i32; rows * 64]);
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
            ids.iter().enumerate().for_each(|(i, b)| blocks[r * 64 + i] = *b as i32);
            counts.push(n as i32);
        }
        let (db, dc) = (run.dev.upload(&blocks)?, run.dev.upload(&counts)?);
        let scratch = run.dev.alloc(att.scratch(rows, longest + 1))?;
        for selected in [false, true] {
            let sel = Selection { blocks: db.ptr(), counts: dc.ptr(), pitch: 64, ratio };
            let queries = Queries {
                ptr: dq.ptr(),
                pitch: q_pitch,
                head: 2 * d,
                lane: dl.ptr(),
                pos: dp.ptr(),
                rows,
                max_len: longest + 1,
                fresh: usize::MAX,
            };
            let out = run.dev.alloc(rows * heads * d * 2)?;
            let gate = (dq.at(d * 2), q_pitch, 2 * d);
            let s = selected.then_some(&sel);
            att.launch(&run.stream, &queries, &p, s, scratch.ptr(), Some(gate), out.ptr(), heads * d, false)?;
            run.stream.synchronize()?;
            let got: Vec<u16> = out.read(0, rows * heads * d)?;
            let shares = parallel(rows * heads, |job| {
                let (r, h) = (job / heads, job % heads);
                let seen: Vec<usize> = if selected && counts[r] >= 0 {
                    let tail = (pos[r] as usize + 1) / ratio * ratio;
                    let mut v: Vec<usize> = blocks[r * 64..r * 64 + counts[r] as usize]
                        .iter()
                        .flat_map(|b| (0..ratio).map(move |i| *b as usize * ratio + i))
                        .collect();
                    v.extend(tail..=pos[r] as usize);
                    v
                } else {
                    (0..=pos[r] as usize).collect()
                };
                let keys: Vec<(usize, usize)> = seen
                    .into_iter()
                    .map(|t| (order[lane[r] as usize * pitch + t / 64] as usize, t))
                    .collect();
                let at = r * q_pitch + h * 2 * d;
                head_share(
                    &cache,
                    h / (heads / kv),
                    &q[at..at + d],
                    &q[at + d..at + 2 * d],
                    &keys,
                    &got[job * d..][..d],
                )
            });
            let case = format!("{heads}/{kv} heads of {d}, selected {selected}");
            run.check(
                "attention8",
                format!("{case}, relative L2 5e-3"),
                shares.into_iter().fold(0.0, f64::max),
                false,
            );
            let mut unequal = 0usize;
            for r in [0usize, 6, 7] {
                let o1 = run.dev.alloc(heads * d * 2)?;
                let queries = Queries {
                    ptr: dq.at(r * q_pitch * 2),
                    lane: dl.at(r * 4),
                    pos: dp.at(r * 4),
                    rows: 1,
                    ..queries
                };
                let sel = Selection { blocks: db.at(r * 256), counts: dc.at(r * 4), ..sel };
                let gate = (dq.at((r * q_pitch + d) * 2), q_pitch, 2 * d);
                let s = selected.then_some(&sel);
                att.launch(
                    &run.stream,
                    &queries,
                    &p,
                    s,
                    scratch.ptr(),
                    Some(gate),
                    o1.ptr(),
                    heads * d,
                    false,
                )?;
                run.stream.synchronize()?;
                let g: Vec<u16> = o1.read(0, heads * d)?;
                unequal += (0..heads * d).filter(|i| g[*i] != got[r * heads * d + i]).count();
            }
            run.check("attention8", format!("{case}: one row equals ten"), unequal as f64, true);
        }
        for (rows, pos0) in [(100usize, 0usize), (33, 301), (1, 5)] {
            let q = run.rng.bf16(rows * q_pitch, 1.5);
            let dq = run.dev.upload(&q)?;
            let out = run.dev.alloc(rows * heads * d * 2)?;
            let scratch = run.dev.alloc(att.rotated_bytes(rows))?;
            let gate = (dq.at(d * 2), q_pitch, 2 * d);
            let (qa, table) = ((dq.ptr(), q_pitch, 2 * d), tables.ptr());
            let (s, o) = (scratch.ptr(), out.ptr());
            att.prefill(&run.stream, qa, &p, table, rows, pos0, s, Some(gate), o, heads * d, false)?;
            run.stream.synchronize()?;
            let got: Vec<u16> = out.read(0, rows * heads * d)?;
            let shares = parallel(rows * heads, |job| {
                let (r, h) = (job / heads, job % heads);
                let keys: Vec<(usize, usize)> = (0..=pos0 + r).map(|t| (order[t / 64] as usize, t)).collect();
                let at = r * q_pitch + h * 2 * d;
                head_share(
                    &cache,
                    h / (heads / kv),
                    &q[at..at + d],
                    &q[at + d..at + 2 * d],
                    &keys,
                    &got[job * d..][..d],
                )
            });
            run.check(
                "attn8_prefill",
                format!("{heads}/{kv} heads of {d}, {rows} rows at {pos0}, relative L2 5e-3"),
                shares.into_iter().fold(0.0, f64::max),
                false,
            );
        }
    }
    if run.bench {
        let (heads, d) = (24usize, 256usize);
        for (kv, len, rows) in [(2usize, 8192usize, 1usize), (2, 131_072, 1), (4, 131_072, 1), (4, 8192, 4)] {
            let att = Attention8::new(&run.dev, heads, kv, d)?;
            let page_stride = 64 * kv * d;
            let n = len * kv * d;
            let bytes = 2 * n + n / 16;
            let copies = run.copies(bytes).min(16);
            let block = run.rng.bytes(page_stride);
            let scales = vec![0x2000u16; n / 64];
            let mut sets = vec![];
            for _ in 0..copies {
                let (k, v) = (run.dev.alloc(n)?, run.dev.alloc(n)?);
                for i in 0..len / 64 {
                    k.write(i * page_stride, &block)?;
                    v.write(i * page_stride, &block)?;
                }
                sets.push((k, v, run.dev.upload(&scales)?));
            }
            let table: Vec<i32> = (0..(len / 64) as i32).collect();
            let tables = run.dev.upload(&table)?;
            let lane = run.dev.upload(&vec![0i32; rows])?;
            let pos = run.dev.upload(&vec![len as i32 - 1; rows])?;
            let q = run.dev.upload(&run.rng.bf16(rows * heads * d, 0.2))?;
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
            let paging = |i: usize| Paging8 {
                keys: sets[i].0.ptr(),
                values: sets[i].1.ptr(),
                key_scales: sets[i].2.ptr(),
                value_scales: sets[i].2.ptr(),
                tables: tables.ptr(),
                table_pitch: len / 64,
                page_log: 6,
                page_stride,
                token_stride: d,
                head_stride: 64 * d,
            };
            let us = run.time(copies, |i| {
                att.launch(
                    &run.stream,
                    &queries,
                    &paging(i),
                    None,
                    scratch.ptr(),
                    None,
                    out.ptr(),
                    heads * d,
                    true,
                )
            })?;
            run.timed("attention8", format!("{heads}/{kv} heads of {d}, {len} keys, {rows} rows"), us, bytes);
            if len == 8192 && rows == 1 {
                let q = run.dev.upload(&run.rng.bf16(len * heads * d, 0.2))?;
                let out = run.dev.alloc(len * heads * d * 2)?;
                let scratch = run.dev.alloc(att.rotated_bytes(len))?;
                let (qa, s) = ((q.ptr(), heads * d, d), scratch.ptr());
                let us = run.time(1, |_| {
                    att.prefill(
                        &run.stream,
                        qa,
                        &paging(0),
                        tables.ptr(),
                        len,
                        0,
                        s,
                        None,
                        out.ptr(),
                        heads * d,
                        true,
                    )
                })?;
                let flops = 2.0 * (len * len) as f64 * (heads * d) as f64;
                run.timed_flops(
                    "attn8_prefill",
                    format!("{heads}/{kv} heads of {d}, {len} rows (causal flops)"),
                    us,
                    flops,
                );
            }
        }
    }
    Ok(())
}
