"""Computes attention forward for Hopper, with a softmax reference that is checked afterwards.

A program keeps one multiprocessor. Consumer warpgroups own 64 query rows each, and a producer warp
streams blocks of keys and values through shared memory. For a tile of queries, with
s = scale·log2(e)·q kᵀ:

    p = 2^(s − m)    o = (Σ_j p_j v_j) / Σ_j p_j    lse = m + log2(Σ_j p_j)

Softmax does not depend on the reference m. The kernel takes each row's largest score in its first
block of keys as m. It then computes no maximum and rescales nothing. The row's sum is at least 1,
so no weight that matters underflows. Afterwards the sum is checked. If a later score was too far
above m, the sum exceeds LIMIT, or the output is not finite: in bfloat16 at a score 64 above m, to
base 2, in float16 at 16, where p overflows. A program with such a row computes all its tiles again
with online softmax (Milakov and Gimelshein, arXiv 1805.02867).

BASE2: q is already multiplied by scale·log2(e), and m is 0 unless there is only one block of keys.
A score then costs an exponential and no FFMA. Fewer instructions need less power, which limits the
kernel. The sum may now be less than 1: sums from 2^−64 to 2^64 are accepted, where no weight that
matters under- or overflows in bfloat16.

The exponentials of one warpgroup run beside the matmuls of the others, as in FlashAttention-3
(arXiv 2407.08608).

The last block of keys, which may be ragged, comes first, so that the loop needs no mask. Tiles that
would leave multiprocessors idle in a last round are split along the keys if `schedule` finds that
worth while. A second kernel adds the parts up in a fixed order.

It saves `lse` [B, H, n_q] for the backward pass, in float32 and to base 2.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tnp.dispatch.launcher import Bound
from tnp.dispatch.spec import Call, Kernel
from tnp.ops._shared.hopper_primitives import barriers, opaque
from tnp.ops._shared.primitives import nan_outside
from tnp.ops.attention.definition import WITH_LSE, n_kv_heads
from tnp.ops.attention.hopper.forward_pipeline import LAG, ROWS, Pipeline, produce
from tnp.ops.attention.hopper.primitives import (
    allocate_tiles,
    head_map,
    ring,
    store_some,
    supported,
    tile,
    without_reference,
    written,
)
from tnp.ops.attention.keys import Reach, Tiles, all_seen, key_range, lengths_given, seen
from tnp.ops.attention.keys import n_tiles as tiles_needed
from tnp.ops.attention.primitives import (
    LOG2_E,
    Layout,
    empty,
    flat,
    forward,
    head_ptr,
    lse_layout,
    of_all_seen,
    rows_layout,
    store_rows,
)

# The largest sum of a row that is accepted: p·v stays finite up to |v| = 2^63. In float16 p itself
# is not finite up to there, and then acc is not finite.
LIMIT = gl.constexpr(2.0**64)
LEAST = gl.constexpr(2.0**-64)  # the smallest sum that is accepted if the reference is 0
COMBINE_ROWS = 32
# The fewest blocks of keys that splitting must save a program. On an H200 a block takes 0.6 µs, and
# adding up parts takes 10 µs.
MIN_BLOCKS_SAVED = 16
SECTION_BYTES = 24 * 2**20  # keys and values of a section; an H200's L2 cache holds 50 MiB


# ------------------------------------------------------------------------------- a warpgroup's rows


@gluon.jit
def lane_sums(p, BLOCK_N: gl.constexpr):
    """Returns row sums over the columns that a thread holds, [64, 4], without a shuffle."""
    return gl.sum(gl.sum(gl.reshape(p, [ROWS, BLOCK_N // 8, 4, 2]), 3), 1)


@gluon.jit
def _scores(pipe, q, stage):
    """Starts q kᵀ with the keys of a stage."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, pipe.BLOCK_N, 16])
    zeros = gl.zeros([ROWS, pipe.BLOCK_N], gl.float32, S)
    k_t = tile(pipe.k, stage).permute((1, 0))
    return warpgroup_mma(q, k_t, zeros, use_acc=False, is_async=True)


