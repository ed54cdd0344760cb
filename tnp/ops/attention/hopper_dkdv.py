"""dQ, dK and dV of attention for Hopper, in one launch.

An item is 128 keys of a head. A program works on one, or, if it is persistent, on one after
another: the next keys then arrive in a second slot while it works, and a slot is free when both
consumers, and the third that makes dQ, have said so (`key_empty`).

Where heads of queries share keys an item walks the queries of all of them. Or, SHARED, there is an
item for each, and what it makes of dk and dv is left in float32 for another kernel to add up.

Items that would fill only a part of a last round of programs are SPLIT along the queries: each
program works on a piece of one, and leaves its share of dk and dv in float32 for another kernel to
add up. A program then has one item or one piece, and is not persistent.

Two consumer warpgroups own 64 keys each and walk the queries, which a producer warp streams through
shared memory. Scores and their gradients are computed transposed, so that both feed their matmuls
from registers. With pᵀ = 2^(scale·log2(e)·k qᵀ − lse) and delta = Σ_d do·o:

    dv = Σ_tiles pᵀ do    dsᵀ = pᵀ ∘ (v doᵀ − delta)    dk = scale · Σ_tiles dsᵀ q

A third warpgroup multiplies ds k and adds it to dq in device memory, by bulk reductions of float32
tiles, in whatever order programs arrive: dq then differs by rounding from run to run. The tiles
hold dq in the order of the matmul's registers, which needs no shuffles;
`hopper_padded_rows._finish_dq_kernel` puts it right.

ORDERED: blocks of keys add to a tile of dq in the order of their programs, which makes dq equal
from run to run. One warp apart from the third warpgroup, or at D = 64 two, see to that
(`hopper_dkdv_dq`). If LEFT is bounded too, programs take a head's blocks from the last to the first
(`LAST_FIRST`).

BASE2: q carries scale·log2(e), and of query tiles all of whose lse lie between −64 and 64 do and
delta are times 2^−lse and lse is 0. Where that is so of all tiles of a head, pᵀ is 2^(k qᵀ), and
neither lse nor a subtraction is in the loop.
"""

from dataclasses import dataclass

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from tnp.dispatch.launcher import Bound
from tnp.dispatch.spec import Call
from tnp.ops._shared.hopper_primitives import barriers, opaque
from tnp.ops.attention.hopper_dkdv_dq import WIDTH, add_first, add_second, dq_consumer
from tnp.ops.attention.hopper_dkdv_pipeline import BLOCK_N, ROWS, Pipeline, heads_in_turn
from tnp.ops.attention.hopper_dkdv_walk import walk, walk_visible
from tnp.ops.attention.hopper_primitives import (
    allocate_tiles,
    flat_map,
    head_map,
    load_tile,
    ring,
    tile,
)
from tnp.ops.attention.keys import Reach, lengths_given, n_tiles


@dataclass(frozen=True)
class DkdvConfig:
    """Tiles of queries in flight (a power of two), registers of a consumer's thread.

    persistent: one program on each multiprocessor works through items and fetches the next while it
    works; else there is a program for each item. Not given n_keys.
    """

    num_stages: int
    registers: int
    persistent: bool


@gluon.jit
def _produce(pipe, item, q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc):
    if pipe.PLAIN:
        b, h, first_key = pipe.place(item)
    else:
        b, h, first_key, _first_q, _n_rows, first_k, _keys, _padded = pipe.origin(item)
        first_key += first_k
    slot, phase, step = pipe.turn(item)
    first_stage, n_stages, first_q, padded = pipe.walk_of(item)
    if pipe.PERSISTENT:
        mbarrier.wait(pipe.key_empty.index(slot), phase ^ 1)
    of_keys = h // pipe.SHARED
    for c in gl.static_range(2):
        full = pipe.key_full.index(2 * slot + c)
        mbarrier.expect(full, 2 * k_desc.block_type.nbytes)
        load_tile(k_desc, b, of_keys, first_key + c * ROWS, full, pipe.k, 2 * slot + c)
        load_tile(v_desc, b, of_keys, first_key + c * ROWS, full, pipe.v, 2 * slot + c)
    for i in range(n_stages * pipe.GROUP):
        at, member = pipe.stage_at(i, first_stage, n_stages)
        stage, phase = ring(step + i, pipe.STAGES)
        mbarrier.wait(pipe.empty.index(stage), phase ^ 1)
        full = pipe.full.index(stage)
        mbarrier.expect(full, 2 * (q_desc.block_type.nbytes + lse_desc.block_type.nbytes))
        row = at * ROWS
        head = h * pipe.GROUP + member
        load_tile(q_desc, b, head, first_q + row, full, pipe.q, stage)
        load_tile(do_desc, b, head, first_q + row, full, pipe.do, stage)
        row += padded + member * pipe.head_rows
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
    DKV: gl.constexpr = x.type.layout
    row = WARPGROUP * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, DKV))
    column = gl.arange(0, pipe.HEAD_DIM, layout=gl.SliceLayout(0, DKV))
    end = pipe.n_k
    if pipe.PLAIN:
        b, h, first_key = pipe.place(item)
        row += first_key
        if pipe.HAS_N_KEYS:
            keys, _first, _n_stages = pipe.extent(item)
            x = gl.where((row < keys)[:, None], x, 0.0)
    else:
        b, h, key, _first_q, _n_rows, first_k, keys, _padded = pipe.origin(item)
        row += key
        if pipe.PACKED:
            row += first_k
            end = first_k + keys
    n_heads = pipe.n_heads if pipe.PLAIN else opaque(pipe.n_heads)
    heads = n_heads if pipe.APART else 2 * n_heads  # of a row
    first = ((b.to(gl.int64) * pipe.n_k + row) * heads + h) * pipe.HEAD_DIM
    ptrs = ptr + first[:, None] + column[None, :]
    gl.store(ptrs, x.to(ptr.dtype.element_ty), mask=(row < end)[:, None])


