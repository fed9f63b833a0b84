// Paged attention for decode and verify calls, BF16 keys and values, split over keys; then the merge of the splits.
//
// A block is (split, kv head, row): all query heads of the group (at most 16) are the M of one mma, so keys and values are
// read once. Keys of a row are cut at multiples of a length that depends on the row's own key count only: a row's bits
// do not depend on the other rows. Probabilities enter the second product as two BF16 parts (16 bits in all).
#include "common.cuh"

#define TK 32  // keys a tile

// Where the keys of a row are. With `sel`: sel_count blocks of `ratio` tokens, then the tail from the last complete block.
struct Keys {
  const int* table;
  const int* sel;
  int nsel, ratio, tail, page_log;
  size_t page_stride, token_stride;
  DEV size_t offset(int i) const {
    int pos = i;
    if (sel) {
      const int full = nsel * ratio;
      pos = i < full ? sel[i / ratio] * ratio + i % ratio : tail + i - full;
    }
    return (size_t)table[pos >> page_log] * page_stride + (size_t)(pos & ((1 << page_log) - 1)) * token_stride;
  }
};

// Keys of a split: a function of the row's own key count, so that `slots` blocks (those the device holds at once) take one wave.
DEV int split_len(int len, int kv_heads, int slots) {
  const int l = (int)(((long long)len * kv_heads + slots - 1) / slots);
  return max(64, (l + 31) & ~31);
}

