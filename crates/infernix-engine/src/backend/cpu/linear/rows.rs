//! Stored matrices as kernels see them, and the order in which their products are added.

use super::super::num::{E2M1, bf16_exact, e4m3, e8m0, f32_of};
use super::ggml::Parts;
use half::f16;
use infernix_formats::ggml::{self, GgmlType};

/// Storage of a matrix `[N, K]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// BF16 words, row-major.
    Bf16,
    /// FP32 words, row-major.
    F32,
    /// FP16 words, row-major.
    F16,
    /// 4-bit integers, FP16 scale per 64 (`row_split_k128_v1`).
    Q4,
    /// 5-bit integers, same layout with a plane of high bits.
    Q5,
    /// 6-bit integers.
    Q6,
    /// int8, FP16 scale per 32.
    Q8,
    /// E2M1 codes with E4M3 scales per 16, row-major, and an FP32 multiplier.
    Nvfp4Mul,
    /// The same with an FP32 divisor.
    Nvfp4Div,
    /// E2M1 codes row-major with 128x4-swizzled scales and an FP32 multiplier.
    Nvfp4MulSwizzled,
    /// The same with an FP32 divisor.
    Nvfp4DivSwizzled,
    /// E4M3 codes, BF16 scale per row.
    Fp8Row,
    /// E4M3 codes, one FP32 scale.
    Fp8Tensor,
    /// E4M3 codes, FP32 scale per 128x128 tile.
    Fp8Block,
    /// E4M3 codes, E8M0 scale per 32.
    Mxfp8,
    /// Blocks of a GGUF file, see `ggml`.
    Ggml(GgmlType),
}

/// Weights of a row that meet in two dot-product steps.
pub(crate) const BLOCK: usize = 64;

/// How the partial sums of a block join the row's: not scaled, scaled as a whole (a value per lane), or by halves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fold {
    Direct,
    Whole,
    Halves,
}

impl Kind {
    /// Activations are wanted with the even elements of each 64 before the odd ones (codes are nibbles).
    pub(crate) fn even_odd(self) -> bool {
        use Kind::*;
        matches!(self, Q4 | Q5 | Q6) || self.is_nvfp4()
    }

    pub(crate) fn is_nvfp4(self) -> bool {
        use Kind::*;
        matches!(self, Nvfp4Mul | Nvfp4Div | Nvfp4MulSwizzled | Nvfp4DivSwizzled)
    }

    /// Whether codes are small integers (NVFP4: doubled), so that products with int8 activations sum exactly.
    pub(crate) fn integers(self) -> bool {
        matches!(self, Kind::Q4 | Kind::Q5 | Kind::Q6 | Kind::Q8) || self.is_nvfp4()
    }

    /// Values of such a kind whose products with int8 activations share a scale.
    pub(crate) fn int8_group(self) -> usize {
        if self.is_nvfp4() { 16 } else { 32 }
    }

    pub(crate) fn fold(self) -> Fold {
        use Kind::*;
        match self {
            Bf16 | F32 | F16 | Fp8Row | Fp8Tensor => Fold::Direct,
            Q8 | Mxfp8 => Fold::Halves,
            _ => Fold::Whole,
        }
    }

    /// (bytes of codes, bytes of high bits) of a row.
    #[inline]
    pub(crate) fn row_bytes(self, k: usize) -> (usize, usize) {
        use Kind::*;
        let groups = k.next_multiple_of(128) / 64;
        match self {
            Bf16 | F16 => (2 * k, 0),
            F32 => (4 * k, 0),
            Q4 => (32 * groups, 0),
            Q5 => (32 * groups, 8 * groups),
            Q6 => (32 * groups, 16 * groups),
            Q8 => (64 * groups, 0),
            Nvfp4Mul | Nvfp4Div | Nvfp4MulSwizzled | Nvfp4DivSwizzled => (k / 2, 0),
            Fp8Row | Fp8Tensor | Fp8Block | Mxfp8 => (k, 0),
            Ggml(t) => (t.row_bytes(k as u64).unwrap_or(u64::MAX) as usize, 0),
        }
    }

