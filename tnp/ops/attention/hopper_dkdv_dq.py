"""What the third warpgroup of `hopper_dkdv` does: it adds ds k of a program's keys to dq in device
memory; and, where that has an order, what the warp beside it does, which reads whose turn it is.
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
    barrier,
    before_reduction,
    reduce_add,
    ring,
    tile,
    written,
)

WIDTH = gl.constexpr(64)  # columns of dq that are added at a time


@gluon.jit
def _add_dq(pipe, item, dq_desc):
    """Add ds k of an item's keys to dq: of each tile of queries 64 columns at a time."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    PARTS: gl.constexpr = pipe.HEAD_DIM // WIDTH
    zeros = gl.zeros([ROWS, WIDTH], gl.float32, S)
    slot, phase, step = pipe.turn(item)
    first_stage, n_stages, _first_q, padded = pipe.walk_of(item)
    if pipe.ORDERED:
        _b, _h, key, _first_q, n_rows, _first_k, keys, _padded = pipe.origin(item)
        added = padded  # where it added last
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
            if pipe.ORDERED and part == 0:
                if i > 0:
                    # What was added last has had a tile's time to arrive.
                    _pass_turn(pipe, added)
                mbarrier.wait(pipe.turn_full.index(buffer), phase)
                added = first
            else:
                tma.store_wait(1)
            in_order = gl.permute(gl.reshape(dq, [4, 2, 8, 8, 4, 2]), (3, 0, 2, 4, 1, 5))
            to = pipe.dq.index(buffer if PARTS == 1 else part)
            to.store(gl.reshape(in_order, [ROWS, WIDTH]))
            fence_async_shared()
            if pipe.ORDERED and pipe.blocks_before(key, at * ROWS, n_rows, keys) == 0:
                tma.async_copy_shared_to_global(dq_desc, [first * PARTS + part * ROWS, 0], to)
            else:
                reduce_add(dq_desc, [first * PARTS + part * ROWS, 0], to)
    if pipe.ORDERED and n_stages > 0:
        _pass_turn(pipe, added)
    if pipe.PERSISTENT:
        mbarrier.arrive(pipe.key_empty.index(slot), count=1)


@gluon.jit
def read_turns(pipe):
    """Say of each tile that an item walks when it may add to its dq: after all earlier blocks of
    keys that the tile sees. Their programs were launched before, so none waits for one that cannot
    run.

    A warp of its own: the warpgroup of dq would wait 0.7 µs for every count (H200).
    """
    item = pipe.item()
    _b, _h, key, _first_q, n_rows, _first_k, keys, _padded = pipe.origin(item)
    first_stage, n_stages, _first_q, padded = pipe.walk_of(item)
    for i in range(n_stages * pipe.GROUP):
        at, member = pipe.stage_at(i, first_stage, n_stages)
        before = pipe.blocks_before(key, at * ROWS, n_rows, keys)
        turn = pipe.turn_of(padded + member * pipe.head_rows + at * ROWS)
        if i > 0:
            # The warpgroup of dq has then taken turn i − 2, whose barrier this one uses again.
            buffer, phase = ring(i - 1, 2)
            mbarrier.wait(pipe.ds_empty.index(buffer), phase)
        while acquired(turn) < before:
            pass
        before_reduction()
        mbarrier.arrive(pipe.turn_full.index(i & 1), count=1)


@gluon.jit
def _pass_turn(pipe, padded):
    """Count that the item added to dq of rows padded … padded + 63, once that is in memory."""
    written()
    barrier()
    gl.atomic_add(pipe.turn_of(padded), 1, sem="release", scope="gpu")


@gluon.jit
def dq_consumer(pipe, dq_desc):
    if pipe.PERSISTENT:
        for item in range(gl.program_id(0), pipe.n_items, gl.num_programs(0)):
            _add_dq(pipe, item, dq_desc)
    else:
        _add_dq(pipe, pipe.item(), dq_desc)
    tma.store_wait(0)
