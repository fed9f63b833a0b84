// Exact words -> BF16 fragments for mma m16n8k16, one expansion per stored format.
//
// A *step* is STEP consecutive k of one row. Lane (g = lane/4, q = lane%4) takes LANE_K consecutive k of rows g and
// g+8 at k = STEP*s + LANE_K*q, and the same k of column g of x: the mma's own k order is a permutation of it, the
// same for A and B, so nothing is shuffled. Code fragments are exact in BF16; group scales follow in FP32.
#pragma once
#include "common.cuh"

// F_FP8B: E4M3 with an FP32 scale per 128 x 128 tile. F_MXFP8: E4M3 with an E8M0 scale per 32 k.
enum { F_BF16 = 0, F_Q8 = 1, F_Q4 = 2, F_Q5 = 3, F_Q6 = 4, F_NVFP4 = 5, F_FP8 = 6, F_FP8B = 7, F_MXFP8 = 8 };

template <int F> struct Fmt {
  static constexpr bool E4M3 = F == F_FP8 || F == F_FP8B || F == F_MXFP8;
  static constexpr int STEP = (F == F_BF16 || F == F_Q8 || F == F_MXFP8) ? 32 : 64;
  static constexpr int LANE_K = STEP / 4;
  static constexpr int STEP_BYTES = F == F_BF16 || F == F_FP8 || F == F_FP8B ? 64 : 32;
  static constexpr int LANE_BYTES = STEP_BYTES / 4;
  // Rows of a staged tile are padded to this remainder of 128 bytes: no bank conflicts for the lane's access width.
  static constexpr int A_PAD = LANE_BYTES == 16 ? 64 : 32;
  static constexpr int X_PAD = LANE_K == 8 ? 64 : 16;
  static constexpr bool GROUP = F == F_Q8 || F == F_Q4 || F == F_Q5 || F == F_Q6 || F == F_FP8B || F == F_MXFP8;
  static constexpr int MMAS = STEP / 16;
  // k pairs of a register are (i, i+4) instead of (2i, 2i+1) within eight codes.
  static constexpr bool PERM = F == F_Q4 || F == F_Q5 || F == F_Q6 || F == F_NVFP4;
};

// 8 E2M1 codes as they lie on the device (nvfp4.cuh) -> 4 registers in the permuted pair order. E2M1 at bits 15, 8..6 of a BF16 is the
// value times 2^-126; `scale` holds the block scale times 2^118. Two of the four pairs need a product or a mask alone: shifts and
// logic share a pipe, products have their own.
DEV void expand_e2m1(u32 w, u32 scale, u32* r) {
  constexpr u32 M = 0x81c081c0u;
  r[0] = hmul2(w & M, scale);
  r[1] = hmul2((w * 8) & M, scale);
  r[2] = hmul2(((w & 0x40074007u) * 66) & M, scale);
  r[3] = hmul2(((w >> 3) & 0x01c001c0u) | ((w * 4) & 0x80008000u), scale);
}

// 8 two's-complement codes (one u32 of nibbles) -> 4 registers in the permuted pair order.
template <int F> DEV void expand_nibbles(u32 w, u32 high, u32* r) {
  constexpr u32 FLIP = F == F_Q4 ? 0x43084308u : F == F_Q5 ? 0x43104310u : 0x43204320u;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    u32 v = (w >> (4 * j)) & 0x000f000fu;
    if (F == F_Q5) v |= (high >> j) & 0x00100010u;
    if (F == F_Q6) v |= (high >> (2 * j)) & 0x00300030u;
    // 128 + (code with its sign bit flipped), minus 128 + half the range: exact.
    r[j] = hsub2(v ^ FLIP, FLIP);
  }
}

// 4 signed bytes -> 2 registers.
DEV void expand_i8(u32 w, u32* r) {
  u32 lo = w & 0x7f7f7f7fu, hi = w & 0x80808080u;
  r[0] = hsub2(__byte_perm(lo, 0x43434343u, 0x4140), __byte_perm(hi, 0x43434343u, 0x4140));
  r[1] = hsub2(__byte_perm(lo, 0x43434343u, 0x4342), __byte_perm(hi, 0x43434343u, 0x4342));
}

