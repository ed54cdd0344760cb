"""Tasks from one's own data: some points of a function are the context, others the targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tnp.inputs import require_count
from tnp.normalization import Normalization
from tnp.tasks.collate import collate
from tnp.tasks.sizes import Range, draw_sizes
from tnp.tasks.task import Task


class FunctionTasks:
    """Draws tasks from known points of functions: call it with a step's number.

    A batch's sizes are drawn anew at each step, for all its samples together; a function that has
    fewer points than that gives the targets it has left. No point is both context and target.

    Args:
        functions: of each the points x [n, d_x] and y [n, d_y], n ≥ 2: arrays or tensors. Where all
            data is one table, the list has one function.
        batch: samples of a task, each from a function drawn anew.
        n_context, n_target: the smallest and the largest number of points.
        seed: what tasks are a function of, with the step.

    Raises:
        ValueError: functions that differ in dimensions, have too few points, or values that are not
            finite.
    """

    def __init__(
        self,
        functions: Sequence[tuple[Any, Any]],
        *,
        batch: int,
        n_context: Range,
        n_target: Range,
        seed: int = 0,
    ) -> None:
        require_count("batch", batch, at_least=1)
        require_count("seed", seed, at_least=0)
        for name, sizes in (("n_context", n_context), ("n_target", n_target)):
            if not isinstance(sizes, Sequence) or len(sizes) != 2:
                raise ValueError(
                    f"{name} is {sizes!r}: it must be the smallest and the largest number, (3, 64)"
                )
            require_count(f"the smallest {name}", sizes[0], at_least=1)
            require_count(f"the largest {name}", sizes[1], at_least=sizes[0])
        if not functions:
            raise ValueError("there is no function to draw tasks from: give at least one")
        self.functions = [_points(i, function) for i, function in enumerate(functions)]
        dimensions = {(x.shape[1], y.shape[1]) for x, y in self.functions}
        if len(dimensions) > 1:
            found = " and ".join(f"d_x {d_x}, d_y {d_y}" for d_x, d_y in sorted(dimensions))
            raise ValueError(f"functions of {found} train no model together")
        ((self.d_x, self.d_y),) = dimensions
        self.batch, self.n_context, self.n_target, self.seed = batch, n_context, n_target, seed

    def __call__(self, step: int) -> Task:
        """The task of a step, on the CPU, float64."""
        require_count("step", step, at_least=0)
        n_context, n_target = draw_sizes(self.seed, step, self.n_context, self.n_target)
        chance = np.random.default_rng((self.seed, step, 1))
        tasks = []
        for _ in range(self.batch):
            x, y = self.functions[chance.integers(len(self.functions))]
            order = torch.from_numpy(chance.permutation(len(x)))
            m = min(n_context, len(x) - 1)
            context, target = order[:m], order[m : m + n_target]
            tasks.append(Task(x[None, context], y[None, context], x[None, target], y[None, target]))
        return collate(tasks)

    @property
    def normalization(self) -> Normalization:
        """Of all points of all functions."""
        x, y = (torch.cat(values) for values in zip(*self.functions, strict=True))
        return Normalization.of(x, y)


def functions_of_table(
    table: Mapping[str, Any], x: Sequence[str], y: Sequence[str], by: str | None = None
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The functions that a table holds, for `FunctionTasks`.

    Args:
        table: columns of equal length by name: a pandas or polars frame, a dictionary of arrays, or
            what `numpy.genfromtxt(path, delimiter=",", names=True)` gives.
        x, y: columns that are inputs and outputs.
        by: the column whose values tell functions apart, such as a station; None: one function.

    Raises:
        ValueError: there is no such column, it holds no numbers, columns have different lengths or
            no row, or `by` is missing in a row.
    """
    for name, columns in (("x", x), ("y", y)):
        if isinstance(columns, str) or len(columns) == 0:
            raise ValueError(f"{name} is {columns!r}: it must be a list of names of columns")
    known = _columns(table)
    for name in (*x, *y, *([by] if by else [])):
        if name not in known:
            has = ", ".join(known) or "no names: give columns by name, as a dict of arrays"
            raise ValueError(f"the table has no column {name!r}: it has {has}")
    lengths = {name: len(table[name]) for name in (*x, *y, *([by] if by else []))}
    if len(set(lengths.values())) > 1 or 0 in lengths.values():
        found = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise ValueError(f"columns must have equally many rows, at least one, not {found}")
    inputs, outputs = (
        torch.from_numpy(np.stack([_numbers(table, name) for name in names], 1)) for names in (x, y)
    )
    if by is None:
        return [(inputs, outputs)]
    group = _groups(table, by)
    rows = [torch.from_numpy(np.flatnonzero(group == i)) for i in range(group.max() + 1)]
    return [(inputs[i], outputs[i]) for i in rows]


def _columns(table: Mapping[str, Any]) -> list[str]:
    if isinstance(table, np.ndarray):
        return list(table.dtype.names or ())
    return [str(name) for name in getattr(table, "columns", table)]


def _numbers(table: Mapping[str, Any], name: str) -> np.ndarray:
    return _floats(f"column {name!r}", table[name])


def _floats(what: str, values: Any) -> np.ndarray:
    """float64; ValueError for what is no real number, whose imaginary part a cast would drop."""
    values = np.asarray(values)
    if np.iscomplexobj(values):
        raise ValueError(f"{what} holds {values.dtype}, not real numbers")
    try:
        return values.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what} holds {values.dtype}, not numbers: {error}") from None


def _groups(table: Mapping[str, Any], by: str) -> np.ndarray:
    """Of each row the number of its function: in order of value, or of appearance if none sorts."""
    values = np.asarray(table[by])
    for row, value in enumerate(values.tolist()):
        if value is None or (value == value) is not True:  # NaN, or a missing value of pandas
            raise ValueError(
                f"column {by!r}, row {row}, is {value}: every row must say which function it is of "
                "(np.genfromtxt reads text with dtype=None alone)"
            )
    try:
        return np.unique(values, return_inverse=True)[1]
    except TypeError:
        numbers: dict[Any, int] = {}
        return np.array([numbers.setdefault(value, len(numbers)) for value in values.tolist()])


def _points(i: int, function: tuple[Any, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    if not isinstance(function, tuple | list) or len(function) != 2:
        raise ValueError(
            f"function {i} is a {type(function).__name__}: it must be a pair of its points x and y"
        )
    x, y = (
        values.detach().to("cpu", torch.float64)
        if isinstance(values, torch.Tensor) and not values.is_complex()
        else torch.from_numpy(_floats(f"{name} of function {i}", values))
        for name, values in zip("xy", function, strict=True)
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
                f"{name} of function {i}, row {at}, is {values[at].tolist()}: it must be finite"
            )
    return x, y
