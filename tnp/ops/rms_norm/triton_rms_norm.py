"""Computes RMSNorm in Triton: a program holds whole rows, each read once and written once.

    sum = x + update    rstd = 1/√(mean_d sum² + eps)    normalized = sum · rstd · weight

and with x̂ = sum·rstd and g = dnormalized·weight

    dx = dsum + rstd·(g − x̂·mean_d(g·x̂))    dweight = Σ_rows dnormalized·x̂

It computes in float32. The backward pass reads sum, dnormalized and dsum, and computes rstd again.
Its programs walk the rows and keep dweight in registers. Each writes one partial sum [D], and a
second, small launch adds them up in a fixed order. Rows too wide for either pass are read twice
(`tnp.ops._shared.norms` explains the backward pass). (Zhang and Sennrich, Root Mean Square Layer
Normalization, arXiv 1910.07467.)
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

# Columns of a block of a row that the forward pass reads twice. On an H200, 4,096 rows of 16,384 in
# bfloat16 take 69.3 µs. With blocks of 4,096 and 8 warps they take 72.5 µs, with rows held in
# registers 102. A copy takes 64.8.
WIDE_BLOCK, WIDE_WARPS = 8192, 16


@triton.jit(do_not_specialize=["n_rows", "n_inner"])
def _rms_norm_fwd_kernel(
    x_ptr, update_ptr, weight_ptr, sum_ptr, normalized_ptr,
    stride_xb, stride_xl, stride_ub, stride_ul,
    n_rows, n_inner, eps,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, HAS_UPDATE: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    offs_d = tl.arange(0, BLOCK_D)
    mask = (rows < n_rows)[:, None] & (offs_d < D)[None, :]
    offs_x = row_offsets(rows, n_inner, stride_xb, stride_xl)[:, None] + offs_d[None, :]
    offs_out = rows.to(tl.int64)[:, None] * D + offs_d[None, :]
    x = load_rows(x_ptr, offs_x, mask)
    if HAS_UPDATE:
        offs_u = row_offsets(rows, n_inner, stride_ub, stride_ul)[:, None] + offs_d[None, :]
        x = cast(x + load_rows(update_ptr, offs_u, mask), sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + offs_out, x, mask=mask)
        x = x.to(tl.float32)
    weight = tl.load(weight_ptr + offs_d, mask=offs_d < D, other=0.0).to(tl.float32)
    rstd = 1.0 / tl.sqrt_rn(tl.sum(x * x, 1) / D + eps)
    normalized = cast(x * rstd[:, None] * weight[None, :], normalized_ptr.dtype.element_ty)
    tl.store(normalized_ptr + offs_out, normalized, mask=mask)


@triton.jit(do_not_specialize=["n_inner"])
def _rms_norm_wide_fwd_kernel(
    x_ptr, update_ptr, weight_ptr, sum_ptr, normalized_ptr,
    stride_xb, stride_xl, stride_ub, stride_ul,
    n_inner, eps,
    D: tl.constexpr, BLOCK_D: tl.constexpr, HAS_UPDATE: tl.constexpr,
):  # fmt: skip
    """Normalizes one row a program, in blocks of columns; a cache serves the second reading."""
    row = tl.program_id(0)
    x_ptr += row_offsets(row, n_inner, stride_xb, stride_xl)
    update_ptr += row_offsets(row, n_inner, stride_ub, stride_ul)
    sum_ptr += row.to(tl.int64) * D
    normalized_ptr += row.to(tl.int64) * D
    squares = tl.zeros([BLOCK_D], tl.float32)
    for start in tl.static_range(0, D, BLOCK_D):
        offs_d = start + tl.arange(0, BLOCK_D)
        x = load_rows(x_ptr, offs_d, offs_d < D)
        if HAS_UPDATE:
            update = load_rows(update_ptr, offs_d, offs_d < D)
            x = cast(x + update, sum_ptr.dtype.element_ty)
            tl.store(sum_ptr + offs_d, x, mask=offs_d < D)
            x = x.to(tl.float32)
        squares += x * x
    rstd = 1.0 / tl.sqrt_rn(tl.sum(squares) / D + eps)
    # Stores are visible to the whole program, which was synchronized for the sum of squares.
    read_ptr = sum_ptr if HAS_UPDATE else x_ptr
    for start in tl.static_range(0, D, BLOCK_D):
        offs_d = start + tl.arange(0, BLOCK_D)
        x = load_rows(read_ptr, offs_d, offs_d < D)
        weight = load_rows(weight_ptr, offs_d, offs_d < D)
        normalized = cast(x * rstd * weight, normalized_ptr.dtype.element_ty)
        tl.store(normalized_ptr + offs_d, normalized, mask=offs_d < D)


@triton.jit(do_not_specialize=["n_rows", "n_inner"])
def _rms_norm_bwd_kernel(
    dnormalized_ptr, dsum_ptr, x_ptr, weight_ptr, dx_ptr, partials_ptr,
    stride_gb, stride_gl, stride_sb, stride_sl, stride_xb, stride_xl,
    n_rows, n_inner, eps,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    HAS_DSUM: tl.constexpr,
):  # fmt: skip
    """Writes partials[p] in program p, which takes every `num_programs`-th group of ROWS rows."""
    offs_d = tl.arange(0, BLOCK_D)
    weight = tl.load(weight_ptr + offs_d, mask=offs_d < D, other=0.0).to(tl.float32)
    dweight = tl.zeros([ROWS, BLOCK_D], tl.float32)
    step = tl.num_programs(0) * ROWS
    for start in tl.range(tl.program_id(0) * ROWS, n_rows, step, num_stages=STAGES):
        rows = start + tl.arange(0, ROWS)
        mask = (rows < n_rows)[:, None] & (offs_d < D)[None, :]
        offs_x = row_offsets(rows, n_inner, stride_xb, stride_xl)[:, None] + offs_d[None, :]
        offs_g = row_offsets(rows, n_inner, stride_gb, stride_gl)[:, None] + offs_d[None, :]
        x = load_rows(x_ptr, offs_x, mask)
        dnormalized = load_rows(dnormalized_ptr, offs_g, mask)
        if HAS_DSUM:
            offs_s = row_offsets(rows, n_inner, stride_sb, stride_sl)[:, None] + offs_d[None, :]
            dsum = load_rows(dsum_ptr, offs_s, mask)
        rstd = 1.0 / tl.sqrt_rn(tl.sum(x * x, 1) / D + eps)
        g = dnormalized * weight[None, :]
        # Both sums use only loaded values, so neither waits for the other.
        shrink = rstd * (rstd * (rstd * (tl.sum(g * x, 1) / D)))
        dx = g * rstd[:, None] - x * shrink[:, None]
        if HAS_DSUM:
            dx += dsum
        dweight += dnormalized * (x * rstd[:, None])
        offs_out = rows.to(tl.int64)[:, None] * D + offs_d[None, :]
        tl.store(dx_ptr + offs_out, cast(dx, dx_ptr.dtype.element_ty), mask=mask)
    partial_ptrs = partials_ptr + tl.program_id(0).to(tl.int64) * D + offs_d
    tl.store(partial_ptrs, tl.sum(dweight, 0), mask=offs_d < D)


@triton.jit(do_not_specialize=["n_inner"])
def _rms_norm_coefficients_kernel(
    dnormalized_ptr, x_ptr, weight_ptr, rstd_ptr, slope_ptr,
    stride_gb, stride_gl, stride_xb, stride_xl, n_inner, eps,
    D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Computes a row in a program: dx = rstd·g + slope·x, + dsum."""
    row = tl.program_id(0)
    x_ptr += row_offsets(row, n_inner, stride_xb, stride_xl)
    dnormalized_ptr += row_offsets(row, n_inner, stride_gb, stride_gl)
    squares = tl.zeros([BLOCK_D], tl.float32)
    products = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, D, BLOCK_D):
        offs_d = start + tl.arange(0, BLOCK_D)
        x = load_rows(x_ptr, offs_d, offs_d < D)
        dnormalized = load_rows(dnormalized_ptr, offs_d, offs_d < D)
        weight = load_rows(weight_ptr, offs_d, offs_d < D)
        squares += x * x
        products += dnormalized * weight * x
    rstd = 1.0 / tl.sqrt_rn(tl.sum(squares) / D + eps)
    tl.store(rstd_ptr + row, rstd)
    tl.store(slope_ptr + row, -(rstd * (rstd * (rstd * (tl.sum(products) / D)))))


