"""Draws random inputs and gradients of outputs, for gates and benchmarks."""

import math

import torch

from tnp.dispatch.spec import Case


class Random:
    """Draws normal numbers for a case, equal for equal seeds; uninitialized on the meta device.

    Args:
        case: the case; its activations' dtype is the default.
        device: where the tensors lie.
        seed: together with the case, decides the numbers.
    """

    def __init__(self, case: Case, device: torch.device, seed: int = 0) -> None:
        self.dtype, self.device = getattr(torch, case.problem.dtype), device
        self.meta = device.type == "meta"
        self._generator = None if self.meta else torch.Generator(device).manual_seed(seed)

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Draws normal numbers in `dtype`, or in the activations' dtype."""
        if self.meta:
            return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        # Numbers are drawn in float32, so float64 and 16 bits hold the same numbers, rounded.
        drawn = torch.randn(shape, device=self.device, generator=self._generator)
        return drawn.to(dtype or self.dtype)

    def weight(self, *shape: int) -> torch.Tensor:
        """Draws a float32 parameter, scaled by its fan-in, which is the last dimension."""
        return self(*shape, dtype=torch.float32) / math.sqrt(max(1, shape[-1]))

    def integers(
        self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32
    ) -> torch.Tensor:
        """Draws whole numbers from `low` to `high`, both included."""
        if self.meta:
            return torch.empty(shape, dtype=dtype, device=self.device)
        return torch.randint(
            low, high + 1, shape, generator=self._generator, device=self.device, dtype=dtype
        )


class Upstream:
    """Draws the gradients of an operator's outputs.

    They are normal, with deviation 1, and equal every time.

    `draw` may return an output's gradient itself, by the name "d" + output, if it has another
    layout in a model.

    Args:
        random: draws the numbers.
        drawn: the tensors of `Operator.draw`.
    """

    def __init__(self, random: Random, drawn: dict) -> None:
        self._random, self._drawn = random, drawn
        self.known: dict[str, torch.Tensor] = {}  # the gradients drawn so far, by output

    def __call__(self, output: str, like: torch.Tensor) -> torch.Tensor:
        """Draws the gradient of an output with the shape and dtype of `like`."""
        if output not in self.known:
            found, shape = self._drawn.get(f"d{output}"), tuple(like.shape)
            if found is None:
                found = self._random(*shape) if shape else torch.ones((), device=like.device)
            self.known[output] = found
        return self.known[output].to(like.dtype)
