//! Dense products with 8-bit and 4-bit activations (`--a8-activations`, `--a4-activations`).

use super::cells::Cells;
use super::isa::Isa;
#[cfg(target_arch = "x86_64")]
use super::linear::vnni::{Nibbles, nibbles_product};
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
            Some(g) if part.kind().is_nvfp4() => four(pool, isa, &part, g, x, &out),
            _ => linear::product(pool, isa, &[part], packed, out),
        }
    }
}

fn four(pool: &Pool, isa: Isa, w: &Rows<'_>, input: f32, x: &[u16], out: &Out<'_>) {
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
    let put = |column, row, sum| out.put(column, row, w4a4::finish(sum, factor));
    let chunk = pool.share(w.n(), 4);
    #[cfg(target_arch = "x86_64")]
    if isa == Isa::Avx512Bf16 {
        let columns: Vec<Nibbles> = rows.iter().flatten().map(Nibbles::new).collect();
        return pool.chunks(w.n(), chunk, |range| nibbles_product(w, range, &columns, put));
    }
    pool.chunks(w.n(), chunk, |range| {
        for r in range {
            let scales = w.e4m3_words(r);
            for (c, x) in rows.iter().flatten().enumerate() {
                put(c, r, w4a4::dot(w.codes(r), &scales, x));
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::super::linear::tests::{Matrix, Rng, activations, shapes, wide};
    use super::*;
    use crate::backend::cpu::linear::Kind;

    #[test]
    fn four_bit_products_are_the_canonical_ones_on_every_instruction_set() {
        let (pool, mut rng) = (Pool::new(2), Rng(77));
        for kind in [Kind::Nvfp4Mul, Kind::Nvfp4Div, Kind::Nvfp4MulSwizzled, Kind::Nvfp4DivSwizzled] {
            for (n, k) in shapes(kind).into_iter().chain(wide(kind)) {
                let m = Matrix::random(kind, n, k, n % 2 == 1, &mut rng);
                let w = m.rows(0, n);
                for (columns, size) in [(1usize, 1.0), (3, 1e-3), (6, 3e4)] {
                    let x = activations(columns, k, &mut rng, size);
                    let run = |isa: Isa| {
                        let mut y = vec![f32::NAN; columns * n];
                        four(&pool, isa, &w, 0.02, &x, &Out::f32(&mut y, columns, n));
                        y.iter().map(|v| v.to_bits()).collect::<Vec<_>>()
                    };
                    let oracle = run(Isa::Scalar);
                    for isa in Isa::testable() {
                        assert!(run(isa) == oracle, "{kind:?} {n}x{k}, {columns} columns, {isa}");
                    }
                }
            }
        }
    }
}
