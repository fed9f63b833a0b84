// Decode linears over GGML blocks as stored: y[c][n] = sum_k W[n][k] x[c][k], a warp a row.
//
// A lane takes 8 consecutive k of every 256: values exact in FP32 (types with a minimum round their difference once), an FP32
// chain of fma in rising k, then the 32 sums by halves. A column's bits do not depend on the others.
// `ggml_*_rows` writes rows as BF16, or as two BF16 parts whose sum has 16 significant bits: what tensor cores multiply.
// `ggml_*_expand` does so for the matrices of some experts.
// With `tab` the matrix is that of an expert, `offset` bytes behind its address: block y is pick y, expert ids[y], input row y / top,
// output row y.
#include "common.cuh"

struct True { static constexpr bool value = true; };
struct False { static constexpr bool value = false; };
enum { T_Q8_0 = 0, T_IQ4_NL = 1, T_Q4_K = 2, T_Q6_K = 3, T_IQ3_S = 4, T_Q5_K = 5, T_F32 = 6 };
template <int T> struct Block {
  static constexpr int VALUES = T <= T_IQ4_NL ? 32 : T == T_F32 ? 1 : 256;
  static constexpr int BYTES = T == T_Q8_0    ? 34
                               : T == T_IQ4_NL ? 18
                               : T == T_Q4_K   ? 144
                               : T == T_Q5_K   ? 176
                               : T == T_Q6_K   ? 210
                               : T == T_IQ3_S  ? 110
                                               : 4;
};

template <bool SHARED> DEV u32 half_at(const u8* p) { return stored_at<SHARED, u16>(p); }
// Four bytes at an even address.
template <bool SHARED> DEV u32 word_at(const u8* p) { return half_at<SHARED>(p) | half_at<SHARED>(p + 2) << 16; }

