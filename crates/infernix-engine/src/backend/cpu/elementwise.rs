//! Norms, gates, residuals, hyper-connections, convolutions, rotary embedding: one row at a time, FP32 inside, one
//! rounding at the end. Every function is a pure function of its row.

use super::isa::per_isa;
use super::num::{bf16_of, f32_of, sigmoid, silu, tree};
use std::ops::Range;

/// 16-lane sum of `f(i)` over a row, folded by `tree`; short rests go to the first lanes.
macro_rules! lane_sum {
    ($n:expr, |$i:ident| $f:expr) => {{
        let n = $n;
        let mut lanes = [0f32; 16];
        let whole = n / 16 * 16;
        let mut base = 0;
        while base < whole {
            for l in 0..16 {
                let $i = base + l;
                let (a, b) = $f;
                lanes[l] = a.mul_add(b, lanes[l]);
            }
            base += 16;
        }
        for l in 0..n - whole {
            let $i = whole + l;
            let (a, b) = $f;
            lanes[l] = a.mul_add(b, lanes[l]);
        }
        tree(lanes)
    }};
}

/// `1 / sqrt(mean(x^2) + eps)`.
#[inline(always)]
fn inverse_rms(x: &[u16], eps: f32) -> f32 {
    let sum = lane_sum!(x.len(), |i| (f32_of(x[i]), f32_of(x[i])));
    1.0 / (sum / x.len() as f32 + eps).sqrt()
}

per_isa! {
    /// `out = x inverse_rms(x) w`, where `w` already holds `1 + w` if the norm is zero-centred.
    pub(crate) fn rms_norm(x: &[u16], w: &[f32], eps: f32, out: &mut [u16]) {
        let n = inverse_rms(x, eps);
        let (w, out) = (&w[..x.len()], &mut out[..x.len()]);
        for i in 0..x.len() {
            out[i] = bf16_of(f32_of(x[i]) * n * w[i]);
        }
    }
}

per_isa! {
    /// Zero-centred norm of one head, then rotation of the first `2 * angles.len()` elements by (cos, sin).
    pub(crate) fn norm_rope(x: &[u16], w: &[f32], eps: f32, angles: &[(f32, f32)], out: &mut [u16]) {
        let n = inverse_rms(x, eps);
        let half = angles.len();
        for (i, (c, s)) in angles.iter().enumerate() {
            let a = f32_of(x[i]) * n * w[i];
            let b = f32_of(x[i + half]) * n * w[i + half];
            out[i] = bf16_of((-b).mul_add(*s, a * c));
            out[i + half] = bf16_of(a.mul_add(*s, b * c));
        }
        for i in 2 * half..x.len() {
            out[i] = bf16_of(f32_of(x[i]) * n * w[i]);
        }
    }
}

per_isa! {
    /// Mean of the raw keys of a block, zero-centred norm, rotation; `raw [r, d]`, result in FP32 holding BF16 values.
    pub(crate) fn pooled_key(raw: &[f32], w: &[f32], eps: f32, angles: &[(f32, f32)], out: &mut [f32]) {
        let d = out.len();
        let r = raw.len() / d;
        for i in 0..d {
            let mut sum = raw[i];
            for t in 1..r {
                sum += raw[t * d + i];
            }
            out[i] = sum / r as f32;
        }
        let n = 1.0 / (lane_sum!(d, |i| (out[i], out[i])) / d as f32 + eps).sqrt();
        for i in 0..d {
            out[i] = out[i] * n * w[i];
        }
        let half = angles.len();
        for (i, (c, s)) in angles.iter().enumerate() {
            let (a, b) = (out[i], out[i + half]);
            out[i] = (-b).mul_add(*s, a * c);
            out[i + half] = a.mul_add(*s, b * c);
        }
        for v in out.iter_mut() {
            *v = f32_of(bf16_of(*v));
        }
    }
}

per_isa! {
    /// `x += y`.
    pub(crate) fn add(x: &mut [u16], y: &[u16]) {
        for (x, y) in x.iter_mut().zip(y) {
            *x = bf16_of(f32_of(*x) + f32_of(*y));
        }
    }
}

per_isa! {
    /// `out = o sigma(gate)`.
    pub(crate) fn gate(o: &[u16], gate: &[u16], out: &mut [u16]) {
        for ((out, o), g) in out.iter_mut().zip(o).zip(gate) {
            *out = bf16_of(f32_of(*o) * sigmoid(f32_of(*g)));
        }
    }
}

