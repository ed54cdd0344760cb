"""dQ of attention for Hopper, without atomics: a program owns query rows and walks the keys.

Two or three consumer warpgroups own 64 query rows each, a producer warp streams blocks of keys and
values through shared memory. With p = 2^(scale·log2(e)·q kᵀ − lse) and delta = Σ_d do·o:

    ds = p ∘ (do vᵀ − delta)    dq = scale · Σ_blocks ds k

The matmul that adds a block's ds k runs beside the next block's two. Blocks are walked from the
last that the rows see to the first: the one that may be ragged comes first, and without a mask the
loop needs none. A tile's warpgroups may see unlike blocks: they pass by those of the others.
"""

from dataclasses import dataclass

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
from triton.language.core import _aggregate as aggregate

from tnp.contract import Call
from tnp.launch import Bound
from tnp.ops.attention.hopper_primitives import (
    allocate_tiles,
    head_map,
    load_tile,
    ring,
    store_some,
    tile,
    tile_in_turn,
)
from tnp.ops.attention.keys import Reach, Tiles, key_range, lengths_given, place, seen
from tnp.ops.hopper_primitives import barriers, opaque

ROWS = gl.constexpr(64)  # query rows of a warpgroup


@dataclass(frozen=True)
class DqConfig:
    """Keys a block, blocks in flight (a power of two), registers of a consumer's thread."""

    block_n: int
    num_stages: int
    registers: int

    @property
    def consumers(self) -> int:
        """As many as there are registers for beside the producer's."""
        return 488 // self.registers

    @property
    def tile_rows(self) -> int:
        """Query rows of a program's tile."""
        return self.consumers * ROWS.value


