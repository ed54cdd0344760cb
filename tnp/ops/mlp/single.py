"""Computes the feed-forward layer in one kernel; the hidden rows never reach memory.

    y = Σ_f silu(x up_fᵀ) down_fᵀ        over blocks f of the hidden width

A program owns a tile of rows, keeps it on chip together with the [rows, D] sum, and streams both
weights once. Every tile of rows reads all of both weights (2.9 MB at D = 512, F = 1408), so this
form serves few rows. Products and sums are float32; the hidden tile is rounded to x's dtype for the
second matmul. Nothing is saved. The backward pass is the one of `composed` that computes z and h
again.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from tnp.dispatch.launcher import Bound
from tnp.dispatch.spec import Kernel
from tnp.ops._shared.operands import hidden_width, rows_of, weights
from tnp.ops._shared.primitives import KernelConfig, add_dot, cast, dot
from tnp.ops._shared.triton_matmul import load_tile, product_tile, silu, store_tile
from tnp.ops.mlp import MAX_D
from tnp.ops.mlp.composed import empty_again


@dataclass(frozen=True)
class SingleConfig(KernelConfig):
    """Sets the rows a program owns, and how much of F and of D it multiplies at a time."""

    block_m: int
    block_f: int
    block_k: int
    num_warps: int
    num_stages: int


# The configurations by bytes per element, for few rows and for many rows. `tnp.gates.compile`
# checks that none spills. If BLOCK_K is at least D, a program keeps its rows of x on chip; in
# float32 they would not fit the registers.
CONFIGS = {
    2: (SingleConfig(32, 32, MAX_D, 8, 2), SingleConfig(64, 32, MAX_D, 8, 2)),
    4: (SingleConfig(16, 16, 32, 8, 1), SingleConfig(16, 16, 32, 8, 1)),
}


@triton.jit(do_not_specialize=["n_rows"])
def _mlp_kernel(
    x_ptr, up_ptr, down_ptr, y_ptr, n_rows, n_hidden, stride_xm,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, D)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    if BLOCK_K >= D:
        x = load_tile(x_ptr, offs_m, offs_d, n_rows, D, stride_xm, True, False)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    for start_f in tl.range(0, n_hidden, BLOCK_F):
        offs_f = start_f + tl.arange(0, BLOCK_F)
        if BLOCK_K >= D:
            up = load_tile(up_ptr, offs_f, offs_d, n_hidden, D, D, True, False)
            z = dot(x, tl.trans(up))
        else:
            z = product_tile(
                x_ptr, up_ptr, offs_m, offs_f, n_rows, n_hidden, D, stride_xm, D,
                False, False, BLOCK_M, BLOCK_F, BLOCK_K,
            )  # fmt: skip
        down = load_tile(down_ptr, offs_d, offs_f, D, n_hidden, n_hidden, False, True)
        acc = add_dot(cast(silu(z, dtype), dtype), tl.trans(down), acc)
    store_tile(y_ptr, acc, offs_m, offs_d, n_rows, D, D)


def configs(call):
    """Returns the candidates; first the one for many rows if it fills the GPU."""
    few, many = CONFIGS[call.problem.itemsize]
    are_many = call.problem["rows"] >= many.block_m * call.target.multiprocessors
    return tuple(dict.fromkeys((many, few) if are_many else (few, many)))


def prepare(call, config, inputs):
    x, up, down = inputs
    shape, d = x.shape, x.shape[-1]
    rows, cast = rows_of(x), weights(up, down, x.dtype)
    kernel = Bound(
        _mlp_kernel, (triton.cdiv(rows.n, config.block_m),), rows.n, hidden_width(up.shape[0]),
        rows.stride, D=d, **config.kernel_arguments(),
    )  # fmt: skip
    read = rows.pointed

    def launch(inputs, scalars):
        x, up, down = inputs
        up, down = cast(up, down)
        y = x.new_empty(shape)
        kernel(read(x), up, down, y)
        return (y,), ()

    return launch


FORWARD = Kernel("triton", empty_again, prepare, configs=configs, saves="again")
