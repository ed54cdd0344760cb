"""Quantizes activations and gradients to 8 bits (e4m3), with a scale for each 128 rows.

    x [T, C] → rows [T, C] e4m3, panels [⌈T/128⌉, C, 128] e4m3, scale [T] float32

    x ≈ scale · rows, and scale is equal within a block of 128 rows

The scale is the smallest power of two with which the block's largest finite element is at most 448,
the largest number of e4m3. Here it is measured; `hopper_norm_8bit` and the products bound it
instead. A floating-point format loses little by a scale that is too large: a row's largest element
keeps 4 significant bits even if it is 2^13 times smaller than the block's. NaN and infinities
become NaN, because clamping to 448 would hide an infinity.

Panels hold the same codes transposed, for gradients of weights. Those are sums over rows, and
Hopper multiplies 8-bit operands only if both are contiguous along the summed dimension. A line of
128 bytes holds a column of a block, with its rows in the order of `row_at`. A thread of a matmul's
tile then packs a word from its own registers. Rows past T are zeros.

Elements of a product x wᵀ are at most ‖x_t‖ · max_f ‖w_f‖ (Cauchy–Schwarz), which is known before
the product. `bound` is the scale of the next product's rows that follows, so a kernel rounds its
product at once.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tnp.dispatch.launcher import Bound
from tnp.ops._shared.e4m3 import BLOCK, LEAST
from tnp.ops._shared.primitives import cast, exponent, power
from tnp.ops._shared.rows_8bit import E4M3, InRows

BLOCK_C = 64  # columns of a step: a thread then has 32 elements
NUM_WARPS = 8
_BLOCK, _LEAST = tl.constexpr(BLOCK), tl.constexpr(LEAST)


class Blocks(NamedTuple):
    """Holds a matrix in 8 bits."""

    rows: Tensor | None  # [T, C] e4m3, contiguous; None: nobody reads them
    scale: Tensor  # [T] float32
    panels: Tensor | None  # [blocks, C, 128] e4m3; None: nobody reads them
    bound: Tensor  # [T] float32, the scale of the product's rows


@triton.jit
def row_at(position):
    """Returns the row of a block at a position of a panel's line.

    Position 32w + 4r + 2h + b holds row 64h + 16w + 8b + r.
    """
    return position // 2 % 2 * 64 + position // 32 * 16 + position % 2 * 8 + position // 4 % 8


@triton.jit
def panel_offsets(block, columns, positions, n_columns):
    """Returns where elements lie in panels. The indices broadcast."""
    return (block.to(tl.int64) * n_columns + columns) * _BLOCK + positions


@triton.jit
def _load(x_ptr, rows, columns, n_rows, n_columns, stride_row):
    """Loads elements as float32, and whether they are finite; past the ends they are 0."""
    at = rows.to(tl.int64)[:, None] * stride_row + columns[None, :]
    mask = (rows < n_rows)[:, None] & (columns < n_columns)[None, :]
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    return x, tl.abs(x) < float("inf")


@triton.jit(do_not_specialize=["n_rows"])
def _quantize_blocks_kernel(
    x_ptr, x8_ptr, panels_ptr, scale_ptr, bound_ptr, norms_ptr,
    n_rows, n_columns, stride_row, n_norms, factor,
    HAS_PANELS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Quantizes a block of 128 rows. It reads them twice, the second time from a cache."""
    block = tl.program_id(0)
    positions = tl.arange(0, _BLOCK)
    rows = block * _BLOCK + row_at(positions)
    columns = tl.arange(0, BLOCK_C)
    largest = tl.zeros([_BLOCK, BLOCK_C], tl.float32)
    for start in tl.range(0, n_columns, BLOCK_C):
        x, finite = _load(x_ptr, rows, start + columns, n_rows, n_columns, stride_row)
        largest = tl.maximum(largest, tl.where(finite, tl.abs(x), 0.0))
    e = exponent(tl.max(tl.max(largest, 1), 0), _LEAST)
    unit = power(-e)
    # Squares of scaled elements neither overflow nor vanish.
    squares = tl.zeros([_BLOCK], tl.float32)
    for start in tl.range(0, n_columns, BLOCK_C):
        at = start + columns
        x, finite = _load(x_ptr, rows, at, n_rows, n_columns, stride_row)
        x *= unit
        squares += tl.sum(tl.where(finite, x * x, 0.0), 1)
        x8 = cast(tl.where(finite, x, float("nan")), x8_ptr.dtype.element_ty)
        inside = (at < n_columns)[None, :]
        x8_ptrs = x8_ptr + rows.to(tl.int64)[:, None] * n_columns + at[None, :]
        tl.store(x8_ptrs, x8, mask=(rows < n_rows)[:, None] & inside)
        if HAS_PANELS:
            places = panel_offsets(block, at[:, None], positions[None, :], n_columns)
            tl.store(panels_ptr + places, tl.trans(x8), mask=(at < n_columns)[:, None])
    norm = tl.sqrt(tl.max(squares, 0)) * power(e)
    offs_n = tl.arange(0, BLOCK_N)
    of_others = tl.max(tl.load(norms_ptr + offs_n, mask=offs_n < n_norms, other=0.0), 0)
    bound = power(exponent(norm * (of_others * factor), _LEAST))
    zeros = tl.zeros([_BLOCK], tl.float32)
    tl.store(scale_ptr + rows, zeros + power(e), mask=rows < n_rows)
    tl.store(bound_ptr + rows, zeros + bound, mask=rows < n_rows)


def panels_shape(n_rows: int, n_columns: int) -> tuple[int, int, int]:
    """Returns the shape of a matrix's panels."""
    return triton.cdiv(n_rows, BLOCK), n_columns, BLOCK


def blocks_quantizer(
    shape: tuple[int, int], stride: int, norms: int, panels: bool
) -> Callable[[Tensor, InRows, float], Blocks]:
    """Returns a function that quantizes matrices of this shape.

    Call it with a matrix of any float dtype, whose rows are contiguous and `stride` apart; the
    second operand of the next product; and the largest ratio of a result to an element of that
    product.

    Args:
        shape: [T, C].
        stride: elements from one row to the next.
        norms: the length of the second operand's `bound`.
        panels: whether to write panels.
    """
    n_rows, n_columns = shape
    blocks, *_ = of_panels = panels_shape(n_rows, n_columns)
    kernel = Bound(
        _quantize_blocks_kernel, (blocks,), n_rows, n_columns, stride, norms,
        HAS_PANELS=panels, BLOCK_N=triton.next_power_of_2(norms), BLOCK_C=BLOCK_C,
        num_warps=NUM_WARPS,
    )  # fmt: skip

    def quantize(x: Tensor, other: InRows, factor: float) -> Blocks:
        rows = x.new_empty(shape, dtype=E4M3)
        of_columns = x.new_empty(of_panels, dtype=E4M3) if panels else None
        scale = x.new_empty(n_rows, dtype=torch.float32)
        bound = x.new_empty(n_rows, dtype=torch.float32)
        written = rows if of_columns is None else of_columns
        kernel(x, rows, written, scale, bound, other.bound, factor)
        return Blocks(rows, scale, of_columns, bound)

    return quantize
