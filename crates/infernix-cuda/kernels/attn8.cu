// Paged attention over int8 keys and values: codes with an FP16 scale per 64 dims; keys (and so queries) rotated.
//
// R = normalised Sylvester-Hadamard over the head, FP32, lane l of a warp holding dims l + 32 r: lane strides 1..16, then register
// strides. A group of 64: a = max |x|, s = FP32(FP16(a / 127)), code = rne(x (1 / s)) within +-127; zero where s is zero.
// Codes are exact in BF16. A key's scale multiplies the FP32 sum of its 64 dims, a value's its probability. Rotated queries enter
// as two BF16 parts.
#include "common.cuh"

#define TK 32

DEV void cp_async8z(u32 dst, const void* src, u32 n) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(dst), "l"(src), "r"(n) : "memory");
}
DEV void cp_async4z(u32 dst, const void* src, u32 n) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(dst), "l"(src), "r"(n) : "memory");
}
// 4 signed bytes -> 2 registers of BF16 pairs.
DEV void bytes_bf(u32 w, u32* r) {
  const u32 lo = w & 0x7f7f7f7fu, hi = w & 0x80808080u;
  r[0] = hsub2(__byte_perm(lo, 0x43434343u, 0x4140), __byte_perm(hi, 0x43434343u, 0x4140));
  r[1] = hsub2(__byte_perm(lo, 0x43434343u, 0x4342), __byte_perm(hi, 0x43434343u, 0x4342));
}

template <int D> DEV void rotate(float (&v)[D / 32], int lane) {
#pragma unroll
  for (int o = 1; o < 32; o <<= 1)
#pragma unroll
    for (int r = 0; r < D / 32; r++) {
      const float x = __shfl_xor_sync(~0u, v[r], o);
      v[r] = lane & o ? __fsub_rn(x, v[r]) : __fadd_rn(v[r], x);
    }
#pragma unroll
  for (int o = 1; o < D / 32; o <<= 1)
#pragma unroll
    for (int r = 0; r < D / 32; r++)
      if (!(r & o)) {
        const float x = v[r], y = v[r | o];
        v[r] = __fadd_rn(x, y), v[r | o] = __fsub_rn(x, y);
      }
#pragma unroll
  for (int r = 0; r < D / 32; r++) v[r] = __fmul_rn(v[r], D == 256 ? 0.0625f : 0.08838834764831845f);
}

// Rotated queries as two BF16 parts: out [rows][heads][2][D]. grid (heads, rows), one warp.
template <int D> DEV void rotate_queries(const u16* __restrict__ q, u16* __restrict__ out, int q_pitch, int q_head) {
  pdl_launch();
  pdl_wait();
  const int lane = threadIdx.x, head = blockIdx.x, row = blockIdx.y;
  float v[D / 32];
#pragma unroll
  for (int r = 0; r < D / 32; r++) v[r] = bf2f(q[(size_t)row * q_pitch + (size_t)head * q_head + lane + 32 * r]);
  rotate<D>(v, lane);
  u16* o = out + ((size_t)row * gridDim.x + head) * 2 * D + lane;
#pragma unroll
  for (int r = 0; r < D / 32; r++) {
    const u16 hi = f2bf(v[r]);
    o[32 * r] = hi, o[D + 32 * r] = f2bf(v[r] - bf2f(hi));
  }
}

