"""Prepares attention backward for Hopper: the launches around the kernel of `dkdv`.

`fused` adds dq up in float32 in device memory, in any order. `separate` adds it up in one order, so
that dq is equal from run to run. Both first compute delta = Σ_d do·o and lse in padded rows
(`padded_rows`).

Heads of queries may share keys. If few programs would then have work, each head gets programs of
its own (`ByHead`), and another launch adds up their dk and dv.

If q carries scale·log2(e), do and delta of a query tile are multiplied by 2^−lse. The weights are
then 2^s, and the tile's lse is 0, past the last query too. A tile stays as it was if some row's lse
is not between −64 and 64. In the other tiles no weight overflows in bfloat16, and a weight that
underflows is less than 2^−62.
"""

from dataclasses import astuple, replace

import torch
import triton
import triton.language as tl

from tnp.dispatch.launcher import Bound
from tnp.dispatch.spec import Call, Kernel, Problem, Reason
from tnp.ops.attention.definition import WITH_LSE, n_kv_heads
from tnp.ops.attention.hopper.dkdv import ByHead, DkdvConfig, bound_dkdv
from tnp.ops.attention.hopper.dkdv_pipeline import BLOCK_N, heads_in_turn
from tnp.ops.attention.hopper.padded_rows import TILE_ROWS, PaddedRows
from tnp.ops.attention.hopper.primitives import supported, without_reference
from tnp.ops.attention.keys import Tiles, all_seen, block_in_turn, n_tiles
from tnp.ops.attention.primitives import (
    LOG2_E,
    KeyGradients,
    backward,
    empty_backward,
    flat,
    head_ptr,
    n_key_tiles,
    of_all_seen,
    rows_layout,
    store_rows,
)

# From this many queries on, programs of `fused` are not persistent. At 11,000 queries both forms
# are equally fast. At 205,000, persistent programs take 2 % more time, or 5 % if q carries the
# scale (H200).
LONG_WALK = 16_384
# PIECE_TILES: a piece of a split item costs as much as its own query tiles and so many more (5.5 µs
# on an H200). MIN_TILES_SAVED: splitting must save the busiest multiprocessor so many tiles,
# because another launch adds up the pieces.
PIECE_TILES, MIN_TILES_SAVED = 6, 16
# Splitting must also save this share of them: long walks have many pieces, whose sums take memory.
MIN_SHARE_SAVED = 0.01
MAX_PIECES = 16
PIECE_ROWS = 32  # rows that a program adds up
# The most bytes that the heads' shares of dk and dv may take in float32: 16,000 keys of 32 heads at
# D = 64.
MOST_SHARES = 1 << 28


