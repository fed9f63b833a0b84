// Activations for the tile products, and the order of the experts' rows.
#include "w4a4.cuh"

// Where a register of the fragments comes from, by format: see Fmt and Tile. Slot q of unit u holds two values of k within 64.
enum { O_32 = 0, O_64 = 1, O_64P = 2, O_16 = 3 };

// Tile of `n` tokens (row r of tile t: jobs ? list[first + r] / top or first + r : t * width + r) to [token][64 k] a chunk, k
// permuted and 16-byte units swapped by the token's place in eight. With in_scale, blocks of 16 are quantised to E2M1 x E4M3 with the expert's input scale and stored as those exact
// products. grid (chunks of 64, tiles), width threads.
template <int O>
DEV void pack_body(const u16* __restrict__ x, const int* __restrict__ jobs, const int* __restrict__ count, const int* __restrict__ list,
                   const float* __restrict__ in_scale, u8* __restrict__ out, int x_pitch, int kx, int rows, int top, int which, int divisor) {
  pdl_launch();
  pdl_wait();
  const int c = blockIdx.x, chunks = gridDim.x, tile = blockIdx.y, r = threadIdx.x, width = blockDim.x;
  int first = tile * width, n = min(width, rows - first), base = first, expert = 0;
  if (jobs) {
    if (tile >= *count) return;
    const int4 j = *(const int4*)(jobs + tile * 4);
    expert = j.x, first = j.y, n = j.z, base = j.w;
  }
  const int ntp = (n + 7) & ~7;
  __shared__ uint4 tile_rows[128 * 8];  // a thread a token in, consecutive bytes out
  u32 v[32];
  const int row = r < n ? (list ? list[first + r] / top : first + r) : -1;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    uint4 w = make_uint4(0, 0, 0, 0);
    if (row >= 0 && c * 64 + i * 8 < kx) w = __ldg((const uint4*)(x + (size_t)row * x_pitch + c * 64 + i * 8));
    v[4 * i] = w.x, v[4 * i + 1] = w.y, v[4 * i + 2] = w.z, v[4 * i + 3] = w.w;
  }
  if (in_scale) {
    const float gs = in_scale[expert * 3 + which];
#pragma unroll
    for (int b = 0; b < 4; b++) {
      float m = 0;
#pragma unroll
      for (int i = 0; i < 8; i++) m = fmaxf(m, fmaxf(fabsf(bf_lo(v[8 * b + i])), fabsf(bf_hi(v[8 * b + i]))));
      const u32 s = e4m3_encode(divisor ? __fdiv_rn(__fmul_rn(m, gs), 6.0f) : __fdiv_rn(m, __fmul_rn(6.0f, gs)));
      const float sv = e4m3_m8(s) * 256.0f, d = divisor ? __fdiv_rn(sv, gs) : __fmul_rn(sv, gs), half = 0.5f * sv;
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const float lo = bf_lo(v[8 * b + i]), hi = bf_hi(v[8 * b + i]);
        v[8 * b + i] = s ? pack_bf((float)quant2(lo, d) * half, (float)quant2(hi, d) * half) : 0;
      }
    }
  }
  // Two values of k: word k/2, halves joined where they are not neighbours.
  auto pair = [&](int k, int d) -> u32 {
    if (d == 1) return v[k >> 1];
    return __byte_perm(v[k >> 1], v[(k + d) >> 1], k & 1 ? 0x7632 : 0x5410);
  };
#pragma unroll
  for (int u = 0; u < 8; u++) {
    const int m = u >> 1, h = u & 1;
    u32 w[4];
#pragma unroll
    for (int q = 0; q < 4; q++) {
      if (O == O_32) w[q] = pair((m >> 1) * 32 + 8 * q + 2 * (2 * (m & 1) + h), 1);
      else if (O == O_64) w[q] = pair(16 * q + 2 * (2 * m + h), 1);
      else if (O == O_64P) w[q] = pair(16 * q + 8 * (m >> 1) + (2 * m + h) % 4, 4);
      else w[q] = pair(16 * m + 4 * q + h, 2);
    }
    tile_rows[r * 8 + (u ^ (r & 7))] = make_uint4(w[0], w[1], w[2], w[3]);
  }
  __syncthreads();
  uint4* o = (uint4*)(out + ((size_t)base * chunks + (size_t)c * ntp) * 128);
  for (int i = r; i < ntp * 8; i += width) o[i] = tile_rows[i];
}