per_isa! {
    /// `out = silu(gate) up`.
    pub(crate) fn swiglu(gate: &[u16], up: &[u16], out: &mut [u16]) {
        for ((out, g), u) in out.iter_mut().zip(gate).zip(up) {
            *out = bf16_of(silu(f32_of(*g)) * f32_of(*u));
        }
    }
}

per_isa! {
    /// `out = silu(v / n)`.
    pub(crate) fn silu_over(v: &[f32], n: f32, out: &mut [u16]) {
        for (out, v) in out.iter_mut().zip(v) {
            *out = bf16_of(silu(*v / n));
        }
    }
}

per_isa! {
    /// `v <- 2 sigma(v / n)`.
    pub(crate) fn twice_sigmoid_over(v: &mut [f32], n: f32) {
        for v in v {
            *v = 2.0 * sigmoid(*v / n);
        }
    }
}

per_isa! {
    /// `out = (1/n) sum_s sigma(v_s) x_s`, `v, x [n, H]`.
    pub(crate) fn mix_streams(v: &[f32], x: &[u16], out: &mut [u16]) {
        let h = out.len();
        let n = v.len() / h;
        let mut i = 0;
        while i + 16 <= h {
            let mut sum = [0f32; 16];
            for s in 0..n {
                let (v, x) = (&v[s * h + i..][..16], &x[s * h + i..][..16]);
                for l in 0..16 {
                    sum[l] = sigmoid(v[l]).mul_add(f32_of(x[l]), sum[l]);
                }
            }
            for l in 0..16 {
                out[i + l] = bf16_of(sum[l] / n as f32);
            }
            i += 16;
        }
        for i in i..h {
            let mut sum = 0f32;
            for s in 0..n {
                sum = sigmoid(v[s * h + i]).mul_add(f32_of(x[s * h + i]), sum);
            }
            out[i] = bf16_of(sum / n as f32);
        }
    }
}

per_isa! {
    /// `r_s += b_s y` for every stream.
    pub(crate) fn inject(r: &mut [u16], y: &[u16], b: &[f32]) {
        for (r, b) in r.chunks_exact_mut(y.len()).zip(b) {
            for (r, y) in r.iter_mut().zip(y) {
                *r = bf16_of(b.mul_add(f32_of(*y), f32_of(*r)));
            }
        }
    }
}

per_isa! {
    /// `a = key . query / sqrt(H)`, `a <- sign(a) sqrt(max(|a|, 1e-6))`, `out = sigma(a) value`.
    pub(crate) fn ple_gate(key: &[u16], query: &[u16], value: &[u16], out: &mut [u16]) {
        let h = value.len();
        let dot = lane_sum!(h, |i| (f32_of(key[i]), f32_of(query[i])));
        let a = dot / (h as f32).sqrt();
        let root = a.abs().max(1e-6).sqrt();
        let a = if a == 0.0 { 0.0 } else { root.copysign(a) };
        let g = sigmoid(a);
        for (o, v) in out.iter_mut().zip(value) {
            *o = bf16_of(g * f32_of(*v));
        }
    }
}

/// `sum_j w[j, c] window[t + j d, c]` for the channels `c`, at most 16, taps in rising order.
#[inline(always)]
fn taps(window: &[f32], width: usize, w: &[f32], t: usize, dilation: usize, c: Range<usize>) -> [f32; 16] {
    let mut sum = [0f32; 16];
    for (j, w) in w.chunks_exact(width).enumerate() {
        let x = &window[(t + j * dilation) * width..][..width];
        for ((s, w), x) in sum.iter_mut().zip(&w[c.clone()]).zip(&x[c.clone()]) {
            *s = w.mul_add(*x, *s);
        }
    }
    sum
}

/// Calls `f` with the channels of a row, 16 at a time: whole blocks have a length that the compiler knows.
#[inline(always)]
fn by_sixteen<T>(out: &mut [T], mut f: impl FnMut(Range<usize>, &mut [T])) {
    let (blocks, rest) = out.as_chunks_mut::<16>();
    let whole = 16 * blocks.len();
    for (n, out) in blocks.iter_mut().enumerate() {
        f(16 * n..16 * n + 16, out);
    }
    if !rest.is_empty() {
        f(whole..whole + rest.len(), rest);
    }
}

