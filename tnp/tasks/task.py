"""Holds a batch of tasks: of equal sizes, or padded to the largest with the length of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad

from tnp.util.arrays import as_integers, as_tensor
from tnp.util.checks import require_count, require_floats

if TYPE_CHECKING:
    from tnp.tasks.units import Units

TENSORS = (
    "x_context", "y_context", "x_target", "y_target", "context_lengths", "target_lengths",
)  # fmt: skip


def check_sizes(
    seed: int, step: int, batch: int, n_context: int, n_target: int
) -> tuple[int, int, int, int, int]:
    """Returns the numbers of a task to draw as ints. ValueError names the first invalid number."""
    least = {"seed": 0, "step": 0, "batch": 1, "n_context": 1, "n_target": 0}
    given = zip(least.items(), (seed, step, batch, n_context, n_target), strict=True)
    return tuple(require_count(name, value, at_least) for (name, at_least), value in given)


def random_generator(device: torch.device, seed: int, step: int) -> torch.Generator:
    """Returns a generator for (seed, step).

    The two are hashed together, because torch's CPU generator reads only 32 bits of a seed.
    """
    mixed = np.random.SeedSequence((seed, step)).generate_state(1)[0]
    return torch.Generator(device).manual_seed(int(mixed))


class Context(NamedTuple):
    """Holds the points that a function is learned from: x [B, M, d_x], y [B, M, d_y].

    `lengths` [B] says how many points each sample has; None is M for all. Points past a sample's
    length are padding, and may hold anything. Arrays and lists may replace tensors.
    """

    x: torch.Tensor
    y: torch.Tensor
    lengths: torch.Tensor | None = None


@dataclass(frozen=True)
class Task:
    """Holds x_context [B, M, d_x], y_context [B, M, d_y], x_target [B, N, d_x], y_target [B, N,
    d_y].

    They are float tensors, or arrays of floats, which become tensors on the CPU. float64 resolves a
    time in seconds since 1970, float32 does not. Missing values become NaN, which training and
    prediction refuse outside of padding.

    `context_lengths` and `target_lengths` [B] say how many points each sample has, None is M or N
    for all. They are whole numbers, kept as int32. Points past a sample's length are padding. They
    may hold anything, also NaN, and change no result and no gradient. Lengths on a GPU are not
    checked, because that would wait for it. Make a task on the CPU, where lengths are checked and
    counted, and move it by `to`.

    Raises:
        TypeError: a value is no tensor and no array.
        ValueError: shapes or devices do not fit together, values are no floats, there is no sample
            or no context point, or a length on the CPU is out of range.
    """

    x_context: torch.Tensor
    y_context: torch.Tensor
    x_target: torch.Tensor
    y_target: torch.Tensor
    context_lengths: torch.Tensor | None = None
    target_lengths: torch.Tensor | None = None
    # The points of all samples, and the versions of the counted lengths.
    _counts: tuple[tuple[int, int], tuple] | None = field(
        init=False, default=None, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        for name in TENSORS[:4]:
            values = as_points(name, getattr(self, name))
            if values.dim() != 3:
                raise ValueError(
                    f"{name} has shape {tuple(values.shape)}: it must be [batch, points, d]"
                )
            if len(values) == 0:
                raise ValueError(
                    f"{name} has shape {tuple(values.shape)}: it must hold at least one sample"
                )
            object.__setattr__(self, name, values)
        for name, n_points in (("context", self.n_context), ("target", self.n_target)):
            name = f"{name}_lengths"
            lengths = as_lengths(name, getattr(self, name), self.batch, n_points)
            object.__setattr__(self, name, lengths)
        for name, tensor in zip(TENSORS, self, strict=True):
            if tensor is not None and tensor.device != self.x_context.device:
                raise ValueError(
                    f"{name} is on {tensor.device} and x_context on "
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

    def count(self) -> tuple[int, int]:
        """Counts context and target points of all samples, without padding.

        It waits for the device if lengths on it were never counted, or have changed since.
        """
        counts = self._known_counts()
        if counts is None:
            counts = self._sums()
            self._counted(counts)
        return counts

    def _sums(self) -> tuple[int, int]:
        sizes = (self.context_lengths, self.n_context), (self.target_lengths, self.n_target)
        return tuple(self.batch * n if x is None else int(x.sum()) for x, n in sizes)

    def _known_counts(self) -> tuple[int, int] | None:
        """Returns the counts, or None if lengths on a device are new or have changed."""
        if all(x is None or x.is_cpu for x in (self.context_lengths, self.target_lengths)):
            return self._sums()
        is_known = self._counts is not None and self._counts[1] == self._versions()
        return self._counts[0] if is_known else None

    def _counted(self, counts: tuple[int, int] | None) -> Task:
        known = None if counts is None else (counts, self._versions())
        object.__setattr__(self, "_counts", known)  # the class is frozen
        return self

    def _versions(self) -> tuple[int | None, ...]:
        """Returns the versions of the lengths, which grow when they are changed in place."""
        lengths = self.context_lengths, self.target_lengths
        return tuple(None if x is None or x.is_inference() else x._version for x in lengths)

    def __iter__(self) -> Iterator[torch.Tensor | None]:
        """Yields the six tensors, as `TransformerNP.nll` takes them."""
        return (getattr(self, name) for name in TENSORS)

    @property
    def context(self) -> Context:
        return Context(self.x_context, self.y_context, self.context_lengths)

    @property
    def batch(self) -> int:
        return self.x_context.shape[0]

    @property
    def n_context(self) -> int:
        """Returns the number of context points of the largest sample, padding included."""
        return self.x_context.shape[1]

    @property
    def n_target(self) -> int:
        """Returns the number of target points of the largest sample, padding included."""
        return self.x_target.shape[1]

    def to(
        self,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        non_blocking: bool = False,
    ) -> Task:
        """Returns the task on `device` with its values in `dtype`. The dtype of lengths stays."""

        def moved(x: torch.Tensor) -> torch.Tensor:
            wanted = dtype if x.is_floating_point() else None
            return x.to(device, wanted, non_blocking=non_blocking)

        return self._each(moved)

    def pin_memory(self) -> Task:
        """Returns the task in page-locked memory, from which `to(…, non_blocking=True)` does not
        wait.

        A `DataLoader` with `pin_memory=True` calls it.
        """
        return self._each(torch.Tensor.pin_memory)

    def clone(self) -> Task:
        return self._each(torch.Tensor.clone)

    def _each(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Task:
        """Returns a task with `function` applied to each tensor. The lengths are unchanged."""
        made = Task(*(None if x is None else function(x) for x in self))
        return made._counted(self._known_counts())

    def copy_(self, other: Task) -> None:
        """Overwrites this task's tensors in place, as a captured CUDA graph needs its inputs."""
        for mine, theirs in zip(self, other, strict=True):
            if (mine is None) != (theirs is None):
                raise ValueError(
                    "only one of the task and the captured step has lengths: all its tasks must "
                    "have them, or none"
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
        self._counted(other._known_counts())

    def padded(self, n_context: int, n_target: int) -> Task:
        """Returns the same samples, padded to these numbers of points, with the length of each.

        Raises ValueError if the task has more points.
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
        return Task(*widened, *lengths)._counted(self._known_counts())

    def check_finite(self, units: Units | None = None) -> None:
        """Raises ValueError if a point that is no padding is NaN, infinite or too large.

        On a GPU this waits for the device.

        Args:
            units: the units of the model, whose dtype must hold the values.
        """
        for name in TENSORS[:4]:
            require_finite(name, getattr(self, name), getattr(self, f"{name[2:]}_lengths"), units)

    def with_shuffled_context(self) -> Task:
        """Returns the same points with the context's y values moved to other x: a negative control.

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
    """Raises TypeError naming the first element that is no `Task`."""
    for i, task in enumerate(tasks):
        if not isinstance(task, Task):
            raise TypeError(
                f"{what}: number {i} is a {type(task).__name__}: all must be a tnp.tasks.Task"
            )


def require_finite(
    name: str, x: torch.Tensor, lengths: torch.Tensor | None, units: Units | None = None
) -> None:
    """Raises ValueError if a point of x [B, points, d] that is no padding is not finite.

    With `units` it also refuses a value that is too large for the model.
    """
    rule = "every value that is no padding must be finite"
    if lengths is not None:
        x = without_padding(x, lengths)
    bad = ~x.isfinite().all(-1)
    if units is not None and not bad.any():
        bad = units.too_large(name[0], x)
        rule = f"a {units.compute_dtype} model takes up to {units.largest:.2g} in its own units"
    if bad.any():
        sample, point = bad.nonzero()[0].tolist()
        raise ValueError(
            f"{name} of sample {sample}, point {point}, is {x[sample, point].tolist()}: {rule}"
        )


def is_padding(lengths: torch.Tensor, n_points: int) -> torch.Tensor:
    """Returns bool [B, n_points]: whether a point is past its sample's length."""
    return torch.arange(n_points, device=lengths.device) >= lengths[:, None]


def without_padding(x: torch.Tensor, lengths: torch.Tensor | None) -> torch.Tensor:
    """Returns x [B, points, d] with zeros past each sample's length."""
    if lengths is None:
        return x
    return x.masked_fill(is_padding(lengths, x.shape[1])[..., None], 0.0)


def as_points(name: str, values: Any) -> torch.Tensor:
    """Returns points as a float tensor: a tensor unchanged, an array or a list on the CPU.

    Raises:
        TypeError: the values are neither a tensor nor an array.
        ValueError: the values are no floats.
    """
    if not isinstance(values, torch.Tensor | list | tuple) and not hasattr(values, "__array__"):
        raise TypeError(
            f"{name} is a {type(values).__name__}: it must be a torch.Tensor or an array of "
            "floats; torch.as_tensor(…, dtype=torch.float64) makes one"
        )
    tensor = as_tensor(name, values)
    require_floats(**{name: tensor})
    return tensor


def as_lengths(name: str, lengths: Any, batch: int, n_points: int) -> torch.Tensor | None:
    """Returns the lengths as int32 [batch]; None stays None.

    Raises:
        ValueError: lengths are no whole numbers, not one for each sample, or on the CPU out of
            range.
    """
    if lengths is None:
        return None
    if not isinstance(lengths, torch.Tensor):
        lengths = as_integers(name, lengths)
    if not (lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool):
        # This is checked before the cast, which may turn a large number into a small one.
        _require_range(name, lengths, n_points)
        lengths = lengths.to(torch.int32)
    check_lengths(name, lengths, batch, n_points)
    return lengths


def check_lengths(name: str, lengths: torch.Tensor | None, batch: int, n_points: int) -> None:
    """Raises ValueError if lengths are not int32 [batch], or on the CPU out of range."""
    if lengths is None:
        return
    if lengths.dtype != torch.int32 or lengths.shape != (batch,):
        raise ValueError(
            f"{name} is {lengths.dtype} {tuple(lengths.shape)}: it must be int32 of shape "
            f"({batch},), a number for each sample"
        )
    _require_range(name, lengths, n_points)


def _require_range(name: str, lengths: torch.Tensor, n_points: int) -> None:
    if lengths.device.type != "cpu" or torch.compiler.is_compiling():
        return
    for sample, length in enumerate(lengths.flatten().tolist()):
        if not 1 <= length <= n_points:
            raise ValueError(
                f"{name}[{sample}] is {length}: it must be from 1 to {n_points}, the points "
                "that the tensors hold"
            )


def require_points(
    name: str, x: torch.Tensor, width: int, lengths: torch.Tensor | None = None
) -> None:
    """Raises an error unless x is a float tensor [B, rows, width] with at least one sample and row.

    Args:
        name: name of the argument, such as "x_context".
        x: the value to check.
        width: number of dimensions that the model takes.
        lengths: int32 [B], or None.

    Raises:
        TypeError: x is no tensor.
        ValueError: x is no float tensor, has another shape, or the lengths do not fit it.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(
            f"{name} is a {type(x).__name__}: it must be a torch.Tensor; "
            "torch.as_tensor(…, dtype=torch.float64) makes one"
        )
    require_floats(**{name: x})
    if x.dim() != 3 or x.shape[-1] != width:
        raise ValueError(
            f"{name} is {tuple(x.shape)}: it must be [B, rows, {width}], by TNPConfig's d_{name[0]}"
        )
    if 0 in x.shape[:2]:
        what = "target" if name == "x_target" else "context point"
        what = "sample" if len(x) == 0 else what
        raise ValueError(f"{name} is {tuple(x.shape)}: it must hold at least one {what}")
    check_lengths(f"{name[2:]}_lengths", lengths, *x.shape[:2])
