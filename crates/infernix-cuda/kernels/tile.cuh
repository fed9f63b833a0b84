// Prefill products on tensor cores: y[t][n] = sum_k W[n][k] x[t][k], dense or grouped by expert.
//
// A block makes 256 weight rows x up to BN tokens: two groups of four warps, each with two tiles of 64 rows, warp w of a
// group holding rows 16w..16w+15 of both, and a third group that keeps a ring of stages of 64 k filled across tiles.
// Weights enter as stored and become exact BF16 fragments in registers; group scales multiply the FP32 sum of their k.
// Activations arrive packed (pack.cu): per tile [token][64 k], swizzled, with k permuted within 64 as the fragments are, so a stage
// is one bulk copy and serves ldmatrix and wgmma alike. Both variants hold fragments and sums in the same registers.
#pragma once
#include "gemv_core.cuh"
#include "nvfp4.cuh"
#include "w4a4.cuh"
#ifdef TILE_WGMMA
#include "wgmma.cuh"
#endif

#define BM 256
// Tokens of a tile. Without wgmma half as many: the registers of twelve warps hold no more sums, and there the expansion of
// the weights is cheap against the products.
#ifdef TILE_WGMMA
#define BN 128
#else
#define BN 64
#endif
// Bytes of a token in a packed chunk of 64 k: BF16, or E2M1 codes and four E4M3 scales.
#ifdef TILE_FP4
#define XB 36
#else
#define XB 128
#endif
#define NA (BN / 2)  // sums of a thread and 64-row tile
// What the fragments of NVFP4 leave to multiply.
#ifdef TILE_FP4
#define RG_FACTOR 1.0f
#else
#define RG_FACTOR 256.0f
#endif
#define F_RG16 9  // NVFP4 expert records: units of 16 rows x 16 k

template <int F> struct Tile {
  using T = Fmt<F>;
  static constexpr bool RG = F == F_RG16;
  static constexpr int ROW = RG ? 36 : T::STEP == 32 ? 2 * T::STEP_BYTES : T::STEP_BYTES;  // bytes of 64 k
  static constexpr int A_BYTES = BM * ROW;
  static constexpr int STAGE = A_BYTES + BN * XB;
  static constexpr bool GROUP = !RG && T::GROUP;
  static constexpr int GROUPS = GROUP && T::STEP == 32 ? 2 : 1;  // scale groups of a chunk
  // 16-byte unit of a row in shared memory.
  DEV static int unit(int row, int u) {
    return F == F_BF16 ? u ^ ((row & 1) << 2) : ROW == 64 && T::STEP == 32 ? u ^ (((row >> 1) & 1) << 1) : u;
  }
};

struct TileArgs {
  const u8 *codes, *high, *scales;
  const u16* row_scale;
  float tscale;
  const u64* tab;      // [3][E]: addresses of each expert's codes, high bits, scales
  const float* alpha;  // [E][3], or null
  const int *jobs, *count;
  const u8* x;
  void* y;
  int N, K, kx, rows, E, y_pitch, code_pitch, high_pitch, scale_pitch, half, mode, stages;
};
enum { M_F32 = 1, M_DIVIDE = 2, M_SWIGLU = 4, M_DOWN = 8 };

// One tile of work.
struct Item {
  const u8 *codes, *high, *scales, *x;
  int n0, first, n, ntp, expert;
};

template <int F> DEV Item item_of(const TileArgs& a, int idx, int chunks) {
  const int rt = (a.N + BM - 1) / BM;
  Item it;
  if (a.jobs) {
    const int4 j = *(const int4*)(a.jobs + (idx / rt) * 4);
    it.n0 = idx % rt * BM, it.expert = j.x, it.first = j.y, it.n = j.z;
    it.codes = (const u8*)a.tab[j.x];
    it.high = (const u8*)a.tab[a.E + j.x];
    it.scales = (const u8*)a.tab[2 * a.E + j.x];
    it.x = a.x + (size_t)j.w * chunks * XB;
  } else {
    // Eight token tiles stay together, so that what runs at the same time shares both operands in L2.
    const int tt = (a.rows + BN - 1) / BN, g = idx / (8 * rt), gs = min(8, tt - 8 * g), rem = idx - g * 8 * rt;
    const int t = g * 8 + rem % gs;
    it.n0 = rem / gs * BM, it.expert = 0, it.first = t * BN, it.n = min(BN, a.rows - it.first);
    it.codes = a.codes, it.high = a.high, it.scales = a.scales;
    it.x = a.x + (size_t)it.first * chunks * XB;
  }
  it.ntp = (it.n + 7) & ~7;
  return it;
}