@aggregate
class Pipeline:
    """Shared memory and barriers between the producer and the consumers, and which tiles to do."""

    q: gl.shared_memory_descriptor  # two tiles of CONSUMERS × [64, D]; dq leaves through them
    do: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    row_full: gl.shared_memory_descriptor  # q and do
    row_empty: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor  # k and v
    empty: gl.shared_memory_descriptor
    tiles_ptr: gl.tensor  # see `keys.place`
    cu_q_ptr: gl.tensor
    cu_k_ptr: gl.tensor
    n_keys_ptr: gl.tensor
    n_tiles: gl.tensor
    of_head: gl.tensor  # tiles of a head
    section: gl.tensor  # heads that are taken together
    n_heads: gl.tensor
    n_q: gl.tensor
    n_k: gl.tensor
    head_rows: gl.tensor  # of lse and delta, padded
    left: gl.tensor
    right: gl.tensor
    HEAD_DIM: gl.constexpr
    GROUP: gl.constexpr  # heads of queries that share one of keys
    BLOCK_N: gl.constexpr
    STAGES: gl.constexpr
    CONSUMERS: gl.constexpr
    HAS_N_KEYS: gl.constexpr
    PACKED: gl.constexpr
    LEFT: gl.constexpr
    RIGHT: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, q, do, k, v, row_full, row_empty, full, empty,
        tiles_ptr, cu_q_ptr, cu_k_ptr, n_keys_ptr,
        n_tiles, of_head, section, n_heads, n_q, n_k, head_rows, left, right,
        HEAD_DIM, GROUP, BLOCK_N, STAGES, CONSUMERS, HAS_N_KEYS, PACKED, LEFT, RIGHT,
    ):  # fmt: skip
        self.q, self.do, self.k, self.v = q, do, k, v
        self.row_full, self.row_empty = row_full, row_empty
        self.full, self.empty = full, empty
        self.tiles_ptr, self.cu_q_ptr, self.cu_k_ptr = tiles_ptr, cu_q_ptr, cu_k_ptr
        self.n_keys_ptr = n_keys_ptr
        self.n_tiles, self.of_head, self.section = n_tiles, of_head, section
        self.n_heads, self.n_q, self.n_k, self.head_rows = n_heads, n_q, n_k, head_rows
        self.left, self.right = left, right
        self.HEAD_DIM, self.GROUP = gl.constexpr(HEAD_DIM), gl.constexpr(GROUP)
        self.BLOCK_N, self.STAGES = gl.constexpr(BLOCK_N), gl.constexpr(STAGES)
        self.CONSUMERS = gl.constexpr(CONSUMERS)
        self.HAS_N_KEYS, self.PACKED = gl.constexpr(HAS_N_KEYS), gl.constexpr(PACKED)
        self.LEFT, self.RIGHT = gl.constexpr(LEFT), gl.constexpr(RIGHT)

    @gluon.jit
    def n_items(self):
        """Most tiles that a program works on; `item` says which exist."""
        return gl.cdiv(self.n_tiles, gl.num_programs(0))

    @gluon.jit
    def item(self, i):
        """Whether a program's i-th tile exists, head of the batch, first row in its sequence, the
        sequence's first row of queries and how many they are, its first row of keys and how many
        they are, and its first row of lse and delta.
        """
        index, bh, at = tile_in_turn(i, self.n_tiles, self.of_head, self.section)
        rows: gl.constexpr = self.CONSUMERS * ROWS
        row, first_q, n_rows, first_k, keys = place(
            at, bh // self.n_heads, self.tiles_ptr, self.cu_q_ptr, self.cu_k_ptr,
            self.n_keys_ptr, self.n_q, opaque(self.n_k), rows, self.PACKED, self.HAS_N_KEYS,
        )  # fmt: skip
        of_statistics = bh * self.head_rows
        if self.PACKED:
            s = gl.maximum(gl.load(self.tiles_ptr + 2 * at), 0)
            of_statistics += (first_q // ROWS + s) * ROWS
        exists = (index < self.n_tiles) & (row < n_rows)
        return exists, bh, row, first_q, n_rows, first_k, keys, of_statistics

    @gluon.jit
    def blocks(self, row, n_rows, keys, N_ROWS: gl.constexpr):
        """First and last + 1 of the key blocks that queries row … row + N_ROWS − 1 see, one where
        they see none, and the first and the last + 1 of those in which nothing is hidden.
        """
        begin, full_begin, full_end, end = key_range(
            row, n_rows, keys, self.left, self.right, N_ROWS, self.LEFT, self.RIGHT
        )
        last = gl.maximum(gl.cdiv(end, self.BLOCK_N), 1)
        first = gl.minimum(begin // self.BLOCK_N, last - 1)
        return first, gl.cdiv(full_begin, self.BLOCK_N), full_end // self.BLOCK_N, last


@gluon.jit
def _producer(pipe, q_desc, do_desc, k_desc, v_desc):
    n = 0
    t = 0
    rows: gl.constexpr = pipe.CONSUMERS * ROWS
    for i in range(pipe.n_items()):
        exists, bh, row, first_q, n_rows, first_k, keys, _of_statistics = pipe.item(i)
        if exists:
            b = bh // pipe.n_heads
            h = bh % pipe.n_heads
            of_keys = h // pipe.GROUP if pipe.GROUP > 1 else h
            first, _full_first, _full_last, last = pipe.blocks(row, n_rows, keys, rows)
            slot = t & 1
            full = pipe.row_full.index(slot)
            mbarrier.wait(pipe.row_empty.index(slot), ((t >> 1) & 1) ^ 1)
            mbarrier.expect(full, 2 * pipe.CONSUMERS * q_desc.block_type.nbytes)
            for c in gl.static_range(pipe.CONSUMERS):
                at = slot * pipe.CONSUMERS + c
                load_tile(q_desc, b, h, first_q + row + c * ROWS, full, pipe.q, at)
                load_tile(do_desc, b, h, first_q + row + c * ROWS, full, pipe.do, at)
            for j in range(last - first):
                stage, phase = ring(n + j, pipe.STAGES)
                mbarrier.wait(pipe.empty.index(stage), phase ^ 1)
                full = pipe.full.index(stage)
                mbarrier.expect(full, k_desc.block_type.nbytes + v_desc.block_type.nbytes)
                start = first_k + (last - 1 - j) * pipe.BLOCK_N
                load_tile(k_desc, b, of_keys, start, full, pipe.k, stage)
                load_tile(v_desc, b, of_keys, start, full, pipe.v, stage)
            n += last - first
            t += 1


@gluon.jit
def _products(pipe, q, do, stage):
    """Start q kᵀ and do vᵀ with a stage."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, pipe.BLOCK_N, 16])
    zeros = gl.zeros([ROWS, pipe.BLOCK_N], gl.float32, S)
    k_t = tile(pipe.k, stage).permute((1, 0))
    v_t = tile(pipe.v, stage).permute((1, 0))
    s = warpgroup_mma(q, k_t, zeros, use_acc=False, is_async=True)
    dp = warpgroup_mma(do, v_t, zeros, use_acc=False, is_async=True)
    return s, dp


@gluon.jit
def _add_dq(pipe, ds, dq, stage):
    """Start dq + ds k with the keys of a stage."""
    return warpgroup_mma(ds, tile(pipe.k, stage), dq, is_async=True)


@gluon.jit
def _operand(pipe, x):
    """x, rounded, as the left operand of a matmul with D columns."""
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, pipe.HEAD_DIM, 16])
    return gl.convert_layout(x.to(pipe.k.dtype), gl.DotOperandLayout(0, DQ, 2))


@gluon.jit
def _visible_or_zero(pipe, p, row, block, n_rows, keys):
    """p [64, BLOCK_N] of queries row … and a block of keys, 0 where a query does not see a key."""
    S: gl.constexpr = p.type.layout
    # Opaque: kept through the loops, indices and masks would spill.
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, S)) + opaque(row)
    columns = opaque(gl.arange(0, pipe.BLOCK_N, layout=gl.SliceLayout(0, S)))
    columns += block * pipe.BLOCK_N
    visible = seen(
        rows[:, None], columns[None, :], n_rows, keys, pipe.left, pipe.right, pipe.LEFT, pipe.RIGHT
    )
    return gl.where(visible, p, 0.0)


@gluon.jit
def _next_block(
    pipe, q, do, lse, delta, scale_log2, j, ds, dq, row, block, n_rows, keys, HIDDEN: gl.constexpr
):  # fmt: skip
    """(ds, dq) after the block in stage j, whose two products run beside the last one's ds k."""
    last, _phase = ring(j - 1, pipe.STAGES)
    stage, phase = ring(j, pipe.STAGES)
    mbarrier.wait(pipe.full.index(stage), phase)
    s_started, dp_started = _products(pipe, q, do, stage)
    dq_started = _add_dq(pipe, ds, dq, last)
    s = warpgroup_mma_wait(2, deps=[s_started])
    p = gl.exp2(s * scale_log2 - lse)
    if HIDDEN:
        p = _visible_or_zero(pipe, p, row, block, n_rows, keys)
    dp = warpgroup_mma_wait(1, deps=[dp_started])
    ds_next = p * (dp - delta)
    dq = warpgroup_mma_wait(0, deps=[dq_started])
    mbarrier.arrive(pipe.empty.index(last), count=1)
    return _operand(pipe, ds_next), dq


@gluon.jit
def _pass_by(pipe, begin, end):
    """Hand the stages begin … end − 1 back unread."""
    for j in range(begin, end):
        stage, phase = ring(j, pipe.STAGES)
        mbarrier.wait(pipe.full.index(stage), phase)
        mbarrier.arrive(pipe.empty.index(stage), count=1)


@gluon.jit
def _walk(pipe, q, do, lse, delta, scale_log2, n, row, n_rows, keys, WARPGROUP: gl.constexpr):
    """dq (unscaled) of a warpgroup's rows over the blocks that its tile, which begins with `row`,
    sees; n stages came before. And the stages after it.
    """
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, pipe.HEAD_DIM, 16])
    rows: gl.constexpr = pipe.CONSUMERS * ROWS
    first, _full_first, _full_last, last = pipe.blocks(row, n_rows, keys, rows)
    row += WARPGROUP * ROWS
    own_first, full_first, full_last, own_last = pipe.blocks(row, n_rows, keys, ROWS)
    own_last = gl.maximum(gl.minimum(own_last, last), first + 1)
    own_first = gl.maximum(gl.minimum(own_first, own_last - 1), first)
    # Stages: the first block is in `begin`, and from `plain` to `hidden` − 1 nothing is hidden.
    begin = n + last - own_last
    end = begin + own_last - own_first
    plain = gl.minimum(gl.maximum(n + last - full_last, begin + 1), end)
    hidden = end
    if pipe.LEFT:
        hidden = gl.minimum(gl.maximum(n + last - full_first, plain), end)
    block_of_0 = n + last - 1  # block of stage 0
    _pass_by(pipe, n, begin)
    stage, phase = ring(begin, pipe.STAGES)
    mbarrier.wait(pipe.full.index(stage), phase)
    s_started, dp_started = _products(pipe, q, do, stage)
    s, dp = warpgroup_mma_wait(0, deps=[s_started, dp_started])
    p = gl.exp2(s * scale_log2 - lse)
    p = _visible_or_zero(pipe, p, row, own_last - 1, n_rows, keys)
    ds = _operand(pipe, p * (dp - delta))
    dq = gl.zeros([ROWS, pipe.HEAD_DIM], gl.float32, DQ)
    if pipe.RIGHT:
        for j in range(begin + 1, plain):
            ds, dq = _next_block(
                pipe, q, do, lse, delta, scale_log2, j, ds, dq, row, block_of_0 - j, n_rows, keys,
                True,
            )  # fmt: skip
    for j in range(plain if pipe.RIGHT else begin + 1, hidden):
        ds, dq = _next_block(
            pipe, q, do, lse, delta, scale_log2, j, ds, dq, row, 0, n_rows, keys, False
        )
    if pipe.LEFT:
        for j in range(hidden, end):
            ds, dq = _next_block(
                pipe, q, do, lse, delta, scale_log2, j, ds, dq, row, block_of_0 - j, n_rows, keys,
                True,
            )  # fmt: skip
    stage, _phase = ring(end - 1, pipe.STAGES)
    dq = warpgroup_mma_wait(0, deps=[_add_dq(pipe, ds, dq, stage)])
    mbarrier.arrive(pipe.empty.index(stage), count=1)
    _pass_by(pipe, end, n + last - first)
    return dq, n + last - first


