//! The gated delta rule, token by token.

use super::isa::per_isa;
use super::num::{bf16_of, f32_of, tree};

/// Columns of S kept in registers at once.
const WIDE: usize = 128;

/// Operands of one token and head.
pub(crate) struct Token<'a> {
    /// Query of the key head, `[dk]`.
    pub(crate) q: &'a [f32],
    /// Key, `[dk]`.
    pub(crate) k: &'a [f32],
    /// Value, `[dv]`.
    pub(crate) v: &'a [f32],
    /// Decay `g <= 0`.
    pub(crate) g: f32,
    /// Write strength.
    pub(crate) beta: f32,
}

/// `x / sqrt(sum x^2 + 1e-6) * scale`.
#[inline(always)]
fn unit(x: &[f32], scale: f32, out: &mut [f32]) {
    let mut lanes = [0f32; 16];
    for c in x.chunks(16) {
        for (l, v) in lanes.iter_mut().zip(c) {
            *l = v.mul_add(*v, *l);
        }
    }
    let n = scale / (tree(lanes) + 1e-6).sqrt();
    for (o, v) in out.iter_mut().zip(x) {
        *o = v * n;
    }
}

/// One block of `N` columns of S from `j`: decay, read, correct, write, query.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "the operands of one recurrence")]
fn columns<const N: usize>(
    from: Option<&[f32]>,
    s: &mut [f32],
    dv: usize,
    j: usize,
    q: &[f32],
    k: &[f32],
    v: &[f32],
    alpha: f32,
    beta: f32,
) -> [f32; N] {
    let mut read = [0f32; N];
    for (row, k) in from.unwrap_or(s).chunks_exact(dv).zip(k) {
        let row = &row[j..j + N];
        for l in 0..N {
            read[l] = k.mul_add(alpha * row[l], read[l]);
        }
    }
    let mut delta = [0f32; N];
    for l in 0..N {
        delta[l] = beta * (v[j + l] - read[l]);
    }
    let mut out = [0f32; N];
    if let Some(from) = from {
        for (((row, from), k), q) in s.chunks_exact_mut(dv).zip(from.chunks_exact(dv)).zip(k).zip(q) {
            let (row, from) = (&mut row[j..j + N], &from[j..j + N]);
            for l in 0..N {
                row[l] = k.mul_add(delta[l], alpha * from[l]);
                out[l] = q.mul_add(row[l], out[l]);
            }
        }
        return out;
    }
    for ((row, k), q) in s.chunks_exact_mut(dv).zip(k).zip(q) {
        let row = &mut row[j..j + N];
        for l in 0..N {
            row[l] = k.mul_add(delta[l], alpha * row[l]);
            out[l] = q.mul_add(row[l], out[l]);
        }
    }
    out
}

per_isa! {
    /// Advances `from`, or else `s [dk, dv]` itself, by one token into `s`; `o [dv]`, if wanted, is `S^T q` of the new
    /// state, rounded to BF16.
    pub(crate) fn advance(from: Option<&[f32]>, s: &mut [f32], token: &Token<'_>, o: Option<&mut [u16]>) {
        let (dk, dv) = (token.k.len(), token.v.len());
        let (mut q, mut k) = ([0f32; 256], [0f32; 256]);
        let (q, k) = (&mut q[..dk], &mut k[..dk]);
        unit(token.q, 1.0 / (dk as f32).sqrt(), q);
        unit(token.k, 1.0, k);
        // exp of a value in (-inf, 0] in f64, rounded once: one per head and token.
        let alpha = f64::from(token.g).exp() as f32;
        let mut out = [0f32; 256];
        let mut j = 0;
        while j + WIDE <= dv {
            let y = columns::<WIDE>(from, s, dv, j, q, k, token.v, alpha, token.beta);
            out[j..j + WIDE].copy_from_slice(&y);
            j += WIDE;
        }
        while j < dv {
            out[j] = columns::<1>(from, s, dv, j, q, k, token.v, alpha, token.beta)[0];
            j += 1;
        }
        if let Some(o) = o {
            for (o, y) in o.iter_mut().zip(&out) {
                *o = bf16_of(*y);
            }
        }
    }
}