@gluon.jit
def _add_values(pipe, p, acc, stage):
    """Starts acc + p v with the values of a stage."""
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, pipe.HEAD_DIM, 16])
    p = gl.convert_layout(p.to(pipe.v.dtype), gl.DotOperandLayout(0, OUT, 2))
    return warpgroup_mma(p, tile(pipe.v, stage), acc, is_async=True)


@gluon.jit
def _softmax(pipe, s, m, l_i, ONLINE: gl.constexpr):
    """Returns (p, alpha, m, l_i) after a block of scores. alpha rescales the earlier sums."""
    if ONLINE:
        m_new = gl.maximum(m, gl.max(s, 1) * pipe.scale_log2)
        reference = _reference(pipe, m_new)
        alpha = gl.exp2(m - reference)
        p = gl.exp2(s * pipe.scale_log2 - reference[:, None])
        return p, alpha, m_new, l_i * alpha + gl.sum(p, 1)
    else:
        p = gl.exp2(s) if pipe.BASE2 else gl.exp2(s * pipe.scale_log2 - m[:, None])
        return p, 1.0, m, l_i + lane_sums(p, pipe.BLOCK_N)


@gluon.jit
def _reference(pipe, m):
    """Returns m, and 0 for a row that has seen no key."""
    return gl.where(m == float("-inf"), 0.0, m) if pipe.MASKED else m


@gluon.jit
def _first_block(pipe, q, step, keys, block, alone, place, ONLINE: gl.constexpr):
    """Returns (p, m, l_i) after the first block, which has the last keys: it is always masked.

    `alone`: whether it is the only block. `place`: where the rows are; see `_hidden`.
    """
    BLOCK_N: gl.constexpr = pipe.BLOCK_N
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    stage, phase = ring(step, pipe.STAGES)
    mbarrier.wait(pipe.full.index(stage), phase)
    s = warpgroup_mma_wait(0, deps=[_scores(pipe, q, stage)])
    mbarrier.arrive(pipe.empty.index(stage), count=1)
    if pipe.MASKED:
        s = _hidden(pipe, s, block, place)
    else:
        # Columns count as in `_hidden`.
        columns = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, S))
        inside = (columns & -7) < opaque(keys - block * BLOCK_N) - opaque(columns & 6)
        s = gl.where(inside[None, :], s, float("-inf"))
    m = gl.max(s, 1) * pipe.scale_log2
    if pipe.BASE2 and not ONLINE:
        # A single block takes its own reference: o is then exact if a sample has one key.
        m = gl.where(alone, m, 0.0)
    if not ONLINE:
        m = _reference(pipe, m)
    p = gl.exp2(s * pipe.scale_log2 - _reference(pipe, m)[:, None])
    l_i = gl.sum(p, 1) if ONLINE else lane_sums(p, BLOCK_N)
    return p, m, l_i


@gluon.jit
def _next_block(
    pipe, q, step, p, acc, m, l_i, block, place, HIDDEN: gl.constexpr, ONLINE: gl.constexpr
):  # fmt: skip
    """Returns (p, acc, m, l_i) after a block.

    Its scores are multiplied beside the values of the block before. ptxas waits for those values
    before the exponentials, which is faster for blocks of 64 keys.
    """
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, pipe.HEAD_DIM, 16])
    stage, phase = ring(step, pipe.STAGES)
    mbarrier.wait(pipe.full.index(stage), phase)
    s_started = _scores(pipe, q, stage)
    acc_started = _add_values(pipe, p, acc, stage)
    s = warpgroup_mma_wait(1, deps=[s_started])
    if HIDDEN:
        s = _hidden(pipe, s, block, place)
    p, alpha, m, l_i = _softmax(pipe, s, m, l_i, ONLINE)
    acc = warpgroup_mma_wait(0, deps=[acc_started])
    if ONLINE:
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, OUT))[:, None]
    mbarrier.arrive(pipe.empty.index(stage), count=1)
    return p, acc, m, l_i