// Stored row of row r: with `half`, rows alternate between two halves of the matrix (gate, up).
DEV int stored_row(const TileArgs& a, int r) { return a.half ? (r & 1) * a.half + (r >> 1) : r; }

// Group scales of one chunk, of the rows g and g+8 of both 64-row tiles: [2 mt + h].
template <int F> DEV void load_scales(const TileArgs& a, const Item& it, int row, int c, int q, u32 (&sc)[4]) {
  if constexpr (Tile<F>::GROUP || F == F_NVFP4)
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int r = min(it.n0 + row + (i >> 1) * 64 + (i & 1) * 8, a.N - 1);
    if (F == F_NVFP4) {
      sc[i] = __ldg(it.codes + unit_of(r >> 3, c, a.K >> 10) + 512 + 2 * ((row & 7) * 4 + q) + second_step(c));
      continue;
    }
    if (F == F_FP8B) {
      const int t = a.half ? (r & 1) * ((a.half + 127) >> 7) + (r >> 8) : r >> 7;
      sc[i] = __ldg((const u32*)(it.scales + (size_t)t * a.scale_pitch) + (c >> 1));
      continue;
    }
    const u8* p = it.scales + (size_t)stored_row(a, r) * a.scale_pitch;
    if (F == F_Q8) {
      sc[i] = __ldg((const u16*)p + 2 * c);
      if (2 * c + 1 < a.scale_pitch >> 1) sc[i] |= (u32)__ldg((const u16*)p + 2 * c + 1) << 16;
    } else if (F == F_MXFP8) {
      sc[i] = __ldg(p + 2 * c);
      if (2 * c + 1 < a.scale_pitch) sc[i] |= (u32)__ldg(p + 2 * c + 1) << 16;
    } else {
      sc[i] = (u32)__ldg((const u16*)p + c);
    }
  }
}
template <int F> DEV float group_scale(u32 sc, int group) {
  const u32 v = group ? sc >> 16 : sc & 0xffff;
  return F == F_FP8B ? __uint_as_float(sc) : F == F_MXFP8 ? e8m0f(v) : h2f(v);
}
// High bits of one row of a chunk.
template <int F> DEV u32 load_high(const TileArgs& a, const Item& it, int row, int c, int q) {
  const u8* p = it.high + (size_t)stored_row(a, min(it.n0 + row, a.N - 1)) * a.high_pitch;
  return F == F_Q5 ? (u32)__ldg((const u16*)(p + 8 * c + 2 * q)) : F == F_Q6 ? __ldg((const u32*)(p + 16 * c + 4 * q)) : 0;
}

// Fragments of 16 rows (row: g within the block's 256) for group `grp` of the chunk: k16 steps of A. extra: block scales or high
// bits of rows g and g+8.
template <int F> DEV void frags(const u8* sa, int row, int grp, int g, int q, u32 extra0, u32 extra1, int units, u32 (*a)[4]) {
  using T = Fmt<F>;
  using L = Tile<F>;
  if (F == F_RG16) {
    const u8* base = sa + (row >> 4) * 576;
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const u8* p = base + k * 144;
      const u32 w = *(const u32*)(p + 32 * q + 4 * g);
      // Units past the end of K hold what an earlier stage left there.
      const u32 s0 = k < units ? block_scale(p[128 + g]) : 0, s1 = k < units ? block_scale(p[136 + g]) : 0;
      const u32 v = w >> 8;
      a[k][0] = hmul2(((w & 0x000f000fu) * 0x1040u) & 0x81c081c0u, s0);
      a[k][1] = hmul2(((w & 0x00f000f0u) * 0x0104u) & 0x81c081c0u, s1);
      a[k][2] = hmul2(((v & 0x000f000fu) * 0x1040u) & 0x81c081c0u, s0);
      a[k][3] = hmul2(((v & 0x00f000f0u) * 0x0104u) & 0x81c081c0u, s1);
    }
    return;
  }
  constexpr int STEPS = 64 / T::STEP / L::GROUPS;
