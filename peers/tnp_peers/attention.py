"""Attention of PyTorch's flex_attention and of FlashAttention 3 and 4, of 3 in 8 bits too.

All take q [B, H, n_q, D], k and v [B, H, n_k, D] with any strides whose last dimension is
contiguous, and return [B, H, n_q, D] in q's dtype; none takes n_keys. FlashAttention's layout is
[B, L, H, D], of which these are views.
"""

from functools import cache

import torch
from torch import Tensor

from tnp.contract import Implementation, on_cuda
from tnp.ops.attention import eight_bit
from tnp.ops.attention.torch_forms import softmax_scale
from tnp_peers.support import both, sizes

HEAD_DIMS = (16, 32, 64, 128)  # those that ours are compared at
E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max  # 448
LEAST = 1e-30  # that the largest element of a head counts as, so that zeros have a scale


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


def _in_8_bits(*tensors: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Of each [B, L, H, D]: it in e4m3, and what that is multiplied by, float32 [B, H]."""
    quantized = []
    for x in tensors:
        descale = x.abs().amax((1, 3)).float().clamp(min=LEAST) / LARGEST
        quantized.append(((x.float() / descale[:, None, :, None]).to(E4M3), descale))
    return quantized


@cache
def _compiled_in_8_bits():
    # Uncompiled each step of it is a launch and a copy in float32.
    return torch.compile(_in_8_bits, fullgraph=True, dynamic=False)


def fa3_e4m3(
    q: Tensor, k: Tensor, v: Tensor, n_keys: None, scale: float, base2: bool = False
) -> Tensor:
    """FlashAttention-3 in e4m3, with what makes e4m3 of q, k and v.

    The package takes one scale for each head of a sample. Its authors' paper has scales of blocks
    and turns q and k first; neither is in the package.
    """
    from fa3_fwd_interface import flash_attn_func

    quantized = _compiled_in_8_bits()(*(x.transpose(1, 2) for x in (q, k, v)))
    (q, q_descale), (k, k_descale), (v, v_descale) = quantized
    o = flash_attn_func(
        q, k, v, softmax_scale=softmax_scale(scale, base2),
        q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
    )  # fmt: skip
    return o.transpose(1, 2)  # bfloat16


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
FA3_E4M3 = Implementation(
    "fa3_e4m3",
    run=fa3_e4m3,
    supported=both(on_cuda(90, below=100), sizes("head_dim", (64, 128))),
    dtypes=("bfloat16",),
    gradients=(),
    options=("base2",),
    precision="e4m3",
    selectable=False,  # "auto:e4m3" is ours
    traceable=False,
    work=eight_bit.work,
)
FA4 = Implementation(
    "fa4",
    run=fa4,
    supported=both(on_cuda(90), _SIZES),
    dtypes=("bfloat16", "float16"),
    options=("base2",),
    traceable=False,
)
