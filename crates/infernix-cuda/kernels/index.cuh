// Index keys of sparse attention: raw keys are averaged over blocks of `ratio` tokens, normed, rotated and kept as pooled keys
// in the pages of the sequence. Where a block began before the call, its first raw keys come from a ring of the slot, by
// sequence index modulo RING: a rejected draft is simply written over.
#pragma once
#include "common.cuh"

#define RING 128
#define TAIL 64  // rows of a call that the ring keeps: more than a block, and all of a decode call

// raw [rows][128] BF16. ring [slot][RING][128] BF16 and ring_pos [slot][RING][3] I32, slot = slots[lane] / 2. pos3 [rows][3].
// pooled: pages of 1 << page_log blocks of 128 values.
struct IndexArgs {
  const u16* raw;
  u16* ring_all;
  int* ring_pos_all;
  u64 ring_stride, ring_pos_stride;
  const u16* w;
  const double* freq;
  const u8* axis;
  const int *row_lane, *row_pos, *pos3, *first, *slots, *tables;
  u16* pooled;
  float scale, eps;
  int half, table_pitch, page_log, page_stride, ratio, raw_pitch;
};

// Appends row r of a call, by 128 threads.
DEV void index_row(const IndexArgs& a, int r) {
  __shared__ float buf[128], part[4];
  const int t = threadIdx.x, lane = a.row_lane[r], f = a.first[lane], n = a.first[lane + 1] - f, start = a.row_pos[f];
  u16* ring = a.ring_all + (a.slots[lane] >> 1) * a.ring_stride;
  int* ring_pos = a.ring_pos_all + (a.slots[lane] >> 1) * a.ring_pos_stride;
  // Pools the block whose last token has sequence index `last`.
  auto pool = [&](int last) {
    const int begin = last - a.ratio + 1;
    float s = 0;
    for (int i = begin; i <= last; i++) s += bf2f(i >= start ? a.raw[(size_t)(f + i - start) * a.raw_pitch + t] : ring[(i & (RING - 1)) * 128 + t]);
    s /= (float)a.ratio;
    const float q = warp_sum(s * s);
    if ((t & 31) == 0) part[t >> 5] = q;
    __syncthreads();
    const float rs = 1.0f / sqrtf((part[0] + part[1] + part[2] + part[3]) / 128.0f + a.eps);
    float v = s * rs * (1.0f + bf2f(a.w[t]));
    buf[t] = v;
    __syncthreads();
    if (t < 2 * a.half) {
      const int p = t < a.half ? t : t - a.half, ax = a.axis[p];
      const int at = begin >= start ? a.pos3[(f + begin - start) * 3 + ax] : ring_pos[(begin & (RING - 1)) * 3 + ax];
      double sn, cs;
      sincos((double)at * a.freq[p], &sn, &cs);
      const float c = (float)(cs * (double)a.scale), d = (float)(sn * (double)a.scale);
      v = t < a.half ? v * c - buf[t + a.half] * d : v * c + buf[p] * d;
    }
    const int b = last / a.ratio;
    a.pooled[(size_t)a.tables[(size_t)lane * a.table_pitch + (b >> a.page_log)] * a.page_stride + (size_t)(b & ((1 << a.page_log) - 1)) * 128 + t] = f2bf(v);
    __syncthreads();
  };
  const int pos = a.row_pos[r];
  if ((pos + 1) % a.ratio == 0 && pos - a.ratio + 1 >= start) pool(pos);
  if (r != f) return;
  // The lane's a.first row also pools the block that began before the call, then moves the ring: nothing else reads it.
  const int last = start / a.ratio * a.ratio + a.ratio - 1;
  if (start % a.ratio != 0 && last < start + n) pool(last);
  __syncthreads();
  for (int i = max(0, n - TAIL); i < n; i++) {
    const int at = (start + i) & (RING - 1);
    ring[at * 128 + t] = a.raw[(size_t)(f + i) * a.raw_pitch + t];
    if (t < 3) ring_pos[at * 3 + t] = a.pos3[(f + i) * 3 + t];
  }
}
