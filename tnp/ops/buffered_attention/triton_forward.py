"""Computes attention around a buffer in one launch, with all keys of a program on chip."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tnp.dispatch.launcher import Bound
from tnp.dispatch.spec import Call, Kernel
from tnp.ops._shared.primitives import KernelConfig, add_dot, cast, dot, key_count, nan_outside
from tnp.ops.attention import primitives
from tnp.ops.attention.primitives import (
    LOG2_E,
    head_ptr,
    load_rows,
    lse_layout,
    row_strides,
    rows_layout,
    scaled,
    store_rows,
    with_counted_keys,
)
from tnp.ops.buffered_attention.definition import BLOCK_N, TAKEN, Rows, n_blocks
from tnp.ops.buffered_attention.primitives import (
    COUNTS,
    constants,
    load_block,
    rows_alone,
    rows_beside,
    scores,
)


@dataclass(frozen=True)
class ForwardConfig(KernelConfig):
    """Configures the launch: rows of a tile, tiles of a program, warps and stages."""

    block_m: int
    tiles: int
    num_warps: int
    num_stages: int


# The configurations by bytes per element. `tnp.gates.compile` checks that none spills. In 16 bits
# the other timed configurations take 1.1 to 1.5 times as long, and in the backward pass 1.1 to 2.2
# times (small with a buffer of 128, H100).
CONFIGS = {2: ForwardConfig(64, 1, 4, 1), 4: ForwardConfig(16, 1, 8, 1)}


@triton.jit
def _add_weighted(
    q, k, v, m, l, o, scale_log2, n_seen, place,  # noqa: E741
    BLOCK: tl.constexpr, C_BLOCKS: tl.constexpr, BLOCK_N: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Returns m, l and o, a row's maximum, sum and weighted values, after one more block of keys.

    A row may see none of its keys. Each row sees some key of the first block.
    """
    s = scores(q, k, BLOCK, n_seen, place, BLOCK < C_BLOCKS, C_BLOCKS, BLOCK_N, RAGGED)
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
    """Writes o and lse of TILES tiles of rows that see SEEN blocks of keys, from `first` on."""
    k_0, v_0 = load_block(
        k_ptr, v_ptr, stride_kn, stride_vn, 0, n_seen, n_context, n_buffer, C_BLOCKS, BLOCK_N,
        HEAD_DIM,
    )  # fmt: skip
    if SEEN > 1:
        k_1, v_1 = load_block(
            k_ptr, v_ptr, stride_kn, stride_vn, 1, n_seen, n_context, n_buffer, C_BLOCKS, BLOCK_N,
            HEAD_DIM,
        )  # fmt: skip
    if SEEN > 2:
        k_2, v_2 = load_block(
            k_ptr, v_ptr, stride_kn, stride_vn, 2, n_seen, n_context, n_buffer, C_BLOCKS, BLOCK_N,
            HEAD_DIM,
        )  # fmt: skip
    if SEEN > 3:
        k_3, v_3 = load_block(
            k_ptr, v_ptr, stride_kn, stride_vn, 3, n_seen, n_context, n_buffer, C_BLOCKS, BLOCK_N,
            HEAD_DIM,
        )  # fmt: skip
    for tile in tl.range(first, first + TILES):
        if SEEN == C_BLOCKS:
            rows = rows_alone(tile, n_first, n_beside, n_q, BLOCK_M)
            place = rows
        else:
            rows, place = rows_beside(
                tile, SEEN - C_BLOCKS - 1, n_first, n_beside, n_buffer, n_q, BLOCK_M, BLOCK_N
            )
        q = load_rows(q_ptr, rows, n_q, stride_qm, HEAD_DIM, True)
        s = scores(q, k_0, 0, n_seen, place, True, C_BLOCKS, BLOCK_N, RAGGED) * scale_log2
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
    """Writes o and lse.

    A head's first n_alone programs take rows that see only the context. The next n_each take rows
    that see one block of the buffer, the next n_each rows that see two, and so on.
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
    scale_log2 = nan_outside(scale_log2, n_keys_ptr, b, n_context, HAS_N_KEYS)
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


def configs(call: Call) -> tuple[ForwardConfig, ...]:
    return (CONFIGS[call.problem.itemsize],)


def empty(wanted: tuple[str, ...], inputs: tuple, n_buffer: int) -> tuple[tuple, tuple]:
    """Returns o, in memory [B, n_q, H, D], and the saved lse, like attention's `empty`."""
    return primitives.empty(wanted, inputs)


def prepare(call: Call, config: ForwardConfig, inputs: tuple) -> Callable:
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
        n_alone, n_each, **constants(p), **config.kernel_arguments(),
    )  # fmt: skip

    def launch(inputs, scalars):
        q, k, v, n_keys = inputs
        o = q.new_empty_strided(*of_o)
        lse = q.new_empty_strided(*of_lse, dtype=torch.float32)
        kernel(q, k, v, o, lse, q if n_keys is None else n_keys, scalars[0] * LOG2_E)
        return (o,), (lse,)

    return with_counted_keys(scaled(launch, call), call, rows.n_context, "n_k − n_buffer")


FORWARD = Kernel("triton", empty, prepare, configs=configs, options=TAKEN)
