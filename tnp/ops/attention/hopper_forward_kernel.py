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
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from tnp.ops.attention.hopper_primitives import allocate_tiles, load_tile, ring, tile, written
from tnp.ops.hopper_primitives import barriers, opaque

ROWS = gl.constexpr(64)  # query rows of a warpgroup
# Blocks that the values run behind the keys.
LAG = gl.constexpr(1)
HEAD_DIM = gl.constexpr(64)
# The largest sum of a row whose reference stands: p·v stays finite up to |v| = 2^63. In float16 p
# itself is not up to there, and the row of acc then not finite.
LIMIT = gl.constexpr(2.0**64)
LEAST = gl.constexpr(2.0**-64)  # and the smallest where the reference is 0
# A row of a part: acc, m and l, padded so that rows stay aligned.
PART_WIDTH = gl.constexpr(68)


@aggregate
class Pipeline:
    """Shared memory and barriers between the producer and the consumers, and what is to be done.

    Each program takes up to `n_whole` query tiles and then `share`, perhaps 0, of the key blocks of
    the tiles left.
    """

    q: gl.shared_memory_descriptor  # two tiles of CONSUMERS × [64, D]; o leaves through them
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor  # keys of one block and values of the one LAG before
    empty: gl.shared_memory_descriptor
    overflow: gl.shared_memory_descriptor  # 1 where a reference did not stand
    done: gl.shared_memory_descriptor  # all consumers with all tiles, and `overflow` with it
    n_keys_ptr: gl.tensor
    n_tiles: gl.tensor
    n_heads: gl.tensor
    n_q: gl.tensor
    n_k: gl.tensor
    n_whole: gl.tensor
    share: gl.tensor
    scale_log2: gl.tensor
    BLOCK_N: gl.constexpr
    STAGES: gl.constexpr
    CONSUMERS: gl.constexpr
    HAS_N_KEYS: gl.constexpr
    BASE2: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, q, k, v, q_full, q_empty, full, empty, overflow, done, n_keys_ptr,
        n_tiles, n_heads, n_q, n_k, n_whole, share, scale_log2,
        BLOCK_N, STAGES, CONSUMERS, HAS_N_KEYS, BASE2,
    ):  # fmt: skip
        self.q, self.k, self.v = q, k, v
        self.q_full, self.q_empty = q_full, q_empty
        self.full, self.empty = full, empty
        self.overflow, self.done, self.n_keys_ptr = overflow, done, n_keys_ptr
        self.n_tiles, self.n_heads, self.n_q, self.n_k = n_tiles, n_heads, n_q, n_k
        self.n_whole, self.share, self.scale_log2 = n_whole, share, scale_log2
        self.BLOCK_N, self.STAGES = gl.constexpr(BLOCK_N), gl.constexpr(STAGES)
        self.CONSUMERS = gl.constexpr(CONSUMERS)
        self.HAS_N_KEYS, self.BASE2 = gl.constexpr(HAS_N_KEYS), gl.constexpr(BASE2)

    @gluon.jit
    def n_items(self):
        """Most tiles that a program works on, whole or in part; `item` says which exist."""
        return self.n_whole + 2

    @gluon.jit
    def item(self, i):
        """Index, head of the batch, first query row, keys, first and last + 1 of the key blocks."""
        i = opaque(i)
        program = opaque(gl.program_id(0))
        keys = opaque(self.n_k)
        blocks = gl.cdiv(keys, self.BLOCK_N)
        index = i * gl.num_programs(0) + program
        first = 0
        last = blocks
        if i >= self.n_whole:
            begin = program * self.share
            split = begin // blocks + i - self.n_whole
            index = self.n_whole * gl.num_programs(0) + split
            first = gl.maximum(begin - split * blocks, 0)
            last = gl.minimum(begin + self.share - split * blocks, blocks)
        rows: gl.constexpr = self.CONSUMERS * ROWS
        tiles_per_head = gl.cdiv(opaque(self.n_q), rows)
        bh = index // tiles_per_head
        if self.HAS_N_KEYS:
            exists = index < self.n_tiles
            n_keys = gl.load(self.n_keys_ptr + bh // self.n_heads, mask=exists, other=0)
            keys = gl.maximum(gl.minimum(n_keys, keys), 1)
            last = gl.cdiv(keys, self.BLOCK_N)
        return index, bh, (index % tiles_per_head) * rows, keys, first, last

    @gluon.jit
    def must_repeat(self, WARPS: gl.constexpr):
        """Whether some reference of the program did not stand; waits for all consumers."""
        one: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
        mbarrier.wait(self.done, 0)
        return gl.max(self.overflow.load(one), 0) > 0.0


@gluon.jit
def produce(pipe, q_desc, k_desc, v_desc, n, step):
    """Stream the program's items; n items and `step` stages came before. Both, after it."""
    for i in range(pipe.n_items()):
        index, bh, row, _keys, first, last = pipe.item(i)
        if (index < pipe.n_tiles) & (first < last):
            b = bh // pipe.n_heads
            h = bh % pipe.n_heads
            slot, phase = ring(n, 2)
            mbarrier.wait(pipe.q_empty.index(slot), phase ^ 1)
            mbarrier.expect(pipe.q_full.index(slot), pipe.CONSUMERS * q_desc.block_type.nbytes)
            for c in gl.static_range(pipe.CONSUMERS):
                load_tile(
                    q_desc, b, h, row + c * ROWS, pipe.q_full.index(slot),
                    pipe.q, slot * pipe.CONSUMERS + c,
                )  # fmt: skip
            blocks = last - first
            for j in range(blocks + LAG):
                stage, phase = ring(step + j, pipe.STAGES)
                mbarrier.wait(pipe.empty.index(stage), phase ^ 1)
                full = pipe.full.index(stage)
                has_k = j < blocks
                has_v = j >= LAG
                # Two arrivals complete a stage: the keys' and the values', with or without bytes.
                mbarrier.expect(full, k_desc.block_type.nbytes, pred=has_k)
                mbarrier.arrive(full, count=1, pred=j >= blocks)
                mbarrier.expect(full, v_desc.block_type.nbytes, pred=has_v)
                mbarrier.arrive(full, count=1, pred=j < LAG)
                k_start = gl.where(j == 0, last - 1, first + j - 1) * pipe.BLOCK_N
                v_start = gl.where(j == LAG, last - 1, first + j - LAG - 1) * pipe.BLOCK_N
                load_tile(k_desc, b, h, k_start, full, pipe.k, stage, has_k)
                load_tile(v_desc, b, h, v_start, full, pipe.v, stage, has_v)
            step += blocks + LAG
            n += 1
    return n, step


@gluon.jit
def _producer(pipe, q_desc, k_desc, v_desc):
    n = 0
    step = 0
    n, step = produce(pipe, q_desc, k_desc, v_desc, n, step)
    if pipe.must_repeat(1):
        produce(pipe, q_desc, k_desc, v_desc, n, step)


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
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    p = gl.convert_layout(p.to(pipe.v.dtype), gl.DotOperandLayout(0, OUT, 2))
    return warpgroup_mma(p, tile(pipe.v, stage), acc, is_async=True)


@gluon.jit
def _softmax(pipe, s, m, l_i, ONLINE: gl.constexpr):
    """(p, alpha, m, l_i) after a block of scores; alpha rescales what was summed before."""
    if ONLINE:
        m_new = gl.maximum(m, gl.max(s, 1) * pipe.scale_log2)
        alpha = gl.exp2(m - m_new)
        p = gl.exp2(s * pipe.scale_log2 - m_new[:, None])
        return p, alpha, m_new, l_i * alpha + gl.sum(p, 1)
    else:
        p = gl.exp2(s) if pipe.BASE2 else gl.exp2(s * pipe.scale_log2 - m[:, None])
        return p, 1.0, m, l_i + lane_sums(p, pipe.BLOCK_N)


@gluon.jit
def _attend(pipe, q, step, keys, first, last, ONLINE: gl.constexpr):
    """acc [64, D], l_i [64] and m [64] of one warpgroup's rows over key blocks first … last − 1.

    `step` stages were consumed before. The reference m is of the first block unless ONLINE. ptxas
    waits for the values of the block before ahead of the exponentials; 64-key blocks are faster
    that way.
    """
    BLOCK_N: gl.constexpr = pipe.BLOCK_N
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, OUT)
    end = step + last - first

    stage, phase = ring(step, pipe.STAGES)
    mbarrier.wait(pipe.full.index(stage), phase)
    s = warpgroup_mma_wait(0, deps=[_scores(pipe, q, stage)])
    mbarrier.arrive(pipe.empty.index(stage), count=1)
    # Opaque, or one mask would be kept for both forms, and spill.
    columns = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, S))
    inside = (columns < opaque(keys - (last - 1) * BLOCK_N))[None, :]
    s = gl.where(inside, s, float("-inf"))
    m = gl.max(s, 1) * pipe.scale_log2
    if pipe.BASE2 and not ONLINE:
        # One block alone may have its reference: o is then exact where a sample has one key.
        m = gl.where(last - first == 1, m, 0.0)
    p = gl.exp2(s * pipe.scale_log2 - m[:, None])
    l_i = gl.sum(p, 1) if ONLINE else lane_sums(p, BLOCK_N)

    for j in range(step + 1, end):
        stage, phase = ring(j, pipe.STAGES)
        mbarrier.wait(pipe.full.index(stage), phase)
        s_started = _scores(pipe, q, stage)
        acc_started = _add_values(pipe, p, acc, stage)
        s = warpgroup_mma_wait(1, deps=[s_started])
        p, alpha, m, l_i = _softmax(pipe, s, m, l_i, ONLINE)
        acc = warpgroup_mma_wait(0, deps=[acc_started])
        if ONLINE:
            acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, OUT))[:, None]
        mbarrier.arrive(pipe.empty.index(stage), count=1)

    stage, phase = ring(end, pipe.STAGES)
    mbarrier.wait(pipe.full.index(stage), phase)
    acc = warpgroup_mma_wait(0, deps=[_add_values(pipe, p, acc, stage)])
    mbarrier.arrive(pipe.empty.index(stage), count=1)
    if not ONLINE:
        l_i = gl.convert_layout(gl.sum(l_i, 1), gl.SliceLayout(1, S))
    return acc, l_i, m


