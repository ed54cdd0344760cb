"""Attention of PyTorch's flex_attention and of FlashAttention 3 and 4.

All take q [B, H, n_q, D], k and v [B, H, n_k, D] with any strides whose last dimension is
contiguous, and return [B, H, n_q, D] in q's dtype; none takes n_keys. FlashAttention's layout is
[B, L, H, D], of which these are views.
"""

from functools import cache

import torch
from torch import Tensor

from tnp.contract import Implementation, on_cuda
from tnp.ops.attention.torch_forms import softmax_scale
from tnp_peers.support import both, sizes

HEAD_DIMS = (16, 32, 64, 128)  # those that ours are compared at


@cache
def _compiled_flex_attention():
    from torch.nn.attention.flex_attention import flex_attention

    # One kernel per shape. Past dynamo's limit of shapes, `fullgraph` raises where the default
    # would go on uncompiled, with all scores in memory.
    return torch.compile(flex_attention, fullgraph=True, dynamic=False)


def flex(
    q: Tensor, k: Tensor, v: Tensor, n_keys: None, scale: float, base2: bool = False
) -> Tensor:
    """PyTorch's flex_attention without a mask, compiled."""
    return _compiled_flex_attention()(q, k, v, scale=softmax_scale(scale, base2))


def fa3(q: Tensor, k: Tensor, v: Tensor, n_keys: None, scale: float, base2: bool = False) -> Tensor:
    """FlashAttention-3 of package fa3-fwd, whose wheel holds sm_80 and sm_90a and no backward."""
    from fa3_fwd_interface import flash_attn_func

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return flash_attn_func(q, k, v, softmax_scale=softmax_scale(scale, base2)).transpose(1, 2)


def fa4(q: Tensor, k: Tensor, v: Tensor, n_keys: None, scale: float, base2: bool = False) -> Tensor:
    """FlashAttention-4 of package flash-attn-4, in CuTe."""
    from flash_attn.cute import flash_attn_func

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o, _lse = flash_attn_func(q, k, v, softmax_scale=softmax_scale(scale, base2))
    return o.transpose(1, 2)


_SIZES = sizes("head_dim", HEAD_DIMS)
FLEX = Implementation("flex", run=flex, supported=both(on_cuda(80), _SIZES), options=("base2",))
# The wheel is built with DISABLE_FP16 and DISABLE_BACKWARD (its fa3_fwd_config.py).
FA3 = Implementation(
    "fa3",
    run=fa3,
    supported=both(on_cuda(80, below=100), _SIZES),
    dtypes=("bfloat16",),
    gradients=(),
    options=("base2",),
    traceable=False,
)
FA4 = Implementation(
    "fa4",
    run=fa4,
    supported=both(on_cuda(90), _SIZES),
    dtypes=("bfloat16", "float16"),
    options=("base2",),
    traceable=False,
)
