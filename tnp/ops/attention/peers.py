"""Attention of other packages, to time ours against: imported when called, never a dependency.

All take q [B, H, n_q, D], k and v [B, H, n_k, D] with any strides whose last dimension is
contiguous, and return [B, H, n_q, D] in q's dtype; none knows `n_context`. What a package cannot
run it refuses itself, with an error of its own.
"""

from functools import cache

import torch


@cache
def _compiled_flex_attention():
    from torch.nn.attention.flex_attention import flex_attention

    # One kernel per shape. Past dynamo's limit of shapes, `fullgraph` raises where the default
    # would go on uncompiled, with all scores in memory.
    return torch.compile(flex_attention, fullgraph=True, dynamic=False)


def flex_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """PyTorch's flex_attention without a mask, compiled; bfloat16, float16 or float32 on CUDA."""
    return _compiled_flex_attention()(q, k, v, scale=scale)


def fa3_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """FlashAttention-3 of package `fa3-fwd`: bfloat16, sm_80 to sm_90, built without a backward.

    Raises NotImplementedError, a RuntimeError, where a gradient could be asked for.
    """
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise NotImplementedError(
            "fa3 is forward only (fa3-fwd is built without a backward): call it under "
            "torch.no_grad(), or choose an implementation with gradients"
        )
    from fa3_fwd_interface import flash_attn_func

    return flash_attn_func(*_rows_first(q, k, v), softmax_scale=scale).transpose(1, 2)


def fa4_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """FlashAttention-4 of package `flash-attn-4`, in CuTe: bfloat16 or float16, sm_90 or newer."""
    from flash_attn.cute import flash_attn_func

    o, _lse = flash_attn_func(*_rows_first(q, k, v), softmax_scale=scale)
    return o.transpose(1, 2)


def _rows_first(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """[B, H, L, D] → [B, L, H, D], the layout of both FlashAttentions, as views."""
    return [x.transpose(1, 2) for x in tensors]


PEERS = {"flex": flex_attention, "fa3": fa3_attention, "fa4": fa4_attention}
