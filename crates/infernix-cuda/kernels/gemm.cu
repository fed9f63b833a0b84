// Prefill linear: y[t][n] = sum_k W[n][k] x[t][k] for many rows, mma bf16 with FP32 accumulation.
//
// A block makes 128 weight rows x 256 tokens, eight warps of 64 x 64; K in chunks of 64 through a ring of cp.async
// stages. Weights enter as stored and become exact BF16 fragments in registers; group scales multiply the FP32 sum of
// 32 k. Lanes take 16 consecutive bytes as in the decode kernel; a swizzle of 16-byte units replaces padding.
#include "gemv_core.cuh"

#define BM 128
#define BN 256
// The host asks for the same number: 4 where a block has 227 KB of shared memory, 2 where it has 99 KB.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
#define STAGES 2
#else
#define STAGES 4
#endif

template <int F> struct G {
  using T = Fmt<F>;
  static constexpr int ROW = T::STEP == 32 ? 2 * T::STEP_BYTES : T::STEP_BYTES;  // bytes of 64 k
  static constexpr int A_BYTES = BM * ROW;
  static constexpr int STAGE = A_BYTES + BN * 128;
  // Unit (16 B) index of a row in shared memory.
  DEV static int xunit(int row, int u) { return T::STEP == 32 ? u ^ ((row & 1) << 2) : u ^ (row & 1); }
  DEV static int aunit(int row, int u) {
    return F == F_BF16 ? u ^ ((row & 1) << 2) : F == F_Q8 ? u ^ (((row >> 1) & 1) << 1) : u;
  }
};

