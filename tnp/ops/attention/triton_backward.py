"""Attention backward in portable Triton: dK/dV and dQ as two launches, without atomics.

The probabilities are recomputed from q, k and the saved lse. With p = 2^(scale·log2(e)·q kᵀ − lse)
and delta = Σ_d do·o:

    dv = pᵀ do    ds = p ∘ (do vᵀ − delta)    dq = scale · ds k    dk = scale · dsᵀ q

A program of the first kernel owns a tile of keys and walks the queries; it computes sᵀ and dsᵀ, so
that both feed their matmuls without a transpose. Where the key tiles are too few to fill the GPU
the queries are split into segments: each writes float32 partials, and a reduction adds them up (two
passes). A program of the second kernel owns a tile of queries and walks the keys. Every sum has a
fixed order: results are equal from run to run. (Dao, FlashAttention-2, arXiv 2307.08691.)
"""

import torch
import triton
import triton.language as tl

from tnp.ops.attention.primitives import (
    FULL_GRID,
    LOG2_E,
    add_dot,
    cast,
    dot,
    empty_rows,
    head_ptr,
    launch_config,
    load_rows,
    row_strides,
    store_rows,
)

DELTA_ROWS = 32
# A segment shorter than this costs more in partials than its parallelism gains.
MIN_SEGMENT_TILES = 8


