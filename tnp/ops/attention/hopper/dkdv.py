"""Computes dQ, dK and dV of attention for Hopper, in one launch.

An item is 128 keys of a head. A program works on one item. A persistent program works on one after
another: the next keys arrive in a second slot while it works. A slot is free when both consumers
and the third warpgroup, which computes dq, have arrived at `key_empty`.

If heads of queries share keys, an item walks the queries of all of them. SHARED: there is an item
for each head of queries. It leaves its dk and dv in float32, and another kernel adds them up.

SPLIT: the items of a last round that would leave programs idle are split along the queries. Each
program works on a piece of one item and leaves its share of dk and dv in float32. Another kernel
adds them up. A program then has one item or one piece, and is not persistent.

Two consumer warpgroups own 64 keys each and walk the queries, which a producer warp streams through
shared memory. Scores and their gradients are computed transposed, so that both feed their matmuls
from registers. With pᵀ = 2^(scale·log2(e)·k qᵀ − lse) and delta = Σ_d do·o:

    dv = Σ_tiles pᵀ do    dsᵀ = pᵀ ∘ (v doᵀ − delta)    dk = scale · Σ_tiles dsᵀ q

A third warpgroup computes ds k and adds it to dq in device memory, by bulk reductions of float32
tiles. Programs add in any order, so dq differs by rounding from run to run. The tiles hold dq in
the order of the matmul's registers, which needs no shuffles. `padded_rows._finish_dq_kernel` writes
the rows.

ORDERED: blocks of keys add to a tile of dq in the order of their programs, so that dq is equal from
run to run. A separate warp does that, or two warps at D = 64 (`_add_in_turn`). If the left side is
bounded too, programs take a head's blocks from the last to the first (`LAST_FIRST`).

BASE2: q carries scale·log2(e). If all lse of a query tile lie between −64 and 64, its do and delta
are multiplied by 2^−lse, and its lse is 0. If that holds for all tiles of a head, pᵀ is 2^(k qᵀ),
and the loop has neither lse nor a subtraction.
"""

from dataclasses import dataclass
from typing import ClassVar

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
from triton.language import PropagateNan

from tnp.dispatch.launcher import Bound
from tnp.dispatch.spec import Call
from tnp.ops._shared.hopper_primitives import barriers, opaque
from tnp.ops.attention.hopper.dkdv_pipeline import BLOCK_N, ROWS, Pipeline, heads_in_turn
from tnp.ops.attention.hopper.primitives import (
    acquired,
    allocate_tiles,
    before_reduction,
    flat_map,
    head_map,
    load_tile,
    product_ptx,
    reduce_add,
    ring,
    tile,
    written,
)
from tnp.ops.attention.keys import Reach, key_range, lengths_given, n_tiles, seen

WIDTH = gl.constexpr(64)  # columns of dq that are added at a time
NAN_STAYS = gl.constexpr(PropagateNan.ALL)
ANY = gl.constexpr(PropagateNan.NONE)


@dataclass(frozen=True)
class DkdvConfig:
    """Configures the launch.

    num_stages: tiles of queries in flight, a power of two.
    registers: registers of each thread of a consumer.
    persistent: one program on each multiprocessor works through items, and fetches the next while
        it works. Else there is a program for each item. With n_keys no program is persistent.
    """

    num_stages: int
    registers: int
    persistent: bool
    by_head: ClassVar[bool] = False  # each head of queries has programs of its own


@dataclass(frozen=True)
class ByHead(DkdvConfig):
    """Configures a launch with programs for each of the heads of queries that share keys.

    It is a class of its own so that other configurations keep the fields that tables hold.
    """

    by_head: bool = True


# ------------------------------------------------------------------------------------- the producer


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


# ----------------------------------------------------------------------------- dk and dv of 64 keys


