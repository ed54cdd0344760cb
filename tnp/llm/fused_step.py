"""Computes a decoding step in five or six launches a layer, with kernels for a few rows.

    sum, norm, q k v, rotation, write to the cache      one product
    attention                                           one launch for short caches, else two
    output                                              one product
    sum, norm, gate and up, SwiGLU or GELU              one product
    down                                                one product

Embedding, head and choice are three more. Each launch starts while the one before it still runs,
and loads its first weights meanwhile: no launch of a step writes a weight. With RMSNorm of every
head (Qwen3), heads are a launch of their own. More rows than `FEW` are multiplied by PyTorch, in
nine to twelve launches a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from tnp.dispatch.devices import of_device
from tnp.dispatch.launcher import Bound
from tnp.llm.attention_kernel import attend_kernel
from tnp.llm.cache import Cache
from tnp.llm.decoder import Decoder, Layer, Linear, Norm, mapped
from tnp.llm.step_kernels import choice_kernel, embed_kernel, heads_kernel, largest_kernel
from tnp.llm.tokens import Tokens
from tnp.llm.torch_step import TorchStep
from tnp.ops._shared.few_rows import FEW, chained
from tnp.ops._shared.streamed import Product, config_of, launch_of, streamed_kernel
from tnp.ops.attention.primitives import LOG2_E
from tnp.ops.decode_attention import PAGE_MULTIPLE, decode_attention
from tnp.ops.rms_norm import add_rms_norm

PARTS_AT_ONCE = 8192  # of a row's largest logits, at most: loads of fewer wait for one another
LOGITS_AT_ONCE = 4096  # of a row, for more rows than `FEW`
# `attend_kernel` splits a cache into parts of SPLIT keys. It serves up to MOST_SPLITS parts, and up
# to MOST_PAIRS pairs of a sequence and a kv head.
SPLIT, MOST_SPLITS, MOST_PAIRS = 128, 16, 16


class LayerCache(NamedTuple):
    """Holds a layer's keys and values, and where `store_heads` writes new ones."""

    keys: Tensor
    values: Tensor
    table: Tensor
    integers: tuple[int, ...]
    page: int


