"""What a warpgroup of Hopper's forward kernel does with its rows of queries: it goes through the
blocks of keys that they see (`hopper_forward_kernel` says how softmax is computed).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tnp.ops._shared.hopper_primitives import opaque
from tnp.ops.attention.hopper_forward_pipeline import LAG, ROWS
from tnp.ops.attention.hopper_primitives import ring, tile
from tnp.ops.attention.keys import key_range, seen


@gluon.jit
def lane_sums(p, BLOCK_N: gl.constexpr):
    """Row sums over the columns that a thread holds: [64, 4], without a shuffle."""
    return gl.sum(gl.sum(gl.reshape(p, [ROWS, BLOCK_N // 8, 4, 2]), 3), 1)


@gluon.jit
def _scores(pipe, q, stage):
    """Start q kᵀ with the keys of a stage."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, pipe.BLOCK_N, 16])
    zeros = gl.zeros([ROWS, pipe.BLOCK_N], gl.float32, S)
    k_t = tile(pipe.k, stage).permute((1, 0))
    return warpgroup_mma(q, k_t, zeros, use_acc=False, is_async=True)


@gluon.jit
def _add_values(pipe, p, acc, stage):
    """Start acc + p v with the values of a stage."""
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, pipe.HEAD_DIM, 16])
    p = gl.convert_layout(p.to(pipe.v.dtype), gl.DotOperandLayout(0, OUT, 2))
    return warpgroup_mma(p, tile(pipe.v, stage), acc, is_async=True)


@gluon.jit
def _softmax(pipe, s, m, l_i, ONLINE: gl.constexpr):
    """(p, alpha, m, l_i) after a block of scores; alpha rescales what was summed before."""
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
    """m, and 0 of a row that has seen no key."""
    return gl.where(m == float("-inf"), 0.0, m) if pipe.MASKED else m


@gluon.jit
def _first_block(pipe, q, step, keys, block, alone, place, ONLINE: gl.constexpr):
    """(p, m, l_i) after the first block, which always has a mask: the last one may be ragged.

    `alone`: whether it is the only one. `place` says where the rows stand (`_hidden`).
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
        # As in `_hidden`.
        columns = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, S))
        inside = (columns & -7) < opaque(keys - block * BLOCK_N) - opaque(columns & 6)
        s = gl.where(inside[None, :], s, float("-inf"))
    m = gl.max(s, 1) * pipe.scale_log2
    if pipe.BASE2 and not ONLINE:
        # One block alone may have its reference: o is then exact where a sample has one key.
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
    """(p, acc, m, l_i) after a block, whose scores are multiplied beside the values of the one
    before. ptxas waits for these ahead of the exponentials; 64-key blocks are faster that way.
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
    """acc with the values of the last block."""
    stage, phase = ring(step, pipe.STAGES)
    mbarrier.wait(pipe.full.index(stage), phase)
    acc = warpgroup_mma_wait(0, deps=[_add_values(pipe, p, acc, stage)])
    mbarrier.arrive(pipe.empty.index(stage), count=1)
    return acc


@gluon.jit
def _hidden(pipe, s, block, place):
    """Scores with those of a block's keys at −inf that a row does not see.

    `place`: the rows' first one in its sequence, and the sequence's queries and keys.
    """
    S: gl.constexpr = s.type.layout
    row, n_rows, keys = place
    # Rows and keys are counted from the thread's own first column of the block, 2·(lane % 4), so
    # that its columns are constants. Opaque, or indices and masks would be kept through the loops,
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
    """acc [64, D], l_i [64] and m [64] of one warpgroup's rows over key blocks first … last − 1.

    `step` stages were consumed before. The reference m is of the first block unless ONLINE.
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
    """Sums of rows from those of lanes."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, pipe.BLOCK_N, 16])
    return l_i if ONLINE else gl.convert_layout(gl.sum(l_i, 1), gl.SliceLayout(1, S))


@gluon.jit
def attend_masked(pipe, q, step, place, first, last, ONLINE: gl.constexpr):
    """As `attend`, from the last block that these rows see to the first. The tile's other
    warpgroups may see more: those blocks are passed by.
    """
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, pipe.HEAD_DIM, 16])
    acc = gl.zeros([ROWS, pipe.HEAD_DIM], gl.float32, OUT)
    row, n_rows, keys = place
    own_first, own_last = pipe.blocks(row, n_rows, keys, ROWS, first, last)
    own_first = gl.where(row < 0, own_last - 1, own_first)  # no rows: a block of little use
    _begin, full_begin, full_end, _end = key_range(
        row, n_rows, keys, pipe.left, pipe.right, ROWS, pipe.LEFT, pipe.RIGHT
    )
    # Steps: the first block is at `begin`, and from `plain` to `hidden` − 1 no score is hidden.
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
    """Hand the stages begin … end − 1 back unread."""
    for j in range(begin, end):
        stage, phase = ring(j, pipe.STAGES)
        mbarrier.wait(pipe.full.index(stage), phase)
        mbarrier.arrive(pipe.empty.index(stage), count=1)
