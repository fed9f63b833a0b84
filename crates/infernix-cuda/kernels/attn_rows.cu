// Attention of many rows over selected blocks (prompts): every row has keys of its own, so nothing is shared between rows and the work
// is to keep keys coming. A block is (row, kv head); its warps take every fourth tile of 16 keys each by themselves, from their own
// ring, with their own maximum and sums: they meet once, at the end. Probabilities enter the second product as two BF16 parts.
#include "common.cuh"

#define KEYS 16   // keys a tile
#define RINGS 3   // tiles a warp holds
#define WARPS 4
#define BLOCKS 520  // selected blocks and the open one, at most

template <int D>
DEV void rows_body(const u16* __restrict__ q, const u16* __restrict__ kc, const u16* __restrict__ vc, const int* __restrict__ tables,
                   const int* __restrict__ row_lane, const int* __restrict__ row_pos, const int* __restrict__ sel_all,
                   const int* __restrict__ sel_count, const u16* __restrict__ gate, u16* __restrict__ out, int group, int q_pitch, int q_head,
                   int table_pitch, int page_log, int page_stride, int token_stride, int head_stride, int sel_pitch, int ratio,
                   int out_pitch, int gate_pitch, int gate_head, float scale_log2) {
  constexpr int KP = D * 2 + 64, VP = D * 2 + 16, STAGE = KEYS * (KP + VP), STEPS = D / 32, NT = D / 8;
  extern __shared__ __align__(128) u8 smem[];
  __shared__ float ms[WARPS][16], ls[WARPS][16];
  __shared__ u32 places[BLOCKS];
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, c = lane & 3;
  const int row = blockIdx.x, kvh = blockIdx.y;
  const u32 s_ring = smem_u32(smem) + warp * RINGS * STAGE;
  pdl_launch();
  pdl_wait();
  const int pos = row_pos[row], nsel = sel_count[row], full = nsel * ratio, tail = (pos + 1) / ratio * ratio;
  const int len = full + pos + 1 - tail, tiles = (len + KEYS - 1) / KEYS;
  const int* table = tables + (size_t)row_lane[row] * table_pitch;
  const int* sel = sel_all + (size_t)row * sel_pitch;
  const u16 *kb = kc + (size_t)kvh * head_stride, *vb = vc + (size_t)kvh * head_stride;

  // Where each block is; the open one comes last. Blocks do not straddle pages.
  for (int b = tid; b <= nsel; b += WARPS * 32) {
    const int p = b < nsel ? sel[b] * ratio : tail;
    places[b] = b < nsel || tail <= pos ? (u32)table[p >> page_log] * page_stride + (u32)(p & ((1 << page_log) - 1)) * token_stride : 0;
  }
  __syncthreads();
  const int shift = __ffs(ratio) - 1;
  // Where the keys of a tile are: lane i knows key i & 15.
  auto where = [&](int t) -> i64 {
    const int i = t * KEYS + (lane & 15);
    return i < len ? (i64)(places[i >> shift] + (u32)(i & (ratio - 1)) * token_stride) : -1;
  };
  auto load = [&](int n, i64 at) {  // n: how manieth tile of the warp
    const u32 dk = s_ring + (n % RINGS) * STAGE + lane * 16, dv = dk + KEYS * KP;
#pragma unroll
    for (int r = 0; r < KEYS; r++) {
      const i64 off = __shfl_sync(~0u, at, r);
      const bool ok = off >= 0 && lane * 8 < D;
      const size_t from = ok ? (size_t)off + lane * 8 : 0;
      if (lane * 8 < D) {
        cp_async16z(dk + r * KP, kb + from, ok ? 16 : 0);
        cp_async16z(dv + r * VP, vb + from, ok ? 16 : 0);
      }
    }
  };
  const int mine = tiles > warp ? (tiles - 1 - warp) / WARPS + 1 : 0;
  i64 at[RINGS];
#pragma unroll
  for (int n = 0; n < RINGS; n++) at[n] = where(warp + n * WARPS);
#pragma unroll
  for (int n = 0; n < RINGS - 1; n++) {
    if (n < mine) load(n, at[n]);
    cp_commit();
  }
  i64 next = at[RINGS - 1];

  u32 qa[STEPS][4], qb[STEPS][4];
#pragma unroll
  for (int s = 0; s < STEPS; s++) {
    uint4 a = make_uint4(0, 0, 0, 0), b = a;
    const u16* qr = q + (size_t)row * q_pitch + s * 32 + c * 8;
    if (g < group) a = *(const uint4*)(qr + (size_t)(kvh * group + g) * q_head);
    if (g + 8 < group) b = *(const uint4*)(qr + (size_t)(kvh * group + g + 8) * q_head);
    qa[s][0] = a.x, qa[s][1] = a.y, qa[s][2] = a.z, qa[s][3] = a.w;
    qb[s][0] = b.x, qb[s][1] = b.y, qb[s][2] = b.z, qb[s][3] = b.w;
  }
  float acc[NT][4];
#pragma unroll
  for (int n = 0; n < NT; n++) acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0;
  float m0 = -INFINITY, m1 = -INFINITY, l0 = 0, l1 = 0;

#pragma unroll 1
  for (int n = 0; n < mine; n++) {
    const int t = warp + n * WARPS;
    cp_wait<RINGS - 2>();
    __syncwarp();
    const u32 sk = s_ring + (n % RINGS) * STAGE, sv = sk + KEYS * KP;
    if (n + RINGS - 1 < mine) load(n + RINGS - 1, next);
    cp_commit();
    next = where(t + RINGS * WARPS);
    float s[2][4] = {};
#pragma unroll
    for (int st = 0; st < STEPS; st++) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const uint4 b = lds128(sk + (h * 8 + g) * KP + c * 16 + st * 64);
        mma16816(s[h], qa[st][0], qb[st][0], qa[st][1], qb[st][1], b.x, b.y);
        mma16816(s[h], qa[st][2], qb[st][2], qa[st][3], qb[st][3], b.z, b.w);
      }
    }
    float a = -INFINITY, b = -INFINITY;
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int key = t * KEYS + h * 8 + c * 2 + (i & 1);
        s[h][i] = key < len ? s[h][i] * scale_log2 : -INFINITY;
        if (i < 2) a = fmaxf(a, s[h][i]);
        else b = fmaxf(b, s[h][i]);
      }
    a = fmaxf(a, __shfl_xor_sync(~0u, a, 1)), b = fmaxf(b, __shfl_xor_sync(~0u, b, 1));
    a = fmaxf(a, __shfl_xor_sync(~0u, a, 2)), b = fmaxf(b, __shfl_xor_sync(~0u, b, 2));
    if (__any_sync(~0u, a > m0 || b > m1)) {
      const float n0 = fmaxf(m0, a), n1 = fmaxf(m1, b);
      const float f0 = exp2f(m0 - n0), f1 = exp2f(m1 - n1);
      m0 = n0, m1 = n1, l0 *= f0, l1 *= f1;
#pragma unroll
      for (int i = 0; i < NT; i++) acc[i][0] *= f0, acc[i][1] *= f0, acc[i][2] *= f1, acc[i][3] *= f1;
    }
    u32 ph[4], pl[4];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float p0 = exp2f(s[h][0] - m0), p1 = exp2f(s[h][1] - m0), p2 = exp2f(s[h][2] - m1), p3 = exp2f(s[h][3] - m1);
      l0 += p0 + p1, l1 += p2 + p3;
      ph[2 * h] = pack_bf(p0, p1), ph[2 * h + 1] = pack_bf(p2, p3);
      pl[2 * h] = pack_bf(p0 - bf_lo(ph[2 * h]), p1 - bf_hi(ph[2 * h]));
      pl[2 * h + 1] = pack_bf(p2 - bf_lo(ph[2 * h + 1]), p3 - bf_hi(ph[2 * h + 1]));
    }
    // ldmatrix lane: matrices (keys 0-7, 8-15) x (dims n, n + 8).
    const u32 vr = sv + (lane & 15) * VP + (lane >> 4) * 16;