template <int D>
DEV void attn_body(const u16* q, const u16* __restrict__ kc, const u16* __restrict__ vc, const int* __restrict__ tables,
                   const int* __restrict__ row_lane, const int* __restrict__ row_pos, const int* sel, const int* sel_count, float* part,
                   float* ml, int group, int q_pitch,
                   int q_head, int table_pitch, int page_log, int page_stride, int token_stride, int head_stride,
                   int sel_pitch, int ratio, int max_splits, int slots, int fresh, float scale_log2) {
  constexpr int KP = D * 2 + 64, VP = D * 2 + 16, STEPS = D / 32, DW = D / 4, NT = DW / 8;
  extern __shared__ __align__(128) u8 smem[];
  const u32 s_k = smem_u32(smem), s_v = s_k + 2 * TK * KP;
  u8* sp = smem + 2 * TK * KP + 2 * TK * VP;      // P hi, lo: [16][80] each
  float* mx = (float*)(sp + 2 * 16 * 80);         // [4][16]
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, c = lane & 3;
  const int split = blockIdx.x, kvh = blockIdx.y, row = blockIdx.z;
  pdl_launch();
  // Places of rows and pages are older than the round, and so are keys but a row's last `fresh`: they come before the queries are known.
  // Selected blocks do not; `q`, `sel` and `sel_count` are not __restrict__, or their loads might be moved before the wait as those of constants.
  if (sel) pdl_wait();
  const int pos = row_pos[row];
  Keys keys;
  keys.table = tables + (size_t)row_lane[row] * table_pitch;
  keys.nsel = sel ? sel_count[row] : 0;
  keys.sel = sel && keys.nsel >= 0 ? sel + (size_t)row * sel_pitch : nullptr;
  keys.ratio = ratio, keys.tail = (pos + 1) / max(ratio, 1) * ratio, keys.page_log = page_log;
  keys.page_stride = page_stride, keys.token_stride = token_stride;
  const int len = keys.sel ? keys.nsel * ratio + (pos + 1) - keys.tail : pos + 1;
  const int L = split_len(len, gridDim.y, slots), k0 = split * L, k1 = min(len, k0 + L);
  if (k0 >= len) return;
  const u16* kb = kc + (size_t)kvh * head_stride;
  const u16* vb = vc + (size_t)kvh * head_stride;

  float acc[NT][4];
#pragma unroll
  for (int n = 0; n < NT; n++) acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0;
  float m0 = -INFINITY, m1 = -INFINITY, l0 = 0, l1 = 0;

  const int tiles = (k1 - k0 + TK - 1) / TK;
  // The page of a tile is looked up one tile before its copies are issued.
  auto where = [&](int t) {
    const int i = k0 + t * TK + (tid >> 2);
    return i < k1 ? (i64)keys.offset(i) : (i64)-1;
  };
  i64 next = where(0);
  auto load = [&](int t) {
    const int key = tid >> 2, buf = t & 1;
    const bool ok = next >= 0;
    const size_t off = ok ? (size_t)next : 0;
    const u32 dk = s_k + (buf * TK + key) * KP, dv = s_v + (buf * TK + key) * VP;
#pragma unroll
    for (int j = 0; j < D / 32; j++) {
      const int e = ((tid & 3) + 4 * j) * 8;
      cp_async16z(dk + e * 2, kb + off + e, ok ? 16 : 0);
      cp_async16z(dv + e * 2, vb + off + e, ok ? 16 : 0);
    }
    cp_commit();
  };
  const bool early = !sel && min(k1, k0 + TK) <= pos + 1 - fresh;
  if (early) load(0);
  if (!sel) pdl_wait();
  if (!early) load(0);
  next = where(1);
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
  for (int t = 0; t < tiles; t++) {
    cp_wait<0>();
    __syncthreads();
    if (t + 1 < tiles) load(t + 1);
    next = where(t + 2);
    const int buf = t & 1;
    float s[4] = {0, 0, 0, 0};
    const u32 kr = s_k + (buf * TK + warp * 8 + g) * KP + c * 16;
#pragma unroll
    for (int st = 0; st < STEPS; st++) {
      const uint4 b = lds128(kr + st * 64);
      mma16816(s, qa[st][0], qb[st][0], qa[st][1], qb[st][1], b.x, b.y);
      mma16816(s, qa[st][2], qb[st][2], qa[st][3], qb[st][3], b.z, b.w);
    }
    const int key = k0 + t * TK + warp * 8 + c * 2;
    s[0] = key < k1 ? s[0] * scale_log2 : -INFINITY;
    s[1] = key + 1 < k1 ? s[1] * scale_log2 : -INFINITY;
    s[2] = key < k1 ? s[2] * scale_log2 : -INFINITY;
    s[3] = key + 1 < k1 ? s[3] * scale_log2 : -INFINITY;
    float a = fmaxf(s[0], s[1]), b = fmaxf(s[2], s[3]);
    a = fmaxf(a, __shfl_xor_sync(~0u, a, 1)), b = fmaxf(b, __shfl_xor_sync(~0u, b, 1));
    a = fmaxf(a, __shfl_xor_sync(~0u, a, 2)), b = fmaxf(b, __shfl_xor_sync(~0u, b, 2));
    if (c == 0) mx[warp * 16 + g] = a, mx[warp * 16 + g + 8] = b;
    __syncthreads();
    a = fmaxf(fmaxf(mx[g], mx[16 + g]), fmaxf(mx[32 + g], mx[48 + g]));
    b = fmaxf(fmaxf(mx[8 + g], mx[24 + g]), fmaxf(mx[40 + g], mx[56 + g]));
    const float n0 = fmaxf(m0, a), n1 = fmaxf(m1, b);
    const float f0 = exp2f(m0 - n0), f1 = exp2f(m1 - n1);
    m0 = n0, m1 = n1;
    const float p0 = exp2f(s[0] - m0), p1 = exp2f(s[1] - m0), p2 = exp2f(s[2] - m1), p3 = exp2f(s[3] - m1);
    l0 = l0 * f0 + (p0 + p1), l1 = l1 * f1 + (p2 + p3);
    const u32 h0 = pack_bf(p0, p1), h1 = pack_bf(p2, p3);
    const int po = (warp * 8 + c * 2) * 2;
    *(u32*)(sp + g * 80 + po) = h0;
    *(u32*)(sp + (g + 8) * 80 + po) = h1;
    *(u32*)(sp + 1280 + g * 80 + po) = pack_bf(p0 - bf_lo(h0), p1 - bf_hi(h0));
    *(u32*)(sp + 1280 + (g + 8) * 80 + po) = pack_bf(p2 - bf_lo(h1), p3 - bf_hi(h1));
#pragma unroll
    for (int n = 0; n < NT; n++) acc[n][0] *= f0, acc[n][1] *= f0, acc[n][2] *= f1, acc[n][3] *= f1;
    __syncthreads();
#pragma unroll
    for (int kk = 0; kk < TK / 16; kk++) {
      u32 ph[4], pl[4];
      const u8* pr = sp + kk * 32 + c * 4;
      ph[0] = *(const u32*)(pr + g * 80), ph[1] = *(const u32*)(pr + (g + 8) * 80);
      ph[2] = *(const u32*)(pr + g * 80 + 16), ph[3] = *(const u32*)(pr + (g + 8) * 80 + 16);
      pr += 1280;
      pl[0] = *(const u32*)(pr + g * 80), pl[1] = *(const u32*)(pr + (g + 8) * 80);
      pl[2] = *(const u32*)(pr + g * 80 + 16), pl[3] = *(const u32*)(pr + (g + 8) * 80 + 16);
      // ldmatrix lane: matrices (keys 0-7, 8-15) x (dims n, n+8).
      const u32 vr = s_v + (buf * TK + kk * 16 + (lane & 15)) * VP + (warp * DW + (lane >> 4) * 8) * 2;
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
  const size_t o = ((size_t)(row * gridDim.y + kvh) * max_splits + split) * 16;
#pragma unroll
  for (int n = 0; n < NT; n++) {
    const int d = warp * DW + n * 8 + c * 2;
    if (g < group) *(float2*)(part + (o + g) * D + d) = make_float2(acc[n][0], acc[n][1]);
    if (g + 8 < group) *(float2*)(part + (o + g + 8) * D + d) = make_float2(acc[n][2], acc[n][3]);
  }
  l0 += __shfl_xor_sync(~0u, l0, 1), l1 += __shfl_xor_sync(~0u, l1, 1);
  l0 += __shfl_xor_sync(~0u, l0, 2), l1 += __shfl_xor_sync(~0u, l1, 2);
  __syncthreads();
  if (c == 0) mx[warp * 16 + g] = l0, mx[warp * 16 + g + 8] = l1;
  __syncthreads();
  if (warp == 0 && c == 0) {
    l0 = ((mx[g] + mx[16 + g]) + mx[32 + g]) + mx[48 + g];
    l1 = ((mx[8 + g] + mx[24 + g]) + mx[40 + g]) + mx[56 + g];
    ml[(o + g) * 2] = m0, ml[(o + g) * 2 + 1] = l0;
    ml[(o + g + 8) * 2] = m1, ml[(o + g + 8) * 2 + 1] = l1;
  }
}

// Adds the splits of a (head, row) and divides; then, with `gate`, bf16(bf16(o) * sigma(gate)). A block has 64 of the D values: four groups of
// 64 threads take every fourth split; fixed order. grid (heads, rows, D / 64). At most 1024 splits.
extern "C" __global__ void __launch_bounds__(256) attn_merge(const float* part, const float* ml, const int* __restrict__ row_pos, const int* sel_count,
                                                             const u16* gate, u16* out, int group, int kv_heads, int ratio, int max_splits, int slots, int D,
                                                             int out_pitch, int gate_pitch, int gate_head) {
  __shared__ float f[1024], buf[256], red[64];
  pdl_launch();
  const int head = blockIdx.x, row = blockIdx.y, tid = threadIdx.x, d = blockIdx.z * 64 + (tid & 63), quarter = tid >> 6;
  const int pos = row_pos[row];
  pdl_wait();
  const int nsel = sel_count ? sel_count[row] : -1;
  const int len = nsel >= 0 ? nsel * ratio + (pos + 1) % ratio : pos + 1;
  const int L = split_len(len, kv_heads, slots), n = (len + L - 1) / L;
  const size_t o = ((size_t)(row * kv_heads + head / group) * max_splits) * 16 + head % group;
  // Twelve sums at a time are asked for together, the first of them before the weights of the splits are known.
  constexpr int AHEAD = 12;
  float v[AHEAD];
  auto load = [&](int from) {
#pragma unroll
    for (int i = 0; i < AHEAD; i++) v[i] = from + 4 * i < n ? part[(o + (size_t)(from + 4 * i) * 16) * D + d] : 0.0f;
  };
  load(quarter);
  const float g = gate && !quarter ? bf2f(gate[(size_t)row * gate_pitch + (size_t)head * gate_head + d]) : 0.0f;
  // Weights of the splits, up to four of a thread; 32 splits are added in a tree, those in order.
  float m[4], lv[4], top = -INFINITY;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int s = tid + 256 * i;
    m[i] = s < n ? ml[(o + (size_t)s * 16) * 2] : -INFINITY, lv[i] = s < n ? ml[(o + (size_t)s * 16) * 2 + 1] : 0.0f;
    top = fmaxf(top, m[i]);
  }
  top = warp_max(top);
  if ((tid & 31) == 0) red[tid >> 5] = top;
  __syncthreads();
  top = red[0];
  for (int i = 1; i < 8; i++) top = fmaxf(top, red[i]);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if (256 * i >= n) break;
    const float e = tid + 256 * i < n ? exp2f(m[i] - top) : 0.0f;
    f[tid + 256 * i] = e;
    const float ls = warp_sum(lv[i] * e);
    if ((tid & 31) == 0) red[32 + 8 * i + (tid >> 5)] = ls;
  }
  __syncthreads();
  float l = 0, acc = 0;
  for (int i = 0; i < (n + 31) >> 5; i++) l += red[32 + i];
  for (int s = quarter; s < n; s += 4 * AHEAD) {
    if (s > quarter) load(s);
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
      if (s + 4 * i < n) acc = fmaf(v[i], f[s + 4 * i], acc);
  }
  buf[tid] = acc;
  __syncthreads();
  if (quarter) return;
  acc = ((buf[tid] + buf[64 + tid]) + buf[128 + tid]) + buf[192 + tid];
  u16 y = f2bf(acc / l);
  if (gate) y = f2bf(bf2f(y) * sigmoidf(g));
  out[(size_t)row * out_pitch + head * D + d] = y;
}

