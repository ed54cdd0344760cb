"""Computes attention forward in portable Triton: online softmax over key tiles.

For a tile of queries, with s = scale·log2(e)·q kᵀ and running row maximum m and row sum l:

    m' = max(m, max_j s_j)    p = 2^(s − m')    l = l·2^(m − m') + Σ_j p_j
    o  = o·2^(m − m') + p v   and at the end  o / l,  lse = m + log2(l)

Products accumulate in float32; p is rounded to the inputs' dtype for the second matmul. It saves
`lse` [B, H, n_q] for the backward pass, in float32 and to base 2.

With n_keys, a sample's loop ends at its last key. If that number is out of range, l is NaN. Then o,
lse and, through lse, the gradients are NaN too. (Dao, FlashAttention-2, arXiv 2307.08691; Milakov
and Gimelshein, arXiv 1805.02867.)
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from tnp.dispatch.launcher import Bound
from tnp.dispatch.spec import Call, Kernel
from tnp.ops._shared.primitives import add_dot, cast, dot, nan_outside
from tnp.ops.attention.definition import WITH_LSE
from tnp.ops.attention.keys import Reach, Tiles, key_range, lengths_given, place, seen, whole_blocks
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
    of_all_seen,
    row_ptr,
    row_strides,
    rows_layout,
    store_rows,
    tile_width,
)

# Candidates by bytes per element and columns of a tile, the default first. `tnp.gates.compile`
# checks that none spills, and that MASKED ones do not spill with masks. In 16 bits at 64 columns,
# the default is the fastest of ten on an H200 (batch 4, 11,000 queries, 10,000 keys), and the last
# two were the fastest for 113 queries and 920 keys (11 µs). Other tiles are the largest that do not
# spill.
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
    (2, 256): (LaunchConfig(64, 32, 8, 2),),
    (4, 64): (LaunchConfig(32, 32, 8, 1),),
}
MASKED_CONFIGS = {(2, 128): (LaunchConfig(128, 32, 8, 3),)}


@triton.jit
def _fwd_tile(
    acc, l_i, m_i, q, k_ptr, v_ptr, offs_m, start_n, n_q, n_keys, stride_kn, stride_vn, left, right,
    scale_log2, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, MASKED: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """Returns acc, l_i and m_i after keys start_n … start_n + BLOCK_N − 1."""
    offs_n = start_n + tl.arange(0, BLOCK_N)
    k = load_rows(k_ptr, offs_n, n_keys, stride_kn, HEAD_DIM, MASKED)
    s = dot(q, tl.trans(k))
    if MASKED:
        visible = seen(offs_m[:, None], offs_n[None, :], n_q, n_keys, left, right, LEFT, RIGHT)
        s = tl.where(visible, s, float("-inf"))
    m_new = tl.maximum(m_i, tl.max(s, 1) * scale_log2)
    if MASKED and (LEFT or RIGHT):
        # A row that has seen no key yet has no maximum to subtract.
        reference = tl.where(m_new == float("-inf"), 0.0, m_new)
    else:
        reference = m_new
    p = tl.math.exp2(s * scale_log2 - reference[:, None])
    alpha = tl.math.exp2(m_i - reference)
    l_i = l_i * alpha + tl.sum(p, 1)
    v = load_rows(v_ptr, offs_n, n_keys, stride_vn, HEAD_DIM, MASKED)
    acc = add_dot(cast(p, v.dtype), v, acc * alpha[:, None])
    return acc, l_i, m_new


@triton.jit(do_not_specialize=["n_q", "n_k", "n_tiles", "left", "right"])
def _attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, tiles_ptr, cu_q_ptr, cu_k_ptr, n_keys_ptr,
    stride_qb, stride_qh, stride_qm,
    stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn,
    stride_ob, stride_oh, stride_om,
    n_heads, n_q, n_k, n_tiles, left, right, scale_log2,
    HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_N_KEYS: tl.constexpr, PACKED: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """Writes o and lse. A program owns a tile of queries."""
    pid_bh = tl.program_id(0) // n_tiles
    tile = tl.program_id(0) % n_tiles
    if RIGHT:
        tile = n_tiles - 1 - tile  # tiles that see most keys first, so that the last ones are short
    start_m, first_q, n_rows, first_k, n_keys = place(
        tile, pid_bh // n_heads, tiles_ptr, cu_q_ptr, cu_k_ptr, n_keys_ptr, n_q, n_k, BLOCK_M,
        PACKED, HAS_N_KEYS,
    )  # fmt: skip
    offs_m = start_m + tl.arange(0, BLOCK_M)
    pid_kv, n_kv_heads = pid_bh // GROUP, n_heads // GROUP
    q_ptr = row_ptr(head_ptr(q_ptr, stride_qb, stride_qh, pid_bh, n_heads), first_q, stride_qm)
    k_ptr = row_ptr(head_ptr(k_ptr, stride_kb, stride_kh, pid_kv, n_kv_heads), first_k, stride_kn)
    v_ptr = row_ptr(head_ptr(v_ptr, stride_vb, stride_vh, pid_kv, n_kv_heads), first_k, stride_vn)

    q = load_rows(q_ptr, offs_m, n_rows, stride_qm, HEAD_DIM, True)
    acc = tl.zeros([BLOCK_M, tile_width(HEAD_DIM)], tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    begin, full_begin, full_end, end = key_range(
        start_m, n_rows, n_keys, left, right, BLOCK_M, LEFT, RIGHT
    )
    first, full_first, full_last = whole_blocks(begin, full_begin, full_end, end, BLOCK_N)
    for part in tl.static_range(0 if LEFT else 1, 3):  # masked, unmasked, masked again
        begin = first if part == 0 else (full_first if part == 1 else full_last)
        stop = full_first if part == 0 else (full_last if part == 1 else end)
        for start_n in tl.range(begin, stop, BLOCK_N):
            acc, l_i, m_i = _fwd_tile(
                acc, l_i, m_i, q, k_ptr, v_ptr, offs_m, start_n, n_rows, n_keys, stride_kn,
                stride_vn, left, right, scale_log2, BLOCK_N, HEAD_DIM, part != 1, LEFT, RIGHT,
            )  # fmt: skip
    o_ptr = row_ptr(head_ptr(o_ptr, stride_ob, stride_oh, pid_bh, n_heads), first_q, stride_om)
    total = l_i
    if RIGHT or PACKED:
        total = tl.where(l_i == 0.0, 1.0, l_i)  # a row that sees no key has o = 0, lse = −inf
    counted: tl.constexpr = HAS_N_KEYS or PACKED
    total = nan_outside(total, n_keys_ptr, pid_bh // n_heads, n_k, counted)
    store_rows(o_ptr, acc * (1.0 / total)[:, None], offs_m, n_rows, stride_om, HEAD_DIM)
    lse_ptrs = lse_ptr + pid_bh.to(tl.int64) * n_q + first_q + offs_m
    tl.store(lse_ptrs, m_i + tl.math.log2(total), mask=offs_m < n_rows)


def configs(call: Call) -> tuple[LaunchConfig, ...]:
    return candidates(call, CONFIGS, MASKED_CONFIGS)


@of_all_seen
def counts(call: Call, config: LaunchConfig) -> tuple[float, ...]:
    """Returns what a launch's time is made of: see `Kernel.counts`.

    These are the launch; an average multiprocessor's key blocks and query tiles; and the key blocks
    of one tile. Averages serve because several programs share a multiprocessor.
    """
    load = n_query_tiles(call, config.block_m) / call.target.multiprocessors
    blocks = triton.cdiv(call.problem["n_k"], config.block_n)
    return 1, load * blocks, load, blocks


def prepare(call: Call, config: LaunchConfig, inputs: tuple) -> Callable:
    """Prepares one launch, with a program for each tile of queries."""
    q, k, v = inputs[:3]
    n_heads, n_q, head_dim = q.shape[1:]
    of_o, of_lse = rows_layout(q), lse_layout(q)
    reach, tiles = Reach.of(call.problem), Tiles(call, "n_q", config.block_m)
    kernel = Bound(
        _attention_fwd_kernel, (tiles.n * q.shape[0] * n_heads,),
        *row_strides(q), *row_strides(k), *row_strides(v), *of_o[1][:3], n_heads, n_q, k.shape[2],
        tiles.n, *reach.numbers, HEAD_DIM=head_dim, GROUP=n_heads // k.shape[1],
        **config.kernel_arguments(), **lengths_given(call), **reach.constants,
    )  # fmt: skip

    def launch(inputs, scalars):
        q, k, v, *lengths = inputs
        o = q.new_empty_strided(*of_o)
        lse = q.new_empty_strided(*of_lse, dtype=torch.float32)
        kernel(q, k, v, o, lse, *tiles.pointers(lengths, q), scalars[0] * LOG2_E)
        return (o,), (lse,)

    return forward(launch, call)


FORWARD = Kernel("triton", empty, prepare, configs=configs, options=WITH_LSE, counts=counts)
