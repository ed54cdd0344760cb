// A linear layer and GELU in one kernel, on tensor cores through nvcuda::wmma.
//
//   z = x wT + b        y = z / (1 + e^-u)        u = 2 sqrt(2 / pi) (z + 0.044715 z^3)
//
// This is GELU's form with tanh (Hendrycks and Gimpel, arXiv 1606.08415), because
// 1/2 (1 + tanh(u / 2)) = 1 / (1 + e^-u). Written so, a large negative z loses no digits.
//
// Step 1: a block computes ROWS x COLUMNS numbers of y. It walks along n_in in steps of DEPTH and
//         keeps one step's tiles of x and w in shared memory. All warps read them there: with tiles
//         of 128, a number comes from memory once for 128 products.
// Step 2: a warp keeps its part of z in registers, as fragments of 16 x 16 numbers. It loads 2
//         fragments of x and 4 of w for 8 products. The rows of w are the columns of wT, so a
//         fragment of wT is a tile of w read by columns, and nothing is transposed.
// Step 3: the next tiles are copied while these are multiplied (cp.async, from 8.0 on; plain copies
//         before). There are two stages and one barrier a step. After the barrier the new tiles are
//         complete, and no warp still reads the stage that is overwritten next.
// Step 4: rows in shared memory are 16 bytes longer than their numbers. Eight rows that a fragment
//         reads at once would otherwise lie in the same banks, and be read one after another.
// Step 5: bias and GELU are computed before z leaves the chip. wmma does not say which numbers of a
//         fragment a lane holds. So fragments go through shared memory, where no warp needs the
//         tiles of x and w any more. A lane then takes 8 neighbours of a row, and writes 16 bytes.
//
// Not done here: Hopper's wgmma, which reads operands from shared memory. Triton's kernel,
// tnp/ops/products/triton_product.py, has it.
//
// TYPE (__half, __nv_bfloat16), ROWS, COLUMNS and WARPS come from the compiler's command line.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_pipeline_primitives.h>
#include <mma.h>

#include "tnp_lab/packs.cuh"

using namespace nvcuda;

constexpr int SIDE = 16;  // of a fragment
constexpr int DEPTH = 32;  // columns of x and w at a time
constexpr int STAGES = 2;  // tiles of x and w in shared memory
constexpr int PACK = 8;  // 16-bit numbers in 16 bytes

// Copies DEPTH columns of `Rows` rows. Rows from n_there on, and columns from `width` on, become 0.
template <int Rows, int Threads, typename T>
__device__ void copy_tile(T* to, const T* from, long long stride, long long n_there,
                          long long width) {
  constexpr int Packs = DEPTH / PACK;  // of a row
#pragma unroll
  for (int i = threadIdx.x; i < Rows * Packs; i += Threads) {
    const int row = i / Packs, column = i % Packs * PACK;
    const bool there = row < n_there && column < width;
    __pipeline_memcpy_async(to + row * (DEPTH + PACK) + column,
                            there ? from + row * stride + column : from, 16, there ? 0 : 16);
  }
}

// Writes 8 numbers to row[column ...], but none from `width` on. If width is a multiple of 8, every
// row starts at a multiple of 16 bytes, and one 16-byte store is enough.
template <typename T>
__device__ void store(T* row, long long column, long long width, Pack<T, PACK> values) {
  if (width % PACK == 0) {
    store_pack<PACK>(row + column, 0, values);
  } else {
#pragma unroll
    for (int j = 0; j < PACK; ++j)
      if (column + j < width) row[column + j] = values.at[j];
  }
}

__device__ float gelu(float z) {
  // -u log2(e); 2.3022082 = 2 sqrt(2 / pi) log2(e)
  const float exponent = -2.3022082f * z * (1.0f + 0.044715f * z * z);
  return __fdividef(z, 1.0f + exp2f(exponent));
}

