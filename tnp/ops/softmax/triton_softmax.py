"""Computes softmax over the last dimension in Triton, in float32.

    y = e^(x − m) / Σ e^(x − m),  m = max x        dx = y·(dy − Σ dy·y)

A program holds whole rows, each read once and written once. It reads wider rows twice, in blocks.
The forward pass then keeps a running maximum and sum, and rescales the sum when the maximum grows.
(Milakov and Gimelshein, Online normalizer calculation for softmax, arXiv 1805.02867.)
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from tnp.dispatch.launcher import Bound
from tnp.dispatch.spec import Kernel
from tnp.ops._shared.norms import forward_configs
from tnp.ops._shared.primitives import KernelConfig, cast
from tnp.ops._shared.rows import load_rows, row_layout, row_offsets

# The largest padded widths of rows that lie in registers.
MAX_HELD = 16384


@dataclass(frozen=True)
class BlockConfig(KernelConfig):
    """Sets the columns of a block of a wide row."""

    block: int
    num_warps: int


BLOCKS = (BlockConfig(8192, 16), BlockConfig(4096, 8), BlockConfig(16384, 16))


@triton.jit(do_not_specialize=["n_rows", "n_inner"])
def _softmax_fwd_kernel(
    x_ptr, y_ptr, stride_xb, stride_xl, n, n_rows, n_inner,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    offs_n = tl.arange(0, BLOCK)
    mask = (rows < n_rows)[:, None] & (offs_n < n)[None, :]
    offs_x = row_offsets(rows, n_inner, stride_xb, stride_xl)[:, None] + offs_n[None, :]
    x = tl.load(x_ptr + offs_x, mask=mask, other=-float("inf")).to(tl.float32)
    # Rows that do not exist must compute neither −∞ − −∞ nor 1 / 0.
    top = tl.where(rows < n_rows, tl.max(x, 1), 0.0)
    e = tl.exp(x - top[:, None])
    y = e * (1.0 / tl.where(rows < n_rows, tl.sum(e, 1), 1.0))[:, None]
    offs_y = rows.to(tl.int64)[:, None] * n + offs_n[None, :]
    tl.store(y_ptr + offs_y, cast(y, y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_rows", "n_inner"])
def _softmax_bwd_kernel(
    dy_ptr, y_ptr, dx_ptr, stride_gb, stride_gl, stride_yb, stride_yl, n, n_rows, n_inner,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    offs_n = tl.arange(0, BLOCK)
    mask = (rows < n_rows)[:, None] & (offs_n < n)[None, :]
    offs_g = row_offsets(rows, n_inner, stride_gb, stride_gl)[:, None] + offs_n[None, :]
    offs_y = row_offsets(rows, n_inner, stride_yb, stride_yl)[:, None] + offs_n[None, :]
    dy = load_rows(dy_ptr, offs_g, mask)
    y = load_rows(y_ptr, offs_y, mask)
    dx = y * (dy - tl.sum(dy * y, 1)[:, None])
    offs_x = rows.to(tl.int64)[:, None] * n + offs_n[None, :]
    tl.store(dx_ptr + offs_x, cast(dx, dx_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_inner"])
def _softmax_online_fwd_kernel(x_ptr, y_ptr, stride_xb, stride_xl, n, n_inner, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    x_ptr += row_offsets(row, n_inner, stride_xb, stride_xl)
    y_ptr += row.to(tl.int64) * n
    # Each lane of the block has its own maximum and sum, so there is one reduction at the end.
    largest = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + offs, mask=offs < n, other=-float("inf")).to(tl.float32)
        larger = tl.maximum(largest, x)
        # A lane that has seen only −∞ has nothing to rescale: −∞ − 0, not −∞ + ∞.
        base = tl.where(larger == -float("inf"), 0.0, larger)
        total = total * tl.exp(largest - base) + tl.exp(x - base)
        largest = larger
    top = tl.max(largest)
    base = tl.where(largest == -float("inf"), 0.0, top)
    scale = 1.0 / tl.sum(total * tl.exp(largest - base))
    for start in range(0, n, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + offs, mask=offs < n, other=-float("inf")).to(tl.float32)
        y = tl.exp(x - top) * scale
        tl.store(y_ptr + offs, cast(y, y_ptr.dtype.element_ty), mask=offs < n)


@triton.jit(do_not_specialize=["n_inner"])
def _softmax_blocks_bwd_kernel(
    dy_ptr, y_ptr, dx_ptr, stride_gb, stride_gl, stride_yb, stride_yl, n, n_inner,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    dy_ptr += row_offsets(row, n_inner, stride_gb, stride_gl)
    y_ptr += row_offsets(row, n_inner, stride_yb, stride_yl)
    dx_ptr += row.to(tl.int64) * n
    products = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        products += load_rows(dy_ptr, offs, offs < n) * load_rows(y_ptr, offs, offs < n)
    shift = tl.sum(products)
    for start in range(0, n, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        dy = load_rows(dy_ptr, offs, offs < n)
        dx = load_rows(y_ptr, offs, offs < n) * (dy - shift)
        tl.store(dx_ptr + offs, cast(dx, dx_ptr.dtype.element_ty), mask=offs < n)


def held(call):
    width = call.problem["width"]
    return None if width <= MAX_HELD else f"it holds rows of at most {MAX_HELD}, not {width}"


def block_configs(call):
    return BLOCKS


def empty(wanted, inputs):
    (x,) = inputs
    return (x.new_empty(x.shape),), ()


def _tile(call, config):
    """Returns the grid and sizes of the kernels that hold rows."""
    sizes = config.sizes(call.problem["width"], call.problem.itemsize)
    rows = sizes["ROWS"]
    grid = (triton.cdiv(call.problem["rows"], rows),)
    return grid, {"BLOCK": sizes["BLOCK_D"], "ROWS": rows, "num_warps": config.num_warps}


def prepare(call, config, inputs):
    x_rows = row_layout(inputs[0])
    grid, sizes = _tile(call, config)
    n, n_rows = call.problem["width"], call.problem["rows"]
    return _forward(
        x_rows,
        Bound(_softmax_fwd_kernel, grid, *x_rows.strides, n, n_rows, x_rows.n_inner, **sizes),
    )


def prepare_online(call, config, inputs):
    x_rows = row_layout(inputs[0])
    return _forward(
        x_rows,
        Bound(
            _softmax_online_fwd_kernel, (call.problem["rows"],),
            *x_rows.strides, call.problem["width"], x_rows.n_inner, **config.kernel_arguments(),
        ),
    )  # fmt: skip


def _forward(x_rows, kernel):
    def launch(inputs, scalars):
        (x,) = inputs
        y = x.new_empty(x.shape)
        kernel(x_rows.of(x), y)
        return (y,), ()

    return launch


def empty_backward(wanted, inputs):
    _gradients, (y,), _saved = inputs
    return (y.new_empty(y.shape),)


def prepare_backward(call, config, inputs):
    (dy,), (y,), _saved = inputs
    g_rows, y_rows = row_layout(dy), row_layout(y)
    grid, sizes = _tile(call, config)
    kernel = Bound(
        _softmax_bwd_kernel, grid, *g_rows.strides, *y_rows.strides,
        call.problem["width"], call.problem["rows"], y_rows.n_inner, **sizes,
    )  # fmt: skip
    return _backward(g_rows, y_rows, kernel)


def prepare_blocks_backward(call, config, inputs):
    (dy,), (y,), _saved = inputs
    g_rows, y_rows = row_layout(dy), row_layout(y)
    kernel = Bound(
        _softmax_blocks_bwd_kernel, (call.problem["rows"],), *g_rows.strides, *y_rows.strides,
        call.problem["width"], y_rows.n_inner, **config.kernel_arguments(),
    )  # fmt: skip
    return _backward(g_rows, y_rows, kernel)


def _backward(g_rows, y_rows, kernel):
    def launch(inputs, scalars):
        (dy,), (y,), _saved = inputs
        dx = y.new_empty(y.shape)
        kernel(g_rows.of(dy), y_rows.of(y), dx)
        return (dx,)

    return launch


FORWARD = Kernel("rows", empty, prepare, held, forward_configs)
ONLINE_FORWARD = Kernel("blocks", empty, prepare_online, configs=block_configs)
BACKWARD = Kernel("rows", empty_backward, prepare_backward, held, forward_configs)
BLOCKS_BACKWARD = Kernel("blocks", empty_backward, prepare_blocks_backward, configs=block_configs)
