//! How AVX-512 reads blocks of each storage: codes to exact BF16, scales to FP32.

use super::rows::{Fold, Rows};
use std::arch::x86_64::*;

/// Table of 32 16-bit lanes: BF16 of `f(i)`.
const fn table(values: [i16; 32]) -> [u16; 32] {
    let mut t = [0u16; 32];
    let mut i = 0;
    while i < 32 {
        t[i] = ((values[i] as f32).to_bits() >> 16) as u16;
        i += 1;
    }
    t
}

const fn ramp(from: i16, wrap: i16) -> [i16; 32] {
    let mut t = [0i16; 32];
    let mut i = 0;
    while i < 32 {
        t[i] = from + (i as i16 % wrap);
        i += 1;
    }
    t
}

const fn signed4() -> [i16; 32] {
    let mut t = ramp(0, 16);
    let mut i = 0;
    while i < 32 {
        if t[i] >= 8 {
            t[i] -= 16;
        }
        i += 1;
    }
    t
}

#[repr(align(64))]
struct Table([u16; 32]);

static INT4: Table = Table(table(signed4()));
static INT5_LOW: Table = Table(table(ramp(0, 16)));
static INT5_HIGH: Table = Table(table(ramp(-16, 16)));
static INT6_LOW: Table = Table(table(ramp(0, 32)));
static INT6_HIGH: Table = Table(table(ramp(-32, 32)));
static E2M1: Table = Table({
    let mut t = [0u16; 32];
    let mut i = 0;
    while i < 32 {
        t[i] = (super::super::num::E2M1[i % 16].to_bits() >> 16) as u16;
        i += 1;
    }
    t
});
/// E4M3 subnormals, m * 2^-9.
static E4M3_SUB: Table = Table({
    let mut t = [0u16; 32];
    let mut i = 0;
    while i < 32 {
        t[i] = (((i % 8) as f32 / 512.0).to_bits() >> 16) as u16;
        i += 1;
    }
    t
});

/// Planes of one row.
#[derive(Clone, Copy)]
pub(super) struct Row {
    pub(super) codes: *const u8,
    pub(super) high: *const u8,
    pub(super) scales: *const u8,
    pub(super) scale_step: usize,
}

impl Row {
    /// Asks for what lies [`AHEAD`] past `bytes` bytes of codes, to be called every 128 of them: a stream runs on over
    /// rows and pages, where the processor's own prefetchers start anew. One line of each two was as fast as both, or
    /// faster.
    ///
    /// # Safety
    /// SSE.
    #[inline(always)]
    pub(super) unsafe fn ahead(&self, bytes: usize) {
        // SAFETY: a prefetch of any address is harmless; the pointer is never dereferenced.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(self.codes.wrapping_add(bytes + AHEAD).cast()) }
    }

    /// Asks for the scales of a later row.
    ///
    /// # Safety
    /// SSE.
    #[inline(always)]
    pub(super) unsafe fn scales_ahead(&self) {
        // SAFETY: as above.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(self.scales.wrapping_add(512).cast()) }
    }
}

/// How far ahead codes are asked for: some 150 ns of reading.
const AHEAD: usize = 4096;

/// Where the rows of a matrix lie. Pointers to `Rows::n` rows stay inside the planes, whose lengths `Rows::new` checked.
pub(super) struct Planes<'a> {
    rows: &'a Rows<'a>,
    first: Row,
    codes: usize,
    high: usize,
    /// Bytes from a row's scales to the next row's, where they are that regular.
    scales: Option<usize>,
}

impl<'a> Planes<'a> {
    pub(super) fn new(rows: &'a Rows<'a>) -> Self {
        let (codes, high) = rows.kind().row_bytes(rows.k());
        let scales = rows.scale_stride();
        if rows.n() == 0 {
            let none = std::ptr::null();
            let first = Row { codes: none, high: none, scales: none, scale_step: 0 };
            return Planes { rows, first, codes, high, scales };
        }
        let (start, scale_step) = rows.scale_at(0);
        let first = Row {
            codes: rows.codes(0).as_ptr(),
            high: rows.high(0).as_ptr(),
            scales: rows.scales()[start..].as_ptr(),
            scale_step,
        };
        Planes { rows, first, codes, high, scales }
    }

