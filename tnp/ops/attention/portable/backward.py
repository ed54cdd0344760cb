"""Computes attention backward in portable Triton: dk and dv, and dq, without atomics.

The probabilities are recomputed from q, k and the saved lse. With p = 2^(scale·log2(e)·q kᵀ − lse)
and delta = Σ_d do·o:

    dv = pᵀ do    ds = p ∘ (do vᵀ − delta)    dq = scale · ds k    dk = scale · dsᵀ q

A program of the first kernel owns a tile of keys and walks the queries. It computes sᵀ and dsᵀ, so
that both feed their matmuls without a transpose. If the key tiles are too few to fill the GPU, the
queries are split into segments. Each segment writes float32 partials, and another launch adds them
up. A program of the second kernel owns a tile of queries and walks the keys. The fused form is one
launch: its first programs do the first kernel's work, the other programs the second kernel's.

Every sum has a fixed order, so results are equal from run to run. (Dao, FlashAttention-2, arXiv
2307.08691.)
"""

from dataclasses import dataclass
from itertools import product

import triton
import triton.language as tl
from torch import Tensor

from tnp.dispatch.launcher import Bound
from tnp.dispatch.spec import Call, Kernel
from tnp.ops._shared.primitives import KernelConfig, add_dot, cast, dot
from tnp.ops.attention import primitives
from tnp.ops.attention.definition import WITH_LSE
from tnp.ops.attention.keys import (
    Reach,
    Tiles,
    all_seen,
    key_range,
    lengths_given,
    place,
    query_range,
    seen,
    whole_blocks,
)
from tnp.ops.attention.primitives import (
    LOG2_E,
    KeyGradients,
    LaunchConfig,
    Partials,
    backward,
    candidates,
    empty_backward,
    full_grid,
    head_ptr,
    load_rows,
    lse_layout,
    n_query_tiles,
    of_all_seen,
    row_ptr,
    row_strides,
    rows_layout,
    segments,
    store_rows,
    tile_width,
)


