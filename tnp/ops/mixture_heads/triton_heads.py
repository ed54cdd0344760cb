"""Computes mixture heads in portable Triton: K small MLPs, whose hidden rows are never in memory.

    forward     z = x up_kᵀ        out_k = silu(z) down_kᵀ
    backward    dz = (dout_k down_k) ∘ silu'(z)        dx = Σ_k dz up_k
                dup_k = dzᵀ x      ddown_k = dout_kᵀ silu(z)

x [T, D], up [K, F, D], down [K, O, F], out float32 [T, K, O]. At K = 10 a hidden row has 13,650
numbers, and a row of out has 30. In the forward pass a program owns a tile of rows of one head,
loops over the hidden width, and writes O numbers a row. Nothing is saved. The backward pass takes x
in chunks of rows and computes z again. One kernel writes the chunk's transposed dz, and ddown's
sums over each tile of rows. Two matmuls then compute dx and add to dup. One buffer of dz serves all
chunks.

A few rows (`FEW_ROWS`) are one tile, and heads are fewer than multiprocessors. So each program
takes a part of the hidden width, and a second launch adds up the parts of each output.

The backward kernel computes the transposed tile zᵀ = up_k xᵀ. Then silu(z)ᵀ is the left operand of
the product with dout, in registers. If computed and then transposed, a left operand came out wrong
on 64-wide tiles (triton 3.4 to 3.7).

Products and sums are float32; silu(z), dz and dout are rounded to x's dtype for their matmuls. The
sums over tiles of rows are added up in a fixed order.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tnp.dispatch.launcher import Bound
from tnp.dispatch.spec import Call, Kernel, Reason
from tnp.ops._shared.operands import dense, hidden_width, rows_of, weights
from tnp.ops._shared.primitives import KernelConfig, add_dot, cast, dot
from tnp.ops._shared.rows import bound_sum
from tnp.ops._shared.triton_matmul import load_tile, product_tile, sigmoid, silu, store_tile
from tnp.ops.mixture_heads import MAX_OUTPUTS
from tnp.ops.mixture_heads.gradients import chunks, summing
from tnp.ops.mixture_heads.gradients import empty as empty_backward

# A chunk of the backward pass has so many rows. In 16 bits its dz takes 115 MB at K = 10 and F =
# 1408.
CHUNK_ROWS = 4096
OUTPUTS = tl.constexpr(MAX_OUTPUTS)  # a tile has so many: the smallest width of a matmul
MOST_FEW_ROWS = 16  # the smallest height of a matmul


@dataclass(frozen=True)
class HeadsConfig(KernelConfig):
    """Sets rows and hidden units of a tile, and how much of x's width is multiplied at a time."""

    block_m: int
    block_f: int
    block_k: int
    num_warps: int
    num_stages: int


# The tiles by bytes per element. `tnp.gates.compile` checks that none spills. A backward tile of
# 128 × 128 would spill.
FORWARD_CONFIGS = {2: HeadsConfig(128, 128, 64, 8, 3), 4: HeadsConfig(64, 64, 32, 8, 2)}
# On compute capability 10.x a thread has 128 registers here, so a tile 128 wide would spill 16
# bytes.
FORWARD_ON_10 = HeadsConfig(128, 64, 64, 8, 3)
FEW_ROWS_CONFIGS = {2: HeadsConfig(16, 64, 128, 4, 4), 4: HeadsConfig(16, 32, 64, 4, 3)}
BACKWARD_CONFIGS = {2: HeadsConfig(64, 128, 64, 8, 3), 4: HeadsConfig(32, 64, 32, 8, 2)}