@gluon.jit
def _row_of(buffers, stage):
    """Returns lse or delta of a stage's tile, along the columns of the scores."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    return buffers.index(stage).load(gl.SliceLayout(0, S))[None, :]


@gluon.jit
def _times_transposed(a, b):
    """Starts a bᵀ for two tiles [64, D]."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    zeros = gl.zeros([ROWS, ROWS], gl.float32, S)
    return warpgroup_mma(a, b.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _start_dp(pipe, v, do, stage):
    """Starts v doᵀ − delta."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    # The matmul adds to −delta, so delta is awaited where time is left.
    start = gl.zeros([ROWS, ROWS], gl.float32, S) - _row_of(pipe.delta, stage)
    return warpgroup_mma(v, do.permute((1, 0)), start, is_async=True)


@gluon.jit
def _gradient_of_scores(p, dp):
    """Returns p ∘ dp with the rounded p. In float32 there would be too few registers."""
    return gl.inline_asm_elementwise(
        product_ptx(p.dtype), "=r,r,r",
        [gl.convert_layout(p, dp.type.layout), dp.to(p.dtype)],
        dtype=p.dtype, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _extent(pipe, item, WARPGROUP: gl.constexpr):
    """Returns a warpgroup's first key, the first row of its walk of a head's queries, the row past
    its last, and the sequence's numbers of queries and keys.
    """
    _b, _h, key, _first_q, n_rows, _first_k, keys, _padded = pipe.origin(item)
    first, last = pipe.tiles(key, n_rows, keys)
    return key + WARPGROUP * ROWS, first * ROWS, last * ROWS, n_rows, keys


@gluon.jit
def _some_hidden(pipe, key, row, n_rows, keys):
    """Returns whether some of queries row … row + 63 do not see all of keys key … key + 63."""
    _begin, full_begin, full_end, _end = key_range(
        row, n_rows, keys, pipe.left, opaque(pipe.right), ROWS, pipe.LEFT, pipe.RIGHT
    )
    return (full_begin > key) | (full_end < key + ROWS)


@gluon.jit
def _visible(pipe, key, row, n_rows, keys, S: gl.constexpr):
    """Returns whether each of these queries sees each of these keys."""
    # Without `opaque`, indices and masks would be kept through the loop, and spill. A thread has
    # rows 2·(lane % 4) plus a constant of each register: one index instead of 16.
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(0, S))
    of_thread = opaque(rows & 6) + row if pipe.ORDERED else opaque((rows & 6) + row)
    rows = of_thread + (rows & 57)
    columns = gl.arange(0, ROWS, layout=gl.SliceLayout(1, S)) + opaque(key)
    return seen(
        rows[None, :], columns[:, None], n_rows, keys, pipe.left, pipe.right, pipe.LEFT, pipe.RIGHT
    )


@gluon.jit
def _hand_over(pipe, i, ds, WARPGROUP: gl.constexpr):
    """Stores ds of tile i for the third warpgroup, after it has read ds of tile i − 2."""
    mbarrier.wait(pipe.ds_empty.index(i & 1), ((i >> 1) & 1) ^ 1)
    tile(pipe.ds, (i & 1) * 2 + WARPGROUP).store(ds)
    fence_async_shared()
    mbarrier.arrive(pipe.ds_full.index(i & 1), count=1)


@gluon.jit
def walk(
    pipe, k, v, scale_log2, item, step, end,
    WARPGROUP: gl.constexpr, MASKED: gl.constexpr, WEIGHTED: gl.constexpr,
):  # fmt: skip
    """Returns dk (unscaled) and dv of a warpgroup's keys over the stages step … end − 1, at D = 64.

    The next tile's scores are multiplied, and its lse is read, beside this tile's gradients.

    MASKED: keys past the last add nothing to dq. With n_keys their p is 0, else it is only finite.
    WEIGHTED: do and delta are multiplied by 2^−lse, so that p is 2^s.

    If not PLAIN, both are False. Tiles at the edge of the mask then compute the exponents before a
    matmul is started.
    """
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, S, 2)
    DTYPE: gl.constexpr = pipe.q.dtype
    if not pipe.PLAIN:
        key, begin, past, n_rows, keys = _extent(pipe, item, WARPGROUP)
        row = pipe.first_walked(begin, past)
    elif pipe.HAS_N_KEYS:
        _b, _h, first_key = pipe.place(item)
        keys, _first, _n_stages = pipe.extent(item)
        row = first_key + WARPGROUP * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S))
        # A minimum with NaN is the other number, which is NaN too if n_keys is out of range.
        limit = gl.where(row < keys, float("nan"), float("-inf"))[:, None]
    else:
        # Past the last key k is read as 0, so any finite p adds 0 to dq. No other p is more than
        # 2^0, or 2^64 if do may be multiplied by 2^−lse.
        limit = 64.0 if pipe.BASE2 else 0.0
    dk = gl.zeros([ROWS, pipe.HEAD_DIM], gl.float32, S)
    dv = gl.zeros([ROWS, pipe.HEAD_DIM], gl.float32, S)
    s = gl.zeros([ROWS, ROWS], gl.float32, S)
    lse = gl.zeros([1, ROWS], gl.float32, S)
    if step < end:
        stage, phase = ring(step, pipe.STAGES)
        mbarrier.wait(pipe.full.index(stage), phase)
        s = warpgroup_mma_wait(0, deps=[_times_transposed(k, tile(pipe.q, stage))])
        if not WEIGHTED:
            lse = _row_of(pipe.lse, stage)
    for i in range(step, end):
        stage, _phase = ring(i, pipe.STAGES)
        # After the last stage it computes that stage's scores once more, and drops them.
        following, phase = ring(gl.minimum(i + 1, end - 1), pipe.STAGES)
        slope = scale_log2
        if not pipe.PLAIN:
            if _some_hidden(pipe, key, row, n_rows, keys):
                visible = _visible(pipe, key, row, n_rows, keys, S)
                s = gl.where(visible, s * scale_log2 - lse, float("-inf"))
                slope = scale_log2 * 0 + 1
                lse = gl.zeros([1, ROWS], gl.float32, S)
            row = pipe.row_after(i, row, begin, past)
        q = tile(pipe.q, stage)
        do = tile(pipe.do, stage)
        dp_started = _start_dp(pipe, v, do, stage)
        exponent = s if WEIGHTED else s * slope - lse
        mbarrier.wait(pipe.full.index(following), phase)
        if MASKED:
            # NaN must stay visible. With n_keys, what padding holds must not.
            exponent = gl.minimum(exponent, limit, ANY if pipe.HAS_N_KEYS else NAN_STAYS)
        p = gl.convert_layout(gl.exp2(exponent).to(DTYPE), A)
        s_started = _times_transposed(k, tile(pipe.q, following))
        dv_started = warpgroup_mma(p, do, dv, is_async=True)
        dp = warpgroup_mma_wait(2, deps=[dp_started])
        ds = _gradient_of_scores(p, dp)
        _hand_over(pipe, i, ds, WARPGROUP)
        dk_started = warpgroup_mma(gl.convert_layout(ds, A), q, dk, is_async=True)
        if not WEIGHTED:
            lse = _row_of(pipe.lse, following)
        s, dv, dk = warpgroup_mma_wait(0, deps=[s_started, dv_started, dk_started])
        mbarrier.arrive(pipe.empty.index(stage), count=1)
    return dk, dv


@gluon.jit
def walk_visible(pipe, scale_log2, item, WARPGROUP: gl.constexpr):
    """Returns dk (unscaled) and dv of a warpgroup's keys over all heads of queries, at D = 128.

    The item must be the program's only one. No matmul runs where the code branches on hidden
    scores: ptxas would wait for every matmul there.

    With a mask, the next tile's scores are multiplied beside this tile's dk. Without a mask they
    come after it, and dk is multiplied while dv still is. That order takes 1 to 2 % less time
    without a mask, and 3 to 7 % more with a causal one (H100).

    ds is handed over while dk is multiplied. Handed over before dk, it kept the matmuls waiting.
    """
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    DKV: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, pipe.HEAD_DIM, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, DKV, 2)
    DTYPE: gl.constexpr = pipe.q.dtype
    AHEAD: gl.constexpr = pipe.LEFT or pipe.RIGHT
    dk = gl.zeros([ROWS, pipe.HEAD_DIM], gl.float32, DKV)
    dv = gl.zeros([ROWS, pipe.HEAD_DIM], gl.float32, DKV)
    key, begin, past, n_rows, keys = _extent(pipe, item, WARPGROUP)
    row = pipe.first_walked(begin, past)
    end = (past - begin) // ROWS * pipe.GROUP
    s = gl.zeros([ROWS, ROWS], gl.float32, S)
    if end > 0:
        mbarrier.wait(pipe.full.index(0), 0)
        if AHEAD:
            s = _times_transposed(tile(pipe.k, WARPGROUP), tile(pipe.q, 0))
            s = warpgroup_mma_wait(0, deps=[s])
    for i in range(end):
        stage, phase = ring(i, pipe.STAGES)
        if not AHEAD:
            mbarrier.wait(pipe.full.index(stage), phase)
        q = tile(pipe.q, stage)
        do = tile(pipe.do, stage)
        # Without `opaque` their descriptors would be kept through the loop, and spill.
        own = opaque(i * 0 + WARPGROUP)
        if not AHEAD:
            s = warpgroup_mma_wait(0, deps=[_times_transposed(tile(pipe.k, own), q)])
        p = gl.exp2(s * scale_log2 - _row_of(pipe.lse, stage))
        if _some_hidden(pipe, key, row, n_rows, keys):
            p = gl.where(_visible(pipe, key, row, n_rows, keys, S), p, 0.0)
        p = gl.convert_layout(p.to(DTYPE), A)
        dp_started = _start_dp(pipe, tile(pipe.v, own), do, stage)
        dv_started = warpgroup_mma(p, do, dv, is_async=True)
        dp = warpgroup_mma_wait(1, deps=[dp_started])
        ds = _gradient_of_scores(p, dp)
        if AHEAD:
            dv = warpgroup_mma_wait(0, deps=[dv_started])
            # After the last stage it computes that stage's scores once more, and drops them.
            last = opaque(end) - 1  # without `opaque` it would spill
            following, phase = ring(gl.minimum(i + 1, last), pipe.STAGES)
            mbarrier.wait(pipe.full.index(following), phase)
        dk_started = warpgroup_mma(gl.convert_layout(ds, A), q, dk, is_async=True)
        if AHEAD:
            s_started = _times_transposed(tile(pipe.k, own), tile(pipe.q, following))
            _hand_over(pipe, i, ds, WARPGROUP)
            s, dk = warpgroup_mma_wait(0, deps=[s_started, dk_started])
        else:
            _hand_over(pipe, i, ds, WARPGROUP)
            dv, dk = warpgroup_mma_wait(0, deps=[dv_started, dk_started])
        mbarrier.arrive(pipe.empty.index(stage), count=1)
        row = pipe.row_after(i, row, begin, past)
    return dk, dv


# ----------------------------------------------------------------------------------------------- dq


@gluon.jit
def _add_dq(pipe, item, dq_desc):
    """Adds ds k of an item's keys to dq, 64 columns of a tile of queries at a time.

    If ORDERED, it leaves ds k in shared memory for the warps that add it.
    """
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    PARTS: gl.constexpr = pipe.HEAD_DIM // WIDTH
    zeros = gl.zeros([ROWS, WIDTH], gl.float32, S)
    slot, phase, step = pipe.turn(item)
    first_stage, n_stages, _first_q, padded = pipe.walk_of(item)
    mbarrier.wait(pipe.key_full.index(2 * slot), phase)
    mbarrier.wait(pipe.key_full.index(2 * slot + 1), phase)
    for i in range(n_stages * pipe.GROUP):
        at, member = pipe.stage_at(i, first_stage, n_stages)
        first = padded + member * pipe.head_rows + at * ROWS
        buffer, phase = ring(step + i, 2)
        mbarrier.wait(pipe.ds_full.index(buffer), phase)
        for part in gl.static_range(PARTS):
            dq = zeros
            for c in gl.static_range(2):
                k = tile(pipe.k, 2 * slot + c).slice(part * WIDTH, WIDTH, dim=1)
                ds = tile(pipe.ds, 2 * buffer + c).permute((1, 0))
                dq = warpgroup_mma(ds, k, dq, use_acc=c > 0, is_async=True)
            dq = warpgroup_mma_wait(0, deps=[dq])
            if part + 1 == PARTS:
                mbarrier.arrive(pipe.ds_empty.index(buffer), count=1)
            at_once, phase = ring((step + i) * PARTS + part, 2)
            if pipe.ORDERED:
                mbarrier.wait(pipe.dq_empty.index(at_once), phase ^ 1)
            else:
                tma.store_wait(1)
            in_order = gl.permute(gl.reshape(dq, [4, 2, 8, 8, 4, 2]), (3, 0, 2, 4, 1, 5))
            to = pipe.dq.index(at_once)
            to.store(gl.reshape(in_order, [ROWS, WIDTH]))
            fence_async_shared()
            if pipe.ORDERED:
                mbarrier.arrive(pipe.dq_full.index(at_once), count=1)
            else:
                reduce_add(dq_desc, [first * PARTS + part * ROWS, 0], to)
    if pipe.PERSISTENT:
        mbarrier.arrive(pipe.key_empty.index(slot), count=1)


@gluon.jit
def _add_in_turn(pipe, dq_desc, FIRST: gl.constexpr):
    """Adds to dq what `_add_dq` left of every EVERY-th tile of queries, beginning with FIRST.

    It adds after all blocks of keys that the tile sees and that come before this one. The first of
    them writes the tile. Their programs have lower numbers, and programs start in the order of
    their numbers, though CUDA does not promise it. So no program waits for one that cannot run.

    A warp takes 0.7 µs to read a count (H200). To publish one, it must wait until what it added is
    in memory, and for a fence. For a tile of D = 64 that is too long, so two warps take turns. At
    D = 128 a tile takes twice the time: one warp counts a tile after it has added the next one. Two
    warps, or one that counts at once, took 4 to 9 % more under a causal mask (H100). While a warp
    waits for memory, its lanes read the counts of its next 32 tiles.
    """
    PARTS: gl.constexpr = pipe.HEAD_DIM // WIDTH
    EVERY: gl.constexpr = 2 // PARTS
    LATER: gl.constexpr = PARTS == 2
    item = pipe.item()
    _b, _h, key, _first_q, n_rows, _first_k, keys, _padded = pipe.origin(item)
    first_stage, n_stages, _first_q, padded = pipe.walk_of(item)
    walked = key, n_rows, keys, first_stage, n_stages, padded
    n = n_stages * pipe.GROUP
    ready = 0  # tiles before it may be added to
    for i in range(FIRST, n, EVERY):
        while ready <= i:
            ready = _ready(pipe, walked, i, EVERY)
        row, before = _turn(pipe, walked, i)
        for part in gl.static_range(PARTS):
            buffer, phase = ring(i * PARTS + part, 2)
            at = [row * PARTS + part * ROWS, 0]
            mbarrier.wait(pipe.dq_full.index(buffer), phase)
            if before == 0:
                tma.async_copy_shared_to_global(dq_desc, at, pipe.dq.index(buffer))
            else:
                reduce_add(dq_desc, at, pipe.dq.index(buffer))
            if LATER:
                tma.store_wait(1)  # TMA has read the buffer before this one
                mbarrier.arrive(pipe.dq_empty.index(buffer ^ 1), count=1, pred=i + part > 0)
            else:
                tma.store_wait(0)
                mbarrier.arrive(pipe.dq_empty.index(buffer), count=1)
        if (ready <= i + EVERY) & (i + EVERY < n):
            ready = _ready(pipe, walked, i + EVERY, EVERY)
        if LATER:
            if i > 0:
                written(PARTS)
                _count(pipe, walked, i - 1)
        else:
            written()
            _count(pipe, walked, i)
    if LATER and n > 0:
        written()
        _count(pipe, walked, n - 1)


@gluon.jit
def _count(pipe, walked, i):
    """Counts that an item has added to dq of the i-th tile that it walks."""
    row, _before = _turn(pipe, walked, i)
    gl.atomic_add(pipe.count_of(row), 1, sem="release", scope="gpu")


@gluon.jit
def _turn(pipe, walked, i):
    """Returns the i-th tile's first row in dq, and how many blocks of keys add to it before."""
    key, n_rows, keys, first_stage, n_stages, padded = walked
    at, member = pipe.stage_at(i, first_stage, n_stages)
    row = padded + member * pipe.head_rows + at * ROWS
    return row, pipe.blocks_before(key, at * ROWS, n_rows, keys)


@gluon.jit
def _ready(pipe, walked, i, EVERY: gl.constexpr):
    """Returns the first of tiles i, i + EVERY … that must still wait, or the 33rd of them."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    _key, _n_rows, _keys, _first_stage, n_stages, _padded = walked
    lane = gl.arange(0, 32, layout=LANES)
    of_lane = gl.minimum(i + lane * EVERY, n_stages * pipe.GROUP - 1)
    row, before = _turn(pipe, walked, of_lane)
    count = acquired(pipe.count_of(row))
    before_reduction()
    return i + gl.min(gl.where(count < before, lane, 32), 0) * EVERY


@gluon.jit
def add_first(pipe, dq_desc):
    _add_in_turn(pipe, dq_desc, 0)


@gluon.jit
def add_second(pipe, dq_desc):
    _add_in_turn(pipe, dq_desc, 1)


@gluon.jit
def dq_consumer(pipe, dq_desc):
    if pipe.PERSISTENT:
        for item in range(gl.program_id(0), pipe.n_items, gl.num_programs(0)):
            _add_dq(pipe, item, dq_desc)
    else:
        _add_dq(pipe, pipe.item(), dq_desc)
    tma.store_wait(0)


# --------------------------------------------------------------------------------------- the kernel


@gluon.jit
def _store_rows(pipe, item, ptr, x, WARPGROUP: gl.constexpr):
    """Writes a consumer's 64 rows of dk or dv, with zeros past the sample's keys.

    It stores straight from registers: it runs once an item, and the descriptors of a bulk store
    would cost registers in the loops.
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
    heads = n_heads if pipe.APART else 2 * n_heads  # heads in a row of memory
    first = ((b.to(gl.int64) * pipe.n_k + row) * heads + h) * pipe.HEAD_DIM
    ptrs = ptr + first[:, None] + column[None, :]
    gl.store(ptrs, x.to(ptr.dtype.element_ty), mask=(row < end)[:, None])


@gluon.jit
def _store_piece(pipe, ptr, x, AT: gl.constexpr, WARPGROUP: gl.constexpr):
    """Stores a consumer's share of dv (AT = 0) or dk (AT = 1) in float32 [pieces, 2, 128, D]."""
    S: gl.constexpr = x.type.layout
    row = WARPGROUP * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S))
    column = gl.arange(0, pipe.HEAD_DIM, layout=gl.SliceLayout(0, S))
    first = (2 * (gl.program_id(0) - pipe.n_whole) + AT) * (BLOCK_N * pipe.HEAD_DIM)
    gl.store(ptr + first + row[:, None] * pipe.HEAD_DIM + column[None, :], x)


