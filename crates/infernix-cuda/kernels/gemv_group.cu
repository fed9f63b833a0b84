// Decode linears that share their input, one launch: up to eight matrices of one format and of BF16, 1-16 columns. An output's bits
// are those of a launch of its own (gemv.cu): the same steps, warps and order of sums.
//
// CTAs before `split` take the tiles of side 0 (format F), the others those of side 1 (BF16). What makes the input may be done here:
// SwiGLU of two rows, or the gated norm of heads; and what is made of the output: the sum of a token's experts, shared expert last.
#include "gemv_group.cuh"

template <int F, int NT> DEV void group_kernel(const GemvGroup& a) {
  if ((int)blockIdx.x < a.split) group_body<F, NT>(a, a.side[0], blockIdx.x, a.split);
  else group_body<F_BF16, NT>(a, a.side[1], (int)blockIdx.x - a.split, (int)gridDim.x - a.split);
}

// Where shared memory holds one block of whole rows, a second one has nothing to wait for.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
#define PER_SM 1
#else
#define PER_SM 2
#endif
#define ENTRY(NAME, F)                                                                                                        \
  extern "C" __global__ void __launch_bounds__(CONSUMERS + 32, PER_SM) NAME##_n1(const __grid_constant__ GemvGroup a) { group_kernel<F, 1>(a); } \
  extern "C" __global__ void __launch_bounds__(CONSUMERS + 32, 1) NAME##_n2(const __grid_constant__ GemvGroup a) { group_kernel<F, 2>(a); }
ENTRY(group_q8, F_Q8)
ENTRY(group_q4, F_Q4)
ENTRY(group_fp8, F_FP8)
