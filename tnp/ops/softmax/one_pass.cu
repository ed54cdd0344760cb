// Softmax over the last dimension, version 2: one pass, with the row in registers.
//
//   m = max x        e = e^(x - m)        l = sum e        y = e / l
//
// Step 1: a row is read once, and every thread keeps its part in registers until it writes it. What
//         version 1 reads three times it reads once: 2/3 of its reads are gone where the row has
//         left the cache, and the latency of two loops where it has not.
// Step 2: how many packs a thread holds is a template's number, so the loops are unrolled: registers
//         have no addresses, and an index that the compiler knows is what lets an array live there.
//         Unrolled, all loads of a thread are on their way before the first is waited for.
// Step 3: threads meet by warp shuffles, with two barriers for a reduction in place of ten.
// Step 4: a row that one warp holds needs no barrier: several such rows share a block, since a
//         multiprocessor holds a bounded number of blocks.
//
// TYPE, VECTOR (numbers of a pack), UNROLL (packs of a thread), THREADS (of a row) and ROWS (of a
// block) come from the compiler's command line.

#include "tnp/ops/_shared/packs.cuh"
#include "tnp/ops/_shared/reduce.cuh"

template <typename T, int Vector, int Unroll, int Threads>
__device__ void softmax_row(const T* x, T* y, long long width) {
  __shared__ float shared[Threads / 32];
  const int thread = threadIdx.x % Threads;
  const long long packs = width / Vector;
  float held[Unroll][Vector];

  float largest = Max::identity();
#pragma unroll
  for (int u = 0; u < Unroll; ++u) {
    const long long i = u * Threads + thread;
    Pack<T, Vector> pack;
    if (i < packs) pack = load_pack<Vector>(x, i);
#pragma unroll
    for (int j = 0; j < Vector; ++j) {
      // What lies past the end has no weight: e^-inf is 0.
      held[u][j] = i < packs ? float(pack.at[j]) : Max::identity();
      largest = fmaxf(largest, held[u][j]);
    }
  }
  largest = block_reduce<Threads>(largest, Max(), shared);

  float sum = 0.0f;
#pragma unroll
  for (int u = 0; u < Unroll; ++u) {
#pragma unroll
    for (int j = 0; j < Vector; ++j) {
      held[u][j] = expf(held[u][j] - largest);
      sum += held[u][j];
    }
  }
  const float scale = 1.0f / block_reduce<Threads>(sum, Sum(), shared);

#pragma unroll
  for (int u = 0; u < Unroll; ++u) {
    const long long i = u * Threads + thread;
    Pack<T, Vector> pack;
#pragma unroll
    for (int j = 0; j < Vector; ++j) pack.at[j] = T(held[u][j] * scale);
    if (i < packs) store_pack<Vector>(y, i, pack);
  }
}

// x: rows [n_outer, n_inner, width] with these strides, each contiguous. y: contiguous.
extern "C" __global__ void __launch_bounds__(THREADS* ROWS) softmax_one_pass(
    const TYPE* x, TYPE* y, long long stride_outer, long long stride_inner, long long n_inner,
    long long width, long long n_rows) {
  static_assert(ROWS == 1 || THREADS == 32, "rows that share a block are of one warp each");
  const long long row = static_cast<long long>(blockIdx.x) * ROWS + threadIdx.x / THREADS;
  if (row >= n_rows) return;  // whole warps, none of which anybody waits for
  x += row / n_inner * stride_outer + row % n_inner * stride_inner;
  softmax_row<TYPE, VECTOR, UNROLL, THREADS>(x, y + row * width, width);
}
