// Attention backward on tensor cores through nvcuda::wmma, full or causal.
//
// The weights are computed again from q, k and the saved lse (Dao, FlashAttention-2, arXiv
// 2307.08691), so that no n_q x n_k matrix is in memory. lse is to base 2. `do` is the gradient of
// o, and dlse that of lse in nats, which cuda_attention.py subtracts.
//
//   p = 2^(scale log2(e) q kT - lse)    delta = (sum over D of o * do) - dlse
//   dv = pT do    ds = p (do vT - delta)    dq = scale ds k    dk = scale dsT q
//
// Step 1: `attention_delta` has a warp for each query.
// Step 2: a block of `attention_dkdv` owns keys and walks over the queries that see them. A block of
//         `attention_dq` owns queries and walks over the keys that they see. Each sum has one owner
//         and a fixed order: there are no atomics, and results are equal from run to run. The price
//         is that both kernels compute the weights.
// Step 3: both kernels call one function, `walk`. If a block owns keys, it computes transposes:
//
//           owned      walked     s = owned[0] walked[0]T    dp = owned[1] walked[1]T
//           k, v       q, do      sums[0] = dsT q  (dk)      sums[1] = pT do  (dv)
//           q, do      k, v       sums[0] = ds k   (dq)
//
//         So the tile of weights is always a left operand, and is never transposed.
// Step 4: the owner of keys walks over the heads that share these keys, one after another.
// Step 5: p and ds overwrite s and dp in shared memory, as in attention/wmma.cu. The next walked
//         rows are copied while the present ones are multiplied. Rows in shared memory are padded
//         by 16 bytes against bank conflicts.
//
// A block owns 16 WARPS rows. Registers hold the sums, so both owned matrices stay in shared
// memory. With 64 rows at D = 64, or 32 rows at D = 128, two stages of walked rows still fit in
// 48 KB.
//
// TYPE (__half, __nv_bfloat16), HEAD_DIM and WARPS come from the compiler's command line.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_pipeline_primitives.h>
#include <mma.h>

#include "tnp_lab/packs.cuh"
#include "tnp_lab/reduce.cuh"

using namespace nvcuda;

constexpr int SIDE = 16;  // of a fragment, and rows that are walked at a time
constexpr int PACK = 8;  // 16-bit numbers in 16 bytes
constexpr int ROW = HEAD_DIM + PACK;  // numbers of a row in shared memory
constexpr int SCORE_ROW = SIDE + 4;
constexpr int COLUMNS = HEAD_DIM / SIDE;  // fragments side by side
constexpr int THREADS = 32 * WARPS;

// Points to a head's rows in memory. `stride` is their distance in numbers.
struct Rows {
  const TYPE* at;
  long long stride;

  // Starts copies of rows first ... first + Count - 1. Rows from n on are 0.
  template <int Count>
  __device__ void fetch(TYPE* to, long long first, long long n) const {
    for (int i = threadIdx.x; i < Count * (HEAD_DIM / PACK); i += THREADS) {
      const int row = i / (HEAD_DIM / PACK), column = i % (HEAD_DIM / PACK) * PACK;
      const bool there = first + row < n;
      __pipeline_memcpy_async(to + row * ROW + column,
                              at + (there ? first + row : 0) * stride + column, 16, there ? 0 : 16);
    }
  }
};

// Holds a head's lengths and its mask. If causal, query i sees keys 0 ... i + n_k - n_q.
struct Mask {
  long long n_q, n_k;
  bool causal;

  __device__ bool sees(long long query, long long key) const {
    return query < n_q && key < n_k && (!causal || key <= query + n_k - n_q);
  }
};

using Left = wmma::fragment<wmma::matrix_a, SIDE, SIDE, SIDE, TYPE, wmma::row_major>;
using Right = wmma::fragment<wmma::matrix_b, SIDE, SIDE, SIDE, TYPE, wmma::row_major>;
using Transposed = wmma::fragment<wmma::matrix_b, SIDE, SIDE, SIDE, TYPE, wmma::col_major>;
using Result = wmma::fragment<wmma::accumulator, SIDE, SIDE, SIDE, float>;

// scores = owned walkedT, 16 x 16.
__device__ void multiply(float* scores, const TYPE* owned, const TYPE* walked) {
  Result s;
  wmma::fill_fragment(s, 0.0f);
#pragma unroll
  for (int c = 0; c < COLUMNS; ++c) {
    Left left;
    Transposed right;
    wmma::load_matrix_sync(left, owned + c * SIDE, ROW);
    wmma::load_matrix_sync(right, walked + c * SIDE, ROW);
    wmma::mma_sync(s, left, right, s);
  }
  wmma::store_matrix_sync(scores, s, SCORE_ROW, wmma::mem_row_major);
}

// sums += weights walked. The 16-bit weights overwrote float scores, so a row of them is
// 2 * SCORE_ROW numbers long.
__device__ void add_product(Result* sums, const float* weights, const TYPE* walked) {
  Left left;
  wmma::load_matrix_sync(left, reinterpret_cast<const TYPE*>(weights), 2 * SCORE_ROW);
#pragma unroll
  for (int c = 0; c < COLUMNS; ++c) {
    Right right;
    wmma::load_matrix_sync(right, walked + c * SIDE, ROW);
    wmma::mma_sync(sums[c], left, right, sums[c]);
  }
}

