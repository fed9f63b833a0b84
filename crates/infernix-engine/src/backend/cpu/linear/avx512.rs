//! AVX-512 dot products straight from stored codes, and over a panel of expanded rows.
//!
//! Bit for bit the sums of `portable.rs`. One step multiplies 32 BF16 pairs into 16 lanes (`vdpbf16ps`, or two fused
//! multiply-adds where the processor lacks it or an activation is so small that the instruction's flushing to zero
//! could show). Nibbles become BF16 integers by one table permutation of 16-bit lanes.

use super::out::Out;
use super::rows::{BLOCK, Fold, Kind, Rows};
use super::stored::{Planes, RUN, Row, SBf16, SFp8, SMxfp8, SNvfp4, SQ4, SQ5, SQ6, SQ8, Stored};
use std::arch::x86_64::*;
use std::cell::RefCell;
use std::ops::Range;

/// Rows and columns of a register tile.
const TILE: usize = 4;
/// Bytes of expanded codes a panel may have: together with the columns of a tile it stays in a second-level cache.
const PANEL: usize = 192 << 10;

/// Packed columns: `width` elements each, and of int8 activations two scales a block.
#[derive(Clone, Copy)]
pub(crate) struct Columns<'a> {
    pub(crate) x: &'a [u16],
    pub(crate) width: usize,
    pub(crate) scales: &'a [f32],
}

impl Columns<'_> {
    /// Scales of a block; a pointer to nothing where there are none.
    #[inline(always)]
    fn scale(&self, column: usize, block: usize) -> *const f32 {
        self.scales.as_ptr().wrapping_add(2 * (column * (self.width / BLOCK) + block))
    }
}

/// 32 pairs of BF16 into 16 lanes, the second of each pair first.
#[inline(always)]
unsafe fn dot<const HW: bool>(acc: __m512, w: __m512i, x: __m512i) -> __m512 {
    // SAFETY: needs AVX-512 F, and BF16 if `HW`: the entry points below enable them.
    unsafe {
        if HW {
            let (w, x) =
                (std::mem::transmute::<__m512i, __m512bh>(w), std::mem::transmute::<__m512i, __m512bh>(x));
            _mm512_dpbf16_ps(acc, w, x)
        } else {
            let top = _mm512_set1_epi32(0xffff_0000u32 as i32);
            let (wh, xh) = (_mm512_and_si512(w, top), _mm512_and_si512(x, top));
            let (wl, xl) = (_mm512_slli_epi32::<16>(w), _mm512_slli_epi32::<16>(x));
            let acc = _mm512_fmadd_ps(_mm512_castsi512_ps(wh), _mm512_castsi512_ps(xh), acc);
            _mm512_fmadd_ps(_mm512_castsi512_ps(wl), _mm512_castsi512_ps(xl), acc)
        }
    }
}

/// The 64 BF16 words at `p`.
#[inline(always)]
unsafe fn pair(p: *const u16) -> (__m512i, __m512i) {
    // SAFETY: the caller gives 128 readable bytes; needs AVX-512 F.
    unsafe { (_mm512_loadu_si512(p.cast()), _mm512_loadu_si512(p.add(32).cast())) }
}

/// One block of one row and column; `xs` are the two scales of int8 activations.
#[inline(always)]
unsafe fn step<S: Stored, const HW: bool, const INT8: bool>(
    acc: __m512,
    w: (__m512i, __m512i),
    s: (__m512, __m512),
    x: (__m512i, __m512i),
    xs: *const f32,
) -> __m512 {
    // SAFETY: as `dot`; two scales are behind `xs` if `INT8`.
    unsafe {
        if INT8 {
            let (x0, x1) = (_mm512_set1_ps(xs.read()), _mm512_set1_ps(xs.add(1).read()));
            let t = dot::<HW>(_mm512_setzero_ps(), w.0, x.0);
            let (s0, s1) = match S::FOLD {
                Fold::Direct => (x0, x1),
                Fold::Whole => (_mm512_mul_ps(s.0, x0), _mm512_mul_ps(s.0, x1)),
                Fold::Halves => (_mm512_mul_ps(s.0, x0), _mm512_mul_ps(s.1, x1)),
            };
            let acc = _mm512_fmadd_ps(s0, t, acc);
            return _mm512_fmadd_ps(s1, dot::<HW>(_mm512_setzero_ps(), w.1, x.1), acc);
        }
        match S::FOLD {
            Fold::Direct => dot::<HW>(dot::<HW>(acc, w.0, x.0), w.1, x.1),
            Fold::Whole => {
                let t = dot::<HW>(dot::<HW>(_mm512_setzero_ps(), w.0, x.0), w.1, x.1);
                _mm512_fmadd_ps(s.0, t, acc)
            }
            Fold::Halves => {
                let acc = _mm512_fmadd_ps(s.0, dot::<HW>(_mm512_setzero_ps(), w.0, x.0), acc);
                _mm512_fmadd_ps(s.1, dot::<HW>(_mm512_setzero_ps(), w.1, x.1), acc)
            }
        }
    }
}

