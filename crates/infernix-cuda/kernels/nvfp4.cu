// Decode linears of NVFP4: one matrix or a group (gemv_group.cu) beside BF16, 1-64 columns, and the order of the words they read.
//
// Two groups of eight warps a CTA; a CTA has a run of tiles, a group every other one of them. Warp w of a group takes the steps 16 i + w
// and 16 i + w + 8 of a tile through a ring of its own, filled by bulk copies it starts itself: no warp waits for another before the
// sixteen partial sums of some tiles are added, which is one barrier of the group. The sums of an output have the order of every decode
// linear: step j to partial j mod 16, the sixteen in order.
#include "gemv_group.cuh"
#include "nvfp4.cuh"

// R16: tiles of 16 rows. Else of 8, the two steps of a unit in the halves of one product: rows 0-7 and columns 0-3 are the first
// step's, rows 8-15 and columns 4-7 the second's; at most 4 columns. XS: the activations of all columns are in shared memory.
template <bool R16, int NT, bool XS> DEV void nvfp4_body(const GemvGroup& a, const GemvSide& sd, int cta, int ctas) {
  constexpr int R = R16 ? 16 : 8, H = R16 ? 2 : 1, G = 2, RT = NT > 2 ? 1 : NT;
  extern __shared__ __align__(128) u8 smem[];
  const int tid = threadIdx.x, warp = (tid >> 5) & 7, grp = tid >> 8, lane = tid & 31, g = lane >> 2, q = lane & 3;
  if (tid >= CONSUMERS) return;  // the copying warp of BF16 matrices
  const int per = sd.K >> 10, C = sd.chunk_steps, S = sd.stages, cols = a.cols, tiles = sd.tiles * (16 / R);
  const int t0 = (int)((i64)tiles * cta / ctas), t1 = (int)((i64)tiles * (cta + 1) / ctas);
  const int xp = sd.K * 2 + 16, x_at = 1024 + 16 * sd.pitch;
  const u32 half = C * UNIT, slot_bytes = H * half, row_bytes = per * UNIT;
  const u32 s_bar = smem_u32(smem) + (tid >> 5) * 64, s_ring = smem_u32(smem) + 1024 + (tid >> 5) * sd.pitch;

  // Copies: lane h fetches the units of half h of a tile, up to C at a time.
  int lt = t0 + grp, ls = 0, lp = sd.from, next = t0;
  u32 left = row_bytes;
  const u8* from = nullptr;
  auto find = [&] {
    if (lt < next) return;
    const int t16 = R16 ? lt : lt >> 1;
    lp = part_of(a, sd, t16, lp);
    from = a.part[lp].codes + (u64)(((t16 - a.first[lp]) * 2 + (R16 ? lane & 1 : lt & 1)) * 8 + warp) * row_bytes;
    next = lp + 1 < sd.to ? a.first[lp + 1] * (16 / R) : 0x7fffffff;
  };
  auto issue = [&] {
    if (lt >= t1) return;
    const u32 n = min(half, left), bar = s_bar + 8 * ls;
    if (lane < H) {
      mbar_expect(bar, n);
      bulk_load(s_ring + ls * slot_bytes + lane * half, from, n, bar);
    }
    if (++ls == S) ls = 0;
    from += n, left -= n;
    if (left == 0) {
      left = row_bytes, lt += G, from += (u64)row_bytes * (8 * G * H - 1);
      find();
    }
  };
  if (lane == 0) {
    for (int i = 0; i < S; i++) mbar_init(s_bar + 8 * i, H);
    mbar_fence_init();
  }
  __syncwarp();
  find();
  for (int i = 0; i < S; i++) issue();
  pdl_launch();
  pdl_wait();
  if (XS) stage_input<F_NVFP4>(a, sd.K, smem + x_at, xp, tid);
  bar_named(1, CONSUMERS);

  // Lanes of columns that do not exist ask for nothing and multiply what they have: their sums are never stored. Eight n-tiles have
  // no register for that; there they read the last column.
  u32 xa[NT];
  bool live[NT];
  if (XS)
#pragma unroll
    for (int n = 0; n < NT; n++) {
      const int col = R16 ? n * 8 + g : g & 3;
      live[n] = NT == 8 || col < cols;
      xa[n] = smem_u32(smem) + x_at + min(col, cols - 1) * xp + warp * 128 + q * 32 + (R16 ? 0 : (g >> 2) * 1024);
    }
  // Sums of a group: two buffers of `batch` tiles, [partial][column][row] each; one where that holds all its tiles.
  const int batch = sd.slots, width = min(cols, RT * (R16 ? 8 : 4)), sums = 16 * width * R;
  const int buffers = batch * G < t1 - t0 || NT > RT ? 2 : 1;
  float* const own = (float*)(smem + x_at + (XS ? (cols * xp + 127) & ~127 : 0)) + grp * buffers * batch * sums;
  float* const mine = own + (warp + (R16 ? 0 : (q >> 1) * 8)) * width * R + (R16 ? 2 * q : 2 * (q & 1)) * R + g;
  float acc[H][NT][4];
  u32 kept[NT == 8 ? 1 : H][8] = {};
  auto put = [&](int slot, int n0) {
    float* o = mine + slot * sums;
#pragma unroll
    for (int n = 0; n < RT; n++)
#pragma unroll
      for (int e = 0; e < 2; e++)
        if (R16) {
          if (n * 8 + 2 * q + e < width)
#pragma unroll
            for (int h = 0; h < H; h++) {
              o[h * 8 * width * R + (n * 8 + e) * R] = acc[h][n0 + n][e];
              o[h * 8 * width * R + (n * 8 + e) * R + 8] = acc[h][n0 + n][2 + e];
            }
        } else if (2 * (q & 1) + e < width) o[e * R] = q < 2 ? acc[0][0][e] : acc[0][0][2 + e];
  };
  // Outputs of `n` of the group's tiles from `first` on, columns 8 n0 and up.
  auto add = [&](int first, int n, int slot, int n0) {
    bar_named(2 + grp, CONSUMERS / G);
    const int some = min(width, cols - n0 * 8) * R;
    for (int i = tid & (CONSUMERS / G - 1); i < n * some; i += CONSUMERS / G) {
      const int s = i / some, r = i - s * some, col = n0 * 8 + r / R, tile = first + s * G, t16 = R16 ? tile : tile >> 1;
      const int pi = part_of(a, sd, t16, sd.from), row = (t16 - a.first[pi]) * 16 + (R16 ? 0 : (tile & 1) * 8) + (r & (R - 1));
      const GemvPart& p = a.part[pi];
      if (row >= p.n) continue;
      const float* o = own + (slot + s) * sums + r;
      float v = o[0];
#pragma unroll
      for (int k = 1; k < 16; k++) v += o[k * width * R];
      v = finish(v * 256.0f, nullptr, row, p.tscale, p.mode & M_DIVIDE);
      if (p.mode & M_COMBINE) {
        float sum = 0;
#pragma unroll 1
        for (int k = 0; k < a.top; k++) sum = fmaf(a.weights[col * a.top + k], bf2f(a.ye[(size_t)(col * a.top + k) * p.n + row]), sum);
        v = fmaf(sigmoidf(a.logit[(size_t)col * a.logit_pitch]), rbf(v), sum);
      }
      if (p.mode & M_F32) ((float*)p.y)[(size_t)col * p.y_pitch + row] = v;
      else ((u16*)p.y)[(size_t)col * p.y_pitch + row] = f2bf(v);
    }
  };

  u32 cs = 0, phase = 0;
  int filled = 0, first = t0 + grp, buffer = 0;
  for (int tile = t0 + grp; tile < t1; tile += G) {
#pragma unroll
    for (int h = 0; h < H; h++)
#pragma unroll
      for (int n = 0; n < NT; n++) acc[h][n][0] = acc[h][n][1] = acc[h][n][2] = acc[h][n][3] = 0;
    u32 xo = 0;
    for (int c = per; c > 0; c -= C) {
      mbar_wait(s_bar + 8 * cs, phase);
      u32 p = s_ring + cs * slot_bytes + lane * 8, ps = s_ring + cs * slot_bytes + 512 + lane * 2;
#pragma unroll 1
      for (int u = min(C, c); u > 0; u--, p += UNIT, ps += UNIT, xo += 2048) {
        uint2 w[H][2];
        u32 sc[2][H];
#pragma unroll
        for (int h = 0; h < H; h++) {
          w[h][0] = lds64(p + h * half), w[h][1] = lds64(p + h * half + 256);
          block_scales(lds16(ps + h * half), sc[0][h], sc[1][h]);
        }
        // R16: both steps one after the other, rows g and g + 8. Else the steps in the place of rows.
#pragma unroll
        for (int j = 0; j < H; j++) {
          u32 A[8], B[8];
          const uint2 lo = R16 ? w[0][j] : w[0][0], hi = R16 ? w[H - 1][j] : w[0][1];
          const u32 s0 = R16 ? sc[j][0] : sc[0][0], s1 = R16 ? sc[j][H - 1] : sc[1][0];
          expand_e2m1(lo.x, s0, A), expand_e2m1(lo.y, s0, A + 4);
          expand_e2m1(hi.x, s1, B), expand_e2m1(hi.y, s1, B + 4);
#pragma unroll
          for (int n = 0; n < NT; n++) {
            u32 own[8];
            u32* const x = NT == 8 ? own : kept[j];
#pragma unroll
            for (int i = 0; i < 2; i++) {
              if (XS) {
                if (!live[n]) continue;
                const uint4 v = lds128(xa[n] + xo + j * 1024 + i * 16);
                x[4 * i] = v.x, x[4 * i + 1] = v.y, x[4 * i + 2] = v.z, x[4 * i + 3] = v.w;
              } else {
                const int k = (int)(xo >> 1) + warp * 64 + j * 512 + q * 16 + 8 * i;
                uint4 v = make_uint4(0, 0, 0, 0);
                if (k < a.kx) v = __ldg((const uint4*)(a.x + (size_t)min(n * 8 + g, cols - 1) * a.x_pitch + k));
                order_x<F_NVFP4>(v, x + 4 * i);
              }
            }
#pragma unroll
            for (int m = 0; m < 4; m++) mma16816(acc[j][n], A[2 * m], B[2 * m], A[2 * m + 1], B[2 * m + 1], x[2 * m], x[2 * m + 1]);
          }
        }
      }
      __syncwarp();
      issue();
      if (++cs == S) cs = 0, phase ^= 1;
    }
    if (NT > RT) {
#pragma unroll
      for (int n0 = 0; n0 < NT; n0++) {
        // One barrier for each buffer that is filled: without it a warp would fill one that others still add.
        if (n0 * 8 >= cols) continue;
        put(buffer, n0);
        add(tile, 1, buffer, n0);
        buffer ^= 1;
      }
    } else {
      put(buffer * batch + filled, 0);
      if (++filled == batch || tile + G >= t1) {
        add(first, filled, buffer * batch, 0);
        filled = 0, first = tile + G, buffer ^= 1;
      }
    }
  }
}

