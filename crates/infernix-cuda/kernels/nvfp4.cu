// Decode linears of NVFP4: one matrix or a group (gemv_group.cu) beside BF16, 1-64 columns, and the order of the words they read.
//
// Two groups of eight warps a CTA; a CTA has a run of tiles, a group every other one of them. Warp w of a group takes the steps 16 i + w
// and 16 i + w + 8 of a tile through a ring of its own, filled by bulk copies it starts itself: no warp waits for another before the
// sixteen partial sums of some tiles are added, which is one barrier. The sums of an output have the order of every decode linear:
// step j to partial j mod 16, the sixteen in order.
#include "gemv_group.cuh"
#include "nvfp4.cuh"

// R16: tiles of 16 rows. Else of 8, the two steps of a unit in the halves of one product: rows 0-7 and columns 0-3 are the first
// step's, rows 8-15 and columns 4-7 the second's; at most 4 columns. XS: the activations of all columns are in shared memory.
template <bool R16, int NT, bool XS> DEV void nvfp4_body(const GemvGroup& a, const GemvSide& sd, int cta, int ctas) {
  constexpr int R = R16 ? 16 : 8, H = R16 ? 2 : 1, G = 2, RT = NT > 2 ? 2 : NT;
  extern __shared__ __align__(128) u8 smem[];
  const int tid = threadIdx.x, warp = (tid >> 5) & 7, grp = tid >> 8, lane = tid & 31, g = lane >> 2, q = lane & 3;
  if (tid >= CONSUMERS) return;  // the copying warp of BF16 matrices
  const int per = sd.K >> 10, C = sd.chunk_steps, S = sd.stages, cols = a.cols, tiles = sd.tiles * (16 / R);
  const int t0 = (int)((i64)tiles * cta / ctas), t1 = (int)((i64)tiles * (cta + 1) / ctas);
  const int xp = sd.K * 2 + 16, half = C * UNIT, slot_bytes = H * half;
  const u32 s_bar = smem_u32(smem) + (tid >> 5) * 64, s_ring = smem_u32(smem) + 1024 + (tid >> 5) * sd.pitch;
  const int x_at = 1024 + 16 * sd.pitch;
  float* part = (float*)(smem + x_at + (XS ? (cols * xp + 127) & ~127 : 0));
  const int width = min(cols, RT * (R16 ? 8 : 4)), slot_sums = 16 * width * R;

  // Copies: lane h fetches the units of half h of a tile.
  int lt = t0 + grp, lc = 0, ls = 0, lp = sd.from;
  auto issue = [&] {
    if (lt >= t1) return;
    const int n = min(C, per - lc);
    if (lane < H) {
      const int t16 = R16 ? lt : lt >> 1;
      lp = part_of(a, sd, t16, lp);
      const u8* from = a.part[lp].codes + ((size_t)((t16 - a.first[lp]) * 2 + (R16 ? lane : lt & 1)) * 8 + warp) * per * UNIT + lc * UNIT;
      mbar_expect(s_bar + 8 * ls, n * UNIT);
      bulk_load(s_ring + ls * slot_bytes + lane * half, from, n * UNIT, s_bar + 8 * ls);
    }
    if (++ls == S) ls = 0;
    if ((lc += C) >= per) lc = 0, lt += G;
  };
  if (lane == 0) {
    for (int i = 0; i < S; i++) mbar_init(s_bar + 8 * i, H);
    mbar_fence_init();
  }
  __syncwarp();
  for (int i = 0; i < S; i++) issue();
  pdl_launch();
  pdl_wait();
  if (XS) stage_input<F_NVFP4>(a, sd.K, smem + x_at, xp, tid);
  bar_named(1, CONSUMERS);

  // Columns that do not exist read the last one: their sums are never stored.
  u32 xa[NT];
  if (XS)
#pragma unroll
    for (int n = 0; n < NT; n++) {
      const int col = R16 ? n * 8 + g : g & 3;
      xa[n] = smem_u32(smem) + x_at + min(col, cols - 1) * xp + warp * 128 + q * 32 + (R16 ? 0 : (g >> 2) * 1024);
    }
  float acc[H][NT][4];
  // Sums of the n-tiles n0.. of one tile of rows to slot `s`: [partial][column][row].
  auto put = [&](int s, int n0) {
    float* o = part + s * slot_sums + warp * width * R;
#pragma unroll
    for (int n = 0; n < RT; n++)
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          float* oh = o + (R16 ? h : q >> 1) * 8 * width * R;
          const int col = R16 ? n * 8 + 2 * q + e : 2 * (q & 1) + e;
          if (R16) {
            if (col < width) oh[col * R + g] = acc[h & (H - 1)][n0 + n][e], oh[col * R + g + 8] = acc[h & (H - 1)][n0 + n][2 + e];
          } else if (h == 0 && col < width) oh[col * R + g] = q < 2 ? acc[0][n0 + n][e] : acc[0][n0 + n][2 + e];
        }
  };
  // Outputs of `n` tiles from `first` on.
  auto add = [&](int first, int n, int n0) {
    const int left = min(width, cols - n0 * 8);
    for (int i = tid; i < n * left * R; i += CONSUMERS) {
      const int s = i / (left * R), r = i - s * left * R, col = n0 * 8 + r / R, tile = first + s, t16 = R16 ? tile : tile >> 1;
      const int pi = part_of(a, sd, t16, sd.from), row = (t16 - a.first[pi]) * 16 + (R16 ? 0 : (tile & 1) * 8) + (r & (R - 1));
      const GemvPart& p = a.part[pi];
      if (row >= p.n) continue;
      const float* o = part + s * slot_sums + r;
      float v = o[0];
#pragma unroll
      for (int k = 1; k < 16; k++) v += o[k * width * R];
      v = finish(v * 256.0f, nullptr, row, p.tscale, p.mode & M_DIVIDE);
      if (p.mode & M_COMBINE) {
        float sum = 0;
#pragma unroll 5
        for (int k = 0; k < a.top; k++) sum = fmaf(a.weights[col * a.top + k], bf2f(a.ye[(size_t)(col * a.top + k) * p.n + row]), sum);
        v = fmaf(sigmoidf(a.logit[(size_t)col * a.logit_pitch]), rbf(v), sum);
      }
      if (p.mode & M_F32) ((float*)p.y)[(size_t)col * p.y_pitch + row] = v;
      else ((u16*)p.y)[(size_t)col * p.y_pitch + row] = f2bf(v);
    }
  };

  // Tiles in batches of as many as there are slots; with more than 16 columns one a group, added 16 columns at a time.
  const int batch = NT > 2 ? G : sd.slots;
  int cs = 0;
  u32 phase = 0;
  for (int b = t0; b < t1; b += batch) {
    const int e = min(t1, b + batch);
    int tile = b + ((grp + b - t0) & 1);
    for (; tile < e; tile += G) {
#pragma unroll
      for (int h = 0; h < H; h++)
#pragma unroll
        for (int n = 0; n < NT; n++) acc[h][n][0] = acc[h][n][1] = acc[h][n][2] = acc[h][n][3] = 0;
      u32 xo = 0;
      for (int c = 0; c < per; c += C) {
        const int n_u = min(C, per - c);
        mbar_wait(s_bar + 8 * cs, phase);
        u32 p = s_ring + cs * slot_bytes + lane * 8, ps = s_ring + cs * slot_bytes + 512 + lane * 2;
#pragma unroll 1
        for (int u = 0; u < n_u; u++, p += UNIT, ps += UNIT, xo += 2048) {
          uint2 w[H][2];
          u32 sc[2][2];
#pragma unroll
          for (int h = 0; h < H; h++) {
            w[h][0] = lds64(p + h * half), w[h][1] = lds64(p + h * half + 256);
            block_scales(lds16(ps + h * half), sc[0][h], sc[1][h]);
          }
          if constexpr (R16) {
#pragma unroll
            for (int j = 0; j < 2; j++) {
              u32 A[8], B[8];
              expand_e2m1(w[0][j].x, sc[j][0], A), expand_e2m1(w[0][j].y, sc[j][0], A + 4);
              expand_e2m1(w[1][j].x, sc[j][1], B), expand_e2m1(w[1][j].y, sc[j][1], B + 4);
#pragma unroll
              for (int n = 0; n < NT; n++) {
                u32 x[8];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                  if (XS) {
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
          } else {
            u32 A[8], B[8];
            expand_e2m1(w[0][0].x, sc[0][0], A), expand_e2m1(w[0][0].y, sc[0][0], A + 4);
            expand_e2m1(w[0][1].x, sc[1][0], B), expand_e2m1(w[0][1].y, sc[1][0], B + 4);
            const uint4 v = lds128(xa[0] + xo), z = lds128(xa[0] + xo + 16);
            const u32 x[8] = {v.x, v.y, v.z, v.w, z.x, z.y, z.z, z.w};
#pragma unroll
            for (int m = 0; m < 4; m++) mma16816(acc[0][0], A[2 * m], B[2 * m], A[2 * m + 1], B[2 * m + 1], x[2 * m], x[2 * m + 1]);
          }
        }
        __syncwarp();
        issue();
        if (++cs == S) cs = 0, phase ^= 1;
      }
      if (NT <= 2) put(tile - b, 0);
    }
    if (NT <= 2) {
      bar_named(1, CONSUMERS);
      add(b, e - b, 0);
      if (e < t1) bar_named(1, CONSUMERS);
    } else {
      const int mine = b + ((grp + b - t0) & 1);
#pragma unroll
      for (int n0 = 0; n0 < NT; n0 += RT) {
        if (mine < e) put(mine - b, n0);
        bar_named(1, CONSUMERS);
        add(b, e - b, n0);
        bar_named(1, CONSUMERS);
      }
    }
  }
}

#define BESIDE_BF16(NAME, R16, NT)                                                                                            \
  extern "C" __global__ void __launch_bounds__(CONSUMERS + 32, 1) NAME(const __grid_constant__ GemvGroup a) {                 \
    if ((int)blockIdx.x < a.split) nvfp4_body<R16, NT, true>(a, a.side[0], blockIdx.x, a.split);                              \
    else group_body<F_BF16, NT>(a, a.side[1], (int)blockIdx.x - a.split, (int)gridDim.x - a.split);                           \
  }
#define ALONE(NAME, NT, XS)                                                                                                   \
  extern "C" __global__ void __launch_bounds__(CONSUMERS, 1) NAME(const __grid_constant__ GemvGroup a) {                      \
    nvfp4_body<true, NT, XS>(a, a.side[0], blockIdx.x, gridDim.x);                                                            \
  }
BESIDE_BF16(nvfp4_r8_n1, false, 1)
BESIDE_BF16(nvfp4_r16_n1, true, 1)
BESIDE_BF16(nvfp4_r16_n2, true, 2)
ALONE(nvfp4_r16_n4, 4, true)
ALONE(nvfp4_r16_n8, 8, true)
ALONE(nvfp4_r16_n1_global, 1, false)
ALONE(nvfp4_r16_n2_global, 2, false)
ALONE(nvfp4_r16_n4_global, 4, false)
ALONE(nvfp4_r16_n8_global, 8, false)

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
