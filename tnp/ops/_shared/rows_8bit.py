"""Quantizes weights to 8 bits (e4m3), with a power of two as the scale of each row.

    w [R, C] → w8 [R, C] e4m3, scale [R] float32,  w ≈ scale · w8

One launch quantizes w and wᵀ. The forward product sums over columns of w, the backward product over
its rows, and Hopper multiplies 8-bit operands only if they are contiguous along the sum. A scale is
the smallest power of two with which the row's largest element is at most 448, the largest number of
e4m3. A row with an infinity becomes NaN, because its scale would hide it. NaN stays NaN.

`bound` gives the largest norm of a row, from which `blocks_8bit` knows how large a product can be.
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


@triton.jit
def _quantize(
    program, x_ptr, x8_ptr, scale_ptr, bound_ptr,
    n_rows, n_columns, n_out_rows, n_out_columns, stride_row, stride_column,
    WHOLE: tl.constexpr, ORDERED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Quantizes BLOCK_R rows. WHOLE: rows have at most BLOCK_C columns."""
    rows = program * BLOCK_R + tl.arange(0, BLOCK_R)
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
    tl.store(bound_ptr + program, tl.max(tl.sqrt(squares) * power(e), 0))


@triton.jit
def _quantize_both_kernel(
    x_ptr, x8_ptr, scale_ptr, bound_ptr, x8_t_ptr, scale_t_ptr, bound_t_ptr,
    n_rows, n_columns, n_out_rows, n_out_columns, stride_row, stride_column, n_programs,
    WHOLE: tl.constexpr, ORDERED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
    WHOLE_T: tl.constexpr, ORDERED_T: tl.constexpr, BLOCK_R_T: tl.constexpr,
    BLOCK_C_T: tl.constexpr,
):  # fmt: skip
    """Quantizes the rows of a matrix in the first programs, and its columns in the others."""
    program = tl.program_id(0)
    if program < n_programs:
        _quantize(
            program, x_ptr, x8_ptr, scale_ptr, bound_ptr,
            n_rows, n_columns, n_out_rows, n_out_columns, stride_row, stride_column,
            WHOLE, ORDERED, BLOCK_R, BLOCK_C,
        )  # fmt: skip
    else:
        _quantize(
            program - n_programs, x_ptr, x8_t_ptr, scale_t_ptr, bound_t_ptr,
            n_columns, n_rows, n_out_columns, n_out_rows, stride_column, stride_row,
            WHOLE_T, ORDERED_T, BLOCK_R_T, BLOCK_C_T,
        )  # fmt: skip


def weight_quantizer(
    shape: tuple[int, int],
    strides: tuple[int, int],
    padded: tuple[int, int] | None = None,
    ordered: tuple[bool, bool] = (False, False),
    both: bool = True,
) -> Callable[[Tensor], tuple[InRows, InRows | None]]:
    """Returns a function w → (w8, w8_t) that quantizes a matrix and its transpose.

    w is a tensor of any float dtype that holds the matrix from its first element on.

    Args:
        shape, strides: those of the matrix.
        padded: the shape of w8, with zeros in the rows and columns past `shape`; None: no padding.
        ordered: whether columns of w8, and those of w8_t, lie in the order of `column_at`. 64 must
            divide their number.
        both: whether to quantize the transpose. If not, w8_t is None.
    """
    padded = padded or shape
    transposed = padded[::-1]
    n_programs, n_programs_t = n_norms(padded), n_norms(transposed)  # a program leaves one norm
    block, block_t = _block(padded[1]), _block(transposed[1])
    kernel = Bound(
        _quantize_both_kernel, (n_programs + n_programs_t * both,),
        *shape, *padded, *strides, n_programs,
        WHOLE=padded[1] <= block[1], ORDERED=ordered[0], BLOCK_R=block[0], BLOCK_C=block[1],
        WHOLE_T=transposed[1] <= block_t[1], ORDERED_T=ordered[1], BLOCK_R_T=block_t[0],
        BLOCK_C_T=block_t[1], num_warps=NUM_WARPS,
    )  # fmt: skip

    def quantize(w: Tensor) -> tuple[InRows, InRows | None]:
        w8 = empty_rows(w, padded)
        w8_t = empty_rows(w, transposed) if both else None
        kernel(w, *w8, *(w8_t or w8))  # without programs for w8_t nothing writes there
        return w8, w8_t

    return quantize


def empty_rows(like: Tensor, shape: tuple[int, int]) -> InRows:
    """Returns uninitialized memory for a matrix in 8 bits, on the device of `like`."""
    return InRows(
        like.new_empty(shape, dtype=E4M3),
        like.new_empty(shape[0], dtype=torch.float32),
        like.new_empty(n_norms(shape), dtype=torch.float32),
    )


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
