//! 16 rows of a matrix side by side in the order of additions of the experts (see `experts::chain`), with AVX-512.
//!
//! Rows are read as the other kernels read them, transposed in registers so that lanes are rows, and meet every column
//! before the next block is read.

use super::avx512::{padded, tail, whole};
use super::int8::{CHAINS, UNIT, chain, quantise};
use super::rows::{BLOCK, Kind, Rows};
use super::stored::{Planes, Row, SBf16, SFp8, SMxfp8, SNvfp4, SQ4, SQ5, SQ6, SQ8, Stored};
use super::vnni::{Codes, Nvfp4, Q4, Q5, Q6, Q8, transpose, units};
use crate::backend::cpu::isa::Isa;
use crate::backend::cpu::num::bf16_exact;
use crate::numerics::a8;
use std::arch::x86_64::*;

/// Rows side by side.
const LANES: usize = 16;
/// Spans of K, and of each the groups: span s = groups `floor(s n / 8) .. floor((s + 1) n / 8)`.
const SPANS: usize = 8;

/// Span of every group.
fn spans(groups: usize) -> Vec<u8> {
    let mut of = vec![0; groups];
    for s in 0..SPANS {
        of[s * groups / SPANS..(s + 1) * groups / SPANS].fill(s as u8);
    }
    of
}

/// Sums of one column: the open group, and every span.
#[derive(Clone, Copy)]
struct Sums {
    open: __m512,
    spans: [__m512; SPANS],
}

impl Sums {
    /// # Safety
    /// AVX-512 F.
    #[inline(always)]
    unsafe fn new() -> Self {
        // SAFETY: the caller's word.
        let zero = unsafe { _mm512_setzero_ps() };
        Sums { open: zero, spans: [zero; SPANS] }
    }

    /// # Safety
    /// AVX-512 F.
    #[inline(always)]
    unsafe fn total(&self) -> [f32; LANES] {
        let y = &self.spans;
        let mut out = [0f32; LANES];
        // SAFETY: the caller's word; `out` has 16 values.
        unsafe {
            let (a, b) = (_mm512_add_ps(y[0], y[1]), _mm512_add_ps(y[2], y[3]));
            let (c, d) = (_mm512_add_ps(y[4], y[5]), _mm512_add_ps(y[6], y[7]));
            let sum = _mm512_add_ps(_mm512_add_ps(a, b), _mm512_add_ps(c, d));
            _mm512_storeu_ps(out.as_mut_ptr(), sum);
        }
        out
    }
}

/// One block of 16 rows: 32 pairs of K, the first of a pair in the high half of its lane.
struct Pairs {
    codes: [__m512i; BLOCK / 2],
    scales: [[f32; LANES]; 4],
}

/// Reads block `b` of `n` rows.
#[inline(always)]
unsafe fn read<S: Stored, const EVEN_ODD: bool>(
    w: &Rows<'_>,
    first: usize,
    rows: &[Row; LANES],
    n: usize,
    b: usize,
    out: &mut Pairs,
) {
    // SAFETY: blocks below `whole` lie inside the rows, the tail is read from a padded copy.
    unsafe {
        let zero = _mm512_setzero_si512();
        let (mut lo, mut hi) = ([zero; LANES], [zero; LANES]);
        for i in 0..n {
            let copy;
            let (r, at) = if b < whole(w) {
                (rows[i], b)
            } else {
                copy = tail(w, first + i);
                (padded(&copy), 0)
            };
            let (c0, c1) = S::codes::<true>(&r, at);
            (lo[i], hi[i]) = if EVEN_ODD {
                (_mm512_unpacklo_epi16(c1, c0), _mm512_unpackhi_epi16(c1, c0))
            } else {
                (_mm512_rol_epi32::<16>(c0), _mm512_rol_epi32::<16>(c1))
            };
            let (s0, s1) = S::scales(&r, at);
            match S::KEPT {
                0 => {}
                16 => {
                    let mut lanes = [0f32; 16];
                    _mm512_storeu_ps(lanes.as_mut_ptr(), s0);
                    (0..4).for_each(|g| out.scales[g][i] = lanes[4 * g]);
                }
                _ => {
                    out.scales[0][i] = _mm512_cvtss_f32(s0);
                    out.scales[1][i] = _mm512_cvtss_f32(s1);
                }
            }
        }
        transpose(&mut lo);
        transpose(&mut hi);
        for d in 0..LANES {
            // Interleaving works on 128 bits: its low half holds pairs 8m .. 8m + 4 of each.
            let (a, b) = if EVEN_ODD { (d / 4 * 8 + d % 4, d / 4 * 8 + 4 + d % 4) } else { (d, LANES + d) };
            (out.codes[a], out.codes[b]) = (lo[d], hi[d]);
        }
    }
}

