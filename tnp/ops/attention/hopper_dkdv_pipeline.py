"""What the partitions of `hopper_dkdv` share: memory and barriers, and what a program works on."""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from tnp.dispatch.spec import Call
from tnp.ops._shared.hopper_primitives import opaque
from tnp.ops.attention.hopper_primitives import ring
from tnp.ops.attention.keys import block_in_turn, blocks_after, blocks_before, place, query_tiles

ROWS = gl.constexpr(64)  # keys of a consumer, and queries of a tile
BLOCK_N = gl.constexpr(128)
# Rounds of programs that a section of heads has at least. Of 196 causal problems the busiest
# multiprocessor then has 3 % more to do than the average, and 16 % head by head (counted).
LEAST = 1.5


def heads_in_turn(call: Call, of_head: int, n_heads: int) -> int:
    """Heads of keys one block of each of which is launched in turn.

    As many as fill the GPU between LEAST and twice as many times, in sections as equal as they can
    be: of a small one at the end items that take longest would be launched last. Of all heads too
    little would be in the L2 cache. In a window all items take as long, and a head's blocks follow
    one another: `fused` took 4.26 ms with four heads in turn, and 3.94 before any were (H200, D =
    128, 2 × 8,192 tokens, window of 4,096).

    Args:
        call: whose GPU it is.
        of_head: blocks of keys of a head.
        n_heads: of keys, of all samples.
    """
    if call.problem["window"]:
        return 1
    least = min(triton.cdiv(int(LEAST * call.target.multiprocessors), of_head), n_heads)
    return min(range(least, min(2 * least, n_heads) + 1), key=lambda heads: -n_heads % heads)