// The lane's 8 values of the 256 that start at `row`.
template <int T, bool SHARED = false> DEV void values(const u8* row, int lane, const u32* grid, float (&w)[8]) {
  if (T == T_Q8_0) {
    const u8* b = row + (lane >> 2) * 34;
    const float d = h2f(half_at<SHARED>(b));
    const u32 q[2] = {word_at<SHARED>(b + 2 + (lane & 3) * 8), word_at<SHARED>(b + 6 + (lane & 3) * 8)};
#pragma unroll
    for (int i = 0; i < 8; i++) w[i] = d * (float)(int)(signed char)(q[i >> 2] >> (8 * (i & 3)));
  } else if (T == T_IQ4_NL) {
    // Values 0-15 of a block are the low nibbles, 16-31 the high ones.
    const u8* b = row + (lane >> 2) * 18;
    const float d = h2f(half_at<SHARED>(b));
    const u8* p = b + 2 + (lane & 1) * 8;
    const int sh = lane & 2 ? 4 : 0;
    const u32 q[2] = {word_at<SHARED>(p) >> sh, word_at<SHARED>(p + 4) >> sh};
    // -127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113, as bytes + 128.
    const u64 lo = 0x766a5d4f3f2d1801ull, hi = 0xf1d9c5b5a6998d81ull;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const u32 c = (q[i >> 2] >> (8 * (i & 3))) & 15;
      w[i] = d * (float)((int)(((c & 8 ? hi : lo) >> (8 * (c & 7))) & 255) - 128);
    }
  } else if (T == T_F32) {
    const float4 a = stored_at<SHARED, float4>(row + 32 * lane), b = stored_at<SHARED, float4>(row + 32 * lane + 16);
    w[0] = a.x, w[1] = a.y, w[2] = a.z, w[3] = a.w, w[4] = b.x, w[5] = b.y, w[6] = b.z, w[7] = b.w;
  } else if (T == T_Q4_K || T == T_Q5_K) {
    const int sub = lane >> 2;
    const u32 dm = stored_at<SHARED, u32>(row);
    const u32 p[3] = {stored_at<SHARED, u32>(row + 4), stored_at<SHARED, u32>(row + 8), stored_at<SHARED, u32>(row + 12)};
    const int s8 = 8 * (sub & 3);
    const u32 a = p[0] >> s8 & 255, b = p[1] >> s8 & 255, c = p[2] >> s8 & 255;
    const u32 sc = sub < 4 ? a & 63 : (c & 15) | (a >> 6) << 4, mn = sub < 4 ? b & 63 : c >> 4 | (b >> 6) << 4;
    const float scale = h2f(dm & 0xffff) * (float)sc, least = h2f(dm >> 16) * (float)mn;
    const uint2 q = stored_at<SHARED, uint2>(row + (T == T_Q5_K ? 48 : 16) + (sub >> 1) * 32 + (lane & 3) * 8);
    u32 n[2] = {q.x >> (4 * (sub & 1)) & 0x0f0f0f0f, q.y >> (4 * (sub & 1)) & 0x0f0f0f0f};
    if (T == T_Q5_K) {
      // A byte of high bits for every value of a sub-block: bit `sub` is this one's.
      const uint2 h = stored_at<SHARED, uint2>(row + 16 + (lane & 3) * 8);
      n[0] |= (h.x >> sub & 0x01010101) << 4, n[1] |= (h.y >> sub & 0x01010101) << 4;
    }
#pragma unroll
    for (int i = 0; i < 8; i++) w[i] = fmaf(scale, (float)(n[i >> 2] >> (8 * (i & 3)) & 255), -least);
  } else if (T == T_Q6_K) {
    const int k = lane * 8, h = k >> 7, l = (k >> 5) & 3, m = k & 31;
    const float scale = h2f(half_at<SHARED>(row + 208)) * (float)(int)(signed char)stored_at<SHARED, u8>(row + 192 + (k >> 4));
    const u8 *pl = row + 64 * h + 32 * (l & 1) + m, *ph = row + 128 + 32 * h + m;
    const u32 lo[2] = {word_at<SHARED>(pl) >> (4 * (l >> 1)), word_at<SHARED>(pl + 4) >> (4 * (l >> 1))};
    const u32 hi[2] = {word_at<SHARED>(ph) >> (2 * l), word_at<SHARED>(ph + 4) >> (2 * l)};
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int s = 8 * (i & 3);
      w[i] = scale * (float)((int)((lo[i >> 2] >> s & 15) | (hi[i >> 2] >> s & 3) << 4) - 32);
    }
  } else {
    // 8 values: two points of four, one byte of signs; a scale per 32.
    const u32 codes = half_at<SHARED>(row + 2 + 2 * lane), high = stored_at<SHARED, u8>(row + 66 + (lane >> 2)) >> (2 * (lane & 3));
    const u32 signs = stored_at<SHARED, u8>(row + 74 + lane);
    const u32 nib = stored_at<SHARED, u8>(row + 106 + (lane >> 3)) >> (4 * ((lane >> 2) & 1)) & 15;
    const float scale = h2f(half_at<SHARED>(row)) * (float)(1 + 2 * nib);
    const u32 g[2] = {__ldg(grid + ((codes & 255) | (high & 1) << 8)), __ldg(grid + (codes >> 8 | (high & 2) << 7))};
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const float v = scale * (float)(g[i >> 2] >> (8 * (i & 3)) & 255);
      w[i] = signs >> i & 1 ? -v : v;
    }
  }
}

template <int T, int C>
DEV void ggml_body(const u8* __restrict__ codes, const u64* __restrict__ tab, u64 offset, const int* __restrict__ ids, const u32* __restrict__ grid,
                   const u16* __restrict__ x, void* __restrict__ y, int N, int K, int cols, int x_pitch, int y_pitch, int top, int mode) {
  using B = Block<T>;
  const int lane = threadIdx.x & 31, n = blockIdx.x * 8 + (threadIdx.x >> 5);
  pdl_launch();
  pdl_wait();
  if (n >= N) return;
  const int c0 = tab ? blockIdx.y : blockIdx.y * C, live = tab ? 1 : min(C, cols - c0);
  const u8* row = (tab ? (const u8*)tab[ids[c0]] + offset : codes) + (size_t)n * (K / B::VALUES) * B::BYTES;
  const u16* xr = x + (size_t)(tab ? c0 / top : c0) * x_pitch;
  float acc[C];
#pragma unroll
  for (int c = 0; c < C; c++) acc[c] = 0;
#pragma unroll 2
  for (int k = lane * 8; k < K; k += 256) {
    float w[8];
    values<T>(row + (size_t)((k - lane * 8) / B::VALUES) * B::BYTES, lane, grid, w);
#pragma unroll
    for (int c = 0; c < C; c++) {
      if (C > 1 && c >= live) break;
      const uint4 v = __ldg((const uint4*)(xr + (size_t)c * x_pitch + k));
      const u32 p[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int i = 0; i < 4; i++) acc[c] = fmaf(w[2 * i], bf_lo(p[i]), acc[c]), acc[c] = fmaf(w[2 * i + 1], bf_hi(p[i]), acc[c]);
    }
  }
#pragma unroll
  for (int c = 0; c < C; c++) {
    const float s = warp_sum(acc[c]);
    if (lane || c >= live) continue;
    if (mode & 1) ((float*)y)[(size_t)(c0 + c) * y_pitch + n] = s;
    else ((u16*)y)[(size_t)(c0 + c) * y_pitch + n] = f2bf(s);
  }
}

