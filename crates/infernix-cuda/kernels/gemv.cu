// Decode linear: y[c][n] = sum_k W[n][k] x[c][k] for 1-64 columns, the same bits for a column at every width (NVFP4: nvfp4.cu).
//
// 16 consumer warps and one producer warp a CTA. The CTA walks over tiles of 16 rows; a ring of stages holds
// `steps_per_chunk` steps of 16 rows, each row one bulk copy. Warp w takes the steps j with j % 16 == w of every
// tile in rising order; 16 partial sums are added in warp order. That order depends on K and the format alone: not
// on columns, chunking, ring depth or grid.
#include "gemv_body.cuh"

#define GEMV_PARAMS                                                                                                    \
  const u8 *__restrict__ codes, const u8 *__restrict__ high, const u8 *__restrict__ scales,                            \
      const u16 *__restrict__ row_scale, float tscale, const bf16 *__restrict__ x, void *__restrict__ y, int N, int K, \
      int kx, int cols, int x_pitch, int y_pitch, int code_pitch, int high_pitch, int scale_pitch, int stages,         \
      int chunk_steps, int pitch, int side_slots, int mode
#define GEMV_ARGS                                                                                                      \
  codes, high, scales, row_scale, tscale, x, y, N, K, kx, cols, x_pitch, y_pitch, code_pitch, high_pitch, scale_pitch, \
      stages, chunk_steps, pitch, side_slots, mode