    /// Asks for the codes of `n` rows from `r`, in rising order; past the matrix, for whatever is there.
    ///
    /// # Safety
    /// SSE.
    #[inline(always)]
    pub(super) unsafe fn ask(&self, r: usize, n: usize) {
        for (p, bytes) in [(self.first.codes, self.codes), (self.first.high, self.high)] {
            for line in (0..n * bytes).step_by(64) {
                // SAFETY: a prefetch of any address is harmless; the pointer is never dereferenced.
                unsafe { _mm_prefetch::<_MM_HINT_T1>(p.wrapping_add(r * bytes + line).cast()) }
            }
        }
    }

    /// Pointers of a row below `Rows::n`.
    #[inline(always)]
    pub(super) fn at(&self, r: usize) -> Row {
        debug_assert!(r < self.rows.n());
        let f = &self.first;
        let (codes, high) = (f.codes.wrapping_add(r * self.codes), f.high.wrapping_add(r * self.high));
        let scales = match self.scales {
            Some(bytes) => f.scales.wrapping_add(r * bytes),
            None => self.rows.scales()[self.rows.scale_at(r).0..].as_ptr(),
        };
        Row { codes, high, scales, scale_step: f.scale_step }
    }
}

/// How blocks of one storage are read. All functions need AVX-512 F, BW, VL, DQ, and a whole block behind the pointers.
pub(super) trait Stored {
    const FOLD: Fold;
    /// FP32 values a panel keeps for a block's scales: 0, 1, 2 (halves) or 16 (a value per lane).
    const KEPT: usize;
    unsafe fn codes<const HW: bool>(r: &Row, block: usize) -> (__m512i, __m512i);
    unsafe fn scales(r: &Row, block: usize) -> (__m512, __m512);
    /// Whether [`Stored::prepare`] converts the scales of a [`RUN`] of blocks at once.
    const PREPARED: bool = false;
    /// Writes the `RUN * KEPT` scales of the blocks from `block` on.
    unsafe fn prepare(_: &Row, _block: usize, _out: *mut f32) {}
}

/// Blocks whose scales are converted together.
pub(super) const RUN: usize = 8;

#[inline(always)]
unsafe fn load(t: &Table) -> __m512i {
    // SAFETY: a table is 64 bytes.
    unsafe { _mm512_loadu_si512(t.0.as_ptr().cast()) }
}

#[inline(always)]
unsafe fn half_scale(p: *const u8) -> __m512 {
    // SAFETY: the caller gives two readable bytes.
    unsafe { _mm512_cvtph_ps(_mm256_set1_epi16(p.cast::<i16>().read_unaligned())) }
}

#[inline(always)]
unsafe fn nibbles(p: *const u8) -> (__m512i, __m512i) {
    // SAFETY: the caller gives 32 readable bytes.
    unsafe {
        let v = _mm512_cvtepu8_epi16(_mm256_loadu_si256(p.cast()));
        (v, _mm512_srli_epi16::<4>(v))
    }
}

pub(super) struct SBf16;
impl Stored for SBf16 {
    const FOLD: Fold = Fold::Direct;
    const KEPT: usize = 0;
    #[inline(always)]
    unsafe fn codes<const HW: bool>(r: &Row, block: usize) -> (__m512i, __m512i) {
        // SAFETY: see the trait.
        unsafe {
            let p = r.codes.add(128 * block);
            (_mm512_loadu_si512(p.cast()), _mm512_loadu_si512(p.add(64).cast()))
        }
    }
    #[inline(always)]
    unsafe fn scales(_: &Row, _: usize) -> (__m512, __m512) {
        // SAFETY: see the trait.
        unsafe { (_mm512_setzero_ps(), _mm512_setzero_ps()) }
    }
}

