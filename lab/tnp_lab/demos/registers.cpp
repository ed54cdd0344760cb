// A lane's scores are already the operand that the next product reads.

#include "host.h"

// Prints, for each element of a tile of 16 rows, the lane that holds it and the lane's number.
template <class Layout>
void show(const char* name, const Layout& layout) {  // (lane, number) -> row + 16 column
  constexpr int Columns = size(Layout{}) / 16;
  int lane[16][Columns], number[16][Columns];
  for (int i = 0; i < size<0>(layout); ++i)
    for (int j = 0; j < size<1>(layout); ++j) {
      const int at = layout(i, j);
      lane[at % 16][at / 16] = i, number[at % 16][at / 16] = j;
    }
  printf("\n%s, lane.number:\n", name);
  for (int row = 0; row < 16; ++row) {
    printf("row %2d:", row);
    for (int column = 0; column < Columns; ++column)
      printf(" %2d.%d", lane[row][column], number[row][column]);
    printf("\n");
  }
}

int main() {
  printf("The instruction m16n8k16 multiplies a left operand of 16 x 16 by a right one\n");
  printf("of 16 x 8. Each of 32 lanes holds 4 numbers of the result, and 8 of the left operand.\n");
  using Atom = MMA_Atom<Heads64::Atom>;
  show("result, 16 x 8", Atom::LayoutC_TV{});
  show("left operand, 16 x 16", Atom::LayoutA_TV{});
  printf("\nTwo results side by side are a left operand: its numbers 0 to 3 are those of the\n");
  printf("first result, 4 to 7 those of the second. `as_operand` of cute.cu only renames them:\n");

  const auto scores = partition_fragment_C(Heads64::Mma{}, Shape<_128, _64>{}).layout();
  printf("\nscores             ");
  print(scores);
  printf("\nas_operand(scores) ");
  print(as_operand(scores));

  // Coordinates of a thread's scores, renamed, beside those of the operand that it must hold.
  const auto tile = make_identity_tensor(Shape<_128, _64>{});
  int same = 0, all = 0;
  for (int thread = 0; thread < 128; ++thread) {
    const auto mine = Heads64::Mma{}.get_thread_slice(thread);
    const auto held = mine.partition_C(tile);
    const auto renamed = make_tensor(held.data(), as_operand(held.layout()));
    const auto needed = mine.partition_A(tile);
    for (int i = 0; i < size(needed); ++i, ++all) same += renamed(i) == needed(i);
  }
  printf("\n\n%d of %d scores already lie where the next product reads them.\n", same, all);
}