def empty(wanted, inputs):
    """Allocates the results of rms_norm, or of add_rms_norm if there is an update."""
    x = inputs[0]
    return tuple([x.new_empty(x.shape) for _ in inputs[1:]]), ()


def prepare(call, config, inputs):
    sizes = config.sizes(call.problem["width"], call.problem.itemsize)
    n_rows = call.problem["rows"]
    n_programs = triton.cdiv(n_rows, sizes["ROWS"])
    return _launch(call, inputs, _rms_norm_fwd_kernel, n_programs, (n_rows,), sizes)


def prepare_wide(call, config, inputs):
    sizes = {"D": call.problem["width"], "BLOCK_D": WIDE_BLOCK, "num_warps": WIDE_WARPS}
    return _launch(call, inputs, _rms_norm_wide_fwd_kernel, call.problem["rows"], (), sizes)


def _launch(call, inputs, kernel, n_programs, counts, sizes):
    x, *update, _weight = inputs
    x_rows = row_layout(x)
    update_rows = row_layout(update[0]) if update else x_rows
    strides, of_out = (*x_rows.strides, *update_rows.strides), dense(*x.shape)
    bound = Bound(
        kernel, (n_programs,), *strides, *counts, x_rows.n_inner,
        HAS_UPDATE=bool(update), **sizes,
    )  # fmt: skip

    def launch(inputs, scalars):
        x, *added, weight = inputs
        outputs = tuple([x.new_empty_strided(*of_out) for _ in inputs[1:]])
        x = x_rows.of(x)
        added = update_rows.of(added[0]) if added else x
        bound(x, added, weight.contiguous(), outputs[0], outputs[-1], *scalars)
        return outputs, ()

    return launch