pub(super) struct SQ4;
impl Stored for SQ4 {
    const FOLD: Fold = Fold::Whole;
    const KEPT: usize = 1;
    #[inline(always)]
    unsafe fn codes<const HW: bool>(r: &Row, block: usize) -> (__m512i, __m512i) {
        // SAFETY: see the trait.
        unsafe {
            let (even, odd) = nibbles(r.codes.add(32 * block));
            // The permutation reads 5 index bits; the fifth is the next nibble's, so the table repeats.
            let t = load(&INT4);
            (_mm512_permutexvar_epi16(even, t), _mm512_permutexvar_epi16(odd, t))
        }
    }
    #[inline(always)]
    unsafe fn scales(r: &Row, block: usize) -> (__m512, __m512) {
        // SAFETY: see the trait.
        unsafe {
            let s = half_scale(r.scales.add(2 * block));
            (s, s)
        }
    }
    const PREPARED: bool = true;
    #[inline(always)]
    unsafe fn prepare(r: &Row, block: usize, out: *mut f32) {
        // SAFETY: see the trait; a run of scales lies in the plane where a run of blocks does.
        unsafe {
            let s = _mm_loadu_si128(r.scales.add(2 * block).cast());
            _mm256_storeu_ps(out, _mm256_cvtph_ps(s));
        }
    }
}

pub(super) struct SQ5;
impl Stored for SQ5 {
    const FOLD: Fold = Fold::Whole;
    const KEPT: usize = 1;
    #[inline(always)]
    unsafe fn codes<const HW: bool>(r: &Row, block: usize) -> (__m512i, __m512i) {
        // SAFETY: see the trait.
        unsafe {
            let (even, odd) = nibbles(r.codes.add(32 * block));
            let h = r.high.add(8 * block).cast::<u64>().read_unaligned();
            let (e, o) =
                (_pext_u64(h, 0x5555_5555_5555_5555) as u32, _pext_u64(h, 0xaaaa_aaaa_aaaa_aaaa) as u32);
            let (low, high) = (load(&INT5_LOW), load(&INT5_HIGH));
            (
                _mm512_mask_permutexvar_epi16(_mm512_permutexvar_epi16(even, low), e, even, high),
                _mm512_mask_permutexvar_epi16(_mm512_permutexvar_epi16(odd, low), o, odd, high),
            )
        }
    }
    #[inline(always)]
    unsafe fn scales(r: &Row, block: usize) -> (__m512, __m512) {
        // SAFETY: see the trait.
        unsafe { SQ4::scales(r, block) }
    }
    const PREPARED: bool = true;
    #[inline(always)]
    unsafe fn prepare(r: &Row, block: usize, out: *mut f32) {
        // SAFETY: see the trait.
        unsafe { SQ4::prepare(r, block, out) }
    }
}

pub(super) struct SQ6;
impl Stored for SQ6 {
    const FOLD: Fold = Fold::Whole;
    const KEPT: usize = 1;
    #[inline(always)]
    unsafe fn codes<const HW: bool>(r: &Row, block: usize) -> (__m512i, __m512i) {
        // SAFETY: see the trait.
        unsafe {
            let (even, odd) = nibbles(r.codes.add(32 * block));
            // Byte d holds the high pairs of lanes 4d..4d+4: words 2d and 2d + 1 take its two nibbles.
            let h = _mm512_cvtepu8_epi32(_mm_loadu_si128(r.high.add(16 * block).cast()));
            let h = _mm512_or_si512(h, _mm512_slli_epi32::<12>(h));
            let mask = _mm512_set1_epi16(15);
            let e = _mm512_ternarylogic_epi32::<0xca>(mask, even, _mm512_slli_epi16::<4>(h));
            let o = _mm512_ternarylogic_epi32::<0xca>(mask, odd, _mm512_slli_epi16::<2>(h));
            let (low, high) = (load(&INT6_LOW), load(&INT6_HIGH));
            (_mm512_permutex2var_epi16(low, e, high), _mm512_permutex2var_epi16(low, o, high))
        }
    }
    #[inline(always)]
    unsafe fn scales(r: &Row, block: usize) -> (__m512, __m512) {
        // SAFETY: see the trait.
        unsafe { SQ4::scales(r, block) }
    }
    const PREPARED: bool = true;
    #[inline(always)]
    unsafe fn prepare(r: &Row, block: usize, out: *mut f32) {
        // SAFETY: see the trait.
        unsafe { SQ4::prepare(r, block, out) }
    }
}

