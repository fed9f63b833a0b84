// Prefill W4A4 experts with block-scaled FP4 products: sm_120a alone. Not run on hardware: its data path is held to the exact
// arithmetic by a model on the CPU (oracle/fp4.rs).
#define TILE_FP4
#include "tile.cuh"

TILE_ENTRY(tile4_rg16, F_RG16)
