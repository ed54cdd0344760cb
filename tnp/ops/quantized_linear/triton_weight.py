"""Makes a weight of 16 bits from codes of 8 or 4 bits, in one pass, in portable Triton.

The weight is the one that `torch` makes: codes less zero points times their scales, rounded once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tnp.dispatch.launcher import Bound
from tnp.ops._shared.primitives import cast
from tnp.ops.quantized_linear.packing import EACH
from tnp.ops.quantized_linear.triton_tiles import _nibbles, _raised

COLUMNS = 128  # codes of a row that share a scale
ROWS = 64  # such runs of a program


@triton.jit
def weight_kernel(
    codes_ptr, scales_ptr, zeros_ptr, weight_ptr, n_runs, runs_of_row, n_groups, group,
    BITS: tl.constexpr, HAS_ZEROS: tl.constexpr, WORD: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Makes ROWS runs of COLUMNS neighbours, each in one group."""
    dtype: tl.constexpr = weight_ptr.dtype.element_ty
    run = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = run < n_runs
    of_group = run // runs_of_row * n_groups + run % runs_of_row * COLUMNS // group
    scale = tl.load(scales_ptr + of_group, mask=there, other=0.0).to(tl.float32)
    columns = tl.arange(0, COLUMNS)
    zero = tl.full([ROWS], 1 << (BITS - 1), tl.int32)
    if HAS_ZEROS:
        zero = tl.load(zeros_ptr + of_group, mask=there, other=0).to(tl.int32)
    if BITS == 8:
        codes = tl.load(codes_ptr + run[:, None] * COLUMNS + columns[None, :], mask=there[:, None])
        numbers = codes.to(tl.float32) - (zero - 128).to(tl.float32)[:, None]
    else:
        words = run[:, None] * (COLUMNS // WORD) + tl.arange(0, COLUMNS // WORD)[None, :]
        numbers = _nibbles(tl.load(codes_ptr + words, mask=there[:, None]), dtype)
        raised = (zero + _raised(BITS, dtype)).to(tl.float32)[:, None]
        numbers = numbers.to(tl.float32) - raised
    to = weight_ptr + run[:, None] * COLUMNS + columns[None, :]
    tl.store(to, cast(numbers * scale[:, None], dtype), mask=there[:, None])


def weight_launch(n_out: int, n_in: int, n_groups: int, bits: int, has_zeros: bool):
    """Returns the launch that makes the weight [n_out, n_in] of contiguous tensors."""
    group = n_in // n_groups
    columns = min(COLUMNS, group) if n_groups > 1 else COLUMNS
    if n_in % columns:
        raise ValueError(f"n_in is {n_in}: it must be a multiple of {columns}")
    n_runs = n_out * n_in // columns
    kernel = Bound(
        weight_kernel, (triton.cdiv(n_runs, ROWS),), n_runs, n_in // columns, n_groups, group,
        BITS=bits, HAS_ZEROS=has_zeros, WORD=EACH, ROWS=ROWS, COLUMNS=columns, num_warps=4,
    )  # fmt: skip

    def launch(codes: Tensor, scales: Tensor, zeros: Tensor | None, dtype: torch.dtype) -> Tensor:
        weight = scales.new_empty(n_out, n_in, dtype=dtype)
        kernel(codes, scales, scales if zeros is None else zeros, weight)
        return weight

    return launch