@triton.jit(do_not_specialize=["n_q"])
def delta_kernel(
    o_ptr, do_ptr, delta_ptr,
    stride_ob, stride_oh, stride_om,
    stride_dob, stride_doh, stride_dom,
    n_heads, n_q,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Writes delta [B, H, n_q] = Σ_d do·o in float32."""
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
    dk, dv, k, v, q_ptr, do_ptr, lse_ptr, delta_ptr, offs_n, start_m, n_q, n_keys, stride_qm,
    stride_dom, left, right, scale_log2, BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr,
    MASKED: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """Adds to dk and dv what queries start_m … start_m + BLOCK_M − 1 contribute."""
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
    if MASKED and (LEFT or RIGHT):
        visible = seen(offs_m[None, :], offs_n[:, None], n_q, n_keys, left, right, LEFT, RIGHT)
        p_t = tl.where(visible, p_t, 0.0)
    dv = add_dot(cast(p_t, do.dtype), do, dv)
    ds_t = p_t * (dot(v, tl.trans(do)) - delta[None, :])
    dk = add_dot(cast(ds_t, q.dtype), q, dk)
    return dk, dv


@triton.jit(do_not_specialize=["n_q", "n_k", "segment", "n_tiles", "left", "right"])
def attention_bwd_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    tiles_ptr, cu_q_ptr, cu_k_ptr, n_keys_ptr,
    stride_qb, stride_qh, stride_qm,
    stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn,
    stride_dob, stride_doh, stride_dom,
    stride_dkb, stride_dkh, stride_dkn,
    stride_dks, n_heads, n_q, n_k, segment, n_tiles, left, right, scale, scale_log2,
    HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_N_KEYS: tl.constexpr, PACKED: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """Writes dk and dv, which share strides. A program takes `segment` queries.

    `segment` is a multiple of BLOCK_M. If heads share keys, a program walks the queries of all of
    them, one head after another.
    """
    n_kv_heads = n_heads // GROUP
    pid_kv = tl.program_id(0) // n_tiles
    start_n, first_q, n_rows, first_k, n_keys = place(
        tl.program_id(0) % n_tiles, pid_kv // n_kv_heads, tiles_ptr, cu_q_ptr, cu_k_ptr, n_keys_ptr,
        n_q, n_k, BLOCK_N, PACKED, HAS_N_KEYS,
    )  # fmt: skip
    offs_n = start_n + tl.arange(0, BLOCK_N)
    k_ptr = row_ptr(head_ptr(k_ptr, stride_kb, stride_kh, pid_kv, n_kv_heads), first_k, stride_kn)
    v_ptr = row_ptr(head_ptr(v_ptr, stride_vb, stride_vh, pid_kv, n_kv_heads), first_k, stride_vn)
    k = load_rows(k_ptr, offs_n, n_keys, stride_kn, HEAD_DIM, True)
    v = load_rows(v_ptr, offs_n, n_keys, stride_vn, HEAD_DIM, True)
    dk = tl.zeros([BLOCK_N, tile_width(HEAD_DIM)], tl.float32)
    dv = tl.zeros([BLOCK_N, tile_width(HEAD_DIM)], tl.float32)
    begin, full_begin, full_end, end = query_range(
        start_n, n_rows, n_keys, left, right, BLOCK_N, LEFT, RIGHT
    )
    first, full_first, full_last = whole_blocks(begin, full_begin, full_end, end, BLOCK_M)
    if not (LEFT or RIGHT):  # else all queries belong to one program
        first = tl.program_id(1) * segment
        end = tl.where(end > 0, tl.minimum(first + segment, n_rows), first)
        full_first = first
        full_last = first + (end - first) // BLOCK_M * BLOCK_M
    for member in tl.range(GROUP):
        pid_bh = pid_kv * GROUP + member
        of_q = row_ptr(head_ptr(q_ptr, stride_qb, stride_qh, pid_bh, n_heads), first_q, stride_qm)
        of_do = row_ptr(
            head_ptr(do_ptr, stride_dob, stride_doh, pid_bh, n_heads), first_q, stride_dom
        )
        of_lse = lse_ptr + pid_bh.to(tl.int64) * n_q + first_q
        of_delta = delta_ptr + pid_bh.to(tl.int64) * n_q + first_q
        for part in tl.static_range(0 if RIGHT else 1, 3):  # masked, unmasked, masked again
            begin = first if part == 0 else (full_first if part == 1 else full_last)
            stop = full_first if part == 0 else (full_last if part == 1 else end)
            for start_m in tl.range(begin, stop, BLOCK_M):
                dk, dv = _dkdv_tile(
                    dk, dv, k, v, of_q, of_do, of_lse, of_delta, offs_n, start_m, n_rows, n_keys,
                    stride_qm, stride_dom, left, right, scale_log2, BLOCK_M, HEAD_DIM, part != 1,
                    LEFT, RIGHT,
                )  # fmt: skip
    partial = tl.program_id(1).to(tl.int64) * stride_dks
    dk_ptr = head_ptr(dk_ptr, stride_dkb, stride_dkh, pid_kv, n_kv_heads) + partial
    dv_ptr = head_ptr(dv_ptr, stride_dkb, stride_dkh, pid_kv, n_kv_heads) + partial
    dk_ptr = row_ptr(dk_ptr, first_k, stride_dkn)
    dv_ptr = row_ptr(dv_ptr, first_k, stride_dkn)
    store_rows(dv_ptr, dv, offs_n, n_keys, stride_dkn, HEAD_DIM)
    store_rows(dk_ptr, dk * scale, offs_n, n_keys, stride_dkn, HEAD_DIM)
    if HAS_N_KEYS:
        # Writes zeros to the padding only: a `where` on dk and dv costs a register in the loop.
        padding = tl.where(offs_n < n_keys, n_k, offs_n)
        zeros = tl.zeros([BLOCK_N, tile_width(HEAD_DIM)], tl.float32)
        store_rows(dv_ptr, zeros, padding, n_k, stride_dkn, HEAD_DIM)
        store_rows(dk_ptr, zeros, padding, n_k, stride_dkn, HEAD_DIM)


@triton.jit
def _dq_tile(
    dq, q, do, lse, delta, k_ptr, v_ptr, offs_m, start_n, n_q, n_keys, stride_kn, stride_vn, left,
    right, scale_log2, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, MASKED: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """Adds to dq what keys start_n … start_n + BLOCK_N − 1 contribute."""
    offs_n = start_n + tl.arange(0, BLOCK_N)
    k = load_rows(k_ptr, offs_n, n_keys, stride_kn, HEAD_DIM, MASKED)
    v = load_rows(v_ptr, offs_n, n_keys, stride_vn, HEAD_DIM, MASKED)
    p = tl.math.exp2(dot(q, tl.trans(k)) * scale_log2 - lse[:, None])
    if MASKED:
        # Keys past the end score 0. Their weight would overflow if lse is very negative.
        visible = seen(offs_m[:, None], offs_n[None, :], n_q, n_keys, left, right, LEFT, RIGHT)
        p = tl.where(visible, p, 0.0)
    ds = p * (dot(do, tl.trans(v)) - delta[:, None])
    return add_dot(cast(ds, k.dtype), k, dq)


@triton.jit(do_not_specialize=["n_q", "n_k", "first_program", "n_tiles", "left", "right"])
def attention_bwd_dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr,
    tiles_ptr, cu_q_ptr, cu_k_ptr, n_keys_ptr,
    stride_qb, stride_qh, stride_qm,
    stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn,
    stride_dob, stride_doh, stride_dom,
    stride_dqb, stride_dqh, stride_dqm,
    first_program, n_heads, n_q, n_k, n_tiles, left, right, scale, scale_log2,
    HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_N_KEYS: tl.constexpr, PACKED: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """Writes dq. Each program from first_program on owns a tile of queries."""
    pid = tl.program_id(0) - first_program
    pid_bh = pid // n_tiles
    tile = pid % n_tiles
    if RIGHT:
        tile = n_tiles - 1 - tile
    start_m, first_q, n_rows, first_k, n_keys = place(
        tile, pid_bh // n_heads, tiles_ptr, cu_q_ptr, cu_k_ptr, n_keys_ptr, n_q, n_k, BLOCK_M,
        PACKED, HAS_N_KEYS,
    )  # fmt: skip
    offs_m = start_m + tl.arange(0, BLOCK_M)
    pid_kv, n_kv_heads = pid_bh // GROUP, n_heads // GROUP
    q_ptr = row_ptr(head_ptr(q_ptr, stride_qb, stride_qh, pid_bh, n_heads), first_q, stride_qm)
    k_ptr = row_ptr(head_ptr(k_ptr, stride_kb, stride_kh, pid_kv, n_kv_heads), first_k, stride_kn)
    v_ptr = row_ptr(head_ptr(v_ptr, stride_vb, stride_vh, pid_kv, n_kv_heads), first_k, stride_vn)
    do_ptr = row_ptr(head_ptr(do_ptr, stride_dob, stride_doh, pid_bh, n_heads), first_q, stride_dom)

    q = load_rows(q_ptr, offs_m, n_rows, stride_qm, HEAD_DIM, True)
    do = load_rows(do_ptr, offs_m, n_rows, stride_dom, HEAD_DIM, True)
    row_ptrs = pid_bh.to(tl.int64) * n_q + first_q + offs_m
    lse = tl.load(lse_ptr + row_ptrs, mask=offs_m < n_rows, other=float("inf"))
    delta = tl.load(delta_ptr + row_ptrs, mask=offs_m < n_rows, other=0.0)
    dq = tl.zeros([BLOCK_M, tile_width(HEAD_DIM)], tl.float32)
    begin, full_begin, full_end, end = key_range(
        start_m, n_rows, n_keys, left, right, BLOCK_M, LEFT, RIGHT
    )
    first, full_first, full_last = whole_blocks(begin, full_begin, full_end, end, BLOCK_N)
    for part in tl.static_range(0 if LEFT else 1, 3):  # masked, unmasked, masked again
        begin = first if part == 0 else (full_first if part == 1 else full_last)
        stop = full_first if part == 0 else (full_last if part == 1 else end)
        for start_n in tl.range(begin, stop, BLOCK_N):
            dq = _dq_tile(
                dq, q, do, lse, delta, k_ptr, v_ptr, offs_m, start_n, n_rows, n_keys, stride_kn,
                stride_vn, left, right, scale_log2, BLOCK_N, HEAD_DIM, part != 1, LEFT, RIGHT,
            )  # fmt: skip
    dq_ptr = row_ptr(head_ptr(dq_ptr, stride_dqb, stride_dqh, pid_bh, n_heads), first_q, stride_dqm)
    store_rows(dq_ptr, dq * scale, offs_m, n_rows, stride_dqm, HEAD_DIM)


@triton.jit(
    do_not_specialize=["n_q", "n_k", "n_dkdv_programs", "n_key_tiles", "n_q_tiles", "left", "right"]
)
def attention_bwd_fused_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, dk_ptr, dv_ptr,
    key_tiles_ptr, q_tiles_ptr, cu_q_ptr, cu_k_ptr, n_keys_ptr,
    stride_qb, stride_qh, stride_qm,
    stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn,
    stride_dob, stride_doh, stride_dom,
    stride_dqb, stride_dqh, stride_dqm,
    stride_dkb, stride_dkh, stride_dkn,
    n_heads, n_q, n_k, n_dkdv_programs, n_key_tiles, n_q_tiles, left, right, scale, scale_log2,
    HEAD_DIM: tl.constexpr, GROUP: tl.constexpr,
    DKDV_BLOCK_M: tl.constexpr, DKDV_BLOCK_N: tl.constexpr,
    DQ_BLOCK_M: tl.constexpr, DQ_BLOCK_N: tl.constexpr,
    HAS_N_KEYS: tl.constexpr, PACKED: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """Writes dk, dv, dq. First programs own a tile of keys, other programs a tile of queries."""
    if tl.program_id(0) < n_dkdv_programs:
        attention_bwd_dkdv_kernel(
            q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
            key_tiles_ptr, cu_q_ptr, cu_k_ptr, n_keys_ptr,
            stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn,
            stride_vb, stride_vh, stride_vn, stride_dob, stride_doh, stride_dom,
            stride_dkb, stride_dkh, stride_dkn, 0, n_heads, n_q, n_k, n_q, n_key_tiles, left, right,
            scale, scale_log2, HEAD_DIM, GROUP, DKDV_BLOCK_M, DKDV_BLOCK_N, HAS_N_KEYS, PACKED,
            LEFT, RIGHT,
        )  # fmt: skip
    else:
        attention_bwd_dq_kernel(
            q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr,
            q_tiles_ptr, cu_q_ptr, cu_k_ptr, n_keys_ptr,
            stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn,
            stride_vb, stride_vh, stride_vn, stride_dob, stride_doh, stride_dom,
            stride_dqb, stride_dqh, stride_dqm, n_dkdv_programs, n_heads, n_q, n_k, n_q_tiles, left,
            right, scale, scale_log2, HEAD_DIM, GROUP, DQ_BLOCK_M, DQ_BLOCK_N, HAS_N_KEYS, PACKED,
            LEFT, RIGHT,
        )  # fmt: skip


# ------------------------------------------------------------------------------------- the launches

DELTA_ROWS = 32
# The partials of a shorter segment cost more than its parallelism gains.
MIN_SEGMENT_TILES = 8


@dataclass(frozen=True)
class SeparateConfig:
    """Configures both launches."""

    dkdv: LaunchConfig
    dq: LaunchConfig


@dataclass(frozen=True)
class FusedConfig(KernelConfig):
    """Configures the launch: tiles of queries (m) and keys (n) for dk and dv, and for dq."""

    dkdv_block_m: int
    dkdv_block_n: int
    dq_block_m: int
    dq_block_n: int
    num_warps: int
    num_stages: int


# Candidates by bytes per element and columns of a tile, the default first. `tnp.gates.compile`
# checks that none spills, and that MASKED ones do not spill with masks. In 16 bits at 64 columns,
# the defaults of `separate` are the fastest of ten on an H200 (batch 4, 11,000 queries, 10,000
# keys). Other tiles are the largest that do not spill.
DKDV_CONFIGS = {
    (2, 64): (LaunchConfig(32, 64, 4, 3), LaunchConfig(32, 64, 4, 2)),
    (2, 128): (LaunchConfig(16, 128, 8, 2),),
    (2, 256): (LaunchConfig(16, 32, 8, 1),),
    (4, 64): (LaunchConfig(16, 32, 4, 1),),
}
MASKED_DKDV_CONFIGS = {
    (2, 64): (LaunchConfig(16, 64, 4, 1),),
    (2, 128): (LaunchConfig(16, 64, 8, 1),),
    (4, 64): (LaunchConfig(16, 32, 8, 1),),
}
DQ_CONFIGS = {
    (2, 64): (LaunchConfig(128, 64, 8, 3), LaunchConfig(64, 64, 4, 3), LaunchConfig(128, 64, 8, 2)),
    (2, 128): (LaunchConfig(128, 32, 8, 2),),
    (2, 256): (LaunchConfig(32, 64, 8, 1),),
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
    (2, 256): (FusedConfig(16, 32, 32, 64, 8, 1),),
    (4, 64): (FusedConfig(16, 16, 16, 32, 4, 1),),
}
MASKED_FUSED_CONFIGS = {
    (2, 64): (FusedConfig(16, 64, 64, 32, 4, 1),),
    (2, 128): (FusedConfig(16, 64, 64, 16, 8, 1),),
}


def separate_configs(call: Call) -> tuple[SeparateConfig, ...]:
    of_dkdv = candidates(call, DKDV_CONFIGS, MASKED_DKDV_CONFIGS)
    return tuple(SeparateConfig(*two) for two in product(of_dkdv, candidates(call, DQ_CONFIGS)))


def fused_configs(call: Call) -> tuple[FusedConfig, ...]:
    return candidates(call, FUSED_CONFIGS, MASKED_FUSED_CONFIGS)


def _bound_delta(o: Tensor, do: Tensor) -> Bound:
    """Returns the launch of `delta_kernel`. Call it with (o, do, delta); it writes delta."""
    batch, n_heads, n_q, head_dim = o.shape
    return Bound(
        delta_kernel, (triton.cdiv(n_q, DELTA_ROWS) * batch * n_heads,),
        *row_strides(o), *row_strides(do), n_heads, n_q, HEAD_DIM=head_dim, BLOCK_M=DELTA_ROWS,
    )  # fmt: skip


def _segments(call: Call, config: LaunchConfig) -> tuple[int, int]:
    """Returns how many programs share the queries of a tile of keys, and the query tiles of one.

    It is one program if the tiles of keys fill the GPU.
    """
    p = call.problem
    if not all_seen(p):
        return 1, triton.cdiv(p["n_q"], config.block_m)
    wanted = triton.cdiv(full_grid(call.target), primitives.n_key_tiles(call, config.block_n))
    query_tiles = triton.cdiv(p["n_q"], config.block_m)
    return segments(query_tiles, wanted, MIN_SEGMENT_TILES)


@of_all_seen
def separate_counts(call: Call, config: SeparateConfig) -> tuple[float, ...]:
    """Returns what a launch's time is made of: see `Kernel.counts`.

    They are the launch, and whether partials are summed. For dk and dv: an average multiprocessor's
    programs, the query tiles that they walk, and the query tiles of one program. For dq: an average
    multiprocessor's programs, the key blocks that they walk, and the key blocks of one program.
    """
    n_segments, tiles = _segments(call, config.dkdv)
    keys = primitives.n_key_tiles(call, config.dkdv.block_n) / call.target.multiprocessors
    queries = n_query_tiles(call, config.dq.block_m) / call.target.multiprocessors
    walked = triton.cdiv(call.problem["n_q"], config.dkdv.block_m)
    blocks = triton.cdiv(call.problem["n_k"], config.dq.block_n)
    of_dkdv = keys * n_segments, keys * walked, tiles
    return 1, float(n_segments > 1), *of_dkdv, queries, queries * blocks, blocks


@of_all_seen
def fused_counts(call: Call, config: FusedConfig) -> tuple[float, ...]:
    """Returns what a launch's time is made of: see `Kernel.counts`.

    These are the launch; an average multiprocessor's query tiles for dk and dv, key blocks for dq,
    and programs; and the tiles or blocks of the longest program.
    """
    dkdv = primitives.n_key_tiles(call, config.dkdv_block_n) / call.target.multiprocessors
    dq = n_query_tiles(call, config.dq_block_m) / call.target.multiprocessors
    queries = triton.cdiv(call.problem["n_q"], config.dkdv_block_m)
    keys = triton.cdiv(call.problem["n_k"], config.dq_block_n)
    return 1, dkdv * queries, dq * keys, dkdv + dq, max(queries, keys)


@backward
def prepare_separate(call, config, do, q, k, v, lengths, o, lse, dlse):
    """Prepares delta; dk and dv, perhaps as partials and their sum; and dq."""
    batch, n_heads, n_q, head_dim = q.shape
    n_kv_heads, n_k = k.shape[1:3]
    of_q, of_keys, of_delta = rows_layout(q), KeyGradients(k, call.apart), lse_layout(q)
    n_segments, n_walked = _segments(call, config.dkdv)
    partials = Partials(k, n_segments, of_keys) if n_segments > 1 else None
    strides = *row_strides(q), *row_strides(k), *row_strides(v), *row_strides(do)
    key_tiles = Tiles(call, "n_k", config.dkdv.block_n)
    query_tiles = Tiles(call, "n_q", config.dq.block_m)
    reach = Reach.of(call.problem)
    constants = {"HEAD_DIM": head_dim, "GROUP": n_heads // n_kv_heads}
    constants |= lengths_given(call) | reach.constants
    fill_delta = _bound_delta(o, do)
    dkdv_kernel = Bound(
        attention_bwd_dkdv_kernel, (key_tiles.n * batch * n_kv_heads, n_segments),
        *strides, *(partials or of_keys).strides, partials.segment if partials else 0,
        n_heads, n_q, n_k, n_walked * config.dkdv.block_m, key_tiles.n, *reach.numbers,
        **constants, **config.dkdv.kernel_arguments(),
    )  # fmt: skip
    dq_kernel = Bound(
        attention_bwd_dq_kernel, (query_tiles.n * batch * n_heads,),
        *strides, *of_q[1][:3], 0, n_heads, n_q, n_k, query_tiles.n, *reach.numbers,
        **constants, **config.dq.kernel_arguments(),
    )  # fmt: skip

    def launch(do, q, k, v, lengths, o, lse, dlse, scale):
        delta = lse.new_empty_strided(*of_delta)
        fill_delta(o, do, delta)
        if dlse is not None:
            delta -= dlse
        dk, dv = of_keys.allocate(k)
        dk_part, dv_part = partials.allocate(lse) if partials else (dk, dv)
        scales = scale, scale * LOG2_E
        of_keys_tiles = key_tiles.pointers(lengths, q)
        dkdv_kernel(q, k, v, do, lse, delta, dk_part, dv_part, *of_keys_tiles, *scales)
        if partials:
            partials.add(dk_part, dk, dv)
        dq = q.new_empty_strided(*of_q)
        dq_kernel(q, k, v, do, lse, delta, dq, *query_tiles.pointers(lengths, q), *scales)
        return dq, dk, dv

    return launch


@backward
def prepare_fused(call, config, do, q, k, v, lengths, o, lse, dlse):
    """Prepares delta, and one launch for dk, dv and dq."""
    batch, n_heads, n_q, head_dim = q.shape
    n_kv_heads, n_k = k.shape[1:3]
    of_q, of_keys, of_delta = rows_layout(q), KeyGradients(k, call.apart), lse_layout(q)
    key_tiles = Tiles(call, "n_k", config.dkdv_block_n)
    query_tiles = Tiles(call, "n_q", config.dq_block_m)
    n_dkdv = key_tiles.n * batch * n_kv_heads
    reach = Reach.of(call.problem)
    fill_delta = _bound_delta(o, do)
    kernel = Bound(
        attention_bwd_fused_kernel, (n_dkdv + query_tiles.n * batch * n_heads,),
        *row_strides(q), *row_strides(k), *row_strides(v), *row_strides(do),
        *of_q[1][:3], *of_keys.strides, n_heads, n_q, n_k, n_dkdv, key_tiles.n, query_tiles.n,
        *reach.numbers, HEAD_DIM=head_dim, GROUP=n_heads // n_kv_heads, **lengths_given(call),
        **reach.constants, **config.kernel_arguments(),
    )  # fmt: skip

    def launch(do, q, k, v, lengths, o, lse, dlse, scale):
        delta = lse.new_empty_strided(*of_delta)
        fill_delta(o, do, delta)
        if dlse is not None:
            delta -= dlse
        dq = q.new_empty_strided(*of_q)
        dk, dv = of_keys.allocate(k)
        of_key_tiles, *others = key_tiles.pointers(lengths, q)
        of_query_tiles = query_tiles.pointers(lengths, q)[0]
        kernel(
            q, k, v, do, lse, delta, dq, dk, dv, of_key_tiles, of_query_tiles, *others, scale,
            scale * LOG2_E,
        )  # fmt: skip
        return dq, dk, dv

    return launch


SEPARATE = Kernel(
    "triton", empty_backward, prepare_separate, configs=separate_configs, options=WITH_LSE,
    counts=separate_counts,
)  # fmt: skip
FUSED = Kernel(
    "triton", empty_backward, prepare_fused, configs=fused_configs, options=WITH_LSE,
    counts=fused_counts,
)  # fmt: skip
