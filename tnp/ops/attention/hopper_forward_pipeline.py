"""What the partitions of the forward kernels for Hopper share: memory and barriers, what a program
works on, and the producer that streams it.

Without a mask all tiles of queries see as many keys. A program takes its share of them whole, and
those left over are split along the keys where that pays. With a mask the tiles that see most come
first: programs take them in turn, there and back, so that each has as much to do. Heads are taken
in sections whose keys and values stay in the L2 cache together.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate as aggregate

from tnp.ops._shared.hopper_primitives import opaque
from tnp.ops.attention.hopper_primitives import load_tile, ring, tile_in_turn
from tnp.ops.attention.keys import key_range, place

ROWS = gl.constexpr(64)  # query rows of a warpgroup
# Blocks that the values run behind the keys.
LAG = gl.constexpr(1)


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
    failed: gl.shared_memory_descriptor  # 1 for a row whose reference did not stand
    overflow: gl.shared_memory_descriptor  # 1 for a warpgroup that has such a row
    done: gl.shared_memory_descriptor  # all consumers with all tiles, and `overflow` with it
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
    n_whole: gl.tensor
    share: gl.tensor  # with a mask the rounds that a section takes
    left: gl.tensor
    right: gl.tensor
    scale_log2: gl.tensor
    HEAD_DIM: gl.constexpr
    GROUP: gl.constexpr  # heads of queries that share one of keys
    BLOCK_N: gl.constexpr
    STAGES: gl.constexpr
    CONSUMERS: gl.constexpr
    HAS_N_KEYS: gl.constexpr
    PACKED: gl.constexpr
    LEFT: gl.constexpr
    RIGHT: gl.constexpr
    MASKED: gl.constexpr  # some query does not see all keys of its sequence
    BASE2: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, q, k, v, q_full, q_empty, full, empty, failed, overflow, done,
        tiles_ptr, cu_q_ptr, cu_k_ptr, n_keys_ptr,
        n_tiles, of_head, section, n_heads, n_q, n_k, n_whole, share, left, right, scale_log2,
        HEAD_DIM, GROUP, BLOCK_N, STAGES, CONSUMERS, HAS_N_KEYS, PACKED, LEFT, RIGHT, BASE2,
    ):  # fmt: skip
        self.q, self.k, self.v = q, k, v
        self.q_full, self.q_empty = q_full, q_empty
        self.full, self.empty = full, empty
        self.failed, self.overflow, self.done = failed, overflow, done
        self.tiles_ptr, self.cu_q_ptr, self.cu_k_ptr = tiles_ptr, cu_q_ptr, cu_k_ptr
        self.n_keys_ptr = n_keys_ptr
        self.n_tiles, self.of_head, self.section = n_tiles, of_head, section
        self.n_heads, self.n_q, self.n_k = n_heads, n_q, n_k
        self.n_whole, self.share = n_whole, share
        self.left, self.right, self.scale_log2 = left, right, scale_log2
        self.HEAD_DIM, self.GROUP = gl.constexpr(HEAD_DIM), gl.constexpr(GROUP)
        self.BLOCK_N, self.STAGES = gl.constexpr(BLOCK_N), gl.constexpr(STAGES)
        self.CONSUMERS = gl.constexpr(CONSUMERS)
        self.HAS_N_KEYS, self.PACKED = gl.constexpr(HAS_N_KEYS), gl.constexpr(PACKED)
        self.LEFT, self.RIGHT = gl.constexpr(LEFT), gl.constexpr(RIGHT)
        self.MASKED = gl.constexpr(LEFT or RIGHT or PACKED)
        self.BASE2 = gl.constexpr(BASE2)

    @gluon.jit
    def n_items(self):
        """Most tiles that a program works on, whole or in part; `item` says which exist."""
        # Without the way past a loop of no items, whose registers are merged with the loop's.
        gl.assume(self.n_whole >= 0)
        gl.assume(self.n_whole < 2**30)
        return self.n_whole + 2

    @gluon.jit
    def item(self, i):
        """Index, head of the batch, first query row, queries, keys, first and last + 1 of the key
        blocks.
        """
        if self.MASKED:
            return self.masked_item(i)
        else:
            return self.plain_item(i)

    @gluon.jit
    def masked_item(self, i):
        """As `item`; rows and blocks count from where their sequence begins."""
        index, bh, row, _first_q, n_rows, _first_k, keys = self.origin(i)
        rows: gl.constexpr = self.CONSUMERS * ROWS
        first, last = self.blocks(row, n_rows, keys, rows, 0, gl.cdiv(keys, self.BLOCK_N))
        return index, bh, row, n_rows, keys, first, last

    @gluon.jit
    def origin(self, i):
        """Index, head of the batch, first query row in its sequence, first row of the sequence's
        queries and how many they are, first row of its keys and how many they are. The first row is
        negative where a sequence's first tile has warpgroups without rows.
        """
        index, bh, tile = tile_in_turn(
            i, self.n_tiles, self.of_head, self.section,
            self.share if self.RIGHT and not self.LEFT else None,
        )  # fmt: skip
        rows: gl.constexpr = self.CONSUMERS * ROWS
        row, first_q, n_rows, first_k, keys = place(
            tile, bh // self.n_heads, self.tiles_ptr, self.cu_q_ptr, self.cu_k_ptr,
            self.n_keys_ptr, self.n_q, opaque(self.n_k), rows, self.PACKED, self.HAS_N_KEYS,
        )  # fmt: skip
        index = gl.where(row < n_rows, index, self.n_tiles)
        # Warpgroups without rows are those of the sequence's first tile, which sees fewest keys.
        row -= (gl.cdiv(n_rows, rows) * self.CONSUMERS - gl.cdiv(n_rows, ROWS)) * ROWS
        return index, bh, row, first_q, n_rows, first_k, keys

    @gluon.jit
    def blocks(self, row, n_rows, keys, N_ROWS: gl.constexpr, least, most):
        """First and last + 1 of the key blocks that queries row … row + N_ROWS − 1 see, within
        least … most − 1; one where they see none.
        """
        begin, _full_begin, _full_end, end = key_range(
            row, n_rows, keys, self.left, self.right, N_ROWS, self.LEFT, self.RIGHT
        )
        last = gl.maximum(gl.minimum(gl.cdiv(end, self.BLOCK_N), most), least + 1)
        first = gl.maximum(gl.minimum(begin // self.BLOCK_N, last - 1), least)
        return first, last

    @gluon.jit
    def plain_item(self, i):
        """As `item`, where every query sees all keys of its sample."""
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
        row = (index % tiles_per_head) * rows
        return index, bh, row, self.n_q, keys, first, last

    @gluon.jit
    def must_repeat(self, WARPS: gl.constexpr):
        """Whether some reference of the program did not stand; waits for all consumers."""
        # Each thread reads all of them: the compiler then knows that threads agree.
        whole: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
        mbarrier.wait(self.done, 0)
        return gl.max(self.overflow.load(whole), 0) > 0.0


@gluon.jit
def produce(pipe, q_desc, k_desc, v_desc, n, step):
    """Stream the program's items; n items and `step` stages came before. Both, after it."""
    for i in range(pipe.n_items()):
        index, bh, row, _n_rows, _keys, first, last = pipe.item(i)
        if (index < pipe.n_tiles) & (first < last):
            b = bh // pipe.n_heads
            h = bh % pipe.n_heads
            of_keys = h // pipe.GROUP if pipe.GROUP > 1 else h
            first_k = 0
            if pipe.PACKED:
                _index, _bh, _row, first_q, _rows, first_k, _keys = pipe.origin(i)
                row += first_q
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
                if pipe.MASKED:  # from the diagonal on
                    k_start = first_k + (last - 1 - j) * pipe.BLOCK_N
                    v_start = k_start + LAG * pipe.BLOCK_N
                else:
                    k_start = gl.where(j == 0, last - 1, first + j - 1) * pipe.BLOCK_N
                    v_start = gl.where(j == LAG, last - 1, first + j - LAG - 1) * pipe.BLOCK_N
                load_tile(k_desc, b, of_keys, k_start, full, pipe.k, stage, has_k)
                load_tile(v_desc, b, of_keys, v_start, full, pipe.v, stage, has_v)
            step += blocks + LAG
            n += 1
    return n, step
