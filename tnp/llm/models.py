"""Names sizes of language models, and draws random weights for them, without transformers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tnp.llm.decoder import Decoder, Layer, Linear, Norm, Sizes, rotation_tables


@dataclass(frozen=True)
class Stretch:
    """Holds the numbers by which Llama 3.1 and later stretch long wavelengths."""

    factor: float
    low: float
    high: float
    original: int  # positions that the model was first trained with


@dataclass(frozen=True)
class Model:
    """Holds a model's sizes, and of its rotation the base and how it is stretched."""

    sizes: Sizes
    theta: float = 0.0
    stretch: Stretch | None = None


def _model(
    kind: str, vocab: int, width: int, n_layers: int, heads: tuple[int, int, int], d_ff: int,
    *, eps: float, longest: int, tied: bool, theta: float = 0.0, stretch: Stretch | None = None,
) -> Model:  # fmt: skip
    sizes = Sizes(kind, vocab, width, n_layers, *heads, d_ff, eps, longest, tied)
    return Model(sizes, theta, stretch)


_LLAMA32 = Stretch(factor=32.0, low=1.0, high=4.0, original=8192)

# Heads are (n_heads, n_kv_heads, head_dim). The numbers are those of the published configurations:
# openai-community/gpt2, meta-llama/Llama-3.2-1B, meta-llama/Meta-Llama-3-8B, Qwen/Qwen3-0.6B. The
# small ones are for gates and tests. Their heads are not tied: language_models.py says why.
MODELS = {
    "gpt2": _model(
        "gpt2", 50257, 768, 12, (12, 12, 64), 3072, eps=1e-5, longest=1024, tied=True
    ),
    "llama3_1b": _model(
        "llama", 128256, 2048, 16, (32, 8, 64), 8192, eps=1e-5, longest=131072, tied=True,
        theta=5e5, stretch=_LLAMA32,
    ),
    "llama3_8b": _model(
        "llama", 128256, 4096, 32, (32, 8, 128), 14336, eps=1e-5, longest=8192, tied=False,
        theta=5e5,
    ),
    "qwen3_0_6b": _model(
        "qwen3", 151936, 1024, 28, (16, 8, 128), 3072, eps=1e-6, longest=40960, tied=True,
        theta=1e6,
    ),
    "small_gpt2": _model(
        "gpt2", 1000, 128, 3, (4, 4, 32), 512, eps=1e-5, longest=256, tied=False
    ),
    "small_llama": _model(
        "llama", 1000, 128, 3, (4, 2, 32), 256, eps=1e-5, longest=512, tied=False,
        theta=1e4, stretch=Stretch(factor=8.0, low=1.0, high=4.0, original=64),
    ),
    "small_qwen3": _model(
        "qwen3", 1000, 128, 3, (4, 2, 64), 256, eps=1e-6, longest=256, tied=False, theta=1e4
    ),
}  # fmt: skip


def named(name: str) -> Model:
    """Returns a model by its name. Raises ValueError for an unknown name."""
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}: choose from {', '.join(MODELS)}")
    return MODELS[name]


def draw(
    model: Model | str,
    *,
    longest: int | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Decoder:
    """Returns a decoder with random weights that are drawn "wide".

    Linear layers have a deviation of 1/√n_in and embeddings of 1, so that every branch counts as
    much as the residual stream, and an error in attention shows in the logits. As initialized for
    training, a random model repeats one or two tokens. Norms and biases differ from 1 and from 0.

    Args:
        model: a model or its name.
        longest: the most tokens of a sequence; None: the model's own number.
        seed: of the random numbers, which depend on the device's type too.
        dtype, device: the weights'.
    """
    model = named(model) if isinstance(model, str) else model
    s = model.sizes if longest is None else replace(model.sizes, longest=longest)
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, deviation: float = 1.0) -> Tensor:
        x = torch.randn(shape, generator=generator, device=device)
        return x.mul_(deviation).to(dtype)

    def linear(n_out: int, n_in: int) -> Linear:
        bias = normal(n_out, deviation=0.2) if s.kind == "gpt2" else None
        return Linear(normal(n_out, n_in, deviation=n_in**-0.5), bias)

    def norm(width: int) -> Norm:
        weight = torch.rand(width, generator=generator, device=device).add_(0.5).to(dtype)
        return Norm(weight, normal(width, deviation=0.2) if s.kind == "gpt2" else None)

    heads, kv_heads = s.n_heads * s.head_dim, s.n_kv_heads * s.head_dim

    def layer() -> Layer:
        of_head = [Norm(norm(s.head_dim).weight) for _ in range(2 * (s.kind == "qwen3"))]
        return Layer(
            norm(s.width), linear(heads + 2 * kv_heads, s.width), linear(s.width, heads),
            norm(s.width), linear(s.d_ff * (1 + s.gated), s.width), linear(s.width, s.d_ff),
            *of_head,
        )  # fmt: skip

    embedding = normal(s.vocab, s.width)
    positions = None if s.rotates else normal(s.longest, s.width)
    layers = tuple(layer() for _ in range(s.n_layers))
    head = embedding if s.tied else normal(s.vocab, s.width, deviation=s.width**-0.5)
    tables = (None, None)
    if s.rotates:
        tables = rotation_tables(inverse_frequencies(model).to(device), s.longest, 1.0)
    return Decoder(s, embedding, positions, layers, norm(s.width), Linear(head), *tables)


def inverse_frequencies(model: Model) -> Tensor:
    """Returns the rotation's inverse frequencies, float32 [head_dim/2], as Hugging Face does.

    Wavelengths above original/low are stretched by the factor, those below original/high are
    kept, and those between lie between (Llama 3.1's `rope_type` "llama3").
    """
    head_dim = model.sizes.head_dim
    kept = 1.0 / (model.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    stretch = model.stretch
    if stretch is None:
        return kept
    turns = stretch.original / (2 * math.pi / kept)  # within the original positions
    share = ((turns - stretch.low) / (stretch.high - stretch.low)).clamp(0, 1)
    return (1 - share) * kept / stretch.factor + share * kept
