"""Answers which keys a query sees, for all kernels.

A sequence has n_q queries and n_keys keys. Query i is beside key i + n_keys − n_q, so that the last
query is beside the last key. It sees the keys from `left` before to `right` after that key:

    i + n_keys − n_q − left  ≤  j  ≤  i + n_keys − n_q + right,    0 ≤ j < n_keys

Causal attention has right = 0. A window of w keys has left = w − 1, and without `causal` also
right = w − 1. A side's flag is a constant, so that a side without a bound costs a kernel nothing.

Packed sequences lie one after the other in the rows of one sample. Sequence s has queries in rows
cu_seqlens_q[s] … cu_seqlens_q[s + 1] − 1, and keys likewise. A tile of rows has one sequence.
A table holds the sequence of each tile, and where in it the tile begins. A pack with invalid
cu_seqlens is taken as one sequence, so that no kernel leaves its rows. Its results are NaN.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from tnp.dispatch.launcher import Bound
from tnp.dispatch.spec import Call, Problem
from tnp.ops._shared.primitives import key_count
from tnp.ops.attention.torch_forms import bounded

AT_ONCE = tl.constexpr(64)  # sequences, and tiles, that a program of the table reads at a time


@dataclass(frozen=True)
class Reach:
    """Says how far a problem's queries see. A side is bounded if its flag is set."""

    left: int = 0
    right: int = 0
    bounded_left: bool = False
    bounded_right: bool = False

    @classmethod
    def of(cls, problem: Problem) -> "Reach":
        """Returns the reach that the problem's options `causal` and `window` give."""
        causal = bool(problem["causal"])
        window = bounded(int(problem["window"]), problem["n_q"], problem["n_k"])
        left = window - 1 if window else 0
        right = 0 if causal else left
        return cls(left, right, bool(window), causal or bool(window))

    @property
    def numbers(self) -> tuple[int, int]:
        """Returns `left` and `right`, as kernels take them."""
        return self.left, self.right

    @property
    def constants(self) -> dict[str, bool]:
        """Returns the flags by the names that kernels have for them."""
        return {"LEFT": self.bounded_left, "RIGHT": self.bounded_right}


def all_seen(problem: Problem) -> bool:
    """Returns whether every query sees all keys of its sample."""
    return not (problem["n_sequences"] or problem["causal"] or problem["window"])


@triton.jit
def key_range(
    row, n_q, n_keys, left, right, ROWS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr
):
    """Returns the keys that queries row … row + ROWS − 1 see, as four numbers.

    They are the first key that any of them sees, the first and the last + 1 of the keys that all of
    them see, and the last + 1 that any sees.
    """
    beside = row + n_keys - n_q  # the key beside the first row
    begin = 0
    full_begin = 0
    if LEFT:
        begin = tl.maximum(beside - left, 0)
        full_begin = tl.maximum(beside + ROWS - 1 - left, 0)
    end = n_keys
    full_end = n_keys
    if RIGHT:
        end = tl.maximum(tl.minimum(beside + ROWS + right, n_keys), 0)
        full_end = tl.maximum(tl.minimum(beside + right + 1, n_keys), 0)
    return begin, full_begin, full_end, end


@triton.jit
def query_range(
    key, n_q, n_keys, left, right, KEYS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr
):
    """Returns the queries that see keys key … key + KEYS − 1, as four numbers.

    They are the first query that sees any of them, the first and the last + 1 of the queries that
    see all of them, and the last + 1 that sees any.
    """
    beside = key - (n_keys - n_q)  # the query beside the first key
    begin = 0
    full_begin = 0
    if RIGHT:
        begin = tl.maximum(beside - right, 0)
        full_begin = tl.maximum(beside + KEYS - 1 - right, 0)
    end = n_q
    full_end = n_q
    if LEFT:
        end = tl.maximum(tl.minimum(beside + KEYS + left, n_q), 0)
        full_end = tl.maximum(tl.minimum(beside + left + 1, n_q), 0)
    end = tl.where(key < n_keys, end, 0)  # no query sees keys past the end
    return begin, full_begin, full_end, end


