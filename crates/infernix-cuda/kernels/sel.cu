// Exact selection: the sparse-attention index (scores, top blocks) and the head's candidates.
//
// The k-th largest key is found by a four-way search on its bits: 16 passes over keys held in registers, each one compare and
// one warp reduction; no histogram, so equal keys (relu makes exact zeros common) cost nothing. Equal keys at the cut
// are taken in ascending id.
#include "common.cuh"


// Selects the `want` largest of n keys (n > want), calling put(position, id) in ascending id. load(i): key of id i.
// A thread holds HELD keys: n <= 32 * HELD * warps. Warp w owns ids [w*seg, (w+1)*seg). `sm` holds 96 ints.
template <int HELD, typename Load, typename Put> DEV void select_top(int n, int want, Load load, Put put, int* sm) {
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, warps = blockDim.x >> 5;
  const int per = (n + warps * 32 - 1) / (warps * 32);  // keys a thread
  const int first = warp * per * 32 + lane;
  u32 held[HELD];
#pragma unroll
  for (int i = 0; i < HELD; i++) {
    const int id = first + i * 32;
    held[i] = i < per && id < n ? load(id) : 0;
  }
  // Counts of keys >= t for valid ids.
  if (tid < 9) sm[tid] = 0;
  __syncthreads();
  u32 lo = 0;  // count(>= lo) >= want always
  int pass = 0;
  for (int bit = 30; bit >= 0; bit -= 2, pass++) {
    const u32 step = 1u << bit;
    int c[3] = {0, 0, 0};
#pragma unroll
    for (int i = 0; i < HELD; i++) {
      if (i < per && first + i * 32 < n) {
        c[0] += held[i] >= lo + step, c[1] += held[i] >= lo + 2 * step, c[2] += held[i] >= lo + 3 * step;
      }
    }
    // Three rotating accumulators: one is summed, one is read by laggards, one is cleared.
    int* acc = sm + (pass % 3) * 3;
#pragma unroll
    for (int i = 0; i < 3; i++) {
      const int s = __reduce_add_sync(~0u, c[i]);
      if (lane == 0 && s) atomicAdd(&acc[i], s);
    }
    if (tid < 3) sm[((pass + 1) % 3) * 3 + tid] = 0;
    __syncthreads();
    const int a = acc[0], b = acc[1], d = acc[2];
    lo += d >= want ? 3 * step : b >= want ? 2 * step : a >= want ? step : 0;
  }
  // lo is the want-th largest key. Count larger and equal keys of each warp, then place in id order.
  int gt = 0, eq = 0;
#pragma unroll
  for (int i = 0; i < HELD; i++)
    if (i < per && first + i * 32 < n) gt += held[i] > lo, eq += held[i] == lo;
  gt = __reduce_add_sync(~0u, gt), eq = __reduce_add_sync(~0u, eq);
  __syncthreads();
  if (lane == 0) sm[16 + warp] = gt, sm[48 + warp] = eq;
  __syncthreads();
  int gt0 = 0, eq0 = 0, total = 0;
  for (int w = 0; w < warps; w++) {
    if (w < warp) gt0 += sm[16 + w], eq0 += sm[48 + w];
    total += sm[16 + w];
  }
  const int ties = want - total;
  auto emit = [&](int id, u32 k) {
    const bool ok = id < n, g = ok && k > lo, e = ok && k == lo;
    const u32 mg = __ballot_sync(~0u, g), me = __ballot_sync(~0u, e), below = (1u << lane) - 1;
    const int eb = eq0 + __popc(me & below);
    if (g || (e && eb < ties)) put(gt0 + __popc(mg & below) + min(eb, ties), id);
    gt0 += __popc(mg), eq0 += __popc(me);
  };
#pragma unroll
  for (int i = 0; i < HELD; i++)
    if (i < per) emit(first + i * 32, held[i]);
}

