// Dense causal attention of a prefill chunk over paged BF16 keys and values.
//
// Rows of a block are (token, query head of the group) pairs, token-major: 128 of them, 16 a warp, so each key and value
// tile serves the whole group. Online softmax in FP32; probabilities enter the second product as two BF16 parts.
#include "common.cuh"

#define TK 32
#define TM 128

template <int D>
DEV void prefill_body(const u16* __restrict__ q, const u16* __restrict__ kc, const u16* __restrict__ vc, const int* __restrict__ table,
                      const u16* __restrict__ gate, u16* __restrict__ out, int rows, int pos0, int group, int q_pitch, int q_head,
                      int page_log, int page_stride, int token_stride, int head_stride, int out_pitch, int gate_pitch,
                      int gate_head, float scale_log2) {
  constexpr int KP = D * 2 + 64, VP = D * 2 + 16, STEPS = D / 32, NT = D / 8;
  extern __shared__ __align__(128) u8 smem[];
  const u32 s_k = smem_u32(smem), s_v = s_k + 2 * TK * KP;
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, c = lane & 3;
  // Long blocks first: the tail of the grid is then short ones.
  const int tile = gridDim.x - 1 - blockIdx.x, kvh = blockIdx.y;
  const int total = rows * group, m0 = tile * TM + warp * 16 + g, m1 = m0 + 8;
  pdl_launch();
  pdl_wait();
  const u16* kb = kc + (size_t)kvh * head_stride;
  const u16* vb = vc + (size_t)kvh * head_stride;
  const int t0 = min(m0, total - 1) / group, t1 = min(m1, total - 1) / group;
  const int h0 = kvh * group + min(m0, total - 1) % group, h1 = kvh * group + min(m1, total - 1) % group;
  const int last0 = pos0 + t0, last1 = pos0 + t1;  // last visible key

  u32 qf[STEPS][8];
#pragma unroll
  for (int s = 0; s < STEPS; s++) {
    const uint4 a = *(const uint4*)(q + (size_t)t0 * q_pitch + (size_t)h0 * q_head + s * 32 + c * 8);
    const uint4 b = *(const uint4*)(q + (size_t)t1 * q_pitch + (size_t)h1 * q_head + s * 32 + c * 8);
    qf[s][0] = a.x, qf[s][1] = b.x, qf[s][2] = a.y, qf[s][3] = b.y;
    qf[s][4] = a.z, qf[s][5] = b.z, qf[s][6] = a.w, qf[s][7] = b.w;
  }
  float acc[NT][4];
#pragma unroll
  for (int n = 0; n < NT; n++) acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0;
  float mx0 = -INFINITY, mx1 = -INFINITY, l0 = 0, l1 = 0;
  const int keys = pos0 + min(tile * TM + TM - 1, total - 1) / group + 1;
  const int tiles = (keys + TK - 1) / TK;

  auto load = [&](int t) {
    const int key = tid >> 3, i = t * TK + key, buf = t & 1;
    const bool ok = i < keys;
    const size_t off = ok ? (size_t)table[i >> page_log] * page_stride + (size_t)(i & ((1 << page_log) - 1)) * token_stride : 0;
    const u32 dk = s_k + (buf * TK + key) * KP, dv = s_v + (buf * TK + key) * VP;
#pragma unroll
    for (int j = 0; j < D / 64; j++) {
      const int e = ((tid & 7) + 8 * j) * 8;
      cp_async16z(dk + e * 2, kb + off + e, ok ? 16 : 0);
      cp_async16z(dv + e * 2, vb + off + e, ok ? 16 : 0);
    }
    cp_commit();
  };
  load(0);
  for (int t = 0; t < tiles; t++) {
    cp_wait<0>();
    __syncthreads();
    if (t + 1 < tiles) load(t + 1);
    const int buf = t & 1;
    float s[4][4];
#pragma unroll
    for (int n = 0; n < 4; n++) {
      s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0;
      const u32 kr = s_k + (buf * TK + n * 8 + g) * KP + c * 16;
#pragma unroll
      for (int st = 0; st < STEPS; st++) {
        const uint4 b = lds128(kr + st * 64);
        mma16816(s[n], qf[st][0], qf[st][1], qf[st][2], qf[st][3], b.x, b.y);
        mma16816(s[n], qf[st][4], qf[st][5], qf[st][6], qf[st][7], b.z, b.w);
      }
    }
    float a = -INFINITY, b = -INFINITY;
#pragma unroll
    for (int n = 0; n < 4; n++) {
      const int key = t * TK + n * 8 + c * 2;
      s[n][0] = key <= last0 ? s[n][0] * scale_log2 : -INFINITY;
      s[n][1] = key + 1 <= last0 ? s[n][1] * scale_log2 : -INFINITY;
      s[n][2] = key <= last1 ? s[n][2] * scale_log2 : -INFINITY;
      s[n][3] = key + 1 <= last1 ? s[n][3] * scale_log2 : -INFINITY;
      a = fmaxf(a, fmaxf(s[n][0], s[n][1])), b = fmaxf(b, fmaxf(s[n][2], s[n][3]));
    }
    a = fmaxf(a, __shfl_xor_sync(~0u, a, 1)), b = fmaxf(b, __shfl_xor_sync(~0u, b, 1));
    a = fmaxf(a, __shfl_xor_sync(~0u, a, 2)), b = fmaxf(b, __shfl_xor_sync(~0u, b, 2));
    // Key 0 is visible to every row, so the maximum is finite from the first tile on.
    const float n0 = fmaxf(mx0, a), n1 = fmaxf(mx1, b);
    const float f0 = exp2f(mx0 - n0), f1 = exp2f(mx1 - n1);
    mx0 = n0, mx1 = n1;
    l0 *= f0, l1 *= f1;
    if (__any_sync(~0u, f0 != 1.0f || f1 != 1.0f)) {
#pragma unroll
      for (int n = 0; n < NT; n++) acc[n][0] *= f0, acc[n][1] *= f0, acc[n][2] *= f1, acc[n][3] *= f1;
    }
#pragma unroll
    for (int kk = 0; kk < 2; kk++) {
      u32 ph[4], pl[4];
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int n = kk * 2 + e;
        const float p0 = exp2f(s[n][0] - mx0), p1 = exp2f(s[n][1] - mx0), p2 = exp2f(s[n][2] - mx1), p3 = exp2f(s[n][3] - mx1);
        l0 += p0 + p1, l1 += p2 + p3;
        // The accumulator layout of two key tiles is the A layout of one k16 step.
        ph[e * 2] = pack_bf(p0, p1), ph[e * 2 + 1] = pack_bf(p2, p3);
        pl[e * 2] = pack_bf(p0 - bf_lo(ph[e * 2]), p1 - bf_hi(ph[e * 2]));
        pl[e * 2 + 1] = pack_bf(p2 - bf_lo(ph[e * 2 + 1]), p3 - bf_hi(ph[e * 2 + 1]));
      }
      const u32 vr = s_v + (buf * TK + kk * 16 + (lane & 15)) * VP + (lane >> 4) * 16;
#pragma unroll
      for (int n = 0; n < NT; n += 2) {
        u32 r0, r1, r2, r3;
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3) : "r"(vr + n * 16));
        mma16816(acc[n], ph[0], ph[1], ph[2], ph[3], r0, r1);
        mma16816(acc[n], pl[0], pl[1], pl[2], pl[3], r0, r1);
        mma16816(acc[n + 1], ph[0], ph[1], ph[2], ph[3], r2, r3);
        mma16816(acc[n + 1], pl[0], pl[1], pl[2], pl[3], r2, r3);
      }
    }
  }
  l0 += __shfl_xor_sync(~0u, l0, 1), l1 += __shfl_xor_sync(~0u, l1, 1);
  l0 += __shfl_xor_sync(~0u, l0, 2), l1 += __shfl_xor_sync(~0u, l1, 2);
  l0 = 1.0f / l0, l1 = 1.0f / l1;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int m = h ? m1 : m0, t = h ? t1 : t0, head = h ? h1 : h0;
    if (m >= total) continue;
    const float l = h ? l1 : l0;
