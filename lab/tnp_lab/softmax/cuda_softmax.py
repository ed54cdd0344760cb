"""Launches softmax in CUDA C++. Comments of `three_passes.cu` and `one_pass.cu` explain it."""

from __future__ import annotations

from collections.abc import Callable

from tnp.dispatch.spec import Call, Kernel
from tnp_lab import cuda_rows, nvrtc
from tnp_lab.softmax import ONE_PASS_WIDTH

THREE_PASSES = "tnp_lab.softmax.three_passes:softmax_three_passes"
ONE_PASS = "tnp_lab.softmax.one_pass:softmax_one_pass"
THREADS = 256  # threads of a block of `three_passes.cu`, at any width
# A thread of `one_pass.cu` holds HELD numbers before a row gets more threads. It then waits for two
# loads of 16 bytes at once. ROWS rows share a block if a warp holds a row.
HELD, MOST_THREADS, ROWS = 16, 1024, 4


def shape(width: int, vector: int) -> dict[str, int]:
    """Returns constants of `one_pass.cu`: threads of a row, packs of a thread, rows of a block.

    They are powers of two, so that few kernels serve all widths.

    Raises:
        ValueError: the width is above ONE_PASS_WIDTH.
    """
    if width > ONE_PASS_WIDTH:
        raise ValueError(f"width is {width}: registers hold at most {ONE_PASS_WIDTH}")
    threads = min(MOST_THREADS, max(nvrtc.WARP, _power_of_two(-(-width // HELD))))
    unroll = _power_of_two(-(-width // (vector * threads)))
    return {"THREADS": threads, "UNROLL": unroll, "ROWS": ROWS if threads == nvrtc.WARP else 1}


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def empty(wanted: tuple[str, ...], inputs: tuple) -> tuple[tuple, tuple]:
    (x,) = inputs
    return (x.new_empty(x.shape),), ()


def prepare_three_passes(call: Call, config: object, inputs: tuple) -> Callable:
    """Prepares one launch, with a block for each row."""
    constants = {"THREADS": THREADS}
    return cuda_rows.prepare(call, inputs, THREE_PASSES, empty, lambda width, vector: constants)


def prepare_one_pass(call: Call, config: object, inputs: tuple) -> Callable:
    """Prepares one launch, with a block for one row or several short ones."""
    return cuda_rows.prepare(call, inputs, ONE_PASS, empty, shape, call.problem["rows"])


_BUILT = tuple(nvrtc.ARCHITECTURES)
FORWARD_THREE_PASSES = Kernel("cuda", empty, prepare_three_passes, compiled_for=_BUILT)
FORWARD_ONE_PASS = Kernel("cuda", empty, prepare_one_pass, compiled_for=_BUILT)