#pragma unroll
  for (int i = 0; i < STEPS; i++) {
    const int ss = grp * STEPS + i;
    Raw<F> r[2];
    u32 e[2][T::MMAS * 2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const u8* p = sa + (row + 8 * h) * L::ROW;
      if (T::LANE_BYTES == 16) {
        const uint4 v = *(const uint4*)(p + L::unit(row, F == F_BF16 ? ss * 4 + q : q) * 16);
        r[h].w[0] = v.x, r[h].w[1] = v.y, r[h].w[T::LANE_BYTES / 4 - 2] = v.z, r[h].w[T::LANE_BYTES / 4 - 1] = v.w;
      } else {
        const uint2 v = F == F_NVFP4 ? *(const uint2*)(sa + ((row >> 3) + h) * 256 + (4 * g + q) * 8)
                        : L::ROW == 64 ? *(const uint2*)(p + L::unit(row, ss * 2 + (q >> 1)) * 16 + (q & 1) * 8) : *(const uint2*)(p + q * 8);
        r[h].w[0] = v.x, r[h].w[1] = v.y;
      }
      r[h].extra = h ? extra1 : extra0;
      expand<F>(r[h], e[h]);
    }
#pragma unroll
    for (int m = 0; m < T::MMAS; m++) {
      a[i * T::MMAS + m][0] = e[0][2 * m], a[i * T::MMAS + m][1] = e[1][2 * m];
      a[i * T::MMAS + m][2] = e[0][2 * m + 1], a[i * T::MMAS + m][3] = e[1][2 * m + 1];
    }
  }
}

DEV void ldmatrix4(u32 a, u32 (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a));
}
#ifdef TILE_FP4
// D += A B, m16n8k64. A: rows g (a0, a2) and g + 8 (a1, a3), k 8q.. and 32 + 8q..; B likewise, column g. Scales: byte i is block i of
// 16 k; of row g in lanes with q even, of row g + 8 where q is odd (lanes 0 and 1 of four are read); of column g (lane 0 is read).
DEV void mma_fp4(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, u32 sfa, u32 sfb) {
  asm(
      "mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3}, {%10}, {0, 0}, {%11}, {0, 0};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(sfa), "r"(sfb));
}
#endif
DEV u32 movmatrix(u32 v) {
  u32 r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v));
  return r;
}

