"""Computes the mixture's negative log-likelihood and its gradients in one Triton kernel.

For each target, with w = softmax_k(logit), s = log sigma, z = (y − mu)·e^−s, and responsibilities
r:

    lp_k = log w_k − Σ_d (z²/2 + s + log(2π)/2)    nll = −logsumexp_k lp    r = softmax_k lp

    dlogit = w − r    dmu = −r·z·e^−s    ds = r·(1 − z²)    dy = Σ_k r·z·e^−s

each divided by the number of targets that count: all, or the first n_targets[b] of sample b. With a
floor s = logaddexp(log_sigma, log sigma_min), and ds gets the factor e^(log_sigma − s). All is in
float32, in log space. Programs write partial sums of the loss, and a second, small launch adds them
up in a fixed order. The backward pass only scales the saved gradients.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tnp.dispatch.launcher import Bound
from tnp.dispatch.spec import Kernel
from tnp.ops._shared.losses import scaling
from tnp.ops._shared.operands import dense, near
from tnp.ops._shared.primitives import INTERPRETED, KernelConfig, cast
from tnp.ops._shared.ranges import asserting, between
from tnp.ops._shared.rows import as_batches, bound_sum

LOG_SQRT_2_PI = tl.constexpr(0.5 * math.log(2.0 * math.pi))
LOG2_E_HIGH = tl.constexpr(1.44269502162933349609375)  # log2(e) as float32, and its rounding error
LOG2_E_LOW = tl.constexpr(1.925963033500011079e-08)
LN_2 = tl.constexpr(0.6931471805599453)


@dataclass(frozen=True)
class Config(KernelConfig):
    """Sets how many targets times padded components a program holds."""

    elements: int
    num_warps: int


# A program has 16 targets at 10 components. On an H200, 32,000 targets then take 10.7 µs with the
# reduction. With 32 and 64 targets a program they take 20.0 and 20.3 µs.
CONFIG = Config(256, 2)


@triton.jit
def _exp(x):
    """Returns e^x, also accurate for |x| far from 0, where rounded x·log2(e) loses digits."""
    if INTERPRETED:
        return tl.exp(x)
    x = tl.where(x < -200.0, -200.0, x)  # the rounding error of −inf would be NaN
    high = x * LOG2_E_HIGH
    low = tl.fma(x, LOG2_E_HIGH, -high) + x * LOG2_E_LOW
    return tl.exp2(high) * (1.0 + low * LN_2)


@triton.jit
def _standardize(base, y, k_mask, d, log_sigma_min, D_Y: tl.constexpr, HAS_FLOOR: tl.constexpr):
    """Returns z, s, e^−s and d s/d log_sigma of output dimension d, [ROWS, BLOCK_K] each."""
    mu = tl.load(base + 1 + d, mask=k_mask, other=0.0).to(tl.float32)
    log_sigma = tl.load(base + 1 + D_Y + d, mask=k_mask, other=0.0).to(tl.float32)
    s = log_sigma
    slope = tl.full(s.shape, 1.0, tl.float32)
    if HAS_FLOOR:
        above = tl.maximum(log_sigma, log_sigma_min)
        below = tl.minimum(log_sigma, log_sigma_min)
        s = above + tl.log(1.0 + _exp(below - above))
        slope = _exp(log_sigma - s)
    inverse = _exp(-s)
    return (y[:, None] - mu) * inverse, s, inverse, slope


@triton.jit(do_not_specialize=["n_rows", "n_inner", "stride_yb", "stride_yl", "stride_yd", "batch"])
def _mixture_nll_kernel(
    parameters_ptr, y_ptr, n_targets_ptr, partials_ptr, dparameters_ptr, dy_ptr,
    stride_yb, stride_yl, stride_yd, n_rows, n_inner, batch, log_sigma_min,
    K: tl.constexpr, BLOCK_K: tl.constexpr, D_Y: tl.constexpr, ELEMENTS: tl.constexpr,
    HAS_FLOOR: tl.constexpr, WITH_DPARAMETERS: tl.constexpr, WITH_DY: tl.constexpr,
    HAS_N_TARGETS: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = ELEMENTS // BLOCK_K
    WIDTH: tl.constexpr = 1 + 2 * D_Y
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    offs_k = tl.arange(0, BLOCK_K)
    counts = rows < n_rows
    per_target = 1.0 / n_rows
    if HAS_N_TARGETS:
        of_row = tl.load(n_targets_ptr + rows // n_inner, mask=counts, other=0)
        outside = (of_row < 0) | (of_row > n_inner)
        counts = counts & ((rows % n_inner < of_row) | outside)
        samples = tl.arange(0, BLOCK_B)
        of_all = tl.load(n_targets_ptr + samples, mask=samples < batch, other=0)
        of_all = tl.minimum(tl.maximum(of_all, 0), n_inner)
        per_target = 1.0 / tl.sum(of_all, 0).to(tl.float32)
    within = (rows < n_rows)[:, None] & (offs_k < K)[None, :]
    mask = counts[:, None] & (offs_k < K)[None, :]
    offs = (rows.to(tl.int64)[:, None] * K + offs_k[None, :]) * WIDTH
    base = parameters_ptr + offs
    y_ptrs = y_ptr + (rows // n_inner).to(tl.int64) * stride_yb
    y_ptrs += (rows % n_inner).to(tl.int64) * stride_yl

    # Padding has weight 0. Rows that do not count are mixtures of zeros, which are not read.
    logit = tl.load(base, mask=mask, other=0.0).to(tl.float32)
    logit = tl.where((offs_k < K)[None, :], logit, float("-inf"))
    logit -= tl.max(logit, 1)[:, None]
    log_weight = logit - tl.log(tl.sum(_exp(logit), 1))[:, None]
    if HAS_N_TARGETS:  # a sample whose number is out of range becomes NaN
        log_weight = tl.where(outside[:, None], float("nan"), log_weight)
    log_normal = tl.zeros([ROWS, BLOCK_K], tl.float32)
    for d in tl.static_range(D_Y):
        y = tl.load(y_ptrs + d * stride_yd, mask=counts, other=0.0).to(tl.float32)
        z, s, _, _ = _standardize(base, y, mask, d, log_sigma_min, D_Y, HAS_FLOOR)
        log_normal += -0.5 * z * z - s - LOG_SQRT_2_PI
    lp = log_weight + log_normal
    lp_max = tl.max(lp, 1)
    # If every component gives y the density 0, the loss is inf; −inf − (−inf) would be NaN.
    lp_max = tl.where(lp_max == float("-inf"), 0.0, lp_max)
    p = _exp(lp - lp_max[:, None])
    p_sum = tl.sum(p, 1)
    nll = -(lp_max + tl.log(p_sum))
    tl.store(partials_ptr + tl.program_id(0), tl.sum(tl.where(counts, nll, 0.0), 0) * per_target)

    if WITH_DPARAMETERS or WITH_DY:
        r = p / p_sum[:, None]
        dtype: tl.constexpr = dparameters_ptr.dtype.element_ty
        dbase = dparameters_ptr + offs
        if WITH_DPARAMETERS:
            dlogit = tl.where(mask, (_exp(log_weight) - r) * per_target, 0.0)
            tl.store(dbase, cast(dlogit, dtype), mask=within)
        for d in tl.static_range(D_Y):
            y = tl.load(y_ptrs + d * stride_yd, mask=counts, other=0.0).to(tl.float32)
            z, _, inverse, slope = _standardize(base, y, mask, d, log_sigma_min, D_Y, HAS_FLOOR)
            # r·z first, and then ·z: if z² overflows, r is 0, and so is 0 · z.
            rz = r * z
            if WITH_DPARAMETERS:
                dmu = tl.where(mask, -rz * inverse * per_target, 0.0)
                ds = tl.where(mask, (r - rz * z) * slope * per_target, 0.0)
                tl.store(dbase + 1 + d, cast(dmu, dtype), mask=within)
                tl.store(dbase + 1 + D_Y + d, cast(ds, dtype), mask=within)
            if WITH_DY:
                dy = tl.where(counts, tl.sum(rz * inverse, 1) * per_target, 0.0)
                dy_ptrs = dy_ptr + rows.to(tl.int64) * D_Y + d
                tl.store(dy_ptrs, cast(dy, dy_ptr.dtype.element_ty), mask=rows < n_rows)


def configs(call):
    return (CONFIG,)


def empty(wanted, inputs):
    parameters, y, _ = inputs
    loss = parameters.new_empty((), dtype=torch.float32)
    dparameters = parameters.new_empty(parameters.shape if "parameters" in wanted else 0)
    return (loss,), (dparameters, y.new_empty(y.shape if "y" in wanted else 0))


def prepare(call, config, inputs):
    n_rows, k = call.problem["rows"], call.problem["n_components"]
    block_k = triton.next_power_of_2(k)
    n_programs = triton.cdiv(n_rows, config.elements // block_k)
    of_y = (as_batches(inputs[1]),)
    read = near(of_y, ((2,),))
    (y_rows,) = read(of_y)
    has_floor, has_n_targets = call.problem["floor"], call.problem["n_targets"]
    batch = y_rows.shape[0]
    kernel = Bound(
        _mixture_nll_kernel, (n_programs,), *y_rows.stride(), n_rows, y_rows.shape[1], batch,
        K=k, BLOCK_K=block_k, D_Y=call.problem["d_y"], HAS_FLOOR=has_floor,
        WITH_DPARAMETERS="parameters" in call.wanted, WITH_DY="y" in call.wanted,
        HAS_N_TARGETS=has_n_targets,
        BLOCK_B=triton.next_power_of_2(batch) if has_n_targets else 1,
        **config.kernel_arguments(),
    )  # fmt: skip
    add = bound_sum(n_programs, 1)
    of_partials = dense(n_programs)
    of_dparameters, of_dy = (dense(*x.shape) for x in empty(call.wanted, inputs)[1])

    def launch(inputs, scalars):
        parameters, y, n_targets = inputs
        loss = parameters.new_empty_strided((), (), dtype=torch.float32)
        dparameters = parameters.new_empty_strided(*of_dparameters)
        dy = y.new_empty_strided(*of_dy)
        partials = loss.new_empty_strided(*of_partials)
        log_sigma_min = math.log(scalars[0]) if has_floor else 0.0
        (y_rows,) = read((as_batches(y),))
        kernel(
            parameters.contiguous(), y_rows, n_targets if has_n_targets else y, partials,
            dparameters, dy, log_sigma_min,
        )  # fmt: skip
        add(partials, loss, 1.0)
        return (loss,), (dparameters, dy)

    if not has_n_targets:
        return launch
    return asserting(
        launch, lambda inputs: [between("n_targets", inputs[2], 0, inputs[1].shape[1])]
    )


def empty_backward(wanted, inputs):
    _, _, saved = inputs
    named = zip(("parameters", "y"), saved, strict=True)
    return tuple(x.new_empty(x.shape) if name in wanted else None for name, x in named)


def prepare_backward(call, config, inputs):
    _, _, saved = inputs
    named = zip(("parameters", "y"), saved, strict=True)
    kernels = [scaling(x.numel()) if name in call.wanted else None for name, x in named]

    def launch(inputs, scalars):
        (dloss,), _, saved = inputs
        results = empty_backward(call.wanted, inputs)
        for kernel, gradient, result in zip(kernels, saved, results, strict=True):
            if kernel is not None:
                kernel(gradient, dloss, dloss, result, 1.0)
        return results

    return launch


_OPTIONS = ("floor", "n_targets")
FORWARD = Kernel("triton", empty, prepare, configs=configs, options=_OPTIONS)
BACKWARD = Kernel("triton", empty_backward, prepare_backward, options=_OPTIONS)
