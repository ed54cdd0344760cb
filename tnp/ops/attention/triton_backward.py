"""Attention backward in portable Triton: dK/dV and dQ as two launches, without atomics.

The probabilities are recomputed from q, k and the saved lse. With p = 2^(scale·log2(e)·q kᵀ − lse)
and delta = Σ_d do·o:

    dv = pᵀ do    ds = p ∘ (do vᵀ − delta)    dq = scale · ds k    dk = scale · dsᵀ q

A program of the first kernel owns a tile of keys and walks the queries; it computes sᵀ and dsᵀ, so
that both feed their matmuls without a transpose. Where the key tiles are too few to fill the GPU
the queries are split into segments: each writes float32 partials, and a reduction adds them up (two
passes). A program of the second kernel owns a tile of queries and walks the keys. The fused form
is one launch: its first programs do what the first kernel's do, the others what the second's do.
Every sum has a fixed order: results are equal from run to run. (Dao, FlashAttention-2, arXiv
2307.08691.)
"""

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from tnp.ops.attention.primitives import (
    FULL_GRID,
    LOG2_E,
    LaunchConfig,
    candidates,
    empty_partials,
    empty_rows,
    head_ptr,
    key_count,
    load_rows,
    row_strides,
    store_rows,
    sum_partials,
)
from tnp.ops.primitives import KernelConfig, add_dot, cast, dot

if TYPE_CHECKING:
    from tnp.ops.attention.kernels import Problem

DELTA_ROWS = 32
# A segment shorter than this costs more in partials than its parallelism gains.
MIN_SEGMENT_TILES = 8


@dataclass(frozen=True)
class SeparateConfig:
    """One configuration a launch; each may be the dict that it became in JSON."""

    dkdv: LaunchConfig
    dq: LaunchConfig

    def __post_init__(self):
        for name in ("dkdv", "dq"):
            if isinstance(config := getattr(self, name), dict):
                object.__setattr__(self, name, LaunchConfig(**config))


@dataclass(frozen=True)
class FusedConfig(KernelConfig):
    """Tiles of queries (m) and keys (n) of the programs for dk and dv and of those for dq."""

    dkdv_block_m: int
    dkdv_block_n: int
    dq_block_m: int
    dq_block_n: int
    num_warps: int
    num_stages: int


