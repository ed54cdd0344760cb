"""What several adapters need: limits, and gradients that a package can read and may write to."""

from collections.abc import Collection

import torch

from tnp.dispatch.spec import Call, Reason, Support, on_cuda


def both(*limits: Support) -> Support:
    """The first reason that any of them gives."""

    def supported(call: Call) -> Reason:
        return next((reason for limit in limits if (reason := limit(call))), None)

    return supported


def sizes(name: str, allowed: Collection[int]) -> Support:
    """Support for these values of a size."""

    def supported(call: Call) -> Reason:
        if call.problem[name] in allowed:
            return None
        known = f"{min(allowed)} to {max(allowed)}" if isinstance(allowed, range) else (
            ", ".join(map(str, sorted(allowed)))
        )  # fmt: skip
        return f"it takes {name} {known}, not {call.problem[name]}"

    return supported


def cuda_to(least: int, name: str, largest: int) -> Support:
    """Support for GPUs from a capability on, up to a largest size."""
    return both(on_cuda(least), sizes(name, range(1, largest + 1)))


def rows(x: torch.Tensor) -> torch.Tensor:
    """[..., D] → [rows, D], contiguous."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def with_contiguous_gradient(y: torch.Tensor) -> torch.Tensor:
    """y; its gradient, which may have any strides, reaches the package contiguous."""
    if y.requires_grad:
        y.register_hook(torch.Tensor.contiguous)
    return y
