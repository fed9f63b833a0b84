//! Dense products with 8-bit and 4-bit activations (`--a8-activations`, `--a4-activations`).

use super::cells::Cells;
use super::isa::Isa;
use super::linear::{self, Out, Packed, Rows};
use super::num::f32_of;
use super::pool::Pool;
use super::weights::CpuWeight;
use crate::backend::Activation;
use crate::numerics::w4a4::{self, A4Row, Scale};

/// `y = x W^T` with x quantised as the weight's activation says; a part without a calibrated scale takes `wide` columns.
pub(crate) fn product(pool: &Pool, isa: Isa, w: &CpuWeight, x: &[u16], packed: &mut Packed, out: Out<'_>) {
    let k = w.k();
    if w.spec.activation == Activation::A8 {
        packed.pack_int8(isa, x, x.len() / k, k);
        return linear::product(pool, isa, &w.rows(), packed, out);
    }
    packed.pack(x, x.len() / k, k, k);
    let mut offset = 0;
    for part in w.rows() {
        let out = out.shifted(offset);
        offset += part.n();
        match w.spec.input_scale {
            Some(g) if part.kind().is_nvfp4() => four(pool, &part, g, x, &out),
            _ => linear::product(pool, isa, &[part], packed, out),
        }
    }
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
