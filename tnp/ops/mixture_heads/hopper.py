"""Computes the mixture heads on Hopper: the activations of the hidden layer stay in registers.

In the forward pass, a warpgroup takes all tiles of a head for its 128 rows, and adds up

    out_o = Σ_f silu(z_f) · down_of,  z = x upᵀ

by multiply-adds in float32, because three outputs are too few for a matmul.

The forward pass has two forms. In form "z", for at most `SAVED_ROWS` rows and if a gradient is
wanted, the kernel also writes z, rounded to x's dtype, by TMA during its products. The backward
pass is then in `saved_z`. In form "again" nothing is saved. Its backward kernel computes z again,
for a chunk of rows at a time, and

    dz_f = silu'(z_f) · Σ_o dout_o · down_of        ddown_of = Σ_rows dout_o · silu(z_f)

with ddown as one partial sum for each 128 rows.
"""

from functools import partial
from math import prod

import torch
import torch.nn.functional as F
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tnp.dispatch.launcher import Bound
from tnp.dispatch.spec import Call, Kernel, Reason
from tnp.ops._shared import hopper_matmul
from tnp.ops._shared.hopper_matmul import (
    ACC,
    BLOCK_K,
    QUARTER_ACC,
    REGISTERS,
    ROWS,
    TILE,
    load,
    multiply,
    pipeline,
    produce,
    quarters,
    sigmoid,
    tiles,
)
from tnp.ops._shared.hopper_primitives import barriers, opaque
from tnp.ops._shared.hopper_silu import store_half
from tnp.ops._shared.operands import hidden_width, rows_of, saves_rows, weights
from tnp.ops.mixture_heads import SAVED_ROWS, saved_z
from tnp.ops.mixture_heads.gradients import chunks, summing
from tnp.ops.mixture_heads.gradients import empty as empty_backward
from tnp.ops.mixture_heads.triton_heads import empty

# A chunk of the backward pass has so many rows. Its dz takes 231 MB at 10 heads and F = 1408.
CHUNK_ROWS = 8192
STAGES = 4
BACKWARD_STAGES = 3  # shared memory holds no more
N_OUT = gl.constexpr(3)  # d_y = 1: logit_weight, mu, log_sigma
PADDED_OUT = gl.constexpr(16)  # the smallest width of a matmul