// Rounds and stores 16 rows (n: row g of this lane's warp) x the tile's tokens. Four times the same code for part of the
// sums, which move down in between: unrolled over all of them, its instructions would take longer to fetch than to run.
template <int F> DEV void store(const TileArgs& a, const Item& it, float (&d)[NA], int n, int g, int q) {
  float s[2], al[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int r = min(n + 8 * h, a.N - 1);
    s[h] = F == F_NVFP4 || F == F_RG16 ? RG_FACTOR : a.row_scale ? bf2f(a.row_scale[stored_row(a, r)]) : 1.0f;
    al[h] = a.alpha ? a.alpha[it.expert * 3 + (a.mode & M_DOWN ? 2 : r & 1)] : a.tscale;
  }
  const int base = n - g;  // first of the 16 rows
  const bool even = !(a.y_pitch & 1);
#pragma unroll 1
  for (int j0 = 0; j0 * 8 < it.n; j0 += 4) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
      float v[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        v[i] = d[4 * j + i] * s[i >> 1];
        v[i] = a.mode & M_DIVIDE ? __fdiv_rn(v[i], al[i >> 1]) : v[i] * al[i >> 1];
      }
      const int t0 = 8 * (j0 + j);
      if (a.mode & M_F32) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int t = t0 + 2 * q + (i & 1), r = n + (i >> 1) * 8;
          if (t < it.n && r < a.N) ((float*)a.y)[(size_t)(it.first + t) * a.y_pitch + r] = v[i];
        }
        continue;
      }
      // Lane (g, q) now takes token t0 + g, rows 2q and 2q + 1 of each half.
      const u32 lo = movmatrix(pack_bf(v[0], v[1])), hi = movmatrix(pack_bf(v[2], v[3]));
      const int t = t0 + g;
      u16* y = (u16*)a.y + (size_t)(it.first + t) * a.y_pitch;
      u32 w[2] = {lo, hi};
      int r = base + 2 * q, width = 1, step = 8;
      if (a.mode & M_SWIGLU) {
        const u32 h0 = swiglu_c(bf_lo(lo), bf_hi(lo)), h1 = swiglu_c(bf_lo(hi), bf_hi(hi));
        const u32 o0 = __shfl_xor_sync(~0u, h0, 1), o1 = __shfl_xor_sync(~0u, h1, 1);
        // Even lanes store two units of the first eight rows, odd lanes two of the second.
        w[0] = q & 1 ? o1 | h1 << 16 : h0 | o0 << 16;
        r = (base >> 1) + (q & 1 ? 3 + q : q), width = 2, step = 0;
      }
      const int end = a.mode & M_SWIGLU ? a.N >> 1 : a.N;
      if (t < it.n)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int rr = r + h * step;
          if (h && width == 2) break;
          if (rr + 1 < end && even) *(u32*)(y + rr) = w[h];
          else {
            if (rr < end) y[rr] = (u16)w[h];
            if (rr + 1 < end) y[rr + 1] = (u16)(w[h] >> 16);
          }
        }
    }
#pragma unroll
    for (int i = 0; i < NA - 16; i++) d[i] = d[i + 16];
  }
}

