// A swizzle, one XOR, frees shared memory of bank conflicts.

#include <algorithm>

#include "host.h"

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

// Prints the groups of the first 8 rows, and the most turns of a read and of a write.
template <class Layout>
void show(const char* name, const Layout& layout) {
  constexpr int Pieces = size<1>(Layout{}) / 8;
  printf("\n%s, D = %d\n", name, 8 * Pieces);
  for (int row = 0; row < 8; ++row) {
    printf("  row %d:", row);
    for (int piece = 0; piece < Pieces; ++piece) printf("%3d", group(layout, row, piece));
    printf("\n");
  }
  int read = 0, write = 0;
  for (int piece = 0; piece < Pieces; ++piece)
    read = std::max(read, turns([&](int i) { return group(layout, i, piece); }));
  for (int first = 0; first < 8; ++first)
    write = std::max(write, turns([&](int i) {
              const int at = 8 * first + i;
              return group(layout, at / Pieces, at % Pieces);
            }));
  printf("  turns: read %d, write %d; numbers of a tile: %d\n", read, write, int(cosize(layout)));
}

template <int HeadDim>
void compare() {
  using Rows = Shape<_64, Int<HeadDim>>;
  show("plain", Layout<Rows, Stride<Int<HeadDim>, _1>>{});
  show("padded", Layout<Rows, Stride<Int<HeadDim + 8>, _1>>{});
  show("swizzled", typename Attention<half_t, HeadDim, 4>::template Shared<64>{});
}

int main() {
  printf("ldmatrix reads a column of 8 rows at once, 16 bytes of each. cp.async writes 8 pieces\n");
  printf("of 16 bytes side by side. Accesses in one group of banks wait for each other. Each table\n");
  printf("shows the group of every 16 bytes: rows down, pieces across.\n");
  compare<64>();
  compare<32>();
}
