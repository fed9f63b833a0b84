// Gated delta rule for prefill, 64 tokens at a time on tensor cores.
//
// With G the running sum of g inside a chunk and S0 the state before it (k, q: BF16 words with their l2 factors rk, rq apart):
//   T = (I + A)^-1 diag(beta),  A_ij = beta_i e^(G_i - G_j) k^_i k^_j (j < i)        P_ij = e^(G_i - G_j) q^_i k^_j (j <= i)
//   V' = T (V - diag(e^G rk) K S0)      O = diag(e^G rq) Q S0 + P V'      S = e^(G_C) S0 + K^T diag(e^(G_C - G) rk) V'
// gdn_prepare makes T and P of all chunks at once; gdn_scan walks the chunks of a head with its part of S in registers. K and Q
// enter as the exact words they are; T, P, S, V' as two BF16 parts (16 bits of each), products of the low parts left out.
#include "common.cuh"

#define CT 64    // tokens a chunk
#define DK 128
#define MAT 8192 // bytes of 64 x 64 BF16
#define PART (4 * MAT + 1024)  // scratch of a chunk and head: T hi, T lo, P hi, P lo, then FP32 e^G rk, e^G rq, e^(G_C - G) rk [64] each, e^(G_C)

// 16-byte unit of a row of 4, 8 or 16 units: eight rows of one column land in different banks.
template <int UPR> DEV u32 at(int row, int unit) { return (row * UPR + (unit ^ (UPR == 4 ? (row >> 1) & 3 : row & 7))) * 16; }

DEV void ldm(u32 a, u32 (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a));
}
DEV void ldm_t(u32 a, u32 (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a));
}
DEV void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma16816(d, a[0], a[1], a[2], a[3], b0, b1); }
// Two values as BF16 pairs: the nearest, and the nearest to what is left.
DEV void split(float x, float y, u32& hi, u32& lo) {
  hi = pack_bf(x, y);
  lo = pack_bf(x - bf_lo(hi), y - bf_hi(hi));
}

// y [rows][y_pitch]: q | k | v after convolution and silu. grid (chunks, nv), 128 threads.
extern "C" __global__ void __launch_bounds__(128) gdn_prepare(const u16* __restrict__ y, const u16* __restrict__ a, const u16* __restrict__ b,
                                                              const float* __restrict__ a_log, const float* __restrict__ dt_bias, u8* __restrict__ scratch,
                                                              int rows, int nk, int nv, int y_pitch, int ab_pitch) {
  extern __shared__ __align__(128) u8 smem[];
  const u32 s_k = smem_u32(smem), s_q = s_k + 16384;
  float* A = (float*)(smem + 32768);  // [64][65]
  float* T = A + 64 * 65;             // [64][65]
  float* M = (float*)smem;            // [16][48], where K was
  double* G = (double*)(T + 64 * 65);
  float *rk = (float*)(G + 64), *rq = rk + 64, *beta = rq + 64;
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, c = lane & 3;
  const int chunk = blockIdx.x, head = blockIdx.y, kh = head / (nv / nk), t0 = chunk * CT, n = min(CT, rows - t0);
  pdl_launch();
  pdl_wait();
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int e = tid + i * 128, r = e >> 4, u = e & 15;
    const u16* src = y + (size_t)(t0 + min(r, n - 1)) * y_pitch + kh * DK + u * 8;
    cp_async16z(s_q + at<16>(r, u), src, r < n ? 16 : 0);
    cp_async16z(s_k + at<16>(r, u), src + nk * DK, r < n ? 16 : 0);
  }
  cp_commit();
  if (tid < 64) {
    double gv = 0;
    float be = 0;
    if (tid < n) {
      const float x = bf2f(a[(size_t)(t0 + tid) * ab_pitch + head]) + dt_bias[head];
      const float sp = x > 20.0f ? x + log1pf(expf(-x)) : log1pf(expf(x));
      gv = (double)(-expf(a_log[head]) * sp);
      be = sigmoidf(bf2f(b[(size_t)(t0 + tid) * ab_pitch + head]));
    }
    beta[tid] = be;
    G[tid] = gv;
  }
  cp_wait<0>();
  __syncthreads();
  // Sums in binary64: what matters are differences of sums that can be large.
  double gs = 0;
  if (tid < 64)
    for (int i = 0; i <= tid; i++) gs += G[i];
  {
    // One thread a row of k (0-63) and of q.
    const int r = tid & 63;
    const u8* base = smem + (tid >= 64 ? 16384 : 0);
    float s = 0;
#pragma unroll 4
    for (int u = 0; u < 16; u++) {
      const uint4 v = *(const uint4*)(base + at<16>(r, u));
      const u32 w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int i = 0; i < 4; i++) s = fmaf(bf_lo(w[i]), bf_lo(w[i]), s), s = fmaf(bf_hi(w[i]), bf_hi(w[i]), s);
    }
    s = 1.0f / sqrtf(s + 1e-6f);
    if (tid >= 64) rq[r] = s * 0.08838834764831845f;
    else rk[r] = s;
  }
  __syncthreads();
  if (tid < 64) G[tid] = gs;
  __syncthreads();

  // K K^T and Q K^T: 16 rows a warp.
  float kk[8][4], qk[8][4];
