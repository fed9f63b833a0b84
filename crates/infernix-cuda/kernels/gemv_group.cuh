// Decode linears that share their input, one launch: what the host hands over, and how the input is made.
#pragma once
#include "gemv_body.cuh"
#include "row_ops.cuh"

#define MOST 8

struct GemvPart {
  const u8 *codes, *scales;
  const u16* row_scale;
  void* y;
  float tscale;
  int n, y_pitch, mode;
};
struct GemvSide {
  int from, to, tiles, K, code_pitch, scale_pitch, stages, chunk_steps, pitch, slots;
};
struct GemvGroup {
  GemvPart part[MOST];
  int first[MOST];  // first tile of a part within its side
  GemvSide side[2];
  const u16 *x, *x1, *xw;
  const u16* ye;
  const float *weights, *logit;
  int x_pitch, x1_pitch, kx, cols, split, form, top, logit_pitch, head, sigmoid;
  float eps;
  int pad;
};
enum { X_PLAIN = 0, X_SWIGLU = 1, X_GATED = 2 };
enum { M_F32 = 1, M_DIVIDE = 2, M_COMBINE = 8 };

// Byte of value k of a column in the pair order of the format.
template <int F> DEV int x_place(int k) {
  const int e = k & 7;
  return (k & ~7) * 2 + (Fmt<F>::PERM ? (e < 4 ? 4 * e : 4 * (e - 4) + 2) : 2 * e);
}

// `U` pieces of a thread at a time: they are asked for before the first is used.
template <int F, int U, bool SWIGLU> DEV void stage_plain(const GemvGroup& a, int per, u8* xs, int xp, int tid) {
  const int total = a.cols * per;
#pragma unroll 1
  for (int at = tid; at < total; at += U * CONSUMERS) {
    uint4 v[U], u[U];
    int to[U];
#pragma unroll
    for (int j = 0; j < U; j++) {
      const int i = at + j * CONSUMERS, c = i / per, k = (i - c * per) * 8;
      v[j] = u[j] = make_uint4(0, 0, 0, 0);
      to[j] = c * xp + k * 2;
      if (i < total && k < a.kx) {
        v[j] = __ldg((const uint4*)(a.x + (size_t)c * a.x_pitch + k));
        if (SWIGLU) u[j] = __ldg((const uint4*)(a.x1 + (size_t)c * a.x1_pitch + k));
      }
    }
#pragma unroll
    for (int j = 0; j < U; j++) {
      if (at + j * CONSUMERS >= total) break;
      if (SWIGLU) v[j] = make_uint4(swiglu2(v[j].x, u[j].x), swiglu2(v[j].y, u[j].y), swiglu2(v[j].z, u[j].z), swiglu2(v[j].w, u[j].w));
      u32 r[4];
      order_x<F>(v[j], r);
      *(uint4*)(xs + to[j]) = make_uint4(r[0], r[1], r[2], r[3]);
    }
  }
}