def _dense(x: Tensor) -> Tensor:
    """Returns a tensor as kernels read it: contiguous, from a multiple of 16 bytes on."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


class FusedStep(TorchStep):
    """Computes one token of each sequence with fused kernels, and prompts with operators."""

    def __init__(self, decoder: Decoder) -> None:
        self._target = of_device(decoder.device)
        super().__init__(
            mapped(decoder, _dense), "auto" if self._target.kind == "cuda" else "torch"
        )
        self._chain = chained(self._target)
        self._bounds: dict[tuple, tuple[Bound, int]] = {}
        self._zeros: dict[int, Tensor] = {}

    @staticmethod
    def refuses(decoder: Decoder) -> str | None:
        target, s = of_device(decoder.device), decoder.sizes
        if target.kind == "cpu":
            return "it needs a CUDA device, or Triton's interpreter (TRITON_INTERPRET=1)"
        if target.kind == "cuda" and target.capability < 80:
            return "it needs compute capability 8.0 or newer"
        if decoder.dtype not in (torch.bfloat16, torch.float16):
            return f"it computes in bfloat16 or float16, not {decoder.dtype}"
        if s.head_dim % 16 or s.d_ff % 8:
            return f"head_dim is {s.head_dim} and d_ff {s.d_ff}: they must be multiples of 16 and 8"
        return None

    @torch.no_grad()
    def __call__(self, ids: Tensor, cache: Cache) -> Tensor:
        d = self.decoder
        x, update = self._hidden_step(ids, cache)
        if len(ids) > FEW:
            return self._linear(self._normed(x, update, d.norm)[1], d.head)
        logits = x.new_empty(len(ids), d.sizes.vocab)
        self._product(x, update, d.norm, d.head, "", logits)
        return logits

    @torch.no_grad()
    def follow(self, tokens: Tokens, cache: Cache) -> None:
        batch, d = len(tokens.ids), self.decoder
        few, vocab = batch <= FEW, d.sizes.vocab
        most = triton.cdiv(vocab, 16 if few else LOGITS_AT_ONCE)  # programs
        best = torch.empty(most, batch, dtype=torch.float32, device=d.device)
        best_id = torch.empty_like(best, dtype=torch.int32)
        if few:
            x, update = self._hidden_step(tokens.ids, cache)
            programs, _ = self._product(x, update, d.norm, d.head, "best", x, best=(best, best_id))
        else:
            programs = most
            largest_kernel[(programs, batch)](
                self(tokens.ids, cache), best, best_id, vocab, BLOCK=LOGITS_AT_ONCE, num_warps=4,
                **self._chain,
            )  # fmt: skip
        n_stops = 0 if tokens.stops is None else len(tokens.stops)
        choice_kernel[(batch,)](
            best, best_id, tokens.ids, tokens.block, tokens.place, tokens.ended.view(torch.int8),
            tokens.stops if n_stops else tokens.ids, programs, batch, n_stops, tokens.pad,
            PARTS=min(PARTS_AT_ONCE, triton.next_power_of_2(programs)),
            STOPS=triton.next_power_of_2(n_stops) if n_stops else 0,
            num_warps=8, **self._chain,
        )  # fmt: skip

    def _hidden_step(self, ids: Tensor, cache: Cache) -> tuple[Tensor, Tensor]:
        """Returns the residual stream [B, width] and the last update, which is not yet added."""
        d, s, batch = self.decoder, self.decoder.sizes, len(ids)
        if cache.page_table is not None and cache.keys[0].shape[2] % PAGE_MULTIPLE:
            raise ValueError(
                f"pages have {cache.keys[0].shape[2]} tokens: they must be multiples of "
                f"{PAGE_MULTIPLE}"
            )
        x = d.embedding.new_empty(batch, s.width)
        embed_kernel[(batch,)](
            d.embedding, d.embedding if d.positions is None else d.positions, ids, cache.lengths, x,
            s.vocab, s.longest, WIDTH=s.width, BLOCK=triton.next_power_of_2(s.width),
            POSITIONS=d.positions is not None, num_warps=4, **self._chain,
        )  # fmt: skip
        cache.is_empty, update, few = False, None, batch <= FEW
        for i, layer in enumerate(d.layers):
            q = x.new_empty(batch, s.n_heads * s.head_dim)
            places = self._places(cache, i)
            if few and layer.q_norm is None:
                epilogue = "rotated heads" if s.rotates else "heads"
                _, x = self._product(
                    x, update, layer.attention_norm, layer.qkv, epilogue, q, places, cache.lengths
                )
            else:
                x, qkv = self._normed_product(x, update, layer.attention_norm, layer.qkv)
                self._write_heads(layer, qkv, q, places, cache.lengths)
            update = self._linear_of(self._attended(q, places, cache, i), layer.out)
            epilogue = "swiglu" if s.gated else "gelu"
            x, h = self._normed_product(x, update, layer.mlp_norm, layer.up, epilogue)
            update = self._linear_of(h, layer.down)
        return x, update

    def _attended(self, q: Tensor, places: LayerCache, cache: Cache, i: int) -> Tensor:
        """Returns attention's results [B, H · D] for q [B, H · D]."""
        s, batch = self.decoder.sizes, len(q)
        splits = triton.cdiv(places.integers[3], SPLIT)
        if not self._is_short(batch, splits):
            o = decode_attention(
                q.view(batch, s.n_heads, 1, s.head_dim), cache.keys[i], cache.values[i],
                cache.lengths, cache.page_table, implementation="triton",
            )  # fmt: skip
            return o.transpose(1, 2).reshape(batch, -1)
        o = torch.empty_like(q)
        parts = q.new_empty(splits, batch, s.n_heads, s.head_dim + 2, dtype=torch.float32)
        attend_kernel[(batch, s.n_kv_heads, splits)](
            q, places.keys, places.values, o, parts, self._counts(batch), cache.lengths,
            places.table, *places.integers[:3], batch, *places.integers[3:],
            s.head_dim**-0.5 * LOG2_E, N_HEADS=s.n_heads, N_KV_HEADS=s.n_kv_heads,
            ROWS=max(FEW, triton.next_power_of_2(s.n_heads // s.n_kv_heads)), HEAD_DIM=s.head_dim,
            BLOCK_N=SPLIT, SPLITS=splits, PAGE=places.page, num_warps=max(4, s.head_dim // 8),
            **self._chain,
        )  # fmt: skip
        return o

    def _counts(self, batch: int) -> Tensor:
        """Returns a counter, zero, for each sequence and kv head: see `attend_kernel`."""
        if batch not in self._zeros:
            n = batch * self.decoder.sizes.n_kv_heads
            self._zeros[batch] = torch.zeros(n, dtype=torch.int32, device=self.decoder.device)
        return self._zeros[batch]

    def _is_short(self, batch: int, splits: int) -> bool:
        """Returns whether a cache is read in parts by `attend_kernel`."""
        s = self.decoder.sizes
        fits = s.head_dim in (16, 32, 64, 128, 256)
        return fits and splits <= MOST_SPLITS and batch * s.n_kv_heads <= MOST_PAIRS

    def _linear_of(self, x: Tensor, linear: Linear) -> Tensor:
        """Returns a linear layer of x."""
        if len(x) > FEW:
            return self._linear(x, linear)
        y = x.new_empty(len(x), linear.shape[0])
        self._product(x, None, None, linear, "", y)
        return y

    def _normed_product(
        self, x: Tensor, update: Tensor | None, norm: Norm, linear: Linear, epilogue: str = ""
    ) -> tuple[Tensor, Tensor]:
        """Returns x + update and the linear layer of its norm, with an activation."""
        n_out = linear.shape[0] // (2 if epilogue == "swiglu" else 1)
        if len(x) <= FEW:
            y = x.new_empty(len(x), n_out)
            return self._product(x, update, norm, linear, epilogue, y)[1], y
        x, normed = self._normed(x, update, norm)
        y = self._linear(normed, linear)
        if epilogue == "swiglu":
            y = self._swiglu(y)
        elif epilogue == "gelu":
            y = F.gelu(y, approximate="tanh")
        return x, y

    def _normed(self, x: Tensor, update: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
        """Returns x + update, and its norm."""
        if update is None:
            return x, self._norm(x, norm)
        if norm.bias is not None:
            x = x + update
            return x, self._norm(x, norm)
        return add_rms_norm(
            x, update, norm.weight, eps=self.decoder.sizes.eps, implementation=self._implementation
        )

    def _places(self, cache: Cache, layer: int) -> LayerCache:
        keys, values, longest = cache.keys[layer], cache.values[layer], self.decoder.sizes.longest
        if cache.page_table is None:
            integers = *keys.stride()[:3], cache.capacity, 0, 0
            return LayerCache(keys, values, cache.lengths, integers, 0)
        page, width = keys.shape[2], cache.page_table.shape[1]
        integers = *keys.stride()[:3], min(width * page, longest), width, len(keys)
        return LayerCache(keys, values, cache.page_table, integers, page)

    def _write_heads(
        self, layer: Layer, qkv: Tensor, q: Tensor, places: LayerCache, lengths: Tensor
    ) -> None:
        """Normalizes and rotates heads, and writes q and the cache."""
        d, s = self.decoder, self.decoder.sizes
        q_weight, k_weight = (
            qkv if norm is None else norm.weight for norm in (layer.q_norm, layer.k_norm)
        )
        heads_kernel[(len(qkv), s.n_heads + 2 * s.n_kv_heads)](
            qkv, q_weight, k_weight, q, *places[:3], *self._tables(qkv), lengths, qkv.shape[1],
            *places.integers, s.eps, HALF=s.head_dim // 2,
            BLOCK=triton.next_power_of_2(s.head_dim // 2), N_HEADS=s.n_heads,
            N_KV_HEADS=s.n_kv_heads, NORM=layer.q_norm is not None, ROTATES=d.cos is not None,
            PAGE=places.page, num_warps=1, **self._chain,
        )  # fmt: skip

    def _tables(self, otherwise: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the tables of the rotation, or tensors in their place that nobody reads."""
        d = self.decoder
        return (otherwise, otherwise) if d.cos is None else (d.cos, d.sin)

    def _product(
        self,
        x: Tensor,
        update: Tensor | None,
        norm: Norm | None,
        linear: Linear,
        epilogue: str,
        y: Tensor,
        places: LayerCache | None = None,
        lengths: Tensor | None = None,
        best: Sequence[Tensor] = (),
    ) -> tuple[int, Tensor]:
        """Launches a product of up to `FEW` rows. Returns the programs, and x + update."""
        s, weight, (n_out, n_in) = self.decoder.sizes, linear.weight, linear.shape
        codes = None if isinstance(weight, Tensor) else weight
        half = {"swiglu": s.d_ff, "heads": s.head_dim // 2, "rotated heads": s.head_dim // 2}
        product = Product(
            len(x), n_in, n_out, codes.bits if codes else 16, codes.group if codes else 0,
            zeros=codes is not None and codes.zeros is not None, bias=linear.bias is not None,
            update=update is not None, epilogue=epilogue, half=half.get(epilogue, 8),
            norm="" if norm is None else "rms" if norm.bias is None else "layer",
            n_heads=s.n_heads, n_kv_heads=s.n_kv_heads, page=places.page if places else 0,
        )  # fmt: skip
        integers = places.integers if places else (0, 0, 0, 0, 0, 0)
        key = product, integers, norm and norm.weight.dtype, product.bias and linear.bias.dtype
        if key not in self._bounds:
            config = config_of(product, self._target)
            grid, constants = launch_of(product, config, self._target, constant=True)
            rows = 0, n_in, 0, n_in, len(x), len(x), len(x), n_out
            self._bounds[key] = (
                Bound(streamed_kernel, grid, *rows, *integers, **constants), grid[0]
            )  # fmt: skip
        bound, programs = self._bounds[key]
        total = x if update is None else torch.empty_like(x)
        keys, values, table = places[:3] if places else (y, y, y)
        norm_weight, norm_bias = (x, x) if norm is None else (norm.weight, norm.bias)
        bound(
            x, x if update is None else update, norm_weight, x if norm_bias is None else norm_bias,
            codes.weight.view(torch.int8) if codes else weight, codes.scales if codes else x,
            codes.zeros if product.zeros else x, linear.bias if product.bias else x, total, y,
            keys, values, table, *self._tables(x), x if lengths is None else lengths,
            *(best or (x, x)), s.eps,
        )  # fmt: skip
        return programs, total
