"""Builds a compiled decoder of PyTorch's plain operators, the stand-in for gpt-fast.

The cache has a fixed size, the choice of the next token is part of the step, and the whole step is
one graph of `torch.compile`. The prompt is not compiled. Codes of 8 bits have a scale for each row
and are converted within the product, which the compiler fuses: with a scale for each group it would
write the whole weight. Codes of 4 bits go through PyTorch's own product. Method:
pytorch-labs/gpt-fast, 32971d3.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tnp.bench.language import Asked, Step, Writer
from tnp.bench.language_forms import GROUP
from tnp.experiment.failures import Unsupported
from tnp.llm.decoder import Decoder, Linear, Norm
from tnp.ops.quantized_linear.quantizer import quantize_weight
from tnp.ops.quantized_linear.torch_forms import lay_out

# The mode searches for the fastest matmuls, makes the product of one row a fused reduction, and
# replays a CUDA graph.
MODE = "max-autotune"
# Fields of a decoder's layer.
PRODUCTS = ("qkv", "out", "up", "down")
NORMS = ("attention_norm", "mlp_norm", "q_norm", "k_norm")


def compiled(asked: Asked) -> Writer:
    """Returns form `compiled_decoder`.

    Raises Unsupported for int4 without a CUDA device.
    """
    model = CompiledDecoder(asked.decoder, asked.batch, asked.bits, asked.length)
    step = torch.compile(
        model.step, mode=MODE if asked.device.type == "cuda" else None, fullgraph=True
    )

    @torch.no_grad()
    def write(ids: Tensor, n_new: int) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        tokens = [model.step(ids, places)]
        place = places[-1:].clone()
        for _ in range(n_new - 1):
            place += 1
            torch.compiler.cudagraph_mark_step_begin()
            tokens.append(step(tokens[-1], place).clone())
        return torch.cat(tokens, 1)

    last = torch.tensor([asked.length - 1], device=asked.device)
    first = torch.zeros(asked.batch, 1, dtype=torch.int64, device=asked.device)

    def bare() -> Step:
        return lambda: step(first, last)

    return Writer(write, sum(x.nbytes for x in model.weights()), bare)


class Product(nn.Module):
    """Computes x Wᵀ + bias for x [..., n_in] in 16 bits, or as codes of 8 or 4 bits.

    Codes of 8 bits have a scale for each row, and codes of 4 bits one for each group of `GROUP`.
    """

    def __init__(self, linear: Linear, bits: int) -> None:
        super().__init__()
        self.bits, weight, scales = bits, linear.weight, None
        if bits == 4 and not weight.is_cuda:
            raise Unsupported("PyTorch's product of 4 bits is laid out for CUDA devices alone")
        if bits < 16:
            codes = quantize_weight(weight, bits, GROUP if bits == 4 else None)
            weight, scales = codes.weight, codes.scales.flatten()
        if bits == 4:
            weight, scales = lay_out(None, codes.weight, codes.scales)
        self.register_buffer("weight", weight)
        self.register_buffer("scales", scales)
        self.register_buffer("bias", linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.bits == 16:
            return F.linear(x, self.weight, self.bias)
        if self.bits == 8:
            y = F.linear(x, self.weight.to(x.dtype)) * self.scales
        else:
            rows = x.reshape(-1, x.shape[-1])
            y = torch.ops.aten._weight_int4pack_mm(rows, self.weight, GROUP, self.scales)
            y = y.view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias


class Normalize(nn.Module):
    """Computes LayerNorm if the norm has a bias, else RMSNorm."""

    def __init__(self, norm: Norm, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.register_buffer("weight", norm.weight)
        self.register_buffer("bias", norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is not None:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class CompiledDecoder(nn.Module):
    """Holds a decoder's weights and a cache of fixed size as buffers, which a CUDA graph may keep.

    Args:
        decoder: not quantized; it must be in bfloat16 for codes.
        batch: how many sequences, of equal lengths.
        bits: of the layers' weights, and of the head's: 16, 8 or 4.
        capacity: the most tokens of a sequence.
    """

    def __init__(self, decoder: Decoder, batch: int, bits: tuple[int, int], capacity: int) -> None:
        super().__init__()
        sizes = self.sizes = decoder.sizes
        self.register_buffer("embedding", decoder.embedding)
        for name in ("positions", "cos", "sin"):
            self.register_buffer(name, getattr(decoder, name))
        self.norm = Normalize(decoder.norm, sizes.eps)
        self.head = Product(decoder.head, bits[1])
        self.layers = nn.ModuleList()
        for layer in decoder.layers:
            products = {name: Product(getattr(layer, name), bits[0]) for name in PRODUCTS}
            norms = {name: getattr(layer, name) for name in NORMS}
            norms = {name: Normalize(norm, sizes.eps) for name, norm in norms.items() if norm}
            self.layers.append(nn.ModuleDict(products | norms))
        shape = sizes.n_layers, batch, sizes.n_kv_heads, capacity, sizes.head_dim
        on = {"dtype": decoder.dtype, "device": decoder.device}
        for i in range(sizes.n_layers):
            self.register_buffer(f"keys_{i}", torch.zeros(shape[1:], **on))
            self.register_buffer(f"values_{i}", torch.zeros(shape[1:], **on))
        self.register_buffer("places", torch.arange(capacity, device=decoder.device))

    def weights(self) -> list[Tensor]:
        """Returns all buffers but the cache, shared ones once."""
        named = self.named_buffers()
        return [x for name, x in named if not name.startswith(("keys_", "values_"))]

    def step(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Returns the likeliest next tokens [batch, 1], and writes the cache.

        Args:
            ids: int64 [batch, n], new tokens.
            positions: int64 [n], their places, the same in every sequence.
        """
        sizes = self.sizes
        x = F.embedding(ids, self.embedding)
        if self.positions is not None:
            x = x + F.embedding(positions, self.positions)
        is_seen = self.places <= positions[-1]
        for i, layer in enumerate(self.layers):
            qkv = layer["qkv"](layer["attention_norm"](x))
            qkv = qkv.unflatten(-1, (-1, sizes.head_dim)).transpose(1, 2)
            q, k, v = qkv.split((sizes.n_heads, sizes.n_kv_heads, sizes.n_kv_heads), 1)
            if "q_norm" in layer:
                q, k = layer["q_norm"](q), layer["k_norm"](k)
            if self.cos is not None:
                q, k = self._rotated(q, positions), self._rotated(k, positions)
            keys, values = getattr(self, f"keys_{i}"), getattr(self, f"values_{i}")
            keys.index_copy_(2, positions, k)
            values.index_copy_(2, positions, v)
            if ids.shape[1] > 1:  # a prompt in an empty cache
                o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            else:
                o = _attended(q, keys, values, is_seen)
            x = x + layer["out"](o.transpose(1, 2).flatten(2))
            h = layer["up"](layer["mlp_norm"](x))
            if sizes.gated:
                gate, up = h.chunk(2, -1)
                h = F.silu(gate) * up
            else:
                h = F.gelu(h, approximate="tanh")
            x = x + layer["down"](h)
        logits = self.head(self.norm(x[:, -1:]))
        return logits.argmax(-1)

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        cos, sin = self.cos[positions], self.sin[positions]
        first, second = x.float().chunk(2, -1)
        turned = (first * cos - second * sin, second * cos + first * sin)
        return torch.cat(turned, -1).to(x.dtype)


def _attended(q: Tensor, keys: Tensor, values: Tensor, is_seen: Tensor) -> Tensor:
    """Returns attention of one token, [batch, n_heads, 1, head_dim].

    The heads of a group read their keys once: they are rows of one product.

    Args:
        q: [batch, n_heads, 1, head_dim].
        keys, values: [batch, n_kv_heads, capacity, head_dim].
        is_seen: bool [capacity].
    """
    grouped = q.flatten(1, 2).unflatten(1, (keys.shape[1], -1))
    scores = (grouped @ keys.mT).float() * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~is_seen, -torch.inf).softmax(-1)
    return (weights.to(q.dtype) @ values).flatten(1, 2)[:, :, None]
