"""Launches sums in CUDA C++, with either reduction. Comments of `row_sum.cu` explain its steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tnp.dispatch.spec import Call, Kernel
from tnp_lab import cuda_rows, nvrtc
from tnp_lab.row_sum import LANES
from tnp_lab.row_sum.triton_row_sum import empty

ROW_SUM = "tnp_lab.row_sum.row_sum:row_sum_block"


def prepare(call: Call, config: object, inputs: tuple, reduction: str) -> Callable:
    """Prepares one launch, with a block for each row and `reduction` of reduce.cuh."""
    constants = {"THREADS": LANES, "REDUCE": reduction}
    return cuda_rows.prepare(call, inputs, ROW_SUM, empty, lambda width, vector: constants)


def _kernel(reduction: str) -> Kernel:
    by = partial(prepare, reduction=reduction)
    return Kernel("cuda", empty, by, compiled_for=tuple(nvrtc.ARCHITECTURES))


FORWARD_TREE = _kernel("tree_reduce")
FORWARD_SHUFFLES = _kernel("block_reduce")
