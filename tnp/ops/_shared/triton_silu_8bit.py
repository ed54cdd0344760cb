"""Computes products of 8-bit operands (e4m3) with SiLU in the epilogue, in portable Triton.

    matmul_silu     z = x wᵀ, h = silu(z)             x [T, K], w [N, K], z and h [T, N]
    matmul_dsilu    dz = (dy wᵀ) ∘ silu'(z)           dy [T, K], w [N, K], z and dz [T, N]

Operands are rows with scales (`tnp.ops._shared.rows_8bit`). Results are rounded to 8 bits for the
next product, in units that are known beforehand, and to 16 bits for the gradients of the weights.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from tnp.dispatch.devices import Target
from tnp.dispatch.launcher import Bound
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

# (x, w) → h in 8 bits, h, and the saved z or slope; (dy, w, saved) → dz in 8 bits, dz.
Silu = Callable[[InRows, InRows], tuple[Tensor, Tensor | None, Tensor | None]]
DSilu = Callable[[InRows, InRows, Tensor], tuple[Tensor | None, Tensor | None]]


@triton.jit(do_not_specialize=["n_rows"])
def _matmul_8bit_kernel(
    a_ptr, w_ptr, z_ptr, out_ptr, out8_ptr, a_scale_ptr, w_scale_ptr, out_scale_ptr,
    n_rows, n_columns, n_inner,
    EPILOGUE: tl.constexpr, IN_16: tl.constexpr, IN_8: tl.constexpr, K_MASKED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Multiplies x wᵀ. EPILOGUE "silu" writes h, and with IN_16 also z; "dsilu" reads z.

    With IN_16 it writes the result to `out`, with IN_8 to `out8`. All are contiguous, and z is in
    out's dtype.
    """
    offs_m, offs_n = offsets(n_rows, n_columns, BLOCK_M, BLOCK_N)
    acc = product_tile(
        a_ptr, w_ptr, offs_m, offs_n, n_rows, n_columns, n_inner, n_inner, n_inner,
        False, K_MASKED, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    of_rows = tl.load(a_scale_ptr + offs_m, mask=offs_m < n_rows, other=0.0)
    of_columns = tl.load(w_scale_ptr + offs_n, mask=offs_n < n_columns, other=0.0)
    if EPILOGUE == "dsilu":
        z = load_tile(z_ptr, offs_m, offs_n, n_rows, n_columns, n_columns, True, True)
        out = acc * silu_derivative(z.to(tl.float32), tl.bfloat16)
        out = out * of_rows[:, None] * of_columns[None, :]
    else:
        acc = acc * of_rows[:, None] * of_columns[None, :]
        out = silu(acc, tl.bfloat16)
        if IN_16:
            store_tile(z_ptr, acc, offs_m, offs_n, n_rows, n_columns, n_columns)
    if IN_16:
        store_tile(out_ptr, out, offs_m, offs_n, n_rows, n_columns, n_columns)
    if IN_8:
        # The divisor is a power of two, so the quotient is exact.
        units = 1.0 / tl.load(out_scale_ptr + offs_m, mask=offs_m < n_rows, other=1.0)
        out *= units[:, None]
        store_tile(out8_ptr, out, offs_m, offs_n, n_rows, n_columns, n_columns)


def _bound(shape: tuple[int, int], inner: int, epilogue: str, in_16: bool, in_8: bool) -> Bound:
    config, (n_rows, width) = CONFIGS[E4M3.itemsize], shape
    grid = (triton.cdiv(n_rows, config.block_m) * triton.cdiv(width, config.block_n),)
    return Bound(
        _matmul_8bit_kernel, grid, n_rows, width, inner,
        EPILOGUE=epilogue, IN_16=in_16, IN_8=in_8, K_MASKED=inner % config.block_k != 0,
        **config.kernel_arguments(),
    )  # fmt: skip


def matmul_silu(
    target: Target, shape: tuple[int, int], inner: int, dtype: torch.dtype, save: bool
) -> Silu:
    """Returns the launch that computes h = silu(x wᵀ) of this shape, in 8 bits, and if `save` also
    h and z in `dtype`.

    Call it with x [T, inner], whose `bound` holds the units of h, and w [N, inner].
    """
    kernel = _bound(shape, inner, "silu", save, True)

    def run(x: InRows, w: InRows) -> tuple[Tensor, Tensor | None, Tensor | None]:
        h8 = x.x.new_empty(shape)
        h = x.x.new_empty(shape, dtype=dtype) if save else None
        z = new_saved(x.x, shape, dtype) if save else None
        of_h = (z, h) if save else (h8, h8)
        kernel(x.x, w.x, *of_h, h8, x.scale, w.scale, x.bound)
        return h8, h, z

    return run


def matmul_dsilu(
    target: Target, shape: tuple[int, int], inner: int, dtype: torch.dtype, in_16: bool, in_8: bool
) -> DSilu:
    """Returns the launch that computes dz = (dy wᵀ) ∘ silu'(z) of this shape, in 8 bits, in
    `dtype`, or both.

    Call it with dy [T, inner], whose `bound` holds the units of dz, w [N, inner], and z.
    """
    kernel = _bound(shape, inner, "dsilu", in_16, in_8)

    def run(dy: InRows, w: InRows, z: Tensor) -> tuple[Tensor | None, Tensor | None]:
        dz8 = dy.x.new_empty(shape) if in_8 else None
        dz = dy.x.new_empty(shape, dtype=dtype) if in_16 else None
        written = (dz8 if dz is None else dz), (dz if dz8 is None else dz8)
        kernel(dy.x, w.x, z, *written, dy.scale, w.scale, dy.bound)
        return dz8, dz

    return run