// Sums of one tile by one warp; returns the ring position behind it.
// `SMALL`: a tile of at most half the tokens, whose other sums are not wanted.
template <int F, bool SMALL> DEV int tile_sums(const TileArgs& a, const Item& it, int chunks, int pos, u8* ring, u32 s_ring, u32 s_bar, int wg, int wq,
                                   int lane, float (&acc)[2][NA]) {
  using L = Tile<F>;
  const int g = lane >> 2, q = lane & 3, row = wg * 128 + wq * 16 + g, S = a.stages;
  const u32 ks = it.ntp * 16;  // FP4: bytes of a half
  constexpr int KS = 4 / L::GROUPS;
  constexpr bool HIGH = F == F_Q5 || F == F_Q6, AHEAD = !HIGH && F != F_Q8;
#pragma unroll
  for (int m = 0; m < 2; m++)
#pragma unroll
    for (int i = 0; i < NA; i++) acc[m][i] = 0;
  u32 sc[4] = {}, next[4] = {};
  if (AHEAD) load_scales<F>(a, it, row, 0, q, next);
  auto release = [&](int p) {
    __syncwarp();
    if (lane == 0) mbar_arrive(s_bar + 8 * (S + p % S));
  };
  auto extra = [&](int m, int h, int c) -> u32 { return F == F_NVFP4 ? sc[2 * m + h] : HIGH ? load_high<F>(a, it, row + 64 * m + 8 * h, c, q) : 0; };
#ifdef TILE_WGMMA
  u32 f0[4][4], f1[4][4];
  float t0[32], t1[32];
  if (L::GROUP)
#pragma unroll
    for (int i = 0; i < 32; i++) t0[i] = t1[i] = 0;
#else
  // ldmatrix: matrices (k 0-7, 8-15) x (tokens 0-7, 8-15); rows past the tile stay inside the stage.
#ifdef TILE_FP4
  const u32 lm = ((lane >> 3) & 1) * ks + ((lane >> 4) * 8 + (lane & 7)) * 16;
#else
  const u32 lm = ((lane >> 4) * 8 + (lane & 7)) * 128, lu = (lane >> 3) & 1;
#endif
#endif
#pragma unroll 1
  for (int c = 0; c < chunks; c++, pos++) {
    const int slot = pos % S;
    // The scales of the next chunk are asked for one chunk ahead where registers have room for that.
    if (!AHEAD) load_scales<F>(a, it, row, c, q, sc);
    else {
#pragma unroll
      for (int i = 0; i < 4; i++) sc[i] = next[i];
      if (c + 1 < chunks) load_scales<F>(a, it, row, c + 1, q, next);
    }
    u32 ex[4];
#pragma unroll
    for (int i = 0; i < 4; i++) ex[i] = extra(i >> 1, i & 1, c);
    mbar_wait(s_bar + 8 * slot, (pos / S) & 1);
    const u8* sa = ring + slot * L::STAGE;
    const u32 sx = s_ring + slot * L::STAGE + L::A_BYTES;
    const int units = ((a.K + 15) >> 4) - 4 * c;
#ifdef TILE_WGMMA
    const u64 b = wgmma_desc(sx);
    if constexpr (!L::GROUP) {
      // One group of products is always in flight while the fragments of the next are made.
      frags<F>(sa, row, 0, g, q, ex[0], ex[1], units, f0);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; k++) {
        if constexpr (SMALL) wgmma_n64(*(float(*)[32])&acc[0], f0[k], b + 2 * k, 1);
        else wgmma_n128(acc[0], f0[k], b + 2 * k, 1);
      }
      wgmma_commit();
      wgmma_wait<1>();
      if (c) release(pos - 1);
      frags<F>(sa, row + 64, 0, g, q, ex[2], ex[3], units, f1);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; k++) {
        if constexpr (SMALL) wgmma_n64(*(float(*)[32])&acc[1], f1[k], b + 2 * k, 1);
        else wgmma_n128(acc[1], f1[k], b + 2 * k, 1);
      }
      wgmma_commit();
      wgmma_wait<1>();
    } else {
      // Halves of the tokens alternate: one is multiplied while the other is added to the sums.
      auto add = [&](const float(&t)[32], int u, int half) {
        const int m = u & 1, gr = u >> 1;
        const float s0 = group_scale<F>(sc[2 * m], gr), s1 = group_scale<F>(sc[2 * m + 1], gr);
#pragma unroll
        for (int i = 0; i < 32; i++) acc[m][32 * half + i] = fmaf(i & 2 ? s1 : s0, t[i], acc[m][32 * half + i]);
      };
#pragma unroll
      for (int u = 0; u < 2 * L::GROUPS; u++) {
        const int m = u & 1, gr = u >> 1;
        if (u) {
          wgmma_wait<0>();
          add(t1, u - 1, 1);
        }
        frags<F>(sa, row + 64 * m, gr, g, q, ex[2 * m], ex[2 * m + 1], 4, f0);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < KS; k++) wgmma_n64(t0, f0[k], b + 2 * (gr * KS + k), k > 0);
        wgmma_commit();
#pragma unroll
        for (int k = 0; k < KS; k++) wgmma_n64(t1, f0[k], b + 512 + 2 * (gr * KS + k), k > 0);
        wgmma_commit();
        wgmma_wait<1>();
        add(t0, u, 0);
      }
      wgmma_wait<0>();
      add(t1, 2 * L::GROUPS - 1, 1);
      release(pos);
    }
#elif defined(TILE_FP4)
    // E2M1 x E2M1 with an E4M3 scale per 16 k of both, as stored: one instruction takes the chunk. Lane (g, q) gives half of block
    // q/2 (and of block 2 + q/2): two words of a unit, whose low nibbles are row g and high ones row g + 8.
#pragma unroll
    for (int m = 0; m < 2; m++) {
      const u8* base = sa + ((row + 64 * m) >> 4) * 576;
      u32 f[4], sfa = 0;
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const u8* p = base + (2 * h + (q >> 1)) * 144 + (q & 1) * 64 + 4 * g;
        const u32 x = *(const u32*)p, y = *(const u32*)(p + 32);
        f[2 * h] = (x & 0x0f0f0f0fu) | (y & 0x0f0f0f0fu) << 4;
        f[2 * h + 1] = (x >> 4 & 0x0f0f0f0fu) | (y & 0xf0f0f0f0u);
      }
