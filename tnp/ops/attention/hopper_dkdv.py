"""dK and dV of attention for Hopper, and in the fused form dQ.

An item is 128 keys of a head. A program works on one, or, if it is persistent, on one after
another: the next keys then arrive in a second slot while it works, and a slot is free when both
consumers, and the third that makes dQ, have said so (`key_empty`).

Items that would fill only a part of a last round of programs are SPLIT along the queries: each
program works on a piece of one, and leaves its share of dk and dv in float32 for another kernel to
add up. A program then has one item or one piece, and is not persistent.

Two consumer warpgroups own 64 keys each and walk the queries, which a producer warp streams through
shared memory. Scores and their gradients are computed transposed, so that both feed their matmuls
from registers. With pᵀ = 2^(scale·log2(e)·k qᵀ − lse) and delta = Σ_d do·o:

    dv = Σ_tiles pᵀ do    dsᵀ = pᵀ ∘ (v doᵀ − delta)    dk = scale · Σ_tiles dsᵀ q

FUSED adds a third warpgroup that multiplies ds k and adds it to dq in device memory, by bulk
reductions of float32 tiles, in whatever order programs arrive: dq then differs by rounding from run
to run. The tiles hold dq in the order of the matmul's registers, which needs no shuffles;
`hopper_backward._finish_dq_kernel` puts it right.

BASE2 (FUSED alone): q carries scale·log2(e), and of query tiles all of whose lse lie between −64
and 64 do and delta are times 2^−lse and lse is 0. Where that is so of all tiles of a head, pᵀ is
2^(k qᵀ), and neither lse nor a subtraction is in the loop.
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

from tnp.launch import Bound
from tnp.ops.attention.hopper_dkdv_pipeline import BLOCK_N, Pipeline
from tnp.ops.attention.hopper_dkdv_walk import HEAD_DIM, ROWS, walk
from tnp.ops.attention.hopper_primitives import (
    allocate_tiles,
    flat_map,
    head_map,
    load_tile,
    reduce_add,
    ring,
    tile,
)
from tnp.ops.hopper_primitives import barriers


@dataclass(frozen=True)
class DkdvConfig:
    """Stages in flight (a power of two), query tiles a stage, registers of a consumer's thread.

    persistent: one program on each multiprocessor works through items and fetches the next while it
    works; else there is a program for each item. Not given n_keys.
    """

    num_stages: int
    tiles: int
    registers: int
    persistent: bool


@gluon.jit
def _produce(pipe, item, q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc):
    b, h, first_key = pipe.place(item)
    first_row = pipe.first_row(item)
    slot, phase, step = pipe.turn(item)
    _keys, first_stage, n_stages = pipe.extent(item)
    if pipe.PERSISTENT:
        mbarrier.wait(pipe.key_empty.index(slot), phase ^ 1)
    for c in gl.static_range(2):
        full = pipe.key_full.index(2 * slot + c)
        mbarrier.expect(full, 2 * k_desc.block_type.nbytes)
        load_tile(k_desc, b, h, first_key + c * ROWS, full, pipe.k, 2 * slot + c)
        load_tile(v_desc, b, h, first_key + c * ROWS, full, pipe.v, 2 * slot + c)
    for i in range(n_stages):
        stage, phase = ring(step + i, pipe.STAGES)
        mbarrier.wait(pipe.empty.index(stage), phase ^ 1)
        full = pipe.full.index(stage)
        mbarrier.expect(full, 2 * (q_desc.block_type.nbytes + lse_desc.block_type.nbytes))
        row = (first_stage + i) * pipe.TILES * ROWS
        load_tile(q_desc, b, h, row, full, pipe.q, stage)
        load_tile(do_desc, b, h, row, full, pipe.do, stage)
        row += first_row
        tma.async_copy_global_to_shared(lse_desc, [row], full, pipe.lse.index(stage))
        tma.async_copy_global_to_shared(delta_desc, [row], full, pipe.delta.index(stage))


@gluon.jit
def _producer(pipe, q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc):
    if pipe.PERSISTENT:
        for item in range(gl.program_id(0), pipe.n_items, gl.num_programs(0)):
            _produce(pipe, item, q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc)
    else:
        item = pipe.item()
        _produce(pipe, item, q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc)


@gluon.jit
def _store_rows(pipe, item, ptr, x, WARPGROUP: gl.constexpr):
    """Write a consumer's 64 rows of dk or dv; 0 past the sample's keys.

    Straight from registers: once an item, and a bulk store's descriptors cost registers of loops.
    """
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    b, h, first_key = pipe.place(item)
    row = first_key + WARPGROUP * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S))
    column = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, S))
    if pipe.HAS_N_KEYS:
        keys, _first, _n_stages = pipe.extent(item)
        x = gl.where((row < keys)[:, None], x, 0.0)
    heads = pipe.n_heads if pipe.APART else 2 * pipe.n_heads  # of a row
    first = ((b.to(gl.int64) * pipe.n_k + row) * heads + h) * HEAD_DIM
    ptrs = ptr + first[:, None] + column[None, :]
    gl.store(ptrs, x.to(ptr.dtype.element_ty), mask=(row < pipe.n_k)[:, None])


@gluon.jit
def _store_piece(pipe, ptr, x, AT: gl.constexpr, WARPGROUP: gl.constexpr):
    """Leave a consumer's share of dv (AT = 0) or dk (1): float32 [pieces, 2, 128, D]."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    row = WARPGROUP * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S))
    column = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, S))
    first = (2 * (gl.program_id(0) - pipe.n_whole) + AT) * (BLOCK_N * HEAD_DIM)
    gl.store(ptr + first + row[:, None] * HEAD_DIM + column[None, :], x)


