"""Selects what serves a call: an implementation of the operator, a kernel of each operation.

`tnp.dispatch.plans` asks, once for each plan. `describe` makes a `Call` of the inputs. A named
implementation is taken if it can run here. For "auto" the GPU's table (`tnp.dispatch.tuned_tables`)
chooses among the implementations that can run here. It also chooses the kernel and its
configuration. The kernel's `prepare` then makes a launch, which ends in `tnp.dispatch.launcher`.
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
CHECK_VARIABLE = "TNP_CHECK"  # "1": kernels assert on the device that numbers are in range


class Refused(RuntimeError):
    """Says in one sentence why a named implementation cannot serve a call."""


Forced = dict[str, tuple[str, object]]  # operation → kernel and configuration


# ------------------------------------------------------------------------------ what is requested


def wanted_of(operator: Operator, inputs: tuple) -> tuple[str, ...]:
    """Returns the names of the inputs whose gradients this call may have to give."""
    if not torch.is_grad_enabled():
        return ()
    named = zip(operator.tensors, inputs, strict=True)
    return tuple(
        name
        for name, x in named
        if x is not None and x.requires_grad and name in operator.differentiated
    )


def aligned(tensors: Any, gradients: tuple = ()) -> bool:
    """Returns whether every row of every tensor starts at a multiple of 16 bytes.

    An expanded tensor is not aligned, but an expanded gradient, as of a sum, is (`Call.aligned`).
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
    """Returns the call of these inputs; ValueError if they do not fit together."""
    values = operator.describe(*inputs, **dict(options))
    first = next(x for x in inputs if x is not None)
    dtype = values.pop("dtype", None) or str(first.dtype).removeprefix("torch.")
    named = zip(operator.tensors, inputs, strict=True)
    given = {name: True for name, x in named if name in operator.optional and x is not None}
    problem = operator.problem(dtype, **given | dict(options) | values)
    return Call(problem, target or devices.of_device(first.device), wanted, aligned(inputs))


# --------------------------------------------------------------------------------- what serves it


def refuses(found: Implementation, what: Call) -> Reason:
    """Returns why an implementation cannot serve a call here and now, or None."""
    return found.refuses(what) or _nondeterminism(found.nondeterministic, what)


def _nondeterminism(results: tuple[str, ...], what: Call) -> Reason:
    if results and what.wanted and torch.are_deterministic_algorithms_enabled():
        names = ", ".join(results)
        return f"{names} may differ between runs, and PyTorch is asked for deterministic algorithms"
    return None


def choose_implementation(
    operator: Operator, name: str, what: Call
) -> tuple[Choice, Implementation]:
    """Returns the implementation of this name, or for "auto" the one that the table chooses.

    Raises:
        ValueError: there is no such name.
        Refused: it cannot run here, with the reason.
    """
    if name.partition(":")[0] == AUTO:
        return _automatic(operator, name.partition(":")[2], what)
    found = catalog().load(operator.name, name)
    reason = refuses(found, what)
    if reason is not None:
        others = [one.name for one in operator.implementations
                  if not one.compile and refuses(one, what) is None]  # fmt: skip
        raise Refused(refusal(operator, found, reason, others))
    return Choice(found.name, source="named"), found


def refusal(
    operator: Operator, found: Implementation, reason: str, others: Sequence[str] = ()
) -> str:
    """Returns the sentence for a named implementation that cannot serve a call; `others` can."""
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
    # Another package's implementation is imported only if a table names it.
    for entry in tuned_tables.of_target(what.target):
        name = entry["choice"]
        if entry["of"] == operator.name and name not in usable:
            try:
                theirs = catalog().load(operator.name, name)
            except Exception as error:  # an import may raise anything; `Choice.refused` names it
                broken.append((name, None, f"it cannot be loaded: {type(error).__name__}: {error}"))
                continue
            if theirs.selectable and theirs.precision in ("", precision):
                usable[theirs.name] = theirs
    offers: list[Offer] = [(n, None, refuses(usable[n], what)) for n in _by_default(usable, what)]
    offers += broken
    chosen = choose(operator.name, operator, what, offers, catalog().names(operator.name))
    _log(what, chosen)
    return chosen, usable[chosen.name]


def _by_default(usable: dict[str, Implementation], what: Call) -> list[str]:
    """Returns the names in default order: ours first on GPUs that they were made for."""
    ours = [name for name in reversed(usable) if usable[name].provider == OWN]
    made_for = what.target.kind == "cuda" and what.target.capability in tuned_tables.OURS_ON
    return list(dict.fromkeys([*(ours if made_for else []), *usable]))


_logged = Bounded()  # (problem, mode) → Choice
_lock = threading.Lock()


def _log(what: Call, chosen: Choice) -> None:
    """Logs a decision the first time that it is made."""
    key = what.problem.json, what.mode
    if _logged.get(key) != chosen:
        with _lock:
            _logged[key] = chosen
        refused = f"; {chosen.refused}" if chosen.refused else ""
        tuned_tables.log.info(
            "%s, %s: %s, %s%s", what.problem, what.mode, chosen.name, chosen.source, refused
        )


def choices() -> list[dict[str, Any]]:
    """Returns the decisions of "auto" in this process; `op` is the family's name."""
    found = []
    for (problem, mode), chosen in list(_logged.items()):
        operator = catalog().operator(json.loads(problem)["op"])
        about = {"op": operator.family or operator.name, "implementation": chosen.name}
        about |= {"source": chosen.source, "refused": chosen.refused}
        found.append(about | {"problem": problem, "mode": mode})
    return found


def load(path: str) -> Kernel:
    """Returns the kernel at "module:NAME"."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def kernels_of(operation: Operation, saves: str | None = None) -> dict[str, Kernel]:
    """Returns kernels by name; with `saves` only kernels that write or read that saved form."""
    found = map(load, operation.kernels)
    return {kernel.name: kernel for kernel in found if saves is None or kernel.saves == saves}


def forms(kernel: Kernel, what: Call) -> tuple[object, ...]:
    """Returns configurations that run different code: the first for each set of true switches.

    Sizes of tiles, warps and stages change no branch of a kernel.
    """
    found: dict[tuple[str, ...], object] = {}
    for config in kernel.configs(what):
        found.setdefault(switches(config), config)
    return tuple(found.values())


def switches(config: object) -> tuple[str, ...]:
    """Returns the names of true values in a configuration, also in nested ones."""

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
    """Returns the kernel and the configuration that serve a call; RuntimeError if none can."""
    kernels = kernels_of(operation, saves)
    if forced and operation.name in forced:
        name, config = forced[operation.name]
        return kernels[name], Choice(name, config, "forced")
    offers: list[Offer] = []
    for kernel in kernels.values():
        reason = kernel.refuses(what) or _nondeterminism(kernel.nondeterministic, what)
        configs = kernel.configs(what) if reason is None else (None,)
        offers += [(kernel.name, config, reason) for config in configs]

    def counts(name: str, config: object) -> tuple[float, ...] | None:
        made_of = kernels[name].counts
        return made_of and made_of(what, config)

    chosen = choose(operation.name, operator, what, offers, kernels_of(operation), counts)
    return kernels[chosen.name], chosen
