// Cross-entropy of logits and classes: a block a row, and one pass over the row.
//
//   m = max x     s = log sum e^(x - m)     nll = m - x[target] + s
//   loss = the mean of nll over the targets that are not IGNORE_INDEX
//
// Step 1: each thread has a running maximum and the sum of e^(x - maximum). After each
//         pack the thread multiplies the sum by e^(old - new). So a row of any width is read once.
// Step 2: only at the end of the row the threads meet: one reduction finds m, and another one adds
//         up the sums, each multiplied by e^(its maximum - m).
// Step 3: the logit of the target is one number: thread 0 reads it.
// Step 4: m and s stay apart for the backward pass: m + s would round s away if logits are large.
// Step 5: the mean needs all rows, so a second kernel of one block computes it. The order of its
//         additions is fixed, and the result is the same in each run.
//
// A row whose target is IGNORE_INDEX is not read. A target that is no class makes its row NaN, and
// nothing outside the logits is read.
//
// TYPE, VECTOR (numbers of a pack), THREADS and IGNORE_INDEX come from the compiler's command line.

#include "tnp_lab/packs.cuh"
#include "tnp_lab/reduce.cuh"

// logits: rows of n_classes, each contiguous. nll, m and s: a number a row.
extern "C" __global__ void __launch_bounds__(THREADS) cross_entropy_online(
    const TYPE* logits, const long long* target, float* nll, float* m, float* s,
    long long stride_n, long long stride_t, long long n_classes) {
  __shared__ float shared[THREADS / 32];
  const long long row = blockIdx.x, packs = n_classes / VECTOR;
  const long long to = target[row * stride_t];
  const TYPE* x = logits + row * stride_n;
  if (to == IGNORE_INDEX) {  // the whole block
    if (threadIdx.x == 0) nll[row] = m[row] = s[row] = 0.0f;
    return;
  }

  // The least finite number: e^(x - highest) is 0 at x = -inf, where -inf + inf would be NaN.
  float highest = __int_as_float(0xff7fffff), total = 0.0f;
#pragma unroll 4
  for (long long i = threadIdx.x; i < packs; i += THREADS) {
    const auto pack = load_pack<VECTOR>(x, i);
    float above = highest, sum = 0.0f;
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) above = fmaxf(above, float(pack.at[j]));
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) sum += expf(float(pack.at[j]) - above);
    total = total * expf(highest - above) + sum;
    highest = above;
  }
  const float largest = block_reduce<THREADS>(highest, Max(), shared);
  total = block_reduce<THREADS>(total * expf(highest - largest), Sum(), shared);

  if (threadIdx.x == 0) {
    const bool is_class = 0 <= to && to < n_classes;
    const float log_total = is_class ? logf(total) : __int_as_float(0x7fc00000);  // NaN
    nll[row] = largest - float(x[is_class ? to : 0]) + log_total;
    m[row] = largest;
    s[row] = log_total;
  }
}

// loss and per_target: a number each. per_target is 1 / the number of targets that count, or 1.
extern "C" __global__ void __launch_bounds__(THREADS) cross_entropy_mean(
    const float* nll, const long long* target, float* loss, float* per_target, long long stride_t,
    long long n_rows) {
  __shared__ float shared[THREADS / 32];
  float total = 0.0f, counted = 0.0f;
#pragma unroll 4
  for (long long row = threadIdx.x; row < n_rows; row += THREADS) {
    total += nll[row];
    counted += target[row * stride_t] == IGNORE_INDEX ? 0.0f : 1.0f;
  }
  total = block_reduce<THREADS>(total, Sum(), shared);
  counted = block_reduce<THREADS>(counted, Sum(), shared);
  if (threadIdx.x == 0) {
    *loss = total / counted;  // NaN if no target counts
    *per_target = 1.0f / fmaxf(counted, 1.0f);
  }
}