// Writes factor * sums. Two lanes write one row, which starts at their `to`. Lanes without `there`
// write nothing. The warp's scores are scratch memory.
__device__ void store(Result* sums, float factor, float* scores, TYPE* to, bool there) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int c = 0; c < COLUMNS; ++c) {
    wmma::store_matrix_sync(scores, sums[c], SCORE_ROW, wmma::mem_row_major);
    __syncwarp();
    Pack<TYPE, PACK> pack;
#pragma unroll
    for (int j = 0; j < PACK; ++j)
      pack.at[j] = TYPE(factor * scores[lane / 2 * SCORE_ROW + lane % 2 * PACK + j]);
    if (there) store_pack<PACK>(to + c * SIDE, lane % 2, pack);
    __syncwarp();
  }
}

// Step 3. The block owns rows from `first` on. It walks over rows begin ... end - 1 of `members`
// heads, one head after another: `members` is `group` if the block owns keys, else 1. From one
// head to the next, walked[i] advances by apart[i] numbers, and lse and delta by n_q. sums[i] goes to
// the head whose first row is to[i], with row stride stride[i].
template <bool OwnsKeys>
__device__ void walk(const Rows (&owned)[2], Rows (&walked)[2], const long long (&apart)[2],
                     long long members, const float* lse, const float* delta, const Mask& mask,
                     long long first, long long begin, long long end, TYPE* const (&to)[2],
                     const long long (&stride)[2], float scale, float scale_log2) {
  constexpr int Sums = OwnsKeys ? 2 : 1;
  __shared__ __align__(32) TYPE own[2][SIDE * WARPS * ROW];
  __shared__ __align__(32) TYPE stages[2][2][SIDE * ROW];
  __shared__ __align__(32) float all_scores[WARPS][2][SIDE * SCORE_ROW];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float* s = all_scores[warp][0];
  float* dp = all_scores[warp][1];
  const long long n_owned = OwnsKeys ? mask.n_k : mask.n_q;
  const long long n_walked = OwnsKeys ? mask.n_q : mask.n_k;
  const int row = lane / 2;  // in the warp's tile; lanes 2 row and 2 row + 1 share its weights
  const long long mine = first + warp * SIDE + row;

  Result sums[Sums][COLUMNS];
#pragma unroll
  for (int i = 0; i < Sums; ++i) {
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) wmma::fill_fragment(sums[i][c], 0.0f);
  }
  const long long tiles = begin < end ? (end - begin + SIDE - 1) / SIDE : 0;
  const long long steps = tiles * members;
  const auto fetch = [&](long long step) {
    for (int i = 0; i < 2; ++i) {
      const Rows rows = {walked[i].at + step / tiles * apart[i], walked[i].stride};
      rows.fetch<SIDE>(stages[step % 2][i], begin + step % tiles * SIDE, n_walked);
    }
  };
  for (int i = 0; i < 2; ++i) owned[i].template fetch<SIDE * WARPS>(own[i], first, n_owned);
  if (steps > 0) fetch(0);
  __pipeline_commit();
  for (long long step = 0; step < steps; ++step) {
    if (step + 1 < steps) fetch(step + 1);  // step 5
    __pipeline_commit();
    __pipeline_wait_prior(1);  // for all copies but those of the next step
    __syncthreads();
    const TYPE* const at[2] = {stages[step % 2][0], stages[step % 2][1]};
    multiply(s, own[0] + warp * SIDE * ROW, at[0]);
    multiply(dp, own[1] + warp * SIDE * ROW, at[1]);
    __syncwarp();

    // The two lanes of a row take turns: two columns each.
    const long long start = begin + step % tiles * SIDE, of_head = step / tiles * mask.n_q;
    float p[SIDE / 2], ds[SIDE / 2];
#pragma unroll
    for (int j = 0; j < SIDE / 2; ++j) {
      const int column = j / 2 * 4 + lane % 2 * 2 + j % 2;
      const long long other = start + column;
      const long long query = OwnsKeys ? other : mine, key = OwnsKeys ? mine : other;
      p[j] = ds[j] = 0.0f;
      if (mask.sees(query, key)) {
        const int place = row * SCORE_ROW + column;
        p[j] = exp2f(s[place] * scale_log2 - lse[of_head + query]);
        ds[j] = p[j] * (dp[place] - delta[of_head + query]);
      }
    }
    __syncwarp();  // all lanes have read the scores that p and ds overwrite
#pragma unroll
    for (int j = 0; j < SIDE / 2; ++j) {
      const int place = row * 2 * SCORE_ROW + j / 2 * 4 + lane % 2 * 2 + j % 2;
      reinterpret_cast<TYPE*>(s)[place] = TYPE(p[j]);
      reinterpret_cast<TYPE*>(dp)[place] = TYPE(ds[j]);
    }
    __syncwarp();
    add_product(sums[0], dp, at[0]);
    if (OwnsKeys) add_product(sums[Sums - 1], s, at[1]);
    __syncthreads();  // the next step overwrites what this one read
  }
  store(sums[0], scale, s, to[0] + mine * stride[0], mine < n_owned);
  if (OwnsKeys) store(sums[Sums - 1], 1.0f, s, to[1] + mine * stride[1], mine < n_owned);
}

