"""The write of one point's keys and values into a cache, behind what each sample has.

It stands between the product that makes them and the attention that reads them, and takes part in
the chain of their launches (`tnp.ops.few_rows`).
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from tnp.launch import Bound
from tnp.ops.few_rows import chained, follow
from tnp.targets import Target


@triton.jit(do_not_specialize=["capacity"])
def _enter_kernel(
    cache_ptr, rows_ptr, lengths_ptr, stride_b, capacity,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """A sample a program; where the cache has no such row nothing is written."""
    b = tl.program_id(0).to(tl.int64)
    head, column = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_D)[None, :]
    mask = (head < HEADS) & (column < WIDTH)
    follow(CHAINED)
    place = tl.load(lengths_ptr + b) - 1
    # Queries come first in a row: half as many as there are keys and values.
    x = tl.load(rows_ptr + b * stride_b + (HEADS // 2 + head) * WIDTH + column, mask=mask)
    row = (b * HEADS + head) * capacity + place
    there = mask & (place >= 0) & (place < capacity)
    tl.store(cache_ptr + row * WIDTH + column, x, mask=there)


def entry(
    target: Target, cache: torch.Tensor, n_rows: int
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]:
    """What writes (cache, rows, lengths): the first of a sample's rows becomes the last of the
    first lengths[b] of its cache.

    Args:
        target: where it runs.
        cache: [B, 2 · H, capacity, D] as all will be, contiguous: keys, then values.
        n_rows: of a sample; rows are [B, n_rows, 3 · H · D], contiguous: queries, keys, values.
    """
    batch, heads, capacity, width = cache.shape
    return Bound(
        _enter_kernel, (batch,), n_rows * (heads + heads // 2) * width, capacity,
        HEADS=heads, WIDTH=width, BLOCK_H=triton.next_power_of_2(heads),
        BLOCK_D=triton.next_power_of_2(width), num_warps=4, **chained(target),
    )  # fmt: skip
