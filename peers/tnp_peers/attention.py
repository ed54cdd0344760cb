"""Runs attention of FlashAttention 3 and 4, and of 3 in 8 bits. PyTorch's flex is in `flex`.

All take q [B, H, n_q, D], k and v [B, H_kv, n_k, D], and return [B, H, n_q, D] in q's dtype.
Strides are arbitrary, but the last dimension must be contiguous. FlashAttention's layout is [B, L,
H, D], of which these are views. Packed sequences lie in rows [L, H, D]. Both packages align causal
attention and windows as we do: the last query stands beside the last key. They return 0 if a query
sees no key.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tnp.dispatch.spec import Call, Implementation, Reason, on_cuda
from tnp.ops.attention import HEAD_DIMS, eight_bit
from tnp.ops.attention.definition import PACKED
from tnp.ops.attention.layouts import from_rows, heads_first, to_rows, tokens_first
from tnp.ops.attention.torch_forms import bounded, longest_sequence, softmax_scale
from tnp_peers.support import both, sizes

OPTIONS = ("base2", "causal", "n_kv_heads", "n_sequences", "window", *PACKED)
E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max  # 448
LEAST = 1e-30  # lower bound of a head's largest element, so that zeros have a scale


def _flash(
    dense: Callable, varlen: Callable, q: Tensor, k: Tensor, v: Tensor,
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, **asked,
) -> Tensor:  # fmt: skip
    """Calls a package's function for batches, or its function for packed sequences."""
    if cu_seqlens_q is None:
        return heads_first(dense(*map(tokens_first, (q, k, v)), **asked))
    o = varlen(
        *map(to_rows, (q, k, v)), cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=longest_sequence(cu_seqlens_q, "cu_seqlens_q", "q", q.shape[2]),
        max_seqlen_k=longest_sequence(cu_seqlens_k, "cu_seqlens_k", "k", k.shape[2]),
        **asked,
    )  # fmt: skip
    return from_rows(o, len(q))


# ---------------------------------------------------------------------------------------------- 3


def fa3(
    q: Tensor, k: Tensor, v: Tensor, n_keys: None, cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None, scale: float, base2: bool = False, causal: bool = False,
) -> Tensor:  # fmt: skip
    """Runs FlashAttention-3 of package fa3-fwd, whose wheel holds sm_80 and sm_90a."""
    from fa3_fwd_interface import flash_attn_func, flash_attn_varlen_func

    return _flash(
        flash_attn_func, flash_attn_varlen_func, q, k, v, cu_seqlens_q, cu_seqlens_k,
        softmax_scale=softmax_scale(scale, base2), causal=causal,
    )  # fmt: skip


def _fa3_supported(call: Call) -> Reason:
    """Refuses windows: the wheel is built with DISABLE_LOCAL, as fa3_fwd_config.py says.

    It is also built with DISABLE_FP16 and DISABLE_BACKWARD.
    """
    return "fa3-fwd is built without windows" if call.problem["window"] else None


def _in_8_bits(*tensors: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Returns each [B, L, H, D] in e4m3, with its factor, float32 [B, H]."""
    quantized = []
    for x in tensors:
        descale = x.abs().amax((1, 3)).float().clamp(min=LEAST) / LARGEST
        quantized.append(((x.float() / descale[:, None, :, None]).to(E4M3), descale))
    return quantized


@cache
def _compiled_in_8_bits():
    # Uncompiled, each step would be a launch and a copy in float32.
    return torch.compile(_in_8_bits, fullgraph=True, dynamic=False)


def fa3_e4m3(
    q: Tensor, k: Tensor, v: Tensor, n_keys: None, cu_seqlens_q: None, cu_seqlens_k: None,
    scale: float, base2: bool = False,
) -> Tensor:  # fmt: skip
    """Runs FlashAttention-3 in e4m3, and converts q, k and v to e4m3.

    The package takes one scale for each head of a sample. Its authors' paper has scales of blocks
    and turns q and k first; the package has neither.
    """
    from fa3_fwd_interface import flash_attn_func

    quantized = _compiled_in_8_bits()(*map(tokens_first, (q, k, v)))
    (q, q_descale), (k, k_descale), (v, v_descale) = quantized
    o = flash_attn_func(
        q, k, v, softmax_scale=softmax_scale(scale, base2),
        q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
    )  # fmt: skip
    return heads_first(o)  # bfloat16


# ---------------------------------------------------------------------------------------------- 4


def fa4(
    q: Tensor, k: Tensor, v: Tensor, n_keys: None, cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None, scale: float, base2: bool = False, causal: bool = False,
    window: int = 0, *, deterministic: bool = False,
) -> Tensor:  # fmt: skip
    """Runs FlashAttention-4 of package flash-attn-4, in CuTe.

    Its backward pass adds up dq, and dk and dv of grouped heads, in any order. With `deterministic`
    it adds in one order, and tiles wait for one another.
    """
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    def first(function: Callable) -> Callable:
        return lambda *tensors, **asked: function(*tensors, **asked)[0]  # without lse

    window = bounded(window, q.shape[2], k.shape[2])
    reach = (window - 1, 0 if causal else window - 1) if window else (None, None)
    return _flash(
        first(flash_attn_func), first(flash_attn_varlen_func), q, k, v, cu_seqlens_q, cu_seqlens_k,
        softmax_scale=softmax_scale(scale, base2), causal=causal, window_size=reach,
        deterministic=deterministic,
    )  # fmt: skip


def fa4_deterministic(*arguments: Any, **options: Any) -> Tensor:
    """Runs `fa4` with gradients that are equal from run to run."""
    return fa4(*arguments, deterministic=True, **options)


def _fa4_supported(call: Call) -> Reason:
    """Refuses head_dims above 128 on Blackwell: their own kernels do not take every mask."""
    head_dim = call.problem["head_dim"]
    if call.target.capability >= 100 and head_dim > 128:
        return f"on Blackwell it takes head_dim up to 128, not {head_dim}"
    return None


_SIZES = sizes("head_dim", HEAD_DIMS)
FA3 = Implementation(
    "fa3",
    run=fa3,
    supported=both(on_cuda(80, below=100), _SIZES, _fa3_supported),
    dtypes=("bfloat16",),
    gradients=(),
    options=OPTIONS,
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
    supported=both(on_cuda(90), _SIZES, _fa4_supported),
    dtypes=("bfloat16", "float16"),
    options=OPTIONS,
    traceable=False,
    nondeterministic=("dq", "dk", "dv"),
)
# The peer of our `separate`: its gradients are equal from run to run.
FA4_DETERMINISTIC = Implementation(
    "fa4_deterministic",
    run=fa4_deterministic,
    supported=both(on_cuda(90, below=120), _SIZES, _fa4_supported),  # its kernels for 12.0 cannot
    dtypes=("bfloat16", "float16"),
    options=OPTIONS,
    traceable=False,
)
