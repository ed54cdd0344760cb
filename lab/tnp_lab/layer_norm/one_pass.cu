// LayerNorm over the last dimension, in one pass, with the row in registers.
//
//   mean = sum x / D     rstd = 1 / sqrt(sum (x - mean)^2 / D + eps)
//   y = (x - mean) rstd weight + bias
//
// Step 1: each thread reads its part of a row once and keeps it in registers, as in softmax's
//         one_pass.cu.
// Step 2: the variance is a second reduction, over centered numbers in registers. The shorter
//         formula, sum x^2 / D - mean^2, subtracts two large numbers if the mean is large. Here the
//         second reduction costs no memory access.
// Step 3: a thread reads weight and bias, in float32, once for each of its columns. All rows share
//         them, so they come from a cache.
// Step 4: rows of one warp each share a block, and need no barrier.
//
// TYPE, VECTOR (numbers of a pack), UNROLL (packs of a thread), THREADS (of a row) and ROWS (of a
// block) come from the compiler's command line.

#include "tnp_lab/packs.cuh"
#include "tnp_lab/reduce.cuh"

// x: rows [n_outer, n_inner, width] with these strides, each contiguous. y: contiguous. mean and
// rstd: a number a row, written if `save` is not 0.
extern "C" __global__ void __launch_bounds__(THREADS* ROWS) layer_norm_one_pass(
    const TYPE* x, const float* weight, const float* bias, TYPE* y, float* mean, float* rstd,
    long long stride_outer, long long stride_inner, long long n_inner, long long width,
    long long n_rows, long long save, float eps) {
  static_assert(ROWS == 1 || THREADS == 32, "rows that share a block are of one warp each");
  constexpr int Floats = VECTOR < 4 ? VECTOR : 4;  // in 16 bytes at most
  __shared__ float shared[THREADS / 32];
  const int thread = threadIdx.x % THREADS;
  const long long packs = width / VECTOR;
  const long long row = static_cast<long long>(blockIdx.x) * ROWS + threadIdx.x / THREADS;
  if (row >= n_rows) return;  // whole warps, none of which anybody waits for
  x += row / n_inner * stride_outer + row % n_inner * stride_inner;
  y += row * width;
  float held[UNROLL][VECTOR];

  float sum = 0.0f;
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) {
    const long long i = u * THREADS + thread;
    Pack<TYPE, VECTOR> pack;
    if (i < packs) pack = load_pack<VECTOR>(x, i);
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
      held[u][j] = i < packs ? float(pack.at[j]) : 0.0f;
      sum += held[u][j];
    }
  }
  const float center = block_reduce<THREADS>(sum, Sum(), shared) / width;

  float squares = 0.0f;
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) {
    const bool inside = u * THREADS + thread < packs;
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
      held[u][j] = inside ? held[u][j] - center : 0.0f;
      squares += held[u][j] * held[u][j];
    }
  }
  const float scale = 1.0f / sqrtf(block_reduce<THREADS>(squares, Sum(), shared) / width + eps);
  if (save && thread == 0) {
    mean[row] = center;
    rstd[row] = scale;
  }

#pragma unroll
  for (int u = 0; u < UNROLL; ++u) {
    const long long i = u * THREADS + thread;
    if (i >= packs) continue;
    Pack<TYPE, VECTOR> pack;
#pragma unroll
    for (int j = 0; j < VECTOR; j += Floats) {
      const auto w = load_pack<Floats>(weight, (i * VECTOR + j) / Floats);
      const auto b = load_pack<Floats>(bias, (i * VECTOR + j) / Floats);
#pragma unroll
      for (int k = 0; k < Floats; ++k)
        pack.at[j + k] = TYPE(held[u][j + k] * scale * w.at[k] + b.at[k]);
    }
    store_pack<VECTOR>(y, i, pack);
  }
}
