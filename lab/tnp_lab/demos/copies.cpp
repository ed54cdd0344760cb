// A tiled copy says which thread copies which 16 bytes.

#include <set>

#include "host.h"

constexpr int Rows = 128, Columns = 64, Threads = 128;

// Calls found(thread, row, column, step) for each 16 bytes that `copying` copies.
template <class Copy, class Found>
void each_copy(Copy copying, Found found) {
  for (int thread = 0; thread < Threads; ++thread) {
    const auto tile = make_identity_tensor(Shape<Int<Rows>, Int<Columns>>{});
    const auto mine = copying.get_thread_slice(thread).partition_S(tile);
    for (int i = 0; i < size<1>(mine); ++i)
      for (int j = 0; j < size<2>(mine); ++j)
        found(thread, int(get<0>(mine(0, i, j))), int(get<1>(mine(0, i, j))), i);
  }
}

// Returns how many rows, each a line of 128 bytes, the first warp reads with its first copies.
template <class Copy>
int lines(Copy copying) {
  std::set<int> rows;
  each_copy(copying, [&](int thread, int row, int, int step) {
    if (thread < 32 && step == 0) rows.insert(row);
  });
  return rows.size();
}

int main() {
  printf("cute.cu copies a tile of 128 queries x 64 numbers with 128 threads.\n");
  printf("Its copy is made of an instruction (16 bytes, 8 numbers) and a layout of threads.\n");
  static int owner[Rows][Columns / 8], copied[Rows][Columns / 8];
  each_copy(Heads64::Fetch{}, [&](int thread, int row, int column, int) {
    owner[row][column / 8] = thread;
    ++copied[row][column / 8];
  });
  printf("\nThe thread that copies each 16 bytes of rows 0 to 3, and of rows 15 and 16:\n");
  for (int row : {0, 1, 2, 3, 15, 16}) {
    printf("row %3d:", row);
    for (int thread : owner[row]) printf("%5d", thread);
    printf("\n");
  }
  int once = 0;
  for (const auto& row : copied)
    for (int times : row) once += times == 1;
  printf("\n%d of %d pieces of 16 bytes are copied exactly once.\n", once, Rows * Columns / 8);
  printf("\nThread 37 copies, in this order, (row, column):");
  each_copy(Heads64::Fetch{}, [](int thread, int row, int column, int) {
    if (thread == 37) printf(" (%d, %d)", row, column);
  });

  using Along = Layout<Shape<_16, _8>, Stride<_1, _16>>;  // neighbouring threads in one column
  using Atom = Copy_Atom<UniversalCopy<uint128_t>, half_t>;
  const auto other = make_tiled_copy(Atom{}, Along{}, Layout<Shape<_1, _8>>{});
  printf("\n\nNeighbouring threads should read neighbouring memory. Lines of 128 bytes that a\n");
  printf("warp reads at once: %d as in cute.cu, %d with threads along a column.\n",
         lines(Heads64::Fetch{}), lines(other));
}
