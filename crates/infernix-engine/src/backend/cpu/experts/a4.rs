//! The canonical W4A4 product over `nvfp4_expert_rg16_v1` (oracle: `numerics::w4a4`): exact integers, so lanes, splits
//! and instruction sets cannot show.

use super::super::isa::{Isa, per_isa};
use super::super::num::{bf16_of, f32_of};
use super::UNIT;
use crate::numerics::w4a4::{self, E2M1_DOUBLED, Scale, e4m3_encode, e4m3_scaled};
use std::sync::atomic::{AtomicU32, Ordering};

/// Largest magnitude of a doubled code; added so that the unsigned side of a byte dot product is unsigned.
pub(super) const BIAS: i32 = 12;

/// A quantised activation column.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct A4 {
    /// Doubled codes `[K]`.
    codes: Vec<i8>,
    /// `-BIAS * sum of the block's codes`, `[K / 16]`.
    init: Vec<i32>,
    /// Block scales times 2^9, `[K / 16]`.
    scales: Vec<i32>,
}

impl A4 {
    /// Quantises BF16 values, K a multiple of 16, as `w4a4::quantise` does.
    pub(crate) fn new(isa: Isa, x: &[u16], input: Scale) -> Self {
        let n = x.len() / 16;
        let mut a = A4 { codes: vec![0; n * 16], init: vec![0; n], scales: vec![0; n] };
        match input {
            Scale::Multiplier(g) => quantise(isa, x, g, true, &mut a),
            Scale::Divisor(g) => quantise(isa, x, g, false, &mut a),
        }
        a
    }

    /// A column of `k` values as the device quantises it: codes, then scale and correction of each block.
    pub(crate) fn from_words(words: &[AtomicU32], k: usize) -> Self {
        let load = |w: &AtomicU32| w.load(Ordering::Relaxed);
        let (codes, blocks) = words.split_at(k / 4);
        let mut bytes = vec![0i8; k];
        for (to, w) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(codes) {
            *to = load(w).to_le_bytes().map(|b| b as i8);
        }
        A4 {
            codes: bytes,
            scales: blocks.iter().step_by(2).take(k / 16).map(|w| load(w) as i32).collect(),
            init: blocks.iter().skip(1).step_by(2).take(k / 16).map(|w| load(w) as i32).collect(),
        }
    }

    /// The same column as such words.
    #[cfg(test)]
    pub(crate) fn words(&self) -> Vec<u32> {
        let codes = self.codes.as_chunks::<4>().0.iter().map(|c| u32::from_le_bytes(c.map(|c| c as u8)));
        codes.chain(self.scales.iter().zip(&self.init).flat_map(|(s, i)| [*s as u32, *i as u32])).collect()
    }
}

per_isa! {
    fn quantise(x: &[u16], g: f32, multiplier: bool, a: &mut A4) {
        let blocks = a.codes.chunks_exact_mut(16).zip(&mut a.init).zip(&mut a.scales);
        for (x, ((codes, init), scale)) in x.chunks_exact(16).zip(blocks) {
            let mut v = [0f32; 16];
            let mut amax = 0f32;
            for i in 0..16 {
                v[i] = f32_of(x[i]);
            }
            for v in v {
                amax = amax.max(v.abs());
            }
            let s = if multiplier { e4m3_encode(amax / (6.0 * g)) } else { e4m3_encode(amax * g / 6.0) };
            if s == 0 {
                continue;
            }
            *scale = e4m3_scaled(s);
            let value = *scale as f32 / 512.0;
            let d = if multiplier { value * g } else { value / g };
            let mut sum = 0i32;
            let mut c = [0i32; 16];
            for i in 0..16 {
                let q = v[i] / d;
                let m = q.abs();
                // The steps between doubled codes 0, 1, 2, 3, 4, 6, 8, 12; ties to the even word.
                let code = i32::from(m > 0.25)
                    + i32::from(m >= 0.75)
                    + i32::from(m > 1.25)
                    + i32::from(m >= 1.75)
                    + 2 * i32::from(m > 2.5)
                    + 2 * i32::from(m >= 3.5)
                    + 4 * i32::from(m > 5.0);
                c[i] = if q < 0.0 { -code } else { code };
            }
            for i in 0..16 {
                sum += c[i];
                codes[i] = c[i] as i8;
            }
            *init = -BIAS * sum;
        }
    }
}

