// Sums over the last dimension: a block a row.
//
//   y = sum x
//
// Step 1: neighbouring threads read neighbouring packs of 16 bytes, several of them before the first
//         is waited for. Each byte is read once and needs one addition: memory is the limit.
// Step 2: a thread has a sum for each place in a pack, so that no addition waits for the one before.
// Step 3: only then do threads meet, by one of two reductions of reduce.cuh: `tree_reduce` in shared
//         memory, with ten barriers for 256 threads, or `block_reduce` between registers, with two.
//
// TYPE, VECTOR (numbers of a pack), THREADS and REDUCE come from the compiler's command line.

#include "tnp/ops/_shared/packs.cuh"
#include "tnp/ops/_shared/reduce.cuh"

// x: rows [n_outer, n_inner, width] with these strides, each contiguous. y: a number a row.
extern "C" __global__ void __launch_bounds__(THREADS) row_sum_block(
    const TYPE* x, float* y, long long stride_outer, long long stride_inner, long long n_inner,
    long long width) {
  __shared__ float shared[THREADS];  // of which `block_reduce` takes a number a warp
  const long long row = blockIdx.x, packs = width / VECTOR;
  x += row / n_inner * stride_outer + row % n_inner * stride_inner;

  float at[VECTOR] = {};
#pragma unroll 4
  for (long long i = threadIdx.x; i < packs; i += THREADS) {
    const auto pack = load_pack<VECTOR>(x, i);
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) at[j] += float(pack.at[j]);
  }
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < VECTOR; ++j) sum += at[j];

  sum = REDUCE<THREADS>(sum, Sum(), shared);
  if (threadIdx.x == 0) y[row] = sum;
}
