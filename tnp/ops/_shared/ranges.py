"""Asserts on the device that numbers, such as lengths or places, are in range.

Without assertions, a number out of range makes the results of its sequence NaN.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from tnp.dispatch.selection import CHECK_VARIABLE
from tnp.util.checks import switched_on


def asserts() -> bool:
    """Returns whether plans made now assert numbers on the device, as TNP_CHECK=1 asks for.

    The variable is part of every plan's key, so a change takes effect at the next call. An
    assertion takes as long as a small launch.
    """
    return switched_on(CHECK_VARIABLE, "1", off=("", "0"))


def asserting(
    launch: Callable, conditions: Callable[[tuple], Iterable[tuple[Tensor, str]]]
) -> Callable:
    """Returns `launch`, or with TNP_CHECK=1 a launch that asserts its inputs' conditions first.

    Args:
        launch: takes inputs and scalars.
        conditions: takes the inputs, and returns pairs of a bool tensor and the sentence that an
            assertion ends in where the tensor is False.
    """
    if not asserts():
        return launch

    def after_check(inputs, scalars):
        for holds, sentence in conditions(inputs):
            torch._assert_async(holds, sentence)
        return launch(inputs, scalars)

    return after_check


def between(name: str, x: Tensor, low: int, high: int, label: str = "") -> tuple[Tensor, str]:
    """Returns the condition low ≤ x ≤ high for all of x, and the sentence of its error.

    `label` stands ahead of `high` in the sentence, for example "n_k = ".
    """
    sentence = f"{name} must lie between {low} and {label}{high}"
    return ((x >= low) & (x <= high)).all(), sentence


def cumulative(name: str, x: Tensor, of: str, n_rows: int) -> tuple[Tensor, str]:
    """Returns the condition that packed sequences follow one another over all rows of `of`."""
    holds = (x[0] == 0) & (x[-1] == n_rows) & (x.diff() >= 0).all()
    return holds, f"{name} must begin with 0, never decrease and end with {of}'s {n_rows} rows"
