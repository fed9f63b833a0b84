//! Dense products with 8-bit and 4-bit activations (`--a8-activations`, `--a4-activations`).

use super::cells::Cells;
use super::experts::chain::{Column, LANES, Panel};
use super::isa::Isa;
use super::linear::{Out, Rows};
use super::num::f32_of;
use super::pool::Pool;
use super::weights::CpuWeight;
use crate::backend::Activation;
use crate::numerics::w4a4::{self, A4Row, Scale};

/// `y = x W^T` with x quantised as the weight's activation says; the order of additions is that of the experts.
pub(crate) fn product(pool: &Pool, isa: Isa, w: &CpuWeight, x: &[u16], out: &Out<'_>) {
    let k = w.k();
    let mut offset = 0;
    for part in w.rows() {
        let out = out.shifted(offset);
        offset += part.n();
        match w.spec.input_scale {
            Some(g) if w.spec.activation == Activation::A4 && part.kind().is_nvfp4() => {
                four(pool, &part, g, x, &out)
            }
            // Quantising to 4 bits needs a calibrated scale; a part without one takes the 8-bit form only if asked.
            _ => {
                let columns: Vec<Column> =
                    x.chunks_exact(k)
                        .map(|c| {
                            if w.spec.activation == Activation::A8 {
                                Column::int8(c)
                            } else {
                                Column::wide(c)
                            }
                        })
                        .collect();
                wide(pool, isa, &part, &columns, &out);
            }
        }
    }
}

fn wide(pool: &Pool, isa: Isa, w: &Rows<'_>, columns: &[Column], out: &Out<'_>) {
    let x: Vec<&Column> = columns.iter().collect();
    pool.run(w.n().div_ceil(LANES), |task| {
        let first = task * LANES;
        let mut panel = Panel::default();
        panel.fill(w, first);
        let mut y = vec![[0f32; LANES]; x.len()];
        panel.products(isa, &x, &mut y);
        for (c, y) in y.iter().enumerate() {
            for (r, v) in y.iter().take(w.n() - first).enumerate() {
                out.put(c, first + r, w.finish(first + r, *v));
            }
        }
    });
}

fn four(pool: &Pool, w: &Rows<'_>, input: f32, x: &[u16], out: &Out<'_>) {
    let scale = |v| if w.divides() { Scale::Divisor(v) } else { Scale::Multiplier(v) };
    let factor = w4a4::combine(scale(w.global()), scale(input));
    let n = x.len() / w.k().max(1);
    let mut rows: Vec<Option<A4Row>> = vec![None; n];
    let cells = Cells::new(&mut rows);
    pool.run(n, |c| {
        let v: Vec<f32> = x[c * w.k()..(c + 1) * w.k()].iter().map(|v| f32_of(*v)).collect();
        // SAFETY: each column belongs to one task.
        unsafe { cells.piece(c..c + 1)[0] = Some(w4a4::quantise(&v, scale(input))) };
    });
    pool.chunks(w.n(), pool.share(w.n(), 4), |range| {
        for r in range {
            let scales = w.e4m3_words(r);
            for (c, x) in rows.iter().flatten().enumerate() {
                out.put(c, r, w4a4::finish(w4a4::dot(w.codes(r), &scales, x), factor));
            }
        }
    });
}
