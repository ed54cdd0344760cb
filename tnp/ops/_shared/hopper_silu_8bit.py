"""Computes the MLP's products of inner width 512 on Hopper, with operands in 8 bits (e4m3).

    forward     z = x wᵀ,  h = z·σ(z),  slope = σ(z)·(1 + z·(1 − σ(z)))
    backward    dz = (dy wᵀ)·slope

The kernels resemble `tnp.ops._shared.hopper_silu`, and use the same saved slope. Operands are rows
with scales (`tnp.ops._shared.rows_8bit`), and so is w. The backward pass takes w transposed,
because Hopper multiplies 8-bit operands only if both are contiguous along the summed dimension. h
and dz are written in 8 bits for the next product, in units that are known beforehand, and in 16
bits for the gradients of the weights.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from tnp.dispatch.devices import Target
from tnp.dispatch.launcher import Bound
from tnp.ops._shared.hopper_matmul import (
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
from tnp.ops._shared.hopper_silu import STAGES, silu_and_slope, store_quarter
from tnp.ops._shared.hopper_slope import load_slopes, new_saved, slope_of, slope_place, store_slope
from tnp.ops._shared.rows_8bit import E4M3, InRows
from tnp.ops._shared.triton_silu_8bit import DSilu, Silu


@gluon.jit
def _of_rows(ptr, row, n_rows):
    """Loads the numbers of a quarter's 64 rows; past the end they are a power of two."""
    rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, QUARTER_ACC))
    return gl.load(ptr + rows, mask=rows < n_rows, other=1.0)[:, None]


@gluon.jit
def _scaled(quarter, scales, row, column, n_rows):
    """Returns a quarter of the product from the sums of 8-bit products."""
    columns = column + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, QUARTER_ACC))
    return quarter * _of_rows(scales[0], row, n_rows) * gl.load(scales[1] + columns)[None, :]


@gluon.jit
def _store(
    quarter, scales, desc, desc8, row, column, n_rows, buffers, buffers8,
    WARPGROUP: gl.constexpr, AT: gl.constexpr, IN_16: gl.constexpr, IN_8: gl.constexpr,
):  # fmt: skip
    """Starts the copies of a quarter in 16 bits, and in 8 bits in units of its rows."""
    if IN_16:
        store_quarter(desc, quarter, row, column, buffers, WARPGROUP, AT, IN_16 + IN_8)
    if IN_8:
        # The inverse of a power of two, by its exponent: a division takes many instructions.
        bits = _of_rows(scales[2], row, n_rows).to(gl.int32, bitcast=True)
        quarter = quarter * ((254 << 23) - bits).to(gl.float32, bitcast=True)
        store_quarter(desc8, quarter, row, column, buffers8, WARPGROUP, AT, IN_16 + IN_8)


@gluon.jit
def _silu(
    pipe, h8_desc, h_desc, slope_ptr, scales, n_rows, buffers8, buffers,
    WARPGROUP: gl.constexpr, SAVES: gl.constexpr,
):  # fmt: skip
    for tile in range(pipe.first + WARPGROUP, pipe.last, 2):
        halves = multiply(pipe, tile, WARPGROUP)
        row = tile // pipe.n_columns * TILE
        column = tile % pipe.n_columns * TILE
        for i in gl.static_range(2):
            begin = row + i * ROWS
            products = quarters(halves[i])
            for j in gl.static_range(2):
                z = _scaled(products[j], scales, begin, column + j * BLOCK_K, n_rows)
                h, slope = silu_and_slope(z)
                if SAVES:
                    store_slope(slope_ptr + slope_place(tile, i, j), slope)
                _store(
                    h, scales, h_desc, h8_desc, begin, column, n_rows, buffers, buffers8,
                    WARPGROUP, j, SAVES, True,
                )  # fmt: skip
    tma.store_wait(0)


@gluon.jit
def _dsilu(
    pipe, dz8_desc, dz_desc, slope_ptr, scales, n_rows, buffers8, buffers,
    WARPGROUP: gl.constexpr, IN_16: gl.constexpr, IN_8: gl.constexpr,
):  # fmt: skip
    for tile in range(pipe.first + WARPGROUP, pipe.last, 2):
        # The slopes are read before the product, so that they arrive meanwhile.
        slopes = load_slopes(slope_ptr, tile)
        halves = multiply(pipe, tile, WARPGROUP)
        row = tile // pipe.n_columns * TILE
        column = tile % pipe.n_columns * TILE
        for i in gl.static_range(2):
            begin = row + i * ROWS
            products = quarters(halves[i])
            for j in gl.static_range(2):
                dz = products[j] * slope_of(slopes[2 * i + j])
                dz = _scaled(dz, scales, begin, column + j * BLOCK_K, n_rows)
                _store(
                    dz, scales, dz_desc, dz8_desc, begin, column, n_rows, buffers, buffers8,
                    WARPGROUP, j, IN_16, IN_8,
                )  # fmt: skip
    tma.store_wait(0)


@gluon.jit
def _buffers(desc):
    """Allocates two buffers for each consumer."""
    return gl.allocate_shared_memory(desc.dtype, [4] + desc.block_type.shape, desc.layout)