// score(b) = scale * sum_h relu(q_h . k_b). q [rows][heads <= 4][128] BF16 (normed, rotated), pooled keys in pages of 1 << page_log
// blocks, 128 values a block. Row r has (pos + 1) / ratio blocks. scores [rows][pitch] FP32. grid (ceil(blocks/64), rows), 256 threads.
extern "C" __global__ void __launch_bounds__(256) qsa_score(const u16* __restrict__ q, const u16* __restrict__ keys, const int* __restrict__ tables,
                                                            const int* __restrict__ row_lane, const int* __restrict__ row_pos, float* __restrict__ scores,
                                                            int q_pitch, int table_pitch, int page_log, int page_stride, int ratio, int pitch,
                                                            float scale, int heads) {
  pdl_launch();
  pdl_wait();
  const int row = blockIdx.y, lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, c = lane & 3;
  const int n = (row_pos[row] + 1) / ratio, b0 = blockIdx.x * 64 + warp * 8;
  if (b0 >= n) return;
  const int* table = tables + (size_t)row_lane[row] * table_pitch;
  const int kb = min(b0 + g, n - 1);
  const u16* kr = keys + (size_t)table[kb >> page_log] * page_stride + (size_t)(kb & ((1 << page_log) - 1)) * 128;
  float s[4] = {0, 0, 0, 0};
#pragma unroll
  for (int st = 0; st < 4; st++) {
    uint4 a = make_uint4(0, 0, 0, 0);
    if (g < heads) a = __ldg((const uint4*)(q + (size_t)row * q_pitch + g * 128 + st * 32 + c * 8));
    const uint4 b = __ldg((const uint4*)(kr + st * 32 + c * 8));
    mma16816(s, a.x, 0, a.y, 0, b.x, b.y);
    mma16816(s, a.z, 0, a.w, 0, b.z, b.w);
  }
  float x = fmaxf(s[0], 0.0f), y = fmaxf(s[1], 0.0f);
  x += __shfl_xor_sync(~0u, x, 4), y += __shfl_xor_sync(~0u, y, 4);
  x += __shfl_xor_sync(~0u, x, 8), y += __shfl_xor_sync(~0u, y, 8);
  if (g == 0) {
    float* o = scores + (size_t)row * pitch + b0 + c * 2;
    if (b0 + c * 2 < n) o[0] = x * scale;
    if (b0 + c * 2 + 1 < n) o[1] = y * scale;
  }
}

// The same for calls of many rows: the four heads of four rows are the M of one mma, so keys are read once for four rows. Equal bits.
// Rows of a lane lie together. grid (ceil(blocks/64), ceil(rows/4)).
extern "C" __global__ void __launch_bounds__(256) qsa_score4(const u16* __restrict__ q, const u16* __restrict__ keys, const int* __restrict__ tables,
                                                             const int* __restrict__ row_lane, const int* __restrict__ row_pos, float* __restrict__ scores,
                                                             int q_pitch, int table_pitch, int page_log, int page_stride, int ratio, int pitch,
                                                             float scale, int heads, int rows) {
  pdl_launch();
  pdl_wait();
  const int r0 = blockIdx.y * 4, lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, c = lane & 3;
  const int b0 = blockIdx.x * 64 + warp * 8, h = g & 3, ra = r0 + (g >> 2), rb = ra + 2;
  const int na = ra < rows ? (row_pos[ra] + 1) / ratio : 0, nb = rb < rows ? (row_pos[rb] + 1) / ratio : 0;
  const int la = ra < rows ? row_lane[ra] : -1, lb = rb < rows ? row_lane[rb] : -1;
  for (int i = 0; i < 4; i++) {
    const int l = r0 + i < rows ? row_lane[r0 + i] : -1;
    if (l < 0 || (i > 0 && l == row_lane[r0 + i - 1])) continue;
    const int most = __reduce_max_sync(~0u, max(la == l ? na : 0, lb == l ? nb : 0));
    if (b0 >= most) continue;
    const int kb = min(b0 + g, most - 1);
    const u16* kr = keys + (size_t)tables[(size_t)l * table_pitch + (kb >> page_log)] * page_stride + (size_t)(kb & ((1 << page_log) - 1)) * 128;
    float s[4] = {0, 0, 0, 0};
#pragma unroll
    for (int st = 0; st < 4; st++) {
      uint4 a = make_uint4(0, 0, 0, 0), e = a;
      if (h < heads && la == l) a = __ldg((const uint4*)(q + (size_t)ra * q_pitch + h * 128 + st * 32 + c * 8));
      if (h < heads && lb == l) e = __ldg((const uint4*)(q + (size_t)rb * q_pitch + h * 128 + st * 32 + c * 8));
      const uint4 b = __ldg((const uint4*)(kr + st * 32 + c * 8));
      mma16816(s, a.x, e.x, a.y, e.y, b.x, b.y);
      mma16816(s, a.z, e.z, a.w, e.w, b.z, b.w);
    }
#pragma unroll
    for (int k = 0; k < 4; k++) {
      float x = fmaxf(s[k], 0.0f);
      x += __shfl_xor_sync(~0u, x, 4);
      x += __shfl_xor_sync(~0u, x, 8);
      const int row = k < 2 ? ra : rb, n = k < 2 ? na : nb, b = b0 + c * 2 + (k & 1);
      if (h == 0 && (k < 2 ? la : lb) == l && b < n) scores[(size_t)row * pitch + b] = x * scale;
    }
  }
}

#define QCHUNK 4096
#define QDIRECT 32768  // up to here one block does it alone

// First stage for long rows: the best `want` of each chunk of 4096 scores. cand [rows][chunks * want] block ids, chunk c from
// c * want on. grid (chunks, rows), 1024 threads.
extern "C" __global__ void __launch_bounds__(1024) qsa_chunk(const float* __restrict__ scores, const int* __restrict__ row_pos, int* __restrict__ cand, int ratio,
                                                             int want, int pitch) {
  __shared__ int sm[96];
  pdl_launch();
  pdl_wait();
  const int row = blockIdx.y, n = (row_pos[row] + 1) / ratio, c0 = blockIdx.x * QCHUNK, m = min(QCHUNK, n - c0);
  if (n <= QDIRECT || m <= 0) return;
  int* out = cand + ((size_t)row * gridDim.x + blockIdx.x) * want;
  if (m <= want) {
    for (int i = threadIdx.x; i < m; i += 1024) out[i] = c0 + i;
    return;
  }
  const float* s = scores + (size_t)row * pitch + c0;
  // Scores are never negative: their bits order them.
  select_top<4>(m, want, [&](int i) { return __float_as_uint(s[i]); }, [&](int p, int id) { out[p] = c0 + id; }, sm);
}

