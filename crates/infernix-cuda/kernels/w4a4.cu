// Exact W4A4 experts for decode and verify calls, from rg16 records as stored. Two kernels: gate/up + SwiGLU, down.
//
// Work is cut into items: `rph` consecutive row groups (16 rows) of one job. A CTA of eight consumer warps and a producer owns
// a contiguous run of items; a stage of its ring is one item, one bulk copy. The warps split its row groups, then K. Several
// CTAs share a multiprocessor and hide each other's latency. Sums are exact integers: no cut of the work changes a bit.
// Picks that the host computes are in no job: the down kernel waits for their outputs when it has asked for its weights (help.cuh).
// Inputs of gate/up arrive quantised (moe.cu, one block a pick); inputs of down are quantised here when the job changes.
#include "help.cuh"
#include "w4a4.cuh"

#define TEAM 256

template <int CMAX, bool UP>
DEV void experts_body(const u64* __restrict__ records, const float* __restrict__ alpha, const float* __restrict__ in_scale,
                      const int* __restrict__ jobs, const int* __restrict__ list, const int* __restrict__ count,
                      const u8* __restrict__ x, u16* __restrict__ y, int K, int row_groups, int rph, size_t offset, int stages,
                      int divisor, u32* mail, u32* state, int answers) {
  extern __shared__ __align__(128) u8 smem[];
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  const int U = K >> 4, rg_bytes = U * 144, item_bytes = rph * rg_bytes, ipj = (row_groups + rph - 1) / rph;
  const int act = (K + U * 8 + 15) & ~15;               // codes, then (scale, correction) pairs
  const u32 s_bar = smem_u32(smem);                     // full[stages], empty[stages], act
  const u32 s_actbar = s_bar + 16 * stages;
  i64* red = (i64*)(smem + 256);                        // [2][8][CMAX][16]
  const u32 s_act = s_bar + 256 + 2 * 8 * CMAX * 16 * 8;
  u8* const p_act = smem + (s_act - s_bar);
  const u32 s_stage = s_act + ((CMAX * act + 127) & ~127);

  if (tid == 0) {
    for (int i = 0; i < stages; i++) mbar_init(s_bar + 8 * i, 1), mbar_init(s_bar + 8 * (stages + i), 8);
    mbar_init(s_actbar, 1);
    mbar_fence_init();
  }
  __syncthreads();
  // gate/up: jobs come from the kernel before. down: that kernel is gate/up, which lets this one start only after its own
  // wait, so the job list is complete already; only its input h is not.
  if (UP) pdl_wait();
  pdl_launch();
  const int items = *count * ipj;
  const int i0 = (int)((long long)items * blockIdx.x / gridDim.x), i1 = (int)((long long)items * (blockIdx.x + 1) / gridDim.x);

  if (warp == 8) {
    if (lane == 0) {
      int held = -1;
      for (int it = i0; it < i1; it++) {
        const int p = it - i0, slot = p % stages, job = it / ipj, k = it - job * ipj;
        if (p >= stages) mbar_wait(s_bar + 8 * (stages + slot), ((p / stages) - 1) & 1);
        const u32 bytes = min(rph, row_groups - k * rph) * rg_bytes, full = s_bar + 8 * slot;
        const u8* rec = (const u8*)records[jobs[job * 4]];
        if (UP && job != held) {
          // Inputs first: small loads queued behind weights would come last. Their one slot is free when the items of the job
          // before have been consumed.
          if (held >= 0) {
            const int l = p - 1;
            if (l + stages >= p) mbar_wait(s_bar + 8 * (stages + l % stages), (l / stages) & 1);
          }
          held = job;
          const int first = jobs[job * 4 + 1], n = jobs[job * 4 + 2];
          mbar_expect(s_actbar, n * act);
          for (int c = 0; c < n; c++) bulk_load(s_act + c * act, x + (size_t)list[first + c] * act, act, s_actbar);
        }
        mbar_expect(full, bytes);
        bulk_load(s_stage + slot * item_bytes, rec + offset + (size_t)k * item_bytes, bytes, full);
      }
    }
    if (!UP) {
      pdl_wait();
      __syncwarp();
      if (mail) take_answers(mail, state, answers, y, row_groups * 16, lane);
    }
    return;
  }
  if (!UP) pdl_wait();

  const int wpr = 8 / rph, rg = warp / wpr, sub = warp - rg * wpr;
  const int u = lane >> 3, j = lane & 7;
  int held = -1, ordinal = -1, n = 0, mine_pick = 0;
  float al0 = 0, al1 = 0;
  for (int it = i0; it < i1; it++) {
    const int p = it - i0, slot = p % stages, job = it / ipj, k0 = it - job * ipj;
    if (job != held) {
      held = job, ordinal++;
      const int4 jb = *(const int4*)(jobs + job * 4);
      const int expert = jb.x, first = jb.y;
      n = jb.z;
      // What the end of an item needs, asked for before its weights are waited on: lane c keeps pick c.
      mine_pick = list[first + min(lane, n - 1)];
      al0 = alpha[expert * 3 + (UP ? 0 : 2)], al1 = UP ? alpha[expert * 3 + 1] : 0.0f;
      if (UP) {
        mbar_wait(s_actbar, ordinal & 1);
      } else {
        if (ordinal) bar_named(1, TEAM);
        const float gs = in_scale[expert * 3 + 2];
        const int tasks = n * U * 4;
        for (int t0 = tid & ~31; t0 < tasks; t0 += TEAM) {
          const int t = t0 + lane, tt = min(t, tasks - 1);
          const int c = tt / (U * 4), e = tt - c * U * 4;
          const uint2 w = *(const uint2*)((const u16*)x + (size_t)list[first + c] * K + e * 4);
          const float v[4] = {bf_lo(w.x), bf_hi(w.x), bf_lo(w.y), bf_hi(w.y)};
          u32 codes;
          int sc, corr;
          quant_block(v, gs, divisor, codes, sc, corr);
          if (t < tasks) {
            *(u32*)(p_act + c * act + e * 4) = codes;
            if ((e & 3) == 0) *(int2*)(p_act + c * act + K + (e >> 2) * 8) = make_int2(sc, corr);
          }
        }
        bar_named(1, TEAM);
      }
    }
    mbar_wait(s_bar + 8 * slot, (p / stages) & 1);
    i64* mine = red + ((p & 1) * 8 + warp) * CMAX * 16;
    const bool row_live = k0 * rph + rg < row_groups;

    auto run = [&](auto cc) {
      constexpr int C = decltype(cc)::value;
      i64 s0[C], s1[C];
#pragma unroll
      for (int c = 0; c < C; c++) s0[c] = s1[c] = 0;
      if (row_live) {
        int unit = sub * 4 + u;
        u32 a = s_stage + slot * item_bytes + rg * rg_bytes + unit * 144 + 4 * j, b = a - 3 * j;
        u32 xa = s_act + unit * 16, xm = s_act + K + unit * 8;
        // Lanes leave the loop by themselves where U is no multiple of four; they meet again before the shuffles.
#pragma unroll 1
        for (; unit < U; unit += wpr * 4, a += wpr * 576, b += wpr * 576, xa += wpr * 64, xm += wpr * 32) {
          {
            const u32 w[4] = {lds32o<0>(a), lds32o<32>(a), lds32o<64>(a), lds32o<96>(a)};
            const int w0 = e4m3_int(lds8o<128>(b)), w1 = e4m3_int(lds8o<136>(b));
            u32 r0[4], r1[4];
#pragma unroll
            for (int q = 0; q < 4; q++) expand_pair(w[q], r0[q], r1[q]);
#pragma unroll
            for (int c = 0; c < C; c++) {
              if (C > 2 && c >= n) break;
              const uint4 v = lds128(xa + c * act);
              const uint2 m = lds64(xm + c * act);
              int t0 = (int)m.y, t1 = (int)m.y;
              t0 = dp4a_us(r0[0], v.x, t0), t1 = dp4a_us(r1[0], v.x, t1);
              t0 = dp4a_us(r0[1], v.y, t0), t1 = dp4a_us(r1[1], v.y, t1);
              t0 = dp4a_us(r0[2], v.z, t0), t1 = dp4a_us(r1[2], v.z, t1);
              t0 = dp4a_us(r0[3], v.w, t0), t1 = dp4a_us(r1[3], v.w, t1);
              s0[c] += (i64)(t0 * (int)m.x) * w0;
              s1[c] += (i64)(t1 * (int)m.x) * w1;
            }
          }
        }
      }
      __syncwarp();
#pragma unroll
      for (int c = 0; c < C; c++) {
        if (C > 2 && c >= n) break;
        s0[c] += __shfl_xor_sync(~0u, s0[c], 8), s1[c] += __shfl_xor_sync(~0u, s1[c], 8);
        s0[c] += __shfl_xor_sync(~0u, s0[c], 16), s1[c] += __shfl_xor_sync(~0u, s1[c], 16);
        if (u == 0) mine[c * 16 + j] = s0[c], mine[c * 16 + j + 8] = s1[c];
      }
    };
    struct C1 { enum { value = 1 }; };
    struct C2 { enum { value = 2 }; };
    struct C4 { enum { value = 4 }; };
    struct C8 { enum { value = 8 }; };
    if (CMAX == 1 || n <= 1) run(C1{});
    else if (CMAX == 2 || n <= 2) run(C2{});
    else if (CMAX == 4 || n <= 4) run(C4{});
    else if (CMAX >= 8) run(C8{});

    __syncwarp();
    if (lane == 0) mbar_arrive(s_bar + 8 * (stages + slot));
    bar_named(2, TEAM);
    const int total = min(rph, row_groups - k0 * rph) * 16 * n;
    for (int o0 = warp * 32; o0 < total; o0 += TEAM) {
      const int o = min(o0 + lane, total - 1), row = o & 15, rest = o >> 4, r = CMAX == 1 ? rest : rest / n, c = CMAX == 1 ? 0 : rest - r * n;
      const i64* src = red + ((p & 1) * 8 + r * wpr) * CMAX * 16 + c * 16 + row;
      i64 s = 0;
      for (int k = 0; k < wpr; k++) s += src[k * CMAX * 16];
      const int pick = __shfl_sync(~0u, mine_pick, c), g = k0 * rph + r;
      const float v = rbf(finish_sum(s, UP && (row & 1) ? al1 : al0, divisor));
      if (UP) {
        const float up = __shfl_xor_sync(~0u, v, 1);
        if (!(row & 1) && o0 + lane < total) y[(size_t)pick * (row_groups * 8) + g * 8 + (row >> 1)] = swiglu_c(v, up);
      } else if (o0 + lane < total) {
        y[(size_t)pick * (row_groups * 16) + g * 16 + row] = f2bf(v);
      }
    }
  }
}

