"""Random values for gates and benchmarks: of inputs, for which `Operator.draw` is handed a
`Random`, and of the gradients that arrive at outputs.
"""

import math

import torch

from tnp.dispatch.spec import Case


class Random:
    """Normal numbers of a case, the same for the same seed; uninitialized on the meta device.

    Args:
        case: whose activations' dtype is the default.
        device: where the tensors lie.
        seed: what the numbers are a function of, with the case.
    """

    def __init__(self, case: Case, device: torch.device, seed: int = 0) -> None:
        self.dtype, self.device = getattr(torch, case.problem.dtype), device
        self.meta = device.type == "meta"
        self._generator = None if self.meta else torch.Generator(device).manual_seed(seed)

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Normal numbers, in the activations' dtype unless `dtype` says another."""
        if self.meta:
            return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        # Drawn in float32: float64 and 16 bits hold the same numbers, rounded.
        drawn = torch.randn(shape, device=self.device, generator=self._generator)
        return drawn.to(dtype or self.dtype)

    def weight(self, *shape: int) -> torch.Tensor:
        """A float32 parameter, scaled by its fan-in, the last dimension."""
        return self(*shape, dtype=torch.float32) / math.sqrt(max(1, shape[-1]))

    def integers(
        self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32
    ) -> torch.Tensor:
        """Whole numbers from `low` to `high`, both included."""
        if self.meta:
            return torch.empty(shape, dtype=dtype, device=self.device)
        return torch.randint(
            low, high + 1, shape, generator=self._generator, device=self.device, dtype=dtype
        )


class Upstream:
    """Gradients that arrive at an operator's outputs: normal, of a number 1, the same every time.

    `draw` may give an output's gradient itself, by the name "d" + output, where a model's has a
    layout of its own.

    Args:
        random: what numbers are drawn from.
        drawn: what `Operator.draw` gave.
    """

    def __init__(self, random: Random, drawn: dict) -> None:
        self._random, self._drawn = random, drawn
        self.known: dict[str, torch.Tensor] = {}  # by output, those that were asked for

    def __call__(self, output: str, like: torch.Tensor) -> torch.Tensor:
        """The gradient of an output that looks like this, in its dtype."""
        if output not in self.known:
            found, shape = self._drawn.get(f"d{output}"), tuple(like.shape)
            if found is None:
                found = self._random(*shape) if shape else torch.ones((), device=like.device)
            self.known[output] = found
        return self.known[output].to(like.dtype)
