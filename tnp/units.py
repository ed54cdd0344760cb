"""Values as a model computes with them: in its units and in float32 or float64."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tnp.normalization import Normalization


@dataclass(frozen=True)
class Units:
    """Takes x and y from the user's units to those of a model."""

    normalization: Normalization | None
    compute_dtype: torch.dtype

    def __call__(self, of: str, values: torch.Tensor) -> torch.Tensor:
        """Returns "x" or "y" in the model's units, float32, or float64 for a float64 model."""
        if self.normalization is not None:
            values = getattr(self.normalization, of)(values)
        return values if self.compute_dtype == torch.float64 else values.float()

    def on_host(self) -> Units:
        """Returns the same for values on the CPU, wherever the model is."""
        units = self.normalization and copy.deepcopy(self.normalization).to("cpu")
        return Units(units, self.compute_dtype)

    @property
    def largest(self) -> float:
        """The largest value to compute with: a sixteenth of what `compute_dtype` holds.

        The first layer ends in that dtype, and its weights multiply the value.
        """
        return torch.finfo(self.compute_dtype).max / 16

    def too_large(self, of: str, values: torch.Tensor) -> torch.Tensor:
        """Returns whether each point [B, n] has a value past `largest`; NaN is none.

        Points of other dimensions than the units pass: the model refuses them in a sentence.
        """
        known = self.normalization
        if known is not None and values.shape[-1] != len(getattr(known, f"{of}_mean")):
            return torch.zeros(values.shape[:-1], dtype=torch.bool, device=values.device)
        return (self(of, values).abs() > self.largest).any(-1)