// The input of all columns in shared memory, in the pair order of the format, zeros behind it up to K: by CONSUMERS threads.
template <int F> DEV void stage_input(const GemvGroup& a, int K, u8* xs, int xp, int tid) {
  const int warp = tid >> 5, lane = tid & 31, cols = a.cols, per = K >> 3;
  if (a.form == X_GATED) {
    const int heads = a.kx / a.head;
    // Of the common width three heads a warp are asked for before the first is used.
    constexpr int U = 3;
    if (a.head == 128) {
      const uint2 w = ((const uint2*)a.xw)[lane];
#pragma unroll 1
      for (int at = warp; at < cols * heads; at += 16 * U) {
        uint2 o[U], z[U];
#pragma unroll
        for (int j = 0; j < U; j++) {
          const int job = min(at + 16 * j, cols * heads - 1), c = job / heads, h = job - c * heads;
          o[j] = ((const uint2*)(a.x + (size_t)c * a.x_pitch + h * 128))[lane];
          z[j] = ((const uint2*)(a.x1 + (size_t)c * a.x1_pitch + h * 128))[lane];
        }
#pragma unroll
        for (int j = 0; j < U; j++) {
          const int job = at + 16 * j, c = job / heads, h = job - c * heads;
          if (job >= cols * heads) break;
          gated_vector(o[j], z[j], w, lane, a.eps, a.sigmoid, [&](int i, u16 v) { *(u16*)(xs + c * xp + x_place<F>(h * 128 + i)) = v; });
        }
      }
    } else
#pragma unroll 1
    for (int job = warp; job < cols * heads; job += 16) {
      const int c = job / heads, h = job - c * heads;
      gated_head(a.x + (size_t)c * a.x_pitch + h * a.head, a.x1 + (size_t)c * a.x1_pitch + h * a.head, a.xw, a.head, lane, a.eps, a.sigmoid,
                 [&](int i, u16 v) { *(u16*)(xs + c * xp + x_place<F>(h * a.head + i)) = v; });
    }
    for (int i = tid; i < cols * per; i += CONSUMERS) {
      const int c = i / per, k = (i - c * per) * 8;
      if (k >= a.kx) *(uint4*)(xs + c * xp + k * 2) = make_uint4(0, 0, 0, 0);
    }
  } else if (a.form == X_SWIGLU) stage_plain<F, 2, true>(a, per, xs, xp, tid);
  else stage_plain<F, 4, false>(a, per, xs, xp, tid);
}

// Part of a side that a tile of 16 rows belongs to, at or behind part p.
DEV int part_of(const GemvGroup& a, const GemvSide& sd, int tile, int p) {
  while (p + 1 < sd.to && a.first[p + 1] <= tile) p++;
  return p;
}