/// A block times `C` columns.
#[inline(always)]
unsafe fn meet<const C: usize>(
    p: &Pairs,
    b: usize,
    group: usize,
    of: &[u8],
    scaled: bool,
    x: &[&[u32]],
    sums: &mut [Sums],
) {
    // SAFETY: every column holds whole blocks of pairs; needs AVX-512 BF16.
    unsafe {
        let one = _mm512_set1_ps(1.0);
        let mut t = [_mm512_setzero_ps(); C];
        if group > BLOCK {
            (0..C).for_each(|c| t[c] = sums[c].open);
        }
        let size = group.min(BLOCK);
        for j in 0..BLOCK / size {
            let g = (b * BLOCK + j * size) / group;
            if g >= of.len() {
                break;
            }
            for q in j * size / 2..(j + 1) * size / 2 {
                let w = std::mem::transmute::<__m512i, __m512bh>(p.codes[q]);
                for c in 0..C {
                    let pair = _mm512_set1_epi32(*x[c].get_unchecked(b * BLOCK / 2 + q) as i32);
                    t[c] = _mm512_dpbf16_ps(t[c], w, std::mem::transmute::<__m512i, __m512bh>(pair));
                }
            }
            let ends = group <= BLOCK || (b + 1) * BLOCK % group == 0 || x[0].len() == (b + 1) * BLOCK / 2;
            let s = if scaled { _mm512_loadu_ps(p.scales[j].as_ptr()) } else { one };
            for c in 0..C {
                if ends {
                    let y = &mut sums[c].spans[usize::from(of[g]) % SPANS];
                    *y = _mm512_fmadd_ps(s, t[c], *y);
                    t[c] = _mm512_setzero_ps();
                }
                sums[c].open = t[c];
            }
        }
    }
}

