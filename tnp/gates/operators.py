"""Checks one implementation of an operator, generically: gate `op--swiglu--triton`.

The gate runs each case that the implementation serves, with each pair of its kernels for the
forward and the backward pass. It checks:

- every result against float64, repeated results bit by bit, and results with poisoned memory,
- some gradients alone, and gradients of other layouts,
- the tensors that a launch returns against `Kernel.empty`.

One case runs by every route that a call can take (`tnp.gates.routes`). On a GPU, the first case of
each kind with lengths also runs as a captured launch whose lengths change. Last, the bounds must
find each of the operator's broken references.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from tnp.dispatch import devices, selection
from tnp.dispatch.devices import Target
from tnp.dispatch.registry import catalog
from tnp.dispatch.spec import OWN, Call, Case, Implementation, Operator
from tnp.experiment.gpu_memory import why_it_does_not_fit
from tnp.gates import WHOLE, Share, layout, out_of_range, routes
from tnp.gates.checks import Check, Finished, LeftOut, Unsupported, max_abs_error
from tnp.gates.forced import Forced, Pair, pairs_of
from tnp.gates.launches import launches
from tnp.gates.poison import Poisoned, guarded
from tnp.gates.results import Gradient, Results, Setting, wanted_of
from tnp.train import warm

# Runs that must agree: a result that changes between runs shows a race.
REPEATS = {"cuda": 50, "cpu": 1}
FIRST_RUN: Mapping[str, Sequence[str]] = MappingProxyType({})


def checks(
    op: str,
    name: str,
    device: torch.device,
    finished: Mapping[str, Sequence[str]] = FIRST_RUN,
    share: Share = WHOLE,
) -> Iterator[Check | Finished | LeftOut]:
    """Yields the checks of implementation `name` of operator `op`, case by case.

    Each case ends in `Finished`. A case that does not fit the GPU's memory is left out. `finished`
    holds the parts that an earlier run of the same code made, with their findings: they are
    skipped. A share has some of the cases, and leaves the controls to the run of all.

    Raises:
        ValueError: there is no such operator or implementation.
        Unsupported: it serves no case of the operator here.
        Busy: other processes hold the memory that a case needs.
    """
    operator = catalog().operator(op)
    listed = catalog().listed(op, name)
    if listed.missing:
        raise Unsupported(listed.missing)
    found, target = catalog().load(op, name), devices.of_device(device)
    reasons = {}
    for case in operator.cases(target):
        what = Call(case.problem, target, wanted_of(operator, found, case))
        reasons[case] = selection.refuses(found, what)
    served = [case for case, reason in reasons.items() if reason is None]
    if not served:
        raise Unsupported(next(iter(reasons.values()), "the operator has no case for this device"))
    by_size = sorted(served, key=lambda case: operator.work(case, "forward").bytes)
    of_routes = by_size[len(by_size) // 2]
    controls = operator.controls_for(found)
    missed = dict(controls)
    known = enumerate(_with_known(served, found, operator, target), 1)
    parts = [
        (f"{number} {case}", case, facts)
        for number, (case, facts) in known
        if number % share.of == share.number
    ]
    if device.type == "cuda" and found.forward is not None:
        left = [case for part, case, _ in parts if part not in finished]
        _compile(operator, found, left, target)
    for part, case, facts in parts:
        reason = None
        if part in finished:
            exposed = finished[part]
        else:
            exposed = []
            try:
                setting = Setting.of(operator, found, case, device)
                yield from _of_case(setting, facts, case is of_routes)
                exposed = [what for what, broken in missed.items() if _is_red(setting, broken)]
            except Exception as error:
                reason = why_it_does_not_fit(error)
                if reason is None:
                    raise
            setting = None  # its results are the largest thing in memory
        if reason is not None:
            torch.cuda.empty_cache()
            yield LeftOut(str(case), case.problem.json, reason)
        missed = {what: broken for what, broken in missed.items() if what not in exposed}
        yield Finished(part, len(served), tuple(exposed))
    for what in controls if share == WHOLE else ():
        yield Check(
            f"control must fail: {what}", "passed every case", float(what in missed), 0.0, name,
            op=op,
        )  # fmt: skip


def _compile(
    operator: Operator, found: Implementation, cases: Sequence[Case], target: Target
) -> None:
    """Compiles the kernels of all cases side by side. The checks compile and raise what is left."""
    with warm.side_by_side(target):
        for case in cases:
            for launch in launches(operator, case.problem, target, found, singly=True):
                try:
                    launch.call()
                except Exception as error:  # any host code may fail on tensors without memory
                    warm.log.warning("not compiled ahead, %s: %s", case, error)


class Known(NamedTuple):
    """Facts that a gate's earlier cases have shown."""

    pairs: frozenset[str]  # names of pairs that served a case with the same options
    lengths: bool  # one of the same dtype and options came before


