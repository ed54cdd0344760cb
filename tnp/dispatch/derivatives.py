"""Refuses derivatives that our operators do not give, with one sentence.

Our operators give first derivatives backward, one vector at a time. Only PyTorch's implementations
give second derivatives, forward mode, batched gradients and the transforms of `torch.func`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.autograd import forward_ad

from tnp.dispatch.private import (
    FUNCTIONALIZE,
    functorch_levels,
    is_batched_tensor,
    is_legacy_batched_tensor,
)
from tnp.dispatch.spec import Operator

SECOND = "second derivative"
FORWARD_MODE = "derivative in forward mode"
BATCHED = "batched gradient, as is_grads_batched or vectorize=True ask for"
TRANSFORMED = "result under torch.func's grad, vjp, jvp and vmap"


def refusal(operator: Operator, implementation: str, what: str) -> RuntimeError:
    """Returns the error: it names the operator, what it does not give, and another choice."""
    remedy = "choose implementation='torch'"
    if any(one.name == "reference" for one in operator.implementations):
        # Here 'torch' is PyTorch's fused attention, which gives only first derivatives backward.
        remedy = "choose implementation='reference', or 'torch' if PyTorch's kernel gives it"
    return RuntimeError(
        f"{operator.name} implementation {implementation!r} gives no {what}: {remedy}"
    )


def has_tangent(tensors: Iterable[torch.Tensor | None]) -> bool:
    """Returns whether a tensor has a tangent. Ask `in_forward_mode` first, which costs less."""
    return any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def is_batched(tensors: Iterable[torch.Tensor | None]) -> bool:
    """Returns whether a tensor represents a batch of tensors, as under `vmap`."""
    kinds = is_batched_tensor, is_legacy_batched_tensor
    return any(is_kind(x) for x in tensors if x is not None for is_kind in kinds)


def is_transforming() -> bool:
    """Returns whether a transform of `torch.func` other than functionalization is open."""
    return any(level.key() != FUNCTIONALIZE for level in functorch_levels() or ())


def once(
    error: RuntimeError, run: Callable[..., tuple], gradients: tuple, kept: tuple, saved: tuple
) -> tuple:
    """Returns run(gradients, kept, saved). Differentiating the result again raises `error`.

    Args:
        error: the error that a second derivative raises.
        run: computes the gradients of the inputs, and builds no graph. Some may be None.
        gradients: gradients of the outputs, None where an output has none.
        kept: inputs and outputs of the forward pass, as PyTorch hands them back.
        saved: other tensors that the forward pass has saved. They have no graph.

    Raises:
        RuntimeError: `saved` is not empty, and no tensor in `kept` requires a gradient. PyTorch
            could not know that the result depends on inputs, so `error` is raised at once.
    """
    if saved and not any(x is not None and x.requires_grad for x in kept):
        raise error
    first, second = len(gradients), len(gradients) + len(kept)

    def run_flat(*tensors: torch.Tensor | None) -> tuple:
        return tuple(run(tensors[:first], tensors[first:second], tensors[second:]))

    return _Once.apply(error, run_flat, *gradients, *kept, *saved)


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, error, run, *tensors):
        ctx.error = error
        return run(*tensors)

    @staticmethod
    def backward(ctx, *gradients):
        raise ctx.error
