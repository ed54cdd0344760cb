"""Computes the mixture heads in portable Triton with the first product in 8 bits (e4m3).

A library multiplies x upᵀ in 8 bits. A kernel reads z, adds up the outputs, and writes z in 8 bits,
in units that are known beforehand. Another reads z and writes dz as rows and as panels, and partial
sums of ddown. Sums over three outputs are multiply-adds in float32.
"""

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from tnp.dispatch.devices import Target
from tnp.dispatch.launcher import Bound
from tnp.ops._shared.blocks_8bit import Blocks, panel_offsets, panels_shape, row_at
from tnp.ops._shared.e4m3 import BLOCK, LEAST
from tnp.ops._shared.primitives import cast, exponent, power, widened
from tnp.ops._shared.rows_8bit import InRows, row_product
from tnp.ops._shared.triton_matmul import load_tile, sigmoid, store_tile
from tnp.ops.mixture_heads import N_OUTPUTS
from tnp.ops.mixture_heads.eight_bit import DZ_FACTOR

ORDERED = False  # columns of rows lie in their own order
TILE_F = 64
MEASURED = 4096  # weights of down that a program measures together
_BLOCK, _LEAST = tl.constexpr(BLOCK), tl.constexpr(LEAST)

# (x, up, down) → out [T, K, 3] float32, and z in 8 bits; (z, its scale, dout, down) → dz and
# partial sums of ddown, [parts, K, 3, F].
Heads = Callable[[Blocks, InRows, Tensor], tuple[Tensor, Tensor | None]]
Dz = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Blocks, Tensor]]


@triton.jit(do_not_specialize=["n_rows"])
def _dout_kernel(
    dout_ptr, down_ptr, panels_ptr, scale_ptr, n_rows, n_heads, n_hidden, factor,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, MEASURED: tl.constexpr,
):  # fmt: skip
    """Writes dout of a block of 128 rows as panels [K, 3, 128], and the scale of dz.

    An infinity becomes NaN, because the scale would hide it.
    """
    largest = tl.zeros([MEASURED], tl.float32)
    for start in tl.range(0, n_heads * n_hidden, MEASURED):
        at = start + tl.arange(0, MEASURED)
        inside = at < n_heads * n_hidden
        at += at // n_hidden * (2 * n_hidden)
        squares = tl.zeros([MEASURED], tl.float32)
        for o in tl.static_range(3):
            w = tl.load(down_ptr + at + o * n_hidden, mask=inside, other=0.0)
            squares += w * w
        largest = tl.maximum(largest, tl.where(squares < float("inf"), squares, 0.0))
    of_down = tl.sqrt(tl.max(largest, 0))

    block = tl.program_id(0)
    positions = tl.arange(0, BLOCK)
    rows = block * BLOCK + row_at(positions)
    heads = tl.arange(0, HEADS)
    mask = (rows < n_rows)[:, None] & (heads < n_heads)[None, :]
    at = rows.to(tl.int64)[:, None] * (n_heads * 3) + heads[None, :] * 3
    # Without a common power of two, squares of a gradient could vanish.
    top = tl.zeros([BLOCK, HEADS], tl.float32)
    for o in tl.static_range(3):
        x = tl.abs(tl.load(dout_ptr + at + o, mask=mask, other=0.0))
        top = tl.maximum(top, tl.where(x < float("inf"), x, 0.0))
    e = exponent(tl.max(tl.max(top, 1), 0), _LEAST)
    squares = tl.zeros([BLOCK, HEADS], tl.float32)
    places = (block.to(tl.int64) * n_heads + heads)[None, :] * (3 * BLOCK) + positions[:, None]
    for o in tl.static_range(3):
        x = tl.load(dout_ptr + at + o, mask=mask, other=0.0)
        finite = tl.abs(x) < float("inf")
        in_units = tl.where(finite, x, 0.0) * power(-e)
        squares += in_units * in_units
        x = tl.where(finite, x, float("nan"))
        tl.store(panels_ptr + places + o * BLOCK, x, mask=(heads < n_heads)[None, :])
    norm = tl.sqrt(tl.max(tl.max(squares, 1), 0)) * power(e)
    scale = power(exponent(norm * (of_down * factor), _LEAST))
    tl.store(scale_ptr + rows, tl.zeros([BLOCK], tl.float32) + scale, mask=rows < n_rows)