#define PACK(NAME, O)                                                                                                      \
  extern "C" __global__ void __launch_bounds__(128) NAME(const u16* x, const int* jobs, const int* count, const int* list, \
                                                         const float* in_scale, u8* out, int x_pitch, int kx, int rows,    \
                                                         int top, int which, int divisor) {                                \
    pack_body<O>(x, jobs, count, list, in_scale, out, x_pitch, kx, rows, top, which, divisor);                             \
  }
PACK(pack_32, O_32)
PACK(pack_64, O_64)
PACK(pack_64p, O_64P)
PACK(pack_16, O_16)

// The same rows for FP4 products: per tile and chunk [half of 64 k][token][16 B of E2M1] and [token][4 B of E4M3], blocks of 16
// quantised with the expert's input scale. Nibbles of 8 k stand in the order 0 4 1 5 2 6 3 7.
extern "C" __global__ void __launch_bounds__(128) pack_fp4(const u16* __restrict__ x, const int* __restrict__ jobs, const int* __restrict__ count,
                                                           const int* __restrict__ list, const float* __restrict__ in_scale, u8* __restrict__ out,
                                                           int x_pitch, int kx, int rows, int top, int which, int divisor) {
  pdl_launch();
  pdl_wait();
  const int c = blockIdx.x, chunks = gridDim.x, tile = blockIdx.y, r = threadIdx.x;
  if (tile >= *count) return;
  const int4 j = *(const int4*)(jobs + tile * 4);
  const int n = j.z, ntp = (n + 7) & ~7;
  if (r >= ntp) return;
  const int row = r < n ? (list ? list[j.y + r] / top : j.y + r) : -1;
  const float gs = in_scale[j.x * 3 + which];
  u32 w[8], scales = 0;
#pragma unroll
  for (int b = 0; b < 4; b++) {
    float v[16], m = 0;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      uint4 u = make_uint4(0, 0, 0, 0);
      if (row >= 0 && c * 64 + b * 16 + i * 8 < kx) u = __ldg((const uint4*)(x + (size_t)row * x_pitch + c * 64 + b * 16 + i * 8));
      const u32 p[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
      for (int k = 0; k < 4; k++) v[8 * i + 2 * k] = bf_lo(p[k]), v[8 * i + 2 * k + 1] = bf_hi(p[k]);
    }
#pragma unroll
    for (int i = 0; i < 16; i++) m = fmaxf(m, fabsf(v[i]));
    const u32 s = e4m3_encode(divisor ? __fdiv_rn(__fmul_rn(m, gs), 6.0f) : __fdiv_rn(m, __fmul_rn(6.0f, gs)));
    const float sv = e4m3_m8(s) * 256.0f, d = divisor ? __fdiv_rn(sv, gs) : __fmul_rn(sv, gs);
    scales |= s << (8 * b);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      u32 o = 0;
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const int q2 = s ? quant2(v[8 * h + i], d) : 0, a = abs(q2);
        const u32 code = (a < 4 ? a : a == 4 ? 4 : a == 6 ? 5 : a == 8 ? 6 : 7) | (q2 < 0 ? 8 : 0);
        o |= code << (4 * (i < 4 ? 2 * i : 2 * (i - 4) + 1));
      }
      w[2 * b + h] = o;
    }
  }
  u8* o = out + ((size_t)j.w * chunks + (size_t)c * ntp) * 36;
  *(uint4*)(o + r * 16) = make_uint4(w[0], w[1], w[2], w[3]);
  *(uint4*)(o + (ntp + r) * 16) = make_uint4(w[4], w[5], w[6], w[7]);
  *(u32*)(o + ntp * 32 + r * 4) = scales;
}

