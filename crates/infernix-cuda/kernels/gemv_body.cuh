// What decode linears have in common: sums of one staged chunk, and how their partial tiles are added. The order of the sums of
// an output is fixed here: by K and the format alone.
#pragma once
#include "gemv_core.cuh"

#define CONSUMERS 512

struct ChunkPlanes {
  const u8* scales;
  int side_pitch, scale_pitch, high_pitch;
  bool high_direct;
};

// Adds the steps of one chunk that belong to this warp: `st` steps from `st0` on, rows g at row0 and g + 8 at row1 in shared
// memory.
template <int F, int NT, bool XS>
DEV void chunk_sums(float (&acc)[NT][4], const ChunkPlanes& w, int tile, u32 row0, u32 row1, int st0, int st, int warp, int lane,
                    u32 side, u32 hside, const u8* hrow0, const u8* hrow1, const u32 (&x_addr)[NT], const bf16* __restrict__ x,
                    int x_pitch, int cols, int kx) {
  using T = Fmt<F>;
  const int g = lane >> 2, q = lane & 3;
#pragma unroll(NT == 8 || (NT == 1 && T::STEP == 64) ? 1 : 2)
  for (int i = warp; i < st; i += 16) {
    const int s = st0 + i;
    Raw<F> r0, r1;
    if (T::LANE_BYTES == 16) {
      const uint4 v = lds128(row0 + i * T::STEP_BYTES), u = lds128(row1 + i * T::STEP_BYTES);
      r0.w[0] = v.x, r0.w[1] = v.y, r0.w[T::LANE_BYTES / 4 - 2] = v.z, r0.w[T::LANE_BYTES / 4 - 1] = v.w;
      r1.w[0] = u.x, r1.w[1] = u.y, r1.w[T::LANE_BYTES / 4 - 2] = u.z, r1.w[T::LANE_BYTES / 4 - 1] = u.w;
    } else {
      const uint2 v = lds64(row0 + i * T::STEP_BYTES), u = lds64(row1 + i * T::STEP_BYTES);
      r0.w[0] = v.x, r0.w[1] = v.y;
      r1.w[0] = u.x, r1.w[1] = u.y;
    }
    float s0 = 1.0f, s1 = 1.0f;
    if (T::GROUP) {
      if (F == F_FP8B) {
        // Rows of a tile of 16 share their row of 128.
        s0 = s1 = __ldg((const float*)(w.scales + (size_t)(tile >> 3) * w.scale_pitch) + (s >> 1));
      } else if (F == F_MXFP8) {
        s0 = e8m0f(lds8(side + g * w.side_pitch + s));
        s1 = e8m0f(lds8(side + (g + 8) * w.side_pitch + s));
      } else {
        s0 = h2f(lds16(side + g * w.side_pitch + 2 * s));
        s1 = h2f(lds16(side + (g + 8) * w.side_pitch + 2 * s));
      }
    }
    if (F == F_Q5) {
      if (w.high_direct) {
        r0.extra = __ldg((const u16*)(hrow0 + 8 * s + 2 * q));
        r1.extra = __ldg((const u16*)(hrow1 + 8 * s + 2 * q));
      } else {
        r0.extra = lds16(hside + g * w.high_pitch + 8 * s + 2 * q);
        r1.extra = lds16(hside + (g + 8) * w.high_pitch + 8 * s + 2 * q);
      }
    }
    if (F == F_Q6) {
      if (w.high_direct) {
        r0.extra = __ldg((const u32*)(hrow0 + 16 * s + 4 * q));
        r1.extra = __ldg((const u32*)(hrow1 + 16 * s + 4 * q));
      } else {
        r0.extra = lds32(hside + g * w.high_pitch + 16 * s + 4 * q);
        r1.extra = lds32(hside + (g + 8) * w.high_pitch + 16 * s + 4 * q);
      }
    }
    u32 a[T::MMAS * 2], b[T::MMAS * 2];
    expand<F>(r0, a);
    expand<F>(r1, b);
#pragma unroll
    for (int n = 0; n < NT; n++) {
      u32 xf[T::MMAS * 2];
#pragma unroll
      for (int h = 0; h < T::LANE_K / 8; h++) {
        if (XS) {
          const uint4 v = lds128(x_addr[n] + s * (T::STEP * 2) + 16 * h);
          xf[4 * h] = v.x, xf[4 * h + 1] = v.y, xf[4 * h + 2] = v.z, xf[4 * h + 3] = v.w;
        } else {
          const int k = s * T::STEP + q * T::LANE_K + 8 * h;
          uint4 v = make_uint4(0, 0, 0, 0);
          if (k < kx) v = __ldg((const uint4*)(x + (size_t)min(n * 8 + g, cols - 1) * x_pitch + k));
          order_x<F>(v, xf + 4 * h);
        }
      }
      step_mma<F>(acc[n], a, b, xf, s0, s1);
    }
  }
}