def _with_known(
    cases: Sequence[Case], found: Implementation, operator: Operator, target: Target
) -> Iterator[tuple[Case, Known]]:
    """Yields each case with the facts that earlier cases have shown, without any computation."""
    pairs: dict[object, set[str]] = {}
    kinds: set[object] = set()
    for case in cases:
        problem = case.problem
        kind = problem.dtype, problem.options
        before = pairs.setdefault(problem.options, set())
        yield case, Known(frozenset(before), kind in kinds)
        kinds.add(kind)
        what = Call(problem, target, wanted_of(operator, found, case))
        before.update(pair.name for pair in pairs_of(found, what))


def _of_case(setting: Setting, known: Known, with_routes: bool) -> Iterator[Check]:
    """Yields the checks of one case, without those of the controls."""
    on_gpu = setting.device.type == "cuda"
    what = Call(setting.case.problem, setting.target, setting.wanted)
    for pair in pairs_of(setting.found, what):
        is_new = pair.name not in known.pairs
        yield from _of_pair(Forced(setting, pair, setting.wanted), on_gpu or is_new, is_new)
    if with_routes:
        yield from routes.checks(setting)
    has_lengths = bool(setting.operator.other_lengths(setting.inputs))
    if has_lengths and setting.found.provider == OWN and on_gpu and not known.lengths:
        yield from routes.with_other_lengths(setting)


def _is_red(setting: Setting, broken: Any) -> bool:
    """Returns whether the bounds find a broken reference."""
    got = setting.results(broken, setting.inputs, setting.upstream)
    given = {name: value for name, value in got.items() if value is not None}
    return any(not ratio <= bound for _, ratio, bound in setting.judged(given))


def _of_pair(run: Forced, thorough: bool, is_new: bool) -> Iterator[Check]:
    """Checks a pair of kernels.

    On a GPU every case gets all checks. In the interpreter only the first case with its options
    does. Numbers out of range are checked for the first case only (`is_new`).
    """
    setting, found, first = run.setting, run.setting.found, run.results()
    yield from run.against_float64(first, "")
    if thorough:
        repeats = REPEATS[setting.device.type]
        again = (run.results() for _ in range(repeats))
        yield from _same(run, first, again, f"repeats: {repeats}")
    if found.provider != OWN or found.compile:
        return
    yield from _of_memory(run, first)
    if is_new:
        yield from out_of_range.checks(run, first)
    if run.pair.forward is not None:
        yield from _of_layout(run, thorough)
    if thorough and setting.wanted:  # without gradients another kernel may run
        alone = Forced(setting, Pair(run.pair.forward), ()).results()
        yield from run.against_float64(alone, " without gradients")
        yield from _of_gradients(run)


