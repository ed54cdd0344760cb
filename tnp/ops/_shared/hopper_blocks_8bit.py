"""Quantizes rows of 512 on Hopper, as `blocks_8bit` says, and packs e4m3 for other kernels.

A first launch finds the largest element and the largest norm of each 16 rows. In the second, a
program takes the 32 rows of a block that share 32 bytes of every line of its panel. A thread has
four consecutive positions of eight columns. So it packs words of rows and words of panels from its
own numbers.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tnp.dispatch.launcher import Bound
from tnp.ops._shared.blocks_8bit import E4M3, Blocks, panels_shape
from tnp.ops._shared.e4m3 import BLOCK, LEAST
from tnp.ops._shared.rows_8bit import InRows

NUM_WARPS = 4
GROUP = gl.constexpr(32)  # rows of a program
SIZED = 16  # rows that the first launch measures together
COLUMNS = gl.constexpr(128)  # of a group that a program handles in one step
_LEAST = gl.constexpr(LEAST)
_SIZES = gl.constexpr(BLOCK // SIZED)
# Positions, pairs of columns; then words of rows, [32, 32], and words of panels, [8, 64].
PAIRS = gl.constexpr(gl.BlockedLayout([4, 4], [8, 4], [1, 4], [1, 0]))
ROW_WORDS = gl.constexpr(gl.BlockedLayout([4, 2], [8, 4], [1, 4], [1, 0]))
PANEL_WORDS = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [1, 4], [1, 0]))
FLAT = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


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
def group_rows(group, LAYOUT: gl.constexpr):
    """Returns the rows of a group, in the order of `blocks_8bit.row_at`."""
    i = gl.arange(0, GROUP, layout=LAYOUT)
    begin = group // 4 * 128 + group % 4 * 16
    return begin + i // 2 % 2 * 64 + i % 2 * 8 + i // 4


@gluon.jit
def _store_lines(x, ptr, parity: gl.constexpr):
    """Writes the even or the odd columns of x [32, 64] to lines of a panel."""
    first, second = gl.split(gl.permute(gl.reshape(x, [8, 2, 2, 64]), (0, 3, 1, 2)))
    x0, x2 = gl.split(first)
    x1, x3 = gl.split(second)
    packed = gl.convert_layout(word(x0, x1, x2, x3), PANEL_WORDS, assert_trivial=True)
    at = gl.arange(0, 8, layout=gl.SliceLayout(1, PANEL_WORDS))
    lines = gl.arange(0, 64, layout=gl.SliceLayout(0, PANEL_WORDS)) * 2 + parity
    gl.store(ptr + lines[None, :] * 32 + at[:, None], packed)


@gluon.jit
def store_columns(
    even, odd, rows_ptr, panels_ptr, group, column, n_rows, C: gl.constexpr,
    HAS_PANELS: gl.constexpr,
):  # fmt: skip
    """Writes 128 of a group's C columns, in units of their scale, as words of rows and panels.

    `even` and `odd` are every second column, [32, 64] in layout `PAIRS`.
    """
    x0, x2 = gl.split(gl.reshape(even, [GROUP, 32, 2]))
    x1, x3 = gl.split(gl.reshape(odd, [GROUP, 32, 2]))
    packed = gl.convert_layout(word(x0, x1, x2, x3), ROW_WORDS, assert_trivial=True)
    rows = group_rows(group, gl.SliceLayout(1, ROW_WORDS))
    columns = column // 4 + gl.arange(0, 32, layout=gl.SliceLayout(0, ROW_WORDS))
    places = rows.to(gl.int64)[:, None] * (C // 4) + columns[None, :]
    gl.store(rows_ptr + places, packed, mask=(rows < n_rows)[:, None])
    if HAS_PANELS:
        panels_ptr += (group // 4).to(gl.int64) * (C * 32) + column * 32 + group % 4 * 8
        _store_lines(even, panels_ptr, 0)
        _store_lines(odd, panels_ptr, 1)


@gluon.jit
def unpacked(pairs):
    """Returns the lower and the upper bfloat16 of int32 words, in float32."""
    even = (pairs << 16).to(gl.float32, bitcast=True)
    return even, (pairs & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def scaled(x, unit):
    """Returns x in its unit, NaN where x is not finite."""
    x = x * unit
    return gl.where(gl.abs(x) < float("inf"), x, float("nan"))


@triton.jit(do_not_specialize=["n_rows"])
def _sizes_kernel(
    x_ptr, largest_ptr, norm_ptr, n_rows, stride, ROWS: tl.constexpr, C: tl.constexpr
):
    """Writes the largest finite element and the largest norm of ROWS rows."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = rows.to(tl.int64)[:, None] * stride + tl.arange(0, C)[None, :]
    x = tl.load(x_ptr + at, mask=(rows < n_rows)[:, None], other=0.0).to(tl.float32)
    x = tl.where(tl.abs(x) < float("inf"), x, 0.0)
    largest = tl.max(tl.max(tl.abs(x), 1), 0)
    # Squares of scaled elements neither overflow nor vanish.
    bits = largest.to(tl.int32, bitcast=True) & 0x7F800000
    bits = tl.minimum(tl.maximum(bits, 27 << 23), 227 << 23)
    x *= ((254 << 23) - bits).to(tl.float32, bitcast=True)
    norm = tl.sqrt(tl.max(tl.sum(x * x, 1), 0)) * bits.to(tl.float32, bitcast=True)
    tl.store(largest_ptr + tl.program_id(0), largest)
    tl.store(norm_ptr + tl.program_id(0), norm)


