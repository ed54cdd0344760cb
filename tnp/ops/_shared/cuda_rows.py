"""Launches of CUDA C++ that walks rows: what softmax and sums share."""

from __future__ import annotations

from collections.abc import Callable

from tnp.dispatch import nvrtc
from tnp.dispatch.spec import ITEMSIZE, Call
from tnp.ops._shared.rows import row_layout

PACK_BYTES = 16  # what one instruction moves


def vector(dtype: str, width: int, aligned: bool) -> int:
    """Numbers that are read at once: 16 bytes where every row is made of them, else one.

    `aligned` says it of the rows that are read; those of the result follow one another.
    """
    itemsize = ITEMSIZE[dtype]
    return PACK_BYTES // itemsize if aligned and width * itemsize % PACK_BYTES == 0 else 1


def prepare(
    call: Call, inputs: tuple, kernel: str, empty: Callable, sized: Callable, *counts: int
) -> Callable:
    """One launch of `kernel` on x [..., width]: x, the result, strides and sizes of x's rows, and
    `counts` are its arguments.

    Args:
        call: what is asked.
        inputs: x.
        kernel: as `cuda.Source` names it.
        empty: as `Kernel.empty`, of the result.
        sized: width and numbers read at once → constants, THREADS of a row among them, and ROWS of
            a block where these are more than one.
        counts: what this kernel takes besides.
    """
    p, rows = call.problem, row_layout(inputs[0])
    width = p["width"]
    at_once = vector(p.dtype, width, call.aligned or rows.copied)
    sizes = sized(width, at_once)
    per_block = sizes.get("ROWS", 1)
    constants = nvrtc.constants(TYPE=nvrtc.TYPES[p.dtype], VECTOR=at_once, **sizes)
    bound = nvrtc.Bound(
        nvrtc.Source(kernel, constants), call.target.capability, (-(-p["rows"] // per_block),),
        sizes["THREADS"] * per_block, *rows.strides, rows.n_inner, width, *counts,
    )  # fmt: skip

    def launch(inputs, scalars):
        (x,) = inputs
        (y,), saved = empty((), inputs)
        bound(rows.of(x), y)
        return (y,), saved

    return launch
