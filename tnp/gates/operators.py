"""The gate of one implementation of an operator, generic: `op--swiglu--triton`.

For each case of the operator that the implementation serves, and each pair of its kernels of the
forward and the backward pass: every result against float64; results again, bit by bit; results
with poisoned memory; some gradients alone; gradients of other layouts; what a launch leaves against
`Kernel.empty`. Then one case by every route that a call can take (`tnp.gates.routes`), and the
operator's broken references, each of which these bounds must find.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tnp import plans, selection, targets
from tnp.catalog import catalog
from tnp.contract import OWN, Call, Case, Implementation, Kernel, Operator, Target
from tnp.gates import layout, routes
from tnp.gates.checks import Check, Unsupported, max_abs_error
from tnp.gates.poison import Poisoned, guarded
from tnp.gates.results import Results, Setting, compute, wanted_of

# A result that moves between runs is a race.
REPEATS = {"cuda": 20, "cpu": 1}


@dataclass(frozen=True)
class Pair:
    """Kernels of the two passes, forced; neither where PyTorch differentiates the implementation's
    function, no backward one where no gradient is wanted.
    """

    forward: Kernel | None = None
    backward: Kernel | None = None

    @property
    def name(self) -> str:
        """As it stands in rows."""
        return ", ".join(kernel.name for kernel in (self.forward, self.backward) if kernel)

    @property
    def moving(self) -> set[str]:
        """Results that may differ between runs."""
        kernels = [kernel for kernel in (self.forward, self.backward) if kernel]
        return {name for kernel in kernels for name in kernel.moving}


@dataclass(frozen=True)
class Subject:
    """The implementation that is tested, and where."""

    operator: Operator
    found: Implementation
    device: torch.device

    @property
    def target(self) -> Target:
        return targets.of_device(self.device)

    def refuses(self, case: Case) -> str | None:
        """Why it does not serve a case, or None."""
        what = Call(case.problem, self.target, wanted_of(self.operator, self.found, case))
        return selection.refuses(self.found, what)

    def check(
        self, setting: Setting, what: str, metric: str, value: float, bound: float, kernel: str = ""
    ) -> Check:
        return Check(
            f"{what}, {setting.case}", metric, value, bound, self.found.name,
            op=self.operator.name, problem=setting.case.problem.json, kernel=kernel,
        )  # fmt: skip


def checks(op: str, name: str, device: torch.device) -> Iterator[Check]:
    """Of implementation `name` of operator `op`.

    Raises:
        ValueError: there is no such operator or implementation.
        Unsupported: it serves no case of the operator here.
    """
    operator = catalog().operator(op)
    listed = catalog().listed(op, name)
    if listed.missing:
        raise Unsupported(listed.missing)
    subject = Subject(operator, catalog().load(op, name), device)
    reasons = {case: subject.refuses(case) for case in operator.cases(subject.target)}
    served = [case for case, reason in reasons.items() if reason is None]
    if not served:
        raise Unsupported(next(iter(reasons.values()), "the operator has no case for this device"))
    by_size = sorted(served, key=lambda case: operator.work(case, "forward").bytes)
    of_routes = by_size[len(by_size) // 2]
    missed = dict(operator.controls)
    known: set[tuple] = set()  # pairs that have served a case with the same options
    for case in served:
        setting = Setting.of(operator, subject.found, case, subject.target, device)
        for pair in _pairs(subject, setting):
            kind = pair, case.problem.options
            thorough = device.type == "cuda" or kind not in known
            known.add(kind)
            yield from _of_pair(subject, setting, pair, thorough)
        missed = {what: broken for what, broken in missed.items() if not _is_red(setting, broken)}
        if case is of_routes:
            yield from routes.checks(subject, setting)
        del setting  # its results are the largest thing in memory
    for what in operator.controls:
        yield Check(
            f"control must fail: {what}", "passed every case", float(what in missed), 0.0, name,
            op=op,
        )  # fmt: skip


def _is_red(setting: Setting, broken: Any) -> bool:
    """Whether a broken reference is found out."""
    got = compute(
        setting.operator, lambda *a: broken(*a, **setting.options), setting.inputs,
        setting.wanted, setting.upstream,
    )  # fmt: skip
    given = {name: value for name, value in got.items() if value is not None}
    return any(not ratio <= bound for _, ratio, bound in setting.judged(given))


def _pairs(subject: Subject, setting: Setting) -> list[Pair]:
    """Kernels that can serve the case, of both passes, with what the one saves the other reads."""
    found, problem = subject.found, setting.case.problem
    if found.forward is None:
        return [Pair()]
    what = Call(problem, subject.target, setting.wanted)

    def able(operation: Any, saves: str | None = None) -> list[Kernel]:
        kernels = selection.kernels_of(operation, saves).values()
        return [kernel for kernel in kernels if kernel.refuses(what) is None]

    pairs = []
    for forward in able(found.forward):
        if setting.wanted:
            pairs += [Pair(forward, one) for one in able(found.backward, forward.saves)]
        else:
            pairs.append(Pair(forward))
    return pairs


class Forced:
    """The implementation with a pair of kernels, for some gradients: called as its reference is."""

    def __init__(
        self, subject: Subject, setting: Setting, pair: Pair, wanted: tuple[str, ...]
    ) -> None:
        found, operator = subject.found, subject.operator
        what = Call(setting.case.problem, subject.target, wanted)
        forced = {}
        if pair.forward:
            forced[found.forward.name] = pair.forward.name, pair.forward.configs(what)[0]
        if pair.backward:
            forced[found.backward.name] = pair.backward.name, pair.backward.configs(what)[0]
        self.operator, self.setting, self.wanted = operator, setting, wanted
        self.plan = plans.build(
            operator, found.name, tuple(setting.inputs.values()),
            tuple(setting.options.items()), wanted, subject.target, forced,
        )  # fmt: skip

    def __call__(self, *arguments: Any) -> Any:
        n = len(self.operator.tensors)
        return self.plan.run(arguments[:n], arguments[n:])

    def results(self, inputs: dict | None = None, upstream: Any = None) -> Results:
        """Of the setting's inputs and gradients where none are given."""
        setting = self.setting
        return compute(
            self.operator, self, inputs or setting.inputs, self.wanted,
            upstream or setting.upstream,
        )  # fmt: skip


