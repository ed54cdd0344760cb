// Counts bank conflicts of rows of 16-bit numbers in shared memory.
#pragma once

#include <algorithm>

// Shared memory has 32 banks of 4 bytes, so 16 bytes lie in one of 8 groups of banks.
template <class Layout>
int group(const Layout& layout, int row, int piece) {
  return int(layout(row, 8 * piece)) * 2 / 16 % 8;
}

// Returns how many turns 8 accesses of 16 bytes take: the most of them in one group.
template <class Place>
int turns(Place place) {
  int used[8] = {};
  for (int i = 0; i < 8; ++i) ++used[place(i)];
  return *std::max_element(used, used + 8);
}

// Returns the most turns in which ldmatrix reads 16 bytes of each of the first 8 rows.
template <class Layout>
int turns_of_reads(const Layout& layout) {
  int most = 0;
  for (int piece = 0; piece < size<1>(layout) / 8; ++piece)
    most = std::max(most, turns([&](int i) { return group(layout, i, piece); }));
  return most;
}