/// Largest head that `advance` takes.
pub(crate) const MAX_HEAD: usize = 256;

/// `g = -exp(A_log) softplus(a + dt_bias)`, `beta = sigma(b)`, each rounded to FP32 once.
pub(crate) fn gates(a: u16, b: u16, a_log: f32, dt_bias: f32) -> (f32, f32) {
    let x = f64::from(f32_of(a)) + f64::from(dt_bias);
    let softplus = x.max(0.0) + (-x.abs()).exp().ln_1p();
    let g = -f64::from(a_log).exp() * softplus;
    let beta = 1.0 / (1.0 + (-f64::from(f32_of(b))).exp());
    (g as f32, beta as f32)
}

#[cfg(test)]
mod tests {
    use super::super::isa::Isa;
    use super::super::linear::tests::Rng;
    use super::*;

    #[test]
    fn the_recurrence_follows_its_formula_and_is_equal_on_every_instruction_set() {
        for (dk, dv) in [(128usize, 128usize), (16, 24), (64, 70)] {
            let mut rng = Rng(3);
            let mut states: Vec<Vec<f32>> = Isa::testable().iter().map(|_| vec![0f32; dk * dv]).collect();
            let mut exact = vec![0f64; dk * dv];
            for step in 0..12 {
                let mut r = |n: usize| (0..n).map(|_| f32_of(bf16_of(rng.unit()))).collect::<Vec<f32>>();
                let (q, k, v) = (r(dk), r(dk), r(dv));
                let token = Token { q: &q, k: &k, v: &v, g: -0.1, beta: 0.6 };
                let mut outs = Vec::new();
                for (isa, s) in Isa::testable().into_iter().zip(&mut states) {
                    let mut o = vec![0u16; dv];
                    // In place or from a copy, all the same.
                    let from = (step % 2 == 0).then(|| s.clone());
                    if from.is_some() {
                        s.fill(f32::NAN);
                    }
                    advance(isa, from.as_deref(), s, &token, Some(&mut o));
                    outs.push(o);
                }
                assert!(outs.iter().all(|o| o == &outs[0]));
                let norm =
                    |x: &[f32]| 1.0 / (x.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() + 1e-6).sqrt();
                let (nq, nk) = (norm(&q) / (dk as f64).sqrt(), norm(&k));
                let alpha = f64::from(-0.1f32).exp();
                exact.iter_mut().for_each(|s| *s *= alpha);
                for j in 0..dv {
                    let read: f64 = (0..dk).map(|i| exact[i * dv + j] * f64::from(k[i]) * nk).sum();
                    let delta = f64::from(0.6f32) * (f64::from(v[j]) - read);
                    (0..dk).for_each(|i| exact[i * dv + j] += f64::from(k[i]) * nk * delta);
                    let o: f64 = (0..dk).map(|i| exact[i * dv + j] * f64::from(q[i]) * nq).sum();
                    let got = f64::from(f32_of(outs[0][j]));
                    assert!((got - o).abs() <= o.abs() * 2f64.powi(-8) + 2e-6, "{got} {o}");
                }
            }
            assert!(states.iter().all(|s| s.iter().zip(&states[0]).all(|(a, b)| a.to_bits() == b.to_bits())));
            assert!(states[0].iter().zip(&exact).all(|(a, b)| (f64::from(*a) - b).abs() < 1e-5));
        }
    }

    #[test]
    fn gates_keep_their_limits() {
        let (g, beta) = gates(bf16_of(100.0), bf16_of(0.0), 0.0, 0.0);
        assert_eq!((g, beta), (-100.0, 0.5));
        let (g, _) = gates(bf16_of(-200.0), bf16_of(0.0), 3.0, 0.0);
        assert!(g <= 0.0 && g > -1e-30);
    }
}
