"""Runs one case by every route of a call: eager, compiled, captured, as a custom operator.

One case of each kind with lengths also runs captured, with other lengths in the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from tnp.dispatch import custom_op
from tnp.dispatch.call import call
from tnp.dispatch.spec import OWN
from tnp.gates.checks import Check
from tnp.gates.results import Results, Setting, compute

BACKEND = {"cpu": "aot_eager", "cuda": "inductor"}


def checks(setting: Setting) -> Iterator[Check]:
    """Checks the routes.

    Forms of PyTorch and other packages are called directly. Ours go every way.
    """
    found, device, call = setting.found, setting.device.type, _call(setting)
    yield from setting.against_float64(_results(setting, call), ", eager,")
    if found.provider != OWN or found.compile:
        return
    torch._dynamo.reset()
    backend = BACKEND[device]
    compiled = torch.compile(call, fullgraph=found.traceable, backend=backend)
    yield from setting.against_float64(_results(setting, compiled), f", compiled by {backend},")
    if device == "cuda":
        captured, replay = _captured(lambda: _results(setting, call))
        replay()
        yield from setting.against_float64(captured, ", from a CUDA graph,")
    if found.forward is not None:
        yield _opcheck(setting)


def with_other_lengths(setting: Setting) -> Iterator[Check]:
    """Checks that a captured launch is right for lengths that change in place."""
    captured, replay = _captured(partial(_results, setting, _call(setting)))
    for name, x in setting.operator.other_lengths(setting.inputs).items():
        setting.inputs[name].copy_(x)
    replay()
    expected = setting.with_upstream(setting.upstream)
    yield from expected.against_float64(captured, ", from a CUDA graph with other lengths,")


def _call(setting: Setting) -> Callable:
    """Returns a function with the reference's arguments that makes the public call."""
    n, options = len(setting.operator.tensors), tuple(setting.options.items())

    def run(*arguments: Any) -> Any:
        tensors, numbers = arguments[:n], arguments[n:]
        return call(setting.operator, setting.found.name, tensors, numbers, options)

    return run


def _results(setting: Setting, function: Callable) -> Results:
    asked = setting.operator, setting.case.problem
    return compute(*asked, function, setting.inputs, setting.wanted, setting.upstream)


def _captured(results: Callable[[], Results]) -> tuple[Results, Callable[[], None]]:
    """Returns the results that a CUDA graph writes, NaN before it runs, and its replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):  # compiles, and reserves memory
            results()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = results()
    for x in found.values():
        if x is not None and x.is_floating_point():
            x.fill_(float("nan"))

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return found, replay


def _opcheck(setting: Setting) -> Check:
    """Runs PyTorch's own tests of the custom operator: schema, autograd, fake tensors, AOT."""
    operator = setting.operator
    inputs = tuple(
        x if x is None else x.detach().requires_grad_(name in setting.wanted)
        for name, x in setting.inputs.items()
    )
    tests = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if not any(x is not None and x.dtype.itemsize == 1 for x in inputs):
        tests.insert(0, "test_schema")  # it multiplies values, which PyTorch cannot do in 8 bits
    outcomes = torch.library.opcheck(
        custom_op.custom_operator(operator).differentiable,
        (*inputs, *operator.numbers, _text(setting, inputs)),
        test_utils=tests,
        raise_exception=False,
    )
    failed = {test: outcome for test, outcome in outcomes.items() if outcome != "SUCCESS"}
    what = "opcheck"
    if failed:
        test, outcome = next(iter(failed.items()))
        what += f": {test}: {' '.join(str(outcome).split())[:300]}"
    return setting.check(what, "tests failed", len(failed), 0)


def _text(setting: Setting, inputs: tuple) -> str:
    """Returns the text that decides the launch, as `tnp.dispatch.custom_op.call` makes it."""
    first = next(x for x in inputs if x is not None)
    problem = setting.case.problem
    given = tuple(name for name in setting.operator.optional if problem[name])
    shown = tuple(pair for pair in problem.options if pair[0] in setting.operator.read_off)
    known = (
        setting.operator.name, setting.found.name, problem.dtype, first.device, setting.wanted,
        tuple(setting.options.items()), shown, given,
    )  # fmt: skip
    sizes = tuple(size for _, size in problem.sizes)
    return custom_op._decided(*known, None) or custom_op._decided(*known, sizes)
