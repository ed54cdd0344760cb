"""What a function computes of a case, by name, and how far that may be from float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from tnp.contract import Budget, Call, Case, Implementation, Operator, Target
from tnp.gates.checks import distance, error_ratio
from tnp.values import Random, Upstream

Inputs = dict[str, torch.Tensor | None]  # by name, in the operator's order
Results = dict[str, torch.Tensor | None]  # outputs by name, and "d" + input; None: not given
Gradient = Callable[[str, torch.Tensor], torch.Tensor | None]  # of an output, by name and looks


def compute(
    operator: Operator,
    function: Callable,
    inputs: Inputs,
    wanted: tuple[str, ...] = (),
    upstream: Gradient | None = None,
) -> Results:
    """Outputs of `function(*inputs, *scalars)`, and the gradients of the `wanted` inputs."""
    leaves = [
        x if x is None else x.detach().requires_grad_(name in wanted) for name, x in inputs.items()
    ]
    with torch.set_grad_enabled(bool(wanted)):
        outputs = function(*leaves, *operator.numbers)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    found: Results = {name: x.detach() for name, x in zip(operator.outputs, outputs, strict=True)}
    if wanted:
        named = zip(operator.outputs, outputs, strict=True)
        arriving = [(x, upstream(name, x.detach())) for name, x in named if x.requires_grad]
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
    """A case with its inputs, and what is expected of an implementation there."""

    operator: Operator
    case: Case
    inputs: Inputs
    options: dict  # of a call
    wanted: tuple[str, ...]
    upstream: Gradient
    budget: Budget
    floors: float | Mapping[str, float]  # relative errors that no rounding can undercut
    plain: Callable  # PyTorch's form in the case's dtype
    own: Results  # by it
    exact: Results  # in float64, of what the implementation's number format holds
    originals: Results | None  # in float64 of the inputs as they are, where that is another thing

    @classmethod
    def of(
        cls, operator: Operator, found: Implementation, case: Case, target: Target,
        device: torch.device,
    ) -> Setting:  # fmt: skip
        """Draws the inputs and computes what is expected."""
        drawn = operator.draw(case, Random(case, device))
        inputs = {name: drawn.get(name) for name in operator.tensors}
        options = dict(operator.call_options(case.problem))
        wanted = wanted_of(operator, found, case)
        upstream = Upstream(Random(case, device, seed=1), drawn)
        budget = found.budget or operator.budget
        held = inputs if budget.emulate is None else inputs | budget.emulate(case, inputs)
        yardstick = operator.implementations[0]
        refused = yardstick.run is None or yardstick.refuses(Call(case.problem, target, wanted))
        plain = operator.reference if refused else yardstick.run
        floors = operator.condition(case, inputs) if operator.condition else 0.0

        def exact(of: Inputs) -> Results:
            return compute(
                operator, lambda *a: operator.reference(*a, **options), in_float64(of), wanted,
                upstream,
            )  # fmt: skip

        return cls(
            operator, case, inputs, options, wanted, upstream, budget, floors, plain,
            own=compute(operator, lambda *a: plain(*a, **options), held, wanted, upstream),
            exact=exact(held), originals=None if budget.emulate is None else exact(inputs),
        )  # fmt: skip

    def with_upstream(self, upstream: Gradient) -> Setting:
        """The same with other gradients of the outputs."""
        operator, options = self.operator, self.options
        own = compute(
            operator, lambda *a: self.plain(*a, **options), self.inputs, self.wanted, upstream
        )
        exact = compute(
            operator, lambda *a: operator.reference(*a, **options), in_float64(self.inputs),
            self.wanted, upstream,
        )  # fmt: skip
        return replace(self, upstream=upstream, own=own, exact=exact, originals=None)

    def judged(self, got: Results) -> Iterator[tuple[str, float, float]]:
        """Name, error ratio and bound of each result, and of emulated ones against the originals.

        A result that is missing, of another shape than PyTorch's or of a narrower dtype, is
        infinitely wrong.
        """
        for name, value in got.items():
            is_gradient = name not in self.operator.outputs
            bound = self.budget.gradients if is_gradient else self.budget.outputs
            yield name, self._ratio(name, value), bound
            if self.originals is not None and value is not None:
                quantized = distance(self.exact[name], self.originals[name])
                ratio = distance(value, self.originals[name]) / max(quantized, 1e-300)
                yield f"{name} of the originals", ratio, self.budget.emulated

    def _ratio(self, name: str, value: torch.Tensor | None) -> float:
        own, exact = self.own[name], self.exact[name]
        if value is None or exact is None or own is None:
            # What is not differentiated through has no gradient, or one of zeros.
            given = next((x for x in (value, exact) if x is not None), None)
            return 0.0 if given is None or not given.count_nonzero() else math.inf
        # As wide as PyTorch's, or wider: what was summed in float32 may be handed on so.
        if value.shape != own.shape or value.dtype != torch.promote_types(value.dtype, own.dtype):
            return math.inf
        if not value.is_floating_point():
            return 0.0 if torch.equal(value, own) else math.inf
        floor = self.floors.get(name, 0.0) if isinstance(self.floors, Mapping) else self.floors
        # Infinite where the result is zero and nothing can be said relative to it.
        floor = floor if math.isinf(floor) else floor * exact.norm().item()
        return error_ratio(value, own, exact, floor)


def in_float64(inputs: Inputs) -> Inputs:
    """Floating-point inputs in float64, whole numbers as they are."""
    return {
        name: x.double() if x is not None and x.is_floating_point() else x
        for name, x in inputs.items()
    }


def wanted_of(operator: Operator, found: Implementation, case: Case) -> tuple[str, ...]:
    """Inputs whose gradients an implementation gives in a case."""
    if not found.differentiable:
        return ()
    given = operator.differentiated if found.gradients is None else found.gradients
    return tuple(
        name
        for name in operator.differentiated
        if name in given and (name not in operator.optional or case.problem[name])
    )