/// 32 int8 as BF16.
#[inline(always)]
unsafe fn int8<const HW: bool>(p: *const u8) -> __m512i {
    // SAFETY: the caller gives 32 readable bytes; needs BF16 if `HW`.
    unsafe {
        let a = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast())));
        let b = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p.add(16).cast())));
        if HW {
            return std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(b, a));
        }
        let a = _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(_mm512_castps_si512(a)));
        let b = _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(_mm512_castps_si512(b)));
        _mm512_inserti64x4::<1>(_mm512_castsi256_si512(a), b)
    }
}

pub(super) struct SQ8;
impl Stored for SQ8 {
    const FOLD: Fold = Fold::Halves;
    const KEPT: usize = 2;
    #[inline(always)]
    unsafe fn codes<const HW: bool>(r: &Row, block: usize) -> (__m512i, __m512i) {
        // SAFETY: see the trait.
        unsafe {
            let p = r.codes.add(64 * block);
            (int8::<HW>(p), int8::<HW>(p.add(32)))
        }
    }
    #[inline(always)]
    unsafe fn scales(r: &Row, block: usize) -> (__m512, __m512) {
        // SAFETY: see the trait.
        unsafe {
            let p = r.scales.add(4 * block);
            (half_scale(p), half_scale(p.add(2)))
        }
    }
    const PREPARED: bool = true;
    #[inline(always)]
    unsafe fn prepare(r: &Row, block: usize, out: *mut f32) {
        // SAFETY: as above.
        unsafe {
            let s = _mm256_loadu_si256(r.scales.add(4 * block).cast());
            _mm512_storeu_ps(out, _mm512_cvtph_ps(s));
        }
    }
}

pub(super) struct SNvfp4;
impl Stored for SNvfp4 {
    const FOLD: Fold = Fold::Whole;
    const KEPT: usize = 16;
    #[inline(always)]
    unsafe fn codes<const HW: bool>(r: &Row, block: usize) -> (__m512i, __m512i) {
        // SAFETY: see the trait.
        unsafe {
            let (even, odd) = nibbles(r.codes.add(32 * block));
            let t = load(&E2M1);
            (_mm512_permutexvar_epi16(even, t), _mm512_permutexvar_epi16(odd, t))
        }
    }
    #[inline(always)]
    unsafe fn scales(r: &Row, block: usize) -> (__m512, __m512) {
        // SAFETY: see the trait.
        unsafe {
            let word = _mm512_set1_epi32(r.scales.add(r.scale_step * block).cast::<i32>().read_unaligned());
            // Lanes 4i..4i+4 take byte i, as bits 16..24; then E4M3 to FP32 as in `num::e4m3`.
            const Z: i32 = 0x8000_8080u32 as i32;
            let pick = _mm512_set_epi32(
                Z | 3 << 16,
                Z | 3 << 16,
                Z | 3 << 16,
                Z | 3 << 16,
                Z | 2 << 16,
                Z | 2 << 16,
                Z | 2 << 16,
                Z | 2 << 16,
                Z | 1 << 16,
                Z | 1 << 16,
                Z | 1 << 16,
                Z | 1 << 16,
                Z,
                Z,
                Z,
                Z,
            );
            let bits = _mm512_slli_epi32::<4>(_mm512_shuffle_epi8(word, pick));
            let s = _mm512_mul_ps(
                _mm512_castsi512_ps(bits),
                _mm512_castsi512_ps(_mm512_set1_epi32((120 + 127) << 23)),
            );
            (s, s)
        }
    }
}

