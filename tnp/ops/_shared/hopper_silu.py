"""Computes the MLP's matmuls over K = 512, the model's width, on Hopper, with SiLU.

    forward     z = x wᵀ,  h = z·σ(z),  slope = σ(z)·(1 + z·(1 − σ(z)))
    backward    dz = (dy w)·slope

The forward pass saves the slope of SiLU instead of z. So the backward pass multiplies each element
once by its slope (`tnp.ops._shared.hopper_slope` stores and loads slopes).
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from tnp.dispatch.devices import Target
from tnp.dispatch.launcher import Bound
from tnp.ops._shared.hopper_matmul import (
    BLOCK_K,
    REGISTERS,
    ROWS,
    TILE,
    multiply,
    pipeline,
    produce,
    quarters,
    sigmoid,
    tiles,
)
from tnp.ops._shared.hopper_primitives import opaque
from tnp.ops._shared.hopper_slope import load_slopes, new_saved, slope_of, slope_place, store_slope
from tnp.ops._shared.operands import Rows, dense
from tnp.ops._shared.triton_matmul import DSilu, Silu

STAGES = 4


@gluon.jit
def silu_and_slope(z):
    s = sigmoid(z)
    h = z * s
    return h, s + h * (1.0 - s)


@gluon.jit
def store_quarter(
    desc, quarter, row, column, buffers, WARPGROUP: gl.constexpr, AT: gl.constexpr,
    RESULTS: gl.constexpr,
):  # fmt: skip
    """Starts the copy of a quarter [64, 64] to device memory.

    A warpgroup has two buffers for each tensor that the kernel writes; `AT` (0 or 1) picks one.
    RESULTS is the number of these tensors, whose copies alternate.
    """
    buffer = buffers.index(2 * WARPGROUP + AT)
    # Then the previous copy through this same buffer is done.
    tma.store_wait(2 * RESULTS - 1)
    buffer.store(quarter.to(desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(desc, [row, column + AT * BLOCK_K], buffer)


@gluon.jit
def store_half(desc, half, row, column, buffers, WARPGROUP: gl.constexpr):
    """Starts the copies of a half [64, 128]. Use it only in kernels that write one tensor."""
    parts = quarters(half)
    for j in gl.static_range(2):
        store_quarter(desc, parts[j], row, column, buffers, WARPGROUP, j, 1)


@gluon.jit
def _silu(pipe, h_desc, slope_ptr, buffers, WARPGROUP: gl.constexpr, HAS_SLOPE: gl.constexpr):
    for tile in range(pipe.first + WARPGROUP, pipe.last, 2):
        halves = multiply(pipe, tile, WARPGROUP)
        # `opaque` keeps the compiler from computing addresses before the product: they would spill.
        place = opaque(tile)
        row = tile // pipe.n_columns * TILE
        column = tile % pipe.n_columns * TILE
        for i in gl.static_range(2):
            z = quarters(halves[i])
            for j in gl.static_range(2):
                h, slope = silu_and_slope(z[j])
                if HAS_SLOPE:
                    store_slope(slope_ptr + slope_place(place, i, j), slope)
                store_quarter(h_desc, h, row + i * ROWS, column, buffers, WARPGROUP, j, 1)
    tma.store_wait(0)


@gluon.jit
def _dsilu(pipe, dz_desc, slope_ptr, buffers, WARPGROUP: gl.constexpr):
    for tile in range(pipe.first + WARPGROUP, pipe.last, 2):
        # The slopes are loaded before the product, so that the load overlaps with it.
        slopes = load_slopes(slope_ptr, tile)
        halves = multiply(pipe, tile, WARPGROUP)
        row = tile // pipe.n_columns * TILE
        column = tile % pipe.n_columns * TILE
        for i in gl.static_range(2):
            dh = quarters(halves[i])
            for j in gl.static_range(2):
                dz = dh[j] * slope_of(slopes[2 * i + j])
                store_quarter(dz_desc, dz, row + i * ROWS, column, buffers, WARPGROUP, j, 1)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["n_rows", "n_columns"])
def matmul_silu_hopper_kernel(
    x_desc, w_desc, h_desc, slope_ptr, n_rows, n_columns,
    K_BLOCKS: gl.constexpr, STAGES: gl.constexpr, HAS_SLOPE: gl.constexpr,
):  # fmt: skip
    pipe = pipeline(x_desc, w_desc, n_rows, n_columns, 1, K_BLOCKS, STAGES, False, 0)
    buffers = gl.allocate_shared_memory(h_desc.dtype, [4] + h_desc.block_type.shape, h_desc.layout)
    gl.warp_specialize(
        [
            (_silu, (pipe, h_desc, slope_ptr, buffers, 0, HAS_SLOPE)),
            (_silu, (pipe, h_desc, slope_ptr, buffers, 1, HAS_SLOPE)),
            (produce, (pipe, x_desc, w_desc)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )


@gluon.jit(do_not_specialize=["n_rows", "n_columns"])
def matmul_dsilu_hopper_kernel(
    dy_desc, w_desc, dz_desc, slope_ptr, n_rows, n_columns,
    K_BLOCKS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    pipe = pipeline(dy_desc, w_desc, n_rows, n_columns, 1, K_BLOCKS, STAGES, True, 0)
    buffers = gl.allocate_shared_memory(
        dz_desc.dtype, [4] + dz_desc.block_type.shape, dz_desc.layout
    )
    gl.warp_specialize(
        [
            (_dsilu, (pipe, dz_desc, slope_ptr, buffers, 0)),
            (_dsilu, (pipe, dz_desc, slope_ptr, buffers, 1)),
            (produce, (pipe, dy_desc, w_desc)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )


def matmul_silu(target: Target, rows: Rows, width: int, dtype: torch.dtype, save: bool) -> Silu:
    """Returns the launch that computes h [T, F], and the slope if `save`.

    The slope lies in the layout of `hopper_slope`. Call the launch with x, in the layout that
    `rows` describes, and w [F, K], contiguous in x's dtype.
    """
    of_out = dense(rows.n, width)
    kernel = Bound(
        matmul_silu_hopper_kernel, (target.multiprocessors,), rows.n, width // TILE.value,
        maps=(
            tiles(ROWS.value, BLOCK_K.value), tiles(TILE.value, BLOCK_K.value),
            tiles(ROWS.value, BLOCK_K.value),
        ),
        K_BLOCKS=rows.width // BLOCK_K.value, STAGES=STAGES, HAS_SLOPE=save, num_warps=4,
    )  # fmt: skip

    def run(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        h = x.new_empty_strided(*of_out)
        slope = new_saved(x, of_out[0], dtype) if save else None
        kernel(x, w, h, h if slope is None else slope)
        return h, slope

    return run


def matmul_dsilu(target: Target, rows: Rows, width: int, dtype: torch.dtype) -> DSilu:
    """Returns the launch that computes dz [T, F].

    Call it with dy, in the layout that `rows` describes, w [K, F], and the slope.
    """
    of_out = dense(rows.n, width)
    kernel = Bound(
        matmul_dsilu_hopper_kernel, (target.multiprocessors,), rows.n, width // TILE.value,
        maps=(
            tiles(ROWS.value, BLOCK_K.value), tiles(BLOCK_K.value, TILE.value),
            tiles(ROWS.value, BLOCK_K.value),
        ),
        K_BLOCKS=rows.width // BLOCK_K.value, STAGES=STAGES, num_warps=4,
    )  # fmt: skip

    def run(dy: torch.Tensor, w: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
        dz = dy.new_empty_strided(*of_out)
        kernel(dy, w, dz, slope)
        return dz

    return run
