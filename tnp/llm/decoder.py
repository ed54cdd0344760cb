"""Defines a decoder: its sizes and its weights, in the order in which kernels read them.

The methods `of` and `generate` find their modules by name, since those modules import this one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from tnp.llm.sizes import Sizes
from tnp.ops.quantized_linear.definition import GROUPS
from tnp.ops.quantized_linear.quantizer import QuantizedWeight, quantize_weight
from tnp.util import tensor_archive
from tnp.util.checks import visible_device

T = TypeVar("T")

FILE = "decoder.pt"
KEYS = frozenset({"sizes", "weights"})
REMEDY = "name a folder that Decoder.save has written"
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class Linear:
    """Computes x Wᵀ + bias: a weight [n_out, n_in] or its codes, and a bias [n_out] or None."""

    weight: Tensor | QuantizedWeight
    bias: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Returns (n_out, n_in)."""
        if isinstance(self.weight, Tensor):
            return tuple(self.weight.shape)
        return self.weight.n_out, self.weight.n_in


@dataclass(frozen=True, eq=False)
class Norm:
    """Holds the weight and bias [width] of a LayerNorm; of an RMSNorm the bias is None."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Layer:
    """Holds a layer's weights.

    `qkv` has the rows of q, then of k, then of v. `up` has the rows of the gate and then of up, or
    of the only matrix for GELU. `q_norm` and `k_norm` are RMSNorms of a head, or None.
    """

    attention_norm: Norm
    qkv: Linear
    out: Linear
    mlp_norm: Norm
    up: Linear
    down: Linear
    q_norm: Norm | None = None
    k_norm: Norm | None = None


@dataclass(frozen=True, eq=False)
class Decoder:
    """Holds a decoder. Its weights are never written to.

    Args:
        sizes: its sizes.
        embedding: [vocab, width], a float dtype, which is the decoder's.
        positions: [longest, width] for GPT-2, else None.
        layers: as many as `sizes.n_layers`.
        norm: the norm before the head.
        head: [vocab, width].
        cos, sin: [longest, head_dim/2], float32, or None for GPT-2. Element i of a head is rotated
            with element i + head_dim/2.

    Raises:
        ValueError: a weight does not have the shape that follows from the sizes.
    """

    sizes: Sizes
    embedding: Tensor
    positions: Tensor | None
    layers: tuple[Layer, ...]
    norm: Norm
    head: Linear
    cos: Tensor | None
    sin: Tensor | None

    def __post_init__(self) -> None:
        for name, found, wanted in _shapes(self):
            if found != wanted:
                raise ValueError(f"{name} is {found}: with these sizes it must be {wanted}")

    @staticmethod
    def of(model: Any, longest: int | None = None) -> Decoder:
        """Returns the decoder of a Hugging Face model; see `tnp.llm.huggingface.read`."""
        return importlib.import_module("tnp.llm.huggingface").read(model, longest)

    @property
    def dtype(self) -> torch.dtype:
        """Returns the dtype of the embedding, in which everything is computed."""
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        """Returns the weights' device."""
        return self.embedding.device

    @property
    def nbytes(self) -> int:
        """Returns the bytes of all weights and tables; shared ones count once."""
        return sum(x.nbytes for x in _tensors(self))

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Decoder:
        """Returns the decoder with its weights on `device` and in `dtype`; None changes nothing.

        Codes stay codes, and the tables of the rotation stay float32.

        Raises:
            ValueError: the device is not here, or `dtype` is no float dtype of `FLOATS`.
        """
        device = self.device if device is None else visible_device(device)
        if dtype is not None and dtype not in FLOATS:
            raise ValueError(f"dtype is {dtype!r}: choose from {', '.join(map(str, FLOATS))}")
        tables = (self.cos, self.sin)

        def moved(x: Tensor) -> Tensor:
            is_cast = x.is_floating_point() and not any(x is table for table in tables)
            return x.to(device, dtype if is_cast else None)

        return mapped(self, moved)

    def quantize(self, bits: int, group: int | None, head_bits: int | None = None) -> Decoder:
        """Returns the decoder with the linear layers' weights as codes of `bits` bits.

        Args:
            bits: 8 or 4.
            group: how many weights of a row share a scale: 32, 64, 128, or None for the whole row.
            head_bits: the same for the head, whose groups are equal; None keeps it as it is. The
                embedding is never quantized.

        Raises:
            ValueError: bits or group do not fit, or the decoder is quantized already.
        """
        if group is not None and group not in GROUPS:
            raise ValueError(f"group is {group!r}: it must be 32, 64, 128 or None")

        def coded(linear: Linear, bits: int) -> Linear:
            if isinstance(linear.weight, QuantizedWeight):
                raise ValueError("the decoder is quantized already: quantize the original weights")
            weight = quantize_weight(linear.weight, bits, group)
            # Scales are rounded to 16 bits, and stand in the dtype of the activations.
            scales = weight.scales.to(linear.weight.dtype)
            return replace(linear, weight=replace(weight, scales=scales))

        layers = tuple(
            replace(
                layer, qkv=coded(layer.qkv, bits), out=coded(layer.out, bits),
                up=coded(layer.up, bits), down=coded(layer.down, bits),
            )
            for layer in self.layers
        )  # fmt: skip
        head = self.head if head_bits is None else coded(self.head, head_bits)
        return replace(self, layers=layers, head=head)

    def generate(self, ids: Tensor, **how: Any) -> Tensor:
        """Returns new tokens behind each prompt; see `tnp.llm.generate.generate`."""
        return importlib.import_module("tnp.llm.generate").generate(self, ids, **how)

    @cached_property
    def kept(self) -> dict[str, Any]:
        """Holds what `generate` keeps for its next call: a cache, and on CUDA a graph."""
        return {}

    def save(self, folder: Path | str) -> None:
        """Writes the decoder to `folder`. If that fails, an earlier decoder there stays.

        Raises:
            StoreError: the folder is not writable or full.
        """
        weights = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "sizes"}
        if self.head.weight is self.embedding:
            weights["head"] = None
        state = {"sizes": asdict(self.sizes), "weights": _plain(weights)}
        tensor_archive.save(Path(folder) / FILE, state)

    @staticmethod
    def load(folder: Path | str, device: torch.device | str = "cpu") -> Decoder:
        """Returns the decoder that `save` wrote, on `device`. It runs no pickled code.

        Raises:
            ValueError: there is no such file, it is damaged, or it is of another version.
        """
        device, path = visible_device(device), Path(folder) / FILE
        if not path.is_file():
            raise ValueError(f"{folder} holds no {FILE}: {REMEDY}")
        state = tensor_archive.load(path, device, KEYS, "decoder", REMEDY)
        try:
            return _unplain(state)
        except (AttributeError, KeyError, TypeError, ValueError):
            raise ValueError(
                f"decoder {path} is of another version of tnp: load it there, or save it again here"
            ) from None


