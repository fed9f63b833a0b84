// Hyper-connection mix: N = per-stream norm of R, m = silu(W_down N / 4), x = mean_s sigma(W_up m)_s N_s,
// b = 2 sigma(W_inject N / 4). Two kernels.
//
// hc_down: block (tile of 16 rows, stream s) takes exactly its stream's 2560 k, so the split of K is the stream and the
// norm needs no other pass. Weights sit in registers before the wait for the previous kernel. Tile index
// rank/16 is the inject matrix (4 rows). With `y`, the streams are first injected: R_out = bf16(fma(b, y, R)), which hc_up then reads.
// hc_up: block = 16 outputs of all four streams; adds the four partial sums in stream order, silu, mma, sigma, mean.
#include "gemv_core.cuh"

#define STREAMS 4
#define MAXS 5  // steps of 32 k a warp holds: H <= 2560

DEV float hc_norm(float v, float rstd, float w) { return rbf(v * rstd * (1.0f + w)); }

// bf16(fma(b, y, R)) of two values.
DEV u32 injected(u32 r, u32 y, float b) { return pack_bf(fmaf(b, bf_lo(y), bf_lo(r)), fmaf(b, bf_hi(y), bf_hi(r))); }

template <int F> DEV void load_step(Raw<F>& r, const u8* row, int s, int q, const u8* scale_row) {
  if (F == F_BF16) {
    uint4 v = __ldg((const uint4*)(row + s * 64 + q * 16));
    r.w[0] = v.x, r.w[1] = v.y, r.w[Fmt<F>::LANE_BYTES / 4 - 2] = v.z, r.w[Fmt<F>::LANE_BYTES / 4 - 1] = v.w;
  } else {
    uint2 v = __ldg((const uint2*)(row + s * 32 + q * 8));
    r.w[0] = v.x, r.w[1] = v.y;
    r.extra = __ldg((const u16*)(scale_row + 2 * s));
  }
}

