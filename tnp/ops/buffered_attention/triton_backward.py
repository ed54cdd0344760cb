"""Computes the backward pass of attention around a buffer, in one launch.

A program takes a head, and one block of keys after another. A block's gradients stay in registers
while the program walks the rows that see it. The same program adds up dq in memory, in dq's dtype.
That costs one rounding a block, which is little beside the rounding of o in delta. Gradients of
three blocks at once do not fit the registers.

Delta, the sum of p ∘ dp over all keys, equals the sum of do ∘ o and is computed first. If a row
sees one block only, delta is summed there, and o is not read. If the heads are too few to fill the
GPU, several programs share a head's rows. They leave float32 partials of dk and dv, which a second
launch adds up in a fixed order.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from tnp.dispatch.launcher import Bound
from tnp.dispatch.spec import Call, Kernel
from tnp.ops._shared.primitives import KernelConfig, dot, key_count
from tnp.ops.attention.primitives import (
    LOG2_E,
    KeyGradients,
    Partials,
    add_gradients,
    backward,
    empty_backward,
    full_grid,
    head_ptr,
    load_rows,
    lse_layout,
    own_delta,
    row_strides,
    rows_layout,
    segments,
    store_rows,
)
from tnp.ops.buffered_attention.definition import BLOCK_N, TAKEN, Rows, n_blocks
from tnp.ops.buffered_attention.primitives import (
    COUNTS,
    constants,
    first_key,
    load_block,
    rows_alone,
    rows_beside,
    scores,
)


@dataclass(frozen=True)
class BackwardConfig(KernelConfig):
    """Configures the launch: rows of a tile, warps and stages."""

    block_m: int
    num_warps: int
    num_stages: int


# The configurations by bytes per element. `tnp.gates.compile` checks that none spills.
CONFIGS = {2: BackwardConfig(32, 8, 2), 4: BackwardConfig(16, 8, 1)}
WIDE_TARGETS, WIDE_CONFIG = (90,), BackwardConfig(64, 4, 1)  # WIDE_CONFIG serves 16 bits


@triton.jit
def _rows_of_segment(
    i, least, segment, chunk_each, chunk_last, n_first, n_beside, n_buffer, n_q,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, N_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Returns `rows_beside` for the i-th tile of a segment's rows beside blocks from `least` on."""
    block = least + i // chunk_each
    mine = segment * tl.where(block < N_BLOCKS - 1, chunk_each, chunk_last)
    return rows_beside(
        mine + i % chunk_each, block, n_first, n_beside, n_buffer, n_q, BLOCK_M, BLOCK_N
    )


@triton.jit
def _store_delta(
    o_ptr, do_ptr, delta_ptr, stride_om, stride_dom, rows, n_q, HEAD_DIM: tl.constexpr
):
    """Stores delta of these rows: Σ o ∘ do, which equals Σ p ∘ dp over all keys."""
    o = load_rows(o_ptr, rows, n_q, stride_om, HEAD_DIM, True)
    do = load_rows(do_ptr, rows, n_q, stride_dom, HEAD_DIM, True)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(delta_ptr + rows, delta, mask=rows < n_q)


