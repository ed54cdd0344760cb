"""Forces kernels of an implementation: the pairs of kernels that a gate goes through."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from tnp.dispatch import plans, selection
from tnp.dispatch.spec import Call, Implementation, Kernel
from tnp.gates.checks import Check
from tnp.gates.results import Results, Setting, compute


class Form(NamedTuple):
    """Holds a kernel with one of its configurations."""

    kernel: Kernel
    config: object

    @property
    def name(self) -> str:
        """Returns the kernel's name and the switches that are on in its configuration."""
        return " ".join((self.kernel.name, *selection.switches(self.config)))


@dataclass(frozen=True)
class Pair:
    """Holds the forced kernels of the two passes.

    Both are None if PyTorch differentiates the implementation. `backward` is None without
    gradients.
    """

    forward: Form | None = None
    backward: Form | None = None

    @property
    def forms(self) -> list[Form]:
        return [form for form in (self.forward, self.backward) if form]

    @property
    def name(self) -> str:
        """Returns the pair's name in rows."""
        return ", ".join(form.name for form in self.forms)

    @property
    def nondeterministic(self) -> set[str]:
        """Returns the results that may differ between runs."""
        return {name for form in self.forms for name in form.kernel.nondeterministic}


def pairs_of(found: Implementation, what: Call) -> list[Pair]:
    """Returns the pairs of forward and backward kernels that can serve a call, in all forms.

    The backward kernel of a pair reads the tensors that its forward kernel saves.
    """
    if found.forward is None:
        return [Pair()]

    def able(operation: Any, saves: str | None = None) -> list[Form]:
        kernels = selection.kernels_of(operation, saves).values()
        served = [kernel for kernel in kernels if kernel.refuses(what) is None]
        return [Form(kernel, one) for kernel in served for one in selection.forms(kernel, what)]

    forward = able(found.forward)
    if not what.wanted:
        return [Pair(one) for one in forward]
    return [Pair(one, other) for one in forward for other in able(found.backward, one.kernel.saves)]


class Forced:
    """Runs the implementation with a pair of kernels, for some gradients.

    It takes the arguments of the reference.
    """

    def __init__(
        self, setting: Setting, pair: Pair, wanted: tuple[str, ...], apart: bool = False
    ) -> None:
        found = setting.found
        forced = {}
        if pair.forward:
            forced[found.forward.name] = pair.forward.kernel.name, pair.forward.config
        if pair.backward:
            forced[found.backward.name] = pair.backward.kernel.name, pair.backward.config
        self.setting, self.pair, self.wanted = setting, pair, wanted
        self.nondeterministic = pair.nondeterministic | set(found.nondeterministic)
        self.plan = plans.build(
            setting.operator, found.name, tuple(setting.inputs.values()),
            tuple(setting.options.items()), wanted, setting.target, forced, apart=apart,
        )  # fmt: skip

    def __call__(self, *arguments: Any) -> Any:
        n = len(self.setting.operator.tensors)
        return self.plan.run(arguments[:n], arguments[n:])

    def alone(self, name: str) -> Forced:
        """Returns a run with the same kernels for the gradient of one input."""
        return Forced(self.setting, self.pair, (name,))

    def results(self, inputs: dict | None = None, upstream: Any = None) -> Results:
        """Computes results. By default it takes the setting's inputs and gradients."""
        inputs, upstream = inputs or self.setting.inputs, upstream or self.setting.upstream
        asked = self.setting.operator, self.setting.case.problem
        return compute(*asked, self, inputs, self.wanted, upstream)

    def check(self, what: str, metric: str, value: float, bound: float) -> Check:
        return self.setting.check(what, metric, value, bound, self.pair.name)

    def against_float64(self, got: Results, how: str) -> Iterator[Check]:
        return self.setting.against_float64(got, how, self.pair.name)
