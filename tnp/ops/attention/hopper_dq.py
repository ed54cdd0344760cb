"""dQ of attention for Hopper, without atomics: a program owns query rows and walks the keys.

Three consumer warpgroups own 64 query rows each, a producer warp streams blocks of keys and values
through shared memory. With p = 2^(scale·log2(e)·q kᵀ − lse) and delta = Σ_d do·o:

    ds = p ∘ (do vᵀ − delta)    dq = scale · Σ_blocks ds k

The matmul that adds a block's ds k runs beside the next block's two; the block of keys that may be
ragged comes first, so that the loop needs no mask.
"""

from dataclasses import dataclass

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from tnp.launch import Bound
from tnp.ops.attention.hopper_dkdv_pipeline import PADDED_ROWS
from tnp.ops.attention.hopper_primitives import (
    allocate_tiles,
    head_map,
    load_tile,
    ring,
    tile,
)
from tnp.ops.hopper_primitives import barriers, opaque

CONSUMERS = gl.constexpr(3)
ROWS = gl.constexpr(64)  # query rows of a warpgroup
TILE_ROWS = gl.constexpr(192)
HEAD_DIM = gl.constexpr(64)


@dataclass(frozen=True)
class DqConfig:
    """Keys a block, blocks in flight (a power of two), registers of a consumer's thread."""

    block_n: int
    num_stages: int
    registers: int