#define ENTRY(NAME, CMAX, UP, PER_SM)                                                                                      \
  extern "C" __global__ void __launch_bounds__(TEAM + 32, PER_SM)                                                          \
  NAME(const u64* records, const float* alpha, const float* in_scale, const int* jobs, const int* list, const int* count,  \
       const u8* x, u16* y, int K, int row_groups, int rph, u64 offset, int stages, int divisor, u32* mail,                \
       u32* state, int answers) {                                                                                     \
    experts_body<CMAX, UP>(records, alpha, in_scale, jobs, list, count, x, y, K, row_groups, rph, offset, stages, divisor,  \
                           mail, state, answers);                                                                           \
  }
ENTRY(w4a4_up_1, 1, true, 4)
ENTRY(w4a4_up_4, 4, true, 3)
ENTRY(w4a4_up_8, 8, true, 2)
ENTRY(w4a4_down_1, 1, false, 4)
ENTRY(w4a4_down_4, 4, false, 3)
ENTRY(w4a4_down_8, 8, false, 2)

// exp_c of all BF16 inputs, and SwiGLU of (g, u): for exhaustive comparison with the CPU.
extern "C" __global__ void exp_table(float* out) {
  pdl_wait();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < 65536) out[i] = exp_c(bf2f((u16)i));
}
extern "C" __global__ void swiglu_table(const u16* g, const u16* u, u16* out, int n) {
  pdl_wait();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = swiglu_c(bf2f(g[i]), bf2f(u[i]));
}
// All E4M3 quantiser words: out[i] = e4m3_encode(in[i]).
extern "C" __global__ void e4m3_table(const float* in, u8* out, int n) {
  pdl_wait();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = (u8)e4m3_encode(in[i]);
}
