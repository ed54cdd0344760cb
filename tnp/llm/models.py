"""Draws random weights of language models, without transformers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from tnp.llm.decoder import Decoder, Layer, Linear, Norm, rotation_tables
from tnp.llm.sizes import Model, named


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
        dtype, device: the weights'. On "meta" they have shapes alone.
    """
    model = named(model) if isinstance(model, str) else model
    s = model.sizes if longest is None else replace(model.sizes, longest=longest)
    meta = torch.device(device).type == "meta"
    generator = None if meta else torch.Generator(device).manual_seed(seed)

    def random(draws: Callable[..., Tensor], *shape: int) -> Tensor:
        if meta:
            return torch.empty(shape, device=device)
        return draws(shape, generator=generator, device=device)

    def normal(*shape: int, deviation: float = 1.0) -> Tensor:
        return random(torch.randn, *shape).mul_(deviation).to(dtype)

    def linear(n_out: int, n_in: int) -> Linear:
        bias = normal(n_out, deviation=0.2) if s.kind == "gpt2" else None
        return Linear(normal(n_out, n_in, deviation=n_in**-0.5), bias)

    def norm(width: int) -> Norm:
        weight = random(torch.rand, width).add_(0.5).to(dtype)
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
