"""A problem of an operator as a test has it: drawn inputs, results by name, and their budgets."""

from collections.abc import Callable

import torch

from tnp.dispatch import devices
from tnp.dispatch.spec import Case, Operator
from tnp.gates.results import Results, Setting, compute

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HERE = devices.of_device(DEVICE)


def setting(
    operator: Operator, implementation: str, dtype: str = "float32", draw: dict | None = None,
    **problem,
) -> Setting:  # fmt: skip
    """Inputs of sizes and options `problem`, drawn as `draw` says, and what is expected of them."""
    found = next(one for one in operator.implementations if one.name == implementation)
    case = Case(operator.problem(dtype, **problem), tuple((draw or {}).items()))
    return Setting.of(operator, found, case, DEVICE)


def results(of: Setting, function: Callable) -> Results:
    """Outputs and gradients of `function(*inputs, *scalars)`."""
    asked = of.operator, of.case.problem
    return compute(*asked, function, of.inputs, of.wanted, of.upstream)


def by(of: Setting, implementation: str) -> Results:
    """Of an implementation, called as a model calls it."""
    n = len(of.operator.tensors)

    def call(*arguments):
        options = tuple(of.options.items())
        return call(
            of.operator, implementation, arguments[:n], arguments[n:], options
        )  # fmt: skip

    return results(of, call)


def assert_within_budget(of: Setting, got: Results) -> None:
    for name, ratio, bound in of.judged(got):
        assert ratio <= bound, name


def assert_equal(got: Results, expected: Results) -> None:
    """Bit by bit."""
    assert got.keys() == expected.keys()
    for name, x in expected.items():
        assert torch.equal(got[name], x), name
