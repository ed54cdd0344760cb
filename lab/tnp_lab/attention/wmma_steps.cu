// Attention forward on tensor cores through nvcuda::wmma: three steps on the way to wmma.cu.
//
// Formula, walk over the keys and softmax are those of wmma.cu: read its head first. STEP says how
// far this kernel has come. Each step adds to the step before:
//
// STEP 1: tensor cores. A warp multiplies its own 16 queries by 32 keys at a time. All matrices lie
//         in shared memory: q, keys, values, scores, weights and o. So q is read, and o is read and
//         written, for every 32 keys. At D = 128 a block has 32 queries: 64 do not
//         fit in 48 KB.
// STEP 2: a warp's q and o stay in registers. But o's rows must be multiplied by 2^(m - m'), and
//         wmma does not say which rows a lane holds. So the kernel asks: it loads a tile whose
//         numbers are their own rows. A block has 64 queries at any D.
// STEP 3: rows in shared memory are 16 bytes longer than they need be. In steps 1 and 2, rows that
//         are read at once lie in the same banks, and are read one after the other.
//
// wmma.cu is the fourth step: it has its own steps 5 and 6, brings q through the keys' place in
// shared memory, and multiplies by 1 / l. Its head counts otherwise: step 1 here has its steps 1 and
// 3, step 2 its step 2, and step 3 its step 4.
//
// TYPE (__half, __nv_bfloat16), HEAD_DIM, WARPS and STEP come from the compiler's command line.

#include <mma.h>

#include "tnp_lab/packs.cuh"

using namespace nvcuda;

constexpr int SIDE = 16;  // of a fragment
constexpr int KEYS = 32;  // at a time
constexpr int QUERIES = SIDE * WARPS;  // of a block
constexpr int COLUMNS = HEAD_DIM / SIDE;  // fragments side by side
constexpr int PACK = 8;  // numbers of 16 bytes
constexpr int PAD = STEP >= 3 ? 16 : 0;  // bytes
constexpr int ROW = HEAD_DIM + PAD / sizeof(TYPE);  // in shared memory
constexpr int SCORE_ROW = KEYS + PAD / sizeof(float);
constexpr int WEIGHT_ROW = SCORE_ROW * sizeof(float) / sizeof(TYPE);
constexpr unsigned ALL = 0xffffffffu;  // lanes
constexpr auto BY_ROWS = wmma::mem_row_major;

using Queried = wmma::fragment<wmma::matrix_a, SIDE, SIDE, SIDE, TYPE, wmma::row_major>;
using Key = wmma::fragment<wmma::matrix_b, SIDE, SIDE, SIDE, TYPE, wmma::col_major>;  // transposed
using Value = wmma::fragment<wmma::matrix_b, SIDE, SIDE, SIDE, TYPE, wmma::row_major>;
using Result = wmma::fragment<wmma::accumulator, SIDE, SIDE, SIDE, float>;

// Rows [n, HEAD_DIM] of a matrix in shared memory, rows from n_there on 0.
__device__ void copy_rows(TYPE* to, int n, const TYPE* from, long long stride, long long n_there) {
  for (int i = threadIdx.x; i < n * (HEAD_DIM / PACK); i += 32 * WARPS) {
    const int row = i / (HEAD_DIM / PACK), pack = i % (HEAD_DIM / PACK);
    Pack<TYPE, PACK> values;
    for (auto& value : values.at) value = TYPE(0.0f);
    if (row < n_there) values = load_pack<PACK>(from + row * stride, pack);
    store_pack<PACK>(to + row * ROW, pack, values);
  }
}