/// Sums of the lanes of four accumulators, in the order of `num::tree`.
#[inline(always)]
pub(super) unsafe fn sums(a: [__m512; TILE]) -> [f32; TILE] {
    // SAFETY: needs AVX-512 F.
    unsafe {
        let ab =
            _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(a[0], a[1]), _mm512_shuffle_f32x4::<0xee>(a[0], a[1]));
        let cd =
            _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(a[2], a[3]), _mm512_shuffle_f32x4::<0xee>(a[2], a[3]));
        let four = _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(ab, cd), _mm512_shuffle_f32x4::<0xdd>(ab, cd));
        let two = _mm512_add_ps(four, _mm512_permute_ps::<0x4e>(four));
        let one = _mm512_add_ps(two, _mm512_permute_ps::<0xb1>(two));
        let picked = _mm512_castps512_ps128(_mm512_permutexvar_ps(
            _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 12, 8, 4, 0),
            one,
        ));
        let mut out = [0f32; TILE];
        _mm_storeu_ps(out.as_mut_ptr(), picked);
        out
    }
}

/// A row's last, short block with zeros behind it.
#[repr(align(64))]
pub(super) struct Tail {
    codes: [u8; 128],
    scales: [u8; 8],
}

/// Blocks that can be read in place.
#[inline(always)]
pub(super) fn whole(w: &Rows<'_>) -> usize {
    use Kind::*;
    match w.kind() {
        // Stored rows are padded to 128.
        Q4 | Q5 | Q6 | Q8 => w.blocks(),
        _ => w.k() / BLOCK,
    }
}

/// # Safety
/// AVX-512 F and BW.
#[inline(always)]
pub(super) unsafe fn tail(w: &Rows<'_>, r: usize) -> Tail {
    let mut t = Tail { codes: [0; 128], scales: [0; 8] };
    let codes = &w.codes(r)[whole(w) * w.kind().block_bytes().0..];
    // SAFETY: a mask of the slice's length, under the whole 128 bytes of a block: nothing beyond it is read.
    unsafe {
        let mask = |n: usize| if n >= 64 { u64::MAX } else { (1 << n) - 1 };
        let (p, n) = (codes.as_ptr().cast::<i8>(), codes.len());
        _mm512_storeu_si512(t.codes.as_mut_ptr().cast(), _mm512_maskz_loadu_epi8(mask(n), p));
        if n > 64 {
            let rest = _mm512_maskz_loadu_epi8(mask(n - 64), p.add(64));
            _mm512_storeu_si512(t.codes.as_mut_ptr().add(64).cast(), rest);
        }
    }
    let (start, step) = w.scale_at(r);
    let (from, bytes) = match w.kind() {
        // Two blocks share a tile's scale.
        Kind::Fp8Block => (start + 4 * (whole(w) / 2), 4),
        Kind::Mxfp8 => (start + step * whole(w), w.k().div_ceil(32) - 2 * whole(w)),
        k if k.is_nvfp4() => (start + step * whole(w), w.k() / 16 - 4 * whole(w)),
        _ => return t,
    };
    t.scales[..bytes].copy_from_slice(&w.scales()[from..from + bytes]);
    t
}

/// A tail as a row of one block.
#[inline(always)]
pub(super) fn padded(t: &Tail) -> Row {
    Row { codes: t.codes.as_ptr(), high: t.codes.as_ptr(), scales: t.scales.as_ptr(), scale_step: 0 }
}

