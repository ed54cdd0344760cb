"""What serves a call: which implementation of an operator, and which kernel of an operation.

A call is described from its inputs; named implementations are taken as they are asked for, "auto"
and kernels as the table of the GPU says (`tnp.dispatch.tuned_tables`), of those that can run here
and now.
"""

from __future__ import annotations

import importlib
import json
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tnp.dispatch import devices, tuned_tables
from tnp.dispatch.devices import Target
from tnp.dispatch.registry import AUTO, TORCH, catalog
from tnp.dispatch.spec import OWN, Call, Implementation, Kernel, Operation, Operator, Reason
from tnp.dispatch.tuned_tables import Choice, Offer, choose
from tnp.util.bounded import Bounded
from tnp.util.checks import is_expanded, switched_on

AUTO_VARIABLE = "TNP_AUTO"  # "torch": "auto" takes PyTorch's plain form everywhere
CHECK_VARIABLE = "TNP_CHECK"  # "1": kernels assert on the device numbers that are out of range

Forced = dict[str, tuple[str, object]]  # operation → kernel and configuration


# ---------------------------------------------------------------------------- what is asked for


def wanted_of(operator: Operator, inputs: tuple) -> tuple[str, ...]:
    """Inputs whose gradients this call may be asked for."""
    if not torch.is_grad_enabled():
        return ()
    named = zip(operator.tensors, inputs, strict=True)
    return tuple(
        name
        for name, x in named
        if x is not None and x.requires_grad and name in operator.differentiated
    )


def aligned(tensors: Any, gradients: tuple = ()) -> bool:
    """Whether every row of every tensor starts at a multiple of 16 bytes, none expanded.

    An expanded gradient, as a sum has, counts as aligned (`Call.aligned`).
    """
    dense = (x for x in gradients if x is not None and not is_expanded(x))
    for x in (*tensors, *dense):
        if not isinstance(x, torch.Tensor):
            continue
        if x.device.type != "meta" and x.data_ptr() % 16:
            return False
        for step, size in zip(x.stride()[:-1], x.shape[:-1], strict=True):
            if size > 1 and (step == 0 or step * x.element_size() % 16):
                return False
    return True


def describe(
    operator: Operator,
    inputs: tuple,
    options: tuple = (),
    wanted: tuple[str, ...] = (),
    target: Target | None = None,
) -> Call:
    """What is asked for; ValueError where the inputs do not go together."""
    values = operator.describe(*inputs, **dict(options))
    first = next(x for x in inputs if x is not None)
    dtype = values.pop("dtype", None) or str(first.dtype).removeprefix("torch.")
    named = zip(operator.tensors, inputs, strict=True)
    given = {name: True for name, x in named if name in operator.optional and x is not None}
    problem = operator.problem(dtype, **given | dict(options) | values)
    return Call(problem, target or devices.of_device(first.device), wanted, aligned(inputs))


# --------------------------------------------------------------------------------- what serves it


def refuses(found: Implementation, what: Call) -> Reason:
    """Why an implementation cannot serve a call here and now, or None."""
    return found.refuses(what) or _moves(found.moving, what)


def _moves(moving: tuple[str, ...], what: Call) -> Reason:
    if moving and what.wanted and torch.are_deterministic_algorithms_enabled():
        names = ", ".join(moving)
        return f"{names} may differ between runs, and PyTorch is asked for deterministic algorithms"
    return None


def choose_implementation(
    operator: Operator, name: str, what: Call
) -> tuple[Choice, Implementation]:
    """By its name, or what the table says.

    Raises:
        ValueError: there is no such name.
        RuntimeError: it cannot run here, with the reason.
    """
    if name.partition(":")[0] == AUTO:
        return _automatic(operator, name.partition(":")[2], what)
    found = catalog().load(operator.name, name)
    reason = refuses(found, what)
    if reason is not None:
        others = [one.name for one in operator.implementations
                  if not one.compile and refuses(one, what) is None]  # fmt: skip
        raise RuntimeError(refusal(operator, found, reason, others))
    return Choice(found.name, source="named"), found


def refusal(
    operator: Operator, found: Implementation, reason: str, others: Sequence[str] = ()
) -> str:
    """A sentence for an implementation that was named and cannot serve a call; `others` can."""
    sentence = f"{operator.name} implementation {found.name!r} cannot run here: {reason}"
    return f"{sentence}: choose {' or '.join([*others, AUTO])}" if others else sentence