def rotation_tables(inv_freq: Tensor, longest: int, scaling: float) -> tuple[Tensor, Tensor]:
    """Returns cos and sin [longest, head_dim/2] of the angles position · inv_freq, times `scaling`.

    Angles are float64, and each number is rounded once, to float32.

    Args:
        inv_freq: [head_dim/2], a model's inverse frequencies.
        longest: how many positions.
        scaling: the model's factor of both tables, 1 for most.
    """
    positions = torch.arange(longest, dtype=torch.float64, device=inv_freq.device)
    angles = positions[:, None] * inv_freq.double()
    return (angles.cos() * scaling).float(), (angles.sin() * scaling).float()


def mapped(one: T, change: Callable[[Tensor], Tensor]) -> T:
    """Returns a decoder, or a part of it, with `change` applied to each tensor once.

    Tensors that were shared stay shared.
    """
    known: dict[int, Tensor] = {}

    def walk(part: Any) -> Any:
        if isinstance(part, Tensor):
            if id(part) not in known:
                known[id(part)] = change(part)
            return known[id(part)]
        if isinstance(part, tuple):
            return tuple(map(walk, part))
        if is_dataclass(part) and not isinstance(part, Sizes):
            return replace(part, **{f.name: walk(getattr(part, f.name)) for f in fields(part)})
        return part

    return walk(one)


