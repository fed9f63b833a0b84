//! The gated delta rule, token by token.

use super::isa::{Isa, per_isa};
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

/// Normed query and key of a token, and its decay as a factor.
struct Step {
    q: [f32; MAX_HEAD],
    k: [f32; MAX_HEAD],
    alpha: f32,
}

impl Step {
    #[inline(always)]
    fn new(token: &Token<'_>) -> Self {
        let dk = token.k.len();
        let (mut q, mut k) = ([0f32; MAX_HEAD], [0f32; MAX_HEAD]);
        unit(token.q, 1.0 / (dk as f32).sqrt(), &mut q[..dk]);
        unit(token.k, 1.0, &mut k[..dk]);
        // exp of a value in (-inf, 0] in f64, rounded once: one per head and token.
        Step { q, k, alpha: f64::from(token.g).exp() as f32 }
    }

    /// Columns from `j` to the last one; outputs go to `out`.
    #[inline(always)]
    fn rest(
        &self,
        from: Option<&[f32]>,
        s: &mut [f32],
        token: &Token<'_>,
        mut j: usize,
        out: &mut [f32; MAX_HEAD],
    ) {
        let (dk, dv) = (token.k.len(), token.v.len());
        let (q, k) = (&self.q[..dk], &self.k[..dk]);
        while j + WIDE <= dv {
            let y = columns::<WIDE>(from, s, dv, j, q, k, token.v, self.alpha, token.beta);
            out[j..j + WIDE].copy_from_slice(&y);
            j += WIDE;
        }
        while j < dv {
            out[j] = columns::<1>(from, s, dv, j, q, k, token.v, self.alpha, token.beta)[0];
            j += 1;
        }
    }
}

per_isa! {
    /// [`advance`] without intrinsics.
    fn plain(from: Option<&[f32]>, s: &mut [f32], token: &Token<'_>, out: &mut [f32; MAX_HEAD]) {
        Step::new(token).rest(from, s, token, 0, out);
    }
}

/// Blocks of 128 columns, S read and written once each; `STREAM` writes past the caches.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,bmi2")]
fn wide<const STREAM: bool>(
    from: Option<&[f32]>,
    s: &mut [f32],
    token: &Token<'_>,
    out: &mut [f32; MAX_HEAD],
) {
    use std::arch::x86_64::*;
    const N: usize = WIDE / 16;
    let (dk, dv) = (token.k.len(), token.v.len());
    assert!(s.len() >= dk * dv && from.is_none_or(|f| f.len() >= dk * dv) && dv <= MAX_HEAD);
    let to = s.as_mut_ptr();
    let source = from.map_or(to.cast_const(), <[f32]>::as_ptr);
    let done = dv / WIDE * WIDE;
    let step = Step::new(token);
    // SAFETY: columns j .. j + 128 of dk rows of dv values lie inside both states, checked above, as inside v and `out`;
    // `STREAM` comes with a state on a cache line boundary and rows of whole lines.
    unsafe {
        let (alpha, beta) = (_mm512_set1_ps(step.alpha), _mm512_set1_ps(token.beta));
        for j in (0..done).step_by(WIDE) {
            let mut read = [_mm512_setzero_ps(); N];
            for i in 0..dk {
                let (row, k) = (source.add(i * dv + j), _mm512_set1_ps(step.k[i]));
                for c in 0..N {
                    let kept = _mm512_mul_ps(alpha, _mm512_loadu_ps(row.add(16 * c)));
                    read[c] = _mm512_fmadd_ps(k, kept, read[c]);
                }
            }
            for c in 0..N {
                let v = _mm512_loadu_ps(token.v.as_ptr().add(j + 16 * c));
                read[c] = _mm512_mul_ps(beta, _mm512_sub_ps(v, read[c]));
            }
            let mut y = [_mm512_setzero_ps(); N];
            for i in 0..dk {
                let (row, new) = (source.add(i * dv + j), to.add(i * dv + j));
                let (k, q) = (_mm512_set1_ps(step.k[i]), _mm512_set1_ps(step.q[i]));
                for c in 0..N {
                    let kept = _mm512_mul_ps(alpha, _mm512_loadu_ps(row.add(16 * c)));
                    let w = _mm512_fmadd_ps(k, read[c], kept);
                    if STREAM {
                        _mm512_stream_ps(new.add(16 * c), w);
                    } else {
                        _mm512_storeu_ps(new.add(16 * c), w);
                    }
                    y[c] = _mm512_fmadd_ps(q, w, y[c]);
                }
            }
            for c in 0..N {
                _mm512_storeu_ps(out.as_mut_ptr().add(j + 16 * c), y[c]);
            }
        }
        if STREAM {
            // What makes streamed stores visible to other threads in time.
            _mm_sfence();
        }
    }
    step.rest(from, s, token, done, out);
}

/// Advances `from`, or else `s [dk, dv]` itself, by one token into `s`; `o [dv]`, if wanted, is `S^T q` of the new
/// state, rounded to BF16. `stream` says that no cache will hold `s` until it is read again.
pub(crate) fn advance(
    isa: Isa,
    from: Option<&[f32]>,
    s: &mut [f32],
    stream: bool,
    token: &Token<'_>,
    o: Option<&mut [u16]>,
) {
    let mut out = [0f32; MAX_HEAD];
    #[cfg(target_arch = "x86_64")]
    if isa >= Isa::Avx512 {
        let lines = s.as_ptr().addr().is_multiple_of(64) && token.v.len().is_multiple_of(16);
        // SAFETY: an `Isa` reaches a kernel only after `Isa::available` said the processor has it.
        unsafe {
            match stream && lines && from.is_some() {
                true => wide::<true>(from, s, token, &mut out),
                false => wide::<false>(from, s, token, &mut out),
            }
        }
    } else {
        plain(isa, from, s, token, &mut out);
    }
    #[cfg(not(target_arch = "x86_64"))]
    plain(isa, from, s, token, &mut out);
    if let Some(o) = o {
        for (o, y) in o.iter_mut().zip(&out) {
            *o = bf16_of(*y);
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
    use super::super::linear::tests::Rng;
    use super::*;
    use crate::memory::Lines;

    #[test]
    fn the_recurrence_follows_its_formula_and_is_equal_on_every_instruction_set() {
        for (dk, dv) in [(128usize, 128usize), (16, 24), (64, 70)] {
            let mut rng = Rng(3);
            // On cache lines, as streamed stores want them.
            let mut states: Vec<Lines> = Isa::testable().iter().map(|_| Lines::zeroed(dk * dv)).collect();
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
                    advance(isa, from.as_deref(), s, step % 3 == 0, &token, Some(&mut o));
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
            assert!(
                states.iter().all(|s| s.iter().zip(&states[0][..]).all(|(a, b)| a.to_bits() == b.to_bits()))
            );
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
