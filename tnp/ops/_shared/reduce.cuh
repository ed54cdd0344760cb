// Reductions over the threads of a warp and of a block: what softmax, norms and losses are made of.
#pragma once

struct Sum {
  static __device__ float identity() { return 0.0f; }
  __device__ float operator()(float a, float b) const { return a + b; }
};

struct Max {
  static __device__ float identity() { return __int_as_float(0xff800000); }  // -inf
  __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

// Over the 32 lanes of a warp: five exchanges between registers, without memory and without a
// barrier. Before step i every lane holds the result of 2^i lanes, afterwards of twice as many.
template <typename Op>
__device__ float warp_reduce(float x, Op op) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2)
    x = op(x, __shfl_xor_sync(0xffffffffu, x, distance));
  return x;
}

// Over a block, as a tree in shared memory: the first half of the threads takes what the second
// half holds, then a quarter takes the next, and so on. Each level costs a barrier, and from the
// fifth last on most lanes of the only warp that works are idle: ten barriers for 512 threads.
template <int Threads, typename Op>
__device__ float tree_reduce(float x, Op op, float* shared /* [Threads] */) {
  const int thread = threadIdx.x;
  shared[thread] = x;
  __syncthreads();
#pragma unroll
  for (int half = Threads / 2; half > 0; half /= 2) {
    if (thread < half) shared[thread] = op(shared[thread], shared[thread + half]);
    __syncthreads();
  }
  const float result = shared[0];
  __syncthreads();  // nobody overwrites it before all have read it
  return result;
}

// The same by shuffles: each warp reduces its own lanes, and one number a warp goes through shared
// memory. Two barriers, however many threads there are; none where one warp is all.
template <int Threads, typename Op>
__device__ float block_reduce(float x, Op op, float* shared /* [Threads / 32] */) {
  constexpr int Warps = Threads / 32;
  x = warp_reduce(x, op);
  if (Warps > 1) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane == 0) shared[warp] = x;
    __syncthreads();
    x = warp_reduce(lane < Warps ? shared[lane] : op.identity(), op);
    __syncthreads();  // nobody overwrites it before all have read it
  }
  return x;
}
