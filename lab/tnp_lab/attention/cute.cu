// Attention forward in CuTe (CUTLASS 3), full or causal: wmma.cu again, with the layouts known.
//
// CuTe describes where numbers lie, in memory and in the registers of a warp, by layouts: functions
// from coordinates to places, which compose. wmma hides these places, which steps 1 and 2 need.
//
// Step 1: the scores of one product are an operand of the next without leaving their registers. An
//         instruction m16n8k16 leaves a lane 2 x 2 numbers of 16 x 8. Two of these results, side by
//         side, are the lane's part of a 16 x 16 operand. `as_operand` only renames them.
// Step 2: a row's numbers lie in four neighbouring lanes, so its maximum is two shuffles. Each lane
//         sums its own part of a row, and the four parts are added once, at the end. Coordinates of
//         a lane's numbers come from a tensor of coordinates, divided in the same way.
// Step 3: rows in shared memory are swizzled, not padded: the place of each 16 bytes is XORed with
//         bits of the row's number. Then neither ldmatrix nor cp.async has bank conflicts. Rows of
//         64 numbers take three bits, rows of 32 numbers two.
// Step 4: values are copied while scores are computed, and the next keys while values are
//         multiplied. So one tile of each is enough.
// Step 5: a warp has 32 queries. Each operand of keys or values that it reads from shared memory
//         serves two products of 16 queries. With 16 queries a warp, shared memory is the limit: it
//         gives 128 bytes a cycle. Up to D = 64 the queries stay in registers. At D = 128 there is
//         no room for 32, and they are read again for each tile of keys. 128 queries, 32 keys and
//         32 values then fill 48 KB, all that a block has without asking for more.
//         Where blocks are few, the limit is how long one of them takes. A warp then has 16 queries
//         and a tile twice the keys: there are twice the blocks, with half the barriers in each.
// Step 6: a mask costs a comparison for each score. Only tiles at the end of the keys and on the
//         diagonal are masked. The scale is part of the exponent, 2^(scale_log2 s - m), which is
//         one FFMA. scale_log2 is scale log2(e). The power, ex2.approx.ftz, is one instruction. As
//         in wmma.cu, o is multiplied only if a maximum grew.
//
// Formulas are those of wmma.cu (Dao, FlashAttention-2, arXiv 2307.08691, and its CuTe kernels).
//
// TYPE (cute::half_t, cute::bfloat16_t), HEAD_DIM, WARPS and QUERIES_A_WARP (32, 16) come from the
// compiler's command line.

#include <cute/tensor.hpp>

using namespace cute;

// Turns the layout of a product's result, (4, M, N), into (rows, columns): ((2, M), (2, N)).
template <class Layout>
__device__ auto as_rows(Layout result) {
  const auto l = logical_divide(result, Shape<_2>{});  // ((2, 2), M, N)
  return make_layout(make_layout(get<0, 1>(l), get<1>(l)), make_layout(get<0, 0>(l), get<2>(l)));
}

// Turns the same layout into that of the next product's left operand, (8, M, N / 2): step 1.
template <class Layout>
__device__ auto as_operand(Layout result) {
  const auto l = logical_divide(result, Shape<Underscore, Underscore, _2>{});  // (4, M, (2, N / 2))
  return make_layout(make_layout(get<0>(l), get<2, 0>(l)), get<1>(l), get<2, 1>(l));
}

// Returns the maximum, or the sum, of x over the four lanes that share a row: step 2.
__device__ float over_row(float x, bool maximum) {
#pragma unroll
  for (int distance = 1; distance < 4; distance *= 2) {
    const float other = __shfl_xor_sync(0xffffffffu, x, distance);
    x = maximum ? fmaxf(x, other) : x + other;
  }
  return x;
}

// exp2f always adds three instructions, for denormal results.
__device__ float power_of_2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// c += a b, where `read(i)` reads block i of the operands that are in shared memory.
template <class Mma, class Read, class A, class B, class C>
__device__ void multiply(Mma mma, Read read, const A& a, const B& b, C& c) {
  constexpr int Blocks = decltype(size<2>(b))::value;
#pragma unroll
  for (int i = 0; i < Blocks; ++i) {
    read(i);
    gemm(mma, a(_, _, i), b(_, _, i), c);
  }
}

