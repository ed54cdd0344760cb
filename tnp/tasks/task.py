"""A batch of tasks: of equal sizes, or padded to the largest with the length of each beside it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad

from tnp.inputs import require_count, require_floats

TENSORS = (
    "x_context", "y_context", "x_target", "y_target", "context_lengths", "target_lengths",
)  # fmt: skip


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


class Context(NamedTuple):
    """The points that a function is learned from: x [B, M, d_x], y [B, M, d_y].

    `lengths`, int32 [B], says how many points each sample has; None is M for all. What stands past
    a sample's length is padding, whatever it holds.
    """

    x: torch.Tensor
    y: torch.Tensor
    lengths: torch.Tensor | None = None


@dataclass(frozen=True)
class Task:
    """x_context [B, M, d_x], y_context [B, M, d_y], x_target [B, N, d_x], y_target [B, N, d_y].

    `context_lengths` and `target_lengths`, int32 [B], say how many points each sample has, None is
    M or N for all. What stands past a sample's length is padding: whatever it holds, NaN too,
    reaches no result and no gradient. Lengths on a GPU are not read here, because that would wait
    for it: make a task on the CPU, where they are checked and counted, and move it by `to`.

    Raises TypeError for what is no tensor, ValueError where shapes or devices do not go together,
    there is no context point, or a length on the CPU is out of range.
    """

    x_context: torch.Tensor
    y_context: torch.Tensor
    x_target: torch.Tensor
    y_target: torch.Tensor
    context_lengths: torch.Tensor | None = None
    target_lengths: torch.Tensor | None = None
    _counts: tuple[int, int] | None = field(init=False, default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, tensor in zip(TENSORS, self, strict=True):
            self._check_tensor(name, tensor)
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
        check_lengths("context_lengths", self.context_lengths, self.batch, self.n_context)
        check_lengths("target_lengths", self.target_lengths, self.batch, self.n_target)
        lengths = (self.context_lengths, self.target_lengths)
        if all(x is None or x.device.type == "cpu" for x in lengths):
            self.count()

    def count(self) -> tuple[int, int]:
        """Context and target points of all samples, without padding.

        Waits for the device where lengths were never on the CPU.
        """
        if self._counts is None:
            sizes = (self.context_lengths, self.n_context), (self.target_lengths, self.n_target)
            counted = (self.batch * n if x is None else int(x.sum()) for x, n in sizes)
            self._counted(tuple(counted))
        return self._counts

    def _counted(self, counts: tuple[int, int] | None) -> Task:
        object.__setattr__(self, "_counts", counts)  # of a frozen class
        return self

    def _check_tensor(self, name: str, tensor: torch.Tensor | None) -> None:
        if tensor is None and name.endswith("_lengths"):
            return
        if not isinstance(tensor, torch.Tensor):
            dtype = "int32" if name.endswith("_lengths") else "float32"
            raise TypeError(
                f"{name} is a {type(tensor).__name__}: it must be a torch.Tensor; "
                f"torch.as_tensor(…, dtype=torch.{dtype}) makes one"
            )
        if not name.endswith("_lengths"):
            if tensor.dim() != 3:
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)}: it must be [batch, points, d]"
                )
            require_floats(**{name: tensor})
        if tensor.device != self.x_context.device:
            raise ValueError(
                f"{name} is on {tensor.device} and x_context on "
                f"{self.x_context.device}: a task's tensors must be on one device"
            )

    def __iter__(self) -> Iterator[torch.Tensor | None]:
        """The six tensors, as `TransformerNP.nll` takes them."""
        return (getattr(self, name) for name in TENSORS)

    @property
    def context(self) -> Context:
        return Context(self.x_context, self.y_context, self.context_lengths)

    @property
    def batch(self) -> int:
        return self.x_context.shape[0]

    @property
    def n_context(self) -> int:
        """Context points of the largest sample, padding included."""
        return self.x_context.shape[1]

    @property
    def n_target(self) -> int:
        """Target points of the largest sample, padding included."""
        return self.x_target.shape[1]

    def to(
        self,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        non_blocking: bool = False,
    ) -> Task:
        """The task on `device`, its values in `dtype`; lengths stay what they are."""

        def moved(x: torch.Tensor | None) -> torch.Tensor | None:
            if x is None:
                return None
            wanted = dtype if x.is_floating_point() else None
            return x.to(device, wanted, non_blocking=non_blocking)

        return Task(*map(moved, self))._counted(self._counts)

    def clone(self) -> Task:
        return Task(*(None if x is None else x.clone() for x in self))._counted(self._counts)

    def copy_(self, other: Task) -> None:
        """Overwrite this task's tensors in place, as a captured CUDA graph needs its inputs."""
        for mine, theirs in zip(self, other, strict=True):
            if (mine is None) != (theirs is None):
                raise ValueError(
                    "one task says its samples' lengths and the captured step's does not, or the "
                    "other way round: either all its tasks have them, or none"
                )
            if mine is None:
                continue
            if mine.shape != theirs.shape:
                raise ValueError(
                    f"a task of shape {tuple(theirs.shape)} does not fit the captured step's "
                    f"{tuple(mine.shape)}: all its tasks must have the same sizes; "
                    "TrainingStep(buckets=…) takes sizes that vary"
                )
            mine.copy_(theirs)
        self._counted(other._counts)

    def padded(self, n_context: int, n_target: int) -> Task:
        """The same samples with room for so many points, and with the length of each.

        Raises ValueError where the task has more points than that.
        """
        if n_context < self.n_context or n_target < self.n_target:
            raise ValueError(
                f"a task of {self.n_context} context and {self.n_target} target points does not "
                f"fit into {n_context} and {n_target}"
            )
        values = zip(self, (n_context, n_context, n_target, n_target), strict=False)
        widened = (pad(x, (0, 0, 0, n - x.shape[1])) for x, n in values)
        lengths = (
            x.new_full((self.batch,), x.shape[1], dtype=torch.int32) if given is None else given
            for x, given in (
                (self.x_context, self.context_lengths),
                (self.x_target, self.target_lengths),
            )
        )
        return Task(*widened, *lengths)._counted(self._counts)

    def check_finite(self) -> None:
        """Raises ValueError where a point that is no padding holds NaN or infinity.

        On a GPU this waits for the device.
        """
        for name in ("x_context", "y_context", "x_target", "y_target"):
            require_finite(name, getattr(self, name), getattr(self, f"{name[2:]}_lengths"))

    def with_shuffled_context(self) -> Task:
        """The same points with the context's y values moved away from their x: the control.

        Values move by half the sample's context, a permutation that leaves none in place.
        """
        n, device = self.n_context, self.x_context.device
        lengths = self.context_lengths
        if lengths is None:
            lengths = torch.full((self.batch,), n, dtype=torch.int32, device=device)
        lengths = lengths.long()[:, None]
        points = torch.arange(n, device=device)
        moved = (points - (lengths // 2).clamp(min=1)) % lengths
        order = torch.where(points < lengths, moved, points)
        shuffled = self.y_context.gather(1, order[..., None].expand_as(self.y_context))
        return replace(self, y_context=shuffled)


def require_tasks(what: str, tasks: Iterable[Task]) -> None:
    """Raises TypeError naming the first of `tasks` that is none."""
    for i, task in enumerate(tasks):
        if not isinstance(task, Task):
            raise TypeError(
                f"{what}: number {i} is a {type(task).__name__}: all must be a tnp.tasks.Task"
            )


def require_finite(name: str, x: torch.Tensor, lengths: torch.Tensor | None) -> None:
    """Raises ValueError where a point of x [B, points, d] that is no padding is not finite."""
    bad = ~x.isfinite().all(-1)
    if lengths is not None:
        bad &= ~is_padding(lengths, x.shape[1])
    if bad.any():
        sample, point = bad.nonzero()[0].tolist()
        raise ValueError(
            f"{name} of sample {sample}, point {point}, is {x[sample, point].tolist()}: every "
            "value that is no padding must be finite"
        )


def is_padding(lengths: torch.Tensor, n_points: int) -> torch.Tensor:
    """[B] → bool [B, n_points]: whether a point stands past its sample's length."""
    return torch.arange(n_points, device=lengths.device) >= lengths[:, None]


def without_padding(x: torch.Tensor, lengths: torch.Tensor | None) -> torch.Tensor:
    """x [B, points, d] with zeros past each sample's length."""
    if lengths is None:
        return x
    return x.masked_fill(is_padding(lengths, x.shape[1])[..., None], 0.0)


def check_lengths(name: str, lengths: torch.Tensor | None, batch: int, n_points: int) -> None:
    """Raises ValueError where they are not int32 [batch], or one on the CPU is out of range."""
    if lengths is None:
        return
    if lengths.dtype != torch.int32 or lengths.shape != (batch,):
        raise ValueError(
            f"{name} is {lengths.dtype} {tuple(lengths.shape)}: it must be int32 of shape "
            f"({batch},), a number for each sample"
        )
    if lengths.device.type == "cpu" and not torch.compiler.is_compiling():
        for sample, length in enumerate(lengths.tolist()):
            if not 1 <= length <= n_points:
                raise ValueError(
                    f"{name}[{sample}] is {length}: it must be from 1 to {n_points}, the points "
                    "that the tensors hold"
                )
