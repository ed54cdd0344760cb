"""Computes silu(gate) ∘ up in one pass over memory, and both gradients in another, in float32.

With s = 1 / (1 + e^−gate):

    y = gate·s·up    dgate = dy·up·s·(1 + gate·(1 − s))    dup = dy·gate·s

A program takes a tile of rows and columns. Tensors without gaps are one row of all elements.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from tnp.dispatch.launcher import Bound
from tnp.dispatch.spec import Kernel
from tnp.ops._shared.primitives import KernelConfig, cast
from tnp.ops._shared.rows import row_offsets
from tnp.ops._shared.walks import walk


@dataclass(frozen=True)
class Config(KernelConfig):
    """Sets the elements of a tile."""

    block: int
    num_warps: int


# Eight elements a thread are 16 bytes in 16 bits.
CONFIGS = (Config(1024, 4), Config(512, 2), Config(2048, 4), Config(2048, 8), Config(4096, 8))


@triton.jit
def _tile(n_rows, width, n_tiles, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Returns rows, 64-bit columns and mask of this program's tile, one of `n_tiles` a row."""
    rows = tl.program_id(0) // n_tiles * ROWS + tl.arange(0, ROWS)
    columns = (tl.program_id(0) % n_tiles).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    return rows, columns[None, :], (rows < n_rows)[:, None] & (columns < width)[None, :]


@triton.jit
def _swiglu_fwd_kernel(
    gate_ptr, up_ptr, y_ptr,
    n_rows, width, n_tiles, n_inner,
    stride_go, stride_gi, stride_uo, stride_ui,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    rows, columns, mask = _tile(n_rows, width, n_tiles, ROWS, COLUMNS)
    offs_g = row_offsets(rows, n_inner, stride_go, stride_gi)[:, None] + columns
    offs_u = row_offsets(rows, n_inner, stride_uo, stride_ui)[:, None] + columns
    gate = tl.load(gate_ptr + offs_g, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + offs_u, mask=mask, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    offs_y = rows.to(tl.int64)[:, None] * width + columns
    tl.store(y_ptr + offs_y, cast(y, y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _swiglu_bwd_kernel(
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr,
    n_rows, width, n_tiles, n_inner,
    stride_yo, stride_yi, stride_go, stride_gi, stride_uo, stride_ui,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WITH_GATE: tl.constexpr, WITH_UP: tl.constexpr,
):  # fmt: skip
    rows, columns, mask = _tile(n_rows, width, n_tiles, ROWS, COLUMNS)
    offs_y = row_offsets(rows, n_inner, stride_yo, stride_yi)[:, None] + columns
    offs_g = row_offsets(rows, n_inner, stride_go, stride_gi)[:, None] + columns
    offs_out = rows.to(tl.int64)[:, None] * width + columns
    dy = tl.load(dy_ptr + offs_y, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + offs_g, mask=mask, other=0.0).to(tl.float32)
    s = tl.sigmoid(gate)
    if WITH_GATE:
        offs_u = row_offsets(rows, n_inner, stride_uo, stride_ui)[:, None] + columns
        up = tl.load(up_ptr + offs_u, mask=mask, other=0.0).to(tl.float32)
        dgate = dy * up * (s + gate * s * (1.0 - s))
        tl.store(dgate_ptr + offs_out, cast(dgate, dgate_ptr.dtype.element_ty), mask=mask)
    if WITH_UP:
        dup = dy * (gate * s)
        tl.store(dup_ptr + offs_out, cast(dup, dup_ptr.dtype.element_ty), mask=mask)


def configs(call):
    return CONFIGS


def _bound(kernel, config, walked, **constexprs) -> Bound:
    n_rows, width = walked.n_rows, walked.width
    if walked.flat:
        n_rows, width = 1, n_rows * width
    columns = min(config.block, triton.next_power_of_2(width))
    rows = min(config.block // columns, triton.next_power_of_2(n_rows))
    n_tiles = triton.cdiv(width, columns)
    grid = (triton.cdiv(n_rows, rows) * n_tiles,)
    integers = n_rows, width, n_tiles, *walked.integers
    sizes = {"ROWS": rows, "COLUMNS": columns, "num_warps": config.num_warps}
    return Bound(kernel, grid, *integers, **constexprs, **sizes)


def empty(wanted, inputs):
    gate, _up = inputs
    return (gate.new_empty(gate.shape),), ()


def prepare(call, config, inputs):
    walked = walk(*inputs)
    kernel = _bound(_swiglu_fwd_kernel, config, walked)

    def launch(inputs, scalars):
        gate, up = walked.laid_out(inputs)
        y = gate.new_empty(gate.shape)
        kernel(gate, up, y)
        return (y,), ()

    return launch


def empty_backward(wanted, inputs):
    _gradients, kept, _saved = inputs
    named = zip(("gate", "up"), kept, strict=True)
    return tuple(x.new_empty(x.shape) if name in wanted else None for name, x in named)


def prepare_backward(call, config, inputs):
    (dy,), (gate, up), _saved = inputs
    walked = walk(dy, gate, up)
    with_gate, with_up = "gate" in call.wanted, "up" in call.wanted
    kernel = _bound(_swiglu_bwd_kernel, config, walked, WITH_GATE=with_gate, WITH_UP=with_up)

    def launch(inputs, scalars):
        (dy,), (gate, up), _saved = inputs
        dgate = gate.new_empty(gate.shape) if with_gate else None
        dup = up.new_empty(up.shape) if with_up else None
        read = walked.laid_out((dy, gate, up))
        kernel(*read, dgate if with_gate else dup, dup if with_up else dgate)
        return dgate, dup

    return launch


FORWARD = Kernel("triton", empty, prepare, configs=configs)
BACKWARD = Kernel("triton", empty_backward, prepare_backward, configs=configs)