@gluon.jit
def _last_values(pipe, step, p, acc):
    """Returns acc with the values of the last block added."""
    stage, phase = ring(step, pipe.STAGES)
    mbarrier.wait(pipe.full.index(stage), phase)
    acc = warpgroup_mma_wait(0, deps=[_add_values(pipe, p, acc, stage)])
    mbarrier.arrive(pipe.empty.index(stage), count=1)
    return acc


@gluon.jit
def _hidden(pipe, s, block, place):
    """Returns a block's scores with −inf for each key that the row does not see.

    `place`: the first row in its sequence, and the sequence's numbers of queries and keys.
    """
    S: gl.constexpr = s.type.layout
    row, n_rows, keys = place
    # Rows and keys count from the thread's own first column of the block, 2·(lane % 4), so that its
    # columns are constants. Without `opaque`, indices and masks would be kept through the loops,
    # and spill.
    columns = gl.arange(0, pipe.BLOCK_N, layout=gl.SliceLayout(0, S))
    origin = (opaque(columns & 6) + block * pipe.BLOCK_N)[None, :]
    rows = (opaque(row) + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S)))[:, None]
    visible = seen(
        rows - origin, (columns & -7)[None, :], n_rows - origin, keys - origin,
        pipe.left, pipe.right, pipe.LEFT, pipe.RIGHT,
    )  # fmt: skip
    return gl.where(visible, s, float("-inf"))


@gluon.jit
def attend(pipe, q, step, keys, first, last, ONLINE: gl.constexpr):
    """Returns acc [64, D], l_i [64] and m [64] of a warpgroup over key blocks first … last − 1.

    `step` stages were consumed before. Unless ONLINE, m is the reference of the first block.
    """
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, pipe.HEAD_DIM, 16])
    acc = gl.zeros([ROWS, pipe.HEAD_DIM], gl.float32, OUT)
    end = step + last - first
    place = (0, 0, 0)
    p, m, l_i = _first_block(
        pipe, q, step, keys, last - 1, last - first == 1, place, ONLINE
    )  # fmt: skip
    for j in range(step + 1, end):
        p, acc, m, l_i = _next_block(pipe, q, j, p, acc, m, l_i, 0, place, False, ONLINE)
    return _last_values(pipe, end, p, acc), _whole_sums(pipe, l_i, ONLINE), m


