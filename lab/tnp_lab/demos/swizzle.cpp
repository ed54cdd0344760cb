// A swizzle, one XOR, frees shared memory of bank conflicts.

#include "host.h"

#include "banks.h"

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
  int write = 0;
  for (int first = 0; first < 8; ++first)
    write = std::max(write, turns([&](int i) {
              const int at = 8 * first + i;
              return group(layout, at / Pieces, at % Pieces);
            }));
  printf("  turns: read %d, write %d; numbers of a tile: %d\n", turns_of_reads(layout), write,
         int(cosize(layout)));
}

template <int HeadDim>
void compare() {
  using Rows = Shape<_64, Int<HeadDim>>;
  show("plain", Layout<Rows, Stride<Int<HeadDim>, _1>>{});
  show("padded", Layout<Rows, Stride<Int<HeadDim + 8>, _1>>{});
  show("swizzled", typename Demonstrated<HeadDim>::template Shared<64>{});
}

int main() {
  printf("ldmatrix reads a column of 8 rows at once, 16 bytes of each. cp.async writes 8 pieces\n");
  printf("of 16 bytes side by side. Accesses in one group of banks wait for each other. Each\n");
  printf("table shows the group of every 16 bytes: rows down, pieces across.\n");
  compare<64>();
  compare<32>();
}
