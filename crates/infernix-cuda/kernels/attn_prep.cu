// What a decode round does between the projections of an attention layer and its scores, in one launch: norm and rotation of queries,
// keys and index queries, keys and values into their pages, raw index keys into ring and pooled keys. A warp a head and row.
#include "index.cuh"
#include "row_ops.cuh"

struct PrepArgs {
  const u16 *q, *k, *v, *iq;
  const u16 *qw, *kw, *iw;
  const float* angles;  // [rows][2][half]
  u16 *q_out, *iq_out, *kc, *vc;
  const int *tables, *row_lane, *row_pos;
  int q_pitch, k_pitch, v_pitch, iq_pitch;
  int heads, kv_heads, index_heads, d, half, rows;
  int table_pitch, page_log, page_stride, token_stride, head_stride, index_rows;
  float eps;
  int pad;
  IndexArgs index;
};

// grid (rows with an index key + warps / 4), 128 threads.
extern "C" __global__ void __launch_bounds__(128) attn_prep(const __grid_constant__ PrepArgs a) {
  __shared__ float buf[4][256];
  pdl_launch();
  if ((int)blockIdx.x < a.index_rows) {
    pdl_wait();
    return index_row(a.index, blockIdx.x);
  }
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, jobs = a.heads + 2 * a.kv_heads + a.index_heads;
  const int job = (blockIdx.x - a.index_rows) * 4 + warp;
  if (job >= jobs * a.rows) return pdl_wait();
  const int r = job / jobs;
  int h = job - r * jobs;
  const float* cs = a.angles + (size_t)r * 2 * a.half;
  // Weights and places of rows and pages are older than the launches before.
  const bool paged = h >= a.heads && h < a.heads + 2 * a.kv_heads, values = paged && h >= a.heads + a.kv_heads;
  const u16* norm = h < a.heads ? a.qw : paged ? a.kw : a.iw;
  if (!values && lane * 64 < a.d) asm volatile("prefetch.global.L2 [%0];" ::"l"(norm + lane * 64));
  size_t off = 0;
  if (paged) {
    const int pos = a.row_pos[r];
    off = (size_t)a.tables[(size_t)a.row_lane[r] * a.table_pitch + (pos >> a.page_log)] * a.page_stride +
          (size_t)(pos & ((1 << a.page_log) - 1)) * a.token_stride + (size_t)(h - a.heads - (values ? a.kv_heads : 0)) * a.head_stride;
  }
  pdl_wait();
  if (h < a.heads) {
    u16* to = a.q_out + ((size_t)r * a.heads + h) * a.d;
    rotated_head(a.q + (size_t)r * a.q_pitch + h * a.d, a.qw, cs, buf[warp], a.d, a.half, lane, a.eps, [&](int i, u16 v, u16 u) { *(u32*)(to + i) = v | (u32)u << 16; });
    return;
  }
  h -= a.heads;
  if (h >= 2 * a.kv_heads) {
    h -= 2 * a.kv_heads;
    u16* to = a.iq_out + ((size_t)r * a.index_heads + h) * 128;
    rotated_head(a.iq + (size_t)r * a.iq_pitch + h * 128, a.iw, cs, buf[warp], 128, a.half, lane, a.eps, [&](int i, u16 v, u16 u) { *(u32*)(to + i) = v | (u32)u << 16; });
    return;
  }
  if (values) {
    h -= a.kv_heads;
    const u16* from = a.v + (size_t)r * a.v_pitch + h * a.d;
    for (int i = lane * 8; i < a.d; i += 256) *(uint4*)(a.vc + off + i) = *(const uint4*)(from + i);
    return;
  }
  u16* to = a.kc + off;
  rotated_head(a.k + (size_t)r * a.k_pitch + h * a.d, a.kw, cs, buf[warp], a.d, a.half, lane, a.eps, [&](int i, u16 v, u16 u) { *(u32*)(to + i) = v | (u32)u << 16; });
}
