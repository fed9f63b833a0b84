//! Expert products with wide activations, in the order of additions that every backend shares (decisions.md A).
//!
//! Lanes are output rows. K is cut into scale groups (32 values where the format has none) and the groups into 8 spans,
//! span s = groups `floor(s n / 8) .. floor((s + 1) n / 8)`. In a group `t = fma(code, x, t)` in rising k; in a span
//! `y = fma(scale, t, y)` in rising groups; spans are added pairwise; row and tensor scales come last. With 8-bit
//! activations t is an exact integer sum, rounded once to FP32, over groups of at most 32, and the scale is
//! `fl(weight scale x activation scale)`. Groups with an offset (some blocks of GGUF files) add `y = fma(offset, u, y)`
//! after their scale, u the sum of the group's activations in rising k.

use super::super::isa::{Isa, per_isa};
use super::super::linear::Rows;
#[cfg(target_arch = "x86_64")]
use super::super::linear::lanes::Quantised;
use super::super::num::{E2M1, e4m3, f32_of};
use super::UNIT;
use crate::numerics::a8;

/// Spans of K.
pub(crate) const SPANS: usize = 8;
/// Output rows of a panel.
pub(crate) const LANES: usize = 16;

/// Groups of a span.
pub(crate) fn span(s: usize, groups: usize) -> std::ops::Range<usize> {
    s * groups / SPANS..(s + 1) * groups / SPANS
}

/// Spans added pairwise.
#[inline(always)]
pub(crate) fn pairwise(y: &[[f32; LANES]; SPANS]) -> [f32; LANES] {
    let mut out = [0f32; LANES];
    for l in 0..LANES {
        out[l] = ((y[0][l] + y[1][l]) + (y[2][l] + y[3][l])) + ((y[4][l] + y[5][l]) + (y[6][l] + y[7][l]));
    }
    out
}

/// An activation column.
pub(crate) enum Column {
    /// FP32 holding BF16 values.
    Wide(Vec<f32>),
    /// int8 codes, and a scale per 32.
    Int8(Vec<f32>, Vec<f32>),
}

impl Column {
    pub(crate) fn wide(x: &[u16]) -> Self {
        Column::Wide(x.iter().map(|v| f32_of(*v)).collect())
    }

    pub(crate) fn int8(x: &[u16]) -> Self {
        let mut codes = vec![0f32; x.len()];
        let mut scales = Vec::with_capacity(x.len().div_ceil(a8::GROUP));
        let mut q = [0i8; a8::GROUP];
        for (x, out) in x.chunks(a8::GROUP).zip(codes.chunks_mut(a8::GROUP)) {
            let v: Vec<f32> = x.iter().map(|v| f32_of(*v)).collect();
            scales.push(a8::quantise(&v, &mut q));
            out.iter_mut().zip(q).for_each(|(o, q)| *o = f32::from(q));
        }
        Column::Int8(codes, scales)
    }
}

/// 16 rows of exact codes and their group scales, lanes across rows; rows past the matrix are zero.
#[derive(Default)]
pub(crate) struct Panel {
    group: usize,
    codes: Vec<[f32; LANES]>,
    scales: Vec<[f32; LANES]>,
    /// Offsets beside the scales; empty where the storage has none.
    offsets: Vec<[f32; LANES]>,
}

impl Panel {
    /// Rows `first .. first + 16` of a row-major matrix.
    pub(crate) fn fill(&mut self, isa: Isa, w: &Rows<'_>, first: usize) {
        fill(isa, self, w, first);
    }

    #[inline(always)]
    fn fill_rows(&mut self, w: &Rows<'_>, first: usize) {
        let k = w.k();
        self.group = w.group().unwrap_or(32);
        let groups = k.div_ceil(self.group);
        self.codes.clear();
        self.codes.resize(k, [0.0; LANES]);
        self.scales.clear();
        self.scales.resize(groups, [0.0; LANES]);
        let mut values = vec![0f32; k];
        let mut scales = vec![0f32; groups];
        self.offsets.clear();
        for l in 0..LANES.min(w.n() - first) {
            let offsets = w.offsets(first + l);
            if !offsets.is_empty() {
                self.offsets.resize(groups, [0.0; LANES]);
                self.offsets.iter_mut().zip(offsets).for_each(|(c, v)| c[l] = v);
            }
            w.natural(first + l, &mut values, self.group, &mut scales);
            self.codes.iter_mut().zip(&values).for_each(|(c, v)| c[l] = *v);
            self.scales.iter_mut().zip(&scales).for_each(|(c, v)| c[l] = *v);
        }
    }