// threadIdx.x is cast to int, because CuTe gives coordinates the type of the thread's number.
// Unsigned coordinates would compare wrongly with `seen`, which may be negative.
template <class T, int HeadDim, int Warps, int QueriesAWarp>
struct Attention {
  static constexpr int Threads = 32 * Warps, Queries = QueriesAWarp * Warps;
  // 64 at D = 128, with 32 queries a warp, would need 64 KB, not 48.
  static constexpr int Keys = (HeadDim <= 64 ? 64 : 32) * (32 / QueriesAWarp);
  static constexpr int Row = HeadDim < 64 ? HeadDim : 64;  // numbers of a swizzled row
  static constexpr int Across = Row / 8;  // threads that copy it, 16 bytes each
  static constexpr bool QueriesStay = QueriesAWarp * HeadDim <= 32 * 64;  // in registers: step 5
  using Atom = conditional_t<is_same_v<T, half_t>, SM80_16x8x16_F32F16F16F32_TN,
                                  SM80_16x8x16_F32BF16BF16F32_TN>;
  // One product has 16 queries of each warp. Operands of keys and values are in blocks of 16.
  using Mma = TiledMMA<MMA_Atom<Atom>, Layout<Shape<Int<Warps>, _1, _1>>,
                       Tile<Int<16 * Warps>, _16, _16>>;
  // Step 3: eight swizzled rows, and as many of these as a tile is large.
  using Swizzled = decltype(composition(Swizzle<(Row == 64 ? 3 : 2), 3, 3>{},
                                        Layout<Shape<_8, Int<Row>>, Stride<Int<Row>, _1>>{}));
  template <int Rows>
  using Shared = decltype(tile_to_shape(Swizzled{}, Shape<Int<Rows>, Int<HeadDim>>{}));
  // Values with keys as columns: [HeadDim, Keys], the same places.
  using Transposed = decltype(composition(
      Shared<Keys>{}, Layout<Shape<Int<HeadDim>, Int<Keys>>, Stride<Int<Keys>, _1>>{}));
  template <class Instruction>
  using Copy = decltype(make_tiled_copy(
      Copy_Atom<Instruction, T>{},
      Layout<Shape<Int<Threads / Across>, Int<Across>>, Stride<Int<Across>, _1>>{},
      Layout<Shape<_1, _8>>{}));
  using Fetch = Copy<SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t>>;
  using Store = Copy<UniversalCopy<uint128_t>>;

  // Starts copies of a matrix's rows to shared memory. Rows from n_there on become 0.
  template <int Rows, class To>
  static __device__ void fetch(const T* from, long long stride, int n_there, To to) {
    const auto whole = make_tensor(make_gmem_ptr(from), Shape<Int<Rows>, Int<HeadDim>>{},
                                   make_stride(stride, _1{}));
    Fetch copying;
    const auto mine = copying.get_thread_slice(int(threadIdx.x));
    const auto source = mine.partition_S(whole);
    auto target = mine.partition_D(to);
    const auto at = mine.partition_S(make_identity_tensor(Shape<Int<Rows>, Int<HeadDim>>{}));
#pragma unroll
    for (int i = 0; i < size<1>(target); ++i) {
      const bool there = get<0>(at(0, i, 0)) < n_there;
#pragma unroll
      for (int j = 0; j < size<2>(target); ++j)
        copy(copying.with(there), source(_, i, j), target(_, i, j));
    }
    cp_async_fence();
  }