def _of_pair(subject: Subject, setting: Setting, pair: Pair, thorough: bool) -> Iterator[Check]:
    """On a GPU all is checked of every case; in the interpreter of the first with its options."""
    run = Forced(subject, setting, pair, setting.wanted)
    first = run.results()
    yield from against_float64(subject, setting, first, "", pair.name)
    moving = pair.moving | set(subject.found.moving)
    if thorough:
        repeats = REPEATS[subject.device.type]
        again = (run.results() for _ in range(repeats))
        yield from _same(subject, setting, pair, first, again, moving, f"repeats: {repeats}")
    if subject.found.provider != OWN or subject.found.compile:
        return
    yield from _of_memory(subject, setting, pair, run, first, moving)
    if pair.forward is not None:
        yield from _of_layout(subject, setting, pair, run, thorough)
    if thorough and setting.wanted:  # what nobody differentiates may be computed by another kernel
        alone = Forced(subject, setting, Pair(pair.forward), ()).results()
        yield from against_float64(subject, setting, alone, " without gradients", pair.name)
        yield from _of_gradients(subject, setting, pair, run)


def against_float64(
    subject: Subject, setting: Setting, got: Results, how: str, kernel: str = ""
) -> Iterator[Check]:
    """A check of each result; `how` it was computed is said after its name."""
    for result, ratio, bound in setting.judged(got):
        what = f"{result}{how} against float64"
        yield subject.check(setting, what, "error_ratio", ratio, bound, kernel)