@gluon.jit
def _store_piece(pipe, ptr, x, AT: gl.constexpr, WARPGROUP: gl.constexpr):
    """Leave a consumer's share of dv (AT = 0) or dk (1): float32 [pieces, 2, 128, D]."""
    S: gl.constexpr = x.type.layout
    row = WARPGROUP * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S))
    column = gl.arange(0, pipe.HEAD_DIM, layout=gl.SliceLayout(0, S))
    first = (2 * (gl.program_id(0) - pipe.n_whole) + AT) * (BLOCK_N * pipe.HEAD_DIM)
    gl.store(ptr + first + row[:, None] * pipe.HEAD_DIM + column[None, :], x)


@gluon.jit
def _walk_ahead(pipe, item, k, v, scale_log2, WARPGROUP: gl.constexpr):
    """dk and dv, unscaled, at D = 64: keys and values lie in registers."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, S, 2)
    _slot, _phase, step = pipe.turn(item)
    if pipe.PLAIN:
        keys, _first, n_stages = pipe.extent(item)
    else:
        _first, n_stages, _first_q, _padded = pipe.walk_of(item)
        n_stages *= pipe.GROUP
    k = k.load(A)
    end = step + n_stages
    v = v.load(A)
    if pipe.PLAIN:
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
        dk, dv = walk(pipe, k, v, scale_log2, item, step, end, WARPGROUP, False, False)
    return dk, dv


@gluon.jit
def _consume(pipe, item, dk_ptr, dv_ptr, piece_ptr, scale, scale_log2, WARPGROUP: gl.constexpr):
    slot, phase, _step = pipe.turn(item)
    mbarrier.wait(pipe.key_full.index(2 * slot + WARPGROUP), phase)
    k = tile(pipe.k, 2 * slot + WARPGROUP)
    v = tile(pipe.v, 2 * slot + WARPGROUP)
    if pipe.HEAD_DIM == 64:
        dk, dv = _walk_ahead(pipe, item, k, v, scale_log2, WARPGROUP)
    else:
        dk, dv = walk_visible(pipe, scale_log2, item, WARPGROUP)
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


@gluon.jit(
    do_not_specialize=[
        "n_heads", "n_q", "n_k", "n_items", "n_whole", "n_pieces", "of_head", "section",
        "head_rows", "left", "right",
    ]
)  # fmt: skip
def _attention_bwd_dkdv_hopper_kernel(
    q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc, dq_desc, dk_ptr, dv_ptr,
    tiles_ptr, cu_q_ptr, cu_k_ptr, n_keys_ptr, left_ptr, piece_ptr, count_ptr,
    n_heads, n_q, n_k, n_items, n_whole, n_pieces, of_head, section, head_rows, left, right,
    scale, scale_log2,
    HEAD_DIM: gl.constexpr, GROUP: gl.constexpr, SHARED: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr, HAS_N_KEYS: gl.constexpr, PACKED: gl.constexpr, LEFT: gl.constexpr,
    RIGHT: gl.constexpr, PERSISTENT: gl.constexpr, BASE2: gl.constexpr,
    SPLIT: gl.constexpr, APART: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    gl.static_assert(not (PERSISTENT and HAS_N_KEYS), "items of samples walk unequal stages")
    gl.static_assert(not SPLIT or not (PERSISTENT or HAS_N_KEYS))
    slots: gl.constexpr = 2 if PERSISTENT else 1
    q = allocate_tiles(q_desc, STAGES)
    pipe = Pipeline(
        q,
        allocate_tiles(do_desc, STAGES),
        gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], lse_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], delta_desc.layout),
        allocate_tiles(k_desc, 2 * slots),
        allocate_tiles(v_desc, 2 * slots),
        gl.allocate_shared_memory(k_desc.dtype, [4, 1, 1, ROWS, ROWS], k_desc.layout),
        gl.allocate_shared_memory(gl.float32, [2, ROWS, WIDTH], dq_desc.layout),
        barriers(2 * slots, 1), barriers(slots, 3),
        barriers(STAGES, 1), barriers(STAGES, 2), barriers(2, 2), barriers(2, 1),
        # Which nobody reads where not ORDERED.
        barriers(2, 1) if ORDERED else q, barriers(2, 1) if ORDERED else q,
        tiles_ptr, cu_q_ptr, cu_k_ptr, n_keys_ptr, left_ptr, count_ptr,
        n_heads, n_q, n_k, n_items, n_whole, n_pieces, of_head, section, head_rows, left, right,
        HEAD_DIM, GROUP, SHARED, STAGES, HAS_N_KEYS, PACKED, LEFT, RIGHT, PERSISTENT, BASE2, SPLIT,
        APART, ORDERED,
    )  # fmt: skip
    gl.static_assert(pipe.PLAIN or not (PERSISTENT or BASE2 or SPLIT))
    gl.static_assert(not (ORDERED and PERSISTENT))
    gl.warp_specialize(
        [
            (_consumer, (pipe, dk_ptr, dv_ptr, piece_ptr, scale, scale_log2, 0)),
            (_consumer, (pipe, dk_ptr, dv_ptr, piece_ptr, scale, scale_log2, 1)),
            (dq_consumer, (pipe, dq_desc)),
            (_producer, (pipe, q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc)),
        ]
        + ([(add_first, (pipe, dq_desc))] if ORDERED else [])
        + ([(add_second, (pipe, dq_desc))] if ORDERED and HEAD_DIM == 64 else []),
        [4, 4, 1] + ([1] if ORDERED else []) + ([1] if ORDERED and HEAD_DIM == 64 else []),
        [REGISTERS, 488 - 2 * REGISTERS, 24]
        + ([24] if ORDERED else [])
        + ([24] if ORDERED and HEAD_DIM == 64 else []),
    )


def bound_dkdv(
    call: Call,
    q: Tensor,
    k: Tensor,
    head_rows: int,
    config: DkdvConfig,
    *,
    ordered: bool,
    base2: bool = False,
    split: tuple[int, int] | None = None,
    by_head: bool = False,
) -> Bound:
    """Of q, do, k, v, lse, delta, dq's tiles, dk, dv, what `Tiles.pointers` gives of 128 keys, of
    each head whether do of some query tile is as it was or any tensor, pieces or any tensor, int32
    zeros of each tile of queries or any tensor, scale, scale·log2(e). Tiles of dq are float32
    [rows, D], of each 64 rows by 64 columns, unscaled, in the order of registers.

    Args:
        call: what is asked.
        q, k: [B, H, n_q, D] and [B, H_kv, n_k, D], whose sizes count.
        head_rows: of a head in lse and delta, padded.
        config: what to launch with.
        ordered: dq is added up in the order of blocks of keys, and its tiles need not be 0.
        base2: q carries scale·log2(e), and do, lse and delta may be times 2^−lse.
        split: how many items are whole, and of how many pieces each other one is.
        by_head: dk and dv are float32 [B, n_k, H, D], a share of each head of queries.
    """
    batch, n_heads, n_q, head_dim = q.shape
    shared, n_k = n_heads // k.shape[1] if by_head else 1, k.shape[2]
    n_kv_heads = k.shape[1] * shared
    size = ROWS.value
    rows = batch * n_heads * head_rows
    row_layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    tile_layout = gl.NVMMASharedLayout.get_default_for([size, size], gl.float32)
    of_q = head_map(size)
    of_rows = flat_map([rows], [size], row_layout)
    of_parts = rows * head_dim // WIDTH.value
    of_tiles = flat_map([of_parts, WIDTH.value], [size, WIDTH.value], tile_layout)
    of_head = n_tiles(n_k, BLOCK_N.value, int(call.problem["n_sequences"]))
    n_items = of_head * batch * n_kv_heads
    n_programs = min(n_items, call.target.multiprocessors) if config.persistent else n_items
    n_whole, n_pieces = split or (n_items, 1)
    if split:
        n_programs = n_whole + (n_items - n_whole) * n_pieces
    section = heads_in_turn(call, of_head, batch * n_kv_heads)
    reach = Reach.of(call.problem)
    return Bound(
        _attention_bwd_dkdv_hopper_kernel, (n_programs,),
        n_kv_heads, n_q, n_k, n_items, n_whole, n_pieces, of_head, section, head_rows,
        *reach.numbers,
        maps=(of_q, of_q, head_map(size), head_map(size), of_rows, of_rows, of_tiles),
        HEAD_DIM=head_dim, GROUP=n_heads // n_kv_heads, SHARED=shared, STAGES=config.num_stages,
        REGISTERS=config.registers, **lengths_given(call), **reach.constants,
        PERSISTENT=config.persistent, BASE2=base2, SPLIT=split is not None,
        APART=by_head or call.apart, ORDERED=ordered, num_warps=4,
    )  # fmt: skip