@triton.jit
def query_tiles(
    key, n_q, n_keys, left, right,
    KEYS: tl.constexpr, ROWS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """Returns the first and last + 1 tile of ROWS queries that see keys key … key + KEYS − 1."""
    begin, _full_begin, _full_end, end = query_range(
        key, n_q, n_keys, left, right, KEYS, LEFT, RIGHT
    )
    first = begin // ROWS
    return first, tl.maximum(tl.cdiv(end, ROWS), first)


@triton.jit
def blocks_before(
    key, row, n_q, n_keys, left, right,
    KEYS: tl.constexpr, ROWS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """Counts the blocks before the block of `key` that queries row … row + ROWS − 1 see."""
    before = key // KEYS
    if LEFT:
        begin, _full_begin, _full_end, _end = key_range(
            row, n_q, n_keys, left, right, ROWS, LEFT, RIGHT
        )
        before -= begin // KEYS
    return before


@triton.jit
def blocks_after(
    key, row, n_q, n_keys, left, right,
    KEYS: tl.constexpr, ROWS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """Counts the blocks after the block of `key` that queries row … row + ROWS − 1 see."""
    _begin, _full_begin, _full_end, end = key_range(
        row, n_q, n_keys, left, right, ROWS, LEFT, RIGHT
    )
    return tl.cdiv(end, KEYS) - 1 - key // KEYS


@triton.jit
def block_in_turn(item, n_items, of_head, section, LAST_FIRST: tl.constexpr):
    """Returns an item's head and block of keys. A head has `of_head` of the n_items items.
    Heads are taken in sections, one block of each head in turn, from the first block or the last.
    """
    begin = item // (of_head * section) * section
    of_section = tl.minimum(section, n_items // of_head - begin)
    at = item - begin * of_head
    block = at // of_section
    if LAST_FIRST:
        block = of_head - 1 - block
    return begin + at % of_section, block


@triton.jit
def whole_blocks(begin, full_begin, full_end, end, BLOCK: tl.constexpr):
    """Returns where a range's first block begins, and where its unmasked blocks begin and end."""
    first = begin // BLOCK * BLOCK
    last = first + tl.cdiv(tl.maximum(end - first, 0), BLOCK) * BLOCK
    full_first = tl.minimum(tl.cdiv(full_begin, BLOCK) * BLOCK, last)
    full_last = tl.maximum(full_end // BLOCK * BLOCK, full_first)
    return first, full_first, full_last


@triton.jit
def seen(queries, keys, n_q, n_keys, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Returns whether each of `queries` sees each of `keys`: indices that broadcast to a tile.

    It compares with each query's first and last key, which are not whole tiles.
    """
    beside = queries + (n_keys - n_q)
    visible = keys <= tl.minimum(beside + right, n_keys - 1) if RIGHT else keys < n_keys
    if LEFT:
        visible = visible & (keys >= beside - left)
    return visible


@triton.jit
def place(
    tile, b, tiles_ptr, cu_q_ptr, cu_k_ptr, n_keys_ptr, n_q, n_k,
    ROWS: tl.constexpr, PACKED: tl.constexpr, HAS_N_KEYS: tl.constexpr,
):  # fmt: skip
    """Returns where a tile of ROWS rows lies, as five numbers.

    They are its first row in its sequence; the first row of the sequence's queries and their
    number; the first row of its keys and their number.
    """
    if PACKED:
        s = tl.load(tiles_ptr + 2 * tile)
        row = tl.load(tiles_ptr + 2 * tile + 1)
        exists = s >= 0
        s = tl.maximum(s, 0)
        first_q, first_k = tl.load(cu_q_ptr + s), tl.load(cu_k_ptr + s)
        rows = tl.where(exists, tl.load(cu_q_ptr + s + 1) - first_q, 0)
        keys = tl.where(exists, tl.load(cu_k_ptr + s + 1) - first_k, 0)
        return row, first_q, rows, first_k, keys
    else:
        return tile * ROWS, 0, n_q, 0, key_count(n_keys_ptr, b, n_k, HAS_N_KEYS)


@triton.jit(do_not_specialize=["n_sequences", "n_tiles", "n_q", "n_k"])
def _tiles_kernel(
    tiles_ptr, used_q_ptr, used_k_ptr, n_keys_ptr, cu_q_ptr, cu_k_ptr, n_sequences, n_tiles, n_q,
    n_k, ROWS: tl.constexpr, OF_KEYS: tl.constexpr,
):  # fmt: skip
    """Writes each tile's sequence and its first row in it, with −1 past the last tile.

    There is a program for each sequence. With a causal mask, a tile of queries takes longer the
    more tiles of its sequence come before it, and a tile of keys the more come after it. The table
    is sorted by that number, so that equally long tiles follow one another, whatever their
    sequences. Tiles of queries begin with the shortest, because kernels take them from the last
    back. Tiles of keys begin with the longest.

    Only the device knows what cu_seqlens hold. Attention reads the copies in `used_q` and `used_k`.
    If the numbers are invalid, the copies name one sequence of all rows, and `n_keys` becomes 0, so
    that the forward pass makes the results NaN. Else it becomes n_k.
    """
    s = tl.program_id(0)
    wrong = _cannot_be(cu_q_ptr, n_sequences, n_q) | _cannot_be(cu_k_ptr, n_sequences, n_k)
    if s == 0:
        tl.store(used_q_ptr, 0)
        tl.store(used_k_ptr, 0)
        tl.store(n_keys_ptr, tl.where(wrong, 0, n_k))
    tl.store(used_q_ptr + s + 1, _used(cu_q_ptr, s + 1, n_sequences, n_q, wrong))
    tl.store(used_k_ptr + s + 1, _used(cu_k_ptr, s + 1, n_sequences, n_k, wrong))
    cu_ptr, n_rows = (cu_k_ptr, n_k) if OF_KEYS else (cu_q_ptr, n_q)
    n_own = _n_tiles(cu_ptr, s, n_sequences, n_rows, wrong, ROWS)
    for start in tl.range(0, n_own, AT_ONCE):
        tile = start + tl.arange(0, AT_ONCE)
        number = n_own - 1 - tile if OF_KEYS else tile
        place = tl.zeros([AT_ONCE], tl.int32)
        for others in tl.range(0, n_sequences, AT_ONCE):
            at = others + tl.arange(0, AT_ONCE)
            n = _n_tiles(cu_ptr, at, n_sequences, n_rows, wrong, ROWS)[None, :]
            if OF_KEYS:
                before = tl.maximum(n - 1 - number[:, None], 0)
            else:
                before = tl.minimum(n, number[:, None])
            equal = (at < s)[None, :] & (n > number[:, None])
            place += tl.sum(before + equal.to(tl.int32), 1)
        tl.store(tiles_ptr + 2 * place, s, mask=tile < n_own)
        tl.store(tiles_ptr + 2 * place + 1, tile * ROWS, mask=tile < n_own)
    if s == n_sequences - 1:
        last = 0
        for start in tl.range(0, n_sequences, AT_ONCE):
            at = start + tl.arange(0, AT_ONCE)
            last += tl.sum(_n_tiles(cu_ptr, at, n_sequences, n_rows, wrong, ROWS))
        for start in tl.range(last, n_tiles, AT_ONCE):
            tile = start + tl.arange(0, AT_ONCE)
            tl.store(tiles_ptr + 2 * tile, -1, mask=tile < n_tiles)
            tl.store(tiles_ptr + 2 * tile + 1, 0, mask=tile < n_tiles)


@triton.jit
def _cannot_be(cu_ptr, n_sequences, n_rows):
    """Returns whether sequences fail to follow one another from row 0 to the last of n_rows."""
    wrong = (tl.load(cu_ptr) != 0) | (tl.load(cu_ptr + n_sequences) != n_rows)
    for start in tl.range(0, n_sequences, AT_ONCE):
        at = start + tl.arange(0, AT_ONCE)
        begin = tl.load(cu_ptr + at, mask=at < n_sequences, other=0)
        end = tl.load(cu_ptr + at + 1, mask=at < n_sequences, other=0)
        wrong |= tl.max((begin > end).to(tl.int32), 0) > 0
    return wrong


@triton.jit
def _used(cu_ptr, at, n_sequences, n_rows, wrong):
    """Returns number `at` of cu_seqlens, or of one sequence of all rows if they are `wrong`."""
    given = tl.load(cu_ptr + at, mask=at <= n_sequences, other=0)
    return tl.where(wrong, tl.where(at > 0, n_rows, 0), given)


@triton.jit
def _n_tiles(cu_ptr, at, n_sequences, n_rows, wrong, ROWS: tl.constexpr):
    """Returns how many tiles the sequences `at` have; 0 past the last sequence."""
    begin = _used(cu_ptr, at, n_sequences, n_rows, wrong)
    end = _used(cu_ptr, at + 1, n_sequences, n_rows, wrong)
    return tl.where(at < n_sequences, tl.cdiv(end - begin, ROWS), 0)


def n_tiles(n_rows: int, rows: int, n_sequences: int) -> int:
    """Returns the most tiles of `rows` that a head's rows have.

    Each tile belongs to one of `n_sequences` packed sequences. With 0 the rows are not packed.
    """
    return n_rows // rows + n_sequences if n_sequences else triton.cdiv(n_rows, rows)


def lengths_given(call: Call) -> dict[str, bool]:
    """Returns which lengths a call has, by the names that kernels have for them."""
    p = call.problem
    return {"HAS_N_KEYS": bool(p["n_keys"]), "PACKED": bool(p["n_sequences"])}


class Tiles:
    """Fills the table of tiles [n, 2], int32, of packed rows. Does nothing if rows are not packed.

    Args:
        call: the call to serve.
        side: "n_q" for tiles of queries, "n_k" for tiles of keys.
        rows: rows of a tile.
    """

    def __init__(self, call: Call, side: str, rows: int) -> None:
        p = call.problem
        n_sequences = int(p["n_sequences"])
        self.n = n_tiles(p[side], rows, n_sequences)
        # The table, both cu_seqlens and a number of keys, each padded to a multiple of 16 bytes.
        counts = 2 * self.n, n_sequences + 1, n_sequences + 1, 1
        self._parts = [-(-count // 4) * 4 for count in counts]
        self._size = sum(self._parts)
        self._fill = Bound(
            _tiles_kernel, (n_sequences,), n_sequences, self.n, p["n_q"], p["n_k"], ROWS=rows,
            OF_KEYS=side == "n_k",
        ) if n_sequences else None  # fmt: skip

    def pointers(self, lengths: tuple, otherwise: Tensor) -> tuple[Tensor, ...]:
        """Returns the tensors that `place` reads: the table, cu_seqlens of both sides, and n_keys.

        For packed rows n_keys is one number: n_k, or 0 if cu_seqlens are invalid.

        Args:
            lengths: n_keys, cu_seqlens_q and cu_seqlens_k, each perhaps None.
            otherwise: a tensor to return in place of every tensor that no kernel reads.
        """
        n_keys, cu_q, cu_k = lengths
        if self._fill is None:
            return otherwise, otherwise, otherwise, otherwise if n_keys is None else n_keys
        filled = cu_q.new_empty(self._size).split_with_sizes(self._parts)
        self._fill(*filled, cu_q, cu_k)
        return filled
