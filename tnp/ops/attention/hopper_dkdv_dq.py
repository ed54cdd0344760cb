"""What the third warpgroup of `hopper_dkdv` does: it adds ds k of a program's keys to dq in device
memory; and where that has an order, what the warps beside it do, which add in its stead.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tnp.ops.attention.hopper_dkdv_pipeline import ROWS
from tnp.ops.attention.hopper_primitives import (
    acquired,
    before_reduction,
    reduce_add,
    ring,
    tile,
    written,
)

WIDTH = gl.constexpr(64)  # columns of dq that are added at a time


@gluon.jit
def _add_dq(pipe, item, dq_desc):
    """Add ds k of an item's keys to dq: of each tile of queries 64 columns at a time. If ORDERED
    leave it in shared memory, for the warps that add it.
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
    """Add what `_add_dq` left of every EVERY-th tile of queries from FIRST on to dq: after all
    blocks of keys that the tile sees and that add before this one, the first of which writes it.
    Their programs have lower numbers, and programs are started in the order of their numbers,
    though CUDA does not promise it: none waits for one that cannot run.

    To read a count takes a warp 0.7 µs (H200), and to publish one it must wait until what it added
    is in memory, and for a fence. For a tile of D = 64 that is too long, so two warps take turns.
    At D = 128 a tile takes twice the time. One warp then counts a tile when it has added the next:
    two warps, or one that counts at once, took 4 to 9 % more under a causal mask (H100). The count
    of its next tile a warp reads while it waits for memory, each lane that of another of its next
    32 tiles.
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
                tma.store_wait(1)  # what was left before has been read
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
    """Count that an item added to dq of the i-th tile that it walks: it is in memory."""
    row, _before = _turn(pipe, walked, i)
    gl.atomic_add(pipe.count_of(row), 1, sem="release", scope="gpu")


@gluon.jit
def _turn(pipe, walked, i):
    """Of the i-th tile that an item walks its first row in dq, and how many blocks of keys add to
    it before the item's.
    """
    key, n_rows, keys, first_stage, n_stages, padded = walked
    at, member = pipe.stage_at(i, first_stage, n_stages)
    row = padded + member * pipe.head_rows + at * ROWS
    return row, pipe.blocks_before(key, at * ROWS, n_rows, keys)


@gluon.jit
def _ready(pipe, walked, i, EVERY: gl.constexpr):
    """Of the tiles i, i + EVERY … the first that may not be added to yet, or the 33rd."""
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
