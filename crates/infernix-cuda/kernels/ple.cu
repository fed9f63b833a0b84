// n-gram embedding: the gate of each stream and the dilated causal convolution with its kept columns.
#include "common.cuh"

// a = key . query / sqrt(h); a <- sign(a) sqrt(max(|a|, 1e-6)); V = bf16(sigma(a) value). key, query, V [rows][streams][h],
// value [rows][h]. grid (streams, rows).
extern "C" __global__ void __launch_bounds__(256) ple_gate(const u16* __restrict__ key, const u16* __restrict__ query, const u16* __restrict__ value,
                                                           u16* __restrict__ V, int h) {
  __shared__ float part[8];
  pdl_launch();
  pdl_wait();
  const int tid = threadIdx.x, r = blockIdx.y;
  const size_t at = ((size_t)r * gridDim.x + blockIdx.x) * h;
  float s = 0;
  for (int i = tid; i < h; i += 256) s = fmaf(bf2f(key[at + i]), bf2f(query[at + i]), s);
  s = warp_sum(s);
  if ((tid & 31) == 0) part[tid >> 5] = s;
  __syncthreads();
  s = 0;
  for (int i = 0; i < 8; i++) s += part[i];
  const float a = s / sqrtf((float)h), g = sigmoidf(a == 0.0f ? 0.0f : copysignf(sqrtf(fmaxf(fabsf(a), 1e-6f)), a));
  for (int i = tid; i < h; i += 256) V[at + i] = f2bf(g * bf2f(value[(size_t)r * h + i]));
}

// R = bf16(R + V + silu(sum_j w[c][j] C[t - (K-1-j) d][c])) in place, rows of W values. Row r is column r - first[l] of lane
// l = row_lane[r]; columns before the call come from state [slot][(K-1) d][W], oldest first. w BF16 [W][K]. grid (ceil(W/256), rows).
extern "C" __global__ void __launch_bounds__(256) ple_conv(u16* __restrict__ R, const u16* __restrict__ V, const u16* __restrict__ C, const u16* __restrict__ w,
                                                           const u16* __restrict__ state, const int* __restrict__ row_lane, const int* __restrict__ first,
                                                           const int* __restrict__ slots, int W, int K, int d, u64 state_stride) {
  pdl_launch();
  pdl_wait();
  const int c = blockIdx.x * 256 + threadIdx.x, r = blockIdx.y;
  if (c >= W) return;
  const int lane = row_lane[r], col = r - first[lane], kept = (K - 1) * d;
  const u16* st = state + slots[lane] * state_stride;
  float s = 0;
  for (int j = 0; j < K; j++) {
    const int back = (K - 1 - j) * d;
    const u16 x = col >= back ? C[(size_t)(r - back) * W + c] : st[(size_t)(kept + col - back) * W + c];
    s = fmaf(bf2f(w[(size_t)c * K + j]), bf2f(x), s);
  }
  const size_t at = (size_t)r * W + c;
  R[at] = f2bf(bf2f(R[at]) + bf2f(V[at]) + siluf(s));
}

// Columns kept after the first count[l] columns of lane l: the last `kept` of state(slots[l]) | C, into slot out_slots[l], another
// one. A lane of several columns is also noted in rec [slot / 2][..][W], where rec is given. grid (ceil(W/256), lanes).
extern "C" __global__ void __launch_bounds__(256) ple_fold(const u16* __restrict__ C, u16* __restrict__ state, const int* __restrict__ first,
                                                           const int* __restrict__ count, const int* __restrict__ slots, const int* __restrict__ out_slots,
                                                           int W, int kept, u64 state_stride, u16* __restrict__ rec, u64 rec_stride) {
  pdl_launch();
  pdl_wait();
  const int c = blockIdx.x * 256 + threadIdx.x, lane = blockIdx.y;
  if (c >= W) return;
  const int f = first[lane], n = count[lane], cols = first[lane + 1] - f;
  const u16* from = state + slots[lane] * state_stride;
  u16* to = state + out_slots[lane] * state_stride;
  for (int i = 0; i < kept; i++) {
    const int p = i + n - kept;
    to[(size_t)i * W + c] = p >= 0 ? C[(size_t)(f + p) * W + c] : from[(size_t)(i + n) * W + c];
  }
  if (rec && cols > 1)
    for (int i = 0; i < cols; i++) rec[(slots[lane] >> 1) * rec_stride + (size_t)i * W + c] = C[(size_t)(f + i) * W + c];
}