@triton.jit(do_not_specialize=["n_k", "n_items", "n_whole", "n_pieces", "section"])
def _add_pieces_kernel(
    piece_ptr, dk_ptr, dv_ptr, stride_b, stride_h, stride_n,
    n_heads, n_k, n_items, n_whole, n_pieces, section,
    HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Writes rows of dv and dk of a split item: the sum of its pieces, in order."""
    split, at = tl.program_id(0), tl.program_id(2)
    offs_row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    offs = offs_row[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    for piece in tl.range(split * n_pieces, (split + 1) * n_pieces):
        acc += tl.load(piece_ptr + (2 * piece + at) * (BLOCK_N * HEAD_DIM) + offs)
    of_head = tl.cdiv(n_k, BLOCK_N)
    bh, block = block_in_turn(n_whole + split, n_items, of_head, section, False)
    if at == 0:
        out_ptr = head_ptr(dv_ptr, stride_b, stride_h, bh, n_heads)
    else:
        out_ptr = head_ptr(dk_ptr, stride_b, stride_h, bh, n_heads)
    store_rows(out_ptr, acc, block * BLOCK_N + offs_row, n_k, stride_n, HEAD_DIM)


@triton.jit(do_not_specialize=["batch", "n_k"])
def _add_shares_kernel(
    share_ptr, dk_ptr, dv_ptr, stride_b, stride_h, stride_n, batch, n_k,
    N_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Writes rows of dk and dv: the sum of the shares [2, B, n_k, H, D] of all heads, in order."""
    first, bh, at = tl.program_id(0) * ROWS, tl.program_id(1), tl.program_id(2)
    n_kv_heads: tl.constexpr = N_HEADS // GROUP
    b, h = bh // n_kv_heads, bh % n_kv_heads
    rows = first + tl.arange(0, ROWS)
    of_row = ((at * batch + b).to(tl.int64) * n_k + rows) * N_HEADS + h * GROUP
    offs = of_row[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    for member in tl.static_range(GROUP):
        share = share_ptr + offs + member * HEAD_DIM
        acc += tl.load(share, mask=(rows < n_k)[:, None], other=0.0)
    if at == 0:
        out_ptr = head_ptr(dk_ptr, stride_b, stride_h, bh, n_kv_heads)
    else:
        out_ptr = head_ptr(dv_ptr, stride_b, stride_h, bh, n_kv_heads)
    store_rows(out_ptr, acc, rows, n_k, stride_n, HEAD_DIM)


def by_head(call: Call) -> Reason:
    """Returns why a program walks the queries of all heads that share its keys, or None.

    None means that each head gets programs of its own: the longest walk would else take longer than
    all walks spread evenly over the GPU.
    """
    p = call.problem
    if reason := supported(call):
        return reason
    if n_kv_heads(p) == p["n_heads"]:
        return "it is for heads that share keys"
    items = n_tiles(p["n_k"], BLOCK_N.value, int(p["n_sequences"])) * p["batch"] * n_kv_heads(p)
    # The average walk's length over the longest walk's. Under a causal mask it is a half. With 0.6
    # instead, 4,096 tokens of Llama 3 8B's heads (256 items for 132 multiprocessors) get no
    # programs of each head. With them `fused` took 0.649 ms and `separate` 0.848; without them, at
    # 4,097 tokens, 0.626 and 0.697 (H200).
    share = 0.6 if p["causal"] and not p["window"] else 1.0
    if share * items >= call.target.multiprocessors:
        return (
            "it is for few keys: with more keys, programs of all heads that share them fill the GPU"
        )
    shares = 2 * 4 * p["batch"] * p["n_k"] * p["n_heads"] * p["head_dim"]
    if shares > MOST_SHARES:
        return f"the heads' shares of dk and dv would take {shares:,} bytes"
    return None


def separate_configs(call: Call) -> tuple[DkdvConfig, ...]:
    """Returns the candidates, the default first. None is persistent: each program has one item."""
    one = DkdvConfig(2 if call.problem["head_dim"] == 128 else 4, 208, persistent=False)
    return (one,) if by_head(call) else (ByHead(*astuple(one)), one)


def fused_configs(call: Call) -> tuple[DkdvConfig, ...]:
    """Returns the candidates, the default first. One is persistent if items are equally long."""
    found = separate_configs(call)
    p = call.problem
    if plain(p) and not p["n_keys"] and p["n_q"] < LONG_WALK:
        found += (replace(found[0], persistent=True),)
    return found


def plain(problem: Problem) -> bool:
    """Returns whether every query sees all keys of its sample, D is 64, and no heads share keys."""
    return problem["head_dim"] == 64 and all_seen(problem) and not problem["n_kv_heads"]


def split(call: Call, config: DkdvConfig) -> tuple[int, int] | None:
    """Returns how many items stay whole, and in how many pieces the others are split, or None."""
    if config.persistent or call.problem["n_keys"] or not plain(call.problem):
        return None
    programs = call.target.multiprocessors
    n_whole, n_last = divmod(n_key_tiles(call, BLOCK_N.value), programs)
    items, busiest = _items(call)
    walked = busiest // items

    def tiles(n_pieces: int) -> int:
        """Returns the query tiles of the busiest multiprocessor in the last rounds."""
        each = triton.cdiv(walked, n_pieces) + PIECE_TILES
        return triton.cdiv(n_last * n_pieces, programs) * each

    n_pieces = min(range(1, min(MAX_PIECES, walked) + 1), key=tiles)
    saved = tiles(1) - tiles(n_pieces)
    if saved < max(MIN_TILES_SAVED, MIN_SHARE_SAVED * busiest):
        return None
    return n_whole * programs, n_pieces


def _items(call: Call) -> tuple[int, int]:
    """Returns the items of the busiest multiprocessor, and the query tiles that it walks."""
    items = triton.cdiv(n_key_tiles(call, BLOCK_N.value), call.target.multiprocessors)
    return items, items * triton.cdiv(call.problem["n_q"], TILE_ROWS)


@of_all_seen
def item_counts(call: Call, config: DkdvConfig) -> tuple[float, ...]:
    """Returns what a launch's time is made of: see `Kernel.counts`.

    These are the launch, the items and pieces of the busiest multiprocessor, the query tiles that
    it walks for them, and the average tiles of the statistics.
    """
    items, walked = _items(call)
    found = split(call, config)
    if found:
        n_whole, n_pieces = found
        programs, of_one = call.target.multiprocessors, walked // items
        pieces = triton.cdiv((n_key_tiles(call, BLOCK_N.value) - n_whole) * n_pieces, programs)
        items = n_whole // programs + pieces
        walked = n_whole // programs * of_one + pieces * triton.cdiv(of_one, n_pieces)
    return 1, items, walked, PaddedRows(call).n_all / call.target.multiprocessors


@backward
def prepare_fused(*arguments):
    """Prepares the statistics, dk and dv with dq added up in any order, and the rows of dq."""
    return _prepare(*arguments, ordered=False)


@backward
def prepare_separate(*arguments):
    """Prepares the statistics, dk and dv with dq added up in one order, and the rows of dq."""
    return _prepare(*arguments, ordered=True)


def _prepare(call, config, do, q, k, v, lengths, o, lse, dlse, *, ordered):
    batch, n_heads, n_q, head_dim = q.shape
    padded = PaddedRows(call)
    base2 = without_reference(call) and plain(call.problem)
    rows = padded.n_all * TILE_ROWS
    weighted_shape = batch, n_heads, padded.of_head, head_dim
    of_q, of_keys = rows_layout(q), KeyGradients(k, call.apart)
    n_of_tiles = rows * head_dim
    of_workspace = flat(n_of_tiles + 2 * rows + batch * n_heads)
    of_counts = flat(padded.n_all)
    statistics_kernel = padded.statistics(
        o, do, ordered=ordered, base2=base2, of_lse=dlse is not None
    )
    pieces = split(call, config)
    kernel = bound_dkdv(
        call, q, k, padded.of_head, config, ordered=ordered, base2=base2, split=pieces
    )
    key_tiles = Tiles(call, "n_k", BLOCK_N.value)
    if pieces:
        n_whole, n_pieces = pieces
        n_items = n_key_tiles(call, BLOCK_N.value)
        n_split, heads = n_items - n_whole, batch * n_heads
        section = heads_in_turn(call, n_items // heads, heads) if ordered else 1
        of_pieces = flat(n_split * n_pieces * 2 * BLOCK_N.value * head_dim)
        add_pieces = Bound(
            _add_pieces_kernel, (n_split, BLOCK_N.value // PIECE_ROWS, 2),
            *of_keys.strides, n_heads, k.shape[2], n_items, n_whole, n_pieces, section,
            HEAD_DIM=head_dim, BLOCK_N=BLOCK_N.value, ROWS=PIECE_ROWS,
        )  # fmt: skip
    if config.by_head:
        n_kv_heads, n_k = k.shape[1:3]
        of_shares = (2, batch * n_k * n_heads * head_dim), (batch * n_k * n_heads * head_dim, 1)
        add_shares = Bound(
            _add_shares_kernel, (triton.cdiv(n_k, PIECE_ROWS), batch * n_kv_heads, 2),
            *of_keys.strides, batch, n_k, N_HEADS=n_heads, GROUP=n_heads // n_kv_heads,
            HEAD_DIM=head_dim, ROWS=PIECE_ROWS,
        )  # fmt: skip
    finish_kernel = padded.finish(q, of_q[1][:3], ordered=ordered)

    def launch(do, q, k, v, lengths, o, lse, dlse, scale):
        tiles = lse.new_empty_strided(*of_workspace)
        statistics = tiles.narrow(0, n_of_tiles, 2 * rows)
        delta = tiles.narrow(0, n_of_tiles + rows, rows)
        left = tiles.narrow(0, n_of_tiles + 2 * rows, batch * n_heads)
        weighted = do.new_empty(weighted_shape) if base2 else do
        counts = lse.new_empty_strided(*of_counts, dtype=torch.int32) if ordered else lse
        of_queries = padded.table.pointers(lengths, lse)[:3]
        of_lse = lse if dlse is None else dlse
        statistics_kernel(o, do, lse, of_lse, statistics, tiles, weighted, counts, *of_queries)
        dk, dv = of_keys.allocate(k)
        of_split = lse.new_empty_strided(*of_pieces) if pieces else lse
        shares = lse.new_empty_strided(*of_shares) if config.by_head else (dk, dv)
        kernel(
            q, weighted, k, v, statistics, delta, tiles, shares[0], shares[1],
            *key_tiles.pointers(lengths, lse), left, of_split, counts, scale, scale * LOG2_E,
        )  # fmt: skip
        if pieces:
            add_pieces(of_split, dk, dv)
        if config.by_head:
            add_shares(shares, dk, dv)
        dq = q.new_empty_strided(*of_q)
        finish_kernel(tiles, dq, counts, *of_queries, scale)
        return dq, dk, dv

    return launch


SEPARATE = Kernel(
    "hopper", empty_backward, prepare_separate, supported, separate_configs, WITH_LSE,
    counts=item_counts,
)  # fmt: skip

FUSED = Kernel(
    "hopper", empty_backward, prepare_fused, supported, fused_configs, WITH_LSE,
    nondeterministic=("dq",), counts=item_counts,
)  # fmt: skip
