//! Int8 activations times integer codes with AVX-512 VNNI: bit for bit `int8::portable`.
//!
//! Codes become unsigned bytes, a bias above their value, for `vpdpbusd` multiplies unsigned by signed; the bias times the
//! sum of the activations is taken off the integer sum again.

use super::super::isa::Isa;
use super::avx512::sums;
use super::int8::{CHAINS, Int8, TILE, Tiles, UNIT};
use super::out::Out;
use super::rows::{Kind, Rows};
use super::stored::{Planes, Row};
use crate::numerics::w4a4::A4Row;
use std::arch::x86_64::*;
use std::cell::RefCell;
use std::ops::Range;

/// How 128 codes of one storage are read. All functions need AVX-512 F, BW, VL, DQ.
pub(super) trait Codes {
    /// Added to every code.
    const BIAS: i32;
    /// Values of a group.
    const SIZE: usize = 32;
    /// Whether codes come as even ones, odd ones; else in their order.
    const EVEN_ODD: bool = true;
    /// Units of 128 bytes of codes.
    const LINES: usize = 2;
    /// The largest biased code: says how far sums fit 16 bits.
    const MOST: i32;
    /// Codes of 128 values from `unit`, of which `bytes` bytes of nibbles (at most 64) exist.
    unsafe fn codes(r: &Row, unit: usize, bytes: usize) -> (__m512i, __m512i);
    /// Scales of 16 groups from the round's first at their chains; zero from group `groups` on.
    unsafe fn scales(r: &Row, round: usize, groups: usize) -> __m512;
}

/// Low and high nibbles of 64 bytes.
#[inline(always)]
unsafe fn nibbles(v: __m512i) -> (__m512i, __m512i) {
    // SAFETY: needs AVX-512 F and BW: the entry points below enable them.
    unsafe {
        let low = _mm512_set1_epi8(15);
        (_mm512_and_si512(v, low), _mm512_and_si512(_mm512_srli_epi16::<4>(v), low))
    }
}

/// A mask of the first `n` of at most 64 lanes.
#[inline(always)]
fn first(n: usize) -> u64 {
    if n >= 64 { u64::MAX } else { (1 << n) - 1 }
}

/// FP16 scales of groups of 64, each serving two of a round's groups of 32, at their chains.
#[inline(always)]
unsafe fn scales64(r: &Row, round: usize, groups: usize) -> __m512 {
    // SAFETY: the mask ends at the row's last scale.
    unsafe {
        let p = r.scales.add(16 * round).cast::<i16>();
        let s = _mm_maskz_loadu_epi16(first(groups.div_ceil(2).min(8)) as u8, p);
        // Chain 4m + j holds group 4j + m, scale 2j + m / 2.
        let at = _mm512_set_epi32(7, 5, 3, 1, 7, 5, 3, 1, 6, 4, 2, 0, 6, 4, 2, 0);
        _mm512_permutexvar_ps(at, _mm512_castps256_ps512(_mm256_cvtph_ps(s)))
    }
}

pub(super) struct Q4;
impl Codes for Q4 {
    const BIAS: i32 = 8;
    const MOST: i32 = 15;
    #[inline(always)]
    unsafe fn codes(r: &Row, unit: usize, _: usize) -> (__m512i, __m512i) {
        // SAFETY: see the trait; stored rows are whole units.
        unsafe {
            let v = _mm512_loadu_si512(r.codes.add(64 * unit).cast());
            // Two's complement plus 8: the top bit of each nibble turned, (v & 15) ^ 8.
            let (low, top) = (_mm512_set1_epi8(15), _mm512_set1_epi8(8));
            let turned = |v| _mm512_ternarylogic_epi32::<0x78>(top, v, low);
            (turned(v), turned(_mm512_srli_epi16::<4>(v)))
        }
    }
    #[inline(always)]
    unsafe fn scales(r: &Row, round: usize, groups: usize) -> __m512 {
        // SAFETY: see the trait.
        unsafe { scales64(r, round, groups) }
    }
}