#pragma unroll
    for (int n = 0; n < NT; n++) {
      const int d = n * 8 + c * 2;
      u32 v = pack_bf(acc[n][h * 2] * l, acc[n][h * 2 + 1] * l);
      if (gate) {
        const u32 z = *(const u32*)(gate + (size_t)t * gate_pitch + (size_t)head * gate_head + d);
        v = pack_bf(bf_lo(v) * sigmoidf(bf_lo(z)), bf_hi(v) * sigmoidf(bf_hi(z)));
      }
      *(u32*)(out + (size_t)t * out_pitch + head * D + d) = v;
    }
  }
}

#define ENTRY(D)                                                                                                           \
  extern "C" __global__ void __launch_bounds__(256, 1) attn_prefill_##D(                                                   \
      const u16* q, const u16* kc, const u16* vc, const int* table, const u16* gate, u16* out, int rows, int pos0,         \
      int group, int q_pitch, int q_head, int page_log, int page_stride, int token_stride, int head_stride, int out_pitch, \
      int gate_pitch, int gate_head, float scale_log2) {                                                                   \
    prefill_body<D>(q, kc, vc, table, gate, out, rows, pos0, group, q_pitch, q_head, page_log, page_stride, token_stride,  \
                    head_stride, out_pitch, gate_pitch, gate_head, scale_log2);                                            \
  }
ENTRY(256)
ENTRY(128)