// Writes new keys (rotated) and values. k, v [rows][kv_heads * D]. Scales lie at a 64th of the codes' offset. grid (kv_heads, rows), two warps.
template <int D>
DEV void append_body(const u16* __restrict__ k, const u16* __restrict__ v, u8* __restrict__ kc, u8* __restrict__ vc, u16* __restrict__ ks, u16* __restrict__ vs,
                     const int* __restrict__ tables, const int* __restrict__ row_lane, const int* __restrict__ row_pos, int k_pitch, int v_pitch,
                     int table_pitch, int page_log, int page_stride, int token_stride, int head_stride) {
  pdl_launch();
  pdl_wait();
  const int h = blockIdx.x, row = blockIdx.y, lane = threadIdx.x & 31, value = threadIdx.x >> 5, pos = row_pos[row];
  const size_t off = (size_t)tables[(size_t)row_lane[row] * table_pitch + (pos >> page_log)] * page_stride +
                     (size_t)(pos & ((1 << page_log) - 1)) * token_stride + (size_t)h * head_stride;
  const u16* src = (value ? v + (size_t)row * v_pitch : k + (size_t)row * k_pitch) + h * D + lane;
  float x[D / 32];
#pragma unroll
  for (int r = 0; r < D / 32; r++) x[r] = bf2f(src[32 * r]);
  if (!value) rotate<D>(x, lane);
#pragma unroll
  for (int g = 0; g < D / 64; g++) {
    const float a = warp_max(fmaxf(fabsf(x[2 * g]), fabsf(x[2 * g + 1])));
    const u16 sw = __half_as_ushort(__float2half_rn(__fdiv_rn(a, 127.0f)));
    const float s = h2f(sw), inv = s > 0 ? __fdiv_rn(1.0f, s) : 0.0f;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float c = fminf(fmaxf(rintf(__fmul_rn(x[2 * g + r], inv)), -127.0f), 127.0f);
      (value ? vc : kc)[off + 64 * g + 32 * r + lane] = (u8)(int)c;
    }
    if (lane == 0) (value ? vs : ks)[off / 64 + g] = sw;
  }
}

struct Keys8 {
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
// As in attn.cu: attn_merge must see the same parts.
DEV int split_len(int len, int kv_heads, int slots) {
  const int l = (int)(((long long)len * kv_heads + slots - 1) / slots);
  return max(64, (l + 31) & ~31);
}

// Codes of a tile of values -> BF16 rows.
template <int D, int THREADS> DEV void widen(const u8* src, u8* dst, int vp, int vb, int tid) {
#pragma unroll
  for (int i = 0; i < TK * D / 16 / THREADS; i++) {
    const int e = tid + i * THREADS, r = e / (D / 16), u = e % (D / 16);
    const uint4 w = *(const uint4*)(src + r * vp + u * 16);
    u32 o[8];
    bytes_bf(w.x, o), bytes_bf(w.y, o + 2), bytes_bf(w.z, o + 4), bytes_bf(w.w, o + 6);
    *(uint4*)(dst + r * vb + u * 32) = make_uint4(o[0], o[1], o[2], o[3]);
    *(uint4*)(dst + r * vb + u * 32 + 16) = make_uint4(o[4], o[5], o[6], o[7]);
  }
}

// A step of two query rows, by loads that stay where they are: hoisted, their words would spill.
DEV void query_frag(const u16* p0, const u16* p1, u32 (&r)[8]) {
  asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[2]), "=r"(r[4]), "=r"(r[6]) : "l"(p0));
  asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(r[1]), "=r"(r[3]), "=r"(r[5]), "=r"(r[7]) : "l"(p1));
}

template <int D> struct L8 {
  static constexpr int KP = D + 32, VP = D, VB = D * 2 + 16, SG = D / 64;
  // Two buffers of key codes, value codes and both scales; values as BF16; then what a kernel adds.
  static constexpr int K = 0, V = 2 * TK * KP, S = V + 2 * TK * VP, B = S + 2 * 2 * TK * SG * 2, END = B + TK * VB;
};

// One tile of keys: codes and scales into buffer `buf`. THREADS / TK threads a key.
template <int D, int THREADS>
DEV void load8(u32 s0, int buf, int key, int part, i64 off, const u8* kb, const u8* vb, const u16* ksb, const u16* vsb) {
  using L = L8<D>;
  constexpr int PER = THREADS / TK;
  const bool ok = off >= 0;
  const size_t o = ok ? (size_t)off : 0;
  const u32 n = ok ? 16 : 0, dk = s0 + L::K + (buf * TK + key) * L::KP, dv = s0 + L::V + (buf * TK + key) * L::VP;
#pragma unroll
  for (int j = 0; j < D / 16 / PER; j++) {
    const int e = (part + PER * j) * 16;
    cp_async16z(dk + e, kb + o + e, n);
    cp_async16z(dv + e, vb + o + e, n);
  }
  if (part < 2) {
    const u32 d = s0 + L::S + ((buf * 2 + part) * TK + key) * L::SG * 2;
    const u16* src = (part ? vsb : ksb) + o / 64;
    if (D == 256) cp_async8z(d, src, ok ? 8 : 0);
    else cp_async4z(d, src, ok ? 4 : 0);
  }
  cp_commit();
}

