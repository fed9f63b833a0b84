// Shared device helpers: mbarrier and bulk copies, mma, exact conversions.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

typedef uint32_t u32;
typedef uint64_t u64;
typedef uint8_t u8;
typedef uint16_t u16;
typedef int64_t i64;
typedef __nv_bfloat16 bf16;

#define DEV __device__ __forceinline__

DEV u32 smem_u32(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Programmatic dependent launch. Every kernel executes the wait: one that did not would let its successor overtake
// the predecessor of both.
DEV void pdl_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEV void pdl_launch() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

DEV void mbar_init(u32 bar, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory"); }
DEV void mbar_fence_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEV void mbar_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
DEV void mbar_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }
DEV void mbar_wait(u32 bar, u32 parity) {
  asm volatile(
      "{\n .reg .pred p;\n"
      "W%=:\n mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      " @p bra D%=;\n bra W%=;\nD%=:\n}" ::"r"(bar), "r"(parity) : "memory");
}
// Bulk copy global -> shared; addresses and size multiples of 16.
DEV void bulk_load(u32 dst, const void* src, u32 bytes, u32 bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst),
               "l"(src), "r"(bytes), "r"(bar) : "memory");
}
// Copies of a block's rows, `each` bytes from `p` and from `p2` (or null), to shared memory. By all threads, once a block.
DEV void rows_to_shared(u8* smem, const u8* p, const u8* p2, u32 each) {
  __shared__ __align__(8) u64 bar;
  const u32 b = smem_u32(&bar);
  if (threadIdx.x == 0) {
    mbar_init(b, 1);
    mbar_fence_init();
    mbar_expect(b, p2 ? 2 * each : each);
    bulk_load(smem_u32(smem), p, each, b);
    if (p2) bulk_load(smem_u32(smem) + each, p2, each, b);
  }
  __syncthreads();
  mbar_wait(b, 0);
}
// Of global memory, or of shared memory.
template <bool SHARED, typename T> DEV T stored_at(const u8* p) { return SHARED ? *(const T*)p : __ldg((const T*)p); }
DEV void cp_async16(u32 dst, const void* src) { asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory"); }
// Copies `n` (0 or 16) bytes and zero-fills the rest.
DEV void cp_async16z(u32 dst, const void* src, u32 n) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(n) : "memory");
}
DEV void cp_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> DEV void cp_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

DEV void bar_named(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

DEV uint4 lds128(u32 a) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a));
  return v;
}
DEV uint2 lds64(u32 a) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(a));
  return v;
}
DEV u32 lds32(u32 a) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(a));
  return v;
}
// With a constant offset, which the instruction holds.
template <int O> DEV u32 lds32o(u32 a) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1+%2];" : "=r"(v) : "r"(a), "n"(O));
  return v;
}
template <int O> DEV u32 lds8o(u32 a) {
  u32 v;
  asm volatile("ld.shared.u8 %0, [%1+%2];" : "=r"(v) : "r"(a), "n"(O));
  return v;
}
DEV u32 lds16(u32 a) {
  u16 v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(a));
  return v;
}
DEV u32 lds8(u32 a) {
  u32 v;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(a));
  return v;
}

// D += A B, bf16, m16n8k16. A: a0 = (row g, k 2q..), a1 = (row g+8, same k), a2 = (row g, k 2q+8..), a3 = (g+8).
DEV void mma16816(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

DEV u32 hsub2(u32 a, u32 b) {
  __nv_bfloat162 r = __hsub2(*(__nv_bfloat162*)&a, *(__nv_bfloat162*)&b);
  return *(u32*)&r;
}
DEV u32 hmul2(u32 a, u32 b) {
  u32 r;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
DEV float bf_lo(u32 v) { return __uint_as_float(v << 16); }
DEV float bf_hi(u32 v) { return __uint_as_float(v & 0xffff0000u); }
DEV float bf2f(u16 v) { return __uint_as_float((u32)v << 16); }
DEV u16 f2bf(float f) { return __bfloat16_as_ushort(__float2bfloat16_rn(f)); }
DEV u32 pack_bf(float lo, float hi) { return (u32)f2bf(lo) | ((u32)f2bf(hi) << 16); }
DEV float rbf(float f) { return bf2f(f2bf(f)); }
DEV float h2f(u32 bits) { return __half2float(__ushort_as_half((u16)bits)); }
// Exact value of a non-negative E4M3 byte, times 2^-8 (FP16 has the bias 8 higher; subnormals come out right).
DEV float e4m3_m8(u32 b) { return __half2float(__ushort_as_half((u16)(b << 7))); }

DEV float sigmoidf(float x) { return 1.0f / (1.0f + expf(-x)); }
DEV float siluf(float x) { return x / (1.0f + expf(-x)); }

template <typename T> DEV T warp_sum(T v) {
#pragma unroll
  for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
  return v;
}
DEV float warp_max(float v) {
#pragma unroll
  for (int o = 16; o; o >>= 1) v = fmaxf(v, __shfl_xor_sync(~0u, v, o));
  return v;
}