@gluon.jit
def _consume(pipe, item, dk_ptr, dv_ptr, piece_ptr, scale, scale_log2, WARPGROUP: gl.constexpr):
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, S, 2)
    slot, phase, step = pipe.turn(item)
    keys, _first, n_stages = pipe.extent(item)
    mbarrier.wait(pipe.key_full.index(2 * slot + WARPGROUP), phase)
    k = tile(pipe.k, 2 * slot + WARPGROUP).load(A)
    v = tile(pipe.v, 2 * slot + WARPGROUP)
    end = step + n_stages
    if pipe.FUSED:
        v = v.load(A)
        _b, _h, first_key = pipe.place(item)
        inside = first_key + (WARPGROUP + 1) * ROWS <= keys
        if pipe.BASE2:
            weighted = pipe.weighted(item)
            if pipe.HAS_N_KEYS:
                weighted = weighted & inside
            if weighted:
                dk, dv = walk(pipe, k, v, scale_log2, item, step, end, WARPGROUP, False, True)
            else:
                dk, dv = walk(pipe, k, v, scale_log2, item, step, end, WARPGROUP, True, False)
        elif inside:
            dk, dv = walk(pipe, k, v, scale_log2, item, step, end, WARPGROUP, False, False)
        else:
            dk, dv = walk(pipe, k, v, scale_log2, item, step, end, WARPGROUP, True, False)
    else:
        # v in registers too miscompiles: ptxas 12.8 overwrites it with ds inside the loop.
        dk, dv = walk(pipe, k, v, scale_log2, item, step, end, WARPGROUP, False, False)
    if pipe.PERSISTENT:
        slot, _phase, _step = pipe.turn(item)
        mbarrier.arrive(pipe.key_empty.index(slot), count=1)
    if pipe.SPLIT and gl.program_id(0) >= pipe.n_whole:
        _store_piece(pipe, piece_ptr, dv, 0, WARPGROUP)
        _store_piece(pipe, piece_ptr, dk * scale, 1, WARPGROUP)
    else:
        _store_rows(pipe, item, dv_ptr, dv, WARPGROUP)
        _store_rows(pipe, item, dk_ptr, dk * scale, WARPGROUP)


