"""Quantizes weights to codes of 8 and 4 bits with a scale for each group, and back.

    ŵ = (code − zero) · scale        scale = max |w| / (2^(bits − 1) − 1), or range / (2^bits − 1)

The scale is rounded to its 16 bits first, away from zero, and codes are made with the rounded one.
So no code is clipped, and |w − ŵ| ≤ scale / 2 holds for every weight. If codes were made with the
exact scale, a code at the edge would be off by up to a quarter of a scale more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tnp.ops.quantized_linear.packing import MIDDLE, bits_of, centred, pack
from tnp.util.checks import (
    require_16_bits,
    require_bools,
    require_count,
    require_floats,
    require_tensors,
)

ROWS = 1024  # rows that are quantized at a time, in float64


@dataclass(frozen=True)
class QuantizedWeight:
    """Holds a weight [n_out, n_in] as `quantized_linear` takes it.

    Attributes:
        weight: int8 [n_out, n_in], or int32 [n_out, n_in / 8], packed by `packing.pack`.
        scales: bfloat16 or float16 [n_out, n_in / group].
        zeros: uint8 [n_out, n_in / group], or None for symmetric codes.
    """

    weight: Tensor
    scales: Tensor
    zeros: Tensor | None = None

    @property
    def bits(self) -> int:
        """Returns the bits of a code: 4 or 8."""
        return bits_of(self.weight)

    @property
    def n_out(self) -> int:
        return self.weight.shape[0]

    @property
    def n_in(self) -> int:
        return self.weight.shape[1] * self.weight.element_size() * 8 // self.bits

    @property
    def group(self) -> int:
        """Returns how many weights of a row share a scale."""
        return self.n_in // self.scales.shape[1]

    @property
    def nbytes(self) -> int:
        """Returns the bytes of all its tensors."""
        given = (self.weight, self.scales, self.zeros)
        return sum(x.nbytes for x in given if x is not None)


def quantize_weight(
    weight: Tensor,
    bits: int,
    group: int | None,
    symmetric: bool = True,
    dtype: torch.dtype | None = None,
) -> QuantizedWeight:
    """Returns a weight's nearest codes.

    Args:
        weight: [n_out, n_in], any float dtype.
        bits: 4 or 8.
        group: how many weights of a row share a scale: a divisor of n_in. None: the whole row.
            `quantized_linear` takes 32, 64, 128 and n_in.
        symmetric: whether the zero point is the middle of the codes. Else each group has its own.
        dtype: the scales' dtype, which must be that of the activations: torch.bfloat16 or
            torch.float16. None: the weight's own, if it has 16 bits, else torch.bfloat16.

    Returns:
        the codes with their scales, on the weight's device. A weight is off by at most scale / 2.

    Raises:
        ValueError: an argument is out of its range, or the weight has a number that is not finite.
    """
    require_tensors(weight=weight)
    require_floats(weight=weight)
    require_bools(symmetric=symmetric)
    if weight.dim() != 2 or not weight.numel():
        raise ValueError(f"weight has shape {tuple(weight.shape)}: it must be [n_out, n_in]")
    if bits not in MIDDLE:
        raise ValueError(f"bits is {bits!r}: it must be 4 or 8")
    n_in = weight.shape[1]
    group = n_in if group is None else require_count("group", group, 1)
    if n_in % group:
        raise ValueError(f"group is {group}: it must divide n_in, which is {n_in}")
    if dtype is None:
        dtype = weight.dtype if weight.element_size() == 2 else torch.bfloat16
    require_16_bits("dtype", dtype)
    if not torch.isfinite(weight).all():
        raise ValueError("weight has a number that is not finite: codes have none")
    found = [
        _quantized(rows.detach().unflatten(1, (-1, group)).double(), bits, symmetric, dtype)
        for rows in weight.split(ROWS)
    ]
    packed, scales, zeros = (torch.cat(parts) for parts in zip(*found, strict=True))
    return QuantizedWeight(packed, scales, None if symmetric else zeros)


def _quantized(
    w: Tensor, bits: int, symmetric: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns packed codes, scales and zero points of rows in float64 [rows, n_groups, group]."""
    low, high = w.amin(-1).clamp(max=0.0), w.amax(-1).clamp(min=0.0)
    if symmetric:
        exact = torch.maximum(-low, high) / (MIDDLE[bits] - 1)
    else:
        exact = (high - low) / (2 * MIDDLE[bits] - 1)
    scales = _rounded_up(torch.where(exact > 0.0, exact, 1.0), dtype)
    if not torch.isfinite(scales).all():
        raise ValueError(
            f"weight reaches {w.abs().max().item():.3g}: its scales must be finite in {dtype}"
        )
    s = scales.double()
    zeros = torch.full_like(s, MIDDLE[bits]) if symmetric else -_nearest(low / s)
    codes = _nearest(w / s.unsqueeze(-1)) + zeros.unsqueeze(-1)
    return pack(codes.flatten(1), bits), scales, zeros.to(torch.uint8)


def _nearest(x: Tensor) -> Tensor:
    """Returns the nearest whole numbers, halves rounded up.

    So two numbers that are at most n apart are at most n apart after it: all codes of a group have
    a place. Halves rounded to even numbers may be one further apart.
    """
    return torch.floor(x + 0.5)


def _rounded_up(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns positive float64 numbers in a dtype of 16 bits, none smaller than before."""
    nearest = x.to(dtype)
    # The bits of positive floats are ordered as the numbers are.
    above = (nearest.view(torch.int16) + 1).view(dtype)
    return torch.where(nearest.double() < x, above, nearest)


def dequantize_weight(quantized: QuantizedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns the weight [n_out, n_in] that the codes stand for, in a float dtype.

    In float32 it is exact: a code less its zero point has 8 bits and a sign, a scale at most 11.
    """
    return weight_of(quantized.weight, quantized.scales, quantized.zeros, dtype)


def weight_of(weight: Tensor, scales: Tensor, zeros: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Returns (code − zero) · scale in `dtype`, [n_out, n_in], of tensors that a call takes."""
    values = centred(weight, zeros).flatten(1).unflatten(1, (scales.shape[1], -1)).to(dtype)
    return (values * scales.to(dtype).unsqueeze(-1)).flatten(1)