    /// One group of 16 rows of `nvfp4_expert_rg16_v1`.
    pub(crate) fn fill_rg16(&mut self, units: &[u8]) {
        self.group = 16;
        self.codes.clear();
        self.offsets.clear();
        self.scales.clear();
        for unit in units.chunks_exact(UNIT) {
            for k in 0..16 {
                let mut c = [0f32; LANES];
                for j in 0..8 {
                    let b = unit[k / 4 * 32 + 4 * j + k % 4];
                    c[j] = E2M1[usize::from(b & 15)];
                    c[8 + j] = E2M1[usize::from(b >> 4)];
                }
                self.codes.push(c);
            }
            self.scales.push(std::array::from_fn(|r| e4m3(unit[128 + r])));
        }
    }

    /// Products of the 16 rows with each column, before row and tensor scales.
    pub(crate) fn products(&self, isa: Isa, columns: &[&Column], out: &mut [[f32; LANES]]) {
        for (c, o) in columns.iter().zip(out) {
            match c {
                Column::Wide(x) => wide(isa, self, x, o),
                Column::Int8(x, s) => int8(isa, self, x, s, o),
            }
        }
    }
}

per_isa! {
    fn fill(p: &mut Panel, w: &Rows<'_>, first: usize) {
        p.fill_rows(w, first);
    }
}

per_isa! {
    fn wide(p: &Panel, x: &[f32], out: &mut [f32; LANES]) {
        let mut y = [[0f32; LANES]; SPANS];
        for (s, y) in y.iter_mut().enumerate() {
            for g in span(s, p.scales.len()) {
                let k = g * p.group..((g + 1) * p.group).min(p.codes.len());
                let mut t = [0f32; LANES];
                for (c, x) in p.codes[k.clone()].iter().zip(&x[k]) {
                    for l in 0..LANES {
                        t[l] = c[l].mul_add(*x, t[l]);
                    }
                }
                for l in 0..LANES {
                    y[l] = p.scales[g][l].mul_add(t[l], y[l]);
                }
                if let Some(offsets) = p.offsets.get(g) {
                    let u = x[g * p.group..((g + 1) * p.group).min(x.len())].iter().fold(0f32, |u, x| u + x);
                    for l in 0..LANES {
                        y[l] = offsets[l].mul_add(u, y[l]);
                    }
                }
            }
        }
        *out = pairwise(&y);
    }
}

per_isa! {
    fn int8(p: &Panel, x: &[f32], xs: &[f32], out: &mut [f32; LANES]) {
        // The shorter of the two groups: lengths are 16, 32, 64 or 128.
        let group = p.group.min(a8::GROUP);
        let groups = p.codes.len().div_ceil(group);
        let mut y = [[0f32; LANES]; SPANS];
        for (s, y) in y.iter_mut().enumerate() {
            for g in span(s, groups) {
                let k = g * group..((g + 1) * group).min(p.codes.len());
                // Products are multiples of 2^-9 below 2^31: FP64 holds their sums exactly.
                let mut t = [0f64; LANES];
                for (c, x) in p.codes[k.clone()].iter().zip(&x[k]) {
                    for l in 0..LANES {
                        t[l] += f64::from(c[l]) * f64::from(*x);
                    }
                }
                let (ws, xs) = (&p.scales[g * group / p.group], xs[g * group / a8::GROUP]);
                for l in 0..LANES {
                    y[l] = (ws[l] * xs).mul_add(t[l] as f32, y[l]);
                }
                if let Some(offsets) = p.offsets.get(g * group / p.group) {
                    // Integers below 2^12: their sum is exact.
                    let u = x[g * group..((g + 1) * group).min(x.len())].iter().fold(0f32, |u, x| u + x);
                    for l in 0..LANES {
                        y[l] = (offsets[l] * xs).mul_add(u, y[l]);
                    }
                }
            }
        }
        *out = pairwise(&y);
    }
}