@gluon.jit
def _whole_sums(pipe, l_i, ONLINE: gl.constexpr):
    """Returns the sums of rows from the sums of lanes."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, pipe.BLOCK_N, 16])
    return l_i if ONLINE else gl.convert_layout(gl.sum(l_i, 1), gl.SliceLayout(1, S))


@gluon.jit
def attend_masked(pipe, q, step, place, first, last, ONLINE: gl.constexpr):
    """Does the same as `attend`, from the last block that these rows see to the first block.

    The tile's other warpgroups may see more blocks. This warpgroup hands those back unread.
    """
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, pipe.HEAD_DIM, 16])
    acc = gl.zeros([ROWS, pipe.HEAD_DIM], gl.float32, OUT)
    row, n_rows, keys = place
    own_first, own_last = pipe.blocks(row, n_rows, keys, ROWS, first, last)
    own_first = gl.where(row < 0, own_last - 1, own_first)  # no rows: a block of little use
    _begin, full_begin, full_end, _end = key_range(
        row, n_rows, keys, pipe.left, pipe.right, ROWS, pipe.LEFT, pipe.RIGHT
    )
    # The first block is at step `begin`. From step `plain` to `hidden` − 1 no score is hidden.
    begin = step + last - own_last
    end = begin + own_last - own_first
    plain = gl.minimum(gl.maximum(step + last - full_end // pipe.BLOCK_N, begin + 1), end)
    hidden = end
    if pipe.LEFT:
        full_first = gl.cdiv(full_begin, pipe.BLOCK_N)
        hidden = gl.minimum(gl.maximum(step + last - full_first, plain), end)
    _pass_by(pipe, step, begin)
    p, m, l_i = _first_block(
        pipe, q, begin, keys, own_last - 1, own_last - own_first == 1, place, ONLINE
    )
    for j in range(begin + 1, plain):
        block = step + last - 1 - j
        p, acc, m, l_i = _next_block(pipe, q, j, p, acc, m, l_i, block, place, True, ONLINE)
    for j in range(plain, hidden):
        p, acc, m, l_i = _next_block(pipe, q, j, p, acc, m, l_i, 0, place, False, ONLINE)
    if pipe.LEFT:
        for j in range(hidden, end):
            block = step + last - 1 - j
            p, acc, m, l_i = _next_block(pipe, q, j, p, acc, m, l_i, block, place, True, ONLINE)
    acc = _last_values(pipe, end, p, acc)
    _pass_by(pipe, end + LAG, step + last - first + LAG)
    return acc, _whole_sums(pipe, l_i, ONLINE), m


@gluon.jit
def _pass_by(pipe, begin, end):
    """Hands the stages begin … end − 1 back unread."""
    for j in range(begin, end):
        stage, phase = ring(j, pipe.STAGES)
        mbarrier.wait(pipe.full.index(stage), phase)
        mbarrier.arrive(pipe.empty.index(stage), count=1)


# --------------------------------------------------------------------------------------- the kernel


@gluon.constexpr_function
def part_width(head_dim):
    """Returns the floats of a row of a part: acc, m and l, padded so that rows stay aligned."""
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
    """Stores a warpgroup's acc [64, D], m [64] and l_i [64] of the program's i-th item, a part."""
    OUT: gl.constexpr = acc.type.layout
    HEAD_DIM: gl.constexpr = pipe.HEAD_DIM
    WIDTH: gl.constexpr = part_width(HEAD_DIM)
    part = 2 * gl.program_id(0) + i - pipe.n_whole
    part_rows = part * (pipe.CONSUMERS * ROWS) + WARPGROUP * ROWS
    rows = gl.arange(0, ROWS, layout=m.type.layout)
    acc_rows = part_rows + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
    # Without `opaque` indices would be kept through the loops, and spill.
    offs_d = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, OUT)) + opaque(i * 0)
    gl.store(part_ptr + acc_rows[:, None] * WIDTH + offs_d[None, :], acc)
    gl.store(part_ptr + (part_rows + rows) * WIDTH + HEAD_DIM, m)
    gl.store(part_ptr + (part_rows + rows) * WIDTH + HEAD_DIM + 1, l_i)


@gluon.jit
def _sees(pipe, place, LAYOUT: gl.constexpr):
    """Returns [64]: whether a row exists and sees some key."""
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
    """Attends for the program's items after `n` items and `step` stages. Returns both after it."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, pipe.BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, pipe.HEAD_DIM, 16])
    DTYPE: gl.constexpr = o_desc.dtype
    for i in range(pipe.n_items()):
        index, bh, row, n_rows, keys, first, last = pipe.item(i)
        if (index < pipe.n_tiles) & (first < last):
            slot, phase = ring(n, 2)
            mbarrier.wait(pipe.q_full.index(slot), phase)
            # An operand in registers relieves shared memory: 557 → 574 TFLOP/s (mid, H200).
            q = tile(pipe.q, slot * pipe.CONSUMERS + WARPGROUP)
            IN_REGISTERS: gl.constexpr = pipe.HEAD_DIM * pipe.BLOCK_N < 128 * 128  # else they spill
            operand = q.load(gl.DotOperandLayout(0, S, 2)) if IN_REGISTERS else q
            # Waits until the last tile's output has left shared memory.
            tma.store_wait(0)
            mbarrier.arrive(pipe.q_empty.index(slot ^ 1), count=1, pred=n > 0)
            if pipe.MASKED:
                place = (row + WARPGROUP * ROWS, n_rows, keys)
                acc, l_i, m = attend_masked(pipe, operand, step, place, first, last, ONLINE)
            else:
                acc, l_i, m = attend(pipe, operand, step, keys, first, last, ONLINE)

            # These are computed again: kept through the loops over keys they would spill.
            _index, bh, row, n_rows, keys, first, last = pipe.item(i)
            row += WARPGROUP * ROWS
            sees = True
            if pipe.MASKED:
                sees = _sees(pipe, (row, n_rows, keys), S)
            if not ONLINE:
                # `~(l_i > LIMIT)` would accept NaN.
                stands = l_i <= LIMIT
                if pipe.MASKED:
                    stands = stands & ((l_i >= LEAST) | ~sees)
                elif pipe.BASE2:
                    stands = stands & (l_i >= LEAST)
                if o_desc.dtype == gl.float16:
                    finite = gl.sum(acc * 0.0, 1) == 0.0
                    stands = stands & gl.convert_layout(finite, gl.SliceLayout(1, S))
                # A failure is kept by row, and read once after all items. For a maximum over warps
                # ptxas would keep a register through all loops, and spill it.
                failed = pipe.failed.slice(WARPGROUP * ROWS, ROWS)
                failed.store(gl.where(stands, failed.load(gl.SliceLayout(1, S)), 1.0))

            slot, _phase = ring(n, 2)
            q_slot = slot * pipe.CONSUMERS + WARPGROUP
            rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, S))
            if pipe.MASKED or i < pipe.n_whole:
                if pipe.MASKED:
                    l_i = gl.where(l_i == 0.0, 1.0, l_i)  # o of a row that sees no key is 0
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
                else:  # the next rows belong to another sequence
                    store_some(o_ptr, acc.to(DTYPE), bh, row, n_q, pipe.n_heads)
                lse_ptrs = lse_ptr + bh.to(gl.int64) * pipe.n_q + row + rows
                gl.store(lse_ptrs, m + gl.log2(l_i), mask=(row + rows < n_q) & exist)
            else:
                store_part(pipe, part_ptr, i, acc, m, l_i, WARPGROUP)
            step += last - first + LAG
            n += 1
    if not ONLINE:
        # Each warp reads all rows, so that no maximum over warps is needed.
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
    """Writes o and lse of whole query tiles, and the parts of split ones."""
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
        HEAD_DIM, GROUP, BLOCK_N, STAGES, CONSUMERS, HAS_N_KEYS, PACKED, LEFT, RIGHT,
        LEFT or RIGHT or PACKED, BASE2,
    )  # fmt: skip
    # The list is inline: assigned to a name first, its constants would turn into tensors.
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


