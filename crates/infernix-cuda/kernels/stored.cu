// Experts whose activations stay at 16 bits, as stored, in records or in plain rows: records that a decode round lacks are brought to
// the device, and products follow the canonical order of sums (chain.cu): per scale group an FP32 fma chain in rising k over exact codes, groups added
// by fma within eight spans of K, spans pairwise, the matrix's scale last.
#include "gemv_core.cuh"
#include "w4a4.cuh"

// For each pick where its expert's record is: the frame, or a place of `stage` (`stride` apart), to which it is copied where `away`
// says that it has none. Picks of one expert share the place of the first. grid (blocks a record, picks), 256 threads.
extern "C" __global__ void __launch_bounds__(256) expert_fetch(const u64* __restrict__ whole, const u32* __restrict__ away, const int* __restrict__ ids,
                                                               u8* __restrict__ stage, u64* __restrict__ at, int record, int stride) {
  pdl_launch();
  pdl_wait();
  const int p = blockIdx.y, e = ids[p];
  int first = p;
  for (int i = 0; i < p; i++)
    if (ids[i] == e) {
      first = i;
      break;
    }
  u8* to = stage + (size_t)first * stride;
  if (blockIdx.x == 0 && threadIdx.x == 0) at[p] = away[e] ? (u64)to : whole[e];
  if (!away[e] || first != p) return;
  const uint4* from = (const uint4*)whole[e];
  const int all = record >> 4, step = gridDim.x * 256;
  int i = blockIdx.x * 256 + threadIdx.x;
  for (; i + 3 * step < all; i += 4 * step) {
    uint4 v[4];
#pragma unroll
    for (int j = 0; j < 4; j++) v[j] = __ldg(from + i + j * step);
#pragma unroll
    for (int j = 0; j < 4; j++) ((uint4*)to)[i + j * step] = v[j];
  }
  for (; i < all; i += step) ((uint4*)to)[i] = __ldg(from + i);
}

// Addresses of three planes of every expert: out [3][E]; plane j begins `o<j>` bytes into a record.
extern "C" __global__ void __launch_bounds__(256) expert_planes(const u64* __restrict__ whole, u64* __restrict__ out, u64 o0, u64 o1, u64 o2, int experts) {
  pdl_launch();
  pdl_wait();
  const int e = blockIdx.x * 256 + threadIdx.x;
  if (e >= experts) return;
  const u64 w = whole[e];
  out[e] = w + o0, out[experts + e] = w + o1, out[2 * experts + e] = w + o2;
}

enum { S_PAIRS = 1, S_DIVIDE = 2 };

// What a product is made of: record p of `at` is that of pick p, whose expert is ids[p]; of a direct product record e of `at` is that of
// expert e, and `away` says which are the host's: their rows of a block come to shared memory first. Its codes begin `codes` bytes in, its scales
// `scales`; `last` FP32 [E][3] (gate, up, down), or null. Pick p reads row p / share of x BF16 [..][K]. With S_PAIRS rows 2j and
// 2j + 1 are row j of gate and of up, and y BF16 [picks][N / 2] takes bf16(silu(bf16 gate) bf16 up); else y [picks][N] takes down's.
struct StoredArgs {
  const u64* at;
  const u32* away;
  const int* ids;
  const float* last;
  const u16* x;
  u16* y;
  u64 codes, scales;
  int N, K, share, mode;
};

// The products of x of 8 k with 8 exact values, added in rising k.
DEV float chain8(const float (&w)[8], uint4 v, float t) {
  const u32 p[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; i++) t = fmaf(w[2 * i + 1], bf_hi(p[i]), fmaf(w[2 * i], bf_lo(p[i]), t));
  return t;
}

// Adds the eight spans of 32 rows and stores what `last(sum, row)` makes of them. grid (ceil(N / 32), picks), 256 threads: a warp a
// span, a lane a row.
template <typename Last> DEV void stored_end(float v, int N, int mode, u16* y, Last last) {
  __shared__ float sum[8][32];
  const int l = threadIdx.x & 31, span = threadIdx.x >> 5, p = blockIdx.y, row = blockIdx.x * 32 + l;
  sum[span][l] = v;
  __syncthreads();
  if (span) return;
  v = ((sum[0][l] + sum[1][l]) + (sum[2][l] + sum[3][l])) + ((sum[4][l] + sum[5][l]) + (sum[6][l] + sum[7][l]));
  v = last(v, min(row, N - 1));
  if (!(mode & S_PAIRS)) {
    if (row < N) y[(size_t)p * N + row] = f2bf(v);
    return;
  }
  const float up = __shfl_xor_sync(~0u, v, 1);
  if (row < N && !(row & 1)) y[(size_t)p * (N >> 1) + (row >> 1)] = swiglu_c(rbf(v), rbf(up));
}

// What is multiplied last of a record's matrix.
DEV void record_end(const StoredArgs& a, float v) {
  stored_end(v, a.N, a.mode, a.y, [&](float v, int row) {
    const float last = a.last ? a.last[a.ids[blockIdx.y] * 3 + (a.mode & S_PAIRS ? row & 1 : 2)] : 1.0f;
    return a.mode & S_DIVIDE ? __fdiv_rn(v, last) : v * last;
  });
}

