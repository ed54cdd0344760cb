"""What the third warpgroup of `hopper_dkdv` does: it adds ds k of a program's keys to dq in device
memory; and, where that has an order, what the warp beside it does, which reads how many have added.
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

from tnp.ops.attention.hopper_dkdv_pipeline import ROWS, TURNS
from tnp.ops.attention.hopper_primitives import (
    acquired,
    barrier,
    before_reduction,
    reduce_add,
    ring,
    tile,
    written,
)

WIDTH = gl.constexpr(64)  # columns of dq that are added at a time
# Tiles later at which an item counts that it added to one: until then it need not be in memory.
LATE = gl.constexpr(2)


@gluon.jit
def _add_dq(pipe, item, dq_desc):
    """Add ds k of an item's keys to dq: of each tile of queries 64 columns at a time."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    PARTS: gl.constexpr = pipe.HEAD_DIM // WIDTH
    zeros = gl.zeros([ROWS, WIDTH], gl.float32, S)
    slot, phase, step = pipe.turn(item)
    first_stage, n_stages, _first_q, padded = pipe.walk_of(item)
    n = n_stages * pipe.GROUP
    if pipe.ORDERED:
        _b, _h, key, _first_q, n_rows, _first_k, keys, _padded = pipe.origin(item)
    mbarrier.wait(pipe.key_full.index(2 * slot), phase)
    mbarrier.wait(pipe.key_full.index(2 * slot + 1), phase)
    for i in range(n):
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
            if pipe.ORDERED and part == 0:
                if i >= LATE:
                    written(PARTS * (LATE - 1))
                    _count(pipe, i - LATE, first_stage, n_stages, padded)
                turn, phase = ring(i, TURNS)
                mbarrier.wait(pipe.turn_full.index(turn), phase)
                mbarrier.arrive(pipe.turn_empty.index(turn), count=1)
                is_first = pipe.blocks_before(key, at * ROWS, n_rows, keys) == 0
            tma.store_wait(1)
            in_order = gl.permute(gl.reshape(dq, [4, 2, 8, 8, 4, 2]), (3, 0, 2, 4, 1, 5))
            to = pipe.dq.index(buffer if PARTS == 1 else part)
            to.store(gl.reshape(in_order, [ROWS, WIDTH]))
            fence_async_shared()
            if pipe.ORDERED and is_first:
                tma.async_copy_shared_to_global(dq_desc, [first * PARTS + part * ROWS, 0], to)
            else:
                reduce_add(dq_desc, [first * PARTS + part * ROWS, 0], to)
    if pipe.ORDERED:
        written(0)
        for i in range(gl.maximum(n - LATE, 0), n):
            _count(pipe, i, first_stage, n_stages, padded)
    if pipe.PERSISTENT:
        mbarrier.arrive(pipe.key_empty.index(slot), count=1)


@gluon.jit
def _count(pipe, i, first_stage, n_stages, padded):
    """Count that an item added to dq of the i-th tile that it walks: it is in memory."""
    at, member = pipe.stage_at(i, first_stage, n_stages)
    barrier()
    count = pipe.count_of(padded + member * pipe.head_rows + at * ROWS)
    gl.atomic_add(count, 1, sem="release", scope="gpu")


@gluon.jit
def read_counts(pipe):
    """Say of each tile that an item walks when it may add to its dq: after all earlier blocks of
    keys that the tile sees. Their programs were launched before, so none waits for one that cannot
    run.

    A warp of its own, each lane of which reads the count of another of the next tiles: a count
    takes 0.7 µs to arrive (H200), which at D = 64 is longer than a tile takes.
    """
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    item = pipe.item()
    _b, _h, key, _first_q, n_rows, _first_k, keys, _padded = pipe.origin(item)
    first_stage, n_stages, _first_q, padded = pipe.walk_of(item)
    n = n_stages * pipe.GROUP
    lane = gl.arange(0, 32, layout=LANES)
    i = 0
    while i < n:
        at, member = pipe.stage_at(gl.minimum(i + lane, n - 1), first_stage, n_stages)
        before = pipe.blocks_before(key, at * ROWS, n_rows, keys)
        count = acquired(pipe.count_of(padded + member * pipe.head_rows + at * ROWS))
        ready = gl.minimum(i + gl.min(gl.where(count < before, lane, 32), 0), n)
        before_reduction()
        for j in range(i, ready):
            turn, phase = ring(j, TURNS)
            mbarrier.wait(pipe.turn_empty.index(turn), phase ^ 1)
            mbarrier.arrive(pipe.turn_full.index(turn), count=1)
        i = ready


@gluon.jit
def dq_consumer(pipe, dq_desc):
    if pipe.PERSISTENT:
        for item in range(gl.program_id(0), pipe.n_items, gl.num_programs(0)):
            _add_dq(pipe, item, dq_desc)
    else:
        _add_dq(pipe, pipe.item(), dq_desc)
    tma.store_wait(0)
