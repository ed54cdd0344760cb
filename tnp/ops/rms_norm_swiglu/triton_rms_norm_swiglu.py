"""Computes silu(gate) ∘ rms_norm(x) in one pass: a program reads and writes whole rows once.

With rstd = 1/√(mean_d x² + eps), x̂ = x·rstd, s = 1 / (1 + e^−gate), silu = gate·s:

    y = silu·x̂·weight

and in the backward pass, with g = dy·silu·weight, the gradient of x̂:

    dx = rstd·(g − x̂·mean_d(g·x̂))    dgate = dy·x̂·weight·(s + silu·(1 − s))
    dweight = Σ_rows dy·silu·x̂

All is in float32. The backward pass computes rstd again. Its programs walk the rows and keep
dweight in registers. Each writes one partial sum [width], and a second, small launch adds them up
in a fixed order. If registers cannot hold dweight, programs read their rows twice, by columns. Both
sums of a row use only loaded values, so the first reading gives both.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tnp.dispatch.launcher import Bound
from tnp.dispatch.spec import Kernel
from tnp.ops._shared.primitives import cast
from tnp.ops._shared.rows import bound_sum, load_rows, programs, row_offsets
from tnp.ops._shared.walks import walk

MAX_WIDTH = 16384  # the forward pass holds rows in registers up to this width
MAX_HELD = 8192  # both passes hold rows, and dweight, in registers up to this width
CHUNK = 2048  # columns of a block of a row that is read twice
WARP = 32


@dataclass(frozen=True)
class Config:
    """Sets the rows that a program holds at a time, and its warps."""

    rows: int
    num_warps: int


@dataclass(frozen=True)
class BackwardConfig(Config):
    """Sets also programs per multiprocessor, and stages of prefetched loads."""

    per_multiprocessor: int
    num_stages: int


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
    # A weight [1, BLOCK_D] has x's layout if a program has one row. Otherwise it passes through
    # shared memory.
    offs_w = offs_d[None, :]
    # If registers hold x, gate and weight, all three loads start before the sum waits for x.
    x = load_rows(x_ptr, offs_x, mask)
    gate = load_rows(gate_ptr, offs_g, mask)
    if WEIGHT_AHEAD:
        weight = load_rows(weight_ptr, offs_w, offs_w < D)
    rstd = 1.0 / tl.sqrt_rn(tl.sum(x * x, 1) / D + eps)
    if not WEIGHT_AHEAD:
        weight = load_rows(weight_ptr, offs_w, offs_w < D)
    # One fraction takes a quarter fewer registers than gate·σ(gate), so that more programs run.
    y = x * rstd[:, None] * weight * gate / (1.0 + tl.exp(-gate))
    offs_y = rows.to(tl.int64)[:, None] * D + offs_d[None, :]
    tl.store(y_ptr + offs_y, cast(y, y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rms_norm_swiglu_bwd_kernel(
    dy_ptr, x_ptr, gate_ptr, weight_ptr, dx_ptr, dgate_ptr, partials_ptr,
    n_rows, n_inner, stride_yo, stride_yi, stride_xo, stride_xi, stride_go, stride_gi,
    eps,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    WITH_X: tl.constexpr, WITH_GATE: tl.constexpr, WITH_WEIGHT: tl.constexpr,
):  # fmt: skip
    """Writes partials[p] in program p, which takes every `num_programs`-th group of ROWS rows."""
    offs_d = tl.arange(0, BLOCK_D)
    weight = load_rows(weight_ptr, offs_d, offs_d < D)
    dweight = tl.zeros([ROWS, BLOCK_D], tl.float32)
    step = tl.num_programs(0) * ROWS
    for start in tl.range(tl.program_id(0) * ROWS, n_rows, step, num_stages=STAGES):
        rows = start + tl.arange(0, ROWS)
        mask = (rows < n_rows)[:, None] & (offs_d < D)[None, :]
        offs_x = row_offsets(rows, n_inner, stride_xo, stride_xi)[:, None] + offs_d[None, :]
        offs_g = row_offsets(rows, n_inner, stride_go, stride_gi)[:, None] + offs_d[None, :]
        offs_y = row_offsets(rows, n_inner, stride_yo, stride_yi)[:, None] + offs_d[None, :]
        offs_out = rows.to(tl.int64)[:, None] * D + offs_d[None, :]
        x = load_rows(x_ptr, offs_x, mask)
        gate = load_rows(gate_ptr, offs_g, mask)
        dy = load_rows(dy_ptr, offs_y, mask)
        rstd = 1.0 / tl.sqrt_rn(tl.sum(x * x, 1) / D + eps)
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


@triton.jit
def _rms_norm_swiglu_bwd_chunks_kernel(
    dy_ptr, x_ptr, gate_ptr, weight_ptr, dx_ptr, dgate_ptr, partials_ptr,
    n_rows, n_inner, stride_yo, stride_yi, stride_xo, stride_xi, stride_go, stride_gi,
    eps,
    D: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    WITH_X: tl.constexpr, WITH_GATE: tl.constexpr, WITH_WEIGHT: tl.constexpr,
):  # fmt: skip
    """Computes the same for rows that registers cannot hold. Program p adds up in partials[p]."""
    first = tl.program_id(0) * ROWS
    partials_ptr += tl.program_id(0).to(tl.int64) * D
    for start in tl.range(first, n_rows, tl.num_programs(0) * ROWS):
        rows = start + tl.arange(0, ROWS)
        in_rows = (rows < n_rows)[:, None]
        row_x = row_offsets(rows, n_inner, stride_xo, stride_xi)[:, None]
        row_g = row_offsets(rows, n_inner, stride_go, stride_gi)[:, None]
        row_y = row_offsets(rows, n_inner, stride_yo, stride_yi)[:, None]
        row_out = rows.to(tl.int64)[:, None] * D
        squares = tl.zeros([ROWS, COLUMNS], tl.float32)
        products = tl.zeros([ROWS, COLUMNS], tl.float32)
        for column in tl.range(0, D, COLUMNS):
            offs_d = column + tl.arange(0, COLUMNS)
            mask = in_rows & (offs_d < D)[None, :]
            x = load_rows(x_ptr, row_x + offs_d[None, :], mask)
            squares += x * x
            if WITH_X:
                gate = load_rows(gate_ptr, row_g + offs_d[None, :], mask)
                dy = load_rows(dy_ptr, row_y + offs_d[None, :], mask)
                weight = load_rows(weight_ptr, offs_d, offs_d < D)
                products += dy * (gate * tl.sigmoid(gate)) * weight[None, :] * x
        rstd = (1.0 / tl.sqrt_rn(tl.sum(squares, 1) / D + eps))[:, None]
        shrink = rstd * (rstd * (rstd * (tl.sum(products, 1) / D)[:, None]))
        for column in tl.range(0, D, COLUMNS):
            offs_d = column + tl.arange(0, COLUMNS)
            mask = in_rows & (offs_d < D)[None, :]
            x = load_rows(x_ptr, row_x + offs_d[None, :], mask)
            gate = load_rows(gate_ptr, row_g + offs_d[None, :], mask)
            dy = load_rows(dy_ptr, row_y + offs_d[None, :], mask)
            weight = load_rows(weight_ptr, offs_d, offs_d < D)[None, :]
            s = tl.sigmoid(gate)
            dnormalized = dy * (gate * s)
            if WITH_GATE:
                dgate = dy * (x * rstd * weight) * (s + gate * s * (1.0 - s))
                dgate = cast(dgate, dgate_ptr.dtype.element_ty)
                tl.store(dgate_ptr + row_out + offs_d[None, :], dgate, mask=mask)
            if WITH_X:
                dx = dnormalized * weight * rstd - x * shrink
                dx = cast(dx, dx_ptr.dtype.element_ty)
                tl.store(dx_ptr + row_out + offs_d[None, :], dx, mask=mask)
            if WITH_WEIGHT:
                # A program's first rows must not read partials: nothing was written there.
                before = tl.load(
                    partials_ptr + offs_d, mask=(offs_d < D) & (start > first), other=0.0
                )
                dweight = before + tl.sum(dnormalized * (x * rstd), 0)
                tl.store(partials_ptr + offs_d, dweight, mask=offs_d < D)
        tl.debug_barrier()  # the next rows may find their sums in other threads


def _warps(elements: int, a_thread: int) -> int:
    return min(max(elements // (WARP * a_thread), 1), 32)


def configs(call):
    block_d = triton.next_power_of_2(call.problem["width"])
    # With few rows the time is that of one program: it has a single row, which more threads load.
    few = call.problem["rows"] <= call.target.multiprocessors
    rows = 1 if few else max(1, 1024 // block_d)
    threads = (8, 16, 32) if few else (16, 8, 32)
    found = [Config(rows, _warps(rows * block_d, a_thread)) for a_thread in threads]
    return tuple(dict.fromkeys(found))


def configs_held(call):
    block_d = triton.next_power_of_2(call.problem["width"])
    rows = max(1, 512 // block_d)
    ahead = 3 * rows * block_d * call.problem.itemsize  # bytes of a stage
    found = []
    # Threads of a multiprocessor, by elements a thread holds: 512 have 128 registers each, 1,024
    # have 64. Those are too few without prefetched loads, so (8, 1) is no candidate.
    threads = {16: 512, 8: 1024}
    for a_thread, num_stages in ((16, 2), (16, 1), (16, 3), (8, 2), (8, 3)):
        num_warps = _warps(rows * block_d, a_thread)
        programs_each = max(1, threads[a_thread] // (WARP * num_warps))
        if num_stages == 1 or num_stages * ahead * programs_each <= call.target.shared_bytes:
            found.append(BackwardConfig(rows, num_warps, programs_each, num_stages))
    return tuple(dict.fromkeys(found))


def configs_chunks(call):
    chunk = min(CHUNK, triton.next_power_of_2(call.problem["width"]))
    few = call.problem["rows"] <= 4 * call.target.multiprocessors  # a program for every row
    found = []
    for rows in (1, 2, 4) if few else (2, 1, 4):
        num_warps = _warps(rows * chunk, 16)
        found.append(BackwardConfig(rows, num_warps, max(1, 512 // (WARP * num_warps)), 1))
    return tuple(dict.fromkeys(found))


def _rows_of_at_most(width):
    def supported(call):
        asked = call.problem["width"]
        return None if asked <= width else f"it takes rows of at most {width}, not {asked}"

    return supported


def empty(wanted, inputs):
    x, _gate, _weight = inputs
    return (x.new_empty(x.shape),), ()


def prepare(call, config, inputs):
    x, gate, weight = inputs
    walked, width = walk(x, gate), len(weight)
    kernel = Bound(
        _rms_norm_swiglu_fwd_kernel, (triton.cdiv(walked.n_rows, config.rows),),
        walked.n_rows, *walked.integers,
        D=width, BLOCK_D=triton.next_power_of_2(width), ROWS=config.rows,
        WEIGHT_AHEAD=width <= MAX_HELD, num_warps=config.num_warps,
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


def _prepare_backward(call, config, inputs, jit, **sizes):
    (dy,), (x, gate, weight), _saved = inputs
    walked, width = walk(dy, x, gate), len(weight)
    with_x, with_gate, with_weight = (name in call.wanted for name in ("x", "gate", "weight"))
    n_groups = triton.cdiv(walked.n_rows, config.rows)
    n_programs = programs(call.target, config.per_multiprocessor, n_groups)
    kernel = Bound(
        jit, (n_programs,), walked.n_rows, *walked.integers,
        D=width, ROWS=config.rows, WITH_X=with_x, WITH_GATE=with_gate, WITH_WEIGHT=with_weight,
        num_warps=config.num_warps, **sizes,
    )  # fmt: skip
    add_up = bound_sum(n_programs, width)

    def launch(inputs, scalars):
        (dy,), (x, gate, weight), _saved = inputs
        dx = x.new_empty(x.shape) if with_x else None
        dgate = gate.new_empty(gate.shape) if with_gate else None
        partials = dweight = None
        if with_weight:
            partials = weight.new_empty((n_programs, width), dtype=torch.float32)
        # Unwanted results are not written: any tensor may replace them.
        results = (x if out is None else out for out in (dx, dgate, partials))
        kernel(*walked.laid_out((dy, x, gate)), weight.contiguous(), *results, *scalars)
        if with_weight:
            dweight = weight.new_empty(weight.shape)
            add_up(partials, dweight, 1.0)
        return dx, dgate, dweight

    return launch


def prepare_held(call, config, inputs):
    block_d = triton.next_power_of_2(call.problem["width"])
    sizes = {"BLOCK_D": block_d, "STAGES": config.num_stages}
    return _prepare_backward(call, config, inputs, _rms_norm_swiglu_bwd_kernel, **sizes)


def prepare_chunks(call, config, inputs):
    columns = min(CHUNK, triton.next_power_of_2(call.problem["width"]))
    jit = _rms_norm_swiglu_bwd_chunks_kernel
    return _prepare_backward(call, config, inputs, jit, COLUMNS=columns)


FORWARD = Kernel("triton", empty, prepare, _rows_of_at_most(MAX_WIDTH), configs)
HELD = Kernel("held", empty_backward, prepare_held, _rows_of_at_most(MAX_HELD), configs_held)
CHUNKS = Kernel("chunks", empty_backward, prepare_chunks, configs=configs_chunks)
