"""Declares softmax in CUDA C++, forward only: in three passes over a row, and in one."""

from tnp.dispatch.spec import Call, Reason
from tnp_lab.declared import by_cuda

ONE_PASS_WIDTH = 32_768  # limit of `one_pass`: 1,024 threads use 32 of their 64 registers for x


def _fits_registers(call: Call) -> Reason:
    width = call.problem["width"]
    if width > ONE_PASS_WIDTH:
        return f"its registers hold a row of width {ONE_PASS_WIDTH} at most, not {width}"
    return None


THREE_PASSES = by_cuda(
    "three_passes",
    "softmax",
    "tnp_lab.softmax.cuda_softmax:FORWARD_THREE_PASSES",
    title="CUDA C++ in three passes",
)
ONE_PASS = by_cuda(
    "one_pass",
    "softmax",
    "tnp_lab.softmax.cuda_softmax:FORWARD_ONE_PASS",
    _fits_registers,
    title="CUDA C++ in one pass",
)