def _same(
    subject: Subject, setting: Setting, pair: Pair, first: Results, others: Iterator[Results],
    moving: set[str], how: str,
) -> Iterator[Check]:  # fmt: skip
    """Others are the first bit by bit; what may move stays within its bound."""
    difference, moved = 0.0, dict.fromkeys(sorted(moving & first.keys()), (0.0, 0.0))
    for other in others:
        for name, value in first.items():
            if name not in moving and value is not None:
                difference = max(difference, max_abs_error(other[name], value))
        for name in moved:
            for _, ratio, bound in setting.judged({name: other[name]}):
                moved[name] = max(moved[name], (ratio, bound))
    yield subject.check(setting, how, "max_abs_difference", difference, 0.0, pair.name)
    for name, (ratio, bound) in moved.items():
        yield subject.check(setting, f"{name}, {how}", "error_ratio", ratio, bound, pair.name)


def _of_memory(
    subject: Subject, setting: Setting, pair: Pair, run: Forced, first: Results, moving: set[str]
) -> Iterator[Check]:
    """Every element of a result is written, none beside an input is read, no input is changed."""
    inputs = {name: x if x is None else guarded(x.detach()) for name, x in setting.inputs.items()}
    with Poisoned():
        poisoned = run.results(inputs)
    how = "memory full of NaN"
    yield from _same(subject, setting, pair, first, iter([poisoned]), moving, how)
    changed = sum(
        not torch.equal(inputs[name], x) for name, x in setting.inputs.items() if x is not None
    )
    yield subject.check(setting, "inputs are left alone", "inputs changed", changed, 0, pair.name)


def _of_layout(
    subject: Subject, setting: Setting, pair: Pair, run: Forced, thorough: bool
) -> Iterator[Check]:
    """For all gradients that are wanted, and for each alone."""
    runs = [run]
    if thorough and len(setting.wanted) > 1:
        runs += [Forced(subject, setting, pair, (name,)) for name in setting.wanted]
    for one in runs:
        faults = layout.faults(one.plan, pair.backward, setting)
        what = "laid out as `Kernel.empty` says"
        if one is not run:
            what += f", d{one.wanted[0]} alone"
        for fault in faults:
            yield subject.check(setting, f"{what}: {fault}", "results", 1, 0, pair.name)
        if not faults:
            yield subject.check(setting, what, "results", 0, 0, pair.name)


def _of_gradients(subject: Subject, setting: Setting, pair: Pair, run: Forced) -> Iterator[Check]:
    """Each wanted gradient alone, each output's gradient alone, and gradients of other layouts."""
    if len(setting.wanted) > 1:
        for name in setting.wanted:
            got = Forced(subject, setting, pair, (name,)).results()
            only = {f"d{name}": got[f"d{name}"]}
            yield from against_float64(subject, setting, only, " alone", pair.name)
    outputs = [name for name in setting.operator.outputs if _is_differentiable(setting, name)]
    if len(outputs) > 1:
        for output in outputs:
            other = setting.with_upstream(
                lambda name, like, output=output: (
                    setting.upstream(name, like) if name == output else None
                )
            )
            got = {name: x for name, x in run.results(upstream=other.upstream).items()
                   if name not in setting.operator.outputs}  # fmt: skip
            yield from against_float64(subject, other, got, f" of {output} alone", pair.name)
    for how, upstream in (
        (" of one number's gradient expanded", _expanded),
        (" of a transposed gradient", lambda name, like: _transposed(setting.upstream(name, like))),
    ):
        other = setting.with_upstream(upstream)
        got = {name: x for name, x in run.results(upstream=upstream).items()
               if name not in setting.operator.outputs}  # fmt: skip
        yield from against_float64(subject, other, got, how, pair.name)


def _is_differentiable(setting: Setting, output: str) -> bool:
    return setting.own[output].is_floating_point()


def _expanded(name: str, like: torch.Tensor) -> torch.Tensor:
    """As `y.sum().backward()` gives it: strides of 0."""
    return torch.ones((), dtype=like.dtype, device=like.device).expand(like.shape)


def _transposed(gradient: torch.Tensor) -> torch.Tensor:
    """The same numbers, the last two dimensions exchanged in memory."""
    return gradient if gradient.dim() < 2 else gradient.mT.contiguous().mT
