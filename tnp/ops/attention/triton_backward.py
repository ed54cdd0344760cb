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
from torch import Tensor

from tnp.dispatch.launcher import Bound
from tnp.dispatch.spec import Call, Kernel
from tnp.ops._shared.primitives import KernelConfig
from tnp.ops.attention.definition import WITH_LSE
from tnp.ops.attention.keys import Reach, Tiles, all_seen, lengths_given
from tnp.ops.attention.primitives import (
    LOG2_E,
    KeyGradients,
    LaunchConfig,
    Partials,
    backward,
    candidates,
    empty_backward,
    full_grid,
    lse_layout,
    n_key_tiles,
    n_query_tiles,
    of_all_seen,
    row_strides,
    rows_layout,
    segments,
)
from tnp.ops.attention.triton_backward_kernels import (
    attention_bwd_dkdv_kernel,
    attention_bwd_dq_kernel,
    attention_bwd_fused_kernel,
    delta_kernel,
)

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


# By bytes per element and columns of a tile, the default first; none spills on any target, those
# for masks not with masks either. In 16 bits at 64 the defaults of `separate` are the fastest of
# ten measured on an H200 (B=4, 11,000 queries, 10,000 keys). The others: the largest tiles that do
# not spill, unmeasured.
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
    """Candidates, the default first."""
    of_dkdv = candidates(call, DKDV_CONFIGS, MASKED_DKDV_CONFIGS)
    return tuple(SeparateConfig(*two) for two in product(of_dkdv, candidates(call, DQ_CONFIGS)))


def fused_configs(call: Call) -> tuple[FusedConfig, ...]:
    """Candidates, the default first."""
    return candidates(call, FUSED_CONFIGS, MASKED_FUSED_CONFIGS)


def _bound_delta(o: Tensor, do: Tensor) -> Bound:
    """Of o, do, and Σ_d do·o [B, H, n_q] in float32, which it writes."""
    batch, n_heads, n_q, head_dim = o.shape
    return Bound(
        delta_kernel, (triton.cdiv(n_q, DELTA_ROWS) * batch * n_heads,),
        *row_strides(o), *row_strides(do), n_heads, n_q, HEAD_DIM=head_dim, BLOCK_M=DELTA_ROWS,
    )  # fmt: skip


def _segments(call: Call, config: LaunchConfig) -> tuple[int, int]:
    """Programs of dk and dv that share the queries of a tile of keys, and query tiles of one.

    One has all queries where the tiles of keys fill the GPU alone.
    """
    p = call.problem
    if not all_seen(p):
        return 1, triton.cdiv(p["n_q"], config.block_m)
    wanted = triton.cdiv(full_grid(call.target), n_key_tiles(call, config.block_n))
    query_tiles = triton.cdiv(p["n_q"], config.block_m)
    return segments(query_tiles, wanted, MIN_SEGMENT_TILES)


@of_all_seen
def separate_counts(call: Call, config: SeparateConfig) -> tuple[float, ...]:
    """A launch; a sum of parts; for dk and dv programs of a multiprocessor on average, query tiles
    that they walk, and those of one program; for dq programs, key blocks that they walk, and those
    of one program.
    """
    n_segments, tiles = _segments(call, config.dkdv)
    keys = n_key_tiles(call, config.dkdv.block_n) / call.target.multiprocessors
    queries = n_query_tiles(call, config.dq.block_m) / call.target.multiprocessors
    walked = triton.cdiv(call.problem["n_q"], config.dkdv.block_m)
    blocks = triton.cdiv(call.problem["n_k"], config.dq.block_n)
    of_dkdv = keys * n_segments, keys * walked, tiles
    return 1, float(n_segments > 1), *of_dkdv, queries, queries * blocks, blocks


@of_all_seen
def fused_counts(call: Call, config: FusedConfig) -> tuple[float, ...]:
    """A launch; of a multiprocessor on average query tiles walked for dk and dv, key blocks walked
    for dq, and programs; tiles or blocks of the longest program.
    """
    dkdv = n_key_tiles(call, config.dkdv_block_n) / call.target.multiprocessors
    dq = n_query_tiles(call, config.dq_block_m) / call.target.multiprocessors
    queries = triton.cdiv(call.problem["n_q"], config.dkdv_block_m)
    keys = triton.cdiv(call.problem["n_k"], config.dq_block_n)
    return 1, dkdv * queries, dq * keys, dkdv + dq, max(queries, keys)


@backward
def prepare_separate(call, config, do, q, k, v, lengths, o, lse, dlse):
    """delta, dk and dv, perhaps in parts and their sum, and dq."""
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
    """delta, and one launch for dk, dv and dq."""
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