// A span's sum of a row: r of the 16 of its units, which begin at `base`.
template <bool SHARED> DEV float rg16_sum(const u8* base, const u16* x, int r, int span, int G) {
  const int shift = r < 8 ? 0 : 4;
  float v = 0;
#pragma unroll 2
  for (int b = span * G / 8; b < (span + 1) * G / 8; b++) {
    const u8* unit = base + (size_t)b * 144;
    float t = 0;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float w[8];
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const u32 c = stored_at<SHARED, u32>(unit + 32 * (2 * h + j) + 4 * (r & 7)) >> shift;
        // E2M1 at bits 15, 11..9 of an FP16 is the value times 2^-14.
#pragma unroll
        for (int i = 0; i < 4; i++) w[4 * j + i] = h2f((c >> (8 * i) & 7) << 9 | (c >> (8 * i) & 8) << 12) * 16384.0f;
      }
      t = chain8(w, __ldg((const uint4*)(x + 16 * b + 8 * h)), t);
    }
    v = fmaf(e4m3_m8(stored_at<SHARED, u8>(unit + 128 + r)) * 256.0f, t, v);
  }
  return v;
}

// NVFP4 records: units of 16 stored rows x 16 k, 128 B of codes and 16 scales; gate and up rows alternate as stored.
template <bool DIRECT> DEV void rg16_body(const StoredArgs& a) {
  extern __shared__ __align__(128) u8 smem[];
  pdl_launch();
  pdl_wait();
  const int first = blockIdx.x * 32, row = min(first + (threadIdx.x & 31), a.N - 1), p = blockIdx.y, G = a.K >> 4;
  const int e = a.ids[p], span = threadIdx.x >> 5;
  const u8* base = (const u8*)a.at[DIRECT ? e : p] + a.codes;
  const u16* x = a.x + (size_t)(p / a.share) * a.K;
  float v;
  if (DIRECT && a.away[e]) {
    const u32 group = G * 144;
    rows_to_shared(smem, base + (size_t)(first >> 4) * group, nullptr, min(2, (a.N - first) >> 4) * group);
    v = rg16_sum<true>(smem + ((row - first) >> 4) * group, x, row & 15, span, G);
  } else v = rg16_sum<false>(base + (size_t)(row >> 4) * G * 144, x, row & 15, span, G);
  record_end(a, v);
}

// A span's sum of a row of E4M3 codes and its tiles' scales, which are of global memory.
template <bool SHARED> DEV float fp8_sum(const u8* codes, const float* scales, const u16* x, int span, int K) {
  const int G = (K + 127) >> 7;
  float v = 0;
  for (int g = span * G / 8; g < (span + 1) * G / 8; g++) {
    float t = 0;
    for (int k = g * 128; k < min(K, (g + 1) * 128); k += 16) {
      const uint4 c4 = stored_at<SHARED, uint4>(codes + k);
      const u32 c[4] = {c4.x, c4.y, c4.z, c4.w};
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float w[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
          const u32 b = c[2 * h + (i >> 2)] >> (8 * (i & 3)) & 255;
          w[i] = h2f((b & 127) << 7 | (b & 128) << 8) * 256.0f;
        }
        t = chain8(w, __ldg((const uint4*)(x + k + 8 * h)), t);
      }
    }
    v = fmaf(__ldg(scales + g), t, v);
  }
  return v;
}

// FP8 records: E4M3 rows of K bytes, gate, up and down one below the other, and an FP32 scale per 128 x 128 of each.
template <bool DIRECT> DEV void fp8_body(const StoredArgs& a) {
  extern __shared__ __align__(128) u8 smem[];
  pdl_launch();
  pdl_wait();
  const int first = blockIdx.x * 32, row = min(first + (threadIdx.x & 31), a.N - 1), p = blockIdx.y, G = (a.K + 127) >> 7;
  const int e = a.ids[p], span = threadIdx.x >> 5, half = a.N >> 1;
  const bool pairs = a.mode & S_PAIRS;
  const int own = pairs ? (row & 1) * half + (row >> 1) : row, tile = pairs ? (row & 1) * ((half + 127) >> 7) + (row >> 8) : row >> 7;
  const u8 *base = (const u8*)a.at[DIRECT ? e : p], *codes = base + a.codes;
  const float* scales = (const float*)(base + a.scales) + (size_t)tile * G;
  const u16* x = a.x + (size_t)(p / a.share) * a.K;
  float v;
  if (DIRECT && a.away[e]) {
    // 32 rows of down, or 16 of gate and the same of up.
    const int rows = min(32, a.N - first) >> (pairs ? 1 : 0), at = row - first;
    const u8* from = codes + (size_t)(pairs ? first >> 1 : first) * a.K;
    rows_to_shared(smem, from, pairs ? from + (size_t)half * a.K : nullptr, rows * a.K);
    v = fp8_sum<true>(smem + (size_t)(pairs ? (at & 1) * rows + (at >> 1) : at) * a.K, scales, x, span, a.K);
  } else v = fp8_sum<false>(codes + (size_t)own * a.K, scales, x, span, a.K);
  record_end(a, v);
}

