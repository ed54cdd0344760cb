"""Gives tests problems of operators: random inputs, results by name, and their budgets."""

from collections.abc import Callable

import torch

from tnp.dispatch import devices, plans, selection
from tnp.dispatch.call import call
from tnp.dispatch.spec import Case, Implementation, Operator
from tnp.gates.results import Results, Setting, compute, wanted_of
from tnp.ops._shared.random_values import Random, Upstream

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HERE = devices.of_device(DEVICE)


def setting(
    operator: Operator, implementation: str, dtype: str = "float32", draw: dict | None = None,
    **problem,
) -> Setting:  # fmt: skip
    """Returns random inputs of sizes and options `problem`, and the results expected of them."""
    found = next(one for one in operator.implementations if one.name == implementation)
    case = Case(operator.problem(dtype, **problem), tuple((draw or {}).items()))
    return Setting.of(operator, found, case, DEVICE)


def unexpected(operator: Operator, found: Implementation, case: Case) -> Setting:
    """Returns the inputs of a case alone: no result is computed that would be expected."""
    drawn = operator.draw(case, Random(case, DEVICE))
    inputs = {name: drawn.get(name) for name in operator.tensors}
    return Setting(
        operator, found, case, DEVICE, inputs, dict(operator.call_options(case.problem)),
        wanted_of(operator, found, case), Upstream(Random(case, DEVICE, seed=1), drawn),
        budget=operator.budget, floors=0.0, plain=operator.reference, own={}, exact={},
        originals=None, rounded={},
    )  # fmt: skip


def results(of: Setting, function: Callable) -> Results:
    """Returns outputs and gradients of `function(*inputs, *scalars)`."""
    asked = of.operator, of.case.problem
    return compute(*asked, function, of.inputs, of.wanted, of.upstream)


def by(of: Setting, implementation: str, forced: selection.Forced | None = None) -> Results:
    """Returns the results of an implementation, called as a model calls it, or of forced kernels.

    Operations that are not in `forced` choose their own kernels.
    """
    n, options = len(of.operator.tensors), tuple(of.options.items())

    def run(*arguments):
        tensors, numbers = arguments[:n], arguments[n:]
        if forced is None:
            return call(of.operator, implementation, tensors, numbers, options)
        plan = plans.build(
            of.operator, implementation, tensors, options, of.wanted, forced=forced
        )  # fmt: skip
        return plan.run(tensors, numbers)

    return results(of, run)


def assert_within_budget(of: Setting, got: Results) -> None:
    for name, ratio, bound in of.judged(got):
        assert ratio <= bound, name


def assert_equal(got: Results, expected: Results) -> None:
    """Asserts that results are equal bit by bit."""
    assert got.keys() == expected.keys()
    for name, x in expected.items():
        assert torch.equal(got[name], x), name