def _automatic(operator: Operator, precision: str, what: Call) -> tuple[Choice, Implementation]:
    usable = {
        own.name: own
        for own in operator.implementations
        if own.selectable and not own.compile and own.precision in ("", precision)
    }
    if switched_on(AUTO_VARIABLE, TORCH):
        plain = next(iter(usable))
        return Choice(plain, source=f"{AUTO_VARIABLE}=torch"), usable[plain]
    broken: list[Offer] = []
    # Somebody else's is imported only where a table names it.
    for entry in tuned_tables.of_target(what.target):
        name = entry["choice"]
        if entry["of"] == operator.name and name not in usable:
            try:
                theirs = catalog().load(operator.name, name)
            except Exception as error:  # whatever it is, the next is taken
                broken.append((name, None, f"it cannot be loaded: {type(error).__name__}: {error}"))
                continue
            if theirs.selectable and theirs.precision in ("", precision):
                usable[theirs.name] = theirs
    offers: list[Offer] = [(n, None, refuses(usable[n], what)) for n in _by_default(usable, what)]
    offers += broken
    chosen = choose(operator.name, operator, what, offers, catalog().names(operator.name))
    _tell(what, chosen)
    return chosen, usable[chosen.name]


def _by_default(usable: dict[str, Implementation], what: Call) -> list[str]:
    """Where nothing was measured: ours on GPUs that they were made for, elsewhere PyTorch's."""
    ours = [name for name in reversed(usable) if usable[name].provider == OWN]
    made_for = what.target.kind == "cuda" and what.target.capability in tuned_tables.OURS_ON
    return list(dict.fromkeys([*(ours if made_for else []), *usable]))


_told = Bounded()  # (problem, mode) → Choice
_lock = threading.Lock()


def _tell(what: Call, chosen: Choice) -> None:
    """Logs a decision the first time that it is made."""
    key = what.problem.json, what.mode
    if _told.get(key) != chosen:
        with _lock:
            _told[key] = chosen
        refused = f"; {chosen.refused}" if chosen.refused else ""
        tuned_tables.log.info(
            "%s, %s: %s, %s%s", what.problem, what.mode, chosen.name, chosen.source, refused
        )


def choices() -> list[dict[str, Any]]:
    """What "auto" decided in this process, by problem and mode; `op` is the family's name."""
    found = []
    for (problem, mode), chosen in list(_told.items()):
        operator = catalog().operator(json.loads(problem)["op"])
        about = {"op": operator.family or operator.name, "implementation": chosen.name}
        about |= {"source": chosen.source, "refused": chosen.refused}
        found.append(about | {"problem": problem, "mode": mode})
    return found


def load(path: str) -> Kernel:
    """The kernel at "module:NAME"."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def kernels_of(operation: Operation, saves: str | None = None) -> dict[str, Kernel]:
    """Kernels by name; `saves`: those alone that write or read this form of what is saved."""
    found = map(load, operation.kernels)
    return {kernel.name: kernel for kernel in found if saves is None or kernel.saves == saves}


def forms(kernel: Kernel, what: Call) -> tuple[object, ...]:
    """Configurations that run different code: of each setting of what is true or false the first.

    Sizes of tiles, warps and stages change no branch that a kernel takes.
    """
    found: dict[tuple[str, ...], object] = {}
    for config in kernel.configs(what):
        found.setdefault(switches(config), config)
    return tuple(found.values())


def switches(config: object) -> tuple[str, ...]:
    """Names of what is true in a configuration, and in those that it consists of."""

    def named(content: object) -> Iterator[str]:
        for name, value in content.items() if isinstance(content, dict) else ():
            if value is True:
                yield name
            yield from named(value)

    return tuple(named(tuned_tables.as_json(config)))


def choose_kernel(
    operation: Operation,
    operator: Operator,
    what: Call,
    saves: str | None = None,
    forced: Forced | None = None,
) -> tuple[Kernel, Choice]:
    """The kernel and the configuration that serve a call; RuntimeError where none can."""
    kernels = kernels_of(operation, saves)
    if forced and operation.name in forced:
        name, config = forced[operation.name]
        return kernels[name], Choice(name, config, "forced")
    offers: list[Offer] = []
    for kernel in kernels.values():
        reason = kernel.refuses(what) or _moves(kernel.moving, what)
        configs = kernel.configs(what) if reason is None else (None,)
        offers += [(kernel.name, config, reason) for config in configs]

    def counts(name: str, config: object) -> tuple[float, ...] | None:
        made_of = kernels[name].counts
        return made_of and made_of(what, config)

    chosen = choose(operation.name, operator, what, offers, kernels_of(operation), counts)
    return kernels[chosen.name], chosen
