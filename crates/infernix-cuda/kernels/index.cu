// Index keys of sparse attention: raw keys are averaged over blocks of `ratio` tokens, normed, rotated and kept as pooled keys
// in the pages of the sequence. Where a block began before the call, its first raw keys come from a ring of the slot, by
// sequence index modulo RING: a rejected draft is simply written over.
#include "common.cuh"

#define RING 128
#define TAIL 64  // rows of a call that the ring keeps: more than a block, and all of a decode call

// raw [rows][128] BF16. ring [slot][RING][128] BF16 and ring_pos [slot][RING][3] I32, slot = slots[lane] / 2. pos3 [rows][3].
// pooled: pages of 1 << page_log blocks of 128 values. grid (rows), 128 threads.
extern "C" __global__ void __launch_bounds__(128) index_append(const u16* __restrict__ raw, u16* __restrict__ ring_all, int* __restrict__ ring_pos_all,
                                                               u64 ring_stride, u64 ring_pos_stride, const u16* __restrict__ w,
                                                               const double* __restrict__ freq, const u8* __restrict__ axis, float scale, int half,
                                                               float eps, const int* __restrict__ row_lane, const int* __restrict__ row_pos,
                                                               const int* __restrict__ pos3, const int* __restrict__ first, const int* __restrict__ slots,
                                                               const int* __restrict__ tables, u16* __restrict__ pooled, int table_pitch, int page_log,
                                                               int page_stride, int ratio) {
  __shared__ float buf[128], part[4];
  pdl_launch();
  pdl_wait();
  const int r = blockIdx.x, t = threadIdx.x, lane = row_lane[r], f = first[lane], n = first[lane + 1] - f, start = row_pos[f];
  u16* ring = ring_all + (slots[lane] >> 1) * ring_stride;
  int* ring_pos = ring_pos_all + (slots[lane] >> 1) * ring_pos_stride;
  // Pools the block whose last token has sequence index `last`.
  auto pool = [&](int last) {
    const int begin = last - ratio + 1;
    float s = 0;
    for (int i = begin; i <= last; i++) s += bf2f(i >= start ? raw[(size_t)(f + i - start) * 128 + t] : ring[(i & (RING - 1)) * 128 + t]);
    s /= (float)ratio;
    const float q = warp_sum(s * s);
    if ((t & 31) == 0) part[t >> 5] = q;
    __syncthreads();
    const float rs = 1.0f / sqrtf((part[0] + part[1] + part[2] + part[3]) / 128.0f + eps);
    float v = s * rs * (1.0f + bf2f(w[t]));
    buf[t] = v;
    __syncthreads();
    if (t < 2 * half) {
      const int p = t < half ? t : t - half, a = axis[p];
      const int at = begin >= start ? pos3[(f + begin - start) * 3 + a] : ring_pos[(begin & (RING - 1)) * 3 + a];
      double sn, cs;
      sincos((double)at * freq[p], &sn, &cs);
      const float c = (float)(cs * (double)scale), d = (float)(sn * (double)scale);
      v = t < half ? v * c - buf[t + half] * d : v * c + buf[p] * d;
    }
    const int b = last / ratio;
    pooled[(size_t)tables[(size_t)lane * table_pitch + (b >> page_log)] * page_stride + (size_t)(b & ((1 << page_log) - 1)) * 128 + t] = f2bf(v);
    __syncthreads();
  };
  const int pos = row_pos[r];
  if ((pos + 1) % ratio == 0 && pos - ratio + 1 >= start) pool(pos);
  if (r != f) return;
  // The lane's first row also pools the block that began before the call, then moves the ring: nothing else reads it.
  const int last = start / ratio * ratio + ratio - 1;
  if (start % ratio != 0 && last < start + n) pool(last);
  __syncthreads();
  for (int i = max(0, n - TAIL); i < n; i++) {
    const int at = (start + i) & (RING - 1);
    ring[at * 128 + t] = raw[(size_t)(f + i) * 128 + t];
    if (t < 3) ring_pos[at * 3 + t] = pos3[(f + i) * 3 + t];
  }
}
