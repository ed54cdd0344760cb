"""Attention of a causal buffer's rows, all in one launch each way.

Keys lie in blocks of 64, those of the context and of the buffer apart. Rows are walked by what they
see, numbered as if those that see equally many blocks were neighbours: rows that see the context
alone are the first and the last of q, and of each group beside the buffer the rows from 64·j on see
its block j. So which blocks a tile sees is known before it is read, and no product is computed
whose weights are all zero.

Forward a program keeps the blocks that its rows see on chip. Backward a program takes a head, and
one block of keys after the other: a block's gradients stay in registers while its rows are walked,
and dq is added up in memory by the program that wrote it. Delta, the sum of p ∘ dp over all keys, is
that of do ∘ o, taken first; where a row sees one block alone it is summed there, and o is not read.
All gradients of 192 keys at once fill the registers (all of three blocks: 300 bytes of spills in
every tile that was tried). Where the
heads are too few to fill the GPU, several programs share a head's rows and leave float32 partials
of dk and dv, which a second launch adds up in a fixed order.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tnp.contract import Call, Kernel, Problem
from tnp.launch import Bound
from tnp.ops.attention import primitives
from tnp.ops.attention.primitives import (
    LOG2_E,
    KeyGradients,
    Partials,
    full_grid,
    head_ptr,
    load_rows,
    lse_layout,
    row_strides,
    rows_layout,
    segments,
    store_rows,
)
from tnp.ops.attention.torch_forms import LN_2
from tnp.ops.buffered_attention.definition import BLOCK_N, TAKEN, Rows, n_blocks
from tnp.ops.primitives import KernelConfig, add_dot, cast, dot, key_count


@dataclass(frozen=True)
class ForwardConfig(KernelConfig):
    """Rows of a tile, and the tiles that a program walks."""

    block_m: int
    tiles: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class BackwardConfig(KernelConfig):
    """Rows of a tile."""

    block_m: int
    num_warps: int
    num_stages: int


# What a kernel is not compiled anew for.
COUNTS = [
    "n_q", "n_context", "n_buffer", "n_first", "n_beside", "n_alone", "n_each", "n_segments",
    "chunk", "chunk_each", "chunk_last",
]  # fmt: skip


# ------------------------------------------------------------------------- rows by what they see


@triton.jit
def _rows_alone(tile, n_first, n_beside, n_q, BLOCK_M: tl.constexpr):
    """Rows of q of a tile of those that see the context alone, n_q where there is none."""
    at = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    return tl.minimum(tl.where(at < n_first, at, at + n_beside), n_q)


@triton.jit
def _rows_beside(
    tile, block, n_first, n_beside, n_buffer, n_q, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Rows of q of a tile of those beside points of a block of the buffer, n_q where there is none,
    and these points.
    """
    n_each = tl.minimum(BLOCK_N, n_buffer - block * BLOCK_N)  # of a group
    at = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    beside = at // n_each * n_buffer
    place = block * BLOCK_N + at % n_each
    return tl.where(beside < n_beside, n_first + beside + place, n_q), place


