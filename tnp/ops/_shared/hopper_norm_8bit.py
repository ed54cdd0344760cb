"""Adds an update, normalizes rows of 512 and quantizes them on Hopper, in one launch.

    sum = x + update    normalized = sum · rstd · weight, as blocks (`blocks_8bit`)

Normalized rows never reach memory in 16 bits, and no launch has to find their largest elements.
Elements of a row are at most √512 · max|weight|, which gives one scale for all rows. That is more
than most rows need, and a floating-point format loses little by it.
"""

from collections.abc import Callable
from math import sqrt

import torch
from torch import Tensor
from triton import next_power_of_2
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tnp.dispatch.launcher import Bound
from tnp.ops._shared.blocks_8bit import E4M3, Blocks, panels_shape
from tnp.ops._shared.hopper_blocks_8bit import (
    COLUMNS,
    FLAT,
    GROUP,
    NUM_WARPS,
    PAIRS,
    exponent,
    group_rows,
    largest_of,
    n_groups,
    power,
    scaled,
    store_columns,
    store_scales,
    unpacked,
    words,
)
from tnp.ops._shared.operands import dense, rows_of
from tnp.ops._shared.rows_8bit import InRows

WIDTH = 512
# Bounds a normalized element before its weight. The factor 1.01 allows for rounding.
LARGEST = gl.constexpr(sqrt(WIDTH) * 1.01)


@gluon.jit
def _packed(even, odd):
    """Returns two float32 as int32 words of two bfloat16, rounded to nearest."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True,
        pack=1,
    )  # fmt: skip


@gluon.jit
def _of_parity(ptr, column, parity: gl.constexpr):
    """Loads the even or the odd numbers of 128."""
    pairs = gl.arange(0, COLUMNS // 2, layout=gl.SliceLayout(0, PAIRS))
    return gl.load(ptr + column + 2 * pairs + parity).to(gl.float32)[None, :]


@gluon.jit(do_not_specialize=["n_rows"])
def add_norm_hopper_8bit_kernel(
    x_ptr, update_ptr, sum_ptr, rows_ptr, panels_ptr, scale_ptr, bound_ptr, weight_ptr, norms_ptr,
    stride_x, stride_update, n_rows, n_norms, eps, factor,
    HAS_PANELS: gl.constexpr, NORMS: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Normalizes a group of 32 rows. x, update and sum are words of two bfloat16."""
    group = gl.program_id(0)
    rows = group_rows(group, gl.SliceLayout(1, PAIRS))
    pairs = gl.arange(0, COLUMNS // 2, layout=gl.SliceLayout(0, PAIRS))
    far = rows.to(gl.int64)[:, None]
    of_x = far * stride_x + pairs[None, :]
    of_update = far * stride_update + pairs[None, :]
    of_sum = far * (C // 2) + pairs[None, :]
    inside = (rows < n_rows)[:, None]
    parts = ()
    squares = gl.zeros([GROUP, COLUMNS // 2], gl.float32, PAIRS)
    for i in gl.static_range(C // COLUMNS):
        at = i * (COLUMNS // 2)
        x_even, x_odd = unpacked(gl.load(x_ptr + at + of_x, mask=inside, other=0))
        even, odd = unpacked(gl.load(update_ptr + at + of_update, mask=inside, other=0))
        total = _packed(x_even + even, x_odd + odd)
        gl.store(sum_ptr + at + of_sum, total, mask=inside)
        even, odd = unpacked(total)
        squares += even * even + odd * odd
        parts += (total,)
    rstd = (1.0 / gl.sqrt(gl.sum(squares, 1) * (1.0 / C) + eps))[:, None]
    largest = gl.max(gl.abs(gl.load(weight_ptr + gl.arange(0, C, layout=FLAT)).to(gl.float32)), 0)
    e = exponent(largest * LARGEST)
    unit = rstd * power(-e)
    for i in gl.static_range(C // COLUMNS):
        even, odd = unpacked(parts[i])
        even = scaled(even * unit, _of_parity(weight_ptr, i * COLUMNS, 0))
        odd = scaled(odd * unit, _of_parity(weight_ptr, i * COLUMNS, 1))
        store_columns(even, odd, rows_ptr, panels_ptr, group, i * COLUMNS, n_rows, C, HAS_PANELS)
    norm = largest * LARGEST
    bound = power(exponent(norm * (largest_of(norms_ptr, n_norms, NORMS) * factor)))
    store_scales(power(e), bound, scale_ptr, bound_ptr, group, n_rows)


def norm_quantizer(
    x: Tensor, update: Tensor, norms: int, panels: bool
) -> Callable[[Tensor, Tensor, Tensor, float, InRows, float], tuple[Tensor, Blocks]]:
    """Returns a function of (x, update, weight, eps, other, factor) → (sum, blocks).

    x and update are bfloat16 [..., 512], and the sum has x's shape. `other` is the second
    operand of the next product, and `factor` the largest ratio of a result to an element of it.
    """
    x_rows, update_rows = rows_of(x, tma=True), rows_of(update, tma=True)
    n_rows = x_rows.n
    of_sum, of_panels = dense(*x.shape), panels_shape(n_rows, WIDTH)
    kernel = Bound(
        add_norm_hopper_8bit_kernel, (n_groups(n_rows),),
        x_rows.stride // 2, update_rows.stride // 2, n_rows, norms,
        HAS_PANELS=panels, NORMS=next_power_of_2(norms), C=WIDTH, num_warps=NUM_WARPS,
    )  # fmt: skip

    def run(
        x: Tensor, update: Tensor, weight: Tensor, eps: float, other: InRows, factor: float
    ) -> tuple[Tensor, Blocks]:
        total = x.new_empty_strided(*of_sum)
        rows = x.new_empty((n_rows, WIDTH), dtype=E4M3)
        of_columns = x.new_empty(of_panels, dtype=E4M3) if panels else None
        scale = x.new_empty(n_rows, dtype=torch.float32)
        bound = x.new_empty(n_rows, dtype=torch.float32)
        read = x_rows.pointed(x), update_rows.pointed(update), total
        read = [one.view(torch.int32) for one in read]
        written = words(rows, of_columns, scale)
        kernel(*read, *written, scale, bound, weight.contiguous(), other.bound, eps, factor)
        return total, Blocks(rows, scale, of_columns, bound)

    return run
