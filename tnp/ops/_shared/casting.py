"""Parameters in the dtype of the activations, cast once a step.

Operators take float32 parameters and multiply by copies in the activations' dtype, forward and
again backward: a hundred small casts a step. `WeightCasts` makes them all by one launch ahead of
the forward pass and keeps them for the backward pass, as `torch.autocast` does for its own casts.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass
class _Cast:
    source: torch.Tensor  # keeps the weight's memory, so that no other tensor comes to lie there
    version: int  # of the weight that was cast
    copy: torch.Tensor
    met: bool = True  # in this step

    @classmethod
    def of(cls, weight: torch.Tensor, dtype: torch.dtype) -> "_Cast":
        with torch.inference_mode(False):
            return cls(weight.detach(), weight._version, weight.detach().to(dtype))


class WeightCasts:
    """The casts of one training loop's `parameters`.

    Inside `with casts.step():` a parameter is cast once to a dtype, however many operators read it
    and also where a checkpoint hands them a detached alias. It must not change in there but through
    PyTorch, which counts changes. A parameter is cast where it is met first, and from the next step
    on with all others on entry, until a step does not meet it. Copies live as long as this object:
    2 bytes a parameter.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._pointers: set[int] = set()
        self._casts: dict[tuple, _Cast] = {}

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around the forward and the backward pass, not around the optimizer's update."""
        self._pointers = {p.data_ptr() for p in self._parameters if p.numel()}
        self._casts = {key: cast for key, cast in self._casts.items() if cast.met}
        casts = list(self._casts.values())
        if casts:
            # Always, whatever the versions: a replayed CUDA graph does not count its changes.
            with torch.inference_mode(False), torch.no_grad():
                torch._foreach_copy_([c.copy for c in casts], [c.source for c in casts])
        for cast in casts:
            cast.version, cast.met = cast.source._version, False
        _active.append(self)
        try:
            yield
        finally:
            _active.remove(self)

    def copies(self) -> list[torch.Tensor]:
        """All there are now: a graph captured in a step uses them and must keep them."""
        return [cast.copy for cast in self._casts.values()]

    def get(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """This step's copy of what lies where a parameter does; None of anything else."""
        pointer = weight.data_ptr()
        if pointer not in self._pointers or weight.is_inference():
            return None
        key = (pointer, weight.shape, weight.stride(), dtype)
        cast = self._casts.get(key)
        if cast is None or cast.source.data_ptr() != pointer or cast.version != weight._version:
            cast = self._casts[key] = _Cast.of(weight, dtype)
        cast.met = True
        return cast.copy


# Of all threads: autograd runs the backward pass in others than the forward pass.
_active: list[WeightCasts] = []


def cast_weight(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`weight.to(dtype)`; of a parameter inside a step of its `WeightCasts`, the step's copy.

    For the inside of operators: the result has no gradient of its own and must not be written.
    """
    if weight.dtype == dtype:
        return weight
    for casts in _active:
        copy = casts.get(weight, dtype)
        if copy is not None:
            return copy
    return weight.to(dtype)