/// One row times `C` columns, codes expanded in registers: the lanes of each column's sum. The row is read from its
/// first byte to its last, and rows after one another: a single rising stream is what the processor's prefetchers
/// follow (a tile of four rows read side by side reached a third of the rate of memory).
#[inline(always)]
unsafe fn direct<S: Stored, const HW: bool, const INT8: bool, const C: usize>(
    w: &Rows<'_>,
    pointers: Row,
    r: usize,
    x: Columns<'_>,
    column: usize,
) -> [__m512; C] {
    // SAFETY: row pointers come from checked slices; blocks below `whole` lie inside them, the tail is read from a
    // padded copy; x holds `width` = whole padded blocks per column.
    unsafe {
        let mut acc = [_mm512_setzero_ps(); C];
        let xs = x.x.as_ptr().add(column * x.width);
        let n = whole(w);
        let mut b = 0;
        if S::PREPARED {
            let mut scales = [0f32; RUN * 2];
            while b + RUN <= n {
                S::prepare(&pointers, b, scales.as_mut_ptr());
                let bytes = w.kind().block_bytes().0;
                for line in (0..RUN * bytes).step_by(128) {
                    pointers.ahead(b * bytes + line);
                }
                for j in 0..RUN {
                    let codes = S::codes::<HW>(&pointers, b + j);
                    let s = &scales[j * S::KEPT..];
                    let s = (_mm512_set1_ps(s[0]), _mm512_set1_ps(s[S::KEPT - 1]));
                    for c in 0..C {
                        let v = pair(xs.add(c * x.width + (b + j) * BLOCK));
                        acc[c] = step::<S, HW, INT8>(acc[c], codes, s, v, x.scale(column + c, b + j));
                    }
                }
                b += RUN;
            }
        }
        let bytes = w.kind().block_bytes().0;
        while b < n {
            if b * bytes % 128 == 0 {
                pointers.ahead(b * bytes);
            }
            let (codes, scales) = (S::codes::<HW>(&pointers, b), S::scales(&pointers, b));
            for c in 0..C {
                let v = pair(xs.add(c * x.width + b * BLOCK));
                acc[c] = step::<S, HW, INT8>(acc[c], codes, scales, v, x.scale(column + c, b));
            }
            b += 1;
        }
        if n < w.blocks() {
            let t = tail(w, r);
            let padded = padded(&t);
            let (codes, scales) = (S::codes::<HW>(&padded, 0), S::scales(&padded, 0));
            for c in 0..C {
                let v = pair(xs.add(c * x.width + n * BLOCK));
                acc[c] = step::<S, HW, INT8>(acc[c], codes, scales, v, x.scale(column + c, n));
            }
        }
        acc
    }
}

/// Rows `range` times `C` columns from `column`.
#[inline(always)]
unsafe fn direct_rows<S: Stored, const HW: bool, const INT8: bool, const C: usize>(
    w: &Rows<'_>,
    range: Range<usize>,
    x: Columns<'_>,
    column: usize,
    out: &Out<'_>,
) {
    let planes = Planes::new(w);
    // SAFETY: as `direct`.
    unsafe {
        let mut first = range.start;
        while first < range.end {
            let n = (range.end - first).min(TILE);
            let mut acc = [[_mm512_setzero_ps(); TILE]; C];
            for i in 0..n {
                let lanes = direct::<S, HW, INT8, C>(w, planes.at(first + i), first + i, x, column);
                for c in 0..C {
                    acc[c][i] = lanes[c];
                }
            }
            for c in 0..C {
                for (i, y) in sums(acc[c]).iter().take(n).enumerate() {
                    out.put(column + c, first + i, w.finish(first + i, *y));
                }
            }
            first += n;
        }
    }
}

/// Expanded rows: codes `[block][row][64]`, scales `[block][row][KEPT]`.
#[derive(Default)]
struct Panel {
    codes: Vec<Words>,
    scales: Vec<f32>,
}

/// 64 BF16 words on a cache line boundary.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Words(#[expect(dead_code, reason = "read and written by vectors")] [u16; BLOCK]);

thread_local! {
    static SCRATCH: RefCell<Panel> = RefCell::new(Panel::default());
}

/// Rows of a panel for matrices of `blocks` blocks.
pub(crate) fn panel_rows(blocks: usize) -> usize {
    (PANEL / (2 * BLOCK * blocks.max(1)) / TILE * TILE).clamp(TILE, 64)
}