#[inline(always)]
unsafe fn e4m3(p: *const u8) -> __m512i {
    // SAFETY: the caller gives 32 readable bytes.
    unsafe {
        let w = _mm512_cvtepu8_epi16(_mm256_loadu_si256(p.cast()));
        let magnitude = _mm512_and_si512(_mm512_slli_epi16::<4>(w), _mm512_set1_epi16(0x7f0));
        let normal = _mm512_add_epi16(magnitude, _mm512_set1_epi16(120 << 7));
        let tiny = _mm512_testn_epi16_mask(w, _mm512_set1_epi16(0x78));
        // Index bits above the mantissa are the sign, out of the permutation's reach.
        let v = _mm512_mask_permutexvar_epi16(normal, tiny, w, load(&E4M3_SUB));
        // v | (w << 8 & 0x8000)
        _mm512_ternarylogic_epi32::<0xf8>(v, _mm512_slli_epi16::<8>(w), _mm512_set1_epi16(-0x8000))
    }
}

/// E4M3 codes; the parameter says where the scales are.
pub(super) struct SFp8<const BLOCKED: bool>;
impl<const BLOCKED: bool> Stored for SFp8<BLOCKED> {
    const FOLD: Fold = if BLOCKED { Fold::Whole } else { Fold::Direct };
    const KEPT: usize = if BLOCKED { 1 } else { 0 };
    #[inline(always)]
    unsafe fn codes<const HW: bool>(r: &Row, block: usize) -> (__m512i, __m512i) {
        // SAFETY: see the trait.
        unsafe {
            let p = r.codes.add(64 * block);
            (e4m3(p), e4m3(p.add(32)))
        }
    }
    #[inline(always)]
    unsafe fn scales(r: &Row, block: usize) -> (__m512, __m512) {
        // SAFETY: see the trait.
        unsafe {
            if !BLOCKED {
                return (_mm512_setzero_ps(), _mm512_setzero_ps());
            }
            let s = _mm512_set1_ps(r.scales.add(4 * (block / 2)).cast::<f32>().read_unaligned());
            (s, s)
        }
    }
}

pub(super) struct SMxfp8;
impl Stored for SMxfp8 {
    const FOLD: Fold = Fold::Halves;
    const KEPT: usize = 2;
    #[inline(always)]
    unsafe fn codes<const HW: bool>(r: &Row, block: usize) -> (__m512i, __m512i) {
        // SAFETY: see the trait.
        unsafe { SFp8::<false>::codes::<HW>(r, block) }
    }
    #[inline(always)]
    unsafe fn scales(r: &Row, block: usize) -> (__m512, __m512) {
        // SAFETY: see the trait.
        unsafe {
            let p = r.scales.add(2 * block);
            use super::super::num::e8m0;
            (_mm512_set1_ps(e8m0(p.read())), _mm512_set1_ps(e8m0(p.add(1).read())))
        }
    }
    const PREPARED: bool = true;
    #[inline(always)]
    unsafe fn prepare(r: &Row, block: usize, out: *mut f32) {
        // SAFETY: as above.
        unsafe {
            let w = _mm512_cvtepu8_epi32(_mm_loadu_si128(r.scales.add(2 * block).cast()));
            let zero = _mm512_testn_epi32_mask(w, w);
            let s = _mm512_mask_mov_epi32(_mm512_slli_epi32::<23>(w), zero, _mm512_set1_epi32(0x0040_0000));
            _mm512_storeu_ps(out, _mm512_castsi512_ps(s));
        }
    }
}
