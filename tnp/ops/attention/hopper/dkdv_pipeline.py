"""Defines the state that partitions of the kernel in `dkdv` share: memory, barriers, items
of work.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tnp.dispatch.spec import Call
from tnp.ops._shared.hopper_primitives import opaque, structure
from tnp.ops.attention.hopper.primitives import ring
from tnp.ops.attention.keys import block_in_turn, blocks_after, blocks_before, place, query_tiles

ROWS = gl.constexpr(64)  # keys of a consumer, and queries of a tile
BLOCK_N = gl.constexpr(128)
# A section of heads has at least this many rounds of programs. Counted over 196 causal problems,
# the busiest multiprocessor then has 3 % more work than the average. With sections of one head it
# would have 16 % more.
LEAST = 1.5


def heads_in_turn(call: Call, of_head: int, n_heads: int) -> int:
    """Returns how many heads of keys are launched together, one block of each head in turn.

    They fill the GPU from LEAST to 2 · LEAST times, and all sections are as equal as possible: a
    small last section would launch its longest items last. All heads together would leave too
    little in the L2 cache.

    With a window it is 1, because all items are equally long. There `fused` took 4.26 ms with four
    heads in turn and 3.94 ms with one (H200, D = 128, 2 × 8,192 tokens, window of 4,096).

    Args:
        call: the call to serve; its target is the GPU.
        of_head: blocks of keys of a head.
        n_heads: heads of keys of all samples.
    """
    if call.problem["window"]:
        return 1
    least = min(triton.cdiv(int(LEAST * call.target.multiprocessors), of_head), n_heads)
    return min(range(least, min(2 * least, n_heads) + 1), key=lambda heads: -n_heads % heads)


@structure
class Pipeline:
    """Holds shared memory and barriers between the partitions, and the sizes of the problem."""

    q: gl.shared_memory_descriptor
    do: gl.shared_memory_descriptor
    lse: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor  # for each slot one tile of each consumer
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
    left_ptr: gl.tensor  # for each head: not 0 if do of some query tile is not weighted
    count_ptr: gl.tensor  # for each tile of queries: how many blocks of keys added to its dq
    n_heads: gl.tensor  # heads of keys, or if SHARED of queries
    n_q: gl.tensor
    n_k: gl.tensor
    n_items: gl.tensor
    n_whole: gl.tensor  # items that are not split
    n_pieces: gl.tensor  # pieces of each other item
    of_head: gl.tensor  # items of a head
    section: gl.tensor  # heads of keys that programs take in turn if ORDERED or RIGHT
    head_rows: gl.tensor  # padded rows of a head of queries
    left: gl.tensor
    right: gl.tensor
    HEAD_DIM: gl.constexpr
    GROUP: gl.constexpr  # heads of queries that a program walks for one head of keys
    SHARED: gl.constexpr  # heads that share one head of keys but have programs of their own, or 1
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
    LAST_FIRST: gl.constexpr  # programs take a head's last block of keys first

    @gluon.jit
    def item(self):
        """Returns the item of a program that is not persistent, of which it may have a piece."""
        program = gl.program_id(0)
        if self.SPLIT:
            # The division rounds towards zero, so a program with a whole item gets its own number.
            of_piece = self.n_whole + (program - self.n_whole) // self.n_pieces
            return gl.minimum(program, of_piece)
        else:
            return program

    @gluon.jit
    def block(self, item):
        """Returns an item's head of the batch and block of keys.

        It is computed again at each use: kept through the loop, both would spill.

        If ORDERED or RIGHT, programs take heads in sections, one block of each head in turn. If
        ORDERED, the next block of a head waits for this one, and so is launched later. If RIGHT,
        earlier blocks see more queries, so that the longest items are launched first.
        """
        item = opaque(item)
        if self.ORDERED or self.RIGHT:
            of_head = opaque(self.of_head)
            return block_in_turn(item, self.n_items, of_head, self.section, self.LAST_FIRST)
        else:
            return item // self.of_head, item % self.of_head

    @gluon.jit
    def place(self, item):
        """Returns an item's sample, head, and first key."""
        bh, block = self.block(item)
        return bh // self.n_heads, bh % self.n_heads, block * BLOCK_N

    @gluon.jit
    def turn(self, item):
        """Returns the slot of an item's keys, the slot's phase, and the program's earlier stages.

        All items walk equally many stages. That is why no program is persistent with n_keys.
        """
        if self.PERSISTENT:
            before = (opaque(item) - gl.program_id(0)) // gl.num_programs(0)
            slot, phase = ring(before, 2)
            return slot, phase, before * gl.cdiv(opaque(self.n_q), ROWS)
        else:
            return 0, 0, 0

    @gluon.jit
    def extent(self, item):
        """Returns the keys of an item's sample, the first stage of its walk, and its stages.

        They are opaque if there is a loop over items: hoisted out of it, they would spill.
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
        """Returns where an item lies, as eight numbers.

        They are its sample, its head of keys, its first key in the sequence; the sequence's first
        row of queries and their number; its first row of keys and their number; and its first row
        in a head's padded lse, delta and dq.
        """
        bh, tile = self.block(item)
        b = bh // self.n_heads
        key, first_q, n_rows, first_k, keys = place(
            tile, b, self.tiles_ptr, self.cu_q_ptr, self.cu_k_ptr, self.n_keys_ptr,
            opaque(self.n_q), opaque(self.n_k), BLOCK_N, self.PACKED, self.HAS_N_KEYS,
        )  # fmt: skip
        padded = 0
        if self.PACKED:
            # Each sequence begins with a tile of its own: no two sequences share one.
            s = gl.maximum(gl.load(self.tiles_ptr + 2 * tile), 0)
            padded = (first_q // ROWS + s) * ROWS
        return b, bh % self.n_heads, key, first_q, n_rows, first_k, keys, padded

    @gluon.jit
    def tiles(self, key, n_rows, keys):
        """Returns the first and the last + 1 of the query tiles that see any key from `key` on."""
        return query_tiles(
            key, n_rows, keys, self.left, self.right, BLOCK_N, ROWS, self.LEFT, self.RIGHT
        )

    @gluon.jit
    def count_of(self, padded):
        """Returns the address of the count of blocks that added to rows padded … padded + 63."""
        return self.count_ptr + padded // ROWS

    @gluon.jit
    def blocks_before(self, key, row, n_rows, keys):
        """Counts the blocks that add to dq of rows row … row + 63 before the block of `key`."""
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
        """Returns the i-th stage of a walk of n stages from `first` on: a tile of queries, and
        which of the heads that share the keys.

        The walk goes from the last queries back, all heads of a tile in turn. With a causal mask,
        blocks that begin together then meet the same tiles shortly after one another, and none
        catches up with a block that has more to walk.

        With a window it goes head by head. If LAST_FIRST, it goes from the first queries on: the
        blocks of a sequence's last keys have less to walk, go ahead in every head, and never wait.
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
        """Returns the first row of the first stage of a walk of rows begin … past − 1."""
        return begin if self.LAST_FIRST else past - ROWS

    @gluon.jit
    def row_after(self, i, row, begin, past):
        """Returns the first row of the stage after the i-th, which begins with `row`."""
        if self.LAST_FIRST:
            return gl.where(row + ROWS == past, begin, row + ROWS)
        elif self.LEFT:
            return gl.where(row == begin, past, row) - ROWS
        else:
            # Without `opaque`, ptxas of Triton 3.7 spills.
            return gl.where((i + 1) % self.GROUP == 0, opaque(row) - ROWS, row)

    @gluon.jit
    def walk_of(self, item):
        """Returns an item's first tile of queries, how many tiles it walks, its sequence's first
        row of queries, and the first row of its first head in the padded lse, delta and dq.
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
        """Returns the first row of an item's head in the padded lse, delta and dq."""
        b, h, _first_key = self.place(item)
        return (b * self.n_heads + h) * self.head_rows

    @gluon.jit
    def weighted(self, item):
        """Returns whether do is multiplied by 2^−lse in all query tiles of an item's head."""
        b, h, _first_key = self.place(item)
        return gl.load(self.left_ptr + b * self.n_heads + h) == 0.0
