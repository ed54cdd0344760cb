"""Multiplies x wᵀ for Hopper, and works on a product while the next tile is multiplied.

It is for products with the model's inner width, K = 512. That is too short for a matmul library to
hide the work before and after a tile. A program keeps one multiprocessor and walks tiles of [128,
128] row by row. Its 128 rows of x stay in shared memory for all tiles of a row, and a producer warp
streams blocks of w. Two consumer warpgroups take tiles in turn: while one multiplies, the other
works on its product ("ping-pong", as in CUTLASS). Each lets the other begin when its own last block
has arrived. A barrier's phase is one bit, so a wait for a block further ahead could end at an
earlier one.

Rows of x need no barriers. They arrive with the blocks of w of their first tile, in a place that
all tiles of the previous row have read. Block k is loaded when its stage is free, that is, when the
block STAGES before it has been read. For k < STAGES that is block k + K_BLOCKS − STAGES of the
previous tile. Else it is block k − STAGES of the same tile. That block was loaded after block k +
K_BLOCKS − 2·STAGES of the previous tile was read, or, for k ≥ 2·STAGES, after its last block. With
K_BLOCKS ≥ 2·STAGES none of these is before k.

`tnp.ops._shared.hopper_silu` and `tnp.ops.mixture_heads.hopper` have the kernels, which define the
work on a product.
"""

from collections.abc import Callable

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.core import _aggregate as aggregate

from tnp.dispatch.spec import Call
from tnp.ops._shared.hopper_primitives import barriers, opaque

ROWS = gl.constexpr(64)  # rows of a matmul instruction; a tile has two halves of so many rows
TILE = gl.constexpr(128)  # rows and columns of a tile
BLOCK_K = gl.constexpr(64)
K = 512  # x then fills shared memory, except for the blocks of w
REGISTERS = gl.constexpr(240)
DTYPES = {"bfloat16": gl.bfloat16, "float16": gl.float16}
IN_MEMORY = DTYPES | {"float8_e4m3fn": gl.float8e4nv}
CAPABILITY = 90  # these kernels run on no other
ACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
# The layout of sums of 8-bit products. An instruction takes twice as many numbers, and its sums
# have the layout of ACC.
ACC_8BIT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32]))
QUARTER_ACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))