per_isa! {
    /// One column of a causal convolution with silu: `w [taps, width]`, window starting `taps - 1` columns before t = 0.
    pub(crate) fn conv_silu(window: &[f32], w: &[f32], t: usize, out: &mut [u16]) {
        let width = out.len();
        by_sixteen(out, #[inline(always)] |c, out| {
            let sum = taps(window, width, w, t, 1, c);
            for (o, s) in out.iter_mut().zip(sum) {
                *o = bf16_of(silu(s));
            }
        });
    }
}

per_isa! {
    /// `r += v + silu(dilated convolution)`, one column.
    pub(crate) fn ple_conv(window: &[f32], w: &[f32], t: usize, dilation: usize, v: &[u16], r: &mut [u16]) {
        let width = r.len();
        by_sixteen(r, #[inline(always)] |c, r| {
            let sum = taps(window, width, w, t, dilation, c.clone());
            for ((r, v), s) in r.iter_mut().zip(&v[c]).zip(sum) {
                *r = bf16_of(f32_of(*r) + f32_of(*v) + silu(s));
            }
        });
    }
}

per_isa! {
    /// Plain norm of one head times the gate's activation: `out = x inverse_rms(x) w act(z)`.
    pub(crate) fn gated_norm(x: &[u16], z: &[u16], w: &[f32], eps: f32, with_silu: bool, out: &mut [u16]) {
        let n = inverse_rms(x, eps);
        let (z, w, out) = (&z[..x.len()], &w[..x.len()], &mut out[..x.len()]);
        if with_silu {
            for i in 0..x.len() {
                out[i] = bf16_of(f32_of(x[i]) * n * w[i] * silu(f32_of(z[i])));
            }
        } else {
            for i in 0..x.len() {
                out[i] = bf16_of(f32_of(x[i]) * n * w[i] * sigmoid(f32_of(z[i])));
            }
        }
    }
}

per_isa! {
    /// BF16 to FP32.
    pub(crate) fn widen(x: &[u16], out: &mut [f32]) {
        for (o, x) in out.iter_mut().zip(x) {
            *o = f32_of(*x);
        }
    }
}

per_isa! {
    /// FP32 to BF16.
    pub(crate) fn narrow(x: &[f32], out: &mut [u16]) {
        for (o, x) in out.iter_mut().zip(x) {
            *o = bf16_of(*x);
        }
    }
}

