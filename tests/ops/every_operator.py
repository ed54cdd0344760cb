"""A small problem of each operator that ours serve here, for tests of what all have in common."""

import math
from collections.abc import Callable

import pytest
import torch

from tests.ops.problems import DEVICE, HERE
from tnp.dispatch.call import call
from tnp.dispatch.registry import catalog
from tnp.dispatch.spec import Call, Case, Implementation, Operator
from tnp.gates.results import wanted_of
from tnp.ops._shared.random_values import Random

Outputs = Callable[..., list[torch.Tensor]]


def smallest(operator: Operator, found: Implementation) -> Case | None:
    """The case of the gate with the fewest numbers that an implementation serves here."""

    def served(case: Case) -> bool:
        what = Call(case.problem, HERE, wanted_of(operator, found, case))
        none = 0 in dict(case.problem.sizes).values() or case["forward_only"]
        return not none and found.refuses(what) is None

    def extent(case: Case) -> int:
        return math.prod(size for _, size in case.problem.sizes)

    return min(filter(served, operator.cases(HERE)), key=extent, default=None)


def of_every_operator() -> list:
    """The last implementation of ours that runs here: routes are the operator's."""
    found = []
    for operator in catalog().operators.values():
        ours = [one for one in operator.implementations if one.forward is not None]
        cases = [(one, smallest(operator, one)) for one in ours]
        served = [(one, case) for one, case in cases if case is not None]
        if served:
            found.append(pytest.param(operator, *served[-1], id=operator.name))
    return found


EVERY = pytest.mark.parametrize(("operator", "found", "case"), of_every_operator())


def drawn(operator: Operator, found: Implementation, case: Case) -> tuple[list, Outputs]:
    """Differentiable inputs of a case, or all floats where there are none; outputs of these."""
    values = operator.draw(case, Random(case, DEVICE))
    inputs = {name: values.get(name) for name in operator.tensors}
    wanted = wanted_of(operator, found, case) or tuple(
        name for name, x in inputs.items() if x is not None and x.is_floating_point()
    )

    def outputs(*some: torch.Tensor) -> list[torch.Tensor]:
        given = inputs | dict(zip(wanted, some, strict=True))
        options = operator.call_options(case.problem)
        made = call(operator, found.name, tuple(given.values()), operator.numbers, options)
        return [x.float() for x in (made if isinstance(made, tuple) else (made,))]

    return [inputs[name].detach() for name in wanted], outputs