/// BF16 columns as pairs in the order of a rising chain: of each dword the dot product takes the high half first.
pub(crate) fn swapped(x: &[u16], out: &mut Vec<u32>) {
    out.clear();
    out.extend(x.chunks(2).map(|p| u32::from(p[0]) << 16 | u32::from(p.get(1).copied().unwrap_or(0))));
}

/// As [`Panel::fill_rg16`] and [`Panel::products`] with AVX-512 and BF16 dot products; `x` are swapped pairs none of
/// which is tiny (see `Packed`).
#[cfg(target_arch = "x86_64")]
pub(crate) fn rg16(units: &[u8], x: &[&[u32]], out: &mut [[f32; LANES]]) {
    let blocks = units.len() / UNIT;
    assert!(x.len() == out.len() && x.iter().all(|x| x.len() == 8 * blocks));
    let mut c = 0;
    while c < x.len() {
        // SAFETY: the caller runs on `Isa::Avx512Bf16`; lengths are checked above.
        unsafe {
            match x.len() - c {
                1 => avx512::rg16::<1>(units, blocks, &x[c..], &mut out[c..]),
                2 => avx512::rg16::<2>(units, blocks, &x[c..], &mut out[c..]),
                3 => avx512::rg16::<3>(units, blocks, &x[c..], &mut out[c..]),
                _ => avx512::rg16::<4>(units, blocks, &x[c..], &mut out[c..]),
            }
        }
        c += 4;
    }
}

