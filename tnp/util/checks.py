"""Checks arguments. Each failure is one sentence. Imports torch only to check a tensor."""

from __future__ import annotations

import math
import operator
import os
from numbers import Real
from typing import TYPE_CHECKING, Any, SupportsFloat, SupportsIndex

if TYPE_CHECKING:
    import torch


def is_expanded(x: torch.Tensor) -> bool:
    """Returns whether elements of x share memory, as in the gradient of a sum."""
    return any(step == 0 and size > 1 for step, size in zip(x.stride(), x.shape, strict=True))


def require_count(name: str, value: SupportsIndex, at_least: int) -> int:
    """Returns the whole number as an int: Python's, or a scalar of numpy or torch.

    Raises:
        ValueError: it is no whole number, a bool, or less than `at_least`.
    """
    number = value if value.__class__ is int else _python_number(value)
    if isinstance(number, bool) or not hasattr(type(number), "__index__"):
        number = None
    elif number.__class__ is not int:
        number = operator.index(number)
    if number is None or number < at_least:
        raise ValueError(f"{name} is {value!r}: it must be a whole number, at least {at_least}")
    return number


def require_real(name: str, value: SupportsFloat) -> float:
    """Returns the number as a float: Python's, or a scalar of numpy or torch. NaN passes.

    Raises:
        ValueError: it is no real number, a bool, or a tensor that asks for a gradient.
    """
    if getattr(value, "requires_grad", False):
        raise ValueError(f"{name} is a tensor that asks for a gradient: give {name}.item()")
    number = _python_number(value)
    if isinstance(number, bool) or not isinstance(number, Real):
        raise ValueError(f"{name} is {value!r}: it must be a number")
    try:
        return float(number)
    except OverflowError:
        raise ValueError(f"{name} is {value!r}: float64 ends at 1.8e308") from None


def _python_number(value: Any) -> Any:
    """Returns the number in a scalar of numpy or torch, or None for arrays and masked scalars.

    Other values are returned as they are.
    """
    if not hasattr(value, "shape") or not hasattr(value, "item"):
        return value
    is_masked = getattr(value, "mask", False)
    return None if value.shape != () or is_masked else value.item()


def switched_on(variable: str, on: str, off: tuple[str, ...] = ("",)) -> bool:
    """Returns whether an environment variable has the value that switches something on.

    Raises ValueError for any value other than `on` and the values in `off`.
    """
    value = os.environ.get(variable, "")
    if value != on and value not in off:
        raise ValueError(
            f"{variable} is {value!r} in the environment: set it to {on!r}, or unset it"
        )
    return value == on


def require_number(name: str, value: float) -> None:
    """Raises ValueError for a tensor: as a kernel's argument it would lose its gradient."""
    import torch

    if isinstance(value, torch.Tensor):
        raise ValueError(f"{name} is a tensor: it must be a Python number, which has no gradient")


def require_tensors(**given: object) -> None:
    """Raises ValueError naming the first argument that is no tensor, and its type."""
    import torch

    for name, x in given.items():
        if not isinstance(x, torch.Tensor):
            what = "None" if x is None else f"of type {type(x).__name__}"
            raise ValueError(f"{name} is {what}: it must be a tensor")


def require_floats(**tensors: torch.Tensor | None) -> None:
    """Raises ValueError naming the first tensor that has no float dtype. None passes.

    A cast would round integers and drop imaginary parts silently.
    """
    for name, x in tensors.items():
        if x is not None and not x.is_floating_point():
            raise ValueError(f"{name} is {x.dtype}: it must be a float dtype")


def require_16_bits(name: str, dtype: torch.dtype) -> None:
    """Raises ValueError unless `dtype` is bfloat16 or float16."""
    if str(dtype) not in ("torch.bfloat16", "torch.float16") or isinstance(dtype, str):
        raise ValueError(f"{name} is {dtype!r}: it must be torch.bfloat16 or torch.float16")


def require_bools(**given: bool) -> None:
    """Raises ValueError naming the first value that is neither True nor False."""
    for name, value in given.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} is {value!r}: it must be True or False")


def require_equal(**tensors: torch.Tensor) -> None:
    """Raises ValueError if a tensor's shape, dtype or device differs from the first one's."""
    (first, x), *others = tensors.items()
    for name, y in others:
        if (y.shape, y.dtype, y.device) != (x.shape, x.dtype, x.device):
            raise ValueError(
                f"{name} is {y.dtype} {tuple(y.shape)} on {y.device} and {first} {x.dtype} "
                f"{tuple(x.shape)} on {x.device}: they must be equal"
            )


def require_alike(**tensors: torch.Tensor) -> None:
    """Raises ValueError if two tensors differ in dtype or device."""
    (first, x), (second, y) = tensors.items()
    if (x.dtype, x.device) != (y.dtype, y.device):
        raise ValueError(
            f"{first} is {x.dtype} on {x.device} and {second} {y.dtype} on {y.device}: "
            "they must be equal"
        )


