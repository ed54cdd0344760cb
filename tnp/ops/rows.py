"""What the kernels that walk rows share: strided views, grid sizes, sums of partial results."""

import torch
import triton
import triton.language as tl

from tnp.contract import Target
from tnp.launch import Bound

# Columns a program of the reduction owns (one sector of float32), and partials it reads at a time.
SUM_COLUMNS = 8
SUM_ROWS = 512


def as_batches(x: torch.Tensor) -> torch.Tensor:
    """[..., D] as [B, L, D]: a view, or a copy where more dimensions than two do not collapse."""
    return x[(None,) * (3 - x.dim())] if x.dim() < 3 else x.flatten(0, -3)


def walking_programs(device: torch.device, per_multiprocessor: int, n_tiles: int) -> int:
    """Programs that walk `n_tiles` tiles: as many as the device holds at once, at least one each.

    The interpreter gets a device of one multiprocessor.
    """
    n = per_multiprocessor
    if device.type != "cpu":
        n *= torch.cuda.get_device_properties(device).multi_processor_count
    return min(n, n_tiles)


def programs(target: Target, per_multiprocessor: int, n_tiles: int) -> int:
    """Programs that walk `n_tiles` tiles: as many as the target holds at once, at most one each."""
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
    tl.store(out_ptr + offs_n, tl.sum(acc, 0) * scale, mask=offs_n < n)


def sum_partials(partials: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """scale · Σ_p partials[p, ...], float32, in an order that the shape alone decides."""
    out = partials.new_empty(partials.shape[1:])
    _sum_partials_kernel[(triton.cdiv(out.numel(), SUM_COLUMNS),)](
        partials, out, len(partials), out.numel(), scale,
        ROWS=SUM_ROWS, COLUMNS=SUM_COLUMNS, num_warps=8,
    )  # fmt: skip
    return out


def sum_of_partials(n_partials: int, n: int) -> Bound:
    """`sum_partials` of [n_partials, n] for a plan: called with partials, sums and the scale."""
    return Bound(
        _sum_partials_kernel, (triton.cdiv(n, SUM_COLUMNS),), n_partials, n,
        ROWS=SUM_ROWS, COLUMNS=SUM_COLUMNS, num_warps=8,
    )  # fmt: skip
