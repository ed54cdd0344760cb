"""Converts values from the user's units and dtype to a model's units and dtype."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tnp.tasks.normalization import Normalization


@dataclass(frozen=True)
class Units:
    """Converts x and y from the user's units to a model's units."""

    normalization: Normalization | None
    compute_dtype: torch.dtype

    def __call__(self, of: str, values: torch.Tensor) -> torch.Tensor:
        """Returns values of x or y in the model's units.

        Args:
            of: "x" or "y".
            values: [..., d], of any float dtype.

        Returns:
            float64 for a float64 model, else float32.
        """
        return in_units(self.normalization, self.compute_dtype, of, values)

    def on_host(self) -> Units:
        """Returns the same units for values on the CPU, whatever device the model is on."""
        units = self.normalization and copy.deepcopy(self.normalization).to("cpu")
        return Units(units, self.compute_dtype)

    @property
    def largest(self) -> float:
        """Returns the largest value that a model takes: a sixteenth of the maximum of
        `compute_dtype`.

        The first layer multiplies values by its weights, and returns that dtype.
        """
        return torch.finfo(self.compute_dtype).max / 16

    def too_large(self, of: str, values: torch.Tensor) -> torch.Tensor:
        """Returns bool [B, n]: whether a point has a value beyond `largest`. NaN does not count.

        Points of another dimension than the units pass here: the model refuses them later.
        """
        known = self.normalization
        if known is not None and values.shape[-1] != len(getattr(known, f"{of}_mean")):
            return torch.zeros(values.shape[:-1], dtype=torch.bool, device=values.device)
        return (self(of, values).abs() > self.largest).any(-1)


def in_units(
    normalization: Normalization | None, compute_dtype: torch.dtype, of: str, values: torch.Tensor
) -> torch.Tensor:
    """Does the work of `Units`, as a function: torch 2.11 compiles no frozen dataclass."""
    if normalization is not None:
        values = getattr(normalization, of)(values)
    return values if compute_dtype == torch.float64 else values.float()