// One entry for both sides costs the product alone a microsecond.
#define BESIDE_BF16(NAME, R16, NT)                                                                                            \
  extern "C" __global__ void __launch_bounds__(CONSUMERS + 32, 1) NAME(const __grid_constant__ GemvGroup a) {                 \
    if ((int)blockIdx.x < a.split) nvfp4_body<R16, NT, true>(a, a.side[0], blockIdx.x, a.split);                              \
    else group_body<F_BF16, NT>(a, a.side[1], (int)blockIdx.x - a.split, (int)gridDim.x - a.split);                           \
  }
#define ALONE(NAME, R16, NT, XS)                                                                                              \
  extern "C" __global__ void __launch_bounds__(CONSUMERS, 1) NAME(const __grid_constant__ GemvGroup a) {                      \
    nvfp4_body<R16, NT, XS>(a, a.side[0], blockIdx.x, gridDim.x);                                                             \
  }
BESIDE_BF16(nvfp4_r8_bf16_n1, false, 1)
BESIDE_BF16(nvfp4_r16_bf16_n1, true, 1)
BESIDE_BF16(nvfp4_r16_bf16_n2, true, 2)
ALONE(nvfp4_r8_n1, false, 1, true)
ALONE(nvfp4_r16_n1, true, 1, true)
ALONE(nvfp4_r16_n2, true, 2, true)
ALONE(nvfp4_r16_n4, true, 4, true)
ALONE(nvfp4_r16_n8, true, 8, true)
ALONE(nvfp4_r16_global_n1, true, 1, false)
ALONE(nvfp4_r16_global_n2, true, 2, false)
ALONE(nvfp4_r16_global_n4, true, 4, false)
ALONE(nvfp4_r16_global_n8, true, 8, false)

