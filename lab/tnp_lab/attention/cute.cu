// Attention forward in CuTe (CUTLASS 3), full or causal: wmma.cu again, with the layouts known.
//
// CuTe describes where numbers lie, in memory and in the registers of a warp, by layouts: functions
// from coordinates to places, which compose. So what wmma hides can be said:
//
// Step 1: the scores of one product are an operand of the next without leaving their registers. An
//         instruction m16n8k16 leaves a lane 2 x 2 numbers of 16 x 8; two such results side by side
//         are what it takes of a 16 x 16 operand. `as_operand` only renames them.
// Step 2: a row's numbers lie in four neighbouring lanes, so its maximum and its sum are two shuffles.
//         Coordinates of what a lane holds come from a tensor of coordinates, divided in the same way.
// Step 3: rows in shared memory are swizzled instead of padded: three bits of the row are exclusive-
//         ored into the place of each 16 bytes, and ldmatrix reads and cp.async writes without bank
//         conflicts. 64 queries, 64 keys and 64 values of D = 128 fill 48 KB, all that a block has
//         without asking for more.
// Step 4: values arrive while scores are computed, and the next keys while values are multiplied, so
//         one tile of each is enough.
//
// Formulas are those of wmma.cu (Dao, FlashAttention-2, arXiv 2307.08691, and its CuTe kernels).
//
// TYPE (cute::half_t, cute::bfloat16_t), HEAD_DIM and WARPS come from the compiler's command line.

#include <cute/tensor.hpp>

using namespace cute;

// Of a product's result (4 numbers, M, N): rows and columns, ((2, M), (2, N)).
template <class Layout>
__device__ auto as_rows(Layout result) {
  const auto l = logical_divide(result, Shape<_2>{});  // ((2, 2), M, N)
  return make_layout(make_layout(get<0, 1>(l), get<1>(l)), make_layout(get<0, 0>(l), get<2>(l)));
}

// The same as an operand of the next product, (8 numbers, M, N / 2): step 1.
template <class Layout>
__device__ auto as_operand(Layout result) {
  const auto l = logical_divide(result, Shape<Underscore, Underscore, _2>{});  // (4, M, (2, N / 2))
  return make_layout(make_layout(get<0>(l), get<2, 0>(l)), get<1>(l), get<2, 1>(l));
}

__device__ float over_row(float x, bool maximum) {  // of the four lanes that share a row: step 2
#pragma unroll
  for (int distance = 1; distance < 4; distance *= 2) {
    const float other = __shfl_xor_sync(0xffffffffu, x, distance);
    x = maximum ? fmaxf(x, other) : x + other;
  }
  return x;
}

template <class T, int HeadDim, int Warps>
struct Attention {
  static constexpr int Threads = 32 * Warps, Queries = 16 * Warps, Keys = 64;
  static_assert(Queries == Keys, "tiles of q, k and v have one layout");
  using Atom = conditional_t<is_same_v<T, half_t>, SM80_16x8x16_F32F16F16F32_TN,
                                  SM80_16x8x16_F32BF16BF16F32_TN>;
  // Each warp 16 queries; operands of keys and values in blocks of 16.
  using Mma = TiledMMA<MMA_Atom<Atom>, Layout<Shape<Int<Warps>, _1, _1>>,
                       Tile<Int<Queries>, _16, _16>>;
  // Step 3: eight rows of 64 numbers, swizzled, and as many of these as a tile is large.
  using Swizzled = decltype(composition(Swizzle<3, 3, 3>{},
                                        Layout<Shape<_8, _64>, Stride<_64, _1>>{}));
  using Shared = decltype(tile_to_shape(Swizzled{}, Shape<Int<Keys>, Int<HeadDim>>{}));
  // Values with keys as columns: [HeadDim, Keys], the same places.
  using Transposed = decltype(composition(
      Shared{}, Layout<Shape<Int<HeadDim>, Int<Keys>>, Stride<Int<Keys>, _1>>{}));
  // Eight threads copy a row's 64 numbers, 16 bytes each.
  using Fetch = decltype(make_tiled_copy(
      Copy_Atom<SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t>, T>{},
      Layout<Shape<Int<Threads / 8>, _8>, Stride<_8, _1>>{}, Layout<Shape<_1, _8>>{}));
  using Store = decltype(make_tiled_copy(
      Copy_Atom<UniversalCopy<uint128_t>, T>{},
      Layout<Shape<Int<Threads / 8>, _8>, Stride<_8, _1>>{}, Layout<Shape<_1, _8>>{}));

