// Threads of CUDA C++ on a CPU: one block after another, each thread a fiber that runs until it waits
// for the others. Rounding is that of the CPU's float.
//
// What cp.async copies arrives when it is waited for, and not before.
#pragma once

#include <ucontext.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)

inline float __int_as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline float __fdividef(float x, float y) { return x / y; }

// ------------------------------------------------------------------------------------------ threads

struct Index {
  unsigned x;
};
inline Index threadIdx, blockIdx;

namespace emulation {
struct Copy {
  void* to;
  const void* from;
  size_t bytes, zeros;
};
constexpr size_t STACK_BYTES = 1 << 18;
struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[STACK_BYTES]};
  bool done = false;
  std::vector<std::vector<Copy>> copies;  // in groups, the last not yet committed
};
struct Barrier {
  int waiting = 0, round = 0;
};
inline std::vector<Thread> threads;  // whose stacks serve one block after another
inline std::vector<Barrier> barriers;  // of the block, then of each warp
inline std::vector<float> exchanged;
inline ucontext_t scheduler;
inline std::function<void()> kernel;

inline Thread& self() { return threads[threadIdx.x]; }
inline void wait(size_t which, size_t n) {
  Barrier& barrier = barriers[which];
  const int round = barrier.round;
  if (++barrier.waiting == int(n)) {
    barrier.waiting = 0;
    ++barrier.round;
  }
  while (barrier.round == round) swapcontext(&self().context, &scheduler);
}
inline void wait_for_warp() { wait(1 + threadIdx.x / 32, 32); }
inline void start() {
  kernel();
  self().done = true;
}

inline void run_block(unsigned block, unsigned n) {
  blockIdx.x = block;
  threads.resize(n);
  barriers = std::vector<Barrier>(1 + n / 32);
  exchanged.resize(n);
  for (auto& each : threads) {
    each.done = false;
    each.copies.assign(1, {});
    getcontext(&each.context);
    each.context.uc_stack.ss_sp = each.stack.get();
    each.context.uc_stack.ss_size = STACK_BYTES;
    each.context.uc_link = &scheduler;
    makecontext(&each.context, start, 0);
  }
  for (bool left = true; left;) {
    left = false;
    for (unsigned i = 0; i < n; ++i) {
      if (threads[i].done) continue;
      left = true;
      threadIdx.x = i;
      swapcontext(&scheduler, &threads[i].context);
    }
  }
}

template <typename... Arguments, size_t... At>
void call(void (*function)(Arguments...), void** given, std::index_sequence<At...>) {
  function(*static_cast<std::remove_const_t<Arguments>*>(given[At])...);
}
template <typename... Arguments>
void run(void (*function)(Arguments...), unsigned grid, unsigned n, void** given) {
  kernel = [=] { call(function, given, std::index_sequence_for<Arguments...>()); };
  for (unsigned block = 0; block < grid; ++block) run_block(block, n);
}
}  // namespace emulation

inline void __syncthreads() { emulation::wait(0, emulation::threads.size()); }
inline void __syncwarp() { emulation::wait_for_warp(); }
inline float __shfl_xor_sync(unsigned, float x, int distance) {
  emulation::exchanged[threadIdx.x] = x;
  emulation::wait_for_warp();
  const float found = emulation::exchanged[threadIdx.x ^ distance];
  emulation::wait_for_warp();
  return found;
}
inline bool __any_sync(unsigned, bool holds) {
  float any = holds;
  for (int distance = 1; distance < 32; distance *= 2)
    any = std::fmax(any, __shfl_xor_sync(0, any, distance));
  return any != 0.0f;
}

// ------------------------------------------------------------------------------------ async copies

inline void __pipeline_memcpy_async(void* to, const void* from, size_t bytes, size_t zeros = 0) {
  emulation::self().copies.back().push_back({to, from, bytes, zeros});
}
inline void __pipeline_commit() { emulation::self().copies.emplace_back(); }
inline void __pipeline_wait_prior(size_t but) {
  auto& groups = emulation::self().copies;
  while (groups.size() > but + 1) {
    for (const auto& each : groups.front()) {
      std::memset(each.to, 0, each.bytes);
      std::memcpy(each.to, each.from, each.bytes - each.zeros);
    }
    groups.erase(groups.begin());
  }
}
