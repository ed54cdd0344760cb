"""Multiplies x wᵀ of 8-bit operands (e4m3) for Hopper, for products of inner width 512.

It follows `tnp.ops._shared.hopper_matmul`: rows of x stay in shared memory for all tiles of a row,
a producer warp streams blocks of w, and two consumer warpgroups multiply in turn, so that one works
on its product while the other multiplies. In 8 bits twice as many rows fit. So a program keeps 256
rows, 128 for each consumer, and both read the same blocks of w. That halves the reads of w from L2,
which would limit these products.

Consumers take the blocks of a tile one after the other. A stage is free when both have read it. A
tile has 4 blocks and there are 5 stages, so that the next tile's first block is there when the
second consumer begins. The producer overwrites block k of x when both consumers have read the block
of w four steps earlier. That block's `empty` barrier signals this.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tnp.ops._shared.hopper_matmul import ACC, ACC_8BIT, ROWS, TILE, tiles
from tnp.ops._shared.hopper_primitives import barriers, opaque, structure

BLOCK_K = gl.constexpr(128)
K_BLOCKS = gl.constexpr(4)  # of a row of 512
STAGES = gl.constexpr(5)
UNIT = gl.constexpr(256)  # rows of a program
REGISTERS = gl.constexpr(240)
# The descriptors of x and w.
MAPS = tiles(ROWS.value, BLOCK_K.value), tiles(TILE.value, BLOCK_K.value)


@structure
class Pipeline:
    """Holds shared memory and barriers of producer and consumers, and a program's tiles."""

    x: gl.shared_memory_descriptor  # 256 rows, as 4 blocks of four quarters [64, 128]
    w: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    turn: gl.shared_memory_descriptor  # for each consumer: it may multiply
    n_columns: gl.tensor  # tiles in a row
    first: gl.tensor  # first tile of the program
    last: gl.tensor  # last tile of the program + 1


@gluon.jit
def pipeline(x_desc, w_desc, n_rows, n_columns, GROUP: gl.constexpr):
    """Returns a program's pipeline. It takes whole groups of GROUP tiles; GROUP divides a row."""
    groups = gl.cdiv(n_rows, UNIT) * (n_columns // GROUP)
    program = gl.program_id(0)
    return Pipeline(
        gl.allocate_shared_memory(
            x_desc.dtype, [4 * K_BLOCKS] + x_desc.block_type.shape, x_desc.layout
        ),
        gl.allocate_shared_memory(w_desc.dtype, [STAGES] + w_desc.block_type.shape, w_desc.layout),
        barriers(STAGES, 1), barriers(STAGES, 2), barriers(2, 1), n_columns,
        program * groups // gl.num_programs(0) * GROUP,
        (program + 1) * groups // gl.num_programs(0) * GROUP,
    )  # fmt: skip


@gluon.jit
def produce(pipe, x_desc, w_desc):
    """Loads the operands of all tiles, in the producer."""
    W_BYTES: gl.constexpr = w_desc.block_type.nbytes
    X_BYTES: gl.constexpr = 4 * x_desc.block_type.nbytes
    for tile in range(pipe.first, pipe.last):
        row = tile // pipe.n_columns * UNIT
        column = tile % pipe.n_columns * TILE
        begins = (tile == pipe.first) | (column == 0)
        for k in gl.static_range(K_BLOCKS):
            step = (tile - pipe.first) * K_BLOCKS + k
            full = pipe.full.index(step % STAGES)
            mbarrier.wait(pipe.empty.index(step % STAGES), (step // STAGES + 1) & 1)
            # This block of x was last read with the block of w that came 4 before.
            before = gl.maximum(step - K_BLOCKS, 0)
            replaces = begins & (step >= K_BLOCKS)
            mbarrier.wait(pipe.empty.index(before % STAGES), (before // STAGES) & 1, pred=replaces)
            mbarrier.expect(full, W_BYTES, pred=begins == 0)
            mbarrier.expect(full, W_BYTES + X_BYTES, pred=begins)
            for part in gl.static_range(4):
                tma.async_copy_global_to_shared(
                    x_desc, [row + part * ROWS, k * BLOCK_K], full, pipe.x.index(4 * k + part),
                    begins,
                )  # fmt: skip
            at = [column, k * BLOCK_K]
            tma.async_copy_global_to_shared(w_desc, at, full, pipe.w.index(step % STAGES))


@gluon.jit
def multiply(pipe, tile, WARPGROUP: gl.constexpr):
    """Returns the product of a consumer's 128 rows and a tile's columns, as two halves [64, 128].

    Consumer 0 goes first. Each consumer releases the other when its own last block arrives.
    """
    turn = tile - pipe.first
    mbarrier.wait(pipe.turn.index(WARPGROUP), (turn + WARPGROUP + 1) & 1)
    upper = gl.zeros([ROWS, TILE], gl.float32, ACC_8BIT)
    lower = gl.zeros([ROWS, TILE], gl.float32, ACC_8BIT)
    # Without `opaque` the addresses of all blocks would be kept for all tiles, and spill.
    nothing = opaque(0)
    for k in gl.static_range(K_BLOCKS):
        step = turn * K_BLOCKS + k
        mbarrier.wait(pipe.full.index(step % STAGES), (step // STAGES) & 1)
        if k == K_BLOCKS - 1:
            mbarrier.arrive(pipe.turn.index(1 - WARPGROUP), count=1)
        w = pipe.w.index(step % STAGES).permute((1, 0))
        x = 4 * k + 2 * WARPGROUP + nothing
        upper = warpgroup_mma(pipe.x.index(x), w, upper, use_acc=k > 0, is_async=True)
        lower = warpgroup_mma(pipe.x.index(x + 1), w, lower, use_acc=k > 0, is_async=True)
        if k > 0:
            upper, lower = warpgroup_mma_wait(2, deps=[upper, lower])
            mbarrier.arrive(pipe.empty.index((step - 1) % STAGES), count=1)
    upper, lower = warpgroup_mma_wait(0, deps=[upper, lower])
    mbarrier.arrive(pipe.empty.index((turn * K_BLOCKS + K_BLOCKS - 1) % STAGES), count=1)
    return (
        gl.convert_layout(upper, ACC, assert_trivial=True),
        gl.convert_layout(lower, ACC, assert_trivial=True),
    )
