"""Computes attention with at most 256 keys: all keys in one tile, each tensor read or written once.

The keys and values of a head stay on chip while a program walks a chunk of its queries. One tile
holds a whole row of scores, so softmax needs no running statistics. The backward pass computes dq,
dk and dv in one launch, without atomics. With s = scale·log2(e)·q kᵀ:

    m = max_j s_j    p = 2^(s − m)    l = Σ_j p_j    o = p v / l    lse = m + log2(l)

    p = 2^(s − lse)    dp = do vᵀ    delta = Σ_j p_j dp_j    ds = p ∘ (dp − delta)
    dv = pᵀ do         dk = scale · dsᵀ q                    dq = scale · ds k

delta equals Σ_d do·o. It is summed over the keys of the tile, so that o need not be read.
Neighbouring programs take the heads of the same rows, which lie side by side in memory. If the
heads are too few to fill the GPU, the backward pass splits the queries into segments. They write
float32 partials, which a second launch adds up in a fixed order.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tnp.dispatch.launcher import Bound
from tnp.dispatch.spec import Call, Kernel, Reason, Support
from tnp.ops._shared.primitives import KernelConfig, cast, dot, key_count, nan_outside
from tnp.ops.attention.definition import OPTIONS
from tnp.ops.attention.primitives import (
    LOG2_E,
    KeyGradients,
    LaunchConfig,
    Partials,
    add_gradients,
    backward,
    empty,
    empty_backward,
    forward,
    full_grid,
    head_ptr,
    load_rows,
    lse_layout,
    n_query_tiles,
    of_all_seen,
    own_delta,
    row_strides,
    rows_layout,
    segments,
    store_rows,
)

BLOCKS = (64, 128, 256)  # keys of a tile
MAX_KEYS = BLOCKS[-1]
# The partials of a shorter segment cost more than its parallelism gains.
MIN_SEGMENT_TILES = 2


@dataclass(frozen=True)
class ForwardConfig(KernelConfig):
    """Configures a launch: the tile of queries and of all keys, and a program's query tiles."""

    block_m: int
    block_n: int
    tiles: int
    num_warps: int
    num_stages: int


# Candidates by keys of the tile, bytes per element and head_dim, the default first: queries of a
# tile, tiles of a program, warps and stages. `tnp.gates.compile` checks that none spills.
_TILES = ((64, 1, 4, 1), (64, 3, 4, 3), (64, 5, 4, 3), (128, 1, 8, 1))
FORWARD_TILES = {
    **{(64, 2, head_dim): (*_TILES, (128, 3, 8, 3)) for head_dim in (16, 32, 64)},
    **{(128, 2, head_dim): _TILES for head_dim in (16, 32, 64)},
    **{(block_n, 2, 128): _TILES[:3] for block_n in (64, 128)},
    **{(64, 4, head_dim): ((16, 1, 8, 1),) for head_dim in (16, 32, 64, 128)},
    **{(128, 4, head_dim): ((16, 1, 8, 1),) for head_dim in (16, 32, 64)},
}
# Tiles of 256 keys spill except on WIDE_TARGETS. The first candidate is the fastest of ten on an
# H200 for 10,000 queries (125 µs with batch 8, 18 µs with batch 1), the second for 2,256 queries.
WIDE_FORWARD_TILES = {(256, 2, 64): ((64, 5, 4, 3), (64, 9, 4, 2), (64, 3, 4, 2))}
# Candidates of the backward pass, likewise: queries of a tile, warps and stages. WIDE_TARGETS
# multiply with keys in shared memory. Elsewhere keys take registers, and the tiles stay small.
BACKWARD_TILES = {
    (64, 2, 16): ((64, 4, 2), (64, 4, 3)),
    (64, 2, 32): ((64, 4, 2), (64, 4, 3)),
    (64, 2, 64): ((32, 8, 2), (32, 4, 2)),
    (64, 2, 128): ((32, 8, 1), (32, 8, 2), (16, 8, 1)),
    (128, 2, 32): ((16, 8, 1),),
    (128, 2, 64): ((32, 8, 1), (32, 8, 2), (16, 8, 1)),
    (128, 2, 128): ((16, 8, 1),),
    (64, 4, 32): ((16, 8, 1),),
    (64, 4, 64): ((16, 8, 1),),
    (128, 4, 32): ((16, 8, 1),),
}
WIDE_TARGETS = (90, 100)
WIDE_BACKWARD_TILES = {
    (64, 2, 64): ((64, 4, 3), (64, 4, 2), (64, 4, 1), (64, 8, 2), (128, 8, 2)),
    (128, 2, 16): ((64, 8, 2),),
    (128, 2, 128): ((32, 8, 1),),
}


