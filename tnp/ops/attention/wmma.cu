// Attention forward on tensor cores through nvcuda::wmma, full or causal.
//
// A warp has 16 queries and walks over the keys, 32 at a time, with a running maximum m and sum l of
// each row (Milakov and Gimelshein, arXiv 1805.02867; Dao, FlashAttention-2, arXiv 2307.08691), with
// s = scale log2(e) q kT:
//
//   m' = max(m, max s)    p = 2^(s - m')    l = l 2^(m - m') + sum p    o = o 2^(m - m') + p v
//
// and at the end o / l, and lse = m + log2(l), from which a backward pass has its weights again.
//
// Step 1: tensor cores. A fragment is a tile of 16 x 16 numbers, spread over the registers of a
//         warp; one call multiplies two and adds to a third. Keys and values wait in shared memory,
//         where the four warps of a block share them: each is read from memory once per 64 queries.
// Step 2: o stays in registers. wmma does not say which number of a fragment a lane holds, but o's
//         rows must be multiplied by 2^(m - m'), each by its own. So the kernel asks: it loads a tile
//         whose numbers are their own rows, and what a lane finds in it are the rows that it holds.
// Step 3: scores become weights where they lie. A row of s is float, one of p has half the bytes, and
//         takes the place of the first half. Two lanes do a row, and meet in one shuffle.
// Step 4: rows in shared memory are 16 bytes longer than they need be. Eight rows that a fragment
//         reads at once would otherwise lie in the same banks and be read one after the other.
// Step 5: the next keys and values are on their way while these are multiplied: copies from memory to
//         shared memory that pass by the registers (cp.async, from 8.0 on; plain copies before).
// Step 6: o is multiplied only where the maximum of one of the warp's rows grew, which after the
//         first tiles is seldom.
//
// What wmma leaves undone: s goes through shared memory between the products, because a fragment of
// one product cannot be an operand of the next. attention/cute.cu does that in registers.
//
// TYPE (__half, __nv_bfloat16), HEAD_DIM and WARPS come from the compiler's command line.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_pipeline_primitives.h>
#include <mma.h>

#include "tnp/ops/_shared/packs.cuh"

using namespace nvcuda;

constexpr int SIDE = 16;  // of a fragment
constexpr int KEYS = 32;  // at a time
constexpr int STAGES = 2;  // tiles of keys and values in shared memory
constexpr int PACK = 8;  // numbers of 16 bytes
constexpr unsigned ALL = 0xffffffffu;  // lanes

// Rows [Rows, Width] of a matrix in shared memory, rows from n_there on 0.
template <int Rows, int Width, int Threads, typename T>
__device__ void copy_rows(T* to, const T* from, long long stride, long long n_there) {
  for (int i = threadIdx.x; i < Rows * (Width / PACK); i += Threads) {
    const int row = i / (Width / PACK), column = i % (Width / PACK) * PACK;
    const bool there = row < n_there;
    __pipeline_memcpy_async(to + row * (Width + PACK) + column,
                            from + (there ? row : 0) * stride + column, 16, there ? 0 : 16);
  }
}

