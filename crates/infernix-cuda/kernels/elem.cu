// Row operations: norms, rope, convolution, gates, embedding, combine. One rounding each, at the store.
#include "row_ops.cuh"

// y = bf16(x * rstd * (w or 1 + w)); `groups` equal parts of the row, each normed by itself. With `a` (one group), x becomes
// r = bf16(x + a) first, which is stored too; r may be x. grid (groups, rows), NORM_MOST / 8 pieces at most.
extern "C" __global__ void __launch_bounds__(1024) rms_norm(const u16* x, const u16* __restrict__ a, const u16* __restrict__ w, u16* r, u16* __restrict__ y, int n,
                                                            int x_pitch, int a_pitch, int y_pitch, float eps, int centred) {
  __shared__ float part[NORM_MOST / 256];
  const int grp = blockIdx.x, row = blockIdx.y, tid = threadIdx.x, pieces = (n + 7) >> 3, T = blockDim.x;
  const u16 *xr = x + (size_t)row * x_pitch + (size_t)grp * n, *ar = a + (size_t)row * a_pitch, *wr = w + (size_t)grp * n;
  u16 *yr = y + (size_t)row * y_pitch + (size_t)grp * n, *rr = r + (size_t)row * x_pitch;
  const bool whole = ((n | x_pitch | a_pitch | y_pitch) & 7) == 0 && (((u64)x | (u64)a | (u64)w | (u64)r | (u64)y) & 15) == 0;
  uint4 v[2], g[2];
  pdl_launch();
#pragma unroll
  for (int i = 0; i < 2; i++)
    if (tid + i * T < pieces) g[i] = load_piece(wr, tid + i * T, n, whole);
  pdl_wait();
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int p = tid + i * T;
    if (i * T >= pieces) break;
    v[i] = make_uint4(0, 0, 0, 0);
    if (p < pieces) {
      v[i] = load_piece(xr, p, n, whole);
      if (a) {
        v[i] = add8(v[i], load_piece(ar, p, n, whole));
        store_piece(rr, p, n, whole, v[i]);
      }
    }
    const float s = warp_sum(squares8(v[i]));
    if ((tid & 31) == 0) part[p >> 5] = s;
  }
  __syncthreads();
  const float rs = norm_scale(part, pieces, n, eps), c = centred ? 1.0f : 0.0f;
#pragma unroll
  for (int i = 0; i < 2; i++)
    if (tid + i * T < pieces) store_piece(yr, tid + i * T, n, whole, scaled8(v[i], g[i], rs, c));
}

// cos and sin of position x frequency for the rows of a round, formed in binary64: FP32 products lose the angle
// beyond some ten thousand positions. pos [rows][3] (t, h, w), table [rows][2][half].
extern "C" __global__ void rope_table(const int* __restrict__ pos, const double* __restrict__ freq, const u8* __restrict__ axis,
                                      float scale, int half, int rows, float* __restrict__ table) {
  pdl_launch();
  pdl_wait();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= rows * half) return;
  const int r = i / half, f = i - r * half;
  double s, c;
  sincos((double)pos[r * 3 + axis[f]] * freq[f], &s, &c);
  table[(size_t)r * 2 * half + f] = (float)(c * (double)scale);
  table[(size_t)r * 2 * half + half + f] = (float)(s * (double)scale);
}

// Head norm (1 + w) then rotation of elements (i, i + half), one rounding. One warp a (head, row).
// x: row r, head h at x + r * x_pitch + h * x_head; y likewise. d <= 256.
extern "C" __global__ void __launch_bounds__(128) head_norm_rope(const u16* __restrict__ x, const u16* __restrict__ w, const float* __restrict__ table,
                                                                 u16* __restrict__ y, int d, int half, int heads, int rows, int x_pitch,
                                                                 int x_head, int y_pitch, int y_head, float eps) {
  __shared__ float buf[4][256];
  pdl_launch();
  pdl_wait();
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, job = blockIdx.x * 4 + warp;
  if (job >= heads * rows) return;
  const int r = job / heads, h = job - r * heads;
  const u16* xr = x + (size_t)r * x_pitch + (size_t)h * x_head;
  u16* yr = y + (size_t)r * y_pitch + (size_t)h * y_head;
  rotated_head(xr, w, table + (size_t)r * 2 * half, buf[warp], d, half, lane, eps, [&](int i, u16 v, u16 u) { *(u32*)(yr + i) = v | (u32)u << 16; });
}

