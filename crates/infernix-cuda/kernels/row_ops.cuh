// Row operations that also run inside other kernels: the same values wherever.
#pragma once
#include "common.cuh"

// bf16(silu(g) * u) of two values.
DEV u32 swiglu2(u32 g, u32 u) { return pack_bf(siluf(bf_lo(g)) * bf_lo(u), siluf(bf_hi(g)) * bf_hi(u)); }

// bf16(o * rstd * w * act(z)) of one head of width d (a multiple of 32, at most 256) by one warp; `store` takes (index, value).
template <class S> DEV void gated_head(const u16* o, const u16* z, const u16* w, int d, int lane, float eps, int sigmoid, S store) {
  if (d == 128) {
    // The common width: a lane holds four neighbours, all loads at once.
    const uint2 a = *(const uint2*)(o + lane * 4), b = *(const uint2*)(z + lane * 4), c = *(const uint2*)(w + lane * 4);
    const float v[4] = {bf_lo(a.x), bf_hi(a.x), bf_lo(a.y), bf_hi(a.y)}, g[4] = {bf_lo(b.x), bf_hi(b.x), bf_lo(b.y), bf_hi(b.y)};
    const float wv[4] = {bf_lo(c.x), bf_hi(c.x), bf_lo(c.y), bf_hi(c.y)};
    float s = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) s = fmaf(v[i], v[i], s);
    const float rs = 1.0f / sqrtf(warp_sum(s) / 128.0f + eps);
#pragma unroll
    for (int i = 0; i < 4; i++) store(lane * 4 + i, f2bf(v[i] * rs * wv[i] * (sigmoid ? sigmoidf(g[i]) : siluf(g[i]))));
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