template <int F>
DEV void hc_down_body(const u8* __restrict__ wd, const u8* __restrict__ sd, const u8* __restrict__ wi, const u8* __restrict__ si,
                      const u16* __restrict__ R, const u16* __restrict__ nw, float eps, int H, int rank, int cols,
                      int code_pitch, int scale_pitch, float* __restrict__ part, float* __restrict__ rstd_out, const u16* __restrict__ y,
                      const float* __restrict__ b_in, u16* __restrict__ R_out) {
  extern __shared__ __align__(128) u8 smem[];
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, q = lane & 3;
  const int tile = blockIdx.x, s = blockIdx.y, nsteps = H / 32;
  const bool inject = tile * 16 >= rank;
  const int rows = inject ? STREAMS : min(16, rank - tile * 16);
  const u8* W = inject ? wi : wd;
  const u8* S = inject ? si : sd;
  const int base = inject ? 0 : tile * 16;
  const int koff = s * H;
  Raw<F> a[MAXS], b[MAXS];
#pragma unroll
  for (int i = 0; i < MAXS; i++) {
    const int st = warp + 16 * i;
    for (int w = 0; w < Fmt<F>::LANE_BYTES / 4; w++) a[i].w[w] = b[i].w[w] = 0;
    a[i].extra = b[i].extra = 0;
    if (st < nsteps) {
      const int gs = koff / 32 + st;
      if (g < rows) load_step<F>(a[i], W + (size_t)(base + g) * code_pitch, gs, q, S + (size_t)(base + g) * scale_pitch);
      if (g + 8 < rows) load_step<F>(b[i], W + (size_t)(base + g + 8) * code_pitch, gs, q, S + (size_t)(base + g + 8) * scale_pitch);
    }
  }
  const int xp = ((H * 2 + 127) & ~127) + 64;
  u8* xs = smem;                                   // [8][xp]
  float* red = (float*)(smem + 8 * xp);            // [16][160]
  float* ssq = red + 16 * 160;                     // [16][8]
  const int P = rank + 8, per = H / 8;
  uint4 nv = make_uint4(0, 0, 0, 0);
  if (tid < per) nv = __ldg((const uint4*)(nw + koff + tid * 8));
  pdl_launch();
  pdl_wait();
  for (int c0 = 0; c0 < cols; c0 += 8) {
    const int nc = min(8, cols - c0);
    uint4 v[8];
#pragma unroll
    for (int c = 0; c < 8; c++) {
      v[c] = make_uint4(0, 0, 0, 0);
      if (c < nc && tid < per) v[c] = *(const uint4*)(R + (size_t)(c0 + c) * STREAMS * H + koff + tid * 8);
    }
    // What the block before adds to the streams is added here, by every tile for itself; one of them stores the new residual.
    if (y) {
#pragma unroll
      for (int c = 0; c < 8; c++) {
        if (c < nc && tid < per) {
          const float f = b_in[(c0 + c) * STREAMS + s];
          const uint4 add = *(const uint4*)(y + (size_t)(c0 + c) * H + tid * 8);
          v[c] = make_uint4(injected(v[c].x, add.x, f), injected(v[c].y, add.y, f), injected(v[c].z, add.z, f), injected(v[c].w, add.w, f));
          if (tile == 0) *(uint4*)(R_out + (size_t)(c0 + c) * STREAMS * H + koff + tid * 8) = v[c];
        }
      }
    }
#pragma unroll
    for (int c = 0; c < 8; c++) {
      if (c < nc) {
        float t = 0;
        const u32 w[4] = {v[c].x, v[c].y, v[c].z, v[c].w};
#pragma unroll
        for (int i = 0; i < 4; i++) t = fmaf(bf_lo(w[i]), bf_lo(w[i]), t), t = fmaf(bf_hi(w[i]), bf_hi(w[i]), t);
        t = warp_sum(t);
        if (lane == 0) ssq[warp * 8 + c] = t;
      }
    }
    __syncthreads();
#pragma unroll
    for (int c = 0; c < 8; c++) {
      if (c < nc) {
        float t = 0;
        for (int w = 0; w < 16; w++) t += ssq[w * 8 + c];
        const float rs = 1.0f / sqrtf(t / (float)H + eps);
        if (tid == 0 && tile == 0) rstd_out[s * cols + c0 + c] = rs;
        if (tid < per) {
          const u32 w[4] = {v[c].x, v[c].y, v[c].z, v[c].w}, n[4] = {nv.x, nv.y, nv.z, nv.w};
          u32 o[4];
#pragma unroll
          for (int i = 0; i < 4; i++) o[i] = pack_bf(hc_norm(bf_lo(w[i]), rs, bf_lo(n[i])), hc_norm(bf_hi(w[i]), rs, bf_hi(n[i])));
          *(uint4*)(xs + c * xp + tid * 16) = make_uint4(o[0], o[1], o[2], o[3]);
        }
      }
    }
    __syncthreads();
    float acc[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < MAXS; i++) {
      const int st = warp + 16 * i;
      if (st < nsteps) {
        u32 af[4], bfr[4], xf[4];
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
        // Expanded codes must not be kept for the next columns: ptxas of this target spills to do so.
#pragma unroll
        for (int w = 0; w < Fmt<F>::LANE_BYTES / 4; w++) asm volatile("" : "+r"(a[i].w[w]), "+r"(b[i].w[w]));
        asm volatile("" : "+r"(a[i].extra), "+r"(b[i].extra));
#endif
        expand<F>(a[i], af);
        expand<F>(b[i], bfr);
        uint4 x = make_uint4(0, 0, 0, 0);
        if (g < nc) x = *(const uint4*)(xs + g * xp + st * 64 + q * 16);
        order_x<F>(x, xf);
        step_mma<F>(acc, af, bfr, xf, h2f(a[i].extra), h2f(b[i].extra));
      }
    }
    float* p = red + warp * 160 + 2 * q * 20 + g;
    p[0] = acc[0], p[20] = acc[1], p[8] = acc[2], p[28] = acc[3];
    __syncthreads();
    if (tid < 128) {
      const int col = tid >> 4, r = tid & 15;
      if (col < nc && r < rows) {
        float t = red[col * 20 + r];
        for (int w = 1; w < 16; w++) t += red[w * 160 + col * 20 + r];
        part[((size_t)s * cols + c0 + col) * P + (inject ? rank : tile * 16) + r] = t;
      }
    }
    __syncthreads();
  }
}

