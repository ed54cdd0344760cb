"""Computes the results of a case by name, and how far they may be from float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from tnp.dispatch import devices
from tnp.dispatch.devices import Target
from tnp.dispatch.spec import Budget, Call, Case, Implementation, Operator, Problem
from tnp.gates.checks import Check, distance, error_ratio, expected_error
from tnp.ops._shared.random_values import Random, Upstream
from tnp.ops._shared.rounding_error import LEAST_NORM

Inputs = dict[str, torch.Tensor | None]  # inputs by name, in the operator's order
Results = dict[str, torch.Tensor | None]  # outputs by name, and "d" + input; None: not given
Gradient = Callable[[str, torch.Tensor], torch.Tensor | None]  # takes an output's (name, like)


def compute(
    operator: Operator,
    problem: Problem,
    function: Callable,
    inputs: Inputs,
    wanted: tuple[str, ...] = (),
    upstream: Gradient | None = None,
    **options: Any,
) -> Results:
    """Returns outputs of `function(*inputs, *scalars, **options)`, and the `wanted` gradients."""
    leaves = [
        x if x is None else x.detach().requires_grad_(name in wanted) for name, x in inputs.items()
    ]
    with torch.set_grad_enabled(bool(wanted)):
        outputs = function(*leaves, *operator.numbers, **options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    named = dict(zip(operator.outputs_of(problem), outputs, strict=True))
    found: Results = {name: x.detach() for name, x in named.items()}
    if wanted:
        arriving = [(x, upstream(name, x.detach())) for name, x in named.items() if x.requires_grad]
        arriving = [(x, gradient) for x, gradient in arriving if gradient is not None]
        at = dict(zip(operator.tensors, leaves, strict=True))
        given = torch.autograd.grad(
            [x for x, _ in arriving], [at[name] for name in wanted],
            [gradient for _, gradient in arriving], allow_unused=True,
        ) if arriving else [None] * len(wanted)  # fmt: skip
        found |= {f"d{name}": gradient for name, gradient in zip(wanted, given, strict=True)}
    return found


@dataclass(frozen=True)
class Setting:
    """Holds a case with its inputs, and the results expected of an implementation."""

    operator: Operator
    found: Implementation
    case: Case
    device: torch.device
    inputs: Inputs
    options: dict  # options of the call
    wanted: tuple[str, ...]
    upstream: Gradient
    budget: Budget
    floors: float | Mapping[str, float]  # relative errors that no rounding can undercut
    plain: Callable  # PyTorch's form in the case's dtype
    own: Results  # results of `plain`
    exact: Results  # float64 results; only the inputs are rounded to the implementation's format
    originals: Results | None  # float64 results from the inputs, if rounding changes them
    rounded: Results  # float64 results; values on the way are rounded to a narrower format too

    @classmethod
    def of(
        cls, operator: Operator, found: Implementation, case: Case, device: torch.device
    ) -> Setting:
        """Draws the inputs and computes the expected results."""
        drawn = operator.draw(case, Random(case, device))
        inputs = {name: drawn.get(name) for name in operator.tensors}
        options = dict(operator.call_options(case.problem))
        wanted = wanted_of(operator, found, case)
        upstream = Upstream(Random(case, device, seed=1), drawn)
        budget = found.budget or operator.budget
        yardstick = operator.implementations[0]
        what = Call(case.problem, devices.of_device(device), wanted)
        refused = yardstick.run is None or yardstick.refuses(what)
        plain = operator.reference if refused else yardstick.run
        floors = operator.condition(case, inputs) if operator.condition else 0.0

        of_inputs = cls(
            operator, found, case, device, inputs, options, wanted, upstream, budget, floors, plain,
            own={}, exact={}, originals=None, rounded={},
        )  # fmt: skip
        return of_inputs.with_upstream(upstream)

    @property
    def target(self) -> Target:
        return devices.of_device(self.device)

    def results(self, function: Callable, inputs: Inputs, upstream: Gradient) -> Results:
        """Returns the results of a function that takes the reference's arguments."""
        asked = self.operator, self.case.problem
        return compute(*asked, function, inputs, self.wanted, upstream, **self.options)

    def with_upstream(self, upstream: Gradient) -> Setting:
        """Returns the setting for other gradients of the outputs."""
        inputs, budget = self.inputs, self.budget
        held = inputs if budget.emulate is None else inputs | budget.emulate(self.case, inputs)

        def as_given(name: str, x: torch.Tensor | None) -> torch.Tensor | None:
            return x if x is None else x.to(inputs[name].dtype)

        def exact(of: Inputs) -> Results:
            return self.results(self.operator.reference, in_float64(of), upstream)

        own_inputs = {name: as_given(name, x) for name, x in held.items()}
        return replace(
            self, upstream=upstream, own=self.results(self.plain, own_inputs, upstream),
            exact=exact(held), originals=None if budget.emulate is None else exact(inputs),
            rounded=budget.rounded(self.case, inputs, upstream) if budget.rounded else {},
        )  # fmt: skip

    def check(self, what: str, metric: str, value: float, bound: float, kernel: str = "") -> Check:
        """Makes a check of the implementation in this case."""
        return Check(
            f"{what}, {self.case}", metric, value, bound, self.found.name, op=self.operator.name,
            problem=self.case.problem.json, kernel=kernel,
        )  # fmt: skip

    def against_float64(self, got: Results, how: str, kernel: str = "") -> Iterator[Check]:
        """Yields a check of each result. `how` follows its name."""
        for result, ratio, bound in self.judged(got):
            what = f"{result}{how} against float64"
            yield self.check(what, "error_ratio", ratio, bound, kernel)

    def judged(self, got: Results) -> Iterator[tuple[str, float, float]]:
        """Yields name, error ratio and bound of each result, and of emulated ones twice.

        Emulated results are also compared with float64 results of the original inputs. Their bound
        is `Budget.emulated` times the emulation's error or, if that is larger, what their dtype
        allows: rounding may cause no error, for example with one key. A missing result counts as
        zeros. One of another shape than PyTorch's, or of a narrower dtype, has an infinite error.
        """
        for name, value in got.items():
            is_gradient = name not in self.operator.outputs
            bound = self.budget.gradients if is_gradient else self.budget.outputs
            yield name, self._ratio(name, value), bound
            depends = value is not None and self.exact[name] is not None
            if self.originals is not None and depends:
                ratio = self._ratio_of_originals(name, value, bound)
                yield f"{name} of the originals", ratio, self.budget.emulated

    def _ratio_of_originals(self, name: str, value: torch.Tensor, bound: float) -> float:
        emulated, originals = self.rounded.get(name), self.originals[name]
        emulated = self.exact[name] if emulated is None else emulated.to(value.dtype)
        own, exact = self.own[name], self.exact[name]
        expected = expected_error(value.dtype, own, exact, self._floor(name))
        if expected is None:
            return math.inf
        allowed = max(distance(emulated, originals), expected * bound / self.budget.emulated)
        return distance(value, originals) / allowed

    def _ratio(self, name: str, value: torch.Tensor | None) -> float:
        own, exact = self.own[name], self.exact[name]
        if value is None or exact is None or own is None:
            # An input that the result does not depend on has no gradient, or zeros.
            given = next((x for x in (value, exact) if x is not None), None)
            return 0.0 if given is None or not given.count_nonzero() else math.inf
        # The dtype is PyTorch's or a wider one: sums in float32 may be returned in float32.
        if value.shape != own.shape or value.dtype != torch.promote_types(value.dtype, own.dtype):
            return math.inf
        if not value.is_floating_point():
            return 0.0 if torch.equal(value, own) else math.inf
        floor = self._floor(name)
        if name in self.rounded:
            floor = max(floor, distance(self.rounded[name], exact))
        return error_ratio(value, own, exact, floor)

    def _floor(self, name: str) -> float:
        """Returns the error that no rounding can undercut."""
        floor = self.floors.get(name, 0.0) if isinstance(self.floors, Mapping) else self.floors
        return floor * max(self.exact[name].norm().item(), LEAST_NORM)


def in_float64(inputs: Inputs) -> Inputs:
    """Returns floating-point inputs in float64, and whole numbers unchanged."""
    return {
        name: x.double() if x is not None and x.is_floating_point() else x
        for name, x in inputs.items()
    }


def wanted_of(operator: Operator, found: Implementation, case: Case) -> tuple[str, ...]:
    """Returns the inputs whose gradients an implementation gives; () for `forward_only`."""
    budget = found.budget or operator.budget
    if not found.differentiable or case["forward_only"] or not budget.differentiates(case):
        return ()
    given = operator.differentiated if found.gradients is None else found.gradients
    return tuple(
        name
        for name in operator.differentiated
        if name in given and (name not in operator.optional or case.problem[name])
    )
