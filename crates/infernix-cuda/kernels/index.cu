// Appends raw index keys, see index.cuh. grid (rows), 128 threads.
#include "index.cuh"

extern "C" __global__ void __launch_bounds__(128) index_append(const __grid_constant__ IndexArgs a) {
  pdl_launch();
  pdl_wait();
  index_row(a, blockIdx.x);
}