    /// Bytes of the scale plane of `n` rows.
    pub(crate) fn scale_bytes(self, n: usize, k: usize) -> usize {
        use Kind::*;
        match self {
            Bf16 | F32 | F16 | Fp8Tensor | Ggml(_) => 0,
            Q4 | Q5 | Q6 => n * k.next_multiple_of(128) / 64 * 2,
            Q8 => n * k.next_multiple_of(128) / 32 * 2,
            Nvfp4Mul | Nvfp4Div => n * k / 16,
            Nvfp4MulSwizzled | Nvfp4DivSwizzled => n.next_multiple_of(128) * k / 16,
            Fp8Row => 2 * n,
            Fp8Block => 4 * n.div_ceil(128) * k.div_ceil(128),
            Mxfp8 => n * k.div_ceil(32),
        }
    }

    /// Bytes of codes and high bits of one block.
    pub(crate) fn block_bytes(self) -> (usize, usize) {
        use Kind::*;
        match self {
            Bf16 | F16 => (128, 0),
            F32 => (256, 0),
            Q4 => (32, 0),
            Q5 => (32, 8),
            Q6 => (32, 16),
            Nvfp4Mul | Nvfp4Div | Nvfp4MulSwizzled | Nvfp4DivSwizzled => (32, 0),
            Q8 | Fp8Row | Fp8Tensor | Fp8Block | Mxfp8 => (64, 0),
            Ggml(t) => ((64.0 * t.bits() / 8.0) as usize, 0),
        }
    }
}

/// A run of rows of a stored matrix, planes borrowed whole.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    kind: Kind,
    first: usize,
    n: usize,
    k: usize,
    codes: &'a [u8],
    high: &'a [u8],
    scales: &'a [u8],
    global: f32,
    /// Rows after which 128-row tiles start anew.
    matrix: usize,
}

impl<'a> Rows<'a> {
    /// Rows `first .. first + n` of a matrix of `total` rows. `None` if a plane is shorter than the matrix or K does
    /// not suit the layout; every later access stays inside these bounds.
    #[expect(clippy::too_many_arguments, reason = "a matrix is this many planes and numbers")]
    pub fn new(
        kind: Kind,
        total: usize,
        k: usize,
        first: usize,
        n: usize,
        codes: &'a [u8],
        high: &'a [u8],
        scales: &'a [u8],
        global: f32,
    ) -> Option<Self> {
        let (c, h) = kind.row_bytes(k);
        let fits = codes.len() >= total.checked_mul(c)?
            && high.len() >= total.checked_mul(h)?
            && scales.len() >= kind.scale_bytes(total, k)
            && first.checked_add(n)? <= total
            && (!kind.is_nvfp4() || k.is_multiple_of(16))
            && (!matches!(kind, Kind::Nvfp4MulSwizzled | Kind::Nvfp4DivSwizzled) || k.is_multiple_of(64));
        fits.then_some(Rows { kind, first, n, k, codes, high, scales, global, matrix: total.max(1) })
    }

    /// The same rows of a stack of matrices of `matrix` rows each, every one with its own 128x128 tiles.
    pub fn stacked(self, total: usize, matrix: usize) -> Option<Self> {
        let tiles = (total / matrix.max(1)).checked_mul(matrix.div_ceil(128) * self.k.div_ceil(128) * 4)?;
        let fits = self.kind != Kind::Fp8Block || self.scales.len() >= tiles;
        (matrix > 0 && total.is_multiple_of(matrix) && fits).then_some(Rows { matrix, ..self })
    }

    /// Storage.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Number of rows.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Columns.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Bytes a product reads: codes, high bits and scales of these rows.
    pub fn bytes(&self) -> usize {
        let (c, h) = self.kind.row_bytes(self.k);
        self.n * (c + h) + self.kind.scale_bytes(self.n, self.k)
    }

