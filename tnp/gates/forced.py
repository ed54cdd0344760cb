"""An implementation whose kernels are forced: the pairs of kernels that a gate goes through."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from tnp.dispatch import plans, selection
from tnp.dispatch.spec import Call, Implementation, Kernel
from tnp.gates.checks import Check
from tnp.gates.results import Results, Setting, compute


class Form(NamedTuple):
    """A kernel with one of its configurations."""

    kernel: Kernel
    config: object

    @property
    def name(self) -> str:
        """Returns the kernel's name, followed by the switches that are on in its configuration."""
        return " ".join((self.kernel.name, *selection.switches(self.config)))


@dataclass(frozen=True)
class Pair:
    """The forced kernels of the two passes.

    Both are None where PyTorch differentiates the implementation's function. `backward` is None
    where no gradient is wanted.
    """

    forward: Form | None = None
    backward: Form | None = None

    @property
    def forms(self) -> list[Form]:
        return [form for form in (self.forward, self.backward) if form]

    @property
    def name(self) -> str:
        """As it stands in rows."""
        return ", ".join(form.name for form in self.forms)

    @property
    def moving(self) -> set[str]:
        """Results that may differ between runs."""
        return {name for form in self.forms for name in form.kernel.moving}


def pairs_of(found: Implementation, what: Call) -> list[Pair]:
    """Returns the pairs of forward and backward kernels that can serve a call, in all their forms.

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
    """The implementation with a pair of kernels, for some gradients: called as its reference is."""

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
        self.moving = pair.moving | set(found.moving)
        self.plan = plans.build(
            setting.operator, found.name, tuple(setting.inputs.values()),
            tuple(setting.options.items()), wanted, setting.target, forced, apart=apart,
        )  # fmt: skip

    def __call__(self, *arguments: Any) -> Any:
        n = len(self.setting.operator.tensors)
        return self.plan.run(arguments[:n], arguments[n:])

    def alone(self, name: str) -> Forced:
        """For the gradient of one input."""
        return Forced(self.setting, self.pair, (name,))

    def results(self, inputs: dict | None = None, upstream: Any = None) -> Results:
        """Of the setting's inputs and gradients where none are given."""
        inputs, upstream = inputs or self.setting.inputs, upstream or self.setting.upstream
        asked = self.setting.operator, self.setting.case.problem
        return compute(*asked, self, inputs, self.wanted, upstream)

    def check(self, what: str, metric: str, value: float, bound: float) -> Check:
        return self.setting.check(what, metric, value, bound, self.pair.name)

    def against_float64(self, got: Results, how: str) -> Iterator[Check]:
        return self.setting.against_float64(got, how, self.pair.name)
