"""Launches attention in CUDA C++. Comments of `wmma.cu` and `cute.cu` explain it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from tnp.dispatch.spec import Call, Kernel
from tnp.ops.attention.primitives import (
    LOG2_E,
    empty,
    forward,
    lse_layout,
    row_strides,
    rows_layout,
)
from tnp.ops.attention.torch_forms import with_aligned_rows
from tnp_lab import nvrtc
from tnp_lab.attention import OPTIONS
from tnp_lab.launch import Bound

WMMA = "tnp_lab.attention.wmma:attention_wmma"
CUTE = "tnp_lab.attention.cute:attention_cute"
CUTE_TYPES = {"bfloat16": "cute::bfloat16_t", "float16": "cute::half_t"}
WARPS = 4


def prepare_wmma(call: Call, config: object, inputs: tuple) -> Callable:
    """Prepares one launch of `wmma.cu`, with a block for 64 queries of a head."""
    return _prepare(call, inputs, WMMA, nvrtc.TYPES, 16)


def prepare_cute(call: Call, config: object, inputs: tuple) -> Callable:
    """Prepares one launch of `cute.cu`, with a block for 128 queries of a head."""
    return _prepare(call, inputs, CUTE, CUTE_TYPES, 32, nvrtc.cutlass() or "")


def _prepare(
    call: Call,
    inputs: tuple,
    kernel: str,
    types: Mapping[str, str],
    queries_of_a_warp: int,
    cutlass: str = "",
) -> Callable:
    as_read = with_aligned_rows if not call.aligned else lambda x: x
    q, k, v = map(as_read, inputs[:3])
    n_heads, n_q, head_dim = q.shape[1:]
    of_o, of_lse = rows_layout(q), lse_layout(q)
    n_tiles = -(-n_q // (WARPS * queries_of_a_warp))
    constants = nvrtc.constants(TYPE=types[call.problem.dtype], HEAD_DIM=head_dim, WARPS=WARPS)
    bound = Bound(
        nvrtc.Source(kernel, constants, cutlass), call.target.capability,
        (n_tiles * q.shape[0] * n_heads,), WARPS * nvrtc.WARP,
        *row_strides(q), *row_strides(k), *row_strides(v), *of_o[1][:3],
        n_heads, n_heads // k.shape[1], n_q, k.shape[2], n_tiles, int(call.problem["causal"]),
    )  # fmt: skip

    def launch(inputs, scalars):
        q, k, v = map(as_read, inputs[:3])
        o = q.new_empty_strided(*of_o)
        lse = q.new_empty_strided(*of_lse, dtype=torch.float32)
        bound(q, k, v, o, lse, scalars[0] * LOG2_E)
        return (o,), (lse,)

    return forward(launch, call)


_BUILT = tuple(nvrtc.ARCHITECTURES)
FORWARD_WMMA = Kernel("cuda", empty, prepare_wmma, options=OPTIONS, compiled_for=_BUILT)
FORWARD_CUTE = Kernel("cuda", empty, prepare_cute, options=OPTIONS, compiled_for=_BUILT)
