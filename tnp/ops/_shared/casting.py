"""Casts parameters to the dtype of the activations once a step.

Operators take float32 parameters, and multiply by copies in the activations' dtype, in the forward
and the backward pass. That would be a hundred small casts a step. `WeightCasts` makes all copies in
one launch before the forward pass, and keeps them for the backward pass, like `torch.autocast`.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass
class _Cast:
    # keeps the weight's memory alive, so that no other tensor gets its address
    source: torch.Tensor
    version: int  # the weight's version when it was cast
    copy: torch.Tensor
    met: bool = True  # whether this step has asked for it

    @classmethod
    def of(cls, weight: torch.Tensor, dtype: torch.dtype) -> "_Cast":
        with torch.inference_mode(False):
            return cls(weight.detach(), weight._version, weight.detach().to(dtype))


class WeightCasts:
    """Holds the casts of one training loop's `parameters`.

    Inside `with casts.step():` a parameter is cast once to a dtype, even if several operators read
    it, or a checkpoint passes them a detached alias. Inside, only PyTorch may change it, because
    PyTorch counts changes. The first step casts a parameter at its first use. Later steps cast all
    used parameters on entry. Copies live as long as this object, and take 2 bytes a parameter.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._pointers: set[int] = set()
        self._casts: dict[tuple, _Cast] = {}

    @contextmanager
    def step(self) -> Iterator[None]:
        """Goes around the forward and the backward pass, but not around the optimizer's update."""
        self._pointers = {p.data_ptr() for p in self._parameters if p.numel()}
        self._casts = {key: cast for key, cast in self._casts.items() if cast.met}
        casts = list(self._casts.values())
        if casts:
            # Casts whatever the versions are, because a replayed CUDA graph does not count its
            # changes.
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
        """Returns all current copies: a graph captured in a step must keep them alive."""
        return [cast.copy for cast in self._casts.values()]

    def get(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """Returns this step's copy of the parameter at the weight's address, or None."""
        pointer = weight.data_ptr()
        if pointer not in self._pointers or weight.is_inference():
            return None
        key = (pointer, weight.shape, weight.stride(), dtype)
        cast = self._casts.get(key)
        if cast is None or cast.source.data_ptr() != pointer or cast.version != weight._version:
            cast = self._casts[key] = _Cast.of(weight, dtype)
        cast.met = True
        return cast.copy


# Shared by all threads, because autograd runs the backward pass in other threads.
_active: list[WeightCasts] = []


def cast_weight(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns `weight.to(dtype)`, or the step's copy inside a step of the parameter's
    `WeightCasts`.

    It is for operators: the result has no gradient of its own, and must not be changed.
    """
    if weight.dtype == dtype:
        return weight
    for casts in _active:
        copy = casts.get(weight, dtype)
        if copy is not None:
            return copy
    return weight.to(dtype)