#pragma unroll
      for (int k = 0; k < 4; k++)
        if (k < units) sfa |= (u32)base[k * 144 + 128 + g + 8 * (q & 1)] << (8 * k);
#pragma unroll
      for (int j = 0; j < BN / 8; j += 2) {
        if (j * 8 >= it.n) continue;
        u32 b[4];
        ldmatrix4(sx + lm + j * 128, b);
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const u32 sfb = lds32(sx + 2 * ks + ((j + h) * 8 + g) * 4);
          mma_fp4(*(float(*)[4])&acc[m][4 * (j + h)], f, b[2 * h], b[2 * h + 1], sfa, sfb);
        }
      }
    }
    release(pos);
#else
#pragma unroll
    for (int gm = 0; gm < 2 * L::GROUPS; gm++) {
      const int m = gm & 1, gr = gm >> 1;
      u32 f[KS][4];
      frags<F>(sa, row + 64 * m, gr, g, q, ex[2 * m], ex[2 * m + 1], units, f);
      const float s0 = group_scale<F>(sc[2 * m], gr), s1 = group_scale<F>(sc[2 * m + 1], gr);
#pragma unroll
      for (int j = 0; j < BN / 8; j += 2) {
        if (j * 8 >= it.n) continue;
        float t[2][4] = {};
#pragma unroll
        for (int k = 0; k < KS; k++) {
          u32 b[4];
          ldmatrix4(sx + lm + j * 1024 + (((2 * (gr * KS + k) + lu) ^ (lane & 7)) << 4), b);
#pragma unroll
          for (int h = 0; h < 2; h++) {
            float(&d)[4] = L::GROUP ? t[h] : *(float(*)[4])&acc[m][4 * (j + h)];
            mma16816(d, f[k][0], f[k][1], f[k][2], f[k][3], b[2 * h], b[2 * h + 1]);
          }
        }
        if (L::GROUP)
#pragma unroll
          for (int h = 0; h < 2; h++)
#pragma unroll
            for (int i = 0; i < 4; i++) acc[m][4 * (j + h) + i] = fmaf(i & 2 ? s1 : s0, t[h][i], acc[m][4 * (j + h) + i]);
      }
    }
    release(pos);
#endif
  }
#ifdef TILE_WGMMA
  if (!L::GROUP) {
    wgmma_wait<0>();
    release(pos - 1);
  }
#endif
  return pos;
}

