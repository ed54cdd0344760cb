"""Computes the number format e4m3, with powers of two as scales, in PyTorch.

Gates compare kernels with it.

`tnp.ops._shared.primitives` has the same for kernels. Functions import torch when they run, because
planning reads declarations without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# The smallest exponent of a row's scale, which zeros have. Rows of a gradient may be tiny. If the
# largest element is below 448 · 2^−100, bits are lost, and products of scales below 2^−149 vanish.
LEAST = -100
# Rows of an activation that share a scale.
BLOCK = 128


def nearest(x: Tensor) -> Tensor:
    """Returns x rounded to float32 and then to e4m3, in float64."""
    import torch

    return x.float().to(torch.float8_e4m3fn).double()


def exponents(largest: Tensor, least: int) -> Tensor:
    """Returns the smallest whole numbers e from `least` on with largest ≤ 448 · 2^e."""
    import torch

    significand, exponent = torch.frexp(largest)  # largest = significand · 2^exponent, from 0.5 on
    # 448 = 0.875 · 2^9
    e = (exponent - 9 + (significand > 0.875)).clamp(min=least)
    return torch.where(largest > 0, e, least)


def in_units(x: Tensor, e: Tensor) -> Tensor:
    """Returns x rounded to e4m3 in units of 2^e, in float64."""
    import torch

    return torch.ldexp(nearest(torch.ldexp(x, -e)), e)


def scaled(x: Tensor, dims: tuple[int, ...], least: int) -> Tensor:
    """Returns float32 x rounded to e4m3 with one power of two as scale over `dims`, in float64."""
    return in_units(x, exponents(x.abs().amax(dims, keepdim=True), least))


def rows(w: Tensor) -> Tensor:
    """Returns a weight [..., R, C], rounded with a scale for each row, in float64."""
    return scaled(w.float(), (-1,), LEAST)


def known(x: Tensor, bound: Tensor) -> Tensor:
    """Returns x, rounded in units for elements of at most `bound`, in float64. They broadcast."""
    return in_units(x, exponents(bound.float(), LEAST))


def blocks(x: Tensor) -> Tensor:
    """Returns float32 x [T, C], rounded with a scale for each `BLOCK` rows, in float64."""
    return in_units(x, exponents(over_blocks(x.abs().amax(1, keepdim=True)), LEAST))


def over_blocks(largest: Tensor) -> Tensor:
    """Returns, for each row of `largest` [T, 1], the largest number of its block."""
    from torch.nn.functional import pad

    n = len(largest)
    padded = pad(largest, (0, 0, 0, -n % BLOCK)).unflatten(0, (-1, BLOCK))
    return padded.amax(1, keepdim=True).expand_as(padded).flatten(0, 1)[:n]
