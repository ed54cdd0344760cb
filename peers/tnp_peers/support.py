"""Helps adapters: limits, and gradients that a package can read and may write to."""

from collections.abc import Collection

import torch

from tnp.dispatch.spec import Call, Reason, Support, on_cuda


def both(*limits: Support) -> Support:
    """Returns a check that gives the first reason of any of the limits."""

    def supported(call: Call) -> Reason:
        return next((reason for limit in limits if (reason := limit(call))), None)

    return supported


def sizes(name: str, allowed: Collection[int]) -> Support:
    """Returns a check that allows these values of a size."""

    def supported(call: Call) -> Reason:
        if call.problem[name] in allowed:
            return None
        known = f"{min(allowed)} to {max(allowed)}" if isinstance(allowed, range) else (
            ", ".join(map(str, sorted(allowed)))
        )  # fmt: skip
        return f"it takes {name} {known}, not {call.problem[name]}"

    return supported


def cuda_to(least: int, name: str, largest: int) -> Support:
    """Returns a check for GPUs from a capability on, up to a largest size."""
    return both(on_cuda(least), sizes(name, range(1, largest + 1)))


def rows(x: torch.Tensor) -> torch.Tensor:
    """Returns x [..., D] as contiguous [rows, D]."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def with_contiguous_gradient(y: torch.Tensor) -> torch.Tensor:
    """Returns y, and makes its gradient contiguous before the package gets it."""
    if y.requires_grad:
        y.register_hook(torch.Tensor.contiguous)
    return y
