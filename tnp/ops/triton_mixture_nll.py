"""The mixture's negative log-likelihood and its gradients in one Triton kernel.

Per target, with w = softmax_k(logit), s = log sigma, z = (y − mu)·e^−s, and responsibilities

    lp_k = log w_k − Σ_d (z²/2 + s + log(2π)/2)    nll = −logsumexp_k lp    r = softmax_k lp

    dlogit = w − r    dmu = −r·z·e^−s    ds = r·(1 − z²)    dy = Σ_k r·z·e^−s

each over the number of targets. With a floor s = logaddexp(log_sigma, log sigma_min), and ds gets
the factor e^(log_sigma − s). All in float32, in log space; programs write partial sums of the loss,
added up by a second, small launch in a fixed order. The backward pass only scales what is saved.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tnp.ops.primitives import INTERPRETED, KernelConfig, cast
from tnp.ops.rows import as_batches, sum_partials

LOG_SQRT_2_PI = tl.constexpr(0.5 * math.log(2.0 * math.pi))
LOG2_E_HIGH = tl.constexpr(1.44269502162933349609375)  # log2(e) as float32, and what it leaves out
LOG2_E_LOW = tl.constexpr(1.925963033500011079e-08)
LN_2 = tl.constexpr(0.6931471805599453)

SCALE_BLOCK = 1024


@dataclass(frozen=True)
class Config(KernelConfig):
    """Targets times padded components that a program holds."""

    elements: int
    num_warps: int


# 16 targets a program at 10 components. On an H200, 32,000 targets: 10.7 µs with the reduction;
# with twice and four times as many a program 20.0 and 20.3.
CONFIG = Config(256, 2)


@triton.jit
def _exp(x):
    """e^x to float32's accuracy for |x| far from 0, where x·log2(e), rounded, loses digits."""
    if INTERPRETED:
        return tl.exp(x)
    x = tl.where(x < -200.0, -200.0, x)  # the digits lost of −inf would be NaN
    high = x * LOG2_E_HIGH
    low = tl.fma(x, LOG2_E_HIGH, -high) + x * LOG2_E_LOW
    return tl.exp2(high) * (1.0 + low * LN_2)


@triton.jit
def _standardize(base, y, k_mask, d, log_sigma_min, D_Y: tl.constexpr, HAS_FLOOR: tl.constexpr):
    """z, s, e^−s and d s/d log_sigma of output dimension d, [ROWS, BLOCK_K] each."""
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