    /// Blocks of a row, the last one possibly short.
    #[inline]
    pub(crate) fn blocks(&self) -> usize {
        self.k.div_ceil(BLOCK)
    }

    /// Codes of a row.
    #[inline]
    pub(crate) fn codes(&self, row: usize) -> &'a [u8] {
        let b = self.kind.row_bytes(self.k).0;
        &self.codes[(self.first + row) * b..][..b]
    }

    /// High bits of a row.
    #[inline]
    pub(crate) fn high(&self, row: usize) -> &'a [u8] {
        let b = self.kind.row_bytes(self.k).1;
        &self.high[(self.first + row) * b..][..b]
    }

    /// Where the scales of a row's first block start, and the step to the next block's.
    #[inline]
    pub(crate) fn scale_at(&self, row: usize) -> (usize, usize) {
        use Kind::*;
        let (n, k) = (self.first + row, self.k);
        match self.kind {
            Bf16 | F32 | F16 | Fp8Tensor | Ggml(_) => (0, 0),
            Q4 | Q5 | Q6 => (n * k.next_multiple_of(128) / 64 * 2, 2),
            Q8 => (n * k.next_multiple_of(128) / 32 * 2, 4),
            Nvfp4Mul | Nvfp4Div => (n * (k / 16), 4),
            // formats.md 2.1: the 128x4 atom; four groups of a row are one word.
            Nvfp4MulSwizzled | Nvfp4DivSwizzled => {
                (n / 128 * (k / 64) * 512 + n % 32 * 16 + n % 128 / 32 * 4, 512)
            }
            Fp8Row => (2 * n, 0),
            Fp8Block => {
                let tile = n / self.matrix * self.matrix.div_ceil(128) + n % self.matrix / 128;
                (4 * tile * k.div_ceil(128), 0)
            }
            Mxfp8 => (n * k.div_ceil(32), 2),
        }
    }

    /// Bytes from a row's scales to the next row's, where all rows keep the same distance.
    pub(crate) fn scale_stride(&self) -> Option<usize> {
        use Kind::*;
        match self.kind {
            Bf16 | F32 | F16 | Fp8Tensor | Ggml(_) => Some(0),
            Q4 | Q5 | Q6 | Q8 | Nvfp4Mul | Nvfp4Div | Fp8Row | Mxfp8 => {
                Some(self.kind.scale_bytes(1, self.k))
            }
            Nvfp4MulSwizzled | Nvfp4DivSwizzled | Fp8Block => None,
        }
    }

    /// The scale plane.
    pub(crate) fn scales(&self) -> &'a [u8] {
        self.scales
    }

    /// Applies what scales the whole row.
    #[inline(always)]
    pub(crate) fn finish(&self, row: usize, y: f32) -> f32 {
        match self.kind {
            Kind::Fp8Row => y * self.row_scale(row),
            Kind::Fp8Tensor | Kind::Nvfp4Mul | Kind::Nvfp4MulSwizzled => y * self.global,
            Kind::Nvfp4Div | Kind::Nvfp4DivSwizzled => y / self.global,
            _ => y,
        }
    }

    fn row_scale(&self, row: usize) -> f32 {
        let at = 2 * (self.first + row);
        f32_of(u16::from_le_bytes([self.scales[at], self.scales[at + 1]]))
    }

    fn f16_scale(&self, at: usize) -> f32 {
        f16::from_bits(u16::from_le_bytes([self.scales[at], self.scales[at + 1]])).to_f32()
    }

    /// Scales of a block: one value per lane and half-block, as the fold wants them.
    pub(crate) fn block_scales(&self, row: usize, block: usize) -> [[f32; 16]; 2] {
        let (start, step) = self.scale_at(row);
        let at = start + step * block;
        match self.kind {
            Kind::Q4 | Kind::Q5 | Kind::Q6 => [[self.f16_scale(at); 16]; 2],
            Kind::Q8 => [[self.f16_scale(at); 16], [self.f16_scale(at + 2); 16]],
            Kind::Fp8Block => {
                let at = start + 4 * (block / 2);
                let s = f32::from_le_bytes(std::array::from_fn(|i| self.scales[at + i]));
                [[s; 16]; 2]
            }
            Kind::Mxfp8 => {
                let last = self.k.div_ceil(32) - 1;
                let s = |i: usize| e8m0(self.scales[start + (2 * block + i).min(last)]);
                [[s(0); 16], [s(1); 16]]
            }
            _ if self.kind.is_nvfp4() => {
                let groups = (self.k / 16 - 4 * block).min(4);
                // Lane i of either step holds elements of the block's group i / 4.
                let s =
                    std::array::from_fn(|i| if i / 4 < groups { e4m3(self.scales[at + i / 4]) } else { 0.0 });
                [s; 2]
            }
            _ => [[1.0; 16]; 2],
        }
    }

    /// The exact codes of a block as BF16 in the order of the dot-product steps (FP32 and FP16 matrices excepted);
    /// zeros past K.
    pub(crate) fn block_codes(&self, row: usize, block: usize, out: &mut [u16; BLOCK]) {
        let codes = self.codes(row);
        let k0 = block * BLOCK;
        let valid = (self.k - k0).min(BLOCK);
        out.fill(0);
        match self.kind {
            Kind::Bf16 => {
                for (o, b) in out.iter_mut().zip(codes[2 * k0..].chunks_exact(2)).take(valid) {
                    *o = u16::from_le_bytes([b[0], b[1]]);
                }
            }
            Kind::Q8 => {
                for (o, b) in out.iter_mut().zip(&codes[k0..k0 + BLOCK]) {
                    *o = bf16_exact(f32::from(*b as i8));
                }
            }
            Kind::Fp8Row | Kind::Fp8Tensor | Kind::Fp8Block | Kind::Mxfp8 => {
                for (o, b) in out.iter_mut().zip(&codes[k0..k0 + valid]) {
                    *o = bf16_exact(e4m3(*b));
                }
            }
            Kind::Q4 | Kind::Q5 | Kind::Q6 => {
                let high = self.high(row);
                for (j, b) in codes[k0 / 2..k0 / 2 + 32].iter().enumerate() {
                    let at = |lane: usize| -> i32 {
                        match self.kind {
                            Kind::Q5 => i32::from((high[block * 8 + lane / 8] >> (lane % 8)) & 1) << 4,
                            Kind::Q6 => i32::from((high[block * 16 + lane / 4] >> (lane % 4 * 2)) & 3) << 4,
                            _ => 0,
                        }
                    };
                    let bits = match self.kind {
                        Kind::Q5 => 5,
                        Kind::Q6 => 6,
                        _ => 4,
                    };
                    let signed = |v: i32| bf16_exact(((v << (32 - bits)) >> (32 - bits)) as f32);
                    out[j] = signed(i32::from(b & 15) | at(2 * j));
                    out[32 + j] = signed(i32::from(b >> 4) | at(2 * j + 1));
                }
            }
            Kind::F32 | Kind::F16 | Kind::Ggml(_) => {}
            _ => {
                for (j, b) in codes[k0 / 2..k0 / 2 + valid / 2].iter().enumerate() {
                    out[j] = bf16_exact(E2M1[usize::from(b & 15)]);
                    out[32 + j] = bf16_exact(E2M1[usize::from(b >> 4)]);
                }
            }
        }
    }

    /// A row as FP32 (`F32` and `F16` matrices).
    pub(crate) fn wide(&self, row: usize, k: usize) -> f32 {
        let codes = self.codes(row);
        if self.kind == Kind::F32 {
            f32::from_le_bytes(std::array::from_fn(|i| codes[4 * k + i]))
        } else {
            f16::from_bits(u16::from_le_bytes([codes[2 * k], codes[2 * k + 1]])).to_f32()
        }
    }
}

