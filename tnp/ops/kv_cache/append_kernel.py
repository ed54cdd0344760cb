"""Writes one point's keys and values into a cache, after the rows that each sample has.

The kernel runs between the product that computes them and the attention that reads them, in one
chain of launches (`tnp.ops._shared.few_rows`). Device memory is idle while it waits for the
product. So it prefetches the cache to L2, where attention will read it.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from tnp.dispatch.devices import Target
from tnp.dispatch.launcher import Bound
from tnp.ops._shared.few_rows import chained, follow

# The most bytes of a cache that are prefetched to L2, which has 50 MB on an H200, and the number of
# bytes that a request must be a multiple of.
MOST_BROUGHT, REQUEST_MULTIPLE = 32 * 2**20, 16


@triton.jit
def _bring(ptr, n_bytes, each):
    """Prefetches memory to L2, `each` bytes a program."""
    address = ptr.to(tl.int64) + tl.minimum(tl.program_id(0) * each, n_bytes - each)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;", "=r,l,r", [address, each],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["batch", "capacity", "n_bytes", "each"])
def _enter_kernel(
    cache_ptr, rows_ptr, lengths_ptr, stride_b, batch, capacity, n_bytes, each,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    BRINGS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Writes a sample's row in each program. Nothing is written if the cache has no such row.

    BRINGS: every program prefetches an equal part of the cache. Programs past the samples do
    nothing else.
    """
    if BRINGS:
        _bring(cache_ptr, n_bytes, each)
    b = tl.program_id(0).to(tl.int64)
    head, column = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_D)[None, :]
    mask = (head < HEADS) & (column < WIDTH) & (b < batch)
    follow(CHAINED)
    place = tl.load(lengths_ptr + b, mask=b < batch, other=0) - 1
    # Queries come first in a row. They are half as many as keys and values.
    x = tl.load(rows_ptr + b * stride_b + (HEADS // 2 + head) * WIDTH + column, mask=mask)
    row = (b * HEADS + head) * capacity + place
    there = mask & (place >= 0) & (place < capacity)
    tl.store(cache_ptr + row * WIDTH + column, x, mask=there)


def entry(
    target: Target, cache: torch.Tensor, n_rows: int
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]:
    """Returns the launch that writes a sample's first row to row lengths[b] − 1 of its cache.

    Call it with (cache, rows, lengths).

    Args:
        target: the device.
        cache: like all later caches: [B, 2 · H, capacity, D], contiguous, keys and then values.
        n_rows: rows of a sample. `rows` are [B, n_rows, 3 · H · D], contiguous: queries, keys,
            values.
    """
    (batch, heads, capacity, width), n_bytes = cache.shape, cache.nbytes
    chain, programs, each = chained(target), batch, 0
    brings = chain["CHAINED"] and n_bytes <= MOST_BROUGHT and n_bytes % REQUEST_MULTIPLE == 0
    if brings:
        programs = max(batch, target.multiprocessors)
        each = triton.cdiv(n_bytes, programs * REQUEST_MULTIPLE) * REQUEST_MULTIPLE
    return Bound(
        _enter_kernel, (programs,), n_rows * (heads + heads // 2) * width, batch, capacity,
        n_bytes, each, HEADS=heads, WIDTH=width, BLOCK_H=triton.next_power_of_2(heads),
        BLOCK_D=triton.next_power_of_2(width), BRINGS=brings, num_warps=1, **chain,
    )  # fmt: skip
