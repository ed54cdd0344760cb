"""Computes steps of decoding with the repository's operators."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from tnp.llm.cache import Cache
from tnp.llm.decoder import Decoder, Linear, Norm
from tnp.llm.tokens import Tokens
from tnp.ops.decode_attention import decode_attention
from tnp.ops.layer_norm import layer_norm
from tnp.ops.quantized_linear import quantized_linear
from tnp.ops.rms_norm import rms_norm
from tnp.ops.rope import rope
from tnp.ops.swiglu import swiglu
from tnp.util.checks import require_between


class TorchStep:
    """Computes with the repository's operators, in any float dtype.

    Args:
        decoder: the decoder.
        implementation: of the operators, "torch" or "auto".
    """

    def __init__(self, decoder: Decoder, implementation: str = "torch") -> None:
        self.decoder, self._implementation = decoder, implementation

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

    @torch.no_grad()
    def follow(self, tokens: Tokens, cache: Cache) -> None:
        tokens.add(self(tokens.ids, cache).argmax(-1))

    def _logits(self, x: Tensor) -> Tensor:
        return self._linear(self._norm(x, self.decoder.norm), self.decoder.head)

    def _hidden(self, ids: Tensor, cache: Cache, n_new: Tensor | None) -> Tensor:
        """Returns the residual stream [B, T, width] behind the last layer; advances the cache."""
        decoder, s, n_tokens = self.decoder, self.decoder.sizes, ids.shape[1]
        if n_tokens > cache.capacity:
            raise ValueError(f"ids has {n_tokens} tokens: the cache has room for {cache.capacity}")
        require_between("lengths", cache.lengths, 0, cache.capacity - n_tokens)
        positions = cache.lengths.long()[:, None] + torch.arange(n_tokens, device=ids.device)
        places, n_keys = cache.places(positions, n_new), cache.lengths + n_tokens
        x = F.embedding(ids, decoder.embedding)
        if decoder.positions is not None:
            x = x + F.embedding(positions, decoder.positions)
        for i, layer in enumerate(decoder.layers):
            qkv = self._linear(self._norm(x, layer.attention_norm), layer.qkv)
            qkv = qkv.unflatten(-1, (-1, s.head_dim)).transpose(1, 2)
            q, k, v = qkv.split((s.n_heads, s.n_kv_heads, s.n_kv_heads), 1)
            if layer.q_norm is not None:
                q, k = self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)
            if decoder.cos is not None:
                q, k = rope(
                    q, k, decoder.cos, decoder.sin, positions, implementation=self._implementation
                )
            cache.write(i, k, v, places)
            if cache.is_empty and n_tokens > 1:  # padding stands behind all tokens that count
                o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            else:
                o = decode_attention(q, cache.keys[i], cache.values[i], n_keys, cache.page_table)
            x = x + self._linear(o.transpose(1, 2).flatten(2), layer.out)
            h = self._linear(self._norm(x, layer.mlp_norm), layer.up)
            h = self._swiglu(h) if s.gated else F.gelu(h, approximate="tanh")
            x = x + self._linear(h, layer.down)
        cache.lengths += n_tokens if n_new is None else n_new
        cache.is_empty = False
        return x

    def _norm(self, x: Tensor, norm: Norm) -> Tensor:
        eps = self.decoder.sizes.eps
        if norm.bias is None:
            return rms_norm(x, norm.weight, eps=eps, implementation=self._implementation)
        return layer_norm(x, norm.weight, norm.bias, eps=eps, implementation=self._implementation)

    def _swiglu(self, h: Tensor) -> Tensor:
        return swiglu(*h.chunk(2, -1), implementation=self._implementation)

    def _linear(self, x: Tensor, one: Linear) -> Tensor:
        """Returns x Wᵀ + bias."""
        weight = one.weight
        if isinstance(weight, Tensor):
            return F.linear(x, weight, one.bias)
        return quantized_linear(
            x, weight.weight, weight.scales, weight.zeros, one.bias,
            implementation=self._implementation,
        )  # fmt: skip
