"""Attention backward for Hopper: what runs before, between and after its two kernels.

`separate` launches dK/dV (`hopper_dkdv`) and dQ (`hopper_dq`), without atomics and equal from run
to run. `fused` launches one kernel (`hopper_dkdv` with its dQ part), which adds dQ up in float32 in
device memory, in any order. ORDERED is that kernel with one order, which `separate` takes at D =
128 without a causal mask or a window. All start from the same statistics: delta = Σ_d do·o and lse
in rows padded to whole query tiles, where lse is +inf and do is read as 0, so that no loop over
queries needs a mask.

Where q carries scale·log2(e), `fused` multiplies do and delta of a query tile by 2^−lse, so that
its weights are 2^s as they are; its lse is then 0, past the last query too. A tile with a row whose
lse is not between −64 and 64 is left as it was: no weight overflows in bfloat16 in the others, and
what underflows is less than 2^−62.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tnp.contract import Call, Kernel, Problem, Reason
from tnp.launch import Bound
from tnp.ops.attention.definition import WITH_LSE
from tnp.ops.attention.hopper_dkdv import DkdvConfig, bound_dkdv
from tnp.ops.attention.hopper_dkdv_pipeline import BLOCK_N, PADDED_ROWS
from tnp.ops.attention.hopper_dq import DqConfig, bound_dq
from tnp.ops.attention.hopper_forward import section
from tnp.ops.attention.hopper_primitives import supported, without_reference
from tnp.ops.attention.keys import Tiles, place
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


@triton.jit
def _padded_tile(
    program, n_tiles, n_q, tiles_ptr, cu_q_ptr, cu_k_ptr, ROWS: tl.constexpr, PACKED: tl.constexpr
):  # fmt: skip
    """Of a program's tile of queries its first row, the last + 1 that it may have, and which tile
    of the padded rows it is, in which every sequence begins with a tile of its own.
    """
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
    o_ptr, do_ptr, lse_ptr, dlse_ptr, padded_ptr, dq_ptr, weighted_ptr, turn_ptr,
    tiles_ptr, cu_q_ptr, cu_k_ptr,
    stride_ob, stride_oh, stride_om,
    stride_dob, stride_doh, stride_dom,
    n_heads, n_q, n_tiles,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, PACKED: tl.constexpr, FUSED: tl.constexpr,
    ORDERED: tl.constexpr, BASE2: tl.constexpr, HAS_DLSE: tl.constexpr,
):  # fmt: skip
    """A query tile's lse, and delta less the gradient of lse if HAS_DLSE, padded; if FUSED its tile
    of dq becomes 0, and if ORDERED how many blocks of keys have added to it; if BASE2 do times
    2^−lse, and the first tile's program says whether some tile of the head was left as it was.
    """
    pid_bh = tl.program_id(0) // n_tiles
    row, end, at = _padded_tile(
        tl.program_id(0), n_tiles, n_q, tiles_ptr, cu_q_ptr, cu_k_ptr, ROWS, PACKED
    )
    if PACKED and row >= end:  # no sequence needs this entry of the table
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
        # Of do as it was rounded: rows of the gradient of scores then sum to zero.
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
    if FUSED:
        tile = dq_ptr + at * ROWS * HEAD_DIM
        offs = tl.arange(0, ROWS * HEAD_DIM)
        tl.store(tile + offs, tl.zeros([ROWS * HEAD_DIM], tl.float32))
    if ORDERED:
        tl.store(turn_ptr + at, 0)


@triton.jit(do_not_specialize=["n_q", "n_tiles"])
def _finish_dq_kernel(
    tile_ptr, dq_ptr, tiles_ptr, cu_q_ptr, cu_k_ptr,
    stride_dqb, stride_dqh, stride_dqm, n_heads, n_q, n_tiles, scale,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Scaled dq from float32 tiles in the order of a matmul's registers."""
    pid_bh = tl.program_id(0) // n_tiles
    row, end, at = _padded_tile(
        tl.program_id(0), n_tiles, n_q, tiles_ptr, cu_q_ptr, cu_k_ptr, ROWS, PACKED
    )
    if PACKED and row >= end:
        return
    tile = tile_ptr + at * ROWS * HEAD_DIM
    # Of each 64 columns, a register: row 16·warp + 8·half + lane/4, column 8·block + 2·(lane % 4) +
    # pair.
    x = tl.load(tile + tl.arange(0, ROWS * HEAD_DIM)) * scale
    x = tl.reshape(x.to(dq_ptr.dtype.element_ty), [HEAD_DIM // 64, 8, 4, 8, 4, 2, 2])
    dq = tl.reshape(tl.permute(x, (2, 5, 3, 0, 1, 4, 6)), [ROWS, HEAD_DIM])
    dq_ptr = head_ptr(dq_ptr, stride_dqb, stride_dqh, pid_bh, n_heads)
    store_rows(dq_ptr, dq, row + tl.arange(0, ROWS), end, stride_dqm, HEAD_DIM)


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


class PaddedRows:
    """Rows of lse, delta and dq's tiles of all heads, each head's in `n` tiles of queries: padded
    to a multiple of PADDED_ROWS, or where sequences are packed each with tiles of its own.
    """

    def __init__(self, call: Call) -> None:
        p = call.problem
        self.table = Tiles(call, "n_q", TILE_ROWS)
        self.packed = bool(p["n_sequences"])
        padded = triton.cdiv(p["n_q"], PADDED_ROWS.value) * (PADDED_ROWS.value // TILE_ROWS)
        self.n = self.table.n if self.packed else padded
        self.of_head = self.n * TILE_ROWS
        self.n_all = self.n * p["batch"] * p["n_heads"]

    def statistics(
        self, o: Tensor, do: Tensor, *, fused: bool, ordered: bool = False, base2: bool = False,
        of_lse: bool = False,
    ) -> Bound:  # fmt: skip
        """Of o, do, lse, its gradient if `of_lse`, a workspace of padded lse, delta and if `base2`
        a number a head, dq's tiles, which become 0 if `fused`, what do times 2^−lse goes to if
        `base2`, int32 of each tile that become 0 if `ordered`, and the first three of the table's
        pointers.
        """
        _batch, n_heads, n_q, head_dim = o.shape
        return Bound(
            _statistics_kernel, (self.n_all,), *row_strides(o), *row_strides(do), n_heads, n_q,
            self.n, HEAD_DIM=head_dim, ROWS=TILE_ROWS, PACKED=self.packed, FUSED=fused,
            ORDERED=ordered, BASE2=base2, HAS_DLSE=of_lse,
        )  # fmt: skip

    def finish(self, q: Tensor, strides: tuple[int, ...]) -> Bound:
        """Of dq's tiles, dq, the first three of the table's pointers, and scale."""
        _batch, n_heads, n_q, head_dim = q.shape
        return Bound(
            _finish_dq_kernel, (self.n_all,), *strides, n_heads, n_q, self.n,
            HEAD_DIM=head_dim, ROWS=TILE_ROWS, PACKED=self.packed,
        )  # fmt: skip


def _forms(call: Call) -> tuple[bool, ...]:
    """Whether programs may be persistent: not where samples walk unequal numbers of stages."""
    return (False,) if call.problem["n_keys"] else (False, True)


def separate_configs(call: Call) -> tuple[SeparateConfig, ...]:
    """Candidates, the default first."""
    if not plain(call.problem):
        n_stages = 2 if call.problem["head_dim"] == 128 else 4
        dkdv, dq = DkdvConfig(n_stages, 1, 240, False), DqConfig(64, n_stages, 240)
        return (SeparateConfig(dkdv, dq),)
    return tuple(
        SeparateConfig(dkdv, dq)
        for persistent in _forms(call)
        for dkdv in (DkdvConfig(4, 2, 240, persistent), DkdvConfig(4, 1, 240, persistent))
        for dq in (DqConfig(64, 4, 160), DqConfig(64, 8, 160))
    )


def fused_configs(call: Call) -> tuple[DkdvConfig, ...]:
    """Candidates, the default first."""
    if call.problem["head_dim"] == 128:
        return (DkdvConfig(2, 1, 208, False),)
    if not plain(call.problem):
        return (DkdvConfig(4, 1, 208, False),)
    forms = _forms(call) if call.problem["n_q"] < LONG_WALK else (False,)
    return tuple(DkdvConfig(4, 1, 208, persistent) for persistent in forms)


def plain(problem: Problem) -> bool:
    """Whether every query sees all keys of its sample, D = 64, and no heads share keys."""
    p = problem
    masked = p["causal"] or p["window"] or p["n_sequences"] or p["n_kv_heads"]
    return p["head_dim"] == 64 and not masked


def split(call: Call, config: DkdvConfig) -> tuple[int, int] | None:
    """How many items are whole, and in how many pieces each other one is; None where all are."""
    if config.persistent or call.problem["n_keys"] or not plain(call.problem):
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
    return 1, items, walked, PaddedRows(call).n_all / call.target.multiprocessors


def separate_counts(call: Call, config: SeparateConfig) -> tuple[float, ...]:
    """As of `fused`; and for dq query tiles of the busiest multiprocessor, and their key blocks."""
    n_tiles = n_query_tiles(call, config.dq.tile_rows)
    tiles = triton.cdiv(n_tiles, call.target.multiprocessors)
    blocks = triton.cdiv(call.problem["n_k"], config.dq.block_n)
    of_statistics = PaddedRows(call).n_all / call.target.multiprocessors
    return 1, *_items(call, config.dkdv), of_statistics, tiles, tiles * blocks


@backward
def prepare_separate(call, config, do, q, k, v, lengths, o, lse, dlse):
    """Statistics, dk and dv, and dq."""
    padded = PaddedRows(call)
    rows = padded.n_all * TILE_ROWS
    of_q, of_keys, of_statistics = rows_layout(q), KeyGradients(k, call.apart), flat(2 * rows)
    statistics_kernel = padded.statistics(o, do, fused=False, of_lse=dlse is not None)
    dkdv_kernel = bound_dkdv(call, q, k, padded.of_head, config.dkdv, fused=False)
    key_tiles = Tiles(call, "n_k", BLOCK_N.value)
    query_tiles = Tiles(call, "n_q", config.dq.tile_rows)
    # Tiles that all take as long need no sections: 1 % less time at 7 × 2,000 keys (H200).
    heads = 1 if plain(call.problem) else section(call)
    dq_kernel = bound_dq(call, q, k, query_tiles, padded.of_head, heads, config.dq)

    def launch(do, q, k, v, lengths, o, lse, dlse, scale):
        statistics = lse.new_empty_strided(*of_statistics)
        delta = statistics.narrow(0, rows, rows)
        of_queries = padded.table.pointers(lengths, lse)[:3]
        of_lse = lse if dlse is None else dlse
        statistics_kernel(o, do, lse, of_lse, statistics, statistics, do, lse, *of_queries)
        dk, dv = of_keys.allocate(k)
        scales = scale, scale * LOG2_E
        dkdv_kernel(
            q, do, k, v, statistics, delta, statistics, dk, dv,
            *key_tiles.pointers(lengths, lse), lse, lse, lse, *scales,
        )  # fmt: skip
        dq = q.new_empty_strided(*of_q)
        dq_kernel(q, do, k, v, dq, dq, statistics, *query_tiles.pointers(lengths, lse), *scales)
        return dq, dk, dv

    return launch


@backward
def prepare_fused(*arguments):
    """Statistics, dk and dv with dq added up on the way in any order, and dq's rows in place."""
    return _in_one_pass(*arguments, ordered=False)


@backward
def prepare_ordered(*arguments):
    """The same, dq added up in one order."""
    return _in_one_pass(*arguments, ordered=True)


def _in_one_pass(call, config, do, q, k, v, lengths, o, lse, dlse, *, ordered):
    batch, n_heads, n_q, head_dim = q.shape
    padded = PaddedRows(call)
    base2 = without_reference(call) and plain(call.problem)
    rows = padded.n_all * TILE_ROWS
    weighted_shape = batch, n_heads, padded.of_head, head_dim
    of_q, of_keys = rows_layout(q), KeyGradients(k, call.apart)
    n_of_tiles = rows * head_dim
    of_workspace = flat(n_of_tiles + 2 * rows + batch * n_heads)
    of_turns = flat(padded.n_all)
    statistics_kernel = padded.statistics(
        o, do, fused=True, ordered=ordered, base2=base2, of_lse=dlse is not None
    )
    pieces = None if ordered else split(call, config)
    kernel = bound_dkdv(
        call, q, k, padded.of_head, config, fused=True, ordered=ordered, base2=base2, split=pieces
    )
    key_tiles = Tiles(call, "n_k", BLOCK_N.value)
    if pieces:
        n_whole, n_pieces = pieces
        n_split = n_key_tiles(call, BLOCK_N.value) - n_whole
        of_pieces = flat(n_split * n_pieces * 2 * BLOCK_N.value * head_dim)
        add_pieces = Bound(
            _add_pieces_kernel, (n_split, BLOCK_N.value // PIECE_ROWS, 2),
            *of_keys.strides, n_heads, k.shape[2], n_whole, n_pieces,
            HEAD_DIM=head_dim, BLOCK_N=BLOCK_N.value, ROWS=PIECE_ROWS,
        )  # fmt: skip
    finish_kernel = padded.finish(q, of_q[1][:3])

    def launch(do, q, k, v, lengths, o, lse, dlse, scale):
        tiles = lse.new_empty_strided(*of_workspace)
        statistics = tiles.narrow(0, n_of_tiles, 2 * rows)
        delta = tiles.narrow(0, n_of_tiles + rows, rows)
        left = tiles.narrow(0, n_of_tiles + 2 * rows, batch * n_heads)
        weighted = do.new_empty(weighted_shape) if base2 else do
        turns = lse.new_empty_strided(*of_turns, dtype=torch.int32) if ordered else lse
        of_queries = padded.table.pointers(lengths, lse)[:3]
        of_lse = lse if dlse is None else dlse
        statistics_kernel(o, do, lse, of_lse, statistics, tiles, weighted, turns, *of_queries)
        dk, dv = of_keys.allocate(k)
        of_split = lse.new_empty_strided(*of_pieces) if pieces else lse
        kernel(
            q, weighted, k, v, statistics, delta, tiles, dk, dv,
            *key_tiles.pointers(lengths, lse), left, of_split, turns, scale, scale * LOG2_E,
        )  # fmt: skip
        if pieces:
            add_pieces(of_split, dk, dv)
        dq = q.new_empty_strided(*of_q)
        finish_kernel(tiles, dq, *of_queries, scale)
        return dq, dk, dv

    return launch


def _ordered_supported(call: Call) -> Reason:
    p = call.problem
    if p["causal"] or p["window"] or p["head_dim"] == 64:
        return "it is for D = 128 without a causal mask or a window, where it was the faster"
    return supported(call)


ORDERED = Kernel(
    "hopper_ordered", empty_backward, prepare_ordered, _ordered_supported, fused_configs,
    WITH_LSE, counts=fused_counts,
)  # fmt: skip
SEPARATE = Kernel(
    "hopper", empty_backward, prepare_separate, supported, separate_configs, WITH_LSE,
    counts=separate_counts,
)  # fmt: skip
FUSED = Kernel(
    "hopper", empty_backward, prepare_fused, supported, fused_configs, WITH_LSE,
    moving=("dq",), counts=fused_counts,
)  # fmt: skip