pub(super) struct Q5;
impl Codes for Q5 {
    const BIAS: i32 = 16;
    const MOST: i32 = 31;
    #[inline(always)]
    unsafe fn codes(r: &Row, unit: usize, _: usize) -> (__m512i, __m512i) {
        // SAFETY: see the trait.
        unsafe {
            let (even, odd) = nibbles(_mm512_loadu_si512(r.codes.add(64 * unit).cast()));
            let h = r.high.add(16 * unit).cast::<u64>();
            let (a, b) = (h.read_unaligned(), h.add(1).read_unaligned());
            const EVEN: u64 = 0x5555_5555_5555_5555;
            let e = _pext_u64(a, EVEN) | _pext_u64(b, EVEN) << 32;
            let o = _pext_u64(a, !EVEN) | _pext_u64(b, !EVEN) << 32;
            // The fifth bit is the sign: turned, it is 16 above.
            let bit = _mm512_set1_epi8(16);
            (_mm512_mask_add_epi8(even, !e, even, bit), _mm512_mask_add_epi8(odd, !o, odd, bit))
        }
    }
    #[inline(always)]
    unsafe fn scales(r: &Row, round: usize, groups: usize) -> __m512 {
        // SAFETY: see the trait.
        unsafe { scales64(r, round, groups) }
    }
}

pub(super) struct Q6;
impl Codes for Q6 {
    const BIAS: i32 = 32;
    const MOST: i32 = 63;
    #[inline(always)]
    unsafe fn codes(r: &Row, unit: usize, _: usize) -> (__m512i, __m512i) {
        // SAFETY: see the trait.
        unsafe {
            let (even, odd) = nibbles(_mm512_loadu_si512(r.codes.add(64 * unit).cast()));
            // A byte holds the high pairs of 4 values, the nibbles of which are 2 bytes.
            let h = _mm512_cvtepu8_epi16(_mm256_loadu_si256(r.high.add(32 * unit).cast()));
            let (lower, upper) = (_mm512_set1_epi16(0x0030), _mm512_set1_epi16(0x3000));
            let turn = _mm512_set1_epi8(0x20);
            let pick = |near: __m512i, far: __m512i| {
                _mm512_or_si512(_mm512_and_si512(near, lower), _mm512_and_si512(far, upper))
            };
            let e = pick(_mm512_slli_epi16::<4>(h), _mm512_slli_epi16::<8>(h));
            let o = pick(_mm512_slli_epi16::<2>(h), _mm512_slli_epi16::<6>(h));
            (
                _mm512_xor_si512(_mm512_or_si512(even, e), turn),
                _mm512_xor_si512(_mm512_or_si512(odd, o), turn),
            )
        }
    }
    #[inline(always)]
    unsafe fn scales(r: &Row, round: usize, groups: usize) -> __m512 {
        // SAFETY: see the trait.
        unsafe { scales64(r, round, groups) }
    }
}

pub(super) struct Q8;
impl Codes for Q8 {
    const BIAS: i32 = 128;
    const LINES: usize = 1;
    const MOST: i32 = 255;
    const EVEN_ODD: bool = false;
    #[inline(always)]
    unsafe fn codes(r: &Row, unit: usize, _: usize) -> (__m512i, __m512i) {
        // SAFETY: see the trait; stored rows are whole units.
        unsafe {
            let turn = _mm512_set1_epi8(-128);
            let p = r.codes.add(128 * unit);
            (
                _mm512_xor_si512(_mm512_loadu_si512(p.cast()), turn),
                _mm512_xor_si512(_mm512_loadu_si512(p.add(64).cast()), turn),
            )
        }
    }
    #[inline(always)]
    unsafe fn scales(r: &Row, round: usize, groups: usize) -> __m512 {
        // SAFETY: the mask ends at the row's last scale.
        unsafe {
            let p = r.scales.add(32 * round).cast::<i16>();
            let s = _mm256_maskz_loadu_epi16(first(groups.min(16)) as u16, p);
            // Chain 4m + j holds group 4j + m.
            let at = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
            _mm512_permutexvar_ps(at, _mm512_cvtph_ps(s))
        }
    }
}