@triton.jit(do_not_specialize=["n_rows"])
def _outputs_8bit_kernel(
    z_ptr, z8_ptr, down_ptr, out_ptr, scale_ptr, n_rows, n_heads, n_hidden,
    SAVES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Writes the outputs of a head for a tile of rows, and if SAVES also z in 8 bits."""
    head = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = rows < n_rows
    width = n_heads * n_hidden
    z_ptr += head * n_hidden
    z8_ptr += head * n_hidden
    down_ptr += head * 3 * n_hidden
    # The divisor is a power of two, so the quotient is exact.
    unit = 1.0 / tl.load(scale_ptr + rows, mask=inside, other=1.0)
    zero = tl.zeros([BLOCK_M], tl.float32)
    out0, out1, out2 = zero, zero, zero
    for start in tl.range(0, n_hidden, BLOCK_F):
        columns = start + tl.arange(0, BLOCK_F)
        z = load_tile(z_ptr, rows, columns, n_rows, n_hidden, width, True, True).to(tl.float32)
        if SAVES:
            store_tile(z8_ptr, z * unit[:, None], rows, columns, n_rows, n_hidden, width)
        h = z * sigmoid(z, tl.bfloat16)
        known = columns < n_hidden
        out0 += tl.sum(h * tl.load(down_ptr + columns, mask=known, other=0.0), 1)
        out1 += tl.sum(h * tl.load(down_ptr + n_hidden + columns, mask=known, other=0.0), 1)
        out2 += tl.sum(h * tl.load(down_ptr + 2 * n_hidden + columns, mask=known, other=0.0), 1)
    out_ptrs = out_ptr + (rows.to(tl.int64) * n_heads + head) * 3
    tl.store(out_ptrs, out0, mask=inside)
    tl.store(out_ptrs + 1, out1, mask=inside)
    tl.store(out_ptrs + 2, out2, mask=inside)


@triton.jit(do_not_specialize=["n_rows"])
def _dz_8bit_kernel(
    z_ptr, z_scale_ptr, dout_ptr, dz_scale_ptr, down_ptr, dz_ptr, panels_ptr, ddown_ptr,
    n_rows, n_heads, n_hidden, BLOCK: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Writes dz of a tile as rows and as panels, and the tile's part of ddown."""
    block, head = tl.program_id(1), tl.program_id(2)
    positions = tl.arange(0, BLOCK)
    rows = block * BLOCK + row_at(positions)
    columns = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
    known = columns < n_hidden
    width = n_heads * n_hidden
    z = load_tile(z_ptr + head * n_hidden, rows, columns, n_rows, n_hidden, width, True, True)
    z = widened(z) * tl.load(z_scale_ptr + block * BLOCK)
    s = sigmoid(z, tl.bfloat16)
    h = z * s
    dout_ptr += (block.to(tl.int64) * n_heads + head) * (3 * BLOCK)
    ddown_ptr += (block.to(tl.int64) * n_heads + head) * (3 * n_hidden)
    down_ptr += head * 3 * n_hidden
    dh = tl.zeros([BLOCK, BLOCK_F], tl.float32)
    for o in tl.static_range(3):
        dout = tl.load(dout_ptr + o * BLOCK + positions)[:, None]
        dh += dout * tl.load(down_ptr + o * n_hidden + columns, mask=known, other=0.0)[None, :]
        tl.store(ddown_ptr + o * n_hidden + columns, tl.sum(dout * h, 0), mask=known)
    dz = dh * (s + h * (1.0 - s)) * (1.0 / tl.load(dz_scale_ptr + block * BLOCK))
    store_tile(dz_ptr + head * n_hidden, dz, rows, columns, n_rows, n_hidden, width)
    places = panel_offsets(block, (head * n_hidden + columns)[:, None], positions[None, :], width)
    dz = cast(dz, panels_ptr.dtype.element_ty)
    tl.store(panels_ptr + places, tl.trans(dz), mask=known[:, None])


def dout_panels(
    n_rows: int, n_heads: int, width: int
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Returns a function from dout [T, K, 3] and down [K, 3, F], both float32 and contiguous.

    It returns dout as panels [blocks, K, 3, 128] float32, and the scale of each row of dz, [T].
    """
    blocks = triton.cdiv(n_rows, BLOCK)
    kernel = Bound(
        _dout_kernel, (blocks,), n_rows, n_heads, width, DZ_FACTOR,
        HEADS=triton.next_power_of_2(n_heads), BLOCK=BLOCK, MEASURED=MEASURED, num_warps=8,
    )  # fmt: skip
    shape = blocks, n_heads, N_OUTPUTS, BLOCK

    def run(dout: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
        panels, scale = dout.new_empty(shape), dout.new_empty(n_rows)
        kernel(dout, down, panels, scale)
        return panels, scale

    return run


def heads(target: Target, n_rows: int, n_heads: int, width: int, save: bool) -> Heads:
    """Returns the launches that compute the outputs of n_rows rows.

    Call them with blocks of x, whose `bound` holds the units of z, up [K · F, D], and down [K, 3,
    F], float32 and contiguous.

    Args:
        target: where they run.
        n_rows, n_heads, width: T, K and F.
        save: whether they return z.
    """
    block_m = 32
    kernel = Bound(
        _outputs_8bit_kernel, (triton.cdiv(n_rows, block_m), n_heads), n_rows, n_heads, width,
        SAVES=save, BLOCK_M=block_m, BLOCK_F=TILE_F, num_warps=4,
    )  # fmt: skip

    def run(x: Blocks, up: InRows, down: Tensor) -> tuple[Tensor, Tensor | None]:
        z = row_product(x.scale)(x.rows, x.scale, up)
        z8 = x.rows.new_empty(z.shape) if save else None
        out = x.scale.new_empty(n_rows, n_heads, N_OUTPUTS)
        kernel(z, z if z8 is None else z8, down, out, x.bound)
        return out, z8

    return run


def new_z_shape(n_rows: int, width: int) -> tuple[int, int]:
    """Returns the shape of saved rows."""
    return n_rows, width


def dz(n_rows: int, n_heads: int, width: int) -> Dz:
    """Returns the launches that compute dz and ddown of n_rows rows.

    Call them with z and the scale of its rows, dout [T, K, 3] and down [K, 3, F].
    """
    columns, blocks = n_heads * width, triton.cdiv(n_rows, BLOCK)
    prepare = dout_panels(n_rows, n_heads, width)
    kernel = Bound(
        _dz_8bit_kernel, (triton.cdiv(width, TILE_F), blocks, n_heads), n_rows, n_heads, width,
        BLOCK=BLOCK, BLOCK_F=TILE_F, num_warps=8,
    )  # fmt: skip
    of_panels = panels_shape(n_rows, columns)

    def run(z: Tensor, z_scale: Tensor, dout: Tensor, down: Tensor) -> tuple[Blocks, Tensor]:
        of_dout, scale = prepare(dout, down)
        rows, panels = z.new_empty(n_rows, columns), z.new_empty(of_panels)
        partials = scale.new_empty(blocks, n_heads, N_OUTPUTS, width)
        kernel(z, z_scale, of_dout, scale, down, rows, panels, partials)
        return Blocks(rows, scale, panels, scale), partials

    return run