// 8 values as BF16; with `split` also what that rounding left, rounded, `split` words after. Addresses are multiples of 16.
DEV void store_values(const float (&w)[8], u16* to, int split) {
  *(uint4*)to = make_uint4(pack_bf(w[0], w[1]), pack_bf(w[2], w[3]), pack_bf(w[4], w[5]), pack_bf(w[6], w[7]));
  if (!split) return;
  float r[8];
#pragma unroll
  for (int i = 0; i < 8; i++) r[i] = w[i] - rbf(w[i]);
  *(uint4*)(to + split) = make_uint4(pack_bf(r[0], r[1]), pack_bf(r[2], r[3]), pack_bf(r[4], r[5]), pack_bf(r[6], r[7]));
}

// The same of experts of which `away` says that they are the host's: their rows of a block come to shared memory first.
template <int T>
DEV void direct_body(const u64* __restrict__ tab, const u32* __restrict__ away, u64 offset, const int* __restrict__ ids, const u32* __restrict__ grid,
                     const u16* __restrict__ x, u16* __restrict__ y, int N, int K, int x_pitch, int y_pitch, int top) {
  using B = Block<T>;
  extern __shared__ __align__(128) u8 smem[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, first = blockIdx.x * 8, n = first + warp, p = blockIdx.y;
  pdl_launch();
  pdl_wait();
  // Volatile: what is const and restrict may be read ahead of the wait.
  const int e = *(const volatile int*)(ids + p), bytes = (K / B::VALUES) * B::BYTES;
  const u8* rows = (const u8*)tab[e] + offset + (size_t)first * bytes;
  const u16* xr = x + (size_t)(p / top) * x_pitch;
  auto sum = [&](auto shared, const u8* row) {
    float acc = 0;
    for (int k = lane * 8; k < K; k += 256) {
      float w[8];
      values<T, decltype(shared)::value>(row + (size_t)((k - lane * 8) / B::VALUES) * B::BYTES, lane, grid, w);
      const uint4 v = __ldg((const uint4*)(xr + k));
      const u32 q[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int i = 0; i < 4; i++) acc = fmaf(w[2 * i], bf_lo(q[i]), acc), acc = fmaf(w[2 * i + 1], bf_hi(q[i]), acc);
    }
    return acc;
  };
  float acc = 0;
  if (away[e]) {
    // From a multiple of 16 bytes on: records are padded behind.
    const u32 skew = (u64)rows & 15, all = min(8, N - first) * bytes;
    rows_to_shared(smem, rows - skew, nullptr, (skew + all + 15) & ~15u);
    if (n < N) acc = sum(True{}, smem + skew + warp * bytes);
  } else if (n < N) acc = sum(False{}, rows + (size_t)warp * bytes);
  if (n >= N) return;
  acc = warp_sum(acc);
  if (!lane) y[(size_t)p * y_pitch + n] = f2bf(acc);
}

// Rows ids[r] (or r) of the matrix as BF16, `pitch` words apart, or in two parts. An id beyond the matrix reads its last row.
// grid (rows, ceil(K/2048)), 256 threads.
template <int T>
DEV void rows_body(const u8* __restrict__ codes, const u32* __restrict__ grid, const int* __restrict__ ids, u16* __restrict__ y, int N, int K, int pitch,
                   int split) {
  using B = Block<T>;
  const int lane = threadIdx.x & 31, r = blockIdx.x, k0 = (blockIdx.y * 8 + (threadIdx.x >> 5)) * 256, k = k0 + lane * 8;
  pdl_launch();
  pdl_wait();
  if (k >= K) return;
  const size_t n = ids ? min((u32)ids[r], (u32)(N - 1)) : r;
  float w[8];
  values<T>(codes + n * (K / B::VALUES) * B::BYTES + (size_t)(k0 / B::VALUES) * B::BYTES, lane, grid, w);
  store_values(w, y + (size_t)r * pitch + k, split);
}

// Matrices of experts tab[0], tab[1], ... (`offset` bytes behind the address) for the tile products of two parts: row r of expert z is
// y[z * stride + r * 2K], per 64 k first what BF16 holds of them, then the rest. An expert without picks (base[z + 1] == base[z]) is
// left out. grid (ceil(N * ceil(K/256) / 8), experts), 256 threads: a warp 256 k of a row.
template <int T>
DEV void expand_body(const u64* __restrict__ tab, u64 offset, const int* __restrict__ base, const u32* __restrict__ grid, u16* __restrict__ y, int N, int K,
                     u64 stride) {
  using B = Block<T>;
  const int lane = threadIdx.x & 31, z = blockIdx.y, pieces = (K + 255) >> 8, piece = blockIdx.x * 8 + (threadIdx.x >> 5);
  pdl_launch();
  pdl_wait();
  const int n = piece / pieces, k0 = piece % pieces * 256, k = k0 + lane * 8;
  if (n >= N || k >= K || (base && base[z] == base[z + 1])) return;
  float w[8];
  values<T>((const u8*)tab[z] + offset + (size_t)n * (K / B::VALUES) * B::BYTES + (size_t)(k0 / B::VALUES) * B::BYTES, lane, grid, w);
  store_values(w, y + z * stride + (size_t)n * 2 * K + k + (k & ~63), 64);
}

#define ENTRY(NAME, T, C)                                                                                                 \
  extern "C" __global__ void __launch_bounds__(256) NAME##_##C(                                                           \
      const u8* codes, const u64* tab, u64 offset, const int* ids, const u32* grid, const u16* x, void* y, int N, int K,    \
      int cols, int x_pitch, int y_pitch, int top, int mode) {                                                            \
    ggml_body<T, C>(codes, tab, offset, ids, grid, x, y, N, K, cols, x_pitch, y_pitch, top, mode);                        \
  }