@triton.jit
def _program(n_q, n_heads, chunk):
    """Returns a program's sample, head of all heads, and first query. Heads vary fastest."""
    n_chunks = tl.cdiv(n_q, chunk)
    h = tl.program_id(0) % n_heads
    b = tl.program_id(0) // n_heads // n_chunks
    begin = tl.program_id(0) // n_heads % n_chunks * chunk
    return b, b * n_heads + h, begin


@triton.jit(do_not_specialize=["n_q", "n_k"])
def _few_keys_fwd_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, n_keys_ptr,
    stride_qb, stride_qh, stride_qm,
    stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn,
    stride_ob, stride_oh, stride_om,
    n_heads, n_q, n_k, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr,
    RAGGED: tl.constexpr, HAS_N_KEYS: tl.constexpr,
):  # fmt: skip
    """Writes o and lse. RAGGED: the tile has more columns than the sample has keys."""
    b, pid_bh, begin = _program(n_q, n_heads, TILES * BLOCK_M)
    q_ptr = head_ptr(q_ptr, stride_qb, stride_qh, pid_bh, n_heads)
    k_ptr = head_ptr(k_ptr, stride_kb, stride_kh, pid_bh, n_heads)
    v_ptr = head_ptr(v_ptr, stride_vb, stride_vh, pid_bh, n_heads)
    o_ptr = head_ptr(o_ptr, stride_ob, stride_oh, pid_bh, n_heads)
    lse_ptr += pid_bh.to(tl.int64) * n_q

    offs_n = tl.arange(0, BLOCK_N)
    n_keys = key_count(n_keys_ptr, b, n_k, HAS_N_KEYS)
    scale_log2 = nan_outside(scale_log2, n_keys_ptr, b, n_k, HAS_N_KEYS)
    k = load_rows(k_ptr, offs_n, n_keys, stride_kn, HEAD_DIM, RAGGED)
    v = load_rows(v_ptr, offs_n, n_keys, stride_vn, HEAD_DIM, RAGGED)
    for tile in tl.range(0, TILES):
        offs_m = begin + tile * BLOCK_M + tl.arange(0, BLOCK_M)
        q = load_rows(q_ptr, offs_m, n_q, stride_qm, HEAD_DIM, True)
        s = dot(q, tl.trans(k))
        if RAGGED:
            s = tl.where(offs_n[None, :] < n_keys, s, float("-inf"))
        m = tl.max(s, 1) * scale_log2
        p = tl.math.exp2(s * scale_log2 - m[:, None])
        l = tl.sum(p, 1)  # noqa: E741
        o = dot(cast(p, v.dtype), v) * (1.0 / l)[:, None]
        store_rows(o_ptr, o, offs_m, n_q, stride_om, HEAD_DIM)
        tl.store(lse_ptr + offs_m, m + tl.math.log2(l), mask=offs_m < n_q)


