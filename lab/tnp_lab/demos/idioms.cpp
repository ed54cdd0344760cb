// Two cautious idioms of CuTe's examples change little or nothing in cute.cu.

#include "host.h"

#include "banks.h"

// Prints the order of a thread's values in its registers, for a layout with and without a swizzle.
template <int HeadDim>
void fragments() {
  using A = Demonstrated<HeadDim>;
  static half_t memory[A::Keys * HeadDim];
  const auto registers = [](auto layout) {
    const auto values = make_tensor(make_smem_ptr(memory), layout);
    return typename A::Mma{}.get_thread_slice(0).partition_fragment_B(values).layout();
  };
  using Transposed = typename A::Transposed;
  const auto with = registers(Transposed{});
  const auto without = registers(get_nonswizzle_portion(Transposed{}));
  printf("D = %d: %d and %d numbers, %s\n  ", HeadDim, int(size(with)), int(size(without)),
         is_same_v<decltype(with), decltype(without)> ? "the same order" : "two orders");
  print(with);
  printf("\n  ");
  print(without);
  printf("\n");
}

template <int Bits>
void bits() {
  using Rows = Layout<Shape<_8, _32>, Stride<_32, _1>>;
  const auto swizzled = composition(Swizzle<Bits, 3, 3>{}, Rows{});
  const auto tile = tile_to_shape(swizzled, Shape<_64, _32>{});
  printf("%d bits: %d turns\n", Bits, turns_of_reads(tile));
}

int main() {
  printf("1. get_nonswizzle_portion. Values lie swizzled, transposed, in shared memory.\n");
  printf("Registers have no swizzle, so the examples strip it from the layout from which\n");
  printf("registers are made. cute.cu does the same.\n");
  printf("The values of thread 0, with and without the swizzle:\n\n");
  fragments<64>();
  fragments<128>();
  fragments<32>();
  printf("\n2. Fewer bits for shorter rows. cute.cu swizzles rows of 32 numbers with 2 bits,\n");
  printf("rows of 64 with 3. Turns of a read of 8 rows of 32 numbers:\n\n");
  bits<0>();
  bits<1>();
  bits<2>();
  bits<3>();
}
