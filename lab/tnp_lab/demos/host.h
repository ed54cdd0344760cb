// Lets a program on a CPU include cute.cu, and use its layouts and small functions.
//
// The attention kernel itself does not run here: NotRun takes its place at the end of cute.cu.
// A lane is a thread of the CPU, which sets threadIdx.x.
#pragma once

#include <barrier>
#include <cmath>
#include <cstdio>
#include <cute/tensor.hpp>

struct Index {
  int x;
};
inline thread_local Index threadIdx{0};
inline Index blockIdx{0};

inline float exchanged[32];
inline std::barrier<> lanes(32);
inline float __shfl_xor_sync(unsigned, float x, int distance) {
  exchanged[threadIdx.x] = x;
  lanes.arrive_and_wait();
  const float found = exchanged[threadIdx.x ^ distance];
  lanes.arrive_and_wait();
  return found;
}

// The kernel names these, and no demo calls them.
float __int_as_float(unsigned);
bool __any_sync(unsigned, bool);
void __syncthreads();
struct NotRun {};
template <class T, int HeadDim, int Warps, int QueriesAWarp>
struct Attention;
template <>
struct Attention<NotRun, 64, 4, 32> {
  static void run(auto...) {}
};

#undef __launch_bounds__
#define __launch_bounds__(...)
#define asm(...) y = exp2f(x)  // the one instruction in PTX that cute.cu has
#define TYPE NotRun
#define HEAD_DIM 64
#define WARPS 4
#define QUERIES_A_WARP 32
#include "tnp_lab/attention/cute.cu"
#undef asm

template <int HeadDim>
using Demonstrated = Attention<half_t, HeadDim, WARPS, QUERIES_A_WARP>;
using Heads64 = Demonstrated<64>;
