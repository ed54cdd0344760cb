"""Launches cross-entropy in CUDA C++. Comments of `online.cu` explain its steps."""

from __future__ import annotations

from collections.abc import Callable

from tnp.dispatch.spec import Call, Kernel
from tnp.ops.cross_entropy import IGNORE_INDEX
from tnp.ops.cross_entropy.triton_cross_entropy import empty, with_classes, with_whole_rows
from tnp_lab import nvrtc
from tnp_lab.cuda_rows import vector
from tnp_lab.launch import Bound

ONLINE, MEAN = (f"tnp_lab.cross_entropy.online:cross_entropy_{name}" for name in ("online", "mean"))
THREADS = 256  # of a block of both kernels, at any number of classes


def prepare(call: Call, config: object, inputs: tuple) -> Callable:
    """Prepares two launches: a block for each row, and one block for the mean."""
    p, (logits, target) = call.problem, inputs
    n_rows, n_classes = p["rows"], p["classes"]
    at_once = vector(p.dtype, n_classes, call.aligned)
    constants = nvrtc.constants(
        TYPE=nvrtc.TYPES[p.dtype], VECTOR=at_once, THREADS=THREADS, IGNORE_INDEX=IGNORE_INDEX
    )
    stride_n, stride_t = with_whole_rows(logits).stride(0), target.stride(0)

    def bound(kernel: str, blocks: int, *integers: int) -> Bound:
        source = nvrtc.Source(kernel, constants)
        return Bound(source, call.target.capability, (blocks,), THREADS, *integers)

    rows = bound(ONLINE, n_rows, stride_n, stride_t, n_classes)
    mean = bound(MEAN, 1, stride_t, n_rows)

    def launch(inputs, scalars):
        logits, target = inputs
        (loss,), (m, s, per_target) = empty(call.wanted, inputs)
        nll = m.new_empty(m.shape)
        rows(with_whole_rows(logits), target, nll, m, s)
        mean(nll, target, loss, per_target)
        return (loss,), (m, s, per_target)

    return with_classes(launch, n_classes)


FORWARD = Kernel("cuda", empty, prepare, compiled_for=tuple(nvrtc.ARCHITECTURES))