def positive_number(name: str, value: float) -> float:
    """Returns the number as a float; ValueError if it is not positive and finite."""
    require_number(name, value)
    number = require_real(name, value)
    if not 0 < number < math.inf:
        raise ValueError(f"{name} is {value!r}: it must be positive and finite")
    return number


def visible_device(device: torch.device | str) -> torch.device:
    """Returns the device. Raises ValueError if it is not here."""
    import torch

    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device is {device!r}: name 'cuda' or 'cpu'") from None
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {found}, and no NVIDIA GPU is visible here: name 'cpu'")
    return found


def require_one_device(**tensors: torch.Tensor) -> None:
    """Raises ValueError naming the first tensor that is not on the first one's device."""
    (first, x), *others = tensors.items()
    for name, other in others:
        if other.device != x.device:
            raise ValueError(
                f"{name} is on {other.device} and {first} on {x.device}: they must be equal"
            )


def require_no_gradient(giver: str, **tensors: torch.Tensor) -> None:
    """Raises ValueError if a tensor asks for a gradient, which `giver` does not give."""
    import torch

    for name, x in tensors.items():
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name} asks for a gradient and {giver} gives none: call it under "
                "torch.no_grad(), or with detached tensors"
            )


def require_lengths(x: torch.Tensor, **lengths: torch.Tensor) -> None:
    """Raises ValueError unless lengths are int32, one for each sample of x [B, …]."""
    for name, numbers in lengths.items():
        if numbers.shape != x.shape[:1] or str(numbers.dtype) != "torch.int32":
            raise ValueError(
                f"{name} is {numbers.dtype} {tuple(numbers.shape)}: "
                f"it must be int32 of shape ({x.shape[0]},)"
            )
        if numbers.device != x.device:
            raise ValueError(
                f"{name} is on {numbers.device} and its samples on {x.device}: they must be equal"
            )


def numbers_on_host(x: torch.Tensor | None, dim: int = 1) -> list | None:
    """Returns the numbers of an int32 tensor of `dim` dimensions if the host knows them, else None.

    The host knows a plain tensor on the CPU outside compilation, fake tensors and transforms.
    """
    import torch

    if torch.compiler.is_compiling() or x.__class__ is not torch.Tensor or not x.is_cpu:
        return None
    if x.dtype is not torch.int32 or x.dim() != dim:
        return None
    return None if torch._C._functorch.is_functorch_wrapped_tensor(x) else x.tolist()


def require_between(name: str, x: torch.Tensor | None, low: int, high: int) -> None:
    """Raises ValueError if the host knows that a number of x, int32 [B], is outside low … high.

    An empty range passes here.
    """
    numbers = numbers_on_host(x)
    if not numbers or low > high or (min(numbers) >= low and max(numbers) <= high):
        return
    sample = next(b for b, number in enumerate(numbers) if not low <= number <= high)
    raise ValueError(
        f"{name} is {numbers[sample]} in sample {sample}: it must lie between {low} and {high}"
    )


def require_pages(page_table: torch.Tensor, lengths: torch.Tensor, page: int, n_pages: int) -> None:
    """Raises ValueError if the host knows that a sequence uses a page that does not exist.

    page_table is int32 [B, columns], lengths int32 [B].
    """
    rows, numbers = numbers_on_host(page_table, 2), numbers_on_host(lengths)
    if rows is None or numbers is None or len(rows) != len(numbers) or not page or not n_pages:
        return
    for sample, (row, length) in enumerate(zip(rows, numbers, strict=True)):
        used = row[: -(-length // page)]
        if used and not (min(used) >= 0 and max(used) < n_pages):
            place = next(i for i, number in enumerate(used) if not 0 <= number < n_pages)
            raise ValueError(
                f"page_table is {used[place]} in sample {sample} at place {place}: it must lie "
                f"between 0 and {n_pages - 1}"
            )


def require_cumulative(name: str, x: torch.Tensor | None, of: str, n_rows: int) -> None:
    """Raises ValueError if the host knows that x, int32 [n_sequences + 1], has gaps.

    Its sequences must follow one another from row 0 to the last row of `of`, which has `n_rows`.
    """
    ends = numbers_on_host(x)
    if ends is None or len(ends) < 2:
        return
    if ends[0] != 0:
        raise ValueError(f"{name} begins with {ends[0]}: it must begin with 0")
    if ends != sorted(ends):
        at = next(i for i in range(1, len(ends)) if ends[i] < ends[i - 1])
        raise ValueError(
            f"{name} goes from {ends[at - 1]} to {ends[at]} at place {at}: it must not decrease"
        )
    require_end(name, ends[-1], of, n_rows)


def require_end(name: str, end: int, of: str, n_rows: int) -> None:
    """Raises ValueError unless packed sequences end with the last of `n_rows` rows."""
    if end != n_rows:
        raise ValueError(f"{name} ends with {end} and {of} has {n_rows} rows: they must be equal")