per_isa! {
    /// `acc = fma(w, y, acc)`.
    pub(crate) fn accumulate(w: f32, y: &[u16], acc: &mut [f32]) {
        for (a, y) in acc.iter_mut().zip(y) {
            *a = w.mul_add(f32_of(*y), *a);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::isa::Isa;
    use super::super::linear::tests::Rng;
    use super::*;

    fn values(n: usize, scale: f32, rng: &mut Rng) -> Vec<u16> {
        (0..n).map(|_| bf16_of(rng.unit() * scale)).collect()
    }

    /// |y - exact| within half a BF16 ulp and 2^-20 of it.
    fn near(y: u16, exact: f64) -> bool {
        (f64::from(f32_of(y)) - exact).abs() <= exact.abs() * (2f64.powi(-8) + 2f64.powi(-20)) + 1e-38
    }

    fn wide(x: u16) -> f64 {
        f64::from(f32_of(x))
    }

    fn sig(x: f64) -> f64 {
        1.0 / (1.0 + (-x).exp())
    }

    #[test]
    fn operations_are_within_half_an_ulp_and_equal_on_every_instruction_set() {
        let mut rng = Rng(7);
        for n in [1usize, 5, 16, 37, 128, 640] {
            for scale in [1e-3, 1.0, 50.0] {
                let (x, y, z) =
                    (values(n, scale, &mut rng), values(n, scale, &mut rng), values(n, 8.0, &mut rng));
                let w: Vec<f32> = (0..n).map(|_| rng.unit() + 1.0).collect();
                let f: Vec<f32> = (0..n).map(|_| rng.unit() * 20.0).collect();
                let rms = 1.0 / (x.iter().map(|v| wide(*v).powi(2)).sum::<f64>() / n as f64 + 1e-6).sqrt();
                let mut first: Option<Vec<Vec<u16>>> = None;
                for isa in Isa::testable() {
                    let mut out = vec![vec![0u16; n]; 7];
                    rms_norm(isa, &x, &w, 1e-6, &mut out[0]);
                    gate(isa, &x, &z, &mut out[1]);
                    swiglu(isa, &z, &y, &mut out[2]);
                    silu_over(isa, &f, 4.0, &mut out[3]);
                    out[4].copy_from_slice(&x);
                    add(isa, &mut out[4], &y);
                    gated_norm(isa, &x, &z, &w, 1e-6, true, &mut out[5]);
                    gated_norm(isa, &x, &z, &w, 1e-6, false, &mut out[6]);
                    for i in 0..n {
                        let (x, y, z, w, f) =
                            (wide(x[i]), wide(y[i]), wide(z[i]), f64::from(w[i]), f64::from(f[i]) / 4.0);
                        let exact = [
                            x * rms * w,
                            x * sig(z),
                            z * sig(z) * y,
                            f * sig(f),
                            x + y,
                            x * rms * w * z * sig(z),
                            x * rms * w * sig(z),
                        ];
                        for (k, e) in exact.iter().enumerate() {
                            assert!(near(out[k][i], *e), "{isa} op {k}: {} against {e}", f32_of(out[k][i]));
                        }
                    }
                    assert_eq!(first.get_or_insert_with(|| out.clone()), &out, "{isa}");
                }
            }
        }
    }

    #[test]
    fn mixing_injection_and_convolution_follow_their_formulas() {
        let mut rng = Rng(8);
        for (h, n) in [(7usize, 4usize), (48, 4), (33, 2)] {
            let x = values(n * h, 1.0, &mut rng);
            let v: Vec<f32> = (0..n * h).map(|_| rng.unit() * 6.0).collect();
            let y = values(h, 1.0, &mut rng);
            let b: Vec<f32> = (0..n).map(|_| rng.unit()).collect();
            let (taps_n, dilation) = (4usize, 3usize);
            let window: Vec<f32> = (0..(taps_n - 1) * dilation * h + 2 * h).map(|_| rng.unit()).collect();
            let w: Vec<f32> = (0..taps_n * h).map(|_| rng.unit()).collect();
            for isa in Isa::testable() {
                let mut out = vec![0; h];
                mix_streams(isa, &v, &x, &mut out);
                let mut r = x.clone();
                inject(isa, &mut r, &y, &b);
                let mut conv = vec![0u16; h];
                ple_conv(isa, &window, &w, 1, dilation, &y, &mut conv);
                for i in 0..h {
                    let mean = (0..n).map(|s| sig(f64::from(v[s * h + i])) * wide(x[s * h + i])).sum::<f64>()
                        / n as f64;
                    assert!((wide(out[i]) - mean).abs() <= mean.abs() / 250.0 + 1e-6);
                    for s in 0..n {
                        let e = wide(x[s * h + i]) + f64::from(b[s]) * wide(y[i]);
                        assert!((wide(r[s * h + i]) - e).abs() <= e.abs() / 250.0 + 1e-6);
                    }
                    let c: f64 = (0..taps_n)
                        .map(|j| f64::from(w[j * h + i]) * f64::from(window[(1 + j * dilation) * h + i]))
                        .sum();
                    let e = wide(y[i]) + c * sig(c);
                    assert!((wide(conv[i]) - e).abs() <= e.abs() / 250.0 + 1e-6);
                }
            }
        }
    }

    #[test]
    fn ple_gate_keeps_the_sign_and_its_floor() {
        let one = vec![bf16_of(1.0); 16];
        let mut out = vec![0; 16];
        ple_gate(Isa::Scalar, &one, &one, &one, &mut out);
        assert!(near(out[0], sig(2.0)));
        let minus = vec![bf16_of(-1.0); 16];
        ple_gate(Isa::Scalar, &one, &minus, &one, &mut out);
        assert!(near(out[0], sig(-2.0)));
        ple_gate(Isa::Scalar, &[0; 16], &one, &one, &mut out);
        assert_eq!(f32_of(out[0]), 0.5);
        let tiny = vec![bf16_of(1e-9); 16];
        ple_gate(Isa::Scalar, &tiny, &minus, &one, &mut out);
        assert!(near(out[0], sig(-1e-3)));
    }
}