@triton.jit
def _load_block(
    k_ptr, v_ptr, stride_kn, stride_vn, block, n_seen, n_context, n_buffer,
    C_BLOCKS: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Keys and values of a block, 0 where there is none and where they are padding of the context."""
    offs_n = _first_key(block, n_context, C_BLOCKS, BLOCK_N) + tl.arange(0, BLOCK_N)
    end = tl.where(block < C_BLOCKS, n_seen, n_context + n_buffer)
    k = load_rows(k_ptr, offs_n, end, stride_kn, HEAD_DIM, True)
    v = load_rows(v_ptr, offs_n, end, stride_vn, HEAD_DIM, True)
    return k, v


@triton.jit
def _first_key(block, n_context, C_BLOCKS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Of a block: those of the buffer begin at n_context."""
    return block * BLOCK_N + tl.where(block < C_BLOCKS, 0, n_context - C_BLOCKS * BLOCK_N)


@triton.jit
def _scores(
    q, k, block, n_seen, place, IN_CONTEXT: tl.constexpr, C_BLOCKS: tl.constexpr,
    BLOCK_N: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """q kᵀ of a block of keys, −inf where a row does not see a key: of the context it sees the
    first n_seen, which are whole blocks unless RAGGED, and of the buffer points up to `place`.
    """
    s = dot(q, tl.trans(k))
    offs_n = tl.arange(0, BLOCK_N)[None, :]
    if not IN_CONTEXT:
        point = (block - C_BLOCKS) * BLOCK_N + offs_n
        s = tl.where(point <= place[:, None], s, float("-inf"))
    elif RAGGED:
        s = tl.where(block * BLOCK_N + offs_n < n_seen, s, float("-inf"))
    return s


# ----------------------------------------------------------------------------------- forward


@triton.jit
def _add_weighted(
    q, k, v, m, l, o, scale_log2, n_seen, place, BLOCK: tl.constexpr, C_BLOCKS: tl.constexpr,
    BLOCK_N: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Running maximum, sum and weighted values with a block of keys more, of which a row may see
    none; of the first it sees some.
    """
    s = _scores(q, k, BLOCK, n_seen, place, BLOCK < C_BLOCKS, C_BLOCKS, BLOCK_N, RAGGED)
    s *= scale_log2
    m_new = tl.maximum(m, tl.max(s, 1))
    p = tl.math.exp2(s - m_new[:, None])
    rescale = tl.math.exp2(m - m_new)
    o = add_dot(cast(p, v.dtype), v, o * rescale[:, None])
    return m_new, l * rescale + tl.sum(p, 1), o


@triton.jit
def _attend(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, stride_qm, stride_kn, stride_vn, stride_om,
    n_q, n_seen, n_context, n_buffer, n_first, n_beside, first, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr,
    C_BLOCKS: tl.constexpr, SEEN: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """TILES tiles from the first on, of the rows that see SEEN blocks of keys."""
    k_0, v_0 = _load_block(
        k_ptr, v_ptr, stride_kn, stride_vn, 0, n_seen, n_context, n_buffer, C_BLOCKS, BLOCK_N,
        HEAD_DIM,
    )  # fmt: skip
    if SEEN > 1:
        k_1, v_1 = _load_block(
            k_ptr, v_ptr, stride_kn, stride_vn, 1, n_seen, n_context, n_buffer, C_BLOCKS, BLOCK_N,
            HEAD_DIM,
        )  # fmt: skip
    if SEEN > 2:
        k_2, v_2 = _load_block(
            k_ptr, v_ptr, stride_kn, stride_vn, 2, n_seen, n_context, n_buffer, C_BLOCKS, BLOCK_N,
            HEAD_DIM,
        )  # fmt: skip
    if SEEN > 3:
        k_3, v_3 = _load_block(
            k_ptr, v_ptr, stride_kn, stride_vn, 3, n_seen, n_context, n_buffer, C_BLOCKS, BLOCK_N,
            HEAD_DIM,
        )  # fmt: skip
    for tile in tl.range(first, first + TILES):
        if SEEN == C_BLOCKS:
            rows = _rows_alone(tile, n_first, n_beside, n_q, BLOCK_M)
            place = rows
        else:
            rows, place = _rows_beside(
                tile, SEEN - C_BLOCKS - 1, n_first, n_beside, n_buffer, n_q, BLOCK_M, BLOCK_N
            )
        q = load_rows(q_ptr, rows, n_q, stride_qm, HEAD_DIM, True)
        s = _scores(q, k_0, 0, n_seen, place, True, C_BLOCKS, BLOCK_N, RAGGED) * scale_log2
        m = tl.max(s, 1)
        p = tl.math.exp2(s - m[:, None])
        l = tl.sum(p, 1)  # noqa: E741
        o = dot(cast(p, v_0.dtype), v_0)
        if SEEN > 1:
            m, l, o = _add_weighted(  # noqa: E741
                q, k_1, v_1, m, l, o, scale_log2, n_seen, place, 1, C_BLOCKS, BLOCK_N, RAGGED
            )
        if SEEN > 2:
            m, l, o = _add_weighted(  # noqa: E741
                q, k_2, v_2, m, l, o, scale_log2, n_seen, place, 2, C_BLOCKS, BLOCK_N, RAGGED
            )
        if SEEN > 3:
            m, l, o = _add_weighted(  # noqa: E741
                q, k_3, v_3, m, l, o, scale_log2, n_seen, place, 3, C_BLOCKS, BLOCK_N, RAGGED
            )
        store_rows(o_ptr, o * (1.0 / l)[:, None], rows, n_q, stride_om, HEAD_DIM)
        tl.store(lse_ptr + rows, m + tl.math.log2(l), mask=rows < n_q)


@triton.jit(do_not_specialize=COUNTS)
def _buffered_attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, n_keys_ptr,
    stride_qb, stride_qh, stride_qm,
    stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn,
    stride_ob, stride_oh, stride_om,
    n_heads, n_q, n_context, n_buffer, n_first, n_beside, n_alone, n_each, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr,
    C_BLOCKS: tl.constexpr, N_BLOCKS: tl.constexpr, RAGGED: tl.constexpr,
    HAS_N_KEYS: tl.constexpr,
):  # fmt: skip
    """Of a head's programs n_alone take rows that see the context alone, and n_each those that see
    one block of the buffer, two blocks, and so on.
    """
    n_programs = n_alone + N_BLOCKS * n_each
    h = tl.program_id(0) % n_heads
    pid = tl.program_id(0) // n_heads % n_programs
    b = tl.program_id(0) // n_heads // n_programs
    pid_bh = b * n_heads + h
    q_ptr = head_ptr(q_ptr, stride_qb, stride_qh, pid_bh, n_heads)
    k_ptr = head_ptr(k_ptr, stride_kb, stride_kh, pid_bh, n_heads)
    v_ptr = head_ptr(v_ptr, stride_vb, stride_vh, pid_bh, n_heads)
    o_ptr = head_ptr(o_ptr, stride_ob, stride_oh, pid_bh, n_heads)
    lse_ptr += pid_bh.to(tl.int64) * n_q
    n_seen = key_count(n_keys_ptr, b, n_context, HAS_N_KEYS)
    if pid < n_alone:
        _attend(
            q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, stride_qm, stride_kn, stride_vn, stride_om,
            n_q, n_seen, n_context, n_buffer, n_first, n_beside, pid * TILES, scale_log2,
            HEAD_DIM, BLOCK_M, BLOCK_N, TILES, C_BLOCKS, C_BLOCKS, RAGGED,
        )  # fmt: skip
    for j in tl.static_range(N_BLOCKS):
        begin = n_alone + j * n_each
        if (pid >= begin) & (pid < begin + n_each):
            _attend(
                q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, stride_qm, stride_kn, stride_vn, stride_om,
                n_q, n_seen, n_context, n_buffer, n_first, n_beside, (pid - begin) * TILES,
                scale_log2, HEAD_DIM, BLOCK_M, BLOCK_N, TILES, C_BLOCKS, C_BLOCKS + j + 1, RAGGED,
            )  # fmt: skip


# ---------------------------------------------------------------------------------- backward


@triton.jit
def _rows_of_segment(
    i, least, segment, chunk_each, chunk_last, n_first, n_beside, n_buffer, n_q,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, N_BLOCKS: tl.constexpr,
):  # fmt: skip
    """The i-th tile of a segment's rows beside blocks of the buffer from `least` on: see
    `_rows_beside`.
    """
    block = least + i // chunk_each
    mine = segment * tl.where(block < N_BLOCKS - 1, chunk_each, chunk_last)
    return _rows_beside(
        mine + i % chunk_each, block, n_first, n_beside, n_buffer, n_q, BLOCK_M, BLOCK_N
    )


@triton.jit
def _store_delta(
    o_ptr, do_ptr, delta_ptr, stride_om, stride_dom, rows, n_q, HEAD_DIM: tl.constexpr
):
    """Of these rows Σ o ∘ do, which is that of p ∘ dp over all keys."""
    o = load_rows(o_ptr, rows, n_q, stride_om, HEAD_DIM, True)
    do = load_rows(do_ptr, rows, n_q, stride_dom, HEAD_DIM, True)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(delta_ptr + rows, delta, mask=rows < n_q)


@triton.jit
def _add_gradients(
    q_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, stride_qm, stride_dom, stride_dqm,
    rows, place, n_q, n_seen, block, scale, scale_log2, k, v, dk_t, dv_t,
    HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, C_BLOCKS: tl.constexpr, RAGGED: tl.constexpr,
    IN_CONTEXT: tl.constexpr, ALL: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """dkᵀ and dvᵀ of a block of keys with what these rows add to them; dq gains what the block adds
    to it.

    ALL: the block is all that these rows see. FIRST: it is the first that they see.
    """
    q = load_rows(q_ptr, rows, n_q, stride_qm, HEAD_DIM, True)
    do = load_rows(do_ptr, rows, n_q, stride_dom, HEAD_DIM, True)
    lse = tl.load(lse_ptr + rows, mask=rows < n_q, other=0.0)
    s = _scores(q, k, block, n_seen, place, IN_CONTEXT, C_BLOCKS, BLOCK_N, RAGGED)
    p = tl.math.exp2(s * scale_log2 - lse[:, None])
    dp = dot(do, tl.trans(v))
    if ALL:
        # An lse off by a rounding scales all p of a row: divided by their sum, delta is exact.
        delta = tl.sum(p * dp, 1) / tl.sum(p, 1)
    else:
        delta = tl.load(delta_ptr + rows, mask=rows < n_q, other=0.0)
    ds = cast(p * (dp - delta[:, None]), k.dtype)
    # Transposed sums need no transpose of p and ds, only of tiles in shared memory; a computed left
    # operand that is transposed came out wrong on 64-wide tiles (triton 3.4 to 3.7).
    dv_t = add_dot(tl.trans(do), cast(p, do.dtype), dv_t)
    dk_t = add_dot(tl.trans(q), ds, dk_t)
    dq = dot(ds, k) * scale
    if not FIRST:
        dq += load_rows(dq_ptr, rows, n_q, stride_dqm, HEAD_DIM, True).to(tl.float32)
    store_rows(dq_ptr, dq, rows, n_q, stride_dqm, HEAD_DIM)
    return dk_t, dv_t


@triton.jit
def _gradients_of_block(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, dk_ptr, dv_ptr,
    stride_qm, stride_kn, stride_vn, stride_dom, stride_dqm, stride_dkn,
    n_q, n_seen, n_context, n_buffer, n_first, n_beside, segment, chunk, chunk_each, chunk_last,
    block, scale, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    C_BLOCKS: tl.constexpr, N_BLOCKS: tl.constexpr, RAGGED: tl.constexpr,
    IN_CONTEXT: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Walks the rows that see a block of keys: of the context all, of the buffer those beside it
    and beside the blocks after it.
    """
    k, v = _load_block(
        k_ptr, v_ptr, stride_kn, stride_vn, block, n_seen, n_context, n_buffer, C_BLOCKS, BLOCK_N,
        HEAD_DIM,
    )  # fmt: skip
    dk_t = tl.zeros([HEAD_DIM, BLOCK_N], tl.float32)
    dv_t = tl.zeros([HEAD_DIM, BLOCK_N], tl.float32)
    least = 0
    end = n_context
    if IN_CONTEXT:
        for tile in tl.range(segment * chunk, (segment + 1) * chunk):
            rows = _rows_alone(tile, n_first, n_beside, n_q, BLOCK_M)
            dk_t, dv_t = _add_gradients(
                q_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, stride_qm, stride_dom, stride_dqm,
                rows, rows, n_q, n_seen, block, scale, scale_log2, k, v, dk_t, dv_t,
                HEAD_DIM, BLOCK_N, C_BLOCKS, RAGGED, True, C_BLOCKS == 1, FIRST,
            )  # fmt: skip
    else:
        least = block - C_BLOCKS
        end = n_context + n_buffer
    for i in tl.range(0, (N_BLOCKS - 1 - least) * chunk_each + chunk_last):
        rows, place = _rows_of_segment(
            i, least, segment, chunk_each, chunk_last, n_first, n_beside, n_buffer, n_q, BLOCK_M,
            BLOCK_N, N_BLOCKS,
        )  # fmt: skip
        dk_t, dv_t = _add_gradients(
            q_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, stride_qm, stride_dom, stride_dqm,
            rows, place, n_q, n_seen, block, scale, scale_log2, k, v, dk_t, dv_t,
            HEAD_DIM, BLOCK_N, C_BLOCKS, RAGGED, IN_CONTEXT, False, FIRST,
        )  # fmt: skip
    offs_n = _first_key(block, n_context, C_BLOCKS, BLOCK_N) + tl.arange(0, BLOCK_N)
    store_rows(dv_ptr, tl.trans(dv_t), offs_n, end, stride_dkn, HEAD_DIM)
    store_rows(dk_ptr, tl.trans(dk_t) * scale, offs_n, end, stride_dkn, HEAD_DIM)


@triton.jit(do_not_specialize=COUNTS)
def _buffered_attention_bwd_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, dk_ptr, dv_ptr, n_keys_ptr,
    stride_qb, stride_qh, stride_qm,
    stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn,
    stride_ob, stride_oh, stride_om,
    stride_dob, stride_doh, stride_dom,
    stride_dqb, stride_dqh, stride_dqm,
    stride_dkb, stride_dkh, stride_dkn, stride_dks,
    n_heads, n_q, n_context, n_buffer, n_first, n_beside,
    n_segments, chunk, chunk_each, chunk_last, scale, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    C_BLOCKS: tl.constexpr, N_BLOCKS: tl.constexpr, RAGGED: tl.constexpr,
    HAS_N_KEYS: tl.constexpr,
):  # fmt: skip
    """dk and dv share strides. A program takes `chunk` tiles of rows that see the context alone,
    chunk_each of those beside each block of the buffer, and chunk_last of those beside its last: in
    every block's turn the same rows, so that nobody else writes into their dq.
    """
    h = tl.program_id(0) % n_heads
    segment = tl.program_id(0) // n_heads % n_segments
    b = tl.program_id(0) // n_heads // n_segments
    pid_bh = b * n_heads + h
    q_ptr = head_ptr(q_ptr, stride_qb, stride_qh, pid_bh, n_heads)
    k_ptr = head_ptr(k_ptr, stride_kb, stride_kh, pid_bh, n_heads)
    v_ptr = head_ptr(v_ptr, stride_vb, stride_vh, pid_bh, n_heads)
    o_ptr = head_ptr(o_ptr, stride_ob, stride_oh, pid_bh, n_heads)
    do_ptr = head_ptr(do_ptr, stride_dob, stride_doh, pid_bh, n_heads)
    dq_ptr = head_ptr(dq_ptr, stride_dqb, stride_dqh, pid_bh, n_heads)
    part = segment.to(tl.int64) * stride_dks
    dk_ptr = head_ptr(dk_ptr, stride_dkb, stride_dkh, pid_bh, n_heads) + part
    dv_ptr = head_ptr(dv_ptr, stride_dkb, stride_dkh, pid_bh, n_heads) + part
    lse_ptr += pid_bh.to(tl.int64) * n_q
    delta_ptr += pid_bh.to(tl.int64) * n_q
    n_seen = key_count(n_keys_ptr, b, n_context, HAS_N_KEYS)
    if C_BLOCKS > 1:
        for tile in tl.range(segment * chunk, (segment + 1) * chunk):
            rows = _rows_alone(tile, n_first, n_beside, n_q, BLOCK_M)
            _store_delta(o_ptr, do_ptr, delta_ptr, stride_om, stride_dom, rows, n_q, HEAD_DIM)
    for i in tl.range(0, (N_BLOCKS - 1) * chunk_each + chunk_last):
        rows, _ = _rows_of_segment(
            i, 0, segment, chunk_each, chunk_last, n_first, n_beside, n_buffer, n_q, BLOCK_M,
            BLOCK_N, N_BLOCKS,
        )  # fmt: skip
        _store_delta(o_ptr, do_ptr, delta_ptr, stride_om, stride_dom, rows, n_q, HEAD_DIM)
    for block in tl.static_range(C_BLOCKS + N_BLOCKS):
        tl.debug_barrier()  # what one thread wrote of delta and dq another may read
        _gradients_of_block(
            q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, dk_ptr, dv_ptr,
            stride_qm, stride_kn, stride_vn, stride_dom, stride_dqm, stride_dkn,
            n_q, n_seen, n_context, n_buffer, n_first, n_beside, segment, chunk, chunk_each,
            chunk_last, block, scale, scale_log2, HEAD_DIM, BLOCK_M, BLOCK_N, C_BLOCKS, N_BLOCKS,
            RAGGED, block < C_BLOCKS, block == 0,
        )  # fmt: skip


# ---------------------------------------------------------------------------------- launches

# Rows of a tile, tiles that a program walks, warps and stages, by bytes per element and capability
# (elsewhere: 80), the default first; none spills there.
FORWARD_TILES = {
    (2, 80): ((64, 1, 4, 1),),
    (2, 90): ((64, 1, 4, 1), (64, 2, 4, 2), (64, 3, 4, 2), (128, 1, 8, 1), (128, 2, 8, 2)),
    (4, 80): ((16, 1, 8, 1),),
}
# Rows, warps and stages, likewise.
BACKWARD_TILES = {
    (2, 80): ((32, 8, 2), (32, 4, 1)),
    (2, 90): ((64, 4, 1), (128, 8, 2), (64, 8, 2)),
    (4, 80): ((16, 8, 1),),
}


def _tiles(tiles: dict, call: Call) -> tuple:
    key = call.problem.itemsize, call.target.capability
    return tiles.get(key, tiles[key[0], 80])


def forward_configs(call: Call) -> tuple[ForwardConfig, ...]:
    """Candidates, the default first."""
    return tuple(ForwardConfig(*one) for one in _tiles(FORWARD_TILES, call))


def backward_configs(call: Call) -> tuple[BackwardConfig, ...]:
    """Candidates, the default first."""
    return tuple(BackwardConfig(*one) for one in _tiles(BACKWARD_TILES, call))


def _constants(problem: Problem) -> dict:
    """What both kernels are compiled for, beside their configurations."""
    c_blocks, of_buffer = n_blocks(problem)
    return {
        "HEAD_DIM": problem["head_dim"],
        "BLOCK_N": BLOCK_N,
        "C_BLOCKS": c_blocks,
        "N_BLOCKS": of_buffer,
        "RAGGED": bool(problem["n_keys"] or Rows.of(problem).n_context % BLOCK_N),
        "HAS_N_KEYS": problem["n_keys"],
    }


def _scale(problem: Problem, scalars: tuple) -> float:
    """That of scores ahead of e^."""
    return LN_2 if problem["base2"] else scalars[0]


def empty(wanted: tuple[str, ...], inputs: tuple, n_buffer: int) -> tuple[tuple, tuple]:
    """As of attention: o laid out [B, n_q, H, D], and saved lse."""
    return primitives.empty(wanted, inputs)


def prepare_forward(call: Call, config: ForwardConfig, inputs: tuple) -> Callable:
    """One launch."""
    p, rows = call.problem, Rows.of(call.problem)
    q, k, v, n_keys = inputs
    of_o, of_lse = rows_layout(q), lse_layout(q)
    walked = config.tiles * config.block_m
    n_alone = triton.cdiv(rows.n_alone, walked)
    n_each = triton.cdiv(rows.n_groups * min(BLOCK_N, rows.n_buffer), walked)
    n_programs = n_alone + n_blocks(p)[1] * n_each
    kernel = Bound(
        _buffered_attention_fwd_kernel, (p["batch"] * p["n_heads"] * n_programs,),
        *row_strides(q), *row_strides(k), *row_strides(v), *of_o[1][:3],
        p["n_heads"], rows.n_q, rows.n_context, rows.n_buffer, rows.n_first, rows.n_beside,
        n_alone, n_each, **_constants(p), **config.kernel_arguments(),
    )  # fmt: skip

    def launch(inputs, scalars):
        q, k, v, n_keys = inputs
        o = q.new_empty_strided(*of_o)
        lse = q.new_empty_strided(*of_lse, dtype=torch.float32)
        kernel(q, k, v, o, lse, q if n_keys is None else n_keys, _scale(p, scalars) * LOG2_E)
        return (o,), (lse,)

    return primitives.asserting(launch, call, rows.n_context)


@dataclass(frozen=True)
class _Shares:
    """Programs that share a head's rows, and the tiles of one of them: of rows that see the context
    alone, of those beside each block of the buffer, and beside its last.
    """

    n_segments: int
    alone: int
    each: int
    last: int

    @classmethod
    def of(cls, call: Call, block_m: int) -> "_Shares":
        p, rows = call.problem, Rows.of(call.problem)
        whole, last = BLOCK_N * (n_blocks(p)[1] - 1), rows.n_buffer
        counts = (
            rows.n_alone,
            rows.n_groups * min(BLOCK_N, rows.n_buffer),
            rows.n_groups * (last - whole),
        )
        tiles = [triton.cdiv(count, block_m) for count in counts]
        wanted = full_grid(call.target) // (p["batch"] * p["n_heads"])
        n_segments, _ = segments(max(tiles), wanted, least=1)
        return cls(n_segments, *(triton.cdiv(n, n_segments) for n in tiles))


def prepare_backward(call: Call, config: BackwardConfig, inputs: tuple) -> Callable:
    """One launch, or one that leaves parts and one that adds them up."""
    p, rows, shares = call.problem, Rows.of(call.problem), _Shares.of(call, config.block_m)
    (do,), (q, k, v, n_keys, o), (lse,) = inputs
    copies = primitives.is_unreadable(do)
    readable = do.contiguous() if copies else do
    of_q, of_keys, of_lse = rows_layout(q), KeyGradients(k, call.apart), lse_layout(q)
    partials = Partials(k, shares.n_segments, of_keys) if shares.n_segments > 1 else None
    kernel = Bound(
        _buffered_attention_bwd_kernel, (p["batch"] * p["n_heads"] * shares.n_segments,),
        *row_strides(q), *row_strides(k), *row_strides(v), *row_strides(o), *row_strides(readable),
        *of_q[1][:3], *(partials or of_keys).strides, partials.segment if partials else 0,
        p["n_heads"], rows.n_q, rows.n_context, rows.n_buffer, rows.n_first, rows.n_beside,
        shares.n_segments, shares.alone, shares.each, shares.last,
        **_constants(p), **config.kernel_arguments(),
    )  # fmt: skip
    given = tuple(name in call.wanted for name in ("q", "k", "v"))

    def launch(inputs, scalars):
        (do,), (q, k, v, n_keys, o), (lse,) = inputs
        if copies:
            do = do.contiguous()
        dq = q.new_empty_strided(*of_q)
        dk, dv = of_keys.allocate(k)
        dk_part, dv_part = partials.allocate(lse) if partials else (dk, dv)
        delta = lse.new_empty_strided(*of_lse)
        scale = _scale(p, scalars)
        kernel(
            q, k, v, o, do, lse, delta, dq, dk_part, dv_part, q if n_keys is None else n_keys,
            scale, scale * LOG2_E,
        )  # fmt: skip
        if partials:
            partials.add(dk_part, dk, dv)
        gradients = zip((dq, dk, dv), given, strict=True)
        return tuple([x if one else None for x, one in gradients])

    return launch


FORWARD = Kernel("triton", empty, prepare_forward, configs=forward_configs, options=TAKEN)
# One launch without atomics: its gradients are equal from run to run.
BACKWARD = Kernel(
    "triton", primitives.empty_backward, prepare_backward, configs=backward_configs, options=TAKEN
)
