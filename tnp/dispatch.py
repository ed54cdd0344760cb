"""From a call to a launch: what is decided for a problem is decided once, and kept as a plan.

1. `call` makes a key of all that a plan depends on: the implementation asked for, options, switches
   of PyTorch and of the environment, and of each tensor its shape, strides, dtype, device,
   alignment, and whether it wants a gradient. A known key is a dictionary look-up.
2. Of an unknown key the operator's `describe` checks the arguments, an implementation and its
   kernels are chosen, and `prepare` gives the launch. This happens under a lock.
3. The plan runs: PyTorch's forms as they are; operations of ours behind one `autograd.Function`.

Where PyTorch compiles, traces or watches what is called, operations of ours are custom operators
instead, whose insides run the same plans (`tnp.opaque`).
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.autograd import forward_ad

from tnp import choice, opaque
from tnp.contract import Operator
from tnp.inputs import require_tensors
from tnp.plans import build, of_operator, plans
from tnp.selection import AUTO_VARIABLE, wanted_of

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})

# What makes a key, looked up once: attributes of modules cost as much as the calls.
_grad_enabled = torch.is_grad_enabled
_deterministic = torch._C._get_deterministic_algorithms
_compiling = torch.compiler.is_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._is_torch_function_mode_enabled
_functorch = torch._C._functorch.peek_interpreter_stack
# Reading os.environ costs 0.6 µs, what it wraps 0.02.
_environment = os.environ._data.get
_AUTO, _TABLES = (os.environ.encodekey(name) for name in (AUTO_VARIABLE, choice.VARIABLE))


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
    if _compiling() or _dispatch_modes() or _function_modes() or _functorch() is not None:
        return opaque.call(operator, implementation, inputs, scalars, options)
    if forward_ad._current_level >= 0:
        return opaque.call(operator, implementation, inputs, scalars, options)
    known = of_operator.get(operator.name) or plans(operator)
    key: tuple = (
        implementation, options, _grad_enabled(), _deterministic(), choice.epoch,
        _environment(_AUTO), _environment(_TABLES),
    )  # fmt: skip
    for x in inputs:
        if x is None:
            key += (None,)
        elif x.__class__ in _PLAIN:
            key += (
                (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() & 15, x.requires_grad),
            )  # fmt: skip
        else:  # a subclass may stand for anything
            _require(operator, implementation, inputs)
            return opaque.call(operator, implementation, inputs, scalars, options)
    plan = known.by_key.get(key)
    if plan is None:
        with known.lock:
            plan = known.by_key.get(key)
            if plan is None:
                wanted = wanted_of(operator, inputs)
                _require(operator, implementation, inputs)
                plan = known.keep(key, build(operator, implementation, inputs, options, wanted))
    return plan.run(inputs, scalars)


def _require(operator: Operator, implementation: str, inputs: tuple) -> None:
    """Raises ValueError where the implementation is no name, or what must be a tensor is none."""
    if not isinstance(implementation, str):
        first = operator.implementations[0].name
        raise ValueError(f"implementation is {implementation!r}: it must be a name, as {first!r}")
    for name, x in zip(operator.inputs, inputs, strict=True):
        if x is not None or not name.endswith("?"):
            require_tensors(**{name.removesuffix("?"): x})


def forget() -> None:
    """Every plan of this process: the next call of each problem decides anew."""
    for known in of_operator.values():
        with known.lock:
            known.by_key.clear()
