"""Declares cross-entropy in CUDA C++. Its backward pass is the one of `triton`."""

from tnp.ops.cross_entropy import OPERATOR
from tnp_lab.declared import by_cuda
from tnp_lab.triton_backward import backward_of_triton

BACKWARD, _differentiates = backward_of_triton(OPERATOR)
ONLINE = by_cuda(
    "online",
    "cross_entropy",
    "tnp_lab.cross_entropy.cuda_cross_entropy:FORWARD",
    _differentiates,
    backward=BACKWARD,
    title="CUDA C++ with an online sum",
)