@triton.jit(do_not_specialize=["n_targets", "n_inner", "stride_yb", "stride_yl", "stride_yd"])
def _mixture_nll_kernel(
    parameters_ptr, y_ptr, partials_ptr, dparameters_ptr, dy_ptr,
    stride_yb, stride_yl, stride_yd, n_targets, n_inner, per_target, log_sigma_min,
    K: tl.constexpr, BLOCK_K: tl.constexpr, D_Y: tl.constexpr, ELEMENTS: tl.constexpr,
    HAS_FLOOR: tl.constexpr, WITH_DPARAMETERS: tl.constexpr, WITH_DY: tl.constexpr,
):  # fmt: skip
    """`per_target` is 1 / n_targets."""
    ROWS: tl.constexpr = ELEMENTS // BLOCK_K
    WIDTH: tl.constexpr = 1 + 2 * D_Y
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    offs_k = tl.arange(0, BLOCK_K)
    mask = (rows < n_targets)[:, None] & (offs_k < K)[None, :]
    offs = (rows.to(tl.int64)[:, None] * K + offs_k[None, :]) * WIDTH
    base = parameters_ptr + offs
    y_ptrs = y_ptr + (rows // n_inner).to(tl.int64) * stride_yb
    y_ptrs += (rows % n_inner).to(tl.int64) * stride_yl

    # Padding has weight 0; rows past the end are mixtures of zeros, which nothing reads.
    logit = tl.load(base, mask=mask, other=0.0).to(tl.float32)
    logit = tl.where((offs_k < K)[None, :], logit, float("-inf"))
    logit -= tl.max(logit, 1)[:, None]
    log_weight = logit - tl.log(tl.sum(_exp(logit), 1))[:, None]
    log_normal = tl.zeros([ROWS, BLOCK_K], tl.float32)
    for d in tl.static_range(D_Y):
        y = tl.load(y_ptrs + d * stride_yd, mask=rows < n_targets, other=0.0).to(tl.float32)
        z, s, _, _ = _standardize(base, y, mask, d, log_sigma_min, D_Y, HAS_FLOOR)
        log_normal += -0.5 * z * z - s - LOG_SQRT_2_PI
    lp = log_weight + log_normal
    lp_max = tl.max(lp, 1)
    # Where no component reaches y the loss is inf; −inf less −inf would make it NaN.
    lp_max = tl.where(lp_max == float("-inf"), 0.0, lp_max)
    p = _exp(lp - lp_max[:, None])
    p_sum = tl.sum(p, 1)
    nll = -(lp_max + tl.log(p_sum))
    tl.store(partials_ptr + tl.program_id(0), tl.sum(tl.where(rows < n_targets, nll, 0.0), 0))

    if WITH_DPARAMETERS or WITH_DY:
        r = p / p_sum[:, None]
        dtype: tl.constexpr = dparameters_ptr.dtype.element_ty
        dbase = dparameters_ptr + offs
        if WITH_DPARAMETERS:
            dlogit = (_exp(log_weight) - r) * per_target
            tl.store(dbase, cast(dlogit, dtype), mask=mask)
        for d in tl.static_range(D_Y):
            y = tl.load(y_ptrs + d * stride_yd, mask=rows < n_targets, other=0.0).to(tl.float32)
            z, _, inverse, slope = _standardize(base, y, mask, d, log_sigma_min, D_Y, HAS_FLOOR)
            # r·z before ·z: where z² overflows r is 0, and 0 · z is.
            rz = r * z
            if WITH_DPARAMETERS:
                dmu = -rz * inverse * per_target
                ds = (r - rz * z) * slope * per_target
                tl.store(dbase + 1 + d, cast(dmu, dtype), mask=mask)
                tl.store(dbase + 1 + D_Y + d, cast(ds, dtype), mask=mask)
            if WITH_DY:
                dy = tl.sum(rz * inverse, 1) * per_target
                dy_ptrs = dy_ptr + rows.to(tl.int64) * D_Y + d
                tl.store(dy_ptrs, cast(dy, dy_ptr.dtype.element_ty), mask=rows < n_targets)


@triton.jit(do_not_specialize=["n"])
def _scale_kernel(gradient_ptr, dloss_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gradient = tl.load(gradient_ptr + offs, mask=offs < n, other=0.0).to(tl.float32)
    scaled = gradient * tl.load(dloss_ptr).to(tl.float32)
    tl.store(out_ptr + offs, cast(scaled, out_ptr.dtype.element_ty), mask=offs < n)


def loss_and_gradients(
    parameters: torch.Tensor,
    y: torch.Tensor,
    sigma_min: float,
    with_dparameters: bool,
    with_dy: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The mean, dparameters and dy, the latter two empty where not asked for."""
    k, d_y = parameters.shape[-2], y.shape[-1]
    y_rows = as_batches(y)
    n_targets = y_rows.shape[0] * y_rows.shape[1]
    block_k = triton.next_power_of_2(k)
    n_programs = triton.cdiv(n_targets, CONFIG.elements // block_k)
    partials = torch.empty(n_programs, dtype=torch.float32, device=y.device)
    dparameters = parameters.new_empty(parameters.shape if with_dparameters else 0)
    dy = y.new_empty(y.shape if with_dy else 0)
    _mixture_nll_kernel[(n_programs,)](
        parameters, y_rows, partials, dparameters, dy,
        *y_rows.stride(), n_targets, y_rows.shape[1],
        1.0 / n_targets, math.log(sigma_min) if sigma_min > 0 else 0.0,
        K=k, BLOCK_K=block_k, D_Y=d_y, HAS_FLOOR=sigma_min > 0,
        WITH_DPARAMETERS=with_dparameters, WITH_DY=with_dy, **CONFIG.kernel_arguments(),
    )  # fmt: skip
    return sum_partials(partials, 1.0 / n_targets), dparameters, dy


def scaled(gradient: torch.Tensor, dloss: torch.Tensor) -> torch.Tensor:
    """dloss · gradient in the gradient's dtype, contiguous."""
    out = gradient.new_empty(gradient.shape)
    _scale_kernel[(triton.cdiv(out.numel(), SCALE_BLOCK),)](
        gradient, dloss, out, out.numel(), BLOCK=SCALE_BLOCK
    )
    return out
