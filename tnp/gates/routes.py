"""One case by every route that a call can take: eager, compiled, captured, as a custom operator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from tnp import dispatch, opaque
from tnp.contract import OWN
from tnp.gates.checks import Check
from tnp.gates.results import Results, Setting, compute

if TYPE_CHECKING:
    from tnp.gates.operators import Subject

BACKEND = {"cpu": "aot_eager", "cuda": "inductor"}


def checks(subject: Subject, setting: Setting) -> Iterator[Check]:
    """Other packages' and PyTorch's own forms are called as they are; ours go every way."""
    from tnp.gates.operators import against_float64

    name, device, found = subject.found.name, subject.device, subject.found

    def call(*arguments: Any) -> Any:
        n = len(setting.operator.tensors)
        return dispatch.call(
            setting.operator, name, arguments[:n], arguments[n:], tuple(setting.options.items())
        )

    def results(function: Any) -> Results:
        return compute(setting.operator, function, setting.inputs, setting.wanted, setting.upstream)

    yield from against_float64(subject, setting, results(call), ", eager,")
    if found.provider != OWN or found.compile:
        return
    torch._dynamo.reset()
    backend = BACKEND[device.type]
    compiled = torch.compile(call, fullgraph=found.traceable, backend=backend)
    yield from against_float64(subject, setting, results(compiled), f", compiled by {backend},")
    if device.type == "cuda":
        captured = _captured(lambda: results(call))
        yield from against_float64(subject, setting, captured, ", from a CUDA graph,")
    if found.forward is not None:
        yield _opcheck(subject, setting)


def _captured(results: Any) -> Results:
    """What a CUDA graph leaves where NaN was before it ran."""
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
    graph.replay()
    torch.cuda.synchronize()
    return found


def _opcheck(subject: Subject, setting: Setting) -> Check:
    """PyTorch's own tests of the custom operator: schema, autograd, fake tensors, AOT dispatch."""
    operator = setting.operator
    inputs = tuple(
        x if x is None else x.detach().requires_grad_(name in setting.wanted)
        for name, x in setting.inputs.items()
    )
    outcomes = torch.library.opcheck(
        opaque.custom_op(operator),
        (*inputs, *operator.numbers, _text(subject, setting, inputs)),
        raise_exception=False,
    )
    failed = {test: outcome for test, outcome in outcomes.items() if outcome != "SUCCESS"}
    what = "opcheck"
    if failed:
        test, outcome = next(iter(failed.items()))
        what += f": {test}: {' '.join(str(outcome).split())[:300]}"
    return subject.check(setting, what, "tests failed", len(failed), 0)


def _text(subject: Subject, setting: Setting, inputs: tuple) -> str:
    """What decides the launch, as `tnp.opaque.call` says it."""
    first = next(x for x in inputs if x is not None)
    problem = setting.case.problem
    given = tuple(name for name in setting.operator.optional if problem[name])
    known = (
        setting.operator.name, subject.found.name, problem.dtype, first.device, setting.wanted,
        tuple(setting.options.items()), given,
    )  # fmt: skip
    sizes = tuple(size for _, size in problem.sizes)
    return opaque._decided(*known, None) or opaque._decided(*known, sizes)
