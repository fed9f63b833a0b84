// Routing of synthetic models: experts by Zipf's law over a permutation of each layer, the same picks for the same seed, layer and
// position. Random weights route evenly, which no trained model does.
#include "common.cuh"

DEV u64 mix64(u64 v) {
  v += 0x9E3779B97F4A7C15ull;
  v = (v ^ (v >> 30)) * 0xBF58476D1CE4E5B9ull;
  v = (v ^ (v >> 27)) * 0x94D049BB133111EBull;
  return v ^ (v >> 31);
}
DEV float unit(u64 v) { return (float)(v >> 40) * 0x1p-24f; }

// One warp a row, lane k its pick k (top <= 32). cdf FP32 [E] rising to 1; rank i of the law is expert (a i + b) mod E, a prime to E. With
// probability `repeat` a pick is that of the position before. A lane whose expert a lower lane has draws again. ids I32 and weights FP32
// [rows][top]; weights are equal (null: not wanted). laws [layers][3]: seed, a, b; blockIdx.y counts layers from `law` on.
extern "C" __global__ void __launch_bounds__(128) zipf_route(int* __restrict__ ids, float* __restrict__ weights, const int* __restrict__ row_pos,
                                                             const float* __restrict__ cdf, int rows, int top, int E, const u64* __restrict__ laws, int law,
                                                             float repeat) {
  pdl_launch();
  pdl_wait();
  const int r = blockIdx.x * 4 + (threadIdx.x >> 5), k = threadIdx.x & 31;
  if (r >= rows) return;
  const u64 seed = laws[3 * (law + blockIdx.y)];
  const long long a = (long long)laws[3 * (law + blockIdx.y) + 1], b = (long long)laws[3 * (law + blockIdx.y) + 2];
  ids += (size_t)blockIdx.y * rows * top, weights += weights ? (size_t)blockIdx.y * rows * top : 0;
  int t = row_pos[r], attempt = 0, id = 0;
  for (int i = 0; i < 64 && t > 0 && unit(mix64(seed ^ mix64((u64)t * 64 + k) ^ 0x5bd1)) < repeat; i++) t--;
  bool draw = true;
  while (__any_sync(~0u, draw)) {
    if (draw) {
      const float u = unit(mix64(seed ^ mix64(((u64)t * 64 + k) * 4096 + attempt)));
      int lo = 0, hi = E - 1;
      while (lo < hi) {
        const int m = (lo + hi) >> 1;
        if (__ldg(cdf + m) > u) hi = m;
        else lo = m + 1;
      }
      // After many draws any free expert will do.
      id = (int)((a * (attempt < 64 ? lo : attempt + k) + b) % E);
      attempt++;
    }
    draw = false;
    for (int j = 0; j < top; j++) {
      const int other = __shfl_sync(~0u, id, j);
      draw |= j < k && k < top && other == id;
    }
  }
  if (k >= top) return;
  ids[(size_t)r * top + k] = id;
  if (weights) weights[(size_t)r * top + k] = 1.0f / (float)top;
}
