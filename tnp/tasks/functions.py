"""Draws tasks from a user's own data: some points of a function are context, others targets."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch

from tnp.tasks.collate import collate
from tnp.tasks.normalization import Normalization
from tnp.tasks.sizes import Range, draw_sizes, require_range
from tnp.tasks.tables import rows_by_label
from tnp.tasks.task import Task
from tnp.util.arrays import as_floats, as_labels
from tnp.util.checks import require_count, require_real


class FunctionTasks:
    """Draws tasks from known points of functions. Call it with a step's number.

    Each step draws new sizes, which all samples of its batch share. A function with fewer points
    gives all its points. No point is both context and target.

    With `hold_out`, targets are points of held-out groups, and the context has no point of these
    groups. So a model learns to predict at stations without any measurement, and is tested on that.

    Args:
        functions: a list of pairs (x [n, d_x], y [n, d_y]), n ≥ 2, of arrays, columns or tensors.
            An element may also be (x, y, groups), with the group of each point. If all data is one
            function, the list has one element. `functions_of_table` makes this list.
        batch: number of samples of a task. Each sample draws its function anew.
        n_context, n_target: the smallest and the largest number of points.
        seed: tasks depend only on the seed and the step.
        hold_out: None splits points at random. A share, such as 0.2, holds out this share of each
            sample's groups, drawn anew: at least one group, and never all. A list names the groups
            to hold out. A function gives no tasks if all its points, or none, would be held out.

    Raises:
        TypeError: functions is no list.
        ValueError: functions differ in dimensions, or all have too few points.
        ValueError: a value is missing or not finite.
        ValueError: groups are missing, or no function has groups to hold out.
    """

    def __init__(
        self,
        functions: Sequence[tuple],
        *,
        batch: int,
        n_context: Range,
        n_target: Range,
        seed: int = 0,
        hold_out: float | Collection | None = None,
    ) -> None:
        self.batch = require_count("batch", batch, at_least=1)
        self.seed = require_count("seed", seed, at_least=0)
        self.n_context = require_range("n_context", n_context)
        self.n_target = require_range("n_target", n_target)
        if not isinstance(functions, Sequence) or isinstance(functions, str | bytes):
            raise TypeError(
                f"functions is a {type(functions).__name__}: it must be a list of pairs (x, y), "
                "which functions_of_table makes of a table"
            )
        if not functions:
            raise ValueError("there is no function to draw tasks from: give at least one")
        self.functions = [_points(i, function) for i, function in enumerate(functions)]
        dimensions = {(x.shape[1], y.shape[1]) for x, y in self.functions}
        if len(dimensions) > 1:
            found = " and ".join(f"d_x {d_x}, d_y {d_y}" for d_x, d_y in sorted(dimensions))
            raise ValueError(f"functions of {found} cannot train one model")
        ((self.d_x, self.d_y),) = dimensions
        most = max(len(x) for x, _ in self.functions)
        if most <= self.n_context[0]:
            raise ValueError(
                f"n_context begins at {self.n_context[0]}, but no function has more than {most} "
                f"points, one of them a target: let it begin at {most - 1} or less"
            )
        self._share: float | None = None
        self._rows: list[list[list[int]]] | None = None  # rows by function and group
        self._drawn = list(range(len(functions)))
        if hold_out is not None:
            self._hold_out(functions, hold_out)

    def __call__(self, step: int) -> Task:
        """Returns the task of a step, on the CPU, float64."""
        step = require_count("step", step, at_least=0)
        n_context, n_target = draw_sizes(self.seed, step, self.n_context, self.n_target)
        chance = np.random.default_rng((self.seed, step, 1))
        tasks = []
        for _ in range(self.batch):
            i = self._drawn[chance.integers(len(self._drawn))]
            x, y = self.functions[i]
            order = chance.permutation(len(x))
            m = min(n_context, len(x) - 1)
            context, rest = order[:m], order[m:]
            if self._rows is not None:
                is_held = self._held_out(i, chance)[order]
                context, rest = order[~is_held][:n_context], order[is_held]
            target = rest[:n_target]
            tasks.append(Task(x[None, context], y[None, context], x[None, target], y[None, target]))
        return collate(tasks)

    @property
    def normalization(self) -> Normalization:
        """Returns the normalization of all points of all functions."""
        x, y = (torch.cat(values) for values in zip(*self.functions, strict=True))
        return Normalization.of(x, y)

    def _hold_out(self, functions: Sequence[tuple], hold_out: float | Collection) -> None:
        """Finds the rows of each function's groups, and the functions with a group to hold out.

        Where `hold_out` names groups, each function has two: first the named ones, then the rest.
        """
        labels = [_groups(i, function) for i, function in enumerate(functions)]
        is_text, shape = isinstance(hold_out, str | bytes), getattr(hold_out, "shape", None)
        if isinstance(hold_out, Collection) and not is_text and shape != ():
            held = as_labels("hold_out", list(hold_out), "group")
            known = set().union(*labels)
            unknown = [group for group in held if group not in known]
            if unknown or not held:
                what = f"no point is of group {unknown[0]!r}" if unknown else "it names no group"
                raise ValueError(f"hold_out is {hold_out!r}: {what}")
            labels = [[label not in held for label in of] for of in labels]
        else:
            self._share = 0.0 if is_text else require_real("hold_out", hold_out)
            if not 0 < self._share < 1:
                raise ValueError(
                    f"hold_out is {hold_out!r}: it must be a share between 0 and 1, or a list of "
                    "groups"
                )
        self._rows = [rows_by_label(of) for of in labels]
        self._drawn = [i for i, rows in enumerate(self._rows) if len(rows) > 1]
        if not self._drawn:
            raise ValueError(
                "no function has points both of a group to hold out and of another: at least "
                "one must have both"
            )

    def _held_out(self, i: int, chance: np.random.Generator) -> np.ndarray:
        """Returns bool [n]: True for each point of function i that a sample holds out."""
        rows, held = self._rows[i], [0]
        if self._share is not None:
            n_held = min(len(rows) - 1, max(1, round(self._share * len(rows))))
            held = chance.permutation(len(rows))[:n_held]
        is_held = np.zeros(sum(map(len, rows)), dtype=bool)
        for k in held:
            is_held[rows[k]] = True
        return is_held


def _points(i: int, function: tuple) -> tuple[torch.Tensor, torch.Tensor]:
    if not isinstance(function, tuple | list) or len(function) not in (2, 3):
        raise ValueError(
            f"function {i} is a {type(function).__name__}: it must be a pair of its points x and y"
        )
    x, y = (
        as_floats(f"{name} of function {i}", values)
        for name, values in zip("xy", function[:2], strict=True)
    )
    if x.dim() != 2 or y.dim() != 2 or len(x) != len(y):
        raise ValueError(
            f"function {i} has x {tuple(x.shape)} and y {tuple(y.shape)}: they must be [n, d_x] "
            "and [n, d_y]"
        )
    if 0 in (x.shape[1], y.shape[1]):
        raise ValueError(
            f"function {i} has d_x {x.shape[1]} and d_y {y.shape[1]}: each must be at least 1"
        )
    if len(x) < 2:
        raise ValueError(
            f"function {i} has {len(x)} points: it needs two, a context and a target point"
        )
    for name, values in (("x", x), ("y", y)):
        bad = ~values.isfinite().all(1)
        if bad.any():
            at = bad.nonzero()[0].item()
            raise ValueError(
                f"{name} of function {i}, row {at}, is {values[at].tolist()}: it must be finite, "
                "and missing values be left out"
            )
    return x, y


def _groups(i: int, function: tuple) -> list:
    """Returns the group of each point."""
    if len(function) != 3:
        raise ValueError(
            f"function {i} is a pair (x, y): hold_out needs (x, y, groups), which "
            "functions_of_table(…, group=…) gives"
        )
    groups = as_labels(f"groups of function {i}", function[2], "group")
    if len(groups) != len(function[0]):
        raise ValueError(
            f"function {i} has {len(function[0])} points and {len(groups)} groups: each point must "
            "have its group"
        )
    return groups
