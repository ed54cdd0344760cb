// Several numbers that are read or written at once.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

// Where Count numbers are 16 bytes, one instruction moves them: a warp then asks for 512 bytes at a
// time, and a quarter as many instructions are on their way as for 4 bytes each.
template <typename T, int Count>
struct alignas(sizeof(T) * Count) Pack {
  T at[Count];
};

template <int Count, typename T>
__device__ Pack<T, Count> load_pack(const T* from, long long pack) {
  return reinterpret_cast<const Pack<T, Count>*>(from)[pack];
}

template <int Count, typename T>
__device__ void store_pack(T* to, long long pack, Pack<T, Count> values) {
  reinterpret_cast<Pack<T, Count>*>(to)[pack] = values;
}