pub(super) struct Nvfp4;
impl Codes for Nvfp4 {
    const BIAS: i32 = 12;
    const MOST: i32 = 24;
    const SIZE: usize = 16;
    #[inline(always)]
    unsafe fn codes(r: &Row, unit: usize, bytes: usize) -> (__m512i, __m512i) {
        // SAFETY: see the trait; the mask ends at the row's end.
        unsafe {
            let v = _mm512_maskz_loadu_epi8(first(bytes), r.codes.add(64 * unit).cast());
            // 12 + doubled E2M1 value of each code.
            let table = _mm512_broadcast_i32x4(_mm_setr_epi8(
                12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0,
            ));
            let (even, odd) = nibbles(v);
            (_mm512_shuffle_epi8(table, even), _mm512_shuffle_epi8(table, odd))
        }
    }
    #[inline(always)]
    unsafe fn scales(r: &Row, round: usize, groups: usize) -> __m512 {
        // SAFETY: the mask, or the count of whole words, ends at the row's last scale.
        unsafe {
            let s = if r.scale_step == 4 {
                _mm_maskz_loadu_epi8(first(groups.min(16)) as u16, r.scales.add(16 * round).cast())
            } else {
                let word = |i: usize| match 4 * i < groups {
                    true => r.scales.add(r.scale_step * (4 * round + i)).cast::<i32>().read_unaligned(),
                    false => 0,
                };
                _mm_setr_epi32(word(0), word(1), word(2), word(3))
            };
            // Chain 4m + 2j + i holds group 8j + 2m + i.
            let s = _mm_shuffle_epi8(s, _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15));
            // E4M3 as in `num::e4m3`, and the half that the doubled codes are over.
            _mm512_mul_ps(
                _mm512_castsi512_ps(_mm512_slli_epi32::<20>(_mm512_cvtepu8_epi32(s))),
                _mm512_castsi512_ps(_mm512_set1_epi32((120 + 127 - 1) << 23)),
            )
        }
    }
}

/// Sums of the groups of 128 products: four of 32 values, one in the four lanes of each 128 bits; or pairs of lanes.
#[inline(always)]
unsafe fn unit<S: Codes>(w: (__m512i, __m512i), x: *const i8) -> __m512i {
    // SAFETY: 128 codes are behind x; needs VNNI.
    unsafe {
        let (x0, x1) = (_mm512_loadu_si512(x.cast()), _mm512_loadu_si512(x.add(64).cast()));
        let a = _mm512_dpbusd_epi32(_mm512_setzero_si512(), w.0, x0);
        if S::EVEN_ODD {
            return _mm512_dpbusd_epi32(a, w.1, x1);
        }
        let b = _mm512_dpbusd_epi32(_mm512_setzero_si512(), w.1, x1);
        _mm512_add_epi32(_mm512_shuffle_i32x4::<0x88>(a, b), _mm512_shuffle_i32x4::<0xdd>(a, b))
    }
}

/// Units of a round of 16 groups.
pub(super) const fn units(size: usize) -> usize {
    CHAINS * size / UNIT
}

/// Sums of a round's groups at their chains, added to `start`.
#[inline(always)]
unsafe fn gather<S: Codes>(t: [__m512i; 4], start: __m512i) -> __m512i {
    // A lane holds 8 products with activation codes of at most 127.
    const fn fits<S: Codes>(products: i32) -> bool {
        products * S::MOST * 127 <= i16::MAX as i32
    }
    // SAFETY: needs AVX-512 F, BW and VNNI.
    unsafe {
        let ones = _mm512_set1_epi16(1);
        if S::SIZE == 16 {
            // Lanes as 16 bits, neighbours added.
            return _mm512_dpwssd_epi32(start, _mm512_packs_epi32(t[0], t[1]), ones);
        }
        if S::EVEN_ODD && fits::<S>(8) {
            let ab = _mm512_madd_epi16(_mm512_packs_epi32(t[0], t[1]), ones);
            let cd = _mm512_madd_epi16(_mm512_packs_epi32(t[2], t[3]), ones);
            if fits::<S>(16) {
                return _mm512_dpwssd_epi32(start, _mm512_packs_epi32(ab, cd), ones);
            }
            let (a, b) = (_mm512_castsi512_ps(ab), _mm512_castsi512_ps(cd));
            let even = _mm512_castps_si512(_mm512_shuffle_ps::<0x88>(a, b));
            let odd = _mm512_castps_si512(_mm512_shuffle_ps::<0xdd>(a, b));
            return _mm512_add_epi32(start, _mm512_add_epi32(even, odd));
        }
        let two = |a, b| _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
        let (ab, cd) = (two(t[0], t[1]), two(t[2], t[3]));
        let sum = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
        _mm512_add_epi32(start, sum)
    }
}

