// CUDA C++ on a CPU, as far as the sources of tnp need it.
//
// A fragment of wmma is held whole by every lane, since nobody may rely on how it is spread.
#pragma once

#include "threads.h"

// ------------------------------------------------------------------------------------------- types

using __half = _Float16;
struct __nv_bfloat16 {
  uint16_t bits;
  __nv_bfloat16() = default;
  explicit __nv_bfloat16(float x) {
    uint32_t wide;
    std::memcpy(&wide, &x, 4);
    bits = std::isnan(x) ? 0x7fff : (wide + 0x7fff + (wide >> 16 & 1)) >> 16;
  }
  operator float() const {
    const uint32_t wide = uint32_t(bits) << 16;
    float x;
    std::memcpy(&x, &wide, 4);
    return x;
  }
};

// -------------------------------------------------------------------------------------------- wmma

namespace nvcuda::wmma {
struct matrix_a;
struct matrix_b;
struct accumulator;
struct row_major;
struct col_major;
enum layout_t { mem_row_major };

template <typename Use, int M, int N, int K, typename T, typename Layout = void>
struct fragment {
  static constexpr int num_elements = 256;
  T x[256];
};
template <typename F>
void fill_fragment(F& f, float value) {
  for (auto& each : f.x) each = value;
}
template <typename Use, typename T, typename Layout>
void load_matrix_sync(fragment<Use, 16, 16, 16, T, Layout>& f, const T* from, unsigned row,
                      layout_t = mem_row_major) {
  emulation::wait_for_warp();
  for (int i = 0; i < 256; ++i) {
    const bool across = std::is_same_v<Layout, col_major>;
    f.x[i] = from[across ? i % 16 * row + i / 16 : i / 16 * row + i % 16];
  }
}
template <typename F, typename T>
void store_matrix_sync(T* to, const F& f, unsigned row, layout_t) {
  emulation::wait_for_warp();
  for (int i = 0; i < 256; ++i) to[i / 16 * row + i % 16] = f.x[i];
}
template <typename D, typename A, typename B>
void mma_sync(D& d, const A& a, const B& b, const D& c) {
  float left[256], right[256];  // widened once: this is slow
  for (int i = 0; i < 256; ++i) left[i] = float(a.x[i]), right[i] = float(b.x[i]);
  for (int i = 0; i < 256; ++i) {
    float sum = c.x[i];
    for (int k = 0; k < 16; ++k) sum += left[i / 16 * 16 + k] * right[k * 16 + i % 16];
    d.x[i] = sum;
  }
}
}  // namespace nvcuda::wmma
