"""Checks that a number out of range makes its sequence NaN, and changes nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from tnp.gates.checks import Check
from tnp.gates.results import Results

if TYPE_CHECKING:
    from tnp.gates.operators import Forced


def checks(run: Forced, first: Results) -> Iterator[Check]:
    """Yields a check for each of the inputs that the operator's `out_of_range` gives.

    Args:
        run: computes results of the setting's inputs.
        first: its results of the inputs as they were drawn.
    """
    setting = run.setting
    given = setting.operator.out_of_range(setting.case, setting.inputs)
    for wrong, nearest, spoiled in given:
        got = run.results(setting.inputs | wrong)
        right = run.results(setting.inputs | nearest) if nearest else first
        names = setting.operator.outputs
        faulty = [
            name
            for name, x in got.items()
            if x is not None
            and _is_faulty(
                x, right[name], spoiled.get(name), name in names, exact=name not in run.moving
            )
        ]
        of = ", ".join(wrong)
        what = f"{of} out of range: NaN there alone"
        if faulty:
            what += f", not in {', '.join(faulty)}"
        yield run.check(what, "results", len(faulty), 0)


def _is_faulty(
    x: torch.Tensor, right: torch.Tensor, where: torch.Tensor | None, is_output: bool, exact: bool
) -> bool:
    """Whether x is not NaN where it must be, or differs from `right` elsewhere.

    Args:
        where: bool, the leading dimensions of x; None: x is NaN nowhere. An output is NaN in all of
            it. A gradient has some NaN there: padding may keep its zeros.
        exact: whether x must be `right` bit by bit elsewhere.
    """
    if where is None:
        return exact and not torch.equal(x, right)
    where = where.reshape(where.shape + (1,) * (x.dim() - where.dim())).expand(x.shape)
    is_nan = x[where].isnan()
    missing = not (is_nan.all() if is_output else is_nan.any())
    return missing or (exact and not torch.equal(x[~where], right[~where]))
