"""Launches of attention in CUDA C++: `wmma.cu`, whose comments teach."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tnp import cuda
from tnp.contract import Call, Kernel
from tnp.ops.attention.definition import IN_CUDA
from tnp.ops.attention.primitives import (
    LOG2_E,
    empty,
    forward,
    lse_layout,
    row_strides,
    rows_layout,
)
from tnp.ops.attention.torch_forms import with_aligned_rows

WMMA = "tnp.ops.attention.wmma:attention_wmma"
WARPS, QUERIES_OF_A_WARP = 4, 16


def prepare(call: Call, config: object, inputs: tuple) -> Callable:
    """One launch, a block 64 queries of a head."""
    q, k = inputs[:2]
    n_heads, n_q, head_dim = q.shape[1:]
    of_o, of_lse = rows_layout(q), lse_layout(q)
    n_tiles = -(-n_q // (WARPS * QUERIES_OF_A_WARP))
    constants = cuda.constants(TYPE=cuda.TYPES[call.problem.dtype], HEAD_DIM=head_dim, WARPS=WARPS)
    source, capability = cuda.Source(WMMA, constants), call.target.capability
    grid = (n_tiles * q.shape[0] * n_heads,)
    as_read = [x if call.aligned else with_aligned_rows(x) for x in inputs[:3]]
    strides = [step for x in as_read for step in row_strides(x)]
    bound = cuda.Bound(
        source, capability, grid, WARPS * cuda.WARP, *strides, *of_o[1][:3], n_heads,
        n_heads // k.shape[1], n_q, k.shape[2], n_tiles, int(call.problem["causal"]),
    )  # fmt: skip

    def launch(inputs, scalars):
        q, k, v = inputs[:3]
        if not call.aligned:
            q, k, v = map(with_aligned_rows, (q, k, v))
        o = q.new_empty_strided(*of_o)
        lse = q.new_empty_strided(*of_lse, dtype=torch.float32)
        bound(q, k, v, o, lse, scalars[0] * LOG2_E)
        return (o,), (lse,)

    return forward(launch, call)


FORWARD = Kernel("wmma", empty, prepare, options=IN_CUDA, compiled_for=tuple(cuda.ARCHITECTURES))