// Rows of codes and scales of `per` x 1,024 k to units; rows from n on are zeros. grid (8 * per, tiles of 8 rows), a thread the 16 k of
// a lane and step.
extern "C" __global__ void __launch_bounds__(64) nvfp4_order(const u8* __restrict__ codes, const u8* __restrict__ scales, u8* __restrict__ out, int n, int per) {
  pdl_launch();
  pdl_wait();
  const int j = threadIdx.x >> 5, lane = threadIdx.x & 31, w = blockIdx.x / per, i = blockIdx.x - w * per;
  const int row = blockIdx.y * 8 + (lane >> 2), s = 16 * i + w + 8 * j, q = lane & 3;
  uint2 c = make_uint2(0, 0);
  u8 scale = 0;
  if (row < n) {
    c = *(const uint2*)(codes + (size_t)row * per * 512 + s * 32 + q * 8);
    scale = scales[(size_t)row * per * 64 + s * 4 + q];
  }
  u8* unit = out + unit_of(blockIdx.y, s, per);
  *(uint2*)(unit + j * 256 + lane * 8) =
      make_uint2(place_e2m1(c.x) | place_e2m1(c.x >> 16) << 16, place_e2m1(c.y) | place_e2m1(c.y >> 16) << 16);
  unit[512 + 2 * lane + j] = scale;
}
