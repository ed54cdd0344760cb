"""Rows times a weight for Hopper, of inner width 512, with what follows in the epilogue.

    y = factor · x wᵀ (+ residual)        or x w, where w is [K, N]

A product of so few columns is over before a matmul library has filled its pipeline, and the
addition to the residual stream would read and write all rows once more.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from tnp.launch import Bound
from tnp.ops.hopper_matmul import (
    BLOCK_K,
    QUARTER_ACC,
    REGISTERS,
    ROWS,
    TILE,
    multiply,
    pipeline,
    produce,
    quarters,
    tiles,
)
from tnp.ops.hopper_silu import STAGES, store_quarter
from tnp.ops.operands import Rows
from tnp.ops.rows import RowLayout
from tnp.targets import Target


@gluon.jit
def _residual(ptr, row, column, n_rows, n_inner, stride_b, stride_l):
    """A quarter [64, 64] of what is added, read as the product lies in registers."""
    rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, QUARTER_ACC))
    columns = column + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, QUARTER_ACC))
    at = (rows // n_inner).to(gl.int64) * stride_b + (rows % n_inner).to(gl.int64) * stride_l
    mask = (rows < n_rows)[:, None] & (columns >= 0)[None, :]
    return gl.load(ptr + at[:, None] + columns[None, :], mask=mask, other=0.0)


@gluon.jit
def _consume(
    pipe, y_desc, residual_ptr, layout, factor, buffers,
    WARPGROUP: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
):  # fmt: skip
    n_rows, n_inner, stride_b, stride_l = layout
    for tile in range(pipe.first + WARPGROUP, pipe.last, 2):
        row = tile // pipe.n_columns * TILE
        column = tile % pipe.n_columns * TILE
        # Read before the product, beside which it arrives.
        added = ()
        if HAS_RESIDUAL:
            for i in gl.static_range(4):
                added = added + (_residual(
                    residual_ptr, row + i // 2 * ROWS, column + i % 2 * BLOCK_K,
                    n_rows, n_inner, stride_b, stride_l,
                ),)  # fmt: skip
        halves = multiply(pipe, tile, WARPGROUP)
        for i in gl.static_range(2):
            products = quarters(halves[i])
            for j in gl.static_range(2):
                y = products[j] * factor
                if HAS_RESIDUAL:
                    y += added[2 * i + j].to(gl.float32)
                store_quarter(y_desc, y, row + i * ROWS, column, buffers, WARPGROUP, j, 1)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["n_rows", "n_columns", "n_inner"])
def matmul_hopper_kernel(
    x_desc, w_desc, y_desc, residual_ptr, n_rows, n_columns, n_inner, stride_b, stride_l, factor,
    K_BLOCKS: gl.constexpr, STAGES: gl.constexpr, W_IS_KN: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
):  # fmt: skip
    """Row r of the residual lies at (r // n_inner) · stride_b + (r % n_inner) · stride_l."""
    pipe = pipeline(x_desc, w_desc, n_rows, n_columns, 1, K_BLOCKS, STAGES, W_IS_KN, 0)
    buffers = gl.allocate_shared_memory(y_desc.dtype, [4] + y_desc.block_type.shape, y_desc.layout)
    layout = (n_rows, n_inner, stride_b, stride_l)
    gl.warp_specialize(
        [
            (_consume, (pipe, y_desc, residual_ptr, layout, factor, buffers, 0, HAS_RESIDUAL)),
            (_consume, (pipe, y_desc, residual_ptr, layout, factor, buffers, 1, HAS_RESIDUAL)),
            (produce, (pipe, x_desc, w_desc)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )


def matmul(
    target: Target,
    rows: Rows,
    width: int,
    *,
    w_is_kn: bool = False,
    factor: float = 1.0,
    residual: RowLayout | None = None,
) -> Callable[..., Tensor]:
    """What computes y [T, N]: called with x, read as `rows` say, w [N, K], or [K, N] where
    `w_is_kn`, contiguous in x's dtype, and the residual as it is laid out, if there is one.
    """
    n_inner, strides = (rows.n, (0, 0)) if residual is None else (residual.n_inner, residual.strides)
    w_tile = (BLOCK_K.value, TILE.value) if w_is_kn else (TILE.value, BLOCK_K.value)
    kernel = Bound(
        matmul_hopper_kernel, (target.multiprocessors,),
        rows.n, width // TILE.value, n_inner, *strides,
        maps=(
            tiles(ROWS.value, BLOCK_K.value), tiles(*w_tile), tiles(ROWS.value, BLOCK_K.value),
        ),
        K_BLOCKS=rows.width // BLOCK_K.value, STAGES=STAGES, W_IS_KN=w_is_kn,
        HAS_RESIDUAL=residual is not None, num_warps=4,
    )  # fmt: skip
    shape = rows.n, width

    def run(x: Tensor, w: Tensor, added: Tensor | None = None) -> Tensor:
        y = x.new_empty(shape, dtype=x.dtype)
        kernel(x, w, y, y if added is None else added, factor)
        return y

    return run
