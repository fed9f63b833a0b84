//! Products of every storage: instruction sets and call widths agree bit for bit, and stay inside the error bound.

use super::super::num::{bf16_of, e4m3, f32_of};
use super::*;
use half::f16;

/// A small generator (splitmix64).
pub(crate) struct Rng(pub u64);
impl Rng {
    pub(crate) fn u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    pub(crate) fn unit(&mut self) -> f32 {
        (self.u64() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
}

pub(crate) const KINDS: [Kind; 15] = [
    Kind::Bf16,
    Kind::F32,
    Kind::F16,
    Kind::Q4,
    Kind::Q5,
    Kind::Q6,
    Kind::Q8,
    Kind::Nvfp4Mul,
    Kind::Nvfp4Div,
    Kind::Nvfp4MulSwizzled,
    Kind::Nvfp4DivSwizzled,
    Kind::Fp8Row,
    Kind::Fp8Tensor,
    Kind::Fp8Block,
    Kind::Mxfp8,
];

pub(crate) struct Matrix {
    kind: Kind,
    n: usize,
    k: usize,
    codes: Vec<u8>,
    high: Vec<u8>,
    scales: Vec<u8>,
    global: f32,
}

impl Matrix {
    /// Legal random words; `extreme` takes scales from the ends of their range.
    pub(crate) fn random(kind: Kind, n: usize, k: usize, extreme: bool, rng: &mut Rng) -> Self {
        use Kind::*;
        let (c, h) = kind.row_bytes(k);
        let mut codes: Vec<u8> = (0..n * c).map(|_| rng.u64() as u8).collect();
        let mut high: Vec<u8> = (0..n * h).map(|_| rng.u64() as u8).collect();
        let mut scales = vec![0u8; kind.scale_bytes(n, k)];
        match kind {
            Bf16 => {
                codes.chunks_exact_mut(2).for_each(|w| w.copy_from_slice(&bf16_of(rng.unit()).to_le_bytes()))
            }
            F32 => codes.chunks_exact_mut(4).for_each(|w| w.copy_from_slice(&rng.unit().to_le_bytes())),
            F16 => codes
                .chunks_exact_mut(2)
                .for_each(|w| w.copy_from_slice(&f16::from_f32(rng.unit()).to_le_bytes())),
            Q8 => codes.iter_mut().for_each(|b| *b = if *b == 0x80 { 0x81 } else { *b }),
            Fp8Row | Fp8Tensor | Fp8Block | Mxfp8 => {
                codes.iter_mut().for_each(|b| *b &= if *b & 0x7f == 0x7f { 0xfe } else { 0xff })
            }
            _ => {}
        }
        // Padding of K is zero.
        if matches!(kind, Q4 | Q5 | Q6 | Q8) {
            for r in 0..n {
                for i in k..k.next_multiple_of(128) {
                    match kind {
                        Q8 => codes[r * c + i] = 0,
                        _ => codes[r * c + i / 2] &= if i % 2 == 0 { 0xf0 } else { 0x0f },
                    }
                    match kind {
                        Q5 => high[r * h + i / 8] &= !(1 << (i % 8)),
                        Q6 => high[r * h + i / 4] &= !(3 << (i % 4 * 2)),
                        _ => {}
                    }
                }
            }
        }
        match kind {
            Q4 | Q5 | Q6 | Q8 => scales.chunks_exact_mut(2).for_each(|s| {
                let v = if extreme {
                    [0u16, 1, 0x7bff][rng.u64() as usize % 3]
                } else {
                    f16::from_f32(rng.unit().abs() * 0.1).to_bits()
                };
                s.copy_from_slice(&v.to_le_bytes());
            }),
            Fp8Row => scales
                .chunks_exact_mut(2)
                .for_each(|s| s.copy_from_slice(&bf16_of(rng.unit().abs()).to_le_bytes())),
            Fp8Block => {
                scales.chunks_exact_mut(4).for_each(|s| s.copy_from_slice(&rng.unit().abs().to_le_bytes()))
            }
            Mxfp8 => scales.iter_mut().for_each(|s| {
                *s = if extreme {
                    [0, 60, 127, 190][rng.u64() as usize % 4]
                } else {
                    120 + rng.u64() as u8 % 12
                }
            }),
            _ => scales.iter_mut().for_each(|s| {
                *s = if extreme { [0, 1, 7, 8, 0x7e][rng.u64() as usize % 5] } else { rng.u64() as u8 % 0x7f }
            }),
        }
        Matrix { kind, n, k, codes, high, scales, global: 0.37 }
    }

    pub(crate) fn rows(&self, first: usize, n: usize) -> Rows<'_> {
        Rows::new(self.kind, self.n, self.k, first, n, &self.codes, &self.high, &self.scales, self.global)
            .unwrap()
    }

    /// The exact value of a weight, written from formats.md 2 alone.
    fn value(&self, r: usize, i: usize) -> f64 {
        use Kind::*;
        let (c, h) = self.kind.row_bytes(self.k);
        let row = &self.codes[r * c..(r + 1) * c];
        let high = &self.high[r * h..(r + 1) * h];
        let kp = self.k.next_multiple_of(128);
        let half = |at: usize| {
            f64::from(f16::from_le_bytes([self.scales[2 * at], self.scales[2 * at + 1]]).to_f32())
        };
        let nibble = if !row.is_empty()
            && matches!(self.kind, Bf16 | F32 | F16 | Q8 | Fp8Row | Fp8Tensor | Fp8Block | Mxfp8)
        {
            0
        } else {
            (row[i / 2] >> (4 * (i % 2))) & 15
        };
        match self.kind {
            Bf16 => f64::from(f32_of(u16::from_le_bytes([row[2 * i], row[2 * i + 1]]))),
            F16 => f64::from(f16::from_le_bytes([row[2 * i], row[2 * i + 1]]).to_f32()),
            F32 => f64::from(f32::from_le_bytes(row[4 * i..4 * i + 4].try_into().unwrap())),
            Q4 => half(r * kp / 64 + i / 64) * f64::from((nibble as i8) << 4 >> 4),
            Q5 => {
                let bit = (high[i / 8] >> (i % 8)) & 1;
                half(r * kp / 64 + i / 64) * f64::from(((nibble | bit << 4) as i8) << 3 >> 3)
            }
            Q6 => {
                let bits = (high[i / 4] >> (i % 4 * 2)) & 3;
                half(r * kp / 64 + i / 64) * f64::from(((nibble | bits << 4) as i8) << 2 >> 2)
            }
            Q8 => half(r * kp / 32 + i / 32) * f64::from(row[i] as i8),
            Fp8Row => {
                f64::from(e4m3(row[i]))
                    * f64::from(f32_of(u16::from_le_bytes([self.scales[2 * r], self.scales[2 * r + 1]])))
            }
            Fp8Tensor => f64::from(e4m3(row[i])) * f64::from(self.global),
            Fp8Block => {
                let at = 4 * (r / 128 * self.k.div_ceil(128) + i / 128);
                f64::from(e4m3(row[i]))
                    * f64::from(f32::from_le_bytes(self.scales[at..at + 4].try_into().unwrap()))
            }
            Mxfp8 => {
                f64::from(e4m3(row[i]))
                    * 2f64.powi(i32::from(self.scales[r * self.k.div_ceil(32) + i / 32]) - 127)
            }
            _ => {
                let at = match self.kind {
                    Nvfp4MulSwizzled | Nvfp4DivSwizzled => {
                        let g = i / 16;
                        (r / 128 * (self.k / 64) + g / 4) * 512 + r % 32 * 16 + r % 128 / 32 * 4 + g % 4
                    }
                    _ => r * self.k / 16 + i / 16,
                };
                let v = f64::from(super::super::num::E2M1[usize::from(nibble)])
                    * f64::from(e4m3(self.scales[at]));
                if matches!(self.kind, Nvfp4Mul | Nvfp4MulSwizzled) {
                    v * f64::from(self.global)
                } else {
                    v / f64::from(self.global)
                }
            }
        }
    }
}

pub(crate) fn shapes(kind: Kind) -> Vec<(usize, usize)> {
    match kind {
        Kind::Nvfp4MulSwizzled | Kind::Nvfp4DivSwizzled => vec![(128, 64), (256, 192)],
        k if k.is_nvfp4() => vec![(1, 16), (5, 48), (9, 64), (18, 208), (3, 1040)],
        Kind::Mxfp8 => vec![(1, 32), (7, 96), (20, 160)],
        Kind::Fp8Block => vec![(1, 130), (131, 100), (200, 320)],
        _ => vec![(1, 8), (1, 64), (3, 100), (5, 130), (21, 320), (9, 63), (70, 257)],
    }
}

/// More than one round of 16 groups, with a rest.
pub(crate) fn wide(kind: Kind) -> Option<(usize, usize)> {
    kind.integers().then_some(if kind.is_nvfp4() { (128, 1088) } else { (33, 1188) })
}

pub(crate) fn activations(columns: usize, k: usize, rng: &mut Rng, scale: f32) -> Vec<u16> {
    (0..columns * k).map(|_| bf16_of(rng.unit() * scale)).collect()
}

fn run(isa: Isa, pool: &Pool, m: &Matrix, x: &[u16], columns: usize) -> Vec<f32> {
    let mut packed = Packed::default();
    packed.pack(x, columns, m.k, m.k);
    let mut y = vec![f32::NAN; columns * m.n];
    product(pool, isa, &[m.rows(0, m.n)], &mut packed, Out::f32(&mut y, columns, m.n));
    y
}

#[test]
fn products_are_within_the_bound() {
    let (pool, mut rng) = (Pool::new(2), Rng(1));
    for kind in KINDS {
        for (n, k) in shapes(kind) {
            for extreme in [false, true] {
                let m = Matrix::random(kind, n, k, extreme, &mut rng);
                let x = activations(3, k, &mut rng, 4.0);
                let y = run(Isa::detect(), &pool, &m, &x, 3);
                for c in 0..3 {
                    for r in 0..n {
                        let terms: Vec<f64> =
                            (0..k).map(|i| m.value(r, i) * f64::from(f32_of(x[c * k + i]))).collect();
                        let (exact, sum) =
                            (terms.iter().sum::<f64>(), terms.iter().map(|t| t.abs()).sum::<f64>());
                        // Here no BF16 rounding; 1e-45 for results that are FP32 subnormals.
                        let bound = k as f64 * 2f64.powi(-24) * sum + 1e-45 * (k + 1) as f64;
                        let got = f64::from(y[c * n + r]);
                        assert!(
                            (got - exact).abs() <= bound,
                            "{kind:?} {n}x{k} row {r}: {got} against {exact} +- {bound:e}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn instruction_sets_agree_bit_for_bit() {
    let (pool, mut rng) = (Pool::new(2), Rng(2));
    for kind in KINDS {
        for (n, k) in shapes(kind) {
            let m = Matrix::random(kind, n, k, n % 2 == 0, &mut rng);
            // The second set holds activations whose products a flushing dot product would drop.
            for scale in [1.0, 1e-36] {
                let x = activations(6, k, &mut rng, scale);
                let oracle = run(Isa::Scalar, &pool, &m, &x, 6);
                for isa in Isa::testable() {
                    let y = run(isa, &pool, &m, &x, 6);
                    // A BF16 weight may be so small that its product vanishes on a processor that flushes.
                    let same = |a: f32, b: f32| a.to_bits() == b.to_bits();
                    assert!(
                        y.iter().zip(&oracle).all(|(a, b)| same(*a, *b)),
                        "{kind:?} {n}x{k} {isa} scale {scale}"
                    );
                }
            }
        }
    }
}

#[test]
fn width_of_the_call_changes_nothing() {
    let (pool, mut rng) = (Pool::new(3), Rng(3));
    for kind in KINDS {
        for (n, k) in shapes(kind) {
            let m = Matrix::random(kind, n, k, false, &mut rng);
            let columns = 21;
            let x = activations(columns, k, &mut rng, 1.0);
            for isa in Isa::testable() {
                let all = run(isa, &pool, &m, &x, columns);
                for width in [1, 2, 3, 4, 5, 8, 17] {
                    for first in (0..columns).step_by(width) {
                        let w = width.min(columns - first);
                        let part = run(isa, &pool, &m, &x[first * k..(first + w) * k], w);
                        let same =
                            part.iter().zip(&all[first * n..]).all(|(a, b)| a.to_bits() == b.to_bits());
                        assert!(same, "{kind:?} {n}x{k} {isa} columns {first}+{w}");
                    }
                }
            }
        }
    }
}

#[test]
fn parts_of_different_storage_stack_and_round_once() {
    let (pool, mut rng) = (Pool::new(2), Rng(4));
    let k = 192;
    let a = Matrix::random(Kind::Q4, 9, k, false, &mut rng);
    let b = Matrix::random(Kind::Bf16, 6, k, false, &mut rng);
    let x = activations(2, k, &mut rng, 1.0);
    let mut packed = Packed::default();
    packed.pack(&x, 2, k, k);
    let mut y = vec![0u16; 2 * 11];
    product(&pool, Isa::detect(), &[a.rows(2, 7), b.rows(1, 4)], &mut packed, Out::bf16(&mut y, 2, 11));
    let (ya, yb) = (run(Isa::detect(), &pool, &a, &x, 2), run(Isa::detect(), &pool, &b, &x, 2));
    for c in 0..2 {
        let expected: Vec<u16> =
            ya[c * 9 + 2..c * 9 + 9].iter().chain(&yb[c * 6 + 1..c * 6 + 5]).map(|v| bf16_of(*v)).collect();
        assert_eq!(&y[c * 11..(c + 1) * 11], &expected);
    }
}

#[test]
fn short_planes_are_refused() {
    assert!(Rows::new(Kind::Q4, 2, 64, 0, 2, &[0; 127], &[], &[0; 8], 1.0).is_none());
    assert!(Rows::new(Kind::Q4, 2, 64, 1, 2, &[0; 128], &[], &[0; 8], 1.0).is_none());
    assert!(Rows::new(Kind::Nvfp4Mul, 1, 24, 0, 1, &[0; 12], &[], &[0; 2], 1.0).is_none());
    assert!(Rows::new(Kind::Bf16, usize::MAX, 8, 0, 1, &[0; 16], &[], &[], 1.0).is_none());
}

#[test]
fn int8_activations_are_close_to_their_values_and_equal_everywhere() {
    let (pool, mut rng) = (Pool::new(2), Rng(5));
    for kind in KINDS {
        for (n, k) in shapes(kind).into_iter().chain(wide(kind)) {
            let m = Matrix::random(kind, n, k, false, &mut rng);
            let x = activations(19, k, &mut rng, 2.0);
            let run = |isa: Isa, x: &[u16]| {
                let mut packed = Packed::default();
                packed.pack_int8(isa, x, x.len() / k, k);
                let mut y = vec![f32::NAN; x.len() / k * n];
                product(&pool, isa, &[m.rows(0, n)], &mut packed, Out::f32(&mut y, x.len() / k, n));
                y
            };
            let all = run(Isa::Scalar, &x);
            for isa in Isa::testable() {
                let same = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same(&run(isa, &x), &all), "{kind:?} {n}x{k} {isa}");
                for columns in [1, 2, 3, 4, 5, 11] {
                    let some = run(isa, &x[..columns * k]);
                    assert!(same(&some, &all), "{kind:?} {n}x{k} {isa}, {columns} columns");
                }
            }
            let mut exact: Vec<f64> = x[..k].iter().map(|v| f64::from(f32_of(*v))).collect();
            crate::numerics::a8::quantise_in_place(&mut exact);
            for r in 0..n {
                let terms: Vec<f64> = (0..k).map(|i| m.value(r, i) * exact[i]).collect();
                let (e, sum) = (terms.iter().sum::<f64>(), terms.iter().map(|t| t.abs()).sum::<f64>());
                // One more rounding than with BF16 activations: the product of the scales.
                let bound = (k + 2) as f64 * 2f64.powi(-24) * sum + 1e-45 * (k + 1) as f64;
                assert!((f64::from(all[r]) - e).abs() <= bound, "{kind:?} {n}x{k}: {} {e}", all[r]);
            }
        }
    }
}