  // Computes one block's part of o and lse. q, o and lse point to the block's first query, k and v
  // to the head's first key. If causal, query i (counted in the block) sees keys 0 ... i + shift.
  static __device__ void run(const T* q, const T* k, const T* v, T* o, float* lse,
                             long long stride_q, long long stride_k, long long stride_v,
                             long long stride_o, int n_queries, int n_keys, int shift, bool causal,
                             float scale_log2) {
    __shared__ __align__(128) T memory[(Queries + 2 * Keys) * HeadDim];
    const auto shared_q = make_tensor(make_smem_ptr(memory), Shared<Queries>{});
    const auto shared_k = make_tensor(make_smem_ptr(memory + Queries * HeadDim), Shared<Keys>{});
    const auto shared_v =
        make_tensor(make_smem_ptr(memory + (Queries + Keys) * HeadDim), Shared<Keys>{});
    const auto shared_vt = make_tensor(shared_v.data(), Transposed{});
    const float infinity = __int_as_float(0x7f800000);

    // The block's last query, last - 1, sees the most keys. `end` is one past the last of them.
    // Every query of the block sees the keys before `seen_by_all`.
    const int last = n_queries < Queries ? n_queries : Queries;
    const int end = causal && last + shift < n_keys ? last + shift : n_keys;
    const int seen_by_all = causal && shift + 1 < n_keys ? shift + 1 : n_keys;
    fetch<Queries>(q, stride_q, n_queries, shared_q);
    if (end > 0) fetch<Keys>(k, stride_k, n_keys, shared_k);

    Mma mma;
    const auto mine = mma.get_thread_slice(int(threadIdx.x));
    auto queries = mine.partition_fragment_A(shared_q);
    auto keys = mine.partition_fragment_B(shared_k);
    auto values = mine.partition_fragment_B(
        make_tensor(shared_v.data(), get_nonswizzle_portion(Transposed{})));
    const auto copy_q = make_tiled_copy_A(Copy_Atom<SM75_U32x4_LDSM_N, T>{}, mma);
    const auto copy_k = make_tiled_copy_B(Copy_Atom<SM75_U32x4_LDSM_N, T>{}, mma);
    const auto copy_v = make_tiled_copy_B(Copy_Atom<SM75_U16x8_LDSM_T, T>{}, mma);
    const auto from_q = copy_q.get_thread_slice(int(threadIdx.x)).partition_S(shared_q);
    const auto from_k = copy_k.get_thread_slice(int(threadIdx.x)).partition_S(shared_k);
    const auto from_v = copy_v.get_thread_slice(int(threadIdx.x)).partition_S(shared_vt);
    auto to_q = copy_q.get_thread_slice(int(threadIdx.x)).retile_D(queries);
    auto to_k = copy_k.get_thread_slice(int(threadIdx.x)).retile_D(keys);
    auto to_v = copy_v.get_thread_slice(int(threadIdx.x)).retile_D(values);
    const auto read_qk = [&](int i) {
      if (!QueriesStay) copy(copy_q, from_q(_, _, i), to_q(_, _, i));
      copy(copy_k, from_k(_, _, i), to_k(_, _, i));
    };
    const auto read_v = [&](int i) { copy(copy_v, from_v(_, _, i), to_v(_, _, i)); };

    auto out = partition_fragment_C(mma, Shape<Int<Queries>, Int<HeadDim>>{});
    clear(out);
    auto out_rows = make_tensor(out.data(), as_rows(out.layout()));
    const auto at = mine.partition_C(make_identity_tensor(Shape<Int<Queries>, Int<Keys>>{}));
    const auto at_rows = make_tensor(at.data(), as_rows(at.layout()));
    constexpr int Rows = decltype(size<0>(out_rows))::value;
    float m[Rows], l[Rows];  // l is this lane's part of the sum: step 2
#pragma unroll
    for (int i = 0; i < Rows; ++i) m[i] = -infinity, l[i] = 0.0f;

    cp_async_wait<0>();
    __syncthreads();
    if (QueriesStay) copy(copy_q, from_q, to_q);

    for (int start = 0; start < end; start += Keys) {
      fetch<Keys>(v + start * stride_v, stride_v, n_keys - start, shared_v);  // step 4
      auto scores = partition_fragment_C(mma, Shape<Int<Queries>, Int<Keys>>{});
      clear(scores);
      multiply(mma, read_qk, queries, keys, scores);
      cp_async_wait<0>();
      __syncthreads();  // the values are there, and every warp has read these keys
      if (start + Keys < end)
        fetch<Keys>(k + (start + Keys) * stride_k, stride_k, n_keys - start - Keys, shared_k);

      auto rows = make_tensor(scores.data(), as_rows(scores.layout()));
      if (start + Keys > seen_by_all) {  // step 6
#pragma unroll
        for (int i = 0; i < Rows; ++i) {
          // The number of keys that this query sees, if causal.
          const int n_seen = get<0>(at_rows(i, 0)) + shift + 1;
          const int seen = (causal && n_seen < n_keys ? n_seen : n_keys) - start;
#pragma unroll
          for (int j = 0; j < size<1>(rows); ++j)
            if (get<1>(at_rows(i, j)) >= seen) rows(i, j) = -infinity;
        }
      }
      float factors[Rows];
      bool grew = false;
#pragma unroll
      for (int i = 0; i < Rows; ++i) {
        float top = rows(i, 0);
#pragma unroll
        for (int j = 1; j < size<1>(rows); ++j) top = fmaxf(top, rows(i, j));
        top = fmaxf(m[i], over_row(top, true) * scale_log2);
        // A row that has seen no key yet has no maximum to subtract.
        const float reference = top == -infinity ? 0.0f : top;
        factors[i] = power_of_2(m[i] - reference);
        grew |= top != m[i];
        m[i] = top;
        l[i] *= factors[i];
#pragma unroll
        for (int j = 0; j < size<1>(rows); ++j) {
          rows(i, j) = power_of_2(fmaf(rows(i, j), scale_log2, -reference));
          l[i] += rows(i, j);
        }
      }
      if (__any_sync(0xffffffffu, grew)) {
#pragma unroll
        for (int i = 0; i < Rows; ++i) {
#pragma unroll
          for (int j = 0; j < size<1>(out_rows); ++j) out_rows(i, j) *= factors[i];
        }
      }

      auto weights = make_tensor<T>(scores.layout());
#pragma unroll
      for (int i = 0; i < size(scores); ++i) weights(i) = T(scores(i));
      multiply(mma, read_v, make_tensor(weights.data(), as_operand(weights.layout())), values, out);
      cp_async_wait<0>();
      __syncthreads();  // the next keys are there, and every warp has read these values
    }

    // A row that saw no key gives 0, and an lse of -inf.
#pragma unroll
    for (int i = 0; i < Rows; ++i) {
      const float sum = over_row(l[i], false);
      const float total = sum == 0.0f ? 1.0f : sum;
#pragma unroll
      for (int j = 0; j < size<1>(out_rows); ++j) out_rows(i, j) *= 1.0f / total;
      const int row = get<0>(at_rows(i, 0));
      if (threadIdx.x % 4 == 0 && row < n_queries) lse[row] = m[i] + log2f(total);
    }
    // o goes through shared memory, so that a thread writes 16 bytes at once.
    auto rounded = make_tensor<T>(out.layout());
#pragma unroll
    for (int i = 0; i < size(out); ++i) rounded(i) = T(out(i));
    const auto copy_o = make_tiled_copy_C(Copy_Atom<AutoVectorizingCopy, T>{}, mma);
    const auto into = copy_o.get_thread_slice(int(threadIdx.x));
    copy(copy_o, into.retile_S(rounded), into.partition_D(shared_q));
    __syncthreads();
    Store store;
    const auto part = store.get_thread_slice(int(threadIdx.x));
    auto whole = make_tensor(make_gmem_ptr(o), Shape<Int<Queries>, Int<HeadDim>>{},
                             make_stride(stride_o, _1{}));
    const auto source = part.partition_S(shared_q);
    auto target = part.partition_D(whole);
    const auto where = part.partition_S(make_identity_tensor(Shape<Int<Queries>, Int<HeadDim>>{}));
#pragma unroll
    for (int i = 0; i < size<1>(target); ++i)
      if (get<0>(where(0, i, 0)) < n_queries) copy(store, source(_, i, _), target(_, i, _));
  }
};