/// Packed columns from `column` on.
struct Columns {
    codes: *const i8,
    width: usize,
    scales: *const f32,
    /// Minus bias x sum of each group.
    start: *const i32,
    rounds: usize,
}

impl Columns {
    fn new<S: Codes>(x: &Int8, column: usize) -> Self {
        let (codes, lanes) = x.rows(S::SIZE, S::BIAS, S::EVEN_ODD);
        let (width, rounds) = (x.width(), x.width().div_ceil(S::SIZE * CHAINS));
        let at = column * rounds * CHAINS;
        Columns {
            codes: codes[column * width..].as_ptr(),
            width,
            scales: lanes.scales[at..].as_ptr(),
            start: lanes.start[at..].as_ptr(),
            rounds,
        }
    }
}

/// One round of a row: adds its 16 groups to the chains of `C` columns. `k` is the row's length; a round that is not
/// `WHOLE` ends there.
#[inline(always)]
unsafe fn round<S: Codes, const C: usize, const WHOLE: bool>(
    p: &Row,
    k: usize,
    round: usize,
    x: &Columns,
    acc: &mut [__m512; C],
) {
    // SAFETY: units below K lie inside the row, the last one is masked, as are scales; x holds `width` codes and
    // `rounds` x 16 scales and sums a column.
    unsafe {
        let mut t = [[_mm512_setzero_si512(); 4]; C];
        let n = units(S::SIZE) * round;
        for u in 0..units(S::SIZE) {
            if WHOLE || UNIT * (n + u) < k {
                if u % S::LINES == 0 {
                    p.ahead(128 / S::LINES * (n + u));
                }
                let v = S::codes(p, n + u, if WHOLE { 64 } else { k / 2 - 64 * (n + u) });
                for c in 0..C {
                    t[c][u] = unit::<S>(v, x.codes.add(c * x.width + UNIT * (n + u)));
                }
            }
        }
        let ws = S::scales(p, round, if WHOLE { CHAINS } else { k.div_ceil(S::SIZE) - CHAINS * round });
        for c in 0..C {
            let at = (c * x.rounds + round) * CHAINS;
            let t = _mm512_cvtepi32_ps(gather::<S>(t[c], _mm512_loadu_si512(x.start.add(at).cast())));
            let f = _mm512_mul_ps(ws, _mm512_loadu_ps(x.scales.add(at)));
            acc[c] = _mm512_fmadd_ps(f, t, acc[c]);
        }
    }
}

/// One row times `C` columns: the chains of each.
#[inline(always)]
unsafe fn one<S: Codes, const C: usize>(p: &Row, k: usize, x: &Columns) -> [__m512; C] {
    // SAFETY: as `round`.
    unsafe {
        p.scales_ahead();
        let mut acc = [_mm512_setzero_ps(); C];
        let whole = k / (S::SIZE * CHAINS);
        for r in 0..whole {
            round::<S, C, true>(p, k, r, x, &mut acc);
        }
        if whole < x.rounds {
            round::<S, C, false>(p, k, whole, x, &mut acc);
        }
        acc
    }
}

/// Rows `range` times `C` columns from `column`.
#[inline(always)]
unsafe fn few<S: Codes, const C: usize>(
    w: &Rows<'_>,
    range: Range<usize>,
    x: &Int8,
    column: usize,
    out: &Out<'_>,
) {
    let (rows, x) = (Planes::new(w), Columns::new::<S>(x, column));
    // SAFETY: as `one`.
    unsafe {
        let mut at = range.start;
        while at < range.end {
            let n = (range.end - at).min(4);
            let mut acc = [[_mm512_setzero_ps(); 4]; C];
            for i in 0..n {
                let lanes = one::<S, C>(&rows.at(at + i), w.k(), &x);
                for c in 0..C {
                    acc[c][i] = lanes[c];
                }
            }
            for c in 0..C {
                for (i, y) in sums(acc[c]).iter().take(n).enumerate() {
                    out.put(column + c, at + i, w.finish(at + i, *y));
                }
            }
            at += n;
        }
    }
}

