// Exact W4A4 experts for decode and verify calls, from rg16 records as stored. Two kernels: gate/up + SwiGLU, down.
//
// Work is cut into items: `rph` consecutive row groups (16 rows) of one job. A CTA owns a contiguous run of items and takes
// them two at a time; a stage of the ring holds the two, each one bulk copy. Eight warps work on each item: warps
// split its row groups, then K. Sums are exact integers, so no cut of the work can change a bit.
#include "w4a4.cuh"

#define CONSUMERS 512

template <int CMAX, bool UP>
DEV void experts_body(const u64* __restrict__ records, const float* __restrict__ alpha, const float* __restrict__ in_scale,
                      const int* __restrict__ jobs, const int* __restrict__ list, const int* __restrict__ count,
                      const u16* __restrict__ x, u16* __restrict__ y, int K, int row_groups, int rph, int top, size_t offset,
                      int stages, int divisor) {
  extern __shared__ __align__(128) u8 smem[];
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  const int U = K >> 4, rg_bytes = U * 144, half_bytes = rph * rg_bytes, ipj = (row_groups + rph - 1) / rph;
  const int act_bytes = CMAX * (K + U * 8);
  const u32 s_bar = smem_u32(smem);
  i64* red = (i64*)(smem + 256);                              // [2][16][CMAX][16]
  const u32 s_act = s_bar + 256 + 2 * 16 * CMAX * 16 * 8;     // [2][act_bytes]
  const u32 s_stage = s_act + 2 * ((act_bytes + 127) & ~127);
  const u32 act_stride = (act_bytes + 127) & ~127;

  if (tid == 0) {
    for (int i = 0; i < stages; i++) mbar_init(s_bar + 8 * i, 1), mbar_init(s_bar + 8 * (stages + i), 16);
    mbar_fence_init();
  }
  __syncthreads();
  // gate/up: jobs come from the kernel before. down: that kernel is gate/up, which lets this one start only after its own
  // wait, so the job list is complete already; only its input h is not.
  if (UP) pdl_wait();
  pdl_launch();
  const int items = *count * ipj;
  const int i0 = (int)((long long)items * blockIdx.x / gridDim.x), i1 = (int)((long long)items * (blockIdx.x + 1) / gridDim.x);
  const int pairs = (i1 - i0 + 1) >> 1;

  if (warp == 16) {
    if (lane == 0) {
      for (int p = 0; p < pairs; p++) {
        const int slot = p % stages;
        if (p >= stages) mbar_wait(s_bar + 8 * (stages + slot), ((p / stages) - 1) & 1);
        u32 bytes[2] = {0, 0};
        const u8* src[2] = {0, 0};
        for (int h = 0; h < 2; h++) {
          const int it = i0 + 2 * p + h;
          if (it < i1) {
            const int job = it / ipj, k = it - job * ipj;
            bytes[h] = min(rph, row_groups - k * rph) * rg_bytes;
            src[h] = (const u8*)records[jobs[job * 4]] + offset + (size_t)k * half_bytes;
          }
        }
        mbar_expect(s_bar + 8 * slot, bytes[0] + bytes[1]);
        for (int h = 0; h < 2; h++)
          if (bytes[h]) bulk_load(s_stage + (2 * slot + h) * half_bytes, src[h], bytes[h], s_bar + 8 * slot);
      }
    }
    if (!UP) pdl_wait();
    return;
  }
  if (!UP) pdl_wait();

  const int half = warp >> 3, wh = warp & 7, wpr = 8 / rph, rg = wh / wpr, sub = wh - rg * wpr;
  const int u = lane >> 3, j = lane & 7;
  int held0 = -1, held1 = -1;
  for (int p = 0; p < pairs; p++) {
    // Activations of the pair's jobs (consecutive, so two slots by parity suffice).
    bool fresh = false;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int it = i0 + 2 * p + h;
      if (it < i1) {
        const int job = it / ipj;
        if ((job & 1 ? held1 : held0) != job) {
          if (!fresh) bar_named(1, CONSUMERS);
          fresh = true;
          if (job & 1) held1 = job;
          else held0 = job;
          const int first = jobs[job * 4 + 1], n = jobs[job * 4 + 2];
          const float gs = in_scale[jobs[job * 4] * 3 + (UP ? 0 : 2)];
          u8* act = smem + (s_act - s_bar) + (job & 1) * act_stride;
          const int tasks = n * U * 4;
          for (int t0 = tid & ~31; t0 < tasks; t0 += CONSUMERS) {
            const int t = t0 + lane, tt = min(t, tasks - 1);
            const int c = tt / (U * 4), e = tt - c * U * 4;
            const int pick = list[first + c];
            const uint2 w = *(const uint2*)(x + (size_t)(UP ? pick / top : pick) * K + e * 4);
            const float v[4] = {bf_lo(w.x), bf_hi(w.x), bf_lo(w.y), bf_hi(w.y)};
            u32 codes;
            int sc, corr;
            quant_block(v, gs, divisor, codes, sc, corr);
            if (t < tasks) {
              *(u32*)(act + c * K + e * 4) = codes;
              if ((e & 3) == 0) *(int2*)(act + CMAX * K + (c * U + (e >> 2)) * 8) = make_int2(sc, corr);
            }
          }
        }
      }
    }
    if (fresh) bar_named(1, CONSUMERS);

    const int slot = p % stages, it = i0 + 2 * p + half;
    const bool live = it < i1;
    const int job = live ? it / ipj : 0, k0 = live ? it - job * ipj : 0;
    const int first = live ? jobs[job * 4 + 1] : 0, n = live ? jobs[job * 4 + 2] : 0, expert = live ? jobs[job * 4] : 0;
    mbar_wait(s_bar + 8 * slot, (p / stages) & 1);
    i64* mine = red + ((p & 1) * 16 + warp) * CMAX * 16;
    const bool row_live = live && k0 * rph + rg < row_groups;

    auto run = [&](auto cc) {
      constexpr int C = decltype(cc)::value;
      i64 s0[C], s1[C];
#pragma unroll
      for (int c = 0; c < C; c++) s0[c] = s1[c] = 0;
      if (row_live) {
        const u32 base = s_stage + (2 * slot + half) * half_bytes + rg * rg_bytes;
        const u32 act = s_act + (job & 1) * act_stride;
        const int steps = (U + 3) >> 2;
#pragma unroll(C > 2 ? 1 : 2)
        for (int st = sub; st < steps; st += wpr) {
          const int unit = st * 4 + u;
          if (unit < U) {
            const u32 a = base + unit * 144 + 4 * j;
            u32 w[4];
#pragma unroll
            for (int q = 0; q < 4; q++) w[q] = lds32(a + 32 * q);
            const int w0 = e4m3_int(lds8(a - 3 * j + 128)), w1 = e4m3_int(lds8(a - 3 * j + 136));
            u32 r0[4], r1[4];
#pragma unroll
            for (int q = 0; q < 4; q++) expand_pair(w[q], r0[q], r1[q]);
#pragma unroll
            for (int c = 0; c < C; c++) {
              const uint4 v = lds128(act + c * K + unit * 16);
              const uint2 m = lds64(act + CMAX * K + (c * U + unit) * 8);
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
#pragma unroll
      for (int c = 0; c < C; c++) {
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
    if (half) bar_named(3, 256);
    else bar_named(2, 256);
    const int total = live ? min(rph, row_groups - k0 * rph) * 16 * n : 0;
    for (int o0 = wh * 32; o0 < total; o0 += 256) {
      const int o = min(o0 + lane, total - 1), row = o & 15, rest = o >> 4, r = rest / n, c = rest - r * n;
      const i64* src = red + ((p & 1) * 16 + half * 8 + r * wpr) * CMAX * 16 + c * 16 + row;
      i64 s = 0;
      for (int k = 0; k < wpr; k++) s += src[k * CMAX * 16];
      const int pick = list[first + c], g = k0 * rph + r;
      const float v = rbf(finish_sum(s, alpha[expert * 3 + (UP ? (row & 1) : 2)], divisor));
      if (UP) {
        const float up = __shfl_xor_sync(~0u, v, 1);
        if (!(row & 1) && o0 + lane < total) y[(size_t)pick * (row_groups * 8) + g * 8 + (row >> 1)] = swiglu_c(v, up);
      } else if (o0 + lane < total) {
        y[(size_t)pick * (row_groups * 16) + g * 16 + row] = f2bf(v);
      }
    }
  }
}

#define ENTRY(NAME, CMAX, UP)                                                                                              \
  extern "C" __global__ void __launch_bounds__(CONSUMERS + 32, 1)                                                          \
  NAME(const u64* records, const float* alpha, const float* in_scale, const int* jobs, const int* list, const int* count,  \
       const u16* x, u16* y, int K, int row_groups, int rph, int top, u64 offset, int stages, int divisor) {               \
    experts_body<CMAX, UP>(records, alpha, in_scale, jobs, list, count, x, y, K, row_groups, rph, top, offset, stages, divisor); \
  }
ENTRY(w4a4_up_1, 1, true)
ENTRY(w4a4_up_4, 4, true)
ENTRY(w4a4_up_8, 8, true)
ENTRY(w4a4_down_1, 1, false)
ENTRY(w4a4_down_4, 4, false)
ENTRY(w4a4_down_8, 8, false)

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
