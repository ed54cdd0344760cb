// Four lanes hold a row of scores, and two shuffles find its maximum.

#include <thread>
#include <vector>

#include "host.h"

constexpr int Keys = 64;
float x(int row, int key) { return 4.0f * sinf(float(7 * row + key)); }

struct Found {
  int row, keys[3];
  float own_maximum, maximum, own_sum, sum;
} found[32];

// Computes one lane's part of the first of its rows, with the functions of cute.cu.
void run(int lane) {
  threadIdx.x = lane;
  const auto tile = make_identity_tensor(Shape<_128, Int<Keys>>{});
  const auto at = Heads64::Mma{}.get_thread_slice(lane).partition_C(tile);
  const auto at_rows = make_tensor(at.data(), as_rows(at.layout()));
  const int n_keys = size<1>(at_rows);
  const auto key = [&](int j) { return int(get<1>(at_rows(0, j))); };
  Found& mine = found[lane];
  mine = {int(get<0>(at_rows(0, 0))), {key(0), key(1), key(2)}, -INFINITY, 0.0f, 0.0f, 0.0f};
  for (int j = 0; j < n_keys; ++j)
    mine.own_maximum = fmaxf(mine.own_maximum, x(mine.row, key(j)));
  mine.maximum = over_row(mine.own_maximum, true);
  for (int j = 0; j < n_keys; ++j)
    mine.own_sum += power_of_2(x(mine.row, key(j)) - mine.maximum);
  mine.sum = over_row(mine.own_sum, false);
}

int main() {
  printf("Four neighbouring lanes hold a row of %d keys: 16 each. A lane finds the maximum of\n",
         Keys);
  printf("its own keys. Shuffles with lanes 1 and 2 away then give all four the row's maximum.\n");
  printf("Each lane sums its own powers of 2. cute.cu adds the four sums once, at the end.\n\n");
  std::vector<std::thread> warp;
  for (int lane = 0; lane < 32; ++lane) warp.emplace_back(run, lane);
  for (auto& each : warp) each.join();
  printf("lane  row  keys          own maximum    maximum    own sum        sum\n");
  for (int lane = 0; lane < 12; ++lane) {
    const Found& f = found[lane];
    printf("%4d %4d  %d, %d, %2d, ... %11.7f %10.7f %10.7f %10.7f\n", lane, f.row, f.keys[0],
           f.keys[1], f.keys[2], f.own_maximum, f.maximum, f.own_sum, f.sum);
  }
}