// As attn_body of attn.cu. q: rotated, [rows][heads][2][D].
template <int D>
DEV void decode8(const u16* __restrict__ q, const u8* __restrict__ kc, const u8* __restrict__ vc, const u16* __restrict__ ksc, const u16* __restrict__ vsc,
                 const int* __restrict__ tables, const int* __restrict__ row_lane, const int* __restrict__ row_pos, const int* __restrict__ sel,
                 const int* __restrict__ sel_count, float* __restrict__ part, float* __restrict__ ml, int group, int table_pitch, int page_log,
                 int page_stride, int token_stride, int head_stride, int sel_pitch, int ratio, int max_splits, int slots, float scale_log2) {
  using L = L8<D>;
  constexpr int STEPS = D / 32, DW = D / 4, NT = DW / 8, SG = L::SG, PP = TK + 4;
  extern __shared__ __align__(128) u8 smem[];
  const u32 s0 = smem_u32(smem);
  float* P = (float*)(smem + L::END);     // [16][PP]
  float* mx = P + 16 * PP;                // [4][16]
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, c = lane & 3;
  const int split = blockIdx.x, kvh = blockIdx.y, row = blockIdx.z;
  pdl_launch();
  pdl_wait();
  const int pos = row_pos[row];
  Keys8 keys;
  keys.table = tables + (size_t)row_lane[row] * table_pitch;
  keys.nsel = sel ? sel_count[row] : 0;
  keys.sel = sel && keys.nsel >= 0 ? sel + (size_t)row * sel_pitch : nullptr;
  keys.ratio = ratio, keys.tail = (pos + 1) / max(ratio, 1) * ratio, keys.page_log = page_log;
  keys.page_stride = page_stride, keys.token_stride = token_stride;
  const int len = keys.sel ? keys.nsel * ratio + (pos + 1) - keys.tail : pos + 1;
  const int LN = split_len(len, gridDim.y, slots), k0 = split * LN, k1 = min(len, k0 + LN);
  if (k0 >= len) return;
  const size_t ho = (size_t)kvh * head_stride;
  const u8 *kb = kc + ho, *vb = vc + ho;
  const u16 *ksb = ksc + ho / 64, *vsb = vsc + ho / 64;

  u32 qf[2][STEPS][8];
#pragma unroll
  for (int p = 0; p < 2; p++)
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
      uint4 a = make_uint4(0, 0, 0, 0), b = a;
      const u16* qr = q + ((size_t)row * gridDim.y + kvh) * group * 2 * D + p * D + s * 32 + c * 8;
      if (g < group) a = *(const uint4*)(qr + (size_t)g * 2 * D);
      if (g + 8 < group) b = *(const uint4*)(qr + (size_t)(g + 8) * 2 * D);
      qf[p][s][0] = a.x, qf[p][s][1] = b.x, qf[p][s][2] = a.y, qf[p][s][3] = b.y;
      qf[p][s][4] = a.z, qf[p][s][5] = b.z, qf[p][s][6] = a.w, qf[p][s][7] = b.w;
    }
  float acc[NT][4];