@aggregate
class Pipeline:
    """Shared memory and barriers between the producer and the consumers, and which tiles to do."""

    q: gl.shared_memory_descriptor  # two tiles of CONSUMERS × [64, D]; dq leaves through them
    do: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    row_full: gl.shared_memory_descriptor  # q and do
    row_empty: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor  # k and v
    empty: gl.shared_memory_descriptor
    n_keys_ptr: gl.tensor
    n_tiles: gl.tensor
    n_heads: gl.tensor
    n_q: gl.tensor
    n_k: gl.tensor
    BLOCK_N: gl.constexpr
    STAGES: gl.constexpr
    HAS_N_KEYS: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, q, do, k, v, row_full, row_empty, full, empty, n_keys_ptr, n_tiles, n_heads,
        n_q, n_k, BLOCK_N, STAGES, HAS_N_KEYS,
    ):  # fmt: skip
        self.q, self.do, self.k, self.v = q, do, k, v
        self.row_full, self.row_empty = row_full, row_empty
        self.full, self.empty = full, empty
        self.n_keys_ptr, self.n_tiles = n_keys_ptr, n_tiles
        self.n_heads, self.n_q, self.n_k = n_heads, n_q, n_k
        self.BLOCK_N, self.STAGES = gl.constexpr(BLOCK_N), gl.constexpr(STAGES)
        self.HAS_N_KEYS = gl.constexpr(HAS_N_KEYS)

    @gluon.jit
    def item(self, index):
        """Head of the batch, first query row, and keys of tile `index`."""
        keys = opaque(self.n_k)
        tiles_per_head = gl.cdiv(self.n_q, TILE_ROWS)
        bh = index // tiles_per_head
        if self.HAS_N_KEYS:
            n_keys = gl.load(self.n_keys_ptr + bh // self.n_heads)
            keys = gl.maximum(gl.minimum(n_keys, keys), 1)
        return bh, (index % tiles_per_head) * TILE_ROWS, keys


@gluon.jit
def _producer(pipe, q_desc, do_desc, k_desc, v_desc):
    n = 0
    t = 0
    for index in range(gl.program_id(0), pipe.n_tiles, gl.num_programs(0)):
        bh, row, keys = pipe.item(index)
        b = bh // pipe.n_heads
        h = bh % pipe.n_heads
        slot = t & 1
        full = pipe.row_full.index(slot)
        mbarrier.wait(pipe.row_empty.index(slot), ((t >> 1) & 1) ^ 1)
        mbarrier.expect(full, 2 * CONSUMERS * q_desc.block_type.nbytes)
        for c in gl.static_range(CONSUMERS):
            load_tile(q_desc, b, h, row + c * ROWS, full, pipe.q, slot * CONSUMERS + c)
            load_tile(do_desc, b, h, row + c * ROWS, full, pipe.do, slot * CONSUMERS + c)
        blocks = gl.cdiv(keys, pipe.BLOCK_N)
        for j in range(blocks):
            stage, phase = ring(n + j, pipe.STAGES)
            mbarrier.wait(pipe.empty.index(stage), phase ^ 1)
            full = pipe.full.index(stage)
            mbarrier.expect(full, k_desc.block_type.nbytes + v_desc.block_type.nbytes)
            start = gl.where(j == 0, blocks - 1, j - 1) * pipe.BLOCK_N
            load_tile(k_desc, b, h, start, full, pipe.k, stage)
            load_tile(v_desc, b, h, start, full, pipe.v, stage)
        n += blocks
        t += 1  # noqa: SIM113, no enumerate in Gluon


@gluon.jit
def _products(pipe, q, do, stage):
    """Start q kᵀ and do vᵀ with a stage."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, pipe.BLOCK_N, 16])
    zeros = gl.zeros([ROWS, pipe.BLOCK_N], gl.float32, S)
    k_t = tile(pipe.k, stage).permute((1, 0))
    v_t = tile(pipe.v, stage).permute((1, 0))
    s = warpgroup_mma(q, k_t, zeros, use_acc=False, is_async=True)
    dp = warpgroup_mma(do, v_t, zeros, use_acc=False, is_async=True)
    return s, dp


@gluon.jit
def _add_dq(pipe, ds, dq, stage):
    """Start dq + ds k with the keys of a stage."""
    return warpgroup_mma(ds, tile(pipe.k, stage), dq, is_async=True)


@gluon.jit
def _operand(x, dtype: gl.constexpr):
    """x, rounded, as the left operand of a matmul with D columns."""
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    return gl.convert_layout(x.to(dtype), gl.DotOperandLayout(0, DQ, 2))


@gluon.jit
def _consumer(
    pipe, dq_desc, stats_ptr, scale, scale_log2, WARPGROUP: gl.constexpr
):  # fmt: skip
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, pipe.BLOCK_N, 16])
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    DTYPE: gl.constexpr = dq_desc.dtype
    n = 0
    t = 0
    for index in range(gl.program_id(0), pipe.n_tiles, gl.num_programs(0)):
        bh, row, keys = pipe.item(index)
        row += WARPGROUP * ROWS
        offs = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S))
        padded = gl.cdiv(pipe.n_q, PADDED_ROWS) * PADDED_ROWS
        ptrs = stats_ptr + bh.to(gl.int64) * padded + offs
        n_stats = (pipe.n_tiles // gl.cdiv(pipe.n_q, TILE_ROWS)).to(gl.int64) * padded
        # An lse of +inf makes p zero on rows past the end.
        lse = gl.load(ptrs, mask=offs < padded, other=float("inf"))[:, None]
        delta = gl.load(ptrs + n_stats, mask=offs < padded, other=0.0)[:, None]
        slot = (t & 1) * CONSUMERS + WARPGROUP
        mbarrier.wait(pipe.row_full.index(t & 1), (t >> 1) & 1)
        q = tile(pipe.q, slot)
        do = tile(pipe.do, slot)
        blocks = gl.cdiv(keys, pipe.BLOCK_N)

        stage, phase = ring(n, pipe.STAGES)
        mbarrier.wait(pipe.full.index(stage), phase)
        s_started, dp_started = _products(pipe, q, do, stage)
        s, dp = warpgroup_mma_wait(0, deps=[s_started, dp_started])
        columns = (blocks - 1) * pipe.BLOCK_N + gl.arange(
            0, pipe.BLOCK_N, layout=gl.SliceLayout(0, S)
        )
        p = gl.where((columns < keys)[None, :], gl.exp2(s * scale_log2 - lse), 0.0)
        ds = _operand(p * (dp - delta), DTYPE)
        dq = gl.zeros([ROWS, HEAD_DIM], gl.float32, DQ)
        for j in range(n + 1, n + blocks):
            last, _phase = ring(j - 1, pipe.STAGES)
            stage, phase = ring(j, pipe.STAGES)
            mbarrier.wait(pipe.full.index(stage), phase)
            s_started, dp_started = _products(pipe, q, do, stage)
            dq_started = _add_dq(pipe, ds, dq, last)
            s = warpgroup_mma_wait(2, deps=[s_started])
            p = gl.exp2(s * scale_log2 - lse)
            dp = warpgroup_mma_wait(1, deps=[dp_started])
            ds_next = p * (dp - delta)
            dq = warpgroup_mma_wait(0, deps=[dq_started])
            mbarrier.arrive(pipe.empty.index(last), count=1)
            ds = _operand(ds_next, DTYPE)
        last, _phase = ring(n + blocks - 1, pipe.STAGES)
        dq = warpgroup_mma_wait(0, deps=[_add_dq(pipe, ds, dq, last)])
        mbarrier.arrive(pipe.empty.index(last), count=1)

        q.store((dq * scale).to(DTYPE))
        fence_async_shared()
        tma.async_copy_shared_to_global(
            dq_desc, [bh // pipe.n_heads, bh % pipe.n_heads, row, 0], pipe.q.index(slot)
        )
        tma.store_wait(0)
        mbarrier.arrive(pipe.row_empty.index(t & 1), count=1)
        n += blocks
        t += 1  # noqa: SIM113, no enumerate in Gluon


@gluon.jit(do_not_specialize=["n_tiles", "n_heads", "n_q", "n_k"])
def _attention_bwd_dq_hopper_kernel(
    q_desc, do_desc, k_desc, v_desc, dq_desc, stats_ptr, n_keys_ptr,
    n_tiles, n_heads, n_q, n_k, scale, scale_log2,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
    HAS_N_KEYS: gl.constexpr,
):  # fmt: skip
    pipe = Pipeline(
        allocate_tiles(q_desc, 2 * CONSUMERS),
        allocate_tiles(do_desc, 2 * CONSUMERS),
        allocate_tiles(k_desc, STAGES),
        allocate_tiles(v_desc, STAGES),
        barriers(2, 1), barriers(2, CONSUMERS), barriers(STAGES, 1), barriers(STAGES, CONSUMERS),
        n_keys_ptr, n_tiles, n_heads, n_q, n_k, BLOCK_N, STAGES, HAS_N_KEYS,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_consumer, (pipe, dq_desc, stats_ptr, scale, scale_log2, 0)),
            (_consumer, (pipe, dq_desc, stats_ptr, scale, scale_log2, 1)),
            (_consumer, (pipe, dq_desc, stats_ptr, scale, scale_log2, 2)),
            (_producer, (pipe, q_desc, do_desc, k_desc, v_desc)),
        ],
        [4, 4, 1],
        [REGISTERS, REGISTERS, 24],
    )


def bound_dq(q: Tensor, k: Tensor, counted: bool, config: DqConfig, multiprocessors: int) -> Bound:
    """Of q, do, k, v, dq, the statistics, n_keys or any tensor, scale and scale·log2(e).

    The statistics are lse and delta, float32 [2, rows], each head's rows padded to PADDED_ROWS.

    Args:
        q, k: [B, H, n, D], whose sizes count.
        counted: whether n_keys is given.
        config: what to launch with.
        multiprocessors: of the GPU, on each of which a program runs.
    """
    batch, n_heads, n_q, _head_dim = q.shape
    n_tiles = triton.cdiv(n_q, TILE_ROWS.value) * batch * n_heads
    of_q, of_k = head_map(ROWS.value), head_map(config.block_n)
    return Bound(
        _attention_bwd_dq_hopper_kernel, (min(n_tiles, multiprocessors),),
        n_tiles, n_heads, n_q, k.shape[2],
        maps=(of_q, of_q, of_k, of_k, of_q),
        BLOCK_N=config.block_n, STAGES=config.num_stages, REGISTERS=config.registers,
        HAS_N_KEYS=counted, num_warps=4,
    )  # fmt: skip
