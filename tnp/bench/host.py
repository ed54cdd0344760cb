"""Measures what an operator's call costs the host, at sizes where the device waits for it.

Implementations take turns in one process. Each round makes `CALLS` calls without waiting for the
device. Its queue holds all their launches, so the time is the host's alone. Our implementations and
"auto" are called through `tnp.dispatch`. A function that PyTorch differentiates is called directly,
as a user of PyTorch calls it. The passes are:

    forward     a call that nobody differentiates
    recorded    a call that autograd records
    training    a call and its backward pass: autograd runs it on another thread
    chain       a call of many in a row, which go to that thread and back only once: the slope
                between a chain of `CHAIN` calls and a single one

`with_launches` is false if every launch of ours was replaced by nothing: the rest is Python before
the launch. `bare_function` stands beside it: an `autograd.Function` of three tensors that does
nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import torch

from tnp.bench.statistics import summarize
from tnp.bench.timing import synchronize
from tnp.dispatch import call as dispatch
from tnp.dispatch import devices, plans
from tnp.dispatch.call import forget
from tnp.dispatch.launcher import Bound
from tnp.dispatch.registry import catalog, is_automatic
from tnp.dispatch.selection import choose_implementation
from tnp.dispatch.spec import Call, Case, Operator
from tnp.ops._shared.random_values import Random

CALLS = 40
CHAIN = 9
WARM_ROUNDS, ROUNDS = 3, 30
BARE = "bare_function"
PASSES = ("forward", "recorded", "training", "chain")

Run = Callable[[], object]
Output = Callable[..., torch.Tensor]  # an operator's inputs → its last output


def measure_host(parameters: dict) -> list[dict]:
    """Returns rows of table "host_calls", without provenance.

    Args:
        parameters: `problems`, each with op, problem (JSON) and implementations; `device`.
    """
    device = torch.device(parameters["device"])
    rows = []
    for entry in parameters["problems"]:
        operator = catalog().operator(entry["op"])
        case = Case(operator.from_json(entry["problem"]))
        for with_launches in (True, False) if device.type == "cuda" else (False,):
            with nullcontext() if with_launches else launching_nothing():
                rows += _of_problem(operator, case, entry["implementations"], with_launches, device)
    return rows


@contextmanager
def launching_nothing() -> Iterator[None]:
    """Replaces every launch of ours by nothing inside the block."""
    with patch.object(Bound, "__call__", lambda self, *arguments: None):
        forget()
        yield
    forget()


def _of_problem(
    operator: Operator, case: Case, names: list[str], with_launches: bool, device: torch.device
) -> list[dict]:
    contenders = names if with_launches else [*names, BARE]
    rows = []
    for pass_ in PASSES:
        timed, reasons = {}, {}
        for name in contenders:
            try:
                timed[name] = _runs(operator, case, name, pass_, device)
                for run in timed[name]:
                    run()
            except (RuntimeError, ValueError, NotImplementedError) as error:
                timed.pop(name, None)
                reasons[name] = str(error).splitlines()[0]
        samples = _in_turn(timed, device)
        for name in contenders:
            row = {
                "op": operator.name, "pass": pass_, "implementation": name,
                "problem": case.problem.json, "with_launches": with_launches,
            }  # fmt: skip
            if name in reasons:
                row |= {"status": "unsupported", "reason": reasons[name]}
            else:
                row |= {"status": "ok", "reason": ""} | summarize(samples[name], "host_us")
                row["n_samples"] = len(samples[name])
            rows.append(row)
    return rows


def _call(
    operator: Operator, case: Case, name: str, wanted: tuple[str, ...], device: torch.device
) -> Output:
    """Returns a function that calls an implementation. Raises RuntimeError if it cannot run."""
    if name == BARE:
        return _bare
    numbers, options = operator.numbers, operator.call_options(case.problem)
    several = len(operator.outputs_of(case.problem)) > 1
    if not is_automatic(name):
        what = Call(case.problem, devices.of_device(device), wanted)
        chosen, found = choose_implementation(operator, name, what)
        if found.run is not None:
            plan = plans.PlainPlan(what, found, chosen)
            function, named = plan.function, plan.options

            def call_itself(*inputs: torch.Tensor | None) -> torch.Tensor:
                outputs = function(*inputs, *numbers, **named)
                return outputs[-1] if several else outputs

            return call_itself

    def call_public(*inputs: torch.Tensor | None) -> torch.Tensor:
        outputs = dispatch.call(operator, name, inputs, numbers, options)
        return outputs[-1] if several else outputs

    return call_public


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, z):
        ctx.save_for_backward(x, y, z)
        return x.new_empty(x.shape)

    @staticmethod
    def backward(ctx, dout):
        x, y, z = ctx.saved_tensors
        return x.new_empty(x.shape), y.new_empty(y.shape), z.new_empty(z.shape)


def _bare(*inputs: torch.Tensor | None) -> torch.Tensor:
    tensors = [x for x in inputs if x is not None]
    return _Nothing.apply(*(tensors * 3)[:3])


def _runs(operator: Operator, case: Case, name: str, pass_: str, device: torch.device) -> list[Run]:
    """Returns the functions to time: one call, or for pass "chain" a single call and a chain."""
    drawn = operator.draw(case, Random(case, device))
    inputs = [drawn.get(one) for one in operator.tensors]
    wanted = () if pass_ == "forward" else tuple(n for n in operator.differentiated if n in drawn)
    leaves = [drawn[one].requires_grad_() for one in wanted]
    call = _call(operator, case, name, wanted, device)
    if pass_ in ("forward", "recorded"):
        return [lambda: call(*inputs)]
    gradient = torch.empty_like(call(*inputs)).detach().zero_()

    def chain(length: int) -> None:
        x = call(*inputs)
        for _ in range(length - 1):
            if x.shape != inputs[0].shape:
                raise NotImplementedError("its result does not fit its input: it makes no chain")
            x = call(x, *inputs[1:])
        torch.autograd.grad(x, leaves, gradient)

    if pass_ == "training":
        return [lambda: chain(1)]
    return [lambda: chain(1), lambda: chain(CHAIN)]


def _in_turn(timed: dict[str, list[Run]], device: torch.device) -> dict[str, list[float]]:
    """Returns the microseconds of a call, one number for each round."""
    samples: dict[str, list[float]] = {name: [] for name in timed}
    for number in range(WARM_ROUNDS + ROUNDS):
        for name, runs in timed.items():
            spans = [_host_us(run, device) for run in runs]
            if number >= WARM_ROUNDS:
                span = spans[0] if len(spans) == 1 else (spans[1] - spans[0]) / (CHAIN - 1)
                samples[name].append(span)
    return samples


def _host_us(run: Run, device: torch.device) -> float:
    synchronize(device)
    calls = max(1, CALLS // CHAIN) if device.type == "cuda" else CALLS
    start = time.perf_counter()
    for _ in range(calls):
        run()
    span = time.perf_counter() - start
    synchronize(device)
    return span / calls * 1e6