#[inline(always)]
unsafe fn wide_rows<S: Stored, const EVEN_ODD: bool>(
    w: &Rows<'_>,
    first: usize,
    x: &[&[u32]],
    out: &mut [[f32; LANES]],
) {
    let n = (w.n() - first).min(LANES);
    let planes = Planes::new(w);
    let rows: [Row; LANES] = std::array::from_fn(|i| planes.at(first + i.min(n - 1)));
    let group = w.group().unwrap_or(32);
    let of = spans(w.k().div_ceil(group));
    // SAFETY: as `read` and `meet`.
    unsafe {
        // 16 rows side by side are 16 streams, which no prefetcher follows; the next 16 rows come while these are used.
        planes.ask(first + LANES, LANES);
        let mut sums = vec![Sums::new(); x.len()];
        let mut p = Pairs { codes: [_mm512_setzero_si512(); BLOCK / 2], scales: [[0.0; LANES]; 4] };
        for b in 0..w.blocks() {
            read::<S, EVEN_ODD>(w, first, &rows, n, b, &mut p);
            let scaled = S::KEPT > 0;
            for (x, sums) in x.chunks(4).zip(sums.chunks_mut(4)) {
                match x.len() {
                    1 => meet::<1>(&p, b, group, &of, scaled, x, sums),
                    2 => meet::<2>(&p, b, group, &of, scaled, x, sums),
                    3 => meet::<3>(&p, b, group, &of, scaled, x, sums),
                    _ => meet::<4>(&p, b, group, &of, scaled, x, sums),
                }
            }
        }
        for (o, s) in out.iter_mut().zip(&sums) {
            *o = s.total();
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c,bmi2")]
fn wide_entry(w: &Rows<'_>, first: usize, x: &[&[u32]], out: &mut [[f32; LANES]]) {
    use Kind::*;
    // SAFETY: the features are enabled here; `wide` checked the shapes.
    unsafe {
        match w.kind() {
            Bf16 => wide_rows::<SBf16, false>(w, first, x, out),
            Q4 => wide_rows::<SQ4, true>(w, first, x, out),
            Q5 => wide_rows::<SQ5, true>(w, first, x, out),
            Q6 => wide_rows::<SQ6, true>(w, first, x, out),
            Q8 => wide_rows::<SQ8, false>(w, first, x, out),
            Nvfp4Mul | Nvfp4Div | Nvfp4MulSwizzled | Nvfp4DivSwizzled => {
                wide_rows::<SNvfp4, true>(w, first, x, out)
            }
            Fp8Row | Fp8Tensor => wide_rows::<SFp8<false>, false>(w, first, x, out),
            Fp8Block => wide_rows::<SFp8<true>, false>(w, first, x, out),
            Mxfp8 => wide_rows::<SMxfp8, false>(w, first, x, out),
            F32 | F16 | Ggml(_) => {}
        }
    }
}

/// Pairs that a column of K values is padded to.
pub(crate) fn pairs(k: usize) -> usize {
    k.div_ceil(BLOCK) * BLOCK / 2
}

/// Whether [`wide`] takes a kind.
pub(crate) fn takes(kind: Kind) -> bool {
    !matches!(kind, Kind::F32 | Kind::F16 | Kind::Ggml(_))
}

/// Rows `first .. first + 16` (fewer at the end) times each column of swapped pairs (`experts::chain::swapped`, padded
/// with zeros to [`pairs`], none tiny), before row and tensor scales. For `Isa::Avx512Bf16` and kinds of [`takes`].
pub(crate) fn wide(w: &Rows<'_>, first: usize, x: &[&[u32]], out: &mut [[f32; LANES]]) {
    assert!(first < w.n() && x.len() == out.len() && x.iter().all(|x| x.len() == pairs(w.k())));
    // SAFETY: the caller's word about the processor.
    unsafe { wide_entry(w, first, x, out) }
}

/// A column of int8 activations for codes that are no small integers.
#[derive(Clone, Debug, Default)]
pub(crate) struct Exact {
    /// Codes as BF16, in pairs as [`wide`] takes them.
    pub(crate) pairs: Vec<u32>,
    /// A scale per 32.
    pub(crate) scales: Vec<f32>,
}

impl Exact {
    pub(crate) fn new(isa: Isa, x: &[u16]) -> Self {
        let width = x.len().next_multiple_of(UNIT);
        let (mut codes, mut scales) = (vec![0i8; width], vec![0.0; width / a8::GROUP]);
        quantise(isa, x, &mut codes, &mut scales);
        let wide = |c: i8| u32::from(bf16_exact(f32::from(c)));
        let mut pairs: Vec<u32> =
            codes.as_chunks::<2>().0.iter().map(|p| wide(p[0]) << 16 | wide(p[1])).collect();
        pairs.truncate(super::lanes::pairs(x.len()));
        Exact { pairs, scales }
    }
}

/// Codes from 1 on, and those below. With FP8, a sum of 32 products of either kind with integers up to 127 is exact in
/// FP32: multiples of 2^-3 below 2^21, and multiples of 2^-9 below 2^12. Codes of fewer bits fit all the more.
struct Parts {
    large: [__m512i; BLOCK / 2],
    small: [__m512i; BLOCK / 2],
}

impl Parts {
    /// # Safety
    /// AVX-512 BW.
    #[inline(always)]
    unsafe fn of(codes: &[__m512i; BLOCK / 2]) -> Self {
        // SAFETY: the caller's word.
        unsafe {
            let zero = _mm512_setzero_si512();
            let mut p = Parts { large: [zero; BLOCK / 2], small: [zero; BLOCK / 2] };
            for (q, w) in codes.iter().enumerate() {
                let size = _mm512_and_si512(*w, _mm512_set1_epi16(0x7fff));
                let large = _mm512_cmpge_epu16_mask(size, _mm512_set1_epi16(0x3f80));
                p.large[q] = _mm512_maskz_mov_epi16(large, *w);
                p.small[q] = _mm512_maskz_mov_epi16(!large, *w);
            }
            p
        }
    }

    /// Exact sum, rounded once, of `n` pairs from `q` times as many of a column.
    ///
    /// # Safety
    /// AVX-512 BF16; the pairs are there.
    #[inline(always)]
    unsafe fn sum(&self, q: usize, n: usize, x: *const u32) -> __m512 {
        // SAFETY: the caller's word.
        unsafe {
            let (mut large, mut small) = (_mm512_setzero_ps(), _mm512_setzero_ps());
            for i in 0..n {
                let x = std::mem::transmute::<__m512i, __m512bh>(_mm512_set1_epi32(*x.add(i) as i32));
                large =
                    _mm512_dpbf16_ps(large, std::mem::transmute::<__m512i, __m512bh>(self.large[q + i]), x);
                small =
                    _mm512_dpbf16_ps(small, std::mem::transmute::<__m512i, __m512bh>(self.small[q + i]), x);
            }
            _mm512_add_ps(large, small)
        }
    }
}

/// The sum of `n` pairs in FP64 in rising k, rounded once: BF16 codes have no common grid.
///
/// # Safety
/// AVX-512 F; the pairs are there.
#[inline(always)]
unsafe fn sum64(w: &[__m512i; BLOCK / 2], q: usize, n: usize, x: *const u32) -> __m512 {
    // SAFETY: the caller's word.
    unsafe {
        let (mut low, mut high) = (_mm512_setzero_pd(), _mm512_setzero_pd());
        let top = _mm512_set1_epi32(0xffff_0000u32 as i32);
        for i in 0..n {
            let (w, x) = (w[q + i], *x.add(i));
            let values = [(_mm512_and_si512(w, top), x & 0xffff_0000), (_mm512_slli_epi32::<16>(w), x << 16)];
            for (w, x) in values {
                let x = _mm512_set1_pd(f64::from(f32::from_bits(x)));
                let (a, b) = (_mm512_castsi512_si256(w), _mm512_extracti64x4_epi64::<1>(w));
                low = _mm512_fmadd_pd(_mm512_cvtps_pd(_mm256_castsi256_ps(a)), x, low);
                high = _mm512_fmadd_pd(_mm512_cvtps_pd(_mm256_castsi256_ps(b)), x, high);
            }
        }
        let (low, high) = (_mm512_cvtpd_ps(low), _mm512_cvtpd_ps(high));
        let both = _mm512_castps_pd(_mm512_castps256_ps512(low));
        _mm512_castpd_ps(_mm512_insertf64x4::<1>(both, _mm256_castps_pd(high)))
    }
}

#[inline(always)]
unsafe fn exact_rows<S: Stored, const EVEN_ODD: bool, const WORDS: bool>(
    w: &Rows<'_>,
    first: usize,
    x: &[&Exact],
    out: &mut [[f32; LANES]],
) {
    let n = (w.n() - first).min(LANES);
    let planes = Planes::new(w);
    let rows: [Row; LANES] = std::array::from_fn(|i| planes.at(first + i.min(n - 1)));
    let size = w.group().unwrap_or(a8::GROUP).min(a8::GROUP);
    let of = spans(w.k().div_ceil(size));
    // SAFETY: as `read`; columns hold whole blocks of pairs, and a scale for every 32 values of them.
    unsafe {
        planes.ask(first + LANES, LANES);
        let mut sums = vec![Sums::new(); x.len()];
        let mut p = Pairs { codes: [_mm512_setzero_si512(); BLOCK / 2], scales: [[1.0; LANES]; 4] };
        for b in 0..w.blocks() {
            read::<S, EVEN_ODD>(w, first, &rows, n, b, &mut p);
            let parts = if WORDS { None } else { Some(Parts::of(&p.codes)) };
            for j in 0..BLOCK / size {
                let (at, q) = (b * BLOCK + j * size, j * size / 2);
                let Some(span) = of.get(at / size) else { break };
                let scale = if S::KEPT == 16 { j } else { j * size / 32 };
                let scale = _mm512_loadu_ps(p.scales[scale].as_ptr());
                for (x, sums) in x.iter().zip(&mut sums) {
                    let pairs = x.pairs.as_ptr().add(b * BLOCK / 2 + q);
                    let t = match &parts {
                        Some(p) => p.sum(q, size / 2, pairs),
                        None => sum64(&p.codes, q, size / 2, pairs),
                    };
                    let f = _mm512_mul_ps(scale, _mm512_set1_ps(x.scales[at / a8::GROUP]));
                    let y = &mut sums.spans[usize::from(*span) % SPANS];
                    *y = _mm512_fmadd_ps(f, t, *y);
                }
            }
        }
        for (o, s) in out.iter_mut().zip(&sums) {
            *o = s.total();
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c,bmi2")]
fn exact_entry(w: &Rows<'_>, first: usize, x: &[&Exact], out: &mut [[f32; LANES]]) {
    use Kind::*;
    // SAFETY: the features are enabled here; `exact` checked the shapes.
    unsafe {
        match w.kind() {
            Bf16 => exact_rows::<SBf16, false, true>(w, first, x, out),
            Q4 => exact_rows::<SQ4, true, false>(w, first, x, out),
            Q5 => exact_rows::<SQ5, true, false>(w, first, x, out),
            Q6 => exact_rows::<SQ6, true, false>(w, first, x, out),
            Q8 => exact_rows::<SQ8, false, false>(w, first, x, out),
            Nvfp4Mul | Nvfp4Div | Nvfp4MulSwizzled | Nvfp4DivSwizzled => {
                exact_rows::<SNvfp4, true, false>(w, first, x, out)
            }
            Fp8Row | Fp8Tensor => exact_rows::<SFp8<false>, false, false>(w, first, x, out),
            Fp8Block => exact_rows::<SFp8<true>, false, false>(w, first, x, out),
            Mxfp8 => exact_rows::<SMxfp8, false, false>(w, first, x, out),
            F32 | F16 | Ggml(_) => {}
        }
    }
}

/// As [`wide`] with int8 columns, for all its kinds.
pub(crate) fn exact(w: &Rows<'_>, first: usize, x: &[&Exact], out: &mut [[f32; LANES]]) {
    assert!(first < w.n() && x.len() == out.len() && x.iter().all(|x| x.pairs.len() == pairs(w.k())));
    // SAFETY: the caller's word about the processor.
    unsafe { exact_entry(w, first, x, out) }
}

/// A column of int8 activations.
#[derive(Clone, Debug, Default)]
pub(crate) struct Quantised {
    /// Codes, padded with zeros to whole units.
    pub(crate) codes: Vec<i8>,
    /// A scale per 32.
    pub(crate) scales: Vec<f32>,
    /// Sums of 16 codes.
    pub(crate) sums: Vec<i32>,
}

impl Quantised {
    pub(crate) fn new(isa: Isa, x: &[u16]) -> Self {
        let width = x.len().next_multiple_of(UNIT);
        let mut q =
            Quantised { codes: vec![0; width], scales: vec![0.0; width / a8::GROUP], sums: Vec::new() };
        quantise(isa, x, &mut q.codes, &mut q.scales);
        q.sums.extend(q.codes.chunks_exact(16).map(|c| c.iter().map(|c| i32::from(*c)).sum::<i32>()));
        q
    }
}

/// The groups of 128 values of 16 rows times one column.
#[inline(always)]
unsafe fn meet_int8<S: Codes>(
    codes: &[[__m512i; 8]; 8],
    scales: &[__m512; LANES],
    unit: usize,
    of: &[u8],
    x: &Quantised,
    sums: &mut Sums,
) {
    // SAFETY: the column is padded to whole units; needs AVX-512 VNNI.
    unsafe {
        let per = UNIT / S::SIZE;
        for (j, codes) in codes.iter().enumerate().take(per) {
            let g = unit * per + j;
            let Some(span) = of.get(g) else { break };
            let at = g * S::SIZE;
            let sum: i32 = x.sums[at / 16..(at + S::SIZE) / 16].iter().sum();
            let mut t = _mm512_set1_epi32(-S::BIAS * sum);
            let quads = x.codes[at..at + S::SIZE].as_ptr().cast::<i32>();
            for (d, w) in codes.iter().enumerate().take(S::SIZE / 4) {
                t = _mm512_dpbusd_epi32(t, *w, _mm512_set1_epi32(quads.add(d).read_unaligned()));
            }
            let (mut s, mut t) = (scales[chain(g, S::SIZE)], _mm512_cvtepi32_ps(t));
            if S::SIZE == 16 {
                // Doubled codes over halved scales: moved back, exactly, so that the product of scales rounds as it should.
                s = _mm512_add_ps(s, s);
                t = _mm512_mul_ps(t, _mm512_set1_ps(0.5));
            }
            let f = _mm512_mul_ps(s, _mm512_set1_ps(x.scales[at / a8::GROUP]));
            let y = &mut sums.spans[usize::from(*span) % SPANS];
            *y = _mm512_fmadd_ps(f, t, *y);
        }
    }
}

#[inline(always)]
unsafe fn int8_rows<S: Codes>(w: &Rows<'_>, first: usize, x: &[&Quantised], out: &mut [[f32; LANES]]) {
    let n = (w.n() - first).min(LANES);
    let planes = Planes::new(w);
    let rows: [Row; LANES] = std::array::from_fn(|i| planes.at(first + i.min(n - 1)));
    let (k, groups) = (w.k(), w.k().div_ceil(S::SIZE));
    let of = spans(groups);
    // SAFETY: units below K lie inside the rows, the last one and the scales are masked.
    unsafe {
        planes.ask(first + LANES, LANES);
        let zero = _mm512_setzero_si512();
        let mut sums = vec![Sums::new(); x.len()];
        let mut scales = [_mm512_setzero_ps(); LANES];
        for u in 0..k.div_ceil(UNIT) {
            if u % units(S::SIZE) == 0 {
                let round = u / units(S::SIZE);
                let mut s = [zero; LANES];
                for (s, r) in s.iter_mut().zip(&rows) {
                    *s = _mm512_castps_si512(S::scales(r, round, groups - CHAINS * round));
                }
                transpose(&mut s);
                scales = s.map(|s| _mm512_castsi512_ps(s));
            }
            let (mut a, mut b) = ([zero; LANES], [zero; LANES]);
            for i in 0..n {
                let (x, y) = S::codes(&rows[i], u, k / 2 - 64 * u);
                (a[i], b[i]) = if S::EVEN_ODD {
                    (_mm512_unpacklo_epi8(x, y), _mm512_unpackhi_epi8(x, y))
                } else {
                    (x, y)
                };
            }
            transpose(&mut a);
            transpose(&mut b);
            let mut codes = [[zero; 8]; 8];
            for d in 0..LANES {
                let [(ga, da), (gb, db)] = super::vnni::words::<S>(d);
                codes[ga][da] = a[d];
                codes[gb][db] = b[d];
            }
            for (x, sums) in x.iter().zip(&mut sums) {
                meet_int8::<S>(&codes, &scales, u, &of, x, sums);
            }
        }
        for (o, s) in out.iter_mut().zip(&sums) {
            *o = s.total();
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c,bmi2")]
fn int8_entry(w: &Rows<'_>, first: usize, x: &[&Quantised], out: &mut [[f32; LANES]]) {
    // SAFETY: the features are enabled here; `int8` checked the shapes.
    unsafe {
        match w.kind() {
            Kind::Q4 => int8_rows::<Q4>(w, first, x, out),
            Kind::Q5 => int8_rows::<Q5>(w, first, x, out),
            Kind::Q6 => int8_rows::<Q6>(w, first, x, out),
            Kind::Q8 => int8_rows::<Q8>(w, first, x, out),
            k if k.is_nvfp4() => int8_rows::<Nvfp4>(w, first, x, out),
            _ => {}
        }
    }
}

/// As [`wide`] with int8 columns, for `Kind::integers`.
pub(crate) fn int8(w: &Rows<'_>, first: usize, x: &[&Quantised], out: &mut [[f32; LANES]]) {
    let width = w.k().next_multiple_of(UNIT);
    assert!(first < w.n() && x.len() == out.len() && x.iter().all(|x| x.codes.len() == width));
    // SAFETY: the caller's word about the processor.
    unsafe { int8_entry(w, first, x, out) }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{KINDS, Matrix, Rng, activations, shapes, wide};
    use super::*;
    use crate::backend::cpu::experts::chain::{Column, Panel, swapped};

    #[test]
    fn rows_side_by_side_are_the_experts_chains_bit_for_bit() {
        if !Isa::Avx512Bf16.available() {
            return;
        }
        let mut rng = Rng(41);
        for kind in KINDS.into_iter().filter(|k| takes(*k)) {
            for (n, k) in shapes(kind).into_iter().chain(wide(kind)) {
                let m = Matrix::random(kind, n, k, n % 2 == 1, &mut rng);
                let w = m.rows(0, n);
                for columns in [1usize, 3, 4, 7] {
                    let x = activations(columns, k, &mut rng, 2.0);
                    let pairs: Vec<Vec<u32>> = x
                        .chunks_exact(k)
                        .map(|x| {
                            let mut p = Vec::new();
                            swapped(x, &mut p);
                            p.resize(pairs(k), 0);
                            p
                        })
                        .collect();
                    let int8s: Vec<Quantised> =
                        x.chunks_exact(k).map(|x| Quantised::new(Isa::Avx512Bf16, x)).collect();
                    for first in (0..n).step_by(LANES) {
                        let mut panel = Panel::default();
                        panel.fill(Isa::Scalar, &w, first);
                        let same = |x: Vec<Column>, got: &[[f32; LANES]], what: &str| {
                            let mut expected = vec![[0f32; LANES]; columns];
                            panel.products(Isa::Scalar, &x.iter().collect::<Vec<_>>(), &mut expected);
                            for (a, b) in got.iter().zip(&expected) {
                                let rows = LANES.min(n - first);
                                let bits = |v: &[f32]| v.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
                                assert_eq!(bits(&a[..rows]), bits(&b[..rows]), "{kind:?} {n}x{k} {what}");
                            }
                        };
                        let mut got = vec![[0f32; LANES]; columns];
                        super::wide(
                            &w,
                            first,
                            &pairs.iter().map(Vec::as_slice).collect::<Vec<_>>(),
                            &mut got,
                        );
                        same(x.chunks_exact(k).map(Column::wide).collect(), &got, "16 bits");
                        let exacts: Vec<Exact> =
                            x.chunks_exact(k).map(|x| Exact::new(Isa::Avx512Bf16, x)).collect();
                        super::exact(&w, first, &exacts.iter().collect::<Vec<_>>(), &mut got);
                        same(x.chunks_exact(k).map(Column::int8).collect(), &got, "8 bits, any codes");
                        if kind.integers() {
                            super::int8(&w, first, &int8s.iter().collect::<Vec<_>>(), &mut got);
                            same(x.chunks_exact(k).map(Column::int8).collect(), &got, "8 bits");
                        }
                    }
                }
            }
        }
    }
}