@triton.jit
def _add_tile(
    q_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, stride_qm, stride_dom, stride_dqm,
    rows, place, n_q, n_seen, block, scale, scale_log2, k, v, dk_t, dv_t,
    HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, C_BLOCKS: tl.constexpr, RAGGED: tl.constexpr,
    IN_CONTEXT: tl.constexpr, ALL: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Returns dkᵀ and dvᵀ of a block of keys with what these rows add, and adds to dq in memory.

    ALL: these rows see no other block. FIRST: it is the first block that they see.
    """
    q = load_rows(q_ptr, rows, n_q, stride_qm, HEAD_DIM, True)
    do = load_rows(do_ptr, rows, n_q, stride_dom, HEAD_DIM, True)
    lse = tl.load(lse_ptr + rows, mask=rows < n_q, other=0.0)
    s = scores(q, k, block, n_seen, place, IN_CONTEXT, C_BLOCKS, BLOCK_N, RAGGED)
    p = tl.math.exp2(s * scale_log2 - lse[:, None])
    dp = dot(do, tl.trans(v))
    if ALL:  # noqa: SIM108
        delta = own_delta(p, dp)
    else:
        delta = tl.load(delta_ptr + rows, mask=rows < n_q, other=0.0)
    dq, dk_t, dv_t = add_gradients(q, do, k, p, dp, delta, dk_t, dv_t)
    dq *= scale
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
    """Walks the rows that see a block of keys, and writes its dk and dv.

    All rows see a block of the context. Rows beside a block of the buffer, or beside a later one,
    see that block.
    """
    k, v = load_block(
        k_ptr, v_ptr, stride_kn, stride_vn, block, n_seen, n_context, n_buffer, C_BLOCKS, BLOCK_N,
        HEAD_DIM,
    )  # fmt: skip
    dk_t = tl.zeros([HEAD_DIM, BLOCK_N], tl.float32)
    dv_t = tl.zeros([HEAD_DIM, BLOCK_N], tl.float32)
    least = 0
    end = n_context
    if IN_CONTEXT:
        for tile in tl.range(segment * chunk, (segment + 1) * chunk):
            rows = rows_alone(tile, n_first, n_beside, n_q, BLOCK_M)
            dk_t, dv_t = _add_tile(
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
        dk_t, dv_t = _add_tile(
            q_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, stride_qm, stride_dom, stride_dqm,
            rows, place, n_q, n_seen, block, scale, scale_log2, k, v, dk_t, dv_t,
            HEAD_DIM, BLOCK_N, C_BLOCKS, RAGGED, IN_CONTEXT, False, FIRST,
        )  # fmt: skip
    offs_n = first_key(block, n_context, C_BLOCKS, BLOCK_N) + tl.arange(0, BLOCK_N)
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
    """Writes dq, dk and dv. dk and dv share strides.

    A program takes `chunk` tiles of rows that see only the context, chunk_each tiles beside each
    block of the buffer, and chunk_last tiles beside its last block. For every block it takes the
    same rows, so that no other program writes into their dq.
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
            rows = rows_alone(tile, n_first, n_beside, n_q, BLOCK_M)
            _store_delta(o_ptr, do_ptr, delta_ptr, stride_om, stride_dom, rows, n_q, HEAD_DIM)
    for i in tl.range(0, (N_BLOCKS - 1) * chunk_each + chunk_last):
        rows, _ = _rows_of_segment(
            i, 0, segment, chunk_each, chunk_last, n_first, n_beside, n_buffer, n_q, BLOCK_M,
            BLOCK_N, N_BLOCKS,
        )  # fmt: skip
        _store_delta(o_ptr, do_ptr, delta_ptr, stride_om, stride_dom, rows, n_q, HEAD_DIM)
    for block in tl.static_range(C_BLOCKS + N_BLOCKS):
        tl.debug_barrier()  # a thread may read delta and dq that another thread wrote
        _gradients_of_block(
            q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, dk_ptr, dv_ptr,
            stride_qm, stride_kn, stride_vn, stride_dom, stride_dqm, stride_dkn,
            n_q, n_seen, n_context, n_buffer, n_first, n_beside, segment, chunk, chunk_each,
            chunk_last, block, scale, scale_log2, HEAD_DIM, BLOCK_M, BLOCK_N, C_BLOCKS, N_BLOCKS,
            RAGGED, block < C_BLOCKS, block == 0,
        )  # fmt: skip


def configs(call: Call) -> tuple[BackwardConfig, ...]:
    itemsize = call.problem.itemsize
    wide = itemsize == 2 and call.target.capability in WIDE_TARGETS
    return (WIDE_CONFIG if wide else CONFIGS[itemsize],)


@dataclass(frozen=True)
class _Shares:
    """Counts the programs that share a head's rows, and the tiles of one program.

    A program has tiles of rows that see only the context, tiles of rows beside each block of the
    buffer, and tiles of rows beside the last block.
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


@backward
def prepare(call, config, do, q, k, v, lengths, o, lse, dlse):
    """Prepares one launch, or one that leaves parts and one that adds them up."""
    p, rows, shares = call.problem, Rows.of(call.problem), _Shares.of(call, config.block_m)
    of_q, of_keys, of_lse = rows_layout(q), KeyGradients(k, call.apart), lse_layout(q)
    partials = Partials(k, shares.n_segments, of_keys) if shares.n_segments > 1 else None
    kernel = Bound(
        _buffered_attention_bwd_kernel, (p["batch"] * p["n_heads"] * shares.n_segments,),
        *row_strides(q), *row_strides(k), *row_strides(v), *row_strides(o), *row_strides(do),
        *of_q[1][:3], *(partials or of_keys).strides, partials.segment if partials else 0,
        p["n_heads"], rows.n_q, rows.n_context, rows.n_buffer, rows.n_first, rows.n_beside,
        shares.n_segments, shares.alone, shares.each, shares.last,
        **constants(p), **config.kernel_arguments(),
    )  # fmt: skip

    def launch(do, q, k, v, lengths, o, lse, dlse, scale):
        (n_keys,) = lengths
        dq = q.new_empty_strided(*of_q)
        dk, dv = of_keys.allocate(k)
        dk_part, dv_part = partials.allocate(lse) if partials else (dk, dv)
        delta = lse.new_empty_strided(*of_lse)
        kernel(
            q, k, v, o, do, lse, delta, dq, dk_part, dv_part, q if n_keys is None else n_keys,
            scale, scale * LOG2_E,
        )  # fmt: skip
        if partials:
            partials.add(dk_part, dk, dv)
        return dq, dk, dv

    return launch


# It has no atomics, so gradients are equal from run to run.
BACKWARD = Kernel("triton", empty_backward, prepare, configs=configs, options=TAKEN)