@aggregate
class Pipeline:
    """Holds shared memory and barriers of producer and consumers, and a program's tiles."""

    x: gl.shared_memory_descriptor  # 128 rows, as K / 64 blocks of two halves [64, 64]
    w: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    turn: gl.shared_memory_descriptor  # for each consumer: it may multiply
    n_columns: gl.tensor  # tiles in a row
    first: gl.tensor  # first tile of the program
    last: gl.tensor  # last tile of the program + 1
    K_BLOCKS: gl.constexpr
    STAGES: gl.constexpr
    W_IS_KN: gl.constexpr
    PAIRS_OF: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, x, w, full, empty, turn, n_columns, first, last, K_BLOCKS, STAGES, W_IS_KN, PAIRS_OF
    ):
        self.x, self.w, self.full, self.empty, self.turn = x, w, full, empty, turn
        self.n_columns, self.first, self.last = n_columns, first, last
        self.K_BLOCKS, self.STAGES = gl.constexpr(K_BLOCKS), gl.constexpr(STAGES)
        self.W_IS_KN, self.PAIRS_OF = gl.constexpr(W_IS_KN), gl.constexpr(PAIRS_OF)

    @gluon.jit
    def column(self, n):
        """Returns the column of the program's n-th tile.

        With PAIRS_OF = c, two groups of c columns alternate, so that each warpgroup has its own
        group.
        """
        if self.PAIRS_OF:
            i = n % (2 * self.PAIRS_OF)
            return n - i + i % 2 * self.PAIRS_OF + i // 2
        else:
            return n

    @gluon.jit
    def stage(self, tile, k):
        """Returns the stage of block k of a tile, and its barriers' phase."""
        step = (tile - self.first) * self.K_BLOCKS + k
        return step % self.STAGES, (step // self.STAGES) & 1


@gluon.jit
def pipeline(
    x_desc, w_desc, n_rows, n_columns, UNIT: gl.constexpr, K_BLOCKS: gl.constexpr,
    STAGES: gl.constexpr, W_IS_KN: gl.constexpr, PAIRS_OF: gl.constexpr,
):  # fmt: skip
    """Returns a program's share of the tiles: whole units of UNIT tiles, which divides a row."""
    gl.static_assert(K_BLOCKS >= 2 * STAGES)
    units = gl.cdiv(n_rows, TILE) * (n_columns // UNIT)
    program = gl.program_id(0)
    return Pipeline(
        gl.allocate_shared_memory(
            x_desc.dtype, [2 * K_BLOCKS] + x_desc.block_type.shape, x_desc.layout
        ),
        gl.allocate_shared_memory(w_desc.dtype, [STAGES] + w_desc.block_type.shape, w_desc.layout),
        barriers(STAGES, 1), barriers(STAGES, 1), barriers(2, 1), n_columns,
        program * units // gl.num_programs(0) * UNIT,
        (program + 1) * units // gl.num_programs(0) * UNIT,
        K_BLOCKS, STAGES, W_IS_KN, PAIRS_OF,
    )  # fmt: skip


@gluon.jit
def load(pipe, x_desc, w_desc, tile):
    """Loads the blocks of w for a tile, and the blocks of x if a row begins."""
    row = tile // pipe.n_columns * TILE
    n = tile % pipe.n_columns
    column = pipe.column(n) * TILE
    begins = (tile == pipe.first) | (n == 0)
    W_BYTES: gl.constexpr = w_desc.block_type.nbytes
    for k in gl.static_range(pipe.K_BLOCKS):
        stage, phase = pipe.stage(tile, k)
        full = pipe.full.index(stage)
        mbarrier.wait(pipe.empty.index(stage), phase ^ 1)
        mbarrier.expect(full, W_BYTES, pred=begins == 0)
        mbarrier.expect(full, W_BYTES + 2 * x_desc.block_type.nbytes, pred=begins)
        for half in gl.static_range(2):
            tma.async_copy_global_to_shared(
                x_desc, [row + half * ROWS, k * BLOCK_K], full, pipe.x.index(2 * k + half), begins
            )
        at = [k * BLOCK_K, column] if pipe.W_IS_KN else [column, k * BLOCK_K]
        tma.async_copy_global_to_shared(w_desc, at, full, pipe.w.index(stage))


@gluon.jit
def produce(pipe, x_desc, w_desc):
    """Loads the operands of all tiles, in the producer."""
    for tile in range(pipe.first, pipe.last):
        load(pipe, x_desc, w_desc, tile)


@gluon.jit
def multiply(pipe, tile, WARPGROUP: gl.constexpr):
    """Returns the product of a tile, as its two halves [64, 128]."""
    turn = (tile - pipe.first) // 2
    mbarrier.wait(pipe.turn.index(WARPGROUP), (turn + WARPGROUP + 1) & 1)
    upper = gl.zeros([ROWS, TILE], gl.float32, ACC)
    lower = gl.zeros([ROWS, TILE], gl.float32, ACC)
    # Without `opaque` the addresses of all blocks would be kept for all tiles, and spill.
    nothing = opaque(0)
    for k in gl.static_range(pipe.K_BLOCKS):
        stage, phase = pipe.stage(tile, k)
        mbarrier.wait(pipe.full.index(stage), phase)
        if k == pipe.K_BLOCKS - 1:
            mbarrier.arrive(pipe.turn.index(1 - WARPGROUP), count=1)
        w = pipe.w.index(stage)
        if not pipe.W_IS_KN:
            w = w.permute((1, 0))
        x = 2 * k + nothing
        upper = warpgroup_mma(pipe.x.index(x), w, upper, use_acc=k > 0, is_async=True)
        lower = warpgroup_mma(pipe.x.index(x + 1), w, lower, use_acc=k > 0, is_async=True)
        if k > 0:
            upper, lower = warpgroup_mma_wait(2, deps=[upper, lower])
            stage, _phase = pipe.stage(tile, k - 1)
            mbarrier.arrive(pipe.empty.index(stage), count=1)
    upper, lower = warpgroup_mma_wait(0, deps=[upper, lower])
    stage, _phase = pipe.stage(tile, pipe.K_BLOCKS - 1)
    mbarrier.arrive(pipe.empty.index(stage), count=1)
    return (
        gl.convert_layout(upper, ACC, assert_trivial=True),
        gl.convert_layout(lower, ACC, assert_trivial=True),
    )


@gluon.jit
def quarters(half):
    """Returns the first 64 and the last 64 columns of a half."""
    first, second = gl.split(gl.permute(gl.reshape(half, [ROWS, 2, BLOCK_K]), (0, 2, 1)))
    return (
        gl.convert_layout(first, QUARTER_ACC, assert_trivial=True),
        gl.convert_layout(second, QUARTER_ACC, assert_trivial=True),
    )


@gluon.jit
def sigmoid(x):
    """Computes (1 + tanh(x/2)) / 2 by one instruction, with an error of 2^-12."""
    tanh = gl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [x * 0.5], dtype=gl.float32, is_pure=True, pack=1
    )
    return tanh * 0.5 + 0.5


def refuses(call: Call, d_model: int, width: int) -> str | None:
    """Returns why these kernels cannot multiply [n, d_model] by [width, d_model]ᵀ, or None."""
    if call.target.kind != "cuda" or call.target.capability != CAPABILITY:
        return f"it is written for compute capability {CAPABILITY / 10}"
    if call.problem.dtype not in DTYPES:
        return f"it takes {', '.join(DTYPES)}, not {call.problem.dtype}"
    if d_model != K or width % TILE.value:
        return f"it takes rows of {K}, not {d_model}, and widths that {TILE.value} divides"
    return None


def tiles(n_rows: int, n_columns: int) -> Callable[[torch.Tensor], TensorDescriptor]:
    """Returns a function that describes tiles [n_rows, n_columns] of a matrix or of rows."""
    block = [n_rows, n_columns]

    def descriptor(x: torch.Tensor) -> TensorDescriptor:
        x = x if x.dim() == 2 else x.view(-1, x.shape[-1])
        dtype = IN_MEMORY[str(x.dtype).removeprefix("torch.")]
        layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
        return TensorDescriptor.from_tensor(x, block, layout)

    return descriptor
