"""Attention forward in portable Triton: online softmax over key tiles.

For a tile of queries, with s = scale·log2(e)·q kᵀ and running row maximum m and row sum l:

    m' = max(m, max_j s_j)    p = 2^(s − m')    l = l·2^(m − m') + Σ_j p_j
    o  = o·2^(m − m') + p v   and at the end  o / l,  lse = m + log2(l)

Products accumulate in float32; p is rounded to the inputs' dtype for the second matmul. Saved for
the backward pass: `lse` [B, H, n_q] in float32, to base 2. A sample with n_keys ends its loop
there. (Dao, FlashAttention-2, arXiv 2307.08691; Milakov and Gimelshein, arXiv 1805.02867.)
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from tnp.contract import Call, Kernel
from tnp.launch import Bound
from tnp.ops.attention.definition import OPTIONS
from tnp.ops.attention.primitives import (
    LOG2_E,
    LaunchConfig,
    candidates,
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
from tnp.ops.primitives import add_dot, cast, dot, key_count

# By bytes per element and head_dim, the default first; none spills on any target. In 16 bits at 64
# the default is the fastest of ten measured on an H200 (B=4, 11,000 queries, 10,000 keys). The
# last two were the fastest for 113 queries and 920 keys (11 µs). The others: the largest tiles that
# do not spill, unmeasured.
CONFIGS = {
    (2, 64): (
        LaunchConfig(128, 64, 8, 3),
        LaunchConfig(64, 64, 4, 2),
        LaunchConfig(64, 64, 4, 3),
        LaunchConfig(128, 128, 8, 2),
        LaunchConfig(64, 64, 4, 4),
        LaunchConfig(64, 128, 4, 3),
    ),
    (2, 128): (LaunchConfig(128, 64, 8, 3),),
    (4, 64): (LaunchConfig(16, 32, 4, 1),),
}


@triton.jit
def _fwd_tile(
    acc, l_i, m_i, q, k_ptr, v_ptr, start_n, n_keys, stride_kn, stride_vn, scale_log2,
    BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One online-softmax update with keys start_n … start_n + BLOCK_N."""
    offs_n = start_n + tl.arange(0, BLOCK_N)
    k = load_rows(k_ptr, offs_n, n_keys, stride_kn, HEAD_DIM, MASKED)
    s = dot(q, tl.trans(k))
    if MASKED:
        s = tl.where(offs_n[None, :] < n_keys, s, float("-inf"))
    m_new = tl.maximum(m_i, tl.max(s, 1) * scale_log2)
    p = tl.math.exp2(s * scale_log2 - m_new[:, None])
    alpha = tl.math.exp2(m_i - m_new)
    l_i = l_i * alpha + tl.sum(p, 1)
    v = load_rows(v_ptr, offs_n, n_keys, stride_vn, HEAD_DIM, MASKED)
    acc = add_dot(cast(p, v.dtype), v, acc * alpha[:, None])
    return acc, l_i, m_new


@triton.jit(do_not_specialize=["n_q", "n_k"])
def _attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, n_keys_ptr,
    stride_qb, stride_qh, stride_qm,
    stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn,
    stride_ob, stride_oh, stride_om,
    n_heads, n_q, n_k, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_N_KEYS: tl.constexpr,
):  # fmt: skip
    n_blocks = tl.cdiv(n_q, BLOCK_M)
    pid_bh = tl.program_id(0) // n_blocks
    offs_m = (tl.program_id(0) % n_blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
    q_ptr = head_ptr(q_ptr, stride_qb, stride_qh, pid_bh, n_heads)
    k_ptr = head_ptr(k_ptr, stride_kb, stride_kh, pid_bh, n_heads)
    v_ptr = head_ptr(v_ptr, stride_vb, stride_vh, pid_bh, n_heads)

    q = load_rows(q_ptr, offs_m, n_q, stride_qm, HEAD_DIM, True)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    n_keys = key_count(n_keys_ptr, pid_bh // n_heads, n_k, HAS_N_KEYS)
    n_full = n_keys // BLOCK_N * BLOCK_N
    for start_n in tl.range(0, n_full, BLOCK_N):
        acc, l_i, m_i = _fwd_tile(
            acc, l_i, m_i, q, k_ptr, v_ptr, start_n, n_keys, stride_kn, stride_vn, scale_log2,
            BLOCK_N, HEAD_DIM, False,
        )  # fmt: skip
    if n_full < n_keys:
        acc, l_i, m_i = _fwd_tile(
            acc, l_i, m_i, q, k_ptr, v_ptr, n_full, n_keys, stride_kn, stride_vn, scale_log2,
            BLOCK_N, HEAD_DIM, True,
        )  # fmt: skip
    o_ptr = head_ptr(o_ptr, stride_ob, stride_oh, pid_bh, n_heads)
    store_rows(o_ptr, acc * (1.0 / l_i)[:, None], offs_m, n_q, stride_om, HEAD_DIM)
    lse_ptrs = lse_ptr + pid_bh.to(tl.int64) * n_q + offs_m
    tl.store(lse_ptrs, m_i + tl.math.log2(l_i), mask=offs_m < n_q)


def configs(call: Call) -> tuple[LaunchConfig, ...]:
    """Candidates, the default first."""
    return candidates(CONFIGS, call)


def counts(call: Call, config: LaunchConfig) -> tuple[float, ...]:
    """A launch, blocks of keys of a multiprocessor, its query tiles, blocks of one of them.

    On average: several programs share a multiprocessor, and rounds do not show.
    """
    load = n_query_tiles(call, config.block_m) / call.target.multiprocessors
    blocks = triton.cdiv(call.problem["n_k"], config.block_n)
    return 1, load * blocks, load, blocks


def prepare(call: Call, config: LaunchConfig, inputs: tuple) -> Callable:
    """One launch, a program a tile of queries."""
    q, k, v, n_keys = inputs
    n_heads, n_q, head_dim = q.shape[1:]
    of_o, of_lse = rows_layout(q), lse_layout(q)
    kernel = Bound(
        _attention_fwd_kernel, (n_query_tiles(call, config.block_m),),
        *row_strides(q), *row_strides(k), *row_strides(v), *of_o[1][:3], n_heads, n_q, k.shape[2],
        HEAD_DIM=head_dim, HAS_N_KEYS=n_keys is not None, **config.kernel_arguments(),
    )  # fmt: skip

    def launch(inputs, scalars):
        q, k, v, n_keys = inputs
        o = q.new_empty_strided(*of_o)
        lse = q.new_empty_strided(*of_lse, dtype=torch.float32)
        kernel(q, k, v, o, lse, q if n_keys is None else n_keys, scalars[0] * LOG2_E)
        return (o,), (lse,)

    return forward(launch, call)


FORWARD = Kernel("triton", empty, prepare, configs=configs, options=OPTIONS, counts=counts)
