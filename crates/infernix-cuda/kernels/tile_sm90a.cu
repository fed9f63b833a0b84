// Prefill products with wgmma: sm_90a alone.
#define TILE_WGMMA
#include "tile.cuh"

TILE_ENTRY(tilew_bf16, F_BF16)
TILE_ENTRY(tilew_parts, F_BF16, true)
TILE_ENTRY(tilew_q8, F_Q8)
TILE_ENTRY(tilew_q4, F_Q4)
TILE_ENTRY(tilew_q5, F_Q5)
TILE_ENTRY(tilew_q6, F_Q6)
TILE_ENTRY(tilew_nvfp4, F_NVFP4)
TILE_ENTRY(tilew_fp8, F_FP8)
TILE_ENTRY(tilew_fp8b, F_FP8B)
TILE_ENTRY(tilew_mxfp8, F_MXFP8)
TILE_ENTRY(tilew_rg16, F_RG16)
