"""Attention forward for Hopper: TMA, warp specialization, a reference that is checked afterwards.

A program keeps one multiprocessor: consumer warpgroups own 64 query rows each, a producer warp
streams blocks of keys and values through shared memory. For a tile of queries, with
s = scale·log2(e)·q kᵀ:

    p = 2^(s − m)    o = (Σ_j p_j v_j) / Σ_j p_j    lse = m + log2(Σ_j p_j)

Softmax does not change with the reference m. First m is each row's largest score in the block of
keys that comes first, and neither maximum nor rescaling follows. The row's sum is at least 1, so
that nothing underflows that counts, and it tells afterwards whether a later score lay too far above
m: then it passes LIMIT, or the output is not finite. A program that saw such a row does all its
tiles again with online softmax (Milakov and Gimelshein, arXiv 1805.02867); in bfloat16 a score must
lie 64 above m for it, to base 2.

BASE2: q carries scale·log2(e), and m is 0, but of a block that is alone. A score then costs an
exponential and no FFMA, which is 5 to 7 % of the time, since what limits the kernel is power. Sums
from 2^−64 to 2^64 stand: nothing that counts under- or overflows in bfloat16 then.

The exponentials of one warpgroup run beside the matmuls of the others, as in FlashAttention-3
(arXiv 2407.08608).

The last block of keys, the one that may be ragged, comes first, so that the loop needs no mask.
Tiles that would leave multiprocessors idle in a last round are split along the keys where
`hopper_forward.schedule` finds it worth while, and a second kernel adds the parts up in a fixed
order.

Saved for the backward pass: `lse` [B, H, n_q] in float32, to base 2.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)

from tnp.ops._shared.hopper_primitives import barriers, opaque
from tnp.ops._shared.primitives import nan_outside
from tnp.ops.attention.hopper_forward_pipeline import LAG, ROWS, Pipeline, produce
from tnp.ops.attention.hopper_forward_walk import attend, attend_masked
from tnp.ops.attention.hopper_primitives import allocate_tiles, ring, store_some, tile, written
from tnp.ops.attention.keys import key_range

# The largest sum of a row whose reference stands: p·v stays finite up to |v| = 2^63. In float16 p
# itself is not up to there, and the row of acc then not finite.
LIMIT = gl.constexpr(2.0**64)
LEAST = gl.constexpr(2.0**-64)  # and the smallest where the reference is 0


@gluon.constexpr_function
def part_width(head_dim):
    """Of a row of a part: acc, m and l, padded so that rows stay aligned."""
    return head_dim + 4


@gluon.jit
def _producer(pipe, q_desc, k_desc, v_desc):
    n = 0
    step = 0
    n, step = produce(pipe, q_desc, k_desc, v_desc, n, step)
    if pipe.must_repeat(1):
        produce(pipe, q_desc, k_desc, v_desc, n, step)


@gluon.jit
def store_part(pipe, part_ptr, i, acc, m, l_i, WARPGROUP: gl.constexpr):
    """Leave a warpgroup's acc [64, D], m [64] and l_i [64] of the program's i-th item, a part."""
    OUT: gl.constexpr = acc.type.layout
    HEAD_DIM: gl.constexpr = pipe.HEAD_DIM
    WIDTH: gl.constexpr = part_width(HEAD_DIM)
    part = 2 * gl.program_id(0) + i - pipe.n_whole
    part_rows = part * (pipe.CONSUMERS * ROWS) + WARPGROUP * ROWS
    rows = gl.arange(0, ROWS, layout=m.type.layout)
    acc_rows = part_rows + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
    # Opaque, or indices would be kept through the loops, and spill.
    offs_d = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, OUT)) + opaque(i * 0)
    gl.store(part_ptr + acc_rows[:, None] * WIDTH + offs_d[None, :], acc)
    gl.store(part_ptr + (part_rows + rows) * WIDTH + HEAD_DIM, m)
    gl.store(part_ptr + (part_rows + rows) * WIDTH + HEAD_DIM + 1, l_i)


@gluon.jit
def _sees(pipe, place, LAYOUT: gl.constexpr):
    """[64], whether a row is one that sees some key."""
    row, n_rows, keys = place
    rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    begin, _full_begin, _full_end, end = key_range(
        rows, n_rows, keys, pipe.left, pipe.right, 1, pipe.LEFT, pipe.RIGHT
    )
    return (begin < end) & (rows >= 0) & (rows < n_rows)


@gluon.jit
def _consume(
    pipe, o_desc, o_ptr, lse_ptr, part_ptr, n, step, WARPGROUP: gl.constexpr, ONLINE: gl.constexpr
):  # fmt: skip
    """Attend for the program's items; n items and `step` stages came before. Both, after it."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, pipe.BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, pipe.HEAD_DIM, 16])
    DTYPE: gl.constexpr = o_desc.dtype
    for i in range(pipe.n_items()):
        index, bh, row, n_rows, keys, first, last = pipe.item(i)
        if (index < pipe.n_tiles) & (first < last):
            slot, phase = ring(n, 2)
            mbarrier.wait(pipe.q_full.index(slot), phase)
            # In registers, which relieves shared memory: 557 → 574 TFLOP/s (mid, H200).
            q = tile(pipe.q, slot * pipe.CONSUMERS + WARPGROUP)
            IN_REGISTERS: gl.constexpr = pipe.HEAD_DIM * pipe.BLOCK_N < 128 * 128  # else they spill
            operand = q.load(gl.DotOperandLayout(0, S, 2)) if IN_REGISTERS else q
            # The last tile's output has left shared memory by now.
            tma.store_wait(0)
            mbarrier.arrive(pipe.q_empty.index(slot ^ 1), count=1, pred=n > 0)
            if pipe.MASKED:
                place = (row + WARPGROUP * ROWS, n_rows, keys)
                acc, l_i, m = attend_masked(pipe, operand, step, place, first, last, ONLINE)
            else:
                acc, l_i, m = attend(pipe, operand, step, keys, first, last, ONLINE)

            # Computed again: kept through the loops over keys it would spill.
            _index, bh, row, n_rows, keys, first, last = pipe.item(i)
            row += WARPGROUP * ROWS
            sees = True
            if pipe.MASKED:
                sees = _sees(pipe, (row, n_rows, keys), S)
            if not ONLINE:
                # Not l > LIMIT, which NaN would not be either.
                stands = l_i <= LIMIT
                if pipe.MASKED:
                    stands = stands & ((l_i >= LEAST) | ~sees)
                elif pipe.BASE2:
                    stands = stands & (l_i >= LEAST)
                if o_desc.dtype == gl.float16:
                    finite = gl.sum(acc * 0.0, 1) == 0.0
                    stands = stands & gl.convert_layout(finite, gl.SliceLayout(1, S))
                # By row, and asked once after all items: of a maximum over warps ptxas keeps a
                # register through all loops, and spills it.
                failed = pipe.failed.slice(WARPGROUP * ROWS, ROWS)
                failed.store(gl.where(stands, failed.load(gl.SliceLayout(1, S)), 1.0))

            slot, _phase = ring(n, 2)
            q_slot = slot * pipe.CONSUMERS + WARPGROUP
            rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, S))
            if pipe.MASKED or i < pipe.n_whole:
                if pipe.MASKED:
                    l_i = gl.where(l_i == 0.0, 1.0, l_i)  # of a row that sees no key o is 0
                    m = gl.where(sees, m, float("-inf"))
                counted: gl.constexpr = pipe.HAS_N_KEYS or pipe.PACKED
                l_i = nan_outside(l_i, pipe.n_keys_ptr, bh // pipe.n_heads, pipe.n_k, counted)
                acc = acc * gl.convert_layout(1.0 / l_i, gl.SliceLayout(1, OUT))[:, None]
                n_q = pipe.n_q
                exist = row >= 0
                if pipe.PACKED:
                    _index, _bh, _row, first_q, _n_rows, _first_k, _keys = pipe.origin(i)
                    row += first_q
                    n_q = first_q + n_rows
                if not exist:
                    pass
                elif row + ROWS <= n_q or not pipe.PACKED:
                    tile(pipe.q, q_slot).store(acc.to(DTYPE))
                    fence_async_shared()
                    tma.async_copy_shared_to_global(
                        o_desc, [bh // pipe.n_heads, bh % pipe.n_heads, row, 0],
                        pipe.q.index(q_slot),
                    )  # fmt: skip
                else:  # the rows that follow are another sequence's
                    store_some(o_ptr, acc.to(DTYPE), bh, row, n_q, pipe.n_heads)
                lse_ptrs = lse_ptr + bh.to(gl.int64) * pipe.n_q + row + rows
                gl.store(lse_ptrs, m + gl.log2(l_i), mask=(row + rows < n_q) & exist)
            else:
                store_part(pipe, part_ptr, i, acc, m, l_i, WARPGROUP)
            step += last - first + LAG
            n += 1
    if not ONLINE:
        # Each warp reads all rows, and no maximum over warps follows.
        of_warp: gl.constexpr = gl.BlockedLayout([ROWS // 32], [32], [4], [0])
        one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        some = gl.max(pipe.failed.slice(WARPGROUP * ROWS, ROWS).load(of_warp), 0)
        pipe.overflow.slice(WARPGROUP, 1).store(gl.full([1], some, gl.float32, one))
    return n, step


@gluon.jit
def _consumer(pipe, o_desc, o_ptr, lse_ptr, part_ptr, WARPGROUP: gl.constexpr):
    n = 0
    step = 0
    n, step = _consume(pipe, o_desc, o_ptr, lse_ptr, part_ptr, n, step, WARPGROUP, False)
    mbarrier.arrive(pipe.done, count=1)
    if pipe.must_repeat(4):
        written()
        _consume(pipe, o_desc, o_ptr, lse_ptr, part_ptr, n, step, WARPGROUP, True)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "n_tiles", "of_head", "section", "n_heads", "n_q", "n_k", "n_whole", "share", "left",
        "right",
    ]
)  # fmt: skip
def attention_fwd_hopper_kernel(
    q_desc, k_desc, v_desc, o_desc, o_ptr, lse_ptr, part_ptr,
    tiles_ptr, cu_q_ptr, cu_k_ptr, n_keys_ptr,
    n_tiles, of_head, section, n_heads, n_q, n_k, n_whole, share, left, right, scale_log2,
    HEAD_DIM: gl.constexpr, GROUP: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr, CONSUMERS: gl.constexpr, HAS_N_KEYS: gl.constexpr,
    PACKED: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, BASE2: gl.constexpr,
):  # fmt: skip
    """o and lse of whole query tiles, and parts of those that are split."""
    flag: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    zeros = gl.zeros([4 * ROWS], gl.float32, one)
    failed = gl.allocate_shared_memory(gl.float32, [4 * ROWS], flag, zeros)
    overflow = gl.allocate_shared_memory(gl.float32, [4], flag, gl.zeros([4], gl.float32, one))
    pipe = Pipeline(
        allocate_tiles(q_desc, 2 * CONSUMERS),
        allocate_tiles(k_desc, STAGES),
        allocate_tiles(v_desc, STAGES),
        barriers(2, 1), barriers(2, CONSUMERS),
        barriers(STAGES, 2), barriers(STAGES, CONSUMERS),
        failed, overflow, barriers(1, CONSUMERS).index(0),
        tiles_ptr, cu_q_ptr, cu_k_ptr, n_keys_ptr,
        n_tiles, of_head, section, n_heads, n_q, n_k, n_whole, share, left, right, scale_log2,
        HEAD_DIM, GROUP, BLOCK_N, STAGES, CONSUMERS, HAS_N_KEYS, PACKED, LEFT, RIGHT, BASE2,
    )  # fmt: skip
    # An inline list: assigned to a name first, its constants would turn into tensors.
    if CONSUMERS == 3:
        gl.warp_specialize(
            [
                (_consumer, (pipe, o_desc, o_ptr, lse_ptr, part_ptr, 0)),
                (_consumer, (pipe, o_desc, o_ptr, lse_ptr, part_ptr, 1)),
                (_consumer, (pipe, o_desc, o_ptr, lse_ptr, part_ptr, 2)),
                (_producer, (pipe, q_desc, k_desc, v_desc)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (pipe, o_desc, o_ptr, lse_ptr, part_ptr, 0)),
                (_consumer, (pipe, o_desc, o_ptr, lse_ptr, part_ptr, 1)),
                (_producer, (pipe, q_desc, k_desc, v_desc)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