@gluon.jit
def _consumer(pipe, dq_desc, dq_ptr, stats_ptr, scale, scale_log2, WARPGROUP: gl.constexpr):
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, pipe.BLOCK_N, 16])
    DTYPE: gl.constexpr = dq_desc.dtype
    n = 0
    t = 0
    n_statistics = (pipe.n_tiles // pipe.of_head).to(gl.int64) * pipe.head_rows
    for i in range(pipe.n_items()):
        exists, bh, row, first_q, n_rows, _first_k, keys, of_statistics = pipe.item(i)
        if exists:
            own = row + WARPGROUP * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S))
            ptrs = stats_ptr + of_statistics.to(gl.int64) + own
            # An lse of +inf makes p zero on rows past the end.
            lse = gl.load(ptrs, mask=own < n_rows, other=float("inf"))[:, None]
            delta = gl.load(ptrs + n_statistics, mask=own < n_rows, other=0.0)[:, None]
            slot = (t & 1) * pipe.CONSUMERS + WARPGROUP
            mbarrier.wait(pipe.row_full.index(t & 1), (t >> 1) & 1)
            q = tile(pipe.q, slot)
            do = tile(pipe.do, slot)
            dq, n = _walk(
                pipe, q, do, lse, delta, scale_log2, n, row, n_rows, keys, WARPGROUP
            )  # fmt: skip

            if pipe.PACKED:
                # Computed again: kept through the walk it would spill.
                _exists, bh, row, first_q, n_rows, _first_k, _keys, _of_statistics = pipe.item(i)
            row += WARPGROUP * ROWS
            if row + ROWS <= n_rows or not pipe.PACKED:
                q.store((dq * scale).to(DTYPE))
                fence_async_shared()
                tma.async_copy_shared_to_global(
                    dq_desc, [bh // pipe.n_heads, bh % pipe.n_heads, first_q + row, 0],
                    pipe.q.index(slot),
                )  # fmt: skip
                tma.store_wait(0)
            else:  # the rows that follow are another sequence's
                store_some(
                    dq_ptr, (dq * scale).to(DTYPE), bh, first_q + row, first_q + n_rows,
                    pipe.n_heads,
                )  # fmt: skip
            mbarrier.arrive(pipe.row_empty.index(t & 1), count=1)
            t += 1


@gluon.jit(
    do_not_specialize=[
        "n_tiles", "of_head", "section", "n_heads", "n_q", "n_k", "head_rows", "left", "right",
    ]
)  # fmt: skip
def _attention_bwd_dq_hopper_kernel(
    q_desc, do_desc, k_desc, v_desc, dq_desc, dq_ptr, stats_ptr,
    tiles_ptr, cu_q_ptr, cu_k_ptr, n_keys_ptr,
    n_tiles, of_head, section, n_heads, n_q, n_k, head_rows, left, right, scale, scale_log2,
    HEAD_DIM: gl.constexpr, GROUP: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr, CONSUMERS: gl.constexpr, HAS_N_KEYS: gl.constexpr,
    PACKED: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
):  # fmt: skip
    pipe = Pipeline(
        allocate_tiles(q_desc, 2 * CONSUMERS),
        allocate_tiles(do_desc, 2 * CONSUMERS),
        allocate_tiles(k_desc, STAGES),
        allocate_tiles(v_desc, STAGES),
        barriers(2, 1), barriers(2, CONSUMERS), barriers(STAGES, 1), barriers(STAGES, CONSUMERS),
        tiles_ptr, cu_q_ptr, cu_k_ptr, n_keys_ptr,
        n_tiles, of_head, section, n_heads, n_q, n_k, head_rows, left, right,
        HEAD_DIM, GROUP, BLOCK_N, STAGES, CONSUMERS, HAS_N_KEYS, PACKED, LEFT, RIGHT,
    )  # fmt: skip
    if CONSUMERS == 3:
        gl.warp_specialize(
            [
                (_consumer, (pipe, dq_desc, dq_ptr, stats_ptr, scale, scale_log2, 0)),
                (_consumer, (pipe, dq_desc, dq_ptr, stats_ptr, scale, scale_log2, 1)),
                (_consumer, (pipe, dq_desc, dq_ptr, stats_ptr, scale, scale_log2, 2)),
                (_producer, (pipe, q_desc, do_desc, k_desc, v_desc)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (pipe, dq_desc, dq_ptr, stats_ptr, scale, scale_log2, 0)),
                (_consumer, (pipe, dq_desc, dq_ptr, stats_ptr, scale, scale_log2, 1)),
                (_producer, (pipe, q_desc, do_desc, k_desc, v_desc)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )


def bound_dq(
    call: Call, q: Tensor, k: Tensor, table: Tiles, head_rows: int, section: int, config: DqConfig
) -> Bound:
    """Of q, do, k, v, dq, dq, the statistics, what `Tiles.pointers` gives of the table, scale and
    scale·log2(e).

    The statistics are lse and delta, float32 [2, rows], of padded rows.

    Args:
        call: what is asked.
        q, k: [B, H, n_q, D] and [B, H_kv, n_k, D], whose sizes count.
        table: tiles of `config.tile_rows` queries.
        head_rows: of a head in the statistics.
        section: heads of queries that programs take together.
        config: what to launch with.
    """
    batch, n_heads, n_q, head_dim = q.shape
    n_kv_heads, n_k = k.shape[1:3]
    n_tiles = table.n * batch * n_heads
    of_q, of_k = head_map(ROWS.value), head_map(config.block_n)
    reach = Reach.of(call.problem)
    return Bound(
        _attention_bwd_dq_hopper_kernel, (min(n_tiles, call.target.multiprocessors),),
        n_tiles, table.n, section, n_heads, n_q, n_k, head_rows, *reach.numbers,
        maps=(of_q, of_q, of_k, of_k, of_q),
        HEAD_DIM=head_dim, GROUP=n_heads // n_kv_heads, BLOCK_N=config.block_n,
        STAGES=config.num_stages, REGISTERS=config.registers, CONSUMERS=config.consumers,
        **lengths_given(call), **reach.constants, num_warps=4,
    )  # fmt: skip