// q, o: [B, n_heads, n_q, HEAD_DIM], k, v: [B, n_heads / group, n_k, HEAD_DIM] with these strides, all
// multiples of 8. lse: [B, n_heads, n_q], to base 2. A block has
// WARPS * QUERIES_A_WARP queries of one head.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 2) attention_cute(
    const TYPE* q, const TYPE* k, const TYPE* v, TYPE* o, float* lse,
    long long q_b, long long q_h, long long q_m, long long k_b, long long k_h, long long k_n,
    long long v_b, long long v_h, long long v_n, long long o_b, long long o_h, long long o_m,
    long long n_heads, long long group, long long n_q, long long n_k, long long n_tiles,
    long long causal, float scale_log2) {
  const long long head = blockIdx.x / n_tiles;
  // If causal, tiles that see the most keys start first, so the last blocks to finish are short.
  const long long tile = causal ? n_tiles - 1 - blockIdx.x % n_tiles : blockIdx.x % n_tiles;
  const long long b = head / n_heads, h = head % n_heads, first = tile * QUERIES_A_WARP * WARPS;
  Attention<TYPE, HEAD_DIM, WARPS, QUERIES_A_WARP>::run(
      q + b * q_b + h * q_h + first * q_m, k + b * k_b + h / group * k_h,
      v + b * v_b + h / group * v_h, o + b * o_b + h * o_h + first * o_m, lse + head * n_q + first,
      q_m, k_n, v_n, o_m, int(n_q - first), int(n_k), int(n_k - n_q + first), causal != 0,
      scale_log2);
}
