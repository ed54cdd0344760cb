"""silu(gate) ∘ rms_norm(x) in one pass: a program holds whole rows, each read and written once.

With rstd = 1/√(mean_d x² + eps), x̂ = x·rstd, s = 1 / (1 + e^−gate), silu = gate·s:

    y = silu·x̂·weight

and backward, with g = dy·silu·weight, which is the gradient of x̂:

    dx = rstd·(g − x̂·mean_d(g·x̂))    dgate = dy·x̂·weight·(s + silu·(1 − s))
    dweight = Σ_rows dy·silu·x̂

Computed in float32. The backward pass computes rstd again. Its programs walk the rows and keep
dweight in registers, so that each writes one partial [width], added up by a second, small launch in
a fixed order.
"""

from dataclasses import dataclass
from itertools import product

import torch
import triton
import triton.language as tl

from tnp.contract import Kernel
from tnp.launch import Bound
from tnp.ops.primitives import cast
from tnp.ops.rows import sum_launch
from tnp.ops.walks import row_offsets, walk

MAX_WIDTH = 16384  # a whole row lies in registers
WEIGHT_AHEAD = 8192  # widths to which registers hold the weight beside the rows
WARP = 32


@dataclass(frozen=True)
class Config:
    """Rows that a program holds at a time."""

    rows: int
    num_warps: int


@dataclass(frozen=True)
class BackwardConfig(Config):
    """And programs a multiprocessor, and stages of the loads ahead."""

    per_multiprocessor: int
    num_stages: int