# ------------------------------------------------------------------------------------- the launches


@dataclass(frozen=True)
class ForwardConfig:
    """Configures the launch.

    block_n: keys of a block.
    num_stages: blocks in flight, a power of two.
    registers: registers of each thread of a consumer.
    consumers: warpgroups of 64 rows. Three overlap best. Two leave fewer rows of a last tile empty.
    """

    block_n: int
    num_stages: int
    registers: int
    consumers: int


def schedule(n_tiles: int, blocks: int, programs: int, may_split: bool) -> tuple[int, int, int]:
    """Returns (whole query tiles a program, tiles to split, key blocks of split tiles a program).

    Without a split it returns (rounds, 0, 0). In the last round some programs have no tile.
    """
    n_whole, n_split = divmod(n_tiles, programs)
    share = triton.cdiv(n_split * blocks, programs)
    if may_split and blocks - share >= MIN_BLOCKS_SAVED:
        return n_whole, n_split, share
    return triton.cdiv(n_tiles, programs), 0, 0


@triton.jit(do_not_specialize=["n_q", "first_tile", "share", "blocks"])
def _combine_kernel(
    part_ptr, o_ptr, lse_ptr, stride_ob, stride_oh, stride_om, n_heads, n_q, first_tile, share,
    blocks, TILE: tl.constexpr, BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr,
    PART_WIDTH: tl.constexpr,
):  # fmt: skip
    """Writes rows of a split tile from its parts: Σ 2^(m − max m)·acc over Σ 2^(m − max m)·l.

    It writes their lse too.
    """
    split = tl.program_id(0)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, HEAD_DIM)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    # Program p takes blocks p·share to (p + 1)·share − 1 of all split tiles, in two tiles at most,
    # so a program has two parts.
    first = split * blocks // share
    last = ((split + 1) * blocks - 1) // share
    for program in tl.range(first, last + 1):
        part = 2 * program + split - program * share // blocks
        part_rows = part_ptr + (part * TILE + rows) * PART_WIDTH
        m = tl.load(part_rows + HEAD_DIM)
        part_l = tl.load(part_rows + HEAD_DIM + 1)
        m_new = tl.maximum(m_i, m)
        old, new = tl.math.exp2(m_i - m_new), tl.math.exp2(m - m_new)
        part_acc = tl.load(part_rows[:, None] + offs_d[None, :])
        acc = acc * old[:, None] + part_acc * new[:, None]
        l_i = l_i * old + part_l * new
        m_i = m_new
    n_tiles = tl.cdiv(n_q, TILE)
    pid_bh = (first_tile + split) // n_tiles
    offs_m = (first_tile + split) % n_tiles * TILE + rows
    o_ptr = head_ptr(o_ptr, stride_ob, stride_oh, pid_bh, n_heads)
    o = acc * (1.0 / l_i)[:, None]
    store_rows(o_ptr, o, offs_m, n_q, stride_om, HEAD_DIM)
    lse_ptrs = lse_ptr + pid_bh.to(tl.int64) * n_q + offs_m
    tl.store(lse_ptrs, m_i + tl.math.log2(l_i), mask=offs_m < n_q)