#pragma unroll
  for (int j = 0; j < 8; j++)
#pragma unroll
    for (int i = 0; i < 4; i++) kk[j][i] = qk[j][i] = 0;
#pragma unroll
  for (int k = 0; k < 8; k++) {
    u32 ka[4], qa[4];
    const int ar = warp * 16 + (lane & 15), au = 2 * k + (lane >> 4);
    ldm(s_k + at<16>(ar, au), ka);
    ldm(s_q + at<16>(ar, au), qa);
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      if (j * 8 > warp * 16 + 15) continue;
      u32 bb[4];
      ldm(s_k + at<16>(j * 8 + (lane & 7) + (lane >> 4) * 8, 2 * k + ((lane >> 3) & 1)), bb);
      mma(kk[j], ka, bb[0], bb[1]), mma(kk[j + 1], ka, bb[2], bb[3]);
      mma(qk[j], qa, bb[0], bb[1]), mma(qk[j + 1], qa, bb[2], bb[3]);
    }
  }
  u8* out = scratch + ((size_t)chunk * nv + head) * PART;
#pragma unroll
  for (int j = 0; j < 8; j++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int i = warp * 16 + g + 8 * h, c0 = j * 8 + 2 * c;
      float p[2];
#pragma unroll
      for (int x = 0; x < 2; x++) {
        const int col = c0 + x;
        const float d = col <= i ? expf((float)(G[i] - G[col])) * rk[col] : 0.0f;
        A[i * 65 + col] = col < i ? beta[i] * rk[i] * d * kk[j][2 * h + x] : 0.0f;
        p[x] = rq[i] * d * qk[j][2 * h + x];
      }
      u32 hi, lo;
      split(p[0], p[1], hi, lo);
      *(u32*)(out + 2 * MAT + i * 128 + c0 * 2) = hi;
      *(u32*)(out + 3 * MAT + i * 128 + c0 * 2) = lo;
    }
  for (int i = tid; i < 64 * 65; i += 128) T[i] = 0;
  if (tid < 64) {
    const float e = expf((float)G[tid]);
    float* v = (float*)(out + 4 * MAT);
    v[tid] = e * rk[tid], v[64 + tid] = e * rq[tid];
    v[128 + tid] = expf((float)(G[63] - G[tid])) * rk[tid];
    if (tid == 0) v[192] = expf((float)G[63]);
  }
  __syncthreads();
  // (I + A)^-1: diagonal blocks of 16 by substitution, a thread a column; then block rows downwards.
  if (tid < 64) {
    const int o = tid & ~15, col = tid & 15;
    float x[16];
#pragma unroll
    for (int i = 0; i < 16; i++) {
      float s = i == col ? 1.0f : 0.0f;
#pragma unroll
      for (int j = 0; j < i; j++) s = fmaf(-A[(o + i) * 65 + o + j], x[j], s);
      x[i] = s;
      T[(o + i) * 65 + o + col] = s;
    }
  }
  __syncthreads();
  for (int i = 1; i < 4; i++) {
    // M = sum_k A_ik T_kj over the blocks k of the rows above, then T_ij = -T_ii M.
    for (int e = tid; e < 256 * i; e += 128) {
      const int r = e / (16 * i), col = e - r * 16 * i;
      float s = 0;
      for (int k = col & ~15; k < 16 * i; k++) s = fmaf(A[(16 * i + r) * 65 + k], T[k * 65 + col], s);
      M[r * 48 + col] = s;
    }
    __syncthreads();
    for (int e = tid; e < 256 * i; e += 128) {
      const int r = e / (16 * i), col = e - r * 16 * i;
      float s = 0;
#pragma unroll
      for (int k = 0; k < 16; k++) s = fmaf(-T[(16 * i + r) * 65 + 16 * i + k], M[k * 48 + col], s);
      T[(16 * i + r) * 65 + col] = s;
    }
    __syncthreads();
  }
  for (int e = tid; e < 2048; e += 128) {
    const int i = e >> 5, col = (e & 31) * 2;
    u32 hi, lo;
    split(T[i * 65 + col] * beta[col], T[i * 65 + col + 1] * beta[col + 1], hi, lo);
    *(u32*)(out + i * 128 + col * 2) = hi;
    *(u32*)(out + MAT + i * 128 + col * 2) = lo;
  }
}

