"""Makes the weight in 16 bits first, in portable Triton, for 1,024 rows and more.

The product then takes most of the time. The weight is the one that `torch` makes: codes less zero
points times their scales, rounded once. PyTorch multiplies by it. It is made in every call, in
memory of 2 n_out n_in bytes, and not kept.
"""

from collections.abc import Callable
from math import gcd

import torch
import triton
import triton.language as tl

from tnp.dispatch.launcher import Bound
from tnp.dispatch.spec import Call, Kernel, Reason, triton_from
from tnp.ops._shared.few_rows import chained, follow
from tnp.ops._shared.primitives import cast
from tnp.ops.quantized_linear.definition import OPTIONS
from tnp.ops.quantized_linear.packing import EACH
from tnp.ops.quantized_linear.triton_tiles import empty, nibbles, raised

LEAST_ROWS = 1024  # with fewer, tiles were faster on an H200
LEAST_RUN, MOST_RUN = 32, 128  # neighbouring codes that share a scale
CODES = 8192  # of a program
_triton = triton_from(80)


@triton.jit
def weight_kernel(
    codes_ptr, scales_ptr, zeros_ptr, weight_ptr, n_runs, runs_of_row, runs_of_group, n_groups,
    BITS: tl.constexpr, HAS_ZEROS: tl.constexpr, WORD: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Makes ROWS runs of COLUMNS neighbours, each in one group."""
    dtype: tl.constexpr = weight_ptr.dtype.element_ty
    run = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = run < n_runs
    of_group = run // runs_of_row * n_groups + run % runs_of_row // runs_of_group
    columns = tl.arange(0, COLUMNS)
    at = run.to(tl.int64)[:, None]
    zero = tl.full([ROWS], 1 << (BITS - 1), tl.int32)
    follow(CHAINED)
    scale = tl.load(scales_ptr + of_group, mask=there, other=0.0).to(tl.float32)
    if HAS_ZEROS:
        zero = tl.load(zeros_ptr + of_group, mask=there, other=0).to(tl.int32)
    if BITS == 8:
        codes = tl.load(codes_ptr + at * COLUMNS + columns[None, :], mask=there[:, None], other=0)
        numbers = codes.to(tl.float32) - (zero - 128).to(tl.float32)[:, None]
    else:
        words = at * (COLUMNS // WORD) + tl.arange(0, COLUMNS // WORD)[None, :]
        numbers = nibbles(tl.load(codes_ptr + words, mask=there[:, None], other=0), dtype)
        offset = (zero + raised(BITS, dtype)).to(tl.float32)[:, None]
        numbers = numbers.to(tl.float32) - offset
    to = weight_ptr + at * COLUMNS + columns[None, :]
    tl.store(to, cast(numbers * scale[:, None], dtype), mask=there[:, None])


def supported(call: Call) -> Reason:
    p = call.problem
    if p["rows"] < LEAST_ROWS:
        return f"it takes at least {LEAST_ROWS:,} rows, not {p['rows']}"
    if p["group"] % LEAST_RUN:
        return f"it takes groups that {LEAST_RUN} divides, not {p['group']}"
    return _triton(call)


def prepare(call: Call, config: None, inputs: tuple) -> Callable:
    scales, p = inputs[2], call.problem
    n_in, n_out, run = p["n_in"], p["n_out"], gcd(p["group"], MOST_RUN)
    n_runs, rows = n_out * n_in // run, CODES // run
    kernel = Bound(
        weight_kernel, (triton.cdiv(n_runs, rows),), n_runs, n_in // run, p["group"] // run,
        scales.shape[1], BITS=p["bits"], HAS_ZEROS=p["zeros"], WORD=EACH, ROWS=rows, COLUMNS=run,
        num_warps=4, **chained(call.target),
    )  # fmt: skip

    def launch(inputs, scalars):
        x, weight, scales, zeros, bias = inputs
        scales = scales.contiguous()
        zeros = scales if zeros is None else zeros.contiguous()
        made = x.new_empty(n_out, n_in)
        kernel(weight.contiguous(), scales, zeros, made)
        bias = bias if bias is None else bias.to(x.dtype)
        return (torch.nn.functional.linear(x, made, bias),), ()

    return launch


FORWARD = Kernel("weight", empty, prepare, supported, options=OPTIONS)
