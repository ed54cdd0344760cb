"""Helps adapters: limits, packed codes, and gradients that a package can read and write to."""

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


def multiples(of: int, *names: str) -> Support:
    """Returns a check that these sizes are multiples of a number."""

    def supported(call: Call) -> Reason:
        for name in names:
            if call.problem[name] % of:
                return f"it takes multiples of {of} for {name}, not {call.problem[name]}"
        return None

    return supported


def cuda_to(least: int, name: str, largest: int) -> Support:
    """Returns a check for GPUs from a capability on, up to a largest size."""
    return both(on_cuda(least), sizes(name, range(1, largest + 1)))


def rows(x: torch.Tensor) -> torch.Tensor:
    """Returns x [..., D] as contiguous [rows, D]."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns codes [n, k] as int32 [n, k · bits / 32], in order from the low bits of a word on."""
    codes = codes.to(torch.uint8)
    if bits == 4:
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    return codes.flatten().view(torch.int32).view(len(codes), -1)


def with_contiguous_gradient(y: torch.Tensor) -> torch.Tensor:
    """Returns y, and makes its gradient contiguous before the package gets it."""
    if y.requires_grad:
        y.register_hook(torch.Tensor.contiguous)
    return y