@triton.jit(do_not_specialize=["n_q"])
def _delta_kernel(
    o_ptr, do_ptr, delta_ptr,
    stride_ob, stride_oh, stride_om,
    stride_dob, stride_doh, stride_dom,
    n_heads, n_q,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    n_blocks = tl.cdiv(n_q, BLOCK_M)
    pid_bh = tl.program_id(0) // n_blocks
    offs_m = (tl.program_id(0) % n_blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_ptr = head_ptr(o_ptr, stride_ob, stride_oh, pid_bh, n_heads)
    do_ptr = head_ptr(do_ptr, stride_dob, stride_doh, pid_bh, n_heads)
    o = load_rows(o_ptr, offs_m, n_q, stride_om, HEAD_DIM, True).to(tl.float32)
    do = load_rows(do_ptr, offs_m, n_q, stride_dom, HEAD_DIM, True).to(tl.float32)
    tl.store(delta_ptr + pid_bh.to(tl.int64) * n_q + offs_m, tl.sum(o * do, 1), mask=offs_m < n_q)


@triton.jit
def _dkdv_tile(
    dk, dv, k, v, q_ptr, do_ptr, lse_ptr, delta_ptr, start_m, n_q, stride_qm, stride_dom,
    scale_log2, BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add what queries start_m … start_m + BLOCK_M contribute."""
    offs_m = start_m + tl.arange(0, BLOCK_M)
    q = load_rows(q_ptr, offs_m, n_q, stride_qm, HEAD_DIM, MASKED)
    do = load_rows(do_ptr, offs_m, n_q, stride_dom, HEAD_DIM, MASKED)
    if MASKED:
        # An lse of +inf makes p zero on the rows past the end.
        lse = tl.load(lse_ptr + offs_m, mask=offs_m < n_q, other=float("inf"))
        delta = tl.load(delta_ptr + offs_m, mask=offs_m < n_q, other=0.0)
    else:
        lse = tl.load(lse_ptr + offs_m)
        delta = tl.load(delta_ptr + offs_m)
    p_t = tl.math.exp2(dot(k, tl.trans(q)) * scale_log2 - lse[None, :])
    dv = add_dot(cast(p_t, do.dtype), do, dv)
    ds_t = p_t * (dot(v, tl.trans(do)) - delta[None, :])
    dk = add_dot(cast(ds_t, q.dtype), q, dk)
    return dk, dv


@triton.jit(do_not_specialize=["n_q", "n_k", "segment"])
def _attention_bwd_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    stride_qb, stride_qh, stride_qm,
    stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn,
    stride_dob, stride_doh, stride_dom,
    stride_dkb, stride_dkh, stride_dkn,
    stride_dks, n_heads, n_q, n_k, segment, scale, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dk and dv share strides; `segment` queries, a multiple of BLOCK_M, belong to a program."""
    n_blocks = tl.cdiv(n_k, BLOCK_N)
    pid_bh = tl.program_id(0) // n_blocks
    offs_n = (tl.program_id(0) % n_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    q_ptr = head_ptr(q_ptr, stride_qb, stride_qh, pid_bh, n_heads)
    k_ptr = head_ptr(k_ptr, stride_kb, stride_kh, pid_bh, n_heads)
    v_ptr = head_ptr(v_ptr, stride_vb, stride_vh, pid_bh, n_heads)
    do_ptr = head_ptr(do_ptr, stride_dob, stride_doh, pid_bh, n_heads)
    lse_ptr += pid_bh.to(tl.int64) * n_q
    delta_ptr += pid_bh.to(tl.int64) * n_q
    partial = tl.program_id(1).to(tl.int64) * stride_dks
    dk_ptr = head_ptr(dk_ptr, stride_dkb, stride_dkh, pid_bh, n_heads) + partial
    dv_ptr = head_ptr(dv_ptr, stride_dkb, stride_dkh, pid_bh, n_heads) + partial

    k = load_rows(k_ptr, offs_n, n_k, stride_kn, HEAD_DIM, True)
    v = load_rows(v_ptr, offs_n, n_k, stride_vn, HEAD_DIM, True)
    dk = tl.zeros([BLOCK_N, HEAD_DIM], tl.float32)
    dv = tl.zeros([BLOCK_N, HEAD_DIM], tl.float32)
    begin = tl.program_id(1) * segment
    end = tl.minimum(begin + segment, n_q)
    full_end = begin + (end - begin) // BLOCK_M * BLOCK_M
    for start_m in tl.range(begin, full_end, BLOCK_M):
        dk, dv = _dkdv_tile(
            dk, dv, k, v, q_ptr, do_ptr, lse_ptr, delta_ptr, start_m, n_q, stride_qm, stride_dom,
            scale_log2, BLOCK_M, HEAD_DIM, False,
        )  # fmt: skip
    if full_end < end:
        dk, dv = _dkdv_tile(
            dk, dv, k, v, q_ptr, do_ptr, lse_ptr, delta_ptr, full_end, n_q, stride_qm, stride_dom,
            scale_log2, BLOCK_M, HEAD_DIM, True,
        )  # fmt: skip
    store_rows(dv_ptr, dv, offs_n, n_k, stride_dkn, HEAD_DIM)
    store_rows(dk_ptr, dk * scale, offs_n, n_k, stride_dkn, HEAD_DIM)


@triton.jit
def _dq_tile(
    dq, q, do, lse, delta, k_ptr, v_ptr, start_n, n_k, stride_kn, stride_vn, scale_log2,
    BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add what keys start_n … start_n + BLOCK_N contribute."""
    offs_n = start_n + tl.arange(0, BLOCK_N)
    k = load_rows(k_ptr, offs_n, n_k, stride_kn, HEAD_DIM, MASKED)
    v = load_rows(v_ptr, offs_n, n_k, stride_vn, HEAD_DIM, MASKED)
    p = tl.math.exp2(dot(q, tl.trans(k)) * scale_log2 - lse[:, None])
    if MASKED:
        # Keys past the end score 0, whose probability overflows where lse is very negative.
        p = tl.where(offs_n[None, :] < n_k, p, 0.0)
    ds = p * (dot(do, tl.trans(v)) - delta[:, None])
    return add_dot(cast(ds, k.dtype), k, dq)


@triton.jit(do_not_specialize=["n_q", "n_k"])
def _attention_bwd_dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr,
    stride_qb, stride_qh, stride_qm,
    stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn,
    stride_dob, stride_doh, stride_dom,
    stride_dqb, stride_dqh, stride_dqm,
    n_heads, n_q, n_k, scale, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    n_blocks = tl.cdiv(n_q, BLOCK_M)
    pid_bh = tl.program_id(0) // n_blocks
    offs_m = (tl.program_id(0) % n_blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
    q_ptr = head_ptr(q_ptr, stride_qb, stride_qh, pid_bh, n_heads)
    k_ptr = head_ptr(k_ptr, stride_kb, stride_kh, pid_bh, n_heads)
    v_ptr = head_ptr(v_ptr, stride_vb, stride_vh, pid_bh, n_heads)
    do_ptr = head_ptr(do_ptr, stride_dob, stride_doh, pid_bh, n_heads)
    dq_ptr = head_ptr(dq_ptr, stride_dqb, stride_dqh, pid_bh, n_heads)

    q = load_rows(q_ptr, offs_m, n_q, stride_qm, HEAD_DIM, True)
    do = load_rows(do_ptr, offs_m, n_q, stride_dom, HEAD_DIM, True)
    row_ptrs = pid_bh.to(tl.int64) * n_q + offs_m
    lse = tl.load(lse_ptr + row_ptrs, mask=offs_m < n_q, other=float("inf"))
    delta = tl.load(delta_ptr + row_ptrs, mask=offs_m < n_q, other=0.0)
    dq = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    n_full = n_k // BLOCK_N * BLOCK_N
    for start_n in tl.range(0, n_full, BLOCK_N):
        dq = _dq_tile(
            dq, q, do, lse, delta, k_ptr, v_ptr, start_n, n_k, stride_kn, stride_vn, scale_log2,
            BLOCK_N, HEAD_DIM, False,
        )  # fmt: skip
    if n_full < n_k:
        dq = _dq_tile(
            dq, q, do, lse, delta, k_ptr, v_ptr, n_full, n_k, stride_kn, stride_vn, scale_log2,
            BLOCK_N, HEAD_DIM, True,
        )  # fmt: skip
    store_rows(dq_ptr, dq * scale, offs_m, n_q, stride_dqm, HEAD_DIM)


def n_segments(n_programs: int, n_tiles: int) -> int:
    """Segments the queries are split into: 1 where the key tiles fill the GPU by themselves."""
    wanted = triton.cdiv(FULL_GRID, n_programs)
    return max(1, min(wanted, n_tiles // MIN_SEGMENT_TILES))


def _dkdv(q, k, v, do, lse, delta, scale) -> tuple[torch.Tensor, torch.Tensor]:
    batch, n_heads, n_q, head_dim = q.shape
    n_k = k.shape[2]
    config = launch_config("dkdv", q.dtype, head_dim)
    n_programs = triton.cdiv(n_k, config.block_n) * batch * n_heads
    n_tiles = triton.cdiv(n_q, config.block_m)
    segments = n_segments(n_programs, n_tiles)
    segment = triton.cdiv(n_tiles, segments) * config.block_m
    segments = triton.cdiv(n_q, segment)
    if segments == 1:
        dk, dv = empty_rows(k, n_k), empty_rows(v, n_k)
        partials, stride_dks = (dk, dv), 0
    else:
        shape = (2, segments, batch, n_k, n_heads, head_dim)
        partials = k.new_empty(shape, dtype=torch.float32)
        stride_dks = partials.stride(1)
        dk, dv = partials[:, 0].transpose(2, 3)
    _attention_bwd_dkdv_kernel[(n_programs, segments)](
        q, k, v, do, lse, delta, *partials,
        *row_strides(q), *row_strides(k), *row_strides(v), *row_strides(do), *row_strides(dk),
        stride_dks, n_heads, n_q, n_k, segment, scale, scale * LOG2_E,
        HEAD_DIM=head_dim, **config.kernel_arguments(),
    )  # fmt: skip
    if segments > 1:
        dk, dv = (part.sum(0).to(k.dtype).transpose(1, 2) for part in partials)
    return dk, dv


def attention_backward(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv in the shapes and dtype of q, k, v, laid out [B, L, H, D]."""
    batch, n_heads, n_q, head_dim = q.shape
    n_k = k.shape[2]
    if do.stride(-1) != 1 or not do.numel():
        do = do.contiguous()
    delta = torch.empty_like(lse)
    _delta_kernel[(triton.cdiv(n_q, DELTA_ROWS) * batch * n_heads,)](
        o, do, delta, *row_strides(o), *row_strides(do), n_heads, n_q,
        HEAD_DIM=head_dim, BLOCK_M=DELTA_ROWS,
    )  # fmt: skip
    dk, dv = _dkdv(q, k, v, do, lse, delta, scale)
    dq = empty_rows(q, n_q)
    config = launch_config("dq", q.dtype, head_dim)
    _attention_bwd_dq_kernel[(triton.cdiv(n_q, config.block_m) * batch * n_heads,)](
        q, k, v, do, lse, delta, dq,
        *row_strides(q), *row_strides(k), *row_strides(v), *row_strides(do), *row_strides(dq),
        n_heads, n_q, n_k, scale, scale * LOG2_E,
        HEAD_DIM=head_dim, **config.kernel_arguments(),
    )  # fmt: skip
    return dq, dk, dv
