"""What the third warpgroup of `hopper_dkdv` does: it adds ds k of a program's keys to dq in device
memory; and where that has an order, what the warp beside it does, which adds in its stead.
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
    leave it in shared memory, for the warp that adds it.
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
def add_in_turn(pipe, dq_desc):
    """Add what `_add_dq` left to dq: of each tile of queries after all earlier blocks of keys that
    the tile sees, the first of which writes it. Their programs have lower numbers, and programs are
    started in the order of their numbers, though CUDA does not promise it: none waits for one that
    cannot run.

    A warp of its own: to read a count takes 0.7 µs, and to publish one it must wait for what was
    written. In the warpgroup that multiplies, a tile of D = 64 took 1.5 µs in place of 1.2 (H200).
    Each lane reads the count of another of the next tiles. That a tile was added to is counted one
    tile later: until then it need not be in memory.
    """
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    PARTS: gl.constexpr = pipe.HEAD_DIM // WIDTH
    item = pipe.item()
    _b, _h, key, _first_q, n_rows, _first_k, keys, _padded = pipe.origin(item)
    first_stage, n_stages, _first_q, padded = pipe.walk_of(item)
    n = n_stages * pipe.GROUP
    lane = gl.arange(0, 32, layout=LANES)
    ready = 0  # tiles that may be added to
    for i in range(n):
        while ready <= i:
            at, member = pipe.stage_at(gl.minimum(i + lane, n - 1), first_stage, n_stages)
            before = pipe.blocks_before(key, at * ROWS, n_rows, keys)
            count = acquired(pipe.count_of(padded + member * pipe.head_rows + at * ROWS))
            ready = i + gl.min(gl.where(count < before, lane, 32), 0)
            before_reduction()
        at, member = pipe.stage_at(i, first_stage, n_stages)
        row = (padded + member * pipe.head_rows + at * ROWS) * PARTS
        is_first = pipe.blocks_before(key, at * ROWS, n_rows, keys) == 0
        for part in gl.static_range(PARTS):
            at_once, phase = ring(i * PARTS + part, 2)
            mbarrier.wait(pipe.dq_full.index(at_once), phase)
            if is_first:
                tma.async_copy_shared_to_global(
                    dq_desc, [row + part * ROWS, 0], pipe.dq.index(at_once)
                )
            else:
                reduce_add(dq_desc, [row + part * ROWS, 0], pipe.dq.index(at_once))
            tma.store_wait(1)  # what was left before has been read
            mbarrier.arrive(pipe.dq_empty.index(at_once ^ 1), count=1, pred=i * PARTS + part > 0)
        if i > 0:
            written(PARTS)
            _count(pipe, i - 1, first_stage, n_stages, padded)
    written(0)
    if n > 0:
        _count(pipe, n - 1, first_stage, n_stages, padded)


@gluon.jit
def _count(pipe, i, first_stage, n_stages, padded):
    """Count that an item added to dq of the i-th tile that it walks: it is in memory."""
    at, member = pipe.stage_at(i, first_stage, n_stages)
    count = pipe.count_of(padded + member * pipe.head_rows + at * ROWS)
    gl.atomic_add(count, 1, sem="release", scope="gpu")


@gluon.jit
def dq_consumer(pipe, dq_desc):
    if pipe.PERSISTENT:
        for item in range(gl.program_id(0), pipe.n_items, gl.num_programs(0)):
            _add_dq(pipe, item, dq_desc)
    else:
        _add_dq(pipe, pipe.item(), dq_desc)
    tma.store_wait(0)
