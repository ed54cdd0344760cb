"""Derivatives that operators of ours do not have: each is one sentence, never 0 or None.

An operator of ours gives first derivatives backward, one vector at a time. Second derivatives,
forward mode, batched gradients and the transforms of `torch.func` are PyTorch's form to give.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.autograd import forward_ad

from tnp.contract import Operator

SECOND = "second derivative"
FORWARD_MODE = "derivative in forward mode"
BATCHED = "batched gradient, as is_grads_batched or vectorize=True ask for"
TRANSFORMED = "result under torch.func's grad, vjp, jvp and vmap"

_functorch = torch._C._functorch


def refusal(operator: Operator, implementation: str, what: str) -> RuntimeError:
    """The error that says which operator does not give `what`, and which implementation may."""
    remedy = "choose implementation='torch'"
    if any(one.name == "reference" for one in operator.implementations):
        # There 'torch' is PyTorch's fused attention, which is differentiated once, backward.
        remedy = "choose implementation='reference', or 'torch' where PyTorch's own gives it"
    return RuntimeError(
        f"{operator.name} implementation {implementation!r} gives no {what}: {remedy}"
    )


def has_tangent(tensors: Iterable[torch.Tensor | None]) -> bool:
    """Returns whether a tensor is a dual number of the open level of forward mode.

    Ask first whether `forward_ad._current_level` is 0 or more, which costs 0.02 µs.
    """
    return any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def is_batched(tensors: Iterable[torch.Tensor | None]) -> bool:
    """Returns whether a tensor stands for several, as `vmap` hands them over."""
    kinds = _functorch.is_batchedtensor, _functorch.is_legacy_batchedtensor
    return any(is_one(x) for x in tensors if x is not None for is_one in kinds)


def is_transforming() -> bool:
    """Returns whether a transform of `torch.func` other than functionalization is open."""
    levels = _functorch.get_interpreter_stack() or ()
    return any(level.key() != _functorch.TransformType.Functionalize for level in levels)


def once(
    error: RuntimeError, run: Callable[..., tuple], gradients: tuple, kept: tuple, saved: tuple
) -> tuple:
    """Returns run(gradients, kept, saved); whoever differentiates that again meets `error`.

    Args:
        error: what a second derivative raises.
        run: computes the gradients of the inputs without a graph of its own; some may be None.
        gradients: arriving ones, None where there is none.
        kept: inputs and outputs of the forward pass, as PyTorch hands them back.
        saved: what else the forward pass has left, which has no graph.

    Raises:
        RuntimeError: nothing that is kept says what `saved` depends on, where gradients are made
            along with the result.
    """
    if saved and not any(x is not None and x.requires_grad for x in kept):
        raise error
    first, second = len(gradients), len(gradients) + len(kept)

    def of_all(*tensors: torch.Tensor | None) -> tuple:
        return tuple(run(tensors[:first], tensors[first:second], tensors[second:]))

    return _Once.apply(error, of_all, *gradients, *kept, *saved)


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, error, run, *tensors):
        ctx.error = error
        return run(*tensors)

    @staticmethod
    def backward(ctx, *gradients):
        raise ctx.error
