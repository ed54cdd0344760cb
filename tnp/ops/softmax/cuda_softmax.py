"""Launches of softmax in CUDA C++: `three_passes.cu` and `one_pass.cu`, whose comments teach."""

from __future__ import annotations

from collections.abc import Callable

from tnp import cuda
from tnp.contract import ITEMSIZE, Call, Kernel
from tnp.ops.rows import row_layout
from tnp.ops.softmax import ONE_PASS_WIDTH

THREE_PASSES = "tnp.ops.softmax.three_passes:softmax_three_passes"
ONE_PASS = "tnp.ops.softmax.one_pass:softmax_one_pass"
PACK_BYTES = 16  # what one instruction moves
# Of `three_passes.cu`, whatever the width is.
THREADS = 256
# Of `one_pass.cu`: numbers that a thread holds while there are more threads to be had, which gives
# each two loads of 16 bytes to wait for at once; rows that share a block where a warp holds one.
HELD, MOST_THREADS, ROWS = 16, 1024, 4


def vector(dtype: str, width: int, aligned: bool) -> int:
    """Numbers that are read at once: 16 bytes where every row is made of them, else one.

    `aligned` says it of the rows that are read; those of the result follow one another.
    """
    itemsize = ITEMSIZE[dtype]
    return PACK_BYTES // itemsize if aligned and width * itemsize % PACK_BYTES == 0 else 1


def shape(width: int, vector: int) -> dict[str, int]:
    """Constants of `one_pass.cu`: threads of a row, packs of a thread, rows of a block.

    Powers of two, so that few kernels serve all widths. ValueError past ONE_PASS_WIDTH.
    """
    if width > ONE_PASS_WIDTH:
        raise ValueError(f"width is {width}: registers hold at most {ONE_PASS_WIDTH}")
    threads = min(MOST_THREADS, max(cuda.WARP, _power_of_two(-(-width // HELD))))
    unroll = _power_of_two(-(-width // (vector * threads)))
    return {"THREADS": threads, "UNROLL": unroll, "ROWS": ROWS if threads == cuda.WARP else 1}


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def empty(wanted: tuple[str, ...], inputs: tuple) -> tuple[tuple, tuple]:
    (x,) = inputs
    return (x.new_empty(x.shape),), ()


def prepare_three_passes(call: Call, config: object, inputs: tuple) -> Callable:
    """One launch, a block a row."""
    return _prepare(call, inputs, THREE_PASSES, lambda width, vector: {"THREADS": THREADS})


def prepare_one_pass(call: Call, config: object, inputs: tuple) -> Callable:
    """One launch, a block a row or several short ones."""
    return _prepare(call, inputs, ONE_PASS, shape, call.problem["rows"])


def _prepare(call: Call, inputs: tuple, kernel: str, shaped: Callable, *counts: int) -> Callable:
    p, rows = call.problem, row_layout(inputs[0])
    width = p["width"]
    at_once = vector(p.dtype, width, call.aligned or rows.copied)
    sizes = shaped(width, at_once)
    per_block = sizes.get("ROWS", 1)
    constants = cuda.constants(TYPE=cuda.TYPES[p.dtype], VECTOR=at_once, **sizes)
    bound = cuda.Bound(
        cuda.Source(kernel, constants), call.target.capability, (-(-p["rows"] // per_block),),
        sizes["THREADS"] * per_block, *rows.strides, rows.n_inner, width, *counts,
    )  # fmt: skip

    def launch(inputs, scalars):
        (x,) = inputs
        y = x.new_empty(x.shape)
        bound(rows.of(x), y)
        return (y,), ()

    return launch


_BUILT = tuple(cuda.ARCHITECTURES)
FORWARD_THREE_PASSES = Kernel("cuda", empty, prepare_three_passes, compiled_for=_BUILT)
FORWARD_ONE_PASS = Kernel("cuda", empty, prepare_one_pass, compiled_for=_BUILT)
