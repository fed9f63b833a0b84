// Experts in the canonical order of sums for every arithmetic but W4A4: per scale group an FP32 fma chain in rising k over exact
// codes, groups added by fma within eight spans of K, spans pairwise, row or tensor scale last. The same bits as on the CPU.
#include "common.cuh"

// codes BF16 [experts][N][K] (exact), scales FP32 [experts][N][G], G = ceil(K/group); last FP32 [experts][N] multiplies (or divides).
// Pick p uses expert ids[p] and row p / share of x [..][K]; its N results, BF16, go to y [picks][y_pitch]. grid (ceil(N/32), picks), 256 threads.
extern "C" __global__ void __launch_bounds__(256) expert_chain(const u16* __restrict__ codes, const float* __restrict__ scales, const float* __restrict__ last,
                                                               const int* __restrict__ ids, const u16* __restrict__ x, u16* __restrict__ y, int N, int K,
                                                               int group, int share, int y_pitch, int first_row, int expert_rows, int divide) {
  __shared__ float sum[8][32];
  pdl_launch();
  pdl_wait();
  const int row = blockIdx.x * 32 + (threadIdx.x & 31), span = threadIdx.x >> 5, p = blockIdx.y;
  const int G = (K + group - 1) / group;
  const size_t at = (size_t)ids[p] * expert_rows + first_row + min(row, N - 1);
  const u16 *c = codes + at * K, *xr = x + (size_t)(p / share) * K;
  float v = 0;
  for (int g = span * G / 8; g < (span + 1) * G / 8; g++) {
    float t = 0;
    for (int k = g * group; k < min(K, (g + 1) * group); k++) t = fmaf(bf2f(c[k]), bf2f(xr[k]), t);
    v = fmaf(scales[at * G + g], t, v);
  }
  sum[span][threadIdx.x & 31] = v;
  __syncthreads();
  if (span || row >= N) return;
  const int l = threadIdx.x;
  v = ((sum[0][l] + sum[1][l]) + (sum[2][l] + sum[3][l])) + ((sum[4][l] + sum[5][l]) + (sum[6][l] + sum[7][l]));
  y[(size_t)p * y_pitch + row] = f2bf(divide ? __fdiv_rn(v, last[at]) : v * last[at]);
}