def _tensors(one: Decoder) -> list[Tensor]:
    found: list[Tensor] = []
    mapped(one, lambda x: found.append(x) or x)
    return found


def _shapes(decoder: Decoder) -> Iterator[tuple[str, tuple | None, tuple | None]]:
    """Yields each weight's name, its shape and the shape that follows from the sizes."""
    s = decoder.sizes
    heads, kv_heads = s.n_heads * s.head_dim, s.n_kv_heads * s.head_dim
    has_bias = s.kind == "gpt2"

    def shape(x: Tensor | None) -> tuple | None:
        return None if x is None else tuple(x.shape)

    def linear(name: str, one: Linear, n_out: int, n_in: int) -> Iterator[tuple]:
        yield f"{name}.weight", one.shape, (n_out, n_in)
        if one.bias is not None:
            yield f"{name}.bias", shape(one.bias), (n_out,)

    def norm(name: str, one: Norm, width: int, bias: bool) -> Iterator[tuple]:
        yield f"{name}.weight", shape(one.weight), (width,)
        yield f"{name}.bias", shape(one.bias), (width,) if bias else None

    yield "embedding", shape(decoder.embedding), (s.vocab, s.width)
    yield "positions", shape(decoder.positions), None if s.rotates else (s.longest, s.width)
    table = (s.longest, s.head_dim // 2) if s.rotates else None
    yield "cos", shape(decoder.cos), table
    yield "sin", shape(decoder.sin), table
    yield "layers", (len(decoder.layers),), (s.n_layers,)
    yield from norm("norm", decoder.norm, s.width, has_bias)
    yield from linear("head", decoder.head, s.vocab, s.width)
    for i, layer in enumerate(decoder.layers):
        at = f"layers[{i}]."
        yield from norm(f"{at}attention_norm", layer.attention_norm, s.width, has_bias)
        yield from norm(f"{at}mlp_norm", layer.mlp_norm, s.width, has_bias)
        for name, one in (("q_norm", layer.q_norm), ("k_norm", layer.k_norm)):
            wanted = (s.head_dim,) if s.kind == "qwen3" else None
            yield f"{at}{name}.weight", one and shape(one.weight), wanted
        yield from linear(f"{at}qkv", layer.qkv, heads + 2 * kv_heads, s.width)
        yield from linear(f"{at}out", layer.out, s.width, heads)
        yield from linear(f"{at}up", layer.up, s.d_ff * (1 + s.gated), s.width)
        yield from linear(f"{at}down", layer.down, s.width, s.d_ff)


def _plain(part: Any) -> Any:
    """Returns a part of a decoder as dicts, lists and tensors that hold no more than they show."""
    if isinstance(part, Tensor):
        whole = part.numel() * part.element_size() == part.untyped_storage().nbytes()
        return (part if whole and part.is_contiguous() else part.clone()).cpu().contiguous()
    if isinstance(part, dict):
        return {name: _plain(one) for name, one in part.items()}
    if isinstance(part, tuple):
        return [_plain(one) for one in part]
    if is_dataclass(part):
        return {f.name: _plain(getattr(part, f.name)) for f in fields(part)}
    return part


def _unplain(state: dict) -> Decoder:
    """Returns the decoder of the state that `Decoder.save` makes."""
    weights = state["weights"]

    def linear(one: dict) -> Linear:
        weight = one["weight"]
        if not isinstance(weight, Tensor):
            weight = QuantizedWeight(**weight)
        return Linear(weight, one["bias"])

    def layer(one: dict) -> Layer:
        norms = ("attention_norm", "mlp_norm", "q_norm", "k_norm")
        return Layer(**{
            name: part and (Norm(**part) if name in norms else linear(part))
            for name, part in one.items()
        })  # fmt: skip

    embedding, head = weights["embedding"], weights["head"]
    return Decoder(
        Sizes(**state["sizes"]), embedding, weights["positions"],
        tuple(map(layer, weights["layers"])), Norm(**weights["norm"]),
        Linear(embedding) if head is None else linear(head), weights["cos"], weights["sin"],
    )  # fmt: skip