// Causal depthwise convolution of four taps and silu, one rounding. x [rows][C] of one sequence, state [3][C] (the three
// columns before row 0, oldest first), w [C][4]. grid (C/256, rows).
extern "C" __global__ void __launch_bounds__(256) conv_silu(const u16* __restrict__ x, const u16* __restrict__ state, const u16* __restrict__ w,
                                                            u16* __restrict__ y, int C, int x_pitch, int y_pitch) {
  pdl_launch();
  pdl_wait();
  const int c = blockIdx.x * 256 + threadIdx.x, t = blockIdx.y;
  if (c >= C) return;
  float s = 0;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const int p = t - 3 + j;
    const float v = p >= 0 ? bf2f(x[(size_t)p * x_pitch + c]) : bf2f(state[(size_t)(p + 3) * C + c]);
    s = fmaf(bf2f(w[c * 4 + j]), v, s);
  }
  y[(size_t)t * y_pitch + c] = f2bf(siluf(s));
}

// Advances a convolution state by n columns of x (n read from the device): the last three of state | x[0..n).
extern "C" __global__ void __launch_bounds__(256) conv_fold(const u16* __restrict__ x, u16* __restrict__ state, const int* __restrict__ count, int C, int x_pitch) {
  pdl_launch();
  pdl_wait();
  const int c = blockIdx.x * 256 + threadIdx.x, n = *count;
  if (c >= C || n <= 0) return;
  u16 v[3];
#pragma unroll
  for (int j = 0; j < 3; j++) {
    const int p = n - 3 + j;
    v[j] = p >= 0 ? x[(size_t)p * x_pitch + c] : state[(size_t)(p + 3) * C + c];
  }
#pragma unroll
  for (int j = 0; j < 3; j++) state[(size_t)j * C + c] = v[j];
}

// y = bf16(o * rstd * w * act(z)) per head of width d (a multiple of 32, at most 256). One warp a (head, row).
extern "C" __global__ void __launch_bounds__(128) gated_norm(const u16* __restrict__ o, const u16* __restrict__ z, const u16* __restrict__ w,
                                                             u16* __restrict__ y, int d, int heads, int rows, int o_pitch, int z_pitch,
                                                             int y_pitch, float eps, int sigmoid) {
  pdl_launch();
  pdl_wait();
  const int job = blockIdx.x * 4 + (threadIdx.x >> 5), lane = threadIdx.x & 31;
  if (job >= heads * rows) return;
  const int r = job / heads, h = job - r * heads;
  const u16* orow = o + (size_t)r * o_pitch + h * d;
  const u16* zrow = z + (size_t)r * z_pitch + h * d;
  u16* yr = y + (size_t)r * y_pitch + h * d;
  gated_head(orow, zrow, w, d, lane, eps, sigmoid, [&](int i, u16 v) { yr[i] = v; });
}

// y = bf16(silu(g) * u). grid (n/512, rows).
extern "C" __global__ void __launch_bounds__(256) swiglu(const u16* __restrict__ g, const u16* __restrict__ u, u16* __restrict__ y, int n, int g_pitch,
                                                         int u_pitch, int y_pitch) {
  pdl_launch();
  pdl_wait();
  const int i = (blockIdx.x * 256 + threadIdx.x) * 2, r = blockIdx.y;
  if (i >= n) return;
  const u32 a = *(const u32*)(g + (size_t)r * g_pitch + i), b = *(const u32*)(u + (size_t)r * u_pitch + i);
  *(u32*)(y + (size_t)r * y_pitch + i) = swiglu2(a, b);
}

// y = bf16(o * sigma(gate)), gate of head h at gate + r * g_pitch + h * g_head. grid (heads*d/256, rows).
extern "C" __global__ void __launch_bounds__(256) mul_sigmoid(const u16* __restrict__ o, const u16* __restrict__ gate, u16* __restrict__ y, int n, int d,
                                                              int o_pitch, int g_pitch, int g_head, int y_pitch) {
  pdl_launch();
  pdl_wait();
  const int i = blockIdx.x * 256 + threadIdx.x, r = blockIdx.y;
  if (i >= n) return;
  const int h = i / d, e = i - h * d;
  y[(size_t)r * y_pitch + i] = f2bf(bf2f(o[(size_t)r * o_pitch + i]) * sigmoidf(bf2f(gate[(size_t)r * g_pitch + (size_t)h * g_head + e])));
}

// y = bf16(a + b). grid (n/512, rows).
extern "C" __global__ void __launch_bounds__(256) add(const u16* __restrict__ a, const u16* __restrict__ b, u16* __restrict__ y, int n, int a_pitch,
                                                      int b_pitch, int y_pitch) {
  pdl_launch();
  pdl_wait();
  const int i = (blockIdx.x * 256 + threadIdx.x) * 2, r = blockIdx.y;
  if (i >= n) return;
  const u32 v = *(const u32*)(a + (size_t)r * a_pitch + i), w = *(const u32*)(b + (size_t)r * b_pitch + i);
  *(u32*)(y + (size_t)r * y_pitch + i) = pack_bf(bf_lo(v) + bf_lo(w), bf_hi(v) + bf_hi(w));
}