// The min(want, blocks) best blocks of each row, ascending ids. ids [rows][id_pitch], counts [rows]. grid (rows), 1024 threads.
// Candidates of all chunks lie in id order, so equal scores still fall to the lower id. At most 16 chunks of 512.
extern "C" __global__ void __launch_bounds__(1024) qsa_select(const float* __restrict__ scores, const int* __restrict__ row_pos, const int* __restrict__ cand,
                                                              int* __restrict__ ids, int* __restrict__ counts, int ratio, int want, int pitch, int id_pitch,
                                                              int chunks) {
  __shared__ int sm[96];
  pdl_launch();
  pdl_wait();
  const int row = blockIdx.x, n = (row_pos[row] + 1) / ratio;
  int* out = ids + (size_t)row * id_pitch;
  if (threadIdx.x == 0) counts[row] = min(n, want);
  if (n <= want) {
    for (int i = threadIdx.x; i < n; i += 1024) out[i] = i;
    return;
  }
  const float* s = scores + (size_t)row * pitch;
  if (n > 8192 && n <= QDIRECT) {
    select_top<32>(n, want, [&](int i) { return __float_as_uint(s[i]); }, [&](int p, int id) { out[p] = id; }, sm);
    return;
  }
  if (n <= QDIRECT) {
    select_top<8>(n, want, [&](int i) { return __float_as_uint(s[i]); }, [&](int p, int id) { out[p] = id; }, sm);
    return;
  }
  const int* c = cand + (size_t)row * chunks * want;
  const int full = n / QCHUNK, m = full * want + min(want, n - full * QCHUNK);
  select_top<8>(m, want, [&](int i) { return __float_as_uint(s[c[i]]); }, [&](int p, int i) { out[p] = c[i]; }, sm);
}

DEV u32 order_bits(float f) {
  const u32 b = __float_as_uint(f + 0.0f);
  return b & 0x80000000u ? ~b : b | 0x80000000u;
}

// The `want` best of each chunk of a row. values [rows][pitch] (ids_in null: the id is the place) -> out_v, out_id [rows][chunks][want].
// Places beyond the row hold -inf and -1. grid (chunks, rows), 1024 threads, chunk <= 4096.
extern "C" __global__ void __launch_bounds__(1024) top_chunk(const float* __restrict__ values, const int* __restrict__ ids_in, int n, int pitch, int chunk,
                                                            int want, float* __restrict__ out_v, int* __restrict__ out_id) {
  __shared__ int sm[96];
  pdl_launch();
  pdl_wait();
  const int row = blockIdx.y, c0 = blockIdx.x * chunk, m = min(chunk, n - c0);
  const float* v = values + (size_t)row * pitch + c0;
  const int* in = ids_in ? ids_in + (size_t)row * pitch + c0 : nullptr;
  const size_t o = ((size_t)row * gridDim.x + blockIdx.x) * want;
  auto put = [&](int p, int i) { out_v[o + p] = v[i], out_id[o + p] = in ? in[i] : c0 + i; };
  if (m <= want) {
    for (int i = threadIdx.x; i < want; i += 1024) {
      if (i < m) put(i, i);
      else out_v[o + i] = -INFINITY, out_id[o + i] = -1;
    }
    return;
  }
  select_top<4>(m, want, [&](int i) { return order_bits(v[i]); }, put, sm);
}

// Sorts n <= 1024 candidates of a row by (value descending, id ascending) and keeps `want`. grid (rows), 1024 threads.
extern "C" __global__ void __launch_bounds__(1024) top_sort(const float* __restrict__ v, const int* __restrict__ id, int n, int want, float* __restrict__ out_v,
                                                            int* __restrict__ out_id) {
  __shared__ u32 key[1024];
  __shared__ int ids[1024];
  pdl_launch();
  pdl_wait();
  const int row = blockIdx.x, t = threadIdx.x;
  if (t < n) ids[t] = id[(size_t)row * n + t], key[t] = ids[t] < 0 ? 0 : order_bits(v[(size_t)row * n + t]);
  __syncthreads();
  if (t >= n) return;
  int rank = 0;
  for (int i = 0; i < n; i++) rank += key[i] > key[t] || (key[i] == key[t] && (ids[i] < ids[t] || (ids[i] == ids[t] && i < t)));
  if (rank < want) out_v[(size_t)row * want + rank] = v[(size_t)row * n + t], out_id[(size_t)row * want + rank] = ids[t];
}
