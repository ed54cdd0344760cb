"""A batch of tasks of equal size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np
import torch

from tnp.inputs import require_count


def check_sizes(seed: int, step: int, batch: int, n_context: int, n_target: int) -> None:
    """Of a task to be drawn; raises ValueError naming the first that cannot be."""
    require_count("seed", seed, at_least=0)
    require_count("step", step, at_least=0)
    require_count("batch", batch, at_least=1)
    require_count("n_context", n_context, at_least=1)
    require_count("n_target", n_target, at_least=0)


def random_generator(device: torch.device, seed: int, step: int) -> torch.Generator:
    """A generator of its own for (seed, step).

    The two are hashed together: torch's CPU generator reads 32 bits of a seed and no more.
    """
    mixed = np.random.SeedSequence((seed, step)).generate_state(1)[0]
    return torch.Generator(device).manual_seed(int(mixed))


@dataclass(frozen=True)
class Task:
    """x_context [B, M, d_x], y_context [B, M, d_y], x_target [B, N, d_x], y_target [B, N, d_y].

    Raises TypeError for what is no tensor, ValueError where shapes or devices do not go together or
    there is no context point.
    """

    x_context: torch.Tensor
    y_context: torch.Tensor
    x_target: torch.Tensor
    y_target: torch.Tensor

    def __post_init__(self) -> None:
        for field, tensor in zip(fields(self), self, strict=True):
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(
                    f"{field.name} is a {type(tensor).__name__}: it must be a torch.Tensor; "
                    "torch.as_tensor(…, dtype=torch.float32) makes one"
                )
            if tensor.dim() != 3:
                raise ValueError(
                    f"{field.name} has shape {tuple(tensor.shape)}: it must be [batch, points, d]"
                )
            if tensor.device != self.x_context.device:
                raise ValueError(
                    f"{field.name} is on {tensor.device} and x_context on "
                    f"{self.x_context.device}: a task's tensors must be on one device"
                )
        for x, y in (("x_context", "y_context"), ("x_target", "y_target")):
            a, b = getattr(self, x).shape, getattr(self, y).shape
            if a[:2] != b[:2]:
                raise ValueError(
                    f"{x} is {tuple(a)} and {y} {tuple(b)}: they must agree in batch and points"
                )
        for context, target in (("x_context", "x_target"), ("y_context", "y_target")):
            a, b = getattr(self, context).shape, getattr(self, target).shape
            if (a[0], a[2]) != (b[0], b[2]):
                raise ValueError(
                    f"{context} is {tuple(a)} and {target} {tuple(b)}: they must agree in batch "
                    "and dimension"
                )
        if self.n_context == 0:
            raise ValueError("n_context is 0: a task needs at least one context point")

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (getattr(self, field.name) for field in fields(self))

    @property
    def batch(self) -> int:
        return self.x_context.shape[0]

    @property
    def n_context(self) -> int:
        return self.x_context.shape[1]

    @property
    def n_target(self) -> int:
        return self.x_target.shape[1]

    def to(self, device: torch.device | str) -> Task:
        return Task(*(tensor.to(device) for tensor in self))

    def clone(self) -> Task:
        return Task(*(tensor.clone() for tensor in self))

    def copy_(self, other: Task) -> None:
        """Overwrite this task's tensors in place, as a captured CUDA graph needs its inputs."""
        for mine, theirs in zip(self, other, strict=True):
            if mine.shape != theirs.shape:
                raise ValueError(
                    f"a task of shape {tuple(theirs.shape)} does not fit the captured step's "
                    f"{tuple(mine.shape)}: all its tasks must have the same sizes"
                )
            mine.copy_(theirs)

    def with_shuffled_context(self) -> Task:
        """The same points with the context's y values moved away from their x: the control.

        Values move by half the context, a permutation that leaves none in place.
        """
        shuffled = self.y_context.roll(max(1, self.n_context // 2), dims=1)
        return Task(self.x_context, shuffled, self.x_target, self.y_target)
