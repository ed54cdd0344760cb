"""Declares implementations in CUDA C++. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tnp.dispatch.spec import Implementation, Operation, Reason, Support, anywhere, on_cuda
from tnp_lab import nvrtc


def by_cuda(
    name: str,
    op: str,
    kernel: str,
    also: Support = anywhere,
    missing: Callable[[], Reason] = nvrtc.missing,
    **limits: Any,
) -> Implementation:
    """Returns an implementation whose forward pass is one kernel. `auto` never chooses it.

    Args:
        name: names the implementation and its forward operation.
        op: the operator's name.
        kernel: "module:NAME" of the `Kernel`.
        also: refuses further calls, besides the calls that no CUDA C++ can serve.
        missing: says what is not installed.
        limits: other fields of `Implementation`; `backward` gives it gradients.
    """
    on_gpu = on_cuda(min(nvrtc.ARCHITECTURES))
    return Implementation(
        name,
        forward=Operation(f"{op}.{name}", (kernel,)),
        supported=lambda call: on_gpu(call) or also(call),
        missing=missing,
        selectable=False,
        **limits,
    )
