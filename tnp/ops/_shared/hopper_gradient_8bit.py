"""Computes the gradient of a weight from panels in 8 bits on Hopper, as `gradient_8bit` says.

A producer warp streams panels [128, 128] of both operands by TMA. Two consumer warpgroups own 64
rows of the tile each. One adds up a block's product in float32 while the tensor cores work for the
other.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tnp.dispatch.devices import Target
from tnp.dispatch.launcher import Bound
from tnp.ops._shared.gradient_8bit import TILE, Gradient, shares_of, summed
from tnp.ops._shared.hopper_matmul import ACC_8BIT, ROWS, tiles
from tnp.ops._shared.hopper_primitives import barriers, structure

STAGES = 6
BLOCK = gl.constexpr(128)  # rows of a panel, and rows and columns of a tile


@structure
class Pipeline:
    """Holds shared memory and barriers of producer and consumers, and a program's blocks."""

    a: gl.shared_memory_descriptor  # 2 · stages, [64, 128]
    b: gl.shared_memory_descriptor  # stages, [128, 128]
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    n_a: gl.tensor
    n_b: gl.tensor
    row: gl.tensor  # of the tile
    column: gl.tensor
    first: gl.tensor  # block
    last: gl.tensor
    STAGES: gl.constexpr


@gluon.jit
def _produce(pipe, a_desc, b_desc):
    for i in range(pipe.last - pipe.first):
        stage = i % pipe.STAGES
        full = pipe.full.index(stage)
        mbarrier.wait(pipe.empty.index(stage), (i // pipe.STAGES + 1) & 1)
        mbarrier.expect(full, 2 * a_desc.block_type.nbytes + b_desc.block_type.nbytes)
        block = pipe.first + i
        for half in gl.static_range(2):
            at = [block * pipe.n_a + pipe.row + half * ROWS, 0]
            tma.async_copy_global_to_shared(a_desc, at, full, pipe.a.index(2 * stage + half))
        at = [block * pipe.n_b + pipe.column, 0]
        tma.async_copy_global_to_shared(b_desc, at, full, pipe.b.index(stage))


@gluon.jit
def _scale(ptrs, block, last):
    """Returns the product of a block's scales; past the last block it is unused."""
    at = gl.minimum(block, last - 1) * BLOCK
    return gl.load(ptrs[0] + at) * gl.load(ptrs[1] + at)


@gluon.jit
def _consume(pipe, scale_ptrs, part_ptr, WARPGROUP: gl.constexpr):
    acc = gl.zeros([ROWS, BLOCK], gl.float32, ACC_8BIT)
    scale = _scale(scale_ptrs, pipe.first, pipe.last)
    for i in range(pipe.last - pipe.first):
        stage = i % pipe.STAGES
        mbarrier.wait(pipe.full.index(stage), (i // pipe.STAGES) & 1)
        zeros = gl.zeros([ROWS, BLOCK], gl.float32, ACC_8BIT)
        started = warpgroup_mma(
            pipe.a.index(2 * stage + WARPGROUP), pipe.b.index(stage).permute((1, 0)), zeros,
            use_acc=False, is_async=True,
        )  # fmt: skip
        # The next block's scales are loaded during the product.
        next_scale = _scale(scale_ptrs, pipe.first + i + 1, pipe.last)
        product = warpgroup_mma_wait(0, deps=[started])
        mbarrier.arrive(pipe.empty.index(stage), count=1)
        acc = acc + product * scale
        scale = next_scale
    rows = pipe.row + WARPGROUP * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, ACC_8BIT))
    columns = pipe.column + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, ACC_8BIT))
    gl.store(part_ptr + rows[:, None] * pipe.n_b + columns[None, :], acc)


@gluon.jit(do_not_specialize=["n_blocks", "n_shares"])
def gradient_hopper_8bit_kernel(
    a_desc, b_desc, a_scale_ptr, b_scale_ptr, part_ptr, n_blocks, n_a, n_b, n_shares,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Writes a share's sum of one tile to part [shares, n_a, n_b]."""
    columns = n_b // BLOCK
    share = gl.program_id(1)
    pipe = Pipeline(
        gl.allocate_shared_memory(a_desc.dtype, [2 * STAGES] + a_desc.block_type.shape,
                                  a_desc.layout),
        gl.allocate_shared_memory(b_desc.dtype, [STAGES] + b_desc.block_type.shape, b_desc.layout),
        barriers(STAGES, 1), barriers(STAGES, 2), n_a, n_b,
        gl.program_id(0) // columns * BLOCK, gl.program_id(0) % columns * BLOCK,
        share * n_blocks // n_shares, (share + 1) * n_blocks // n_shares, STAGES,
    )  # fmt: skip
    scale_ptrs = (a_scale_ptr, b_scale_ptr)
    part_ptr += share.to(gl.int64) * n_a * n_b
    gl.warp_specialize(
        [
            (_consume, (pipe, scale_ptrs, part_ptr, 0)),
            (_consume, (pipe, scale_ptrs, part_ptr, 1)),
            (_produce, (pipe, a_desc, b_desc)),
        ],
        [4, 1],
        [232, 24],
    )


def gradient(target: Target, n_rows: int, n_a: int, n_b: int) -> Gradient:
    """Does the same as `gradient_8bit.gradient`, for n_a and n_b that 128 divides."""
    shares = shares_of(target, n_rows, n_a, n_b)
    block = BLOCK.value
    kernel = Bound(
        gradient_hopper_8bit_kernel, (n_a // TILE * (n_b // TILE), shares),
        triton.cdiv(n_rows, block), n_a, n_b, shares,
        maps=(tiles(ROWS.value, block), tiles(block, block)), STAGES=STAGES, num_warps=4,
    )  # fmt: skip
    return summed(kernel, (shares, n_a, n_b))
