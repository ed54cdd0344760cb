"""Pads rows of lse, delta and dq to whole tiles, on which Hopper's backward kernel works.

A row past the last query has an lse of +inf, and do is read as 0 there. So no loop over queries
needs a mask. Each packed sequence begins with a tile of its own.
"""

import triton
import triton.language as tl
from torch import Tensor

from tnp.dispatch.launcher import Bound
from tnp.dispatch.spec import Call
from tnp.ops.attention.keys import Tiles, place
from tnp.ops.attention.primitives import head_ptr, load_rows, row_strides, store_rows

TILE_ROWS = 64
AT_ONCE = tl.constexpr(1024)  # lse of its head that a program reads at a time
FAR = tl.constexpr(64.0)  # a tile stays as it was from this |lse| on, to base 2


@triton.jit
def _padded_tile(
    program, n_tiles, n_q, tiles_ptr, cu_q_ptr, cu_k_ptr, ROWS: tl.constexpr, PACKED: tl.constexpr
):  # fmt: skip
    """Returns a tile's first row, its sequence's end, and its number among padded tiles."""
    tile = program % n_tiles
    row, first_q, n_rows, _first_k, _keys = place(
        tile, 0, tiles_ptr, cu_q_ptr, cu_k_ptr, cu_k_ptr, n_q, n_q, ROWS, PACKED, False
    )
    at = program.to(tl.int64)
    if PACKED:
        s = tl.maximum(tl.load(tiles_ptr + 2 * tile), 0)
        at += (first_q // ROWS + s) + row // ROWS - tile
        return first_q + row, first_q + n_rows, at
    else:
        return row, n_q, at


@triton.jit(do_not_specialize=["n_q", "n_tiles"])
def _statistics_kernel(
    o_ptr, do_ptr, lse_ptr, dlse_ptr, padded_ptr, dq_ptr, weighted_ptr, count_ptr,
    tiles_ptr, cu_q_ptr, cu_k_ptr,
    stride_ob, stride_oh, stride_om,
    stride_dob, stride_doh, stride_dom,
    n_heads, n_q, n_tiles,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, PACKED: tl.constexpr, ORDERED: tl.constexpr,
    BASE2: tl.constexpr, HAS_DLSE: tl.constexpr,
):  # fmt: skip
    """Writes a query tile's padded lse and delta.

    HAS_DLSE: the gradient of lse is subtracted from delta. ORDERED: the tile's count of added
    blocks becomes 0; else its tile of dq becomes 0. BASE2: do is multiplied by 2^−lse, and the
    program of a head's first tile writes whether some tile of the head stays as it was.
    """
    pid_bh = tl.program_id(0) // n_tiles
    row, end, at = _padded_tile(
        tl.program_id(0), n_tiles, n_q, tiles_ptr, cu_q_ptr, cu_k_ptr, ROWS, PACKED
    )
    if PACKED and row >= end:  # this entry of the table belongs to no sequence
        return
    offs_m = row + tl.arange(0, ROWS)
    o_ptr = head_ptr(o_ptr, stride_ob, stride_oh, pid_bh, n_heads)
    do_ptr = head_ptr(do_ptr, stride_dob, stride_doh, pid_bh, n_heads)
    o = load_rows(o_ptr, offs_m, end, stride_om, HEAD_DIM, True).to(tl.float32)
    do = load_rows(do_ptr, offs_m, end, stride_dom, HEAD_DIM, True).to(tl.float32)
    lse_ptrs = lse_ptr + pid_bh.to(tl.int64) * n_q + offs_m
    lse = tl.load(lse_ptrs, mask=offs_m < end, other=float("inf"))
    padded = padded_ptr + at * ROWS + tl.arange(0, ROWS)
    rows = tl.num_programs(0).to(tl.int64) * ROWS
    delta = tl.sum(o * do, 1)
    if HAS_DLSE:
        dlse_ptrs = dlse_ptr + pid_bh.to(tl.int64) * n_q + offs_m
        dlse = tl.load(dlse_ptrs, mask=offs_m < end, other=0.0)
    if BASE2:
        near = (tl.abs(lse) < FAR) | (offs_m >= n_q)
        left = tl.max(tl.where(near, 0.0, 1.0), 0)
        if tl.program_id(0) % n_tiles == 0:
            some_left = tl.zeros([AT_ONCE], tl.float32)
            for start in tl.range(0, n_q, AT_ONCE):
                offs = start + tl.arange(0, AT_ONCE)
                of_head = lse_ptr + pid_bh.to(tl.int64) * n_q + offs
                others = tl.load(of_head, mask=offs < n_q, other=0.0)
                some_left = tl.where(tl.abs(others) < FAR, some_left, 1.0)
            tl.store(padded_ptr + 2 * rows + pid_bh, tl.max(some_left, 0))
        weight = tl.math.exp2(tl.where(left == 0.0, -lse, 0.0))  # past the end do is 0
        do = (do * weight[:, None]).to(weighted_ptr.dtype.element_ty)
        # Delta is computed from the rounded do: rows of the gradient of scores then sum to zero.
        delta = tl.sum(o * do.to(tl.float32), 1)
        if HAS_DLSE:
            dlse *= weight
        lse = tl.where(left == 0.0, 0.0, lse)
        offs = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        weighted = weighted_ptr + offs[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
        tl.store(weighted, do)
    if HAS_DLSE:
        delta -= dlse
    tl.store(padded, lse)
    tl.store(padded + rows, delta)
    if ORDERED:
        tl.store(count_ptr + at, 0)
    else:
        tile = dq_ptr + at * ROWS * HEAD_DIM
        offs = tl.arange(0, ROWS * HEAD_DIM)
        tl.store(tile + offs, tl.zeros([ROWS * HEAD_DIM], tl.float32))


@triton.jit(do_not_specialize=["n_q", "n_tiles"])
def _finish_dq_kernel(
    tile_ptr, dq_ptr, count_ptr, tiles_ptr, cu_q_ptr, cu_k_ptr,
    stride_dqb, stride_dqh, stride_dqm, n_heads, n_q, n_tiles, scale,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, PACKED: tl.constexpr, ORDERED: tl.constexpr,
):  # fmt: skip
    """Writes scaled dq from float32 tiles in the order of a matmul's registers.

    ORDERED: a tile without added blocks was never written, and is taken as 0.
    """
    pid_bh = tl.program_id(0) // n_tiles
    row, end, at = _padded_tile(
        tl.program_id(0), n_tiles, n_q, tiles_ptr, cu_q_ptr, cu_k_ptr, ROWS, PACKED
    )
    if PACKED and row >= end:
        return
    tile = tile_ptr + at * ROWS * HEAD_DIM
    # A register holds row 16·warp + 8·half + lane/4 and, in each 64 columns, column 8·block +
    # 2·(lane % 4) + pair.
    x = tl.load(tile + tl.arange(0, ROWS * HEAD_DIM)) * scale
    if ORDERED:
        x = tl.where(tl.load(count_ptr + at) > 0, x, 0.0)
    x = tl.reshape(x.to(dq_ptr.dtype.element_ty), [HEAD_DIM // 64, 8, 4, 8, 4, 2, 2])
    dq = tl.reshape(tl.permute(x, (2, 5, 3, 0, 1, 4, 6)), [ROWS, HEAD_DIM])
    dq_ptr = head_ptr(dq_ptr, stride_dqb, stride_dqh, pid_bh, n_heads)
    store_rows(dq_ptr, dq, row + tl.arange(0, ROWS), end, stride_dqm, HEAD_DIM)


class PaddedRows:
    """Holds the padded rows of a call, and the launches that fill and read them.

    Each head has `n` tiles of queries. A packed sequence has tiles of its own.
    """

    def __init__(self, call: Call) -> None:
        p = call.problem
        self.table = Tiles(call, "n_q", TILE_ROWS)
        self.packed = bool(p["n_sequences"])
        self.n = self.table.n
        self.of_head = self.n * TILE_ROWS
        self.n_all = self.n * p["batch"] * p["n_heads"]

    def statistics(
        self, o: Tensor, do: Tensor, *, ordered: bool = False, base2: bool = False,
        of_lse: bool = False,
    ) -> Bound:  # fmt: skip
        """Returns the launch that begins a backward pass, which takes these arguments:

        | argument | meaning |
        |---|---|
        | o, do, lse | o and lse of the forward pass, and the gradient of o |
        | dlse | the gradient of lse, if `of_lse` |
        | padded | written: padded lse, then delta, then if `base2` a number a head |
        | dq_tiles | become 0 if not `ordered` |
        | weighted | written if `base2`: do multiplied by 2^−lse |
        | counts | int32, one for each tile; become 0 if `ordered` |
        | tiles, cu_q, cu_k | the first three of `Tiles.pointers` |
        """
        _batch, n_heads, n_q, head_dim = o.shape
        return Bound(
            _statistics_kernel, (self.n_all,), *row_strides(o), *row_strides(do), n_heads, n_q,
            self.n, HEAD_DIM=head_dim, ROWS=TILE_ROWS, PACKED=self.packed, ORDERED=ordered,
            BASE2=base2, HAS_DLSE=of_lse,
        )  # fmt: skip

    def finish(self, q: Tensor, strides: tuple[int, ...], *, ordered: bool = False) -> Bound:
        """Returns the launch that writes dq.

        Call it with (dq_tiles, dq, counts, tiles, cu_q, cu_k, scale). It reads counts if `ordered`.
        The next three are the first of `Tiles.pointers`.
        """
        _batch, n_heads, n_q, head_dim = q.shape
        return Bound(
            _finish_dq_kernel, (self.n_all,), *strides, n_heads, n_q, self.n,
            HEAD_DIM=head_dim, ROWS=TILE_ROWS, PACKED=self.packed, ORDERED=ordered,
        )  # fmt: skip
