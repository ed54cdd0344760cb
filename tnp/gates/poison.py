"""Poisons memory that a kernel must not rely on: unwritten results, and memory beside inputs.

A kernel may leave part of its result unwritten, or read past the end of an input. It is still right
while that memory holds zeros. Here it holds NaN, and the largest value for integers.
"""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tnp.util.checks import is_expanded

# PyTorch's functions that return uninitialized memory.
EMPTY = frozenset({"empty", "empty_like", "empty_strided", "empty_permuted",
                   "new_empty", "new_empty_strided"})  # fmt: skip
# Elements around a guarded input: a multiple of 16 bytes in every dtype, and more than one thread
# loads at once.
GUARD = 256


class Poisoned(TorchDispatchMode):
    """Fills every tensor that PyTorch leaves uninitialized inside the block with NaN."""

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        if function.overloadpacket.__name__ in EMPTY:
            fill(result)
        return result


def fill(x: torch.Tensor) -> torch.Tensor:
    """Overwrites `x` with NaN, or with the largest integer."""
    if x.is_floating_point():
        return x.fill_(float("nan"))
    return x if x.dtype == torch.bool else x.fill_(torch.iinfo(x.dtype).max)


def guarded(x: torch.Tensor) -> torch.Tensor:
    """Returns a copy of `x` with its strides, and poison around it and between its elements.

    A tensor with strides of 0, whose elements share memory, is returned as it is.
    """
    if is_expanded(x):
        return x
    steps = zip(x.stride(), x.shape, strict=True)
    span = sum(step * (size - 1) for step, size in steps) + 1 if x.numel() else 0
    memory = fill(torch.empty(span + 2 * GUARD, dtype=x.dtype, device=x.device))
    # As far from a multiple of 16 bytes as it was.
    offset = GUARD + x.data_ptr() % 16 // x.element_size()
    return memory.as_strided(x.shape, x.stride(), offset).copy_(x)
