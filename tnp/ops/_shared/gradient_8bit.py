"""Computes the gradient of a weight from panels in 8 bits, in portable Triton.

    gradient [N, C] = Σ_b a_b · s_b · Σ_t in block b  A_b[n, t] · B_b[c, t]

A and B are panels [blocks, N or C, 128] e4m3 (`tnp.ops._shared.blocks_8bit`), a and s the scales of
their blocks. The result is float32. Hopper's tensor cores keep some 13 bits of a sum of 8-bit
products, so the product of each block is added up in float32.

A gradient has few tiles, and sums over many rows. So a program takes a share of the blocks, and the
programs' sums are added in a fixed order.
"""

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from tnp.dispatch.devices import Target
from tnp.dispatch.launcher import Bound
from tnp.ops._shared.blocks_8bit import Blocks
from tnp.ops._shared.e4m3 import BLOCK
from tnp.ops._shared.primitives import dot

TILE = 128
_BLOCK = tl.constexpr(BLOCK)

Gradient = Callable[[Blocks, Blocks], Tensor]


@triton.jit
def _load_panel(ptr, block, columns, positions, n_columns):
    at = (block * n_columns + columns.to(tl.int64))[:, None] * _BLOCK + positions[None, :]
    return tl.load(ptr + at, mask=(columns < n_columns)[:, None], other=0.0)


@triton.jit(do_not_specialize=["n_rows", "n_shares"])
def _gradient_8bit_kernel(
    a_ptr, b_ptr, a_scale_ptr, b_scale_ptr, part_ptr, n_rows, n_a, n_b, n_shares,
    TILE: tl.constexpr,
):  # fmt: skip
    """Writes a share's sum of one tile to part [shares, n_a, n_b]."""
    positions = tl.arange(0, _BLOCK)
    columns = tl.cdiv(n_b, TILE)
    rows_a = tl.program_id(0) // columns * TILE + tl.arange(0, TILE)
    rows_b = tl.program_id(0) % columns * TILE + tl.arange(0, TILE)
    share = tl.program_id(1)
    n_blocks = tl.cdiv(n_rows, _BLOCK)
    acc = tl.zeros([TILE, TILE], tl.float32)
    for block in tl.range(share * n_blocks // n_shares, (share + 1) * n_blocks // n_shares):
        a = _load_panel(a_ptr, block, rows_a, positions, n_a)
        b = _load_panel(b_ptr, block, rows_b, positions, n_b)
        scale = tl.load(a_scale_ptr + block * _BLOCK) * tl.load(b_scale_ptr + block * _BLOCK)
        acc += dot(a, tl.trans(b)) * scale
    at = (share * n_a + rows_a)[:, None] * n_b + rows_b[None, :]
    tl.store(part_ptr + at, acc, mask=(rows_a < n_a)[:, None] & (rows_b < n_b)[None, :])


def shares_of(target: Target, n_rows: int, n_a: int, n_b: int) -> int:
    """Returns among how many programs the rows of each tile are divided."""
    tiles = triton.cdiv(n_a, TILE) * triton.cdiv(n_b, TILE)
    return max(1, min(target.multiprocessors // tiles, triton.cdiv(n_rows, BLOCK)))


def gradient(target: Target, n_rows: int, n_a: int, n_b: int) -> Gradient:
    """Returns a function that computes Σ_t a_t b_tᵀ, float32 [n_a, n_b].

    Call it with blocks a [n_rows, n_a] and b [n_rows, n_b], which have panels.
    """
    shares = shares_of(target, n_rows, n_a, n_b)
    tiles = triton.cdiv(n_a, TILE) * triton.cdiv(n_b, TILE)
    kernel = Bound(
        _gradient_8bit_kernel, (tiles, shares), n_rows, n_a, n_b, shares,
        TILE=TILE, num_warps=8, num_stages=3,
    )  # fmt: skip
    return summed(kernel, (shares, n_a, n_b))


def summed(kernel: Bound, shape: tuple[int, int, int]) -> Gradient:
    """Returns a function that launches the kernel and adds up the shares [shares, n_a, n_b]."""

    def run(a: Blocks, b: Blocks) -> Tensor:
        part = a.scale.new_empty(shape)
        kernel(a.panels, b.panels, a.scale, b.scale, part)
        return part[0] if shape[0] == 1 else part.sum(0)

    return run
