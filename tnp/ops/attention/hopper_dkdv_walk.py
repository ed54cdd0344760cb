"""What a consumer of `hopper_dkdv` does: dk and dv of 64 keys over the queries that it walks.

Scores and their gradients are computed transposed, so that both feed their matmuls from registers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language import PropagateNan

from tnp.ops._shared.hopper_primitives import opaque
from tnp.ops.attention.hopper_dkdv_pipeline import ROWS
from tnp.ops.attention.hopper_primitives import product_ptx, ring, tile
from tnp.ops.attention.keys import key_range, seen

NAN_STAYS = gl.constexpr(PropagateNan.ALL)
ANY = gl.constexpr(PropagateNan.NONE)


@gluon.jit
def _row_of(buffers, stage):
    """lse or delta of a stage's tile, along the columns of the scores."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    return buffers.index(stage).load(gl.SliceLayout(0, S))[None, :]


@gluon.jit
def _times_transposed(a, b):
    """Start a bᵀ for two tiles [64, D]."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    zeros = gl.zeros([ROWS, ROWS], gl.float32, S)
    return warpgroup_mma(a, b.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _start_dp(pipe, v, do, stage):
    """Start v doᵀ less delta."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    # As what the matmul adds to, delta is awaited where time is left: 557 → 570 TFLOP/s (mid).
    start = gl.zeros([ROWS, ROWS], gl.float32, S) - _row_of(pipe.delta, stage)
    return warpgroup_mma(v, do.permute((1, 0)), start, is_async=True)


@gluon.jit
def _gradient_of_scores(p, dp):
    """p ∘ dp, with p as it was rounded: in float32 the registers do not suffice."""
    return gl.inline_asm_elementwise(
        product_ptx(p.dtype), "=r,r,r",
        [gl.convert_layout(p, dp.type.layout), dp.to(p.dtype)],
        dtype=p.dtype, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _extent(pipe, item, WARPGROUP: gl.constexpr):
    """A warpgroup's first key; the first row that the walk of a head's queries begins with, and the
    row past it; how many queries and keys the sequence has.
    """
    _b, _h, key, _first_q, n_rows, _first_k, keys, _padded = pipe.origin(item)
    first, last = pipe.tiles(key, n_rows, keys)
    return key + WARPGROUP * ROWS, first * ROWS, last * ROWS, n_rows, keys


@gluon.jit
def _some_hidden(pipe, key, row, n_rows, keys):
    """Whether some of queries row … row + 63 do not see all of keys key … key + 63."""
    _begin, full_begin, full_end, _end = key_range(
        row, n_rows, keys, pipe.left, opaque(pipe.right), ROWS, pipe.LEFT, pipe.RIGHT
    )
    return (full_begin > key) | (full_end < key + ROWS)


@gluon.jit
def _visible(pipe, key, row, n_rows, keys, S: gl.constexpr):
    """Which of those keys which of those queries see."""
    # Opaque: kept through the loop, indices and masks would spill. Rows 2·(lane % 4) are the
    # thread's, and what is added to them a constant of each register: one index instead of 16.
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(0, S))
    of_thread = opaque(rows & 6) + row if pipe.ORDERED else opaque((rows & 6) + row)
    rows = of_thread + (rows & 57)
    columns = gl.arange(0, ROWS, layout=gl.SliceLayout(1, S)) + opaque(key)
    return seen(
        rows[None, :], columns[:, None], n_rows, keys, pipe.left, pipe.right, pipe.LEFT, pipe.RIGHT
    )


@gluon.jit
def _hand_over(pipe, i, ds, WARPGROUP: gl.constexpr):
    """Leave ds of tile i for the third warpgroup, once it has read that of tile i − 2."""
    mbarrier.wait(pipe.ds_empty.index(i & 1), ((i >> 1) & 1) ^ 1)
    tile(pipe.ds, (i & 1) * 2 + WARPGROUP).store(ds)
    fence_async_shared()
    mbarrier.arrive(pipe.ds_full.index(i & 1), count=1)


@gluon.jit
def walk(
    pipe, k, v, scale_log2, item, step, end,
    WARPGROUP: gl.constexpr, MASKED: gl.constexpr, WEIGHTED: gl.constexpr,
):  # fmt: skip
    """dk (unscaled) and dv of a warpgroup's keys over the stages step … end − 1.

    The next tile's scores are multiplied, and its lse is read, beside this one's gradients. MASKED
    keeps keys past the last out of dq: given n_keys their p is 0, else it need only be finite.
    WEIGHTED: do and delta are times 2^−lse, so that p is 2^s. Where not PLAIN both are False, and
    of the tiles at the edge of what is seen the exponents are made before a matmul is started.
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
        # NaN: the minimum with it is the other number, NaN too where n_keys is out of range.
        limit = gl.where(row < keys, float("nan"), float("-inf"))[:, None]
    else:
        # Past the last key k is read as 0: to dq any finite p adds 0. No other p is more than 2^0,
        # or where do may be times 2^−lse, more than 2^64.
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
        # The last stage's next is itself: its scores are thrown away.
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
            # NaN is to be seen, but not what padding may hold.
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
    """dk (unscaled) and dv of a warpgroup's keys over the queries of all heads that share them.

    At D = 128; of a program's item, which must be its only one. No matmul is under way where what
    is hidden is branched on: ptxas would wait for every one. Under a mask the next tile's scores
    are multiplied beside this one's dk. Without one they come after it, and dk is multiplied while
    dv still is: that takes 1 to 2 % less time there, and 3 to 7 % more under a causal mask (H100).
    Either way ds is handed over while dk is multiplied. Ahead of dk that kept the matmuls waiting,
    and where the next scores follow ptxas would then let no two of them overlap.
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
        # Opaque, or their descriptors would be kept through the loop, and spill.
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
            # The last stage's next is itself: its scores are thrown away.
            last = opaque(end) - 1  # or it would spill
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