template <int F>
DEV void hc_up_body(const u8* __restrict__ wu, const u8* __restrict__ su, const float* __restrict__ part, const float* __restrict__ rstd,
                    const u16* __restrict__ R, const u16* __restrict__ nw, int H, int rank, int cols, int code_pitch,
                    int scale_pitch, int has_inject, u16* __restrict__ x_out, float* __restrict__ b_out) {
  extern __shared__ __align__(128) u8 smem[];
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, q = lane & 3;
  const int s = warp >> 1, half = warp & 1, nsteps = (rank + 31) / 32;
  const int row = blockIdx.x * 16;
  Raw<F> a[MAXS], b[MAXS];
#pragma unroll
  for (int i = 0; i < MAXS; i++) {
    const int st = half + 2 * i;
    for (int w = 0; w < Fmt<F>::LANE_BYTES / 4; w++) a[i].w[w] = b[i].w[w] = 0;
    a[i].extra = b[i].extra = 0;
    if (st < nsteps) {
      const size_t r0 = (size_t)s * H + row + g;
      if (row + g < H) load_step<F>(a[i], wu + r0 * code_pitch, st, q, su + r0 * scale_pitch);
      if (row + g + 8 < H) load_step<F>(b[i], wu + (r0 + 8) * code_pitch, st, q, su + (r0 + 8) * scale_pitch);
    }
  }
  const int kp = nsteps * 32, xp = ((kp * 2 + 127) & ~127) + 64;
  u8* xs = smem;                          // m [8][xp]
  float* red = (float*)(smem + 8 * xp);   // [8][160]
  const int col = tid >> 4, r = tid & 15;  // of the output that a thread finishes
  float nws[STREAMS];
#pragma unroll
  for (int z = 0; z < STREAMS; z++) nws[z] = tid < 128 && row + r < H ? bf2f(nw[z * H + row + r]) : 0.0f;
  pdl_launch();
  pdl_wait();
  const int P = rank + 8;
  for (int c0 = 0; c0 < cols; c0 += 8) {
    const int nc = min(8, cols - c0);
    // What the end needs, asked for before the sums.
    float norms[STREAMS] = {0, 0, 0, 0};
    if (tid < 128 && col < nc && row + r < H) {
#pragma unroll
      for (int z = 0; z < STREAMS; z++)
        norms[z] = hc_norm(bf2f(R[(size_t)(c0 + col) * STREAMS * H + z * H + row + r]), rstd[z * cols + c0 + col], nws[z]);
    }
    for (int i = tid; i < nc * kp; i += blockDim.x) {
      const int c = i / kp, k = i - c * kp;
      float t = 0;
      if (k < rank) {
        t = part[((size_t)0 * cols + c0 + c) * P + k];
        for (int z = 1; z < STREAMS; z++) t += part[((size_t)z * cols + c0 + c) * P + k];
        t = siluf(t * 0.25f);
      }
      *(u16*)(xs + c * xp + k * 2) = f2bf(t);
    }
    __syncthreads();
    float acc[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < MAXS; i++) {
      const int st = half + 2 * i;
      if (st < nsteps) {
        u32 af[4], bfr[4], xf[4];
        expand<F>(a[i], af);
        expand<F>(b[i], bfr);
        uint4 x = make_uint4(0, 0, 0, 0);
        if (g < nc) x = *(const uint4*)(xs + g * xp + st * 64 + q * 16);
        order_x<F>(x, xf);
        step_mma<F>(acc, af, bfr, xf, h2f(a[i].extra), h2f(b[i].extra));
      }
    }
    float* p = red + warp * 160 + 2 * q * 20 + g;
    p[0] = acc[0], p[20] = acc[1], p[8] = acc[2], p[28] = acc[3];
    __syncthreads();
    if (tid < 128) {
      if (col < nc && row + r < H) {
        float t = 0;
#pragma unroll
        for (int z = 0; z < STREAMS; z++) {
          const float gz = red[2 * z * 160 + col * 20 + r] + red[(2 * z + 1) * 160 + col * 20 + r];
          t = fmaf(sigmoidf(gz), norms[z], t);
        }
        x_out[(size_t)(c0 + col) * H + row + r] = f2bf(t * 0.25f);
      }
    }
    if (has_inject && blockIdx.x == 0 && tid >= 128 && tid < 128 + 4 * nc) {
      const int c = (tid - 128) >> 2, i = tid & 3;
      float t = part[((size_t)0 * cols + c0 + c) * P + rank + i];
      for (int z = 1; z < STREAMS; z++) t += part[((size_t)z * cols + c0 + c) * P + rank + i];
      b_out[(c0 + c) * STREAMS + i] = 2.0f * sigmoidf(t * 0.25f);
    }
    __syncthreads();
  }
}

#define DOWN(NAME, F)                                                                                                     \
  extern "C" __global__ void __launch_bounds__(512, 1)                                                                    \
  NAME(const u8* wd, const u8* sd, const u8* wi, const u8* si, const u16* R, const u16* nw, float eps, int H, int rank,   \
       int cols, int code_pitch, int scale_pitch, float* part, float* rstd, const u16* y, const float* b, u16* R_out) {   \
    hc_down_body<F>(wd, sd, wi, si, R, nw, eps, H, rank, cols, code_pitch, scale_pitch, part, rstd, y, b, R_out);         \
  }
#define UP(NAME, F)                                                                                                       \
  extern "C" __global__ void __launch_bounds__(256, 2)                                                                    \
  NAME(const u8* wu, const u8* su, const float* part, const float* rstd, const u16* R, const u16* nw, int H, int rank,    \
       int cols, int code_pitch, int scale_pitch, int has_inject, u16* x_out, float* b_out) {                             \
    hc_up_body<F>(wu, su, part, rstd, R, nw, H, rank, cols, code_pitch, scale_pitch, has_inject, x_out, b_out);           \
  }
DOWN(hc_down_bf16, F_BF16)
DOWN(hc_down_q8, F_Q8)
UP(hc_up_bf16, F_BF16)
UP(hc_up_q8, F_Q8)