#define STORED(NAME, BODY)                                                                                \
  extern "C" __global__ void __launch_bounds__(256) NAME(const __grid_constant__ StoredArgs a) { BODY(a); }
STORED(stored_rg16, rg16_body<false>)
STORED(stored_rg16_direct, rg16_body<true>)
STORED(stored_fp8, fp8_body<false>)
STORED(stored_fp8_direct, fp8_body<true>)

// Experts in plain rows of one format, planes as those of linears (gemv_core.cuh): N rows an expert, one expert below the other, of
// gate and up first gate's. `row_scale` (BF16 [E N]), where there is one, and `factor` multiply last; the rest as in StoredArgs.
struct RowsArgs {
  const u8 *codes, *high, *scales;
  const u16* row_scale;
  const int* ids;
  const u16* x;
  u16* y;
  int code_pitch, high_pitch, scale_pitch, N, K, share, mode;
  float factor;
};

// Rows are padded to whole groups with readable words; K is a multiple of 8.
template <int F> DEV void stored_rows(const RowsArgs& a) {
  using T = Fmt<F>;
  // Formats without scales of groups have sums of 32.
  constexpr int GROUP = T::GROUP ? T::STEP : 32, BYTES = T::STEP_BYTES * GROUP / T::STEP, WORDS = T::LANE_BYTES / 4;
  pdl_launch();
  pdl_wait();
  const int row = min(blockIdx.x * 32 + (threadIdx.x & 31), a.N - 1), span = threadIdx.x >> 5, p = blockIdx.y, G = (a.K + GROUP - 1) / GROUP;
  const size_t first = (size_t)a.ids[p] * a.N;
  auto own = [&](int row) { return first + (a.mode & S_PAIRS ? (row & 1) * (a.N >> 1) + (row >> 1) : row); };
  const size_t at = own(row);
  const u8 *codes = a.codes + at * a.code_pitch, *high = a.high + at * a.high_pitch;
  const u16 *scales = (const u16*)(a.scales + at * a.scale_pitch), *x = a.x + (size_t)(p / a.share) * a.K;
  float v = 0;
  for (int g = span * G / 8; g < (span + 1) * G / 8; g++) {
    u32 c[BYTES / 4], h[4] = {};
#pragma unroll
    for (int i = 0; i < BYTES / 16; i++) {
      const uint4 w = __ldg((const uint4*)(codes + (size_t)g * BYTES) + i);
      c[4 * i] = w.x, c[4 * i + 1] = w.y, c[4 * i + 2] = w.z, c[4 * i + 3] = w.w;
    }
    if (F == F_Q5) {
      const uint2 w = __ldg((const uint2*)high + g);
      h[0] = w.x, h[1] = w.x >> 16, h[2] = w.y, h[3] = w.y >> 16;
    }
    if (F == F_Q6) {
      const uint4 w = __ldg((const uint4*)high + g);
      h[0] = w.x, h[1] = w.y, h[2] = w.z, h[3] = w.w;
    }
    const float scale = T::GROUP ? h2f(__ldg(scales + g)) : 1.0f;
    float t = 0;
#pragma unroll
    for (int l = 0; l < GROUP / T::LANE_K; l++) {
      Raw<F> raw;
      u32 pairs[2 * T::MMAS];
#pragma unroll
      for (int i = 0; i < WORDS; i++) raw.w[i] = c[l * WORDS + i];
      raw.extra = h[l];
      expand<F>(raw, pairs);
#pragma unroll
      for (int j = 0; j < T::LANE_K / 8; j++) {
        float w[8];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          w[T::PERM ? i : 2 * i] = bf_lo(pairs[4 * j + i]);
          w[T::PERM ? i + 4 : 2 * i + 1] = bf_hi(pairs[4 * j + i]);
        }
        const int k = g * GROUP + l * T::LANE_K + 8 * j;
        t = chain8(w, k < a.K ? __ldg((const uint4*)(x + k)) : make_uint4(0, 0, 0, 0), t);
      }
    }
    v = fmaf(scale, t, v);
  }
  stored_end(v, a.N, a.mode, a.y, [&](float v, int row) { return (a.row_scale ? v * bf2f(a.row_scale[own(row)]) : v) * a.factor; });
}

#define STORED_ROWS(NAME, F) \
  extern "C" __global__ void __launch_bounds__(256) NAME(const __grid_constant__ RowsArgs a) { stored_rows<F>(a); }
STORED_ROWS(stored_rows_bf16, F_BF16)
STORED_ROWS(stored_rows_q8, F_Q8)
STORED_ROWS(stored_rows_q4, F_Q4)
STORED_ROWS(stored_rows_q5, F_Q5)
STORED_ROWS(stored_rows_q6, F_Q6)
STORED_ROWS(stored_rows_fp8, F_FP8)