template <int F>
DEV void gemm_body(const u8* __restrict__ codes, const u8* __restrict__ high, const u8* __restrict__ scales, const u16* __restrict__ row_scale,
                   float tscale, const bf16* __restrict__ x, void* __restrict__ y, int N, int K, int kx, int rows, int x_pitch,
                   int y_pitch, int code_pitch, int high_pitch, int scale_pitch, int mode) {
  using T = Fmt<F>;
  using L = G<F>;
  extern __shared__ __align__(128) u8 smem[];
  const u32 s0 = smem_u32(smem);
  // Plain loads, which the compiler may move between the products (but not across a barrier).
  auto ld = [&](u32 a) { return (const u8*)smem + (a - s0); };
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, q = lane & 3;
  const int t0 = blockIdx.x * BN, n0 = blockIdx.y * BM;
  const int wm = (warp & 1) * 64, wn = (warp >> 1) * 64;
  const int chunks = (K + 63) >> 6;
  pdl_launch();
  pdl_wait();

  auto load = [&](int c) {
    const u32 sa = s0 + (c % STAGES) * L::STAGE, sx = sa + L::A_BYTES;
    constexpr int UPR = L::ROW / 16;
#pragma unroll
    for (int i = 0; i < BM * UPR / 256; i++) {
      const int e = tid + i * 256, r = e / UPR, u = e % UPR;
      const int off = c * L::ROW + u * 16;
      const bool ok = n0 + r < N && off < code_pitch;
      cp_async16z(sa + r * L::ROW + L::aunit(r, u) * 16, codes + (size_t)(ok ? n0 + r : 0) * code_pitch + (ok ? off : 0), ok ? 16 : 0);
    }
#pragma unroll
    for (int i = 0; i < BN * 8 / 256; i++) {
      const int e = tid + i * 256, r = e >> 3, u = e & 7, k = c * 64 + u * 8;
      const bool ok = t0 + r < rows && k < kx;
      cp_async16z(sx + r * 128 + L::xunit(r, u) * 16, x + (ok ? (size_t)(t0 + r) * x_pitch + k : 0), ok ? 16 : 0);
    }
  };

  float acc[4][8][4];
#pragma unroll
  for (int m = 0; m < 4; m++)
#pragma unroll
    for (int n = 0; n < 8; n++) acc[m][n][0] = acc[m][n][1] = acc[m][n][2] = acc[m][n][3] = 0;

#pragma unroll
  for (int c = 0; c < STAGES - 1; c++) {
    if (c < chunks) load(c);
    cp_commit();
  }
  for (int c = 0; c < chunks; c++) {
    // Scales and high bits of this chunk, straight to registers (rows g and g+8 of four tiles).
    u32 sc[8], hi[8];
    if (T::GROUP || F == F_NVFP4) {
#pragma unroll
      for (int m = 0; m < 8; m++) {
        const int r = min(n0 + wm + (m >> 1) * 16 + (m & 1) * 8 + g, N - 1);
        const u8* p = scales + (size_t)r * scale_pitch;
        if (F == F_Q8) {
          sc[m] = __ldg((const u16*)p + c * 2);
          if (c * 2 + 1 < scale_pitch / 2) sc[m] |= (u32)__ldg((const u16*)p + c * 2 + 1) << 16;
        } else if (F == F_NVFP4) {
          sc[m] = __ldg(p + c * 4 + q);
        } else {
          sc[m] = __ldg((const u16*)p + c);
        }
        if (F == F_Q5) hi[m] = __ldg((const u16*)(high + (size_t)r * high_pitch + c * 8 + q * 2));
        if (F == F_Q6) hi[m] = __ldg((const u32*)(high + (size_t)r * high_pitch + c * 16 + q * 4));
      }
    }
    cp_wait<STAGES - 2>();
    __syncthreads();
    if (c + STAGES - 1 < chunks) load(c + STAGES - 1);
    cp_commit();
    const u32 sa = s0 + (c % STAGES) * L::STAGE, sx = sa + L::A_BYTES;
#pragma unroll
    for (int ss = 0; ss < 2; ss++) {
      u32 xf[8][4];
#pragma unroll
      for (int n = 0; n < 8; n++) {
        const int r = wn + n * 8 + g, u = T::STEP == 32 ? ss * 4 + q : 2 * q + ss;
        order_x<F>(*(const uint4*)ld(sx + r * 128 + L::xunit(r, u) * 16), xf[n]);
      }
#pragma unroll
      for (int m = 0; m < 4; m++) {
        u32 a[2][4];
        float s[2] = {1.0f, 1.0f};
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int r = wm + m * 16 + h * 8 + g, i = m * 2 + h;
          const u32 row = sa + r * L::ROW;
          if (F == F_BF16) {
            const uint4 v = *(const uint4*)ld(row + L::aunit(r, ss * 4 + q) * 16);
            a[h][0] = v.x, a[h][1] = v.y, a[h][2] = v.z, a[h][3] = v.w;
          } else if (F == F_Q8) {
            const uint2 v = *(const uint2*)ld(row + L::aunit(r, ss * 2 + (q >> 1)) * 16 + (q & 1) * 8);
            expand_i8(v.x, a[h]), expand_i8(v.y, a[h] + 2);
            s[h] = h2f(ss ? sc[i] >> 16 : sc[i] & 0xffff);
          } else if (F == F_FP8) {
            const uint2 v = *(const uint2*)ld(row + q * 16 + ss * 8);
            expand_e4m3(v.x, a[h]), expand_e4m3(v.y, a[h] + 2);
          } else {
            const u32 w = *(const u32*)ld(row + q * 8 + ss * 4);
            u32 hb = 0, sv = 0;
            if (F == F_NVFP4) sv = block_scale(sc[i]);
            else s[h] = h2f(sc[i]);
            if (F == F_Q5) hb = (hi[i] >> (8 * ss)) & 0xff, hb = (hb | (hb << 12)) << 4;
            if (F == F_Q6) hb = (hi[i] >> (16 * ss)) & 0xffff, hb = (hb | (hb << 8)) << 4;
            expand_nibbles<F>(w, hb, sv, a[h]);
          }
        }
#pragma unroll
        for (int n = 0; n < 8; n++) {
          if (T::GROUP) {
            float t[4] = {0, 0, 0, 0};
            mma16816(t, a[0][0], a[1][0], a[0][1], a[1][1], xf[n][0], xf[n][1]);
            mma16816(t, a[0][2], a[1][2], a[0][3], a[1][3], xf[n][2], xf[n][3]);
            acc[m][n][0] = fmaf(s[0], t[0], acc[m][n][0]);
            acc[m][n][1] = fmaf(s[0], t[1], acc[m][n][1]);
            acc[m][n][2] = fmaf(s[1], t[2], acc[m][n][2]);
            acc[m][n][3] = fmaf(s[1], t[3], acc[m][n][3]);
          } else {
            mma16816(acc[m][n], a[0][0], a[1][0], a[0][1], a[1][1], xf[n][0], xf[n][1]);
            mma16816(acc[m][n], a[0][2], a[1][2], a[0][3], a[1][3], xf[n][2], xf[n][3]);
          }
        }
      }
    }
  }
  // Through shared memory in two halves of 128 tokens: a token's 128 rows are then finished in a short loop and stored as whole
  // words. (Finishing in place unrolls 128 times; fetching that code cost more than the products of 1,500 k.)
  cp_wait<0>();
  const bool f32 = mode & 1, vec = (y_pitch & 7) == 0;
  float* tile = (float*)smem;  // [128][132]
  for (int half = 0; half < 2; half++) {
    __syncthreads();
    if (wn >> 7 == half) {
#pragma unroll
      for (int m = 0; m < 4; m++)
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
          for (int i = 0; i < 4; i++) tile[((wn & 64) + n * 8 + 2 * q + (i & 1)) * 132 + wm + m * 16 + (i >> 1) * 8 + g] = acc[m][n][i];
    }
    __syncthreads();
    for (int e = tid; e < 128 * 16; e += 256) {
      const int t = t0 + half * 128 + (e >> 4), r = n0 + (e & 15) * 8;
      if (t >= rows || r >= N) continue;
      const float* src = tile + (e >> 4) * 132 + (e & 15) * 8;
      float v[8];
#pragma unroll
      for (int i = 0; i < 8; i++) v[i] = r + i < N ? finish(F == F_NVFP4 ? src[i] * 256.0f : src[i], row_scale, r + i, tscale, mode & 2) : 0.0f;
      if (f32) {
        float* d = (float*)y + (size_t)t * y_pitch + r;
        for (int i = 0; i < 8 && r + i < N; i++) d[i] = v[i];
      } else {
        u16* d = (u16*)y + (size_t)t * y_pitch + r;
        if (vec && r + 8 <= N) *(uint4*)d = make_uint4(pack_bf(v[0], v[1]), pack_bf(v[2], v[3]), pack_bf(v[4], v[5]), pack_bf(v[6], v[7]));
        else
          for (int i = 0; i < 8 && r + i < N; i++) d[i] = f2bf(v[i]);
      }
    }
  }
}

#define ENTRY(NAME, F)                                                                                                     \
  extern "C" __global__ void __launch_bounds__(256, 1)                                                                     \
  NAME(const u8* codes, const u8* high, const u8* scales, const u16* row_scale, float tscale, const bf16* x, void* y,      \
       int N, int K, int kx, int rows, int x_pitch, int y_pitch, int code_pitch, int high_pitch, int scale_pitch,          \
       int mode) {                                                                                                         \
    gemm_body<F>(codes, high, scales, row_scale, tscale, x, y, N, K, kx, rows, x_pitch, y_pitch, code_pitch, high_pitch,   \
                 scale_pitch, mode);                                                                                       \
  }
ENTRY(gemm_bf16, F_BF16)
ENTRY(gemm_q8, F_Q8)
ENTRY(gemm_q4, F_Q4)
ENTRY(gemm_q5, F_Q5)
ENTRY(gemm_q6, F_Q6)
ENTRY(gemm_nvfp4, F_NVFP4)
ENTRY(gemm_fp8, F_FP8)