// Writes new keys and values into pages. k, v [rows][kv_heads*D]. grid (kv_heads, rows), D/8 threads.
extern "C" __global__ void kv_append(const u16* __restrict__ k, const u16* __restrict__ v, u16* __restrict__ kc, u16* __restrict__ vc, const int* __restrict__ tables,
                                     const int* __restrict__ row_lane, const int* __restrict__ row_pos, int k_pitch, int v_pitch, int table_pitch,
                                     int page_log, int page_stride, int token_stride, int head_stride) {
  pdl_launch();
  pdl_wait();
  const int h = blockIdx.x, row = blockIdx.y, D = blockDim.x * 8, e = threadIdx.x * 8, pos = row_pos[row];
  const size_t off = (size_t)tables[(size_t)row_lane[row] * table_pitch + (pos >> page_log)] * page_stride +
                     (size_t)(pos & ((1 << page_log) - 1)) * token_stride + (size_t)h * head_stride + e;
  *(uint4*)(kc + off) = *(const uint4*)(k + (size_t)row * k_pitch + h * D + e);
  *(uint4*)(vc + off) = *(const uint4*)(v + (size_t)row * v_pitch + h * D + e);
}

#define ENTRY(D)                                                                                                           \
  extern "C" __global__ void __launch_bounds__(128) attn_decode_##D(                                                       \
      const u16* q, const u16* kc, const u16* vc, const int* tables, const int* row_lane, const int* row_pos,              \
      const int* sel, const int* sel_count, float* part, float* ml, int group, int q_pitch, int q_head, int table_pitch,   \
      int page_log, int page_stride, int token_stride, int head_stride, int sel_pitch, int ratio, int max_splits,          \
      int slots, int fresh, float scale_log2) {                                                                            \
    attn_body<D>(q, kc, vc, tables, row_lane, row_pos, sel, sel_count, part, ml, group, q_pitch, q_head, table_pitch,      \
                 page_log, page_stride, token_stride, head_stride, sel_pitch, ratio, max_splits, slots, fresh, scale_log2);       \
  }
ENTRY(256)
ENTRY(128)