// Embedding rows, copied to `copies` streams. fmt 0: bf16 rows; 1: q8_g32 (codes pitch, scales pitch). grid (rows).
extern "C" __global__ void __launch_bounds__(256) embed(const int* __restrict__ ids, const u8* __restrict__ codes, const u8* __restrict__ scales, int fmt,
                                                        int code_pitch, int scale_pitch, int n, int copies, u16* __restrict__ y) {
  pdl_launch();
  pdl_wait();
  const int r = blockIdx.x;
  const size_t id = (size_t)ids[r];
  for (int i = threadIdx.x; i < n; i += 256) {
    u16 v;
    if (fmt == 0) v = ((const u16*)(codes + id * code_pitch))[i];
    else v = f2bf((float)((const signed char*)(codes + id * code_pitch))[i] * h2f(((const u16*)(scales + id * scale_pitch))[i >> 5]));
    for (int s = 0; s < copies; s++) y[((size_t)r * copies + s) * n + i] = v;
  }
}

// acc = fma(w_r, y_r, acc) by rank from zero, shared expert last with sigma(shared_logit), one rounding: y.
// Then R_s = bf16(fma(b_s, y, R_s)) where R is given (its 4 streams, in place), else `out` = y.
// slot [rows][top]: which row of `ye` holds rank r's output. grid (n/256, rows).
extern "C" __global__ void __launch_bounds__(256) combine(const u16* __restrict__ ye, const int* __restrict__ slot, const float* __restrict__ w, const u16* __restrict__ shared,
                                                          const float* __restrict__ shared_logit, const float* __restrict__ b, u16* __restrict__ R,
                                                          u16* __restrict__ out, int n, int top, int logit_pitch) {
  pdl_launch();
  pdl_wait();
  const int i = blockIdx.x * 256 + threadIdx.x, r = blockIdx.y;
  if (i >= n) return;
  float acc = 0;
#pragma unroll 5
  for (int k = 0; k < top; k++) acc = fmaf(w[r * top + k], bf2f(ye[(size_t)slot[r * top + k] * n + i]), acc);
  if (shared) acc = fmaf(sigmoidf(shared_logit[(size_t)r * logit_pitch]), bf2f(shared[(size_t)r * n + i]), acc);
  const u16 y = f2bf(acc);
  if (out) out[(size_t)r * n + i] = y;
  if (R) {
    const float v = bf2f(y);
#pragma unroll
    for (int s = 0; s < 4; s++) {
      u16* p = R + ((size_t)r * 4 + s) * n + i;
      *p = f2bf(fmaf(b[r * 4 + s], v, bf2f(*p)));
    }
  }
}

// out_s = bf16(fma(b_s, y, R_s)), four streams; out may be R. Eight values a thread. grid (n/2048, rows).
extern "C" __global__ void __launch_bounds__(256) inject(const u16* __restrict__ y, const float* __restrict__ b, const u16* R, u16* out, int n) {
  pdl_launch();
  pdl_wait();
  const int i = (blockIdx.x * 256 + threadIdx.x) * 8, r = blockIdx.y;
  if (i >= n) return;
  if (n & 7) {
    for (int k = i; k < min(i + 8, n); k++)
      for (int s = 0; s < 4; s++) {
        const size_t at = ((size_t)r * 4 + s) * n + k;
        out[at] = f2bf(fmaf(b[r * 4 + s], bf2f(y[(size_t)r * n + k]), bf2f(R[at])));
      }
    return;
  }
  const uint4 v = *(const uint4*)(y + (size_t)r * n + i);
  uint4 w[4];
#pragma unroll
  for (int s = 0; s < 4; s++) w[s] = *(const uint4*)(R + ((size_t)r * 4 + s) * n + i);
#pragma unroll
  for (int s = 0; s < 4; s++) {
    const float f = b[r * 4 + s];
    auto add = [&](u32 a, u32 x) { return pack_bf(fmaf(f, bf_lo(x), bf_lo(a)), fmaf(f, bf_hi(x), bf_hi(a))); };
    *(uint4*)(out + ((size_t)r * 4 + s) * n + i) = make_uint4(add(w[s].x, v.x), add(w[s].y, v.y), add(w[s].z, v.z), add(w[s].w, v.w));
  }
}