// A block's: q, o and lse from its first query on, all of k and v. Query i stands beside key i + shift
// and, where causal, sees none after it.
template <typename T, int HeadDim, int Warps>
__device__ void attend(const T* q, const T* k, const T* v, T* o, float* lse, long long stride_q,
                       long long stride_k, long long stride_v, long long stride_o,
                       long long n_queries, long long n_keys, long long shift, bool causal,
                       float scale) {
  constexpr int Threads = 32 * Warps;
  constexpr int Queries = SIDE * Warps;
  constexpr int Row = HeadDim + PACK;  // in shared memory, step 4
  constexpr int ScoreRow = KEYS + 4;
  constexpr int Columns = HeadDim / SIDE;  // fragments side by side
  static_assert(Queries <= STAGES * 2 * KEYS, "q passes through the memory of keys and values");
  using Queried = wmma::fragment<wmma::matrix_a, SIDE, SIDE, SIDE, T, wmma::row_major>;
  using Key = wmma::fragment<wmma::matrix_b, SIDE, SIDE, SIDE, T, wmma::col_major>;  // transposed
  using Value = wmma::fragment<wmma::matrix_b, SIDE, SIDE, SIDE, T, wmma::row_major>;
  using Result = wmma::fragment<wmma::accumulator, SIDE, SIDE, SIDE, float>;

  __shared__ __align__(32) T stages[STAGES][2][KEYS * Row];
  __shared__ __align__(32) float all_scores[Warps][SIDE * ScoreRow];
  __shared__ float all_factors[Warps][SIDE];

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float* scores = all_scores[warp];
  float* factors = all_factors[warp];  // one for each row
  T* weights = reinterpret_cast<T*>(scores);  // step 3
  constexpr int WeightRow = ScoreRow * sizeof(float) / sizeof(T);

  // The queries, by way of shared memory, which fills the rows that are not there with 0.
  copy_rows<Queries, HeadDim, Threads>(&stages[0][0][0], q, stride_q, n_queries);
  __pipeline_commit();
  __pipeline_wait_prior(0);
  __syncthreads();
  Queried queries[Columns];
#pragma unroll
  for (int c = 0; c < Columns; ++c)
    wmma::load_matrix_sync(queries[c], &stages[0][0][0] + warp * SIDE * Row + c * SIDE, Row);
  __syncthreads();

  // Which rows of a result this lane holds: step 2.
  for (int i = lane; i < SIDE * SIDE; i += 32) scores[i / SIDE * ScoreRow + i % SIDE] = i / SIDE;
  __syncwarp();
  Result numbered;
  wmma::load_matrix_sync(numbered, scores, ScoreRow, wmma::mem_row_major);
  int row_of[Result::num_elements];
#pragma unroll
  for (int i = 0; i < Result::num_elements; ++i) row_of[i] = int(numbered.x[i]);
  __syncwarp();

  Result out[Columns];
#pragma unroll
  for (int c = 0; c < Columns; ++c) wmma::fill_fragment(out[c], 0.0f);
  const int row = lane / 2;  // of the warp's queries: this lane and its neighbour do its softmax
  const long long query = warp * SIDE + row;
  float m = __int_as_float(0xff800000), l = 0.0f;

  // Keys that the last query sees are the last that anybody here sees.
  const long long last = n_queries < Queries ? n_queries : Queries;
  const long long end = causal && last + shift < n_keys ? last + shift : n_keys;
  const auto fetch = [&](long long start, int stage) {
    copy_rows<KEYS, HeadDim, Threads>(stages[stage][0], k + start * stride_k, stride_k,
                                      n_keys - start);
    copy_rows<KEYS, HeadDim, Threads>(stages[stage][1], v + start * stride_v, stride_v,
                                      n_keys - start);
  };
  if (end > 0) fetch(0, 0);
  __pipeline_commit();
  int stage = 0;
  for (long long start = 0; start < end; start += KEYS, stage ^= 1) {
    if (start + KEYS < end) fetch(start + KEYS, stage ^ 1);  // step 5
    __pipeline_commit();
    __pipeline_wait_prior(1);  // for all but what was asked for last
    __syncthreads();
    const T* keys = stages[stage][0];
    const T* values = stages[stage][1];

#pragma unroll
    for (int n = 0; n < KEYS / SIDE; ++n) {
      Result s;
      wmma::fill_fragment(s, 0.0f);
#pragma unroll
      for (int c = 0; c < Columns; ++c) {
        Key key;
        wmma::load_matrix_sync(key, keys + n * SIDE * Row + c * SIDE, Row);
        wmma::mma_sync(s, queries[c], key, s);
      }
      wmma::store_matrix_sync(scores + n * SIDE, s, ScoreRow, wmma::mem_row_major);
    }
    __syncwarp();

    // Two columns here, two of the neighbour's, and so on. Keys from `seen` on this row does not see.
    const long long beside = query + shift + 1;
    const long long seen = (causal && beside < n_keys ? beside : n_keys) - start;
    float x[KEYS / 2];
    float top = m;
#pragma unroll
    for (int j = 0; j < KEYS / 2; ++j) {
      const int column = j / 2 * 4 + lane % 2 * 2 + j % 2;
      x[j] = column < seen ? scores[row * ScoreRow + column] * scale : __int_as_float(0xff800000);
      top = fmaxf(top, x[j]);
    }
    top = fmaxf(top, __shfl_xor_sync(ALL, top, 1));
    // A row that has seen no key yet has no maximum to subtract.
    const float reference = top == __int_as_float(0xff800000) ? 0.0f : top;
    const float factor = exp2f(m - reference);
    float sum = 0.0f;
    __syncwarp();  // all have read what is overwritten now
#pragma unroll
    for (int j = 0; j < KEYS / 2; ++j) {
      const int column = j / 2 * 4 + lane % 2 * 2 + j % 2;
      const float p = exp2f(x[j] - reference);
      sum += p;
      weights[row * WeightRow + column] = T(p);
    }
    l = l * factor + sum + __shfl_xor_sync(ALL, sum, 1);
    m = top;
    if (lane % 2 == 0) factors[row] = factor;
    __syncwarp();

    if (__any_sync(ALL, factor != 1.0f)) {  // step 6
#pragma unroll
      for (int i = 0; i < Result::num_elements; ++i) {
        const float of_row = factors[row_of[i]];
#pragma unroll
        for (int c = 0; c < Columns; ++c) out[c].x[i] *= of_row;
      }
    }
#pragma unroll
    for (int n = 0; n < KEYS / SIDE; ++n) {
      Queried p;
      wmma::load_matrix_sync(p, weights + n * SIDE, WeightRow);
#pragma unroll
      for (int c = 0; c < Columns; ++c) {
        Value value;
        wmma::load_matrix_sync(value, values + n * SIDE * Row + c * SIDE, Row);
        wmma::mma_sync(out[c], p, value, out[c]);
      }
    }
    __syncthreads();  // the next round overwrites what this one read
  }

  // A row that saw no key gives 0, and an lse of -inf.
  const float total = l == 0.0f ? 1.0f : l;
  if (lane % 2 == 0) factors[row] = 1.0f / total;
  if (lane % 2 == 0 && query < n_queries) lse[query] = m + log2f(total);
  __syncwarp();
#pragma unroll
  for (int c = 0; c < Columns; ++c) {
#pragma unroll
    for (int i = 0; i < Result::num_elements; ++i) out[c].x[i] *= factors[row_of[i]];
    wmma::store_matrix_sync(scores, out[c], ScoreRow, wmma::mem_row_major);
    __syncwarp();
    Pack<T, PACK> pack;
#pragma unroll
    for (int j = 0; j < PACK; ++j) pack.at[j] = T(scores[row * ScoreRow + lane % 2 * PACK + j]);
    if (query < n_queries) store_pack<PACK>(o + query * stride_o + c * SIDE, lane % 2, pack);
    __syncwarp();
  }
}

