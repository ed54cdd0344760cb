"""Converts values from the user's units to a model's units, and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import nn

from tnp.util.arrays import as_floats
from tnp.util.checks import require_real


class Normalization(nn.Module):
    """Converts x and y between the user's units and the model's: (x - mean) / deviation.

    A `TransformerNP` with a normalization takes tasks, and gives predictions and log-likelihoods,
    in the user's units. It saves the normalization too. Means are subtracted in float64, because
    float32 cannot resolve minutes in seconds since 1970. The numbers follow the model's device, and
    stay float64 if the model is cast.

    Args:
        x_mean, x_deviation: d_x numbers, in units of x.
        y_mean, y_deviation: d_y numbers, in units of y.

    Raises:
        ValueError: numbers of means and deviations differ, a mean is not finite, or a deviation is
            not positive and finite.
    """

    def __init__(
        self,
        x_mean: Sequence[float],
        x_deviation: Sequence[float],
        y_mean: Sequence[float],
        y_deviation: Sequence[float],
    ) -> None:
        super().__init__()
        given = {
            "x_mean": x_mean, "x_deviation": x_deviation,
            "y_mean": y_mean, "y_deviation": y_deviation,
        }  # fmt: skip
        for name, values in given.items():
            if not hasattr(values, "__iter__") or getattr(values, "shape", None) == ():
                raise ValueError(f"{name} is {values!r}: it must be a list of numbers")
        named = {
            name: [require_real(name, value) for value in values] for name, values in given.items()
        }
        self._numbers = named
        for of in ("x", "y"):
            if len(named[f"{of}_mean"]) != len(named[f"{of}_deviation"]):
                raise ValueError(
                    f"{of}_mean is {named[f'{of}_mean']} and {of}_deviation "
                    f"{named[f'{of}_deviation']}: they must have as many numbers"
                )
        for name, values in named.items():
            for value in values:
                if not math.isfinite(value) or (name.endswith("deviation") and value <= 0):
                    raise ValueError(
                        f"{name} is {values}: means must be finite and deviations positive and "
                        "finite"
                    )
            # It is none of a model's weights: `TransformerNP.save` stores it beside them.
            tensor = torch.tensor(values, dtype=torch.float64)
            self.register_buffer(name, tensor, persistent=False)
        self.log_volume = sum(map(math.log, named["y_deviation"]))

    @classmethod
    def of(cls, x: Any, y: Any) -> Normalization:
        """Returns the normalization of points x [..., d_x] and y [..., d_y], tensors or arrays.

        Missing values, NaN or masked, are left out of means and deviations. A dimension whose
        values are all equal keeps its unit.

        Raises:
            ValueError: there is no point, a dimension has no value, or a value is infinite or not a
                number.
        """
        numbers = []
        for name, values in (("x", x), ("y", y)):
            values = as_floats(name, values)
            if values.dim() < 2 or values.numel() == 0:
                raise ValueError(
                    f"{name} is {tuple(values.shape)}: it must be [points, d_{name}], of at least "
                    "one point"
                )
            flat = values.flatten(0, -2).numpy()
            for at, of in enumerate(flat.T):
                if np.isinf(of).any() or np.isnan(of).all():
                    value = "infinite" if np.isinf(of).any() else "missing in every point"
                    raise ValueError(f"{name}, dimension {at}, is {value}: it must be finite")
            # Values are centred and scaled first, so that neither a large mean nor a square loses
            # digits.
            low, high = np.nanmin(flat, 0) / 2, np.nanmax(flat, 0) / 2
            centre, spread = high + low, high - low
            is_constant = spread == 0
            scaled = (flat - centre) / np.where(is_constant, 1.0, spread)
            deviation = np.where(is_constant, 1.0, spread * np.nanstd(scaled, 0))
            numbers += [(centre + spread * np.nanmean(scaled, 0)).tolist(), deviation.tolist()]
        return cls(*numbers)

    def numbers(self) -> dict[str, list[float]]:
        """Returns the arguments that make an equal normalization."""
        return {name: list(values) for name, values in self._numbers.items()}

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={values}" for name, values in self._numbers.items())

    def _apply(self, fn: Callable, recurse: bool = True) -> Self:
        """Follows only the device of a cast, a move or `to_empty`."""
        before = dict(self.named_buffers())
        super()._apply(fn, recurse)
        for name, values in self._numbers.items():
            kept, device = before[name], getattr(self, name).device
            if kept.device != device:
                kept = torch.tensor(values, dtype=torch.float64, device=device)
            # If the device stays, so does the tensor, because a CUDA graph reads its address.
            setattr(self, name, kept)
        return self

    def x(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [..., d_x] in the model's units, float64."""
        return (x.double() - self.x_mean) / self.x_deviation

    def y(self, y: torch.Tensor) -> torch.Tensor:
        """Returns [..., d_y] in the model's units, float64."""
        return (y.double() - self.y_mean) / self.y_deviation

    def y_of_user(self, y: torch.Tensor) -> torch.Tensor:
        """Converts y [..., d_y] from the model's units to the user's, float64."""
        return torch.addcmul(self.y_mean, y.double(), self.y_deviation)
