"""The kernels of attention: which exist for each operation, and what each can serve.

An operation is what autograd asks for: the forward pass, or one of the two backward passes.
`tnp.ops.tuning` chooses the kernel and its configuration for a problem.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

OPERATIONS = ("forward", "separate", "fused")


@dataclass(frozen=True)
class Problem:
    """What a launch is chosen by.

    `capability` is the device's compute capability, 80, 90 or 100, and 0 in the interpreter;
    `aligned` says that all rows start at multiples of 16 bytes.
    """

    operation: str
    dtype: torch.dtype
    batch: int
    n_heads: int
    n_q: int
    n_k: int
    head_dim: int
    capability: int
    aligned: bool = True

    @classmethod
    def of(cls, operation: str, q: torch.Tensor, k: torch.Tensor, *others: torch.Tensor) -> Problem:
        """The problem of q [B, H, n_q, D], k [B, H, n_k, D] and the others, whose rows matter."""
        batch, n_heads, n_q, head_dim = q.shape
        capability = 0
        if q.is_cuda:
            major, minor = torch.cuda.get_device_capability(q.device)
            capability = 10 * major + minor
        aligned = all(map(_aligned, (q, k, *others)))
        size = (batch, n_heads, n_q, k.shape[2], head_dim)
        return cls(operation, q.dtype, *size, capability, aligned)


@dataclass(frozen=True)
class Kernel:
    """One way to compute an operation.

    `run` takes the tensors, n_context, scale and a configuration; `unsupported(problem)` gives the
    reason it cannot serve a problem, or None; `configs(problem)` the candidates, the default first.
    """

    run: Callable[..., tuple[torch.Tensor, ...]]
    unsupported: Callable[[Problem], str | None]
    configs: Callable[[Problem], tuple[Any, ...]]


def _aligned(x: torch.Tensor) -> bool:
    """Rows at distinct multiples of 16 bytes: an expanded dimension, of stride 0, is not."""
    steps = [step * x.itemsize for step, size in zip(x.stride(), x.shape[:3], strict=False)]
    expanded = any(size > 1 and step == 0 for step, size in zip(steps, x.shape[:3], strict=True))
    return x.data_ptr() % 16 == 0 and not expanded and all(step % 16 == 0 for step in steps)


def _kernels() -> dict[tuple[str, str], Kernel]:
    from tnp.ops.attention import (
        few_keys,
        hopper_backward,
        hopper_forward,
        triton_backward,
        triton_forward,
    )

    # By operation; of those that can serve a problem the first is the default.
    modules = {
        "forward": {"few_keys": few_keys, "hopper": hopper_forward, "triton": triton_forward},
        "separate": {"few_keys": few_keys, "hopper": hopper_backward, "triton": triton_backward},
        "fused": {"few_keys": few_keys, "hopper": hopper_backward, "triton": triton_backward},
    }
    functions = {
        "forward": "forward",
        "separate": "backward_separate",
        "fused": "backward_fused",
    }
    return {
        (operation, name): Kernel(
            getattr(module, functions[operation]),
            module.unsupported,
            getattr(module, f"{functions[operation]}_configs"),
        )
        for operation, by_name in modules.items()
        for name, module in by_name.items()
    }


KERNELS = _kernels()
