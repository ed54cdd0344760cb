"""Computes attention with few keys in one simple kernel, to learn from.

    s = scale·log2(e)·q kᵀ    m = max_j s_j    p = 2^(s − m)    l = Σ_j p_j
    o = p v / l               lse = m + log2(l)

A program has a tile of queries and all keys of its head. So it has whole rows of scores, and
softmax needs no running maximum or sum. For speed and gradients, see
`tnp/ops/attention/few_keys.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tnp.dispatch.launcher import Bound
from tnp.dispatch.spec import Call, Kernel
from tnp.ops._shared.primitives import KernelConfig, cast, dot
from tnp.ops.attention.primitives import (
    LOG2_E,
    empty,
    forward,
    head_ptr,
    load_rows,
    lse_layout,
    n_query_tiles,
    row_strides,
    rows_layout,
    store_rows,
)
from tnp_lab.attention import OPTIONS

LEAST_KEYS = 16  # of a tile: tensor cores take no fewer


@dataclass(frozen=True)
class Config(KernelConfig):
    """Sets the queries and keys of a tile, and the warps of a program."""

    block_m: int
    block_n: int
    num_warps: int


def configs(call: Call) -> tuple[Config, ...]:
    """Returns one configuration: 32 queries and all keys. The limit of keys avoids spills."""
    return (Config(32, max(LEAST_KEYS, triton.next_power_of_2(call.problem["n_k"])), 8),)


@triton.jit(do_not_specialize=["n_q", "n_k"])
def _attention_simple_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr,
    stride_qb, stride_qh, stride_qm,
    stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn,
    stride_ob, stride_oh, stride_om,
    n_heads, n_kv_heads, n_q, n_k, scale_log2,
    HEAD_DIM: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Writes o and lse, to base 2, of a tile of queries."""
    n_tiles = tl.cdiv(n_q, BLOCK_M)
    head = tl.program_id(0) // n_tiles
    kv_head = head // (n_heads // n_kv_heads)
    q_ptr = head_ptr(q_ptr, stride_qb, stride_qh, head, n_heads)
    k_ptr = head_ptr(k_ptr, stride_kb, stride_kh, kv_head, n_kv_heads)
    v_ptr = head_ptr(v_ptr, stride_vb, stride_vh, kv_head, n_kv_heads)
    o_ptr = head_ptr(o_ptr, stride_ob, stride_oh, head, n_heads)
    offs_m = tl.program_id(0) % n_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)

    q = load_rows(q_ptr, offs_m, n_q, stride_qm, HEAD_DIM, True)
    k = load_rows(k_ptr, offs_n, n_k, stride_kn, HEAD_DIM, True)
    s = dot(q, tl.trans(k)) * scale_log2
    seen = offs_n[None, :] < n_k
    if CAUSAL:  # the last query stands beside the last key
        seen &= offs_n[None, :] <= offs_m[:, None] + (n_k - n_q)
    s = tl.where(seen, s, float("-inf"))
    m = tl.max(s, 1)
    # A query without a key has p = 0 everywhere, o = 0 and lse = -inf.
    p = tl.math.exp2(s - tl.where(m > float("-inf"), m, 0.0)[:, None])
    l = tl.sum(p, 1)  # noqa: E741
    v = load_rows(v_ptr, offs_n, n_k, stride_vn, HEAD_DIM, True)
    o = dot(cast(p, v.dtype), v) / tl.where(l > 0.0, l, 1.0)[:, None]
    store_rows(o_ptr, o, offs_m, n_q, stride_om, HEAD_DIM)
    lse_ptr += head.to(tl.int64) * n_q
    tl.store(lse_ptr + offs_m, m + tl.math.log2(l), mask=offs_m < n_q)


def prepare(call: Call, config: Config, inputs: tuple) -> Callable:
    """Prepares one launch, in which each program takes one tile of a head's queries."""
    q, k, v = inputs[:3]
    n_heads, n_q, head_dim = q.shape[1:]
    of_o, of_lse = rows_layout(q), lse_layout(q)
    kernel = Bound(
        _attention_simple_kernel, (n_query_tiles(call, config.block_m),),
        *row_strides(q), *row_strides(k), *row_strides(v), *of_o[1][:3],
        n_heads, k.shape[1], n_q, k.shape[2],
        HEAD_DIM=head_dim, CAUSAL=bool(call.problem["causal"]), **config.kernel_arguments(),
    )  # fmt: skip

    def launch(inputs, scalars):
        q, k, v = inputs[:3]
        o = q.new_empty_strided(*of_o)
        lse = q.new_empty_strided(*of_lse, dtype=torch.float32)
        kernel(q, k, v, o, lse, scalars[0] * LOG2_E)
        return (o,), (lse,)

    return forward(launch, call)


FORWARD = Kernel("triton", empty, prepare, configs=configs, options=OPTIONS)
