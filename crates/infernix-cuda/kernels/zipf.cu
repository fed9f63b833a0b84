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

// One thread a row. cdf FP32 [E] rising to 1; rank i of the law is expert (a i + b) mod E, a prime to E. With probability `repeat` a pick is
// that of the position before. ids I32 and weights FP32 [rows][top]; weights are equal.
extern "C" __global__ void __launch_bounds__(64) zipf_route(int* __restrict__ ids, float* __restrict__ weights, const int* __restrict__ row_pos,
                                                            const float* __restrict__ cdf, int rows, int top, int E, int a, int b, u64 seed,
                                                            float repeat) {
  pdl_launch();
  pdl_wait();
  const int r = blockIdx.x * 64 + threadIdx.x;
  if (r >= rows) return;
  int* out = ids + (size_t)r * top;
  for (int k = 0; k < top; k++) {
    int t = row_pos[r];
    for (int i = 0; i < 64 && t > 0 && unit(mix64(seed ^ mix64((u64)t * 64 + k) ^ 0x5bd1)) < repeat; i++) t--;
    int id = 0;
    for (int attempt = 0;; attempt++) {
      const float u = unit(mix64(seed ^ mix64(((u64)t * 64 + k) * 4096 + attempt)));
      int lo = 0, hi = E - 1;
      while (lo < hi) {
        const int m = (lo + hi) >> 1;
        if (cdf[m] > u) hi = m;
        else lo = m + 1;
      }
      // After many draws any free expert will do.
      id = (int)(((long long)a * (attempt < 64 ? lo : attempt) + b) % E);
      bool taken = false;
      for (int j = 0; j < k; j++) taken |= out[j] == id;
      if (!taken) break;
    }
    out[k] = id;
    weights[(size_t)r * top + k] = 1.0f / (float)top;
  }
}
