"""Checks operators of ours with torch.library's own tests."""

import json

import torch

from tnp.dispatch import custom_op
from tnp.dispatch.selection import wanted_of
from tnp.dispatch.spec import Operator


def told(
    implementation: str, wanted: list[str], options: list | None = None, given: list | None = None
) -> str:
    """Returns a custom operator's argument `call` for a call in bfloat16."""
    content = {"implementation": implementation, "saves": "", "wanted": wanted, "read_off": []}
    content["given"] = given or []  # optional inputs
    return json.dumps(content | {"options": options or [], "dtype": "bfloat16"})


def require_contracts(
    operator: Operator,
    implementation: str,
    inputs: list[torch.Tensor | None],
    options: tuple = (),
) -> None:
    """Checks schema, fake tensors and autograd of a custom operator, with and without gradients.

    PyTorch's check of registered gradients differentiates, so the backward operator is seen too.
    """
    for leaves in (inputs, [x if x is None else x.detach() for x in inputs]):
        values = operator.describe(*leaves, **dict(options))
        dtype = str(leaves[0].dtype).removeprefix("torch.")
        sizes = tuple(values[name] for name in operator.sizes)
        shown = tuple((name, values[name]) for name in operator.read_off if name in values)
        named = zip(operator.tensors, leaves, strict=True)
        given = tuple(name for name, x in named if name in operator.optional and x is not None)
        text = custom_op._decided(
            operator.name, implementation, dtype, leaves[0].device, wanted_of(operator, leaves),
            options, shown, given, sizes,
        )  # fmt: skip
        call = *leaves, *operator.numbers, text
        torch.library.opcheck(custom_op.custom_operator(operator).differentiable, call)