#pragma unroll
  for (int n = 0; n < NT; n++) acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0;
  float m0 = -INFINITY, m1 = -INFINITY, l0 = 0, l1 = 0;

  const int tiles = (k1 - k0 + TK - 1) / TK;
  auto where = [&](int t) {
    const int i = k0 + t * TK + (tid >> 2);
    return i < k1 ? (i64)keys.offset(i) : (i64)-1;
  };
  i64 next = where(0);
  load8<D, 128>(s0, 0, tid >> 2, tid & 3, next, kb, vb, ksb, vsb);
  next = where(1);
  for (int t = 0; t < tiles; t++) {
    cp_wait<0>();
    __syncthreads();
    const int buf = t & 1;
    if (t + 1 < tiles) load8<D, 128>(s0, buf ^ 1, tid >> 2, tid & 3, next, kb, vb, ksb, vsb);
    next = where(t + 2);
    widen<D, 128>(smem + L::V + buf * TK * L::VP, smem + L::B, L::VP, L::VB, tid);
    float s[4] = {0, 0, 0, 0};
    const u32 kr = s0 + L::K + (buf * TK + warp * 8 + g) * L::KP + c * 8;
    const u16* sk = (const u16*)(smem + L::S) + (buf * 2 * TK + warp * 8 + c * 2) * SG;
    const u16* sv = (const u16*)(smem + L::S) + (buf * 2 + 1) * TK * SG;
#pragma unroll
    for (int G = 0; G < SG; G++) {
      float a[4] = {0, 0, 0, 0};
#pragma unroll
      for (int st = 2 * G; st < 2 * G + 2; st++) {
        const uint2 w = lds64(kr + st * 32);
        u32 b[4];
        bytes_bf(w.x, b), bytes_bf(w.y, b + 2);
#pragma unroll
        for (int p = 1; p >= 0; p--) {
          mma16816(a, qf[p][st][0], qf[p][st][1], qf[p][st][2], qf[p][st][3], b[0], b[1]);
          mma16816(a, qf[p][st][4], qf[p][st][5], qf[p][st][6], qf[p][st][7], b[2], b[3]);
        }
      }
      const float f0 = h2f(sk[G]), f1 = h2f(sk[SG + G]);
      s[0] = fmaf(f0, a[0], s[0]), s[1] = fmaf(f1, a[1], s[1]);
      s[2] = fmaf(f0, a[2], s[2]), s[3] = fmaf(f1, a[3], s[3]);
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
    *(float2*)(P + g * PP + warp * 8 + c * 2) = make_float2(p0, p1);
    *(float2*)(P + (g + 8) * PP + warp * 8 + c * 2) = make_float2(p2, p3);
#pragma unroll
    for (int n = 0; n < NT; n++) acc[n][0] *= f0, acc[n][1] *= f0, acc[n][2] *= f1, acc[n][3] *= f1;
    __syncthreads();
    const int G = warp * DW / 64;  // the group of this warp's dims
#pragma unroll
    for (int kk = 0; kk < TK / 16; kk++) {
      u32 ph[4], pl[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int kx = kk * 16 + (i >> 1) * 8 + c * 2;
        const float2 p = *(const float2*)(P + (g + (i & 1) * 8) * PP + kx);
        const float x = p.x * h2f(sv[kx * SG + G]), y = p.y * h2f(sv[(kx + 1) * SG + G]);
        ph[i] = pack_bf(x, y), pl[i] = pack_bf(x - bf_lo(ph[i]), y - bf_hi(ph[i]));
      }
      const u32 vr = s0 + L::B + (kk * 16 + (lane & 15)) * L::VB + (warp * DW + (lane >> 4) * 8) * 2;
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

// As prefill_body of attn_prefill.cu. q: rotated, [rows][heads][2][D].
template <int D>
DEV void prefill8(const u16* __restrict__ q, const u8* __restrict__ kc, const u8* __restrict__ vc, const u16* __restrict__ ksc, const u16* __restrict__ vsc,
                  const int* __restrict__ table, const u16* __restrict__ gate, u16* __restrict__ out, int rows, int pos0, int group, int page_log,
                  int page_stride, int token_stride, int head_stride, int out_pitch, int gate_pitch, int gate_head, float scale_log2) {
  using L = L8<D>;
  constexpr int STEPS = D / 32, NT = D / 8, SG = L::SG, TM = 128;
  extern __shared__ __align__(128) u8 smem[];
  const u32 s0 = smem_u32(smem);
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, c = lane & 3;
  const int tile = gridDim.x - 1 - blockIdx.x, kvh = blockIdx.y, heads = gridDim.y * group;
  const int total = rows * group, m0 = tile * TM + warp * 16 + g, m1 = m0 + 8;
  pdl_launch();
  pdl_wait();
  const size_t ho = (size_t)kvh * head_stride;
  const u8 *kb = kc + ho, *vb = vc + ho;
  const u16 *ksb = ksc + ho / 64, *vsb = vsc + ho / 64;
  const int t0 = min(m0, total - 1) / group, t1 = min(m1, total - 1) / group;
  const int h0 = kvh * group + min(m0, total - 1) % group, h1 = kvh * group + min(m1, total - 1) % group;
  const int last0 = pos0 + t0, last1 = pos0 + t1;
  const u16 *qh0 = q + ((size_t)t0 * heads + h0) * 2 * D + c * 8, *qh1 = q + ((size_t)t1 * heads + h1) * 2 * D + c * 8;
  constexpr int HELD = STEPS / 2;
  u32 qf[HELD][8];
#pragma unroll
  for (int s = 0; s < HELD; s++) query_frag(qh0 + s * 32, qh1 + s * 32, qf[s]);
  float acc[NT][4];
#pragma unroll
  for (int n = 0; n < NT; n++) acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0;
  float mx0 = -INFINITY, mx1 = -INFINITY, l0 = 0, l1 = 0;
  const int keys = pos0 + min(tile * TM + TM - 1, total - 1) / group + 1;
  const int tiles = (keys + TK - 1) / TK;
  auto load = [&](int t) {
    const int i = t * TK + (tid >> 3);
    const i64 off = i < keys ? (i64)((size_t)table[i >> page_log] * page_stride + (size_t)(i & ((1 << page_log) - 1)) * token_stride) : -1;
    load8<D, 256>(s0, t & 1, tid >> 3, tid & 7, off, kb, vb, ksb, vsb);
  };
  load(0);
#pragma unroll 1
  for (int t = 0; t < tiles; t++) {
    cp_wait<0>();
    __syncthreads();
    const int buf = t & 1;
    if (t + 1 < tiles) load(t + 1);
    widen<D, 256>(smem + L::V + buf * TK * L::VP, smem + L::B, L::VP, L::VB, tid);
    const u16* sk = (const u16*)(smem + L::S) + buf * 2 * TK * SG;
    const u16* sv = sk + TK * SG;
    float s[4][4] = {};
#pragma unroll
    for (int G = 0; G < SG; G++) {
      float a[4][4] = {};
#pragma unroll
      for (int st = 2 * G; st < 2 * G + 2; st++) {
        // Half of the first parts and all of the second do not fit registers: they come from L1.
        u32 qh[8];
        if (st < HELD) {
#pragma unroll
          for (int i = 0; i < 8; i++) qh[i] = qf[st % HELD][i];
        } else {
          query_frag(qh0 + st * 32, qh1 + st * 32, qh);
        }
        u32 ql[8];
        query_frag(qh0 + D + st * 32, qh1 + D + st * 32, ql);
#pragma unroll
        for (int n = 0; n < 4; n++) {
          const uint2 w = lds64(s0 + L::K + (buf * TK + n * 8 + g) * L::KP + c * 8 + st * 32);
          u32 b[4];
          bytes_bf(w.x, b), bytes_bf(w.y, b + 2);
          mma16816(a[n], ql[0], ql[1], ql[2], ql[3], b[0], b[1]);
          mma16816(a[n], ql[4], ql[5], ql[6], ql[7], b[2], b[3]);
          mma16816(a[n], qh[0], qh[1], qh[2], qh[3], b[0], b[1]);
          mma16816(a[n], qh[4], qh[5], qh[6], qh[7], b[2], b[3]);
        }
      }
#pragma unroll
      for (int n = 0; n < 4; n++) {
        const u16* f = sk + (n * 8 + c * 2) * SG + G;
        const float f0 = h2f(f[0]), f1 = h2f(f[SG]);
        s[n][0] = fmaf(f0, a[n][0], s[n][0]), s[n][1] = fmaf(f1, a[n][1], s[n][1]);
        s[n][2] = fmaf(f0, a[n][2], s[n][2]), s[n][3] = fmaf(f1, a[n][3], s[n][3]);
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
    const float n0 = fmaxf(mx0, a), n1 = fmaxf(mx1, b);
    const float f0 = exp2f(mx0 - n0), f1 = exp2f(mx1 - n1);
    mx0 = n0, mx1 = n1;
    l0 *= f0, l1 *= f1;
    if (__any_sync(~0u, f0 != 1.0f || f1 != 1.0f)) {
#pragma unroll
      for (int n = 0; n < NT; n++) acc[n][0] *= f0, acc[n][1] *= f0, acc[n][2] *= f1, acc[n][3] *= f1;
    }
#pragma unroll
    for (int n = 0; n < 4; n++) {
      s[n][0] = exp2f(s[n][0] - mx0), s[n][1] = exp2f(s[n][1] - mx0), s[n][2] = exp2f(s[n][2] - mx1), s[n][3] = exp2f(s[n][3] - mx1);
      l0 += s[n][0] + s[n][1], l1 += s[n][2] + s[n][3];
    }
    __syncthreads();  // values are widened
#pragma unroll
    for (int kk = 0; kk < 2; kk++)
#pragma unroll
      for (int G = 0; G < SG; G++) {
        u32 ph[4], pl[4];
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const int n = kk * 2 + e, k = n * 8 + c * 2;
          const float v0 = h2f(sv[k * SG + G]), v1 = h2f(sv[(k + 1) * SG + G]);
          const float p0 = s[n][0] * v0, p1 = s[n][1] * v1, p2 = s[n][2] * v0, p3 = s[n][3] * v1;
          ph[e * 2] = pack_bf(p0, p1), ph[e * 2 + 1] = pack_bf(p2, p3);
          pl[e * 2] = pack_bf(p0 - bf_lo(ph[e * 2]), p1 - bf_hi(ph[e * 2]));
          pl[e * 2 + 1] = pack_bf(p2 - bf_lo(ph[e * 2 + 1]), p3 - bf_hi(ph[e * 2 + 1]));
        }
        const u32 vr = s0 + L::B + (kk * 16 + (lane & 15)) * L::VB + G * 128 + (lane >> 4) * 16;
#pragma unroll
        for (int n = 0; n < 8; n += 2) {
          u32 r0, r1, r2, r3;
          asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                       : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3) : "r"(vr + n * 16));
          mma16816(acc[G * 8 + n], ph[0], ph[1], ph[2], ph[3], r0, r1);
          mma16816(acc[G * 8 + n], pl[0], pl[1], pl[2], pl[3], r0, r1);
          mma16816(acc[G * 8 + n + 1], ph[0], ph[1], ph[2], ph[3], r2, r3);
          mma16816(acc[G * 8 + n + 1], pl[0], pl[1], pl[2], pl[3], r2, r3);
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

#define ENTRY(D)                                                                                                              \
  extern "C" __global__ void __launch_bounds__(32) rotate_queries_##D(const u16* q, u16* out, int q_pitch, int q_head) {      \
    rotate_queries<D>(q, out, q_pitch, q_head);                                                                               \
  }                                                                                                                           \
  extern "C" __global__ void __launch_bounds__(64) kv8_append_##D(                                                            \
      const u16* k, const u16* v, u8* kc, u8* vc, u16* ks, u16* vs, const int* tables, const int* row_lane,                   \
      const int* row_pos, int k_pitch, int v_pitch, int table_pitch, int page_log, int page_stride, int token_stride,         \
      int head_stride) {                                                                                                      \
    append_body<D>(k, v, kc, vc, ks, vs, tables, row_lane, row_pos, k_pitch, v_pitch, table_pitch, page_log, page_stride,     \
                   token_stride, head_stride);                                                                                \
  }                                                                                                                           \
  extern "C" __global__ void __launch_bounds__(128) attn8_decode_##D(                                                         \
      const u16* q, const u8* kc, const u8* vc, const u16* ks, const u16* vs, const int* tables, const int* row_lane,         \
      const int* row_pos, const int* sel, const int* sel_count, float* part, float* ml, int group, int table_pitch,           \
      int page_log, int page_stride, int token_stride, int head_stride, int sel_pitch, int ratio, int max_splits, int slots,  \
      float scale_log2) {                                                                                                     \
    decode8<D>(q, kc, vc, ks, vs, tables, row_lane, row_pos, sel, sel_count, part, ml, group, table_pitch, page_log,          \
               page_stride, token_stride, head_stride, sel_pitch, ratio, max_splits, slots, scale_log2);                      \
  }                                                                                                                           \
  extern "C" __global__ void __launch_bounds__(256, 1) attn8_prefill_##D(                                                     \
      const u16* q, const u8* kc, const u8* vc, const u16* ks, const u16* vs, const int* table, const u16* gate, u16* out,    \
      int rows, int pos0, int group, int page_log, int page_stride, int token_stride, int head_stride, int out_pitch,         \
      int gate_pitch, int gate_head, float scale_log2) {                                                                      \
    prefill8<D>(q, kc, vc, ks, vs, table, gate, out, rows, pos0, group, page_log, page_stride, token_stride, head_stride,     \
                out_pitch, gate_pitch, gate_head, scale_log2);                                                                \
  }
ENTRY(256)
ENTRY(128)
