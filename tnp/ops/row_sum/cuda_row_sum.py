"""Launches of sums in CUDA C++: `row_sum.cu`, whose comments teach, with either reduction."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tnp.dispatch import nvrtc
from tnp.dispatch.spec import Call, Kernel
from tnp.ops._shared import cuda_rows
from tnp.ops.row_sum import LANES
from tnp.ops.row_sum.triton_row_sum import empty

ROW_SUM = "tnp.ops.row_sum.row_sum:row_sum_block"


def prepare(call: Call, config: object, inputs: tuple, reduction: str) -> Callable:
    """One launch, a block a row, by this reduction of reduce.cuh."""
    constants = {"THREADS": LANES, "REDUCE": reduction}
    return cuda_rows.prepare(call, inputs, ROW_SUM, empty, lambda width, vector: constants)


def _kernel(reduction: str) -> Kernel:
    by = partial(prepare, reduction=reduction)
    return Kernel("cuda", empty, by, compiled_for=tuple(nvrtc.ARCHITECTURES))


FORWARD_TREE = _kernel("tree_reduce")
FORWARD_SHUFFLES = _kernel("block_reduce")
