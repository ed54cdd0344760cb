"""The heads' backward pass where the forward pass saved z = x upᵀ: nothing is multiplied again.

    h = silu(z)        dz_f = silu'(z_f) · Σ_o dout_o · down_of
                       ddown_of = Σ_rows dout_o · h_f

z is [T, K · F] in x's dtype. The kernel reads it once and writes dz once, for a chunk of rows at a
time: memory is what it waits for, so it computes with few instructions an element, and products
with three outputs are multiply-adds in float32. A program walks `rows` rows of `block_f` hidden
units of one head. Each thread adds up ddown for its own units over the rows that it meets, and the
program writes one partial sum; partial sums are added in a fixed order.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tnp.contract import Call
from tnp.launch import Bound
from tnp.ops.mixture_heads import N_OUTPUTS
from tnp.ops.mixture_heads.gradients import chunks, summing
from tnp.ops.operands import hidden_width, rows_of, weights
from tnp.ops.primitives import KernelConfig, cast
from tnp.ops.triton_matmul import sigmoid

# Rows of the backward pass that are under way at once: dz takes 461 MB at 10 heads, F = 1408.
CHUNK_ROWS = 16_384


@dataclass(frozen=True)
class DzConfig(KernelConfig):
    """Rows that a program walks, `unroll` tiles [block_m, block_f] of them at a time.

    A thread has 8 elements of each tile, 16 bytes, if a tile has 256 elements a warp.
    """

    rows: int
    unroll: int
    block_m: int
    block_f: int
    num_warps: int
    num_stages: int = 1


CONFIG = DzConfig(rows=256, unroll=4, block_m=8, block_f=128, num_warps=4)


@triton.jit(do_not_specialize=["n_rows"])
def _mixture_heads_dz_kernel(
    z_ptr, dout_ptr, down_ptr, dz_ptr, ddown_ptr, n_rows, n_heads, n_hidden,
    ROWS: tl.constexpr, UNROLL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """ddown is [row groups, K, 3, F]; `n_hidden` is a multiple of BLOCK_F. Tiles of hidden units
    vary fastest: programs that run together read whole rows.
    """
    dtype: tl.constexpr = z_ptr.dtype.element_ty
    n_tiles = n_hidden // BLOCK_F
    head = tl.program_id(0) // n_tiles
    offs_f = tl.program_id(0) % n_tiles * BLOCK_F + tl.arange(0, BLOCK_F)
    offs_m = tl.arange(0, BLOCK_M)
    first = tl.program_id(1) * ROWS
    n_left = n_rows - first
    width = n_heads * n_hidden
    # The program's own corner in 64 bits; what it walks from there is short.
    z_ptr += first.to(tl.int64) * width + head * n_hidden
    dz_ptr += first.to(tl.int64) * width + head * n_hidden
    dout_ptr += (first.to(tl.int64) * n_heads + head) * 3
    down_ptr += head * 3 * n_hidden
    # As whole tiles, each row the same: so they lie in registers as z does, at no more of them.
    of_tile = down_ptr + offs_m[:, None] * 0 + offs_f[None, :]
    w0 = tl.load(of_tile).to(tl.float32)
    w1 = tl.load(of_tile + n_hidden).to(tl.float32)
    w2 = tl.load(of_tile + 2 * n_hidden).to(tl.float32)

    sum0 = tl.zeros([BLOCK_M, BLOCK_F], tl.float32)
    sum1 = tl.zeros([BLOCK_M, BLOCK_F], tl.float32)
    sum2 = tl.zeros([BLOCK_M, BLOCK_F], tl.float32)
    for start in tl.range(0, ROWS, UNROLL * BLOCK_M):
        # All tiles are asked for before the first is worked on.
        tiles = ()
        for i in tl.static_range(UNROLL):
            rows = start + i * BLOCK_M + offs_m
            tiles += (
                tl.load(
                    z_ptr + rows[:, None] * width + offs_f[None, :],
                    mask=rows[:, None] < n_left, other=0.0, eviction_policy="evict_first",
                ),
            )  # fmt: skip
        for i in tl.static_range(UNROLL):
            rows = start + i * BLOCK_M + offs_m
            of_rows = dout_ptr + rows * (n_heads * 3)
            dout0 = tl.load(of_rows, mask=rows < n_left, other=0.0).to(tl.float32)[:, None]
            dout1 = tl.load(of_rows + 1, mask=rows < n_left, other=0.0).to(tl.float32)[:, None]
            dout2 = tl.load(of_rows + 2, mask=rows < n_left, other=0.0).to(tl.float32)[:, None]
            z = tiles[i].to(tl.float32)
            s = sigmoid(z, dtype)
            h = z * s
            dz = (dout0 * w0 + dout1 * w1 + dout2 * w2) * (s + h * (1.0 - s))
            tl.store(
                dz_ptr + rows[:, None] * width + offs_f[None, :], cast(dz, dtype),
                mask=rows[:, None] < n_left,
            )  # fmt: skip
            sum0 += dout0 * h
            sum1 += dout1 * h
            sum2 += dout2 * h

    ddown_ptr += (tl.program_id(1) * n_heads + head).to(tl.int64) * 3 * n_hidden
    tl.store(ddown_ptr + offs_f, tl.sum(sum0, 0))
    tl.store(ddown_ptr + n_hidden + offs_f, tl.sum(sum1, 0))
    tl.store(ddown_ptr + 2 * n_hidden + offs_f, tl.sum(sum2, 0))


def prepare_backward(call: Call, config: DzConfig | None, inputs):
    """z is taken in chunks of rows, and one buffer of dz serves all of them."""
    (dout,), (x, up, down), _saved = inputs
    config = config or CONFIG
    n_heads, n_hidden = up.shape[0], hidden_width(up.shape[1])
    width, n_tiles = n_heads * n_hidden, n_heads * (n_hidden // config.block_f)
    rows, cast, summed = rows_of(x), weights(up, down, x.dtype), summing(call, inputs[1])
    parts = chunks(rows.n, CHUNK_ROWS)
    groups = [triton.cdiv(n, config.rows) for _, n in parts]
    kernels = [
        Bound(
            _mixture_heads_dz_kernel, (n_tiles, n_groups), n, n_heads, n_hidden,
            **config.kernel_arguments(),
        )
        for (_, n), n_groups in zip(parts, groups, strict=True)
    ]  # fmt: skip
    partial_shapes = [(n_groups, n_heads, N_OUTPUTS, n_hidden) for n_groups in groups]
    dz_shape, whole = (parts[0][1], width), len(parts) == 1
    dout_shape, strided = (rows.n, n_heads * N_OUTPUTS), not dout.is_contiguous()

    def each(dout, x, z, down):
        dz = x.new_empty(dz_shape)
        for (start, n), shape, kernel in zip(parts, partial_shapes, kernels, strict=True):
            of_dout, of_x, of_z, of_dz = dout, x, z, dz
            if not whole:
                of_dout, of_x = dout.narrow(0, start, n), x.narrow(0, start, n)
                of_z, of_dz = z.narrow(0, start, n), dz.narrow(0, 0, n)
            partials = x.new_empty(shape, dtype=torch.float32)
            kernel(of_z, of_dout, down, of_dz, partials)
            yield start, n, of_dz, of_x, partials

    def launch(inputs, scalars):
        (dout,), (x, *both), (z,) = inputs
        up, down = cast(*both)
        dout = dout.contiguous() if strided else dout
        return summed(up, each(dout if whole else dout.view(dout_shape), rows.matrix(x), z, down))

    return launch