@gluon.jit
def _walk_ahead(pipe, item, k, v, scale_log2, WARPGROUP: gl.constexpr):
    """Returns dk and dv, unscaled, at D = 64, with keys and values in registers."""
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
        # No warp reads these if not ORDERED.
        barriers(2, 1) if ORDERED else q, barriers(2, 1) if ORDERED else q,
        tiles_ptr, cu_q_ptr, cu_k_ptr, n_keys_ptr, left_ptr, count_ptr,
        n_heads, n_q, n_k, n_items, n_whole, n_pieces, of_head, section, head_rows, left, right,
        HEAD_DIM, GROUP, SHARED, STAGES, HAS_N_KEYS, PACKED, LEFT, RIGHT,
        HEAD_DIM == 64 and GROUP == 1 and not (LEFT or RIGHT or PACKED),
        PERSISTENT, BASE2, SPLIT, APART, ORDERED, ORDERED and LEFT,
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
) -> Bound:
    """Returns the launch of the kernel, which takes these arguments:

    | argument | meaning |
    |---|---|
    | q, do | [B, H, n_q, D] each |
    | k, v | [B, H_kv, n_k, D] each |
    | lse, delta | float32 [B · H · head_rows] each, in padded rows |
    | dq_tiles | float32 [rows, D], unscaled: tiles of 64 rows, each as 64 columns at a time |
    | dk, dv | written: `KeyGradients`, or float32 [B, n_k, H, D] if `config.by_head` |
    | tiles, cu_q, cu_k, n_keys | `Tiles.pointers` for tiles of 128 keys |
    | left | float32 [B · H]: not 0 if do of some tile is not weighted; read if `base2` |
    | pieces | float32 [pieces, 2, 128, D], written if `split` |
    | counts | int32 zeros, one for each tile of queries; used if `ordered` |
    | scale, scale_log2 | scale, and scale·log2(e) |

    Pass any tensor for an argument that is not used.

    Args:
        call: the call to serve.
        q, k: tensors with the sizes of a call.
        head_rows: padded rows of lse and delta for one head.
        config: what to launch with.
        ordered: blocks of keys add to dq in order. Its tiles then need not be 0 before.
        base2: q carries scale·log2(e), and do, lse and delta may be multiplied by 2^−lse.
        split: how many items stay whole, and how many pieces each other one has.
    """
    batch, n_heads, n_q, head_dim = q.shape
    shared, n_k = n_heads // k.shape[1] if config.by_head else 1, k.shape[2]
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
        APART=config.by_head or call.apart, ORDERED=ordered, num_warps=4,
    )  # fmt: skip
