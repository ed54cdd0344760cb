// A layout is a function from coordinates to places, and layouts compose.

#include "host.h"

// Prints a layout and its places: a line for each row.
template <class Layout>
void show(const char* name, const Layout& layout) {
  printf("\n%s = ", name);
  print(layout);
  printf("\n");
  for (int i = 0; i < size<0>(layout); ++i) {
    for (int j = 0; j < size<1>(layout); ++j) printf("%4d", int(layout(i, j)));
    printf("\n");
  }
}

int main() {
  printf("Shape:stride. Coordinate (i, j) lies at i * stride_0 + j * stride_1.\n");
  const auto keys = Layout<Shape<_4, _3>, Stride<_3, _1>>{};
  show("keys", keys);

  printf("\nA single number is a coordinate too. It counts along the first mode first:");
  printf("\nkeys(5) = keys(5 %% 4, 5 / 4) = %d\n", int(keys(5)));

  printf("\ncomposition(f, g)(c) is f(g(c)). Here g turns coordinate (j, i) into the number");
  printf("\nof (i, j), so the same memory is seen transposed. cute.cu sees values like this.\n");
  const auto swap = Layout<Shape<_3, _4>, Stride<_4, _1>>{};
  show("swap", swap);
  show("composition(keys, swap)", composition(keys, swap));

  printf("\nModes nest: (2, M) is one coordinate with two strides. A lane's scores in cute.cu are");
  printf("\n(4 numbers of an instruction, M, N). `as_rows` regroups them as (rows, columns):\n");
  const auto scores = partition_fragment_C(Heads64::Mma{}, Shape<_128, _16>{}).layout();
  printf("\nscores = ");
  print(scores);
  show("as_rows(scores)", as_rows(scores));
}
