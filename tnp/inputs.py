"""Checks of arguments, one sentence each. Imports torch only where a tensor is checked."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def is_expanded(x: torch.Tensor) -> bool:
    """Whether elements of x share memory, as those of a sum's gradient do."""
    return any(step == 0 and size > 1 for step, size in zip(x.stride(), x.shape, strict=True))


def require_count(name: str, value: int, at_least: int) -> None:
    """Raises ValueError where `value` is no whole number, or too small."""
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ValueError(f"{name} is {value!r}: it must be a whole number, at least {at_least}")


def require_number(name: str, value: float) -> None:
    """Raises ValueError for a tensor: as a kernel's argument it would lose its gradient."""
    import torch

    if isinstance(value, torch.Tensor):
        raise ValueError(f"{name} is a tensor: it must be a Python number, which has no gradient")


def require_floats(**tensors: torch.Tensor | None) -> None:
    """Raises ValueError naming the first that is no float; None passes.

    Casts round integers and drop imaginary parts without a word.
    """
    for name, x in tensors.items():
        if x is not None and not x.is_floating_point():
            raise ValueError(f"{name} is {x.dtype}: it must be a float dtype")


def require_equal(**tensors: torch.Tensor) -> None:
    """Raises ValueError where a tensor's shape, dtype or device are not those of the first."""
    (first, x), *others = tensors.items()
    for name, y in others:
        if (y.shape, y.dtype, y.device) != (x.shape, x.dtype, x.device):
            raise ValueError(
                f"{name} is {y.dtype} {tuple(y.shape)} on {y.device} and {first} {x.dtype} "
                f"{tuple(x.shape)} on {x.device}: they must be equal"
            )


def require_alike(**tensors: torch.Tensor) -> None:
    """Raises ValueError where two tensors differ in dtype or device."""
    (first, x), (second, y) = tensors.items()
    if (x.dtype, x.device) != (y.dtype, y.device):
        raise ValueError(
            f"{first} is {x.dtype} on {x.device} and {second} {y.dtype} on {y.device}: "
            "they must be equal"
        )


def positive_number(name: str, value: float) -> float:
    """The number as a float; ValueError where it is not positive and finite."""
    require_number(name, value)
    if not 0 < value < math.inf:
        raise ValueError(f"{name} is {value}: it must be positive and finite")
    return float(value)


def require_one_device(**tensors: torch.Tensor) -> None:
    """Raises ValueError naming the first that is not where the first of all is."""
    (first, x), *others = tensors.items()
    for name, other in others:
        if other.device != x.device:
            raise ValueError(
                f"{name} is on {other.device} and {first} on {x.device}: they must be equal"
            )


def require_lengths(x: torch.Tensor, **lengths: torch.Tensor) -> None:
    """Raises ValueError where numbers of rows are not int32, one for each sample of x [B, …]."""
    for name, numbers in lengths.items():
        if numbers.shape != x.shape[:1] or str(numbers.dtype) != "torch.int32":
            raise ValueError(
                f"{name} is {numbers.dtype} {tuple(numbers.shape)}: "
                f"it must be int32 of shape ({x.shape[0]},)"
            )
        if numbers.device != x.device:
            raise ValueError(
                f"{name} is on {numbers.device} and its samples on {x.device}: they must be equal"
            )
