"""Refuses, launches and judges implementations of the lab without a GPU."""

from dataclasses import replace

import pytest
import torch

from tests.lab import emulation
from tnp.dispatch import devices, launcher, plans
from tnp.dispatch.devices import Target
from tnp.dispatch.registry import catalog
from tnp.dispatch.spec import Call
from tnp.gates.poison import Poisoned, guarded
from tnp.gates.results import Setting, compute
from tnp_lab import launch

H200 = devices.named("nvidia-h200")
DEVICE = torch.device("cpu")
emulates = pytest.mark.skipif(emulation.COMPILER is None, reason="g++ is not installed")


def refused(op: str, name: str, dtype: str, wanted=(), target: Target = H200, **sizes) -> str:
    operator = catalog().operator(op)
    reason = (
        catalog().load(op, name).refuses(Call(operator.problem(dtype, **sizes), target, wanted))
    )
    assert reason is None or "\n" not in reason
    return reason


def bound(op: str, name: str, case, options=()) -> launch.Bound:
    """Returns the launch of a case's inputs on the meta device, where nothing runs."""
    from tnp.ops._shared.random_values import Random

    operator, noted = catalog().operator(op), []
    drawn = operator.draw(case, Random(case, torch.device("meta")))
    inputs = tuple(drawn.get(name) for name in operator.tensors)
    plan = plans.build(operator, name, inputs, operator.call_options(case.problem), (), H200)
    with launcher.watched_others(noted.append):
        plan.forward(inputs, operator.numbers)
    (found,) = noted
    return found


def judged(
    op: str, name: str, case, wanted=(), target: Target = H200
) -> list[tuple[str, float, float]]:
    """Judges results of a case against float64. Memory that is not written is NaN."""
    operator = catalog().operator(op)
    found = catalog().load(op, name)
    setting = replace(Setting.of(operator, found, case, DEVICE), wanted=wanted)
    setting = setting.with_upstream(setting.upstream)
    inputs = {n: x if x is None else guarded(x.detach()) for n, x in setting.inputs.items()}
    options = tuple(setting.options.items())
    plan = plans.build(operator, name, tuple(inputs.values()), options, wanted, target)

    def function(*arguments):
        n = len(operator.tensors)
        return plan.run(arguments[:n], arguments[n:])

    with Poisoned():
        results = compute(operator, case.problem, function, inputs, wanted, setting.upstream)
    return list(setting.judged(results))


def assert_within_budget(*arguments, **named):
    for result, ratio, allowed in judged(*arguments, **named):
        assert ratio <= allowed, result