// XS: the activations of all columns are in shared memory, in the format's pair order.
template <int F, int NT, bool XS> DEV void gemv_body(GEMV_PARAMS) {
  using T = Fmt<F>;
  extern __shared__ __align__(128) u8 smem[];
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, q = lane & 3;
  const int nsteps = K / T::STEP;
  const int chunks = (nsteps + chunk_steps - 1) / chunk_steps;
  const int tiles = (N + 15) >> 4;
  const int my_tiles = tiles > (int)blockIdx.x ? (tiles - 1 - (int)blockIdx.x) / (int)gridDim.x + 1 : 0;
  const int jobs = my_tiles * chunks;
  constexpr int RT = NT > 2 ? 2 : NT;              // n-tiles reduced at a time
  constexpr int RED = RT * 8 * 20;                 // floats of one warp's partial tile (column stride 20)

  const int stage_bytes = 16 * pitch;
  // Tile scales (F_FP8B) are few and shared by rows: they are read where they are used.
  const int side_pitch = F == F_FP8B ? 0 : scale_pitch;
  // High bits of a tile of long rows may not fit shared memory: then they too are read where they are used.
  const bool high_direct = mode & 4;
  const int hside_pitch = high_direct ? 0 : high_pitch;
  const int side_bytes = ((16 * side_pitch + 127) & ~127) + ((16 * hside_pitch + 127) & ~127);
  const u32 s_bar = smem_u32(smem);                // full[stages], empty[stages]
  const u32 s_red = s_bar + 256;
  const u32 s_side = s_red + 2 * 16 * RED * 4;
  const u32 s_stage = s_side + side_slots * side_bytes;
  const u32 s_x = s_stage + stages * stage_bytes;
  const int xp = ((K * 2 + 127) & ~127) + T::X_PAD;  // bytes
  float* red = (float*)(smem + 256);

  if (tid == 0) {
    for (int i = 0; i < stages; i++) mbar_init(s_bar + 8 * i, 1), mbar_init(s_bar + 8 * (stages + i), 16);
    mbar_fence_init();
  }
  __syncthreads();
  pdl_launch();

  if (warp == 16) {
    // Producer. Weights do not depend on earlier kernels: the ring fills before the wait.
    const int slot_mod = side_slots > 0 ? side_slots : 1;
    for (int j = 0; j < jobs; j++) {
      const int slot = j % stages;
      if (j >= stages) mbar_wait(s_bar + 8 * (stages + slot), ((j / stages) - 1) & 1);
      const int ti = j / chunks, c = j - ti * chunks;
      const int tile = blockIdx.x + ti * gridDim.x;
      const int rows = min(16, N - tile * 16);
      const int st0 = c * chunk_steps, st = min(chunk_steps, nsteps - st0);
      const u32 bytes = st * T::STEP_BYTES;
      const bool side = c == 0 && side_slots > 0;
      const u32 full = s_bar + 8 * slot;
      __syncwarp();
      if (lane == 0) mbar_expect(full, rows * bytes + (side ? 16 * (side_pitch + hside_pitch) : 0));
      __syncwarp();
      if (lane < rows)
        bulk_load(s_stage + slot * stage_bytes + lane * pitch, codes + (size_t)(tile * 16 + lane) * code_pitch + (size_t)st0 * T::STEP_BYTES, bytes, full);
      if (side && lane == 0) {
        const u32 dst = s_side + (ti % slot_mod) * side_bytes;
        if (side_pitch) bulk_load(dst, scales + (size_t)tile * 16 * side_pitch, 16 * side_pitch, full);
        if (hside_pitch) bulk_load(dst + ((16 * side_pitch + 127) & ~127), high + (size_t)tile * 16 * high_pitch, 16 * high_pitch, full);
      }
    }
    pdl_wait();
    return;
  }

  pdl_wait();
  if (XS) {
    const int per = K >> 3;
    for (int i = tid; i < cols * per; i += CONSUMERS) {
      const int c = i / per, k = (i - c * per) * 8;
      u32 r[4];
      order_x<F>(k < kx ? __ldg((const uint4*)(x + (size_t)c * x_pitch + k)) : make_uint4(0, 0, 0, 0), r);
      *(uint4*)(smem + (s_x - s_bar) + c * xp + k * 2) = make_uint4(r[0], r[1], r[2], r[3]);
    }
    bar_named(1, CONSUMERS);
  }

  const ChunkPlanes w = {scales, side_pitch, scale_pitch, high_pitch, high_direct};
  // Columns that do not exist read the last one: their sums are never stored.
  u32 x_addr[NT];
#pragma unroll
  for (int n = 0; n < NT; n++) x_addr[n] = s_x + min(n * 8 + g, cols - 1) * xp + q * T::LANE_K * 2;

  for (int ti = 0, j = 0; ti < my_tiles; ti++) {
    const int tile = blockIdx.x + ti * gridDim.x;
    const u32 side = s_side + (ti % max(side_slots, 1)) * side_bytes;
    const u32 hside = side + ((16 * side_pitch + 127) & ~127);
    const u8 *hrow0 = high + (size_t)min(tile * 16 + g, N - 1) * high_pitch, *hrow1 = high + (size_t)min(tile * 16 + g + 8, N - 1) * high_pitch;
    float acc[NT][4];
#pragma unroll
    for (int n = 0; n < NT; n++) acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0;
    for (int c = 0; c < chunks; c++, j++) {
      const int slot = j % stages;
      mbar_wait(s_bar + 8 * slot, (j / stages) & 1);
      const u32 row0 = s_stage + slot * stage_bytes + g * pitch + q * T::LANE_BYTES;
      const u32 row1 = row0 + 8 * pitch;
      const int st0 = c * chunk_steps, st = min(chunk_steps, nsteps - st0);
      chunk_sums<F, NT, XS>(acc, w, tile, row0, row1, st0, st, warp, lane, side, hside, hrow0, hrow1, x_addr, x, x_pitch, cols, kx);
      __syncwarp();
      if (lane == 0) mbar_arrive(s_bar + 8 * (stages + slot));
    }
    // 16 partial tiles, added in warp order. Two buffers: one barrier a reduction.
#pragma unroll
    for (int n0 = 0; n0 < NT; n0 += RT) {
      const int parity = (ti * (NT / RT) + n0 / RT) & 1;
      float* mine = red + (parity * 16 + warp) * RED;
#pragma unroll
      for (int n = 0; n < RT; n++) {
        float* p = mine + (n * 8 + 2 * q) * 20 + g;
        p[0] = acc[n0 + n][0], p[20] = acc[n0 + n][1], p[8] = acc[n0 + n][2], p[28] = acc[n0 + n][3];
      }
      bar_named(1, CONSUMERS);
      if (tid < RT * 128) {
        const int col = tid >> 4, r = tid & 15, row = tile * 16 + r, oc = n0 * 8 + col;
        if (oc < cols && row < N) {
          const float* p = red + parity * 16 * RED + col * 20 + r;
          float v = p[0];
#pragma unroll
          for (int w = 1; w < 16; w++) v += p[w * RED];
          v = finish(v, row_scale, row, tscale, mode & 2);
          if (mode & 1) ((float*)y)[(size_t)oc * y_pitch + row] = v;
          else ((u16*)y)[(size_t)oc * y_pitch + row] = f2bf(v);
        }
      }
    }
  }
}

#define ENTRY(NAME, F, NT)                                                                                              \
  extern "C" __global__ void __launch_bounds__(CONSUMERS + 32, NT == 1 ? 2 : 1) NAME##_n##NT(GEMV_PARAMS) {                 \
    gemv_body<F, NT, true>(GEMV_ARGS);                                                                                  \
  }                                                                                                                     \
  extern "C" __global__ void __launch_bounds__(CONSUMERS + 32, 1) NAME##_n##NT##_global(GEMV_PARAMS) {                      \
    gemv_body<F, NT, false>(GEMV_ARGS);                                                                                 \
  }
#define ENTRIES(NAME, F) ENTRY(NAME, F, 1) ENTRY(NAME, F, 2) ENTRY(NAME, F, 4) ENTRY(NAME, F, 8)
ENTRIES(gemv_bf16, F_BF16)
ENTRIES(gemv_q8, F_Q8)
ENTRIES(gemv_q4, F_Q4)
ENTRIES(gemv_q5, F_Q5)
ENTRIES(gemv_q6, F_Q6)
ENTRIES(gemv_fp8, F_FP8)
ENTRIES(gemv_fp8b, F_FP8B)
ENTRIES(gemv_mxfp8, F_MXFP8)
