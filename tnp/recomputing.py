"""How a block is run whose activations are not all kept for the backward pass."""

from collections.abc import Callable
from functools import cache, partial

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from tnp.opaque import custom_op
from tnp.ops.attention import OPERATOR as attention_operator
from tnp.ops.buffered_attention import OPERATOR as buffered_attention_operator
from tnp.variants import Variant


def recomputing(whole: bool, variant: Variant, n_rows: int) -> Callable | None:
    """Returns what runs a block and computes it again in the backward pass; None where all is kept.

    Args:
        whole: keeps the block's input alone.
        variant: above its `recompute_above` rows the results of attention are kept too.
        n_rows: of the block's input.
    """
    if whole:
        return partial(checkpoint, use_reentrant=False)
    above = variant.recompute_above
    if above is not None and n_rows > above:
        contexts = partial(create_selective_checkpoint_contexts, _keep_attention)
        return partial(checkpoint, use_reentrant=False, context_fn=contexts)
    return None


@cache
def _attention_operators() -> frozenset[torch._ops.OpOverload]:
    """Returns forward passes of attention as PyTorch sees them: ours, and those of its forms."""
    names = [
        name.partition("::")[2]
        for implementation in attention_operator.implementations
        for name in implementation.dispatches
    ]
    theirs = {getattr(torch.ops.aten, name).default for name in names}
    ours = attention_operator, buffered_attention_operator
    return frozenset({*map(custom_op, ours), *theirs})


def _keep_attention(ctx, operator, *args, **kwargs) -> CheckpointPolicy:
    """Keeps attention alone, which is too expensive to compute again."""
    kept = operator in _attention_operators()
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
