// The canonical W4A4 expert arithmetic: quantiser, E2M1 products in integers, and the shared exponential.
#pragma once
#include "common.cuh"

// exp for SwiGLU, the same on every backend (engine numerics): clamp to [-105, 89]; n = rne(x log2 e); r by two fused
// steps of ln 2; Taylor polynomial of degree 7 by fma; then two exact powers of two. NaN stays NaN.
DEV float exp_c(float x) {
  if (x != x) return x;
  x = fminf(fmaxf(x, -105.0f), 89.0f);
  const float n = rintf(__fmul_rn(x, 1.44269504088896340736f));
  const float r = __fmaf_rn(-n, 1.4286068e-6f, __fmaf_rn(-n, 0.69314575f, x));
  float p = 1.0f / 5040.0f;
  p = __fmaf_rn(p, r, 1.0f / 720.0f);
  p = __fmaf_rn(p, r, 1.0f / 120.0f);
  p = __fmaf_rn(p, r, 1.0f / 24.0f);
  p = __fmaf_rn(p, r, 1.0f / 6.0f);
  p = __fmaf_rn(p, r, 0.5f);
  p = __fmaf_rn(p, r, 1.0f);
  p = __fmaf_rn(p, r, 1.0f);
  const int i = (int)n, h = i >> 1;
  p = __fmul_rn(p, __int_as_float((h + 127) << 23));
  return __fmul_rn(p, __int_as_float((i - h + 127) << 23));
}

// h = bf16((g / (1 + exp(-g))) * u), each step rounded to FP32.
DEV u16 swiglu_c(float g, float u) { return f2bf(__fmul_rn(__fdiv_rn(g, __fadd_rn(1.0f, exp_c(-g))), u)); }

DEV u32 e4m3_encode(float v) {
  u16 r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(0.0f), "f"(v));
  return r & 0xff;
}
// E4M3 scale (0x00..0x7E) times 2^9, an integer.
DEV int e4m3_int(u32 b) { return (int)(__float_as_uint(fmaf(e4m3_m8(b), 0x1p17f, 0x1p23f)) - 0x4b000000u); }

// Twice the E2M1 value nearest to v / d (ties to even, saturating), as a signed byte.
DEV int quant2(float v, float d) {
  const float t = __fdiv_rn(fabsf(v), d);
  const int c = (t > 0.25f) + (t >= 0.75f) + (t > 1.25f) + (t >= 1.75f) + (t > 2.5f) + (t >= 3.5f) + (t > 5.0f);
  const int m = c < 4 ? c : (c == 4 ? 4 : c == 5 ? 6 : c == 6 ? 8 : 12);
  return v < 0 ? -m : m;
}

// Quantises one block of 16 by four consecutive lanes, four values each. Gives the four doubled codes as bytes, the
// block's scale times 2^9 and -12 times the sum of its codes.
DEV void quant_block(const float (&v)[4], float gs, int divisor, u32& codes, int& scale, int& corr) {
  float a = fmaxf(fmaxf(fabsf(v[0]), fabsf(v[1])), fmaxf(fabsf(v[2]), fabsf(v[3])));
  a = fmaxf(a, __shfl_xor_sync(~0u, a, 1));
  a = fmaxf(a, __shfl_xor_sync(~0u, a, 2));
  const u32 s = e4m3_encode(divisor ? __fdiv_rn(__fmul_rn(a, gs), 6.0f) : __fdiv_rn(a, __fmul_rn(6.0f, gs)));
  const float sv = e4m3_m8(s) * 256.0f;
  const float d = divisor ? __fdiv_rn(sv, gs) : __fmul_rn(sv, gs);
  int c[4], sum = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) c[i] = s ? quant2(v[i], d) : 0, sum += c[i];
  codes = (c[0] & 255) | ((c[1] & 255) << 8) | ((c[2] & 255) << 16) | ((u32)c[3] << 24);
  sum += __shfl_xor_sync(~0u, sum, 1);
  sum += __shfl_xor_sync(~0u, sum, 2);
  scale = e4m3_int(s);
  corr = -12 * sum;
}

// One u32 of rg16 codes (4 k of rows j and j+8) -> unsigned bytes 12 + 2*value, k order, of row j and of row j+8.
DEV void expand_pair(u32 x, u32& rj, u32& rj8) {
  const u32 y = x ^ 0x88888888u;
  // Byte i of the tables: 12 + doubled magnitude, 12 - doubled magnitude. A selector with its sign bit set gives the
  // sign of a byte below 128, which is 0: the two halves can be joined by OR.
  const u32 p0 = 0x0f0e0d0cu, p1 = 0x18141210u, n0 = 0x090a0b0cu, n1 = 0x00040608u;
  u32 lo, hi, t;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(lo) : "r"(p0), "r"(p1), "r"(x));
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(t) : "r"(n0), "r"(n1), "r"(y));
  lo |= t;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(hi) : "r"(p0), "r"(p1), "r"(x >> 16));
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(t) : "r"(n0), "r"(n1), "r"(y >> 16));
  hi |= t;
  rj = __byte_perm(lo, hi, 0x6420);
  rj8 = __byte_perm(lo, hi, 0x7531);
}
DEV int dp4a_us(u32 a, u32 b, int c) {
  int d;
  asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// y = bf16(fl(fl32(S) * 2^-20 (*|/) alpha)).
DEV float finish_sum(i64 s, float alpha, int divisor) {
  const float f = __fmul_rn(__ll2float_rn(s), 0x1p-20f);
  return divisor ? __fdiv_rn(f, alpha) : __fmul_rn(f, alpha);
}
