// Rows from one place to another: copies side by side, and rows of a stored table. Copies round nothing.
#include "nvfp4.cuh"

// dst row r, copy j, unit i = src row r, unit i. Pitches and strides in units. grid (ceil(n/256), rows).
template <typename T> DEV void copy_body(const T* src, T* dst, int n, int src_pitch, int dst_pitch, int copies, int copy_stride) {
  pdl_launch();
  pdl_wait();
  const int i = blockIdx.x * 256 + threadIdx.x, r = blockIdx.y;
  if (i >= n) return;
  const T v = src[(size_t)r * src_pitch + i];
  T* d = dst + (size_t)r * dst_pitch + i;
  for (int j = 0; j < copies; j++) d[(size_t)j * copy_stride] = v;
}
extern "C" __global__ void __launch_bounds__(256) copy_rows_16(const uint4* src, uint4* dst, int n, int src_pitch, int dst_pitch, int copies, int copy_stride) {
  copy_body(src, dst, n, src_pitch, dst_pitch, copies, copy_stride);
}
extern "C" __global__ void __launch_bounds__(256) copy_rows_2(const u16* src, u16* dst, int n, int src_pitch, int dst_pitch, int copies, int copy_stride) {
  copy_body(src, dst, n, src_pitch, dst_pitch, copies, copy_stride);
}

DEV float e2m1f(u32 c) {
  const float m = __uint_as_float((c & 7) ? ((c & 7) == 1 ? 0x3f000000u : 0x3f800000u + (((c & 7) - 2) << 22)) : 0u);
  return c & 8 ? -m : m;
}
DEV float e4m3f(u32 b) {
  const float m = e4m3_m8(b & 127) * 256.0f;
  return b & 128 ? -m : m;
}

// Rows `ids` of a table in any stored format of the linears (planes as there; NVFP4: units, code_pitch = K / 1024), rounded to BF16: the exact product of the stored
// words, once rounded to FP32 where it does not fit, as the host decodes it. fmt: 0 bf16, 1 q8, 2 q4, 3 q5, 4 q6, 5 nvfp4, 6 fp8.
// An id beyond the table reads its last row. grid (rows, ceil(n/256)).
extern "C" __global__ void __launch_bounds__(256) embed_table(const int* __restrict__ ids, const u8* __restrict__ codes, const u8* __restrict__ high,
                                                              const u8* __restrict__ scales, const u16* __restrict__ row_scale, float tscale,
                                                              int divide, int fmt, int code_pitch, int high_pitch, int scale_pitch, int table_rows,
                                                              int n, u16* __restrict__ y) {
  pdl_launch();
  pdl_wait();
  const int r = blockIdx.x;
  const size_t id = (size_t)min((u32)ids[r], (u32)(table_rows - 1));
  const u8 *c = codes + id * code_pitch, *h = high + id * high_pitch, *s = scales + id * scale_pitch;
  for (int i = blockIdx.y * 256 + threadIdx.x; i < n; i += gridDim.y * 256) {
    float v;
    if (fmt == 0) {
      y[(size_t)r * n + i] = ((const u16*)c)[i];
      continue;
    } else if (fmt == 1) {
      v = (float)((const signed char*)c)[i] * h2f(((const u16*)s)[i >> 5]);
    } else if (fmt == 6) {
      v = e4m3f(c[i]);
    } else if (fmt == 5) {
      const int step = i >> 6, lane = (int)(id & 7) * 4 + ((i >> 4) & 3);
      const u8* u = codes + unit_of((int)(id >> 3), step, code_pitch);
      const u32 w = *(const u16*)(u + second_step(step) * 256 + lane * 8 + ((i & 15) >> 2) * 2);
      v = e2m1f(code_e2m1(w, i & 3)) * e4m3f(u[512 + 2 * lane + second_step(step)]);
    } else {
      const int bits = fmt + 2;
      u32 q = (c[i >> 1] >> (4 * (i & 1))) & 15;
      if (fmt == 3) q |= ((h[i >> 3] >> (i & 7)) & 1) << 4;
      if (fmt == 4) q |= ((h[i >> 2] >> (2 * (i & 3))) & 3) << 4;
      v = (float)((int)(q << (32 - bits)) >> (32 - bits)) * h2f(((const u16*)s)[i >> 6]);
    }
    if (row_scale) v *= bf2f(row_scale[id]);
    y[(size_t)r * n + i] = f2bf(divide ? __fdiv_rn(v, tscale) : v * tscale);
  }
}

// y[r][i] = x[r][columns[i]] of n columns. grid (ceil(n/256), rows).
extern "C" __global__ void __launch_bounds__(256) gather_columns(const u16* __restrict__ x, const int* __restrict__ columns, u16* __restrict__ y, int n,
                                                                 int x_pitch) {
  pdl_launch();
  pdl_wait();
  const int i = blockIdx.x * 256 + threadIdx.x, r = blockIdx.y;
  if (i < n) y[(size_t)r * n + i] = x[(size_t)r * x_pitch + columns[i]];
}
