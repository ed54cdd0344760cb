"""Checks two plain bounds on results: one in float16, and phase 2's in bfloat16.

- In float16 every implementation of ours is within 0.001 of float64, or within one unit in the last
  place of the largest result if that is more.
- In bfloat16 attention of ours is within 0.01 of PyTorch's, at the sizes of the model.

An operator's own gate has finer bounds, which grow with the rounding that a problem must have. This
gate takes the largest float16 case of that gate for each set of options and each size that kernels
are written for, and runs every forward kernel that can serve it. An implementation that serves none
is left out with its reason. Implementations in 8 bits promise less, so they are not checked. A
control is red if zeros in place of the results would pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from tnp.dispatch import devices, plans, selection
from tnp.dispatch.devices import Target
from tnp.dispatch.registry import catalog
from tnp.dispatch.spec import Call, Case, Implementation, Operator
from tnp.experiment.gpu_memory import why_it_does_not_fit
from tnp.gates.checks import Check, LeftOut, max_abs_error
from tnp.gates.forced import Pair, pairs_of
from tnp.gates.launches import launches
from tnp.gates.results import Inputs, Results, compute, in_float64
from tnp.model.config import TNPConfig
from tnp.ops._shared.random_values import Random
from tnp.ops.attention import OPERATOR as ATTENTION
from tnp.train import warm

FLOAT16_BOUND = 1e-3
ATTENTION_BOUND = 1e-2
SHAPES = {"small": (64, 500), "mid": (10_000, 1000), "large": (200_000, 5000)}
INTERPRETED = ("small",)  # larger shapes take the interpreter hours


class Bounded(NamedTuple):
    """Holds a case, what its results are compared with, and how far they may be off."""

    operator: Operator
    case: Case
    beside: str  # "float64", "PyTorch at mid"
    expected: Callable[[Operator, Case, Inputs], Results]
    bound: Callable[[torch.Tensor], float]  # takes an expected result


def checks(device: torch.device) -> Iterator[Check | LeftOut]:
    """Yields the checks of both bounds. A case that does not fit the memory is left out.

    Raises Busy if other processes hold the memory that a case needs.
    """
    target = devices.of_device(device)
    every = [*_attention_cases(target), *_float16_cases(target)]
    if device.type == "cuda":
        _compile(every, target)
    for bounded in every:
        try:
            yield from _checks_of(bounded, device)
            reason = None
        except Exception as error:
            reason = why_it_does_not_fit(error)
            if reason is None:
                raise
        if reason is not None:  # behind `except`: the error's traceback holds tensors
            torch.cuda.empty_cache()
            yield LeftOut(str(bounded.case), bounded.case.problem.json, reason)
    yield from _refused(every, target)


def bound_in_float16(expected: torch.Tensor) -> float:
    """Returns 0.001, or one unit in the last place of the largest float16 result if larger."""
    _, exponent = math.frexp(expected.abs().max().item())
    return max(FLOAT16_BOUND, torch.finfo(torch.float16).eps * 2.0 ** (exponent - 1))


def largest_cases(operator: Operator, target: Target) -> list[Case]:
    """Returns the largest float16 case of each kind that the operator's gate has.

    Cases of a kind have the same options, and the same of the operator's `fixed` sizes.
    """
    largest: dict[tuple, Case] = {}
    for case in operator.cases(target):
        fixed = tuple(size for size in case.problem.sizes if size[0] in operator.fixed)
        kind = case.problem.options, fixed
        before = largest.get(kind)
        if case.problem.dtype == "float16" and (before is None or _extent(case) > _extent(before)):
            largest[kind] = case
    return list(largest.values())


def _extent(case: Case) -> int:
    return math.prod(size for _, size in case.problem.sizes)


def _float16_cases(target: Target) -> Iterator[Bounded]:
    for operator in catalog().operators.values():
        for case in largest_cases(operator, target):
            yield Bounded(operator, case, "float64", _exact, bound_in_float16)


def _attention_cases(target: Target) -> Iterator[Bounded]:
    config = TNPConfig()
    head_dim = config.d_model // config.n_heads
    for shape in SHAPES if target.kind == "cuda" else INTERPRETED:
        n_context, n_target = SHAPES[shape]
        sizes = 1, config.n_heads, n_context + n_target, n_context, head_dim
        case = ATTENTION.case("bfloat16", *sizes)
        yield Bounded(
            ATTENTION, case, f"PyTorch at {shape}", _by_pytorch, lambda _: ATTENTION_BOUND
        )


def _exact(operator: Operator, case: Case, inputs: Inputs) -> Results:
    options = dict(operator.call_options(case.problem))
    return compute(operator, case.problem, operator.reference, in_float64(inputs), **options)


def _by_pytorch(operator: Operator, case: Case, inputs: Inputs) -> Results:
    options = dict(operator.call_options(case.problem))
    form = operator.implementations[0].run  # an operator's first implementation is PyTorch's
    return compute(operator, case.problem, form, inputs, **options)


def _checks_of(bounded: Bounded, device: torch.device) -> Iterator[Check]:
    operator, case, beside = bounded.operator, bounded.case, bounded.beside
    drawn = operator.draw(case, Random(case, device))
    inputs = {name: drawn.get(name) for name in operator.tensors}
    expected = bounded.expected(operator, case, inputs)
    bounds = {name: bounded.bound(value) for name, value in expected.items()}
    for name, value in expected.items():
        yield Check(f"control must fail: zeros for {name} against {beside}, {case}",
                    "max_abs_error", max_abs_error(torch.zeros_like(value), value), bounds[name],
                    op=operator.name, problem=case.problem.json, larger_is_better=True)  # fmt: skip
    for found, pair in _serving_kernels(bounded, devices.of_device(device)):
        got = _run(bounded, found, pair, inputs)
        for name, value in expected.items():
            yield Check(f"{name} against {beside}, {case}", "max_abs_error",
                        max_abs_error(got[name], value), bounds[name], found.name,
                        op=operator.name, problem=case.problem.json, kernel=pair.name)  # fmt: skip


def _serving_kernels(bounded: Bounded, target: Target) -> Iterator[tuple[Implementation, Pair]]:
    """Yields our implementations that can serve the case, with each of their forward kernels."""
    what = Call(bounded.case.problem, target)
    for found in catalog().ours(bounded.operator.name):
        if not found.precision and selection.refuses(found, what) is None:
            for pair in pairs_of(found, what):
                yield found, pair


def _refused(every: list[Bounded], target: Target) -> Iterator[LeftOut]:
    """Yields our implementations that serve no case here. The reason is for the last case."""
    served = {
        (bounded.operator.name, found.name)
        for bounded in every
        for found, _ in _serving_kernels(bounded, target)
    }
    of_operators = {bounded.operator.name: bounded for bounded in every}
    for name, bounded in of_operators.items():
        problem = bounded.case.problem
        for found in catalog().ours(name):
            if not found.precision and (name, found.name) not in served:
                reason = selection.refuses(found, Call(problem, target))
                yield LeftOut(f"{name} {found.name}", problem.json, reason or "it has no kernel")


def _run(bounded: Bounded, found: Implementation, pair: Pair, inputs: Inputs) -> Results:
    operator, problem = bounded.operator, bounded.case.problem
    forced = {found.forward.name: (pair.forward.kernel.name, pair.forward.config)}
    tensors, options = tuple(inputs.values()), tuple(operator.call_options(problem))
    plan = plans.build(operator, found.name, tensors, options, forced=forced)
    n = len(tensors)
    return compute(operator, problem, lambda *given: plan.run(given[:n], given[n:]), inputs)


def _compile(every: list[Bounded], target: Target) -> None:
    """Compiles all kernels side by side. What fails is compiled again by the checks, and raises."""
    with warm.side_by_side(target):
        for bounded in every:
            for found in {
                found.name: found for found, _ in _serving_kernels(bounded, target)
            }.values():
                forward = replace(found, backward=None)
                for launch in launches(bounded.operator, bounded.case.problem, target, forward):
                    try:
                        launch.call()
                    except Exception as error:  # host code may fail on tensors without memory
                        warm.log.warning("not compiled ahead, %s: %s", bounded.case, error)