def empty_backward(wanted, inputs):
    """Allocates dx. If the norm was not used, it returns the gradient of the sum."""
    gradients, (x, weight), _saved = inputs
    if gradients[-1] is None:
        return _results(wanted, gradients, gradients[0], None)
    dweight = weight.new_empty(weight.shape) if "weight" in wanted else None
    return _results(wanted, gradients, x.new_empty(x.shape), dweight)


def _results(wanted, gradients, dx, dweight):
    """Returns the wanted gradients. dx is the gradient of x, and of an update."""
    of_sum = [dx if name in wanted else None for name in ("x", "update")[: len(gradients)]]
    return *of_sum, dweight if "weight" in wanted else None


def _hand_on(call):
    def launch(inputs, scalars):
        return empty_backward(call.wanted, inputs)

    return launch


def _layouts(inputs):
    """Returns the layouts of dnormalized, of dsum (or dnormalized in its place), and of x."""
    (*dsum, dnormalized), (x, _weight), _saved = inputs
    has_dsum = any(gradient is not None for gradient in dsum)
    return has_dsum, tuple(map(row_layout, (dnormalized, dsum[0] if has_dsum else dnormalized, x)))


def prepare_backward(call, config, inputs):
    if inputs[0][-1] is None:
        return _hand_on(call)
    has_dsum, layouts = _layouts(inputs)
    g_rows, s_rows, x_rows = layouts
    n_rows, width = call.problem["rows"], call.problem["width"]
    sizes = config.sizes(width, call.problem.itemsize)
    n_tiles = triton.cdiv(n_rows, sizes["ROWS"])
    n_programs = programs(call.target, config.per_multiprocessor, n_tiles)
    kernel = Bound(
        _rms_norm_bwd_kernel, (n_programs,),
        *g_rows.strides, *s_rows.strides, *x_rows.strides, n_rows, x_rows.n_inner,
        HAS_DSUM=has_dsum, **sizes,
    )  # fmt: skip
    total, of_dx = ParameterSum(n_programs, width), dense(*inputs[1][0].shape)

    def launch(inputs, scalars):
        gradients, (x, weight), _saved = inputs
        dnormalized = g_rows.of(gradients[-1])
        dsum = s_rows.of(gradients[0]) if has_dsum else dnormalized
        dx, partials = x.new_empty_strided(*of_dx), total.partials(x)
        kernel(dnormalized, dsum, x_rows.of(x), weight.contiguous(), dx, partials, *scalars)
        dweight = total.of(partials, weight) if "weight" in call.wanted else None
        return _results(call.wanted, gradients, dx, dweight)

    return launch


def prepare_wide_backward(call, config, inputs):
    if inputs[0][-1] is None:
        return _hand_on(call)
    has_dsum, layouts = _layouts(inputs)
    g_rows, s_rows, x_rows = layouts
    n_rows, width = call.problem["rows"], call.problem["width"]
    coefficients = Bound(
        _rms_norm_coefficients_kernel, (n_rows,),
        *g_rows.strides, *x_rows.strides, x_rows.n_inner,
        D=width, BLOCK_D=BLOCK, num_warps=BLOCK_WARPS,
    )  # fmt: skip
    kernel, total = columns_kernel(call, config, layouts, HAS_DSUM=has_dsum, CENTERED=False)

    def launch(inputs, scalars):
        gradients, (x, weight), _saved = inputs
        dnormalized = g_rows.of(gradients[-1])
        dsum = s_rows.of(gradients[0]) if has_dsum else dnormalized
        x_read, weight_read = x_rows.of(x), weight.contiguous()
        rstd, slope = (x.new_empty(n_rows, dtype=torch.float32) for _ in range(2))
        coefficients(dnormalized, x_read, weight_read, rstd, slope, *scalars)
        dx, partials = x.new_empty(x.shape), total.partials(x)
        # RMSNorm is not centered: it has no means, shifts and bias.
        kernel(
            dnormalized, dsum, x_read, weight_read, rstd, slope, rstd, rstd, dx, partials, partials
        )
        dweight = total.of(partials, weight) if "weight" in call.wanted else None
        return _results(call.wanted, gradients, dx, dweight)

    return launch


FORWARD = Kernel("rows", empty, prepare, held, forward_configs)
WIDE_FORWARD = Kernel("blocks", empty, prepare_wide)
BACKWARD = Kernel("rows", empty_backward, prepare_backward, held, backward_configs)
WIDE_BACKWARD = Kernel("columns", empty_backward, prepare_wide_backward, configs=columns_configs)