// 4 E4M3 bytes -> 2 registers. The byte's exponent and mantissa at bits 10..4 are the value times 2^-120.
DEV void expand_e4m3(u32 w, u32* r) {
  u32 t0 = __byte_perm(w, 0, 0x1404), t1 = __byte_perm(w, 0, 0x3424);
  r[0] = hmul2((t0 & 0x80008000u) | ((t0 >> 4) & 0x07f007f0u), 0x7b807b80u);
  r[1] = hmul2((t1 & 0x80008000u) | ((t1 >> 4) & 0x07f007f0u), 0x7b807b80u);
}

// E4M3 scale (0x00..0x7E) times 2^118 in both halves of a register. Shifted into place it is a BF16 of the value times 2^-120,
// subnormals included; two exact products lift it.
DEV u32 block_scale(u32 b) { return hmul2(hmul2(b * 0x00100010u, 0x7b807b80u), 0x7a807a80u); }

// Value of an E8M0 word: 2^(b - 127), its smallest a subnormal.
DEV float e8m0f(u32 b) { return __uint_as_float(b ? b << 23 : 0x00400000u); }

// One lane's codes of one row and step, as stored.
template <int F> struct Raw { u32 w[Fmt<F>::LANE_BYTES / 4]; u32 extra; };

// The fragment registers of one row: 2 per mma.
template <int F> DEV void expand(const Raw<F>& c, u32* r) {
  if (F == F_BF16) {
#pragma unroll
    for (int i = 0; i < 4; i++) r[i] = c.w[i];
  } else if (F == F_Q8) {
    expand_i8(c.w[0], r);
    expand_i8(c.w[1], r + 2);
  } else if (Fmt<F>::E4M3) {
#pragma unroll
    for (int i = 0; i < Fmt<F>::LANE_BYTES / 4; i++) expand_e4m3(c.w[i], r + 2 * i);
  } else if (F == F_NVFP4) {
    const u32 s = block_scale(c.extra);
    expand_e2m1(c.w[0], s, r);
    expand_e2m1(c.w[1], s, r + 4);
  } else {
    u32 h0 = 0, h1 = 0;
    if (F == F_Q5) {
      h0 = c.extra & 0xff, h1 = (c.extra >> 8) & 0xff;
      h0 = (h0 | (h0 << 12)) << 4, h1 = (h1 | (h1 << 12)) << 4;
    }
    if (F == F_Q6) {
      h0 = c.extra & 0xffff, h1 = c.extra >> 16;
      h0 = (h0 | (h0 << 8)) << 4, h1 = (h1 | (h1 << 8)) << 4;
    }
    expand_nibbles<F>(c.w[0], h0, r);
    expand_nibbles<F>(c.w[1], h1, r + 4);
  }
}

// x of 8 consecutive k into the pair order of the format.
template <int F> DEV void order_x(uint4 v, u32* r) {
  if (Fmt<F>::PERM) {
    r[0] = __byte_perm(v.x, v.z, 0x5410);
    r[1] = __byte_perm(v.x, v.z, 0x7632);
    r[2] = __byte_perm(v.y, v.w, 0x5410);
    r[3] = __byte_perm(v.y, v.w, 0x7632);
  } else {
    r[0] = v.x, r[1] = v.y, r[2] = v.z, r[3] = v.w;
  }
}

// Adds one step to the accumulators of one n-tile. a: rows g, b: rows g+8. s0, s1: group scales of the two rows.
template <int F> DEV void step_mma(float (&acc)[4], const u32* a, const u32* b, const u32* x, float s0, float s1) {
  if (Fmt<F>::GROUP) {
    float t[4] = {0, 0, 0, 0};
#pragma unroll
    for (int m = 0; m < Fmt<F>::MMAS; m++) mma16816(t, a[2 * m], b[2 * m], a[2 * m + 1], b[2 * m + 1], x[2 * m], x[2 * m + 1]);
    acc[0] = fmaf(s0, t[0], acc[0]);
    acc[1] = fmaf(s0, t[1], acc[1]);
    acc[2] = fmaf(s1, t[2], acc[2]);
    acc[3] = fmaf(s1, t[3], acc[3]);
  } else {
#pragma unroll
    for (int m = 0; m < Fmt<F>::MMAS; m++) mma16816(acc, a[2 * m], b[2 * m], a[2 * m + 1], b[2 * m + 1], x[2 * m], x[2 * m + 1]);
  }
}

// What is multiplied after the sum: row scale, then the tensor's multiplier or divisor.
DEV float finish(float v, const u16* row_scale, int row, float tscale, int divide) {
  if (row_scale) v = v * bf2f(row_scale[row]);
  return divide ? __fdiv_rn(v, tscale) : v * tscale;
}