#pragma unroll
    for (int i = 0; i < NT; i += 2) {
      u32 r0, r1, r2, r3;
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                   : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3) : "r"(vr + i * 16));
      mma16816(acc[i], ph[0], ph[1], ph[2], ph[3], r0, r1);
      mma16816(acc[i + 1], ph[0], ph[1], ph[2], ph[3], r2, r3);
      mma16816(acc[i], pl[0], pl[1], pl[2], pl[3], r0, r1);
      mma16816(acc[i + 1], pl[0], pl[1], pl[2], pl[3], r2, r3);
    }
    __syncwarp();
  }
  l0 += __shfl_xor_sync(~0u, l0, 1), l1 += __shfl_xor_sync(~0u, l1, 1);
  l0 += __shfl_xor_sync(~0u, l0, 2), l1 += __shfl_xor_sync(~0u, l1, 2);
  cp_wait<0>();
  __syncthreads();
  // Sums of the warps, over the rings: [warp][16][D].
  float* part = (float*)smem + warp * 16 * D;
#pragma unroll
  for (int i = 0; i < NT; i++) {
    *(float2*)(part + g * D + i * 8 + c * 2) = make_float2(acc[i][0], acc[i][1]);
    *(float2*)(part + (g + 8) * D + i * 8 + c * 2) = make_float2(acc[i][2], acc[i][3]);
  }
  if (c == 0) ms[warp][g] = m0, ms[warp][g + 8] = m1, ls[warp][g] = l0, ls[warp][g + 8] = l1;
  __syncthreads();
  for (int o = tid * 2; o < group * D; o += WARPS * 64) {
    const int h = o / D, d = o - h * D;
    float m = ms[0][h];
#pragma unroll
    for (int w = 1; w < WARPS; w++) m = fmaxf(m, ms[w][h]);
    float l = 0, y0 = 0, y1 = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float f = exp2f(ms[w][h] - m);
      const float2 v = *(const float2*)((float*)smem + (w * 16 + h) * D + d);
      l = fmaf(ls[w][h], f, l), y0 = fmaf(v.x, f, y0), y1 = fmaf(v.y, f, y1);
    }
    u32 y = pack_bf(y0 / l, y1 / l);
    const int head = kvh * group + h;
    if (gate) {
      const u32 e = *(const u32*)(gate + (size_t)row * gate_pitch + (size_t)head * gate_head + d);
      y = pack_bf(bf_lo(y) * sigmoidf(bf_lo(e)), bf_hi(y) * sigmoidf(bf_hi(e)));
    }
    *(u32*)(out + (size_t)row * out_pitch + (size_t)head * D + d) = y;
  }
}

#define ENTRY(D)                                                                                                              \
  extern "C" __global__ void __launch_bounds__(32 * WARPS, 1) attn_rows_##D(                                                  \
      const u16* q, const u16* kc, const u16* vc, const int* tables, const int* row_lane, const int* row_pos, const int* sel, \
      const int* sel_count, const u16* gate, u16* out, int group, int q_pitch, int q_head, int table_pitch, int page_log,     \
      int page_stride, int token_stride, int head_stride, int sel_pitch, int ratio, int out_pitch, int gate_pitch,            \
      int gate_head, float scale_log2) {                                                                                      \
    rows_body<D>(q, kc, vc, tables, row_lane, row_pos, sel, sel_count, gate, out, group, q_pitch, q_head, table_pitch,        \
                 page_log, page_stride, token_stride, head_stride, sel_pitch, ratio, out_pitch, gate_pitch, gate_head,        \
                 scale_log2);                                                                                                 \
  }
ENTRY(256)
ENTRY(128)
