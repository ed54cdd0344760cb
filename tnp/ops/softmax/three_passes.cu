// Softmax over the last dimension, version 1: a block a row, and three passes over the row.
//
//   m = max x        l = sum e^(x - m)        y = e^(x - m) / l
//
// Each formula is a loop of its own, as one writes it down. The row is read three times: from memory
// once, and then from a cache as far as it is still there. Rows of any width fit, since nothing is
// kept between the passes but m and l.
//
// Step 1: neighbouring threads read neighbouring packs of 16 bytes, so that every byte of a memory
//         transaction is used, and each instruction moves as much as one can.
// Step 2: a thread reduces what it reads in a register; only then do threads meet, in a tree in
//         shared memory (reduce.cuh).
//
// TYPE, VECTOR (numbers of a pack) and THREADS come from the compiler's command line.

#include "tnp/ops/_shared/packs.cuh"
#include "tnp/ops/_shared/reduce.cuh"

template <typename T, int Vector, int Threads>
__device__ void softmax_row(const T* x, T* y, long long width) {
  __shared__ float shared[Threads];
  const long long packs = width / Vector;

  float largest = Max::identity();
  for (long long i = threadIdx.x; i < packs; i += Threads) {
    const auto pack = load_pack<Vector>(x, i);
#pragma unroll
    for (int j = 0; j < Vector; ++j) largest = fmaxf(largest, float(pack.at[j]));
  }
  largest = tree_reduce<Threads>(largest, Max(), shared);

  float sum = 0.0f;
  for (long long i = threadIdx.x; i < packs; i += Threads) {
    const auto pack = load_pack<Vector>(x, i);
#pragma unroll
    for (int j = 0; j < Vector; ++j) sum += expf(float(pack.at[j]) - largest);
  }
  const float scale = 1.0f / tree_reduce<Threads>(sum, Sum(), shared);

  for (long long i = threadIdx.x; i < packs; i += Threads) {
    auto pack = load_pack<Vector>(x, i);
#pragma unroll
    for (int j = 0; j < Vector; ++j) pack.at[j] = T(expf(float(pack.at[j]) - largest) * scale);
    store_pack<Vector>(y, i, pack);
  }
}

// x: rows [n_outer, n_inner, width] with these strides, each contiguous. y: contiguous.
extern "C" __global__ void __launch_bounds__(THREADS) softmax_three_passes(
    const TYPE* x, TYPE* y, long long stride_outer, long long stride_inner, long long n_inner,
    long long width) {
  const long long row = blockIdx.x;
  x += row / n_inner * stride_outer + row % n_inner * stride_inner;
  softmax_row<TYPE, VECTOR, THREADS>(x, y + row * width, width);
}
