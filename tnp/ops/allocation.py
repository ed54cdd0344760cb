"""Allocates tensors whose layout a plan has decided, for half of what the dispatcher takes."""

from collections.abc import Callable

import torch

from tnp import private
from tnp.private import n_dispatch_modes


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the strides of a contiguous tensor of this shape."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def allocator(
    like: torch.Tensor,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None = None,
    dtype: torch.dtype | None = None,
) -> Callable[[], torch.Tensor]:
    """Returns a function that returns a new uninitialized tensor at every call.

    Inductor's compiled code allocates by the same functions of PyTorch. No dispatch mode sees them,
    so where one is open the tensor comes from the dispatcher.

    Args:
        like: a tensor of the device to allocate on, which is current at every call.
        shape: the tensor's shape.
        strides: its strides in elements; None: contiguous.
        dtype: its dtype; None: like's.
    """
    shape, dtype, device = tuple(shape), dtype or like.dtype, like.device
    strides = contiguous(shape) if strides is None else tuple(strides)
    allocate = {"cuda": private.empty_cuda, "cpu": private.empty_cpu}.get(device.type)

    def new() -> torch.Tensor:
        if allocate is None or n_dispatch_modes():
            return torch.empty_strided(shape, strides, dtype=dtype, device=device)
        return allocate(shape, strides, dtype)

    return new