@gluon.jit
def _consumer(pipe, dk_ptr, dv_ptr, piece_ptr, scale, scale_log2, WARPGROUP: gl.constexpr):
    if pipe.PERSISTENT:
        for item in range(gl.program_id(0), pipe.n_items, gl.num_programs(0)):
            _consume(pipe, item, dk_ptr, dv_ptr, piece_ptr, scale, scale_log2, WARPGROUP)
    else:
        _consume(pipe, pipe.item(), dk_ptr, dv_ptr, piece_ptr, scale, scale_log2, WARPGROUP)


@gluon.jit
def _add_dq(pipe, item, dq_desc):
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    zeros = gl.zeros([ROWS, HEAD_DIM], gl.float32, S)
    first_row = pipe.first_row(item)
    slot, phase, step = pipe.turn(item)
    _keys, first_stage, n_stages = pipe.extent(item)
    mbarrier.wait(pipe.key_full.index(2 * slot), phase)
    mbarrier.wait(pipe.key_full.index(2 * slot + 1), phase)
    for i in range(n_stages):
        buffer, phase = ring(step + i, 2)
        mbarrier.wait(pipe.ds_full.index(buffer), phase)
        ds = tile(pipe.ds, 2 * buffer).permute((1, 0))
        dq = warpgroup_mma(ds, tile(pipe.k, 2 * slot), zeros, use_acc=False, is_async=True)
        ds = tile(pipe.ds, 2 * buffer + 1).permute((1, 0))
        dq = warpgroup_mma(ds, tile(pipe.k, 2 * slot + 1), dq, is_async=True)
        dq = warpgroup_mma_wait(0, deps=[dq])
        mbarrier.arrive(pipe.ds_empty.index(buffer), count=1)
        tma.store_wait(1)
        in_order = gl.permute(gl.reshape(dq, [4, 2, 8, 8, 4, 2]), (3, 0, 2, 4, 1, 5))
        pipe.dq.index(buffer).store(gl.reshape(in_order, [ROWS, HEAD_DIM]))
        fence_async_shared()
        reduce_add(dq_desc, [first_row + (first_stage + i) * ROWS, 0], pipe.dq.index(buffer))
    if pipe.PERSISTENT:
        mbarrier.arrive(pipe.key_empty.index(slot), count=1)


@gluon.jit
def _dq_consumer(pipe, dq_desc):
    if pipe.PERSISTENT:
        for item in range(gl.program_id(0), pipe.n_items, gl.num_programs(0)):
            _add_dq(pipe, item, dq_desc)
    else:
        _add_dq(pipe, pipe.item(), dq_desc)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["n_heads", "n_q", "n_k", "n_items", "n_whole", "n_pieces"])
