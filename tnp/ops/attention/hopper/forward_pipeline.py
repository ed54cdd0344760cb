"""Defines the state that all partitions of Hopper's forward kernels share, and their producer.

Without a mask all tiles of queries see equally many keys. A program takes its share of them whole,
and the tiles left over are split along the keys where that pays.

With a mask the tiles that see most keys come first. Programs take them in turn, there and back, so
that all programs have equally much to do. They take heads in sections whose keys and values stay
together in the L2 cache.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tnp.ops._shared.hopper_primitives import opaque, structure
from tnp.ops.attention.hopper.primitives import load_tile, ring, tile_in_turn
from tnp.ops.attention.keys import key_range, place

ROWS = gl.constexpr(64)  # query rows of a warpgroup
LAG = gl.constexpr(1)  # a stage holds the keys of one block and the values of the one LAG before


@structure
class Pipeline:
    """Holds shared memory and barriers between producer and consumers, and the problem's sizes.

    Each program takes up to `n_whole` query tiles. Then it takes `share`, perhaps 0, of the key
    blocks of the tiles left over.
    """

    q: gl.shared_memory_descriptor  # two tiles of CONSUMERS × [64, D]; o leaves through them
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor  # a stage
    empty: gl.shared_memory_descriptor
    failed: gl.shared_memory_descriptor  # 1 for a row whose reference was too small or too large
    overflow: gl.shared_memory_descriptor  # 1 for a warpgroup with a row that failed
    done: gl.shared_memory_descriptor  # all consumers have all tiles, and have written `overflow`
    tiles_ptr: gl.tensor  # see `keys.place`
    cu_q_ptr: gl.tensor
    cu_k_ptr: gl.tensor
    n_keys_ptr: gl.tensor
    n_tiles: gl.tensor
    of_head: gl.tensor  # tiles of a head
    section: gl.tensor  # heads that programs take together
    n_heads: gl.tensor
    n_q: gl.tensor
    n_k: gl.tensor
    n_whole: gl.tensor
    share: gl.tensor  # with a mask: the rounds that a section takes
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

    @gluon.jit
    def n_items(self):
        """Returns the most tiles that a program works on, whole or in part: see `item`."""
        # Without these the registers of a path around the loop would be merged with the loop's.
        gl.assume(self.n_whole >= 0)
        gl.assume(self.n_whole < 2**30)
        return self.n_whole + 2

    @gluon.jit
    def item(self, i):
        """Returns an item as seven numbers.

        They are its index, head of the batch, first query row, queries, keys, and the first and the
        last + 1 of its key blocks. There is no item if the index is n_tiles or more.
        """
        if self.MASKED:
            return self.masked_item(i)
        else:
            return self.plain_item(i)

    @gluon.jit
    def masked_item(self, i):
        """Returns the same as `item`. Rows and blocks count from the start of their sequence."""
        index, bh, row, _first_q, n_rows, _first_k, keys = self.origin(i)
        rows: gl.constexpr = self.CONSUMERS * ROWS
        first, last = self.blocks(row, n_rows, keys, rows, 0, gl.cdiv(keys, self.BLOCK_N))
        return index, bh, row, n_rows, keys, first, last

    @gluon.jit
    def origin(self, i):
        """Returns where an item lies, as seven numbers.

        They are its index, its head of the batch, its first query row in the sequence; the
        sequence's first row of queries and their number; its first row of keys and their number.
        The first query row is negative if the sequence's first tile has warpgroups without rows.
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
        # Warpgroups without rows belong to the sequence's first tile, which sees fewest keys.
        row -= (gl.cdiv(n_rows, rows) * self.CONSUMERS - gl.cdiv(n_rows, ROWS)) * ROWS
        return index, bh, row, first_q, n_rows, first_k, keys

    @gluon.jit
    def blocks(self, row, n_rows, keys, N_ROWS: gl.constexpr, least, most):
        """Returns the first and the last + 1 of the key blocks that queries row … row + N_ROWS − 1
        see, within least … most − 1. It is one block if they see none.
        """
        begin, _full_begin, _full_end, end = key_range(
            row, n_rows, keys, self.left, self.right, N_ROWS, self.LEFT, self.RIGHT
        )
        last = gl.maximum(gl.minimum(gl.cdiv(end, self.BLOCK_N), most), least + 1)
        first = gl.maximum(gl.minimum(begin // self.BLOCK_N, last - 1), least)
        return first, last

    @gluon.jit
    def plain_item(self, i):
        """Returns the same as `item`, if every query sees all keys of its sample."""
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
        """Waits for all consumers, and returns whether some row of the program failed."""
        # Each thread reads all of them: the compiler then knows that threads agree.
        whole: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
        mbarrier.wait(self.done, 0)
        return gl.max(self.overflow.load(whole), 0) > 0.0


@gluon.jit
def produce(pipe, q_desc, k_desc, v_desc, n, step):
    """Streams the program's items after `n` items and `step` stages. Returns both after it."""
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