// S [nv][128][128] FP32 in place. o [rows][o_pitch] BF16. grid (nv, 128 / VB), 256 threads.
template <int VB>
DEV void scan_body(const u16* __restrict__ y, const u8* __restrict__ scratch, float* __restrict__ S, u16* __restrict__ o, int rows, int nk, int nv,
                   int y_pitch, int o_pitch) {
  constexpr int UV = VB / 8, NB = VB / 16;  // units of a row of values, n-blocks of a warp
  extern __shared__ __align__(128) u8 ring[];
  const u32 s_k = smem_u32(ring), s_q = s_k + 16384, s_t = s_q + 16384, s_p = s_t + 2 * MAT, s_s = s_p + 2 * MAT;
  const u32 s_r = s_s + 512 * VB, s_v = s_r + 256 * VB;
  const float* vec = (const float*)(ring + (s_v - s_k) + 256 * VB);
  const u32 s_vec = s_v + 256 * VB;
  u8* const base = ring - s_k;  // base + shared address
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, c = lane & 3;
  const int head = blockIdx.x, v0 = blockIdx.y * VB, kh = head / (nv / nk);
  const int mi = warp & 3, n0 = (warp >> 2) * (VB / 2);
  const int chunks = (rows + CT - 1) / CT;
  pdl_launch();
  pdl_wait();

  auto rows_of = [&](int ch, u32 dst, int col) {
    const int t0 = ch * CT, n = min(CT, rows - t0);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int e = tid + i * 256, r = e >> 4, u = e & 15;
      cp_async16z(dst + at<16>(r, u), y + (size_t)(t0 + min(r, n - 1)) * y_pitch + col + u * 8, r < n ? 16 : 0);
    }
  };
  auto matrix = [&](int ch, u32 dst, int which) {
    const u8* src = scratch + ((size_t)ch * nv + head) * PART + which * MAT;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int e = tid + i * 256, r = e >> 3, u = e & 7;  // 128 rows: hi, then lo
      cp_async16(dst + at<8>(r, u), src + e * 16);
    }
  };
  auto vectors = [&](int ch) {
    if (tid < 64) cp_async16(s_vec + tid * 16, scratch + ((size_t)ch * nv + head) * PART + 4 * MAT + tid * 16);
  };
  float s[UV][4];
  float* Sg = S + (size_t)head * DK * DK + v0;
