"""Computes matrix products with SiLU in the epilogue, in portable Triton.

    matmul_silu     z = x wᵀ, h = silu(z)             x [T, K], w [N, K], z and h [T, N]
    matmul_dsilu    dz = (dy w) ∘ silu'(z)            dy [T, K], w [K, N], z and dz [T, N]

    silu(z) = z·σ(z)        silu'(z) = σ(z) (1 + z (1 − σ(z)))        σ(z) = 1 / (1 + e^−z)

Products accumulate in float32, where SiLU is computed too; results are rounded once, to the
operands' dtype. A program owns a tile of the result; programs that run together share rows of the
left operand and of the weight in L2 (groups of row tiles, as in Triton's matmul tutorial).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tnp.dispatch.devices import Target
from tnp.dispatch.launcher import Bound
from tnp.ops._shared.operands import Rows, dense
from tnp.ops._shared.primitives import INTERPRETED, KernelConfig, add_dot, cast

# (x, w) → h and the saved z or slope; (dy, w, saved) → dz.
Silu = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]
DSilu = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

# Row tiles of a group. A group walks all columns before the next group starts.
GROUP_M = tl.constexpr(8)


@dataclass(frozen=True)
class MatmulConfig(KernelConfig):
    """Sets the tile of the result, and how much of the inner dimension is multiplied at a time."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


# The tiles by bytes per element. `tnp.gates.compile` checks that none spills. In 8 bits a tile of
# 128 columns would spill if the backward epilogue writes both results (sm_100a, triton 3.6).
CONFIGS = {
    1: MatmulConfig(128, 64, 64, 8, 3),
    2: MatmulConfig(128, 128, 64, 8, 3),
    4: MatmulConfig(64, 64, 32, 8, 2),
}


@triton.jit
def sigmoid(z, dtype: tl.constexpr):
    """Computes σ(z) in float32, accurate enough for results in `dtype`."""
    if INTERPRETED or dtype != tl.bfloat16:
        return 1.0 / (1.0 + tl.exp(-z))
    # tanh takes one special-function operation instead of two. Its error is at most 2⁻¹², an eighth
    # of bfloat16's.
    tanh = tl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [0.5 * z], dtype=tl.float32, is_pure=True, pack=1
    )
    return 0.5 * tanh + 0.5


@triton.jit
def silu(z, dtype: tl.constexpr):
    return z * sigmoid(z, dtype)


@triton.jit
def silu_derivative(z, dtype: tl.constexpr):
    s = sigmoid(z, dtype)
    return s * (1.0 + z * (1.0 - s))


@triton.jit
def load_tile(
    ptr, offs_row, offs_column, n_rows, n_columns, stride_row,
    ROWS_MASKED: tl.constexpr, COLUMNS_MASKED: tl.constexpr,
):  # fmt: skip
    """Loads a tile of a [n_rows, n_columns] matrix; elements past a masked end are 0."""
    # Offsets have 64 bits: 205,000 rows of 14,080 columns pass 2³¹.
    ptrs = ptr + offs_row.to(tl.int64)[:, None] * stride_row + offs_column[None, :]
    if ROWS_MASKED and COLUMNS_MASKED:
        mask = (offs_row[:, None] < n_rows) & (offs_column[None, :] < n_columns)
        return tl.load(ptrs, mask=mask, other=0.0)
    if ROWS_MASKED:
        return tl.load(ptrs, mask=offs_row[:, None] < n_rows, other=0.0)
    if COLUMNS_MASKED:
        return tl.load(ptrs, mask=offs_column[None, :] < n_columns, other=0.0)
    return tl.load(ptrs)


@triton.jit
def store_tile(ptr, tile, offs_row, offs_column, n_rows, n_columns, stride_row):
    ptrs = ptr + offs_row.to(tl.int64)[:, None] * stride_row + offs_column[None, :]
    mask = (offs_row[:, None] < n_rows) & (offs_column[None, :] < n_columns)
    tl.store(ptrs, cast(tile, ptr.dtype.element_ty), mask=mask)