def configs(call: Call) -> tuple[ForwardConfig, ...]:
    """Returns the candidates, the default first. With masks wide blocks would spill."""
    wide, masked = call.problem["head_dim"] == 128, not all_seen(call.problem)
    if masked and wide:
        return (ForwardConfig(64, 4, 240, 2),)
    if masked:  # three consumers 570 TFLOP/s, two 511 (causal, 16,384 tokens, 32:8 heads, H200)
        two, three = ForwardConfig(64, 8, 240, 2), ForwardConfig(64, 8, 160, 3)
        return (two, three) if call.problem["n_q"] <= 2 * ROWS.value else (three, two)
    if wide:  # blocks of 128 keys 649 TFLOP/s, of 64 626 (8 × 2,048, 32 heads, H200)
        return ForwardConfig(128, 2, 240, 2), ForwardConfig(64, 4, 240, 2)
    return (
        ForwardConfig(64, 8, 160, 3),
        ForwardConfig(64, 4, 160, 3),
        ForwardConfig(64, 8, 240, 2),
        ForwardConfig(128, 4, 232, 2),
    )


def tiles(call: Call, config: ForwardConfig) -> tuple[int, int, tuple[int, int, int]]:
    """Returns all query tiles, the key blocks of one tile, and the `schedule` of the programs.

    There are as many programs as multiprocessors. With n_keys or a mask nothing is split: a
    program's share would depend on the samples' lengths. With a causal mask and no window the
    schedule is (rounds of all heads, 0, rounds of a section of heads).
    """
    p = call.problem
    rows = config.consumers * ROWS.value
    of_head, heads = tiles_needed(p["n_q"], rows, int(p["n_sequences"])), p["batch"] * p["n_heads"]
    n = of_head * heads
    blocks = triton.cdiv(p["n_k"], config.block_n)
    reach = Reach.of(p)
    if reach.bounded_right and not reach.bounded_left:
        together, programs = min(heads_together(call), heads), call.target.multiprocessors
        of_section = triton.cdiv(of_head * together, programs)
        return n, blocks, (n_rounds(of_head, heads, together, programs), 0, of_section)
    may_split = all_seen(p) and not p["n_keys"]
    return n, blocks, schedule(n, blocks, call.target.multiprocessors, may_split)


