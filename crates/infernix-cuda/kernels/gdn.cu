// Gated delta rule, recurrent form, for decode and verify calls of 1-64 columns of one lane each.
//
// Block (value head, 32 value columns) keeps its part of S in registers: thread (v, kk) holds 16 of the 128 k of column v.
// Convolution + silu of the channels it needs, the gates and the l2 norms are recomputed by each block: 288 channels of
// four taps cost less than a kernel in between. S is rounded to FP32 after every token (it is FP32), o reads it.
#include "common.cuh"

#define DK 128
#define DV 128
#define VB 32   // value columns a block
#define KG 8    // threads that share a column
#define KPT 16  // k of one thread

// y [cols][y_pitch]: pre-convolution q | k | v (BF16). conv_state [lane][3][C]. a, b [cols][ab_pitch] BF16.
// S [slot][nv][DK][DV] FP32, slots `state_stride` values apart, columns before the next one `conv_stride` apart. lane l has
// columns first[l] .. first[l+1) and starts from slot slots[l]. write_after[l]: S is stored after that many of its columns
// (0: never) in slot out_slots[l] (null: where it came from; then the convolution's columns stay). o [cols][nv*DV] BF16
// (may be null: fold only). rec: slots come in pairs, and pair p keeps the inputs of a lane with several columns at
// rec + p * rec_stride: rows of C + 2 nv values y | a | b. grid (nv, DV/VB, lanes).
extern "C" __global__ void __launch_bounds__(256) gdn_step(const u16* __restrict__ y, u16* __restrict__ conv_state, const u16* __restrict__ conv_w,
                                                           const u16* __restrict__ a, const u16* __restrict__ b, const float* __restrict__ a_log,
                                                           const float* __restrict__ dt_bias, float* __restrict__ S_all, const int* __restrict__ first,
                                                           const int* __restrict__ write_after, const int* __restrict__ slots, u16* __restrict__ o,
                                                           int nk, int nv, int y_pitch, int ab_pitch, u64 state_stride, u64 conv_stride,
                                                           const int* __restrict__ out_slots, u16* __restrict__ rec_all, u64 rec_stride) {
  __shared__ float qs[DK], ks[DK], vs[VB], redu[KG][VB], redn[2][4];
  const int tid = threadIdx.x, head = blockIdx.x, v0 = blockIdx.y * VB, lane_id = blockIdx.z;
  const int vi = tid & 31, kk = tid >> 5;
  const int kh = head / (nv / nk), C = 2 * nk * DK + nv * DV;
  // The channel this thread convolves: q 0-127, k 128-255; the first 32 threads also v.
  const int ch = tid < 128 ? kh * DK + tid : nk * DK + kh * DK + (tid - 128);
  const int chv = 2 * nk * DK + head * DV + v0 + vi;
  u32 w0 = 0, w1 = 0, wv0 = 0, wv1 = 0;
  {
    const u32* p = (const u32*)(conv_w + (size_t)ch * 4);
    w0 = p[0], w1 = p[1];
    if (tid < 32) p = (const u32*)(conv_w + (size_t)chv * 4), wv0 = p[0], wv1 = p[1];
  }
  const float decay = -expf(a_log[head]), dt = dt_bias[head];
  // State, slots and counts are older than the round: only the projections come from the kernels before.
  pdl_launch();
  const int slot = slots ? slots[lane_id] : lane_id;
  const size_t in_head = (size_t)head * DK * DV + v0 + vi;
  const float* S = S_all + slot * state_stride + in_head;
  const u16* cs = conv_state + slot * conv_stride;
  const int c0 = first[lane_id], c1 = first[lane_id + 1], wa = write_after[lane_id];
  const int out = out_slots ? out_slots[lane_id] : slot;
  u16* rec = rec_all && c1 - c0 > 1 ? rec_all + (slot >> 1) * rec_stride : nullptr;
  // q and k channels are shared by the value heads of a key head and by the blocks of a head: one of them stores.
  const bool keeps = head % (nv / nk) == 0 && blockIdx.y == 0;
  float s[KPT];
#pragma unroll
  for (int i = 0; i < KPT; i++) s[i] = S[(size_t)(kk * KPT + i) * DV];
  float h0 = bf2f(cs[ch]), h1 = bf2f(cs[C + ch]), h2 = bf2f(cs[2 * C + ch]);
  float g0 = 0, g1 = 0, g2 = 0;
  if (tid < 32) g0 = bf2f(cs[chv]), g1 = bf2f(cs[C + chv]), g2 = bf2f(cs[2 * C + chv]);
  pdl_wait();
  for (int c = c0; c < c1; c++) {
    // All that the column needs is asked for at once.
    const float cur = bf2f(y[(size_t)c * y_pitch + ch]);
    const float x = bf2f(a[(size_t)c * ab_pitch + head]) + dt, b_in = bf2f(b[(size_t)c * ab_pitch + head]);
    const float cv = tid < 32 ? bf2f(y[(size_t)c * y_pitch + chv]) : 0.0f;
    if (rec) {
      u16* r = rec + (size_t)(c - c0) * (C + 2 * nv);
      if (keeps) r[ch] = f2bf(cur);
      if (tid < 32) r[chv] = y[(size_t)c * y_pitch + chv];
      if (blockIdx.y == 0 && tid == 0) r[C + head] = a[(size_t)c * ab_pitch + head], r[C + nv + head] = b[(size_t)c * ab_pitch + head];
    }
    float u = bf_lo(w0) * h0;
    u = fmaf(bf_hi(w0), h1, u), u = fmaf(bf_lo(w1), h2, u), u = fmaf(bf_hi(w1), cur, u);
    h0 = h1, h1 = h2, h2 = cur;
    u = rbf(siluf(u));
    const float sq = warp_sum(u * u);
    if ((tid & 31) == 0) redn[tid >> 7][(tid >> 5) & 3] = sq;
    if (tid < 32) {
      float t = bf_lo(wv0) * g0;
      t = fmaf(bf_hi(wv0), g1, t), t = fmaf(bf_lo(wv1), g2, t), t = fmaf(bf_hi(wv1), cv, t);
      g0 = g1, g1 = g2, g2 = cv;
      vs[vi] = rbf(siluf(t));
    }
    const float sp = x > 20.0f ? x + log1pf(expf(-x)) : log1pf(expf(x));
    const float alpha = expf(decay * sp), beta = sigmoidf(b_in);
    __syncthreads();
    const float* rn = redn[tid >> 7];
    const float nrm = 1.0f / sqrtf(rn[0] + rn[1] + rn[2] + rn[3] + 1e-6f);
    if (tid < 128) qs[tid] = u * nrm * 0.08838834764831845f;
    else ks[tid - 128] = u * nrm;
    __syncthreads();
    float p = 0;
#pragma unroll
    for (int i = 0; i < KPT; i++) s[i] *= alpha, p = fmaf(s[i], ks[kk * KPT + i], p);
    redu[kk][vi] = p;
    __syncthreads();
    p = 0;
#pragma unroll
    for (int i = 0; i < KG; i++) p += redu[i][vi];
    const float delta = beta * (vs[vi] - p);
    float r = 0;
#pragma unroll
    for (int i = 0; i < KPT; i++) s[i] = fmaf(ks[kk * KPT + i], delta, s[i]), r = fmaf(s[i], qs[kk * KPT + i], r);
    __syncthreads();
    redu[kk][vi] = r;
    __syncthreads();
    if (kk == 0 && o) {
      r = 0;
#pragma unroll
      for (int i = 0; i < KG; i++) r += redu[i][vi];
      o[(size_t)c * nv * DV + head * DV + v0 + vi] = f2bf(r);
    }
    if (c - c0 + 1 == wa) {
      float* to = S_all + out * state_stride + in_head;
#pragma unroll
      for (int i = 0; i < KPT; i++) to[(size_t)(kk * KPT + i) * DV] = s[i];
      if (out_slots) {
        u16* co = conv_state + out * conv_stride;
        if (keeps) co[ch] = f2bf(h0), co[C + ch] = f2bf(h1), co[2 * C + ch] = f2bf(h2);
        if (tid < 32) co[chv] = f2bf(g0), co[C + chv] = f2bf(g1), co[2 * C + chv] = f2bf(g2);
      }
    }
  }
}