@triton.jit
def offsets(n_rows, n_columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Returns rows and columns of the program's tile."""
    n_row_tiles = tl.cdiv(n_rows, BLOCK_M)
    n_group = GROUP_M * tl.cdiv(n_columns, BLOCK_N)
    first = tl.program_id(0) // n_group * GROUP_M
    group_size = tl.minimum(n_row_tiles - first, GROUP_M)
    within = tl.program_id(0) % n_group
    offs_m = (first + within % group_size) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = within // group_size * BLOCK_N + tl.arange(0, BLOCK_N)
    return offs_m, offs_n


@triton.jit
def product_tile(
    a_ptr, w_ptr, offs_m, offs_n, n_rows, n_columns, n_inner, stride_am, stride_w,
    W_IS_KN: tl.constexpr, K_MASKED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Computes rows offs_m and columns offs_n of a wᵀ, or of a w if w is [K, N], in float32."""
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start_k in tl.range(0, n_inner, BLOCK_K):
        offs_k = start_k + tl.arange(0, BLOCK_K)
        a = load_tile(a_ptr, offs_m, offs_k, n_rows, n_inner, stride_am, True, K_MASKED)
        if W_IS_KN:
            w = load_tile(w_ptr, offs_k, offs_n, n_inner, n_columns, stride_w, K_MASKED, True)
        else:
            w = load_tile(w_ptr, offs_n, offs_k, n_columns, n_inner, stride_w, True, K_MASKED)
            w = tl.trans(w)
        acc = add_dot(a, w, acc)
    return acc


@triton.jit(do_not_specialize=["n_rows"])
def _matmul_kernel(
    a_ptr, w_ptr, z_ptr, out_ptr, n_rows, n_columns, n_inner, stride_am, stride_w,
    EPILOGUE: tl.constexpr, W_IS_KN: tl.constexpr, K_MASKED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Multiplies x wᵀ.

    EPILOGUE "silu" writes h, "silu_and_z" writes h and z, "dsilu" reads z. z and out are
    contiguous.
    """
    offs_m, offs_n = offsets(n_rows, n_columns, BLOCK_M, BLOCK_N)
    acc = product_tile(
        a_ptr, w_ptr, offs_m, offs_n, n_rows, n_columns, n_inner, stride_am, stride_w,
        W_IS_KN, K_MASKED, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if EPILOGUE == "dsilu":
        z = load_tile(z_ptr, offs_m, offs_n, n_rows, n_columns, n_columns, True, True)
        out = acc * silu_derivative(z.to(tl.float32), dtype)
    else:
        out = silu(acc, dtype)
    store_tile(out_ptr, out, offs_m, offs_n, n_rows, n_columns, n_columns)
    if EPILOGUE == "silu_and_z":
        store_tile(z_ptr, acc, offs_m, offs_n, n_rows, n_columns, n_columns)


def _bound(
    rows: Rows, width: int, stride_w: int, itemsize: int, epilogue: str, w_is_kn: bool
) -> Bound:
    config = CONFIGS[itemsize]
    grid = (triton.cdiv(rows.n, config.block_m) * triton.cdiv(width, config.block_n),)
    return Bound(
        _matmul_kernel, grid, rows.n, width, rows.width, rows.stride, stride_w,
        EPILOGUE=epilogue, W_IS_KN=w_is_kn, K_MASKED=rows.width % config.block_k != 0,
        **config.kernel_arguments(),
    )  # fmt: skip


def matmul_silu(target: Target, rows: Rows, width: int, dtype: torch.dtype, save: bool) -> Silu:
    """Returns the launch that computes h = silu(x wᵀ), and if `save` z = x wᵀ, [T, N] in x's dtype.

    Call it with x, read as `rows` say, and w [N, K], contiguous in x's dtype.
    """
    epilogue = "silu_and_z" if save else "silu"
    kernel = _bound(rows, width, rows.width, dtype.itemsize, epilogue, w_is_kn=False)
    of_out = dense(rows.n, width)

    def run(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        h = x.new_empty_strided(*of_out)
        z = new_saved(x, of_out[0], dtype) if save else None
        kernel(x, w, h if z is None else z, h)
        return h, z

    return run


def matmul_dsilu(target: Target, rows: Rows, width: int, dtype: torch.dtype) -> DSilu:
    """Returns the launch that computes dz = (dy w) ∘ silu'(z), [T, N] in dy's dtype.

    Call it with dy, read as `rows` say, w [K, N], contiguous in dy's dtype, and z.
    """
    kernel = _bound(rows, width, width, dtype.itemsize, "dsilu", w_is_kn=True)
    of_out = dense(rows.n, width)

    def run(dy: torch.Tensor, w: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        dz = dy.new_empty_strided(*of_out)
        kernel(dy, w, z, dz)
        return dz

    return run


def new_saved(x: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Allocates z on x's device."""
    return x.new_empty_strided(shape, (shape[1], 1), dtype=dtype)
