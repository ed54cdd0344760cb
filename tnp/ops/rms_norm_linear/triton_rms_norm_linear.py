"""Computes RMSNorm and a linear layer in one launch.

A program has BLOCK_N outputs of BLOCK_M rows. Every program of a tile of rows reads whole rows,
twice if they are wider than BLOCK_D, and computes their norm. One of these programs writes the sum.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tnp.dispatch.launcher import Bound
from tnp.dispatch.spec import Call, Kernel
from tnp.ops._shared.casting import cast_weight
from tnp.ops._shared.few_rows import FEW, add_dot_in_parts, chained, follow, prefetch_rows
from tnp.ops._shared.primitives import KernelConfig, cast
from tnp.ops._shared.rows import load_rows, row_layout, row_offsets
from tnp.ops._shared.triton_matmul import load_tile, silu, store_tile
from tnp.ops.rms_norm_linear import supports_many


@dataclass(frozen=True)
class Config(KernelConfig):
    """Sets rows and outputs of a tile, columns at a time, and the parts of a product."""

    block_m: int
    block_n: int
    block_d: int
    parts: int
    num_warps: int


# Configurations by bytes per element. Up to `FEW` rows of float32 have one of their own.
FEW_ROWS = Config(16, 16, 128, 4, 4)
MANY_ROWS = {2: Config(32, 64, 256, 1, 8), 4: Config(16, 32, 64, 1, 4)}


@triton.jit
def _sum(x_ptr, update_ptr, of_x, of_update, offs_d, in_rows, dtype: tl.constexpr, D: tl.constexpr):
    mask = in_rows[:, None] & (offs_d < D)[None, :]
    x = load_rows(x_ptr, of_x[:, None] + offs_d[None, :], mask)
    return cast(x + load_rows(update_ptr, of_update[:, None] + offs_d[None, :], mask), dtype)


@triton.jit
def _squares(total):
    x = total.to(tl.float32)
    return tl.sum(x * x, 1)


@triton.jit
def _add_product(total, rstd, norm_weight, w, acc, dtype: tl.constexpr, PARTS: tl.constexpr):
    normalized = total.to(tl.float32) * rstd[:, None] * norm_weight[None, :]
    return add_dot_in_parts(cast(normalized, dtype), w, acc, PARTS)


@triton.jit(do_not_specialize=["n_rows"])
def _rms_norm_linear_kernel(
    x_ptr, update_ptr, norm_weight_ptr, weight_ptr, sum_ptr, y_ptr,
    stride_xb, stride_xl, stride_ub, stride_ul, n_rows, inner_x, inner_update, n_out, eps,
    D: tl.constexpr, SILU: tl.constexpr, CHAINED: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_rows = rows < n_rows
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    of_x = row_offsets(rows, inner_x, stride_xb, stride_xl)
    of_update = row_offsets(rows, inner_update, stride_ub, stride_ul)
    MASKED: tl.constexpr = D % BLOCK_D != 0
    writes = tl.program_id(1) == 0  # only this program of these rows writes the sum
    offs_d = tl.arange(0, BLOCK_D)
    if D <= BLOCK_D:
        prefetch_rows(weight_ptr, offs_n, n_out, D, BLOCK_D, CHAINED)
    follow(CHAINED)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if D <= BLOCK_D:
        # All loads are issued before the norm is known. The weight comes last, because it moves to
        # its place in the product as soon as it arrives.
        norm_weight = load_rows(norm_weight_ptr, offs_d, offs_d < D)
        total = _sum(x_ptr, update_ptr, of_x, of_update, offs_d, in_rows, dtype, D)
        w = load_tile(weight_ptr, offs_n, offs_d, n_out, D, D, True, MASKED)
        rstd = 1.0 / tl.sqrt_rn(_squares(total) / D + eps)
        acc = _add_product(total, rstd, norm_weight, w, acc, dtype, PARTS)
        if writes:
            store_tile(sum_ptr, total.to(tl.float32), rows, offs_d, n_rows, D, D)
    else:
        squares = tl.zeros([BLOCK_M], tl.float32)
        for start in tl.range(0, D, BLOCK_D):
            total = _sum(x_ptr, update_ptr, of_x, of_update, start + offs_d, in_rows, dtype, D)
            squares += _squares(total)
        rstd = 1.0 / tl.sqrt_rn(squares / D + eps)
        for start in tl.range(0, D, BLOCK_D):
            at = start + offs_d
            w = load_tile(weight_ptr, offs_n, at, n_out, D, D, True, MASKED)
            norm_weight = load_rows(norm_weight_ptr, at, at < D)
            total = _sum(x_ptr, update_ptr, of_x, of_update, at, in_rows, dtype, D)
            acc = _add_product(total, rstd, norm_weight, w, acc, dtype, PARTS)
            if writes:
                store_tile(sum_ptr, total.to(tl.float32), rows, at, n_rows, D, D)
    if SILU:
        acc = silu(acc, dtype)
    store_tile(y_ptr, acc, rows, offs_n, n_rows, n_out, n_out)


def configs(call: Call) -> tuple[Config, ...]:
    p = call.problem
    return (FEW_ROWS if p["rows"] <= FEW and p.itemsize == 4 else MANY_ROWS[p.itemsize],)


def empty(wanted: tuple[str, ...], inputs: tuple) -> tuple[tuple, tuple]:
    x, _update, _norm_weight, weight = inputs
    return (x.new_empty(x.shape), x.new_empty(*x.shape[:-1], len(weight))), ()


def prepare(call: Call, config: Config, inputs: tuple) -> Callable:
    x, update, _norm_weight, weight = inputs
    n_out, width = weight.shape
    of_x, of_update = row_layout(x), row_layout(update)
    rows, shape = x.numel() // width, (*x.shape[:-1], n_out)
    kernel = Bound(
        _rms_norm_linear_kernel,
        (triton.cdiv(rows, config.block_m), triton.cdiv(n_out, config.block_n)),
        *of_x.strides, *of_update.strides, rows, of_x.n_inner, of_update.n_inner, n_out,
        D=width, SILU=call.problem["silu"], **config.kernel_arguments(),
        **chained(call.target),
    )  # fmt: skip

    def launch(inputs, scalars):
        x, update, norm_weight, weight = inputs
        total, y = torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty(shape)
        weight = cast_weight(weight, x.dtype).contiguous()
        kernel(
            of_x.of(x), of_update.of(update), norm_weight.contiguous(), weight, total, y, *scalars
        )
        return (total, y), ()

    return launch


FORWARD = Kernel("triton", empty, prepare, supports_many, configs, options=("silu",))