@triton.jit(do_not_specialize=["n_q", "n_k", "chunk"])
def _few_keys_bwd_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, dlse_ptr, dq_ptr, dk_ptr, dv_ptr, n_keys_ptr,
    stride_qb, stride_qh, stride_qm,
    stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn,
    stride_dob, stride_doh, stride_dom,
    stride_dqb, stride_dqh, stride_dqm,
    stride_dkb, stride_dkh, stride_dkn,
    stride_dks, n_heads, n_q, n_k, chunk, scale, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_N_KEYS: tl.constexpr, HAS_DLSE: tl.constexpr,
):  # fmt: skip
    """Writes dq, dk and dv (with equal strides) of `chunk` queries, a multiple of BLOCK_M."""
    b, pid_bh, begin = _program(n_q, n_heads, chunk)
    q_ptr = head_ptr(q_ptr, stride_qb, stride_qh, pid_bh, n_heads)
    k_ptr = head_ptr(k_ptr, stride_kb, stride_kh, pid_bh, n_heads)
    v_ptr = head_ptr(v_ptr, stride_vb, stride_vh, pid_bh, n_heads)
    do_ptr = head_ptr(do_ptr, stride_dob, stride_doh, pid_bh, n_heads)
    dq_ptr = head_ptr(dq_ptr, stride_dqb, stride_dqh, pid_bh, n_heads)
    lse_ptr += pid_bh.to(tl.int64) * n_q
    dlse_ptr += pid_bh.to(tl.int64) * n_q

    offs_n = tl.arange(0, BLOCK_N)
    n_keys = key_count(n_keys_ptr, b, n_k, HAS_N_KEYS)
    k = load_rows(k_ptr, offs_n, n_keys, stride_kn, HEAD_DIM, True)
    v = load_rows(v_ptr, offs_n, n_keys, stride_vn, HEAD_DIM, True)
    dk_t = tl.zeros([HEAD_DIM, BLOCK_N], tl.float32)
    dv_t = tl.zeros([HEAD_DIM, BLOCK_N], tl.float32)
    for start_m in tl.range(begin, tl.minimum(begin + chunk, n_q), BLOCK_M):
        offs_m = start_m + tl.arange(0, BLOCK_M)
        q = load_rows(q_ptr, offs_m, n_q, stride_qm, HEAD_DIM, True)
        do = load_rows(do_ptr, offs_m, n_q, stride_dom, HEAD_DIM, True)
        lse = tl.load(lse_ptr + offs_m, mask=offs_m < n_q, other=0.0)
        s = tl.where(offs_n[None, :] < n_keys, dot(q, tl.trans(k)), float("-inf"))
        p = tl.math.exp2(s * scale_log2 - lse[:, None])
        dp = dot(do, tl.trans(v))
        delta = own_delta(p, dp)
        if HAS_DLSE:
            delta -= tl.load(dlse_ptr + offs_m, mask=offs_m < n_q, other=0.0)
        dq, dk_t, dv_t = add_gradients(q, do, k, p, dp, delta, dk_t, dv_t)
        store_rows(dq_ptr, dq * scale, offs_m, n_q, stride_dqm, HEAD_DIM)
    partial = (begin // chunk).to(tl.int64) * stride_dks
    dk_ptr = head_ptr(dk_ptr, stride_dkb, stride_dkh, pid_bh, n_heads) + partial
    dv_ptr = head_ptr(dv_ptr, stride_dkb, stride_dkh, pid_bh, n_heads) + partial
    store_rows(dv_ptr, tl.trans(dv_t), offs_n, n_k, stride_dkn, HEAD_DIM)
    store_rows(dk_ptr, tl.trans(dk_t) * scale, offs_n, n_k, stride_dkn, HEAD_DIM)


def _block_n(n_k: int) -> int:
    """Returns the keys of the smallest tile that holds n_k keys, or of the largest tile."""
    return next((block for block in BLOCKS if n_k <= block), MAX_KEYS)


def forward_configs(call: Call) -> tuple[ForwardConfig, ...]:
    """Returns the candidates, the default first; none if the forward pass is unsupported."""
    block_n = _block_n(call.problem["n_k"])
    key = block_n, call.problem.itemsize, call.problem["head_dim"]
    tiles = FORWARD_TILES.get(key, ())
    if call.target.capability in WIDE_TARGETS:
        tiles = WIDE_FORWARD_TILES.get(key, ()) + tiles
    return tuple(ForwardConfig(block_m, block_n, *rest) for block_m, *rest in tiles)


def backward_configs(call: Call) -> tuple[LaunchConfig, ...]:
    """Returns the candidates, the default first; none if the backward pass is unsupported."""
    block_n = _block_n(call.problem["n_k"])
    key = block_n, call.problem.itemsize, call.problem["head_dim"]
    tiles = BACKWARD_TILES.get(key, ())
    if call.target.capability in WIDE_TARGETS:
        tiles = WIDE_BACKWARD_TILES.get(key, ()) + tiles
    return tuple(LaunchConfig(block_m, block_n, *rest) for block_m, *rest in tiles)


def _supported(configs: Callable[[Call], tuple]) -> Support:
    def supported(call: Call) -> Reason:
        n_k, head_dim = call.problem["n_k"], call.problem["head_dim"]
        if n_k > MAX_KEYS:
            return f"its tile holds {MAX_KEYS} keys and there are {n_k}"
        if not configs(call):
            return f"no tile of {n_k} keys at head_dim {head_dim} fits the registers"
        return None

    return supported


@of_all_seen
def forward_counts(call: Call, config: ForwardConfig) -> tuple[float, ...]:
    """Returns what a launch's time is made of: see `Kernel.counts`.

    These are the launch, an average multiprocessor's query tiles, and the busiest one's programs.
    """
    tiles = n_query_tiles(call, config.block_m) / call.target.multiprocessors
    programs = n_query_tiles(call, config.tiles * config.block_m)
    return 1, tiles, triton.cdiv(programs, call.target.multiprocessors)


def prepare_forward(call: Call, config: ForwardConfig, inputs: tuple) -> Callable:
    """Prepares one launch, in which each program walks `tiles` tiles of queries."""
    q, k, v, n_keys = inputs[:4]
    n_heads, n_q, head_dim = q.shape[1:]
    of_o, of_lse = rows_layout(q), lse_layout(q)
    ragged = n_keys is not None or k.shape[2] < config.block_n
    kernel = Bound(
        _few_keys_fwd_kernel, (n_query_tiles(call, config.tiles * config.block_m),),
        *row_strides(q), *row_strides(k), *row_strides(v), *of_o[1][:3], n_heads, n_q, k.shape[2],
        HEAD_DIM=head_dim, RAGGED=ragged, HAS_N_KEYS=n_keys is not None,
        **config.kernel_arguments(),
    )  # fmt: skip

    def launch(inputs, scalars):
        q, k, v, n_keys = inputs[:4]
        o = q.new_empty_strided(*of_o)
        lse = q.new_empty_strided(*of_lse, dtype=torch.float32)
        kernel(q, k, v, o, lse, q if n_keys is None else n_keys, scalars[0] * LOG2_E)
        return (o,), (lse,)

    return forward(launch, call)


def _segments(call: Call, config: LaunchConfig) -> tuple[int, int]:
    """Returns how many programs share a head's queries, and the tiles of one program."""
    p = call.problem
    wanted = full_grid(call.target) // (p["batch"] * p["n_heads"])
    return segments(triton.cdiv(p["n_q"], config.block_m), wanted, MIN_SEGMENT_TILES)


@of_all_seen
def backward_counts(call: Call, config: LaunchConfig) -> tuple[float, ...]:
    """Returns what a launch's time is made of: see `Kernel.counts`.

    These are the launch, an average multiprocessor's query tiles, a program's, and a sum of parts.
    """
    n_segments, tiles = _segments(call, config)
    load = n_query_tiles(call, config.block_m) / call.target.multiprocessors
    return 1, load, tiles, float(n_segments > 1)


@backward
def prepare_backward(call, config, do, q, k, v, lengths, o, lse, dlse):
    """Prepares one launch, or one that leaves parts and one that adds them up. o is not read."""
    batch, n_heads, n_q, head_dim = q.shape
    n_segments, tiles = _segments(call, config)
    chunk = tiles * config.block_m
    of_q, of_keys, counted = rows_layout(q), KeyGradients(k, call.apart), lengths[0] is not None
    partials = Partials(k, n_segments, of_keys) if n_segments > 1 else None
    kernel = Bound(
        _few_keys_bwd_kernel, (batch * n_heads * n_segments,),
        *row_strides(q), *row_strides(k), *row_strides(v), *row_strides(do),
        *of_q[1][:3], *(partials or of_keys).strides, partials.segment if partials else 0,
        n_heads, n_q, k.shape[2], chunk,
        HEAD_DIM=head_dim, HAS_N_KEYS=counted, HAS_DLSE=dlse is not None,
        **config.kernel_arguments(),
    )  # fmt: skip

    def launch(do, q, k, v, lengths, o, lse, dlse, scale):
        n_keys = lengths[0]
        dq = q.new_empty_strided(*of_q)
        dk, dv = of_keys.allocate(k)
        dk_part, dv_part = partials.allocate(lse) if partials else (dk, dv)
        kernel(
            q, k, v, do, lse, lse if dlse is None else dlse, dq, dk_part, dv_part,
            q if n_keys is None else n_keys, scale, scale * LOG2_E,
        )  # fmt: skip
        if partials:
            partials.add(dk_part, dk, dv)
        return dq, dk, dv

    return launch


TAKEN = (*OPTIONS, "lse")
FORWARD = Kernel(
    "few_keys", empty, prepare_forward, _supported(forward_configs), forward_configs, TAKEN,
    counts=forward_counts,
)  # fmt: skip
# One launch without atomics serves both as the deterministic form and as the fused one.
BACKWARD = Kernel(
    "few_keys", empty_backward, prepare_backward, _supported(backward_configs), backward_configs,
    TAKEN, counts=backward_counts,
)  # fmt: skip
