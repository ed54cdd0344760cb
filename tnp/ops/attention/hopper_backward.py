"""Attention backward for Hopper: what runs before, between and after its two kernels.

`separate` launches dK/dV (`hopper_dkdv`) and dQ (`hopper_dq`), without atomics and equal from run
to run. `fused` launches one kernel (`hopper_dkdv` with its dQ part), which adds dQ up in float32 in
device memory. Both start from the same statistics: delta = Σ_d do·o and lse in rows padded to whole
query tiles, where lse is +inf and do is read as 0, so that no loop over queries needs a mask.

Where q carries scale·log2(e), `fused` multiplies do and delta of a query tile by 2^−lse, so that
its weights are 2^s as they are; its lse is then 0, past the last query too. A tile with a row whose
lse is not between −64 and 64 is left as it was: no weight overflows in bfloat16 in the others, and
what underflows is less than 2^−62.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from tnp.contract import Call, Kernel
from tnp.launch import Bound
from tnp.ops.attention.definition import OPTIONS
from tnp.ops.attention.hopper_dkdv import DkdvConfig, bound_dkdv
from tnp.ops.attention.hopper_dkdv_pipeline import BLOCK_N, PADDED_ROWS
from tnp.ops.attention.hopper_dq import TILE_ROWS as DQ_ROWS
from tnp.ops.attention.hopper_dq import DqConfig, bound_dq
from tnp.ops.attention.hopper_primitives import supported_at_64, without_reference
from tnp.ops.attention.primitives import (
    LOG2_E,
    KeyGradients,
    backward,
    empty_backward,
    flat,
    head_ptr,
    load_rows,
    n_key_tiles,
    n_query_tiles,
    row_strides,
    rows_layout,
    store_rows,
)

TILE_ROWS = 64
# Queries from which on programs of `fused` are not persistent. They are level at 11,000, and
# persistent ones take 2 % more time at 205,000, or 5 % where q carries the scale (H200).
LONG_WALK = 16_384
# What a piece of a split item costs beside its query tiles, in tiles (5.5 µs on an H200), and how
# many tiles of the busiest multiprocessor splitting must save: pieces are added up by a launch.
PIECE_TILES, MIN_TILES_SAVED = 6, 16
# And what share of them: of long walks pieces are many, and their sums take memory.
MIN_SHARE_SAVED = 0.01
MAX_PIECES = 16
PIECE_ROWS = 32  # that a program adds up
AT_ONCE = tl.constexpr(1024)  # lse that a program reads of its head
FAR = tl.constexpr(64.0)  # |lse| to base 2 from which on a tile is left as it was


@dataclass(frozen=True)
class SeparateConfig:
    """One configuration a launch."""

    dkdv: DkdvConfig
    dq: DqConfig


@triton.jit(do_not_specialize=["n_q"])
def _statistics_kernel(
    o_ptr, do_ptr, lse_ptr, padded_ptr, dq_ptr, weighted_ptr,
    stride_ob, stride_oh, stride_om,
    stride_dob, stride_doh, stride_dom,
    n_heads, n_q,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, PADDED_ROWS: tl.constexpr, FUSED: tl.constexpr,
    BASE2: tl.constexpr,
):  # fmt: skip
    """A query tile's lse and delta, padded; if FUSED its tile of dq becomes 0; if BASE2 do times
    2^−lse, and the first tile's program says whether some tile of the head was left as it was.
    """
    n_tiles = tl.cdiv(n_q, PADDED_ROWS) * (PADDED_ROWS // ROWS)
    pid_bh = tl.program_id(0) // n_tiles
    offs_m = tl.program_id(0) % n_tiles * ROWS + tl.arange(0, ROWS)
    o_ptr = head_ptr(o_ptr, stride_ob, stride_oh, pid_bh, n_heads)
    do_ptr = head_ptr(do_ptr, stride_dob, stride_doh, pid_bh, n_heads)
    o = load_rows(o_ptr, offs_m, n_q, stride_om, HEAD_DIM, True).to(tl.float32)
    do = load_rows(do_ptr, offs_m, n_q, stride_dom, HEAD_DIM, True).to(tl.float32)
    lse_ptrs = lse_ptr + pid_bh.to(tl.int64) * n_q + offs_m
    lse = tl.load(lse_ptrs, mask=offs_m < n_q, other=float("inf"))
    padded = padded_ptr + tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    rows = tl.num_programs(0).to(tl.int64) * ROWS
    delta = tl.sum(o * do, 1)
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
        # Of do as it was rounded: rows of the gradient of scores then sum to zero.
        delta = tl.sum(o * do.to(tl.float32), 1)
        lse = tl.where(left == 0.0, 0.0, lse)
        offs = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        weighted = weighted_ptr + offs[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
        tl.store(weighted, do)
    tl.store(padded, lse)
    tl.store(padded + rows, delta)
    if FUSED:
        tile = dq_ptr + tl.program_id(0).to(tl.int64) * ROWS * HEAD_DIM
        offs = tl.arange(0, ROWS * HEAD_DIM)
        tl.store(tile + offs, tl.zeros([ROWS * HEAD_DIM], tl.float32))


@triton.jit(do_not_specialize=["n_q"])
def _finish_dq_kernel(
    tile_ptr, dq_ptr, stride_dqb, stride_dqh, stride_dqm, n_heads, n_q, scale,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, PADDED_ROWS: tl.constexpr,
):  # fmt: skip
    """Scaled dq from float32 tiles in the order of a matmul's registers."""
    n_tiles = tl.cdiv(n_q, PADDED_ROWS) * (PADDED_ROWS // ROWS)
    pid_bh = tl.program_id(0) // n_tiles
    offs_m = tl.program_id(0) % n_tiles * ROWS + tl.arange(0, ROWS)
    tile = tile_ptr + tl.program_id(0).to(tl.int64) * ROWS * HEAD_DIM
    # Of a register: row 16·warp + 8·half + lane/4, column 8·block + 2·(lane % 4) + pair.
    x = tl.load(tile + tl.arange(0, ROWS * HEAD_DIM)) * scale
    x = tl.reshape(x.to(dq_ptr.dtype.element_ty), [8, 4, 8, 4, 2, 2])
    dq = tl.reshape(tl.permute(x, (1, 4, 2, 0, 3, 5)), [ROWS, HEAD_DIM])
    dq_ptr = head_ptr(dq_ptr, stride_dqb, stride_dqh, pid_bh, n_heads)
    store_rows(dq_ptr, dq, offs_m, n_q, stride_dqm, HEAD_DIM)


@triton.jit(do_not_specialize=["n_k", "n_whole", "n_pieces"])
def _add_pieces_kernel(
    piece_ptr, dk_ptr, dv_ptr, stride_b, stride_h, stride_n, n_heads, n_k, n_whole, n_pieces,
    HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rows of dv and dk of a split item, from its pieces in turn."""
    split, at = tl.program_id(0), tl.program_id(2)
    offs_row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    offs = offs_row[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    for piece in tl.range(split * n_pieces, (split + 1) * n_pieces):
        acc += tl.load(piece_ptr + (2 * piece + at) * (BLOCK_N * HEAD_DIM) + offs)
    n_blocks = tl.cdiv(n_k, BLOCK_N)
    item = n_whole + split
    if at == 0:
        out_ptr = head_ptr(dv_ptr, stride_b, stride_h, item // n_blocks, n_heads)
    else:
        out_ptr = head_ptr(dk_ptr, stride_b, stride_h, item // n_blocks, n_heads)
    store_rows(out_ptr, acc, item % n_blocks * BLOCK_N + offs_row, n_k, stride_n, HEAD_DIM)


def _n_tiles(call: Call) -> int:
    """Query tiles of all heads, each head's padded to PADDED_ROWS."""
    rows = PADDED_ROWS.value
    return n_query_tiles(call, rows) * (rows // TILE_ROWS)


def _bound_statistics(
    call: Call, o: Tensor, do: Tensor, *, fused: bool, base2: bool = False
) -> Bound:
    """Of o, do, lse, a workspace of padded lse, delta and if `base2` a number a head, dq's tiles,
    which become 0 if `fused`, and what do times 2^−lse goes to if `base2`.
    """
    _batch, n_heads, n_q, head_dim = o.shape
    return Bound(
        _statistics_kernel, (_n_tiles(call),), *row_strides(o), *row_strides(do), n_heads, n_q,
        HEAD_DIM=head_dim, ROWS=TILE_ROWS, PADDED_ROWS=PADDED_ROWS.value, FUSED=fused,
        BASE2=base2,
    )  # fmt: skip


def _forms(call: Call) -> tuple[bool, ...]:
    """Whether programs may be persistent: not where samples walk unequal numbers of stages."""
    return (False,) if call.problem["n_keys"] else (False, True)


def separate_configs(call: Call) -> tuple[SeparateConfig, ...]:
    """Candidates, the default first."""
    return tuple(
        SeparateConfig(dkdv, dq)
        for persistent in _forms(call)
        for dkdv in (DkdvConfig(4, 2, 240, persistent), DkdvConfig(4, 1, 240, persistent))
        for dq in (DqConfig(64, 4, 160), DqConfig(64, 8, 160))
    )


def fused_configs(call: Call) -> tuple[DkdvConfig, ...]:
    """Candidates, the default first."""
    forms = _forms(call) if call.problem["n_q"] < LONG_WALK else (False,)
    return tuple(DkdvConfig(4, 1, 208, persistent) for persistent in forms)


def split(call: Call, config: DkdvConfig) -> tuple[int, int] | None:
    """How many items are whole, and in how many pieces each other one is; None where all are."""
    if config.persistent or call.problem["n_keys"]:
        return None
    programs = call.target.multiprocessors
    n_whole, n_last = divmod(n_key_tiles(call, BLOCK_N.value), programs)
    items, busiest = _items(call, config)
    walked = busiest // items

    def tiles(n_pieces: int) -> int:
        """Of the busiest multiprocessor in the last rounds."""
        each = triton.cdiv(walked, n_pieces) + PIECE_TILES
        return triton.cdiv(n_last * n_pieces, programs) * each

    n_pieces = min(range(1, min(MAX_PIECES, walked) + 1), key=tiles)
    saved = tiles(1) - tiles(n_pieces)
    if saved < max(MIN_TILES_SAVED, MIN_SHARE_SAVED * busiest):
        return None
    return n_whole * programs, n_pieces


def _items(call: Call, config: DkdvConfig) -> tuple[int, int]:
    """Items of the busiest multiprocessor, and query tiles that it walks for them."""
    items = triton.cdiv(n_key_tiles(call, BLOCK_N.value), call.target.multiprocessors)
    walked = triton.cdiv(call.problem["n_q"], config.tiles * TILE_ROWS) * config.tiles
    return items, items * walked


def fused_counts(call: Call, config: DkdvConfig) -> tuple[float, ...]:
    """A launch, items and pieces of the busiest multiprocessor, query tiles that it walks for them,
    and tiles of the statistics on average.
    """
    items, walked = _items(call, config)
    found = split(call, config)
    if found:
        n_whole, n_pieces = found
        programs, of_one = call.target.multiprocessors, walked // items
        pieces = triton.cdiv((n_key_tiles(call, BLOCK_N.value) - n_whole) * n_pieces, programs)
        items = n_whole // programs + pieces
        walked = n_whole // programs * of_one + pieces * triton.cdiv(of_one, n_pieces)
    return 1, items, walked, _n_tiles(call) / call.target.multiprocessors


def separate_counts(call: Call, config: SeparateConfig) -> tuple[float, ...]:
    """As of `fused`; and for dq query tiles of the busiest multiprocessor, and their key blocks."""
    tiles = triton.cdiv(n_query_tiles(call, DQ_ROWS.value), call.target.multiprocessors)
    blocks = triton.cdiv(call.problem["n_k"], config.dq.block_n)
    of_statistics = _n_tiles(call) / call.target.multiprocessors
    return 1, *_items(call, config.dkdv), of_statistics, tiles, tiles * blocks


@backward
def prepare_separate(call, config, do, q, k, v, lengths, o, lse):
    """Statistics, dk and dv, and dq."""
    counted, rows = lengths[0] is not None, _n_tiles(call) * TILE_ROWS
    of_q, of_keys, of_statistics = rows_layout(q), KeyGradients(k, call.apart), flat(2 * rows)
    statistics_kernel = _bound_statistics(call, o, do, fused=False)
    dkdv_kernel = bound_dkdv(
        q, k, counted, rows, config.dkdv, call.target.multiprocessors, fused=False,
        apart=call.apart,
    )  # fmt: skip
    dq_kernel = bound_dq(q, k, counted, config.dq, call.target.multiprocessors)

    def launch(do, q, k, v, lengths, o, lse, scale):
        statistics = lse.new_empty_strided(*of_statistics)
        delta = statistics.narrow(0, rows, rows)
        statistics_kernel(o, do, lse, statistics, statistics, do)
        dk, dv = of_keys.allocate(k)
        n_keys = lse if lengths[0] is None else lengths[0]
        scales = scale, scale * LOG2_E
        dkdv_kernel(q, do, k, v, statistics, delta, statistics, dk, dv, n_keys, lse, lse, *scales)
        dq = q.new_empty_strided(*of_q)
        dq_kernel(q, do, k, v, dq, statistics, n_keys, *scales)
        return dq, dk, dv

    return launch


@backward
def prepare_fused(call, config, do, q, k, v, lengths, o, lse):
    """Statistics, dk and dv with dq added up on the way, and dq put in order."""
    batch, n_heads, n_q, head_dim = q.shape
    n_tiles, base2 = _n_tiles(call), without_reference(call)
    rows = n_tiles * TILE_ROWS
    padded = batch, n_heads, rows // (batch * n_heads), head_dim
    of_q, of_keys = rows_layout(q), KeyGradients(k, call.apart)
    n_of_tiles = rows * head_dim
    of_workspace = flat(n_of_tiles + 2 * rows + batch * n_heads)
    statistics_kernel = _bound_statistics(call, o, do, fused=True, base2=base2)
    pieces = split(call, config)
    kernel = bound_dkdv(
        q, k, lengths[0] is not None, rows, config, call.target.multiprocessors, fused=True,
        base2=base2, apart=call.apart, split=pieces,
    )  # fmt: skip
    if pieces:
        n_whole, n_pieces = pieces
        n_split = n_key_tiles(call, BLOCK_N.value) - n_whole
        of_pieces = flat(n_split * n_pieces * 2 * BLOCK_N.value * head_dim)
        add_pieces = Bound(
            _add_pieces_kernel, (n_split, BLOCK_N.value // PIECE_ROWS, 2),
            *of_keys.strides, n_heads, k.shape[2], n_whole, n_pieces,
            HEAD_DIM=head_dim, BLOCK_N=BLOCK_N.value, ROWS=PIECE_ROWS,
        )  # fmt: skip
    finish_kernel = Bound(
        _finish_dq_kernel, (n_tiles,), *of_q[1][:3], n_heads, n_q,
        HEAD_DIM=head_dim, ROWS=TILE_ROWS, PADDED_ROWS=PADDED_ROWS.value,
    )  # fmt: skip

    def launch(do, q, k, v, lengths, o, lse, scale):
        tiles = lse.new_empty_strided(*of_workspace)
        statistics = tiles.narrow(0, n_of_tiles, 2 * rows)
        delta = tiles.narrow(0, n_of_tiles + rows, rows)
        left = tiles.narrow(0, n_of_tiles + 2 * rows, batch * n_heads)
        weighted = do.new_empty(padded) if base2 else do
        statistics_kernel(o, do, lse, statistics, tiles, weighted)
        dk, dv = of_keys.allocate(k)
        n_keys = lse if lengths[0] is None else lengths[0]
        of_split = lse.new_empty_strided(*of_pieces) if pieces else lse
        kernel(
            q, weighted, k, v, statistics, delta, tiles, dk, dv, n_keys, left, of_split, scale,
            scale * LOG2_E,
        )  # fmt: skip
        if pieces:
            add_pieces(of_split, dk, dv)
        dq = q.new_empty_strided(*of_q)
        finish_kernel(tiles, dq, scale)
        return dq, dk, dv

    return launch


SEPARATE = Kernel(
    "hopper", empty_backward, prepare_separate, supported_at_64, separate_configs, OPTIONS,
    counts=separate_counts,
)  # fmt: skip
FUSED = Kernel(
    "hopper", empty_backward, prepare_fused, supported_at_64, fused_configs, OPTIONS,
    moving=("dq",), counts=fused_counts,
)  # fmt: skip
