// CuTe on a CPU: CUTLASS's own headers, with the instructions of a warp that `cute.cu` names.
#pragma once

#include <cute/tensor.hpp>

#undef __global__
#undef __device__
#undef __shared__
#undef __align__
#undef __launch_bounds__
#include "threads.h"

namespace emulation {
struct Lane {
  const void* row;
  uint32_t a[4], b[2];
};
inline std::array<Lane, 1024> lanes;  // of a block

// Numbers of 16 bits, two in a register.
template <typename T>
T number(uint32_t of_two, int which) {
  const uint16_t bits = of_two >> 16 * which;
  T x;
  std::memcpy(&x, &bits, 2);
  return x;
}

// Four matrices of 8 x 8: lane i names row i % 8 of matrix i / 8. A lane gets two numbers of each.
template <bool Transposed>
struct LoadMatrix {
  using SRegisters = cute::uint128_t[1];
  using DRegisters = uint32_t[4];
  static void copy(const cute::uint128_t& from, uint32_t& d0, uint32_t& d1, uint32_t& d2,
                   uint32_t& d3) {
    const int first = threadIdx.x / 32 * 32, lane = threadIdx.x % 32;
    lanes[threadIdx.x].row = &from;
    wait_for_warp();
    uint32_t* const found[] = {&d0, &d1, &d2, &d3};
    for (int i = 0; i < 4; ++i) {
      *found[i] = 0;
      for (int j = 0; j < 2; ++j) {
        const int along = lane % 4 * 2 + j, across = lane / 4;
        const int row = Transposed ? along : across, column = Transposed ? across : along;
        const auto* numbers = static_cast<const uint16_t*>(lanes[first + 8 * i + row].row);
        *found[i] |= uint32_t(numbers[column]) << 16 * j;
      }
    }
    wait_for_warp();
  }
};

// 16 x 8 x 16. Lane 4 i + j has rows i and i + 8 of a and of the result, and column i of b.
template <typename T>
struct Multiply {
  using DRegisters = float[4];
  using ARegisters = uint32_t[4];
  using BRegisters = uint32_t[2];
  using CRegisters = float[4];
  static void fma(float& d0, float& d1, float& d2, float& d3, const uint32_t& a0,
                  const uint32_t& a1, const uint32_t& a2, const uint32_t& a3, const uint32_t& b0,
                  const uint32_t& b1, const float& c0, const float& c1, const float& c2,
                  const float& c3) {
    const int first = threadIdx.x / 32 * 32, lane = threadIdx.x % 32;
    lanes[threadIdx.x] = {nullptr, {a0, a1, a2, a3}, {b0, b1}};
    wait_for_warp();
    float sums[] = {c0, c1, c2, c3};
    for (int i = 0; i < 4; ++i)
      for (int k = 0; k < 16; ++k) {
        const int column = lane % 4 * 2 + i % 2;
        const Lane& of_a = lanes[first + lane / 4 * 4 + k % 8 / 2];
        const Lane& of_b = lanes[first + column * 4 + k % 8 / 2];
        sums[i] += float(number<T>(of_a.a[k / 8 * 2 + i / 2], k % 2)) *
                   float(number<T>(of_b.b[k / 8], k % 2));
      }
    wait_for_warp();
    d0 = sums[0], d1 = sums[1], d2 = sums[2], d3 = sums[3];
  }
};
}  // namespace emulation

namespace cute {
template <>
struct SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t, uint128_t> {
  using SRegisters = uint128_t[1];
  using DRegisters = uint128_t[1];
  static void copy(const uint128_t& from, uint128_t& to, bool there) {
    __pipeline_memcpy_async(&to, &from, 16, there ? 0 : 16);
  }
};
template <>
struct Copy_Traits<emulation::LoadMatrix<false>> : Copy_Traits<SM75_U32x4_LDSM_N> {};
template <>
struct Copy_Traits<emulation::LoadMatrix<true>> : Copy_Traits<SM75_U16x8_LDSM_T> {};
template <>
struct MMA_Traits<emulation::Multiply<half_t>> : MMA_Traits<SM80_16x8x16_F32F16F16F32_TN> {};
template <>
struct MMA_Traits<emulation::Multiply<bfloat16_t>> : MMA_Traits<SM80_16x8x16_F32BF16BF16F32_TN> {};
}  // namespace cute

#define SM75_U32x4_LDSM_N emulation::LoadMatrix<false>
#define SM75_U16x8_LDSM_T emulation::LoadMatrix<true>
#define SM80_16x8x16_F32F16F16F32_TN emulation::Multiply<cute::half_t>
#define SM80_16x8x16_F32BF16BF16F32_TN emulation::Multiply<cute::bfloat16_t>
#define cp_async_fence __pipeline_commit
#define cp_async_wait emulation::wait_for_copies
namespace emulation {
template <int But>
void wait_for_copies() {
  __pipeline_wait_prior(But);
}
}  // namespace emulation
