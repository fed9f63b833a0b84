// Pieces of the hyper-connection mixer around plain linears, for many rows and for geometries that the fused kernels do not
// take. Inputs FP32 as the linears leave them, one rounding at the store.
#include "common.cuh"

// y = bf16(silu(v / over)). grid (ceil(n/256)).
extern "C" __global__ void __launch_bounds__(256) silu_over(const float* __restrict__ v, u16* __restrict__ y, int n, float over) {
  pdl_launch();
  pdl_wait();
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i < n) y[i] = f2bf(siluf(v[i] / over));
}

// v = 2 sigma(v / over) in place. grid (ceil(n/256)).
extern "C" __global__ void __launch_bounds__(256) twice_sigmoid_over(float* __restrict__ v, int n, float over) {
  pdl_launch();
  pdl_wait();
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i < n) v[i] = 2.0f * sigmoidf(v[i] / over);
}

// x[t][i] = bf16(1/n sum_s sigma(v[t][s][i]) N[t][s][i]), streams in rising order. grid (ceil(h/256), rows).
extern "C" __global__ void __launch_bounds__(256) mix_streams(const float* __restrict__ v, const u16* __restrict__ N, u16* __restrict__ x, int h, int streams) {
  pdl_launch();
  pdl_wait();
  const int i = blockIdx.x * 256 + threadIdx.x, r = blockIdx.y;
  if (i >= h) return;
  float a = 0;
  for (int s = 0; s < streams; s++) {
    const size_t at = ((size_t)r * streams + s) * h + i;
    a = fmaf(sigmoidf(v[at]), bf2f(N[at]), a);
  }
  x[(size_t)r * h + i] = f2bf(a / (float)streams);
}
