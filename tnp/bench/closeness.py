"""Compares the results of implementations with PyTorch's, untimed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from tnp.dispatch import devices
from tnp.dispatch.call import call
from tnp.dispatch.registry import catalog, is_automatic
from tnp.dispatch.spec import Call, Case, Implementation, Operator
from tnp.experiment.failures import classify
from tnp.gates.results import Results, compute, wanted_of
from tnp.ops._shared.random_values import Random, Upstream


def measure_closeness(parameters: dict) -> list[dict[str, Any]]:
    """Returns a row for each implementation and pass of a job of `tnp.bench.outcome.op_job`.

    `difference` is the largest absolute difference between an element of its results and PyTorch's,
    or None if nothing can be compared. If the implementation failed, `reason` says why.
    PyTorch's are those of its plain form, or of the operator's reference where that form refuses
    the problem. NaN differs from everything, so that its difference is NaN.
    """
    operator = catalog().operator(parameters["op"])
    case = Case(operator.from_json(parameters["problem"]))
    device, trained = torch.device(parameters["device"]), "backward" in parameters["passes"]
    drawn = operator.draw(case, Random(case, device))
    inputs = {name: drawn.get(name) for name in operator.tensors}
    upstream = Upstream(Random(case, device, seed=1), drawn)
    plain = operator.implementations[0]

    def results(found: Implementation, function: Callable) -> Results:
        wanted = wanted_of(operator, found, case) if trained else ()
        options = dict(operator.call_options(case.problem))
        return compute(operator, case.problem, function, inputs, wanted, upstream, **options)

    wanted = wanted_of(operator, plain, case) if trained else ()
    refused = plain.refuses(Call(case.problem, devices.of_device(device), wanted))
    expected = results(plain, operator.reference if refused else plain.run)
    rows = []
    for name in parameters["implementations"]:
        # "auto" is one of several: it is asked for the gradients of the plain form.
        found = plain if is_automatic(name) else catalog().load(operator.name, name)
        failed = None
        try:
            given = results(found, partial(_called, operator, name))
        except Exception as error:  # the others are compared all the same
            given, (_, failed) = {}, classify(error)
        for pass_ in parameters["passes"]:
            pairs = [
                (x, expected[result])
                for result, x in given.items()
                if (result in operator.outputs) == (pass_ == "forward")
                and x is not None
                and expected.get(result) is not None
            ]
            difference = largest_difference(pairs) if pairs else None
            about = {"implementation": name, "pass": pass_}
            rows.append(about | {"difference": difference, "reason": failed})
    return rows


def largest_difference(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Returns the largest absolute difference of pairs of tensors. NaN differs from everything."""
    each = [
        torch.where(x == y, 0.0, (x.double() - y.double()).abs()).max() for x, y in pairs
    ]  # equal infinities do not differ
    return torch.stack(each).max().item()


def _called(operator: Operator, name: str, *arguments: Any, **options: Any) -> Any:
    """Calls an implementation with the arguments of the operator's reference."""
    n_inputs = len(operator.tensors)
    inputs, scalars = arguments[:n_inputs], arguments[n_inputs:]
    return call(operator, name, inputs, scalars, tuple(options.items()))
