"""Quantizes rows of 512 on Hopper, as `blocks_8bit` says, and packs e4m3 for other kernels.

A program quantizes a block of 128 rows, which it reads twice, the second time from a cache. A
thread has four consecutive positions of eight columns. So it packs words of rows and words of
panels from its own numbers.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from triton import next_power_of_2
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tnp.dispatch.launcher import Bound
from tnp.ops._shared.blocks_8bit import E4M3, Blocks, panels_shape
from tnp.ops._shared.e4m3 import LEAST
from tnp.ops._shared.rows_8bit import InRows

NUM_WARPS = 8
REGISTERS = 80  # three programs then share a multiprocessor
COLUMNS = gl.constexpr(64)  # of a block that all threads have at once
_LEAST = gl.constexpr(LEAST)
# Positions, pairs of columns; then words of rows, [128, 16], and words of panels, [32, 32].
PAIRS = gl.constexpr(gl.BlockedLayout([4, 4], [8, 4], [4, 2], [1, 0]))
ROW_WORDS = gl.constexpr(gl.BlockedLayout([4, 2], [8, 4], [4, 2], [1, 0]))
PANEL_WORDS = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [4, 2], [1, 0]))
_NORMS = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))


@gluon.jit
def word(x0, x1, x2, x3):
    """Returns four numbers as e4m3, the first in the lowest byte."""
    return gl.inline_asm_elementwise(
        "{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1;"
        " cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3; mov.b32 $0, {lo, hi}; }",
        "=r,f,f,f,f", [x0, x1, x2, x3], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def exponent(largest):
    """Does the same as `tnp.ops._shared.primitives.exponent`."""
    bits = largest.to(gl.int32, bitcast=True) + 0x1FFFFF
    return gl.maximum((bits >> 23) - (127 + 8), _LEAST)


@gluon.jit
def power(e):
    """Returns 2^e in float32, exactly, for an int32 between −126 and 127."""
    return ((e + 127) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def block_rows(block, LAYOUT: gl.constexpr):
    """Returns the rows at the positions of a block, as `blocks_8bit.row_at` orders them."""
    i = gl.arange(0, 128, layout=LAYOUT)
    return block * 128 + i // 2 % 2 * 64 + i // 32 * 16 + i % 2 * 8 + i // 4 % 8


@gluon.jit
def _store_lines(x, ptr, parity: gl.constexpr):
    """Writes the even or the odd columns of x [128, 32] to lines of a panel."""
    first, second = gl.split(gl.permute(gl.reshape(x, [32, 2, 2, 32]), (0, 3, 1, 2)))
    x0, x2 = gl.split(first)
    x1, x3 = gl.split(second)
    packed = gl.convert_layout(word(x0, x1, x2, x3), PANEL_WORDS, assert_trivial=True)
    at = gl.arange(0, 32, layout=gl.SliceLayout(1, PANEL_WORDS))
    lines = gl.arange(0, 32, layout=gl.SliceLayout(0, PANEL_WORDS)) * 2 + parity
    gl.store(ptr + lines[None, :] * 32 + at[:, None], packed)


@gluon.jit
def store_columns(
    even, odd, rows_ptr, panels_ptr, block, column, n_rows, C: gl.constexpr,
    HAS_PANELS: gl.constexpr,
):  # fmt: skip
    """Writes 64 of a block's C columns, in units of their scale, as words of rows and panels.

    `even` and `odd` are every second column, [128, 32] in layout `PAIRS`.
    """
    x0, x2 = gl.split(gl.reshape(even, [128, 16, 2]))
    x1, x3 = gl.split(gl.reshape(odd, [128, 16, 2]))
    packed = gl.convert_layout(word(x0, x1, x2, x3), ROW_WORDS, assert_trivial=True)
    rows = block_rows(block, gl.SliceLayout(1, ROW_WORDS))
    columns = column // 4 + gl.arange(0, 16, layout=gl.SliceLayout(0, ROW_WORDS))
    places = rows.to(gl.int64)[:, None] * (C // 4) + columns[None, :]
    gl.store(rows_ptr + places, packed, mask=(rows < n_rows)[:, None])
    if HAS_PANELS:
        panels_ptr += block.to(gl.int64) * (C * 32) + column * 32
        _store_lines(even, panels_ptr, 0)
        _store_lines(odd, panels_ptr, 1)


@gluon.jit
def unpacked(pairs):
    """Returns the lower and the upper bfloat16 of int32 words, in float32."""
    even = (pairs << 16).to(gl.float32, bitcast=True)
    return even, (pairs & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def _largest(pairs):
    """Returns the larger finite magnitude of two numbers, as the bits of float32."""
    even, odd = pairs << 16 & 0x7FFFFFFF, pairs & 0x7FFF0000
    even = gl.where(even < 0x7F800000, even, 0)
    return gl.maximum(even, gl.where(odd < 0x7F800000, odd, 0))


@gluon.jit
def _scaled(x, unit):
    """Returns x in its unit, NaN where x is not finite, and squares with zeros there."""
    x = x * unit
    finite = gl.abs(x) < float("inf")
    return gl.where(finite, x, float("nan")), gl.where(finite, x * x, 0.0)


@gluon.jit(do_not_specialize=["n_rows"])
def quantize_blocks_hopper_kernel(
    x_ptr, rows_ptr, panels_ptr, scale_ptr, bound_ptr, norms_ptr, n_rows, stride, n_norms, factor,
    HAS_PANELS: gl.constexpr, NORMS: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Quantizes a block of 128 rows. x_ptr points to words of two bfloat16."""
    block = gl.program_id(0)
    rows = block_rows(block, gl.SliceLayout(1, PAIRS))
    columns = gl.arange(0, COLUMNS // 2, layout=gl.SliceLayout(0, PAIRS))
    places = rows.to(gl.int64)[:, None] * stride + columns[None, :]
    inside = (rows < n_rows)[:, None]
    largest = gl.zeros([128, COLUMNS // 2], gl.int32, PAIRS)
    for column in range(0, C, COLUMNS):
        pairs = gl.load(x_ptr + column // 2 + places, mask=inside, other=0)
        largest = gl.maximum(largest, _largest(pairs))
    e = exponent(gl.max(gl.max(largest, 1), 0).to(gl.float32, bitcast=True))
    # Squares of scaled elements neither overflow nor vanish.
    squares = gl.zeros([128, COLUMNS // 2], gl.float32, PAIRS)
    for column in range(0, C, COLUMNS):
        even, odd = unpacked(gl.load(x_ptr + column // 2 + places, mask=inside, other=0))
        even, square = _scaled(even, power(-e))
        odd, other = _scaled(odd, power(-e))
        squares += square + other
        store_columns(even, odd, rows_ptr, panels_ptr, block, column, n_rows, C, HAS_PANELS)
    norm = gl.sqrt(gl.max(gl.sum(squares, 1), 0)) * power(e)
    at = gl.arange(0, NORMS, layout=_NORMS)
    of_others = gl.max(gl.load(norms_ptr + at, mask=at < n_norms, other=0.0), 0)
    of_block = block * 128 + gl.arange(0, 128, layout=_NORMS)
    zeros = gl.zeros([128], gl.float32, _NORMS)
    bound = power(exponent(norm * (of_others * factor)))
    gl.store(scale_ptr + of_block, zeros + power(e), mask=of_block < n_rows)
    gl.store(bound_ptr + of_block, zeros + bound, mask=of_block < n_rows)


def blocks_quantizer(
    shape: tuple[int, int], stride: int, norms: int, panels: bool
) -> Callable[[Tensor, InRows, float], Blocks]:
    """Does the same as `blocks_8bit.blocks_quantizer`, for bfloat16 rows of 512 at multiples of 16
    bytes.
    """
    n_rows, n_columns = shape
    n_blocks, *_ = of_panels = panels_shape(n_rows, n_columns)
    kernel = Bound(
        quantize_blocks_hopper_kernel, (n_blocks,), n_rows, stride // 2, norms,
        HAS_PANELS=panels, NORMS=next_power_of_2(norms), C=n_columns, num_warps=NUM_WARPS,
        maxnreg=REGISTERS,
    )  # fmt: skip

    def quantize(x: Tensor, other: InRows, factor: float) -> Blocks:
        rows = x.new_empty(shape, dtype=E4M3)
        of_columns = x.new_empty(of_panels, dtype=E4M3) if panels else None
        scale = x.new_empty(n_rows, dtype=torch.float32)
        bound = x.new_empty(n_rows, dtype=torch.float32)
        kernel(
            x.view(torch.int32), *words(rows, of_columns, scale), scale, bound, other.bound, factor
        )
        return Blocks(rows, scale, of_columns, bound)

    return quantize


def words(rows: Tensor | None, panels: Tensor | None, unused: Tensor) -> tuple[Tensor, Tensor]:
    """Returns both as int32 words, or `unused` in place of None."""
    return tuple((unused if x is None else x).view(torch.int32) for x in (rows, panels))