@gluon.jit
def _lane_sums(x):
    """Returns row sums over the columns that a thread holds, [64, 4], without a shuffle."""
    return gl.sum(gl.sum(gl.reshape(x, [ROWS, TILE // 8, 4, 2]), 3), 1)


@gluon.jit
def _add_outputs(out, z, w0, w1, w2):
    h = z * sigmoid(z)
    return (out[0] + _lane_sums(h * w0), out[1] + _lane_sums(h * w1), out[2] + _lane_sums(h * w2))


@gluon.jit
def _heads(
    pipe, z_desc, down_ptr, out_ptr, buffers, n_rows, n_heads,
    WARPGROUP: gl.constexpr, HAS_Z: gl.constexpr,
):  # fmt: skip
    COLUMNS: gl.constexpr = pipe.PAIRS_OF  # tiles of a head
    WIDTH: gl.constexpr = COLUMNS * TILE
    pairs = pipe.n_columns // (2 * COLUMNS)
    columns = gl.arange(0, TILE, layout=gl.SliceLayout(0, ACC))
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, ACC))
    for unit in range(pipe.first // (2 * COLUMNS), pipe.last // (2 * COLUMNS)):
        head = unit % pairs * 2 + WARPGROUP
        exists = head < n_heads
        first_row = unit // pairs * TILE
        zero = _lane_sums(gl.zeros([ROWS, TILE], gl.float32, ACC))
        upper_out = (zero, zero, zero)
        lower_out = (zero, zero, zero)
        for i in range(COLUMNS):
            upper, lower = multiply(pipe, (unit * COLUMNS + i) * 2 + WARPGROUP, WARPGROUP)
            if HAS_Z:
                # A head that does not exist lies past the columns of z, where TMA writes nothing.
                column = head * WIDTH + i * TILE
                store_half(z_desc, upper, first_row, column, buffers, WARPGROUP)
                store_half(z_desc, lower, first_row + ROWS, column, buffers, WARPGROUP)
            w_ptrs = down_ptr + head * (N_OUT * WIDTH) + i * TILE + columns
            w0 = gl.load(w_ptrs, mask=exists, other=0.0).to(gl.float32)[None, :]
            w1 = gl.load(w_ptrs + WIDTH, mask=exists, other=0.0).to(gl.float32)[None, :]
            w2 = gl.load(w_ptrs + 2 * WIDTH, mask=exists, other=0.0).to(gl.float32)[None, :]
            upper_out = _add_outputs(upper_out, upper, w0, w1, w2)
            lower_out = _add_outputs(lower_out, lower, w0, w1, w2)
        row = first_row + rows
        for o in gl.static_range(N_OUT):
            for half in gl.static_range(2):
                out = lower_out[o] if half else upper_out[o]
                out = gl.convert_layout(gl.sum(out, 1), gl.SliceLayout(1, ACC))
                inside = (row + half * ROWS < n_rows) & exists
                at = ((row + half * ROWS).to(gl.int64) * n_heads + head) * N_OUT + o
                gl.store(out_ptr + at, out, mask=inside)
    if HAS_Z:
        tma.store_wait(0)


@gluon.jit
def _produce_backward(pipe, x_desc, up_desc, down_desc, dout_desc, extra, COLUMNS: gl.constexpr):
    down, dout, full, empty = extra
    BYTES: gl.constexpr = 2 * (down_desc.block_type.nbytes + dout_desc.block_type.nbytes)
    for tile in range(pipe.first, pipe.last):
        warpgroup = (tile - pipe.first) % 2
        phase = (tile - pipe.first) // 2 & 1
        column = tile % pipe.n_columns
        head = column // COLUMNS
        at = full.index(warpgroup)
        # The matmul's operands come first: these buffers are free only after a whole epilogue.
        load(pipe, x_desc, up_desc, tile)
        mbarrier.wait(empty.index(warpgroup), phase ^ 1)
        mbarrier.expect(at, BYTES)
        for i in gl.static_range(2):
            feature = column % COLUMNS * TILE + i * BLOCK_K
            tma.async_copy_global_to_shared(
                down_desc, [head * PADDED_OUT, feature], at, down.index(2 * warpgroup + i)
            )
            row = tile // pipe.n_columns * TILE + i * ROWS
            tma.async_copy_global_to_shared(
                dout_desc, [row, head * PADDED_OUT], at, dout.index(2 * warpgroup + i)
            )


@gluon.jit
def _heads_backward(
    pipe, dz_desc, ddown_ptr, extra, buffers, n_heads,
    WARPGROUP: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    DDOWN: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PADDED_OUT, 16])
    WIDTH: gl.constexpr = COLUMNS * TILE
    down, dout, full, empty = extra
    hidden_buffer = buffers.index(2 * WARPGROUP)
    dz_buffer = buffers.index(2 * WARPGROUP + 1)
    for tile in range(pipe.first + WARPGROUP, pipe.last, 2):
        halves = multiply(pipe, tile, WARPGROUP)
        row = tile // pipe.n_columns * TILE
        column = tile % pipe.n_columns
        mbarrier.wait(full.index(WARPGROUP), (tile - pipe.first) // 2 & 1)
        zero = gl.zeros([BLOCK_K, PADDED_OUT], gl.float32, DDOWN)
        ddown = (zero, zero)
        for i in gl.static_range(2):
            dout_half = dout.index(2 * WARPGROUP + i)
            z = quarters(halves[i])
            sums = ()
            for j in gl.static_range(2):
                dh = warpgroup_mma(
                    dout_half, down.index(2 * WARPGROUP + j),
                    gl.zeros([ROWS, BLOCK_K], gl.float32, QUARTER_ACC), use_acc=False,
                )  # fmt: skip
                s = sigmoid(z[j])
                h = z[j] * s
                dz = dh * (s + h * (1.0 - s))
                tma.store_wait(0)
                hidden_buffer.store(h.to(dz_desc.dtype))
                dz_buffer.store(dz.to(dz_desc.dtype))
                fence_async_shared()
                started = warpgroup_mma(
                    hidden_buffer.permute((1, 0)), dout_half, ddown[j], is_async=True
                )
                tma.async_copy_shared_to_global(
                    dz_desc, [row + i * ROWS, column * TILE + j * BLOCK_K], dz_buffer
                )
                sums = sums + (warpgroup_mma_wait(0, deps=[started]),)
            ddown = sums
        mbarrier.arrive(empty.index(WARPGROUP), count=1)
        # Without `opaque` they would be kept through the products, and spill.
        features = opaque(gl.arange(0, BLOCK_K, layout=gl.SliceLayout(1, DDOWN)))[:, None]
        outputs = opaque(gl.arange(0, PADDED_OUT, layout=gl.SliceLayout(0, DDOWN)))[None, :]
        at = (row // TILE * n_heads + column // COLUMNS) * (N_OUT * WIDTH)
        at += column % COLUMNS * TILE
        for j in gl.static_range(2):
            ptrs = ddown_ptr + at + outputs * WIDTH + j * BLOCK_K + features
            gl.store(ptrs, ddown[j], mask=outputs < N_OUT)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["n_rows", "n_heads"])
def mixture_heads_hopper_kernel(
    x_desc, up_desc, z_desc, down_ptr, out_ptr, n_rows, n_heads,
    COLUMNS: gl.constexpr, K_BLOCKS: gl.constexpr, STAGES: gl.constexpr, HAS_Z: gl.constexpr,
):  # fmt: skip
    """Writes the outputs, and if HAS_Z also z. Otherwise z_desc is unused."""
    n_columns = gl.cdiv(n_heads, 2) * 2 * COLUMNS
    pipe = pipeline(
        x_desc, up_desc, n_rows, n_columns, 2 * COLUMNS, K_BLOCKS, STAGES, False, COLUMNS
    )
    buffers = pipe.w  # it has no buffers of its own
    if HAS_Z:
        buffers = gl.allocate_shared_memory(
            z_desc.dtype, [4] + z_desc.block_type.shape, z_desc.layout
        )
    gl.warp_specialize(
        [
            (_heads, (pipe, z_desc, down_ptr, out_ptr, buffers, n_rows, n_heads, 0, HAS_Z)),
            (_heads, (pipe, z_desc, down_ptr, out_ptr, buffers, n_rows, n_heads, 1, HAS_Z)),
            (produce, (pipe, x_desc, up_desc)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )


@gluon.jit(do_not_specialize=["n_rows", "n_heads"])
def mixture_heads_bwd_hopper_kernel(
    x_desc, up_desc, down_desc, dout_desc, dz_desc, ddown_ptr, n_rows, n_heads,
    COLUMNS: gl.constexpr, K_BLOCKS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    pipe = pipeline(x_desc, up_desc, n_rows, n_heads * COLUMNS, 1, K_BLOCKS, STAGES, False, 0)
    buffers = gl.allocate_shared_memory(
        dz_desc.dtype, [4] + dz_desc.block_type.shape, dz_desc.layout
    )
    # For each warpgroup's tile: both halves of down and of dout, and their barriers.
    extra = (
        gl.allocate_shared_memory(
            down_desc.dtype, [4] + down_desc.block_type.shape, down_desc.layout
        ),
        gl.allocate_shared_memory(
            dout_desc.dtype, [4] + dout_desc.block_type.shape, dout_desc.layout
        ),
        barriers(2, 1), barriers(2, 1),
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_heads_backward, (pipe, dz_desc, ddown_ptr, extra, buffers, n_heads, 0, COLUMNS)),
            (_heads_backward, (pipe, dz_desc, ddown_ptr, extra, buffers, n_heads, 1, COLUMNS)),
            (_produce_backward, (pipe, x_desc, up_desc, down_desc, dout_desc, extra, COLUMNS)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )


def refuses(call: Call) -> Reason:
    problem = call.problem
    if problem["n_outputs"] != N_OUT.value:
        return f"it takes {N_OUT.value} outputs a head, not {problem['n_outputs']}"
    return hopper_matmul.refuses(call, problem["d_model"], hidden_width(problem["d_ff"]))


def _few_rows(call: Call) -> Reason:
    return saves_rows(call, SAVED_ROWS) or refuses(call)


def empty_z(wanted, inputs):
    """Allocates the results of the forward operation, with z [T, n_heads·F]."""
    x, up, _down = inputs
    outputs, _nothing = empty(wanted, inputs)
    return outputs, (x.new_empty(prod(x.shape[:-1]), up.shape[0] * hidden_width(up.shape[1])),)


def prepare(call: Call, config, inputs, *, save: bool):
    x, up, down = inputs
    n_heads, width, d_model = up.shape[0], hidden_width(up.shape[1]), x.shape[-1]
    rows, cast = rows_of(x, tma=True), weights(up, down, x.dtype, tma=True)
    kernel = Bound(
        mixture_heads_hopper_kernel, (call.target.multiprocessors,), rows.n, n_heads,
        maps=(
            tiles(ROWS.value, BLOCK_K.value), tiles(TILE.value, BLOCK_K.value),
            tiles(ROWS.value, BLOCK_K.value),
        ),
        COLUMNS=width // TILE.value, K_BLOCKS=d_model // BLOCK_K.value, STAGES=STAGES, HAS_Z=save,
        num_warps=4,
    )  # fmt: skip
    shape, read = (*x.shape[:-1], n_heads, N_OUT.value), rows.pointed
    z_shape = rows.n, n_heads * width

    def launch(inputs, scalars):
        x, up, down = inputs
        up, down = cast(up, down)
        out = x.new_empty(shape, dtype=torch.float32)
        z = x.new_empty(z_shape) if save else None
        x = read(x)
        kernel(x, up, x if z is None else z, down, out)
        return (out,), () if z is None else (z,)

    return launch


def prepare_backward(call: Call, config, inputs):
    """Prepares the backward pass over chunks of rows.

    Of the hidden layer, only a chunk's dz, [CHUNK_ROWS, n_heads·F], reaches memory. One buffer
    serves all chunks.
    """
    _gradients, (x, up, down), _saved = inputs
    n_heads, width, d_model = up.shape[0], hidden_width(up.shape[1]), x.shape[-1]
    rows, cast = rows_of(x, tma=True), weights(up, down, x.dtype, tma=True)
    summed, parts = summing(call, inputs[1]), chunks(rows.n, CHUNK_ROWS)
    kernels = [
        Bound(
            mixture_heads_bwd_hopper_kernel, (call.target.multiprocessors,), n, n_heads,
            maps=(
                tiles(ROWS.value, BLOCK_K.value), tiles(TILE.value, BLOCK_K.value),
                tiles(PADDED_OUT.value, BLOCK_K.value), tiles(ROWS.value, PADDED_OUT.value),
                tiles(ROWS.value, BLOCK_K.value),
            ),
            COLUMNS=width // TILE.value, K_BLOCKS=d_model // BLOCK_K.value, STAGES=BACKWARD_STAGES,
            num_warps=4,
        )
        for _, n in parts
    ]  # fmt: skip
    dz_shape, whole = (parts[0][1], n_heads * width), len(parts) == 1
    partial_shapes = [(triton.cdiv(n, TILE.value), n_heads, N_OUT.value, width) for _, n in parts]
    padding, padded_width = PADDED_OUT.value - N_OUT.value, n_heads * PADDED_OUT.value
    dout_shape = *x.shape[:-1], n_heads, PADDED_OUT.value

    def each(dout, x, up, down):
        dz = x.new_empty(dz_shape)
        for (start, n), shape, kernel in zip(parts, partial_shapes, kernels, strict=True):
            of_dout, of_x, of_dz = dout, x, dz
            if not whole:
                of_dout, of_x = dout.narrow(0, start, n), x.narrow(0, start, n)
                of_dz = dz.narrow(0, 0, n)
            partials = x.new_empty(shape, dtype=torch.float32)
            kernel(of_x, up, down, of_dout, of_dz, partials)
            yield start, n, of_dz, of_x, partials

    def launch(inputs, scalars):
        (dout,), (x, *both), _saved = inputs
        up, down = cast(*both)
        x = rows.matrix(x)
        # dout is padded with zeros past the third output, in x's dtype.
        padded = x.new_zeros(dout_shape)
        padded.narrow(-1, 0, N_OUT.value).copy_(dout)
        padded = padded.view(rows.n, padded_width)
        return summed(up, each(padded, x, up, F.pad(down, (0, 0, 0, padding))))

    return launch


FORWARD_Z = Kernel("hopper", empty_z, partial(prepare, save=True), _few_rows, saves="z")
FORWARD_AGAIN = Kernel("hopper_again", empty, partial(prepare, save=False), refuses, saves="again")
BACKWARD_Z = Kernel("hopper", empty_backward, saved_z.prepare_backward, refuses, saves="z")
BACKWARD_AGAIN = Kernel("hopper_again", empty_backward, prepare_backward, refuses, saves="again")