// The arguments are those of wmma.cu. A block has QUERIES queries of one head.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 2) attention_wmma_steps(
    const TYPE* q, const TYPE* k, const TYPE* v, TYPE* o, float* lse,
    long long q_b, long long q_h, long long q_m, long long k_b, long long k_h, long long k_n,
    long long v_b, long long v_h, long long v_n, long long o_b, long long o_h, long long o_m,
    long long n_heads, long long group, long long n_q, long long n_k, long long n_tiles,
    long long causal, float scale_log2) {
  __shared__ __align__(32) TYPE all_queries[QUERIES * ROW], keys[KEYS * ROW], values[KEYS * ROW];
  __shared__ __align__(32) float all_scores[WARPS][SIDE * SCORE_ROW];
  __shared__ __align__(32) float all_out[WARPS][STEP == 1 ? SIDE * HEAD_DIM : 1];
  __shared__ float all_factors[WARPS][SIDE];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const TYPE* own = all_queries + warp * SIDE * ROW;
  float* scores = all_scores[warp];
  TYPE* weights = reinterpret_cast<TYPE*>(scores);  // they take the place of the scores
  float* stored = all_out[warp];  // o in step 1
  float* factors = all_factors[warp];  // one for each row

  const long long head = blockIdx.x / n_tiles, b = head / n_heads, h = head % n_heads;
  const long long tile = causal ? n_tiles - 1 - blockIdx.x % n_tiles : blockIdx.x % n_tiles;
  const long long first = tile * QUERIES, last = first + QUERIES < n_q ? first + QUERIES : n_q;
  k += b * k_b + h / group * k_h;
  v += b * v_b + h / group * v_h;
  copy_rows(all_queries, QUERIES, q + b * q_b + h * q_h + first * q_m, q_m, last - first);
  __syncthreads();

  Queried queries[COLUMNS];
  Result out[COLUMNS];
  int row_of[Result::num_elements];  // of each number of a tile that this lane holds
  if (STEP == 1) {
    for (int i = lane; i < SIDE * HEAD_DIM; i += 32) stored[i] = 0.0f;
  } else {
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) wmma::load_matrix_sync(queries[c], own + c * SIDE, ROW);
    for (int i = lane; i < SIDE * SIDE; i += 32) scores[i / SIDE * SCORE_ROW + i % SIDE] = i / SIDE;
    __syncwarp();
    wmma::load_matrix_sync(out[0], scores, SCORE_ROW, BY_ROWS);
#pragma unroll
    for (int i = 0; i < Result::num_elements; ++i) row_of[i] = int(out[0].x[i]);
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) wmma::fill_fragment(out[c], 0.0f);
  }

  // Two lanes do a row's softmax. The query stands beside key `query + shift`.
  const int row = lane / 2;
  const long long query = first + warp * SIDE + row, shift = n_k - n_q;
  const long long end = causal && last + shift < n_k ? last + shift : n_k;  // nobody sees more
  const long long seen = causal && query + shift + 1 < n_k ? query + shift + 1 : n_k;
  float m = __int_as_float(0xff800000), l = 0.0f;
  for (long long start = 0; start < end; start += KEYS) {
    copy_rows(keys, KEYS, k + start * k_n, k_n, n_k - start);
    copy_rows(values, KEYS, v + start * v_n, v_n, n_k - start);
    __syncthreads();

#pragma unroll
    for (int n = 0; n < KEYS / SIDE; ++n) {
      Result s;
      wmma::fill_fragment(s, 0.0f);
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) {
        if (STEP == 1) wmma::load_matrix_sync(queries[c], own + c * SIDE, ROW);
        Key key;
        wmma::load_matrix_sync(key, keys + n * SIDE * ROW + c * SIDE, ROW);
        wmma::mma_sync(s, queries[c], key, s);
      }
      wmma::store_matrix_sync(scores + n * SIDE, s, SCORE_ROW, BY_ROWS);
    }
    __syncwarp();

    float x[KEYS / 2], top = m, sum = 0.0f;
#pragma unroll
    for (int j = 0; j < KEYS / 2; ++j) {
      const int column = j / 2 * 4 + lane % 2 * 2 + j % 2;
      const float score = scores[row * SCORE_ROW + column] * scale_log2;
      x[j] = start + column < seen ? score : __int_as_float(0xff800000);
      top = fmaxf(top, x[j]);
    }
    top = fmaxf(top, __shfl_xor_sync(ALL, top, 1));
    const float reference = top == __int_as_float(0xff800000) ? 0.0f : top;  // no key seen yet
    const float factor = exp2f(m - reference);
    __syncwarp();  // all have read what is overwritten now
#pragma unroll
    for (int j = 0; j < KEYS / 2; ++j) {
      const float p = exp2f(x[j] - reference);
      sum += p;
      weights[row * WEIGHT_ROW + j / 2 * 4 + lane % 2 * 2 + j % 2] = TYPE(p);
    }
    l = l * factor + sum + __shfl_xor_sync(ALL, sum, 1);
    m = top;
    if (lane % 2 == 0) factors[row] = factor;
    __syncwarp();

    if (STEP == 1) {
      for (int i = lane; i < SIDE * HEAD_DIM; i += 32) stored[i] *= factors[i / HEAD_DIM];
      __syncwarp();
    } else {
#pragma unroll
      for (int i = 0; i < Result::num_elements; ++i) {
        const float of_row = factors[row_of[i]];
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) out[c].x[i] *= of_row;
      }
    }
    Queried p[KEYS / SIDE];
#pragma unroll
    for (int n = 0; n < KEYS / SIDE; ++n)
      wmma::load_matrix_sync(p[n], weights + n * SIDE, WEIGHT_ROW);
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
      if (STEP == 1) wmma::load_matrix_sync(out[c], stored + c * SIDE, HEAD_DIM, BY_ROWS);
#pragma unroll
      for (int n = 0; n < KEYS / SIDE; ++n) {
        Value value;
        wmma::load_matrix_sync(value, values + n * SIDE * ROW + c * SIDE, ROW);
        wmma::mma_sync(out[c], p[n], value, out[c]);
      }
      if (STEP == 1) wmma::store_matrix_sync(stored + c * SIDE, out[c], HEAD_DIM, BY_ROWS);
    }
    __syncthreads();  // the next round overwrites what this one read
  }

  // A row that saw no key gives 0, and an lse of -inf.
  const float total = l == 0.0f ? 1.0f : l;
  if (lane % 2 == 0 && query < n_q) lse[head * n_q + query] = m + log2f(total);
  o += b * o_b + h * o_h + query * o_m;
#pragma unroll
  for (int c = 0; c < COLUMNS; ++c) {
    __syncwarp();
    if (STEP == 1) wmma::load_matrix_sync(out[c], stored + c * SIDE, HEAD_DIM, BY_ROWS);
    wmma::store_matrix_sync(scores, out[c], SCORE_ROW, BY_ROWS);
    __syncwarp();
    Pack<TYPE, PACK> pack;
#pragma unroll
    for (int j = 0; j < PACK; ++j)
      pack.at[j] = TYPE(scores[row * SCORE_ROW + lane % 2 * PACK + j] / total);
    if (query < n_q) store_pack<PACK>(o + c * SIDE, lane % 2, pack);
  }
}
