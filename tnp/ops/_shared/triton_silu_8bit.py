"""Computes products of 8-bit operands (e4m3) with SiLU in the epilogue, in portable Triton.

    matmul_silu     z = x wᵀ, h = silu(z)             x [T, K], w [N, K], z and h [T, N]
    matmul_dsilu    dz = (dy wᵀ) ∘ silu'(z)           dy [T, K], w [N, K], z and dz [T, N]

x and dy are blocks (`tnp.ops._shared.blocks_8bit`), w has a scale for each row
(`tnp.ops._shared.rows_8bit`). h and dz are rounded to 8 bits in units that are known beforehand: as
rows for the next product, and as panels for the gradient of a weight. z is saved in bfloat16.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from tnp.dispatch.devices import Target
from tnp.dispatch.launcher import Bound
from tnp.ops._shared.blocks_8bit import (
    Blocks,
    panel_offsets,
    panels_shape,
    row_at,
)
from tnp.ops._shared.e4m3 import BLOCK
from tnp.ops._shared.primitives import cast
from tnp.ops._shared.rows_8bit import E4M3, InRows
from tnp.ops._shared.triton_matmul import (
    CONFIGS,
    load_tile,
    new_saved,
    offsets,
    product_tile,
    silu,
    silu_derivative,
    store_tile,
)

ORDERED = False  # columns of rows lie in their own order
_BLOCK = tl.constexpr(BLOCK)

# (x, w) → rows of h, panels of h, and the saved z or slope; (dy, w, saved) → rows and panels of dz.
Silu = Callable[[Blocks, InRows], tuple[Tensor | None, Tensor | None, Tensor | None]]
DSilu = Callable[[Blocks, InRows, Tensor], tuple[Tensor | None, Tensor | None]]


@triton.jit(do_not_specialize=["n_rows"])
def _matmul_8bit_kernel(
    a_ptr, w_ptr, z_ptr, out_ptr, panels_ptr, a_scale_ptr, w_scale_ptr, out_scale_ptr,
    n_rows, n_columns, n_inner,
    EPILOGUE: tl.constexpr, HAS_ROWS: tl.constexpr, HAS_PANELS: tl.constexpr,
    K_MASKED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Multiplies x wᵀ. EPILOGUE "silu" writes h, and with HAS_PANELS also z; "dsilu" reads z.

    With HAS_ROWS it writes the result to `out`, with HAS_PANELS to `panels`.
    """
    offs_m, offs_n = offsets(n_rows, n_columns, BLOCK_M, BLOCK_N)
    # Rows go in the order of a panel's line.
    block = offs_m // _BLOCK
    positions = offs_m % _BLOCK
    offs_m = block * _BLOCK + row_at(positions)
    acc = product_tile(
        a_ptr, w_ptr, offs_m, offs_n, n_rows, n_columns, n_inner, n_inner, n_inner,
        False, K_MASKED, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    inside = offs_m < n_rows
    of_rows = tl.load(a_scale_ptr + offs_m, mask=inside, other=0.0)
    of_columns = tl.load(w_scale_ptr + offs_n, mask=offs_n < n_columns, other=0.0)
    if EPILOGUE == "dsilu":
        z = load_tile(z_ptr, offs_m, offs_n, n_rows, n_columns, n_columns, True, True)
        out = acc * silu_derivative(z.to(tl.float32), tl.bfloat16)
        out = out * of_rows[:, None] * of_columns[None, :]
    else:
        acc = acc * of_rows[:, None] * of_columns[None, :]
        out = silu(acc, tl.bfloat16)
        if HAS_PANELS:
            store_tile(z_ptr, acc, offs_m, offs_n, n_rows, n_columns, n_columns)
    # The divisor is a power of two, so the quotient is exact.
    out *= (1.0 / tl.load(out_scale_ptr + offs_m, mask=inside, other=1.0))[:, None]
    if HAS_ROWS:
        store_tile(out_ptr, out, offs_m, offs_n, n_rows, n_columns, n_columns)
    if HAS_PANELS:
        out = cast(tl.where(inside[:, None], out, 0.0), panels_ptr.dtype.element_ty)
        places = panel_offsets(block[None, :], offs_n[:, None], positions[None, :], n_columns)
        tl.store(panels_ptr + places, tl.trans(out), mask=(offs_n < n_columns)[:, None])


def _bound(shape: tuple[int, int], inner: int, epilogue: str, rows: bool, panels: bool) -> Bound:
    config, (n_rows, width) = CONFIGS[E4M3.itemsize], shape
    assert config.block_m == BLOCK, "a tile has the rows of a panel"
    grid = (triton.cdiv(n_rows, config.block_m) * triton.cdiv(width, config.block_n),)
    return Bound(
        _matmul_8bit_kernel, grid, n_rows, width, inner,
        EPILOGUE=epilogue, HAS_ROWS=rows, HAS_PANELS=panels,
        K_MASKED=inner % config.block_k != 0, **config.kernel_arguments(),
    )  # fmt: skip


def matmul_silu(target: Target, shape: tuple[int, int], inner: int, rows: bool, save: bool) -> Silu:
    """Returns the launch that computes h = silu(x wᵀ) of this shape, in 8 bits.

    Call it with x [T, inner], whose `bound` holds the units of h, and w [N, inner].

    Args:
        target: where it runs.
        shape: [T, N].
        inner: the summed width.
        rows: whether it returns rows of h.
        save: whether it returns panels of h, and z.
    """
    kernel = _bound(shape, inner, "silu", rows, save)
    of_panels = panels_shape(*shape)

    def run(x: Blocks, w: InRows) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        h8 = x.rows.new_empty(shape) if rows else None
        panels = x.rows.new_empty(of_panels) if save else None
        z = new_saved(x.rows, shape, torch.bfloat16) if save else None
        of_rows = x.rows if h8 is None else h8
        saved = (z, of_rows, panels) if save else (of_rows, of_rows, of_rows)
        kernel(x.rows, w.x, *saved, x.scale, w.scale, x.bound)
        return h8, panels, z

    return run


def matmul_dsilu(
    target: Target, shape: tuple[int, int], inner: int, rows: bool, panels: bool
) -> DSilu:
    """Returns the launch that computes dz = (dy wᵀ) ∘ silu'(z) of this shape, in 8 bits.

    Call it with dy [T, inner], whose `bound` holds the units of dz, w [N, inner], and z. It returns
    rows of dz if `rows`, and panels if `panels`.
    """
    kernel = _bound(shape, inner, "dsilu", rows, panels)
    of_panels = panels_shape(*shape)

    def run(dy: Blocks, w: InRows, z: Tensor) -> tuple[Tensor | None, Tensor | None]:
        dz8 = dy.rows.new_empty(shape) if rows else None
        of_columns = dy.rows.new_empty(of_panels) if panels else None
        written = dy.rows if dz8 is None else dz8
        kernel(dy.rows, w.x, z, written, written if of_columns is None else of_columns,
               dy.scale, w.scale, dy.bound)  # fmt: skip
        return dz8, of_columns

    return run