def _same(run: Forced, first: Results, others: Iterable[Results], how: str) -> Iterator[Check]:
    """Checks that other results equal the first bit by bit.

    Results that may move must stay within their bound: the one furthest from the first is checked.
    """
    difference, furthest = 0.0, dict[str, tuple[float, torch.Tensor]]()
    for other in others:
        for name, value in first.items():
            if value is None:
                continue
            # Values are nearly always equal, and `torch.equal` is the faster test.
            same = torch.equal(other[name], value)
            apart = 0.0 if same else max_abs_error(other[name], value)
            if name not in run.nondeterministic:
                difference = max(difference, apart)
            elif name not in furthest or apart > furthest[name][0]:
                furthest[name] = apart, other[name]
    yield run.check(how, "max_abs_difference", difference, 0.0)
    for name, (_, value) in sorted(furthest.items()):
        ratio, bound = max(judged[1:] for judged in run.setting.judged({name: value}))
        yield run.check(f"{name}, {how}", "error_ratio", ratio, bound)


def _of_memory(run: Forced, first: Results) -> Iterator[Check]:
    """Checks that a result is wholly written, nothing beside an input is read, inputs stay."""
    own = run.setting.inputs
    inputs = {name: x if x is None else guarded(x.detach()) for name, x in own.items()}
    with Poisoned():
        poisoned = run.results(inputs)
    yield from _same(run, first, [poisoned], "memory full of NaN")
    changed = sum(not torch.equal(inputs[name], x) for name, x in own.items() if x is not None)
    yield run.check("inputs are left alone", "inputs changed", changed, 0)


def _of_layout(run: Forced, thorough: bool) -> Iterator[Check]:
    """Checks layouts for all requested gradients, and for each alone."""
    of_runs = [run.wanted]
    backward = run.pair.backward.kernel if run.pair.backward else None
    if thorough and len(run.wanted) > 1:
        of_runs += [(name,) for name in run.wanted]
    for wanted in of_runs:
        plan = Forced(run.setting, run.pair, wanted, apart=True).plan
        faults = layout.faults(plan, backward, run.setting)
        what = "laid out as `Kernel.empty` says"
        if wanted is not run.wanted:
            what += f", d{wanted[0]} alone"
        for fault in faults:
            yield run.check(f"{what}: {fault}", "results", 1, 0)
        if not faults:
            yield run.check(what, "results", 0, 0)


def _of_gradients(run: Forced) -> Iterator[Check]:
    """Checks each gradient alone, each output's gradient alone, and other layouts."""
    setting = run.setting
    if len(run.wanted) > 1:
        for name in run.wanted:
            got = run.alone(name).results()
            yield from run.against_float64({f"d{name}": got[f"d{name}"]}, " alone")
    names = setting.operator.outputs_of(setting.case.problem)
    outputs = [name for name in names if _is_differentiable(setting, name)]
    arriving = [
        (f" of {output} alone", partial(_of_one, setting.upstream, output))
        for output in outputs
        if len(outputs) > 1
    ]
    arriving += [
        (" of one number's gradient expanded", _expanded),
        (" of a transposed gradient", lambda name, like: _transposed(setting.upstream(name, like))),
    ]
    for how, upstream in arriving:
        other, got = setting.with_upstream(upstream), run.results(upstream=upstream)
        gradients = {name: x for name, x in got.items() if name not in setting.operator.outputs}
        yield from other.against_float64(gradients, how, run.pair.name)


def _is_differentiable(setting: Setting, output: str) -> bool:
    return setting.own[output].is_floating_point()


def _of_one(upstream: Gradient, output: str, name: str, like: torch.Tensor) -> torch.Tensor | None:
    """Returns the gradient of `output`, and None for others."""
    return upstream(name, like) if name == output else None


def _expanded(name: str, like: torch.Tensor) -> torch.Tensor:
    """Returns a gradient as `y.sum().backward()` gives it, with strides of 0."""
    return torch.ones((), dtype=like.dtype, device=like.device).expand(like.shape)


def _transposed(gradient: torch.Tensor) -> torch.Tensor:
    """Returns the same numbers with the last two dimensions exchanged in memory."""
    return gradient if gradient.dim() < 2 else gradient.mT.contiguous().mT
