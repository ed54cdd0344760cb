"""Launches of sums in CUDA C++: `row_sum.cu`, whose comments teach, with either reduction."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tnp import cuda
from tnp.contract import Call, Kernel
from tnp.ops.row_sum import LANES
from tnp.ops.row_sum.triton_row_sum import empty
from tnp.ops.rows import row_layout
from tnp.ops.softmax.cuda_softmax import vector

ROW_SUM = "tnp.ops.row_sum.row_sum:row_sum_block"


def prepare(call: Call, config: object, inputs: tuple, reduction: str) -> Callable:
    """One launch, a block a row, by this reduction of reduce.cuh."""
    p, rows = call.problem, row_layout(inputs[0])
    at_once = vector(p.dtype, p["width"], call.aligned or rows.copied)
    constants = cuda.constants(
        TYPE=cuda.TYPES[p.dtype], VECTOR=at_once, THREADS=LANES, REDUCE=reduction
    )
    bound = cuda.Bound(
        cuda.Source(ROW_SUM, constants), call.target.capability, (p["rows"],), LANES,
        *rows.strides, rows.n_inner, p["width"],
    )  # fmt: skip

    def launch(inputs, scalars):
        (x,) = inputs
        (y,), saved = empty((), inputs)
        bound(rows.of(x), y)
        return (y,), saved

    return launch


def _kernel(reduction: str) -> Kernel:
    by = partial(prepare, reduction=reduction)
    return Kernel("cuda", empty, by, compiled_for=tuple(cuda.ARCHITECTURES))


FORWARD_TREE = _kernel("tree_reduce")
FORWARD_SHUFFLES = _kernel("block_reduce")
