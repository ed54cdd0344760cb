"""Shares code of kernels that walk rows: strided views, grid sizes, sums of partial results."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tnp.dispatch.devices import Target
from tnp.dispatch.launcher import Bound
from tnp.ops._shared.primitives import cast

# Columns that a program of the reduction owns (one sector of float32), and partials that it reads
# at a time.
SUM_COLUMNS = 8
SUM_ROWS = 512


def as_batches(x: torch.Tensor) -> torch.Tensor:
    """Returns [..., D] as [B, L, D]: a view, or a copy if strides allow no view."""
    return x[(None,) * (3 - x.dim())] if x.dim() < 3 else x.flatten(0, -3)


@dataclass(frozen=True)
class RowLayout:
    """Describes how a kernel reads [..., D] as contiguous rows of [B, L, D]: see `row_offsets`."""

    copied: bool  # the tensor itself cannot be read in this way
    n_inner: int  # L
    strides: tuple[int, int]  # the strides of B and L

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Returns a tensor of this layout as the kernel takes it."""
        return x.contiguous() if self.copied else x


def row_layout(x: torch.Tensor) -> RowLayout:
    """Returns the layout of a tensor with any strides. The tensor must not be empty."""
    width = x.shape[-1]
    n_inner = x.shape[-2] if x.dim() > 1 else 1
    if x.stride(-1) == 1 or width == 1:
        try:
            return RowLayout(False, n_inner, x.view(-1, n_inner, width).stride()[:2])
        except RuntimeError:  # the leading dimensions do not collapse to two
            pass
    return RowLayout(True, n_inner, (n_inner * width, width))


@triton.jit
def row_offsets(rows, n_inner, stride_b, stride_l):
    """Returns 64-bit offsets of rows of a [B, L, D] view, L = n_inner."""
    b = (rows // n_inner).to(tl.int64)
    return b * stride_b + (rows % n_inner).to(tl.int64) * stride_l


@triton.jit
def load_rows(ptr, offs, mask):
    return tl.load(ptr + offs, mask=mask, other=0.0).to(tl.float32)


def programs(target: Target, per_multiprocessor: int, n_tiles: int) -> int:
    """Returns how many programs walk `n_tiles` tiles: as many as fit, each with a tile."""
    return min(per_multiprocessor * target.multiprocessors, n_tiles)


@triton.jit(do_not_specialize=["n_partials"])
def _sum_partials_kernel(
    partials_ptr, out_ptr, n_partials, n, scale, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    offs_n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, n_partials, ROWS):
        offs_p = start + tl.arange(0, ROWS)
        mask = (offs_p < n_partials)[:, None] & (offs_n < n)[None, :]
        ptrs = partials_ptr + offs_p.to(tl.int64)[:, None] * n + offs_n[None, :]
        acc += tl.load(ptrs, mask=mask, other=0.0)
    total = cast(tl.sum(acc, 0) * scale, out_ptr.dtype.element_ty)
    tl.store(out_ptr + offs_n, total, mask=offs_n < n)


def bound_sum(n_partials: int, n: int) -> Bound:
    """Returns the launch that writes scale · Σ_p partials[p].

    Call it with (partials [n_partials, n], out [n] in any dtype, scale).

    It sums in float32, in an order that depends only on the sizes.
    """
    return Bound(
        _sum_partials_kernel, (triton.cdiv(n, SUM_COLUMNS),), n_partials, n,
        ROWS=SUM_ROWS, COLUMNS=SUM_COLUMNS, num_warps=8,
    )  # fmt: skip