/// Exact sums of one group of 16 rows (`K / 16` units) with each column.
pub(crate) fn sums(isa: Isa, units: &[u8], x: &[&A4], out: &mut [[i64; 16]]) {
    assert_eq!(x.len(), out.len());
    let blocks = units.len() / UNIT;
    assert!(x.iter().all(|x| x.scales.len() == blocks));
    #[cfg(target_arch = "x86_64")]
    if isa == Isa::Avx512Bf16 {
        let mut c = 0;
        while c < x.len() {
            // SAFETY: the processor has VNNI (`Isa::available`); lengths are checked above.
            unsafe {
                match x.len() - c {
                    1 => avx512::sums::<1>(units, blocks, &x[c..], &mut out[c..]),
                    2 => avx512::sums::<2>(units, blocks, &x[c..], &mut out[c..]),
                    3 => avx512::sums::<3>(units, blocks, &x[c..], &mut out[c..]),
                    _ => avx512::sums::<4>(units, blocks, &x[c..], &mut out[c..]),
                }
            }
            c += 4;
        }
        return;
    }
    for (x, out) in x.iter().zip(out) {
        portable(isa, units, x, out);
    }
}

per_isa! {
    fn portable(units: &[u8], x: &A4, out: &mut [i64; 16]) {
        *out = [0; 16];
        for (b, unit) in units.chunks_exact(UNIT).enumerate() {
            let mut p = [0i32; 16];
            for k in 0..16 {
                let a = i32::from(x.codes[16 * b + k]);
                let bytes = &unit[k / 4 * 32 + k % 4..];
                for j in 0..8 {
                    let w = bytes[4 * j];
                    p[j] += i32::from(E2M1_DOUBLED[usize::from(w & 15)]) * a;
                    p[8 + j] += i32::from(E2M1_DOUBLED[usize::from(w >> 4)]) * a;
                }
            }
            for r in 0..16 {
                out[r] += i64::from(p[r]) * i64::from(e4m3_scaled(unit[128 + r])) * i64::from(x.scales[b]);
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) mod avx512 {
    use super::{A4, UNIT};
    use std::arch::x86_64::*;

    /// 12 + doubled E2M1 value of each code.
    static BIASED: [u8; 16] = [12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0];

    /// Biased codes of a quad of a unit: words of 4 values of k, lanes across rows.
    ///
    /// # Safety
    /// AVX-512 F and BW, 32 readable bytes.
    #[inline(always)]
    pub(crate) unsafe fn biased(quad: *const u8) -> __m512i {
        // SAFETY: the caller's word.
        unsafe {
            let table = _mm512_broadcast_i32x4(_mm_loadu_si128(BIASED.as_ptr().cast()));
            let shift = _mm512_set_epi32(4, 4, 4, 4, 4, 4, 4, 4, 0, 0, 0, 0, 0, 0, 0, 0);
            // Low nibbles are of rows 0..8, high nibbles of rows 8..16.
            let v = _mm512_broadcast_i64x4(_mm256_loadu_si256(quad.cast()));
            let v = _mm512_and_si512(_mm512_srlv_epi32(v, shift), _mm512_set1_epi8(15));
            _mm512_shuffle_epi8(table, v)
        }
    }

    /// # Safety
    /// AVX-512 F, BW, DQ, VNNI; `units` holds `blocks` units, each of the first `C` columns as many blocks.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2")]
    pub(super) unsafe fn sums<const C: usize>(units: &[u8], blocks: usize, x: &[&A4], out: &mut [[i64; 16]]) {
        // SAFETY: all reads are inside the unit or column of the block, by the caller's lengths.
        unsafe {
            let rebias = _mm512_castsi512_ps(_mm512_set1_epi32((120 + 127) << 23));
            let units_per_one = _mm512_set1_ps(512.0);
            let mut even = [_mm512_setzero_si512(); C];
            let mut odd = [_mm512_setzero_si512(); C];
            for b in 0..blocks {
                let u = units.as_ptr().add(b * UNIT);
                _mm_prefetch::<_MM_HINT_T0>(u.wrapping_add(4096).cast());
                _mm_prefetch::<_MM_HINT_T0>(u.wrapping_add(4096 + 64).cast());
                let mut w = [_mm512_setzero_si512(); 4];
                for (q, w) in w.iter_mut().enumerate() {
                    *w = biased(u.add(32 * q));
                }
                // E4M3 word to FP32 times 2^9, exact, then to an integer.
                let s = _mm512_cvtepu8_epi32(_mm_loadu_si128(u.add(128).cast()));
                let s = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32::<20>(s)), rebias);
                let s = _mm512_cvtps_epi32(_mm512_mul_ps(s, units_per_one));
                for c in 0..C {
                    let codes = x[c].codes.as_ptr().add(16 * b).cast::<i32>();
                    let mut p = _mm512_set1_epi32(*x[c].init.get_unchecked(b));
                    for (q, w) in w.iter().enumerate() {
                        p = _mm512_dpbusd_epi32(p, *w, _mm512_set1_epi32(codes.add(q).read_unaligned()));
                    }
                    // |p| <= 2304 and s <= 229376: the product fits 32 bits.
                    let p = _mm512_mullo_epi32(p, s);
                    let a = _mm512_set1_epi32(*x[c].scales.get_unchecked(b));
                    even[c] = _mm512_add_epi64(even[c], _mm512_mul_epi32(p, a));
                    odd[c] = _mm512_add_epi64(odd[c], _mm512_mul_epi32(_mm512_srli_epi64::<32>(p), a));
                }
            }
            for c in 0..C {
                let (mut e, mut o) = ([0i64; 8], [0i64; 8]);
                _mm512_storeu_si512(e.as_mut_ptr().cast(), even[c]);
                _mm512_storeu_si512(o.as_mut_ptr().cast(), odd[c]);
                for i in 0..8 {
                    out[c][2 * i] = e[i];
                    out[c][2 * i + 1] = o[i];
                }
            }
        }
    }
}

/// `w4a4::exp_c`, inlined so that it vectorises.
#[inline(always)]
fn exp_c(x: f32) -> f32 {
    let (lo, hi) = w4a4::EXP_RANGE;
    // NaN passes both comparisons and comes out of the polynomial as NaN.
    let x = if x < lo { lo } else { x };
    let x = if x > hi { hi } else { x };
    // |x log2 e| < 2^22: adding and subtracting 1.5 * 2^23 rounds to nearest even.
    let t = x * std::f32::consts::LOG2_E + 12_582_912.0;
    let n = t - 12_582_912.0;
    let r = (-n).mul_add(w4a4::LN2_LO, (-n).mul_add(w4a4::LN2_HI, x));
    let mut p = w4a4::EXP_C[7];
    for c in w4a4::EXP_C[..7].iter().rev() {
        p = p.mul_add(r, *c);
    }
    let n = t.to_bits().wrapping_sub(12_582_912.0f32.to_bits()) as i32;
    let half = n >> 1;
    p * f32::from_bits((half.wrapping_add(127) as u32) << 23)
        * f32::from_bits(((n - half).wrapping_add(127) as u32) << 23)
}

per_isa! {
    /// `h = bf16(fl(fl(g / fl(1 + exp_c(-g))) u))`.
    pub(crate) fn swiglu(g: &[u16], u: &[u16], h: &mut [u16]) {
        for ((h, g), u) in h.iter_mut().zip(g).zip(u) {
            let g = f32_of(*g);
            *h = bf16_of(g / (1.0 + exp_c(-g)) * f32_of(*u));
        }
    }
}

/// Sums of the 16 rows of a row group, each by itself, as `w4a4::dot` gives them.
#[cfg(test)]
pub(crate) fn oracle(units: &[u8], x: &w4a4::A4Row) -> [i64; 16] {
    std::array::from_fn(|r| {
        let (mut codes, mut scales) = (Vec::new(), Vec::new());
        for unit in units.chunks_exact(UNIT) {
            let nibble = |k: usize| (unit[k / 4 * 32 + r % 8 * 4 + k % 4] >> (r / 8 * 4)) & 15;
            codes.extend((0..8).map(|j| nibble(2 * j) | nibble(2 * j + 1) << 4));
            scales.push(unit[128 + r]);
        }
        w4a4::dot(&codes, &scales, x)
    })
}

#[cfg(test)]
mod tests {
    use super::super::super::linear::tests::Rng;
    use super::*;

    #[test]
    fn swiglu_equals_the_published_exponential_on_all_bf16_inputs() {
        let g: Vec<u16> = (0..=u16::MAX).collect();
        let u = vec![bf16_of(1.5); g.len()];
        for isa in Isa::testable() {
            let mut h = vec![0u16; g.len()];
            swiglu(isa, &g, &u, &mut h);
            for (h, g) in h.iter().zip(&g) {
                let e = half::bf16::from_f32(w4a4::swiglu(f32_of(*g), 1.5)).to_bits();
                let nan = f32_of(*h).is_nan() && f32_of(e).is_nan();
                assert!(*h == e || nan, "{isa}: g = {:04x}: {h:04x} against {e:04x}", g);
            }
        }
    }

    /// Random words, and the ends of every range.
    fn units(blocks: usize, kind: usize, rng: &mut Rng) -> Vec<u8> {
        let mut u: Vec<u8> = (0..blocks * UNIT).map(|_| rng.u64() as u8).collect();
        for unit in u.chunks_exact_mut(UNIT) {
            match kind {
                0 => unit[128..].iter_mut().for_each(|s| *s %= 0x7f),
                1 => unit[128..].fill(0x7e),
                2 => unit[128..].iter_mut().for_each(|s| *s = [0, 1, 7, 8, 0x7e][usize::from(*s) % 5]),
                _ => {
                    unit[..128].fill(if kind == 3 { 0xff } else { 0x77 });
                    unit[128..].fill(0x7e);
                }
            }
        }
        u
    }

    #[test]
    fn products_equal_the_oracle_on_random_and_adversarial_words() {
        let mut rng = Rng(11);
        for blocks in [1usize, 3, 40, 160] {
            for kind in 0..5 {
                let u = units(blocks, kind, &mut rng);
                let columns: Vec<Vec<u16>> = (0..7)
                    .map(|c| {
                        (0..blocks * 16)
                            .map(|i| match c {
                                0 => 0,
                                1 => bf16_of(3.3e38),
                                2 => bf16_of(if i % 2 == 0 { -1e30 } else { 1e30 }),
                                3 => bf16_of(if i / 16 % 2 == 0 { 0.0 } else { rng.unit() * 1e-30 }),
                                _ => bf16_of(rng.unit() * 5.0),
                            })
                            .collect()
                    })
                    .collect();
                for g in [Scale::Multiplier(0.011), Scale::Divisor(57.0), Scale::Multiplier(1e-20)] {
                    let expected: Vec<w4a4::A4Row> = columns
                        .iter()
                        .map(|c| w4a4::quantise(&c.iter().map(|v| f32_of(*v)).collect::<Vec<_>>(), g))
                        .collect();
                    for isa in Isa::testable() {
                        let x: Vec<A4> = columns.iter().map(|c| A4::new(isa, c, g)).collect();
                        for (x, e) in x.iter().zip(&expected) {
                            assert_eq!((&x.codes, &x.scales), (&e.codes2, &e.scales), "{isa} {g:?}");
                        }
                        let refs: Vec<&A4> = x.iter().collect();
                        let mut out = vec![[0i64; 16]; 7];
                        sums(isa, &u, &refs, &mut out);
                        for (o, e) in out.iter().zip(&expected) {
                            assert_eq!(*o, oracle(&u, e), "{isa} blocks {blocks} kind {kind}");
                        }
                    }
                }
            }
        }
    }
}
