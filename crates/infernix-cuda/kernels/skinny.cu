// Products of many rows with a matrix of one to four rows (injection factors, the shared expert's logit): bound by reading x once,
// which a tile of 256 weight rows would multiply in vain.
#include "common.cuh"

// y[t][n] = sum_k W[n][k] x[t][k]: W BF16 [N][k_pitch], x BF16 [rows][x_pitch], K and pitches multiples of 8. A warp a row; lane l takes
// every 32nd run of 8 k in rising order, lanes are added in a fixed tree: a row's bits depend on K alone. y BF16 or FP32 (mode & 1).
extern "C" __global__ void __launch_bounds__(256) skinny(const u16* __restrict__ W, const u16* __restrict__ x, void* __restrict__ y, int N, int K, int k_pitch,
                                                         int rows, int x_pitch, int y_pitch, int mode) {
  extern __shared__ __align__(16) u8 smem[];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, runs = K >> 3;
  for (int i = threadIdx.x; i < N * runs; i += 256) {
    const int n = i / runs, r = i - n * runs;
    *(uint4*)(smem + (size_t)i * 16) = __ldg((const uint4*)(W + (size_t)n * k_pitch + r * 8));
  }
  pdl_launch();
  __syncthreads();
  pdl_wait();
  for (int t = blockIdx.x * 8 + warp; t < rows; t += gridDim.x * 8) {
    const u16* xr = x + (size_t)t * x_pitch;
    float acc[4] = {0, 0, 0, 0};
#pragma unroll 4
    for (int r = lane; r < runs; r += 32) {
      const uint4 v = *(const uint4*)(xr + r * 8);
      const u32 xv[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int n = 0; n < 4; n++) {
        if (n < N) {
          const uint4 w = *(const uint4*)(smem + (size_t)(n * runs + r) * 16);
          const u32 wv[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
          for (int i = 0; i < 4; i++) acc[n] = fmaf(bf_lo(wv[i]), bf_lo(xv[i]), acc[n]), acc[n] = fmaf(bf_hi(wv[i]), bf_hi(xv[i]), acc[n]);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < 4; n++) {
      if (n < N) {
        const float s = warp_sum(acc[n]);
        if (lane == 0) {
          if (mode & 1) ((float*)y)[(size_t)t * y_pitch + n] = s;
          else ((u16*)y)[(size_t)t * y_pitch + n] = f2bf(s);
        }
      }
    }
  }
}
