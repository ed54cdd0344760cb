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

import triton
import triton.language as tl
from torch import Tensor

from tnp.contract import Call, Kernel
from tnp.launch import Bound
from tnp.ops.attention.primitives import (
    LOG2_E,
    LaunchConfig,
    Partials,
    backward,
    candidates,
    empty_backward,
    full_grid,
    head_ptr,
    key_count,
    load_rows,
    lse_layout,
    row_strides,
    rows_layout,
    store_rows,
)
from tnp.ops.primitives import KernelConfig, add_dot, cast, dot

DELTA_ROWS = 32
# A segment shorter than this costs more in partials than its parallelism gains.
MIN_SEGMENT_TILES = 8


@dataclass(frozen=True)
class SeparateConfig:
    """One configuration a launch."""

    dkdv: LaunchConfig
    dq: LaunchConfig


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
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, n_keys_ptr,
    stride_qb, stride_qh, stride_qm,
    stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn,
    stride_dob, stride_doh, stride_dom,
    stride_dkb, stride_dkh, stride_dkn,
    stride_dks, n_heads, n_q, n_k, segment, scale, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_N_KEYS: tl.constexpr,
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

    n_keys = key_count(n_keys_ptr, pid_bh // n_heads, n_k, HAS_N_KEYS)
    k = load_rows(k_ptr, offs_n, n_keys, stride_kn, HEAD_DIM, True)
    v = load_rows(v_ptr, offs_n, n_keys, stride_vn, HEAD_DIM, True)
    dk = tl.zeros([BLOCK_N, HEAD_DIM], tl.float32)
    dv = tl.zeros([BLOCK_N, HEAD_DIM], tl.float32)
    begin = tl.program_id(1) * segment
    end = tl.minimum(begin + segment, n_q)
    if HAS_N_KEYS:
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
    if HAS_N_KEYS:
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
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, n_keys_ptr,
    stride_qb, stride_qh, stride_qm,
    stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn,
    stride_dob, stride_doh, stride_dom,
    stride_dqb, stride_dqh, stride_dqm,
    first_program, n_heads, n_q, n_k, scale, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_N_KEYS: tl.constexpr,
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
    n_keys = key_count(n_keys_ptr, pid_bh // n_heads, n_k, HAS_N_KEYS)
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
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, dk_ptr, dv_ptr, n_keys_ptr,
    stride_qb, stride_qh, stride_qm,
    stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn,
    stride_dob, stride_doh, stride_dom,
    stride_dqb, stride_dqh, stride_dqm,
    stride_dkb, stride_dkh, stride_dkn,
    n_heads, n_q, n_k, n_dkdv_programs, scale, scale_log2,
    HEAD_DIM: tl.constexpr, DKDV_BLOCK_M: tl.constexpr, DKDV_BLOCK_N: tl.constexpr,
    DQ_BLOCK_M: tl.constexpr, DQ_BLOCK_N: tl.constexpr, HAS_N_KEYS: tl.constexpr,
):  # fmt: skip
    """The first programs own a tile of keys, the others a tile of queries."""
    if tl.program_id(0) < n_dkdv_programs:
        _attention_bwd_dkdv_kernel(
            q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, n_keys_ptr,
            stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn,
            stride_vb, stride_vh, stride_vn, stride_dob, stride_doh, stride_dom,
            stride_dkb, stride_dkh, stride_dkn, 0, n_heads, n_q, n_k, n_q, scale, scale_log2,
            HEAD_DIM, DKDV_BLOCK_M, DKDV_BLOCK_N, HAS_N_KEYS,
        )  # fmt: skip
    else:
        _attention_bwd_dq_kernel(
            q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, n_keys_ptr,
            stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn,
            stride_vb, stride_vh, stride_vn, stride_dob, stride_doh, stride_dom,
            stride_dqb, stride_dqh, stride_dqm, n_dkdv_programs, n_heads, n_q, n_k, scale,
            scale_log2, HEAD_DIM, DQ_BLOCK_M, DQ_BLOCK_N, HAS_N_KEYS,
        )  # fmt: skip


def separate_configs(call: Call) -> tuple[SeparateConfig, ...]:
    """Candidates, the default first."""
    pairs = product(candidates(DKDV_CONFIGS, call), candidates(DQ_CONFIGS, call))
    return tuple(SeparateConfig(dkdv, dq) for dkdv, dq in pairs)


def fused_configs(call: Call) -> tuple[FusedConfig, ...]:
    """Candidates, the default first."""
    return candidates(FUSED_CONFIGS, call)


def _bound_delta(o: Tensor, do: Tensor) -> Bound:
    """Of o, do, and Σ_d do·o [B, H, n_q] in float32, which it writes."""
    batch, n_heads, n_q, head_dim = o.shape
    return Bound(
        _delta_kernel, (triton.cdiv(n_q, DELTA_ROWS) * batch * n_heads,),
        *row_strides(o), *row_strides(do), n_heads, n_q, HEAD_DIM=head_dim, BLOCK_M=DELTA_ROWS,
    )  # fmt: skip


def segments_of(n_programs: int, n_q: int, block_m: int, full: int) -> tuple[int, int]:
    """(segments, queries of one): one of all queries where the key tiles fill the GPU alone.

    A segment is of whole tiles of block_m queries; `full` programs fill the GPU.
    """
    n_tiles = triton.cdiv(n_q, block_m)
    wanted = triton.cdiv(full, n_programs)
    segment = triton.cdiv(n_tiles, max(1, min(wanted, n_tiles // MIN_SEGMENT_TILES))) * block_m
    return triton.cdiv(n_q, segment), segment


@backward
def prepare_separate(call, config, do, q, k, v, n_keys, o, lse):
    """delta, dk and dv, perhaps in parts and their sum, and dq."""
    batch, n_heads, n_q, head_dim = q.shape
    n_k, counted = k.shape[2], n_keys is not None
    of_q, of_k, of_delta = rows_layout(q), rows_layout(k), lse_layout(q)
    n_programs = triton.cdiv(n_k, config.dkdv.block_n) * batch * n_heads
    full = full_grid(call.target)
    segments, segment = segments_of(n_programs, n_q, config.dkdv.block_m, full)
    partials = Partials(k, segments) if segments > 1 else None
    strides = *row_strides(q), *row_strides(k), *row_strides(v), *row_strides(do)
    delta_kernel = _bound_delta(o, do)
    dkdv_kernel = Bound(
        _attention_bwd_dkdv_kernel, (n_programs, segments),
        *strides, *of_k[1][:3], partials.stride if partials else 0, n_heads, n_q, n_k, segment,
        HEAD_DIM=head_dim, HAS_N_KEYS=counted, **config.dkdv.kernel_arguments(),
    )  # fmt: skip
    dq_kernel = Bound(
        _attention_bwd_dq_kernel, (triton.cdiv(n_q, config.dq.block_m) * batch * n_heads,),
        *strides, *of_q[1][:3], 0, n_heads, n_q, n_k,
        HEAD_DIM=head_dim, HAS_N_KEYS=counted, **config.dq.kernel_arguments(),
    )  # fmt: skip

    def launch(do, q, k, v, n_keys, o, lse, scale):
        delta = lse.new_empty_strided(*of_delta)
        delta_kernel(o, do, delta)
        dk, dv = k.new_empty_strided(*of_k), k.new_empty_strided(*of_k)
        dk_part, dv_part = partials.allocate(lse) if partials else (dk, dv)
        n_keys = q if n_keys is None else n_keys
        scales = scale, scale * LOG2_E
        dkdv_kernel(q, k, v, do, lse, delta, dk_part, dv_part, n_keys, *scales)
        if partials:
            partials.add(dk_part, dk, dv)
        dq = q.new_empty_strided(*of_q)
        dq_kernel(q, k, v, do, lse, delta, dq, n_keys, *scales)
        return dq, dk, dv

    return launch


@backward
def prepare_fused(call, config, do, q, k, v, n_keys, o, lse):
    """delta, and one launch for dk, dv and dq."""
    batch, n_heads, n_q, head_dim = q.shape
    n_k = k.shape[2]
    of_q, of_k, of_delta = rows_layout(q), rows_layout(k), lse_layout(q)
    n_dkdv = triton.cdiv(n_k, config.dkdv_block_n) * batch * n_heads
    n_dq = triton.cdiv(n_q, config.dq_block_m) * batch * n_heads
    delta_kernel = _bound_delta(o, do)
    kernel = Bound(
        _attention_bwd_fused_kernel, (n_dkdv + n_dq,),
        *row_strides(q), *row_strides(k), *row_strides(v), *row_strides(do),
        *of_q[1][:3], *of_k[1][:3], n_heads, n_q, n_k, n_dkdv,
        HEAD_DIM=head_dim, HAS_N_KEYS=n_keys is not None, **config.kernel_arguments(),
    )  # fmt: skip

    def launch(do, q, k, v, n_keys, o, lse, scale):
        delta = lse.new_empty_strided(*of_delta)
        delta_kernel(o, do, delta)
        dq = q.new_empty_strided(*of_q)
        dk, dv = k.new_empty_strided(*of_k), k.new_empty_strided(*of_k)
        n_keys = q if n_keys is None else n_keys
        kernel(q, k, v, do, lse, delta, dq, dk, dv, n_keys, scale, scale * LOG2_E)
        return dq, dk, dv

    return launch


SEPARATE = Kernel(
    "triton", empty_backward, prepare_separate, configs=separate_configs, options=("n_keys",)
)
FUSED = Kernel("triton", empty_backward, prepare_fused, configs=fused_configs, options=("n_keys",))