// Counts the picks of each expert and cuts them into jobs of at most `width` (a multiple of 8), experts ascending.
//   jobs [n][4]: expert, first sorted place, picks, first place when each expert's picks are padded to 8
//   count[0] = jobs, count[1] = picks;  base [E + 1]: first sorted place of each expert
extern "C" __global__ void __launch_bounds__(1024) sort_count(const int* __restrict__ ids, int picks, int E, int width, int* __restrict__ jobs,
                                                              int* __restrict__ count, int* __restrict__ base) {
  __shared__ int n[1024], wa[32], wb[32], wc[32];
  pdl_launch();
  pdl_wait();
  const int t = threadIdx.x, lane = t & 31, warp = t >> 5;
  n[t] = 0;
  __syncthreads();
  for (int p = t; p < picks; p += 1024) atomicAdd(&n[ids[p]], 1);
  __syncthreads();
  const int c = n[t], j = (c + width - 1) / width, c8 = (c + 7) & ~7;
  int a = c, b = j, d = c8;
#pragma unroll
  for (int o = 1; o < 32; o <<= 1) {
    const int x = __shfl_up_sync(~0u, a, o), y = __shfl_up_sync(~0u, b, o), z = __shfl_up_sync(~0u, d, o);
    if (lane >= o) a += x, b += y, d += z;
  }
  if (lane == 31) wa[warp] = a, wb[warp] = b, wc[warp] = d;
  __syncthreads();
  int pa = 0, pb = 0, pd = 0;
  for (int i = 0; i < warp; i++) pa += wa[i], pb += wb[i], pd += wc[i];
  a += pa - c, b += pb - j, d += pd - c8;
  if (t < E) base[t] = a;
  if (t == 1023) count[0] = b + j, count[1] = a + c, base[E] = a + c;
  for (int k = 0; k < j; k++) *(int4*)(jobs + (size_t)(b + k) * 4) = make_int4(t, a + k * width, min(width, c - k * width), d + k * width);
}

// Places picks in sorted order, stable: list[place] = pick, slot[pick] = place. grid E, 256 threads.
extern "C" __global__ void __launch_bounds__(256) sort_place(const int* __restrict__ ids, int picks, const int* __restrict__ base,
                                                             int* __restrict__ list, int* __restrict__ slot) {
  __shared__ int sums[2][8];
  pdl_launch();
  pdl_wait();
  const int e = blockIdx.x, t = threadIdx.x, lane = t & 31, warp = t >> 5;
  int at = base[e];
  if (base[e + 1] == at) return;
  for (int p0 = 0, buf = 0; p0 < picks; p0 += 1024, buf ^= 1) {
    const int p = p0 + t * 4;
    int id[4], mine = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) id[i] = p + i < picks ? ids[p + i] : -1, mine += id[i] == e;
    int s = mine;
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
      const int x = __shfl_up_sync(~0u, s, o);
      if (lane >= o) s += x;
    }
    if (lane == 31) sums[buf][warp] = s;
    __syncthreads();
    int k = at + s - mine;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int x = sums[buf][i];
      if (i < warp) k += x;
      at += x;
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (id[i] == e) list[k] = p + i, slot[p + i] = k, k++;
  }
}

// The jobs of every `per` experts as a list of their own, `most` jobs apart, and where their matrices lie: those of each list in order
// from `at` on, `stride` bytes apart. own [lists][most][4], counts [lists][2], tab [E]. grid lists, 256 threads.
extern "C" __global__ void __launch_bounds__(256) sort_lists(const int* __restrict__ jobs, const int* __restrict__ count, int E, int per, int most,
                                                             int* __restrict__ own, int* __restrict__ counts, u64 at, u64 stride,
                                                             u64* __restrict__ tab) {
  __shared__ int range[2];
  pdl_launch();
  pdl_wait();
  const int t = threadIdx.x, z = blockIdx.x, e0 = z * per, e1 = min(e0 + per, E), n = *count;
  if (t < 2) range[t] = n;
  __syncthreads();
  // Jobs have ascending experts: where those from e0 and from e1 on begin.
  for (int j = t; j < n; j += 256) {
    const int e = jobs[4 * j], before = j ? jobs[4 * j - 4] : -1;
    if (before < e0 && e >= e0) range[0] = j;
    if (before < e1 && e >= e1) range[1] = j;
  }
  __syncthreads();
  const int first = range[0], live = range[1] - first;
#pragma unroll 1
  for (int j = t; j < live; j += 256) *(int4*)(own + ((size_t)z * most + j) * 4) = *(const int4*)(jobs + (size_t)(first + j) * 4);
  for (int e = e0 + t; e < e1; e += 256) tab[e] = at + (e - e0) * stride;
  if (t == 0) counts[2 * z] = live, counts[2 * z + 1] = 0;
}