@aggregate
class Pipeline:
    """Shared memory and barriers between the partitions, and what the program works on."""

    q: gl.shared_memory_descriptor
    do: gl.shared_memory_descriptor
    lse: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor  # of each slot a tile a consumer
    v: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor
    dq: gl.shared_memory_descriptor
    key_full: gl.shared_memory_descriptor  # a consumer's keys and values
    key_empty: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor  # a tile of queries: q, do, lse, delta
    empty: gl.shared_memory_descriptor
    ds_full: gl.shared_memory_descriptor
    ds_empty: gl.shared_memory_descriptor
    dq_full: gl.shared_memory_descriptor  # 64 columns of a tile of dq
    dq_empty: gl.shared_memory_descriptor
    tiles_ptr: gl.tensor  # see `keys.place`
    cu_q_ptr: gl.tensor
    cu_k_ptr: gl.tensor
    n_keys_ptr: gl.tensor
    left_ptr: gl.tensor  # of each head, whether do of some query tile is as it was
    count_ptr: gl.tensor  # of each tile of queries, how many blocks of keys added to its dq
    n_heads: gl.tensor  # of keys, or where they are SHARED of queries
    n_q: gl.tensor
    n_k: gl.tensor
    n_items: gl.tensor
    n_whole: gl.tensor  # items that are not split
    n_pieces: gl.tensor  # of each of the others
    of_head: gl.tensor  # items of a head
    section: gl.tensor  # heads of keys that programs take in turn where ORDERED or RIGHT
    head_rows: gl.tensor  # of a head of queries, padded
    left: gl.tensor
    right: gl.tensor
    HEAD_DIM: gl.constexpr
    GROUP: gl.constexpr  # heads of queries that share one of keys, and a program walks
    SHARED: gl.constexpr  # heads that share one of keys, where each has programs of its own, or 1
    STAGES: gl.constexpr
    HAS_N_KEYS: gl.constexpr
    PACKED: gl.constexpr
    LEFT: gl.constexpr
    RIGHT: gl.constexpr
    PLAIN: gl.constexpr  # every query sees all keys of its sample, D = 64, no heads share keys
    PERSISTENT: gl.constexpr
    BASE2: gl.constexpr
    SPLIT: gl.constexpr
    APART: gl.constexpr  # dk and dv are [B, n_k, H, D] each, not halves of [B, n_k, 2, H, D]
    ORDERED: gl.constexpr  # dq is added up in one order
    LAST_FIRST: gl.constexpr  # and that is from a head's last block of keys to the first

    @gluon.constexpr_function
    def __init__(
        self, q, do, lse, delta, k, v, ds, dq, key_full, key_empty, full, empty, ds_full, ds_empty,
        dq_full, dq_empty,
        tiles_ptr, cu_q_ptr, cu_k_ptr, n_keys_ptr, left_ptr, count_ptr,
        n_heads, n_q, n_k, n_items, n_whole, n_pieces, of_head, section, head_rows, left, right,
        HEAD_DIM, GROUP, SHARED, STAGES, HAS_N_KEYS, PACKED, LEFT, RIGHT, PERSISTENT, BASE2, SPLIT,
        APART, ORDERED,
    ):  # fmt: skip
        self.q, self.do, self.lse, self.delta = q, do, lse, delta
        self.k, self.v, self.ds, self.dq = k, v, ds, dq
        self.key_full, self.key_empty = key_full, key_empty
        self.full, self.empty = full, empty
        self.ds_full, self.ds_empty = ds_full, ds_empty
        self.dq_full, self.dq_empty = dq_full, dq_empty
        self.tiles_ptr, self.cu_q_ptr, self.cu_k_ptr = tiles_ptr, cu_q_ptr, cu_k_ptr
        self.n_keys_ptr, self.left_ptr, self.count_ptr = n_keys_ptr, left_ptr, count_ptr
        self.n_heads, self.n_q, self.n_k = n_heads, n_q, n_k
        self.n_items, self.n_whole, self.n_pieces = n_items, n_whole, n_pieces
        self.of_head, self.section, self.head_rows = of_head, section, head_rows
        self.left, self.right = left, right
        self.HEAD_DIM, self.GROUP = gl.constexpr(HEAD_DIM), gl.constexpr(GROUP)
        self.SHARED, self.STAGES = gl.constexpr(SHARED), gl.constexpr(STAGES)
        self.HAS_N_KEYS, self.PACKED = gl.constexpr(HAS_N_KEYS), gl.constexpr(PACKED)
        self.LEFT, self.RIGHT = gl.constexpr(LEFT), gl.constexpr(RIGHT)
        self.PLAIN = gl.constexpr(HEAD_DIM == 64 and GROUP == 1 and not (LEFT or RIGHT or PACKED))
        self.PERSISTENT, self.BASE2 = gl.constexpr(PERSISTENT), gl.constexpr(BASE2)
        self.SPLIT, self.APART = gl.constexpr(SPLIT), gl.constexpr(APART)
        self.ORDERED = gl.constexpr(ORDERED)
        self.LAST_FIRST = gl.constexpr(ORDERED and LEFT)

    @gluon.jit
    def item(self):
        """Of a program that has one, or a piece of one."""
        program = gl.program_id(0)
        if self.SPLIT:
            # Rounded towards zero: never less than the program where that has a whole item.
            of_piece = self.n_whole + (program - self.n_whole) // self.n_pieces
            return gl.minimum(program, of_piece)
        else:
            return program

    @gluon.jit
    def block(self, item):
        """Head of the batch and block of keys of an item: kept through the loop they would spill.

        Heads may be taken in sections, one block of each in turn. Where ORDERED the next block of
        a head, which waits for this one, is then launched later; where RIGHT earlier blocks see
        more queries, and those that take longest are launched first.
        """
        item = opaque(item)
        if self.ORDERED or self.RIGHT:
            of_head = opaque(self.of_head)
            return block_in_turn(item, self.n_items, of_head, self.section, self.LAST_FIRST)
        else:
            return item // self.of_head, item % self.of_head

    @gluon.jit
    def place(self, item):
        """Sample, head, and first key of an item."""
        bh, block = self.block(item)
        return bh // self.n_heads, bh % self.n_heads, block * BLOCK_N

    @gluon.jit
    def turn(self, item):
        """The slot of an item's keys and its phase, and the stages of the program before it.

        Every item walks as many stages, which is why a program is not persistent given n_keys.
        """
        if self.PERSISTENT:
            before = (opaque(item) - gl.program_id(0)) // gl.num_programs(0)
            slot, phase = ring(before, 2)
            return slot, phase, before * gl.cdiv(opaque(self.n_q), ROWS)
        else:
            return 0, 0, 0

    @gluon.jit
    def extent(self, item):
        """Keys of an item's sample, the stage that its walk begins with, and how many it has.

        Opaque where there is a loop over items, out of which they would be hoisted and spill.
        """
        keys = opaque(self.n_k) if self.PERSISTENT else self.n_k
        n_stages = gl.cdiv(opaque(self.n_q) if self.PERSISTENT else self.n_q, ROWS)
        if self.HAS_N_KEYS:
            b, _h, first_key = self.place(item)
            keys = gl.maximum(gl.minimum(gl.load(self.n_keys_ptr + b), keys), 1)
            n_stages = gl.where(first_key < keys, n_stages, 0)
        if self.SPLIT:
            at = gl.program_id(0) - opaque(self.n_whole)
            n_pieces = gl.where(at < 0, 1, self.n_pieces)
            at = gl.maximum(at, 0) % n_pieces
            first = at * n_stages // n_pieces
            return keys, first, (at + 1) * n_stages // n_pieces - first
        else:
            return keys, 0, n_stages

    @gluon.jit
    def origin(self, item):
        """Sample, head of keys, first key in its sequence, the sequence's first row of queries and
        how many they are, its first row of keys and how many they are, and its first row in a
        head's padded lse, delta and dq.
        """
        bh, tile = self.block(item)
        b = bh // self.n_heads
        key, first_q, n_rows, first_k, keys = place(
            tile, b, self.tiles_ptr, self.cu_q_ptr, self.cu_k_ptr, self.n_keys_ptr,
            opaque(self.n_q), opaque(self.n_k), BLOCK_N, self.PACKED, self.HAS_N_KEYS,
        )  # fmt: skip
        padded = 0
        if self.PACKED:
            # Tiles of queries that begin with their sequence: no two sequences share one.
            s = gl.maximum(gl.load(self.tiles_ptr + 2 * tile), 0)
            padded = (first_q // ROWS + s) * ROWS
        return b, bh % self.n_heads, key, first_q, n_rows, first_k, keys, padded

    @gluon.jit
    def tiles(self, key, n_rows, keys):
        """Tiles of queries that see any of an item's keys, key …: the first and the last + 1."""
        return query_tiles(
            key, n_rows, keys, self.left, self.right, BLOCK_N, ROWS, self.LEFT, self.RIGHT
        )

    @gluon.jit
    def count_of(self, padded):
        """Where blocks of keys count that they added to dq of rows padded … padded + 63."""
        return self.count_ptr + padded // ROWS

    @gluon.jit
    def blocks_before(self, key, row, n_rows, keys):
        """Blocks of keys that add to dq of queries row … row + 63 before that of `key` does."""
        if self.LAST_FIRST:
            before = blocks_after(
                key, row, n_rows, keys, self.left, self.right, BLOCK_N, ROWS, self.LEFT, self.RIGHT
            )
        else:
            before = blocks_before(
                key, row, n_rows, keys, self.left, self.right, BLOCK_N, ROWS, self.LEFT, self.RIGHT
            )
        return before

    @gluon.jit
    def stage_at(self, i, first, n):
        """Of a walk of n stages from `first` on the one after i others: queries, and which of the
        heads that share the keys.

        From the last queries back, of each tile all heads in turn: under a causal mask blocks that
        begin together then meet the same tiles one shortly after the other, and none comes up with
        one that has more to walk. In a window they do so head by head; and if LAST_FIRST from the
        first queries on: the blocks of a sequence's last keys, which have less to walk, then go
        ahead of the others in every head, and wait for none.
        """
        if self.PLAIN:
            return first + i, 0
        elif self.LAST_FIRST:
            return first + i % n, i // n
        elif self.LEFT:
            return first + n - 1 - i % n, i // n
        else:
            return first + n - 1 - i // self.GROUP, i % self.GROUP

    @gluon.jit
    def first_walked(self, begin, past):
        """First row of the stage that is walked first, of rows begin … past − 1."""
        return begin if self.LAST_FIRST else past - ROWS

    @gluon.jit
    def row_after(self, i, row, begin, past):
        """First row of the stage that is walked after the i-th, which begins with `row`."""
        if self.LAST_FIRST:
            return gl.where(row + ROWS == past, begin, row + ROWS)
        elif self.LEFT:
            return gl.where(row == begin, past, row) - ROWS
        else:
            # Opaque: ptxas of Triton 3.7 would spill.
            return gl.where((i + 1) % self.GROUP == 0, opaque(row) - ROWS, row)

    @gluon.jit
    def walk_of(self, item):
        """First tile of queries that an item walks, how many they are, the first row of queries in
        their head, and of the first of its heads of queries in the padded lse, delta and dq.
        """
        if self.PLAIN:
            _keys, first, n = self.extent(item)
            return first, n, 0, self.first_row(item)
        else:
            b, h, key, first_q, n_rows, _first_k, keys, padded = self.origin(item)
            first, last = self.tiles(key, n_rows, keys)
            head = (b * self.n_heads + h) * self.GROUP
            return first, last - first, first_q, head * opaque(self.head_rows) + padded

    @gluon.jit
    def first_row(self, item):
        """Of an item's head in the padded lse, delta and dq."""
        b, h, _first_key = self.place(item)
        return (b * self.n_heads + h) * self.head_rows

    @gluon.jit
    def weighted(self, item):
        """Whether do is times 2^−lse in all query tiles of an item's head."""
        b, h, _first_key = self.place(item)
        return gl.load(self.left_ptr + b * self.n_heads + h) == 0.0
