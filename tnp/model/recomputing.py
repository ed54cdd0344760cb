"""Runs a block so that the backward pass computes some of its activations again."""

from collections.abc import Callable
from functools import cache, partial

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from tnp.dispatch.custom_op import custom_op
from tnp.model.variants import Variant
from tnp.ops.attention import OPERATOR as attention_operator
from tnp.ops.buffered_attention import OPERATOR as buffered_attention_operator


def recomputing(whole: bool, variant: Variant, n_rows: int) -> Callable | None:
    """Returns a function that runs a block and recomputes it in the backward pass.

    Returns None if all activations are kept.

    Args:
        whole: whether to keep only the block's input.
        variant: above its `recompute_above` rows, only the input and attention's results are kept.
        n_rows: rows of the block's input.
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
    """Returns the operators of attention's forward passes: our custom ones and PyTorch's."""
    names = [
        name.partition("::")[2]
        for implementation in attention_operator.implementations
        for name in implementation.dispatches
    ]
    theirs = {getattr(torch.ops.aten, name).default for name in names}
    ours = attention_operator, buffered_attention_operator
    return frozenset({*map(custom_op, ours), *theirs})


def _keep_attention(ctx, operator, *args, **kwargs) -> CheckpointPolicy:
    """Keeps only attention's results, which are too expensive to compute again."""
    kept = operator in _attention_operators()
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