// q, o: [B, n_heads, n_q, HEAD_DIM], k, v: [B, n_heads / group, n_k, HEAD_DIM] with these strides, all
// multiples of 8. lse: [B, n_heads, n_q], to base 2. A block has 16 WARPS queries of one head.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 2) attention_wmma(
    const TYPE* q, const TYPE* k, const TYPE* v, TYPE* o, float* lse,
    long long q_b, long long q_h, long long q_m, long long k_b, long long k_h, long long k_n,
    long long v_b, long long v_h, long long v_n, long long o_b, long long o_h, long long o_m,
    long long n_heads, long long group, long long n_q, long long n_k, long long n_tiles,
    long long causal, float scale_log2) {
  const long long head = blockIdx.x / n_tiles;
  // Where causal, those that see most come first: the last to end are then short.
  const long long tile = causal ? n_tiles - 1 - blockIdx.x % n_tiles : blockIdx.x % n_tiles;
  const long long b = head / n_heads, h = head % n_heads, first = tile * SIDE * WARPS;
  attend<TYPE, HEAD_DIM, WARPS>(
      q + b * q_b + h * q_h + first * q_m, k + b * k_b + h / group * k_h,
      v + b * v_b + h / group * v_h, o + b * o_b + h * o_h + first * o_m, lse + head * n_q + first,
      q_m, k_n, v_n, o_m, n_q - first, n_k, n_k - n_q + first, causal != 0, scale_log2);
}
