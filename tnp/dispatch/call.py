"""Takes a call of an operator to its launch. Each problem is decided once and kept as a plan.

1. `call` makes a key of everything that a plan depends on. A known key costs one look-up.
2. For an unknown key `tnp.dispatch.plans` builds a plan, under a lock. The operator's `describe`
   checks the arguments, `tnp.dispatch.selection` chooses the implementation and its kernels, and
   each kernel's `prepare` makes a launch.
3. The plan runs. PyTorch's forms are called as they are. Our operations run behind one
   `autograd.Function`, and `tnp.dispatch.launcher` launches their kernels.

If PyTorch compiles, traces or transforms the call, our operations are custom operators instead
(`tnp.dispatch.custom_op`). They run plans too, found by a key from the same function.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tnp.dispatch import custom_op
from tnp.dispatch.plans import RefusedPlan, build, key_of, of_operator, plans
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
_compiling = torch.compiler.is_dynamo_compiling  # looking it up costs as much as calling it


def call(
    operator: Operator,
    implementation: str,
    inputs: tuple,
    scalars: tuple[float, ...] = (),
    options: tuple = (),
    or_none: bool = False,
) -> Any:
    """Returns the operator's outputs, one or a tuple.

    Args:
        operator: what to compute.
        implementation: a name, "auto", or "auto:e4m3" where e4m3 is precise enough.
        inputs: tensors in the order of `Operator.inputs`.
        scalars: numbers in the order of `Operator.scalars`.
        options: pairs (name, value) of the options that are on.
        or_none: whether to return None if the implementation cannot run here.

    Raises:
        ValueError: the inputs do not fit together, or there is no such name.
        RuntimeError: the implementation cannot run here, with the reason, unless `or_none`.
    """
    if (
        _compiling() or n_dispatch_modes() or in_function_mode() or functorch_level() is not None
        or in_forward_mode()
    ):  # fmt: skip
        return custom_op.call(operator, implementation, inputs, scalars, options, or_none)
    if not _PLAIN.issuperset(map(type, inputs)):  # a subclass may stand for anything
        _require(operator, implementation, inputs)
        return custom_op.call(operator, implementation, inputs, scalars, options, or_none)
    known = of_operator.get(operator.name) or plans(operator)
    key = key_of(inputs, implementation, options)
    plan = known.by_key.get(key)
    if plan is None:
        plan = known.find(key, partial(_built, operator, implementation, inputs, options, or_none))
    if or_none and plan.__class__ is RefusedPlan:
        return None
    return plan.run(inputs, scalars)


def _built(
    operator: Operator, implementation: str, inputs: tuple, options: tuple, or_refused: bool
) -> Any:
    _require(operator, implementation, inputs)
    wanted = wanted_of(operator, inputs)
    return build(operator, implementation, inputs, options, wanted, or_refused=or_refused)


def _require(operator: Operator, implementation: str, inputs: tuple) -> None:
    """Raises ValueError if `implementation` is not a string, or an input is not a tensor."""
    if not isinstance(implementation, str):
        first = operator.implementations[0].name
        raise ValueError(f"implementation is {implementation!r}: it must be a name, as {first!r}")
    for name, x in zip(operator.inputs, inputs, strict=True):
        if x is not None or not name.endswith("?"):
            require_tensors(**{name.removesuffix("?"): x})


def forget() -> None:
    """Drops every plan of this process, also plans of compiled calls and of backward passes."""
    for known in list(of_operator.values()):
        known.forget()
