"""Reads functions from the columns of a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tnp.util.arrays import as_floats, as_labels, require_column

Function = tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, torch.Tensor, list]


def functions_of_table(
    table: Mapping[Any, Any], x: Sequence[Any], y: Sequence[Any], by: Any = None, group: Any = None
) -> list[Function]:
    """Returns the functions that a table holds, for `FunctionTasks`.

    Args:
        table: columns of equal length, with names. It may be a frame of pandas, polars or pyarrow,
            a relation of DuckDB, or a dictionary of arrays. The array that
            `numpy.genfromtxt(path, delimiter=",", names=True)` returns is a table too. A Dataset
            of xarray is read through its `to_dataframe()`.
        x, y: names of the input columns and of the output columns. True counts as 1, False as 0.
        by: name of the column that names each row's function, such as a day or a subject. None:
            the table is one function.
        group: name of the column that names each row's group, such as a station. It is for
            `FunctionTasks(…, hold_out=…)`.

    Returns:
        A pair (x [n, d_x], y [n, d_y]) for each function, float64. Functions are in order of `by`,
        and their points in order of rows. With a `group`, each function is (x, y, groups), where
        `groups` lists the group of each point.

    Raises:
        TypeError: the table has no named columns.
        ValueError: a named column does not exist, or columns have different lengths or no rows.
        ValueError: a value is missing, infinite, a date, a duration, or not a number.
    """
    table = _table(table)
    for name, of in (("x", x), ("y", y)):
        if isinstance(of, str | bytes) or not hasattr(of, "__len__") or not len(of):
            raise ValueError(f"{name} is {of!r}: it must be a list of names of columns")
    known = _names(table)
    labelling = [name for name in (by, group) if name is not None]
    for name in (*x, *y, *labelling):
        if name not in known:
            has = ", ".join(map(repr, known))
            has = has or "no names: give columns by name, as a dict of arrays"
            raise ValueError(f"the table has no column {name!r}: it has {has}")
    columns = {name: _column(table, name) for name in (*x, *y, *labelling)}
    numbers = {name: as_floats(_called(name), columns[name]) for name in (*x, *y)}
    for name, values in numbers.items():
        require_column(_called(name), values.shape)
    hint = " (np.genfromtxt reads numbers: use pandas.read_csv)" * isinstance(table, np.ndarray)
    labels = {
        name: as_labels(_called(name), columns[name], f"{of}{hint}")
        for name, of in ((by, "function"), (group, "group"))
        if name is not None
    }
    lengths = {name: len(values) for name, values in (numbers | labels).items()}
    if len(set(lengths.values())) > 1 or 0 in lengths.values():
        found = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise ValueError(f"columns must have equally many rows, at least one, not {found}")
    for name, values in numbers.items():
        _require_values(name, values)
    inputs, outputs = (torch.stack([numbers[name] for name in names], 1) for names in (x, y))
    rows = [range(len(inputs))] if by is None else rows_by_label(labels[by])
    functions = [(inputs[at], outputs[at]) for at in map(list, rows)]
    if group is None:
        return functions
    groups = [[labels[group][row] for row in at] for at in rows]
    return [(*points, of) for points, of in zip(functions, groups, strict=True)]


def rows_by_label(labels: Sequence) -> list[list[int]]:
    """Returns the rows of each label: sorted by label, or by first row if labels do not sort."""
    rows: dict[Any, list[int]] = {}
    for row, label in enumerate(labels):
        rows.setdefault(label, []).append(row)
    try:
        return [rows[label] for label in sorted(rows)]
    except TypeError:
        return list(rows.values())


def _table(table: Any) -> Any:
    """Returns the table in a form that gives a column as `table[name]`."""
    if hasattr(table, "fetchnumpy"):  # a relation of DuckDB
        return table.fetchnumpy()
    if hasattr(table, "to_dataframe"):  # a grid of xarray
        return table.to_dataframe().reset_index()
    if isinstance(table, np.ndarray):
        return np.atleast_1d(table)  # a file of one row gives one record
    names_columns = any(hasattr(table, name) for name in ("columns", "column_names"))
    if not names_columns and not isinstance(table, Mapping):
        raise TypeError(
            f"table is a {type(table).__name__}: it must hold columns by name, as a frame or a "
            "dict of arrays does"
        )
    return table


def _names(table: Any) -> list:
    if isinstance(table, np.ndarray):
        return list(table.dtype.names or ())
    if hasattr(type(table), "column_names"):  # pyarrow, whose `columns` holds values, not names
        return list(table.column_names)
    return list(getattr(table, "columns", table))


def _column(table: Any, name: Any) -> Any:
    try:
        return table[name]
    except Exception as error:  # a library may raise anything, as one with lazy columns does
        reason, kind = str(error).partition("\n")[0], type(table).__name__
        raise ValueError(f"{_called(name)} of a {kind} cannot be read: {reason}") from None


def _called(name: Any) -> str:
    return f"column {name!r}"


def _require_values(name: Any, values: torch.Tensor) -> None:
    """Raises ValueError naming the first row that has no finite number."""
    bad = (~values.isfinite()).nonzero().flatten().tolist()
    if not bad:
        return
    value = values[bad[0]].item()
    if value != value:
        raise ValueError(
            f"{_called(name)}, row {bad[0]}, is missing, 1 of {len(bad)} such rows: leave them "
            f"out, as table.dropna(subset=[{name!r}]) of pandas does"
        )
    raise ValueError(f"{_called(name)}, row {bad[0]}, is {value}: it must be finite")
