"""Launches CUDA C++ over rows, for softmax and sums."""

from __future__ import annotations

from collections.abc import Callable

from tnp.dispatch.spec import ITEMSIZE, Call
from tnp.ops._shared.rows import row_layout
from tnp_lab import nvrtc
from tnp_lab.launch import Bound

PACK_BYTES = 16  # the most bytes of one load or store


def vector(dtype: str, width: int, aligned: bool) -> int:
    """Returns how many numbers are read at once: 16 bytes if every row starts at them, else one.

    `aligned` says whether the input's rows do. Rows of the result follow one another.
    """
    itemsize = ITEMSIZE[dtype]
    return PACK_BYTES // itemsize if aligned and width * itemsize % PACK_BYTES == 0 else 1


def prepare(
    call: Call, inputs: tuple, kernel: str, empty: Callable, sized: Callable, *counts: int
) -> Callable:
    """Prepares one launch of `kernel` on x [..., width].

    Its arguments are x, the result, strides and sizes of x's rows, and `counts`.

    Args:
        call: the call to prepare for.
        inputs: x.
        kernel: "module:NAME".
        empty: makes the result, as `Kernel.empty`.
        sized: (width, numbers read at once) → constants. THREADS of a row is one of them, and ROWS
            of a block where a block has several.
        counts: further integer arguments of this kernel.
    """
    p, rows = call.problem, row_layout(inputs[0])
    width = p["width"]
    at_once = vector(p.dtype, width, call.aligned or rows.copied)
    sizes = sized(width, at_once)
    per_block = sizes.get("ROWS", 1)
    constants = nvrtc.constants(TYPE=nvrtc.TYPES[p.dtype], VECTOR=at_once, **sizes)
    bound = Bound(
        nvrtc.Source(kernel, constants), call.target.capability, (-(-p["rows"] // per_block),),
        sizes["THREADS"] * per_block, *rows.strides, rows.n_inner, width, *counts,
    )  # fmt: skip

    def launch(inputs, scalars):
        (x,) = inputs
        (y,), saved = empty((), inputs)
        bound(rows.of(x), y)
        return (y,), saved

    return launch