// PARTS: stored rows are two BF16 parts of each value, 64 k of one and the same 64 of the other: both meet the same packed chunk.
template <int F, bool PARTS = false> DEV void tile_body(const TileArgs& a) {
  using L = Tile<F>;
  extern __shared__ __align__(128) u8 smem[];
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, S = a.stages;
  const u32 s_bar = smem_u32(smem), s_ring = (s_bar + 128 + 1023) & ~1023;  // swizzled tiles start at multiples of 1,024
  u8* ring = smem + (s_ring - s_bar);
  const int chunks = (a.kx + 63) >> 6;
  if (tid == 0) {
    for (int i = 0; i < S; i++) mbar_init(s_bar + 8 * i, L::RG ? 1 : 129), mbar_init(s_bar + 8 * (S + i), 8);
    mbar_fence_init();
  }
  __syncthreads();
  pdl_launch();
  pdl_wait();
  const int rt = (a.N + BM - 1) / BM, total = rt * (a.jobs ? a.count[0] : (a.rows + BN - 1) / BN);
  int pos = 0;
  if (warp >= 8) {
#ifdef TILE_WGMMA
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
#endif
    if (L::RG && warp > 8) return;
    const int t = tid - 256;
    for (int idx = blockIdx.x; idx < total; idx += gridDim.x) {
      const Item it = item_of<F>(a, idx, chunks >> PARTS);
      const int groups = (min(BM, a.N - it.n0) + 15) >> 4, units_k = a.K >> 4;
      for (int c = 0; c < chunks; c++, pos++) {
        const int slot = pos % S;
        const u32 sa = s_ring + slot * L::STAGE, full = s_bar + 8 * slot;
        if (pos >= S) mbar_wait(s_bar + 8 * (S + slot), ((pos / S) - 1) & 1);
        const u32 xb = it.ntp * XB, rg = L::RG ? min(4, units_k - 4 * c) * 144 : 0;
        if (t == 0) {
          mbar_expect(full, xb + (L::RG ? groups * rg : 0));
          bulk_load(sa + L::A_BYTES, it.x + (size_t)(c >> PARTS) * xb, xb, full);
        }
        if (L::RG) {
          __syncwarp();
          if (lane < groups) bulk_load(sa + lane * 576, it.codes + ((size_t)(it.n0 / 16 + lane) * units_k + 4 * c) * 144, rg, full);
        } else if (F == F_NVFP4) {
          // A tile of 8 rows is one piece of 256 B.
          const u8* p = it.codes + second_step(c) * 256;
#pragma unroll 1
          for (int i = 0; i < BM * 2 / 128; i++) {
            const int e = t + i * 128, r8 = min((it.n0 >> 3) + (e >> 4), (a.N - 1) >> 3);
            cp_async16(sa + e * 16, p + unit_of(r8, c, a.K >> 10) + (e & 15) * 16);
          }
          asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(full) : "memory");
        } else {
          constexpr int UPR = L::RG ? 1 : L::ROW / 16;
#pragma unroll(L::ROW == 32 ? 1 : 4)
          for (int i = 0; i < BM * UPR / 128; i++) {
            const int e = t + i * 128, r = e / UPR, u = e % UPR, off = c * L::ROW + u * 16;
            const int s = stored_row(a, min(it.n0 + r, a.N - 1));
            const bool ok = off < a.code_pitch;
            cp_async16z(sa + r * L::ROW + L::unit(r, u) * 16, it.codes + (size_t)s * a.code_pitch + (ok ? off : 0), ok ? 16 : 0);
          }
          asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(full) : "memory");
        }
      }
    }
    return;
  }
#ifdef TILE_WGMMA
  asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
#endif
  const int wg = warp >> 2, wq = warp & 3, g = lane >> 2, q = lane & 3;
  for (int idx = blockIdx.x; idx < total; idx += gridDim.x) {
    const Item it = item_of<F>(a, idx, chunks >> PARTS);
    const int n = it.n0 + wg * 128 + wq * 16 + g;
    float acc[2][NA];
#ifdef TILE_WGMMA
    if (L::RG && it.n <= BN / 2) pos = tile_sums<F, L::RG>(a, it, chunks, pos, ring, s_ring, s_bar, wg, wq, lane, acc);
    else
#endif
      pos = tile_sums<F, false>(a, it, chunks, pos, ring, s_ring, s_bar, wg, wq, lane, acc);
#pragma unroll 1
    for (int m = 0; m < 2; m++) {
      store<F>(a, it, acc[0], n + 64 * m, g, q);
#pragma unroll
      for (int i = 0; i < NA; i++) acc[0][i] = acc[1][i];
    }
  }
}

#define TILE_ENTRY(NAME, ...)                                                                                              \
  extern "C" __global__ void __launch_bounds__(384, 1)                                                                     \
  NAME(const u8* codes, const u8* high, const u8* scales, const u16* row_scale, float tscale, const u64* tab,              \
       const float* alpha, const int* jobs, const int* count, const u8* x, void* y, int N, int K, int kx, int rows, int E, \
       int y_pitch, int code_pitch, int high_pitch, int scale_pitch, int half, int mode, int stages) {                     \
    tile_body<__VA_ARGS__>(TileArgs{codes, high, scales, row_scale, tscale, tab, alpha, jobs, count, x, y, N, K, kx, rows, \
                                    E, y_pitch, code_pitch, high_pitch, scale_pitch, half, mode, stages});                 \
  }
