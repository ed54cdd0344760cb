"""Checks that a number out of range makes its sequence NaN, and changes no other result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from tnp.gates.checks import Check
from tnp.gates.results import Results

if TYPE_CHECKING:
    from tnp.gates.forced import Forced


def checks(run: Forced, first: Results) -> Iterator[Check]:
    """Yields a check for each input that the operator's `out_of_range` gives.

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
                x,
                right[name],
                spoiled.get(name),
                name in names,
                exact=name not in run.nondeterministic,
            )
        ]
        of = ", ".join(wrong)
        what = f"{of} out of range: NaN in its sequence, and nothing else changes"
        if faulty:
            what += f"; violated by {', '.join(faulty)}"
        yield run.check(what, "results", len(faulty), 0)


def _is_faulty(
    x: torch.Tensor, right: torch.Tensor, where: torch.Tensor | None, is_output: bool, exact: bool
) -> bool:
    """Returns whether x lacks a required NaN, or differs from `right` elsewhere.

    Args:
        where: bool mask over the leading dimensions of x; None: no NaN is required. An output is
            NaN in all of it. A gradient has some NaN there: padding may keep its zeros.
        exact: x must equal `right` bit by bit elsewhere; if False, it must not be NaN there.
    """
    if where is None:
        return not torch.equal(x, right) if exact else bool(x.isnan().any())
    where = where.reshape(where.shape + (1,) * (x.dim() - where.dim())).expand(x.shape)
    is_nan = x[where].isnan()
    missing = not (is_nan.all() if is_output else is_nan.any())
    others = x[~where]
    spread = not torch.equal(others, right[~where]) if exact else others.isnan().any()
    return bool(missing or spread)
