"""Shares code between RMSNorm and LayerNorm: configurations, and the backward pass of wide rows.

Rows that fit into registers are read once, by the `rows` kernels of each operator. For wider rows,
the weight, its gradient and the row do not fit into the registers of a multiprocessor. Then two
kernels read x and the gradient twice. The first, in each operator, finds the row's coefficients in

    dx = scale·dnormalized·weight + slope·(x − mean) + shift + dsum

and the second, in this module, walks down the rows in stripes of columns, with dweight in
registers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tnp.dispatch.launcher import Bound
from tnp.dispatch.spec import Call, Reason
from tnp.ops._shared.operands import dense
from tnp.ops._shared.primitives import cast
from tnp.ops._shared.rows import RowLayout, bound_sum, load_rows, programs, row_offsets

# Elements of a tensor that a thread has in a block of rows. In 16 bits they take two loads of 16
# bytes.
PER_THREAD = 16
# The largest padded width of a row that a program holds: 16 warps of 128 registers a thread.
MAX_HELD = 8192
# Columns of a block of a wide row, and warps. A thread makes two loads of 16 bytes.
BLOCK, BLOCK_WARPS = 4096, 8
# Rows up to this padded width share a program; a wider row has one or several warps.
NARROW = 1024


@dataclass(frozen=True)
class ForwardConfig:
    """Sets the 16-bit elements of a program in padded rows; there are half as many of 32 bits."""

    elements: int
    num_warps: int

    def sizes(self, width: int, itemsize: int) -> dict[str, int]:
        """Returns the arguments of the kernels for rows of `width` elements of `itemsize` bytes."""
        block_d = triton.next_power_of_2(width)
        rows = max(1, self.elements * 2 // itemsize // block_d)
        return {"D": width, "BLOCK_D": block_d, "ROWS": rows, "num_warps": self.num_warps}


@dataclass(frozen=True)
class BackwardConfig(ForwardConfig):
    """Sets elements at a time, programs per multiprocessor, and stages of prefetched loads."""

    per_multiprocessor: int
    num_stages: int

    def sizes(self, width: int, itemsize: int) -> dict[str, int]:
        return super().sizes(width, itemsize) | {"STAGES": self.num_stages}


@dataclass(frozen=True)
class ColumnsConfig:
    """Sets columns and rows of a tile, programs per multiprocessor, and prefetched stages."""

    columns: int
    rows: int
    num_warps: int
    per_multiprocessor: int
    num_stages: int


# The first candidate is the fastest on an H200 for 36,096 rows of 512 in bfloat16, cold. With it
# RMSNorm takes 38.0 µs forward (with the other two 38.3–39.4), and 41.7 backward with its reduction
# (42.3–55.7). In the backward pass a single warp sums rows by shuffles, and twelve warps keep
# enough loads in flight.
NARROW_FORWARD = (ForwardConfig(2048, 4), ForwardConfig(1024, 4), ForwardConfig(1024, 2))
NARROW_BACKWARD = (
    BackwardConfig(512, 1, 12, 3),
    BackwardConfig(1024, 2, 8, 3),
    BackwardConfig(2048, 4, 4, 2),
)
COLUMNS = (ColumnsConfig(256, 8, 4, 4, 3), ColumnsConfig(512, 4, 4, 4, 2))


def forward_configs(call: Call) -> tuple[ForwardConfig, ...]:
    """Returns the candidates for rows held in registers."""
    block = triton.next_power_of_2(call.problem["width"])
    if block <= NARROW:
        return NARROW_FORWARD
    warps = block // PER_THREAD // 32
    found = ForwardConfig(block, warps), ForwardConfig(block, warps // 2)
    # On an H200, RMSNorm of 4,096 columns takes 2.8 µs with more warps and 3.0 with fewer for 128
    # rows, and 68.7 and 66.2 for 16,384 rows. Memory bandwidth allows 63.
    few = call.problem["rows"] <= 4 * call.target.multiprocessors
    return found if few else found[::-1]


def backward_configs(call: Call) -> tuple[BackwardConfig, ...]:
    """Returns candidates for rows held in registers, if prefetched loads fit into shared memory."""
    block = triton.next_power_of_2(call.problem["width"])
    if block <= NARROW:  # 1,024 elements are too many for one warp: LayerNorm takes 250 registers
        one, *others = NARROW_BACKWARD
        return NARROW_BACKWARD if block < NARROW else (*others, one)
    warps = block // PER_THREAD // 32
    each = 16 // warps  # how many programs' registers a multiprocessor has
    ahead = 3 * block * call.problem.itemsize * each  # bytes of a stage of x and two gradients
    fitting = [n for n in (3, 2) if n * ahead <= call.target.shared_bytes]
    return tuple(BackwardConfig(block, warps, each, n) for n in (*fitting, 1))


def columns_configs(call: Call) -> tuple[ColumnsConfig, ...]:
    """Returns the candidates for stripes of columns."""
    return COLUMNS


def held(call: Call) -> Reason:
    """Returns the support of kernels that hold whole rows in registers."""
    width = call.problem["width"]
    return None if width <= MAX_HELD else f"it holds rows of at most {MAX_HELD}, not {width}"


@triton.jit(do_not_specialize=["n_rows", "n_inner"])
def _norm_columns_kernel(
    dnormalized_ptr, dsum_ptr, x_ptr, weight_ptr, scale_ptr, slope_ptr, mean_ptr, shift_ptr,
    dx_ptr, dweight_ptr, dbias_ptr,
    stride_gb, stride_gl, stride_sb, stride_sl, stride_xb, stride_xl,
    n_rows, n_inner,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    HAS_DSUM: tl.constexpr, CENTERED: tl.constexpr,
):  # fmt: skip
    """Takes columns c and every `num_programs(1)`-th group of ROWS rows in program (c, p).

    It writes the partial sums dweight[p], and if CENTERED dbias[p], of its columns.
    """
    offs_d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    weight = tl.load(weight_ptr + offs_d, mask=offs_d < D, other=0.0).to(tl.float32)
    dweight = tl.zeros([ROWS, BLOCK_D], tl.float32)
    dbias = tl.zeros([ROWS, BLOCK_D], tl.float32)
    step = tl.num_programs(1) * ROWS
    for start in tl.range(tl.program_id(1) * ROWS, n_rows, step, num_stages=STAGES):
        rows = start + tl.arange(0, ROWS)
        mask = (rows < n_rows)[:, None] & (offs_d < D)[None, :]
        offs_x = row_offsets(rows, n_inner, stride_xb, stride_xl)[:, None] + offs_d[None, :]
        offs_g = row_offsets(rows, n_inner, stride_gb, stride_gl)[:, None] + offs_d[None, :]
        x = load_rows(x_ptr, offs_x, mask)
        dnormalized = load_rows(dnormalized_ptr, offs_g, mask)
        scale = tl.load(scale_ptr + rows, mask=rows < n_rows, other=0.0)
        slope = tl.load(slope_ptr + rows, mask=rows < n_rows, other=0.0)
        if CENTERED:
            x -= tl.load(mean_ptr + rows, mask=rows < n_rows, other=0.0)[:, None]
        dx = dnormalized * weight[None, :] * scale[:, None] + x * slope[:, None]
        if CENTERED:
            dx += tl.load(shift_ptr + rows, mask=rows < n_rows, other=0.0)[:, None]
            dbias += dnormalized
        if HAS_DSUM:
            offs_s = row_offsets(rows, n_inner, stride_sb, stride_sl)[:, None] + offs_d[None, :]
            dx += load_rows(dsum_ptr, offs_s, mask)
        dweight += dnormalized * (x * scale[:, None])
        offs_out = rows.to(tl.int64)[:, None] * D + offs_d[None, :]
        tl.store(dx_ptr + offs_out, cast(dx, dx_ptr.dtype.element_ty), mask=mask)
    offs_p = tl.program_id(1).to(tl.int64) * D + offs_d
    tl.store(dweight_ptr + offs_p, tl.sum(dweight, 0), mask=offs_d < D)
    if CENTERED:
        tl.store(dbias_ptr + offs_p, tl.sum(dbias, 0), mask=offs_d < D)


class ParameterSum:
    """Sums gradients of parameters from partials, one [D] a program, in a fixed order."""

    def __init__(self, n_partials: int, width: int) -> None:
        self.layout, self.whole = dense(n_partials, width), dense(width)
        self.kernel = bound_sum(n_partials, width)

    def partials(self, x: torch.Tensor) -> torch.Tensor:
        """Allocates partial sums on x's device."""
        return x.new_empty_strided(*self.layout, dtype=torch.float32)

    def of(self, partials: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """Allocates the gradient of `parameter`, in its dtype."""
        out = parameter.new_empty_strided(*self.whole)
        self.kernel(partials, out, 1.0)
        return out


def columns_kernel(
    call: Call, config: ColumnsConfig, layouts: tuple[RowLayout, RowLayout, RowLayout], **kind: bool
) -> tuple[Bound, ParameterSum]:
    """Returns the launch of `_norm_columns_kernel`, and the launch that sums its partials.

    Args:
        call, config: the call to serve, and the configuration.
        layouts: the layouts of dnormalized, of dsum or its replacement, and of x.
        kind: HAS_DSUM and CENTERED.
    """
    n_rows, width = call.problem["rows"], call.problem["width"]
    n_stripes = triton.cdiv(width, config.columns)
    n_tiles = triton.cdiv(n_rows, config.rows)
    at_once = programs(call.target, config.per_multiprocessor, n_stripes * n_tiles)
    n_partials = min(n_tiles, triton.cdiv(at_once, n_stripes))
    strides = [stride for layout in layouts for stride in layout.strides]
    kernel = Bound(
        _norm_columns_kernel, (n_stripes, n_partials), *strides, n_rows, layouts[2].n_inner,
        D=width, BLOCK_D=config.columns, ROWS=config.rows, STAGES=config.num_stages,
        num_warps=config.num_warps, **kind,
    )  # fmt: skip
    return kernel, ParameterSum(n_partials, width)
