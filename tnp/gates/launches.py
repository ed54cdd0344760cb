"""Lists the launches whose kernels the compile gate compiles, on tensors of the meta device.

An operator names the problems to compile for (`Operator.compiled`). Each kernel that can serve a
problem is compiled, with the default configuration of each of its forms. The configurations in the
committed tuned tables are compiled too. Plans are made for a GPU that is not here, with each kernel
forced.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from random import Random
from typing import Any

from tnp.dispatch import devices, tuned_tables
from tnp.dispatch.devices import Target
from tnp.dispatch.registry import catalog
from tnp.dispatch.spec import (
    EVERY_DTYPE_ON,
    FLOATS,
    ITEMSIZE,
    Call,
    Case,
    Implementation,
    Kernel,
    Operator,
    Problem,
)

# Capability → others with equal kernels, but less shared memory.
LIKE = {80: (86, 89)}
# Problems to draw for an entry of costs, until its kernel serves one.
N_DRAWN = 100


@dataclass(frozen=True)
class Launch:
    """Holds a launch: `call` launches kernels on meta tensors, for the implementations `users`."""

    capability: int
    dtype: str
    users: tuple[tuple[str, str], ...]  # operator and name
    call: Callable[[], object]


def committed_launches() -> Iterator[Launch]:
    """Yields every launch that could be chosen on the GPUs that kernels are compiled for.

    It leaves out implementations whose compiler is missing.
    """
    for operator in catalog().operators.values():
        for capability in _capabilities(operator):
            target = devices.of_capability(capability)
            problems = operator.compiled or partial(_of_cases, operator)
            for problem in problems(target):
                yield from launches(operator, problem, target)
        yield from _of_tables(operator)


def _capabilities(operator: Operator) -> list[int]:
    """Returns the compute capabilities that any kernel of the operator is compiled for."""
    from tnp.dispatch import selection

    ours = catalog().ours(operator.name)
    operations = (one for own in ours for one in (own.forward, own.backward))
    kernels = [selection.kernels_of(one).values() for one in operations if one is not None]
    return sorted({each for some in kernels for kernel in some for each in compiled_for(kernel)})


def compiled_for(kernel: Kernel) -> set[int]:
    """Returns the compute capabilities that a kernel is compiled for."""
    named = kernel.compiled_for
    return {*named, *(each for one in named for each in LIKE.get(one, ()))}


def _of_cases(operator: Operator, target: Target) -> Iterable[Problem]:
    """Returns the gate's largest problem for each dtype, options and forms of default kernels.

    bfloat16 stands for float16 too, which needs as many registers. Before 8.0 both are compiled:
    tensor cores take no bfloat16 there. float32 is compiled for `EVERY_DTYPE_ON` alone: a thread
    has equally many registers on all GPUs.
    """
    dtypes = ["bfloat16"]
    if target.capability < 80:
        dtypes.append("float16")
    if target.capability in EVERY_DTYPE_ON:
        dtypes.append("float32")
    largest: dict[tuple, Problem] = {}
    for case in operator.cases(target):
        if case.problem.dtype not in dtypes:
            continue
        p = case.problem
        key = p.dtype, p.options, _default_forms(operator, p, target)
        if key not in largest or _extent(p) > _extent(largest[key]):
            largest[key] = p
    return largest.values()


def _default_forms(operator: Operator, problem: Problem, target: Target) -> tuple:
    """Returns the switches of the default configurations of our forward kernels."""
    from tnp.dispatch.selection import kernels_of, switches

    what, found = Call(problem, target), []
    for own in catalog().ours(operator.name):
        if own.refuses(what) is None:
            kernels = kernels_of(own.forward).values()
            found += [switches(one.configs(what)[0]) for one in kernels if not one.refuses(what)]
    return tuple(found)


def _extent(problem: Problem) -> int:
    return math.prod(size for _, size in problem.sizes)


def _of_tables(operator: Operator) -> Iterator[Launch]:
    """Yields the launches that the committed tables choose for the operator.

    The first optional tensor is given, because a kernel then needs the most registers. Some
    configurations are no candidates then, such as persistent programs where samples have lengths.
    They are compiled without that tensor.

    Raises:
        ValueError: an entry's configuration is no candidate of its kernel.
    """
    by_name = {
        operation.name: (own, operation)
        for own in catalog().ours(operator.name)
        for operation in (own.forward, own.backward)
        if operation is not None
    }
    for path in sorted(tuned_tables.COMMITTED.glob("*.json")):
        target = devices.named(path.stem)
        for entry in tuned_tables.table(path):
            if entry["of"] not in by_name:
                continue
            own, operation = by_name[entry["of"]]
            forced = operation.name, entry["choice"], entry.get("config")
            for problem in _with_optional_first(operator, _problems(operator, entry)):
                if found := list(launches(operator, problem, target, own, forced)):
                    break
            else:
                raise ValueError(f"no candidate of its kernel: {entry} in {path}")
            yield from found


def _with_optional_first(operator: Operator, problems: Iterable[Problem]) -> Iterator[Problem]:
    """Yields each problem that gives no optional tensor with the first one, then all unchanged.

    Other options may exclude that tensor.
    """
    plain = list(problems)
    for problem in plain:
        if operator.optional and not any(problem[name] for name in operator.optional):
            given = dict(problem.options) | {operator.optional[0]: True}
            yield operator.problem(problem.dtype, **dict(problem.sizes), **given)
    yield from plain


def _problems(operator: Operator, entry: tuned_tables.Entry) -> Iterator[Problem]:
    """Yields the entry's problem. An entry of costs names none: it yields drawn problems."""
    if "us" not in entry:
        yield operator.from_json(json.dumps(entry["problem"]))
        return
    chance, itemsize = Random(0), entry["problem"]["itemsize"]
    dtype = next(one for one in FLOATS if ITEMSIZE[one] == itemsize)
    yield from (operator.random_problem(chance, dtype) for _ in range(N_DRAWN))


