"""Declares LayerNorm in CUDA C++, in one pass. Its backward pass is the one of `triton`."""

from tnp.dispatch.spec import Call, Reason
from tnp.ops.layer_norm import MAX_WIDTH, OPERATOR
from tnp_lab.declared import by_cuda
from tnp_lab.triton_backward import backward_of_triton

BACKWARD, _differentiates = backward_of_triton(OPERATOR)


def _in_cuda(call: Call) -> Reason:
    width = call.problem["width"]
    if width > MAX_WIDTH:
        return f"its registers hold a row of width {MAX_WIDTH} at most, not {width}"
    return _differentiates(call)


ONE_PASS = by_cuda(
    "one_pass",
    "layer_norm",
    "tnp_lab.layer_norm.cuda_layer_norm:FORWARD",
    _in_cuda,
    backward=BACKWARD,
    title="CUDA C++ in one pass",
)
