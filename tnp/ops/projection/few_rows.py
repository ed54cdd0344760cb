"""Computes a linear layer of a few rows, for which a launch takes longer than reading the weight.

A program has BLOCK_N outputs of all rows. It reads all rows and its part of the weight at once, and
each of its warps multiplies a part of the inner dimension.
"""

from collections.abc import Callable
from dataclasses import dataclass

import triton
import triton.language as tl

from tnp.dispatch.launcher import Bound
from tnp.dispatch.spec import Call, Kernel, Reason, triton_from
from tnp.ops._shared.casting import cast_weight
from tnp.ops._shared.few_rows import (
    FEW,
    add_dot_in_parts,
    after_loads,
    chained,
    follow,
    prefetch_rows,
)
from tnp.ops._shared.primitives import KernelConfig
from tnp.ops._shared.rows import row_layout, row_offsets
from tnp.ops._shared.triton_matmul import load_tile, store_tile
from tnp.ops.projection.products import empty_linear

# The padded inner width that a program reads at once, and the smallest part of it that a warp
# takes. With up to 16 warps, drawing a target took a tenth longer than with 8 (H100).
MOST_WIDTH, WARP_WIDTH, MOST_WARPS = 2048, 128, 8
_triton = triton_from(80)


@dataclass(frozen=True)
class Config(KernelConfig):
    """Sets outputs of a program, and its warps, which share the inner dimension."""

    block_n: int
    num_warps: int


@triton.jit(do_not_specialize=["n_rows"])
def _few_rows_kernel(
    x_ptr, weight_ptr, y_ptr, stride_xb, stride_xl, n_rows, inner_x, n_out,
    K: tl.constexpr, CHAINED: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    rows, offs_k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    prefetch_rows(weight_ptr, offs_n, n_out, K, BLOCK_K, CHAINED)
    follow(CHAINED)
    of_x = row_offsets(rows, inner_x, stride_xb, stride_xl)
    mask = (rows < n_rows)[:, None] & (offs_k < K)[None, :]
    x = tl.load(x_ptr + of_x[:, None] + offs_k[None, :], mask=mask, other=0.0)
    w = load_tile(weight_ptr, offs_n, offs_k, n_out, K, K, True, K < BLOCK_K)
    acc = add_dot_in_parts(after_loads(x), w, tl.zeros([BLOCK_M, BLOCK_N], tl.float32), PARTS)
    store_tile(y_ptr, acc, rows, offs_n, n_rows, n_out, n_out)


def supported(call: Call) -> Reason:
    p = call.problem
    if p["rows"] > FEW:
        return f"it takes up to {FEW} rows, not {p['rows']}"
    if p["n_in"] > MOST_WIDTH:
        return f"it takes n_in up to {MOST_WIDTH}, not {p['n_in']}"
    if p.itemsize != 2:
        return f"it takes floats of 16 bits, not {p.dtype}"
    return _triton(call)


def _block_k(call: Call) -> int:
    return max(WARP_WIDTH, triton.next_power_of_2(call.problem["n_in"]))


def configs(call: Call) -> tuple[Config, ...]:
    return (Config(8, min(MOST_WARPS, _block_k(call) // WARP_WIDTH)),)


def prepare(call: Call, config: Config, inputs: tuple) -> Callable:
    x, weight = inputs
    n_out, n_in = weight.shape
    of_x, shape = row_layout(x), (*x.shape[:-1], n_out)
    kernel = Bound(
        _few_rows_kernel, (triton.cdiv(n_out, config.block_n),),
        *of_x.strides, call.problem["rows"], of_x.n_inner, n_out,
        K=n_in, BLOCK_M=FEW, BLOCK_K=_block_k(call), PARTS=config.num_warps,
        **config.kernel_arguments(), **chained(call.target),
    )  # fmt: skip

    def launch(inputs, scalars):
        x, weight = inputs
        y = x.new_empty(shape)
        kernel(of_x.of(x), cast_weight(weight, x.dtype).contiguous(), y)
        return (y,), ()

    return launch


LINEAR = Kernel("few_rows", empty_linear, prepare, supported, configs)
