"""What the partitions of `hopper_dkdv` share: memory and barriers, and what a program works on."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from tnp.ops.attention.hopper_dkdv_walk import ROWS
from tnp.ops.attention.hopper_primitives import ring
from tnp.ops.hopper_primitives import opaque

BLOCK_N = gl.constexpr(128)
# A head's rows of lse, delta and dq's tiles are padded to a multiple of this.
PADDED_ROWS = gl.constexpr(128)


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
    full: gl.shared_memory_descriptor  # TILES query tiles: q, do, lse, delta
    empty: gl.shared_memory_descriptor
    ds_full: gl.shared_memory_descriptor
    ds_empty: gl.shared_memory_descriptor
    n_heads: gl.tensor
    n_q: gl.tensor
    n_k: gl.tensor
    n_items: gl.tensor
    n_whole: gl.tensor  # items that are not split
    n_pieces: gl.tensor  # of each of the others
    n_keys_ptr: gl.tensor
    left_ptr: gl.tensor  # of each head, whether do of some query tile is as it was
    STAGES: gl.constexpr
    TILES: gl.constexpr
    HAS_N_KEYS: gl.constexpr
    FUSED: gl.constexpr
    PERSISTENT: gl.constexpr
    BASE2: gl.constexpr
    SPLIT: gl.constexpr
    APART: gl.constexpr  # dk and dv are [B, n_k, H, D] each, not halves of [B, n_k, 2, H, D]

    @gluon.constexpr_function
    def __init__(
        self, q, do, lse, delta, k, v, ds, dq, key_full, key_empty, full, empty, ds_full, ds_empty,
        n_heads, n_q, n_k, n_items, n_whole, n_pieces, n_keys_ptr, left_ptr,
        STAGES, TILES, HAS_N_KEYS, FUSED, PERSISTENT, BASE2, SPLIT, APART,
    ):  # fmt: skip
        self.q, self.do, self.lse, self.delta = q, do, lse, delta
        self.k, self.v, self.ds, self.dq = k, v, ds, dq
        self.key_full, self.key_empty = key_full, key_empty
        self.full, self.empty = full, empty
        self.ds_full, self.ds_empty = ds_full, ds_empty
        self.n_heads, self.n_q, self.n_k = n_heads, n_q, n_k
        self.n_items, self.n_whole, self.n_pieces = n_items, n_whole, n_pieces
        self.n_keys_ptr, self.left_ptr = n_keys_ptr, left_ptr
        self.STAGES, self.TILES = gl.constexpr(STAGES), gl.constexpr(TILES)
        self.HAS_N_KEYS = gl.constexpr(HAS_N_KEYS)
        self.FUSED = gl.constexpr(FUSED)
        self.PERSISTENT, self.BASE2 = gl.constexpr(PERSISTENT), gl.constexpr(BASE2)
        self.SPLIT, self.APART = gl.constexpr(SPLIT), gl.constexpr(APART)

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
    def place(self, item):
        """Sample, head, and first key of an item: kept through the loop they would spill."""
        item = opaque(item)
        n_blocks = gl.cdiv(opaque(self.n_k), BLOCK_N)
        bh = item // n_blocks
        return bh // self.n_heads, bh % self.n_heads, item % n_blocks * BLOCK_N

    @gluon.jit
    def turn(self, item):
        """The slot of an item's keys and its phase, and the stages of the program before it.

        Every item walks as many stages, which is why a program is not persistent given n_keys.
        """
        if self.PERSISTENT:
            before = (opaque(item) - gl.program_id(0)) // gl.num_programs(0)
            slot, phase = ring(before, 2)
            return slot, phase, before * gl.cdiv(opaque(self.n_q), self.TILES * ROWS)
        else:
            return 0, 0, 0

    @gluon.jit
    def extent(self, item):
        """Keys of an item's sample, the stage that its walk begins with, and how many it has.

        Opaque where there is a loop over items, out of which they would be hoisted and spill.
        """
        keys = opaque(self.n_k) if self.PERSISTENT else self.n_k
        n_stages = gl.cdiv(opaque(self.n_q) if self.PERSISTENT else self.n_q, self.TILES * ROWS)
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
    def first_row(self, item):
        """Of an item's head in the padded lse, delta and dq."""
        b, h, _first_key = self.place(item)
        return (b * self.n_heads + h) * gl.cdiv(self.n_q, PADDED_ROWS) * PADDED_ROWS

    @gluon.jit
    def weighted(self, item):
        """Whether do is times 2^−lse in all query tiles of an item's head."""
        b, h, _first_key = self.place(item)
        return gl.load(self.left_ptr + b * self.n_heads + h) == 0.0