def launches(
    operator: Operator,
    problem: Problem,
    target: Target,
    implementation: Implementation | None = None,
    forced: tuple[str, str, object] | None = None,
    singly: bool = False,
) -> Iterator[Launch]:
    """Yields a problem's launches for each pair of kernels of our implementations.

    Args:
        operator: the problem's operator.
        problem: the problem to launch.
        target: the GPU to compile for.
        implementation: the only implementation to launch; None stands for all of ours.
        forced: operation, kernel and JSON of its configuration: no other kernel of the operation
            is launched. Calls that do not run the operation are left out. None launches all
            kernels with the default configurations of their forms.
        singly: launch for each gradient alone too.
    """
    from tnp.gates.results import wanted_of

    for own in [implementation] if implementation else catalog().ours(operator.name):
        every = wanted_of(operator, own, Case(problem))
        single = ((name,) for name in every) if singly else ()
        for wanted in dict.fromkeys(((), every, *single)):
            what = Call(problem, target, wanted)
            if own.refuses(what) is not None:
                continue
            operations = [own.forward] + ([own.backward] if wanted else [])
            if forced and forced[0] not in {operation.name for operation in operations}:
                continue
            for kernels in product(*(_candidates(one, what, forced) for one in operations)):
                if len({kernel.saves for kernel, _ in kernels}) > 1:
                    continue
                chosen = {
                    operation.name: (kernel.name, config)
                    for operation, (kernel, config) in zip(operations, kernels, strict=True)
                }
                call = partial(_launch, operator, own, problem, target, wanted, chosen)
                users = ((operator.name, own.name),)
                yield Launch(target.capability, problem.dtype, users, call)


def _candidates(
    operation: Any, what: Call, forced: tuple[str, str, object] | None
) -> list[tuple[Kernel, object]]:
    """Returns the kernels that serve a call, each with a configuration to compile."""
    from tnp.dispatch import selection

    found = []
    for kernel in selection.kernels_of(operation).values():
        if kernel.refuses(what) or what.target.capability not in compiled_for(kernel):
            continue
        if forced is None or operation.name != forced[0]:
            found += [(kernel, one) for one in selection.forms(kernel, what)]
        elif kernel.name == forced[1]:
            configs = kernel.configs(what)
            found += [(kernel, one) for one in configs if tuned_tables.as_json(one) == forced[2]]
    return found


def _launch(
    operator: Operator,
    own: Implementation,
    problem: Problem,
    target: Target,
    wanted: tuple[str, ...],
    forced: dict[str, tuple[str, object]],
) -> None:
    """Runs forward, and backward where a gradient is wanted, on the meta device."""
    import torch

    from tnp.dispatch import plans
    from tnp.ops._shared.random_values import Random

    case = Case(problem)
    drawn = operator.draw(case, Random(case, torch.device("meta")))
    inputs = tuple(drawn.get(name) for name in operator.tensors)
    options = operator.call_options(problem)
    plan = plans.build(operator, own.name, inputs, options, wanted, target, forced)
    outputs, saved = plan.forward(inputs, operator.numbers)
    if wanted:
        gradients = tuple(torch.empty_like(x) for x in outputs)
        kept = tuple(plan.kept(inputs, outputs))
        plan.backward(gradients, kept, saved, operator.numbers)