// Computes one tile of y. x points to the tile's first row. w and bias point to the row and the
// number for the tile's first column. y and z point to the first number of the whole results.
template <typename T, int Rows, int Columns, int Warps>
__device__ void gelu_tile(const T* x, const T* w, const float* bias, T* y, T* z,
                          long long stride_x, long long stride_w, long long first_row,
                          long long first_column, long long n_rows, long long n_in,
                          long long n_out, bool save_z) {
  constexpr int Threads = 32 * Warps;
  constexpr int Row = DEPTH + PACK;  // in shared memory, step 4
  constexpr int Down = Rows / (Warps / 2) / SIDE;  // fragments of a warp; two warps side by side
  constexpr int Across = Columns / 2 / SIDE;
  constexpr int SumRow = Across * SIDE + 4;  // in shared memory, step 5
  using Left = wmma::fragment<wmma::matrix_a, SIDE, SIDE, SIDE, T, wmma::row_major>;
  using Right = wmma::fragment<wmma::matrix_b, SIDE, SIDE, SIDE, T, wmma::col_major>;  // step 2
  using Sums = wmma::fragment<wmma::accumulator, SIDE, SIDE, SIDE, float>;

  __shared__ __align__(32) T stages[STAGES][(Rows + Columns) * Row];
  static_assert(sizeof(stages) >= Warps * SIDE * SumRow * sizeof(float), "step 5");

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = warp / 2 * Down * SIDE, column = warp % 2 * Across * SIDE;  // of the warp's part
  Sums sums[Down][Across];
#pragma unroll
  for (int r = 0; r < Down; ++r)
#pragma unroll
    for (int c = 0; c < Across; ++c) wmma::fill_fragment(sums[r][c], 0.0f);

  const auto fetch = [&](long long start, int stage) {
    copy_tile<Rows, Threads>(stages[stage], x + start, stride_x, n_rows - first_row, n_in - start);
    copy_tile<Columns, Threads>(stages[stage] + Rows * Row, w + start, stride_w,
                                n_out - first_column, n_in - start);
    __pipeline_commit();
  };
  fetch(0, 0);
  int stage = 0;
  for (long long start = 0; start < n_in; start += DEPTH, stage ^= 1) {
    __pipeline_wait_prior(0);
    __syncthreads();
    if (start + DEPTH < n_in) fetch(start + DEPTH, stage ^ 1);  // step 3
    const T* x_tile = stages[stage] + row * Row;
    const T* w_tile = stages[stage] + (Rows + column) * Row;
#pragma unroll
    for (int k = 0; k < DEPTH; k += SIDE) {
      Left left[Down];
#pragma unroll
      for (int r = 0; r < Down; ++r)
        wmma::load_matrix_sync(left[r], x_tile + r * SIDE * Row + k, Row);
#pragma unroll
      for (int c = 0; c < Across; ++c) {
        Right right;
        wmma::load_matrix_sync(right, w_tile + c * SIDE * Row + k, Row);
#pragma unroll
        for (int r = 0; r < Down; ++r) wmma::mma_sync(sums[r][c], left[r], right, sums[r][c]);
      }
    }
  }
  __syncthreads();  // sums now overwrite what the last products read

  constexpr int Packs = Across * SIDE / PACK;  // of a row of the warp's part
  float* part = reinterpret_cast<float*>(stages[0]) + warp * SIDE * SumRow;
  const int lane_column = lane % Packs * PACK;  // the lane's first column in the warp's part
  const long long y_column = first_column + column + lane_column;
  float biases[PACK];
#pragma unroll
  for (int j = 0; j < PACK; ++j)
    biases[j] = y_column + j < n_out ? bias[column + lane_column + j] : 0.0f;
#pragma unroll
  for (int r = 0; r < Down; ++r) {
#pragma unroll
    for (int c = 0; c < Across; ++c)
      wmma::store_matrix_sync(part + c * SIDE, sums[r][c], SumRow, wmma::mem_row_major);
    __syncwarp();
    for (int i = lane / Packs; i < SIDE; i += 32 / Packs) {
      const long long y_row = first_row + row + r * SIDE + i;
      if (y_row >= n_rows || y_column >= n_out) continue;
      Pack<T, PACK> linear, activated;
#pragma unroll
      for (int j = 0; j < PACK; ++j) {
        const float sum = part[i * SumRow + lane_column + j] + biases[j];
        linear.at[j] = T(sum);
        activated.at[j] = T(gelu(sum));
      }
      store(y + y_row * n_out, y_column, n_out, activated);
      if (save_z) store(z + y_row * n_out, y_column, n_out, linear);
    }
    __syncwarp();  // all lanes have read what the next fragments overwrite
  }
}

// x: [n_rows, n_in], w: [n_out, n_in], bias: [n_out]. n_in and both strides are multiples of 8.
// y and z: [n_rows, n_out], contiguous. z is written only if save_z is not 0. Consecutive blocks
// share the same rows of x, so that those rows are likely to be in L2.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 2) gelu_linear_wmma(
    const TYPE* x, const TYPE* w, const float* bias, TYPE* y, TYPE* z, long long stride_x,
    long long stride_w, long long n_rows, long long n_in, long long n_out, long long save_z) {
  const long long n_across = (n_out + COLUMNS - 1) / COLUMNS;
  const long long row = blockIdx.x / n_across * ROWS, column = blockIdx.x % n_across * COLUMNS;
  gelu_tile<TYPE, ROWS, COLUMNS, WARPS>(x + row * stride_x, w + column * stride_w, bias + column, y,
                                        z, stride_x, stride_w, row, column, n_rows, n_in, n_out,
                                        save_z != 0);
}
