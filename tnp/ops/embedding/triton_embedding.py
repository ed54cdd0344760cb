"""Computes the first embedding layer in Triton.

Tokens are assembled in registers, and rows are written once.

    tokens = (x, y, −1) for context and (x, 0, +1) for targets    a = tokens @ weightᵀ
    out = a·sigmoid(a)    da = dout·sigmoid(a)·(1 + a·(1 − sigmoid(a)))    dweight = daᵀ @ tokens

A token has few features (3 if x has one dimension), so FMA units multiply in float32, one column of
weight at a time. Programs walk the rows. So each reads weight once and keeps dweight in registers.
It writes one partial sum, and a second, small launch adds them up in a fixed order. The backward
pass computes `a` again from the tokens.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from tnp.dispatch.launcher import Bound
from tnp.dispatch.spec import Call, Kernel
from tnp.ops._shared.operands import dense, near
from tnp.ops._shared.primitives import cast
from tnp.ops._shared.rows import bound_sum, programs
from tnp.ops.embedding import GIVEN


@dataclass(frozen=True)
class Config:
    """Sets the rows and columns that a program holds, programs per multiprocessor, and prefetched
    loads.

    `block_d` counts columns of 16 bits; there are half as many of 32 bits.
    """

    rows: int
    block_d: int
    per_multiprocessor: int
    num_warps: int
    num_stages: int

    def tile(self, itemsize: int) -> dict[str, int]:
        """Returns arguments of the kernels for rows of elements of `itemsize` bytes."""
        tile = {"ROWS": self.rows, "BLOCK_D": self.block_d * 2 // itemsize}
        return tile | {"STAGES": self.num_stages, "num_warps": self.num_warps}


# On an H200, 36,096 rows of 512 in bfloat16 take 31 µs forward (33–43 with other configurations),
# and 71 backward (76 and 126). The forward pass reads a few bytes and writes whole rows. The
# backward pass reads whole rows, and needs prefetched loads.
FORWARD_CONFIG = Config(4, 512, 7, 4, 1)
BACKWARD_CONFIG = Config(2, 512, 4, 4, 2)


@triton.jit
def _features(
    rows, n_rows, n_context, n_target,
    x_context_ptr, y_context_ptr, x_target_ptr,
    stride_xcb, stride_xcl, stride_xcd, stride_ycb, stride_ycl, stride_ycd,
    stride_xtb, stride_xtl, stride_xtd,
    D_X: tl.constexpr, D_Y: tl.constexpr,
):  # fmt: skip
    """Returns the features of `rows` as a tuple of float32 vectors, with 0 in rows past the end."""
    b = (rows // (n_context + n_target)).to(tl.int64)
    l = rows % (n_context + n_target)  # noqa: E741
    inside = rows < n_rows
    is_context = l < n_context
    xc_ptrs = x_context_ptr + b * stride_xcb + l.to(tl.int64) * stride_xcl
    yc_ptrs = y_context_ptr + b * stride_ycb + l.to(tl.int64) * stride_ycl
    xt_ptrs = x_target_ptr + b * stride_xtb + (l - n_context).to(tl.int64) * stride_xtl
    context, target = inside & is_context, inside & (l >= n_context)
    features = ()
    for i in tl.static_range(D_X):
        x_c = tl.load(xc_ptrs + i * stride_xcd, mask=context, other=0.0).to(tl.float32)
        x_t = tl.load(xt_ptrs + i * stride_xtd, mask=target, other=0.0).to(tl.float32)
        features = features + (x_c + x_t,)
    for i in tl.static_range(D_Y):
        y_c = tl.load(yc_ptrs + i * stride_ycd, mask=context, other=0.0).to(tl.float32)
        features = features + (y_c,)
    flag = tl.where(is_context, -1.0, 1.0)
    return features + (tl.where(inside, flag, 0.0),)


@triton.jit
def _columns(weight_ptr, offs_d, d_model, WIDTH: tl.constexpr):
    """Returns the columns of weight as a tuple of vectors."""
    columns = ()
    for i in tl.static_range(WIDTH):
        column = tl.load(weight_ptr + offs_d * WIDTH + i, mask=offs_d < d_model, other=0.0)
        columns = columns + (column,)
    return columns


@triton.jit
def _matmul(features, columns, WIDTH: tl.constexpr):
    acc = features[0][:, None] * columns[0][None, :]
    for i in tl.static_range(1, WIDTH):
        acc += features[i][:, None] * columns[i][None, :]
    return acc


@triton.jit
def _add_outer(acc, features, da, WIDTH: tl.constexpr):
    out = ()
    for i in tl.static_range(WIDTH):
        out = out + (acc[i] + features[i][:, None] * da,)
    return out


@triton.jit(
    do_not_specialize=[
        "n_rows", "n_context", "n_target", "stride_xcb", "stride_xcl", "stride_xcd", "stride_ycb",
        "stride_ycl", "stride_ycd", "stride_xtb", "stride_xtl", "stride_xtd",
    ]
)  # fmt: skip
def _embed_rows_fwd_kernel(
    x_context_ptr, y_context_ptr, x_target_ptr, weight_ptr, out_ptr,
    stride_xcb, stride_xcl, stride_xcd, stride_ycb, stride_ycl, stride_ycd,
    stride_xtb, stride_xtl, stride_xtd,
    n_rows, n_context, n_target, d_model,
    D_X: tl.constexpr, D_Y: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    columns = _columns(weight_ptr, offs_d, d_model, D_X + D_Y + 1)
    step = tl.num_programs(0) * ROWS
    for start in tl.range(tl.program_id(0) * ROWS, n_rows, step, num_stages=STAGES):
        rows = start + tl.arange(0, ROWS)
        features = _features(
            rows, n_rows, n_context, n_target, x_context_ptr, y_context_ptr, x_target_ptr,
            stride_xcb, stride_xcl, stride_xcd, stride_ycb, stride_ycl, stride_ycd,
            stride_xtb, stride_xtl, stride_xtd, D_X, D_Y,
        )  # fmt: skip
        a = _matmul(features, columns, D_X + D_Y + 1)
        out = a / (1.0 + tl.exp(-a))
        ptrs = out_ptr + rows.to(tl.int64)[:, None] * d_model + offs_d[None, :]
        mask = (rows < n_rows)[:, None] & (offs_d < d_model)[None, :]
        tl.store(ptrs, cast(out, out_ptr.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=[
        "n_rows", "n_context", "n_target", "stride_xcb", "stride_xcl", "stride_xcd", "stride_ycb",
        "stride_ycl", "stride_ycd", "stride_xtb", "stride_xtl", "stride_xtd",
    ]
)  # fmt: skip
def _embed_rows_bwd_kernel(
    dout_ptr, x_context_ptr, y_context_ptr, x_target_ptr, weight_ptr, partials_ptr,
    stride_gb, stride_gl, stride_xcb, stride_xcl, stride_xcd, stride_ycb, stride_ycl, stride_ycd,
    stride_xtb, stride_xtl, stride_xtd,
    n_rows, n_context, n_target, d_model,
    D_X: tl.constexpr, D_Y: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Writes partials[p] in program p, which takes every `num_programs`-th group of ROWS rows."""
    WIDTH: tl.constexpr = D_X + D_Y + 1
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    columns = _columns(weight_ptr, offs_d, d_model, WIDTH)
    dweight = ()
    for _ in tl.static_range(WIDTH):
        dweight = dweight + (tl.zeros([ROWS, BLOCK_D], tl.float32),)
    n_inner = n_context + n_target
    step = tl.num_programs(0) * ROWS
    for start in tl.range(tl.program_id(0) * ROWS, n_rows, step, num_stages=STAGES):
        rows = start + tl.arange(0, ROWS)
        features = _features(
            rows, n_rows, n_context, n_target, x_context_ptr, y_context_ptr, x_target_ptr,
            stride_xcb, stride_xcl, stride_xcd, stride_ycb, stride_ycl, stride_ycd,
            stride_xtb, stride_xtl, stride_xtd, D_X, D_Y,
        )  # fmt: skip
        offs_g = (rows // n_inner).to(tl.int64) * stride_gb
        offs_g += (rows % n_inner).to(tl.int64) * stride_gl
        mask = (rows < n_rows)[:, None] & (offs_d < d_model)[None, :]
        ptrs = dout_ptr + offs_g[:, None] + offs_d[None, :]
        dout = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
        a = _matmul(features, columns, WIDTH)
        # 1 − sigmoid(a) is computed as the sigmoid of −a: the difference loses digits if a is
        # large.
        sigmoid = 1.0 / (1.0 + tl.exp(-a))
        da = dout * sigmoid * (1.0 + a * (1.0 / (1.0 + tl.exp(a))))
        dweight = _add_outer(dweight, features, da, WIDTH)
    partials_ptr += tl.program_id(0).to(tl.int64) * d_model * WIDTH
    for i in tl.static_range(WIDTH):
        ptrs = partials_ptr + offs_d * WIDTH + i
        tl.store(ptrs, tl.sum(dweight[i], 0), mask=offs_d < d_model)


def _grid(call: Call, config: Config, tile: dict[str, int]) -> tuple[int, int]:
    n_tiles = triton.cdiv(call.problem["rows"], config.rows)
    n_programs = programs(call.target, config.per_multiprocessor, n_tiles)
    return n_programs, triton.cdiv(call.problem["d_model"], tile["BLOCK_D"])


def _numbers(call: Call, points: tuple) -> tuple[list[int], dict[str, int]]:
    """Returns strides and sizes as the kernels take them, and D_X and D_Y."""
    x_context, _, x_target = points
    given = x_target if x_context is None else x_context
    n_context = 0 if x_context is None else x_context.shape[1]
    n_target = 0 if x_target is None else x_target.shape[1]
    strides = [stride for x in points for stride in ((0, 0, 0) if x is None else x.stride())]
    d_x = given.shape[-1]
    numbers = [*strides, call.problem["rows"], n_context, n_target, call.problem["d_model"]]
    return numbers, {"D_X": d_x, "D_Y": call.problem["width"] - d_x - 1}


# For each tensor of points: the dimensions whose offsets have 32 bits.
FEATURES = ((2,), (2,), (2,))


def _readable(points: tuple, weight) -> list:
    """Replaces a missing tensor by weight: the kernel never reads it."""
    return [weight if x is None else x for x in points]


def empty(wanted, inputs):
    x_context, _, x_target, weight, like = inputs
    given = [x for x in (x_context, x_target) if x is not None]
    n_points = sum(x.shape[1] for x in given)
    return (like.new_empty(given[0].shape[0], n_points, weight.shape[0]),), ()


def prepare(call, config, inputs):
    tile = config.tile(call.problem.itemsize)
    read = near(inputs[:3], FEATURES)
    numbers, widths = _numbers(call, read(inputs[:3]))
    kernel = Bound(_embed_rows_fwd_kernel, _grid(call, config, tile), *numbers, **widths, **tile)

    of_out = dense(*empty((), inputs)[0][0].shape)

    def launch(inputs, scalars):
        *points, weight, like = inputs
        out = like.new_empty_strided(*of_out)
        weight = weight.contiguous()
        kernel(*_readable(read(tuple(points)), weight), weight, out)
        return (out,), ()

    return launch


def empty_backward(wanted, inputs):
    _, (*_, weight), _ = inputs
    return None, None, None, weight.new_empty(weight.shape) if "weight" in wanted else None


def prepare_backward(call, config, inputs):
    (dout,), (*points, weight), _ = inputs
    _, n_points, d_model = dout.shape
    strides = dout.stride() if dout.stride(-1) == 1 else (n_points * d_model, d_model, 1)
    tile = config.tile(dout.element_size())
    grid = _grid(call, config, tile)
    read = near(tuple(points), FEATURES)
    numbers, widths = _numbers(call, read(tuple(points)))
    kernel = Bound(_embed_rows_bwd_kernel, grid, *strides[:2], *numbers, **widths, **tile)
    add = bound_sum(grid[0], weight.numel())
    of_partials, of_dweight = dense(grid[0], *weight.shape), dense(*weight.shape)

    def launch(inputs, scalars):
        (dout,), (*points, weight), _ = inputs
        weight = weight.contiguous()
        partials = weight.new_empty_strided(*of_partials)
        dweight = weight.new_empty_strided(*of_dweight)
        dout = dout if dout.stride(-1) == 1 else dout.contiguous()
        kernel(dout, *_readable(read(tuple(points)), weight), weight, partials)
        add(partials, dweight, 1.0)
        return None, None, None, dweight

    return launch


FORWARD = Kernel("triton", empty, prepare, configs=lambda call: (FORWARD_CONFIG,), options=GIVEN)
BACKWARD = Kernel(
    "triton", empty_backward, prepare_backward, configs=lambda call: (BACKWARD_CONFIG,),
    options=GIVEN,
)  # fmt: skip