#define ROWS(NAME, T)                                                                                                      \
  extern "C" __global__ void __launch_bounds__(256) NAME##_rows(const u8* codes, const u32* grid, const int* ids, u16* y, int N, int K, int pitch, \
                                                                int split) {                                              \
    rows_body<T>(codes, grid, ids, y, N, K, pitch, split);                                                                \
  }
#define EXPAND(NAME, T)                                                                                                    \
  extern "C" __global__ void __launch_bounds__(256) NAME##_expand(const u64* tab, u64 offset, const int* base, const u32* grid, u16* y, int N, int K, \
                                                                  u64 stride) {                                           \
    expand_body<T>(tab, offset, base, grid, y, N, K, stride);                                                             \
  }
#define DIRECT(NAME, T)                                                                                                   \
  extern "C" __global__ void __launch_bounds__(256) NAME##_direct(                                                        \
      const u64* tab, const u32* away, u64 offset, const int* ids, const u32* grid, const u16* x, u16* y, int N, int K,   \
      int x_pitch, int y_pitch, int top) {                                                                                \
    direct_body<T>(tab, away, offset, ids, grid, x, y, N, K, x_pitch, y_pitch, top);                                      \
  }
#define ENTRIES(NAME, T) ENTRY(NAME, T, 1) ENTRY(NAME, T, 4) ENTRY(NAME, T, 8) ROWS(NAME, T) EXPAND(NAME, T) DIRECT(NAME, T)
ENTRIES(ggml_q8_0, T_Q8_0)
ENTRIES(ggml_iq4_nl, T_IQ4_NL)
ENTRIES(ggml_q4_k, T_Q4_K)
ENTRIES(ggml_q6_k, T_Q6_K)
ENTRIES(ggml_iq3_s, T_IQ3_S)
ENTRIES(ggml_q5_k, T_Q5_K)
ENTRIES(ggml_f32, T_F32)