/// As [`Panel::fill_rg16`] and [`Panel::products`] of int8 columns, with AVX-512 VNNI.
#[cfg(target_arch = "x86_64")]
pub(crate) fn rg16_int8(units: &[u8], x: &[&Quantised], out: &mut [[f32; LANES]]) {
    let blocks = units.len() / UNIT;
    assert!(x.len() == out.len() && x.iter().all(|x| x.codes.len() >= 16 * blocks));
    for (x, out) in x.iter().zip(out) {
        // SAFETY: the caller runs on `Isa::Avx512Bf16`; lengths are checked above.
        unsafe { avx512::rg16_int8(units, blocks, x, out) }
    }
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use super::super::super::linear::lanes::Quantised;
    use super::super::super::num::E2M1;
    use super::super::a4;
    use super::{LANES, SPANS, UNIT, span};
    use crate::numerics::a8;
    use std::arch::x86_64::*;

    #[repr(align(64))]
    struct Table([u16; 32]);
    static CODES: Table = Table({
        let mut t = [0u16; 32];
        let mut i = 0;
        while i < 32 {
            t[i] = (E2M1[i % 16].to_bits() >> 16) as u16;
            i += 1;
        }
        t
    });

    /// # Safety
    /// AVX-512 F, BW, DQ, BF16; `units` holds `blocks` units, each of the first `C` columns `8 * blocks` pairs.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2")]
    pub(super) unsafe fn rg16<const C: usize>(
        units: &[u8],
        blocks: usize,
        x: &[&[u32]],
        out: &mut [[f32; LANES]],
    ) {
        // SAFETY: all reads are inside the unit or column of the block, by the caller's lengths.
        unsafe {
            let table = _mm512_loadu_si512(CODES.0.as_ptr().cast());
            let shift = _mm512_set_epi32(4, 4, 4, 4, 4, 4, 4, 4, 0, 0, 0, 0, 0, 0, 0, 0);
            // Bytes 0 and 1 (2 and 3) of each dword as 16-bit lanes, the first in the high half.
            let first = _mm512_set1_epi32(0x8000_8001u32 as i32);
            let second = _mm512_set1_epi32(0x8002_8003u32 as i32);
            let lanes = _mm512_broadcast_i32x4(_mm_set_epi32(0x0c0c_0c0c, 0x0808_0808, 0x0404_0404, 0));
            let (first, second) = (place(first, lanes), place(second, lanes));
            let rebias = _mm512_castsi512_ps(_mm512_set1_epi32((120 + 127) << 23));
            let mut total = [[_mm512_setzero_ps(); SPANS]; C];
            for s in 0..SPANS {
                let mut y = [_mm512_setzero_ps(); C];
                for b in span(s, blocks) {
                    let u = units.as_ptr().add(b * UNIT);
                    _mm_prefetch::<_MM_HINT_T0>(u.wrapping_add(4096).cast());
                    _mm_prefetch::<_MM_HINT_T0>(u.wrapping_add(4096 + 64).cast());
                    let mut t = [_mm512_setzero_ps(); C];
                    for q in 0..4 {
                        let v = _mm512_broadcast_i64x4(_mm256_loadu_si256(u.add(32 * q).cast()));
                        let v = _mm512_srlv_epi32(v, shift);
                        let w0 = _mm512_permutexvar_epi16(_mm512_shuffle_epi8(v, first), table);
                        let w1 = _mm512_permutexvar_epi16(_mm512_shuffle_epi8(v, second), table);
                        let (w0, w1) = (
                            std::mem::transmute::<__m512i, __m512bh>(w0),
                            std::mem::transmute::<__m512i, __m512bh>(w1),
                        );
                        for c in 0..C {
                            let p = x[c].as_ptr().add(8 * b + 2 * q);
                            let (x0, x1) =
                                (_mm512_set1_epi32(*p as i32), _mm512_set1_epi32(*p.add(1) as i32));
                            t[c] = _mm512_dpbf16_ps(t[c], w0, std::mem::transmute::<__m512i, __m512bh>(x0));
                            t[c] = _mm512_dpbf16_ps(t[c], w1, std::mem::transmute::<__m512i, __m512bh>(x1));
                        }
                    }
                    let e = _mm512_cvtepu8_epi32(_mm_loadu_si128(u.add(128).cast()));
                    let e = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32::<20>(e)), rebias);
                    for c in 0..C {
                        y[c] = _mm512_fmadd_ps(e, t[c], y[c]);
                    }
                }
                for c in 0..C {
                    total[c][s] = y[c];
                }
            }
            for c in 0..C {
                let mut y = [[0f32; LANES]; SPANS];
                for s in 0..SPANS {
                    _mm512_storeu_ps(y[s].as_mut_ptr(), total[c][s]);
                }
                out[c] = super::pairwise(&y);
            }
        }
    }

    /// # Safety
    /// AVX-512 F, BW, DQ, VNNI; `units` holds `blocks` units, x as many groups of 16 codes.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2")]
    pub(super) unsafe fn rg16_int8(units: &[u8], blocks: usize, x: &Quantised, out: &mut [f32; LANES]) {
        // SAFETY: all reads are inside the unit or column of the block, by the caller's lengths.
        unsafe {
            let rebias = _mm512_castsi512_ps(_mm512_set1_epi32((120 + 127) << 23));
            let half = _mm512_set1_ps(0.5);
            let mut y = [[0f32; LANES]; SPANS];
            for (s, y) in y.iter_mut().enumerate() {
                let mut sum = _mm512_setzero_ps();
                for b in span(s, blocks) {
                    let u = units.as_ptr().add(b * UNIT);
                    let mut t = _mm512_set1_epi32(-a4::BIAS * x.sums[b]);
                    let quads = x.codes.as_ptr().add(16 * b).cast::<i32>();
                    for q in 0..4 {
                        let w = a4::avx512::biased(u.add(32 * q));
                        t = _mm512_dpbusd_epi32(t, w, _mm512_set1_epi32(quads.add(q).read_unaligned()));
                    }
                    let e = _mm512_cvtepu8_epi32(_mm_loadu_si128(u.add(128).cast()));
                    let e = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32::<20>(e)), rebias);
                    let f = _mm512_mul_ps(e, _mm512_set1_ps(x.scales[16 * b / a8::GROUP]));
                    // Codes are doubled.
                    sum = _mm512_fmadd_ps(f, _mm512_mul_ps(_mm512_cvtepi32_ps(t), half), sum);
                }
                _mm512_storeu_ps(y.as_mut_ptr(), sum);
            }
            *out = super::pairwise(&y);
        }
    }

    /// Byte indices within a dword made indices within 128 bits; bytes with the top bit set stay zero.
    #[target_feature(enable = "avx512f,avx512bw")]
    fn place(within: __m512i, lanes: __m512i) -> __m512i {
        _mm512_or_si512(within, lanes)
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::linear::tests::Rng;
    use super::super::super::num::bf16_of;
    use super::*;

    /// The order of additions written for one row.
    fn oracle(codes: &[f32], scales: &[f32], group: usize, x: &[f32]) -> f32 {
        let n = scales.len();
        let y: Vec<f32> = (0..8)
            .map(|s| {
                (s * n / 8..(s + 1) * n / 8).fold(0f32, |y, g| {
                    let k = g * group..((g + 1) * group).min(codes.len());
                    let t = k.fold(0f32, |t, k| codes[k].mul_add(x[k], t));
                    scales[g].mul_add(t, y)
                })
            })
            .collect();
        ((y[0] + y[1]) + (y[2] + y[3])) + ((y[4] + y[5]) + (y[6] + y[7]))
    }

    #[test]
    fn chains_are_equal_on_every_instruction_set() {
        let mut rng = Rng(21);
        for blocks in [1usize, 5, 40, 63] {
            let mut units: Vec<u8> = (0..blocks * UNIT).map(|_| rng.u64() as u8).collect();
            units.chunks_exact_mut(UNIT).for_each(|u| u[128..].iter_mut().for_each(|s| *s %= 0x7f));
            let xs: Vec<Vec<u16>> =
                (0..6).map(|_| (0..16 * blocks).map(|_| bf16_of(rng.unit() * 3.0)).collect()).collect();
            let mut panel = Panel::default();
            panel.fill_rg16(&units);
            let columns: Vec<Column> = xs.iter().map(|x| Column::wide(x)).collect();
            let refs: Vec<&Column> = columns.iter().collect();
            let mut expected = vec![[0f32; LANES]; 6];
            for (c, x) in xs.iter().enumerate() {
                for r in 0..16 {
                    let codes: Vec<f32> = panel.codes.iter().map(|c| c[r]).collect();
                    let scales: Vec<f32> = panel.scales.iter().map(|c| c[r]).collect();
                    let x: Vec<f32> = x.iter().map(|v| f32_of(*v)).collect();
                    expected[c][r] = oracle(&codes, &scales, 16, &x);
                }
            }
            for isa in Isa::testable() {
                let mut out = vec![[0f32; LANES]; 6];
                panel.products(isa, &refs, &mut out);
                assert_eq!(out, expected, "{isa}");
            }
            #[cfg(target_arch = "x86_64")]
            if Isa::Avx512Bf16.available() {
                let pairs: Vec<Vec<u32>> = xs
                    .iter()
                    .map(|x| {
                        let mut p = Vec::new();
                        swapped(x, &mut p);
                        p
                    })
                    .collect();
                let refs: Vec<&[u32]> = pairs.iter().map(Vec::as_slice).collect();
                let mut out = vec![[0f32; LANES]; 6];
                rg16(&units, &refs, &mut out);
                assert_eq!(out, expected, "dot products");
            }
        }
    }

    #[test]
    fn eight_bit_activations_sum_exactly() {
        let mut rng = Rng(22);
        let units: Vec<u8> =
            (0..8 * UNIT).map(|i| if i % UNIT >= 128 { 0x38 } else { rng.u64() as u8 }).collect();
        let mut panel = Panel::default();
        panel.fill_rg16(&units);
        let x: Vec<u16> = (0..128).map(|_| bf16_of(rng.unit())).collect();
        let column = Column::int8(&x);
        let Column::Int8(q, s) = &column else { panic!() };
        let mut first = None;
        for isa in Isa::testable() {
            let mut out = vec![[0f32; LANES]];
            panel.products(isa, &[&column], &mut out);
            for r in 0..16 {
                let exact: f64 = (0..128)
                    .map(|k| f64::from(panel.codes[k][r]) * f64::from(q[k]) * f64::from(s[k / 32]))
                    .sum();
                assert!((f64::from(out[0][r]) - exact).abs() < 1e-4, "{} {exact}", out[0][r]);
            }
            assert_eq!(*first.get_or_insert(out[0]), out[0]);
        }
        #[cfg(target_arch = "x86_64")]
        if Isa::Avx512Bf16.available() {
            let mut out = vec![[0f32; LANES]];
            rg16_int8(&units, &[&Quantised::new(Isa::Avx512Bf16, &x)], &mut out);
            assert_eq!(first, Some(out[0]));
        }
    }
}