  // Rows of a matrix in memory to shared memory; those from n_there on are 0.
  template <class To>
  static __device__ void fetch(const T* from, long long stride, long long n_there, To to) {
    const auto whole = make_tensor(make_gmem_ptr(from), Shape<Int<Keys>, Int<HeadDim>>{},
                                   make_stride(stride, _1{}));
    Fetch copying;
    const auto mine = copying.get_thread_slice(threadIdx.x);
    const auto source = mine.partition_S(whole);
    auto target = mine.partition_D(to);
    const auto at = mine.partition_S(make_identity_tensor(Shape<Int<Keys>, Int<HeadDim>>{}));
#pragma unroll
    for (int i = 0; i < size<1>(target); ++i) {
      const bool there = get<0>(at(0, i, 0)) < n_there;
#pragma unroll
      for (int j = 0; j < size<2>(target); ++j)
        copy(copying.with(there), source(_, i, j), target(_, i, j));
    }
    cp_async_fence();
  }

  // A block's: q, o and lse from its first query on, all of k and v. Query i stands beside key
  // i + shift and, where causal, sees none after it.
  static __device__ void run(const T* q, const T* k, const T* v, T* o, float* lse,
                             long long stride_q, long long stride_k, long long stride_v,
                             long long stride_o, long long n_queries, long long n_keys,
                             long long shift, bool causal, float scale) {
    __shared__ alignas(128) T memory[3][Queries * HeadDim];
    const auto shared_q = make_tensor(make_smem_ptr(memory[0]), Shared{});
    const auto shared_k = make_tensor(make_smem_ptr(memory[1]), Shared{});
    const auto shared_v = make_tensor(make_smem_ptr(memory[2]), Shared{});
    const auto shared_vt = make_tensor(shared_v.data(), Transposed{});
    const float infinity = __int_as_float(0x7f800000);

    // Keys that the last query sees are the last that anybody here sees.
    const long long last = n_queries < Queries ? n_queries : Queries;
    const long long end = causal && last + shift < n_keys ? last + shift : n_keys;
    fetch(q, stride_q, n_queries, shared_q);
    if (end > 0) fetch(k, stride_k, n_keys, shared_k);

    Mma mma;
    const auto mine = mma.get_thread_slice(threadIdx.x);
    auto queries = mine.partition_fragment_A(shared_q);
    auto keys = mine.partition_fragment_B(shared_k);
    auto values = mine.partition_fragment_B(
        make_tensor(shared_v.data(), get_nonswizzle_portion(Transposed{})));
    const auto copy_q = make_tiled_copy_A(Copy_Atom<SM75_U32x4_LDSM_N, T>{}, mma);
    const auto copy_k = make_tiled_copy_B(Copy_Atom<SM75_U32x4_LDSM_N, T>{}, mma);
    const auto copy_v = make_tiled_copy_B(Copy_Atom<SM75_U16x8_LDSM_T, T>{}, mma);
    const auto from_q = copy_q.get_thread_slice(threadIdx.x);
    const auto from_k = copy_k.get_thread_slice(threadIdx.x);
    const auto from_v = copy_v.get_thread_slice(threadIdx.x);

    auto out = partition_fragment_C(mma, Shape<Int<Queries>, Int<HeadDim>>{});
    clear(out);
    auto out_rows = make_tensor(out.data(), as_rows(out.layout()));
    const auto at = mine.partition_C(make_identity_tensor(Shape<Int<Queries>, Int<Keys>>{}));
    const auto at_rows = make_tensor(at.data(), as_rows(at.layout()));
    constexpr int Rows = decltype(size<0>(out_rows))::value;
    float m[Rows], l[Rows];
#pragma unroll
    for (int i = 0; i < Rows; ++i) m[i] = -infinity, l[i] = 0.0f;

    cp_async_wait<0>();
    __syncthreads();
    copy(copy_q, from_q.partition_S(shared_q), from_q.retile_D(queries));

    for (long long start = 0; start < end; start += Keys) {
      fetch(v + start * stride_v, stride_v, n_keys - start, shared_v);  // step 4
      auto scores = partition_fragment_C(mma, Shape<Int<Queries>, Int<Keys>>{});
      clear(scores);
      copy(copy_k, from_k.partition_S(shared_k), from_k.retile_D(keys));
      gemm(mma, queries, keys, scores);
      cp_async_wait<0>();
      __syncthreads();  // values are there, and nobody reads these keys any more
      if (start + Keys < end)
        fetch(k + (start + Keys) * stride_k, stride_k, n_keys - start - Keys, shared_k);

      auto rows = make_tensor(scores.data(), as_rows(scores.layout()));
#pragma unroll
      for (int i = 0; i < Rows; ++i) {
        const long long beside = get<0>(at_rows(i, 0)) + shift + 1;
        const long long seen = (causal && beside < n_keys ? beside : n_keys) - start;
        float top = m[i];
#pragma unroll
        for (int j = 0; j < size<1>(rows); ++j) {
          rows(i, j) = get<1>(at_rows(i, j)) < seen ? rows(i, j) * scale : -infinity;
          top = fmaxf(top, rows(i, j));
        }
        top = over_row(top, true);
        // A row that has seen no key yet has no maximum to subtract.
        const float reference = top == -infinity ? 0.0f : top;
        const float factor = exp2f(m[i] - reference);
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < size<1>(rows); ++j) {
          rows(i, j) = exp2f(rows(i, j) - reference);
          sum += rows(i, j);
        }
        l[i] = l[i] * factor + over_row(sum, false);
        m[i] = top;
#pragma unroll
        for (int j = 0; j < size<1>(out_rows); ++j) out_rows(i, j) *= factor;
      }

      auto weights = make_tensor<T>(scores.layout());
#pragma unroll
      for (int i = 0; i < size(scores); ++i) weights(i) = T(scores(i));
      copy(copy_v, from_v.partition_S(shared_vt), from_v.retile_D(values));
      gemm(mma, make_tensor(weights.data(), as_operand(weights.layout())), values, out);
      cp_async_wait<0>();
      __syncthreads();  // the next keys are there, and nobody reads these values any more
    }

