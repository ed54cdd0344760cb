"""Computes LayerNorm in Triton: a program holds whole rows, each read once and written once.

With x̂ = (x − mean)·rstd and g = dy·weight

    y = x̂·weight + bias
    dx = rstd·(g − mean_d(g) − x̂·mean_d(g·x̂))    dweight = Σ_rows dy·x̂    dbias = Σ_rows dy

It computes in float32, and takes the variance of centered numbers. Mean and rstd of each row, 8
bytes, are saved for the backward pass. Its programs walk the rows and keep dweight and dbias in
registers. Their partial sums are added up in a fixed order. Rows too wide for that are read twice
(`tnp.ops._shared.norms`). (Ba, Kiros and Hinton, Layer Normalization, arXiv 1607.06450.)
"""

import torch
import triton
import triton.language as tl

from tnp.dispatch.launcher import Bound
from tnp.dispatch.spec import Kernel
from tnp.ops._shared.norms import (
    BLOCK,
    BLOCK_WARPS,
    ParameterSum,
    backward_configs,
    columns_configs,
    columns_kernel,
    forward_configs,
    held,
)
from tnp.ops._shared.operands import dense
from tnp.ops._shared.primitives import cast
from tnp.ops._shared.rows import load_rows, programs, row_layout, row_offsets


