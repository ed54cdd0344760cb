"""Computes a decoding step of up to eight sequences in one launch on Hopper, and the choice in one.

See `tnp.llm.persistent_kernel`. Prompts, caches in pages, and more sequences are those of
`FusedStep`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tnp.dispatch.launcher import Bound
from tnp.llm.cache import Cache
from tnp.llm.decoder import Decoder, Linear
from tnp.llm.fused_step import FusedStep
from tnp.llm.persistent_kernel import KEYS, PARTS, WARPS, persistent_step_kernel
from tnp.llm.step_kernels import choice_kernel, embed_kernel
from tnp.llm.tokens import Tokens
from tnp.ops.attention.primitives import LOG2_E

MOST = 8  # sequences
SHARED = 4096 + 2048  # bytes beside the ring and the rows: sums, barriers
MATRICES = ("qkv", "out", "up", "down")


class PersistentStep(FusedStep):
    """Computes one token of each sequence in one launch."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(_stacked(decoder))
        d, s = self.decoder, self.decoder.sizes
        first = d.layers[0]
        n = s.n_layers
        self._weights = [_whole([getattr(one, name) for one in d.layers]) for name in MATRICES]
        self._weights.append((_words(d.head), _scales(d.head)))
        norms = [norm for one in d.layers for norm in (one.attention_norm, one.mlp_norm)]
        self._norms = torch.stack([norm.weight.float() for norm in (*norms, d.norm)])
        self._norm_biases = self._norms
        if d.norm.bias is not None:
            self._norm_biases = torch.stack([norm.bias.float() for norm in (*norms, d.norm)])
        self._head_norms = [self._norms] * 2
        if first.q_norm is not None:
            self._head_norms = [
                torch.stack([getattr(one, name).weight.float() for one in d.layers])
                for name in ("q_norm", "k_norm")
            ]
        self._biases = [self._norms] * 4
        if first.qkv.bias is not None:
            self._biases = [
                torch.stack([getattr(one, name).bias for one in d.layers]) for name in MATRICES
            ]
        self._arrived = torch.zeros(5 * n, dtype=torch.int32, device=d.device)
        self._kernels: dict[tuple, Bound] = {}

    @staticmethod
    def refuses(decoder: Decoder) -> str | None:
        return FusedStep.refuses(decoder)

    @torch.no_grad()
    def follow(self, tokens: Tokens, cache: Cache) -> None:
        batch, d = len(tokens.ids), self.decoder
        s = d.sizes
        if batch > MOST or cache.page_table is not None or cache.capacity > 16 * KEYS.value:
            super().follow(tokens, cache)
            return
        x = d.embedding.new_empty(batch, s.width)
        embed_kernel[(batch,)](
            d.embedding, d.embedding if d.positions is None else d.positions, tokens.ids,
            cache.lengths, x, s.vocab, s.longest, WIDTH=s.width,
            BLOCK=triton.next_power_of_2(s.width), POSITIONS=d.positions is not None, num_warps=4,
            **self._chain,
        )  # fmt: skip
        cache.is_empty = False
        programs = self._target.multiprocessors
        splits = triton.cdiv(cache.capacity, KEYS.value)
        best = x.new_empty(programs, batch, dtype=torch.float32)
        best_id = x.new_empty(programs, batch, dtype=torch.int32)
        qkv = x.new_empty(batch, d.layers[0].qkv.shape[0], dtype=torch.float32)
        o = x.new_empty(batch, s.n_heads * s.head_dim)
        h = x.new_empty(batch, s.d_ff)
        parts = x.new_empty(splits, batch, s.n_heads, s.head_dim + 2, dtype=torch.float32)
        total, update, delta = torch.empty_like(x), torch.empty_like(x), torch.empty_like(x)
        words, scales = zip(*self._weights, strict=True)
        grouped = scales[0] is not None
        self._bound(batch, cache, splits)(
            *words, *(scales if grouped else words), x, total, update, delta, qkv, o, h,
            self._norms, self._norm_biases, *self._head_norms, *self._biases,
            *(scales if grouped else words), *self._tables(self._norms), cache.lengths,
            cache.keys, cache.values, parts, self._counts(batch), self._arrived, best, best_id,
            s.head_dim**-0.5 * LOG2_E, s.eps,
        )  # fmt: skip
        n_stops = 0 if tokens.stops is None else len(tokens.stops)
        choice_kernel[(batch,)](
            best, best_id, tokens.ids, tokens.block, tokens.place, tokens.ended.view(torch.int8),
            tokens.stops if n_stops else tokens.ids, programs, batch, n_stops, tokens.pad,
            PARTS=256, STOPS=triton.next_power_of_2(n_stops) if n_stops else 0, num_warps=4,
            **self._chain,
        )  # fmt: skip

    def _bound(self, batch: int, cache: Cache, splits: int) -> Bound:
        d, s = self.decoder, self.decoder.sizes
        key = batch, cache.capacity
        if key not in self._kernels:
            first = d.layers[0].qkv
            bits = 16 if isinstance(first.weight, Tensor) else first.weight.bits
            group = 0 if bits == 16 else first.weight.group
            each = min(1024 // bits, group or 1024)
            elements = each if bits == 16 else each * bits // 8
            rows = 1 if batch == 1 else 8
            longest = max(
                _in_pieces(n, rows, PARTS.value * each, normed)
                for n, normed in ((s.width, True), (s.n_heads * s.head_dim, False), (s.d_ff, False))
            )
            slot = 16 * PARTS.value * elements * (2 if bits == 16 else 1)
            slot += 16 * PARTS.value * 2 if group else 0
            room = self._target.shared_bytes - SHARED * (1 if rows == 1 else 1) - longest * rows * 2
            self._kernels[key] = Bound(
                persistent_step_kernel, (self._target.multiprocessors,), s.n_layers, batch,
                cache.capacity, splits, cache.keys[0].numel(), s.vocab,
                maps=(_map(elements),) * 5 + ((_scales_map if group else _map(elements)),) * 5,
                WIDTH=s.width, INNER=s.d_ff, N_HEADS=s.n_heads, N_KV_HEADS=s.n_kv_heads,
                D=s.head_dim, NORM="rms" if d.norm.bias is None else "layer",
                HEAD_NORM=d.layers[0].q_norm is not None, ROTATES=d.cos is not None, GATED=s.gated,
                BIAS=first.bias is not None, BITS=bits, GROUPED=group > 0, SCALED=False,
                SPLITS=triton.next_power_of_2(splits), XM=rows, SLOTS=min(16, room // slot),
                LONGEST=longest, num_warps=WARPS.value, maxnreg=168, launch_pdl=True,
            )  # fmt: skip
        return self._kernels[key]


def _in_pieces(n: int, rows: int, chunk: int, normed: bool) -> int:
    """Returns the columns that rows of n take in shared memory."""
    whole = triton.next_power_of_2(n)
    piece = max(chunk, whole if normed else min(whole, 8192 if rows == 1 else 2048))
    return triton.cdiv(n, piece) * piece


def _stacked(decoder: Decoder) -> Decoder:
    """Returns a decoder whose matrices of one kind lie one behind the other."""
    layers = list(decoder.layers)
    for name in MATRICES:
        linears = [getattr(one, name) for one in layers]
        if isinstance(linears[0].weight, Tensor):
            weights = torch.stack([one.weight for one in linears]).unbind(0)
        else:
            parts = {
                field: torch.stack([getattr(one.weight, field) for one in linears]).unbind(0)
                for field in ("weight", "scales")
            }
            weights = [
                replace(one.weight, weight=w, scales=sc)
                for one, w, sc in zip(linears, parts["weight"], parts["scales"], strict=True)
            ]
        layers = [
            replace(one, **{name: replace(linear, weight=w)})
            for one, linear, w in zip(layers, linears, weights, strict=True)
        ]
    return replace(decoder, layers=tuple(layers))


def _words(linear: Linear) -> Tensor:
    weight = linear.weight
    return weight if isinstance(weight, Tensor) else weight.weight.view(torch.int8)


def _scales(linear: Linear) -> Tensor | None:
    return None if isinstance(linear.weight, Tensor) else linear.weight.scales


def _whole(linears: list[Linear]) -> tuple[Tensor, Tensor | None]:
    """Returns the one matrix that linear layers are parts of, and its scales."""

    def joined(parts: list[Tensor]) -> Tensor:
        first = parts[0]
        shape = len(parts) * first.shape[0], first.shape[1]
        return first.as_strided(shape, first.stride(), first.storage_offset())

    words, scales = [_words(one) for one in linears], [_scales(one) for one in linears]
    return joined(words), None if scales[0] is None else joined(scales)


def _map(elements: int) -> Any:
    """Returns the function that describes chunks of a weight for TMA."""

    def descriptor(w: Tensor) -> TensorDescriptor:
        size = elements * w.element_size()
        layout = gl.NVMMASharedLayout(size if size >= 32 else 0, 8 * w.element_size(), 3)
        shape = [w.shape[1] // elements, w.shape[0], elements]
        return TensorDescriptor(
            w, shape, [elements, w.shape[1], 1], [PARTS.value, 8, elements], layout
        )

    return descriptor


def _scales_map(scales: Tensor) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(0, 16, 2)
    return TensorDescriptor(
        scales, list(scales.shape), list(scales.stride()), [8, PARTS.value], layout
    )
