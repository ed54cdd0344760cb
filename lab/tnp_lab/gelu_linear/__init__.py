"""Declares a linear layer with GELU in CUDA C++. Its backward pass is the one of `fused`."""

from tnp.dispatch.spec import Call, Reason
from tnp.ops.products import FUSED
from tnp_lab.declared import by_cuda


def _on_tensor_cores(call: Call) -> Reason:
    if call.target.capability >= 80:
        return None
    if call.wanted:
        return "its backward pass is Triton's, from compute capability 8.0 on"
    if call.problem.dtype == "bfloat16":
        return "tensor cores take bfloat16 from compute capability 8.0 on"
    return None


WMMA = by_cuda(
    "wmma",
    "gelu_linear",
    "tnp_lab.gelu_linear.cuda_gelu_linear:FORWARD",
    _on_tensor_cores,
    backward=FUSED.backward,
    dtypes=("bfloat16", "float16"),
    title="CUDA C++ with wmma",
)