/// Expands one block to `codes` and `scales`.
#[inline(always)]
unsafe fn keep<S: Stored, const HW: bool>(r: &Row, block: usize, codes: *mut u16, scales: *mut f32) {
    // SAFETY: as `Stored`; the caller gives 64 and `S::KEPT` writable elements.
    unsafe {
        let (c0, c1) = S::codes::<HW>(r, block);
        _mm512_storeu_si512(codes.cast(), c0);
        _mm512_storeu_si512(codes.add(32).cast(), c1);
        let (s0, s1) = S::scales(r, block);
        match S::KEPT {
            0 => {}
            16 => _mm512_storeu_ps(scales, s0),
            kept => {
                scales.write(_mm512_cvtss_f32(s0));
                if kept == 2 {
                    scales.add(1).write(_mm512_cvtss_f32(s1));
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn expand<S: Stored, const HW: bool>(w: &Rows<'_>, range: Range<usize>, panel: &mut Panel) -> usize {
    let (blocks, planes) = (w.blocks(), Planes::new(w));
    let rows = range.len().next_multiple_of(TILE);
    panel.codes.resize(blocks * rows, Words([0; BLOCK]));
    panel.scales.resize(blocks * rows * S::KEPT, 0.0);
    // SAFETY: as `direct`; the panel has just been sized.
    unsafe {
        let (codes, scales) = (panel.codes.as_mut_ptr().cast::<u16>(), panel.scales.as_mut_ptr());
        let n = whole(w);
        for (i, r) in range.clone().enumerate() {
            let pointers = planes.at(r);
            for b in 0..n {
                let at = b * rows + i;
                keep::<S, HW>(&pointers, b, codes.add(at * BLOCK), scales.add(at * S::KEPT));
            }
            if n < blocks {
                let t = tail(w, r);
                let padded = padded(&t);
                let at = n * rows + i;
                keep::<S, HW>(&padded, 0, codes.add(at * BLOCK), scales.add(at * S::KEPT));
            }
        }
        for b in 0..blocks {
            for i in range.len()..rows {
                panel.codes[b * rows + i] = Words([0; BLOCK]);
                panel.scales[(b * rows + i) * S::KEPT..(b * rows + i + 1) * S::KEPT].fill(0.0);
            }
        }
    }
    rows
}

/// Four panel rows from `i` times `C` columns.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "the operands of a tile")]
unsafe fn tile<S: Stored, const HW: bool, const INT8: bool, const C: usize>(
    w: &Rows<'_>,
    first: usize,
    i: usize,
    panel: &Panel,
    rows: usize,
    x: Columns<'_>,
    column: usize,
    end: usize,
    out: &Out<'_>,
) {
    // SAFETY: the panel holds `rows` expanded rows of all blocks, x `width` elements a column.
    unsafe {
        let mut acc = [[_mm512_setzero_ps(); C]; TILE];
        let xs = x.x.as_ptr().add(column * x.width);
        let mut p = panel.codes.as_ptr().add(i).cast::<u16>();
        let mut sp = panel.scales.as_ptr().add(i * S::KEPT);
        for b in 0..w.blocks() {
            let mut xc = [(_mm512_setzero_si512(), _mm512_setzero_si512()); C];
            for (c, v) in xc.iter_mut().enumerate() {
                *v = pair(xs.add(c * x.width + b * BLOCK));
            }
            for r in 0..TILE {
                let codes = pair(p.add(r * BLOCK));
                let q = sp.add(r * S::KEPT);
                let scales = match S::KEPT {
                    0 => (_mm512_setzero_ps(), _mm512_setzero_ps()),
                    1 => (_mm512_set1_ps(q.read()), _mm512_setzero_ps()),
                    2 => (_mm512_set1_ps(q.read()), _mm512_set1_ps(q.add(1).read())),
                    _ => (_mm512_loadu_ps(q), _mm512_setzero_ps()),
                };
                for c in 0..C {
                    acc[r][c] = step::<S, HW, INT8>(acc[r][c], codes, scales, xc[c], x.scale(column + c, b));
                }
            }
            p = p.add(rows * BLOCK);
            sp = sp.add(rows * S::KEPT);
        }
        for c in 0..C {
            let mut a = [_mm512_setzero_ps(); TILE];
            for r in 0..TILE {
                a[r] = acc[r][c];
            }
            for (r, y) in sums(a).iter().enumerate() {
                if first + i + r < end {
                    out.put(column + c, first + i + r, w.finish(first + i + r, *y));
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn panel_product<S: Stored, const HW: bool, const INT8: bool>(
    w: &Rows<'_>,
    range: Range<usize>,
    x: Columns<'_>,
    out: &Out<'_>,
) {
    let columns = x.x.len() / x.width;
    // Taken out of its cell, for a closure would not inherit the enabled instructions.
    let mut panel = SCRATCH.take();
    // SAFETY: as `expand` and `tile`.
    unsafe {
        let rows = expand::<S, HW>(w, range.clone(), &mut panel);
        let mut c = 0;
        while c < columns {
            let left = columns - c;
            let n = if left < TILE && (INT8 || !HW) { 1 } else { left.min(TILE) };
            for i in (0..rows).step_by(TILE) {
                match n {
                    1 => tile::<S, HW, INT8, 1>(w, range.start, i, &panel, rows, x, c, range.end, out),
                    2 if !INT8 && HW => {
                        tile::<S, HW, INT8, 2>(w, range.start, i, &panel, rows, x, c, range.end, out)
                    }
                    3 if !INT8 && HW => {
                        tile::<S, HW, INT8, 3>(w, range.start, i, &panel, rows, x, c, range.end, out)
                    }
                    _ => tile::<S, HW, INT8, TILE>(w, range.start, i, &panel, rows, x, c, range.end, out),
                }
            }
            c += n;
        }
    }
    SCRATCH.set(panel);
}

/// Columns up to which codes are expanded in registers instead of once into a panel.
pub(crate) const DIRECT: usize = TILE;

#[inline(always)]
unsafe fn any<S: Stored, const HW: bool, const INT8: bool>(
    w: &Rows<'_>,
    range: Range<usize>,
    x: Columns<'_>,
    out: &Out<'_>,
) {
    // SAFETY: as the callees.
    unsafe {
        match x.x.len() / x.width {
            1 => direct_rows::<S, HW, INT8, 1>(w, range, x, 0, out),
            // Rarer routes do without kernels for more columns: each is one more to compile.
            n @ 2..=DIRECT if INT8 || !HW => {
                for c in 0..n {
                    direct_rows::<S, HW, INT8, 1>(w, range.clone(), x, c, out);
                }
            }
            2 => direct_rows::<S, HW, INT8, 2>(w, range, x, 0, out),
            3 => direct_rows::<S, HW, INT8, 3>(w, range, x, 0, out),
            4 => direct_rows::<S, HW, INT8, 4>(w, range, x, 0, out),
            _ => panel_product::<S, HW, INT8>(w, range, x, out),
        }
    }
}

macro_rules! entry {
    ($name:ident, $hw:literal, $int8:literal, $features:literal) => {
        #[target_feature(enable = $features)]
        fn $name(w: &Rows<'_>, range: Range<usize>, x: Columns<'_>, out: &Out<'_>) {
            use Kind::*;
            // SAFETY: the features are enabled here; `product` checked the shapes.
            unsafe {
                match w.kind() {
                    Bf16 => any::<SBf16, $hw, $int8>(w, range, x, out),
                    Q4 => any::<SQ4, $hw, $int8>(w, range, x, out),
                    Q5 => any::<SQ5, $hw, $int8>(w, range, x, out),
                    Q6 => any::<SQ6, $hw, $int8>(w, range, x, out),
                    Q8 => any::<SQ8, $hw, $int8>(w, range, x, out),
                    Nvfp4Mul | Nvfp4Div | Nvfp4MulSwizzled | Nvfp4DivSwizzled => {
                        any::<SNvfp4, $hw, $int8>(w, range, x, out)
                    }
                    Fp8Row | Fp8Tensor => any::<SFp8<false>, $hw, $int8>(w, range, x, out),
                    Fp8Block => any::<SFp8<true>, $hw, $int8>(w, range, x, out),
                    Mxfp8 => any::<SMxfp8, $hw, $int8>(w, range, x, out),
                    F32 | F16 | Ggml(_) => {}
                }
            }
        }
    };
}
entry!(with_bf16, true, false, "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c,bmi2");
entry!(with_bf16_int8, true, true, "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c,bmi2");
entry!(without_bf16, false, false, "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,bmi2");

/// Rows `range` of `w` (not FP32 or FP16) times the packed columns into `out`. `bf16` says that the processor has BF16
/// dot products; the rest of AVX-512 it must have. Int8 activations need both.
pub(crate) fn product(bf16: bool, w: &Rows<'_>, range: Range<usize>, x: Columns<'_>, out: &Out<'_>) {
    assert!(range.end <= w.n() && x.width == w.blocks() * BLOCK && x.x.len().is_multiple_of(x.width.max(1)));
    assert!(x.scales.is_empty() || (bf16 && x.scales.len() * 32 == x.x.len()));
    if x.width == 0 {
        return;
    }
    // SAFETY: the caller's word about the processor.
    unsafe {
        match (bf16, x.scales.is_empty()) {
            (true, true) => with_bf16(w, range, x, out),
            (true, false) => with_bf16_int8(w, range, x, out),
            (false, _) => without_bf16(w, range, x, out),
        }
    }
}
