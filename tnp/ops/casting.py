"""Parameters in the dtype of the activations, cast once a step.

Operators take float32 parameters and multiply by copies in the activations' dtype, forward and
again backward: a hundred small casts a step. `WeightCasts` makes them all by one launch ahead of
the forward pass and keeps them for the backward pass, as `torch.autocast` does for its own casts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass
class _Cast:
    weight: torch.nn.Parameter
    version: int  # of the weight that was cast
    copy: torch.Tensor


class WeightCasts:
    """The casts of one training loop's parameters.

    Inside `with casts.step():` a parameter is cast once, however many operators read it; it must
    not change in there but through PyTorch, which counts changes. A parameter is cast where it is
    met first, and from the next step on with all others on entry. Copies live as long as this
    object: 2 bytes a parameter.
    """

    def __init__(self) -> None:
        self._casts: dict[tuple[int, torch.dtype], _Cast] = {}

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around the forward and the backward pass, not around the optimizer's update."""
        global _active
        casts = list(self._casts.values())
        if casts:
            # Always, whatever the versions: a replayed CUDA graph does not count its changes.
            with torch.no_grad():
                torch._foreach_copy_([c.copy for c in casts], [c.weight for c in casts])
            for cast in casts:
                cast.version = cast.weight._version
        outer, _active = _active, self
        try:
            yield
        finally:
            _active = outer

    def _get(self, weight: torch.nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
        cast = self._casts.get((id(weight), dtype))
        if cast is None or cast.version != weight._version:
            cast = _Cast(weight, weight._version, weight.detach().to(dtype))
            self._casts[id(weight), dtype] = cast
        return cast.copy


# Not a thread's own: autograd runs the backward pass in other threads.
_active: WeightCasts | None = None


def cast_weight(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`weight.to(dtype)`; inside a step of `WeightCasts`, of a parameter, the step's copy.

    For the inside of operators: the result has no gradient of its own and must not be written.
    """
    if _active is None or weight.dtype == dtype or not isinstance(weight, torch.nn.Parameter):
        return weight.to(dtype)
    return _active._get(weight, dtype)