/// Rows of a panel: the lanes of its vectors.
const LANES: usize = 16;

/// 16 rows of biased codes, groups in folding order: `[group, 4 codes of each of 16 rows]`, scales `[group, 16]`.
#[derive(Default)]
struct Panel {
    codes: Vec<Line>,
    scales: Vec<[f32; LANES]>,
}

/// A cache line.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line(#[expect(dead_code, reason = "read and written by vectors")] [u8; 64]);

thread_local! {
    static SCRATCH: RefCell<Panel> = RefCell::new(Panel::default());
}

/// `v[i]` word j to `v[j]` word i, 16 x 16 words of 4 bytes.
#[inline(always)]
pub(super) unsafe fn transpose(v: &mut [__m512i; 16]) {
    // SAFETY: needs AVX-512 F.
    unsafe {
        for i in (0..16).step_by(2) {
            let (a, b) = (v[i], v[i + 1]);
            (v[i], v[i + 1]) = (_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
        }
        for i in (0..16).step_by(4) {
            let (a, b, c, d) = (v[i], v[i + 1], v[i + 2], v[i + 3]);
            v[i] = _mm512_unpacklo_epi64(a, c);
            v[i + 1] = _mm512_unpackhi_epi64(a, c);
            v[i + 2] = _mm512_unpacklo_epi64(b, d);
            v[i + 3] = _mm512_unpackhi_epi64(b, d);
        }
        // Now v[4i + j], 128 bits m: word 4m + j of rows 4i .. 4i + 4.
        for j in 0..4 {
            let (a, b, c, d) = (v[j], v[4 + j], v[8 + j], v[12 + j]);
            let (ab0, ab1) = (_mm512_shuffle_i32x4::<0x88>(a, b), _mm512_shuffle_i32x4::<0xdd>(a, b));
            let (cd0, cd1) = (_mm512_shuffle_i32x4::<0x88>(c, d), _mm512_shuffle_i32x4::<0xdd>(c, d));
            v[j] = _mm512_shuffle_i32x4::<0x88>(ab0, cd0);
            v[8 + j] = _mm512_shuffle_i32x4::<0xdd>(ab0, cd0);
            v[4 + j] = _mm512_shuffle_i32x4::<0x88>(ab1, cd1);
            v[12 + j] = _mm512_shuffle_i32x4::<0xdd>(ab1, cd1);
        }
    }
}

/// (group, word in the group) of word `d` of the first and of the second half of a unit's bytes, in the order of K where
/// codes come in order, else with even and odd ones interleaved in each 128 bits.
#[inline(always)]
pub(super) fn words<S: Codes>(d: usize) -> [(usize, usize); 2] {
    match (S::EVEN_ODD, S::SIZE) {
        (false, _) => [(d / 8, d % 8), (2 + d / 8, d % 8)],
        (true, 16) => [(d / 4 * 2, d % 4), (d / 4 * 2 + 1, d % 4)],
        (true, _) => [(d / 4, d % 4), (d / 4, 4 + d % 4)],
    }
}

/// Fills a panel with rows `at .. at + n`.
#[inline(always)]
unsafe fn fill<S: Codes>(w: &Rows<'_>, at: usize, n: usize, x: &Tiles, places: &[usize], panel: &mut Panel) {
    let groups = x.order.len();
    panel.codes.resize(groups * S::SIZE / 4, Line([0; 64]));
    panel.scales.resize(groups, [0.0; LANES]);
    let rounds = groups.div_ceil(CHAINS);
    // SAFETY: as `one`; the panel has just been sized, and `places` holds positions below `groups`.
    unsafe {
        let planes = Planes::new(w);
        let rows: [Row; LANES] = std::array::from_fn(|i| planes.at(at + i.min(n - 1)));
        let to = panel.codes.as_mut_ptr().cast::<__m512i>();
        for u in 0..w.k().div_ceil(UNIT) {
            let (mut a, mut b) = ([_mm512_setzero_si512(); LANES], [_mm512_setzero_si512(); LANES]);
            for i in 0..n {
                let (x, y) = S::codes(&rows[i], u, w.k() / 2 - 64 * u);
                (a[i], b[i]) = if S::EVEN_ODD {
                    (_mm512_unpacklo_epi8(x, y), _mm512_unpackhi_epi8(x, y))
                } else {
                    (x, y)
                };
            }
            transpose(&mut a);
            transpose(&mut b);
            for d in 0..16 {
                let base = UNIT / S::SIZE * u;
                for ((g, word), v) in words::<S>(d).into_iter().zip([a[d], b[d]]) {
                    let place = places[base + g];
                    _mm512_store_si512(to.add(place * (S::SIZE / 4) + word), v);
                }
            }
        }
        let real = w.k().div_ceil(S::SIZE);
        for round in 0..rounds {
            let mut s = [_mm512_setzero_si512(); LANES];
            for (s, r) in s.iter_mut().zip(&rows).take(n) {
                *s = _mm512_castps_si512(S::scales(r, round, real.saturating_sub(CHAINS * round)));
            }
            transpose(&mut s);
            for (g, place) in places[CHAINS * round..].iter().take(CHAINS).enumerate() {
                let of_rows = s[super::int8::chain(g, S::SIZE)];
                _mm512_storeu_si512(panel.scales[*place].as_mut_ptr().cast(), of_rows);
            }
        }
    }
}

/// 16 panel rows times `C` columns of a tile.
#[inline(always)]
unsafe fn tile<S: Codes, const C: usize>(panel: &Panel, x: &Tiles, tile: usize) -> [__m512; C] {
    // SAFETY: the panel and the tile hold all groups of `x.order`, whose chains `counts` adds up to.
    unsafe {
        let groups = x.order.len();
        let mut w = panel.codes.as_ptr().cast::<__m512i>();
        let mut ws = panel.scales.as_ptr();
        let mut xs = x.codes.as_ptr().add(tile * groups * S::SIZE * TILE).cast::<i32>();
        let mut fs = x.scales.as_ptr().add(tile * groups * TILE);
        let mut init = x.init.as_ptr().add(tile * groups * TILE);
        let mut level = [[_mm512_setzero_ps(); C]; 5];
        for (n, count) in x.counts.iter().enumerate() {
            let mut y = [_mm512_setzero_ps(); C];
            for _ in 0..*count {
                let mut t = [_mm512_setzero_si512(); C];
                for c in 0..C {
                    t[c] = _mm512_set1_epi32(*init.add(c));
                }
                for d in 0..S::SIZE / 4 {
                    let v = _mm512_load_si512(w.add(d));
                    for c in 0..C {
                        let x = _mm512_set1_epi32(xs.add(TILE * d + c).read_unaligned());
                        t[c] = _mm512_dpbusd_epi32(t[c], v, x);
                    }
                }
                let s = _mm512_loadu_ps(ws.cast());
                for c in 0..C {
                    let f = _mm512_mul_ps(s, _mm512_set1_ps(*fs.add(c)));
                    y[c] = _mm512_fmadd_ps(f, _mm512_cvtepi32_ps(t[c]), y[c]);
                }
                w = w.add(S::SIZE / 4);
                ws = ws.add(1);
                xs = xs.add(TILE * S::SIZE / 4);
                fs = fs.add(TILE);
                init = init.add(TILE);
            }
            // A finished pair folds, and so on up: see `int8::FOLDING`.
            let mut l = 0;
            while n >> l & 1 == 1 {
                for c in 0..C {
                    y[c] = _mm512_add_ps(level[l][c], y[c]);
                }
                l += 1;
            }
            level[l] = y;
        }
        level[4]
    }
}

#[inline(always)]
unsafe fn many<S: Codes>(w: &Rows<'_>, range: Range<usize>, x: &Int8, out: &Out<'_>) {
    let Some(t) = x.tiles(S::SIZE, S::BIAS) else { return };
    // Taken out of its cell, for a closure would not inherit the enabled instructions.
    let mut panel = SCRATCH.take();
    let mut places = vec![0; t.order.len()];
    t.order.iter().enumerate().for_each(|(at, g)| places[*g] = at);
    // SAFETY: as `fill` and `tile`.
    unsafe {
        for at in range.clone().step_by(LANES) {
            let n = (range.end - at).min(LANES);
            fill::<S>(w, at, n, t, &places, &mut panel);
            for (k, first) in (0..x.columns()).step_by(TILE).enumerate() {
                let left = (x.columns() - first).min(TILE);
                let mut y = [_mm512_setzero_ps(); TILE];
                if left > TILE / 2 {
                    y = tile::<S, TILE>(&panel, t, k);
                } else {
                    y[..TILE / 2].copy_from_slice(&tile::<S, { TILE / 2 }>(&panel, t, k));
                }
                for c in 0..left {
                    let mut lanes = [0f32; LANES];
                    _mm512_storeu_ps(lanes.as_mut_ptr(), y[c]);
                    for (i, v) in lanes.iter_mut().enumerate().take(n) {
                        *v = w.finish(at + i, *v);
                    }
                    out.put_rows(first + c, at, &lanes[..n]);
                }
            }
        }
    }
    SCRATCH.set(panel);
}

/// A 4-bit column of the canonical product: doubled codes, even and odd ones of each 128; at their chains the block
/// scales times 2^9, and minus bias x sum of the block's codes.
pub(crate) struct Nibbles {
    codes: Vec<i8>,
    scales: Vec<i32>,
    start: Vec<i32>,
}

impl Nibbles {
    pub(crate) fn new(x: &A4Row) -> Self {
        let width = x.codes2.len().next_multiple_of(UNIT);
        let rounds = x.scales.len().div_ceil(CHAINS) * CHAINS;
        let mut n = Nibbles { codes: vec![0; width], scales: vec![0; rounds], start: vec![0; rounds] };
        for (k, code) in x.codes2.iter().enumerate() {
            n.codes[k / UNIT * UNIT + k % 2 * (UNIT / 2) + k % UNIT / 2] = *code;
        }
        for (g, (scale, codes)) in x.scales.iter().zip(x.codes2.chunks_exact(Nvfp4::SIZE)).enumerate() {
            let at = g / CHAINS * CHAINS + super::int8::chain(g, Nvfp4::SIZE);
            n.scales[at] = *scale;
            n.start[at] = -Nvfp4::BIAS * codes.iter().map(|c| i32::from(*c)).sum::<i32>();
        }
        n
    }
}

/// `sum_b (sum c_w c_a) s_w s_a` of one row and `C` columns.
///
/// # Safety
/// As `one`; columns are as wide as the row.
#[inline(always)]
unsafe fn integers<const C: usize>(p: &Row, k: usize, x: &[Nibbles; C]) -> [i64; C] {
    // SAFETY: units below K lie inside the row, the last one is masked, as are scales; columns are padded to whole
    // units and rounds.
    unsafe {
        p.scales_ahead();
        let zero = _mm512_setzero_si512();
        let mut acc = [zero; C];
        let groups = k / Nvfp4::SIZE;
        for round in 0..groups.div_ceil(CHAINS) {
            let mut t = [[zero; 4]; C];
            for u in 0..units(Nvfp4::SIZE) {
                let unit_at = units(Nvfp4::SIZE) * round + u;
                if UNIT * unit_at < k {
                    p.ahead(64 * unit_at);
                    let v = Nvfp4::codes(p, unit_at, k / 2 - 64 * unit_at);
                    for c in 0..C {
                        t[c][u] = unit::<Nvfp4>(v, x[c].codes.as_ptr().add(UNIT * unit_at));
                    }
                }
            }
            // Half of E4M3 values, times 2^10: integers below 2^18.
            let ws = Nvfp4::scales(p, round, groups - CHAINS * round);
            let ws = _mm512_cvtps_epi32(_mm512_mul_ps(ws, _mm512_set1_ps(1024.0)));
            for c in 0..C {
                let start = _mm512_loadu_si512(x[c].start.as_ptr().add(CHAINS * round).cast());
                // |sum of 16 products of codes up to 12| <= 2304: with a scale below 2^30.
                let sum = _mm512_mullo_epi32(gather::<Nvfp4>(t[c], start), ws);
                let xs = _mm512_loadu_si512(x[c].scales.as_ptr().add(CHAINS * round).cast());
                let odd = _mm512_mul_epi32(_mm512_srli_epi64::<32>(sum), _mm512_srli_epi64::<32>(xs));
                acc[c] = _mm512_add_epi64(acc[c], _mm512_add_epi64(_mm512_mul_epi32(sum, xs), odd));
            }
        }
        let mut out = [0; C];
        for c in 0..C {
            out[c] = _mm512_reduce_add_epi64(acc[c]);
        }
        out
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c,bmi2")]
fn integer_rows<const C: usize>(
    w: &Rows<'_>,
    range: Range<usize>,
    x: &[Nibbles; C],
    put: &dyn Fn(usize, usize, i64),
) {
    let rows = Planes::new(w);
    for r in range {
        // SAFETY: the features are enabled here; `nibbles_product` checked the shapes.
        let sums = unsafe { integers::<C>(&rows.at(r), w.k(), x) };
        sums.iter().enumerate().for_each(|(c, s)| put(c, r, *s));
    }
}

/// Integer sums of the canonical 4-bit product, NVFP4 rows `range` times every column, on a processor with VNNI:
/// `put(column, row, sum)`.
pub(crate) fn nibbles_product(
    w: &Rows<'_>,
    range: Range<usize>,
    x: &[Nibbles],
    put: impl Fn(usize, usize, i64),
) {
    let width = w.k().next_multiple_of(UNIT);
    assert!(w.kind().is_nvfp4() && range.end <= w.n() && x.iter().all(|x| x.codes.len() == width));
    let (fours, rest) = x.as_chunks::<4>();
    for (n, x) in fours.iter().enumerate() {
        // SAFETY: the caller's word about the processor.
        unsafe { integer_rows(w, range.clone(), x, &|c, r, s| put(4 * n + c, r, s)) }
    }
    for (n, x) in rest.iter().enumerate() {
        let one = std::array::from_ref(x);
        // SAFETY: as above.
        unsafe { integer_rows(w, range.clone(), one, &|_, r, s| put(4 * fours.len() + n, r, s)) }
    }
}

/// Columns up to which rows are read one by one.
pub(super) const FEW: usize = 4;

#[inline(always)]
unsafe fn any<S: Codes>(w: &Rows<'_>, range: Range<usize>, x: &Int8, out: &Out<'_>) {
    // SAFETY: as the callees.
    unsafe {
        match x.columns() {
            1 => few::<S, 1>(w, range, x, 0, out),
            2 => few::<S, 2>(w, range, x, 0, out),
            3 => few::<S, 3>(w, range, x, 0, out),
            FEW => few::<S, FEW>(w, range, x, 0, out),
            _ => many::<S>(w, range, x, out),
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c,bmi2")]
fn with_vnni(w: &Rows<'_>, range: Range<usize>, x: &Int8, out: &Out<'_>) {
    // SAFETY: the features are enabled here; `product` checked the shapes.
    unsafe {
        match w.kind() {
            Kind::Q4 => any::<Q4>(w, range, x, out),
            Kind::Q5 => any::<Q5>(w, range, x, out),
            Kind::Q6 => any::<Q6>(w, range, x, out),
            Kind::Q8 => any::<Q8>(w, range, x, out),
            k if k.is_nvfp4() => any::<Nvfp4>(w, range, x, out),
            _ => {}
        }
    }
}

/// The bias of a kind's codes.
fn bias(kind: Kind) -> i32 {
    match kind {
        Kind::Q4 => Q4::BIAS,
        Kind::Q5 => Q5::BIAS,
        Kind::Q6 => Q6::BIAS,
        Kind::Q8 => Q8::BIAS,
        _ => Nvfp4::BIAS,
    }
}

/// Makes the forms of x that a product with `kind` reads.
pub(super) fn prepare(isa: Isa, kind: Kind, x: &mut Int8) {
    if x.columns() <= FEW {
        x.for_rows(isa, kind.int8_group(), bias(kind), kind.even_odd());
    } else {
        x.for_panel(kind.int8_group(), bias(kind));
    }
}

/// Rows `range` of an integer kind times the prepared columns, on a processor with VNNI.
pub(super) fn product(w: &Rows<'_>, range: Range<usize>, x: &Int8, out: &Out<'_>) {
    assert!(range.end <= w.n() && x.width() == w.k().next_multiple_of(UNIT));
    if x.columns() == 0 || w.k() == 0 {
        return;
    }
    // SAFETY: the caller's word about the processor.
    unsafe { with_vnni(w, range, x, out) }
}