def n_rounds(of_head: int, heads: int, section: int, programs: int) -> int:
    """Returns the busiest program's tiles if each section of heads begins a new round."""
    sections = (min(section, heads - first) for first in range(0, heads, section))
    return sum(triton.cdiv(of_head * n, programs) for n in sections)


def heads_together(call: Call) -> int:
    """Returns how many heads of queries programs take together.

    Their keys and values fit half of the L2 cache. All heads that share keys are taken together.
    """
    p = call.problem
    of_keys = 2 * p["n_k"] * p["head_dim"] * p.itemsize
    group = p["n_heads"] // n_kv_heads(p)
    return max(1, SECTION_BYTES // of_keys) * group


def parts(call: Call, config: ForwardConfig, of_o: Layout) -> tuple[Layout, Bound | None]:
    """Returns the workspace for the parts of split tiles, two a program, and the launch that adds
    them up, or None without a split.

    Call the launch with (workspace, o, lse). It writes o and lse.
    """
    p = call.problem
    tile_rows = config.consumers * ROWS.value
    of_parts = flat(2 * call.target.multiprocessors * tile_rows * part_width(p["head_dim"]))
    n, blocks, (_, n_split, share) = tiles(call, config)
    if not n_split:
        return of_parts, None
    return of_parts, Bound(
        _combine_kernel, (n_split, tile_rows // COMBINE_ROWS),
        *of_o[1][:3], p["n_heads"], p["n_q"], n - n_split, share, blocks,
        TILE=tile_rows, BLOCK_M=COMBINE_ROWS, HEAD_DIM=p["head_dim"],
        PART_WIDTH=part_width(p["head_dim"]),
    )  # fmt: skip


@of_all_seen
def counts(call: Call, config: ForwardConfig) -> tuple[float, ...]:
    """Returns what a launch's time is made of: see `Kernel.counts`.

    These are the launch, the busiest program's key blocks, an average program's tiles, and a split.
    """
    n, blocks, (n_whole, n_split, share) = tiles(call, config)
    busiest = n_whole * blocks + share
    return 1, busiest, n / call.target.multiprocessors, float(n_split > 0)


def prepare(call: Call, config: ForwardConfig, inputs: tuple) -> Callable:
    """Prepares the kernel, and the sum of parts if tiles are split."""
    q, k, v = inputs[:3]
    _, n_heads, n_q, head_dim = q.shape
    of_o, of_lse = rows_layout(q), lse_layout(q)
    rows, of_keys = ROWS.value, head_map(config.block_n)
    programs = call.target.multiprocessors
    n, _, (n_whole, n_split, share) = tiles(call, config)
    reach, table = Reach.of(call.problem), Tiles(call, "n_q", config.consumers * rows)
    kernel = Bound(
        attention_fwd_hopper_kernel, (programs,), n, table.n, heads_together(call), n_heads, n_q,
        k.shape[2], n_whole, share, *reach.numbers,
        maps=(head_map(rows), of_keys, of_keys, head_map(rows)),
        HEAD_DIM=head_dim, GROUP=n_heads // k.shape[1], BLOCK_N=config.block_n,
        STAGES=config.num_stages, REGISTERS=config.registers, CONSUMERS=config.consumers,
        **lengths_given(call), **reach.constants, BASE2=without_reference(call), num_warps=4,
    )  # fmt: skip
    of_parts, combine = parts(call, config, of_o)

    def launch(inputs, scalars):
        q, k, v, *lengths = inputs
        o = q.new_empty_strided(*of_o)
        lse = q.new_empty_strided(*of_lse, dtype=torch.float32)
        of_split = lse.new_empty_strided(*of_parts) if combine else lse
        pointers = table.pointers(lengths, lse)
        kernel(q, k, v, o, o, lse, of_split, *pointers, scalars[0] * LOG2_E)
        if combine:
            combine(of_split, o, lse)
        return (o,), (lse,)

    return forward(launch, call)


FORWARD = Kernel("hopper", empty, prepare, supported, configs, WITH_LSE, counts=counts)
