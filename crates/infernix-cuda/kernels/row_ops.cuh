// Row operations that also run inside other kernels: the same values wherever.
#pragma once
#include "common.cuh"

// bf16(silu(g) * u) of two values.
DEV u32 swiglu2(u32 g, u32 u) { return pack_bf(siluf(bf_lo(g)) * bf_lo(u), siluf(bf_hi(g)) * bf_hi(u)); }

// RMS norm of a row in pieces of eight values: squares of a piece in rising order, 32 pieces in a tree, those in rising order. The order
// depends on the row's width alone, whatever the threads that hold the pieces.
#define NORM_MOST 16384

// Piece p of a row of n values, zeros behind its end (n is even). `whole`: pieces are whole and aligned.
DEV uint4 load_piece(const u16* row, int p, int n, bool whole) {
  if (whole) return *(const uint4*)(row + p * 8);
  u32 v[4];
#pragma unroll
  for (int i = 0; i < 4; i++) v[i] = p * 8 + 2 * i < n ? *(const u32*)(row + p * 8 + 2 * i) : 0;
  return make_uint4(v[0], v[1], v[2], v[3]);
}
DEV void store_piece(u16* row, int p, int n, bool whole, uint4 v) {
  if (whole) {
    *(uint4*)(row + p * 8) = v;
    return;
  }
  const u32 w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; i++)
    if (p * 8 + 2 * i < n) *(u32*)(row + p * 8 + 2 * i) = w[i];
}
DEV u32 add2(u32 a, u32 b) { return pack_bf(bf_lo(a) + bf_lo(b), bf_hi(a) + bf_hi(b)); }
DEV uint4 add8(uint4 a, uint4 b) { return make_uint4(add2(a.x, b.x), add2(a.y, b.y), add2(a.z, b.z), add2(a.w, b.w)); }
DEV float squares8(uint4 v) {
  const u32 w[4] = {v.x, v.y, v.z, v.w};
  float s = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) s = fmaf(bf_lo(w[i]), bf_lo(w[i]), s), s = fmaf(bf_hi(w[i]), bf_hi(w[i]), s);
  return s;
}
// `part`: sums of 32 pieces each.
DEV float norm_scale(const float* part, int pieces, int n, float eps) {
  float s = 0;
  for (int i = 0; i < (pieces + 31) >> 5; i++) s += part[i];
  return 1.0f / sqrtf(s / (float)n + eps);
}
// bf16(v * rs * (c + g)) of eight values.
DEV uint4 scaled8(uint4 v, uint4 g, float rs, float c) {
  auto two = [&](u32 v, u32 g) { return pack_bf(bf_lo(v) * rs * (c + bf_lo(g)), bf_hi(v) * rs * (c + bf_hi(g))); };
  return make_uint4(two(v.x, g.x), two(v.y, g.y), two(v.z, g.z), two(v.w, g.w));
}

// bf16(o * rstd * w * act(z)) of one head of width 128 by one warp, a lane its four neighbours of o, z and w (a, b, c).
template <class S> DEV void gated_vector(uint2 a, uint2 b, uint2 c, int lane, float eps, int sigmoid, S store) {
  const float v[4] = {bf_lo(a.x), bf_hi(a.x), bf_lo(a.y), bf_hi(a.y)}, g[4] = {bf_lo(b.x), bf_hi(b.x), bf_lo(b.y), bf_hi(b.y)};
  const float wv[4] = {bf_lo(c.x), bf_hi(c.x), bf_lo(c.y), bf_hi(c.y)};
  float s = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) s = fmaf(v[i], v[i], s);
  const float rs = 1.0f / sqrtf(warp_sum(s) / 128.0f + eps);
#pragma unroll
  for (int i = 0; i < 4; i++) store(lane * 4 + i, f2bf(v[i] * rs * wv[i] * (sigmoid ? sigmoidf(g[i]) : siluf(g[i]))));
}