@gluon.jit(do_not_specialize=["n_rows", "n_columns"])
def matmul_silu_hopper_8bit_kernel(
    x_desc, w_desc, h8_desc, h_desc, slope_ptr, x_scale_ptr, w_scale_ptr, h_scale_ptr,
    n_rows, n_columns, K_BLOCKS: gl.constexpr, STAGES: gl.constexpr, SAVES: gl.constexpr,
):  # fmt: skip
    """Writes h8. If SAVES it also writes h in 16 bits and the slope, else these are unused."""
    pipe = pipeline(x_desc, w_desc, n_rows, n_columns, 1, K_BLOCKS, STAGES, False, 0)
    buffers8 = _buffers(h8_desc)
    buffers = _buffers(h_desc) if SAVES else buffers8
    scales = (x_scale_ptr, w_scale_ptr, h_scale_ptr)
    gl.warp_specialize(
        [
            (_silu, (pipe, h8_desc, h_desc, slope_ptr, scales, n_rows,
                     buffers8, buffers, 0, SAVES)),
            (_silu, (pipe, h8_desc, h_desc, slope_ptr, scales, n_rows,
                     buffers8, buffers, 1, SAVES)),
            (produce, (pipe, x_desc, w_desc)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip


@gluon.jit(do_not_specialize=["n_rows", "n_columns"])
def matmul_dsilu_hopper_8bit_kernel(
    dy_desc, w_desc, dz8_desc, dz_desc, slope_ptr, dy_scale_ptr, w_scale_ptr, dz_scale_ptr,
    n_rows, n_columns, K_BLOCKS: gl.constexpr, STAGES: gl.constexpr,
    IN_16: gl.constexpr, IN_8: gl.constexpr,
):  # fmt: skip
    """Writes dz8 if IN_8, and dz if IN_16. A result that is not written is unused."""
    pipe = pipeline(dy_desc, w_desc, n_rows, n_columns, 1, K_BLOCKS, STAGES, False, 0)
    buffers8 = _buffers(dz8_desc)
    buffers = _buffers(dz_desc)
    scales = (dy_scale_ptr, w_scale_ptr, dz_scale_ptr)
    gl.warp_specialize(
        [
            (_dsilu, (pipe, dz8_desc, dz_desc, slope_ptr, scales, n_rows,
                      buffers8, buffers, 0, IN_16, IN_8)),
            (_dsilu, (pipe, dz8_desc, dz_desc, slope_ptr, scales, n_rows,
                      buffers8, buffers, 1, IN_16, IN_8)),
            (produce, (pipe, dy_desc, w_desc)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip


_HALF, _COLUMN = tiles(ROWS.value, BLOCK_K.value), tiles(TILE.value, BLOCK_K.value)
_MAPS = (_HALF, _COLUMN, _HALF, _HALF)


def matmul_silu(
    target: Target, shape: tuple[int, int], inner: int, dtype: torch.dtype, save: bool
) -> Silu:
    """Does the same as `triton_silu_8bit.matmul_silu`, with the slope in registers' order."""
    n_rows, width = shape
    kernel = Bound(
        matmul_silu_hopper_8bit_kernel, (target.multiprocessors,), n_rows, width // TILE.value,
        maps=_MAPS, K_BLOCKS=inner // BLOCK_K.value, STAGES=STAGES, SAVES=save, num_warps=4,
    )  # fmt: skip

    def run(x: InRows, w: InRows) -> tuple[Tensor, Tensor | None, Tensor | None]:
        h8 = x.x.new_empty(shape)
        h = x.x.new_empty(shape, dtype=dtype) if save else None
        slope = new_saved(x.x, shape, dtype) if save else None
        of_h = (h, slope) if save else (h8, h8)
        kernel(x.x, w.x, h8, *of_h, x.scale, w.scale, x.bound)
        return h8, h, slope

    return run


def matmul_dsilu(
    target: Target, shape: tuple[int, int], inner: int, dtype: torch.dtype, in_16: bool, in_8: bool
) -> DSilu:
    """Does the same as `triton_silu_8bit.matmul_dsilu` from a slope in the order of registers."""
    n_rows, width = shape
    kernel = Bound(
        matmul_dsilu_hopper_8bit_kernel, (target.multiprocessors,), n_rows, width // TILE.value,
        maps=_MAPS, K_BLOCKS=inner // BLOCK_K.value, STAGES=STAGES, IN_16=in_16, IN_8=in_8,
        num_warps=4,
    )  # fmt: skip

    def run(dy: InRows, w: InRows, slope: Tensor) -> tuple[Tensor | None, Tensor | None]:
        dz8 = dy.x.new_empty(shape, dtype=E4M3) if in_8 else None
        dz = dy.x.new_empty(shape, dtype=dtype) if in_16 else None
        written = (dz if dz8 is None else dz8), (dz8 if dz is None else dz)
        kernel(dy.x, w.x, *written, slope, dy.scale, w.scale, dy.bound)
        return dz8, dz

    return run