template <int F, int NT> DEV void group_body(const GemvGroup& a, const GemvSide& sd, int cta, int ctas) {
  using T = Fmt<F>;
  extern __shared__ __align__(128) u8 smem[];
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, q = lane & 3;
  const int nsteps = sd.K / T::STEP, chunks = (nsteps + sd.chunk_steps - 1) / sd.chunk_steps;
  const int my_tiles = sd.tiles > cta ? (sd.tiles - 1 - cta) / ctas + 1 : 0, jobs = my_tiles * chunks;
  constexpr int RED = NT * 8 * 20;
  const int stages = sd.stages, stage_bytes = 16 * sd.pitch, side_pitch = sd.scale_pitch, side_bytes = (16 * side_pitch + 127) & ~127;
  const u32 s_bar = smem_u32(smem), s_red = s_bar + 256 + NT * 512, s_side = s_red + 2 * 16 * RED * 4;
  const u32 s_stage = s_side + sd.slots * side_bytes, s_x = s_stage + stages * stage_bytes;
  const int xp = ((sd.K * 2 + 127) & ~127) + T::X_PAD;
  float *sums = (float*)(smem + 256), *red = sums + NT * 128;
  u8* xs = smem + (s_x - s_bar);

  if (tid == 0) {
    for (int i = 0; i < stages; i++) mbar_init(s_bar + 8 * i, 1), mbar_init(s_bar + 8 * (stages + i), 16);
    mbar_fence_init();
  }
  __syncthreads();
  pdl_launch();

  if (warp == 16) {
    for (int j = 0; j < jobs; j++) {
      const int slot = j % stages;
      if (j >= stages) mbar_wait(s_bar + 8 * (stages + slot), ((j / stages) - 1) & 1);
      const int ti = j / chunks, c = j - ti * chunks, tile = cta + ti * ctas, pi = part_of(a, sd, tile, sd.from), local = tile - a.first[pi];
      const GemvPart& p = a.part[pi];
      const int rows = min(16, p.n - local * 16), st0 = c * sd.chunk_steps, st = min(sd.chunk_steps, nsteps - st0);
      const u32 bytes = st * T::STEP_BYTES, full = s_bar + 8 * slot;
      const bool side = c == 0 && side_pitch > 0;
      __syncwarp();
      if (lane == 0) mbar_expect(full, rows * bytes + (side ? 16 * side_pitch : 0));
      __syncwarp();
      if (lane < rows)
        bulk_load(s_stage + slot * stage_bytes + lane * sd.pitch, p.codes + (size_t)(local * 16 + lane) * sd.code_pitch + (size_t)st0 * T::STEP_BYTES, bytes, full);
      if (side && lane == 0) bulk_load(s_side + (ti % sd.slots) * side_bytes, p.scales + (size_t)local * 16 * side_pitch, 16 * side_pitch, full);
    }
    pdl_wait();
    return;
  }

  pdl_wait();
  const int cols = a.cols;
  stage_input<F>(a, sd.K, xs, xp, tid);
  bar_named(1, CONSUMERS);

  u32 x_addr[NT];
#pragma unroll
  for (int n = 0; n < NT; n++) x_addr[n] = s_x + min(n * 8 + g, cols - 1) * xp + q * T::LANE_K * 2;

  for (int ti = 0, j = 0; ti < my_tiles; ti++) {
    const int tile = cta + ti * ctas, pi = part_of(a, sd, tile, sd.from), local = tile - a.first[pi];
    const GemvPart& p = a.part[pi];
    const ChunkPlanes w = {p.scales, side_pitch, side_pitch, 0, false};
    const u32 side = s_side + (sd.slots ? ti % sd.slots : 0) * side_bytes;
    // The experts' outputs are asked for before the weights are waited on.
    if (p.mode & M_COMBINE && tid < NT * 128) {
      const int col = tid >> 4, row = local * 16 + (tid & 15);
      float sum = 0;
      if (col < cols && row < p.n) {
#pragma unroll 5
        for (int k = 0; k < a.top; k++)
          sum = fmaf(a.weights[col * a.top + k], bf2f(a.ye[(size_t)(col * a.top + k) * p.n + row]), sum);
      }
      sums[tid] = sum;
    }
    float acc[NT][4];
#pragma unroll
    for (int n = 0; n < NT; n++) acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0;
    for (int c = 0; c < chunks; c++, j++) {
      const int slot = j % stages;
      mbar_wait(s_bar + 8 * slot, (j / stages) & 1);
      const u32 row0 = s_stage + slot * stage_bytes + g * sd.pitch + q * T::LANE_BYTES;
      const int st0 = c * sd.chunk_steps, st = min(sd.chunk_steps, nsteps - st0);
      chunk_sums<F, NT, true>(acc, w, local, row0, row0 + 8 * sd.pitch, st0, st, warp, lane, side, side, nullptr, nullptr, x_addr, nullptr, 0, cols, 0);
      __syncwarp();
      if (lane == 0) mbar_arrive(s_bar + 8 * (stages + slot));
    }
    float* mine = red + ((ti & 1) * 16 + warp) * RED;
#pragma unroll
    for (int n = 0; n < NT; n++) {
      float* o = mine + (n * 8 + 2 * q) * 20 + g;
      o[0] = acc[n][0], o[20] = acc[n][1], o[8] = acc[n][2], o[28] = acc[n][3];
    }
    bar_named(1, CONSUMERS);
    const int col = tid >> 4, row = local * 16 + (tid & 15);
    if (tid < NT * 128 && col < cols && row < p.n) {
      const float* o = red + (ti & 1) * 16 * RED + col * 20 + (tid & 15);
      float v = o[0];
#pragma unroll
      for (int k = 1; k < 16; k++) v += o[k * RED];
      v = finish(v, p.row_scale, row, p.tscale, p.mode & M_DIVIDE);
      if (p.mode & M_COMBINE) v = fmaf(sigmoidf(a.logit[(size_t)col * a.logit_pitch]), rbf(v), sums[tid]);
      if (p.mode & M_F32) ((float*)p.y)[(size_t)col * p.y_pitch + row] = v;
      else ((u16*)p.y)[(size_t)col * p.y_pitch + row] = f2bf(v);
    }
  }
}