@triton.jit(do_not_specialize=["n_rows"])
def _mixture_heads_fwd_kernel(
    x_ptr, up_ptr, down_ptr, out_ptr, n_rows, n_heads, n_hidden, n_inner, n_out, n_part, stride_xm,
    K_MASKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Writes outputs.

    Heads vary fastest, so that programs that run together share rows of x. Program (·, i) has the
    i-th n_part hidden units, and writes their sums to the i-th [T, K, O].
    """
    head = tl.program_id(0) % n_heads
    offs_m = tl.program_id(0) // n_heads * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_o = tl.arange(0, OUTPUTS)
    up_ptr += head.to(tl.int64) * n_hidden * n_inner
    down_ptr += head.to(tl.int64) * n_out * n_hidden
    dtype: tl.constexpr = x_ptr.dtype.element_ty

    acc = tl.zeros([BLOCK_M, OUTPUTS], tl.float32)
    first = tl.program_id(1) * n_part
    for start_f in tl.range(first, tl.minimum(first + n_part, n_hidden), BLOCK_F):
        offs_f = start_f + tl.arange(0, BLOCK_F)
        z = product_tile(
            x_ptr, up_ptr, offs_m, offs_f, n_rows, n_hidden, n_inner, stride_xm, n_inner,
            False, K_MASKED, BLOCK_M, BLOCK_F, BLOCK_K,
        )  # fmt: skip
        down = load_tile(down_ptr, offs_o, offs_f, n_out, n_hidden, n_hidden, True, True)
        acc = add_dot(cast(silu(z, dtype), dtype), tl.trans(down), acc)
    out_ptr += tl.program_id(1).to(tl.int64) * n_rows * n_heads * n_out + head * n_out
    store_tile(out_ptr, acc, offs_m, offs_o, n_rows, n_out, n_heads * n_out)


@triton.jit(do_not_specialize=["n_rows"])
def _mixture_heads_bwd_kernel(
    dout_ptr, x_ptr, up_ptr, down_ptr, dz_ptr, ddown_ptr,
    n_rows, n_heads, n_hidden, n_inner, n_out, stride_xm, stride_dz,
    K_MASKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Writes dz [K · F, tiles · BLOCK_M] and ddown [tiles, K, O, F]. Tiles of rows vary fastest."""
    head = tl.program_id(2)
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    offs_o = tl.arange(0, OUTPUTS)
    up_ptr += head.to(tl.int64) * n_hidden * n_inner
    down_ptr += head.to(tl.int64) * n_out * n_hidden
    dtype: tl.constexpr = x_ptr.dtype.element_ty

    dout = load_tile(
        dout_ptr + head * n_out, offs_m, offs_o, n_rows, n_out, n_heads * n_out, True, True
    )
    dout = cast(dout, dtype)
    down = load_tile(down_ptr, offs_o, offs_f, n_out, n_hidden, n_hidden, True, True)
    # This comes before the tile of z. After it, triton 3.6 makes the wgmmas of both wait for one
    # another (sm_90a).
    dh = dot(tl.trans(down), tl.trans(dout))
    z = product_tile(
        up_ptr, x_ptr, offs_f, offs_m, n_hidden, n_rows, n_inner, n_inner, stride_xm,
        False, K_MASKED, BLOCK_F, BLOCK_M, BLOCK_K,
    )  # fmt: skip
    s = sigmoid(z, dtype)
    dz = dh * (s * (1.0 + z * (1.0 - s)))
    ddown = dot(cast(z * s, dtype), dout)

    # Whole tiles of rows, with zeros past the end: a mask along rows would split every wide store.
    offs_dz = (head * n_hidden + offs_f).to(tl.int64)[:, None] * stride_dz + offs_m[None, :]
    tl.store(dz_ptr + offs_dz, cast(dz, dtype), mask=offs_f[:, None] < n_hidden)
    ddown_ptr += (tl.program_id(0) * n_heads + head).to(tl.int64) * n_out * n_hidden
    store_tile(ddown_ptr, tl.trans(ddown), offs_o, offs_f, n_out, n_hidden, n_hidden)


def empty(wanted, inputs):
    """Allocates the result of the forward operation, in the layout of all kernels."""
    x, _up, down = inputs
    return (x.new_empty((*x.shape[:-1], *down.shape[:2]), dtype=torch.float32),), ()


def configs(call: Call) -> tuple[HeadsConfig, ...]:
    itemsize = call.problem.itemsize
    if itemsize == 2 and 100 <= call.target.capability < 110:
        return (FORWARD_ON_10,)
    return (FORWARD_CONFIGS[itemsize],)


def prepare(call: Call, config: HeadsConfig, inputs):
    return _prepare(call, config, inputs, few=False)


def _prepare(call: Call, config: HeadsConfig, inputs, *, few: bool):
    x, up, down = inputs
    n_heads, n_out, _ = down.shape
    n_hidden, n_inner = hidden_width(up.shape[1]), x.shape[-1]
    of_out = dense(*x.shape[:-1], n_heads, n_out)
    rows, cast = rows_of(x), weights(up, down, x.dtype)
    n_part = config.block_f if few else n_hidden
    n_parts = triton.cdiv(n_hidden, n_part)
    of_parts = dense(n_parts, *of_out[0])
    kernel = Bound(
        _mixture_heads_fwd_kernel, (triton.cdiv(rows.n, config.block_m) * n_heads, n_parts),
        rows.n, n_heads, n_hidden, n_inner, n_out, n_part, rows.stride,
        K_MASKED=n_inner % config.block_k != 0, **config.kernel_arguments(),
    )  # fmt: skip
    add_parts = bound_sum(n_parts, rows.n * n_heads * n_out) if n_parts > 1 else None
    read = rows.pointed

    def launch(inputs, scalars):
        x, up, down = inputs
        up, down = cast(up, down)
        out = x.new_empty_strided(*of_out, dtype=torch.float32)
        parts = out.new_empty_strided(*of_parts) if add_parts else out
        kernel(read(x), up, down, parts)
        if add_parts:
            add_parts(parts, out, 1.0)
        return (out,), ()

    return launch


def few_rows(call: Call) -> Reason:
    """Returns why `FEW_ROWS` cannot serve a call, or None."""
    rows = call.problem["rows"]
    return None if rows <= MOST_FEW_ROWS else f"it takes up to {MOST_FEW_ROWS} rows, not {rows}"


def configs_few_rows(call: Call) -> tuple[HeadsConfig, ...]:
    return (FEW_ROWS_CONFIGS[call.problem.itemsize],)


def prepare_few_rows(call: Call, config: HeadsConfig, inputs):
    """Prepares one program for each tile of hidden units, and the sum of their parts."""
    return _prepare(call, config, inputs, few=True)


def configs_backward(call: Call) -> tuple[HeadsConfig, ...]:
    return (BACKWARD_CONFIGS[call.problem.itemsize],)


def prepare_backward(call: Call, config: HeadsConfig, inputs):
    """Prepares the backward pass over chunks of rows, with transposed dz in whole tiles."""
    (dout,), (x, up, down), _saved = inputs
    n_inner, n_hidden, (n_heads, n_out, _) = x.shape[-1], hidden_width(up.shape[1]), down.shape
    rows, cast, summed = rows_of(x), weights(up, down, x.dtype), summing(call, inputs[1])
    parts = chunks(rows.n, CHUNK_ROWS)
    tiles = [triton.cdiv(n, config.block_m) for _, n in parts]
    of_dz = dense(n_heads * n_hidden, max(tiles) * config.block_m)
    of_partials = [dense(n_tiles, n_heads, n_out, n_hidden) for n_tiles in tiles]
    kernels = [
        Bound(
            _mixture_heads_bwd_kernel, (n_tiles, triton.cdiv(n_hidden, config.block_f), n_heads),
            n, n_heads, n_hidden, n_inner, n_out, rows.stride, of_dz[0][1],
            K_MASKED=n_inner % config.block_k != 0, **config.kernel_arguments(),
        )
        for (_, n), n_tiles in zip(parts, tiles, strict=True)
    ]  # fmt: skip
    dout_shape, strided = (rows.n, n_heads * n_out), not dout.is_contiguous()
    whole = len(parts) == 1

    def each(dout, x, up, down):
        dz = x.new_empty_strided(*of_dz)
        for (start, n), layout, kernel in zip(parts, of_partials, kernels, strict=True):
            of_dout, of_x = dout, x
            if not whole:
                of_dout, of_x = dout.narrow(0, start, n), x.narrow(0, start, n)
            partials = x.new_empty_strided(*layout, dtype=torch.float32)
            kernel(of_dout, of_x, up, down, dz, partials)
            yield start, n, dz.narrow(1, 0, n).t(), of_x, partials

    def launch(inputs, scalars):
        (dout,), (x, *both), _saved = inputs
        up, down = cast(*both)
        dout = dout.contiguous() if strided else dout
        return summed(up, each(dout if whole else dout.view(dout_shape), rows.matrix(x), up, down))

    return launch


FORWARD = Kernel("triton", empty, prepare, configs=configs, saves="again")
FEW_ROWS = Kernel("few_rows", empty, prepare_few_rows, few_rows, configs_few_rows, saves="again")
BACKWARD = Kernel(
    "triton", empty_backward, prepare_backward, configs=configs_backward, saves="again"
)