def _attention_bwd_dkdv_hopper_kernel(
    q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc, dq_desc, dk_ptr, dv_ptr,
    n_keys_ptr, left_ptr, piece_ptr, n_heads, n_q, n_k, n_items, n_whole, n_pieces,
    scale, scale_log2,
    STAGES: gl.constexpr, TILES: gl.constexpr, REGISTERS: gl.constexpr,
    HAS_N_KEYS: gl.constexpr, FUSED: gl.constexpr, PERSISTENT: gl.constexpr, BASE2: gl.constexpr,
    SPLIT: gl.constexpr, APART: gl.constexpr,
):  # fmt: skip
    gl.static_assert(FUSED or not BASE2, "do of the separate form is as it was")
    gl.static_assert(not (PERSISTENT and HAS_N_KEYS), "items of samples walk unequal stages")
    gl.static_assert(not SPLIT or (FUSED and not PERSISTENT and not HAS_N_KEYS))
    slots: gl.constexpr = 2 if PERSISTENT else 1
    pipe = Pipeline(
        allocate_tiles(q_desc, STAGES),
        allocate_tiles(do_desc, STAGES),
        gl.allocate_shared_memory(gl.float32, [STAGES, TILES * ROWS], lse_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, TILES * ROWS], delta_desc.layout),
        allocate_tiles(k_desc, 2 * slots),
        allocate_tiles(v_desc, 2 * slots),
        allocate_tiles(k_desc, 4 if FUSED else 1),
        gl.allocate_shared_memory(
            gl.float32, [2 if FUSED else 1, ROWS, HEAD_DIM], dq_desc.layout
        ),
        barriers(2 * slots, 1), barriers(slots, 3 if FUSED else 2),
        barriers(STAGES, 1), barriers(STAGES, 2), barriers(2, 2), barriers(2, 1),
        n_heads, n_q, n_k, n_items, n_whole, n_pieces, n_keys_ptr, left_ptr,
        STAGES, TILES, HAS_N_KEYS, FUSED, PERSISTENT, BASE2, SPLIT, APART,
    )  # fmt: skip
    if FUSED:
        gl.warp_specialize(
            [
                (_consumer, (pipe, dk_ptr, dv_ptr, piece_ptr, scale, scale_log2, 0)),
                (_consumer, (pipe, dk_ptr, dv_ptr, piece_ptr, scale, scale_log2, 1)),
                (_dq_consumer, (pipe, dq_desc)),
                (_producer, (pipe, q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc)),
            ],
            [4, 4, 1],
            [REGISTERS, 72, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (pipe, dk_ptr, dv_ptr, piece_ptr, scale, scale_log2, 0)),
                (_consumer, (pipe, dk_ptr, dv_ptr, piece_ptr, scale, scale_log2, 1)),
                (_producer, (pipe, q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )


def bound_dkdv(
    q: Tensor,
    k: Tensor,
    counted: bool,
    rows: int,
    config: DkdvConfig,
    multiprocessors: int,
    *,
    fused: bool,
    base2: bool = False,
    apart: bool = False,
    split: tuple[int, int] | None = None,
) -> Bound:
    """Of q, do, k, v, lse, delta, dq's tiles, dk, dv, n_keys or any tensor, of each head whether do
    of some query tile is as it was or any tensor, pieces or any tensor, scale, scale·log2(e).

    Args:
        q, k: [B, H, n, D], whose sizes count.
        counted: whether n_keys is given.
        rows: of lse and delta, each head's padded to PADDED_ROWS.
        config: what to launch with.
        multiprocessors: of the GPU, on each of which a persistent program runs.
        fused: dq is added to its tiles, float32 [rows, D], each 64 rows a tile of unscaled dq in
            the order of registers. Where not, they are never read.
        base2: q carries scale·log2(e), and do, lse and delta may be times 2^−lse.
        apart: dk and dv are [B, n_k, H, D] each, not halves of [B, n_k, 2, H, D].
        split: how many items are whole, and of how many pieces each other one is.
    """
    batch, n_heads, n_q, head_dim = q.shape
    n_k, size = k.shape[2], ROWS.value
    row_layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    tile_layout = gl.NVMMASharedLayout.get_default_for([size, size], gl.float32)
    of_q = head_map(size * config.tiles)
    of_rows = flat_map([rows], [size * config.tiles], row_layout)
    of_tiles = flat_map([rows if fused else 1, head_dim], [size, size], tile_layout)
    n_items = triton.cdiv(n_k, BLOCK_N.value) * batch * n_heads
    n_programs = min(n_items, multiprocessors) if config.persistent else n_items
    n_whole, n_pieces = split or (n_items, 1)
    if split:
        n_programs = n_whole + (n_items - n_whole) * n_pieces
    return Bound(
        _attention_bwd_dkdv_hopper_kernel, (n_programs,),
        n_heads, n_q, n_k, n_items, n_whole, n_pieces,
        maps=(of_q, of_q, head_map(size), head_map(size), of_rows, of_rows, of_tiles),
        STAGES=config.num_stages, TILES=config.tiles, REGISTERS=config.registers,
        HAS_N_KEYS=counted, FUSED=fused, PERSISTENT=config.persistent, BASE2=base2,
        SPLIT=split is not None, APART=apart, num_warps=4,
    )  # fmt: skip
