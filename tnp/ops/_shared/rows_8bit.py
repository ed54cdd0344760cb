"""Quantizes rows of a matrix to 8 bits (e4m3), each with a power of two as its scale, in one
launch.

    x [R, C] → x8 [R, C] e4m3, scale [R] float32,  x ≈ scale · x8

A scale is the smallest power of two with which the row's largest element is at most 448, the
largest number of e4m3. A row with an infinity becomes NaN, because its scale would hide it. NaN
stays NaN.

It is for weights. `bound` gives the largest norm of a row, from which `blocks_8bit` knows how large
a product can be.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tnp.dispatch.launcher import Bound
from tnp.ops._shared.e4m3 import LEAST
from tnp.ops._shared.primitives import cast, exponent, inverse, power

E4M3 = torch.float8_e4m3fn
ELEMENTS = 8192  # elements of a program: 64 for each thread
WIDEST = 2048  # the most columns that a program keeps; it reads wider rows twice
NUM_WARPS = 4
_LEAST = tl.constexpr(LEAST)


class InRows(NamedTuple):
    """Holds a matrix in 8 bits."""

    x: Tensor  # [R, C] e4m3, contiguous
    scale: Tensor  # [R] float32
    bound: Tensor  # float32, the largest row norm of each program's rows


@triton.jit
def column_at(position):
    """Returns the column at a position of a row in the order of a matmul's registers.

    Of each 64 columns, position 16t + 2j + c holds column 8j + 2t + c.
    """
    within = position % 64
    column = within % 16 // 2 * 8 + within // 16 * 2 + within % 2
    return position - within + column


@triton.jit
def _load(x_ptr, rows, columns, n_rows, n_columns, stride_row, stride_column):
    """Loads elements as float32; they are 0 past the ends."""
    at = rows.to(tl.int64)[:, None] * stride_row + columns.to(tl.int64)[None, :] * stride_column
    mask = (rows < n_rows)[:, None] & (columns < n_columns)[None, :]
    return tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["n_rows", "n_out_rows"])
def _quantize_rows_kernel(
    x_ptr, x8_ptr, scale_ptr, bound_ptr,
    n_rows, n_columns, n_out_rows, n_out_columns, stride_row, stride_column,
    WHOLE: tl.constexpr, ORDERED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Quantizes BLOCK_R rows a program. WHOLE: rows have at most BLOCK_C columns."""
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    positions = tl.arange(0, BLOCK_C)
    columns = column_at(positions) if ORDERED else positions
    if WHOLE:
        x = _load(x_ptr, rows, columns, n_rows, n_columns, stride_row, stride_column)
        largest = tl.max(tl.abs(x), 1)
    else:
        largest = tl.zeros([BLOCK_R], tl.float32)
        for start in tl.range(0, n_columns, BLOCK_C):
            x = _load(x_ptr, rows, start + columns, n_rows, n_columns, stride_row, stride_column)
            largest = tl.maximum(largest, tl.max(tl.abs(x), 1))
    e = exponent(largest, _LEAST)
    units = inverse(largest, e)[:, None]
    # Squares of scaled elements neither overflow nor vanish.
    squares = tl.zeros([BLOCK_R], tl.float32)
    x8_ptrs = x8_ptr + rows.to(tl.int64)[:, None] * n_out_columns
    mask = (rows < n_out_rows)[:, None]
    if WHOLE:
        x *= units
        squares += tl.sum(x * x, 1)
        inside = mask & (positions < n_out_columns)[None, :]
        tl.store(x8_ptrs + positions[None, :], cast(x, x8_ptr.dtype.element_ty), mask=inside)
    else:
        for start in tl.range(0, n_out_columns, BLOCK_C):
            at = start + columns
            x = _load(x_ptr, rows, at, n_rows, n_columns, stride_row, stride_column) * units
            squares += tl.sum(x * x, 1)
            at = start + positions
            inside = mask & (at < n_out_columns)[None, :]
            tl.store(x8_ptrs + at[None, :], cast(x, x8_ptr.dtype.element_ty), mask=inside)
    tl.store(scale_ptr + rows, power(e), mask=rows < n_out_rows)
    tl.store(bound_ptr + tl.program_id(0), tl.max(tl.sqrt(squares) * power(e), 0))


def rows_quantizer(
    x: Tensor,
    shape: tuple[int, int],
    strides: tuple[int, int],
    padded: tuple[int, int] | None = None,
    ordered: bool = False,
) -> Callable[[Tensor], InRows]:
    """Returns a function that quantizes tensors with the strides of x.

    Args:
        x: a tensor of any float dtype.
        shape: the matrix's shape, from the tensor's first element on.
        strides: the matrix's strides.
        padded: the shape after padding with zeros; None: no padding.
        ordered: whether columns lie in the order of `column_at`; 64 must divide the padded width.
    """
    n_rows, n_columns = shape
    out_rows, out_columns = padded or shape
    block_r, block_c = _block(out_columns)
    n_programs = triton.cdiv(out_rows, block_r)
    kernel = Bound(
        _quantize_rows_kernel, (n_programs,),
        n_rows, n_columns, out_rows, out_columns, *strides,
        WHOLE=out_columns <= block_c, ORDERED=ordered, BLOCK_R=block_r, BLOCK_C=block_c,
        num_warps=NUM_WARPS,
    )  # fmt: skip

    def quantize(x: Tensor) -> InRows:
        x8 = x.new_empty((out_rows, out_columns), dtype=E4M3)
        scale = x.new_empty(out_rows, dtype=torch.float32)
        bound = x.new_empty(n_programs, dtype=torch.float32)
        kernel(x, x8, scale, bound)
        return InRows(x8, scale, bound)

    return quantize


def n_norms(shape: tuple[int, int]) -> int:
    """Returns how many norms the quantizer of a matrix of this (padded) shape leaves."""
    block_r, _ = _block(shape[1])
    return triton.cdiv(shape[0], block_r)


def _block(n_columns: int) -> tuple[int, int]:
    """Returns the rows and columns that a program keeps."""
    block_c = min(max(triton.next_power_of_2(n_columns), 16), WIDEST)
    return max(ELEMENTS // block_c, 1), block_c


def row_product(like: Tensor) -> Callable[..., Tensor]:
    """Returns a function that multiplies 8-bit rows [T, C], with their scales [T], by wᵀ, where w
    is [N, C]. The result is [T, N], in `out` if given, in bfloat16, or in the dtype of `like` if
    that is not on CUDA.
    """

    def product(x8: Tensor, scale: Tensor, w: InRows, out: Tensor | None = None) -> Tensor:
        # The tensor cores' own sums keep about 13 bits. `use_fast_accum` would use them for the
        # whole sum.
        return torch._scaled_mm(
            x8, w.x.t(), scale_a=scale.view(-1, 1), scale_b=w.scale.view(1, -1),
            out_dtype=torch.bfloat16, use_fast_accum=False, out=out,
        )  # fmt: skip

    def widened(x8: Tensor, scale: Tensor, w: InRows, out: Tensor | None = None) -> Tensor:
        x, w = x8.float() * scale[:, None], w.x.float() * w.scale[:, None]
        y = (x @ w.T).to(like.dtype)
        return y if out is None else out.copy_(y)

    return product if like.is_cuda else widened
