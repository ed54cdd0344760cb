"""Reads a user's values: columns and arrays of any table library, tensors, lists.

A missing value is a masked element, None, NaN, NaT, or a null of the library. It becomes NaN. Dates
and durations are refused, because each library chooses its own unit for them.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Hashable
from typing import Any

import numpy as np
import torch

_TEMPORAL = (datetime.date, datetime.time, datetime.timedelta, np.datetime64, np.timedelta64)


def as_floats(what: str, values: Any) -> torch.Tensor:
    """Returns the numbers as a float64 tensor, NaN in place of missing values.

    Args:
        what: names the values in errors, such as "column 'height'".
        values: an array, a column, a list or a tensor. The result is on the CPU, without a graph.

    Raises:
        ValueError: a value is a date, a duration, text that is not a number, complex, or an array.
    """
    if isinstance(values, torch.Tensor):
        _require_plain(what, values)
        if values.is_complex():
            raise ValueError(f"{what} holds {values.dtype}, not real numbers")
        if values.is_meta:
            raise ValueError(f"{what} is on meta: it must be a tensor that holds values")
        return values.detach().to("cpu", torch.float64)
    data, is_missing = _unmasked(what, values)
    if data.dtype.kind in "OSUT":
        data = _read_objects(what, data, is_missing)
    elif data.dtype.kind in "cMmV":
        data = _read_others(what, data)
    floats = data.astype(np.float64)  # a copy, so that the caller's numbers stay
    floats[is_missing] = np.nan
    return torch.from_numpy(floats)


def as_tensor(what: str, values: Any) -> torch.Tensor:
    """Returns a tensor unchanged, and other floats as a tensor of float32 or float64.

    Raises:
        ValueError: the values are integers or bools, or `as_floats` refuses them.
    """
    if isinstance(values, torch.Tensor):
        _require_plain(what, values)
        return values
    data, _ = _unmasked(what, values)
    if data.dtype.kind in "iub":
        raise ValueError(f"{what} is {data.dtype}: it must be a float dtype")
    floats = as_floats(what, values)
    return floats.float() if data.dtype in (np.float16, np.float32) else floats


def as_integers(what: str, values: Any) -> torch.Tensor:
    """Returns the whole numbers of an array or a list as an int64 tensor.

    Raises:
        ValueError: a value is missing, or the values are no whole numbers.
    """
    data, is_missing = _unmasked(what, values)
    if data.dtype.kind not in "iu" or is_missing.any():
        found = "a missing value" if is_missing.any() else data.dtype
        raise ValueError(f"{what} holds {found}: it must hold whole numbers")
    return torch.from_numpy(data.astype(np.int64))


def as_labels(what: str, values: Any, of: str) -> list:
    """Returns the labels of rows: numbers, text, dates or other objects that can be hashed.

    Args:
        what: names the values in errors, such as "column 'station'".
        values: an array, a column, a list, or a tensor, of one dimension.
        of: the word for a label in errors, such as "group".

    Raises:
        ValueError: a row has no label, a label cannot be hashed, or the values are no column.
    """
    if isinstance(values, torch.Tensor):
        _require_plain(what, values)
        values = values.detach().cpu()
        values = (values.double() if values.is_floating_point() else values).numpy()
    if isinstance(values, list | tuple):  # an array would make 3 and "3" the same label
        data, is_missing = list(values), np.zeros(len(values), bool)
    else:
        array, is_missing = _unmasked(what, values)
        require_column(what, array.shape)
        data = list(array) if array.dtype.kind in "Mm" else array.tolist()
    for row, (value, masked) in enumerate(zip(data, is_missing, strict=True)):
        if masked or _is_missing(value):
            raise ValueError(f"{what}, row {row}, is missing: every row must name its {of}")
        if not isinstance(value, Hashable):
            raise ValueError(f"{what}, row {row}, is a {type(value).__name__}: it names no {of}")
    return data


def require_column(what: str, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless the values of a column have exactly one dimension."""
    if len(shape) != 1:
        raise ValueError(f"{what} has shape {tuple(shape)}: it must have one value a row")


def _require_plain(what: str, values: torch.Tensor) -> None:
    """Raises ValueError unless the tensor is dense and has no mask."""
    if isinstance(values, torch.masked.MaskedTensor):
        raise ValueError(f"{what} is a MaskedTensor: give its to_tensor(float('nan'))")
    if values.layout != torch.strided or values.is_nested:
        raise ValueError(f"{what} is a tensor of {values.layout}: it must be dense")


def _unmasked(what: str, values: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the array without its mask, and a bool array that is True where a value is masked."""
    try:
        # Only `np.ma` keeps the masks of a list's elements.
        read = np.ma.asarray if isinstance(values, list | tuple) else np.asanyarray
        array = read(values)
    except Exception as error:  # a library may raise anything in __array__
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{what} of type {type(values).__name__} is no array: {reason}") from None
    if array.dtype.names:
        raise ValueError(f"{what} holds records of {array.dtype.names}: it must hold values")
    return np.asarray(np.ma.getdata(array)), np.ma.getmaskarray(array)


def _read_others(what: str, data: np.ndarray) -> np.ndarray:
    if data.dtype.kind in "Mm":
        raise ValueError(_refuse_dates(what, data.dtype, data.dtype.kind == "M"))
    if data.dtype.kind == "c":
        raise ValueError(f"{what} holds {data.dtype}, not real numbers")
    try:
        return data.astype(np.float64)  # works for floats of other packages, such as bfloat16
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what} holds {data.dtype}, not numbers: {error}") from None


def _read_objects(what: str, data: np.ndarray, is_missing: np.ndarray) -> np.ndarray:
    floats = np.full(data.shape, math.nan)
    for index, value in np.ndenumerate(data.astype(object)):
        if is_missing[index] or _is_missing(value):
            continue
        where = f", row {index[0]}," if index else ""
        if getattr(value, "shape", ()) != ():  # numpy would read an array of one number
            kind, shape = type(value).__name__, tuple(value.shape)
            raise ValueError(f"{what}{where} holds a {kind} of shape {shape}, not a number")
        if isinstance(value, _TEMPORAL):
            is_date = not isinstance(value, datetime.timedelta | np.timedelta64)
            raise ValueError(_refuse_dates(what, type(value).__name__, is_date))
        try:
            floats[index] = float(value)
        except (OverflowError, TypeError, ValueError) as error:
            hint = ""
            if isinstance(value, str | bytes):
                hint = "; make one column of 0 and 1 for each category"
            raise ValueError(
                f"{what}{where} holds {value!r}, not a number: {error}{hint}"
            ) from None
    return floats


def _refuse_dates(what: str, kind: object, is_date: bool) -> str:
    way = "(t - t0) / np.timedelta64(1, 'D')" if is_date else "t / np.timedelta64(1, 'D')"
    first = "subtract an origin and divide" if is_date else "divide"
    return f"{what} holds {kind}, not numbers: {first} by a unit, as {way} does"


def _is_missing(value: Any) -> bool:
    """Returns whether this is None, NaN, NaT, a masked scalar, or a null of a library."""
    if value is None or value is np.ma.masked or getattr(value, "is_valid", True) is False:
        return True
    try:
        return not bool(value == value)
    except TypeError:  # pandas.NA is neither equal nor unequal to anything
        return True
    except ValueError:  # an array
        return False