@gluon.jit
def store_part(pipe, part_ptr, i, acc, m, l_i, WARPGROUP: gl.constexpr):
    """Leave a warpgroup's acc [64, D], m [64] and l_i [64] of the program's i-th item, a part."""
    OUT: gl.constexpr = acc.type.layout
    part = 2 * gl.program_id(0) + i - pipe.n_whole
    part_rows = part * (pipe.CONSUMERS * ROWS) + WARPGROUP * ROWS
    rows = gl.arange(0, ROWS, layout=m.type.layout)
    acc_rows = part_rows + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
    offs_d = opaque(gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, OUT)))
    gl.store(part_ptr + acc_rows[:, None] * PART_WIDTH + offs_d[None, :], acc)
    gl.store(part_ptr + (part_rows + rows) * PART_WIDTH + HEAD_DIM, m)
    gl.store(part_ptr + (part_rows + rows) * PART_WIDTH + HEAD_DIM + 1, l_i)


@gluon.jit
def _consume(
    pipe, o_desc, lse_ptr, part_ptr, n, step, WARPGROUP: gl.constexpr, ONLINE: gl.constexpr
):  # fmt: skip
    """Attend for the program's items; n items and `step` stages came before. Both, after it."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, pipe.BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    DTYPE: gl.constexpr = o_desc.dtype
    for i in range(pipe.n_items()):
        index, bh, _row, keys, first, last = pipe.item(i)
        if (index < pipe.n_tiles) & (first < last):
            slot, phase = ring(n, 2)
            mbarrier.wait(pipe.q_full.index(slot), phase)
            # In registers, which relieves shared memory: 557 → 574 TFLOP/s (mid, H200).
            q = tile(pipe.q, slot * pipe.CONSUMERS + WARPGROUP)
            operand = q.load(gl.DotOperandLayout(0, S, 2))
            # The last tile's output has left shared memory by now.
            tma.store_wait(0)
            mbarrier.arrive(pipe.q_empty.index(slot ^ 1), count=1, pred=n > 0)
            acc, l_i, m = _attend(pipe, operand, step, keys, first, last, ONLINE)

            if not ONLINE:
                # Not l > LIMIT, which NaN would not be either.
                stands = l_i <= LIMIT
                if pipe.BASE2:
                    stands = stands & (l_i >= LEAST)
                failed = gl.max(gl.where(stands, 0.0, 1.0), 0)
                if o_desc.dtype == gl.float16:
                    failed += gl.max(gl.where(gl.sum(acc * 0.0, 1) == 0.0, 0.0, 1.0), 0)
                if failed > 0.0:
                    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
                    pipe.overflow.store(gl.full([1], 1.0, gl.float32, one))

            # Computed again: kept through the loops over keys it would spill.
            _index, bh, row, _keys, first, last = pipe.item(i)
            slot, _phase = ring(n, 2)
            q_slot = slot * pipe.CONSUMERS + WARPGROUP
            rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, S))
            row += WARPGROUP * ROWS
            if i < pipe.n_whole:
                acc = acc * gl.convert_layout(1.0 / l_i, gl.SliceLayout(1, OUT))[:, None]
                tile(pipe.q, q_slot).store(acc.to(DTYPE))
                fence_async_shared()
                tma.async_copy_shared_to_global(
                    o_desc, [bh // pipe.n_heads, bh % pipe.n_heads, row, 0], pipe.q.index(q_slot)
                )
                lse_ptrs = lse_ptr + bh.to(gl.int64) * pipe.n_q + row + rows
                gl.store(lse_ptrs, m + gl.log2(l_i), mask=row + rows < pipe.n_q)
            else:
                store_part(pipe, part_ptr, i, acc, m, l_i, WARPGROUP)
            step += last - first + LAG
            n += 1
    return n, step


@gluon.jit
def _consumer(pipe, o_desc, lse_ptr, part_ptr, WARPGROUP: gl.constexpr):
    n = 0
    step = 0
    n, step = _consume(pipe, o_desc, lse_ptr, part_ptr, n, step, WARPGROUP, False)
    mbarrier.arrive(pipe.done, count=1)
    if pipe.must_repeat(4):
        written()
        _consume(pipe, o_desc, lse_ptr, part_ptr, n, step, WARPGROUP, True)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["n_tiles", "n_heads", "n_q", "n_k", "n_whole", "share"])
def attention_fwd_hopper_kernel(
    q_desc, k_desc, v_desc, o_desc, lse_ptr, part_ptr, n_keys_ptr,
    n_tiles, n_heads, n_q, n_k, n_whole, share, scale_log2,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
    CONSUMERS: gl.constexpr, HAS_N_KEYS: gl.constexpr, BASE2: gl.constexpr,
):  # fmt: skip
    """o and lse of whole query tiles, and parts of those that are split."""
    flag: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    overflow = gl.allocate_shared_memory(
        gl.float32, [1], flag, gl.full([1], 0.0, gl.float32, one)
    )  # fmt: skip
    pipe = Pipeline(
        allocate_tiles(q_desc, 2 * CONSUMERS),
        allocate_tiles(k_desc, STAGES),
        allocate_tiles(v_desc, STAGES),
        barriers(2, 1), barriers(2, CONSUMERS),
        barriers(STAGES, 2), barriers(STAGES, CONSUMERS),
        overflow, barriers(1, CONSUMERS).index(0), n_keys_ptr,
        n_tiles, n_heads, n_q, n_k, n_whole, share, scale_log2,
        BLOCK_N, STAGES, CONSUMERS, HAS_N_KEYS, BASE2,
    )  # fmt: skip
    # An inline list: assigned to a name first, its constants would turn into tensors.
    if CONSUMERS == 3:
        gl.warp_specialize(
            [
                (_consumer, (pipe, o_desc, lse_ptr, part_ptr, 0)),
                (_consumer, (pipe, o_desc, lse_ptr, part_ptr, 1)),
                (_consumer, (pipe, o_desc, lse_ptr, part_ptr, 2)),
                (_producer, (pipe, q_desc, k_desc, v_desc)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (pipe, o_desc, lse_ptr, part_ptr, 0)),
                (_consumer, (pipe, o_desc, lse_ptr, part_ptr, 1)),
                (_producer, (pipe, q_desc, k_desc, v_desc)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