// o, d_o: [B, n_heads, n_q, HEAD_DIM] with these strides. delta: [B, n_heads, n_q].
extern "C" __global__ void __launch_bounds__(THREADS) attention_delta(
    const TYPE* o, const TYPE* d_o, float* delta, long long o_b, long long o_h, long long o_m,
    long long do_b, long long do_h, long long do_m, long long n_heads, long long n_q,
    long long n_rows) {
  const long long row = blockIdx.x * (long long)WARPS + threadIdx.x / 32;
  if (row >= n_rows) return;
  const long long b = row / n_q / n_heads, h = row / n_q % n_heads, m = row % n_q;
  o += b * o_b + h * o_h + m * o_m;
  d_o += b * do_b + h * do_h + m * do_m;
  float sum = 0.0f;
  for (int i = threadIdx.x % 32; i < HEAD_DIM; i += 32) sum += float(o[i]) * float(d_o[i]);
  sum = warp_reduce(sum, Sum());
  if (threadIdx.x % 32 == 0) delta[row] = sum;
}

// q, d_o, dq: [B, n_heads, n_q, HEAD_DIM], k, v, dk, dv: [B, n_heads / group, n_k, HEAD_DIM] with these
// strides, all multiples of 8. lse, to base 2, and delta: [B, n_heads, n_q].
extern "C" __global__ void __launch_bounds__(THREADS) attention_dkdv(
    const TYPE* q, const TYPE* k, const TYPE* v, const TYPE* d_o, const float* lse,
    const float* delta, TYPE* dk, TYPE* dv, long long q_b, long long q_h, long long q_m,
    long long k_b, long long k_h, long long k_n, long long v_b, long long v_h, long long v_n,
    long long do_b, long long do_h, long long do_m, long long dk_b, long long dk_h,
    long long dk_n, long long n_heads, long long group, long long n_q, long long n_k,
    long long n_tiles, long long causal, float scale, float scale_log2) {
  const long long head = blockIdx.x / n_tiles, first = blockIdx.x % n_tiles * SIDE * WARPS;
  const long long b = head / (n_heads / group), h = head % (n_heads / group);
  const Mask mask = {n_q, n_k, causal != 0};
  // If causal, queries before this one see none of the block's keys. It may be negative.
  const long long first_query = first - (n_k - n_q);
  const Rows owned[2] = {{k + b * k_b + h * k_h, k_n}, {v + b * v_b + h * v_h, v_n}};
  Rows walked[2] = {{q + b * q_b + h * group * q_h, q_m}, {d_o + b * do_b + h * group * do_h, do_m}};
  walk<true>(owned, walked, {q_h, do_h}, group, lse + head * group * n_q,
             delta + head * group * n_q, mask, first, causal && first_query > 0 ? first_query : 0,
             n_q, {dk + b * dk_b + h * dk_h, dv + b * dk_b + h * dk_h}, {dk_n, dk_n}, scale,
             scale_log2);
}

extern "C" __global__ void __launch_bounds__(THREADS) attention_dq(
    const TYPE* q, const TYPE* k, const TYPE* v, const TYPE* d_o, const float* lse,
    const float* delta, TYPE* dq, long long q_b, long long q_h, long long q_m, long long k_b,
    long long k_h, long long k_n, long long v_b, long long v_h, long long v_n, long long do_b,
    long long do_h, long long do_m, long long dq_b, long long dq_h, long long dq_m,
    long long n_heads, long long group, long long n_q, long long n_k, long long n_tiles,
    long long causal, float scale, float scale_log2) {
  const long long head = blockIdx.x / n_tiles;
  // If causal, tiles that see the most keys start first, so the last blocks to finish are short.
  const long long tile = causal ? n_tiles - 1 - blockIdx.x % n_tiles : blockIdx.x % n_tiles;
  const long long b = head / n_heads, h = head % n_heads, first = tile * SIDE * WARPS;
  const Mask mask = {n_q, n_k, causal != 0};
  // The block's last query, last - 1, sees the most keys. `end` is one past the last of them.
  const long long last = first + SIDE * WARPS < n_q ? first + SIDE * WARPS : n_q;
  const long long end = causal ? last + n_k - n_q : n_k;
  const Rows owned[2] = {{q + b * q_b + h * q_h, q_m}, {d_o + b * do_b + h * do_h, do_m}};
  Rows walked[2] = {{k + b * k_b + h / group * k_h, k_n}, {v + b * v_b + h / group * v_h, v_n}};
  walk<false>(owned, walked, {0, 0}, 1, lse + head * n_q, delta + head * n_q, mask, first, 0, end,
              {dq + b * dq_b + h * dq_h, nullptr}, {dq_m, 0}, scale, scale_log2);
}