@gluon.jit
def _of_block(ptr, group, n_sizes):
    """Returns the largest of the numbers that the first launch wrote for a group's block."""
    at = group // 4 * _SIZES + gl.arange(0, _SIZES, layout=FLAT)
    return gl.max(gl.load(ptr + at, mask=at < n_sizes, other=0.0), 0)


@gluon.jit
def store_scales(scale, bound, scale_ptr, bound_ptr, group, n_rows):
    """Writes the scales of a group's rows and of the product's rows."""
    rows = group_rows(group, FLAT)
    zeros = gl.zeros([GROUP], gl.float32, FLAT)
    gl.store(scale_ptr + rows, zeros + scale, mask=rows < n_rows)
    gl.store(bound_ptr + rows, zeros + bound, mask=rows < n_rows)


@gluon.jit
def largest_of(norms_ptr, n_norms, NORMS: gl.constexpr):
    """Returns the largest of n_norms numbers, for a constant NORMS of at least so many."""
    at = gl.arange(0, NORMS, layout=FLAT)
    return gl.max(gl.load(norms_ptr + at, mask=at < n_norms, other=0.0), 0)


@gluon.jit(do_not_specialize=["n_rows", "n_sizes"])
def quantize_blocks_hopper_kernel(
    x_ptr, rows_ptr, panels_ptr, scale_ptr, bound_ptr, largest_ptr, norm_ptr, norms_ptr,
    n_rows, n_sizes, stride, n_norms, factor,
    HAS_PANELS: gl.constexpr, NORMS: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Quantizes a group of 32 rows. x_ptr points to words of two bfloat16."""
    group = gl.program_id(0)
    rows = group_rows(group, gl.SliceLayout(1, PAIRS))
    columns = gl.arange(0, COLUMNS // 2, layout=gl.SliceLayout(0, PAIRS))
    places = rows.to(gl.int64)[:, None] * stride + columns[None, :]
    inside = (rows < n_rows)[:, None]
    parts = ()
    for i in gl.static_range(C // COLUMNS):
        parts += (gl.load(x_ptr + i * (COLUMNS // 2) + places, mask=inside, other=0),)
    e = exponent(_of_block(largest_ptr, group, n_sizes))
    for i in gl.static_range(C // COLUMNS):
        even, odd = unpacked(parts[i])
        even, odd = scaled(even, power(-e)), scaled(odd, power(-e))
        store_columns(even, odd, rows_ptr, panels_ptr, group, i * COLUMNS, n_rows, C, HAS_PANELS)
    norm = _of_block(norm_ptr, group, n_sizes)
    bound = power(exponent(norm * (largest_of(norms_ptr, n_norms, NORMS) * factor)))
    store_scales(power(e), bound, scale_ptr, bound_ptr, group, n_rows)


def blocks_quantizer(
    shape: tuple[int, int], stride: int, norms: int, panels: bool
) -> Callable[[Tensor, InRows, float], Blocks]:
    """Does the same as `blocks_8bit.blocks_quantizer`, for bfloat16 rows of 512 at multiples of 16
    bytes.
    """
    n_rows, n_columns = shape
    n_sizes, of_panels = triton.cdiv(n_rows, SIZED), panels_shape(n_rows, n_columns)
    sizes = Bound(
        _sizes_kernel, (n_sizes,), n_rows, stride, ROWS=SIZED, C=n_columns, num_warps=NUM_WARPS
    )
    kernel = Bound(
        quantize_blocks_hopper_kernel, (n_groups(n_rows),), n_rows, n_sizes, stride // 2, norms,
        HAS_PANELS=panels, NORMS=triton.next_power_of_2(norms), C=n_columns, num_warps=NUM_WARPS,
    )  # fmt: skip

    def quantize(x: Tensor, other: InRows, factor: float) -> Blocks:
        largest, norm = x.new_empty((2, n_sizes), dtype=torch.float32)
        sizes(x, largest, norm)
        rows = x.new_empty(shape, dtype=E4M3)
        of_columns = x.new_empty(of_panels, dtype=E4M3) if panels else None
        # Two tensors, because both may be saved.
        scale = x.new_empty(n_rows, dtype=torch.float32)
        bound = x.new_empty(n_rows, dtype=torch.float32)
        written = words(rows, of_columns, scale)
        kernel(x.view(torch.int32), *written, scale, bound, largest, norm, other.bound, factor)
        return Blocks(rows, scale, of_columns, bound)

    return quantize


def n_groups(n_rows: int) -> int:
    """Returns the number of groups of a matrix's blocks."""
    return panels_shape(n_rows, 1)[0] * (BLOCK // GROUP.value)


def words(rows: Tensor | None, panels: Tensor | None, unused: Tensor) -> tuple[Tensor, Tensor]:
    """Returns both as int32 words, or `unused` in place of None."""
    return tuple((unused if x is None else x).view(torch.int32) for x in (rows, panels))
