"""Computes a decoder's logits in plain PyTorch, in the decoder's own dtype, without a cache.

In float64 this is the reference of all gates of language models. Weights that are codes are
dequantized first.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from tnp.llm.decoder import Decoder, Linear, Norm
from tnp.ops.quantized_linear.quantizer import dequantize_weight


@torch.no_grad()
def logits(
    decoder: Decoder, ids: Tensor, kept: list[tuple[Tensor, Tensor]] | None = None
) -> Tensor:
    """Returns the logits [B, T, vocab] of each token's successor, in the decoder's dtype.

    Args:
        decoder: the decoder.
        ids: [B, T], int64, from 0 to vocab − 1; T is at most `sizes.longest`.
        kept: gets each layer's keys and values [B, n_kv_heads, T, head_dim].
    """
    s, n_tokens = decoder.sizes, ids.shape[1]
    x = F.embedding(ids, decoder.embedding)
    if decoder.positions is not None:
        x = x + decoder.positions[:n_tokens]
    places = torch.arange(n_tokens, device=ids.device)
    unseen = places > places[:, None]
    for layer in decoder.layers:
        qkv = linear(norm(x, layer.attention_norm, s.eps), layer.qkv)
        qkv = qkv.unflatten(-1, (-1, s.head_dim)).transpose(1, 2)
        q, k, v = qkv.split((s.n_heads, s.n_kv_heads, s.n_kv_heads), 1)
        if layer.q_norm is not None:
            q, k = norm(q, layer.q_norm, s.eps), norm(k, layer.k_norm, s.eps)
        if decoder.cos is not None:
            cos, sin = (table[:n_tokens].to(x.dtype) for table in (decoder.cos, decoder.sin))
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if kept is not None:
            kept.append((k, v))
        k, v = (y.repeat_interleave(s.n_heads // s.n_kv_heads, 1) for y in (k, v))
        scores = (q @ k.mT * s.head_dim**-0.5).masked_fill(unseen, -torch.inf)
        o = scores.softmax(-1) @ v
        x = x + linear(o.transpose(1, 2).flatten(2), layer.out)
        h = linear(norm(x, layer.mlp_norm, s.eps), layer.up)
        if s.gated:
            gate, up = h.chunk(2, -1)
            h = F.silu(gate) * up
        else:
            h = F.gelu(h, approximate="tanh")
        x = x + linear(h, layer.down)
    return linear(norm(x, decoder.norm, s.eps), decoder.head)


def linear(x: Tensor, one: Linear) -> Tensor:
    """Returns x Wᵀ + bias for x [..., n_in], with codes dequantized to x's dtype."""
    weight = one.weight
    if not isinstance(weight, Tensor):
        weight = dequantize_weight(weight, x.dtype)
    return F.linear(x, weight, one.bias)


def norm(x: Tensor, one: Norm, eps: float) -> Tensor:
    """Returns the RMSNorm of x [..., D], or its LayerNorm where there is a bias."""
    if one.bias is None:
        return F.rms_norm(x, one.weight.shape, one.weight, eps)
    return F.layer_norm(x, one.weight.shape, one.weight, one.bias, eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns x [..., T, D] with elements i and i + D/2 rotated by cos and sin [T, D/2]."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