@triton.jit(do_not_specialize=["n_rows", "n_inner"])
def _layer_norm_fwd_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr,
    stride_xb, stride_xl, n_rows, n_inner, eps,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    offs_d = tl.arange(0, BLOCK_D)
    mask = (rows < n_rows)[:, None] & (offs_d < D)[None, :]
    offs_x = row_offsets(rows, n_inner, stride_xb, stride_xl)[:, None] + offs_d[None, :]
    x = load_rows(x_ptr, offs_x, mask)
    weight = load_rows(weight_ptr, offs_d, offs_d < D)
    bias = load_rows(bias_ptr, offs_d, offs_d < D)
    mean = tl.sum(x, 1) / D
    x = tl.where(mask, x - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt_rn(tl.sum(x * x, 1) / D + eps)
    if SAVE:
        tl.store(mean_ptr + rows, mean, mask=rows < n_rows)
        tl.store(rstd_ptr + rows, rstd, mask=rows < n_rows)
    y = x * rstd[:, None] * weight[None, :] + bias[None, :]
    offs_out = rows.to(tl.int64)[:, None] * D + offs_d[None, :]
    tl.store(y_ptr + offs_out, cast(y, y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_rows", "n_inner"])
def _layer_norm_bwd_kernel(
    dy_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, dweight_ptr, dbias_ptr,
    stride_gb, stride_gl, stride_xb, stride_xl, n_rows, n_inner,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Writes both partials[p] in program p, for every `num_programs`-th group of ROWS rows."""
    offs_d = tl.arange(0, BLOCK_D)
    weight = load_rows(weight_ptr, offs_d, offs_d < D)
    dweight = tl.zeros([ROWS, BLOCK_D], tl.float32)
    dbias = tl.zeros([ROWS, BLOCK_D], tl.float32)
    step = tl.num_programs(0) * ROWS
    for start in tl.range(tl.program_id(0) * ROWS, n_rows, step, num_stages=STAGES):
        rows = start + tl.arange(0, ROWS)
        mask = (rows < n_rows)[:, None] & (offs_d < D)[None, :]
        offs_x = row_offsets(rows, n_inner, stride_xb, stride_xl)[:, None] + offs_d[None, :]
        offs_g = row_offsets(rows, n_inner, stride_gb, stride_gl)[:, None] + offs_d[None, :]
        x = load_rows(x_ptr, offs_x, mask)
        dy = load_rows(dy_ptr, offs_g, mask)
        mean = tl.load(mean_ptr + rows, mask=rows < n_rows, other=0.0)
        rstd = tl.load(rstd_ptr + rows, mask=rows < n_rows, other=0.0)
        # Past the row's end g is 0, so x̂ may be anything there.
        normalized = (x - mean[:, None]) * rstd[:, None]
        g = dy * weight[None, :]
        dbias += dy
        dweight += dy * normalized
        shift = tl.sum(g, 1) / D
        slope = tl.sum(g * normalized, 1) / D
        dx = (g - shift[:, None] - normalized * slope[:, None]) * rstd[:, None]
        offs_out = rows.to(tl.int64)[:, None] * D + offs_d[None, :]
        tl.store(dx_ptr + offs_out, cast(dx, dx_ptr.dtype.element_ty), mask=mask)
    offs_p = tl.program_id(0).to(tl.int64) * D + offs_d
    tl.store(dweight_ptr + offs_p, tl.sum(dweight, 0), mask=offs_d < D)
    tl.store(dbias_ptr + offs_p, tl.sum(dbias, 0), mask=offs_d < D)


@triton.jit(do_not_specialize=["n_inner"])
def _layer_norm_coefficients_kernel(
    dy_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, slope_ptr, shift_ptr,
    stride_gb, stride_gl, stride_xb, stride_xl, n_inner,
    D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Computes a row in a program: dx = rstd·g + slope·(x − mean) + shift."""
    row = tl.program_id(0)
    x_ptr += row_offsets(row, n_inner, stride_xb, stride_xl)
    dy_ptr += row_offsets(row, n_inner, stride_gb, stride_gl)
    mean, rstd = tl.load(mean_ptr + row), tl.load(rstd_ptr + row)
    sums = tl.zeros([BLOCK_D], tl.float32)
    products = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, D, BLOCK_D):
        offs_d = start + tl.arange(0, BLOCK_D)
        x = load_rows(x_ptr, offs_d, offs_d < D)
        g = load_rows(dy_ptr, offs_d, offs_d < D) * load_rows(weight_ptr, offs_d, offs_d < D)
        sums += g
        products += g * ((x - mean) * rstd)
    tl.store(slope_ptr + row, -(rstd * (rstd * (tl.sum(products) / D))))
    tl.store(shift_ptr + row, -(rstd * (tl.sum(sums) / D)))


def empty(wanted, inputs):
    """Allocates the result, and mean and rstd of every row if a gradient is requested."""
    x, _weight, _bias = inputs
    saved = (_statistics(x), _statistics(x)) if wanted else ()
    return (x.new_empty(x.shape),), saved


def _statistics(x):
    return x.new_empty(x.shape[:-1], dtype=torch.float32)


def prepare(call, config, inputs):
    x_rows = row_layout(inputs[0])
    sizes = config.sizes(call.problem["width"], call.problem.itemsize)
    n_rows = call.problem["rows"]
    kernel = Bound(
        _layer_norm_fwd_kernel, (triton.cdiv(n_rows, sizes["ROWS"]),),
        *x_rows.strides, n_rows, x_rows.n_inner, SAVE=bool(call.wanted), **sizes,
    )  # fmt: skip
    shape, n_saved = inputs[0].shape, 2 if call.wanted else 0
    of_y, of_saved = dense(*shape), dense(*shape[:-1])

    def launch(inputs, scalars):
        x, weight, bias = inputs
        y = x.new_empty_strided(*of_y)
        saved = tuple([x.new_empty_strided(*of_saved, dtype=torch.float32) for _ in range(n_saved)])
        statistics = saved or (weight, weight)  # not read if nothing is saved
        kernel(x_rows.of(x), weight.contiguous(), bias.contiguous(), y, *statistics, *scalars)
        return (y,), saved

    return launch


def empty_backward(wanted, inputs):
    _gradients, kept, _saved = inputs
    named = zip(("x", "weight", "bias"), kept, strict=True)
    return tuple(x.new_empty(x.shape) if name in wanted else None for name, x in named)


def _parameter_gradients(wanted, total, dweight_partials, dbias_partials, weight, bias):
    return (
        total.of(dweight_partials, weight) if "weight" in wanted else None,
        total.of(dbias_partials, bias) if "bias" in wanted else None,
    )


def prepare_backward(call, config, inputs):
    (dy,), (x, _weight, _bias), _saved = inputs
    g_rows, x_rows = row_layout(dy), row_layout(x)
    n_rows, width = call.problem["rows"], call.problem["width"]
    sizes = config.sizes(width, call.problem.itemsize)
    n_tiles = triton.cdiv(n_rows, sizes["ROWS"])
    n_programs = programs(call.target, config.per_multiprocessor, n_tiles)
    kernel = Bound(
        _layer_norm_bwd_kernel, (n_programs,),
        *g_rows.strides, *x_rows.strides, n_rows, x_rows.n_inner, **sizes,
    )  # fmt: skip
    total, of_dx = ParameterSum(n_programs, width), dense(*x.shape)

    def launch(inputs, scalars):
        (dy,), (x, weight, bias), (mean, rstd) = inputs
        dx, dweight, dbias = x.new_empty_strided(*of_dx), total.partials(x), total.partials(x)
        kernel(g_rows.of(dy), x_rows.of(x), weight.contiguous(), mean, rstd, dx, dweight, dbias)
        parameters = _parameter_gradients(call.wanted, total, dweight, dbias, weight, bias)
        return (dx if "x" in call.wanted else None, *parameters)

    return launch


def prepare_wide_backward(call, config, inputs):
    (dy,), (x, _weight, _bias), _saved = inputs
    g_rows, x_rows = row_layout(dy), row_layout(x)
    n_rows, width = call.problem["rows"], call.problem["width"]
    coefficients = Bound(
        _layer_norm_coefficients_kernel, (n_rows,),
        *g_rows.strides, *x_rows.strides, x_rows.n_inner,
        D=width, BLOCK_D=BLOCK, num_warps=BLOCK_WARPS,
    )  # fmt: skip
    layouts = g_rows, g_rows, x_rows
    kernel, total = columns_kernel(call, config, layouts, HAS_DSUM=False, CENTERED=True)

    def launch(inputs, scalars):
        (dy,), (x, weight, bias), (mean, rstd) = inputs
        dy, x_read, weight_read = g_rows.of(dy), x_rows.of(x), weight.contiguous()
        slope, shift = _statistics(x), _statistics(x)
        coefficients(dy, x_read, weight_read, mean, rstd, slope, shift)
        dx, dweight, dbias = x.new_empty(x.shape), total.partials(x), total.partials(x)
        kernel(dy, dy, x_read, weight_read, rstd, slope, mean, shift, dx, dweight, dbias)
        parameters = _parameter_gradients(call.wanted, total, dweight, dbias, weight, bias)
        return (dx if "x" in call.wanted else None, *parameters)

    return launch


FORWARD = Kernel("rows", empty, prepare, configs=forward_configs)
BACKWARD = Kernel("rows", empty_backward, prepare_backward, held, backward_configs)
WIDE_BACKWARD = Kernel("columns", empty_backward, prepare_wide_backward, configs=columns_configs)
