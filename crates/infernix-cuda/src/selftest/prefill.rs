//! Dense prefill attention.

use super::Run;
use crate::error::Result;
use crate::kernels::attention::{Attention, Paging};
use crate::oracle::num::{bf16, parallel, rbf, sigmoid};

/// Dense causal attention of a chunk behind earlier keys.
pub(super) fn attention(run: &mut Run) -> Result<()> {
    for (heads, kv, d, rows, pos0) in [
        (24usize, 2usize, 256usize, 100usize, 0usize),
        (24, 4, 256, 77, 301),
        (16, 2, 256, 33, 64),
        (32, 8, 128, 130, 17),
        (3, 3, 256, 1, 5),
    ] {
        let att = Attention::new(&run.dev, heads, kv, d)?;
        let (page, pages) = (64usize, 8usize);
        let (head_stride, page_stride) = (page * d, page * kv * d);
        let n = pages * page_stride;
        let (k, v) = (run.rng.bf16(n, 1.0), run.rng.bf16(n, 1.0));
        let table: Vec<i32> = (0..pages as i32).rev().collect();
        let (dk, dv, dt) = (run.dev.upload(&k)?, run.dev.upload(&v)?, run.dev.upload(&table)?);
        let p = Paging {
            keys: dk.ptr(),
            values: dv.ptr(),
            tables: dt.ptr(),
            table_pitch: pages,
            page_log: 6,
            page_stride,
            token_stride: d,
            head_stride,
        };
        let q_pitch = heads * 2 * d;
        let q = run.rng.bf16(rows * q_pitch, 1.5);
        let dq = run.dev.upload(&q)?;
        let out = run.dev.alloc(rows * heads * d * 2)?;
        att.prefill(
            &run.stream,
            (dq.ptr(), q_pitch, 2 * d),
            &p,
            dt.ptr(),
            rows,
            pos0,
            Some((dq.at(d * 2), q_pitch, 2 * d)),
            out.ptr(),
            heads * d,
            false,
        )?;
        run.stream.synchronize()?;
        let got: Vec<u16> = out.read(0, rows * heads * d)?;
        let shares = parallel(rows * heads, |job| {
            let (r, h) = (job / heads, job % heads);
            let at = |t: usize| {
                table[t / page] as usize * page_stride + (h / (heads / kv)) * head_stride + t % page * d
            };
            let qv: Vec<f64> = (0..d).map(|i| f64::from(bf16(q[r * q_pitch + h * 2 * d + i]))).collect();
            let s: Vec<f64> = (0..=pos0 + r)
                .map(|t| {
                    (0..d).map(|i| qv[i] * f64::from(bf16(k[at(t) + i]))).sum::<f64>() / (d as f64).sqrt()
                })
                .collect();
            let m = s.iter().fold(f64::NEG_INFINITY, |a, b| a.max(*b));
            let z: f64 = s.iter().map(|x| (x - m).exp()).sum();
            let (mut e, mut t2) = (0f64, 1e-300);
            for i in 0..d {
                let o: f64 = s
                    .iter()
                    .enumerate()
                    .map(|(t, x)| (x - m).exp() / z * f64::from(bf16(v[at(t) + i])))
                    .sum();
                let want =
                    f64::from(rbf(o as f32)) * sigmoid(f64::from(bf16(q[r * q_pitch + h * 2 * d + d + i])));
                let g = f64::from(bf16(got[(r * heads + h) * d + i]));
                e += if g.is_finite() { (g - want) * (g - want) } else { f64::INFINITY };
                t2 += want * want;
            }
            (e / t2).sqrt() / 5e-3
        });
        run.check(
            "attn_prefill",
            format!("{heads}/{kv} heads of {d}, {rows} rows at {pos0}, relative L2 5e-3"),
            shares.into_iter().fold(0.0, f64::max),
            false,
        );
    }
    if run.bench {
        for (heads, kv, t) in [(24usize, 2usize, 8192usize), (24, 4, 8192), (24, 4, 2048)] {
            let d = 256;
            let att = Attention::new(&run.dev, heads, kv, d)?;
            let page_stride = 64 * kv * d;
            let (k, v) = (
                run.dev.upload(&run.rng.bf16(t * kv * d, 1.0))?,
                run.dev.upload(&run.rng.bf16(t * kv * d, 1.0))?,
            );
            let table: Vec<i32> = (0..(t / 64) as i32).collect();
            let dt = run.dev.upload(&table)?;
            let q = run.dev.upload(&run.rng.bf16(t * heads * d, 1.0))?;
            let out = run.dev.alloc(t * heads * d * 2)?;
            let p = Paging {
                keys: k.ptr(),
                values: v.ptr(),
                tables: dt.ptr(),
                table_pitch: t / 64,
                page_log: 6,
                page_stride,
                token_stride: d,
                head_stride: 64 * d,
            };
            let us = run.time(1, |_| {
                att.prefill(
                    &run.stream,
                    (q.ptr(), heads * d, d),
                    &p,
                    dt.ptr(),
                    t,
                    0,
                    None,
                    out.ptr(),
                    heads * d,
                    true,
                )
            })?;
            run.timed_flops(
                "attn_prefill",
                format!("{heads}/{kv} heads of {d}, {t} rows (causal flops)"),
                us,
                2.0 * (t * t) as f64 * (heads * d) as f64,
            );
        }
    }
    Ok(())
}