    // A row that saw no key gives 0, and an lse of -inf.
#pragma unroll
    for (int i = 0; i < Rows; ++i) {
      const float total = l[i] == 0.0f ? 1.0f : l[i];
#pragma unroll
      for (int j = 0; j < size<1>(out_rows); ++j) out_rows(i, j) *= 1.0f / total;
      const int row = get<0>(at_rows(i, 0));
      if (threadIdx.x % 4 == 0 && row < n_queries) lse[row] = m[i] + log2f(total);
    }
    // By way of shared memory, so that a thread writes 16 bytes.
    auto rounded = make_tensor<T>(out.layout());
#pragma unroll
    for (int i = 0; i < size(out); ++i) rounded(i) = T(out(i));
    const auto copy_o = make_tiled_copy_C(Copy_Atom<AutoVectorizingCopy, T>{}, mma);
    const auto into = copy_o.get_thread_slice(threadIdx.x);
    copy(copy_o, into.retile_S(rounded), into.partition_D(make_tensor(shared_q.data(), Shared{})));
    __syncthreads();
    Store store;
    const auto part = store.get_thread_slice(threadIdx.x);
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
// multiples of 8. lse: [B, n_heads, n_q], to base 2. A block has 16 WARPS queries of one head.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 2) attention_cute(
    const TYPE* q, const TYPE* k, const TYPE* v, TYPE* o, float* lse,
    long long q_b, long long q_h, long long q_m, long long k_b, long long k_h, long long k_n,
    long long v_b, long long v_h, long long v_n, long long o_b, long long o_h, long long o_m,
    long long n_heads, long long group, long long n_q, long long n_k, long long n_tiles,
    long long causal, float scale_log2) {
  const long long head = blockIdx.x / n_tiles;
  // Where causal, those that see most come first: the last to end are then short.
  const long long tile = causal ? n_tiles - 1 - blockIdx.x % n_tiles : blockIdx.x % n_tiles;
  const long long b = head / n_heads, h = head % n_heads, first = tile * 16 * WARPS;
  Attention<TYPE, HEAD_DIM, WARPS>::run(
      q + b * q_b + h * q_h + first * q_m, k + b * k_b + h / group * k_h,
      v + b * v_b + h / group * v_h, o + b * o_b + h * o_h + first * o_m, lse + head * n_q + first,
      q_m, k_n, v_n, o_m, n_q - first, n_k, n_k - n_q + first, causal != 0, scale_log2);
}