# By bytes per element and head_dim, the default first; none spills on any target. In 16 bits at 64
# the defaults of `separate` are the fastest of ten measured on an H200 (B=4, 11,000 queries, 10,000
# keys). The others: the largest tiles that do not spill, unmeasured.
DKDV_CONFIGS = {
    (2, 64): (LaunchConfig(32, 64, 4, 3), LaunchConfig(32, 64, 4, 2)),
    (2, 128): (LaunchConfig(16, 128, 8, 2),),
    (4, 64): (LaunchConfig(32, 16, 4, 1),),
}
DQ_CONFIGS = {
    (2, 64): (LaunchConfig(128, 64, 8, 3), LaunchConfig(64, 64, 4, 3), LaunchConfig(128, 64, 8, 2)),
    (2, 128): (LaunchConfig(128, 32, 8, 2),),
    (4, 64): (LaunchConfig(16, 32, 4, 1),),
}
FUSED_CONFIGS = {
    (2, 64): (
        FusedConfig(32, 64, 64, 64, 4, 3),
        FusedConfig(32, 64, 64, 64, 4, 2),
        FusedConfig(32, 64, 64, 32, 4, 3),
        FusedConfig(32, 128, 128, 64, 8, 3),
    ),
    (2, 128): (FusedConfig(16, 128, 128, 32, 8, 2),),
    (4, 64): (FusedConfig(16, 16, 16, 32, 4, 1),),
}


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
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, n_context_ptr,
    stride_qb, stride_qh, stride_qm,
    stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn,
    stride_dob, stride_doh, stride_dom,
    stride_dkb, stride_dkh, stride_dkn,
    stride_dks, n_heads, n_q, n_k, segment, scale, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_N_CONTEXT: tl.constexpr,
):  # fmt: skip
    """dk and dv share strides; `segment` queries, a multiple of BLOCK_M, belong to a program."""
    n_blocks = tl.cdiv(n_k, BLOCK_N)
    pid_bh = tl.program_id(0) // n_blocks
    start_n = tl.program_id(0) % n_blocks * BLOCK_N
    offs_n = start_n + tl.arange(0, BLOCK_N)
    q_ptr = head_ptr(q_ptr, stride_qb, stride_qh, pid_bh, n_heads)
    k_ptr = head_ptr(k_ptr, stride_kb, stride_kh, pid_bh, n_heads)
    v_ptr = head_ptr(v_ptr, stride_vb, stride_vh, pid_bh, n_heads)
    do_ptr = head_ptr(do_ptr, stride_dob, stride_doh, pid_bh, n_heads)
    lse_ptr += pid_bh.to(tl.int64) * n_q
    delta_ptr += pid_bh.to(tl.int64) * n_q

    n_keys = key_count(n_context_ptr, pid_bh // n_heads, n_k, HAS_N_CONTEXT)
    k = load_rows(k_ptr, offs_n, n_keys, stride_kn, HEAD_DIM, True)
    v = load_rows(v_ptr, offs_n, n_keys, stride_vn, HEAD_DIM, True)
    dk = tl.zeros([BLOCK_N, HEAD_DIM], tl.float32)
    dv = tl.zeros([BLOCK_N, HEAD_DIM], tl.float32)
    begin = tl.program_id(1) * segment
    end = tl.minimum(begin + segment, n_q)
    if HAS_N_CONTEXT:
        end = tl.where(start_n < n_keys, end, begin)  # a tile of padding has nothing to add
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
    partial = tl.program_id(1).to(tl.int64) * stride_dks
    dk_ptr = head_ptr(dk_ptr, stride_dkb, stride_dkh, pid_bh, n_heads) + partial
    dv_ptr = head_ptr(dv_ptr, stride_dkb, stride_dkh, pid_bh, n_heads) + partial
    store_rows(dv_ptr, dv, offs_n, n_keys, stride_dkn, HEAD_DIM)
    store_rows(dk_ptr, dk * scale, offs_n, n_keys, stride_dkn, HEAD_DIM)
    if HAS_N_CONTEXT:
        # Zeros to the padding alone: a `where` on dk and dv costs a register across the loop.
        padding = tl.where(offs_n < n_keys, n_k, offs_n)
        zeros = tl.zeros([BLOCK_N, HEAD_DIM], tl.float32)
        store_rows(dv_ptr, zeros, padding, n_k, stride_dkn, HEAD_DIM)
        store_rows(dk_ptr, zeros, padding, n_k, stride_dkn, HEAD_DIM)


@triton.jit
def _dq_tile(
    dq, q, do, lse, delta, k_ptr, v_ptr, start_n, n_keys, stride_kn, stride_vn, scale_log2,
    BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add what keys start_n … start_n + BLOCK_N contribute."""
    offs_n = start_n + tl.arange(0, BLOCK_N)
    k = load_rows(k_ptr, offs_n, n_keys, stride_kn, HEAD_DIM, MASKED)
    v = load_rows(v_ptr, offs_n, n_keys, stride_vn, HEAD_DIM, MASKED)
    p = tl.math.exp2(dot(q, tl.trans(k)) * scale_log2 - lse[:, None])
    if MASKED:
        # Keys past the end score 0, whose probability overflows where lse is very negative.
        p = tl.where(offs_n[None, :] < n_keys, p, 0.0)
    ds = p * (dot(do, tl.trans(v)) - delta[:, None])
    return add_dot(cast(ds, k.dtype), k, dq)


@triton.jit(do_not_specialize=["n_q", "n_k", "first_program"])
def _attention_bwd_dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, n_context_ptr,
    stride_qb, stride_qh, stride_qm,
    stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn,
    stride_dob, stride_doh, stride_dom,
    stride_dqb, stride_dqh, stride_dqm,
    first_program, n_heads, n_q, n_k, scale, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_N_CONTEXT: tl.constexpr,
):  # fmt: skip
    """Programs from first_program on own a tile of queries each."""
    pid = tl.program_id(0) - first_program
    n_blocks = tl.cdiv(n_q, BLOCK_M)
    pid_bh = pid // n_blocks
    offs_m = pid % n_blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    q_ptr = head_ptr(q_ptr, stride_qb, stride_qh, pid_bh, n_heads)
    k_ptr = head_ptr(k_ptr, stride_kb, stride_kh, pid_bh, n_heads)
    v_ptr = head_ptr(v_ptr, stride_vb, stride_vh, pid_bh, n_heads)
    do_ptr = head_ptr(do_ptr, stride_dob, stride_doh, pid_bh, n_heads)

    q = load_rows(q_ptr, offs_m, n_q, stride_qm, HEAD_DIM, True)
    do = load_rows(do_ptr, offs_m, n_q, stride_dom, HEAD_DIM, True)
    row_ptrs = pid_bh.to(tl.int64) * n_q + offs_m
    lse = tl.load(lse_ptr + row_ptrs, mask=offs_m < n_q, other=float("inf"))
    delta = tl.load(delta_ptr + row_ptrs, mask=offs_m < n_q, other=0.0)
    dq = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    n_keys = key_count(n_context_ptr, pid_bh // n_heads, n_k, HAS_N_CONTEXT)
    n_full = n_keys // BLOCK_N * BLOCK_N
    for start_n in tl.range(0, n_full, BLOCK_N):
        dq = _dq_tile(
            dq, q, do, lse, delta, k_ptr, v_ptr, start_n, n_keys, stride_kn, stride_vn, scale_log2,
            BLOCK_N, HEAD_DIM, False,
        )  # fmt: skip
    if n_full < n_keys:
        dq = _dq_tile(
            dq, q, do, lse, delta, k_ptr, v_ptr, n_full, n_keys, stride_kn, stride_vn, scale_log2,
            BLOCK_N, HEAD_DIM, True,
        )  # fmt: skip
    dq_ptr = head_ptr(dq_ptr, stride_dqb, stride_dqh, pid_bh, n_heads)
    store_rows(dq_ptr, dq * scale, offs_m, n_q, stride_dqm, HEAD_DIM)


@triton.jit(do_not_specialize=["n_q", "n_k", "n_dkdv_programs"])
def _attention_bwd_fused_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, dk_ptr, dv_ptr, n_context_ptr,
    stride_qb, stride_qh, stride_qm,
    stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn,
    stride_dob, stride_doh, stride_dom,
    stride_dqb, stride_dqh, stride_dqm,
    stride_dkb, stride_dkh, stride_dkn,
    n_heads, n_q, n_k, n_dkdv_programs, scale, scale_log2,
    HEAD_DIM: tl.constexpr, DKDV_BLOCK_M: tl.constexpr, DKDV_BLOCK_N: tl.constexpr,
    DQ_BLOCK_M: tl.constexpr, DQ_BLOCK_N: tl.constexpr, HAS_N_CONTEXT: tl.constexpr,
):  # fmt: skip
    """The first programs own a tile of keys, the others a tile of queries."""
    if tl.program_id(0) < n_dkdv_programs:
        _attention_bwd_dkdv_kernel(
            q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, n_context_ptr,
            stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn,
            stride_vb, stride_vh, stride_vn, stride_dob, stride_doh, stride_dom,
            stride_dkb, stride_dkh, stride_dkn, 0, n_heads, n_q, n_k, n_q, scale, scale_log2,
            HEAD_DIM, DKDV_BLOCK_M, DKDV_BLOCK_N, HAS_N_CONTEXT,
        )  # fmt: skip
    else:
        _attention_bwd_dq_kernel(
            q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, n_context_ptr,
            stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn,
            stride_vb, stride_vh, stride_vn, stride_dob, stride_doh, stride_dom,
            stride_dqb, stride_dqh, stride_dqm, n_dkdv_programs, n_heads, n_q, n_k, scale,
            scale_log2, HEAD_DIM, DQ_BLOCK_M, DQ_BLOCK_N, HAS_N_CONTEXT,
        )  # fmt: skip


def n_segments(n_programs: int, n_tiles: int) -> int:
    """Segments the queries are split into: 1 where the key tiles fill the GPU by themselves."""
    wanted = triton.cdiv(FULL_GRID, n_programs)
    return max(1, min(wanted, n_tiles // MIN_SEGMENT_TILES))


def unsupported(problem: "Problem") -> str | None:
    """Always None: these kernels serve every problem."""
    return None


def backward_separate_configs(problem: "Problem") -> tuple[SeparateConfig, ...]:
    """Candidates, the default first."""
    pairs = product(candidates(DKDV_CONFIGS, problem), candidates(DQ_CONFIGS, problem))
    return tuple(SeparateConfig(dkdv, dq) for dkdv, dq in pairs)


def backward_fused_configs(problem: "Problem") -> tuple[FusedConfig, ...]:
    """Candidates, the default first."""
    return candidates(FUSED_CONFIGS, problem)


def _delta(o: torch.Tensor, do: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Σ_d do·o, [B, H, n_q] in float32."""
    batch, n_heads, n_q, head_dim = o.shape
    delta = torch.empty_like(lse)
    _delta_kernel[(triton.cdiv(n_q, DELTA_ROWS) * batch * n_heads,)](
        o, do, delta, *row_strides(o), *row_strides(do), n_heads, n_q,
        HEAD_DIM=head_dim, BLOCK_M=DELTA_ROWS,
    )  # fmt: skip
    return delta


def _dkdv(q, k, v, do, lse, delta, n_context, scale, config: LaunchConfig):
    batch, n_heads, n_q, head_dim = q.shape
    n_k = k.shape[2]
    n_programs = triton.cdiv(n_k, config.block_n) * batch * n_heads
    n_tiles = triton.cdiv(n_q, config.block_m)
    segments = n_segments(n_programs, n_tiles)
    segment = triton.cdiv(n_tiles, segments) * config.block_m
    segments = triton.cdiv(n_q, segment)
    dk, dv = empty_rows(k, n_k), empty_rows(v, n_k)
    partials = None if segments == 1 else empty_partials(k, segments)
    dk_part, dv_part = (dk, dv) if partials is None else partials[0]
    _attention_bwd_dkdv_kernel[(n_programs, segments)](
        q, k, v, do, lse, delta, dk_part, dv_part, q if n_context is None else n_context,
        *row_strides(q), *row_strides(k), *row_strides(v), *row_strides(do), *row_strides(dk),
        0 if partials is None else partials.stride(0),
        n_heads, n_q, n_k, segment, scale, scale * LOG2_E,
        HEAD_DIM=head_dim, HAS_N_CONTEXT=n_context is not None, **config.kernel_arguments(),
    )  # fmt: skip
    if partials is not None:
        sum_partials(partials, dk, dv)
    return dk, dv


def backward_separate(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    n_context: torch.Tensor | None,
    scale: float,
    config: SeparateConfig,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv in the shapes and dtype of q, k, v, laid out [B, L, H, D]."""
    batch, n_heads, n_q, head_dim = q.shape
    delta = _delta(o, do, lse)
    dk, dv = _dkdv(q, k, v, do, lse, delta, n_context, scale, config.dkdv)
    dq = empty_rows(q, n_q)
    _attention_bwd_dq_kernel[(triton.cdiv(n_q, config.dq.block_m) * batch * n_heads,)](
        q, k, v, do, lse, delta, dq, q if n_context is None else n_context,
        *row_strides(q), *row_strides(k), *row_strides(v), *row_strides(do), *row_strides(dq),
        0, n_heads, n_q, k.shape[2], scale, scale * LOG2_E,
        HEAD_DIM=head_dim, HAS_N_CONTEXT=n_context is not None, **config.dq.kernel_arguments(),
    )  # fmt: skip
    return dq, dk, dv


def backward_fused(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    n_context: torch.Tensor | None,
    scale: float,
    config: FusedConfig,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv in the shapes and dtype of q, k, v, laid out [B, L, H, D]."""
    batch, n_heads, n_q, head_dim = q.shape
    n_k = k.shape[2]
    delta = _delta(o, do, lse)
    dq, dk, dv = empty_rows(q, n_q), empty_rows(k, n_k), empty_rows(k, n_k)
    n_dkdv = triton.cdiv(n_k, config.dkdv_block_n) * batch * n_heads
    n_dq = triton.cdiv(n_q, config.dq_block_m) * batch * n_heads
    _attention_bwd_fused_kernel[(n_dkdv + n_dq,)](
        q, k, v, do, lse, delta, dq, dk, dv, q if n_context is None else n_context,
        *row_strides(q), *row_strides(k), *row_strides(v), *row_strides(do), *row_strides(dq),
        *row_strides(dk), n_heads, n_q, n_k, n_dkdv, scale, scale * LOG2_E,
        HEAD_DIM=head_dim, HAS_N_CONTEXT=n_context is not None, **config.kernel_arguments(),
    )  # fmt: skip
    return dq, dk, dv
