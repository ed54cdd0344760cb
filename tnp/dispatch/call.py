"""Leads a call to a launch. A problem is decided once, and the decision is kept as a plan.

1. `call` makes a key of everything that a plan depends on (`tnp.dispatch.plans.key_of`). A known
key is a
   dictionary look-up.
2. For an unknown key the operator's `describe` checks the arguments, an implementation and its
   kernels are chosen, and `prepare` gives the launch. This happens under a lock.
3. The plan runs: PyTorch's forms as they are; operations of ours behind one `autograd.Function`.

Where PyTorch compiles, traces or watches calls, operations of ours are custom operators instead.
These run plans too, which the same key finds (`tnp.dispatch.custom_op`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tnp.dispatch import custom_op
from tnp.dispatch.plans import build, key_of, of_operator, plans
from tnp.dispatch.private import (
    functorch_level,
    in_forward_mode,
    in_function_mode,
    n_dispatch_modes,
)
from tnp.dispatch.selection import wanted_of
from tnp.dispatch.spec import Operator
from tnp.util.checks import require_tensors

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, type(None)})
_compiling = torch.compiler.is_dynamo_compiling  # looked up once, as it costs as much as the call


def call(
    operator: Operator,
    implementation: str,
    inputs: tuple,
    scalars: tuple[float, ...] = (),
    options: tuple = (),
) -> Any:
    """The operator's outputs, one or a tuple.

    Args:
        operator: what to compute.
        implementation: a name, or "auto", or "auto:e4m3" where that precision will do.
        inputs: tensors in the operator's order.
        scalars: numbers in the operator's order.
        options: (name, value) of those that are on.

    Raises:
        ValueError: the inputs do not go together, or there is no such name.
        RuntimeError: the implementation cannot run here, with the reason.
    """
    if (
        _compiling() or n_dispatch_modes() or in_function_mode() or functorch_level() is not None
        or in_forward_mode()
    ):  # fmt: skip
        return custom_op.call(operator, implementation, inputs, scalars, options)
    if not _PLAIN.issuperset(map(type, inputs)):  # a subclass may stand for anything
        _require(operator, implementation, inputs)
        return custom_op.call(operator, implementation, inputs, scalars, options)
    known = of_operator.get(operator.name) or plans(operator)
    key = key_of(inputs, implementation, options)
    plan = known.by_key.get(key)
    if plan is None:
        plan = known.find(key, partial(_built, operator, implementation, inputs, options))
    return plan.run(inputs, scalars)


def _built(operator: Operator, implementation: str, inputs: tuple, options: tuple) -> Any:
    _require(operator, implementation, inputs)
    return build(operator, implementation, inputs, options, wanted_of(operator, inputs))


def _require(operator: Operator, implementation: str, inputs: tuple) -> None:
    """Raises ValueError where the implementation is no name, or what must be a tensor is none."""
    if not isinstance(implementation, str):
        first = operator.implementations[0].name
        raise ValueError(f"implementation is {implementation!r}: it must be a name, as {first!r}")
    for name, x in zip(operator.inputs, inputs, strict=True):
        if x is not None or not name.endswith("?"):
            require_tensors(**{name.removesuffix("?"): x})


def forget() -> None:
    """Drops every plan of this process, also those of compiled calls and of backward passes."""
    for known in list(of_operator.values()):
        known.forget()