#pragma unroll
  for (int j = 0; j < UV; j++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float2 w = *(const float2*)(Sg + (size_t)(warp * 16 + g + 8 * h) * DK + j * 8 + 2 * c);
      s[j][2 * h] = w.x, s[j][2 * h + 1] = w.y;
    }
  rows_of(0, s_k, nk * DK + kh * DK), rows_of(0, s_q, kh * DK), matrix(0, s_t, 0), matrix(0, s_p, 2), vectors(0);
  cp_commit();

  for (int ch = 0; ch < chunks; ch++) {
    const int t0 = ch * CT, n = min(CT, rows - t0);
    const bool more = ch + 1 < chunks;
    // Values of this thread's places.
    u32 vv[NB][2];
#pragma unroll
    for (int j = 0; j < NB; j++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int t = mi * 16 + g + 8 * h;
        vv[j][h] = t < n ? __ldg((const u32*)(y + (size_t)(t0 + t) * y_pitch + 2 * nk * DK + head * DK + v0 + n0 + j * 8 + 2 * c)) : 0;
      }
#pragma unroll
    for (int j = 0; j < UV; j++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        u32 hi, lo;
        split(s[j][2 * h], s[j][2 * h + 1], hi, lo);
        const u32 p = s_s + at<UV>(warp * 16 + g + 8 * h, j) + c * 4;
        *(u32*)(base + p) = hi;
        *(u32*)(base + p + 256 * VB) = lo;
      }
    cp_wait<0>();
    __syncthreads();

    // K S0 and Q S0.
    float w[NB][4], x[NB][4];
#pragma unroll
    for (int j = 0; j < NB; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) w[j][i] = x[j][i] = 0;
#pragma unroll
    for (int k = 0; k < 8; k++) {
      u32 ka[4], qa[4];
      const int ar = mi * 16 + (lane & 15), au = 2 * k + (lane >> 4);
      ldm(s_k + at<16>(ar, au), ka);
      ldm(s_q + at<16>(ar, au), qa);
      const int br = k * 16 + (lane & 15), bu = n0 / 8 + (lane >> 4);
#pragma unroll
      for (int j = 0; j < NB; j += 2)
#pragma unroll
        for (int part = 0; part < 2; part++) {
          u32 bb[4];
          ldm_t(s_s + part * 256 * VB + at<UV>(br, bu + j), bb);
          mma(w[j], ka, bb[0], bb[1]), mma(w[j + 1], ka, bb[2], bb[3]);
          mma(x[j], qa, bb[0], bb[1]), mma(x[j + 1], qa, bb[2], bb[3]);
        }
    }
    // V - e^G rk K S0.
    const float a0 = vec[mi * 16 + g], a1 = vec[mi * 16 + g + 8];
    const float b0 = vec[64 + mi * 16 + g], b1 = vec[64 + mi * 16 + g + 8];
    const float c0 = vec[128 + mi * 16 + g], c1 = vec[128 + mi * 16 + g + 8], decay = vec[192];
#pragma unroll
    for (int j = 0; j < NB; j++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const float f = h ? a1 : a0;
        u32 hi, lo;
        split(fmaf(-f, w[j][2 * h], bf_lo(vv[j][h])), fmaf(-f, w[j][2 * h + 1], bf_hi(vv[j][h])), hi, lo);
        const u32 p = s_r + at<UV>(mi * 16 + g + 8 * h, n0 / 8 + j) + c * 4;
        *(u32*)(base + p) = hi;
        *(u32*)(base + p + 128 * VB) = lo;
      }
    __syncthreads();
    if (more) rows_of(ch + 1, s_q, kh * DK);

    // V' = T R, and V' weighted for the state.
#pragma unroll
    for (int j = 0; j < NB; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) w[j][i] = 0;
    auto triangular = [&](u32 m, u32 r, float (&d)[NB][4]) {
#pragma unroll
      for (int k = 0; k < 4; k++) {
        if (k > mi) break;
        u32 th[4], tl[4];
        const int ar = mi * 16 + (lane & 15), au = 2 * k + (lane >> 4);
        ldm(m + at<8>(ar, au), th);
        ldm(m + MAT + at<8>(ar, au), tl);
#pragma unroll
        for (int j = 0; j < NB; j += 2) {
          u32 bh[4], bl[4];
          const u32 p = r + at<UV>(k * 16 + (lane & 15), n0 / 8 + j + (lane >> 4));
          ldm_t(p, bh);
          ldm_t(p + 128 * VB, bl);
#pragma unroll
          for (int h = 0; h < 2; h++) {
            mma(d[j + h], tl, bh[2 * h], bh[2 * h + 1]);
            mma(d[j + h], th, bl[2 * h], bl[2 * h + 1]);
            mma(d[j + h], th, bh[2 * h], bh[2 * h + 1]);
          }
        }
      }
    };
    triangular(s_t, s_r, w);
#pragma unroll
    for (int j = 0; j < NB; j++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        u32 hi, lo;
        const u32 p = at<UV>(mi * 16 + g + 8 * h, n0 / 8 + j) + c * 4;
        const float f = h ? c1 : c0;
        split(w[j][2 * h], w[j][2 * h + 1], hi, lo);
        *(u32*)(base + s_v + p) = hi;
        *(u32*)(base + s_v + p + 128 * VB) = lo;
        split(w[j][2 * h] * f, w[j][2 * h + 1] * f, hi, lo);
        *(u32*)(base + s_s + p) = hi;
        *(u32*)(base + s_s + p + 128 * VB) = lo;
      }
    __syncthreads();
    if (more) matrix(ch + 1, s_t, 0);

    // O = e^G rq Q S0 + P V'.
#pragma unroll
    for (int j = 0; j < NB; j++) x[j][0] *= b0, x[j][1] *= b0, x[j][2] *= b1, x[j][3] *= b1;
    triangular(s_p, s_v, x);
#pragma unroll
    for (int j = 0; j < NB; j++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int t = mi * 16 + g + 8 * h;
        if (t < n) *(u32*)(o + (size_t)(t0 + t) * o_pitch + head * DK + v0 + n0 + j * 8 + 2 * c) = pack_bf(x[j][2 * h], x[j][2 * h + 1]);
      }
    // S = e^(G_C) S + K^T V''.
#pragma unroll
    for (int j = 0; j < UV; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) s[j][i] *= decay;
#pragma unroll
    for (int k = 0; k < 4; k++) {
      u32 ka[4];
      ldm_t(s_k + at<16>(k * 16 + (lane & 7) + (lane >> 4) * 8, warp * 2 + ((lane >> 3) & 1)), ka);
#pragma unroll
      for (int j = 0; j < UV; j += 2)
#pragma unroll
        for (int part = 0; part < 2; part++) {
          u32 bb[4];
          ldm_t(s_s + part * 128 * VB + at<UV>(k * 16 + (lane & 15), j + (lane >> 4)), bb);
          mma(s[j], ka, bb[0], bb[1]), mma(s[j + 1], ka, bb[2], bb[3]);
        }
    }
    __syncthreads();
    if (more) rows_of(ch + 1, s_k, nk * DK + kh * DK), matrix(ch + 1, s_p, 2), vectors(ch + 1);
    cp_commit();
  }
#pragma unroll
  for (int j = 0; j < UV; j++)
#pragma unroll
    for (int h = 0; h < 2; h++)
      *(float2*)(Sg + (size_t)(warp * 16 + g + 8 * h) * DK + j * 8 + 2 * c) = make_float2(s[j][2 * h], s[j][2 * h + 1]);
}

#define ENTRY(VB, PER_SM)                                                                                                  \
  extern "C" __global__ void __launch_bounds__(256, PER_SM)                                                                \
  gdn_scan_##VB(const u16* y, const u8* scratch, float* S, u16* o, int rows, int nk, int nv, int y_pitch, int o_pitch) {   \
    scan_body<VB>(y, scratch, S, o, rows, nk, nv, y_pitch, o_pitch);                                                       \
  }
ENTRY(32, 2)
ENTRY(64, 1)