@triton.jit
def _load(ptr, offs, mask):
    return tl.load(ptr + offs, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _rms_norm_swiglu_fwd_kernel(
    x_ptr, gate_ptr, weight_ptr, y_ptr,
    n_rows, n_inner, stride_xo, stride_xi, stride_go, stride_gi,
    eps,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, WEIGHT_AHEAD: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    offs_d = tl.arange(0, BLOCK_D)
    mask = (rows < n_rows)[:, None] & (offs_d < D)[None, :]
    offs_x = row_offsets(rows, n_inner, stride_xo, stride_xi)[:, None] + offs_d[None, :]
    offs_g = row_offsets(rows, n_inner, stride_go, stride_gi)[:, None] + offs_d[None, :]
    # All loads are under way before the sum waits for the first, where registers hold them.
    x = _load(x_ptr, offs_x, mask)
    gate = _load(gate_ptr, offs_g, mask)
    if WEIGHT_AHEAD:
        weight = _load(weight_ptr, offs_d, offs_d < D)
    rstd = 1.0 / tl.sqrt_rn(tl.sum(x * x, 1) / D + eps)
    if not WEIGHT_AHEAD:
        weight = _load(weight_ptr, offs_d, offs_d < D)
    y = gate * tl.sigmoid(gate) * (x * rstd[:, None] * weight[None, :])
    offs_y = rows.to(tl.int64)[:, None] * D + offs_d[None, :]
    tl.store(y_ptr + offs_y, cast(y, y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rms_norm_swiglu_bwd_kernel(
    dy_ptr, x_ptr, gate_ptr, weight_ptr, dx_ptr, dgate_ptr, partials_ptr,
    n_rows, n_inner, stride_yo, stride_yi, stride_xo, stride_xi, stride_go, stride_gi,
    eps,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, WEIGHT_AHEAD: tl.constexpr,
    STAGES: tl.constexpr,
    WITH_X: tl.constexpr, WITH_GATE: tl.constexpr, WITH_WEIGHT: tl.constexpr,
):  # fmt: skip
    """Program p takes every `num_programs`-th group of ROWS rows and writes partials[p]."""
    offs_d = tl.arange(0, BLOCK_D)
    if WEIGHT_AHEAD:
        weight = _load(weight_ptr, offs_d, offs_d < D)
    dweight = tl.zeros([ROWS, BLOCK_D], tl.float32)
    step = tl.num_programs(0) * ROWS
    for start in tl.range(tl.program_id(0) * ROWS, n_rows, step, num_stages=STAGES):
        rows = start + tl.arange(0, ROWS)
        mask = (rows < n_rows)[:, None] & (offs_d < D)[None, :]
        offs_x = row_offsets(rows, n_inner, stride_xo, stride_xi)[:, None] + offs_d[None, :]
        offs_g = row_offsets(rows, n_inner, stride_go, stride_gi)[:, None] + offs_d[None, :]
        offs_y = row_offsets(rows, n_inner, stride_yo, stride_yi)[:, None] + offs_d[None, :]
        offs_out = rows.to(tl.int64)[:, None] * D + offs_d[None, :]
        x = _load(x_ptr, offs_x, mask)
        gate = _load(gate_ptr, offs_g, mask)
        dy = _load(dy_ptr, offs_y, mask)
        rstd = 1.0 / tl.sqrt_rn(tl.sum(x * x, 1) / D + eps)
        if not WEIGHT_AHEAD:
            weight = _load(weight_ptr, offs_d, offs_d < D)
        s = tl.sigmoid(gate)
        if WITH_GATE:
            normalized = x * rstd[:, None] * weight[None, :]
            dgate = dy * normalized * (s + gate * s * (1.0 - s))
            tl.store(dgate_ptr + offs_out, cast(dgate, dgate_ptr.dtype.element_ty), mask=mask)
        dnormalized = dy * (gate * s)
        if WITH_WEIGHT:
            dweight += dnormalized * (x * rstd[:, None])
        if WITH_X:
            g = dnormalized * weight[None, :]
            shrink = rstd * (rstd * (rstd * (tl.sum(g * x, 1) / D)))
            dx = g * rstd[:, None] - x * shrink[:, None]
            tl.store(dx_ptr + offs_out, cast(dx, dx_ptr.dtype.element_ty), mask=mask)
    if WITH_WEIGHT:
        partial_ptrs = partials_ptr + tl.program_id(0).to(tl.int64) * D + offs_d
        tl.store(partial_ptrs, tl.sum(dweight, 0), mask=offs_d < D)


def _warps(elements: int, a_thread: int) -> int:
    return min(max(elements // (WARP * a_thread), 1), 32)


def configs(call):
    block_d = triton.next_power_of_2(call.problem["width"])
    rows = max(1, 1024 // block_d)
    found = [Config(rows, _warps(rows * block_d, a_thread)) for a_thread in (16, 8, 32)]
    return tuple(dict.fromkeys(found))


def configs_backward(call):
    block_d = triton.next_power_of_2(call.problem["width"])
    rows = max(1, 512 // block_d)
    ahead = 3 * rows * block_d * call.problem.itemsize  # bytes of a stage
    found = []
    # With 16 elements a thread has 128 registers, with 8 half as many.
    for (a_thread, threads), num_stages in product(((16, 512), (8, 1024)), (2, 1, 3)):
        num_warps = _warps(rows * block_d, a_thread)
        programs = max(1, threads // (WARP * num_warps))
        if num_stages == 1 or num_stages * ahead * programs <= call.target.shared_bytes:
            found.append(BackwardConfig(rows, num_warps, programs, num_stages))
    return tuple(dict.fromkeys(found))


def supported(call):
    width = call.problem["width"]
    return None if width <= MAX_WIDTH else f"it takes rows of at most {MAX_WIDTH}, not {width}"


def _sizes(config, width):
    return {
        "D": width,
        "BLOCK_D": triton.next_power_of_2(width),
        "ROWS": config.rows,
        "WEIGHT_AHEAD": width <= WEIGHT_AHEAD,
        "num_warps": config.num_warps,
    }


def empty(wanted, inputs):
    x, _gate, _weight = inputs
    return (x.new_empty(x.shape),), ()


def prepare(call, config, inputs):
    x, gate, weight = inputs
    walked, width = walk(x, gate), len(weight)
    kernel = Bound(
        _rms_norm_swiglu_fwd_kernel, (triton.cdiv(walked.n_rows, config.rows),),
        walked.n_rows, *walked.integers,
        **_sizes(config, width),
    )  # fmt: skip

    def launch(inputs, scalars):
        x, gate, weight = inputs
        y = x.new_empty(x.shape)
        kernel(*walked.laid_out((x, gate)), weight.contiguous(), y, *scalars)
        return (y,), ()

    return launch


def empty_backward(wanted, inputs):
    _gradients, kept, _saved = inputs
    named = zip(("x", "gate", "weight"), kept, strict=True)
    return tuple(x.new_empty(x.shape) if name in wanted else None for name, x in named)


def prepare_backward(call, config, inputs):
    (dy,), (x, gate, weight), _saved = inputs
    walked, width = walk(dy, x, gate), len(weight)
    with_x, with_gate, with_weight = (name in call.wanted for name in ("x", "gate", "weight"))
    n_programs = min(
        triton.cdiv(walked.n_rows, config.rows),
        config.per_multiprocessor * call.target.multiprocessors,
    )
    kernel = Bound(
        _rms_norm_swiglu_bwd_kernel, (n_programs,), walked.n_rows, *walked.integers,
        WITH_X=with_x, WITH_GATE=with_gate, WITH_WEIGHT=with_weight, STAGES=config.num_stages,
        **_sizes(config, width),
    )  # fmt: skip
    add_up = sum_launch(n_programs, width)

    def launch(inputs, scalars):
        (dy,), (x, gate, weight), _saved = inputs
        dx = x.new_empty(x.shape) if with_x else None
        dgate = gate.new_empty(gate.shape) if with_gate else None
        partials = dweight = None
        if with_weight:
            partials = weight.new_empty((n_programs, width), dtype=torch.float32)
        # What is not wanted is not written: any tensor stands in its place.
        results = (x if out is None else out for out in (dx, dgate, partials))
        kernel(*walked.laid_out((dy, x, gate)), weight.contiguous(), *results, *scalars)
        if with_weight:
            dweight = weight.new_empty((width,), dtype=torch.float32)
            add_up(partials, dweight, 1.0)
            dweight = dweight.to(weight.dtype)
        return dx, dgate, dweight

    return launch


FORWARD = Kernel("triton", empty, prepare, supported, configs)
BACKWARD = Kernel("triton", empty_backward, prepare_backward, supported, configs_backward)
