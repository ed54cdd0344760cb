"""Computes the heads' backward pass from the saved z = x upᵀ, so that nothing is multiplied again.

    h = silu(z)        dz_f = silu'(z_f) · Σ_o dout_o · down_of
                       ddown_of = Σ_rows dout_o · h_f

z is [T, K · F] in x's dtype. The kernel reads it once and writes dz once, for a chunk of rows at a
time. Memory should limit it, so it takes few instructions an element, 17 on Hopper. Sums over three
outputs are multiply-adds in float32, whole tiles of rows have no masks, and sizes are constants. A
program walks `rows` rows of `block_f` hidden units of one head. Each thread adds up ddown for its
own units over these rows, and the program writes one partial sum. Partial sums are added in a fixed
order.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tnp.dispatch.launcher import Bound
from tnp.dispatch.spec import Call
from tnp.ops._shared.operands import hidden_width, rows_of, weights
from tnp.ops._shared.primitives import KernelConfig, cast
from tnp.ops._shared.triton_matmul import sigmoid
from tnp.ops.mixture_heads import N_OUTPUTS
from tnp.ops.mixture_heads.gradients import chunks, summing

# A chunk of the backward pass has so many rows. Its dz takes 461 MB at 10 heads and F = 1408.
CHUNK_ROWS = 16_384


@dataclass(frozen=True)
class DzConfig(KernelConfig):
    """Sets the rows that a program walks, `unroll` tiles [block_m, block_f] of them at a time.

    A thread has 8 elements of each tile, 16 bytes, if a tile has 256 elements a warp.
    """

    rows: int
    unroll: int
    block_m: int
    block_f: int
    num_warps: int
    num_stages: int = 1


CONFIG = DzConfig(rows=256, unroll=4, block_m=8, block_f=128, num_warps=4)


@triton.jit
def _walk(
    z_ptr, dout_ptr, dz_ptr, w, sums, start, n_left, offs_m, offs_f, MASKED: tl.constexpr,
    UNROLL: tl.constexpr, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr, STRIDE_DOUT: tl.constexpr,
):  # fmt: skip
    """Writes dz of UNROLL tiles of rows from `start`, and returns the sums with these rows added.

    MASKED: only `n_left` rows exist.
    """
    dtype: tl.constexpr = z_ptr.dtype.element_ty
    OTHER: tl.constexpr = 0.0 if MASKED else None
    sum0, sum1, sum2 = sums
    z_ptr += start * WIDTH
    dz_ptr += start * WIDTH
    dout_ptr += start * STRIDE_DOUT
    # All loads are issued before the first result is used.
    tiles = ()
    for i in tl.static_range(UNROLL):
        rows = i * BLOCK_M + offs_m
        inside = start + rows < n_left if MASKED else None
        inside_tile = inside[:, None] if MASKED else None
        at = z_ptr + (rows[:, None] * WIDTH + offs_f[None, :])
        z = tl.load(at, inside_tile, OTHER, eviction_policy="evict_first")
        dout0 = tl.load(dout_ptr + rows * STRIDE_DOUT, inside, OTHER)
        dout1 = tl.load(dout_ptr + rows * STRIDE_DOUT + 1, inside, OTHER)
        dout2 = tl.load(dout_ptr + rows * STRIDE_DOUT + 2, inside, OTHER)
        tiles += ((z, dout0[:, None], dout1[:, None], dout2[:, None]),)
    for i in tl.static_range(UNROLL):
        rows = i * BLOCK_M + offs_m
        z, dout0, dout1, dout2 = tiles[i]
        z = z.to(tl.float32)
        s = sigmoid(z, dtype)
        h = z * s
        dh = dout0 * w[0] + dout1 * w[1] + dout2 * w[2]
        dz = cast(dh * (s + h * (1.0 - s)), dtype)
        inside = (start + rows < n_left)[:, None] if MASKED else None
        tl.store(dz_ptr + (rows[:, None] * WIDTH + offs_f[None, :]), dz, inside)
        sum0 += dout0 * h
        sum1 += dout1 * h
        sum2 += dout2 * h
    return sum0, sum1, sum2


@triton.jit(do_not_specialize=["n_rows"])
def _mixture_heads_dz_kernel(
    z_ptr, dout_ptr, down_ptr, dz_ptr, ddown_ptr, n_rows,
    N_HEADS: tl.constexpr, N_HIDDEN: tl.constexpr,
    ROWS: tl.constexpr, UNROLL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Writes dz, and ddown [row groups, K, 3, F].

    N_HIDDEN is a multiple of BLOCK_F. Tiles of hidden units vary fastest, so that programs that run
    together read whole rows.
    """
    WIDTH: tl.constexpr = N_HEADS * N_HIDDEN
    STRIDE_DOUT: tl.constexpr = N_HEADS * 3
    STEP: tl.constexpr = UNROLL * BLOCK_M
    n_tiles: tl.constexpr = N_HIDDEN // BLOCK_F
    head = tl.program_id(0) // n_tiles
    offs_f = tl.program_id(0) % n_tiles * BLOCK_F + tl.arange(0, BLOCK_F)
    offs_m = tl.arange(0, BLOCK_M)
    first = tl.program_id(1) * ROWS
    n_left = tl.minimum(n_rows - first, ROWS)
    # The program's first offset has 64 bits; offsets from there are short.
    corner = first.to(tl.int64) * WIDTH + head * N_HIDDEN
    z_ptr += corner
    dz_ptr += corner
    dout_ptr += first.to(tl.int64) * STRIDE_DOUT + head * 3
    # These are whole tiles of equal rows, so that they have z's layout, and take no more registers.
    down_ptrs = down_ptr + head * 3 * N_HIDDEN + offs_m[:, None] * 0 + offs_f[None, :]
    w = (
        tl.load(down_ptrs).to(tl.float32),
        tl.load(down_ptrs + N_HIDDEN).to(tl.float32),
        tl.load(down_ptrs + 2 * N_HIDDEN).to(tl.float32),
    )
    zero = tl.zeros([BLOCK_M, BLOCK_F], tl.float32)
    sums = (zero, zero, zero)

    whole = n_left // STEP * STEP
    for start in tl.range(0, whole, STEP):
        sums = _walk(
            z_ptr, dout_ptr, dz_ptr, w, sums, start, n_left, offs_m, offs_f, False,
            UNROLL, BLOCK_M, WIDTH, STRIDE_DOUT,
        )  # fmt: skip
    for start in tl.range(whole, n_left, BLOCK_M):
        sums = _walk(
            z_ptr, dout_ptr, dz_ptr, w, sums, start, n_left, offs_m, offs_f, True,
            1, BLOCK_M, WIDTH, STRIDE_DOUT,
        )  # fmt: skip

    ddown_ptr += (tl.program_id(1) * N_HEADS + head).to(tl.int64) * 3 * N_HIDDEN
    tl.store(ddown_ptr + offs_f, tl.sum(sums[0], 0))
    tl.store(ddown_ptr + N_HIDDEN + offs_f, tl.sum(sums[1], 0))
    tl.store(ddown_ptr + 2 * N_HIDDEN + offs_f, tl.sum(sums[2], 0))


def prepare_backward(call: Call, config, inputs):
    """Prepares the backward pass over chunks of rows. One buffer of dz serves all chunks."""
    (dout,), (x, up, down), _saved = inputs
    n_heads, n_hidden = up.shape[0], hidden_width(up.shape[1])
    width, n_tiles = n_heads * n_hidden, n_heads * (n_hidden // CONFIG.block_f)
    rows, cast, summed = rows_of(x), weights(up, down, x.dtype), summing(call, inputs[1])
    parts = chunks(rows.n, CHUNK_ROWS)
    groups = [triton.cdiv(n, CONFIG.rows) for _, n in parts]
    kernels = [
        Bound(
            _mixture_heads_dz_kernel, (n_tiles, n_groups), n, N_HEADS=n_heads, N_HIDDEN=n_hidden,
            **CONFIG.kernel_arguments(),
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
