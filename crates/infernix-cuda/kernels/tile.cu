// Prefill products with mma.sync: every target.
#include "tile.cuh"

TILE_ENTRY(tile_bf16, F_BF16)
TILE_ENTRY(tile_parts, F_BF16, true)
TILE_ENTRY(tile_q8, F_Q8)
TILE_ENTRY(tile_q4, F_Q4)
TILE_ENTRY(tile_q5, F_Q5)
TILE_ENTRY(tile_q6, F_Q6)
TILE_ENTRY(tile_nvfp4, F_NVFP4)
TILE_ENTRY(tile_fp8, F_FP8)
TILE_ENTRY(tile_fp8b, F_FP8B)
TILE_ENTRY(tile_mxfp8, F_MXFP8)
TILE_ENTRY(tile_rg16, F_RG16)