// bf16(o * rstd * w * act(z)) of one head of width d (a multiple of 32, at most 256) by one warp; `store` takes (index, value).
template <class S> DEV void gated_head(const u16* o, const u16* z, const u16* w, int d, int lane, float eps, int sigmoid, S store) {
  if (d == 128) {
    // The common width: a lane holds four neighbours, all loads at once.
    gated_vector(((const uint2*)o)[lane], ((const uint2*)z)[lane], ((const uint2*)w)[lane], lane, eps, sigmoid, store);
    return;
  }
  float v[8], s = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    v[i] = i * 32 < d ? bf2f(o[i * 32 + lane]) : 0.0f;
    s = fmaf(v[i], v[i], s);
  }
  s = warp_sum(s);
  const float rs = 1.0f / sqrtf(s / (float)d + eps);
#pragma unroll
  for (int i = 0; i < 8; i++) {
    if (i * 32 < d) {
      const float a = bf2f(z[i * 32 + lane]);
      store(i * 32 + lane, f2bf(v[i] * rs * bf2f(w[i * 32 + lane]) * (sigmoid ? sigmoidf(a) : siluf(a))));
    }
  }
}

// `rotated_head` for heads of 32 P values where a lane's partner is another lane: it holds P neighbours.
template <int P, class S> DEV void rotated_vector(const u16* x, const u16* w, const float* cs, int half, int lane, float eps, S store) {
  float v[P], g[P], s = 0;
#pragma unroll
  for (int i = 0; i < P; i += 4) {
    const uint2 a = *(const uint2*)(x + lane * P + i), b = *(const uint2*)(w + lane * P + i);
    v[i] = bf_lo(a.x), v[i + 1] = bf_hi(a.x), v[i + 2] = bf_lo(a.y), v[i + 3] = bf_hi(a.y);
    g[i] = bf_lo(b.x), g[i + 1] = bf_hi(b.x), g[i + 2] = bf_lo(b.y), g[i + 3] = bf_hi(b.y);
  }
#pragma unroll
  for (int i = 0; i < P; i++) s = fmaf(v[i], v[i], s);
  const float rs = 1.0f / sqrtf(warp_sum(s) / (float)(32 * P) + eps);
  const int apart = half / P, at = lane * P;
  const bool lower = at < half, turns = at < 2 * half;
#pragma unroll
  for (int i = 0; i < P; i++) {
    float y = v[i] * rs * (1.0f + g[i]);
    const float other = __shfl_xor_sync(~0u, y, apart);
    if (turns) {
      const int p = at + i - (lower ? 0 : half);
      const float c = cs[p], d = cs[half + p];
      y = lower ? y * c - other * d : y * c + other * d;
    }
    v[i] = y;
  }
#pragma unroll
  for (int i = 0; i < P; i += 2) store(at + i, f2bf(v[i]), f2bf(v[i + 1]));
}

// Head norm (1 + w), then rotation of elements (i, i + half) by the angles `cs` [2][half], one rounding, by one warp. `buf`: d floats
// of the warp. d <= 256.
template <class S> DEV void rotated_head(const u16* x, const u16* w, const float* cs, float* buf, int d, int half, int lane, float eps, S store) {
  if ((d == 128 || d == 256) && half * 32 % d == 0 && half * 2 <= d && __popc(half * 32 / d) == 1) {
    if (d == 256) rotated_vector<8>(x, w, cs, half, lane, eps, store);
    else rotated_vector<4>(x, w, cs, half, lane, eps, store);
    return;
  }
  float s = 0;
  for (int i = lane; i < d; i += 32) {
    const float v = bf2f(x[i]);
    buf[i] = v;
    s = fmaf(v, v, s);
  }
  s = warp_sum(s);
  const float rs = 1.0f / sqrtf(s / (float)d + eps);
  for (int i = lane; i < d; i += 32) buf[i] = buf[i] * rs * (1.0f + bf2f(w[i]));
  __syncwarp();
  for (int i = lane; i < d; i += 32) {
    float v = buf[i];
    if (i < half) v = v * cs[i] - buf[i + half] * cs[half + i];
    else if (i < 2 * half) v = v * cs[i - half] + buf[i - half] * cs[half + i - half];
    // Neighbours are stored in pairs.
    const u32 mine = f2bf(v), other = __shfl_down_sync(~0u, mine, 1);
    if (!(lane & 1)) store(i, (u16)mine, (u16)other);
  }
}
