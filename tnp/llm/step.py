"""Computes prompts and single tokens of a batch of sequences with a cache.

A step has two methods. `prompt` takes many tokens of each sequence. Calling the step takes one
token of each. Both write keys and values to the cache and advance its lengths on the device.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from tnp.llm.cache import Cache
from tnp.llm.decoder import Decoder, Linear, Norm
from tnp.ops.decode_attention import decode_attention
from tnp.ops.layer_norm import layer_norm
from tnp.ops.quantized_linear import quantized_linear
from tnp.ops.rms_norm import rms_norm
from tnp.ops.rope import rope
from tnp.ops.swiglu import swiglu
from tnp.util.checks import require_between


class Step(Protocol):
    """Computes logits of the next token. An implementation is made of a decoder."""

    def __init__(self, decoder: Decoder) -> None: ...

    @staticmethod
    def refuses(decoder: Decoder) -> str | None:
        """Returns why this implementation cannot compute the decoder where it is, or None."""
        ...

    def prompt(self, ids: Tensor, cache: Cache, lengths: Tensor | None = None) -> Tensor:
        """Returns the logits [B, vocab] behind each sequence's last token.

        Args:
            ids: int64 [B, T], new tokens, in range.
            cache: has room for T more tokens of each sequence.
            lengths: int32 [B], from 1 to T, how many tokens each sequence has, with padding behind
                them. None: T. Only for an empty cache.
        """
        ...

    def __call__(self, ids: Tensor, cache: Cache) -> Tensor:
        """Returns the logits [B, vocab] behind one more token of each sequence, ids int64 [B].

        Nothing waits for the host, so a step on CUDA can be captured.
        """
        ...


class TorchStep:
    """Computes with the repository's operators in PyTorch's implementations, in any float dtype."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    @staticmethod
    def refuses(decoder: Decoder) -> str | None:
        return None

    @torch.no_grad()
    def prompt(self, ids: Tensor, cache: Cache, lengths: Tensor | None = None) -> Tensor:
        if lengths is not None and not cache.is_empty:
            raise ValueError("lengths is given and the cache holds tokens: it must be empty")
        x = self._hidden(ids, cache, lengths)
        if lengths is None:
            x = x[:, -1]
        else:
            x = x[torch.arange(len(ids), device=ids.device), lengths.long() - 1]
        return self._logits(x)

    @torch.no_grad()
    def __call__(self, ids: Tensor, cache: Cache) -> Tensor:
        return self._logits(self._hidden(ids[:, None], cache, None)[:, 0])

    def _logits(self, x: Tensor) -> Tensor:
        return linear(self._norm(x, self.decoder.norm), self.decoder.head)

    def _hidden(self, ids: Tensor, cache: Cache, n_new: Tensor | None) -> Tensor:
        """Returns the residual stream [B, T, width] behind the last layer; advances the cache."""
        decoder, s, n_tokens = self.decoder, self.decoder.sizes, ids.shape[1]
        require_between("lengths", cache.lengths, 0, cache.capacity - n_tokens)
        positions = cache.lengths.long()[:, None] + torch.arange(n_tokens, device=ids.device)
        places, n_keys = cache.places(positions, n_new), cache.lengths + n_tokens
        x = F.embedding(ids, decoder.embedding)
        if decoder.positions is not None:
            x = x + F.embedding(positions, decoder.positions)
        for i, layer in enumerate(decoder.layers):
            qkv = linear(self._norm(x, layer.attention_norm), layer.qkv)
            qkv = qkv.unflatten(-1, (-1, s.head_dim)).transpose(1, 2)
            q, k, v = qkv.split((s.n_heads, s.n_kv_heads, s.n_kv_heads), 1)
            if layer.q_norm is not None:
                q, k = self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)
            if decoder.cos is not None:
                q, k = rope(q, k, decoder.cos, decoder.sin, positions)
            cache.write(i, k, v, places)
            if cache.is_empty and n_tokens > 1:  # padding stands behind all tokens that count
                o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            else:
                o = decode_attention(q, cache.keys[i], cache.values[i], n_keys, cache.page_table)
            x = x + linear(o.transpose(1, 2).flatten(2), layer.out)
            h = linear(self._norm(x, layer.mlp_norm), layer.up)
            h = swiglu(*h.chunk(2, -1)) if s.gated else F.gelu(h, approximate="tanh")
            x = x + linear(h, layer.down)
        cache.lengths += n_tokens if n_new is None else n_new
        cache.is_empty = False
        return x

    def _norm(self, x: Tensor, norm: Norm) -> Tensor:
        eps = self.decoder.sizes.eps
        if norm.bias is None:
            return rms_norm(x, norm.weight, eps=eps)
        return layer_norm(x, norm.weight, norm.bias, eps=eps)


def linear(x: Tensor, one: Linear) -> Tensor:
    """Returns x Wᵀ + bias, with PyTorch's implementation of `quantized_linear` for codes."""
    weight = one.weight
    if isinstance(weight, Tensor):
        return F.linear(x, weight, one.bias)
    return quantized_linear(x, weight.weight, weight.scales, weight.zeros, one.bias)


STEPS: dict[str, type[Step]] = {"torch": TorchStep}


def step_of(decoder: Decoder, implementation: str) -> Step:
    """Returns the step of a decoder.

    Raises:
        ValueError: the implementation is unknown.
        RuntimeError: it cannot compute this decoder, with the reason.
    """
    if implementation not in STEPS:
        raise ValueError(
            f"unknown implementation {implementation!r}: choose from {', '.join(STEPS)}"
        )
    reason = STEPS[implementation].refuses(decoder)
    if reason is not None:
        raise RuntimeError(f"the step {implementation!r} cannot run here: {reason}")
    return STEPS[implementation](decoder)