impl Rows<'_> {
    /// Values that share a scale along K, if any do.
    pub(crate) fn group(&self) -> Option<usize> {
        use Kind::*;
        match self.kind {
            Bf16 | F32 | F16 | Fp8Row | Fp8Tensor => None,
            Q4 | Q5 | Q6 => Some(64),
            Q8 | Mxfp8 => Some(32),
            Fp8Block => Some(128),
            Ggml(t) => Some(ggml::group(t)),
            _ => Some(16),
        }
    }

    /// Offsets of a row's groups, beside their scales; none for most storages.
    pub(crate) fn offsets(&self, row: usize) -> Vec<f32> {
        let Kind::Ggml(t) = self.kind else { return Vec::new() };
        if !ggml::has_offset(t) {
            return Vec::new();
        }
        let mut parts = Parts::default();
        parts.fill(t, self.codes(row), self.k);
        parts.offsets
    }

    /// A row's exact codes in natural order, and the scale of each group of `group` values (1 where there is none).
    /// Inlined into functions of one instruction set, whose loops vectorise.
    #[inline(always)]
    pub(crate) fn natural(&self, row: usize, values: &mut [f32], group: usize, scales: &mut [f32]) {
        if let Kind::Ggml(t) = self.kind {
            let mut parts = Parts::default();
            parts.fill(t, self.codes(row), self.k);
            values.copy_from_slice(&parts.codes);
            scales.copy_from_slice(&parts.scales);
            return;
        }
        let codes = self.codes(row);
        match self.kind {
            Kind::F32 | Kind::F16 => {
                values.iter_mut().enumerate().for_each(|(i, v)| *v = self.wide(row, i));
                scales.fill(1.0);
                return;
            }
            Kind::Bf16 => {
                for (v, b) in values.iter_mut().zip(codes.as_chunks::<2>().0) {
                    *v = f32_of(u16::from_le_bytes(*b));
                }
            }
            Kind::Q8 => values.iter_mut().zip(codes).for_each(|(v, b)| *v = f32::from(*b as i8)),
            Kind::Fp8Row | Kind::Fp8Tensor | Kind::Fp8Block | Kind::Mxfp8 => {
                values.iter_mut().zip(codes).for_each(|(v, b)| *v = e4m3(*b));
            }
            Kind::Q4 => {
                let (pairs, last) = values.as_chunks_mut::<2>();
                for (v, b) in pairs.iter_mut().zip(codes) {
                    *v = [f32::from((*b << 4) as i8 >> 4), f32::from(*b as i8 >> 4)];
                }
                if let (Some(v), Some(b)) = (last.first_mut(), codes.get(pairs.len())) {
                    *v = f32::from((*b << 4) as i8 >> 4);
                }
            }
            _ => {
                let mut codes = [0u16; BLOCK];
                for (b, out) in values.chunks_mut(BLOCK).enumerate() {
                    self.block_codes(row, b, &mut codes);
                    for (i, o) in out.iter_mut().enumerate() {
                        let at = if self.kind.even_odd() { i % 2 * 32 + i / 2 } else { i };
                        *o = f32_of(codes[at]);
                    }
                }
            }
        }
        for (g, s) in scales.iter_mut().enumerate() {
            let first = g * group;
            let halves = self.block_scales(row, first / BLOCK);
            let within = first % BLOCK;
            *s = if self.kind.is_nvfp4() { halves[0][within / 4] } else { halves[within / 32][0] };
        }
    }
}

impl Rows<'_> {
    /// Whether the global scale divides.
    pub(crate) fn divides(&self) -> bool {
        matches!(self.kind, Kind::Nvfp4Div | Kind::Nvfp4DivSwizzled)
    }

    /// The global scale.
    pub(crate) fn global(&self) -> f32 {
        self.global
    }

    /// E4M3 scale words of an NVFP4 row in the order of K.
    pub(crate) fn e4m3_words(&self, row: usize) -> Vec<u8> {
        let (start, step) = self.scale_at(row);
        (0..self.k / 16).map(|g| self.scales[start + step * (g / 4) + g % 4]).collect()
    }
}
