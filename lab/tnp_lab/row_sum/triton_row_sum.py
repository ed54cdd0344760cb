"""Computes sums over the last dimension in Triton.

A program has a tile: several short rows, or one row block after block. Each place of the tile has
its own sum, so that one reduction at the end is enough.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tnp.dispatch.launcher import Bound
from tnp.dispatch.spec import Kernel
from tnp.ops._shared.primitives import KernelConfig
from tnp.ops._shared.rows import load_rows, row_layout, row_offsets

# Numbers of a tile, and warps. A thread makes two to four loads of 16 bytes of 16-bit numbers.
TILES = ((8192, 8), (4096, 4), (2048, 4))
NARROW = 1024  # rows up to here, padded, share a program of the smallest tile


@dataclass(frozen=True)
class Config(KernelConfig):
    """Holds columns, rows and warps of a tile."""

    block: int
    rows: int
    num_warps: int


def configs(call):
    """Returns candidates, the default first."""
    width = triton.next_power_of_2(call.problem["width"])
    found = tuple(Config(min(n, width), max(1, n // width), warps) for n, warps in TILES)
    return found[::-1] if width <= NARROW else found


@triton.jit(do_not_specialize=["n_rows", "n_inner"])
def _row_sum_kernel(
    x_ptr, y_ptr, stride_xb, stride_xl, n, n_rows, n_inner, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    x_ptrs = x_ptr + row_offsets(rows, n_inner, stride_xb, stride_xl)[:, None]
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        mask = (rows < n_rows)[:, None] & (offs < n)[None, :]
        total += load_rows(x_ptrs, offs[None, :], mask)
    tl.store(y_ptr + rows, tl.sum(total, 1), mask=rows < n_rows)


def empty(wanted, inputs):
    (x,) = inputs
    return (x.new_empty(x.shape[:-1], dtype=torch.float32),), ()


def prepare(call, config, inputs):
    x_rows, n_rows = row_layout(inputs[0]), call.problem["rows"]
    kernel = Bound(
        _row_sum_kernel, (triton.cdiv(n_rows, config.rows),), *x_rows.strides,
        call.problem["width"], n_rows, x_rows.n_inner, **config.kernel_arguments(),
    )  # fmt: skip

    def launch(inputs, scalars):
        (x,) = inputs
        (y,), saved = empty((), inputs)
        kernel(x_rows.of(x), y)
        return (y,), saved

    return launch


FORWARD = Kernel("triton", empty, prepare, configs=configs)
